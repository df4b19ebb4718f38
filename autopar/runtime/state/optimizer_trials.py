"""Determines how an optimizer of an unknown class behaves, by running copies on small tensors.

A copy (`_twin`) has the groups, options and attributes of the optimizer. It trains small stand-in
tensors, two for each group and number of dims. An optimizer *couples* parameters if a stand-in ends
differently when it is trained alone than with the others. Examples are Prodigy, which estimates one
step size for all parameters, and clipping by the norm of all gradients. Such an optimizer must
receive all parameters at once.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.errors import AutoparError
from autopar.runtime.state.pieces import local_part
from autopar.runtime.state.reach import rebound

_STEPS, _RATE, _LONGEST = 6, 0.1, 5


@dataclass(frozen=True, slots=True)
class Habits:
    """Findings about an optimizer.

    Attributes:
        couples: an update depends on other parameters too.
        obstacle: why it can only run on whole replicas, or ''.
        needs_some: its step fails if no parameter has a gradient.
        closure: its step takes a closure that computes gradients.
        gradients_first: it reads gradients before it calls the closure.
        moving: options of parameter groups that its step changes, or adds.
        keeps_gradients: its zero_grad leaves some.
    """

    couples: bool = False
    obstacle: str = ""
    needs_some: bool = False
    closure: bool = False
    gradients_first: bool = True
    moving: frozenset[str] = frozenset()
    keeps_gradients: bool = False


class _CommunicatesError(Exception):
    pass


class _Silent(TorchDispatchMode):
    """A mode in which a collective raises an error before it sends anything."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if function.namespace in ("c10d", "_c10d_functional"):
            raise _CommunicatesError
        return function(*args, **(kwargs or {}))


@dataclass(frozen=True, slots=True)
class _StandIn:
    """A small tensor that stands in for the parameter `real` of parameter group `group`."""

    group: int
    real: Tensor
    shape: tuple[int, ...]

    def tensor(self, generator: torch.Generator) -> Tensor:
        made = torch.randn(self.shape, generator=generator, dtype=torch.float64)
        return made.to(self.real.device, self.real.dtype)

    def parameter(self, generator: torch.Generator) -> nn.Parameter:
        """`tensor` as a parameter with the attributes of the real one."""
        made = nn.Parameter(self.tensor(generator))
        for key, value in vars(self.real).items():
            setattr(made, key, value)
        return made


def habits_of(optimizer: torch.optim.Optimizer) -> Habits:
    """Find how the optimizer behaves, by training copies on small tensors, without changing it. An
    error in its step becomes an obstacle.
    """
    stand_ins = list(_stand_ins(optimizer))
    everyone = range(len(stand_ins))
    closure = needs_closure(optimizer)
    moving: set[str] = set()
    try:
        with torch.random.fork_rng(devices=[]):
            try:
                together = _trained(optimizer, stand_ins, everyone, 0, closure)
            except _CommunicatesError:
                raise
            except Exception:
                if closure:
                    raise
                closure = True  # it may have one that its signature does not ask for
                together = _trained(optimizer, stand_ins, everyone, 0, closure)
            again = _trained(optimizer, stand_ins, everyone, 1, closure, moving=moving)
            if not _alike(together, again, stand_ins):
                return Habits(
                    obstacle="draws random numbers, so that copies of a parameter would part",
                    closure=closure,
                    moving=frozenset(moving),
                )
            alone = [_trained(optimizer, stand_ins, (k,), 0, closure)[k] for k in everyone]
            first = closure and not _alike(
                together, _trained(optimizer, stand_ins, everyone, 0, True, before=False), stand_ins
            )
            return Habits(
                couples=not _alike(together, alone, stand_ins),
                needs_some=_fails_without_gradients(optimizer, stand_ins, closure),
                closure=closure,
                gradients_first=first or not closure,
                moving=frozenset(moving),
                keeps_gradients=_keeps_gradients(optimizer, stand_ins),
            )
    except _CommunicatesError:
        return Habits(
            obstacle="talks to other ranks in its step, and takes what they hold for whole parameters",
            closure=closure,
        )
    except Exception as error:  # of a class that is not ours
        reason = " ".join(str(error).split())[:200]
        return Habits(
            obstacle=f"does not step on small matrices as a trial ({type(error).__name__}: {reason})",
            closure=needs_closure(optimizer),
        )


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the signature of the optimizer's step requires an argument."""
    return bool(_needed(optimizer))


