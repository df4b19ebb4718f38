"""Refusals of capture that give advice: one paragraph that names the user's line or tensor, and the model as advised trains exactly."""

from __future__ import annotations

import functools

import pytest
import torch
from support.captures import captured_once
from support.eager_runs import ROWS, batches, errors, paragraph
from support.effort import every
from support.exactness import moved, run_steps, sgd, train_in_place, update_error
from torch import Tensor, nn

import autopar
from autopar.api import trace
from autopar.errors import AutoparError

PARTS, WHOLE = ["tp=2", "two micro-batches"], ["dp=2", "tp=2"]


class Model(nn.Module):
    """A linear layer, and `function(self, y)` of what it gives.  `make(self)` adds what the function reads."""

    def __init__(self, function, make=lambda m: None) -> None:
        super().__init__()
        self.inner, self.function = nn.Linear(6, 6), function
        make(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.inner(x)).square().sum()


class Given(nn.Module):
    """As `Model`, of a second input, `given`."""

    def __init__(self, function) -> None:
        super().__init__()
        self.inner, self.function = nn.Linear(6, 6), function

    def forward(self, x: Tensor, given: Tensor) -> Tensor:
        return self.function(self.inner(x), given).square().sum()


def plain(m, y):
    return y


def keep(**attributes):
    """What sets attributes of a model, each to what its function makes of the model."""

    def make(model) -> None:
        for name, value in attributes.items():
            setattr(model, name, value(model))

    return make


def hooked(module: bool, remove: bool) -> nn.Module:
    model = Model(plain)
    if module:
        handle = model.inner.register_full_backward_hook(lambda module, grad_in, grad_out: None)
    else:
        handle = model.inner.weight.register_hook(lambda grad: 2 * grad)
    if remove:
        handle.remove()
    return model


def lazy(called: bool) -> nn.Module:
    model = Model(plain)
    model.inner = nn.LazyLinear(6)
    if called:
        with torch.no_grad():
            model(torch.ones(2, 6))
    return model


def cached_product(m, y):
    if m.product is None:
        m.product = m.inner.weight.detach() * 2
    return y @ m.product


class NotCopied:
    def __reduce_ex__(self, protocol):
        raise TypeError("it does\nnot travel")


class Copied(NotCopied):
    def __deepcopy__(self, memo):
        return self


class Whole(Model):
    def __deepcopy__(self, memo):
        raise ValueError("it does\nnot travel")


def registered(keep_it):
    """A buffer, and where else a model keeps it."""

    def make(model) -> None:
        model.register_buffer("total", torch.zeros(6))
        model.kept = keep_it(model.total)

    return make


def added_in_a_tuple(m, y):
    with torch.no_grad():
        m.kept[0].add_(m.inner.bias)
    return y + m.kept[0]


def added(m, y):
    with torch.no_grad():
        m.total.add_(m.inner.bias)
    return y + m.total


def in_autocast(m, y):
    with torch.autocast("cpu", torch.bfloat16):
        return m.inner(y)


