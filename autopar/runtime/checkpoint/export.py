"""Exports a model's weights as safetensors under the model's own names, in Hugging Face's format.

Every rank writes its pieces to a temporary folder, as in a checkpoint. Rank 0 then reads whole
tensors, enough for one file at a time, so no rank holds the whole model.
"""

from __future__ import annotations

import json
import shutil
from math import prod
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from autopar.errors import AutoparError, shown
from autopar.runtime.checkpoint.files import disk_errors, partial_of
from autopar.runtime.checkpoint.source import CheckpointSource
from autopar.runtime.ranks.agreement import from_first, lost_ranks
from autopar.runtime.ranks.process_groups import file_group
from autopar.runtime.state.pieces import read_pieces, saved_tensors, whole_pieces, write_pieces

INDEX = "model.safetensors.index.json"


def export_weights(
    engine: CheckpointSource, directory: Path, dtype: torch.dtype | None, max_file_bytes: int
) -> None:
    """Write the weights into a new directory: model.safetensors, or numbered files of at most
    `max_file_bytes` (or one tensor) with an index. Floating-point tensors are converted to `dtype`
    (None: kept). Every rank must call it. Raises AutoparError on every rank if the directory is not
    empty or cannot be written, or an argument is invalid.
    """
    group, partial = file_group(), partial_of(directory)
    if (
        not isinstance(max_file_bytes, int)
        or isinstance(max_file_bytes, bool)
        or max_file_bytes < 1
    ):
        raise AutoparError(
            f"max_file_bytes={shown(max_file_bytes)} must be a whole number, at least 1"
        )
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise AutoparError(
            f"dtype={shown(dtype)} must be a floating-point dtype such as torch.bfloat16, or None to keep each tensor's own"
        )
    with lost_ranks("while exporting"):
        from_first(group, lambda: _begin(directory))
        try:
            with disk_errors(f"cannot export to {directory}"):
                pieces = {name: part.pieces() for name, part in engine.held().items()}
                write_pieces(partial / "pieces", pieces, group)
            from_first(group, lambda: _finish(directory, dtype, max_file_bytes))
        except AutoparError:
            from_first(group, lambda: shutil.rmtree(partial, ignore_errors=True))
            raise


def _begin(directory: Path) -> None:
    with disk_errors(f"cannot export to {directory}"):
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise AutoparError(
                f"cannot export to {directory}: it exists and is not an empty directory"
            )
        shutil.rmtree(partial_of(directory), ignore_errors=True)
        (partial_of(directory) / "pieces").mkdir(parents=True)


def _finish(directory: Path, dtype: torch.dtype | None, max_file_bytes: int) -> None:
    from safetensors.torch import save_file

    partial = partial_of(directory)
    with disk_errors(f"cannot export to {directory}"):
        reader = dcp.FileSystemReader(partial / "pieces")
        tensors = {
            name: (torch.Size(entry.size), entry.properties.dtype)
            for name, entry in saved_tensors(reader.read_metadata()).items()
        }
        files = _files(tensors, dtype, max_file_bytes)
        for name, members in files.items():
            read = {
                member: torch.empty(tensors[member][0], dtype=tensors[member][1])
                for member in members
            }
            read_pieces(
                partial / "pieces",
                {member: whole_pieces(tensor) for member, tensor in read.items()},
                None,
            )
            save_file(
                {member: _in(tensor, dtype) for member, tensor in read.items()},
                partial / name,
                metadata={"format": "pt"},
            )
        if len(files) > 1:
            total = sum((partial / name).stat().st_size for name in files)
            weight_map = {member: name for name, members in files.items() for member in members}
            index = {
                "metadata": {"total_size": total},
                "weight_map": dict(sorted(weight_map.items())),
            }
            (partial / INDEX).write_text(json.dumps(index, indent=1))
        shutil.rmtree(partial / "pieces")
        if directory.exists():
            directory.rmdir()  # empty
        partial.rename(directory)


def _in(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _files(
    tensors: dict[str, tuple[torch.Size, torch.dtype]],
    dtype: torch.dtype | None,
    max_file_bytes: int,
) -> dict[str, list[str]]:
    """The names of the tensors in each file, in order, by file name. A file has at most
    `max_file_bytes` in the exported dtype, unless one tensor is larger.
    """
    files: list[list[str]] = [[]]
    size_bytes = 0
    for name, (shape, own) in tensors.items():
        more = (
            prod(shape) * (dtype if dtype is not None and own.is_floating_point else own).itemsize
        )
        if files[-1] and size_bytes + more > max_file_bytes:
            files.append([])
            size_bytes = 0
        files[-1].append(name)
        size_bytes += more
    if len(files) == 1:
        return {"model.safetensors": files[0]}
    return {
        f"model-{number:05d}-of-{len(files):05d}.safetensors": names
        for number, names in enumerate(files, 1)
    }
