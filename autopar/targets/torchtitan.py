"""torchtitan."""

from __future__ import annotations

from autopar.targets.target import Target
from autopar.targets.torchtitan_options import stages_for
from autopar.targets.torchtitan_read import looks_like_torchtitan, read_torchtitan
from autopar.targets.torchtitan_rules import refusals, restriction
from autopar.targets.torchtitan_words import ASPECTS, words_of
from autopar.targets.torchtitan_write import flags_of, write_torchtitan

TORCHTITAN = Target(
    "torchtitan",
    "torchtitan 0.3",
    looks_like_torchtitan,
    read_torchtitan,
    refusals,
    restriction,
    write_torchtitan,
    "torchtitan",
    flags_of,
    ("titan",),
    dashes="--",
    zero=(0, 2, 3),
    stages=stages_for,
    words=words_of,
    aspects=ASPECTS,
)
"""torchtitan."""
