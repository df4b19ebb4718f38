"""Pipeline times: the closed forms against simulations of torch's own action lists, textbook formulas, hand-computed cases, errors."""

from __future__ import annotations

import ast
import random
import re
from math import inf, nan
from pathlib import Path

import autopar_cost_models as cm
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.effort import examples, slow_but
from support.random_pipelines import actions_of, both, chunk_counts, layers, pipelines, runs

ROOT = Path(cm.__file__).parent
F_B_W = st.tuples(st.floats(0.1, 10), st.floats(0.1, 10), st.floats(0, 1))


def heavy(kind: str, n: int) -> list[float]:
    """Layers of n stages: equal, a heavy embedding, a heavy vocabulary and loss, both, or one layer more in some stages."""
    counts = [1.0] * n
    counts[0] += {"first": 1.0, "both": 0.4}.get(kind, 0.0)
    counts[-1] += {"last": 1.5, "both": 1.0}.get(kind, 0.0)
    return (
        counts
        if kind != "uneven"
        else [float(random.Random(n * 7 + i).choice([1, 2])) for i in range(n)]
    )


@pytest.mark.parametrize("ranks", slow_but([1, 2], [1, 2, 4, 8, 16]))
@pytest.mark.parametrize("schedule", cm.SCHEDULES)
def test_closed_form_and_simulation_agree_on_a_grid(schedule, ranks):
    """Within 2 %, for messages that are free, overlapped and not overlapped; peaks in flight are equal."""
    worst = 0.0
    few = ranks == 16  # these take longest; random pipelines have the rest
    for chunks in chunk_counts(schedule):
        for m in (
            (3, 16, 17, 40)
            if few
            else sorted({1, 2, ranks, ranks + 1, 5 * ranks // 2, 4 * ranks, 7 * ranks})
        ):
            if not runs(schedule, ranks, chunks, m):
                continue
            for kind in ("both", "uneven") if few else ("equal", "first", "last", "both", "uneven"):
                stages = layers(heavy(kind, ranks * chunks), torch_first=kind == "both")
                for hop_s, overlap in ((0.0, True), (0.1, True), (0.5, True), (0.3, False)):
                    closed, simulated = both(schedule, stages, ranks, m, hop_s, overlap)
                    off = closed.time_s / simulated.makespan_s - 1
                    assert abs(off) <= 0.02, (schedule, ranks, chunks, m, kind, hop_s, overlap, off)
                    assert closed.in_flight == simulated.in_flight
                    assert closed.in_flight_by_stage == simulated.in_flight_by_stage
                    worst = max(worst, abs(off))
    print(f"{schedule} on {ranks} ranks: at most {worst:.2%} apart")


@settings(max_examples=examples(37, 150))
@given(pipelines())
def test_closed_form_and_simulation_agree_on_random_pipelines(pipeline):
    closed, simulated = both(*pipeline)
    assert closed.time_s == pytest.approx(simulated.makespan_s, rel=0.02)
    assert (
        closed.in_flight == simulated.in_flight
        and closed.in_flight_by_stage == simulated.in_flight_by_stage
    )
    busy_s = max(simulated.busy_s(rank) for rank in range(pipeline[2]))
    assert closed.bubble_share == pytest.approx(1 - busy_s / closed.time_s, abs=1e-9)


@settings(max_examples=examples(15, 60))
@given(pipelines(micro_batches=200))
def test_the_closed_form_is_never_above_the_simulation(pipeline):
    """However many rounds of micro-batches there are, of which most are counted alone."""
    closed, simulated = both(*pipeline)
    assert closed.time_s <= simulated.makespan_s * (1 + 1e-9)


@pytest.mark.parametrize("micro_batches", [48, 192])
def test_rounds_in_which_ranks_move_apart_are_walked_through(micro_batches):
    """One round moved the slowest rank by less than another: 1 % too much once all rounds had been counted so."""
    stages = [
        cm.StageTimes(0.5203129991 * n, 1.0406259982 * n)
        for n in (2, 2, 1, 2, 1, 1, 1, 1, 2, 1, 2, 2)
    ]
    closed, simulated = both("interleaved_1f1b", stages, 3, micro_batches, 0.1)
    assert simulated.makespan_s * 0.99 <= closed.time_s <= simulated.makespan_s * (1 + 1e-9)


@settings(max_examples=examples(15, 60))
@given(pipelines(schedules=("gpipe",)))
def test_gpipe_is_exact(pipeline):
    closed, simulated = both(*pipeline)
    assert closed.time_s == pytest.approx(simulated.makespan_s, rel=1e-12)


@settings(max_examples=examples(15, 60))
@given(pipelines(schedules=("1f1b",), most_hop=0.0))
def test_1f1b_without_message_times_is_exact_for_one_slow_stage(pipeline):
    _, stages, p, m, _, _ = pipeline
    equal = [stages[p // 2]] * (p - 1) + [stages[-1]]
    closed, simulated = both("1f1b", equal, p, m)
    assert closed.time_s == pytest.approx(simulated.makespan_s, rel=1e-12)


@given(pipelines(most_layers=1, most_hop=0.0, micro_batches=24), F_B_W)
def test_equal_stages_give_the_textbook(pipeline, durations):
    schedule, stages, p, m, _, _ = pipeline
    forward_s, backward_s, share = durations
    stage = cm.StageTimes(forward_s, backward_s, share * backward_s)
    v = len(stages) // p
    bubble_s = (p - 1) * (forward_s + backward_s)
    if schedule == "zero_bubble":
        bubble_s = (p - 1) * max(
            forward_s, stage.input_s, forward_s + stage.input_s - stage.weight_s
        )
    if m >= p:
        closed = cm.pipeline_time(schedule, [stage] * (p * v), p, m)
        expected_s = m * v * (forward_s + backward_s) + bubble_s
        assert closed.time_s == pytest.approx(expected_s, rel=1e-9)
        assert closed.bubble_share == pytest.approx(bubble_s / expected_s, abs=1e-9)


def test_by_hand_two_ranks_two_micro_batches():
    """Forward 1, backward 2 of which weights 1.

    gpipe        rank 0: F0 F1 . . . B0 B1     rank 1: . F0 F1 B0 B1          backwards: 3-5-7 on rank 1, 5-7-9 on rank 0
    1f1b         rank 0: F0 F1 . . B0 . B1     rank 1: . F0 B0 F1 B1          F0 1-2, B0 2-4, F1 4-5, B1 5-7; rank 0 ends 7-9
    zero bubble  rank 0: F0 F1 . I0 W0 . I1 W1   rank 1: . F0 I0 F1 I1 W0 W1  rank 0: I0 3-4, W0 4-5, I1 5-6, W1 6-7
    """
    stages = layers([1.0, 1.0])
    for schedule, expected_s in (("gpipe", 9.0), ("1f1b", 9.0), ("zero_bubble", 7.0)):
        closed, simulated = both(schedule, stages, 2, 2)
        assert closed.time_s == simulated.makespan_s == expected_s
        assert closed.bubble_share == pytest.approx(1 - 6 / expected_s)
    assert cm.pipeline_time("gpipe", stages, 2, 2).in_flight == (2, 2)
    assert cm.pipeline_time("1f1b", stages, 2, 2).in_flight == (2, 1)
    assert cm.pipeline_time("zero_bubble", stages, 2, 2).in_flight == (2, 2)


def test_by_hand_a_heavy_last_stage_and_messages():
    """1F1B, stages of 1 + 2 and 3 + 6, messages of 0.5: rank 1 starts at 1.5 and works 2 * 9, then 0.5, then the last backward of 2."""
    closed, simulated = both("1f1b", layers([1.0, 3.0]), 2, 2, 0.5)
    assert closed.time_s == simulated.makespan_s == 1.5 + 18 + 0.5 + 2
    # Not overlapped, the message of its first backward holds rank 1 up as well.
    closed, simulated = both("1f1b", layers([1.0, 3.0]), 2, 2, 0.5, overlap=False)
    assert closed.time_s == simulated.makespan_s == 1.5 + 18 + 2 * 0.5 + 2


@settings(max_examples=examples(15, 60))
@given(pipelines(), st.data())
def test_what_a_rank_holds_at_once_is_what_its_actions_hold(pipeline, data):
    """Virtual stages of different size: torch's own lists of actions, walked through."""
    schedule, stages, ranks, micro_batches = pipeline[:4]
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=len(stages), max_size=len(stages)))
    expected = []
    for todo in actions_of(schedule, ranks, len(stages) // ranks, micro_batches):
        held = most = 0
        for action in todo:
            held += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind] * sizes[action.stage]
            most = max(most, held)
        expected.append(most)
    assert cm.peak_held(schedule, sizes, ranks, micro_batches) == tuple(expected)


@settings(max_examples=examples(15, 60))
@given(pipelines(), st.data())
def test_what_waits_for_gradients_of_weights_is_what_actions_leave_waiting(pipeline, data):
    schedule, stages, ranks, micro_batches = pipeline[:4]
    sizes, moments = (
        data.draw(st.lists(st.integers(0, 9), min_size=len(stages), max_size=len(stages)))
        for _ in range(2)
    )
    turns = cm.late_moments(schedule, ranks, len(stages) // ranks, micro_batches)
    for rank, todo in enumerate(actions_of(schedule, ranks, len(stages) // ranks, micro_batches)):
        late = most = 0
        for action in todo:
            late += {"F": 0, "B": 0, "I": 1, "W": -1}[action.kind] * sizes[action.stage]
            most = max(most, late + moments[action.stage] * (action.kind in "BI"))
        own = [
            (sum(n * size for n, size in zip(counts, sizes[rank::ranks], strict=True)), turn)
            for counts, turn in turns[rank]
        ]
        assert max(size + moments[rank::ranks][turn] for size, turn in own) == most


def test_known_peaks_in_flight():
    stages = layers([1.0] * 8)
    assert cm.pipeline_time("gpipe", stages, 8, 32).in_flight == (32,) * 8
    assert cm.pipeline_time("1f1b", stages, 8, 32).in_flight == (8, 7, 6, 5, 4, 3, 2, 1)
    assert cm.pipeline_time("zero_bubble", stages, 8, 32).in_flight == (8,) * 8
    interleaved = cm.pipeline_time("interleaved_1f1b", stages, 4, 16)
    # Megatron-LM: (v - 1) p + 2 (p - 1 - rank) + 1
    assert interleaved.in_flight == tuple(4 + 2 * (3 - rank) + 1 for rank in range(4))
    # Rank 0 has run 8 forwards of chunk 0 and 4 of chunk 1 when its second backward, the second of chunk 1, is still to come; and so on.
    assert interleaved.in_flight_by_stage == (8, 8, 7, 5, 4, 4, 3, 1)


@given(pipelines(most_layers=1, most_hop=0.0, micro_batches=24))
def test_zero_bubble_beats_1f1b_beats_nothing(pipeline):
    """For equal stages and free messages: zero bubble <= 1F1B = GPipe in time, and 1F1B <= GPipe in micro-batches held."""
    _, stages, p, m, _, _ = pipeline
    equal = [cm.StageTimes(1, 2, stages[-1].weight_s / stages[-1].backward_s * 2)] * p
    if m >= p and runs("zero_bubble", p, 1, m):
        gpipe, one, zero = (
            cm.pipeline_time(schedule, equal, p, m) for schedule in ("gpipe", "1f1b", "zero_bubble")
        )
        assert zero.time_s <= one.time_s * (1 + 1e-12)
        assert one.time_s == pytest.approx(gpipe.time_s)
        assert all(a <= b for a, b in zip(one.in_flight, gpipe.in_flight, strict=True))


@given(pipelines(most_hop=0.0))
def test_no_schedule_beats_its_slowest_rank_or_one_pass(pipeline):
    schedule, stages, p, m, _hop_s, _overlap = pipeline
    closed = cm.pipeline_time(*pipeline)
    work_s = max(m * sum(s.forward_s + s.backward_s for s in stages[rank::p]) for rank in range(p))
    one_pass_s = sum(
        s.forward_s + s.backward_s - (s.weight_s if schedule == "zero_bubble" else 0)
        for s in stages
    )
    assert closed.time_s >= max(work_s, one_pass_s) * (1 - 1e-12)
    assert 0 <= closed.bubble_share < 1


@given(
    pipelines(
        schedules=("gpipe", "1f1b", "interleaved_1f1b"),
        ranks=(1, 2, 4, 8, 16, 24, 40),
        micro_batches=128,
    ),
    st.data(),
)
def test_monotone_in_each_time(pipeline, data):
    """Bounds of the planner ask for it.  Zero bubble is not monotone itself, and of many paths those are looked at that seem longest."""
    schedule, stages, p, m, hop_s, _ = pipeline
    slower, more = list(stages), st.floats(0, 2)
    for at in data.draw(st.sets(st.integers(0, len(stages) - 1), min_size=1)):
        own = stages[at]
        slower[at] = cm.StageTimes(
            own.forward_s + data.draw(more), own.backward_s + data.draw(more), own.weight_s
        )
    least_s = cm.pipeline_time(schedule, stages, p, m, hop_s, least=True).time_s
    own_s, slower_s = (
        cm.pipeline_time(schedule, of, p, m, hop_s).time_s for of in (stages, slower)
    )
    assert least_s <= min(own_s, slower_s) * (1 + 1e-9)
    assert p > 4 or hop_s or own_s == least_s


@given(pipelines(), st.data())
def test_simulation_is_monotone_in_each_time(pipeline, data):
    schedule, stages, p, m, hop_s, overlap = pipeline
    slower = list(stages)
    at = data.draw(st.integers(0, len(stages) - 1))
    more_f, more_b = data.draw(st.floats(0, 2)), data.draw(st.floats(0, 2))
    slower[at] = cm.StageTimes(
        stages[at].forward_s + more_f, stages[at].backward_s + more_b, stages[at].weight_s
    )
    before = both(*pipeline)[1].makespan_s
    later = both(schedule, slower, p, m, hop_s * 1.1, overlap)[1].makespan_s
    assert later >= before * (1 - 1e-12)
    if hop_s:
        # overlapping never costs
        assert both(schedule, stages, p, m, hop_s, False)[1].makespan_s >= before * (1 - 1e-12)


@pytest.mark.parametrize("schedule", cm.SCHEDULES)
def test_the_bubble_vanishes_with_many_micro_batches(schedule):
    stages = layers(heavy("both", 8 * max(chunk_counts(schedule))))
    shares = [
        cm.pipeline_time(schedule, stages, 8, 8 * k).bubble_share for k in (1, 4, 16, 64, 1024)
    ]
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] < 0.002


def test_one_rank_has_no_bubble_and_sends_nothing():
    for schedule in cm.SCHEDULES:
        v = chunk_counts(schedule)[-1]
        closed, simulated = both(
            schedule, layers([1.0, 2.0, 1.0, 3.0][:v]), 1, 5, hop_s=100.0, overlap=False
        )
        assert closed.time_s == pytest.approx(
            simulated.makespan_s
        ) and closed.bubble_share == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    ("schedule", "ranks", "chunks", "micro_batches", "message"),
    [
        ("1f1B", 2, 1, 4, "unknown schedule '1f1B'; did you mean 1f1b"),
        ("gpipe", 2, 2, 4, "gpipe runs one stage per rank, not stages_per_rank=2"),
        ("1f1b", 4, 2, 8, "1f1b runs one stage per rank, not stages_per_rank=2"),
        ("interleaved_1f1b", 4, 1, 8, "not stages_per_rank=1; with one stage use 1f1b"),
        (
            "1f1b",
            8,
            1,
            7,
            "micro_batches=7 < ranks=8; use 8 micro-batches or more, 7 ranks or fewer, or gpipe",
        ),
        (
            "interleaved_1f1b",
            4,
            2,
            13,
            "micro_batches=13 over 4 ranks into 3 equal rounds, which leaves 1 over; 12 and 15",
        ),
        (
            "zero_bubble",
            2,
            1,
            5,
            "micro_batches=5 over 2 ranks into 2 equal rounds, which leaves 1 over; 4 and 6",
        ),
        ("gpipe", 0, 1, 4, "ranks=0"),
        ("gpipe", 2, True, 4, "stages_per_rank=True"),
        ("gpipe", 2, 1, 2.0, "micro_batches=2.0"),
    ],
)
def test_impossible_combinations_say_what_works(schedule, ranks, chunks, micro_batches, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        cm.check_schedule(schedule, ranks, chunks, micro_batches)


def test_bad_inputs():
    stages = layers([1.0] * 6)
    with pytest.raises(
        ValueError, match="6 virtual stages cannot be dealt evenly to 4 ranks; 4 or 8 can"
    ):
        cm.pipeline_time("zero_bubble", stages, 4, 8)
    with pytest.raises(
        ValueError, match="0 virtual stages cannot be dealt evenly to 4 ranks; 4 can"
    ):
        cm.pipeline_time("zero_bubble", [], 4, 8)
    for hop_s in (-1.0, nan, inf, True, "1"):
        with pytest.raises(ValueError, match="hop_s"):
            cm.pipeline_time("gpipe", stages, 6, 8, hop_s)
    for bad in (-1.0, nan, inf, None):
        with pytest.raises(ValueError, match="forward_s"):
            cm.StageTimes(bad, 1.0)
    with pytest.raises(ValueError, match=r"weight_s=2.0 is a part of backward_s=1.0"):
        cm.StageTimes(1, 1, 2)


def test_the_two_models_share_no_code_but_stage_times():
    def imports(name: str) -> set[str]:
        tree = ast.parse((ROOT / f"{name}.py").read_text())
        return {
            node.module
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module.startswith("autopar")
        }

    closed = {
        module
        for name in ("pipeline", "pipeline_order", "pipeline_paths", "pipeline_lattice")
        for module in imports(name)
    }
    assert closed & imports("simulate") == {
        f"autopar_cost_models.{name}" for name in ("checks", "echo", "stage_times")
    }
    assert "autopar_cost_models.simulate" not in closed
