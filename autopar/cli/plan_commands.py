"""Commands that plan. JSON and tables go to stdout, progress and errors to stderr. A user's mistake
gives one message and exit code 2.

Nothing here imports torch before a command runs, so that `autopar --help` starts quickly.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from textwrap import indent
from typing import TYPE_CHECKING, Any, NoReturn

import click
from autopar_cost_models.echo import shortened_message
from click.core import ParameterSource

from autopar import __version__
from autopar.cli import job_commands, list_commands, options
from autopar.cli.init import init
from autopar.cli.pictures import Pictures, page_options, picture_options, show_reply
from autopar.cli.run_commands import (
    calibrate_command,
    completion,
    demo,
    predict,
    trace_diff_command,
    verify_command,
)
from autopar.cli.session import Asked, Planner, asked_about, asked_of, priced_cluster
from autopar.cli.terminal import progress, show
from autopar.errors import AutoparError, NoPlanFits, shown
from autopar.request.options import OF_REPORTS, OPTIONS, PARTS
from autopar.request.pins import parse_pins, pins_help

if TYPE_CHECKING:
    from autopar.ir.plan import Plan
    from autopar.planning.outside import Outside
    from autopar.recheck.audit import Audit
    from autopar.recheck.replay import Replay
    from autopar.report.report import Report


class _Mistake(click.ClickException):
    """An AutoparError in the form that click prints as one message, with exit code 2."""

    exit_code = 2


class _Commands(click.Group):
    """A click group that turns an AutoparError of a command into one message, with exit code 2.
    Long values in click's own messages are shortened.
    """

    command_class = options.Command

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with _brief():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with _brief():
                return super().invoke(ctx)
        except NoPlanFits as error:
            raise _Mistake(
                f"{error}; `autopar explain` with the same pins finds what would fit"
            ) from error
        except AutoparError as error:
            raise _Mistake(str(error)) from error


@contextmanager
def _brief() -> Iterator[None]:
    """A context in which the message of any click exception that passes through is shortened."""
    try:
        yield
    except click.ClickException as error:
        error.message = shortened_message(error.message)  # type: ignore[misc]  # click calls it final
        raise


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="autopar")
def cli() -> None:
    """Plan, explain and verify distributed training of PyTorch models.

    MODEL is a named model (llama3-8b; `autopar models` lists them), dimensions (gpt:layers=96,hidden=12288,heads=96,vocab=51200), a
    Hugging Face config (hf:path/to/config.json) or module:function.  CLUSTER is dgx-h100:8 (8 nodes of 8), h100:4 (one node of 4), cpu:4,
    several of these joined by +, or a YAML file.  `autopar devices` and `autopar clusters` list the names.
    """


_FAMILIES = 8
"""About how many families of layouts are planned to be compared."""
PINS_HELP = f"\b\nPins:\n{indent(pins_help(), '  ')}"
"""The list of pins at the end of a command's help. The first character tells click not to rewrap
it.
"""


_request = options.together(
    *map(options.option, reversed(("global_batch", "seq", "pin", "objective", "deadline_s", "tokens_per_s", "price", "tokens", "target")))
)  # fmt: skip
"""The options of a request that `options.search_options` does not add."""


@cli.command("explain", epilog=PINS_HELP)
@click.argument("model", type=options.MODEL, required=False)
@click.argument("cluster", type=options.CLUSTER, required=False)
@_request
@options.search_options
@click.option("--save", type=click.Path(dir_okay=False), help="Write the plan to a file.")
@click.option(
    "--plan",
    "saved",
    type=click.Path(dir_okay=False),
    help="Explain this saved plan, without MODEL and CLUSTER.",
)
@click.option(
    "--replay",
    "replays",
    is_flag=True,
    help="Simulate the plan's step and memory too; exit code 1 if that disagrees.",
)
@click.option(
    "--audit",
    "audits",
    is_flag=True,
    help="Price every block and edge from scratch too; exit code 1 if that disagrees.",
)
@click.option(
    "--fusion",
    "fusions",
    is_flag=True,
    help="List what is fused into ops of our own, and what nearly is.",
)
@click.option("--layers", is_flag=True, help="Also print how each op of a layer runs.")
@click.option("--verbose", is_flag=True, help="Also print the search space and the assumptions.")
@click.option(
    "--space",
    "spaces",
    is_flag=True,
    help="Also price the nearest layout that each rule of the search space leaves out.",
)
@picture_options
@options.as_json
@click.pass_context
def explain_command(
    ctx: click.Context,
    pin: str,
    objective: str,
    deadline_s: float | None,
    tokens_per_s: float | None,
    save: str | None,
    saved: str | None,
    replays: bool,
    audits: bool,
    fusions: bool,
    spaces: bool,
    tokens: float | None,
    as_json: bool,
    **asked: Any,
) -> None:
    """Plan MODEL on CLUSTER; print the plan, its predicted cost, the reasons and the alternatives.

    Objective time is the fastest step.  Objective cost is the lowest cost per token on a part of
    CLUSTER.  Objective gpus is the fewest devices of CLUSTER that meet --deadline or
    --tokens-per-second.  Objective memory is the least memory of the fullest device.
    \u000c
    `pin` is a text such as 'tp=8'. `save` is a path to write the plan to. `saved` is the path of
    a plan to explain instead of making one; MODEL, CLUSTER and most options are then refused.
    `replays` and `audits` also check the plan, with exit code 1 if they disagree. `fusions` lists
    fused ops. `spaces` prices layouts outside of the search space. `deadline_s` is in seconds.
    `tokens`: says what training on that number of tokens takes. `as_json`: prints JSON instead of a
    report. `asked` has the other arguments, as in `Asked`, and those of `Pictures`.
    """
    drawn, detail = Pictures.taken_from(asked), {n: asked.pop(n) for n in ("layers", "verbose")}
    if saved is not None:
        _check_nothing_again(ctx, saved)
        detail |= {"tokens": tokens}
        _show_fusion(
            _explain_saved(saved, asked["price"], as_json, drawn, detail), fusions and not as_json
        )
        return
    required = {"MODEL": "model", "CLUSTER": "cluster", "--global-batch": "global_batch"}
    if missing := [name for name, key in required.items() if asked[key] is None]:
        raise click.UsageError(f"Missing {', '.join(missing)}")
    pins = parse_pins(pin)
    with progress("planning") as tell:
        from autopar.planning.objectives import Goal, choose, most_searches

        goal = Goal(objective, deadline_s, tokens_per_s)
        planned, by_time = Planner(Asked(**asked), tell), objective == "time"
        planned.expect(
            most_searches(goal, planned.cluster) + bool(by_time and planned.target) + spaces
        )
        try:
            plan_on = partial(planned.plan, runners_up=by_time, keeps_tp_inside=by_time)
            chosen = choose(goal, plan_on, planned.cluster, pins, tell)
        except NoPlanFits as error:
            _refuse(error, planned, pins, as_json)
        plan = planned.compared_with_free(chosen.plan, pins) if objective == "time" else chosen.plan
        within = planned.pins_within(pins)
        checks: list[Replay | Audit] = (
            [planned.replay(plan, within, chosen.cluster)] if replays else []
        )
        checks += [planned.audit(plan, within, chosen.cluster)] if audits else []
        outside = planned.outside(pins, chosen.cluster) if spaces else None
        report = planned.report(plan, within, chosen.cluster, drawn.wanted)
    if save:
        plan.save(save)
    detail |= {"tokens": tokens}
    _show_plan(report, as_json, detail, chosen, checks, outside)
    drawn.write(report)
    _show_fusion(plan, fusions and not as_json)
    ctx.exit(1 if any(check.disagreements for check in checks) else 0)


def _refuse(error: NoPlanFits, planned: Planner, pins: dict[str, Any], as_json: bool) -> NoReturn:
    """Raises AutoparError with the changes of the request under the pins `pins` that would make a
    plan fit; with `as_json`, also prints them to stdout. If the least memory is unknown, it has the
    message of `error`.
    """
    from autopar.planning.remedies import remedies_data

    if error.least_bytes is None:
        raise AutoparError(str(error)) from None
    answer = planned.remedies(error, pins)
    if as_json:
        click.echo(json.dumps(remedies_data(answer), indent=1))
    raise AutoparError(str(answer)) from None


_NOT_WITH_A_PLAN = {
    "model": "MODEL",
    "cluster": "CLUSTER",
    "save": "--save",
    "replays": "--replay (autopar replay is for saved plans)",
    "audits": "--audit (autopar audit is for saved plans)",
    "spaces": "--space",
}
"""What may not accompany a saved plan, besides the options of its request."""


def _check_nothing_again(ctx: click.Context, path: str) -> None:
    """Raises AutoparError if the command has options that the saved plan at `path` already decides."""
    rows = [row for row in (OPTIONS | PARTS).values() if row.name not in OF_REPORTS]
    decided = _NOT_WITH_A_PLAN | {row.name: row.flag for row in rows}
    given = [
        said
        for name, said in decided.items()
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
        and ctx.params.get(name) not in (None, "")
    ]
    words = ctx.params.get("model")
    if given[:1] == ["MODEL"] and "CLUSTER" not in given:  # one word, which may be either
        given[0] = f"MODEL or CLUSTER ({shown(words)})"
    if given:
        raise AutoparError(
            f"explain --plan {path} explains a saved plan, which says what it is for: leave out {', '.join(given)}"
        )


def _show_fusion(plan: Plan, asked: bool) -> None:
    """Prints what of a plan's model is fused, if `asked`; otherwise nothing."""
    from autopar.explaining.plan_report import fusion_reply

    if asked:
        show(fusion_reply(plan.fusion))


