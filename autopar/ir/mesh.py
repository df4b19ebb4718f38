"""The device mesh: named axes, outermost first."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from autopar.errors import AutoparError

AXES = ("pp", "dp", "cp", "tp")
"""Mesh axes, outermost first.  Ranks are numbered row-major, so that tp neighbours are adjacent ranks.  Expert parallelism (ep)
is carved out of dp x cp."""


@dataclass(frozen=True, slots=True)
class MeshShape:
    """Sizes of the mesh axes."""

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            size = getattr(self, axis)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise AutoparError(f"mesh axis {axis}={size!r} must be a whole number >= 1")

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def num_devices(self) -> int:
        return prod(self.sizes)

    def size(self, axis: str) -> int:
        return getattr(self, axis)

    def stride(self, axis: str) -> int:
        """Distance in ranks between neighbours along `axis`."""
        return prod(self.sizes[AXES.index(axis) + 1 :])

    def coordinate(self, rank: int, axis: str) -> int:
        """Position of `rank` along `axis`."""
        return rank // self.stride(axis) % self.size(axis)

    def as_dict(self) -> dict[str, int]:
        return {axis: self.size(axis) for axis in AXES}

    def __str__(self) -> str:
        named = [f"{axis}={self.size(axis)}" for axis in AXES if self.size(axis) > 1]
        return " ".join(named) or "1 device"
