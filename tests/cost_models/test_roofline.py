"""The roofline: bound by the slower of compute and memory, plus the launch."""

import autopar_cost_models as cm
import pytest
from hypothesis import given
from hypothesis import strategies as st

H100 = cm.device("h100", cm.ISOLATED)
sizes = st.floats(0, 1e18)


def test_hand_computed_matmul():
    flops, size_bytes = 2 * 8192**3, 3 * 2 * 8192**2
    expected = flops / (989.5e12 * 0.803) + 3.0e-6
    assert cm.matmul_time_s(flops, size_bytes, H100, "bf16") == pytest.approx(expected, rel=1e-12)


def test_hand_computed_copy():
    assert cm.memory_time_s(2**30, H100) == pytest.approx(
        2**30 / (3.35e12 * 0.9) + 3.0e-6, rel=1e-12
    )


def test_the_ridge_is_where_both_bounds_meet():
    ridge = cm.arithmetic_intensity(H100, "bf16")
    size_bytes = 1e9
    at_ridge = cm.matmul_time_s(ridge * size_bytes, size_bytes, H100, "bf16")
    assert at_ridge == pytest.approx(cm.memory_time_s(size_bytes, H100))
    assert cm.matmul_time_s(0.5 * ridge * size_bytes, size_bytes, H100, "bf16") == pytest.approx(
        at_ridge
    )
    assert cm.matmul_time_s(2 * ridge * size_bytes, size_bytes, H100, "bf16") > 1.9 * at_ridge


def test_an_empty_kernel_costs_its_launch():
    assert cm.memory_time_s(0, H100) == cm.matmul_time_s(0, 0, H100, "bf16") == H100.launch_s


@given(
    sizes,
    sizes,
    sizes,
    st.sampled_from([device for device in cm.DEVICES.values() if "bf16" in device.flops]),
    st.sampled_from(["fp32", "bf16", "fp64"]),
)
def test_monotone_and_bounded_below_by_the_datasheet(flops, size_bytes, more, device, dtype):
    time_s = cm.matmul_time_s(flops, size_bytes, device, dtype)
    assert time_s >= max(flops / device.flops[dtype], size_bytes / device.memory_bandwidth_Bps)
    assert cm.matmul_time_s(flops + more, size_bytes, device, dtype) >= time_s
    assert cm.matmul_time_s(flops, size_bytes + more, device, dtype) >= time_s


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf"), True, "1"])
def test_wrong_sizes_are_refused(wrong):
    with pytest.raises(ValueError, match="size_bytes"):
        cm.memory_time_s(wrong, H100)
    with pytest.raises(ValueError, match="flops"):
        cm.matmul_time_s(wrong, 1.0, H100, "bf16")


def test_a_dtype_without_a_rate_is_refused():
    with pytest.raises(ValueError, match="fp8"):
        cm.matmul_time_s(1.0, 1.0, cm.device("a100-40g"), "fp8")