def _explain_saved(
    path: str,
    price: float | None,
    as_json: bool,
    drawn: Pictures,
    detail: Mapping[str, Any],
) -> Plan:
    """Prints the report on the plan file `path`, in the detail that `plan_reply` takes, draws what
    `drawn` asks for, and returns the plan. `price` is as for `priced_cluster`.
    """
    from autopar.explaining.lints import lint
    from autopar.ir.plan import Plan
    from autopar.report.report import Report
    from autopar.text.plan_words import named_cluster

    plan = Plan.load(path)
    if as_json:
        _note_stale(path, plan)
    cluster = named_cluster(plan)
    if cluster is not None and price is not None:
        cluster = cluster.with_price(price)
    findings = lint(plan, cluster) if cluster is not None else []
    report = Report(plan, cluster, findings=findings)
    _show_plan(report, as_json, detail)
    drawn.write(report)
    if not as_json:
        click.echo(
            "Lints that read the model (heads and widths that a degree does not divide, tied weights, small products), and what other "
            "software would save, come with explain MODEL CLUSTER.",
            err=True,
        )
    return plan


def _show_plan(
    report: Report,
    as_json: bool,
    detail: Mapping[str, Any],
    chosen: Any = None,
    checks: Sequence[Any] = (),
    outside: list[Outside] | None = None,
) -> None:
    """Prints a report, as JSON or as text. `chosen` says what objective its plan was chosen for, if it
    was made now; `checks` are its replay and audit. `outside` is what its search space leaves out;
    with it the space is printed. `detail` has `tokens`, `layers` and `verbose` of `plan_reply`.
    """
    from autopar.explaining.certificate import not_proved_words
    from autopar.explaining.plan_report import plan_reply, space_part
    from autopar.planning.objectives import chosen_reply
    from autopar.planning.outside import outside_reply
    from autopar.text.device_words import risk_words
    from autopar.text.replies import Reply, Styled
    from autopar.text.training_words import training_of

    plan, more = report.plan, {type(check).__name__.lower(): check.reply() for check in checks}
    if outside is not None:
        more["outside"] = outside_reply(outside, plan)
    if as_json:
        added = {"objective": chosen_reply(chosen).data} if chosen else {}
        added |= {name: reply.data for name, reply in more.items()}
        if (tokens := detail.get("tokens")) is not None:
            added["training"] = asdict(training_of(plan, tokens, report.cluster))
        click.echo(json.dumps(report.data | added, indent=1))
        return
    if chosen:
        for words in filter(None, (risk_words(plan, report.cluster), not_proved_words(plan))):
            show(Reply([Styled(words, "yellow")]))
        show(chosen_reply(chosen))
    show(plan_reply(report, **detail, says_first=chosen is None))
    if outside is not None:
        if not detail["verbose"]:  # which has printed it
            show(Reply([space_part(plan)]))
        show(more.pop("outside"))
    for reply in more.values():
        show(reply)


