"""Discrete-event simulation of a pipeline: replays the list of actions of each rank, in that order, on a clock.

It knows no schedule: what a rank does next is what its list says.  An action starts when its rank is free and what it needs is there:

    F  forward of a stage            needs the activations of the stage before
    B  whole backward                needs its own F, and the gradient of the stage after (from that one's B or I)
    I  backward to the input         needs what B needs
    W  backward to the parameters    needs its own I

What crosses ranks takes `hop_s`.  With `overlap` the sender computes on while it travels; without, the sender waits until it is there.
A link carries any number of messages at once, and receiving costs the receiver nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from autopar_cost_models.checks import positive, whole
from autopar_cost_models.echo import shown
from autopar_cost_models.stage_times import StageTimes

KINDS = {
    "F": "forward",
    "B": "backward",
    "I": "backward to the input",
    "W": "backward to the parameters",
}


@dataclass(frozen=True, slots=True)
class Action:
    """One thing a rank does: `kind` (a key of `KINDS`) of one virtual stage on one micro-batch.  Prints as torch prints it: `3F0`."""

    kind: str
    stage: int
    micro_batch: int

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(
                f"unknown kind of action {shown(self.kind)}; known: {', '.join(KINDS)}"
            )
        whole("stage", self.stage, least=0)
        whole("micro_batch", self.micro_batch, least=0)

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


@dataclass(frozen=True, slots=True)
class Span:
    """When a rank computed an action.  A send that is not overlapped follows `end_s` and is not part of the span."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """What happened.  In flight: micro-batches whose forward has run and whose backward (W where it is split) has not."""

    makespan_s: float
    timelines: tuple[tuple[Span, ...], ...]
    in_flight: tuple[int, ...]
    """Peak on each rank, over its virtual stages together."""
    in_flight_by_stage: tuple[int, ...]
    """Peak of each virtual stage by itself."""

    def busy_s(self, rank: int) -> float:
        """Seconds that a rank computes."""
        return sum(span.end_s - span.start_s for span in self.timelines[rank])


_Item = tuple[
    str, int, int
]  # what an action yields: ("F", stage, micro-batch) activations, ("I", ...) the gradient of the stage's input


def simulate_pipeline(
    actions: Sequence[Sequence[Action]],
    stages: Sequence[StageTimes],
    hop_s: float = 0.0,
    overlap: bool = True,
) -> Simulation:
    """Run `actions[rank]` on every rank at once; `stages` are the times of the virtual stages, first to last.

    Raises ValueError for lists that contradict themselves, and for a deadlock: it names a rank, its action and what that waits for.
    """
    positive("hop_s", hop_s, zero_allowed=True)
    home = _homes(actions, len(stages))
    position = [0] * len(actions)
    idle = [True] * len(actions)
    here: list[set[_Item]] = [set() for _ in actions]
    timelines: list[list[Span]] = [[] for _ in actions]
    events: list[
        tuple[float, int, int, _Item | None]
    ] = []  # (time, order of posting, rank, what arrives or None: the rank is free)
    posted = 0

    def post(time_s: float, rank: int, item: _Item | None) -> None:
        nonlocal posted
        heapq.heappush(events, (time_s, posted, rank, item))
        posted += 1

    def start(rank: int, now_s: float) -> None:
        """Start the next action of an idle rank if all that it needs is here."""
        if not idle[rank] or position[rank] == len(actions[rank]):
            return
        action = actions[rank][position[rank]]
        if not here[rank].issuperset(_needs(action, len(stages))):
            return
        position[rank] += 1
        idle[rank] = False
        end_s = now_s + _duration_s(action, stages[action.stage])
        timelines[rank].append(Span(action, now_s, end_s))
        receiver = _receiver(action, home)
        sends = receiver is not None and receiver != rank
        for item in _yields(action):
            post(end_s, rank, item)
            if sends:
                post(end_s + hop_s, receiver, item)
        post(end_s + (hop_s if sends and not overlap else 0.0), rank, None)

    for rank in range(len(actions)):
        start(rank, 0.0)
    while events:
        now_s, _, rank, item = heapq.heappop(events)
        if item is None:
            idle[rank] = True
        else:
            here[rank].add(item)
        start(rank, now_s)

    for rank, todo in enumerate(actions):
        if position[rank] < len(todo):
            action = todo[position[rank]]
            missing = next(item for item in _needs(action, len(stages)) if item not in here[rank])
            what = f"the {'gradient' if missing[0] == 'I' and action.kind != 'W' else KINDS[missing[0]]}"
            raise ValueError(
                f"deadlock: rank {rank} waits at action {position[rank]} of {len(todo)}, {action}, "
                f"for {what} of stage {missing[1]}, micro-batch {missing[2]}, that never comes"
            )
    return Simulation(
        makespan_s=max((line[-1].end_s for line in timelines if line), default=0.0),
        timelines=tuple(map(tuple, timelines)),
        in_flight=tuple(_peak(todo) for todo in actions),
        in_flight_by_stage=tuple(
            _peak([a for a in actions[home[s]] if a.stage == s]) for s in range(len(stages))
        ),
    )


def _homes(actions: Sequence[Sequence[Action]], num_stages: int) -> list[int]:
    """The rank of each stage.  ValueError unless every stage has one, and no action comes twice."""
    home: dict[int, int] = {}
    seen: set[Action] = set()
    for rank, todo in enumerate(actions):
        for action in todo:
            if action.stage >= num_stages:
                raise ValueError(
                    f"rank {rank} has {action}, but there are times for {num_stages} stages"
                )
            if home.setdefault(action.stage, rank) != rank:
                raise ValueError(
                    f"{action} is on rank {rank}, but rank {home[action.stage]} has stage {action.stage}"
                )
            twin = {"B": "I", "I": "B"}.get(action.kind, action.kind)
            if action in seen or Action(twin, action.stage, action.micro_batch) in seen:
                raise ValueError(
                    f"rank {rank} runs {action} a second time: one forward and one backward per stage and micro-batch"
                )
            seen.add(action)
    if len(home) < num_stages:
        raise ValueError(
            f"no rank runs stage {min(set(range(num_stages)) - set(home))} of {num_stages}"
        )
    return [home[stage] for stage in range(num_stages)]


def _needs(action: Action, num_stages: int) -> list[_Item]:
    stage, micro_batch = action.stage, action.micro_batch
    if action.kind == "F":
        return [("F", stage - 1, micro_batch)] if stage else []
    if action.kind == "W":
        return [("I", stage, micro_batch)]
    own: list[_Item] = [("F", stage, micro_batch)]
    return own + [("I", stage + 1, micro_batch)] if stage < num_stages - 1 else own


def _yields(action: Action) -> list[_Item]:
    return (
        []
        if action.kind == "W"
        else [("F" if action.kind == "F" else "I", action.stage, action.micro_batch)]
    )


def _receiver(action: Action, home: list[int]) -> int | None:
    """The rank that waits for what an action yields."""
    neighbour = {"F": action.stage + 1, "B": action.stage - 1, "I": action.stage - 1, "W": -1}[
        action.kind
    ]
    return home[neighbour] if 0 <= neighbour < len(home) else None


def _duration_s(action: Action, times: StageTimes) -> float:
    return {"F": times.forward_s, "B": times.backward_s, "I": times.input_s, "W": times.weight_s}[
        action.kind
    ]


def _peak(todo: Sequence[Action]) -> int:
    """The most micro-batches alive at once.  The order of a rank decides that, not the clock."""
    alive = peak = 0
    for action in todo:
        alive += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
        peak = max(peak, alive)
    return peak
