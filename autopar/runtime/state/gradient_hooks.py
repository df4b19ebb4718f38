"""Hooks of the user on gradients, which run once a step, when gradients are sums over micro-batches
and ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from autopar.errors import AutoparError
from autopar.runtime.state.parameters import Parameters

Hook = Callable[[str, Tensor], Tensor | None]
"""A function of a parameter's name and its gradient. It returns another gradient, or None."""


@dataclass(frozen=True, slots=True, eq=False)
class _Registered:
    number: int
    names: frozenset[str]
    hook: Hook
    whole: bool


class HookHandle:
    """Removes a gradient hook: `handle.remove()`, or at the end of a `with` block."""

    def __init__(self, hooks: list[_Registered], own: _Registered) -> None:
        self._hooks, self._own = hooks, own

    def remove(self) -> None:
        """Remove the hook. A second call does nothing."""
        if self._own in self._hooks:
            self._hooks.remove(self._own)

    def __enter__(self) -> HookHandle:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


class GradientHooks:
    """Hooks on the gradients of `parameters`. `of_factory` are those that the optimizer's factory set
    by `Tensor.register_hook`, by name; they see whole gradients.
    """

    def __init__(
        self,
        parameters: Parameters,
        of_factory: Mapping[str, Mapping[int, Callable[[Tensor], Tensor | None]]],
    ) -> None:
        self.parameters, self._of_factory = parameters, of_factory
        self._hooks: list[_Registered] = []
        self._registered = 0

    @property
    def numbers(self) -> tuple[int, ...]:
        """The hooks that are registered, by the order of their registration, and the number of those
        of the factory. They are equal on all ranks.
        """
        factory = sum(map(len, self._of_factory.values()))
        return (*(one.number for one in self._hooks), -factory)

    def register(self, names: Sequence[str], hook: Hook, whole: bool) -> HookHandle:
        """Run `hook` on the gradients of these parameters, in each step: whole ones, or this rank's
        parts.
        """
        self._registered += 1
        own = _Registered(self._registered, frozenset(names), hook, whole)
        self._hooks.append(own)
        return HookHandle(self._hooks, own)

    def run(self) -> None:
        """Run all hooks on the reduced gradients. Every rank must call it."""
        if not self._hooks and not self._of_factory:
            return
        gradients = self.parameters.gradients
        for name, grad in gradients.so_far().items():
            for hook, whole in self._of(name):
                grad = self._changed(name, grad, hook, whole)
                gradients.put(name, grad)

    def _of(self, name: str) -> Iterator[tuple[Hook, bool]]:
        for plain in list(self._of_factory.get(name, {}).values()):
            yield lambda _, grad, plain=plain: plain(grad), True  # type: ignore[misc]
        for one in list(self._hooks):
            if name in one.names:
                yield one.hook, one.whole

    def _changed(self, name: str, grad: Tensor, hook: Hook, whole: bool) -> Tensor:
        holding = self.parameters.holding
        cutting = holding.cuttings[name]
        cut = whole and cutting.is_cut
        given = cutting.joined(grad, holding.axes) if cut else grad
        version = given._version
        found = hook(name, given)
        if found is None and given._version == version:
            return grad
        result = given if found is None else found
        if not isinstance(result, Tensor) or result.shape != given.shape:
            what = (
                f"a tensor of {tuple(result.shape)}"
                if isinstance(result, Tensor)
                else type(result).__name__
            )
            raise AutoparError(
                f"a gradient hook of {name} returned {what}: it returns a tensor of the gradient's shape {tuple(given.shape)}, or None to "
                "keep the gradient"
            )
        result = result.detach().to(grad.device, grad.dtype)
        return cutting.part(result, holding.axes).contiguous() if cut else result
