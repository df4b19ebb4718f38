"""A program as text that a person might have written: what `print(engine.program.code)` shows.

The text is valid Python over the names that its imports bring in; what runs is the GraphModule itself.  Against the code that torch.fx
generates, functions go by their short names, sharded parameters are read where they are used, values are not deleted, and a comment says
what each collective does to the layout.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Mapping

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import Argument

from autopar.rewrite.shard import local_shard

_OPERATORS = {operator.add: "+", operator.sub: "-", operator.mul: "*", operator.floordiv: "//", operator.truediv: "/",
              operator.mod: "%", operator.pow: "**"}  # fmt: skip


def program_text(module: GraphModule) -> str:
    """The imports, the root program, and each distinct block once, with the names of the segments that share it."""
    blocks: dict[str, list[str]] = {}
    imports: dict[str, set[str]] = {}
    for name, child in module.named_children():
        child = getattr(child, "body", child)  # a recomputed segment wraps its graph
        blocks.setdefault(_function(child.graph, imports, "{name}"), []).append(name)
    parts = [_function(module.graph, imports, "program")]
    for body, names in blocks.items():
        shared = f"# {names[0]}" if len(names) == 1 else f"# {', '.join(names)}: one structure, each with weights of its own"
        parts.append(f"{shared}\n{body.replace('def {name}(', f'def {names[0]}(')}")
    lines = ["import torch", *(f"from {origin} import {', '.join(sorted(found))}" for origin, found in sorted(imports.items()))]
    return "\n".join([*lines, "", "aten = torch.ops.aten"]) + "\n\n\n" + "\n\n\n".join(parts) + "\n"


def _function(graph: Graph, imports: dict[str, set[str]], name: str) -> str:
    """One graph as a function of `self`, which holds its parameters or segments."""
    texts: dict[Node, str] = {}
    lines, inputs = [], ["self"]
    for node in graph.nodes:
        if node.op == "placeholder":
            inputs.append(node.name)
        elif node.op == "get_attr":
            texts[node] = f"self.{node.target}"
        elif node.op == "output":
            lines.append(f"return {_text(node.args[0], texts)}")
        elif node.target is local_shard:
            texts[node] = _text(node.args[0], texts)  # the engine's parameters are shards already
        elif node.op == "call_module":
            lines.append(f"{node.name} = self.{node.target}({', '.join(_text(a, texts) for a in node.args)})")
        elif node.target is operator.getitem:
            texts[node] = f"{_text(node.args[0], texts)}[{_text(node.args[1], texts)}]"
        else:
            change = node.meta.get("transition")
            comment = f"  # {node.args[1]}: {change[0]} -> {change[1]}" if change else ""
            lines.append(f"{node.name} = {_call(node, texts, imports)}{comment}")
    return f"def {name}({', '.join(inputs)}):\n" + "\n".join(f"    {line}" for line in lines)


def _call(node: Node, texts: Mapping[Node, str], imports: dict[str, set[str]]) -> str:
    if node.target in _OPERATORS:
        return f" {_OPERATORS[node.target]} ".join(_text(a, texts) for a in node.args)
    arguments = [_text(a, texts) for a in node.args] + [f"{key}={_text(value, texts)}" for key, value in node.kwargs.items()]
    return f"{_name(node.target, imports)}({', '.join(arguments)})"


def _name(target: object, imports: dict[str, set[str]]) -> str:
    """How the text calls a function: `aten.linear`, `torch.ops.autopar.routed_experts`, or a name that it imports."""
    if isinstance(target, torch._ops.OpOverload):
        space, _, name = target._schema.name.partition("::")
        return f"aten.{name}" if space == "aten" else f"torch.ops.{space}.{name}"
    module = inspect.getmodule(target)
    imports.setdefault(module.__name__ if module else target.__module__, set()).add(target.__name__)
    return target.__name__


def _text(value: Argument, texts: Mapping[Node, str]) -> str:
    if isinstance(value, Node):
        return texts.get(value, value.name)
    if isinstance(value, tuple):
        return f"({', '.join(_text(v, texts) for v in value)}{',' if len(value) == 1 else ''})"
    if isinstance(value, list):
        return f"[{', '.join(_text(v, texts) for v in value)}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_text(v, texts)}" for key, v in value.items()) + "}"
    if isinstance(value, slice):
        return f"slice({_text(value.start, texts)}, {_text(value.stop, texts)}, {_text(value.step, texts)})"
    if isinstance(value, torch.device):
        return repr(str(value))
    return f"float('{value}')" if isinstance(value, float) and not abs(value) < float("inf") else repr(value)
