"""Makes the timeline of a plan's step: the replay of `recheck/`, with what each action consists of.

Every action, message and byte is that of `replay`. Updates of all ranks begin when the last action
of the pipeline ends, as the plan's step time has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

from autopar_cost_models import Action, Simulation, StageTimes, simulate_pipeline

from autopar.errors import AutoparError
from autopar.ir.plan import Plan
from autopar.ir.traced import TracedModel
from autopar.planning.model_facts import as_planned
from autopar.recheck.plan_costs import (
    PlanCosts,
    StageCost,
    actions_of,
    block_numbers,
    plan_costs,
    segments_by_rank,
    stage_segments,
)
from autopar.recheck.replay import held_states
from autopar.report.action_parts import SegmentParts
from autopar.report.timeline import ActionPart, HeldMemory, Memory, Message, Slice, Timeline
from autopar.request.plan_request import PlanRequest
from autopar.text.device_words import groups_by_rank

_CLOSE = 1e-6
"""Relative difference that rounding may leave between an action and the sum of its parts."""


def simulated_step(plan: Plan, traced: TracedModel, request: PlanRequest) -> Timeline:
    """The timeline of one step of a plan, priced anew and simulated.

    Args:
        plan: the plan.
        traced: the traced model.
        request: what the plan was made for, as in `plan_costs`.

    Returns:
        a `Timeline`. Its `step_s` is the replayed step time, and its actions are those of `replay`.

    Raises:
        AutoparError: the plan does not fit the model under this request.
    """
    costs = plan_costs(plan, traced, request)
    actions = actions_of(plan)
    times = [stage.times for stage in costs.stages]
    played = simulate_pipeline(actions, times, costs.hop_s)
    waits_s = max(costs.issued_s - played.makespan_s, 0.0)
    parts, updates = _parts(plan, traced, request, actions)
    _check_parts(parts, times)
    update_s = max(costs.step_s)
    limits = [group.device.memory_bytes for group in groups_by_rank(plan, request.cluster)]
    return Timeline(
        schedule=plan.schedule,
        micro_batches=plan.num_microbatches,
        lines=tuple(_line(played, costs, rank, update_s, waits_s) for rank in range(plan.mesh.pp)),
        parts=parts,
        updates=updates,
        messages=tuple(sorted(_messages(played, costs.hop_s), key=lambda sent: sent.start_s)),
        memory=tuple(
            Memory(
                costs.static[rank],
                tuple(holdings(played, rank, costs.stages)),
                limits[rank],
                plan.predicted.peak_memory_bytes[rank],
            )
            for rank in range(plan.mesh.pp)
        ),
        pipeline_s=played.makespan_s,
        step_s=played.makespan_s + update_s + costs.fixed_s + waits_s,
        predicted_s=plan.predicted.step_time_s,
    )


def _parts(
    plan: Plan,
    traced: TracedModel,
    request: PlanRequest,
    actions: Sequence[Sequence[Action]],
) -> tuple[dict[tuple[str, int], tuple[ActionPart, ...]], tuple[tuple[ActionPart, ...], ...]]:
    """What each action consists of, by (kind, stage), and what the update of each rank does."""
    traced = as_planned(traced, plan)
    of_stage, numbers = stage_segments(plan, traced), block_numbers(plan, traced)
    ranks, priced = plan.mesh.pp, segments_by_rank(plan, traced, request)
    segments = [
        [
            SegmentParts(
                plan,
                traced.segments[n].name,
                plan.blocks[numbers[n]],
                priced[stage % ranks][1][n],
            )
            for n in of_stage[stage]
        ]
        for stage in range(len(of_stage))
    ]
    kinds = {(action.kind, action.stage) for action in chain(*actions)}
    parts = {(kind, stage): tuple(_action(kind, stage, segments[stage])) for kind, stage in kinds}
    updates = tuple(
        _merged(part for of in chain(*segments[rank::ranks]) for part in of.update())
        for rank in range(ranks)
    )
    return parts, updates


def _action(kind: str, stage: int, segments: Sequence[SegmentParts]) -> Iterator[ActionPart]:
    """The parts of an action of a stage. The first stage has its whole backward in 'W'."""
    if kind == "F":
        yield from chain(*(segment.forward() for segment in segments))
    elif kind == "B" or (kind == "W" and stage == 0):
        yield from chain(*(segment.backward() for segment in reversed(segments)))
    elif kind == "W" or stage > 0:
        yield from chain(*(segment.backward(kind == "W") for segment in reversed(segments)))


def _merged(parts: Iterator[ActionPart]) -> tuple[ActionPart, ...]:
    """Parts of several segments' updates by name: reductions, then the optimizer, then gathers."""
    total: dict[str, ActionPart] = {}
    for part in parts:
        before = total[part.name].seconds if part.name in total else 0.0
        total[part.name] = replace(part, seconds=before + part.seconds)
    order = {"optimizer": 1}
    return tuple(
        sorted(
            total.values(), key=lambda part: 2 if "gather" in part.name else order.get(part.name, 0)
        )
    )


