"""Lowers single ops: the call that replaces an op whose operands and results are shards.

Most ops run unchanged on local tensors. This module handles ops with sizes in their arguments, and
ops whose sharded form is a special function (vocabulary, context and expert parallelism).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.fx import Node

from autopar.errors import AutoparError
from autopar.ir.calls import argument_names, op_name, sparse_argument
from autopar.ir.plan_fields import AxisChoice
from autopar.ops.aten import aten
from autopar.ops.dims import Call, is_symbolic
from autopar.ops.rules import op_dims
from autopar.ops.strategies import lowering_of
from autopar.rewrite.lowerings import vocabulary_parallel
from autopar.rewrite.lowerings.context_attention import context_attention
from autopar.rewrite.lowerings.draws import lower_draw
from autopar.rewrite.lowerings.expert_parallel import expert_parallel
from autopar.rewrite.lowerings.sizes import Layouts, LocalSizes

Lowered = tuple[Any, tuple, dict]
"""Function, positional arguments and keyword arguments of the node that replaces a call."""


@dataclass(frozen=True, slots=True)
class Lowering:
    """The input for lowering a call (finding the call that this rank runs in its place), as data.

    It has the call over whole tensors, the plan's choice on each axis, this rank's sizes and
    device. For a call that draws random numbers, `noise` is the segment's noise node and the call's
    number.
    """

    node: Node
    choices: dict[str, AxisChoice]
    sizes: LocalSizes
    device: torch.device
    noise: tuple[Node, int] | None = None

    @property
    def result(self) -> Layouts:
        """The layout of the call's first result on each axis, by name."""
        return {axis: choice.outputs[0] for axis, choice in self.choices.items()}

    def operand(self, i: int) -> Layouts:
        """The layout of tensor operand `i` on each axis, by name."""
        return {axis: choice.inputs[i] for axis, choice in self.choices.items()}

    @property
    def special(self) -> dict[str, str]:
        """By name of a special lowering (another way to compute the sharded op, such as 'ring')
        that the choices need, the axis over which it runs. {} if none is needed.
        """
        dims = op_dims(self.node)
        named = {lowering_of(dims, x.strategy): axis for axis, x in self.choices.items()}
        return {name: axis for name, axis in named.items() if name}


def lower_call(op: Lowering, args: tuple, kwargs: dict) -> Lowered:
    """(function, args, kwargs) of the call that this rank runs. `args` and `kwargs` are those of
    the whole call, with local values in the place of tensors. May add nodes for sizes to the graph.

    Raises AutoparError if the choices need two special lowerings that cannot be combined, or one
    for a call that draws random numbers.
    """
    node, sizes, special = op.node, op.sizes, op.special
    name, asked = sparse_argument(node)
    if asked:
        args, kwargs = _replaced(node, args, kwargs, name, False)  # ranks add up dense gradients
    for names, lower in _SPECIAL:
        if special.keys() & names:
            if special.keys() - names or op.noise is not None:
                raise AutoparError(
                    f"op {node.name}: {' and '.join(sorted(special))} cannot be combined; plan again"
                )
            return lower(op, args, kwargs)
    if op.noise is not None:
        return lower_draw(node, args, sizes, op.result, *op.noise)
    if op_name(node) == "autopar::in_training":
        return vocabulary_parallel.in_training, args, {}
    args = tuple(op.device if isinstance(a, torch.device) else a for a in args)
    kwargs = {k: op.device if k == "device" else v for k, v in kwargs.items() if k != "pin_memory"}
    # squeezed by a reshape: a dim that is 1 on this rank alone must stay
    squeezes = op_name(node) == "aten::squeeze"
    if squeezes or node.target in (aten.reshape.default, aten.expand.default):
        target = aten.reshape.default if squeezes else node.target
        return target, (args[0], _shape_argument(node, sizes, op.result)), {}
    if node.target is aten.repeat_interleave.self_int:
        kwargs = {k: v for k, v in kwargs.items() if k != "output_size"}  # it follows from the rest
    if node.target is aten.split_with_sizes.default:
        return node.target, (args[0], _local_sections(op), *args[2:]), kwargs
    return node.target, whole_sizes(args, sizes), whole_sizes(kwargs, sizes)


