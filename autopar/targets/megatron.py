"""Megatron-LM and what reads its arguments."""

from __future__ import annotations

from autopar.targets.megatron_options import stages_for
from autopar.targets.megatron_read import looks_like_megatron, read_megatron
from autopar.targets.megatron_rules import refusals, restriction
from autopar.targets.megatron_words import ASPECTS, held, within, words_of
from autopar.targets.megatron_write import flags_of, write_megatron
from autopar.targets.target import Target

MEGATRON = Target(
    "megatron",
    "Megatron-LM (megatron-core 0.19)",
    looks_like_megatron,
    read_megatron,
    refusals,
    restriction,
    write_megatron,
    "megatron",
    flags_of,
    ("megatron-lm", "mcore"),
    dashes="--",
    sharding="dist_optimizer",
    overlaps=True,
    stages=stages_for,
    words=words_of,
    aspects=ASPECTS,
    held=held,
    within=within,
)
"""Megatron-LM."""
