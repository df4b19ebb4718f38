# mypy: allow-untyped-defs
"""Triton kernels of `sums`."""

from __future__ import annotations

import triton.language as tl

from autopar_kernels.tiles import kernel, load_tile


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
