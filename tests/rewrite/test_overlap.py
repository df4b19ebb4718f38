"""Collectives started early and waited for late: the same numbers, in an order that hides them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx import Graph, Node
from torch.utils.checkpoint import checkpoint

from autopar.api import plan as make_plan
from autopar.api import trace
from autopar.ir.mesh import AXES
from autopar.ir.sharding import COLLECTIVES, parse_layout
from autopar.models.spec import parse_model
from autopar.rewrite import collectives, late_gradients, primitives
from autopar.rewrite.axes import AxisGroup, active_axes
from autopar.rewrite.collectives import NODE_FUNCTIONS, all_gather, wait
from autopar.rewrite.late_gradients import late_gradient, late_linear
from autopar.rewrite.overlap import overlap
from autopar.rewrite.primitives import Started
from autopar.rewrite.program import assemble
from autopar.rewrite.shard import local_shard
from autopar.verify import free_network

PAPER = {axis: AxisGroup(axis, 2 if axis == "tp" else 1, 0, simulate=axis == "tp") for axis in AXES}
aten = torch.ops.aten


@given(
    rows=st.lists(st.integers(0, 4), min_size=1, max_size=3), sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)), bias=st.booleans(),
    transposed=st.booleans(), frozen=st.sampled_from(["", "x", "weight"]),
)  # fmt: skip
def test_a_late_linear_is_a_linear(rows, sizes, bias, transposed, frozen):
    def leaf(*shape, name=""):
        return torch.randn(shape, dtype=torch.float64, requires_grad=name != frozen)

    x, b = leaf(*rows, sizes[0], name="x"), leaf(sizes[1]) if bias else None
    weight = leaf(*(sizes if transposed else sizes[::-1]), name="weight")
    leaves = [t for t in (x, weight, b) if t is not None and t.requires_grad]
    late = late_linear(x, weight, late_gradient(weight), b, transposed)
    expected = torch.nn.functional.linear(x, weight.t() if transposed else weight, b)
    grad = torch.randn_like(expected)
    torch.testing.assert_close(late, expected, rtol=1e-13, atol=1e-13)
    found = torch.autograd.grad(late, leaves, grad) if leaves else ()
    for one, other in zip(found, torch.autograd.grad(expected, leaves, grad) if leaves else (), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)


def test_gradients_of_weights_hide_the_gradient_of_the_input(monkeypatch):
    events = []

    def tell(name: str, function):
        def told(*args, **kwargs):
            events.append(name)
            return function(*args, **kwargs)

        return told

    start = primitives.start_primitive
    monkeypatch.setattr(collectives, "start_primitive", lambda name, *rest: (events.append(f"start {name}"), start(name, *rest))[1])
    monkeypatch.setattr(collectives._Handle, "wait", tell("wait", collectives._Handle.wait))
    late_backward = tell("weight", late_gradients._Late.backward)
    monkeypatch.setattr(late_gradients._Late, "backward", staticmethod(late_backward))
    x, weights = torch.randn(2, 3, requires_grad=True), [torch.randn(5, 3, requires_grad=True) for _ in range(2)]
    with active_axes(PAPER):
        pending = all_gather(x, "tp", 0, 4, "reduce_scatter", async_op=True)
        late = [late_gradient(weight) for weight in weights]
        whole = wait(pending)
        sum(late_linear(whole, *pair) for pair in zip(weights, late, strict=True)).sum().backward()
    assert events == ["start all_gather", "wait", "start reduce_scatter", "weight", "weight", "wait"]


def test_a_collective_is_waited_for_even_if_nobody_asks(monkeypatch):
    waited = []
    monkeypatch.setattr(primitives, "_c10d", type("c10d", (), {"wait_tensor": staticmethod(lambda x: waited.append(x) or x)}))
    started = Started(torch.zeros(2), lambda x: x)
    del started
    assert len(waited) == 1, "recomputation may stop before the wait"
    assert Started(torch.zeros(2), lambda x: x).wait().shape == (2,) and len(waited) == 2
    started = Started(torch.zeros(2))
    started.wait()
    with pytest.raises(RuntimeError, match="once"):
        started.wait()


def test_recomputation_runs_both_ends_again():
    x, weight = torch.randn(2, 3, dtype=torch.float64, requires_grad=True), torch.randn(4, 3, dtype=torch.float64, requires_grad=True)

    def block(x, weight):
        pending = collectives.identity(x, "tp", async_op=True)
        late = late_gradient(weight)
        return late_linear(wait(pending), weight, late).tanh()

    single = {axis: AxisGroup(axis, 1) for axis in AXES}
    with active_axes(single):
        block(x, weight).sum().backward()
        expected = [x.grad.clone(), weight.grad.clone()]
        x.grad = weight.grad = None
        checkpoint(block, x, weight, use_reentrant=False).sum().backward()
    assert torch.equal(x.grad, expected[0]) and torch.equal(weight.grad, expected[1])


def _transition(graph: Graph, x: Node, src: str, dst: str, shape: tuple[int, ...]) -> Node:
    function, arguments = collectives.make_transition(parse_layout(src), parse_layout(dst), shape)
    node = graph.call_function(function, (x, "tp"), arguments)
    node.meta |= {"whole": torch.empty(shape, device="meta"), "layouts": {}, "transition": (src, dst)}
    return node


def _call(graph: Graph, target, *args) -> Node:
    node = graph.call_function(target, args)
    node.meta["whole"] = torch.empty(4, 4, device="meta")
    return node


def test_work_between_operand_and_use_is_found_through_views():
    graph = Graph()
    x = graph.placeholder("x")
    moved = _call(graph, aten.relu.default, x)
    busy = _call(graph, aten.sin.default, x)
    gathered = _transition(graph, moved, "S(0)", "R", (4, 4))
    turned = _call(graph, aten.transpose.int, gathered, 0, 1)
    more = _call(graph, aten.cos.default, busy)
    graph.output(_call(graph, aten.add.Tensor, turned, more))
    names = [node.target for node in overlap(graph).nodes]
    assert names == [
        "x",
        aten.relu.default,
        all_gather,
        aten.sin.default,
        aten.cos.default,
        wait,
        aten.transpose.int,
        aten.add.Tensor,
        "output",
    ]
    assert gathered.kwargs["async_op"]


def test_nothing_to_hide_behind_leaves_a_plain_collective():
    graph = Graph()
    moved = _call(graph, aten.relu.default, graph.placeholder("x"))
    gathered = _transition(graph, moved, "S(0)", "R", (4, 4))
    graph.output(_call(graph, aten.cos.default, _call(graph, aten.transpose.int, gathered, 0, 1)))
    assert wait not in [node.target for node in overlap(graph).nodes] and "async_op" not in gathered.kwargs


@pytest.mark.parametrize(
    "model, pin", [("llama-tiny", {"tp": 4, "sequence_parallel": True}), ("llama-tiny", {"cp": 2, "tp": 2}), ("gpt-tiny", {"tp": 4})]
)
def test_programs_start_before_they_wait_with_work_between(model, pin):
    spec = parse_model(model)
    example = spec.example_inputs(4, 16)
    traced = trace(spec.build("meta"), example, None, "fp32")
    plan = make_plan(spec.build("meta"), free_network(4), example, 4, pin, precision="fp32", runnable=True, traced=traced)
    program = assemble(traced, plan, 0, torch.device("cpu"))
    late = 0
    for module in (program.module, *program.module.children()):
        order = list(module.graph.nodes)
        for node in order:
            if node.kwargs.get("async_op"):
                (waited,) = node.users
                between = order[order.index(node) + 1 : order.index(waited)]
                assert waited.target is wait and between, f"{node} hides behind nothing"
            elif node.target in NODE_FUNCTIONS.values() and node.kwargs["backward"] in COLLECTIVES:
                linears = [user for user in node.users if user.target is aten.linear.default and user.args[1].target is local_shard]
                assert not linears, f"the gradient of {node} could hide behind that of a weight"
            late += node.target is late_linear
    assert late >= 3