class Doubled(torch.autograd.Function):
    """The identity, in place, whose gradient is doubled."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(1)

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


@torch.library.custom_op("autopar_test::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x.clone()


doubled.register_fake(torch.empty_like)
doubled.register_autograd(lambda ctx, grad: 2 * grad)


@torch.library.custom_op("autopar_test::shapeless", mutates_args=())
def shapeless(x: Tensor) -> Tensor:
    return x.clone()


def made_of(weight: Tensor):
    product = weight * 2
    return lambda: product


def with_hook(m, y):
    y.register_hook(lambda grad: 2 * grad)
    return y


def turned_as_complex(m, y):
    """By a function that pairs of real tensors lack."""
    numbers = torch.view_as_complex(y.reshape(-1, 3, 2)).tanh()
    return torch.view_as_real(numbers).flatten(1)


def turned(m, y):
    (a, b), angles = y.reshape(-1, 3, 2).unbind(2), torch.arange(3.0)
    return torch.stack(
        [a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], 2
    ).flatten(1)


def moving(m, y):
    m.state = (m.state + y.mean(0)).detach()
    return y + m.state


def moving_buffer(m, y):
    m.state.add_(y.mean(0).detach())
    return y + m.state


REFUSED = {
    "module hook": (lambda: hooked(True, False), "module 'inner' has backward hooks"),
    "gradient hook": (lambda: hooked(False, False), "parameter 'inner.weight' has gradient hooks"),
    "lazy": (lambda: lazy(False), "parameter 'inner.weight' has no shape yet"),
    "torch.Generator": (lambda: Model(lambda m, y: y * torch.rand(6, generator=m.drawn), keep(drawn=lambda m: torch.Generator())),
                        "torch.Generator of its own {line}.*as an input"),
    "weight in a closure": (lambda: Model(lambda m, y: y @ m.read(), keep(read=lambda m: lambda w=m.inner.weight: w)),
                            "parameter 'inner.weight' past"),
    "rows of a weight in a list": (lambda: Model(lambda m, y: y[:, :2] @ m.read[0], keep(read=lambda m: [m.inner.weight.detach()[:2]])),
                                   "parameter 'inner.weight' past"),
    "made of a weight before": (lambda: Model(cached_product, keep(product=lambda m: None)), "'product'.* make it anew in each forward"),
    "made of a weight in a closure": (lambda: Model(lambda m, y: y @ m.read(), keep(read=lambda m: made_of(m.inner.weight))),
                                      r"of shape \(6, 6\) that is made of parameters"),
    "tensor of a list changed": (lambda: Model(lambda m, y: y + m.held[0].add_(1), keep(held=lambda m: [torch.zeros(6)])),
                                 r"a tensor in place that is no attribute of a module \('held\[0\]'\)"),
    "op without shapes": (lambda: Model(lambda m, y: shapeless(y)), "calls an op {line} of which .*register_fake"),
    "iterator": (lambda: Model(plain, keep(held=lambda m: iter(n for n in range(3)))), "'held' of the model holds a generator"),
    "not copied": (lambda: Model(plain, keep(held=lambda m: [NotCopied()])), r"'held\[0\]' of the model holds a NotCopied"),
    "model not copied": (lambda: Whole(plain), "the model, a Whole, cannot be copied"),
    "plain tensor changed": (lambda: Model(lambda m, y: y + m.total.add_(1), keep(total=lambda m: torch.zeros(6))),
                             "tensor 'total' in place"),
    "buffer in a tuple": (lambda: Model(added_in_a_tuple, registered(lambda total: (total,))), "of Model changes a buffer in place"),
    "autocast": (lambda: Model(in_autocast), "enters torch.autocast {line}"),
    "channels dropped in place": (lambda: Model(lambda m, y: m.drop(y.view(-1, 2, 3, 1)).flatten(1),
                                                keep(drop=lambda m: nn.Dropout2d(0.5, inplace=True))), "drops channels in place {line}"),
    "int of the batch size": (lambda: Model(lambda m, y: y / int(y.shape[0])), "the batch size, the rows of 'x', as a Python number"),
    "loop over rows": (lambda: Model(lambda m, y: torch.stack([row - row.mean() for row in y])), "batch size as a Python number {line}"),
    "numpy": (lambda: Model(lambda m, y: y * float(y.detach().numpy().mean())), "leaves PyTorch {line}"),
    "complex": (lambda: Model(turned_as_complex), "{line} of complex numbers"),
    "autograd.Function": (lambda: Model(lambda m, y: Doubled.apply(y)), "autograd.Function Doubled {line}"),
    "module converted": (lambda: Model(lambda m, y: m.inner.half()(y.half()).float()),
                         r"converts a Linear {line}: its 'weight' of torch.float32 .* one of torch.float16"),
    "register_hook": (lambda: Model(with_hook), "Tensor.register_hook {line}"),
    "state": (lambda: Model(moving, keep(state=lambda m: torch.zeros(6))), "'state', which is Python state"),
}  # fmt: skip
ADVISED = {
    "module hook": (lambda: hooked(True, True), PARTS),
    "gradient hook": (lambda: hooked(False, True), PARTS),
    "lazy": (lambda: lazy(True), PARTS),
    "weight in a closure": (lambda: Model(lambda m, y: y @ m.inner.weight), PARTS),
    "rows of a weight in a list": (
        lambda: Model(lambda m, y: y[:, :2] @ m.inner.weight[:2]),
        PARTS,
    ),
    "made of a weight before": (
        lambda: Model(lambda m, y: y @ (m.inner.weight.detach() * 2)),
        PARTS,
    ),
    "made of a weight in a closure": (lambda: Model(lambda m, y: y @ (m.inner.weight * 2)), PARTS),
    "iterator": (
        lambda: Model(lambda m, y: y * m.held[1], keep(held=lambda m: [n + 0.5 for n in range(3)])),
        PARTS,
    ),
    "not copied": (lambda: Model(plain, keep(held=lambda m: [Copied()])), PARTS),
    "plain tensor changed": (
        lambda: Model(lambda m, y: y + m.total.add_(1), registered(lambda total: None)),
        WHOLE,
    ),
    "buffer in a tuple": (lambda: Model(added, registered(lambda total: None)), WHOLE),
    "autocast": (lambda: Model(lambda m, y: m.inner(y)), PARTS),
    "int of the batch size": (lambda: Model(lambda m, y: y / y.shape[0]), PARTS),
    "loop over rows": (lambda: Model(lambda m, y: y - y.mean(1, keepdim=True)), PARTS),
    "numpy": (lambda: Model(lambda m, y: y * y.detach().mean(1, keepdim=True)), PARTS),
    "complex": (lambda: Model(turned), PARTS),
    "autograd.Function": (lambda: Model(lambda m, y: doubled(y)), WHOLE),
    "module converted": (lambda: Model(lambda m, y: m.inner.to(y.dtype)(y)), PARTS),
    "state": (
        lambda: Model(moving_buffer, lambda m: m.register_buffer("state", torch.zeros(6))),
        WHOLE,
    ),
}


def advised(name: str) -> nn.Module:
    return ADVISED[name][0]()


@pytest.mark.parametrize("name", REFUSED)
def test_they_are_refused_by_name_or_line(name):
    build, words = REFUSED[name]
    with pytest.raises(
        AutoparError, match=words.format(line=r"\(test_capture_advice.py:\d+: .*\)")
    ) as refused:
        trace(build(), batches()[0])
    paragraph(refused.value)


@pytest.mark.parametrize("name", every(3, ADVISED))
def test_what_is_advised_trains_exactly(pool2, name):
    for found in pool2.run(errors, functools.partial(advised, name), ADVISED[name][1], batches()):
        assert max(found) <= 1, found


INPUTS = {
    "a draw": (
        lambda y, given: y * given,
        lambda step: torch.rand(
            6, generator=torch.Generator().manual_seed(step), dtype=torch.float64
        ),
    ),
    "a number of steps": (
        lambda y, given: y * (given / 10).clamp(max=1),
        lambda step: torch.tensor(step + 1, dtype=torch.float64),
    ),
}


def given_to(name: str) -> nn.Module:
    return Given(INPUTS[name][0])


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_in_the_place_of_draws_and_state(pool2, name):
    data = [batch | {"given": INPUTS[name][1](step)} for step, batch in enumerate(batches())]
    for found in pool2.run(errors, functools.partial(given_to, name), PARTS, data):
        assert max(found) <= 1, found


def test_half_precision_in_the_place_of_autocast():
    torch.manual_seed(0)
    model, batch = Model(in_autocast), {"x": torch.randn(ROWS, 6)}
    expected, model.function = model(**batch).item(), lambda m, y: m.inner(y)
    assert float(
        autopar.parallelize(model, "cpu:1", batch, sgd, precision="bf16").step(batch)
    ) == pytest.approx(expected, rel=0.03)


# ---------------------------------------------------------------------------------------------------------------------- draws


def seeded(m, y):
    torch.manual_seed(3)
    return y * torch.rand(6)


DRAWS = {
    "a factor": lambda: Model(lambda m, y: y * torch.rand(6)),
    "a factor each": lambda: Model(lambda m, y: y * torch.rand_like(y)),
    "channels": lambda: Model(
        lambda m, y: m.drop(y.view(-1, 2, 3, 1)).flatten(1), keep(drop=lambda m: nn.Dropout2d(0.5))
    ),
}


@captured_once()
def drawn(rank: int, name: str) -> list[tuple[list[float], dict[str, Tensor]]]:
    """Losses of three steps on one batch, without and with training, and the parameters after."""
    found = []
    for pin in ({"dp": 2}, {"tp": 2}):
        torch.manual_seed(0)  # before training, outside of forward
        model, batch = DRAWS[name](), {"x": torch.randn(ROWS, 6)}
        for rate in (0.0, 0.01):
            make = functools.partial(torch.optim.SGD, lr=rate)
            engine = autopar.parallelize(model, "cpu:2", batch, make, pin=pin, precision="fp32")
            found.append(run_steps(engine, [batch] * 3))
    return found


@pytest.mark.parametrize("name", every(2, DRAWS))
def test_draws_with_torch_ops_are_those_of_each_step(pool2, name):
    """Anew in each step; on all ranks alike where all hold the same."""
    one, other = pool2.run(drawn, name)
    for (losses, state), (losses_there, state_there) in zip(one, other, strict=True):
        assert len(set(losses)) == 3 and losses == losses_there
        assert all(torch.equal(value, state_there[key]) for key, value in state.items())


# --------------------------------------------------------------------------------------------------------------- loss, inputs


class Layer(nn.Module):
    """Returns what it computes, or its loss if it is given labels."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        y = self.inner(x)
        return y if labels is None else (y - labels).square().mean()


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, out: Tensor, labels: Tensor) -> Tensor:
        return (self.scale * (out - labels)).square().mean()


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.loss = Layer(), Scale()

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.layer(x), labels)


