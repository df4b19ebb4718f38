"""Plans a traced model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from threadpoolctl import threadpool_limits

from autopar.annotate.annotator import Annotator, annotator_of
from autopar.errors import AutoparError
from autopar.garbage import seldom_collected
from autopar.ir.annotated import AnnotatedModel
from autopar.ir.plan import Plan
from autopar.ir.traced import TracedModel
from autopar.planning.candidates import candidates_for, setting_of
from autopar.planning.model_facts import as_recomputed
from autopar.planning.no_plan import no_plan_fits
from autopar.planning.pin_checks import check_pins
from autopar.planning.plan_writer import make_plan
from autopar.request.plan_request import PlanRequest
from autopar.solve.costs.candidate import Candidate
from autopar.solve.search.branch_and_bound import search
from autopar.solve.search.limits import SearchLimits
from autopar.solve.search.mixed_devices import search_groups
from autopar.solve.search.result import SearchResult
from autopar.solve.search.workers import processes_for_search
from autopar.trace.fusion.fused import fused


def _of_groups(request: PlanRequest, traced: TracedModel) -> PlanRequest:
    """The request in rows of the traced model, each of which is `traced.together` rows of the
    user's. Raises AutoparError if these do not divide the batch or the pinned micro-batch.
    """
    together, micro = traced.together, request.pin.micro_batch
    if together == 1:
        return request
    for what, rows in (("the global batch", request.global_batch), ("micro_batch", micro or 0)):
        if rows % together:
            raise AutoparError(
                f"{what} has {rows} rows, and forward reads {together} consecutive rows together: use a multiple of {together}"
            )
    pin = request.pin if micro is None else replace(request.pin, micro_batch=micro // together)
    return replace(request, pin=pin, global_batch=request.global_batch // together)


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
    request = _of_groups(request, traced)
    check_pins(request, traced)
    traced = as_recomputed(fused(traced, request.pin.fuse or "off"), request.pin.recompute)
    annotator = annotator_of(traced)
    limits = SearchLimits(time_s=time_limit_s, processes=processes_for_search())
    found = find_best(request, traced, annotator, limits, progress)
    if found.best is None:
        raise no_plan_fits(found, request)
    return make_plan(found, request, traced, annotator)
