"""Action lists that torch's schedules make: complete, in torch's own order, and refused where torch refuses."""

from __future__ import annotations

import pytest
from autopar_cost_models import Action, check_schedule
from torch.distributed.pipelining import schedules as torch_schedules

from autopar.errors import AutoparError
from autopar.runtime.pipeline.schedule_actions import (
    LISTS,
    LOOPS,
    _RecordingStage,
    schedule_actions,
)


def words(actions) -> list[str]:
    return [" ".join(map(str, rank)) for rank in actions]


def test_gpipe_and_1f1b():
    assert words(schedule_actions("gpipe", 2, 1, 2)) == ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"]
    assert words(schedule_actions("1f1b", 2, 1, 3)) == [
        "0F0 0F1 0B0 0F2 0B1 0B2",
        "1F0 1B0 1F1 1B1 1F2 1B2",
    ]


def test_interleaved_and_zero_bubble():
    assert words(schedule_actions("interleaved_1f1b", 2, 2, 2)) == [
        "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1",
        "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1",
    ]
    assert words(schedule_actions("zero_bubble", 2, 1, 2)) == [
        "0F0 0F1 0I0 0W0 0I1 0W1",
        "1F0 1I0 1F1 1I1 1W0 1W1",
    ]


@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 3), ("zero_bubble", 1), ("zero_bubble", 2)],
)
@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 4), (2, 6), (4, 10), (4, 12), (8, 8)])
def test_each_stage_and_micro_batch_once(schedule, chunks, ranks, micro_batches):
    actions = schedule_actions(schedule, ranks, chunks, micro_batches)
    kinds = "FIW" if schedule == "zero_bubble" else "FB"
    for rank, todo in enumerate(actions):
        expected = {
            Action(kind, s, k)
            for kind in kinds
            for s in range(rank, ranks * chunks, ranks)
            for k in range(micro_batches)
        }
        assert len(todo) == len(expected) and set(todo) == expected


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zero_bubble"])
def test_lists_are_what_the_engine_runs(schedule):
    """What torch executes is the list with messages; leaving those out gives ours."""
    stages = [_RecordingStage(4 * chunk, 8, 4) for chunk in range(2)]
    torch_schedule = LISTS[schedule](stages, 10)
    for rank, todo in enumerate(schedule_actions(schedule, 4, 2, 10)):
        run = [
            str(action)
            for action in torch_schedule.pipeline_order_with_comms[rank]
            if action.is_compute_op
        ]
        assert run == list(map(str, todo))


def test_refuses_exactly_what_torch_refuses():
    for schedule, chunk_counts in (
        ("gpipe", (1,)),
        ("1f1b", (1,)),
        ("interleaved_1f1b", (2, 3)),
        ("zero_bubble", (1, 2)),
    ):
        for ranks in (1, 2, 3, 4, 5):
            for chunks in chunk_counts:
                for micro_batches in range(1, 18):
                    stages = [
                        _RecordingStage(ranks * chunk, ranks * chunks, ranks)
                        for chunk in range(chunks)
                    ]
                    try:
                        (LOOPS | LISTS)[schedule](
                            stages[0] if schedule in LOOPS else stages, micro_batches
                        )
                        torch_runs = True
                    except ValueError:
                        torch_runs = False
                    try:
                        check_schedule(schedule, ranks, chunks, micro_batches)
                        we_run = True
                    except ValueError:
                        we_run = False
                    assert we_run == torch_runs, (schedule, ranks, chunks, micro_batches)


def test_errors_are_for_users():
    with pytest.raises(AutoparError, match="micro_batches=3 < ranks=4"):
        schedule_actions("1f1b", 4, 1, 3)
    with pytest.raises(AutoparError, match="unknown schedule 'pipedream'"):
        schedule_actions("pipedream", 4, 1, 3)


def test_names_are_torchs_schedules():
    for made in (LOOPS | LISTS).values():
        assert torch_schedules.get_schedule_class(made.__name__.removeprefix("Schedule")) is made