def mean_square(out, labels):
    return (out - labels).square().mean()


def sum_square(out, labels):
    return (out - labels).square().sum()


LOSSES = {
    "labels": (Layer, None),
    "mean": (Layer, mean_square),
    "sum": (Layer, sum_square),
    "part of the model": (WithLoss, None),
}


def labelled(dtype: torch.dtype = torch.float64) -> list[dict[str, Tensor]]:
    return [
        {"x": batch["x"].to(dtype), "labels": batch["x"].flip(1).to(dtype)} for batch in batches()
    ]


def loss_errors(rank: int, name: str) -> list[float]:
    (kind, loss_fn), data, found = LOSSES[name], labelled(), []
    for pin in ({"tp": 2}, {"dp": 2, "micro_batch": 2}):
        torch.manual_seed(0)
        model = kind().double()
        engine = autopar.parallelize(
            model, "cpu:2", data[0], sgd, loss_fn=loss_fn, pin=pin, precision="fp64"
        )
        losses, state = run_steps(engine, data)
        call = (
            (lambda model, batch: loss_fn(model(batch["x"]), batch["labels"])) if loss_fn else None
        )
        result = train_in_place(model, data, call=call)
        assert moved(result) > 1e-3 and losses == pytest.approx(result.losses, rel=1e-9)
        found.append(update_error(result, state))
    return found


