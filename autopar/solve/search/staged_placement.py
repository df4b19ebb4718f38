"""A placement with its best stages, priced by the definition, and with stages that hold little."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf

from autopar.ir.annotated import AnnotatedModel
from autopar.solve.costs.candidate import Candidate
from autopar.solve.costs.pipeline_cost import blocks_of, pipelined, stages_of
from autopar.solve.costs.placement_cost import Choices, price_placement
from autopar.solve.costs.recompute_mix import Mixed, Models, mixed
from autopar.solve.costs.schedule import Schedule, Staging
from autopar.solve.integer_program.placement_solver import Solution
from autopar.solve.search.candidate_models import CandidateModels
from autopar.solve.staging.best_staging import best_staging, quick_bound_s
from autopar.solve.staging.row_of_costs import row_of_placement
from autopar.solve.staging.unit_row import UnitRow


@dataclass(frozen=True, slots=True)
class Staged:
    """A complete way to run a candidate: placement, schedule and stages, with their price in
    `solution`.

    `models` has one model for each kind of devices. `recompute` is the mode of all blocks, or
    'mixed'. `variant` is the index of the ZeRO stage among those solved together.
    """

    solution: Solution
    models: tuple[Mixed, ...]
    schedule: Schedule
    recompute: str
    variant: int = 0


def staged_placement(
    models: Sequence[Models],
    groups: Sequence[int],
    choices: Choices,
    staging: Staging,
    schedule: Schedule,
) -> Staged:
    """The placement `choices` with the stages and recompute modes of `staging`, priced by the
    definition of costs, as a `Staged`.

    `models` has those of each kind of devices, by recompute mode; `groups` has the kind of each
    rank.
    """
    found = tuple(_scheduled(mixed(own, staging.modes), schedule) for own in models)
    choices = found[0].choices(choices)
    cut = None
    if found[0].model.pipeline is not None:
        cut = pipelined([found[group].model for group in groups], choices, staging.stages)
    solution = Solution(
        status="feasible",
        choices=choices,
        priced=price_placement(found[0].model, choices),
        bound_s=staging.bound_s,
        solve_time_s=0.0,
        method="staging",
        pipelined=cut,
    )
    modes = {staging.modes[block] for block in blocks_of(first_of(models[0]))}
    return Staged(solution, found, schedule, modes.pop() if len(modes) == 1 else "mixed")


def first_of(models: Models) -> AnnotatedModel:
    """The model in the recompute mode that keeps most."""
    return next(iter(models.values()))


def in_first_modes(models: Models, number: int) -> Models:
    """The models of the first `number` recompute modes."""
    return dict(list(models.items())[:number])


def _scheduled(found: Mixed, schedule: Schedule) -> Mixed:
    setting = found.model.pipeline
    if setting is None:
        return found
    setting = replace(setting, schedule=schedule.name, stages_per_rank=schedule.stages_per_rank)
    return replace(found, model=replace(found.model, pipeline=setting))


@dataclass(slots=True)
class Stager:
    """Finds the best stages of placements of one candidate, on devices of one kind. `rows` is a
    cache.
    """

    models: CandidateModels
    capacity_bytes: int | None
    known: list[Choices] = field(default_factory=list)  # placements that were staged
    # by numbers of the placement and the ZeRO stage, number of recompute modes
    rows: dict[tuple[int, int, int], UnitRow] = field(default_factory=dict)

    def staged(self, choices: Choices, schedule: Schedule, upper_bound_s: float) -> Staged | float:
        """A placement with its best stages (`Staged`), under the ZeRO stage for which it is
        fastest. If no staging fits and takes less than `upper_bound_s`: a lower bound on its step
        seconds.
        """
        best, bound_s = None, inf
        for variant in self.models.variants:
            found = self._staged_as(variant, choices, schedule, upper_bound_s)
            bound_s = min(bound_s, bound_of(found))
            if isinstance(found, Staged) and (
                best is None or found.solution.time_s < best.solution.time_s
            ):
                best, upper_bound_s = found, min(upper_bound_s, found.solution.time_s)
        if best is None:
            return bound_s
        return replace(best, solution=replace(best.solution, bound_s=bound_s))

    def _staged_as(
        self, variant: int, choices: Choices, schedule: Schedule, upper_bound_s: float
    ) -> Staged | float:
        """Like `staged`, but only under the ZeRO stage with index `variant`."""
        number, bound_s = self._number(choices), inf
        all_modes = len(self.models.modes)
        for count in dict.fromkeys((1, all_modes)):
            models = in_first_modes(self.models.variants[variant], count)
            row = self.rows.get((number, variant, count))
            if row is None:
                row = self.rows[number, variant, count] = row_of_placement(models, choices)
            if (least_s := quick_bound_s(row, schedule)) >= upper_bound_s:
                return least_s
            staging = best_staging(row, schedule, self.capacity_bytes, upper_bound_s)
            bound_s = staging if isinstance(staging, float) else staging.bound_s
            if not isinstance(staging, float) and (
                count == all_modes or (staging.is_free and not self._may_hide(variant, schedule))
            ):
                groups = (0,) * schedule.ranks
                found = staged_placement([models], groups, choices, staging, schedule)
                return replace(found, variant=variant)
        return bound_s

    def _may_hide(self, variant: int, schedule: Schedule) -> bool:
        """Whether recomputation can speed up a pipeline even if memory does not require it.
        `variant` is the ZeRO stage. Always False without a pipeline.
        """
        return schedule.ranks > 1 and self.models.hiding[variant]

    def _number(self, choices: Choices) -> int:
        if choices not in self.known:
            self.known.append(choices)
        return self.known.index(choices)


def bound_of(found: Staged | float) -> float:
    """The lower bound in seconds in a result of `Stager.staged`."""
    return found if isinstance(found, float) else found.solution.bound_s


def lean_schedules(candidate: Candidate) -> list[Candidate]:
    """The candidate under each schedule that may hold least. That is 1F1B if it can run, since it has
    fewest micro-batches in flight. Otherwise it is each schedule, with the fewest stages a rank.
    Without schedules to choose from, it is the candidate.
    """
    fewest: dict[str, int] = {}
    for name, count in candidate.schedules:
        fewest[name] = min(fewest.get(name, count), count)
    if "1f1b" in fewest:
        fewest = {"1f1b": fewest["1f1b"]}
    found = [replace(candidate, schedule=name, stages_per_rank=n) for name, n in fewest.items()]
    return found or [candidate]


def fullest_lean_rank_bytes(model: AnnotatedModel, choices: Choices) -> int:
    """Bytes of the fullest rank of a pipeline whose stages hold little. From even stages, blocks move
    one by one from the fullest rank to the emptiest, as long as this helps. Stages stay as they are
    if a rank has several, or if their sizes are fixed.
    """
    setting, blocks = model.pipeline_setting, blocks_of(model)
    even = pipelined(model, choices)
    best = even.memory_bytes
    if setting.sizes or setting.stages_per_rank > 1:
        return max(best)
    layers = set(blocks)
    sizes = [len(layers.intersection(stage)) for stage in even.stages]
    for _ in blocks:
        fullest, emptiest = (pick(range(len(best)), key=best.__getitem__) for pick in (max, min))
        if sizes[fullest] == 1:
            break
        sizes[fullest] -= 1
        sizes[emptiest] += 1
        moved = pipelined(model, choices, stages_of(sizes, blocks, len(model.segments)))
        if sorted(moved.memory_bytes, reverse=True) >= sorted(best, reverse=True):
            break
        best = moved.memory_bytes
    return max(best)
