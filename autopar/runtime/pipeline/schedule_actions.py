"""The actions of every rank under a pipeline schedule, taken from torch.distributed.pipelining
itself.

`ScheduleGPipe` and `Schedule1F1B` are loops over a stage (`_step_microbatches`). They run on a
stage that records the requests. Their `pipeline_order` cannot be used: in torch 2.13 that of 1F1B
gives the last rank micro-batches 1..m instead of 0..m-1. Schedules with several stages per rank run
the list `pipeline_order`, which their constructor makes for all ranks. No process group is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from autopar_cost_models import Action, check_schedule
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from autopar.errors import AutoparError

LOOPS: Mapping[str, Callable[..., PipelineScheduleSingle]] = {
    "gpipe": torch_schedules.ScheduleGPipe,
    "1f1b": torch_schedules.Schedule1F1B,
}
LISTS: Mapping[str, Callable[..., PipelineScheduleMulti]] = {
    "interleaved_1f1b": torch_schedules.ScheduleInterleaved1F1B,
    "zero_bubble": torch_schedules.ScheduleInterleavedZeroBubble,
}


@lru_cache(maxsize=4)  # each rank asks
def schedule_actions(
    schedule: str, ranks: int, stages_per_rank: int, micro_batches: int
) -> tuple[tuple[Action, ...], ...]:
    """For each rank, its `Action`s (kind, stage, micro-batch) in order. A kind is "F" or "B", or
    under zero bubble also "I" and "W", the two parts of a backward. Virtual stage s is on rank s
    % `ranks`. Raises AutoparError for a combination that torch cannot run.
    """
    try:
        check_schedule(schedule, ranks, stages_per_rank, micro_batches)
    except ValueError as error:
        raise AutoparError(str(error)) from error
    if schedule in LOOPS:
        return tuple(_record(schedule, rank, ranks, micro_batches) for rank in range(ranks))
    return _read(schedule, ranks, stages_per_rank, micro_batches)


class _RecordingStage:
    """A stand-in for a stage, which records what torch's schedules request and neither computes nor
    communicates.
    """

    submod = None  # so that torch looks for no compiled modules

    def __init__(self, stage_index: int, num_stages: int, ranks: int) -> None:
        self.stage_index, self.num_stages = stage_index, num_stages
        self.group_rank, self.group_size = stage_index % ranks, ranks
        self.is_first, self.is_last = stage_index == 0, stage_index == num_stages - 1
        self.has_backward = True
        self.actions: list[Action] = []

    def forward_one_chunk(self, micro_batch: int, *_args: Any, **_kwargs: Any) -> None:
        self.actions.append(Action("F", self.stage_index, micro_batch))

    def backward_one_chunk(self, micro_batch: int, *_args: Any, **_kwargs: Any) -> None:
        self.actions.append(Action("B", self.stage_index, micro_batch))

    def perform_reduce_grad(self, *_args: Any) -> None:
        """Nothing: gradients are reduced after the pipeline, not as part of the schedule."""

    def _no_messages(self, _micro_batch: int) -> list:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = _no_messages


def _record(schedule: str, rank: int, ranks: int, micro_batches: int) -> tuple[Action, ...]:
    stage = _RecordingStage(rank, ranks, ranks)
    loop = LOOPS[schedule](stage, micro_batches)
    # it would exchange the shapes of messages with other ranks
    vars(loop)["_initialize_stage"] = lambda *_args, **_kwargs: None
    loop._step_microbatches()
    return tuple(stage.actions)


def _read(
    schedule: str, ranks: int, stages_per_rank: int, micro_batches: int
) -> tuple[tuple[Action, ...], ...]:
    stages = [
        _RecordingStage(ranks * chunk, ranks * stages_per_rank, ranks)
        for chunk in range(stages_per_rank)
    ]
    # an action that is None: a step that the rank sits out
    order = LISTS[schedule](stages, micro_batches).pipeline_order
    return tuple(
        tuple(
            Action(a.computation_type.value, a.stage_index, a.microbatch_index)
            for a in order[rank]
            if a is not None and a.microbatch_index is not None
        )
        for rank in range(ranks)
    )
