"""What is searched: the request, its pins, and the candidates that they leave."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import permutations, product
from math import gcd, isqrt, prod
from typing import Any

from autopar_cost_models import OFFLOADS, SCHEDULES, Topology, check_schedule, group_shape

from autopar.annotate.context import METHODS
from autopar.annotate.setting import Setting, is_periodic
from autopar.errors import AutoparError, shown
from autopar.ir.calls import op_name
from autopar.ir.cluster import Cluster
from autopar.ir.mesh import MOST, MeshShape, deal_text, groups_of
from autopar.ir.traced import TracedModel, not_split, per_model
from autopar.ops.dims import Call, is_symbolic
from autopar.ops.recomputed import SELECTIVE_MODES
from autopar.ops.rules import op_dims
from autopar.ops.values import ops
from autopar.ops.work import tokens_per_row
from autopar.request.pins import _DEGREES, OFFLOADED_STAGES, PINS, RECOMPUTE, ZERO_STAGES, is_recompute
from autopar.request.plan_request import PlanRequest
from autopar.solve.candidate import MIXED, MODES, Candidate
from autopar.trace.deepen import counted

MAX_MICRO_BATCH = 64
MAX_STAGES_PER_RANK = 8
PP_INSIDE_DP = "dp-pp"
"""The other placement that is searched: `MeshShape.order` without the axes inside."""
LONG_SEQUENCE, LONG_SHARE = 16_384, 4096
"""Positions from which context parallelism is searched without being pinned, and of shorter sequences those that it leaves each rank at
least: with fewer, messages outweigh the attention that hides them, while the activations fit one device."""


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def check_pins(request: PlanRequest, traced: TracedModel) -> None:
    """Raise AutoparError if the pins are unknown, malformed, contradictory, or impossible for this model and cluster."""
    devices, pin = request.cluster.num_devices, request.pin
    for name, value in pin.items():
        if name not in PINS:
            raise AutoparError(f"unknown pin {shown(name)}; pins are {', '.join(PINS)}")
        if not isinstance(value, str | int | float):
            raise AutoparError(f"{name}={shown(value)} must be a text, a whole number, True or False")
        if name == "schedule" and value not in (*SCHEDULES, "none"):
            raise AutoparError(f"schedule={shown(value)} is not known; {', '.join(SCHEDULES)} are")
        if name == "sequence_parallel" and not isinstance(value, bool):
            raise AutoparError(f"sequence_parallel={shown(value)} is not known; true and false are")
        if name in (*_DEGREES, "vpp", "micro_batch") and (
            not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST
        ):
            raise AutoparError(f"{name}={shown(value)} must be a whole number >= 1, and at most {MOST:,}")
        if name == "order":
            MeshShape(order=value)
        if name == "deal":
            groups_of(value)
        if name == "context_method" and value not in METHODS:
            raise AutoparError(f"context_method={shown(value)} is not known; {', '.join(METHODS)} are")
        if name == "stages" and value != "even":
            raise AutoparError(f"stages={shown(value)} is not known; 'even' deals layers evenly, without the pin stages are cut as is best")
        if name == "zero" and (type(value) is not int or value not in ZERO_STAGES):
            raise AutoparError(f"zero={shown(value)} is not a ZeRO stage; 0, 1, 2 and 3 are")
        if name == "shard":
            _check_shard(pin)
        if name == "offload":
            _check_offload(request)
        if name == "recompute" and not is_recompute(value):
            known = ", ".join((*RECOMPUTE, *SELECTIVE_MODES))
            raise AutoparError(f"recompute={shown(value)} is not known; {known} and every-2, every-3, ... are")
    for name in _DEGREES:
        if name in pin and devices % pin[name]:
            raise AutoparError(f"{name}={pin[name]} does not divide {devices} devices; {_listed(divisors(devices))} do")
    if pin.get("offload") == "parameters":
        check_fetched(pin.get("pp", 1), pin.get("zero", 0))
    if request.is_mixed:
        _check_groups(request)
    elif "deal" in pin:
        raise AutoparError(f"deal={pin['deal']}: the devices of {request.cluster.name} are of one kind; drop the pin")
    tp, pp, cp, dp, ep = (pin.get(name) for name in _DEGREES)
    _check_product({name: pin[name] for name in ("tp", "pp", "cp", "dp") if name in pin}, devices)
    if dp is None and tp is not None and cp is not None:
        dp = devices // tp // cp // (pp or 1)
    _check_pipeline(request, traced)
    if dp is not None and request.global_batch % dp:
        raise AutoparError(f"global batch {request.global_batch} cannot be split over dp={dp}; use a multiple of {dp}")
    if dp is not None and "micro_batch" in pin and request.global_batch // dp % pin["micro_batch"]:
        rows = request.global_batch // dp
        raise AutoparError(f"micro_batch={pin['micro_batch']} does not divide the {rows} sequences of a rank; {_listed(divisors(rows))} do")
    if ep is not None and dp is not None and dp % ep:
        raise AutoparError(f"ep={ep} does not divide dp={dp}, of which it is a part; {_listed(divisors(dp))} do")
    if tp is not None and tp > 1:
        _check_heads(tp, traced)
    if cp is not None and cp > 1:
        _check_positions(cp, traced)
    if ep is not None and ep > 1:
        most = num_experts(traced)
        if not most:
            raise AutoparError(f"ep={ep}: the model has no routed experts that autopar can shard; drop the pin")
        if ep > most:
            raise AutoparError(f"ep={ep} is more than the {most} experts of the model; use ep={most} or less")


def _check_groups(request: PlanRequest) -> None:
    """The pins on devices of several kinds, where each rank of the pipeline lies within one group."""
    pin, groups = request.pin, request.cluster.groups
    sizes, inside = [group.num_devices for group in groups], prod(pin.get(name, 1) for name in ("tp", "cp", "dp"))
    where = f"{request.cluster.name} has groups of {' and '.join(map(str, sizes))} devices"
    if gcd(*sizes) % inside:
        words = " x ".join(f"{name}={pin[name]}" for name in ("tp", "cp", "dp") if name in pin)
        raise AutoparError(
            f"{where}, and a rank of the pipeline lies within one of them: {words} = {inside} devices must divide each; "
            f"{_listed(divisors(gcd(*sizes)))} do"
        )
    if "pp" in pin and pin["pp"] not in (fitting := [sum(sizes) // each for each in reversed(divisors(gcd(*sizes)))]):
        raise AutoparError(f"{where}, all of which the ranks of a pipeline share out evenly: pp={pin['pp']} cannot; {_listed(fitting)} can")
    refused = {
        "vpp": pin.get("vpp", 1) > 1 and "a rank has one stage there, of its own size",
        "schedule": pin.get("schedule") == "interleaved_1f1b" and "a rank has one stage there",
        "stages": "stages" in pin and "stages are sized to them",
        "offload": pin.get("offload", "none") != "none" and "their hosts differ",
    }
    for name, why in refused.items():
        if why:
            raise AutoparError(f"{name}={pin[name]}: the devices of {request.cluster.name} are of several kinds, and {why}; drop the pin")
    if pin.get("cp", 1) > 1 and "context_method" not in pin:
        raise AutoparError(f"cp={pin['cp']} on several kinds of devices needs one way for all: pin context_method={METHODS[0]} too")


def _check_shard(pin: Mapping[str, Any]) -> None:
    """The pin of hybrid sharding, as far as no mesh is needed."""
    value = pin["shard"]
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MOST:
        raise AutoparError(f"shard={shown(value)} must be a whole number: the data-parallel ranks that share out what ZeRO does, 0 for all")
    if value == 1:
        raise AutoparError("shard=1: a rank alone shares out nothing; pin zero=0, or shard=2 or more")
    if value and pin.get("zero") == 0:
        raise AutoparError(f"shard={value}: {value} ranks share out what ZeRO does, and zero=0 shares out nothing; pin zero=1, 2 or 3")


def _check_offload(request: PlanRequest) -> None:
    value, cluster = request.pin["offload"], request.cluster
    if value not in OFFLOADS:
        raise AutoparError(f"offload={shown(value)} is not known; {_listed(OFFLOADS)} are")
    if request.is_mixed:
        return  # refused there
    if value != "none" and cluster.host is None:
        raise AutoparError(
            f"offload={value}: nothing is known of the hosts of {cluster.name}; give ClusterSpec.make, or the cluster file, "
            "host: {memory_bytes, memory_bandwidth_Bps, link_bandwidth_Bps}, the share of one device"
        )


def check_fetched(pp: int, zero: int) -> None:
    """Raise AutoparError if parameters cannot be fetched from the host for each pass of a segment."""
    if pp > 1:
        raise AutoparError(f"offload=parameters: a pipeline (pp={pp}) has the parameters of its stages on the device for all of a step; "
                           "use pp=1, or offload=optimizer")  # fmt: skip
    if zero not in OFFLOADED_STAGES:
        raise AutoparError(f"offload=parameters: under zero={zero} each device holds all parameters and shares out what the update needs; "
                           "use zero=3 or 0, or offload=optimizer")  # fmt: skip


def as_pinned(traced: TracedModel, pin: Mapping[str, Any]) -> TracedModel:
    """The model with its layers counted off, if every k-th of them is to be recomputed."""
    mode = pin.get("recompute")
    return counted(traced, int(mode.partition("-")[2])) if is_recompute(mode) and is_periodic(mode) else traced


def _check_pipeline(request: PlanRequest, traced: TracedModel) -> None:
    """The pins of a pipeline."""
    pin = request.pin
    pp, vpp, schedule = pin.get("pp", len(request.cluster.groups)), pin.get("vpp", 1), pin.get("schedule")
    if request.runnable and pp > 1 and _parted(traced):
        name = _parted(traced)[0]
        raise AutoparError(f"the engine cannot run pp={pp}: forward changes buffer {name}, which several segments read; use pp=1")
    if schedule == "zero_bubble" and not may_zero_bubble(request):
        what = "torch.compile" if request.software.compiled else "recompute=op"
        raise AutoparError(f"the engine cannot run {what} under zero_bubble; pin schedule=1f1b")
    if pp == 1:
        for name, value, alone in (("vpp", vpp, 1), ("schedule", schedule or "none", "none"), ("stages", pin.get("stages"), None)):
            if value != alone:
                raise AutoparError(f"{name}={value} is of a pipeline, and pp is 1; pin pp, or drop the pin")
        return
    blocks = len(traced.layers)
    if pp * vpp > blocks + 2:
        raise AutoparError(f"pp={pp} x vpp={vpp} = {pp * vpp} stages are more than the model's {blocks} blocks; use {blocks} or less")
    if schedule == "none":
        raise AutoparError(f"schedule=none: a pipeline of pp={pp} has one; {', '.join(SCHEDULES)} are known")
    if "micro_batch" in pin and "dp" in pin and request.global_batch % (pin["dp"] * pin["micro_batch"]) == 0:
        number = request.global_batch // pin["dp"] // pin["micro_batch"]
        if schedule is None and vpp == 1:  # some schedule runs any number
            return
        try:
            check_schedule(schedule_of(pin), pp, vpp, number)
        except ValueError as error:
            raise AutoparError(f"pp={pp} vpp={vpp} with {number} micro-batches: {error}") from None


def may_zero_bubble(request: PlanRequest) -> bool:
    """Whether zero bubble is searched.  What is to run must do without kept results, which torch serves once, and without torch.compile,
    whose functions give all gradients at once."""
    return not request.runnable or not (request.pin.get("recompute") == "op" or request.software.compiled)


def schedule_of(pin: dict[str, Any]) -> str:
    """The schedule of a pipeline whose stages are pinned: what is pinned, or 1F1B, interleaved if a rank has several stages."""
    return pin.get("schedule") or ("interleaved_1f1b" if pin.get("vpp", 1) > 1 else "1f1b")


def schedules_for(
    pin: dict[str, Any], mesh: MeshShape, micro_batches: int, blocks: int, zero_bubble: bool = True
) -> tuple[tuple[str, int], ...]:
    """(schedule, stages a rank) of every pipeline that the pins leave and torch can run; `zero_bubble`: whether that may be used."""
    most = blocks // mesh.pp
    several = (pin["vpp"],) if "vpp" in pin else range(1, min(most, MAX_STAGES_PER_RANK) + 1)
    found = []
    for name in (pin["schedule"],) if "schedule" in pin else SCHEDULES:
        if name == "zero_bubble" and not zero_bubble:
            continue
        counts = several if name == "interleaved_1f1b" or "vpp" in pin else (1,)
        found += [(name, count) for count in counts if count <= most and _can_run(name, mesh.pp, count, micro_batches)]
    return tuple(found)


@per_model(16)
def _parted(traced: TracedModel) -> list[str]:
    """Buffers that forward changes and that stages may part: several segments read them."""
    return [name for name in traced.updates if sum(name in segment.parameters for segment in traced.segments) > 1]


def _check_heads(tp: int, traced: TracedModel) -> None:
    for heads in _attention_heads(traced):
        if heads % tp:
            raise AutoparError(f"tp={tp} does not divide {heads} attention heads; {_listed(divisors(heads))} do")


@per_model(16)
def _attention_heads(traced: TracedModel) -> tuple[int, ...]:
    """How many heads attention has, wherever that is known."""
    queries = [call.tensors[0] for call in calls_of(traced, "aten::scaled_dot_product_attention")]
    heads = dict.fromkeys(query.shape[-3] for query in queries if query.dim() > 2)
    return tuple(int(count) for count in heads if not is_symbolic(count))


def _check_product(fixed: dict[str, int], devices: int) -> None:
    """Pinned degrees must multiply to a divisor of the devices, and to all of them if tp, cp and dp (cp being 1 unless pinned) are."""
    taken = prod(fixed.values())
    if devices % taken == 0 and not ("tp" in fixed and "dp" in fixed and taken != devices):
        return
    last = next(reversed(fixed))
    others = {name: value for name, value in fixed.items() if name != last}
    rest = prod(others.values())
    remedy = f"; with {' '.join(f'{n}={v}' for n, v in others.items())}, {last} is {devices // rest}" if devices % rest == 0 else ""
    product = " x ".join(f"{name}={value}" for name, value in fixed.items())
    raise AutoparError(f"{product} = {taken} devices, but the cluster has {devices}{remedy}")


def _check_positions(cp: int, traced: TracedModel) -> None:
    calls = calls_of(traced, "aten::scaled_dot_product_attention")
    lengths = [int(t.shape[-2]) for call in calls for t in call.tensors[:2] if not is_symbolic(t.shape[-2])]
    lengths = lengths or [tokens_per_row(traced)]
    if min(lengths) < cp:
        raise AutoparError(f"cp={cp} is more than the {min(lengths)} positions of a sequence; use cp={min(lengths)} or less")


def calls_of(traced: TracedModel, op: str) -> list[Call]:
    """Every call of an op, such as 'aten::gelu', each class' once."""
    nodes = [node for block in traced.classes for node in ops(block.graph)]
    return [Call(node) for node in nodes if op_name(node) == op]


