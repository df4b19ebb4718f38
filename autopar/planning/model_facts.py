"""Facts about a model on which pins and candidates depend."""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt

from autopar.annotate.setting import is_periodic
from autopar.ir.calls import op_name
from autopar.ir.plan import Plan
from autopar.ir.traced import PreparedModel, TracedModel, per_model
from autopar.ops.dims import Call, is_symbolic
from autopar.ops.rules import op_dims
from autopar.ops.values import ops
from autopar.request.pins import is_recompute
from autopar.trace.deepen import counted
from autopar.trace.fusion.fused import fused


def divisors(number: int) -> list[int]:
    """All divisors of a number, ascending."""
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def prepare_model(traced: TracedModel, fuse: str, recompute: str | None) -> PreparedModel:
    """The model with the fused ops of mode `fuse`, and with every k-th layer marked for recomputation
    if `recompute` is `every-k`.
    """
    found = fused(traced, fuse)
    if recompute is None or not is_recompute(recompute) or not is_periodic(recompute):
        return PreparedModel(found)
    return PreparedModel(counted(found, int(recompute.partition("-")[2])))


def as_planned(traced: TracedModel, plan: Plan) -> PreparedModel:
    """The traced model as the plan needs it (`prepare_model`)."""
    return prepare_model(traced, plan.fusion.mode, plan.recompute)


@per_model(16)
def shared_updates(traced: TracedModel) -> list[str]:
    """Buffers that forward modifies and that several segments read or change. A pipeline would
    separate these segments.
    """
    holders: dict[str, set[int]] = {
        name: {source.segment} for name, source in traced.updates.items()
    }
    for number, segment in enumerate(traced.segments):
        for name in holders.keys() & set(segment.parameters):
            holders[name].add(number)
    return [name for name, of in holders.items() if len(of) > 1]


@per_model(16)
def attention_heads(traced: TracedModel) -> tuple[int, ...]:
    """The distinct numbers of heads of the model's attention calls, without those that depend on
    the batch. Cached for each model.
    """
    queries = [call.tensors[0] for call in calls_of(traced, "aten::scaled_dot_product_attention")]
    heads = [query.shape[-3] for query in queries if query.dim() > 2]
    return tuple(dict.fromkeys(int(count) for count in heads if not is_symbolic(count)))


def calls_of(traced: TracedModel, op: str) -> list[Call]:
    """All calls of an op, such as 'aten::gelu'. The segments of a class share one graph, so their
    calls are listed once.
    """
    nodes = [node for block in traced.classes for node in ops(block.graph)]
    return [Call(node) for node in nodes if op_name(node) == op]


@per_model(16)
def num_experts(traced: TracedModel) -> int:
    """The smallest number of experts in any of the model's routed ops; 0 if there is none. Cached
    for each model.
    """
    found = []
    for block in traced.classes:
        for node in ops(block.graph):
            dims = op_dims(node)
            found += (
                [int(joint.size) for joint in dims.joint.values() if joint.axis == "ep"]
                if dims is not None
                else []
            )
    return min(found, default=0)


def listed(numbers: Sequence[int]) -> str:
    """The numbers as text, for a message: `1, 2, 4`. After twelve of them `, ...` follows."""
    return ", ".join(map(str, numbers[:12])) + (", ..." if len(numbers) > 12 else "")
