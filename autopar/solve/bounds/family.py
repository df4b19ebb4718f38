"""Parts of a family of plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from autopar.ir.annotated import AnnotatedBlock, AnnotatedModel
from autopar.solve.costs.schedule import Schedule

_NARROWEST = 1 / 64
"""Parts are not parted further than to so much of what can be gained."""


Allowed = dict[int, tuple[int, ...]]
"""Number of an op of a class -> numbers of the strategies that are left of it, where not all are."""


@dataclass(frozen=True, slots=True)
class Part:
    """Placements by what the repeated block takes: seconds of forward, and once a step in the first mode; each from so many to so many."""

    forward_s: tuple[float, float] = (0.0, inf)
    once_s: tuple[float, float] = (0.0, inf)

    def halves(
        self, least_s: tuple[float, float], slack_s: tuple[float, float]
    ) -> tuple[Part, Part] | None:
        """Two parts that have the same placements together, parted where this one is widest: no placement takes less than `least_s` of
        either, and nothing is gained beyond `slack_s` more.  None if it is too narrow to be parted."""
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


EVERY = Part()


@dataclass(frozen=True, slots=True)
class Family:
    """`allowed` by class.  `bounds_s`: no placement of it is faster under a schedule.  `limited`: schedules under which memory asks for
    recomputation; None before that is known.  `parts`: by schedule, those that may have a faster placement than was known when this family,
    or one that it is a part of, was bounded, each with its bound."""

    allowed: tuple[Allowed, ...]
    bounds_s: Mapping[Schedule, float] = field(default_factory=dict)
    limited: frozenset[Schedule] | None = None
    parts: Mapping[Schedule, tuple[tuple[float, Part], ...]] = field(default_factory=dict)

    def by_op(self, classes: Sequence[int] | None = None) -> dict[tuple[int, int], tuple[int, ...]]:
        """(place, op) -> strategies, of these classes in their order, or of all."""
        own = range(len(self.allowed)) if classes is None else classes
        return {
            (place, op): left for place, c in enumerate(own) for op, left in self.allowed[c].items()
        }

    def within(self, other: Family) -> Family | None:
        """This family without strategies that the other does not leave: itself if it has none, None if an op is left none."""
        allowed = []
        for own, of in zip(self.allowed, other.allowed, strict=True):
            less = {op: tuple(n for n in own.get(op, left) if n in left) for op, left in of.items()}
            if not all(less.values()):
                return None
            allowed.append(own | less)
        return self if tuple(allowed) == self.allowed else replace(self, allowed=tuple(allowed))

    def key(self, classes: Sequence[int]) -> tuple:
        """What tells families apart by what they leave these classes."""
        return tuple(tuple(sorted(self.allowed[c].items())) for c in classes)


def narrowed(block: AnnotatedBlock, allowed: Allowed) -> AnnotatedBlock:
    """A class whose ops have only the strategies that are left."""
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
    """The strategies that a family leaves an op of a class of its model."""
    return family.allowed[c].get(op, tuple(range(len(model.classes[c].ops[op].strategies))))
