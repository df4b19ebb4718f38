"""torch.compile for the compute of a segment between its collectives.

    segment                        as it runs
    linear, norm, rotary           region 0    one call of a compiled function
    all_gather, start              all_gather  started where the program starts it
    linear, silu, mul              region 1
    wait                           wait

A *region* is a sequence of ops that only compute. Collectives stay outside, in the program's order:
a compiler may reorder them differently on each rank, and ranks that communicate in different orders
exchange wrong values. Collectives therefore overlap as without a compiler. Ops that read numbers on
the host (counters of dropout, sizes of routed tokens) do not break the graph. Regions with the same
structure and shapes share one function with parameters as inputs, so that the code of many layers
is compiled once.

Only what a segment's forward calls changes. Hooks, recomputation and stages still see the same
segments.
"""

from __future__ import annotations

import contextlib
import operator
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from autopar.errors import AutoparError, shown
from autopar.ir.calls import called_function
from autopar.ir.plan import Plan
from autopar.rewrite.lowerings.late_gradients import late_linear
from autopar.rewrite.lowerings.vocabulary_parallel import (
    in_training,
    own_key_heads,
    vocab_parallel_embedding,
)
from autopar.rewrite.overlap import is_view
from autopar.rewrite.program import Program
from autopar.rewrite.shard import local_shard
from autopar.runtime.programs.recompute import Recomputed

_OPTIONS = ("backend", "mode", "options", "dynamic")
"""Options of torch.compile that a user may set. (`fullgraph` is excluded: it would treat the early
stop of a recomputation as a graph break.)
"""

_LOCAL = (in_training, own_key_heads, vocab_parallel_embedding)
"""autopar's own functions that only compute."""
_AS_THEY_ARE = {
    torch.Tag.nondeterministic_seeded,
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
}
"""Tags of ops that are not compiled: a compiler draws other random numbers, and data-dependent
results break its graphs.
"""
_YET = (torch.ops.aten.scaled_dot_product_attention.default, torch.ops.aten.index.Tensor)
"""Ops that are compiled in spite of their tags, since programs do not use the tagged feature.
Dropout is a separate op, and a mask as an index cannot be exported.
"""

_PRODUCTS = tuple(
    getattr(torch.ops.aten, name).default for name in ("linear", "addmm", "mm", "matmul")
)


def check_compiles(plan: Plan, cuda_graphs: bool = False) -> None:
    """Raise AutoparError for a plan that cannot run compiled, or, if `cuda_graphs`, not with CUDA
    graphs.
    """
    if cuda_graphs and any(block.recompute == "full" for block in plan.blocks):
        raise AutoparError(
            "the engine cannot run CUDA graphs with recompute=full: running a block again overwrites what its graph gave "
            "before. Pin recompute=none or selective, or compile without a mode that uses CUDA graphs"
        )
    if plan.splits_backward:
        raise AutoparError(
            f"the engine cannot compile under {plan.schedule}: a backward in two parts takes gradients of inputs and of weights "
            "apart, and a compiled function gives both at once. Pin schedule=1f1b, or pass compile=False"
        )
    if any(block.recompute == "op" for block in plan.blocks):
        raise AutoparError(
            "the engine cannot compile with recompute=op: torch counts the calls of ops to find what it has kept, and "
            "compiling calls some more; pin recompute=selective or full, or pass compile=False"
        )


@dataclass(frozen=True, slots=True)
class Coverage:
    """How much is compiled of all programs of this rank that were compiled so far: of each batch
    length, and evaluation copies.

    Attributes:
        calls: calls of compiled functions in these programs.
        functions: compiled functions; equal regions share one.
        ops: ops in compiled calls, without views.
        others: for each op that is not compiled, its name and the number of its calls.
    """

    calls: int
    functions: int
    ops: int
    others: Mapping[str, int]

    def __str__(self) -> str:
        others = ", ".join(f"{count} {name}" for name, count in self.others.items()) or "none"
        return f"{self.ops} ops in {self.calls} calls of {self.functions} compiled functions; as they are: {others}"


