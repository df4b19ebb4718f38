"""Matmuls by shape: against a count of tiles, bounds by datasheet, monotone; fp8 and its casts."""

from math import ceil

import autopar_cost_models as cm
import pytest
from autopar_cost_models.constants import FP8_ROWWISE_RATE
from autopar_cost_models.matmul import (
    SPLITS,
    TILES,
    cast_to_fp8_bytes,
    fp8_linear_time_s,
    grouped_matmul_time_s,
    shaped_matmul_time_s,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from support.effort import examples

H100 = cm.device("h100", cm.ISOLATED)
GPUS = [d for d in cm.DEVICES.values() if d.name != "cpu" and "bf16" in d.flops]
sizes = st.integers(1, 20000)


@given(
    sizes,
    sizes,
    sizes,
    st.integers(1, 500),
    st.sampled_from(GPUS),
    st.sampled_from(["bf16", "fp32"]),
)
def test_never_faster_than_the_datasheet_and_monotone(m, n, k, more, device, dtype):
    time_s = shaped_matmul_time_s(m, n, k, device, dtype)
    itemsize = 2 if dtype == "bf16" else 4
    size_bytes = itemsize * (m * k + k * n + m * n)
    assert time_s >= max(
        2 * m * n * k / device.flops[dtype], size_bytes / device.memory_bandwidth_Bps
    )
    assert shaped_matmul_time_s(m + more, n, k, device, dtype) >= time_s
    assert shaped_matmul_time_s(m, n + more, k, device, dtype) >= time_s
    assert shaped_matmul_time_s(m, n, k + more, device, dtype) >= time_s * (1 - 1e-9)


def test_a_wave_more_is_a_step_in_time():
    """132 tiles of 256 x 128 fill an H100 once; one column of tiles more needs a second wave or smaller tiles."""
    full = shaped_matmul_time_s(256 * 12, 128 * 11, 8192, H100, "bf16")
    over = shaped_matmul_time_s(256 * 12, 128 * 11 + 1, 8192, H100, "bf16")
    assert over / full > 1.2
    assert shaped_matmul_time_s(256 * 12, 128 * 11 - 100, 8192, H100, "bf16") == full


def test_a_long_sum_is_split():
    """64 tiles of 128 x 128 on 132 multiprocessors: two halves of the sum at once, against one."""
    time_s = shaped_matmul_time_s(1024, 1024, 65536, H100, "bf16") - H100.launch_s
    one_wave_s = 2 * 128 * 128 * 65536 * 132 / (H100.achieved_flops("bf16") / 0.98 * 0.75)
    assert time_s < 0.6 * one_wave_s


def scheduled_s(rows: list[int], n: int, k: int, high: int, wide: int, split: int) -> float:
    """Hand out the tiles of every group, one part of the sum each, to 132 multiprocessors in turn; the busiest sets the time."""
    work, turn = [0.0] * 132, 0
    fed = min(1.0, (high * wide / (high + wide)) / (256 * 128 / 384))
    rate = H100.achieved_flops("bf16") / 0.98 / 132 * fed
    for count in rows:
        for _ in range(0, count, high):
            for _ in range(0, n, wide):
                for _ in range(split):
                    work[turn % 132] += 2 * high * wide * ceil(k / split) / rate
                    turn += 1
    compute_s = max(work)
    matrices = sum(r > 0 for r in rows)
    size_bytes = 2 * (sum(rows) * k + matrices * n * k + sum(rows) * n) + (
        8 * split * sum(rows) * n if split > 1 else 0
    )
    return max(compute_s, size_bytes / H100.achieved_bandwidth_Bps)


@given(
    st.lists(st.integers(0, 3000), min_size=1, max_size=8),
    st.integers(1, 2048),
    st.integers(1, 4096),
)
@settings(max_examples=examples(7, 30), deadline=None)
def test_groups_against_tiles_handed_out_one_by_one(rows, n, k):
    expected = min(scheduled_s(rows, n, k, *tile, split) for tile in TILES for split in SPLITS)
    time_s = grouped_matmul_time_s(rows, n, k, H100, "bf16")
    assert time_s == pytest.approx(expected + H100.launch_s)
    assert time_s >= max(grouped_matmul_time_s([r], n, k, H100, "bf16") for r in rows) * (1 - 1e-9)
    assert grouped_matmul_time_s(sorted(rows), n, k, H100, "bf16") == time_s


def test_no_rows_cost_a_launch():
    assert grouped_matmul_time_s([0, 0], 64, 64, H100, "bf16") == H100.launch_s


def test_a_batch_is_a_group_of_equals():
    assert shaped_matmul_time_s(512, 512, 64, H100, "bf16", batch=32) == grouped_matmul_time_s(
        [512] * 32, 512, 64, H100, "bf16"
    )


def test_the_cpu_has_no_tiles():
    cpu = cm.device("cpu")
    assert shaped_matmul_time_s(1000, 100, 1000, cpu, "fp32") == pytest.approx(
        2e8 / 8e10 + cpu.launch_s
    )


def test_casts_move_what_they_read_and_write():
    assert cast_to_fp8_bytes(10) == 40  # read 2, write 1 and the transposed copy
    assert cast_to_fp8_bytes(10, transposed=False) == 30
    assert cast_to_fp8_bytes(10, "current") == 60
    assert cast_to_fp8_bytes(10, "block") == 40
    with pytest.raises(ValueError, match="did you mean delayed"):
        cast_to_fp8_bytes(10, "delay")


def test_fp8_pays_off_on_wide_layers_only():
    def bf16(rows, inputs, outputs):
        return shaped_matmul_time_s(rows, outputs, inputs, H100, "bf16")

    assert fp8_linear_time_s(8192, 8192, 28672, H100) < 0.75 * bf16(8192, 8192, 28672)
    assert fp8_linear_time_s(8192, 512, 512, H100) > bf16(8192, 512, 512)
    assert fp8_linear_time_s(64, 8192, 8192, H100, cast_weight=False) < fp8_linear_time_s(
        64, 8192, 8192, H100
    )
    assert fp8_linear_time_s(8192, 8192, 8192, H100, backward=True) > 1.5 * fp8_linear_time_s(
        8192, 8192, 8192, H100, cast_weight=False
    )
    assert fp8_linear_time_s(8192, 8192, 8192, H100, scaling="current") > fp8_linear_time_s(
        8192, 8192, 8192, H100
    )
    with pytest.raises(ValueError, match="no 'fp8' rate"):
        fp8_linear_time_s(64, 64, 64, cm.device("a100-80g"))


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "8"])
def test_wrong_shapes_are_refused(wrong):
    for shape in ((64, wrong, 64), (64, 64, wrong)):
        with pytest.raises(ValueError, match="must be a whole number"):
            shaped_matmul_time_s(*shape, H100, "bf16")
    if wrong != 0:
        with pytest.raises(ValueError, match="rows of a matmul"):
            shaped_matmul_time_s(wrong, 64, 64, H100, "bf16")
    with pytest.raises(ValueError, match="batch"):
        shaped_matmul_time_s(64, 64, 64, H100, "bf16", batch=wrong)


