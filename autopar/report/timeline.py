"""The timeline of a plan's step, as data: what each pipeline rank does when, and what it holds.

`simulated_step.py` makes one. Figures, traces and checks are made from it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import fsum

from autopar.recheck.plan_costs import StaticBytes

WORK = ("forward", "backward", "weights", "recompute", "host", "optimizer", "fixed")
"""Kinds of work that is not communication. In `host` the device waits for the host. `weights` is the part of a split backward that computes
gradients of parameters; an unsplit backward has it in `backward`.
"""
COMMUNICATION_AXES = ("tp", "cp", "ep", "dp")
"""Kinds of exposed communication: collectives over these axes."""
_PASSES = {"F": "forward", "B": "backward", "I": "backward", "W": "weight gradients"}
"""The words of `engine.profile` for each kind of action."""
FOLDED_BEYOND = 64
"""Most micro-batches that a picture or a trace shows; the middle ones of more are folded."""


@dataclass(frozen=True, slots=True)
class ActionPart:
    """A piece of an action. `segment` is the segment that runs (`''` in the update, and between
    segments). `name` is the collective as `engine.profile` names it, such as 'all_gather over tp',
    or the kind of work. `kind` is one of `WORK` or `COMMUNICATION_AXES`, and `seconds` its exposed time.
    """

    segment: str
    name: str
    kind: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Slice:
    """An interval of a rank: an action of the pipeline (`kind` 'F', 'B', 'I' or 'W', with its stage
    and micro-batch), or 'update', 'fixed' or 'host'. These have -1 for both. Times are seconds from
    the start of the step.
    """

    kind: str
    stage: int
    micro_batch: int
    start_s: float
    seconds: float

    @property
    def end_s(self) -> float:
        """Seconds from the start of the step to the end of the interval."""
        return self.start_s + self.seconds

    @property
    def name(self) -> str:
        """The name of its range in a trace of `engine.profile` of a pipeline: 'stage 1 forward of
        micro-batch 0'; 'update' or 'fixed' for these.
        """
        if self.stage < 0:
            return self.kind
        return f"stage {self.stage} {_PASSES[self.action]} of micro-batch {self.micro_batch}"

    @property
    def action(self) -> str:
        """`kind`, or 'B' for 'W' of the first stage, which then runs its whole backward."""
        return "B" if self.kind == "W" and self.stage == 0 else self.kind


@dataclass(frozen=True, slots=True)
class Message:
    """A message between stages on two ranks: what an action of `stage` sends, from `start_s` for
    `seconds`. `kind` is 'F' for activations, 'I' for gradients.
    """

    kind: str
    stage: int
    micro_batch: int
    sender: int
    receiver: int
    start_s: float
    seconds: float

    @property
    def name(self) -> str:
        """Its words: 'activations of micro-batch 0 to stage 1'."""
        what, to = ("activations", 1) if self.kind == "F" else ("gradients", -1)
        return f"{what} of micro-batch {self.micro_batch} to stage {self.stage + to}"


@dataclass(frozen=True, slots=True)
class HeldMemory:
    """What a rank holds from `time_s` on besides its static bytes: `kept_bytes` from forward to
    backward, and `transient_bytes` of the backward that runs.
    """

    time_s: float
    kept_bytes: int
    transient_bytes: int


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of a device of one pipeline rank over the step. `static` is always resident,
    `holdings` are the changes in order, `limit_bytes` is what the device has, and `predicted_bytes`
    the peak that the plan predicts.
    """

    static: StaticBytes
    holdings: tuple[HeldMemory, ...]
    limit_bytes: int
    predicted_bytes: int

    @property
    def peak(self) -> HeldMemory:
        """The first moment at which most is held."""
        return max(self.holdings, key=lambda held: held.kept_bytes + held.transient_bytes)

    @property
    def peak_bytes(self) -> int:
        """The most bytes that the device holds in the simulated step."""
        return self.static.total + self.peak.kept_bytes + self.peak.transient_bytes


