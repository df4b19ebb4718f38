"""The model matrix: every architecture under every mesh of four processes, exact and sharded.

    python benchmarks/exactness/model_matrix.py [--models llama,gpt2] [--meshes tp=4 dp=2,tp=2] [--json FILE] [--jobs 1]

Trains each tiny model of `model_zoo.py` on CPU processes under each mesh, compares it with one
device, and weighs what a rank holds and computes (`matrix_cell.py` says how).  Prints one row a
cell; exit code 1 if a cell failed or was refused.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

if not __package__:  # as a script
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from rich.console import Console
from rich.table import Table

from autopar.cli.plan_commands import parse_pins
from autopar.errors import AutoparError
from benchmarks.exactness.matrix_cell import Cell, run_cell
from benchmarks.exactness.model_zoo import CONFIGS, RATIO_EXEMPT, ZooModel

MESHES = ("dp=2,tp=2", "tp=4", "cp=2,tp=2", "ep=2,dp=2")
WIDTH = 170
SHOWN_OPS, LONGEST_MESSAGE = 3, 240


def cells(names: list[str], meshes: list[str]) -> Iterator[tuple[str, str]]:
    """(model, mesh) of every cell whose mesh suits the model (`ZooModel.can_have`)."""
    for name in names:
        model = ZooModel.of(name)
        for mesh in meshes:
            if model.can_have(parse_pins(mesh)):
                yield name, mesh


def run_one_by_one(names: list[str], meshes: list[str]) -> list[Cell]:
    """Run every suitable pair of model and mesh in this process, in turn, and return the cells.
    Prints each to stderr. A model's trace and reference are made once for all its meshes.
    """
    found = []
    for name, mesh in cells(names, meshes):
        cell = run_cell(ZooModel.of(name), mesh, parse_pins(mesh))
        note = f": {cell.message}" if cell.message else ""
        print(
            f"{name} {mesh}: {cell.status} in {cell.time_s:.1f} s{note}"[:LONGEST_MESSAGE],
            file=sys.stderr,
            flush=True,
        )
        found.append(cell)
    return found


def run_side_by_side(names: list[str], meshes: list[str], jobs: int) -> list[Cell]:
    """The cells of all models, in order: each model runs in a new process of this script, `jobs` at
    a time. If a process dies, all its cells are failed.
    """

    def run(name: str) -> list[Cell]:
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory) / "cells.json"
            command = [
                sys.executable,
                __file__,
                "--models",
                name,
                "--meshes",
                *meshes,
                "--json",
                str(file),
            ]
            done = subprocess.run(
                command, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"}
            )
            if not file.exists():
                return [
                    Cell(name, mesh, "failed", f"the process ended with code {done.returncode}")
                    for _, mesh in cells([name], meshes)
                ]
            return read_json(file)

    with ThreadPoolExecutor(jobs) as pool:
        return [cell for found in pool.map(run, names) for cell in found]


def write_json(file: Path, found: list[Cell]) -> None:
    """Write the cells to a file as a JSON list, for `read_json`."""
    file.write_text(json.dumps([cell.as_dict() for cell in found], indent=1))


def read_json(file: Path) -> list[Cell]:
    """The cells in a file that `write_json` wrote."""
    rows = json.loads(file.read_text())
    return [
        Cell(
            **{key: tuple(map(_tuple, v)) if isinstance(v, list) else v for key, v in row.items()}
            | {"worst_error": float(row["worst_error"])}
        )
        for row in rows
    ]


def _tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def table(found: list[Cell]) -> Table:
    """A table with one row for each cell."""
    shown = Table(
        title=f"model matrix: {sum(cell.status == 'ok' for cell in found)} of {len(found)} cells are exact and sharded"
    )
    for name, justify in (
        ("model", "left"),
        ("mesh", "left"),
        ("worst error", "right"),
        ("bytes /", "right"),
        ("FLOPs /", "right"),
        ("moved", "right"),
        ("verdict", "left"),
        ("replicated ops (FLOPs), whole matrices (bytes)", "left"),
    ):
        shown.add_column(name, justify=justify, no_wrap=name == "mesh")
    for cell in found:
        measured = cell.bytes_ratio > 0
        shown.add_row(
            cell.model,
            cell.mesh,
            f"{cell.worst_error:.0e}" if measured else "",
            f"{cell.bytes_ratio:.2f} of {cell.needed_bytes:.2f}" if measured else "",
            f"{cell.flops_ratio:.2f} of {cell.needed_flops:.2f}" if measured else "",
            f"{cell.moved:.0f}" if measured else "",
            "OK" if cell.status == "ok" else f"{cell.status}: {cell.message}"[:LONGEST_MESSAGE],
            _replication(cell),
        )
    return shown


def _replication(cell: Cell) -> str:
    ops = [f"{op} over {axis} {share:.0%}" for op, axis, share in cell.replicated]
    matrices = [
        f"{name} {share:.0%}"
        for name, share in sorted(cell.whole_matrices, key=lambda item: -item[1])
    ]
    parts = [
        ", ".join(part[:SHOWN_OPS])
        + (f" and {len(part) - SHOWN_OPS} more" if len(part) > SHOWN_OPS else "")
        for part in (ops, matrices)
        if part
    ]
    if cell.uncounted:
        parts.append("not counted: " + ", ".join(cell.uncounted))
    return " | ".join(parts)


def matrix_parser(doc: str) -> argparse.ArgumentParser:
    """A parser with the options --models, --meshes and --json, which choose the cells that run. The
    first line of `doc` describes the command.
    """
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument(
        "--models", default=",".join(CONFIGS), help="comma-separated names (default: all)"
    )
    parser.add_argument(
        "--meshes",
        nargs="+",
        default=list(MESHES),
        help=f"pins of each mesh (default: {' '.join(MESHES)})",
    )
    parser.add_argument("--json", type=Path, help="also write the cells to this file")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = matrix_parser(__doc__)
    parser.add_argument(
        "--jobs", type=int, default=1, help="models run at a time, each on 4 processes"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    names = [name for name in options.models.split(",") if name]
    try:
        count = len(list(cells(names, options.meshes)))
    except AutoparError as error:
        parser.error(str(error))
    print(f"{count} cells", file=sys.stderr)
    found = (
        run_side_by_side(names, options.meshes, options.jobs)
        if options.jobs > 1
        else run_one_by_one(names, options.meshes)
    )
    if options.json:
        write_json(options.json, found)
    Console(width=WIDTH, highlight=False).print(table(found))
    for name, reason in RATIO_EXEMPT.items():
        if name in names:
            print(f"{name} need not be sharded: {reason}")
    return 0 if all(cell.status == "ok" for cell in found) else 1


if __name__ == "__main__":
    sys.exit(main())
