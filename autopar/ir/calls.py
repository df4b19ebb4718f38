"""Access to the arguments of op calls in a graph by their schema names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import Node


def called_function(node: Node) -> Callable[..., Any]:
    """The function that a node calls, which is its target. Raises TypeError if the target is a
    name, as in inputs, outputs and attributes.
    """
    if isinstance(node.target, str):
        raise TypeError(f"{node.name} ({node.op}) calls no function: its target is {node.target!r}")
    return node.target


def arguments(node: Node) -> tuple[Any, ...]:
    """The positional arguments of a call, without types: for code that looks at what they are."""
    return node.args


def argument(node: Node, name: str, default: Any = None) -> Any:
    """The argument of a call by its schema name, passed by position or keyword.

    If it is not passed: the schema's default, or `default` where the schema has none. Also
    `default` if the op has no argument of that name. Raises TypeError if the node calls no op with
    a schema.
    """
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        raise TypeError(f"{node.name} calls {node.target}, which is no op with a schema")
    for i, spec in enumerate(schema.arguments):
        if spec.name == name:
            if i < len(node.args):
                return node.args[i]
            if name in node.kwargs:
                return node.kwargs[name]
            return spec.default_value if spec.has_default_value() else default
    return default


def argument_names(node: Node) -> list[str]:
    """All argument names in the schema of the op that a node calls, in order. [] if it calls no op
    with a schema.
    """
    schema = getattr(node.target, "_schema", None)
    return [] if schema is None else [spec.name for spec in schema.arguments]


def sparse_argument(node: Node) -> tuple[str, bool]:
    """(name, value) of the argument `sparse` or `sparse_grad`, by which a look-up such as embedding
    requests a sparse gradient of its table. ('', False) if the op has none.
    """
    names = [name for name in argument_names(node) if name in ("sparse", "sparse_grad")]
    return (names[0], bool(argument(node, names[0]))) if names else ("", False)


def op_name(node: Node) -> str:
    """The schema name of the op that a node calls, such as 'aten::gelu', without the overload. ''
    if it calls no op with a schema.
    """
    return getattr(getattr(node.target, "_schema", None), "name", "")


def is_attention(node: Node) -> bool:
    """Whether a node calls scaled_dot_product_attention, the attention op that rules and lowerings
    support.
    """
    return op_name(node) == "aten::scaled_dot_product_attention"
