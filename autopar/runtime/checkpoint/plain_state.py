"""The state of an optimizer as a plain torch optimizer has it on one device: whole tensors, by the
number of the parameter.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import AutoparError, shown
from autopar.runtime.checkpoint.optimizer_state import (
    group_options,
    merged_groups,
    room_for,
    set_options,
    set_values,
    state_tensors,
    state_values,
)
from autopar.runtime.ranks.agreement import from_all
from autopar.runtime.ranks.process_groups import call_group
from autopar.runtime.state.inner_optimizers import members
from autopar.runtime.state.pieces import Held, Pieces

GroupNames = Sequence[Sequence[str]]
"""For each parameter group, the names of its parameters, over all ranks."""


def plain_state(
    optimizer: torch.optim.Optimizer, held: Mapping[str, Held], groups: GroupNames
) -> dict[str, Any]:
    """The optimizer's state dict with whole tensors on the CPU. Every rank must call it."""
    _check_alone(optimizer)
    own = {
        name: {key: pieces.copied() for key, pieces in found.items()}
        for name, found in state_tensors(optimizer, held).items()
    }
    message = own, state_values(optimizer, held), group_options(optimizer, held)
    ranks: list[Any] = [message]
    if (group := call_group()) is not None:
        ranks = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, message, group=group)
    state: dict[str, dict[str, Any]] = {}
    for tensors, values, _ in ranks:
        for name, found in values.items():
            state.setdefault(name, {}).update(copy.deepcopy(found))
        for name, found in tensors.items():
            for key, pieces in found.items():
                room = state.setdefault(name, {})
                if not isinstance(room.get(key), Tensor):
                    room[key] = torch.zeros(pieces.shape, dtype=pieces.local.dtype)
                _put(room[key], pieces)
    options, numbers = merged_groups(own_groups for _, _, own_groups in ranks), count()
    found_groups: list[dict[str, Any]] = []
    by_number: dict[int, Any] = {}
    for names, saved in zip(groups, options, strict=True):
        places = [next(numbers) for _ in names]
        by_number |= {
            place: state[name] for place, name in zip(places, names, strict=True) if state.get(name)
        }
        kept = {key: value for key, value in saved["options"].items() if key != "param_names"}
        found_groups.append(kept | {"params": places, "param_names": list(names)})
    return {"state": by_number, "param_groups": found_groups}


def _check_alone(optimizer: torch.optim.Optimizer) -> None:
    if len(members(optimizer)) > 1:
        raise AutoparError(
            f"{type(optimizer).__name__} holds another optimizer, and plain state dicts of such classes differ: engine.save and "
            "engine.load keep the state of both"
        )


def _put(whole: Tensor, pieces: Pieces) -> None:
    for offset, view in pieces.boxes():
        room = whole
        for dim, start in enumerate(offset):
            room = room.narrow(dim, start, view.shape[dim])
        room.copy_(view)


def load_plain(
    optimizer: torch.optim.Optimizer,
    held: Mapping[str, Held],
    groups: GroupNames,
    state: Mapping[str, Any],
    first_name: Callable[[str], str],
) -> None:
    """Load such a state dict. `first_name` gives the first of a parameter's names. An error on one
    rank is raised on all. Every rank must call it.
    """
    from_all(call_group(), lambda: _load(optimizer, held, groups, state, first_name))


def _load(
    optimizer: torch.optim.Optimizer,
    held: Mapping[str, Held],
    groups: GroupNames,
    state: Mapping[str, Any],
    first_name: Callable[[str], str],
) -> None:
    _check_alone(optimizer)
    names = _names(groups, state, first_name)
    by_name = {names[number]: found for number, found in state["state"].items() if number in names}
    mine = {name: found for name, found in by_name.items() if name in held}
    tensors = {
        name: {key: value for key, value in found.items() if isinstance(value, Tensor)}
        for name, found in mine.items()
    }
    values = {
        name: {key: value for key, value in found.items() if not isinstance(value, Tensor)}
        for name, found in mine.items()
    }
    room = room_for(optimizer, held, tensors, values)
    for name, found in tensors.items():
        for key, whole in found.items():
            pieces = room[name][key]
            if tuple(whole.shape) != tuple(pieces.shape):
                raise AutoparError(
                    f"the optimizer's {key} of {name} has shape {tuple(whole.shape)}, and must have {tuple(pieces.shape)}: give the state "
                    "dict of this optimizer over the whole parameters of this model"
                )
            for offset, view in pieces.boxes():
                source = whole.detach()
                for dim, start in enumerate(offset):
                    source = source.narrow(dim, start, view.shape[dim])
                view.copy_(source)
    options = [
        {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for group in state["param_groups"]
    ]
    set_options(optimizer, options)
    set_values(optimizer, held, values)


def _names(
    groups: GroupNames, state: Mapping[str, Any], first_name: Callable[[str], str]
) -> dict[int, str]:
    """The name of each parameter of a state dict, by its number there."""
    if not isinstance(state, Mapping) or not {"state", "param_groups"} <= set(state):
        raise AutoparError(
            f"an optimizer's state dict has 'state' and 'param_groups'; this is {shown(state)}"
        )
    given = state["param_groups"]
    sizes, wanted = [len(group["params"]) for group in given], [len(group) for group in groups]
    if sizes != wanted:
        raise AutoparError(
            f"the state dict has parameter groups of {sizes} parameters, and the engine's optimizer {wanted}: make the same groups, over "
            "the parameters that require gradients"
        )
    found: dict[int, str] = {}
    for own, group in zip(groups, given, strict=True):
        named = group.get("param_names")
        names = list(own) if named is None else [first_name(name) for name in named]
        if set(names) != set(own):
            other = sorted(set(names) ^ set(own))[0]
            raise AutoparError(
                f"a parameter group of the state dict and that of the engine's optimizer differ in {other}: make the same groups"
            )
        found |= dict(zip(group["params"], names, strict=True))
    return found


def refuse_plain(optimizer: torch.optim.Optimizer, groups: GroupNames) -> None:
    """Make `optimizer.load_state_dict` refuse a state dict that is not one of this rank's optimizer,
    such as one of whole tensors where parameters are sharded.
    """
    load = optimizer.load_state_dict

    def checked(state: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        numbers = [n for group in state["param_groups"] for n in group["params"]]
        fits = len(numbers) == len(parameters)
        for number, parameter in zip(numbers, parameters, strict=False):
            for value in state["state"].get(number, {}).values():
                if isinstance(value, Tensor) and value.dim():
                    sharded = hasattr(value, "device_mesh") == hasattr(parameter, "device_mesh")
                    fits = fits and sharded and _fits(value, parameter)
        if not fits:
            raise AutoparError(
                f"engine.optimizer.load_state_dict takes the state of this rank's {len(parameters)} parameters as they are sharded here, "
                "and this is another state dict. engine.load_optimizer_state_dict takes one of whole tensors, as a plain torch optimizer "
                "has it, and engine.load a checkpoint"
            )

        load(state)

    setattr(optimizer, "load_state_dict", checked)  # noqa: B010  # a wrapper may lack torch's hooks


def _fits(value: Tensor, parameter: Tensor) -> bool:
    """Whether a state tensor can be one of the parameter: of its shape, or with dims of size 1."""
    return value.dim() != parameter.dim() or all(
        size in (1, other) for size, other in zip(value.shape, parameter.shape, strict=True)
    )
