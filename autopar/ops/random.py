"""Which calls draw random numbers."""

from __future__ import annotations

import torch
from torch.fx import Node

from autopar.ops.dims import Call


def drops(node: Node) -> bool:
    """Whether a call is dropout that drops: alone or inside attention."""
    name = getattr(getattr(node.target, "_schema", None), "name", "")
    if name == "aten::dropout":
        return bool(Call(node).arg("train")) and Call(node).arg("p") > 0
    return name == "aten::scaled_dot_product_attention" and Call(node).arg("dropout_p", 0.0) > 0


def draws_otherwise(node: Node) -> bool:
    """Whether a call may draw random numbers by other ways than dropout, from PyTorch's global generator."""
    name = getattr(getattr(node.target, "_schema", None), "name", "")
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags and name not in ("aten::dropout", "aten::scaled_dot_product_attention")
