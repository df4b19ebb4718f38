"""`Program.code` is Python that a person can read, over names that it imports."""

from __future__ import annotations

import ast
import builtins
import operator
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.fx import Graph, GraphModule, Node

from autopar.api import plan, trace
from autopar.models import parse_model
from autopar.rewrite.collectives import transitions
from autopar.rewrite.collectives.axes import AxisGroup, active_axes
from autopar.rewrite.printing import program_text
from autopar.rewrite.program import assemble
from autopar.verify.verify import free_network


def executed(code: str) -> dict:
    scope = {}
    exec(compile(code, "program", "exec"), scope)
    return scope


def assert_names(code: str, scope: dict) -> None:
    """Every name is defined, and none means two things: no value hides what its function reads, no definition another."""
    tree = ast.parse(code)
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    imported = [
        a.asname or a.name
        for node in tree.body
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for a in node.names
    ]
    defined = [*imported, *(node.name for node in functions), "aten"]
    assert len(set(defined)) == len(defined)
    for function in functions:
        names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
        own = [a.arg for a in function.args.args] + [
            n.id for n in names if isinstance(n.ctx, ast.Store)
        ]
        assert len(set(own)) == len(own) and not set(own) & {*imported, "aten", "float", "slice"}
        assert {n.id for n in names} <= {*own, *scope, *dir(builtins)}


def other_pad(x):
    return x + 3


def named(graph: Graph, node: Node, name: str) -> Node:
    """The node under a name that torch.fx would not give it."""
    node.name = name
    return node


@pytest.mark.parametrize(("where", "name"), [
    (where, name)
    for where in ("input", "value", "segment", "function")
    for name in ("pad", "pad_1", "all_gather", "aten", "torch", "self", "slice", "float", "program")
    if where != "segment" or not hasattr(torch.nn.Module, name)
])  # fmt: skip
def test_no_value_hides_what_the_text_uses(monkeypatch, name, where):
    """A value, an input, a segment or a function of the same name; and what is printed computes what the program computes."""
    child, graph = Graph(), Graph()
    x = named(child, child.placeholder("x"), name if where == "input" else "x")
    y = child.call_function(transitions.pad, (x, "tp"), {"dim": 0, "size": 3})
    y = named(
        child,
        child.call_function(torch.ops.aten.clamp.default, (y, -float("inf"), 5.0)),
        name if where == "value" else "y",
    )
    z = child.call_function(
        other_pad, (child.call_function(transitions.all_gather, (y, "tp"), {"dim": 0, "size": 3}),)
    )
    z = child.call_function(
        operator.getitem, (child.call_function(torch.ops.aten.neg.default, (z,)), slice(0, 2))
    )
    child.output(
        (
            child.call_function(
                operator.add, (z, child.call_function(torch.ops.aten.sum.default, (y,)))
            ),
        )
    )
    monkeypatch.setattr(other_pad, "__name__", name if where == "function" else "pad")
    monkeypatch.setattr(other_pad, "__module__", "others")
    monkeypatch.setitem(
        sys.modules,
        "others",
        SimpleNamespace(__name__="others", __file__="", **{other_pad.__name__: other_pad}),
    )
    segment, modules = name if where == "segment" else "layer", torch.nn.Module()
    modules.add_module(segment, GraphModule(torch.nn.Module(), child))
    called = graph.call_module(segment, (graph.placeholder("x"),))
    graph.output(graph.call_function(operator.getitem, (called, 0)))
    module = GraphModule(modules, graph)

    code = program_text(module)
    scope = executed(code)
    assert_names(code, scope)
    (block,) = (
        node.name
        for node in ast.parse(code).body
        if isinstance(node, ast.FunctionDef) and node.name != "program"
    )
    x = torch.tensor([1.0, -2.0, 7.0])
    with active_axes({"tp": AxisGroup("tp", 1)}):
        expected = z_of(x)
        torch.testing.assert_close(scope["program"](module, x), expected)
        torch.testing.assert_close(scope[block](getattr(module, segment), x)[0], expected)


def z_of(x: torch.Tensor) -> torch.Tensor:
    y = x.clamp(max=5.0)
    return -(y + 3)[:2] + y.sum()


def test_code_is_python_over_known_names():
    spec = parse_model("llama-tiny").shrunk()
    inputs = spec.example_inputs(8, 16, "cpu")
    model = spec.build("cpu")
    traced = trace(model, inputs)
    chosen = plan(model, free_network(4), inputs, 8, {"cp": 2, "tp": 2}, traced=traced)
    code = assemble(traced, chosen, 0, torch.device("cpu")).code
    scope = executed(code)
    assert_names(code, scope)
    assert "def program(self, input_ids, labels, label_count):" in code
    assert "# layers_0, layers_1: one structure" in code and "def layers_1" not in code
    assert "self.attention_norm_weight" in code and "# tp: " in code
    for noise in (" = None", "torch.ops.aten.linear", "autopar_rewrite", "local_shard", ".default"):
        assert noise not in code