@pytest.mark.parametrize("backward", [False, True])
def test_row_wise_scaling_is_slower(backward):
    """Its products by a measured ratio, its casts by one more read: as tensor-wise scaling that looks at the tensor first."""
    device = cm.device("h100")
    row, tensor = (
        fp8_linear_time_s(8192, 4096, 14336, device, backward=backward, scaling=s)
        for s in ("rowwise", "current")
    )
    ratio = row / tensor
    assert 1.1 < ratio < 1 / FP8_ROWWISE_RATE


def test_row_wise_scaling_slows_products_that_compute_and_not_those_that_stream():
    def product(m: int, n: int, k: int, scaling: str, dtype: str = "fp8") -> float:
        return shaped_matmul_time_s(m, n, k, H100, dtype, scaling=scaling) - H100.launch_s

    assert product(8192, 8192, 8192, "rowwise") == pytest.approx(
        product(8192, 8192, 8192, "current") / FP8_ROWWISE_RATE, rel=0.02
    )
    assert product(16, 8192, 8192, "rowwise") == product(16, 8192, 8192, "current")
    assert product(8192, 8192, 8192, "rowwise", "bf16") == product(
        8192, 8192, 8192, "delayed", "bf16"
    )
    groups = [1024] * 8
    slower, faster = (
        grouped_matmul_time_s(groups, 4096, 4096, H100, "fp8", scaling=s)
        for s in ("rowwise", "current")
    )
    assert 1.1 < slower / faster < 1 / FP8_ROWWISE_RATE + 0.01
