"""why-not: what a pinned choice costs, part by part, and what forbids one."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from support.explain_tasks import task, text_of, words_of

from autopar.errors import AutoparError, NoPlanFits
from autopar.explaining.cost_parts import memory_parts, time_parts
from autopar.explaining.why_not import check_asked, why_not, why_not_reply
from autopar.ir.plan import Plan
from autopar.request.pins import choices_of, pins_of
from autopar.text.units import ms

ROOMY = replace(task().cluster, device=replace(task().cluster.device, memory_bytes=2 * 2**30))
"""A cluster whose devices hold the plan without tp, and none with it: every communicator takes memory."""


def test_the_difference_is_that_of_the_plans_and_adds_up():
    t = task()
    answer = why_not(t.plan, t.cluster, {"zero": 1, "tp": 4})
    assert answer.chosen == t.plan() and answer.pinned == t.plan({"zero": 1, "tp": 4})
    assert answer.differs == ("tp" if answer.chosen.zero == 1 else "zero") and not answer.same
    assert (
        answer.difference_s
        == answer.pinned.predicted.step_time_s - answer.chosen.predicted.step_time_s
        > 0
    )
    assert sum(b - a for _, a, b in time_parts(answer.chosen, answer.pinned)) == pytest.approx(
        answer.difference_s
    )
    sizes = memory_parts(answer.chosen, answer.pinned)
    for column, plan in ((1, answer.chosen), (2, answer.pinned)):
        assert sum(row[column] for row in sizes) == max(plan.predicted.peak_memory_bytes)
    shown = words_of(why_not_reply(answer))
    assert (
        "why not zero=1,tp=4?" in shown
        and "longer a step" in shown
        and "First pinned choice that differs: tp=4" in shown
    )
    assert (
        f"dp {answer.chosen.mesh.dp} -> {answer.pinned.mesh.dp}" in shown
        and "forward compute" in shown
    )


def test_a_pipeline_is_compared_part_by_part_with_a_plan_that_has_none():
    t = task()
    answer = why_not(t.plan, t.cluster, {"pp": 2, "micro_batch": 1})
    rows = {part: (a, b) for part, a, b in time_parts(answer.chosen, answer.pinned)}
    assert {"stages", "bubble", "step"} <= rows.keys() and not {
        "forward",
        "backward",
        "conversion",
    } & rows.keys()
    for column, plan in enumerate((answer.chosen, answer.pinned)):
        assert sum(row[column] for row in rows.values()) == pytest.approx(
            plan.predicted.step_time_s
        )
    assert "pipeline bubble" in text_of(why_not_reply(answer))


def test_the_chosen_plan_is_no_alternative_and_is_planned_once():
    t = task()
    chosen = t.plan()
    t.asked.clear()
    answer = why_not(t.plan, t.cluster, {"tp": chosen.mesh.tp, "zero": chosen.zero})
    assert answer.same and answer.differs == "" and t.asked == [{}]
    assert (
        "is what the chosen plan does" in text_of(why_not_reply(answer))
        and why_not_reply(answer).data["answer"] == "chosen"
    )


def test_a_search_that_ended_before_the_proof_says_so():
    t = task()
    answer = why_not(t.plan, t.cluster, {"tp": 4})
    assert "with a gap" not in words_of(why_not_reply(answer))  # proven
    pinned, chosen_s = answer.pinned, answer.chosen.predicted.step_time_s
    more_s = (pinned.predicted.step_time_s - chosen_s) / 2
    for bound_s, said in (
        (chosen_s + more_s, f"{ms(more_s)} more"),
        (chosen_s / 2, f"{ms(chosen_s / 2)} less"),
    ):
        gap = 1 - bound_s / pinned.predicted.step_time_s
        open_ = replace(
            answer,
            pinned=replace(
                pinned, certificate=replace(pinned.certificate, bound_s=bound_s, gap=gap)
            ),
        )
        shown = words_of(why_not_reply(open_))
        assert (
            f"The search under tp=4 ended with a gap of {100 * gap:.2g} %" in shown
            and said + " than the chosen one" in shown
        )


def test_a_given_plan_need_not_be_the_best_of_those_with_the_pins():
    t = task()
    best = t.plan({"tp": 2})
    slower = t.plan(
        {
            "tp": 2,
            "zero": next(zero for zero in (0, 1, 2) if zero != best.zero),
            "micro_batch": 1,
            "recompute": "full",
        }
    )
    t.asked.clear()
    answer = why_not(t.plan, t.cluster, {"tp": 2}, slower)
    assert (
        t.asked == [{"tp": 2}]
        and answer.chosen == slower
        and answer.pinned == best
        and not answer.same
        and answer.difference_s < 0
    )
    shown = words_of(why_not_reply(answer))
    assert "The saved plan is not the fastest." in shown and "First pinned choice" not in shown
    assert why_not_reply(answer).data["answer"] == "faster"
    assert why_not(t.plan, t.cluster, {"tp": 2}, best).same


def test_a_pin_that_no_plan_records_is_the_chosen_plan_if_all_decisions_agree():
    t = task()
    answer = why_not(t.plan, t.cluster, {"sequence_parallel": False})
    assert t.plan().mesh.tp == 1  # without tp there is no sequence parallelism, whatever is pinned
    assert answer.differs == "sequence_parallel" and answer.same


def test_memory_that_binds_is_named_with_its_parts():
    t = task()
    answer = why_not(t.plan, ROOMY, {"tp": 2})
    assert (
        answer.pinned is None and answer.chosen.mesh.tp == 1 and answer.capacity_bytes == 2 * 2**30
    )
    with pytest.raises(NoPlanFits) as error:
        t.plan({"tp": 2}, ROOMY)
    least, peak = error.value.least_bytes, max(answer.least.predicted.peak_memory_bytes)
    assert 2 * 2**30 < least <= peak <= 1.001 * least and answer.least.mesh.tp == 2
    with pytest.raises(NoPlanFits):  # nothing with tp=2 needs less
        t.plan(
            {"tp": 2}, replace(ROOMY, device=replace(ROOMY.device, memory_bytes=int(0.999 * least)))
        )
    shown = words_of(why_not_reply(answer))
    for words in (
        "tp=2 does not fit",
        "Memory binds",
        f"of {2:.2f} GiB",
        "The least memory under the pins",
        "fixed (context, buffers)",
    ):
        assert words in shown, words
    data = json.loads(why_not_reply(answer).json())
    assert (
        data["answer"] == "does not fit"
        and Plan.from_json(json.dumps(data["least_memory"]["plan"])) == answer.least
    )


@pytest.mark.parametrize(("pin", "words"), [({"tp": 3}, "tp=3 does not divide 8"), ({"tp": 4, "dp": 4}, "16 devices"),
                                        ({"tp": 1, "schedule": "gpipe"}, "schedule=gpipe"), ({"zero": 7}, "not a ZeRO stage")])  # fmt: skip
def test_what_is_impossible_is_answered_with_the_constraint(pin, words):
    t = task()
    answer = why_not(t.plan, t.cluster, pin)
    assert answer.pinned is None and answer.least is None and words in answer.reason
    assert (
        "is impossible" in words_of(why_not_reply(answer))
        and why_not_reply(answer).data["answer"] == "impossible"
    )


def test_a_faster_choice_says_that_it_was_not_searched():
    t = task()
    slow = replace(
        t.plan(), predicted=replace(t.plan().predicted, step_time_s=1.0, breakdown={"forward": 1.0})
    )

    def plan_on(pin, cluster):
        fast = replace(slow.predicted, step_time_s=0.75, breakdown={"forward": 0.75})
        return replace(slow, recompute="selective", predicted=fast) if pin else slow

    answer = why_not(plan_on, t.cluster, {"recompute": "selective"})
    assert answer.difference_s == -0.25 and why_not_reply(answer).data["answer"] == "faster"
    shown = words_of(why_not_reply(answer))
    assert (
        "takes 250 ms less a step (0.750 x). Less: forward compute 250 ms." in shown
        and "outside of what is searched" in shown
    )


def test_questions_that_are_none():
    with pytest.raises(AutoparError, match="needs the choice"):
        check_asked({})
    with pytest.raises(AutoparError, match="unknown pin 'tq'"):
        check_asked({"tq": 2})


def test_nothing_that_fits_without_pins_is_an_error():
    t = task()
    tiny = replace(t.cluster, device=replace(t.cluster.device, memory_bytes=2**30 + 2**29))
    with pytest.raises(NoPlanFits, match="No plan fits"):
        why_not(t.plan, tiny, {"tp": 2})


def test_choices_can_be_pinned_and_give_the_plan_again():
    t = task()
    chosen = t.plan()
    again = t.plan(pins_of(chosen))
    assert choices_of(again) == choices_of(chosen) and again.predicted.step_time_s == pytest.approx(
        chosen.predicted.step_time_s
    )
    assert (
        "recompute" not in pins_of(replace(chosen, recompute="mixed"))
        and pins_of(chosen)["recompute"] == chosen.recompute
    )
