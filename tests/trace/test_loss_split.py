"""Losses in micro-batches: what one device computes of the whole batch, or a batch that is not split."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.eager_runs import paragraph
from support.effort import every, examples
from torch import Tensor, nn

import autopar
from autopar.api import trace
from autopar.models import parse_model
from autopar.ops import rules

ROWS, SEQ, VOCAB = 4, 6, 11


def each(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(
        labels.shape
    )


def squares(logits: Tensor) -> Tensor:
    return logits.logsumexp(-1).square()


def mean(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def chain(m: Tensor) -> Tensor:
    for _ in range(30):
        m = m * m.clamp(max=1)
    return m


def pairs(o: Tensor, y: Tensor) -> Tensor:
    same = (y[:, None] == y[None]).all(-1).double() + 1
    return ((o[:, None] - o[None]).square().sum((-1, -2)) * same).sum() / same.sum()


def assigned(m: Tensor) -> Tensor:
    divisor = torch.ones_like(m)
    divisor[:] = m.sum()
    return divisor


EXACT = {
    "masked": lambda o, y, m: (each(o, y) * m).sum() / m.sum(),
    "at least one": lambda o, y, m: (each(o, y) * m).sum() / m.sum().clamp(min=1),
    "at least a hundred": lambda o, y, m: (each(o, y) * m).sum() / m.sum().clamp_min(100.0),
    "a little more": lambda o, y, m: (each(o, y) * m).sum().div(m.sum() + 0.3),
    "both": lambda o, y, m: (each(o, y) * m).sum() / (m.sum().clamp(min=2.5) + 0.1),
    "several terms": lambda o, y, m: ((each(o, y) * m).sum() + 0.1 * (squares(o) * m).sum() / 2) / m.sum() + o.square().mean(),
    "two means": lambda o, y, m: (each(o, y) * m).sum() / m.sum() + 0.1 * (squares(o) * m).sum() / m.sum(),
    "later positions": lambda o, y, m: (each(o[:, :-1], y[:, 1:]) * m[:, 1:]).sum() / m[:, 1:].sum(),
    "of labels": lambda o, y, m: F.cross_entropy(o.flatten(0, 1), y.flatten(), reduction="sum") / (y != -100).sum(),
    "cross-entropy": lambda o, y, m: mean(o, y),
    "flattened twice": lambda o, y, m: mean(o, y) + mean(2 * o, y),
    "masked labels": lambda o, y, m: mean(o, y.masked_fill(m == 0, -100)),
    "beside a mean of the same": lambda o, y, m: mean(o, y) + 0.1 * (squares(o) * (y.flatten() != -100).view_as(y)).sum()
    / (y.flatten() != -100).sum(),
    "of negative weights": lambda o, y, m: (each(o, y) * (m - 2)).sum() / (m - 2).sum(),
    "at least less than nothing": lambda o, y, m: (each(o, y) * m).sum() / (m - 9).sum().clamp(min=-40.0),
    "a chain": lambda o, y, m: (each(o, y) * chain(m)).sum() / chain(m).sum().clamp(min=0.1),
    "thresholds": lambda o, y, m: (each(o, y) * (m > 0.5)).sum() / (m > 0.5).sum(),
    "of another mask": lambda o, y, m: (each(o, y) * m).sum() / m.sum() + (squares(o) * (m + 1)).sum() / (m + 1).sum(),
    "beside a mean of others": lambda o, y, m: mean(o, y) + (squares(o) * (m + 1)).sum() / (m + 1).sum(),
    "above the batch's mean": lambda o, y, m: (each(o, y) * (m > m.mean() - 0.1)).sum() / (m > m.mean() - 0.1).sum(),
    "a mean of a mean": lambda o, y, m: (each(o, y) * m).mean() / m.sum() * 24,
    "a whole number": lambda o, y, m: (each(o, y) * m).sum() / (m + 1).sum().long(),
    "added up as whole numbers": lambda o, y, m: (each(o, y) * m).sum() / (m + 1).sum(dtype=torch.long),
    "less the mask's mean": lambda o, y, m: (each(o, y) * (m - m.mean())).sum() / m.sum(),
    "of places in the batch": lambda o, y, m: (each(o, y) * (1 + torch.arange(m.shape[0]))[:, None]).sum() / m.sum(),
    "by row": lambda o, y, m: ((each(o, y) * m).sum(1) / (m.sum(1) + 1)).mean(),
    "where there is some": lambda o, y, m: torch.where(m.sum() > 0, (each(o, y) * m).sum() / m.sum(), 0.0),
    "times what guards": lambda o, y, m: (each(o, y) * m).sum() / m.sum() * (m.sum() > 0),
    "a reciprocal": lambda o, y, m: (each(o, y) * m).sum() * (1 / m.sum()),
    "the larger of two": lambda o, y, m: (each(o, y) * m).sum() / torch.maximum(m.sum(), m.new_ones(())),
    "two means divided": lambda o, y, m: (each(o, y) * m).mean() / m.mean(),
    "one dim at a time": lambda o, y, m: (each(o, y) * m).sum(1).sum() / m.sum(1).sum(),
    "what is not padded": lambda o, y, m: (each(o, y) * m).sum() / (m.numel() - (m == 0).sum()),
    "a softmax over rows": lambda o, y, m: (each(o, y).sum(1) * m.sum(1).softmax(0)).sum(),
    "a sum and a mean": lambda o, y, m: each(o, y).sum() + squares(o).mean() + 1.5,
    "one row more": lambda o, y, m: each(o, y).sum() / (y.shape[0] + 1),
    "rows squared": lambda o, y, m: each(o, y).sum() / (y.shape[0] * y.shape[0]) + each(o, y).mean(),
    "time first": lambda o, y, m: F.cross_entropy(o.transpose(0, 1).reshape(-1, VOCAB), y.t().reshape(-1)),
    "batches in a row": lambda o, y, m: torch.sub(*(torch.cat([each(o, y), squares(o)]) * torch.cat([m, m])).sum(1).chunk(2)).mean(),
    "class weights": lambda o, y, m: F.cross_entropy(o.flatten(0, 1), y.flatten(), weight=torch.arange(1.0, VOCAB + 1).double()),
    "class weights, smoothed": lambda o, y, m: F.cross_entropy(
        o.transpose(1, 2), y, weight=torch.arange(1.0, VOCAB + 1).double(), label_smoothing=0.2),
    "probabilities": lambda o, y, m: F.cross_entropy(o.flatten(0, 1), F.one_hot(y.clamp(min=0), VOCAB).double().flatten(0, 1)),
    "a share of itself": lambda o, y, m: ((lambda x: x / x * x)(squares(o) / y.shape[0]) * each(o, y)).sum(),
    "weights cut off": lambda o, y, m: ((each(o, y).detach() * 17 / y.shape[0]).long() * each(o, y)).sum(),
    "weights rounded": lambda o, y, m: (each(o, y) * torch.div(y * 9, y.shape[0], rounding_mode="floor")).sum(),
    "states rounded": lambda o, y, m: (each(o, y) * torch.div(o[..., 0].detach() * 50, y.shape[0], rounding_mode="floor")).sum(),
    "batches in a row, and numbers": lambda o, y, m: (
        torch.logaddexp(o.new_zeros(()), torch.cat([each(o, y), squares(o)])) * torch.cat([m, m + 1])).mean(),
    "beside what is known": lambda o, y, m: (each(o, y) * m).sum() / m.sum() + m.std() + m.mean() * 2,
    "a known number times two": lambda o, y, m: torch.add((each(o, y) * m).sum(), m.mean(), alpha=2) / m.sum(),
    "by rows, rounded down": lambda o, y, m: each(o, y).sum() / torch.div(m.sum() + 7, y.shape[0], rounding_mode="floor"),
    "an entry of each row": lambda o, y, m: o[torch.arange(y.shape[0]), y[:, 0].clamp(min=0) % SEQ].square().mean(),
    "some entries of each row": lambda o, y, m: o.sum(-1)[torch.arange(len(y))[:, None], -1 - y.clamp(min=0)[:, :2] % SEQ].sum() / m.sum(),
    "the same entries of all rows": lambda o, y, m: (each(o, y) * m[torch.arange(len(y))[:, None], torch.arange(SEQ)[None] // 2]).sum(),
    "entries of rows, by pairs": lambda o, y, m: o[torch.arange(len(y))[:, None, None], (y.clamp(min=0) % SEQ).unflatten(1, (2, 3))].mean(),
    "labels of two kinds": lambda o, y, m: mean(o, y) + mean(o, y.clamp(min=0).roll(1, 1).masked_fill(m == 0, -100)),
    "weights of sum one": lambda o, y, m: (m / m.sum() * each(o, y)).sum(),
    "weights of sum one, flat": lambda o, y, m: (each(o, y).reshape(-1) * (m.reshape(-1) / m.sum())).sum(),
    "weights of sum one, time first": lambda o, y, m: (each(o, y).t() * (m.t() / m.sum())).sum(),
    "weights of sum one, time first and flat": lambda o, y, m: (m.t().reshape(-1) / m.sum()) @ each(o, y).t().reshape(-1),
    "weights of sum one, in the middle": lambda o, y, m: (each(o, y).view(1, -1, SEQ) * (m.view(1, -1, SEQ) / m.sum())).sum(),
    "weights of sum one, expanded": lambda o, y, m: (squares(o)[..., None] * o * (m / m.sum())[..., None].expand_as(o)).sum(),
    "divided in the sum": lambda o, y, m: (each(o, y).flatten() * m.flatten() / m.sum()).sum(),
    "divided by rows in the sum": lambda o, y, m: (each(o, y).sum(1) / len(y) + squares(o).mean(1) / len(y)).sum(),
    "divisor expanded": lambda o, y, m: (each(o, y) * m / m.sum().expand_as(m)).sum(),
    "divisor expanded, flat": lambda o, y, m: torch.addcdiv(
        o.new_zeros(m.numel()), (each(o, y) * m).flatten(), m.sum().expand(m.numel())).sum(),
    "divisor repeated": lambda o, y, m: (each(o, y) * m / m.sum().repeat(len(m), 1)).sum(),
    "divisor repeated and interleaved": lambda o, y, m: (
        each(o, y) * m / (m > 0).sum()[None].repeat_interleave(len(m))[:, None]).sum(),
    "divisor of each position, tiled": lambda o, y, m: (each(o, y) * m / m.sum(0).tile(len(m), 1).clamp(min=0.1)).sum(),
    "divisor broadcast": lambda o, y, m: torch.div(*torch.broadcast_tensors(each(o, y) * m, m.sum())).sum(),
    "divisor gathered": lambda o, y, m: (
        each(o, y) * m / m.sum().expand(len(m), 1).gather(1, torch.zeros_like(y))).sum(),
    "divisor expanded and scattered": lambda o, y, m: (each(o, y) * m / torch.ones_like(m).scatter(
        1, torch.arange(SEQ).expand(len(m), SEQ), m.sum().expand(len(m), SEQ))).sum(),
    "divisor filled in": lambda o, y, m: (each(o, y) * m / torch.full_like(m, m.sum())).sum(),
    "divisor in a full tensor": lambda o, y, m: (
        each(o, y) * m / m.new_full(m.shape, fill_value=m.sum()) / torch.full(m.shape, (m > 0).sum(), dtype=m.dtype)).sum(),
    "divisor written": lambda o, y, m: (each(o, y) * m / torch.empty_like(m).copy_(m.sum())).sum(),
    "divisor assigned to all entries": lambda o, y, m: (each(o, y) * m / assigned(m)).sum(),
    "ranks beside what is written": lambda o, y, m: (
        F.margin_ranking_loss(squares(o), each(o, y), m.sign(), 0.1, reduction="none") / assigned(m)).sum(),
    "counts of classes expanded": lambda o, y, m: (each(o, y) / F.one_hot(y.clamp(min=0), VOCAB).sum((0, 1))
        .expand(len(m), SEQ, VOCAB).gather(2, y.clamp(min=0)[..., None])[..., 0]).sum(),
    "normalized": lambda o, y, m: (F.normalize(m.flatten(), p=1, dim=0) * each(o, y).flatten()).sum(),
    "normalized over both dims": lambda o, y, m: (F.normalize(m, p=1, dim=(0, 1)) * each(o, y)).sum(),
    "a dot product": lambda o, y, m: torch.dot(m.flatten() / m.sum(), each(o, y).flatten()),
    "a product of matrices": lambda o, y, m: ((m / m.sum()).view(1, -1) @ each(o, y).view(-1, 1)).squeeze(),
    "an einsum": lambda o, y, m: torch.einsum("bt,bt->", m / m.sum(), each(o, y)),
    "an einsum, flat": lambda o, y, m: torch.einsum("i,i->", (m / m.sum()).flatten(), each(o, y).flatten()),
    "shares of rows": lambda o, y, m: ((m.sum(1) / m.sum()) * ((each(o, y) * m).sum(1) / (m.sum(1) + 1))).sum(),
    "a softmax over tokens": lambda o, y, m: (each(o, y).flatten() * m.flatten().softmax(0)).sum(),
    "a softmax over tokens, back in rows": lambda o, y, m: (each(o, y) * m.flatten().softmax(0).view_as(m)).sum(),
    "a softmax over tokens, time first": lambda o, y, m: (each(o, y).t().flatten() * m.t().flatten().softmax(0)).sum(),
    "a softmax at each position": lambda o, y, m: (each(o, y) * m.softmax(0)).sum(),
    "a softmax at each position, time first": lambda o, y, m: (each(o, y).t() * m.t().softmax(1)).sum(),
    "ranks of rows": lambda o, y, m: (each(o, y).mean(1) * (1 + m.sum(1).argsort().argsort()) / len(y)).sum(),
    "a running share": lambda o, y, m: (each(o, y).flatten() * (m.flatten().cumsum(0) / m.sum())).sum(),
    "two batches, flat": lambda o, y, m: (torch.cat([each(o, y), squares(o)]).flatten() * (torch.cat([m, m]) / m.sum()).flatten()).sum(),
    "means in means": lambda o, y, m: ((each(o, y) * m / m.mean()).mean(1) * (m.sum(1) / m.sum(1).mean())).mean(),
    "chosen and divided": lambda o, y, m: (each(o, y)[m > 0] / (m > 0).sum()).sum(),
}  # fmt: skip
"""Exact in micro-batches however few tokens each has, none at all included."""

REFUSED = {
    "squared": lambda o, y, m: ((each(o, y) * m).sum() / m.sum()) ** 2,
    "nested": lambda o, y, m: (each(o, y) * ((squares(o) * m).sum() / m.sum()) * m).sum() / m.sum(),
    "of what is computed": lambda o, y, m: (each(o, y) * o.sigmoid()[..., 0]).sum() / o.sigmoid()[..., 0].sum(),
    "of pairs": lambda o, y, m: pairs(o, y),
    "a sum that is expanded": lambda o, y, m: ((each(o, y) * m).sum().expand_as(m) * m).sum() / m.sum(),
    "weighed by the batch": lambda o, y, m: (each(o, y) * m * squares(o) / squares(o).mean()).sum() / m.sum(),
    "where the batch has some": lambda o, y, m: torch.where(m.sum() > 0, (each(o, y) * m).sum() / m.sum(), 0.0) ** 2,
    "chosen and rejected": lambda o, y, m: -F.logsigmoid(torch.sub(*(each(o, y) * m).sum(1).chunk(2))).mean(),
    "every other row": lambda o, y, m: (each(o, y)[0::2] - each(o, y)[1::2]).square().mean(),
    "less its mean": lambda o, y, m: (squares(o) - squares(o).mean(0)).square().mean(),
    "by its own value": lambda o, y, m: each(o, y).mean() / each(o, y).mean().detach(),
    "root": lambda o, y, m: squares(o).mean().sqrt(),
    "in the order of rows": lambda o, y, m: each(o, y).cumsum(0).mean(),
    "the largest": lambda o, y, m: each(o, y).sum(1).max() + each(o, y).mean(),
    "times the rows": lambda o, y, m: torch.add(each(o, y).sum(), squares(o).sum(), alpha=y.shape[0]),
    "pairs in a row": lambda o, y, m: (torch.logaddexp(o.new_zeros(()), torch.cat([each(o, y), squares(o)]))
                                       * torch.stack([each(o, y), m], 1).flatten(0, 1)).mean(),
}  # fmt: skip
"""A batch of these is one micro-batch, unless the user says otherwise."""


class Tokens(nn.Module):
    def __init__(self, loss) -> None:
        super().__init__()
        self.embed, self.linear, self.loss = nn.Embedding(VOCAB, 6), nn.Linear(6, VOCAB), loss

    def forward(self, x: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        return self.loss(self.linear(self.embed(x)), labels, weights)


def batch_of(seed: int, kept: tuple[float, ...]) -> dict[str, Tensor]:
    """Rows of which a mask of weights keeps about such shares of tokens."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda: torch.rand(ROWS, SEQ, generator=generator, dtype=torch.float64)  # noqa: E731
    x, shares = torch.randint(VOCAB, (ROWS, SEQ), generator=generator), torch.tensor(kept)[:, None]
    weights = (draw() < shares) * (0.5 + draw())
    weights[0, 2] = 1.0
    return {
        "x": x,
        "labels": x.masked_fill((weights == 0) & (draw() < 0.7), -100),
        "weights": weights,
    }


