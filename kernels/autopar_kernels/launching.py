"""Where Triton kernels run, how large their blocks are, and how often each was launched.

Sizes come from one fixed table by kind of kernel, device and length of a row.  Nothing is timed, so every rank launches the same.
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
    """The blocks that a kind of kernel takes on a kind of device.

    Attributes:
        elements: elements that a program holds at least, if the tensor has them, a power of 2.
        longest: the longest part of a row that a program holds, a power of 2.
        warp_elements: elements of a warp, if the warps suffice.
        warps: the most warps of a program.
    """

    elements: int
    longest: int
    warp_elements: int
    warps: int = 16


GPU = {
    "element": Limits(elements=2048, longest=1024, warp_elements=512),
    "walk": Limits(elements=2048, longest=4096, warp_elements=1024),
    "walk_pair": Limits(elements=1024, longest=4096, warp_elements=512),
    "norm": Limits(elements=2048, longest=16384, warp_elements=1024, warps=8),
    "norm_sums": Limits(elements=4096, longest=16384, warp_elements=1024, warps=8),
}
"""By kind: element by element; along rows, with one or two operands; norms, without or with sums over rows.

Measured on an H200 (`benchmarks/results/kernels_h200.txt`).
"""
INTERPRETER = Limits(elements=1024, longest=128, warp_elements=1024)
"""Limits for Triton's interpreter: small blocks, so that tests with 512 columns walk along a row in
several steps.
"""
_INTERPRETED_PROGRAMS = 3


@dataclass(frozen=True, slots=True)
class Tile:
    """The block of a program: its rows and columns (both powers of 2), and its number of warps."""

    rows: int
    columns: int
    warps: int


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on CPU tensors: TRITON_INTERPRET is 1."""
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


def power_of_2(count: int) -> int:
    """The least power of 2 that is at least `count`, and at least 1."""
    return 1 << max(count - 1, 0).bit_length()


def limits(kind: str, device: torch.device) -> Limits:
    """The limits for a kind of kernel: its row of `GPU`, or `INTERPRETER` on a CPU."""
    return GPU[kind] if device.type == "cuda" else INTERPRETER


def tile_of(columns: int, kind: str, device: torch.device) -> Tile:
    """The block of a kind of kernel for rows of `columns` elements."""
    table = limits(kind, device)
    width = min(power_of_2(columns), table.longest)
    rows = max(1, table.elements // width)
    return Tile(rows, width, min(table.warps, max(4, rows * width // table.warp_elements)))


def programs_of(tiles: int, tile: Tile, device: torch.device) -> int:
    """How many programs share `tiles` blocks of rows, if each keeps sums over its own: two for each
    multiprocessor, or one with large blocks. At least 1, and no more than the blocks.
    """
    most = _INTERPRETED_PROGRAMS
    if device.type == "cuda":
        count = torch.cuda.get_device_properties(device).multi_processor_count
        most = count if tile.rows * tile.columns > 4096 else 2 * count
    return max(1, min(tiles, most))


def partial_sums(like: Tensor, written: bool, programs: int, columns: int) -> Tensor:
    """A new fp32 tensor (programs, columns) for each program's sums, on the device of `like`.
    Zeros, unless programs write every sum (`written`).
    """
    make = like.new_empty if written else like.new_zeros
    return make((programs, columns), dtype=torch.float32)


def divide_up(count: int, part: int) -> int:
    """How many parts of size `part` cover `count`."""
    return -(-count // part)


def rows_of(tensor: Tensor, columns: int | None = None) -> Tensor:
    """The tensor as (rows, columns): a view if its strides allow it, otherwise a copy. `columns` is
    the size of the last dim by default.
    """
    width = tensor.shape[-1] if columns is None else columns
    rows = tensor.numel() // width if width else 0
    return tensor.reshape(rows, width)


def strides_of(*operands: Tensor | None) -> tuple[int, ...]:
    """The strides of all operands, one after another; an operand that is None has (0, 0)."""
    return tuple(step for t in operands for step in ((0, 0) if t is None else t.stride()))


def launch(
    kernel: Any, grid: Sequence[int], arguments: Sequence[Any], warps: int = 4, **constants: Any
) -> None:
    """Run a kernel on the device of its first tensor, and count it in `LAUNCHES`. An empty grid
    runs nothing. `constants` are the kernel's constexpr arguments.
    """
    if 0 in grid:
        return
    first = next(argument for argument in arguments if isinstance(argument, Tensor))
    LAUNCHES[kernel.__name__] += 1
    elsewhere = first.is_cuda and first.get_device() != torch.cuda.current_device()
    with torch.cuda.device(first.device) if elsewhere else nullcontext():
        kernel[tuple(grid)](*arguments, **constants, num_warps=warps)
