"""Losses that read consecutive rows together, as pairs and groups of samples: no rank and no micro-batch cuts a group."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.captures import captured_once
from support.effort import every, slow_but
from support.exactness import moved, run_steps, sgd, train_in_place, update_error
from torch import Tensor, nn

import autopar
from autopar.api import trace
from autopar.errors import AutoparError

ROWS, SEQ, VOCAB, WIDTH = 16, 5, 13, 8


class Scores(nn.Module):
    """A score of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 1)

    def scores(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x).mean(1).squeeze(-1)


class Pairs(Scores):
    """Each row is better than the next one (Bradley and Terry 1952), by a margin."""

    def forward(self, ids: Tensor, margin: Tensor) -> Tensor:
        better, worse = self.scores(ids).view(-1, 2).unbind(1)
        return -F.logsigmoid(better - worse - margin.view(-1, 2)[:, 0]).mean()


class Groups(Scores):
    """Scores of four samples, normalized in their group, and rewards that are normalized likewise."""

    def forward(self, ids: Tensor, margin: Tensor) -> Tensor:
        scores, rewards = (self._normed(x.view(-1, 4)) for x in (self.scores(ids), margin))
        return F.mse_loss(scores, rewards)

    def _normed(self, x: Tensor) -> Tensor:
        return (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1e-4)


class Samples(Scores):
    """Rewards of four samples, normalized in their group (Shao et al. 2024, arXiv:2402.03300, section 4.1)."""

    def forward(self, ids: Tensor, margin: Tensor) -> Tensor:
        rewards = margin.view(-1, 4)
        mean, std = rewards.mean(1), rewards.std(1)
        advantages = margin - mean.repeat_interleave(4)
        advantages = advantages / (std.repeat_interleave(4) + 1e-4)
        return -(self.scores(ids) * advantages).sum() / margin.shape[0]


class Best(Scores):
    """The entropy of a choice among the samples of a group, in which one is chosen."""

    def forward(self, ids: Tensor, margin: Tensor) -> Tensor:
        scores = self.scores(ids).reshape(ids.shape[0] // 4, 4)
        return F.cross_entropy(scores, margin.reshape(-1, 4).argmax(1))


KINDS = {"pairs": (Pairs, 2), "groups": (Groups, 4), "best": (Best, 4), "samples": (Samples, 1)}
"""By name, the model and how many rows it reads together. What depends on inputs alone, as advantages, needs no groups."""
PINS = [
    {"dp": 2, "micro_batch": 4},
    {"tp": 2, "micro_batch": 4},
    {"pp": 2, "micro_batch": 4},
]


def batch(seed: int, rows: int = ROWS) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "ids": torch.randint(0, VOCAB, (rows, SEQ), generator=generator),
        "margin": torch.randn(rows, generator=generator, dtype=torch.float64),
    }


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return KINDS[name][0]().double()


@captured_once()
def errors(rank: int, name: str, pins: list[dict], rows: list[int]) -> list[float]:
    """On one rank: for each pin, the largest update-relative error over the tolerance of 1e-9."""
    data = [batch(seed, count) for seed, count in enumerate(rows)]
    result, found = train_in_place(made(name), data), []
    assert moved(result) > 1e-3, "training moves the weights"
    for pin in pins:
        engine = autopar.parallelize(
            made(name), "cpu:2", batch(0), sgd, pin=pin, global_batch=ROWS, precision="fp64"
        )
        losses, state = run_steps(engine, data)
        assert losses == pytest.approx(result.losses, rel=1e-9)
        found.append(update_error(result, state))
    return found


@pytest.mark.parametrize("name", slow_but(["best"], KINDS))
def test_they_train_as_on_one_device(pool2, name):
    for found in pool2.run(errors, name, PINS, [ROWS, ROWS]):
        assert max(found) <= 1, found


def test_last_batches_of_fewer_groups_are_exact(pool2):
    for found in pool2.run(errors, "pairs", PINS[:1], [ROWS, 6, 2]):
        assert max(found) <= 1, found


@pytest.mark.parametrize("name", every(2, KINDS))
def test_a_group_is_a_row_of_the_plan(name):
    together = KINDS[name][1]
    traced = trace(made(name), batch(0), precision="fp64")
    assert traced.together == together and traced.split.joins
    plan = autopar.plan(
        made(name), "cpu:2", batch(0), ROWS, pin={"dp": 2, "micro_batch": 4}, traced=traced
    )
    assert (plan.global_batch, plan.micro_batch) == (ROWS // together, 4 // together)
    assert any("consecutive rows" in note for note in plan.notes) == (together > 1)


def test_rows_that_are_no_groups_are_refused():
    with pytest.raises(AutoparError, match=r"7 rows, and forward reads 2 consecutive rows"):
        autopar.plan(made("pairs"), "cpu:1", batch(0), global_batch=7)
    engine = autopar.parallelize(made("pairs"), "cpu:1", batch(0), sgd, precision="fp64")
    with pytest.raises(AutoparError, match=r"give a multiple of 2 rows"):
        engine.step(batch(0, 7))


def test_a_sampler_gives_whole_groups():
    engine = autopar.parallelize(made("pairs"), "cpu:1", batch(0), sgd, precision="fp64")
    first = next(iter(engine.sampler(range(3 * ROWS), shuffle=False)))
    assert list(first) == list(range(ROWS))


class Halves(Scores):
    """Pairs of a row of the first half and one of the second half, which are no groups."""

    def forward(self, ids: Tensor, margin: Tensor) -> Tensor:
        better, worse = self.scores(ids).view(2, -1).unbind(0)
        return -F.logsigmoid(better - worse).mean() + margin.mean()


def test_rows_that_are_far_apart_are_no_group():
    traced = trace(Halves().double(), batch(0), precision="fp64")
    assert traced.together == 1 and not traced.split.joins
