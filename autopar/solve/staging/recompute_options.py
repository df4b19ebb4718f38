"""Ways to recompute in a stage."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import product
from math import comb

import numpy as np

from autopar.solve.costs.pareto import undominated


@dataclass(frozen=True, slots=True)
class Kind:
    """Blocks that cost the same, by mode: what backward takes and forward keeps more than in the first, what forward and backward take
    together, what they take once a step and (`lines`) what they cost by each line more than in the mode where that is least, bytes that
    backward needs for a moment in one part and in two (`parted`), and what micro-batches that wait for gradients of parameters hold more
    than they kept."""

    more_s: tuple[float, ...]
    work_s: tuple[float, ...]
    step_s: tuple[float, ...]
    lines: tuple[tuple[float, ...], ...]
    more_kept: tuple[int, ...]
    transient: tuple[int, ...]
    parted: tuple[int, ...]
    late: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Options:
    """Ways to run some blocks that no other beats in bytes and in seconds, those of backward or (`least_s`) with a share of those once a
    step: arrays by option, fastest first.  `work_s`: as `least_s`, of forward and backward together; `lines[option, line]`.  `moment`: what
    a backward needs for a moment, in one part or in two (then `late` is what waits between them, else 0).
    `amounts[option, kind, mode]`."""

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
    """Ways to run a stage: what backward takes more, what it takes once a step more than at least, and `amounts` as in `Options`.
    `is_complete`: no other that fits takes less of both."""

    more_s: np.ndarray
    step_s: np.ndarray
    amounts: np.ndarray
    is_complete: bool


@dataclass(frozen=True, slots=True)
class AlikeWays:
    """Ways to run a stage whose rank runs as many blocks of each of its stages in each mode: arrays by way, those that recompute fewest
    first.  `lines[way, line]`; `modes[way, unit]`: the first blocks recompute most."""

    more_s: np.ndarray
    work_s: np.ndarray
    lines: np.ndarray
    step_s: np.ndarray
    more_kept: np.ndarray
    transient: np.ndarray
    parted: np.ndarray
    late: np.ndarray
    modes: np.ndarray


_FEW = 20_000
"""Up to so many ways to run some blocks are looked through as they are, not sifted."""


def _ways(count: int, modes: int) -> int:
    """In how many ways so many alike blocks can run."""
    return comb(count + modes - 1, modes - 1)


@lru_cache(maxsize=4096)
def _modes_of_alike(longest: int, modes: int) -> np.ndarray:
    """By way and place in a stage: the mode of a block, if of each but the first mode there are so many."""
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
    """How many blocks of each kind run in each mode: option, kind, mode."""
    return np.array(list(product(*(_splits(int(count), modes) for count in counts))))


@lru_cache(maxsize=4096)
def _splits(count: int, parts: int) -> tuple[tuple[int, ...], ...]:
    """Every way to write `count` as an ordered sum of so many parts."""
    if parts == 1:
        return ((count,),)
    return tuple(
        (first, *rest)
        for first in range(count, -1, -1)
        for rest in _splits(count - first, parts - 1)
    )


def _joined(a: Options, b: Options) -> Options:
    """One of the first and one of the second, each with each."""
    left, right = np.divmod(np.arange(len(a.more_s) * len(b.more_s)), len(b.more_s))
    amounts = np.concatenate([a.amounts[left], b.amounts[right]], axis=1)
    return Options(
        a.more_s[left] + b.more_s[right], a.least_s[left] + b.least_s[right], a.work_s[left] + b.work_s[right],
        a.lines[left] + b.lines[right], a.more_kept[left] + b.more_kept[right],
        np.maximum(a.moment[left], b.moment[right]), a.late[left] + b.late[right], amounts,
    )  # fmt: skip


def _undominated(options: Options) -> Options:
    """Those than which no other is faster, by either measure, keeps less and needs no more for a moment and while it waits; fastest
    first."""
    needs = [options.more_kept, options.moment, options.late]
    chosen = {
        number
        for seconds in (options.more_s, options.least_s)
        for number in undominated(np.stack([seconds, *needs], axis=1))
    }
    order = sorted(chosen, key=lambda place: (options.more_s[place], options.least_s[place]))
    return Options(*(getattr(options, field.name)[order] for field in fields(Options)))
