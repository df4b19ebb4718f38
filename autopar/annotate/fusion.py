"""What prices need to know of a class' graph, first of all which bytes a compiler leaves in registers: chains of ops become one kernel.

Ops that work element by element, and reductions with them, join into one kernel wherever one reads what another wrote, unless something
else has to run in between.  Such an op has a *level*: the most kernels of other kinds (matrix products, attention, look-ups) on a path to
it.  Two neighbours of one level are one chain: a kernel between them would have raised the level.

    x --norm--> n --linear--> g --silu--> s --mul--> m --linear--> ...      silu and mul: one chain, `s` is never written

The share of a chain that an op pays adds up to the chain: a value that is written is paid by its producer, one that enters by its first
reader.  Collectives between ops of one chain are left out of account, since the solver chooses them.  Backward is taken to recompute
inside the chain what only the chain has read (as the partitioner of torch.compile does), so that both directions leave out the same values.
Kernels by hand join less: a norm is one of its own, and a chain ends with a softmax (scale, mask and softmax are one kernel, the dropout
after it is another) or has none (the softmax is a kernel of its own too).

A chain never moves more than its ops one by one; one op of it may, such as a sum, which passes its gradient on for nothing by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Graph, Node

from autopar.ir.calls import op_name
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
    """What of an op's operands and results goes through memory; for results, True also where a kernel ends."""

    reads: tuple[bool, ...]
    writes: tuple[bool, ...]


def fuse(
    graph: Graph, dims: dict[str, OpDims | None], joins: Joins = "compiler"
) -> dict[str, FusedShare]:
    """The share of every fusible op of a class, by name."""
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
    """Value -> the value of which it is a view."""
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
    """(fusible op -> level, root value -> op that writes it)."""
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
    """Whether a compiler joins the op with its neighbours."""
    return op_name(node) in FUSIBLE


LOSSES = ("aten::cross_entropy_loss", "aten::nll_loss", "aten::nll_loss_nd")
FUSED_LOSS = "autopar::cross_entropy"


def heads_of(graph: Graph, dims: dict[str, OpDims | None]) -> set[str]:
    """The products whose results reach a loss over classes without another product in between: vocabulary heads."""
    found: set[str] = set()
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
    """(op, operand) where autograd adds a gradient to another: all readers of a value but its first.  Parameters add up over the step
    anyway."""
    seen: set[str] = {node.name for node in graph.nodes if node.op == "get_attr"}
    parameters, found = frozenset(seen), set()
    for node in ops(graph):
        for i, name in enumerate(operand_names(node)):
            if name in seen and name not in parameters:
                found.add((node.name, i))
            seen.add(name)
    return found
