"""From a request to candidates, and from the search's result to a Plan or to the reason why there is none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import accumulate, groupby, pairwise
from typing import Any

from autopar_cost_models import COST_MODEL_VERSION
from threadpoolctl import threadpool_limits

from autopar.annotate.annotate import Annotator
from autopar.candidates import (
    LONG_SEQUENCE,
    LONG_SHARE,
    MAX_STAGES_PER_RANK,
    calls_of,
    candidates_for,
    may_zero_bubble,
    setting_of,
    tp_limit,
)
from autopar.errors import NoPlanFits
from autopar.ir.annotated import AnnotatedModel
from autopar.ir.calls import is_attention
from autopar.ir.cluster import Cluster, ClusterSpec
from autopar.ir.mesh import MeshShape
from autopar.ir.plan import AxisChoice, BlockPlan, Certificate, Plan, Prediction
from autopar.ir.traced import TracedModel, per_model
from autopar.ops.random import draws_otherwise, drops
from autopar.ops.recomputed import SELECTIVE_MODES
from autopar.ops.rules import op_dims
from autopar.ops.values import ops
from autopar.ops.work import model_flops, tokens_per_row
from autopar.request.plan_request import PlanRequest
from autopar.request.software import Software
from autopar.solve.candidate import MODES, Candidate, SearchResult
from autopar.solve.groups import search_groups
from autopar.solve.pipeline import host_bytes
from autopar.solve.pricing import Choices, arrivals, class_costs
from autopar.solve.search import search
from autopar.solve.team import processes_for_search

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
GROUP_PIPELINES = "pipelines of {ranks} ranks: {short} with one stage a rank, of any number of blocks"


@threadpool_limits.wrap(limits=1, user_api="blas")  # products of a search are small: threads that wait for them take the cores of others
def find_best(request: PlanRequest, traced: TracedModel, annotator: Annotator, time_limit_s: float, progress=None) -> SearchResult:
    """Search all candidates of a request."""
    if request.is_mixed:
        return search_groups(
            candidates_for(request, traced), lambda candidate, group: annotator.annotate(setting_of(candidate, request, group)),
            [group.device.memory_bytes for group in request.cluster.groups], time_limit_s, progress,
            lambda candidate, group: annotator.alike(setting_of(candidate, request, group)),
        )  # fmt: skip

    def annotate(candidate: Candidate) -> AnnotatedModel:
        return annotator.annotate(setting_of(candidate, request))

    capacity = request.cluster.device.memory_bytes
    return search(candidates_for(request, traced), annotate, capacity, time_limit_s=time_limit_s, progress=progress,
                  cell_of=lambda candidate: annotator.alike(setting_of(candidate, request)), processes=processes_for_search())  # fmt: skip


def no_plan_fits(found: SearchResult, request: PlanRequest) -> NoPlanFits:
    """The error for a search without result: the smallest memory found.  What would fit is `explain/remedies.py`."""
    if found.status == "time limit":
        devices = request.cluster.num_devices
        return NoPlanFits(
            f"no plan that fits {devices} devices was found in {found.solve_time_s:.0f} s of search, nor a proof that there is none; "
            "raise the time limit, or pin what saves memory (recompute=full, a higher ZeRO stage)", proven=False,
        )  # fmt: skip
    if found.smallest is None:
        return NoPlanFits(f"no choice of layouts is consistent under the pins {request.pin or 'given'}: drop pins, or report the model")
    candidate, reason = found.smallest
    needed = reason.memory_bytes if reason.memory_bytes is not None else reason.bound_bytes or 0
    if request.is_mixed:
        kinds = ", ".join(f"{group.device.memory_bytes / 2**30:.2f} on {group.device.name}" for group in request.cluster.groups)
        return NoPlanFits(
            f"No plan fits: {reason.detail}, needs {needed / 2**30:.2f} GiB per device in the plan that lacks least ({candidate.mesh}, "
            f"micro-batch {candidate.micro_batch}, ZeRO {candidate.zero}, recompute {candidate.recompute}); there are {kinds}",
            reason.memory_bytes, proven=False,
        )  # fmt: skip
    capacity = request.cluster.device.memory_bytes
    proven = all(outcome["outcome"] == "infeasible" for outcome in found.outcomes)  # of pipelines not every placement is tried
    return NoPlanFits(
        f"No plan fits: the smallest needs {needed / 2**30:.2f} GiB per device of {capacity / 2**30:.2f} ({candidate.mesh}, "
        f"micro-batch {candidate.micro_batch}, ZeRO {candidate.zero}, recompute {candidate.recompute})",
        reason.memory_bytes,
        proven,
    )


def make_plan(found: SearchResult, request: PlanRequest, traced: TracedModel, annotator: Annotator) -> Plan:
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
            op.name: axis_choices(candidate.mesh, fixed[index].get(op.name, {}), op.strategy(solution.choices[number][op.name]))
            for op in block.ops
        }
        segments = tuple(s.name for s, own in zip(traced.segments, model.segments, strict=True) if own == number)
        blocks.append(BlockPlan(traced.classes[index].name, segments, mode, choices))
    cluster = request.cluster
    ranks = request.pin.get("pp", "any number of")
    short = "GPipe, 1F1B and zero bubble" if may_zero_bubble(request) else "GPipe and 1F1B"
    pipelines = "no pipeline" if ranks == 1 else PIPELINES.format(ranks=ranks, most=MAX_STAGES_PER_RANK, short=short)
    modes = f"{'/'.join(MODES)} for each block"
    order = request.pin.get("order")
    placed = f"ranks numbered in the order {order} (outermost first)" if order else PLACED + INSIDE * ("pp" in request.pin)
    long = f"from {LONG_SEQUENCE} positions, or with {LONG_SHARE} left to a rank"
    pinned = request.pin.get("shard")
    within = f" within groups of {pinned} data-parallel ranks" if pinned else ""
    shared = SHARED if pinned is None and not request.is_mixed else within
    if request.is_mixed:
        placed, pipelines, long = GROUPS, GROUP_PIPELINES.format(ranks=ranks, short=short), "where it is pinned"
    certificate = Certificate(
        found.status,
        solution.time_s,
        found.bound_s,
        found.gap,
        SPACE.format(limit=tp_limit(cluster), long=long, placed=placed, pipelines=pipelines, zero="0-3", shared=shared, recompute=modes),
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
        model_flops(traced, request.global_batch) / seconds / sum(map(partial(_peak, request.precision), cluster.groups)),
        dict(solution.breakdown),
        dict(solution.memory_parts),
        host_bytes(model, solution.choices, stages, candidate.mesh.pp),
    )
    _check_host(prediction, request)
    lacking = {
        "recompute op under zero_bubble": candidate.schedule == "zero_bubble" and candidate.recompute == "op",
        f"a graph captured in {request.precision}": not request.runnable and request.precision in ("bf16", "fp16"),
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
        (*((f"predicted for {request.software}",) if request.software != Software() else ()), *_start_note(candidate.mesh, cluster),
         *notes(traced, request.micro_batch_mean)),
        candidate.offload,
        _devices(candidate.mesh, cluster),
        candidate.shard,
        request.micro_batch_mean,
    )


def _check_host(prediction: Prediction, request: PlanRequest) -> None:
    """Raise NoPlanFits if the plan needs more host memory than there is.  What is shared out there differs little between layouts."""
    host = request.cluster.host if prediction.host_bytes else None
    if host is not None and prediction.host_bytes > host.memory_bytes:
        raise NoPlanFits(
            f"No plan fits: the optimizer state of the fastest one needs {prediction.host_bytes / 2**30:.2f} GiB of host memory per "
            f"device of {host.memory_bytes / 2**30:.2f}; use more devices, or a ZeRO stage that shares it out", proven=False,
        )  # fmt: skip


def _ledger(model: AnnotatedModel, choices: Choices) -> Iterator[dict[str, Any]]:
    """What a step is made of: seconds of a micro-batch and bytes of a segment of each block, and seconds of a change of layout on the way
    from one block to another, by the numbers of the blocks."""
    for cost in class_costs(model, choices):
        yield {"part": "block", "forward_s": cost.forward_s, "backward_s": cost.backward_s, "step_s": cost.step_s,
               "static_bytes": cost.static_bytes, "kept_bytes": cost.kept_bytes,
               "moment_bytes": cost.transient_bytes + model.fixed_bytes}  # fmt: skip
    for (source, output, target, entry), (forward_s, backward_s) in sorted(arrivals(model, choices).items()):
        yield {"part": "edge", "from": [source, output], "to": [target, entry], "forward_s": forward_s, "backward_s": backward_s}


def _ledgers(found: SearchResult) -> tuple[dict[str, Any], ...]:
    """The ledger; on devices of several kinds one for each group, which its entries name."""
    choices = found.best[1].choices
    if not found.groups:
        return tuple(_ledger(found.model, choices))
    return tuple(entry | {"group": group} for group, model in enumerate(found.groups) for entry in _ledger(model, choices))


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
        where = [f"{first} to {end - 1} on {cluster.groups[g].name}" for (g, _), (first, end) in zip(runs, pairwise(ends), strict=True)]
        yield f"start the processes along the pipeline: ranks {', '.join(where)}"


def axis_choices(mesh: MeshShape, fixed: dict[str, AxisChoice], strategy) -> dict[str, AxisChoice]:
    """An op's choice on every axis with more than one rank: what propagation fixed, and what the solver chose on tp."""
    choices = dict(fixed)
    if mesh.tp > 1:
        choices["tp"] = AxisChoice(strategy.name, strategy.inputs, strategy.outputs)
    return {axis: choices[axis] for axis in mesh.active}


