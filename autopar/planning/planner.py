"""Plans a traced model."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial

from threadpoolctl import threadpool_limits

from autopar.annotate.annotator import Annotator, annotator_of
from autopar.errors import AutoparError, NoPlanFits
from autopar.garbage import seldom_collected
from autopar.ir.annotated import AnnotatedModel
from autopar.ir.fusion import AUTO, FUSE_MODES, Weighed
from autopar.ir.mesh import MeshShape
from autopar.ir.plan import Plan
from autopar.ir.traced import PreparedModel, TracedModel
from autopar.planning.candidates import (
    candidates_for,
    common_layouts,
    layouts_within,
    setting_of,
)
from autopar.planning.model_facts import prepare_model
from autopar.planning.no_plan import no_plan_fits
from autopar.planning.pin_checks import check_pins
from autopar.planning.plan_writer import make_plan
from autopar.planning.within_target import check_target_pins
from autopar.request.plan_request import PlanRequest
from autopar.solve.costs.candidate import Candidate
from autopar.solve.search.branch_and_bound import search, solved_together
from autopar.solve.search.families import (
    Rivals,
    inside_of,
    runner_up_data,
    same_layout_s,
    simpler_of,
)
from autopar.solve.search.limits import SearchLimits
from autopar.solve.search.mixed_devices import search_groups
from autopar.solve.search.restaging import Restager
from autopar.solve.search.result import SearchResult
from autopar.solve.search.simplest import KEPT, Preference, with_plan
from autopar.solve.search.workers import patience_s, processes_for_search
from autopar.trace.fusion.fused import fused

_SEARCH_SHARE, _CROSSING_SHARE, _CHOSEN_SHARE = 0.7, 0.65, 0.8
"""Share of the time limit for the search itself, if simpler plans or runners-up are looked for after
it. The second holds if plans whose tensor parallelism stays on fast links are looked for too. The
third is the share after which no more simpler plans are looked for.
"""
_LEAST_OWN_S, _OWN_SHARE = 1.0, 0.5
"""Seconds for the searches of single families, and the share of the search that they may take besides."""


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
    traced: PreparedModel,
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
            [group.room_bytes for group in request.cluster.groups],
            limits,
            progress,
            lambda candidate, group: annotator.alike(setting_of(candidate, request, group)),
        )

    def annotate(candidate: Candidate) -> AnnotatedModel:
        return annotator.annotate(setting_of(candidate, request))

    def cell_of(candidate: Candidate) -> Hashable:
        return annotator.alike(setting_of(candidate, request))

    start = time.perf_counter()
    candidates, spec = candidates_for(request, traced), request.cluster.one_kind
    until = start + _CHOSEN_SHARE * limits.time_s
    limits_s = limits.time_s
    limits = _without(limits, start)  # listing candidates counts
    if request.compares_plans and (request.tolerance or request.runners_up):
        crosses = request.tolerance and any(map(_crossing(request), {c.mesh for c in candidates}))
        share = _CROSSING_SHARE if crosses else _SEARCH_SHARE
        limits = replace(limits, time_s=share * limits.time_s)
    likely = common_layouts(candidates, spec.topology.devices_per_node)
    found = search(candidates, annotate, spec.room_bytes, limits, progress, cell_of, likely)
    if found.best is None or not request.compares_plans:
        return found
    rivals = Rivals(
        groups=solved_together(candidates),
        candidates=candidates,
        glances_s=found.glances_s,
        outcomes=found.outcomes,
        likely=frozenset(likely),
        restager=Restager(annotate, spec.room_bytes, cell_of, found.cells),
        processes=limits.processes if found.solve_time_s > limits.alone_s else 1,
        tell=progress or (lambda line: None),
        until=start + limits_s,
        stuck_s=patience_s(limits_s),
        own_s=_LEAST_OWN_S + _OWN_SHARE * found.solve_time_s,
    )
    return _preferred(request, found, rivals, until)


def _preferred(
    request: PlanRequest, found: SearchResult, rivals: Rivals, until: float
) -> SearchResult:
    """The result of a search with the simplest plan within the request's tolerance. If the request
    asks for runners-up, with them and with the time of the plan's mesh on all memory. After a
    search that ended by its time limit, a runner-up may be faster than its plan, or as good and
    simpler, and takes its place. `until` is as for `Preference`.
    """
    candidates, restager = rivals.candidates, rivals.restager
    memory_bytes = request.cluster.device.memory_bytes
    preference = Preference(
        restager=restager,
        tolerance=request.tolerance,
        memory_bytes=memory_bytes,
        until=until,
        crosses=_crossing(request),
    )
    found = preference.chosen(found, rivals.groups, candidates)
    if not request.runners_up or found.best is None:
        return found
    others = rivals.runners_up(found)
    better = others[0].staged if others else None
    if better is not None and (1 + request.tolerance) * better.time_s < found.fastest_s:
        faster = with_plan(found, candidates, better, "the best of its family")
        return _preferred(request, replace(faster, fastest=None), rivals, until)
    chosen, first = found.best, found.fastest or found.best
    if better is not None and found.status != "optimal" and better.time_s < first[1].time_s:
        found = replace(found, fastest=others[0].plan)
    while True:  # each time on faster links, or simpler
        inside = inside_of(others, found, preference.crosses) if request.tolerance else None
        simpler = inside or simpler_of(others, found, request.tolerance, preference.crosses)
        if simpler is None:
            break
        chosen, first = (simpler.candidate, simpler.staged.solution), found.fastest or chosen
        found = with_plan(found, candidates, simpler, KEPT if inside else "the simplest")
        slower = first[1].time_s < simpler.time_s
        keeps = found.tp_inside or inside is not None
        found = replace(found, fastest=first if slower else None, tp_inside=slower and keeps)
        others = rivals.runners_up(found)
    whole = replace(restager, capacity_bytes=memory_bytes)
    return replace(
        found,
        runners_up=tuple(map(runner_up_data, others)),
        unlimited_s=same_layout_s(whole, rivals.groups, candidates, chosen, rivals.until),
    )


def _crossing(request: PlanRequest) -> Callable[[MeshShape], bool]:
    """Whether tensor parallelism of a mesh crosses nodes or PCIe, as a function. It is False for all
    meshes if the user pinned the degree or asked for the fastest plan.
    """
    topology = request.cluster.one_kind.topology
    per_node = 1 if topology.intra.kind == "pcie" else topology.devices_per_node
    pinned = (request.pin if request.asked is None else request.asked).tp is not None
    if pinned or not request.keeps_tp_inside:
        return lambda mesh: False
    return lambda mesh: mesh.crosses_nodes("tp", per_node)


def _without(limits: SearchLimits, start_s: float) -> SearchLimits:
    """Limits without the seconds since `start_s`, by `time.perf_counter()`."""
    return replace(limits, time_s=max(limits.time_s - (time.perf_counter() - start_s), 0.0))


@seldom_collected()
def plan_traced(
    traced: TracedModel,
    request: PlanRequest,
    time_limit_s: float = 60.0,
    progress: Callable[[str], None] | None = None,
    processes: int | None = None,
) -> Plan:
    """The fastest plan of a traced model for a complete request, searched for `time_limit_s`
    seconds; the part of `api.plan` after tracing. `progress(line)` is called as the search goes.
    It uses `processes`, by default one for each core.
    Raises AutoparError for impossible pins, and NoPlanFits if the search finds no plan or the host
    lacks memory.
    """
    request = _of_groups(request, traced)
    check_target_pins(request, partial(layouts_within, traced=traced))
    check_pins(request, traced)
    limits = SearchLimits(time_s=time_limit_s, processes=processes or processes_for_search())
    if request.pin.fuse == AUTO:
        return _fused_best(traced, request, limits, progress)
    return _planned(traced, request, request.pin.fuse or "off", limits, progress)


def _planned(
    traced: TracedModel,
    request: PlanRequest,
    mode: str,
    limits: SearchLimits,
    progress: Callable[[str], None] | None,
) -> Plan:
    """The fastest plan of a model fused in `mode`. Raises as `plan_traced`."""
    start = time.perf_counter()
    prepared = prepare_model(traced, mode, request.pin.recompute)
    annotator = annotator_of(prepared)
    limits = _without(limits, start)
    found = find_best(request, prepared, annotator, limits, progress)
    if found.best is None or found.model is None:
        raise no_plan_fits(found, request)
    return make_plan(found, request, prepared, annotator)


def _fused_best(
    traced: TracedModel,
    request: PlanRequest,
    limits: SearchLimits,
    progress: Callable[[str], None] | None,
) -> Plan:
    """The fastest of the plans of all modes of fusion. Each mode is searched for its share of the
    time in `limits`. Raises as `plan_traced` if no mode has a plan.
    """
    plans: list[Plan] = []
    errors: list[NoPlanFits] = []
    start, modes = time.perf_counter(), modes_of(traced)
    for number, mode in enumerate(modes):
        left = _without(limits, start)
        share = replace(left, time_s=left.time_s / (len(modes) - number))
        try:
            plans.append(_planned(traced, request, mode, share, progress))
        except NoPlanFits as error:
            errors.append(error)
    if not plans:  # it is proved only if it is for every mode
        raise next((error for error in errors if not error.proven), errors[-1])
    best = min(plans, key=lambda plan: plan.predicted.step_time_s)
    weighed = tuple(
        Weighed(
            plan.fusion.mode,
            plan.predicted.step_time_s,
            plan.predicted.breakdown.get("host", 0.0),
        )
        for plan in plans
    )
    return replace(best, fusion=replace(best.fusion, weighed=weighed))


def modes_of(traced: TracedModel) -> tuple[str, ...]:
    """The modes of fusion to compare for a model: `head` only if a head can be fused with its loss."""
    if fused(traced, "head").fusion.keeps_no_logits:
        return FUSE_MODES
    return tuple(mode for mode in FUSE_MODES if mode != "head")
