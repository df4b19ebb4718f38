"""Pins (choices that a user fixes): the table of all pins, and the pins of a request.

A new pin is a row of `PINS` and a field of `Pins` here, a check against model and cluster in
`planning/pin_checks.py`, and its effect in `planning/candidates.py`. Help, messages and comparisons
with plans follow from the table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

from autopar_cost_models import OFFLOADS, SCHEDULES
from autopar_cost_models.checks import is_whole

from autopar.errors import AutoparError, shown
from autopar.ir.fusion import AUTO, FUSE_MODES
from autopar.ir.layout import Layout
from autopar.ir.mesh import AXES, MOST_DEVICES, MeshShape, groups_of
from autopar.ir.plan import Plan
from autopar.ir.plan_checks import SELECTIVE_MODES

PinValue = int | str | bool

ZERO_STAGES = (0, 1, 2, 3)
OFFLOADED_STAGES = (0, 3)
"""ZeRO stages under which parameters may lie in host memory. ZeRO-1 and ZeRO-2 keep the updated
parameters gathered on the device for the whole step.
"""

RECOMPUTE = ("none", "full")
"""Recompute modes that apply to every layer. Selective modes (`SELECTIVE_MODES`) and `every-k` are
considered only if pinned. Without a pin the search chooses for each layer.
"""

CONTEXT_METHODS = ("gather", "ring", "ulysses")
"""Methods by which attention gets keys and values of other cp ranks."""


EVEN = "even"


def stage_sizes(stages: Any) -> tuple[int, ...]:
    """The layers of each stage that the pin `stages` names: `11-5` -> (11, 5). () if it names
    none.
    """
    if not isinstance(stages, str) or not re.fullmatch(r"[0-9]{1,6}(-[0-9]{1,6})+", stages):
        return ()
    return tuple(map(int, stages.split("-")))


def is_recompute(value: Any) -> bool:
    """Whether the pin `recompute` may have this value: 'none', 'full', a selective mode, or
    'every-k' with a whole number k.
    """
    return value in (*RECOMPUTE, *SELECTIVE_MODES) or (
        isinstance(value, str) and re.fullmatch(r"every-[1-9][0-9]{0,8}", value) is not None
    )


@dataclass(frozen=True, slots=True)
class PinSpec:
    """A row of the table of pins. A pin is a choice that a user fixes. `name` and `help` are shown
    in help and messages.

    `check(value)` returns what is wrong with a value, or ''. It raises AutoparError for a value
    that is invalid in any request. `of_plan(plan)` is the plan's value, or None if plans do not
    record it. `same(value, plan)`: whether the plan has this choice in another notation.
    """

    name: str
    help: str
    check: Callable[[Any], str]
    of_plan: Callable[[Plan], PinValue | None] = lambda plan: None
    same: Callable[[Any, Plan], bool] = lambda value, plan: False

    def is_choice_of(self, plan: Plan, value: Any) -> bool:
        """Whether the plan has this value of the pin. False if plans do not record it."""
        return self.of_plan(plan) == value or self.same(value, plan)


def _unless(is_right: Callable[[Any], bool], wrong: str) -> Callable[[Any], str]:
    """A check that returns the text `wrong` unless `is_right(value)`."""
    return lambda value: "" if is_right(value) else wrong


def _one_of(known: Sequence[str], *silent: str) -> Callable[[Any], str]:
    """A check that a value is one of `known` or `silent`. Error messages list only `known`."""
    return _unless(
        lambda value: value in (*known, *silent), f"is not known; {', '.join(known)} are"
    )


_wrong_count = _unless(
    lambda value: is_whole(value, 1, MOST_DEVICES),
    f"must be a whole number >= 1, and at most {MOST_DEVICES:,}",
)
_wrong_stages = _unless(
    lambda value: value == EVEN or bool(stage_sizes(value)),
    "is not known; 'even' deals layers evenly, 11-5 gives the first stage 11 layers and the second 5, "
    "without the pin stages are cut as is best",
)
_wrong_zero = _unless(
    lambda value: type(value) is int and value in ZERO_STAGES,
    "is not a ZeRO stage; 0, 1, 2 and 3 are",
)
_wrong_recompute = _unless(
    is_recompute,
    f"is not known; {', '.join((*RECOMPUTE, *SELECTIVE_MODES))} and every-2, every-3, ... are",
)
_wrong_flag = _unless(lambda value: isinstance(value, bool), "is not known; true and false are")


def _wrong_order(value: Any) -> str:
    MeshShape(order=value)
    return ""


def _wrong_deal(value: Any) -> str:
    groups_of(value)
    return ""


def _wrong_shard(value: Any) -> str:
    if value == 1 and is_whole(value):
        raise AutoparError(
            "shard=1: a rank alone shares out nothing; pin zero=0, or shard=2 or more"
        )
    if is_whole(value, 0, MOST_DEVICES):
        return ""
    return (
        "must be a whole number: the data-parallel ranks that share out what ZeRO does, 0 for all"
    )


PINS = {
    pin.name: pin
    for pin in (
        PinSpec("tp", "tensor-parallel ranks", _wrong_count, lambda plan: plan.mesh.tp),
        PinSpec("pp", "ranks of the pipeline", _wrong_count, lambda plan: plan.mesh.pp),
        PinSpec("dp", "data-parallel ranks, those of ep among them", _wrong_count, lambda plan: plan.mesh.dp),
        PinSpec("cp", "ranks that share out the positions of a sequence", _wrong_count, lambda plan: plan.mesh.cp),
        PinSpec("ep", "data-parallel ranks that share out experts", _wrong_count, lambda plan: plan.mesh.ep),
        PinSpec("order", "mesh axes as ranks lie, outermost first: dp-pp-tp", _wrong_order,
                lambda plan: plan.mesh.order or "-".join(AXES), lambda value, plan: replace(plan.mesh, order=value) == plan.mesh),
        PinSpec("deal", "groups of a mixed cluster along the pipeline: 1x2-0x3", _wrong_deal,
                lambda plan: plan.mesh.deal or None, lambda value, plan: groups_of(value) == plan.mesh.groups),
        PinSpec("vpp", "stages of a pipeline rank", _wrong_count, lambda plan: len(plan.stages) // plan.mesh.pp),
        PinSpec("micro_batch", "sequences of a micro-batch, on a data-parallel rank", _wrong_count, lambda plan: plan.micro_batch),
        PinSpec("schedule", f"of the pipeline: {', '.join(SCHEDULES)}", _one_of(tuple(SCHEDULES), "none"), lambda plan: plan.schedule),
        PinSpec("stages", "even: each stage gets as many layers; 11-5: the layers of each stage", _wrong_stages),
        PinSpec("zero", "ZeRO stage, 0 to 3", _wrong_zero, lambda plan: plan.zero),
        # 0 and all ranks are one
        PinSpec("shard", "data-parallel ranks that share out what ZeRO does, 0 for all", _wrong_shard, lambda plan: plan.shard,
                lambda value, plan: value == (plan.shard or (plan.zero and plan.mesh.dp * plan.mesh.cp))),
        PinSpec("recompute", f"{', '.join((*RECOMPUTE, *SELECTIVE_MODES))}, or every-2, every-3, ...", _wrong_recompute,
                lambda plan: plan.recompute),
        PinSpec("sequence_parallel", "true or false: activations between blocks are sharded over tp", _wrong_flag),
        PinSpec("context_method", f"of attention over cp: {', '.join(CONTEXT_METHODS)}", _one_of(CONTEXT_METHODS)),
        PinSpec("offload", f"what is in host memory: {', '.join(OFFLOADS)}", _one_of(OFFLOADS), lambda plan: plan.offload),
        PinSpec("fuse", f"what becomes ops of our own: {', '.join(FUSE_MODES)}; {AUTO} chooses", _one_of((*FUSE_MODES, AUTO)),
                lambda plan: plan.fusion.mode, lambda value, plan: value == AUTO and bool(plan.fusion.weighed)),
    )
}  # fmt: skip
"""Every pin by its name, in display order."""


@dataclass(frozen=True, slots=True, eq=False)
class Pins(Mapping[str, Any]):
    """The pins of a request: a mapping from names to values, with a typed attribute for each; None
    if not pinned.

    `given` has the pinned names in the order of the request; by default all that have a value.
    """

    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    cp: int | None = None
    ep: int | None = None
    order: str | None = None
    deal: str | None = None
    vpp: int | None = None
    micro_batch: int | None = None
    schedule: str | None = None
    stages: str | None = None
    zero: int | None = None
    shard: int | None = None
    recompute: str | None = None
    sequence_parallel: bool | None = None
    context_method: str | None = None
    offload: str | None = None
    fuse: str | None = None
    given: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.given:
            names = tuple(name for name in PINS if getattr(self, name) is not None)
            object.__setattr__(self, "given", names)
        for name, value in self.items():
            if not isinstance(value, str | int | float):
                raise AutoparError(
                    f"{name}={shown(value)} must be a text, a whole number, True or False"
                )
            if wrong := PINS[name].check(value):
                raise AutoparError(f"{name}={shown(value)} {wrong}")

    @classmethod
    def of(cls, pin: Mapping[str, Any]) -> Pins:
        """The pins in a mapping from names to values; a `Pins` is returned as it is. Raises
        AutoparError for an unknown name or an invalid value.
        """
        if isinstance(pin, Pins):
            return pin
        check_pin_names(pin)
        return cls(**pin, given=tuple(pin))

    def leave(self, **choices: PinValue) -> bool:
        """Whether each of these choices is either not pinned or has its pinned value."""
        return all(self.get(name, value) == value for name, value in choices.items())

    def __getitem__(self, name: str) -> Any:
        if name not in self.given:
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.given)

    def __len__(self) -> int:
        return len(self.given)

    def __str__(self) -> str:
        return str(dict(self))


def parse_pins(text: str) -> dict[str, PinValue]:
    """Pins from text: `tp=8,zero=1` -> {'tp': 8, 'zero': 1}; '' -> {}. `true` and `false` become
    booleans. Raises AutoparError for anything that is not key=value, for commas alone, and for a
    repeated key. Names and values are not checked.
    """
    pins: dict[str, PinValue] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not key or not value:
            raise AutoparError(
                f"--pin {shown(text)}: {shown(item)} is not key=value; write for example --pin tp=8,zero=1"
            )
        if key in pins:
            raise AutoparError(
                f"--pin {shown(text)}: {key} is given twice, as {pins[key]} and {value}"
            )
        flags: dict[str, PinValue] = {"true": True, "false": False}
        is_number = re.fullmatch(r"[+-]?[0-9]{1,18}", value)
        pins[key] = int(value) if is_number else flags.get(value.lower(), value)
    if text and not pins:
        raise AutoparError(
            f"--pin {shown(text)} has no choice in it; write for example --pin tp=8,zero=1, or leave it out"
        )
    return pins


def choices_of(plan: Plan) -> dict[str, PinValue]:
    """The plan's choices, by pin name. Pins that the plan does not record are missing, such as
    `stages`, `sequence_parallel` and `context_method`, and `deal` on devices of one kind.
    """
    chosen = {name: pin.of_plan(plan) for name, pin in PINS.items()}
    return {name: value for name, value in chosen.items() if value is not None}


def pins_of(plan: Plan) -> dict[str, PinValue]:
    """Pins that reproduce the plan, except for the layouts of ops and the cuts of a pipeline into
    stages. `recompute` is missing if layers differ in it.
    """
    return {
        key: value
        for key, value in choices_of(plan).items()
        if key != "recompute" or is_recompute(value)
    }


def layout_pins(layout: Layout, gpus: int, layers: int) -> dict[str, Any]:
    """The pins that fix a layout on `gpus` devices, for a model with `layers` layers."""
    dp = layout.dp_on(gpus)
    number = layout.micro_batches_on(gpus)
    pin: dict[str, Any] = {
        name: getattr(layout, name) for name in ("tp", "pp", "cp", "micro_batch")
    }
    # experts that are shared out over tp too are priced as split over it
    pin |= {"dp": dp, "ep": gcd(layout.ep, dp), "recompute": mode_of(layout, layers)}
    zero = layout.zero if dp * layout.cp > 1 else 0
    pin |= {"zero": zero} | ({"shard": layout.shard_on(gpus)} if zero else {})
    if layout.pp > 1:
        # with fewer micro-batches than ranks, 1F1B runs all forwards first
        early = layout.schedule == "1f1b" and number < layout.pp
        stages = "-".join(map(str, layout.stages)) if layout.stages else EVEN
        pin |= {
            "vpp": layout.vpp,
            "schedule": "gpipe" if early else layout.schedule,
            "stages": stages,
        }
    pin |= {"sequence_parallel": layout.sequence_parallel} if layout.tp > 1 else {}
    pin |= {"offload": layout.offload} if layout.offload != "none" else {}
    # frameworks number the ranks of a pipeline outermost
    return pin | {"order": layout.order or "-".join(AXES)}


def mode_of(layout: Layout, layers: int) -> str:
    """The recompute mode that prices a layout: if only some layers of each stage are computed again,
    the nearest `every-k`.
    """
    each = layers // (layout.pp * layout.vpp) if layers else 0
    some = layout.recompute_layers
    if layout.recompute != "full" or not some or some >= each:
        return layout.recompute
    every = max(1, round(each / some))
    return f"every-{every}" if every > 1 else "full"


def first_difference(pin: Mapping[str, Any], plan: Plan) -> str:
    """The name of the first pin that the plan does not follow; '' if it follows all. A pin that
    plans do not record counts as not followed.
    """
    return next((key for key, value in pin.items() if not PINS[key].is_choice_of(plan, value)), "")


def check_pin_names(pin: Mapping[str, Any]) -> None:
    """Raises AutoparError for an unknown pin name. A misspelt pin is a mistake; an impossible one
    gets an answer instead.
    """
    for name in pin:
        if name not in PINS:
            raise AutoparError(f"unknown pin {shown(name)}; pins are {', '.join(PINS)}")


def pins_of_entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The pins that reproduce a candidate in a certificate. The schedule of a pipeline that was not
    solved is unknown and stays free. `recompute` is missing if layers differ.
    """
    pins = (
        entry["mesh"]
        | {key: entry[key] for key in ("micro_batch", "zero")}
        | {"shard": entry.get("shard", 0)}
    )
    if entry["mesh"]["pp"] > 1 and entry.get("outcome", "solved") == "solved":
        pins |= {"schedule": entry["schedule"], "vpp": entry["stages_per_rank"]}
    return pins | ({"recompute": entry["recompute"]} if is_recompute(entry["recompute"]) else {})


def pin_text(pin: Mapping[str, Any]) -> str:
    """The pins as text: `tp=8,sequence_parallel=true`."""
    return ",".join(
        f"{key}={str(value).lower() if isinstance(value, bool) else value}"
        for key, value in pin.items()
    )


def pins_help() -> str:
    """Help text: one line for each pin, with its name and meaning."""
    width = max(map(len, PINS))
    return "\n".join(f"{name:{width}}  {pin.help}" for name, pin in PINS.items())
