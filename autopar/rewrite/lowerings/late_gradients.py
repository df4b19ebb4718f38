"""A linear layer that computes the gradient of its weight while the gradient of its input is
communicated.

    pending = all_gather(x, "tp", ..., async_op=True)          backward runs from here upwards:
    late = late_gradient(weight)                                 4. wait for the gradient of x
    y = late_linear(wait(pending), weight, late, bias)           3. the gradient of the weight, a matrix product
                                                                 2. start the collective of the gradient of x
                                                                 1. the gradient of the linear's input

Autograd runs ready nodes in the reverse order of their creation. The place of the call of
`late_gradient` therefore decides when the weight's gradient is computed. Megatron-LM does the same
inside one layer (Narayanan et al., SC 2021, and its `linear_with_grad_accumulation`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopar.rewrite.lowerings.kept_shards import GatheredAgain, keeping_shards, unpack


@dataclass(slots=True)
class _Handle:
    """Holds a function that computes the weight's gradient. It is set by backward once the gradient
    of the layer's result is known; None before.
    """

    compute: Callable[[], Tensor] | None = None


@dataclass(frozen=True, slots=True)
class LateGradient:
    """The path of a weight's gradient. `token` is an empty tensor through which autograd reaches
    the weight. Both fields are None if autograd computes the gradient as usual.
    """

    token: Tensor | None = None
    handle: _Handle | None = None


class _Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, handle: _Handle) -> Tensor:
        ctx.handle = handle
        return weight.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        compute, ctx.handle.compute = ctx.handle.compute, None
        return compute(), None


class _LateLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        token: Tensor,
        handle: _Handle,
        transposed: bool,
        again: GatheredAgain | None,
    ) -> Tensor:
        ctx.handle, ctx.transposed = handle, transposed
        ctx.again = again if ctx.needs_input_grad[3] else None
        kept = x if ctx.again is None else ctx.again.pack(x)
        ctx.kept = None if isinstance(kept, Tensor) else kept
        ctx.save_for_backward(*((x, weight) if ctx.kept is None else (weight,)))
        return torch.nn.functional.linear(x, weight.t() if transposed else weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *saved, weight = ctx.saved_tensors
        rows, transposed, kept = _rows(grad), ctx.transposed, ctx.kept
        if kept is not None:
            ctx.again.start()  # which the product below hides

        def weight_gradient() -> Tensor:
            x = _rows(unpack(saved[0] if kept is None else kept))
            return x.t() @ rows if transposed else rows.t() @ x

        if ctx.needs_input_grad[3]:
            ctx.handle.compute = weight_gradient
        dx = dbias = None
        if ctx.needs_input_grad[0]:
            dx = grad @ (weight.t() if transposed else weight)
        if ctx.needs_input_grad[2]:
            dbias = rows.sum(0)
        return dx, None, dbias, grad.new_empty(0), None, None, None


def _rows(x: Tensor) -> Tensor:
    """x (..., width) as a matrix (rows, width); any size may be zero."""
    return x.reshape(prod(x.shape[:-1]), x.shape[-1])


def _is_plain(weight: Tensor) -> bool:
    """Whether plain autograd must be used: a compiler orders backward itself, and autocast casts
    operands itself.
    """
    device = weight.device.type
    return torch.compiler.is_compiling() or (
        torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    )


def late_gradient(weight: Tensor) -> LateGradient:
    """A path for the gradient of `weight`, to be passed to `late_linear`. Backward computes the
    gradient when it reaches this call. Has no token under a compiler or autocast.
    """
    if _is_plain(weight):
        return LateGradient()
    handle = _Handle()
    return LateGradient(_Late.apply(weight, handle), handle)


def late_linear(
    x: Tensor,
    weight: Tensor,
    late: LateGradient,
    bias: Tensor | None = None,
    transposed: bool = False,
    again: GatheredAgain | None = None,
) -> Tensor:
    """The linear layer x (..., in) times the transpose of weight (out, in), plus bias (out). The
    weight's gradient is computed later, where `late` was made. If `late` has no token, autograd
    computes it as usual.

    If `transposed`, the weight is (in, out). `again` is the value that backward gathers in the
    place of a kept `x`.
    """
    if late.token is None or _is_plain(weight):
        linear = torch.nn.functional.linear
        if again is not None:
            linear = partial(keeping_shards(linear), again)
        return linear(x, weight.t() if transposed else weight, bias)
    return _LateLinear.apply(x, weight, bias, late.token, late.handle, transposed, again)
