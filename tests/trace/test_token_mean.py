"""Losses that average over the tokens that count: what one device computes of the whole batch, in micro-batches of any number of them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import autopar
from autopar.api import trace

ROWS, SEQ, VOCAB = 4, 6, 11


def each(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)


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
}  # fmt: skip
"""Exact in micro-batches however few tokens each has, none at all included."""

AVERAGED = {
    "of another mask": lambda o, y, m: (each(o, y) * m).sum() / m.sum() + (squares(o) * (m + 1)).sum() / (m + 1).sum(),
    "beside a mean of others": lambda o, y, m: mean(o, y) + (squares(o) * (m + 1)).sum() / (m + 1).sum(),
    "squared": lambda o, y, m: ((each(o, y) * m).sum() / m.sum()) ** 2,
    "nested": lambda o, y, m: (each(o, y) * ((squares(o) * m).sum() / m.sum()) * m).sum() / m.sum(),
    "of what is computed": lambda o, y, m: (each(o, y) * o.sigmoid()[..., 0]).sum() / o.sigmoid()[..., 0].sum(),
    "above the batch's mean": lambda o, y, m: (each(o, y) * (m > m.mean() - 0.1)).sum() / (m > m.mean() - 0.1).sum(),
    "a mean of a mean": lambda o, y, m: (each(o, y) * m).mean() / m.sum() * 24,
    "a whole number": lambda o, y, m: (each(o, y) * m).sum() / (m + 1).sum().long(),
    "added up as whole numbers": lambda o, y, m: (each(o, y) * m).sum() / (m + 1).sum(dtype=torch.long),
    "of pairs": lambda o, y, m: pairs(o, y),
    "weighed by the batch": lambda o, y, m: (each(o, y) * m * squares(o) / squares(o).mean()).sum() / m.sum(),
    "less the batch's mean": lambda o, y, m: (each(o, y) * (m - m.mean())).sum() / m.sum(),
    "of places in the batch": lambda o, y, m: (each(o, y) * (1 + torch.arange(m.shape[0]))[:, None]).sum() / m.sum(),
    "where the batch has some": lambda o, y, m: torch.where(m.sum() > 0, (each(o, y) * m).sum() / m.sum(), 0.0) ** 2,
    "by row": lambda o, y, m: ((each(o, y) * m).sum(1) / (m.sum(1) + 1)).mean(),
}  # fmt: skip


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
    return {"x": x, "labels": x.masked_fill((weights == 0) & (draw() < 0.7), -100), "weights": weights}


def model_of(loss) -> Tokens:
    torch.manual_seed(0)
    return Tokens(loss).double()


def stepped(loss, batch: dict[str, Tensor], micro_batch: int):
    sgd = lambda params: torch.optim.SGD(params, 0.5)  # noqa: E731
    engine = autopar.parallelize(model_of(loss), "cpu:1", batch, sgd, pin={"micro_batch": micro_batch}, precision="fp64")
    return engine.step(batch), engine


def check(expected: Tensor, model: Tokens, found: Tensor, engine) -> None:
    assert found.item() == pytest.approx(expected.item(), rel=1e-11)
    expected.backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(engine.full_state_dict()[name], parameter - 0.5 * parameter.grad, rtol=1e-11, atol=1e-12), name


@pytest.mark.parametrize("name", EXACT)
@settings(max_examples=5)
@given(seed=st.integers(0, 10**6), kept=st.tuples(*[st.sampled_from([0.0, 0.1, 0.6, 1.0])] * ROWS), micro_batch=st.sampled_from([1, 2, 4]))
def test_a_mean_over_what_counts_is_that_of_the_whole_batch(name, seed, kept, micro_batch):
    batch, model = batch_of(seed, kept), model_of(EXACT[name])
    found, engine = stepped(EXACT[name], batch, micro_batch)
    check(model(**batch), model, found, engine)
    assert not any("averaged" in note for note in engine.plan.notes)


@pytest.mark.parametrize("name", AVERAGED)
def test_other_means_are_those_of_micro_batches_and_the_plan_says_so(name):
    """But for the means beside them over tokens that a cross-entropy counts."""
    batch, model = batch_of(1, (0.9, 0.6, 0.2, 0.1)), model_of(AVERAGED[name])
    found, engine = stepped(AVERAGED[name], batch, 2)
    halves = [{key: tensor[rows] for key, tensor in batch.items()} for rows in (slice(0, 2), slice(2, 4))]
    expected = sum(model(**half) for half in halves) / 2
    if name == "beside a mean of others":
        own = model_of(lambda o, y, m: mean(o, y))
        others = model_of(lambda o, y, m: (squares(o) * (m + 1)).sum() / (m + 1).sum())
        others.load_state_dict(model.state_dict())
        own.load_state_dict(model.state_dict())
        assert found.item() == pytest.approx((own(**batch) + sum(others(**half) for half in halves) / 2).item(), rel=1e-11)
    else:
        check(expected, model, found, engine)
    assert any("averaged" in note for note in engine.plan.notes)


@pytest.mark.parametrize("other", [
    lambda o, y, m: squares(o).mean().sqrt(), lambda o, y, m: (squares(o) * m).mean() / m.mean(),
    lambda o, y, m: (each(o, y) * o.sigmoid()[..., 0]).sum() / o.sigmoid()[..., 0].sum(),
])  # fmt: skip
def test_what_stands_beside_a_masked_mean_is_told(other):
    loss = lambda o, y, m: EXACT["masked"](o, y, m) + other(o, y, m)  # noqa: E731
    batch = batch_of(1, (0.9, 0.6, 0.2, 0.1))
    found, engine = stepped(loss, batch, 2)
    assert any("averaged" in note for note in engine.plan.notes)
    parts = model_of(EXACT["masked"]), model_of(other)
    halves = [{key: tensor[rows] for key, tensor in batch.items()} for rows in (slice(0, 2), slice(2, 4))]
    assert found.item() == pytest.approx((parts[0](**batch) + sum(parts[1](**half) for half in halves) / 2).item(), rel=1e-11)


def test_a_guard_of_a_masked_mean_does_not_add_up_micro_batches():
    batch = batch_of(1, (0.9, 0.6, 0.2, 0.1))
    halves = [{key: tensor[rows] for key, tensor in batch.items()} for rows in (slice(0, 2), slice(2, 4))]
    for loss in (
        lambda o, y, m: torch.where(m.sum() > 0, (each(o, y) * m).sum() / m.sum(), 0.0),
        lambda o, y, m: (each(o, y) * m).sum() / m.sum() * (m.sum() > 0), lambda o, y, m: (each(o, y) * m).sum() * (1 / m.sum()),
    ):  # fmt: skip
        found, model = stepped(loss, batch, 2)[0].item(), model_of(loss)
        averaged = sum(model(**half) for half in halves).item() / 2
        assert found == pytest.approx(averaged, rel=1e-11) or found == pytest.approx(model(**batch).item(), rel=1e-11)


def test_labels_of_two_kinds_are_refused():
    with pytest.raises(autopar.AutoparError, match="2 different label tensors"):
        trace(model_of(lambda o, y, m: mean(o, y) + mean(o, y.roll(1, 1))), batch_of(0, (1.0,) * ROWS))


def test_weights_are_counted_exactly_in_half_precision():
    """A sum of 4,096 in bf16 has steps of 32."""
    batch = {"x": torch.zeros(2, 2048, dtype=torch.long), "labels": torch.zeros(2, 2048, dtype=torch.long), "weights": torch.ones(2, 2048)}
    batch["weights"][:, 9:20] = 0
    sgd = lambda params: torch.optim.SGD(params, 0.5)  # noqa: E731
    engine = autopar.parallelize(Tokens(EXACT["masked"]), "cpu:1", batch, sgd, pin={"micro_batch": 1}, precision="bf16")
    engine.step(batch)
    assert engine.metrics.targets == 2 * (2048 - 11)
