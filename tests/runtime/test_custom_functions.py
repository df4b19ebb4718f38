"""Models with autograd.Functions of their own train as on one device, by the backward that is written."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.effort import slow_but
from support.exactness import token_batches, train, update_error
from support.trained_stacks import VOCAB, WIDTH, Stack, assert_exact, built, trained
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import autopar
from autopar.api import trace
from autopar.ops.rules import op_dims


class Rounded(torch.autograd.Function):
    """Straight through: the gradient of the identity."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad


class Reversed(torch.autograd.Function):
    """The identity, whose gradient is turned round and scaled."""

    @staticmethod
    def forward(ctx, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:
        return -ctx.scale * grad, None


class GatedNorm(torch.autograd.Function):
    """A norm with a weight, and the norm's divisor; saves what backward needs."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        scale = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(x, weight, scale)
        ctx.mark_non_differentiable(scale)
        return x * scale * weight, scale

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor, _: Tensor) -> tuple:
        x, weight, scale = ctx.saved_tensors
        own = grad * weight
        inner = (own * x).mean(-1, keepdim=True) * scale**3
        return own * scale - x * inner, (grad * x * scale).flatten(0, -2).sum(0), None


class Straight(torch.autograd.Function):
    """A router's choice: the scores of the best expert, with gradients for all experts."""

    @staticmethod
    def forward(ctx, scores: Tensor, chosen: Tensor) -> Tensor:
        ctx.save_for_backward(scores, chosen)
        return scores.softmax(-1).gather(-1, chosen)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:
        scores, chosen = ctx.saved_tensors
        weights = scores.softmax(-1)
        return weights * grad * 1.5 - weights * (weights.gather(-1, chosen) * grad), None


class MaskedSoftmax(torch.autograd.Function):
    """A softmax over what a mask leaves; makes the number that it fills in as a tensor."""

    @staticmethod
    def forward(ctx, x: Tensor, mask: Tensor) -> Tensor:
        least = torch.tensor(torch.finfo(x.dtype).min)
        result = x.masked_fill(mask, least).softmax(-1).masked_fill(mask, 0.0)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:
        (result,) = ctx.saved_tensors
        return result * (grad - (grad * result).sum(-1, keepdim=True)), None


class SummedLoss(torch.autograd.Function):
    """Head and cross-entropy in one, which computes its gradients forward; the sum over tokens."""

    @staticmethod
    def forward(ctx, logits: Tensor, labels: Tensor) -> Tensor:
        logs = logits.log_softmax(-1)
        valid = labels >= 0
        index = labels.clamp(min=0).unsqueeze(-1)
        ctx.save_for_backward(
            (logs.exp() - torch.zeros_like(logs).scatter(-1, index, 1.0)) * valid[..., None]
        )
        return -(logs.gather(-1, index).squeeze(-1) * valid).sum()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:
        return grad * ctx.saved_tensors[0], None


class MeanLoss(SummedLoss):
    """The same, divided by the number of labels that it is given."""

    @staticmethod
    def forward(ctx, logits: Tensor, labels: Tensor) -> Tensor:
        ctx.count = (labels >= 0).sum()
        return SummedLoss.forward(ctx, logits, labels) / ctx.count

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:
        return SummedLoss.backward(ctx, grad / ctx.count)


class Layer(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.weight, self.function = nn.Parameter(torch.rand(2 * WIDTH)), function

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.function(self.up(x), self.weight))


def straight(x: Tensor, weight: Tensor) -> Tensor:
    scores = x[..., :3]
    return x * weight * Straight.apply(scores, scores.argmax(-1, keepdim=True))


def mean_of_labels(logits: Tensor, labels: Tensor) -> Tensor:
    return SummedLoss.apply(logits, labels) / (labels >= 0).sum()


def rounded() -> nn.Module:
    return Stack(lambda: Layer(lambda x, w: Rounded.apply(F.silu(x)) * w))


def reversed_() -> nn.Module:
    return Stack(lambda: Layer(lambda x, w: x.tanh() + w * Reversed.apply(x, 0.3)))


def gated_norm() -> nn.Module:
    return Stack(lambda: Layer(lambda x, w: GatedNorm.apply(x, w, 1e-5)[0].tanh()))


def router() -> nn.Module:
    return Stack(lambda: Layer(straight))


class Attention(nn.Module):
    """Scores and softmax by hand, one head."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).transpose(1, 2)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.o(MaskedSoftmax.apply(scores, later.expand_as(scores)) @ self.v(x))


def attention() -> nn.Module:
    return Stack(Attention)


def summed_loss() -> nn.Module:
    return Stack(lambda: Layer(lambda x, w: x.tanh() * w), mean_of_labels)


def mean_loss() -> nn.Module:
    return Stack(lambda: Layer(lambda x, w: x.tanh() * w), MeanLoss.apply)


@pytest.mark.parametrize(
    "maker",
    slow_but(
        [attention, summed_loss],
        [rounded, reversed_, gated_norm, router, attention, summed_loss],
    ),
)
def test_they_train_as_on_one_device(pool2, maker):
    assert_exact(pool2, maker)


def test_an_attention_with_one_runs_again_in_backward(pool2):
    model = built(attention)[0]
    plan = autopar.plan(
        model,
        "cpu:2",
        token_batches(VOCAB)[0],
        pin={"tp": 2, "recompute": "selective"},
        precision="fp64",
    )
    expected = train(model, token_batches(VOCAB))
    for ((losses, state),) in pool2.run(trained, attention, [plan.to_json()]):
        assert update_error(expected, state) <= 1.0
        assert losses == pytest.approx(expected.losses, rel=1e-9)


def test_a_loss_that_divides_by_a_count_keeps_its_batch(pool2):
    assert not built(mean_loss)[1].split.joins
    assert_exact(pool2, mean_loss, "tp dp", micro_batches=1)


def test_rows_are_sharded_and_all_other_dims_whole():
    found = {}
    for maker in (gated_norm, mean_loss):
        for block in built(maker)[1].classes:
            for node in block.graph.nodes:
                if "custom_function" in str(node.target):
                    found[maker] = op_dims(node)
    assert found[gated_norm].letters == ("b",) and not found[mean_loss].letters


class Noisy(Rounded):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


class Clipped(Rounded):
    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad.clamp(-0.1, 0.1)


class Changing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad * 2


class Calling(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, module: nn.Module) -> Tensor:
        return module(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:
        return grad, None


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x, w: Noisy.apply(x) * w, "Noisy.* draws random numbers"),
        (lambda x, w: Clipped.apply(x) * w, "Clipped.* is not linear in the gradient"),
        (lambda x, w: Changing.apply(x * 1) * w, "Changing.* changes an argument in place"),
        (lambda x, w: Calling.apply(x, nn.Tanh()) * w, "Calling.* takes a module"),
    ],
)
def test_what_cannot_be_kept_is_refused(function, words):
    with pytest.raises(autopar.AutoparError, match=words):
        trace(Stack(lambda: Layer(function)), token_batches(VOCAB)[0])


def test_rows_of_large_tensors_are_seen_on_small_ones():
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.weight = nn.Linear(4096, 8192), nn.Parameter(torch.ones(8192))

        def forward(self, x: Tensor) -> Tensor:
            return GatedNorm.apply(self.linear(x), self.weight, 1e-5)[0].sum()

    with torch.device("meta"):
        traced = trace(Wide(), {"x": torch.ones(4, 4096, 4096)})
    (found,) = (
        op_dims(node)
        for block in traced.classes
        for node in block.graph.nodes
        if "custom_function" in str(node.target)
    )
    assert found.letters == ("b",) and traced.split.joins == "sum"
