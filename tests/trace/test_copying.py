"""Models whose attributes hold what cannot be copied, and tensors that forward changes beside the registers."""

from __future__ import annotations

import functools
import io
import logging
import queue
import threading

import pytest
import torch
from support.eager_runs import PINS, WHOLE, batches, errors, paragraph
from support.effort import every
from torch import Tensor, nn

from autopar.api import trace
from autopar.errors import AutoparError


class Model(nn.Module):
    def __init__(self, **attributes) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(6, 6), None
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        self.last = y
        return y.square().sum()


class Holder:
    def __init__(self, value) -> None:
        self.value = value


HELD = {
    "lock": threading.Lock,
    "lock in an object": lambda: Holder({"lock": threading.RLock()}),
    "event": threading.Event,
    "queue": queue.Queue,
    "file": lambda: io.StringIO("text"),
    "open file": lambda: open(__file__),  # noqa: SIM115
    "module": lambda: logging,
    "logger": lambda: logging.getLogger("model"),
    "tensor with a history": lambda: torch.ones(3, requires_grad=True) * 2,
    "tensors with histories": lambda: {"past": [(torch.ones(3, requires_grad=True) * 2,)]},
    "torch.Generator": torch.Generator,
    "thread-local": threading.local,
}


@pytest.mark.parametrize("name", every(3, HELD))
def test_what_it_holds_is_no_hindrance(name):
    value = HELD[name]()
    model = Model(held=value)
    assert trace(model, {"x": torch.ones(4, 6)}).segments
    assert model.held is value and model.last is None
    if hasattr(value, "close"):
        value.close()


def holding(name: str) -> nn.Module:
    return Model(held=HELD[name]())


@pytest.mark.parametrize("name", every(3, ["tensors with histories", "lock in an object", "queue"]))
def test_training_with_it_is_that_of_eager_pytorch(pool2, name):
    for found in pool2.run(errors, functools.partial(holding, name), [*PINS], batches()):
        assert max(found) <= 1, found


class Stubborn:
    def __reduce_ex__(self, protocol):
        raise TypeError("it does not travel")


NOT_COPIED = {
    "generator": (lambda: (n for n in range(3)), "'held' of the model holds a generator"),
    "generator in a list": (
        lambda: [(n for n in range(3))],
        r"'held\[0\]' of the model holds a generator",
    ),
    "class of the user's": (
        lambda: Holder([Stubborn()]),
        r"'held.value\[0\]' of the model holds a Stubborn, .*it does not travel",
    ),
}


@pytest.mark.parametrize("name", NOT_COPIED)
def test_what_cannot_be_copied_is_refused_by_name(name):
    make, message = NOT_COPIED[name]
    model = Model(held=make())
    with pytest.raises(AutoparError, match=message) as refused:
        trace(model, {"x": torch.ones(4, 6)})
    paragraph(refused.value)
    model.held = None  # the advice
    assert trace(model, {"x": torch.ones(4, 6)}).segments


def test_a_lazy_module_is_refused_before_its_first_call():
    model = nn.Sequential(nn.LazyLinear(3), nn.Flatten())
    batch, loss = (torch.ones(4, 6), torch.ones(4, 3)), nn.functional.mse_loss
    with pytest.raises(AutoparError, match=r"parameter '0.weight' has no shape yet"):
        trace(model, batch, loss)
    with torch.no_grad():
        model(batch[0])  # the advice
    assert trace(model, batch, loss).segments


