"""The device mesh: named axes, outermost first."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from autopar.errors import AutoparError

DEGREES = ("pp", "dp", "cp", "tp", "ep")
"""What a user pins: the parallel degrees.  `ep` is carved out of `dp`: experts are sharded over ep of the dp ranks."""

AXES = ("pp", "dp", "ep", "cp", "tp")
"""Axes of the mesh, outermost first.  Ranks are numbered row-major, so that tp neighbours are adjacent ranks.  The data-parallel ranks
are the product of the axes dp and ep."""

LAYOUT_AXES = ("dp", "ep", "cp", "tp")
"""Axes over which tensors have layouts."""

BATCH_AXES = ("dp", "ep")
"""Axes over which the batch is sharded."""


@dataclass(frozen=True, slots=True)
class MeshShape:
    """Parallel degrees.  `dp` counts all data-parallel ranks, those of ep included; the mesh axis of that name has dp / ep of them."""

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for axis in DEGREES:
            size = getattr(self, axis)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise AutoparError(f"mesh axis {axis}={size!r} must be a whole number >= 1")
        if self.dp % self.ep:
            raise AutoparError(f"ep={self.ep} does not divide dp={self.dp}: experts are sharded over a part of the data-parallel ranks")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of `AXES`."""
        return tuple(self.size(axis) for axis in AXES)

    @property
    def num_devices(self) -> int:
        return prod(self.sizes)

    @property
    def active(self) -> tuple[str, ...]:
        """The layout axes with more than one rank, outermost first."""
        return tuple(axis for axis in LAYOUT_AXES if self.size(axis) > 1)

    def size(self, axis: str) -> int:
        """Ranks along a mesh axis."""
        return self.dp // self.ep if axis == "dp" else getattr(self, axis)

    def stride(self, axis: str) -> int:
        """Distance in ranks between neighbours along `axis`."""
        return prod(self.sizes[AXES.index(axis) + 1 :])

    def coordinate(self, rank: int, axis: str) -> int:
        """Position of `rank` along `axis`."""
        return rank // self.stride(axis) % self.size(axis)

    def as_dict(self) -> dict[str, int]:
        """The degrees by name."""
        return {degree: getattr(self, degree) for degree in DEGREES}

    def __str__(self) -> str:
        named = [f"{degree}={size}" for degree, size in self.as_dict().items() if size > 1]
        return " ".join(named) or "1 device"
