"""Transforms and gradients in forward that cannot be captured are refused by line, with advice that works."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from support.eager_runs import paragraph
from support.effort import slow_but
from support.exactness import run_steps, sgd, train_in_place, update_error
from support.transform_programs import EXACT, Net, batches, build, mse, penalty
from torch import Tensor, func, nn
from torch.autograd import forward_ad

import autopar


def by_backward(net: Net, x: Tensor, y: Tensor) -> Tensor:
    x = x.detach().requires_grad_(True)
    output = net.whole(x)
    output.sum().backward(create_graph=True)
    return mse(output, y) + 0.1 * (x.grad.norm(dim=1) - 1).square().mean()


def by_dual_numbers(net: Net, x: Tensor, y: Tensor) -> Tensor:
    with forward_ad.dual_level():
        made = forward_ad.unpack_dual(net.body(forward_ad.make_dual(x, torch.ones_like(x))))
        return mse(net.head(made.primal), y) + made.tangent.square().mean()


def by_linearize(net: Net, x: Tensor, y: Tensor) -> Tensor:
    output, tangent_of = func.linearize(net.body, x)
    return mse(net.head(output), y) + tangent_of(torch.ones_like(x)).square().mean()


def choosing(row: Tensor) -> Tensor:
    return row * 2 if row.sum() > 0 else row


def dropped(net: Net, x: Tensor, y: Tensor) -> Tensor:
    x = x.detach().requires_grad_(True)
    states = F.dropout(net.body(x))
    (gradient,) = torch.autograd.grad(states.sum(), x, create_graph=True)
    return mse(net.whole(x), y) + gradient.square().mean()


def noisy(net: Net, x: Tensor, y: Tensor) -> Tensor:
    """Advice of the refusal of random numbers."""
    x = x.detach().requires_grad_(True)
    kept = (torch.rand(len(x), 8, dtype=x.dtype) < 0.5) * 2.0
    (gradient,) = torch.autograd.grad((net.body(x) * kept).sum(), x, create_graph=True)
    return mse(net.whole(x), y) + gradient.square().mean()


def kept(net: Net, x: Tensor, y: Tensor) -> Tensor:
    states = []

    def total(z: Tensor) -> Tensor:
        states.append(net.body(z))
        return net.head(states[-1]).sum()

    return mse(net.whole(x), y) + func.grad(total)(x).square().mean() + states[0].mean()


def returned(net: Net, x: Tensor, y: Tensor) -> Tensor:
    """Advice of the refusal of tensors that are kept."""

    def total(z: Tensor) -> tuple[Tensor, Tensor]:
        states = net.body(z)
        return net.head(states).sum(), states

    gradient, states = func.grad(total, has_aux=True)(x)
    return mse(net.whole(x), y) + gradient.square().mean() + states.mean()


class Halved(torch.autograd.Function):
    """The identity, with half its gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient / 2


def written_part(net: Net, x: Tensor, y: Tensor) -> Tensor:
    def total(z: Tensor) -> Tensor:
        states = net.body(z) * 1
        states[:, 0] = 0
        return net.head(states).sum()

    return mse(net.whole(x), y) + func.grad(total)(x).square().mean()


def doubled(states: Tensor) -> Tensor:
    states.detach().mul_(2)
    return states * 1.5


def with_value(states: Tensor) -> Tensor:
    """Advice of the refusal of writes to detached tensors."""
    return (states + (2 * states - states).detach()) * 1.5


def under_no_grad(net: Net, x: Tensor, y: Tensor) -> Tensor:
    x = x.detach().requires_grad_(True)
    output = net.whole(x)
    total = output.sum()
    with torch.no_grad():
        (gradient,) = torch.autograd.grad(total, x, create_graph=True)
    return mse(output, y) + gradient.square().mean()


def chosen_part(net: Net, x: Tensor, y: Tensor) -> Tensor:
    """Advice of the refusal of writes into parts."""
    is_first = torch.arange(8) == 0
    total = lambda z: net.head(torch.where(is_first, 0, net.body(z))).sum()  # noqa: E731
    return mse(net.whole(x), y) + func.grad(total)(x).square().mean()


def without_trained(net: Net, x: Tensor, y: Tensor) -> Tensor:
    parameters, _ = func.stack_module_state([net.head, net.head])
    call = lambda p: func.functional_call(net.head, p, (net.body(x).detach(),))  # noqa: E731
    return mse(torch.vmap(call)(parameters).mean(0), y)


def with_trained(net: Net, x: Tensor, y: Tensor) -> Tensor:
    """Advice of the refusal of a loss that trains nothing."""
    named = dict(net.head.named_parameters())
    parameters = {name: torch.stack([each, each]) for name, each in named.items()}
    call = lambda p: func.functional_call(net.head, p, (net.body(x).detach(),))  # noqa: E731
    return mse(torch.vmap(call)(parameters).mean(0), y)


def by_rows(rule: Callable[[Tensor], float]) -> Callable[[Net, Tensor, Tensor], Tensor]:
    """A forward with a gradient that is multiplied by a rule on the batch."""

    def forward(net: Net, x: Tensor, y: Tensor) -> Tensor:
        gradient = func.grad(lambda z: net.whole(z).sum() * rule(z))(x)
        return mse(net.whole(x), y) + gradient.abs().mean()

    return forward


