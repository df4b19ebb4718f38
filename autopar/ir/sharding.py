"""How a tensor lies over one axis of the device mesh, forward and backward.

A `Placement` is one of PyTorch's three: `R` (Replicate), `S(d)` (Shard of tensor dim d), `P` (Partial, a pending sum).
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
from dataclasses import dataclass
from functools import cache
from math import ceil

from autopar.errors import AutoparError


@dataclass(frozen=True, slots=True)
class Placement:
    """Placement of one tensor over one mesh axis; `dim` is the sharded tensor dim, or -1."""

    kind: str
    dim: int = -1

    def __post_init__(self) -> None:
        if self.kind not in ("R", "S", "P") or (self.kind == "S") != (self.dim >= 0):
            raise ValueError(f"Placement(kind={self.kind!r}, dim={self.dim}) is none of R, P, S(dim >= 0)")

    def __str__(self) -> str:
        return f"S({self.dim})" if self.kind == "S" else self.kind


REPLICATE = Placement("R")
PARTIAL = Placement("P")


@dataclass(frozen=True, slots=True)
class Layout:
    """Placement of a value and of its gradient over one mesh axis."""

    value: Placement
    grad: Placement

    def __post_init__(self) -> None:
        legal = {"R": "RP", "S": "S", "P": "R"}[self.value.kind]
        if self.grad.kind not in legal or self.value.dim != self.grad.dim:
            raise ValueError(f"a value placed {self.value} cannot have a gradient placed {self.grad}")

    def __str__(self) -> str:
        return "R/P" if self == RP else str(self.value)

    @property
    def dim(self) -> int:
        """The sharded tensor dim, or -1."""
        return self.value.dim

    @property
    def is_shard(self) -> bool:
        return self.value.kind == "S"


R = Layout(REPLICATE, REPLICATE)
RP = Layout(REPLICATE, PARTIAL)
P = Layout(PARTIAL, REPLICATE)


@cache
def S(dim: int) -> Layout:
    """The layout of a value that is split over tensor dim `dim`."""
    return Layout(Placement("S", dim), Placement("S", dim))


def parse_layout(text: str) -> Layout:
    """Inverse of `str(layout)`: one of `R`, `R/P`, `P`, `S(3)`."""
    named = {"R": R, "R/P": RP, "P": P}
    if text in named:
        return named[text]
    match = re.fullmatch(r"S\((\d+)\)", text)
    if match is None:
        raise AutoparError(f"{text!r} is not a layout; R, R/P, P and S(dim) are")
    return S(int(match[1]))


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

COLLECTIVES = ("all_gather", "all_to_all", "all_reduce", "reduce_scatter")


@cache
def primitive(src: Placement, dst: Placement) -> str:
    """The data movement that turns a tensor placed `src` into the same tensor placed `dst`.

    `slice` keeps this rank's shard, `pad` embeds it in zeros, `mask` keeps the tensor on the axis' first rank and zeroes it elsewhere.
    """
    if src == dst:
        return "identity"
    return _PRIMITIVES[src.kind, dst.kind]


@cache
def transition(src: Layout, dst: Layout) -> tuple[str, str]:
    """Primitives (forward, backward) that turn a value laid out `src` into `dst`.

    >>> transition(RP, R), transition(R, RP), transition(P, R), transition(S(1), RP)
    (('identity', 'mask'), ('identity', 'all_reduce'), ('all_reduce', 'identity'), ('all_gather', 'reduce_scatter'))
    """
    return primitive(src.value, dst.value), primitive(dst.grad, src.grad)


def shard_extent(size: int, parts: int, index: int) -> tuple[int, int]:
    """(start, length) of shard `index` when `size` elements are split over `parts` ranks the way torch.chunk and DTensor do:
    every shard has ceil(size / parts) elements until they run out."""
    step = ceil(size / parts)
    start = min(step * index, size)
    return start, min(step, size - start)
