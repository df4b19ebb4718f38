"""With fuse=head a head's product is one op with its cross-entropy, in their spellings; what differs stays, with a reason."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.effort import every
from torch import Tensor, nn

from autopar.api import trace
from autopar.ir.calls import op_name
from autopar.ir.traced import TracedModel
from autopar.trace.fusion.fused import fused

ROWS, SEQ, WIDTH, CLASSES = 2, 5, 6, 11
HEAD, LOSS = "autopar::linear_cross_entropy", "autopar::cross_entropy"


class Headed(nn.Module):
    """forward is `loss(hidden, head, labels)`: hidden (rows, 5, 6) comes from a layer, head is a matrix (11, 6)."""

    def __init__(self, loss, width: int = WIDTH) -> None:
        super().__init__()
        self.loss = loss
        self.into, self.head = nn.Linear(WIDTH, width), nn.Linear(width, CLASSES)
        self.register_buffer("classes", torch.linspace(0.5, 1.5, CLASSES))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.into(x), self.head.weight, labels, self)


def fused_from(
    loss, dtype: torch.dtype = torch.float32, mode: str = "head", width: int = WIDTH
) -> TracedModel:
    """The model of a loss after the pass."""
    torch.manual_seed(0)
    inputs = {
        "x": torch.randn(ROWS, SEQ, WIDTH, dtype=dtype),
        "labels": torch.randint(0, CLASSES, (ROWS, SEQ)),
    }
    return fused(trace(Headed(loss, width).to(dtype), inputs), mode)


def by_token(logits, labels, **options):
    return F.cross_entropy(logits.reshape(-1, CLASSES), labels.reshape(-1), **options)


def shifted(h, w, labels, _):
    """As transformers wrote it for years: all positions but the last, in fp32."""
    logits = F.linear(h, w).float()
    return by_token(logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous())


def by_sizes(h, w, labels, _):
    """The number of rows is an expression in the batch."""
    rows = labels.shape[0] * labels.shape[1]
    return F.cross_entropy(F.linear(h, w).float().view(rows, CLASSES), labels.view(rows))


def tied(h, w, labels, _):
    return by_token(h @ w.t(), labels)


def last_positions(h, w, labels, _):
    """Only the last two positions have a loss: a slice of hidden states before the head, and one after."""
    return by_token(F.linear(h[:, 1:], w)[:, 2:].float(), labels[:, 3:])


def capped(h, w, labels, _):
    return by_token(30.0 * torch.tanh(F.linear(h, w) / 30.0), labels)


def capped_before_fp32(h, w, labels, _):
    """As gemma2: in bf16 one set of tensors may happen to round to nearly the right loss."""
    return by_token((30.0 * torch.tanh(F.linear(h, w) / 30.0)).float(), labels)


def unreduced(h, w, labels, _):
    rows = by_token(F.linear(h, w), labels, reduction="none")
    return (rows * torch.arange(SEQ).repeat(labels.shape[0])).sum() / labels.numel()


PLAIN = {"ignore_index": -100, "label_smoothing": 0.0, "reduction": "sum"}
SPELLINGS = {
    "flattened": (lambda h, w, labels, _: by_token(F.linear(h, w), labels), PLAIN),
    "in fp32": (lambda h, w, labels, _: by_token(F.linear(h, w).float(), labels), PLAIN),
    "by sizes": (by_sizes, PLAIN),
    "shifted": (shifted, PLAIN),
    "tied": (tied, PLAIN),
    "last positions": (last_positions, PLAIN),
    "capped": (capped, PLAIN | {"soft_cap": 30.0}),
    "capped before fp32": (capped_before_fp32, PLAIN | {"soft_cap": 30.0}),
    "scaled": (lambda h, w, labels, _: by_token(F.linear(h, w) / 8.0, labels), PLAIN),
    "scaled and capped": (
        lambda h, w, labels, _: by_token(30.0 * torch.tanh(F.linear(h, w) * 0.25), labels),
        PLAIN | {"soft_cap": 30.0},
    ),
    "unreduced": (unreduced, PLAIN | {"reduction": "none"}),
    "smoothed": (
        lambda h, w, labels, _: by_token(F.linear(h, w), labels, label_smoothing=0.1),
        PLAIN | {"label_smoothing": 0.1},
    ),
    "with an ignored class": (
        lambda h, w, labels, _: by_token(F.linear(h, w), labels, ignore_index=3),
        PLAIN | {"ignore_index": 3},
    ),
    "with class weights": (
        lambda h, w, labels, m: by_token(F.linear(h, w), labels, weight=m.classes, reduction="sum"),
        PLAIN,
    ),
}


@pytest.mark.parametrize("dtype", every(2, [torch.bfloat16, torch.float32]))
@pytest.mark.parametrize("name", every(2, SPELLINGS))
def test_a_head_and_its_loss(name, dtype):
    body, attributes = SPELLINGS[name]
    model = fused_from(body, dtype)
    assert [entry.op for entry in model.fusion.fused] == [HEAD], model.fusion
    assert model.fusion.fused[0].attributes == attributes and model.fusion.keeps_no_logits
    nodes = [n for c in model.classes for n in c.graph.nodes if n.op == "call_function"]
    shapes = [tuple(n.meta["val"].shape) for n in nodes if isinstance(n.meta["val"], Tensor)]
    assert not any(shape and shape[-1] == CLASSES for shape in shapes), "logits are left"
    assert not any("cross_entropy_loss" in op_name(node) for node in nodes)


def test_a_wide_head():
    """On random tensors of this width logits would be so large that the loss is rounding alone."""
    fusion = fused_from(SPELLINGS["in fp32"][0], torch.bfloat16, width=4096).fusion
    assert [entry.op for entry in fusion.fused] == [HEAD], fusion


def test_only_the_mode_that_names_it_fuses_a_head():
    for mode, ops in (("norms", []), ("all", [LOSS])):
        fusion = fused_from(SPELLINGS["in fp32"][0], mode=mode).fusion
        assert [entry.op for entry in fusion.fused] == ops and not fusion.keeps_no_logits


def read_twice(h, w, labels, _):
    logits = F.linear(h, w)
    return by_token(logits, labels) + 1e-3 * logits.logsumexp(-1).square().mean()


MISSES = {
    "a bias": (lambda h, w, labels, m: by_token(m.head(h), labels), "adds a bias"),
    "two caps": (
        lambda h, w, labels, _: by_token(torch.tanh(5 * torch.tanh(F.linear(h, w) / 5)), labels),
        "are bent more than once",
    ),
    "a negative cap": (
        lambda h, w, labels, _: by_token(-30.0 * torch.tanh(F.linear(h, w) / 30.0), labels),
        "are bent more than once",
    ),
    "read twice": (read_twice, "used elsewhere too"),
    "fewer classes": (
        lambda h, w, labels, _: F.cross_entropy(
            F.linear(h, w)[..., : CLASSES - 1].reshape(-1, CLASSES - 1),
            labels.reshape(-1) % (CLASSES - 1),
        ),
        "classes are cut off",
    ),
    "no product": (
        lambda h, w, labels, _: by_token(torch.sin(F.linear(h, w)), labels),
        "made by aten::sin",
    ),
}


@pytest.mark.parametrize("name", MISSES)
def test_what_is_no_head_stays_with_a_reason(name):
    """The loss itself is fused all the same."""
    body, reason = MISSES[name]
    fusion = fused_from(body).fusion
    assert [entry.op for entry in fusion.fused] == [LOSS] and not fusion.keeps_no_logits
    (miss,) = (entry for entry in fusion.missed if entry.op == HEAD)
    assert reason in miss.reason


def test_views_of_the_batch_are_those_of_the_loss_alone_too():
    model = fused_from(by_sizes, torch.bfloat16, "all")
    assert [entry.op for entry in model.fusion.fused] == [LOSS]
