"""Remedies: the smallest changes of a request that no plan fits with which the planner finds a
plan.

A *ladder* is one kind of change; its *rungs* are ordered from the smallest change to the greatest.
Bisection finds the first rung that fits; on ladders of devices, increasing steps upwards come
first. It assumes that a greater change fits if a smaller one does. Both the result and the rung
before it are verified by planning.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autopar_cost_models import DEVICES, OFFLOADS, home_of
from autopar_cost_models.memory_error import is_sure

from autopar.errors import AutoparError, NoPlanFits
from autopar.ir.cluster import Cluster, ClusterSpec
from autopar.ir.cluster_parts import headroom_words
from autopar.ir.plan import Plan
from autopar.planning.smallest_plan import smallest_plan
from autopar.request.pins import choices_of, pin_text
from autopar.text.device_words import misfit_chance
from autopar.text.plan_words import MEMORY_WORDS, OFFLOAD_WORDS, layout_words
from autopar.text.units import NOT_PROVED, gap_words, gib, ms, percent

BUDGET_S = 40.0
"""Seconds to look for remedies, shared by the remaining ladders by their weights."""
MOST_TIMES = 64
"""The largest multiple of the number of devices that is tried."""
_TRIES = 3
"""On a ladder that is climbed from below, a try takes at most one of this many parts of the time that
is left.
"""
_SEQ_STEPS = 16
"""Number of equal steps in which a sequence is shortened."""
_PIPELINE = ("vpp", "schedule", "stages")
"""Pins that only a pipeline can have. They are dropped together with the pin of pp."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What is asked of the planner; remedies change it. `seq` is tokens per sequence, None if no
    other length is to be tried.
    """

    pin: Mapping[str, Any]
    cluster: Cluster
    global_batch: int
    seq: int | None


PlanFor = Callable[[Ask, float], Plan]
"""The type of a function that plans a request within a number of seconds. It raises AutoparError
like the planner.
"""


@dataclass(frozen=True, slots=True)
class Rung:
    """One change of a request, in words that continue `it fits ...`, with the changed request."""

    words: str
    ask: Ask


@dataclass(frozen=True, slots=True)
class Ladder:
    """One kind of change: `rungs` from the smallest change to the greatest. `what` is a short name,
    such as a pin's; `words` name the kind in a report. `up`: try the smallest change first, since
    the greatest is slow to plan. `weight`: its share of the time, by how slow it is to plan.
    """

    what: str
    words: str
    rungs: list[Rung]
    up: bool = False
    weight: int = 1


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change with which a plan fits: `words` that continue `it fits ...`, the changed request
    `ask`, and its plan. `what` is the kind of change (`Ladder.what`). `smallest`: whether it is
    proved that the next smaller change of its kind does not fit, or there is none.
    """

    what: str
    words: str
    ask: Ask
    plan: Plan
    smallest: bool

    def __str__(self) -> str:
        predicted = self.plan.predicted
        peak = gib(max(predicted.peak_memory_bytes))
        doubts = [] if self.smallest else ["a smaller change was not ruled out in time"]
        gap, risk = self.plan.certificate.gap, misfit_chance(self.plan, self.ask.cluster)
        if gap > NOT_PROVED:
            doubts.append(
                f"a plan that takes up to {gap_words(gap)} less was not ruled out in time"
            )
        if risk is not None and not is_sure(1 - risk):
            doubts.append(f"a chance of {percent(risk)} not to fit")
        words = f"{ms(predicted.step_time_s)} a step, {peak} ({layout_words(self.plan)})"
        return "; ".join([f"{self.words}: {words}", *doubts])

    @property
    def device_s(self) -> float:
        """Device seconds that a token takes."""
        return self.ask.cluster.num_devices / self.plan.predicted.tokens_per_s


