"""Notices what the user does to the model, or to the optimizer's parameters, after `parallelize`.

The engine trains tensors of its own, so that such changes have no effect. They are looked for at
the start of each step, by identities, version counters and flags. Writes through `.data` change
none of these: a few elements of each tensor on the CPU show them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from autopar.errors import AutoparError, shown
from autopar.runtime.ranks.agreement import say
from autopar.runtime.state.samples import Samples

Trains = Callable[[str], bool | None]
"""The type of a function that says whether the engine trains a parameter now, by the model's name;
None for one that it never trains.
"""
_SIMPLE = (bool, int, float, complex, str)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True, slots=True)
class _Seen:
    """A tensor of the model as it was: where it is, and what changes when it does."""

    name: str
    module: ReferenceType[nn.Module]
    registry: str
    key: str
    tensor: ReferenceType[Tensor]
    version: int
    address: int
    trains: bool
    device: torch.device
    dtype: torch.dtype
    has_grad: bool

    def same(self, now: Tensor) -> bool:
        return (
            now is self.tensor()
            and now._version == self.version
            and now.requires_grad == self.trains
            and now.data_ptr() == self.address
            and not _hooked(now)
        )

    def as_now(self, now: Tensor) -> _Seen:
        """The same place with the tensor that is there now."""
        return replace(
            self,
            tensor=ref(now),
            version=now._version,
            address=now.data_ptr(),
            trains=now.requires_grad,
            device=now.device,
            dtype=now.dtype,
        )


def _hooked(tensor: Tensor) -> bool:
    """Whether hooks on the gradient of a tensor are set."""
    return bool(tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None))


@dataclass(frozen=True, slots=True)
class _Attributes:
    """What is compared of a module: numbers and texts that are its attributes, its children, its
    number of hooks, its class, a forward of its own, and its mode.
    """

    path: str
    module: ReferenceType[nn.Module]
    keys: tuple[str, ...]
    values: tuple[Any, ...]
    children: tuple[tuple[str, int], ...]
    hooks: int
    kind: type
    forward: Any
    training: bool


class UserChanges:
    """Compares the model with how `parallelize` read it. It keeps no tensor of the model alive."""

    def __init__(self, model: nn.Module) -> None:
        self._sums: dict[str, tuple[float, ...]] = {}
        self._told: set[str] = set()
        self._tensors: list[_Seen] = []
        self._modules: list[_Attributes] = []
        for path, module in model.named_modules():
            prefix = f"{path}." if path else ""
            for registry in ("_parameters", "_buffers"):
                for key, tensor in getattr(module, registry).items():
                    if tensor is not None:
                        self._tensors.append(_seen(prefix + key, module, registry, key, tensor))
            self._modules.append(_attributes(path, module))
        self._samples = Samples([t for seen in self._tensors if (t := seen.tensor()) is not None])

    def forget(self) -> None:
        """Look at the model no longer."""
        self._tensors, self._modules, self._samples = [], [], Samples([])

    def given(self, values: Mapping[str, Tensor]) -> None:
        """Remember whole tensors that the engine holds, by the model's names: the same values in the
        model are no change that is lost.
        """
        for seen in self._tensors:
            if seen.name in values:
                self._sums[seen.name] = tensor_sums(values[seen.name].detach().to(seen.dtype))

    def check(self, trains: Trains, in_step: bool) -> None:
        """Raise AutoparError if the user has changed the model, so that it has no effect. An attribute
        that was changed is told once, and so is a mode before a training step (`in_step`).
        """
        tensors: list[Tensor | None] = []
        for place, seen in enumerate(self._tensors):
            module = seen.module()
            now = None if module is None else getattr(module, seen.registry).get(seen.key)
            if module is not None and (now is None or not seen.same(now)):
                self._accept(place, seen, now, trains)
            if now is not None and seen.registry == "_parameters" and now.grad is not None:
                self._tell_gradient(seen)
            tensors.append(now)
        for place in self._samples.changed(tensors):
            self._accept(place, self._tensors[place], tensors[place], trains, written=True)
        for own in self._modules:
            module = own.module()
            if module is not None:
                self._check_module(own, module)
                if in_step and module.training != own.training:
                    self._tell_mode(own, module)

    def _accept(
        self, place: int, seen: _Seen, now: Tensor | None, trains: Trains, written: bool = False
    ) -> None:
        """Take a changed tensor as seen from now on. Raises AutoparError if the change is lost.
        `written`: its elements changed.
        """
        name = seen.name
        if now is None:
            raise AutoparError(_lost(f"{name} was removed", "call parallelize again"))
        if _hooked(now):
            raise AutoparError(
                _lost(
                    f"a gradient hook was set on {name}",
                    f'engine.register_gradient_hook("{name}", hook) sets one',
                )
            )
        if seen.registry == "_parameters" and now.requires_grad != seen.trains:
            holds = trains(name)
            if holds is not None and now.requires_grad != holds:
                way = "unfreeze" if now.requires_grad else "freeze"
                raise AutoparError(
                    _lost(
                        f"{name}.requires_grad was set to {now.requires_grad}",
                        f'engine.{way}("{name}") does it',
                    )
                )
            if holds is None and now.requires_grad:
                raise AutoparError(
                    _lost(
                        f"{name}.requires_grad was set to True",
                        "the plan has no gradient for it: let it require one before parallelize, and hold it with engine.freeze until it "
                        "is to be trained",
                    )
                )
        new = now is not seen.tensor()
        written |= new or now._version != seen.version or now.data_ptr() != seen.address
        elsewhere = (now.device, now.dtype) != (seen.device, seen.dtype)
        moved = now.is_meta or (elsewhere and (new or now._version == seen.version))
        if written and not moved and self._sums.get(name) != tensor_sums(now.detach()):
            raise AutoparError(
                _lost(
                    f"{name} was changed in the model",
                    f'engine.set("{name}", value) sets one tensor, and engine.load_state_dict(model.state_dict()) all of them',
                )
            )
        self._tensors[place] = seen.as_now(now)
        self._samples.remember(place, now)

    def _check_module(self, own: _Attributes, module: nn.Module) -> None:
        held = vars(module)
        if own.keys:
            try:
                now = itemgetter(*own.keys)(held)
            except KeyError:
                now = None
            now = (now,) if len(own.keys) == 1 else now
            if now != own.values:
                self._tell_attribute(own, held)
        children = tuple((key, id(child)) for key, child in module._modules.items())
        if children != own.children:
            old = dict(own.children)
            key = next(
                (k for k, child in children if old.get(k) != child),
                next((k for k in old if k not in dict(children)), ""),
            )
            name = f"{own.path}.{key}" if own.path else key
            raise AutoparError(
                _lost(f"module {name} was replaced, added or removed", "call parallelize again")
            )
        if type(module) is not own.kind or held.get("forward") is not own.forward:
            raise AutoparError(
                _lost(
                    f"forward of {own.path or 'the model'} was replaced", "call parallelize again"
                )
            )
        if sum(len(held[hooks]) for hooks in _HOOKS) != own.hooks:
            self._tell(
                own.path,
                f"a hook on {own.path or 'the model'} was set or removed after parallelize, which has no effect on the engine: set forward "
                "hooks before parallelize, and use engine.register_gradient_hook for gradients",
            )

    def _tell_attribute(self, own: _Attributes, held: Mapping[str, Any]) -> None:
        for key, value in zip(own.keys, own.values, strict=True):
            if held.get(key, None) != value:
                name = f"{own.path}.{key}" if own.path else key
                self._tell(
                    name,
                    f"{name} was {shown(value)} when parallelize read the model, and is {shown(held.get(key))} now, which has no effect: "
                    "make it a buffer (register_buffer) before parallelize, and engine.set changes it; or call parallelize again",
                )

    def _tell_mode(self, own: _Attributes, module: nn.Module) -> None:
        """Say once for all modules that a mode was changed."""
        path = f"{own.path}." if own.path else "model."
        self._tell(
            "mode",
            f"{path}training is {module.training}, and was {own.training} when parallelize read the model. engine.step runs the model as "
            "it was then, and eval_step evaluates it: set modes, by train() and eval(), before parallelize",
        )

    def _tell_gradient(self, seen: _Seen) -> None:
        """Say once for all parameters that one has a gradient."""
        if not seen.has_grad:
            self._tell(
                "gradient",
                f"{seen.name}.grad was set in the model after parallelize, which has no effect on the engine: engine.step computes "
                "gradients, and engine.register_gradient_hook changes them",
            )

    def _tell(self, what: str, text: str) -> None:
        if what not in self._told:
            self._told.add(what)
            say(text)


def _seen(name: str, module: nn.Module, registry: str, key: str, tensor: Tensor) -> _Seen:
    return _Seen(
        name=name,
        module=ref(module),
        registry=registry,
        key=key,
        tensor=ref(tensor),
        version=tensor._version,
        address=tensor.data_ptr(),
        trains=tensor.requires_grad,
        device=tensor.device,
        dtype=tensor.dtype,
        has_grad=registry == "_parameters" and tensor.grad is not None,
    )


def _attributes(path: str, module: nn.Module) -> _Attributes:
    simple = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, _SIMPLE) and not key.startswith("_") and key != "training"
    }
    children = tuple((key, id(child)) for key, child in module._modules.items())
    hooks = sum(len(vars(module)[name]) for name in _HOOKS)
    return _Attributes(
        path=path,
        module=ref(module),
        keys=tuple(simple),
        values=tuple(simple.values()),
        children=children,
        hooks=hooks,
        kind=type(module),
        forward=vars(module).get("forward"),
        training=module.training,
    )


def tensor_sums(tensor: Tensor) -> tuple[float, ...]:
    """Two sums over a tensor's elements, which differ where tensors differ, but for rare cases."""
    if tensor.is_meta:
        return ()
    wide = tensor.to(torch.float64 if not tensor.is_complex() else torch.complex128).abs()
    signed = tensor.to(torch.float64) if not tensor.is_complex() else tensor.real.double()
    return float(signed.sum()), float(wide.square().sum())


def _lost(what: str, way: str) -> str:
    return (
        f"{what} after parallelize, which has no effect: the engine trains tensors of its own. Instead, {way}. "
        "If the engine need not know, engine.forget_model() stops looking at the model"
    )


def check_masters(groups: Collection[Mapping[str, Any]], names: Mapping[int, str]) -> None:
    """Raise AutoparError if the user has changed the optimizer's parameters in a way that has no
    effect. `names` has the names of masters by id().
    """
    for group in groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise AutoparError(
                    f"the optimizer has a parameter of shape {tuple(parameter.shape)} that the engine does not train, as if "
                    "from add_param_group(model's parameters). That has no effect: "
                    "engine.add_param_group adds a group by the names of parameters"
                )
            if not parameter.requires_grad:
                name = names[id(parameter)]
                raise AutoparError(
                    f"requires_grad_(False) on the optimizer's parameter {name} does not hold it under every plan: use "
                    f'engine.freeze("{name}")'
                )
            if parameter._backward_hooks:
                name = names[id(parameter)]
                raise AutoparError(
                    f"a hook on the optimizer's parameter {name} does not see the gradient of the batch: use "
                    f'engine.register_gradient_hook("{name}", hook)'
                )
