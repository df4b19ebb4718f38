"""The command line.  JSON and tables go to stdout, progress and errors to stderr; a user's mistake is one message and exit code 2.

Nothing here imports torch before a command runs, so that `autopar --help` is quick.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import click

from autopar import __version__
from autopar.errors import AutoparError

PROGRESS_AFTER_S = 2.0
PRECISIONS = click.Choice(["bf16", "fp32", "fp64"])


class _Mistake(click.ClickException):
    """An AutoparError as click shows it."""

    exit_code = 2


class _Commands(click.Group):
    """Turns an AutoparError of any command into one message."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except AutoparError as error:
            raise _Mistake(str(error)) from error


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="autopar")
def cli() -> None:
    """Plan, explain and verify distributed training of PyTorch models.

    MODEL is a named configuration (llama3-8b), dimensions (gpt:layers=96,hidden=12288,heads=96,vocab=51200), a Hugging Face config
    (hf:path/to/config.json) or module:function.  CLUSTER is dgx-h100:8 (8 nodes of 8), h100:4 (one node of 4), cpu:4 or a YAML file.
    """


_positive = click.IntRange(min=1)
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON to stdout.")
_batch = click.option("--global-batch", type=_positive, required=True, help="Sequences per step over all devices.")
_seq = click.option("--seq", type=_positive, help="Tokens per sequence (default: what the model was designed for).")
_precision = click.option("--precision", type=PRECISIONS, help="Default: bf16 on GPUs, fp32 on CPUs.")
_seconds = click.FloatRange(min=0, min_open=True)
_limit = click.option("--time-limit", type=_seconds, default=60.0, show_default=True, help="Seconds to search.")
_runnable = click.option("--runnable", is_flag=True, help="Only what the engine runs today.")
_price = click.option("--price", type=_seconds, help="Dollars a device and hour (default: what the cluster file says).")


class _Numbers(click.ParamType):
    """Positive numbers between commas, each once."""

    name = "N,N,..."

    def __init__(self, kind: type[int] | type[float]) -> None:
        self.kind = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple:
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(dict.fromkeys(self.kind(item) for item in value.split(",")))
        except ValueError:
            numbers = ()
        if not numbers or not all(0 < number < float("inf") for number in numbers):
            self.fail(f"{value!r} is not a list of positive {'whole ' if self.kind is int else ''}numbers such as 64,128,256", param, ctx)
        return numbers


@cli.command()
@click.argument("model", required=False)
@click.argument("cluster", required=False)
@click.option("--global-batch", type=_positive, help="Sequences per step over all devices.")
@_seq
@click.option("--pin", default="", metavar="tp=8,zero=1,...", help="Choices to fix: tp, dp, micro_batch, zero, recompute.")
@_precision
@_limit
@_runnable
@click.option("--save", type=click.Path(dir_okay=False), help="Write the plan to a file.")
@click.option("--plan", "saved", type=click.Path(dir_okay=False), help="Explain this saved plan, without MODEL and CLUSTER.")
@click.option("--replay", "replays", is_flag=True, help="Simulate the plan's step and memory too; exit code 1 if that disagrees.")
@_json
@click.pass_context
def explain(ctx: click.Context, model: str | None, cluster: str | None, global_batch: int | None, seq: int | None, pin: str,
            precision: str | None, time_limit: float, runnable: bool, save: str | None, saved: str | None, replays: bool,
            as_json: bool) -> None:
    """Plan MODEL on CLUSTER; print the plan, its predicted cost, the reasons and the alternatives."""
    given = {"MODEL": model, "CLUSTER": cluster, "--global-batch": global_batch, "--seq": seq, "--pin": pin, "--save": save,
             "--replay (autopar replay is for saved plans)": replays}
    if saved is not None:
        if unused := [name for name, value in given.items() if value]:
            raise AutoparError(f"explain --plan {saved} explains a saved plan, which says what it is for: leave out {', '.join(unused)}")
        _explain_saved(saved, as_json)
        return
    if missing := [name for name in ("MODEL", "CLUSTER", "--global-batch") if given[name] is None]:
        raise click.UsageError(f"Missing {', '.join(missing)}")
    pins = parse_pins(pin)
    with progress("planning") as tell:
        planned = _Planner(model, cluster, global_batch, seq, precision, time_limit, runnable, tell)
        plan = planned.plan(pins)
        counts, findings = planned.collectives(plan), planned.lints(plan)
        replayed = planned.replay(plan, pins) if replays else None
    if save:
        try:
            plan.save(save)
        except OSError as error:
            raise AutoparError(f"cannot write plan {save}: {error.strerror or error}") from None
    _show_plan(plan, as_json, findings, counts, planned.cluster, replayed)
    ctx.exit(1 if replayed is not None and replayed.disagreements else 0)


