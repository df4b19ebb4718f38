# mypy: allow-untyped-defs
"""Triton kernels of `softmax`: masked softmax, and the merge of two partial attentions.

A program takes R rows.  Row r of (A, B, Q) rows lies at the strides of its three indices; `strides` are four of each operand in turn.
"""

from __future__ import annotations

import triton
import triton.language as tl

from autopar_kernels.tiles import kernel, load_tile, store_tile, tanh


@triton.jit
def _address(row, heads, queries, s0, s1, s2):
    """The offset of each row's first element."""
    outer = row // (heads * queries)
    head = row // queries % heads
    return outer * s0 + head * s1 + row % queries * s2


@triton.jit
def _score(scores, mask, row, column, alive, columns, heads, queries, strides, SCALE, CAP):
    """(scaled, capped and masked scores, the derivative of the cap, which elements exist); masked ones are -inf."""
    inside = alive[:, None] & (column < columns)[None, :]
    place = _address(row, heads, queries, strides[0], strides[1], strides[2])
    step = column[None, :].to(tl.int64)
    x = tl.load(scores + place[:, None] + step * strides[3], inside, 0.0).to(tl.float32) * SCALE
    slope = tl.full(x.shape, 1.0, tl.float32)
    if CAP is not None:
        t = tanh(x / CAP)
        x, slope = CAP * t, 1.0 - t * t
    if mask is not None:
        place = _address(row, heads, queries, strides[4], strides[5], strides[6])
        address = mask + place[:, None] + step * strides[7]
        if mask.dtype.element_ty == tl.int1:
            x = tl.where(tl.load(address, inside, 0), x, float("-inf"))
        else:
            x += tl.load(address, inside, 0.0).to(tl.float32)
    return tl.where(inside, x, float("-inf")), slope, inside


@triton.jit
def _grown(largest, total, x):
    """The maximum and the sum of exp(x - maximum) of rows, with the scores of one tile more."""
    above = tl.maximum(largest, tl.max(x, 1))
    # rows of nothing but -inf have no maximum to subtract
    base = tl.where(above == float("-inf"), 0.0, above)
    return above, total * tl.exp(largest - base) + tl.sum(tl.exp(x - base[:, None]), 1)


