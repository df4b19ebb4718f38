"""Random small tasks for the search: annotated models of a few layers, on a few meshes, small
enough to enumerate every choice.

A task has a first segment, two to four layers of one or two kinds, maybe something between two of
them, and a last segment.  In some the last shares its parameter with the first, or any segments
with others.  Every op has up to three strategies, over tp alone; layouts of neighbours may differ,
and what it takes to convert is drawn, or impossible.  Costs depend on the mesh as real ones do.
Work and bytes shrink with tp where something is sharded, and static bytes with dp under ZeRO. Work
and kept bytes grow with the micro-batch.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from autopar_cost_models import check_schedule

from autopar.ir.annotated import (
    AnnotatedBlock,
    AnnotatedModel,
    AnnotatedOp,
    AnnotatedValue,
    BoundaryEdge,
    Conversion,
    PipelineSetting,
    Saved,
    Shared,
    Strategy,
)
from autopar.ir.mesh import MeshShape
from autopar.ir.sharding import RP, AxisLayout, P, R, S
from autopar.solve.costs.candidate import MIXED, MODES, Candidate

LAYOUTS = (RP, P, S(0), S(1))
BATCH = 8
MOST_PLACEMENTS = {2: 64, 3: 40, 4: 20}
"""The most combinations of strategies that a model may have, by its number of layers."""


def random_sharing(rng: random.Random, segments: Sequence[int]) -> tuple[Shared, ...]:
    """Random shared tensors for segments of these classes. All segments of some classes read a
    tensor that a segment of another class pays for.
    """
    classes, readers = sorted(set(segments)), {}
    borrowing = rng.sample(classes, rng.randint(1, len(classes) - 1))
    paying = [number for number, index in enumerate(segments) if index not in borrowing]
    pool = rng.sample(paying, rng.randint(1, len(paying)))
    for number, index in enumerate(segments):
        if index in borrowing:
            readers.setdefault(rng.choice(pool), []).append(number)
    return tuple(
        Shared(((payer, "w"),), tuple((number, "w") for number in of))
        for payer, of in sorted(readers.items())
    )


def ties_of(
    shared: Sequence[Shared], segments: Sequence[int]
) -> tuple[tuple[tuple[int, str], ...], ...]:
    """The groups of ops that hold one tensor each, as ((class, op), ...) in ascending order."""
    groups = (
        {(segments[number], name) for number, name in (*one.paying, *one.reading)} for one in shared
    )
    return tuple(sorted({tuple(sorted(group)) for group in groups}))


def borrowed(op: AnnotatedOp) -> AnnotatedOp:
    """The parameter `op` without costs once a step and static bytes, which the segment that shares
    it pays.
    """
    free = {"step_s": 0.0, "static_bytes": 0, "gradient_bytes": 0, "optimizer_bytes": 0}
    return replace(op, strategies=tuple(replace(s, **free) for s in op.strategies))


@dataclass
class Task:
    """A random task: `candidates` and their costs, as `search.search` takes them. Equal seeds give
    equal tasks. `known` caches models by candidate.
    """

    seed: int
    candidates: tuple[Candidate, ...] = ()
    known: dict[Hashable, AnnotatedModel] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng, other = random.Random(self.seed), random.Random(~self.seed)
        self.layers = rng.choice([2, 2, 3, 3, 4])
        kinds = [1, 1, 2, 2] if self.layers == 4 and rng.random() < 0.5 else [1] * self.layers
        rng.shuffle(kinds)
        self.segments = (0, *kinds, max(kinds) + 1)
        if other.random() < 0.3:  # between two layers
            place, glue = other.randint(2, self.layers), self.segments[-1]
            self.segments = (*self.segments[:place], glue, *self.segments[place:-1], glue + 1)
        # every layer also reads what the first segment made, as cross-attention does
        self.skips = rng.random() < 0.3
        ends = Shared(((0, "w"),), ((len(self.segments) - 1, "w"),))
        self.shared = (ends,) if rng.random() < 0.3 else ()
        if other.random() < 0.4:
            self.shared = random_sharing(other, self.segments)
        self.last_frees = rng.random() < 0.5
        self.keeps_outputs = rng.random() < 0.3
        self.hop = rng.choice([(0.0, 0.0), (0.02, 0.0), (0.02, 0.1)])
        self.palette = (R, *rng.sample(LAYOUTS, rng.randint(1, 2)))
        self.forbid = rng.choice([0.0, 0.0, 0.2])
        self.fixed_s, self.fixed_bytes = rng.choice([0.0, 0.5]), rng.randint(0, 9)
        self.candidates = self.candidates or _candidates(rng, self.layers)

    def cell_of(self, candidate: Candidate) -> Hashable:
        """A key of the candidate; candidates with equal keys have ops of equal cost."""
        return candidate.mesh.tp, candidate.micro_batch

    def annotate(self, candidate: Candidate) -> AnnotatedModel:
        """The priced model of a candidate whose recompute mode is fixed ("mixed" is not)."""
        if candidate not in self.known:
            self.known[candidate] = self._annotated(candidate)
        return self.known[candidate]

    def _annotated(self, candidate: Candidate) -> AnnotatedModel:
        mesh, reads = candidate.mesh, self._reads()
        counts = Counter(self.segments)
        # the same draws for every micro-batch, so that a larger one never needs less
        rng = random.Random(f"{self.seed} {mesh.tp}")
        budget = [MOST_PLACEMENTS[self.layers] if mesh.tp > 1 else 1]
        draw = _Drawing(rng, self, candidate, budget)
        borrowing = {
            self.segments[number] for shared in self.shared for number, _ in shared.reading
        }
        classes = tuple(
            draw.block(index, counts[index], self.skips and counts[index] > 1, index in borrowing) for index in range(len(counts))
        )  # fmt: skip
        times = Counter(
            (self.segments[source], output, self.segments[number], place)
            for number, sources in enumerate(reads) for place, (source, output) in enumerate(sources) if source >= 0
        )  # fmt: skip
        edges = tuple(
            BoundaryEdge(*ends, count, self.conversions(rng, candidate))
            for ends, count in sorted(times.items())
        )
        setting = None
        if mesh.pp > 1:
            latency_s, each_s = self.hop
            setting = PipelineSetting(
                mesh.pp,
                candidate.stages_per_rank,
                candidate.schedule,
                each_s,
                latency_s,
                self.keeps_outputs,
            )
        last = len(classes) - 1
        return AnnotatedModel(
            classes,
            edges,
            ties_of(self.shared, self.segments),
            candidate.num_microbatches,
            self.fixed_s,
            self.fixed_bytes
            + (5 if candidate.zero == 3 else 0)
            + (3 * candidate.micro_batch if candidate.recompute == "selective" else 0),
            setting,
            last if self.last_frees else None,
            self.segments,
            reads,
            self.shared,
        )

    def _reads(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each segment, the (segment, output) pairs that it reads: the segment before and, for
        layers of some tasks, the first segment too. (-1, 0) is the model's input.
        """
        found: list[tuple[tuple[int, int], ...]] = [((-1, 0),)]
        for number in range(1, len(self.segments)):
            is_layer = self.segments.count(self.segments[number]) > 1
            found.append(
                ((number - 1, 0), (0, 0)) if self.skips and is_layer else ((number - 1, 0),)
            )
        return tuple(found)

    def conversions(
        self, rng: random.Random, candidate: Candidate
    ) -> dict[tuple[AxisLayout, AxisLayout], Conversion]:
        scale = 0.3 * candidate.micro_batch
        return {
            (a, b): Conversion(scale * rng.randint(0, 4), scale * rng.randint(0, 4))
            for a in self.palette for b in self.palette if a != b and rng.random() >= self.forbid
        }  # fmt: skip


