"""Reads tensors by name from .safetensors files or torch checkpoints, in one file or several."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from autopar.errors import AutoparError
from autopar.files import path_of

_WHOLE, _INDEX = (
    ("model.safetensors", "pytorch_model.bin"),
    ("model.safetensors.index.json", "pytorch_model.bin.index.json"),
)
"""What a folder is read from, the first that exists, before all of its .safetensors files."""


class WeightFiles:
    """The tensors of a checkpoint, by the names in its files.

    A file is opened once, when first needed. It is mapped into memory, so that a rank which copies a
    part of a tensor reads only that part of the file.
    """

    def __init__(self, path: str | Path) -> None:
        """`path`: a file, an index of files, or a folder of either. Raises AutoparError if there is
        nothing to read.
        """
        self.path = path_of(path, "weights")
        self._opened: dict[Path, Any] = {}
        self._files: dict[str, Path] = {}
        try:
            if not self.path.exists():
                raise AutoparError(
                    f"weights {path} do not exist; give a .safetensors file, a directory of them, or a torch checkpoint"
                )
            self._files = self._find(self.path)
        except AutoparError:
            raise
        except Exception as error:  # corrupt files raise many types
            raise _unreadable(str(self.path), error) from error

    def _find(self, path: Path) -> dict[str, Path]:
        """The file of each tensor."""
        if path.is_dir():
            for whole, index in zip(_WHOLE, _INDEX, strict=True):
                for candidate in (path / whole, path / index):
                    if candidate.exists():
                        return self._find(candidate)
            files = sorted(path.glob("*.safetensors"))
            if not files:
                raise AutoparError(f"weights {path} is a directory without .safetensors files")
            return {name: file for file in files for name in self._open(file).keys()}  # noqa: SIM118
        if path.name.endswith(".index.json"):
            return _indexed(path)
        return dict.fromkeys(self._open(path).keys(), path)

    def _open(self, file: Path) -> Any:
        if file not in self._opened:
            self._opened[file] = _opened(file)
        return self._opened[file]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors, which reads no data."""
        return {name: self._of(name, "shape") for name in self._files}

    def __call__(self, name: str) -> torch.Tensor:
        """The tensor called `name`."""
        return self._of(name, "tensor")

    def _of(self, name: str, what: str) -> Any:
        file = self._files[name]
        try:
            opened = self._open(file)
            if isinstance(opened, dict):
                return tuple(opened[name].shape) if what == "shape" else opened[name]
            if what == "shape":
                return tuple(opened.get_slice(name).get_shape())
            return opened.get_tensor(name)
        except Exception as error:  # corrupt files raise many types
            raise _unreadable(f"{name} in {file}", error) from error


def _opened(file: Path) -> Any:
    """A handle of a .safetensors file, or the tensors of a torch checkpoint."""
    if file.suffix == ".safetensors":
        from safetensors import safe_open

        return safe_open(file, framework="pt")
    state = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    found = state.get("state_dict", state) if isinstance(state, dict) else {}
    return {name: t for name, t in dict(found).items() if isinstance(t, torch.Tensor)}


def _indexed(path: Path) -> dict[str, Path]:
    """The file of each tensor by an index. Raises AutoparError if one of the files is missing."""
    content = json.loads(path.read_text())
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, Mapping) or not weight_map:
        raise AutoparError(f"weights {path} have no weight_map, so it is not an index of files")
    files = {name: path.parent / str(file) for name, file in weight_map.items()}
    missing = sorted({file.name for file in files.values() if not file.is_file()})
    if missing:
        raise AutoparError(
            f"weights {path} name {len(set(files.values()))} files, of which {len(missing)} are missing: {', '.join(missing[:5])}. "
            "Download them into the same folder"
        )
    return files


def _unreadable(what: str, error: Exception) -> AutoparError:
    return AutoparError(f"cannot read weights {what}: {type(error).__name__}: {str(error)[:200]}")
