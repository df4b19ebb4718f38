"""Models that choose rows by boolean indexing train as on one device."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.effort import every
from support.exactness import token_batches
from support.trained_stacks import VOCAB, WIDTH, Stack, assert_exact, built
from torch import Tensor, nn

import autopar
from autopar.api import trace

EXPERTS, CHOICES = 3, 2


class Experts(nn.Module):
    """A router and experts; subclasses send tokens to experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
            for _ in range(EXPERTS)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.routed(x.reshape(-1, WIDTH)).view(x.shape)

    def routed(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class ByWhere(Experts):
    """A mask of tokens and choices for each expert; rows of the result grow in place."""

    def routed(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).topk(CHOICES)
        weights, result = weights.softmax(-1), torch.zeros_like(x)
        masks = (chosen.unsqueeze(-1) == torch.arange(EXPERTS)).permute(2, 0, 1)
        for mask, expert in zip(masks, self.experts, strict=True):
            token, choice = torch.where(mask)
            result[token] += weights[token, choice, None] * expert(x[token])
        return result


class ByIndexAdd(Experts):
    """One-hot choices, choices before tokens, and an addition by index."""

    def routed(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(CHOICES)
        result = torch.zeros_like(x)
        hot = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
        for number, expert in enumerate(self.experts):
            choice, token = torch.where(hot[number])
            own = x[None, token].reshape(-1, WIDTH)
            result.index_add_(0, token, expert(own) * weights[token, choice, None])
        return result


class ByMask(Experts):
    """One expert a token, chosen by a boolean mask and written back by it."""

    def routed(self, x: Tensor) -> Tensor:
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mask = chosen == number
            result[mask] = expert(x[mask]) * weight[mask].unsqueeze(-1)
        return result


class ByNonzero(Experts):
    """Indices of nonzero entries; gates of a GLU and a norm between."""

    def routed(self, x: Tensor) -> Tensor:
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token = (chosen == number).nonzero().squeeze(-1)
            left, right = expert(x.index_select(0, token)).chunk(2, -1)
            own = F.layer_norm(torch.cat([left.sigmoid() * right, left], -1), (WIDTH,))
            result = result.index_add(0, token, own * weight[token, None])
        return result


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


class Logs(Plain):
    """What is singular where rows are not selected."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).relu()
        result = torch.zeros_like(y)
        result[y > 0] = y[y > 0].log() * 0.1
        return result


def chosen_tokens(logits: Tensor, labels: Tensor) -> Tensor:
    valid = labels >= 0
    return F.cross_entropy(logits[valid], labels[valid])


def sum_of_chosen(logits: Tensor, labels: Tensor) -> Tensor:
    valid = labels > 1
    index = valid.nonzero().squeeze(1)
    losses = F.cross_entropy(logits, labels, reduction="none")
    return losses[valid].sum() / 50 + logits[index].square().mean()


def by_where() -> nn.Module:
    return Stack(ByWhere)


def by_index_add() -> nn.Module:
    return Stack(ByIndexAdd)


def by_mask() -> nn.Module:
    return Stack(ByMask)


def by_nonzero() -> nn.Module:
    return Stack(ByNonzero)


def logs() -> nn.Module:
    return Stack(Logs)


def loss_of_chosen() -> nn.Module:
    return Stack(Plain, chosen_tokens)


def sum_of_losses() -> nn.Module:
    return Stack(Plain, sum_of_chosen)


@pytest.mark.parametrize(
    "maker",
    every(6, [by_nonzero, by_where, by_index_add, logs, by_mask, sum_of_losses, loss_of_chosen]),
)
def test_they_train_as_on_one_device(pool2, maker):
    assert_exact(pool2, maker)


def test_the_cost_is_said():
    assert any(
        "boolean indexing x6 is computed for all rows" in note
        for note in built(by_nonzero)[1].notes
    )


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[x[..., 0] > 0].sort(0).values.sum() * x,
        lambda x: x[x[..., 0] > 0].softmax(0).sum() * x,
        lambda x: x * x[x > 0].numel(),
        lambda x: x.unique().sum() * x,
        lambda x: x[x[..., 0] > 0][:2].sum() * x,
        lambda x: sum(x * row for row in (x[0, 0] > 0).nonzero()),
    ],
)
def test_what_is_not_row_by_row_is_refused(function):
    class Layer(Plain):
        def forward(self, x: Tensor) -> Tensor:
            return function(self.linear(x))

    with pytest.raises(
        autopar.AutoparError,
        match=r"depends on data .*arithmetic with a mask|reads a number|loops .*over all of them",
    ):
        trace(Stack(Layer), token_batches(VOCAB)[0])
