"""A deepened capture is that of the deep model: graphs, names, parameters, hash, and so every plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.effort import slow_but
from torch import nn

from autopar.api import parallelize, trace, trace_spec
from autopar.errors import AutoparError
from autopar.ir.cluster import ClusterSpec
from autopar.models.base import NativeSpec
from autopar.models.gpt import GPTConfig
from autopar.models.llama import LlamaConfig
from autopar.models.mla import MLADims
from autopar.models.moe import MoEConfig
from autopar.planning.plan_model import check_plan
from autopar.planning.planner import plan_traced
from autopar.request.pins import Pins
from autopar.request.plan_request import PlanRequest
from autopar.trace.deepen import Deeper

SEQ = 32
MLA = MLADims(query_rank=24, kv_rank=16, plain_dim=8, rotary_dim=8, value_dim=8)
GPT, LLAMA, MOE = (
    GPTConfig(256, 64, 5, 4, max_seq=64),
    LlamaConfig(256, 64, 5, 4, 2, 128),
    MoEConfig(256, 64, 5, 4, 2, 64, experts=4, top_k=2),
)
DENSE_FIRST = replace(MOE, first_dense=2, dense_ffn=128, layers=7)
MODELS = {
    "gpt": GPT,
    "gpt, dropout, written out": replace(
        GPT, dropout=0.1, fused_attention=False, tie_embeddings=False
    ),
    "gpt, alibi, window, parallel": replace(
        GPT, positions="alibi", window=8, parallel_block=True, activation="relu2"
    ),
    "llama": LLAMA,
    "llama, tied": replace(LLAMA, tie_embeddings=True, head_width=32),
    "llama, windows": replace(LLAMA, window=8, window_every=2, layers=7),
    "llama, windows, uneven": replace(LLAMA, window=8, window_every=2, layers=8),
    "llama, three windows": replace(LLAMA, window=8, window_every=3, layers=10),
    "moe": MOE,
    "moe, no balance": replace(MOE, router_aux_coef=0.0),
    "moe, shared, capacity": replace(MOE, shared_ffn=64, capacity_factor=1.0),
    "moe, dense first": DENSE_FIRST,
    "moe, dense first, windows": replace(DENSE_FIRST, window=8, window_every=2, layers=10),
    "moe, latent, a later token": replace(DENSE_FIRST, mla=MLA, kv_heads=4, mtp=1),
    "moe, two later tokens": replace(DENSE_FIRST, mtp=2),
    "moe, every second": replace(MOE, expert_layers="01", dense_ffn=128, layers=9),
    "moe, every third, no balance": replace(
        MOE, expert_layers="100", dense_ffn=128, layers=11, router_aux_coef=0.0
    ),
    "moe, every second, windows": replace(
        MOE, expert_layers="01", dense_ffn=128, window=8, window_every=3, layers=20
    ),
}
WHOLE = {
    "gpt": replace(GPT, layers=3),
    "llama, windows": replace(LLAMA, window=8, window_every=3, layers=7),
    "moe": replace(MOE, layers=4),
    "dense first": replace(DENSE_FIRST, layers=6),
}


def spec_of(config) -> NativeSpec:
    return NativeSpec.of("deep", config)


def whole(config, precision: str | None = "fp32"):
    """The trace of the model, every layer captured."""
    spec = spec_of(config)
    return trace(spec.build("meta"), spec.example_inputs(2, SEQ), None, precision)


def written(graph) -> list[str]:
    """A graph in full: calls and their arguments, shapes, dtypes, gradients, parameters, and modules."""
    lines = []
    for node in graph.nodes:
        val = node.meta.get("val")
        vals = [(tuple(map(str, v.shape)), v.dtype, v.requires_grad) for v in (val if isinstance(val, (list, tuple)) else [val])
                if isinstance(v, torch.Tensor)]  # fmt: skip
        modules = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
        lines.append(
            f"{node.format_node()} {node.kwargs} {vals} {node.meta.get('grad')} {node.meta.get('spec')} {modules}"
        )
    return lines


def data_of(traced) -> dict:
    """All that a traced model says, as values that compare."""
    return {
        "model": (
            traced.inputs,
            traced.batch_symbol,
            traced.batch_hint,
            traced.model_hash,
            traced.notes,
            traced.updates,
        ),
        "inputs": [(tuple(map(str, val.shape)), val.dtype) for val in traced.input_vals],
        "classes": [
            (c.name, c.slots, c.structure_hash, c.picked, written(c.graph)) for c in traced.classes
        ],
        "segments": traced.segments,
        "parameters": list(traced.parameters.items()),
        "constants": traced.constants,
        "split": (traced.split, traced.step_values.names),
        "step values": (written(traced.step_values.local), written(traced.step_values.whole)),
    }


SLOW = ("gpt, alibi, window, parallel", "llama, tied", "llama, three windows", "moe, shared, capacity", "moe, two later tokens",
        "moe, dense first, windows", "moe, no balance", "moe, latent, a later token", "moe, dense first", "llama, windows",
        "llama, windows, uneven", "gpt, dropout, written out", "moe", "llama", "gpt",
        "moe, every second, windows", "moe, every third, no balance")  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in MODELS]
)
def test_deepened_is_deep(name):
    config = MODELS[name]
    assert spec_of(config).shallow().num_layers < config.layers
    found, expected = data_of(trace_spec(spec_of(config), SEQ, "fp32")), data_of(whole(config))
    for part, data in expected.items():
        assert found[part] == data, part


@pytest.mark.parametrize(
    "name",
    slow_but(["gpt"], WHOLE),
)
def test_what_shows_too_few_layers_is_captured_whole(name):
    spec = spec_of(WHOLE[name])
    assert spec.shallow() is spec
    assert data_of(trace_spec(spec, SEQ)) == data_of(whole(WHOLE[name], None))


@pytest.mark.parametrize(("config", "period", "message"), [
    (replace(GPT, layers=2), 1, "2 layers of blocks do not show what repeats: a period of 1 takes 3"),
    (replace(LLAMA, window=8, window_every=2, layers=4), 1, "are not two equal periods of 1"),
    pytest.param(replace(MOE, layers=3), 1, "are not two equal periods of 1", marks=pytest.mark.slow),
])  # fmt: skip
def test_what_does_not_repeat_is_refused(config, period, message):
    spec = spec_of(config)
    with pytest.raises(AutoparError, match=message):
        trace(
            spec.build("meta"),
            spec.example_inputs(2, SEQ),
            deeper=Deeper(spec.layers_path, period, 1),
        )


@pytest.mark.parametrize("name", ["gpt", "llama, windows", "moe"])
@pytest.mark.slow
def test_plans_are_equal(name):
    config, cluster = MODELS[name], ClusterSpec.parse("h100:4")
    request = PlanRequest(
        cluster, 16, Pins(recompute="every-2") if name == "gpt" else Pins(), "bf16", "deep"
    )
    traces = trace_spec(spec_of(config), SEQ), whole(config, None)
    plans = [
        replace(plan, certificate=replace(plan.certificate, solve_time_s=0.0))
        for plan in (plan_traced(t, request) for t in traces)
    ]
    assert plans[0] == plans[1]
    check_plan(plans[0], traces[1], cluster)


def test_a_plan_of_a_deepened_model_trains_it():
    spec, cluster = spec_of(MODELS["gpt"]), ClusterSpec.parse("cpu:1")
    request = PlanRequest(cluster, 2, Pins(), "fp32", spec.name)
    plan = plan_traced(trace_spec(spec, SEQ, "fp32"), request)
    batch = spec.example_inputs(2, SEQ, "cpu")
    engine = parallelize(spec.build("cpu"), cluster, batch, plan=plan)
    assert engine.step(batch) > 0


class Body(nn.Module):
    """Four layers; `kind` says what is not as in a deeper model."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layers = nn.ModuleList(
            nn.BatchNorm1d(8) if kind == "buffers" else nn.Linear(8, 8) for _ in range(4)
        )
        if kind == "shared":
            self.layers[2].weight = self.layers[1].weight

    def forward(self, x):
        values = [x]
        for index in (0, 2, 1, 3) if self.kind == "order" else range(4):
            values.append(
                self.layers[index](values[-1] + (index if self.kind == "numbered" else 1))
            )
        return (values[-1] + (values[1] if self.kind == "skip" else 0)).square().sum()


@pytest.mark.parametrize(("kind", "message"), [
    ("shared", r"layers share layers\.1\.weight"), ("buffers", r"layers change or read as a number layers\.0\.running_mean"),
    ("order", "are not two equal periods"), ("numbered", "are not two equal periods"), ("skip", "of an earlier layer"),
])  # fmt: skip
def test_what_would_compute_something_else_is_refused(kind, message):
    inputs = {"x": torch.empty(4, 8, device="meta")}
    with pytest.raises(AutoparError, match=message):
        trace(Body(kind), inputs, deeper=Deeper("layers", 1, 2))


def test_a_deeper_model_has_more_layers():
    with pytest.raises(AutoparError, match="both are at least 1"):
        Deeper("layers", 1, 0)
