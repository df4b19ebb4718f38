"""Bounds a family of placements under one schedule, by the best staging of a row that costs no more
than any of them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from autopar.solve.bounds.family import EVERY_PLACEMENT, Family, PlacementRange
from autopar.solve.bounds.family_bounds import Families
from autopar.solve.costs.schedule import Schedule
from autopar.solve.staging.best_staging import best_staging
from autopar.solve.staging.unit_row import UnitRow

_PARTS, _CLOSE = 8, 1e-4
"""(the largest number of parts of a family that are bounded, the fraction by which this must be
able to raise the bound).
"""

PartBounds = tuple[tuple[float, PlacementRange], ...]
"""Parts of a family, each with its bound."""


@dataclass(slots=True, kw_only=True)
class RowBound:
    """A family (set of placements) under one schedule, of which `raised` computes a lower bound.
    `row_of` is `Families.row` for the family.

    `is_limited`: whether memory requires recomputation. If not, only the first recompute mode is
    used for the bound, otherwise all modes.
    """

    families: Families
    family: Family
    row_of: Callable[[bool, int, bool, PlacementRange], UnitRow | None]
    schedule: Schedule
    capacity_bytes: int | None
    upper_bound_s: float
    is_limited: bool

    def raised(self) -> tuple[float, PartBounds]:
        """(a lower bound on the family's step seconds, at most about `upper_bound_s`; the remaining
        parts with their bounds, () if the family was not divided). May set `is_limited`.
        """
        left = [
            (known_s, False, part) for known_s, part in self.family.parts.get(self.schedule, ())
        ]
        if not left:
            known_s = self._of_all()
            if known_s >= self.upper_bound_s or not self._gains_by_parts(known_s):
                return known_s, ()
            left = [(known_s, True, EVERY_PLACEMENT)]
        return self._parted(left)

    def _of_all(self) -> float:
        """The bound in seconds of all placements of the family, without dividing it.

        Segments are bounded separately first. If that is not enough, they are bounded together with
        their neighbours. If it was not enough for a larger family, bounding them separately is
        skipped.
        """
        known_s, closest = 0.0, bool(self.families.facts.units)
        for closely in dict.fromkeys((self.family.limited is not None and closest, closest)):
            known_s = self._of_part(EVERY_PLACEMENT, closely, self.upper_bound_s)
            if known_s >= self.upper_bound_s:
                break
        return known_s

    def _of_part(self, part: PlacementRange, closely: bool, up_to_s: float) -> float:
        schedule, all_modes, free_s = self.schedule, len(self.families.facts.models), 0.0
        found_s = 0.0
        for modes in (all_modes,) if self.is_limited else dict.fromkeys((1, all_modes)):
            row = self.row_of(schedule.stages_per_rank > 1, modes, closely, part)
            if row is None:
                return float("inf")
            found = best_staging(row, schedule, self.capacity_bytes, up_to_s)
            found_s = found if isinstance(found, float) else found.bound_s
            if modes == all_modes:
                break
            if isinstance(found, float) or not found.is_free:
                self.is_limited = True
                continue
            free_s = found_s
            if free_s >= up_to_s or schedule.ranks == 1 or not self.families.facts.hides:
                break  # with the least of all modes once a step: if that is not enough, it is asked what more backward takes for it
        return max(found_s, free_s)

    def _gains_by_parts(self, known_s: float) -> bool:
        """Whether dividing the family into parts can raise the bound `known_s` by more than a
        fraction of 1e-4. The narrowest part is bounded to find out.
        """
        least_s, slack_s = self.families.least_and_slack_s(self.family)
        if self.schedule.ranks == 1 or self.upper_bound_s == float("inf") or not any(slack_s):
            return False
        (forward_s, once_s), closest = least_s, bool(self.families.facts.units)
        narrowest = PlacementRange((forward_s, forward_s), (once_s, once_s))
        bound_s = self._of_part(narrowest, closest, 2 * self.upper_bound_s)
        return bound_s > known_s * (1 + _CLOSE)

    def _parted(
        self, left: Iterable[tuple[float, bool, PlacementRange]]
    ) -> tuple[float, PartBounds]:
        """(a lower bound on the family from its parts; the parts whose bound is below
        `upper_bound_s`, with their bounds).

        `left` has, for each part, its bound and whether this was computed for this family. Within a
        part, the total time of a block limits how little its backward can take. The part with the
        lowest bound is bounded next, or divided if it is already bounded.
        """
        least_s, slack_s = self.families.least_and_slack_s(self.family)
        closest, up_to_s = bool(self.families.facts.units), self.upper_bound_s
        parts = [
            (known_s, number, is_done, part) for number, (known_s, is_done, part) in enumerate(left)
        ]
        heapq.heapify(parts)
        number, last = len(parts), len(parts) + _PARTS
        while parts[0][0] < up_to_s and number < last:
            known_s, _, is_done, part = parts[0]
            smaller = part.halves(least_s, slack_s) if is_done else (part,)
            if smaller is None:
                break
            heapq.heappop(parts)
            for piece in smaller:
                number += 1
                bound_s = max(self._of_part(piece, closest, up_to_s), known_s)
                heapq.heappush(parts, (bound_s, number, True, piece))
        return parts[0][0], tuple(
            (known_s, part) for known_s, *_, part in parts if known_s < up_to_s
        )
