# mypy: allow-untyped-defs
"""Triton kernels of `norms` and `layer_norms`: one forward and one backward kernel.

A program of the grid's first dim takes blocks of rows, one of the second dim takes a group of columns.  The first BLOCK columns of a
row stay in registers; the parts of a longer row after them are read again.  `strides` are (row, column) of each operand in turn.
"""

from __future__ import annotations

import triton
import triton.language as tl

from autopar_kernels.tiles import kernel, load_tile, load_vector, silu, silu_slope, store_tile


@triton.jit
def _input(x, residual, gate, row, column, strides, alive, end, GATE_FIRST: tl.constexpr, SUM):
    """A tile of the values to normalise: x + residual, rounded to the sum's dtype, or x
    silu(gate).
    """
    mask = alive[:, None] & (column < end)[None, :]
    value = load_tile(x, row, column, strides[0], strides[1], mask)
    if residual is not None:
        value += load_tile(residual, row, column, strides[2], strides[3], mask)
        value = value.to(SUM).to(tl.float32)
    if GATE_FIRST:
        value *= silu(load_tile(gate, row, column, strides[4], strides[5], mask))
    return value


@triton.jit
def _output(
    value,
    weight,
    bias,
    gate,
    row,
    column,
    strides,
    alive,
    end,
    OFFSET,
    ROUND,
    GATE_FIRST: tl.constexpr,
):
    """A tile of the result: the normalised value times (weight + OFFSET), plus the bias, times
    silu(gate) unless GATE_FIRST. Operands that are None are left out.
    """
    mask = alive[:, None] & (column < end)[None, :]
    if ROUND is not None:
        value = value.to(ROUND).to(tl.float32)
    if weight is not None:
        value *= load_vector(weight, column, column < end)[None, :] + OFFSET
    if bias is not None:
        value += load_vector(bias, column, column < end)[None, :]
    if gate is not None and not GATE_FIRST:
        value *= silu(load_tile(gate, row, column, strides[4], strides[5], mask))
    return value


@kernel
def norm_forward_kernel(
    x, residual, gate, weight, bias, total, out, mean, rstd, rows, strides,
    N: tl.constexpr, EPS: tl.constexpr, OFFSET: tl.constexpr, SUM: tl.constexpr,
    ROUND: tl.constexpr, GATE_FIRST: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Normalise R rows of a group; write the result, x + residual, and each row's mean and 1 / deviation."""
    group, width = tl.program_id(1), tl.num_programs(1) * N
    statistic = tl.num_programs(1)
    row = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)
    column, end = group * N + tl.arange(0, BLOCK), group * N + N
    alive = row < rows
    first = alive[:, None] & (column < end)[None, :]
    value = _input(x, residual, gate, row, column, strides, alive, end, GATE_FIRST, SUM)
    center = tl.zeros((R,), tl.float32)
    if mean is not None:
        center += tl.sum(value, 1)
        for at in tl.static_range(BLOCK, N, BLOCK):
            mask = alive[:, None] & (at + column < end)[None, :]
            part = _input(x, residual, gate, row, at + column, strides, alive, end, GATE_FIRST, SUM)
            center += tl.sum(part, 1)
        center = center / N
        tl.store(mean + row * statistic + group, center, alive)
    shifted = tl.where(first, value - center[:, None], 0.0)
    squares = tl.sum(shifted * shifted, 1)
    for at in tl.static_range(BLOCK, N, BLOCK):
        mask = alive[:, None] & (at + column < end)[None, :]
        part = _input(x, residual, gate, row, at + column, strides, alive, end, GATE_FIRST, SUM)
        part = tl.where(mask, part - center[:, None], 0.0)
        squares += tl.sum(part * part, 1)
    scale = tl.rsqrt(squares / N + EPS)
    tl.store(rstd + row * statistic + group, scale, alive)
    for at in tl.static_range(0, N, BLOCK):
        mask = alive[:, None] & (at + column < end)[None, :]
        if at > 0:
            value = _input(
                x, residual, gate, row, at + column, strides, alive, end, GATE_FIRST, SUM
            )
        if residual is not None:
            store_tile(total, row, at + column, width, 1, value, mask)
        part = _output(
            (value - center[:, None]) * scale[:, None], weight, bias, gate,
            row, at + column, strides, alive, end, OFFSET, ROUND, GATE_FIRST,
        )  # fmt: skip
        store_tile(out, row, at + column, width, 1, part, mask)


@triton.jit
def _terms(
    grad, x, gate, weight, row, column, strides, alive, end, center, scale, OFFSET,
    GATE_FIRST: tl.constexpr,
):  # fmt: skip
    """Three tiles: the normalised value, its gradient, and the gradient of its product with the
    weight.
    """
    mask = alive[:, None] & (column < end)[None, :]
    value = load_tile(x, row, column, strides[2], strides[3], mask)
    upstream = load_tile(grad, row, column, strides[0], strides[1], mask)
    if gate is not None:
        act = silu(load_tile(gate, row, column, strides[4], strides[5], mask))
        if GATE_FIRST:
            value *= act
        else:
            upstream *= act
    normal = tl.where(mask, (value - center[:, None]) * scale[:, None], 0.0)
    weighted = upstream
    if weight is not None:
        weighted *= load_vector(weight, column, column < end)[None, :] + OFFSET
    return normal, weighted, upstream