def _explain_saved(path: str, as_json: bool) -> None:
    from autopar.explain.lints import lint
    from autopar.explain.report import named_cluster
    from autopar.ir.plan import Plan

    plan = Plan.load(path)
    if as_json:
        _note_stale(path, plan)
    cluster = named_cluster(plan)
    _show_plan(plan, as_json, lint(plan, cluster) if cluster is not None else [])


def _show_plan(plan: Any, as_json: bool, findings: list, counts: dict | None = None, cluster: Any = None, replayed: Any = None) -> None:
    from autopar.explain.report import plan_data, plan_table

    if as_json:
        more = {"replay": replayed.as_dict()} if replayed is not None else {}
        click.echo(json.dumps(plan_data(plan) | {"lints": [asdict(finding) for finding in findings]} | more, indent=1))
        return
    show(plan_table(plan, counts, cluster, findings))
    if replayed is not None:
        show(replayed.table())


@cli.command()
@click.argument("plan", type=click.Path(dir_okay=False), metavar="PLAN.json")
@click.argument("model")
@click.argument("cluster")
@_seq
@click.option("--pin", default="", metavar="context_method=...", help="What the plan was made under and does not say itself.")
@_precision
@_json
@click.pass_context
def replay(ctx: click.Context, plan: str, model: str, cluster: str, seq: int | None, pin: str, precision: str | None,
           as_json: bool) -> None:
    """Simulate a saved plan of MODEL on CLUSTER, priced anew, beside what it predicts.  Exit code 1 if they disagree."""
    from autopar.ir.plan import Plan

    saved, pins = Plan.load(plan), parse_pins(pin)
    _note_stale(plan, saved)
    with progress("replaying") as tell:
        planned = _Planner(model, cluster, saved.global_batch, seq, precision, 0.0, False, tell)
        replayed = planned.replay(saved, pins)
    if as_json:
        click.echo(json.dumps(replayed.as_dict(), indent=1))
    else:
        show(replayed.table())
    ctx.exit(1 if replayed.disagreements else 0)


@cli.command("why-not")
@click.argument("model")
@click.argument("cluster")
@_batch
@_seq
@click.option("--pin", default="", metavar="tp=8,zero=1,...", help="The choice to ask about.")
@_precision
@_limit
@_runnable
@_json
@click.pass_context
def why_not(ctx: click.Context, model: str, cluster: str, global_batch: int, seq: int | None, pin: str, precision: str | None,
            time_limit: float, runnable: bool, as_json: bool) -> None:
    """What a choice would cost MODEL on CLUSTER, and where; or what forbids it.  Exit code 1 if it is impossible or does not fit."""
    pins = parse_pins(pin)
    with progress("planning") as tell:
        from autopar.explain.why_not import check_asked, why_not, why_not_data, why_not_table

        check_asked(pins)
        planned = _Planner(model, cluster, global_batch, seq, precision, time_limit, runnable, tell)
        answer = why_not(planned.plan, planned.cluster, pins)
    if as_json:
        click.echo(json.dumps(why_not_data(answer), indent=1))
    else:
        show(why_not_table(answer))
    ctx.exit(0 if answer.pinned is not None else 1)


@cli.command()
@click.argument("model")
@click.argument("cluster")
@_batch
@_seq
@click.option("--pin", "pins", multiple=True, metavar="tp=8,...", help="One plan to compare; give it several times.")
@click.option("--plan", "saved", multiple=True, type=click.Path(dir_okay=False), help="A saved plan to compare.")
@_price
@_precision
@_limit
@_runnable
@_json
def compare(model: str, cluster: str, global_batch: int, seq: int | None, pins: tuple[str, ...], saved: tuple[str, ...],
            price: float | None, precision: str | None, time_limit: float, runnable: bool, as_json: bool) -> None:
    """Plans of MODEL on CLUSTER side by side: the best one, the best under each --pin, and saved ones."""
    parsed = [parse_pins(pin) for pin in pins]
    with progress("planning") as tell:
        from autopar.explain.compare import CompareTable, check_compared, compare, compare_data
        from autopar.ir.plan import Plan

        check_compared(parsed, saved)
        plans = [(os.path.basename(path), Plan.load(path)) for path in saved]
        planned = _Planner(model, cluster, global_batch, seq, precision, time_limit, runnable, tell, price)
        entries = compare(planned.plan, planned.cluster, parsed, plans)
    if as_json:
        click.echo(json.dumps(compare_data(entries, planned.cluster), indent=1))
    else:
        show(CompareTable(entries, planned.cluster))


