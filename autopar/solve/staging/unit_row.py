"""The blocks of a placement as a row of units, and the least recomputation with which a run of them fits.

A *unit* is a block and what stands between it and the next; what comes before the first block is of the first unit.  Blocks of one *kind*
cost the same in every recompute mode, so that a run of units is told by how many blocks of each kind it has, and what it costs to recompute
some of them by how many run in which mode, never by which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import fsum, inf, prod
from operator import sub
from types import SimpleNamespace

import numpy as np

from autopar.ir.annotated import AnnotatedModel
from autopar.solve.costs.pipeline_cost import blocks_of, freed_bytes, messages_bytes, segment_costs
from autopar.solve.costs.placement_cost import Choices, SegmentCost
from autopar.solve.costs.recompute_mix import Models
from autopar.solve.staging.recompute_options import (
    _FEW,
    AlikeWays,
    Kind,
    Options,
    Ways,
    _amounts,
    _joined,
    _modes_of_alike,
    _splits,
    _undominated,
    _ways,
)


@dataclass(frozen=True, slots=True)
class Line:
    """A run takes no less than its units add up to in `least_s` (sums before each unit), less `kept_s` for each byte that it keeps for a
    micro-batch and `static_s` for each that is static: seconds of a micro-batch, and its share of those once a step.  `late`: of what
    it keeps so much is counted as what it holds while it waits for gradients of parameters; `late_by_ends`: of what segments beside
    blocks keep."""

    kept_s: float
    static_s: float
    late: float
    late_by_ends: float
    least_s: list[float]


@dataclass(frozen=True, slots=True)
class Tie:
    """A shared parameter.  A rank that reads it without a segment that pays for it has `static_bytes` for it, and `step_s` once a step;
    `paid` and `read` count segments that pay for it and others that read it (sums before each unit)."""

    static_bytes: int
    step_s: float
    paid: Sequence[int]
    read: Sequence[int]


_ROUNDING = 1e-9
"""Slack of a number of micro-batches."""


class Row:
    """The units of a model under one placement.

    `forward_s`, `backward_s`, `weight_s`, `step_s` (in the mode where it is least: a longer backward hides more of it), `static` and `kept`
    (bytes) are sums over the units before each, in the first mode: units i..j cost `x[j] - x[i]`.  `arriving` are bytes of the message into
    a stage that begins with a unit.  `freed` is what the last segment keeps, if that is gone before backward reaches others,
    `freed_parted` what of it is where backward has two parts, and `last_transient` what it needs for a moment itself; `beside` counts
    segments beside blocks, and `late` is what these hold more between two parts.  `is_bound`: units have what no placement of many goes
    below; `lines` bound what runs of these take (`family_bounds.py`).
    """

    is_bound: bool = False
    ties: Sequence[Tie] = ()
    lines: Sequence[Line] = ()
    most_freed: int = 0

    def __init__(self, models: Models, choices: Choices) -> None:
        base = next(iter(models.values()))
        costs = [segment_costs(model, choices) for model in models.values()]
        self._describe(models, costs, messages_bytes(base, choices))
        payers = []
        for (number, name), *_ in (shared.paying for shared in base.shared):
            c = base.segments[number]
            payers.append(
                [
                    {op.name: op for op in model.classes[c].ops}[name].strategy(choices[c][name])
                    for model in models.values()
                ]
            )
        self._tie(
            [(of[0].static_bytes, min(payer.step_s for payer in of)) for of in payers]
        )  # in whichever mode the one runs that pays

    @staticmethod
    def of_costs(
        models: Models, costs: Sequence[Sequence[SegmentCost]], arriving: Sequence[int] | None = None,
        ties: Sequence[tuple[int, float]] = (), freed: int | None = None, work_s: Sequence[Sequence[float]] | None = None,
        lines: Sequence[tuple[float, float, float, float, Sequence[Sequence[float]]]] = (), most_freed: int = 0,
    ) -> Row:  # fmt: skip
        """Units of which each segment costs `costs[mode][segment]`, without messages and ties (bytes and seconds once a step of each of
        the model) if they are not given; `freed` if it is not what the last one keeps, `work_s[mode][segment]` if forward and backward take
        more together than the least of each.  `lines`: (seconds for a byte kept, for one that is static, parts that wait, the least by mode
        and segment), of placements whose last segment keeps `most_freed` at most."""
        row = Row.__new__(Row)
        row._describe(
            models,
            costs,
            arriving or [0] * len(costs[0]),
            freed,
            work_s,
            [by_mode for *_, by_mode in lines],
        )
        if freed is not None:
            row.freed_parted = row.freed
        row.is_bound, row.most_freed = True, max(most_freed, row.freed)
        if ties:
            row._tie(ties)
        row.lines = [
            Line(*price, row._sums(np.min(by_mode, axis=0)).tolist()) for *price, by_mode in lines
        ]
        return row

    def _describe(
        self, models: Models, costs: Sequence[Sequence[SegmentCost]], arriving: Sequence[int], freed: int | None = None,
        work_s: Sequence[Sequence[float]] | None = None, lines: Sequence[Sequence[Sequence[float]]] = (),
    ) -> None:  # fmt: skip
        base: AnnotatedModel = next(iter(models.values()))
        self.modes, self.model = tuple(models), base
        self.micro_batches, segments, own = base.num_microbatches, len(base.segments), costs[0]
        self.blocks = blocks_of(base)
        self.alike = len({base.segments[number] for number in self.blocks}) == 1
        self.firsts, ends = [0, *self.blocks[1:]], [*self.blocks[1:], segments]
        self.units = len(self.firsts)
        self.parts: list[np.ndarray] = []
        last = segments - 1 if base.last is not None and base.segments[-1] == base.last else -1
        self.freed = 0 if last < 0 else own[last].kept_bytes if freed is None else freed
        self.freed_parted = 0 if last < 0 else min(freed_bytes(own[last], True), self.freed)
        self.last_transient = 0 if last < 0 else own[last].transient_bytes
        again = [
            model.fixed_bytes - base.fixed_bytes for model in models.values()
        ]  # buffers of what a mode makes again
        work_s = work_s or [[cost.forward_s + cost.backward_s for cost in of] for of in costs]
        kinds: dict[Kind, int] = {}
        known: dict[tuple, int] = {}  # most blocks are the same ones
        self.kind, self.transient = [], []
        values = np.array([of for by_mode in (work_s, *lines) for of in by_mode]).T.copy()
        sort_of = [(*(id(c[s]) for c in costs), values[s].tobytes()) for s in range(segments)]
        for first, end, block in zip(self.firsts, ends, self.blocks, strict=True):
            key = block == last, sort_of[block]
            if key not in known:
                modes = [(c if block != last else own)[block] for c in costs]
                priced = [[of[block] for of in by_mode] for by_mode in (work_s, *lines)]
                joint_s, *of_lines = (
                    _above_least(of) if block != last else (0.0,) * len(modes) for of in priced
                )
                kind = Kind(
                    tuple(max(c.backward_s - own[block].backward_s, 0.0) for c in modes),
                    joint_s,
                    _above_least([c.step_s for c in modes]),
                    tuple(of_lines),
                    tuple(c.kept_bytes - own[block].kept_bytes for c in modes),
                    tuple(
                        (c.transient_bytes + more) * (block != last)
                        for c, more in zip(modes, again, strict=True)
                    ),
                    tuple(
                        (c.parted_transient_bytes + more) * (block != last)
                        for c, more in zip(modes, again, strict=True)
                    ),
                    tuple(max(c.late_bytes, 0) for c in modes),
                )
                known[key] = kinds.setdefault(kind, len(kinds))
            self.kind.append(known[key])
            beside = (
                (own[s].transient_bytes for s in range(first, end) if s not in (block, last))
                if end - first > 1
                else ()
            )
            self.transient.append(max(beside, default=0))
        self.kinds = list(kinds)
        self.arriving = [arriving[first] for first in self.firsts]
        number_of: dict[tuple, int] = {}  # most segments are the same ones
        numbers = np.array([number_of.setdefault(sort, len(number_of)) for sort in sort_of])
        one_of = [sort_of.index(sort) for sort in number_of]

        def sums(part: str, of: Sequence[Sequence[SegmentCost]] = costs[:1]) -> np.ndarray:
            return self._sums(
                np.array([min(getattr(c[s], part) for c in of) for s in one_of])[numbers]
            )

        self.forward_s, self.backward_s, self.weight_s = (
            sums("forward_s"),
            sums("backward_s"),
            sums("weight_s"),
        )
        self.step_s, self.static, self.kept = (
            sums("step_s", costs),
            sums("static_bytes"),
            sums("kept_bytes"),
        )
        is_beside = np.ones(segments, dtype=int)
        is_beside[self.blocks] = 0
        self.late = self._sums(
            np.array([max(own[s].late_bytes, 0) for s in one_of])[numbers] * is_beside
        )
        self.beside = self._sums(is_beside)
        self.least_kept, self.work_s = sums("kept_bytes", costs), self._sums(np.min(work_s, axis=0))
        self.counts = np.array(
            [[0] * len(kinds), *np.cumsum(np.eye(len(kinds), dtype=int)[self.kind], axis=0)]
        )
        # what was asked before; a `cache` of a method would make a cycle, which keeps many large rows until garbage is collected
        self.known_least: dict[tuple, tuple[float, np.ndarray, float] | None] = {}
        self.known_options: dict[tuple, Options] = {}
        self.known_ways: dict[tuple, AlikeWays] = {}
        self.known_stages: dict[tuple, object] = {}  # `interleaved.py`

    def _tie(self, costs: Sequence[tuple[int, float]]) -> None:
        """Bytes and seconds once a step of each shared parameter of the model; those of the same segments are one tie."""
        together: dict[tuple, list[tuple[int, float]]] = {}
        for cost, shared in zip(costs, self.model.shared, strict=True):
            holders = (
                tuple(sorted({number for number, _ in of}))
                for of in (shared.paying, shared.reading)
            )
            together.setdefault(tuple(holders), []).append(cost)

        def before(numbers: Sequence[int]) -> list[int]:
            return [
                0,
                *np.cumsum(
                    np.add.reduceat(
                        np.isin(np.arange(len(self.model.segments)), numbers).astype(int),
                        self.firsts,
                    )
                ).tolist(),
            ]

        self.ties = [
            Tie(sum(size for size, _ in of), fsum(step_s for _, step_s in of), before(paying), before(reading))
            for (paying, reading), of in together.items()
        ]  # fmt: skip

    def __len__(self) -> int:
        return self.units

    def _sums(self, of_segments: np.ndarray) -> np.ndarray:
        """Of the units before each: the sum of what each segment has.  What each unit has tells those that differ (`_sorts`)."""
        self.parts.append(np.add.reduceat(of_segments, self.firsts))
        return np.concatenate([[0], np.cumsum(self.parts[-1])])

    @cached_property
    def sorts(self) -> list[int]:
        """Of each unit the number of its sort: those of one sort are alike in all that they cost."""
        sorts: dict[tuple, int] = {}
        units = zip(self.kind, self.transient, *(part.tolist() for part in self.parts), strict=True)
        return [sorts.setdefault(unit, len(sorts)) for unit in units]

    @cached_property
    def _sorts(self) -> list[list[int]]:
        """Of the units before each: how many there are of each sort."""
        count = max(self.sorts) + 1
        return [[0] * count, *np.cumsum(np.eye(count, dtype=int)[self.sorts], axis=0).tolist()]

    @cached_property
    def hop_s(self) -> float:
        """Seconds of the shortest message between stages."""
        setting = self.model.pipeline
        if setting is None:
            return 0.0
        each = [
            setting.hop_latency_s + size * setting.hop_s_per_byte if size else 0.0
            for size in self.arriving[1:]
        ]
        return min(each, default=0.0)

    @cached_property
    def at(self) -> SimpleNamespace:
        """The sums as lists, of which one number is read far quicker than of an array."""
        parts = (
            "forward_s",
            "backward_s",
            "weight_s",
            "work_s",
            "step_s",
            "static",
            "kept",
            "late",
            "beside",
            "least_kept",
            "counts",
        )
        return SimpleNamespace(**{part: getattr(self, part).tolist() for part in parts})

    def total_s(self, first: int, end: int) -> float:
        """Seconds of forward and backward of a run at least, a micro-batch."""
        return self.at.work_s[end] - self.at.work_s[first]

    def once_s(self, runs: Sequence[tuple[int, int]]) -> float:
        """Seconds once a step of a rank with these runs."""
        own_s = sum(self.at.step_s[end] - self.at.step_s[first] for first, end in runs)
        return own_s + sum(tie.step_s for tie in self.ties_of(runs))

    def memory(self, runs: Sequence[tuple[int, int]]) -> int:
        """Bytes of a rank with these runs besides what blocks keep and need for a moment: static, and what nothing changes."""
        own = sum(self.at.static[end] - self.at.static[first] for first, end in runs)
        return own + sum(tie.static_bytes for tie in self.ties_of(runs)) + self.model.fixed_bytes

    def ties_of(self, runs: Sequence[tuple[int, int]]) -> list[Tie]:
        """The tied parameters that a rank with these runs reads without what pays for them (`pipeline.borrowed`)."""
        if not self.ties:
            return []
        firsts, ends = (list(of) for of in zip(*runs, strict=True))
        paid, read = (before[:, ends] > before[:, firsts] for before in self._ties_before)
        return [
            self.ties[number] for number in np.flatnonzero(read.any(axis=1) & ~paid.any(axis=1))
        ]

    @cached_property
    def _ties_before(self) -> tuple[np.ndarray, np.ndarray]:
        """By tie and the units before each: how many segments pay for it, and how many others read it."""
        return np.array([tie.paid for tie in self.ties]), np.array([tie.read for tie in self.ties])

    def sent(self, end: int) -> int:
        """Bytes of what a stage has sent that stay until its backward."""
        keeps = self.model.pipeline is not None and self.model.pipeline.keeps_outputs
        return self.arriving[end] if keeps and end < self.units else 0

    def passing(self, runs: Sequence[tuple[int, int]]) -> int:
        """Bytes of messages on their way to and from a rank with these stages, beside those that its micro-batches keep."""
        if len(runs) == 1:
            return 0
        return 2 * max(max(self.sent(first) if first else 0, self.sent(end)) for first, end in runs)

    def moment(
        self, first: int, end: int, transient: np.ndarray, late: np.ndarray, parted: bool
    ) -> np.ndarray:
        """Bytes of the fullest moment of backward, in two parts or in one, of a run whose blocks need `transient` and that holds `late`
        more in the end."""
        ends = end == self.units
        freed, last = (
            (self.freed_parted if parted else self.freed) * ends,
            self.last_transient * ends,
        )
        return np.maximum(
            np.maximum(transient, max(self.transient[first:end])) - freed,
            np.maximum(last - late, 0),
        )

    def with_more_s(
        self, runs: Sequence[tuple[int, int]], more_s: np.ndarray, work_s: np.ndarray
    ) -> np.ndarray:
        """Seconds of a micro-batch of the runs of a rank, with its share of those once a step, at least, if backward takes so many more
        than the least, and forward and backward together: least forward and least backward may be of two placements."""
        parts_s = sum(
            of[end] - of[first]
            for first, end in runs
            for of in (self.at.forward_s, self.at.backward_s)
        )
        once_s = self.once_s(runs) / self.micro_batches
        return (
            np.maximum(
                parts_s + more_s, sum(self.total_s(first, end) for first, end in runs) + work_s
            )
            + once_s
        )

    def least(
        self, first: int, end: int, held: int, capacity_bytes: float, late: int = 0
    ) -> tuple[float, np.ndarray, float] | None:
        """(seconds that backward takes more, amounts) of the fastest way to run a stage's units that fits, and what each that fits takes at
        least with its share of seconds once a step; None if none does.  `held` and `late` micro-batches are held, and wait for gradients of
        parameters; if none does, backward is in one part."""
        own = end == self.units, self.sent(end), *map(id, self.ties_of([(first, end)]))
        key = *map(sub, self._sorts[end], self._sorts[first]), *own, held, capacity_bytes, late
        if key not in self.known_least:
            self.known_least[key] = self._least(first, end, held, capacity_bytes, late)
        return self.known_least[key]

    def ways(self, first: int, end: int, held: int, capacity_bytes: float, late: int = 0) -> Ways:
        """Ways to run a stage's units that fit (`least`), fastest first, of which each that is slower takes less once a step."""
        options, fits = self._fitting(first, end, held, capacity_bytes, late)
        once_s = (options.amounts[fits] * np.array([kind.step_s for kind in self.kinds])).sum(
            axis=(1, 2)
        )
        front = np.flatnonzero(once_s < np.minimum.accumulate(np.concatenate([[inf], once_s[:-1]])))
        count = prod(
            _ways(count, len(self.modes))
            for count in np.subtract(self.at.counts[end], self.at.counts[first]).tolist()
            if count
        )
        return Ways(
            options.more_s[fits][front], once_s[front], options.amounts[fits][front], count <= _FEW
        )

    def _least(
        self, first: int, end: int, held: int, capacity_bytes: float, late: int
    ) -> tuple[float, np.ndarray, float] | None:
        options, fits = self._fitting(first, end, held, capacity_bytes, late)
        if not len(fits):
            return None
        least_s = 0.0
        if self.lines:  # without, a placement's own times say nearly as much
            each_s = self.with_more_s([(first, end)], options.least_s[fits], options.work_s[fits])
            of_lines = self.lines_s(first, end, held, capacity_bytes, late) + options.lines[fits]
            least_s = float(np.maximum(each_s, of_lines.max(axis=1)).min())
        return float(options.more_s[fits[0]]), options.amounts[fits[0]], least_s

    def _fitting(
        self, first: int, end: int, held: int, capacity_bytes: float, late: int
    ) -> tuple[Options, np.ndarray]:
        """The options of a stage's units, and the numbers of those that fit."""
        at = self.at
        counts = tuple(
            after - before for after, before in zip(at.counts[end], at.counts[first], strict=True)
        )
        room = (
            capacity_bytes
            - self.memory([(first, end)])
            - held * (at.kept[end] - at.kept[first] + self.sent(end))
        )
        room += max(late - 1, 0) * self.freed_parted * (end == self.units)
        options = self.options(counts, late > 0)
        waiting = options.late + (late > 0) * (at.late[end] - at.late[first])
        moment = self.moment(first, end, options.moment, waiting, late > 0)
        return options, np.flatnonzero(held * options.more_kept + late * waiting + moment <= room)

    def lines_s(
        self, first: int, end: int, held: float, capacity_bytes: float, late: int = 0
    ) -> np.ndarray:
        """By line: seconds of a micro-batch, with its share of those once a step, that a rank with this run takes at least, if it holds
        `held` times what that keeps in `capacity_bytes`, `late` of them while they wait for gradients of parameters.  Each block runs in
        the mode where its line is least.  (`interleaved.py` has the same for several runs.)

        What it keeps (K) and what is static (S) are held K + S <= room, so that what they are worth is bounded by the larger of both
        prices, less what of the other there is at least.  One that waits has its backward's moment, all of it, in what it holds or besides;
        the others hold L instead of K, so that held ((1 - part) K + part L) + S <= room for any part up to (late - 1) / held.  What the
        last segment holds less they have given back: `most_freed` at most for each that is counted as if it kept all.
        """
        at, ends = self.at, end == len(self)
        static, kept = at.static[end] - at.static[first], at.least_kept[end] - at.least_kept[first]
        moment = int(self.least_moments[first:end].max())
        moment = max(
            moment - self.most_freed * ends, self.last_transient * ends
        )  # one of them counts all that the last segment keeps
        ties = self.ties_of([(first, end)])
        fixed = sum(tie.static_bytes for tie in ties) + self.model.fixed_bytes
        room, found = (
            capacity_bytes - fixed - held * self.sent(end) - moment,
            np.full(len(self.lines), -inf),
        )
        ties_s = sum(tie.step_s for tie in ties) / self.micro_batches
        beside = at.beside[end] > at.beside[first]
        for number, line in enumerate(self.lines if held else ()):
            if max(line.late, line.late_by_ends * beside) * held > max(late - 1, 0) + _ROUNDING:
                continue
            least_s, price = line.least_s[end] - line.least_s[first], line.kept_s / held
            if price > 0 or line.static_s > 0:
                own_room = (
                    room + max(late - 1 - line.late_by_ends * held, 0.0) * self.most_freed * ends
                )
                least_s -= max(price, line.static_s) * own_room
                least_kept = held * kept * (1 - max(line.late, line.late_by_ends))
                least_s += (
                    max(price - line.static_s, 0.0) * static
                    + max(line.static_s - price, 0.0) * least_kept
                )
            found[number] = least_s + ties_s
        return found

    def alike_ways(self, first: int, end: int, longest: int) -> AlikeWays:
        """Ways to run a stage of these units; the longest of its rank has `longest`."""
        key = tuple(self.kind[first:end]), longest
        if key not in self.known_ways:
            self.known_ways[key] = self._all_alike_ways(*key)
        return self.known_ways[key]

    def _all_alike_ways(self, kinds: tuple[int, ...], longest: int) -> AlikeWays:
        modes = _modes_of_alike(longest, len(self.modes))[:, : len(kinds)]

        def each(part: str) -> np.ndarray:
            """Of each unit in its mode."""
            return np.array([getattr(self.kinds[kind], part) for kind in kinds])[
                np.arange(len(kinds)), modes
            ]

        more_s, work_s, step_s, more_kept, late = (
            each(part).sum(axis=1) for part in ("more_s", "work_s", "step_s", "more_kept", "late")
        )
        lines = np.array([self.kinds[kind].lines for kind in kinds]).reshape(
            len(kinds), -1, len(self.modes)
        )
        lines = lines.swapaxes(1, 2)[np.arange(len(kinds)), modes].sum(axis=1)
        return AlikeWays(
            more_s,
            work_s,
            lines,
            step_s,
            more_kept,
            each("transient").max(axis=1),
            each("parted").max(axis=1),
            late,
            modes,
        )

    def options(self, counts: tuple[int, ...], parted: bool) -> Options:
        """The ways to run so many blocks of each kind, whose backward is in two parts or in one."""
        if (counts, parted) not in self.known_options:
            self.known_options[counts, parted] = self._options(counts, parted)
        return self.known_options[counts, parted]

    def _options(self, counts: tuple[int, ...], parted: bool) -> Options:
        modes = len(self.modes)
        present = [kind for kind, count in enumerate(counts) if count]
        if prod(_ways(counts[kind], modes) for kind in present) <= _FEW:
            return self._all_options(_amounts(counts, modes), parted)
        none, zero, no_lines = (
            np.zeros(1, dtype=int),
            np.zeros(1),
            len(self.kinds[0].lines),
        )  # by which ways are not sifted
        found = Options(
            zero,
            zero,
            zero,
            np.zeros((1, no_lines)),
            none,
            none,
            none,
            np.zeros((1, 0, modes), dtype=int),
        )
        for kind, count in zip(self.kinds, counts, strict=True):
            amounts = np.array(list(_splits(int(count), modes)))
            moment = np.where(
                amounts > 0, np.array(kind.parted if parted else kind.transient), 0
            ).max(axis=1)
            more_s = amounts @ np.array(kind.more_s)
            least_s = more_s + amounts @ np.array(kind.step_s) / self.micro_batches
            kept, late = amounts @ np.array(kind.more_kept), amounts @ np.array(kind.late) * parted
            unknown = np.zeros(len(amounts)), np.zeros((len(amounts), no_lines))
            more = Options(more_s, least_s, *unknown, kept, moment, late, amounts[:, None, :])
            found = _undominated(_joined(found, _undominated(more)))
        return found

    def _all_options(self, amounts: np.ndarray, parted: bool) -> Options:
        """Every way, fastest first."""
        by_kind = amounts.reshape(len(amounts), -1)
        took_s, joint_s, once_s, kept, late, *lines = (
            by_kind @ self._of_kinds
        ).T  # whole numbers of bytes stay whole
        needed = np.array([kind.parted if parted else kind.transient for kind in self.kinds])
        moment = np.where(amounts > 0, needed, 0).max(axis=(1, 2))
        order = np.lexsort((moment, kept, took_s))
        each_s = once_s / self.micro_batches
        of_lines, waits = np.array(lines).reshape(-1, len(amounts)).T, late.astype(int) * parted
        found = (
            took_s,
            took_s + each_s,
            joint_s + each_s,
            of_lines,
            kept.astype(int),
            moment,
            waits,
            amounts,
        )
        return Options(*(part[order] for part in found))

    @cached_property
    def least_moments(self) -> np.ndarray:
        """By unit: bytes that backward needs for a moment at least, in one part."""
        return np.array(
            [
                max(min(self.kinds[kind].transient), beside)
                for kind, beside in zip(self.kind, self.transient, strict=True)
            ]
        )

    @cached_property
    def lines_least_s(self) -> np.ndarray:
        """What lines add up to, by line and the units before each."""
        return np.array([line.least_s for line in self.lines])

    @cached_property
    def _of_kinds(self) -> np.ndarray:
        """What one block of a kind in a mode (row) takes and keeps more, and costs by each line."""
        parts = [
            [getattr(kind, part) for kind in self.kinds]
            for part in ("more_s", "work_s", "step_s", "more_kept", "late")
        ]
        parts += list(map(list, zip(*(kind.lines for kind in self.kinds), strict=True)))
        return np.array(parts, dtype=float).reshape(len(parts), -1).T.copy()


def in_first(costs: Sequence[Sequence[SegmentCost]], modes: int) -> list[list[SegmentCost]]:
    """Of what segments cost at least, `costs[mode][segment]`, what they do in the first so many modes; once a step in whichever mode, since
    they may recompute to hide it."""
    if modes == len(costs):
        return list(map(list, costs))
    once_s = np.min([[cost.step_s for cost in of] for of in costs], axis=0).tolist()
    return [
        [replace(cost, step_s=step_s) for cost, step_s in zip(of, once_s, strict=True)]
        for of in costs[:modes]
    ]


def _above_least(by_mode: Sequence[float]) -> tuple[float, ...]:
    least = min(by_mode)
    return tuple(seconds - least for seconds in by_mode)
