"""How a tensor lies over one axis of the device mesh, forward and backward.

A `Placement` is one of PyTorch's three: `R` (Replicate), `S(d)` (Shard of tensor dim d), `P` (Partial, a pending sum).  A shard has a
`Pattern` that says which elements of the dim each rank holds: one contiguous chunk, or chunks of several sections.
A `Layout` pairs the placement of a value with the placement of its gradient, because the two are different facts:

    layout   value        gradient    where it occurs
    R        replicated   replicated  a residual stream computed alike on every rank
    R/P      replicated   partial     the input of a column-parallel linear: every rank sees all of x and owns a part of dx
    S(d)     sharded      sharded     activations and weights split over the axis
    P        partial      replicated  the output of a row-parallel linear

Changing the layout of a value therefore moves data twice: `transition(src, dst)` names the primitive that runs forward and the
one that runs backward.  Every collective that autopar inserts comes out of that one function.
"""

from __future__ import annotations

import re
from dataclasses import Field, dataclass, fields
from functools import cache
from math import ceil, gcd
from typing import Any, ClassVar

from autopar.errors import AutoparError, shown


class _Interned(type):
    """A class of values of which there are few and equal ones are one object: a solver compares and hashes layouts by the hundred
    thousand, which is then comparing and hashing addresses.  Patterns are made in compiled programs too, where no metaclass is asked:
    they keep comparing by value."""

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

    The dim is cut into `sections` of these relative sizes, and every section into p chunks, of which rank i holds the i-th: so are the
    fused queries, keys and values of an attention layer sharded.  With `rows` the dim is (batch, rest) flattened, and the pattern is
    that of each batch row: so are tokens flattened whose sequence is sharded.  With `zigzag` a section has 2p chunks, of which rank i
    holds the i-th and the i-th from the end: so is causal attention balanced.

    A pattern that is not contiguous wants every chunk to be of one size.
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
        """Whether each part is one piece."""
        return self == CONTIGUOUS

    def divides(self, size: int, parts: int) -> bool:
        """Whether `size` elements (of one batch row, with `rows`) fall into equal chunks for `parts` ranks."""
        return size % (sum(self.sections) * parts * (2 if self.zigzag else 1)) == 0

    def __str__(self) -> str:
        words = ["rows"] if self.rows else []
        words += [":".join(map(str, self.sections))] if self.sections != (1,) else []
        return " ".join(words + (["zigzag"] if self.zigzag else []))


CONTIGUOUS = Pattern()


def sectioned(sizes: tuple[int, ...]) -> Pattern:
    """The pattern of a dim made of sections of these sizes; empty sections do not count."""
    sizes = tuple(size for size in sizes if size) or (1,)
    common = gcd(*sizes)
    return Pattern(tuple(size // common for size in sizes))


@dataclass(frozen=True, slots=True, eq=False)
class Placement(_Value):
    """Placement of one tensor over one mesh axis; `dim` is the sharded tensor dim, or -1."""

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
class Layout(_Value):
    """Placement of a value and of its gradient over one mesh axis."""

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
        """The sharded tensor dim, or -1."""
        return self.value.dim

    @property
    def pattern(self) -> Pattern:
        """Which elements of the sharded dim a rank holds."""
        return self.value.pattern

    @property
    def is_shard(self) -> bool:
        """Whether the value is split along a dim."""
        return self.value.kind == "S"


R = Layout(REPLICATE, REPLICATE)
RP = Layout(REPLICATE, PARTIAL)
P = Layout(PARTIAL, REPLICATE)


@cache
def S(dim: int, pattern: Pattern = CONTIGUOUS) -> Layout:
    """The layout of a value that is split over tensor dim `dim`."""
    return Layout(Placement("S", dim, pattern), Placement("S", dim, pattern))


_PATTERN = re.compile(r"(rows)?\s?([0-9]{1,12}(?::[0-9]{1,12})+)?\s?(zigzag)?")
_SHARD = re.compile(r"S\(([0-9]{1,3})(?:, ([^)]+))?\)")


@cache
def parse_pattern(text: str) -> Pattern:
    """Inverse of `str(pattern)`: such as '', '2:1:1', 'rows zigzag'."""
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
def parse_layout(text: str) -> Layout:
    """Inverse of `str(layout)`: one of `R`, `R/P`, `P`, `S(3)`, `S(2, 2:1:1)`, `S(0, rows zigzag)`."""
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

COLLECTIVES = ("all_gather", "all_to_all", "all_reduce", "reduce_scatter", "reshuffle")


@cache
def primitive(src: Placement, dst: Placement) -> str:
    """The data movement that turns a tensor placed `src` into the same tensor placed `dst`.

    `slice` keeps this rank's shard, `pad` embeds it in zeros, `mask` keeps the tensor on the axis' first rank and zeroes it elsewhere,
    `reshuffle` goes from one pattern of a dim to another.
    """
    if src == dst:
        return "identity"
    if src.kind == dst.kind == "S" and src.dim == dst.dim:
        return "reshuffle"
    return _PRIMITIVES[src.kind, dst.kind]


@cache
def transition(src: Layout, dst: Layout) -> tuple[str, str]:
    """Primitives (forward, backward) that turn a value laid out `src` into `dst`.

    >>> transition(RP, R), transition(R, RP), transition(P, R), transition(S(1), RP)
    (('identity', 'mask'), ('identity', 'all_reduce'), ('all_reduce', 'identity'), ('all_gather', 'reduce_scatter'))
    """
    return primitive(src.value, dst.value), primitive(dst.grad, src.grad)


def conversion_path(
    have: dict[str, Layout], want: dict[str, Layout], axes: tuple[str, ...]
) -> list[tuple[str, Layout]]:
    """Changes of layout on one axis each that turn `have` into `want`; `axes` are named outermost first.

    Axes that split one dim nest: an inner axis splits what the outer ones left.  So before an outer axis changes its split of a dim, an
    inner axis that splits the same dim leaves it: at once for the layout that it wants, if no other axis is in the way there, else for R,
    to be split again afterwards.

    >>> path = conversion_path({"cp": S(2), "tp": S(2)}, {"cp": RP, "tp": S(1)}, ("cp", "tp"))
    >>> [(axis, str(layout)) for axis, layout in path]
    [('tp', 'S(1)'), ('cp', 'R/P')]
    """
    current, steps = dict(have), []

    def step(axis: str, layout: Layout) -> None:
        if current[axis] != layout:
            steps.append((axis, layout))
            current[axis] = layout

    def changing(which: tuple[str, ...]) -> set[int]:
        """The dims whose split these axes have still to change."""
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
    """How many of `size` elements rank `index` of `parts` holds."""
    return shard_extent(size, parts, index)[1] if pattern.is_contiguous else size // parts


def shard_extent(size: int, parts: int, index: int) -> tuple[int, int]:
    """(start, length) of shard `index` when `size` elements are split over `parts` ranks the way torch.chunk and DTensor do:
    every shard has ceil(size / parts) elements until they run out."""
    step = ceil(size / parts)
    start = min(step * index, size)
    return start, min(step, size - start)
