"""The audit of a plan: every block and edge priced from scratch, without code of the solver.

The audit compares what the plan states with what its choices cost now. It goes from small parts to
large ones, so that a finding names the exact place:

- ops: the layouts of each op are those of its strategy. Both ends of every edge agree, or the
  conversion is priced.
- ties: one tensor has one layout.
- blocks: seconds and bytes of each block equal those of the certificate's ledger.
- edges: the same for each layout change between blocks.
- step: all blocks and edges, with the schedule's formula in a pipeline, equal the certificate's
  objective.
- memory: the bytes of each rank.

Seconds may differ by `_TOLERANCE`, which is far above the rounding of sums. Bytes may not differ.
The planner's own costs are in floating point; the rounding of CP-SAT is not part of the objective.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import fsum, isclose
from typing import Any

from autopar_cost_models import pipeline_time

from autopar.ir.annotated import AnnotatedModel
from autopar.ir.plan import Plan
from autopar.ir.plan_fields import BlockPlan
from autopar.ir.traced import TracedModel
from autopar.planning.model_facts import as_planned
from autopar.recheck.plan_costs import (
    PricedModel,
    PricedSegment,
    actions_of,
    block_numbers,
    fullest_moment,
    issued_s,
    longest_message_s,
    message_bytes,
    owned_by,
    passing_bytes,
    segments_by_rank,
    stage_segments,
    stage_times,
)
from autopar.request.plan_request import PlanRequest
from autopar.text.replies import Reply, Styled
from autopar.text.tables import Table
from autopar.text.units import gib, ms

_TOLERANCE = 1e-9
"""Relative tolerance of seconds. Sums of up to 1e6 terms in another order differ by less than
1e-10.
"""

_SECONDS = ("forward_s", "backward_s", "step_s")
_BYTES = ("static_bytes", "kept_bytes", "moment_bytes")
_WORDS = {"forward_s": "forward", "backward_s": "backward", "step_s": "work once a step", "static_bytes": "static memory",
          "kept_bytes": "memory kept for backward", "moment_bytes": "memory of the fullest moment of backward"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Disagreement:
    """A record of one disagreement between a plan and its audit: where it is, and what is wrong."""

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


@dataclass(frozen=True, slots=True)
class Audit:
    """The result of an audit, as data: what the plan states (`objective_s`, `predicted_bytes`) and
    what its choices cost now (`audited_s`, `audited_bytes`; bytes by pipeline rank).

    `segments`, `ops`, `edges` (of values inside blocks and between them) and `conversions` count
    what was checked. `parts_s` sums to `audited_s`. `findings` is empty if the audit passes.
    """

    objective_s: float
    audited_s: float
    parts_s: Mapping[str, float]
    predicted_bytes: tuple[int, ...]
    audited_bytes: tuple[int, ...]
    segments: int
    ops: int
    edges: int
    conversions: int
    findings: tuple[Disagreement, ...]

    @property
    def disagreements(self) -> tuple[str, ...]:
        """The findings as texts, in order; () if the audit passes."""
        return tuple(map(str, self.findings))

    def as_dict(self) -> dict[str, Any]:
        """The audit as plain data for JSON: 'passes', 'findings', seconds, bytes by rank, and the
        counts of what was checked.
        """
        return {
            "passes": not self.findings,
            "findings": [{"where": f.where, "what": f.what} for f in self.findings],
            "objective_s": self.objective_s,
            "audited_s": self.audited_s,
            "parts_s": dict(self.parts_s),
            "memory_bytes": [
                {"predicted": a, "audited": b}
                for a, b in zip(self.predicted_bytes, self.audited_bytes, strict=True)
            ],
            "looked_at": {
                name: getattr(self, name) for name in ("segments", "ops", "edges", "conversions")
            },
        }

    def reply(self) -> Reply:
        """A table of seconds and bytes, then a verdict, with the findings if it fails."""
        rows = [(part, ms(seconds)) for part, seconds in self.parts_s.items()]
        rows += [("sum", ms(self.audited_s)), ("objective", ms(self.objective_s))]
        several = len(self.audited_bytes) > 1
        for rank, (a, b) in enumerate(zip(self.predicted_bytes, self.audited_bytes, strict=True)):
            said = "as the plan says" if a == b else f"the plan says {gib(a)}"
            rows.append((f"memory of rank {rank}" if several else "memory", f"{gib(b)}, {said}"))
        looked = f"{self.segments} blocks of {self.ops} ops, {self.edges} edges, {self.conversions} of them converted"
        last = (
            f"Priced from scratch: {looked}. Every edge agrees; the parts sum to the objective.\n"
        )
        if self.findings:
            lines = "\n".join(f"  - {finding}" for finding in self.findings)
            last = f"THE AUDIT FAILS ({looked}):\n{lines}\n"
        verdict = Styled(last, "bold red" if self.findings else "")
        return Reply([Table(("", ""), rows, title="Audit"), verdict], self.as_dict())


def audit(plan: Plan, traced: TracedModel, request: PlanRequest) -> Audit:
    """The audit of a plan: its statements on time and memory compared with the costs of its
    choices, which are annotated again. What disagrees is in its `findings`; nothing is raised for
    that.

    `request` says what the plan was made for, as in `plan_costs`. Raises AutoparError if the plan
    is for another model. It is also raised if the plan is too damaged to be priced: a strategy that
    does not exist, or layouts without a conversion.
    """
    traced = as_planned(traced, plan)
    of_stage = stage_segments(plan, traced)
    on = segments_by_rank(plan, traced, request)
    base, segments = on[0]
    numbers = block_numbers(plan, traced)
    parts_s = _seconds(plan, on, of_stage)
    held = tuple(_rank_bytes(plan, *on[rank], of_stage, rank) for rank in range(plan.mesh.pp))
    audited_s = fsum(parts_s.values())
    inner = sum(len(op.inputs) for s in segments for op in s.block.ops)
    between = sum(source >= 0 for sources in base.reads for source, _ in sources)
    findings = [*_op_findings(plan, segments, numbers), *_tie_findings(base, segments)]
    for group in sorted(set(plan.mesh.groups)):
        findings += _ledger_findings(plan, *on[plan.mesh.groups.index(group)], numbers, group)
    return Audit(
        objective_s=plan.certificate.objective_s,
        audited_s=audited_s,
        parts_s=parts_s,
        predicted_bytes=plan.predicted.peak_memory_bytes,
        audited_bytes=held,
        segments=len(segments),
        ops=sum(len(s.block.ops) for s in segments),
        edges=inner + between,
        conversions=sum(len(s.paid) - len(s.chosen) for s in segments),
        findings=(*findings, *_total_findings(plan, audited_s, held)),
    )


# ------------------------------------------------------------------------------------------------------- what is priced


def _seconds(plan: Plan, on: Sequence[PricedModel], of_stage: Sequence[range]) -> dict[str, float]:
    """By name of a part, seconds of a step; they add up to the step. With a pipeline the parts are
    those of the busiest rank, its bubble, work once a step, and fixed time.

    `on` has all segments at the prices of each pipeline rank, `of_stage` the segments of each
    stage.
    """
    ranks, micro, (base, segments) = plan.mesh.pp, plan.num_microbatches, on[0]
    once_s = max(
        fsum(s.step_s for s in owned_by(*on[rank], chain(*of_stage[rank::ranks])))
        for rank in range(ranks)
    )
    host_s = issued_s(plan, on, of_stage)
    if ranks == 1:
        blocks_s, edges_s = (
            micro * fsum(c.forward_s + c.backward_s for c in chain(*costs))
            for costs in ((s.inside for s in segments), (s.arriving for s in segments))
        )
        return {
            "blocks": blocks_s,
            "edges between blocks": edges_s,
            **_waiting(host_s - blocks_s - edges_s),
            "once a step": once_s,
            "fixed": base.fixed_s,
        }
    times = [
        stage_times([on[number % ranks][1][n] for n in stage])
        for number, stage in enumerate(of_stage)
    ]
    # nobody waits for the gradient of the first stage's input
    times[0] = replace(times[0], weight_s=times[0].backward_s)
    sent = [message_bytes(base, segments, stage[0]) for stage in of_stage[1:]]
    hop_s = longest_message_s([model for model, _ in on], sent)
    took_s = pipeline_time(plan.schedule, times, ranks, micro, hop_s).time_s
    busy_s = micro * max(sum(t.total_s for t in times[rank::ranks]) for rank in range(ranks))
    return {
        "blocks and edges of the busiest rank": busy_s,
        "bubble": took_s - busy_s,
        **_waiting(host_s - took_s),
        "once a step": once_s,
        "fixed": base.fixed_s,
    }


def _waiting(seconds: float) -> dict[str, float]:
    """The part of a step in which devices wait for the host; {} without."""
    return {"waiting for the host": seconds} if seconds > 0 else {}


def _rank_bytes(
    plan: Plan,
    base: AnnotatedModel,
    segments: Sequence[PricedSegment],
    of_stage: Sequence[range],
    rank: int,
) -> int:
    """Peak bytes on a device of a pipeline rank. `base` and `segments` are the whole model at the
    prices of its devices; `of_stage` has the numbers of the segments of each stage.

    This is the sum of static bytes, messages in transit, the most that is kept, and the peak of a
    backward. Under zero bubble, the most that additionally waits between the two parts of backwards
    is added. What the model's last segment has freed by then is subtracted.
    """
    stages, parted = of_stage[rank :: plan.mesh.pp], plan.splits_backward and plan.mesh.pp > 1
    sent = [_sent_bytes(base, segments, stage) for stage in of_stage]
    static = (
        base.fixed_bytes
        + passing_bytes(base, sent, rank)
        + sum(s.static_bytes for s in owned_by(base, segments, chain(*stages)))
    )
    kept = [
        sum(segments[n].kept_bytes for n in stage) + size
        for stage, size in zip(stages, sent[rank :: plan.mesh.pp], strict=True)
    ]
    late = [
        sum(max(segments[n].late_bytes, 0) for n in stage) * (parted and stage[0] > 0)
        for stage in stages
    ]
    moments, gone = [], []
    for stage in stages:
        ends = [segments[n] for n in stage if segments[n].class_index == base.last]
        split = parted and stage[0] > 0
        given_back = sum(max(-s.late_bytes, 0) if split else s.kept_bytes for s in ends)
        moments.append(fullest_moment([segments[n] for n in stage], base.last, given_back, split))
        gone.append(given_back * (split and len(stages) == 1))
    most = _most_kept(plan, kept, rank, gone)
    # it keeps nothing while others have their backward
    if len(stages) > 1 and stages[-1] is of_stage[-1] and not parted:
        return static + max(
            most + moments[-1], _most_kept(plan, [*kept[:-1], 0], rank, gone) + max(moments[:-1])
        )
    return static + most + _most_in_backward(plan, late, moments, rank)


def _sent_bytes(
    base: AnnotatedModel, segments: Sequence[PricedSegment], stage: Sequence[int]
) -> int:
    """Bytes of what a stage (the numbers of its segments) has sent to later ones, if that stays
    until the stage's backward. Otherwise 0, as for the last stage.
    """
    end = stage[-1] + 1
    keeps = base.pipeline is not None and base.pipeline.keeps_outputs and end < len(segments)
    return message_bytes(base, segments, end) if keeps else 0


def _most_in_backward(plan: Plan, late: Sequence[int], moments: Sequence[int], rank: int) -> int:
    """The most bytes that any of a rank's actions needs for backward: transient bytes of the
    action, plus what waits then for gradients of parameters. By stage of the rank, `moments` and
    `late` have these.
    """
    now = most = 0
    for action in actions_of(plan)[rank]:
        stage = action.stage // plan.mesh.pp
        now += {"I": late[stage], "W": -late[stage]}.get(action.kind, 0)
        most = max(most, now + moments[stage] * (action.kind in "BI"))
    return most


def _most_kept(plan: Plan, sizes: Sequence[int], rank: int, gone: Sequence[int]) -> int:
    """The most bytes that a rank keeps while it runs its actions. By stage of the rank, `sizes` has
    the kept bytes, and `gone` what the first of two parts of its backward frees.
    """
    now = most = 0
    for action in actions_of(plan)[rank]:
        size, less = (of[action.stage // plan.mesh.pp] for of in (sizes, gone))
        now += size if action.kind == "F" else 0
        most = max(most, now)
        now -= {"B": size, "I": less, "W": size - less}.get(action.kind, 0)
    return most


# ------------------------------------------------------------------------------------------------------- what is found


def _op_findings(
    plan: Plan, segments: Sequence[PricedSegment], numbers: Sequence[int]
) -> Iterator[Disagreement]:
    """Yields findings on ops whose layouts over tp are not those of their strategy, and on ops that
    the plan or the model lacks. Each block of the plan is checked once.

    `numbers` has the plan's block of each segment. `segments_of` checks the other axes.
    """
    for number, segment in dict(zip(numbers, segments, strict=True)).items():
        block = plan.blocks[number]
        for name, strategy in segment.chosen.items():
            choice = block.ops.get(name, {}).get("tp")
            if choice is not None and (choice.inputs, choice.outputs) != (
                strategy.inputs,
                strategy.outputs,
            ):
                yield Disagreement(
                    f"{name} of {block.name}",
                    f"the plan has it read {_listed(choice.inputs)} and make {_listed(choice.outputs)} over tp; its strategy "
                    f"{strategy.name} reads {_listed(strategy.inputs)} and makes {_listed(strategy.outputs)}",
                )
        if odd := sorted(set(block.ops) - set(segment.chosen)):
            yield Disagreement(
                block.name, f"the plan has ops that this model lacks: {', '.join(odd)}"
            )
        if left := sorted(set(segment.chosen) - set(block.ops)):
            yield Disagreement(block.name, f"the plan lacks ops of this model: {', '.join(left)}")


def _tie_findings(
    base: AnnotatedModel, segments: Sequence[PricedSegment]
) -> Iterator[Disagreement]:
    for group in base.ties:
        placed = {
            f"{base.classes[index].name}.{name}": str(segment.chosen[name].outputs[0].value)
            for index, name in group
            for segment in segments
            if segment.class_index == index
        }
        if len(set(placed.values())) > 1:
            yield Disagreement(
                " and ".join(placed), f"one tensor is stored in several ways: {placed}"
            )


def _ledger_findings(
    plan: Plan,
    base: AnnotatedModel,
    segments: Sequence[PricedSegment],
    numbers: Sequence[int],
    group: int,
) -> Iterator[Disagreement]:
    """Yields findings on blocks and edges whose seconds or bytes, on the devices of `group`, differ
    from those in the certificate's ledger. `base` and `segments` are at the prices of these
    devices. `numbers` has the plan's block of each segment.
    """
    ledger = [entry for entry in plan.certificate.ledger if entry.get("group", 0) == group]
    said = [entry for entry in ledger if entry["part"] == "block"]
    if len(said) != len(plan.blocks):
        yield Disagreement(
            "certificate",
            f"its ledger has {len(said)} blocks, the plan {len(plan.blocks)}: plan again",
        )
        return
    for number, segment in dict(zip(numbers, segments, strict=True)).items():
        block, cost = plan.blocks[number], _block_cost(base, segment)
        for part in (*_SECONDS, *_BYTES):
            if not _agree(part, said[number][part], cost[part]):
                words = f"{_WORDS[part]} is {_unit(part, cost[part])}, the certificate has {_unit(part, said[number][part])}"
                device = (
                    f" on {plan.devices[plan.mesh.groups.index(group)]}" if plan.devices else ""
                )
                yield Disagreement(_named(block) + device, words)
    yield from _edge_findings(plan, base, segments, numbers, ledger)


def _block_cost(base: AnnotatedModel, segment: PricedSegment) -> dict[str, float]:
    own, inside = segment.chosen.values(), segment.inside
    return {
        "forward_s": fsum(c.forward_s for c in inside),
        "backward_s": fsum(c.backward_s for c in inside),
        "step_s": fsum(s.step_s for s in own),
        "static_bytes": sum(s.static_bytes for s in own),
        "kept_bytes": segment.kept_bytes,
        "moment_bytes": segment.moment_bytes + base.fixed_bytes,
    }


def _edge_findings(
    plan: Plan,
    base: AnnotatedModel,
    segments: Sequence[PricedSegment],
    numbers: Sequence[int],
    ledger: Sequence[Mapping[str, Any]],
) -> Iterator[Disagreement]:
    """Yields findings on edges between blocks whose layout change takes other seconds than `ledger`
    says. Edges of the same blocks, output and input are checked once. Other arguments are those of
    `_ledger_findings`.
    """
    said = {
        (*e["from"], *e["to"]): (e["forward_s"], e["backward_s"])
        for e in ledger
        if e["part"] == "edge"
    }
    seen: dict[tuple[int, ...], tuple[float, float]] = {}
    for reader, (segment, sources) in enumerate(zip(segments, base.reads, strict=True)):
        arriving = iter(segment.arriving)
        for place, (source, output) in enumerate(sources):
            if source < 0:
                continue
            made = segments[source].chosen[segments[source].block.outputs[output]].inputs[0]
            if made != segment.chosen[segment.block.inputs[place]].outputs[0]:
                conversion = next(arriving)
                seen[numbers[source], output, numbers[reader], place] = (
                    conversion.forward_s,
                    conversion.backward_s,
                )
    for edge in sorted({*said, *seen}):
        a, b = said.get(edge, (0.0, 0.0)), seen.get(edge, (0.0, 0.0))
        if not all(_agree("forward_s", x, y) for x, y in zip(a, b, strict=True)):
            where = f"edge from output {edge[1]} of {_named(plan.blocks[edge[0]])} to input {edge[3]} of {_named(plan.blocks[edge[2]])}"
            yield Disagreement(
                where, f"to convert takes {ms(sum(b))}, the certificate has {ms(sum(a))}"
            )


def _total_findings(plan: Plan, audited_s: float, held: Sequence[int]) -> Iterator[Disagreement]:
    objective_s, predicted = plan.certificate.objective_s, plan.predicted
    if not isclose(audited_s, objective_s, rel_tol=_TOLERANCE):
        off = audited_s / objective_s - 1
        yield Disagreement(
            "step",
            f"all parts sum to {ms(audited_s)}, the objective is {ms(objective_s)} ({100 * off:+.3g} %)",
        )
    for name, seconds in (
        ("predicted step time", predicted.step_time_s),
        ("predicted breakdown", fsum(predicted.breakdown.values())),
    ):
        if not isclose(seconds, objective_s, rel_tol=_TOLERANCE):
            yield Disagreement(name, f"is {ms(seconds)}, the objective {ms(objective_s)}")
    if plan.certificate.bound_s > objective_s * (1 + _TOLERANCE):
        yield Disagreement(
            "certificate",
            f"its bound of {ms(plan.certificate.bound_s)} is above the objective of {ms(objective_s)}",
        )
    for rank, (said, found) in enumerate(zip(predicted.peak_memory_bytes, held, strict=True)):
        if said != found:
            stages = plan.stages[rank :: plan.mesh.pp]
            where = f"rank {rank} ({', '.join(f'{stage[0]} to {stage[-1]}' for stage in stages)})"
            yield Disagreement(
                where,
                f"holds {found} bytes, the plan says {said} ({(found - said) / 2**20:+,.3f} MiB)",
            )


def _agree(part: str, said: float, found: float) -> bool:
    return said == found if part.endswith("_bytes") else isclose(said, found, rel_tol=_TOLERANCE)


def _unit(part: str, amount: float) -> str:
    return f"{amount:,} bytes" if part.endswith("_bytes") else ms(amount)


def _named(block: BlockPlan) -> str:
    first, last = block.segments[0], block.segments[-1]
    return (
        first if first == last else f"{block.name} ({first} to {last}, recompute {block.recompute})"
    )


def _listed(layouts: Sequence[object]) -> str:
    return ", ".join(map(str, layouts)) or "nothing"
