"""Pareto-optimal rows, and the ways to recompute that are left where there are many."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.effort import examples

from autopar.solve.costs import pareto
from autopar.solve.costs.pareto import undominated
from autopar.solve.staging.recompute_options import BlockKind, RecomputeOptions


@settings(max_examples=examples(60, 600))
@given(
    st.integers(0, 10**6),
    st.integers(0, 300),
    st.lists(st.integers(1, 50), min_size=1, max_size=4),
    st.sampled_from([16, 100, 1024]),
)
def test_rows_left_are_those_that_none_dominates(seed, count, widths, together):
    """Rows of few and of many values, which are compared by levels or by sets, together or not."""
    random = np.random.default_rng(seed)
    keys = np.column_stack([random.integers(0, width, count) for width in widths]).astype(float)
    keys[random.random(keys.shape) < 0.05] = np.inf
    at_most = (keys[:, None] <= keys[None]).all(axis=2)  # [row, row that it is compared with]
    is_equal = (keys[:, None] == keys[None]).all(axis=2)
    earlier = np.triu(np.ones((count, count), dtype=bool), 1)
    dominated = (at_most & (~is_equal | earlier)).any(axis=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pareto, "_TOGETHER", together)
        assert sorted(undominated(keys)) == np.flatnonzero(~dominated).tolist()


def random_kind(random: np.random.Generator, modes: int) -> BlockKind:
    """A block that keeps less and takes longer the later its mode."""
    kept = -np.sort(random.integers(0, 50, modes))
    more_s, step_s = np.sort(random.random(modes)), random.random(modes)
    late = random.integers(0, 50) - kept + random.integers(0, 3, modes)
    peaks = random.integers(0, 40, (2, modes)).tolist()
    zeros = (0.0,) * modes
    return BlockKind(
        more_s=(0.0, *more_s[1:]), work_s=zeros, step_s=tuple(step_s), lines=(),
        more_kept=tuple(kept.tolist()), transient=peaks[0], parted=peaks[1], late=tuple(late.tolist()),
    )  # fmt: skip


@settings(max_examples=examples(40, 400))
@given(
    st.integers(0, 10**6),
    st.lists(st.integers(0, 7), min_size=1, max_size=2),
    st.integers(2, 4),
    st.booleans(),
)
def test_the_fastest_way_that_fits_is_left(seed, counts, modes, parted):
    """Of many ways some are dropped; none of them is the fastest in any memory, however many
    micro-batches wait of those that are held.
    """
    random = np.random.default_rng(seed)
    kinds = [random_kind(random, modes) for _ in counts]
    whole = RecomputeOptions(kinds, modes, 4).options(tuple(counts), parted)
    sifted = RecomputeOptions(kinds, modes, 4)._sifted_options(tuple(counts), parted)
    assert len(sifted.more_s) <= len(whole.more_s)
    held = int(random.integers(1, 9))
    late = int(random.integers(1, held + 1)) if parted else 0
    last = int(random.integers(0, 200))  # what the last segment needs before the blocks' backward
    of_all, of_sifted = (
        held * of.more_kept + late * of.late + np.maximum(of.moment, (last - of.late) * parted)
        for of in (whole, sifted)
    )
    for room in np.quantile(of_all, [0.0, 0.3, 0.6, 1.0]):
        for seconds in ("more_s", "least_s"):
            # sums are added in another order where kinds are joined
            best = getattr(whole, seconds)[of_all <= room].min()
            assert getattr(sifted, seconds)[of_sifted <= room].min(initial=np.inf) == pytest.approx(
                best, rel=1e-12, abs=1e-12
            )
