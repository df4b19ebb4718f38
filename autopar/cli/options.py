"""Options and arguments that commands share, and how their text becomes values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import wraps
from math import ceil
from typing import Any

import click
from autopar_cost_models.matmul import SCALINGS
from autopar_cost_models.memory_error import headroom_for

from autopar.cli.help_texts import EXAMPLES, EXIT_CODES, ONE_IF
from autopar.errors import shown
from autopar.ir.cluster import ClusterSpec, reading_note
from autopar.ir.mesh import MOST
from autopar.ir.plan_checks import PRECISIONS
from autopar.models.names import model_note
from autopar.request.pins import parse_pins
from autopar.request.software import NAMED, Software


class Command(click.Command):
    """A click command that refuses an option given twice; click would silently use the last value.
    Its help ends with examples and exit codes.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses the arguments as click does, into `ctx`. Raises a usage error if an option that
        takes one value is given twice.
        """
        _, _, given = self.make_parser(ctx).parse_args(args=list(args))
        for option, count in Counter(given).items():
            if (
                count > 1
                and isinstance(option, click.Option)
                and not option.multiple
                and not option.is_flag
            ):
                once = (
                    "; write all choices in one, as in --pin tp=8,zero=1"
                    if option.name == "pin"
                    else ""
                )
                raise click.UsageError(
                    f"{option.opts[0]} is given {count} times and taken once{once}", ctx
                )
        return super().parse_args(ctx, args)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the command's examples and exit codes below the options of its help."""
        super().format_epilog(ctx, formatter)
        name = self.name or ""
        if examples := EXAMPLES.get(name):
            with formatter.section("Examples"):
                formatter.write("".join(f"  {line}\n" for line in examples))
        codes = dict(EXIT_CODES) | ({"1": ONE_IF[name]} if name in ONE_IF else {})
        with formatter.section("Exit codes"):
            formatter.write_dl(sorted(codes.items(), key=lambda code: int(code[0])))


class Numbers(click.ParamType):
    """A click parameter type: numbers of type `kind` above 0 and up to `MOST`, separated by commas.
    Duplicates count once.
    """

    name = "N,N,..."

    def __init__(self, kind: type[int] | type[float]) -> None:
        self.kind = kind

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple:
        """The numbers in a text as a tuple, duplicates once; a tuple is returned as it is. Fails
        with a usage error for any other text.
        """
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(dict.fromkeys(self.kind(item) for item in value.split(",")))
        except ValueError:
            numbers = ()
        if not numbers or not all(0 < number <= MOST for number in numbers):
            whole = "whole " if self.kind is int else ""
            self.fail(
                f"{shown(value)} is not a list of positive {whole}numbers such as 64,128,256",
                param,
                ctx,
            )
        return numbers


class _Named(click.ParamType):
    """A parameter type: a text that names something. `note(text)` says what it is taken as, if that is
    another text. The note is printed to stderr.
    """

    def __init__(self, name: str, note: Callable[[str], str]) -> None:
        self.name, self.note = name, note

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> str | None:
        """The text itself."""
        if isinstance(value, str) and (note := self.note(value)):
            click.echo(f"Note: {note}", err=True)
        return value


MODEL, CLUSTER = _Named("MODEL", model_note), _Named("CLUSTER", reading_note)


POSITIVE = click.IntRange(min=1, max=MOST)


