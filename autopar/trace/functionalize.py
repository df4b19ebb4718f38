"""Replaces in-place ops of an exported program by ops that return new tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch._decomp import decomposition_table

from autopar.ops.aten import aten
from autopar.trace.edit import is_op
from autopar.trace.in_place import rewrite_in_place
from autopar.trace.normalize import expand_feature_dropout, inline_no_grad_regions

_OTHER_ARGUMENTS = (
    aten.nll_loss.default,
    aten.margin_ranking_loss.default,
    aten.hinge_embedding_loss.default,
)
"""Losses that torch 2.13 decomposes by functions whose `reduction` is a text, where the op has a
number: `nll_loss` without reduction comes out as one number, the others fail.
"""


def functional(exported: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program without in-place ops; the program itself if it has none. The graphs of the given
    program may change.
    """
    graphs = [
        m.graph for m in exported.graph_module.modules() if isinstance(m, torch.fx.GraphModule)
    ]  # no-grad regions are graphs too
    for graph in graphs:
        for node in list(graph.nodes):
            # torch.tensor(...) in forward, which has no gradient
            if is_op(node, "detach_") and is_op(node.args[0], "lift_fresh_copy"):
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)
        rewrite_in_place(graph)
    if not any(_mutates(node) for graph in graphs for node in graph.nodes):
        return exported
    exported.graph.owning_module = exported.graph_module
    inline_no_grad_regions(exported.graph)  # functionalization would forget them
    expand_feature_dropout(exported.graph)  # and make this a Bernoulli draw
    exported.graph_module.recompile()
    with _losses_as_they_are():
        return exported.run_decompositions({})


def _mutates(node: torch.fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


@contextlib.contextmanager
def _losses_as_they_are() -> Iterator[None]:
    """A context in which fake tensors find the shapes of `_OTHER_ARGUMENTS` by the ops themselves."""
    table: MutableMapping[Any, Any] = decomposition_table
    taken = {op: table.pop(op) for op in _OTHER_ARGUMENTS if op in table}
    try:
        yield
    finally:
        table.update(taken)
