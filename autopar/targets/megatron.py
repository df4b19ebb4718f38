"""Megatron-LM and what reads its arguments."""

from __future__ import annotations

from autopar.targets.megatron_options import megatron_stages
from autopar.targets.megatron_read import looks_like_megatron, read_megatron
from autopar.targets.megatron_rules import megatron_refusals, megatron_restriction
from autopar.targets.megatron_words import (
    MEGATRON_ASPECTS,
    megatron_held_pins,
    megatron_words,
    within,
)
from autopar.targets.megatron_write import megatron_flags, write_megatron
from autopar.targets.target import Target

MEGATRON = Target(
    "megatron",
    "Megatron-LM (megatron-core 0.19)",
    looks_like_megatron,
    read_megatron,
    megatron_refusals,
    megatron_restriction,
    write_megatron,
    "megatron",
    megatron_flags,
    ("megatron-lm", "mcore"),
    dashes="--",
    sharding="dist_optimizer",
    overlaps=True,
    stages=megatron_stages,
    words=megatron_words,
    aspects=MEGATRON_ASPECTS,
    held=megatron_held_pins,
    within=within,
)
"""Megatron-LM."""
