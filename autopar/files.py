"""Users' files: checked paths, reading text, and atomic writes that leave either the old or the new
file.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autopar.errors import AutoparError, shown

MOST_BYTES = 2**30
"""The largest size of a plan, cluster file, config or table of runs. A larger file is refused as
the wrong file.
"""


def path_of(path: Any, what: str) -> Path:
    """`path` as a Path; the file need not exist. Raises AutoparError, which calls it `what` (such
    as 'plan'), if it is no text or pathlib.Path, is empty, or has a NUL character.
    """
    if not isinstance(path, str | os.PathLike):
        raise AutoparError(f"the path of the {what} is {shown(path)}, not a text or pathlib.Path")
    text = os.fspath(path)
    if not isinstance(text, str) or not text or "\0" in text:
        why = {"": "is empty"}.get(
            text, "has a NUL character" if isinstance(text, str) else "is made of bytes"
        )
        raise AutoparError(f"the path of the {what}, {shown(text)}, {why}: give the name of a file")
    return Path(text)


def yaml_loader(base: Any = None) -> Any:
    """A class like `base` (default: yaml.SafeLoader) that reads numbers as YAML 1.2 does: 24e9 and
    1.5e12 are floats. YAML 1.1, and so PyYAML, takes them for texts.
    """
    import yaml

    class Loader(base or yaml.SafeLoader):  # type: ignore[misc]
        pass

    number = re.compile(r"[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    return Loader


def shipped_yaml(path: Path) -> Any:
    """The data of a YAML file of the package, read by libyaml where PyYAML has it, which is ten
    times as fast. For users' files `yaml_loader` is meant, whose messages of errors are its own.
    """
    import yaml

    return yaml.load(path.read_text(), yaml_loader(getattr(yaml, "CSafeLoader", None)))


def reason_of(error: BaseException) -> str:
    """The reason, as text, why a file could not be read or written: the system's words where there
    are some.
    """
    if isinstance(error, UnicodeDecodeError):
        return f"it is not a UTF-8 text (byte {error.object[error.start]:#04x} at {error.start})"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def read_text(path: Any, what: str, hint: Callable[[], str] = str) -> str:
    """The text of a UTF-8 file, without a byte order mark. Raises AutoparError, with `what` (such
    as 'plan') and the path, if it cannot be read or is over 1 GiB. `hint()` is appended to the
    message if the file is missing.
    """
    found = path_of(path, what)
    try:
        if found.is_file() and (size := found.stat().st_size) > MOST_BYTES:
            raise AutoparError(
                f"cannot read {what} {found}: {size / 2**30:.1f} GiB are too much for one; is it another file?"
            )
        return found.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise AutoparError(f"{what} {found} does not exist{hint()}") from None
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise AutoparError(f"cannot read {what} {found}: {reason_of(error)}") from None


def made_folder(path: Any) -> Path:
    """The folder `path`, which is made, with those around it, if it is missing. Raises AutoparError
    if that fails.
    """
    folder = path_of(path, "folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise AutoparError(f"cannot make the folder {folder}: {reason_of(error)}") from None
    return folder


def write_text(path: Any, text: str, what: str) -> None:
    """Writes a UTF-8 file atomically: to a temporary file in the same folder that then replaces it.
    A device or pipe is written directly.

    Raises AutoparError, which calls the file `what`, if that fails; the previous file is then
    unchanged.
    """
    given = path_of(path, what)
    try:
        target = given.resolve()  # a link stays one
        if target.exists() and not target.is_file():
            # a device or pipe; of a directory the error says what it is
            target.write_text(text, encoding="utf-8")
            return
        _replace(target, text)
    except (
        OSError,
        UnicodeEncodeError,
        RuntimeError,
    ) as error:  # RuntimeError: links that go round in circles
        kept = "; the file that was there is as before" if os.path.isfile(given) else ""
        raise AutoparError(f"cannot write {what} {given}: {reason_of(error)}{kept}") from None


def _replace(target: Path, text: str) -> None:
    """Replaces the file `target` by one with `text`, atomically, with the same permissions. If that
    fails, raises the error and leaves `target` unchanged.
    """
    partial = target.with_name(f".autopar-{os.urandom(6).hex()}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, partial)
        partial.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is the one to tell
            partial.unlink(missing_ok=True)
        raise
