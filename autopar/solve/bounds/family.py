"""Families of placements, and their division into parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from autopar.ir.annotated import AnnotatedBlock, AnnotatedModel
from autopar.solve.costs.schedule import Schedule

_NARROWEST = 1 / 64
"""A part is not divided further than to this fraction of the possible gain."""


_Allowed = dict[int, tuple[int, ...]]
"""For each op of a class (by index) whose strategies are restricted: indices of the remaining
strategies.
"""


@dataclass(frozen=True, slots=True)
class PlacementRange:
    """A set of placements by the costs of the repeated block: (least, most) of its forward seconds,
    and of its seconds once a step, both in the first recompute mode.
    """

    forward_s: tuple[float, float] = (0.0, inf)
    once_s: tuple[float, float] = (0.0, inf)

    def halves(
        self, least_s: tuple[float, float], slack_s: tuple[float, float]
    ) -> tuple[PlacementRange, PlacementRange] | None:
        """This part divided in two where it is widest; None if it is too narrow. `least_s` and
        `slack_s` are (forward seconds, seconds once a step). No placement takes less than
        `least_s`; beyond `slack_s` more, nothing is gained.
        """
        ends = self.forward_s, self.once_s
        inside = [
            (max(low, least), min(high, least + slack))
            for (low, high), least, slack in zip(ends, least_s, slack_s, strict=True)
        ]
        widths = [
            (high - low) / slack if slack else 0.0
            for (low, high), slack in zip(inside, slack_s, strict=True)
        ]
        which = widths.index(max(widths))
        if widths[which] <= _NARROWEST:
            return None
        (low, high), name = ends[which], ("forward_s", "once_s")[which]
        middle = inside[which][1] if high > inside[which][1] else sum(inside[which]) / 2
        return replace(self, **{name: (low, middle)}), replace(self, **{name: (middle, high)})


EVERY_PLACEMENT = PlacementRange()


@dataclass(frozen=True, slots=True)
class Family:
    """A set of placements, by the strategies that ops may use: `allowed` restricts some ops of each
    class.

    `bounds_s` has a lower bound in seconds for each schedule. `limited` are the schedules under
    which memory requires recomputation (None: unknown). `parts` has, by schedule, (bound, part) of
    the parts that might contain a faster placement than the best known. They were found when this
    family, or one that contains it, was bounded.
    """

    allowed: tuple[_Allowed, ...]
    bounds_s: Mapping[Schedule, float] = field(default_factory=dict)
    limited: frozenset[Schedule] | None = None
    parts: Mapping[Schedule, tuple[tuple[float, PlacementRange], ...]] = field(default_factory=dict)

    def by_op(self, classes: Sequence[int] | None = None) -> dict[tuple[int, int], tuple[int, ...]]:
        """The remaining strategies of restricted ops, by (place in `classes`, op index). `classes`
        are class indices; by default all.
        """
        own = range(len(self.allowed)) if classes is None else classes
        return {
            (place, op): left for place, c in enumerate(own) for op, left in self.allowed[c].items()
        }

    def within(self, other: Family) -> Family | None:
        """The intersection with another family. Bounds are those of this family, which is returned
        itself if nothing changes. None if the intersection is empty.
        """
        allowed = []
        for own, of in zip(self.allowed, other.allowed, strict=True):
            less = {op: tuple(n for n in own.get(op, left) if n in left) for op, left in of.items()}
            if not all(less.values()):
                return None
            allowed.append(own | less)
        return self if tuple(allowed) == self.allowed else replace(self, allowed=tuple(allowed))

    def key(self, classes: Sequence[int]) -> tuple:
        """A key that is equal for families that leave the same strategies to the ops of these
        classes.
        """
        return tuple(tuple(sorted(self.allowed[c].items())) for c in classes)


def narrowed(block: AnnotatedBlock, allowed: _Allowed) -> AnnotatedBlock:
    """The class `block` with only the strategies that `allowed` leaves to its ops."""
    return replace(
        block,
        ops=tuple(
            replace(op, strategies=tuple(op.strategies[n] for n in allowed[o]))
            if o in allowed
            else op
            for o, op in enumerate(block.ops)
        ),
    )


def left_of(model: AnnotatedModel, family: Family, c: int, op: int) -> tuple[int, ...]:
    """The indices of the strategies that a family leaves for op number `op` of class `c`; all if it
    is not restricted.
    """
    return family.allowed[c].get(op, tuple(range(len(model.classes[c].ops[op].strategies))))
