"""Scores: known values, properties, and what is left of them in degenerate cases."""

from __future__ import annotations

from dataclasses import replace
from math import inf, isnan, nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.published_rows import GPT, LLAMA, MOE, write

from autopar.foreign.published.run import Measured, Run, RunPrediction
from autopar.foreign.published.runs import read_runs
from autopar.foreign.published.score import (
    GROUPINGS,
    SELECTIONS,
    Scored,
    comparable,
    grouped,
    mape,
    ordered_pairs,
    prediction_error,
    ranks,
    regret,
    score,
    select,
    spearman,
)

TIMES = st.floats(0.01, 1e4)
PAIRS = st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=12)
FEW = st.lists(
    st.tuples(st.integers(1, 4).map(float), st.integers(1, 4).map(float)), min_size=1, max_size=8
)  # many ties


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Run:
    runs, problems = read_runs(write(tmp_path_factory.mktemp("runs"), GPT))
    assert not problems
    return runs[0]


@pytest.fixture(scope="module")
def families(tmp_path_factory) -> tuple[Run, ...]:
    return read_runs(
        write(tmp_path_factory.mktemp("runs"), GPT, LLAMA, MOE, GPT | {"id": "fp8", "dtype": "fp8"})
    )[0]


def scored(
    run: Run, predicted_s: float, measured_s: float | None, memory: float = 1e9, **measured
) -> Scored:
    return Scored(
        replace(run, measured=Measured(step_time_s=measured_s, **measured)),
        RunPrediction(predicted_s, memory),
    )


def test_errors_are_signed_and_relative():
    assert prediction_error(3.0, 2.0) == 0.5 and prediction_error(1.0, 2.0) == -0.5
    assert [prediction_error(1.0, m) for m in (None, 0.0, nan, inf, -1.0)] == [
        None
    ] * 5 and prediction_error(nan, 1.0) is None
    assert mape([0.5, -0.1]) == pytest.approx(0.3) and isnan(mape([]))


def test_ranks_share_ties():
    assert ranks([10.0, 30.0, 20.0, 20.0]) == [1.0, 4.0, 2.5, 2.5] and ranks([]) == []


@given(PAIRS | FEW)
def test_spearman_is_pearsons_correlation_of_ranks(pairs):
    first, second = zip(*pairs, strict=True)
    found = spearman(first, second)
    if len(pairs) < 2 or len(set(first)) == 1 or len(set(second)) == 1:
        assert isnan(found)
    else:
        assert found == pytest.approx(np.corrcoef(ranks(first), ranks(second))[0, 1], abs=1e-9)
        assert -1 <= found <= 1 and spearman(second, first) == pytest.approx(found)


@given(st.lists(TIMES, min_size=2, max_size=9, unique=True))
def test_spearman_of_monotone_changes(values):
    assert spearman(values, [v**3 for v in values]) == pytest.approx(1.0)
    assert spearman(values, [-v for v in values]) == pytest.approx(-1.0)


def test_spearman_of_what_is_no_ranking():
    assert isnan(spearman([1.0, nan], [1.0, 2.0])) and isnan(spearman([], []))
    with pytest.raises(ValueError, match="2 values cannot be compared with 1"):
        spearman([1.0, 2.0], [1.0])


@given(PAIRS | FEW)
def test_regret_is_zero_for_the_best_and_never_negative(pairs):
    predicted, measured = zip(*pairs, strict=True)
    assert regret(measured, measured) == 0
    assert 0 <= regret(predicted, measured) <= max(measured) / min(measured) - 1


def test_regret_of_a_tie_is_that_of_the_slowest():
    assert regret([1.0, 1.0, 2.0], [4.0, 5.0, 2.0]) == 1.5 and isnan(regret([], []))


@given(PAIRS | FEW)
def test_pairs(pairs):
    predicted, measured = zip(*pairs, strict=True)
    right, total = ordered_pairs(predicted, measured)
    assert 0 <= right <= total <= len(pairs) * (len(pairs) - 1) // 2
    assert ordered_pairs(measured, measured) == (total, total)
    assert ordered_pairs([-m for m in measured], measured) == (0, total)
    assert ordered_pairs([1.0] * len(pairs), measured) == (0, total)  # a tie orders nothing


def test_pairs_within_ten_percent_do_not_count():
    assert ordered_pairs([2.0, 1.0], [1.0, 1.1]) == (0, 0)
    assert ordered_pairs([2.0, 1.0], [1.0, 1.11]) == (0, 1)