def _needed(optimizer: torch.optim.Optimizer) -> list[inspect.Parameter]:
    """The arguments that the optimizer's step requires."""
    _, *arguments = inspect.signature(type(optimizer).step).parameters.values()  # without self
    return [
        one
        for one in arguments
        if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]


def check_step(optimizer: torch.optim.Optimizer) -> None:
    """Raise AutoparError if the optimizer's step requires more than a closure."""
    needed = _needed(optimizer)
    named = [one.name for one in needed if one.kind is one.KEYWORD_ONLY]
    if more := [*named, *(one.name for one in needed[1:])]:
        raise AutoparError(
            f"{type(optimizer).__name__}.step needs {more[0]}: a step is called with a closure at most; use an optimizer that steps on "
            "gradients alone, such as AdamW"
        )


def _fails_without_gradients(
    optimizer: torch.optim.Optimizer, stand_ins: list[_StandIn], closure: bool
) -> bool:
    """Whether a step fails on a rank that updates no parameter."""
    try:
        _trained(optimizer, stand_ins, (), 0, closure)
    except _CommunicatesError:
        raise
    except Exception:
        return True
    return False


def _keeps_gradients(optimizer: torch.optim.Optimizer, stand_ins: list[_StandIn]) -> bool:
    """Whether a zero_grad of the optimizer's class leaves gradients that are not zero."""
    method: Any = type(optimizer).zero_grad
    if method is torch.optim.Optimizer.zero_grad:
        return False
    generator = torch.Generator().manual_seed(7)
    tensors = [stand_in.parameter(generator) for stand_in in stand_ins]
    twin = _twin(optimizer, stand_ins, tensors, range(len(tensors)))
    for tensor in tensors:
        tensor.grad = torch.ones_like(tensor)
    try:
        method(twin)
    except Exception:  # of a class that is not ours, whose zero_grad the engine does not call
        return False
    return any(tensor.grad is not None and bool(tensor.grad.any()) for tensor in tensors)


def _stand_ins(optimizer: torch.optim.Optimizer) -> Iterator[_StandIn]:
    for number, group in enumerate(optimizer.param_groups):
        for dims in sorted({parameter.dim() for parameter in group["params"]}):
            alike = [parameter for parameter in group["params"] if parameter.dim() == dims]
            for place, real in enumerate((alike * 2)[:2] if len(alike) == 1 else alike[:2]):
                yield _StandIn(
                    number,
                    real,
                    tuple(
                        min(size, _LONGEST - (dim + place) % 3)
                        for dim, size in enumerate(real.shape)
                    ),
                )


def _trained(
    optimizer: torch.optim.Optimizer,
    stand_ins: list[_StandIn],
    chosen: Any,
    seed: int,
    closure: bool = False,
    before: bool = True,
    moving: set[str] | None = None,
) -> list[Tensor]:
    """The values of all stand-ins after `_STEPS` steps of a copy that trains those with indices in
    `chosen`. `seed` seeds the optimizer's own random draws.

    With `closure`, gradients are those of a quadratic loss, which the step may ask for again.
    `before`: they are there before the step; otherwise they are NaN until it asks for them. `moving`
    receives the names of options that steps change.
    """
    generator = torch.Generator().manual_seed(7)
    tensors = [stand_in.parameter(generator) for stand_in in stand_ins]
    twin = _twin(optimizer, stand_ins, tensors, chosen)
    torch.manual_seed(seed)
    options = [_options(group) for group in twin.param_groups]
    for _ in range(_STEPS):
        targets = [stand_in.tensor(generator) for stand_in in stand_ins]

        def compute(targets: list[Tensor] = targets) -> Tensor:
            loss = torch.zeros((), dtype=torch.float64)
            for k in chosen:
                distance = tensors[k].detach() - targets[k]
                tensors[k].grad = (k + 1) * distance
                loss += 0.5 * (k + 1) * distance.double().square().sum().cpu()
            return loss

        for k, target in enumerate(targets):
            tensors[k].grad = target if k in chosen else None
            if closure and not before and k in chosen:
                tensors[k].grad = torch.full_like(target, torch.nan)
        if closure and before:
            compute()
        with _Silent():
            # not twin.step, which a learning-rate scheduler may have bound to the optimizer itself
            run: Any = type(optimizer).step
            run(twin, *([compute] if closure else []))
    if moving is not None:
        for group, old in zip(twin.param_groups, options, strict=False):
            new = _options(group)
            moving |= {key for key in {**old, **new} if old.get(key) != new.get(key)}
    return [tensor.detach() for tensor in tensors]


