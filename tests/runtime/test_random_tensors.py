"""Random tensors that forward draws: every plan draws those of one device."""

from __future__ import annotations

import pytest
import torch
from support.effort import every
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.api import trace
from autopar.planning.notes import notes
from autopar.verify.verify import verify


class Noisy(nn.Module):
    """Experts chosen with Gumbel noise, a latent with normal noise, and rows that are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(8, 3)
        self.scales = nn.Parameter(torch.linspace(0.5, 1.5, 4 * 8).view(4, 8))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        h = self.up(x)
        scores = self.gate(h)
        gumbel = torch.empty_like(scores).exponential_().log()
        chosen = F.one_hot((scores - gumbel).argmax(-1), 4).to(h.dtype)
        h = h * ((chosen * scores.softmax(-1)) @ self.scales)
        h = h + 0.1 * torch.randn_like(h) * torch.bernoulli(torch.full_like(h, 0.7))
        h = h * (torch.rand_like(h[:, :1]) < 0.8)
        return F.cross_entropy(self.down(h), labels)


class Diffused(nn.Module):
    """Noise, times and dropped labels, drawn by the size of the batch, and a table of fixed size."""

    def __init__(self) -> None:
        super().__init__()
        self.times, self.classes = nn.Embedding(50, 6), nn.Embedding(4, 6)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        rows = x.shape[0]
        noise = torch.randn(rows, 6, dtype=x.dtype, device=x.device)
        times = torch.randint(0, 50, (rows,), device=x.device)
        labels = torch.where(torch.rand(rows, device=x.device) < 0.3, 3, labels)
        share = torch.rand(6, dtype=x.dtype, device=x.device)
        h = x + noise * times[:, None] / 50 + self.times(times) + self.classes(labels)
        return F.mse_loss(self.down(F.gelu(self.up(h))) * share, noise)


def noisy() -> tuple[nn.Module, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return Noisy(), {
        "x": torch.randn(8, 6, generator=generator),
        "labels": torch.randint(0, 3, (8,), generator=generator),
    }


def diffused() -> tuple[nn.Module, dict[str, Tensor]]:
    return Diffused(), noisy()[1]


@pytest.mark.parametrize("maker", [noisy, diffused])
def test_they_have_rules_and_no_note(maker):
    model, batch = maker()
    words = " ".join(notes(trace(model, batch)))
    assert "without a rule" not in words and "other random numbers" not in words


@pytest.mark.parametrize("maker", every(2, [noisy, diffused]))
@pytest.mark.parametrize("pin", every(2, [{"dp": 2}, {"tp": 2}, {"dp": 1, "micro_batch": 2}]))
def test_every_plan_draws_the_numbers_of_one_device(maker, pin):
    report = verify(maker, nproc=2 if "micro_batch" not in pin else 1, pin=pin, rows=8)
    assert report.exact, report.meshes[0]
