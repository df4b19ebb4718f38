"""Casts to fp32 inside a model made casts to fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Widened(TorchFunctionMode):
    """Casts to fp32, explicit or by a `dtype` argument, become casts to fp64; grouped matrix products run in fp64 too."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if (
            getattr(function, "__name__", "") in ("grouped_mm", "_grouped_mm")
            and not torch.compiler.is_compiling()
        ):
            return _grouped_mm(function, *args, **kwargs)
        if function is Tensor.float:
            return args[0].double()
        if function in (Tensor.to, Tensor.type) or "softmax" in getattr(function, "__name__", ""):
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return function(*args, **kwargs)


def _grouped_mm(
    function: Callable, rows: Tensor, weights: Tensor, offs: Tensor | None = None, **kwargs: Any
) -> Tensor:
    """rows (t, k), weights (e, k, n), offs (e,), the ends of the groups of rows -> (t, n), in fp64.  Other calls go to `function`."""
    given = [value for value in kwargs.values() if value is not None]
    if (
        rows.dtype is not torch.float64
        or offs is None
        or rows.dim() != 2
        or weights.dim() != 3
        or given
    ):
        return function(rows, weights, offs=offs, **kwargs)
    ends = offs.tolist()
    products = [
        rows[start:end] @ weight
        for start, end, weight in zip([0, *ends], ends, weights, strict=False)
    ]
    return torch.cat([*products, rows.new_zeros(rows.shape[0] - ends[-1], weights.shape[2])])
