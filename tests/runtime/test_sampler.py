"""The sampler: every row once an epoch, the same rows a step however many ranks share them, and resumed runs go on."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import AutoparError
from autopar.runtime.batches.sampler import DataParallelSampler


@given(
    st.integers(1, 40),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 3),
    st.integers(0, 5),
    st.booleans(),
)
def test_ranks_share_each_global_batch(rows, parts, share, seed, shuffle):
    batch = parts * share
    if rows < batch:
        return
    alone = list(DataParallelSampler(range(rows), batch, 1, 0, lambda: 0, seed, shuffle))
    ranks = [
        list(DataParallelSampler(range(rows), batch, parts, index, lambda: 0, seed, shuffle))
        for index in range(parts)
    ]
    assert [list(chain.from_iterable(pieces)) for pieces in zip(*ranks, strict=True)] == alone
    seen = [row for found in alone for row in found]
    assert len(set(seen)) == len(seen) == rows // batch * batch
    assert shuffle or seen == sorted(seen)


def test_resumed_runs_go_on_and_epochs_differ():
    def run(first: int, last: int) -> list[list[int]]:
        step, found = first, []
        sampler = DataParallelSampler(range(22), 4, 2, 1, lambda: step, seed=3)
        while step < last:
            assert len(sampler) == 5 - step % 5 and sampler.epoch == step // 5
            for batch in sampler:
                found.append(batch)
                step += 1
                if step == last:
                    break
        return found

    whole = run(0, 17)
    assert len(whole) == 17 and all(run(0, stop) + run(stop, 17) == whole for stop in range(1, 17))
    assert whole[:5] != whole[5:10] and {row for batch in whole for row in batch} <= set(range(22))


def test_mistakes():
    with pytest.raises(AutoparError, match="6 rows cannot be shared by 4"):
        DataParallelSampler(range(100), 6, 4, 0, lambda: 0)
    with pytest.raises(AutoparError, match="3 rows, too few for one global batch of 4"):
        DataParallelSampler(range(3), 4, 2, 0, lambda: 0)
    with pytest.raises(AutoparError, match="has no length"):
        DataParallelSampler(iter(range(3)), 4, 2, 0, lambda: 0)
    with pytest.raises(AutoparError, match="rank 2 is not one of 2"):
        DataParallelSampler(range(8), 4, 2, 2, lambda: 0)
