"""Batches that nest or hold Python values, and results of forward in which the loss is not alone."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from support.eager_runs import paragraph
from support.exactness import TOLERANCE
from torch import Tensor, nn

import autopar

ROWS, WIDTH, STEPS = 8, 6, 3


class Net(nn.Module):
    """Two layers; `read(self, batch)` computes what forward returns."""

    def __init__(self, read) -> None:
        super().__init__()
        self.first, self.second, self.read = nn.Linear(WIDTH, 8), nn.Linear(8, 4), read

    def logits(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(x), labels)


class ByName(Net):
    def forward(self, **batch: Any) -> Any:
        return self.read(self, batch)


class ByPlace(Net):
    def forward(self, *batch: Any) -> Any:
        return self.read(self, batch)


class Strict(Net):
    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return self.read(self, {"x": x, "labels": labels})


class Pair(NamedTuple):
    x: Tensor
    scale: float


@dataclass
class Item:
    x: Tensor
    mask: Tensor | None


@dataclass
class Output:
    logits: Tensor
    loss: Tensor


def rows(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.randint(4, (ROWS,), generator=generator)


def flat(x: Tensor, labels: Tensor) -> dict[str, Any]:
    return {"x": x, "labels": labels}


NESTED = {
    "a dict in a dict": (
        lambda x, y: {"inputs": {"x": x, "mask": torch.ones_like(x)}, "labels": y},
        lambda net, b: net.loss(b["inputs"]["x"] * b["inputs"]["mask"], b["labels"]),
    ),
    "a list": (
        lambda x, y: {"views": [x, x + 1], "labels": y},
        lambda net, b: sum(net.loss(view, b["labels"]) for view in b["views"]),
    ),
    "a dict in a tuple": (lambda x, y: ({"x": x}, y), lambda net, b: net.loss(b[0]["x"], b[1])),
    "everything in one entry": (
        lambda x, y: {"batch": {"x": x, "y": y}},
        lambda net, b: net.loss(b["batch"]["x"], b["batch"]["y"]),
    ),
    "tuples and dataclasses": (
        lambda x, y: {"pair": Pair(x, 0.5), "item": Item(x, None), "labels": y},
        lambda net, b: net.loss(b["pair"].x * b["pair"].scale + b["item"].x, b["labels"]),
    ),
    "None": (
        lambda x, y: {"x": x, "mask": None, "labels": y},
        lambda net, b: net.loss(b["x"] if b["mask"] is None else b["x"] * b["mask"], b["labels"]),
    ),
    "numbers, texts and bools": (
        lambda x, y: {"x": x, "labels": y, "scale": 0.5, "times": 2, "mode": "up", "on": True},
        lambda net, b: net.loss(b["x"], b["labels"]) * b["scale"] * b["times"] * (1 if b["on"] and b["mode"] == "up" else -1),
    ),
    "a number of the batch as a tensor": (
        lambda x, y: {"x": x, "labels": y, "items": (y > 1).sum() + 1},
        lambda net, b: F.cross_entropy(net.logits(b["x"]), b["labels"], reduction="sum") / b["items"],
    ),
    "names that are no identifiers": (
        lambda x, y: {"my-x": x, "class": y},
        lambda net, b: net.loss(b["my-x"], b["class"]),
    ),
}  # fmt: skip


def runs(build, batches, loss_fn=None, **more) -> float:
    """The largest update-relative error of three steps in two micro-batches against eager ones, in
    which `eager(model, batch)` gives the loss."""
    eager = more.pop("eager")
    torch.manual_seed(0)
    model = build().double()
    start, engine = copy.deepcopy(model), None
    sgd = lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)  # noqa: E731
    optimizer = sgd(model.parameters())
    engine = autopar.parallelize(
        start, "cpu:1", batches[0], sgd, pin={"micro_batch": ROWS // 2}, precision="fp64", loss_fn=loss_fn, **more
    )  # fmt: skip
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for batch in batches:
        optimizer.zero_grad()
        loss = eager(model, batch)
        loss.sum().backward()
        optimizer.step()
        found = engine.step(engine.local_batch(batch))
        assert found.shape == () and found.item() == pytest.approx(loss.item(), rel=1e-11)
    after, state = model.state_dict(), engine.full_state_dict()
    errors = [
        (state[name] - after[name]).norm() / (after[name] - before[name]).norm() for name in after
    ]
    return float(max(errors))


@pytest.mark.parametrize("name", NESTED)
def test_nested_batches_train_as_on_one_device(name):
    make, read = NESTED[name]
    batches = [make(*rows(seed)) for seed in range(STEPS)]
    named = isinstance(batches[0], dict)
    call = lambda model, batch: model(**batch) if named else model(*batch)  # noqa: E731
    error = runs(lambda: (ByName if named else ByPlace)(read), batches, eager=call)
    assert error <= TOLERANCE


OUTPUTS = {
    "shape (1,)": (lambda net, b: net.loss(**b).reshape(1), None, lambda out: out),
    "shape (1, 1)": (lambda net, b: net.loss(**b).reshape(1, 1), None, lambda out: out),
    "after the logits": (lambda net, b: (net.logits(b["x"]), net.loss(**b)), None, lambda out: out[1]),
    "in a dict by another name": (lambda net, b: {"logits": net.logits(b["x"]), "total": net.loss(**b)}, None, lambda out: out["total"]),
    "in a dataclass": (lambda net, b: Output(net.logits(b["x"]), net.loss(**b)), None, lambda out: out.loss),
    "the first of two": (lambda net, b: (net.loss(**b), net.logits(b["x"]).square().mean()), None, lambda out: out[0]),
    "a sum that loss_fn makes of losses": (
        lambda net, b: {"ce": net.loss(**b), "norm": net.logits(b["x"]).square().mean()},
        lambda output, target: output["ce"] + output["norm"], lambda out: out["ce"] + out["norm"]),
    "a dict that loss_fn returns": (
        lambda net, b: net.logits(b["x"]) + 0 * b["labels"][:, None],
        lambda output, target: {"loss": F.cross_entropy(output, target), "n": 3}, None),
}  # fmt: skip


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_loss_is_found_in_what_forward_returns(name):
    read, loss_fn, chosen = OUTPUTS[name]

    def eager(model, batch):
        output = model(**batch)
        return chosen(output) if chosen else loss_fn(output, batch["labels"])["loss"]

    batches = [flat(*rows(seed)) for seed in range(STEPS)]
    assert runs(lambda: Strict(read), batches, loss_fn, eager=eager) <= TOLERANCE


def test_several_losses_are_refused_with_a_loss_fn_that_works():
    x, labels = rows(0)
    both = lambda net, b: {"ce": net.loss(**b), "norm": net.logits(b["x"]).square().mean()}  # noqa: E731
    with pytest.raises(
        autopar.AutoparError, match=r"2 scalars with a gradient, output\['ce'\]"
    ) as refused:
        autopar.plan(Strict(both).double(), "cpu:1", flat(x, labels))
    advice = paragraph(refused.value).partition("loss_fn=")[2]
    autopar.plan(Strict(both).double(), "cpu:1", flat(x, labels), loss_fn=eval(advice))
    listed = lambda net, b: [net.loss(**b), net.logits(b["x"]).square().mean()]  # noqa: E731
    with pytest.raises(autopar.AutoparError, match=r"output\[0\] \+ output\[1\]"):
        autopar.plan(Strict(listed).double(), "cpu:1", flat(x, labels))


def engine_for(read, batch, **more):
    return autopar.parallelize(ByName(read).double(), "cpu:1", batch, precision="fp64", **more)


def MASKED(net, b):
    return net.loss(b["x"] if b.get("mask") is None else b["x"] * b["mask"], b["labels"])


def test_later_batches_with_other_entries_are_refused_by_name():
    batch = flat(*rows(0)) | {"mask": torch.ones(ROWS, WIDTH).double()}
    engine = engine_for(MASKED, batch)
    with pytest.raises(
        autopar.AutoparError, match=r"give each batch 'mask', of shape \(batch, 6\)"
    ):
        engine.step(flat(*rows(1)))
    with pytest.raises(autopar.AutoparError, match="leave out 'more'"):
        engine.step(batch | {"more": torch.ones(ROWS)})
    with pytest.raises(autopar.AutoparError, match="'mode' is 'up'; the example batch has no such"):
        engine.step(batch | {"mode": "up"})
    engine.step(flat(*rows(1)) | {"mask": torch.ones(ROWS, WIDTH).double()})


def test_python_values_are_those_of_the_example():
    batch = flat(*rows(0)) | {"mask": None, "scale": 2.0}
    engine = engine_for(lambda net, b: MASKED(net, b) * b["scale"], batch)
    with pytest.raises(
        autopar.AutoparError, match=r"'scale' is 3.0, and 2.0 in the example.*torch.tensor"
    ):
        engine.step(batch | {"scale": 3.0})
    with pytest.raises(autopar.AutoparError, match=r"lacks 'scale', which is 2\.0"):
        engine.step(flat(*rows(1)))
    with pytest.raises(
        autopar.AutoparError, match="'mask' was None: give an example in which it is a tensor"
    ):
        engine.step(batch | {"mask": torch.ones(ROWS, WIDTH)})
    del batch["mask"]  # as None, which a default of forward usually is
    engine.step(batch)


def test_entries_that_forward_does_not_take_or_that_are_no_batch_are_refused_by_name():
    batch = flat(*rows(0)) | {"index": torch.arange(ROWS)}
    model = Strict(lambda net, b: net.loss(**b)).double()
    with pytest.raises(
        autopar.AutoparError, match="takes x, labels, and the batch has 'index' besides"
    ) as refused:
        autopar.plan(model, "cpu:1", batch)
    advice = paragraph(refused.value).partition("each batch, as ")[2]
    autopar.plan(model, "cpu:1", eval(advice, {"batch": batch}))
    with pytest.raises(autopar.AutoparError, match=r"'index' is a ndarray.*torch\.as_tensor"):
        autopar.plan(model, "cpu:1", batch | {"index": batch["index"].numpy()})
