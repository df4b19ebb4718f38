"""Means over the tokens that count, as sums divided by a number that is known before the forward.

Such a mean is not the mean of the ranks' means, nor of the micro-batches', when they hold different numbers of tokens that count: labels
other than `ignore_index` of a cross-entropy, or whatever a mask of the batch leaves, as in (loss * mask).sum() / mask.sum().  A sum divided
by the number of the whole batch is exact under every split.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

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
    "add", "sub", "rsub", "mul", "neg", "abs", "clamp", "clamp_min", "clamp_max", "where", "masked_fill", "slice", "constant_pad_nd",
    "pad", "cat", "expand", "_unsafe_view", "flatten", "full_like", "zeros_like", "ones_like", "new_full", "new_zeros", "new_ones", "full",
    "zeros", "ones", "scalar_tensor", "arange", "lift_fresh_copy", "sym_size",
)  # fmt: skip
"""What counts of tokens are computed with: for each row what it would be without the others, unless sizes say otherwise (`_is_by_row`)."""

_ARITHMETIC = ("add", "sub", "rsub", "mul", "div", "pow", "full", "full_like", "new_full", "scalar_tensor", "fill", "eq", "ne", "lt", "le",
               "gt", "ge", "clamp")  # fmt: skip
_ALONG = ("softmax", "_softmax", "log_softmax", "_log_softmax", "cumsum", "cumprod", "logcumsumexp", "sort", "argsort", "topk", "flip",
          "roll", "cummax", "cummin", "max", "min", "gather", "scatter", "scatter_add")  # fmt: skip
"""Mix what lies along a dim."""


@dataclass(frozen=True, slots=True)
class _Quotient:
    """A division of a sum over the batch by `max(count, least) + more`; `count` adds up over rows, `key` tells counts apart."""

    node: Node
    count: Node
    key: int
    least: float = -inf
    more: float = 0.0

    @property
    def kind(self) -> tuple[int, float, float]:
        return self.key, self.least, self.more


def token_mean(graph: Graph) -> tuple[TokenCount | None, bool]:
    """Divide means over tokens by the graph input `mean_count`.  Returns how that is counted, and whether there are means or other terms
    beside it that are those of each micro-batch.

    A loss that is not linear in such means is that of each micro-batch: there is no count.
    """
    keys = _Keys()
    means = [_explicit(graph, node, keys) for node in _cross_entropies(graph)]
    batch, known = _of_batch(graph), {one.node for one in means}
    masked = [one for node in graph.nodes if node not in known and (one := _masked_mean(node, batch, keys))]
    kinds = {one.kind for one in means or masked}
    if len(kinds) > 1 and means:
        raise AutoparError(
            f"the model averages {len(means)} cross-entropy losses over {len(kinds)} different label tensors; autopar can count "
            "valid targets for one: pass loss_fn that combines them with reduction='sum'"
        )
    if len(kinds) != 1 or any(map(_is_random, _needed((means or masked)[0].count))):
        return None, False
    (kind,) = kinds
    own = [*means, *(one for one in masked if one.kind == kind)]
    if means and not _is_linear(graph, [one.node for one in own], batch):
        own = means
    if not _is_linear(graph, [one.node for one in own], batch):
        return None, False
    others = len(own) < len(means) + len(masked) if means else not _is_known(_loss(graph), {one.node for one in own}, batch)
    count = _count_graph(graph, own[0].count)
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    with graph.inserting_after(placeholders[-1]):
        mean_count = graph.placeholder(MEAN_COUNT)
    mean_count.meta["val"] = own[0].node.meta["val"].detach()
    for one in own:
        one.node.update_arg(1, mean_count)
    return TokenCount(count, own[0].least, own[0].more, of_labels=bool(means)), others


def _loss(graph: Graph) -> Node:
    found = graph.output_node().args[0]
    return found if isinstance(found, Node) else found[0]


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


def _explicit(graph: Graph, node: Node, keys: _Keys) -> _Quotient:
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
    return _Quotient(mean, number, keys.of(number))


def _masked_mean(node: Node, batch: set[Node], keys: _Keys) -> _Quotient | None:
    """What a division of a sum over the batch by what the batch counts is; `batch`: the nodes that depend on it."""
    if not is_op(node, "div") or len(node.args) != 2 or node.kwargs or not isinstance(node.args[1], Node):
        return None
    count, least, more = node.args[1], -inf, 0.0
    while not is_op(count, "sum"):
        free = least == -inf  # what is inside of a clamp adds up no more
        if is_op(count, "add") and isinstance(count.args[1], int | float) and free and not count.kwargs:
            more += count.args[1]
        elif is_op(count, "clamp", "clamp_min") and free and len(count.args) == 2 and isinstance(count.args[1], int | float):
            least = float(count.args[1])
        elif not is_op(count, *_SAME) or not _keeps_values(count):
            return None
        count = count.args[0]
    if _rank(node) != 0 or not _is_sum_over_batch(count) or not _adds_up(node.args[0], batch):
        return None
    for one in _needed(count) - {count}:
        if not _is_by_row(one, batch) or not (_has_batch(one) if one.op == "placeholder" else is_op(one, *_BY_ROW)):
            return None
    return _Quotient(node, count, keys.of(count), least, more)


def _rank(node: Node) -> int | None:
    val = node.meta.get("val")
    return val.dim() if isinstance(val, torch.Tensor) else None


def _has_batch(node: Node) -> bool:
    val = node.meta.get("val")
    return isinstance(val, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in val.shape)


def _of_batch(graph: Graph) -> set[Node]:
    """The nodes that depend on inputs with rows."""
    found: set[Node] = set()
    for node in graph.nodes:
        if (node.op == "placeholder" and _has_batch(node)) or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _keeps_values(node: Node) -> bool:
    """Whether a cast is to floating numbers."""
    return not is_op(node, "to", "_to_copy") or node.meta["val"].is_floating_point()


def _is_sum_over_batch(node: Node) -> bool:
    dtype = node.kwargs.get("dtype")
    return _rank(node) == 0 and _has_batch(node.args[0]) and (dtype is None or dtype.is_floating_point)


def _adds_up(node: Node | float, batch: set[Node]) -> bool:
    """Whether what a single number is for two batches together is the sum of what it is for each."""
    stack, seen = [node], set()
    while stack:
        one = stack.pop()
        if one in seen:
            continue
        seen.add(one)
        if not isinstance(one, Node) or one.op != "call_function" or _rank(one) != 0:
            return False
        if is_op(one, "sum") or _reduces_by(one, 2):
            if not any(map(_has_batch, one.all_input_nodes)) or not all(_is_by_row(n, batch) for n in _needed(one) - {one}):
                return False
        elif is_op(one, *_SAME, "neg") and _keeps_values(one):
            stack.append(one.args[0])
        elif is_op(one, "mul", "div") and isinstance(one.args[1], int | float) and not one.kwargs:
            stack.append(one.args[0])
        elif is_op(one, "add", "sub"):
            stack += one.args[:2]
        else:
            return False
    return True


def _reduces_by(node: Node, reduction: int) -> bool:
    """Whether a node is a loss that averages (1) or adds up (2) over its elements."""
    arguments = getattr(getattr(node.target, "_schema", None), "arguments", ())
    return any(one.name == "reduction" for one in arguments) and argument(node, "reduction", 1) == reduction


def _is_by_row(node: Node, batch: set[Node]) -> bool:
    """Whether a node computes of each row what it would without the others, as far as sizes and dims tell."""
    val = node.meta.get("val")
    if isinstance(val, torch.SymInt) or node.op == "get_attr":
        return True
    if node.op not in ("placeholder", "call_function"):
        return False
    vals = [one for one in (val if isinstance(val, list | tuple) else [val]) if isinstance(one, torch.Tensor)]
    symbolic = [[size for size in one.shape if isinstance(size, torch.SymInt)] for one in vals]
    if any(len(sizes) > 1 or (node in batch and not sizes) for sizes in symbolic):
        return False  # of pairs of rows, or of all of them
    if not all(_is_proportional(size) for sizes in symbolic for size in sizes):
        return False  # rows are left out, or added
    if node.op == "placeholder":
        return True
    if is_op(node, *_ARITHMETIC) and any(isinstance(n.meta.get("val"), torch.SymInt | torch.SymFloat) for n in node.all_input_nodes):
        return False
    if is_op(node, "arange"):
        return not _has_batch(node)
    if is_op(node, *_ALONG):
        whole = node.args[0].meta["val"]
        dims = argument(node, "dim", argument(node, "dims", -1))
        return not any(isinstance(whole.shape[d], torch.SymInt) for d in (dims if isinstance(dims, list | tuple) else [dims]))
    if is_op(node, "slice", "view", "reshape", "_unsafe_view", "flatten", "expand"):
        places = [[isinstance(size, torch.SymInt) for size in one.meta["val"].shape].index(True)
                  for one in (node.args[0], node) if _has_batch(one)]  # fmt: skip
        return len(set(places)) < 2
    return not is_op(node, "index", "index_select", "batch_norm", "native_batch_norm") or not _has_batch(node.args[0])


def _is_proportional(size: torch.SymInt) -> bool:
    """Whether a size doubles with the batch."""
    expr = size.node.expr
    return all(expr.subs(symbol, 0) == 0 and expr.subs(symbol, 2) == 2 * expr.subs(symbol, 1) for symbol in expr.free_symbols)


def _is_known(loss: Node, means: set[Node], batch: set[Node]) -> bool:
    """Whether a loss is a sum of these means, of means over all elements of something by row, and of what no batch has a part in."""
    stack, seen = [loss], set()
    while stack:
        node = stack.pop()
        if not isinstance(node, Node) or node in seen or node in means or node not in batch:
            continue
        seen.add(node)
        if is_op(node, "mean") or _reduces_by(node, 1):
            if not _has_batch(node.args[0]) or not all(_is_by_row(n, batch) for n in _needed(node) - {node}):
                return False
        elif is_op(node, *_SAME, "neg", "add", "sub", "rsub"):
            stack += node.args[:2]
        elif is_op(node, "mul", "div") and len(batch.intersection(node.all_input_nodes)) == 1 and node.args[0] in batch:
            stack.append(node.args[0])
        elif is_op(node, "mul") and len(batch.intersection(node.all_input_nodes)) == 1:
            stack.append(node.args[1])
        else:
            return False
    return True


def _is_random(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _needed(node: Node) -> set[Node]:
    """A node and all that it is computed from."""
    found, stack = set(), [node]
    while stack:
        one = stack.pop()
        if one not in found:
            found.add(one)
            stack.extend(one.all_input_nodes)
    return found


class _Keys:
    """Numbers of nodes: equal for those that compute the same."""

    def __init__(self) -> None:
        self.numbers: dict[tuple, int] = {}
        self.known: dict[Node, int] = {}

    def of(self, node: Node) -> int:
        for one in _in_order(node.graph, _needed(node) - self.known.keys()):
            kwargs = tuple((name, self._written(value)) for name, value in sorted(one.kwargs.items()))
            unique = one.op != "call_function" or _is_random(one)
            key = (one.name,) if unique else (str(one.target), self._written(one.args), kwargs)
            self.known[one] = self.numbers.setdefault(key, len(self.numbers))
        return self.known[node]

    def _written(self, part) -> tuple:
        if isinstance(part, Node):
            return ("node", self.known[part])
        if isinstance(part, list | tuple):
            return tuple(map(self._written, part))
        return (str(part),)


def _in_order(graph: Graph, nodes: Iterable[Node]) -> list[Node]:
    wanted = set(nodes)
    return [node for node in graph.nodes if node in wanted]


def _is_linear(graph: Graph, means: Sequence[Node], batch: set[Node]) -> bool:
    """Whether what the graph returns is linear in these values, with factors that no batch has a part in."""
    of_means = set(means)
    for node in graph.nodes:
        mine = [n for n in node.all_input_nodes if n in of_means]
        if node.op != "call_function" or not mine:
            continue
        if node in means or not is_op(node, *_LINEAR) or (is_op(node, "div") and node.args[1] in of_means):
            return False
        others = [n for n in node.all_input_nodes if n is not mine[0]] + [mine[0]] * (node.args.count(mine[0]) - 1)
        if is_op(node, "mul", "div") and not batch.isdisjoint(others):
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
