"""Exported texts in the frameworks' own parsers: accelerate, transformers and DeepSpeed, where they are installed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import AutoparError
from autopar.targets.job import Exported, Facts, Job, Layout
from autopar.targets.own_parsers import PARSERS, disagreements
from autopar.targets.registry import TARGETS
from autopar.targets.target import NotExpressible

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
    assert set(PARSERS) == set(MODULES)
