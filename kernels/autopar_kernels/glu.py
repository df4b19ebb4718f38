"""Gated activations: `autopar::glu`.

    glu = act(clamp(gate)) (clamp(up) + shift)

`act` is silu (with alpha: z sigmoid(alpha z)), gelu (by erf), gelu_tanh or relu.  All arithmetic is fp32 (fp64 for fp64 tensors), with
one rounding.  A fused projection is read where it lies, and its gradient is one tensor.  Saved for backward: the inputs; the activation
is computed again.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar_kernels.launching import (
    Tile,
    divide_up,
    launch,
    rows_of,
    runs_kernel,
    strides_of,
    tile_of,
)
from autopar_kernels.registration import (
    absent,
    accumulation_dtype,
    once_differentiable,
    present,
    register_composite,
    register_pass,
)

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
LAYOUTS = ("two", "gate_up", "up_gate", "interleaved")
"""How gate and up are given: as two tensors, as halves of one tensor (the gate first or last), or
as its alternating columns (the gate's first).
"""

_OPS = torch.ops.autopar
Attributes = tuple[str, float, float, float | None]
"""(act, alpha, shift, limit), as `glu` takes them."""


def value_and_slope(x: Tensor, act: str, alpha: float) -> tuple[Tensor, Tensor]:
    """(activation `act` of x, its derivative at x). `alpha` is the factor inside silu's sigmoid;
    others ignore it.
    """
    if act == "silu":
        s = torch.sigmoid(alpha * x)
        return x * s, s * (1 + alpha * x * (1 - s))
    if act == "gelu":
        cdf = 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))
        return F.gelu(x), cdf + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    if act == "gelu_tanh":
        t = torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))
        inner = math.sqrt(2 / math.pi) * (1 + 0.134145 * x * x)
        return 0.5 * x * (1 + t), 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * inner
    return F.relu(x), (~(x <= 0)).to(x.dtype)


def through(gradient: Tensor, slope: Tensor, act: str) -> Tensor:
    """gradient * slope, for a slope of `value_and_slope`. Nothing passes a flat relu, not even
    NaN.
    """
    return (gradient * slope).where(slope != 0, 0) if act == "relu" else gradient * slope


def split(both: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """(gate, up) as views of a fused projection (..., 2 F), which has a layout of LAYOUTS other
    than "two".
    """
    if layout == "interleaved":
        return both[..., ::2], both[..., 1::2]
    first, second = both[..., : both.shape[-1] // 2], both[..., both.shape[-1] // 2 :]
    return (first, second) if layout == "gate_up" else (second, first)


def block_of(x: Tensor) -> tuple[Tile, tuple[int, int]]:
    """The (block of a program, grid that covers x) of an elementwise kernel; x is (rows,
    columns).
    """
    rows, columns = x.shape
    tile = tile_of(columns, "element", x.device)
    return tile, (divide_up(rows, tile.rows), divide_up(columns, tile.columns))


def _glu_forward(
    gate: Tensor, up: Tensor, act: str, alpha: float, shift: float, limit: float | None
) -> Tensor:
    out = _glu_forward_fake(gate, up)
    if not runs_kernel(gate, up):
        wide = accumulation_dtype(gate, up)
        z, u = gate.to(wide), up.to(wide)
        if limit is not None:
            z, u = z.clamp(max=limit), u.clamp(-limit, limit)
        return out.copy_(value_and_slope(z, act, alpha)[0] * (u + shift))
    from autopar_kernels.activation_kernels import glu_forward_kernel

    z, u = rows_of(gate), rows_of(up)
    tile, grid = block_of(z)
    launch(
        glu_forward_kernel,
        grid,
        (z, u, out, *z.shape, strides_of(z, u)),
        tile.warps,
        ACT=act,
        ALPHA=alpha,
        SHIFT=shift,
        LIMIT=limit,
        R=tile.rows,
        BLOCK=tile.columns,
    )
    return out


def _glu_forward_fake(gate: Tensor, up: Tensor, *attributes: object) -> Tensor:
    return gate.new_empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype))


def _glu_backward(
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    act: str,
    alpha: float,
    shift: float,
    limit: float | None,
    layout: str,
    needs: list[bool],
) -> tuple[Tensor, Tensor]:
    """(gradient of gate, gradient of up), each empty unless its entry of `needs` is True. For a
    fused projection, (gradient of the projection, empty tensor).
    """
    outputs = _glu_backward_fake(grad, gate, up, act, alpha, shift, limit, layout, needs)
    written = outputs if layout == "two" else split(outputs[0], layout)
    if not runs_kernel(grad, gate, up):
        wide = accumulation_dtype(grad, gate, up)
        z, u, g = gate.to(wide), up.to(wide), grad.to(wide)
        pass_z = pass_u = torch.ones((), dtype=torch.bool, device=g.device)
        if limit is not None:
            pass_z, pass_u = z <= limit, u.abs() <= limit
            z, u = z.clamp(max=limit), u.clamp(-limit, limit)
        value, slope = value_and_slope(z, act, alpha)
        dz, du = through(g * (u + shift), slope, act), g * value
        for out, want, gradient, passes in zip(
            written, needs, (dz, du), (pass_z, pass_u), strict=True
        ):
            if want:
                out.copy_(gradient.where(passes, 0))
        return outputs
    from autopar_kernels.activation_kernels import glu_backward_kernel

    g, z, u = rows_of(grad), rows_of(gate), rows_of(up)
    # views of new tensors, of one row stride and one column stride
    places = [t.view(z.shape) if want else None for t, want in zip(written, needs, strict=True)]
    steps = next((t.stride() for t in places if t is not None), (0, 0))
    tile, grid = block_of(z)
    launch(
        glu_backward_kernel,
        grid,
        (g, z, u, *places, *z.shape, *g.stride(), strides_of(z, u), *steps),
        tile.warps,
        ACT=act,
        ALPHA=alpha,
        SHIFT=shift,
        LIMIT=limit,
        R=tile.rows,
        BLOCK=tile.columns,
    )
    return outputs


def _glu_backward_fake(
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    act: str,
    alpha: float,
    shift: float,
    limit: float | None,
    layout: str,
    needs: list[bool],
) -> tuple[Tensor, Tensor]:
    if layout != "two":
        return gate.new_empty((*gate.shape[:-1], 2 * gate.shape[-1])), absent(gate)
    return (
        gate.new_empty(gate.shape) if needs[0] else absent(gate),
        up.new_empty(up.shape) if needs[1] else absent(up),
    )


class _GLU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, first: Tensor, second: Tensor | None, attributes: Attributes, layout: str
    ) -> Tensor:
        ctx.save_for_backward(first, second)
        ctx.attributes, ctx.layout = attributes, layout
        gate, up = (first, second) if second is not None else split(first, layout)
        out: Tensor = _OPS.glu_forward(gate, up, *attributes)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        first, second = ctx.saved_tensors
        needs = list(ctx.needs_input_grad[:2])
        if second is None:
            gate, up = split(first, ctx.layout)
            both, _ = _OPS.glu_backward(grad, gate, up, *ctx.attributes, ctx.layout, [True, True])
            return both, None, None, None
        dgate, dup = _OPS.glu_backward(grad, first, second, *ctx.attributes, "two", needs)
        return present(dgate, needs[0]), present(dup, needs[1]), None, None


def glu(
    gate: Tensor,
    up: Tensor | None = None,
    act: str = "silu",
    alpha: float = 1.0,
    shift: float = 0.0,
    limit: float | None = None,
    layout: str = "gate_up",
) -> Tensor:
    """act(gate) (up + shift): (..., F) -> (..., F) in the promoted dtype; differentiable in both.

    Args:
        gate: (..., F), or the fused projection (..., 2 F) if `up` is None; any strides.
        up: (..., F), any strides, or None.
        act: silu, gelu (by erf), gelu_tanh or relu.
        alpha: the factor inside silu's sigmoid.
        shift: what is added to up (GPT-OSS: 1).
        limit: gate is at most this, up between -limit and limit; None clamps nothing.
        layout: of a fused projection: "gate_up", "up_gate" (halves) or "interleaved" (alternating
            columns, the gate's first).

    Raises:
        ValueError: an attribute is unknown or a shape does not fit.
    """
    if act not in ACTIVATIONS:
        raise ValueError(f"act {act!r} is not one of {', '.join(ACTIVATIONS)}")
    if layout not in LAYOUTS[1:]:
        raise ValueError(f"layout {layout!r} is not one of {', '.join(LAYOUTS[1:])}")
    if up is not None and up.shape != gate.shape:
        raise ValueError(f"gate {tuple(gate.shape)} and up {tuple(up.shape)} differ")
    if up is None and gate.shape[-1] % 2:
        raise ValueError(f"a fused projection of {gate.shape[-1]} columns has no halves")
    out: Tensor = _GLU.apply(gate, up, (act, alpha, shift, limit), layout)
    return out


_ATTRIBUTES = "str act, float alpha, float shift, float? limit"
register_pass(
    f"glu_forward(Tensor gate, Tensor up, {_ATTRIBUTES}) -> Tensor", _glu_forward, _glu_forward_fake
)
register_pass(
    f"glu_backward(Tensor grad, Tensor gate, Tensor up, {_ATTRIBUTES}, str layout, bool[] needs) "
    "-> (Tensor, Tensor)",
    _glu_backward,
    _glu_backward_fake,
)
register_composite(
    'glu(Tensor gate, Tensor? up=None, str act="silu", float alpha=1.0, float shift=0.0, '
    'float? limit=None, str layout="gate_up") -> Tensor',
    glu,
)