@per_model(16)
def notes(traced: TracedModel, mean: bool = False) -> tuple[str, ...]:
    """What a user must know about this model: what capture says of it, ops without a rule, and what is not exact.  `mean`: micro-batch
    losses that do not add up are averaged."""
    found = list(traced.notes)
    ruleless: dict[str, int] = {}
    explicit, random = 0, set()
    counts = Counter(segment.class_index for segment in traced.segments)
    for index, block in enumerate(traced.classes):
        for node in ops(block.graph):
            if op_dims(node) is None:
                ruleless[str(node.target)] = ruleless.get(str(node.target), 0) + counts[index]
            if is_attention(node):
                explicit += counts[index] * drops(node)
            if draws_otherwise(node):
                random.add(str(node.target))
    if ruleless:
        found.append("ops without a rule run replicated: " + ", ".join(f"{name} x{count}" for name, count in sorted(ruleless.items())))
    if explicit:
        found.append(
            f"attention that drops probabilities x{explicit} runs unfused: exact, but it keeps batch x heads x queries x keys "
            "probabilities for backward; a model without dropout inside attention needs far less memory"
        )
    norms = [name for name in traced.updates if name.endswith("running_var")]
    others = [name for name in traced.updates if not name.endswith(("running_mean", "running_var", "num_batches_tracked"))]
    if others:
        found.append(f"forward changes {', '.join(others)}: after every micro-batch of training; eval_step leaves them")
    if norms:
        found.append(
            f"batch norm x{len(norms)} takes its statistics over one micro-batch of all data-parallel ranks: equal to one device that runs "
            "the same micro-batches, not to one that runs the whole batch at once"
        )
    if random:
        found.append(f"{', '.join(sorted(random))} draw other random numbers than one device would: equal in distribution, not exactly")
    capacity = {call.arg("capacity_factor") for call in calls_of(traced, "autopar::routed_experts") if call.arg("capacity_factor")}
    if capacity:
        found.append(
            f"experts have a capacity factor of {', '.join(map(str, sorted(capacity)))}: choices beyond it are dropped, counted over each "
            "rank's tokens of a micro-batch, so that losses differ from one device's"
        )
    return (*found, *split_notes(traced, mean))


def split_notes(traced: TracedModel, mean: bool) -> tuple[str, ...]:
    """What is not that of the whole batch, or keeps it whole."""
    split, found = traced.split, []
    if not split.joins:
        what = "micro-batch losses are averaged, as allow_micro_batch_mean=True says, though" if mean else "the batch is not split, since"
        found.append(f"{what} {split.reason}")
    if split.by_convention:
        found.append(f"{' and '.join(split.by_convention)} are those of each micro-batch, as is the field's convention")
    return tuple(found)
