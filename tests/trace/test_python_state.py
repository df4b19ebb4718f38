"""Python state that forward changes: what computes with it is refused by name, what does not is noted, and all of it is put back."""

from __future__ import annotations

import collections
import functools
import itertools
import random

import numpy as np
import pytest
import torch
from support.eager_runs import PINS, WHOLE, batches, errors, paragraph
from support.effort import every
from torch import Tensor, nn

from autopar.api import trace
from autopar.errors import AutoparError
from autopar.planning.notes import notes
from autopar.trace.python_state import Functions

STEPS = 0
STATE = {"calls": 0}
GENERATOR = random.Random(4)


class Meter:
    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def update(self, value: float) -> None:
        self.total += value
        self.count += 1


class Model(nn.Module):
    """A linear layer, and `function(self, y)` of what it gives."""

    calls_of_all = 0

    def __init__(self, function, **attributes) -> None:
        super().__init__()
        self.inner, self.function = nn.Linear(6, 6), function
        for name, value in attributes.items():
            setattr(self, name, value() if callable(value) else value)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.inner(x)).square().sum()


def warm_up(m, y):
    m.step += 1
    return y * min(1.0, m.step / 1000)


def late(m, y):
    m.step += 1
    return y * 2 if m.step > 1000 else y


def first_call(m, y):
    scale, m.first = (2.0 if m.first else 1.0), False
    return y * scale


def alternating(m, y):
    m.history.append(len(m.history))
    return y * (1 + len(m.history) % 2)


def recurrent(m, y):
    m.state = (m.state + y.mean(0)).detach()
    return y + m.state


def global_step(m, y):
    global STEPS
    STEPS += 1
    return y * STEPS


def shared_dict(m, y):
    STATE["calls"] += 1
    return y * STATE["calls"]


def of_the_class(m, y):
    Model.calls_of_all += 1
    return y if Model.calls_of_all > 5 else -y


def default_argument(m, y, seen=[]):  # noqa: B006 (on purpose)
    seen.append(1)
    return y * len(seen)


def counted(m, y):
    return y * next(m.numbers)


def metered(m, y):
    m.meter.update(1.0)
    return y / m.meter.count


def by_name(m, y):
    m.step += 1
    return y * getattr(m, "step")  # noqa: B009 (on purpose)


def bool_flag(m, y):
    m.flag = not m.flag
    return y if m.flag else -y


COMPUTE = {
    "warm-up": (warm_up, dict(step=0), "'step' (from 0 to 1)"),
    "a limit far away": (late, dict(step=0), "'step' (from 0 to 1)"),
    "first call": (first_call, dict(first=True), "'first' (from True to False)"),
    "list": (alternating, dict(history=list), "'history"),
    "tensor": (recurrent, dict(state=lambda: torch.zeros(6)), "'state'"),
    "global": (global_step, {}, "variable 'STEPS'"),
    "dict outside": (shared_dict, {}, "variable 'STATE'"),
    "class": (of_the_class, {}, "class attribute Model.calls_of_all"),
    "default argument": (default_argument, {}, "default argument 0 of default_argument"),
    "itertools": (counted, dict(numbers=lambda: itertools.count(1)), "'numbers'"),
    "object": (metered, dict(meter=Meter), "'meter"),
    "getattr": (by_name, dict(step=0), "'step'"),
    "flag": (bool_flag, dict(flag=False), "'flag'"),
}


def state_of(model: Model) -> tuple:
    meter = vars(model.meter) if hasattr(model, "meter") else None
    own = {
        k: v
        for k, v in vars(model).items()
        if isinstance(v, (int, float, str, bool, list, dict, collections.Counter, type(None)))
    }
    return (
        repr(own),
        repr(meter),
        STEPS,
        repr(STATE),
        Model.calls_of_all,
        repr(default_argument.__defaults__),
        model.training,
    )


