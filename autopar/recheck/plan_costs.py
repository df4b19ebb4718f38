"""The costs of a plan's choices, stage by stage: annotated again and summed here, without code of
the solver.

The numbers that a plan predicts are not read. Its mesh, micro-batch, ZeRO stage and stages are
read, and the strategies and recompute mode of each block. The annotator gives their prices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, chain, pairwise
from math import fsum

from autopar_cost_models import Action, StageTimes

from autopar.annotate.annotator import annotator_of
from autopar.annotate.setting import Setting, is_periodic
from autopar.errors import AutoparError
from autopar.ir.annotated import (
    AnnotatedBlock,
    AnnotatedModel,
    AnnotatedOp,
    Conversion,
    Saved,
    Strategy,
)
from autopar.ir.cluster import MixedCluster
from autopar.ir.plan import Plan
from autopar.ir.plan_fields import AxisChoice, BlockPlan
from autopar.ir.sharding import AxisLayout
from autopar.ir.traced import PreparedModel, TracedModel
from autopar.planning.model_facts import as_planned
from autopar.request.plan_request import PlanRequest
from autopar.runtime.pipeline.schedule_actions import schedule_actions

_Chosen = Mapping[str, Strategy]
"""The strategy of each op of a block class, by op name."""


@dataclass(frozen=True, slots=True)
class StageCost:
    """The cost of one stage of a plan (one of several on a pipeline rank, perhaps) on one device,
    for one micro-batch.

    Attributes:
        times: seconds of forward and backward. The first stage has its whole backward in `weight_s`.
        kept_bytes: bytes that stay from forward to backward.
        moment_bytes: peak bytes that backward needs on top, less what it has freed by then.
        split_moment_bytes: `moment_bytes` if the backward runs in two parts.
        late_bytes: extra bytes that stay between the two parts.
        given_back_bytes: the part of `kept_bytes` that the first part frees.
    """

    times: StageTimes
    kept_bytes: int
    moment_bytes: int
    split_moment_bytes: int
    late_bytes: int
    given_back_bytes: int


@dataclass(frozen=True, slots=True)
class StaticBytes:
    """Always-resident bytes on a device of a pipeline rank, by part. `fixed` has what no parameter
    holds: the device's context, buffers, and messages in transit.
    """

    parameters: int
    gradients: int
    optimizer: int
    fixed: int

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return self.parameters + self.gradients + self.optimizer + self.fixed


@dataclass(frozen=True, slots=True)
class PlanCosts:
    """The costs of a plan's choices, as data.

    Attributes:
        stages: the cost of each stage, first to last.
        static: always-resident bytes on a device of each pipeline rank, by part.
        step_s: seconds that each pipeline rank spends once a step.
        hop_s: seconds of the longest message between stages.
        fixed_s: seconds that no choice changes.
        issued_s: seconds in which the hosts issue forward and backward of a step.
    """

    stages: tuple[StageCost, ...]
    static: tuple[StaticBytes, ...]
    step_s: tuple[float, ...]
    hop_s: float
    fixed_s: float
    issued_s: float

    @property
    def static_bytes(self) -> tuple[int, ...]:
        """Always-resident bytes on a device of each pipeline rank."""
        return tuple(static.total for static in self.static)


@dataclass(frozen=True, slots=True)
class LayoutChange:
    """A layout change over tp of the value `value`, from `have` to `need`, with its price."""

    value: str
    have: AxisLayout
    need: AxisLayout
    price: Conversion


@dataclass(frozen=True, slots=True)
class PricedSegment:
    """A segment as the plan runs it, with prices. `chosen` has the strategy of each op by name.
    `buffer_bytes` is the buffer that its recompute mode needs; `arrivals` are the layout changes of
    its inputs.
    """

    class_index: int
    block: AnnotatedBlock
    chosen: _Chosen
    buffer_bytes: int
    arrivals: tuple[LayoutChange, ...]

    @property
    def arriving(self) -> list[Conversion]:
        """The prices of the layout changes of its inputs."""
        return [change.price for change in self.arrivals]

    @property
    def changes(self) -> list[LayoutChange]:
        """The layout changes inside the segment, in the order in which ops first read them."""
        return list(_changes(self.block, self.chosen))

    @property
    def inside(self) -> list[Strategy | Conversion]:
        """All strategies and layout changes inside the segment, which take time in each
        micro-batch. Layout changes of its inputs are left out.
        """
        return [*self.chosen.values(), *(change.price for change in self.changes)]

    @property
    def paid(self) -> list[Strategy | Conversion]:
        """All strategies and layout changes that take time in each micro-batch: those inside the
        segment, and those of its inputs.
        """
        return [*self.inside, *self.arriving]

    @property
    def kept_bytes(self) -> int:
        """Bytes kept from forward to backward: the inputs if the segment is recomputed, otherwise
        each saved tensor once.
        """
        if self.block.recompute:
            return sum(
                self.block.input_bytes[name][self.chosen[name].outputs[0]]
                for name in self.block.inputs
            )
        return _saved_bytes(self.chosen.values())

    @property
    def late_bytes(self) -> int:
        """Bytes that are held between the gradients of inputs and those of parameters, minus
        `kept_bytes`; may be negative. Held then are tensors saved for parameters, and the gradients
        from which theirs are computed.
        """
        return (
            _largest(tensor for strategy in self.chosen.values() for tensor in strategy.late)
            - self.kept_bytes
        )

    @property
    def moment_bytes(self) -> int:
        """Peak bytes that the segment's backward needs besides the kept ones."""
        return self.block.workspace_bytes + self.made_again_bytes + self.buffer_bytes

    @property
    def made_again_bytes(self) -> int:
        """Bytes of saved tensors that backward recomputes before it starts, the inputs left out. 0
        without recomputation of the whole segment.
        """
        return _saved_bytes(self.chosen.values(), self.block.inputs) if self.block.recompute else 0

    @property
    def split_moment_bytes(self) -> int:
        """`moment_bytes` if backward runs in two parts, without the recomputed bytes that
        `late_bytes` includes.
        """
        return self.moment_bytes - min(self.made_again_bytes, max(self.late_bytes, 0))

    def entry_bytes(self, name: str) -> int:
        """Bytes of the input op `name` when another rank sends it, in the layout in which the
        segment reads it.
        """
        return self.block.message_bytes(name, self.chosen[name].outputs[0])


