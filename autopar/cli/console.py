"""The entry point of the console script: exit codes, interrupts, closed pipes and full disks."""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from typing import NoReturn

import click
from autopar_cost_models.echo import shortened_message

from autopar.cli.plan_commands import cli
from autopar.garbage import seldom_collected

LOST_OUTPUT = 74
"""Exit code if output or another file cannot be written: EX_IOERR of sysexits.h."""


def main() -> None:
    """Runs the console script and ends the process. Ctrl-C ends it with the word "Interrupted", a
    closed pipe without a message, and output that cannot be written with one line.
    """
    if sys.stderr is None:  # closed by the process that started this
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (until the process ends)
    with seldom_collected():  # nor at its end, which it does not reach
        _end(_run())


def _run() -> int:
    """Runs the command that the arguments name, writes its output, and returns its exit code: 141
    for a closed pipe, `LOST_OUTPUT` for output or another file that cannot be written.
    """
    if sys.stdout is None:
        click.echo(
            "Error: standard output is closed, so that the answer would be lost; give it a file or a terminal",
            err=True,
        )
        return LOST_OUTPUT
    try:
        code = _command()
        sys.stdout.flush()
        return code
    except (BrokenPipeError, SystemExit):  # SystemExit: what click and rich make of the first
        _drop_output()
        return 141
    except OSError as error:
        reason = error.strerror or str(error)
        # a write to a stream; what is written to files is told by `files.py`
        if error.filename is None:
            _drop_output()
            reason = f"standard output cannot be written ({reason}), so that the answer is lost or cut short; send it to a place with room"
        with suppress(OSError):
            click.echo(f"Error: {shortened_message(reason)}", err=True)
        return LOST_OUTPUT


def _command() -> int:
    try:
        code = cli.main(standalone_mode=False)
        return code if isinstance(code, int) else 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        click.echo("Interrupted", err=True)
        return 130


def _drop_output() -> None:
    """Redirects standard output to the null device, for the rest of the process."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _end(code: int) -> NoReturn:
    """Ends the process with exit code `code`, like `sys.exit`: exit functions run and streams are
    flushed. The objects of torch and of a search are not destroyed, which would take more than a
    second.
    """
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with suppress(OSError):  # of standard error: nobody is left to be told
            stream.flush()
    os._exit(code)
