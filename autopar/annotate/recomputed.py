"""Selective recomputation: what backward runs again, and which tensors are kept instead.

- gather: inputs of linear layers that are whole over tp are kept as shards and gathered again.
- selective: the attention core (`ops/recomputed.py`) runs again; what other ops keep stays.
- op: a layer is checkpointed, but results of expensive ops are kept: attention, every second
  product by a parameter, sums over tp.

Mode `op` is torchtitan's `selective_ac_option = "op"`: a policy for torch's
`create_selective_checkpoint_contexts` that saves `mm`, fused attention and reduce-scatters, but not
every second `mm`. Its models have no biases. Here a product with a bias counts like one without.

What mode `op` runs again follows from the dataflow. A compiler runs only the ops between kept
values and the values that backward reads. Eager mode calls the layer again up to the last op with
saved tensors (early stop of torch.utils.checkpoint). It skips the ops whose results are kept, and
keeps those results even if backward does not read them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch.fx import Graph, Node

from autopar.annotate.saved_tensors import SavedByOp
from autopar.ops.recomputed import attention_core, dear_ops, linear_inputs
from autopar.ops.values import operand_names, ops, result_names


@dataclass(frozen=True, slots=True)
class Rerun:
    """What backward runs again. `ops` run again. `kept` has the saved tensors of ops that differ
    from what autograd keeps. `values` are those whose layout changes run again. If `sums`,
    results of sums over an axis are kept, so these sums do not run again. `gathered` maps linear
    layers to the input that they keep as a shard and gather again if it is whole over tp.
    """

    ops: frozenset[str] = frozenset()
    kept: dict[str, SavedByOp] = field(default_factory=dict)
    values: frozenset[str] = frozenset()
    sums: bool = False
    gathered: dict[str, str] = field(default_factory=dict)

    @property
    def converted(self) -> frozenset[str]:
        """The values whose layout changes cost more in backward."""
        return self.values.union(self.gathered.values())


NO_RERUN = Rerun()


def rerun_of(
    mode: str, graph: Graph, saved: dict[str, SavedByOp], roots: dict[str, str], compiled: bool
) -> Rerun:
    """What backward runs again in a class graph under a selective recompute mode ("gather",
    "selective" or "op"). `saved` and `roots` come from `observe_saved`. `compiled` matters only for
    "op".
    """
    if mode == "gather":
        return Rerun(gathered=_kept_inputs(graph, saved, roots))
    return (
        _core_again(graph, saved, roots)
        if mode == "selective"
        else _layer_again(graph, saved, roots, compiled)
    )


def _kept_inputs(
    graph: Graph, saved: dict[str, SavedByOp], roots: dict[str, str]
) -> dict[str, str]:
    """The inputs of linear layers that autograd keeps, by op name. An input is not kept if the
    parameter is frozen.
    """
    return {
        op: name
        for op, name in linear_inputs(graph).items()
        if op in saved and roots.get(name) in saved[op].values
    }


def _core_again(graph: Graph, saved: dict[str, SavedByOp], roots: dict[str, str]) -> Rerun:
    """Recomputation of the attention core, which keeps only its inputs from outside."""
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
        if name in saved  # else it takes one of an op's results
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
    """(ops to run again under a compiler, values that they and backward read), by name. `dear` are
    the ops whose results are kept.
    """
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
    """(ops to run again in eager mode, values that they read), by name. The second run ends at the
    last op with saved tensors; both are empty if there is none.
    """
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
