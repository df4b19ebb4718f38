"""Whether fused programs train as the unfused ones, and as one device, under meshes of two processes.

A tiny model is traced in fp64 and trained on one device in eager mode, once. Under each mesh two
processes then train the mesh's programs of `MODES` one after the other, with the same weights,
batches and micro-batches. Each program is compared with the single device, and each fused program
with the unfused program of its mesh. A bug of the mesh that fused and unfused programs share shows
only in the first comparison.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from autopar.api import plan as make_plan
from autopar.ir.plan import Plan
from autopar.models.base import ModelSpec
from autopar.runtime.ranks.launch import WorkerError, run_workers
from autopar.verify.verify import (
    Case,
    Setup,
    compare_training,
    expected_of,
    free_network,
    make_case,
    make_engine,
    relative_error,
)

PRECISION, STEPS, SEQ, ROWS, NPROC = "fp64", 3, 12, 4, 2
FIRST_LOSS, UPDATE = 1e-12, 1e-9
"""What training may differ by, relative to the loss and to the update of three steps."""
MODES = ("off", "all", "head")
"""What is fused in the programs that train. `head` is left out if no head can be fused."""
MESHES = {
    "dp=2": {"dp": 2, "tp": 1},
    "tp=2": {"dp": 1, "tp": 2},
    "cp=2": {"dp": 1, "tp": 1, "cp": 2},
    "pp=2": {"dp": 1, "tp": 1, "pp": 2, "schedule": "1f1b"},
}
"""By name, the pins of the meshes under which programs train."""
_COMMON = {"pp": 1, "zero": 0, "recompute": "none"}
"""Pins of every plan: what a search would choose otherwise, and fusion does not depend on."""


@dataclass(frozen=True, slots=True)
class Errors:
    """The relative error of the first loss and the update-relative error of all steps, with the
    tensor that has the latter.
    """

    first_loss: float
    update: float
    tensor: str

    @property
    def small(self) -> bool:
        """Whether both are within `FIRST_LOSS` and `UPDATE`; no if they are NaN."""
        return self.first_loss <= FIRST_LOSS and self.update <= UPDATE


@dataclass(frozen=True, slots=True)
class Trained:
    """One program that trained: `ops` counts its fused ops, once for each block class.

    Attributes:
        ops: the number of fused ops.
        whole: its errors against one device.
        unfused: its errors against the unfused program of the mesh; None for that program.
    """

    ops: int
    whole: Errors
    unfused: Errors | None = None

    @classmethod
    def of(cls, data: dict[str, Any]) -> Trained:
        """The object that `dataclasses.asdict` made `data` of."""
        unfused = data["unfused"]
        return cls(data["ops"], Errors(**data["whole"]), unfused and Errors(**unfused))


@dataclass(frozen=True, slots=True)
class MeshRun:
    """What training under one mesh gave, by mode: errors, or the reason why there are none.

    A reason begins with the kind of error; 'AutoparError' is a refusal of autopar. If the unfused
    program has a reason, no other program was run.

    If an error is not small, `one_step` has the errors of the update of a single step against one
    device. Rounding that a model enlarges from step to step is small there; a bug is not.
    """

    trained: dict[str, Trained] = field(default_factory=dict)
    untrained: dict[str, str] = field(default_factory=dict)
    time_s: float = 0.0
    one_step: dict[str, float] = field(default_factory=dict)


def reason_of(error: BaseException) -> str:
    """The kind of an error and its text, in at most 300 characters; of the traceback of a process
    the last line.
    """
    lines = str(error).strip().splitlines() or [""]
    if isinstance(error, WorkerError):
        return lines[-1].strip()[:300]
    return f"{type(error).__name__}: {' '.join(lines)}"[:300]


def setup_of(spec: ModelSpec) -> Setup:
    """The settings of training a model. Its sequences have `SEQ` tokens, or fewer if it has fewer
    positions.
    """
    return Setup(spec, PRECISION, STEPS, min(SEQ, spec.max_seq or SEQ), ROWS)


def trained_under(setup: Setup, mesh: str) -> MeshRun:
    """What training the model of `setup` under a mesh, a name of `MESHES`, gave. Errors become
    reasons, except those of one device.
    """
    start, case = time.perf_counter(), make_case(setup)
    try:
        unfused = _planned(setup, case, MESHES[mesh] | {"fuse": "off"})
    except Exception as error:  # whatever planning raises is the answer
        return MeshRun(untrained={"off": reason_of(error)}, time_s=time.perf_counter() - start)
    plans, untrained = {"off": unfused}, {}
    shared = MESHES[mesh] | {"micro_batch": unfused.micro_batch}
    for mode in MODES[1:]:
        try:
            plan = _planned(setup, case, shared | {"fuse": mode})
            if mode != "head" or plan.fusion.keeps_no_logits:
                plans[mode] = plan
        except Exception as error:
            untrained[mode] = reason_of(error)
    found = _run(setup, case, plans)
    pairs = [(one.whole, one.unfused or one.whole) for one in found.trained.values()]
    one_step: dict[str, float] = {}
    if setup.steps > 1 and not all(errors.small for pair in pairs for errors in pair):
        first = trained_under(replace(setup, steps=1), mesh).trained
        one_step = {mode: one.whole.update for mode, one in first.items()}
    time_s = time.perf_counter() - start
    return MeshRun(found.trained, untrained | found.untrained, time_s, one_step)


def _planned(setup: Setup, case: Case, pins: dict[str, Any]) -> Plan:
    return make_plan(
        case.model,
        free_network(NPROC),
        case.batches[0],
        setup.rows,
        _COMMON | pins,
        precision=setup.precision,
        traced=case.traced,
    )


def _run(setup: Setup, case: Case, plans: dict[str, Plan]) -> MeshRun:
    """The outcome of all programs of one mesh, in one set of processes. If that fails, each program
    runs with the unfused one alone, so that one failure hides no other.
    """
    after, losses = expected_of(setup, case, plans["off"])
    texts = {mode: plan.to_json() for mode, plan in plans.items()}

    def run(modes: Sequence[str]) -> dict[str, Trained]:
        chosen = {mode: texts[mode] for mode in modes}
        ranks = run_workers(rank_errors, NPROC, (setup, chosen, after, losses))
        counts = {mode: len(plans[mode].fusion.fused) for mode in modes}
        return {mode: _worst([rank[mode] for rank in ranks], counts[mode]) for mode in modes}

    return run_apart(run, list(plans))


def run_apart(run: Callable[[Sequence[str]], dict[str, Trained]], modes: list[str]) -> MeshRun:
    """The outcome of `run(modes)`, by mode. If that raises, of 'off' alone, then of each other mode
    after it; if 'off' alone raises, its reason is the only one.
    """
    try:
        return MeshRun(run(modes))
    except Exception:
        trained: dict[str, Trained] = {}
        untrained: dict[str, str] = {}
        for mode in modes:
            try:
                trained |= run(["off", mode] if mode != "off" else ["off"])
            except Exception as error:
                untrained[mode] = reason_of(error)
                if mode == "off":
                    break
        return MeshRun(trained, untrained)


Found = tuple[Errors, Errors | None]
"""(errors against one device, errors against the unfused program)."""


def _worst(ranks: Sequence[Found], ops: int) -> Trained:
    """The errors of the worst rank in each comparison."""
    unfused = [found for _, found in ranks if found is not None]
    return Trained(
        ops, _largest([whole for whole, _ in ranks]), _largest(unfused) if unfused else None
    )


def _largest(errors: Sequence[Errors]) -> Errors:
    worst = max(errors, key=lambda error: error.update)
    return replace(worst, first_loss=max(error.first_loss for error in errors))


def rank_errors(
    rank: int,
    setup: Setup,
    plans: dict[str, str],
    after: dict[str, Tensor],
    losses: tuple[float, ...],
) -> dict[str, Found]:
    """By mode, the errors of this process, which trains the case of `setup` under each of `plans`
    (JSON text by mode, 'off' first). `after` and `losses` are those of one device. Every rank must
    call it. `rank` is not read.
    """
    case = make_case(setup)
    found: dict[str, Found] = {}
    first, unfused = 0.0, dict[str, Tensor]()
    for mode, text in plans.items():
        engine = make_engine(replace(case, model=copy.deepcopy(case.model)), Plan.from_json(text))
        own = [float(engine.step(engine.local_batch(batch))) for batch in case.batches]
        state = engine.full_state_dict()
        update, tensor = compare_training(case.before, after, state, setup.precision)
        whole = Errors(relative_error(own[0], losses[0]), update, tensor)
        if mode == "off":
            first, unfused = own[0], {name: state[name].clone() for name in after}
            found[mode] = whole, None
        else:
            update, tensor = compare_training(case.before, unfused, state, setup.precision)
            found[mode] = whole, Errors(relative_error(own[0], first), update, tensor)
    return found
