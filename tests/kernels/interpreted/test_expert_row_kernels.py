"""Kernels of experts' rows, of sums over partial results, and of the head's loss in chunks, against fp64 and ATen."""

from __future__ import annotations

import autopar_kernels.expert_rows
import autopar_kernels.linear_losses
import autopar_kernels.losses
import autopar_kernels.sums  # noqa: F401 (each registers its ops)
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_checks import BF16, COLUMNS, DTYPES, LAYOUTS, Comparison, checks, numbers
from support.effort import examples

TOKENS = st.sampled_from([(0, 2), (1, 1), (3, 2), (17, 1), (9, 4)])


def orders(tokens, choices):
    """A permutation of the choices, and its inverse."""
    order = torch.randperm(tokens * choices, generator=torch.Generator().manual_seed(3))
    return order, torch.argsort(order)


@checks("gather_sum_kernel")
@settings(max_examples=examples(2, 60))
@given(TOKENS, COLUMNS, DTYPES, LAYOUTS, st.sampled_from(["plain", "every_other", "expanded"]))
@example((9, 4), 129, torch.float16, "every_other", "expanded")
def test_permute(size, columns, dtype, layout, gradient):
    order, inverse = orders(*size)
    Comparison(
        torch.ops.autopar.permute_rows,
        lambda x, order, inverse, wide: x.index_select(0, order // size[1]),
        [numbers(0, size[0], columns), order, inverse],
        dtype,
        layouts=[layout],
        gradient=gradient,
    ).check()


@checks("gather_sum_kernel", "gather_dot_kernel")
@settings(max_examples=examples(2, 60))
@given(TOKENS, COLUMNS, DTYPES, LAYOUTS, st.booleans())
@example((9, 4), 257, torch.float16, "transposed", True)
def test_combine(size, columns, dtype, layout, wide_weights):
    order, inverse = orders(*size)
    Comparison(
        torch.ops.autopar.combine_rows,
        lambda rows, order, inverse, w, wide: (
            (rows[inverse].view(*size, columns) * w.unsqueeze(-1)).sum(1).to(rows.dtype)
        ),
        [numbers(0, size[0] * size[1], columns), order, inverse, numbers(1, *size)],
        dtype,
        dtypes={3: torch.float32} if wide_weights else {},
        layouts=[layout],
    ).check()


@checks("sum_few_kernel", "sum_many_kernel")
@settings(max_examples=examples(2, 60))
@given(st.sampled_from([1, 2, 7, 33, 70]), COLUMNS, DTYPES, LAYOUTS)
@example(70, 257, torch.float16, "every_other")
def test_sums_over_partial_results(parts, columns, dtype, layout):
    """One rounding: an addition at a time in half precision has more."""

    def unfused(values, wide):
        total = values[0]
        for part in values[1:]:
            total = total + part
        return total

    Comparison(
        torch.ops.autopar.sum_partials,
        unfused,
        [numbers(0, parts, 3, columns)],
        dtype,
        layouts=[layout],
    ).check()
    values = numbers(1, parts, columns).to(dtype)
    wide = torch.ops.autopar.sum_partials(values, torch.float32)
    assert wide.dtype == torch.float32
    torch.testing.assert_close(wide.double(), values.double().sum(0), rtol=1e-5, atol=1e-5)


KERNELS = ("cross_entropy_local_kernel", "cross_entropy_gradient_kernel")


@checks(*KERNELS)
@pytest.mark.parametrize(("shards", "chunk"), [(1, 2), (2, 100), (2, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_cross_entropy(shards, chunk, dtype):
    """Chunks and shards: the same loss, partial sums of hidden's gradient, each shard's part of the weight's, summed in fp32."""
    classes, columns = 34, 12
    hidden = numbers(0, 2, 3, columns).to(dtype)
    weight, target = (
        numbers(1, classes, columns).to(dtype),
        torch.tensor([[1, 33, -100], [5, 7, 20]]),
    )
    exact = [t.double().requires_grad_() for t in (hidden, weight)]
    logits = 5 * torch.tanh(exact[0] @ exact[1].t() / 5)
    expected = F.cross_entropy(logits.flatten(0, 1), target.flatten(), label_smoothing=0.1)
    expected.backward()
    parts = [p.clone().requires_grad_() for p in weight.chunk(shards)]
    starts = [i * classes // shards for i in range(shards)]
    statistics = torch.ops.autopar.cross_entropy_merge(
        torch.stack(
            [
                torch.ops.autopar.linear_cross_entropy_local(
                    hidden, part.detach(), target, None, start, True, 5.0, chunk
                )
                for part, start in zip(parts, starts, strict=True)
            ]
        )
    )
    total = torch.zeros_like(exact[0])
    for part, start in zip(parts, starts, strict=True):
        x = hidden.clone().requires_grad_()
        loss, scale = torch.ops.autopar.linear_cross_entropy_merged(
            x, part, target, statistics, None, start, classes, -100, 0.1, 0.0, 5.0, chunk
        )
        (loss.sum() / scale.sum()).backward()
        total += x.grad.double()
    tolerance = 2 * BF16 if dtype == torch.bfloat16 else 1e-5
    gradient = torch.cat([part.grad for part in parts]).double()
    assert (loss.sum() / scale.sum() - expected).abs() <= tolerance * expected
    for found, wanted in ((total, exact[0].grad), (gradient, exact[1].grad)):
        assert (found - wanted).norm() <= tolerance * wanted.norm()
