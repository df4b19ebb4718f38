"""Checks the buffers and parameters that forward changes: which of them one graph can change as
eager PyTorch does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch.fx import Node

from autopar.errors import AutoparError
from autopar.ir.calls import op_name
from autopar.ops.random import NO_GRADIENT
from autopar.ops.values import input_node, output_nodes
from autopar.trace.assigned_state import AssignedState
from autopar.trace.batch_norm import IN_TRAINING
from autopar.trace.captured import Captured
from autopar.trace.user_lines import line_of_node


def check_changes(captured: Captured, assigned: AssignedState | None) -> Captured:
    """The captured call, with parameters that forward changes and no gradient reaches marked as not
    trained.

    Raises AutoparError, with the name, for a trained parameter that forward changes. It is also
    raised for a buffer whose value has a gradient in the next step, and for changes that backward
    would see.
    """
    if not captured.updates or assigned is None:
        return captured
    parameters, news = dict(captured.parameters), _new_values(captured)
    names = {
        alias: spec.name for spec in parameters.values() for alias in (spec.name, *spec.aliases)
    }
    trained, late = ({names[name] for name in of} for of in (assigned.trained, assigned.late))
    lines = {names[name]: line for name, line in assigned.lines.items()}
    for name in captured.updates:
        spec = parameters[name]
        if spec.dtype.startswith("complex"):
            raise AutoparError(
                f"forward changes {name!r}, which is complex{lines.get(name, '')}: register its real and imaginary parts as a real buffer "
                "(torch.view_as_real), and read that by torch.view_as_complex"
            )
        if spec.trainable and name in trained:
            raise AutoparError(_changes_trained(name, lines.get(name) or line_of_node(news[name])))
        if name in late:
            raise AutoparError(
                f"forward changes {name!r} through .data after an op with a gradient has read it. Backward would read the new value: "
                "change it before it is read, or let forward read a copy (.clone())"
            )
        parameters[name] = replace(spec, trainable=False)
    graded = {names[name] for name in assigned.graded} & set(captured.updates)
    if carried := _carries_gradient(captured, graded):
        raise AutoparError(
            f"forward gives {carried!r} a value with a gradient and computes the next loss with it. Backward would go on into earlier "
            "steps, which eager PyTorch mostly refuses: assign a detached value (.detach())"
        )
    return replace(captured, parameters=parameters)


def _changes_trained(name: str, where: str) -> str:
    """The text about a parameter that trains and that forward changes. `where` is the user's line."""
    return (
        f"forward changes parameter {name!r} in place{where}, which trains, past the optimizer. Compute with the changed value as a new "
        "tensor: F.linear(x, weight.clamp(-1, 1)), or torch.func.functional_call(module, tensors, x). Or change it between steps, by "
        "engine.set. If only the first call changes it, call the model once before. If forward alone is to change it, set "
        "requires_grad=False before training"
    )


def _carries_gradient(captured: Captured, graded: set[str]) -> str:
    """The name of a changed tensor whose value has a gradient from an earlier step, and from which
    the loss has one; '' if there is none. `graded` are those whose new value has one.
    """
    loss, news = output_nodes(captured.graph)[0], _new_values(captured)
    places = {
        name: node for node in captured.graph.nodes if (name := captured.attributes.get(node.name))
    }
    todo = list(graded)
    while todo:
        name = todo.pop()
        reached = _differentiable([places[name]] if name in places else [])
        if loss in reached:
            return name
        more = {other for other, node in news.items() if node in reached} - graded
        graded, todo = graded | more, [*todo, *more]
    return ""


def _new_values(captured: Captured) -> dict[str, Node]:
    """By name of each changed tensor, the node of its new value before that is detached."""
    changed = output_nodes(captured.graph)[1 : len(captured.updates) + 1]
    return {name: input_node(node, 0) for name, node in zip(captured.updates, changed, strict=True)}


def _differentiable(sources: Iterable[Node]) -> set[Node]:
    """The nodes that have a gradient for one of `sources`, these included."""
    found, stack = set[Node](), list(sources)
    while stack:
        node = stack.pop()
        if node in found:
            continue
        found.add(node)
        # training reads the first operand of `in_training` alone
        marks = {
            user for user in node.users if user.target is IN_TRAINING and user.args[0] is not node
        }
        stack += [user for user in node.users if user not in marks and _has_gradient(user)]
    return found


def _has_gradient(node: Node) -> bool:
    val = node.meta.get("val")
    first = val[0] if isinstance(val, (list, tuple)) and val else val
    floating = isinstance(first, torch.Tensor) and first.is_floating_point()
    return node.op == "call_function" and floating and op_name(node) not in NO_GRADIENT


def rounding_notes(captured: Captured) -> tuple[str, ...]:
    """A note (at most one) on tensors that forward changes in half precision, those of batch norms
    excepted, in which small changes are lost.
    """
    halves = {
        captured.attributes[node.name]: node.meta["val"].dtype
        for node in captured.graph.nodes
        if node.name in captured.attributes and node.meta["val"].dtype in _HALVES
    }
    names = [n for n in captured.updates if n in halves and not n.endswith(_STATISTICS)]
    if not names:
        return ()
    dtype = halves[names[0]]
    least = torch.finfo(dtype).eps / 2
    return (
        f"forward changes {', '.join(names[:3])}{', ...' if len(names) > 3 else ''} in {dtype}: a change of less than {least:.1g} of a "
        "value rounds away, as a slow momentum's is; precision='fp32' keeps it",
    )


_HALVES = (torch.float16, torch.bfloat16)
_STATISTICS = ("running_mean", "running_var")
