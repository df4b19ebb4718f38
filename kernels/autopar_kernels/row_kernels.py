# mypy: allow-untyped-defs
"""Triton kernels of `sums` and `expert_rows`: sums of rows, of gathered rows, and products with gathered rows.  Indices are read, never
written through.
"""

from __future__ import annotations

import triton.language as tl

from autopar_kernels.tiles import kernel, load_tile, store_tile


@kernel
def gather_sum_kernel(
    rows, index, weights, out, count, columns, row_stride, column_stride,
    CHOICES: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write out[t] = sum over k of weights[t, k] rows[index[t, k]], in the order of k. Without
    weights (None) each is 1.
    """
    row = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    alive = row < count
    mask = alive[:, None] & (column < columns)[None, :]
    total = tl.zeros((R, BLOCK), tl.float32)
    for choice in range(CHOICES):
        source = tl.load(index + row * CHOICES + choice, alive, 0).to(tl.int64)
        value = load_tile(rows, source, column, row_stride, column_stride, mask)
        if weights is not None:
            value *= tl.load(weights + row * CHOICES + choice, alive, 0.0).to(tl.float32)[:, None]
        total += value
    store_tile(out, row, column, columns, 1, total, mask)


@kernel
def gather_dot_kernel(
    rows, index, other, out, count, columns, strides,
    CHOICES: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write out[t, k] = the dot product of rows[index[t, k]] and other[t]."""
    choice = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)
    alive = choice < count
    lane = tl.arange(0, BLOCK)
    source = tl.load(index + choice, alive, 0).to(tl.int64)
    total = tl.zeros((R,), tl.float32)
    for at in range(0, columns, BLOCK):
        column = at + lane
        mask = alive[:, None] & (column < columns)[None, :]
        value = load_tile(rows, source, column, strides[0], strides[1], mask)
        value *= load_tile(other, choice // CHOICES, column, strides[2], strides[3], mask)
        total += tl.sum(value, 1)
    tl.store(out + choice, total.to(out.dtype.element_ty), alive)


@kernel
def sum_few_kernel(
    parts, out, columns, part_stride, column_stride, COUNT: tl.constexpr, BLOCK: tl.constexpr
):
    """Write out[c] = sum over p of parts[p, c], in the order of p."""
    column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(COUNT):
        place = parts + part * part_stride + column * column_stride
        total += tl.load(place, inside, 0.0).to(tl.float32)
    tl.store(out + column, total.to(out.dtype.element_ty), inside)


@kernel
def sum_many_kernel(
    parts, out, count, columns, part_stride, column_stride, LANES: tl.constexpr, BLOCK: tl.constexpr
):
    """Write out[c] = sum over p of parts[p, c]. Each of LANES lanes sums every LANES-th part in
    order; then the lanes are summed.
    """
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    total = tl.zeros((LANES, BLOCK), tl.float32)
    for start in range(0, count, LANES):
        part = (start + tl.arange(0, LANES)).to(tl.int64)
        mask = (part < count)[:, None] & inside[None, :]
        total += load_tile(parts, part, column, part_stride, column_stride, mask)
    tl.store(out + column, tl.sum(total, 0).to(out.dtype.element_ty), inside)