@cli.command()
@click.argument("model")
@click.argument("cluster")
@click.option("--gpus", type=_Numbers(int), default=(), help="Numbers of devices: whole nodes of CLUSTER, or a divisor of one.")
@click.option("--seq", type=_Numbers(int), default=(), help="Tokens per sequence (default: what the model was designed for).")
@click.option("--global-batch", type=_Numbers(int), required=True, help="Sequences per step over all devices.")
@click.option("--inter-bandwidth", type=_Numbers(float), default=(), help="GB/s of line rate between nodes, per GPU and direction.")
@_price
@_precision
@_limit
@_runnable
@_json
def sweep(model: str, cluster: str, gpus: tuple[int, ...], seq: tuple[int, ...], global_batch: tuple[int, ...],
          inter_bandwidth: tuple[float, ...], price: float | None, precision: str | None, time_limit: float, runnable: bool,
          as_json: bool) -> None:
    """Plan MODEL for every combination of the given values; show the Pareto front, and the bandwidths at which the plan changes."""
    with progress("planning") as tell:
        from autopar.explain.sweep import points_of, sweep, sweep_data, sweep_table

        spec = _cluster(cluster, price)
        points = points_of(spec, gpus, seq, global_batch, [1e9 * rate for rate in inter_bandwidth])
        options = precision, time_limit, runnable, tell, price
        planners = {tokens: _Planner(model, cluster, global_batch[0], tokens, *options) for tokens in seq or (None,)}
        found = sweep(lambda at, tokens, batch, pin: planners[tokens].plan(pin, at, batch), spec, points, tell)
    if as_json:
        click.echo(json.dumps(sweep_data(found), indent=1))
    else:
        show(sweep_table(found, model, spec))


@cli.command()
@click.argument("plan_a", type=click.Path(dir_okay=False))
@click.argument("plan_b", type=click.Path(dir_okay=False))
@_json
@click.pass_context
def diff(ctx: click.Context, plan_a: str, plan_b: str, as_json: bool) -> None:
    """What differs between two saved plans.  Exit code 0 if they are equal, 1 if they differ."""
    from autopar.explain.diff import diff_table
    from autopar.ir.plan import Plan

    plans = Plan.load(plan_a), Plan.load(plan_b)
    found = plans[0].diff(plans[1])
    if as_json:
        for path, plan in zip((plan_a, plan_b), plans, strict=True):
            _note_stale(path, plan)
        click.echo(json.dumps([asdict(difference) | {"words": str(difference)} for difference in found], indent=1))
    else:
        show(diff_table((plan_a, plan_b), plans))
    ctx.exit(1 if found else 0)


@cli.command()
@click.argument("model")
@click.option("--nproc", type=click.IntRange(1, 64), default=4, show_default=True, help="CPU processes.")
@click.option("--pin", default="", metavar="tp=2,...", help="Choices to fix; without tp or dp every mesh is verified.")
@click.option("--steps", type=_positive, default=3, show_default=True)
@click.option("--seq", type=_positive, help="Tokens per sequence (default: 12).")
@click.option("--rows", type=_positive, help="Sequences per batch (default: two for each process).")
@click.option("--precision", type=click.Choice(["fp64", "fp32"]), default="fp64", show_default=True)
@_json
@click.pass_context
def verify(ctx: click.Context, model: str, nproc: int, pin: str, steps: int, seq: int | None, rows: int | None, precision: str,
           as_json: bool) -> None:
    """Train a shrunken MODEL on NPROC CPU processes and on one; compare losses and every parameter.  Exit code 1 if not exact."""
    pins = parse_pins(pin)
    with progress("verifying") as tell:
        from autopar.models import parse_model
        from autopar.verify import verify as run

        report = run(parse_model(model), nproc, pins, precision, steps, seq, rows, progress=tell)
    if as_json:
        click.echo(json.dumps(report.as_dict(), indent=1))
    else:
        from autopar.explain.report import verify_table

        show(verify_table(report))
    ctx.exit(0 if report.exact else 1)


