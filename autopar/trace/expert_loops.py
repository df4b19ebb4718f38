"""Rewrites a loop over experts, each of which computes the tokens that chose it, as one
`autopar::routed_experts`.

    for e in range(experts):
        choice, token = torch.where(one_hot(index, experts).permute(2, 1, 0)[e])
        total.index_add_(0, token, expert[e](x[token]) * weights[token, choice, None])

Mixtral and other mixtures of experts are written so in litgpt and in transformers before 5.0. Such
a loop is recognized by what each turn adds. The matrices of the experts are stacked, unless they are
parts of one parameter. What is no such loop stays as it is.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import partial
from typing import Any

import autopar_kernels.routed_experts  # noqa: F401 (registers the op)
import torch
from torch.fx import Graph, Node

from autopar.ir.calls import argument, arguments
from autopar.ops.aten import aten
from autopar.ops.kinds import same
from autopar.trace.edit import call, is_op
from autopar.trace.expert_mlps import Mlp, mlp_of, stacked
from autopar.trace.hit_loops import is_run_for_hits


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The entries of `index` (T, K) that are one expert, as `torch.where` gives them: the numbers of
    their tokens and of their choices.
    """

    index: Node
    expert: int
    token: Node
    choice: Node | None
    masks: Node | None


@dataclass(frozen=True, slots=True)
class _Turn:
    """What the turn of one expert adds to `base`, and the nodes that read `base`."""

    chosen: _Chosen
    weights: Node
    x: Node
    mlp: Mlp
    base: Node
    result: Node
    readers: frozenset[Node]


def route_expert_loops(graph: Graph) -> None:
    """Rewrite all such loops of a graph."""
    turns = {node: turn for node in graph.nodes if (turn := _turn(node)) is not None}
    inner = {turn.base for turn in turns.values()}
    for last in [turn for node, turn in turns.items() if node not in inner]:
        loop = [last]
        while (before := turns.get(loop[-1].base)) is not None:
            if set(before.result.users) - loop[-1].readers:
                break
            loop.append(before)
        loop.reverse()
        if _is_whole(loop):
            with graph.inserting_before(last.result):
                found = _routed(graph, loop)
            last.result.replace_all_uses_with(found)


def _is_whole(loop: list[_Turn]) -> bool:
    """Whether the turns are those of all experts, on the same tokens, and of the same form."""
    first = loop[0]
    alike = all(
        (turn.chosen.index, turn.weights, turn.x, turn.mlp.form)
        == (first.chosen.index, first.weights, first.x, first.mlp.form)
        for turn in loop
    )
    experts = sorted(turn.chosen.expert for turn in loop)
    return alike and experts == list(range(_experts(first.chosen.index)))


def _routed(graph: Graph, loop: list[_Turn]) -> Node:
    first, last = loop[0], loop[-1]
    emit = partial(call, graph, first.chosen.index)  # a node outside of the loop
    mlps = [turn.mlp for turn in sorted(loop, key=lambda turn: turn.chosen.expert)]
    found = emit(
        torch.ops.autopar.routed_experts.default,
        first.x,
        first.chosen.index,
        first.weights,
        *stacked(mlps, emit),
        first.mlp.activation,
        False,
        0.0,
    )
    wanted = last.result.meta["val"].dtype
    if found.meta["val"].dtype != wanted:
        found = emit(aten.to.dtype, found, wanted)
    if is_op(first.base, "zeros", "zeros_like", "new_zeros"):
        return found
    return emit(aten.add.Tensor, first.base, found)


# --------------------------------------------------------------------------------------- a turn


def _turn(node: Node) -> _Turn | None:
    """The turn that ends with a node, or None."""
    if (added := _added(node)) is None:
        return None
    base, token, rows, readers = added
    if (chosen := _chosen(token)) is None:
        return None
    if not is_run_for_hits(node, chosen.masks, chosen.token.all_input_nodes[0]):
        return None
    rows = _uncast(rows)
    if not is_op(rows, "mul") or len(rows.all_input_nodes) != 2:
        return None
    for value, factor in (arguments(rows), arguments(rows)[::-1]):
        weights = _weights(factor, chosen)
        mlp = weights and mlp_of(_uncast(value), partial(_tokens, chosen=chosen))
        if weights is not None and mlp:
            return _Turn(chosen, weights, mlp.x, mlp, base, node, readers)
    return None


