"""Refuses what forward does to gradients and torch.export drops: hooks, and a backward of its own.
Refuses models inside of wrappers that run on several processes themselves.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn.parallel import DataParallel, DistributedDataParallel

from autopar.errors import AutoparError
from autopar.trace.user_lines import line_now

_HOOKS: tuple[tuple[type, str], ...] = (
    (Tensor, "register_hook"),
    (Tensor, "register_post_accumulate_grad_hook"),
    (nn.Module, "register_backward_hook"),
    (nn.Module, "register_full_backward_hook"),
    (nn.Module, "register_full_backward_pre_hook"),
)
_WRAPPERS = (
    "DataParallel",
    "DistributedDataParallel",
    "FullyShardedDataParallel",
    "FSDPModule",
    "DeepSpeedEngine",
)


@contextlib.contextmanager
def replaced(owner: type | types.ModuleType, name: str, value: object) -> Iterator[None]:
    """A context in which the attribute `name` of a class or module is `value`."""
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


READ_NODE = vars(torch._C.TensorBase)["grad_fn"].__get__
"""The function that a mode sees for `tensor.grad_fn`."""


@contextlib.contextmanager
def hooks_refused(notes: list[str]) -> Iterator[None]:
    """A context in which a backward of forward's own, and setting a hook on gradients or on what
    they keep, raise AutoparError. Hooks that keep tensors in host memory are added to `notes`.
    """
    run = torch.autograd._engine_run_backward

    def entered(self: saved_tensors_hooks) -> None:
        if not isinstance(self, save_on_cpu):
            _refusing("saved_tensors_hooks")()
        note = f"forward keeps activations in host memory{line_now()} (save_on_cpu), which has no effect on the program of a plan"
        notes.extend([] if note in notes else [note])

    def backward(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("accumulate_grad"):
            raise AutoparError(
                f"forward runs backward{line_now()}, whose gradients a captured graph drops: return the sum of the losses, and "
                "engine.step runs backward once. Gradients that forward computes with come from torch.autograd.grad"
            )
        return run(*args, **kwargs)

    with contextlib.ExitStack() as stack:
        for owner, name in _HOOKS:
            stack.enter_context(replaced(owner, name, _refusing(f"{owner.__name__}.{name}")))
        stack.enter_context(replaced(saved_tensors_hooks, "__enter__", entered))
        stack.enter_context(replaced(saved_tensors_hooks, "__exit__", lambda *_: None))
        stack.enter_context(replaced(torch.autograd, "_engine_run_backward", backward))
        yield


class _Node:
    """A node of autograd's graph on which no hook can be set."""

    def __init__(self, node: Any) -> None:
        self._node = node

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Node) and self._node is other._node

    def __hash__(self) -> int:
        return hash(self._node)

    def __dir__(self) -> list[str]:
        return dir(self._node)

    def __getattr__(self, name: str) -> Any:
        if name in ("register_hook", "register_prehook"):
            return _refusing(f"grad_fn.{name}")
        found = getattr(self._node, name)
        if name == "next_functions":
            return tuple((without_hooks(node), place) for node, place in found)
        return found


def without_hooks(node: Any) -> Any:
    """A node of autograd's graph, or None, that refuses hooks. Its class has the node's name."""
    return None if node is None else type(type(node).__name__, (_Node,), {})(node)


def _refusing(name: str) -> Callable:
    def refused(*args: Any, **kwargs: Any) -> NoReturn:
        raise AutoparError(
            f"forward calls {name}{line_now()}, which torch.export drops; write what it does as a "
            "torch.autograd.Function, whose backward is kept"
        )

    return refused


def refuse_wrappers(model: nn.Module) -> None:
    """Raise AutoparError if a module of the model runs on several processes or devices itself."""
    for name, module in model.named_modules():
        kinds = {kind.__name__ for kind in type(module).__mro__}
        found = next((wrapper for wrapper in _WRAPPERS if wrapper in kinds), "")
        if found:
            inner = isinstance(module, (DataParallel, DistributedDataParallel))
            raise AutoparError(
                f"{name or 'the model'} is wrapped in {found}, which shares out the batch or the parameters itself: pass "
                f"{'its .module' if inner else 'the plain module'}, since autopar does that"
            )