@cli.command()
@click.argument("runs", type=click.Path(dir_okay=False), metavar="RUNS.csv")
@click.option("--by", type=click.Choice(["source", "gpu", "dtype"]), help="Print the scores of each source, GPU or dtype too.")
@click.option("--loso", is_flag=True, help="Fit the constants on the file's runs, and without each source in turn (leave one source out).")
@click.option("--ablate", is_flag=True, help="Predict the runs with each mechanism of the cost model switched off in turn.")
@_json
def predict(runs: str, by: str | None, loso: bool, ablate: bool, as_json: bool) -> None:
    """Predict the training runs of a CSV file, which others measured, and score the predictions."""
    if loso and ablate:
        raise AutoparError("--loso and --ablate are two reports: ask for one at a time")
    if loso or ablate:
        (_fit if loso else _ablate)(runs, as_json)
        return
    from autopar.predict.command import predict_file
    from autopar.predict.report import WIDTH, report_json, report_table
    from autopar.predict.run import Run, RunPrediction

    def priced(run: Run) -> RunPrediction:
        from autopar.predict.evaluate import evaluate  # loads torch, once the file has been read

        return evaluate(run)

    with progress("predicting") as tell:
        predictions = predict_file(runs, priced, tell)
    if as_json:
        click.echo(report_json(predictions, by))
    else:
        show(report_table(predictions, by), WIDTH)


def _fit(path: str, as_json: bool) -> None:
    from autopar.predict.fit import fit, sensitivities
    from autopar.predict.report import WIDTH, fit_json, fit_table
    from autopar.predict.runs import read_runs

    runs = [run for run in read_runs(path)[0] if run.complete]
    with progress("predicting") as tell:
        from autopar.predict.evaluate import evaluate

        found = fit(sensitivities(runs, evaluate, tell))
    if as_json:
        click.echo(fit_json(found))
    else:
        show(fit_table(found), WIDTH)


def _ablate(path: str, as_json: bool) -> None:
    from autopar.predict.report import WIDTH, ablation_json, ablation_table
    from autopar.predict.runs import read_runs

    runs = [run for run in read_runs(path)[0] if run.complete and run.measured.step_time_s]
    with progress("predicting") as tell:
        from autopar.predict.ablate import ablate

        found = ablate(runs, tell=tell)
    if as_json:
        click.echo(ablation_json(found))
    else:
        show(ablation_table(found), WIDTH)


@cli.command()
@click.option("--nproc", type=click.IntRange(1, 64), help="Devices to measure at once (default: 4 CPU processes, or all GPUs).")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Default: cuda if there is one, else cpu.")
@click.option("--output", type=click.Path(dir_okay=False), default="cluster.yaml", show_default=True, help="Cluster file to write.")
@_json
def calibrate(nproc: int | None, device: str | None, output: str, as_json: bool) -> None:
    """Measure this machine and write a cluster file: matrix products, memory bandwidth, launches and collectives.

    CPU processes talk over gloo, GPUs over NCCL.  The file is a CLUSTER of the other commands.  Takes a minute on an idle machine; what
    else runs meanwhile is measured too.
    """
    if not output.lower().endswith((".yaml", ".yml")):
        raise AutoparError(f"--output {output}: a cluster file ends in .yaml or .yml; write for example --output cluster.yaml")
    folder = os.path.dirname(os.path.abspath(output))
    if not os.path.isdir(folder) or not os.access(output if os.path.exists(output) else folder, os.W_OK):
        raise AutoparError(f"--output {output}: {folder} is no folder that can be written to; choose another path")
    with progress("calibrating") as tell:
        from autopar.calibrate.cluster import calibrate as measure

        spec = measure(nproc, device, progress=tell)
    try:
        spec.to_yaml(output)
    except OSError as error:
        raise AutoparError(f"cannot write cluster file {output}: {error.strerror or error}") from None
    if as_json:
        click.echo(json.dumps(asdict(spec), indent=1))
    else:
        from autopar.calibrate.report import calibration_table

        show(calibration_table(spec, output))


@cli.command()
@click.pass_context
def demo(ctx: click.Context) -> None:
    """Plan Llama-3-8B for 64 GPUs, then train a small Llama on 4 CPU processes and compare it with one device."""
    with progress("loading torch"):
        from autopar.demo import run
    ctx.exit(0 if run(show, progress) else 1)