def model_of(loss) -> Tokens:
    torch.manual_seed(0)
    return Tokens(loss).double()


def stepped(loss, batch: dict[str, Tensor], micro_batch: int, **more):
    sgd = lambda params: torch.optim.SGD(params, 0.5)  # noqa: E731
    engine = autopar.parallelize(
        model_of(loss),
        "cpu:1",
        batch,
        sgd,
        pin={"micro_batch": micro_batch},
        precision="fp64",
        **more,
    )
    return engine.step(batch), engine


def check(expected: Tensor, model: Tokens, found: Tensor, engine) -> None:
    assert found.item() == pytest.approx(expected.item(), rel=1e-11)
    expected.backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(
            engine.full_state_dict()[name], parameter - 0.5 * parameter.grad, rtol=1e-11, atol=1e-12
        ), name


@pytest.mark.parametrize("name", every(8, EXACT))
@settings(max_examples=examples(1, 5))
@given(
    seed=st.integers(0, 10**6),
    kept=st.tuples(*[st.sampled_from([0.0, 0.1, 0.6, 1.0])] * ROWS),
    micro_batch=st.sampled_from([1, 2, 4]),
)
def test_a_mean_over_what_counts_is_that_of_the_whole_batch(name, seed, kept, micro_batch):
    batch, model = batch_of(seed, kept), model_of(EXACT[name])
    found, engine = stepped(EXACT[name], batch, micro_batch)
    check(model(**batch), model, found, engine)
    assert not any("split" in note or "averaged" in note for note in engine.plan.notes)


