"""Recognizes autograd.Functions that only pass rows or sums between ranks, such as gather layers.

Over one process such a function is the identity, forward and backward. That is found by calling it
on random numbers, twice.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from autopar.errors import AutoparError
from autopar.trace.one_process import current_process
from autopar.trace.python_state import Functions, names_of

_TRIALS = 2


def calls_processes(cls: type) -> bool:
    """Whether the code of an autograd.Function, or of the user's functions that it calls, names
    something of torch.distributed.
    """
    functions = Functions.of_value(cls)
    return any(
        _is_distributed(function.__globals__.get(name), names)
        for function in functions.codes
        for names in (names_of(function.__code__),)
        for name in names
    )


def _is_distributed(value: Any, names: Sequence[str]) -> bool:
    if value is torch:
        return "distributed" in names
    name = (
        value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", "")
    )
    return str(name).startswith(("torch.distributed", "autopar.trace.one_process"))


def passed_on(cls: Any, args: tuple, call: Any, what: str) -> Any:
    """The result of `cls.apply(*args)`, a function between processes: its operands, as they are.
    `call(*args)` calls it, and `what` names it and the user's line.

    Raises AutoparError unless, over one process, each result is an operand, and the operand's
    gradient the sum of the results'.
    """
    process = current_process()
    if process is not None:
        process.record(what.partition(" (")[0], " (" + what.partition(" (")[2])
    places: list[int] | None = None
    for seed in range(_TRIALS):
        flat, structure = pytree.tree_flatten(args)
        try:
            with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.enable_grad():
                generator = torch.Generator().manual_seed(seed)
                real = [_sample(x, generator) if isinstance(x, Tensor) else x for x in flat]
                sources = [number for number, x in enumerate(real) if isinstance(x, Tensor)]
                result = call(*pytree.tree_unflatten(real, structure))
                found = [result] if isinstance(result, Tensor) else list(result)
                matched = [_match(each, real, sources) for each in found]
                same = _gradients_are_sums(found, matched, real, generator)
        except AutoparError:
            raise
        except Exception as error:
            raise AutoparError(
                f"the {what} calls torch.distributed and fails over one process ({type(error).__name__}: {error}): forward sees one "
                "process with the whole batch; leave the function out, since the batch is whole already"
            ) from error
        if -1 in matched or not same or (places is not None and places != matched):
            raise AutoparError(
                f"the {what} calls torch.distributed, and over one process it is not the identity: forward sees the whole batch; leave "
                "the function out, or compute the same with torch ops"
            )
        places = matched
    flat, _ = pytree.tree_flatten(args)
    outputs = [flat[place].view_as(flat[place]) for place in places or ()]
    return outputs[0] if isinstance(result, Tensor) else tuple(outputs)


def _sample(tensor: Tensor, generator: torch.Generator) -> Tensor:
    sizes = [s if isinstance(s, int) else s.node.hint for s in tensor.shape]
    drawn = torch.randn(sizes, dtype=torch.float64, generator=generator)
    if not tensor.is_floating_point():
        return (drawn * 10).to(tensor.dtype)
    return drawn.to(tensor.dtype).requires_grad_()


def _match(result: Any, real: list, sources: list[int]) -> int:
    """The number of the first operand that a result is equal to; -1 if there is none."""
    return next(
        (n for n in sources if isinstance(result, Tensor) and torch.equal(result, real[n])), -1
    )


def _gradients_are_sums(
    found: list, matched: list[int], real: list, generator: torch.Generator
) -> bool:
    """Whether the gradient of each operand is the sum of those of the results that are equal to it."""
    trained = [(x, n) for x, n in zip(found, matched, strict=True) if n >= 0 and x.requires_grad]
    if len(trained) < sum(n >= 0 and real[n].requires_grad for n in matched):
        return False
    if not trained:
        return True
    grads = [
        torch.randn(x.shape, dtype=torch.float64, generator=generator).to(x.dtype)
        for x, _ in trained
    ]
    operands = [x for x in real if isinstance(x, Tensor) and x.requires_grad]
    results = [x for x, _ in trained]
    gradients = torch.autograd.grad(results, operands, grads, allow_unused=True)
    for operand, gradient in zip(operands, gradients, strict=True):
        parts = [g for g, (_, n) in zip(grads, trained, strict=True) if real[n] is operand]
        expected = sum(parts[1:], parts[0]) if parts else torch.zeros_like(operand)
        if not torch.allclose(
            torch.zeros_like(operand) if gradient is None else gradient, expected
        ):
            return False
    return True
