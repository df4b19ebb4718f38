# mypy: allow-untyped-defs
"""Triton kernels of `glu` and `bias_activations`.

A program takes a block of R rows and BLOCK columns of the result.  `strides` are (row, column) of each operand in turn.
"""

from __future__ import annotations

import triton
import triton.language as tl

from autopar_kernels.tiles import kernel, load_tile, load_vector, store_tile, tanh


@triton.jit
def _activate(x, ACT: tl.constexpr, ALPHA: tl.constexpr):
    """(activation ACT of x, its derivative at x). ALPHA is the factor inside silu's sigmoid; an
    unknown ACT is relu.
    """
    if ACT == "silu":
        s = tl.sigmoid(ALPHA * x)
        value = x * s
        slope = s * (1.0 + ALPHA * x * (1.0 - s))
    elif ACT == "gelu":
        # 1 / sqrt(2) and 1 / sqrt(2 pi)
        cdf = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        value = x * cdf
        slope = cdf + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    elif ACT == "gelu_tanh":
        # sqrt(2 / pi)
        t = tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))
        value = 0.5 * x * (1.0 + t)
        inner = 0.7978845608028654 * (1.0 + 0.134145 * x * x)
        slope = 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner
    else:
        # NaN is not below 0, and stays; tl.maximum would drop it
        value = tl.where(x <= 0.0, 0.0, x)
        slope = tl.where(x <= 0.0, 0.0, 1.0)
    return value, slope


@triton.jit
def _through(gradient, slope, ACT: tl.constexpr):
    """gradient * slope. Nothing passes a flat relu, not even NaN."""
    value = gradient * slope
    if ACT != "silu" and ACT != "gelu" and ACT != "gelu_tanh":
        value = tl.where(slope == 0.0, 0.0, value)
    return value


@triton.jit
def _place(rows, columns, R: tl.constexpr, BLOCK: tl.constexpr):
    """(row numbers, column numbers, mask) of the block that this program computes; the mask is true
    inside the tensor.
    """
    row = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    return row, column, (row < rows)[:, None] & (column < columns)[None, :]


@triton.jit
def _load_pair(gate, up, row, column, strides, mask, LIMIT: tl.constexpr):
    """(gate, up, mask of gate, mask of up). Gate is clamped to at most LIMIT, up to -LIMIT to
    LIMIT; None clamps nothing. A mask is true where a clamp did not change the element, so that a
    gradient passes.
    """
    z = load_tile(gate, row, column, strides[0], strides[1], mask)
    u = load_tile(up, row, column, strides[2], strides[3], mask)
    pass_z, pass_u = mask, mask
    if LIMIT is not None:
        pass_z, pass_u = z <= LIMIT, (u <= LIMIT) & (u >= -LIMIT)
        # NaN is not beyond the limit, and stays; tl.minimum would drop it
        z = tl.where(z > LIMIT, LIMIT, z)
        u = tl.where(u > LIMIT, LIMIT, tl.where(u < -LIMIT, -LIMIT, u))
    return z, u, pass_z, pass_u


@kernel
def glu_forward_kernel(
    gate, up, out, rows, columns, strides,
    ACT: tl.constexpr, ALPHA: tl.constexpr, SHIFT: tl.constexpr, LIMIT: tl.constexpr,
    R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write out = act(gate) (up + SHIFT), with gate and up clamped at LIMIT."""
    row, column, mask = _place(rows, columns, R, BLOCK)
    z, u, _, _ = _load_pair(gate, up, row, column, strides, mask, LIMIT)
    value, _ = _activate(z, ACT, ALPHA)
    store_tile(out, row, column, columns, 1, value * (u + SHIFT), mask)


@kernel
def glu_backward_kernel(
    grad, gate, up, dgate, dup, rows, columns, grad_row, grad_column, strides, out_row, out_column,
    ACT: tl.constexpr, ALPHA: tl.constexpr, SHIFT: tl.constexpr, LIMIT: tl.constexpr,
    R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradients of gate and up from that of the result; one whose tensor is None is left
    out. The activation is computed again.
    """
    row, column, mask = _place(rows, columns, R, BLOCK)
    g = load_tile(grad, row, column, grad_row, grad_column, mask)
    z, u, pass_z, pass_u = _load_pair(gate, up, row, column, strides, mask, LIMIT)
    value, slope = _activate(z, ACT, ALPHA)
    if dgate is not None:
        through = tl.where(pass_z, _through(g * (u + SHIFT), slope, ACT), 0.0)
        store_tile(dgate, row, column, out_row, out_column, through, mask)
    if dup is not None:
        through = tl.where(pass_u, g * value, 0.0)
        store_tile(dup, row, column, out_row, out_column, through, mask)


@kernel
def bias_forward_kernel(
    x, bias, out, rows, columns, strides,
    ACT: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write out = act(x + bias)."""
    row, column, mask = _place(rows, columns, R, BLOCK)
    value = load_tile(x, row, column, strides[0], strides[1], mask)
    value += load_vector(bias, column, column < columns)[None, :]
    value, _ = _activate(value, ACT, 1.0)
    store_tile(out, row, column, columns, 1, value, mask)


@kernel
def bias_backward_kernel(
    grad, x, bias, dx, parts, rows, columns, strides,
    ACT: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write dx, and this program's partial sum of the bias's gradient over its rows, as row
    program_id(0) of `parts`. Either is left out if its tensor is None.
    """
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    shift = load_vector(bias, column, inside)[None, :]
    total = tl.zeros((R, BLOCK), tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(rows, R), tl.num_programs(0)):
        row = (block * R + tl.arange(0, R)).to(tl.int64)
        mask = (row < rows)[:, None] & inside[None, :]
        g = load_tile(grad, row, column, strides[0], strides[1], mask)
        value = load_tile(x, row, column, strides[2], strides[3], mask) + shift
        _, slope = _activate(value, ACT, 1.0)
        through = _through(g, slope, ACT)
        total += through
        if dx is not None:
            store_tile(dx, row, column, columns, 1, through, mask)
    if parts is not None:
        place = tl.program_id(0).to(tl.int64) * columns + column
        tl.store(parts + place, tl.sum(total, 0), inside)
