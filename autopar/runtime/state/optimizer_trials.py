"""Determines how an optimizer of an unknown class behaves, by running copies on small tensors.

A copy (`_twin`) has the groups, options and attributes of the optimizer. It trains small stand-in
tensors, two for each group and number of dims. An optimizer *couples* parameters if a stand-in ends
differently when it is trained alone than with the others. Examples are Prodigy, which estimates one
step size for all parameters, and clipping by the norm of all gradients. Such an optimizer must
receive all parameters at once.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.runtime.state.pieces import local_part

STEPS, RATE, LONGEST = 6, 0.1, 5


@dataclass(frozen=True, slots=True)
class Habits:
    """Findings about an optimizer. `couples`: an update depends on other parameters too.
    `obstacle`: why it can only run on whole replicas, or ''.
    """

    couples: bool = False
    obstacle: str = ""


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


def habits_of(optimizer: torch.optim.Optimizer) -> Habits:
    """Find how the optimizer behaves, by training copies on small tensors, without changing it. An
    error in its step becomes an obstacle.
    """
    stand_ins = list(_stand_ins(optimizer))
    everyone = range(len(stand_ins))
    try:
        with torch.random.fork_rng(devices=[]):
            together, again = (_trained(optimizer, stand_ins, everyone, seed) for seed in (0, 1))
            if not _alike(together, again, stand_ins):
                return Habits(
                    obstacle="draws random numbers, so that copies of a parameter would part"
                )
            alone = [_trained(optimizer, stand_ins, (k,), 0)[k] for k in everyone]
            _trained(optimizer, stand_ins, (), 0)  # as on a rank that owns nothing
            return Habits(couples=not _alike(together, alone, stand_ins))
    except _CommunicatesError:
        return Habits(
            obstacle="talks to other ranks in its step, and takes what they hold for whole parameters"
        )
    except Exception as error:  # of a class that is not ours
        reason = " ".join(str(error).split())[:200]
        return Habits(
            obstacle=f"does not step on small matrices as a trial ({type(error).__name__}: {reason})"
        )


def _stand_ins(optimizer: torch.optim.Optimizer) -> Iterator[_StandIn]:
    for number, group in enumerate(optimizer.param_groups):
        for dims in sorted({parameter.dim() for parameter in group["params"]}):
            alike = [parameter for parameter in group["params"] if parameter.dim() == dims]
            for place, real in enumerate((alike * 2)[:2] if len(alike) == 1 else alike[:2]):
                yield _StandIn(
                    number,
                    real,
                    tuple(
                        min(size, LONGEST - (dim + place) % 3)
                        for dim, size in enumerate(real.shape)
                    ),
                )


def _trained(
    optimizer: torch.optim.Optimizer, stand_ins: list[_StandIn], chosen: Any, seed: int
) -> list[Tensor]:
    """The values of all stand-ins after `STEPS` steps of a copy that trains those with indices in
    `chosen`. `seed` seeds the optimizer's own random draws.
    """
    generator = torch.Generator().manual_seed(7)
    tensors = [nn.Parameter(stand_in.tensor(generator)) for stand_in in stand_ins]
    twin = _twin(optimizer, stand_ins, tensors, chosen)
    torch.manual_seed(seed)
    for _ in range(STEPS):
        for k, stand_in in enumerate(stand_ins):
            grad = stand_in.tensor(generator)
            tensors[k].grad = grad if k in chosen else None
        with _Silent():
            # not twin.step, which a learning-rate scheduler may have bound to the optimizer itself
            type(optimizer).step(twin)
    return [tensor.detach() for tensor in tensors]


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
    apart = ("state", "param_groups", "step")
    twin.__dict__.update(
        {
            key: copy.deepcopy(value, memo)
            for key, value in vars(optimizer).items()
            if key not in apart
        }
    )
    twin.param_groups = []
    for number, group in enumerate(optimizer.param_groups):
        options = {
            key: copy.deepcopy(value, memo) for key, value in group.items() if key != "params"
        }
        if isinstance(options.get("lr"), (float, int, Tensor)):  # a warm-up may begin at zero
            options["lr"] = (
                torch.full_like(options["lr"], RATE) if isinstance(options["lr"], Tensor) else RATE
            )
        twin.param_groups.append(
            options | {"params": [tensors[k] for k in chosen if stand_ins[k].group == number]}
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
