"""A mode that turns casts to fp32 inside a model into casts to fp64."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Widened(TorchFunctionMode):
    """A torch function mode in which casts to fp32 become casts to fp64: by `.float()`, `.to`,
    `.type`, or the `dtype` of an op on an fp64 tensor. Softmax and sum are such ops. Grouped matrix
    products run in fp64 too.
    """

    def __torch_function__(
        self,
        function: Callable,
        types: Sequence[type],
        args: tuple = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """The result of the call of `function`, with casts to fp32 widened to fp64."""
        kwargs, name = dict(kwargs or {}), getattr(function, "__name__", "")
        if name in ("grouped_mm", "_grouped_mm") and not torch.compiler.is_compiling():
            return _grouped_mm(function, *args, **kwargs)
        if function is Tensor.float:
            return args[0].double()
        casts = function in (Tensor.to, Tensor.type) or "softmax" in name
        if casts:
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        of_wide = bool(args) and isinstance(args[0], Tensor) and args[0].dtype is torch.float64
        if (casts or of_wide) and kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return function(*args, **kwargs)


def _grouped_mm(
    function: Callable, rows: Tensor, weights: Tensor, offs: Tensor | None = None, **kwargs: Any
) -> Tensor:
    """A grouped matrix product of fp64 tensors: rows (t, k), weights (e, k, n), `offs` (e,), the end
    index of each group of rows -> (t, n) in fp64. Rows after the last group give zeros.

    Nothing is converted: `function` computes calls with rows of another dtype or other numbers of
    dims. It also computes those without `offs`, or with further arguments that are not None.
    """
    given = [value for value in kwargs.values() if value is not None]
    fits = rows.dtype is torch.float64 and rows.dim() == 2 and weights.dim() == 3 and not given
    if offs is None or not fits:
        return function(rows, weights, offs=offs, **kwargs)
    ends = offs.tolist()
    slices = zip([0, *ends], ends, weights, strict=False)
    products = [rows[start:end] @ weight for start, end, weight in slices]
    return torch.cat([*products, rows.new_zeros(rows.shape[0] - ends[-1], weights.shape[2])])