def _saved_plan(command: Any) -> Any:
    """A decorator that gives a click command a saved plan, and passes the click context. MODEL,
    CLUSTER and options that belong to them are for plans whose files do not say them.
    """
    added = options.together(
        options.as_json,
        options.option("precision", help="That of the plan."),
        options.option(
            "pin",
            metavar="context_method=...",
            help="What the plan was made under, if its file is of an earlier version.",
        ),
        options.option("seq"),
        click.argument("cluster", type=options.CLUSTER, required=False),
        click.argument("model", type=options.MODEL, required=False),
        click.argument("plan", type=click.Path(dir_okay=False), metavar="PLAN.json"),
    )
    return click.pass_context(added(command))


@cli.command("replay")
@_saved_plan
def replay_command(ctx: click.Context, **asked: Any) -> None:
    """Simulate a saved plan, priced anew, beside what it predicts.  Exit code 1 if they disagree.

    MODEL and CLUSTER are what the plan says, if they are left out.
    \u000c
    `asked` has the path of the plan, model, cluster, pins and options, as in `_check_saved`.
    """
    _check_saved(ctx, "replay", **asked)


@cli.command("audit")
@_saved_plan
def audit_command(ctx: click.Context, **asked: Any) -> None:
    """Price every block and edge of a saved plan from scratch.  Exit code 1 if they do not sum to
    its objective.

    MODEL and CLUSTER are what the plan says, if they are left out.
    \u000c
    `asked` has the path of the plan, model, cluster, pins and options, as in `_check_saved`.
    """
    _check_saved(ctx, "audit", **asked)