@pytest.mark.parametrize("name", every(10, REFUSED))
def test_a_batch_of_any_other_loss_is_not_split(name):
    """Pinned micro-batches are refused with advice, which is exact; a mean of micro-batch losses is for the user to allow."""
    batch, model = batch_of(1, (0.9, 0.6, 0.2, 0.1)), model_of(REFUSED[name])
    with pytest.raises(
        autopar.AutoparError,
        match=r"combines rows of the batch.*Pin micro_batch=4.*allow_micro_batch_mean=True",
    ) as refused:
        stepped(REFUSED[name], batch, 2)
    paragraph(refused.value)
    with pytest.raises(autopar.AutoparError, match="Pin micro_batch=4"):
        autopar.plan(model, "cpu:1", batch, pin={"micro_batch": 2})
    found, engine = stepped(REFUSED[name], batch, 4)
    check(model(**batch), model, found, engine)
    assert autopar.plan(model, "cpu:1", batch).num_microbatches == 1
    model, halves = (
        model_of(REFUSED[name]),
        [
            {key: tensor[rows] for key, tensor in batch.items()}
            for rows in (slice(0, 2), slice(2, 4))
        ],
    )
    found, engine = stepped(REFUSED[name], batch, 2, allow_micro_batch_mean=True)
    check(sum(model(**half) for half in halves) / 2, model, found, engine)
    assert any(
        "averaged, as allow_micro_batch_mean=True says" in note for note in engine.plan.notes
    )


