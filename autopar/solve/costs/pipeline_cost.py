"""The cost of a placement that is cut into pipeline stages: seconds of a step, and bytes of each
rank.

Stages are runs of consecutive segments. Segments of repeated classes are the model's blocks.
Segments before the first block belong to the first stage, segments after the last block to the
last. `best_staging.py` finds where stages begin, unless a pin gives their sizes. `cut_blocks` in this
module distributes blocks as evenly as possible; stages with the least other work get one block more.

    step    = schedule of the stages (`autopar_cost_models.pipeline`) + the slowest rank's work once a step
    memory  = static + micro-batches in flight x (kept + sent) + the peak of backward, for each rank

The schedule takes no less than the hosts, which issue all kernels (`hosts_time_s`).

Two more terms of memory may apply. Under zero bubble, micro-batches that wait for gradients of parameters
hold more than they kept, less what the model's last segment has freed, if a rank has one stage.
With several stages a rank, an incoming and an outgoing message are added.

If ranks have devices of several kinds, each has its own model: the same classes and strategies,
with its own prices. Every rank that reads a tied parameter holds and updates it. The reduction of
its gradient between ranks is not priced.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from itertools import pairwise

from autopar_cost_models import StageTimes, late_moments, peak_held, pipeline_time, splits_backward

from autopar.ir.annotated import AnnotatedBlock, AnnotatedModel, PipelineSetting, Strategy
from autopar.solve.costs.placement_cost import (
    Choices,
    SegmentCost,
    arrivals,
    class_costs,
    host_part,
    static_parts,
)

Stages = tuple[tuple[int, ...], ...]
"""The segments of each virtual stage, first to last."""


@dataclass(frozen=True, slots=True)
class Pipelined:
    """The cost of a step in a pipeline. `stages` has the segments of each virtual stage.
    `time_parts` are seconds by part, which sum to `time_s`. `memory_bytes` is the peak of each
    rank; `memory_parts` splits the largest of these.
    """

    time_s: float
    stages: Stages
    memory_bytes: tuple[int, ...]
    time_parts: dict[str, float]
    memory_parts: dict[str, int]


def pipelined(
    model: AnnotatedModel | Sequence[AnnotatedModel], choices: Choices, stages: Stages | None = None
) -> Pipelined:
    """The cost (`Pipelined`) of a step of a placement cut into `stages`, the segments of each
    virtual stage. By default, `cut_blocks` distributes the blocks evenly. `model` is one model for all
    ranks, or one for each rank, in their order.
    """
    models = [model] * model.pipeline_setting.ranks if isinstance(model, AnnotatedModel) else model
    different = {id(one): one for one in models}
    costs_of = {key: segment_costs(one, choices) for key, one in different.items()}
    model, costs = models[0], [costs_of[id(one)] for one in models]
    setting, work_s = model.pipeline_setting, [c.forward_s + c.backward_s for c in costs[0]]
    stages = stages or _pinned_or_even(model, work_s)
    times = [
        _stage_times(stage, costs[number % setting.ranks]) for number, stage in enumerate(stages)
    ]
    # nobody waits for the gradient of the model's input: torch runs it all late
    times[0] = replace(times[0], weight_s=times[0].backward_s)
    crossing = messages_bytes(model, choices)
    sent = [crossing[stage[0]] if stage else 0 for stage in stages[1:]] + [0]  # by each stage
    hop_s = longest_hop_s(different.values(), sent)
    of_rank = [
        [segment for stage in stages[rank :: setting.ranks] for segment in stage]
        for rank in range(setting.ranks)
    ]
    took = pipeline_time(setting.schedule, times, setting.ranks, model.num_microbatches, hop_s)
    shared = [
        borrowed(one, choices, segments) for one, segments in zip(models, of_rank, strict=True)
    ]
    step_s = [
        sum(own[s].step_s for s in mine) + sum(t.step_s for t in also)
        for own, mine, also in zip(costs, of_rank, shared, strict=True)
    ]
    kept = [
        sum(costs[number % setting.ranks][s].kept_bytes for s in stage)
        + (size if setting.keeps_outputs else 0)
        for number, (stage, size) in enumerate(zip(stages, sent, strict=True))
    ]
    most, others = (
        peak_held(setting.schedule, sizes, setting.ranks, model.num_microbatches)
        for sizes in (kept, [*kept[:-1], 0])
    )
    passing = _passing_bytes(setting, sent)
    kept_by_rank = [(a + more, b + more) for a, b, more in zip(most, others, passing, strict=True)]
    held = [
        _memory(models[rank], choices, stages, rank, costs[rank], kept)
        for rank, kept in enumerate(kept_by_rank)
    ]
    busy_s = model.num_microbatches * max(
        sum(of.total_s for of in times[rank :: setting.ranks]) for rank in range(setting.ranks)
    )
    parts = {
        "stages": busy_s,
        "bubble": took.time_s - busy_s,
        "step": max(step_s),
        "fixed": model.fixed_s,
    } | host_part(max(_hosts_s(models, costs, of_rank) - took.time_s, 0.0))
    fullest = max(held, key=lambda parts: sum(parts.values()))
    return Pipelined(
        sum(parts.values()), stages, tuple(sum(parts.values()) for parts in held), parts, fullest
    )


def hosts_time_s(most_s: float, total_s: float, micro_batches: int, stages_per_rank: int) -> float:
    """Seconds in which the hosts of a pipeline issue a step, under any schedule. The slowest host
    issues a micro-batch in `most_s`, all together in `total_s`. The slowest issues all micro-batches,
    and waits for one stage of each other host.
    """
    return micro_batches * most_s + (total_s - most_s) / stages_per_rank


def _hosts_s(
    models: Sequence[AnnotatedModel],
    costs: Sequence[Sequence[SegmentCost]],
    of_rank: Sequence[Sequence[int]],
) -> float:
    """`hosts_time_s` of a placement. Models, costs of all segments, and own segments are by rank."""
    issue_s = [
        model.pipeline_setting.host_slowdown * sum(own[s].issue_s for s in mine)
        for model, own, mine in zip(models, costs, of_rank, strict=True)
    ]
    setting, micro_batches = models[0].pipeline_setting, models[0].num_microbatches
    return hosts_time_s(max(issue_s), sum(issue_s), micro_batches, setting.stages_per_rank)


def _passing_bytes(setting: PipelineSetting, sent: Sequence[int]) -> list[int]:
    """By rank, bytes of messages in transit besides those that its micro-batches keep: twice the
    largest message into or out of one of its stages. `sent[i]` is what stage i sends. `setting` is
    that of the pipeline.

    It is 0 for one stage a rank, or if the pipeline keeps no outputs. With several stages, torch
    allocates space for a message before it is needed, and holds a gradient until the next one is
    sent.
    """
    if setting.stages_per_rank == 1 or not setting.keeps_outputs:
        return [0] * setting.ranks
    # what comes into a stage, or leaves it
    meets = [max(pair) for pair in zip((0, *sent[:-1]), sent, strict=True)]
    return [2 * max(meets[rank :: setting.ranks]) for rank in range(setting.ranks)]


def longest_hop_s(models: Iterable[AnnotatedModel], sent: Iterable[int]) -> float:
    """Seconds of the largest message over the slowest link of any model's pipeline setting. `sent`
    are bytes; 0 if all are 0.
    """
    crossing = [size for size in sent if size]  # if empty, a model may lack a pipeline
    settings = [model.pipeline_setting for model in models] if crossing else []
    return max(
        (s.hop_latency_s + size * s.hop_s_per_byte for size in crossing for s in settings),
        default=0.0,
    )


def segment_costs(model: AnnotatedModel, choices: Choices) -> list[SegmentCost]:
    """The `SegmentCost` of each segment, first to last, for the strategies in `choices`. A layout
    change between two segments is charged to the one that reads.
    """
    own, sent_s = class_costs(model, choices), arrivals(model, choices)
    found = []
    for index, sources in zip(model.segments, model.reads, strict=True):
        edges = [
            (model.segments[s], output, index, place)
            for place, (s, output) in enumerate(sources)
            if s >= 0
        ]
        more_s = [sent_s[edge] for edge in edges if edge in sent_s]
        cost = own[index]
        if more_s:
            forward_s, backward_s = (sum(seconds) for seconds in zip(*more_s, strict=True))
            cost = replace(
                cost, forward_s=cost.forward_s + forward_s, backward_s=cost.backward_s + backward_s
            )
        found.append(cost)
    return found


def blocks_of(model: AnnotatedModel) -> list[int]:
    """The indices of the segments that are distributed to stages: those whose class has several
    segments, or is a layer. All segments if there are none.
    """
    counts = Counter(model.segments)
    found = [
        number
        for number, index in enumerate(model.segments)
        if counts[index] > 1 or model.classes[index].is_layer
    ]
    return found or list(range(len(model.segments)))


def units_of(model: AnnotatedModel) -> list[range]:
    """The segments of each unit of a row: a block and the segments up to the next block. Segments
    before the first block belong to the first unit.
    """
    return [range(*ends) for ends in pairwise([0, *blocks_of(model)[1:], len(model.segments)])]


def _pinned_or_even(model: AnnotatedModel, work_s: Sequence[float]) -> Stages:
    """The stages with the pinned numbers of blocks, or those of `cut_blocks`."""
    setting, blocks = model.pipeline_setting, blocks_of(model)
    if setting.sizes:
        return stages_of(setting.sizes, blocks, len(work_s))
    return cut_blocks(setting.ranks * setting.stages_per_rank, blocks, work_s)


def cut_blocks(count: int, blocks: Sequence[int], total_s: Sequence[float]) -> Stages:
    """The segments of each of `count` virtual stages, whose numbers of blocks differ by at most
    one. The stages with the least work besides blocks get the additional ones. `blocks` are segment
    indices, and `total_s` has the seconds of each segment.
    """
    before, after = sum(total_s[: blocks[0]]), sum(total_s[blocks[-1] + 1 :])
    each, more = divmod(len(blocks), count)
    extra = [before if stage == 0 else 0.0 for stage in range(count)]
    extra[-1] += after
    # the stages with the least besides get one more
    full = set(nsmallest(more, range(count), key=lambda stage: (extra[stage], stage)))
    return stages_of([each + (stage in full) for stage in range(count)], blocks, len(total_s))


def stages_of(sizes: Sequence[int], blocks: Sequence[int], segments: int) -> Stages:
    """The segments of each stage, if stage i gets `sizes[i]` blocks. `blocks` are the segment
    indices of the blocks; `segments` is the number of segments. Segments between two blocks belong
    to the earlier one. Those before the first block belong to the first stage, those after the last
    block to the last.
    """
    taken, firsts = 0, [0]
    for size in sizes[:-1]:
        taken += size
        firsts.append(blocks[taken] if taken < len(blocks) else blocks[-1] + 1)
    return tuple(
        tuple(range(first, end)) for first, end in zip(firsts, [*firsts[1:], segments], strict=True)
    )


def _stage_times(stage: Sequence[int], costs: Sequence[SegmentCost]) -> StageTimes:
    of = [costs[segment] for segment in stage]
    return StageTimes(
        sum(c.forward_s for c in of), sum(c.backward_s for c in of), sum(c.weight_s for c in of)
    )


def messages_bytes(model: AnnotatedModel, choices: Choices) -> list[int]:
    """Bytes of the message into a stage that begins with segment i, for each i: every earlier value
    that segment i or a later one reads.
    """
    return crossing_bytes(
        model,
        [
            [_message_bytes(block, name, choice) for name in block.inputs]
            for block, choice in zip(model.classes, choices, strict=True)
        ],
    )


def crossing_bytes(model: AnnotatedModel, size_of: Sequence[Sequence[int]]) -> list[int]:
    """Like `messages_bytes`, but `size_of[class][input]` gives the bytes of each input. A value
    with several later readers counts once, with the largest size.
    """
    readers: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for segment, (index, sources) in enumerate(zip(model.segments, model.reads, strict=True)):
        for source, size_bytes in zip(sources, size_of[index], strict=True):
            if source[0] >= 0:
                readers[source].append((segment, size_bytes))
    found = [0] * len(model.segments)
    for (made, _), reading in readers.items():
        largest = 0
        for first in range(reading[-1][0], made, -1):
            while reading and reading[-1][0] >= first:
                largest = max(largest, reading.pop()[1])
            found[first] += largest
    return found


def _message_bytes(block: AnnotatedBlock, name: str, choice: Mapping[str, str]) -> int:
    entry = next(op for op in block.ops if op.name == name)
    return block.message_bytes(name, entry.strategy(choice[name]).outputs[0])


def _memory(
    model: AnnotatedModel,
    choices: Choices,
    stages: Stages,
    rank: int,
    costs: Sequence[SegmentCost],
    kept_bytes: tuple[int, int],
) -> dict[str, int]:
    """Peak bytes of a rank by part: parameters, gradients, optimizer, kept, transient, fixed.
    `costs` are those of all segments. `kept_bytes` is what forwards keep at most, (with, without)
    the last stage of the pipeline.
    """
    setting = model.pipeline_setting
    mine = range(rank, len(stages), setting.ranks)
    parted = [is_parted(setting.schedule, number) for number in mine]
    moments = [
        _moment_bytes(model, stages[number], costs, two)
        for number, two in zip(mine, parted, strict=True)
    ]
    late = [
        _late_bytes(stages[number], costs, two) for number, two in zip(mine, parted, strict=True)
    ]
    turns = late_moments(
        setting.schedule, setting.ranks, setting.stages_per_rank, model.num_microbatches
    )[rank]
    kept, transient = fullest_of(
        *kept_bytes, moments, late, turns, mine[-1] == len(stages) - 1 and not parted[-1]
    )
    # it holds most when most wait; the one whose turn it is has its own in `moments`
    if len(mine) == 1 and parted[0]:
        (((waiting,), _),) = turns
        kept -= (waiting - 1) * _given_back(model, stages[rank], costs, True)
    segments = [segment for number in mine for segment in stages[number]]
    owned = [*(costs[s] for s in segments), *borrowed(model, choices, segments)]
    static = static_parts(
        *(
            sum(getattr(c, name) for c in owned)
            for name in ("static_bytes", "gradient_bytes", "optimizer_bytes")
        )
    )
    return static | {"kept": kept, "transient": transient, "fixed": model.fixed_bytes}


def is_parted(schedule: str, stage: int) -> bool:
    """Whether the backward of a stage (numbered from 0) runs in two parts, gradients of inputs
    first. True under a zero-bubble schedule, except for the first stage.
    """
    return splits_backward(schedule) and stage > 0


def fullest_of(
    kept: int,
    without: int,
    moments: Sequence[int],
    late: Sequence[int],
    turns: Sequence[tuple[Sequence[int], int]],
    ends: bool,
) -> tuple[int, int]:
    """(kept bytes, transient bytes of backward) of a rank, at the moment when their sum is largest.

    Forwards keep at most `kept` bytes, or `without` not counting the pipeline's last stage.
    `moments` are the transient bytes of the rank's stages. `late` is the extra bytes of each
    stage's micro-batches that wait for gradients of parameters. `turns` lists the states at a
    backward (`late_moments`).

    `ends`: the rank has the pipeline's last stage, and that stage's backward is whole. It then
    directly follows its forward. The backward of the rank's other stages runs while the last stage
    keeps nothing.
    """
    if len(moments) == 1 or not ends:
        waiting = (
            (sum(n * size for n, size in zip(counts, late, strict=True)), moments[chunk])
            for counts, chunk in turns
        )
        more, transient = max(waiting, key=sum)
        return kept + more, transient
    return max((kept, moments[-1]), (without, max(moments[:-1])), key=sum)


def freed_bytes(last: SegmentCost, parted: bool) -> int:
    """Bytes that the model's last segment has freed when backward reaches other segments: all that
    it keeps. If backward is split (`parted`), it frees only what does not wait for gradients of
    parameters.
    """
    return max(-last.late_bytes, 0) if parted else last.kept_bytes


def _given_back(
    model: AnnotatedModel, stage: Sequence[int], costs: Sequence[SegmentCost], parted: bool
) -> int:
    """Bytes that a stage has freed once its backward leaves the model's last segment
    (`freed_bytes`); 0 if that segment is in another stage.
    """
    return sum(freed_bytes(costs[s], parted) for s in stage if model.segments[s] == model.last)


def _moment_bytes(
    model: AnnotatedModel, stage: Sequence[int], costs: Sequence[SegmentCost], parted: bool
) -> int:
    """Peak bytes of the backward of a stage, above what its micro-batches hold afterwards; at least
    0. If backward is split (`parted`), the model's last segment reaches its peak before anything of
    the other segments waits.
    """
    freed, late = _given_back(model, stage, costs, parted), _late_bytes(stage, costs, parted)
    needed = [
        costs[s].parted_transient_bytes if parted else costs[s].transient_bytes for s in stage
    ]
    return max(
        [
            0,
            *(
                size - (late if model.segments[s] == model.last else freed)
                for s, size in zip(stage, needed, strict=True)
            ),
        ]
    )


def _late_bytes(stage: Sequence[int], costs: Sequence[SegmentCost], parted: bool) -> int:
    """The extra bytes, beyond the kept ones, that a micro-batch of a stage holds while it waits for
    gradients of parameters. 0 if the backward is not split (`parted`).
    """
    return parted * sum(max(costs[s].late_bytes, 0) for s in stage)


def host_bytes(model: AnnotatedModel, choices: Choices, stages: Stages, ranks: int) -> int:
    """Bytes of host memory of the rank that needs most. Rank r of `ranks` has stages r, r +
    `ranks`, and so on.
    """
    costs, found = class_costs(model, choices), []
    for rank in range(ranks):
        numbers = [segment for stage in stages[rank::ranks] for segment in stage]
        found.append(
            sum(costs[model.segments[s]].host_bytes for s in numbers)
            + sum(part.host_bytes for part in borrowed(model, choices, numbers))
        )
    return max(found)


def borrowed(model: AnnotatedModel, choices: Choices, segments: Iterable[int]) -> list[Strategy]:
    """The strategies of shared parameters that a rank with these segments reads, but none of its
    segments pays for. The first paying segment gives the strategy.
    """
    own, found = set(segments), []
    for shared in model.shared:
        (number, name), *_ = shared.paying
        if any(s in own for s, _ in shared.reading) and not any(s in own for s, _ in shared.paying):
            index = model.segments[number]
            found.append(
                next(op for op in model.classes[index].ops if op.name == name).strategy(
                    choices[index][name]
                )
            )
    return found
