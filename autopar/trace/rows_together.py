"""Finds how many consecutive rows of a batch forward reads together, as pairs of answers or groups
of samples.

    chosen, rejected = scores.view(-1, 2).unbind(1)

The number of such groups is the batch size divided by a number. A batch must not be cut within a
group. So the model is captured once more, with a group in the place of a row.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd, lcm

import sympy
import torch
from torch.fx import Graph
from torch.utils._sympy.functions import FloorDiv, Mod

from autopar.ir.traced import TracedModel

_MOST = 4096
"""More rows than this are not taken for a group."""


def rows_together(graph: Graph) -> int:
    """The smallest number of rows that all divisions of the batch size divide; 1 if it is never
    divided, or if it would be more than `_MOST`.
    """
    found = 1
    for node in graph.nodes:
        val = node.meta.get("val")
        for size in val.shape if isinstance(val, torch.Tensor) else ():
            if isinstance(size, torch.SymInt):
                found = lcm(found, _divisor(size.node.expr))
    return found if found <= _MOST else 1


def in_groups_noted(traced: TracedModel) -> TracedModel:
    """The model, traced with groups of rows, with a note that says so."""
    note = (
        f"forward reads {traced.together} consecutive rows together: a row of the plan, in its global batch and its micro-batches, is "
        f"{traced.together} rows of yours"
    )
    return replace(traced, notes=(*traced.notes, note))


def _divisor(expr: sympy.Expr) -> int:
    """The least common multiple of the numbers by which an expression divides a multiple of its
    one symbol. 1 for any other division.
    """
    found = 1
    for each in expr.atoms(FloorDiv, Mod):
        dividend, divisor = each.args
        times, symbol = dividend.as_coeff_Mul()
        if symbol.is_Symbol and times.is_Integer and divisor.is_Integer:
            found = lcm(found, int(divisor) // gcd(int(divisor), int(times)))
    return found
