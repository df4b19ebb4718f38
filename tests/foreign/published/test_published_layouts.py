"""Free choices against the layouts of runs: never slower as predicted, and said so where they are."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.published_rows import GPT, LLAMA, write

from autopar.foreign.published import evaluate
from autopar.foreign.published.evaluate import case_of, plan_freely, price_run
from autopar.foreign.published.runs import read_runs
from benchmarks.fidelity import published_layouts
from benchmarks.fidelity.published_layouts import compared, layout, main, verdict

PLAIN = LLAMA | {
    "hidden": "512",
    "ffn_hidden": "1408",
    "seq": "512",
    "gpus": "8",
    "dp": "4",
    "tp": "2",
    "micro_batch": "2",
}
TIGHT = PLAIN | {"id": "tight", "hidden": "8192", "ffn_hidden": "28672", "layers": "16", "heads": "64", "kv_heads": "8", "vocab": "128000",
                 "zero_stage_or_fsdp": "0"}  # fmt: skip


def runs_of(tmp_path, *rows):
    runs, problems = read_runs(write(tmp_path, *rows))
    assert not problems, problems
    return runs


def test_a_free_choice_is_not_slower(tmp_path):
    (run,) = runs_of(tmp_path, PLAIN)
    row = compared(run, 20.0, {})
    assert row.slower < 0 and not row.roomier and row.pinned == price_run(case_of(run))
    assert row.free.global_batch == run.global_batch and row.free.mesh.num_devices == 8
    assert layout(run) == "dp=4 tp=2 mb=2 ZeRO-3"


@pytest.mark.slow
def test_a_layout_that_would_not_fit_has_room(tmp_path):
    (run,) = runs_of(tmp_path, TIGHT)
    row = compared(run, 20.0, {})
    assert row.pinned.peak_memory_bytes > 80 * 2**30 and row.roomier and row.slower <= 0
    assert "!" in published_layouts.line(row)


@pytest.mark.slow
def test_a_free_choice_may_be_that_of_megatron_layers(tmp_path, monkeypatch):
    """They keep their shard of an input under a pin alone, and what fits with that fits no other layout."""
    (run,) = runs_of(tmp_path, GPT | {
        "gpus": "8", "tp": "8", "pp": "1", "dp": "1", "micro_batch": "4", "global_batch_seqs": "4", "hidden": "4096", "heads": "32",
        "kv_heads": "32", "ffn_hidden": "16384", "vocab": "51200", "recompute": "none", "sp": "1.0", "extra_opts": "",
    })  # fmt: skip
    case, request = case_of(run), evaluate._request
    pinned, seen = price_run(case), []

    def narrowly(case, pin, memory_bytes):
        seen.append(pin)
        narrow = {"tp": 8, "micro_batch": 4, "recompute": "none"} | pin
        return request(case, narrow, memory_bytes)

    monkeypatch.setattr(evaluate, "_request", narrowly)
    free = plan_freely(case, round(1.001 * pinned.peak_memory_bytes))
    assert case.software.gathers_again and seen == [{}, {"sequence_parallel": True}]
    assert free.predicted.step_time_s <= pinned.step_time_s * (1 + 1e-9)


@pytest.mark.slow
def test_what_cannot_be_planned_has_its_reason(tmp_path):
    one = GPT | {"layers": "1", "gpus": "1", "tp": "1", "pp": "1", "dp": "1", "extra_opts": "one_layer_fwd+bwd_only;no_flash_attn",
                 "micro_batch": "2", "global_batch_seqs": "2"}  # fmt: skip
    row = compared(runs_of(tmp_path, one)[0], 20.0, {})
    assert row.free is None and "one layer alone" in row.reason and row.slower is None
    assert verdict([row], 0.0) == [
        "0 of 1 runs were planned freely; the free choice is predicted to be slower in 0"
    ]


@pytest.mark.slow
def test_a_slower_choice_is_a_failure(tmp_path, monkeypatch, capsys):
    path = write(tmp_path, PLAIN, PLAIN | {"id": "second"})
    assert main([str(path), "--limit", "1", "--output", str(tmp_path / "out.txt")]) == 0
    text = capsys.readouterr().out
    assert (
        text == (tmp_path / "out.txt").read_text()
        and "1 of 1 runs were planned freely" in text
        and "second" not in text
    )
    real = published_layouts.plan_freely

    def slowly(case, memory_bytes, time_limit_s):
        plan = real(case, memory_bytes, time_limit_s)
        return replace(
            plan, predicted=replace(plan.predicted, step_time_s=1.01 * price_run(case).step_time_s)
        )

    monkeypatch.setattr(published_layouts, "plan_freely", slowly)
    assert main([str(path)]) == 1
    assert "SLOWER by 1.00 %: second, dp=4 tp=2 mb=2 ZeRO-3; free: " in capsys.readouterr().out
    assert main([str(path), "--tolerance", "0.02"]) == 0


def test_rows_are_priced_as_predict_prices_them(tmp_path):
    (run,) = runs_of(tmp_path, PLAIN)
    assert compared(run, 20.0, {}).pinned.step_time_s == pytest.approx(
        price_run(case_of(run)).step_time_s, rel=1e-12
    )