@pytest.mark.parametrize("name", COMPUTE)
def test_state_that_forward_computes_with_is_refused(name):
    function, attributes, path = COMPUTE[name]
    model = Model(function, **attributes)
    before, weights = state_of(model), {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(AutoparError) as refused:
        trace(model, {"x": torch.ones(4, 6)})
    message = paragraph(refused.value)
    assert (
        message.startswith("forward changes ") and path in message and "register_buffer" in message
    )
    assert state_of(model) == before and all(
        torch.equal(v, weights[k]) for k, v in model.state_dict().items()
    )


def test_a_loss_that_counts_is_refused():
    calls = 0

    def loss(output, y):
        nonlocal calls
        calls += 1
        return (output - y).square().mean() * calls

    with pytest.raises(AutoparError, match=r"variable 'calls' of .*loss"):
        trace(
            nn.Linear(6, 1), (torch.ones(4, 6), torch.ones(4, 1)), lambda output, y: loss(output, y)
        )
    assert calls == 0


# -------------------------------------------------------------------------------------------------------------- harmless changes


def counter(m, y):
    m.step += 1
    if m.step % 100 == 0:
        print("step", m.step)
    return y


def keeps_output(m, y):
    m.last, m.shape = y, tuple(y.shape[1:])
    return y


def keeps_history(m, y):
    m.history.append(y.detach().mean())
    return y


def lazy_number(m, y):
    if m.scale is None:
        m.scale = 0.5
    return y * m.scale


def lazy_mask(m, y):
    if m.mask is None or m.size < y.shape[1]:
        m.mask, m.size = torch.tril(torch.ones(6, 6, dtype=y.dtype)) / 6, y.shape[1]
    return y @ m.mask


def meters(m, y):
    m.meter.update(1.0)
    m.counts["calls"] += 1
    return y


HARMLESS = {
    "counter": (counter, dict(step=0), "step"),
    "last output": (keeps_output, dict(last=None, shape=None), "last"),
    "history": (keeps_history, dict(history=list), "history"),
    "lazy number": (lazy_number, dict(scale=None), "scale"),
    "lazy mask": (lazy_mask, dict(mask=None, size=0), "mask"),
    "meters": (meters, dict(meter=Meter, counts=collections.Counter), "meter"),
}


def harmless(name: str) -> nn.Module:
    function, attributes, _ = HARMLESS[name]
    return Model(function, **attributes)


@pytest.mark.parametrize("name", HARMLESS)
def test_state_that_changes_nothing_is_noted(name):
    model = harmless(name)
    before = state_of(model)
    found = [
        note
        for note in notes(trace(model, {"x": torch.ones(4, 6)}))
        if "which does not change what it computes" in note
    ]
    assert len(found) == 1 and HARMLESS[name][2] in found[0]
    assert state_of(model) == before


@pytest.mark.parametrize("name", every(3, ["lazy mask", "last output", "meters"]))
def test_training_with_it_is_that_of_eager_pytorch(pool2, name):
    for found in pool2.run(errors, functools.partial(harmless, name), [*PINS], batches()):
        assert max(found) <= 1, found


class Late(nn.Module):
    """A table that the first call makes of a buffer and that later calls read, as position biases do."""

    def __init__(self, keep: str, of: str = "slopes") -> None:
        super().__init__()
        self.inner, self.keep, self.of = nn.Linear(6, 6), keep, of
        self.register_buffer("slopes", torch.linspace(0.5, 2.0, 6))
        self.weight = nn.Parameter(torch.ones(6))
        if keep == "attribute":
            self.table = None
        elif keep == "buffer":
            self.register_buffer("table", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return (y @ self.kept(y.shape[1])).square().sum()

    def kept(self, size: int) -> Tensor:
        if getattr(self, "table", None) is not None:
            return self.table[-size:, :size]
        made = getattr(self, self.of) * torch.arange(size)[:, None]
        if self.keep == "attribute":
            self.table = made
        else:
            self.register_buffer("table", made, persistent=False)
        return made


LATE = ["buffer", "new buffer", "attribute"]


@pytest.mark.parametrize("keep", LATE)
def test_tables_that_the_first_call_makes_of_buffers_are_noted(keep):
    model = Late(keep)
    found = notes(trace(model, {"x": torch.ones(4, 6)}))
    (note,) = [note for note in found if "which does not change what it computes" in note]
    assert "'table'" in note
    assert getattr(model, "table", None) is None


@pytest.mark.parametrize("keep", LATE)
def test_tables_that_the_first_call_makes_of_parameters_are_refused(keep):
    with pytest.raises(AutoparError, match=r"forward .*(changes|reads|registers)") as refused:
        trace(Late(keep, "weight"), {"x": torch.ones(4, 6)})
    paragraph(refused.value)


def test_training_with_such_a_table_is_that_of_eager_pytorch(pool2):
    for found in pool2.run(errors, functools.partial(Late, "buffer"), [*WHOLE], batches()):
        assert max(found) <= 1, found


class FrozenSizes(collections.OrderedDict):
    """A container that forbids changes, as diffusers' configurations do."""

    def update(self, *arguments, **more):
        raise TypeError("frozen")


def test_containers_that_forbid_changes_are_left_alone():
    model = Model(lambda m, y: y * m.sizes["width"])
    model.sizes = FrozenSizes(width=2)
    assert not trace(model, {"x": torch.ones(4, 6)}).notes
    assert model.sizes == {"width": 2}


class MadeWhenRead(collections.OrderedDict):
    """A registry that makes an object of the class that it stores, as transformers' activations do."""

    def __getitem__(self, key):
        return super().__getitem__(key)()


REGISTRY = MadeWhenRead(tanh=nn.Tanh, gelu=nn.GELU)


def test_containers_that_make_what_they_give_keep_what_they_store():
    assert not trace(Model(lambda m, y: REGISTRY["tanh"](y)), {"x": torch.ones(4, 6)}).notes
    assert isinstance(REGISTRY["tanh"], nn.Tanh) and isinstance(REGISTRY["gelu"], nn.GELU)
    assert list(REGISTRY) == ["tanh", "gelu"]


def test_forwards_without_state_have_no_notes():
    assert not trace(Model(lambda m, y: y), {"x": torch.ones(4, 6)}).notes


# -------------------------------------------------------------------------------------------------------------- random numbers


def shuffled(m, y):
    order = list(range(6))
    random.shuffle(order)
    return y[:, order]


def seeded(m, y):
    torch.manual_seed(3)
    return y * torch.rand(6)


DRAWS = {
    "random": (lambda m, y: y * random.random(), {}, "`random`"),
    "layer drop": (lambda m, y: y if random.random() < 0.01 else y * 2, {}, "`random`"),
    "shuffle": (shuffled, {}, "`random`"),
    "numpy": (lambda m, y: y * np.random.rand(), {}, "`numpy.random`"),
    "numpy choice": (lambda m, y: y[:, np.random.permutation(6).tolist()], {}, "`numpy.random`"),
    "own generator": (
        lambda m, y: y * m.random.uniform(0, 1),
        dict(random=lambda: random.Random(1)),
        "generator 'random'",
    ),
    "own numpy generator": (
        lambda m, y: y * float(m.random.random()),
        dict(random=lambda: np.random.default_rng(1)),
        "generator 'random'",
    ),
    "generator outside": (lambda m, y: y * GENERATOR.random(), {}, "'GENERATOR'"),
    "torch.manual_seed": (seeded, {}, "`torch`"),
}


@pytest.mark.parametrize("name", every(3, DRAWS))
def test_draws_are_refused_by_line(name):
    function, attributes, whose = DRAWS[name]
    model = Model(function, **attributes)
    torch.manual_seed(3)
    before = (
        random.getstate(),
        repr(np.random.get_state()),
        torch.get_rng_state(),
        GENERATOR.getstate(),
    )
    with pytest.raises(AutoparError) as refused:
        trace(model, {"x": torch.ones(4, 6)})
    message = paragraph(refused.value)
    assert whose in message and "(test_python_state.py:" in message
    after = (
        random.getstate(),
        repr(np.random.get_state()),
        torch.get_rng_state(),
        GENERATOR.getstate(),
    )
    assert all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b
        for a, b in zip(before, after, strict=True)
    )


# -------------------------------------------------------------------------------------------------------------- the advice


class Buffered(nn.Module):
    """The warm-up above, its counter in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.register_buffer("step", torch.tensor(0.0))

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        return (self.inner(x) * torch.clamp(self.step / 10, max=1.0)).square().sum()


class Drawn(nn.Module):
    """A random factor, passed in as an input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor, factor: Tensor) -> Tensor:
        return (self.inner(x) * factor).square().sum()