@pytest.mark.parametrize(("given", "loss_fn", "words"), [
    ({"x": torch.ones(4, 6)}, None, r"forward of Layer returned a tensor of shape \(batch, 6\).*pass labels in example_inputs"),
    (labelled(torch.float32)[0], lambda out, labels: (out - labels) ** 2, r"loss_fn returned .*end it with .mean\(\) or .sum\(\)"),
    (labelled(torch.float32)[0], Scale(), r"tensors of its own \(scale\).*make it a part of the model"),
    ({"x": torch.tensor(1.0)}, None, r"every tensor in example_inputs \(x\) is a scalar"),
    ({"x": torch.ones(4, 6), "micro_batch_share": torch.ones(4, 6)}, None, "'micro_batch_share', .*rename it"),
    ({"x": torch.ones(4, 6), "label": torch.ones(4, 6)}, None, "takes x, labels, and the batch has 'label' besides"),
    ({"x": torch.ones(4, 6), "labels": torch.ones(4, 5)}, None, r"fails on .*labels \(4, 5\) torch.float32\) .*Check shapes and dtypes"),
])  # fmt: skip
def test_losses_and_inputs_that_are_refused(given, loss_fn, words):
    with pytest.raises(AutoparError, match=words) as refused:
        trace(Layer(), given, loss_fn)
    paragraph(refused.value)


