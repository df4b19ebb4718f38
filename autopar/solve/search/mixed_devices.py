"""The search on devices of several kinds: pipelines of which each rank lies within one *group* of devices of one kind.

Every group has a model of its own: the same classes and strategies, at its prices.  A candidate's mesh says which rank is on which group
(`MeshShape.groups`).  One placement is for all ranks; how many blocks a rank has, and what these recompute, follows from its devices.

    placements   those that are best on one of the groups at some price of a byte (`Joint` of that group alone)
    stages       each placement is staged exactly, by a row of its units for each group (`cuts.staging_of_ranks`)
    bound        weights   of any weights w of the ranks that a step is longer than the sum of w x (work of a rank): a unit costs at least
                           the least of w x (its work there) over the ranks that can have it (`weighted_ranks.py`)
                 rows      segments of which each costs what no placement goes below (`bounds.least_costs`), staged best
                 families  the same of the placements that are left when ops lose strategies (`family_bounds.py`): branch and bound

Work is not one number that ranks share out: a unit that is half of it on one group may be a third on another.  So a bound adds units up,
never shares.  Candidates are gone through by their bounds, and left as soon as these reach the best plan.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import inf

from autopar.ir.annotated import AnnotatedModel
from autopar.ir.mesh import MeshShape
from autopar.solve.bounds.cell import Cell, least_costs
from autopar.solve.bounds.family import Family
from autopar.solve.bounds.lagrangian import leanest
from autopar.solve.bounds.weighted_ranks import Weighted
from autopar.solve.costs.candidate import Candidate
from autopar.solve.costs.pipeline_cost import blocks_of, pipelined
from autopar.solve.costs.placement_cost import Choices, price
from autopar.solve.costs.recompute_mix import Mixed, Models, hides, mixed
from autopar.solve.costs.schedule import Schedule, Staging
from autopar.solve.integer_program.placement_solver import OPTIMALITY_GAP, Infeasible, Solution
from autopar.solve.search.candidate_solver import Joint
from autopar.solve.search.frontier import Frontier
from autopar.solve.search.result import SearchResult, outcome_data
from autopar.solve.staging.one_stage_per_rank import staging_of_ranks
from autopar.solve.staging.row_of_costs import in_first, row_of_costs, row_of_placement
from autopar.solve.staging.unit_row import UnitRow

_DIVES = 4
"""How many candidates are staged at once, before bounds are raised further."""

_EARLY = 16
"""So many are staged before families are looked at: a good plan prunes more than they do."""

_TURNS = 6
"""So many bounds are raised for each candidate that is staged: what is found prunes others."""

_SPLITS = 4
"""How many families of a candidate are split before the next has its turn."""

_MOST_SPLITS = 32
"""How many families are split in all."""

_MOST_PLACEMENTS = 4
"""How many placements of each group are staged."""


@dataclass(frozen=True, slots=True)
class Found:
    """A way to run a candidate: the model of each group, and what it comes to."""

    solution: Solution
    models: tuple[Mixed, ...]
    schedule: Schedule
    recompute: str


@dataclass(slots=True)
class _Task:
    """A candidate on its groups, and what is known of it.  `models_of()` has its models by group, `bounds_s` is by schedule."""

    candidate: Candidate
    models_of: Callable[[], list[Models]]
    cells: list[Cell]
    bounds_s: dict[Schedule, float]
    is_raised: bool = False
    is_staged: bool = False
    joints: list[Joint] = field(default_factory=list)  # a pipeline on each group alone
    frontier: Frontier | None = None  # families of placements that are left
    splits: int = 0
    outcome: str = "open"
    reason: str = ""
    found: Found | None = None
    hiding: bool | None = None

    def hides(self) -> bool:
        """Whether recomputation may pay where memory does not ask for it (`mixing.hides`)."""
        if self.hiding is None:
            self.hiding = any(map(hides, self.models))
        return self.hiding

    @property
    def bound_s(self) -> float:
        return min(self.bounds_s.values(), default=inf)

    @property
    def models(self) -> list[Models]:
        return self.models_of()

    @property
    def deal(self) -> tuple[int, ...]:
        return self.candidate.mesh.groups

    def close(self, outcome: str, reason: str) -> None:
        self.outcome, self.reason = outcome, reason

    def chosen(self) -> Candidate:
        """The candidate with what was found."""
        if self.found is None:
            return self.candidate
        return replace(
            self.candidate,
            recompute=self.found.recompute,
            schedule=self.found.schedule.name,
            schedules=(),
        )

    def as_dict(self) -> dict:
        return outcome_data(
            self.chosen(),
            self.found and self.found.solution,
            self.outcome,
            self.bound_s,
            self.reason,
        )


def search_groups(
    candidates: Iterable[Candidate], annotate: Callable[[Candidate, int], AnnotatedModel], capacities: Sequence[int | None],
    time_limit_s: float = 60.0, progress: Callable[[str], None] | None = None,
    cell_of: Callable[[Candidate, int], Hashable] = lambda candidate, group: (candidate, group),
) -> SearchResult:  # fmt: skip
    """The fastest way over all candidates found in the time, with a bound of all.

    `annotate(candidate, group)` is the model at the prices of a group; models of all groups have the same classes, strategies and bytes.
    `capacities`: bytes of a device of each group.  `cell_of` as in `search`, for each group.
    """
    return _Search(
        list(candidates),
        annotate,
        capacities,
        time_limit_s,
        progress or (lambda text: None),
        cell_of,
    ).run()


@dataclass(slots=True)
class _Search:
    candidates: list[Candidate]
    annotate: Callable[[Candidate, int], AnnotatedModel]
    capacities: Sequence[int | None]
    time_limit_s: float
    progress: Callable[[str], None]
    cell_of: Callable[[Candidate, int], Hashable]
    tasks: list[_Task] = field(default_factory=list)
    cells: dict[Hashable, Cell] = field(default_factory=dict)
    models_of: Callable[[Candidate, int], Models] = field(init=False)
    """A candidate at the prices of a group, by recompute mode.  It knows nothing of the search, which ends without a cycle."""
    best: _Task | None = None
    dived: set[MeshShape] = field(default_factory=set)
    raised: int = 0
    staged: int = 0
    splits: int = 0
    start: float = field(default_factory=time.perf_counter)
    weighted: Weighted = field(init=False)

    def __post_init__(self) -> None:
        self.weighted, annotate = Weighted(self.annotate, self.capacities), self.annotate
        self.models_of = cache(
            lambda c, group: {mode: annotate(replace(c, recompute=mode), group) for mode in c.modes}
        )

    def run(self) -> SearchResult:
        for candidate in self.candidates:
            if self._late(0.5):
                break
            self.tasks.append(self._opened(candidate))
        queue = [(False, task.bound_s, number) for number, task in enumerate(self.tasks)]
        heapq.heapify(queue)
        while queue and not self._late():
            *_, number = heapq.heappop(queue)
            task = self.tasks[number]
            if self._advance(task):
                known = task.is_staged and task.frontier is not None
                heapq.heappush(queue, (known, task.bound_s, number))
        for task in self.tasks:
            if task.outcome == "open" and not self._prune(task):
                task.close(
                    "solved" if task.is_staged else "unexplored", "the time limit came first"
                )
        return self._result()

    def _late(self, part: float = 1.0) -> bool:
        """Whether the time is over, which is stretched to twice that while nothing was found."""
        return time.perf_counter() - self.start > part * self.time_limit_s * (1 if self.best else 2)

    @property
    def _wanted_s(self) -> float:
        """What a step must take less than to be faster than the best plan: by more than rounding."""
        return self.best.found.solution.time_s * (1 - OPTIMALITY_GAP) if self.best else inf

    def _opened(self, candidate: Candidate) -> _Task:
        groups, cells, models_of = range(len(self.capacities)), [], self.models_of
        alike = replace(
            candidate, mesh=replace(candidate.mesh, deal="")
        )  # where ranks are is nothing to what each group takes
        for group in groups:
            key = self.cell_of(candidate, group), candidate.modes, group
            if key not in self.cells:
                self.cells[key] = Cell.of(models_of(alike, group))
            cells.append(self.cells[key])
        schedules = [Schedule(name, candidate.mesh.pp, 1) for name, _ in candidate.schedules]
        least_s = {
            schedule: self.weighted.least_s(candidate, alike, cells, schedule)
            for schedule in schedules
        }
        return _Task(
            candidate, lambda: [models_of(alike, group) for group in groups], cells, least_s
        )

    def _prune(self, task: _Task) -> bool:
        if task.bound_s >= self._wanted_s:
            task.close("solved" if task.found else "pruned", f"takes at least {task.bound_s:.6g} s")
        return task.outcome != "open"

    def _advance(self, task: _Task) -> bool:
        """The next bound of a task, or its best stages; whether there is more to do."""
        if self._prune(task):
            return False
        mesh = replace(task.candidate.mesh, deal="")
        at_once = len(self.dived) < _DIVES and mesh not in self.dived
        early = (
            at_once
            or (task.is_raised and self.staged < _EARLY)
            or self.raised > _TURNS * (self.staged + 1)
        )
        if not task.is_staged and (task.frontier is not None or early):
            self.dived.add(mesh)
            self._stage(task)
        elif not task.is_raised:
            self._raise(task)
        else:
            self._narrow(task, _SPLITS if task.is_staged and task.frontier is not None else 0)
        if task.outcome == "open" and task.bound_s == inf:
            task.close("infeasible", "no placement fits its ranks, or none is consistent")
        return task.outcome == "open"

    def _raise(self, task: _Task) -> None:
        """The bound by rows of what no placement goes below."""
        task.is_raised, self.raised = True, self.raised + 1
        all_models = task.models
        costs = [
            least_costs(models, cell) for models, cell in zip(all_models, task.cells, strict=True)
        ]
        for schedule, known_s in task.bounds_s.items():
            if known_s < self._wanted_s:

                def rows(modes: int) -> list[UnitRow]:
                    pairs = zip(all_models, costs, strict=True)
                    return [
                        row_of_costs(_first(models, modes), in_first(own, modes))
                        for models, own in pairs
                    ]

                found = self._staging(task, rows, schedule)
                task.bounds_s[schedule] = max(
                    known_s, found if isinstance(found, float) else found.bound_s
                )

    def _staging(
        self, task: _Task, rows_of: Callable[[int], list[UnitRow]], schedule: Schedule
    ) -> Staging | float:
        """The best staging by a row for each group: in the first mode if memory leaves nothing out, else in all."""
        capacities = [self.capacities[group] for group in task.deal]
        found: Staging | float = inf
        for modes in dict.fromkeys((1, len(task.candidate.modes))):
            rows = rows_of(modes)
            found = staging_of_ranks(
                [rows[group] for group in task.deal], schedule, capacities, self._wanted_s
            )
            if (
                not isinstance(found, float)
                and found.is_free
                and (rows[0].is_bound or not task.hides())
            ):
                break
        return found

    def _stage(self, task: _Task) -> None:
        """Stage some placements under every schedule that may still be best."""
        task.is_staged, self.staged = True, self.staged + 1
        for choices in _placements(task, self._joints(task)):
            self._try(task, choices, sorted(task.bounds_s, key=task.bounds_s.__getitem__))

    def _joints(self, task: _Task) -> list[Joint]:
        """A pipeline on each group alone, as if all ranks were on it, with its bounds."""
        if not task.joints:
            for models, cell, capacity in zip(
                task.models, task.cells, self.capacities, strict=True
            ):
                task.joints.append(
                    Joint(
                        models.__getitem__,
                        task.candidate.modes,
                        tuple(task.bounds_s),
                        capacity,
                        cell,
                    )
                )
                task.joints[-1].raise_bounds(inf)
        return task.joints

    def _try(self, task: _Task, choices: Choices, schedules: Iterable[Schedule]) -> float:
        """Stage a placement, and keep it if it is the best so far; a bound of it under these schedules."""
        bounds_s = []
        rows = cache(
            lambda modes: [
                row_of_placement(_first(models, modes), choices) for models in task.models
            ]
        )
        for schedule in schedules:
            bounds_s.append(self._wanted_s)
            if task.bounds_s[schedule] < self._wanted_s:
                found, bounds_s[-1] = self._fitted(task, choices, rows, schedule)
                if found is not None:
                    task.found, self.best = found, task
                    self.progress(f"{task.chosen()}: {found.solution.time_s * 1e3:.3f} ms")
        return min(bounds_s, default=inf)

    def _narrow(self, task: _Task, splits: int) -> None:
        """Bound the family of all placements of a task, and split so many of those that are left."""
        if task.frontier is None:
            root = replace(
                self._joints(task)[0].families.root(),
                bounds_s={s: t for s, t in task.bounds_s.items() if t < self._wanted_s},
            )
            task.frontier = Frontier()
            self._push(task, root)
        for _ in range(splits):
            if (
                self.splits >= _MOST_SPLITS
                or task.frontier.bound_s >= self._wanted_s
                or not task.frontier.waiting
                or self._late()
            ):
                break
            self._split(task, task.frontier.pop())
        for schedule, known_s in task.bounds_s.items():
            task.bounds_s[schedule] = max(known_s, min(task.frontier.bound_s, self._wanted_s))
        if not task.frontier.waiting:
            task.close("solved" if task.found else "pruned", "all its placements are accounted for")
        elif self.splits >= _MOST_SPLITS:
            task.close("solved", f"{_MOST_SPLITS} families were split")

    def _split(self, task: _Task, family: Family) -> None:
        """Stage a placement of a family, and put back its parts."""
        task.splits, self.splits = task.splits + 1, self.splits + 1
        joint = task.joints[
            task.splits % len(task.joints)
        ]  # by the prices of one group after the other
        choices = joint.likely(family, min(family.bounds_s, key=family.bounds_s.__getitem__))
        if choices is not None and choices not in joint.numbered:
            joint.numbered.append(choices)
            self._try(task, choices, family.bounds_s)
        parts = joint.families.branching.split(family)
        if not parts and joint.is_consistent(family):
            bound_s = self._try(task, joint.families.branching.only(family), family.bounds_s)
            task.frontier.settled_s = min(
                task.frontier.settled_s, max(bound_s, min(family.bounds_s.values()))
            )
        for part in parts:
            self._push(task, part)

    def _push(self, task: _Task, family: Family) -> None:
        """Bound a family, and put it back unless none of its placements is faster than the best plan."""
        bounds_s = dict(family.bounds_s)
        for closely in (
            False,
            True,
        ):  # what segments cost each by itself, and if that is not enough, with what stands beside them
            rows = cache(
                lambda modes, closely=closely: [
                    joint.families.row(family, False, modes, closely) for joint in task.joints
                ]
            )
            for schedule, known_s in bounds_s.items():
                found = inf if None in rows(1) else self._staging(task, rows, schedule)
                bounds_s[schedule] = max(
                    known_s, found if isinstance(found, float) else found.bound_s
                )
            bounds_s = {
                schedule: bound_s
                for schedule, bound_s in bounds_s.items()
                if bound_s < self._wanted_s
            }
        if bounds_s:
            task.frontier.push(replace(family, bounds_s=bounds_s), min(bounds_s.values()))

    def _fitted(
        self,
        task: _Task,
        choices: Choices,
        rows: Callable[[int], list[UnitRow]],
        schedule: Schedule,
    ) -> tuple[Found | None, float]:
        """(a placement in its best stages, if it fits and is faster than the best plan; a bound of it)."""
        staging = self._staging(task, rows, schedule)
        if isinstance(staging, float):
            return None, staging
        found = _priced(task, choices, staging, schedule)
        return (found if found.solution.time_s < self._wanted_s else None), staging.bound_s

    def _limits(self, task: _Task) -> list[float]:
        return [
            inf if self.capacities[group] is None else self.capacities[group] for group in task.deal
        ]

    def _result(self) -> SearchResult:
        unseen = len(self.candidates) - len(self.tasks)
        bound_s = 0.0 if unseen else min((task.bound_s for task in self.tasks), default=inf)
        took_s, outcomes = (
            time.perf_counter() - self.start,
            tuple(task.as_dict() for task in self.tasks),
        )
        if self.best is None:
            open_ = unseen or any(task.outcome == "unexplored" for task in self.tasks)
            smallest = None if open_ else self._smallest()
            status = "time limit" if open_ else "infeasible" if bound_s == inf else "not found"
            return SearchResult(status, None, None, None, bound_s, outcomes, smallest, took_s)
        self.best.outcome = "chosen"
        outcomes = tuple(task.as_dict() for task in self.tasks)
        found = self.best.found
        bound_s = min(bound_s, found.solution.time_s)
        status = "optimal" if bound_s >= self._wanted_s else "feasible"
        first, models = found.models[0], tuple(one.model for one in found.models)
        best = self.best.chosen(), found.solution
        return SearchResult(
            status, best, first.model, first.origin, bound_s, outcomes, None, took_s, models
        )

    def _smallest(self) -> tuple[Candidate, Infeasible] | None:
        """The leanest placement of the candidates, recomputing most and cut as is fastest: the one that exceeds its devices by least."""
        found: tuple[float, Candidate, Infeasible] | None = None
        for task in self.tasks:
            choices = leanest(task.cells[0].tables, task.cells[0].tables.parameters(task.models[0]))
            if choices is None:
                continue
            rows = [
                row_of_placement(
                    {task.candidate.modes[-1]: models[task.candidate.modes[-1]]}, choices
                )
                for models in task.models
            ]
            for schedule in task.bounds_s:
                staging = staging_of_ranks(
                    [rows[group] for group in task.deal], schedule, [None] * len(task.deal)
                )
                if not isinstance(staging, float):
                    held = _priced(task, choices, staging, schedule).solution.pipelined.memory_bytes
                    over, rank = max(
                        (size / limit, rank)
                        for rank, (size, limit) in enumerate(
                            zip(held, self._limits(task), strict=True)
                        )
                    )
                    if found is None or over < found[0]:
                        detail = f"rank {rank} of the pipeline, on group {task.deal[rank]}"
                        found = (
                            over,
                            task.candidate,
                            Infeasible("memory", detail, 0.0, memory_bytes=held[rank]),
                        )
        return None if found is None else found[1:]


def _first(models: Models, number: int) -> Models:
    """The models of the first so many modes."""
    return dict(list(models.items())[:number])


def _placements(task: _Task, joints: Sequence[Joint]) -> Iterator[Choices]:
    """Placements that are best on one of the groups at prices of a byte; then the leanest."""
    seen: list[Choices] = []
    for joint in joints:
        nearest = [
            choices for total in joint.totals.values() for choices in reversed(total.placements)
        ]
        of_group = [
            choices for number, choices in enumerate(nearest) if choices not in nearest[:number]
        ]
        for choices in of_group[:_MOST_PLACEMENTS]:
            if choices not in seen:
                seen.append(choices)
                yield choices
    cell = task.cells[0]
    lean = leanest(cell.tables, cell.tables.parameters(task.models[0]))
    if lean is not None and lean not in seen and task.found is None:
        yield lean


def _priced(task: _Task, choices: Choices, staging: Staging, schedule: Schedule) -> Found:
    """A staging priced as any placement is, by the definition, each rank at the prices of its group."""
    found = [mixed(models, staging.modes) for models in task.models]
    found = [replace(one, model=replace(one.model, pipeline=replace(one.model.pipeline, schedule=schedule.name, stages_per_rank=1)))
             for one in found]  # fmt: skip
    own = found[0].choices(choices)
    cut = pipelined([found[group].model for group in task.deal], own, staging.stages)
    solution = Solution(
        "feasible", own, price(found[0].model, own), staging.bound_s, 0.0, "staging", cut
    )
    modes = {staging.modes[block] for block in blocks_of(task.cells[0].first)}
    return Found(solution, tuple(found), schedule, modes.pop() if len(modes) == 1 else "mixed")
