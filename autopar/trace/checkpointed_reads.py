"""Remembers which tensors of the model the functions under torch.utils.checkpoint have read.

Backward runs such a function again. Eager PyTorch then reads what forward has written since, and a
captured graph reads what the first run read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping

from torch import Tensor

from autopar.errors import AutoparError
from autopar.trace.registered_tensors import storage_of

Versions = Mapping[str, tuple[int, int]]
"""By name of a registered tensor, which tensor it is and how often it was changed in place."""


class CheckpointedReads:
    """The reads of one call of forward."""

    def __init__(self, versions: Callable[[], Versions], storages: Mapping[int, str]) -> None:
        """`versions()` are those of now. `storages` maps addresses of storages to names."""
        self._versions, self._storages = versions, storages
        self._ended: list[dict[str, tuple[int, int]]] = []
        self._names: set[str] | None = None

    def note(self, tensors: Iterable[Tensor]) -> None:
        """Remember tensors that an op reads, if a checkpointed function runs."""
        if self._names is not None:
            addresses = map(storage_of, tensors)
            self._names.update(self._storages[a] for a in addresses if a in self._storages)

    @contextlib.contextmanager
    def function(self) -> Iterator[None]:
        """A context in which a checkpointed function runs."""
        outer, self._names = self._names, set()
        try:
            yield
        finally:
            now = self._versions()
            self._ended.append({name: now[name] for name in self._names})
            self._names = outer

    def check(self, is_statistic: Callable[[str], bool]) -> None:
        """Raise AutoparError if forward has changed what a checkpointed function has read before.
        `is_statistic(name)`: whether the tensor is of a batch norm, which may change.
        """
        now = self._versions()
        for read in self._ended:
            for name, version in read.items():
                if now[name] != version and not is_statistic(name):
                    raise AutoparError(
                        f"forward changes {name!r} after torch.utils.checkpoint has run a function that reads it. Eager PyTorch runs the "
                        "function again in backward, with the new value: change it before, or pass a copy in (.clone())"
                    )