def test_groups_share_model_cluster_dtype_and_nearly_the_batch(base):
    def other(**changes) -> Scored:
        return scored(replace(base, **changes), 1.0, 1.0)

    def of_batch(size: int) -> Scored:
        return other(layout=replace(base.layout, global_batch=size))

    near, far = of_batch(2048), of_batch(1024)
    shorter = other(shape=replace(base.shape, layers=2))
    smaller = other(machine=replace(base.machine, nic_Bps=1e9))
    results = [of_batch(2016), near, far, shorter, smaller, scored(base, 1.0, None)]
    assert comparable(results) == [[results[0], near]]
    assert comparable([near, far, near, far]) == [[far, far], [near, near]]
    assert comparable([]) == [] and comparable([near]) == []


def test_ranking_compares_the_time_of_one_sequence(base):
    slow, fast = (
        replace(base, id=name, layout=replace(base.layout, global_batch=size))
        for name, size in (("slow", 2016), ("fast", 2048))
    )
    found = score([scored(slow, 100.0, 100.0), scored(fast, 101.0, 101.0)]).rank
    assert (found.spearman, found.regret, found.groups[0].ids) == (1.0, 0.0, ("slow", "fast"))


def test_scores_of_known_predictions(base):
    runs = [replace(base, id=name) for name in "abc"]
    results = [scored(runs[0], 2.0, 1.0), scored(runs[1], 1.0, 2.0), scored(runs[2], 3.0, None)]
    found = score(results)
    assert (found.time.count, found.time.mape, found.time.bias) == (2, 0.75, 0.25)
    assert found.time.worst == (("a", 1.0), ("b", -0.5)) and found.time.within_10 == 0
    assert (found.rank.spearman, found.rank.regret, found.rank.pairs_right, found.rank.pairs) == (
        -1.0,
        1.0,
        0,
        1,
    )


def test_memory_verdicts(base):
    capacity = base.machine.memory_bytes
    low = scored(base, 1.0, 1.0, memory=8e9, memory_bytes=10e9, memory_scope="device")
    analytic = scored(base, 1.0, 1.0, memory=8e9, memory_bytes=1e9, memory_scope="analytic")
    rejected = scored(replace(base, id="big"), 1.0, 1.0, memory=1.3 * capacity)
    failed = scored(replace(base, id="failed"), 1.0, None, memory=capacity, out_of_memory=True)
    refused = scored(
        replace(base, id="refused"), 1.0, None, memory=2.0 * capacity, out_of_memory=True
    )
    unknown = scored(replace(base, machine=replace(base.machine, memory_bytes=None)), 1.0, 1.0)
    found = score([low, analytic, rejected, unknown, failed], [refused]).memory
    assert (
        (found.count, found.under) == (1, ("gpt",))
        and found.mape == pytest.approx(0.2)
        and found.bias == pytest.approx(-0.2)
    )
    assert (found.rejected, found.judged, found.accepted, found.out_of_memory) == (
        ("big",),
        3,
        ("failed",),
        2,
    )


@pytest.mark.parametrize("results", [0, 1])
def test_nothing_to_score_is_nan(base, results):
    found = score([scored(base, 1.0, None)] * results)
    assert (
        found.time.count == 0
        and isnan(found.time.mape)
        and isnan(found.rank.spearman)
        and isnan(found.rank.regret_worst)
    )
    assert isnan(found.memory.mape) and found.memory.rejected == () and found.time.worst == ()


@given(st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=8))
def test_bias_is_at_most_the_mean_absolute_error(base, pairs):
    found = score([scored(replace(base, id=str(i)), p, m) for i, (p, m) in enumerate(pairs)])
    assert abs(found.time.bias) <= found.time.mape + 1e-9 and found.time.count == len(pairs)
    assert 0 <= found.rank.pairs_right <= found.rank.pairs
    assert isnan(found.rank.regret) or found.rank.regret >= 0


def test_selections_and_groupings(families):
    results = [scored(run, 1.0, 1.0) for run in families]
    chosen = {name: [r.run.id for r in select(results, name)] for name in SELECTIONS}
    assert (
        chosen["tp or pp > 1"] == ["gpt", "fp8"]
        and chosen["MoE"] == ["moe"]
        and chosen["fp8 dense"] == ["fp8"]
    )
    assert chosen["FSDP or ZeRO-3"] == ["llama", "moe"]
    assert {by: list(grouped(results, by)) for by in GROUPINGS} == {
        "source": ["here"],
        "gpu": ["A100-80G-SXM"],
        "dtype": ["fp16", "bf16", "fp8"],
        "framework": ["megatron", "torchtitan"],
        "generation": ["ampere"],
        "model": [
            "gpt 64 x 256, 4 heads",
            "llama 64 x 96, 4 heads",
            "moe 64 x 24, 4 heads, 8 experts",
        ],
        "family": ["gpt", "llama", "experts"],
        "tp": ["tp = 2", "tp = 1"],
    }
    assert sum(map(len, grouped(results, "dtype").values())) == len(results)