def _added(node: Node) -> tuple[Node, Node, Node, frozenset[Node]] | None:
    """(base, numbers of rows, what is added to these rows, the nodes that read base), or None."""
    if is_op(node, "index_add"):
        base, dim, token, rows = arguments(node)[:4]
        plain = dim == 0 and argument(node, "alpha", 1) == 1
        return (base, token, rows, frozenset({node})) if plain else None
    if (
        not is_op(node, "index_put")
        or len(arguments(node)[1]) != 1
        or arguments(node)[1][0] is None
    ):
        return None
    base, (token,), rows = arguments(node)[:3]
    if argument(node, "accumulate", False):
        return base, token, rows, frozenset({node})
    sum_of_two = is_op(rows, "add") and len(rows.all_input_nodes) == 2
    if not sum_of_two or argument(rows, "alpha", 1) != 1 or not _is_distinct(token):
        return None
    for before, new in (arguments(rows), arguments(rows)[::-1]):
        if is_op(before, "index") and arguments(before) == (base, [token]):
            return base, token, new, frozenset({node, before})
    return None


def _is_distinct(token: Node) -> bool:
    """Whether a token chooses an expert only once."""
    index = None if (chosen := _chosen(token)) is None else chosen.index
    return index is not None and (_is_topk(index) or same(index.meta["val"].shape[1], 1))


def _is_topk(index: Node) -> bool:
    return _topk_width(index) is not None


def _topk_width(index: Node) -> Any:
    """Among how many experts an index (T, K) that `topk` gives chooses, or None for another index."""
    if index.target is not operator.getitem or arguments(index)[1] != 1 or not _is_index(index):
        return None
    topk = arguments(index)[0]
    along_last = is_op(topk, "topk") and argument(topk, "dim", -1) in (-1, 1)
    return arguments(topk)[0].meta["val"].shape[-1] if along_last else None


def _chosen(token: Node) -> _Chosen | None:
    """The entries of the choices whose tokens a node numbers, or None."""
    found = _item(token)
    if found is None:
        return None
    where, place = found
    row = _row(arguments(where)[0])
    if row is None or row[2][place] != 0:
        return None
    index, expert, _, masks = row
    others = [user for user in where.users if _item(user) == (where, 1 - place)]
    return _Chosen(index, expert, token, others[0] if others else None, masks)


def _item(node: object) -> tuple[Node, int] | None:
    """(where, which of its results) of an item of `torch.where(mask)`, or None."""
    if not isinstance(node, Node) or node.target is not operator.getitem:
        return None
    source, place = arguments(node)
    one = isinstance(source, Node) and is_op(source, "where", "nonzero_numpy")
    return (source, place) if one and len(arguments(source)) == 1 else None


def _row(mask: Node) -> tuple[Node, int, tuple[int, ...], Node | None] | None:
    """(index, expert, order, masks) of a mask that is True where index == expert, or None. `order`: which dim
    of index (T, K) each dim of the mask is. `masks`: those of all experts, if it is one of them.
    """
    mask = _uncast(mask)
    if is_op(mask, "squeeze", "reshape") and is_op(arguments(mask)[0], "slice"):
        part = arguments(mask)[0]
        start, end = argument(part, "start", 0), argument(part, "end")
        one = argument(part, "dim", 0) == 0 and end == start + 1
        same_dims = mask.meta["val"].dim() == part.meta["val"].dim() - 1
        return _of_expert(arguments(part)[0], 0, start) if one and same_dims else None
    if is_op(mask, "select"):
        return _of_expert(arguments(mask)[0], argument(mask, "dim"), argument(mask, "index"))
    if mask.target is operator.getitem and is_op(arguments(mask)[0], "unbind"):
        return _of_expert(
            arguments(arguments(mask)[0])[0],
            argument(arguments(mask)[0], "dim", 0),
            arguments(mask)[1],
        )
    if is_op(mask, "eq") and isinstance(arguments(mask)[1], int) and _is_topk(arguments(mask)[0]):
        index = arguments(mask)[0]
        index.meta[_EXPERTS] = _topk_width(index)
        return index, arguments(mask)[1], (0, 1), None
    return None


