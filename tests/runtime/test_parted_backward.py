"""A backward in two parts: the same gradients as in one, and between the parts no more than the second reads."""

from __future__ import annotations

import gc
import itertools
import random
import weakref
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.effort import every
from torch import nn
from torch.utils.checkpoint import checkpoint

from autopar.runtime.pipeline.split_backward import PartedBackward


class Layer(nn.Module):
    """Norm, product, activation, product, beside a residual; the activation keeps what only gradients of inputs need."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(24, 8)
        self.checkpointed, self.seen = checkpointed, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.up(self.norm(x))
        again = (
            checkpoint(self.gate, inner, use_reentrant=False)
            if self.checkpointed
            else self.gate(inner)
        )
        self.seen = [weakref.ref(t.untyped_storage()) for t in (inner, again)]
        return x + self.down(again)

    @staticmethod
    def gate(inner: torch.Tensor) -> torch.Tensor:
        return torch.sin(inner) * torch.sigmoid(inner)


def case(checkpointed: bool) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(Layer(checkpointed), Layer(checkpointed)).double(), torch.randn(
        5, 8, dtype=torch.float64
    )


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
        (to_input,), left = parted.first(micro_batch, [out], None, [own])
        assert torch.equal(to_input, expected[0])
        left.second()
    for parameter, grad in zip(model.parameters(), expected[1:], strict=True):
        assert torch.allclose(parameter.grad, 3 * grad, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("checkpointed", every(2, [True, False]))
def test_between_the_parts_only_operands_of_weights_stay(checkpointed):
    model, x = case(checkpointed)
    parted, own = PartedBackward(), x.clone().requires_grad_()
    with parted.forward(0):
        out = model(own).pow(2).sum()
    layer = model[0]
    inner, gated = layer.seen
    assert gated() is not None and inner() is not None
    _, left = parted.first(0, [out], None, [own])
    out.detach_()
    layer.seen = []
    gc.collect()
    assert inner() is None  # the activation read it; no weight does
    assert gated() is not None  # the second product's weight multiplied it
    left.second()
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
        (to_input,), left = parted.first(micro_batch, [out], None, [own])
        assert runs == [1, 2, 2, 1]
        inner, gated = model[0].seen
        assert inner() is None and gated() is not None  # without a collection: no cycle holds it
        assert torch.equal(to_input, expected[0])
        left.second()
        assert runs == [1, 2, 2, 1]
    for parameter, grad in zip(model.parameters(), expected[1:], strict=True):
        assert torch.allclose(parameter.grad, 2 * grad, rtol=1e-13, atol=1e-15)


def test_what_was_given_back_is_not_read_again():
    model, x = case(False)
    parted, own = PartedBackward(), x.clone().requires_grad_()
    with parted.forward(0):
        out = model(own).pow(2).sum()
    parted._stay[parted._number] = frozenset()  # as if the second part read nothing
    _, left = parted.first(0, [out], None, [own])
    out.detach_()
    with pytest.raises(RuntimeError, match="after it was given back"):
        left.second()


class Tangled(nn.Module):
    """A random graph: products, norms and sums of what it received, of weights, and of what these make, each read any number of times."""

    def __init__(self, seed: int, received: int) -> None:
        super().__init__()
        self.random, self.count = random.Random(seed), received
        self.seed = seed
        self.weights = nn.ParameterList(
            torch.randn(4, 4, dtype=torch.float64) / 2 for _ in range(self.random.randint(1, 4))
        )

    def forward(self, *received: torch.Tensor) -> tuple[torch.Tensor, ...]:
        draw = random.Random(self.seed)
        values = [*received, *self.weights]
        for _ in range(draw.randint(1, 12)):
            a, b = draw.choice(values), draw.choice(values)
            kind = draw.choice(["product", "sum", "gate", "norm", "parts"])
            if kind == "product":
                values.append(torch.tanh(a @ b))
            elif kind == "sum":
                values.append(a + b)
            elif kind == "gate":
                values.append(a * torch.sigmoid(b))
            elif kind == "norm":
                values.append(nn.functional.layer_norm(a, (4,), b[0], b[1]))
            else:
                values += [torch.cat(pair) for pair in itertools.pairwise([*a.split(2), a[:2]])]
        results = [values[-1], *draw.choices(values, k=draw.randint(0, 2))]
        return tuple(x.clone() for x in results)


@given(
    seed=st.integers(0, 10**6),
    received=st.integers(1, 2),
    frozen=st.booleans(),
    again=st.booleans(),
)
def test_weights_read_anywhere_any_number_of_times(seed, received, frozen, again):
    torch.manual_seed(seed)
    model = Tangled(seed, received)
    inputs = [torch.randn(4, 4, dtype=torch.float64) for _ in range(received)]

    def given_again():
        return [x.clone().requires_grad_(not (frozen and k == 0)) for k, x in enumerate(inputs)]

    own = given_again()
    results = model(*own)
    gradients = [torch.randn_like(x) if x.requires_grad else None for x in results]
    trained = [(x, grad) for x, grad in zip(results, gradients, strict=True) if x.requires_grad]
    if trained:
        torch.autograd.backward([x for x, _ in trained], [grad for _, grad in trained])
    expected = [x.grad for x in own], [p.grad for p in model.weights]
    model.zero_grad()

    parted, work = PartedBackward(), []
    for micro_batch in range(2):
        own = given_again()
        with parted.forward(micro_batch):
            work.append((own, parted.again(model, *own) if again else model(*own)))
    lefts = []
    for micro_batch, (own, results) in enumerate(work):
        found, left = parted.first(micro_batch, results, gradients, own)
        for x, grad in zip(found, expected[0], strict=True):
            assert (x is None) == (grad is None) and (
                x is None or torch.allclose(x, grad, rtol=1e-12, atol=1e-13)
            )
        lefts.append(left)
    for left in lefts:
        left.second()
    for parameter, grad in zip(model.weights, expected[1], strict=True):
        assert (parameter.grad is None) == (grad is None)
        assert grad is None or torch.allclose(parameter.grad, 2 * grad, rtol=1e-12, atol=1e-13)


def test_group_norm_of_channels_last_gives_the_gradients_of_its_weights():
    torch.manual_seed(0)
    norm = nn.GroupNorm(2, 4, dtype=torch.float64)
    x = torch.randn(2, 4, 3, 3, dtype=torch.float64).requires_grad_()

    def result() -> torch.Tensor:
        return norm(x.to(memory_format=torch.channels_last)).sin().sum()

    expected = torch.autograd.grad(result(), [x, *norm.parameters()])
    parted = PartedBackward()
    with parted.forward(0):
        out = result()
    (of_x,), left = parted.first(0, [out], None, [x])
    left.second()
    for found, gradient in zip((of_x, norm.weight.grad, norm.bias.grad), expected, strict=True):
        torch.testing.assert_close(found, gradient)


def test_the_second_part_runs_nothing_of_the_first_but_what_weights_follow():
    """A weight of two layers: the later one's gradient does not lead through the earlier one again."""
    weight = nn.Parameter(torch.randn(8, 8, dtype=torch.float64))
    x = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    runs = []
    parted = PartedBackward()
    with parted.forward(0):
        between = torch.sin(x @ weight)
        out = torch.sin(between @ weight).sum()
    between.grad_fn.register_hook(lambda *_: runs.append("between"))
    _, left = parted.first(0, [out], None, [x])
    left.second()
    assert runs == ["between"]


