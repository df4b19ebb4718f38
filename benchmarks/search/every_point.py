"""Plans against every point of the printed search space: `python benchmarks/search/every_point.py
--tasks 400`.

Each task is a small captured model on a few devices of the catalogue, with pins in some. Its space
is listed from the words of `explain --space` (`printed_space.py`). Every point is priced without
code of the solver (`exhaustive_oracle.py`): strategies of ops, recompute mode of each block, cuts
and schedules. Memory is drawn from what the points hold. The plan is then held to all points:

- listed: the certificate lists the layouts of the words.
- words: it prints the words from which the space was listed.
- bound, candidate: no point that fits is faster than the bound, or than that of its layout.
- slower: a plan called optimal is at most `PROVED` slower than the best point.
- price: the plan is a point of its layout, in seconds and bytes.
- none: nothing fits where it says so, or where pins are refused.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any

import click

if not __package__:  # as a script
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from autopar import api
from autopar.annotate.annotator import Annotator, annotator_of
from autopar.errors import AutoparError, NoPlanFits, one_line
from autopar.ir.annotated import AnnotatedModel
from autopar.ir.mesh import MeshShape
from autopar.ir.plan import Plan
from autopar.ir.traced import TracedModel
from autopar.planning.candidates import setting_of
from autopar.request.pins import pin_text
from autopar.request.plan_request import PlanRequest
from autopar.solve.costs.candidate import Candidate
from autopar.text.units import PROVED
from benchmarks.search.exhaustive_oracle import Point, best, points
from benchmarks.search.exhaustive_search import CLOSE
from benchmarks.search.lean_placements import lean_placements
from benchmarks.search.printed_space import Layout, layouts
from benchmarks.search.printed_tasks import random_task, traced_of, words_of


@dataclass(slots=True)
class Trial:
    """A task, its `found` points by layout, and what is `refuted`. `kinds` are keys of `KINDS`."""

    request: PlanRequest
    traced: TracedModel
    words: Mapping[str, str] = field(default_factory=dict)
    found: dict[Layout, set[Point]] = field(default_factory=dict)
    answer: Plan | AutoparError | None = None
    kinds: set[str] = field(default_factory=lambda: {"task"})
    refuted: list[str] = field(default_factory=list)

    def run(self, draw: random.Random, time_limit_s: float) -> None:
        """Prices every point, plans within a memory drawn from them, and compares."""
        one = self.request.cluster.one_kind
        # points are priced without hosts
        instant = replace(one, device=replace(one.device, dispatch_s=0.0))
        self.request = replace(self.request, cluster=instant)
        self.words = words_of(self.request, self.traced)
        annotator = annotator_of(self.traced)
        self.found = {one: points_of(self.request, annotator, one) for one in layouts(self.words)}
        spec = self.request.cluster.one_kind
        capacity = _capacity(draw, set().union(*self.found.values()), spec.room_bytes)
        device = replace(spec.device, memory_bytes=capacity)
        self.request = replace(self.request, cluster=replace(spec, device=device))
        try:
            self.answer = api.plan_traced(self.traced, self.request, time_limit_s, processes=1)
        except AutoparError as error:
            self.answer = error
        self._compare(capacity)

    def __str__(self) -> str:
        ask = self.request
        place, software = ask.cluster.one_kind.topology, ask.software.state_recipe or "default"
        return (
            f"{ask.model_name} on {place.nodes}x{place.devices_per_node} {ask.cluster.device.name} of "
            f"{ask.cluster.device.memory_bytes} bytes, batch {ask.global_batch}, {ask.precision}, "
            f"recipe {software}, pins {pin_text(ask.pin) or 'none'}: {len(self.found)} layouts, "
            f"{sum(map(len, self.found.values()))} points, {' '.join(sorted(self.kinds))}"
        )

    def _compare(self, capacity: int) -> None:
        fitting = {one: best(of, capacity) for one, of in self.found.items()}
        fits = {one: point for one, point in fitting.items() if point is not None}
        first = min(fits, key=lambda one: fits[one].time_s, default=None)
        if not isinstance(self.answer, Plan):
            proven = not isinstance(self.answer, NoPlanFits) or self.answer.proven
            self.kinds |= {"none" if proven else "open"}
            if proven and first is not None:
                self.refuted.append(f"none: {one_line(self.answer)}; but {_words(first, fits[first])}")  # fmt: skip
        elif first is None:
            self.refuted.append(f"price: no point fits, and the plan is {self.answer.mesh}")
        else:
            self._count(first, fits[first])
            self._check(self.answer, first, fits)

    def _count(self, first: Layout, point: Point) -> None:
        """The kinds of a task by its best point."""
        batch, free = self.request.global_batch, best(set().union(*self.found.values()))
        assert free is not None
        named = {
            "memory": free.time_s < point.time_s * (1 - CLOSE),
            "whole": any(one.micro_batch == batch for one in self.found),
            "one": first.micro_batch * first.dp == batch,
            "pipeline": first.pp > 1,
            "zero": first.zero > 0,
            "recompute": isinstance(self.answer, Plan) and self.answer.recompute != "none",
            "axes": first.tp > 1 or first.cp > 1 or first.ep > 1,
            "offload": first.offload != "none",
        }
        self.kinds |= {kind for kind, holds in named.items() if holds}

    def _check(self, plan: Plan, first: Layout, fits: Mapping[Layout, Point]) -> None:
        proof, point = plan.certificate, fits[first]
        if {rule["choice"]: rule["values"] for rule in proof.rules} != self.words:
            self.refuted.append("words: the certificate prints others")
        by_key = {_key(one): one for one in self.found}
        listed = dict[tuple[Any, ...], float]()
        for entry in proof.meshes:  # pinned stages have one for each recompute mode
            bound_s = inf if entry["outcome"] == "infeasible" else entry["bound_s"] or 0.0
            key = _listed_key(entry)
            listed[key] = min(listed.get(key, inf), bound_s)
        if by_key.keys() != listed.keys():
            odd = sorted(by_key.keys() ^ listed.keys())
            self.refuted.append(f"listed: {len(odd)} layouts differ, such as {odd[0]}")
        if proof.bound_s > point.time_s * (1 + CLOSE):
            self.refuted.append(f"bound: {proof.bound_s} s, and {_words(first, point)}")
        for key in by_key.keys() & listed.keys():
            one = by_key[key]
            if one in fits and listed[key] > fits[one].time_s * (1 + CLOSE):
                self.refuted.append(f"candidate: {listed[key]} s; {_words(one, fits[one])}")
        taken_s, held = proof.objective_s, max(plan.predicted.peak_memory_bytes)
        self.kinds |= {"optimal" if proof.status == "optimal" else "open"}
        if taken_s <= point.time_s * (1 + CLOSE):
            self.kinds |= {"equal"}
        elif proof.status == "optimal" and taken_s > point.time_s * (1 + PROVED):
            self.refuted.append(f"slower: {taken_s} s, {proof.status}; {_words(first, point)}")
        own = by_key.get(_plan_key(plan))
        same = [p for p in self.found.get(own, ()) if abs(p.time_s - taken_s) <= CLOSE * taken_s and p.size_bytes == held]  # fmt: skip
        if not same:
            self.refuted.append(f"price: no point of {own} takes {taken_s} s and {held} bytes")


def points_of(request: PlanRequest, annotator: Annotator, one: Layout) -> set[Point]:
    """(seconds, bytes) of every point of a layout."""
    rows = request.global_batch // one.dp
    mesh = MeshShape(one.pp, one.dp, one.cp, one.tp, one.ep, one.order)
    base = Candidate(mesh, one.micro_batch, rows // one.micro_batch, one.zero, "none", shard=one.shard,
                     offload=one.offload, stage_sizes=one.sizes)  # fmt: skip
    found = set[Point]()
    for name, count in one.schedules or (("none", 1),):
        models = dict[str, AnnotatedModel]()
        for mode in one.modes:
            candidate = replace(base, recompute=mode, schedule=name, stages_per_rank=count)
            model = annotator.annotate(setting_of(candidate, request))
            models |= {} if model in models.values() else {mode: model}
        for some in [models] if one.mixed else [{mode: model} for mode, model in models.items()]:
            found |= points(some, ((name, count),), one.sizes, lean_placements)
    return found


def _capacity(draw: random.Random, everything: set[Point], most: int) -> int:
    """Bytes of a device: those of a point that is smaller than the fastest, one byte too few for any
    point, or `most`.
    """
    sizes, chance = sorted({point.size_bytes for point in everything}), draw.random()
    if not sizes or chance < 0.1:
        return most
    if chance < 0.18:
        return sizes[0] - 1
    fastest = best(everything)
    return draw.choice([size for size in sizes if fastest and size < fastest.size_bytes] or sizes)


def _key(one: Layout) -> tuple[Any, ...]:
    mesh = MeshShape(one.pp, one.dp, one.cp, one.tp, one.ep, one.order)
    return (*mesh.as_dict().values(), one.micro_batch, one.zero, one.shard)


def _listed_key(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    return (*MeshShape(**entry["mesh"]).as_dict().values(), entry["micro_batch"], entry["zero"], entry["shard"])  # fmt: skip


def _plan_key(plan: Plan) -> tuple[Any, ...]:
    return (*plan.mesh.as_dict().values(), plan.micro_batch, plan.zero, plan.shard)


def _words(one: Layout, point: Point) -> str:
    return f"{point.time_s} s, {point.size_bytes} bytes fit: {one}"


KINDS = {
    "task": "tasks",
    "none": "of which nothing fits, or pins are refused, as it says",
    "optimal": "plans proved optimal",
    "open": "not proved",
    "equal": "plans with the seconds of the best point",
    "memory": "bound by memory: the fastest point does not fit",
    "whole": "with a micro-batch of the whole batch in the space",
    "one": "of which the best point has one micro-batch",
    "pipeline": "of which it is a pipeline",
    "zero": "of which it has ZeRO",
    "recompute": "of which the plan recomputes",
    "axes": "of which it has tp, cp or ep",
    "offload": "of which it offloads",
    "pins": "with pins",
}  # fmt: skip


@click.command()
@click.option("--tasks", default=400, show_default=True, help="How many random tasks.")
@click.option("--first", default=0, show_default=True, help="Seed of the first.")
@click.option("--time-limit", default=30.0, show_default=True, help="Seconds for each plan.")
@click.option("--verbose", is_flag=True, help="Print a line for each task.")
def main(tasks: int, first: int, time_limit: float, verbose: bool) -> None:
    """Plan random small tasks, and compare each plan with every point of its printed space. Print
    what is refuted, and counts. The exit code is 1 if anything is refuted.
    """
    start, kinds, priced, refuted = time.perf_counter(), Counter[str](), 0, 0
    for seed in range(first, first + tasks):
        draw = random.Random(seed)
        request = random_task(draw)
        trial = Trial(request, traced_of(request.model_name))
        trial.run(draw, time_limit)
        kinds.update(trial.kinds | ({"pins"} if request.pin else set()))
        priced += sum(map(len, trial.found.values()))
        refuted += bool(trial.refuted)
        if verbose or trial.refuted:
            print(f"seed {seed}: {trial}", *trial.refuted, sep="\n    ", flush=True)
    print("\n".join(f"{kinds[kind]:8}  {words}" for kind, words in KINDS.items()))
    print(f"{priced:8}  points priced (those of a layout that cost the same, once)")
    print(f"{refuted:8}  tasks refuted\n  {time.perf_counter() - start:.0f} s")
    sys.exit(bool(refuted))


if __name__ == "__main__":
    main()