@kernel
def softmax_forward_kernel(
    scores, mask, sinks, out, level, rows, heads, queries, columns, strides,
    SCALE: tl.constexpr, CAP: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write probabilities of R rows and the logarithm of their denominators; rows without any score
    give zeros.
    """
    row = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)
    alive = row < rows
    lane = tl.arange(0, BLOCK)
    largest = tl.full((R,), float("-inf"), tl.float32)
    total = tl.zeros((R,), tl.float32)
    if sinks is not None:
        largest = tl.load(sinks + row // queries % heads, alive, 0.0).to(tl.float32)
        total += 1.0
    first, _slope, seen = _score(
        scores, mask, row, lane, alive, columns, heads, queries, strides, SCALE, CAP
    )
    largest, total = _grown(largest, total, first)
    for at in range(BLOCK, columns, BLOCK):
        x, _, _ = _score(
            scores, mask, row, at + lane, alive, columns, heads, queries, strides, SCALE, CAP
        )
        largest, total = _grown(largest, total, x)
    empty = total == 0.0
    norm = tl.where(empty, 0.0, largest + tl.log(tl.where(empty, 1.0, total)))
    tl.store(level + row, tl.where(empty, float("-inf"), norm), alive)
    store_tile(out, row, lane, columns, 1, tl.exp(first - norm[:, None]), seen)
    for at in range(BLOCK, columns, BLOCK):
        x, _, inside = _score(
            scores, mask, row, at + lane, alive, columns, heads, queries, strides, SCALE, CAP
        )
        store_tile(out, row, at + lane, columns, 1, tl.exp(x - norm[:, None]), inside)


@triton.jit
def _gradient_terms(
    scores, mask, row, column, alive, norm, place, step, columns, heads, queries, strides,
    SCALE: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Of a tile: probabilities, their gradient, the derivative of the cap, and which elements exist."""
    x, slope, inside = _score(
        scores, mask, row, column, alive, columns, heads, queries, strides, SCALE, CAP
    )
    g = tl.load(place + column[None, :].to(tl.int64) * step, inside, 0.0).to(tl.float32)
    return tl.exp(x - norm[:, None]), g, slope, inside


@kernel
def softmax_backward_kernel(
    grad, scores, mask, sinks, level, dscores, dsinks, rows, heads, queries, columns, strides,
    g0, g1, g2, g3, SCALE: tl.constexpr, CAP: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradient of scores, and of each row's sink, from scores and the logarithm of the
    denominators.
    """
    row = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)
    alive = row < rows
    lane = tl.arange(0, BLOCK)
    norm = tl.load(level + row, alive, 0.0)
    empty = norm == float("-inf")
    norm = tl.where(empty, 0.0, norm)
    place = grad + _address(row, heads, queries, g0, g1, g2)[:, None]
    p, g, slope, inside = _gradient_terms(
        scores, mask, row, lane, alive, norm, place, g3, columns, heads, queries, strides, SCALE, CAP
    )  # fmt: skip
    along = tl.sum(p * g, 1)
    for at in range(BLOCK, columns, BLOCK):
        p_at, g_at, _, _ = _gradient_terms(
            scores, mask, row, at + lane, alive, norm, place, g3, columns, heads, queries, strides, SCALE, CAP
        )  # fmt: skip
        along += tl.sum(p_at * g_at, 1)
    if dsinks is not None:
        sink = tl.load(sinks + row // queries % heads, alive, 0.0).to(tl.float32)
        tl.store(dsinks + row, -tl.exp(sink - norm) * along, alive)
    if dscores is not None:
        value = p * (g - along[:, None]) * slope * SCALE
        store_tile(dscores, row, lane, columns, 1, value, inside)
        for at in range(BLOCK, columns, BLOCK):
            p_at, g_at, slope, inside = _gradient_terms(
                scores, mask, row, at + lane, alive, norm, place, g3, columns, heads, queries, strides, SCALE, CAP
            )  # fmt: skip
            value = p_at * (g_at - along[:, None]) * slope * SCALE
            store_tile(dscores, row, at + lane, columns, 1, value, inside)


@triton.jit
def _shares(first_level, second_level, row, alive):
    """(weight of the first, weight of the second, logarithm of the sum); zeros where both are -inf."""
    a = tl.load(first_level + row, alive, float("-inf")).to(tl.float32)
    b = tl.load(second_level + row, alive, float("-inf")).to(tl.float32)
    largest = tl.maximum(a, b)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.exp(a - base) + tl.exp(b - base)
    level = base + tl.log(tl.where(total == 0.0, 1.0, total))
    level = tl.where(total == 0.0, float("-inf"), level)
    norm = tl.where(total == 0.0, 1.0, total)
    return tl.exp(a - base) / norm, tl.exp(b - base) / norm, level


@kernel
def merge_kernel(
    first, first_level, second, second_level, out, level, rows, columns, strides,
    R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out = (exp(l1) first + exp(l2) second) / exp(l), l = log(exp(l1) + exp(l2))."""
    row = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)
    alive = row < rows
    column = tl.arange(0, BLOCK)
    mask = alive[:, None] & (column < columns)[None, :]
    p, q, norm = _shares(first_level, second_level, row, alive)
    a = load_tile(first, row, column, strides[0], strides[1], mask)
    b = load_tile(second, row, column, strides[2], strides[3], mask)
    # a part of weight 0 may hold anything
    value = tl.where(p[:, None] == 0.0, 0.0, p[:, None] * a)
    value += tl.where(q[:, None] == 0.0, 0.0, q[:, None] * b)
    store_tile(out, row, column, columns, 1, value, mask)
    tl.store(level + row, norm, alive)
