"""A second opinion on a plan: its step played action by action, and what every rank holds meanwhile.

A plan's step time and memory come from closed forms.  Here the same choices are priced again (`plan_costs`), torch.distributed.pipelining
writes the lists of what each rank does, and a discrete-event simulation plays them.  Memory is a walk over a rank's list: a forward keeps
something, a backward needs something for a moment and gives back what its forward kept.

A prediction adds the most that a rank keeps and the most that some backward of it needs.  Of a rank with several stages the walk may see
the two at different times: then it holds less, and the sum of both from the walk is what the prediction is held to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from autopar_cost_models import Action, simulate_pipeline

from autopar.ir.plan import Plan
from autopar.ir.traced import TracedModel
from autopar.recheck.plan_costs import StageCost, plan_costs
from autopar.request.plan_request import PlanRequest
from autopar.runtime.pipeline.schedule_actions import schedule_actions
from autopar.text.tables import grid
from autopar.text.units import gib, ms, percent

if TYPE_CHECKING:
    from rich.console import Group

TIME_TOLERANCE = 0.02
"""By what share the step may differ: how exact the closed forms of schedules claim to be."""
MEMORY_TOLERANCE = 0.01
"""By what share the memory of a rank may differ."""


@dataclass(frozen=True, slots=True)
class Replay:
    """What a plan predicts beside what its replay gives: seconds of a step, peak bytes of each pipeline rank.  `together_bytes` are the
    peaks if what is kept and what is needed for a moment peaked at once.  `idle_share` is that of the pipeline in which even the busiest
    rank of the replay waits."""

    predicted_s: float
    replayed_s: float
    predicted_bytes: tuple[int, ...]
    replayed_bytes: tuple[int, ...]
    together_bytes: tuple[int, ...]
    idle_share: float

    @property
    def time_difference(self) -> float:
        """By what share the replay is longer."""
        return self.replayed_s / self.predicted_s - 1

    @property
    def memory_differences(self) -> tuple[float, ...]:
        """By what share each rank of the replay holds more."""
        return tuple(
            b / a - 1 for a, b in zip(self.predicted_bytes, self.replayed_bytes, strict=True)
        )

    @property
    def disagreements(self) -> tuple[str, ...]:
        """In words, what differs by more than it may."""
        found = []
        if abs(self.time_difference) > TIME_TOLERANCE:
            found.append(
                f"a step takes {_more(self.time_difference)} (tolerance {100 * TIME_TOLERANCE:g} %)"
            )
        for rank, (predicted, least, most) in enumerate(
            zip(self.predicted_bytes, self.replayed_bytes, self.together_bytes, strict=True)
        ):
            if abs(off := min(max(predicted, least), most) / predicted - 1) > MEMORY_TOLERANCE:
                found.append(
                    f"rank {rank} holds {_more(off)} (tolerance {100 * MEMORY_TOLERANCE:g} %)"
                )
        return tuple(found)

    @property
    def ranks(self) -> list[tuple[int, int, float]]:
        """(predicted bytes, bytes of the replay, difference) of each rank."""
        return list(
            zip(self.predicted_bytes, self.replayed_bytes, self.memory_differences, strict=True)
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain data: seconds, bytes, shares."""
        return {
            "agrees": not self.disagreements,
            "disagreements": list(self.disagreements),
            "step_time_s": {
                "predicted": self.predicted_s,
                "replayed": self.replayed_s,
                "difference": self.time_difference,
            },
            "memory_bytes": [
                {"predicted": a, "replayed": b, "difference": off} for a, b, off in self.ranks
            ],
            "idle_share": self.idle_share,
        }

    def table(self) -> Group:
        """A rich renderable."""
        from rich.console import Group
        from rich.text import Text

        rows = [
            ("step time", ms(self.predicted_s), ms(self.replayed_s), _signed(self.time_difference))
        ]
        several = len(self.ranks) > 1
        for rank, (a, b, off) in enumerate(self.ranks):
            rows.append(
                (f"memory of rank {rank}" if several else "memory", gib(a), gib(b), _signed(off))
            )
        table = grid("Replay", ("", "predicted", "replayed", "difference"), rows, right=(1, 2, 3))
        if self.disagreements:
            return Group(
                table,
                Text(f"THE REPLAY DISAGREES: {'; '.join(self.disagreements)}.\n", style="bold red"),
            )
        allowed = f"{100 * TIME_TOLERANCE:g} % of time and {100 * MEMORY_TOLERANCE:g} % of memory"
        idle = (
            f"; the busiest rank waits for {percent(self.idle_share)} of the pipeline"
            if several
            else ""
        )
        words = f"A simulation of the plan, priced anew, agrees within {allowed}{idle}."
        if min(self.memory_differences) < -MEMORY_TOLERANCE:
            words += "  Where it holds less, the prediction counts as one what the stages of a rank need at different times."
        return Group(table, Text(words + "\n"))


