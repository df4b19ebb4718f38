"""Options and arguments that commands share, and how their text becomes values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import click

from autopar.cli.help_texts import EXAMPLES, EXIT_CODES, ONE_IF
from autopar.errors import shown
from autopar.ir.mesh import MOST
from autopar.ir.plan_checks import PRECISIONS


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
                     help="Seconds to search for a plan; objectives, comparisons and sweeps make several.")  # fmt: skip
micro_batch_mean = click.option("--allow-micro-batch-mean", "micro_batch_mean", is_flag=True,
                                help="Split batches though the mean of micro-batch losses is another loss.")  # fmt: skip
target = click.option("--target", metavar="megatron|...",
                      help="Only what another framework can run, for autopar export.")  # fmt: skip
runnable = click.option("--runnable", is_flag=True, help="Only what the engine runs today.")


def search(command: Callable) -> Callable:
    """A decorator that adds the options of every command that searches for plans: precision, time
    limit, runnable, and the mean of micro-batch losses.
    """
    for option in (micro_batch_mean, runnable, limit, precision):
        command = option(command)
    return command


price = click.option(
    "--price",
    type=POSITIVE_REAL,
    help="Dollars a device and hour (default: what the cluster file says).",
)