def plan_costs(plan: Plan, traced: TracedModel, request: PlanRequest) -> PlanCosts:
    """The costs of a plan's choices, annotated and summed.

    `request` says what the plan was made for: cluster, software, and pins that a plan does not
    record (`context_method`, `sequence_parallel`). Raises AutoparError if the plan does not fit the
    model under this request.
    """
    traced = as_planned(traced, plan)
    of_stage = stage_segments(plan, traced)
    ranks, on = plan.mesh.pp, segments_by_rank(plan, traced, request)
    base, segments = on[0]
    sent = [message_bytes(base, segments, stage.start) for stage in of_stage[1:]] + [0]
    keeps = base.pipeline is not None and base.pipeline.keeps_outputs
    stages = tuple(
        _stage([on[number % ranks][1][n] for n in stage], base.last, size * keeps, stage.start)
        for number, (stage, size) in enumerate(zip(of_stage, sent, strict=True))
    )
    owned = [list(owned_by(*on[rank], chain(*of_stage[rank::ranks]))) for rank in range(ranks)]
    return PlanCosts(
        stages,
        tuple(
            _static(of, model.fixed_bytes + passing_bytes(model, sent, rank))
            for rank, ((model, _), of) in enumerate(zip(on, owned, strict=True))
        ),
        tuple(fsum(strategy.step_s for strategy in of) for of in owned),
        longest_message_s([model for model, _ in on], sent),
        base.fixed_s,
        issued_s(plan, on, of_stage),
    )


