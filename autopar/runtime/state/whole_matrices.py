"""Parameters that are updated whole although ranks hold parts, for optimizers that use whole
matrices (Muon, Shampoo, LAMB).

The ranks that share a parameter gather its gradient. One of them, its owner, holds the whole master
and its optimizer state. The owner runs the step, and every rank receives its part of the result by
a reduce-scatter in which all others contribute zeros. Owners are chosen so that ranks own about the
same number of elements. An optimizer that couples parameters needs all of them. Every rank then
owns every parameter, and all compute the same.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import prod

import torch
from torch import Tensor, nn

from autopar.ir.sharding import RP
from autopar.rewrite.collectives.axes import AxisGroup
from autopar.rewrite.collectives.primitives import apply_primitive
from autopar.runtime.state.holding import Cutting
from autopar.runtime.state.zero import SHARING_AXES, Moving, scatter

EVERY_RANK = -1
"""The owner index of a parameter that every rank updates."""


class WholeMatrices:
    """The parameters that are updated whole, by name, and the rank that updates each, its owner.
    `axes` are those over which ZeRO shards, and tp. `name in wholes` says whether a parameter is
    updated whole.
    """

    def __init__(self, axes: Mapping[str, AxisGroup]) -> None:
        self._axes, self._along = (
            axes,
            [axes[axis] for axis in (*SHARING_AXES, "tp") if axes[axis].size > 1],
        )
        self.rank = 0
        for group in self._along:
            self.rank = self.rank * group.size + group.index
        self.ranks = prod(group.size for group in self._along)
        self._owner: dict[str, int] = {}
        self._cuttings: dict[str, Cutting] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._owner

    @property
    def names(self) -> Collection[str]:
        """The names of these parameters."""
        return self._owner.keys()

    def choose(self, cuttings: Mapping[str, Cutting], everywhere: bool) -> None:
        """Register these parameters and choose their owners: the largest first, each assigned to
        the rank with the fewest elements so far. If `everywhere`, every rank owns all.
        """
        self._cuttings, load = dict(cuttings), [0] * self.ranks
        for name in sorted(cuttings, key=lambda name: -prod(cuttings[name].shape)):
            self._owner[name] = EVERY_RANK if everywhere else load.index(min(load))
            load[self._owner[name]] += prod(cuttings[name].shape)

    def owns(self, name: str) -> bool:
        """Whether this rank owns the parameter, so that it holds its whole master and
        updates it.
        """
        return self._owner[name] in (EVERY_RANK, self.rank)

    def most_elements(self) -> int:
        """The number of elements that the rank with most owns."""
        load = dict.fromkeys((*range(self.ranks), EVERY_RANK), 0)
        for name, owner in self._owner.items():
            load[owner] += prod(self._cuttings[name].shape)
        return max(load.values())

    def placeholder(self, name: str, like: Tensor) -> nn.Parameter:
        """A parameter with the whole shape, but no memory of its own, for an optimizer's groups on
        ranks that do not own it. It is removed from these later.
        """
        return nn.Parameter(
            torch.zeros((), dtype=like.dtype, device=like.device).expand(self._cuttings[name].shape)
        )

    def joined(self, name: str, part: Tensor) -> Tensor:
        """The whole tensor from every rank's part of a parameter or gradient. Every rank of the
        group must call it.
        """
        return self._cuttings[name].joined(part, self._axes)

    def part(
        self, name: str, whole: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """This rank's part, in `dtype` on `device`, of the owner's tensor (`whole`; None on other
        ranks). Every rank of the group must call it.
        """
        cutting = self._cuttings[name]
        found = (
            torch.zeros(cutting.shape, dtype=dtype, device=device)
            if whole is None
            else whole.to(device, dtype)
        )
        if self._owner[name] == EVERY_RANK:
            return cutting.part(found, self._axes)
        for group, split in cutting.splits:
            found = apply_primitive("reduce_scatter", found, group, None, split)
        if cutting.share.cuts:
            [found] = Moving(
                scatter(
                    [found], [cutting.share], [dict.fromkeys(cutting.share.axes, RP)], self._axes
                )
            ).wait()
        cut = {*cutting.share.axes, *(group.name for group, _ in cutting.splits)}
        for group in self._along:
            if group.name not in cut:
                found = apply_primitive("all_reduce", found, group)
        return found
