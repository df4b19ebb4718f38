"""Bytes that a parameter keeps resident under a precision recipe and a ZeRO stage.

Recipes, in bytes per parameter (parameter + gradient + optimizer), Adam with two moments:

    fp32   4 + 4 +  8    all in fp32
    fp64   8 + 8 + 16    all in fp64
    bf16   2 + 4 + 12    bf16 parameters; gradients accumulated and reduced in fp32; fp32 master copy and two fp32 moments
    fp16   2 + 4 + 12    the same with fp16 parameters (`autopar/runtime/state/precision.py`)

What a framework holds instead, in `STATE_RECIPES`:

    fp16_gradients   2 + 2 + 16   Megatron in fp16: fp16 gradients; fp32 master copy, fp32 gradient copy and two fp32 moments
    bf16_gradients   2 + 2 + 12   Megatron without accumulation in fp32 (grad_reduce_in_fp32=False)
    fsdp             4 + 4 +  8   FSDP with mixed precision: fp32 shards; the bf16 copies that it gathers are no part of these
    deepspeed_fp16   2 + 2 + 18   DeepSpeed, fp16 with ZeRO-1: of its partition also fp16 and fp32 gradients (stage_1_and_2.py, step)
    deepspeed_bf16   2 + 8 + 12   DeepSpeed's BF16_Optimizer in pipelines: fp32 gradients, bf16 gradients of the last micro-batch, which are
                                  cleared before the next backward only, and the bf16 copy that the all-reduce sends (bf16_optimizer.py
                                  update_hp_grads, pipe/engine.py _bf16_reduce_grads, engine.py allreduce_bucket, release 0.6)

bf16 and fp16_gradients are the 18 and 20 bytes per parameter of Megatron Core's distributed optimizer guide (its table of memory).

Offloaded optimizer state (Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training", USENIX ATC 2021) is in host memory, with
the weights that it trains and the gradients that it is given, where it is updated; the device keeps parameters and gradients.

ZeRO stages follow Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020, section 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from autopar_cost_models.checks import nearest, whole
from autopar_cost_models.constants import NCCL_CHANNELS, NCCL_CONNECTION_BYTES, NCCL_CONNECTIONS
from autopar_cost_models.echo import shown

RECIPES: dict[str, tuple[int, int, int]] = {
    "fp32": (4, 4, 8),
    "fp64": (8, 8, 16),
    "bf16": (2, 4, 12),
    "fp16": (2, 4, 12),
}
"""precision -> bytes per parameter of the parameter, its gradient and its optimizer state."""

STATE_RECIPES: dict[str, tuple[int, int, int]] = {
    "fp16_gradients": (2, 2, 16),
    "bf16_gradients": (2, 2, 12),
    "fsdp": (4, 4, 8),
    "deepspeed_fp16": (2, 2, 18),
    "deepspeed_bf16": (2, 8, 12),
}
"""As `RECIPES`, by name: what trains in 16 bits holds in some frameworks."""

OFFLOADS = ("none", "optimizer", "parameters")
"""What is in host memory: nothing, the optimizer state, or parameters and optimizer state."""

ACTIVATION_ITEMSIZE: dict[str, int] = {"fp32": 4, "fp64": 8, "bf16": 2, "fp16": 2}


@dataclass(frozen=True, slots=True)
class StaticMemory:
    """Bytes resident on one device through the whole step; `host` are those in the memory of its host, no part of the total."""

    parameters: int
    gradients: int
    optimizer: int
    host: int = 0

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return self.parameters + self.gradients + self.optimizer


def static_bytes(
    numel: int, precision: str, zero: int, dp: int, recipe: str | None = None, offload: str = "none"
) -> StaticMemory:
    """Resident bytes of `numel` parameters (as held before data-parallel sharding) on one of `dp` data-parallel ranks.

    ZeRO 1 shards the optimizer state over dp, 2 also the gradients, 3 also the parameters; shards are rounded up to whole elements.
    `recipe` names a row of `STATE_RECIPES`; None is the recipe of the precision.  `offload`: see `OFFLOADS`.
    Raises ValueError for an unknown precision, recipe, stage or offload.
    """
    whole("numel", numel, least=0)
    whole("dp", dp)
    if zero not in (0, 1, 2, 3) or isinstance(zero, bool):
        raise ValueError(f"zero={shown(zero)} is not a ZeRO stage; 0, 1, 2 and 3 are")
    if offload not in OFFLOADS:
        raise ValueError(f"offload={shown(offload)} is not known; {' and '.join(OFFLOADS)} are")
    parameter, gradient, optimizer = (
        _entry(RECIPES, precision) if recipe is None else _entry(STATE_RECIPES, recipe)
    )
    shard = -(-numel // dp)
    owned = shard if zero >= 1 else numel
    found = StaticMemory(
        parameters=parameter * (shard if zero >= 3 else numel),
        gradients=gradient * (shard if zero >= 2 else numel),
        optimizer=optimizer * owned,
    )
    if offload == "none":
        return found
    moved = offload == "parameters"
    # in 16 bits the master copy is optimizer state already
    copy = parameter if moved or activation_itemsize(precision) != 2 else 0
    found = replace(found, optimizer=0, host=(optimizer + copy + gradient) * owned)
    return replace(found, parameters=0) if moved else found


def communicator_bytes(groups: int) -> int:
    """Bytes that NCCL allocates for `groups` communicators of a device."""
    return (
        whole("groups", groups, least=0) * NCCL_CHANNELS * NCCL_CONNECTIONS * NCCL_CONNECTION_BYTES
    )


def activation_itemsize(precision: str) -> int:
    """Bytes of one activation element."""
    return _entry(ACTIVATION_ITEMSIZE, precision)


_T = TypeVar("_T")


def _entry(table: Mapping[str, _T], precision: str) -> _T:
    if precision not in table:
        what = "recipe" if table is STATE_RECIPES else "precision"
        raise ValueError(f"unknown {what} {shown(precision)}; {nearest(precision, list(table))}")
    return table[precision]
