"""The audit of a plan: passes whatever was decided, and says where a plan was altered."""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.effort import examples
from support.explain_tasks import words_of

from autopar import api, recheck
from autopar.errors import AutoparError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan import Plan
from autopar.ir.sharding import R, S
from autopar.ir.traced import TracedModel
from autopar.models import parse_model
from autopar.recheck.audit import Audit, audit
from autopar.recheck.plan_costs import priced_segments
from autopar.recheck.replay import replay
from autopar.request.pins import Pins
from autopar.request.plan_request import PlanRequest
from benchmarks.exactness.model_zoo import ZooModel

RECHECK = Path(recheck.__file__).parent
LLAMA = "llama:layers=6,hidden=2048,heads=16,vocab=64000,seq=2048"
GPT = "gpt:layers=6,hidden=2048,heads=16,vocab=64000,seq=2048"  # tied
MOE = "moe:layers=4,hidden=1024,heads=16,vocab=32000,ffn=2048,experts=8,seq=2048"
BATCH = 16


@cache
def traced_of(name: str) -> TracedModel:
    if name == "t5":
        spec = ZooModel.of(name).spec
        return api.trace(spec.build("meta"), spec.example_inputs(2, 16))
    return api.trace_spec(parse_model(name), 2048)


def request_of(pin: dict, memory_gib: float = 80.0, cluster: str = "h100:8") -> PlanRequest:
    spec = ClusterSpec.parse(cluster)
    spec = replace(spec, device=replace(spec.device, memory_bytes=int(memory_gib * 2**30)))
    return PlanRequest(spec, BATCH, Pins.of(pin), "bf16", "test")


@cache
def planned(name: str, pins: tuple[tuple[str, object], ...], memory_gib: float = 80.0) -> Plan:
    plan = api.plan_traced(traced_of(name), request_of(dict(pins), memory_gib), time_limit_s=8.0)
    return Plan.from_json(plan.to_json())


def audited(
    name: str,
    pins: tuple[tuple[str, object], ...],
    memory_gib: float = 80.0,
    plan: Plan | None = None,
) -> Audit:
    return audit(
        plan or planned(name, pins, memory_gib), traced_of(name), request_of(dict(pins), memory_gib)
    )


def check(found: Audit) -> None:
    assert found.disagreements == ()
    assert found.audited_s == pytest.approx(found.objective_s, rel=1e-9)
    assert found.audited_bytes == found.predicted_bytes
    assert sum(found.parts_s.values()) == pytest.approx(found.audited_s, rel=1e-12)


CASES = {
    "mixed, no pipeline": (LLAMA, {"pp": 1, "tp": 2, "zero": 1, "micro_batch": 2}, 8.0),
    "mixed, pipeline": (
        LLAMA,
        {"pp": 2, "tp": 2, "zero": 1, "micro_batch": 4, "schedule": "1f1b"},
        9.0,
    ),
    "ZeRO-2": (
        LLAMA,
        {"pp": 1, "tp": 1, "zero": 2, "micro_batch": 1, "recompute": "selective"},
        80.0,
    ),
    "ZeRO-3": (GPT, {"pp": 1, "tp": 2, "zero": 3, "micro_batch": 2, "recompute": "full"}, 80.0),
    "tied, pipeline": (
        GPT,
        {"pp": 2, "tp": 2, "zero": 0, "micro_batch": 2, "schedule": "zero_bubble"},
        80.0,
    ),
    "every second layer": (
        LLAMA,
        {"pp": 2, "tp": 1, "zero": 0, "micro_batch": 1, "recompute": "every-2", "stages": "even"},
        80.0,
    ),
    "interleaved": (
        LLAMA,
        {"pp": 2, "tp": 4, "zero": 0, "micro_batch": 2, "schedule": "interleaved_1f1b", "vpp": 3},
        80.0,
    ),
    "cp": (LLAMA, {"pp": 1, "cp": 2, "tp": 2, "zero": 1, "micro_batch": 1}, 80.0),
    "ep": (MOE, {"pp": 1, "tp": 2, "dp": 4, "ep": 4, "zero": 0, "micro_batch": 2}, 80.0),
    "ep, pipeline": (
        MOE,
        {"pp": 2, "tp": 1, "dp": 4, "ep": 2, "zero": 1, "micro_batch": 1, "schedule": "gpipe"},
        80.0,
    ),
    "offloaded": (
        LLAMA,
        {"pp": 1, "tp": 2, "zero": 1, "micro_batch": 2, "offload": "optimizer"},
        80.0,
    ),
    "parameters offloaded": (
        GPT,
        {"pp": 1, "tp": 2, "zero": 3, "micro_batch": 2, "offload": "parameters"},
        80.0,
    ),
    "offloaded, tied, pipeline": (
        GPT,
        {"pp": 2, "tp": 2, "micro_batch": 2, "schedule": "1f1b", "offload": "optimizer"},
        80.0,
    ),
    "encoder and decoder": ("t5", {"pp": 1, "tp": 2, "micro_batch": 2}, 80.0),
    "encoder and decoder, pipeline": (
        "t5",
        {"pp": 2, "tp": 2, "micro_batch": 2, "schedule": "1f1b"},
        80.0,
    ),
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.slow) if CASES[case][0] == "t5" else case
        for case in CASES
    ],
)
@pytest.mark.slow
def test_what_the_planner_decides_passes(case):
    name, pins, memory_gib = CASES[case]
    plan = planned(name, tuple(pins.items()), memory_gib)
    found = audited(name, tuple(pins.items()), memory_gib)
    check(found)
    assert (
        found.segments == sum(map(len, plan.stages))
        and found.ops > 0
        and found.edges > found.segments
    )
    assert plan.recompute == "mixed" or not case.startswith("mixed")
    assert found.conversions > 0 or pins.get("tp", 1) == 1 or name == "t5", "tiny models run whole"


