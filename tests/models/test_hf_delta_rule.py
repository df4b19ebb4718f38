"""Models with a gated delta rule: captured with eager PyTorch's triangular solves, they train alike."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from support.exactness import Reference, run_steps, sgd, token_batches, train, update_error

import autopar
from autopar.api import trace
from autopar.ir.plan import Plan
from autopar.models.hf import HFSpec
from autopar.models.hf_delta_rule import triangular_solves
from autopar.runtime.engine import Engine
from autopar.verify.widened import Widened

transformers = pytest.importorskip("transformers")
SOLVE = torch.ops.aten.linalg_solve_triangular.default
SIZES = {
    "vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"], "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
}  # fmt: skip
MODELS = {"qwen3_next": SIZES | EXPERTS, "qwen3_5_text": SIZES, "olmo_hybrid": SIZES}


@cache
def model(name: str) -> tuple:
    state = torch.get_rng_state()
    torch.manual_seed(0)
    spec = HFSpec.from_dict(name, MODELS[name] | {"model_type": name})
    built = spec.build("cpu", torch.float64)
    torch.set_rng_state(state)
    batches = token_batches(100)
    with Widened():
        return built, batches, trace(built, batches[0], precision="fp64")


@cache
def reference(name: str) -> Reference:
    built, batches, _ = model(name)
    with Widened():
        return train(built, batches)


def steps(rank: int, name: str, text: str):
    built, batches, traced = model(name)
    return run_steps(Engine(built, traced, Plan.from_json(text), sgd, None, None, "cpu"), batches)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_5_text"])
def test_a_layer_has_two_solves_and_no_loop_over_rows(name):
    traced = model(name)[2]
    nodes = [node for block in traced.classes for node in block.graph.nodes]
    assert sum(node.target is SOLVE for node in nodes) == 2
    assert len(nodes) < 400


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("dp", "tp", "pp", "micro_batch"), [(2, 1, 1, 2), (1, 2, 1, 8), (1, 1, 2, 4)]
)
def test_training_is_exact(pool2, name, dp, tp, pp, micro_batch):
    built, batches, traced = model(name)
    pin = {"dp": dp, "tp": tp, "pp": pp, "micro_batch": micro_batch}
    found = autopar.plan(built, "cpu:2", batches[0], pin=pin, precision="fp64", traced=traced)
    for losses, state in pool2.run(steps, name, found.to_json()):
        assert update_error(reference(name), state) <= 1.0
        assert losses == pytest.approx(reference(name).losses, rel=1e-9)


def test_transformers_is_as_before_after_the_block():
    from transformers.models.qwen3_next import modeling_qwen3_next as file

    asks = file.is_torchdynamo_exporting
    with triangular_solves(file.Qwen3NextRMSNorm(4)):
        assert file.is_torchdynamo_exporting is not asks
    assert file.is_torchdynamo_exporting is asks
    with pytest.raises(KeyError), triangular_solves(file.Qwen3NextRMSNorm(4)):
        raise KeyError
    assert file.is_torchdynamo_exporting is asks