class Compiler:
    """Compiles the segments of programs with given options of torch.compile; if compilation is off,
    changes nothing. torch compiles a function when it first runs.
    """

    def __init__(self, given: Mapping[str, Any] | bool) -> None:
        """`given` is True for torch's defaults, False to compile nothing, or a mapping of options.
        Raises AutoparError for invalid options.
        """
        self.on, options = given is not False, {} if isinstance(given, bool) else given
        if not isinstance(options, Mapping) or (
            unknown := [name for name in options if name not in _OPTIONS]
        ):
            what = shown(given if not isinstance(options, Mapping) else unknown[0])
            raise AutoparError(
                f"compile={what} is not known; True, False, or a dict of {', '.join(_OPTIONS)}, as torch.compile takes them"
            )
        self.options = dict(options)
        try:
            if self.on:
                torch.compile(nn.Identity(), **self.options)
        except (RuntimeError, TypeError, ValueError, AttributeError) as error:
            raise AutoparError(
                f"torch.compile does not take {self.options}: {str(error).strip().splitlines()[0]}"
            ) from error
        self._functions: dict[tuple, nn.Module] = {}
        self._calls = self._ops = 0
        self._others: Counter[str] = Counter()

    @property
    def cuda_graphs(self) -> bool:
        """Whether the options ask for CUDA graphs."""
        inner = self.options.get("options") or {}
        return (
            self.options.get("mode") in ("reduce-overhead", "max-autotune")
            or inner.get("triton.cudagraphs") is True
        )

    @property
    def coverage(self) -> Coverage | None:
        """How much has been compiled so far; None if compilation is off."""
        return (
            None
            if not self.on
            else Coverage(self._calls, len(self._functions), self._ops, dict(self._others))
        )

    def compile(self, program: Program) -> Program:
        """Make the segments of a program call compiled functions, in place, and return the same
        program. Segments that already do are unchanged.
        """
        for segment in (
            child for stage in program.stages for child in stage.module.children() if self.on
        ):
            again = isinstance(segment, Recomputed) and segment.whole
            run = segment.run if isinstance(segment, Recomputed) else segment
            for part in list(run.modules()):  # attention cores that run again are modules in it
                if isinstance(part, GraphModule) and "forward" not in vars(part):
                    part.forward = self._compiled(
                        part, _tail(part.graph) if again else frozenset()
                    ).forward
        return program

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """A context for running and compiling. Errors of torch.compile become AutoparErrors. So
        does a function that hits the recompilation limit, which torch would silently run
        uncompiled from then on.
        """
        if not self.on:
            yield
            return
        import torch._dynamo

        try:
            with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
                yield
        except Exception as error:
            if "output of CUDAGraphs that has been overwritten" in str(error):
                raise AutoparError(
                    "torch's CUDA graphs cannot run this program: a later run of a graph overwrites a result that is still "
                    "needed. Compile without a mode that uses CUDA graphs, such as compile=True"
                ) from error
            if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
                raise
            text = " ".join(str(error).split())[:300]
            again = isinstance(error, torch._dynamo.exc.FailOnRecompileLimitHit)
            remedy = (
                "give batches of fewer shapes, compile={'dynamic': True}, or raise torch._dynamo.config.recompile_limit"
                if again
                else "try compile={'backend': 'aot_eager'}, which makes no machine code, or pass compile=False"
            )
            raise AutoparError(
                f"torch.compile failed on a part of the program; {remedy}.  ({type(error).__name__}: {text})"
            ) from error

    def _compiled(self, body: GraphModule, apart: Collection[Node] = ()) -> GraphModule:
        """A module that computes what `body` does and shares its parameters and submodules. Runs of
        two or more ops that only compute become calls of compiled functions. The nodes `apart` stay
        outside of these.
        """
        root, graph = nn.Module(), Graph()
        values: dict[Node, Node] = {}
        region: list[Node] = []
        for name, child in body.named_children():
            root.add_module(name, child)
        root._parameters, root._buffers = body._parameters, body._buffers

        def copy(node: Node) -> None:
            values[node] = graph.node_copy(node, values.__getitem__)

        def close() -> None:
            """Append the current region to the graph and empty it: as one call if it has more than
            one op, else as it is, which counts as not compiled.
            """
            if sum(map(_works, region)) > 1:
                self._call(graph, root, region, values)
            else:
                for node in region:
                    self._note(node)
                    copy(node)
            region.clear()

        for node in body.graph.nodes:
            reads = not set(region).isdisjoint(node.all_input_nodes)
            # a product beside the region does not end it
            if not reads and (_is_free(node) or node.target is late_linear):
                self._note(node)
                copy(node)
            elif node not in apart and (_only_computes(node) or _is_free(node)):
                region.append(node)
            else:
                close()
                self._note(node)
                copy(node)
        made = GraphModule(root, graph, class_name=type(body).__name__)
        made._parameters, made._buffers = (
            body._parameters,
            body._buffers,
        )  # what is put into the segment later, both have
        return made

    def _note(self, node: Node) -> None:
        """Count an op that is not compiled, by its name, for `coverage`. Views and nodes that run
        nothing do not count.
        """
        if _works(node):
            function = called_function(node)
            self._others[getattr(function, "_opname", function.__name__)] += 1

    def _call(
        self, graph: Graph, root: nn.Module, region: list[Node], values: dict[Node, Node]
    ) -> None:
        """Append to `graph` one call of the function that computes the nodes `region`, and nodes
        for its results. The function becomes a submodule of `root`. `values` maps nodes of the old
        graph to those of the new one, and gets the results.
        """
        inputs = list(
            dict.fromkeys(x for node in region for x in node.all_input_nodes if x not in region)
        )
        results = [node for node in region if not set(region).issuperset(node.users)]
        inner, own = Graph(), {}
        for k, node in enumerate([*inputs, *region]):
            if k < len(inputs):
                own[node] = inner.placeholder(f"v{k}")
            else:
                args, kwargs = torch.fx.map_arg((node.args, node.kwargs), own.__getitem__)
                own[node] = inner.call_function(called_function(node), args, kwargs)
                own[node]._rename(f"v{k}")
        inner.output(tuple(own[node] for node in results))
        name = f"region_{sum(node.op == 'call_module' for node in graph.nodes)}"
        root.add_module(name, self._function(inner, tuple(map(_described, inputs))))
        call = graph.call_module(name, tuple(values[x] for x in inputs))
        for k, node in enumerate(results):
            values[node] = graph.call_function(operator.getitem, (call, k))
        self._calls += 1
        self._ops += sum(map(_works, region))

    def _function(self, graph: Graph, inputs: tuple[str, ...]) -> nn.Module:
        """The compiled function of a graph without parameters. Graphs with the same structure, and
        inputs with the same descriptions (`_described`), share one.

        Inputs of other shapes would recompile the function for dynamic shapes.
        """
        key = tuple(node.target for node in graph.nodes), str(graph), inputs
        if key not in self._functions:
            region = GraphModule(nn.Module(), graph, class_name="Region")
            self._functions[key] = torch.compile(region, **self.options)  # type: ignore[assignment]  # a module's is a module
        return self._functions[key]


