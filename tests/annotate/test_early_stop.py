"""What recomputation runs again, against what torch.utils.checkpoint runs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.effort import every
from torch.fx import Graph
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from autopar.annotate.saved_tensors import _concrete, _rows, observe_saved, rerun_ops
from autopar.api import trace
from autopar.models.spec import parse_model
from autopar.ops.values import ops

aten = torch.ops.aten


def run_again(graph: Graph) -> frozenset[str]:
    """The calls whose kernels backward runs when a graph is checkpointed."""
    ran: set[str] = set()
    first, current = True, ""

    class Kernels(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if not first and current and not func.is_view:
                ran.add(current)
            return func(*args, **(kwargs or {}))

    def value(node):
        val = node.meta["val"]
        shape = [_rows(size) for size in val.shape]
        if not val.is_floating_point():
            return torch.zeros(shape, dtype=val.dtype)
        grad = bool(node.meta.get("grad"))
        return torch.rand(shape, dtype=val.dtype, requires_grad=grad)

    leaves = {node: value(node) for node in graph.nodes if node.op in ("placeholder", "get_attr")}

    def forward(*tensors):
        nonlocal current
        env = dict(zip(leaves, tensors, strict=True))
        try:
            for node in graph.nodes:
                if node.op == "call_function":
                    current = node.name
                    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), env.__getitem__)
                    env[node] = node.target(*_concrete(args), **_concrete(kwargs))
        finally:
            current = ""
        return [env[node] for node in graph.output_node().args[0]]

    with Kernels():
        results = checkpoint(forward, *leaves.values(), use_reentrant=False)
        first = False
        torch.autograd.backward([r.sum() for r in results if r.requires_grad])
    return frozenset(ran & kernels(graph))


def kernels(graph: Graph) -> set[str]:
    """The calls that are no views."""
    return {
        node.name
        for node in ops(graph)
        if not (node.target.is_view or node.target is aten.reshape.default)
    }


@pytest.mark.parametrize("model", every(3, ["moe-tiny", "llama-tiny", "gpt-tiny"]))
def test_blocks_rerun_what_checkpoint_reruns(model):
    spec = parse_model(model)
    traced = trace(spec.build("meta"), spec.example_inputs(2, 16), None, "fp32")
    block = max(
        traced.classes,
        key=lambda block: sum(
            s.class_index == traced.classes.index(block) for s in traced.segments
        ),
    )
    found = rerun_ops(block.graph, *observe_saved(block.graph), early_stop=True)
    assert found & kernels(block.graph) == run_again(block.graph)
    everything = frozenset(node.name for node in ops(block.graph))
    assert (
        found < everything == rerun_ops(block.graph, *observe_saved(block.graph), early_stop=False)
    )


@given(
    st.lists(
        st.sampled_from(["linear", "relu", "sin", "add", "exp", "neg", "transpose"]),
        min_size=1,
        max_size=6,
    )
)
def test_any_chain_reruns_what_checkpoint_reruns(chain):
    graph, val = Graph(), torch.empty(4, 4, requires_grad=True)

    def tell(node):
        node.meta |= {"val": val, "grad": True}
        return node

    x, weight = tell(graph.placeholder("x")), tell(graph.create_node("get_attr", "weight"))
    for name in chain:
        target, *more = {
            "linear": (aten.linear.default, weight), "relu": (aten.relu.default,), "sin": (aten.sin.default,), "neg": (aten.neg.default,),
            "add": (aten.add.Tensor, x), "exp": (aten.exp.default,), "transpose": (aten.transpose.int, 0, 1),
        }[name]  # fmt: skip
        x = tell(graph.call_function(target, (x, *more)))
    graph.output((x,))
    assert rerun_ops(graph, *observe_saved(graph), early_stop=True) & kernels(graph) == run_again(
        graph
    )
