"""Dropout by counter: the generator against its published answers, its statistics, and that no split of the positions changes a mask."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from autopar.ops.random import COUNTED
from autopar.rewrite.lowerings import dropout
from autopar.rewrite.lowerings.draws import random_tensor
from autopar.rewrite.lowerings.dropout import (
    attention_with_dropout,
    call_key,
    counter_dropout,
    held_indices,
    keep_mask,
    philox,
    row_positions,
    segment_noise,
    step_noise,
)

KEY = (0x12345678, 0x9ABCDEF0)

# Random123 1.14, tests/kat_vectors, "philox4x32 10"
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_gives_the_published_answers(counter, key, expected):
    assert philox(counter, key) == expected
    words = philox([torch.tensor([c, c]) for c in counter], key)
    assert [w.tolist() for w in words] == [[e, e] for e in expected]


def whole(shape, p=0.4, key=KEY, sizes=None) -> torch.Tensor:
    return keep_mask(shape, p, key, [None] * len(shape), sizes or shape, torch.device("cpu"))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_mean_variance_and_neighbours(p):
    """2^20 draws: each statistic within five standard deviations of that of independent draws."""
    keep = whole((1024, 1024), p).double()
    number = keep.numel()
    assert abs(keep.mean() - (1 - p)) < 5 * (p * (1 - p) / number) ** 0.5
    other = [
        whole((1024, 1024), p, call_key(step_noise(7, step, 0, 1), call)).double()
        for step, call in ((0, 0), (0, 1), (1, 0))
    ]
    other += [
        whole((1024, 1024), p, (KEY[0] + 1, KEY[1])).double(),
        whole((1024, 1024), p, sizes=(None, 1024)).double(),
    ]
    other += [whole((1024, 1024), p, sizes=(1024, None)).double()]
    centred = (keep - (1 - p)) / (p * (1 - p)) ** 0.5
    moved = [centred.roll(shift, dim) for shift in (1, 2, 3, 4, 16) for dim in (0, 1)] + [
        centred.roll((1, -1), (0, 1)),
        centred.t(),
    ]
    for others in (*moved, *((o - (1 - p)) / (p * (1 - p)) ** 0.5 for o in other)):
        assert abs((centred * others).mean()) < 5 / number**0.5
    for blocks in (
        keep.view(-1, 64),
        keep.t().reshape(-1, 64),
    ):  # sums of 64 have the binomial's variance
        variance = blocks.sum(1).var() / (64 * p * (1 - p))
        assert abs(variance - 1) < 5 * (2 / blocks.shape[0]) ** 0.5 * 1.1


def test_other_seeds_steps_segments_and_calls_draw_others():
    keys = {
        call_key(segment_noise(step_noise(seed, step, 0, 4), segment), call)
        for seed in (0, 1, -1, 2**40)
        for step in range(3)
        for segment in range(3)
        for call in range(3)
    }
    assert len(keys) == 4 * 27
    # rows are no part of the key
    assert call_key(step_noise(5, 2, 0, 4), 1) == call_key(step_noise(5, 2, 3, 8), 1)


@given(st.data())
def test_any_split_equals_the_whole(data):
    rank = data.draw(st.integers(0, 4))
    shape = [data.draw(st.integers(1, 7)) for _ in range(rank)]
    grows = data.draw(st.lists(st.integers(0, rank - 1), max_size=2, unique=True)) if rank else []
    sizes = [None if d in grows else n for d, n in enumerate(shape)]
    x = torch.randn(shape, dtype=torch.float64)
    expected = counter_dropout(x, 0.4, KEY, [None] * rank, sizes)
    if not rank:
        return
    dims = data.draw(st.lists(st.integers(0, rank - 1), min_size=1, unique=True))
    orders = {d: torch.tensor(data.draw(st.permutations(range(shape[d])))) for d in dims}
    cuts = {d: data.draw(st.integers(0, shape[d])) for d in dims}
    found = torch.full_like(x, torch.nan)
    for number in range(2 ** len(dims)):
        positions: list = [None] * rank
        for bit, d in enumerate(dims):
            positions[d] = orders[d][: cuts[d]] if number >> bit & 1 else orders[d][cuts[d] :]
        held = torch.meshgrid(
            *[torch.arange(n) if p is None else p for p, n in zip(positions, shape, strict=True)],
            indexing="ij",
        )
        found[held] = counter_dropout(x[held], 0.4, KEY, positions, sizes)
    assert torch.equal(found, expected)


@given(st.data())
def test_consecutive_indices_may_be_given_by_their_start(data):
    shape = [data.draw(st.integers(1, 11)) for _ in range(3)]
    sizes = [None if data.draw(st.booleans()) and d != 1 else n for d, n in enumerate(shape)]
    x, starts = torch.ones(shape), [data.draw(st.integers(0, n - 1)) for n in shape]
    expected = counter_dropout(x, 0.4, KEY, [None] * 3, sizes)
    for dim, start in enumerate(starts):
        x, expected = (
            x.narrow(dim, start, shape[dim] - start),
            expected.narrow(dim, start, shape[dim] - start),
        )
    assert torch.equal(counter_dropout(x, 0.4, KEY, starts, sizes), expected)


@pytest.mark.parametrize("shape", [(9, 5, 4), (2, 90), (180,)])
def test_masks_made_in_pieces_are_the_same(monkeypatch, shape):
    x, sizes = torch.ones(shape), (None, *shape[1:])
    expected = counter_dropout(x, 0.3, KEY, [None] * len(shape), sizes)
    monkeypatch.setattr(dropout, "_CHUNK", 16)
    assert torch.equal(counter_dropout(x, 0.3, KEY, [None] * len(shape), sizes), expected)


def test_values_gradients_and_dtypes():
    x = torch.randn(50, 40, dtype=torch.float64, requires_grad=True)
    keep = whole(x.shape)
    saved: list = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = counter_dropout(x, 0.4, KEY, [None, None], x.shape)
    assert [(t.dtype, t.numel()) for t in saved] == [(torch.bool, x.numel())]
    assert torch.equal(out, torch.where(keep, x / 0.6, 0.0)) or torch.allclose(
        out, torch.where(keep, x / 0.6, 0.0), rtol=1e-15, atol=0
    )
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.allclose(grad, keep.double() / 0.6, rtol=1e-15, atol=0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        low = counter_dropout(torch.ones(50, 40, dtype=dtype), 0.4, KEY, [None, None], (50, 40))
        assert low.dtype == dtype and torch.equal(low != 0, keep)
    assert counter_dropout(x, 0.0, KEY, [None, None], x.shape) is x
    gone = counter_dropout(x, 1.0, KEY, [None, None], x.shape)
    assert not gone.any() and not torch.autograd.grad(gone.sum(), x)[0].any()
    assert counter_dropout(x.to("meta"), 0.4, KEY, [None, None], x.shape).shape == x.shape
    with pytest.raises(ValueError, match="grow with the batch"):
        counter_dropout(torch.ones(2, 2, 2), 0.4, KEY, [None] * 3, [None] * 3)


def test_rows_are_counted_over_ranks_and_micro_batches():
    """Eight rows as one batch, or as two micro-batches on two ranks, rows sharded or gathered; two entries a row."""
    seen = {}
    for m in range(2):
        given = step_noise(0, 0, 2 * m, 4)
        for rank in range(2):
            seen[rank, m] = row_positions(torch.empty(4), 0, given, 2, [rank], []).tolist()
        assert (
            row_positions(torch.empty(8), 0, given, 2, [0, 1], []).tolist()
            == seen[0, m] + seen[1, m]
        )
    assert seen[0, 0] + seen[0, 1] + seen[1, 0] + seen[1, 1] == list(range(16))
    assert row_positions(torch.empty(16), 0, step_noise(0, 0, 0, 8), 2, [0], []).tolist() == list(
        range(16)
    )


def test_positions_within_rows_follow_patterns():
    """Two rows of 8 entries, of which a rank of two holds the zigzag chunks, and of those its half."""
    given = step_noise(0, 0, 0, 2)
    held = [
        row_positions(torch.empty(8), 0, given, 8, [0], [(2, rank, "zigzag")]).tolist()
        for rank in range(2)
    ]
    assert held == [[0, 1, 6, 7, 8, 9, 14, 15], [2, 3, 4, 5, 10, 11, 12, 13]]
    nested = row_positions(torch.empty(4), 0, given, 8, [0], [(2, 0, "zigzag"), (2, 1, "")])
    assert nested.tolist() == [6, 7, 14, 15]
    assert held_indices(12, [(2, 1, "2:1")]).tolist() == [4, 5, 6, 7, 10, 11]


@pytest.mark.parametrize(
    ("causal", "mask"), [(False, None), (True, None), (False, "bool"), (False, "float")]
)
def test_attention_is_sdpa_where_nothing_drops(causal, mask):
    """With a vanishing p the mask keeps everything; grouped heads, a scale, and a row that may attend to nothing."""
    q, k, v = (
        torch.randn(2, 4, 5, 8).double(),
        torch.randn(2, 2, 6, 8).double(),
        torch.randn(2, 2, 6, 3).double(),
    )
    given = None
    if mask:
        given = torch.rand(2, 1, 5, 6) > 0.4
        given[0, 0, 2] = False
        given = given if mask == "bool" else torch.where(given, 0.0, -torch.inf).double()
    arguments = [t.clone().requires_grad_() for t in (q, k, v)]
    found = attention_with_dropout(
        *arguments,
        given,
        1e-12,
        causal,
        0.3,
        step_noise(0, 0, 0, 2),
        0,
        [None] * 4,
        (None, 4, 5, 6),
    )
    expected = F.scaled_dot_product_attention(
        q, k, v, given, is_causal=causal, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    assert all(t.grad.isfinite().all() for t in arguments)


DISTRIBUTIONS = {  # mean, variance
    "aten::exponential": ({"lambd": 2.0}, 0.5, 0.25),
    "aten::uniform": ({"from": -1.0, "to": 3.0}, 1.0, 16 / 12),
    "aten::rand_like": ({}, 0.5, 1 / 12),
    "aten::normal_functional": ({"mean": 1.0, "std": 2.0}, 1.0, 4.0),
    "aten::randn_like": ({}, 0.0, 1.0),
    "aten::bernoulli": ({"p": 0.3}, 0.3, 0.21),
}


@pytest.mark.parametrize("op", COUNTED)
def test_random_tensors_have_their_mean_and_variance_in_any_chunks(op, monkeypatch):
    options, mean, variance = DISTRIBUTIONS[op]
    like, noise = torch.empty(512, 512, dtype=torch.float64), step_noise(7, 0, 0, 512)
    drawn = random_tensor(like, op, options, like.dtype, noise, 1, [None] * 2, (None, 512))
    assert abs(drawn.mean() - mean) < 5 * (variance / drawn.numel()) ** 0.5
    assert abs(drawn.var() / variance - 1) < 0.02
    monkeypatch.setattr(dropout, "_CHUNK", 2**12)
    again = random_tensor(like, op, options, like.dtype, noise, 1, [None] * 2, (None, 512))
    assert torch.equal(drawn, again)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_uniform_numbers_stay_below_the_end(dtype):
    like, noise = torch.empty(1024, 1024, dtype=dtype), step_noise(7, 0, 0, 1024)
    drawn = random_tensor(like, "aten::rand_like", {}, dtype, noise, 1, [None] * 2, (None, 1024))
    assert drawn.dtype == dtype and drawn.min() >= 0 and drawn.max() < 1


def test_probabilities_of_each_element():
    chances = torch.tensor([0.0, 0.25, 1.0], dtype=torch.float64).expand(4096, 3)
    noise = step_noise(7, 0, 0, 4096)
    drawn = random_tensor(
        chances, "aten::bernoulli", {}, chances.dtype, noise, 1, [None] * 2, (None, 3)
    )
    assert drawn[:, 0].sum() == 0 and drawn[:, 2].sum() == 4096
    assert abs(drawn[:, 1].mean() - 0.25) < 5 * (0.1875 / 4096) ** 0.5
