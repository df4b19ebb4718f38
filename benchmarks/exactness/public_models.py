"""Models of public packages, trained under dp=2, tp=2 and pp=2, and compared with one device.

    python -m benchmarks.exactness.public_models [--only PATTERN] [--log FILE] [--jobs 1]

Needs `pip install '.[public-models]'`, and for litgpt's networks `pip install --no-deps litgpt==0.5.13`. Each network
(`public_text.py`, `public_signals.py`) trains as `autopar verify` trains: three steps of SGD with momentum in fp64. A cell is
'exact', 'rounding', 'refused' with the reason, 'WRONG', or 'crash'. With `--log`, cells are written as lines of JSON, and models in
the file are not run again.
Prints one row a model, with the commit that ran it; exit code 1 if a cell is wrong or crashed.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor, nn

from autopar.errors import AutoparError, one_line
from autopar.models.base import ModelSpec
from autopar.verify.verify import verify
from benchmarks.exactness.public_signals import SIGNAL_MODELS
from benchmarks.exactness.public_text import TEXT_MODELS

MODELS = TEXT_MODELS | SIGNAL_MODELS
MESHES = ("dp=2", "tp=2", "pp=2")
PACKAGES = ("torch", "transformers", "peft", "litgpt", "x-transformers", "timm", "torchvision", "diffusers")  # fmt: skip
TIMEOUT_S = 1200.0
ROUNDING, MOST_ROUNDING = 10.0, 1e-6


@dataclass(frozen=True, slots=True)
class PublicSpec(ModelSpec):
    """The spec of a model of MODELS."""

    @classmethod
    def of(cls, name: str) -> PublicSpec:
        return cls(name, 0, 0, 0)

    def _make(self) -> nn.Module:
        return MODELS[self.name].build()

    def example_inputs(
        self, batch: int, seq: int, device: torch.device | str = "meta"
    ) -> dict[str, Tensor]:
        return {name: value.to(device) for name, value in MODELS[self.name].inputs(batch).items()}


@dataclass(frozen=True, slots=True)
class PublicCell:
    """What a model did under a mesh.

    `verdict` is 'exact', 'refused', 'WRONG', 'crash', or 'rounding': one device that reads the rows
    in reverse order is off by as much, within a factor of ROUNDING. That is at most MOST_ROUNDING.
    `words` has the error or the reason.
    `collectives` is the number of them in a micro-batch. `commit` is the commit that ran it, with
    '+' if files differed; '' if it is not known.
    """

    model: str
    mesh: str
    verdict: str
    words: str = ""
    error: float = float("inf")
    collectives: int = 0
    time_s: float = 0.0
    commit: str = ""


def run_cell(name: str, mesh: str) -> PublicCell:
    """Train one model under one mesh; raises nothing but KeyboardInterrupt."""
    axis, _, degree = mesh.partition("=")
    try:
        report = verify(PublicSpec.of(name), nproc=2, pin={axis: int(degree)}, shrink=False)
    except AutoparError as error:
        return PublicCell(name, mesh, "refused", one_line(error))
    except Exception as error:
        return PublicCell(name, mesh, "crash", f"{type(error).__name__}: {one_line(error)}")
    result = report.meshes[0]
    if result.failure:
        last = result.failure.strip().splitlines()[-1]
        refusal = "AutoparError" in last
        return PublicCell(name, mesh, "refused" if refusal else "crash", last)
    error = max(result.worst_error, result.loss_error)
    rounding, words = report.rounding or 0.0, ""
    if not result.exact:
        known = "unknown, as dropout draws by row" if report.drops else f"{rounding:.1e}"
        words = f"{result.worst_tensor} is off by {result.worst_error:.1e}, rows in reverse order: {known}"
    alike = rounding <= MOST_ROUNDING and error <= ROUNDING * rounding
    verdict = "exact" if result.exact else "rounding" if alike else "WRONG"
    count = sum(result.collectives.values())
    return PublicCell(name, mesh, verdict, words, error, count, result.time_s)


@functools.cache
def commit() -> str:
    """The short hash of the commit of this checkout, with '+' if files differ from it. '' outside
    of a git checkout.
    """
    command = ["git", "describe", "--always", "--exclude=*", "--dirty=+"]
    found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    return found.stdout.strip()


def _send_cells(name: str, meshes: Sequence[str], results: Connection) -> None:
    os.setsid()  # its workers end with it
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for mesh in meshes:
        results.send(run_cell(name, mesh))


def run_apart(name: str, meshes: Sequence[str] = MESHES) -> list[PublicCell]:
    """The cells of a model, one for each mesh, run in a separate process, which trains on one
    device once. If it ends early, or needs more than TIMEOUT_S seconds for a mesh, that cell is a
    'crash', and another process runs the meshes after it.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_cells, args=(name, meshes, sender))
    process.start()
    sender.close()
    cells: list[PublicCell] = []
    lost = ""
    while len(cells) < len(meshes) and not lost:
        try:
            if receiver.poll(TIMEOUT_S):
                cells.append(receiver.recv())
            else:
                lost = f"it took longer than {TIMEOUT_S:.0f} s"
        except EOFError:
            process.join()
            lost = f"the process ended with code {process.exitcode}"
    if lost:
        cells.append(PublicCell(name, meshes[len(cells)], "crash", lost))
    if lost and process.is_alive() and process.pid is not None:
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    rest = meshes[len(cells) :]
    found = [replace(cell, commit=commit()) for cell in cells]
    return found + (run_apart(name, rest) if rest else [])


