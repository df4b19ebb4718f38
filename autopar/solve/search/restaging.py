"""Solves single candidates again after a search, in one process and in a fixed order, so that equal
requests give equal plans.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from math import inf

from autopar.ir.annotated import AnnotatedModel
from autopar.solve.bounds.cell import Cell
from autopar.solve.costs.candidate import Candidate
from autopar.solve.costs.schedule import Schedule
from autopar.solve.integer_program.lp_relaxation import least_static_by_class
from autopar.solve.search.candidate_models import ModelOf
from autopar.solve.search.candidate_state import chosen_of
from autopar.solve.search.staged_placement import Staged
from autopar.solve.search.uniform_solver import ALONE, UniformSolver

_LIMIT_S = 10.0
"""Seconds after which a candidate that has a plan gets no more placements staged. Far more than one
needs, so that time decides nothing.
"""


@dataclass(frozen=True, slots=True)
class Restaged:
    """A candidate with its choices, and its plan."""

    candidate: Candidate
    staged: Staged

    @property
    def time_s(self) -> float:
        """Seconds of a step."""
        return self.staged.solution.time_s

    @property
    def memory_bytes(self) -> int:
        """Peak bytes of the fullest device."""
        return self.staged.solution.memory_bytes


@dataclass(frozen=True, slots=True)
class Part:
    """Some plans of candidates that are solved together: those with one of the recompute `modes` of
    layers, and one of `schedules`.
    """

    group: tuple[Candidate, ...]
    modes: tuple[str, ...]
    schedules: tuple[Schedule, ...]


@dataclass(slots=True)
class Restager:
    """Bounds and solves parts of candidates of one search.

    `annotate` and `cell_of` are those of `search`. `capacity_bytes` is the memory that a plan may
    take (None: unlimited). `cells` is a cache.
    """

    annotate: Callable[[Candidate], AnnotatedModel]
    capacity_bytes: int | None
    cell_of: Callable[[Candidate], Hashable]
    cells: dict[Hashable, Cell] = field(default_factory=dict)

    def solver(self, part: Part) -> UniformSolver:
        """A new solver of `part`. Its result does not depend on what was solved before."""
        annotate = self.annotate  # a cell that held `self` would live until cycles are looked for

        def model_of(candidate: Candidate) -> ModelOf:
            return cache(lambda mode: annotate(replace(candidate, recompute=mode)))

        first, *others = map(model_of, part.group)
        key = self.cell_of(part.group[0]), part.modes
        cell = self.cells.setdefault(key, Cell(first, part.modes))
        cell.forget_likely_price()
        return UniformSolver(
            first, part.modes, part.schedules, self.capacity_bytes, cell, tuple(others)
        )

    def solved(
        self, part: Part, solver: UniformSolver, upper_bound_s: float, until: float = inf
    ) -> tuple[Restaged | None, float]:
        """(a plan of `part` that takes less than `upper_bound_s`, or None; a lower bound in seconds
        on all its plans). `solver` is that of the part, with raised bounds. `until` is the time by
        `time.perf_counter()` from which no more placements are staged once there is a plan.
        """
        limit_s = min(_LIMIT_S, max(until - time.perf_counter(), 0.0))
        staged, bound_s = solver.solve(upper_bound_s, limit_s)
        found = None if staged is None else Restaged(chosen_of(part.group, staged), staged)
        return found, bound_s

    def likely_s(self, part: Part) -> float:
        """An estimate of the step seconds of the best plan of `part`; infinite if what its
        parameters need does not fit.
        """
        solver, candidate = self.solver(part), part.group[0]
        solver.bounds.glance(candidate.num_microbatches)
        model = solver.models.least_of(part.modes[0])
        static, cell = least_static_by_class(model), solver.bounds.cell
        segments_bytes = sum(static[index] for index in cell.first.segments)
        least_bytes = model.fixed_bytes + segments_bytes // candidate.mesh.pp + cell.moment_bytes
        if self.capacity_bytes is not None and least_bytes > self.capacity_bytes:
            return inf
        _, likely_s = solver.bounds.raise_by_cell(
            static, model.fixed_bytes, candidate.num_microbatches, inf
        )
        return likely_s


def parts_of(group: Sequence[Candidate]) -> Part:
    """All plans of candidates that are solved together."""
    first = group[0]
    names = first.schedules or ((first.schedule, first.stages_per_rank),)
    of_candidate = partial(_schedule, first)
    return Part(tuple(group), first.modes, tuple(of_candidate(*named) for named in names))


def _schedule(candidate: Candidate, name: str, count: int) -> Schedule:
    ranks = candidate.mesh.pp
    return Schedule(name, ranks, count, candidate.stage_sizes) if ranks > 1 else ALONE
