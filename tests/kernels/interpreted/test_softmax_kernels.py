"""Kernels of masked softmax and of the ring's merge in the interpreter, against fp64 and ATen."""

from __future__ import annotations

import autopar_kernels.partial_attention
import autopar_kernels.softmax  # noqa: F401 (both register their ops)
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_checks import COLUMNS, DTYPES, LAYOUTS, Comparison, checks, numbers
from support.effort import examples

KERNELS = ("softmax_forward_kernel", "softmax_backward_kernel")
SHAPES = st.sampled_from([(1, 1, 1), (2, 3, 2), (1, 2, 5), (0, 2, 2), (3,), ()])


def unfused(scores, mask, sinks, wide, scale, cap):
    """As modelled code spells it, with upcast, and zeros for rows without a score."""
    x = scores.to(wide) * scale
    if cap is not None:
        x = torch.tanh(x / cap) * cap
    if mask is not None:
        x = x.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else x + mask.to(wide)
    if sinks is not None:
        sink = sinks.to(wide).view(-1, 1, 1).expand(*x.shape[:-1], 1)
        x = torch.cat([x, sink], -1)
    hidden = (x == float("-inf")).all(-1, keepdim=True)
    out = torch.softmax(x.masked_fill(hidden, 0), -1).masked_fill(hidden, 0)
    return out[..., : scores.shape[-1]].to(scores.dtype)


@checks(*KERNELS)
@settings(max_examples=examples(2, 60))
@given(
    SHAPES, COLUMNS, DTYPES, st.sampled_from([None, "bool", "added", "one_row"]), st.booleans(),
    st.sampled_from([None, 3.0]), LAYOUTS, st.sampled_from(["plain", "every_other", "expanded"]),
)  # fmt: skip
@example((2, 3, 2), 257, torch.float16, "bool", True, 3.0, "every_other", "expanded")
@example((2, 3, 2), 129, torch.float32, "one_row", False, None, "transposed", "plain")
@example((), 7, torch.float32, "added", False, None, "plain", "plain")
def test_softmax(rows, columns, dtype, masked, with_sinks, cap, layout, gradient):
    mask = None
    if masked:
        visible = numbers(3, *rows, columns) > -0.5
        visible[..., 0] = True
        mask = visible if masked == "bool" else numbers(4, *rows, columns)
        mask = mask[(slice(0, 1),) * min(2, len(rows))] if masked == "one_row" else mask
    sinks = numbers(1, rows[1]) if with_sinks and len(rows) == 3 else None
    Comparison(
        lambda x, m, s: torch.ops.autopar.softmax(x, m, s, 0.7, cap),
        lambda x, m, s, wide: unfused(x, m, s, wide, 0.7, cap),
        [numbers(0, *rows, columns, scale=3.0), mask, sinks],
        dtype,
        layouts=[layout],
        gradient=gradient,
        constant=[1],
    ).check()


@checks(*KERNELS)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_fully_masked_rows_and_large_scores(with_sinks):
    """Zeros and gradients of zero for a row without a key, no overflow for scores of 1e4."""
    scores = numbers(0, 1, 2, 3, 200, scale=1e4)
    mask = torch.ones(3, 200, dtype=torch.bool)
    mask[1] = False
    mask[2, :150] = False
    sinks = numbers(1, 2) if with_sinks else None
    case = Comparison(
        lambda x, m, s: torch.ops.autopar.softmax(x, m, s),
        lambda x, m, s, wide: unfused(x, m, s, wide, 1.0, None),
        [scores, mask, sinks],
        torch.float32,
    )
    case.check()
    (out,), (gradient, *_) = case.run(case.fused, case.low())
    assert not out[:, :, 1].any() and not gradient[:, :, 1].any()


def unfused_merge(first, first_level, second, second_level, wide):
    """As ring attention spells it, with rows that saw no key guarded."""
    a, b = first_level.to(wide), second_level.to(wide)
    nothing = (a == float("-inf")) & (b == float("-inf"))
    a, b = a.masked_fill(nothing, 0), b.masked_fill(nothing, 0)
    level = torch.logaddexp(a, b)
    p, q = ((t - level).exp().masked_fill(nothing, 0).unsqueeze(-1) for t in (a, b))
    out = (p * first.to(wide) + q * second.to(wide)).to(first.dtype)
    return out, level.masked_fill(nothing, float("-inf"))


@checks("merge_kernel")
@settings(max_examples=examples(2, 60))
@given(
    st.sampled_from([(0,), (1,), (2, 3), (2, 2, 5)]), st.sampled_from([1, 7, 64, 100, 129]),
    DTYPES, LAYOUTS, LAYOUTS,
)  # fmt: skip
@example((2, 2, 5), 129, torch.float16, "every_other", "transposed")
def test_merge(rows, columns, dtype, of_first, of_second):
    wide = {1: torch.float32, 3: torch.float32}
    Comparison(
        torch.ops.autopar.merge_attention,
        unfused_merge,
        [
            *(numbers(0, *rows, columns), numbers(1, *rows, scale=3.0)),
            *(numbers(2, *rows, columns), numbers(3, *rows, scale=3.0)),
        ],
        dtype,
        dtypes=wide,
        layouts=[of_first, "plain", of_second],
        constant=range(4),
    ).check()


@checks("merge_kernel")
def test_merge_of_rows_that_saw_no_key():
    """-inf on one side takes the other as it is, even beside nan; on both sides zeros and -inf."""
    nothing = float("-inf")
    first, second = numbers(0, 4, 6).float(), numbers(1, 4, 6).float()
    first[1], second[2] = float("nan"), float("nan")
    seen = torch.tensor([0.5, nothing, 1.0, nothing])
    also = torch.tensor([0.7, 2.0, nothing, nothing])
    out, level = torch.ops.autopar.merge_attention(first, seen, second, also)
    assert torch.equal(out[1], second[1]) and torch.equal(out[2], first[2])
    assert not out[3].any() and level[1:].tolist() == [2.0, 1.0, nothing]


@checks("softmax_forward_kernel")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # fp64 has no kernel
def test_an_infinite_score_makes_its_row_nan(dtype):
    """As in torch's softmax, which subtracts the largest score."""
    scores = numbers(0, 3, 130).to(dtype)
    scores[1, 5] = float("inf")
    launched = torch.ops.autopar.softmax(scores.float())
    for found in (launched, torch.ops.autopar.softmax(scores)):
        torch.testing.assert_close(found, scores.to(found.dtype).softmax(-1), equal_nan=True)
