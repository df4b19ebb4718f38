"""One spelling for each operation, so that one op rule covers all the ways to write it."""

from __future__ import annotations

import operator
from collections import defaultdict

import torch
from torch.fx import Graph, Node

from autopar.ir.calls import argument
from autopar.trace.edit import is_op, replace

aten = torch.ops.aten
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
    """reshape for every view, to.dtype for every cast, split_with_sizes for every split, permute and transpose for every reordering."""
    for node in list(graph.nodes):
        if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "aten":
            _respell(graph, node)


def _respell(graph: Graph, node: Node) -> None:
    val, source = node.meta.get("val"), node.args[0] if node.args else None
    rank = (
        len(source.meta["val"].shape)
        if isinstance(source, Node) and isinstance(source.meta.get("val"), torch.Tensor)
        else 0
    )
    name = node.target._schema.name.removeprefix("aten::")
    if name in _ALIASES and node.target._overloadname in getattr(aten, _ALIASES[name]).overloads():
        node.target = getattr(getattr(aten, _ALIASES[name]), node.target._overloadname)
    elif is_op(node, "view", "_unsafe_view") and node.target is not aten.view.dtype:
        node.target = aten.reshape.default
    elif is_op(node, "native_dropout") and all(
        user.args[1] == 0 for user in node.users
    ):  # what functionalization makes of dropout
        node.target, node.meta["val"] = aten.dropout.default, val[0]
        node.args = (source, node.args[1], node.args[2] is not False)
        for user in list(node.users):
            user.replace_all_uses_with(node)
            graph.erase_node(user)
    elif is_op(node, "broadcast_tensors"):  # what functionalization makes of two-sided losses
        for user in list(node.users):
            part, whole = node.args[0][user.args[1]], user.meta["val"]
            if list(map(str, part.meta["val"].shape)) == list(map(str, whole.shape)):
                user.replace_all_uses_with(part)
                graph.erase_node(user)
            else:
                replace(graph, user, aten.expand.default, (part, list(whole.shape)))
        graph.erase_node(node)
    elif is_op(node, "flatten", "unflatten", "view_as", "reshape_as"):
        replace(graph, node, aten.reshape.default, (source, _written_shape(val.shape)))
    elif is_op(node, "copy"):  # what assigning to a slice leaves behind once it is functional
        source = node.args[1]
        if source.meta["val"].dtype != val.dtype:
            with graph.inserting_before(node):
                source = graph.call_function(aten.to.dtype, (source, val.dtype))
            source.meta = dict(node.args[1].meta) | {"val": node.args[1].meta["val"].to(val.dtype)}
        replace(graph, node, aten.expand.default, (source, list(val.shape)))
    elif (
        name in _CONSTANTS
    ):  # of the tensor given only its dtype and device matter, so nobody needs to gather it
        given = (
            argument(node, "size"),
            *((argument(node, "fill_value"),) if name == "new_full" else ()),
        )
        replace(graph, node, _CONSTANTS[name], given, {"dtype": val.dtype, "device": val.device})
    elif is_op(node, "expand_as", "broadcast_to") or (
        is_op(node, "repeat", "tile") and _repeats_ones(source, val)
    ):
        replace(graph, node, aten.expand.default, (source, list(val.shape)))
    elif is_op(node, "to", "_to_copy", "type_as"):
        replace(graph, node, aten.to.dtype, (source, val.dtype))
    elif is_op(node, *_SPLITS):
        dim = {"hsplit": int(rank > 1), "vsplit": 0, "dsplit": 2}.get(
            name, argument(node, "dim", 0)
        )
        replace(
            graph, node, aten.split_with_sizes.default, (source, [v.shape[dim] for v in val], dim)
        )
    elif is_op(node, "t", "numpy_T", "mT"):
        replace(graph, node, aten.transpose.int, (source, -2, -1) if rank > 1 else (source, 0, 0))
    elif is_op(node, "swapaxes", "swapdims"):
        replace(graph, node, aten.transpose.int, tuple(node.args))
    elif is_op(node, "movedim", "moveaxis"):
        replace(
            graph,
            node,
            aten.permute.default,
            (source, _moved(rank, argument(node, "source"), argument(node, "destination"))),
        )
    elif (
        is_op(node, "narrow")
        and isinstance(argument(node, "start"), int)
        and isinstance(argument(node, "length"), int)
    ):
        dim, start = argument(node, "dim"), argument(node, "start")
        start += source.meta["val"].shape[dim] if start < 0 else 0
        replace(
            graph, node, aten.slice.Tensor, (source, dim, start, start + argument(node, "length"))
        )


def _repeats_ones(source: Node, val: torch.Tensor) -> bool:
    """Whether every dim that grows has size 1, so that repeating it is expanding it."""
    shape = source.meta["val"].shape
    offset = len(val.shape) - len(shape)
    return all(
        str(before) in ("1", str(after))
        for before, after in zip(shape, val.shape[offset:], strict=True)
    )


def _moved(rank: int, source: int | list[int], destination: int | list[int]) -> list[int]:
    """The order of dims after movedim."""
    pairs = zip(
        *(x if isinstance(x, (list, tuple)) else [x] for x in (destination, source)), strict=True
    )
    placed = {to % rank: dim % rank for to, dim in pairs}
    others = iter(d for d in range(rank) if d not in placed.values())
    return [placed[k] if k in placed else next(others) for k in range(rank)]


def _written_shape(shape: torch.Size) -> list:
    """A shape as an argument; the one size that depends on the batch is written -1, so that it fits any number of rows."""
    symbolic = [d for d, size in enumerate(shape) if isinstance(size, torch.SymInt)]
    return [-1 if symbolic == [d] else size for d, size in enumerate(shape)]


def join_slices(graph: Graph) -> None:
    """Slices that cut one dim of one tensor into pieces, all of it, are one split_with_sizes, as in a fused query-key-value projection."""
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
