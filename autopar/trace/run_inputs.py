"""What a function reads that has rows, and its runs with other numbers of rows."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from autopar.trace.python_state import contents_of

_ROWS = (2, 3, 1_021_020, 15_485_863)
"""Numbers of rows for which a function runs, beside that of the example batch. The small ones are
below, and the large ones above each bound of torch, such as the end of a slice. One of the latter is
a multiple of 1 to 18, but for 8, 9 and 16, and the other is prime.
"""

_WHOLE = "Write it with ops on the whole batch, in the place of a transform"
OUTSIDE = "Compute what depends on the number of rows before, and pass it in"
BRANCHES = "which ops it runs depends on the number of rows"
COMPUTES = "what it computes depends on the number of rows"


class NotPlain(Exception):
    """A function whose ops cannot be called in its place: the reason, and what to do."""

    def __init__(self, reason: str, remedy: str = _WHOLE) -> None:
        super().__init__(reason)
        self.remedy = remedy


class Strided(NotPlain):
    """A function that writes into a view of a tensor, for whose gradient torch needs strides."""

    def __init__(self) -> None:
        super().__init__(
            "it writes into a part of a tensor that has a gradient",
            "Make the new tensor by torch.where or torch.cat, in the place of a write",
        )


@contextlib.contextmanager
def below_transforms() -> Iterator[None]:
    """A context in which ops on fake tensors are not captured."""
    mode = detect_fake_mode()
    without = torch._C.DispatchKeySet(torch._C.DispatchKey.PreDispatch)
    with (
        torch._C.DisableTorchFunction(),
        _disable_current_modes(),
        torch._C._ExcludeDispatchKeyGuard(without),
        mode or contextlib.nullcontext(),
    ):
        yield


@dataclass(slots=True)
class Inputs:
    """What a function reads that has rows: its arguments, and variables of functions around it.

    `symbol` is the number of rows in sizes; None if nothing has rows. Raises NotPlain for several.
    """

    args: tuple
    kwargs: dict[str, Any]
    cells: list[types.CellType]
    symbol: sympy.Symbol | None = None
    source: tuple[Tensor, int, int] | None = None  # a tensor with rows, a dim, entries a row

    @staticmethod
    def of(function: Callable, args: tuple, kwargs: dict[str, Any]) -> Inputs:
        """What a call of `function` reads."""
        found = Inputs(args, kwargs, list(_cells(function)))
        symbols = set()
        for value in pytree.tree_leaves((args, kwargs, [c.cell_contents for c in found.cells])):
            for dim, size in enumerate(value.shape if isinstance(value, Tensor) else [value]):
                if not isinstance(size, torch.SymInt) or not size.node.expr.free_symbols:
                    continue
                symbols |= size.node.expr.free_symbols
                each = size.node.expr / next(iter(size.node.expr.free_symbols))
                if each.is_Integer and isinstance(value, Tensor):
                    found.source = found.source or (value, dim, int(each))
        if len(symbols) > 1 or (symbols and found.source is None):
            raise NotPlain("its sizes do not follow from one number of rows")
        found.symbol = next(iter(symbols), None)
        return found

    def rows(self) -> Any:
        """The number of rows, as forward computes it."""
        if self.source is None:
            raise ValueError("nothing has rows")
        tensor, dim, each = self.source
        return tensor.shape[dim] // each if each > 1 else tensor.shape[dim]

    def runs(self) -> tuple[int, ...]:
        """The numbers of rows for which the function runs."""
        if self.source is None:
            raise ValueError("nothing has rows")
        tensor, dim, each = self.source
        size: Any = tensor.shape[dim]
        return tuple(dict.fromkeys((*_ROWS, size.node.hint // each)))

    def number(self, values: tuple) -> Any:
        """The number in forward that has these values in `runs`: equal ones, one that the function
        reads, a + b * rows, or a / rows. Raises NotPlain for another.
        """
        if all(type(value) is type(values[0]) and value == values[0] for value in values):
            return values[0]
        if not all(isinstance(value, int | float) for value in values):
            raise NotPlain(COMPUTES, OUTSIDE)
        counts = self.runs()
        for read in pytree.tree_leaves(
            (self.args, self.kwargs, [c.cell_contents for c in self.cells])
        ):
            if isinstance(read, torch.SymInt) and values == tuple(
                self._at(read, n) for n in counts
            ):
                return read
        slope = (values[1] - values[0]) / (counts[1] - counts[0])
        start = values[0] - slope * counts[0]
        pairs = list(zip(values, counts, strict=True))
        follows = all(value == start + slope * count for value, count in pairs)
        if follows and slope.is_integer() and start.is_integer():
            rows = self.rows() * int(slope)
            return rows + int(start) if start else rows
        share = values[0] * counts[0]
        if all(abs(value * count - share) <= 1e-14 * abs(share) for value, count in pairs):
            return share / self.rows()
        raise NotPlain("a number that it computes is no multiple of the number of rows", OUTSIDE)

    def _at(self, size: Any, rows: int) -> Any:
        """A size if the batch has `rows` rows."""
        if not isinstance(size, torch.SymInt):
            return size
        return int(size.node.expr.subs({self.symbol: rows}))

    @contextlib.contextmanager
    def replaced(self, rows: int) -> Iterator[tuple[tuple, dict[str, Any], dict[int, Any]]]:
        """(arguments, keyword arguments, own) in a context in which all inputs have `rows` rows."""
        own: dict[int, Tensor] = {}
        known: dict[int, Tensor] = {}

        def now(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return self._at(value, rows)
            if not any(isinstance(size, torch.SymInt) for size in value.shape):
                return value
            if id(value) not in known:
                with below_transforms():
                    new = torch.empty_strided(
                        [self._at(size, rows) for size in value.shape],
                        [self._at(step, rows) for step in value.stride()],
                        dtype=value.dtype,
                        device=value.device,
                        requires_grad=value.requires_grad,
                    )
                known[id(value)], own[id(new)] = new, value
            return known[id(value)]

        before = [cell.cell_contents for cell in self.cells]
        args, kwargs, contents = pytree.tree_map(now, (self.args, self.kwargs, before))
        put = [pytree.tree_flatten(value) for value in contents]
        try:
            for cell, value in zip(self.cells, contents, strict=True):
                cell.cell_contents = value
            yield args, kwargs, {-1: known, **own}  # `known` stays alive
            for cell, (leaves, form) in zip(self.cells, put, strict=True):
                now_there, form_now = pytree.tree_flatten(cell.cell_contents)
                if form_now != form or any(
                    a is not b for a, b in zip(leaves, now_there, strict=True)
                ):
                    raise NotPlain(
                        "it changes a variable of the function around it, which holds tensors",
                        "Return what it becomes, as by has_aux=True in torch.func.grad",
                    )
        finally:
            for cell, value in zip(self.cells, before, strict=True):
                cell.cell_contents = value


def functions_in(function: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """Yields a function, and those that it holds as a partial, or as variables around it."""
    seen = set() if seen is None else seen
    if function is None or id(function) in seen or isinstance(function, torch.nn.Module):
        return
    seen.add(id(function))
    yield function
    held = [getattr(function, name, None) for name in ("func", "transform")]
    for inner in (*held, *getattr(function, "args", ()), *map(contents_of, _around(function))):
        if callable(inner):
            yield from functions_in(inner, seen)


def _cells(function: Any) -> Iterator[types.CellType]:
    """The variables with tensors or sizes that functions read from around them."""
    cells = {id(cell): cell for each in functions_in(function) for cell in _around(each)}
    for cell in cells.values():
        leaves = pytree.tree_leaves(contents_of(cell))
        if any(isinstance(each, Tensor | torch.SymInt) for each in leaves):
            yield cell


def _around(function: Any) -> tuple[types.CellType, ...]:
    return getattr(function, "__closure__", None) or ()
