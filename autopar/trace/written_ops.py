"""Ops as users write them, in the place of those that torch runs below autograd."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch._prims_common import get_computation_dtype

from autopar.ops.aten import aten


def called(function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The result of an op that ran below autograd, by ops as users write them."""
    if (spelled := _AS_WRITTEN.get(function)) is not None:
        return spelled(*args, **kwargs)
    if function._schema.name in _DECOMPOSED:
        function = decomposition_table.get(function, function)
    return function(*args, **kwargs)


def _group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    rows: Any,
    channels: int,
    space: Any,
    groups: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """aten.native_group_norm: (result, mean, reciprocal of the standard deviation)."""
    values = x.to(get_computation_dtype(x.dtype))
    values = values.reshape(rows, groups, channels // groups * space)
    variance, mean = torch.var_mean(values, dim=2, unbiased=False, keepdim=True)
    scale = torch.rsqrt(variance + eps)
    result = ((values - mean) * scale).reshape(x.shape)
    for_channel = (1, channels, *(1 for _ in x.shape[2:]))
    if weight is not None:
        result = result * weight.reshape(for_channel)
    if bias is not None:
        result = result + bias.reshape(for_channel)
    return result.to(x.dtype), mean.squeeze(2), scale.squeeze(2)


@dataclass(frozen=True, slots=True)
class _Windows:
    """How a convolution that is not transposed reads its input."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: Any

    def of_input(self, gradient: Tensor, weight: Tensor, x: Tensor) -> Tensor:
        """The gradient of the input `x`: a transposed convolution of that of the result."""
        unread = [  # the positions at the end that no window reads
            size + 2 * pad - hop * (count - 1) - gap * (width - 1) - 1
            for size, pad, hop, count, gap, width in zip(
                x.shape[2:],
                self.padding,
                self.stride,
                gradient.shape[2:],
                self.dilation,
                weight.shape[2:],
                strict=True,
            )
        ]
        options = (self.stride, self.padding, self.dilation, True, unread, self.groups)
        return aten.convolution.default(gradient, weight, None, *options)

    def of_weight(self, gradient: Tensor, weight: Tensor, x: Tensor) -> Tensor:
        """The gradient of the weight: a convolution of the input by the gradient of the result, in
        which the rows are the channels to sum over.
        """

        def grouped(tensor: Tensor) -> Tensor:
            """(rows, groups * channels, ...) as (groups, channels, rows, ...)."""
            parts = tensor.unflatten(1, (self.groups, tensor.shape[1] // self.groups))
            return parts.movedim(0, 2)

        inputs = grouped(x).movedim(1, 0).flatten(1, 2)  # (channels, groups * rows, ...)
        kernels = grouped(gradient).flatten(0, 1)  # (groups * channels, rows, ...)
        none = [0] * len(self.stride)
        options = (self.dilation, self.padding, self.stride, False, none, self.groups)
        found = aten.convolution.default(inputs, kernels, None, *options)
        for dim, width in enumerate(weight.shape[2:], 2):
            found = found.narrow(dim, 0, width)
        return found.transpose(0, 1)


def _convolution_backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: list[int] | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: Any,
    wanted: list[bool],
) -> list[Tensor | None]:
    """aten.convolution_backward by convolutions: gradients of `x`, of `weight` and of the bias."""
    windows = _Windows(stride, padding, dilation, groups)
    found: list[Tensor | None] = [None, None, None]
    if wanted[0]:
        options = (stride, padding, dilation, False, [0] * len(stride), groups)
        found[0] = (
            aten.convolution.default(gradient, weight, None, *options)
            if transposed
            else windows.of_input(gradient, weight, x)
        )
    if wanted[1]:  # a transposed convolution reads its result as another one its input
        outer, inner = (x, gradient) if transposed else (gradient, x)
        found[1] = windows.of_weight(outer, weight, inner)
    if wanted[2]:
        found[2] = gradient.sum([dim for dim in range(gradient.dim()) if dim != 1])
    return found


_AS_WRITTEN: dict[Any, Callable] = {
    aten.convolution_backward.default: _convolution_backward,
    aten.native_group_norm.default: _group_norm,
    aten._softmax.default: lambda x, dim, half: x.softmax(dim),
    aten._log_softmax.default: lambda x, dim, half: x.log_softmax(dim),
    aten._efficientzerotensor.default: lambda size, **options: torch.zeros(size, **options),
    aten.conj_physical.default: lambda x: x.conj() if x.is_complex() else x,
    aten._unsafe_view.default: lambda x, size: x.reshape(size),
    aten.squeeze_.dims: aten.squeeze.dims,
    aten.squeeze_.dim: aten.squeeze.dim,
    aten.unsqueeze_.default: aten.unsqueeze.default,
    aten.transpose_.default: aten.transpose.int,
    aten.t_.default: aten.t.default,
}
"""Ops that torch's own functions call in the place of those that have rules."""
_DECOMPOSED = {
    f"aten::{name}"
    for name in (
        "native_layer_norm native_layer_norm_backward native_group_norm_backward native_batch_norm "
        "native_batch_norm_backward _native_batch_norm_legit _native_batch_norm_legit_no_training cudnn_batch_norm "
        "log_sigmoid_forward log_sigmoid_backward _softmax_backward_data _log_softmax_backward_data tanh_backward sigmoid_backward "
        "gelu_backward silu_backward mish_backward elu_backward softplus_backward leaky_relu_backward hardtanh_backward "
        "hardswish_backward threshold_backward glu_backward mse_loss_backward smooth_l1_loss_backward huber_loss_backward "
        "binary_cross_entropy_backward nll_loss_forward nll_loss2d_forward nll_loss_backward nll_loss2d_backward "
        "select_backward slice_backward unfold_backward embedding_dense_backward"
    ).split()
}
"""Ops that are decomposed, since their parts have rules. Those with results that autograd does not
follow, such as a norm's mean, are so in forward and backward. Other ops are called as they are.
"""
