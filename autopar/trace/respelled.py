"""Replacements for torch functions that turn the batch size into a fixed number, or read tensor
values to check them.

torch.export would otherwise fix the batch size, or refuse the model.
"""

from __future__ import annotations

import builtins
import contextlib
import math
from collections.abc import Callable, Iterator
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.trace.running_statistics import instance_norm


@contextlib.contextmanager
def symbolic_lengths() -> Iterator[None]:
    """A context in which `len` of a tensor returns its symbolic size, by a replaced `builtins.len`.
    Python's own would make it a fixed number.
    """
    plain = builtins.len

    def length(value: Any) -> Any:
        follows = (
            isinstance(value, Tensor) and value.dim() and isinstance(value.shape[0], torch.SymInt)
        )
        return value.shape[0] if follows else plain(value)

    builtins.len = length
    try:
        yield
    finally:
        builtins.len = plain


def _take_along_dim(
    input: Tensor, indices: Tensor, dim: int | None = None, **more: Any
) -> Tensor | None:
    """torch.take_along_dim as a gather of broadcast tensors. None if torch's own function must be
    used: without `dim`, or with more arguments.
    """
    if dim is None or more:
        return None
    dim %= input.dim()
    shapes = [[1 if d == dim else size for d, size in enumerate(t.shape)] for t in (input, indices)]
    shape = torch.broadcast_shapes(*shapes)
    source, indices = (
        t.expand([t.shape[d] if d == dim else size for d, size in enumerate(shape)])
        for t in (input, indices)
    )
    return source.gather(dim, indices)


def _linspace(start: Any, end: Any, steps: Any = None, **options: Any) -> Tensor | None:
    """torch.linspace with a symbolic number of steps, computed from both ends as in torch. None if
    torch's own function must be used: other steps, tensor ends, or `out`.
    """
    if (
        not isinstance(steps, torch.SymInt)
        or isinstance(start, Tensor)
        or isinstance(end, Tensor)
        or "out" in options
    ):
        return None
    dtype = options.get("dtype") or torch.get_default_dtype()
    place = torch.arange(steps, dtype=dtype, device=options.get("device"))  # type: ignore[call-overload]  # the stub has no SymInt
    step = (end - start) / torch.sym_max(steps - 1, 1)
    return torch.where(
        place < steps // 2,
        start + step * place,
        torch.where(place > 0, end - step * (steps - 1 - place), start),
    )


def _gaussian_nll_loss(
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor | None:
    """F.gaussian_nll_loss without its check for negative variances, which reads values. None if
    torch's own function must be used: the variance is a number, or the reduction unknown.
    """
    if not isinstance(var, Tensor) or reduction not in ("none", "mean", "sum"):
        return None
    if var.dim() == input.dim() - 1 and input.dim() > var.dim():
        var = var.unsqueeze(-1)
    # a variance below eps has its gradient all the same
    var = var + (var.clamp(min=eps) - var).detach()
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()


def _fill_diagonal(tensor: Tensor, value: Any, wrap: bool = False) -> Tensor | None:
    """Tensor.fill_diagonal_ by indices, since torch.export makes it an op whose gradient is wrong in
    torch 2.13. With `wrap`, the diagonal of a tall matrix begins again below each square. None if
    torch's own function must be used, which refuses the shape.
    """
    if tensor.dim() < 2 or (tensor.dim() > 2 and len(set(tensor.shape)) > 1):
        return None
    places: tuple[Tensor, ...]
    if tensor.dim() == 2 and wrap:
        rows, columns = tensor.shape
        flat = torch.arange(0, rows * columns, columns + 1, device=tensor.device)
        places = flat // columns, flat % columns
    else:
        along = torch.arange(min(tensor.shape), device=tensor.device)
        places = (along,) * tensor.dim()
    tensor[places] = value
    return tensor


def _bincount(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor | None:
    """torch.bincount of values below `minlength`, as a sum of one-hot rows. None if torch's own
    function must be used: without `minlength` the length depends on the values.
    """
    if not isinstance(minlength, int) or minlength < 1:
        return None
    rows = F.one_hot(input, minlength)
    if weights is None:
        return rows.sum(0)
    weights = weights.detach() if weights.is_floating_point() else weights.double()
    return (rows.to(weights.dtype) * weights.unsqueeze(1)).sum(0)


def _zero(dtype: torch.dtype) -> complex:
    """0 as the Python number that a tensor of this dtype would be read as."""
    if dtype == torch.bool:
        return False
    return 0j if dtype.is_complex else 0.0 if dtype.is_floating_point else 0


def _filled(function: Callable[..., Tensor]) -> Callable[..., Tensor | None]:
    """`function` (`torch.full`, `full_like` or `new_full`) for a tensor as the number to fill with,
    which eager PyTorch reads. The function returned gives None for a number.
    """

    def filled(*args: Any, **options: Any) -> Tensor | None:
        *first, value = args if "fill_value" not in options else (*args, options["fill_value"])
        if not isinstance(value, Tensor):
            return None
        options.pop("fill_value", None)
        made = function(*first, _zero(value.dtype), **options)
        return value.detach().reshape(()).to(made).expand(made.shape).clone()

    return filled


_LIBRARY = torch.library.Library("autopar", "FRAGMENT")
_LIBRARY.define("limits_rows(Tensor ids, Tensor table, float max_norm, float norm_type) -> Tensor")
_LIBRARY.impl(
    "limits_rows", lambda ids, table, max_norm, norm_type: ids.clone(), "CompositeExplicitAutograd"
)


def _with_limit(function: Callable[..., Tensor]) -> Callable[..., Tensor | None]:
    """`function` (F.embedding or F.embedding_bag) without `max_norm`, its ids marked
    (`trace/row_limits.py`). The function returned gives None for a call without `max_norm`.
    """

    def marked(*args: Any, **kwargs: Any) -> Tensor | None:
        call = signature(function).bind(*args, **kwargs)
        given = call.arguments
        if (max_norm := given.get("max_norm")) is None:
            return None
        limit = float(max_norm), float(given.get("norm_type", 2.0))
        table = given["weight"].detach()
        given["input"] = torch.ops.autopar.limits_rows(given["input"], table, *limit)
        given["max_norm"] = None
        return function(*call.args, **call.kwargs)

    return marked


RESPELLED: dict[Callable, Callable[..., Tensor | None]] = {
    torch.take_along_dim: _take_along_dim,
    Tensor.take_along_dim: _take_along_dim,
    torch.linspace: _linspace,
    Tensor.fill_diagonal_: _fill_diagonal,
    torch.bincount: _bincount,
    Tensor.bincount: _bincount,
    F.gaussian_nll_loss: _gaussian_nll_loss,
    F.embedding: _with_limit(F.embedding),
    F.embedding_bag: _with_limit(F.embedding_bag),
    F.instance_norm: instance_norm,
    torch.full: _filled(torch.full),
    torch.full_like: _filled(torch.full_like),
    Tensor.new_full: _filled(Tensor.new_full),
}
"""The replacement of each function. It returns None if the function itself must be used."""
