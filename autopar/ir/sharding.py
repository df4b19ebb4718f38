"""Layouts: how a tensor and its gradient are distributed over one axis of the device mesh.

A `Placement` is one of PyTorch's three: `R` (Replicate), `S(d)` (Shard of tensor dim d), `P`
(Partial, a pending sum). A shard has a `Pattern` that says which elements of the dim each rank
holds: one contiguous chunk, or chunks of several sections. A `AxisLayout` pairs the placement of a
value with the placement of its gradient, since the two may differ:

    layout   value        gradient    where it occurs
    R        replicated   replicated  a residual stream computed alike on every rank
    R/P      replicated   partial     the input of a column-parallel linear: every rank has all of x and a part of dx
    S(d)     sharded      sharded     activations and weights split over the axis
    P        partial      replicated  the output of a row-parallel linear

Changing the layout of a value therefore moves data twice. `transition(src, dst)` names the
primitive of forward and that of backward. Every collective that autopar inserts comes from this
function.
"""

from __future__ import annotations

import re
from dataclasses import Field, dataclass, fields
from functools import cache
from math import ceil, gcd
from typing import Any, ClassVar

from autopar.errors import AutoparError, shown


class _Interned(type):
    """A metaclass whose equal instances are one object, so that comparing and hashing them uses
    addresses. A solver does that hundreds of thousands of times.

    Patterns are also created in compiled programs, which bypass the metaclass. They are still
    compared by value.
    """

    def __init__(cls, *arguments: Any) -> None:
        super().__init__(*arguments)
        cls._known: dict[tuple, Any] = {}

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__call__(*args, **kwargs)
        return cls._known.setdefault(made._contents(), made)


class _Value(metaclass=_Interned):
    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]  # of each subclass

    def _contents(self) -> tuple:
        return tuple(getattr(self, field.name) for field in fields(self))

    def __reduce__(self) -> tuple:
        return type(self), self._contents()


@dataclass(frozen=True, slots=True)
class Pattern(_Value):
    """Which elements of a dim each of p ranks holds.

    The dim is cut into `sections` of these relative sizes. Every section is cut into p chunks, and
    rank i holds the i-th chunk of each. An example is a sharded dim of fused queries, keys and
    values.

    With `rows` the dim is (batch, rest) flattened, and the pattern applies to each batch row. An
    example is flattened tokens whose sequence is sharded. With `zigzag` a section has 2p chunks,
    and rank i holds the i-th from the start and the i-th from the end. This balances causal
    attention.

    A pattern that is not contiguous requires chunks of equal size.
    """

    sections: tuple[int, ...] = (1,)
    rows: bool = False
    zigzag: bool = False

    def __post_init__(self) -> None:
        if not self.sections or any(
            not isinstance(size, int) or size < 1 for size in self.sections
        ):
            raise ValueError(f"sections {self.sections} are not positive whole numbers")
        if gcd(*self.sections) != 1:
            raise ValueError(
                f"sections {self.sections} are relative sizes; write them without their common factor"
            )

    @property
    def is_contiguous(self) -> bool:
        """Whether every rank holds one contiguous chunk."""
        return self == CONTIGUOUS

    def divides(self, size: int, parts: int) -> bool:
        """Whether all `parts` ranks get equal chunks of every section, for a dim of `size`
        elements. With `rows`, `size` is the number of elements in one batch row.
        """
        return size % (sum(self.sections) * parts * (2 if self.zigzag else 1)) == 0

    def __str__(self) -> str:
        words = ["rows"] if self.rows else []
        words += [":".join(map(str, self.sections))] if self.sections != (1,) else []
        return " ".join(words + (["zigzag"] if self.zigzag else []))


CONTIGUOUS = Pattern()


