"""A plan file of which anything was changed is refused in words, or read and shown: never a traceback."""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.effort import examples
from support.explain_tasks import task, text_of

from autopar.errors import AutoparError
from autopar.explaining.diff import diff_reply
from autopar.explaining.lints import lint
from autopar.explaining.plan_report import PlanFacts, plan_reply
from autopar.ir.plan import Plan

OTHERS = (
    None,
    -1,
    0,
    "x",
    [],
    {},
    3.7,
    True,
    "",
    [1],
    {"a": 1},
    10**30,
    float("inf"),
    float("nan"),
)


def places(data, path=()):
    """The path of everything in nested data."""
    for key, value in (
        data.items()
        if isinstance(data, dict)
        else enumerate(data)
        if isinstance(data, list)
        else ()
    ):
        yield (*path, key)
        yield from places(value, (*path, key))


def damaged(data, path, value):
    """A copy with another value at a place, or (...) without it."""
    found = inside = copy.deepcopy(data)
    for key in path[:-1]:
        inside = inside[key]
    if value is ...:
        del inside[path[-1]]
    else:
        inside[path[-1]] = value
    return found


def show(text: str) -> None:
    base, t = task().plan({"pp": 2}), task()
    plan = Plan.from_json(text)
    text_of(plan_reply(PlanFacts(plan, t.cluster, lint(plan, t.cluster))), 200)
    text_of(diff_reply(("one", "other"), (base, plan)), 200)
    assert Plan.from_json(plan.to_json()).to_json() == plan.to_json()


@settings(max_examples=examples(37, 150))
@given(st.data())
def test_whatever_is_changed_is_told_or_shown(data):
    whole = json.loads(task().plan({"pp": 2}).to_json())
    of_whole = list(places(whole))
    path = data.draw(
        st.sampled_from([p for p in of_whole if len(p) < 3]) | st.sampled_from(of_whole)
    )
    value = data.draw(st.sampled_from([..., *OTHERS]))
    try:
        show(json.dumps(damaged(whole, path, value)))
    except AutoparError as error:
        assert str(error).startswith("plan ") and len(str(error).splitlines()) == 1


@pytest.mark.parametrize(("path", "value"), [
    (("predicted", "tokens_per_s"), -1), (("offload",), -1), (("devices",), ["a100"]), (("num_microbatches",), []), (("recompute",), 3),
    (("certificate", "status"), []), (("model_hash",), 7), (("certificate", "meshes", 0, "outcome"), ...), (("zero",), 0.0),
    (("certificate", "meshes", 0, "mesh", "ep"), "2"), (("certificate", "meshes", 0, "time_s"), "1"), (("stages", 0, 0), 5),
    (("certificate", "meshes", 0, "shard"), []),
    (("blocks", 2, "segments"), []), (("precision",), "x"), (("certificate", "bound_s"), -1),
    (("predicted", "memory", "kept"), -1), (("certificate", "ledger", 0), -1), (("certificate", "ledger", 0, "static_bytes"), []),
])  # fmt: skip
def test_what_cannot_be_shown_is_refused(path, value):
    whole = json.loads(task().plan({"pp": 2}).to_json())
    with pytest.raises(AutoparError, match="plan is not a complete plan"):
        show(json.dumps(damaged(whole, path, value)))
    show(json.dumps(whole))


def test_a_file_of_brackets_is_no_plan():
    with pytest.raises(AutoparError, match="plan is not a plan: not valid JSON"):
        Plan.from_json("[" * 100_000)


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("degree", ["pp", "dp", "cp", "tp", "ep", "order"])
def test_a_degree_that_a_candidate_lacks_is_1(degree, number):
    whole = json.loads(task().plan({"pp": 2}).to_json())
    show(json.dumps(damaged(whole, ("certificate", "meshes", number, "mesh", degree), ...)))
