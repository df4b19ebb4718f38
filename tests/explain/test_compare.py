"""compare: plans side by side, saved ones and impossible ones among them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from support.explain_tasks import task, text_of, words_of

from autopar.errors import AutoparError
from autopar.explaining.compare import (
    ComparedPlan,
    Impossible,
    check_compared,
    compare,
    compare_reply,
)
from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan import Plan
from autopar.ir.plan_fields import OUT_OF_TIME
from autopar.report.page import page_of


def test_the_best_comes_first_and_the_impossible_with_its_reason():
    t = task()
    entries = compare(t.plan, t.cluster, [{"tp": 2}, {"tp": 3}, {"tp": 4, "recompute": "full"}], [])
    assert [entry.name for entry in entries] == ["best", "tp=2", "tp=3", "tp=4,recompute=full"]
    assert isinstance(entries[2], Impossible) and "does not divide 8" in entries[2].reason
    times = [
        entry.plan.predicted.step_time_s for entry in entries if isinstance(entry, ComparedPlan)
    ]
    assert times[0] == min(times)
    data = json.loads(compare_reply(entries, t.cluster).json())
    assert [entry["ratio"] for entry in data] == [
        pytest.approx(x) for x in (1.0, times[1] / times[0])
    ] + [None, times[2] / times[0]]
    assert Plan.from_json(json.dumps(data[1]["plan"])) == entries[1].plan
    shown = words_of(compare_reply(entries, t.cluster))
    for words in (
        "recompute=full",
        "of the best",
        "1.000 x",
        "memory of 79.65 GiB",
        "tp=3 is not possible: tp=3 does not divide 8",
    ):
        assert words in shown, words
    assert "cost of" not in shown


@pytest.mark.parametrize("share", [0.0, 0.88])
def test_a_search_that_was_cut_has_no_best(share):
    t = task()

    def cut(pin, cluster):
        plan = t.plan(pin, cluster)
        time_s = plan.predicted.step_time_s
        late, *others = plan.certificate.meshes
        proof = replace(
            plan.certificate,
            status="feasible",
            bound_s=share * time_s,
            gap=1 - share,
            fastest={},
            meshes=({**late, "reason": OUT_OF_TIME}, *others),
        )
        return replace(plan, certificate=proof)

    entries = compare(cut, t.cluster, [{"tp": 2}], [])
    assert [entry.name for entry in entries] == ["best found", "tp=2"]
    shown = words_of(compare_reply(entries, t.cluster))
    known = (
        "another plan may take up to 12 % less"
        if share
        else "no useful lower bound was found (gap 100 %)"
    )
    page = page_of(compare_reply(entries, t.cluster)).html()
    for words in ("of the best found", "feasible, gap", "a higher --time-limit", known):
        assert words in shown, words
    assert "of the best found<" in page and known in page and "of the best<" not in page


def test_a_price_gives_the_cost_of_tokens():
    t = task()
    priced = replace(t.cluster, price_per_device_hour=2.5)
    entries = compare(t.plan, priced, [{"tp": 2}], [])
    plan = entries[1].plan
    # devices x price x time / tokens
    dollars = 8 * 2.5 / 3600 * plan.predicted.step_time_s / (16 * 32) * 1e6
    assert compare_reply(entries, priced).data[1]["dollars_per_million_tokens"] == pytest.approx(
        dollars
    )
    assert (
        f"${dollars:.4g}" in text_of(compare_reply(entries, priced))
        and plan.cluster_hash == t.cluster.spec_hash()
    )


def test_many_plans_are_as_many_tables_as_the_terminal_needs():
    t = task()
    entries = compare(t.plan, t.cluster, [{"tp": 2}, {"tp": 4}, {"zero": 0}], [])
    assert text_of(compare_reply(entries, t.cluster), 80).count("micro-batches") == 2
    assert text_of(compare_reply(entries, t.cluster), 120).count("micro-batches") == 1
    assert text_of(compare_reply(entries, t.cluster), 45).count("micro-batches") == 4


def test_saved_plans_are_compared_if_they_are_for_the_same_task():
    t = task()
    own = t.plan({"tp": 4})
    other_model = task("gpt-tiny").plan()
    saved = [("own", own), ("stale", replace(own, cost_model_version="0")), ("model", other_model),
             ("cluster", t.plan(cluster=ClusterSpec.parse("h100:4"))), ("batch", t.plan(batch=32))]  # fmt: skip
    entries = {entry.name: entry for entry in compare(t.plan, t.cluster, [], saved)}
    assert entries["own"].plan is own and not entries["own"].note
    assert (
        isinstance(entries["stale"], ComparedPlan)
        and "predicted by cost model 0" in entries["stale"].note
    )
    reasons = {
        "model": "is for GPT",
        "cluster": "is for cluster h100:4",
        "batch": "global batch of 32, not of 16",
    }
    for name, words in reasons.items():
        assert isinstance(entries[name], Impossible) and words in entries[name].reason, entries[
            name
        ].reason
    shown = words_of(compare_reply(list(entries.values()), t.cluster))
    assert "stale is to be read with care" in shown and "batch is not possible" in shown


def test_a_pin_of_the_best_plan_is_not_planned_again():
    t = task()
    best = t.plan()
    t.asked.clear()
    entries = compare(t.plan, t.cluster, [{"dp": best.mesh.dp}], [])
    assert entries[1].plan is best and t.asked == [{}]


def test_comparisons_that_are_none():
    with pytest.raises(AutoparError, match="unknown pin 'speed'"):
        check_compared([{"tp": 2}, {"speed": 9}], [])
