# mypy: allow-untyped-defs
"""Triton kernels of `losses`: statistics of each row, loss of each row, and the gradient of logits.

Row r of the logits lies at (r // inner) strides[0] + (r % inner) strides[1]: shifted logits `x[:, :-1]` need no copy.
"""

from __future__ import annotations

import triton
import triton.language as tl

from autopar_kernels.tiles import kernel, tanh


@triton.jit
def _row(logits, row, inner, strides):
    """The address of a row's first logit."""
    return (
        logits + (row // inner).to(tl.int64) * strides[0] + (row % inner).to(tl.int64) * strides[1]
    )


@triton.jit
def _capped(x, CAP: tl.constexpr):
    """CAP tanh(x / CAP), or x without a cap."""
    if CAP is not None:
        x = CAP * tanh(x / CAP)
    return x


@kernel
def cross_entropy_local_kernel(
    logits, target, weight, out, rows, inner, strides, first, columns,
    SMOOTH: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the statistics of one row of a shard: the maximum, the sum of exp(x - maximum), the
    target's logit (0 on other shards). With SMOOTH also the sum of logits, weighted by class.
    """
    row = tl.program_id(0)
    start = _row(logits, row, inner, strides)
    lane = tl.arange(0, BLOCK)
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    weighted = tl.zeros((BLOCK,), tl.float32)
    for at in range(0, columns, BLOCK):
        column = at + lane
        inside = column < columns
        x = tl.load(start + column.to(tl.int64) * strides[2], inside, float("-inf")).to(tl.float32)
        x = tl.where(inside, _capped(x, CAP), float("-inf"))
        above = tl.maximum(largest, tl.max(x, 0))
        # a part of nothing but -inf has no maximum to subtract
        base = tl.where(above == float("-inf"), 0.0, above)
        total = total * tl.exp(largest - base) + tl.sum(tl.exp(x - base), 0)
        largest = above
        if SMOOTH:
            value = tl.where(inside, x, 0.0)
            if weight is not None:
                value *= tl.load(weight + first + column, inside, 0.0).to(tl.float32)
            weighted += value
    place = tl.load(target + row) - first
    mine = (place >= 0) & (place < columns)
    hit = tl.load(start + place * strides[2], mine, 0.0).to(tl.float32)
    tl.store(out + row, largest)
    tl.store(out + rows + row, total)
    tl.store(out + 2 * rows + row, tl.where(mine, _capped(hit, CAP), 0.0))
    if SMOOTH:
        tl.store(out + 3 * rows + row, tl.sum(weighted, 0))


@triton.jit
def _row_weight(target, weight, row, alive, classes, IGNORE: tl.constexpr):
    """(whether the row counts, the weight of its class). An ignored row has weight 0, one whose
    label is no class NaN.
    """
    label = tl.load(target + row, alive, IGNORE)
    valid = label != IGNORE
    known = valid & (label >= 0) & (label < classes)
    scale = tl.where(valid, 1.0, 0.0)
    if weight is not None:
        scale = tl.load(weight + label, known, 0.0).to(tl.float32)
    return valid, tl.where(valid & ~known, float("nan"), scale)


@kernel
def cross_entropy_rows_kernel(
    statistics, target, weight, weight_sum, loss, scales, rows, classes,
    IGNORE: tl.constexpr, SMOOTHING: tl.constexpr, Z: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the loss of each row and its class's weight; both are 0 for ignored rows."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    alive = row < rows
    valid, scale = _row_weight(target, weight, row, alive, classes, IGNORE)
    largest = tl.load(statistics + row, alive, 0.0)
    level = largest + tl.log(tl.load(statistics + rows + row, alive, 1.0))
    value = (1.0 - SMOOTHING) * scale * (level - tl.load(statistics + 2 * rows + row, alive, 0.0))
    if SMOOTHING > 0:
        norm = classes * 1.0
        if weight_sum is not None:
            norm = tl.load(weight_sum).to(tl.float32)
        value += (
            SMOOTHING / classes * (norm * level - tl.load(statistics + 3 * rows + row, alive, 0.0))
        )
    if Z > 0:
        value += Z * level * level
    tl.store(loss + row, tl.where(valid, value, 0.0), alive)
    tl.store(scales + row, scale, alive)


@kernel
def cross_entropy_gradient_kernel(
    grad, grad_step, logits, target, weight, weight_sum, statistics, out, rows, inner, strides,
    first, columns, classes, IGNORE: tl.constexpr, SMOOTHING: tl.constexpr, Z: tl.constexpr,
    CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradient of BLOCK logits of one row, from the merged statistics; zeros for ignored
    rows.
    """
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    valid, scale = _row_weight(target, weight, row, row < rows, classes, IGNORE)
    level = tl.load(statistics + row) + tl.log(tl.load(statistics + rows + row))
    x = tl.load(
        _row(logits, row, inner, strides) + column.to(tl.int64) * strides[2], inside, 0.0
    ).to(tl.float32)
    x = _capped(x, CAP)
    # terms that cancel are subtracted first: in a row of one class p is 1
    p = tl.exp(x - level)
    hit = tl.where(column == tl.load(target + row) - first, 1.0, 0.0)
    value = (1.0 - SMOOTHING) * scale * (p - hit)
    if SMOOTHING > 0:
        if weight is not None:
            norm = tl.load(weight_sum).to(tl.float32)
            of_class = tl.load(weight + first + column, inside, 0.0).to(tl.float32)
            value += SMOOTHING / classes * (norm * p - of_class)
        else:
            value += SMOOTHING / classes * (classes * p - 1.0)
    if Z > 0:
        value += 2.0 * Z * level * p
    if CAP is not None:
        value *= 1.0 - (x / CAP) * (x / CAP)
    value *= tl.load(grad + row.to(tl.int64) * grad_step).to(tl.float32)
    value = tl.where(valid, value, 0.0)
    place = out + row.to(tl.int64) * columns + column
    tl.store(place, value.to(out.dtype.element_ty), inside)