def _check_saved(
    ctx: click.Context, check: str, plan: str, pin: str, as_json: bool, **asked: Any
) -> None:
    from autopar.ir.plan import Plan
    from autopar.request.arguments import check_again

    saved, pins = Plan.load(plan), parse_pins(pin)
    check_again(saved, "pins", pins or None, saved.made_for.pins)
    _note_stale(plan, saved)
    with progress(f"{check}ing") as tell:
        planned = Planner(asked_of(saved, **asked), tell)
        checked = getattr(planned, check)(saved, pins or saved.made_for.pins)
    show_reply(checked.reply(), as_json)
    ctx.exit(1 if checked.disagreements else 0)


@cli.command("why-not", epilog=PINS_HELP)
@click.argument("model", type=options.MODEL)
@click.argument("cluster", type=options.CLUSTER)
@options.option("global_batch", required=True)
@options.option("seq")
@options.option("pin", help="The choice to ask about.")
@click.option(
    "--plan",
    "saved",
    type=click.Path(dir_okay=False),
    help="What was chosen (default: planned now).",
)
@options.search_options
@page_options
@options.as_json
@click.pass_context
def why_not_command(
    ctx: click.Context, pin: str, saved: str | None, as_json: bool, **asked: Any
) -> None:
    """What a choice would cost MODEL on CLUSTER, and where; or what forbids it.  Exit code 1 if
    it is impossible or does not fit.
    \u000c
    `pin` is the choice, such as 'tp=8'. `saved` is the path of the chosen plan (None: planned
    now). `as_json`: prints JSON instead of a report. `asked` has the other arguments, as in
    `Asked`, and those of `Pictures`.
    """
    drawn, pins = Pictures.taken_from(asked), parse_pins(pin)
    with progress("planning") as tell:
        from autopar.explaining.why_not import check_asked, why_not, why_not_reply
        from autopar.ir.plan import Plan

        check_asked(pins)
        plan, request = None, Asked(**asked)
        if saved is not None:
            plan = Plan.load(saved)
            _note_stale(saved, plan)
            request = asked_about(plan, request)
        planned = Planner(request, tell)
        planned.expect(2 if plan is None else 1)
        found = why_not(planned.plan, planned.cluster, pins, plan and planned.check(plan))
    show_reply(why_not_reply(found), as_json, drawn)
    ctx.exit(0 if found.pinned is not None else 1)


