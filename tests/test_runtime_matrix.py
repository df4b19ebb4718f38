"""The matrix of the runtime (benchmarks/exactness/runtime_matrix.py) and its own honesty.

Some cells run here, all pairs with --runslow.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, replace
from itertools import combinations, product

import pytest

from benchmarks.exactness import runtime_matrix
from benchmarks.exactness.covering import covering
from benchmarks.exactness.runtime_matrix import (
    MODELS,
    REFUSALS,
    SCHEDULES,
    Cell,
    Outcome,
    Refusal,
    covering_cells,
    every_cell,
    refusal_of,
    run_cells,
)

pytest.importorskip("transformers")

SOME = [
    Cell("gpt", 2, 1, 2, 3, "full", "1f1b"),
    Cell("gpt", 2, 1, 2, 1, "selective", "zero_bubble"),
    Cell("gpt", 2, 2, 1, 3, "none", "zero_bubble"),  # refused
]


def test_some_cells():
    found = list(run_cells(SOME))
    assert [outcome.status for outcome in found] == ["exact", "exact", "refused"], found


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("model", MODELS)
def test_every_pair(model):
    failed = [outcome for outcome in run_cells(cell for cell in covering_cells(every_cell()) if cell.model == model)
              if outcome.status != "exact"]  # fmt: skip
    assert not failed


def test_the_cells_are_those_of_the_issue():
    cells = every_cell()
    meshes = {(2, 2, 1), (2, 1, 2), (4, 1, 1), (1, 2, 2), (2, 2, 2), (4, 2, 1), (4, 1, 2)}
    assert {(c.pp, c.tp, c.dp) for c in cells} == meshes and len(set(cells)) == len(cells)
    expected = [len(MODELS) * 4 * 4 * (4 if pp > 1 else 1) for pp, _, _ in meshes]
    assert len(cells) == sum(expected) == 2800
    assert Counter(refusal_of(cell) is None for cell in cells) == {True: 1792, False: 1008}


def test_the_covering_part_covers():
    """Every triple and pair, counted apart from the code that chose."""
    cells = [cell for cell in every_cell() if refusal_of(cell) is None]
    chosen = covering_cells(every_cell())
    for schedule, zero, recompute in product(
        SCHEDULES, (0, 1, 2, 3), ("none", "gather", "selective", "full")
    ):
        assert any((c.schedule, c.zero, c.recompute) == (schedule, zero, recompute) for c in chosen)
    for one, other in combinations(("model", "pp", "tp", "dp", "zero", "recompute", "schedule"), 2):
        pairs, shown = (
            {(getattr(c, one), getattr(c, other)) for c in of} for of in (cells, chosen)
        )
        assert pairs == shown
    assert set(chosen) <= set(cells) and len(chosen) < len(cells) / 20
    assert chosen == covering_cells(every_cell())


def test_a_covering_part_of_a_small_table():
    rows = [dict(zip("abc", values, strict=True)) for values in product((0, 1), (0, 1), (0, 1))]
    chosen = covering(rows, "ab")
    assert len(chosen) == 4 and {(rows[n]["b"], rows[n]["c"]) for n in chosen} == {
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    }
    assert covering(rows, "abc") == list(range(8))


@pytest.fixture(scope="module")
def cell() -> Cell:
    return SOME[0]


def run_with(monkeypatch, cell: Cell, ranks=None, refused: str = "") -> Outcome:
    """The outcome of a cell on ranks, or with a refusal of the planner, that are made up."""

    class Pool:
        def run(self, *args, timeout_s):
            return ranks

    if refused:
        monkeypatch.setattr(
            runtime_matrix,
            "plan_of",
            lambda cell, case: (_ for _ in ()).throw(runtime_matrix.AutoparError(refused)),
        )
    return runtime_matrix.run_cell(cell, Pool())


def test_what_fails_a_cell(monkeypatch, cell):
    losses = runtime_matrix.make_case(runtime_matrix.setup_of(cell.model, cell.layers)).losses
    assert run_with(monkeypatch, cell, [(1e-14, "w", losses)] * 4).status == "exact"
    found = run_with(monkeypatch, cell, [(1e-14, "w", losses), (2e-9, "v", losses)])
    assert (found.status, found.tensor, found.error) == ("failed", "v", 2e-9)
    found = run_with(
        monkeypatch,
        cell,
        [(1e-14, "w", losses), (1e-14, "w", (losses[0] * (1 + 1e-8), *losses[1:]))],
    )
    assert (found.status, found.tensor) == ("failed", "the loss")
    assert run_with(monkeypatch, cell, [(float("inf"), "w", losses)]).status == "failed"
    with monkeypatch.context() as change:
        change.setattr(
            runtime_matrix, "REFUSALS", (Refusal("listed", lambda cell: True, "some words"),)
        )
        assert run_with(change, cell, []).message == "not refused, though listed"
        assert run_with(change, cell, [], "some words here").status == "refused"
        assert run_with(change, cell, [], "others").status == "failed"
    assert run_with(monkeypatch, cell, [], "not listed").message == "refused: not listed"


def test_the_command(monkeypatch, tmp_path, capsys):
    """Parts add up to the whole; the log spares what passed, not what failed; failures end it with 1."""
    ran: list[Cell] = []
    of_gpt = [cell for cell in every_cell() if cell.model == "gpt"]

    def made_up(cells):
        for cell in cells:
            ran.append(cell)
            status = "refused" if refusal_of(cell) else "failed" if cell in broken else "exact"
            yield Outcome(cell, status, "broken" if status == "failed" else "", 1e-15)

    failing = [
        cell for cell in of_gpt if (cell.pp, cell.dp, cell.tp, cell.schedule) == (4, 2, 1, "gpipe")
    ]
    broken = set(failing)
    monkeypatch.setattr(runtime_matrix, "run_cells", made_up)
    log = tmp_path / "cells.jsonl"
    ended = [
        runtime_matrix.main(["--models", "gpt", "--shard", part, "--log", str(log)])
        for part in ("1/3", "2/3", "3/3")
    ]
    assert set(ended) == {0, 1}  # one part has no cell that fails
    assert sorted(map(str, ran)) == sorted(map(str, of_gpt))
    ran.clear()
    broken.clear()
    assert runtime_matrix.main(["--models", "gpt", "--log", str(log)]) == 0
    assert ran == failing
    out = capsys.readouterr().out
    assert (
        "failed  gpt pp=4 tp=1 dp=2 zero=0 none gpipe: broken" in out
        and f"refused   144  {REFUSALS[0].reason}" in out
    )
    with pytest.raises(SystemExit):
        runtime_matrix.main(["--models", "lama"])
    with pytest.raises(SystemExit):
        runtime_matrix.main(["--shard", "4/3"])


def test_outcomes_are_lines():
    outcome = Outcome(SOME[0], "failed", "no", float("inf"), "w", 1.5)
    assert (
        Outcome.of_line(outcome.as_line()) == outcome and asdict(outcome)["cell"]["model"] == "gpt"
    )
    assert (
        replace(SOME[0], schedule="interleaved_1f1b").pins["vpp"] == 2
        and "schedule" not in Cell("gpt", 1, 2, 2, 0, "none", "none").pins
    )


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved_1f1b", "zero_bubble"])
def test_zero_without_data_parallelism_says_so_in_a_pipeline(schedule, cell):
    found = run_with(
        pytest.MonkeyPatch(), replace(cell, tp=2, dp=1, zero=2, schedule=schedule, model="gpt")
    )
    assert (
        found.status == "refused"
        and "shares out over dp and cp what several ranks hold" in found.message
    )
