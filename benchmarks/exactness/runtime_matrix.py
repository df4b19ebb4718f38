"""The matrix of the runtime: meshes x ZeRO x recompute x schedules; every cell is exact or refused.

It has pp x tp x dp over seven models.

    python benchmarks/exactness/runtime_matrix.py [--pairs] [--models gpt,hf-t5] [--shard 1/4] [--log cells.jsonl]
    python benchmarks/exactness/runtime_matrix.py --adamw

A cell trains a tiny model on 4 or 8 gloo processes under a plan made with its pins. It is compared
with one device as `autopar verify` does: in fp64, over three steps of SGD with momentum. The
update-relative error of every tensor and of the losses is at most 1e-9.  What cannot run is listed
in `REFUSALS`: there a cell must be refused, in those words, and nowhere else.  `--pairs` takes few
cells, which still show every schedule x ZeRO x recompute and every other pair of values.  `--log`
adds each cell to a file as it ends; those that passed there already are not run again.  Prints
counts, refusals and what failed; exit code 1 if anything did.  `--adamw` runs 20 steps of AdamW and
Adafactor under composed plans instead (`optimizer_runs.py`).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from itertools import groupby, product
from pathlib import Path
from typing import Any

import torch

if not __package__:  # as a script
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from autopar.api import plan as make_plan
from autopar.errors import AutoparError
from autopar.ir.plan import Plan
from autopar.runtime.ranks.launch import WorkerError, WorkerPool
from autopar.verify.verify import (
    TOLERANCES,
    Case,
    Setup,
    expected_of,
    free_network,
    make_case,
    rank_errors,
    relative_error,
)
from benchmarks.exactness.covering import covering
from benchmarks.exactness.model_zoo import SEQ, ZooModel
from benchmarks.exactness.optimizer_runs import RUNS, run_optimizer

MODELS = {"llama": "autopar-llama", "gpt": "autopar-gpt", "moe": "autopar-moe", "hf-llama": "llama", "hf-gpt2": "gpt2",
          "hf-mixtral": "mixtral", "hf-t5": "t5"}  # fmt: skip
"""Names of models in this matrix -> their names in `model_zoo.py`."""

PROCESSES = (4, 8)
DEGREES = {"pp": (1, 2, 4), "tp": (1, 2), "dp": (1, 2)}
ZERO, RECOMPUTE = (0, 1, 2, 3), ("none", "gather", "selective", "full")
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble")
TOGETHER = ("schedule", "zero", "recompute")
ROWS, MICRO_BATCHES, STEPS, PRECISION = 8, 4, 3, "fp64"
CELL_TIMEOUT_S, LONGEST_LINE = 180.0, 300
PLANNING_S = 5.0
"""The longest search for a plan, in seconds. On a free network many plans are equally fast, and
equally exact.
"""


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination of the matrix: model, degrees of the mesh, ZeRO stage, recompute mode,
    schedule. `schedule` is 'none' without a pipeline.
    """

    model: str
    pp: int
    tp: int
    dp: int
    zero: int
    recompute: str
    schedule: str

    @property
    def processes(self) -> int:
        return self.pp * self.tp * self.dp

    @property
    def layers(self) -> int:
        """Layers of the cell's model: one that repeats for every stage. The first layers of T5's
        encoder and decoder do not repeat.
        """
        stages = self.pp * (2 if self.schedule == "interleaved_1f1b" else 1)
        return max(2, stages) + 2 * (self.model == "hf-t5" and stages > 4)

    @property
    def pins(self) -> dict[str, Any]:
        pipeline = (
            {"schedule": self.schedule, "vpp": 2 if self.schedule == "interleaved_1f1b" else 1}
            if self.pp > 1
            else {}
        )
        return {"pp": self.pp, "tp": self.tp, "dp": self.dp, "zero": self.zero, "recompute": self.recompute,
                "micro_batch": ROWS // self.dp // MICRO_BATCHES, **pipeline}  # fmt: skip

    @property
    def text(self) -> str:
        return f"{self.model} pp={self.pp} tp={self.tp} dp={self.dp} zero={self.zero} {self.recompute} {self.schedule}"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Cells that cannot run: those for which `holds` is true. Their error must contain `words`;
    `reason` explains it.
    """

    reason: str
    holds: Callable[[Cell], bool]
    words: str


REFUSALS = (
    Refusal(
        "ZeRO shares out over dp, and dp is 1",
        lambda cell: cell.zero > 0 and cell.dp == 1,
        "shares out over dp and cp",
    ),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a cell showed.  `status`: 'exact', 'refused' (as listed in REFUSALS), or 'failed';
    `message` says why it was refused or failed. `error` is the largest error relative to the update
    (of a loss: to the loss), and `tensor` has it.
    """

    cell: Cell
    status: str
    message: str = ""
    error: float = 0.0
    tensor: str = ""
    time_s: float = 0.0

    def as_line(self) -> str:
        """The outcome as one line of JSON, which `of_line` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def of_line(cls, line: str) -> Outcome:
        data = json.loads(line)
        return cls(**data | {"cell": Cell(**data["cell"])})


# --------------------------------------------------------------------------------------------------------------- which cells


def every_cell() -> list[Cell]:
    """All cells of the matrix, by model and depth, so that cells next to each other share a trace
    and processes.
    """
    found = []
    for model, pp, tp, dp in product(MODELS, *DEGREES.values()):
        if pp * tp * dp in PROCESSES:
            schedules = SCHEDULES if pp > 1 else ("none",)
            found += [
                Cell(model, pp, tp, dp, *rest) for rest in product(ZERO, RECOMPUTE, schedules)
            ]
    return sorted(
        found, key=lambda cell: (list(MODELS).index(cell.model), cell.layers, cell.processes)
    )


def refusal_of(cell: Cell) -> Refusal | None:
    """The entry of REFUSALS for a cell; None if the cell should run."""
    return next((refusal for refusal in REFUSALS if refusal.holds(cell)), None)


def covering_cells(cells: list[Cell]) -> list[Cell]:
    """A few of the cells that run, in the given order. They have every pair of values that occurs,
    and every combination of the columns TOGETHER; smaller meshes are preferred.
    """
    running = sorted(
        (cell for cell in cells if refusal_of(cell) is None),
        key=lambda cell: (cell.processes, cell.layers),
    )
    chosen = {running[number] for number in covering([asdict(cell) for cell in running], TOGETHER)}
    return [cell for cell in cells if cell in chosen]


# ------------------------------------------------------------------------------------------------------------------ one cell


@cache
def setup_of(model: str, layers: int) -> Setup:
    """The setup (model, precision, steps, sizes) of cells with this model and depth. Cached, so
    that they share a trace.
    """
    return Setup(ZooModel.of(MODELS[model], layers).spec, PRECISION, STEPS, SEQ, ROWS)


def plan_of(cell: Cell, case: Case) -> Plan:
    """The plan under the cell's pins. Raises AutoparError if there is none."""
    return make_plan(case.model, free_network(cell.processes), case.batches[0], ROWS, cell.pins, precision=PRECISION,
                     traced=case.traced, time_limit_s=PLANNING_S)  # fmt: skip


def run_cell(cell: Cell, pool: WorkerPool) -> Outcome:
    """Plan, train on the processes of `pool`, and compare. An error of planning or training becomes
    a failed outcome, or a refused one if the cell and the words are listed in REFUSALS.
    """
    start = time.perf_counter()

    def outcome(status: str, message: str = "", error: float = 0.0, tensor: str = "") -> Outcome:
        return Outcome(cell, status, message, error, tensor, time.perf_counter() - start)

    refusal = refusal_of(cell)
    try:
        setup = setup_of(cell.model, cell.layers)
        case = make_case(setup)
        plan = plan_of(cell, case)
    except AutoparError as error:
        listed = refusal is not None and refusal.words in str(error)
        return outcome(
            "refused" if listed else "failed", str(error) if listed else f"refused: {error}"
        )
    except Exception as error:
        return outcome("failed", f"planning: {type(error).__name__}: {error}")
    if refusal is not None:
        return outcome("failed", f"not refused, though {refusal.reason}")
    try:
        after, losses = expected_of(setup, case, plan)
        ranks = pool.run(rank_errors, setup, plan.to_json(), after, timeout_s=CELL_TIMEOUT_S)
    except (WorkerError, AutoparError) as error:
        lines = str(error).strip().splitlines()
        # of a crash, where it was
        told = lines[:8] if "most recent call first" in str(error) else (lines[0], lines[-1])
        return outcome("failed", f"running: {' ... '.join(dict.fromkeys(told))}")
    worst, tensor, _ = max(ranks, key=lambda rank: rank[0])
    loss_error = max(
        relative_error(a, b) for _, _, found in ranks for a, b in zip(found, losses, strict=True)
    )
    if loss_error > worst:
        worst, tensor = loss_error, "the loss"
    return outcome("exact" if worst <= TOLERANCES[PRECISION][0] else "failed", "", worst, tensor)


def run_cells(cells: Iterable[Cell]) -> Iterator[Outcome]:
    """Run the cells and yield their outcomes, one after another.  Neighbours with one model and
    depth share processes, which inherit its trace.
    """
    for _, alike in groupby(cells, key=lambda cell: (cell.model, cell.layers)):
        pools: dict[int, WorkerPool] = {}
        try:
            for cell in alike:
                yield run_cell(cell, pools.setdefault(cell.processes, WorkerPool(cell.processes)))
        finally:
            for pool in pools.values():
                pool.close()


# --------------------------------------------------------------------------------------------------------------- the command


def shard_of(text: str) -> tuple[int, int]:
    """Parse a part of the matrix: '2/5' -> (2, 5). Raises ArgumentTypeError for other text."""
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a part such as 1/4, 2/4, ...")
    return int(number), int(count)


def report(outcomes: list[Outcome]) -> str:
    """A text: counts by model, refusals by reason, and a line for each failed cell."""
    lines = [f"{'model':12}{'exact':>8}{'refused':>9}{'failed':>8}   worst error"]
    for model in dict.fromkeys(outcome.cell.model for outcome in outcomes):
        own = [outcome for outcome in outcomes if outcome.cell.model == model]
        counts = Counter(outcome.status for outcome in own)
        worst = max((outcome.error for outcome in own if outcome.status == "exact"), default=0.0)
        lines.append(
            f"{model:12}{counts['exact']:8}{counts['refused']:9}{counts['failed']:8}   {worst:.1e}"
        )
    counts = Counter(outcome.status for outcome in outcomes)
    lines.append(f"{'all':12}{counts['exact']:8}{counts['refused']:9}{counts['failed']:8}")
    reasons = Counter(
        refusal_of(outcome.cell).reason for outcome in outcomes if outcome.status == "refused"
    )
    lines += [f"refused {count:5}  {reason}" for reason, count in reasons.items()]
    for outcome in outcomes:
        if outcome.status == "failed":
            lines.append(
                f"failed  {outcome.cell.text}: {outcome.message or f'{outcome.tensor} is off by {outcome.error:.1e}'}"
            )
    return "\n".join(lines)


def run_optimizers() -> bool:
    """Run and print every run of `optimizer_runs.py`; returns whether all are exact."""
    exact = True
    for run in RUNS:
        found = run_optimizer(run)
        agrees = max(found.error, found.loss_error) <= TOLERANCES[PRECISION][0]
        exact &= agrees
        print(
            f"{run.text}: {'exact' if agrees else 'failed'}; parameters {found.error:.1e} ({found.tensor}), {len(found.losses)} losses "
            f"{found.loss_error:.1e} ({found.losses[0]:.3f} to {found.losses[-1]:.3f}), clipped in {found.clipped}",
            flush=True,
        )
    return exact


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated (default: all)")
    parser.add_argument(
        "--pairs", action="store_true", help="a covering part of the cells that run"
    )
    parser.add_argument(
        "--shard",
        type=shard_of,
        default=(1, 1),
        metavar="I/N",
        help="every N-th cell, from the I-th on",
    )
    parser.add_argument(
        "--log",
        type=Path,
        help="add each cell to this file; those that passed there are not run again",
    )
    parser.add_argument(
        "--adamw", action="store_true", help="20 steps of AdamW and Adafactor instead"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    if options.adamw:
        return 0 if run_optimizers() else 1
    models = [name for name in options.models.split(",") if name]
    if unknown := [name for name in models if name not in MODELS]:
        parser.error(f"no model {unknown[0]!r} in the matrix; it has {', '.join(MODELS)}")
    cells = covering_cells(every_cell()) if options.pairs else every_cell()
    cells = [cell for cell in cells if cell.model in models][
        options.shard[0] - 1 :: options.shard[1]
    ]
    done = (
        [Outcome.of_line(line) for line in options.log.read_text().splitlines()]
        if options.log and options.log.exists()
        else []
    )
    passed = {outcome.cell: outcome for outcome in done if outcome.status != "failed"}
    outcomes = [passed[cell] for cell in cells if cell in passed]
    print(f"{len(cells)} cells, {len(outcomes)} of them done already", file=sys.stderr, flush=True)
    for outcome in run_cells(cell for cell in cells if cell not in passed):
        outcomes.append(outcome)
        if options.log:
            with options.log.open("a") as file:
                file.write(outcome.as_line() + "\n")
        shown = f"{outcome.cell.text}: {outcome.status} {outcome.error:.0e} in {outcome.time_s:.1f} s {outcome.message}"
        print(shown[:LONGEST_LINE], file=sys.stderr, flush=True)
    print(report(outcomes))
    return 0 if all(outcome.status != "failed" for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
