"""Whether pins can hold for a model and a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd, prod
from typing import Any

from autopar_cost_models import OFFLOADS, SCHEDULES, check_schedule, splits_backward

from autopar.annotate.context_method import METHODS
from autopar.errors import AutoparError, shown
from autopar.ir.mesh import MOST, MeshShape, groups_of
from autopar.ir.plan_checks import SELECTIVE_MODES
from autopar.ir.traced import TracedModel
from autopar.ops.dims import is_symbolic
from autopar.ops.work import tokens_per_row
from autopar.planning.model_facts import (
    _attention_heads,
    _listed,
    _parted,
    calls_of,
    divisors,
    num_experts,
)
from autopar.request.pins import (
    _DEGREES,
    OFFLOADED_STAGES,
    PINS,
    RECOMPUTE,
    ZERO_STAGES,
    is_recompute,
)
from autopar.request.plan_request import PlanRequest


def check_pins(request: PlanRequest, traced: TracedModel) -> None:
    """Raise AutoparError if the pins are unknown, malformed, contradictory, or impossible for this model and cluster."""
    devices, pin = request.cluster.num_devices, request.pin
    for name, value in pin.items():
        if name not in PINS:
            raise AutoparError(f"unknown pin {shown(name)}; pins are {', '.join(PINS)}")
        if not isinstance(value, str | int | float):
            raise AutoparError(
                f"{name}={shown(value)} must be a text, a whole number, True or False"
            )
        if name == "schedule" and value not in (*SCHEDULES, "none"):
            raise AutoparError(f"schedule={shown(value)} is not known; {', '.join(SCHEDULES)} are")
        if name == "sequence_parallel" and not isinstance(value, bool):
            raise AutoparError(f"sequence_parallel={shown(value)} is not known; true and false are")
        if name in (*_DEGREES, "vpp", "micro_batch") and (
            not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST
        ):
            raise AutoparError(
                f"{name}={shown(value)} must be a whole number >= 1, and at most {MOST:,}"
            )
        if name == "order":
            MeshShape(order=value)
        if name == "deal":
            groups_of(value)
        if name == "context_method" and value not in METHODS:
            raise AutoparError(
                f"context_method={shown(value)} is not known; {', '.join(METHODS)} are"
            )
        if name == "stages" and value != "even":
            raise AutoparError(
                f"stages={shown(value)} is not known; 'even' deals layers evenly, without the pin stages are cut as is best"
            )
        if name == "zero" and (type(value) is not int or value not in ZERO_STAGES):
            raise AutoparError(f"zero={shown(value)} is not a ZeRO stage; 0, 1, 2 and 3 are")
        if name == "shard":
            _check_shard(pin)
        if name == "offload":
            _check_offload(request)
        if name == "recompute" and not is_recompute(value):
            known = ", ".join((*RECOMPUTE, *SELECTIVE_MODES))
            raise AutoparError(
                f"recompute={shown(value)} is not known; {known} and every-2, every-3, ... are"
            )
    for name in _DEGREES:
        if name in pin and devices % pin[name]:
            raise AutoparError(
                f"{name}={pin[name]} does not divide {devices} devices; {_listed(divisors(devices))} do"
            )
    if pin.get("offload") == "parameters":
        check_fetched(pin.get("pp", 1), pin.get("zero", 0))
    if request.is_mixed:
        _check_groups(request)
    elif "deal" in pin:
        raise AutoparError(
            f"deal={pin['deal']}: the devices of {request.cluster.name} are of one kind; drop the pin"
        )
    tp, pp, cp, dp, ep = (pin.get(name) for name in _DEGREES)
    _check_product({name: pin[name] for name in ("tp", "pp", "cp", "dp") if name in pin}, devices)
    if dp is None and tp is not None and cp is not None:
        dp = devices // tp // cp // (pp or 1)
    _check_pipeline(request, traced)
    if dp is not None and request.global_batch % dp:
        raise AutoparError(
            f"global batch {request.global_batch} cannot be split over dp={dp}; use a multiple of {dp}"
        )
    if dp is not None and "micro_batch" in pin and request.global_batch // dp % pin["micro_batch"]:
        rows = request.global_batch // dp
        raise AutoparError(
            f"micro_batch={pin['micro_batch']} does not divide the {rows} sequences of a rank; {_listed(divisors(rows))} do"
        )
    if ep is not None and dp is not None and dp % ep:
        raise AutoparError(
            f"ep={ep} does not divide dp={dp}, of which it is a part; {_listed(divisors(dp))} do"
        )
    if tp is not None and tp > 1:
        _check_heads(tp, traced)
    if cp is not None and cp > 1:
        _check_positions(cp, traced)
    if ep is not None and ep > 1:
        most = num_experts(traced)
        if not most:
            raise AutoparError(
                f"ep={ep}: the model has no routed experts that autopar can shard; drop the pin"
            )
        if ep > most:
            raise AutoparError(
                f"ep={ep} is more than the {most} experts of the model; use ep={most} or less"
            )


def _check_groups(request: PlanRequest) -> None:
    """The pins on devices of several kinds, where each rank of the pipeline lies within one group."""
    pin, groups = request.pin, request.cluster.groups
    sizes, inside = (
        [group.num_devices for group in groups],
        prod(pin.get(name, 1) for name in ("tp", "cp", "dp")),
    )
    where = f"{request.cluster.name} has groups of {' and '.join(map(str, sizes))} devices"
    if gcd(*sizes) % inside:
        words = " x ".join(f"{name}={pin[name]}" for name in ("tp", "cp", "dp") if name in pin)
        raise AutoparError(
            f"{where}, and a rank of the pipeline lies within one of them: {words} = {inside} devices must divide each; "
            f"{_listed(divisors(gcd(*sizes)))} do"
        )
    if "pp" in pin and pin["pp"] not in (
        fitting := [sum(sizes) // each for each in reversed(divisors(gcd(*sizes)))]
    ):
        raise AutoparError(
            f"{where}, all of which the ranks of a pipeline share out evenly: pp={pin['pp']} cannot; {_listed(fitting)} can"
        )
    least_stages = (
        SCHEDULES[pin["schedule"]].min_stages_per_rank
        if pin.get("schedule", "none") != "none"
        else 1
    )
    refused = {
        "vpp": pin.get("vpp", 1) > 1 and "a rank has one stage there, of its own size",
        "schedule": least_stages > 1 and "a rank has one stage there",
        "stages": "stages" in pin and "stages are sized to them",
        "offload": pin.get("offload", "none") != "none" and "their hosts differ",
    }
    for name, why in refused.items():
        if why:
            raise AutoparError(
                f"{name}={pin[name]}: the devices of {request.cluster.name} are of several kinds, and {why}; drop the pin"
            )
    if pin.get("cp", 1) > 1 and "context_method" not in pin:
        raise AutoparError(
            f"cp={pin['cp']} on several kinds of devices needs one way for all: pin context_method={METHODS[0]} too"
        )


def _check_shard(pin: Mapping[str, Any]) -> None:
    """The pin of hybrid sharding, as far as no mesh is needed."""
    value = pin["shard"]
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MOST:
        raise AutoparError(
            f"shard={shown(value)} must be a whole number: the data-parallel ranks that share out what ZeRO does, 0 for all"
        )
    if value == 1:
        raise AutoparError(
            "shard=1: a rank alone shares out nothing; pin zero=0, or shard=2 or more"
        )
    if value and pin.get("zero") == 0:
        raise AutoparError(
            f"shard={value}: {value} ranks share out what ZeRO does, and zero=0 shares out nothing; pin zero=1, 2 or 3"
        )


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


def _check_pipeline(request: PlanRequest, traced: TracedModel) -> None:
    """The pins of a pipeline."""
    pin = request.pin
    pp, vpp, schedule = (
        pin.get("pp", len(request.cluster.groups)),
        pin.get("vpp", 1),
        pin.get("schedule"),
    )
    if request.runnable and pp > 1 and _parted(traced):
        name = _parted(traced)[0]
        raise AutoparError(
            f"the engine cannot run pp={pp}: forward changes buffer {name}, which several segments read; use pp=1"
        )
    if splits_backward(schedule or "none") and not may_split_backward(request):
        what = "torch.compile" if request.software.compiled else "recompute=op"
        raise AutoparError(f"the engine cannot run {what} under {schedule}; pin schedule=1f1b")
    if pp == 1:
        for name, value, alone in (
            ("vpp", vpp, 1),
            ("schedule", schedule or "none", "none"),
            ("stages", pin.get("stages"), None),
        ):
            if value != alone:
                raise AutoparError(
                    f"{name}={value} is of a pipeline, and pp is 1; pin pp, or drop the pin"
                )
        return
    blocks = len(traced.layers)
    if pp * vpp > blocks + 2:
        raise AutoparError(
            f"pp={pp} x vpp={vpp} = {pp * vpp} stages are more than the model's {blocks} blocks; use {blocks} or less"
        )
    if schedule == "none":
        raise AutoparError(
            f"schedule=none: a pipeline of pp={pp} has one; {', '.join(SCHEDULES)} are known"
        )
    if (
        "micro_batch" in pin
        and "dp" in pin
        and request.global_batch % (pin["dp"] * pin["micro_batch"]) == 0
    ):
        number = request.global_batch // pin["dp"] // pin["micro_batch"]
        if schedule is None and vpp == 1:  # some schedule runs any number
            return
        try:
            check_schedule(schedule_of(pin), pp, vpp, number)
        except ValueError as error:
            raise AutoparError(f"pp={pp} vpp={vpp} with {number} micro-batches: {error}") from None


def may_split_backward(request: PlanRequest) -> bool:
    """Whether schedules that split backwards are searched.  What is to run must do without kept
    results, which torch serves once, and without torch.compile, whose functions give all
    gradients at once."""
    return not request.runnable or not (
        request.pin.get("recompute") == "op" or request.software.compiled
    )


def schedule_of(pin: dict[str, Any]) -> str:
    """The schedule of a pipeline whose stages are pinned: what is pinned, or 1F1B, interleaved if a rank has several stages."""
    return pin.get("schedule") or ("interleaved_1f1b" if pin.get("vpp", 1) > 1 else "1f1b")


def _check_heads(tp: int, traced: TracedModel) -> None:
    for heads in _attention_heads(traced):
        if heads % tp:
            raise AutoparError(
                f"tp={tp} does not divide {heads} attention heads; {_listed(divisors(heads))} do"
            )


def _check_product(fixed: dict[str, int], devices: int) -> None:
    """Pinned degrees must multiply to a divisor of the devices, and to all of them if tp, cp and dp (cp being 1 unless pinned) are."""
    taken = prod(fixed.values())
    if devices % taken == 0 and not ("tp" in fixed and "dp" in fixed and taken != devices):
        return
    last = next(reversed(fixed))
    others = {name: value for name, value in fixed.items() if name != last}
    rest = prod(others.values())
    remedy = (
        f"; with {' '.join(f'{n}={v}' for n, v in others.items())}, {last} is {devices // rest}"
        if devices % rest == 0
        else ""
    )
    product = " x ".join(f"{name}={value}" for name, value in fixed.items())
    raise AutoparError(f"{product} = {taken} devices, but the cluster has {devices}{remedy}")


def _check_positions(cp: int, traced: TracedModel) -> None:
    calls = calls_of(traced, "aten::scaled_dot_product_attention")
    lengths = [
        int(t.shape[-2]) for call in calls for t in call.tensors[:2] if not is_symbolic(t.shape[-2])
    ]
    lengths = lengths or [tokens_per_row(traced)]
    if min(lengths) < cp:
        raise AutoparError(
            f"cp={cp} is more than the {min(lengths)} positions of a sequence; use cp={min(lengths)} or less"
        )
