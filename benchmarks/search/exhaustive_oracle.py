"""What the search must find: every plan of a small task, priced by the definition, with no code of
`autopar.solve`.

A plan is a strategy for every op of every class x a recompute mode for every layer x a cut into
stages x a schedule x a candidate. Seconds and bytes are written out here again from
docs/internals/solver.md:

    a segment   its strategies, each conversion of a value once, and what changes layout on the way to it
    no pipeline micro-batches x (all segments) + once a step + fixed;  fixed + static + kept + the fullest moment of some backward
    a pipeline  the schedule's time of the stages (`autopar_cost_models`) + the longest rank's work once a step + fixed;
                of each rank: fixed + static + the most it keeps, by the list of what torch has it do, + the fullest moment
                + under zero bubble, the most that is there besides between the two parts of backwards, less what the last segment has
                given back of those whose first part is over, where a rank has one stage
                + with several stages a rank, two of its largest messages

With one stage a rank, layers may be cut anywhere and each recompute as it likes.  With several,
stages have equal numbers of layers, but the first and the last may be up to two layers shorter. All
stages of a rank run the same number of layers in each mode, the first recomputing most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, combinations, pairwise, product
from math import inf

from autopar_cost_models import StageTimes, pipeline_time

from autopar.ir.annotated import AnnotatedBlock, AnnotatedModel, Conversion, Strategy
from autopar.runtime.pipeline.schedule_actions import schedule_actions

Chosen = Mapping[str, Strategy]


@dataclass(frozen=True, slots=True)
class Cost:
    """Costs of a segment (the layers between two possible stage cuts) or of a stage, on one device.

    Attributes:
        forward_s, backward_s: seconds of a micro-batch.
        weight_s: the part of `backward_s` for gradients of parameters.
        step_s: seconds once a step.
        kept: bytes kept from forward to backward.
        moment: bytes at the fullest moment of backward, besides those kept.
        late: bytes besides `kept` that wait between the two parts of a split backward.
        spared: the part of `late` that recomputation makes again, and `moment` counts too.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    weight_s: float = 0.0
    step_s: float = 0.0
    kept: int = 0
    moment: int = 0
    late: int = 0
    spared: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.forward_s + other.forward_s, self.backward_s + other.backward_s, self.weight_s + other.weight_s,
                    self.step_s + other.step_s, self.kept + other.kept, max(self.moment, other.moment), self.late + other.late,
                    max(self.spared, other.spared))  # fmt: skip


@dataclass(frozen=True, slots=True)
class Point:
    """The seconds of a plan, and the bytes on its fullest rank."""

    time_s: float
    size_bytes: int


def points(
    models: Mapping[str, AnnotatedModel],
    schedules: Sequence[tuple[str, int]],
    sizes: Sequence[int] = (),
    placed_by: Callable[[Mapping[str, AnnotatedModel]], Iterator[Placed]] | None = None,
) -> set[Point]:
    """(seconds, bytes) of every plan of one candidate, without duplicates.

    `models` has the priced model for each recompute mode, the mode that keeps most first.
    `schedules` has (name, stages a rank) of the pipeline schedules; unused without a pipeline.
    `sizes` has the layers of each stage if they are fixed. `placed_by` lists combinations of
    strategies, by default `placements`.
    """
    found: set[Point] = set()
    for placed in (placed_by or placements)(models):
        if placed.base.pipeline is None:
            found |= set(placed.whole())
        else:
            for name, count in schedules:
                found |= set(
                    placed.piped(name, sizes) if count == 1 else placed.dealt(name, count, sizes)
                )
    return found


def placements(models: Mapping[str, AnnotatedModel]) -> Iterator[Placed]:
    """Yields every combination of strategies of all ops of all classes that can run: all
    conversions of layouts exist, and tied parameters have one layout.
    """
    base = next(iter(models.values()))
    ways = [
        list(product(*(range(len(op.strategies)) for op in block.ops))) for block in base.classes
    ]
    whole = [[(number, of) for of in each if conversions_of(block, chosen_of(block, of)) is not None]
             for number, (block, each) in enumerate(zip(base.classes, ways, strict=True))]  # fmt: skip
    for combination in product(*whole):
        placed = Placed(models, [of for _, of in combination])
        if placed.fits_together:
            yield placed


