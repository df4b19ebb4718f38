"""Fitted constants: few, documented, checked, and effective through the catalogue without patching anything."""

import ast
import inspect
import itertools
from dataclasses import fields, replace

import autopar_cost_models as cm
import pytest
from autopar_cost_models import fitted as module
from autopar_cost_models.attention import flash_attention_time_s
from autopar_cost_models.roofline import chain_time_s, optimizer_time_s, overlapped_s
from hypothesis import given
from hypothesis import strategies as st

H100 = cm.device("h100", cm.ISOLATED)
times = st.floats(0, 100)


def test_at_most_fifteen_each_with_its_docstring():
    names = [f.name for f in fields(cm.FittedConstants)]
    assert len(names) <= 15 and all(isinstance(getattr(cm.FITTED, name), float) for name in names)
    body = next(
        n for n in ast.parse(inspect.getsource(module)).body if isinstance(n, ast.ClassDef)
    ).body
    documented = [
        a.target.id
        for a, b in itertools.pairwise(body)
        if isinstance(a, ast.AnnAssign)
        and isinstance(b, ast.Expr)
        and isinstance(b.value.value, str)
    ]
    assert documented == names


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hopper_efficiency": 0}, "hopper_efficiency=0"),
        ({"launch_s": -1}, "launch_s=-1"),
        ({"hbm_efficiency": float("nan")}, "nan"),
        ({"overlap_slowdown": 1}, "below 1"),
        ({"inter_efficiency": True}, "True"),
    ],
)
def test_wrong_values_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(cm.FITTED, **change)


def test_the_catalogue_follows_its_constants():
    slow = replace(
        cm.ISOLATED,
        hopper_efficiency=0.5,
        fp8_efficiency=0.5,
        hbm_efficiency=0.45,
        launch_s=1e-5,
        reserved_bytes=2**30,
    )
    device = cm.device("h100", slow)
    assert device.achieved_flops("bf16") == pytest.approx(H100.achieved_flops("bf16") / 2)
    assert device.achieved_flops("fp8") == pytest.approx(H100.achieved_flops("fp8") / 4)
    assert device.achieved_bandwidth_Bps == pytest.approx(H100.achieved_bandwidth_Bps / 2)
    assert (device.launch_s, device.reserved_bytes) == (1e-5, 2**30)
    assert cm.device("h100", cm.ISOLATED) is H100 and cm.devices(slow) is cm.devices(replace(slow))
    assert cm.device("cpu", slow) == cm.device("cpu")


def test_links_follow_their_constants():
    node, half = (
        cm.node_preset("dgx-h100"),
        replace(cm.FITTED, intra_efficiency=0.5, inter_efficiency=0.25),
    )
    assert node.topology(2) == node.topology(2, cm.FITTED)
    topology = node.topology(2, half)
    assert topology.intra.achieved_Bps == pytest.approx(node.intra.achieved_Bps / 2)
    assert topology.group_inter_Bps(8) == pytest.approx(
        node.topology(2, cm.ISOLATED).group_inter_Bps(8) / 4
    )


def test_a_power_limit_slows_matmuls_only():
    capped, free = cm.device("h100-96g-500w", cm.ISOLATED), H100
    assert capped.achieved_flops("bf16") / free.achieved_flops("bf16") == pytest.approx(
        (500 / 700) ** 0.68
    )
    uncapped = cm.device("h100-96g-500w", replace(cm.ISOLATED, power_exponent=0))
    assert uncapped.achieved_flops("fp8") == free.achieved_flops("fp8")
    assert capped.achieved_bandwidth_Bps == pytest.approx(2.4e12 * 0.9)
    arguments = {"kernel": "flash2", "fitted": replace(cm.ISOLATED, attention_efficiency=0.5)}
    fast = flash_attention_time_s(
        1, 32, 8, 8192, 8192, 128, H100, kernel="flash2", fitted=cm.ISOLATED
    )
    assert flash_attention_time_s(1, 32, 8, 8192, 8192, 128, H100, **arguments) == pytest.approx(
        2 * fast, rel=1e-2
    )


@given(times, times)
def test_overlap_is_between_the_longer_and_the_sum(compute_s, transfer_s):
    together = overlapped_s(compute_s, transfer_s)
    assert max(compute_s, transfer_s) <= together <= compute_s + transfer_s
    assert overlapped_s(compute_s, transfer_s, replace(cm.FITTED, overlap_slowdown=0)) == max(
        compute_s, transfer_s
    )


@given(st.floats(0.01, 10), st.floats(0, 10), st.floats(0, 0.9))
def test_overlap_against_a_clock(compute_s, transfer_s, slowdown):
    """Compute runs at 1 - s until the transfer ends, then at full speed."""
    done = transfer_s * (1 - slowdown)
    clock = transfer_s if done >= compute_s else transfer_s + (compute_s - done)
    assert overlapped_s(
        compute_s, transfer_s, replace(cm.FITTED, overlap_slowdown=slowdown)
    ) == pytest.approx(clock)


def test_a_compiled_chain_moves_its_ends_only():
    kernels = [4e8, 4e8, 6e8]
    assert chain_time_s(kernels, 6e8, H100, compiled=False) == pytest.approx(
        sum(cm.memory_time_s(b, H100) for b in kernels)
    )
    assert chain_time_s(kernels, 6e8, H100, compiled=True) == cm.memory_time_s(6e8, H100)
    assert (
        chain_time_s([], 0, H100, compiled=True) == chain_time_s([], 0, H100, compiled=False) == 0
    )


def test_adam_by_hand():
    """bf16 recipe: reads gradient, master weight, two moments (16), writes three of them (12) and the bf16 weight (2)."""
    assert optimizer_time_s(1e9, H100, "bf16") == pytest.approx(30e9 / (3.35e12 * 0.9) + 3e-6)
    assert optimizer_time_s(1e9, H100, "fp32") == pytest.approx(28e9 / (3.35e12 * 0.9) + 3e-6)
    assert optimizer_time_s(1e9, H100, "fp32", fused=False) > 2 * optimizer_time_s(
        1e9, H100, "fp32"
    )
    with pytest.raises(ValueError, match="unknown precision"):
        optimizer_time_s(1e9, H100, "int8")
