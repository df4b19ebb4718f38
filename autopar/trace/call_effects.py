"""What a function that forward transforms changes in Python state, as it runs several times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from autopar.trace.python_state import Snapshot
from autopar.trace.run_inputs import NotPlain


@dataclass(slots=True)
class CallEffects:
    """The state that `take` returns: before all runs, and after the first."""

    take: Callable[[], list[Snapshot]]
    before: list[Snapshot] = field(init=False)
    first: list[Snapshot] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.before = self.take()

    def restore(self) -> None:
        """Put the state before all runs back."""
        for snapshot in self.before:
            snapshot.restore()

    def check(self, tracked: set[int]) -> None:
        """Raise NotPlain if the state differs from that after the first run, or if it has a new
        tensor that forward does not know. `tracked` are the ids of those that it knows.
        """
        found = self.take()
        self.first = self.first or found
        for before, first, now in zip(self.before, self.first, found, strict=True):
            for path, tensor in now.tensors.items():
                if before.tensors.get(path) is not tensor and id(tensor) not in tracked:
                    raise NotPlain(
                        f"it stores a tensor outside of itself, in {path!r}",
                        "Return that tensor, as by has_aux=True in torch.func.grad",
                    )
            differing = first.differing(now)
            if differing:
                raise NotPlain(
                    f"what it stores in {differing[0]!r} depends on the number of rows",
                    "Store that before or after it",
                )
