"""Batches whose rows neither ranks nor micro-batches divide, in training and evaluation, against one device."""

from __future__ import annotations

import traceback
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from support.effort import tried
from support.exactness import run_steps, sgd, train, update_error
from torch import Tensor, nn
from torch.utils.data import DataLoader

import autopar
from autopar.errors import AutoparError
from autopar.runtime.batches.deal import deal, even_deal, rows_of_rank
from autopar.runtime.batches.sampler import DataParallelSampler

ROWS, CLASSES = 8, 5


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


LOSSES = {
    "mean": lambda m, o, y: F.cross_entropy(o, y.clamp(min=0), reduction="none").mean(),
    "labels that count": lambda m, o, y: F.cross_entropy(o, y, weight=m.weights),
    "terms of several kinds": lambda m, o, y: (
        o.square().sum() / 50 + F.cross_entropy(o, y) + m.head.weight.square().sum() / y.shape[0]
        + (o.sum(1) * torch.arange(y.shape[0])).mean() / 9 + 0.01 * m.head.weight.square().sum()
    ),
}  # fmt: skip


class Model(nn.Module):
    def __init__(self, loss: str, dropout: float = 0.0) -> None:
        super().__init__()
        self.loss, self.layers = loss, nn.ModuleList(Layer() for _ in range(2))
        self.head, self.drop = nn.Linear(6, CLASSES), nn.Dropout(dropout)
        self.register_buffer("weights", torch.linspace(0.3, 2, CLASSES))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(self.drop(x))
        return LOSSES[self.loss](self, self.head(x), labels)


def model_of(loss: str, dropout: float = 0.0) -> Model:
    torch.manual_seed(0)
    return Model(loss, dropout).double()


def batch_of(rows: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    labels = torch.randint(CLASSES, (rows,), generator=generator)
    labels[2::3] = -100
    return {
        "x": torch.randn(rows, 6, generator=generator, dtype=torch.float64),
        "labels": labels,
    }


BATCHES = [batch_of(rows) for rows in (8, 7, 1, 3)]


def errors(rank: int, devices: int, cells: list[tuple[str, dict]]) -> dict[str, float | str]:
    """The update error over its tolerance of each loss under its pins, or the traceback."""
    found: dict[str, float | str] = {}
    for loss, pin in cells:
        reference = train(model_of(loss), BATCHES)
        try:
            engine = autopar.parallelize(
                model_of(loss), f"cpu:{devices}", BATCHES[0], sgd, pin=pin, precision="fp64"
            )
            evaluated = [float(engine.eval_step(engine.local_batch(batch))) for batch in BATCHES]
            with torch.no_grad():
                expected = [float(model_of(loss)(**batch)) for batch in BATCHES]
            assert evaluated == pytest.approx(expected, rel=1e-11)
            losses, state = run_steps(engine, BATCHES)
            assert losses == pytest.approx(reference.losses, rel=1e-11)
            assert engine.metrics.tokens == 3
            found[f"{loss} {pin}"] = update_error(reference, state)
        except Exception:
            found[f"{loss} {pin}"] = traceback.format_exc()
    return found


def check(results: list[dict[str, float | str]]) -> None:
    for result in results:
        for name, error in result.items():
            assert isinstance(error, float) and error <= 1, f"{name}: {error}"


@pytest.mark.slow
def test_micro_batches_of_one_device():
    check([errors(0, 1, [(loss, {"micro_batch": 4}) for loss in LOSSES])])


def test_two_ranks(pool2):
    cells = [
        ("mean", {"dp": 2, "micro_batch": 2, "zero": 3}),
        ("labels that count", {"pp": 2, "micro_batch": 2, "schedule": "1f1b"}),
        ("terms of several kinds", {"dp": 2, "micro_batch": 2}),
        ("terms of several kinds", {"tp": 2, "micro_batch": 4}),
    ]
    check(pool2.run(errors, 2, tried(cells[1:3], cells)))


@pytest.mark.slow
def test_four_ranks(pool4):
    pins = [
        {"dp": 4, "micro_batch": 1},
        {"dp": 2, "tp": 2, "micro_batch": 2},
        {"dp": 2, "pp": 2, "micro_batch": 2},
    ]
    check(pool4.run(errors, 4, [(loss, pin) for loss in LOSSES for pin in pins], timeout_s=600))


def dropped(rank: int, pin: dict) -> dict[str, Tensor]:
    """Parameters after steps with dropout, on two ranks or, with pins of one, on each by itself."""
    engine = autopar.parallelize(
        model_of("mean", 0.3), "cpu:2", BATCHES[0], sgd, pin=pin, precision="fp64"
    )
    return run_steps(engine, BATCHES)[1]


def test_dropout_draws_the_masks_of_one_device(pool2):
    one = autopar.parallelize(
        model_of("mean", 0.3), "cpu:1", BATCHES[0], sgd, pin={"micro_batch": 8}, precision="fp64"
    )
    expected = run_steps(one, BATCHES)[1]
    for state in pool2.run(dropped, {"dp": 2, "micro_batch": 2}):
        for name, tensor in expected.items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-12)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.inner(x)).square().sum(1).mean()


