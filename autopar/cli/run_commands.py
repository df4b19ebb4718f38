"""Commands that run, measure or score: verify, predict, calibrate, demo and completion. Commands
that plan are in `cli/plan_commands.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from autopar.cli import options
from autopar.cli.pictures import show_reply
from autopar.cli.terminal import progress, show
from autopar.errors import AutoparError
from autopar.request.pins import parse_pins

if TYPE_CHECKING:
    from autopar.foreign.published.run import Run
    from autopar.foreign.published.runs import Problem


@click.command("verify", cls=options.Command)
@click.argument("model", type=options.MODEL)
@click.option(
    "--nproc", type=click.IntRange(1, 64), default=4, show_default=True, help="CPU processes."
)
@click.option(
    "--pin",
    default="",
    metavar="tp=2,...",
    help="Choices to fix; without tp or dp every mesh is verified.",
)
@click.option("--steps", type=options.POSITIVE, default=3, show_default=True)
@click.option("--seq", type=options.POSITIVE, help="Tokens per sequence (default: 12).")
@click.option(
    "--rows", type=options.POSITIVE, help="Sequences per batch (default: two for each process)."
)
@click.option("--precision", type=click.Choice(["fp64", "fp32"]), default="fp64", show_default=True)
@click.option(
    "--compile",
    "compiles",
    is_flag=True,
    help="The processes run their programs through torch.compile.",
)
@options.as_json
@click.pass_context
def verify_command(
    ctx: click.Context,
    model: str,
    nproc: int,
    pin: str,
    steps: int,
    seq: int | None,
    rows: int | None,
    precision: str,
    compiles: bool,
    as_json: bool,
) -> None:
    """Train a shrunken MODEL on NPROC CPU processes and on one; compare losses and every
    parameter. Exit code 1 if not exact.
    \u000c
    `pin` is a text such as 'tp=2'; without tp or dp every mesh is verified. `steps` training
    steps run on `rows` sequences (None: two for each process) of `seq` tokens (None: 12).
    `compiles`: the processes use torch.compile. `as_json`: prints JSON instead of a table.
    """
    pins = parse_pins(pin)
    with progress("verifying") as tell:
        from autopar.models import parse_model
        from autopar.verify.verify import verify as run

        report = run(
            parse_model(model),
            nproc,
            pin=pins,
            precision=precision,
            steps=steps,
            seq=seq,
            rows=rows,
            progress=tell,
            compile=compiles,
        )
    from autopar.verify.report import verify_reply

    show_reply(verify_reply(report), as_json)
    ctx.exit(0 if report.exact else 1)


@click.command(cls=options.Command)
@click.argument(
    "runs", type=click.Path(dir_okay=False), metavar="RUNS.csv...", nargs=-1, required=False
)
@click.option(
    "--by",
    type=click.Choice(
        ["source", "gpu", "dtype", "framework", "generation", "family", "model", "tp"]
    ),
    help="Print the scores of each source, GPU, dtype, framework, generation of GPUs, family, model or degree of tp too.",
)
@click.option(
    "--only",
    multiple=True,
    metavar="NAME=VALUES",
    help="Read only runs that meet the condition, such as framework=nanotron, gpus=8..16 or memory=10..70 (GiB); may be repeated.",
)
@click.option(
    "--leave-out",
    type=click.Choice(["source", "model"]),
    multiple=True,
    help="Fit the constants on the files' runs, and without each source or model in turn; may be given for both.",
)
@click.option("--loso", is_flag=True, help="The same as --leave-out source.")
@click.option(
    "--ablate",
    is_flag=True,
    help="Predict the runs with each mechanism of the cost model switched off in turn.",
)
@click.option(
    "--constants",
    is_flag=True,
    help="Print the constants that predictions of runs rest on, each with its source or fit; takes no file.",
)
@options.as_json
def predict(
    runs: tuple[str, ...],
    by: str | None,
    only: tuple[str, ...],
    leave_out: tuple[str, ...],
    loso: bool,
    ablate: bool,
    constants: bool,
    as_json: bool,
) -> None:
    """Predict the measured training runs of CSV files, and score the predictions.
    \u000c
    `runs` has the paths of the files. `by` (such as 'source' or 'gpu') adds scores of each group.
    `only` has conditions that runs must meet. `leave_out` fits constants instead, also without each
    source or model in turn; `loso` does so by source. `ablate` instead predicts with each mechanism
    of the cost model switched off. `constants` prints the constants. `as_json`: prints JSON instead
    of tables.

    Raises AutoparError if two reports are asked for, or if no run can be predicted.
    """
    leave_out = tuple(dict.fromkeys((*leave_out, *(("source",) if loso else ()))))
    asked = [f"--leave-out {by}" for by in leave_out[:1]]
    asked += ["--ablate"] if ablate else []
    asked += ["--constants"] if constants else []
    if len(asked) > 1:
        raise AutoparError(f"{asked[0]} and {asked[1]} are two reports: ask for one at a time")
    if not runs and not constants:
        raise click.UsageError("Missing argument 'RUNS.csv...'.")
    from autopar.foreign.published.subsets import pick_of

    pick = pick_of(only)
    if constants:
        from autopar.foreign.published.constants import constants_reply
        from autopar.foreign.published.report import REPORT_WIDTH

        show_reply(constants_reply(), as_json, width=REPORT_WIDTH)
    elif leave_out:
        _fit(runs, pick, leave_out, as_json)
    elif ablate:
        _ablate(runs, pick, as_json)
    else:
        _score(runs, pick, by, as_json)


def _score(runs: Sequence[str], pick: Callable[[Run], bool], by: str | None, as_json: bool) -> None:
    from autopar.foreign.published.command import predict_files
    from autopar.foreign.published.report import REPORT_WIDTH, report_reply
    from autopar.foreign.published.run import RunPrediction

    def priced(run: Run) -> RunPrediction:
        from autopar.foreign.published.evaluate import (
            evaluate,  # loads torch, once the file has been read
        )

        return evaluate(run)

    with progress("predicting") as tell:
        predictions = predict_files(runs, priced, tell, pick)
    show_reply(report_reply(predictions, by), as_json, width=REPORT_WIDTH)
    if not predictions.results:
        raise AutoparError(_none_predicted(runs, predictions.problems))


def _none_predicted(paths: Sequence[str], problems: Sequence[Problem]) -> str:
    path = ", ".join(paths)
    if not problems:
        return f"{path} has no runs: below its header there is no row"
    return f"none of the {len(problems)} runs of {path} could be predicted; the first, {problems[0].id}: {problems[0].reason}"


def _complete_runs(paths: Sequence[str], pick: Callable[[Run], bool]) -> list[Run]:
    """The runs of CSV files that count in scores and that `pick` picks. Raises AutoparError if there
    is none.
    """
    from autopar.foreign.published.runs import read_files
    from autopar.foreign.published.subsets import picked

    every, problems = read_files(paths)
    runs = picked(every, pick, paths)
    if not (found := [run for run in runs if run.complete]):
        raise AutoparError(
            _none_predicted(paths, problems)
            if not runs
            else f"none of the {len(runs)} runs of {', '.join(paths)} is complete"
        )
    return found


def _fit(
    paths: Sequence[str], pick: Callable[[Run], bool], leave_out: Sequence[str], as_json: bool
) -> None:
    from autopar.foreign.published.fit import fit_constants, sensitivities
    from autopar.foreign.published.fit_report import fits_reply
    from autopar.foreign.published.report import REPORT_WIDTH
    from autopar.foreign.published.score import GROUPINGS

    runs = _complete_runs(paths, pick)
    with progress("predicting") as tell:
        from autopar.foreign.published.evaluate import evaluate

        table = sensitivities(runs, evaluate, tell)
    fits = [fit_constants(table, by) for by in leave_out]
    families = {run.id: GROUPINGS["family"](run) for run in runs}
    show_reply(fits_reply(fits, families), as_json, width=REPORT_WIDTH)


def _ablate(paths: Sequence[str], pick: Callable[[Run], bool], as_json: bool) -> None:
    from autopar.foreign.published.fit_report import ablation_reply
    from autopar.foreign.published.report import REPORT_WIDTH

    runs = [run for run in _complete_runs(paths, pick) if run.measured.step_time_s]
    if not runs:
        raise AutoparError(
            f"no complete run of {', '.join(paths)} has a measured step time, without which nothing can be compared"
        )
    with progress("predicting") as tell:
        from autopar.foreign.published.ablate import ablate

        found = ablate(runs, tell=tell)
    show_reply(ablation_reply(found), as_json, width=REPORT_WIDTH)


@click.command("calibrate", cls=options.Command)
@click.option(
    "--nproc",
    type=click.IntRange(1, 64),
    help="Devices to measure at once (default: 4 CPU processes, or all GPUs).",
)
@click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), help="Default: cuda if there is one, else cpu."
)
@click.option(
    "--output",
    type=click.Path(dir_okay=False),
    default="cluster.yaml",
    show_default=True,
    help="Cluster file to write.",
)
@click.option(
    "--from-run",
    "run",
    type=click.Path(dir_okay=False),
    metavar="LOG|trace.json",
    help="Fit --cluster to a measured run instead: a trace of torch's profiler, or a log of Megatron-LM, torchtitan or nanotron.",
)
@click.option(
    "--cluster",
    type=options.CLUSTER,
    help="With --from-run: where it ran (default: the cluster of --plan).",
)
@click.option("--plan", help="With --from-run: the saved plan that ran.")
@click.option("--job", help="With --from-run: the job file of the framework that ran.")
@click.option(
    "--model",
    type=options.MODEL,
    help="With --from-run: a MODEL, if the file of what ran has none.",
)
@click.option("--seq", type=options.POSITIVE, help="With --from-run: tokens per sequence.")
@options.as_json
def calibrate_command(
    nproc: int | None, device: str | None, output: str, as_json: bool, **asked: Any
) -> None:
    """Measure this machine and write a cluster file: matrix products, memory bandwidth, launches
    and collectives. With --from-run, fit a cluster to one measured run instead.

    CPU processes talk over gloo, GPUs over NCCL. Other commands take the file as CLUSTER. This
    takes about a minute. Leave the machine idle, since other load distorts the figures.

    A run shows some rates and not others; what it does not show is listed and stays as it was.
    \u000c
    `nproc` devices are measured at once (None: 4 CPU processes, or all GPUs). `device` is 'cpu'
    or 'cuda' (None: 'cuda' if there is one). `output` is the path of the file, .yaml or .yml.
    `as_json`: prints the cluster as JSON instead of a table. `asked` has the options of --from-run:
    `run`, `cluster`, `plan`, `job`, `model` and `seq`. Raises AutoparError for another path, and for
    options that do not go together.
    """
    if not output.lower().endswith((".yaml", ".yml")):
        raise AutoparError(
            f"--output {output}: a cluster file ends in .yaml or .yml; write for example --output cluster.yaml"
        )
    folder = os.path.dirname(os.path.abspath(output))
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK) or os.path.isdir(output):
        raise AutoparError(
            f"--output {output}: {folder} is no folder that can be written to; choose another path"
        )
    if asked["run"] is not None:
        if nproc is not None or device is not None:
            raise AutoparError("--from-run measures no device: leave --nproc and --device out")
        _refit(output, as_json, **asked)
        return
    if given := [name for name in ("cluster", "plan", "job", "model", "seq") if asked[name]]:
        raise AutoparError(f"--{given[0]} says what a measured run was: give --from-run too")
    with progress("calibrating") as tell:
        from autopar.calibrate.cluster import calibrate as measure

        spec = measure(nproc, device, progress=tell)
    spec.to_yaml(output)
    from autopar.cli.calibrated import calibration_reply

    show_reply(calibration_reply(spec, output), as_json)


_NO_CLUSTER = (
    "--from-run needs to know where it ran: give --cluster, for example --cluster dgx-h100:8"
)


def _refit(
    output: str,
    as_json: bool,
    run: str,
    cluster: str | None,
    plan: str | None,
    job: str | None,
    model: str | None,
    seq: int | None,
) -> None:
    """Fit a cluster to a measured run, write it to `output`, and print what changed."""
    if plan is not None and job is not None:
        raise AutoparError("--plan and --job both say what ran: give one of them")
    if cluster is None and plan is None:
        raise AutoparError(_NO_CLUSTER)
    with progress("reading the run") as tell:
        from autopar.request.arguments import parsed_cluster

        spec = parsed_cluster(cluster).one_kind if cluster is not None else None
        from autopar.foreign.measured.fit import refit
        from autopar.foreign.measured.read_run import read_run
        from autopar.foreign.measured.what_ran import job_file, saved_plan

        measured = read_run(run)
        tell("pricing what ran, and fitting rates")
        ran = None
        if plan is not None:
            ran = saved_plan(plan, spec, model, seq)
        elif job is not None and spec is not None:
            ran = job_file(job, spec, model, seq)
        at = ran.cluster if ran is not None else spec
        if at is None:
            raise AutoparError(_NO_CLUSTER)
        found = refit(measured, at, ran)
    found.cluster.to_yaml(output)
    from autopar.cli.calibrated import refit_reply

    show_reply(refit_reply(found, output), as_json)


@click.command(cls=options.Command)
@click.pass_context
def demo(ctx: click.Context) -> None:
    """Plan Llama-3-8B for 64 GPUs, then train a small Llama on 4 CPU processes and compare it with one device."""
    with progress("loading torch"):
        from autopar.cli.demo import run
    ctx.exit(0 if run(show, progress) else 1)


@click.command(cls=options.Command)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script that lets SHELL complete commands and options. Run it from the shell's
    start-up file.
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    if kind is None:
        raise AutoparError(f"click has no completion for {shell}")
    click.echo(kind(ctx.find_root().command, {}, "autopar", "_AUTOPAR_COMPLETE").source())


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
    from autopar.report.trace_diff import read_trace
    from autopar.report.trace_diff import trace_diff as compared

    found = compared(read_trace(predicted), read_trace(measured))
    show_reply(found.reply(), as_json)
    ctx.exit(0 if found.parts_at is None else 1)
