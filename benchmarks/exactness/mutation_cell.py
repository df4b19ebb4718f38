"""One cell of the mutation matrix: every mutation of one program, one at a time, on a pool of
workers that is used again.

A mutant may leave ranks waiting for each other for ever. Then the pool gives up, which counts as
caught, and starts anew. The state of its ranks is lost, so that each rank makes its engine again.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from autopar.ir.plan import Plan
from autopar.runtime.ranks.launch import WorkerError, WorkerPool
from benchmarks.exactness.mutations import (
    DIFFERS,
    EXACT,
    RAISED,
    REJECTED,
    STUCK,
    Mutation,
    Source,
    Trial,
    damaged,
    mutations_of,
)

PREPARE_TIMEOUT_S = 180.0
TIMEOUT_S, SLOWER = 10.0, 40
"""When a mutant counts as stuck: after TIMEOUT_S seconds, or after SLOWER times the seconds of a
step of the undamaged program.
"""


@dataclass(frozen=True, slots=True)
class MutationCell:
    """The verdicts on all mutations of one program: how many there were, and how many the verifier
    rejected, differed, raised or got stuck.

    `no_ops` counts those that provably change nothing, `inside` those of messages inside special
    lowerings. `same` lists those whose backward was seen to return the right gradients before they
    ran. `escaped` lists the others that nothing noticed. `wrong` lists those that were predicted to
    change nothing and did. `message` says why there is no program.
    """

    model: str
    mesh: str
    mutations: int = 0
    rejected: int = 0
    differ: int = 0
    raised: int = 0
    stuck: int = 0
    no_ops: int = 0
    inside: int = 0
    same: tuple[str, ...] = ()
    escaped: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()
    message: str = ""
    time_s: float = 0.0

    @property
    def ok(self) -> bool:
        return not (self.escaped or self.wrong or self.message)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_mutations(
    pool: WorkerPool,
    source: Source,
    plan: Plan,
    every: int = 1,
    start: int = 0,
    progress: Callable[[Mutation, str], None] | None = None,
) -> list[tuple[Mutation, str]]:
    """(mutation, verdict) of every `every`-th mutation of the program of `plan`, from index `start`
    on. A verdict is EXACT, DIFFERS, REJECTED, RAISED or STUCK.

    `source` makes the case on the workers; `progress` is called with each result. Raises
    RuntimeError if the program itself is not exact, before or after.
    """
    text, found = plan.to_json(), []
    mutations, step_s = pool.run(_prepare, source, text, timeout_s=PREPARE_TIMEOUT_S)[0]
    timeout_s, healthy = max(TIMEOUT_S, SLOWER * step_s), True
    for mutation in itertools.islice(mutations, start, None, every):
        if not healthy:
            pool.run(_prepare, source, text, timeout_s=PREPARE_TIMEOUT_S)
        try:
            verdicts = pool.run(_mutant, text, mutation, timeout_s=timeout_s)
            verdict, healthy = next((v for v in verdicts if v != EXACT), EXACT), True
            if verdict == RAISED:  # messages may be under way
                healthy = set(pool.run(_mutant, text, None, timeout_s=timeout_s)) == {EXACT}
                if not healthy:
                    pool.close()
        except WorkerError:
            verdict, healthy = STUCK, False
        found.append((mutation, verdict))
        if progress is not None:
            progress(mutation, verdict)
    if healthy and (
        verdicts := set(pool.run(_mutant, text, None, timeout_s=PREPARE_TIMEOUT_S))
    ) != {EXACT}:
        raise RuntimeError(
            f"the program after all mutations are undone: {', '.join(sorted(verdicts))}"
        )
    return found


def judged(
    model: str, mesh: str, found: list[tuple[Mutation, str]], start_s: float
) -> MutationCell:
    """The results of `run_mutations` as a cell: counts of verdicts, and the mutations that escaped.
    It began at `start_s` of `time.perf_counter`.
    """
    predicted = [
        (mutation, verdict) for mutation, verdict in found if mutation.no_op or mutation.same
    ]
    others = [
        (mutation, verdict) for mutation, verdict in found if not (mutation.no_op or mutation.same)
    ]
    counted = [verdict for _, verdict in others]
    return MutationCell(
        model,
        mesh,
        len(found),
        counted.count(REJECTED),
        counted.count(DIFFERS),
        counted.count(RAISED),
        counted.count(STUCK),
        sum(mutation.no_op for mutation, _ in found),
        sum(mutation.message is not None for mutation, _ in found),
        tuple(f"{mutation.same}: {mutation}" for mutation, _ in predicted if not mutation.no_op),
        tuple(str(mutation) for mutation, verdict in others if verdict == EXACT),
        tuple(f"{mutation}: {verdict}" for mutation, verdict in predicted if verdict != EXACT),
        time_s=time.perf_counter() - start_s,
    )


# ---------------------------------------------------------------------------------------------------------------- one rank

_trials: dict[str, Trial] = {}
"""The trial of this worker, by its plan. There is only one, since a model is under one plan at a
time.
"""


def _prepare(rank: int, source: Source, plan: str) -> tuple[list[Mutation], float]:
    """Make this rank's engine for the plan (JSON text), keep it for `_mutant`, and check that the
    program trains exactly. Returns (its mutations on rank 0, [] elsewhere; seconds of training).
    """
    _trials.clear()
    trial = _trials[plan] = Trial.of(source[0](*source[1:]), Plan.from_json(plan))
    mutations, start = mutations_of(trial), time.perf_counter()
    verdict = trial.outcome()
    if verdict != EXACT:
        raise RuntimeError(f"the program after it was looked at: {verdict}")
    return mutations if rank == 0 else [], time.perf_counter() - start


def _mutant(rank: int, plan: str, mutation: Mutation | None) -> str:
    """The verdict of this rank on a mutant, or on the program itself if None. The verifier runs
    only if something is deleted or doubled: it checks shapes, which backwards do not change.
    """
    trial = _trials[plan]
    if mutation is None:
        return trial.outcome(verify=False)
    with damaged(trial.engine, mutation):
        return trial.outcome(
            verify=mutation.kind in ("delete", "double") and mutation.message is None
        )
