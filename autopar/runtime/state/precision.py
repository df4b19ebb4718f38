"""Precision: the dtype of forward and backward, the dtype of the trained weights, and the loss
scale.

- fp32, fp64: one dtype for everything.
- bf16: bf16 leaves and fp32 master weights. Gradients are summed, over micro-batches and over
  ranks, in fp32.
- fp16: like bf16 with fp16 leaves. The loss is scaled so that small gradients do not vanish.

The loss scale follows Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2, with
the constants of torch.amp.GradScaler. If a gradient of any rank is not finite, the scale is halved
and the step is skipped. After 2000 steps without that, the scale is doubled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autopar.errors import AutoparError
from autopar.ir.plan_checks import HALF
from autopar.rewrite.collectives.axes import AxisGroup
from autopar.rewrite.collectives.primitives import apply_primitive

PRECISION_DTYPES = {
    "fp32": torch.float32,
    "fp64": torch.float64,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""The precisions that the engine runs, with the dtype of forward and backward."""

FIRST_SCALE, GROWTH, BACKOFF, GROWTH_INTERVAL = 2.0**16, 2.0, 0.5, 2000

NAMES = {dtype: name for name, dtype in PRECISION_DTYPES.items()}


def main_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of most elements of the trained floating-point parameters (of all, if none is
    trained); fp32 for a model without any.
    """
    floating = [p for p in model.parameters() if p.is_floating_point()]
    sizes: Counter[torch.dtype] = Counter()
    for parameter in [p for p in floating if p.requires_grad] or floating:
        sizes[parameter.dtype] += parameter.numel()
    return max(sizes, key=lambda dtype: (sizes[dtype], dtype.itemsize), default=torch.float32)


def default_precision(model: nn.Module, of_fp32: str) -> str:
    """The default precision of a model: its own, but `of_fp32` for an fp32 model.

    Raises AutoparError for a dtype that the engine does not support.
    """
    main = main_dtype(model)
    if main not in NAMES:
        raise AutoparError(
            f"most parameters of {type(model).__name__} are {_short(main)}, which the engine does not compute in: pass "
            f"precision= {', '.join(PRECISION_DTYPES)}, to which they are then cast"
        )
    return of_fp32 if main == torch.float32 else NAMES[main]


def precision_note(
    model: nn.Module, inputs: Mapping[str, Tensor], precision: str, kept: Collection[str] = ()
) -> str:
    """A note on what a default precision changes for this model: its dtype, and the tensors of
    other dtypes that are cast.

    `precision` is the default that was chosen; `kept` are buffers that are not cast. Returns '' if
    every tensor keeps its dtype and no master has another one. Inputs are named if they lose
    digits.
    """
    main, found = main_dtype(model), []
    if NAMES[main] != precision:
        found.append(
            f"the model is {NAMES[main]} and runs in {precision} with fp32 master weights, the default on GPUs; "
            f"precision='{NAMES[main]}' keeps its dtype"
        )
    elif precision in HALF:
        found.append(f"the model runs in its own dtype, {precision}, with fp32 master weights")
    cast = [
        _named(name, t.dtype)
        for name, t in (*model.named_parameters(), *model.named_buffers())
        if t.is_floating_point() and t.dtype != main and name not in kept
    ]
    cast += [
        _named(f"input {name}", t.dtype)
        for name, t in inputs.items()
        if t.is_floating_point() and t.dtype.itemsize > main.itemsize
    ]
    if cast:
        more = f" and {len(cast) - 3} more" if len(cast) > 3 else ""
        found.append(
            f"tensors of other dtypes are cast to {precision}: {', '.join(cast[:3])}{more}; precision= chooses another dtype"
        )
    return "; ".join(found)


def _named(name: str, dtype: torch.dtype) -> str:
    return f"{name} ({_short(dtype)})"


def _short(dtype: torch.dtype) -> str:
    return NAMES.get(dtype, str(dtype).removeprefix("torch."))


def captured_in(precision: str | None, runs_here: bool) -> str | None:
    """The precision in which to capture a model: `precision` itself for a program that the engine
    will run, and for fp32 and fp64. A prediction of other software in half precision gets None,
    which means the model's own: the cost models know what stays in fp32.
    """
    return precision if runs_here or precision not in HALF else None


def master_dtype(precision: str) -> torch.dtype:
    """The dtype of master weights, of accumulated gradients, and of optimizer state."""
    return torch.float64 if precision == "fp64" else torch.float32


@dataclass(slots=True)
class LossScale:
    """The loss scale: under fp16 it is `dynamic`, for other precisions always 1. `good_steps`
    counts steps since it last changed.
    """

    scale: float = 1.0
    dynamic: bool = False
    good_steps: int = 0

    @classmethod
    def of(cls, precision: str) -> LossScale:
        """The initial loss scale of a precision."""
        return cls(FIRST_SCALE, True) if precision == "fp16" else cls()

    def unscale(
        self, grads: Mapping[str, torch.Tensor], axes: Iterable[AxisGroup], device: torch.device
    ) -> bool:
        """Divide the gradients by the scale, in place. Returns whether the step counts: all
        gradients are finite, on every rank of the axes. If not, the scale is halved; after enough
        good steps it is doubled. Without a dynamic scale nothing changes, and the result is True.
        """
        if not self.dynamic:
            return True
        broken = torch.zeros((), device=device)
        for grad in grads.values():
            grad.div_(self.scale)
            broken += (~grad.isfinite()).any()
        for group in axes:  # replicas may round differently: all must skip, or none
            broken = apply_primitive("all_reduce", broken, group)
        finite = not bool(broken)
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.scale *= BACKOFF
        elif self.good_steps == GROWTH_INTERVAL:
            self.scale, self.good_steps = self.scale * GROWTH, 0
        return finite