@dataclass(frozen=True, slots=True)
class Remedies:
    """What would make the request `ask` fit: the reason why nothing fits, the remedies `found`, kinds
    of change that are `useless`, and kinds without time to verify. `budget_s` is the time that the
    search had, in seconds. Of `found`, the one with the fewest device seconds for a token is first.

    `least` is the plan that needs the least memory, on devices that have enough; None if unknown.
    """

    ask: Ask
    reason: str
    least: Plan | None
    found: tuple[Remedy, ...]
    useless: tuple[str, ...]
    unverified: tuple[str, ...]
    budget_s: float

    def __str__(self) -> str:
        lines = [f"{self.reason}{self._most_words()}"]
        if self.found:
            lines += ["It fits", *(f"  {remedy}" for remedy in self.found)]
        if self.useless:
            lines.append(f"Nothing fits {', nor '.join(self.useless)}.")
        if self.unverified:
            lines.append(f"Not verified within {self.budget_s:g} s: {'; '.join(self.unverified)}.")
        if hostless := [group.name for group in self.ask.cluster.groups if group.host is None]:
            lines.append(
                f"Offloading was not tried: {hostless[0]} does not say what its hosts have. A cluster file says it under `host:` "
                "(memory_bytes, memory_bandwidth_Bps, link_bandwidth_Bps)."
            )
        return "\n".join(lines)

    def _most_words(self) -> str:
        if self.least is None:
            return "."
        parts = self.least.predicted.memory
        most = max(parts, key=parts.__getitem__)
        return f"; most of it is {MEMORY_WORDS.get(most, most)}, {percent(parts[most] / max(self.least.predicted.peak_memory_bytes))}."


def remedies(
    error: NoPlanFits,
    plan_for: PlanFor,
    ask: Ask,
    budget_s: float = BUDGET_S,
    clock: Callable[[], float] = time.monotonic,
    tell: Callable[[str], None] = lambda text: None,
) -> Remedies:
    """For most kinds of change, as `Remedies`: the smallest change of `ask` with which a plan fits,
    after planning `ask` raised `error`. A kind is skipped if an earlier remedy makes it needless:
    dropping all pins, if changing one is enough.

    The search takes at most about `budget_s` seconds of `clock`. `plan_for` plans a request; `tell`
    gets a line for each attempt.
    """
    end_s = clock() + budget_s
    found: list[Remedy] = []
    useless: list[str] = []
    unverified: list[str] = []
    least = smallest_plan(
        lambda pin, at: plan_for(replace(ask, cluster=at), budget_s / 4),
        ask.cluster,
        ask.pin,
        error.least_bytes,
    )
    ladders = [ladder for ladder in ladders_of(ask) if ladder.rungs]
    for number, ladder in enumerate(ladders):
        if any(
            remedy.what == ladder.what or (ladder.what == "pins" and remedy.what in ask.pin)
            for remedy in found
        ):
            continue
        weights = [each.weight for each in ladders[number:]]
        share_s = (end_s - clock()) * ladder.weight / sum(weights)
        climb = Climb(ladder, plan_for, clock() + share_s, clock, tell)
        remedy = climb.first_fit()
        if remedy is not None:
            found.append(remedy)
        elif climb.late:
            unverified.append(ladder.words)
        elif climb.ladder.rungs:  # else each change is impossible for another reason than memory
            useless.append(climb.ladder.rungs[-1].words)
    return Remedies(
        ask=ask,
        reason=str(error),
        least=least,
        found=tuple(sorted(found, key=lambda remedy: remedy.device_s)),
        useless=tuple(useless),
        unverified=tuple(unverified),
        budget_s=budget_s,
    )


@dataclass(slots=True)
class Climb:
    """The search for the first rung of one ladder that fits, until the clock reaches `end_s`. Rungs
    that are impossible for another reason than memory are removed from the ladder. `plan_for` plans
    a request, and `tell` gets a line for each try.
    """

    ladder: Ladder
    plan_for: PlanFor
    end_s: float
    clock: Callable[[], float]
    tell: Callable[[str], None]
    late: bool = False  # whether something was not settled in time
    plans: dict[str, Plan] = field(default_factory=dict)  # by the words of the rung
    ruled_out: set[str] = field(default_factory=set)

    def first_fit(self) -> Remedy | None:
        """The smallest change that was found to fit, as a `Remedy`; None if none was found. `late`
        is set if time ran out or a try proved nothing.
        """
        rungs, failing, fitting = self.ladder.rungs, -1, None
        while (at := self._next(failing, fitting)) is not None and not self._over():
            fits = self._fits(rungs[at])
            if fits is None:
                del rungs[at]
                fitting = fitting if fitting is None else fitting - 1
            elif fits:
                fitting = at
            else:
                failing = at
        if fitting is None:
            return None
        rung = rungs[fitting]
        smallest = fitting == 0 or rungs[fitting - 1].words in self.ruled_out
        return Remedy(self.ladder.what, rung.words, rung.ask, self.plans[rung.words], smallest)

    def _next(self, failing: int, fitting: int | None) -> int | None:
        """The index of the next rung to try. `failing` is the greatest change that is known to fail
        (-1: none), `fitting` the smallest that is known to fit (None: none). None if nothing is
        left to try.
        """
        last = len(self.ladder.rungs) - 1
        if fitting is not None:
            return (failing + fitting) // 2 if fitting - failing > 1 else None
        if failing == last:
            return None
        return min(max(2 * failing + 1, 0), last) if self.ladder.up else last

    def _over(self) -> bool:
        over = self.clock() >= self.end_s
        self.late |= over
        return over

    def _fits(self, rung: Rung) -> bool | None:
        """Whether a plan is found on this rung, by planning it. None if it is impossible for a
        reason other than memory. Stores the plan, or that it is ruled out. False without proof sets
        `late`.
        """
        self.tell(f"planning {rung.words}")
        try:
            left_s = (self.end_s - self.clock()) / (_TRIES if self.ladder.up else 1)
            self.plans[rung.words] = self.plan_for(rung.ask, left_s)
            return True
        except NoPlanFits as error:
            self.late |= not error.proven
            if error.proven:
                self.ruled_out.add(rung.words)
            return False
        except AutoparError:
            return None