def _options(group: dict[str, Any]) -> dict[str, str]:
    """The options of a parameter group as text."""
    return {key: repr(value) for key, value in group.items() if key != "params"}


def _twin(
    optimizer: torch.optim.Optimizer,
    stand_ins: list[_StandIn],
    tensors: list[nn.Parameter],
    chosen: Any,
) -> torch.optim.Optimizer:
    twin = object.__new__(type(optimizer))
    memo: dict[int, Any] = {id(optimizer): twin}
    for stand_in, tensor in zip(stand_ins, tensors, strict=True):
        memo.setdefault(id(stand_in.real), tensor)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            memo.setdefault(id(parameter), parameter)  # it has no gradient: no copy of its values
    twin.param_groups = []
    for number, group in enumerate(optimizer.param_groups):
        own = [tensors[k] for k in chosen if stand_ins[k].group == number]
        memo[id(group["params"])] = (
            own  # some optimizers keep the list, or the group, elsewhere too
        )
        options = {
            key: copy.deepcopy(value, memo) for key, value in group.items() if key != "params"
        }
        if isinstance(options.get("lr"), (float, int, Tensor)):  # a warm-up may begin at zero
            options["lr"] = (
                torch.full_like(options["lr"], _RATE)
                if isinstance(options["lr"], Tensor)
                else _RATE
            )
        memo[id(group)] = found = options | {"params": own}
        twin.param_groups.append(found)
    apart = ("state", "param_groups", "step")
    memo[id(optimizer.param_groups)] = twin.param_groups
    twin.__dict__.update(
        {
            key: _copied_hooks(value, memo)
            if key.endswith("_hooks")
            else copy.deepcopy(value, memo)
            for key, value in vars(optimizer).items()
            if key not in apart
        }
    )
    twin.state = defaultdict(dict)
    for k in chosen:
        real = stand_ins[k].real
        if real in optimizer.state:  # made by the constructor
            twin.state[tensors[k]] = {
                key: _reduced(value, real, tensors[k])
                for key, value in optimizer.state[real].items()
            }
    return twin


def _copied_hooks(hooks: Any, memo: dict[int, Any]) -> Any:
    """A copy of the step hooks of an optimizer, which read the stand-ins in `memo` where hooks read
    parameters.
    """
    if not isinstance(hooks, dict):
        return copy.deepcopy(hooks, memo)
    return type(hooks)(
        (key, rebound(copy.deepcopy(hook, memo), memo)) for key, hook in hooks.items()
    )


def _reduced(value: Any, real: Tensor, stand_in: Tensor) -> Any:
    """Optimizer state `value` that a constructor made for the parameter `real`, in the shape of its
    stand-in: filled with the first element. State of another shape, and state that is no tensor, is
    copied.
    """
    if not isinstance(value, Tensor) or value.shape != real.shape or not value.dim():
        return copy.deepcopy(value)
    first = local_part(value).flatten()[:1]
    return (
        first.expand(stand_in.numel()).reshape(stand_in.shape).clone()
        if len(first)
        else torch.zeros_like(stand_in, dtype=value.dtype)
    )


def _alike(some: list[Tensor], others: list[Tensor], stand_ins: list[_StandIn]) -> bool:
    """Whether each stand-in ended with the same values, up to rounding of its update and of
    itself.
    """
    generator = torch.Generator().manual_seed(7)
    for one, other, stand_in in zip(some, others, stand_ins, strict=True):
        start = stand_in.tensor(generator)
        if one.numel():
            rounding = torch.finfo(one.dtype).eps * float(
                1e3 * (one - start).abs().max() + 4 * start.abs().max()
            )
            if not torch.allclose(one, other, rtol=0.0, atol=rounding, equal_nan=True):
                return False
    return True
