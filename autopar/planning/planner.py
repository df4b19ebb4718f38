"""Plans a traced model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from threadpoolctl import threadpool_limits

from autopar.annotate.annotator import Annotator, annotator_of
from autopar.errors import NoPlanFits
from autopar.garbage import seldom_collected
from autopar.ir.annotated import AnnotatedModel
from autopar.ir.fusion import AUTO, FUSE_MODES, Weighed
from autopar.ir.plan import Plan
from autopar.ir.traced import TracedModel
from autopar.planning.candidates import candidates_for, setting_of
from autopar.planning.model_facts import as_recomputed
from autopar.planning.no_plan import no_plan_fits
from autopar.planning.pin_checks import check_pins
from autopar.planning.plan_writer import make_plan
from autopar.request.plan_request import PlanRequest
from autopar.solve.costs.candidate import Candidate
from autopar.solve.costs.host_time import host_s
from autopar.solve.costs.pipeline_cost import Stages
from autopar.solve.search.branch_and_bound import search
from autopar.solve.search.limits import SearchLimits
from autopar.solve.search.mixed_devices import search_groups
from autopar.solve.search.result import SearchResult
from autopar.solve.search.workers import processes_for_search
from autopar.trace.fusion.fused import fused


# products of a search are small: threads that wait for them take the cores of others
@threadpool_limits.wrap(limits=1, user_api="blas")
def find_best(
    request: PlanRequest,
    traced: TracedModel,
    annotator: Annotator,
    limits: SearchLimits,
    progress: Callable[[str], None] | None = None,
) -> SearchResult:
    """Searches all candidates of a request within `limits`, and returns the `SearchResult`, with or
    without a plan. `progress(line)` is called as it goes. BLAS uses one thread meanwhile. Raises
    AutoparError if the pins allow no candidate.
    """
    if request.is_mixed:
        return search_groups(
            candidates_for(request, traced),
            lambda candidate, group: annotator.annotate(setting_of(candidate, request, group)),
            [group.device.memory_bytes for group in request.cluster.groups],
            limits,
            progress,
            lambda candidate, group: annotator.alike(setting_of(candidate, request, group)),
        )

    def annotate(candidate: Candidate) -> AnnotatedModel:
        return annotator.annotate(setting_of(candidate, request))

    capacity = request.cluster.device.memory_bytes
    return search(
        candidates_for(request, traced),
        annotate,
        capacity,
        limits,
        progress,
        cell_of=lambda candidate: annotator.alike(setting_of(candidate, request)),
    )


@seldom_collected()
def plan_traced(
    traced: TracedModel,
    request: PlanRequest,
    time_limit_s: float = 60.0,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """The fastest plan of a traced model for a complete request, searched for `time_limit_s`
    seconds; the part of `api.plan` after tracing. `progress(line)` is called as the search goes.
    Raises AutoparError for impossible pins, and NoPlanFits if the search finds no plan or the host
    lacks memory.
    """
    check_pins(request, traced)
    if request.pin.fuse == AUTO:
        return _fused_best(traced, request, time_limit_s, progress)
    return _planned(traced, request, request.pin.fuse or "off", time_limit_s, progress)[0]


def _planned(
    traced: TracedModel,
    request: PlanRequest,
    mode: str,
    time_limit_s: float,
    progress: Callable[[str], None] | None,
) -> tuple[Plan, float]:
    """(the fastest plan of a model fused in `mode`, seconds in which its host issues the kernels of
    a step). Raises as `plan_traced`.
    """
    traced = as_recomputed(fused(traced, mode), request.pin.recompute)
    annotator = annotator_of(traced)
    limits = SearchLimits(time_s=time_limit_s, processes=processes_for_search())
    found = find_best(request, traced, annotator, limits, progress)
    if found.best is None or found.model is None:
        raise no_plan_fits(found, request)
    candidate, solution = found.best
    stages: Stages = (tuple(range(len(traced.segments))),)
    if solution.pipelined:
        stages = solution.pipelined.stages
    issued_s = host_s(found.model, solution.choices, stages, candidate.mesh.pp)
    return make_plan(found, request, traced, annotator), issued_s


def _fused_best(
    traced: TracedModel,
    request: PlanRequest,
    time_limit_s: float,
    progress: Callable[[str], None] | None,
) -> Plan:
    """The fastest of the plans of all modes of fusion, by the slower of devices and host. Each mode
    is searched for its share of `time_limit_s`. Raises as `plan_traced` if no mode has a plan.
    """
    plans: list[tuple[Weighed, Plan]] = []
    error: NoPlanFits | None = None
    for mode in FUSE_MODES:
        try:
            plan, issued_s = _planned(
                traced, request, mode, time_limit_s / len(FUSE_MODES), progress
            )
        except NoPlanFits as found:
            error = found
            continue
        plans.append((Weighed(mode, plan.predicted.step_time_s, issued_s), plan))
    if not plans:
        assert error is not None  # every mode raised it
        raise error
    _, best = min(plans, key=lambda entry: entry[0].bound_s)
    weighed = tuple(entry for entry, _ in plans)
    return replace(best, fusion=replace(best.fusion, weighed=weighed))
