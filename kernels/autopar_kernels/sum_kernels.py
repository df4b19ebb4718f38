# mypy: allow-untyped-defs
"""Triton kernels of `sums`."""

from __future__ import annotations

import triton.language as tl

from autopar_kernels.tiles import kernel, load_tile


@kernel
def sum_parts_kernel(
    parts,
    out,
    count,
    columns,
    part_stride,
    column_stride,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[c] = sum over p of parts[p, c], in the order of p within each of PARTS lanes."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    total = tl.zeros((PARTS, BLOCK), tl.float32)
    for start in range(0, count, PARTS):
        part = (start + tl.arange(0, PARTS)).to(tl.int64)
        mask = (part < count)[:, None] & inside[None, :]
        total += load_tile(parts, part, column, part_stride, column_stride, mask)
    tl.store(out + column, tl.sum(total, 0).to(out.dtype.element_ty), inside)
