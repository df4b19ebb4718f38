"""Networks, losses and batches of kinds that real training has, under each axis, against eager PyTorch on one device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from support.captures import captured_once
from support.exactness import moved, run_steps, sgd, train_in_place, update_error
from torch import Tensor, nn

import autopar
from autopar.verify.widened import Widened

transformers = pytest.importorskip("transformers")
ROWS, SEQ, VOCAB, WIDTH = 8, 8, 24, 12
PINS = {
    "dp": {"dp": 2, "micro_batch": 2},
    "tp": {"tp": 2},
    "pp": {"pp": 2, "micro_batch": 4},
}
BERT = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": SEQ,
    "hidden_dropout_prob": 0.0,
    "initializer_range": 0.2,
    "attention_probs_dropout_prob": 0.0,
}
Batch = dict[str, Tensor]


def padded(generator: torch.Generator, *shape: int) -> Batch:
    """Texts of this shape and of uneven lengths, with their mask."""
    ids = torch.randint(2, VOCAB, (*shape, SEQ), generator=generator)
    lengths = torch.randint(2, SEQ + 1, shape, generator=generator)
    mask = (torch.arange(SEQ) < lengths[..., None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def numbers(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(ROWS, *shape, generator=generator, dtype=torch.float64)


def classes(generator: torch.Generator, count: int, *shape: int) -> Tensor:
    return torch.randint(count, (ROWS, *shape), generator=generator)


# ------------------------------------------------------------------ padded batches and gathered log-probabilities


def tagger() -> nn.Module:
    config = transformers.BertConfig(**BERT, num_labels=5)
    return transformers.BertForTokenClassification(config)


def tags(generator: torch.Generator) -> Batch:
    batch = padded(generator, ROWS)
    labels = classes(generator, 5, SEQ).masked_fill(batch["attention_mask"] == 0, -100)
    return batch | {"labels": labels}


def chooser() -> nn.Module:
    return transformers.BertForMultipleChoice(transformers.BertConfig(**BERT))


def choices(generator: torch.Generator) -> Batch:
    return padded(generator, ROWS, 3) | {"labels": classes(generator, 3)}


class Policy(nn.Module):
    """Proximal policy optimization (Schulman et al. 2017, arXiv:1707.06347, eq. 7) on sampled answers."""

    def __init__(self) -> None:
        super().__init__()
        self.model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=VOCAB,
                n_embd=16,
                n_layer=2,
                n_head=2,
                n_positions=SEQ,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
            )
        )

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, before: Tensor, advantages: Tensor
    ) -> Tensor:
        logits = self.model(input_ids=input_ids, attention_mask=attention_mask).logits[:, :-1]
        scores = logits.log_softmax(-1)
        ratio = (scores.gather(-1, input_ids[:, 1:, None]).squeeze(-1) - before).exp()
        gain = torch.minimum(
            ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None]
        )
        entropy = -(scores.exp() * scores).sum(-1)
        mask = attention_mask[:, 1:]
        return -((gain + 0.01 * entropy) * mask).sum() / mask.sum()


def samples(generator: torch.Generator) -> Batch:
    before = -2 - numbers(generator, SEQ - 1).abs()
    return padded(generator, ROWS) | {"before": before, "advantages": numbers(generator)}


# ------------------------------------------------------------------ weights of classes, and several targets


class Stack(nn.Module):
    """Two layers, and `heads`, linear maps of their result."""

    def __init__(self, **heads: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
            for _ in range(2)
        )
        self.heads = nn.ModuleDict({name: nn.Linear(WIDTH, size) for name, size in heads.items()})
        self.register_buffer("weights", torch.linspace(0.3, 2, 5))

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class ManyTasks(Stack):
    """A class with weights, several yes or no with weights, and a number, one weighed against the other."""

    def __init__(self) -> None:
        super().__init__(kind=5, flags=3, size=1)
        self.balance = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor, kinds: Tensor, flags: Tensor, sizes: Tensor) -> Tensor:
        x = self.body(x)
        losses = torch.stack(
            [
                F.cross_entropy(self.heads["kind"](x), kinds, weight=self.weights),
                F.binary_cross_entropy_with_logits(
                    self.heads["flags"](x), flags, pos_weight=self.weights[:3]
                ),
                F.smooth_l1_loss(self.heads["size"](x).squeeze(-1), sizes),
            ]
        )
        return (losses * torch.exp(-self.balance) + self.balance).sum()


def tasks(generator: torch.Generator) -> Batch:
    flags = classes(generator, 2, 3).double()
    found = {"x": numbers(generator, WIDTH), "kinds": classes(generator, 5)}
    return found | {"flags": flags, "sizes": numbers(generator)}


class Focal(Stack):
    """Focal loss (Lin et al. 2017, arXiv:1708.02002) with weights of classes, over labels that count."""

    def __init__(self) -> None:
        super().__init__(kind=5)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits, labels = self.heads["kind"](self.body(x)).flatten(0, 1), labels.flatten()
        each = F.cross_entropy(logits, labels, reduction="none", ignore_index=-1)
        weights = torch.where(labels >= 0, self.weights[labels.clamp(min=0)], 0.0)
        return (weights * (1 - (-each).exp()) ** 2 * each).sum() / weights.sum()


def spans(generator: torch.Generator) -> Batch:
    return {"x": numbers(generator, 4, WIDTH), "labels": classes(generator, 6, 4) - 1}


class Ranked(Stack):
    """Listwise ranking of the entries of a row by soft targets (Cao et al. 2007), beside a weighed class."""

    def __init__(self) -> None:
        super().__init__(score=1, kind=5)

    def forward(self, x: Tensor, gains: Tensor, kinds: Tensor) -> Tensor:
        x = self.body(x)
        scores = self.heads["score"](x).squeeze(-1)
        ranking = F.kl_div(scores.log_softmax(-1), gains.softmax(-1), reduction="batchmean")
        log_odds = self.heads["kind"](x.mean(1)).log_softmax(-1)
        return ranking + F.nll_loss(log_odds, kinds, weight=self.weights)


def lists(generator: torch.Generator) -> Batch:
    found = {"x": numbers(generator, 4, WIDTH), "gains": numbers(generator, 4)}
    return found | {"kinds": classes(generator, 5)}


# ------------------------------------------------------------------ complex numbers


class ComplexUnit(Stack):
    """Layers with complex weights and a modulus that gates (Arjovsky et al. 2016, arXiv:1511.06464)."""

    def __init__(self) -> None:
        super().__init__(kind=5)
        self.real, self.imaginary = (
            nn.Parameter(torch.randn(WIDTH, WIDTH) / 4),
            nn.Parameter(torch.randn(WIDTH, WIDTH) / 4),
        )
        self.bias = nn.Parameter(torch.full((WIDTH,), 0.1))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        z = torch.complex(self.body(x), x)
        z = torch.einsum("bsi,oi->bso", z, torch.complex(self.real, self.imaginary))
        z = z * F.relu(z.abs() + self.bias) / (z.abs() + 1e-3)
        found = torch.view_as_real(z).flatten(-2)[..., ::2] + z.angle().sin()
        logits = self.heads["kind"](found).flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten(), ignore_index=-1)


# ------------------------------------------------------------------ networks without a list of layers


def convolution(into: int, out: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(into, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()
    )


class Shortcuts(nn.Module):
    """A U-Net (Ronneberger et al. 2015, arXiv:1505.04597): values of the way down are read on the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.under = convolution(3, 8), convolution(8, 8)
        self.up, self.last = convolution(16, 8), nn.Conv2d(8, 5, 1)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        wide = self.down(images)
        low = self.under(F.max_pool2d(wide, 2))
        x = torch.cat([wide, F.interpolate(low, scale_factor=2, mode="nearest")], 1)
        return F.cross_entropy(self.last(self.up(x)), labels)


