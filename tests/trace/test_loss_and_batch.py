"""What a model does with its batch: losses that micro-batches cannot split, and attention over the batch, keep or refuse exactness."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.api import trace
from autopar.ops.rules import op_dims
from autopar.ops.values import ops


class Model(nn.Module):
    def __init__(self, loss) -> None:
        super().__init__()
        self.linear, self.loss = nn.Linear(6, 5), loss

    def forward(self, x, labels):
        return self.loss(self, self.linear(x), labels)


def traced(loss):
    return trace(Model(loss), {"x": torch.randn(4, 3, 6), "labels": torch.randint(0, 5, (4, 3))})


def cross(logits, labels, reduction):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction)


@pytest.mark.parametrize(("loss", "joins"), [
    (lambda m, y, labels: cross(y, labels, "sum"), "sum"),
    (lambda m, y, labels: cross(y, labels, "mean") + m.linear.weight.pow(2).sum(), "sum"),
    (lambda m, y, labels: cross(y, labels, "sum") + m.linear.weight.pow(2).sum(), "sum"),
    (lambda m, y, labels: cross(y, labels, "sum") + y.pow(2).mean(), "sum"),
    (lambda m, y, labels: F.cross_entropy(y.transpose(1, 2), labels, reduction="none").mean(), "mean"),
    (lambda m, y, labels: cross(y, labels, "mean") + torch.einsum("bsd,btd->bst", y, y).mean(), "sum"),
    (lambda m, y, labels: m.linear.weight.pow(2).mean() + y.pow(2).mean(), "mean"),
    (lambda m, y, labels: cross(y, labels, "mean") * y.pow(2).mean(), ""),
])  # fmt: skip
def test_whether_losses_of_micro_batches_add_up(loss, joins):
    assert traced(loss).split.joins == joins


@pytest.mark.parametrize("mix", [
    lambda y: F.scaled_dot_product_attention(*[y.transpose(0, 1).unsqueeze(1)] * 3),
    lambda y: F.scaled_dot_product_attention(*[y.unsqueeze(0)] * 3),
    lambda y: F.embedding(torch.arange(y.shape[0]), y.flatten(1)),
])  # fmt: skip
def test_rules_leave_the_batch_symbolic(mix):
    """A rule that reads the batch as a number fixes it in all shapes of the trace, and dp then computes something else."""
    model = traced(lambda m, y, labels: mix(y).pow(2).mean() + cross(y, labels, "mean"))
    for block in model.classes:
        for node in ops(block.graph):
            op_dims(node)
    assert all(
        isinstance(val.shape[0], torch.SymInt) and val.shape[0].node.expr.is_Symbol
        for val in model.input_vals
    )


@pytest.mark.parametrize(("loss", "kept"), [
    (lambda m, y, labels: sum([cross(y, labels, "sum"), y.pow(2).sum()]), 1),  # Python begins with 0
    (lambda m, y, labels: cross(0.0 + y - 0, labels, "sum"), 0),
    (lambda m, y, labels: cross(y + 1, labels, "sum"), 1),
    (lambda m, y, labels: cross(y * 2.0, labels, "sum"), 1),
    (lambda m, y, labels: cross(y, labels + 0, "sum") + (labels + 0.0 + y[..., 0]).sum(), 3),  # the second makes integers floats
])  # fmt: skip
def test_zeros_that_are_added_are_left_out(loss, kept):
    names = [str(node.target) for block in traced(loss).classes for node in ops(block.graph)]
    assert sum(name in (f"aten.{op}.{kind}" for op in ("add", "sub", "mul", "div") for kind in ("Tensor", "Scalar", "Tensor_mode"))
               for name in names) == kept, names  # fmt: skip


def test_what_is_made_like_a_tensor_has_no_gradient_of_it():
    found = traced(
        lambda m, y, labels: (
            torch.zeros_like(y).scatter(2, y.argmax(2, keepdim=True), 1.0).mean(0) * y.mean(0)
        ).sum()
    )
    grads = {node.name: node.meta["grad"] for block in found.classes for node in ops(block.graph)}
    assert not any(
        grad for name, grad in grads.items() if name.startswith(("zeros_like", "scatter"))
    )
    assert all(grad for name, grad in grads.items() if name.startswith(("linear", "mul")))


@pytest.mark.parametrize("counts", [False, True])
def test_a_loss_of_rows_stays_one_where_ops_in_place_are_written_out(counts):
    """run_decompositions of torch 2.13 takes a cross-entropy without a reduction for a single number."""

    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 7)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            if counts:
                self.calls.add_(1)
            return (
                F.cross_entropy(self.inner(x), labels, reduction="none") * torch.tensor(0.5)
            ).sum()

    traced = trace(
        Weighted(), {"x": torch.zeros(4, 6), "labels": torch.zeros(4, dtype=torch.int64)}
    )
    (loss,) = (
        node
        for block in traced.classes
        for node in block.graph.nodes
        if "cross_entropy" in node.name
    )
    assert (
        loss.meta["val"].dim() == 1
        and traced.split.joins == "sum"
        and bool(traced.updates) is counts
    )