def _check_parts(
    parts: dict[tuple[str, int], tuple[ActionPart, ...]], times: Sequence[StageTimes]
) -> None:
    """Raise AutoparError unless the parts of each action add up to its seconds."""
    for (kind, stage), found in parts.items():
        of = times[stage]
        whole_s = {"F": of.forward_s, "B": of.backward_s, "I": of.input_s, "W": of.weight_s}[kind]
        parts_s = sum(part.seconds for part in found)
        if abs(parts_s - whole_s) > _CLOSE * max(whole_s, of.total_s * _CLOSE):
            raise AutoparError(
                f"the parts of {kind} of stage {stage} take {parts_s} s, the action {whole_s} s: a bug in autopar"
            )


def _line(
    played: Simulation, costs: PlanCosts, rank: int, update_s: float, waits_s: float
) -> tuple[Slice, ...]:
    """The intervals of a rank: its actions, its update, what no choice changes, and all the time in
    which it waits for the host, which it does between kernels.
    """
    spans = (
        Slice(
            span.action.kind,
            span.action.stage,
            span.action.micro_batch,
            span.start_s,
            span.end_s - span.start_s,
        )
        for span in played.timelines[rank]
        if span.end_s > span.start_s
    )
    end_s = played.makespan_s
    update = Slice("update", -1, -1, end_s, costs.step_s[rank])
    fixed = Slice("fixed", -1, -1, end_s + update_s, costs.fixed_s)
    host = Slice("host", -1, -1, end_s + update_s + costs.fixed_s, waits_s)
    return (*spans, *(piece for piece in (update, fixed, host) if piece.seconds > 0))


def _messages(played: Simulation, hop_s: float) -> Iterator[Message]:
    """The messages between stages on different ranks."""
    home = {span.action.stage: rank for rank, line in enumerate(played.timelines) for span in line}
    for rank, line in enumerate(played.timelines):
        for span in line:
            kind, stage = span.action.kind, span.action.stage
            to = stage + 1 if kind == "F" else stage - 1
            if kind != "W" and home.get(to, rank) != rank:
                sent = "F" if kind == "F" else "I"
                yield Message(
                    kind=sent,
                    stage=stage,
                    micro_batch=span.action.micro_batch,
                    sender=rank,
                    receiver=home[to],
                    start_s=span.end_s,
                    seconds=hop_s,
                )


def holdings(played: Simulation, rank: int, stages: Sequence[StageCost]) -> Iterator[HeldMemory]:
    """What a rank holds besides static bytes, at the start and at the end of each action. A forward
    counts what it keeps from its start on.
    """
    yield HeldMemory(0.0, 0, 0)
    spans = played.timelines[rank]
    states = held_states((span.action for span in spans), stages)
    for span, (running, after) in zip(spans, states, strict=True):
        yield HeldMemory(span.start_s, running.resting, running.needed)
        yield HeldMemory(span.end_s, after.resting, 0)