def test_weights_are_counted_exactly_in_half_precision():
    """A sum of 4,096 in bf16 has steps of 32."""
    batch = {
        "x": torch.zeros(2, 2048, dtype=torch.long),
        "labels": torch.zeros(2, 2048, dtype=torch.long),
        "weights": torch.ones(2, 2048),
    }
    batch["weights"][:, 9:20] = 0
    sgd = lambda params: torch.optim.SGD(params, 0.5)  # noqa: E731
    engine = autopar.parallelize(
        Tokens(EXACT["masked"]), "cpu:1", batch, sgd, pin={"micro_batch": 1}, precision="bf16"
    )
    engine.step(batch)
    work = engine.batches.split(batch)
    assert work.inputs[0]["batch_value"] == 2 * (2048 - 11)


def test_rows_that_all_ranks_gather_are_priced():
    batch = batch_of(0, (1.0,) * ROWS)
    names = ("masked", "a softmax over rows")
    sums, rows = (
        autopar.plan(model_of(EXACT[name]), "cpu:2", batch, 512, {"dp": 2}, precision="fp64")
        for name in names
    )
    assert (
        rows.predicted.peak_memory_bytes[0] - sums.predicted.peak_memory_bytes[0] >= 512 * SEQ * 8
    )


class Named(Tokens):
    """A buffer that is called as an input is, and inputs without rows."""

    def __init__(self, loss) -> None:
        super().__init__(loss)
        self.register_buffer("weights", torch.linspace(0.5, 3, SEQ))

    def forward(
        self, x: Tensor, labels: Tensor, weights: Tensor, part0: Tensor, more: Tensor
    ) -> Tensor:
        return self.loss(self.linear(self.embed(x)), labels, weights * self.weights, part0, more)


