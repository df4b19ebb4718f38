"""The report on a plan: its choices, predicted cost, proof, and the cost of alternatives.

Seconds become milliseconds and bytes become GiB only here. `plan_data` is the JSON of the plan, so
the output of `--json` is a plan file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
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
from autopar.text.replies import Reply, Styled
from autopar.text.tables import Table
from autopar.text.training_words import total_words, training_of, training_words
from autopar.text.units import gib, ms, percent

if TYPE_CHECKING:
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


@dataclass(frozen=True)
class PlanFacts:
    """What a report on a plan is made from.

    Attributes:
        plan: the plan.
        cluster: its cluster, or None if that is not known.
        findings: the lints to show.
        counts: the collectives of each block (`collective_counts.block_collectives`), or None.
        command: the command line that makes such a plan, or ''.
        gains: what other software would save.
        home: what the software of another framework would save, as a whole.
    """

    plan: Plan
    cluster: Cluster | None = None
    findings: Sequence[LintFinding] = ()
    counts: BlockCounts | None = None
    command: str = ""
    gains: Sequence[Gain] = ()
    home: Home | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """The data of a report's text: those of the plan, `lints`, and in `report` what other software
        would save and what predictions rest on. A page adds to `report`.
        """
        found: dict[str, Any] = {"gains": [asdict(gain) for gain in self.gains]}
        if self.home is not None:
            found["home"] = asdict(self.home) | {"software": HOME}
        if self.cluster is not None:
            found["assumptions"] = [asdict(of) for of in assumptions(self.cluster)]
        warnings = {"not_proved": not_proved_words(self.plan)}
        warnings["risk"] = risk_words(self.plan, self.cluster)
        more = {"lints": [asdict(lint) for lint in self.findings], "report": found}
        return {key: said for key, said in warnings.items() if said} | plan_data(self.plan) | more


def plan_text(plan: Plan, **more: Any) -> str:
    """The report on a plan as plain text. `more` are other fields of `PlanFacts`."""
    return str(plan_reply(PlanFacts(plan, **more)))


def plan_reply(
    facts: PlanFacts,
    tokens: float | None = None,
    layers: bool = True,
    verbose: bool = True,
    says_first: bool = True,
) -> Reply:
    """The report on a plan: choices, predicted time and memory, certificate, runners-up, and the
    layouts of blocks. Its first lines say if the plan may not fit (`risk_words`), and if it is not
    proved, unless `says_first` is False.

    With `tokens`, the report says what training on them takes. `layers`: with the tables of blocks,
    of which the last explains the words. `verbose`: with the search space and the assumptions.
    """
    plan, command, at = facts.plan, facts.command, facts.cluster or named_cluster(facts.plan)
    data = replace(facts, cluster=at).facts
    n, first = Numbers(data), (risk_words(plan, at), not_proved_words(plan)) if says_first else ()
    parts: list[str | Styled | Table] = [Styled(words, "yellow") for words in first]
    parts.append(Styled(f"{plan.model_name} on {plan.cluster_name}: {plan.mesh}", "bold"))
    parts += [Styled(f"This plan was {note}.", "yellow")] if (note := staleness(plan)) else []
    parts.append(_summary(plan, at, tokens))
    parts += [f"{plain(words)}\n"] if (words := home_words(n)) else []
    parts += [_ranks(plan, at)] if plan.devices else []
    parts += [_time(plan), _memory(plan), *_proved(plan, at, n)]
    if plan.mesh.active and plan.mesh.active != ("dp",):
        shown = plan.blocks if layers else ()
        parts += [_block(plan, block, (facts.counts or {}).get(block.name)) for block in shown]
        parts.append(LAYOUT_LEGEND if layers else LAYERS_HINT)
    else:
        where = ", on that device's sequences of the batch" if plan.mesh.dp > 1 else ""
        parts.append(f"Every op runs whole on its device{where}.\n")
    parts += _listed("Lints", [f"{finding.lint}: {finding}" for finding in facts.findings])
    parts += _listed("Notes", plan.notes)
    saved = [plain(gain_words(n, place)) + "." for place in range(len(facts.gains))]
    parts += _listed("Other software, each alone with all choices as they are", saved)
    parts += _rests_on(plan, n) if verbose else [SPACE_HINT]
    parts.append(Styled(run_words(plan, command), "yellow" * bool(plan.lacks)))
    if command:
        parts.append(Styled(f"\n{indent(run_lines(plan, command), '  ')}", "", wraps=False))
    return Reply(parts, data)


def _listed(title: str, lines: Sequence[str]) -> Iterator[Table]:
    """A title and lines below it, of which each begins with a dash; nothing without lines."""
    if lines:
        yield Table(("", ""), [("-", line) for line in lines], title=title)


def _proved(plan: Plan, cluster: Cluster | None, n: Numbers) -> Iterator[Table]:
    """Tables of what is proved, and of the runners-up, if any are known."""
    yield Table(("", ""), certificate_rows(plan, cluster, n), title="Certificate")
    if others := runner_up_rows(plan, n):
        yield Table(RUNNER_UP_COLUMNS, others, (2, 3, 4, 5), title="Runners-up")


def _rests_on(plan: Plan, n: Numbers) -> Iterator[str | Table]:
    """The search space, and the assumptions by source."""
    yield space_part(plan)
    by_source: dict[str, list[str]] = {}
    for what, value, source in assumption_rows(n):
        by_source.setdefault(plain(source), []).append(f"{plain(what)} {plain(value)}")
    lines = [f"{'; '.join(found)}. Source: {source}" for source, found in by_source.items()]
    yield from _listed("Assumptions", lines)


def space_part(plan: Plan) -> str | Table:
    """The rules of the search space; its words alone for a plan of an earlier version."""
    if rows := space_rows(plan):
        return Table(SPACE_COLUMNS, rows, title="Search space")
    return f"Search space: {plan.certificate.space}.\n"


def _share_words(cluster: Cluster | None, predicted: Prediction) -> str:
    if cluster is None or len(cluster.groups) > 1 or cluster.host is None:
        return ""
    return f" of {gib(cluster.host.memory_bytes)} ({percent(predicted.host_bytes / cluster.host.memory_bytes)})"


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


def _summary(plan: Plan, cluster: Cluster | None, tokens: float | None) -> Table:
    rows = [*choice_rows(plan, cluster), *_prediction_rows(plan, cluster)]
    if tokens is not None:
        training = training_of(plan, tokens, cluster)
        rows.append((total_words(plan, tokens), training_words(plan, training)))
    return Table(("", ""), rows, title="Plan")


def _ranks(plan: Plan, cluster: Cluster | None) -> Table:
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
    columns = ("rank", "devices", "segments", "memory")
    return Table(columns, rows, (0,), title="Ranks of the pipeline")


def _time(plan: Plan) -> Table:
    total = plan.predicted.step_time_s or 1.0
    rows = []
    for name, seconds in plan.predicted.breakdown.items():
        if seconds:
            rows.append((TIME_WORDS.get(name, name), ms(seconds), percent(seconds / total)))
        details = _details(plan, seconds) if name in ("stages", "forward") else ()
        rows += [(f"  {words}", ms(part_s), percent(part_s / total)) for words, part_s in details]
    rows.append(("step", ms(total), percent(1.0)))
    return Table(("part", "time", "share"), rows, (1, 2), title="Where the step's time goes")


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


def _memory(plan: Plan) -> Table:
    peak = max(plan.predicted.peak_memory_bytes, default=0) or 1
    rows = [
        (MEMORY_WORDS.get(name, name), gib(size), percent(size / peak))
        for name, size in plan.predicted.memory.items()
    ]
    rows.append(("peak", gib(peak), percent(1.0)))
    return Table(("part", "size", "share"), rows, (1, 2), title="Memory of the fullest device")


def _block(plan: Plan, block: BlockPlan, counts: Mapping[str, Mapping[str, int]] | None) -> Table:
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
    columns = ("op", *names, f"layouts{where} (inputs -> output)")
    ways = () if counts is None else ("forward", "backward")
    lines = [f"collectives {way}: {collectives(dict((counts or {})[way]))}\n" for way in ways]
    return Table(columns, rows, title=title, caption="".join(lines))


_SHOWN = 4
"""The number of replaced ops whose names are shown."""


def fusion_reply(fusion: Fusion) -> Reply:
    """The subgraphs that are fused into one op, then those that nearly are, with the reason. One sentence
    if fusion is off. If the planner chose what to fuse, a table of what it compared comes last.
    """
    parts: list[str | Table] = []
    if fusion.mode == "off" and fusion.weighed:
        parts.append("Nothing is fused, since the plan without fusion is the fastest.")
    elif fusion.mode == "off":
        parts.append("Nothing is fused, since fuse=off.  --pin fuse=norms or fuse=all fuses.")
    else:
        rows = [
            (op.block, op.name, op.op, _names(op.replaced), _attributes(op.attributes))
            for op in fusion.fused
        ]
        columns = ("block", "name", "op", "in the place of", "with")
        parts.append(Table(columns, rows, title=f"Fused, fuse={fusion.mode}"))
        if fusion.missed:
            left = [(miss.block, miss.name, miss.op, miss.reason) for miss in fusion.missed]
            parts.append(Table(("block", "at", "op", "why not"), left, title="Nearly"))
    if fusion.weighed:
        weighed = [
            (of.mode, ms(of.step_s), ms(of.host_s), "yes" * (of.mode == fusion.mode))
            for of in fusion.weighed
        ]
        heads = ("fuse", "a step takes", "of which devices wait for the host", "chosen")
        parts.append(Table(heads, weighed, title="Compared"))
    return Reply(parts)


def _names(replaced: tuple[str, ...]) -> str:
    more = len(replaced) - _SHOWN
    return ", ".join(replaced[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _attributes(attributes: dict) -> str:
    return ", ".join(f"{name}={value}" for name, value in attributes.items())
