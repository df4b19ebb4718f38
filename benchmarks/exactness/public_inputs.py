"""Batches of the public models, with random values, and modules that put a loss on a network.

Every function of rows returns a dict of tensors, batch first, that are the same in each process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = dict[str, Tensor]
IGNORED = -100
VOCAB, SEQ, CLASSES = 96, 12, 10


@dataclass(frozen=True, slots=True)
class PublicModel:
    """A function that builds a network with its loss, and one from a number of rows to a batch."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int], Batch]


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def integers(limit: int, *shape: int, seed: int = 0) -> Tensor:
    """Random integers below `limit`."""
    return torch.randint(0, limit, shape, generator=torch.Generator().manual_seed(seed))


def noise(*shape: int, seed: int = 0) -> Tensor:
    """Values of the standard normal distribution."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------------------------------- batches


def tokens(rows: int) -> Batch:
    """Token ids and labels (rows, SEQ)."""
    ids = integers(VOCAB, rows, SEQ)
    return {"input_ids": ids, "labels": ids.clone()}


def padded(rows: int) -> Batch:
    """Rows of different lengths, padded on the right: ids, attention mask and labels."""
    ids = integers(VOCAB - 2, rows, SEQ) + 2
    lengths = SEQ - torch.arange(rows) * 3 % (SEQ // 2)
    mask = (torch.arange(SEQ) < lengths[:, None]).long()
    return {
        "input_ids": ids * mask,
        "attention_mask": mask,
        "labels": ids.masked_fill(mask == 0, IGNORED),
    }


def packed(rows: int) -> Batch:
    """Two documents in every row: ids, positions that start again, and labels."""
    ids = integers(VOCAB, rows, SEQ)
    first = 3 + torch.arange(rows)[:, None] % 5
    places = torch.arange(SEQ).expand(rows, SEQ)
    positions = torch.where(places < first, places, places - first)
    return {
        "input_ids": ids,
        "position_ids": positions,
        "labels": ids.masked_fill(positions == 0, IGNORED),
    }


def pairs(rows: int) -> Batch:
    """Preferences: a chosen and a rejected answer for each row, with padding at the end."""
    chosen, rejected = padded(rows), padded(rows)
    rejected["input_ids"] = rejected["attention_mask"] * (integers(VOCAB, rows, SEQ, seed=1))
    return {
        "chosen": chosen["input_ids"],
        "rejected": rejected["input_ids"],
        "chosen_mask": chosen["attention_mask"],
        "rejected_mask": rejected["attention_mask"],
    }


def images(size: int, channels: int = 3, name: str = "images") -> Callable[[int], Batch]:
    """Images (rows, channels, size, size) and their classes."""
    return lambda rows: {
        name: noise(rows, channels, size, size),
        "labels": integers(CLASSES, rows),
    }


# ----------------------------------------------------------------------------------------- losses


class Classifier(nn.Module):
    """Cross entropy of the classes that a network of images gives."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.net(images), labels)


class NextToken(nn.Module):
    """Cross entropy of the next token; labels of -100 do not count."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.net(input_ids)
        return F.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED
        )


class Denoiser(nn.Module):
    """Squared error of the noise that a diffusion network predicts."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, target: Tensor, **inputs: Tensor) -> Tensor:
        prediction = self.net(**inputs, return_dict=False)[0]
        return F.mse_loss(prediction[:, : target.shape[1]], target)


class Preference(nn.Module):
    """Direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290, eq. 7) of a policy
    against a frozen reference. Both answers run in one pass, one after the other along the rows.
    """

    def __init__(self, policy: nn.Module, reference: nn.Module, beta: float = 0.1) -> None:
        super().__init__()
        self.policy, self.reference, self.beta = policy, reference.requires_grad_(False), beta

    def forward(
        self, chosen: Tensor, rejected: Tensor, chosen_mask: Tensor, rejected_mask: Tensor
    ) -> Tensor:
        ids = torch.cat([chosen, rejected])
        mask = torch.cat([chosen_mask, rejected_mask])
        policy = log_likelihood(self.policy, ids, mask)
        with torch.no_grad():
            reference = log_likelihood(self.reference, ids, mask)
        better, worse = (policy - reference).chunk(2)
        return -F.logsigmoid(self.beta * (better - worse)).mean()


class PreferenceInTwoPasses(Preference):
    """The same loss, with a pass for each of the two answers."""

    def forward(
        self, chosen: Tensor, rejected: Tensor, chosen_mask: Tensor, rejected_mask: Tensor
    ) -> Tensor:
        margins = []
        for ids, mask in ((chosen, chosen_mask), (rejected, rejected_mask)):
            with torch.no_grad():
                reference = log_likelihood(self.reference, ids, mask)
            margins.append(log_likelihood(self.policy, ids, mask) - reference)
        return -F.logsigmoid(self.beta * (margins[0] - margins[1])).mean()


def log_likelihood(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    """Sum of the log-probabilities of the tokens of each row after the first, without padding."""
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
    chosen = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return (chosen * mask[:, 1:]).sum(-1)
