"""Tables with sparse gradients in eager PyTorch. The engine makes these gradients dense, since
ranks sum them.
"""

from __future__ import annotations

import torch

from autopar.errors import AutoparError
from autopar.ir.calls import sparse_argument
from autopar.ir.traced import TracedModel


def check_dense_is_the_same(optimizer: torch.optim.Optimizer, traced: TracedModel) -> None:
    """Raise AutoparError if forward requests sparse gradients and the optimizer may treat dense
    ones differently.

    torch.optim's SGD and Adagrad make the same update for both. Its other optimizers accept no
    sparse gradients, except SparseAdam, which accepts no dense ones. Optimizers of other libraries
    are unknown.
    """
    tables = _sparse_tables(traced)
    kind = type(optimizer)
    if kind is not torch.optim.SparseAdam and (
        not tables or kind.__module__.startswith("torch.optim.")
    ):
        return
    if kind is torch.optim.SparseAdam:
        read = (
            f", that of {tables[0]!r} too, which forward reads with sparse=True" if tables else ""
        )
        raise AutoparError(
            f"SparseAdam takes sparse gradients alone, but the engine adds up dense gradients over ranks{read}. "
            "Use torch.optim.SGD or Adagrad, which update a table alike in both cases, or torch.optim.Adam, which "
            "also moves the rows that a step does not read"
        )
    raise AutoparError(
        f"forward reads {tables[0]!r} with sparse=True, and {kind.__name__} may treat sparse gradients otherwise than dense ones, which "
        f"is what the engine gives it. Read the table with sparse=False, for which {kind.__name__} gets dense gradients in eager PyTorch "
        "too, or use torch.optim.SGD or Adagrad, which update a table alike in both cases"
    )


def _sparse_tables(traced: TracedModel) -> list[str]:
    """The parameters that forward reads with sparse gradients. A table that forward computes is
    named by the op that reads it.
    """
    found: dict[str, None] = {}
    for segment in traced.segments:
        block = traced.classes[segment.class_index]
        names = dict(zip(block.slots, segment.parameters, strict=True))
        for node in block.graph.nodes:
            if node.op == "call_function" and sparse_argument(node)[1]:
                found[names.get(node.args[0].target, node.name)] = None
    return list(found)