@pytest.mark.slow
@settings(max_examples=5)
@given(
    st.sampled_from([LLAMA, GPT]),
    st.sampled_from(
        [
            (1, "none", 1),
            (2, "gpipe", 1),
            (2, "1f1b", 1),
            (2, "interleaved_1f1b", 3),
            (2, "zero_bubble", 2),
        ]
    ),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([0, 1, 2, 3]),
    st.sampled_from([None, "none", "selective", "op", "full", "every-3"]),
    st.sampled_from([8.0, 12.0, 80.0, 4096.0]),
    st.sampled_from(["none", "optimizer", "parameters"]),
)
def test_pinned_plans_pass(name, pipeline, tp, zero, recompute, memory_gib, offload):
    ranks, schedule, count = pipeline
    pin = {"pp": ranks, "tp": tp, "zero": zero, "micro_batch": 2}
    pin |= {"schedule": schedule, "vpp": count} if ranks > 1 else {}
    pin |= {"recompute": recompute} if recompute else {}
    pin |= {"offload": offload} if offload != "none" else {}
    try:
        check(audited(name, tuple(pin.items()), memory_gib))
    except AutoparError as error:  # the planner refused
        assert "audit" not in str(error) and any(
            words in str(error) for words in ("pp=", "fits", "offload=parameters")
        )


# ------------------------------------------------------------------------------------------------------- altered plans

PIPE = (("pp", 2), ("tp", 2), ("zero", 1), ("micro_batch", 4), ("schedule", "1f1b"))


def altered(plan: Plan, block: int, name: str, **changes) -> Plan:
    """The plan with another choice for one op over tp."""
    blocks = list(plan.blocks)
    axes = blocks[block].ops[name]
    ops = blocks[block].ops | {name: axes | {"tp": replace(axes["tp"], **changes)}}
    blocks[block] = replace(blocks[block], ops=ops)
    return replace(plan, blocks=tuple(blocks))


def other_strategies(plan: Plan, block: int):
    """(op, another strategy of it) of a block."""
    _, segments = priced_segments(plan, traced_of(LLAMA), request_of(dict(PIPE), 9.0))
    segment = next(
        s
        for s, of in zip(segments, traced_of(LLAMA).segments, strict=True)
        if of.name in plan.blocks[block].segments
    )
    for op in segment.block.ops:
        for strategy in op.strategies:
            if strategy.name != segment.chosen[op.name].name:
                yield op.name, strategy


@pytest.mark.slow
def test_another_strategy_is_found_at_its_op():
    """The name alone is changed: the layouts that the plan has are no longer those of the strategy."""
    plan = planned(LLAMA, PIPE, 9.0)
    for name, strategy in list(other_strategies(plan, 1))[:8]:
        try:
            found = audited(LLAMA, PIPE, 9.0, altered(plan, 1, name, strategy=strategy.name))
        except AutoparError as error:
            assert "nothing converts that" in str(error)
            continue
        assert any(
            d.startswith(f"{name} of {plan.blocks[1].name}: the plan has it read")
            for d in found.disagreements
        )


