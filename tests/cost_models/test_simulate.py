"""The discrete-event simulation of action lists: by hand, invariants of its timelines, deadlocks, contradictions."""

from __future__ import annotations

import itertools

import autopar_cost_models as cm
import pytest
from hypothesis import given, settings
from support.effort import examples
from support.random_pipelines import actions_of, both, layers, pipelines

A = cm.Action


def lists(*ranks: str) -> list[list[cm.Action]]:
    """Action lists from torch's notation: "0F0 0B0"."""
    return [[A(word[1], int(word[0]), int(word[2:])) for word in rank.split()] for rank in ranks]


def test_timeline_by_hand():
    """Two ranks, two micro-batches, forward 1, backward 2, messages of 0.5 that overlap."""
    result = cm.simulate_pipeline(
        lists("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"), layers([1.0, 1.0]), 0.5
    )
    spans = [[(str(s.action), s.start_s, s.end_s) for s in line] for line in result.timelines]
    assert spans == [
        [("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 5, 7), ("0B1", 8, 10)],
        [("1F0", 1.5, 2.5), ("1B0", 2.5, 4.5), ("1F1", 4.5, 5.5), ("1B1", 5.5, 7.5)],
    ]
    assert result.makespan_s == 10 and result.in_flight == (2, 1) and result.busy_s(0) == 6


def test_a_sender_that_does_not_overlap_waits():
    result = cm.simulate_pipeline(
        lists("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"), layers([1.0, 1.0]), 0.5, overlap=False
    )
    starts = [[s.start_s for s in line] for line in result.timelines]
    assert starts == [[0, 1.5, 5, 8.5], [1.5, 2.5, 5, 6]]
    assert result.makespan_s == 10.5


def test_split_backward_frees_the_stage_before():
    """Rank 1 sends the gradient of its input after I, and computes its weights while rank 0 works."""
    times = [cm.StageTimes(1, 3, 1), cm.StageTimes(1, 3, 1)]
    result = cm.simulate_pipeline(lists("0F0 0B0", "1F0 1I0 1W0"), times)
    assert [(s.start_s, s.end_s) for s in result.timelines[1]] == [(1, 2), (2, 4), (4, 5)]
    assert result.makespan_s == 4 + 3


def test_stages_of_one_rank_hand_over_without_a_message():
    result = cm.simulate_pipeline(
        lists("0F0 1F0 1B0 0B0"), layers([1.0, 1.0]), hop_s=9.0, overlap=False
    )
    assert (
        result.makespan_s == 6 and result.in_flight == (2,) and result.in_flight_by_stage == (1, 1)
    )


def test_a_deadlock_names_rank_action_and_what_it_waits_for():
    with pytest.raises(
        ValueError,
        match="deadlock: rank 0 waits at action 1 of 4, 0B0, for the gradient of stage 1, micro-batch 0",
    ):
        cm.simulate_pipeline(lists("0F0 0B0 0F1 0B1", "1F1 1F0 1B0 1B1"), layers([1.0, 1.0]))
    with pytest.raises(
        ValueError,
        match="rank 1 waits at action 0 of 1, 1F3, for the forward of stage 0, micro-batch 3",
    ):
        cm.simulate_pipeline(lists("0F0", "1F3"), layers([1.0, 1.0]))
    with pytest.raises(
        ValueError,
        match="rank 0 waits at action 1 of 3, 0W0, for the backward to the input of stage 0",
    ):
        cm.simulate_pipeline(lists("0F0 0W0 0I0"), layers([1.0]))


def test_contradictions():
    one = layers([1.0])
    with pytest.raises(ValueError, match="rank 0 runs 0F0 a second time"):
        cm.simulate_pipeline(lists("0F0 0F0"), one)
    with pytest.raises(ValueError, match="rank 0 runs 0I0 a second time"):
        cm.simulate_pipeline(lists("0F0 0B0 0I0"), one)
    with pytest.raises(ValueError, match="1F0, but there are times for 1 stages"):
        cm.simulate_pipeline(lists("0F0", "1F0"), one)
    with pytest.raises(ValueError, match="0B0 is on rank 1, but rank 0 has stage 0"):
        cm.simulate_pipeline(lists("0F0", "0B0"), one)
    with pytest.raises(ValueError, match="no rank runs stage 1 of 2"):
        cm.simulate_pipeline(lists("0F0"), layers([1.0, 1.0]))
    with pytest.raises(ValueError, match="hop_s=-1"):
        cm.simulate_pipeline(lists("0F0"), one, -1)
    with pytest.raises(ValueError, match="unknown kind of action 'X'"):
        A("X", 0, 0)
    with pytest.raises(ValueError, match="micro_batch=-1"):
        A("F", 0, -1)


@settings(max_examples=examples(15, 60))
@given(pipelines(ranks=(1, 2, 4), micro_batches=12))
def test_timelines_keep_the_rules(pipeline):
    """Each rank runs its list in order and one thing at a time; nothing starts before what it needs has come."""
    schedule, stages, p, m, hop_s, _overlap = pipeline
    _, result = both(*pipeline)
    end_s = {span.action: span.end_s for line in result.timelines for span in line}
    for rank, line in enumerate(result.timelines):
        assert [span.action for span in line] == list(
            actions_of(schedule, p, len(stages) // p, m)[rank]
        )
        assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(line))
        for span in line:
            kind, stage, k = span.action.kind, span.action.stage, span.action.micro_batch
            travel_s = hop_s if p > 1 else 0.0
            if kind == "F" and stage:
                assert span.start_s >= end_s[A("F", stage - 1, k)] + travel_s
            if kind in "BI" and stage < len(stages) - 1:
                assert span.start_s >= end_s[A(kind, stage + 1, k)] + travel_s
            if kind != "F":
                assert span.start_s >= end_s[A("I" if kind == "W" else "F", stage, k)]
    assert result.makespan_s == max(end_s.values())
