"""How wrong predicted memory is, the chance that a prediction fits, and what to keep free for it."""

from __future__ import annotations

from math import erf, exp, log, sqrt
from statistics import NormalDist

SPREAD = 0.11
"""Standard deviation of log(needed / predicted memory). Fit: the maximum likelihood of which of the
2,037 layouts of nanotron in the ultra-scale playbook ran (`foreign/published/chances.py: fitted_outcomes`).
6 % of them fail at any size, since some crashed for other reasons than memory.
"""

FIT_CHANCE = 0.95
"""The chance to fit that a plan has at least by default. On an H100, such plans take up to 66.5 GiB.
In the ultra-scale playbook's runs on 8 and 16 H100, steps took as long as predicted up to 70 GiB.
Above, they took 2.9 to 6.6 times as long, since the allocator frees and tries again.
"""


_ROUNDING = 1e-6
"""A plan may take all of the room that it has: bytes are whole, so its chance may be this much less."""


def fit_chance(predicted_bytes: float, memory_bytes: float, spread: float = SPREAD) -> float:
    """The chance that what is predicted to need `predicted_bytes` fits `memory_bytes`: memory has a
    normal error of `spread` in its logarithm.
    """
    room = log(memory_bytes / max(predicted_bytes, 1.0))
    return (1 + erf(room / spread / sqrt(2))) / 2


def is_sure(chance: float) -> bool:
    """Whether a chance to fit is at least `FIT_CHANCE`, as far as the rounding of bytes tells."""
    return chance >= FIT_CHANCE - _ROUNDING


def headroom_for(chance: float) -> float:
    """The fraction of memory to keep free, so that a plan fits at least with `chance`."""
    return 1 - exp(-SPREAD * NormalDist().inv_cdf(chance))


HEADROOM = headroom_for(FIT_CHANCE)
"""The fraction of a GPU's memory that a plan leaves free by default: 16.5 %, at which the chance to
fit is `FIT_CHANCE`.
"""
