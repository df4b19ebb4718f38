"""The layouts of a search space, listed from the words that `explain --space` prints.

It reads the rules of a certificate and calls nothing of `autopar`. Words that it does not know
raise ValueError. How many stages a rank has under a schedule whose number of them is pinned is
that of `check_schedule`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from autopar_cost_models import check_schedule

_HYBRID = "all ranks of dp x cp; under ZeRO 3 without a pipeline also those within a node, if there are more nodes"
_SEVERAL = r"1; under (.*) 2 to (\d+), with pp x vpp up to the layers"
_CUTS = (
    "any number of layers each if a rank has one; with several, the first and the last have up to 2 layers fewer than "
    "others, which differ by one at most"
)
_ALIKE = "the stages of a rank, if several, have as many blocks in each mode, those that recompute most first"
_LONG = (
    r"1, and divisors of devices / \(pp x tp\) of which twice divides the positions, with at least "
    r"(\d+) positions a rank or (\d+) in all"
)


@dataclass(frozen=True, slots=True)
class Layout:
    """A layout of a printed space. `shard` is 0 if all data-parallel ranks share. `schedules` has
    (name, stages a rank), and `sizes` the layers of each stage if they are pinned. All blocks have
    one of the recompute `modes`, or each has one if these are `mixed`.
    """

    pp: int
    tp: int
    cp: int
    dp: int
    ep: int
    order: str
    micro_batch: int
    zero: int
    shard: int
    schedules: tuple[tuple[str, int], ...] = ()
    sizes: tuple[int, ...] = ()
    modes: tuple[str, ...] = ()
    mixed: bool = False
    offload: str = "none"


def divisors(number: int) -> list[int]:
    return [count for count in range(1, number + 1) if number % count == 0]


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def layouts(rules: Mapping[str, str]) -> Iterator[Layout]:
    """Yields each layout of one kind of devices that the words of `rules` allow, by choice. One
    without a schedule that torch runs is left out. Raises ValueError for words of another kind.
    """
    (devices, per_node), (batch,) = _numbers(r"(\d+) \S+ in nodes of (\d+)", rules["devices"]), numbers(rules["batch"])  # fmt: skip
    parts = re.fullmatch(
        r"(.*) layers, attention heads (.*), (.*) positions, experts (.*)", rules["model"]
    )
    (layers,), heads, (positions,), experts = (numbers(text) for text in parts.groups())
    for pp, tp, cp in product(divisors(devices), repeat=3):
        dp = devices // (pp * tp * cp)
        kept = (
            dp * pp * tp * cp == devices,
            dp and batch % dp == 0,
            _allows(rules["pp"], pp, r"divisors of the devices up to (\d+)", lambda pp, most: pp <= min(most, layers)),
            _allows(rules["tp"], tp, r"divisors of devices / pp up to (\d+) that divide the attention heads",
                    lambda tp, most: tp <= most and all(count % tp == 0 for count in heads)),
            _allows(rules["cp"], cp, _LONG, lambda cp, share, long: cp == 1 or (
                positions % (2 * cp) == 0 and (positions >= long or positions >= share * cp))),
            _allows(rules["dp"], dp, "what is left, if it divides the batch", bool),
        )  # fmt: skip
        if not all(kept):
            continue
        orders = _orders(rules["order"], pp, cp * tp, dp * cp * tp, per_node)
        for ep, micro, order in product(divisors(dp), divisors(batch // dp), orders):
            kept = (
                ep == 1 or (experts and ep <= experts[0]),
                _allows(rules["ep"], ep, "divisors of dp that divide the experts",
                        lambda ep: ep == 1 or (experts and experts[0] % ep == 0)),
                _is_micro_batch(rules["micro_batch"], micro, batch // dp, dp),
            )  # fmt: skip
            if not all(kept):
                continue
            schedules = tuple(_schedules(rules, pp, layers, batch // dp // micro))
            if pp > 1 and not schedules:
                continue
            near = per_node // tp if per_node % tp == 0 else 0  # cp, ep and dp are around tp
            for zero in _zeros(rules["zero"], pp, dp * cp):
                for shard in _shards(rules["shard"], zero, pp, near, dp * cp, ep * cp):
                    yield Layout(pp, tp, cp, dp, ep, order, micro, zero, shard, schedules, _sizes(rules, pp),
                                 *_modes(rules["recompute"]), rules["offload"])  # fmt: skip


def _numbers(pattern: str, text: str) -> list[int]:
    found = re.fullmatch(pattern, text)
    if found is None:
        raise ValueError(f"unknown words: {text!r}")
    return [int(number) for number in found.groups()]


def _allows(rule: str, value: int, words: str, keeps: Callable[..., object]) -> object:
    """Whether a rule allows a value: one of a list, or one that `keeps` the numbers of the words."""
    if re.fullmatch(r"\d+(, \d+)*", rule):
        return value in numbers(rule)
    return keeps(value, *_numbers(words, rule))


def _is_micro_batch(rule: str, micro: int, rows: int, dp: int) -> bool:
    if rule == "batch / dp":
        return micro == rows
    if rule.isdigit():
        return micro == int(rule)
    least = numbers(rule.removeprefix("divisors of batch / dp"))
    return not least or micro * dp >= least[0]


def _orders(rule: str, pp: int, near: int, far: int, per_node: int) -> list[str]:
    """The orders of a mesh whose pipeline ranks lie `far` ranks apart, and `near` in the second
    order. That is there if it has more of them on a node.
    """
    first, _, rest = rule.partition(", or ")
    if not rest:
        return [first]
    here, inside = (min(pp, max(per_node // stride, 1)) for stride in (far, near))
    return [first, rest.split(" ")[0]] if inside > here else [first]


def _zeros(rule: str, pp: int, ranks: int) -> list[int]:
    if rule.isdigit():
        return [int(rule)] if ranks > 1 or rule == "0" else []
    found = re.fullmatch(r"([\d, ]+?),( not 2 with a pipeline,)? and 0 alone where dp x cp is 1", rule)  # fmt: skip
    if found is None:
        raise ValueError(f"unknown words: {rule!r}")
    return [0] if ranks == 1 else [z for z in numbers(found[1]) if not (pp > 1 and found[2] and z == 2)]  # fmt: skip


def _shards(rule: str, zero: int, pp: int, near: int, ranks: int, together: int) -> list[int]:
    if rule.isdigit():
        shard = int(rule)
        if shard == 0:
            return [0]
        fits = zero and ranks % shard == 0 and shard % together == 0
        return [0 if shard == ranks else shard] if fits else []
    if rule != _HYBRID:
        raise ValueError(f"unknown words: {rule!r}")
    fits = 1 < near < ranks and ranks % near == 0 and near % together == 0
    return [0, near] if zero == 3 and pp == 1 and fits else [0]


def _schedules(
    rules: Mapping[str, str], pp: int, layers: int, micro_batches: int
) -> Iterator[tuple[str, int]]:
    """(name, stages a rank) of each printed schedule that runs this number of micro-batches."""
    rule = rules.get("vpp", "1")
    several = re.fullmatch(_SEVERAL, rule)
    names, *needs = rules["schedule"].split("; ")
    for name in names.split(", ") if pp > 1 else ():
        if not all(_runs(need, name, pp, micro_batches) for need in needs):
            continue
        counts = [1] if several else numbers(rule)
        if several and name in several[1].split(", "):
            counts = list(range(2, int(several[2]) + 1))
        for count in counts:
            try:
                check_schedule(name, pp, count, pp)
            except ValueError:
                continue
            if pp * count == len(_sizes(rules, pp)) or (
                not _sizes(rules, pp) and pp * count <= layers
            ):
                yield name, count


def _runs(need: str, name: str, pp: int, micro_batches: int) -> bool:
    """Whether a schedule runs this number of micro-batches, by the words on some schedules."""
    for words, holds in (
        (" with m >= pp micro-batches", micro_batches >= pp),
        (" with m that max(1, m // pp) divides", micro_batches % max(1, micro_batches // pp) == 0),
    ):
        if need.endswith(words):
            return holds or name not in need.removesuffix(words).split(", ")
    raise ValueError(f"unknown words: {need!r}")


def _sizes(rules: Mapping[str, str], pp: int) -> tuple[int, ...]:
    rule = rules.get("stages", _CUTS)
    if pp == 1 or rule == _CUTS:
        return ()
    if not re.fullmatch(r"\d+(-\d+)+", rule):
        raise ValueError(f"unknown words: {rule!r}")
    return tuple(numbers(rule))


def _modes(rule: str) -> tuple[tuple[str, ...], bool]:
    """(recompute modes, whether blocks may have different ones)."""
    names, _, whose = rule.partition(" for ")
    if whose not in ("", "all blocks", "each block", f"each block; {_ALIKE}"):
        raise ValueError(f"unknown words: {whose!r}")
    return tuple(names.split(", ")), whose.startswith("each block")
