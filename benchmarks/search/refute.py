"""Random pins that try to refute what the planner says about random requests.

    python benchmarks/search/refute.py [--seed 0] [--first 0] [--requests 60] [--pins 10]
                                       [--time-limit 20] [--pin-limit 6] [--processes 1]
                                       [--minutes 600]

Each request is planned with the defaults of the command line. Then it is planned again, with
tolerance 0, under random pins that agree with a candidate of its search space. These plans test:

- bound: no plan under pins takes less than the certificate's lower bound.
- candidate: the same for the bound of its own candidate, and none fits in an infeasible one.
- family: the same for the bounds of the runners-up, and none fits where none is said to fit.
- list: no solved candidate of the certificate is faster than the best plan of its family.
- no plan: if it is proved that no plan fits, none fits under pins.
- refusal: pins that agree with a candidate are not refused, however they are spelled.
- traceback: no error but AutoparError.

Some pins lift a limit of the search space, such as that on the order of the mesh. Plans outside it
are counted, and test nothing. A line is printed for each request, one for each refuted claim, and
one for each pin that is 2 % faster than a plan that is not proved.
Then a table says how much faster a plan under pins was than the plan, and than the best of its
family. The exit code is 1 if a claim is refuted.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

if not __package__:  # as a script
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from autopar import api
from autopar.errors import AutoparError, NoLayout, NoPlanFits, one_line
from autopar.explaining.runners_up import none_words
from autopar.ir.mesh import DEGREES, MeshShape
from autopar.ir.plan import Plan
from autopar.planning.candidates import candidates_for
from autopar.request.options import TOLERANCE
from autopar.request.pins import pin_text
from autopar.request.plan_request import PlanRequest
from autopar.solve.costs.candidate import Candidate
from autopar.solve.search.families import family_of
from autopar.text.plan_words import short_words
from autopar.text.units import gap_words, ms
from benchmarks.search.random_requests import MODELS, Asked, random_pins, random_request, respelled

ROUNDING = 1e-6
"""The fraction by which a time may be below a bound: bounds are proved up to 1e-9, and times are
quantized.
"""
_OPTIONS = {
    "seed": 0, "first": 0, "requests": 60, "pins": 10, "time-limit": 20, "pin-limit": 6, "processes": 1,
    "minutes": 600,
}  # fmt: skip


@dataclass(slots=True)
class Trial:
    """A request, its `answer` (a plan or an error, None after a traceback), and what plans under pins
    say about it. Each of these is searched for `pin_s` seconds. `faster` has the fraction by which
    one was faster than 'plan', or than the best of a family, 1 if that has none.
    """

    asked: Asked
    pin_s: float
    processes: int
    space: Sequence[Candidate] = ()
    answer: Plan | AutoparError | None = None
    seconds: float = 0.0
    tried: int = 0
    feasible: int = 0
    outside: int = 0
    refuted: list[str] = field(default_factory=list)
    better: list[str] = field(default_factory=list)
    faster: dict[str, float] = field(default_factory=dict)

    def run(self, draw: random.Random, pins: int, time_limit_s: float) -> None:
        """Plans the request, then under `pins` random pins."""
        try:
            request, traced = self.asked.request(), self.asked.traced()
        except AutoparError as error:  # what cannot be captured, or a wrong pin
            self.answer = error
            return
        start = time.perf_counter()
        self.answer = self._planned(request, time_limit_s)
        self.seconds = time.perf_counter() - start
        if not isinstance(self.answer, Plan | NoPlanFits):
            return
        self.space = candidates_for(request, traced)
        if isinstance(self.answer, Plan):
            self._check_list(self.answer)
        free = replace(request, tolerance=0.0, runners_up=False)
        for _ in range(pins):
            candidate = self._candidate(draw)
            self._try(free, random_pins(candidate, draw))

    def _planned(self, request: PlanRequest, limit_s: float) -> Plan | AutoparError | None:
        """The plan of a request, or why there is none. A traceback refutes, and None is returned."""
        try:
            return api.plan_traced(self.asked.traced(), request, limit_s, processes=self.processes)
        except AutoparError as error:
            return error
        except Exception as error:
            at = traceback.extract_tb(error.__traceback__)[-1]
            self.refuted.append(f"traceback: {request.pin}: {error!r} at {at.filename}:{at.lineno}")
            return None

    def _candidate(self, draw: random.Random) -> Candidate:
        """A random candidate: of a family without a plan, near the plan or a runner-up, or any."""
        if not isinstance(self.answer, Plan):
            lean = [c for c in self.space if c.zero == 3 or c.mesh.pp > 1]
            return draw.choice(lean if lean and draw.random() < 0.7 else self.space)
        others = self.answer.certificate.runners_up
        without = {entry["family"] for entry in others if entry["time_s"] is None}
        bare = [c for c in self.space if family_of(c) in without]
        if bare and draw.random() < 0.4:
            return draw.choice(bare)
        meshes = [MeshShape(**entry["mesh"]) for entry in others if entry["mesh"]]
        mesh, far = draw.choice([self.answer.mesh, *meshes]), draw.choice((0, 0, 2))
        close = [c for c in self.space if _apart(c.mesh, mesh) == far]
        return draw.choice(close if close and draw.random() < 0.8 else self.space)

    def _try(self, free: PlanRequest, pin: Mapping[str, Any]) -> None:
        """Plans under pins, which agree with a candidate, and checks each claim."""
        self.tried += 1
        found, words = self._planned(self.asked.pinned(free, pin), self.pin_s), pin_text(pin)
        if isinstance(found, AutoparError):
            if not isinstance(found, NoPlanFits):
                self.refuted.append(f"refusal: {words}: {one_line(found)}")
            elif not found.proven:
                return
            other = respelled(pin, free.cluster.num_devices)
            again = self._planned(self.asked.pinned(free, other), self.pin_s)
            if isinstance(again, Plan):
                self.refuted.append(f"refusal: {words}: {one_line(found)}; but {pin_text(other)}")
            found = again
        if isinstance(found, Plan):
            self.feasible += 1
            self._check(found, words)

    def _check(self, found: Plan, words: str) -> None:
        """Checks what is said about the request against a plan under pins."""
        staging = (found.schedule, len(found.stages) // found.mesh.pp)
        own = [c for c in self.space if _key(c) == _key(found)]
        own = [c for c in own if not c.schedules or staging in c.schedules]
        if not own:
            self.outside += 1
            return
        taken_s, family = found.certificate.objective_s, family_of(own[0])
        said = f"{words}: {ms(taken_s)} ({short_words(found)})"
        if not isinstance(self.answer, Plan):
            if isinstance(self.answer, NoPlanFits) and self.answer.proven:
                self.refuted.append(f"no plan: {said} fits")
            return
        proof = self.answer.certificate
        self._faster("plan", taken_s, proof.fastest_s)
        if taken_s < (1 - TOLERANCE) * proof.fastest_s:
            self.better.append(f"faster: {said}")
        listed = [_bound_s(one) for one in proof.meshes if _key(_named(one)) == _key(found)]
        bounds = {"bound": proof.bound_s, "candidate": min(listed, default=0.0)}
        for entry in proof.runners_up:
            if entry["family"] == family:
                bounds["family"] = _bound_s(entry)
                name = family if entry["time_s"] else f"{family}, {none_words(entry)}"
                self._faster(name, taken_s, entry["time_s"] or inf)
        for claim, bound_s in bounds.items():
            if taken_s < (1 - ROUNDING) * bound_s:
                self.refuted.append(f"{claim}: {said} is below {_bound_words(bound_s)} ({family})")

    def _faster(self, name: str, taken_s: float, said_s: float) -> None:
        share = 1.0 if said_s == inf else max(1 - taken_s / said_s, 0.0)
        self.faster[name] = max(self.faster.get(name, 0.0), share)

    def _check_list(self, plan: Plan) -> None:
        """Checks that no candidate of the certificate is faster than the best of its family."""
        solved = dict[str, float]()
        for entry in plan.certificate.meshes:
            family = family_of(_named(entry))
            solved[family] = min(solved.get(family, inf), entry["time_s"] or inf)
        for entry in plan.certificate.runners_up:
            best_s, least_s = entry["time_s"] or inf, solved.get(entry["family"], inf)
            if least_s < (1 - ROUNDING) * best_s:
                best = ms(best_s) if entry["time_s"] else none_words(entry)
                self.refuted.append(f"list: {entry['family']} has {ms(least_s)}, its best: {best}")

    def __str__(self) -> str:
        if isinstance(self.answer, Plan):
            time_s, gap = self.answer.predicted.step_time_s, self.answer.certificate.gap
            words = f"{short_words(self.answer)}: {ms(time_s)}, gap {gap_words(gap)}"
        else:
            proven = isinstance(self.answer, NoPlanFits) and self.answer.proven
            words = f"{'proved: ' * proven}{str(self.answer)[:90]}"
        counts = f"pins {self.tried}, feasible {self.feasible}, outside {self.outside}"
        return (
            f"{self.asked} | {words}, {self.seconds:.1f} s | {counts}, refuted {len(self.refuted)}"
        )


def _key(c: Any) -> tuple[Any, ...]:
    """What tells a plan or candidate from others, but for recomputation and stages."""
    return (*c.mesh.as_dict().values(), c.micro_batch, c.zero, c.shard)


def _named(entry: Mapping[str, Any]) -> Any:
    """An entry of a certificate with the names of a candidate."""
    return SimpleNamespace(**{**entry, "mesh": MeshShape(**entry["mesh"])})


def _bound_s(entry: Mapping[str, Any]) -> float:
    return inf if entry["bound_s"] is None else entry["bound_s"]


def _bound_words(bound_s: float) -> str:
    return "none fits" if bound_s == inf else ms(bound_s)


def _apart(one: MeshShape, other: MeshShape) -> int:
    """The number of degrees in which two meshes differ."""
    return sum(getattr(one, name) != getattr(other, name) for name in DEGREES)


def summary(trials: Sequence[Trial]) -> Iterator[str]:
    """Lines with what was refuted, by claim, and how much faster plans under pins were."""
    proofs = [trial.answer.certificate for trial in trials if isinstance(trial.answer, Plan)]
    optimal = sum(proof.status == "optimal" for proof in proofs)
    none = sum(isinstance(trial.answer, NoPlanFits) for trial in trials)
    refused = sum(isinstance(trial.answer, NoLayout) for trial in trials)
    yield f"{len(trials)} requests: {len(proofs)} plans, {optimal} optimal; {none} do not fit, {refused} refused"
    counts = [
        sum(getattr(trial, name) for trial in trials) for name in ("tried", "feasible", "outside")
    ]
    yield "pins: {} tried, {} feasible, {} of these outside the space".format(*counts)
    refuted = Counter(words.partition(":")[0] for trial in trials for words in trial.refuted)
    yield f"refuted: {', '.join(f'{claim} {n}' for claim, n in refuted.items()) or 'nothing'}"
    yield f"{'faster under pins than':52s}{'tested':>8s}{'> 0':>8s}{'> 2 %':>8s}{'> 10 %':>8s}{'most':>9s}"
    for name in sorted({name for trial in trials for name in trial.faster}):
        shares = [trial.faster[name] for trial in trials if name in trial.faster]
        over = "".join(f"{sum(s > limit for s in shares):8d}" for limit in (ROUNDING, 0.02, 0.1))
        yield f"{name:52s}{len(shares):8d}{over}{max(shares):9.1%}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in _OPTIONS.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--models", nargs="*", default=tuple(MODELS), metavar="NAME")
    args = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    trials, until = [], time.perf_counter() + 60 * args.minutes
    for number in range(args.first, args.first + args.requests):
        if time.perf_counter() > until:
            break
        draw = random.Random(f"{args.seed}/{number}")
        trial = Trial(random_request(draw, args.models), args.pin_limit, args.processes)
        trial.run(draw, args.pins, args.time_limit)
        print(
            number,
            trial,
            *(f"\n      {words}" for words in (*trial.refuted, *trial.better)),
            flush=True,
        )
        trials.append(trial)
    print("", *summary(trials), sep="\n")
    return int(any(trial.refuted for trial in trials))


if __name__ == "__main__":
    sys.exit(main())
