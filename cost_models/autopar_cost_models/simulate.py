"""Discrete-event simulation of a pipeline: replays each rank's list of actions, in order, on a
clock.

It knows no schedule: the lists alone decide what a rank does next. An action starts when its rank
is free and its inputs have arrived:

    F  forward of a stage            needs the activations of the stage before
    B  whole backward                needs its own F, and the gradient of the stage after (from that one's B or I)
    I  backward to the input         needs what B needs
    W  backward to the parameters    needs its own I

A message to another rank takes `hop_s`. With `overlap` the sender computes meanwhile; without it,
the sender waits until the message arrives. A link carries any number of messages at once, and
receiving costs the receiver nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from autopar_cost_models.checks import positive, whole
from autopar_cost_models.echo import shown
from autopar_cost_models.stage_times import StageTimes

_KINDS = {
    "F": "forward",
    "B": "backward",
    "I": "backward to the input",
    "W": "backward to the parameters",
}


@dataclass(frozen=True, slots=True)
class Action:
    """One action of a rank: `kind` (a key of `_KINDS`) of one virtual stage on one micro-batch. It
    prints as torch prints it: `3F0`.
    """

    kind: str
    stage: int
    micro_batch: int

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ValueError(
                f"unknown kind of action {shown(self.kind)}; known: {', '.join(_KINDS)}"
            )
        whole("stage", self.stage, least=0)
        whole("micro_batch", self.micro_batch, least=0)

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


@dataclass(frozen=True, slots=True)
class Span:
    """The start and end of an action's compute on a rank. A send that is not overlapped follows
    `end_s` and is not included.
    """

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """The result of a simulation. `timelines` has the spans of each rank, in order. A micro-batch
    is *in flight* after its forward and before the end of its backward (of W if it is split).
    """

    makespan_s: float
    timelines: tuple[tuple[Span, ...], ...]
    in_flight: tuple[int, ...]
    """Peak number of micro-batches in flight on each rank, over all its virtual stages."""
    in_flight_by_stage: tuple[int, ...]
    """Peak number in flight of each virtual stage."""

    def busy_s(self, rank: int) -> float:
        """Total seconds that a rank computes."""
        return sum(span.end_s - span.start_s for span in self.timelines[rank])


# what an action yields: ("F", stage, micro-batch) activations, ("I", ...) the gradient of the stage's input
_Item = tuple[str, int, int]


class _Ranks:
    """The state of a running simulation: the position of each rank in its list, and the messages
    that have arrived.
    """

    def __init__(
        self,
        actions: Sequence[Sequence[Action]],
        stages: Sequence[StageTimes],
        hop_s: float,
        overlap: bool,
    ) -> None:
        self.actions, self.stages, self.hop_s, self.overlap = actions, stages, hop_s, overlap
        self.home = _homes(actions, len(stages))
        self.position = [0] * len(actions)
        self.idle = [True] * len(actions)
        self.here: list[set[_Item]] = [set() for _ in actions]
        self.timelines: list[list[Span]] = [[] for _ in actions]
        # (time, order of posting, rank, what arrives or None: the rank is free)
        self.events: list[tuple[float, int, int, _Item | None]] = []
        self.posted = 0

    def run(self) -> None:
        """Start every rank at time 0, and process events until none is left. A deadlock only ends
        it early; `check_finished` raises the error.
        """
        for rank in range(len(self.actions)):
            self._start(rank, 0.0)
        while self.events:
            now_s, _, rank, item = heapq.heappop(self.events)
            if item is None:
                self.idle[rank] = True
            else:
                self.here[rank].add(item)
            self._start(rank, now_s)

    def check_finished(self) -> None:
        """Raise ValueError if a rank has actions left, which means a deadlock."""
        for rank, todo in enumerate(self.actions):
            if self.position[rank] == len(todo):
                continue
            action = todo[self.position[rank]]
            needs = _needs(action, len(self.stages))
            kind, stage, micro_batch = next(item for item in needs if item not in self.here[rank])
            what = "gradient" if kind == "I" and action.kind != "W" else _KINDS[kind]
            raise ValueError(
                f"deadlock: rank {rank} waits at action {self.position[rank]} of {len(todo)}, {action}, "
                f"for the {what} of stage {stage}, micro-batch {micro_batch}, that never comes"
            )

    def _post(self, time_s: float, rank: int, item: _Item | None) -> None:
        heapq.heappush(self.events, (time_s, self.posted, rank, item))
        self.posted += 1

    def _start(self, rank: int, now_s: float) -> None:
        """Start the next action of a rank if the rank is idle and all inputs of the action have
        arrived.
        """
        if not self.idle[rank] or self.position[rank] == len(self.actions[rank]):
            return
        action = self.actions[rank][self.position[rank]]
        if not self.here[rank].issuperset(_needs(action, len(self.stages))):
            return
        self.position[rank] += 1
        self.idle[rank] = False
        end_s = now_s + _duration_s(action, self.stages[action.stage])
        self.timelines[rank].append(Span(action, now_s, end_s))
        receiver = _receiver(action, self.home)
        free_s = end_s
        for item in _yields(action):
            self._post(end_s, rank, item)
            if receiver is not None and receiver != rank:
                self._post(end_s + self.hop_s, receiver, item)
        if receiver is not None and receiver != rank and not self.overlap:
            free_s += self.hop_s
        self._post(free_s, rank, None)


def simulate_pipeline(
    actions: Sequence[Sequence[Action]],
    stages: Sequence[StageTimes],
    hop_s: float = 0.0,
    overlap: bool = True,
) -> Simulation:
    """Simulate a pipeline in which each rank runs its list `actions[rank]`. `stages` are the times
    of the virtual stages, first to last.

    Raises ValueError for contradictory lists, and for a deadlock. The message names a rank, its
    action and the input that the action waits for.
    """
    positive("hop_s", hop_s, zero_allowed=True)
    ranks = _Ranks(actions, stages, hop_s, overlap)
    ranks.run()
    ranks.check_finished()
    return Simulation(
        makespan_s=max((line[-1].end_s for line in ranks.timelines if line), default=0.0),
        timelines=tuple(map(tuple, ranks.timelines)),
        in_flight=tuple(_peak(todo) for todo in actions),
        in_flight_by_stage=tuple(
            _peak([a for a in actions[home] if a.stage == stage])
            for stage, home in enumerate(ranks.home)
        ),
    )


def _homes(actions: Sequence[Sequence[Action]], num_stages: int) -> list[int]:
    """The rank of each stage. Raises ValueError if a stage is on no rank or on several or has no
    times, or if an action occurs twice.
    """
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
    return [*own, ("I", stage + 1, micro_batch)] if stage < num_stages - 1 else own


def _yields(action: Action) -> list[_Item]:
    return (
        []
        if action.kind == "W"
        else [("F" if action.kind == "F" else "I", action.stage, action.micro_batch)]
    )


def _receiver(action: Action, home: list[int]) -> int | None:
    """The rank that has the stage which needs the result of an action; None if no stage does."""
    neighbour = {"F": action.stage + 1, "B": action.stage - 1, "I": action.stage - 1, "W": -1}[
        action.kind
    ]
    return home[neighbour] if 0 <= neighbour < len(home) else None


def _duration_s(action: Action, times: StageTimes) -> float:
    return {"F": times.forward_s, "B": times.backward_s, "I": times.input_s, "W": times.weight_s}[
        action.kind
    ]


def _peak(todo: Sequence[Action]) -> int:
    """The peak number of micro-batches in flight in a list of actions. It depends on the order
    alone, not on the clock.
    """
    alive = peak = 0
    for action in todo:
        alive += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
        peak = max(peak, alive)
    return peak