def batch_norm(rank: int) -> str:
    engine = autopar.parallelize(Normed(), "cpu:2", {"x": torch.randn(8, 6)}, sgd, pin={"dp": 2})
    batch = engine.local_batch({"x": torch.randn(7, 6)})
    engine.eval_step(batch)
    with pytest.raises(AutoparError) as refused:
        engine.step(batch)
    return str(refused.value)


def test_rows_do_not_count_twice_in_the_statistics_of_batch_norm(pool2):
    for message in pool2.run(batch_norm):
        assert r"ranks hold [4, 3] rows" in message and "no row may run twice" in message


def test_batch_norm_of_one_value_is_refused():
    """As PyTorch refuses it: the running variance divides by the values less 1."""
    batch = {"x": torch.randn(8, 6)}
    with pytest.raises(AutoparError, match=r"of one row has one value .*larger micro_batch"):
        autopar.plan(Normed(), "cpu:1", batch, pin={"micro_batch": 1})
    assert autopar.plan(Normed(), "cpu:2", batch, pin={"dp": 2, "micro_batch": 1})
    engine = autopar.parallelize(Normed(), "cpu:1", batch, sgd)
    with pytest.raises(AutoparError, match="of one row has one value"):
        engine.step({"x": torch.randn(1, 6)})
    engine.eval_step({"x": torch.randn(1, 6)})


class Contrastive(Normed):
    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        return F.cross_entropy(x @ x.T, torch.arange(x.shape[0]))


def test_a_loss_over_pairs_of_rows_is_refused(pool2):
    engine = autopar.parallelize(
        Contrastive(), "cpu:1", {"x": torch.randn(8, 6)}, sgd, pin={"micro_batch": 8}
    )
    assert float(engine.step({"x": torch.randn(7, 6)})) > 0  # one micro-batch
    for message in pool2.run(contrastive):
        assert "the loss is no sum over rows" in message


def contrastive(rank: int) -> str:
    engine = autopar.parallelize(
        Contrastive(), "cpu:2", {"x": torch.randn(8, 6)}, sgd, pin={"dp": 2}
    )
    with pytest.raises(AutoparError) as refused:
        engine.step(engine.local_batch({"x": torch.randn(7, 6)}))
    return str(refused.value)


# ------------------------------------------------------------------------------------------------------------- one process


@given(
    batch=st.integers(1, 60),
    ranks=st.integers(1, 6),
    most=st.integers(1, 9),
    least=st.integers(1, 5),
)
def test_every_row_counts_once(batch, ranks, most, least):
    found = deal(batch, ranks, most, lambda number: number >= least)
    assert 1 <= found.rows <= most and len(found.parts) >= least
    counted = dict.fromkeys(range(batch), Fraction(0))
    for part in found.parts:
        for rank in range(ranks):
            for row in found.held(part, rank):
                counted[row] += Fraction(part.weight).limit_denominator(10**6)
    assert set(counted.values()) == {1}


@given(batch=st.integers(1, 60), ranks=st.integers(1, 6), most=st.integers(1, 9))
def test_rows_run_once_or_one_after_the_other_where_that_is_asked(batch, ranks, most):
    once = deal(batch, ranks, most, once=True)
    assert (once is None) == bool(batch % ranks)
    held = [] if once is None else [once.held(p, r) for p in once.parts for r in range(ranks)]
    assert sorted(row for rows in held for row in rows) == (list(range(batch)) if held else [])
    found = deal(batch, ranks, most, consecutive=True)
    for part in found.parts:
        for rank in range(ranks):
            first, stride = found.place(part, rank)
            rows = found.held(part, rank)
            assert rows == list(range(first + rank * stride, first + rank * stride + found.rows))


@given(batch=st.integers(0, 60), ranks=st.integers(1, 6))
def test_shares_are_the_batch(batch, ranks):
    rows = [rows_of_rank(batch, ranks, rank) for rank in range(ranks)]
    assert [row for first, number in rows for row in range(first, first + number)] == list(
        range(batch)
    )
    if batch and batch % ranks == 0:
        even = even_deal(batch, ranks, batch // ranks)
        assert [even.held(even.parts[0], r) for r in range(ranks)] == [
            list(range(first, first + number)) for first, number in rows
        ]


@given(rows=st.integers(2, 40), batch=st.sampled_from([2, 4, 6]))
def test_a_sampler_that_drops_nothing(rows, batch):
    parts = 2
    if rows % batch == 1:
        with pytest.raises(
            AutoparError, match=r"the last batch of \d+ rows has 1, fewer than the 2"
        ):
            DataParallelSampler(range(rows), batch, parts, 0, lambda: 0, drop_last=False)
        return
    samplers = [
        DataParallelSampler(range(rows), batch, parts, k, lambda: 0, drop_last=False)
        for k in range(parts)
    ]
    batches = [list(DataLoader(range(rows), batch_sampler=sampler)) for sampler in samplers]
    assert len(batches[0]) == len(batches[1]) == len(samplers[0]) == -(-rows // batch)
    seen = torch.cat([torch.cat(step) for step in zip(*batches, strict=True)])
    assert sorted(seen.tolist()) == list(range(rows))
