"""Weights as safetensors: written under one plan, read by `weights=` and by transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from exactness import case, engine_for, setting, solved_plan
from safetensors import safe_open

from autopar.errors import AutoparError
from autopar.ir.mesh import MeshShape
from autopar.ir.plan import Plan
from autopar.runtime.engine import Engine

TP2, ONE = MeshShape(tp=2), MeshShape()


def plan_for(name: str, mesh: MeshShape) -> Plan:
    found = case(name)
    return solved_plan(found.traced, found.annotator, setting(mesh))


def exported(rank: int, name: str, text: str, directory: str) -> tuple[dict, str]:
    engine = engine_for(name, Plan.from_json(text))
    engine.step(case(name).batches[0])
    engine.export(Path(directory, "one"))
    engine.export(Path(directory, "several"), torch.float32, max_file_bytes=20_000)
    try:
        engine.export(Path(directory, "one"))
        message = "no error"
    except AutoparError as error:
        message = str(error)
    return engine.full_state_dict(), message


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in directory.glob("*.safetensors"):
        with safe_open(file, "pt") as reader:
            assert reader.metadata() == {"format": "pt"}
            found |= {name: reader.get_tensor(name) for name in reader.keys()}
    return found


@pytest.mark.slow
def test_exported_weights_are_read_again(pool2, tmp_path):
    name = "hf-gpt2"  # tied, its fused projections sharded in sections
    results = pool2.run(exported, name, plan_for(name, TP2).to_json(), str(tmp_path))
    state = results[0][0]
    for _, message in results:
        assert "it exists and is not an empty directory" in message
    one, several = tensors(tmp_path / "one"), tensors(tmp_path / "several")
    assert [file.name for file in (tmp_path / "one").iterdir()] == ["model.safetensors"]
    assert set(state) - set(one) == {"lm_head.weight"} and all(torch.equal(one[k], state[k]) for k in one)
    assert set(several) == set(one) and all(torch.equal(several[k], state[k].float()) for k in one)
    index = json.loads((tmp_path / "several/model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(one) and len(set(index["weight_map"].values())) > 2
    found = case(name)
    for directory, expected in (("one", state), ("several", {k: v.float().double() for k, v in state.items()})):
        again = Engine(found.model, found.traced, plan_for(name, ONE), None, None, tmp_path / directory, "cpu").full_state_dict()
        assert all(torch.equal(again[k], v) for k, v in expected.items())
    found.model.config.save_pretrained(tmp_path / "several")
    model = type(found.model).from_pretrained(tmp_path / "several", dtype=torch.float32)
    assert all(torch.equal(v, state[k].float()) for k, v in model.state_dict().items())


def test_export_into_nowhere(tmp_path):
    (tmp_path / "file").write_text("")
    engine = engine_for("gpt-tiny", plan_for("gpt-tiny", ONE))
    with pytest.raises(AutoparError, match="cannot export to .*below: NotADirectoryError"):
        engine.export(tmp_path / "file/below")
    with pytest.raises(AutoparError, match="max_file_bytes=0"):
        engine.export(tmp_path / "new", max_file_bytes=0)