@pytest.mark.parametrize("loss", [
    lambda o, y, m, p, k: (each(o, y) * m).sum() / m.sum(),
    lambda o, y, m, p, k: (each(o, y) * m).sum() / (p.sum() + k),
    lambda o, y, m, p, k: (each(o, y) * p * k).sum() / (m * k).sum().clamp(min=k),
    lambda o, y, m, p, k: (each(o, y).sum(1) * (p.sum(1) * k + m.sum()).softmax(0)).sum(),
])  # fmt: skip
def test_inputs_and_buffers_of_all_names(loss):
    torch.manual_seed(0)
    batch, model = batch_of(3, (0.9, 0.6, 0.2, 0.1)), Named(loss).double()
    batch |= {"part0": batch["weights"].flip(1), "more": torch.tensor(0.7, dtype=torch.float64)}
    sgd = lambda params: torch.optim.SGD(params, 0.5)  # noqa: E731
    engine = autopar.parallelize(
        model, "cpu:1", batch, sgd, pin={"micro_batch": 1}, precision="fp64"
    )
    check(model(**batch), model, engine.step(batch), engine)


@pytest.mark.parametrize("loss", [
    lambda o, y, m: (each(o, y) * o.new_zeros(ROWS).index_add(0, y[:, 0] % ROWS, m.sum(1))[y % ROWS]).sum(),
    lambda o, y, m: (each(o, y) * (torch.eye(VOCAB) @ (F.one_hot(y, VOCAB) * m[..., None]).sum((0, 1)))[y]).mean(),
    lambda o, y, m: (each(o, y).sum(1) * torch.zeros(9).scatter(0, y[:, 1], m.sum(1) + m.sum())[:ROWS].sum()).sum(),
    lambda o, y, m: each(o, y).sum() / torch.lerp(torch.ones(1), m.sum()[None], 0.5).sum(),
])  # fmt: skip
def test_sums_are_wide_beside_what_is_not(loss):
    """Sums are in fp64, and products and writes take one dtype."""
    batch = batch_of(3, (0.9, 0.6, 0.2, 0.1))
    batch = {"x": batch["x"], "labels": batch["x"] % 9, "weights": batch["weights"].float()}
    model, sgd = model_of(loss).float(), lambda params: torch.optim.SGD(params, 0.5)
    engine = autopar.parallelize(
        model, "cpu:1", batch, sgd, pin={"micro_batch": 1}, precision="fp32"
    )
    assert engine.step(batch).item() == pytest.approx(model(**batch).item(), rel=1e-6)


