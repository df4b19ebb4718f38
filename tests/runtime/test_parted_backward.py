"""A backward in two parts: the same gradients as in one, and between the parts no more than the second reads."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils.checkpoint import checkpoint

from autopar.runtime.parted_backward import PartedBackward


class Layer(nn.Module):
    """Norm, product, activation, product, beside a residual; the activation keeps what only gradients of inputs need."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(24, 8)
        self.checkpointed, self.seen = checkpointed, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.up(self.norm(x))
        again = checkpoint(self.gate, inner, use_reentrant=False) if self.checkpointed else self.gate(inner)
        self.seen = [weakref.ref(t.untyped_storage()) for t in (inner, again)]
        return x + self.down(again)

    @staticmethod
    def gate(inner: torch.Tensor) -> torch.Tensor:
        return torch.sin(inner) * torch.sigmoid(inner)


def case(checkpointed: bool) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(Layer(checkpointed), Layer(checkpointed)).double(), torch.randn(5, 8, dtype=torch.float64)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_both_parts_together_are_a_backward_in_one(checkpointed):
    model, x = case(checkpointed)
    model(x.requires_grad_()).pow(2).sum().backward()
    expected = [x.grad, *(p.grad for p in model.parameters())]
    model, x = case(checkpointed)
    parted, work = PartedBackward(), []
    for micro_batch in range(3):  # what is found out at the first is known at the others
        own = x.clone().requires_grad_()
        with parted.forward(micro_batch):
            out = model(own).pow(2).sum()
        work.append((own, out))
    for micro_batch, (own, out) in enumerate(work):
        with parted.first(micro_batch, [out], [own], model.parameters()):
            (to_input,), groups = stage_backward_input([out], None, [own], model.parameters())
        assert torch.equal(to_input, expected[0])
        stage_backward_weight(model.parameters(), groups)
    for parameter, grad in zip(model.parameters(), expected[1:], strict=True):
        assert torch.allclose(parameter.grad, 3 * grad, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_between_the_parts_only_operands_of_weights_stay(checkpointed):
    model, x = case(checkpointed)
    parted, own = PartedBackward(), x.clone().requires_grad_()
    with parted.forward(0):
        out = model(own).pow(2).sum()
    layer = model[0]
    inner, gated = layer.seen
    assert gated() is not None and inner() is not None
    with parted.first(0, [out], [own], model.parameters()):
        _, groups = stage_backward_input([out], None, [own], model.parameters())
    layer.seen = []
    gc.collect()
    assert inner() is None  # the activation read it; no weight does
    assert gated() is not None  # the second product's weight multiplied it
    stage_backward_weight(model.parameters(), groups)
    del groups
    gc.collect()
    assert gated() is None


def test_a_segment_that_recomputes_runs_once_more():
    """Its inputs alone are kept until then; what is made again and no weight reads is gone after the first part."""
    model, x = case(False)
    model(x.requires_grad_()).pow(2).sum().backward()
    expected = [x.grad, *(p.grad for p in model.parameters())]
    model, x = case(False)
    parted, runs = PartedBackward(), []
    for micro_batch in range(2):
        runs.clear()
        own = x.clone().requires_grad_()
        with parted.forward(micro_batch):
            middle = parted.again(lambda y: runs.append(1) or model[0](y), own)
            inner, gated = model[0].seen
            out = parted.again(lambda y: runs.append(2) or model[1](y), middle).pow(2).sum()
        gc.collect()
        assert inner() is None and gated() is None
        with parted.first(micro_batch, [out], [own], model.parameters()):
            (to_input,), groups = stage_backward_input([out], None, [own], model.parameters())
        assert runs == [1, 2, 2, 1]
        inner, gated = model[0].seen
        assert inner() is None and gated() is not None  # without a collection: no cycle holds it
        assert torch.equal(to_input, expected[0])
        stage_backward_weight(model.parameters(), groups)
        assert runs == [1, 2, 2, 1]
    for parameter, grad in zip(model.parameters(), expected[1:], strict=True):
        assert torch.allclose(parameter.grad, 2 * grad, rtol=1e-13, atol=1e-15)


def test_what_was_given_back_is_not_read_again():
    model, x = case(False)
    parted, own = PartedBackward(), x.clone().requires_grad_()
    with parted.forward(0):
        out = model(own).pow(2).sum()
    parted._stay[parted._number] = frozenset()  # as if the second part read nothing
    with parted.first(0, [out], [own], model.parameters()):
        _, groups = stage_backward_input([out], None, [own], model.parameters())
    with pytest.raises(RuntimeError, match="after it was given back"):
        stage_backward_weight(model.parameters(), groups)
