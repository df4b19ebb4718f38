"""The mutation matrix: damage every collective of every model's program under every mesh, one at a time; each must be caught.

    python benchmarks/exactness/mutation_matrix.py [--models llama,gpt2] [--meshes tp=4 cp=2,tp=2] [--every N] [--json FILE] [--verbose]

Models and meshes are those of `model_matrix.py`; what is damaged and what counts as caught, `mutations.py` says.  Prints one row a cell;
exit code 1 if a mutation escaped, or if one that was predicted to change nothing changed something.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path

import torch

if not __package__:  # as a script
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from rich.console import Console
from rich.table import Table

from autopar.api import plan as make_plan
from autopar.cli.plan_commands import parse_pins
from autopar.errors import AutoparError
from autopar.ir.plan import Plan
from autopar.runtime.ranks.launch import WorkerError, WorkerPool
from autopar.verify.verify import Setup, free_network, make_case
from benchmarks.exactness.matrix_cell import NPROC, PLANNING_TIMEOUT_S, PRECISION, ROWS, STEPS
from benchmarks.exactness.model_matrix import WIDTH, cells, matrix_parser
from benchmarks.exactness.model_zoo import ZooModel
from benchmarks.exactness.mutation_cell import MutationCell, judged, run_mutations
from benchmarks.exactness.mutations import Mutation


def setup_of(name: str) -> Setup:
    """The setup with which the matrix trains a model."""
    model = ZooModel.of(name)
    return Setup(model.spec, PRECISION, STEPS, model.seq, ROWS)


def solved_plan(name: str, mesh: str) -> Plan:
    """The plan of one cell.  Raises AutoparError if the planner refuses."""
    setup = setup_of(name)
    case = make_case(setup)
    return make_plan(
        case.model,
        free_network(NPROC),
        case.batches[0],
        ROWS,
        {"zero": 0} | parse_pins(mesh),
        precision=PRECISION,
        traced=case.traced,
        time_limit_s=PLANNING_TIMEOUT_S,
    )


def run_cell(
    pool: WorkerPool, name: str, mesh: str, every: int = 1, start: int = 0, verbose: bool = False
) -> MutationCell:
    """Plan, mutate and judge one cell. `every` and `start` choose mutations as in `run_mutations`;
    `verbose` prints each to stderr. If there is no program, the reason becomes the cell's message.
    """
    began = time.perf_counter()

    def progress(mutation: Mutation, verdict: str) -> None:
        if verbose:
            print(
                f"{name} {mesh}: {time.perf_counter() - began:6.1f} s {verdict}: {mutation}",
                file=sys.stderr,
                flush=True,
            )

    try:
        plan = solved_plan(name, mesh)
        found = run_mutations(pool, (make_case, setup_of(name)), plan, every, start, progress)
    except (AutoparError, WorkerError, RuntimeError) as error:
        return MutationCell(name, mesh, message=str(error), time_s=time.perf_counter() - began)
    return judged(name, mesh, found, began)


def run_models(
    names: list[str], meshes: list[str], every: int, verbose: bool
) -> list[MutationCell]:
    """Run every suitable pair of model and mesh, model by model, and return the cells. Prints each
    to stderr. The workers of a model are copies of this process after it has traced and trained the
    model.
    """
    found = []
    for name in names:
        with WorkerPool(NPROC) as pool:
            for _, mesh in cells([name], meshes):
                cell = run_cell(pool, name, mesh, every, verbose=verbose)
                verdict = cell.message or f"{len(cell.escaped)} of {cell.mutations} escaped"
                print(
                    f"{name} {mesh}: {verdict} in {cell.time_s:.0f} s", file=sys.stderr, flush=True
                )
                found.append(cell)
    return found


def table(found: list[MutationCell]) -> Table:
    """A table with one row for each cell; `inside` counts the mutations inside special lowerings,
    `same` wrong backwards that return the right gradients.
    """
    shown = Table(
        title=f"mutation matrix: {sum(cell.ok for cell in found)} of {len(found)} cells let no mutation escape"
    )
    for name in ("model", "mesh"):
        shown.add_column(name, no_wrap=True)
    for name in (
        "mutations",
        "inside",
        "verifier",
        "differ",
        "raised",
        "stuck",
        "no-ops",
        "same",
        "escaped",
        "time",
    ):
        shown.add_column(name, justify="right")
    for cell in found:
        counts = (
            cell.mutations,
            cell.inside,
            cell.rejected,
            cell.differ,
            cell.raised,
            cell.stuck,
            cell.no_ops,
            len(cell.same),
            len(cell.escaped),
        )
        shown.add_row(cell.model, cell.mesh, *map(str, counts), f"{cell.time_s:.0f} s")
    return shown


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = matrix_parser(__doc__)
    parser.add_argument("--every", type=int, default=1, help="apply every N-th mutation only")
    parser.add_argument("--verbose", action="store_true", help="tell of every mutation, on stderr")
    options = parser.parse_args(arguments)
    if options.every < 1:
        parser.error(f"--every {options.every} must be at least 1")
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    names = [name for name in options.models.split(",") if name]
    try:
        list(cells(names, options.meshes))
    except AutoparError as error:
        parser.error(str(error))
    found = run_models(names, options.meshes, options.every, options.verbose)
    if options.json:
        options.json.write_text(json.dumps([cell.as_dict() for cell in found], indent=1))
    Console(width=WIDTH, highlight=False).print(table(found))
    for cell in found:
        for text in cell.same:
            print(f"{cell.model} {cell.mesh}: {text}")
        for problem in (
            cell.message,
            *(f"NOT CAUGHT: {text}" for text in cell.escaped),
            *(f"no no-op: {text}" for text in cell.wrong),
        ):
            if problem:
                print(f"{cell.model} {cell.mesh}: {problem}")
    return 0 if all(cell.ok for cell in found) else 1


if __name__ == "__main__":
    sys.exit(main())
