"""Reads all files of folders as jobs of other frameworks, and says what share is read in full.

    python benchmarks/fidelity/job_files.py FOLDER ... [--output FILE] [--fields]

A file that is no job is left out, with the reason on stderr under `--fields`. Of the others it counts
those that are read without an option that has no price, and those in which every value that a
price needs is known. `--fields` prints what each file says, to compare it by eye.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

if not __package__:  # as a script
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from autopar.errors import AutoparError
from autopar.foreign.frameworks.registry import read_job
from autopar.foreign.job import Facts, Job
from autopar.ir.layout import Layout
from autopar.ir.model_shape import ModelShape

SUFFIXES = (".sh", ".slurm", ".sbatch", ".yaml", ".yml", ".json", ".toml", ".py", ".log")


def jobs_of(folders: Sequence[str], said: bool) -> Iterator[tuple[Path, Job]]:
    """Each job of the folders with its file."""
    for folder in folders:
        paths = sorted(Path(folder).rglob("*")) if Path(folder).is_dir() else [Path(folder)]
        for path in (p for p in paths if p.suffix in SUFFIXES and p.is_file()):
            try:
                yield path, read_job(path)
            except AutoparError as error:
                if said:
                    print(f"{path}: {error}", file=sys.stderr)


def differing(value: Any, plain: Any) -> str:
    """The fields in which a value differs from a plain one."""
    pairs = ((f.name, getattr(value, f.name)) for f in fields(plain))
    return " ".join(f"{name}={found}" for name, found in pairs if found != getattr(plain, name))


def lines_of(path: Path, job: Job) -> Iterator[str]:
    """What a file says, field by field."""
    yield f"{path}: {job.framework}, devices {job.gpus}, tokens {job.seq}"
    yield f"    layout  {differing(job.layout, Layout())}"
    yield f"    model   {differing(job.shape, ModelShape())}"
    yield f"    facts   {differing(job.facts, Facts())}"
    yield from (f"    {finding.kind}: {finding}" for finding in job.findings)
    if job.unpriced:
        yield f"    without a price: {'; '.join(job.unpriced)}"


def table_of(found: Sequence[Job]) -> Iterator[str]:
    """A row for each framework and one for all: jobs, read without an unpriced option, and known."""
    names = [*sorted({job.framework for job in found}), "all"]
    total = Counter(name for job in found for name in (job.framework, "all"))
    full = Counter(n for job in found if not job.unpriced for n in (job.framework, "all"))
    known = Counter(
        name
        for job in found
        if not any(finding.kind == "unknown" for finding in job.findings)
        for name in (job.framework, "all")
    )
    yield f"{'':14s}{'jobs':>6s}{'all options have a price':>28s}{'all values are known':>24s}"
    for name in names:
        count = max(1, total[name])
        shares = f"{full[name]:>20d} {full[name] / count:6.1%}{known[name]:>16d} {known[name] / count:6.1%}"
        yield f"{name:14s}{total[name]:>6d}{shares}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 1 if the folders have no job."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folders", nargs="+")
    parser.add_argument("--output")
    parser.add_argument("--fields", action="store_true")
    args = parser.parse_args(arguments)
    found, lines = list[Job](), list[str]()
    for path, job in jobs_of(args.folders, args.fields):
        found.append(job)
        lines += lines_of(path, job) if args.fields else ()
    text = "\n".join([*lines, *table_of(found)])
    print(text)
    if args.output:
        Path(args.output).write_text(text + "\n")
    return 0 if found else 1


if __name__ == "__main__":
    raise SystemExit(main())