@dataclass(frozen=True)
class Timeline:
    """One simulated step of a plan.

    Attributes:
        schedule: the schedule of the pipeline, or 'none'.
        micro_batches: micro-batches of the step.
        lines: for each pipeline rank, its intervals in order, which do not overlap.
        parts: what an action consists of, in order, by (kind, stage); the same for every
            micro-batch.
        updates: what each rank's update consists of.
        messages: messages between stages, by the time at which they start.
        memory: the memory of each rank.
        pipeline_s: seconds until the last action ends.
        step_s: seconds of the whole step.
        predicted_s: seconds of the step that the plan predicts, by its closed form.
    """

    schedule: str
    micro_batches: int
    lines: tuple[tuple[Slice, ...], ...]
    parts: Mapping[tuple[str, int], tuple[ActionPart, ...]]
    updates: tuple[tuple[ActionPart, ...], ...]
    messages: tuple[Message, ...]
    memory: tuple[Memory, ...]
    pipeline_s: float
    step_s: float
    predicted_s: float

    @property
    def ranks(self) -> int:
        """Number of pipeline ranks."""
        return len(self.lines)

    @cached_property
    def busiest(self) -> int:
        """The pipeline rank that works longest in the step."""
        return max(
            range(self.ranks),
            key=lambda rank: fsum(s.seconds for s in self.lines[rank] if s.stage >= 0),
        )

    @cached_property
    def fullest(self) -> int:
        """The pipeline rank that uses the largest fraction of its memory in the simulated step."""
        shares = [memory.peak_bytes / memory.limit_bytes for memory in self.memory]
        return shares.index(max(shares))

    def parts_of(self, rank: int, piece: Slice) -> tuple[ActionPart, ...]:
        """What an interval of a rank consists of, in order."""
        if piece.kind == "update":
            return self.updates[rank]
        if piece.kind in ("fixed", "host"):
            return (ActionPart("", piece.kind, piece.kind, piece.seconds),)
        return self.parts[piece.kind, piece.stage]

    def seconds_by_kind(self, rank: int) -> dict[str, float]:
        """Seconds of a rank's step by kind of work, axis of communication, and 'idle'. They add up
        to the step. Kinds without time are left out.
        """
        found: dict[str, list[float]] = defaultdict(list)
        for kind_stage, count in self._counts(rank).items():
            for part in self.parts[kind_stage]:
                found[part.kind].append(count * part.seconds)
        for piece in self.lines[rank]:
            if piece.stage < 0:
                for part in self.parts_of(rank, piece):
                    found[part.kind].append(part.seconds)
        busy = fsum(piece.seconds for piece in self.lines[rank])
        total = {kind: fsum(found[kind]) for kind in (*WORK, *COMMUNICATION_AXES) if kind in found}
        total["idle"] = max(self.step_s - busy, 0.0)
        return {kind: seconds for kind, seconds in total.items() if seconds}

    def _counts(self, rank: int) -> dict[tuple[str, int], int]:
        counts: dict[tuple[str, int], int] = defaultdict(int)
        for piece in self.lines[rank]:
            if piece.stage >= 0:
                counts[piece.kind, piece.stage] += 1
        return counts

    @cached_property
    def fold(self) -> tuple[float, float] | None:
        """(start, end) in seconds of the middle of the step that pictures and traces leave out.
        None with up to `FOLDED_BEYOND` micro-batches.

        It starts when the first half of the micro-batches shown has passed all stages, and ends
        when the first of the other half starts.
        """
        if self.micro_batches <= FOLDED_BEYOND:
            return None
        first, last = FOLDED_BEYOND // 2, self.micro_batches - FOLDED_BEYOND // 2
        pieces = [piece for line in self.lines for piece in line if piece.stage >= 0]
        start = max(piece.end_s for piece in pieces if piece.micro_batch < first)
        end = min(piece.start_s for piece in pieces if piece.micro_batch >= last)
        return (start, end) if start < end else None

    def shown(self, rank: int) -> Iterator[Slice]:
        """The intervals of a rank that lie outside the fold, and the outer parts of those that
        cross its ends.
        """
        yield from outside(self.lines[rank], self.fold)

    @cached_property
    def folded(self) -> int:
        """How many actions of all ranks lie inside the fold; 0 without one."""
        if (fold := self.fold) is None:
            return 0
        return sum(
            fold[0] <= piece.start_s and piece.end_s <= fold[1]
            for line in self.lines
            for piece in line
        )


def outside(line: tuple[Slice, ...], fold: tuple[float, float] | None) -> Iterator[Slice]:
    """The intervals of `line` outside `fold`; those that lie inside in part are cut."""
    for piece in line:
        if fold is None or piece.end_s <= fold[0] or piece.start_s >= fold[1]:
            yield piece
            continue
        before, after = fold[0] - piece.start_s, piece.end_s - fold[1]
        if before > 0:
            yield Slice(piece.kind, piece.stage, piece.micro_batch, piece.start_s, before)
        if after > 0:
            yield Slice(piece.kind, piece.stage, piece.micro_batch, fold[1], after)
