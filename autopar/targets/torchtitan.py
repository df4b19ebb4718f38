"""torchtitan."""

from __future__ import annotations

from autopar.targets.target import Target
from autopar.targets.torchtitan_options import torchtitan_stages
from autopar.targets.torchtitan_read import looks_like_torchtitan, read_torchtitan
from autopar.targets.torchtitan_rules import torchtitan_refusals, torchtitan_restriction
from autopar.targets.torchtitan_words import TORCHTITAN_ASPECTS, torchtitan_words
from autopar.targets.torchtitan_write import torchtitan_flags, write_torchtitan

TORCHTITAN = Target(
    "torchtitan",
    "torchtitan 0.3",
    looks_like_torchtitan,
    read_torchtitan,
    torchtitan_refusals,
    torchtitan_restriction,
    write_torchtitan,
    "torchtitan",
    torchtitan_flags,
    ("titan",),
    dashes="--",
    zero=(0, 2, 3),
    stages=torchtitan_stages,
    words=torchtitan_words,
    aspects=TORCHTITAN_ASPECTS,
)
"""torchtitan."""