class Placed:
    """A model under one combination of strategies. `numbers[class][op]` is the index of the op's
    strategy. `models` is by recompute mode. `fits_together`: whether the combination can run; if
    not, it has no costs.
    """

    def __init__(
        self,
        models: Mapping[str, AnnotatedModel],
        numbers: Sequence[Sequence[int]],
        of_class: Mapping[tuple[str, int], Cost] | None = None,
    ) -> None:
        self.models, self.base = models, next(iter(models.values()))
        self.modes = tuple(models)
        self.chosen = {
            (mode, index): chosen_of(block, numbers[index])
            for mode, model in models.items()
            for index, block in enumerate(model.classes)
        }
        self.layers = [
            n for n, index in enumerate(self.base.segments) if self.base.classes[index].count > 1
        ]
        self.fits_together = self._agrees()
        if self.fits_together:
            self.of_class = of_class or {
                (mode, index): self.class_cost(mode, index) for mode, index in self.chosen
            }
            self.arriving = [self._arriving(number) for number in range(len(self.base.segments))]
            self.static = [
                sum(s.static_bytes for s in self.chosen[self.modes[0], index].values())
                for index in self.base.segments
            ]

    # ------------------------------------------------------------------------------------------------ what a segment costs

    def _agrees(self) -> bool:
        for group in self.base.ties:
            if (
                len(
                    {
                        str(self.chosen[self.modes[0], index][name].outputs[0].value)
                        for index, name in group
                    }
                )
                > 1
            ):
                return False
        return all(
            e.count == 0 or have == need or (have, need) in e.conversions
            for e, have, need in self._edges()
        )

    def _edges(self):
        mode = self.modes[0]
        for edge in self.base.edges:
            made, read = self.base.classes[edge.source], self.base.classes[edge.target]
            have = self.chosen[mode, edge.source][made.outputs[edge.source_output]].inputs[0]
            yield (
                edge,
                have,
                self.chosen[mode, edge.target][read.inputs[edge.target_input]].outputs[0],
            )

    def class_cost(self, mode: str, index: int) -> Cost:
        model = self.models[mode]
        block, chosen = model.classes[index], self.chosen[mode, index]
        paid = [*chosen.values(), *conversions_of(block, chosen)]
        inputs = (
            sum(block.input_bytes[name][chosen[name].outputs[0]] for name in block.inputs)
            if block.recompute
            else 0
        )
        buffers = model.fixed_bytes - self.base.fixed_bytes
        again, late = (
            _saved(chosen, block.inputs) if block.recompute else 0,
            max(self.late(mode, index), 0),
        )
        return Cost(
            sum(one.forward_s for one in paid), sum(one.backward_s for one in paid), sum(s.backward_weight_s for s in chosen.values()),
            sum(s.step_s for s in chosen.values()), inputs if block.recompute else _saved(chosen, ()),
            block.workspace_bytes + buffers + again, late, min(again, late),
        )  # fmt: skip

    def late(self, mode: str, index: int) -> int:
        """Bytes that wait between the two parts of a split backward (tensors that ops with a
        parameter keep, and the gradients that reach them), less the bytes kept. May be negative.
        """
        block, chosen = self.models[mode].classes[index], self.chosen[mode, index]
        there: dict[str, int] = {}
        for tensor in (tensor for strategy in chosen.values() for tensor in strategy.late):
            there[tensor.key] = max(there.get(tensor.key, 0), tensor.size_bytes)
        kept = (
            sum(block.input_bytes[name][chosen[name].outputs[0]] for name in block.inputs)
            if block.recompute
            else _saved(chosen, ())
        )
        return sum(there.values()) - kept

    def _arriving(self, number: int) -> Cost:
        """Seconds of the layout conversions of values that segment `number` reads from other
        segments.
        """
        index, found = self.base.segments[number], Cost()
        ends = {
            (e.source, e.source_output, e.target, e.target_input): (e, have, need)
            for e, have, need in self._edges()
        }
        for place, (source, output) in enumerate(self.base.reads[number]):
            if source >= 0:
                edge, have, need = ends[self.base.segments[source], output, index, place]
                if have != need:
                    found += Cost(
                        edge.conversions[have, need].forward_s,
                        edge.conversions[have, need].backward_s,
                    )
        return found

    def cost(self, number: int, mode: str) -> Cost:
        """The cost of segment `number` under the recompute mode `mode`, with conversions of what it
        reads.
        """
        return self.of_class[mode, self.base.segments[number]] + self.arriving[number]

    # ------------------------------------------------------------------------------------------------ without a pipeline

    def whole(self) -> Iterator[Point]:
        """Yields (seconds, bytes) of every plan on one rank, over every mode of every layer;
        equal costs once.
        """
        segments = range(len(self.base.segments))
        for way in self.ways(segments):
            seconds = (
                self.base.num_microbatches * (way.forward_s + way.backward_s)
                + way.step_s
                + self.base.fixed_s
            )
            yield Point(seconds, self.base.fixed_bytes + sum(self.static) + way.kept + way.moment)

    def ways(self, segments: Sequence[int], parted: bool = False) -> list[Cost]:
        """Costs of a stage with these segments, one for every choice of modes of its layers,
        without duplicates. `parted`: its backward runs in two parts.
        """
        freed = self._freed(segments, parted)
        return list(
            {self._run(segments, modes, freed, parted): None for modes in self._modes(segments)}
        )

    def _modes(self, segments: Sequence[int]) -> Iterator[dict[int, str]]:
        mine = [number for number in segments if number in self.layers]
        for modes in product(self.modes, repeat=len(mine)):
            yield dict(zip(mine, modes, strict=True))

    def _freed(self, segments: Sequence[int], parted: bool) -> int:
        """Bytes of the model's last segment that are freed before the backward of its stage's other
        segments begins. 0 if the stage lacks it, or the model does not free it early.
        """
        last = len(self.base.segments) - 1
        if self.base.segments[last] != self.base.last or last not in segments:
            return 0
        return (
            max(-self.late(self.modes[0], self.base.last), 0)
            if parted
            else self.cost(last, self.modes[0]).kept
        )

    def _run(
        self, segments: Sequence[int], modes: Mapping[int, str], freed: int, parted: bool
    ) -> Cost:
        """The cost of a stage whose layers have the recompute modes `modes` (by segment), and whose
        last segment frees `freed` bytes early. `parted`: its backward runs in two parts.
        """
        found, last = Cost(), len(self.base.segments) - 1
        costs = {number: self.cost(number, modes.get(number, self.modes[0])) for number in segments}
        to_come = (
            parted
            * sum(own.late for own in costs.values())
            * (self.base.segments[last] == self.base.last)
        )
        for number, own in costs.items():
            less = parted * own.spared + (to_come if number == last else freed)
            found += replace(own, moment=max(own.moment - less, 0), spared=0)
        return found

    # ------------------------------------------------------------------------------------------------ pipelines

    def piped(self, schedule: str, sizes: Sequence[int] = ()) -> Iterator[Point]:
        """Yields (seconds, bytes on the fullest rank) of every plan with one stage a rank: every
        cut into stages, and every mode of every layer. With `sizes`, only the cut with these
        numbers of layers.
        """
        ranks, layers = self.base.pipeline.ranks, len(self.layers)
        cuts = (
            [b - a for a, b in pairwise((0, *inner, layers))]
            for inner in combinations(range(1, layers), ranks - 1)
        )
        for cut in [sizes] if sizes else cuts:
            stages = self.stages(cut)
            sent = self.messages(stages)
            tied_s, static = zip(
                *(self.rank(stages[rank : rank + 1]) for rank in range(ranks)), strict=True
            )
            held = [most[0] for (most,) in _held(schedule, ranks, 1, self.base.num_microbatches)]
            late = [
                max(counts[0] for counts, _ in turns)
                for turns in _turns(schedule, ranks, 1, self.base.num_microbatches)
            ]
            ways = []
            for number, (own, size, h, w) in enumerate(zip(static, sent, held, late, strict=True)):
                kept, parted = (
                    size if self.base.pipeline.keeps_outputs else 0,
                    schedule == "zero_bubble" and number > 0,
                )
                of = self.ways(stages[number], parted)
                gone = parted * (w - 1) * self._freed(stages[number], parted)
                ways.append(
                    [
                        (
                            way,
                            own + h * (way.kept + kept) + parted * w * way.late - gone + way.moment,
                        )
                        for way in of
                    ]
                )
            for plan in product(*ways):
                once_s = max(
                    way.step_s + more_s for (way, _), more_s in zip(plan, tied_s, strict=True)
                )
                yield Point(
                    self.step([way for way, _ in plan], schedule, ranks, sent) + once_s,
                    max(size for _, size in plan),
                )

    def dealt(self, schedule: str, count: int, sizes: Sequence[int] = ()) -> Iterator[Point]:
        """Yields (seconds, bytes on the fullest rank) of every plan with `count` stages a rank.
        Every division of layers (`deals`) is tried, or only that with `sizes`, and for every rank
        every number of layers in each mode.
        """
        ranks = self.base.pipeline.ranks
        for deal in [sizes] if sizes else deals(len(self.layers), ranks * count):
            stages = self.stages(deal)
            sent = self.messages(stages)
            of_rank = [range(rank, len(stages), ranks) for rank in range(ranks)]
            tied_s, static = zip(
                *(self.rank([stages[n] for n in mine]) for mine in of_rank), strict=True
            )
            parted = [schedule == "zero_bubble" and n > 0 for n in range(len(stages))]
            ways = [
                self._rank_ways([stages[n] for n in mine], [parted[n] for n in mine])
                for mine in of_rank
            ]
            held, turns = (
                of(schedule, ranks, count, self.base.num_microbatches) for of in (_held, _turns)
            )
            passing = [
                2
                * self.base.pipeline.keeps_outputs
                * max(sent[k] for n in mine for k in {n, max(n - 1, 0)})
                for mine in of_rank
            ]
            for plan in product(*ways):
                size = max(
                    static[r] + passing[r] + self._most([sent[n] for n in mine], plan[r], held[r], r == ranks - 1 and not parted[-1], [
                        (sum(w * cost.late * parted[n] for w, cost, n in zip(counts, plan[r], mine, strict=True)), stage)
                        for counts, stage in turns[r]
                    ]) for r, mine in enumerate(of_rank)
                )  # fmt: skip
                costs = [plan[n % ranks][n // ranks] for n in range(len(stages))]
                once_s = max(
                    sum(way.step_s for way in of) + more_s
                    for of, more_s in zip(plan, tied_s, strict=True)
                )
                yield Point(self.step(costs, schedule, ranks, sent) + once_s, size)

    def _rank_ways(
        self, stages: Sequence[Sequence[int]], parted: Sequence[bool]
    ) -> list[tuple[Cost, ...]]:
        """Every choice of modes for a rank, as a tuple with the cost of each of its stages. All
        stages have the same numbers of layers in each mode. `parted`: by stage, whether its
        backward runs in two parts.
        """
        mine = [[n for n in stage if n in self.layers] for stage in stages]
        longest, found = max(map(len, mine)), {}
        freed = [self._freed(stage, two) for stage, two in zip(stages, parted, strict=True)]
        for amounts in product(range(longest + 1), repeat=len(self.modes)):
            if sum(amounts) == longest:  # the mode that keeps least first
                order = [
                    mode
                    for mode, amount in zip(self.modes[::-1], amounts[::-1], strict=True)
                    for _ in range(amount)
                ]
                modes = [dict(zip(layers, order, strict=False)) for layers in mine]
                found[
                    tuple(
                        self._run(*each) for each in zip(stages, modes, freed, parted, strict=True)
                    )
                ] = None
        return list(found)

    def _most(self, sent: Sequence[int], costs: Sequence[Cost], held: Sequence[Sequence[int]], ends: bool, late: list[tuple[int, int]]
              ) -> int:  # fmt: skip
        """The most bytes that a rank holds, besides static ones.

        `sent` and `costs` are by stage of the rank. `held` has the numbers of micro-batches of each
        stage that are held together, at the fullest moments. If the rank `ends` a pipeline of whole
        backwards, its last stage keeps nothing while others have their backward. `late` has (bytes
        that wait for gradients of parameters, the stage whose backward runs).
        """
        keeps = self.base.pipeline.keeps_outputs
        kept = [cost.kept + (size if keeps else 0) for cost, size in zip(costs, sent, strict=True)]
        most = max(sum(h * k for h, k in zip(moment, kept, strict=True)) for moment in held)
        if not ends:
            return most + max(size + costs[stage].moment for size, stage in late)
        others = max(
            sum(h * k for h, k in zip(moment[:-1], kept[:-1], strict=True)) for moment in held
        )
        return max(most + costs[-1].moment, others + max(cost.moment for cost in costs[:-1]))

    def stages(self, sizes: Sequence[int]) -> list[range]:
        """The segments of each stage, as index ranges, if stage i has `sizes[i]` layers. Segments
        between two layers belong to the stage of the earlier one.
        """
        firsts = [0, *(self.layers[taken] for taken in accumulate(sizes[:-1]))]
        return [range(a, b) for a, b in pairwise((*firsts, len(self.base.segments)))]

    def rank(self, stages: Sequence[Sequence[int]]) -> tuple[float, int]:
        """(seconds, bytes) of a rank with these stages that do not depend on recompute modes:
        seconds once a step for parameters that another rank pays for, static and fixed bytes.
        """
        mine = [number for stage in stages for number in stage]
        once_s, static = 0.0, sum(self.static[number] for number in mine)
        for tensor in self.base.shared:
            ((payer, name),) = tensor.paying
            if payer not in mine and any(reader in mine for reader, _ in tensor.reading):
                shared = self.chosen[self.modes[0], self.base.segments[payer]][name]
                once_s, static = once_s + shared.step_s, static + shared.static_bytes
        return once_s, static + self.base.fixed_bytes

    def messages(self, stages: Sequence[Sequence[int]]) -> list[int]:
        """For each stage, bytes that it sends for a micro-batch: values made so far that later
        stages read, each once, at the largest size that is read.
        """
        found = []
        for stage in stages:
            end, largest = stage[-1] + 1, {}
            for reader in range(end, len(self.base.segments)):
                block = self.base.classes[self.base.segments[reader]]
                for name, source in zip(block.inputs, self.base.reads[reader], strict=True):
                    layout = self.chosen[self.modes[0], self.base.segments[reader]][name].outputs[0]
                    if 0 <= source[0] < end:
                        largest[source] = max(
                            largest.get(source, 0), block.message_bytes(name, layout)
                        )
            found.append(sum(largest.values()))
        return found

    def step(self, costs: Sequence[Cost], schedule: str, ranks: int, sent: Sequence[int]) -> float:
        """Seconds of a step: the schedule's time for stages with these costs, and the model's fixed
        seconds. `sent` has the bytes that each stage sends.
        """
        setting = self.base.pipeline
        hops = [setting.hop_latency_s + size * setting.hop_s_per_byte for size in sent if size]
        times = tuple((cost.forward_s, cost.backward_s, cost.weight_s) for cost in costs)
        return (
            _schedule_s(schedule, times, ranks, self.base.num_microbatches, max(hops, default=0.0))
            + self.base.fixed_s
        )


@lru_cache(maxsize=100_000)
def _schedule_s(
    schedule: str,
    times: tuple[tuple[float, float, float], ...],
    ranks: int,
    micro_batches: int,
    hop_s: float,
) -> float:
    """Seconds of a schedule; `times` has (forward, backward, weight gradients) of each stage. The
    first stage has no gradient of its input to compute apart: its whole backward counts as weight
    gradients.
    """
    first, *rest = times
    stages = [StageTimes(first[0], first[1], first[1]), *(StageTimes(*of) for of in rest)]
    return pipeline_time(schedule, stages, ranks, micro_batches, hop_s).time_s


@lru_cache(maxsize=1000)
def _turns(
    schedule: str, ranks: int, count: int, micro_batches: int
) -> list[set[tuple[tuple[int, ...], int]]]:
    """For each rank, the pairs (for each of its stages, the micro-batches that wait for gradients
    of parameters; the stage whose backward runs), at every backward. Duplicates are dropped.
    """
    found = []
    for todo in schedule_actions(schedule, ranks, count, micro_batches):
        late, turns = [0] * count, set()
        for action in todo:
            stage = action.stage // ranks
            late[stage] += {"I": 1, "W": -1}.get(action.kind, 0)
            if action.kind in "BI":
                turns.add((tuple(late), stage))
        found.append(turns)
    return found


@lru_cache(maxsize=1000)
def _held(schedule: str, ranks: int, count: int, micro_batches: int) -> list[list[tuple[int, ...]]]:
    """For each rank, the fullest moments of torch's list of actions: at each, how many
    micro-batches each of its stages holds. Moments at which another holds at least as many of all
    are dropped.
    """
    found = []
    for todo in schedule_actions(schedule, ranks, count, micro_batches):
        held, moments = [0] * count, set()
        for action in todo:
            stage = action.stage // ranks
            held[stage] += action.kind == "F"
            moments.add(tuple(held))
            held[stage] -= action.kind in "BW"
        found.append(
            [
                m
                for m in moments
                if not any(
                    o != m and all(a <= b for a, b in zip(m, o, strict=True)) for o in moments
                )
            ]
        )
    return found


def deals(layers: int, count: int) -> list[list[int]]:
    """The divisions of `layers` layers among `count` stages that are tried, each as a list of
    sizes. They are equal, but the first and the last may be up to two shorter. Layers left over go
    to the middle.
    """
    found = []
    for first, last in product(range(3), repeat=2):
        each, over = divmod(layers + first + last, count)
        sizes = [each] * count
        for stage in [*range(1, count - 1), 0, count - 1][:over]:
            sizes[stage] += 1
        sizes[0], sizes[-1] = sizes[0] - first, sizes[-1] - last
        if min(sizes) > 0 and sizes not in found:
            found.append(sizes)
    return found


def best(found: set[Point], capacity_bytes: float = inf) -> Point | None:
    """The fastest plan that fits; None if none does."""
    return min(
        (point for point in found if point.size_bytes <= capacity_bytes),
        key=lambda p: (p.time_s, p.size_bytes),
        default=None,
    )


def front(found: set[Point]) -> list[Point]:
    """The Pareto-optimal plans in seconds and bytes, smallest first."""
    kept: list[Point] = []
    for point in sorted(found, key=lambda p: (p.size_bytes, p.time_s)):
        if not kept or point.time_s < kept[-1].time_s:
            kept.append(point)
    return kept


def above_hull(point: Point, found: set[Point]) -> bool:
    """Whether a plan lies above the lower convex hull of all plans in bytes and seconds. Such a
    plan is best at no price of a byte.
    """
    for a, b in combinations(front(found), 2):
        if a.size_bytes < point.size_bytes < b.size_bytes:
            share = (point.size_bytes - a.size_bytes) / (b.size_bytes - a.size_bytes)
            if a.time_s + share * (b.time_s - a.time_s) < point.time_s * (1 - 1e-9):
                return True
    return False


def chosen_of(block: AnnotatedBlock, numbers: Sequence[int]) -> dict[str, Strategy]:
    return {op.name: op.strategies[number] for op, number in zip(block.ops, numbers, strict=True)}


def conversions_of(block: AnnotatedBlock, chosen: Chosen) -> list[Conversion] | None:
    """The conversions of layouts inside a class: each value once for each layout that is read and
    not made. None if one is impossible.
    """
    made = {
        value: layout
        for op in block.ops
        for value, layout in zip(op.outputs, chosen[op.name].outputs, strict=True)
    }
    read = {
        (value, layout)
        for op in block.ops
        for value, layout in zip(op.inputs, chosen[op.name].inputs, strict=True)
    }
    pairs = [
        (value, (made[value], layout))
        for value, layout in sorted(read, key=str)
        if made[value] != layout
    ]
    if any(pair not in block.values[value].conversions for value, pair in pairs):
        return None
    return [block.values[value].conversions[pair] for value, pair in pairs]


def _saved(chosen: Chosen, without: Sequence[str]) -> int:
    """Bytes that autograd keeps: each tensor once, at the largest size that an op asks for. Tensors
    of the values `without` do not count.
    """
    largest: dict[str, int] = {}
    for saved in (
        saved
        for strategy in chosen.values()
        for saved in strategy.saved
        if saved.value not in without
    ):
        largest[saved.key] = max(largest.get(saved.key, 0), saved.size_bytes)
    return sum(largest.values())
