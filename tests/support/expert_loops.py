"""Mixtures of experts as users write them, with a loop over experts that index the tokens that chose them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, INNER, EXPERTS, CHOICES = 16, 24, 4, 2


class Expert(nn.Module):
    """Mixtral's."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(WIDTH, INNER, bias=bias) for _ in range(2))
        self.w2 = nn.Linear(INNER, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Plain(nn.Sequential):
    """Two products with a GELU between."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH))


class Block(nn.Module):
    """A router, experts, and what a subclass makes of them."""

    def __init__(self, expert=Expert) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(expert() for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, WIDTH)
        weights, index = torch.topk(F.softmax(self.gate(flat), dim=1), CHOICES, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        return self.mixed(flat, index, weights).view(x.shape)


class Mixtral(Block):
    """transformers 4.40."""

    def turn(self, e, rows, x, weights, total) -> None:
        idx, top_x = torch.where(rows)
        state = x[None, top_x].reshape(-1, WIDTH)
        state = self.experts[e](state) * weights[top_x, idx, None]
        total.index_add_(0, top_x, state.to(x.dtype))

    def mixed(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        masks = F.one_hot(index, num_classes=EXPERTS).permute(2, 1, 0)
        for e in range(EXPERTS):
            self.turn(e, masks[e], x, weights, total)
        return total


class HitExperts(Mixtral):
    """transformers 4.50, which loops over the experts that got a token."""

    def mixed(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        masks = F.one_hot(index, num_classes=EXPERTS).permute(2, 1, 0)
        hit = torch.greater(masks.sum(dim=(-1, -2)), 0).nonzero()
        for e in hit:
            self.turn(e, masks[e].squeeze(0), x, weights, total)
        return total


class Litgpt(Block):
    """litgpt's LLaMAMoE."""

    def mixed(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        masks = (index.unsqueeze(-1) == torch.arange(EXPERTS)).permute(2, 0, 1)
        total = torch.zeros_like(x)
        for mask, expert in zip(masks, self.experts, strict=True):
            token, choice = torch.where(mask)
            total[token] += weights[token, choice, None] * expert(x[token])
        return total


class DeepSeek(Block):
    """DeepSeek's, which leaves out experts without tokens, and has an expert for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = Expert()

    def mixed(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros_like(x, dtype=weights.dtype)
        masks = F.one_hot(index, num_classes=EXPERTS).permute(2, 0, 1)
        for e in range(EXPERTS):
            token, choice = torch.where(masks[e])
            if token.numel() > 0:
                out = self.experts[e](x[token]) * weights[token, choice].unsqueeze(-1)
                total.index_add_(0, token, out)
        return total + self.shared(x)


class Stacked(Block):
    """transformers 5's `eager` experts: one parameter holds the matrices of all."""

    def __init__(self) -> None:
        super().__init__(nn.Identity)
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / INNER**0.5)

    def mixed(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        with torch.no_grad():
            masks = F.one_hot(index, num_classes=EXPERTS).permute(2, 1, 0)
            hit = torch.greater(masks.sum(dim=(-1, -2)), 0).nonzero()
        for e in hit:
            e = e[0]
            if e == EXPERTS:
                continue
            choice, token = torch.where(masks[e])
            gate, up = F.linear(x[token], self.gate_up[e]).chunk(2, dim=-1)
            out = F.linear(F.silu(gate) * up, self.down[e])
            total.index_add_(0, token, out * weights[token, choice, None])
        return total


class OneClassMore(Block):
    """DBRX's: one class more than there are experts, and matrices that are views of flat parameters."""

    def __init__(self) -> None:
        super().__init__(nn.Identity)
        self.w1, self.v1, self.w2 = (
            nn.Parameter(torch.randn(EXPERTS * INNER, WIDTH) / WIDTH**0.5) for _ in range(3)
        )

    def mixed(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        with torch.no_grad():
            masks = F.one_hot(index, num_classes=EXPERTS + 1).permute(2, 1, 0)
            hit = torch.greater(masks.sum(dim=(-1, -2)), 0).nonzero()
        for e in hit:
            e = e[0]
            with torch.no_grad():
                choice, token = torch.where(masks[e])
            w1, v1, w2 = (w.view(-1, INNER, WIDTH)[e] for w in (self.w1, self.v1, self.w2))
            out = (F.silu(x[token].matmul(w1.T)) * x[token].matmul(v1.T)).matmul(w2)
            total.index_add_(0, token, out.view(-1, WIDTH) * weights[token, choice, None])
        return total


class Compared(Block):
    """A mask of each expert by `==`, and experts with biases."""

    def __init__(self) -> None:
        super().__init__(lambda: Expert(bias=True))

    def mixed(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        total = x.sin()
        for e, expert in enumerate(self.experts):
            token, choice = torch.where(index == e)
            rows = expert(x[token]) * weights[token, choice].unsqueeze(1)
            total = total.index_put((token,), rows, accumulate=True)
        return total


class PlainExperts(Litgpt):
    """Experts without a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Plain() for _ in range(EXPERTS))


BLOCKS = (Mixtral, HitExperts, Litgpt, DeepSeek, Stacked, OneClassMore, Compared, PlainExperts)
"""Each is one op when it is traced."""


class Half(Litgpt):
    """Only two of the experts."""

    def mixed(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for e in range(EXPERTS // 2):
            token, choice = torch.where(index == e)
            total[token] += weights[token, choice, None] * self.experts[e](x[token])
        return total


class Squared(Litgpt):
    """Experts whose results are squared before they are weighted."""

    def mixed(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, choice = torch.where(index == e)
            total[token] += weights[token, choice, None] * expert(x[token]).square()
        return total


class Read(Litgpt):
    """A sum that is read while it is made."""

    def mixed(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        total, seen = torch.zeros_like(x), torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, choice = torch.where(index == e)
            total[token] += weights[token, choice, None] * expert(x[token])
            seen = seen + 2 * total
        return total + seen


OTHERS = (Half, Squared, Read)
"""None is the op."""


class Biased(HitExperts):
    """A loop over experts that got a token, which does more than add what they compute."""

    def turn(self, e, rows, x, weights, total) -> None:
        super().turn(e, rows, x, weights, total)
        total += self.experts[e].w2.weight.mean(1)


class Net(nn.Module):
    """Two layers with experts, and a loss."""

    def __init__(self, block: type[Block]) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 5)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), block()) for _ in range(2))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.leave(x).flatten(0, 1), labels.flatten())


def batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(8, 6, 6, generator=generator, dtype=torch.float64),
        "labels": torch.randint(0, 5, (8, 6), generator=generator),
    }


class Busy(Mixtral):
    """A loop over the experts that got more than three tokens."""

    def mixed(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        masks = F.one_hot(index, num_classes=EXPERTS).permute(2, 1, 0)
        for e in torch.greater(masks.sum(dim=(-1, -2)), 3).nonzero():
            self.turn(e, masks[e].squeeze(0), x, weights, total)
        return total


class OthersHit(Mixtral):
    """A loop over the experts that other choices hit."""

    def mixed(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        masks = F.one_hot(index, num_classes=EXPERTS).permute(2, 1, 0)
        others = F.one_hot(index.flip(1)[:, :1].expand(-1, 2), num_classes=EXPERTS)
        for e in others.permute(2, 1, 0).sum(dim=(-1, -2)).gt(0).nonzero():
            self.turn(e, masks[e].squeeze(0), x, weights, total)
        return total


class OtherRows(DeepSeek):
    """A branch on another expert's tokens."""

    def mixed(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for e in range(EXPERTS):
            token, choice = torch.where(index == e)
            other, _ = torch.where(index == (e + 1) % EXPERTS)
            if other.numel() > 0:
                out = self.experts[e](x[token]) * weights[token, choice].unsqueeze(-1)
                total.index_add_(0, token, out)
        return total


class Counted(HitExperts):
    """A loop that counts the experts that got a token."""

    def mixed(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        masks = F.one_hot(index, num_classes=EXPERTS).permute(2, 1, 0)
        for place, e in enumerate(masks.sum(dim=(-1, -2)).gt(0).nonzero()):
            self.turn(place, masks[e].squeeze(0), x, weights, total)
        return total


REFUSED = (Biased, Busy, OthersHit, OtherRows, Counted)
"""How often their code runs depends on data."""
