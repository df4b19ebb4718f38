"""The search space: all candidates that a request and its pins allow. `space.py` has it in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import permutations, product
from math import gcd, prod

from autopar_cost_models import (
    SCHEDULES,
    Device,
    Topology,
    check_schedule,
    group_shape,
    splits_backward,
)

from autopar.annotate.setting import Setting
from autopar.errors import NoLayout
from autopar.ir.cluster import Cluster, ClusterSpec
from autopar.ir.mesh import MeshShape, deal_text, groups_of
from autopar.ir.traced import ONE_VALUE, TracedModel, not_split
from autopar.ops.work import tokens_per_row
from autopar.planning.model_facts import (
    attention_heads,
    divisors,
    listed,
    num_experts,
    shared_updates,
)
from autopar.planning.pin_checks import (
    check_pins,
    fixed_degrees,
    needs_pipeline,
    pipeline_ranks,
    product_words,
    schedule_of,
    searches_split_backward,
)
from autopar.planning.within_target import (
    check_target_pins,
    none_within,
    pinned_sizes,
    uncut_words,
)
from autopar.request.pins import OFFLOADED_STAGES, ZERO_STAGES, Pins, stage_sizes
from autopar.request.plan_request import PlanRequest
from autopar.request.restriction import Limit
from autopar.solve.costs.candidate import MIXED, MODES, Candidate

MAX_STAGES_PER_RANK = 8
PP_INSIDE_DP = "dp-pp"
"""`MeshShape.order` of the second searched placement, without the innermost axes."""
LONG_SEQUENCE, LONG_SHARE = 16_384, 4096
"""(positions from which context parallelism is searched without a pin; positions that each rank
must keep for shorter sequences). With fewer positions, messages take longer than the attention
that hides them, and the activations fit one device anyway.
"""


def schedules_for(
    pin: Pins,
    mesh: MeshShape,
    micro_batches: int,
    blocks: int,
    split_backward: bool = True,
) -> tuple[tuple[str, int], ...]:
    """Every (schedule, stages per rank) that the pins allow and torch can run on the pipeline of
    `mesh` with `micro_batches` micro-batches. Each stage has at least one of the `blocks` layers;
    unless pinned, a rank has at most `MAX_STAGES_PER_RANK` stages. `split_backward`: whether
    schedules with a split backward are allowed.
    """
    most = blocks // mesh.pp
    several = (pin.vpp,) if pin.vpp else range(1, min(most, MAX_STAGES_PER_RANK) + 1)
    found = []
    for name in (pin.schedule,) if pin.schedule else SCHEDULES:
        if name == "none":  # pinned: there is no pipeline
            continue
        if splits_backward(name) and not split_backward:
            continue
        counts = several if SCHEDULES[name].min_stages_per_rank > 1 or pin.vpp else (1,)
        found += [
            (name, count)
            for count in counts
            if count <= most and _can_run(name, mesh.pp, count, micro_batches)
        ]
    return tuple(found)


def tp_limit(cluster: Cluster) -> int:
    """The largest tensor-parallel degree that is searched: the devices of four nodes, or all
    devices if there are fewer. With several kinds of devices, the smallest of these.
    """
    return min(
        min(group.num_devices, 4 * group.topology.devices_per_node) for group in cluster.groups
    )


def meshes_for(request: PlanRequest, traced: TracedModel) -> list[MeshShape]:
    """Every mesh to search: those that the pins allow and whose dp divides the global batch. Each
    has every order of axes or of groups to search (`_placed`).

    Unless pinned, pp is at most the number of layers, and tp is at most `tp_limit` and divides all
    attention heads. cp above 1 is only for long sequences, and ep divides the experts.
    """
    pin, found = request.pin, list[MeshShape]()
    positions, experts = tokens_per_row(traced), num_experts(traced)
    most = 1 if request.runs_here and shared_updates(traced) else len(traced.layers)
    for pp, tp in [
        (count, tp)
        for count in _ranks_for(request, most)
        for tp in divisors(request.cluster.num_devices // count)
    ]:
        devices = request.cluster.num_devices // pp
        if not pin.leave(tp=tp) or (tp > tp_limit(request.cluster) and pin.tp is None):
            continue
        # attention with other heads stays whole, or is split unevenly: seldom the fastest
        if pin.tp is None and any(heads % tp for heads in attention_heads(traced)):
            continue
        for cp in divisors(devices // tp):
            dp = devices // tp // cp
            is_long = positions >= LONG_SEQUENCE or positions >= LONG_SHARE * cp
            searched = cp == 1 or (is_long and positions % (2 * cp) == 0 and not request.is_mixed)
            if not pin.leave(cp=cp, dp=dp) or request.global_batch % dp or not (pin.cp or searched):
                continue
            for ep in divisors(dp):
                if pin.leave(ep=ep) and (
                    ep == 1 or (ep <= experts and experts % ep == 0) or pin.ep
                ):
                    mesh = MeshShape(pp=pp, dp=dp, cp=cp, tp=tp, ep=ep, order=pin.order or "")
                    found += _placed(request, mesh)
    return found


def _ranks_for(request: PlanRequest, most: int) -> list[int]:
    """The numbers of pipeline ranks to search: [1] if parameters are offloaded, otherwise the pinned
    one, unchecked. Without a pin, all divisors of the number of devices up to `most`, ascending, and
    above 1 if another pin is of a pipeline.
    With several kinds of devices, only those with which each rank lies within one group.
    """
    # a pipeline has those of its stages on the device for all of a step
    if request.pin.offload == "parameters":
        return [1]
    if request.pin.pp is not None:
        return [request.pin.pp]
    if needs_pipeline(request.pin) and not request.is_mixed:
        return pipeline_ranks(request, most)
    # a rank lies within one group
    each = gcd(*(group.num_devices for group in request.cluster.groups))
    return [
        count
        for count in divisors(request.cluster.num_devices)
        if count <= most and each * count % request.cluster.num_devices == 0
    ]


def _placed(request: PlanRequest, mesh: MeshShape) -> list[MeshShape]:
    """The mesh with each order of axes to search: only its own, unless pp is pinned and the order
    is not. With several kinds of devices, the mesh with each assignment of ranks to groups.
    """
    if request.is_mixed:
        return deals_of(request, mesh)
    # both orders of every mesh would double the search
    if request.pin.pp is not None and request.pin.order is None:
        return placements_of(mesh, request.cluster.topology)
    return [mesh]


def deals_of(request: PlanRequest, mesh: MeshShape) -> list[MeshShape]:
    """The mesh with each `deal`: a pipeline over all groups of devices, one after the other. There
    is one for each order of groups, or only the pinned one ([] if it is none of them). Orders of
    equal groups count once.
    """
    groups, each = request.cluster.groups, mesh.num_devices // mesh.pp
    found: dict[tuple[tuple[Device, Topology], ...], MeshShape] = {}
    pinned = "" if request.pin.deal is None else deal_text(groups_of(request.pin.deal))
    for order in permutations(range(len(groups))):
        dealt = replace(
            mesh, deal=deal_text(g for g in order for _ in range(groups[g].num_devices // each))
        )
        # those of one kind are alike
        found.setdefault(tuple((groups[g].device, groups[g].topology) for g in order), dealt)
    return [dealt for dealt in found.values() if pinned in ("", dealt.deal)]


def placements_of(mesh: MeshShape, topology: Topology) -> list[MeshShape]:
    """The mesh with each order of its axes to search, if no pin fixes it: one or two.

    The default has tp innermost, then cp and ep, then dp, and pp outermost. The other has pp inside
    dp. It is searched only if it puts more ranks of a pipeline on one node; otherwise it would only
    spread the groups over dp.
    """
    inside = replace(mesh, order=PP_INSIDE_DP)
    nearer, here = (group_shape(one.pp, one.stride("pp"), topology)[0] for one in (inside, mesh))
    return [mesh, inside] if nearer > here else [mesh]


def candidates_for(request: PlanRequest, traced: TracedModel) -> list[Candidate]:
    """Every combination of mesh, micro-batch, ZeRO stage and recomputation that the pins allow.
    Schedules are part of a candidate (`Candidate.schedules`). Raises NoLayout if there is none.
    """
    meshes = meshes_for(request, traced)
    found = [candidate for mesh in meshes for candidate in _candidates_on(mesh, request, traced)]
    if not found:
        raise NoLayout(_none_words(request, traced, meshes))
    if request.restriction is None:
        return found
    rules = request.restriction.rules
    allowed = [kept for one in found if (kept := _allowed(one, rules)) is not None]
    if not allowed:
        each = [single for one in found for single in _by_schedule(one)]
        raise none_within(request, each, partial(layouts_within, traced=traced))
    return allowed


def _allowed(candidate: Candidate, rules: Sequence[Limit]) -> Candidate | None:
    """The candidate with those of its schedules that keep to all rules; None if it has none left."""
    kept = [one for one in _by_schedule(candidate) if all(rule.allows(one) for rule in rules)]
    if not kept:
        return None
    return replace(kept[0], schedules=tuple(pair for one in kept for pair in one.schedules))


def _by_schedule(candidate: Candidate) -> list[Candidate]:
    """The candidate with each of its schedules alone; itself if it has none to choose from."""
    return [
        replace(candidate, schedules=((name, count),), schedule=name, stages_per_rank=count)
        for name, count in candidate.schedules
    ] or [candidate]


def layouts_within(request: PlanRequest, traced: TracedModel) -> list[Candidate]:
    """The candidates of a request whose pins are possible. Raises NoLayout if there are none."""
    check_target_pins(request, partial(layouts_within, traced=traced))
    check_pins(request, traced)
    return candidates_for(request, traced)


def _candidates_on(
    mesh: MeshShape, request: PlanRequest, traced: TracedModel
) -> Iterator[Candidate]:
    """The candidates on one mesh: every micro-batch and ZeRO stage that the pins allow.

    Unless pinned, recomputation and schedule are left open in each candidate. With stages=even,
    each of `MODES` is a candidate of its own, and there is one schedule.
    """
    pin, rows = request.pin, request.global_batch // mesh.dp
    searched: tuple[str, ...] = MODES if pin.stages is not None else (MIXED,)
    if request.restriction is not None:
        searched = request.restriction.recompute
    recomputes = searched if pin.recompute is None else (pin.recompute,)
    for micro_batch, (zero, shard) in product(divisors(rows), _sharings(request, mesh)):
        number = rows // micro_batch
        if not pin.leave(micro_batch=micro_batch):
            continue
        if number > 1 and keeps_batch(request, traced):
            continue
        if micro_batch * mesh.dp < traced.split.least_rows:
            continue
        stagings = _stagings(request, mesh, number, traced)
        for recompute, (count, schedule, schedules, sizes) in product(recomputes, stagings):
            yield Candidate(
                mesh,
                micro_batch,
                number,
                zero,
                recompute,
                stages_per_rank=count,
                schedule=schedule,
                schedules=schedules,
                offload=pin.offload or "none",
                shard=shard,
                stage_sizes=sizes,
            )


def common_layouts(candidates: Sequence[Candidate], devices_per_node: int) -> list[int]:
    """Indices of the candidates with layouts that most published recipes use. These have the
    smallest micro-batch, tp and cp inside a node, and experts over as much of a node as is left.
    Those with less tp and cp come first.
    """
    smallest: dict[MeshShape, int] = {}
    widest: dict[MeshShape, int] = {}
    for c in candidates:
        inner = replace(c.mesh, ep=1)
        smallest[inner] = min(smallest.get(inner, c.micro_batch), c.micro_batch)
        if c.mesh.tp * c.mesh.cp * c.mesh.ep <= devices_per_node:
            widest[inner] = max(widest.get(inner, 1), c.mesh.ep)
    found = [
        (c.mesh.tp * c.mesh.cp, c.mesh.cp, number)
        for number, c in enumerate(candidates)
        if c.micro_batch == smallest[inner := replace(c.mesh, ep=1)]
        and c.mesh.ep == widest.get(inner)
        and c.zero == (1 if c.mesh.pp > 1 else 3)
    ]
    return [number for *_, number in sorted(found)]


def keeps_batch(request: PlanRequest, traced: TracedModel) -> bool:
    """Whether a rank must run its sequences as one micro-batch. It must if losses of micro-batches
    do not add up to the batch's loss, and the request does not allow their mean.
    """
    return not (traced.split.joins or request.micro_batch_mean)


def _none_words(request: PlanRequest, traced: TracedModel, meshes: Sequence[MeshShape]) -> str:
    """The reason, as text, why the pins allow no candidate. `meshes` are those that they allow,
    perhaps none.
    """
    return (
        (meshes and _unsplit_words(request, traced, meshes))
        or (meshes and _unshared_words(request, meshes))
        or uncut_words(request, meshes, len(traced.layers))
        or (not meshes and _unused_words(request))
        or _no_pipeline_words(request, len(traced.layers), bool(meshes))
    )


def _unused_words(request: PlanRequest) -> str:
    """That pins of tp and dp leave devices that no pipeline or cp that is searched uses, as text; '' if
    they leave none.
    """
    pin, devices = request.pin, request.cluster.num_devices
    if pin.tp is None or pin.dp is None or prod(fixed_degrees(pin).values()) == devices:
        return ""
    return f"{product_words(pin, devices)}, and no pipeline or cp that is searched uses the rest; pin pp or cp too"


def _unsplit_words(request: PlanRequest, traced: TracedModel, meshes: Sequence[MeshShape]) -> str:
    """The reason, as text, why a rank's sequences cannot be split into micro-batches as pinned; ''
    if they can.
    """
    pin, sequences = request.pin, sorted({request.global_batch // mesh.dp for mesh in meshes})
    if all(each % (pin.micro_batch or 1) for each in sequences):
        return (
            f"micro_batch={pin.micro_batch} does not divide the sequences of a data-parallel rank, {listed(sequences)} under the other "
            f"pins; {listed(sorted({size for each in sequences for size in divisors(each)}))} do"
        )
    if keeps_batch(request, traced):
        what = f"the {listed(sequences)} sequences of a data-parallel rank into micro-batches, as the pins {pin or 'given'} ask"
        return not_split(traced.split, what, sequences[0])
    if all(
        (pin.micro_batch or request.global_batch // m.dp) * m.dp < traced.split.least_rows
        for m in meshes
    ):
        return f"{ONE_VALUE}; pin a larger micro_batch, or use a larger global batch"
    return ""


def _unshared_words(request: PlanRequest, meshes: Sequence[MeshShape]) -> str:
    """The reason, as text, why ZeRO cannot shard over any of the meshes as pinned; '' if it can."""
    pin, first = request.pin, meshes[0]
    if not any(_zero_stages(request, mesh) for mesh in meshes):
        return (
            f"zero={pin.zero} shares out over dp and cp what several ranks hold, and under the other pins both are 1 ({first}); "
            "drop a pin"
        )
    if not any(_sharings(request, mesh) for mesh in meshes):
        groups = sorted(
            {
                size
                for mesh in meshes
                for size in divisors(mesh.dp * mesh.cp)
                if mesh.can_share(size)
            }
        )
        return (
            f"shard={pin.shard} does not part the data-parallel ranks (dp x cp = {first.dp * first.cp} in {first}) into "
            f"groups that have all ranks of ep and cp each; under the other pins {listed(groups) or 'nothing'} does"
        )
    return ""


def _no_pipeline_words(request: PlanRequest, blocks: int, has_meshes: bool) -> str:
    """The error text if pins allow no candidate and there is no more specific reason. It says that
    no pipeline can run these layers and this batch, if devices are of several kinds, or if pp is
    pinned above 1 and `has_meshes`. Otherwise it says that no mesh splits the batch.
    """
    pin, devices = request.pin, request.cluster.num_devices
    pins = ", ".join(f"{key}={value}" for key, value in pin.items())
    within = f" within what {request.restriction.name} can run" if request.restriction else ""
    if request.is_mixed:
        return (
            f"no pipeline over all devices of {request.cluster.name}, with one stage of at least one of {blocks} layers on each rank, "
            f"splits a global batch of {request.global_batch} under the pins {pin or 'given'}: use another batch, fewer devices or pins"
        )
    if has_meshes and (pin.pp or 1) > 1:
        runs = f"pinned stages run as {schedule_of(pin)} unless schedule is pinned too; "
        return (
            f"no pipeline of pp={pin.pp} ranks can run {blocks} layers and a global batch of {request.global_batch} under the pins "
            f"{pins}: gpipe and 1f1b have one stage a rank, interleaved_1f1b two or more, each "
            f"stage at least one layer, and 1f1b a micro-batch for each rank; {runs * bool(pin.stages and not pin.schedule)}drop a pin"
        )
    return (
        f"no mesh of {devices} devices splits a global batch of {request.global_batch} under the pins "
        f"{pins or 'given'}{within}: use a global batch that is a multiple of {devices}, or drop pins"
    )


def _stagings(
    request: PlanRequest, mesh: MeshShape, number: int, traced: TracedModel
) -> list[tuple[int, str, tuple[tuple[str, int], ...], tuple[int, ...]]]:
    """How candidates of a mesh with `number` micro-batches are cut into stages: (stages per rank,
    schedule, schedules to choose from, layers of each stage). Without a pipeline the schedule is
    'none'. With pinned stages, or without a pipeline, there is no schedule to choose from: ().

    Layers are () unless they are fixed, by a pin or by the request's target. There is at most one
    entry if the target does not fix them, else at most one for each number of stages a rank. [] if
    no schedule can run.
    """
    pin, blocks = request.pin, len(traced.layers)
    if mesh.pp == 1:
        return [(1, "none", (), ())]
    cuts = None if request.restriction is None else request.restriction.cuts
    if pin.stages is not None:
        schedule, count = schedule_of(pin), pin.vpp or 1
        fits = _can_run(schedule, mesh.pp, count, number)
        pinned = pinned_sizes(pin, mesh.pp, blocks)
        fits = fits and (cuts is None or cuts.sizes(mesh, count) == pinned)
        return [(count, schedule, (), stage_sizes(pin.stages))] if fits else []
    schedules = _schedules(request, mesh, number, traced)
    if cuts is None:
        return [(count, name, schedules, ()) for name, count in schedules[:1]]
    found = []
    for count in dict.fromkeys(count for _, count in schedules):
        alike = tuple(pair for pair in schedules if pair[1] == count)
        sizes = cuts.sizes(mesh, count)
        found += [(count, alike[0][0], alike, sizes)] if sum(sizes) == blocks else []
    return found


def _zero_stages(request: PlanRequest, mesh: MeshShape) -> tuple[int, ...]:
    """The ZeRO stages to search on a mesh; (0,) without ranks to shard over, or () if another is
    pinned. With offloaded parameters only `OFFLOADED_STAGES`.

    In a pipeline, ZeRO-2 must be pinned: gradients stay whole until the last micro-batch, so it
    saves nothing over ZeRO-1.
    """
    pinned = request.pin.zero
    if pinned is not None:
        return (pinned,) if mesh.dp * mesh.cp > 1 or pinned == 0 else ()
    if mesh.dp * mesh.cp == 1:
        return (0,)
    if request.pin.offload == "parameters":
        return OFFLOADED_STAGES
    return ZERO_STAGES if mesh.pp == 1 else (0, 1, 3)


def _sharings(request: PlanRequest, mesh: MeshShape) -> list[tuple[int, int]]:
    """The (ZeRO stage, `Candidate.shard`) pairs to search on a mesh; [] if it does not allow what
    is pinned. A shard of 0 means all data-parallel ranks.

    Sharding within groups is searched where parameters are gathered for every pass. What is
    gathered once a step gains little from it, so there `shard` must be pinned.
    """
    stages, pinned = _zero_stages(request, mesh), request.pin.shard
    if pinned:
        shard = 0 if pinned == mesh.dp * mesh.cp else pinned
        return [(zero, shard) for zero in stages if zero] if mesh.can_share(pinned) else []
    near = _near_ranks(request, mesh) if pinned is None and mesh.pp == 1 else 0
    return [
        (zero, shard) for zero in stages for shard in ((0, near) if near and zero == 3 else (0,))
    ]


def _near_ranks(request: PlanRequest, mesh: MeshShape) -> int:
    """The number of data-parallel ranks (dp x cp) within one node. 0 if these are all data-parallel
    ranks, too few to shard over, or do not divide a node evenly, or devices are of several kinds.
    """
    here = request.cluster.topology.devices_per_node if not request.is_mixed else 0
    shard = here // mesh.stride("dp") * mesh.ep * mesh.cp
    return (
        shard
        if shard < mesh.dp * mesh.cp and mesh.can_share(shard) and here % mesh.stride("dp") == 0
        else 0
    )


def _schedules(
    request: PlanRequest, mesh: MeshShape, number: int, traced: TracedModel
) -> tuple[tuple[str, int], ...]:
    """(schedule, stages per rank) of every pipeline that candidates of a mesh may have, with
    `number` micro-batches: those of `schedules_for`. With several kinds of devices, only those with
    one stage per rank, whose stage sizes are free.
    """
    splits = searches_split_backward(request, traced)
    found = schedules_for(request.pin, mesh, number, len(traced.layers), splits)
    if request.restriction is not None:
        found = tuple(pair for pair in found if pair[0] in request.restriction.schedules)
    return tuple((name, count) for name, count in found if count == 1 or not request.is_mixed)


def _can_run(schedule: str, ranks: int, stages_per_rank: int, micro_batches: int) -> bool:
    try:
        check_schedule(schedule, ranks, stages_per_rank, micro_batches)
    except ValueError:
        return False
    return True


def setting_of(candidate: Candidate, request: PlanRequest, group: int = 0) -> Setting:
    """The `Setting` that annotation needs to price a candidate on the devices of group number
    `group`: mesh, batch, precision, software and so on.
    """
    return Setting(
        mesh=replace(candidate.mesh, deal=""),
        micro_batch=candidate.micro_batch,
        num_microbatches=candidate.num_microbatches,
        zero=candidate.zero,
        recompute=candidate.recompute,
        precision=request.precision,
        cluster=request.cluster.groups[group],
        context_method=request.pin.context_method,
        sequence_parallel=request.pin.sequence_parallel,
        stages_per_rank=candidate.stages_per_rank,
        schedule=candidate.schedule,
        software=request.software,
        offload=candidate.offload,
        shard=candidate.shard,
        between=None if isinstance(request.cluster, ClusterSpec) else request.cluster.between,
        stage_sizes=candidate.stage_sizes,
    )
