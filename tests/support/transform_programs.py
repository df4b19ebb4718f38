"""A model whose forward uses function transforms and gradients in many ways, each as eager PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, func, nn

ROWS = 8


class Net(nn.Module):
    """Layers, weights of three experts, three members of an ensemble, and what forward does."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 4)
        self.experts = nn.Parameter(torch.randn(3, 8, 4) * 0.3)
        self.members = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 4))
            for _ in range(3 * (name == "ensemble"))
        )
        if name == "tied weights":
            self.twin = nn.Linear(8, 8)
            self.twin.weight = self.body[2].weight
        if name == "adversarial attention":
            self.attention = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return EXACT[self.name](self, x, y)

    def whole(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def mse(output: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(output, y)


def stacked(net: Net) -> dict[str, Tensor]:
    named = [dict(member.named_parameters()) for member in net.members]
    return {key: torch.stack([each[key] for each in named]) for key in named[0]}


def penalty(net: Net, x: Tensor, y: Tensor) -> Tensor:
    x = x.detach().requires_grad_(True)
    output = net.whole(x)
    (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return mse(output, y) + 0.1 * (gradient.norm(dim=1) - 1).square().mean()


def energy(net: Net, x: Tensor, y: Tensor) -> Tensor:
    x = x.requires_grad_(True)
    energies = net.whole(x).sum(1)
    force = -torch.autograd.grad([energies.sum()], [x], create_graph=True, retain_graph=True)[0]
    return mse(force[:, :4], y) + mse(energies, y.sum(1))


def meta_step(net: Net, x: Tensor, y: Tensor) -> Tensor:
    """A loss after one step of SGD on a parameter-free part, row by row."""
    fast = net.experts[0]
    inner = (net.body(x) @ fast - y).square().sum()
    (gradient,) = torch.autograd.grad(inner, fast, create_graph=True)
    return mse(net.body(x) @ (fast - 0.01 * gradient), y)


def saved_norms(net: Net, x: Tensor, y: Tensor) -> Tensor:
    """Ops that save other results than the one returned."""
    x = x.detach().requires_grad_(True)
    states = F.layer_norm(net.body[0](x), (8,))
    states = F.gelu(states) + F.softmax(states, -1) + F.softplus(states) + F.leaky_relu(states)
    output = net.head(states).max(1).values
    (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return mse(net.whole(x), y) + gradient.square().mean()


def unused(net: Net, x: Tensor, y: Tensor) -> Tensor:
    x, other = x.detach().requires_grad_(True), y.detach().requires_grad_(True)
    output = net.whole(x)
    found = torch.autograd.grad(output.sum(), (x, other), create_graph=True, allow_unused=True)
    assert found[1] is None
    return mse(output, y) + found[0].square().mean()


def no_graph(net: Net, x: Tensor, y: Tensor) -> Tensor:
    """Gradients as weights, which are not trained through."""
    x = x.detach().requires_grad_(True)
    (gradient,) = torch.autograd.grad(net.whole(x).sum(), x)
    return mse(net.whole(x + 0.1 * gradient.sign()), y)


def partly_detached(net: Net, x: Tensor, y: Tensor) -> Tensor:
    def row(r: Tensor) -> Tensor:
        states = net.body(r)
        with torch.no_grad():
            scale = states.square().sum()
        return net.head(states / (1 + scale + states.detach().abs().sum()))

    return mse(torch.vmap(row)(x), y)


def without_gradients(net: Net, x: Tensor, y: Tensor) -> Tensor:
    """Parts of what is differentiated twice that have no gradient."""
    x = x.detach().requires_grad_(True)
    output = net.whole(x * x.detach())
    with torch.no_grad():
        scale = output.abs().sum(1, keepdim=True)
    (gradient,) = torch.autograd.grad((output * scale).sum(), x, create_graph=True)
    return mse(output, y) + 0.1 * gradient.square().mean()


def tied(net: Net, x: Tensor, y: Tensor) -> Tensor:
    """A gradient of a parameter that has two names (`build` ties them)."""
    output = net.whole(x)
    weight = net.body[2].weight
    (gradient,) = torch.autograd.grad(output.square().sum(), weight, create_graph=True)
    return mse(output + net.twin(net.body(x))[:, :4] + gradient.square().sum(), y)


def written(net: Net, x: Tensor, y: Tensor) -> Tensor:
    x = x.detach().requires_grad_(True)
    states = x * 2
    states += 1
    states[:, 0] = 0
    output = net.whole(states)
    (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return mse(output, y) + 0.1 * gradient.square().mean()


def images(net: Net, x: Tensor, y: Tensor) -> Tensor:
    """The penalty of a discriminator of images."""
    loss = mse(net.whole(x), y)
    x = x.reshape(-1, 1, 2, 3).repeat(1, 2, 2, 2).requires_grad_(True)
    weight = net.experts.reshape(8, 2, 2, 3)
    states = F.conv2d(x, weight, stride=2, padding=1)
    states = F.avg_pool2d(
        F.group_norm(states, 2, net.head.weight[0], net.head.bias[0].expand(8)), 2
    )
    output = net.head(torch.tanh(states).sum((2, 3)))
    (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return loss + mse(output, y) + gradient.square().sum((1, 2, 3)).mean()


def adversarial(net: Net, x: Tensor, y: Tensor) -> Tensor:
    """A step on what a layer of attention reads, as FreeLB takes it, and a loss by classes."""
    loss = lambda noise: F.cross_entropy(  # noqa: E731
        net.head(net.attention(net.body(x).view(-1, 2, 4) + noise).flatten(1)), y.argmax(1)
    )
    noise = torch.full((x.shape[0], 2, 4), 0.01, dtype=x.dtype).requires_grad_(True)
    first = loss(noise)
    (gradient,) = torch.autograd.grad(first, noise, retain_graph=True)
    return first + loss((noise + 0.1 * gradient.sign()).detach())


def inner_steps(net: Net, x: Tensor, y: Tensor) -> Tensor:
    """Two steps of SGD for each row, from shared weights, with a loss after them."""

    def task(row: Tensor, target: Tensor) -> Tensor:
        loss = lambda p: mse(func.functional_call(net.head, p, (row,)), target)  # noqa: E731
        fast = dict(net.head.named_parameters())
        for _ in range(2):
            gradients = func.grad(loss)(fast)
            fast = {name: fast[name] - 0.05 * gradients[name] for name in fast}
        return loss(fast)

    return torch.vmap(task)(net.body(x), y).mean()


def counting(net: Net, x: Tensor, y: Tensor) -> Tensor:
    """Functions that change Python: an attribute, a list, a variable and a global one, once each."""
    global COUNT
    net.calls, COUNT, seen, calls = 0, 0, [], 1

    def row(r: Tensor) -> Tensor:
        nonlocal calls
        global COUNT
        net.calls, COUNT, calls = net.calls + 1, COUNT + 2, calls * 3
        seen.append(1.0)
        return net.whole(r).square().sum()

    gradients = torch.vmap(func.grad(row))(x)
    factor = 0.01 * (net.calls + COUNT + calls + len(seen))
    return mse(net.whole(x), y) + factor * gradients.square().mean()


COUNT = 0


def known_rows(net: Net, x: Tensor, y: Tensor) -> Tensor:
    """Rules on the number of rows, followed for the whole batch as elsewhere in forward."""
    rows = x.shape[0]
    factor, square = 2 if rows > 5 else 1, rows**2
    of = lambda z: net.whole(z).sum() * factor / square * z.shape[0] / max(len(z), 1)  # noqa: E731
    return mse(net.whole(x), y) + func.grad(of)(x).abs().sum()


EXACT: dict[str, Callable[[Net, Tensor, Tensor], Tensor]] = {
    "vmap over rows": lambda n, x, y: mse(torch.vmap(lambda r: n.whole(r))(x), y),
    "vmap in chunks": lambda n, x, y: mse(func.vmap(n.whole, chunk_size=3)(x), y),
    "vmap over rows and targets": lambda n, x, y: torch.vmap(lambda r, t: mse(n.whole(r), t))(x, y).mean(),
    "vmap over experts": lambda n, x, y: mse(torch.vmap(lambda w: n.body(x) @ w)(n.experts).mean(0), y),
    "vmap of vmap": lambda n, x, y: mse(
        torch.vmap(lambda r: torch.vmap(lambda w: n.body(r) @ w)(n.experts))(x).mean(1), y),
    "vmap with in_dims": lambda n, x, y: mse(
        torch.vmap(lambda r, w: r @ w, in_dims=(0, None))(n.body(x), n.experts[0]), y),
    "vmap with out_dims": lambda n, x, y: mse(torch.vmap(n.whole, out_dims=1)(x).t(), y),
    "vmap of a cross-entropy": lambda n, x, y: torch.vmap(F.cross_entropy)(n.whole(x), y.argmax(1)).mean(),
    "vmap of a layer norm": lambda n, x, y: mse(torch.vmap(lambda r: n.head(F.layer_norm(n.body(r), (8,))))(x), y),
    "vmap that detaches a part": partly_detached,
    "ensemble": lambda n, x, y: (torch.vmap(lambda p: func.functional_call(n.members[0], p, (n.body(x),)))(stacked(n)) - y)
    .square().mean(),
    "functional_call": lambda n, x, y: mse(
        func.functional_call(n.head, {"weight": n.head.weight * 2, "bias": n.head.bias}, (n.body(x),)), y),
    "jvp": lambda n, x, y: (lambda made: mse(n.head(made[0]), y) + made[1].square().mean())(
        func.jvp(n.body, (x,), (torch.ones_like(x),))),
    "vjp": lambda n, x, y: (lambda made: mse(n.head(made[0]), y)
        + made[1](torch.ones_like(made[0]))[0].square().mean())(func.vjp(n.body, x)),
    "jacrev of rows": lambda n, x, y: mse(n.whole(x), y) + torch.vmap(func.jacrev(n.whole))(x).square().mean(),
    "jacfwd of rows": lambda n, x, y: mse(n.whole(x), y) + torch.vmap(func.jacfwd(n.whole))(x).square().mean(),
    "hessian of rows": lambda n, x, y: mse(n.whole(x), y)
    + 0.1 * torch.vmap(func.hessian(lambda r: n.whole(r).sum()))(x).square().mean(),
    "grad of rows": lambda n, x, y: mse(n.whole(x), y)
    + torch.vmap(func.grad(lambda r: n.whole(r).square().sum()))(x).square().mean(),
    "grad and value of rows": lambda n, x, y: (lambda made: made[1].mean() + made[0].square().mean())(
        torch.vmap(func.grad_and_value(lambda r, t: mse(n.whole(r), t)))(x, y)),
    "grad of all inputs": lambda n, x, y: mse(n.whole(x), y)
    + func.grad(lambda each: n.whole(each).square().sum())(x).square().mean(),
    "gradient penalty": penalty,
    "forces of an energy": energy,
    "gradients of many layers": saved_norms,
    "a gradient that is not used": unused,
    "gradients that are not trained": no_graph,
    "jacobian of a batch": lambda n, x, y: mse(n.whole(x), y)
    + torch.autograd.functional.jacobian(lambda h: n.head(h).sum(0), n.body(x), create_graph=True).square().sum() / 8,
    "parts without gradients": without_gradients,
    "writes into a part": written,
    "images": images,
    "inner steps of rows": inner_steps,
    "Python state": counting,
    "rows passed in": known_rows,
    "adversarial attention": adversarial,
    "many gradients at once": lambda n, x, y: (lambda h: mse(n.head(h), y) + torch.autograd.grad(
        n.head(h).sum(0), h, torch.eye(4, dtype=x.dtype), create_graph=True, is_grads_batched=True)[0].square().mean())(n.body(x)),
}  # fmt: skip
WHOLE = {"inner step": meta_step, "tied weights": tied}
"""Exact where the batch is not split: they mix its rows."""
EXACT |= WHOLE


def build(name: str) -> Net:
    """The model, whose forward is `EXACT[name]`, in fp64 and with weights of a fixed seed."""
    torch.manual_seed(0)
    return Net(name).double()


def batches() -> list[dict[str, Tensor]]:
    """Three batches of `ROWS` rows."""
    generator = torch.Generator().manual_seed(1)
    draw = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    return [{"x": draw(ROWS, 6), "y": draw(ROWS, 4)} for _ in range(3)]
