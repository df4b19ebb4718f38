"""Checkpoints with published names: read by `weights=`, every tensor is that of `from_pretrained`, under every layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.captures import captured_once
from support.exactness import sgd
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError
from autopar.models.hf import HFSpec
from autopar.models.hf_weights import recipes
from autopar.runtime.state.materialize import initialized
from autopar.runtime.state.weight_files import WeightFiles
from autopar.runtime.state.weights import Weights
from autopar.trace.capture import parameter_specs
from benchmarks.exactness.model_zoo import CONFIGS

transformers = pytest.importorskip("transformers")
MORE = {
    "qwen3_moe": {**CONFIGS["qwen2_moe"], "model_type": "qwen3_moe"},
    "deepseek_v2": {**CONFIGS["deepseek_v3"], "model_type": "deepseek_v2", "topk_method": "greedy"},
}
FAMILIES = {
    **{name: config for name, config in CONFIGS.items() if isinstance(config, dict)},
    **MORE,
}
LAYOUTS = ({"tp": 2}, {"dp": 2, "ep": 2, "zero": 3, "micro_batch": 2}, {"pp": 2})


@pytest.fixture(autouse=True)
def quiet():
    transformers.utils.logging.disable_progress_bar()
    yield
    transformers.utils.logging.enable_progress_bar()


def spec_of(name: str) -> HFSpec:
    return HFSpec.from_dict(name, FAMILIES[name])


def published(name: str, directory: Path, largest: str = "60KB") -> nn.Module:
    """Save a model as it is published, in several files with an index, and return what transformers reads again."""
    torch.manual_seed(0)
    built = spec_of(name).build("meta")
    model: Any = type(built)(type(built.config).from_dict(dict(FAMILIES[name])))
    model.save_pretrained(directory, max_shard_size=largest)
    return type(model).from_pretrained(directory)


def read(model: nn.Module, directory: Path) -> dict[str, Tensor]:
    """All tensors of a model that the files have."""
    files = WeightFiles(directory)
    made, unexpected = recipes(model, files.shapes())
    assert unexpected == []
    return {name: t for each in made for name, t in each.convert(each.sources, files).items()}


def edited(directory: Path, change) -> None:
    """Write the one file of a directory again, its tensors changed."""
    tensors = load_file(directory / "model.safetensors")
    save_file(change(tensors), directory / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_read_as_transformers_reads_it(name, tmp_path):
    state = published(name, tmp_path).state_dict()
    found = read(spec_of(name).build("meta"), tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    tied = {t.data_ptr() for key, t in state.items() if key in found}
    assert all(key in found or t.data_ptr() in tied for key, t in state.items())
    assert all(torch.equal(t, state[key]) for key, t in found.items())


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v2"])
def test_a_rank_reads_its_experts_alone(name, tmp_path):
    state, files, opened = published(name, tmp_path).state_dict(), WeightFiles(tmp_path), []
    made, _ = recipes(spec_of(name).build("meta"), files.shapes())
    of_experts = [each for each in made if each.rows]
    assert {len(each.sources) for each in of_experts} == {8, 16}
    for recipe in of_experts:
        rows, (target, shape) = [2, 3, 7], *recipe.shapes.items()
        opened.clear()
        found = recipe.convert(
            recipe.sources_of_rows(rows), lambda key: (opened.append(key), files(key))[1]
        )
        assert torch.equal(found[target], state[target][rows]) and shape == state[target].shape
        assert len(opened) == recipe.rows * 3 and all(key in recipe.sources for key in opened)


@captured_once()
def loaded(rank: int, name: str, directory: str, layouts: tuple) -> list[dict[str, Tensor]]:
    batch, states = spec_of(name).example_inputs(4, 16, "cpu"), []
    for pin in layouts:
        model = spec_of(name).build("meta")
        engine = autopar.parallelize(
            model, "cpu:2", batch, sgd, pin=pin, precision="fp32", weights=directory
        )
        states.append(engine.full_state_dict())
    return states


@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        pytest.param("mixtral", LAYOUTS[1:2], marks=pytest.mark.slow),
        *(
            pytest.param(name, LAYOUTS, marks=pytest.mark.slow)
            for name in ("mixtral", "qwen3_moe", "deepseek_v2", "gpt_oss")
        ),
    ],
)
def test_parameters_are_those_of_from_pretrained(name, layouts, pool2, tmp_path):
    state = published(name, tmp_path).state_dict()
    for states in pool2.run(loaded, name, str(tmp_path), layouts):
        for found in states:
            assert found.keys() >= {key for key in state if "rotary" not in key}
            assert all(torch.equal(found[key], t) for key, t in state.items())


@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral", "bert"])
def test_the_prefix_of_the_base_model_may_be_missing(name, tmp_path):
    state = published(name, tmp_path, "1GB").state_dict()
    model: Any = spec_of(name).build("meta")
    prefix = model.base_model_prefix + "."
    edited(tmp_path, lambda tensors: {key.removeprefix(prefix): t for key, t in tensors.items()})
    assert all(torch.equal(t, state[key]) for key, t in read(model, tmp_path).items())


class Scored(nn.Module):
    """A published model in a module of the user's."""

    def __init__(self, language: nn.Module) -> None:
        super().__init__()
        self.language = language

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return self.language(input_ids=input_ids, labels=labels).loss


