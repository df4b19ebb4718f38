"""Resident bytes of parameters, gradients and optimizer state under a precision recipe and a ZeRO
stage.

Recipes, in bytes per parameter (parameter + gradient + optimizer), for Adam with two moments:

- fp32: 4 + 4 + 8. All in fp32.
- fp64: 8 + 8 + 16. All in fp64.
- bf16: 2 + 4 + 12. bf16 parameters; gradients accumulated and reduced in fp32; fp32 master copy and
  two fp32 moments.
- fp16: 2 + 4 + 12. The same with fp16 parameters (`autopar/runtime/state/precision.py`).

Other frameworks differ, in `STATE_RECIPES`:

- fp16_gradients: 2 + 2 + 16. Megatron in fp16: fp16 gradients; fp32 master copy, fp32 gradient copy
  and two fp32 moments.
- bf16_gradients: 2 + 2 + 12. Megatron without accumulation in fp32 (grad_reduce_in_fp32=False).
- copied_gradients: 2 + 6 + 12. nanotron: the 16-bit gradients of a micro-batch, and the fp32
  buffers to which they are added (src/nanotron/optim/gradient_accumulator.py).
- fsdp: 4 + 4 + 8. FSDP with mixed precision: fp32 shards, without the gathered bf16 copies.
- deepspeed_fp16: 2 + 2 + 18. DeepSpeed, fp16 with ZeRO-1: a partition also has fp16 and fp32
  gradients (stage_1_and_2.py, step).
- deepspeed_bf16: 2 + 8 + 12. DeepSpeed's BF16_Optimizer in pipelines. It holds fp32 gradients and
  bf16 gradients of the last micro-batch, which are cleared only before the next backward. The
  all-reduce sends a further bf16 copy (bf16_optimizer.py update_hp_grads, pipe/engine.py
  _bf16_reduce_grads, engine.py allreduce_bucket, release 0.6).
- bf16_moments: 2 + 4 + 8. fp32 master copy, and two bf16 moments (Megatron Core's
  --exp-avg-dtype, --exp-avg-sq-dtype).
- 8bit_moments: 2 + 4 + 6. fp32 master copy, and two moments of 8 bits (Dettmers et al.,
  arXiv:2110.02861; their scales for blocks of 2,048 elements are not counted).
- bf16_only: 2 + 2 + 4. Everything in bf16, without a master copy.

bf16 and fp16_gradients are the 18 and 20 bytes per parameter of the memory table in Megatron Core's
distributed optimizer guide.

Offloaded optimizer state lies in host memory and is updated there, with its master weights and
incoming gradients (Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training", USENIX
ATC 2021). The device keeps parameters and gradients.

ZeRO stages follow Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models", SC 2020, section 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from autopar_cost_models.checks import nearest, whole
from autopar_cost_models.constants import NCCL_CHANNELS, NCCL_CONNECTION_BYTES, NCCL_CONNECTIONS
from autopar_cost_models.echo import shown

BYTES_PER_PARAMETER: dict[str, tuple[int, int, int]] = {
    "fp32": (4, 4, 8),
    "fp64": (8, 8, 16),
    "bf16": (2, 4, 12),
    "fp16": (2, 4, 12),
}
"""Bytes per parameter by precision: (parameter, gradient, optimizer state)."""

STATE_RECIPES: dict[str, tuple[int, int, int]] = {
    "fp16_gradients": (2, 2, 16),
    "bf16_gradients": (2, 2, 12),
    "copied_gradients": (2, 6, 12),
    "fsdp": (4, 4, 8),
    "deepspeed_fp16": (2, 2, 18),
    "deepspeed_bf16": (2, 8, 12),
    "bf16_moments": (2, 4, 8),
    "8bit_moments": (2, 4, 6),
    "bf16_only": (2, 2, 4),
}
"""Like `BYTES_PER_PARAMETER`, for 16-bit training in other frameworks, by recipe name."""

OFFLOADS = ("none", "optimizer", "parameters")
"""What lies in host memory: nothing, the optimizer state, or parameters and optimizer state."""

ACTIVATION_ITEMSIZE: dict[str, int] = {"fp32": 4, "fp64": 8, "bf16": 2, "fp16": 2}


@dataclass(frozen=True, slots=True)
class StaticMemory:
    """Bytes resident on one device throughout the step. `host` is the bytes in the memory of its
    host, which are not part of the total.
    """

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
    """Resident bytes of `numel` parameters on one of `dp` data-parallel ranks; `numel` counts them
    before ZeRO shards them.

    ZeRO-1 shards the optimizer state over dp, ZeRO-2 also the gradients, ZeRO-3 also the
    parameters. Shards round up to whole elements. `recipe` names a row of `STATE_RECIPES`; None
    selects the recipe of the precision. For `offload` see `OFFLOADS`. Raises ValueError for an
    unknown precision, recipe, stage or offload.
    """
    whole("numel", numel, least=0)
    whole("dp", dp)
    if zero not in (0, 1, 2, 3) or isinstance(zero, bool):
        raise ValueError(f"zero={shown(zero)} is not a ZeRO stage; 0, 1, 2 and 3 are")
    if offload not in OFFLOADS:
        raise ValueError(f"offload={shown(offload)} is not known; {' and '.join(OFFLOADS)} are")
    parameter, gradient, optimizer = (
        _entry(BYTES_PER_PARAMETER, precision) if recipe is None else _entry(STATE_RECIPES, recipe)
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
    """Bytes of device memory that NCCL allocates on one rank for `groups` communicators."""
    return (
        whole("groups", groups, least=0) * NCCL_CHANNELS * NCCL_CONNECTIONS * NCCL_CONNECTION_BYTES
    )


def activation_itemsize(precision: str) -> int:
    """Bytes of one activation element in this precision. Raises ValueError for an unknown
    precision.
    """
    return _entry(ACTIVATION_ITEMSIZE, precision)


_T = TypeVar("_T")


def _entry(table: Mapping[str, _T], precision: str) -> _T:
    if precision not in table:
        what = "recipe" if table is STATE_RECIPES else "precision"
        raise ValueError(f"unknown {what} {shown(precision)}; {nearest(precision, list(table))}")
    return table[precision]
