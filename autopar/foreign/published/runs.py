"""Reads a CSV file of measured runs."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

from autopar.errors import AutoparError, shown
from autopar.files import read_text
from autopar.foreign.published.defaults import complete
from autopar.foreign.published.frameworks import printed_scope, prints_first_rank
from autopar.foreign.published.machines import named_node, system_of
from autopar.foreign.published.options import (
    Stated,
    is_out_of_memory,
    layouts_out_of_memory,
    read_dtype,
    read_memory_kind,
    read_notes,
    read_options,
    read_recompute,
    read_sharding,
    unknown_words,
)
from autopar.foreign.published.run import (
    Measured,
    Run,
    run_of_row,
)
from autopar.ir.model_shape import V3_LATENT

REQUIRED_COLUMNS = (
    "id", "model_family", "layers", "hidden", "heads", "vocab", "seq", "gpu", "gpus", "tp", "pp",
    "dtype", "global_batch_seqs", "step_time_s",
)  # fmt: skip
"""Columns that a file must have. Their cells must be filled, except step_time_s. Other columns have
defaults.
"""

_FILLED = tuple(column for column in REQUIRED_COLUMNS if column not in ("id", "step_time_s"))
_INTEGERS = {
    "layers": "layers", "hidden": "hidden", "heads": "heads", "kv_heads": "kv_heads",
    "ffn_hidden": "ffn", "vocab": "vocab", "seq": "seq", "gpus": "gpus",
    "gpus_per_node": "gpus_per_node", "tp": "tp", "pp": "pp", "vpp": "vpp", "dp": "dp", "cp": "cp",
    "ep": "ep", "micro_batch": "micro_batch", "global_batch_seqs": "global_batch", "year": "year",
}  # fmt: skip
"""Integer columns, with the field that each one fills."""
_SWITCHES = ("sp", "compile")
_SWITCH_VALUES = {
    **dict.fromkeys(("1", "1.0", "true", "yes"), True),
    **dict.fromkeys(("0", "0.0", "false", "no"), False),
}
_GIGA = 1e9
_MORE = "\0"  # no column: a file that holds it is refused


@dataclass(frozen=True, slots=True)
class Problem:
    """A row that is not predicted, and why. `complete` is the row's `config_complete`."""

    id: str
    reason: str
    complete: bool = True


def read_runs(path: str | Path) -> tuple[tuple[Run, ...], tuple[Problem, ...]]:
    """(runs of a CSV file, in order; rows that could not be read). A file of layouts that failed
    (`is_layout`) is one of runs without a measured time.

    Columns are described in docs/guides/predict.md. Unknown columns are ignored. A row with an
    unknown option is incomplete. Raises AutoparError if the file is missing, is not a CSV, or lacks
    a required column.
    """
    runs: list[Run] = []
    problems: list[Problem] = []
    seen: set[str] = set()
    for line, cells in _rows(path):
        name = cells.get("id", "").strip() or f"line {line}"
        scored = _SWITCH_VALUES.get(cells.get("config_complete", "").strip().lower(), True)
        try:
            if is_layout(cells):
                cells = cells_of(cells, line)
                name = cells["id"]
            if name in seen:
                raise AutoparError(f"the id {shown(name)} is given twice; this is line {line}")
            seen.add(name)
            if more := cells.pop(_MORE, None):
                raise AutoparError(
                    f"line {line} has {len(more)} more cells than the header has columns"
                )
            runs.append(_run(name, scored, cells))
        except AutoparError as error:
            problems.append(Problem(name, str(error), scored))
    return tuple(runs), tuple(problems)


def read_files(paths: Sequence[str | Path]) -> tuple[tuple[Run, ...], tuple[Problem, ...]]:
    """`read_runs` of several files, one after the other. A run whose id an earlier file has becomes
    a problem.
    """
    runs: dict[str, Run] = {}
    problems: list[Problem] = []
    for path in paths:
        found, unread = read_runs(path)
        problems += unread
        for run in found:
            if run.id in runs:
                reason = f"the id {shown(run.id)} is in {path} and in a file before it"
                problems.append(Problem(run.id, reason, run.complete))
            runs.setdefault(run.id, run)
    return tuple(runs.values()), tuple(problems)


