"""Exported texts in the frameworks' own parsers, where they are installed."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import AutoparError
from autopar.foreign.frameworks.registry import TARGETS
from autopar.foreign.job import Exported, Facts, Job
from autopar.foreign.target import NotExpressible
from autopar.foreign.writers.own_parsers import PARSERS, disagreements
from autopar.ir.layout import Layout
from autopar.ir.model_shape import ModelShape

MODULES = {"accelerate": "accelerate", "transformers": "transformers", "deepspeed": "deepspeed"}


@st.composite
def layouts(draw: st.DrawFn) -> Job:
    tp, cp, pp, dp = (draw(st.sampled_from([1, 2, 4, 8])) for _ in range(4))
    zero = draw(st.sampled_from([0, 2, 3])) if dp * cp > 1 else 0
    layout = Layout(
        tp=tp, cp=cp, pp=pp, dp=dp, ep=draw(st.sampled_from([1, 2])) if tp == 1 else 1, micro_batch=draw(st.integers(1, 4)), zero=zero,
        copies=2 if zero and dp > 2 and draw(st.booleans()) else 1, schedule="gpipe" if pp > 1 else "none",
    )  # fmt: skip
    layout = replace(layout, global_batch=layout.micro_batch * dp * draw(st.integers(1, 5)))
    return Job("", layout=layout, gpus=tp * cp * pp * dp, gpus_per_node=1, facts=Facts("bf16"))


@pytest.mark.parametrize("name", MODULES)
def test_200_layouts_are_read_as_written(name: str) -> None:
    pytest.importorskip(MODULES[name])
    said = []

    @given(layouts(), st.integers(0, 3))
    @settings(max_examples=600, deadline=None, database=None)
    def reads(job: Job, one: int) -> None:
        # most random layouts are outside: pp alone, or with cp, is said by none
        by = job.layout
        keep = {
            "accelerate": {"pp": 1, "schedule": "none", "ep": 1},
            "transformers": {"cp": 1},
            "deepspeed": {"pp": 1, "schedule": "none", "ep": 1, "copies": 1},
        }
        by = replace(by, **keep[name])  # type: ignore[arg-type]
        if name == "transformers":
            by = (
                replace(by, zero=3)
                if by.dp != 1 and one
                else replace(by, dp=1, zero=0, copies=1, global_batch=by.micro_batch)
            )
            by = replace(by, pp=1, schedule="none") if by.dp != 1 else by
        job = replace(job, framework=name, layout=by, gpus=by.tp * by.cp * by.pp * (by.dp or 1))
        try:
            written = TARGETS[name].write(job)
        except NotExpressible:
            return
        if TARGETS[name].refusals(job, job.gpus or 0):
            return
        assert disagreements(written, job) == ()
        said.append(by)

    reads()
    assert len(set(said)) >= 100 and len(said) >= 200, "random layouts are within the target"


@st.composite
def pipelines(draw: st.DrawFn, recompute: list[str], schedules: list[str]) -> Job:
    """A job with tp, pp, cp, experts, stages of any size and ZeRO, as a trainer's own arguments have them."""
    tp, pp, cp, dp = (draw(st.sampled_from(sizes)) for sizes in ([1, 2, 4], [1, 2, 4], [1, 2], [1, 2, 4]))  # fmt: skip
    schedule = draw(st.sampled_from(schedules)) if pp > 1 else "none"
    vpp = draw(st.integers(2, 3)) if schedule == "interleaved_1f1b" else 1
    stages = tuple(draw(st.lists(st.integers(1, 3), min_size=pp * vpp, max_size=pp * vpp)))
    ep = draw(st.sampled_from([1, 2])) if dp > 1 else 1
    dense = ModelShape(sum(stages), 1024, 16, 8, 64, 2816, 32000, gated=True)
    experts = replace(dense, experts=8, top_k=2, moe_ffn=512)
    ranks = dp * cp
    zero = draw(st.sampled_from([0, 1, 2, 3])) if ranks > 1 else 0
    by = Layout(
        tp=tp, pp=pp, cp=cp, dp=dp, ep=ep, vpp=vpp, stages=stages if pp > 1 and len(set(stages)) > 1 else (), zero=zero,
        micro_batch=draw(st.integers(1, 2)), copies=2 if zero and dp > 2 and draw(st.booleans()) else 1, schedule=schedule,
        recompute=draw(st.sampled_from(recompute)), sequence_parallel=tp > 1 and (ep > 1 or draw(st.booleans())),
        order=draw(st.sampled_from(["", "dp-pp"])) if pp > 1 and dp > 1 else "",
        offload=draw(st.sampled_from(["none", "none", "optimizer", "parameters"])),
    )  # fmt: skip
    by = replace(by, global_batch=by.micro_batch * dp * pp * draw(st.integers(1, 3)))
    facts = Facts("bf16", dp_overlap=True, compile=draw(st.booleans()))
    shape = experts if ep > 1 else dense
    return Job("", shape, by, tp * pp * cp * dp, min(8, tp * pp * cp * dp), 4096, facts)