class Keeping(torch.autograd.Function):
    """What it keeps is not in a slot."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        ctx.kept = kept
        return x * 2

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * 2, None


def test_the_graph_of_a_micro_batch_goes_with_its_second_part():
    """At once, without a collection of cycles."""
    model, x = case(False)
    parted, own, kept = PartedBackward(), x.clone().requires_grad_(), torch.ones(3)
    seen = weakref.ref(kept)
    with parted.forward(0):
        out = Keeping.apply(model(own), kept).sum()
    del kept
    gc.collect()
    gc.disable()
    try:
        _, left = parted.first(0, [out], None, [own])
        out.detach_()
        left.second()
        assert seen() is None
    finally:
        gc.enable()


class Product(torch.autograd.Function):
    """A product in Python that notes which gradients it computes; it makes those that it is asked for."""

    made: ClassVar[list[tuple[bool, bool]]] = []

    @staticmethod
    def forward(ctx, number: int, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        x, weight = ctx.saved_tensors
        _, to_input, to_weight = ctx.needs_input_grad
        Product.made.append((to_input, to_weight))
        return None, grad @ weight.t() if to_input else None, x.t() @ grad if to_weight else None


@pytest.mark.parametrize("frozen", [False, True])
def test_a_function_in_python_computes_each_gradient_once(frozen):
    """Autograd would have it compute both in both parts."""
    torch.manual_seed(0)
    weights = [
        torch.randn(8, 8, dtype=torch.float64, requires_grad=not (frozen and k == 1))
        for k in range(3)
    ]
    x = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)

    def run(own: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            own = Product.apply(7, own, weight).sin()
        return own.sum()

    trained = [weight for weight in weights if weight.requires_grad]
    expected = torch.autograd.grad(run(x), [x, *trained])
    Product.made, parted = [], PartedBackward()
    own = x.detach().clone().requires_grad_()
    with parted.forward(0):
        out = run(own)
    (to_input,), left = parted.first(0, [out], None, [own])
    assert Product.made == [(True, False)] * 3
    left.second()
    assert Product.made[3:] == [(False, True)] * len(trained)
    assert torch.equal(to_input, expected[0])
    assert all(
        torch.equal(weight.grad, grad) for weight, grad in zip(trained, expected[1:], strict=True)
    )


@torch.library.custom_op("autopar_tests::mixed", mutates_args=())
def mixed(parts: list[torch.Tensor], weight: torch.Tensor, scale: float) -> torch.Tensor:
    return scale * sum(part @ weight for part in parts)


def keep_operands(ctx, inputs, output) -> None:
    ctx.parts, ctx.weight, ctx.scale = inputs


def mixed_backward(ctx, grad: torch.Tensor):
    to_parts, to_weight, _ = ctx.needs_input_grad
    Product.made.append((any(to_parts), to_weight))
    found = [ctx.scale * grad @ ctx.weight.t() if needed else None for needed in to_parts]
    return (
        found,
        ctx.scale * sum(part.t() @ grad for part in ctx.parts) if to_weight else None,
        None,
    )


mixed.register_autograd(mixed_backward, setup_context=keep_operands)


def test_a_custom_op_of_a_list_computes_each_gradient_once():
    torch.manual_seed(0)
    weights = [torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)

    def run(own: torch.Tensor) -> torch.Tensor:
        inner = mixed([own, own.sin()], weights[0], 2.0)
        return mixed([inner.sin(), inner.detach()], weights[1], 0.5).sum()

    expected = torch.autograd.grad(run(x), [x, *weights])
    Product.made, parted = [], PartedBackward()
    own = x.detach().clone().requires_grad_()
    with parted.forward(0):
        out = run(own)
    (to_input,), left = parted.first(0, [out], None, [own])
    left.second()
    assert Product.made == [(True, False)] * 2 + [(False, True)] * 2
    assert all(
        torch.equal(*pair)
        for pair in zip([to_input, *(weight.grad for weight in weights)], expected, strict=True)
    )
