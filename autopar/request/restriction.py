"""What another framework can run, as a limit on the search. Planning knows no framework beyond it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from autopar.request.pins import Pins


def _any_choice(choice: Any) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Restriction:
    """A limit on the plans that are searched.

    Attributes:
        name: what the plans are for, in words.
        pin: choices that hold for every plan.
        recompute: the recompute modes, each the same for all layers.
        schedules: schedules of a pipeline.
        allows: whether a candidate of the search is possible.  It has the fields of `Candidate`.
    """

    name: str
    pin: Mapping[str, Any] = field(default_factory=dict)
    recompute: tuple[str, ...] = ("none", "selective", "full")
    schedules: tuple[str, ...] = ("1f1b", "interleaved_1f1b", "gpipe")
    allows: Callable[[Any], bool] = _any_choice

    def pins_with(self, pin: Mapping[str, Any]) -> Pins:
        """The user's pins, and those of the restriction that the user does not fix."""
        return Pins.of({**{k: v for k, v in self.pin.items() if k not in pin}, **pin})
