"""Chances to fit: bounds, order, calibration on invented layouts; and files of layouts that failed."""

from __future__ import annotations

from dataclasses import replace
from math import exp, isnan
from random import Random

import pytest
from autopar_cost_models.memory_error import SPREAD
from hypothesis import given
from hypothesis import strategies as st
from support.published_rows import GPT, write

from autopar.foreign.published.chances import (
    fitted_outcomes,
    fitted_spread,
    reliability,
    run_fit_chance,
    separation,
    spread_of,
)
from autopar.foreign.published.run import RunPrediction
from autopar.foreign.published.runs import read_runs

CHANCES = st.lists(st.floats(0, 1), max_size=20)
LAYOUT = {
    "description": "nanotron 1B (layers=16 hidden=2048 heads=32 ffn=8192 vocab=131072), H100-80G-SXM x8 (8 a node), seq 4096, bf16, "
    "no recompute, fp32 grad accumulation",
    "layout": "tp=1;pp=2;dp=4;zero=1;micro_batch=64;grad_accum=1;global_batch_seqs=256",
    "fits": "0",
    "source": "here",
}


def test_a_layout_that_just_fits_has_an_even_chance(tmp_path):
    (run,), _ = read_runs(write(tmp_path, GPT))
    size = run.machine.memory_bytes
    assert run_fit_chance(run, RunPrediction(1.0, size)) == pytest.approx(0.5)
    assert run_fit_chance(run, RunPrediction(1.0, size * (1 - SPREAD))) > 0.84
    assert run_fit_chance(run, RunPrediction(1.0, 0.0)) == pytest.approx(1.0)
    unknown = replace(run, machine=replace(run.machine, memory_bytes=None))
    assert run_fit_chance(unknown, RunPrediction(1.0, size)) is None


@given(CHANCES, CHANCES)
def test_separation_is_the_share_of_pairs_in_order(ran, failed):
    share = separation(ran, failed)
    assert isnan(share) == (not ran or not failed)
    if ran and failed:
        assert 0 <= share <= 1 and share == pytest.approx(1 - separation(failed, ran))


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), max_size=30))
def test_a_reliability_table_counts_each_layout_once(pairs):
    table = reliability(pairs)
    assert sum(row.count for row in table) == len(pairs)
    assert sum(row.count * row.ran for row in table) == pytest.approx(sum(ran for _, ran in pairs))
    assert all(row.low <= row.chance <= row.high + 1e-12 for row in table)


def test_a_file_of_layouts_is_one_of_runs(tmp_path):
    other = LAYOUT | {"fits": "1", "layout": LAYOUT["layout"].replace("64", "2")}
    runs, problems = read_runs(
        write(tmp_path, LAYOUT, other, LAYOUT | {"description": "a big one"})
    )
    assert [run.measured.out_of_memory for run in runs] == [True, False]
    first = runs[0]
    assert (first.shape.layers, first.shape.tied, first.layout.pp) == (16, True, 2)
    assert first.software.framework == "nanotron" and first.layout.micro_batch == 64
    assert len(problems) == 1 and "is not of the form" in problems[0].reason


def test_outcomes_give_back_the_spread_and_the_crashes_that_made_them():
    draw = Random(0)
    rooms = [draw.uniform(-0.5, 0.5) for _ in range(20_000)]
    pairs = [(room, draw.gauss(0, 0.11) < room and draw.random() >= 0.06) for room in rooms]
    fit = fitted_outcomes(pairs)
    assert fit is not None and fit.count == 20_000
    assert fit.spread == pytest.approx(0.11, abs=0.011) and fit.crashed == pytest.approx(
        0.06, abs=0.011
    )
    assert fitted_outcomes((room, True) for room in rooms) is None


def test_a_spread_comes_out_as_it_was_put_in(tmp_path):
    assert fitted_spread([exp(0.2) - 1, exp(-0.2) - 1]) == pytest.approx(0.2)
    with pytest.raises(ValueError, match="nothing to fit"):
        fitted_spread([])
    (run,), _ = read_runs(write(tmp_path, GPT))
    size = run.machine.memory_bytes
    layouts = [(run, RunPrediction(1.0, size * part), ran) for part, ran in ((0.9, 1), (1.2, 0))]
    narrow, wide = (spread_of("all", [error], layouts) for error in (0.02, 0.5))
    assert narrow.count == 1 and narrow.separation == wide.separation == 1.0
    assert [row.ran for row in narrow.reliability] == [0.0, 1.0]
    assert narrow.reliability[-1].chance > wide.reliability[-1].chance
