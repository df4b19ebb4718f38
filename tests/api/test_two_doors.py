"""The API and the command line give the same plan for the same request, and a plan needs nothing given again."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from support.effort import examples
from support.two_doors import REQUESTS, Asked, differences, facts_of

import autopar
from autopar.cli.plan_commands import cli
from autopar.errors import AutoparError
from autopar.ir.plan import Plan
from autopar.models import parse_model

OLD_T4 = Asked("llama-tiny", "t4:2", 8, 16, {"tp": 1, "pp": 1}, "", {"target": "deepspeed"})
"""Devices without bf16."""
MIXED = Asked("llama-tiny", "l4:2+t4:2", 8, 16, {"dp": 1, "tp": 2}, "--software torchtitan", {"precision": "fp32"})  # fmt: skip
"""Devices of two generations, of which one has a kernel of the framework."""
DOUBLE = Asked("benchmarks.exactness.own_modules:of_double", "v100-32g:2", 8, 1, {"pp": 1})
"""A module of its own dtype, which the devices compute in."""
TARGETED = Asked(
    "benchmarks.exactness.own_modules:of_half", "h100:2", 8, 1, {}, "", {"target": "bridge"}
)
"""A target's limits on the positions of a model, of which no command knows before the capture."""
PART = Asked("llama-tiny", "h100:2", 8, 16, {"pp": 1}, "--compile", {"target": "megatron"})
"""A part of the software beside a target."""


@settings(max_examples=examples(2, 60))
@given(REQUESTS)
@example(OLD_T4)
@example(MIXED)
@example(DOUBLE)
@example(TARGETED)
@example(PART)
def test_both_doors_give_one_plan(asked):
    with tempfile.TemporaryDirectory() as folder:
        plans = asked.by_api(), asked.by_command(Path(folder) / "plan.json")
    refused = [plan for plan in plans if isinstance(plan, str)]
    if refused:
        assert len(refused) == 2, (asked, refused)
        mine, theirs = (" ".join(words.split()) for words in refused)
        assert mine == theirs, asked
        return
    one, other = map(facts_of, plans)
    assert not differences(one, other), (asked, differences(one, other)[:8])


@settings(max_examples=examples(2, 60))
@given(REQUESTS)
@example(PART)
def test_a_plan_needs_nothing_given_again(asked):
    plan = asked.by_api()
    assume(not isinstance(plan, str))
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "plan.json")
        plan.save(path)
        assert Plan.load(path) == plan
        for command in (["audit", path], ["replay", path], ["explain", "--plan", path]):
            done = CliRunner().invoke(cli, [*command, "--json"])
            assert done.exit_code == 0, (asked, done.output)
        assert json.loads(done.stdout)["made_for"]["software"] == plan.made_for.software
        saved = Plan.load(path)
    spec = parse_model(asked.model)
    batch = spec.example_inputs(2, asked.seq)
    assert "certificate" in str(autopar.explain(saved)).lower()
    report = autopar.explain(saved, model=spec.build("meta"), example_inputs=batch)
    assert report.timeline.step_s == pytest.approx(plan.predicted.step_time_s, rel=0.02)
    assert not autopar.diff(saved, plan)
    if "target" in asked.said:
        assert autopar.export(saved).target


@settings(max_examples=examples(2, 20))
@given(
    st.fixed_dictionaries({}, optional={"micro_batch": st.sampled_from((1, 2, 4)), "recompute": st.sampled_from(("none", "full"))}),
    st.sampled_from(("fp32", "fp64")),
)  # fmt: skip
def test_a_loaded_plan_runs_with_its_model_alone(pin, precision):
    spec = parse_model("llama-tiny")
    batch = spec.example_inputs(4, 16, "cpu")
    plan = autopar.plan(spec.build("meta"), "cpu:1", batch, 4, pin, precision=precision)
    saved = Plan.from_json(plan.to_json())
    engine = autopar.parallelize(spec.build("cpu"), example_inputs=batch, plan=saved)
    assert engine.plan == plan and engine.step(engine.local_batch(batch)) > 0
    with pytest.raises(AutoparError, match=r"not precision='bf16'"):
        autopar.parallelize(spec.build("cpu"), example_inputs=batch, plan=saved, precision="bf16")