def _of_expert(
    masks: Node, dim: int, expert: int
) -> tuple[Node, int, tuple[int, ...], Node] | None:
    """`_row` of one entry along a dim of the masks of all experts."""
    masks, order = _uncast(masks), (0, 1, 2)
    if is_op(masks, "permute"):
        order = tuple(d % 3 for d in argument(masks, "dims"))
        masks = _uncast(arguments(masks)[0])
    index = _all_experts(masks)
    if index is None or len(order) != 3 or order[dim % 3] != 2:
        return None
    left = (*order[: dim % 3], *order[dim % 3 + 1 :])
    return index, expert % masks.meta["val"].shape[-1], left, masks


def _all_experts(masks: Node) -> Node | None:
    """The index of masks (T, K, E) that are `one_hot(index, E)`, or None. Some count a class more than
    there are experts, which no token chooses.
    """
    index: Node | None = None
    if is_op(masks, "one_hot"):
        index, count = arguments(masks)[0], argument(masks, "num_classes", -1)
    elif (
        is_op(masks, "eq")
        and isinstance(arguments(masks)[1], Node)
        and is_op(arguments(masks)[1], "arange")
    ):
        index, numbers = arguments(masks)[0], arguments(masks)[1]
        count = numbers.meta["val"].shape[0]
        plain = argument(numbers, "start", 0) == 0 and argument(numbers, "step", 1) == 1
        last = masks.meta["val"].dim() == 3 and same(index.meta["val"].shape[-1], 1)
        index = (
            arguments(index)[0] if plain and last and is_op(index, "unsqueeze", "reshape") else None
        )
    if index is None or not _is_index(index) or not isinstance(count, int) or count < 1:
        return None
    width = _topk_width(index)
    index.meta[_EXPERTS] = min(count, width) if isinstance(width, int) else count
    return index


_EXPERTS = "experts"


def _experts(index: Node) -> int:
    return index.meta.get(_EXPERTS, -1)


def _is_index(node: Node) -> bool:
    val = node.meta["val"]
    return val.dim() == 2 and val.dtype == torch.int64


def _weights(factor: Any, chosen: _Chosen) -> Node | None:
    """The weights (T, K) of which a factor (rows, 1) has those of the chosen entries, or None."""
    factor = _uncast(factor)
    if is_op(factor, "unsqueeze", "reshape") and is_op(arguments(factor)[0], "index"):
        factor, behind = arguments(factor)[0], 1
    else:
        behind = 0
    if not is_op(factor, "index") or list(arguments(factor)[1]) != [chosen.token, chosen.choice]:
        return None
    source = arguments(factor)[0]
    if not behind and is_op(source, "unsqueeze", "reshape"):
        source, behind = arguments(source)[0], 1
    own, index = source.meta["val"], chosen.index.meta["val"]
    return source if behind and list(map(str, own.shape)) == list(map(str, index.shape)) else None


def _tokens(rows: Node, chosen: _Chosen) -> Node | None:
    """The x (T, H) of which a node has the rows of the chosen tokens, or None."""
    if is_op(rows, "index", "index_select"):
        at = [arguments(rows)[2]] if is_op(rows, "index_select") else list(arguments(rows)[1])
        direct = at == [chosen.token] and (is_op(rows, "index") or arguments(rows)[1] == 0)
        return arguments(rows)[0] if direct and arguments(rows)[0].meta["val"].dim() == 2 else None
    if not is_op(rows, "reshape", "squeeze") or not is_op(arguments(rows)[0], "index"):
        return None
    inner = arguments(rows)[0]
    if list(arguments(inner)[1]) != [None, chosen.token] or not is_op(
        arguments(inner)[0], "unsqueeze", "reshape"
    ):
        return None
    x = arguments(arguments(inner)[0])[0]
    shape = x.meta["val"].shape
    fits = len(shape) == 2 == rows.meta["val"].dim() and same(shape[1], rows.meta["val"].shape[1])
    return x if fits and same(arguments(inner)[0].meta["val"].shape[0], 1) else None


def _uncast(node: Node) -> Node:
    """A value before casts that keep it a number of the same kind, or turn a mask into one."""
    while isinstance(node, Node) and is_op(node, "to", "_to_copy") and _keeps(node):
        node = arguments(node)[0]
    return node


def _keeps(node: Node) -> bool:
    before, after = arguments(node)[0].meta["val"].dtype, node.meta["val"].dtype
    return before == after or (before.is_floating_point and after.is_floating_point)