@cli.command("compare")
@click.argument("model", type=options.MODEL)
@click.argument("cluster", type=options.CLUSTER)
@options.option("global_batch", required=True)
@options.option("seq")
@click.option(
    "--pin",
    "pins",
    multiple=True,
    metavar="tp=8,...",
    help="One plan to compare; give it several times.",
)
@click.option(
    "--plan",
    "saved",
    multiple=True,
    type=click.Path(dir_okay=False),
    help="A saved plan to compare.",
)
@options.option("price")
@options.search_options
@page_options
@options.as_json
def compare_command(
    pins: tuple[str, ...], saved: tuple[str, ...], as_json: bool, **asked: Any
) -> None:
    """Plans of MODEL on CLUSTER side by side: the best one, the best under each --pin, and saved
    ones.  Without --pin and --plan: the best plan of each family of layouts.
    \u000c
    `pins` has one text of pins for each plan to compare, `saved` the paths of plan files.
    `as_json`: prints JSON instead of tables. `asked` has the other arguments, as in `Asked`, and
    those of `Pictures`.
    """
    drawn, parsed = Pictures.taken_from(asked), [parse_pins(pin) for pin in pins]
    with progress("planning") as tell:
        from autopar.explaining.compare import check_compared, compare, compare_reply
        from autopar.ir.plan import Plan

        check_compared(parsed, saved)
        plans = [(os.path.basename(path), Plan.load(path)) for path in saved]
        planned = Planner(Asked(**asked), tell)
        planned.expect(1 + (len(pins) or _FAMILIES * (not saved)))
        plan_on = partial(planned.plan, runners_up=not pins and not saved)
        entries = compare(plan_on, planned.cluster, parsed, plans, planned.hash_for)
    show_reply(compare_reply(entries, planned.cluster), as_json, drawn)


@cli.command("sweep")
@click.argument("model", type=options.MODEL)
@click.argument("cluster", type=options.CLUSTER)
@click.option(
    "--gpus",
    type=options.NumberList(int),
    default=(),
    help="Numbers of devices: whole nodes of CLUSTER, or a divisor of one.",
)
@options.option("seq", type=options.NumberList(int), default=())
@options.option("global_batch", type=options.NumberList(int), required=True)
@click.option(
    "--inter-bandwidth",
    type=options.NumberList(float),
    default=(),
    help="GB/s of line rate between nodes, per GPU and direction.",
)
@options.option("price")
@options.search_options
@page_options
@options.as_json
def sweep_command(
    gpus: tuple[int, ...],
    seq: tuple[int, ...],
    global_batch: tuple[int, ...],
    inter_bandwidth: tuple[float, ...],
    as_json: bool,
    **asked: Any,
) -> None:
    """Plan MODEL for every combination of the given values; show the Pareto front, and the
    bandwidths at which the plan changes.
    \u000c
    `gpus` are numbers of devices, `seq` tokens per sequence, `global_batch` sequences per step,
    and `inter_bandwidth` GB/s between nodes per device. An empty one means the value of CLUSTER
    or MODEL. `as_json`: prints JSON instead of a table. `asked` has the other arguments, as in
    `Asked`, and those of `Pictures`.
    """
    drawn = Pictures.taken_from(asked)
    with progress("planning") as tell:
        from autopar.explaining.sweep import points_of, sweep, sweep_reply

        spec = priced_cluster(asked["cluster"], asked["price"]).kept_free(asked["headroom"])
        points = points_of(spec, gpus, seq, global_batch, [1e9 * rate for rate in inter_bandwidth])
        planned = Planner(Asked(global_batch=global_batch[0], **asked), tell)
        planned.expect(len(points) * (1 + bool(inter_bandwidth)))
        found = sweep(
            lambda at, tokens, batch, pin: planned.plan(pin, at, batch, tokens), spec, points, tell
        )
    show_reply(sweep_reply(found, asked["model"], spec), as_json, drawn)


