"""Bytes that a parameter keeps resident under a precision recipe and a ZeRO stage.

Recipes, in bytes per parameter (parameter + gradient + optimizer), Adam with two moments:

    fp32   4 + 4 +  8    all in fp32
    fp64   8 + 8 + 16    all in fp64
    bf16   2 + 4 + 12    bf16 parameters; gradients accumulated and reduced in fp32; fp32 master copy and two fp32 moments
    fp16   2 + 2 + 16    fp16 parameters and gradients; fp32 master copy, fp32 gradient copy and two fp32 moments

The last two are the 18 and 20 bytes per parameter of Megatron Core's distributed optimizer guide (its table of theoretical memory).
ZeRO stages follow Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020, section 5.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar_cost_models.checks import nearest, whole

RECIPES: dict[str, tuple[int, int, int]] = {"fp32": (4, 4, 8), "fp64": (8, 8, 16), "bf16": (2, 4, 12), "fp16": (2, 2, 16)}
"""precision -> bytes per parameter of the parameter, its gradient and its optimizer state."""

ACTIVATION_ITEMSIZE: dict[str, int] = {"fp32": 4, "fp64": 8, "bf16": 2, "fp16": 2}


@dataclass(frozen=True, slots=True)
class StaticMemory:
    """Bytes resident on one device through the whole step."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


def static_bytes(numel: int, precision: str, zero: int, dp: int) -> StaticMemory:
    """Resident bytes of `numel` parameters (as held before data-parallel sharding) on one of `dp` data-parallel ranks.

    ZeRO 1 shards the optimizer state over dp, 2 also the gradients, 3 also the parameters; shards are rounded up to whole elements.
    Raises ValueError for an unknown precision or stage.
    """
    whole("numel", numel, least=0)
    whole("dp", dp)
    if zero not in (0, 1, 2, 3) or isinstance(zero, bool):
        raise ValueError(f"zero={zero!r} is not a ZeRO stage; 0, 1, 2 and 3 are")
    parameter, gradient, optimizer = _entry(RECIPES, precision)
    shard = -(-numel // dp)
    return StaticMemory(
        parameters=parameter * (shard if zero >= 3 else numel),
        gradients=gradient * (shard if zero >= 2 else numel),
        optimizer=optimizer * (shard if zero >= 1 else numel),
    )


def activation_itemsize(precision: str) -> int:
    """Bytes of one activation element."""
    return _entry(ACTIVATION_ITEMSIZE, precision)


def _entry(table: dict, precision: str):
    if precision not in table:
        raise ValueError(f"unknown precision {precision!r}; {nearest(str(precision), list(table))}")
    return table[precision]
