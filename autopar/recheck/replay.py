"""The replay of a plan: a simulation of its step, action by action, including the memory of every
rank.

A plan's step time and memory come from closed forms. Here the same choices are priced again
(`plan_costs`), torch.distributed.pipelining writes each rank's list of actions, and a
discrete-event simulation runs them. Memory follows a rank's list: a forward keeps bytes, a backward
needs transient bytes and frees what its forward kept.

A prediction adds the most that a rank keeps and the most that any of its backwards needs. On a rank
with several stages the two may peak at different times, so the rank then holds less. The prediction
may lie between that and the sum of both peaks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import add
from typing import Any

from autopar_cost_models import Action, simulate_pipeline

from autopar.ir.plan import Plan
from autopar.ir.traced import TracedModel
from autopar.recheck.plan_costs import StageCost, actions_of, plan_costs
from autopar.request.plan_request import PlanRequest
from autopar.text.replies import Reply, Styled
from autopar.text.tables import Table
from autopar.text.units import gib, ms, percent

TIME_TOLERANCE = 0.02
"""Relative tolerance of the step time: the accuracy of the closed forms of schedules."""
MEMORY_TOLERANCE = 0.01
"""Relative tolerance of the memory of a rank."""


@dataclass(frozen=True, slots=True)
class Replay:
    """The result of a replay, as data: predicted and simulated seconds of a step, and predicted and
    simulated peak bytes on a device of each pipeline rank.

    `together_bytes` are the peaks if kept and transient bytes peaked at the same time. `idle_share`
    is the fraction of the simulated pipeline, without work once a step, in which the busiest rank
    is idle.
    """

    predicted_s: float
    replayed_s: float
    predicted_bytes: tuple[int, ...]
    replayed_bytes: tuple[int, ...]
    together_bytes: tuple[int, ...]
    idle_share: float

    @property
    def time_difference(self) -> float:
        """replayed / predicted step time - 1: positive if the replay takes longer."""
        return self.replayed_s / self.predicted_s - 1

    @property
    def memory_differences(self) -> tuple[float, ...]:
        """For each pipeline rank, replayed / predicted bytes - 1: positive if the replay holds
        more.
        """
        return tuple(
            b / a - 1 for a, b in zip(self.predicted_bytes, self.replayed_bytes, strict=True)
        )

    @property
    def memory_errors(self) -> tuple[float, ...]:
        """For each pipeline rank, how far the prediction is from what was replayed, as a fraction:
        0 between the replayed peak and `together_bytes`, positive if the replay holds more.
        """
        ranks = zip(self.predicted_bytes, self.replayed_bytes, self.together_bytes, strict=True)
        return tuple(min(max(a, least), most) / a - 1 for a, least, most in ranks)

    @property
    def disagreements(self) -> tuple[str, ...]:
        """One text for each difference beyond the tolerances: of the step time, and of each rank's
        memory. () if all agree.

        Memory agrees if the prediction lies between the replayed peak and `together_bytes`, within
        tolerance.
        """
        found = []
        if abs(self.time_difference) > TIME_TOLERANCE:
            found.append(
                f"a step takes {_more(self.time_difference)} (tolerance {100 * TIME_TOLERANCE:g} %)"
            )
        for rank, off in enumerate(self.memory_errors):
            if abs(off) > MEMORY_TOLERANCE:
                found.append(
                    f"rank {rank} holds {_more(off)} (tolerance {100 * MEMORY_TOLERANCE:g} %)"
                )
        return tuple(found)

    @property
    def ranks(self) -> list[tuple[int, int, int, float]]:
        """(predicted bytes, replayed bytes, `together_bytes`, memory error) for each pipeline
        rank.
        """
        sizes = self.predicted_bytes, self.replayed_bytes, self.together_bytes
        return list(zip(*sizes, self.memory_errors, strict=True))

    def as_dict(self) -> dict[str, Any]:
        """The replay as plain data for JSON: whether it agrees, disagreements, and predicted and
        replayed seconds and bytes, with their differences as fractions.
        """
        return {
            "agrees": not self.disagreements,
            "disagreements": list(self.disagreements),
            "step_time_s": {
                "predicted": self.predicted_s,
                "replayed": self.replayed_s,
                "difference": self.time_difference,
            },
            "memory_bytes": [
                {
                    "predicted": a,
                    "replayed": b,
                    "together": c,
                    "difference": b / a - 1,
                    "error": off,
                }
                for a, b, c, off in self.ranks
            ],
            "idle_share": self.idle_share,
        }

    def reply(self) -> Reply:
        """Predictions beside replayed values, then a verdict."""
        rows = [
            ("step time", ms(self.predicted_s), ms(self.replayed_s), _signed(self.time_difference))
        ]
        several = len(self.ranks) > 1
        for rank, (a, b, c, off) in enumerate(self.ranks):
            name = f"memory of rank {rank}" if several else "memory"
            held = gib(b) if c <= (1 + MEMORY_TOLERANCE) * b else f"{gib(b)} to {gib(c)}"
            rows.append((name, gib(a), held, _signed(off)))
        columns = ("", "predicted", "replayed", "difference")
        table = Table(columns, rows, (1, 2, 3), title="Replay")
        if self.disagreements:
            words = f"THE REPLAY DISAGREES: {'; '.join(self.disagreements)}.\n"
            return Reply([table, Styled(words, "bold red")], self.as_dict())
        allowed = f"{100 * TIME_TOLERANCE:g} % of time and {100 * MEMORY_TOLERANCE:g} % of memory"
        words = f"A simulation of the plan, priced anew, agrees within {allowed}"
        if several:
            words += f"; the busiest rank waits for {percent(self.idle_share)} of the pipeline"
        words += "."
        if any(c > (1 + MEMORY_TOLERANCE) * b for _, b, c, _ in self.ranks):
            words += "  Where memory is a range, the stages of a rank need it at different times; its end is what they need together."
        return Reply([table, f"{words}\n"], self.as_dict())


def replay(plan: Plan, traced: TracedModel, request: PlanRequest) -> Replay:
    """Simulate one step of a plan, action by action, at prices annotated again. Returns predictions
    and results as a `Replay`. Arguments and errors are those of `plan_costs`.
    """
    costs = plan_costs(plan, traced, request)
    actions = actions_of(plan)
    times = [stage.times for stage in costs.stages]
    played = simulate_pipeline(actions, times, costs.hop_s)
    busiest_s = max(played.busy_s(rank) for rank in range(plan.mesh.pp))
    held = [peak_held_bytes(todo, costs.stages) for todo in actions]
    replayed_bytes, together_bytes = (
        tuple(map(add, costs.static_bytes, peaks)) for peaks in zip(*held, strict=True)
    )
    return Replay(
        predicted_s=plan.predicted.step_time_s,
        replayed_s=max(played.makespan_s, costs.issued_s) + max(costs.step_s) + costs.fixed_s,
        predicted_bytes=plan.predicted.peak_memory_bytes,
        replayed_bytes=replayed_bytes,
        together_bytes=together_bytes,
        idle_share=1 - busiest_s / played.makespan_s,
    )


def peak_held_bytes(todo: Sequence[Action], stages: Sequence[StageCost]) -> tuple[int, int]:
    """Peak bytes of a rank's list of actions, without static bytes, as two numbers. `stages` has
    the costs of all stages of the plan.

    The first is the most held at once. The second is the sum of three separate peaks: kept bytes,
    bytes that wait between two parts of backwards, and transient bytes of an action. On a rank with
    several stages, the second counts what the first part of a backward frees as kept.
    """
    peak, most, several = 0, [0, 0, 0], len({action.stage for action in todo}) > 1
    for held, _ in held_states(todo, stages):
        kept = held.kept - held.given_back * (not several)
        most = [max(pair) for pair in zip(most, (kept, held.late, held.needed), strict=True)]
        peak = max(peak, held.resting + held.needed)
    return peak, sum(most)


def _signed(share: float) -> str:
    return f"{100 * share:+.2f} %"


def _more(share: float) -> str:
    return f"{abs(100 * share):.2f} % {'more' if share > 0 else 'less'} than predicted"


@dataclass(frozen=True, slots=True)
class HeldBytes:
    """Bytes that a rank holds besides static ones. `kept` is what forwards keep, of which first
    parts of backwards have freed `given_back`. `late` waits between two parts of a backward.
    `needed` is what an action needs while it runs.
    """

    kept: int = 0
    late: int = 0
    given_back: int = 0
    needed: int = 0

    @property
    def resting(self) -> int:
        """Bytes without what an action needs."""
        return self.kept - self.given_back + self.late


def held_states(
    todo: Iterable[Action], stages: Sequence[StageCost]
) -> Iterator[tuple[HeldBytes, HeldBytes]]:
    """For each action of a rank, in order: what is held while it runs, and after it. A forward
    counts what it keeps from its start on. `stages` has the costs of all stages of the plan.
    """
    kept = late = given_back = 0
    for action in todo:
        kind, stage = action.kind, stages[action.stage]
        kept += stage.kept_bytes if kind == "F" else 0
        late += stage.late_bytes if kind == "I" else 0
        needed = {"F": 0, "B": stage.moment_bytes}.get(kind, stage.split_moment_bytes)
        running = HeldBytes(kept, late, given_back, needed)
        given_back += {"I": stage.given_back_bytes, "W": -stage.given_back_bytes}.get(kind, 0)
        kept -= stage.kept_bytes if kind in "BW" else 0
        late -= stage.late_bytes if kind == "W" else 0
        yield running, HeldBytes(kept, late, given_back)
