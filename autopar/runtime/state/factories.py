"""Calls the user's function from parameters to an optimizer, and checks what it did with them.

The function gets the parameters of the whole model, in the order of the traced model, on every
rank. Under a pipeline those of other stages are placeholders without memory, which are removed
afterwards. Groups therefore have the same order on every rank, and the same options.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import AutoparError
from autopar.ir.traced import ParameterSpec
from autopar.runtime.state.pieces import local_part

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

_NAMED = ("named_parameters", "named_params", "named")
"""Names of a factory's first argument with which it gets pairs of name and parameter."""


@dataclass(frozen=True, slots=True)
class Built:
    """What a factory made: the optimizer, the names of the parameters in each of its groups, and
    the gradient hooks that it set, by name of the parameter.
    """

    optimizer: torch.optim.Optimizer
    groups: tuple[tuple[str, ...], ...]
    hooks: Mapping[str, Mapping[int, Callable[[Tensor], Tensor | None]]]


def built(factory: OptimizerFactory, trained: Mapping[str, nn.Parameter]) -> Built:
    """Call the factory on `trained`, the parameters of the whole model by name. Raises AutoparError
    if it returns no optimizer, or one of other tensors, or sets hooks that cannot run.
    """
    optimizer = _called(factory, trained)
    names = {id(parameter): name for name, parameter in trained.items()}
    check_groups(optimizer, names)
    groups = tuple(
        tuple(names[id(parameter)] for parameter in group["params"])
        for group in optimizer.param_groups
    )
    return Built(optimizer, groups, _taken_hooks(trained))


def parameter_attributes(
    model: nn.Module, specs: Mapping[str, ParameterSpec]
) -> dict[str, dict[str, Any]]:
    """The attributes that the user set on trained parameters of the model, such as
    `_no_weight_decay`, by name of the parameter.
    """
    held = dict(model.named_parameters(remove_duplicate=False))
    return {
        name: dict(vars(held[name]))
        for name, spec in specs.items()
        if spec.trainable and name in held
    }


def takes_names(factory: OptimizerFactory) -> bool:
    """Whether the factory's first argument is called as in `_NAMED`."""
    try:
        first = next(iter(inspect.signature(factory).parameters), "")
    except (TypeError, ValueError):  # a builtin
        return False
    return first in _NAMED


def _called(
    factory: OptimizerFactory, trained: Mapping[str, nn.Parameter]
) -> torch.optim.Optimizer:
    named = takes_names(factory)
    try:
        optimizer = factory(list(trained.items()) if named else list(trained.values()))  # type: ignore[arg-type]
    except (TypeError, ValueError, AttributeError) as error:
        if named or "unpack" not in str(error):
            raise
        raise AutoparError(
            f"the optimizer factory takes names apart ({error}), and it is given parameters: call its argument named_parameters, as in "
            "def factory(named_parameters), and it gets pairs of name and parameter"
        ) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        parts: list[Any] = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
        several = any(hasattr(part, "step") for part in parts)
        way = (
            "derive a class from torch.optim.Optimizer whose param_groups are those of all, and whose step calls theirs"
            if several
            else "pass, for example, lambda parameters: torch.optim.AdamW(parameters, lr=3e-4)"
        )
        raise AutoparError(
            f"the optimizer factory returned a {type(optimizer).__name__}, not a torch.optim.Optimizer: {way}"
        )
    return optimizer


def check_groups(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
    """Raise AutoparError if the optimizer holds tensors that the engine does not train. `names` has
    the names of those that it trains, by id().
    """
    foreign = sum(id(p) not in names for group in optimizer.param_groups for p in group["params"])
    if foreign:
        raise AutoparError(
            f"the optimizer holds {foreign} tensors that the engine does not train: build it from the parameters that the "
            "function is given, not from model.parameters(). If its argument is called named_parameters, it gets their names too; "
            "engine.add_param_group adds a group by names"
        )


def _taken_hooks(
    trained: Mapping[str, nn.Parameter],
) -> dict[str, Mapping[int, Callable[[Tensor], Tensor | None]]]:
    """Take the hooks of `Tensor.register_hook` off the parameters, and return them by name. Their
    handles still remove them. Raises AutoparError for hooks after accumulation.
    """
    found: dict[str, Mapping[int, Callable[[Tensor], Tensor | None]]] = {}
    for name, parameter in trained.items():
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise AutoparError(
                f"the optimizer factory set register_post_accumulate_grad_hook on {name}: gradients are sums over micro-batches and ranks, "
                "which are complete at the end of a step alone. Use engine.register_gradient_hook(name, hook), which gets the whole "
                "gradient then; for an optimizer that steps in such hooks, pass the optimizer itself as optimizer="
            )
        hooks: Any = parameter._backward_hooks
        if hooks:
            parameter._backward_hooks = None
            found[name] = hooks
    return found


def keep(optimizer: torch.optim.Optimizer, kept: Iterable[Tensor]) -> None:
    """Remove from the optimizer's groups, and from its state, all parameters but `kept`."""
    kept_ids = {id(parameter) for parameter in kept}
    for group in optimizer.param_groups:
        stays = [id(parameter) in kept_ids for parameter in group["params"]]
        for parameter, stay in zip(group["params"], stays, strict=True):
            if not stay:
                optimizer.state.pop(parameter, None)  # made by the constructor
        for key in ("params", "param_names"):
            if key in group:
                group[key][:] = [x for x, stay in zip(group[key], stays, strict=True) if stay]


def replace_parameters(optimizer: torch.optim.Optimizer, new: Mapping[int, nn.Parameter]) -> None:
    """Put other parameters in place of those of the optimizer, by id(), with their state as plain
    local tensors.
    """
    for group in optimizer.param_groups:
        for place, old in enumerate(group["params"]):
            group["params"][place] = own = new.get(id(old), old)
            if own is not old and (state := optimizer.state.pop(old, None)) is not None:
                optimizer.state[own] = {
                    key: local_part(value) if isinstance(value, Tensor) else value
                    for key, value in state.items()
                }
