"""Attention: visible pairs against the mask itself; flash against unfused; unknown kernels are refused."""

import autopar_cost_models as cm
import pytest
from autopar_cost_models.attention import (
    FLASH_RATES,
    flash_attention_time_s,
    unfused_attention_time_s,
    visible_pairs,
)
from hypothesis import given
from hypothesis import strategies as st

A100, H100, B200 = (cm.device(name, cm.ISOLATED) for name in ("a100-80g", "h100", "b200"))


def mask(queries: int, keys: int, causal: bool, window: int | None) -> list[list[bool]]:
    shift = keys - queries
    return [
        [
            not causal or (j <= i + shift and (window is None or j > i + shift - window))
            for j in range(keys)
        ]
        for i in range(queries)
    ]


@given(
    st.integers(1, 40),
    st.integers(1, 40),
    st.booleans(),
    st.none() | st.integers(1, 50),
    st.sampled_from([1, 2, 4, 16]),
)
def test_pairs_against_the_mask(queries, keys, causal, window, block):
    window = window if causal else None
    seen = mask(queries, keys, causal, window)
    blocks = {(i // block, j // block) for i in range(queries) for j in range(keys) if seen[i][j]}
    assert visible_pairs(queries, keys, causal, window) == sum(map(sum, seen))
    # Within a block of queries the visible blocks of keys are taken to be one stretch, which they are.
    assert visible_pairs(queries, keys, causal, window, block) == len(blocks) * block**2


def test_causal_is_half_and_a_window_is_linear():
    full = visible_pairs(8192, 8192, False)
    assert visible_pairs(8192, 8192, True) == pytest.approx(full / 2, rel=1e-3)
    assert visible_pairs(8192, 8192, True, 1024) == pytest.approx(8192 * 1024, rel=0.07)
    with pytest.raises(ValueError, match="needs causal=True"):
        visible_pairs(8, 8, False, 4)


@pytest.mark.parametrize(("generation", "kernel"), FLASH_RATES)
def test_rates_are_below_the_datasheet(generation, kernel):
    rate = FLASH_RATES[generation, kernel]
    assert rate.source and 0 < rate.backward < rate.forward <= 1


def flash(device=H100, kernel="flash2", length=4096, **changes):
    arguments = {
        "batch": 1,
        "heads": 32,
        "key_heads": 8,
        "queries": length,
        "keys": length,
        "head_dim": 128,
    } | changes
    return flash_attention_time_s(device=device, kernel=kernel, **arguments)


def test_orders():
    assert (
        flash(kernel="flash3")
        < flash(kernel="cudnn")
        < flash(kernel="flash2")
        < flash(kernel="triton")
        < flash(kernel="flash1")
    )
    assert flash(causal=True) < flash(causal=False) < 2.1 * flash(causal=True)
    assert 2.5 < flash(backward=True) / flash() < 3.5
    assert flash(length=16384, window=1024) < 0.3 * flash(length=16384)
    assert flash(B200, "cudnn") < flash(kernel="cudnn") < flash(A100, "flash2")
    assert flash(head_dim=64) > 0.5 * flash()  # softmax does not shrink with the heads
    assert flash(heads=1) > flash() / 32  # too few blocks to fill the device


@given(st.integers(1, 600), st.integers(1, 600), st.booleans(), st.booleans())
def test_more_positions_take_no_less(length, more, causal, backward):
    few, many = (flash(length=n, causal=causal, backward=backward) for n in (length, length + more))
    assert few <= many * (1 + 1e-9)


def test_flash_beats_attention_that_writes_its_scores():
    for backward in (False, True):
        unfused = unfused_attention_time_s(1, 32, 4096, 4096, 128, A100, backward=backward)
        assert unfused > 2 * flash(A100, backward=backward)
        assert (
            unfused_attention_time_s(
                1, 32, 4096, 4096, 128, A100, backward=backward, fused_softmax=False
            )
            > unfused
        )
        assert (
            unfused_attention_time_s(1, 32, 4096, 4096, 128, A100, backward=backward, dropout=True)
            > unfused
        )


def test_unfused_traffic_by_hand():
    """2 heads of 1024 x 1024 scores in 2 bytes: softmax reads and writes them, dropout too and its mask of one byte."""
    without = unfused_attention_time_s(1, 2, 1024, 1024, 128, A100)
    with_dropout = unfused_attention_time_s(1, 2, 1024, 1024, 128, A100, dropout=True)
    assert with_dropout - without == pytest.approx(cm.memory_time_s(5 * 2 * 1024**2, A100))


def test_unknown_kernels_name_those_that_were_measured():
    with pytest.raises(ValueError, match=r"'flash4' on h100 .hopper.; did you mean .*flash"):
        flash(kernel="flash4")
    with pytest.raises(
        ValueError, match=r"on t4 .turing.; generations with one: ada, ampere, blackwell"
    ):
        flash(cm.device("t4"))
