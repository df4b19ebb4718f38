"""Recomputation: segments that do not keep all activations, in the mode that the plan has for each.

- full: the whole segment is checkpointed, and backward runs its forward again.
- gather: inputs that linear layers gather over tp are kept as shards, and gathered again.
- op: the same as full, but results of expensive ops and of sums over an axis are kept (a selective policy
  of torch.utils.checkpoint).
- selective: only the attention core is checkpointed; other ops keep what autograd keeps.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.utils.fuser_utils import fuse_by_partitions
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from autopar.ir.calls import called_function
from autopar.ir.plan import Plan
from autopar.ir.traced import BlockClass, TracedModel
from autopar.ops.recomputed import (
    activation_of,
    attention_core,
    dear_ops,
    linear_inputs,
    parameters_of,
)
from autopar.ops.values import input_node, is_getitem
from autopar.rewrite.collectives.transitions import all_gather, all_reduce, reduce_scatter, wait
from autopar.rewrite.lowerings.kept_shards import gathered_again, keeping_shards
from autopar.rewrite.lowerings.late_gradients import late_linear
from autopar.rewrite.overlap import is_view
from autopar.rewrite.program import Program, copied_graph
from autopar.rewrite.root import module_name
from autopar.rewrite.shard import local_shard

Contexts = Callable[[], tuple[AbstractContextManager, AbstractContextManager]]
"""Makes the contexts of a first and of a second forward."""


class Recomputed(nn.Module):
    """A segment whose backward recomputes activations; it replaces the segment `body`. It calls
    `run`, which has the parameters and buffers of `body`.

    `whole`: the whole segment is checkpointed; otherwise `run` checkpoints parts of itself.
    `contexts` are those of a selective policy. `changing` are buffers that forward changes; the
    second run reads the values that the first one read.
    """

    again: Callable[..., Any]
    run: GraphModule

    def __init__(
        self,
        body: GraphModule,
        run: GraphModule,
        whole: bool,
        contexts: Contexts = noop_context_fn,
        changing: tuple[str, ...] = (),
    ) -> None:
        super().__init__()
        self.body, self.changing, self.whole = body, changing, whole
        self.again = partial(checkpoint, use_reentrant=False, context_fn=contexts)
        if run is not body:  # one dict: what is put into the segment later, both have
            run._parameters, run._buffers = body._parameters, body._buffers
            run._forward_pre_hooks, run._forward_hooks = (
                body._forward_pre_hooks,
                body._forward_hooks,
            )  # which gather under ZeRO 3
        self.__dict__["run"] = run  # not a child, which would list the parameters twice

    def run_again_by(self, again: Callable) -> None:
        """Replace torch's checkpointing of this segment: `again(run, *inputs)` is called instead,
        for the segment or for each part that is checkpointed.
        """
        for part in (
            (self,)
            if self.whole
            else (m for m in self.run.children() if isinstance(m, _Checkpointed))
        ):
            part.again = again

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Run the segment so that backward recomputes what is not kept."""
        if not self.whole:
            return self.run(*inputs)
        if not self.changing:
            return self.again(self.run, *inputs)
        values = {name: getattr(self.body, name) for name in self.changing}
        return self.again(lambda *given: functional_call(self.run, values, given), *inputs)


def kept_in_split_backward(plan: Plan) -> bool:
    """Whether a plan needs kept results in both parts of a split backward, which torch's selective
    policy cannot provide.
    """
    return plan.splits_backward and any(block.recompute == "op" for block in plan.blocks)


def segment_of(module: GraphModule | Recomputed) -> GraphModule:
    """The segment's own graph module: `body` of a recomputed one, otherwise the module itself."""
    return module.body if isinstance(module, Recomputed) else module


def wrap_recomputed(program: Program, plan: Plan, traced: TracedModel) -> None:
    """Replace each segment that the plan recomputes by a `Recomputed`, in place, in the program and
    its stages.
    """
    modes = {name: block.recompute for block in plan.blocks for name in block.segments}
    for segment in traced.segments:
        name = module_name(segment.name)
        body = getattr(program.module, name, None)  # none: of another rank's stage
        if body is None:
            continue
        changing = tuple(
            p.attribute
            for p in program.parameters
            if p.module == name and p.spec.name in program.updates
        )
        wrapped = recomputed(
            body, traced.classes[segment.class_index], modes[segment.name], changing
        )
        for holder in (program.module, *(stage.module for stage in program.stages)):
            if hasattr(holder, name):
                setattr(holder, name, wrapped)


def recomputed(
    body: GraphModule, block: BlockClass, mode: str, changing: tuple[str, ...]
) -> nn.Module:
    """The segment `body` of class `block` under the recompute mode `mode` of the plan: a
    `Recomputed`, or `body` itself if the mode recomputes nothing in it. `changing` names the
    buffers that its forward changes.
    """
    if mode == "full":
        return Recomputed(body, body, True, changing=changing)
    if mode == "op" and block.is_layer:
        return Recomputed(
            body, _keeping(body, dear_ops(block.graph)), True, _kept_contexts, changing
        )
    if mode == "gather" and block.is_layer:
        run = _copy(body)
        gather_again(run.graph, linear_inputs(block.graph))
        run.recompile()
        return Recomputed(body, run, False)
    if mode == "selective" and (core := attention_core(block.graph)):
        run = _copy(body)
        parts = core_parts(run.graph, core)
        fuse_by_partitions(run, [dict.fromkeys(part) for part in parts], "core_")
        run.recompile()
        for number in range(len(parts)):
            setattr(run, f"core_{number}", _Checkpointed(getattr(run, f"core_{number}")))
        return Recomputed(body, run, False)
    return body


