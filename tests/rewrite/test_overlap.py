"""Collectives started early and waited for late: the same numbers, in an order that hides them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.effort import every
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import checkpoint

from autopar.api import plan as make_plan
from autopar.api import trace
from autopar.ir.mesh import AXES
from autopar.ir.sharding import COLLECTIVE_PRIMITIVES, parse_layout
from autopar.models.spec import parse_model
from autopar.rewrite.collectives import primitives, transitions
from autopar.rewrite.collectives.axes import AxisGroup, active_axes, simulated_axes
from autopar.rewrite.collectives.primitives import Started
from autopar.rewrite.collectives.transitions import NODE_FUNCTIONS, all_gather, wait
from autopar.rewrite.lowerings import late_gradients
from autopar.rewrite.lowerings.late_gradients import late_gradient, late_linear
from autopar.rewrite.overlap import overlap
from autopar.rewrite.program import Program, assemble, shard_of
from autopar.rewrite.shard import local_shard
from autopar.verify.verify import free_network

PAPER = {axis: AxisGroup(axis, 2 if axis == "tp" else 1, 0, simulate=axis == "tp") for axis in AXES}
aten = torch.ops.aten


@given(
    rows=st.lists(st.integers(0, 4), max_size=3), sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)), bias=st.booleans(),
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
    for one, other in zip(
        found, torch.autograd.grad(expected, leaves, grad) if leaves else (), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)


def test_gradients_of_weights_hide_the_gradient_of_the_input(monkeypatch):
    events = []

    def tell(name: str, function):
        def told(*args, **kwargs):
            events.append(name)
            return function(*args, **kwargs)

        return told

    start = primitives.start_primitive
    monkeypatch.setattr(
        transitions,
        "start_primitive",
        lambda name, *rest: (events.append(f"start {name}"), start(name, *rest))[1],
    )
    monkeypatch.setattr(transitions._Handle, "wait", tell("wait", transitions._Handle.wait))
    late_backward = tell("weight", late_gradients._Late.backward)
    monkeypatch.setattr(late_gradients._Late, "backward", staticmethod(late_backward))
    x, weights = (
        torch.randn(2, 3, requires_grad=True),
        [torch.randn(5, 3, requires_grad=True) for _ in range(2)],
    )
    with active_axes(PAPER):
        pending = all_gather(x, "tp", 0, 4, "reduce_scatter", async_op=True)
        late = [late_gradient(weight) for weight in weights]
        whole = wait(pending)
        sum(late_linear(whole, *pair) for pair in zip(weights, late, strict=True)).sum().backward()
    assert events == [
        "start all_gather",
        "wait",
        "start reduce_scatter",
        "weight",
        "weight",
        "wait",
    ]


def test_a_collective_is_waited_for_even_if_nobody_asks(monkeypatch):
    waited = []
    monkeypatch.setattr(
        primitives,
        "_c10d",
        type("c10d", (), {"wait_tensor": staticmethod(lambda x: waited.append(x) or x)}),
    )
    started = Started(torch.zeros(2), lambda x: x)
    del started
    assert len(waited) == 1, "recomputation may stop before the wait"
    assert Started(torch.zeros(2), lambda x: x).wait().shape == (2,) and len(waited) == 2
    started = Started(torch.zeros(2))
    started.wait()
    with pytest.raises(RuntimeError, match="once"):
        started.wait()


def test_recomputation_runs_both_ends_again():
    x, weight = (
        torch.randn(2, 3, dtype=torch.float64, requires_grad=True),
        torch.randn(4, 3, dtype=torch.float64, requires_grad=True),
    )

    def block(x, weight):
        pending = transitions.identity(x, "tp", async_op=True)
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
    function, arguments = transitions.make_transition(parse_layout(src), parse_layout(dst), shape)
    node = graph.call_function(function, (x, "tp"), arguments)
    node.meta |= {
        "whole": torch.empty(shape, device="meta"),
        "layouts": {},
        "transition": (src, dst),
    }
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
    assert (
        wait not in [node.target for node in overlap(graph).nodes]
        and "async_op" not in gathered.kwargs
    )


def _program(model: str, pin: dict[str, int]) -> Program:
    """Rank 0's program on four devices."""
    spec = parse_model(model)
    example = spec.example_inputs(4, 16)
    traced = trace(spec.build("meta"), example, None, "fp32")
    plan = make_plan(
        spec.build("meta"),
        free_network(4),
        example,
        4,
        pin,
        precision="fp32",
        traced=traced,
    )
    return assemble(traced, plan, 0, torch.device("cpu"))