def issued_s(plan: Plan, on: Sequence[PricedModel], of_stage: Sequence[Sequence[int]]) -> float:
    """Seconds in which the hosts issue forward and backward of a step: the slowest one all its
    micro-batches, after a virtual stage of each other one. `on` has all segments at the prices of
    each rank, `of_stage` those of each stage.
    """
    of_rank = []
    for rank, (model, segments) in enumerate(on):
        own = [segments[n] for n in chain(*of_stage[rank :: len(on)])]
        slower = 1.0 if model.pipeline is None else model.pipeline.host_slowdown
        chosen = [strategy for segment in own for strategy in segment.chosen.values()]
        of_rank.append(slower * fsum(s.forward_dispatch_s + s.backward_dispatch_s for s in chosen))
    slowest_s, *others_s = sorted(of_rank, reverse=True)
    return plan.num_microbatches * slowest_s + fsum(others_s) * len(on) / len(of_stage)


def _static(owned: Sequence[Strategy], fixed_bytes: int) -> StaticBytes:
    gradients, optimizer = (
        sum(getattr(strategy, name) for strategy in owned)
        for name in ("gradient_bytes", "optimizer_bytes")
    )
    parameters = sum(strategy.static_bytes for strategy in owned) - gradients - optimizer
    return StaticBytes(parameters, gradients, optimizer, fixed_bytes)


