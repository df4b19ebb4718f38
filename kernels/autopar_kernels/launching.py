"""Where Triton kernels run, how large their blocks are, and how often each was launched.

Sizes come from one fixed table by kind of device and length of a row.  Nothing is timed, so every rank launches the same kernels.
This file does not import triton.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LAUNCHES: Counter[str] = Counter()
"""Launches of each kernel in this process, by the name of the kernel's function."""

_LOW = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Limits:
    """The block sizes for a kind of device.

    Attributes:
        elements: elements that a program holds at once, a power of 2.
        longest: the longest part of a row that a program holds, a power of 2.
        programs: programs of a launch that reduces over rows, for devices whose multiprocessors are
            not counted.
        warp_elements: elements of a warp.
    """

    elements: int
    longest: int
    programs: int
    warp_elements: int


GPU = Limits(elements=2048, longest=8192, programs=256, warp_elements=512)
INTERPRETER = Limits(elements=1024, longest=128, programs=3, warp_elements=1024)
"""Limits for Triton's interpreter: small blocks, so that tests with 512 columns walk along a row in
several steps.
"""


@dataclass(frozen=True, slots=True)
class Tile:
    """The block of a program: its rows and columns (both powers of 2), and its number of warps."""

    rows: int
    columns: int
    warps: int


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def runs_kernel(*tensors: Tensor | None) -> bool:
    """Whether a Triton kernel computes with these tensors. Otherwise the ATen reference does (fp64,
    integers, CPU).
    """
    used = [tensor for tensor in tensors if tensor is not None]
    if not all(tensor.dtype in _LOW for tensor in used if tensor.is_floating_point()):
        return False
    return all(tensor.is_cuda for tensor in used) or (
        interpreted() and all(tensor.device.type == "cpu" for tensor in used)
    )


def limits(device: torch.device) -> Limits:
    """The limits of a device's kind."""
    return GPU if device.type == "cuda" else INTERPRETER


def power_of_2(count: int) -> int:
    """The least power of 2 that is at least `count`, and at least 1."""
    return 1 << max(count - 1, 0).bit_length()


def tile_of(columns: int, device: torch.device, share: int = 1) -> Tile:
    """The block for rows of `columns` elements. `share` is the number of blocks that a kernel keeps
    at once: it divides the block's size.
    """
    table = limits(device)
    width = min(power_of_2(columns), max(table.longest // share, 16))
    rows = max(1, table.elements // share // width)
    warps = min(16, max(4, rows * width // table.warp_elements))
    return Tile(rows, width, warps)


def programs_of(tiles: int, device: torch.device) -> int:
    """How many programs share `tiles` blocks of rows and keep partial sums: at most two for each
    multiprocessor.
    """
    table = limits(device)
    most = table.programs
    if device.type == "cuda":
        most = 2 * torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(tiles, most))


def divide_up(count: int, part: int) -> int:
    """How many parts of size `part` cover `count`."""
    return -(-count // part)


def rows_of(tensor: Tensor, columns: int | None = None) -> Tensor:
    """The tensor as (rows, columns): a view if its strides allow it, otherwise a copy."""
    width = tensor.shape[-1] if columns is None else columns
    rows = tensor.numel() // width if width else 0
    return tensor.reshape(rows, width)


def strides_of(*operands: Tensor | None) -> tuple[int, ...]:
    """The strides of all operands, one after another; an operand that is None has (0, 0)."""
    return tuple(step for t in operands for step in ((0, 0) if t is None else t.stride()))


def launch(
    kernel: Any, grid: Sequence[int], arguments: Sequence[Any], warps: int = 4, **constants: Any
) -> None:
    """Run a kernel on the device of its first tensor and count it; an empty grid runs nothing."""
    if 0 in grid:
        return
    first = next(argument for argument in arguments if isinstance(argument, Tensor))
    LAUNCHES[kernel.__name__] += 1
    with torch.cuda.device(first.device) if first.is_cuda else nullcontext():
        kernel[tuple(grid)](*arguments, **constants, num_warps=warps)
