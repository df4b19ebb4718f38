"""Activations after a bias: `autopar::bias_activation`.

Arithmetic is fp32 (fp64 for fp64 tensors), with one rounding.  Saved for backward: the inputs; the activation is computed again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar_kernels.glu import ACTIVATIONS, block_of, through, value_and_slope
from autopar_kernels.launching import (
    launch,
    partial_sums,
    programs_of,
    rows_of,
    runs_kernel,
    strides_of,
)
from autopar_kernels.registration import (
    absent,
    accumulation_dtype,
    once_differentiable,
    present,
    register_composite,
    register_pass,
)
from autopar_kernels.sums import sum_parts

_OPS = torch.ops.autopar


def _bias_forward(x: Tensor, bias: Tensor, act: str) -> Tensor:
    out = _bias_forward_fake(x, bias, act)
    if not runs_kernel(x, bias):
        wide = accumulation_dtype(x, bias)
        return out.copy_(value_and_slope(x.to(wide) + bias.to(wide), act, 1.0)[0])
    from autopar_kernels.activation_kernels import bias_forward_kernel

    rows = rows_of(x)
    tile, grid = block_of(rows)
    launch(
        bias_forward_kernel,
        grid,
        (rows, bias.contiguous(), out, *rows.shape, rows.stride()),
        tile.warps,
        ACT=act,
        R=tile.rows,
        BLOCK=tile.columns,
    )
    return out


def _bias_forward_fake(x: Tensor, bias: Tensor, act: str) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, bias.dtype))


def _bias_backward(
    grad: Tensor, x: Tensor, bias: Tensor, act: str, needs: list[bool]
) -> tuple[Tensor, Tensor]:
    dx, dbias = _bias_backward_fake(grad, x, bias, act, needs)
    if not runs_kernel(grad, x, bias):
        wide = accumulation_dtype(x, bias, grad)
        slope = value_and_slope(x.to(wide) + bias.to(wide), act, 1.0)[1]
        value = through(grad, slope, act)
        if needs[0]:
            dx.copy_(value)
        if needs[1]:
            dbias.copy_(value.reshape(-1, bias.shape[0]).sum(0))
        return dx, dbias
    from autopar_kernels.activation_kernels import bias_backward_kernel

    g, rows = rows_of(grad), rows_of(x)
    tile, (blocks, parts_of_row) = block_of(rows)
    programs = programs_of(blocks, tile, x.device)
    parts = partial_sums(x, blocks > 0, programs, bias.shape[0]) if needs[1] else None
    launch(
        bias_backward_kernel,
        (programs if blocks else 0, parts_of_row),
        (
            *(g, rows, bias.contiguous(), dx if needs[0] else None, parts),
            *(*rows.shape, strides_of(g, rows)),
        ),
        tile.warps,
        ACT=act,
        R=tile.rows,
        BLOCK=tile.columns,
    )
    return dx, dbias if parts is None else sum_parts(parts, bias.dtype)


def _bias_backward_fake(
    grad: Tensor, x: Tensor, bias: Tensor, act: str, needs: list[bool]
) -> tuple[Tensor, Tensor]:
    return (
        x.new_empty(x.shape) if needs[0] else absent(x),
        bias.new_empty(bias.shape) if needs[1] else absent(bias),
    )


class _BiasActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, act: str) -> Tensor:
        ctx.save_for_backward(x, bias)
        ctx.act = act
        out: Tensor = _OPS.bias_activation_forward(x, bias, act)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        needs = list(ctx.needs_input_grad[:2])
        dx, dbias = _OPS.bias_activation_backward(grad, *ctx.saved_tensors, ctx.act, needs)
        return present(dx, needs[0]), present(dbias, needs[1]), None


def bias_activation(x: Tensor, bias: Tensor, act: str = "gelu_tanh") -> Tensor:
    """act(x + bias): (..., F) -> (..., F) in the promoted dtype; differentiable in both.

    Args:
        x: (..., F), any strides.
        bias: (F,).
        act: silu, gelu (by erf), gelu_tanh or relu.

    Raises:
        ValueError: the activation is unknown or a shape does not fit.
    """
    if act not in ACTIVATIONS:
        raise ValueError(f"act {act!r} is not one of {', '.join(ACTIVATIONS)}")
    if bias.shape != x.shape[-1:]:
        raise ValueError(f"a bias of shape {tuple(bias.shape)} for x of {tuple(x.shape)}")
    out: Tensor = _BiasActivation.apply(x, bias, act)
    return out


register_pass(
    "bias_activation_forward(Tensor x, Tensor bias, str act) -> Tensor",
    _bias_forward,
    _bias_forward_fake,
)
register_pass(
    "bias_activation_backward(Tensor grad, Tensor x, Tensor bias, str act, bool[] needs) "
    "-> (Tensor, Tensor)",
    _bias_backward,
    _bias_backward_fake,
)
register_composite(
    'bias_activation(Tensor x, Tensor bias, str act="gelu_tanh") -> Tensor', bias_activation
)