@pytest.mark.parametrize(
    ("model", "pin"),
    every(
        2,
        [
            ("llama-tiny", {"tp": 4, "sequence_parallel": True}),
            ("gpt-tiny", {"tp": 4}),
            ("llama-tiny", {"cp": 2, "tp": 2}),
        ],
        unpacked=True,
    ),
)
def test_programs_start_before_they_wait_with_work_between(model, pin):
    program, late = _program(model, pin), 0
    for module in (program.module, *program.module.children()):
        order = list(module.graph.nodes)
        for node in order:
            if node.kwargs.get("async_op"):
                (waited,) = node.users
                between = order[order.index(node) + 1 : order.index(waited)]
                assert waited.target is wait and between, f"{node} hides behind nothing"
            elif (
                node.target in NODE_FUNCTIONS.values()
                and node.kwargs["backward"] in COLLECTIVE_PRIMITIVES
            ):
                linears = [
                    user
                    for user in node.users
                    if user.target is aten.linear.default and user.args[1].target is local_shard
                ]
                assert not linears, f"the gradient of {node} could hide behind that of a weight"
            late += node.target is late_linear
    assert late >= 3


# what random graphs are made of: (function, arguments after the value); the group has one rank, so that every transition keeps the value
_MOVES = [
    ("identity", {"backward": "all_reduce"}),
    ("all_reduce", {"backward": "identity"}),
    ("all_gather", {"dim": 0, "size": 4, "backward": "reduce_scatter"}),
    ("slice", {"dim": 1, "backward": "all_gather"}),
    ("all_to_all", {"src_dim": 0, "dst_dim": 1, "src_size": 4, "dst_size": 4}),
]
_OPS = [
    (aten.tanh.default,),
    (aten.sin.default,),
    (aten.transpose.int, 0, 1),
    (aten.reshape.default, [4, 4]),
    (aten.contiguous.default,),
]


def _random_graph(draw) -> tuple[torch.nn.Module, Graph]:
    """A graph of 4 x 4 values: transitions, linear layers, views and work in any order; maybe without any input."""
    graph, root = Graph(), torch.nn.Module()
    values, weights = [], []
    for i in range(draw(st.integers(0, 2))):
        values.append(graph.placeholder(f"x{i}"))
        values[-1].meta |= {"whole": torch.empty(4, 4, device="meta"), "layouts": {}}
    for name, shape in (("p_weight", (4, 4)), ("q_weight", (4, 4)), ("bias", (4,))):
        data = (
            torch.linspace(-1, 1, 4 ** len(shape), dtype=torch.float64).roll(len(name)).view(shape)
        )
        root.register_parameter(name, torch.nn.Parameter(data, requires_grad=draw(st.booleans())))
        read = graph.create_node("get_attr", name)
        weights.append(_call(graph, local_shard, read, {}))
        weights[-1].meta |= {"whole": torch.empty(shape, device="meta"), "layouts": {}}
    *weights, bias = weights
    values += weights
    for _ in range(draw(st.integers(2, 14))):
        x, kind = draw(st.sampled_from(values)), draw(st.integers(0, 3))
        if kind == 0:
            name, arguments = draw(st.sampled_from(_MOVES))
            node = graph.call_function(
                NODE_FUNCTIONS[name], (x, "tp"), dict(backward="all_to_all") | arguments
            )
            node.meta["transition"] = ("", "")
        elif kind == 1:
            weight, with_bias = draw(st.sampled_from(weights)), draw(st.booleans())
            node = _call(graph, aten.linear.default, x, weight, *([bias] if with_bias else []))
        elif kind == 2:
            node = _call(
                graph,
                aten.addmm.default,
                draw(st.sampled_from([bias, *values])),
                x,
                draw(st.sampled_from(values)),
            )
        else:
            target, *arguments = draw(st.sampled_from(_OPS))
            node = _call(graph, target, x, *arguments)
        node.meta |= {"whole": torch.empty(4, 4, device="meta"), "layouts": {}}
        values.append(node)
    graph.output(tuple(values[-3:]))
    graph.eliminate_dead_code()
    return root, graph


