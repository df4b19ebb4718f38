"""A deepened model is the deep one: the same segments, fed by the same ones, at the same price."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.annotate.annotate import Annotator
from autopar.annotate.setting import Setting
from autopar.api import trace
from autopar.errors import AutoparError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.mesh import MeshShape
from autopar.models.base import NativeSpec
from autopar.models.gpt import GPTConfig
from autopar.models.llama import LlamaConfig
from autopar.models.moe import MoEConfig
from autopar.solve.placement import solve_placement
from autopar.trace.deepen import deepened

GPT, LLAMA, MOE = (
    GPTConfig(256, 64, 2, 4),
    LlamaConfig(256, 64, 2, 4, 2, 128),
    MoEConfig(256, 64, 2, 4, 2, 64, experts=4, top_k=2, router_aux_coef=0.0),
)
FAMILIES = {
    "gpt": (GPT, 1),
    "llama": (LLAMA, 1),
    "moe": (MOE, 1),
    "dense first": (replace(MOE, layers=4, first_dense=2, dense_ffn=128), 1),
    "alternating": (replace(LLAMA, window=8, window_every=2), 2),
}


def traced_of(config, layers: int):
    spec = NativeSpec.of("deep", replace(config, layers=layers))
    return trace(spec.build("meta"), spec.example_inputs(2, 32), None, "fp32")


@pytest.mark.parametrize("family", [pytest.param(f, marks=pytest.mark.slow if f == "llama" else ()) for f in FAMILIES])
def test_deepened_is_deep(family):
    config, period = FAMILIES[family]
    shallow = 2 * period + (2 if family == "dense first" else 0)
    found, deep = deepened(traced_of(config, shallow), period, 3), traced_of(config, shallow + 3 * period)
    assert [s.class_index for s in found.segments] == [s.class_index for s in deep.segments]
    assert [s.inputs for s in found.segments] == [s.inputs for s in deep.segments]
    assert [c.structure_hash for c in found.classes] == [c.structure_hash for c in deep.classes]
    setting = Setting(MeshShape(dp=2, tp=2), 1, 2, 0, "full", "fp32", ClusterSpec.parse("h100:4"))
    prices = [solve_placement(Annotator(model).annotate(setting), None) for model in (found, deep)]
    assert prices[0].time_s == prices[1].time_s and prices[0].memory_bytes == prices[1].memory_bytes


def test_what_does_not_repeat_is_refused():
    with pytest.raises(AutoparError, match="not two equal periods of 2"):
        deepened(traced_of(replace(LLAMA, window=8, window_every=2), 3), 2, 1)
    with pytest.raises(AutoparError, match=r"epilogue reads layers\.0"):
        deepened(traced_of(replace(MOE, router_aux_coef=0.01), 3), 1, 1)
