"""Measured curves: seconds by size, as `autopar calibrate` writes them into a cluster file.

A device or link with a curve is priced by the curve instead of the formula. `roofline.py` uses
curves for products and memory-bound kernels, `collectives.py` for collectives inside a node.
Between two points the curve interpolates log seconds linearly over log size. Below the first point
it keeps that point's seconds, which are latency. Beyond the last point it keeps that point's rate.
"""

from __future__ import annotations

from bisect import bisect_left
from math import exp, log

from autopar_cost_models.checks import positive
from autopar_cost_models.echo import shown

Curve = tuple[tuple[float, float], ...]
"""Points (size, seconds) in ascending order of size. The size is in bytes, or in FLOPs for a matrix
product.
"""


def curve(name: str, points: object) -> Curve:
    """`points`, checked, as a curve. Raises ValueError, with `name`, unless they are two or more
    pairs of positive numbers with ascending sizes.
    """
    if not isinstance(points, (list, tuple)) or len(points) < 2:
        raise ValueError(
            f"{name}={shown(points)} must be a list of two or more [size, seconds] pairs"
        )
    found: list[tuple[float, float]] = []
    for place, point in enumerate(points):
        if not isinstance(point, (list, tuple)) or len(point) != 2:
            raise ValueError(
                f"{name}: point {place} is {shown(point)} and must be a pair [size, seconds]; measure it again or leave it out"
            )
        found.append(
            (
                positive(f"{name}: size of point {place}", point[0]),
                positive(f"{name}: seconds of point {place}", point[1]),
            )
        )
        if place and found[-1][0] <= found[-2][0]:
            raise ValueError(
                f"{name}: sizes must ascend, and point {place} has {found[-1][0]:g} after {found[-2][0]:g}"
            )
    return tuple(found)


def curve_s(points: Curve, size: float) -> float:
    """Seconds at `size`, interpolated or extrapolated from the curve."""
    first, last = points[0], points[-1]
    if size <= first[0]:
        return first[1]
    if size >= last[0]:
        return last[1] * (size / last[0])
    place = bisect_left(points, (size, 0.0))
    (x0, y0), (x1, y1) = points[place - 1], points[place]
    if size == x1:
        return y1
    return exp(log(y0) + (log(y1) - log(y0)) * (log(size) - log(x0)) / (log(x1) - log(x0)))


def best_rate(points: Curve) -> float:
    """The highest size / seconds over a curve's points."""
    return max(size / seconds for size, seconds in points)
