"""How every op of the package is registered with torch.library.

An op has two levels.  The upper one is a composite that users call and that a captured graph shows; it calls an `autograd.Function`,
which saves what backward needs.  The lower ones are the forward and the backward pass.  Each has one function for CPU and CUDA, which
chooses between its Triton kernel and its ATen reference, and a second function that gives shapes and dtypes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

NAMESPACE = "autopar"
_library = torch.library.Library(NAMESPACE, "FRAGMENT")


def register_pass(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Register the lower op that `schema` declares: `run` computes it on CPU and CUDA, `fake` gives
    shapes and dtypes alone.

    Autograd does not see this op.  No result of `run` may share memory with an argument.
    """
    name = schema.split("(", 1)[0]
    _library.define(schema)
    for key in ("CPU", "CUDA"):
        _library.impl(name, run, key)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)


def register_composite(schema: str, run: Callable[..., Any]) -> None:
    """Register the upper op that `schema` declares. Its function `run` is made of other ops and
    defines its gradient.
    """
    _library.define(schema)
    _library.impl(schema.split("(", 1)[0], run, "CompositeImplicitAutograd")


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """`backward` of an `autograd.Function`, whose gradients raise RuntimeError where they are
    differentiated again.

    torch's own decorator lets a second derivative pass as zero, unless the gradient of the result
    needs one itself.
    """
    advice = "a loss that differentiates gradients needs fuse=off"
    message = f"{backward.__module__} has no second derivative: {advice}"

    @functools.wraps(backward)
    def run(ctx: Any, *gradients: Any) -> Any:
        with torch.no_grad():
            found = backward(ctx, *gradients)
        # with create_graph: what the gradients depend on
        read = (*gradients, *ctx.saved_tensors) if torch.is_grad_enabled() else ()
        read = tuple(each for each in read if each is not None and each.requires_grad)
        if not read:
            return found
        outputs = found if isinstance(found, tuple) else (found,)
        fails = torch._C._functions.DelayedError(message.encode(), len(outputs) + len(read))
        return fails(*outputs, *read)[: len(outputs)]

    return run


def accumulation_dtype(*tensors: Tensor | None) -> torch.dtype:
    """The dtype of arithmetic: fp64 if a tensor is fp64, else fp32."""
    wide = any(tensor is not None and tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if wide else torch.float32


def absent(like: Tensor) -> Tensor:
    """An empty tensor, which an op returns in the place of a result that is not asked for."""
    return like.new_empty(0)


def present(tensor: Tensor, wanted: bool) -> Tensor | None:
    """The tensor, or None in the place of a gradient that was not asked for."""
    return tensor if wanted else None
