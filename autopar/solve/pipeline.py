"""A placement cut into pipeline stages: what a step takes, and what each rank holds.

Stages are runs of consecutive segments.  Segments of the classes that repeat are the model's blocks and are dealt to stages as evenly as
their number allows; what comes before the first block belongs to the first stage, what comes after the last to the last.  Where the
number does not divide, the stages that get one block fewer are chosen so that the slowest stage is fastest.

    step    = schedule of the stages (`autopar_cost_models.pipeline`) + the slowest rank's work once a step
    memory  = static + micro-batches in flight x (kept + what was sent) + the fullest moment of backward, for each rank

A tied parameter is held by every rank that reads it; the reduction of its gradient between ranks is not priced.

The strategies were chosen for the least work over all stages.  A rank does at least the mean of that work, which is the bound of a step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest

from autopar_cost_models import StageTimes, peak_held, pipeline_time

from autopar.ir.annotated import AnnotatedBlock, AnnotatedModel, PipelineSetting, Strategy
from autopar.solve.pricing import Choices, SegmentCost, input_bytes, segment_costs, static_parts


@dataclass(frozen=True, slots=True)
class Pipelined:
    """A step through a pipeline.  `stages` has the segments of each virtual stage; memory is of each rank, in parts of the fullest."""

    time_s: float
    stages: tuple[tuple[int, ...], ...]
    memory_bytes: tuple[int, ...]
    time_parts: dict[str, float]
    memory_parts: dict[str, int]


def pipelined(model: AnnotatedModel, choices: Choices) -> Pipelined:
    """Cut a placement into the stages of `model.pipeline` and price the step."""
    setting = model.pipeline
    costs = segment_costs(model, choices)
    stages = cut(setting, [block.count > 1 for block in model.classes], costs)
    times = [_stage_times(stage, setting, costs) for stage in stages]
    times[0] = replace(times[0], weight_s=times[0].backward_s)  # nobody waits for the gradient of the model's input: torch runs it all late
    sent = _messages_bytes(model, choices, stages)[1:] + [0]  # by each stage
    hop_s = max((setting.hop_latency_s + size * setting.hop_s_per_byte for size in sent if size), default=0.0)
    took = pipeline_time(setting.schedule, times, setting.ranks, model.num_microbatches, hop_s)
    step_s = [sum(costs[setting.segments[s]].step_s for s in _segments_of(rank, stages, setting)) for rank in range(setting.ranks)]
    kept = [_kept_bytes(stage, setting, costs) + (size if setting.keeps_outputs else 0) for stage, size in zip(stages, sent, strict=True)]
    most = peak_held(setting.schedule, kept, setting.ranks, model.num_microbatches)
    held = [_memory(rank, model, stages, costs, most[rank]) for rank in range(setting.ranks)]
    for rank, parts in enumerate(held):
        tied = _tied(model, choices, {setting.segments[s] for s in _segments_of(rank, stages, setting)})
        for part, size in _static_parts(tied).items():
            parts[part] += size
    work_s = max(sum(times[stage].total_s for stage in range(rank, len(stages), setting.ranks)) for rank in range(setting.ranks))
    busy_s = model.num_microbatches * work_s
    parts = {"stages": busy_s, "bubble": took.time_s - busy_s, "step": max(step_s), "fixed": model.fixed_s}
    fullest = max(held, key=lambda parts: sum(parts.values()))
    return Pipelined(sum(parts.values()), stages, tuple(sum(parts.values()) for parts in held), parts, fullest)


def cut(setting: PipelineSetting, repeats: Sequence[bool], costs: Sequence[SegmentCost]) -> tuple[tuple[int, ...], ...]:
    """The segments of each virtual stage.  `repeats` and `costs` are by class."""
    count = setting.ranks * setting.stages_per_rank
    blocks = [number for number, index in enumerate(setting.segments) if repeats[index]]
    if not blocks:
        blocks = list(range(len(setting.segments)))
    total_s = [costs[index].forward_s + costs[index].backward_s for index in setting.segments]
    before, after = sum(total_s[: blocks[0]]), sum(total_s[blocks[-1] + 1 :])
    each, more = divmod(len(blocks), count)
    extra = [before if stage == 0 else 0.0 for stage in range(count)]
    extra[-1] += after
    full = set(nsmallest(more, range(count), key=lambda stage: (extra[stage], stage)))  # the stages with the least besides get one more
    firsts = [0]
    for stage in range(count - 1):
        taken = sum(each + (s in full) for s in range(stage + 1))
        firsts.append(blocks[taken] if taken < len(blocks) else blocks[-1] + 1)
    ends = [*firsts[1:], len(setting.segments)]
    return tuple(tuple(range(first, end)) for first, end in zip(firsts, ends, strict=True))


def _segments_of(rank: int, stages: Sequence[Sequence[int]], setting: PipelineSetting) -> list[int]:
    return [segment for stage in stages[rank :: setting.ranks] for segment in stage]


def _stage_times(stage: Sequence[int], setting: PipelineSetting, costs: Sequence[SegmentCost]) -> StageTimes:
    of = [costs[setting.segments[segment]] for segment in stage]
    return StageTimes(sum(c.forward_s for c in of), sum(c.backward_s for c in of), sum(c.weight_s for c in of))


def _messages_bytes(model: AnnotatedModel, choices: Choices, stages: Sequence[Sequence[int]]) -> list[int]:
    """Bytes of the message into each stage: every value of an earlier stage that it or a later one reads."""
    setting, readers = model.pipeline, defaultdict(list)
    size_of = [[_input_bytes(block, name, choice) for name in block.inputs] for block, choice in zip(model.classes, choices, strict=True)]
    for segment, (index, sources) in enumerate(zip(setting.segments, setting.reads, strict=True)):
        for source, size_bytes in zip(sources, size_of[index], strict=True):
            if source[0] >= 0:
                readers[source].append((segment, size_bytes))
    firsts = [next((segment for later in stages[stage:] for segment in later), len(setting.segments)) for stage in range(len(stages))]
    found = [0] * len(stages)
    for (made, _), reading in readers.items():
        for stage in range(bisect_right(firsts, made), bisect_right(firsts, reading[-1][0])):
            found[stage] += max(size_bytes for segment, size_bytes in reading if segment >= firsts[stage])
    return found


def _input_bytes(block: AnnotatedBlock, name: str, choice: Mapping[str, str]) -> int:
    entry = next(op for op in block.ops if op.name == name)
    return input_bytes(block, name, entry.strategy(choice[name]).outputs[0])


def _kept_bytes(stage: Sequence[int], setting: PipelineSetting, costs: Sequence[SegmentCost]) -> int:
    return sum(costs[setting.segments[segment]].kept_bytes for segment in stage)


def _memory(
    rank: int, model: AnnotatedModel, stages: Sequence[Sequence[int]], costs: Sequence[SegmentCost], kept_bytes: int
) -> dict[str, int]:
    setting = model.pipeline
    segments = [setting.segments[segment] for segment in _segments_of(rank, stages, setting)]
    freed = costs[model.last].kept_bytes if model.last in segments else 0
    transient = max([0, *(costs[index].transient_bytes - (freed if index != model.last else 0) for index in segments)])
    static = _static_parts([costs[index] for index in segments])
    return static | {"kept": kept_bytes, "transient": transient, "fixed": model.fixed_bytes}


def _static_parts(of: Sequence[SegmentCost | Strategy]) -> dict[str, int]:
    return static_parts(*(sum(getattr(c, name) for c in of) for name in ("static_bytes", "gradient_bytes", "optimizer_bytes")))


def _tied(model: AnnotatedModel, choices: Choices, classes: set[int]) -> list[Strategy]:
    """The tied parameters that a rank with segments of `classes` holds because of another member of the tie than the one that pays."""
    found = []
    for (payer, name), *others in model.ties:
        if payer not in classes and any(index in classes for index, _ in others):
            operation = next(op for op in model.classes[payer].ops if op.name == name)
            found.append(operation.strategy(choices[payer][name]))
    return found