class _Checkpointed(nn.Module):
    again: Callable[..., Any]

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.again = body, partial(checkpoint, use_reentrant=False)

    def forward(self, *inputs: Any) -> Any:
        return self.again(self.body, *inputs)


def _copy(body: GraphModule) -> GraphModule:
    return GraphModule(body, copied_graph(body.graph), class_name=type(body).__name__)


# ------------------------------------------------------------------------------------------------------------------ results kept

_kept = threading.local()  # autograd recomputes on threads of its own on CUDA


@contextlib.contextmanager
def _keep() -> Iterator[None]:
    """A context in which `_policy` keeps the results of ops."""
    _kept.on = True
    try:
        yield
    finally:
        _kept.on = False


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """The policy of selective checkpointing: keep the results of ops that run within `_keep`, and
    recompute all others. Views are recomputed: they cost nothing, and keeping one would keep its
    whole base.
    """
    views = any(result.alias_info is not None for result in op._schema.returns)
    return (
        CheckpointPolicy.MUST_SAVE
        if getattr(_kept, "on", False) and not views
        else CheckpointPolicy.PREFER_RECOMPUTE
    )


_kept_contexts = partial(create_selective_checkpoint_contexts, _policy)


def _keeping(body: GraphModule, dear: Collection[str]) -> GraphModule:
    """A copy of the segment that calls the ops named in `dear`, all-reduces and reduce-scatters
    within `_keep`, so that their results are kept.
    """
    run = _copy(body)
    for node in run.graph.nodes:
        if node.op == "call_function" and (
            node.meta.get("op") in dear or node.target in (all_reduce, reduce_scatter)
        ):
            node.target = _called_within_keep(node.target)
    run.recompile()
    return run


def _called_within_keep(function: Callable) -> Callable:
    def kept(*args: Any, **kwargs: Any) -> Any:
        with _keep():
            return function(*args, **kwargs)

    kept.__name__ = kept.__qualname__ = f"kept_{function.__name__.replace('.', '_')}"
    return kept


# ------------------------------------------------------------------------------------------------------------- the attention core


def core_parts(graph: Graph, core: Collection[str]) -> list[set[Node]]:
    """For each attention core, its nodes: the ops named in `core`, the nodes between them, and the
    getitem nodes of their results.

    Ops connected by a path without parameters belong to one core. Each core is closed: no path
    leaves it and returns.
    """
    calls = [node for node in graph.nodes if node.op == "call_function"]
    inside = {node for node in calls if node.meta.get("op") in core}
    outside = {
        node
        for node in calls
        if any(n.op == "get_attr" or n.target is local_shard for n in node.all_input_nodes)
    } - inside
    between = _descendants(calls, inside, outside) & _ancestors(calls, inside, outside)
    parts: list[set[Node]] = []
    for node in calls:
        if node in inside | between:
            near = [part for part in parts if part & set(node.all_input_nodes)]
            parts = [part for part in parts if part not in near] + [set().union({node}, *near)]
    parts = [
        part | (_descendants(calls, part, set()) & _ancestors(calls, part, set())) for part in parts
    ]
    return [
        part | {user for node in part for user in node.users if is_getitem(user)} for part in parts
    ]


def _descendants(calls: list[Node], sources: set[Node], barred: set[Node]) -> set[Node]:
    found: set[Node] = set()
    for node in calls:
        if node not in barred and any(n in sources or n in found for n in node.all_input_nodes):
            found.add(node)
    return found


def _ancestors(calls: list[Node], targets: set[Node], barred: set[Node]) -> set[Node]:
    found: set[Node] = set()
    for node in reversed(calls):
        if node not in barred and any(n in targets or n in found for n in node.users):
            found.add(node)
    return found


def gather_again(graph: Graph, linears: Collection[str], axis: str = "tp") -> Graph:
    """Keep the inputs of linear layers as shards, which backward gathers again: a pass, in place, for
    those that come from the ops `linears`, over one mesh axis. Returns the graph.

    Requires: a graph of local ops in which transitions are nodes, before or after `overlap`.
    Ensures: the same values and gradients, and that autograd keeps 1/tp of each input that all
    ranks of an axis have. Inputs that are sharded over the axis stay as they are.
    """
    made, kept = parameters_of(graph), {}
    for node in list(graph.nodes):
        if node.meta.get("op") not in linears:
            continue
        late = node.target is late_linear
        read = input_node(node, 0) if late else activation_of(node, made)
        layout = None if read is None else read.meta.get("layouts", {}).get(axis)
        if read is None or layout is None or layout.value.kind != "R":
            continue
        base = _base(read)
        if base not in kept:
            kept[base] = _kept_as_shard(graph, base, axis)
        if late:
            node.kwargs = {**node.kwargs, "again": kept[base]}
        else:
            node.target = keeping_shards(called_function(node))
            node.args = (kept[base], *node.args)
    graph.lint()
    return graph


def _base(node: Node) -> Node:
    """The value of which a node is a view; the node itself if it is none."""
    while is_view(node) and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node


def _kept_as_shard(graph: Graph, whole: Node, axis: str) -> Node:
    """Insert the call that keeps this rank's shard of the value `whole`, after the value, and
    return it. It keeps the tensor from which `whole` was gathered over `axis`, if it was.
    """
    made = input_node(whole, 0) if whole.target is wait else whole
    with graph.inserting_after(whole):
        if made.target is all_gather and made.args[1] == axis:
            how = {k: v for k, v in made.kwargs.items() if k not in ("backward", "async_op")}
            node = graph.call_function(gathered_again, (whole, input_node(made, 0), axis), how)
        else:
            node = graph.call_function(gathered_again, (whole, None, axis))
    node._rename(f"{whole.name}_again")
    return node
