"""Weights as safetensors: written under one plan, read by `weights=` and by transformers."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from support.exactness import case, engine_for, setting, solved_plan
from torch import nn

import autopar
from autopar.errors import AutoparError
from autopar.ir.mesh import MeshShape
from autopar.ir.plan import Plan
from autopar.runtime.checkpoint.checkpoint import Checkpoints
from autopar.runtime.engine import Engine
from autopar.runtime.state.weights import Weights

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
            found |= {name: reader.get_tensor(name) for name in list(reader.keys())}
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
    assert set(state) - set(one) == {"lm_head.weight"} and all(
        torch.equal(one[k], state[k]) for k in one
    )
    assert set(several) == set(one) and all(torch.equal(several[k], state[k].float()) for k in one)
    index = json.loads((tmp_path / "several/model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(one) and len(set(index["weight_map"].values())) > 2
    found = case(name)
    for directory, expected in (
        ("one", state),
        ("several", {k: v.float().double() for k, v in state.items()}),
    ):
        weights = Weights(tmp_path / directory, found.model, found.traced.parameters)
        again = Engine(
            found.model, found.traced, plan_for(name, ONE), None, None, weights, "cpu"
        ).full_state_dict()
        assert all(torch.equal(again[k], v) for k, v in expected.items())
    found.model.config.save_pretrained(tmp_path / "several")
    model = type(found.model).from_pretrained(tmp_path / "several", dtype=torch.float32)
    assert all(torch.equal(v, state[k].float()) for k, v in model.state_dict().items())


def test_export_into_nowhere(tmp_path):
    (tmp_path / "file").write_text("")
    engine = engine_for("gpt-tiny", plan_for("gpt-tiny", ONE))
    with pytest.raises(AutoparError, match=r"cannot export to .*below: NotADirectoryError"):
        engine.export(tmp_path / "file/below")
    with pytest.raises(AutoparError, match="max_file_bytes=0"):
        engine.export(tmp_path / "new", max_file_bytes=0)


def exported_beside_saves(rank: int, text: str, directory: str) -> list[str]:
    """Another engine saves, and this one exports, while saves of this one are under way, each of which begins late."""
    write, order = Checkpoints._write, []

    def late(self, path: Path, *args) -> Path:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.5)
        found = write(self, path, *args)
        order.append(path.name)
        return found

    Checkpoints._write = late
    try:
        one, other = (engine_for("llama-tiny", Plan.from_json(text)) for _ in range(2))
        saving = one.save(Path(directory, "one"), asynchronous=True)
        one.export(Path(directory, "exported"))
        order.append("exported")
        one.save(Path(directory, "two"), asynchronous=True)
        other.save(Path(directory, "other"))
        other.save(Path(directory, "three"), asynchronous=True)
        one.save(Path(directory, "four"), asynchronous=True).wait()
        assert saving.done
        return order
    finally:
        Checkpoints._write = write


def test_one_save_or_export_at_a_time(pool2, tmp_path):
    orders = pool2.run(
        exported_beside_saves, plan_for("llama-tiny", TP2).to_json(), str(tmp_path), timeout_s=60
    )
    assert orders == [["one", "exported", "two", "other", "three", "four"]] * 2
    assert tensors(tmp_path / "exported")


class Gains(nn.Module):
    """`reset_parameters` initializes what `sets` names."""

    def __init__(self, sets: tuple[str, ...]) -> None:
        super().__init__()
        self.sets, self.weight, self.gain = (
            sets,
            nn.Parameter(torch.empty(4, 4)),
            nn.Parameter(torch.ones(4)),
        )
        self.register_buffer("scale", torch.full((4,), 2.0))
        self.register_buffer("order", torch.arange(4))

    def reset_parameters(self) -> None:
        fresh = {
            "weight": torch.randn(4, 4),
            "gain": torch.ones(4),
            "scale": torch.full((4,), 2.0),
            "order": torch.arange(4),
        }
        for name in self.sets:
            with torch.no_grad():
                getattr(self, name).copy_(fresh[name])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x[:, self.order] @ self.weight * self.gain * self.scale).pow(2).mean()


@pytest.mark.parametrize("left", ["weight", "gain", "scale", "order", ""])
def test_a_meta_model_whose_initializer_leaves_something_out_is_refused(left):
    sets = tuple(name for name in ("weight", "gain", "scale", "order") if name != left)
    with torch.device("meta"):
        model = Gains(sets)
    batch = {"x": torch.ones(2, 4)}
    if left:
        with pytest.raises(AutoparError, match=f"Gains.reset_parameters left {left} uninitialized"):
            autopar.parallelize(model, "cpu:1", batch)
    else:
        state = autopar.parallelize(model, "cpu:1", batch).full_state_dict()
        assert (
            state["order"].tolist() == [0, 1, 2, 3]
            and state["scale"].tolist() == [2.0] * 4
            and state["weight"].isfinite().all()
        )
