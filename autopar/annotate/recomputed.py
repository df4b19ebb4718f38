"""What backward runs again under a selective recompute mode, and what is kept instead of what autograd would keep.

    selective   the attention core (`ops/recomputed.py`): its ops run again, what others keep stays
    op          a layer is checkpointed, but the results of its dear ops are kept: attention, every second product by a parameter, sums
                over tp.  That is torchtitan's `selective_ac_option = "op"` (a policy for torch's `create_selective_checkpoint_contexts`
                that saves `mm`, fused attention and reduce-scatters, but not every second `mm`).  Its models have no biases; here a
                product with a bias counts like one without.

What runs again in mode `op` follows from the dataflow.  A compiler goes back from every value that backward reads to what is kept, and runs
only what lies between.  Eager mode calls the layer once more, up to the last op that autograd keeps something for (early stop of
torch.utils.checkpoint), skips the ops whose results are kept, and keeps those results whether backward reads them or not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch.fx import Graph, Node

from autopar.annotate.saved_tensors import SavedByOp
from autopar.ops.recomputed import attention_core, dear_ops
from autopar.ops.values import operand_names, ops, result_names


@dataclass(frozen=True, slots=True)
class Rerun:
    """`ops` run again.  `kept`: what an op keeps, where it is not what autograd keeps for it.  `values`: those whose changes of layout are
    made again; sums over an axis are not, whose results are kept (`sums`)."""

    ops: frozenset[str] = frozenset()
    kept: dict[str, SavedByOp] = field(default_factory=dict)
    values: frozenset[str] = frozenset()
    sums: bool = False


NOTHING = Rerun()


def rerun_of(
    mode: str, graph: Graph, saved: dict[str, SavedByOp], roots: dict[str, str], compiled: bool
) -> Rerun:
    """What runs again in a class graph; `saved` and `roots` are those of `observe_saved`."""
    return (
        _core_again(graph, saved, roots)
        if mode == "selective"
        else _layer_again(graph, saved, roots, compiled)
    )


def _core_again(graph: Graph, saved: dict[str, SavedByOp], roots: dict[str, str]) -> Rerun:
    """The core keeps what comes from outside."""
    core = attention_core(graph)
    inside = {
        roots[name]
        for node in ops(graph)
        if node.name in core
        for name in result_names(node)
        if name in roots
    }
    kept = {
        name: SavedByOp(tuple(v for v in saved[name].values if v not in inside), 0.0)
        for name in core
    }
    return Rerun(core, kept)


def _layer_again(
    graph: Graph, saved: dict[str, SavedByOp], roots: dict[str, str], compiled: bool
) -> Rerun:
    nodes, resident = ops(graph), {n.name for n in graph.nodes if n.op == "get_attr"}
    dear = dear_ops(graph)
    again, needed = (
        _between(nodes, saved, roots, dear) if compiled else _until_last(nodes, saved, dear)
    )
    there = {roots[n.name] for n in graph.nodes if n.op == "placeholder"}
    there |= {
        roots[name]
        for node in nodes
        if node.name in dear
        for name in result_names(node)
        if name in roots
    }
    kept = {}
    for node in nodes:
        observed = saved.get(node.name, SavedByOp((), 0.0))
        values = [value for value in observed.values if value in there]
        if node.name in again:
            values += [
                roots[name]
                for name in operand_names(node)
                if name not in resident and roots[name] in there
            ]
        if node.name in dear and not compiled:
            values += [roots[name] for name in result_names(node)]
        kept[node.name] = SavedByOp(
            tuple(dict.fromkeys(values)), observed.extra_bytes_per_row if node.name in dear else 0.0
        )
    return Rerun(frozenset(again), kept, frozenset(needed - resident), sums=True)


def _between(
    nodes: Iterable[Node], saved: dict[str, SavedByOp], roots: dict[str, str], dear: frozenset[str]
) -> tuple[set[str], set[str]]:
    """(ops, values they and backward read) on the way from what is kept to what backward reads."""
    producers = {name: node for node in nodes for name in result_names(node)}
    again: set[str] = set()
    needed: set[str] = set()
    waiting: list[str] = []
    for node in nodes:
        if (observed := saved.get(node.name)) is None:
            continue
        waiting += [
            *observed.values,
            *(name for name in operand_names(node) if roots.get(name) in observed.values),
        ]
        if observed.extra_bytes_per_row and node.name not in dear:
            again.add(node.name)
            waiting += operand_names(node)
    while waiting:
        value = waiting.pop()
        if value in needed:
            continue
        needed.add(value)
        producer = producers.get(value)
        if producer is not None and producer.name not in dear:
            again.add(producer.name)
            waiting += operand_names(producer)
    return again, needed


def _until_last(
    nodes: Iterable[Node], saved: dict[str, SavedByOp], dear: frozenset[str]
) -> tuple[set[str], set[str]]:
    """(ops, values they read) of a second call, which ends with the last tensor that autograd asks for."""
    listed = list(nodes)
    asking = [
        place
        for place, node in enumerate(listed)
        if saved.get(node.name, SavedByOp((), 0.0)) != SavedByOp((), 0.0)
    ]
    if not asking:
        return set(), set()
    last = listed[asking[-1]]
    own = bool(saved[last.name].extra_bytes_per_row) or any(
        name in saved[last.name].values for name in result_names(last)
    )
    called = listed[: asking[-1] + own]  # operands are asked for before the op runs, results after
    needed = {name for node in (*called, last) for name in operand_names(node)}
    return {node.name for node in called if node.name not in dear}, needed
