# mypy: allow-untyped-defs
"""Triton kernel of `rotary`: queries and keys in one launch, forward and backward."""

from __future__ import annotations

import triton
import triton.language as tl

from autopar_kernels.tiles import kernel


@triton.jit
def _rotate(
    x, out, batch, token, head, heads, strides, out_strides, c_low, s_low, c_high, s_high, angle, alive,
    DIM: tl.constexpr, ROT: tl.constexpr, FIRST: tl.constexpr, READ: tl.constexpr, WRITTEN: tl.constexpr,
    HEADS: tl.constexpr, PASS: tl.constexpr,
):  # fmt: skip
    """Rotate the pairs of HEADS heads of one token, and copy the columns that are not rotated."""
    h = head + tl.arange(0, HEADS)
    half = ROT // 2
    row = batch.to(tl.int64) * strides[0] + token.to(tl.int64) * strides[1]
    row = row + h.to(tl.int64) * strides[2]
    place = batch.to(tl.int64) * out_strides[0] + token.to(tl.int64) * out_strides[1]
    place = place + h.to(tl.int64) * out_strides[2]
    low = FIRST + (2 * angle if READ else angle)
    high = low + (1 if READ else half)
    to_low = FIRST + (2 * angle if WRITTEN else angle)
    to_high = to_low + (1 if WRITTEN else half)
    mask = (h < heads)[:, None] & alive[None, :]
    a = tl.load(x + row[:, None] + low[None, :] * strides[3], mask, 0.0).to(tl.float32)
    b = tl.load(x + row[:, None] + high[None, :] * strides[3], mask, 0.0).to(tl.float32)
    kind = out.dtype.element_ty
    tl.store(out + place[:, None] + to_low[None, :], (a * c_low - b * s_low).to(kind), mask)
    tl.store(out + place[:, None] + to_high[None, :], (b * c_high + a * s_high).to(kind), mask)
    if PASS > 0:
        rest = tl.arange(0, PASS)
        column = rest + (ROT if FIRST == 0 else 0)
        mask = (h < heads)[:, None] & (rest < DIM - ROT)[None, :]
        kept = tl.load(x + row[:, None] + column[None, :] * strides[3], mask)
        tl.store(out + place[:, None] + column[None, :], kept.to(kind), mask)


@kernel
def rotary_kernel(
    q, k, q_out, k_out, cos, sin, positions, tokens, q_heads, k_heads, strides, table_strides,
    DIM: tl.constexpr, ROT: tl.constexpr, FIRST: tl.constexpr, INTERLEAVED: tl.constexpr,
    READ: tl.constexpr, WRITTEN: tl.constexpr,
    SHARED: tl.constexpr, BACKWARD: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, PASS: tl.constexpr,
):  # fmt: skip
    """Rotate every head of one token by its angles; backward transposes the rotation.

    READ and WRITTEN say whether the columns of a pair are neighbours there; INTERLEAVED says it of the tables.
    """
    batch = tl.program_id(0) // tokens
    token = tl.program_id(0) % tokens
    head = tl.program_id(1) * HEADS
    angle = tl.arange(0, HALF)
    alive = angle < ROT // 2
    row = batch.to(tl.int64) * table_strides[0] + token.to(tl.int64) * table_strides[1]
    if positions is not None:
        row = tl.load(positions + tl.program_id(0)).to(tl.int64) * table_strides[1]
    low, high = angle, angle
    if not SHARED:
        low = 2 * angle if INTERLEAVED else angle
        high = low + (1 if INTERLEAVED else ROT // 2)
    c_low = tl.load(cos + row + low * table_strides[2], alive, 0.0).to(tl.float32)[None, :]
    s_low = tl.load(sin + row + low * table_strides[2], alive, 0.0).to(tl.float32)[None, :]
    c_high = tl.load(cos + row + high * table_strides[2], alive, 0.0).to(tl.float32)[None, :]
    s_high = tl.load(sin + row + high * table_strides[2], alive, 0.0).to(tl.float32)[None, :]
    if BACKWARD:
        s_low, s_high = -s_high, -s_low
    if head < q_heads:
        _rotate(
            q, q_out, batch, token, head, q_heads, strides[0], strides[1],
            c_low, s_low, c_high, s_high, angle, alive,
            DIM, ROT, FIRST, READ, WRITTEN, HEADS, PASS,
        )  # fmt: skip
    if k is not None:  # noqa: SIM102 (one is known to the compiler, the other on the device)
        if head < k_heads:
            _rotate(
                k, k_out, batch, token, head, k_heads, strides[2], strides[3],
                c_low, s_low, c_high, s_high, angle, alive,
                DIM, ROT, FIRST, READ, WRITTEN, HEADS, PASS,
            )  # fmt: skip