def read_log(file: Path) -> list[PublicCell]:
    """The cells in a log; none if there is no such file."""
    lines = file.read_text().splitlines() if file.exists() else []
    return [PublicCell(**json.loads(line)) for line in lines]


def table(cells: Iterable[PublicCell]) -> str:
    """A text with three parts. The first has a row for each model: its verdict on each mesh, its
    largest error among exact cells, and the commits that ran it. The second has a line for each
    mesh: how many models have each verdict. The third lists models that were not run, and the cells
    that are not exact, with the reason. Of several cells of a model and a mesh, the last counts.
    """
    found = {(cell.model, cell.mesh): cell for cell in cells}
    models = [name for name in MODELS if (name, MESHES[0]) in found]
    width = max(map(len, models))
    heads = (*(mesh.ljust(9) for mesh in MESHES), "largest error", "commit")
    rows = ["  ".join(("model".ljust(width), *heads))]
    for name in models:
        of = [found[name, mesh] for mesh in MESHES if (name, mesh) in found]
        errors = [cell.error for cell in of if cell.verdict == "exact"]
        verdicts = (cell.verdict.ljust(9) for cell in of)
        worst = f"{max(errors):.0e}" if errors else ""
        commits = " ".join(sorted({cell.commit for cell in of}))
        rows.append("  ".join((name.ljust(width), *verdicts, worst.ljust(13), commits)))
    rows.append("")
    for mesh in MESHES:
        count = Counter(found[name, mesh].verdict for name in models if (name, mesh) in found)
        rows.append(
            f"{mesh}: " + ", ".join(f"{number} {word}" for word, number in count.most_common())
        )
    rows.append("")
    missing = [name for name in MODELS if name not in models]
    rows += [f"Not run: {', '.join(missing)}", ""] if missing else []
    rows += [
        f"{cell.model} {cell.mesh} {cell.verdict}: {cell.words}"
        for cell in found.values()
        if cell.verdict != "exact"
    ]
    return "\n".join(row.rstrip() for row in rows)


def versions() -> str:
    """The versions of the packages, and the date."""

    def installed(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "(not installed)"

    packages = ", ".join(f"{package} {installed(package)}" for package in PACKAGES)
    return f"{packages}; {datetime.date.today()}"


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="a regular expression that names must contain")
    parser.add_argument("--log", type=Path, help="a file of cells, to be continued")
    parser.add_argument("--jobs", type=int, default=1, help="models run at a time, two processes each")  # fmt: skip
    options = parser.parse_args(arguments)
    names = [name for name in MODELS if re.search(options.only, name)]
    if not names:
        parser.error(f"no model matches {options.only!r}")
    cells = read_log(options.log) if options.log else []
    known = {cell.model for cell in cells}
    with ThreadPoolExecutor(options.jobs) as pool:
        for found in pool.map(run_apart, [name for name in names if name not in known]):
            cells += found
            for cell in found:
                print(f"{cell.model} {cell.mesh}: {cell.verdict} {cell.words}", file=sys.stderr, flush=True)  # fmt: skip
            if options.log:
                with options.log.open("a") as lines:
                    lines.writelines(json.dumps(asdict(cell)) + "\n" for cell in found)
    shown = [cell for cell in cells if cell.model in names]
    print(versions(), table(shown), sep="\n\n")
    return 0 if all(cell.verdict in ("exact", "refused", "rounding") for cell in shown) else 1


if __name__ == "__main__":
    sys.exit(main())
