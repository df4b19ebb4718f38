"""The command that puts a predicted trace and a measured one side by side."""

from __future__ import annotations

import json

import click

from autopar.cli import options
from autopar.cli.terminal import show


@click.command("trace-diff", cls=options.Command)
@click.argument("predicted", type=click.Path(dir_okay=False))
@click.argument("measured", type=click.Path(dir_okay=False))
@options.as_json
@click.pass_context
def trace_diff_command(ctx: click.Context, predicted: str, measured: str, as_json: bool) -> None:
    """Where a measured step parts from the predicted one, range by range.  Exit code 1 if the order
    of ranges differs.

    PREDICTED is a trace of explain --trace, MEASURED one of engine.profile.
    \u000c
    `predicted` and `measured` are paths of traces, which may be compressed. `as_json`: prints JSON
    instead of a table.
    """
    from autopar.report.trace_check import read_trace
    from autopar.report.trace_diff import trace_diff as compared

    found = compared(read_trace(predicted), read_trace(measured))
    if as_json:
        click.echo(json.dumps(found.as_dict(), indent=1))
    else:
        show(found.table())
    ctx.exit(0 if found.parts_at is None else 1)
