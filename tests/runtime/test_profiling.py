"""engine.profile: the trace parses, has the plan's names, changes no result, and its sums are those of its parts."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.effort import examples
from support.exactness import case, engine_for, reference, setting, solved_plan, update_error
from support.staged_runs import pipelined

import autopar
from autopar.ir.mesh import MeshShape
from autopar.ir.plan import Plan
from autopar.runtime.observe.profiling import exposed

STEPS = 3


def profiled_steps(rank: int, text: str, directory: str):
    """(update error over tolerance, hooks left, names in the trace, whole seconds, seconds of collectives by axis, the table)."""
    engine = engine_for("llama-tiny", Plan.from_json(text))
    segments = list(engine.program.module.children())
    before = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in segments]
    with engine.profile(directory) as profile:
        for batch in case("llama-tiny").batches:
            engine.step(engine.local_batch(batch))
    left = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in segments]
    trace = json.loads((Path(directory) / f"rank-{rank}.json").read_text())
    names = {
        event["name"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation"
    }
    held = [
        s.name
        for s in case("llama-tiny").traced.segments
        if hasattr(engine.program.module, s.name.replace(".", "_"))
    ]
    error = update_error(reference("llama-tiny"), engine.full_state_dict())
    return (
        error,
        left == before,
        names,
        held,
        dict(profile.seconds),
        dict(profile.exposed_communication_s),
        str(profile),
        profile.steps,
    )


def check(results, stages: bool, micro_batches: int, axes: set[str]) -> None:
    for error, restored, names, held, seconds, exposed_s, table, steps in results:
        assert error <= 1.0 and restored and steps == STEPS
        assert {f"step {k}" for k in range(1, STEPS + 1)} <= names
        for segment in held:
            assert {f"{segment} forward", f"{segment} backward"} <= names, (segment, names)
        passes = [name for name in names if re.fullmatch(r"stage \d (forward|backward) of micro-batch \d" if stages else
                                                         r"micro-batch \d (forward|backward)", name)]  # fmt: skip
        assert len(passes) == 2 * micro_batches
        for kind in ("forward", "backward"):
            inside = sum(seconds[f"{segment} {kind}"] for segment in held)
            assert (
                0
                < inside
                <= sum(value for name, value in seconds.items() if name in passes and kind in name)
            )
        assert (
            sum(seconds[name] for name in passes) + seconds["update"] + seconds["batch"]
            <= seconds["step"]
        )
        assert set(exposed_s) == axes and 0 < sum(exposed_s.values()) < seconds["step"]
        assert f"{STEPS} step(s)" in table and re.search(r"^step +[\d.,]+ +1,000.00$", table, re.M)


def test_gathered_and_recomputed_segments_have_names(pool2, tmp_path):
    found = case("llama-tiny")
    plan = replace(
        solved_plan(found.traced, found.annotator, setting(MeshShape(dp=2), 2, "full")), zero=3
    )
    results = pool2.run(profiled_steps, plan.to_json(), str(tmp_path))
    check(results, False, 2, {"dp"})
    assert all(
        {"all_gather over dp", "reduce_scatter over dp"} <= names for _, _, names, *_ in results
    )


def test_stages_have_names(pool2, tmp_path):
    plan = pipelined("llama-tiny", MeshShape(pp=2), "1f1b", (2, 2), 2, ("none", "full"))
    results = pool2.run(profiled_steps, plan.to_json(), str(tmp_path))
    check(results, True, 2, {"pp"})
    assert all("pipeline bubble and messages" in result[6] for result in results)
    assert {
        name for _, _, names, *_ in results for name in names if name.startswith("stage 1 f")
    } == {f"stage 1 forward of micro-batch {k}" for k in range(2)}


def test_a_trace_that_cannot_be_written_and_a_second_profiler(tmp_path):
    found = case("llama-tiny")
    engine = engine_for(
        "llama-tiny", solved_plan(found.traced, found.annotator, setting(MeshShape()))
    )
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(autopar.AutoparError, match="cannot write the trace"),
        engine.profile(tmp_path / "file"),
    ):
        pass
    with engine.profile(tmp_path) as profile:
        with (
            pytest.raises(autopar.AutoparError, match="running already"),
            engine.profile(tmp_path / "other"),
        ):
            pass
        with pytest.raises(autopar.AutoparError, match="no whole trace"):
            print(profile)


@settings(max_examples=examples(15, 60))
@given(*[st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6)), max_size=5)] * 2)
def test_exposed_time_is_counted_moment_by_moment(wanted, beside):
    wanted, beside = (
        [(start, start + length) for start, length in group] for group in (wanted, beside)
    )

    def lasts(group, moment):
        return any(start <= moment < end for start, end in group)

    assert exposed(wanted, beside) == sum(
        lasts(wanted, moment) and not lasts(beside, moment) for moment in range(20)
    )