@st.composite
def sharded(draw: st.DrawFn, tps: list[int], stages: list[int]) -> Job:
    """A job without a pipeline, as trainers of reinforcement learning have them."""
    tp = draw(st.sampled_from(tps))
    cp, dp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 3, 4, 8, 16]))
    zero = draw(st.sampled_from(stages)) if dp * cp > 1 else 0
    by = Layout(
        tp=tp, cp=cp, dp=dp, zero=zero, micro_batch=draw(st.integers(1, 4)),
        copies=2 if zero and dp % 2 == 0 and draw(st.booleans()) else 1,
        recompute=draw(st.sampled_from(["none", "full"])),
        offload=draw(st.sampled_from(["none", "none", "optimizer", "parameters"])),
    )  # fmt: skip
    by = replace(by, global_batch=by.micro_batch * dp * draw(st.integers(1, 4)))
    shape = ModelShape(4, 1024, 16, 8, 64, 2816, 32000, gated=True)
    gpus, seq = tp * cp * dp, draw(st.sampled_from([None, 2048, 4096]))
    facts = Facts("bf16", dp_overlap=draw(st.booleans()))
    return Job("", shape, by, gpus, gpus if gpus <= 8 else 8 if gpus % 8 == 0 else 1, seq, facts)


JOBS = {
    "megatron": (("megatron",), pipelines(["none", "selective", "full"], ["1f1b", "interleaved_1f1b"])),
    "torchtitan": (("torchtitan",), pipelines(["none", "op", "full"], ["1f1b", "gpipe", "interleaved_1f1b"])),
    "openrlhf": (("openrlhf",), sharded([1, 1, 2], [0, 1, 2, 3])),
    "verl": (("hydra", "verl"), sharded([1], [2, 3])),
}  # fmt: skip
"""What a trainer's parser needs, and jobs to say to it."""


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_200_pipelines_are_read_as_written(name: str) -> None:
    modules, jobs = JOBS[name]
    if missing := [module for module in modules if find_spec(module) is None]:
        pytest.skip(f"{' and '.join(missing)} is not installed")
    said = []

    @given(jobs)
    @settings(max_examples=1500, deadline=None, database=None)
    def reads(drawn: Job) -> None:
        job = replace(drawn, framework=name)
        try:
            written = TARGETS[name].write(job)
        except NotExpressible:
            return
        if len(set(said)) >= 200 or TARGETS[name].refusals(job, job.gpus or 0):
            return
        assert disagreements(written, job) == ()
        said.append(job.layout)

    reads()
    assert len(set(said)) >= 200


def test_what_a_framework_refuses_is_told() -> None:
    pytest.importorskip("transformers")
    job = Job("transformers", layout=Layout(dp=2, zero=3), gpus=2)
    with pytest.raises(AutoparError, match="refuses this text: ValueError: Combining FSDP"):
        disagreements(Exported("transformers 5.24", '{"fsdp_size": 2, "pp_size": 2}'), job)
    written = TARGETS["transformers"].write(job)
    assert disagreements(written, replace(job, layout=Layout(dp=2, tp=2), gpus=4)) == (
        "tp: 1 there, 2 here",
    )


def test_frameworks_without_a_parser_here() -> None:
    with pytest.raises(AutoparError, match="has no parser"):
        disagreements(Exported("nanotron 0.5", ""), Job("nanotron"))
    assert set(PARSERS) == {*MODULES, "megatron-core", "torchtitan", "openrlhf", "verl"}