@cli.command()
@click.argument("model", type=options.MODEL)
@click.argument("cluster", type=options.CLUSTER)
@options.option("global_batch", required=True)
@options.option("seq")
@options.option("pin", help="Choices to fix, in every plan.")
@click.option(
    "--off",
    type=options.PERCENT,
    default=20.0,
    show_default=True,
    help="Percent by which predictions are off.",
)
@click.option(
    "--together",
    is_flag=True,
    help="Rates also all at once, in every combination of lower and higher.",
)
@click.option(
    "--near",
    type=options.POSITIVE_REAL,
    help="Also find the most robust plan of those at most this many percent slower.",
)
@options.search_options
@options.as_json
def robust(
    pin: str, off: float, together: bool, near: float | None, as_json: bool, **asked: Any
) -> None:
    """How much slower than the best the plan of MODEL on CLUSTER is if rates, bandwidths and
    memory are not as predicted.
    \u000c
    `off` and `near` are percents. `together` adds all combinations of lower and higher rates.
    `near` also finds the most robust of the plans at most that much slower (None: does not).
    `pin` is a text of choices for every plan. `as_json`: prints JSON instead of tables. `asked`
    has the other arguments, as in `Asked`.
    """
    pins = parse_pins(pin)
    with progress("planning") as tell:
        from autopar.explaining.robust import robust_reply, robustness, scenarios_of

        planned = Planner(Asked(**asked), tell)
        scenarios = scenarios_of(planned.cluster, off / 100, together)
        planned.expect(1 + 2 * len(scenarios))
        found = robustness(
            planned.plan,
            planned.cluster,
            pins,
            scenarios,
            off=off / 100,
            near=near and near / 100,
            tell=tell,
        )
    show_reply(robust_reply(found), as_json)


@cli.command("diff")
@click.argument("plan_a", type=click.Path(dir_okay=False))
@click.argument("plan_b", type=click.Path(dir_okay=False))
@options.as_json
@click.pass_context
def diff_command(ctx: click.Context, plan_a: str, plan_b: str, as_json: bool) -> None:
    """What differs between two saved plans.  Exit code 0 if they are equal, 1 if they differ.
    \u000c
    `plan_a` and `plan_b` are paths of plan files. `as_json`: prints JSON instead of tables, and
    notes on stderr for plans of another version of the cost model.
    """
    from autopar.explaining.diff import diff_reply
    from autopar.ir.plan import Plan

    plans = Plan.load(plan_a), Plan.load(plan_b)
    if as_json:
        for path, plan in zip((plan_a, plan_b), plans, strict=True):
            _note_stale(path, plan)
    reply = diff_reply((plan_a, plan_b), plans)
    show_reply(reply, as_json)
    ctx.exit(1 if reply.data else 0)


def _note_stale(path: str, plan: Any) -> None:
    """Prints a note on stderr if the predictions of the saved plan come from another version of the
    cost model. JSON output has no place for it.
    """
    from autopar.text.plan_words import staleness

    if note := staleness(plan):
        click.echo(f"Note: {path} was {note}", err=True)


_LISTS = (
    list_commands.models,
    list_commands.devices_command,
    list_commands.clusters,
    list_commands.cluster,
)
_OTHERS = (verify_command, predict, calibrate_command, demo, init, trace_diff_command, completion)
for command in (*job_commands.COMMANDS, *_OTHERS, *_LISTS):
    cli.add_command(command)