class Mixer(nn.Module):
    """Patches that are mixed along positions and along channels (Tolstikhin et al. 2021, arXiv:2105.01601)."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 2, 2)
        self.one, self.two = self._mix(), self._mix()
        self.last = nn.Linear(8, 5)

    def _mix(self) -> nn.Module:
        return nn.ModuleList(
            [
                nn.LayerNorm(8),
                nn.Linear(16, 16),
                nn.LayerNorm(8),
                nn.Linear(8, 16),
                nn.Linear(16, 8),
            ]
        )

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        for norm, along, norm_of_channels, up, down in (self.one, self.two):
            x = x + F.gelu(along(norm(x).transpose(1, 2))).transpose(1, 2)
            x = x + down(F.gelu(up(norm_of_channels(x))))
        logits = self.last(x).transpose(1, 2)
        return F.cross_entropy(logits, labels[:, ::2, ::2].flatten(1))


class Waves(nn.Module):
    """Dilated convolutions over time with gates and norms of groups (van den Oord et al. 2016, arXiv:1609.03499)."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Conv1d(3, 8, 1)
        for number, dilation in enumerate((1, 2, 4)):
            layer = nn.Conv1d(8, 16, 3, dilation=dilation, padding=dilation)
            self.add_module(f"gated{number}", layer)
            self.add_module(f"norm{number}", nn.GroupNorm(2, 8))
        self.last = nn.Linear(8, 5)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.into(images.flatten(2))
        for number in range(3):
            layer, norm = getattr(self, f"gated{number}"), getattr(self, f"norm{number}")
            one, two = layer(norm(x)).chunk(2, 1)
            x = x + one.tanh() * two.sigmoid()
        return F.cross_entropy(self.last(x.mean(2)), labels[:, 0, 0])