def test_another_strategy_with_its_layouts_is_found_at_its_block():
    """A consistent lie: layouts and strategy agree with each other, and the costs of the block do not."""
    plan, seen = planned(LLAMA, PIPE, 9.0), 0
    others = list(other_strategies(plan, 1))[:: examples(4, 1)]
    for name, s in others:
        try:
            found = audited(
                LLAMA,
                PIPE,
                9.0,
                altered(plan, 1, name, strategy=s.name, inputs=s.inputs, outputs=s.outputs),
            )
        except AutoparError as error:
            assert "nothing converts that" in str(error)
            continue
        seen += any(d.startswith((plan.blocks[1].name, "edge from")) for d in found.disagreements)
        assert found.disagreements or s.forward_s == 0.0, f"{name} as {s.name}: costs the same"
    assert seen > examples(2, 10)


def test_a_dropped_conversion_is_found():
    """A reader that claims to read what is made, so that nothing has to be converted."""
    plan = planned(LLAMA, PIPE, 9.0)
    ops = plan.blocks[1].ops
    name = next(
        n for n, axes in ops.items() if any(layout.is_shard for layout in axes["tp"].inputs)
    )
    claimed = tuple(R if layout.is_shard else S(1) for layout in ops[name]["tp"].inputs)
    found = audited(LLAMA, PIPE, 9.0, altered(plan, 1, name, inputs=claimed))
    assert found.disagreements[0].startswith(
        f"{name} of {plan.blocks[1].name}: the plan has it read {', '.join(map(str, claimed))}"
    )
    cheaper = tuple(
        {**entry, "forward_s": 0.0} if entry["part"] == "edge" else entry
        for entry in plan.certificate.ledger
    )
    if cheaper != plan.certificate.ledger:
        found = audited(
            LLAMA, PIPE, 9.0, replace(plan, certificate=replace(plan.certificate, ledger=cheaper))
        )
        assert found.disagreements[0].startswith("edge from output")


def test_a_moved_stage_is_found():
    plan = planned(LLAMA, PIPE, 9.0)
    first, second = plan.stages
    found = audited(LLAMA, PIPE, 9.0, replace(plan, stages=(first[:-1], (first[-1], *second))))
    assert any(d.startswith("rank 0 (") for d in found.disagreements) and any(
        d.startswith("rank 1 (") for d in found.disagreements
    )
    assert any(d.startswith("step: all parts sum to") for d in found.disagreements)
    with pytest.raises(AutoparError, match="it was damaged"):
        audited(LLAMA, PIPE, 9.0, replace(plan, stages=(second, first)))


def test_another_recompute_mode_is_found_at_its_block():
    plan = planned(LLAMA, PIPE, 9.0)
    for number, block in enumerate(plan.blocks):
        for mode in {"none", "selective", "full"} - {block.recompute}:
            blocks = tuple(
                replace(b, recompute=mode) if n == number else b for n, b in enumerate(plan.blocks)
            )
            found = audited(LLAMA, PIPE, 9.0, replace(plan, blocks=blocks))
            where = (block.segments[0], block.name)
            assert (
                any(d.startswith(where) for d in found.disagreements) or len(block.segments) == 1
            ), (block.name, mode)


def test_other_numbers_are_found():
    plan = planned(LLAMA, PIPE, 9.0)
    faster = replace(plan.certificate, objective_s=plan.certificate.objective_s * (1 - 1e-6))
    assert any(
        "the objective is" in d
        for d in audited(LLAMA, PIPE, 9.0, replace(plan, certificate=faster)).disagreements
    )
    proven = replace(plan.certificate, bound_s=plan.certificate.objective_s * 1.1)
    assert (
        audited(LLAMA, PIPE, 9.0, replace(plan, certificate=proven))
        .disagreements[0]
        .startswith("certificate: its bound")
    )
    smaller = replace(
        plan.predicted,
        peak_memory_bytes=tuple(size - 1 for size in plan.predicted.peak_memory_bytes),
    )
    assert len(audited(LLAMA, PIPE, 9.0, replace(plan, predicted=smaller)).disagreements) == 2
    without = replace(plan, certificate=replace(plan.certificate, ledger=()))
    assert "ledger has 0 blocks" in audited(LLAMA, PIPE, 9.0, without).disagreements[0]
    for other in (
        replace(plan, zero=0),
        replace(plan, micro_batch=2, num_microbatches=plan.num_microbatches * 2),
    ):
        assert audited(LLAMA, PIPE, 9.0, other).disagreements


