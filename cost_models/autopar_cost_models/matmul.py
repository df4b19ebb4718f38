"""Seconds of matmuls by shape: tiles, waves, split sums, groups, and fp8 with its casts.

A GPU computes (m, k) @ (k, n) in tiles of the result, one tile at a time on each multiprocessor.
Rows and columns round up to tiles, and tiles round up to waves of all multiprocessors (NVIDIA,
"Matrix Multiplication Background User's Guide", tile and wave quantization).

A small tile fetches more operands per multiply-add: a tile of a x b needs a + b values for a * b
multiply-adds. The largest tiles just keep the tensor cores busy; smaller tiles are slower by the
ratio of these. A multiprocessor fills its pipeline before the first products of a tile, and stores
results after the last. That matters if k is short. Sums over long k are split if there are too few
tiles, at the cost of partial results in fp32. The library is assumed to choose the best of these
options.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import ceil

from autopar_cost_models.checks import nearest, whole
from autopar_cost_models.constants import FP8_ROWWISE_RATE, QUANTIZATION_OF_BEST
from autopar_cost_models.echo import shown
from autopar_cost_models.hardware import ITEMSIZE, Device
from autopar_cost_models.roofline import memory_time_s, product_s, stream_s

TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
"""Tile sizes that cuBLAS and CUTLASS have on all generations. 256 x 128 is the most efficient in
NVIDIA's guide.
"""

SPLITS = (1, 2, 4, 8)


def shaped_matmul_time_s(
    m: int,
    n: int,
    k: int,
    device: Device,
    dtype: str,
    *,
    batch: int = 1,
    result_itemsize: int | None = None,
    scaling: str = "delayed",
) -> float:
    """Seconds of `batch` products (m, k) @ (k, n) -> (m, n) in one kernel, without casts.

    `result_itemsize` is the bytes of one element of the result (None: as the operands; 2 for fp8).
    `scaling` (a key of `SCALINGS`) applies to fp8: "rowwise", with a scale for each row and column,
    is slower.
    """
    rows = (m,) * whole("batch", batch)
    return grouped_matmul_time_s(
        rows, n, k, device, dtype, result_itemsize=result_itemsize, scaling=scaling
    )


def grouped_matmul_time_s(
    rows: Sequence[int],
    n: int,
    k: int,
    device: Device,
    dtype: str,
    *,
    result_itemsize: int | None = None,
    scaling: str = "delayed",
) -> float:
    """Seconds of one kernel that multiplies, for each group g, (rows[g], k) by the group's own (k,
    n), such as the experts of one device.

    The other arguments are those of `shaped_matmul_time_s`. A group without rows costs nothing. The
    device's best measured matmul includes some quantization loss, which is divided out first.
    """
    counts: dict[int, int] = {}
    for count in rows:
        counts[count] = counts.get(count, 0) + 1
    for count in counts:
        whole("rows of a matmul", count, least=0)
    whole("n", n)
    whole("k", k)
    if result_itemsize is None:
        result_itemsize = max(ITEMSIZE.get(dtype, 0), 2)
    slower = _PRODUCT_RATES.get(scaling, 1.0) if dtype == "fp8" else 1.0
    groups = tuple(sorted((c, g) for c, g in counts.items() if c))
    return _matmul_s(groups, (n, k), device, dtype, result_itemsize, slower) + device.launch_s


@lru_cache(maxsize=4096)
def _matmul_s(
    groups: tuple[tuple[int, int], ...],
    shape: tuple[int, int],
    device: Device,
    dtype: str,
    result_itemsize: int,
    slower: float,
) -> float:
    """Seconds of a grouped matmul without its launch. `groups` lists (rows, number of groups with
    that many rows); `shape` is (n, k); `slower` is a factor <= 1 on the device's rate.
    """
    n, k = shape
    rate = slower * min(
        device.achieved_flops(dtype) / QUANTIZATION_OF_BEST, device.peak_flops(dtype)
    )
    total_rows, matrices = sum(c * g for c, g in groups), sum(g for _, g in groups)
    size_bytes = (
        ITEMSIZE[dtype] * k * (total_rows + matrices * n) + result_itemsize * total_rows * n
    )
    if device.compute_units == 1 or dtype in device.matmul_curves:
        return product_s(2 * total_rows * n * k / slower, size_bytes, device, dtype)
    times = []
    for high, wide in TILES:
        tiles = sum(g * ceil(c / high) for c, g in groups) * ceil(n / wide)
        fed = min(1.0, high * wide / (high + wide) / (256 * 128 / (256 + 128)))
        for split in SPLITS:
            waves = ceil(tiles * split / device.compute_units)
            products = 2 * waves * high * wide * ceil(k / split)
            compute_s = products * device.compute_units / (rate * fed)
            partial_bytes = 2 * 4 * split * total_rows * n if split > 1 else 0
            times.append(max(compute_s, stream_s(size_bytes + partial_bytes, device)))
    return min(times)


# Bytes that casting one element from 16 bits to fp8 moves, besides read, write and the transposed copy.  Hopper's matmul needs that copy
# for the other gradient (fp8 operands only with k innermost).  "current" scaling reads once more, to find the largest magnitude first.
# "delayed" takes it from earlier steps, and "block" finds it within each block of 32 or 128 as it casts.  "rowwise" finds it within each
# row, and for the transposed copy within each column, which is a separate kernel.  See NVIDIA Transformer Engine's
# user guide, "Using FP8", and Micikevicius et al., "FP8 Formats for Deep Learning", arXiv:2209.05433.
SCALINGS = {"delayed": 0, "current": 2, "block": 0, "rowwise": 2}
_PRODUCT_RATES = {"rowwise": FP8_ROWWISE_RATE}


def cast_to_fp8_bytes(elements: float, scaling: str = "delayed", transposed: bool = True) -> float:
    """Bytes moved to quantize `elements` 16-bit values to fp8. `transposed`: whether a transposed
    copy is written too. Raises ValueError if `scaling` is not in `SCALINGS`.
    """
    if scaling not in SCALINGS:
        raise ValueError(
            f"unknown fp8 scaling {shown(scaling)}; {nearest(scaling, list(SCALINGS))}"
        )
    return elements * (2 + 1 + (1 if transposed else 0) + SCALINGS[scaling])


def cast_to_fp8_time_s(elements: float, device: Device, scaling: str = "delayed") -> float:
    """Seconds to quantize `elements` 16-bit values to fp8, with a transposed copy. The scalings
    "current" and "rowwise" need one more kernel.
    """
    once_s = memory_time_s(cast_to_fp8_bytes(elements, scaling), device)
    return once_s + device.launch_s if SCALINGS[scaling] else once_s


def fp8_linear_time_s(
    rows: int,
    inputs: int,
    outputs: int,
    device: Device,
    *,
    backward: bool = False,
    scaling: str = "delayed",
    cast_weight: bool = True,
) -> float:
    """Seconds of one fp8 linear layer (rows, inputs) -> (rows, outputs), including casts.

    Forward casts the input, and the weight if `cast_weight` (once per micro-batch unless it is
    kept), and multiplies. Backward casts the gradient of the result and runs two matmuls, for the
    gradients of input and weight. The latter is written in fp32, since it accumulates.
    """
    if not backward:
        casts_s = cast_to_fp8_time_s(rows * inputs, device, scaling)
        casts_s += cast_to_fp8_time_s(inputs * outputs, device, scaling) if cast_weight else 0.0
        return casts_s + shaped_matmul_time_s(rows, outputs, inputs, device, "fp8", scaling=scaling)
    products_s = shaped_matmul_time_s(rows, inputs, outputs, device, "fp8", scaling=scaling)
    products_s += shaped_matmul_time_s(
        outputs, inputs, rows, device, "fp8", scaling=scaling, result_itemsize=4
    )
    return cast_to_fp8_time_s(rows * outputs, device, scaling) + products_s
