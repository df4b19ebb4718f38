"""Turns the search's result into a Plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import accumulate, groupby, pairwise
from typing import Any

from autopar_cost_models import COST_MODEL_VERSION

from autopar.annotate.annotator import Annotator
from autopar.annotate.setting import AxisChoices
from autopar.ir.annotated import AnnotatedBlock, AnnotatedModel, AnnotatedOp, Strategy
from autopar.ir.cluster import Cluster, ClusterSpec, plain_data
from autopar.ir.mesh import MeshShape
from autopar.ir.plan import Plan
from autopar.ir.plan_checks import SELECTIVE_MODES
from autopar.ir.plan_fields import AxisChoice, BlockPlan, Certificate, MadeFor, Prediction
from autopar.ir.traced import PreparedModel, TracedModel
from autopar.ops.work import model_flops, tokens_per_row, unit_of_rows
from autopar.planning.candidates import setting_of
from autopar.planning.no_plan import check_host
from autopar.planning.notes import notes
from autopar.planning.space import space_rules
from autopar.request.plan_request import PlanRequest
from autopar.solve.costs.candidate import Candidate
from autopar.solve.costs.pipeline_cost import host_bytes
from autopar.solve.costs.placement_cost import Choices, arrivals, class_costs
from autopar.solve.integer_program.placement_solver import Solution
from autopar.solve.search.result import SearchResult, outcome_data
from autopar.solve.search.simplest import candidate_simplicity
from autopar.text.layout_words import is_experts

DETAILS = ("forward", "backward", "recompute", "experts", "parameters", "inside")
"""Keys of `time_details`, in the order of a report."""


def make_plan(
    found: SearchResult, request: PlanRequest, traced: PreparedModel, annotator: Annotator
) -> Plan:
    """The best solution of a search as a Plan, with prediction, certificate and notes. Raises
    ValueError if there is none, and NoPlanFits if the host lacks memory.
    """
    if found.best is None or found.model is None:
        raise ValueError(f"the search found no plan: its status is {found.status!r}")
    (candidate, solution), model = found.best, found.model
    pipelined = solution.pipelined
    stages = pipelined.stages if pipelined else (tuple(range(len(traced.segments))),)
    on_host = host_bytes(model, solution.choices, stages, candidate.mesh.pp)
    # with several kinds of devices, each rank has its own prices
    details = (
        {} if request.is_mixed else time_details(model, solution.choices, stages, candidate.mesh.pp)
    )
    prediction = _prediction(solution, on_host, request, traced, details)
    check_host(prediction, request)
    fixed = annotator.axis_choices(setting_of(candidate, request))
    origin = found.origin or [(number, candidate.recompute) for number in range(len(model.classes))]
    return Plan(
        mesh=candidate.mesh,
        micro_batch=candidate.micro_batch,
        num_microbatches=candidate.num_microbatches,
        global_batch=request.global_batch,
        schedule=candidate.schedule,
        stages=tuple(tuple(traced.segments[number].name for number in stage) for stage in stages),
        zero=candidate.zero,
        recompute=candidate.recompute,
        precision=request.precision,
        blocks=tuple(_blocks(model, origin, found.best, traced, fixed)),
        predicted=prediction,
        certificate=_certificate(found, candidate, solution, model, request, traced),
        model_name=request.model_name,
        model_hash=traced.model_hash,
        cluster_name=request.cluster.name,
        cluster_hash=request.cluster.spec_hash(),
        cost_model_version=COST_MODEL_VERSION,
        notes=(
            *_start_note(candidate.mesh, request.cluster),
            *notes(traced, request.micro_batch_mean),
        ),
        offload=candidate.offload,
        devices=_devices(candidate.mesh, request.cluster),
        shard=candidate.shard,
        micro_batch_mean=request.micro_batch_mean,
        fusion=traced.fusion,
        made_for=made_for(request, traced),
    )


def made_for(request: PlanRequest, traced: TracedModel) -> MadeFor:
    """What a plan of this request and model is for, as data that JSON does not change."""
    return MadeFor(
        model=request.model_text,
        seq=tokens_per_row(traced),
        rows=unit_of_rows(traced),
        cluster=plain_data(request.cluster),
        software=request.software.as_data(),
        pins=dict(request.pin),
        target=request.restriction.target if request.restriction else "",
    )


def _blocks(
    model: AnnotatedModel,
    origin: Sequence[tuple[int, str]],
    best: tuple[Candidate, Solution],
    traced: TracedModel,
    fixed: AxisChoices,
) -> Iterator[BlockPlan]:
    """A `BlockPlan` for each class of the annotated model: its segments, recompute mode, and the
    choices of each op by axis. `origin` has each class's index in the traced model and its
    recompute mode. `best` is the solution; `fixed` has the choices that follow from sharding the
    batch, by class and op.
    """
    candidate, solution = best
    for number, block in enumerate(model.classes):
        index, mode = origin[number]
        if mode == "gather" and not block.is_layer:
            mode = "none"
        if mode not in SELECTIVE_MODES:  # 'full' and every k-th: of layers alone
            mode = "full" if block.recompute else "none"
        choices = {
            op.name: axis_choices(
                candidate.mesh,
                fixed[index].get(op.name, {}),
                op.strategy(solution.choices[number][op.name]),
            )
            for op in block.ops
        }
        segments = tuple(
            s.name for s, own in zip(traced.segments, model.segments, strict=True) if own == number
        )
        yield BlockPlan(traced.classes[index].name, segments, mode, choices)


def _certificate(
    found: SearchResult,
    candidate: Candidate,
    solution: Solution,
    model: AnnotatedModel,
    request: PlanRequest,
    traced: TracedModel,
) -> Certificate:
    simplicity = candidate_simplicity(candidate)
    rules = space_rules(request, traced)
    return Certificate(
        status=found.status,
        objective_s=solution.time_s,
        bound_s=found.bound_s,
        gap=found.gap,
        space="; ".join(f"{rule.choice}: {rule.values}" for rule in rules),
        rules=tuple(asdict(rule) for rule in rules),
        meshes=tuple(found.outcomes),
        solve_time_s=found.solve_time_s,
        ledger=_ledgers(model, found.groups, solution.choices),
        tolerance=request.tolerance if request.compares_plans else 0.0,
        fastest=_fastest(found),
        simpler_left=sum(kind < simplicity for kind in found.simpler_left),
        runners_up=found.runners_up,
        headroom=max(group.headroom or 0.0 for group in request.cluster.groups),
        unlimited_s=found.unlimited_s,
        tp_inside=found.tp_inside,
    )


def _fastest(found: SearchResult) -> dict[str, Any]:
    """The fastest plan of a search as a dict, if another one was chosen; else {}."""
    if found.fastest is None:
        return {}
    candidate, solution = found.fastest
    return outcome_data(candidate, solution, "solved", found.bound_s, "the fastest")


def _prediction(
    solution: Solution,
    on_host_bytes: int,
    request: PlanRequest,
    traced: TracedModel,
    details: dict[str, float],
) -> Prediction:
    seconds, batch = solution.time_s, request.global_batch
    peak = sum(map(partial(_peak, request.precision), request.cluster.groups))
    return Prediction(
        step_time_s=seconds,
        peak_memory_bytes=solution.pipelined.memory_bytes
        if solution.pipelined
        else (solution.memory_bytes,),
        tokens_per_s=batch * tokens_per_row(traced) / seconds,
        mfu=model_flops(traced, batch) / seconds / peak,
        breakdown=dict(solution.breakdown),
        memory=dict(solution.memory_parts),
        host_bytes=on_host_bytes,
        details=details,
    )


def _ledger(model: AnnotatedModel, choices: Choices) -> Iterator[dict[str, Any]]:
    """Ledger entries as dicts. For each block of one segment: seconds of a micro-batch, forward and
    backward, and of a step, and bytes. For each layout change between two blocks: seconds of a
    micro-batch, with (block index, output or input) of both ends.
    """
    for cost in class_costs(model, choices):
        yield {
            "part": "block",
            "forward_s": cost.forward_s,
            "backward_s": cost.backward_s,
            "step_s": cost.step_s,
            "static_bytes": cost.static_bytes,
            "kept_bytes": cost.kept_bytes,
            "moment_bytes": cost.transient_bytes + model.fixed_bytes,
        }
    for (source, output, target, entry), (forward_s, backward_s) in sorted(
        arrivals(model, choices).items()
    ):
        yield {
            "part": "edge",
            "from": [source, output],
            "to": [target, entry],
            "forward_s": forward_s,
            "backward_s": backward_s,
        }


def _ledgers(
    model: AnnotatedModel, groups: Sequence[AnnotatedModel], choices: Choices
) -> tuple[dict[str, Any], ...]:
    """The ledger entries, one dict each, at the prices of `model`. With several kinds of devices,
    those at the prices of each of `groups`, with its number as 'group'.
    """
    if not groups:
        return tuple(_ledger(model, choices))
    return tuple(
        entry | {"group": number}
        for number, priced in enumerate(groups)
        for entry in _ledger(priced, choices)
    )


def _peak(precision: str, group: ClusterSpec) -> float:
    """Datasheet FLOP/s of all devices of a group together, in the precision (in fp32 if that is not
    listed).
    """
    flops = group.device.flops
    return group.num_devices * flops[precision if precision in flops else "fp32"]


def _devices(mesh: MeshShape, cluster: Cluster) -> tuple[str, ...]:
    """The device kind of each pipeline rank, if the cluster has several kinds; otherwise ()."""
    return tuple(cluster.groups[group].device.name for group in mesh.groups) if mesh.deal else ()


def _start_note(mesh: MeshShape, cluster: Cluster) -> Iterator[str]:
    """A note that says which ranks to start on which group of devices, since ranks are numbered
    along the pipeline. Nothing if devices are of one kind.
    """
    if mesh.deal:
        each = mesh.num_devices // mesh.pp
        runs = [(group, len(list(of))) for group, of in groupby(mesh.groups)]
        ends = [0, *accumulate(count * each for _, count in runs)]
        where = [
            f"{first} to {end - 1} on {cluster.groups[g].name}"
            for (g, _), (first, end) in zip(runs, pairwise(ends), strict=True)
        ]
        yield f"start the processes along the pipeline: ranks {', '.join(where)}"


def axis_choices(
    mesh: MeshShape, fixed: dict[str, AxisChoice], strategy: Strategy
) -> dict[str, AxisChoice]:
    """An op's choice on every axis with more than one rank: on tp the solver's strategy, on other
    axes those of `fixed`.
    """
    choices = dict(fixed)
    if mesh.tp > 1:
        choices["tp"] = AxisChoice(strategy.name, strategy.inputs, strategy.outputs)
    return {axis: choices[axis] for axis in mesh.active}


def time_details(
    model: AnnotatedModel, choices: Choices, stages: Sequence[Sequence[int]], ranks: int
) -> dict[str, float]:
    """Seconds of a step by part, on the device of the pipeline rank whose ops take the longest.
    Layout changes between ops are not among them. Parts without time are left out.

    Args:
        model: the annotated model.
        choices: the strategy of each op, by block class.
        stages: the segments of each stage.
        ranks: the number of pipeline ranks.

    Returns:
        By key of `DETAILS`: compute of forward, of backward and of recomputation, all-to-all of
        experts, gathers of parameters, and other communication inside ops.
    """
    of_class = [_parts(block, choice) for block, choice in zip(model.classes, choices, strict=True)]
    of_rank = []
    for rank in range(ranks):
        mine = [model.segments[s] for stage in stages[rank::ranks] for s in stage]
        of_rank.append({key: sum(of_class[index][key] for index in mine) for key in DETAILS})
    longest = max(of_rank, key=lambda parts: sum(parts.values()))
    return {key: model.num_microbatches * value for key, value in longest.items() if value > 0}


def _parts(block: AnnotatedBlock, choice: dict[str, str]) -> dict[str, float]:
    """Seconds of a micro-batch by part, in one segment of a class."""
    found = dict.fromkeys(DETAILS, 0.0)
    for op in block.ops:
        strategy = op.strategy(choice[op.name])
        comm_s = strategy.forward_comm_s + strategy.backward_comm_s
        found["forward"] += strategy.forward_s - strategy.forward_comm_s
        found["recompute"] += strategy.rerun_s
        found["backward"] += _backward_s(strategy)
        found[_communicates(op)] += comm_s
    return found


def _communicates(op: AnnotatedOp) -> str:
    """The key of the communication of an op."""
    if op.kind == "parameter":
        return "parameters"
    return "experts" if is_experts(op.name) else "inside"


def _backward_s(strategy: Strategy) -> float:
    return max(strategy.backward_s - strategy.backward_comm_s - strategy.rerun_s, 0.0)