def _tail(graph: Graph) -> frozenset[Node]:
    """The last matrix product and all nodes after it; an empty set if there is no product. Also
    empty if an op after it that may be compiled is no addition. Collectives, dropout and views may
    follow.

    Recomputation stops before these nodes if backward reads none of their results, as for sums.
    Inside a compiled function it could not stop there.
    """
    nodes = list(graph.nodes)
    last = max((k for k, node in enumerate(nodes) if node.target in _PRODUCTS), default=len(nodes))
    more = any(
        _works(node) and _only_computes(node) and node.target is not torch.ops.aten.add.Tensor
        for node in nodes[last + 1 :]
    )
    return frozenset(() if more else nodes[last:])


def _only_computes(node: Node) -> bool:
    """Whether a compiler may compute this op: it draws no random numbers, and no shape depends on
    data. Collectives and most functions of autopar are not such ops.
    """
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.target in _LOCAL
    return node.target in _YET or _AS_THEY_ARE.isdisjoint(node.target.tags)


def _described(node: Node) -> str:
    """A value's shape and dtype before sharding, and its layouts, as text; '' if the node has none
    of these.
    """
    whole = node.meta.get("whole")
    return "" if whole is None else f"{whole.dtype} {tuple(whole.shape)} {node.meta['layouts']}"


def _works(node: Node) -> bool:
    """Whether a node runs something on the device: a call that is neither free (`_is_free`) nor a
    view.
    """
    return node.op == "call_function" and not _is_free(node) and not is_view(node)


def _is_free(node: Node) -> bool:
    """Whether a node runs nothing on the device: an input, a parameter, a number, or one result of
    several.
    """
    number = (
        node.target is torch.ops.aten.sym_size.int
        or getattr(node.target, "__module__", "") == "_operator"
    )
    return node.op in ("placeholder", "get_attr") or node.target is local_shard or number