def replay(plan: Plan, traced: TracedModel, request: PlanRequest) -> Replay:
    """Play one step of the plan; arguments and errors as of `plan_costs`."""
    costs = plan_costs(plan, traced, request)
    actions = actions_of(plan)
    times = [stage.times for stage in costs.stages]
    # torch runs the whole backward of the first stage where weights are due
    times[0] = replace(times[0], weight_s=times[0].backward_s)
    played = simulate_pipeline(actions, times, costs.hop_s)
    busiest_s = max(played.busy_s(rank) for rank in range(plan.mesh.pp))
    held = [held_bytes(todo, costs.stages) for todo in actions]
    return Replay(
        plan.predicted.step_time_s,
        played.makespan_s + max(costs.step_s) + costs.fixed_s,
        plan.predicted.peak_memory_bytes,
        tuple(static + peak for (peak, _), static in zip(held, costs.static_bytes, strict=True)),
        tuple(
            static + together
            for (_, together), static in zip(held, costs.static_bytes, strict=True)
        ),
        1 - busiest_s / played.makespan_s,
    )


def actions_of(plan: Plan) -> tuple[tuple[Action, ...], ...]:
    """What each pipeline rank does in a step.  Without a pipeline that is 1F1B of one rank: each backward follows its forward."""
    ranks = plan.mesh.pp
    schedule = plan.schedule if ranks > 1 else "1f1b"
    return schedule_actions(schedule, ranks, len(plan.stages) // ranks, plan.num_microbatches)


def held_bytes(todo: Sequence[Action], stages: Sequence[StageCost]) -> tuple[int, int]:
    """Besides what is static: (the most that a rank's list of actions holds at once, the most that it keeps plus the most that stays
    between two parts of backwards plus the most that an action needs for a moment).  Of several stages the latter has what the first part
    of a backward gives back as kept."""
    kept = late = given_back = peak = 0
    several = len({action.stage for action in todo}) > 1
    most = [0, 0, 0]
    for action in todo:
        stage = stages[action.stage]
        kept += stage.kept_bytes if action.kind == "F" else 0
        late += stage.late_bytes if action.kind == "I" else 0
        needed = {"F": 0, "B": stage.moment_bytes}.get(action.kind, stage.split_moment_bytes)
        most = [
            max(pair)
            for pair in zip(most, (kept - given_back * (not several), late, needed), strict=True)
        ]
        peak = max(peak, kept - given_back + late + needed)
        given_back += {"I": stage.given_back_bytes, "W": -stage.given_back_bytes}.get(
            action.kind, 0
        )
        kept -= stage.kept_bytes if action.kind in "BW" else 0
        late -= stage.late_bytes if action.kind == "W" else 0
    return peak, sum(most)


def _signed(share: float) -> str:
    return f"{100 * share:+.2f} %"


def _more(share: float) -> str:
    return f"{abs(100 * share):.2f} % {'more' if share > 0 else 'less'} than predicted"