def _outcome(root: torch.nn.Module, graph: Graph) -> list[torch.Tensor | None]:
    """The results of a graph and the gradients of all its leaves."""
    module = GraphModule(root, graph)
    count = len(graph.find_nodes(op="placeholder"))
    inputs = [
        torch.linspace(-2, 1, 16, dtype=torch.float64).view(4, 4).roll(i, 1).requires_grad_(i == 0)
        for i in range(count)
    ]
    leaves = [t for t in (*inputs, *root.parameters()) if t.requires_grad]
    results = module(*inputs)
    loss = sum((r * r.detach().cos()).sum() for r in results)
    return [
        *results,
        *(torch.autograd.grad(loss, leaves, allow_unused=True) if loss.requires_grad else ()),
    ]


@given(st.data())
def test_any_graph_computes_the_same(data):
    root, graph = _random_graph(data.draw)
    copied = Graph()
    copied.output(copied.graph_copy(graph, {}))
    with active_axes({axis: AxisGroup(axis, 1) for axis in AXES}):
        expected = _outcome(root, copied)
        for one, other in zip(_outcome(root, overlap(graph)), expected, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_block_without_inputs_is_legal():
    graph = Graph()
    weight = _call(graph, local_shard, graph.create_node("get_attr", "weight"), {})
    moved = _transition(graph, weight, "S(0)", "R", (4, 4))
    graph.output(
        _call(
            graph,
            aten.mm.default,
            _call(graph, aten.sin.default, _call(graph, aten.ones.default, [4, 4])),
            moved,
        )
    )
    assert [node.target for node in overlap(graph).nodes][:3] == ["weight", local_shard, all_gather]


def test_autocast_keeps_its_casts():
    x, weight = torch.randn(3, 4), torch.randn(2, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = late_linear(x, weight, late_gradient(weight))
        expected = torch.nn.functional.linear(x, weight)
    assert found.dtype == torch.bfloat16 and torch.equal(found, expected)
    found.sum().backward()
    assert weight.grad is not None and weight.grad.dtype == torch.float32


@pytest.mark.slow
@pytest.mark.parametrize(
    "pin", [{"tp": 4}, pytest.param({"cp": 2, "tp": 2}, marks=pytest.mark.slow)], ids=str
)
def test_a_program_compiles_whole(pin):
    program = _program("gpt-tiny", pin)
    generator = torch.Generator().manual_seed(0)
    with active_axes(simulated_axes(program.mesh, 0)):
        for stored in program.parameters:
            shard = shard_of(
                torch.randn(stored.spec.shape, generator=generator), stored.layouts, program.mesh, 0
            )
            holder = getattr(program.module, stored.module)
            (holder._buffers if stored.spec.buffer else holder._parameters)[stored.attribute] = (
                shard if stored.spec.buffer else torch.nn.Parameter(shard)
            )
        rows = 4 // program.mesh.dp
        inputs = [
            torch.zeros((rows, *value.shape[1:]), dtype=value.dtype)
            for value in program.whole_inputs.values()
        ]
        arguments = [*inputs, *([torch.tensor(5.0)] if program.step_values is not None else [])]
        leaves = list(program.module.parameters())
        expected = torch.autograd.grad(program.module(*arguments), leaves, allow_unused=True)
        compiled = torch.compile(program.module, fullgraph=True, backend="aot_eager")
        found = torch.autograd.grad(compiled(*arguments), leaves, allow_unused=True)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other)
