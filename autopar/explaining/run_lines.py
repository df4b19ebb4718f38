"""What to copy to get and run a plan, as words of its text and of its page."""

from __future__ import annotations

from shlex import quote
from textwrap import wrap

from autopar.ir.plan import Plan
from autopar.request.pins import pin_text, pins_of
from autopar.text.plan_words import cluster_of_plan

_DEFAULTS = {"vpp": 1, "shard": 0, "offload": "none", "fuse": "off", "schedule": "none"}


def run_words(plan: Plan, command: str) -> str:
    """What `run_lines` of a plan and its command do."""
    if plan.lacks:
        then = (
            f"The plan is for {plan.framework}, and autopar's engine lacks {plan.lacks} to run it. To train with the engine, plan "
            "without --target and --software (target= and software= in Python)."
        )
    else:
        then = "The other lines run it." if command else "These lines run the saved plan."
    return "The command makes this plan again and saves it. " * bool(command) + then


def run_lines(plan: Plan, command: str) -> str:
    """Commands and lines of Python that make such a plan and run it. `command` makes it; '' if that is
    not known.
    """
    parts = [f"{command} \\\n    --save plan.json"] if command else []
    if not plan.lacks:
        name, cluster = f'"{plan.cluster_name}"', ""
        if cluster_of_plan(plan) is None:
            data = f"plan.made_for.cluster, {name}"
            name, cluster = "cluster", f"cluster = autopar.ClusterSpec.from_data({data})\n"
        parts.append(
            "# in the training script, on every rank under torchrun\n"
            f'plan = autopar.Plan.load("plan.json")\n{cluster}'
            f"engine = autopar.parallelize(model, {name}, batch, plan=plan)"
        )
    return "\n\n".join(parts)


def command_line(
    plan: Plan, model: str, cluster: str, seq: int | None = None, options: str = ""
) -> str:
    """The command `autopar explain` for a plan, with a pin for each choice that has
    one. `model` and `cluster` are texts as a user writes them. `seq` are tokens of a sequence
    (None: the model's own length). `options` are further options.

    Layers of each stage, and a mix of recompute modes, are no pins: the command finds them again.
    """
    size = f"--global-batch {plan.global_batch}" + (f" --seq {seq}" if seq is not None else "")
    size += f" --precision {plan.precision}"
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
