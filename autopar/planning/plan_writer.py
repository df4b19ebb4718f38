"""From a request to candidates, and from the search's result to a Plan or to the reason why there is none."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import accumulate, groupby, pairwise
from typing import Any

from autopar_cost_models import COST_MODEL_VERSION, splits_backward

from autopar.annotate.annotator import Annotator
from autopar.ir.annotated import AnnotatedModel
from autopar.ir.cluster import Cluster, ClusterSpec
from autopar.ir.mesh import MeshShape
from autopar.ir.plan import Plan
from autopar.ir.plan_checks import SELECTIVE_MODES
from autopar.ir.plan_fields import AxisChoice, BlockPlan, Certificate, Prediction
from autopar.ir.traced import TracedModel
from autopar.ops.work import model_flops, tokens_per_row
from autopar.planning.candidates import (
    LONG_SEQUENCE,
    LONG_SHARE,
    MAX_STAGES_PER_RANK,
    setting_of,
    tp_limit,
)
from autopar.planning.no_plan import _check_host
from autopar.planning.notes import notes
from autopar.planning.pin_checks import may_split_backward
from autopar.request.plan_request import PlanRequest
from autopar.request.software import Software
from autopar.solve.costs.candidate import MODES
from autopar.solve.costs.pipeline_cost import host_bytes
from autopar.solve.costs.placement_cost import Choices, arrivals, class_costs
from autopar.solve.search.result import SearchResult

SPACE = (
    "mesh dp x cp x tp (tp up to {limit} devices, a divisor of the attention heads; cp {long}; ep a part of dp that divides the "
    "experts), {placed}, micro-batch a divisor of the batch, {pipelines}, ZeRO {zero}{shared}, recompute {recompute}, and a tensor-"
    "parallel strategy for every op, the same in all blocks of one structure; data, context and expert parallelism shard batch, "
    "positions and experts wherever they go; predictions are those of the cost model"
)
SHARED = ", ZeRO-3 without a pipeline also within the data-parallel ranks of each NVLink domain"
PLACED = "ranks numbered with tp innermost, around it cp, ep and dp, outermost pp"
INSIDE = ", or pp inside dp where that keeps more ranks of a pipeline on a node"
PIPELINES = (
    "pipelines of {ranks} ranks: {short} with any number of blocks in each stage, interleaved 1F1B of up "
    "to {most} stages a rank that are dealt evenly but for shorter ends and recompute alike"
)


GROUPS = "all devices in use, each rank of the pipeline (and so dp, cp, tp and ep) on devices of one kind, all of a kind in a row"
GROUP_PIPELINES = (
    "pipelines of {ranks} ranks: {short} with one stage a rank, of any number of blocks"
)


def make_plan(
    found: SearchResult, request: PlanRequest, traced: TracedModel, annotator: Annotator
) -> Plan:
    """Write down the best solution as a Plan."""
    candidate, solution = found.best
    model: AnnotatedModel = found.model
    fixed = annotator.axis_choices(setting_of(candidate, request))
    blocks = []
    for number, block in enumerate(model.classes):
        index, mode = found.origin[number] if found.origin else (number, candidate.recompute)
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
        blocks.append(BlockPlan(traced.classes[index].name, segments, mode, choices))
    cluster = request.cluster
    ranks = request.pin.get("pp", "any number of")
    short = "GPipe, 1F1B and zero bubble" if may_split_backward(request) else "GPipe and 1F1B"
    pipelines = (
        "no pipeline"
        if ranks == 1
        else PIPELINES.format(ranks=ranks, most=MAX_STAGES_PER_RANK, short=short)
    )
    modes = f"{'/'.join(MODES)} for each block"
    order = request.pin.get("order")
    placed = (
        f"ranks numbered in the order {order} (outermost first)"
        if order
        else PLACED + INSIDE * ("pp" in request.pin)
    )
    long = f"from {LONG_SEQUENCE} positions, or with {LONG_SHARE} left to a rank"
    pinned = request.pin.get("shard")
    within = f" within groups of {pinned} data-parallel ranks" if pinned else ""
    shared = SHARED if pinned is None and not request.is_mixed else within
    if request.is_mixed:
        placed, pipelines, long = (
            GROUPS,
            GROUP_PIPELINES.format(ranks=ranks, short=short),
            "where it is pinned",
        )
    certificate = Certificate(
        found.status,
        solution.time_s,
        found.bound_s,
        found.gap,
        SPACE.format(
            limit=tp_limit(cluster),
            long=long,
            placed=placed,
            pipelines=pipelines,
            zero="0-3",
            shared=shared,
            recompute=modes,
        ),
        tuple(found.outcomes),
        found.solve_time_s,
        _ledgers(found),
    )
    seconds = solution.time_s
    stages = solution.pipelined.stages if solution.pipelined else (range(len(traced.segments)),)
    prediction = Prediction(
        seconds,
        solution.pipelined.memory_bytes if solution.pipelined else (solution.memory_bytes,),
        request.global_batch * tokens_per_row(traced) / seconds,
        model_flops(traced, request.global_batch)
        / seconds
        / sum(map(partial(_peak, request.precision), cluster.groups)),
        dict(solution.breakdown),
        dict(solution.memory_parts),
        host_bytes(model, solution.choices, stages, candidate.mesh.pp),
    )
    _check_host(prediction, request)
    lacking = {
        f"recompute op under {candidate.schedule}": splits_backward(candidate.schedule)
        and candidate.recompute == "op",
        f"a graph captured in {request.precision}": not request.runnable
        and request.precision in ("bf16", "fp16"),
    }
    missing = next((what for what, lacks in lacking.items() if lacks), "")
    return Plan(
        candidate.mesh,
        candidate.micro_batch,
        candidate.num_microbatches,
        request.global_batch,
        candidate.schedule,
        tuple(tuple(traced.segments[number].name for number in stage) for stage in stages),
        candidate.zero,
        candidate.recompute,
        request.precision,
        tuple(blocks),
        prediction,
        certificate,
        request.model_name,
        traced.model_hash,
        cluster.name,
        cluster.spec_hash(),
        COST_MODEL_VERSION,
        missing,
        (
            *((f"predicted for {request.software}",) if request.software != Software() else ()),
            *_start_note(candidate.mesh, cluster),
            *notes(traced, request.micro_batch_mean),
        ),
        candidate.offload,
        _devices(candidate.mesh, cluster),
        candidate.shard,
        request.micro_batch_mean,
    )


def _ledger(model: AnnotatedModel, choices: Choices) -> Iterator[dict[str, Any]]:
    """What a step is made of: seconds of a micro-batch and bytes of a segment of each block, and seconds of a change of layout on the way
    from one block to another, by the numbers of the blocks."""
    for cost in class_costs(model, choices):
        yield {"part": "block", "forward_s": cost.forward_s, "backward_s": cost.backward_s, "step_s": cost.step_s,
               "static_bytes": cost.static_bytes, "kept_bytes": cost.kept_bytes,
               "moment_bytes": cost.transient_bytes + model.fixed_bytes}  # fmt: skip
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


def _ledgers(found: SearchResult) -> tuple[dict[str, Any], ...]:
    """The ledger; on devices of several kinds one for each group, which its entries name."""
    choices = found.best[1].choices
    if not found.groups:
        return tuple(_ledger(found.model, choices))
    return tuple(
        entry | {"group": group}
        for group, model in enumerate(found.groups)
        for entry in _ledger(model, choices)
    )


def _peak(precision: str, group: ClusterSpec) -> float:
    """FLOP/s of all devices of a group by their datasheet."""
    flops = group.device.flops
    return group.num_devices * flops[precision if precision in flops else "fp32"]


def _devices(mesh: MeshShape, cluster: Cluster) -> tuple[str, ...]:
    """The kind of devices of each rank of the pipeline, where there are several."""
    return tuple(cluster.groups[group].device.name for group in mesh.groups) if mesh.deal else ()


def _start_note(mesh: MeshShape, cluster: Cluster) -> Iterator[str]:
    """Where processes are to start: ranks are numbered along the pipeline."""
    if mesh.deal:
        each = mesh.num_devices // mesh.pp
        runs = [(group, len(list(of))) for group, of in groupby(mesh.groups)]
        ends = [0, *accumulate(count * each for _, count in runs)]
        where = [
            f"{first} to {end - 1} on {cluster.groups[g].name}"
            for (g, _), (first, end) in zip(runs, pairwise(ends), strict=True)
        ]
        yield f"start the processes along the pipeline: ranks {', '.join(where)}"


def axis_choices(mesh: MeshShape, fixed: dict[str, AxisChoice], strategy) -> dict[str, AxisChoice]:
    """An op's choice on every axis with more than one rank: what propagation fixed, and what the solver chose on tp."""
    choices = dict(fixed)
    if mesh.tp > 1:
        choices["tp"] = AxisChoice(strategy.name, strategy.inputs, strategy.outputs)
    return {axis: choices[axis] for axis in mesh.active}