@pytest.mark.parametrize("with_path", [False, True])
def test_a_model_in_a_module_is_read_with_and_without_its_path(with_path, tmp_path):
    state = published("mixtral", tmp_path, "1GB").state_dict()
    if with_path:
        edited(tmp_path, lambda tensors: {f"language.{key}": t for key, t in tensors.items()})
    found = read(Scored(spec_of("mixtral").build("meta")), tmp_path)
    assert found.keys() == {f"language.{key}" for key in state}
    assert all(torch.equal(found[f"language.{key}"], t) for key, t in state.items())


def in_fp8(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Linear weights in fp8 with a scale for each block of 8 by 8, as DeepSeek publishes them."""
    made = {}
    for name, tensor in tensors.items():
        if "experts" in name or "_proj" in name:
            made[name] = tensor.to(torch.float8_e4m3fn)
            made[f"{name}_scale_inv"] = torch.rand(tensor.shape[0] // 8, tensor.shape[1] // 8)
        else:
            made[name] = tensor
    return made


def test_fp8_weights_are_dequantized(tmp_path):
    published("deepseek_v3", tmp_path, "1GB")
    edited(tmp_path, in_fp8)
    tensors = load_file(tmp_path / "model.safetensors")
    model: Any = spec_of("deepseek_v3").build("meta")
    model.config.quantization_config = {"quant_method": "fp8", "weight_block_size": [8, 8]}
    found = read(model, tmp_path)

    def plain(name: str) -> Tensor:
        scale = tensors[f"{name}_scale_inv"]
        return tensors[name].float() * scale.repeat_interleave(8, 0).repeat_interleave(8, 1)

    start = "model.layers.1.mlp.experts"
    downs = torch.stack([plain(f"{start}.{index}.down_proj.weight") for index in range(8)])
    assert torch.equal(found[f"{start}.down_proj"], downs)
    name = "model.layers.0.self_attn.q_a_proj.weight"
    assert torch.equal(found[name], plain(name))


def in_mxfp4(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts in blocks of 32 fp4 numbers with one scale each, as gpt-oss is published."""
    made = {}
    for name, tensor in tensors.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inner, outer = tensor.shape
            blocks = (experts, outer, inner // 32)
            made[f"{name}_blocks"] = torch.randint(0, 256, (*blocks, 16), dtype=torch.uint8)
            made[f"{name}_scales"] = torch.randint(120, 130, blocks, dtype=torch.uint8)
        else:
            made[name] = tensor
    return made


def test_mxfp4_weights_are_dequantized(tmp_path):
    published("gpt_oss", tmp_path, "1GB")
    edited(tmp_path, in_mxfp4)
    model: Any = spec_of("gpt_oss").build("meta")
    model.config.quantization_config = {"quant_method": "mxfp4"}
    found = read(model, tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    file.write_text(json.dumps(config))
    expected = type(model).from_pretrained(
        tmp_path,
        dtype=torch.float32,
        quantization_config=transformers.Mxfp4Config(dequantize=True),
    )
    assert all(torch.equal(found[key].float(), t) for key, t in expected.state_dict().items())


def refused(directory: Path, name: str = "mixtral") -> str:
    model = spec_of(name).build("meta")
    with pytest.raises(AutoparError) as error:
        Weights(directory, model, parameter_specs(model))
    return str(error.value)


NORM = "model.norm.weight"


def test_names_and_shapes_that_do_not_fit_are_listed(tmp_path):
    published("mixtral", tmp_path, "1GB")

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        gone = (NORM, *(key for key in tensors if ".1." in key and ".q_proj" in key))
        more = {"vision.patch": torch.zeros(2), "lm_head.weight": tensors["lm_head.weight"][:90]}
        return {key: t for key, t in tensors.items() if key not in gone} | {
            key: t.clone() for key, t in more.items()
        }

    edited(tmp_path, change)
    spec = spec_of("mixtral")
    with pytest.raises(AutoparError) as error:
        autopar.parallelize(
            spec.build("meta"), "cpu:1", spec.example_inputs(2, 16, "cpu"), sgd, weights=tmp_path
        )
    message = str(error.value)
    assert (
        "2 are missing (model.layers.1.self_attn.q_proj.weight (64, 64), model.norm.weight (64,))"
        in message
    )
    assert "1 are not the model's (vision.patch)" in message
    assert "1 are of another shape (lm_head.weight is (90, 64) and must be (96, 64))" in message


def test_a_missing_expert_is_told(tmp_path):
    published("mixtral", tmp_path, "1GB")
    name = "model.layers.1.block_sparse_moe.experts.5.w2.weight"
    edited(tmp_path, lambda tensors: {key: t for key, t in tensors.items() if key != name})
    assert "down_proj is (7, 64, 32) and must be (8, 64, 32)" in refused(tmp_path)


def test_a_missing_file_of_an_index_is_told(tmp_path):
    published("llama", tmp_path)
    first = min(tmp_path.glob("*.safetensors"))
    first.unlink()
    assert f"of which 1 are missing: {first.name}" in refused(tmp_path, "llama")


def test_tied_names_with_different_tensors_are_refused(tmp_path):
    published("gpt2", tmp_path, "1GB")
    edited(tmp_path, lambda tensors: tensors | {"lm_head.weight": torch.zeros(99, 64)})
    model = spec_of("gpt2").build("meta")
    weights = Weights(tmp_path, model, parameter_specs(model))
    with pytest.raises(
        AutoparError, match=r"different tensors for transformer\.wte\.weight, lm_head"
    ):
        weights.read("transformer.wte.weight")


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return (self.layer(x) - labels).square().mean()


@pytest.mark.parametrize("sharded", [False, True])
def test_torch_checkpoints_in_one_file_and_several(sharded, tmp_path):
    state = {name: t.clone() for name, t in Plain().state_dict().items()}
    if sharded:
        for name, tensor in state.items():
            torch.save({name: tensor}, tmp_path / f"{name}.bin")
        index = {"weight_map": {name: f"{name}.bin" for name in state}}
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    else:
        torch.save({"state_dict": state, "step": 3}, tmp_path / "pytorch_model.bin")
    batch = {"x": torch.randn(4, 8), "labels": torch.randn(4, 8)}
    with torch.device("meta"):
        model = Plain()
    found = autopar.parallelize(model, "cpu:1", batch, sgd, weights=tmp_path).full_state_dict()
    assert all(torch.equal(found[name], t) for name, t in state.items())


def test_what_is_not_read_from_files_is_initialized(tmp_path):
    """Buffers outside the state dict, such as rotary frequencies, come from the model."""
    state = published("llama", tmp_path).state_dict()
    model = spec_of("llama").build("meta")
    names = {name for name, _ in model.named_buffers()} - state.keys()
    assert names and names <= {name for name, _ in initialized(model, names, 0)}
