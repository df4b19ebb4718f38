"""The command line that makes a plan again, with its choices as pins."""

from __future__ import annotations

from shlex import quote
from textwrap import wrap

from autopar.ir.plan import Plan
from autopar.request.pins import pin_text, pins_of

_DEFAULTS = {"vpp": 1, "shard": 0, "offload": "none", "fuse": "off", "schedule": "none"}


def command_line(
    plan: Plan, model: str, cluster: str, seq: int | None = None, options: str = ""
) -> str:
    """The command `autopar explain` for a plan, with a pin for each choice that has
    one. `model` and `cluster` are texts as a user writes them. `seq` are tokens of a sequence
    (None: the model's own length). `options` are further options.

    Layers of each stage, and a mix of recompute modes, are no pins: the command finds them again.
    """
    size = f"--global-batch {plan.global_batch}" + (f" --seq {seq}" if seq is not None else "")
    size += f" --precision {plan.precision}" + " --runnable" * plan.made_for.runnable
    size += f" {options}" if options else ""
    lines = [f"autopar explain {quote(model)} {quote(cluster)}", size]
    return " \\\n    ".join([*lines, f"--pin {_pins_text(plan)}"])


def _pins_text(plan: Plan) -> str:
    """The plan's choices as the quoted text of `--pin`, in lines of 80 columns; what has its default
    value is left out.
    """
    pins = {name: value for name, value in pins_of(plan).items() if value != _DEFAULTS.get(name)}
    text = pin_text(pins).replace(",", ", ")
    return '"' + "\n           ".join(wrap(text, 66, break_on_hyphens=False)) + '"'
