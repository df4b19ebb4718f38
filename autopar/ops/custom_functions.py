"""The rule of `autopar::custom_function`: nothing is known of a user's autograd.Function but what running it shows.

It is run on random numbers, on some rows, on others and on both. Where values and gradients of the
whole are those of the parts, its rows may be sharded. All other dims stay whole.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any

import torch
from autopar_kernels.custom_functions import custom_function
from torch import Tensor

from autopar.errors import AutoparError
from autopar.ops.dims import Call, OpDims, at_batch, is_symbolic
from autopar.ops.kinds import same

Shapes = tuple[tuple[tuple[int, ...], ...], ...]
"""The shapes of tensors where the batch has 2 rows, 3 and 5."""
_ROWS = (2, 3, 5)
_LARGE, _SMALL = 2**20, 16
"""Elements from which a function is run on smaller tensors, and the least size there."""
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


def custom_rule(call: Call) -> OpDims:
    """How a user's autograd.Function may be sharded: by rows if trial runs show that they are
    independent, else not at all.

    Raises AutoparError if its backward is not linear in the gradient, or if it draws random
    numbers.
    """
    tensors, results = call.tensors, call.results
    trial = _trial_sizes(tensors)

    def at(size: Any) -> tuple[int, ...]:
        own = trial.get(at_batch(size, 1), at_batch(size, 1))
        return tuple(own * rows if is_symbolic(size) else own for rows in _ROWS)

    sizes = tuple(at(each) for each in call.arg("sizes"))
    shapes = tuple(tuple(zip(*map(at, t.shape), strict=True)) or ((),) * 3 for t in tensors)
    rows = [t.dim() > 0 and is_symbolic(t.shape[0]) for t in tensors]
    batch = [t.shape[0] for t in (*tensors, *results) if t.dim() and is_symbolic(t.shape[0])]
    alike = bool(batch) and all(same(size, batch[0]) for size in batch)
    inner = any(is_symbolic(size) for t in (*tensors, *results) for size in t.shape[1:])
    returned = tuple(t.dim() > 0 and is_symbolic(t.shape[0]) for t in results)
    independent = _seen(
        call.arg("name"), shapes, tuple(t.dtype for t in tensors), tuple(rows), returned, sizes
    )
    splits = alike and not inner and any(rows) and independent

    def term(number: int, t: Tensor, has_rows: bool) -> tuple[str, ...]:
        return tuple(
            "b" if splits and has_rows and k == 0 else f"!{number}{k}" for k in range(t.dim())
        )

    return OpDims(
        tuple(term(k, t, has) for k, (t, has) in enumerate(zip(tensors, rows, strict=True))),
        tuple(term(k, t, has) for k, (t, has) in enumerate(zip(results, returned, strict=True))),
        {"b": batch[0]} if splits else {},
        summed=frozenset("b") if splits and not all(returned) else frozenset(),
        contiguous=frozenset("b"),
    )


def _trial_sizes(tensors: list[Tensor]) -> dict[int, int]:
    """By size of a dim (per batch row), the size to use for it in trial runs: a small one, equal
    for equal ones. {} if all tensors together have at most `_LARGE` elements.
    """
    if sum(prod(at_batch(s, _ROWS[-1]) for s in t.shape) for t in tensors) <= _LARGE:
        return {}
    sizes = sorted({at_batch(size, 1) for t in tensors for size in t.shape})
    return {size: min(size, _SMALL + number) for number, size in enumerate(sizes)}


@lru_cache(maxsize=1024)
def _seen(
    name: str,
    shapes: Shapes,
    dtypes: tuple[torch.dtype, ...],
    rows: tuple[bool, ...],
    returned: tuple[bool, ...],
    sizes: tuple[tuple[int, ...], ...],
) -> bool:
    """Whether values and gradients of the function `name` on a whole batch are those on its two
    parts, joined (or added, where a tensor has no rows). Runs it on random numbers.

    `shapes` and `sizes` have three entries each, for 2, 3 and 5 rows. `rows` and `returned` say
    which operands and results have rows. False if it does not run. Raises AutoparError as
    `custom_rule` does.
    """
    with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(1)
        first, second = (
            [_random(s[k], d) for s, d in zip(shapes, dtypes, strict=True)] for k in (0, 1)
        )
        second = [b if has else a for a, b, has in zip(first, second, rows, strict=True)]
        both = [_joined(a, b) if has else a for a, b, has in zip(first, second, rows, strict=True)]
        run = lambda values, k: _Run(name, values, [each[k] for each in sizes])  # noqa: E731
        try:
            parts, whole, again = [run(first, 0), run(second, 1)], run(both, 2), run(both, 2)
            weights = [[torch.randn_like(t) for t in part.results] for part in parts]
            joined = [
                _joined(a, b) if has else a for a, b, has in zip(*weights, returned, strict=True)
            ]
        except (RuntimeError, ValueError, IndexError, TypeError):
            return False  # it does not run on random numbers
        _check_random(name, whole, again)
        gradients = whole.gradients(joined)
        _check_linear(name, run(both, 2), gradients, joined)
    same_weights = [
        [w if has else a for w, a, has in zip(weights[k], joined, returned, strict=True)]
        for k in (0, 1)
    ]
    by_part = [part.gradients(own) for part, own in zip(parts, same_weights, strict=True)]
    return all(
        _close(value, _joined(a, b) if has else a + b)
        for value, a, b, has in [
            *zip(whole.results, parts[0].results, parts[1].results, returned, strict=True),
            *zip(gradients, *by_part, rows, strict=True),
        ]
        if value is not None
    )


class _Run:
    """One run of the function `name`: `inputs` are copies of `values` that track gradients,
    `results` what it returned.
    """

    def __init__(self, name: str, values: list[Tensor], sizes: list[int]) -> None:
        self.inputs = [t.clone().requires_grad_() if t.is_floating_point() else t for t in values]
        self.results = custom_function(self.inputs, sizes, name)

    def gradients(self, weights: list[Tensor]) -> list[Tensor | None]:
        """The gradient of each input, if the results have the gradients `weights`; None for an
        input that gets none.
        """
        pairs = [(t, w) for t, w in zip(self.results, weights, strict=True) if t.requires_grad]
        inputs = [t for t in self.inputs if t.requires_grad]
        if not pairs or not inputs:
            return [None] * len(self.inputs)
        results, given = zip(*pairs, strict=True)
        found = iter(
            torch.autograd.grad(results, inputs, given, allow_unused=True, retain_graph=True)
        )
        return [next(found) if t.requires_grad else None for t in self.inputs]


def _check_random(name: str, once: _Run, again: _Run) -> None:
    pairs = zip(once.results, again.results, strict=True)
    if not all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs):
        raise AutoparError(
            f"the autograd.Function {name} draws random numbers, of which each rank would draw others: draw them in forward "
            "(torch.rand_like), and pass them in"
        )


def _check_linear(name: str, run: _Run, gradients: list, weights: list[Tensor]) -> None:
    doubled = run.gradients([-2 * each for each in weights])
    pairs = zip(gradients, doubled, strict=True)
    if not all(a is None or b is None or _close(-2 * a, b) for a, b in pairs):
        raise AutoparError(
            f"backward of the autograd.Function {name} is not linear in the gradient that it is given, as if it clipped or scaled it. "
            "Sums over ranks and micro-batches would come out wrong. Clip where the optimizer steps (max_grad_norm)"
        )


def _joined(a: Any, b: Any) -> Any:
    return None if a is None or b is None else torch.cat([a, b])


def _close(a: Tensor, b: Tensor | None) -> bool:
    tolerance = _TOLERANCE.get(a.dtype, 0.05)
    return (
        b is not None
        and a.shape == b.shape
        and torch.allclose(a, b, tolerance, tolerance, equal_nan=True)
    )


def _random(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return (
        torch.randn(shape).to(dtype)
        if dtype.is_floating_point
        else torch.randint(2, shape).to(dtype)
    )
