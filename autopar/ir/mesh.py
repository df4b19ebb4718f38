"""The device mesh: named axes with sizes, and how ranks are numbered."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from math import prod

from autopar.errors import AutoparError, shown

DEGREES = ("pp", "dp", "cp", "tp", "ep")
"""The parallel degrees that a user can pin. `ep` is part of `dp`: experts are sharded over ep of
the dp ranks.
"""

AXES = ("pp", "dp", "ep", "cp", "tp")
"""Axes of the mesh, outermost first. By default ranks are numbered row-major, so tp neighbours are
adjacent ranks. There are dp / ep ranks on the axis dp, so the data-parallel ranks are those of
dp and ep together.
"""

MOST_DEVICES = 10**8
"""The largest number of devices, and of sequences in a step."""

LAYOUT_AXES = ("dp", "ep", "cp", "tp")
"""Axes over which tensors have layouts."""

BATCH_AXES = ("dp", "ep")
"""Axes over which the batch is sharded."""

COPIES = "copies"
"""The name of an axis that exists if ZeRO shards within groups of data-parallel ranks: from group
to group. It is then the outer part of dp, and `dp` is the inner part.
"""


@dataclass(frozen=True, slots=True)
class MeshShape:
    """Parallel degrees, and where their ranks lie.

    Attributes:
        pp: ranks of the pipeline.
        dp: all data-parallel ranks, those of ep included.  The mesh axis of that name has dp / ep ranks.
        cp: ranks that share out the positions of a sequence.
        tp: tensor-parallel ranks.
        ep: data-parallel ranks that share out experts.
        order: the axes as ranks lie, outermost first.  `dp-pp-tp` numbers ranks with dp outermost and tp innermost.  An axis that is
            left out lies just outside its inner neighbour in `AXES`.  It is kept as the axes larger than 1, or '' where they lie as in
            `AXES`, so that meshes of one placement are equal.  Layouts nest as in `AXES` in any case.
        deal: for devices of several kinds, the group of the cluster that holds each pp coordinate.  `1x2-0x3` has two coordinates on
            group 1, then three on group 0.  Ranks are numbered along the pipeline.
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    order: str = ""
    deal: str = ""

    def __post_init__(self) -> None:
        for axis in DEGREES:
            size = getattr(self, axis)
            if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= MOST_DEVICES:
                raise AutoparError(
                    f"mesh axis {axis}={shown(size)} must be a whole number from 1 to {MOST_DEVICES:,}"
                )
        if self.dp % self.ep:
            raise AutoparError(
                f"ep={self.ep} does not divide dp={self.dp}: experts are sharded over a part of the data-parallel ranks"
            )
        active = [axis for axis in _placed(self.order) if self.size(axis) > 1]
        object.__setattr__(
            self,
            "order",
            "" if active == [axis for axis in AXES if axis in active] else "-".join(active),
        )
        if self.deal:
            self._check_deal()

    def _check_deal(self) -> None:
        if len(self.groups) != self.pp:
            ranks = len(self.groups)
            raise AutoparError(
                f"deal={shown(self.deal)} deals {ranks} ranks of a pipeline of pp={self.pp}"
            )
        if self.order:
            raise AutoparError(
                f"order={shown(self.order)}: on devices of several kinds the ranks of a pipeline lie outermost; leave it out"
            )
        object.__setattr__(self, "deal", deal_text(self.groups))

    @property
    def groups(self) -> tuple[int, ...]:
        """For each pipeline rank (pp coordinate), the index of the cluster's group of devices that
        holds it. All are 0 if there is one kind of devices.
        """
        return groups_of(self.deal) if self.deal else (0,) * self.pp

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of ranks along each axis, in the order of `AXES` (pp, dp, ep, cp, tp). The
        size of dp is dp / ep.
        """
        return tuple(self.size(axis) for axis in AXES)

    @property
    def num_devices(self) -> int:
        """Number of devices: the product of all sizes."""
        return prod(self.sizes)

    @property
    def active(self) -> tuple[str, ...]:
        """The axes over which tensors have layouts (dp, ep, cp, tp) that have more than one rank,
        outermost first.
        """
        return tuple(axis for axis in LAYOUT_AXES if self.size(axis) > 1)

    def size(self, axis: str) -> int:
        """Number of ranks along a mesh axis. For 'dp' that is dp / ep, since ep is an axis of its
        own.
        """
        return self.dp // self.ep if axis == "dp" else getattr(self, axis)

    @property
    def placed(self) -> tuple[str, ...]:
        """All five axes in the order in which ranks are numbered, outermost first."""
        return _placed(self.order)

    def stride(self, axis: str) -> int:
        """Distance in ranks between neighbours along `axis`."""
        return prod(map(self.size, self.placed[self.placed.index(axis) + 1 :]))

    def crosses_nodes(self, axis: str, per_node: int) -> bool:
        """Whether ranks of one group along `axis` are on several nodes of `per_node` devices."""
        span = self.size(axis) * self.stride(axis)
        return self.size(axis) > 1 and self.num_devices > per_node and per_node % span != 0

    def sharing_dp(self, shard: int) -> int:
        """The number of ranks along the axis dp within one ZeRO group of `shard` data-parallel
        ranks. A group also contains all ranks of ep and cp. `shard=0` means one group of all.
        """
        return shard // (self.ep * self.cp) if shard else self.size("dp")

    def can_share(self, shard: int) -> bool:
        """Whether the ranks of dp x cp can be divided into ZeRO groups of `shard` ranks: at least
        2, with all ranks of ep and cp in each.
        """
        return shard > 1 and self.dp * self.cp % shard == 0 and shard % (self.ep * self.cp) == 0

    def copies(self, shard: int) -> tuple[int, int]:
        """(number of ZeRO groups of `shard` data-parallel ranks, distance in ranks between
        corresponding ranks of neighbouring groups). `shard=0` means one group of all.
        """
        inside = self.sharing_dp(shard)
        return self.size("dp") // inside, self.stride("dp") * inside

    def levels(self, axes: Iterable[str], shard: int = 0) -> tuple[tuple[int, int], ...]:
        """(size, distance in ranks between neighbours) of nested groups of ranks that together
        cover `axes`, in the order of `AXES`. Axes of one rank are left out.

        Neighbouring axes whose ranks are evenly spaced are combined into one group. Of dp, only the
        ranks inside a ZeRO group of `shard` data-parallel ranks count (0: all).
        """
        found: list[tuple[int, int]] = []
        sizes = {axis: self.sharing_dp(shard) if axis == "dp" else self.size(axis) for axis in axes}
        for axis in (axis for axis in AXES if sizes.get(axis, 1) > 1):
            size, stride = sizes[axis], self.stride(axis)
            if found and found[-1][1] == size * stride:
                size *= found.pop()[0]
            found.append((size, stride))
        return tuple(found)

    def coordinate(self, rank: int, axis: str) -> int:
        """The coordinate of `rank` along `axis`."""
        return rank // self.stride(axis) % self.size(axis)

    def as_dict(self) -> dict[str, int | str]:
        """The pins that fix this mesh: the five degrees, 'order' and, if there is one, 'deal' (the
        group of devices of each pipeline rank), by name.
        """
        found = {degree: getattr(self, degree) for degree in DEGREES} | {"order": self.order}
        return found | ({"deal": self.deal} if self.deal else {})

    def __str__(self) -> str:
        return mesh_words(self.as_dict())


def _placed(order: str) -> tuple[str, ...]:
    """All five axes in the order of a text such as dp-pp-tp, outermost first. An omitted axis goes
    just outside its inner neighbour in `AXES`. Raises AutoparError if the text is not one of axes.
    """
    if not isinstance(order, str):
        raise AutoparError(
            f"order={shown(order)} must be a text such as dp-pp-tp: mesh axes, outermost first"
        )
    return _axes_of(order)


@cache
def _axes_of(order: str) -> tuple[str, ...]:
    found = order.split("-") if order else list(AXES)
    if len(set(found)) < len(found) or not set(found) <= set(AXES):
        raise AutoparError(
            f"order={shown(order)} must name mesh axes ({', '.join(AXES)}), each once, outermost first: dp-pp-tp"
        )
    for axis, inner in zip(reversed(AXES), (None, *reversed(AXES)), strict=False):
        if axis not in found:
            found.insert(len(found) if inner is None else found.index(inner), axis)
    return tuple(found)


def groups_of(deal: str) -> tuple[int, ...]:
    """The group of devices of each pipeline rank, from a text: 1x2-0x3 gives (1, 1, 0, 0, 0), and
    1-1-0 gives (1, 1, 0). Raises AutoparError for another text.
    """
    return _dealt(deal if isinstance(deal, str) else shown(deal))


@cache
def _dealt(deal: str) -> tuple[int, ...]:
    matches = [re.fullmatch(r"([0-9])(?:x([1-9][0-9]{0,4}))?", run) for run in deal.split("-")]
    runs = [run for run in matches if run is not None]
    if len(runs) < len(matches):
        raise AutoparError(
            f"deal={shown(deal)} must be a text such as 1x2-0x3: two ranks of the pipeline on group 1 of the devices, three on 0"
        )
    return tuple(int(run[1]) for run in runs for _ in range(int(run[2] or 1)))


def deal_text(groups: Iterable[int]) -> str:
    """The text for the groups of devices of all pipeline ranks: (1, 1, 0) -> `1x2-0x1`. Inverse of
    `groups_of`.
    """
    return "-".join(f"{group}x{len(list(run))}" for group, run in groupby(groups))


def mesh_words(mesh: Mapping[str, int | str]) -> str:
    """A mesh as text, such as `pp=2 dp=4 (dp-pp)`: degrees above 1, the order if it is not the
    default, and the deal. '1 device' if there is none of these. `mesh` is a (partial)
    `MeshShape.as_dict`.
    """
    named = [f"{degree}={mesh[degree]}" for degree in DEGREES if int(mesh.get(degree, 1)) > 1]
    where = [mesh.get("order"), mesh.get("deal") and f"groups {mesh['deal']}"]
    return " ".join(named + [f"({words})" for words in where if words]) or "1 device"