def pictures(generator: torch.Generator) -> Batch:
    return {"images": numbers(generator, 3, 8, 8), "labels": classes(generator, 5, 8, 8)}


WHOLE = {"dp": {"dp": 2}, "pp": {"pp": 2, "micro_batch": ROWS}}
"""Pins under which batch norm reads the statistics of one device."""
KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], Batch], dict]] = {
    "tags of tokens": (tagger, tags, PINS),
    "multiple choice": (chooser, choices, PINS),
    "policy": (Policy, samples, PINS),
    "many tasks": (ManyTasks, tasks, PINS),
    "focal": (Focal, spans, PINS),
    "ranked": (Ranked, lists, PINS),
    "complex unit": (ComplexUnit, spans, PINS),
    "shortcuts": (Shortcuts, pictures, WHOLE),
    "mixer": (Mixer, pictures, PINS),
    "waves": (Waves, pictures, PINS),
}


@captured_once()
def errors(rank: int, name: str, pins: dict[str, dict]) -> dict[str, float]:
    """On one rank: for each pin, the largest update-relative error over the tolerance of 1e-9."""
    build, batch, _ = KINDS[name]
    data = [batch(torch.Generator().manual_seed(seed)) for seed in range(2)]

    def made() -> nn.Module:
        torch.manual_seed(0)
        return build().double().train()

    found = {}
    with Widened():
        result = train_in_place(made(), data)
        assert moved(result) > 1e-3, "training moves the weights"
        for key, pin in pins.items():
            engine = autopar.parallelize(made(), "cpu:2", data[0], sgd, pin=pin, precision="fp64")
            losses, state = run_steps(engine, data)
            assert losses == pytest.approx(result.losses, rel=1e-9)
            found[key] = update_error(result, state)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_they_train_as_on_one_device(pool2, name):
    for found in pool2.run(errors, name, KINDS[name][2], timeout_s=600):
        assert max(found.values()) <= 1, found


def test_several_targets_with_weights_train_as_on_one_device(pool2):
    for found in pool2.run(errors, "many tasks", {"dp": PINS["dp"]}):
        assert max(found.values()) <= 1, found
