"""Errors for models that cannot be captured, in the user's terms."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod

import torch
from torch import nn

from autopar.errors import AutoparError
from autopar.ops.values import output_nodes
from autopar.trace.captured import Captured
from autopar.trace.copying import held_objects
from autopar.trace.distributed_calls import OPS
from autopar.trace.edit import is_op
from autopar.trace.row_facts import ancestors
from autopar.trace.user_lines import line_of_error, line_of_node

_BATCH_IS_A_NUMBER = "your code specialized it to be a constant"
_CONSTANT_CHANGED = "is mutated in the forward method"
_FIXED = re.compile(r"\['([^']+)'\]\.size\(\)\[0\] as dynamic")


def why_not_captured(
    error: Exception, model: nn.Module, tensors: Mapping[str, torch.Tensor]
) -> str:
    """The text of an error about a failed capture: what the user's forward does, in which line, and
    the remedy. `error` is what torch.export raised; `tensors` are the inputs.
    """
    name, reason = type(model).__name__, _reason(error)
    where, kind = line_of_error(error), type(error).__name__
    if _BATCH_IS_A_NUMBER in str(error):
        fixed = sorted(set(_FIXED.findall(str(error))))
        return (
            f"forward of {name} uses the batch size, the rows of {' and '.join(map(repr, fixed))}, as a Python number, so that it would "
            "compute for one batch size alone; use x.shape[0] instead of int(x.shape[0]), and ops on whole tensors instead of loops "
            f"over rows{other_rows({name: tensors[name] for name in fixed})}"
        )
    if "device meta is not on the expected device" in reason:
        return (
            f"forward of {name} reads a tensor{where} that is on the meta device and has no values; register it as a buffer "
            "(self.register_buffer), which weights= fills, or make it in forward"
        )
    if changed := _change_not_followed(name, reason, where, model):
        return changed
    if "Constraints violated" in str(error):
        return (
            f"forward of {name} would compute for some batch sizes alone{where}: {_guard(error)}. Write it for any number of rows: sizes "
            "that follow from x.shape[0], and -1 in reshape"
        )
    if kind in ("GuardOnDataDependentSymNode", "DataDependentOutputException") or (
        kind == "UserError" and "data-dependent" in str(error)
    ):
        return (
            f"forward of {name} branches on the values of a tensor{where}: which ops run would depend on data "
            f"({reason.partition(').')[0]}). Choose between tensors with torch.where, or decide outside of forward"
        )
    if kind == "UncapturedHigherOrderOpError":
        return (
            f"forward of {name} calls an op that runs a graph of its own{where}, as torch.cond and torch.while_loop do, which autopar "
            "cannot shard: use plain PyTorch there, as torch.where in the place of torch.cond"
        )
    if "register_fake" in reason:
        return f"forward of {name} calls an op{where} of which torch does not know the result's shape: {reason}"
    if "numpy" in reason or kind in ("Unsupported", "UnsupportedOperatorException"):
        return f"forward of {name} leaves PyTorch{where}, where its graph breaks: {reason}. Use torch ops only"
    if kind == "TypeError" and "forward()" in reason:
        return f"example_inputs ({', '.join(tensors)}) are not the arguments of forward of {name}: {reason}"
    shapes = ", ".join(
        f"{key} ({shape_text(value)}) {value.dtype}" for key, value in tensors.items()
    )
    return f"forward of {name} fails on example_inputs ({shapes}){where}: {kind}: {reason}. Check shapes and dtypes; does it run eagerly?"


def _change_not_followed(name: str, reason: str, where: str, model: nn.Module) -> str:
    """The text about a change of a tensor or module that torch.export cannot follow; '' for another
    error. `where` is the user's line.
    """
    if _CONSTANT_CHANGED in reason:
        return _changed_constant(name, reason, model)
    if "data pointer" in reason and "deepcopy" in where:
        return (
            f"forward of {name} copies a module{where}, which torch.export cannot follow: call it by torch.func.functional_call with "
            "detached parameters, or keep a second module that forward changes"
        )
    if "Cannot swap" in reason:
        return (
            f"forward of {name} calls swap_tensors{where}, which torch.export cannot follow: assign buffers (self.a, self.b = self.b, "
            "self.a), and leave parameters as they are"
        )
    if "doesn't match mode" in reason:
        return (
            f"forward of {name} changes a buffer in place that it reads from a tuple or an object, not as an attribute of its module; "
            "read it as self.name, or from a list"
        )
    return ""


def other_rows(inputs: Mapping[str, torch.Tensor]) -> str:
    """Words that say how to name an input without rows, for the end of a message. `inputs` are those
    whose dim 0 is read as rows; the example is the smallest. '' if there is one alone, which has them.
    """
    if len(inputs) < 2:
        return ""
    *names, last = sorted(inputs, key=lambda name: prod(inputs[name].shape[1:]), reverse=True)
    return (
        f". If {', '.join(map(repr, names))} or {last!r} has no rows, or has them along another dim, say so by its name, as "
        f"batch_dims={{{last!r}: None}}"
    )


def own_generator(where: str) -> AutoparError:
    """The error for random numbers that forward draws from a torch.Generator of the user. `where`
    names the line.
    """
    return AutoparError(
        f"forward draws from a torch.Generator of its own{where}, whose numbers depend on how the batch is cut. Draw them outside of "
        "forward, for the whole batch, and pass them in as an input; or draw without generator=, then parallelize(seed=) seeds them. "
        "Numbers that are the same in every step belong into a buffer, made in __init__"
    )


def _changed_constant(name: str, reason: str, model: nn.Module) -> str:
    """The text of an error about a tensor that forward of a model called `name` changes in place and
    that is no buffer. `reason` is what torch says.
    """
    tensor = reason.removeprefix("Constant ").split()[0].removeprefix("model.")
    if tensor.startswith("lifted_tensor"):
        kept = [path for path, value in held_objects(model) if isinstance(value, torch.Tensor)]
        which = f" ({' or '.join(map(repr, kept[:3]))})" if kept else ""
        return (
            f"forward of {name} changes a tensor in place that is no attribute of a module{which}, but in a list, an object or a "
            "variable: register it with self.register_buffer(name, ...) and read it as self.name, so that autopar keeps what it becomes"
        )
    return (
        f"forward of {name} changes tensor {tensor!r} in place, which is a plain attribute: register it with "
        f"self.register_buffer({tensor.rpartition('.')[2]!r}, ...), so that autopar keeps what it becomes"
    )


def _guard(error: Exception) -> str:
    """What torch's message says about a batch size, without its heading and its advice."""
    lines = [line.strip(" -") for line in str(error).splitlines() if line.startswith("  - ")]
    return " ".join(lines[:1] or [_reason(error)])[:300].rstrip(". ")


