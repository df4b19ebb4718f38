"""The model matrix (benchmarks/exactness/model_matrix.py): a covering part here, every cell with --runslow, and the matrix' own honesty.

`KNOWN` lists the cells that do not pass yet, with the reason.  It is strict: a listed cell that passes fails the test.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
import torch

from autopar.cli.plan_commands import parse_pins
from autopar.ops.work import model_flops
from autopar.verify.verify import Setup, make_case
from autopar.verify.widened import Widened
from benchmarks.exactness import matrix_cell, model_matrix
from benchmarks.exactness.matrix_cell import (
    NPROC,
    PRECISION,
    ROWS,
    STEPS,
    Cell,
    RankResult,
    counting,
    run_cell,
    single_device_flops,
)
from benchmarks.exactness.model_zoo import CONFIGS, ZooModel

pytest.importorskip("transformers")

ANY = "*"
KNOWN: dict[tuple[str, str], str] = {}
"""(model or ANY, mesh) -> why the cell does not pass."""

COVERING = {
    ("mistral", "cp=2,tp=2"),  # fewer key heads than query heads, rotary tables, windows
}
"""What runs without --runslow. Tied embeddings, experts and images have quick tests of their own."""

CELLS = [
    pytest.param(
        name, mesh, id=f"{name}-{mesh}", marks=() if (name, mesh) in COVERING else pytest.mark.slow
    )
    for name, mesh in model_matrix.cells(list(CONFIGS), list(model_matrix.MESHES))
]


@pytest.mark.parametrize(("name", "mesh"), CELLS)
def test_cell(name, mesh):
    cell = run_cell(ZooModel.of(name), mesh, parse_pins(mesh))
    reason = KNOWN.get((name, mesh)) or KNOWN.get((ANY, mesh))
    assert not cell.uncounted, (
        f"FlopCounterMode cannot look into {cell.uncounted}: give matrix_cell.formulas their FLOPs"
    )
    if reason:
        print(f"known: {name} {mesh}: {reason} ({cell.status}: {cell.message})")
        assert cell.status != "ok", f"{name} under {mesh} passes: take it out of KNOWN"
    else:
        assert cell.status == "ok", (
            f"{cell.message}; replicated: {cell.replicated[:5]}; held whole: {cell.whole_matrices[:5]}"
        )


def test_known_cells_exist_and_are_listed(capsys):
    names, meshes = {*CONFIGS, ANY}, set(model_matrix.MESHES)
    assert all(name in names and mesh in meshes for name, mesh in KNOWN)
    assert {tuple(cell.values) for cell in CELLS} >= COVERING
    with capsys.disabled():
        print(
            "".join(
                f"\nmodel matrix, not yet: {name} {mesh}: {reason}"
                for (name, mesh), reason in KNOWN.items()
            )
        )


def setup_of(name: str) -> Setup:
    model = ZooModel.of(name)
    return Setup(model.spec, PRECISION, STEPS, model.seq, ROWS)


def fake_ranks(name: str, share: float) -> list[RankResult]:
    """Ranks that are exact, and hold and compute `share` of the whole each."""
    setup = setup_of(name)
    case, flops = make_case(setup), single_device_flops(setup)
    held = {
        n: round(torch.Size(s.shape).numel() * share)
        for n, s in case.traced.parameters.items()
        if matrix_cell.is_matrix(s)
    }
    return [RankResult(0.0, "", case.losses, int(flops * share), held, 0, ())] * NPROC


@pytest.mark.parametrize(("damage", "words"), [
    ({}, ""),
    ({"worst_error": 1e-8, "worst_tensor": "w"}, "not exact: w is off by 1.0e-08"),
    ({"worst_error": float("inf")}, "not exact"),
    ({"losses": (1.0, 1.0, 1.0)}, "not exact: a loss"),
    ({"flops": 10**12}, "FLOPs /"),
    ({"held": {"w": 10**9}}, "bytes /"),
])  # fmt: skip
def test_one_bad_rank_fails_a_cell(damage, words, monkeypatch):
    ranks = fake_ranks("autopar-gpt", 1 / NPROC)
    if "held" in damage:
        damage = {"held": ranks[0].held | {name: 4 * held for name, held in ranks[0].held.items()}}
    ranks[2] = replace(ranks[2], **damage)
    monkeypatch.setattr(matrix_cell, "run_workers", lambda *args: ranks)
    cell = run_cell(ZooModel.of("autopar-gpt"), "tp=4", {"tp": 4})
    assert (cell.status == "ok") == (not words) and words in cell.message


def test_a_worker_that_dies_or_hangs_fails_its_cell(monkeypatch):
    def die(rank, *args):
        raise ZeroDivisionError("the worker is broken")

    monkeypatch.setattr(matrix_cell, "_rank", die)
    cell = run_cell(ZooModel.of("autopar-gpt"), "tp=4", {"tp": 4})
    assert cell.status == "failed" and "the worker is broken" in cell.message
    monkeypatch.setattr(matrix_cell, "_rank", lambda *args: time.sleep(60))
    monkeypatch.setattr(matrix_cell, "WORKERS_TIMEOUT_S", 1.0)
    cell = run_cell(ZooModel.of("autopar-gpt"), "tp=4", {"tp": 4})
    assert cell.status == "failed" and "did not finish within 1 s" in cell.message


def test_flops_are_those_of_the_planner():
    """model_flops counts matrix products by the op rules.  CPU attention computes its scores once more backward: 2.5 x forward."""
    setup = setup_of("autopar-llama")
    assert single_device_flops(setup) == pytest.approx(
        model_flops(make_case(setup).traced, ROWS), rel=0.02
    )


def test_grouped_products_count_their_rows():
    rows, weights = (
        torch.randn(10, 4),
        torch.randn(3, 4, 8),
    )  # strides of 16 bytes, as the kernel wants
    offs = torch.tensor([2, 2, 7], dtype=torch.int32)
    with counting() as counter:
        torch._grouped_mm(rows, weights, offs=offs)
    assert counter.flops == 2 * 7 * 4 * 8 and not counter.unknown


def test_grouped_products_widen():
    rows, weights = (
        torch.randn(10, 4, dtype=torch.float64),
        torch.randn(3, 4, 5, dtype=torch.float64),
    )
    with Widened():
        found = torch.nn.functional.grouped_mm(
            rows, weights, offs=torch.tensor([2, 2, 7], dtype=torch.int32)
        )
    expected = torch.cat(
        [rows[:2] @ weights[0], rows[2:7] @ weights[2], torch.zeros(3, 5, dtype=torch.float64)]
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_the_command(monkeypatch, tmp_path, capsys):
    """Refusals are rows and fail the command; JSON holds every cell."""
    cells = [Cell("llama", "tp=4", "ok", worst_error=1e-14, bytes_ratio=4.0, needed_bytes=3.6, flops_ratio=3.9, needed_flops=3.4),
             Cell("mamba", "tp=4", "refused", "tp=4 is not for you", replicated=(("layers.0.mm", "tp", 0.25),))]  # fmt: skip
    monkeypatch.setattr(
        model_matrix, "run_one_by_one", lambda names, meshes: [c for c in cells if c.model in names]
    )
    file = tmp_path / "cells.json"
    assert (
        model_matrix.main(["--models", "llama,mamba", "--meshes", "tp=4", "--json", str(file)]) == 1
    )
    assert "refused: tp=4 is not for you" in " ".join(capsys.readouterr().out.split())
    assert (
        model_matrix.read_json(file) == cells
        and json.loads(file.read_text())[1]["worst_error"] == "inf"
    )
    assert model_matrix.main(["--models", "llama", "--meshes", "tp=4"]) == 0
    with pytest.raises(SystemExit):
        model_matrix.main(["--models", "lama"])


@pytest.mark.slow
def test_models_run_side_by_side(tmp_path):
    found = model_matrix.run_side_by_side(["autopar-gpt"], ["dp=3"], 2)
    assert [(cell.model, cell.mesh, cell.status) for cell in found] == [
        ("autopar-gpt", "dp=3", "refused")
    ]
    assert "dp=3 does not divide 4 devices" in found[0].message