class Recurrent(nn.Module):
    """Keeps the state of its last call, and begins each call without, as transformers' RecurrentGemma in training."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.state = nn.Linear(6, 6), None

    def forward(self, x: Tensor) -> Tensor:
        self.state = None
        for _ in range(2):
            x = (
                torch.tanh(self.inner(x))
                if self.state is None
                else torch.tanh(self.inner(x) + self.state)
            )
            self.state = x
        return x.square().sum()


def test_a_model_that_keeps_what_it_computed_is_trained_after_a_call(pool2):
    model = Recurrent()
    model(torch.ones(2, 6))
    state = model.state
    assert not state.is_leaf and trace(model, {"x": torch.ones(4, 6)}).segments
    assert model.state is state, "the user's model is as it was"
    for found in pool2.run(errors, Recurrent, [*PINS], batches()):
        assert max(found) <= 1, found


# ------------------------------------------------------------------------------------- tensors that forward changes in place


class Averaged(nn.Module):
    """Changes a buffer in place, and reads it where `keep` has put it."""

    def __init__(self, keep, change: str = "register") -> None:
        super().__init__()
        self.inner, self.change = nn.Linear(6, 6), change
        self.register_buffer("average", torch.zeros(6))
        self.kept = keep(self.average)

    def read(self) -> Tensor:
        kept = self.kept.value if isinstance(self.kept, Holder) else self.kept
        while not isinstance(kept, Tensor):
            kept = kept[0]
        return kept

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        changed = self.average if self.change == "register" else self.read()
        with torch.no_grad():
            changed.mul_(0.5).add_(self.inner.weight.sum(1) * 0.1)
        return (y + self.read()).square().sum()


KEPT = {
    "list": lambda t: [t],
    "dict": lambda t: {0: t},
    "nested": lambda t: [{0: [t]}],
    "object": Holder,
    "plain attribute": lambda t: t,
}


def averaged(name: str, change: str) -> nn.Module:
    return Averaged(KEPT[name], change)


class Reread(Averaged):
    """`Averaged` after `double()`, which makes new buffers: kept anew."""

    def _apply(self, *args, **kwargs):
        done = super()._apply(*args, **kwargs)
        self.kept = KEPT["list"](self.average)
        return done


def reread(change: str) -> nn.Module:
    return Reread(KEPT["list"], change)


@pytest.mark.parametrize("change", ["register", "kept"])
@pytest.mark.parametrize("name", every(3, KEPT))
def test_buffers_changed_in_place_and_read_elsewhere(name, change):
    model = averaged(name, change)
    traced = trace(model, {"x": torch.ones(4, 6)})
    assert set(traced.updates) == {"average"} and not traced.constants
    assert torch.equal(model.average, torch.zeros(6)) and model.read() is model.average


@pytest.mark.parametrize("change", every(2, ["register", "kept"]))
def test_they_train_as_in_eager_pytorch(pool2, change):
    for found in pool2.run(errors, functools.partial(reread, change), [*WHOLE], batches()):
        assert max(found) <= 1, found


class Clamped(nn.Module):
    """Bounds its weight before it computes with it: in place, or as a new tensor."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner, self.how = nn.Linear(6, 6), how

    def forward(self, x: Tensor) -> Tensor:
        weight = self.inner.weight
        if self.how == "data":
            weight.data.clamp_(-0.2, 0.2)
        elif self.how == "no_grad":
            with torch.no_grad():
                weight.mul_(0.9)
        elif self.how == "view":
            weight.data[0].zero_()
        else:
            weight = weight.clamp(-0.2, 0.2)
        return nn.functional.linear(x, weight, self.inner.bias).square().sum()


@pytest.mark.parametrize("how", ["data", "no_grad", "view"])
def test_parameters_that_forward_changes_are_refused(how):
    model = Clamped(how)
    before = model.inner.weight.detach().clone()
    with pytest.raises(
        AutoparError, match=r"changes parameter 'inner.weight' in place \(test_copying.py:.*clamp"
    ) as refused:
        trace(model, {"x": torch.ones(4, 6)})
    paragraph(refused.value)
    assert torch.equal(model.inner.weight, before)


def test_the_advice_is_exact(pool2):
    for found in pool2.run(errors, functools.partial(Clamped, "new"), [*PINS], batches()):
        assert max(found) <= 1, found


@pytest.mark.slow
def test_gemma3n_clamps_its_weights():
    """Plain torch.export takes the process down here: a fake tensor is among its constants."""
    from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

    model = Gemma3nForCausalLM(Gemma3nTextConfig(
        vocab_size=32, vocab_size_per_layer_input=32, hidden_size=16, hidden_size_per_layer_input=4, intermediate_size=16,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_kv_shared_layers=0, laurel_rank=2,
        layer_types=["full_attention"] * 2, activation_sparsity_pattern=[0.95, 0.0])).train()  # fmt: skip
    ids = torch.zeros(2, 8, dtype=torch.int64)
    with pytest.raises(
        AutoparError,
        match=r"parameter 'model.layers.0.altup.prediction_coefs.weight' in place \(modeling_gemma3n.py:",
    ):
        trace(model, {"input_ids": ids, "labels": ids.clone()})
    for layer in model.model.layers:
        layer.altup.eval()  # which does not clamp
    assert trace(model, {"input_ids": ids, "labels": ids.clone()}).segments


class Halves(nn.Module):
    """A layer, and a child that torch.jit made of another."""

    def __init__(self, convert) -> None:
        super().__init__()
        self.inner, self.child = nn.Linear(6, 6), convert(nn.Sequential(nn.Linear(6, 6), nn.Tanh()))

    def forward(self, x: Tensor) -> Tensor:
        return swish(self.child(self.inner(x))).square().sum()


@torch.jit.script
def swish(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


@pytest.mark.parametrize(
    ("convert", "words"),
    [
        (torch.jit.script, r"'child' \(Sequential\) comes from torch\.jit\.script"),
        (lambda child: torch.jit.trace(child, torch.ones(2, 6)), r"comes from torch\.jit\.trace"),
    ],
)
def test_modules_of_torch_jit_are_refused_and_fill_the_module_that_takes_their_place(
    convert, words
):
    """A scripted function stays."""
    scripted, model = Halves(convert), Halves(lambda child: child)
    with pytest.raises(AutoparError, match=words) as refused:
        trace(scripted, {"x": torch.ones(4, 6)})
    paragraph(refused.value)
    model.load_state_dict(scripted.state_dict())
    assert trace(model, {"x": torch.ones(4, 6)}).segments