class Counting(Tokens):
    """Forward changes a buffer, and the loss may read it."""

    def __init__(self, loss) -> None:
        super().__init__(loss)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        return self.loss(self.linear(self.embed(x)), labels, weights, self.seen)


def moving(loss: Tensor, m: Tensor, seen: Tensor) -> Tensor:
    seen.mul_(0.9).add_(0.1 * m.mean())
    return loss * (1 + seen)


@pytest.mark.parametrize(("loss", "reason"), [
    pytest.param(lambda o, y, m, seen: squares(o).mean() / seen.add_(1), "changes buffer 'seen'", marks=pytest.mark.slow),
    (lambda o, y, m, seen: moving(squares(o).mean(), m, seen), "changes buffer 'seen'"),
    pytest.param(
        lambda o, y, m, seen: squares(o).mean() * (seen.clone() + 2 + 0 * seen.copy_(m.sum() + seen)), "changes buffer 'seen'",
        marks=pytest.mark.slow,
    ),
    (lambda o, y, m, seen: squares(o).mean() * (1 + seen.copy_(o.detach().mean())), "combines rows"),
    (lambda o, y, m, seen: squares(o).mean() + 0 * seen.copy_(torch.ones(())), ""),
])  # fmt: skip
def test_buffers_that_one_micro_batch_changes_for_the_next(loss, reason):
    """Two steps, so that what the first leaves in the buffer counts."""
    torch.manual_seed(0)
    batch, model = batch_of(1, (0.9, 0.6, 0.2, 0.1)), Counting(loss).double()
    sgd = lambda params: torch.optim.SGD(params, 0.5)  # noqa: E731

    def make(rows):
        pin = {"micro_batch": rows}
        return autopar.parallelize(model, "cpu:1", batch, sgd, pin=pin, precision="fp64")

    if reason:
        with pytest.raises(autopar.AutoparError, match=f"{reason}.*Pin micro_batch=4"):
            make(2)
    engine = make(4 if reason else 1)
    model = copy.deepcopy(model)
    optimizer = sgd(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        expected = model(**batch)
        expected.backward()
        assert engine.step(batch).item() == pytest.approx(expected.item(), rel=1e-11)
        optimizer.step()
    state = engine.full_state_dict()
    assert all(
        torch.allclose(state[name], tensor, rtol=1e-11, atol=1e-12)
        for name, tensor in model.state_dict().items()
    )


class WithRouters(nn.Module):
    """A model with routed experts and balance losses, and one more term of its loss."""

    def __init__(self, more) -> None:
        super().__init__()
        self.body, self.more = parse_model("moe-tiny").build("cpu", torch.float64), more

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return self.body(input_ids, labels) + self.more(self.body, input_ids, labels)


def first_states(body: nn.Module, ids: Tensor) -> Tensor:
    return body.embed(ids)


@pytest.mark.parametrize(("more", "joins"), [
    (lambda body, ids, labels: 0.0 * first_states(body, ids).sum(), "sum"),
    pytest.param(
        lambda body, ids, labels: first_states(body, ids).mean((0, 1)).square().sum(), "", marks=pytest.mark.slow
    ),
    pytest.param(lambda body, ids, labels: first_states(body, ids).std(), "", marks=pytest.mark.slow),
    (lambda body, ids, labels: (first_states(body, ids) @ body.embed.weight.t()).softmax(-1).mean((0, 1)).square().sum(), ""),
])  # fmt: skip
def test_balance_losses_of_routers_alone_are_those_of_micro_batches(more, joins):
    """Terms on states or output logits that are shaped alike are not."""
    batch = {"input_ids": torch.randint(9, (4, 8)), "labels": torch.randint(9, (4, 8))}
    split = trace(WithRouters(more), batch).split
    assert (split.joins, split.by_convention[:1] * bool(joins)) == (
        joins,
        ("balance losses of routers",) * bool(joins),
    )


class OddGates(nn.Module):
    """Experts chosen or weighed by more than the logits of a gate, `kind`, and one more term of the loss."""

    def __init__(self, kind, more) -> None:
        super().__init__()
        self.kind, self.more = kind, more
        self.embed, self.mix, self.gate, self.head = (
            nn.Embedding(9, 6),
            nn.Linear(6, 6),
            nn.Linear(6, 4),
            nn.Linear(6, 9),
        )
        self.up, self.down = (nn.Parameter(torch.ones(4, *shape)) for shape in ((8, 6), (6, 8)))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        states = self.embed(x.flatten())
        states = states + self.mix(states)
        logits, weights, index = self.kind(self, x.flatten(), states)
        experts = torch.ops.autopar.routed_experts(
            states, index, weights, self.up, None, self.down, None, "plain:relu", False, 0.0
        )
        out = self.head(states + experts)
        return F.cross_entropy(out, labels.flatten()) + self.more(out, states, logits)


def routed(logits: Tensor, scale: Tensor | float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    return logits, *(logits / scale).softmax(-1).topk(2)


KINDS = {
    "plain": lambda m, x, h: routed(m.gate(h)),
    "of a table": lambda m, x, h: (h, torch.ones_like(h[:, :1]), (x % 4)[:, None]),
    "scaled by states": lambda m, x, h: routed(m.gate(h), h.norm(dim=-1, keepdim=True)),
    "no product": lambda m, x, h: routed((h[:, None] * m.gate.weight).sum(-1)),
}


@pytest.mark.parametrize("kind", every(3, KINDS))
def test_states_and_outputs_are_no_logits_of_gates(kind):
    """However experts are chosen."""
    batch = {"x": torch.randint(9, (4, 6)), "labels": torch.randint(9, (4, 6))}
    terms = {
        "of outputs": (lambda out, states, logits: out.std(), ""),
        "of states": (lambda out, states, logits: states.mean(0).square().sum(), ""),
        "of logits": (
            lambda out, states, logits: logits.softmax(-1).mean(0).square().sum(),
            "sum" if kind in ("plain", "scaled by states") else "",
        ),
    }
    for name, (more, joins) in terms.items():
        assert trace(OddGates(KINDS[kind], more), batch).split.joins == joins, name


@pytest.mark.parametrize(("module", "joins", "conventions"), [
    (nn.Embedding(VOCAB, 6, scale_grad_by_freq=True), "", ()),
    (nn.Sequential(nn.Embedding(VOCAB, 6), nn.BatchNorm1d(SEQ)), "sum", ("batch statistics",)),
    (nn.Sequential(nn.Embedding(VOCAB, 6), nn.LayerNorm(6)), "sum", ()),
])  # fmt: skip
def test_gradients_that_depend_on_other_rows(module, joins, conventions):
    model = model_of(lambda o, y, m: mean(o, y))
    model.embed = module.double()
    split = trace(model, batch_of(0, (1.0,) * ROWS)).split
    assert (split.joins, split.by_convention) == (joins, conventions)
    assert joins or split.reason.startswith("embedding (test_loss_split.py:")


def test_an_op_without_a_rule_is_given_one(monkeypatch):
    """It may do anything to rows; with a rule its loss is exact."""
    loss = lambda o, y, m: torch.cdist(o, o).mean() + each(o, y).mean()  # noqa: E731
    batch, model = batch_of(1, (0.9, 0.6, 0.2, 0.1)), model_of(loss)
    with pytest.raises(
        autopar.AutoparError,
        match=r"cdist \(test_loss_split.py:.*no rule \(autopar.register_rule gives it one\)",
    ):
        stepped(loss, batch, 2)
    monkeypatch.setattr(rules, "_RULES", dict(rules._RULES))
    autopar.register_rule("aten::cdist", "b.. m !d, b.. n !d -> b.. m n")
    check(model(**batch), model, *stepped(loss, batch, 2))