def _reason(error: Exception) -> str:
    """The first three lines of an error's message as one line of at most 400 characters, without
    what torch.export appends.
    """
    text = str(error).strip().partition("The error above occurred when calling torch.export")[0]
    return " ".join(" ".join(text.splitlines()[:3]).split())[:400].rstrip(". ")


def shape_text(tensor: torch.Tensor) -> str:
    """A tensor's sizes for a message, such as 'batch, 3, 4'; the batch size is written `batch`."""
    sizes = (
        "batch" if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol else str(size)
        for size in tensor.shape
    )
    return ", ".join(sizes)


def check_values(captured: Captured) -> None:
    """Raise AutoparError if a trained parameter or an input is complex, or if the graph reads a
    number out of a tensor.
    """
    fixed = {
        name
        for name in captured.attributes
        if not getattr(captured.parameters.get(captured.attributes[name]), "trainable", False)
    }
    for node in captured.graph.nodes:
        val = node.meta.get("val")
        if node.op == "placeholder" and node.name not in fixed and val.is_complex():
            name = captured.attributes.get(node.name)
            raise AutoparError(
                f"{f'parameter {name!r}' if name else f'input {node.name!r}'} is complex ({val.dtype}, shape ({shape_text(val)})), which "
                "autopar cannot distribute: hold its torch.view_as_real, and apply torch.view_as_complex in forward"
            )
        if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in OPS:
            raise AutoparError(
                f"forward calls torch.distributed by {node.target}{line_of_node(node)}: it sees one process, which has the whole batch; "
                "call the functions of torch.distributed as such, or leave them out"
            )
        if is_op(node, "as_strided_scatter"):
            raise AutoparError(
                f"forward writes through as_strided{line_of_node(node)}, whose gradient is wrong once PyTorch captures it: write by slices,"
                " diagonal() or indices"
            )
        if node.target in (torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default):
            raise AutoparError(
                f"forward reads a number out of {node.args[0]}{line_of_node(node)}: every rank would read its own; keep it a tensor"
            )


def check_loss_trains(captured: Captured) -> None:
    """Raise AutoparError if no trained parameter is connected to the loss by ops with gradients."""
    trained = {
        node
        for node, name in captured.attributes.items()
        if getattr(captured.parameters.get(name), "trainable", False)
    }
    if not trained:
        return
    loss = output_nodes(captured.graph)[0]
    found = ancestors([loss], lambda node: [] if _is_detached(node) else node.all_input_nodes)
    if not any(node.name in trained for node in found):
        raise AutoparError(
            "the loss depends on no trained parameter: each way to one leads through detach(), no_grad or torch.func.stack_module_state, "
            "which stacks copies without gradients. Stack parameters by torch.stack in forward, and detach only what shall not train"
        )


def _is_detached(node: torch.fx.Node) -> bool:
    """Whether no gradient passes through a node: a detach, or a region without gradients."""
    is_region = "wrap_with_set_grad_enabled" in str(node.target)
    return is_op(node, "detach") or (is_region and node.args[0] is False)


def check_symbols(captured: Captured) -> None:
    """Raise AutoparError if two inputs have rows whose numbers may differ, or if a constant is on
    the meta device.
    """
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
            f"inputs {names[0]!r} and {names[1]!r} both have the batch size in dim 0, but forward lets them differ: if one has no rows, "
            f"say so: batch_dims={{{names[1]!r}: None}}"
        )
    lost = [name for name, tensor in captured.constants.items() if tensor.is_meta]
    if lost:
        raise AutoparError(
            f"forward uses tensor {lost[0]!r}, which is on the meta device and has no values; register it as a buffer"
        )
