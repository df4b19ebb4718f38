"""What another framework can run, as a limit on the search. Planning knows no framework beyond it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from autopar.ir.mesh import MeshShape
from autopar.request.pins import Pins, PinValue


@dataclass(frozen=True, slots=True)
class Only:
    """The values of a pin that a framework can run.

    Attributes:
        values: these values.
        why: what the framework lacks, in words that follow 'it', such as 'has no pipeline'.
    """

    values: tuple[PinValue, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Limit:
    """A rule about layouts that a framework can run.

    Attributes:
        why: what the framework lacks, in words that follow 'it', as for `Only`.
        instead: pins that keep to the rule, in words, such as 'pp=1'.
        allows: whether a layout keeps to the rule.  It has the fields of `Candidate`, with one schedule: `schedule` and
            `stages_per_rank`.
    """

    why: str
    instead: str
    allows: Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class Cuts:
    """How a framework cuts pipelines into stages.

    Attributes:
        how: in words that follow 'it', such as 'deals layers evenly'.
        sizes: the layers of each stage, for a mesh with a pipeline and a number of stages a rank; ()
            if there is no such pipeline.
    """

    how: str
    sizes: Callable[[MeshShape, int], tuple[int, ...]]


_DEGREES = ("tp", "pp", "cp", "dp", "ep")
_OF_AXES: dict[str, tuple[str, tuple[PinValue, ...]]] = {
    "schedule": ("pp", ("none",)),
    "vpp": ("pp", (1,)),
    "stages": ("pp", ()),
    "context_method": ("cp", ()),
    "sequence_parallel": ("tp", (False,)),
}
"""The axis that a pin is about, and its values where that axis has one rank."""


def _degree(name: str, only: Only) -> Limit:
    instead = f"{name}={' or '.join(map(str, only.values))}"
    return Limit(only.why, instead, lambda choice: getattr(choice.mesh, name) in only.values)


def _no_others() -> Mapping[str, Restriction]:
    return {}


@dataclass(frozen=True, slots=True)
class Restriction:
    """A limit on the plans that are searched.

    Attributes:
        name: what the plans are for, in words.
        pin: choices that hold for every plan that does not pin others.
        recompute: the recompute modes, each the same for all layers.
        schedules: schedules of a pipeline; () without pipelines.
        only: for some pins, the values that are possible.
        limits: rules about the layouts that are possible.
        cuts: how the framework cuts pipelines into stages.  None: stages are cut as is best.
        others: restrictions for other targets by name, which messages propose.
        precisions: those in which the framework trains.
        target: the name of the target that has this restriction; '' if none has.
    """

    name: str
    pin: Mapping[str, Any] = field(default_factory=dict)
    recompute: tuple[str, ...] = ("none", "selective", "full")
    schedules: tuple[str, ...] = ("1f1b", "interleaved_1f1b", "gpipe")
    only: Mapping[str, Only] = field(default_factory=dict)
    limits: tuple[Limit, ...] = ()
    cuts: Cuts | None = None
    others: Callable[[], Mapping[str, Restriction]] = _no_others
    precisions: tuple[str, ...] = ("bf16", "fp16", "fp32")
    target: str = ""

    @property
    def rules(self) -> tuple[Limit, ...]:
        """All rules about layouts: `limits`, and those of `only` that are about the mesh."""
        degrees = {name: only for name, only in self.only.items() if name in _DEGREES}
        return (*(_degree(name, only) for name, only in degrees.items()), *self.limits)

    def pins_with(self, pin: Mapping[str, Any]) -> Pins:
        """The user's pins, and those of the restriction that the user does not fix."""
        return Pins.of({**{k: v for k, v in self.pin.items() if k not in pin}, **pin})

    def possible(self, name: str) -> Only | None:
        """The values of a pin that are possible, perhaps none; None if all are. Pins that say how an
        axis works have no values where the axis has one rank alone.
        """
        if name == "recompute":
            return Only(self.recompute, "computes nothing else again")
        if name == "schedule" and self.schedules:
            return Only(("none", *self.schedules), "has no other schedule of a pipeline")
        if name in self.only or name not in _OF_AXES:
            return self.only.get(name)
        axis, values = _OF_AXES[name]
        only = self.only.get(axis)
        return Only(values, only.why) if only is not None and only.values == (1,) else None
