"""Choices that a user fixes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autopar.errors import AutoparError, shown
from autopar.ir.mesh import AXES, groups_of
from autopar.ir.plan import Plan
from autopar.ir.plan_checks import SELECTIVE_MODES

PINS = (
    "tp", "pp", "dp", "cp", "ep", "order", "deal", "vpp", "micro_batch", "schedule", "stages", "zero", "shard", "recompute",
    "sequence_parallel", "context_method", "offload",
)  # fmt: skip


_DEGREES = ("tp", "pp", "cp", "dp", "ep")


ZERO_STAGES = (0, 1, 2, 3)


OFFLOADED_STAGES = (0, 3)
"""ZeRO stages under which parameters can be in host memory: 1 and 2 have the updated ones gathered on the device, for all of a step."""


RECOMPUTE = ("none", "full")
"""Modes of every layer, or none.  Parts of a layer (`SELECTIVE_MODES`) and every k-th layer whole (`every-k`) are evaluated where they are
pinned; without a pin each layer recomputes as is best."""


def is_recompute(value: Any) -> bool:
    """Whether a value of the pin is a recompute mode."""
    return value in (*RECOMPUTE, *SELECTIVE_MODES) or (
        isinstance(value, str) and re.fullmatch(r"every-[1-9][0-9]{0,8}", value) is not None
    )


def parse_pins(text: str) -> dict[str, Any]:
    """`tp=8,zero=1` -> {'tp': 8, 'zero': 1}.  Raises AutoparError for anything that is not key=value."""
    pins: dict[str, Any] = {}
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
        pins[key] = (
            int(value)
            if re.fullmatch(r"[+-]?[0-9]{1,18}", value)
            else {"true": True, "false": False}.get(value.lower(), value)
        )
    if text and not pins:
        raise AutoparError(
            f"--pin {shown(text)} has no choice in it; write for example --pin tp=8,zero=1, or leave it out"
        )
    return pins


def choices_of(plan: Plan) -> dict[str, int | str]:
    """What the plan decided, by pin.  `sequence_parallel` and `context_method` are not among them: they are in the layouts of ops."""
    mesh = plan.mesh
    return {
        "tp": mesh.tp,
        "pp": mesh.pp,
        "dp": mesh.dp,
        "cp": mesh.cp,
        "ep": mesh.ep,
        "order": mesh.order or "-".join(AXES),
        "vpp": len(plan.stages) // mesh.pp,
        "micro_batch": plan.micro_batch,
        "schedule": plan.schedule,
        "zero": plan.zero,
        "shard": plan.shard,
        "recompute": plan.recompute,
        "offload": plan.offload,
    } | ({"deal": mesh.deal} if mesh.deal else {})


def pins_of(plan: Plan) -> dict[str, int | str]:
    """Pins that leave the plan nothing to decide but layouts of ops, and what each layer recomputes where they differ in it."""

    return {
        key: value
        for key, value in choices_of(plan).items()
        if key != "recompute" or is_recompute(value)
    }


def first_difference(pin: Mapping[str, Any], plan: Plan) -> str:
    """The first pinned key that the plan decides otherwise, or ''.  A key that no plan records counts as decided otherwise."""
    chosen = choices_of(plan)
    same = {
        "order": lambda value: replace(plan.mesh, order=value) == plan.mesh,
        "deal": lambda value: groups_of(value) == plan.mesh.groups,
        "shard": lambda value: (
            value == (plan.shard or plan.zero and plan.mesh.dp * plan.mesh.cp)
        ),  # 0 and all ranks are one
    }
    decided = {key: value for key, value in pin.items() if key not in same or not same[key](value)}
    return next((key for key, value in decided.items() if chosen.get(key) != value), "")


def check_pin_names(pin: Mapping[str, Any]) -> None:
    """Raise AutoparError for a pin that does not exist: a misspelt pin is a mistake, while an impossible one is an answer."""

    for name in pin:
        if name not in PINS:
            raise AutoparError(f"unknown pin {shown(name)}; pins are {', '.join(PINS)}")


def pin_text(pin: Mapping[str, Any]) -> str:
    """`tp=8,sequence_parallel=true`."""
    return ",".join(
        f"{key}={str(value).lower() if isinstance(value, bool) else value}"
        for key, value in pin.items()
    )
