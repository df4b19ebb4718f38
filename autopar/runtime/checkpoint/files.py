"""The files of checkpoints: a directory of checkpoints, each either complete or ignored.

    DIRECTORY/000003-step-60/       the third checkpoint, after 60 steps
        autopar.json                format, steps, seed, model, plan, sizes and checksums of the other files (without it: no checkpoint)
        state.pt                    parameter groups, plain optimizer state, random states, what the user added
        .metadata, __*.distcp       tensors, by torch.distributed.checkpoint

A checkpoint is written under a name that ends in .partial. It is renamed once it is complete and on
disk, so a crash does not affect earlier ones. Rank 0 calls these functions.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from autopar.errors import AutoparError
from autopar.runtime.ranks.agreement import lost_contact

CHECKPOINT_VERSION = 1
HEADER, STATE = "autopar.json", "state.pt"
_NAME = re.compile(r"(\d{6,})-step-(\d+)")


@dataclass(frozen=True, slots=True)
class Found:
    """A complete checkpoint: its directory and the content of autopar.json."""

    path: Path
    header: dict[str, Any]


def newest(directory: Path, missing_ok: bool = False) -> Found | None:
    """The newest complete checkpoint in `directory`, or `directory` itself if it is one.

    If none is complete, raises AutoparError with the defects of at most three incomplete ones. With
    `missing_ok`, returns None if there are no checkpoints at all.
    """
    mistakes = []
    with disk_errors(f"cannot read {directory}"):
        if (directory / HEADER).exists():
            return Found(directory, _checked(directory))
        for path in _all_in(directory):
            try:
                return Found(path, _checked(path))
            except AutoparError as error:
                mistakes.append(str(error))
    if mistakes:
        raise AutoparError(f"no checkpoint in {directory} is complete: {'; '.join(mistakes[:3])}")
    if missing_ok:
        return None
    state = (
        "holds no checkpoint"
        if directory.is_dir()
        else "is no directory"
        if directory.exists()
        else "does not exist"
    )
    raise AutoparError(f"{directory} {state}; write one with engine.save")


def _all_in(directory: Path) -> list[Path]:
    """The paths of the checkpoints of a directory, complete or not, newest first."""
    return [path for _, path in sorted(_numbered(directory), reverse=True)]


def _numbered(directory: Path) -> list[tuple[int, Path]]:
    """(number, path) of each checkpoint of a directory, complete or not, in no order."""
    return [
        (int(match[1]), path)
        for path in (directory.iterdir() if directory.is_dir() else ())
        if (match := _NAME.fullmatch(path.name))
    ]


def _checked(path: Path) -> dict[str, Any]:
    """The header of a complete checkpoint. Raises AutoparError if it cannot be read or has another
    format version, or if a file is missing or has another size.
    """
    try:
        header = json.loads((path / HEADER).read_text())
        version, files = (
            header["format_version"],
            {name: (int(size), int(crc)) for name, (size, crc) in header["files"].items()},
        )
        if not all(isinstance(header[name], int) for name in ("steps", "seed")):
            raise ValueError("steps or seed are no whole numbers")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise AutoparError(
            f"{path} is incomplete: its {HEADER} cannot be read ({type(error).__name__}: {str(error)[:100]})"
        ) from None
    if version != CHECKPOINT_VERSION:
        raise AutoparError(
            f"{path} has checkpoint format {version}; this autopar reads format {CHECKPOINT_VERSION}"
        )
    for name, (size_bytes, _) in files.items():
        file = path / name
        if not file.is_file() or file.stat().st_size != size_bytes:
            state = (
                f"has {file.stat().st_size} bytes of {size_bytes}"
                if file.is_file()
                else "is missing"
            )
            raise AutoparError(f"{path} is incomplete: {name} {state}")
    return header


def partial_of(path: Path) -> Path:
    """The path at which a checkpoint is written before it is complete."""
    return path.with_name(f".{path.name}.partial")


def begin(directory: Path, steps: int) -> Path:
    """The path of the next checkpoint, which is saved after `steps` steps. Makes an empty partial
    directory for it, and removes what crashed saves have left.
    """
    with disk_errors(f"cannot save to {directory}"):
        directory.mkdir(parents=True, exist_ok=True)
        for left in directory.glob(".*.partial"):
            shutil.rmtree(left)
        final = directory / f"{max(_numbered(directory), default=(0,))[0] + 1:06d}-step-{steps}"
        partial_of(final).mkdir()
    return final


def finish(final: Path, state: bytes, header: dict[str, Any], checksums: dict[str, int]) -> None:
    """Write state.pt and autopar.json and rename the checkpoint to `final`, which makes it visible.
    `checksums` are those of the tensor files, by file name. They are added to `header`.
    """
    partial = partial_of(final)
    with disk_errors(f"cannot save {final}"):
        _write_file(partial / STATE, state)
        checksums = checksums | {name: _checksum(partial / name) for name in (STATE, ".metadata")}
        files = {
            name: [(partial / name).stat().st_size, found]
            for name, found in sorted(checksums.items())
        }
        _write_file(partial / HEADER, json.dumps(header | {"files": files}, indent=1).encode())
        _sync(partial)
        partial.rename(final)
        _sync(final.parent)


def _checksum(file: Path) -> int:
    """The CRC-32 of a file."""
    found = 0
    with file.open("rb") as content:
        while part := content.read(1 << 24):
            found = zlib.crc32(part, found)
    return found


def own_checksums(final: Path, rank: int) -> dict[str, int]:
    """The CRC-32 of each tensor file that torch.distributed.checkpoint wrote for a rank, by file
    name. The checkpoint is still partial; `final` is its later path.
    """
    with disk_errors(f"cannot save {final}"):
        return {file.name: _checksum(file) for file in partial_of(final).glob(f"__{rank}_*")}


def check_content(found: Found, rank: int, world_size: int) -> None:
    """Raise AutoparError if a file of the checkpoint has changed since it was saved, or cannot be
    read. A rank reads only every `world_size`-th file, from number `rank` on.
    """
    for name, (_, expected) in sorted(found.header["files"].items())[rank::world_size]:
        with disk_errors(f"cannot read {found.path / name}"):
            actual = _checksum(found.path / name)
        if actual != expected:
            raise AutoparError(
                f"{found.path} is damaged: {name} has changed since it was saved; load another checkpoint by its directory"
            )


def discard(final: Path) -> None:
    """Remove the partial directory of a failed save, whose path would have been `final`."""
    shutil.rmtree(partial_of(final), ignore_errors=True)


def _write_file(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def forget(directory: Path, keep: int | None) -> None:
    """Remove all but the newest `keep` checkpoints of a directory, complete or not. None removes
    nothing.
    """
    if keep is None:
        return
    with disk_errors(f"cannot remove old checkpoints of {directory}"):
        for path in _all_in(directory)[keep:]:
            shutil.rmtree(path.rename(partial_of(path)))


@contextlib.contextmanager
def disk_errors(doing: str) -> Iterator[None]:
    """A context in which errors of files become AutoparErrors that begin with `doing`. Since
    damaged files raise many types, every exception counts, except AutoparErrors and lost ranks. Of
    the errors that torch.distributed.checkpoint gathers from all ranks, that of the first rank is
    named.
    """
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        raise AutoparError(f"{doing}: rank {rank}: {_reason(cause)}") from error
    except AutoparError:
        raise
    except (Exception, SystemExit) as error:  # damaged files raise many types
        if lost_contact(error):
            raise
        raise AutoparError(f"{doing}: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    first: BaseException | None = error
    # torch's writer fails again while it closes a full disk's file
    while first is not None and not isinstance(first, OSError):
        first = first.__context__
    error = first or error
    return f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else 'no message'}"
