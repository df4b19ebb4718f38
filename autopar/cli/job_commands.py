"""Commands about training jobs of other frameworks: check, export and convert."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from autopar.cli import options
from autopar.cli.pictures import Pictures, page_options, show_reply
from autopar.cli.terminal import progress
from autopar.ir.deadline import Deadline

if TYPE_CHECKING:
    from autopar.foreign.job import Exported

_NO_VERDICT = 3
"""The exit code of `check` if no verdict can be given."""
FRAMEWORK = click.option("--framework", help="The file's framework (default: told by its form).")
ARGUMENTS = click.argument("args", nargs=-1, metavar="[-- ARGS...]")
GLOBAL_BATCH = options.option(
    "global_batch", help="Sequences per step, if the file does not say them."
)
_MICRO_BATCH = click.option(
    "--micro-batch",
    type=options.POSITIVE,
    help="Sequences of a micro-batch, if the file does not say them.",
)


@click.command(cls=options.Command)
@click.argument("file", type=click.Path(dir_okay=False))
@ARGUMENTS
@click.option(
    "--cluster",
    type=options.CLUSTER,
    required=True,
    help="Where it runs: dgx-h100:8, h100:4, or a YAML file.",
)
@click.option(
    "--model", type=options.MODEL, help="A MODEL, if the file does not say its dimensions."
)
@options.option("seq", help="Tokens per sequence, if the file does not say them.")
@_MICRO_BATCH
@GLOBAL_BATCH
@click.option(
    "--measured",
    metavar="8.1s",
    help="A measured step, its rate ('2400 tokens/s/gpu'), or the log of the framework.",
)
@FRAMEWORK
@options.option("time_limit_s")
@page_options
@options.as_json
@click.pass_context
def check(
    ctx: click.Context,
    file: str,
    args: tuple[str, ...],
    cluster: str,
    model: str | None,
    seq: int | None,
    micro_batch: int | None,
    global_batch: int | None,
    measured: str | None,
    framework: str | None,
    time_limit_s: float,
    as_json: bool,
    **pictures: Any,
) -> None:
    """What a job FILE of another framework needs on a cluster, what refuses it, and what is better.
    Exit code 1 if it is refused or does not fit, and 3 if no verdict can be given.

    FILE is a launch script or a configuration of Megatron-LM, Megatron-Bridge, torchtitan, DeepSpeed,
    Accelerate, Transformers or nanotron.  Nothing in it is run.  ARGS are the arguments that a script
    is started with.
    \u000c
    `file` is its path, `args` are texts, `cluster` and `model` are texts, `seq` tokens, batches sequences, `measured`
    a text such as '8.1s' or the path of a log, `time_limit_s` seconds. `as_json`: prints JSON instead of tables.
    `pictures` has the arguments of `Pictures`.
    """
    drawn, page = Pictures.taken_from(pictures), None
    deadline = Deadline.after(time_limit_s)  # imports count
    with progress("reading") as tell:
        from autopar.foreign.checking.check import check_job
        from autopar.foreign.checking.measured import measured_step_s
        from autopar.foreign.checking.report import check_reply
        from autopar.foreign.frameworks.registry import read_job
        from autopar.request.arguments import parsed_cluster

        job = read_job(file, framework, args or None)
        job = job.with_batches(micro_batch, global_batch)
        spec = parsed_cluster(cluster).one_kind
        gpus = spec.num_devices
        measured_s = measured_step_s(measured, job, seq, gpus) if measured is not None else None
        tell("pricing the job, and looking for better plans")
        answer = check_job(job, spec, model, seq, measured_s, deadline=deadline)
        if drawn.wanted:
            from autopar.foreign.checking.page import check_page

            tell("simulating the step")
            page = check_page(answer)
    if as_json and page is not None:
        click.echo(json.dumps(page.data, indent=1))
    else:
        show_reply(check_reply(answer), as_json)
    if page is not None:
        drawn.write(page)
    ctx.exit(
        1 if answer.refused or answer.fits is False else _NO_VERDICT if answer.fits is None else 0
    )


@click.command("export", cls=options.Command)
@click.argument("plan", type=click.Path(dir_okay=False), metavar="PLAN.json")
@click.option("--to", "target", help="megatron, accelerate, ... (default: the plan's --target).")
@click.option(
    "--model",
    type=options.MODEL,
    help="A MODEL, whose dimensions are written too (default: the plan's).",
)
@click.option("--output", type=click.Path(dir_okay=False), help="Write the text to this file.")
@click.option(
    "--verify",
    is_flag=True,
    help="Read the text with the framework's own parser, and compare; exit code 1 if it reads another layout.",
)
@click.pass_context
def export_command(
    ctx: click.Context,
    plan: str,
    target: str | None,
    model: str | None,
    output: str | None,
    verify: bool,
) -> None:
    """Write a saved plan as arguments or configuration of another framework, or say what it cannot
    express.
    \u000c
    `plan` is the path of a plan file. `target` is the name of the framework (None: that of the plan),
    `model` a MODEL text and `output` a path to write to (None: stdout). `verify` also reads the text with the framework.
    """
    from autopar.foreign.writers.export import exported_job
    from autopar.ir.plan import Plan

    job, written = exported_job(Plan.load(plan), target, model)
    _print(written, output)
    if not verify:
        return
    from autopar.foreign.writers.own_parsers import disagreements

    wrong = disagreements(written, job)
    for line in wrong or (f"{written.target} reads the layout of the plan",):
        click.echo(line, err=True)
    ctx.exit(1 if wrong else 0)


@click.command("convert", cls=options.Command)
@click.argument("file", type=click.Path(dir_okay=False))
@ARGUMENTS
@click.option("--to", "target", required=True, help="megatron, accelerate, transformers, ...")
@FRAMEWORK
@_MICRO_BATCH
@GLOBAL_BATCH
@click.option("--output", type=click.Path(dir_okay=False), help="Write the text to this file.")
def convert_command(
    file: str,
    args: tuple[str, ...],
    target: str,
    framework: str | None,
    micro_batch: int | None,
    global_batch: int | None,
    output: str | None,
) -> None:
    """Write a job FILE of one framework in the words of another, and say what is lost. ARGS are the
    arguments that a script is started with.
    \u000c
    `file` is its path and `args` are texts. `target` is the framework to write for, `framework` that
    of the file (None: told by its form), and `output` a path to write to (None: stdout). The
    batches, in sequences, replace those of the file where they are given.
    """
    from autopar.foreign.frameworks.registry import read_job
    from autopar.foreign.writers.export import convert as converted

    job = read_job(file, framework, args or None).with_batches(micro_batch, global_batch)
    _print(converted(job, target), output)


def _print(written: Exported, output: str | None) -> None:
    """Prints or writes an exported text; notes go to stderr."""
    from autopar.files import write_text

    if output is None:
        click.echo(written.text, nl=not written.text.endswith("\n"))
    else:
        write_text(output, written.text, "exported job")
    notes = (
        [f"written for {written.target}", f"start it with: {written.launch}"]
        if written.launch
        else [f"written for {written.target}"]
    )
    notes += [f"environment: {name}={value}" for name, value in written.env.items()]
    for line in (*notes, *(f"not said: {loss}" for loss in written.losses)):
        click.echo(line, err=True)


COMMANDS = (check, export_command, convert_command)
"""The commands of this file."""
