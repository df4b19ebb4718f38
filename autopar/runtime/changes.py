"""Methods of the engine with which users change what it trains, between steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from autopar.errors import AutoparError, shown
from autopar.runtime.checkpoint.plain_state import load_plain, plain_state
from autopar.runtime.ranks.agreement import from_all
from autopar.runtime.ranks.process_groups import call_group
from autopar.runtime.state.averages import Averages, Decay, check_decay
from autopar.runtime.state.gradient_hooks import Hook, HookHandle
from autopar.runtime.state.optimizers import is_elementwise
from autopar.runtime.state.user_changes import tensor_sums
from autopar.runtime.updates import Updates

_T = TypeVar("_T")


def _told(value: torch.Tensor | float) -> str:
    """A value as text that differs, but for rare cases, where values do."""
    if not isinstance(value, torch.Tensor):
        return repr(float(value))
    if value.numel() == 1:
        return repr(value.item())
    one, two = tensor_sums(value.detach())
    return f"tensor with the sum {one!r} and the sum of squares {two!r}"


class Changeable(Updates):
    """The methods of an Engine that change tensors, and what is trained. Every rank must call each,
    in the same order, with the same arguments.
    """

    def set(self, name: str, value: torch.Tensor | float) -> None:
        """Set a parameter or buffer, as `model.NAME.copy_(value)` does on one device.

        The state of the optimizer stays as it is.

        Args:
            name: its name in the model.
            value: a whole tensor of its shape, or a number for all elements; equal on all ranks.

        Raises:
            AutoparError: on every rank, if forward reads no such tensor, or `value` has another
                shape, or differs between ranks. An attribute of Python cannot be set.
        """
        with self._together("set"):
            checked = self._agreed_on({name: value})
            self._write(checked)

    def load_state_dict(self, state: Mapping[str, torch.Tensor], strict: bool = True) -> None:
        """Set parameters and buffers to whole tensors, by the model's own names, as
        `model.load_state_dict` does on one device. The state of the optimizer stays as it is. Values
        of rank 0 count.

        Args:
            state: whole tensors, as `model.state_dict()` and `full_state_dict` have them.
            strict: whether to refuse missing and unknown names; otherwise they are left out.

        Raises:
            AutoparError: on every rank, for missing or unknown names, or another shape.
        """
        with self._together("load_state_dict"):
            self._write(self._agreed_on(state, strict))

    def _agreed_on(self, state: Mapping[str, Any], strict: bool | None = None) -> dict[str, Any]:
        """The values of `state` by first names, checked on every rank. `strict` as in
        `load_state_dict`; None for a single name.
        """
        found: dict[str, Any] = {}

        def check() -> list[str]:
            known = state if strict is None else self._known(state, strict)
            for name in known:
                first = self._names.first(name)
                value, shape = state[name], self._all_specs[first].shape
                if isinstance(value, torch.Tensor) and tuple(value.shape) != tuple(shape):
                    raise AutoparError(
                        f"{name} has shape {tuple(shape)}, and the value {tuple(value.shape)}"
                    )
                if not isinstance(value, torch.Tensor | float | int | bool):
                    raise AutoparError(f"{name} takes a tensor or a number, not {shown(value)}")
                if isinstance(value, torch.Tensor) and value.is_meta:
                    raise AutoparError(f"the value for {name} is on the meta device, without data")
                self._names.check_number(first, value)
                found.setdefault(first, value)
            if strict is None:
                return [f"{first} = {_told(value)}"]
            return sorted(found)

        names = self._alike("set" if strict is None else "load_state_dict", check)
        return {name: found[name] for name in (found if strict is None else names)}

    def _known(self, state: Mapping[str, Any], strict: bool) -> list[str]:
        if not isinstance(state, Mapping):
            raise AutoparError(
                f"a state dict is a mapping from names to tensors, not {shown(state)}"
            )
        first = {
            alias: name for name, spec in self._all_specs.items() for alias in (name, *spec.aliases)
        }
        known = [name for name in state if name in first]
        unknown = [name for name in state if name not in first and name not in self._names.unread]
        given = {first[name] for name in known}
        missing = [name for name in self.saved_shapes() if name not in given]
        if strict and (unknown or missing):
            words = [f"unknown: {', '.join(unknown[:3])}"] if unknown else []
            words += [f"missing: {', '.join(missing[:3])}"] if missing else []
            raise AutoparError(
                f"the state dict does not fit the model ({len(missing)} names are missing, {len(unknown)} unknown; {'; '.join(words)}): "
                "give that of this model, or strict=False"
            )
        return known

    def _write(self, values: Mapping[str, Any]) -> None:
        """Set tensors, by first names, to the values that rank 0 has."""
        self._for_steps = None  # buffers may change
        own = self.parameters
        given: dict[str, torch.Tensor] = {}
        for name, value in values.items():
            spec = self._all_specs[name]
            dtype = getattr(torch, spec.dtype)
            if spec.trainable and dtype.is_floating_point:
                dtype = own.holding.master_dtype
            if not isinstance(value, torch.Tensor):
                value = torch.full(spec.shape, value, dtype=dtype, device=self.device)
            whole = value.detach().to(self.device, dtype, copy=True).contiguous()
            if dist.is_initialized() and dist.get_world_size() > 1:
                dist.broadcast(whole, src=0)
            if name in own.leaves:
                own.write(name, whole)
            given |= {alias: whole for alias in (name, *spec.aliases)}
        own.publish([name for name in values if name in own.trained])
        self._note_masters()
        self._user_changes.given(given)

    # ------------------------------------------------------------------------------------------------------ what is trained

    def freeze(self, *names: str) -> None:
        """Train these parameters no longer, until `unfreeze`.

        They then have no gradient, as after `requires_grad_(False)` on one device: no update, no
        weight decay, no change of momentum, no part in clipping. Backward computes their gradients
        all the same. A checkpoint does not hold what is frozen.

        Args:
            names: names of parameters or modules, or patterns such as `layers.*.bias`.

        Raises:
            AutoparError: a name matches no trained parameter.
        """
        with self._together("freeze"):
            self._frozen |= set(self._alike("freeze", lambda: self._named(names)))

    def unfreeze(self, *names: str) -> None:
        """Train these parameters again. Arguments and errors are those of `freeze`."""
        with self._together("unfreeze"):
            self._frozen -= set(self._alike("unfreeze", lambda: self._named(names)))

    @property
    def frozen(self) -> tuple[str, ...]:
        """The names of frozen parameters, in the order of the model."""
        return tuple(name for name in self._names.trained if name in self._frozen)

    def _alike(self, method: str, checked: Callable[[], _T]) -> _T:
        """`checked()`, if all ranks have the same. Raises AutoparError on every rank if not, or if it
        raises that on one.
        """
        ranks = from_all(call_group(), checked)
        if other := [rank for rank, found in enumerate(ranks) if found != ranks[0]]:
            raise AutoparError(
                f"ranks 0 and {other[0]} gave engine.{method} different arguments: {shown(ranks[0])} and {shown(ranks[other[0]])}"
            )
        return ranks[0]

    def _named(self, patterns: tuple[str, ...]) -> list[str]:
        if not patterns:
            raise AutoparError("give at least one name of a parameter, or '*' for all of them")
        return self._names.matching(patterns, self._names.trained)

    def add_param_group(self, *names: str, **options: Any) -> None:
        """Add a parameter group of parameters that the optimizer does not train yet.

        Args:
            names: names of parameters or modules, or patterns such as `layers.*.bias`.
            options: those of the group, such as `lr`.

        Raises:
            AutoparError: a parameter is in a group already, or the optimizer is not element-wise.
        """

        def checked() -> tuple[list[str], list[str]]:
            members = self._named(names)
            if not is_elementwise(self.optimizer):
                raise AutoparError(
                    f"{type(self.optimizer).__name__} may look at whole matrices, which are laid out when it is made: put all parameters "
                    "into groups in the optimizer's factory, and hold them with engine.freeze"
                )
            twice = [name for group in self._updating.groups for name in group if name in members]
            if twice:
                raise AutoparError(
                    f"{twice[0]} is in a parameter group already: change the options of that group in engine.optimizer.param_groups"
                )
            return members, [f"{key}={value}" for key, value in sorted(options.items())]

        with self._together("add_param_group"):
            members, _ = self._alike("add_param_group", checked)
            masters = self.parameters.masters
            held = [masters[name] for name in members if name in masters]
            self.optimizer.add_param_group({"params": held} | options)
            self._updating = self._updating.with_group(members)

    def register_gradient_hook(self, names: str, hook: Hook, whole: bool = True) -> HookHandle:
        """Run a function on gradients, once a step, before clipping and the update.

        Gradients are then those of the whole batch: sums over its micro-batches and ranks, as after
        backward on one device. Hooks run in the order in which they were registered. Every rank that
        holds the parameter runs the hook, which must do the same on each.

        Args:
            names: the name of a parameter or a module, or a pattern such as `layers.*.bias`.
            hook: `hook(name, gradient)`. It returns another gradient of the same shape, or None. It
                may change the gradient in place.
            whole: whether the hook gets the gradient of the whole parameter, in the model's shape.
                False: this rank's part, without communication, for changes element by element.

        Returns:
            A handle whose `remove()` removes the hook.

        Raises:
            AutoparError: the names match no trained parameter, or `hook` is not a function.
        """

        def checked() -> list[str]:
            if not callable(hook):
                raise AutoparError(
                    f"hook is {shown(hook)}, not a function of a name and a gradient"
                )
            return [*self._named((names,)), f"whole={bool(whole)}"]

        with self._together("register_gradient_hook"):
            *members, _ = self._alike("register_gradient_hook", checked)
        return self._hooks.register(members, hook, whole)

    def forget_model(self) -> None:
        """Look no longer for changes of the model, which have no effect on the engine."""
        self._user_changes.forget()

    # -------------------------------------------------------------------------------------------------------------- averages

    def average(self, decay: Decay = 0.999, every: int = 1, buffers: bool = False) -> None:
        """From the next step on, keep an average of the weights over steps, as
        torch.optim.swa_utils.AveragedModel does. Checkpoints hold it.

        Args:
            decay: the weight of the old average (EMA), or a function from the number of updates to it.
                None: all steps weigh the same (SWA).
            every: the steps from one update of the average to the next.
            buffers: whether buffers are averaged too. Otherwise they are the present ones.

        Raises:
            AutoparError: a decay is not from 0 to 1, or `every` is below 1.
        """

        def checked() -> tuple[Any, int, bool]:
            check_decay(decay, every)
            return "a function" if callable(decay) else decay, every, buffers

        with self._together("average"):
            self._alike("average", checked)
            self.averages = Averages(self.parameters, decay, every, buffers)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """A block in which the averages of `average` are in place of the weights: for `eval_step`,
        `full_state_dict` and `export`. Raises AutoparError without averages.
        """
        own = self.averages
        if own is None or own.active:
            raise AutoparError(
                "engine.averaged() needs averages: call engine.average(decay) before the steps that they are taken of"
                if own is None
                else "this block of engine.averaged() is inside another one"
            )
        with self._together("averaged"):
            self._swap(own)
        try:
            yield
        finally:
            self._swap(own)

    def _swap(self, averages: Averages) -> None:
        averages.swap()
        self.parameters.publish()
        self._for_steps = None
        self._note_masters()

    # ------------------------------------------------------------------------------------------------- state of the optimizer

    def full_optimizer_state_dict(self) -> dict[str, Any]:
        """The whole state of the optimizer, as `state_dict()` of the same optimizer over the model's
        trained parameters has it on one device. Groups also have `param_names`. Tensors are on the CPU.
        The result is equal on every rank, each of which needs memory for the whole state.
        """
        with self._together("full_optimizer_state_dict"):
            return plain_state(self.optimizer, self.held(), self._updating.groups)

    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the whole state of an optimizer, as `state_dict()` of a plain torch optimizer has it.

        Args:
            state: the state dict, on every rank. Its parameters are in the order of the engine's
                groups, or have `param_names`.

        Raises:
            AutoparError: on every rank, if groups, parameters or shapes differ.
        """
        with self._together("load_optimizer_state_dict"):
            load_plain(self.optimizer, self.held(), self._updating.groups, state, self._names.first)
