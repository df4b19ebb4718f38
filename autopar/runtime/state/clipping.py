"""Clipping of gradients: by norms, over all parameters, groups or each, and by value."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from autopar.errors import AutoparError, shown
from autopar.rewrite.collectives.axes import AxisGroup
from autopar.runtime.state.names import TensorNames

_Limit = float | Callable[[float], float]
"""A limit, or a function from the norm of this step to the limit."""


@dataclass(frozen=True, slots=True)
class ClipNorm:
    """Scales gradients so that their norm is at most `limit`, as `torch.nn.utils.clip_grad_norm_` does.

    Attributes:
        limit: the largest norm, or a function from this step's norm to the largest one. The function
            runs once a step on every rank, with equal norms.
        names: names of the parameters that are clipped together; patterns and modules too. None: all.
        norm_type: the p of the norm; `math.inf` for the largest element.
        each: whether each parameter is clipped by its own norm.
    """

    limit: _Limit
    names: str | tuple[str, ...] | None = None
    norm_type: float = 2.0
    each: bool = False

    def __post_init__(self) -> None:
        _check_limit("ClipNorm", self.limit)
        if not (isinstance(self.norm_type, int | float) and self.norm_type > 0):
            raise AutoparError(f"norm_type={shown(self.norm_type)} must be positive, or math.inf")
        if self.each and callable(self.limit):
            raise AutoparError("ClipNorm(each=True) takes a number as limit, not a function")


@dataclass(frozen=True, slots=True)
class ClipValue:
    """Limits each element of the gradients to -`limit`..`limit`, as `torch.nn.utils.clip_grad_value_`
    does. `names` are as those of `ClipNorm`.
    """

    limit: float
    names: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if callable(self.limit):
            raise AutoparError("ClipValue takes a number as limit, not a function")
        _check_limit("ClipValue", self.limit)


Clip = ClipNorm | ClipValue


def _check_limit(kind: str, limit: Any) -> None:
    number = isinstance(limit, int | float) and not isinstance(limit, bool)
    if not callable(limit) and not (number and limit > 0):
        raise AutoparError(
            f"{kind} has limit {shown(limit)}, which must be a positive number or a function from a norm to one"
        )


@dataclass(frozen=True, slots=True)
class _Rule:
    clip: Clip
    names: frozenset[str]

    @property
    def told(self) -> str:
        """The rule as text that is equal on all ranks."""
        limit = "a function" if callable(self.clip.limit) else self.clip.limit
        return f"{replace(self.clip, limit=1.0)} with limit {limit}"


def rules_of(clip: Clip | Sequence[Clip] | None, names: TensorNames) -> tuple[_Rule, ...]:
    """The rules of `clip`, in order, each with the first names of its parameters. Raises
    AutoparError for something else, or a name that no trained parameter has.
    """
    given = () if clip is None else (clip,) if isinstance(clip, Clip) else clip
    if not isinstance(given, Sequence) or not all(isinstance(one, Clip) for one in given):
        raise AutoparError(
            f"clip is {shown(clip)}, not autopar.ClipNorm(limit), autopar.ClipValue(limit) or a list of them"
        )
    found = []
    for one in given:
        patterns = (one.names,) if isinstance(one.names, str) else one.names
        members = names.trained if patterns is None else names.matching(patterns, names.trained)
        found.append(_Rule(one, frozenset(members)))
    return tuple(found)


class Norms:
    """Norms of gradients over all ranks. `layouts(names)` are those of gradients, by name. `counts`
    says whether this rank counts a parameter in sums over stages. `pp` is the group of the pipeline.
    """

    def __init__(
        self,
        layouts: Callable[[Any], Mapping[str, Mapping[str, Any]]],
        axes: Mapping[str, AxisGroup],
        counts: Callable[[str], bool],
        pp: AxisGroup,
        device: torch.device,
    ) -> None:
        self._layouts, self._axes, self._counts, self._pp = layouts, axes, counts, pp
        self._device = device

    def of_each(self, grads: Mapping[str, Tensor], norm_type: float) -> dict[str, Tensor]:
        """The norm of each gradient, whole. Every rank that holds a part must call it."""
        layouts = self._layouts(grads)
        alike: dict[tuple[str, ...], list[str]] = {}
        for name in grads:
            cut = tuple(axis for axis, layout in layouts.get(name, {}).items() if layout.is_shard)
            alike.setdefault(cut, []).append(name)
        found: dict[str, Tensor] = {}
        for cut, names in alike.items():
            own = torch.stack([_powers(grads[name], norm_type) for name in names])
            for axis in cut:
                own = _joined(own, self._axes[axis], norm_type)
            found |= dict(zip(names, own, strict=True))
        root = 1.0 if math.isinf(norm_type) else 1.0 / norm_type
        return {name: found[name] ** root for name in grads}

    def of_all(self, grads: Mapping[str, Tensor], norm_type: float) -> Tensor:
        """The norm of all gradients together, over all stages. Every rank must call it."""
        own = self.of_each(grads, norm_type)
        counted = [norm for name, norm in own.items() if self._counts(name)]
        dtype = counted[0].dtype if counted else torch.float64
        total = torch.zeros((), device=self._device, dtype=torch.float64)
        if counted:
            joined = torch.stack(counted).double()
            total = joined.max() if math.isinf(norm_type) else joined.pow(norm_type).sum()
        if self._pp.size > 1:
            total = _joined(total, self._pp, norm_type)
        root = 1.0 if math.isinf(norm_type) else 1.0 / norm_type
        return total.pow(root).to(dtype)


def _powers(grad: Tensor, norm_type: float) -> Tensor:
    if math.isinf(norm_type):
        return grad.abs().max() if grad.numel() else grad.new_zeros(())
    return grad.abs().pow(norm_type).sum()


def _joined(values: Tensor, group: AxisGroup, norm_type: float) -> Tensor:
    """Values of every rank of a group, added up, or their maximum for the infinite norm."""
    if group.size == 1:
        return values
    how = "max" if math.isinf(norm_type) else "sum"
    found = torch.ops._c10d_functional.all_reduce(values.contiguous(), how, group.group_name)
    return torch.ops._c10d_functional.wait_tensor(found)


def apply_rules(
    rules: Sequence[_Rule],
    norms: Norms,
    so_far: Callable[[], Mapping[str, Tensor]],
) -> Tensor | None:
    """Clip the gradients `so_far()` in place, rule by rule. Returns the norm that the first rule over
    a common norm found, or None. Every rank must call it.
    """
    first = None
    for rule in rules:
        grads = {name: grad for name, grad in so_far().items() if name in rule.names}
        clip = rule.clip
        if isinstance(clip, ClipValue):
            for grad in grads.values():
                grad.clamp_(-clip.limit, clip.limit)
        elif clip.each:
            for name, norm in norms.of_each(grads, clip.norm_type).items():
                grads[name].mul_((_limit(clip.limit, norm) / (norm + 1e-6)).clamp(max=1.0))
        else:
            norm = norms.of_all(grads, clip.norm_type)
            first = norm if first is None else first
            scale = (_limit(clip.limit, norm) / (norm + 1e-6)).clamp(max=1.0)
            for grad in grads.values():
                grad.mul_(scale)
    return first


def _limit(limit: _Limit, norm: Tensor) -> float:
    if not callable(limit):
        return limit
    found = limit(float(norm))
    if isinstance(found, Tensor):
        found = float(found)
    if (
        not isinstance(found, int | float)
        or isinstance(found, bool)
        or math.isnan(found)
        or found < 0
    ):
        raise AutoparError(
            f"the function of ClipNorm returned {shown(found)} for the norm {float(norm):g}: it returns the largest norm, a number of at "
            "least 0, or math.inf not to clip"
        )
    return float(found)
