"""autopar.diff: equal plans are equal, and every field that a plan decides or predicts is told."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
from support.explain_tasks import task, text_of, words_of

from autopar.explaining.diff import diff, diff_reply
from autopar.explaining.plan_report import plan_text
from autopar.ir.fusion import Fusion
from autopar.ir.plan import Plan
from autopar.text.plan_words import staleness


def base() -> Plan:
    return task().plan({"tp": 4})


def with_op(plan: Plan, op: str, strategy: str) -> Plan:
    """The plan with another strategy of one op of every block that has it."""
    blocks = []
    for block in plan.blocks:
        ops = dict(block.ops)
        if op in ops:
            ops[op] = ops[op] | {"tp": replace(ops[op]["tp"], strategy=strategy)}
        blocks.append(replace(block, ops=ops))
    return replace(plan, blocks=tuple(blocks))


def with_prediction(plan: Plan, **changes) -> Plan:
    return replace(plan, predicted=replace(plan.predicted, **changes))


CHANGES = {
    "model: model hash": lambda p: replace(p, model_hash="0" * 64),
    "cluster: cluster name h100:8 -> lab": lambda p: replace(p, cluster_name="lab"),
    "cost model: cost model version": lambda p: replace(p, cost_model_version="0"),
    "choices: ep 1 -> 2": lambda p: replace(p, mesh=replace(p.mesh, ep=2)),
    "choices: order pp-dp-ep-cp-tp -> tp-dp": lambda p: replace(p, mesh=replace(p.mesh, order="tp-dp")),
    "choices: zero": lambda p: replace(p, zero=(p.zero + 1) % 4),
    "choices: shard 0 -> 2": lambda p: replace(p, shard=2),
    "choices: recompute none -> full": lambda p: replace(p, recompute="full"),
    "choices: offload none -> optimizer": lambda p: replace(p, offload="optimizer"),
    "choices: fuse off -> norms": lambda p: replace(p, fusion=Fusion("norms")),
    "prediction: host memory": lambda p: with_prediction(p, host_bytes=2**30),
    "choices: num_microbatches": lambda p: replace(p, num_microbatches=p.num_microbatches + 1),
    "choices: global_batch 16 -> 32": lambda p: replace(p, global_batch=32),
    "stages: stage 0": lambda p: replace(p, stages=(p.stages[0][:-1], *p.stages[1:])),
    "blocks: recompute of layers.0 none -> full": lambda p: replace(p, blocks=(p.blocks[0], replace(p.blocks[1], recompute="full"),
                                                                               *p.blocks[2:])),
    "ops: layers.0 q_proj over tp": lambda p: with_op(p, "q_proj", "i"),
    "prediction: step time": lambda p: with_prediction(p, step_time_s=2 * p.predicted.step_time_s),
    "prediction: peak memory": lambda p: with_prediction(p, peak_memory_bytes=(2 * p.predicted.peak_memory_bytes[0],)),
    "prediction: forward compute": lambda p: with_prediction(p, breakdown=p.predicted.breakdown | {"forward": 1.0}),
    "prediction: optimizer state": lambda p: with_prediction(p, memory=p.predicted.memory | {"optimizer": 2**31}),
    "certificate: status": lambda p: replace(p, certificate=replace(p.certificate, status="time limit")),
    "made for: target - -> megatron": lambda p: replace(p, made_for=replace(p.made_for, target="megatron")),
    "choices: devices": lambda p: replace(p, devices=("h100", "a100-80g")),
    "notes: notes - -> careful": lambda p: replace(p, notes=("careful",)),
}  # fmt: skip


@pytest.mark.parametrize("words", CHANGES)
def test_every_change_is_told_and_nothing_else(words):
    changed = CHANGES[words](base())
    found = diff(base(), changed)
    assert len(found) == 1 and str(found[0]).startswith(words), [str(d) for d in found]
    back = diff(changed, base())
    assert (back[0].ours, back[0].theirs) == (found[0].theirs, found[0].ours)
    assert asdict(found[0])["what"] == found[0].what
    text_of(diff_reply(("a.json", "b.json"), (base(), changed)))


def test_equal_plans_say_so():
    plan = Plan.from_json(base().to_json())
    searched_longer = replace(
        plan, certificate=replace(plan.certificate, solve_time_s=99.0, meshes=())
    )
    assert diff(base(), plan) == () == diff(base(), searched_longer)
    assert "The plans are equal." in text_of(diff_reply(("a", "b"), (plan, searched_longer)))


def split(plan: Plan, kept: int) -> Plan:
    """The plan with recomputation of the layers after the first `kept`."""
    first, layers, last = plan.blocks
    some, others = layers.segments[:kept], layers.segments[kept:]
    return replace(
        plan,
        blocks=(
            first,
            replace(layers, segments=some),
            replace(layers, segments=others, recompute="full"),
            last,
        ),
    )


def test_layers_of_one_structure_that_recompute_differently_are_told_apart():
    assert len(base().blocks) == 3 and len(base().blocks[1].segments) == 2
    found = diff(base(), split(base(), 1))
    assert [(d.part, d.what) for d in found] == [
        ("blocks", "layers.0, recompute none"),
        ("blocks", "layers.0, recompute full"),
    ]
    assert found[0].theirs.startswith("1 segments") and found[1].ours is None
    assert diff(split(base(), 1), split(base(), 1)) == ()
    text_of(diff_reply(("a", "b"), (base(), split(base(), 1))))


def test_prediction_changes_are_in_percent():
    slower = with_prediction(base(), step_time_s=1.5 * base().predicted.step_time_s)
    assert str(diff(base(), slower)[0]).endswith("(+50.0 %)")


def test_ops_are_told_in_words_and_hidden_ones_counted():
    other = with_op(with_op(base(), "q_proj", "i"), "silu", "d1")
    shown = words_of(diff_reply(("a", "b"), (base(), other)))
    assert (
        "layers.0 q_proj over tp" in shown and "row-parallel" in shown and "and 1 more ops" in shown
    )


def test_plans_of_other_models_share_no_blocks_but_can_be_told_apart():
    found = diff(base(), task("gpt-tiny").plan({"tp": 4}))
    assert {"model", "prediction"} <= {difference.part for difference in found}
    text_of(diff_reply(("a", "b"), (base(), task("gpt-tiny").plan({"tp": 4}))))


def test_a_stale_plan_is_noted_where_it_is_shown():
    stale = replace(base(), cost_model_version="0")
    assert staleness(base()) == "" and "predicted by cost model 0" in staleness(stale)
    assert (
        "This plan was predicted by cost model 0" in plan_text(stale)
        and "cost model" not in plan_text(base()).partition("space")[0]
    )
    assert "stale" in text_of(diff_reply(("a", "b"), (base(), stale))) and "stale" not in plan_text(
        base()
    )
