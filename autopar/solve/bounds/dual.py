"""Maximizes a Lagrangian bound over the price of a byte."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

_CLOSE = 1e-5
"""The search for the best price ends if it could raise the bound by at most this fraction."""


@dataclass(slots=True)
class Dual:
    """Searches for the maximum of a concave function over prices u >= 0, by cutting planes. `known`
    has the evaluated points as (price, value, slope); callers append to it.
    """

    known: list[tuple[float, float, float]] = field(default_factory=list)  # price, value, slope

    @property
    def best_s(self) -> float:
        """The largest known value of the function; 0 if none is known."""
        return max((value for _, value, _ in self.known), default=0.0)

    @property
    def best_price(self) -> float:
        """The price with the largest known value; 0 if none is known."""
        return max(self.known, key=lambda point: point[1])[0] if self.known else 0.0

    @property
    def turning_price(self) -> float | None:
        """The best price, if it is positive and the maximum is bracketed by known slopes; otherwise
        None.
        """
        slopes = [slope for *_, slope in self.known]
        return (
            self.best_price or None
            if self.best_s < inf and max(slopes, default=0.0) > 0 > min(slopes)
            else None
        )

    def next_prices(self, likely: float, most: float) -> tuple[float, ...]:
        """The prices to evaluate next: first 0 and `likely`; while the function still rises, `most`
        or beyond; then one between a rising and a falling point. () if the maximum cannot be much
        larger than the best known value.
        """
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