def sectioned(sizes: tuple[int, ...]) -> Pattern:
    """The pattern of a dim that consists of consecutive sections of these sizes; each is sharded by
    itself. Empty sections are ignored, and no section or one gives `CONTIGUOUS`.
    """
    sizes = tuple(size for size in sizes if size) or (1,)
    common = gcd(*sizes)
    return Pattern(tuple(size // common for size in sizes))


@dataclass(frozen=True, slots=True, eq=False)
class Placement(_Value):
    """Placement of one tensor over one mesh axis. `kind` is 'R' (replicated), 'S' (sharded) or 'P'
    (partial sums). `dim` is the sharded tensor dim, else -1. Raises ValueError if they do not
    agree.

    `pattern` says which elements of the dim each rank holds; only shards have one that is not
    contiguous.
    """

    kind: str
    dim: int = -1
    pattern: Pattern = CONTIGUOUS

    def __post_init__(self) -> None:
        if self.kind not in ("R", "S", "P") or (self.kind == "S") != (self.dim >= 0):
            raise ValueError(
                f"Placement(kind={shown(self.kind)}, dim={self.dim}) is none of R, P, S(dim >= 0)"
            )
        if self.kind != "S" and not self.pattern.is_contiguous:
            raise ValueError(f"only shards have a pattern; {self.kind} has {self.pattern}")

    def __str__(self) -> str:
        if self.kind != "S":
            return self.kind
        return f"S({self.dim})" if self.pattern.is_contiguous else f"S({self.dim}, {self.pattern})"


REPLICATE = Placement("R")
PARTIAL = Placement("P")


@dataclass(frozen=True, slots=True, eq=False)
class AxisLayout(_Value):
    """Placements of a value and of its gradient over one mesh axis. Raises ValueError unless the
    pair is R (both replicated), R/P (gradient partial), S(d) (both sharded alike) or P (value
    partial, gradient replicated).
    """

    value: Placement
    grad: Placement

    def __post_init__(self) -> None:
        legal = {"R": "RP", "S": "S", "P": "R"}[self.value.kind]
        if self.grad.kind not in legal or (self.value.kind == "S" and self.value != self.grad):
            raise ValueError(
                f"a value placed {self.value} cannot have a gradient placed {self.grad}"
            )

    def __str__(self) -> str:
        return "R/P" if self == RP else str(self.value)

    @property
    def dim(self) -> int:
        """The tensor dim along which the value is sharded, or -1 if it is not sharded."""
        return self.value.dim

    @property
    def pattern(self) -> Pattern:
        """Which elements of the sharded dim each rank holds; `CONTIGUOUS` if the value is not
        sharded.
        """
        return self.value.pattern

    @property
    def is_shard(self) -> bool:
        """Whether the value is sharded."""
        return self.value.kind == "S"


R = AxisLayout(REPLICATE, REPLICATE)
RP = AxisLayout(REPLICATE, PARTIAL)
P = AxisLayout(PARTIAL, REPLICATE)


@cache
def S(dim: int, pattern: Pattern = CONTIGUOUS) -> AxisLayout:
    """The layout of a value whose tensor dim `dim` is sharded by `pattern`, as is its gradient."""
    return AxisLayout(Placement("S", dim, pattern), Placement("S", dim, pattern))


_PATTERN = re.compile(r"(rows)?\s?([0-9]{1,12}(?::[0-9]{1,12})+)?\s?(zigzag)?")
_SHARD = re.compile(r"S\(([0-9]{1,3})(?:, ([^)]+))?\)")


@cache
def parse_pattern(text: str) -> Pattern:
    """The pattern of a text such as '', '2:1:1', 'rows zigzag': the inverse of `str(pattern)`.
    Raises AutoparError for another text.
    """
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise AutoparError(
            f"{shown(text)} is not a pattern; 'rows', relative sizes such as '2:1:1', and 'zigzag', in this order, are"
        )
    try:
        return Pattern(
            tuple(map(int, match[2].split(":"))) if match[2] else (1,),
            bool(match[1]),
            bool(match[3]),
        )
    except ValueError as error:
        raise AutoparError(f"{shown(text)} is not a pattern: {error}") from None


@cache
def parse_layout(text: str) -> AxisLayout:
    """The layout of a text such as `R`, `R/P`, `P`, `S(3)`, `S(2, 2:1:1)`, `S(0, rows zigzag)`: the
    inverse of `str(layout)`. Raises AutoparError for another text.
    """
    named = {"R": R, "R/P": RP, "P": P}
    if text in named:
        return named[text]
    match = _SHARD.fullmatch(text)
    if match is None:
        raise AutoparError(
            f"{shown(text)} is not a layout; R, R/P, P, S(dim) and S(dim, pattern) are"
        )
    return S(int(match[1]), parse_pattern(match[2] or ""))


_PRIMITIVES = {
    ("R", "R"): "identity",
    ("R", "S"): "slice",
    ("R", "P"): "mask",
    ("S", "R"): "all_gather",
    ("S", "S"): "all_to_all",
    ("S", "P"): "pad",
    ("P", "R"): "all_reduce",
    ("P", "S"): "reduce_scatter",
    ("P", "P"): "identity",
}

COLLECTIVE_PRIMITIVES = ("all_gather", "all_to_all", "all_reduce", "reduce_scatter", "reshuffle")


@cache
def primitive(src: Placement, dst: Placement) -> str:
    """The name of the data movement that changes the placement of a tensor from `src` to `dst`: a
    collective, 'identity', or one of these.

    `slice` keeps this rank's shard. `pad` embeds it in zeros. `mask` keeps the tensor on the first
    rank of the axis and zeroes it on the others. `reshuffle` changes the pattern of a sharded dim.
    """
    if src == dst:
        return "identity"
    if src.kind == dst.kind == "S" and src.dim == dst.dim:
        return "reshuffle"
    return _PRIMITIVES[src.kind, dst.kind]


@cache
def transition(src: AxisLayout, dst: AxisLayout) -> tuple[str, str]:
    """The primitives (of forward, of backward) that change the layout of a value from `src` to
    `dst`. Backward changes the gradient from its placement in `dst` to that in `src`.

    >>> transition(RP, R), transition(R, RP), transition(P, R), transition(S(1), RP)
    (('identity', 'mask'), ('identity', 'all_reduce'), ('all_reduce', 'identity'), ('all_gather', 'reduce_scatter'))
    """
    return primitive(src.value, dst.value), primitive(dst.grad, src.grad)


def conversion_path(
    have: dict[str, AxisLayout], want: dict[str, AxisLayout], axes: tuple[str, ...]
) -> list[tuple[str, AxisLayout]]:
    """The steps (axis, new layout), in order, that turn the layouts `have` into `want`. Each
    changes the layout on one axis. `axes` are listed outermost first.

    Axes that shard one dim nest: an inner axis shards what the outer ones leave. Before an outer
    axis changes its shard of a dim, an inner axis that shards the same dim must give it up. It
    changes to the layout that it wants if no other axis blocks that; otherwise it changes to R and
    is sharded again afterwards.

    >>> path = conversion_path({"cp": S(2), "tp": S(2)}, {"cp": RP, "tp": S(1)}, ("cp", "tp"))
    >>> [(axis, str(layout)) for axis, layout in path]
    [('tp', 'S(1)'), ('cp', 'R/P')]
    """
    current, steps = dict(have), []

    def step(axis: str, layout: AxisLayout) -> None:
        if current[axis] != layout:
            steps.append((axis, layout))
            current[axis] = layout

    def changing(which: tuple[str, ...]) -> set[int]:
        """The sharded dims, before and after, of those axes of `which` whose layout still has to
        change.
        """
        return {
            layout[axis].dim
            for axis in which
            if current[axis] != want[axis]
            for layout in (current, want)
        } - {-1}

    for index, axis in enumerate(axes):
        touched = changing((axis,))
        for place in reversed(range(index + 1, len(axes))):
            inner = axes[place]
            if current[inner].dim in touched:
                in_the_way = changing(axes[:place]) | {
                    current[a].dim for a in axes[place + 1 :] if current[a].is_shard
                }
                step(inner, R if want[inner].dim in in_the_way else want[inner])
        step(axis, want[axis])
    for axis in axes:
        step(axis, want[axis])
    return steps


def local_extent(size: int, parts: int, index: int, pattern: Pattern = CONTIGUOUS) -> int:
    """The number of elements that rank `index` of `parts` holds of a dim with `size`, sharded by
    `pattern`.
    """
    return shard_extent(size, parts, index)[1] if pattern.is_contiguous else size // parts


def shard_extent(size: int, parts: int, index: int) -> tuple[int, int]:
    """(start, length) of shard `index` when `size` elements are split over `parts` ranks as in
    torch.chunk and DTensor: every shard has ceil(size / parts) elements until none are left.
    """
    step = ceil(size / parts)
    start = min(step * index, size)
    return start, min(step, size - start)
