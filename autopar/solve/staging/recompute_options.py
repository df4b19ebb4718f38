"""Ways to recompute in a stage: how many blocks of each kind run in each mode, and the costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache
from itertools import product
from math import comb, prod

import numpy as np

from autopar.ir.stop import check_time
from autopar.solve.costs.pareto import undominated


@dataclass(frozen=True, slots=True)
class BlockKind:
    """Costs of one block of a kind; blocks of one kind cost the same. Each field has one entry for
    each recompute mode; the first mode keeps most.

    Attributes:
        more_s: seconds of backward above the first mode.
        work_s: seconds of forward and backward together, above the mode in which they are least.
        step_s: seconds once a step, above the mode in which they are least.
        lines: for each line (a lower bound with prices for bytes), the same of its cost.
        more_kept: bytes kept by forward, above the first mode.
        transient: peak bytes of a whole backward.
        parted: peak bytes of a split backward.
        late: extra bytes that micro-batches hold while they wait for gradients of parameters.
    """

    more_s: tuple[float, ...]
    work_s: tuple[float, ...]
    step_s: tuple[float, ...]
    lines: tuple[tuple[float, ...], ...]
    more_kept: tuple[int, ...]
    transient: tuple[int, ...]
    parted: tuple[int, ...]
    late: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlockOptions:
    """Ways to run some blocks, in bytes and in seconds: arrays by option, fastest first. An option
    says how many blocks of each kind run in each recompute mode: `amounts`, indexed [option, kind,
    mode].

    `more_s` is extra seconds of backward; `least_s` adds the share of a micro-batch in seconds once
    a step. `work_s` is forward and backward together above their minimum, with the same share.
    `lines` is indexed [option, line]. `moment` is the peak bytes of a backward, whole or split. If
    split, `late` is what waits between the parts, otherwise 0.
    """

    more_s: np.ndarray
    least_s: np.ndarray
    work_s: np.ndarray
    lines: np.ndarray
    more_kept: np.ndarray
    moment: np.ndarray
    late: np.ndarray
    amounts: np.ndarray


@dataclass(frozen=True, slots=True)
class Ways:
    """Ways to run a stage: extra seconds of backward (`more_s`), seconds once a step above the
    minimum (`step_s`), and `amounts` as in `BlockOptions`; arrays by way. `is_complete`: no other way
    that fits has less of both seconds.
    """

    more_s: np.ndarray
    step_s: np.ndarray
    amounts: np.ndarray
    is_complete: bool


@dataclass(frozen=True, slots=True)
class AlikeWays:
    """Ways to run a stage whose rank runs the same number of blocks in each recompute mode in all
    its stages. Arrays by way, least recomputation first; the meaning of fields is that of `BlockKind`,
    summed (peaks: maximum) over the blocks. `lines` is indexed [way, line], `modes` [way, unit].
    The first blocks recompute most.
    """

    more_s: np.ndarray
    work_s: np.ndarray
    lines: np.ndarray
    step_s: np.ndarray
    more_kept: np.ndarray
    transient: np.ndarray
    parted: np.ndarray
    late: np.ndarray
    modes: np.ndarray


@dataclass(frozen=True, slots=True)
class RankWays:
    """The ways to recompute on a rank with several stages. Arrays by way, except `of_stages` (the
    ways of each stage), `fixed_bytes` (what no way changes), and `kept`, `late` and `moments`,
    which are bytes by [stage, way].

    `of_stages_s` is the extra seconds of backward by [way, stage], `more_s` their sum. `each_s` is
    seconds of a micro-batch, with its share of seconds once a step.
    """

    of_stages: tuple[AlikeWays, ...]
    of_stages_s: np.ndarray
    more_s: np.ndarray
    step_s: np.ndarray
    each_s: np.ndarray
    lines: np.ndarray
    kept: np.ndarray
    late: np.ndarray
    moments: np.ndarray
    fixed_bytes: int


_FEW = 20_000
"""Up to this many ways to run some blocks, all are considered without filtering."""


@dataclass
class RecomputeOptions:
    """The ways in which blocks of the given kinds may run in `modes` recompute modes. Results are
    cached in fields, since a cached method would form a reference cycle that keeps many large rows
    alive.
    """

    kinds: Sequence[BlockKind]
    modes: int
    micro_batches: int
    known_options: dict[tuple[tuple[int, ...], bool], BlockOptions] = field(default_factory=dict)
    known_ways: dict[tuple[tuple[int, ...], int], AlikeWays] = field(default_factory=dict)
    # by kind and whether backward is split: the Pareto-optimal options of 0, 1, ... blocks
    known_of_kind: dict[tuple[int, bool], list[BlockOptions]] = field(default_factory=dict)

    def options(self, counts: tuple[int, ...], parted: bool) -> BlockOptions:
        """The ways (`BlockOptions`) to run `counts[kind]` blocks of each kind, with a split (`parted`)
        or a whole backward, fastest first. All ways if they are few (`are_few`), otherwise the
        Pareto-optimal ones. Cached.
        """
        if (counts, parted) not in self.known_options:
            self.known_options[counts, parted] = (
                self._all_options(_amounts(counts, self.modes), parted)
                if self.are_few(counts)
                else self._sifted_options(counts, parted)
            )
        return self.known_options[counts, parted]

    def are_few(self, counts: Sequence[int]) -> bool:
        """Whether there are at most `_FEW` ways to run `counts[kind]` blocks of each kind."""
        modes = self.modes
        return prod(comb(count + modes - 1, modes - 1) for count in counts if count) <= _FEW

    def _sifted_options(self, counts: tuple[int, ...], parted: bool) -> BlockOptions:
        """The ways to run `counts[kind]` blocks of each kind, built kind by kind; dominated ones
        are dropped at each step. `work_s` and `lines` are 0, since they are not known.
        """
        found, *others = (
            self._of_kind(kind, int(count), parted) for kind, count in enumerate(counts)
        )
        for other in others:
            found = _sifted(_joined(found, other))
        return found

    def _of_kind(self, number: int, count: int, parted: bool) -> BlockOptions:
        """The Pareto-optimal ways to run `count` blocks of the kind with index `number`, as for
        `_sifted_options`. Those of one block more are among those with one more block each, so
        that few ways are compared where blocks are many. Cached.
        """
        known = self.known_of_kind.setdefault((number, parted), [])
        if not known:
            known.append(self._priced(number, np.zeros((1, self.modes), dtype=int), parted))
        one_more = np.eye(self.modes, dtype=int)
        while len(known) <= count:
            check_time()
            amounts = (known[-1].amounts + one_more).reshape(-1, self.modes)
            codes = amounts[:, ::-1] @ (len(known) + 1) ** np.arange(self.modes)
            _, distinct = np.unique(-codes, return_index=True)  # most in the first mode first
            known.append(_sifted(self._priced(number, amounts[distinct], parted)))
        return known[count]

    def _priced(self, number: int, amounts: np.ndarray, parted: bool) -> BlockOptions:
        """The ways with these `amounts` ([way, mode] numbers of blocks) of the kind with index
        `number`, in their order. `work_s` and `lines` are 0, since they are not known.
        """
        kind = self.kinds[number]
        needed = np.array(kind.parted if parted else kind.transient)
        more_s = amounts @ np.array(kind.more_s)
        return BlockOptions(
            more_s=more_s,
            least_s=more_s + amounts @ np.array(kind.step_s) / self.micro_batches,
            work_s=np.zeros(len(amounts)),
            lines=np.zeros((len(amounts), len(kind.lines))),
            more_kept=amounts @ np.array(kind.more_kept),
            moment=np.where(amounts > 0, needed, 0).max(axis=1),
            late=amounts @ np.array(kind.late) * parted,
            amounts=amounts[:, None, :],
        )

    def _all_options(self, amounts: np.ndarray, parted: bool) -> BlockOptions:
        """The ways with these `amounts` ([way, kind, mode] numbers of blocks), fastest first."""
        by_kind = amounts.reshape(len(amounts), -1)
        took_s, joint_s, once_s, kept, late, *lines = (
            by_kind @ self._of_kinds
        ).T  # whole numbers of bytes stay whole
        needed = np.array([kind.parted if parted else kind.transient for kind in self.kinds])
        moment = np.where(amounts > 0, needed, 0).max(axis=(1, 2))
        order = np.lexsort((moment, kept, took_s))
        each_s = once_s / self.micro_batches
        found = BlockOptions(
            more_s=took_s,
            least_s=took_s + each_s,
            work_s=joint_s + each_s,
            lines=np.array(lines).reshape(-1, len(amounts)).T,
            more_kept=kept.astype(int),
            moment=moment,
            late=late.astype(int) * parted,
            amounts=amounts,
        )
        return _picked(found, order)

    @cached_property
    def _of_kinds(self) -> np.ndarray:
        """One row for each (kind, mode), with the numbers of one block. Columns: extra seconds,
        seconds of forward and backward, seconds once a step, bytes kept, late bytes, and the cost
        by line.
        """
        parts = [
            [getattr(kind, part) for kind in self.kinds]
            for part in ("more_s", "work_s", "step_s", "more_kept", "late")
        ]
        parts += list(map(list, zip(*(kind.lines for kind in self.kinds), strict=True)))
        return np.array(parts, dtype=float).reshape(len(parts), -1).T.copy()

    def alike_ways(self, kinds: tuple[int, ...], longest: int) -> AlikeWays:
        """The `AlikeWays` to run a stage whose units have blocks of the kinds with these indices.
        `longest` is the number of units of the longest stage of its rank. Cached.
        """
        if (kinds, longest) not in self.known_ways:
            self.known_ways[kinds, longest] = self._all_alike_ways(kinds, longest)
        return self.known_ways[kinds, longest]

    def _all_alike_ways(self, kinds: tuple[int, ...], longest: int) -> AlikeWays:
        modes = _modes_of_alike(longest, self.modes)[:, : len(kinds)]

        def each(part: str) -> np.ndarray:
            """An array [way, unit]: the value of field `part` of the unit's kind, in the unit's
            mode.
            """
            return np.array([getattr(self.kinds[kind], part) for kind in kinds])[
                np.arange(len(kinds)), modes
            ]

        lines = np.array([self.kinds[kind].lines for kind in kinds]).reshape(
            len(kinds), -1, self.modes
        )
        return AlikeWays(
            more_s=each("more_s").sum(axis=1),
            work_s=each("work_s").sum(axis=1),
            lines=lines.swapaxes(1, 2)[np.arange(len(kinds)), modes].sum(axis=1),
            step_s=each("step_s").sum(axis=1),
            more_kept=each("more_kept").sum(axis=1),
            transient=each("transient").max(axis=1),
            parted=each("parted").max(axis=1),
            late=each("late").sum(axis=1),
            modes=modes,
        )


@lru_cache(maxsize=4096)
def _modes_of_alike(longest: int, modes: int) -> np.ndarray:
    """The index of the recompute mode of each block, as an array [way, place in a stage of
    `longest` blocks]. A way is a number of blocks for each of the `modes` modes. In a stage, blocks
    that recompute most come first. Ways with fewer recomputing blocks come first.
    """
    ways = [
        amounts
        for amounts in product(range(longest + 1), repeat=modes - 1)
        if sum(amounts) <= longest
    ]
    found = []
    for amounts in sorted(ways, key=sum):
        again = [mode for mode in range(modes - 1, 0, -1) for _ in range(amounts[mode - 1])]
        found.append(again + [0] * (longest - len(again)))
    return np.array(found)


@lru_cache(maxsize=4096)
def _amounts(counts: tuple[int, ...], modes: int) -> np.ndarray:
    """Every way to run `counts[kind]` blocks of each kind: how many run in each of `modes` modes,
    as an array [option, kind, mode].
    """
    found = np.zeros((1, 0, modes), dtype=int)
    for count in counts:
        each = _splits(int(count), modes)
        left, right = _pairs(len(found), len(each))
        found = np.concatenate([found[left], each[right, None]], axis=1)
    return found


@lru_cache(maxsize=256)
def _splits(count: int, parts: int) -> np.ndarray:
    """All ways to write `count` as a sum of `parts` numbers, at least 0, as an array [way, part];
    those with a larger first number come first.
    """
    if parts == 1:
        return np.array([[count]])
    rests = [_splits(rest, parts - 1) for rest in range(count + 1)]
    firsts = np.repeat(np.arange(count, -1, -1), [len(rest) for rest in rests])
    return np.column_stack([firsts, np.concatenate(rests)])


def _pairs(left: int, right: int) -> tuple[np.ndarray, np.ndarray]:
    """The indices of all pairs of one of `left` things and one of `right`, by the left one first."""
    first, second = np.divmod(np.arange(left * right), right)
    return first, second


def _joined(a: BlockOptions, b: BlockOptions) -> BlockOptions:
    """All combinations of an option of `a` and one of `b`: costs add up, peaks are the larger one.
    The kinds of `a` come before those of `b` in `amounts`.
    """
    left, right = _pairs(len(a.more_s), len(b.more_s))
    return BlockOptions(
        more_s=a.more_s[left] + b.more_s[right],
        least_s=a.least_s[left] + b.least_s[right],
        work_s=a.work_s[left] + b.work_s[right],
        lines=a.lines[left] + b.lines[right],
        more_kept=a.more_kept[left] + b.more_kept[right],
        moment=np.maximum(a.moment[left], b.moment[right]),
        late=a.late[left] + b.late[right],
        amounts=np.concatenate([a.amounts[left], b.amounts[right]], axis=1),
    )


def _sifted(options: BlockOptions) -> BlockOptions:
    """The options that are Pareto-optimal in bytes and in `more_s`, or in these bytes and
    `least_s`. Fastest first.

    Bytes are those that are kept, those of a micro-batch that waits for gradients of parameters
    (late ones too), and the peak. No more micro-batches wait than are held, so that no others
    can fit better.
    """
    needs = [options.more_kept, options.more_kept + options.late, options.moment]
    chosen = {
        number
        for seconds in (options.more_s, options.least_s)
        for number in undominated(np.stack([seconds, *needs], axis=1))
    }
    order = sorted(chosen, key=lambda place: (options.more_s[place], options.least_s[place]))
    return _picked(options, order)


def _picked(options: BlockOptions, order: np.ndarray | list[int]) -> BlockOptions:
    """The options with the indices `order`, in this order: every field is indexed alike."""
    return BlockOptions(
        **{part.name: getattr(options, part.name)[order] for part in fields(BlockOptions)}
    )
