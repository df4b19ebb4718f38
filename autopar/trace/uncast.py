"""Keeps buffers in their own dtype in half precision, if forward casts them back to it before any
other use.
"""

from __future__ import annotations

import dataclasses
import operator
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

import torch
from torch.fx import Graph, Node

from autopar.ir.traced import ParameterSpec
from autopar.ops.values import input_node
from autopar.trace.edit import is_op

_CASTS = ("to", "_to_copy")


def uncast_buffers(
    graph: Graph,
    attributes: Mapping[str, str],
    specs: dict[str, ParameterSpec],
    among: Collection[str] | None = None,
) -> dict[str, ParameterSpec]:
    """Undo the cast to half precision, in the graph, of buffers that forward casts back to their
    own dtype before any other use. An example is the rotary frequencies of transformers.

    - `attributes`: the name in `specs` of each placeholder of a parameter or buffer.
    - `among`: names of the buffers for which this is allowed; None allows all.

    Returns a copy of the specs, with `keeps_dtype` set for these buffers.
    """
    slots: dict[str, list[Node]] = defaultdict(list)
    for node in graph.find_nodes(op="placeholder"):
        spec = specs.get(attributes.get(node.name, ""))
        if spec is None or (among is not None and spec.name not in among):
            continue
        if spec.buffer and node.meta["val"].dtype != getattr(torch, spec.dtype):
            slots[spec.name].append(node)
    found = {}
    for name, placeholders in slots.items():
        own = getattr(torch, specs[name].dtype)
        reads = _reads(placeholders, own)
        if reads is not None:
            _read_as(graph, *reads, own)
            found[name] = dataclasses.replace(specs[name], keeps_dtype=True)
    return specs | found


def _reads(placeholders: Sequence[Node], own: torch.dtype) -> tuple[list[Node], list[Node]] | None:
    """(the placeholders of a buffer and all views of them, the casts back to its dtype `own` or a
    wider one). None if there is no such cast, or if forward reads the buffer in any other way.

    The search ends at the first such read and visits each view once, so its time is linear in the
    number of views.
    """
    views, casts = dict.fromkeys(placeholders), []
    waiting = list(placeholders)
    while waiting:
        node = waiting.pop()
        for user in node.users:
            if _casts_back(user, node, own):
                casts.append(user)
            elif not _is_view(user):
                return None
            elif user not in views:
                views[user] = None
                waiting.append(user)
    return (list(views), casts) if casts else None


def _casts_back(user: Node, node: Node, own: torch.dtype) -> bool:
    if not is_op(user, *_CASTS) or user.args[0] is not node:
        return False
    to = user.meta["val"].dtype
    return to.is_floating_point and to.itemsize >= own.itemsize


def _is_view(node: Node) -> bool:
    if node.target is operator.getitem:
        return True  # of a view in several parts: other results are refused where they are made
    if not isinstance(node.target, torch._ops.OpOverload) or is_op(node, *_CASTS):
        return False
    # bits may be read as another dtype
    dtypes = {tensor.dtype for each in (node, *node.all_input_nodes) for tensor in _tensors(each)}
    return len(dtypes) == 1 and any(
        result.alias_info is not None for result in node.target._schema.returns
    )


def _tensors(node: Node) -> list[torch.Tensor]:
    val = node.meta.get("val")
    return [
        x
        for x in (val if isinstance(val, (list, tuple)) else (val,))
        if isinstance(x, torch.Tensor)
    ]


def _read_as(graph: Graph, views: Sequence[Node], casts: Sequence[Node], own: torch.dtype) -> None:
    """Set the fake values of `views` to the dtype `own`, and remove those of `casts` that then have
    no effect. In place.
    """
    for node in views:
        val = node.meta["val"]
        node.meta["val"] = (
            [part.to(own) for part in val] if isinstance(val, (list, tuple)) else val.to(own)
        )
    for node in casts:
        if node.meta["val"].dtype == own:
            node.replace_all_uses_with(input_node(node, 0))
            graph.erase_node(node)
