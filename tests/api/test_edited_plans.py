"""A plan file that was edited by hand: refused with the field that is wrong, or still a plan that trains exactly as one device does."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
from support.effort import every, examples, tried
from support.exactness import case, train_under

from autopar.errors import AutoparError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan import Plan
from autopar.ir.plan_fields import EDITED
from autopar.planning.plan_model import check_plan
from autopar.planning.planner import plan_traced
from autopar.request.pins import Pins
from autopar.request.plan_request import PlanRequest

NAME, CLUSTER = "llama-tiny", ClusterSpec.parse("cpu:4")
PINS = {
    "pipeline": {"pp": 2, "tp": 2, "micro_batch": 2, "schedule": "1f1b"},
    "sharded": {"dp": 2, "tp": 2, "zero": 3},
}
ODD = (
    None,
    -1,
    0,
    1.5,
    10**30,
    True,
    "",
    "x",
    "9" * 100_000,
    [],
    [[]],
    ["x"],
    {},
    {"x": 1},
    float("nan"),
)


@cache
def data_of(kind: str) -> dict:
    request = PlanRequest(CLUSTER, 8, Pins.of(PINS[kind]), "fp64", NAME)
    data = json.loads(plan_traced(case(NAME).traced, request).to_json())
    data["certificate"]["meshes"] = data["certificate"]["meshes"][:2]  # of hundreds
    return data


def outcome(data: Any) -> str:
    """'' if the text is a plan for the model, else the refusal."""
    try:
        check_plan(Plan.from_json(json.dumps(data)), case(NAME).traced, CLUSTER)
    except AutoparError as error:
        assert len(str(error)) < 4100 and "\n" not in str(error)
        return str(error)
    return ""


def places(data: Any, path: tuple = ()) -> Iterator[tuple]:
    """The paths of all fields, of each list, and of the ops of a block, those of the first and last entry."""
    yield path
    if isinstance(data, dict):
        for key in [*data][:: max(len(data) - 1, 1)] if path[-1:] == ("ops",) else data:
            yield from places(data[key], (*path, key))
    elif isinstance(data, list) and data:
        for number in sorted({0, len(data) - 1}):
            yield from places(data[number], (*path, number))


def edited(data: dict, path: tuple, change: Callable[[Any, Any], None]) -> dict:
    found = copy.deepcopy(data)
    holder = found
    for step in path[:-1]:
        holder = holder[step]
    change(holder, path[-1])
    return found


FREE = {"solve_time_s", "space", "rules", "notes", "model_name", "cluster_name", "cost_model_version", "mfu", "tokens_per_s",
        "host_bytes", "memory", "peak_memory_bytes", "meshes", "ledger", "gap", "objective_s", "bound_s", "digest", "breakdown", "devices",
        "reason", "status", "made_for", "details", "tolerance", "fastest", "simpler_left", "runners_up", "headroom",
        "unlimited_s"}  # fmt: skip
"""What no rank reads: an edit of these changes what is said of a plan, not what it does."""
LEGAL = {"precision", "recompute", "zero", "shard", "offload", "micro_batch_mean"}
"""Choices of which several are plans."""


@pytest.mark.parametrize("kind", every(2, PINS))
def test_every_field_with_every_odd_value_is_refused_or_says_the_same(kind):
    """Never another error; where it is accepted it is no part of what ranks do, or another legal choice.

    A ninth of the values for each field in turn, all of them with --runslow.
    """
    data, step_of_values = data_of(kind), examples(9, 1)
    for number, path in enumerate(places(data)):
        if path[:1] in ((), ("format_version",)) or (
            path[:2] == ("certificate", "meshes") and len(path) > 4
        ):
            continue
        if path[:1] == ("blocks",) and "ops" in path and len(path) > 4 and path[1] != 0:
            continue  # alike in all blocks
        holder = data
        for step in path[:-1]:
            holder = holder[step]
        for value in ODD[number % step_of_values :: step_of_values]:
            if value == holder[path[-1]] and type(value) is type(holder[path[-1]]):
                continue
            refusal = outcome(
                edited(data, path, lambda where, key, value=value: where.__setitem__(key, value))
            )
            accepted = (
                FREE & set(path)
                or LEGAL & set(path)
                or (path[0] == "blocks" and path[-1] == "name")
            )
            assert refusal or accepted, (path, value)


@pytest.mark.parametrize("kind", every(2, PINS))
def test_every_field_may_not_be_missing(kind):
    data = data_of(kind)
    optional = FREE | {"offload", "shard", "order", "micro_batch_mean", "fusion", "tp_inside"}
    for path in places(data):
        if path and isinstance(path[-1], str) and path[0] != "format_version":
            refusal = outcome(edited(data, path, lambda where, key: where.pop(key)))
            assert (
                refusal
                or optional & set(path)
                or (path[0] == "mesh" and data["mesh"][path[-1]] == 1)
            ), path


def swap(data: dict) -> None:
    data["stages"][0], data["stages"][1] = data["stages"][1], data["stages"][0]


def reorder(data: dict) -> None:
    data["stages"][0].reverse()


def twice(data: dict) -> None:
    data["stages"][1].insert(0, data["stages"][0][-1])


def move(data: dict) -> None:
    data["stages"][1].insert(0, data["stages"][0].pop(0))


def empty(data: dict) -> None:
    data["stages"][0] += data["stages"][1]
    data["stages"][1] = []


def another(data: dict) -> None:
    data["blocks"][0]["segments"], data["blocks"][2]["segments"] = (
        data["blocks"][2]["segments"],
        data["blocks"][0]["segments"],
    )


def layout(data: dict) -> None:
    block = data["blocks"][1]["ops"]
    block["q_proj"]["tp"][1][0] = "S(0)"


def without_op(data: dict) -> None:
    data["blocks"][1]["ops"].popitem()


@pytest.mark.parametrize(("change", "words"), [
    (swap, "segment 0, where the model has 'prologue'"), (reorder, "the model has 'prologue'"), (twice, "is 2 times in its stages"),
    (move, "the model has 'prologue'"), (empty, "stage 1 has no segments"), (another, "lacks op|has the unknown op"),
    (layout, "which is no strategy of"), (without_op, "lacks op"),
    (lambda d: d["stages"].pop(), "are not those of pp=2|is in its blocks and not in its stages"),
    (lambda d: d["stages"][0].append("layers.9"), "'layers.9' is in its stages and not in its blocks"),
    (lambda d: d["blocks"][1]["segments"].append("layers.9"), "'layers.9' is in its blocks and not in its stages"),
    (lambda d: d["blocks"][1]["segments"].append("prologue"), "'prologue' is 2 times in its blocks"),
    (lambda d: d.update(schedule="2f2b"), "unknown schedule '2f2b'"), (lambda d: d.update(schedule="none"), "schedule 'none'"),
    (lambda d: d.update(schedule="interleaved_1f1b"), "schedule 'interleaved_1f1b' of 2 stages"),
    (lambda d: d.update(num_microbatches=2), "is not its global_batch=8"),
    (lambda d: d.update(num_microbatches=1, micro_batch=8), "1f1b"),
    (lambda d: d["mesh"].update(tp=1, dp=2) or d.update(num_microbatches=2), "[td]p is in one alone"),
    (lambda d: d["mesh"].update(pp=1), "pp=1"),
    (lambda d: d["mesh"].update(cp=2), "cp is in one alone"), (lambda d: d.update(zero=1), "zero=1 shares out over dp and cp"),
    (lambda d: d["blocks"][1].update(recompute="half"), "recompute of block 'layers.0' is 'half'"),
    (lambda d: d["predicted"].update(step_time_s=1e-9), "adds up to"),
    (lambda d: d["certificate"].update(bound_s=9.0), "is more than"),
    (lambda d: d.update(surprise=3), "unknown field 'surprise'"), (lambda d: d["blocks"][0].pop("ops"), "lacks the field ops"),
    (lambda d: d.update(stages="prologue"), "stages is 'prologue', not a list"),
])  # fmt: skip
def test_what_contradicts_itself_or_the_model_is_told_by_its_field(change, words):
    data = copy.deepcopy(data_of("pipeline"))
    change(data)
    with pytest.raises(AutoparError, match=words):
        check_plan(Plan.from_json(json.dumps(data)), case(NAME).traced, CLUSTER)


def boundary(data: dict) -> None:
    data["stages"][1].insert(0, data["stages"][0].pop())


def recomputed(data: dict) -> None:
    data["blocks"][1]["recompute"] = "full"


def gpipe(data: dict) -> None:
    data["schedule"] = "gpipe"


def other_micro_batches(data: dict) -> None:
    data.update(micro_batch=1, num_microbatches=data["num_microbatches"] * data["micro_batch"])


def less_sharing(data: dict) -> None:
    data["zero"] = 1


EDITS = [("pipeline", boundary), ("pipeline", recomputed), ("pipeline", gpipe), ("pipeline", other_micro_batches),
         ("sharded", less_sharing), ("sharded", other_micro_batches)]  # fmt: skip


def test_an_edit_that_leaves_a_plan_trains_exactly_and_is_noted(pool4):
    texts = []
    for kind, change in tried(EDITS[::2], EDITS):
        data = copy.deepcopy(data_of(kind))
        change(data)
        assert outcome(data) == "" and Plan.from_json(json.dumps(data)).notes[-1] == EDITED
        texts.append(json.dumps(data))
    for found in pool4.run(train_under, NAME, texts, timeout_s=120):
        assert all(isinstance(one, tuple) and one[0] <= 1.0 for one in found), found


def test_a_plan_that_nobody_edited_has_no_such_note(tmp_path):
    plan = plan_traced(
        case(NAME).traced, PlanRequest(CLUSTER, 8, Pins.of(PINS["sharded"]), "fp64", NAME)
    )
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan and EDITED not in plan.notes
