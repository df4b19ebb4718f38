"""The command line that makes a plan again, with its choices as pins."""

from __future__ import annotations

from shlex import quote

from autopar.ir.plan import Plan
from autopar.request.pins import PINS

_DEFAULTS = {"vpp": 1, "shard": 0, "offload": "none", "fuse": "none", "schedule": "none"}


def command_line(plan: Plan, model: str, cluster: str, seq: int | None = None) -> str:
    """The command `autopar explain` for a plan, with a pin for each choice that has one. `model` and
    `cluster` are texts as a user writes them. `seq` are tokens of a sequence (None: the model's own
    length).

    Layers of each stage, and a mix of recompute modes, are no pins: the command finds them again.
    """
    words = ["autopar explain", quote(model), quote(cluster), f"--global-batch {plan.global_batch}"]
    words += [f"--seq {seq}"] if seq is not None else []
    words.append(f"--precision {plan.precision}")
    return " ".join([*words, f"--pin {pins_text(plan)}"])


def pins_text(plan: Plan) -> str:
    """The plan's choices as the text of `--pin`; what has its default value is left out."""
    found = {}
    for name, pin in PINS.items():
        value = pin.of_plan(plan)
        if value is None or value == _DEFAULTS.get(name) or value == "mixed":
            continue
        if name == "order" and not plan.mesh.order:
            continue
        if name in ("cp", "ep") and value == 1:
            continue
        found[name] = value
    return ",".join(f"{name}={value}" for name, value in found.items())
