# mypy: allow-untyped-defs
"""What the Triton kernels share: their registry, and functions that run inside them.  Imports triton.

Inside a kernel all arithmetic is fp32: a value is converted when it is loaded and rounded once when it is stored.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

KERNELS: dict[str, Any] = {}
"""Every kernel of the package that has been imported, by name."""

TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


def kernel(function):
    """`triton.jit`, for kernels that are launched: also adds the kernel to `KERNELS`. Functions
    that kernels call use `triton.jit` itself.
    """
    KERNELS[function.__name__] = triton.jit(function)
    return KERNELS[function.__name__]


@triton.jit
def load_tile(pointer, row, column, row_stride, column_stride, mask):
    """Elements (row, column) of a tensor in fp32, and 0 where the mask is false; row is int64 (R,),
    column is (C,).
    """
    place = row[:, None] * row_stride + column[None, :].to(tl.int64) * column_stride
    return tl.load(pointer + place, mask, 0.0).to(tl.float32)


@triton.jit
def load_vector(pointer, column, inside):
    """Elements `column` (C,) of a contiguous vector in fp32, and 0 where `inside` is false."""
    return tl.load(pointer + column, inside, 0.0).to(tl.float32)


@triton.jit
def store_tile(pointer, row, column, row_stride, column_stride, value, mask):
    """Round a tile once to the tensor's dtype and write it."""
    place = row[:, None] * row_stride + column[None, :].to(tl.int64) * column_stride
    tl.store(pointer + place, value.to(pointer.dtype.element_ty), mask)


@triton.jit
def silu(x):
    """x sigmoid(x)."""
    return x * tl.sigmoid(x)


@triton.jit
def silu_slope(x):
    """The derivative of silu."""
    s = tl.sigmoid(x)
    return s * (1.0 + x * (1.0 - s))


@triton.jit
def tanh(x):
    """tanh without a device library: a series near 0, where 2 sigmoid(2 x) - 1 cancels."""
    y = x * x
    series = 1.0 + y * (-1.0 / 3 + y * (2.0 / 15 + y * (-17.0 / 315 + y * (62.0 / 2835))))
    return tl.where(y < 0.0625, x * series, 2.0 * tl.sigmoid(2.0 * x) - 1.0)
