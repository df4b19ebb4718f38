"""Optimizers of users: of whole matrices, of all parameters at once, and of single elements.

Divisors have a floor of `FLOOR`, and signs are smooth: the gradient of a key's bias is zero but for rounding, which nothing may magnify.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

FLOOR = 1e-2


class Own(torch.optim.Optimizer):
    """Changes each parameter that has a gradient by `lr` times `direction`; groups may say `weight_decay`."""

    def __init__(self, params: Any, lr: float = 0.02, **options: Any) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0} | options)

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.sub_(
                        self.direction(parameter, self.state[parameter], group), alpha=group["lr"]
                    )

    def direction(self, parameter: Tensor, state: dict, group: dict) -> Tensor:
        raise NotImplementedError


class Lion(Own):
    """Signs, or nearly, of interpolated momentum: each element alone."""

    def direction(self, parameter: Tensor, state: dict, group: dict) -> Tensor:
        average = state.setdefault("average", torch.zeros_like(parameter))
        found = torch.tanh((0.9 * average + 0.1 * parameter.grad) / FLOOR)
        average.lerp_(parameter.grad, 0.01)
        return found


class Lamb(Own):
    """Adam's direction, as long as the parameter (You et al. 2020)."""

    def direction(self, parameter: Tensor, state: dict, group: dict) -> Tensor:
        first, second = (
            state.setdefault(key, torch.zeros_like(parameter)) for key in ("first", "second")
        )
        first.lerp_(parameter.grad, 0.1), second.lerp_(parameter.grad.square(), 0.01)
        found = first / (second.sqrt() + FLOOR)
        return found * (parameter.norm() / (found.norm() + FLOOR))


class Lars(torch.optim.SGD):
    """SGD whose gradients are first made as long as the parameter: a subclass of an element-wise class."""

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(parameter.norm() / (parameter.grad.norm() + FLOOR))
        super().step()


class Shampoo(Own):
    """Roots of the second moments of rows and columns precondition matrices, from the third step on (Gupta et al. 2018); tensors of
    more dims are batches of matrices, and vectors are as they are."""

    def direction(self, parameter: Tensor, state: dict, group: dict) -> Tensor:
        grad = parameter.grad
        if grad.dim() < 2:
            return grad
        state["steps"] = state.get("steps", 0) + 1
        for key, moment in (("rows", grad @ grad.mT), ("columns", grad.mT @ grad)):
            state[key] = (
                state[key] + moment
                if key in state
                else moment + FLOOR * torch.eye(moment.shape[-1], dtype=grad.dtype)
            )
        if state["steps"] < 3:
            return grad
        return _root(state["rows"]) @ grad @ _root(state["columns"])


def _root(moment: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(moment)
    return (vectors * values.clamp(min=FLOOR).pow(-0.25).unsqueeze(-2)) @ vectors.mT


class Prodigal(Own):
    """One step size for all parameters, from all their gradients, kept in the first group (as D-Adaptation and Prodigy do)."""

    def step(self, closure: Callable | None = None) -> None:
        norms = [
            p.grad.norm() ** 2
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        first = self.param_groups[0]
        first["total"] = first.get("total", 0.0) + float(sum(norms))
        super().step()

    def direction(self, parameter: Tensor, state: dict, group: dict) -> Tensor:
        return parameter.grad / (1e-3 + self.param_groups[0]["total"]) ** 0.5


class Langevin(Own):
    """Gradients with noise."""

    def direction(self, parameter: Tensor, state: dict, group: dict) -> Tensor:
        return parameter.grad + 0.1 * torch.randn_like(parameter)


class Gathers(Own):
    """Averages gradients over the ranks itself."""

    def direction(self, parameter: Tensor, state: dict, group: dict) -> Tensor:
        if not dist.is_initialized():
            return parameter.grad
        grad = parameter.grad.clone()
        dist.all_reduce(grad)
        return grad / dist.get_world_size()


class Eager(Own):
    """Makes its state in its constructor, and remembers the order of its parameters outside of the state."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, lr)
        self.average = [torch.zeros_like(p) for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        for parameter, average in zip(self.param_groups[0]["params"], self.average, strict=True):
            average.lerp_(parameter.grad, 0.1)
            parameter.sub_(average / (average.norm() + FLOOR), alpha=self.param_groups[0]["lr"])


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon for the group of matrices, AdamW for the other."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        params = list(params)
        matrices, others = [p for p in params if p.dim() == 2], [p for p in params if p.dim() != 2]
        super().__init__(
            [
                {"params": matrices, "lr": 0.05, "orthogonal": True},
                {"params": others, "lr": 0.02, "orthogonal": False},
            ],
            {},
        )

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                average = state.setdefault("average", torch.zeros_like(parameter)).lerp_(
                    parameter.grad, 0.1
                )
                if group["orthogonal"]:
                    change = average / (average.norm() + FLOOR)
                    for _ in range(5):
                        change = 1.5 * change - 0.5 * change @ change.mT @ change
                    change = change * max(1, parameter.shape[0] / parameter.shape[1]) ** 0.5
                else:
                    square = state.setdefault("square", torch.zeros_like(parameter)).lerp_(
                        parameter.grad.square(), 0.01
                    )
                    change = average / (square.sqrt() + FLOOR)
                parameter.sub_(change, alpha=group["lr"])


def muon(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    """torch's Muon, which takes matrices alone: the others stay as they are."""
    return torch.optim.Muon([p for p in params if p.dim() == 2], 0.05, weight_decay=0.1)


def hooked(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    """SGD with a hook that gives each gradient the norm one."""
    optimizer = torch.optim.SGD(params, 0.05)

    def normalize(own: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in own.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.div_(parameter.grad.norm() + FLOOR)

    optimizer.register_step_pre_hook(normalize)
    return optimizer


def by_dims(make: Callable) -> Callable:
    """Groups of matrices and of others."""

    def factory(params: Iterable[Tensor]) -> torch.optim.Optimizer:
        params = list(params)
        return make(
            [
                {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
                {"params": [p for p in params if p.dim() < 2]},
            ]
        )

    return factory


OPTIMIZERS: dict[str, Callable] = {
    "muon": muon,
    "muon and adamw": MuonAndAdamW,
    "shampoo": lambda params: Shampoo(params, 0.5),
    "lamb": by_dims(Lamb),
    "lars": lambda params: Lars(params, 0.05, momentum=0.9),
    "lion": by_dims(lambda groups: Lion(groups, 0.2)),
    "hooked": hooked,
    "prodigal": lambda params: Prodigal(params, 1.0),
    "langevin": Langevin,
    "gathers": lambda params: Gathers(params, 1.0),
    "eager": lambda params: Eager(params, 0.1),
    "adafactor": lambda params: torch.optim.Adafactor(params, 0.02),
    "adamw": lambda params: torch.optim.AdamW(params, 0.02),
}
