"""Ids and labels that index nothing are told before a step, with their name, value, row and limit; what torch accepts is accepted."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.eager_runs import paragraph
from torch import nn

import autopar
from autopar.errors import AutoparError

IDS = torch.arange(24).reshape(4, 6) % 11


class Model(nn.Module):
    """Tokens of a vocabulary of 11; `loss` gets log probabilities (b, s, 11) and the other inputs."""

    def __init__(self, loss, position=None):
        super().__init__()
        self.embed, self.place, self.head, self.loss = (
            nn.Embedding(11, 6),
            nn.Embedding(3, 6),
            nn.Linear(6, 11),
            loss,
        )
        self.position = position

    def forward(self, tokens, labels):
        x = self.embed(tokens)
        x = x if self.position is None else x + self.place(self.position(labels))
        # one batch dim for both
        return self.loss(F.log_softmax(self.head(x), -1) + 0 * labels.unsqueeze(2), labels)


def cross_entropy(shift=0, ignored=-100):
    def loss(out, labels):
        labels = labels if not shift else F.pad(labels, (0, shift), value=ignored)[:, shift:]
        return F.cross_entropy(out.flatten(0, 1), labels.flatten(), ignore_index=ignored)

    return loss


def gathered(out, labels):
    return -out.gather(2, labels.unsqueeze(2)).mean()


def taken(out, labels):
    return -out.sum((0, 1))[labels].mean()


def masked(out, labels):
    kept = labels.masked_fill(labels < 0, 0)
    return -(out.gather(2, kept.unsqueeze(2)).squeeze(2) * (labels >= 0)).sum() / 24


def step(model, batch):
    engine = autopar.parallelize(model, "cpu:1", {"tokens": IDS, "labels": IDS}, precision="fp32")
    return engine.step(batch)


def batch_with(name, value, row=2, column=3):
    changed = IDS.clone()
    changed[row, column] = value
    return {"tokens": IDS, "labels": IDS.clone()} | {name: changed}


@pytest.mark.parametrize(("model", "name", "value", "words"), [
    (Model(cross_entropy()), "tokens", 11, "'tokens' holds 11 in row 2 at 3, an index of the 11 rows of embed.weight, which takes 0 to 10"),
    (Model(cross_entropy()), "tokens", -1, "'tokens' holds -1 in row 2"),
    (Model(cross_entropy()), "labels", 99, "'labels' holds 99 in row 2 at 3, an index of the 11 classes of .* or -100, which is ignored"),
    (Model(cross_entropy(ignored=-1)), "labels", -100, "'labels' holds -100 in row 2 .* or -1, which is ignored"),
    (Model(cross_entropy(shift=1)), "labels", 11, "'labels' holds 11 in row 2"),
    (Model(gathered), "labels", 11, "'labels' holds 11 in row 2 at 3, an index of the 11 entries"),
    (Model(gathered), "labels", -1, "'labels' holds -1"),
    (Model(taken), "labels", 11, "'labels' holds 11 in row 2 .* takes -11 to 10"),
    (Model(masked), "labels", 11, "'labels' holds 11"),
    (Model(cross_entropy(), lambda labels: labels // 5), "labels", 10**12, "batch entr"),
])  # fmt: skip
def test_an_index_of_nothing_is_told_before_the_step(model, name, value, words):
    with pytest.raises(AutoparError, match=words) as refused:
        step(model, batch_with(name, value))
    paragraph(refused.value)


@pytest.mark.parametrize(("model", "name", "value", "row", "column"), [
    (Model(cross_entropy()), "labels", -100, 2, 3), (Model(cross_entropy(ignored=-1)), "labels", -1, 2, 3),
    (Model(cross_entropy(shift=1)), "labels", 99, 2, 0), (Model(taken), "labels", -11, 2, 3), (Model(masked), "labels", -5, 2, 3),
])  # fmt: skip
def test_what_torch_takes_is_taken(model, name, value, row, column):
    """A label that a shift leaves out may be anything."""
    batch = batch_with(name, value, row, column)
    assert float(step(model, batch)) == pytest.approx(model(**batch).item(), rel=1e-5)


def all_ranks_are_told(rank):
    batch = batch_with("tokens", 11, row=3)
    engine = autopar.parallelize(
        Model(cross_entropy()), "cpu:2", {"tokens": IDS, "labels": IDS}, pin={"dp": 2}
    )
    found = []
    for given in (batch, batch_with("tokens", 10)):
        try:
            found.append(float(engine.step(engine.local_batch(given))))
        except AutoparError as error:
            found.append(str(error))
    return found


def test_all_ranks_hear_of_an_index_of_one(pool2):
    (first, ok), (second, also) = pool2.run(all_ranks_are_told)
    assert first == f"rank 1: {second}" and "'tokens' holds 11 in row 1" in second
    assert ok == also