RULES: dict[str, Callable[[Tensor], float]] = {
    "remainder": lambda z: 2 if z.shape[0] % 4 == 0 else 1,
    "parity": lambda z: 2 if z.shape[0] % 2 else 1,
    "one number": lambda z: 2 if z.shape[0] == 8 else 1,
    "among numbers": lambda z: 2 if z.shape[0] in (8, 16) else 1,
    "above": lambda z: 2 if z.size(0) > 5 else 1,
    "between": lambda z: 2 if 4 < len(z) < 100 else 1,
    "by elements": lambda z: 2 if 30 < z.numel() < 60 else 1,
    "by shape": lambda z: 2 if z.shape == (8, 6) else 1,
    "by a table": lambda z: {8: 2}.get(z.shape[0], 1),
    "by a text": lambda z: 2 if str(z.shape[0]) == "8" else 1,
    "half": lambda z: 2 if 3 < z.shape[0] / 2 < 50 else 1,
    "power of two": lambda z: 2 if z.shape[0] & (z.shape[0] - 1) == 0 else 1,
    "as a number": lambda z: 2 if 5 < int(z.shape[0]) < 10 else 1,
    "square": lambda z: 1 / z.shape[0] ** 2,
    "at most": lambda z: 1 / min(z.shape[0], 4),
    "loop": lambda z: sum(z[k].sum() for k in range(z.shape[0])) / 8,
}


@pytest.mark.parametrize("name", slow_but(("remainder", "between"), RULES))
def test_rules_on_the_number_of_rows_are_refused(name, monkeypatch):
    monkeypatch.setitem(EXACT, "refused", by_rows(RULES[name]))
    words = r"torch.func.grad \(test_tr.*number of rows.*Compute what depends on the number of rows before"
    with pytest.raises(autopar.AutoparError, match=words):
        autopar.plan(build("refused"), "cpu:1", batches()[0])


REFUSED: dict[str, tuple[Callable[[Net, Tensor, Tensor], Tensor], str, Callable]] = {
    "backward": (by_backward, r"forward runs backward \(test_tr.*py:.*torch.autograd.grad", penalty),
    "dual numbers": (by_dual_numbers, r"torch.autograd.forward_ad \(test_tr.*use torch.func.jvp\(f", EXACT["jvp"]),
    "linearize": (by_linearize, r"torch.func.linearize \(test_tr.*use torch.func.jvp\(f", EXACT["jvp"]),
    "a number of a row": (
        lambda n, x, y: mse(torch.vmap(lambda r: n.whole(choosing(r)))(x), y),
        r"torch.vmap \(test_tr.*torch.where",
        lambda n, x, y: mse(torch.vmap(lambda r: n.whole(torch.where(r.sum() > 0, r * 2, r)))(x), y)),
    "dropout in vmap": (
        lambda n, x, y: mse(torch.vmap(lambda r: n.head(F.dropout(n.body(r))), randomness="different")(x), y),
        r"torch.vmap \(test_tr.*draws random numbers in it. Draw them before",
        lambda n, x, y: mse(torch.vmap(lambda r, m: n.head(n.body(r) * m))(x, (torch.rand(len(x), 8, dtype=x.dtype) < 0.5) * 2.0), y)),
    "dropout that is differentiated": (
        dropped, r"torch.autograd.grad \(test_tr.*draws random numbers in it. Draw them before", noisy),
    "a tensor is kept": (kept, r"torch.func.grad \(test_tr.*stores a tensor outside of itself.*has_aux=True", returned),
    "an autograd.Function": (
        lambda n, x, y: mse(torch.vmap(lambda r: Halved.apply(n.whole(r)))(x), y),
        r"autograd.Function Halved \(test_tr.*Call it outside of the transform",
        lambda n, x, y: mse(Halved.apply(torch.vmap(n.whole)(x)), y)),
    "a write to a detached tensor": (
        lambda n, x, y: mse(torch.vmap(lambda r: doubled(n.body(r)) @ n.experts[0])(n.whole(x).repeat(1, 2)[:, :6]), y),
        r"torch.vmap \(test_tr.*in place by its detach\(\).*Compute a new tensor",
        lambda n, x, y: mse(torch.vmap(lambda r: with_value(n.body(r)) @ n.experts[0])(n.whole(x).repeat(1, 2)[:, :6]), y)),
    "create_graph under no_grad": (under_no_grad, r"under no_grad \(test_tr.*call it outside of no_grad", penalty),
    "a write into a part": (written_part, r"torch.func.grad \(test_tr.*writes into a part of a tensor.*torch.where", chosen_part),
    "nothing is trained": (without_trained, "depends on no trained parameter.*torch.stack in forward", with_trained),
}  # fmt: skip
"""What is refused, a part of the error, and a forward that does as it advises."""


@pytest.mark.parametrize("name", slow_but(("a tensor is kept", "nothing is trained"), REFUSED))
def test_refusals_name_the_line_and_give_advice_that_works(name, monkeypatch):
    forward, words, advised = REFUSED[name]
    monkeypatch.setitem(EXACT, "refused", forward)
    monkeypatch.setitem(EXACT, "advised", advised)
    with pytest.raises(autopar.AutoparError, match=words) as refused:
        autopar.plan(build("refused"), "cpu:1", batches()[0])
    paragraph(refused.value)
    autopar.plan(build("advised"), "cpu:1", batches()[0])


class EnabledAgain(nn.Module):
    """The only way to a trained parameter leads through a region without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            hidden = self.first(x)
            with torch.enable_grad():
                hidden = self.second(hidden)
        return hidden.square().mean()


def test_gradients_that_are_enabled_again_train():
    torch.manual_seed(0)
    model = EnabledAgain().double()
    given = [{"x": torch.randn(4, 4, dtype=torch.float64)} for _ in range(3)]
    result = train_in_place(copy.deepcopy(model), given)
    engine = autopar.parallelize(model, "cpu:1", given[0], optimizer=sgd, precision="fp64")
    losses, state = run_steps(engine, given)
    assert losses == pytest.approx(result.losses, rel=1e-12)
    assert update_error(result, state) <= 1