def _local_sections(op: Lowering) -> list:
    """The sizes of the parts of a split on this rank, in order: numbers, or nodes that compute
    them.
    """
    dim = Call(op.node).dim(default=0)
    sections = []
    for k, part in enumerate(Call(op.node).results):
        layouts = {axis: choice.outputs[k] for axis, choice in op.choices.items()}
        sections.append(op.sizes.local(part.shape[dim], dim, layouts))
    return sections


def _shape_argument(node: Node, sizes: LocalSizes, result: Layouts) -> list:
    """The shape argument of reshape and expand on this rank: numbers, and nodes that compute sizes.
    For expand, dims that do not grow become -1. For reshape, the one dim that depends on the batch
    becomes -1 if that is unambiguous.
    """
    val, source = node.meta["val"], Call(node).tensors[0]
    symbolic = [d for d, s in enumerate(val.shape) if is_symbolic(s)]
    if node.target is aten.expand.default:
        offset = val.dim() - source.dim()
        return [
            -1
            if d >= offset and str(source.shape[d - offset]) == str(s)
            else sizes.local(s, d, result)
            for d, s in enumerate(val.shape)
        ]
    fixed = {d: sizes.local(s, d, result) for d, s in enumerate(val.shape) if d not in symbolic}
    if len(symbolic) == 1 and 0 not in fixed.values():  # an empty shard leaves -1 undetermined
        return [-1 if d in symbolic else fixed[d] for d in range(val.dim())]
    return sizes.shape(val, result)


def whole_sizes(value: Any, sizes: LocalSizes) -> Any:
    """An argument (nested in lists, tuples and dicts) in which batch-dependent sizes are nodes that
    compute them from the local batch, for the whole micro-batch over all ranks.
    """
    if isinstance(value, (list, tuple)):
        return type(value)(whole_sizes(v, sizes) for v in value)
    if isinstance(value, dict):
        return {k: whole_sizes(v, sizes) for k, v in value.items()}
    return sizes.whole(value) if isinstance(value, (torch.SymInt, torch.SymFloat)) else value


def _embedding(op: Lowering, args: tuple, kwargs: dict) -> Lowered:
    call, axis = Call(op.node), op.special["vocab_parallel_embedding"]
    found = {"padding_idx": call.arg("padding_idx", -1)}
    vocab = int(call.tensors[0].shape[0])
    return vocabulary_parallel.vocab_parallel_embedding, (*args[:2], axis, vocab), found


def _cross_entropy(op: Lowering, args: tuple, kwargs: dict) -> Lowered:
    call, axis = Call(op.node), op.special["vocab_parallel_cross_entropy"]
    vocab = int(call.tensors[0].shape[1])
    found = {
        "reduction": {0: "none", 2: "sum"}[call.arg("reduction")],
        "ignore_index": call.arg("ignore_index", -100),
    }
    return vocabulary_parallel.vocab_parallel_cross_entropy, (*args[:2], axis, vocab), found


def _local_groups(op: Lowering, args: tuple, kwargs: dict) -> Lowered:
    """The call, as (function, args, kwargs), with its number of channel groups divided by the
    number of ranks that shard them.
    """
    name = "groups" if "groups" in argument_names(op.node) else "num_groups"
    over = [axis for axis, choice in op.choices.items() if choice.strategy == "g"]
    parts = prod(op.sizes.mesh.size(axis) for axis in over)
    groups = op.sizes.share(Call(op.node).arg(name), parts)
    return op.node.target, *_replaced(op.node, args, kwargs, name, groups)


def _replaced(node: Node, args: tuple, kwargs: dict, name: str, value: Any) -> tuple[tuple, dict]:
    """(args, kwargs) with `value` for the argument that the schema calls `name`, whether it was
    passed by position or keyword. It must have been passed, or be the next positional one.
    """
    position = argument_names(node).index(name)
    if name in kwargs:
        return args, kwargs | {name: value}
    return (*args[:position], value, *args[position + 1 :]), kwargs