@triton.jit
def _store_gradients(
    normal, weighted, along, level, scale, grad, grad_total, x, gate, weight, dx, dgate,
    row, column, width, strides, alive, end, OFFSET, GATE_FIRST: tl.constexpr,
):  # fmt: skip
    """Write dx and dgate of a tile, each unless it is None."""
    mask = alive[:, None] & (column < end)[None, :]
    inner = (weighted - level[:, None] - normal * along[:, None]) * scale[:, None]
    if gate is not None:
        z = load_tile(gate, row, column, strides[4], strides[5], mask)
        if GATE_FIRST:
            value = load_tile(x, row, column, strides[2], strides[3], mask)
            through = inner * value
            inner *= silu(z)
        else:
            through = load_tile(grad, row, column, strides[0], strides[1], mask) * normal
            if weight is not None:
                through *= load_vector(weight, column, column < end)[None, :] + OFFSET
        if dgate is not None:
            store_tile(dgate, row, column, width, 1, through * silu_slope(z), mask)
    if grad_total is not None:
        inner += load_tile(grad_total, row, column, strides[6], strides[7], mask)
    if dx is not None:
        store_tile(dx, row, column, width, 1, inner, mask)


@triton.jit
def _add_to(parts, offset, value, inside):
    """Add a tile's sum over rows to this program's own partial sums. Does nothing if `parts` is
    None.
    """
    if parts is not None:
        place = parts + offset
        tl.store(place, tl.load(place, inside, 0.0) + tl.sum(value, 0), inside)


@triton.jit
def _write(parts, offset, value, inside):
    """Write a tile's sum over rows as this program's partial sums. Does nothing if
    `parts` is None.
    """
    if parts is not None:
        tl.store(parts + offset, tl.sum(value, 0), inside)


@kernel
def norm_backward_kernel(
    grad, grad_total, x, gate, weight, mean, rstd, dx, dgate, dweight, dbias, rows, strides,
    N: tl.constexpr, OFFSET: tl.constexpr, GATE_FIRST: tl.constexpr, R: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write gradients of x and gate, and this program's partial sums over its rows, as one row of
    dweight and of dbias. Tensors that are None are left out.
    """
    group, width = tl.program_id(1), tl.num_programs(1) * N
    statistic = tl.num_programs(1)
    column, end = group * N + tl.arange(0, BLOCK), group * N + N
    offset = tl.program_id(0).to(tl.int64) * width + column
    weight_sum = tl.zeros((R, BLOCK), tl.float32)
    bias_sum = tl.zeros((R, BLOCK), tl.float32)
    for block in tl.range(
        tl.program_id(0), tl.cdiv(rows, R), tl.num_programs(0), num_stages=STAGES
    ):
        row = (block * R + tl.arange(0, R)).to(tl.int64)
        alive = row < rows
        scale = tl.load(rstd + row * statistic + group, alive, 0.0)
        center = tl.zeros((R,), tl.float32)
        if mean is not None:
            center += tl.load(mean + row * statistic + group, alive, 0.0)
        normal, weighted, upstream = _terms(
            grad, x, gate, weight, row, column, strides, alive, end, center, scale, OFFSET, GATE_FIRST
        )  # fmt: skip
        along, level = tl.sum(normal * weighted, 1), tl.sum(weighted, 1)
        # loops that are not unrolled: their loads would wait in registers for the second one
        for at in range(BLOCK, N, BLOCK):
            n, w, _ = _terms(
                grad, x, gate, weight, row, at + column, strides, alive, end, center, scale, OFFSET, GATE_FIRST
            )  # fmt: skip
            along, level = along + tl.sum(n * w, 1), level + tl.sum(w, 1)
        along, level = along / N, level / N
        if mean is None:
            level = tl.zeros((R,), tl.float32)
        weight_sum += upstream * normal
        bias_sum += upstream
        _store_gradients(
            normal, weighted, along, level, scale, grad, grad_total, x, gate, weight, dx, dgate,
            row, column, width, strides, alive, end, OFFSET, GATE_FIRST,
        )  # fmt: skip
        # rows longer than a block come one at a time, so that each thread adds to what it wrote itself
        for at in range(BLOCK, N, BLOCK):
            n, w, u = _terms(
                grad, x, gate, weight, row, at + column, strides, alive, end, center, scale, OFFSET, GATE_FIRST
            )  # fmt: skip
            _add_to(dweight, offset + at, u * n, at + column < end)
            _add_to(dbias, offset + at, u, at + column < end)
            _store_gradients(
                n, w, along, level, scale, grad, grad_total, x, gate, weight, dx, dgate,
                row, at + column, width, strides, alive, end, OFFSET, GATE_FIRST,
            )  # fmt: skip
    _write(dweight, offset, weight_sum, column < end)
    _write(dbias, offset, bias_sum, column < end)
