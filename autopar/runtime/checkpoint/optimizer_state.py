"""Converts the state of any torch optimizer to and from parameter names, independently of order and
shards in a plan.

State with the shape of its parameter is sharded like the parameter. State with fewer dims
(Adafactor's rows and columns) is sharded like the parameter on the common dims. Scalar tensors, and
all state of parameters that this rank holds whole, are whole. State that is not a tensor is stored
as plain values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from autopar.errors import AutoparError
from autopar.runtime.state.inner_optimizers import (
    attributes,
    set_attributes,
    set_state,
    states,
)
from autopar.runtime.state.optimizer_trials import needs_closure
from autopar.runtime.state.optimizers import is_elementwise, step
from autopar.runtime.state.pieces import Held, Pieces, local_part, whole_pieces

Groups = list[dict[str, Any]]
"""Parameter groups: the `names` of the parameters in each group, and its `options` (learning rate,
...).
"""


def state_tensors(
    optimizer: torch.optim.Optimizer, held: Mapping[str, Held]
) -> dict[str, dict[str, Pieces]]:
    """The tensors of the optimizer's state on this rank: parameter -> key -> pieces. `held` has
    this rank's parts of the parameters, which the optimizer trains, by name.
    """
    kind = type(optimizer).__name__
    return {
        name: {
            key: _pieces(held[name], value, f"{kind}'s {key} of {name}")
            for key, value in found.items()
            if isinstance(value, Tensor)
        }
        for name, found in _state(optimizer, held).items()
    }


def state_values(
    optimizer: torch.optim.Optimizer, held: Mapping[str, Held]
) -> dict[str, dict[str, Any]]:
    """The other values of the optimizer's state: parameter -> key -> number, None or similar.
    `held` as for `state_tensors`.
    """
    return {
        name: {key: value for key, value in found.items() if not isinstance(value, Tensor)}
        for name, found in _state(optimizer, held).items()
    }


def _state(optimizer: torch.optim.Optimizer, held: Mapping[str, Held]) -> dict[str, dict[str, Any]]:
    names = {id(part.tensor): name for name, part in held.items()}
    return {names[id(parameter)]: found for parameter, found in states(optimizer).items()}


def _pieces(held: Held, value: Tensor, what: str) -> Pieces:
    """A tensor of the optimizer's state as this rank's pieces of the whole tensor. It is cut like
    its parameter `held`, except for dims that have size 1 or that it has whole. Raises
    AutoparError, which names it `what`, if it is a pending sum over ranks or its shape does not
    follow the parameter's.
    """
    local, parameter = local_part(value), local_part(held.tensor)
    if value.dim() == 0 or not held.cuts:
        return whole_pieces(local)
    if any(placement.is_partial() for placement in getattr(value, "placements", ())):
        raise AutoparError(
            f"a checkpoint cannot hold {what}: it is a sum that ranks have not added up"
        )
    if value.dim() != parameter.dim():
        raise AutoparError(
            f"a checkpoint cannot hold {what}: its shape {tuple(value.shape)} is not that of a parameter {held.shape}"
        )
    shape, positions = [], []
    for dim, (size, extent) in enumerate(zip(value.shape, local.shape, strict=True)):
        if size == held.tensor.shape[dim] and extent == parameter.shape[dim]:
            positions.append(held.positions(dim))
        elif size == held.tensor.shape[dim]:
            positions.append(held.gathered_positions(dim))
        elif size == 1:
            positions.append(torch.arange(1))
        else:
            raise AutoparError(
                f"a checkpoint cannot hold {what}: its shape {tuple(value.shape)} is not that of a parameter {held.shape}"
            )
        shape.append(1 if size == 1 else held.shape[dim])
    return Pieces(tuple(shape), local, tuple(positions))


# -------------------------------------------------------------------------------------------------------------------- groups


def group_options(optimizer: torch.optim.Optimizer, held: Mapping[str, Held]) -> Groups:
    """For each parameter group, in order: "names" of the parameters that this rank saves, and
    "options" (learning rate, ...). Parameters without elements are left out.
    """
    names = {id(part.tensor): name for name, part in held.items()}
    return [
        {
            "names": [names[id(p)] for p in group["params"] if id(p) in names],
            "options": {
                key: value for key, value in group.items() if key not in ("params", "param_names")
            },
        }
        for group in optimizer.param_groups
    ]


def merged_groups(ranks: Iterable[Groups]) -> Groups:
    """The combined groups of all ranks, which may hold different parameters. Options come from the
    first rank with parameters in the group.
    """
    found: Groups = []
    for groups in ranks:
        for index, group in enumerate(groups):
            if index == len(found):
                found.append({"names": [], "options": group["options"]})
            if not found[index]["names"]:
                found[index]["options"] = group["options"]
            found[index]["names"] += [
                name for name in group["names"] if name not in set(found[index]["names"])
            ]
    return found


def matching_options(mine: Groups, saved: Groups) -> list[dict[str, Any]]:
    """For each of this rank's groups, the options of the saved group with the same parameters. A
    group without parameters takes those of the saved group at its place, or {}. Raises AutoparError
    if a parameter was not saved, or if one group has parameters of several saved groups.
    """
    group_of = {name: index for index, group in enumerate(saved) for name in group["names"]}
    options = []
    for index, group in enumerate(mine):
        if lost := [name for name in group["names"] if name not in group_of]:
            raise AutoparError(f"the checkpoint's optimizer did not train {lost[0]}: " + _REMEDY)
        found = {group_of[name] for name in group["names"]}
        if len(found) > 1:
            raise AutoparError(
                f"parameter group {index} of the optimizer has parameters of the checkpoint's groups {', '.join(map(str, sorted(found)))} "
                f"(of {len(saved)}): make the same groups, or " + _REMEDY
            )
        if found or index < len(saved):
            options.append(saved[found.pop() if found else index]["options"])
        else:
            options.append({})
    return options


def set_options(optimizer: torch.optim.Optimizer, options: list[dict[str, Any]]) -> None:
    """Set the options of each group of the optimizer, in order. Options that are tensors keep their
    tensor and take the new value.
    """
    for group, new in zip(optimizer.param_groups, options, strict=True):
        for key, value in new.items():
            if isinstance(group.get(key), Tensor):
                group[key].fill_(float(value))
            else:
                group[key] = value


# ------------------------------------------------------------------------------------------------------------------- loading

_REMEDY = "load parameters alone with engine.load(..., optimizer=False)"


def room_for(
    optimizer: torch.optim.Optimizer,
    held: Mapping[str, Held],
    saved: Mapping[str, Mapping[str, Tensor]],
    values: dict[str, dict[str, Any]],
) -> dict[str, dict[str, Pieces]]:
    """State tensors of the optimizer into which a checkpoint can be loaded, as pieces: parameter ->
    key -> pieces. The optimizer allocates missing ones itself.

    `saved` has the saved state tensors, which may be on the meta device, by parameter and key;
    `values` the saved state that is not a tensor. The state of a parameter without saved state is
    removed. Raises AutoparError, without changing the optimizer, if its state has other keys.
    """
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    parameters = {name: part.tensor for name, part in held.items() if id(part.tensor) in trained}
    wanted = {name: {*saved.get(name, {}), *values.get(name, {})} for name in parameters}
    found = states(optimizer)
    before = {name: found[p] for name, p in parameters.items() if p in found}
    if needs_closure(optimizer):  # its state has no fixed shapes; parameters are whole
        for name, parameter in parameters.items():
            set_state(
                optimizer, parameter, _like(saved.get(name, {}), parameter) | values.get(name, {})
            )
        return state_tensors(optimizer, held)
    _fill_state(
        optimizer, [p for name, p in parameters.items() if wanted[name] and name not in before]
    )
    found = states(optimizer)
    for name, parameter in parameters.items():
        own = found.get(parameter, {})
        if not wanted[name]:
            set_state(optimizer, parameter, {})
        elif wanted[name] != set(own) or not all(
            isinstance(own[key], Tensor) for key in saved.get(name, ())
        ):
            for other, p in parameters.items():
                set_state(optimizer, p, before.get(other, {}))
            raise AutoparError(
                f"the checkpoint's optimizer has {_listed(wanted[name])} for {name}; this {type(optimizer).__name__} has "
                f"{_listed(set(own))}: use the optimizer and options that it was saved with, or "
                + _REMEDY
            )
    return state_tensors(optimizer, held)


def _like(saved: Mapping[str, Tensor], parameter: Tensor) -> dict[str, Any]:
    """New tensors like the saved ones: numbers on the CPU, others on the parameter's device."""
    return {
        key: torch.empty_like(tensor, device=parameter.device if tensor.dim() else "cpu")
        for key, tensor in saved.items()
    }


