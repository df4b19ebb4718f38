"""Checks that pins are possible for a model and a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, prod

from autopar_cost_models import SCHEDULES, check_schedule, splits_backward

from autopar.errors import NoLayout
from autopar.ir.traced import TracedModel
from autopar.ops.dims import is_symbolic
from autopar.ops.work import tokens_per_row
from autopar.planning.model_facts import (
    calls_of,
    divisors,
    listed,
    num_experts,
    shared_updates,
)
from autopar.request.pins import CONTEXT_METHODS, OFFLOADED_STAGES, Pins, stage_sizes
from autopar.request.plan_request import PlanRequest

_DEGREES = ("tp", "pp", "cp", "dp", "ep")


def check_pins(request: PlanRequest, traced: TracedModel) -> None:
    """Raises NoLayout if the pins contradict each other, or are impossible for this model and
    cluster.
    """
    _check_sharing(request.pin)
    _check_offload(request)
    _check_degrees(request.pin, request.cluster.num_devices)
    if request.is_mixed:
        _check_groups(request)
    elif request.pin.deal is not None:
        raise NoLayout(
            f"deal={request.pin.deal}: the devices of {request.cluster.name} are of one kind; drop the pin"
        )
    _check_product(request.pin, request.cluster.num_devices)
    _check_pipeline(request, traced)
    _check_batch(request)
    _check_model(request.pin, traced)


def _check_degrees(pin: Pins, devices: int) -> None:
    for name in _DEGREES:
        if name in pin and devices % pin[name]:
            raise NoLayout(
                f"{name}={pin[name]} does not divide {devices} devices; {listed(divisors(devices))} do"
            )


def _check_batch(request: PlanRequest) -> None:
    """Raises NoLayout if pins of dp, micro-batch and ep do not split the batch evenly. Checks
    nothing if dp is neither pinned nor follows from tp, cp and pp.
    """
    pin, dp = request.pin, request.pin.dp
    if dp is None and pin.tp is not None and pin.cp is not None and pin.pp is not None:
        dp = request.cluster.num_devices // pin.tp // pin.cp // pin.pp
    if dp is None:
        return
    if request.global_batch % dp:
        raise NoLayout(
            f"global batch {request.global_batch} cannot be split over dp={dp}; use a multiple of {dp}"
        )
    rows = request.global_batch // dp
    if pin.micro_batch is not None and rows % pin.micro_batch:
        raise NoLayout(
            f"micro_batch={pin.micro_batch} does not divide the {rows} sequences of a rank; {listed(divisors(rows))} do"
        )
    if pin.ep is not None and dp % pin.ep:
        raise NoLayout(
            f"ep={pin.ep} does not divide dp={dp}, of which it is a part; {listed(divisors(dp))} do"
        )


def _check_model(pin: Pins, traced: TracedModel) -> None:
    """Raises NoLayout if cp exceeds the positions of a sequence, if ep exceeds the experts of
    the model, or if ep is above 1 and there are none.
    """
    if pin.cp is not None and pin.cp > 1:
        _check_positions(pin.cp, traced)
    if pin.ep is not None and pin.ep > 1:
        most = num_experts(traced)
        if not most:
            raise NoLayout(
                f"ep={pin.ep}: the model has no routed experts that autopar can shard; drop the pin"
            )
        if pin.ep > most:
            raise NoLayout(
                f"ep={pin.ep} is more than the {most} experts of the model; use ep={most} or less"
            )


def _check_groups(request: PlanRequest) -> None:
    """Raises NoLayout if pins are impossible on devices of several kinds, where each pipeline
    rank must lie within one group and has one stage. Offloading is refused too, and cp above 1
    without a pinned `context_method`.
    """
    pin, name = request.pin, request.cluster.name
    sizes = [group.num_devices for group in request.cluster.groups]
    inside = {axis: pin[axis] for axis in ("tp", "cp", "dp") if axis in pin}
    where = f"{name} has groups of {' and '.join(map(str, sizes))} devices"
    if gcd(*sizes) % prod(inside.values()):
        words = " x ".join(f"{axis}={size}" for axis, size in inside.items())
        raise NoLayout(
            f"{where}, and a rank of the pipeline lies within one of them: {words} = {prod(inside.values())} devices must divide each; "
            f"{listed(divisors(gcd(*sizes)))} do"
        )
    fitting = [sum(sizes) // each for each in reversed(divisors(gcd(*sizes)))]
    if not (pin.pp is None or pin.pp in fitting):
        raise NoLayout(
            f"{where}, all of which the ranks of a pipeline share out evenly: pp={pin.pp} cannot; {listed(fitting)} can"
        )
    least_stages = SCHEDULES[pin.schedule].min_stages_per_rank if pin.schedule in SCHEDULES else 1
    refused = {
        "vpp": (pin.vpp or 1) > 1 and "a rank has one stage there, of its own size",
        "schedule": least_stages > 1 and "a rank has one stage there",
        "stages": pin.stages is not None and "stages are sized to them",
        "offload": (pin.offload or "none") != "none" and "their hosts differ",
    }
    for key, why in refused.items():
        if why:
            raise NoLayout(
                f"{key}={pin[key]}: the devices of {name} are of several kinds, and {why}; drop the pin"
            )
    if (pin.cp or 1) > 1 and pin.context_method is None:
        raise NoLayout(
            f"cp={pin.cp} on several kinds of devices needs one way for all: pin context_method={CONTEXT_METHODS[0]} too"
        )


def _check_sharing(pin: Pins) -> None:
    """Raises NoLayout if `shard` is pinned together with zero=0, which shards nothing."""
    if pin.shard and pin.zero == 0:
        raise NoLayout(
            f"shard={pin.shard}: {pin.shard} ranks share out what ZeRO does, and zero=0 shares out nothing; pin zero=1, 2 or 3"
        )


def _check_offload(request: PlanRequest) -> None:
    pin, cluster = request.pin, request.cluster
    if pin.offload in (None, "none"):
        return
    if not request.is_mixed and cluster.host is None:  # several kinds have a refusal of their own
        raise NoLayout(
            f"offload={pin.offload}: nothing is known of the hosts of {cluster.name}; give ClusterSpec.make, or the cluster file, "
            "host: {memory_bytes, memory_bandwidth_Bps, link_bandwidth_Bps}, the share of one device"
        )
    if pin.offload == "parameters":
        check_fetched(pin.pp or 1, pin.zero or 0)


def check_fetched(pp: int, zero: int) -> None:
    """Raises NoLayout if parameters cannot stay in host memory (offload=parameters): in a
    pipeline, or under ZeRO-1 and ZeRO-2.
    """
    if pp > 1:
        raise NoLayout(
            f"offload=parameters: a pipeline (pp={pp}) has the parameters of its stages on the device for all of a step; "
            "use pp=1, or offload=optimizer"
        )
    if zero not in OFFLOADED_STAGES:
        raise NoLayout(
            f"offload=parameters: under zero={zero} each device holds all parameters and shares out what the update needs; "
            "use zero=3 or 0, or offload=optimizer"
        )


def _check_pipeline(request: PlanRequest, traced: TracedModel) -> None:
    """Raises NoLayout if the pins of a pipeline are impossible: more stages than layers allow,
    no schedule, too few micro-batches, or what the engine cannot run.
    """
    pin = request.pin
    ranks = [pin.pp or len(request.cluster.groups)]
    if needs_pipeline(pin) and pin.pp is None and not request.is_mixed:
        ranks = pipeline_ranks(request, len(traced.layers))
        _check_some_pipeline(request, ranks, len(traced.layers))
    pp, vpp = ranks[0], pin.vpp or 1
    parted = shared_updates(traced) if request.runs_here and pp > 1 else []
    if parted:
        raise NoLayout(
            f"the engine cannot run pp={pp}: forward changes buffer {parted[0]}, which several segments read; use pp=1"
        )
    if splits_backward(pin.schedule or "none") and not may_split_backward(request):
        what = "torch.compile" if request.software.compiled else "recompute=op"
        raise NoLayout(f"the engine cannot run {what} under {pin.schedule}; pin schedule=1f1b")
    if len(ranks) > 1:
        return  # each is checked where candidates are listed
    if pp == 1:
        _check_no_pipeline(pin)
        return
    blocks = len(traced.layers)
    if pp * vpp > blocks + 2:
        raise NoLayout(
            f"pp={pp} x vpp={vpp} = {pp * vpp} stages are more than the model's {blocks} blocks; use {blocks} or less"
        )
    _check_sizes(pin, pp * vpp, blocks)
    if pin.schedule == "none":
        raise NoLayout(
            f"schedule=none: a pipeline of pp={pp} has one; {', '.join(SCHEDULES)} are known"
        )
    number = _micro_batches(request)
    if pin.vpp is None and pin.stages is None and pin.schedule is not None:
        vpp = SCHEDULES[pin.schedule].min_stages_per_rank  # the search chooses it
    # some schedule runs any number of micro-batches
    if number is not None and not (pin.schedule is None and vpp == 1):
        try:
            check_schedule(schedule_of(pin), pp, vpp, number)
        except ValueError as error:
            raise NoLayout(f"pp={pp} vpp={vpp} with {number} micro-batches: {error}") from None


_ALONE = {"vpp": 1, "schedule": "none", "stages": None}
"""Pins of a pipeline, with their values where there is none."""


def needs_pipeline(pin: Pins) -> str:
    """The first pin that needs a pipeline, as `vpp=2`; '' if none does."""
    found = (
        f"{name}={pin[name]}" for name, none in _ALONE.items() if name in pin and pin[name] != none
    )
    return next(found, "")


def pipeline_ranks(request: PlanRequest, most: int) -> list[int]:
    """The numbers of pipeline ranks from 2 to `most` that agree with the pinned stages, and leave
    the devices that pinned degrees take.
    """
    pin, devices = request.pin, request.cluster.num_devices
    stages = len(stage_sizes(pin.stages))
    taken = prod(size for name, size in fixed_degrees(pin).items() if name != "pp")
    return [
        count
        for count in divisors(devices)
        if 1 < count <= most
        and devices % (count * taken) == 0
        and stages in (0, count * (pin.vpp or 1))
    ]


def _check_some_pipeline(request: PlanRequest, ranks: Sequence[int], blocks: int) -> None:
    """Raises NoLayout if there are no `ranks` of a pipeline that pins ask for, or if parameters are
    offloaded.
    """
    what = f"{needs_pipeline(request.pin)} is of a pipeline"
    if request.pin.offload == "parameters":
        raise NoLayout(f"{what}, and offload=parameters needs pp=1; drop one of them")
    if not ranks:
        raise NoLayout(
            f"{what}, and with {request.cluster.num_devices} devices, {blocks} layers and the other pins pp is 1; drop the pin, or "
            "others that take devices"
        )


def _check_sizes(pin: Pins, stages: int, blocks: int) -> None:
    """Raise NoLayout unless the pinned sizes are those of all stages and add up to all
    blocks.
    """
    sizes = stage_sizes(pin.stages)
    if sizes and (len(sizes), sum(sizes)) != (stages, blocks):
        raise NoLayout(
            f"stages={pin.stages} has {len(sizes)} stages with {sum(sizes)} layers; the pipeline has {stages} stages and the model "
            f"{blocks} layers: give {stages} numbers that add up to {blocks}"
        )


def _check_no_pipeline(pin: Pins) -> None:
    """Raises NoLayout if another pin needs a pipeline. It is called if pp is 1."""
    if what := needs_pipeline(pin):
        raise NoLayout(f"{what} is of a pipeline, and pp is 1; drop one of the pins")


def _micro_batches(request: PlanRequest) -> int | None:
    """The number of micro-batches of a step that the pins imply. None if dp or the micro-batch is
    not pinned, or they do not divide the batch.
    """
    pin = request.pin
    if pin.micro_batch is None or pin.dp is None:
        return None
    number, left = divmod(request.global_batch, pin.dp * pin.micro_batch)
    return None if left else number


def may_split_backward(request: PlanRequest) -> bool:
    """Whether schedules with a split backward are searched. Always for other software than
    the engine's.

    To run one, a plan must not keep results of ops (recompute op), since torch provides them only
    once. It must also not use torch.compile, whose functions compute all gradients at once.
    """
    return not request.runs_here or not (request.pin.recompute == "op" or request.software.compiled)


def searches_split_backward(request: PlanRequest, traced: TracedModel) -> bool:
    """Whether schedules with a split backward are searched for a model, or are pinned.

    Unless one is pinned, they are left out if a loss makes its logits in chunks. The gradients of
    hidden states and of the head would each compute all logits again. Prices count that once.
    """
    if not may_split_backward(request):
        return False
    return request.pin.schedule is not None or not traced.fusion.keeps_no_logits


def schedule_of(pin: Pins) -> str:
    """The schedule of a pipeline whose stages are pinned: the pinned one, otherwise 1F1B, or
    interleaved 1F1B if a rank has several stages.
    """
    return pin.schedule or ("interleaved_1f1b" if (pin.vpp or 1) > 1 else "1f1b")


def _check_product(pin: Pins, devices: int) -> None:
    """Raises NoLayout unless the product of the pinned tp, pp, cp and dp divides the number of
    devices, and is it if all are pinned.
    """
    taken = prod(fixed_degrees(pin).values())
    if devices % taken or (len(fixed_degrees(pin)) == 4 and taken != devices):
        raise NoLayout(product_words(pin, devices))


def fixed_degrees(pin: Pins) -> dict[str, int]:
    """The pinned ones of the degrees that share out the devices, by name."""
    return {name: pin[name] for name in ("tp", "pp", "cp", "dp") if name in pin}


def product_words(pin: Pins, devices: int) -> str:
    """That the pinned degrees, of which there is one at least, do not share out the devices."""
    fixed = fixed_degrees(pin)
    taken = prod(fixed.values())
    last = next(reversed(fixed))
    others = {name: value for name, value in fixed.items() if name != last}
    rest = prod(others.values())
    remedy = (
        f"; with {' '.join(f'{n}={v}' for n, v in others.items())}, {last} is {devices // rest}"
        if devices % rest == 0
        else ""
    )
    product = " x ".join(f"{name}={value}" for name, value in fixed.items())
    return f"{product} = {taken} devices, but the cluster has {devices}{remedy}"


def _check_positions(cp: int, traced: TracedModel) -> None:
    calls = calls_of(traced, "aten::scaled_dot_product_attention")
    lengths = [
        int(t.shape[-2]) for call in calls for t in call.tensors[:2] if not is_symbolic(t.shape[-2])
    ]
    lengths = lengths or [tokens_per_row(traced)]
    if min(lengths) < cp:
        raise NoLayout(
            f"cp={cp} is more than the {min(lengths)} positions of a sequence; use cp={min(lengths)} or less"
        )