def test_the_advice_is_exact(pool2):
    for found in pool2.run(errors, Buffered, [*WHOLE], batches()):
        assert max(found) <= 1, found
    data = [
        batch | {"factor": torch.tensor(0.1 + random.random(), dtype=torch.float64)}
        for batch in batches()
    ]
    for found in pool2.run(errors, Drawn, ["dp=2", "tp=2", "two micro-batches"], data):
        assert max(found) <= 1, found


# ------------------------------------------------------------------------------------------------ what forward can reach


def called() -> int:
    return STEPS


def runs() -> int:
    """Not called by any model: only an attribute has its name."""
    return called()


class HasRuns(nn.Module):
    """An attribute with the name of a function of this file."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = 2

    def forward(self, x: Tensor) -> Tensor:
        return sum((value + called() for value in [x] * self.runs), x)


def test_an_attribute_does_not_reach_a_global_variable_of_its_name():
    found = {function.__name__ for function in Functions.of(HasRuns(), None).codes}
    assert found == {"__init__", "forward", "called"}


class Asserts(nn.Module):
    """pytest rewrites the assert, which then names variables of pytest."""

    def forward(self, x: Tensor) -> Tensor:
        assert called() == 1
        return x


def test_an_assert_does_not_reach_pytest():
    functions = Functions.of(Asserts(), None)
    assert {function.__name__ for function in functions.codes} == {"forward", "called"}
    assert [name for _, name, *_ in functions.places()] == ["STEPS"]


def test_names_of_none_that_torch_export_moves_are_no_change(monkeypatch):
    """nn.MultiheadAttention registers parameters of None among the others."""
    exports = list[object]()
    export = torch.export.export

    def counted(*args, **kwargs):
        exports.append(args[0])
        return export(*args, **kwargs)

    monkeypatch.setattr(torch.export, "export", counted)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    batch = {"src": torch.randn(4, 3, 8), "y": torch.randn(4, 3, 8)}
    trace(layer, batch, loss_fn=nn.MSELoss())
    assert len(exports) == 1