def ladders_of(ask: Ask) -> Iterator[Ladder]:
    """Every kind of change, the quickest to verify first: other values or removal of each pin, no
    pins, less memory kept free, offloading, smaller batches, more devices, shorter sequences. A ladder may have no rungs.
    """
    for name, value in ask.pin.items():
        if name != "offload":
            yield Ladder(name, f"without {pin_text({name: value})}", list(_pin_rungs(ask, name)))
    if len(ask.pin) > 1:
        yield Ladder("pins", "without all pins", [Rung("without all pins", replace(ask, pin={}))])
    kept = max(group.headroom or 0.0 for group in ask.cluster.groups)
    yield Ladder("headroom", "without headroom", list(_headroom_rungs(ask, kept)) if kept else [])
    if len(ask.cluster.groups) == 1:
        # each for itself: they allow different layouts
        for kind in OFFLOADS[OFFLOADS.index(ask.pin.get("offload", "none")) + 1 :]:
            words = f"with the {OFFLOAD_WORDS[kind]} in host memory"
            yield Ladder(
                "offload",
                words,
                [Rung(words, replace(ask, pin={**ask.pin, "offload": kind}))],
                weight=2,
            )
    smaller = [
        batch for batch in range(ask.global_batch - 1, 0, -1) if ask.global_batch % batch == 0
    ]
    yield Ladder(
        "global_batch",
        "smaller global batches",
        [
            Rung(f"with a global batch of {batch}", replace(ask, global_batch=batch))
            for batch in smaller
        ],
    )
    # replicas follow from the number of devices
    free = {name: value for name, value in ask.pin.items() if name != "dp"}
    words = f"{', dp not pinned' if 'dp' in ask.pin else ''}"
    yield Ladder(
        "devices",
        "more devices",
        [
            Rung(
                f"on {at.num_devices} devices ({at.name}{words})",
                replace(ask, cluster=at, pin=free),
            )
            for at in larger_clusters(ask.cluster)
        ],
        up=True,
        weight=3,
    )
    if ask.seq is not None:
        step = max(ask.seq // _SEQ_STEPS, 1)
        yield Ladder(
            "seq",
            "shorter sequences",
            [
                Rung(f"with sequences of {seq} tokens", replace(ask, seq=seq))
                for seq in range(ask.seq - step, 0, -step)
            ],
        )


def _headroom_rungs(ask: Ask, kept: float) -> Iterator[Rung]:
    """Rungs that keep half of the memory free that `ask` keeps free, and none. `kept` is a fraction
    or GiB, as `ClusterSpec.headroom`.
    """
    half = kept / 2 if not 1 <= kept < 2 else None
    for headroom in (half, 0.0):
        if headroom is not None:
            words = "with no memory kept free (headroom 0)"
            if headroom:
                words = f"with half the headroom ({headroom_words(headroom)})"
            yield Rung(words, replace(ask, cluster=ask.cluster.kept_free(headroom)))


def _pin_rungs(ask: Ask, name: str) -> Iterator[Rung]:
    """Rungs that change the pin `name` to other values, the smallest change first, and finally
    remove it. With pp, other pins of a pipeline are removed too.
    """
    value = ask.pin[name]
    for other in _relaxed(name, value):
        yield Rung(
            f"with {pin_text({name: other})} instead of {value}",
            replace(ask, pin={**ask.pin, name: other}),
        )
    gone = (name, *_PIPELINE) if name == "pp" else (name,)
    dropped = {key: pinned for key, pinned in ask.pin.items() if key in gone}
    yield Rung(
        f"without {pin_text(dropped)}",
        replace(ask, pin={key: pinned for key, pinned in ask.pin.items() if key not in gone}),
    )


def _relaxed(name: str, value: Any) -> list[Any]:
    """Other values of the pin `name`, whose value is `value`, that need less memory, the nearest
    first; [] for pins without an order.
    """
    if name == "zero":
        return [stage for stage in (1, 2, 3) if stage > value]
    if name == "shard":
        return [0] if value else []
    if name == "recompute":
        modes = ["none", "selective", "full"]
        return modes[modes.index(value) + 1 :] if value in modes else ["full"]
    if name == "micro_batch":
        return [size for size in range(value - 1, 0, -1) if value % size == 0]
    return []


def larger_clusters(cluster: Cluster) -> list[Cluster]:
    """Clusters with more devices of the same kind, ascending; [] with several kinds of devices.

    A part of a known node doubles until the node is full. Then come whole nodes: every number up to
    twice as many, and further doublings up to `MOST_TIMES`.
    """
    if len(cluster.groups) > 1:
        return []  # of which kind is not for us to say
    if not _is_part(cluster):
        here = cluster.topology.nodes
        return [
            cluster.with_devices(count * cluster.topology.devices_per_node)
            for count in _more_nodes(here)
        ]
    kind, here, preset = cluster.device.name, cluster.num_devices, home_of(cluster.device.name)
    most = preset.devices_per_node if preset else MOST_TIMES * here
    inside = [
        f"{kind}:{here * 2**k}" for k in range(1, MOST_TIMES.bit_length()) if here * 2**k <= most
    ]
    nodes = [f"{preset.name}:{count}" for count in _more_nodes(1)] if preset else []
    own = cluster.one_kind
    found = [ClusterSpec.parse(text).one_kind for text in inside + nodes]
    return [
        replace(each, price_per_device_hour=own.price_per_device_hour, headroom=own.headroom)
        for each in found
    ]


def _is_part(cluster: Cluster) -> bool:
    """Whether the cluster is some or all devices of one node of a known kind, as in `h100:4`."""
    preset = home_of(cluster.device.name)
    if (
        cluster.device.name not in DEVICES
        or cluster.topology.nodes > 1
        or (preset and cluster.num_devices > preset.devices_per_node)
    ):
        return False
    part = ClusterSpec.parse(f"{cluster.device.name}:{cluster.num_devices}")
    return (part.device, part.topology) == (cluster.device, cluster.topology)


def _more_nodes(here: int) -> list[int]:
    return [
        *range(here + 1, 2 * here + 1),
        *(here * 2**k for k in range(2, MOST_TIMES.bit_length())),
    ]


def remedies_data(answer: Remedies) -> dict[str, Any]:
    """The answer as a dict for JSON, in seconds and bytes: reason, least memory, and a dict for
    each remedy with its changed request and the plan's predictions and choices.
    """
    least = answer.least
    return {
        "answer": "does not fit",
        "reason": answer.reason,
        "capacity_bytes": min(group.device.memory_bytes for group in answer.ask.cluster.groups),
        "room_bytes": min(group.room_bytes for group in answer.ask.cluster.groups),
        "least_memory": least
        and {"peak_bytes": max(least.predicted.peak_memory_bytes), "parts": least.predicted.memory},
        "remedies": [_remedy_data(remedy) for remedy in answer.found],
        "do_not_help": list(answer.useless),
        "not_verified": list(answer.unverified),
        "budget_s": answer.budget_s,
    }


def _remedy_data(remedy: Remedy) -> dict[str, Any]:
    ask, predicted = remedy.ask, remedy.plan.predicted
    return {
        "change": remedy.what,
        "words": remedy.words,
        "smallest": remedy.smallest,
        "gap": remedy.plan.certificate.gap,
        "misfit_chance": misfit_chance(remedy.plan, ask.cluster),
        "cluster": ask.cluster.name,
        "devices": ask.cluster.num_devices,
        "global_batch": ask.global_batch,
        "seq": ask.seq,
        "pin": dict(ask.pin),
        "headroom": max(group.headroom or 0.0 for group in ask.cluster.groups),
        "step_time_s": predicted.step_time_s,
        "peak_memory_bytes": max(predicted.peak_memory_bytes),
        "tokens_per_s": predicted.tokens_per_s,
        "choices": choices_of(remedy.plan),
    }
