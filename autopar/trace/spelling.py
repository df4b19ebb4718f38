"""Rewrites equivalent ops to one form, so that one op rule covers all ways of writing an
operation.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable

import torch
from torch.fx import Graph, Node

from autopar.ir.calls import argument, argument_names, op_name
from autopar.ops.aten import aten
from autopar.ops.dims import is_symbolic, operands
from autopar.ops.values import fake_tensor, input_node, result_index
from autopar.trace.edit import call, is_op, replace

_ALIASES = {
    "absolute": "abs", "arccos": "acos", "arccosh": "acosh", "arcsin": "asin", "arcsinh": "asinh", "arctan": "atan", "arctan2": "atan2",
    "arctanh": "atanh", "clip": "clamp", "concat": "cat", "concatenate": "cat", "divide": "div", "fix": "trunc", "ger": "outer",
    "greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le", "linalg_matmul": "matmul", "multiply": "mul",
    "negative": "neg", "not_equal": "ne", "special_erf": "erf", "special_exp2": "exp2", "special_expit": "sigmoid",
    "special_expm1": "expm1", "special_log1p": "log1p", "special_log_softmax": "log_softmax", "special_logit": "logit",
    "special_logsumexp": "logsumexp", "special_softmax": "softmax", "subtract": "sub", "true_divide": "div",
}  # fmt: skip
_CONSTANTS = {
    "new_ones": aten.ones.default, "new_zeros": aten.zeros.default, "new_full": aten.full.default, "new_empty": aten.zeros.default,
}  # fmt: skip
_SPLITS = (
    "chunk", "unsafe_chunk", "split", "unsafe_split", "unsafe_split_with_sizes", "tensor_split", "hsplit", "vsplit", "dsplit",
)  # fmt: skip


def unify_spelling(graph: Graph) -> None:
    """Rewrite every view as reshape, cast as to.dtype, split as split_with_sizes, reordering as
    permute or transpose, and aliases by their main name. In place.
    """
    for node in list(graph.nodes):
        if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "aten":
            _respell(graph, node, node.target)


def _respell(graph: Graph, node: Node, operation: torch._ops.OpOverload) -> None:
    name = operation._schema.name.removeprefix("aten::")
    alias = getattr(aten, _ALIASES[name]) if name in _ALIASES else None
    if alias is not None and operation._overloadname in alias.overloads():
        node.target = getattr(alias, operation._overloadname)
    elif name in _CONSTANTS:
        _respell_constant(graph, node, name)
    elif name in _SPELLINGS:
        _SPELLINGS[name](graph, node)


def _respell_view(graph: Graph, node: Node) -> None:
    if node.target is not aten.view.dtype:
        node.target = aten.reshape.default


def _respell_dropout(graph: Graph, node: Node) -> None:
    """Rewrite native_dropout, which functionalization produces, as dropout, in place, unless its
    mask is read.
    """
    if any(user.args[1] != 0 for user in node.users):
        return
    node.target, node.meta["val"] = aten.dropout.default, node.meta["val"][0]
    node.args = (node.args[0], node.args[1], node.args[2] is not False)
    for user in list(node.users):
        user.replace_all_uses_with(node)
        graph.erase_node(user)


def _respell_broadcast(graph: Graph, node: Node) -> None:
    """Rewrite broadcast_tensors, which functionalization produces in losses with two operands, as
    one expand for each operand that grows. In place.
    """
    for user in list(node.users):
        part, whole = argument(node, "tensors")[result_index(user)], user.meta["val"]
        if list(map(str, part.meta["val"].shape)) == list(map(str, whole.shape)):
            user.replace_all_uses_with(part)
            graph.erase_node(user)
        else:
            replace(graph, user, aten.expand.default, (part, list(whole.shape)))
    graph.erase_node(node)


def _respell_reshape(graph: Graph, node: Node) -> None:
    shape = _written_shape(node.meta["val"].shape)
    replace(graph, node, aten.reshape.default, (node.args[0], shape))


def _respell_copy(graph: Graph, node: Node) -> None:
    """Rewrite copy, which remains of an assignment to a slice, as its source, cast and expanded to
    the target's dtype and shape. In place.
    """
    source, val = input_node(node, 1), node.meta["val"]
    if source.meta["val"].dtype != val.dtype:
        with graph.inserting_before(node):
            source = call(graph, source, aten.to.dtype, source, val.dtype)
    replace(graph, node, aten.expand.default, (source, list(val.shape)))


def _respell_constant(graph: Graph, node: Node, name: str) -> None:
    """Rewrite new_zeros and its like by size, dtype and device, in place, so that their tensor
    operand need not be gathered.
    """
    val = node.meta["val"]
    filled = (argument(node, "fill_value"),) if name == "new_full" else ()
    given = (argument(node, "size"), *filled)
    replace(graph, node, _CONSTANTS[name], given, {"dtype": val.dtype, "device": val.device})


def _respell_draw(graph: Graph, node: Node) -> None:
    """Rewrite a draw of random numbers by size as a draw like zeros of that size, in place. Any
    plan then draws the numbers of one device. Integers are uniform numbers, rounded down.
    """
    val, name = node.meta["val"], op_name(node).removeprefix("aten::")
    ends = argument(node, "low", 0), argument(node, "high", 1)
    if argument(node, "generator") or val.is_complex() or any(map(is_symbolic, ends)):
        return
    wide = val.to(torch.float64) if name == "randint" else val
    kind = {"dtype": wide.dtype, "device": val.device}
    with graph.inserting_before(node):
        zeros = graph.call_function(aten.zeros.default, (argument(node, "size"),), kind)
        zeros.meta = dict(node.meta) | {"val": wide}
        if name == "randint":
            drawn = call(graph, node, aten.uniform.default, zeros, *map(float, ends))
            floor = call(graph, node, aten.floor.default, drawn)
            replace(graph, node, aten.to.dtype, (floor, val.dtype))
        else:
            replace(graph, node, getattr(aten, f"{name}_like").default, (zeros,))


def _respell_expand(graph: Graph, node: Node) -> None:
    replace(graph, node, aten.expand.default, (node.args[0], list(node.meta["val"].shape)))


def _respell_repeat(graph: Graph, node: Node) -> None:
    source, val = input_node(node, 0), node.meta["val"]
    before, after = fake_tensor(source).shape, val.shape
    grown = [
        dim
        for dim, pair in enumerate(zip(before, after, strict=False))
        if str(pair[0]) != str(pair[1])
    ]
    if _repeats_ones(source, val):
        _respell_expand(graph, node)
    elif len(before) == len(after) and grown == [0] and is_symbolic(before[0]):
        count = argument(node, argument_names(node)[1])[0]
        replace(graph, node, aten.cat.default, ([source] * count, 0))  # batches in a row


def _respell_cast(graph: Graph, node: Node) -> None:
    replace(graph, node, aten.to.dtype, (node.args[0], node.meta["val"].dtype))


def _respell_split(graph: Graph, node: Node) -> None:
    name = op_name(node).removeprefix("aten::")
    fixed = {"hsplit": int(_rank(node) > 1), "vsplit": 0, "dsplit": 2}
    dim = fixed.get(name, argument(node, "dim", 0))
    sizes = [val.shape[dim] for val in node.meta["val"]]
    replace(graph, node, aten.split_with_sizes.default, (node.args[0], sizes, dim))


def _respell_transposed(graph: Graph, node: Node) -> None:
    dims = (-2, -1) if _rank(node) > 1 else (0, 0)
    replace(graph, node, aten.transpose.int, (node.args[0], *dims))


def _respell_swapped(graph: Graph, node: Node) -> None:
    replace(graph, node, aten.transpose.int, tuple(node.args))


def _respell_moved(graph: Graph, node: Node) -> None:
    order = _moved(_rank(node), argument(node, "source"), argument(node, "destination"))
    replace(graph, node, aten.permute.default, (node.args[0], order))


def _respell_narrow(graph: Graph, node: Node) -> None:
    dim, start, length = (argument(node, name) for name in ("dim", "start", "length"))
    if isinstance(start, int) and isinstance(length, int):
        start += fake_tensor(input_node(node, 0)).shape[dim] if start < 0 else 0
        replace(graph, node, aten.slice.Tensor, (node.args[0], dim, start, start + length))


def _respell_cat(graph: Graph, node: Node) -> None:
    """Drop the operands of a cat that have no elements, as a cache of keys has before its first
    token. A single operand that is left replaces the node. In place.
    """
    val, sources = node.meta["val"], operands(node)
    kept = [
        source
        for source in sources
        if not any(size == 0 for size in source.meta["val"].shape if isinstance(size, int))
    ]
    alike = all(source.meta["val"].dtype == val.dtype for source in kept)
    if len(kept) == len(sources) or not alike:
        return
    if len(kept) == 1:
        node.replace_all_uses_with(kept[0])
        graph.erase_node(node)
    elif kept:
        node.args = (kept, *node.args[1:])


_SPELLINGS: dict[str, Callable[[Graph, Node], None]] = {
    **dict.fromkeys(("view", "_unsafe_view"), _respell_view),
    "native_dropout": _respell_dropout,
    **dict.fromkeys(("rand", "randn", "randint"), _respell_draw),
    "broadcast_tensors": _respell_broadcast,
    **dict.fromkeys(("flatten", "unflatten", "view_as", "reshape_as"), _respell_reshape),
    "copy": _respell_copy,
    **dict.fromkeys(("expand_as", "broadcast_to"), _respell_expand),
    **dict.fromkeys(("repeat", "tile"), _respell_repeat),
    **dict.fromkeys(("to", "_to_copy", "type_as"), _respell_cast),
    **dict.fromkeys(_SPLITS, _respell_split),
    **dict.fromkeys(("t", "numpy_T", "mT"), _respell_transposed),
    **dict.fromkeys(("swapaxes", "swapdims"), _respell_swapped),
    **dict.fromkeys(("movedim", "moveaxis"), _respell_moved),
    "narrow": _respell_narrow,
    "cat": _respell_cat,
}
"""Functions that rewrite the other ops, by op name."""


def _rank(node: Node) -> int:
    """Number of dims of the first operand of a node."""
    return fake_tensor(input_node(node, 0)).dim()


def _repeats_ones(source: Node, val: torch.Tensor) -> bool:
    """Whether every dim of `source` that grows to the shape of `val` has size 1, so that repeat is
    the same as expand.
    """
    shape = source.meta["val"].shape
    offset = len(val.shape) - len(shape)
    return all(
        str(before) in ("1", str(after))
        for before, after in zip(shape, val.shape[offset:], strict=True)
    )


def _moved(rank: int, source: int | list[int], destination: int | list[int]) -> list[int]:
    """The order of dims, as permute takes it, that equals movedim of a tensor with `rank` dims."""
    pairs = zip(
        *(x if isinstance(x, (list, tuple)) else [x] for x in (destination, source)), strict=True
    )
    placed = {to % rank: dim % rank for to, dim in pairs}
    others = iter(d for d in range(rank) if d not in placed.values())
    return [placed[k] if k in placed else next(others) for k in range(rank)]


def _written_shape(shape: torch.Size) -> list:
    """A shape as an argument. The only batch-dependent size is written -1, so that it fits any
    number of rows.
    """
    symbolic = [d for d, size in enumerate(shape) if isinstance(size, torch.SymInt)]
    return [-1 if symbolic == [d] else size for d, size in enumerate(shape)]


def join_slices(graph: Graph) -> None:
    """Rewrite slices of one module that together cover one dim of a tensor, in place, as one
    split_with_sizes, as in a fused query-key-value projection.
    """
    slices: dict[tuple, dict[tuple[int, int], list[Node]]] = defaultdict(lambda: defaultdict(list))
    for node in graph.nodes:
        if is_op(node, "slice") and isinstance(node.args[0], Node):
            shape = node.args[0].meta["val"].shape
            dim = argument(node, "dim", 0) % len(shape)
            size, start, end = shape[dim], argument(node, "start") or 0, argument(node, "end")
            end = size if end is None else end
            if argument(node, "step", 1) == 1 and all(
                isinstance(x, int) for x in (size, start, end)
            ):
                block = tuple(path for path, _ in node.meta.get("nn_module_stack", {}).values())
                start, end, _ = slice(start, end).indices(size)
                slices[node.args[0], dim, size, block][start, end].append(node)
    for (_, dim, size, _), pieces in slices.items():
        ranges = sorted(pieces)
        ends = [0, *(end for _, end in ranges)]
        if (
            len(ranges) < 2
            or ends[-1] != size
            or any(start != before for (start, _), before in zip(ranges, ends, strict=False))
        ):
            continue
        nodes = [node for same_range in pieces.values() for node in same_range]
        first = min(nodes)
        with graph.inserting_before(first):  # its operand may be a getitem that replaced `source`
            split = graph.call_function(
                aten.split_with_sizes.default,
                (first.args[0], [end - start for start, end in ranges], dim),
            )
            items = [
                graph.call_function(operator.getitem, (split, index))
                for index in range(len(ranges))
            ]
        split.meta = dict(first.meta) | {"val": [pieces[key][0].meta["val"] for key in ranges]}
        for item, key in zip(items, ranges, strict=True):
            item.meta = dict(pieces[key][0].meta)
            for node in pieces[key]:
                node.replace_all_uses_with(item)
        for node in nodes:
            graph.erase_node(node)
