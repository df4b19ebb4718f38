"""Compares captured graphs: whether two compute the same."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from autopar.trace.captured import Captured
from autopar.trace.normalize import changes_nothing

_MOST_ELEMENTS = 2**26
"""Constant parts of a graph with larger results than this many elements are not evaluated."""


class GraphKeys:
    """Keys (hashes) of a captured graph's values. Equal keys mean that the same is computed, also
    in another graph. Values that depend only on constants are evaluated and compared by content.
    """

    def __init__(self, captured: Captured, made: Mapping[int, str] | None = None) -> None:
        """`made` has the keys of constants that stand for values of another graph, by the address
        of their storage.
        """
        self._captured, self._made = captured, made or {}
        self._inputs = dict(zip(captured.input_nodes, captured.inputs, strict=True))
        self._values: dict[Node, torch.Tensor] = {}
        self._keys: dict[Node, str] = {}
        self._lasting: set[Node] = set()
        for node in captured.graph.nodes:
            if node.op != "output":
                self._visit(node)

    def outputs(self) -> list[str]:
        """The keys of the graph's results, in order."""
        return [
            self._keys[node] if isinstance(node, Node) else repr(node)
            for node in pytree.tree_leaves(self._captured.graph.output_node().args)
        ]

    def value(self, node: Any) -> torch.Tensor | None:
        """The tensor that a node computes from constants alone. None for any other node. Also None
        if it is random, or is a result of more than `_MOST_ELEMENTS` elements.
        """
        return self._values.get(node) if isinstance(node, Node) else None

    def lasting(self, node: Any) -> str | None:
        """The key of a node whose value no step of training changes: it is computed without inputs,
        trained parameters, buffers that forward changes, and random draws. None for other nodes.
        """
        return self._keys[node] if node in self._lasting else None

    def _visit(self, node: Node) -> None:
        if self._lasts(node):
            self._lasting.add(node)
        key = self._known_key(node)
        if key is not None:
            self._keys[node] = key
            return
        value = self._constant(node)
        if isinstance(value, torch.Tensor):
            self._values[node] = value
            text = f"{tuple(value.shape)} {value.dtype} {hashlib.sha256(_bytes(value)).hexdigest()}"
        elif node.op == "placeholder":
            attribute = self._captured.attributes.get(node.name)
            text = (
                f"input {self._inputs.get(node.name)}"
                if attribute is None
                else self._own(attribute)
            )
        else:
            arguments = pytree.tree_map(
                lambda arg: self._keys[arg] if isinstance(arg, Node) else _plain(arg),
                (node.args, node.kwargs),
            )
            text = f"{node.op} {node.target} {arguments}"
        self._keys[node] = hashlib.sha256(text.encode()).hexdigest()

    def _known_key(self, node: Node) -> str | None:
        """The key of a constant that stands for a value of another graph, and of a node that only
        passes its operand on. None for other nodes.
        """
        if node.op == "placeholder":
            constant = self._captured.constants.get(self._captured.attributes.get(node.name, ""))
            return None if constant is None else self._made.get(storage_address(constant))
        return self._keys[node.all_input_nodes[0]] if changes_nothing(node) else None

    def _lasts(self, node: Node) -> bool:
        name = self._captured.attributes.get(node.name)
        if node.op == "placeholder" and name is not None:
            spec = self._captured.parameters.get(name)
            return spec is None or not (spec.trainable or name in self._captured.updates)
        drawn = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        plain = node.op == "call_function" and not drawn
        return plain and all(source in self._lasting for source in node.all_input_nodes)

    def _own(self, name: str) -> str:
        unknown = id(self._captured.constants[name]) if name in self._captured.constants else ""
        return f"attribute {name} {unknown}"

    def _constant(self, node: Node) -> torch.Tensor | None:
        """The tensor that a node computes from constants alone, evaluated now. None for other
        nodes, and for results that are large, random, or of unknown shape.
        """
        if node.op == "placeholder":
            value = self._captured.constants.get(self._captured.attributes.get(node.name, ""))
            return (
                None
                if value is None
                or isinstance(value, FakeTensor)
                or value.is_meta
                or value.layout != torch.strided
                else value
            )
        if (
            node.op != "call_function"
            or not isinstance(node.target, torch._ops.OpOverload)
            or node.target._schema.is_mutable
        ):
            return None
        if torch.Tag.nondeterministic_seeded in node.target.tags or any(
            source not in self._values for source in node.all_input_nodes
        ):
            return None
        val = node.meta.get("val")
        if (
            not isinstance(val, torch.Tensor)
            or any(not isinstance(size, int) for size in val.shape)
            or val.numel() > _MOST_ELEMENTS
        ):
            return None
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), self._values.__getitem__)
        if any(isinstance(arg, torch.SymInt) for arg in pytree.tree_leaves((args, kwargs))):
            return None
        with torch.no_grad():
            return node.target(*args, **kwargs)


def storage_address(tensor: torch.Tensor) -> int:
    """The address of a tensor's storage; 0 for a sparse tensor, which has none."""
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else 0


def _plain(arg: Any) -> str:
    return (
        str(arg.node.expr)
        if isinstance(arg, (torch.SymInt, torch.SymFloat, torch.SymBool))
        else repr(arg)
    )


def _bytes(tensor: torch.Tensor) -> bytes:
    return (
        tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        if tensor.numel()
        else b""
    )