@per_model(16)
def num_experts(traced: TracedModel) -> int:
    """The least number of experts of the model's routed ops; 0 if there is none."""
    found = []
    for block in traced.classes:
        for node in ops(block.graph):
            dims = op_dims(node)
            found += [int(joint.size) for joint in dims.joint.values() if joint.axis == "ep"] if dims is not None else []
    return min(found, default=0)


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:12])) + (", ..." if len(numbers) > 12 else "")


def tp_limit(cluster: Cluster) -> int:
    """Largest tensor-parallel degree searched: four NVLink domains."""
    return min(min(group.num_devices, 4 * group.topology.devices_per_node) for group in cluster.groups)


def meshes_for(request: PlanRequest, traced: TracedModel) -> list[MeshShape]:
    """Every mesh that the pins leave and the global batch can be split over."""
    pin, found = request.pin, []
    positions, experts = tokens_per_row(traced), num_experts(traced)
    most = 1 if request.runnable and _parted(traced) else len(traced.layers)
    for pp, tp in [(count, tp) for count in _ranks_for(request, most) for tp in divisors(request.cluster.num_devices // count)]:
        devices = request.cluster.num_devices // pp
        if pin.get("tp", tp) != tp or (tp > tp_limit(request.cluster) and "tp" not in pin):
            continue
        if any(heads % tp for heads in _attention_heads(traced)):
            continue
        for cp in divisors(devices // tp):
            dp = devices // tp // cp
            is_long = positions >= LONG_SEQUENCE or positions >= LONG_SHARE * cp
            searched = cp == 1 or (is_long and positions % (2 * cp) == 0 and not request.is_mixed)
            if pin.get("cp", cp) != cp or pin.get("dp", dp) != dp or request.global_batch % dp or not ("cp" in pin or searched):
                continue
            for ep in divisors(dp):
                if pin.get("ep", ep) == ep and (ep == 1 or (ep <= experts and experts % ep == 0) or "ep" in pin):
                    mesh = MeshShape(pp=pp, dp=dp, cp=cp, tp=tp, ep=ep, order=pin.get("order", ""))
                    found += _placed(request, mesh)
    return found


def _ranks_for(request: PlanRequest, most: int) -> list[int]:
    """How many ranks pipelines may have."""
    if request.pin.get("offload") == "parameters":  # a pipeline has those of its stages on the device for all of a step
        return [1]
    if "pp" in request.pin:
        return [request.pin["pp"]]
    each = gcd(*(group.num_devices for group in request.cluster.groups))  # a rank lies within one group
    return [count for count in divisors(request.cluster.num_devices) if count <= most and each * count % request.cluster.num_devices == 0]


def _placed(request: PlanRequest, mesh: MeshShape) -> list[MeshShape]:
    """A mesh in every way that its ranks may lie."""
    if request.is_mixed:
        return deals_of(request, mesh)
    if "pp" in request.pin and "order" not in request.pin:  # both orders of every mesh would double the search
        return placements_of(mesh, request.cluster.topology)
    return [mesh]


def deals_of(request: PlanRequest, mesh: MeshShape) -> list[MeshShape]:
    """A pipeline that goes through the groups of devices one after the other, in every order, or as it is pinned."""
    groups, each, found = request.cluster.groups, mesh.num_devices // mesh.pp, {}
    pinned = deal_text(groups_of(request.pin["deal"])) if "deal" in request.pin else ""
    for order in permutations(range(len(groups))):
        dealt = replace(mesh, deal=deal_text(g for g in order for _ in range(groups[g].num_devices // each)))
        found.setdefault(tuple((groups[g].device, groups[g].topology) for g in order), dealt)  # those of one kind are alike
    return [dealt for dealt in found.values() if pinned in ("", dealt.deal)]


def placements_of(mesh: MeshShape, topology: Topology) -> list[MeshShape]:
    """The mesh as its axes are placed if no pin says how: tp innermost, around it cp and ep, then dp, outermost pp; or pp inside dp, where
    that brings more ranks of a pipeline together on a node.  Where it does not, all groups over dp would lie farther apart for nothing."""
    inside = replace(mesh, order=PP_INSIDE_DP)
    nearer, here = (group_shape(one.pp, one.stride("pp"), topology)[0] for one in (inside, mesh))
    return [mesh, inside] if nearer > here else [mesh]


def candidates_for(request: PlanRequest, traced: TracedModel) -> list[Candidate]:
    """Every combination of mesh, micro-batch, ZeRO stage and recompute that the pins leave."""
    pin, devices, found = request.pin, request.cluster.num_devices, []
    searched = MODES if pin.get("stages") == "even" else (MIXED,)
    recomputes = (pin["recompute"],) if "recompute" in pin else searched
    blocks, whole = len(traced.layers), not (traced.split.joins or request.micro_batch_mean)
    for mesh in meshes_for(request, traced):
        rows = request.global_batch // mesh.dp
        for micro_batch, (zero, shard) in product(divisors(rows), _sharings(request, mesh)):
            if pin.get("micro_batch", micro_batch) != micro_batch or (micro_batch > MAX_MICRO_BATCH and "micro_batch" not in pin):
                continue
            number = rows // micro_batch
            if whole and number > 1:
                continue
            for recompute in recomputes:
                if mesh.pp == 1:
                    found.append(Candidate(mesh, micro_batch, number, zero, recompute, shard=shard))
                elif pin.get("stages") == "even":
                    schedule, count = schedule_of(pin), pin.get("vpp", 1)
                    if _can_run(schedule, mesh.pp, count, number):
                        found.append(Candidate(mesh, micro_batch, number, zero, recompute, count, schedule, shard=shard))
                elif schedules := _schedules(request, mesh, number, blocks):
                    name, count = schedules[0]
                    found.append(Candidate(mesh, micro_batch, number, zero, recompute, count, name, schedules, shard=shard))
    found = [replace(candidate, offload=pin.get("offload", "none")) for candidate in found]
    meshes = meshes_for(request, traced) if not found else []
    sequences = sorted({request.global_batch // mesh.dp for mesh in meshes})
    if sequences and all(each % pin.get("micro_batch", 1) for each in sequences):
        raise AutoparError(
            f"micro_batch={pin['micro_batch']} does not divide the sequences of a data-parallel rank, {_listed(sequences)} under the other "
            f"pins; {_listed(sorted({size for each in sequences for size in divisors(each)}))} do"
        )
    if meshes and whole:
        sizes = sorted({request.global_batch // mesh.dp for mesh in meshes})
        what = f"the {_listed(sizes)} sequences of a data-parallel rank into micro-batches, as the pins {pin or 'given'} ask"
        raise AutoparError(not_split(traced.split, what, sizes[0]))
    if meshes and not any(_zero_stages(request, mesh) for mesh in meshes):
        raise AutoparError(
            f"zero={pin['zero']} shares out over dp and cp what several ranks hold, and under the other pins both are 1 ({meshes[0]}); "
            "drop a pin"
        )
    if meshes and not any(_sharings(request, mesh) for mesh in meshes):
        groups = sorted({size for mesh in meshes for size in divisors(mesh.dp * mesh.cp) if mesh.can_share(size)})
        raise AutoparError(
            f"shard={pin['shard']} does not part the data-parallel ranks (dp x cp = {meshes[0].dp * meshes[0].cp} in {meshes[0]}) into "
            f"groups that have all ranks of ep and cp each; under the other pins {_listed(groups) or 'nothing'} does"
        )
    if request.is_mixed and not found:
        raise AutoparError(
            f"no pipeline over all devices of {request.cluster.name}, with one stage of at least one of {blocks} layers on each rank, "
            f"splits a global batch of {request.global_batch} under the pins {pin or 'given'}: use another batch, fewer devices or pins"
        )
    if meshes and pin.get("pp", 1) > 1:
        raise AutoparError(
            f"no pipeline of pp={pin['pp']} ranks can run {blocks} layers and a global batch of {request.global_batch} under the pins "
            f"{', '.join(f'{k}={v}' for k, v in pin.items())}: gpipe and 1f1b have one stage a rank, interleaved_1f1b two or more, each "
            "stage at least one layer, and 1f1b a micro-batch for each rank; drop a pin"
        )
    if not found:
        raise AutoparError(
            f"no mesh of {devices} devices splits a global batch of {request.global_batch} under the pins "
            f"{', '.join(f'{k}={v}' for k, v in pin.items()) or 'given'}: use a global batch that is a multiple of {devices}, or drop pins"
        )
    return found


def _zero_stages(request: PlanRequest, mesh: MeshShape) -> tuple[int, ...]:
    """ZeRO stages of a mesh.  In a pipeline stage 2 is left out unless pinned: gradients are kept whole until the last micro-batch, so that
    it saves nothing over stage 1."""
    if "zero" in request.pin:
        return (request.pin["zero"],) if mesh.dp * mesh.cp > 1 or request.pin["zero"] == 0 else ()
    if mesh.dp * mesh.cp == 1:
        return (0,)
    if request.pin.get("offload") == "parameters":
        return OFFLOADED_STAGES
    return ZERO_STAGES if mesh.pp == 1 else (0, 1, 3)


def _sharings(request: PlanRequest, mesh: MeshShape) -> list[tuple[int, int]]:
    """(ZeRO stage, `Candidate.shard`) of a mesh.  Groups are searched where parameters are gathered for every pass; what is gathered once a
    step gains little by that, and is evaluated where `shard` is pinned."""
    stages, pinned = _zero_stages(request, mesh), request.pin.get("shard")
    if pinned:
        shard = 0 if pinned == mesh.dp * mesh.cp else pinned
        return [(zero, shard) for zero in stages if zero] if mesh.can_share(pinned) else []
    near = _near_ranks(request, mesh) if pinned is None and mesh.pp == 1 else 0
    return [(zero, shard) for zero in stages for shard in ((0, near) if near and zero == 3 else (0,))]


def _near_ranks(request: PlanRequest, mesh: MeshShape) -> int:
    """The data-parallel ranks of one NVLink domain, 0 where they are all, or too few to share out anything."""
    here = request.cluster.topology.devices_per_node if not request.is_mixed else 0
    shard = here // mesh.stride("dp") * mesh.ep * mesh.cp
    return shard if shard < mesh.dp * mesh.cp and mesh.can_share(shard) and here % mesh.stride("dp") == 0 else 0


def _schedules(request: PlanRequest, mesh: MeshShape, number: int, blocks: int) -> tuple[tuple[str, int], ...]:
    """`schedules_for`; on several kinds of devices those of one stage a rank, whose sizes are free."""
    found = schedules_for(request.pin, mesh, number, blocks, may_zero_bubble(request))
    return tuple((name, count) for name, count in found if count == 1 or not request.is_mixed)


def _can_run(schedule: str, ranks: int, stages_per_rank: int, micro_batches: int) -> bool:
    try:
        check_schedule(schedule, ranks, stages_per_rank, micro_batches)
    except ValueError:
        return False
    return True


def setting_of(candidate: Candidate, request: PlanRequest, group: int = 0) -> Setting:
    """What annotation needs to know of a candidate on the devices of a group."""
    return Setting(
        replace(candidate.mesh, deal=""),
        candidate.micro_batch,
        candidate.num_microbatches,
        candidate.zero,
        candidate.recompute,
        request.precision,
        request.cluster.groups[group],
        request.pin.get("context_method"),
        sequence_parallel=request.pin.get("sequence_parallel"),
        stages_per_rank=candidate.stages_per_rank,
        schedule=candidate.schedule,
        software=request.software,
        offload=candidate.offload,
        shard=candidate.shard,
        between=request.cluster.between if request.is_mixed else None,
    )