def test_tied_parameters_must_be_stored_alike():
    pins = (("pp", 1), ("tp", 2), ("zero", 0), ("micro_batch", 2), ("recompute", "none"))
    plan = planned(GPT, pins)
    check(audited(GPT, pins))
    base, segments = priced_segments(plan, traced_of(GPT), request_of(dict(pins)))
    (number, name), *_ = base.shared[0].paying
    payer = base.segments[number]
    op = next(op for op in base.classes[payer].ops if op.name == name)
    now = (
        segments[0].chosen[name] if segments[0].class_index == payer else segments[-1].chosen[name]
    )
    other = next(s for s in op.strategies if s.outputs[0].value != now.outputs[0].value)
    number = next(
        n
        for n, b in enumerate(plan.blocks)
        if name in b.ops and b.name == traced_of(GPT).classes[payer].name
    )
    wrong = altered(
        plan, number, name, strategy=other.name, inputs=other.inputs, outputs=other.outputs
    )
    try:
        found = audited(GPT, pins, 80.0, wrong)
    except AutoparError as error:
        assert "nothing converts that" in str(error)
    else:
        assert any("one tensor is stored in several ways" in d for d in found.disagreements)


def test_every_op_must_be_there():
    plan = planned(LLAMA, PIPE, 9.0)
    name = next(iter(plan.blocks[0].ops))
    rest = {op: axes for op, axes in plan.blocks[0].ops.items() if op != name}
    wrong = replace(plan, blocks=(replace(plan.blocks[0], ops=rest), *plan.blocks[1:]))
    try:
        found = audited(LLAMA, PIPE, 9.0, wrong)
    except AutoparError as error:
        assert name in str(error)
    else:
        assert any(f"the plan lacks ops of this model: {name}" in d for d in found.disagreements)


def test_what_is_printed():
    plan, found = planned(LLAMA, PIPE, 9.0), audited(LLAMA, PIPE, 9.0)
    words = words_of(found.reply())
    assert (
        "Every edge agrees; the parts sum to the objective" in words and "memory of rank 1" in words
    )
    data = json.loads(json.dumps(found.reply().data))
    assert (
        data["passes"]
        and data["audited_s"] == found.audited_s
        and data["memory_bytes"][1]["audited"] == found.audited_bytes[1]
    )
    wrong = audited(LLAMA, PIPE, 9.0, replace(plan, zero=0))
    assert "THE AUDIT FAILS" in words_of(wrong.reply()) and not wrong.reply().data["passes"]


def test_the_audit_shares_no_code_with_the_solver():
    for name in ("audit", "plan_costs"):
        tree = ast.parse((RECHECK / f"{name}.py").read_text())
        modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not any(module.startswith("autopar.solve") for module in modules)


@pytest.mark.parametrize(
    "pins",
    [
        {"dp": 8, "tp": 1, "pp": 1},
        {"pp": 2, "dp": 4, "tp": 1, "schedule": "1f1b", "micro_batch": 1},
        {"pp": 2, "dp": 2, "tp": 2, "schedule": "interleaved_1f1b", "micro_batch": 1},
        {"pp": 2, "dp": 4, "tp": 1, "schedule": "zero_bubble", "micro_batch": 1},
    ],
    ids=["alone", "1f1b", "interleaved", "zero bubble"],
)
def test_a_slow_host_is_counted_alike_by_search_audit_and_replay(pins):
    request = request_of(pins)
    device = replace(request.cluster.one_kind.device, dispatch_s=2e-3)
    request = replace(request, cluster=replace(request.cluster.one_kind, device=device))
    plan = api.plan_traced(traced_of(LLAMA), request, time_limit_s=8.0)
    waits_s = plan.predicted.breakdown["host"]
    assert waits_s > 0.3 * plan.predicted.step_time_s
    check(found := audit(plan, traced_of(LLAMA), request))
    assert found.parts_s["waiting for the host"] == pytest.approx(waits_s)
    assert not replay(plan, traced_of(LLAMA), request).disagreements
    assert plan.certificate.bound_s <= plan.predicted.step_time_s
