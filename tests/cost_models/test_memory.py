"""Static memory by recipe and ZeRO stage."""

import autopar_cost_models as cm
import pytest
from hypothesis import given
from hypothesis import strategies as st

PRECISIONS = ["fp32", "fp64", "bf16", "fp16"]


@pytest.mark.parametrize(
    ("precision", "per_parameter"),
    [("fp32", (4, 4, 8)), ("fp64", (8, 8, 16)), ("bf16", (2, 4, 12)), ("fp16", (2, 4, 12))],
)
def test_bytes_per_parameter(precision, per_parameter):
    memory = cm.static_bytes(1000, precision, 0, 8)
    assert (memory.parameters, memory.gradients, memory.optimizer) == tuple(
        1000 * b for b in per_parameter
    )
    assert memory.total == 1000 * sum(per_parameter)


@pytest.mark.parametrize(("recipe", "zero", "expected"), [
    ("fp16_gradients", 1, (2, 2, 2)), ("bf16_gradients", 1, (2, 2, 1.5)), ("fsdp", 3, (0.5, 0.5, 1)), ("deepspeed_fp16", 1, (2, 2, 2.25)),
    ("deepspeed_bf16", 1, (2, 8, 1.5)),  # 10 + 12 / dp, the tables of bf16_optimizer.py added up
])  # fmt: skip
def test_recipes_of_frameworks(recipe, zero, expected):
    memory = cm.static_bytes(800, "bf16", zero, 8, recipe)
    assert (memory.parameters, memory.gradients, memory.optimizer) == tuple(
        800 * b for b in expected
    )


def test_communicators():
    """By hand: LL 0.5 MiB, LL128 4.6875 MiB, Simple 4 MiB; 4 connections of 24 channels."""
    assert cm.communicator_bytes(0) == 0
    assert cm.communicator_bytes(3) == 3 * 4 * 24 * (2**19 + 75 * 2**16 + 2**22)


@pytest.mark.parametrize(
    ("zero", "expected"),
    [(0, (2, 4, 12)), (1, (2, 4, 1.5)), (2, (2, 0.5, 1.5)), (3, (0.25, 0.5, 1.5))],
)
def test_zero_stages(zero, expected):
    memory = cm.static_bytes(800, "bf16", zero, 8)
    assert (memory.parameters, memory.gradients, memory.optimizer) == tuple(
        800 * b for b in expected
    )


@given(st.integers(0, 10**12), st.sampled_from(PRECISIONS), st.integers(1, 4096))
def test_each_stage_needs_no_more_and_no_less_than_its_share(numel, precision, dp):
    totals = [cm.static_bytes(numel, precision, zero, dp).total for zero in range(4)]
    assert totals == sorted(totals, reverse=True)
    assert totals[3] * dp >= totals[0]
    if dp == 1:
        assert len(set(totals)) == 1


@pytest.mark.parametrize(
    ("precision", "itemsize"), [("fp32", 4), ("fp64", 8), ("bf16", 2), ("fp16", 2)]
)
def test_activation_itemsize(precision, itemsize):
    assert cm.activation_itemsize(precision) == itemsize


def test_errors():
    with pytest.raises(ValueError, match=r"did you mean .*bf16"):
        cm.static_bytes(1, "bf61", 0, 1)
    with pytest.raises(ValueError, match="unknown precision"):
        cm.activation_itemsize("int4")
    with pytest.raises(ValueError, match="unknown recipe"):
        cm.static_bytes(1, "bf16", 0, 1, "fsdpp")
    for zero in (-1, 4, True, "1"):
        with pytest.raises(ValueError, match="ZeRO stage"):
            cm.static_bytes(1, "bf16", zero, 1)
    with pytest.raises(ValueError, match="numel=-1"):
        cm.static_bytes(-1, "bf16", 0, 1)
    with pytest.raises(ValueError, match="dp=0"):
        cm.static_bytes(1, "bf16", 0, 0)
