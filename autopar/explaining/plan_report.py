"""The report on a plan: its choices, predicted cost, proof, and the cost of alternatives.

Seconds become milliseconds and bytes become GiB only here. `plan_data` is the JSON of the plan, so
the output of `--json` is a plan file.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from textwrap import indent
from typing import TYPE_CHECKING, Any

from autopar.explaining.assumptions import assumption_rows, assumptions
from autopar.explaining.certificate import (
    SPACE_COLUMNS,
    certificate_rows,
    not_proved_words,
    space_rows,
)
from autopar.explaining.gains import HOME, Gain, Home, gain_words, home_words
from autopar.explaining.run_lines import run_lines, run_words
from autopar.explaining.runners_up import RUNNER_UP_COLUMNS, runner_up_rows
from autopar.ir.cluster import Cluster
from autopar.ir.fusion import Fusion
from autopar.ir.plan import Plan
from autopar.ir.plan_fields import BlockPlan, Prediction
from autopar.request.software import software_line
from autopar.text.device_words import (
    assumed_words,
    fullest_rank,
    groups_by_rank,
    kinds,
    misfit_advice,
    misfit_chance,
    risk_words,
)
from autopar.text.layout_words import collectives, describe, interesting, layouts
from autopar.text.measured import evidence
from autopar.text.numbers import Numbers, plain
from autopar.text.plan_words import (
    DETAIL_WORDS,
    MEMORY_WORDS,
    OFFLOAD_WORDS,
    TIME_WORDS,
    dollars_per_million_tokens,
    named_cluster,
    placement_words,
    recompute_words,
    staleness,
)
from autopar.text.tables import Grid, grid
from autopar.text.training_words import total_words, training_of, training_words
from autopar.text.units import WIDTH, gib, ms, percent

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.text import Text

    from autopar.explaining.lints import LintFinding

_LIKELY = 5e-4
"""Chance not to fit from which it is printed."""
DETAIL_SHARE = 1e-3
"""Share of the stages from which a part of them is shown."""
LAYOUT_LEGEND = (
    "R: replicated.  S(d): sharded along dim d.  P: partial sums.  R/P: replicated, gradients partial.\n"
    "Column-parallel shards what a layer computes, row-parallel what it sums over.\n"
)
"""The words of the tables of blocks."""
LAYERS_HINT = "How each op of a layer runs: --layers.\n"
SPACE_HINT = "The search space, and the rates behind all this with their sources: --verbose.\n"
BlockCounts = Mapping[str, Mapping[str, Mapping[str, int]]]


def plan_data(plan: Plan) -> dict[str, Any]:
    """The plan as plain data for JSON, as in a plan file;
    `Plan.from_json(json.dumps(plan_data(plan)))` gives an equal plan.
    """
    return json.loads(plan.to_json())


def facts_data(
    plan: Plan,
    cluster: Cluster | None,
    findings: Sequence[LintFinding] = (),
    gains: Sequence[Gain] = (),
    home: Home | None = None,
) -> dict[str, Any]:
    """The data of a report's text: those of the plan, `lints`, and in `report` what other software
    would save and what predictions rest on. A page adds to `report`.
    """
    found: dict[str, Any] = {"gains": [asdict(gain) for gain in gains]}
    if home is not None:
        found["home"] = asdict(home) | {"software": HOME}
    if cluster is not None:
        found["assumptions"] = [asdict(assumption) for assumption in assumptions(cluster)]
    doubt = not_proved_words(plan)
    first = {"not_proved": doubt} if doubt else {}
    if risk := risk_words(plan, cluster):
        first["risk"] = risk
    more = {"lints": [asdict(lint) for lint in findings], "report": found}
    return first | plan_data(plan) | more


def plan_text(plan: Plan, counts: BlockCounts | None = None, **more: Any) -> str:
    """The report on a plan as plain text: choices, predicted time and memory, certificate,
    runners-up, and the layouts of blocks. `counts` and `more` as in `plan_table`.
    """
    from rich.console import Console

    out = io.StringIO()
    Console(file=out, width=WIDTH, color_system=None, force_terminal=False).print(
        plan_table(plan, counts, **more)
    )
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def plan_table(
    plan: Plan,
    counts: BlockCounts | None = None,
    cluster: Cluster | None = None,
    findings: Sequence[LintFinding] = (),
    tokens: float | None = None,
    layers: bool = True,
    verbose: bool = True,
    gains: Sequence[Gain] = (),
    home: Home | None = None,
    command: str = "",
    says_first: bool = True,
) -> Group:
    """The report on a plan as a rich renderable. Its first lines say if the plan may not fit
    (`risk_words`), and if it is not proved, unless `says_first` is False.

    `counts` are the collectives of each block (`collective_counts.block_collectives`); without them
    none are shown. `cluster` is the plan's cluster (None: what its name parses to). `findings` are
    the warnings of `lints.lint` to show. With `tokens`, the report says what training on them
    takes. `layers`: with the tables of blocks, of which the last explains the words. `verbose`:
    with the search space and the assumptions. `gains` are what other software would save, and
    `home` is that of another framework as a whole. `command` makes the plan again.
    """
    from rich.console import Group
    from rich.text import Text

    at = cluster or named_cluster(plan)
    n = Numbers(facts_data(plan, at, findings, gains, home))
    first = (risk_words(plan, at), not_proved_words(plan)) if says_first else ()
    parts: list[Any] = [Text(words, style="yellow") for words in first if words]
    parts.append(Text(f"{plan.model_name} on {plan.cluster_name}: {plan.mesh}", style="bold"))
    parts += [Text(f"This plan was {note}.", style="yellow")] if (note := staleness(plan)) else []
    parts.append(_summary(plan, cluster, tokens))
    parts += [Text(f"{plain(words)}\n")] if (words := home_words(n)) else []
    parts += [_ranks(plan, at)] if plan.devices else []
    parts += [_time(plan), _memory(plan), *_proved(plan, at, n)]
    if plan.mesh.active and plan.mesh.active != ("dp",):
        shown = plan.blocks if layers else ()
        parts += [_block(plan, block, (counts or {}).get(block.name)) for block in shown]
        parts.append(Text(LAYOUT_LEGEND if layers else LAYERS_HINT))
    else:
        where = ", on that device's sequences of the batch" if plan.mesh.dp > 1 else ""
        parts.append(Text(f"Every op runs whole on its device{where}.\n"))
    parts += _listed("Lints", [f"{finding.lint}: {finding}" for finding in findings])
    parts += _listed("Notes", plan.notes)
    saved = [plain(gain_words(n, place)) + "." for place in range(len(gains))]
    parts += _listed("Other software, each alone with all choices as they are", saved)
    parts += _rests_on(plan, n) if verbose else [Text(SPACE_HINT)]
    parts.append(Text(run_words(plan, command), style="yellow" * bool(plan.runnable)))
    if command:
        parts.append(Text(f"\n{indent(run_lines(plan, command), '  ')}", no_wrap=True, overflow="ignore"))  # fmt: skip
    return Group(*parts)


def _listed(title: str, lines: Sequence[str]) -> Iterator[Grid]:
    """A title and lines below it, of which each begins with a dash; nothing without lines."""
    if lines:
        yield grid(title, ("", ""), [("-", line) for line in lines])


def _proved(plan: Plan, cluster: Cluster | None, n: Numbers) -> Iterator[Grid]:
    """Tables of what is proved, and of the runners-up, if any are known."""
    rows = [(name, plain(words)) for name, words in certificate_rows(plan, cluster, n)]
    yield grid("Certificate", ("", ""), rows)
    if others := [tuple(map(plain, row)) for row in runner_up_rows(plan, n)]:
        yield grid("Runners-up", RUNNER_UP_COLUMNS, others, right=(2, 3, 4, 5))


def _rests_on(plan: Plan, n: Numbers) -> Iterator[Any]:
    """The search space, and the assumptions by source."""
    yield space_table(plan)
    by_source: dict[str, list[str]] = {}
    for what, value, source in assumption_rows(n):
        by_source.setdefault(plain(source), []).append(f"{plain(what)} {plain(value)}")
    lines = [f"{'; '.join(found)}. Source: {source}" for source, found in by_source.items()]
    yield from _listed("Assumptions", lines)


def space_table(plan: Plan) -> Grid | Text:
    """The rules of the search space; its words alone for a plan of an earlier version."""
    from rich.text import Text

    if rows := space_rows(plan):
        return grid("Search space", SPACE_COLUMNS, rows)
    return Text(f"Search space: {plan.certificate.space}.\n")


def _share_words(cluster: Cluster | None, predicted: Prediction) -> str:
    if cluster is None or len(cluster.groups) > 1 or cluster.host is None:
        return ""
    return f" of {gib(cluster.host.memory_bytes)} ({percent(predicted.host_bytes / cluster.host.memory_bytes)})"


def summary_rows(plan: Plan, cluster: Cluster | None = None) -> list[tuple[str, str]]:
    """Rows (name, value as text) of the choices and predictions that identify a plan. `cluster`
    adds placement, memory capacity and cost. None stands for the cluster that the plan's cluster
    name parses to, if any.
    """
    cluster = cluster or named_cluster(plan)
    return [*choice_rows(plan, cluster), *_prediction_rows(plan, cluster)]


def choice_rows(plan: Plan, cluster: Cluster | None) -> Iterator[tuple[str, str]]:
    """The rows of choices alone."""
    mesh, stages = plan.mesh, len(plan.stages)
    yield "mesh", f"{mesh} ({mesh.num_devices} devices)" if mesh.num_devices > 1 else "1 device"
    if cluster and not mesh.deal and cluster.topology.nodes > 1:
        yield "placement", placement_words(mesh, cluster.topology)
    if plan.devices:
        yield "devices", f"of the ranks of the pipeline: {kinds(plan.devices)}"
    yield (
        "micro-batches",
        f"{plan.num_microbatches} of {plan.micro_batch} sequence(s) on each of {mesh.dp} data-parallel rank(s); "
        f"global batch {plan.global_batch}",
    )
    if mesh.pp > 1:
        each = f"{stages // mesh.pp} on each of {mesh.pp} ranks"
        yield "pipeline", f"{plan.schedule}, {stages} stages, {each}"
    groups = f"groups of {plan.shard} of {mesh.dp * mesh.cp} data-parallel ranks"
    yield "ZeRO stage", f"{plan.zero}" + (f", shared out by {groups}" if plan.shard else "")
    yield "recompute", recompute_words(plan)
    if plan.offload != "none":
        held = f"{gib(plan.predicted.host_bytes)} of host memory per device"
        what = OFFLOAD_WORDS.get(plan.offload, plan.offload)
        yield "offload", f"{what}: {held}{_share_words(cluster, plan.predicted)}"
    yield "precision", plan.precision
    if plan.made_for.cluster:  # files of earlier versions do not say it
        yield "software", software_line(plan.made_for.software)
    if cluster and (assumed := assumed_words(cluster)):
        yield "efficiencies", assumed


def _prediction_rows(plan: Plan, cluster: Cluster | None) -> Iterator[tuple[str, str]]:
    predicted = plan.predicted
    yield "predicted step time", ms(predicted.step_time_s)
    if cluster and len(cluster.groups) == 1 and (known := evidence(plan, cluster.device.name)):
        yield "such predictions", str(known)
    yield f"{plan.made_for.rows} per second", f"{predicted.tokens_per_s:,.0f}"
    yield (
        "model FLOPs utilization",
        f"{percent(predicted.mfu)} (attention counts half where it is causal)",
    )
    if cluster:
        peak, capacity = fullest_rank(plan, cluster)
        share = f" of {gib(capacity)} ({percent(peak / capacity)})"
        yield "memory per device", gib(peak) + share
        chance = misfit_chance(plan, cluster)
        if chance is not None and chance >= _LIKELY:
            advice = misfit_advice(plan, chance)
            yield "chance that it does not fit", percent(chance) + f"; {advice}" * bool(advice)
    else:
        yield "memory per device", gib(max(predicted.peak_memory_bytes, default=0))
    dollars = dollars_per_million_tokens(plan, cluster)
    if dollars is not None:
        yield f"cost of a million {plan.made_for.rows}", f"${dollars:.4g}"


def _summary(plan: Plan, cluster: Cluster | None, tokens: float | None) -> Grid:
    rows = summary_rows(plan, cluster)
    if tokens is not None:
        at = training_of(plan, tokens, cluster or named_cluster(plan))
        rows.append((total_words(plan, tokens), training_words(plan, at)))
    return grid("Plan", ("", ""), rows)


def _ranks(plan: Plan, cluster: Cluster | None) -> Grid:
    """A table of the pipeline ranks with their devices, segments and memory, for a cluster with
    several kinds of devices.
    """
    each, rows = plan.mesh.num_devices // plan.mesh.pp, []
    groups = groups_by_rank(plan, cluster) if cluster else [None] * plan.mesh.pp
    for rank, (name, stage, held, group) in enumerate(
        zip(plan.devices, plan.stages, plan.predicted.peak_memory_bytes, groups, strict=True)
    ):
        segments = stage[0] if len(stage) == 1 else f"{len(stage)}: {stage[0]} ... {stage[-1]}"
        room = f" of {gib(group.device.memory_bytes)}" if group else ""
        rows.append((str(rank), f"{each} {name}", segments, gib(held) + room))
    return grid(
        "Ranks of the pipeline", ("rank", "devices", "segments", "memory"), rows, right=(0,)
    )


def _time(plan: Plan) -> Grid:
    total = plan.predicted.step_time_s or 1.0
    rows = []
    for name, seconds in plan.predicted.breakdown.items():
        if seconds:
            rows.append((TIME_WORDS.get(name, name), ms(seconds), percent(seconds / total)))
        details = _details(plan, seconds) if name in ("stages", "forward") else ()
        rows += [(f"  {words}", ms(part_s), percent(part_s / total)) for words, part_s in details]
    return grid(
        "Where the step's time goes",
        ("part", "time", "share"),
        [*rows, ("step", ms(total), percent(1.0))],
        right=(1, 2),
    )


def _details(plan: Plan, stages_s: float) -> Iterator[tuple[str, float]]:
    """What the stages of a pipeline do, as (words, seconds of a step). Without a pipeline only the
    communication that the parts of the step hide: that of experts and of sharded parameters.
    """
    found = plan.predicted.details
    pipelined = "stages" in plan.predicted.breakdown
    for name, words in DETAIL_WORDS.items():
        if name in found and (pipelined or name in ("experts", "parameters")):
            yield words if pipelined else f"{words}, in forward and backward", found[name]
    rest_s = stages_s - sum(found.values())
    if pipelined and found and rest_s > DETAIL_SHARE * stages_s:
        yield "layout changes (tensor parallelism)", rest_s


def _memory(plan: Plan) -> Grid:
    peak = max(plan.predicted.peak_memory_bytes, default=0) or 1
    rows = [
        (MEMORY_WORDS.get(name, name), gib(size), percent(size / peak))
        for name, size in plan.predicted.memory.items()
    ]
    return grid(
        "Memory of the fullest device",
        ("part", "size", "share"),
        [*rows, ("peak", gib(peak), percent(1.0))],
        right=(1, 2),
    )


def _block(plan: Plan, block: BlockPlan, counts: Mapping[str, Mapping[str, int]] | None) -> Grid:
    number = len(block.segments)
    title = f"Block {block.segments[0]}" + (
        f" ({number} alike: {block.segments[0]} ... {block.segments[-1]})" if number > 1 else ""
    )
    if block.recompute != "none":
        title += f", recompute {block.recompute}"
    axes = [axis for axis in plan.mesh.active if axis != "dp"]
    shown = axes[-1]
    rows = [
        (op, *(describe(op, block.ops[op][axis]) for axis in axes), layouts(block.ops[op][shown]))
        for op in interesting(block)
    ]
    names = [f"over {axis}={plan.mesh.size(axis)}" for axis in axes]
    where = f" over {shown}" if len(axes) > 1 else ""
    table = grid(title, ("op", *names, f"layouts{where} (inputs -> output)"), rows)
    if counts is not None:
        lines = [
            f"collectives {way}: {collectives(dict(counts[way]))}"
            for way in ("forward", "backward")
        ]
        table.caption = "\n".join(lines) + "\n"
    return table


_SHOWN = 4
"""The number of replaced ops whose names are shown."""


def fusion_table(fusion: Fusion) -> Group:
    """A rich renderable: a table of the subgraphs that are fused into one op, then one of those
    that nearly are, with the reason. One sentence if fusion is off.
    If the planner chose what to fuse, a table of what it compared comes last.
    """
    from rich.console import Group
    from rich.text import Text

    chosen = [_weighed_table(fusion)] if fusion.weighed else []
    if fusion.mode == "off":
        words = "Nothing is fused, since fuse=off.  --pin fuse=norms or fuse=all fuses."
        if chosen:
            words = "Nothing is fused, since the plan without fusion is the fastest."
        return Group(Text(words), *chosen)
    rows = [
        (op.block, op.name, op.op, _names(op.replaced), _attributes(op.attributes))
        for op in fusion.fused
    ]
    columns = ("block", "name", "op", "in the place of", "with")
    parts = [grid(f"Fused, fuse={fusion.mode}", columns, rows)]
    if fusion.missed:
        left = [(miss.block, miss.name, miss.op, miss.reason) for miss in fusion.missed]
        parts.append(grid("Nearly", ("block", "at", "op", "why not"), left))
    return Group(*parts, *chosen)


def _weighed_table(fusion: Fusion) -> RenderableType:
    """A table of the modes that the planner compared."""
    rows = [
        (entry.mode, ms(entry.step_s), ms(entry.host_s), "yes" if entry.mode == fusion.mode else "")
        for entry in fusion.weighed
    ]
    columns = ("fuse", "a step takes", "of which devices wait for the host", "chosen")
    return grid("Compared", columns, rows)


def _names(replaced: tuple[str, ...]) -> str:
    more = len(replaced) - _SHOWN
    return ", ".join(replaced[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _attributes(attributes: dict) -> str:
    return ", ".join(f"{name}={value}" for name, value in attributes.items())