@pytest.mark.parametrize("name", every(2, LOSSES))
def test_losses_as_advised_train_exactly(pool2, name):
    for found in pool2.run(loss_errors, name):
        assert max(found) <= 1, found


class Shared(nn.Module):
    """`table` has no rows of the batch, though as many."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, ROWS)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return (self.inner(x) * table).square().sum()


def shared() -> nn.Module:
    torch.manual_seed(0)
    return Shared().double()


def shared_error(rank: int) -> float:
    table = torch.linspace(1, 2, ROWS, dtype=torch.float64)
    data = [{"x": batch["x"] / 4, "table": table} for batch in batches()]
    example = {"x": data[0]["x"][:4], "table": table}
    engine = autopar.parallelize(
        shared(), "cpu:2", example, sgd, global_batch=ROWS, pin={"dp": 2}, precision="fp64"
    )
    losses, state = run_steps(engine, data)
    result = train_in_place(shared(), data)
    assert moved(result) > 1e-3 and losses == pytest.approx(result.losses, rel=1e-9)
    return update_error(result, state)


def test_an_input_that_has_as_many_rows_as_the_batch(pool2):
    with pytest.raises(
        AutoparError,
        match=r"the rows of 'table' and 'x'.*\. If 'x' or 'table' has no rows.* batch_dims=\{'table': None\}",
    ) as refused:
        trace(shared(), {"x": torch.ones(ROWS, 6).double(), "table": torch.ones(ROWS).double()})
    paragraph(refused.value)
    assert max(pool2.run(shared_error)) <= 1


def test_a_tensor_on_the_meta_device_is_made_a_buffer(tmp_path):
    def on_meta(keep_it) -> nn.Module:
        with torch.device("meta"):
            return Model(lambda m, y: y * m.factor, keep_it)

    with pytest.raises(
        AutoparError,
        match=r"a tensor \(test_capture_advice.py:.*\) that is on the meta device.*register it",
    ) as refused:
        trace(on_meta(keep(factor=lambda m: torch.ones(6))), {"x": torch.ones(4, 6)})
    paragraph(refused.value)
    model, batch = (
        on_meta(lambda m: m.register_buffer("factor", torch.ones(6))),
        {"x": torch.ones(4, 6)},
    )
    weights = {
        "inner.weight": torch.eye(6),
        "inner.bias": torch.zeros(6),
        "factor": torch.full((6,), 2.0),
    }
    torch.save(weights, tmp_path / "weights.pt")
    engine = autopar.parallelize(
        model, "cpu:1", batch, sgd, weights=tmp_path / "weights.pt", precision="fp32"
    )
    assert float(engine.step(batch)) == 4 * 6 * 2.0**2