def _rows(path: str | Path) -> list[tuple[int, dict[str, Any]]]:
    """(line number, column -> text) for every row that is not blank."""
    text = read_text(path, "file of runs")
    if "\0" in text:
        raise AutoparError(f"{path} is not a CSV file: it holds NUL bytes")
    try:
        lines = io.StringIO(text, newline="")
        reader = csv.DictReader(lines, restkey=_MORE, restval="", strict=True)
        header = [(column or "").strip() for column in reader.fieldnames or ()]
        reader.fieldnames = header
        rows = [(reader.line_num, row) for row in reader]
    except csv.Error as error:
        raise AutoparError(f"{path} is not a CSV file: {error}") from None
    missing = [column for column in REQUIRED_COLUMNS if column not in header]
    if missing and not is_layout(header):
        found = f"its columns are {', '.join(header[:12])}{', ...' if len(header) > 12 else ''}"
        found = found if any(header) else "it is empty"
        raise AutoparError(
            f"{path} lacks the column{'s' if len(missing) > 1 else ''} {', '.join(missing)}; {found}"
        )
    return [
        (line, row)
        for line, row in rows
        if any(isinstance(cell, str) and cell.strip() for cell in row.values())
    ]


def _run(name: str, scored: bool, cells: Mapping[str, str]) -> Run:
    blank = [column for column in _FILLED if not cells[column].strip()]
    if blank:
        raise AutoparError(f"unpublished, without a default: {', '.join(blank)}")
    stated, ignored = _stated(cells)
    if stated["family"] == "moe" and (
        missing := [option for option, key in _MOE_OPTIONS.items() if key not in stated]
    ):
        raise AutoparError(f"extra_opts lacks {' and '.join(missing)} of a mixture of experts")
    row, filled = complete(stated)
    return run_of_row(
        name,
        row,
        source=cells.get("source", "").strip(),
        measured=_measured(cells, row),
        complete=scored and not ignored,  # what is not known may matter
        defaulted=filled,
        ignored=ignored,
        notes=cells.get("notes", "").strip(),
    )


_MOE_OPTIONS = {"experts": "experts", "topk": "top_k"}


def _stated(cells: Mapping[str, str]) -> tuple[Stated, tuple[str, ...]]:
    """(fields that a row states, unknown options). Options override notes and the column dtype; all
    other columns override options.
    """
    options, ignored = read_options(cells.get("extra_opts", ""))
    for column in ("zero_stage_or_fsdp", "recompute", "dtype"):
        ignored += unknown_words(column, cells.get(column, ""))
    stated = read_notes(cells.get("notes", "")) | read_dtype(cells["dtype"]) | options
    stated |= read_sharding(cells.get("zero_stage_or_fsdp", ""))
    stated |= read_recompute(cells.get("recompute", ""), options)
    stated |= {"family": cells["model_family"].strip().lower(), "gpu": cells["gpu"].strip()}
    if "mla" in stated:
        stated["mla"] = V3_LATENT
    if cells.get("framework", "").strip():
        stated["framework"] = cells["framework"].strip()
    for column, name in _INTEGERS.items():
        if (number := _number(cells, column, whole=True)) is not None:
            stated[name] = number
    for column in _SWITCHES:
        text = cells.get(column, "").strip().lower()
        if text and text not in _SWITCH_VALUES:
            raise AutoparError(f"{column}={shown(text)} is neither 0 nor 1")
        if text:
            stated[column] = _SWITCH_VALUES[text]
    if system := cells.get("system", "").strip():
        stated["system"] = named_node(system)
    elif system := system_of(f"{cells.get('source', '')}; {cells.get('notes', '')}"):
        stated["system"] = system
    if (nic := _number(cells, "nic_gbps_per_gpu")) is not None:
        stated["nic_Bps"] = nic * _GIGA / 8
    if (parameters := _number(cells, "params_b")) is not None:
        stated["parameters"] = parameters * _GIGA
    return stated, ignored


def _number(cells: Mapping[str, str], column: str, whole: bool = False) -> Any:
    """The number in a cell, or None if it is blank. Raises AutoparError unless it is finite and
    positive, and an integer if `whole`.
    """
    text = cells.get(column, "").strip()
    if not text:
        return None
    try:
        value = float(text.replace("_", ""))
    except ValueError:
        raise AutoparError(f"{column}={shown(text)} is not a number") from None
    if not isfinite(value) or value <= 0:
        raise AutoparError(f"{column}={shown(text)} must be a finite number > 0")
    if whole and value != int(value):
        raise AutoparError(f"{column}={shown(text)} must be a whole number")
    return int(value) if whole else value


def _measured(cells: Mapping[str, str], row: Stated) -> Measured:
    """The measurements of a row: the step time as printed, otherwise from the throughput, and the
    memory in bytes. They are None where unpublished. A row without a step time may be known to have
    run out of memory.
    """
    time_s, throughput = _number(cells, "step_time_s"), _number(cells, "tokens_per_s_per_gpu")
    if time_s is None and throughput is not None:
        time_s = row["global_batch"] * row["seq"] / (throughput * row["gpus"])
    kind = cells.get("mem_kind", "").strip()
    scope, unit = read_memory_kind(kind)
    size = _number(cells, "mem_gib_per_gpu")
    notes = cells.get("notes", "")
    said = is_out_of_memory(kind) or (is_out_of_memory(notes) and not layouts_out_of_memory(notes))
    return Measured(
        step_time_s=time_s,
        memory_bytes=None if size is None else size * unit,
        memory_scope="" if size is None else scope or printed_scope(row["framework"]),
        memory_kind="" if size is None else kind,
        memory_of_first_rank=size is not None and prints_first_rank(row["framework"]),
        out_of_memory=time_s is None and said,
        parameters=row.get("parameters"),
    )


