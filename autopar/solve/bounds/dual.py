"""A bound as a function of prices of memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

_CLOSE = 1e-5
"""By what share the best price could still raise a bound when the search for it ends."""


@dataclass(slots=True)
class Dual:
    """max over prices u >= 0 of a concave function, of which each value comes with a slope: cutting planes."""

    known: list[tuple[float, float, float]] = field(default_factory=list)  # price, value, slope

    @property
    def best_s(self) -> float:
        """The largest value known."""
        return max((value for _, value, _ in self.known), default=0.0)

    @property
    def best_price(self) -> float:
        """Where the function is largest, as far as it is known."""
        return max(self.known, key=lambda point: point[1])[0] if self.known else 0.0

    @property
    def turning_price(self) -> float | None:
        """The best price, if it is above nothing and the function is known to rise and to fall."""
        slopes = [slope for *_, slope in self.known]
        return (
            self.best_price or None
            if self.best_s < inf and max(slopes, default=0.0) > 0 > min(slopes)
            else None
        )

    def next_prices(self, likely: float, most: float) -> tuple[float, ...]:
        """Where the function may be largest: first at nothing and at the `likely` price, behind what rises at `most` or beyond; none if it
        cannot be much larger than what is known."""
        if not self.known:
            return (0.0, likely) if likely else (0.0,)
        rising = [point for point in self.known if point[2] > 0]
        falling = [point for point in self.known if point[2] <= 0]
        if not rising:
            return ()
        price, value, slope = max(rising)
        if not falling:
            return (max(most, 2 * price),)
        other, other_value, other_slope = min(falling)
        if other_slope - slope == 0:
            return ()
        found = (other_value - other_slope * other - value + slope * price) / (slope - other_slope)
        most = value + slope * (found - price)
        return (found,) if most - self.best_s > _CLOSE * abs(most) and price < found < other else ()
