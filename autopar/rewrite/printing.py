"""A program as readable Python text: the output of `print(engine.program.code)`.

The text is valid Python with the names from its imports. The GraphModule itself is what runs. The
text differs from torch.fx's generated code. Functions have short names, sharded parameters are read
where they are used, values are not deleted, and a comment says how each collective changes the
layout.
"""

from __future__ import annotations

import inspect
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import isfinite

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import Argument

from autopar.rewrite.root import segments_of
from autopar.rewrite.shard import local_shard

_OPERATORS: dict[object, str] = {operator.add: "+", operator.sub: "-", operator.mul: "*", operator.floordiv: "//", operator.truediv: "/",
              operator.mod: "%", operator.pow: "**"}  # fmt: skip


_OWN_NAMES = ("torch", "aten", "self", "slice", "float")
"""Names that the text uses besides imported ones."""

_PROGRAM = "program"


def program_text(module: GraphModule) -> str:
    """The Python text of a program. It has the imports, the root program, and each distinct block
    once, with the names of the segments that share it.
    """
    graphs = {name: segment.graph for name, segment in segments_of(module).items()}
    functions = _function_names([module.graph, *graphs.values()])
    blocks: dict[str, list[str]] = {}
    for name, graph in graphs.items():
        blocks.setdefault(_function(graph, functions, "{name}"), []).append(name)
    taken = {*_OWN_NAMES, _PROGRAM, *functions.values()}
    parts = [_function(module.graph, functions, _PROGRAM)]
    for body, names in blocks.items():
        shared = ": one structure, each with weights of its own" if len(names) > 1 else ""
        parts.append(
            f"# {', '.join(names)}{shared}\n{body.replace('def {name}(', f'def {_unused(names[0], taken)}(')}"
        )
    head = "\n".join(["import torch", *_imports(functions), "", "aten = torch.ops.aten"])
    return "\n\n\n".join([head, *parts]) + "\n"


def _function_names(graphs: Iterable[Graph]) -> dict[Callable, str]:
    """By function that the text imports, its name there: its own, with a number if another function
    has the same name. ATen ops, operators and reads of parameters are left out.
    """
    called = {node.target for graph in graphs for node in graph.nodes if node.op == "call_function"}
    called -= {*_OPERATORS, operator.getitem, local_shard}
    imported = [f for f in called if not isinstance(f, torch._ops.OpOverload)]
    taken = {*_OWN_NAMES, _PROGRAM}
    ordered = sorted(imported, key=lambda f: (_origin(f), f.__name__))
    return {f: _unused(f.__name__, taken) for f in ordered}


def _origin(function: Callable) -> str:
    module = inspect.getmodule(function)
    return module.__name__ if module else function.__module__


def _imports(functions: Mapping[Callable, str]) -> Iterator[str]:
    """Yields the import lines of the functions, one per module, sorted by module. `functions` maps
    each to its name in the text.
    """
    for origin in sorted({_origin(f) for f in functions}):
        found = ((f.__name__, name) for f, name in functions.items() if _origin(f) == origin)
        yield f"from {origin} import {', '.join(own if own == name else f'{own} as {name}' for own, name in sorted(found))}"


def _unused(name: str, taken: set[str]) -> str:
    """`name`, or `name_1`, `name_2`, ... if it is taken. Adds the result to `taken`."""
    numbered = (f"{name}_{k}" for k in itertools.count(1))
    found = next(n for n in itertools.chain([name], numbered) if n not in taken)
    taken.add(found)
    return found


def _value_names(graph: Graph, functions: Mapping[Callable, str]) -> dict[Node, str]:
    """By node of a graph, the name of its value in the text: the node's own, with a number if the
    text uses that name for something else. `functions` has the names of imported functions.
    """
    reserved = {*_OWN_NAMES, *functions.values()}
    taken = reserved | {node.name for node in graph.nodes}
    return {
        node: _unused(node.name, taken) if node.name in reserved else node.name
        for node in graph.nodes
    }


def _function(graph: Graph, functions: Mapping[Callable, str], name: str) -> str:
    """The text of one graph as a function `name` of `self`, which holds its parameters or segments,
    and the graph's inputs.
    """
    texts = _value_names(graph, functions)
    lines, inputs = [], ["self"]
    for node in graph.nodes:
        if node.op == "placeholder":
            inputs.append(texts[node])
        elif node.op == "get_attr":
            texts[node] = f"self.{node.target}"
        elif node.op == "output":
            lines.append(f"return {_text(node.args[0], texts)}")
        elif node.target is local_shard:
            texts[node] = _text(node.args[0], texts)  # the engine's parameters are shards already
        elif node.op == "call_module":
            arguments = ", ".join(_text(a, texts) for a in node.args)
            lines.append(f"{texts[node]} = self.{node.target}({arguments})")
        elif node.target is operator.getitem:
            texts[node] = f"{_text(node.args[0], texts)}[{_text(node.args[1], texts)}]"
        else:
            change = node.meta.get("transition")
            comment = f"  # {node.args[1]}: {change[0]} -> {change[1]}" if change else ""
            lines.append(f"{texts[node]} = {_call(node, texts, functions)}{comment}")
    return f"def {name}({', '.join(inputs)}):\n" + "\n".join(f"    {line}" for line in lines)


def _call(node: Node, texts: Mapping[Node, str], functions: Mapping[Callable, str]) -> str:
    if node.target in _OPERATORS:
        return f" {_OPERATORS[node.target]} ".join(_text(a, texts) for a in node.args)
    arguments = [_text(a, texts) for a in node.args] + [
        f"{key}={_text(value, texts)}" for key, value in node.kwargs.items()
    ]
    return f"{_name(node.target, functions)}({', '.join(arguments)})"


def _name(target: Callable | str, functions: Mapping[Callable, str]) -> str:
    """The name of a function in the text: `aten.linear`, `torch.ops.autopar.routed_experts`, or an
    imported name.
    """
    if isinstance(target, torch._ops.OpOverload):
        space, _, name = target._schema.name.partition("::")
        return f"aten.{name}" if space == "aten" else f"torch.ops.{space}.{name}"
    return target if isinstance(target, str) else functions[target]


def _text(value: Argument, texts: Mapping[Node, str]) -> str:
    if isinstance(value, Node):
        return texts[value]
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
    if isinstance(value, float) and not isfinite(value):
        return f"float('{value}')"
    return repr(value)