class _Positive(click.FloatRange):
    """A parameter type: a number above 0, or infinity."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """The number in a text. Infinity is accepted; NaN and numbers up to 0 are usage errors."""
        found = super().convert(value, param, ctx)
        return found if found == found else self.fail(f"{shown(value)} is no number", param, ctx)


POSITIVE_REAL = _Positive(min=0, min_open=True)
PERCENT = click.FloatRange(min=0, max=100, min_open=True, max_open=True)

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON to stdout.")
batch = click.option(
    "--global-batch", type=POSITIVE, required=True, help="Sequences per step over all devices."
)
seq = click.option(
    "--seq", type=POSITIVE, help="Tokens per sequence (default: what the model was designed for)."
)
precision = click.option(
    "--precision", type=click.Choice(PRECISIONS), help="Default: bf16 on GPUs, fp32 on CPUs."
)
limit = click.option("--time-limit", type=POSITIVE_REAL, default=60.0, show_default=True,
                     help="Seconds for the whole command; what follows the capture of the model has at least half of them.")  # fmt: skip
micro_batch_mean = click.option("--allow-micro-batch-mean", "micro_batch_mean", is_flag=True,
                                help="Split batches though the mean of micro-batch losses is another loss.")  # fmt: skip
target = click.option("--target", metavar="megatron|...",
                      help="Only what another framework can run, for autopar export.")  # fmt: skip
runnable = click.option("--runnable", is_flag=True, help="Only what the engine runs today.")


headroom = click.option("--headroom", metavar="FRACTION|GiB",
                        help="Memory of a device to keep free, 0.1 or 8GiB (default: 16.5 % on GPUs, by --fit).")  # fmt: skip
fit = click.option("--fit", metavar="CHANCE", type=click.FloatRange(0.5, 1, max_open=True),
                   help="Least chance to fit, 0.99: the headroom that it takes (default: 0.95 on GPUs).")  # fmt: skip
tolerance = click.option("--tolerance", type=click.FloatRange(min=0, max=1, max_open=True), default=0.02, show_default=True,
                         help="Fraction by which a simpler plan may take longer than the fastest.")  # fmt: skip


_FLAGS = {
    "compiled": "--compile",
    "fp8_scaling": "--fp8",
    "attention_kernel": "--attention-kernel",
    "loss_kernel": "--loss-kernel",
    "state_recipe": "--state-recipe",
}
"""The names of the options for parts of the software, by field of `Software`."""
_SOFTWARE = {
    "software": click.option("--software", metavar="NAME", help="How this framework runs the plan: torchtitan, megatron-core, nemo, "
                             "deepspeed, nanotron, transformers and others (default: autopar)."),
    "compiled": click.option(_FLAGS["compiled"], "compiled", is_flag=True, help="Predict for torch.compile."),
    "fp8_scaling": click.option(_FLAGS["fp8_scaling"], "fp8_scaling", type=click.Choice(list(SCALINGS)),
                                help="Linear layers multiply in fp8, scaled by this recipe."),
    "attention_kernel": click.option(_FLAGS["attention_kernel"], type=click.Choice(NAMED["attention_kernel"]),
                                     help="Default: the fastest that was measured on the device."),
    "loss_kernel": click.option(_FLAGS["loss_kernel"], type=click.Choice(NAMED["loss_kernel"]), help="Of the cross-entropy."),
    "state_recipe": click.option(_FLAGS["state_recipe"], type=click.Choice(NAMED["state_recipe"]),
                                 help="Precisions of gradients and optimizer state (default: fp32)."),
}  # fmt: skip
"""Options for the software: a framework, and its parts."""


def together(*options: Callable) -> Callable[[Callable], Callable]:
    """A decorator that adds several options, of which the last is the first in the help."""

    def added(command: Callable) -> Callable:
        for option in options:
            command = option(command)
        return command

    return added


def search(command: Callable) -> Callable:
    """A decorator that adds the options of every command that searches for plans: what stays free
    (headroom or a least chance to fit), tolerance, precision, and what limits the search. It adds
    those of the software too. The command gets that as the argument `software`, the name of its
    framework as `framework`, and what stays free as `headroom`.
    """

    @wraps(command)
    def with_software(*args: Any, **given: Any) -> Any:
        parts = {name: given.pop(name) for name in _SOFTWARE}
        given["headroom"] = _headroom(given["headroom"], given.pop("fit"))
        name = parts.pop("software")
        at, pin, *within = (given.get(key) for key in ("cluster", "pin", "precision", "target"))
        software = _like(name, software_from(parts), at, parse_pins(pin or ""), *within)
        return command(*args, **given, software=software, framework=name)

    others = (micro_batch_mean, runnable, limit, tolerance, fit, headroom, precision)
    return together(*_SOFTWARE.values(), *others)(with_software)


def _headroom(headroom: str | None, fit: float | None) -> str | None:
    """The headroom asked for, by itself or by a least chance to fit."""
    if fit is None:
        return headroom
    if headroom is not None:
        raise click.UsageError("--headroom and --fit both say what stays free: give one of them")
    return (
        f"{ceil(1e4 * headroom_for(fit)) / 1e4:.4f}"  # upwards: the chance is at least that asked
    )


def software_from(parts: Mapping[str, Any]) -> Software:
    """The software with the parts, by field, that are neither None nor False; others are the
    defaults.
    """
    fields = {name: value for name, value in parts.items() if value}
    return Software(**fields, matmul_dtype="fp8" if "fp8_scaling" in fields else None)


def _like(name: str | None, parts: Software, cluster: str | None, *rest: Any) -> Software:
    """`software_like` for the text of a cluster, or for None."""
    if name is None and rest[-1] is None:
        return parts
    from autopar.targets.asked_software import software_like

    return software_like(name, parts, ClusterSpec.parse(cluster) if cluster else None, *rest)


def software_words(
    software: Software,
    cluster: str,
    pins: Mapping[str, Any],
    precision: str,
    target: str | None,
    framework: str | None = None,
) -> str | None:
    """The options that give `software` in a command with the other arguments, such as `--compile`.
    None if no options do. Of frameworks with equal software, it is `framework`.
    """
    from autopar.request.framework_names import FRAMEWORKS

    default, in_fp8 = Software(), software.matmul_dtype == "fp8"
    own = {name: getattr(software, name) for name in _SOFTWARE if name != "software"}
    own = {name: value for name, value in own.items() if value != getattr(default, name)}
    own |= {"fp8_scaling": software.fp8_scaling} if in_fp8 else {}
    few = {name: value for name, value in own.items() if name in ("compiled", "fp8_scaling")}
    for parts in (few, own):
        for name in dict.fromkeys((framework, None, *FRAMEWORKS)):
            found = _like(name, software_from(parts), cluster, pins, precision, target)
            if found == software:
                words = [f"--software {name}"] if name else []
                for part, value in parts.items():
                    words.append(_FLAGS[part] + ("" if value is True else f" {value}"))
                return " ".join(words)
    return None


tokens = click.option(
    "--tokens",
    type=POSITIVE_REAL,
    help="Tokens to train on, such as 1.4e12: adds days, GPU-hours and dollars.",
)
price = click.option(
    "--price",
    type=POSITIVE_REAL,
    help="Dollars a device and hour (default: what the cluster file says).",
)