def _statistics_loss(op: Lowering, args: tuple, kwargs: dict) -> Lowered:
    """The call of `vocab_parallel_statistics` that replaces a fused cross-entropy whose classes are
    sharded, as (function, args, kwargs). Arguments that are None are left out.
    """
    call, axis = Call(op.node), op.special["vocab_parallel_statistics"]
    found = _given(op.node, args, kwargs, 2)
    vocab = int(call.tensors[0].shape[-1])
    return vocabulary_parallel.vocab_parallel_statistics, (*args[:2], axis, vocab), found


def _linear_loss(op: Lowering, args: tuple, kwargs: dict) -> Lowered:
    """The call of `vocab_parallel_linear_loss` that replaces a head's product with its cross-entropy
    whose classes are sharded, as (function, args, kwargs). Arguments that are None are left out.
    """
    call, axis = Call(op.node), op.special["vocab_parallel_linear_loss"]
    found = _given(op.node, args, kwargs, 3)
    vocab = int(call.tensors[1].shape[0])
    return vocabulary_parallel.vocab_parallel_linear_loss, (*args[:3], axis, vocab), found


def _given(node: Node, args: tuple, kwargs: dict, first: int) -> dict[str, Any]:
    """The arguments of a call by name, from number `first` of its schema on, without those that are
    None.
    """
    schema = argument_names(node)
    given = dict(zip(schema, args, strict=False)) | kwargs
    return {name: given[name] for name in schema[first:] if given.get(name) is not None}


_CONTEXT = {"context_gather": "gather", "ring": "ring", "ulysses": "ulysses"}


def _attention(op: Lowering, args: tuple, kwargs: dict) -> Lowered:
    """The call that replaces attention whose positions or grouped heads are sharded, as (function,
    args, kwargs). If this rank's query heads need a selection of key heads, nodes for that are
    added first.
    """
    call, special = Call(op.node), op.special
    query, key, value, *rest = args
    if "grouped_heads" in special:
        heads, key_heads = (int(t.shape[1]) for t in call.tensors[:2])
        own = special["grouped_heads"], heads, key_heads
        key, value = (
            op.sizes.graph.call_function(vocabulary_parallel.own_key_heads, (x, *own))
            for x in (key, value)
        )
    context = next((name for name in _CONTEXT if name in special), "")
    if not context:
        return op.node.target, (query, key, value, *rest), kwargs
    axis = special[context]
    found = {
        "seq": int(call.tensors[0].shape[-2]),
        "kv_seq": int(call.tensors[1].shape[-2]),
        "mask": rest[0] if rest else kwargs.get("attn_mask"),
        "is_causal": call.arg("is_causal", False),
        "scale": call.arg("scale"),
        "zigzag": op.operand(0)[axis].pattern.zigzag,
    }
    asked = {k: v for k, v in found.items() if v not in (None, False)}
    return context_attention, (query, key, value, axis, _CONTEXT[context]), asked


def _experts(op: Lowering, args: tuple, kwargs: dict) -> Lowered:
    """The call of `expert_parallel` that replaces routed experts, as (function, args, kwargs): the
    op's arguments in the order of its schema, then the axis and the total number of experts.
    """
    schema = argument_names(op.node)
    given = dict(zip(schema, args, strict=False)) | kwargs
    capacity = {"capacity_factor": given["capacity_factor"]} if given.get("capacity_factor") else {}
    positional = [given.get(name) for name in schema if name != "capacity_factor"]
    experts = int(Call(op.node).arg("down").meta["val"].shape[0])
    return expert_parallel, (*positional, op.special["expert_parallel"], experts), capacity


_SPECIAL = (
    ({"vocab_parallel_embedding"}, _embedding),
    ({"vocab_parallel_cross_entropy"}, _cross_entropy),
    ({"vocab_parallel_statistics"}, _statistics_loss),
    ({"vocab_parallel_linear_loss"}, _linear_loss),
    ({"grouped_heads", *_CONTEXT}, _attention),
    ({"expert_parallel"}, _experts),
    ({"local_groups"}, _local_groups),
)