def _candidates(rng: random.Random, layers: int) -> tuple[Candidate, ...]:
    """One to four candidates for a random number of devices (2, 4 or 8). If one has ZeRO over more
    than two ranks, another with ZeRO in pairs of ranks comes first.
    """
    devices, found = rng.choice([2, 4, 4, 8]), []
    meshes = [
        MeshShape(pp=pp, dp=devices // pp // tp, tp=tp)
        for pp in (1, 2, 3)
        for tp in (1, 2, 4)
        if devices % (pp * tp) == 0
    ]
    for mesh in meshes:
        for micro_batch in (1, 2, 4):
            number, rest = divmod(BATCH, mesh.dp * micro_batch)
            for zero in (0, 1, 3) if mesh.dp > 1 else (0,):
                recompute = rng.choice([MIXED] * 4 + list(MODES))
                schedules = _schedules(rng, mesh.pp, layers, number) if number and not rest else ()
                if rest or not number or (mesh.pp > 1 and not schedules):
                    continue
                name, count = schedules[0] if schedules else ("none", 1)
                found.append(
                    Candidate(mesh, micro_batch, number, zero, recompute, count, name, schedules)
                )
    some = rng.sample(found, min(len(found), rng.randint(1, 4)))
    return *[replace(one, shard=2) for one in some if one.zero and one.mesh.dp > 2][
        :1
    ], *some  # first those that hold more


def with_fixed_stages(task: Task) -> Task:
    """The task with random layers of each stage in the pipelines of all candidates, as if a
    framework cut them. All candidates of one mesh with as many stages a rank have the same cut.
    """
    found = list[Candidate]()
    for one in task.candidates:
        for count in dict.fromkeys(count for _, count in one.schedules):
            alike = tuple(pair for pair in one.schedules if pair[1] == count)
            rng = random.Random(f"{task.seed} {one.mesh} {count}")
            inner = rng.sample(range(1, task.layers), one.mesh.pp * count - 1)
            ends = [0, *sorted(inner), task.layers]
            sizes = tuple(b - a for a, b in pairwise(ends))
            name = alike[0][0]
            fixed = {"stages_per_rank": count, "schedule": name, "schedules": alike}
            found.append(replace(one, **fixed, stage_sizes=sizes))
        found += [] if one.schedules else [one]
    return Task(task.seed, tuple(found))


def _schedules(
    rng: random.Random, ranks: int, layers: int, micro_batches: int
) -> tuple[tuple[str, int], ...]:
    """(schedule, stages a rank) of the schedules that can run; at times only one of them, as if it
    were pinned. Empty without a pipeline.
    """
    found = []
    for name, count in (
        (("gpipe", 1), ("1f1b", 1), ("zero_bubble", 1), ("interleaved_1f1b", 2), ("zero_bubble", 2))
        if ranks > 1
        else ()
    ):
        try:
            check_schedule(name, ranks, count, micro_batches)
        except ValueError:
            continue
        if ranks * count <= layers:
            found.append((name, count))
    return tuple(found) if rng.random() < 0.6 or not found else (rng.choice(found),)


class _Drawing:
    """Draws the block classes of one candidate. Costs under every recompute mode follow from one
    set of draws, so that equal cells get equal ops. `budget[0]` is how many more combinations of
    strategies the model may have.
    """

    def __init__(
        self, rng: random.Random, task: Task, candidate: Candidate, budget: list[int]
    ) -> None:
        self.rng, self.task, self.at, self.budget = rng, task, candidate, budget

    def block(self, index: int, count: int, skips: bool, borrows: bool) -> AnnotatedBlock:
        rng, task, layer = self.rng, self.task, count > 1
        inputs = ("x", "aux") if skips else ("x",)
        second = rng.random() < 0.6
        ops = [self.entry(name) for name in inputs]
        parameter = self.parameter()
        ops.append(borrowed(parameter) if borrows else parameter)
        ops.append(self.op("f", (*inputs, "w"), "y"))
        if second:
            ops.append(self.op("g", rng.choice([("y",), ("y", "x")]), "z"))
        result = "z" if second else "y"
        ops.append(AnnotatedOp("out", "output", "", (result,), (), tuple(
            Strategy(f"s{n}", (layout,), ()) for n, layout in enumerate(self.layouts(2))
        )))  # fmt: skip
        values = {
            value: AnnotatedValue(value, 10, task.conversions(rng, self.at))
            for op in ops
            for value in op.outputs
        }
        sizes = {
            name: {layout: self.size(rng.randint(1, 12), layout) for layout in task.palette}
            for name in inputs
        }
        block = AnnotatedBlock(
            f"class{index}",
            count,
            tuple(ops),
            values,
            inputs,
            ("out",),
            False,
            sizes,
            rng.randint(0, 12) * self.at.micro_batch,
        )
        shares = {op.name: rng.choice([0.0, 0.25, 0.5]) for op in ops}
        pays = any(
            task.segments[payer] == index for shared in task.shared for payer, _ in shared.paying
        )
        return self._in_mode(block, shares | {"w": 0.0} if pays else shares) if layer else block

    def _in_mode(self, block: AnnotatedBlock, shares: dict[str, float]) -> AnnotatedBlock:
        """A layer under the candidate's recompute mode.

        `shares` has a fraction for each op. Under selective recomputation, it is the part of the op
        that runs again. Under full recomputation, it is the part of the seconds once a step that
        the longer backward hides.
        """
        mode = self.at.recompute
        if mode == "full":
            ops = tuple(
                replace(
                    op,
                    strategies=tuple(
                        replace(s.rerun(), step_s=s.step_s * (1 - shares[op.name]))
                        for s in op.strategies
                    ),
                )
                for op in block.ops
            )
            values = {
                name: replace(
                    value, conversions={pair: c.rerun() for pair, c in value.conversions.items()}
                )
                for name, value in block.values.items()
            }
            return replace(block, ops=ops, values=values, recompute=True)
        if mode == "selective":
            return replace(block, ops=tuple(_selective(op, shares[op.name]) for op in block.ops))
        return block

    def layouts(self, most: int) -> list[AxisLayout]:
        """Random layouts for the strategies of an op, `most` at most. The first is replicated, so
        that some placement can always run.
        """
        wanted = min(self.rng.choice(range(1, most + 1)), self.budget[0], len(self.task.palette))
        self.budget[0] //= wanted
        return [R, *self.rng.sample(self.task.palette[1:], wanted - 1)]

    def size(self, size_bytes: int, layout: AxisLayout) -> int:
        return max(
            size_bytes * self.at.micro_batch // (self.at.mesh.tp if layout.is_shard else 1), 1
        )

    def entry(self, name: str) -> AnnotatedOp:
        return AnnotatedOp(name, "input", "", (), (name,), tuple(
            Strategy(f"s{n}", (), (layout,)) for n, layout in enumerate(self.layouts(2))
        ))  # fmt: skip

    def parameter(self) -> AnnotatedOp:
        """A random parameter that is held whole or sharded. Under ZeRO its gradient and optimizer
        state shrink with the ranks that share them. Under ZeRO-3 each pass also pays a gather.
        """
        size, step_s, gather_s = (
            self.rng.randint(1, 12),
            self.rng.choice([0.0, 0.5, 2.0]),
            self.rng.choice([0.0, 0.2]),
        )
        zero, ranks, found = self.at.zero, self.at.shard or self.at.mesh.dp, []
        for n, layout in enumerate(self.layouts(2)):
            held = max(size // (self.at.mesh.tp if layout.is_shard else 1), 1)
            optimizer = 3 * held // (ranks if zero >= 1 else 1)
            gradient = held // (ranks if zero >= 2 else 1)
            static = held // (ranks if zero == 3 else 1) + gradient + optimizer
            again_s = (gather_s / 2 if self.at.shard else gather_s) if zero == 3 else 0.0
            found.append(Strategy(
                f"s{n}", (), (layout,), again_s, again_s, step_s / (ranks if zero else 1), static,
                gradient_bytes=gradient, optimizer_bytes=optimizer,
            ))  # fmt: skip
        return AnnotatedOp("w", "parameter", "", (), ("w",), tuple(found))

    def op(self, name: str, reads: tuple[str, ...], writes: str) -> AnnotatedOp:
        """A random op that reads the values `reads` and writes `writes`. It has one to three
        strategies, of which some are faster and some keep less. A value that several ops keep is
        kept once.
        """
        rng, at = self.rng, self.at
        seconds, kept = rng.randint(1, 6) * at.micro_batch, rng.randint(5, 40)
        wanted = min(rng.choice([1, 2, 3, 3]), self.budget[0])
        self.budget[0] //= wanted
        found = []
        for n in range(wanted):
            layouts = (
                [R] * (len(reads) + 1)
                if n == 0
                else [rng.choice(self.task.palette) for _ in range(len(reads) + 1)]
            )
            split = any(layout.is_shard for layout in layouts)
            forward_s = seconds / (at.mesh.tp if split else 1) * rng.choice([0.7, 1.0, 1.0, 1.3])
            backward_s = 2 * forward_s * rng.choice([0.8, 1.0, 1.2])
            size = self.size(int(kept * rng.choice([0.3, 0.6, 1.0, 1.5])), S(0) if split else R)
            key = rng.choice([writes, f"{reads[0]}", f"{name}:own"])
            saved = (Saved(key, size), Saved(f"{writes}/n{n}", rng.randint(0, 6) * at.micro_batch))
            weight_s = backward_s * rng.choice([0.0, 0.4, 0.5])
            found.append(Strategy(
                f"s{n}", tuple(layouts[:-1]), (layouts[-1],), forward_s, backward_s, saved=saved, backward_weight_s=weight_s,
                late=(*saved, Saved(f"{writes}:gradient", size)) if "w" in reads else (),
            ))  # fmt: skip
        return AnnotatedOp(name, "op", "aten.some", reads, (writes,), tuple(found))


def _selective(op: AnnotatedOp, share: float) -> AnnotatedOp:
    """The op under selective recomputation: it keeps a part of its bytes, and runs a part of its
    forward again.
    """
    if op.kind != "op" or not share:
        return op
    found = []
    for s in op.strategies:
        again_s = share * s.forward_s
        saved = tuple(Saved(one.key, int(one.size_bytes * (1 - share))) for one in s.saved)
        found.append(replace(s, backward_s=s.backward_s + again_s, rerun_s=again_s, saved=saved))
    return replace(op, strategies=tuple(found))
