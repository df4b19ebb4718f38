"""The rules by which candidates are listed, in words.

On devices of one kind, without a target, another program lists the same layouts from these words,
and holds plans to them (`benchmarks/search/printed_space.py`, `every_point.py`). What they say of
targets and several kinds of devices is not checked so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd

from autopar_cost_models import SCHEDULES, splits_backward

from autopar.ir.mesh import AXES
from autopar.ir.traced import TracedModel
from autopar.ops.work import tokens_per_row
from autopar.planning.candidates import (
    LONG_SEQUENCE,
    LONG_SHARE,
    MAX_STAGES_PER_RANK,
    PP_INSIDE_DP,
    keeps_batch,
    tp_limit,
)
from autopar.planning.model_facts import attention_heads, num_experts, shared_updates
from autopar.planning.pin_checks import (
    needs_pipeline,
    pipeline_ranks,
    schedule_of,
    searches_split_backward,
)
from autopar.request.pins import OFFLOADED_STAGES, ZERO_STAGES, Pins
from autopar.request.plan_request import PlanRequest
from autopar.solve.costs.candidate import MODES
from autopar.solve.staging.interleaved import FEWER


@dataclass(frozen=True, slots=True)
class SpaceRule:
    """A rule by which candidates are listed: the `values` of a choice, in words, and `why` there are
    no others.
    """

    choice: str
    values: str
    why: str


def space_rules(request: PlanRequest, traced: TracedModel) -> tuple[SpaceRule, ...]:
    """The rules by which the candidates of a request are listed, each with its reason. The first
    three state the facts that the others name.
    """
    rules = (
        *_facts(request, traced),
        *_mesh(request, traced),
        *_batch(request, traced),
        *_sharing(request),
        *_pipeline(request, traced),
        *_rest(request),
    )
    return tuple(
        SpaceRule(rule.choice, _pinned(rule.choice, request.pin), "pinned")
        if rule.choice in request.pin
        else rule
        for rule in rules
    )


def _pinned(choice: str, pin: Pins) -> str:
    """The value of a pinned choice. A schedule comes with the micro-batches that it needs."""
    return f"{pin[choice]}{_counts([pin[choice]]) if choice == 'schedule' else ''}"


def _facts(request: PlanRequest, traced: TracedModel) -> Iterator[SpaceRule]:
    groups = [
        f"{group.num_devices} {group.device.name} in nodes of {group.topology.devices_per_node}"
        for group in request.cluster.groups
    ]
    heads, experts = attention_heads(traced), num_experts(traced)
    yield SpaceRule("devices", " and ".join(groups), "all are used")
    yield SpaceRule(
        "model",
        f"{len(traced.layers)} layers, attention heads {_either(heads) or 'none'}, "
        f"{tokens_per_row(traced)} positions, experts {experts or 'none'}",
        "captured",
    )
    of = f"groups of {traced.together} " if traced.together > 1 else ""
    yield SpaceRule("batch", f"{request.global_batch} {of}sequences", "asked")


def _mesh(request: PlanRequest, traced: TracedModel) -> Iterator[SpaceRule]:
    pin, layers = request.pin, len(traced.layers)
    if pin.offload == "parameters":
        yield SpaceRule("pp", "1", "a pipeline has the parameters of its stages on the device")
    elif request.runs_here and (shared := shared_updates(traced)):
        yield SpaceRule("pp", "1", f"forward changes {shared[0]}, which several segments read")
    elif request.is_mixed:
        each = gcd(*(group.num_devices for group in request.cluster.groups))
        yield SpaceRule(
            "pp",
            f"divisors of the devices up to {layers} for which the devices of a rank divide {each}",
            "a stage has at least one layer, and a rank lies within one kind of devices",
        )
    elif needs_pipeline(pin):
        ranks = pipeline_ranks(request, layers)
        yield SpaceRule("pp", _either(ranks), "pins of a pipeline, and a layer for each stage")
    else:
        yield SpaceRule(
            "pp", f"divisors of the devices up to {layers}", "a stage has at least one layer"
        )
    yield SpaceRule(
        "tp",
        f"divisors of devices / pp up to {tp_limit(request.cluster)} that divide the attention heads",
        "beyond four nodes its messages take too long; other heads are split unevenly",
    )
    if request.is_mixed:
        yield SpaceRule("cp", "1", "on several kinds of devices it must be pinned")
    else:
        yield SpaceRule(
            "cp",
            "1, and divisors of devices / (pp x tp) of which twice divides the positions, with at least "
            f"{LONG_SHARE} positions a rank or {LONG_SEQUENCE} in all",
            "with fewer, messages take longer than the attention that hides them",
        )
    yield SpaceRule("dp", "what is left, if it divides the batch", "ranks get equal batches")
    yield SpaceRule(
        "ep", "divisors of dp that divide the experts", "ranks get equal numbers of experts"
    )
    yield from _placing(request)


def _placing(request: PlanRequest) -> Iterator[SpaceRule]:
    if request.is_mixed:
        yield SpaceRule(
            "deal",
            "the groups of devices along the pipeline in each order, those of a group in a row",
            "a message between groups at each border alone",
        )
        return
    default = "-".join(AXES)
    if request.pin.pp is None:
        yield SpaceRule("order", default, "both orders of every mesh would double the search")
    else:
        yield SpaceRule(
            "order",
            f"{default}, or {PP_INSIDE_DP} if that has more ranks of a pipeline on a node",
            "others spread groups that talk more",
        )


def _batch(request: PlanRequest, traced: TracedModel) -> Iterator[SpaceRule]:
    split = traced.split
    if keeps_batch(request, traced):
        yield SpaceRule(
            "micro_batch", "batch / dp", "losses of micro-batches do not add up to the batch's"
        )
        return
    least = split.least_rows
    most = f" with micro_batch x dp at least {least}" if least > 1 else ""
    yield SpaceRule("micro_batch", f"divisors of batch / dp{most}", "micro-batches are equal")


def _sharing(request: PlanRequest) -> Iterator[SpaceRule]:
    if request.pin.offload == "parameters":
        yield SpaceRule(
            "zero",
            f"{_either(OFFLOADED_STAGES)}, and 0 alone where dp x cp is 1",
            "others hold the updated parameters on the device",
        )
    else:
        yield SpaceRule(
            "zero",
            f"{_either(ZERO_STAGES)}, not 2 with a pipeline, and 0 alone where dp x cp is 1",
            "gradients of a pipeline stay whole until the last micro-batch: 2 saves no more than 1",
        )
    near = (
        ""
        if request.is_mixed
        else "; under ZeRO 3 without a pipeline also those within a node, if there are more nodes"
    )
    yield SpaceRule(
        "shard",
        f"all ranks of dp x cp{near}",
        "what is gathered once a step gains little from nearer ranks",
    )


def _pipeline(request: PlanRequest, traced: TracedModel) -> Iterator[SpaceRule]:
    restriction, why = request.restriction, "torch runs these"
    if request.pin.pp == 1:
        yield SpaceRule("schedule", "none", "there is no pipeline")
        return
    if request.pin.stages is not None:
        why = "with pinned stages, another must be pinned"
        name = schedule_of(request.pin)
        yield SpaceRule("schedule", name + _counts([name]), why)
        yield SpaceRule("vpp", f"{request.pin.vpp or 1}", why)
        yield SpaceRule("stages", request.pin.stages, "pinned")
        return
    names: Sequence[str] = [
        name
        for name in SCHEDULES
        if searches_split_backward(request, traced) or not splits_backward(name)
    ]
    if restriction is not None:
        names = [name for name in names if name in restriction.schedules]
        why = f"{restriction.name} has no others"
    several = [name for name in SCHEDULES if SCHEDULES[name].min_stages_per_rank > 1]
    yield SpaceRule("schedule", (_either(names) or "none") + _counts(names), why)
    if request.is_mixed:
        yield SpaceRule("vpp", "1", "on several kinds of devices a rank has one stage")
    else:
        yield SpaceRule(
            "vpp",
            f"1; under {_either(several)} 2 to {MAX_STAGES_PER_RANK}, with pp x vpp up to the layers",
            "more stages send more messages than the bubble that they save",
        )
    if restriction is not None and restriction.cuts is not None:
        yield SpaceRule("stages", restriction.cuts.how, f"so does {restriction.name}")
    else:
        yield SpaceRule(
            "stages",
            "any number of layers each if a rank has one; with several, the first and the last have up to "
            f"{FEWER} layers fewer than others, which differ by one at most",
            "several stages of a rank are dealt in turns",
        )


def _counts(names: Sequence[str]) -> str:
    """The numbers m of micro-batches with which schedules run, as text; '' if they run with any."""
    kinds = {name: SCHEDULES[name] for name in names if name in SCHEDULES}  # 'none' is no kind
    each = [name for name, kind in kinds.items() if kind.fills_ranks]
    rounds = [name for name, kind in kinds.items() if kind.in_rounds]
    words = f"; {_either(each)} with m >= pp micro-batches" if each else ""
    return words + (f"; {_either(rounds)} with m that max(1, m // pp) divides" if rounds else "")


def _rest(request: PlanRequest) -> Iterator[SpaceRule]:
    restriction = request.restriction
    if restriction is not None:
        yield SpaceRule(
            "recompute", _either(restriction.recompute), f"{restriction.name} has no others"
        )
    else:
        each, why = "for each block", "every-k must be pinned"
        if request.pin.stages is not None:
            each, why = "for all blocks", "with pinned stages a mix is not searched"
        elif request.pin.pp != 1 and not request.is_mixed:
            each += "; the stages of a rank, if several, have as many blocks in each mode, those that recompute most first"
        yield SpaceRule("recompute", f"{_either(MODES)} {each}", why)
    yield SpaceRule("offload", "none", "it must be pinned; what does not fit is told of it")
    yield SpaceRule(
        "ops",
        "a tensor-parallel strategy for each op, the same in all blocks of one structure",
        "batch, positions and experts are sharded wherever they go",
    )
    if restriction is not None:
        yield SpaceRule("target", f"what {restriction.name} can run", "asked")
        for rule in restriction.rules:
            yield SpaceRule("target", f"{restriction.name} {rule.why}", "asked")


def _either(values: Sequence[object]) -> str:
    return ", ".join(map(str, values))