def _listed(keys: set[str]) -> str:
    return ", ".join(sorted(keys)) or "no state"


def _fill_state(optimizer: torch.optim.Optimizer, parameters: list[Tensor]) -> None:
    """Run an optimizer step of these parameters with zero gradients and a learning rate of zero,
    which allocates their state. If an optimizer that is not known to be element-wise changes
    parameters anyway, the change is undone.
    """
    if not parameters:
        return
    before = (
        []
        if is_elementwise(optimizer)
        else [local_part(parameter).clone() for parameter in parameters]
    )
    rates = [group.get("lr") for group in optimizer.param_groups]
    counts = attributes(optimizer)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if rate is not None:
            group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0

    def closure() -> Tensor:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        return torch.zeros(())

    closure()
    try:
        step(optimizer)
    except (TypeError, AssertionError, RuntimeError, ValueError):  # as of SAM, without its closure
        closure()
        step(optimizer, closure)
    for parameter in parameters:
        parameter.grad = None
    for parameter, value in zip(parameters, before, strict=False):
        local_part(parameter).copy_(value)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if rate is not None:
            group["lr"] = rate
    set_attributes(optimizer, counts)


def set_values(
    optimizer: torch.optim.Optimizer, held: Mapping[str, Held], values: dict[str, dict[str, Any]]
) -> None:
    """Set the optimizer's state that is not a tensor: `values` is parameter -> key -> value.
    Parameters that this rank does not hold are ignored.
    """
    found = states(optimizer)
    for name, own in values.items():
        if name in held and own:
            parameter = held[name].tensor
            moved = tree_map_only(Tensor, partial(_moved, parameter.device), own)
            set_state(optimizer, parameter, found.get(parameter, {}) | moved)


def _moved(device: torch.device, tensor: Tensor) -> Tensor:
    return tensor.to(device)
