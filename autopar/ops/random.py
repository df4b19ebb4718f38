"""Identifies calls that draw random numbers, and calls whose results need no gradient."""

from __future__ import annotations

import torch
from torch.fx import Node

from autopar.ir.calls import is_attention, op_name
from autopar.ops.dims import Call

COUNTED = (
    "aten::exponential",
    "aten::uniform",
    "aten::normal_functional",
    "aten::bernoulli",
    "aten::rand_like",
    "aten::randn_like",
)
"""Draws that depend on the element, not on the rank, as dropout does."""
NO_GRADIENT = {"aten::detach", *(f"aten::{name}_like" for name in ("zeros", "ones", "full", "empty")), *COUNTED,
               *(f"aten::new_{name}" for name in ("zeros", "ones", "full", "empty"))}  # fmt: skip
"""Ops whose results never need a gradient."""


def draws(node: Node) -> bool:
    """Whether a call is lowered to draw by counter: an op of `COUNTED`, or a call that `drops`. One
    device and the ranks of any plan then draw the same numbers.
    """
    return op_name(node) in COUNTED or drops(node)


def drops(node: Node) -> bool:
    """Whether a call is dropout that is on and has a probability above 0, or attention with such
    dropout.
    """
    if op_name(node) == "aten::dropout":
        return bool(Call(node).arg("train")) and Call(node).arg("p") > 0
    return is_attention(node) and Call(node).arg("dropout_p", 0.0) > 0


def draws_otherwise(node: Node) -> bool:
    """Whether a call may draw random numbers from PyTorch's global generator, so that the ranks of
    a plan draw others than one device. False for dropout, attention and the ops `COUNTED`.
    """
    tags = getattr(node.target, "tags", ())
    return (
        torch.Tag.nondeterministic_seeded in tags
        and op_name(node) not in ("aten::dropout", *COUNTED)
        and not is_attention(node)
    )
