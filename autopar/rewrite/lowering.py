"""Lowering of single ops: what a call becomes when its operands and results are shards.

Most ops run unchanged on local tensors.  Here are those that name sizes in their arguments, and those whose sharding needs a
program of its own (vocab-parallel embedding and cross-entropy).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from autopar.ops.dims import Call, is_symbolic
from autopar.rewrite import sharded_ops
from autopar.rewrite.sizes import Layouts, LocalSizes

aten = torch.ops.aten


def lower_call(
    node: Node, args: tuple, kwargs: dict, sizes: LocalSizes, result: Layouts, lowering: tuple[str, str] | None, device: torch.device
) -> tuple[Any, tuple, dict]:
    """(target, args, kwargs) of `node` on this rank.

    `args` and `kwargs` already name local values; `result` is the layout of the first result on each axis; `lowering` is
    (name, axis) of a special lowering, if the chosen strategy needs one.
    """
    if lowering is not None:
        return _SPECIAL[lowering[0]](node, args, lowering[1])
    if "device" in kwargs or any(isinstance(a, torch.device) for a in args):
        kwargs = kwargs | {"device": device} if "device" in kwargs else kwargs
        args = tuple(device if isinstance(a, torch.device) else a for a in args)
    kwargs = {k: v for k, v in kwargs.items() if k != "pin_memory"}
    if node.target in (aten.reshape.default, aten.expand.default):
        return node.target, (args[0], _shape_argument(node, sizes, result)), {}
    if getattr(getattr(node.target, "_schema", None), "name", "") == "aten::squeeze":  # a dim that is 1 on this rank alone must stay
        return aten.reshape.default, (args[0], _shape_argument(node, sizes, result)), {}
    sharded = tuple(axis for axis, layout in result.items() if layout.is_shard)
    if sharded and _is_random(node):
        return sharded_ops.randomly, (node.target, sharded, *args), kwargs
    return node.target, whole_sizes(args, sizes), whole_sizes(kwargs, sizes)


def _is_random(node: Node) -> bool:
    """Whether a sharded op draws random numbers: the ops with a rule that may are dropout, alone and inside attention."""
    name = getattr(getattr(node.target, "_schema", None), "name", "")
    if name == "aten::dropout":
        return bool(Call(node).arg("train")) and Call(node).arg("p") > 0
    return name == "aten::scaled_dot_product_attention" and Call(node).arg("dropout_p", 0.0) > 0


def _shape_argument(node: Node, sizes: LocalSizes, result: Layouts) -> list:
    """Local sizes for reshape and expand; the one dim that follows the batch is written -1 where that is unambiguous."""
    val, source = node.meta["val"], node.args[0].meta["val"]
    symbolic = [d for d, s in enumerate(val.shape) if is_symbolic(s)]
    if node.target is aten.expand.default:
        offset = val.dim() - source.dim()
        return [
            -1 if d >= offset and str(source.shape[d - offset]) == str(s) else sizes.local(s, d, result) for d, s in enumerate(val.shape)
        ]
    fixed = {d: sizes.local(s, d, result) for d, s in enumerate(val.shape) if d not in symbolic}
    if len(symbolic) == 1 and 0 not in fixed.values():  # an empty shard leaves -1 undetermined
        return [-1 if d in symbolic else fixed[d] for d in range(val.dim())]
    return sizes.shape(val, result)


def whole_sizes(value: Any, sizes: LocalSizes) -> Any:
    """Arguments with sizes that depend on the batch replaced by nodes that compute them."""
    if isinstance(value, (list, tuple)):
        return type(value)(whole_sizes(v, sizes) for v in value)
    if isinstance(value, dict):
        return {k: whole_sizes(v, sizes) for k, v in value.items()}
    return sizes.whole(value) if isinstance(value, (torch.SymInt, torch.SymFloat)) else value


def _embedding(node: Node, args: tuple, axis: str) -> tuple[Any, tuple, dict]:
    vocab = int(node.args[0].meta["val"].shape[0])
    return sharded_ops.vocab_parallel_embedding, (args[0], args[1], axis, vocab), {"padding_idx": Call(node).arg("padding_idx", -1)}


def _cross_entropy(node: Node, args: tuple, axis: str) -> tuple[Any, tuple, dict]:
    call = Call(node)
    vocab = int(node.args[0].meta["val"].shape[1])
    kwargs = {"reduction": {0: "none", 2: "sum"}[call.arg("reduction")], "ignore_index": call.arg("ignore_index", -100)}
    return sharded_ops.vocab_parallel_cross_entropy, (args[0], args[1], axis, vocab), kwargs


def _local_groups(node: Node, args: tuple, axis: str) -> tuple[Any, tuple, dict]:
    """The op is told how many of its channel groups this rank holds."""
    names = [spec.name for spec in node.target._schema.arguments]
    position = names.index("groups" if "groups" in names else "num_groups")
    return sharded_ops.with_local_groups, (node.target, position, axis, *args), {}


_SPECIAL = {
    "local_groups": _local_groups,
    "vocab_parallel_embedding": _embedding,
    "vocab_parallel_cross_entropy": _cross_entropy,
}
