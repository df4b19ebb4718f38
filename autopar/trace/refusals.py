"""Why a model cannot be captured, in the words of its user."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from autopar.errors import AutoparError
from autopar.trace.captured import Captured
from autopar.trace.user_lines import line_of_error, line_of_node

_BATCH_IS_A_NUMBER = "your code specialized it to be a constant"
_CONSTANT_CHANGED = "is mutated in the forward method"


def why_not_captured(error: Exception, model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> str:
    """The user's mistake in one paragraph: what is wrong, in which line, and the remedy."""
    name, reason = type(model).__name__, " ".join(str(error).strip().splitlines()[:3])[:600].rstrip(". ")
    where, kind = line_of_error(error), type(error).__name__
    if _BATCH_IS_A_NUMBER in str(error):
        return (
            f"forward of {name} uses the batch size as a Python number, so that it would compute for one batch size alone; use x.shape[0] "
            "instead of int(x.shape[0]) or len(x), and ops on whole tensors instead of loops over rows"
        )
    if _CONSTANT_CHANGED in reason:
        tensor = reason.removeprefix("Constant ").split()[0].removeprefix("model.")
        return (
            f"forward of {name} changes tensor {tensor!r} in place, which is a plain attribute: register it with "
            f"self.register_buffer({tensor.rpartition('.')[2]!r}, ...), so that autopar keeps what it becomes"
        )
    if "doesn't match mode" in reason:
        return (
            f"forward of {name} changes a buffer in place that it reads from a tuple or from an object, not as an attribute of its module; "
            "read it as self.name, or from a list"
        )
    if kind in ("GuardOnDataDependentSymNode", "UserError", "DataDependentOutputException"):
        return (
            f"forward of {name} branches on the values of a tensor{where}: which ops run would depend on data "
            f"({reason.partition(').')[0]}). Choose between tensors with torch.where, or decide outside of forward"
        )
    if "numpy" in reason or kind in ("Unsupported", "UnsupportedOperatorException"):
        return f"forward of {name} leaves PyTorch{where}, where its graph breaks: {reason}. Use torch ops only"
    if kind == "TypeError" and "forward()" in reason:
        return f"example_inputs ({', '.join(tensors)}) are not the arguments of forward of {name}: {reason}"
    shapes = ", ".join(f"{key} ({shape_text(value)}) {value.dtype}" for key, value in tensors.items())
    return f"forward of {name} fails on example_inputs ({shapes}){where}: {kind}: {reason}. Check shapes and dtypes; does it run eagerly?"


def shape_text(tensor: torch.Tensor) -> str:
    """The shape for a message; sizes that follow the batch are called so."""
    sizes = ("batch" if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol else str(size) for size in tensor.shape)
    return ", ".join(sizes)


def check_values(captured: Captured) -> None:
    """Raise AutoparError if a tensor is complex, or a number is read out of a tensor."""
    for node in captured.graph.nodes:
        val = node.meta.get("val")
        name = captured.attributes.get(node.name, node.name)
        for tensor in val if isinstance(val, (list, tuple)) else (val,):
            if isinstance(tensor, torch.Tensor) and tensor.is_complex():
                raise AutoparError(
                    f"{name} is complex ({tensor.dtype}, shape ({shape_text(tensor)})), which autopar cannot distribute: keep real and "
                    "imaginary parts in real tensors (rotary embeddings: multiply by cos and sin)"
                )
        if node.target in (torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default):
            raise AutoparError(
                f"forward reads a number out of {node.args[0]}{line_of_node(node)}: every rank would read its own; keep it a tensor"
            )


def check_symbols(captured: Captured) -> None:
    """Raise AutoparError unless every size that is not a number follows the one batch."""
    placeholders = {n.name: n for n in captured.graph.nodes if n.op == "placeholder"}
    batch: dict[str, str] = {}
    for name, node_name in zip(captured.inputs, captured.input_nodes, strict=True):
        node = placeholders[node_name]
        size = node.meta["val"].shape[0] if node.users and node.meta["val"].dim() else 0
        if isinstance(size, torch.SymInt):
            batch.setdefault(str(size), name)
    if len(batch) > 1:
        names = list(batch.values())
        raise AutoparError(
            f"inputs {names[0]!r} and {names[1]!r} both have the batch size in dim 0, but forward never relates the two: if one is "
            "not batched, plan with an example batch whose size differs from that dim"
        )
    for node in captured.graph.nodes:
        val = node.meta.get("val")
        for tensor in val if isinstance(val, (list, tuple)) else (val,):
            if node.op != "placeholder" and isinstance(tensor, torch.Tensor) and _unknown_sizes(tensor, set(batch)):
                raise AutoparError(
                    f"{node.name}{line_of_node(node)} has a shape that depends on data ({shape_text(tensor)}), as boolean indexing, "
                    "nonzero and unique give: use arithmetic with a mask instead, for example (loss * mask).sum() / mask.sum()"
                )
    lost = [name for name, tensor in captured.constants.items() if tensor.is_meta]
    if lost:
        raise AutoparError(f"forward uses tensor {lost[0]!r}, which is on the meta device and has no values; register it as a buffer")


def _unknown_sizes(tensor: torch.Tensor, batch: set[str]) -> bool:
    return any({str(s) for s in size.node.expr.free_symbols} - batch for size in tensor.shape if isinstance(size, torch.SymInt))
