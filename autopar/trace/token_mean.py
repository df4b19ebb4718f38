"""Means over the tokens that count, as sums divided by a number that is known before the forward.

Such a mean is not the mean of the ranks' means, nor of the micro-batches', when they hold different numbers of tokens that count: labels
other than `ignore_index` of a cross-entropy, or whatever a mask of the batch leaves, as in (loss * mask).sum() / mask.sum().  A sum divided
by the number of the whole batch is exact under every split.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from autopar.errors import AutoparError
from autopar.ir.calls import argument
from autopar.ir.traced import MEAN_COUNT, TokenCount
from autopar.trace.edit import call, is_op

aten = torch.ops.aten
_LINEAR = ("add", "sub", "rsub", "neg", "mul", "div", "to", "_to_copy", "clone", "alias", "view", "reshape", "unsqueeze", "squeeze",
           "expand", "stack", "cat", "sum", "mean")  # fmt: skip
_SAME = ("to", "_to_copy", "clone", "alias", "view", "reshape", "unsqueeze", "squeeze", "detach", "contiguous")
"""Leave a single number what it is."""

_BY_ROW = (
    *_SAME, "ne", "eq", "gt", "ge", "lt", "le", "logical_and", "logical_or", "logical_not", "bitwise_and", "bitwise_or", "bitwise_not",
    "add", "sub", "rsub", "mul", "neg", "abs", "clamp", "clamp_min", "clamp_max", "where", "masked_fill", "slice", "constant_pad_nd", "pad",
    "cat", "expand", "_unsafe_view", "flatten", "full_like", "zeros_like", "ones_like", "new_full", "new_zeros", "new_ones", "full",
    "zeros", "ones", "scalar_tensor", "arange", "lift_fresh_copy", "sym_size",
)  # fmt: skip
"""Compute for each row of a batch what they would without the others."""


@dataclass(frozen=True, slots=True)
class _Quotient:
    """A division of a sum over the batch by `max(count, least) + more`; `count` adds up over rows, `key` tells counts apart."""

    node: Node
    count: Node
    key: tuple
    least: float = 0.0
    more: float = 0.0


def token_mean(graph: Graph) -> tuple[TokenCount | None, bool]:
    """Divide means over tokens by the graph input `mean_count`.  Returns how that is counted, and whether there are means beside it whose
    tokens are counted in another way: those of each micro-batch.

    A loss that is not linear in such means is that of each micro-batch: there is no count.
    """
    means = [_explicit(graph, node) for node in _cross_entropies(graph)]
    known = {one.node for one in means}
    found = means + [one for node in graph.nodes if node not in known and (one := _masked_mean(node))]
    kinds = {(one.key, one.least, one.more) for one in means or found}
    if len(kinds) > 1 and means:
        raise AutoparError(
            f"the model averages {len(means)} cross-entropy losses over {len(kinds)} different label tensors; autopar can count "
            "valid targets for one: pass loss_fn that combines them with reduction='sum'"
        )
    if len(kinds) != 1:
        return None, False
    ((key, least, more),) = kinds
    own = [one for one in found if (one.key, one.least, one.more) == (key, least, more)]
    if not _is_linear(graph, [one.node for one in own]):
        return None, False
    count = _count_graph(graph, own[0].count)
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    with graph.inserting_after(placeholders[-1]):
        mean_count = graph.placeholder(MEAN_COUNT)
    mean_count.meta["val"] = own[0].node.meta["val"].detach()
    for one in own:
        one.node.update_arg(1, mean_count)
    return TokenCount(count, least, more), len(own) < len(found)


def _cross_entropies(graph: Graph) -> list[Node]:
    """The mean cross-entropies; AutoparError for those whose divisor is no count of labels."""
    means = [n for n in graph.nodes if is_op(n, "cross_entropy_loss", "nll_loss", "nll_loss_nd") and argument(n, "reduction", 1) == 1]
    for node in means:
        if argument(node, "weight") is not None:
            raise AutoparError(
                "cross_entropy with class weights has a weighted mean, which autopar cannot split exactly; use reduction='sum'"
            )
        if node.args[1].meta["val"].is_floating_point():
            raise AutoparError("cross_entropy with class probabilities as targets is not supported; use class indices")
    return means


def _explicit(graph: Graph, node: Node) -> _Quotient:
    """A mean cross-entropy as its sum divided by the number of its labels."""
    target, ignore_index = node.args[1], argument(node, "ignore_index", -100)
    kwargs = {k: v for k, v in node.kwargs.items() if k != "reduction"} | {"reduction": 2}
    args = node.args[:3] if len(node.args) > 3 else node.args
    extra = {"ignore_index": ignore_index, "label_smoothing": argument(node, "label_smoothing", 0.0)}
    kwargs |= {k: v for k, v in extra.items() if any(a.name == k for a in node.target._schema.arguments) and v is not None}
    with graph.inserting_before(node):
        total = graph.call_function(node.target, args, kwargs)
        number = call(graph, node, aten.sum.default, call(graph, node, aten.ne.Scalar, target, ignore_index))
        mean = graph.call_function(aten.div.Tensor, (total, number))
    total.meta, mean.meta = dict(node.meta), dict(node.meta)
    node.replace_all_uses_with(mean)
    graph.erase_node(node)
    return _Quotient(mean, number, _key(number))


def _masked_mean(node: Node) -> _Quotient | None:
    """What a division of a sum over the batch by what the batch counts is."""
    if not is_op(node, "div") or len(node.args) != 2 or "rounding_mode" in node.kwargs or not isinstance(node.args[1], Node):
        return None
    if _rank(node) != 0 or not _adds_up(node.args[0]):
        return None
    count, least, more = node.args[1], 0.0, 0.0
    while not is_op(count, "sum"):
        if is_op(count, "add") and isinstance(count.args[1], int | float) and not least and not count.kwargs:
            more += count.args[1]
        elif is_op(count, "clamp", "clamp_min") and not least and isinstance(count.args[1], int | float) and len(count.args) == 2:
            least = float(count.args[1])
        elif not is_op(count, *_SAME):
            return None
        count = count.args[0]
    if more < 0 or not _is_sum_over_batch(count) or not all(map(_is_by_row, _needed(count) - {count})):
        return None
    return _Quotient(node, count, _key(count), least, more)


def _rank(node: Node) -> int | None:
    val = node.meta.get("val")
    return val.dim() if isinstance(val, torch.Tensor) else None


def _has_batch(node: Node) -> bool:
    val = node.meta.get("val")
    return isinstance(val, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in val.shape)


def _is_sum_over_batch(node: Node) -> bool:
    return is_op(node, "sum") and _rank(node) == 0 and _has_batch(node.args[0])


def _adds_up(node: Node | float) -> bool:
    """Whether what a single number is for two batches together is the sum of what it is for each."""
    if not isinstance(node, Node) or node.op != "call_function":
        return False
    if is_op(node, "sum"):
        return _is_sum_over_batch(node)
    if any(argument.name == "reduction" for argument in getattr(getattr(node.target, "_schema", None), "arguments", ())):
        return argument(node, "reduction", 1) == 2 and _rank(node) == 0
    if is_op(node, *_SAME, "neg"):
        return _adds_up(node.args[0])
    if is_op(node, "mul", "div") and not isinstance(node.args[1], Node):
        return _adds_up(node.args[0])
    return is_op(node, "add", "sub") and all(map(_adds_up, node.args[:2]))


def _is_by_row(node: Node) -> bool:
    """Whether a node is an input with rows, or computes of each row what it would without the others."""
    if node.op == "placeholder":
        return _has_batch(node)
    if node.op != "call_function" or not is_op(node, *_BY_ROW):
        return False
    if is_op(node, "slice", "cat"):  # of rows themselves, it leaves some out or has some twice
        whole = (node.args[0] if is_op(node, "slice") else node.args[0][0]).meta["val"]
        return not isinstance(whole.shape[argument(node, "dim", 0)], torch.SymInt)
    return True


def _needed(node: Node) -> set[Node]:
    """A node and all that it is computed from."""
    found, stack = set(), [node]
    while stack:
        one = stack.pop()
        if one not in found:
            found.add(one)
            stack.extend(one.all_input_nodes)
    return found


def _key(node: Node) -> tuple:
    """Equal for nodes that compute the same."""
    known: dict[Node, tuple] = {}

    def written(part) -> tuple:
        if isinstance(part, Node):
            return known[part]
        if isinstance(part, list | tuple):
            return tuple(map(written, part))
        return (str(part),)

    for one in _in_order(node.graph, _needed(node)):
        kwargs = tuple((name, written(value)) for name, value in sorted(one.kwargs.items()))
        known[one] = (one.name,) if one.op == "placeholder" else (str(one.target), written(one.args), kwargs)
    return known[node]


def _in_order(graph: Graph, nodes: Iterable[Node]) -> list[Node]:
    wanted = set(nodes)
    return [node for node in graph.nodes if node in wanted]


def _is_linear(graph: Graph, means: Sequence[Node]) -> bool:
    """Whether what the graph returns is linear in these values, with factors that no batch has a part in."""
    of_batch, of_means = set(), set(means)
    for node in graph.nodes:
        if (node.op == "placeholder" and _has_batch(node)) or not of_batch.isdisjoint(node.all_input_nodes):
            of_batch.add(node)
        mine = [n for n in node.all_input_nodes if n in of_means]
        if node.op != "call_function" or not mine:
            continue
        if node in means or not is_op(node, *_LINEAR) or (is_op(node, "div") and node.args[1] in of_means):
            return False
        others = [n for n in node.all_input_nodes if n is not mine[0]] + [mine[0]] * (node.args.count(mine[0]) - 1)
        if is_op(node, "mul", "div") and not of_batch.isdisjoint(others):
            return False
        of_means.add(node)
    return True


def _count_graph(graph: Graph, number: Node) -> Graph:
    """What a sum over the batch is computed from, as a graph that adds up exactly."""
    count, mapping = Graph(), {}
    for node in _in_order(graph, _needed(number)):
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), mapping.__getitem__)
        if node is number:
            args, kwargs = args[:1], {"dtype": torch.float64}
        name = node.name if node.op == "placeholder" else None  # that of a call counts calls of the whole model
        mapping[node] = count.create_node(node.op, aten.sum.default if node is number else node.target, args, kwargs, name)
        mapping[node].meta = dict(node.meta)
    count.output(mapping[number])
    return count