def actions_of(plan: Plan) -> tuple[tuple[Action, ...], ...]:
    """For each pipeline rank, its actions (forwards and backwards of stages and micro-batches) in a
    step, in order. Without a pipeline they are 1F1B on one rank: each backward follows its forward.
    """
    ranks = plan.mesh.pp
    schedule = plan.schedule if ranks > 1 else "1f1b"
    return schedule_actions(schedule, ranks, len(plan.stages) // ranks, plan.num_microbatches)


def longest_message_s(models: Iterable[AnnotatedModel], sent: Iterable[int]) -> float:
    """Seconds of the longest message between stages: the largest of the messages `sent` (bytes)
    over the slowest link of the models. 0.0 if nothing is sent.
    """
    links = {
        (m.pipeline.hop_latency_s, m.pipeline.hop_s_per_byte)
        for m in models
        if m.pipeline is not None
    }
    return max(
        (latency_s + size * each_s for latency_s, each_s in links for size in sent if size),
        default=0.0,
    )


def stage_segments(plan: Plan, traced: PreparedModel) -> list[range]:
    """For each stage, the range of the numbers of its segments. Raises AutoparError if the plan's
    segments are not the model's, in order, or it predicts the memory of another number of ranks.
    """
    names = [segment.name for segment in traced.segments]
    placed = list(chain(*plan.stages))
    priced = set(chain(*(block.segments for block in plan.blocks)))
    peaks = len(plan.predicted.peak_memory_bytes)
    if placed != names or not priced.issuperset(names) or peaks != plan.mesh.pp:
        raise AutoparError(
            f"the plan's stages hold {len(placed)} segments, its blocks {len(priced)}, of a model of {len(names)}, and it predicts the "
            f"memory of {peaks} ranks of {plan.mesh.pp}: it was damaged; plan again"
        )
    return [range(*ends) for ends in pairwise([0, *accumulate(map(len, plan.stages))])]


def block_numbers(plan: Plan, traced: PreparedModel) -> list[int]:
    """For each segment of the model, in order, the index of the plan's block that lists it. Raises
    KeyError if none does.
    """
    number_of = {
        name: number for number, block in enumerate(plan.blocks) for name in block.segments
    }
    return [number_of[segment.name] for segment in traced.segments]


PricedModel = tuple[AnnotatedModel, list[PricedSegment]]
"""The model annotated without recomputation, and every segment with the plan's strategies and
recompute mode.
"""


def segments_by_rank(plan: Plan, traced: PreparedModel, request: PlanRequest) -> list[PricedModel]:
    """For each pipeline rank, all segments of the model at the prices of its devices
    (`priced_segments`).
    """
    by_group = {
        group: priced_segments(plan, traced, request, group) for group in set(plan.mesh.groups)
    }
    return [by_group[group] for group in plan.mesh.groups]


def priced_segments(
    plan: Plan, traced: PreparedModel, request: PlanRequest, group: int = 0
) -> PricedModel:
    """(the model annotated without recomputation, all its segments with the plan's strategies and
    recompute modes), at the prices of the cluster's group `group` of devices.

    Raises AutoparError if the plan's choices are not possible for this model and request.
    """
    annotator = annotator_of(traced)
    model_of = cache(lambda mode: annotator.annotate(plan_setting(plan, request, mode, group)))
    base = model_of("none")
    fixed = annotator.axis_choices(plan_setting(plan, request, "none", group))

    @cache
    def chosen_of(number: int, index: int) -> _Chosen:
        own = plan.blocks[number]
        ops = model_of(_mode(plan, own)).classes[index].ops
        _check_fixed_axes(plan, own, fixed[index], [op.name for op in ops])
        return {op.name: _strategy(op, own, plan.mesh.tp) for op in ops}

    found: list[PricedSegment] = []
    numbers = block_numbers(plan, traced)
    for segment, sources, number in zip(traced.segments, base.reads, numbers, strict=True):
        index = segment.class_index
        model, chosen = model_of(_mode(plan, plan.blocks[number])), chosen_of(number, index)
        arrivals = tuple(_arrivals(model, found, index, chosen, sources))
        again_bytes = model.fixed_bytes - base.fixed_bytes
        found.append(PricedSegment(index, model.classes[index], chosen, again_bytes, arrivals))
    return base, found


def plan_setting(plan: Plan, request: PlanRequest, mode: str, group: int) -> Setting:
    """The setting under which the plan's choices are annotated, with the recompute mode `mode` for
    all blocks, on the cluster's group `group` of devices.
    """
    cluster = request.cluster
    return Setting(
        mesh=replace(plan.mesh, deal=""),
        micro_batch=plan.micro_batch,
        num_microbatches=plan.num_microbatches,
        zero=plan.zero,
        recompute=mode,
        precision=plan.precision,
        cluster=cluster.groups[group],
        context_method=request.pin.context_method,
        sequence_parallel=request.pin.sequence_parallel,
        stages_per_rank=len(plan.stages) // plan.mesh.pp,
        schedule=plan.schedule,
        software=request.software,
        offload=plan.offload,
        shard=plan.shard,
        between=cluster.between if isinstance(cluster, MixedCluster) else None,
    )


def _mode(plan: Plan, block: BlockPlan) -> str:
    """The recompute mode with which a block is annotated: its own, or the whole plan's if that is
    `every-k`.
    """
    return plan.recompute if is_periodic(plan.recompute) else block.recompute


def _check_fixed_axes(
    plan: Plan, block: BlockPlan, fixed: Mapping[str, Mapping[str, AxisChoice]], ops: Sequence[str]
) -> None:
    """Raise AutoparError unless the block's ops have the same choices on dp, cp and ep as `fixed`,
    those of the annotation, by op and axis.
    """
    axes = [axis for axis in plan.mesh.active if axis != "tp"]
    for name in ops:
        for axis in axes:
            ours, theirs = fixed.get(name, {}).get(axis), block.ops.get(name, {}).get(axis)
            if ours != theirs:
                raise AutoparError(
                    f"the plan runs {name} of {block.name} over {axis} as {theirs and theirs.strategy}, and this model would run it as "
                    f"{ours and ours.strategy}. Give the pins that the plan was made under (context_method), or plan again"
                )


def _strategy(op: AnnotatedOp, block: BlockPlan, tp: int) -> Strategy:
    """The strategy of an op that the plan's block names for tp. With `tp` = 1, the op's only one.
    Raises AutoparError if the op has no such strategy.
    """
    choice = block.ops.get(op.name, {}).get("tp")
    wanted = op.strategies[0].name if tp == 1 else choice and choice.strategy
    found = [strategy for strategy in op.strategies if strategy.name == wanted]
    if not found:
        known = ", ".join(strategy.name for strategy in op.strategies)
        raise AutoparError(
            f"the plan runs {op.name} of {block.name} over tp={tp} as {wanted}, which this model cannot: it has {known}; give the pins "
            "that the plan was made under (sequence_parallel), or plan again"
        )
    return found[0]


def _arrivals(
    model: AnnotatedModel,
    before: Sequence[PricedSegment],
    index: int,
    chosen: _Chosen,
    sources: Sequence[tuple[int, int]],
) -> Iterator[LayoutChange]:
    """Yields the layout changes of the inputs of a segment of class `index` with the strategies
    `chosen`, which pays for them. `before` has all earlier segments. `sources` has (segment,
    output) for each input; -1 is an input of the model.

    Raises AutoparError if a change is impossible.
    """
    prices = {
        (e.source, e.source_output, e.target_input): e.conversions
        for e in model.edges
        if e.target == index
    }
    for place, (name, (source, output)) in enumerate(
        zip(model.classes[index].inputs, sources, strict=True)
    ):
        if source < 0:
            continue
        maker = before[source]
        have, need = maker.chosen[maker.block.outputs[output]].inputs[0], chosen[name].outputs[0]
        if have != need:
            where = f"the edge from output {output} of {maker.block.name} to {name} of {model.classes[index].name}"
            price = _priced(prices[maker.class_index, output, place], have, need, where)
            yield LayoutChange(name, have, need, price)


def _changes(block: AnnotatedBlock, chosen: _Chosen) -> Iterator[LayoutChange]:
    """Yields the layout changes inside a segment: one for each value and each layout that an op
    reads and the producer does not deliver. Raises AutoparError if one is impossible.
    """
    have = {
        value: layout
        for op in block.ops
        for value, layout in zip(op.outputs, chosen[op.name].outputs, strict=True)
    }
    wanted = dict.fromkeys(
        (value, layout)
        for op in block.ops
        for value, layout in zip(op.inputs, chosen[op.name].inputs, strict=True)
    )
    for value, layout in wanted:
        if have[value] != layout:
            conversions, where = block.values[value].conversions, f"{value} of {block.name}"
            price = _priced(conversions, have[value], layout, where)
            yield LayoutChange(value, have[value], layout, price)


def _priced(
    conversions: Mapping[tuple[AxisLayout, AxisLayout], Conversion],
    have: AxisLayout,
    need: AxisLayout,
    where: str,
) -> Conversion:
    """The price of the layout change from `have` to `need`. Raises AutoparError, which names
    `where`, if the change is impossible.
    """
    if (have, need) not in conversions:
        raise AutoparError(
            f"the plan does not fit together: {where} is made as {have} and read as {need}, and nothing converts that"
        )
    return conversions[have, need]


def _saved_bytes(strategies: Iterable[Strategy], without: Sequence[str] = ()) -> int:
    """Bytes of all saved tensors except those of the values `without`. A tensor with several sizes
    counts its largest.
    """
    return _largest(
        saved for strategy in strategies for saved in strategy.saved if saved.value not in without
    )


def _largest(tensors: Iterable[Saved]) -> int:
    """Total bytes of saved tensors. Those with one key are one tensor, which counts with its
    largest size.
    """
    largest: dict[str, int] = {}
    for tensor in tensors:
        largest[tensor.key] = max(largest.get(tensor.key, 0), tensor.size_bytes)
    return sum(largest.values())


def _stage(
    run: Sequence[PricedSegment], last: int | None, sent_bytes: int, first: int
) -> StageCost:
    """The cost of the stage with the segments `run`, of which the first has the number `first`. It
    keeps `sent_bytes` of its results until backward.

    `last` is the class of the model's last segment. Its backward runs first, and frees what it kept
    before the other segments' backward begins.
    """
    ends = [segment for segment in run if segment.class_index == last]
    kept = sum(segment.kept_bytes for segment in run) + sent_bytes
    whole = fullest_moment(run, last, sum(segment.kept_bytes for segment in ends), False)
    if not first:  # torch runs its whole backward where gradients of parameters are due
        times = stage_times(run)
        times = replace(times, weight_s=times.backward_s)
        return StageCost(times, kept, whole, whole, 0, 0)
    given_back = sum(max(-segment.late_bytes, 0) for segment in ends)
    split = fullest_moment(run, last, given_back, True)
    late = sum(max(segment.late_bytes, 0) for segment in run)
    return StageCost(stage_times(run), kept, whole, split, late, given_back)


def stage_times(run: Sequence[PricedSegment]) -> StageTimes:
    """Seconds of forward, of backward, and of its part for parameters' gradients: one micro-batch
    on a stage with the segments `run`.
    """
    paid = [cost for segment in run for cost in segment.paid]
    return StageTimes(
        fsum(cost.forward_s for cost in paid),
        fsum(cost.backward_s for cost in paid),
        fsum(s.backward_weight_s for segment in run for s in segment.chosen.values()),
    )


def fullest_moment(
    run: Sequence[PricedSegment], last: int | None, given_back: int, split: bool
) -> int:
    """Peak bytes that the backward of the segments `run` needs besides what is kept, at least 0.
    The backward of class `last` comes first and has then freed `given_back` bytes.

    `split`: whether the backward runs in two parts, so that bytes of earlier ones wait.
    """
    needed = [segment.split_moment_bytes if split else segment.moment_bytes for segment in run]
    to_come = split * sum(max(segment.late_bytes, 0) for segment in run)
    besides = [
        size - (given_back if segment.class_index != last else to_come)
        for segment, size in zip(run, needed, strict=True)
    ]
    return max(0, *besides)


def passing_bytes(base: AnnotatedModel, sent: Sequence[int], rank: int) -> int:
    """Bytes of message buffers on rank `rank` of a pipeline with several stages on each rank: twice
    the largest message into or out of one of its stages. `sent` has the bytes that each stage
    sends.

    0 with one stage on each rank, or if outputs are not kept until backward.
    """
    setting = base.pipeline
    if setting is None or not setting.keeps_outputs or setting.stages_per_rank == 1:
        return 0
    mine = range(rank, len(sent), setting.ranks)
    return 2 * max(max(sent[stage - 1] if stage else 0, sent[stage]) for stage in mine)


def message_bytes(model: AnnotatedModel, segments: Sequence[PricedSegment], first: int) -> int:
    """Bytes that enter the stage that begins with segment `first`: each earlier value that is read
    there or later, once.
    """
    largest: dict[tuple[int, int], int] = {}
    for reader in range(first, len(segments)):
        block = segments[reader].block
        for name, source in zip(block.inputs, model.reads[reader], strict=True):
            if 0 <= source[0] < first:
                largest[source] = max(largest.get(source, 0), segments[reader].entry_bytes(name))
    return sum(largest.values())


def owned_by(
    model: AnnotatedModel, segments: Sequence[PricedSegment], held: Iterable[int]
) -> Iterator[Strategy]:
    """Yields the strategies whose parameters a rank with the segments numbered `held` stores. They
    are all of its segments and, for each shared parameter that it only borrows, that of the first
    paying segment.
    """
    held = set(held)
    for number in sorted(held):
        yield from segments[number].chosen.values()
    for shared in model.shared:
        if not held.isdisjoint(number for number, _ in shared.reading) and held.isdisjoint(
            number for number, _ in shared.paying
        ):
            number, name = shared.paying[0]
            yield segments[number].chosen[name]