def out_of_memory_layouts(runs: tuple[Run, ...]) -> tuple[Run, ...]:
    """Layouts that ran out of memory according to the notes of `runs`, each once, as copies of the
    first run that names it.

    Their global batch is the largest one that the layout divides and that is not above the run's.
    Layouts that contradict their run, such as its GPUs, are left out.
    """
    found: dict[tuple, Run] = {}
    for run in runs:
        for tp, pp, dp, micro_batch in layouts_out_of_memory(run.notes):
            named: dict[str, Any] = {"tp": tp, "pp": pp, "dp": dp, "micro_batch": micro_batch}
            named |= {"vpp": 1, "schedule": "1f1b" if pp > 1 else "none", "copies": 1}
            named["global_batch"] = run.global_batch // (dp * micro_batch) * dp * micro_batch
            label = f"{re.sub(r'-?tp[0-9].*$', '', run.id)}-tp{tp}pp{pp}dp{dp}-mb{micro_batch}-oom"
            try:
                other = replace(
                    run,
                    id=label,
                    layout=replace(run.layout, **named),
                    measured=Measured(out_of_memory=True, parameters=run.measured.parameters),
                )
            except AutoparError:
                continue
            found.setdefault(
                (run.shape, run.seq, run.machine, run.precision, (tp, pp, dp, micro_batch)), other
            )
    return tuple(found.values())


COLUMNS = ("description", "layout", "fits")
"""Columns that a file of layouts has."""

_DESCRIPTION = re.compile(
    r"(?P<framework>\S+) (?P<size>\S+) \((?P<dims>[^)]*)\), (?P<gpu>\S+) x(?P<gpus>\d+) \((?P<gpus_per_node>\d+) a node\), "
    r"seq (?P<seq>\d+), (?P<dtype>\w+), (?P<rest>.*)"
)
_DIMS = {"layers": "layers", "hidden": "hidden", "heads": "heads", "kv_heads": "kv_heads", "ffn": "ffn_hidden",
         "vocab": "vocab"}  # fmt: skip
_LAYOUT = {"tp": "tp", "pp": "pp", "dp": "dp", "zero": "zero_stage_or_fsdp", "micro_batch": "micro_batch",
           "global_batch_seqs": "global_batch_seqs"}  # fmt: skip
_FITS = {"0": False, "1": True}


def is_layout(columns: Container[str]) -> bool:
    """Whether these are the columns of a file of layouts, not of a file of runs."""
    return all(column in columns for column in COLUMNS) and "id" not in columns


def cells_of(row: Mapping[str, str], line: int) -> dict[str, str]:
    """The cells of the same run in a file of runs. A layout that failed is named by its
    `mem_kind`.

    Raises AutoparError if a text cannot be read.
    """
    found = _DESCRIPTION.match(row["description"])
    if found is None:
        raise AutoparError(
            f"line {line}: description={shown(row['description'])} is not of the form 'nanotron 1B (layers=16 hidden=2048 heads=32 "
            "ffn=8192 vocab=131072), H100-80G-SXM x8 (8 a node), seq 4096, bf16, no recompute, ...'"
        )
    dims = dict(re.findall(r"(\w+)=(\d+)", found["dims"]))
    layout = dict(re.findall(r"(\w+)=(\d+)", row["layout"]))
    if missing := [key for key in ("layers", "hidden", "heads", "vocab") if key not in dims] + [
        key for key in ("tp", "pp", "global_batch_seqs") if key not in layout
    ]:
        raise AutoparError(f"line {line} lacks {', '.join(missing)}")
    if row["fits"].strip() not in _FITS:
        raise AutoparError(f"line {line}: fits={shown(row['fits'])} is neither 0 nor 1")
    named = ("framework", "gpu", "gpus", "gpus_per_node", "seq", "dtype")
    cells = {name: found[name] for name in named}
    cells |= {column: dims[key] for key, column in _DIMS.items() if key in dims}
    cells |= {column: layout[key] for key, column in _LAYOUT.items() if key in layout}
    cells |= {
        "id": f"{found['size']}-{row['layout'].replace(';', '-').replace('=', '')}-line{line}",
        "model_family": "llama",
        "recompute": "none" if "no recompute" in found["rest"] else "",
        "source": row.get("source", ""),
        "mem_kind": "" if _FITS[row["fits"].strip()] else "out of memory",
    }
    return cells
