"""Which dim of a tensor's storage a layout of one of its views shards.

Views of one tensor share storage, so that autograd keeps one tensor for all of them. This ends
where a view has another layout than the tensor: a conversion then made a new tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

from torch.fx import Graph, Node

from autopar.ir.sharding import AxisLayout
from autopar.ops.dims import OpDims, letters_of, locate
from autopar.ops.values import operand_names, ops, result_names


def storage_dims(
    graph: Graph, dims: Mapping[str, OpDims | None], roots: Mapping[str, str]
) -> Callable[[str, AxisLayout], int | None]:
    """A function (value, layout that shards it) -> the dim of the value that owns its storage. None
    if that value cannot be sharded alike.
    """
    makers = {name: (node, k) for node in ops(graph) for k, name in enumerate(result_names(node))}

    @cache
    def found(name: str, layout: AxisLayout) -> int | None:
        dim, rows, root = layout.dim, layout.pattern.rows, roots[name]
        while name != root:
            place = _before(*makers[name], dims, dim, rows)
            if place is None:
                return None
            name, dim, rows = place
        return dim

    return found


def _before(
    node: Node, k: int, dims: Mapping[str, OpDims | None], dim: int, rows: bool
) -> tuple[str, int, bool] | None:
    """The operand of a view, and which of its dims is sharded with a dim of result k. The third
    entry says whether positions of each batch row are sharded. None if no dim is.
    """
    view = dims[node.name]
    if view is None or not view.inputs:
        return None
    for letter in letters_of(view.outputs[k][dim]):
        after, before = locate(view.outputs[k], letter), locate(view.inputs[0], letter)
        if after is not None and before is not None and after[1].rows == rows:
            return operand_names(node)[0], before[0], before[1].rows
    return None
