"""Normalizes the captured graph to the forms that the op rules support.

Each pass modifies a graph in place. After `normalize`, the graph is functional, and has no
assertions or no-op casts. Every size argument is a number or a symbolic expression of the batch.
Means over the batch are sums divided by a number.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch._ops import HigherOrderOperator
from torch.fx import Graph, Node

from autopar.errors import AutoparError
from autopar.ir.calls import argument
from autopar.ops.aten import aten
from autopar.ops.values import output_nodes, result_index
from autopar.trace.batch_norm import expand_batch_norm
from autopar.trace.complex_pairs import spell_complex
from autopar.trace.edit import call, is_op, replace, replace_argument
from autopar.trace.expert_loops import route_expert_loops
from autopar.trace.mean_losses import batch_means, class_means, row_means
from autopar.trace.own_rows import index_own_rows
from autopar.trace.selections import spell_selections
from autopar.trace.spelling import join_slices, unify_spelling
from autopar.trace.user_lines import line_of_node, line_of_nodes
from autopar.trace.writes import spell_masked_scatter, spell_writes

_SUM, _MEAN = 0, 1

_COPIES = ("to", "_to_copy", "contiguous", "alias", "lift_fresh_copy", "clone", "type_as")
_ASSERTIONS = (
    "_assert_tensor_metadata",
    "_assert_async",
    "_assert_scalar",
    "sym_constrain_range",
    "sym_constrain_range_for_size",
)


def normalize(graph: Graph) -> tuple[str, ...]:
    """Run all passes on a graph. Returns notes on what is computed in another way than written."""
    notes: tuple[str, ...] = ()
    for graph_pass in PASSES:
        notes += graph_pass(graph) or ()
        graph.eliminate_dead_code()
    graph.lint()
    return notes


def inline_no_grad_regions(graph: Graph) -> None:
    """Put the bodies of no-grad and disabled-autocast regions, which export keeps as graphs of
    their own, in the place of their calls. Results of a no-grad region are detached.

    Changes the graph in place. Raises AutoparError for a region of enabled autocast.
    """
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, HigherOrderOperator):
            continue
        if node.target.__name__ not in ("wrap_with_set_grad_enabled", "wrap_with_autocast"):
            raise AutoparError(
                f"forward calls {node.target.__name__}{line_of_node(node)}, which runs a graph of its own, and autopar cannot shard that: "
                "use plain PyTorch there, as torch.where in the place of torch.cond"
            )
        autocast = node.target.__name__ == "wrap_with_autocast"
        # (device_type, dtype, enabled, cache, submodule, *args); disabled regions are plain
        if autocast and node.args[1]:
            enabled = node.args[2]
            if enabled:
                region = getattr(graph.owning_module, node.args[4].target)
                raise AutoparError(
                    f"forward enters torch.autocast{line_of_nodes(region.graph.nodes)}; compute there as elsewhere, and pass "
                    "precision='bf16' to autopar for half precision"
                )
        body_at = 4 if autocast else 1
        body = getattr(graph.owning_module, node.args[body_at].target)
        mapping = dict(
            zip(
                [n for n in body.graph.nodes if n.op == "placeholder"],
                node.args[body_at + 1 :],
                strict=True,
            )
        )
        with graph.inserting_before(node):
            graph.graph_copy(body.graph, mapping)
            results = [mapping[returned] for returned in output_nodes(body.graph)]
            for inner, outer in mapping.items():
                if isinstance(outer, Node) and inner.op == "call_function":
                    outer.meta.setdefault("nn_module_stack", node.meta.get("nn_module_stack", {}))
            if not autocast and not node.args[0]:
                for inner in body.graph.nodes:
                    _write_detached(graph, mapping[inner] if inner.op == "call_function" else inner)
                results = [_detached(graph, r) for r in results]
        for user in list(node.users):
            if user.target is not operator.getitem:
                raise AutoparError(
                    f"cannot inline a no-grad region whose result is used whole by {user.name}"
                )
            user.replace_all_uses_with(results[result_index(user)])
            graph.erase_node(user)
        graph.erase_node(node)


def _write_detached(graph: Graph, node: Node) -> None:
    """Make a call in place, which ran without gradients, read what it does not write detached. What
    it writes has no gradient (`AssignedState`).
    """
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
        return
    with graph.inserting_before(node):
        for place, argument_ in enumerate(node.target._schema.arguments):
            if argument_.alias_info is not None and argument_.alias_info.is_write:
                continue
            read = node.args[place] if place < len(node.args) else None
            read = node.kwargs.get(argument_.name, read)
            new = torch.fx.map_arg(
                read, lambda each: _detached(graph, each) if _is_float(each) else each
            )
            if argument_.name in node.kwargs:
                node.update_kwarg(argument_.name, new)
            elif place < len(node.args):
                node.update_arg(place, new)


def _is_float(node: Node) -> bool:
    val = node.meta.get("val")
    return isinstance(val, torch.Tensor) and val.is_floating_point()


def _detached(graph: Graph, node: Node) -> Node:
    new = graph.call_function(aten.detach.default, (node,))
    new.meta = dict(node.meta)
    return new


def drop_assertions(graph: Graph) -> None:
    """Remove assertions from the graph, in place: they have no result, and capture has already
    checked them. Then remove what only they read, tensors excepted.
    """
    for node in list(graph.nodes):
        if node.op == "call_function" and (
            is_op(node, *_ASSERTIONS) or getattr(node.target, "__name__", "") in _ASSERTIONS
        ):
            graph.erase_node(node)
    for node in reversed(list(graph.nodes)):
        if (
            node.op == "call_function"
            and not node.users
            and not isinstance(node.meta.get("val"), torch.Tensor)
        ):
            graph.erase_node(node)


def drop_no_ops(graph: Graph) -> None:
    """Remove, in place, calls that change nothing (`changes_nothing`). One is left where the graph
    would return what it is given.
    """
    for node in list(graph.nodes):
        returned = any(user.op == "output" for user in node.users)
        if changes_nothing(node) and not (returned and node.args[0].op != "call_function"):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def changes_nothing(node: Node) -> bool:
    """Whether a node is a call that only returns its first operand.

    Such calls are casts to the same dtype, copies, reshapes to the same shape, slices of everything,
    inactive dropout, additions of 0 and detaches of integers.
    `sum(losses)` starts with 0, and a sum plus something else could not stay partial over ranks.
    """
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], Node):
        return False
    source, val = node.args[0], node.meta.get("val")
    before = source.meta.get("val")
    if not isinstance(val, torch.Tensor) or not isinstance(before, torch.Tensor):
        return False
    if is_op(node, "dropout"):
        return bool(node.args[1] == 0 or not node.args[2])
    if is_op(node, "detach"):
        return not (before.is_floating_point() or before.is_complex())
    if before.dtype != val.dtype or not _same_sizes(before.shape, val.shape):
        return False
    if is_op(node, "slice", "expand", "view", "reshape", "_unsafe_view"):
        return argument(node, "step", 1) in (None, 1)
    if is_op(node, "add", "sub"):
        return isinstance(node.args[1], (int, float)) and node.args[1] == 0
    return is_op(node, *_COPIES)


def _same_sizes(one: torch.Size, other: torch.Size) -> bool:
    pairs = zip(map(str, one), map(str, other), strict=True)
    return len(one) == len(other) and all(a == b for a, b in pairs)


def expand_feature_dropout(graph: Graph) -> None:
    """Rewrite active dropout of whole channels, in place: one random value per row and channel, by
    `dropout` of ones, keeps or drops the channel. Raises AutoparError for its in-place form.
    """
    for node in list(graph.nodes):
        if (
            node.op == "call_function"
            and is_op(node, "feature_dropout", "feature_dropout_")
            and node.args[2]
            and node.args[1] > 0
        ):
            if is_op(node, "feature_dropout_"):
                raise AutoparError(
                    f"forward drops channels in place{line_of_node(node)}, which autopar cannot run: use Dropout2d(p) without inplace=True"
                )
            one = value = node.args[0]
            with graph.inserting_before(node):
                for dim in range(2, value.meta["val"].dim()):
                    one = call(graph, node, aten.slice.Tensor, one, dim, 0, 1)
                one = call(graph, node, aten.detach.default, one)
                kept = call(
                    graph,
                    node,
                    aten.dropout.default,
                    call(graph, node, aten.ones_like.default, one),
                    node.args[1],
                    True,
                )
            replace(graph, node, aten.mul.Tensor, (value, kept))


def inline_symbolic_sizes(graph: Graph) -> None:
    """Put the expression of every symbolic number in the place of its node, in place, so that no
    size is passed between segments. The nodes are removed.
    """
    for node in list(graph.nodes):
        if (
            isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat))
            and node.op == "call_function"
        ):
            for user in list(node.users):
                replace_argument(user, node, node.meta["val"])
    for node in reversed(list(graph.nodes)):
        if (
            node.op == "call_function"
            and not node.users
            and isinstance(node.meta.get("val"), (torch.SymInt, torch.SymBool, torch.SymFloat))
        ):
            graph.erase_node(node)


def expand_bags(graph: Graph) -> None:
    """Rewrite, in place, embedding bags of one fixed size, such as those of 2-D ids, as rows of the
    table that are summed or averaged per bag.

    Other bags stay as they are: of variable size, with the maximum, averaged with padding, or with
    gradients divided by counts.
    """
    for node in list(graph.nodes):
        if is_op(node, "embedding_bag") and (size := _bag_size(node)):
            bags = _rows_of_bags(graph, node, size)
            for user in list(node.users):
                if user.target is operator.getitem and user.args[1] == 0:
                    user.replace_all_uses_with(bags)


def _bag_size(node: Node) -> int:
    """The number of ids in each bag of an embedding_bag call. 0 if it varies, or if the op does
    more than sum or average.
    """
    offsets, options = node.args[2], ("scale_grad_by_freq", "include_last_offset")
    if not (
        isinstance(offsets, Node) and is_op(offsets, "arange") and argument(offsets, "start") == 0
    ):
        return 0
    step, padding = argument(offsets, "step"), argument(node, "padding_idx")
    plain = not any(argument(node, name, False) for name in options)
    modes = (_SUM, _MEAN) if padding in (None, -1) else (_SUM,)
    return step if plain and isinstance(step, int) and argument(node, "mode", _SUM) in modes else 0


def _rows_of_bags(graph: Graph, node: Node, size: int) -> Node:
    weight, ids, factors = node.args[0], node.args[1], argument(node, "per_sample_weights")
    padding = argument(node, "padding_idx")
    padding = -1 if padding is None else padding
    with graph.inserting_before(node):
        like = next(
            user for user in node.users if user.target is operator.getitem and user.args[1] == 0
        )
        bags = call(graph, like, aten.reshape.default, ids, [-1, size])
        rows = call(
            graph,
            like,
            aten.embedding.default,
            weight,
            bags,
            padding,
            False,
            argument(node, "sparse", False),
        )
        if padding != -1:
            kept = call(
                graph,
                like,
                aten.ne.Scalar,
                call(graph, like, aten.reshape.default, ids, [-1, size, 1]),
                padding,
            )
            rows = call(graph, like, aten.mul.Tensor, rows, kept)
        if factors is not None:
            rows = call(
                graph,
                like,
                aten.mul.Tensor,
                rows,
                call(graph, like, aten.reshape.default, factors, [-1, size, 1]),
            )
        return call(
            graph,
            like,
            aten.sum.dim_IntList if argument(node, "mode", _SUM) == _SUM else aten.mean.dim,
            rows,
            [1],
        )


PASSES: tuple[Callable[[Graph], tuple[str, ...] | None], ...] = (
    inline_no_grad_regions, expand_feature_dropout, expand_batch_norm, expand_bags, drop_assertions, drop_no_ops, unify_spelling,
    spell_complex, route_expert_loops, spell_selections, spell_masked_scatter, spell_writes, join_slices, class_means, row_means,
    batch_means, inline_symbolic_sizes, index_own_rows,
)  # fmt: skip
