"""Reads files of layouts that did not run: one text describes model and GPUs, another the layout."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping

from autopar.errors import AutoparError, shown

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
