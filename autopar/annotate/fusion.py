"""Kernel fusion: which bytes stay in registers because a compiler makes one kernel of a chain of
ops.

Element-wise ops and reductions join into one kernel if one reads what another wrote and nothing
else must run in between. The *level* of such an op is the largest number of kernels of other kinds
(matrix products, attention, look-ups) on a path to it. Two neighbours of one level belong to one
chain: a kernel between them would have raised the level.

    x --norm--> n --linear--> g --silu--> s --mul--> m --linear--> ...      silu and mul: one chain, `s` is never written

The shares of a chain's ops add up to the chain. The producer pays for a value that is written; the
first reader pays for a value that enters. Collectives between ops of a chain are ignored, since the
solver chooses them. Backward is assumed to recompute values that only the chain reads, as the
partitioner of torch.compile does. Both directions therefore leave out the same values.

Hand-written kernels join less. A norm is a kernel of its own. A chain ends with a softmax: scale,
mask and softmax are one kernel, and the dropout after it is another. In a third mode the softmax is
a kernel of its own too.

A chain never moves more bytes than its ops one by one. A single op may move more: a sum on its own
passes its gradient on for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Graph, Node

from autopar.ir.calls import op_name
from autopar.ir.fusion import LINEAR_LOSS
from autopar.ops.dims import OpDims, operands
from autopar.ops.elementwise import ELEMENTWISE
from autopar.ops.reductions import REDUCTIONS
from autopar.ops.values import (
    is_getitem,
    operand_names,
    ops,
    output_nodes,
    result_names,
    value_name,
)
from autopar.request.software import Joins

_ALONE = {
    "sort",
    "argsort",
    "topk",
    "kthvalue",
    "median",
    "nanmedian",
    "mode",
    "cumsum",
    "cumprod",
    "cummax",
    "cummin",
    "logcumsumexp",
}
NORMS = ("aten::rms_norm", "aten::layer_norm", "aten::native_layer_norm", "aten::group_norm")
_SOFTMAX = ("aten::softmax", "aten::_softmax", "aten::_safe_softmax")
FUSIBLE = frozenset(
    f"aten::{name}" for name in ({*ELEMENTWISE, *REDUCTIONS, "cat", "stack"} - _ALONE)
)


@dataclass(frozen=True, slots=True)
class FusedShare:
    """The share of an op in the memory traffic of its fused kernel: for each operand and result,
    whether this op pays to read or write it. A True in `writes` also marks the end of a kernel.
    """

    reads: tuple[bool, ...]
    writes: tuple[bool, ...]


def fuse(
    graph: Graph, dims: dict[str, OpDims | None], joins: Joins = "compiler"
) -> dict[str, FusedShare]:
    """What every fusible op of a class reads from and writes to memory, by op name. `joins` says
    which ops join: as a compiler does, or as hand-written kernels do.
    """
    views = {
        n.name
        for n in ops(graph)
        if (found := dims.get(n.name)) is not None and found.movement_free
    }
    roots = _roots(graph, views)
    level, producer = _levels(graph, views, roots, joins)
    readers: dict[str, set[str]] = {}  # root value -> ops that read it, through views
    for node in ops(graph):
        if node.name not in views:
            for name in operand_names(node):
                readers.setdefault(roots[name], set()).add(node.name)
    kept = {roots[value_name(n)] for n in output_nodes(graph)}
    entered: set[tuple[str, int]] = set()
    shares = {}
    for node in ops(graph):
        if node.name not in level:
            continue
        own, reads = level[node.name], []
        for name in operand_names(node):
            root = roots[name]
            outside = level.get(producer.get(root, "")) != own
            reads.append(outside and (root, own) not in entered)
            entered.add((root, own))
        writes = tuple(
            v in kept or any(level.get(r) != own for r in readers.get(v, ())) or v not in readers
            for v in result_names(node)
        )
        shares[node.name] = FusedShare(tuple(reads), writes)
    return shares


def _roots(graph: Graph, views: set[str]) -> dict[str, str]:
    """For each value, the value that owns its storage: the base of a view, otherwise the value
    itself.
    """
    roots: dict[str, str] = {}
    for node in graph.nodes:
        if node.op == "output" or is_getitem(node):
            continue
        source = operands(node)[:1] if node.name in views else []
        for name in (
            (node.name, *result_names(node)) if node.op == "call_function" else (node.name,)
        ):
            roots[name] = roots[value_name(source[0])] if source else name
    return roots


def _levels(
    graph: Graph, views: set[str], roots: dict[str, str], joins: Joins
) -> tuple[dict[str, int], dict[str, str]]:
    """(level of each fusible op, name of the op that writes each base value). The level is the
    largest number of other kernels on a path to the op; neighbours of one level make one kernel.
    """
    reached: dict[str, int] = {}  # root value -> level of an op that reads nothing else
    level: dict[str, int] = {}
    producer: dict[str, str] = {}
    ending = () if joins == "compiler" else (*NORMS, *_SOFTMAX)
    alone = {"compiler": (), "by hand": NORMS, "by hand, softmax alone": ending}[joins]
    for node in ops(graph):
        if node.name in views:
            continue
        own = max((reached.get(roots[name], 0) for name in operand_names(node)), default=0) + (
            op_name(node) in alone
        )
        if is_fusible(node):
            level[node.name] = own
        for name in result_names(node):
            reached[name] = own if is_fusible(node) and op_name(node) not in ending else own + 1
            producer[name] = node.name
    return level, producer


def is_fusible(node: Node) -> bool:
    """Whether the op is element-wise, a reduction or a join, which a compiler makes one kernel with
    its neighbours.
    """
    return op_name(node) in FUSIBLE


LOSSES = ("aten::cross_entropy_loss", "aten::nll_loss", "aten::nll_loss_nd")
FUSED_LOSS = "autopar::cross_entropy"


def heads_of(graph: Graph, dims: dict[str, OpDims | None]) -> set[str]:
    """Names of the vocabulary heads: products whose results reach a loss over classes without
    another product in between, and losses that multiply by the head themselves.
    """
    found = {node.name for node in ops(graph) if op_name(node) == LINEAR_LOSS}
    for loss in ops(graph):
        waiting, seen = (
            list(loss.all_input_nodes) if op_name(loss) in (*LOSSES, FUSED_LOSS) else [],
            set(),
        )
        while waiting:
            source = waiting.pop()
            if source in seen or source.op != "call_function":
                continue
            seen.add(source)
            if (own := dims.get(source.name)) is not None and own.contraction:
                found.add(source.name)
            else:
                waiting += source.all_input_nodes
    return found


def added_gradients(graph: Graph) -> set[tuple[str, int]]:
    """The (op, operand) pairs where autograd adds one gradient to another: every reader of a value
    but its first. Parameters are left out, since their gradients accumulate over the step
    anyway.
    """
    seen: set[str] = {node.name for node in graph.nodes if node.op == "get_attr"}
    parameters, found = frozenset(seen), set()
    for node in ops(graph):
        for i, name in enumerate(operand_names(node)):
            if name in seen and name not in parameters:
                found.add((node.name, i))
            seen.add(name)
    return found
