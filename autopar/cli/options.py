"""Options and arguments that commands share, and how their text becomes values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from math import ceil
from typing import Any

import click
from autopar_cost_models.memory_error import headroom_for
from click.shell_completion import CompletionItem

from autopar.cli.help_texts import EXAMPLES, EXIT_CODES, ONE_IF
from autopar.errors import shown
from autopar.ir.cluster import ClusterSpec, reading_note
from autopar.ir.mesh import MOST_DEVICES
from autopar.models.names import model_note
from autopar.request.options import OPTIONS, PARTS, Option
from autopar.request.pins import PINS, parse_pins
from autopar.request.software import Software


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


class NumberList(click.ParamType):
    """A click parameter type: numbers of type `kind` above 0 and up to `MOST_DEVICES`, separated by commas.
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
        if not numbers or not all(0 < number <= MOST_DEVICES for number in numbers):
            whole = "whole " if self.kind is int else ""
            self.fail(
                f"{shown(value)} is not a list of positive {whole}numbers such as 64,128,256",
                param,
                ctx,
            )
        return numbers


class _Noted(click.ParamType):
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


MODEL, CLUSTER = _Noted("MODEL", model_note), _Noted("CLUSTER", reading_note)


POSITIVE = click.IntRange(min=1, max=MOST_DEVICES)


class _Number(click.FloatRange):
    """A parameter type: a number in a range, which may have infinity."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """The number in a text. NaN and numbers outside of the range are usage errors."""
        found = super().convert(value, param, ctx)
        return found if found == found else self.fail(f"{shown(value)} is no number", param, ctx)


POSITIVE_REAL = _Number(min=0, min_open=True)
PERCENT = _Number(min=0, max=100, min_open=True, max_open=True)

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON to stdout.")


class _Named(click.ParamType):
    """A parameter type: a text, completed to one of the known `names`."""

    def __init__(self, names: Sequence[str]) -> None:
        self.name, self.names = "text", names

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """The names that begin so."""
        return [CompletionItem(name) for name in self.names if name.startswith(incomplete)]


def _settings(row: Option) -> dict[str, Any]:
    """What click knows of the values of an option."""
    if row.kind == "switch":
        return {"is_flag": True}
    kinds: dict[str, Any] = {
        "count": POSITIVE,
        "number": POSITIVE_REAL,
        "share": _Number(0, 1, max_open=True),
        "chance": _Number(0.5, 1, max_open=True),
        "choice": click.Choice(row.names),
        "name": _Named(row.names),
        "pins": _Named([f"{name}=" for name in PINS]),
    }
    found = {"type": kinds.get(row.kind), "metavar": row.metavar}
    if row.kind == "pins":
        return found | {"default": ""}
    return found if row.default is None else found | {"default": row.default, "show_default": True}


def option(name: str, **changes: Any) -> Callable[[Callable], Callable]:
    """A decorator that adds the option of a request with this name; `changes` replace settings of
    click, such as its help.
    """
    row = (OPTIONS | PARTS)[name]
    return click.option(row.flag, row.name, **{"help": row.help, **_settings(row), **changes})


def together(*options: Callable) -> Callable[[Callable], Callable]:
    """A decorator that adds several options, of which the last is the first in the help."""

    def added(command: Callable) -> Callable:
        for option in options:
            command = option(command)
        return command

    return added


_SEARCH = ("precision", "headroom", "fit", "tolerance", "time_limit_s", "allow_micro_batch_mean", "software")  # fmt: skip
"""The options of every command that searches for plans, in the order of its help."""


def search_options(command: Callable) -> Callable:
    """A decorator that adds the options of every command that searches for plans: `_SEARCH`, and
    parts of the software. The command gets the software as the argument `software`, the name of its
    framework as `framework`, and what stays free as `headroom`.
    """

    @wraps(command)
    def with_software(*args: Any, **given: Any) -> Any:
        parts = {name: given.pop(name) for name in PARTS}
        _check_excluded(given)
        if (fit := given.pop("fit")) is not None:  # upwards: the chance is at least that asked
            given["headroom"] = f"{ceil(1e4 * headroom_for(fit)) / 1e4:.4f}"
        name = given.pop("software")
        at, pin, *within = (given.get(key) for key in ("cluster", "pin", "precision", "target"))
        software = _like(name, software_from(parts), at, parse_pins(pin or ""), *within)
        return command(*args, **given, software=software, framework=name)

    return together(*map(option, reversed((*_SEARCH, *PARTS))))(with_software)


def _check_excluded(given: Mapping[str, Any]) -> None:
    """Raises a usage error if an option is given beside one that it excludes."""
    for row in OPTIONS.values():
        for other in row.excludes:
            if given.get(row.name) is not None and given.get(other) is not None:
                raise click.UsageError(
                    f"{row.flag} and {OPTIONS[other].flag} both say what stays free: give one of them"
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
    from autopar.foreign.limits.asked_software import software_like

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
    own = {name: getattr(software, name) for name in PARTS}
    own = {name: value for name, value in own.items() if value != getattr(default, name)}
    own |= {"fp8_scaling": software.fp8_scaling} if in_fp8 else {}
    few = {name: value for name, value in own.items() if name in ("compiled", "fp8_scaling")}
    for parts in (few, own):
        for name in dict.fromkeys((framework, None, *FRAMEWORKS)):
            found = _like(name, software_from(parts), cluster, pins, precision, target)
            if found == software:
                words = [f"--software {name}"] if name else []
                for part, value in parts.items():
                    words.append(PARTS[part].flag + ("" if value is True else f" {value}"))
                return " ".join(words)
    return None
