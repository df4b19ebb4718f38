"""The rotary kernel in the interpreter, against fp64 and the spellings of modelled code."""

from __future__ import annotations

import autopar_kernels.rotary  # noqa: F401 (registers the ops)
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_checks import DTYPES, LAYOUTS, Comparison, checks, numbers
from support.effort import examples


def turned(x, interleaved):
    """rotate_half, or rotate_every_two."""
    if interleaved:
        return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    low, high = x.chunk(2, -1)
    return torch.cat([-high, low], -1)


def unfused(x, cos, sin, rotated, last, interleaved, heads_last, promote=False, parted=False):
    """As transformers' modules spell it, for tables of all rotated columns."""
    start = x.shape[-1] - rotated if last else 0
    head, middle, tail = x.split([start, rotated, x.shape[-1] - rotated - start], -1)
    cos, sin = (t.unsqueeze(2 if heads_last else 1) for t in (cos, sin))
    done = middle * cos + turned(middle, interleaved) * sin
    if parted:
        done = torch.cat([done[..., ::2], done[..., 1::2]], -1)
    return torch.cat([head, done, tail], -1)


def tables(batch, tokens, columns):
    """Tables of different angles for the two columns of a pair, which the rotation back must tell apart."""
    angles = numbers(5, batch, tokens, columns)
    return angles.cos(), angles.sin()


@checks("rotary_kernel")
@settings(max_examples=examples(2, 60))
@given(
    st.sampled_from([(1, 1), (1, 3), (2, 2), (0, 2)]),
    st.sampled_from([(1, 1), (3, 1), (4, 2), (5, 5)]),
    st.sampled_from([(2, 1.0), (6, 1.0), (8, 0.25), (64, 0.5), (130, 1.0), (16, 1.0)]),
    DTYPES, st.booleans(), st.sampled_from(["halves", "neighbours", "parted"]), st.booleans(), LAYOUTS, LAYOUTS,
    st.sampled_from(["plain", "every_other", "expanded"]),
)  # fmt: skip
@example((2, 2), (3, 1), (8, 0.25), torch.float16, True, "neighbours", False, "every_other", "transposed", "plain")  # fmt: skip
@example((2, 2), (4, 2), (64, 0.5), torch.float32, False, "halves", True, "padded", "plain", "expanded")  # fmt: skip
@example((1, 3), (3, 1), (64, 0.5), torch.float32, True, "parted", False, "plain", "plain", "plain")
def test_queries_and_keys(size, heads, width, dtype, last, pairs, heads_last, of_q, of_k, gradient):
    (batch, tokens), (columns, share) = size, width
    rotated = int(columns * share)
    cos, sin = tables(batch, tokens, rotated)
    shapes = [
        (batch, tokens, h, columns) if heads_last else (batch, h, tokens, columns) for h in heads
    ]
    flags = (last, pairs != "halves", heads_last, False, pairs == "parted")
    Comparison(
        lambda q, k, c, s: torch.ops.autopar.rotary(q, k, c, s, None, rotated, *flags),
        lambda q, k, c, s, wide: tuple(unfused(x, c, s, rotated, *flags) for x in (q, k)),
        [*(numbers(i, *shape) for i, shape in enumerate(shapes)), cos, sin],
        dtype,
        layouts=[of_q, of_k],
        gradient=gradient,
        constant=[2, 3],
    ).check()


@checks("rotary_kernel")
@pytest.mark.parametrize("interleaved", [False, True])
def test_positions_of_each_row(interleaved):
    """Rows of a batch start at positions of their own; the two columns of a pair share an angle."""
    positions = torch.tensor([[0, 1, 2], [7, 3, 7]])
    angles = numbers(5, 9, 5)
    whole = (lambda t: t.repeat_interleave(2, -1)) if interleaved else (lambda t: t.repeat(1, 1, 2))
    Comparison(
        lambda x, c, s: torch.ops.autopar.rotary_single(
            x, c, s, positions, None, False, interleaved
        ),
        lambda x, c, s, wide: unfused(
            x, whole(c[positions]), whole(s[positions]), 10, False, interleaved, False
        ),
        [numbers(0, 2, 3, 3, 10), angles.cos(), angles.sin()],
        torch.float16,
        constant=[1, 2],
    ).check()


@checks("rotary_kernel")
def test_fp32_tables_and_one_table_for_all_rows():
    cos, sin = tables(1, 3, 8)
    for promote in (False, True):
        Comparison(
            lambda x, c, s, promote=promote: torch.ops.autopar.rotary_single(
                x, c, s, None, None, False, False, False, promote
            ),
            lambda x, c, s, wide, promote=promote: unfused(x, c, s, 8, False, False, False).to(
                wide if promote else x.dtype
            ),
            [numbers(0, 2, 2, 3, 8), cos, sin],
            torch.float16,
            dtypes={1: torch.float32, 2: torch.float32},
            constant=[1, 2],
        ).check()


@checks("rotary_kernel")
def test_twice_from_the_same_inputs():
    """Recomputation runs forward twice: inputs stay as they are, and only the gradient asked for is made."""
    q, k = numbers(0, 1, 2, 2, 8).float().requires_grad_(), numbers(1, 1, 1, 2, 8).float()
    cos, sin = (t.float() for t in tables(1, 2, 8))
    kept = q.detach().clone()
    first, second = (torch.ops.autopar.rotary(q, k, cos, sin) for _ in range(2))
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    first[0].sum().backward()
    assert torch.equal(q, kept) and k.grad is None
    k.requires_grad_()
    torch.ops.autopar.rotary(q.detach(), k, cos, sin)[1].sum().backward()
    assert k.grad is not None and k.grad.isfinite().all()
