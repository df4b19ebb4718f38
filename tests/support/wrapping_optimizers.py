"""Optimizers in the shapes of public packages: wrappers, two passes a step, averages as weights, hooks that hold parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class SAM(torch.optim.Optimizer):
    """Climbs along the gradient, takes the gradient there, and steps from where it was (Foret et al. 2021)."""

    def __init__(
        self, params: Any, base: type[torch.optim.Optimizer], rho: float = 0.05, **options: Any
    ) -> None:
        super().__init__(params, {"rho": rho} | options)
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        assert closure is not None, "two passes need a closure"
        trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in trained]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["old"] = p.data.clone()
                    p.add_(p.grad, alpha=float(group["rho"] / (norm + 1e-12)))
        self.zero_grad()
        torch.enable_grad()(closure)()
        for p in trained:
            p.data = self.state[p].pop("old")
        self.base_optimizer.step()


class Lookahead(torch.optim.Optimizer):
    """Every `k` steps, slow weights move towards fast ones, which start there again (Zhang et al. 2019)."""

    def __init__(self, base: torch.optim.Optimizer, k: int = 2, alpha: float = 0.5) -> None:
        self.base, self.k, self.alpha, self.count = base, k, alpha, 0
        self.param_groups, self.defaults = base.param_groups, base.defaults
        self.state: Any = defaultdict(dict)
        self._optimizer_step_pre_hooks: dict = {}
        self._optimizer_step_post_hooks: dict = {}

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and "slow" not in self.state[p]:
                    self.state[p]["slow"] = p.clone()
        self.base.step()
        self.count += 1
        if self.count % self.k == 0:
            for group in self.param_groups:
                for p in group["params"]:
                    if "slow" in self.state[p]:
                        p.copy_(self.state[p]["slow"].lerp_(p, self.alpha))


class ScheduleFree(torch.optim.Optimizer):
    """SGD whose evaluation weights are averages; `train()` and `eval()` put the ones or the others into the parameters."""

    def __init__(self, params: Any, lr: float = 0.05, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "training": True})

    @torch.no_grad()
    def eval(self) -> None:
        for group in self.param_groups:
            if group["training"]:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.data.lerp_(self.state[p]["z"], 1 - 1 / group["beta"])
                group["training"] = False

    @torch.no_grad()
    def train(self) -> None:
        for group in self.param_groups:
            if not group["training"]:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.data.lerp_(self.state[p]["z"], 1 - group["beta"])
                group["training"] = True

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        for group in self.param_groups:
            assert group["training"], "call train() first"
            weight = 1 / (group["k"] + 1)
            for p in group["params"]:
                if p.grad is None:
                    continue
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, weight)
                p.add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - weight) - 1))
                z.sub_(p.grad, alpha=group["lr"])
            group["k"] += 1


def clipped_in_hook(clip: Callable[[list[Tensor]], Any]) -> Callable:
    """SGD with a step hook that clips the gradients of the parameters that the factory was given."""

    def factory(params: Any) -> torch.optim.Optimizer:
        held = list(params)
        optimizer = torch.optim.SGD(held, 0.05, momentum=0.9)

        def before(*_: Any) -> None:
            clip(held)

        optimizer.register_step_pre_hook(before)
        return optimizer

    return factory