class _Planner:
    """Plans one model, traced once, on one cluster."""

    def __init__(self, model: str, cluster: str, global_batch: int, seq: int | None, precision: str | None, time_limit_s: float,
                 runnable: bool, tell: Callable[[str], None], price: float | None = None) -> None:
        self.cluster = _cluster(cluster, price)  # before torch is loaded: a wrong name is answered at once
        from autopar import api
        from autopar.candidates import PlanRequest, choose_precision
        from autopar.models import parse_model

        spec = parse_model(model)
        tell(f"tracing {spec.name}")
        self.request = PlanRequest(self.cluster, global_batch, {}, precision or choose_precision(self.cluster), runnable, spec.name)
        self.traced = api.trace_spec(spec, seq or spec.max_seq or 512, precision)
        self.time_limit_s, self.tell = time_limit_s, tell

    def plan(self, pin: Mapping[str, Any], cluster: Any = None, global_batch: int | None = None) -> Any:
        """A plan under pins, on another cluster or for another batch if they are given."""
        from autopar import api

        at = cluster or self.cluster
        request = replace(self.request, pin=dict(pin), cluster=at, global_batch=global_batch or self.request.global_batch)
        return api.plan_traced(self.traced, request, self.time_limit_s, self.tell)

    def collectives(self, plan: Any) -> dict:
        from autopar.candidates import as_pinned
        from autopar.explain.collectives import block_collectives

        return block_collectives(as_pinned(self.traced, {"recompute": plan.recompute}), plan)

    def replay(self, plan: Any, pin: Mapping[str, Any]) -> Any:
        """The replay of a plan that was made under pins."""
        from autopar import api
        from autopar.candidates import as_pinned
        from autopar.explain.replay import replay

        self.tell("replaying")
        api.check_plan(plan, as_pinned(self.traced, {"recompute": plan.recompute}), self.cluster)
        return replay(plan, self.traced, replace(self.request, pin=dict(pin)))

    def lints(self, plan: Any) -> list:
        from autopar.candidates import as_pinned
        from autopar.explain.lints import lint

        return lint(plan, self.cluster, as_pinned(self.traced, {"recompute": plan.recompute}))


def _cluster(text: str, price: float | None) -> Any:
    """The cluster that a text names, at another price if one is given."""
    from autopar.ir.cluster import ClusterSpec

    spec = ClusterSpec.parse(text)
    return spec if price is None else replace(spec, price_per_device_hour=price)


def _note_stale(path: str, plan: Any) -> None:
    """Say on stderr that a saved plan's predictions are stale, where they are: JSON has no place for it."""
    from autopar.explain.choices import staleness

    if note := staleness(plan):
        click.echo(f"Note: {path} was {note}", err=True)


def parse_pins(text: str) -> dict[str, Any]:
    """`tp=8,zero=1` -> {'tp': 8, 'zero': 1}.  Raises AutoparError for anything that is not key=value."""
    pins: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not key or not value:
            raise AutoparError(f"--pin {text!r}: {item!r} is not key=value; write for example --pin tp=8,zero=1")
        if key in pins:
            raise AutoparError(f"--pin {text!r}: {key} is given twice, as {pins[key]} and {value}")
        pins[key] = int(value) if re.fullmatch(r"[+-]?\d+", value) else {"true": True, "false": False}.get(value.lower(), value)
    return pins


def show(renderable: Any, width: int | None = None) -> None:
    """Print a rich renderable (or text) to stdout; as wide as the report wants (`width`) when stdout is no terminal."""
    from rich.console import Console

    console = Console(file=sys.stdout, highlight=False, soft_wrap=isinstance(renderable, str))
    if not console.is_terminal:
        from autopar.explain.report import WIDTH

        wide = width or int(os.environ.get("COLUMNS") or WIDTH)
        console = Console(file=sys.stdout, width=wide, highlight=False, soft_wrap=isinstance(renderable, str))
    console.print(renderable)


@contextmanager
def progress(what: str) -> Iterator[Callable[[str], None]]:
    """Yields tell(text): what goes on, on stderr, if it goes on for more than two seconds: a spinner on a terminal, else one line."""
    from rich.console import Console

    console, started, lock = Console(stderr=True, highlight=False), threading.Event(), threading.Lock()
    status, current = console.status(f"{what} ..."), [f"{what} ..."]

    def start() -> None:
        with lock:
            if not started.is_set():
                started.set()
                status.start() if console.is_terminal else console.print(current[0])

    def tell(text: str) -> None:
        with lock:
            current[0] = text
            if started.is_set() and console.is_terminal:
                status.update(text)

    timer = threading.Timer(PROGRESS_AFTER_S, start)
    timer.daemon = True
    timer.start()
    try:
        yield tell
    finally:
        timer.cancel()
        with lock:
            started.set()
            status.stop()


def main() -> None:
    """The console script.  Ctrl-C and a closed pipe end it quietly."""
    try:
        code = cli.main(standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (KeyboardInterrupt, click.Abort):
        click.echo("Interrupted", err=True)
        code = 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes stdout once more as it ends
        code = 141
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
