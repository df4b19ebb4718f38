"""Finds linear layers that some software runs as one product: queries, keys and values, and the two
halves of a gated MLP.
"""

from __future__ import annotations

from collections.abc import Container

from torch.fx import Node


def joined_outputs(node: Node, weights: Container[str]) -> float:
    """Outputs of the product of which a linear layer is a part, over its own outputs; 1.0 if it
    runs alone. `weights` names the parameters of its class.

    Two layers of one size that read one input are joined, as gate and up are. So are two of one size
    and a third that is at least as large, as keys, values and queries are.
    """
    inputs = node.args[0] if node.args else None
    if not isinstance(inputs, Node):
        return 1.0
    sizes = {
        user: size
        for user in inputs.users
        if user.target is node.target and (size := _outputs(user, inputs, weights))
    }
    least = sorted(sizes.values())
    joined = len(least) in (2, 3) and least[0] == least[1]
    return sum(least) / sizes[node] if joined and node in sizes else 1.0


def _outputs(node: Node, inputs: Node, weights: Container[str]) -> int:
    """Outputs of a linear layer that multiplies these inputs by a parameter; 0 for other calls."""
    if len(node.args) < 2 or node.args[0] is not inputs:
        return 0
    weight = node.args[1]
    if not isinstance(weight, Node) or weight.name not in weights:
        return 0
    return int(weight.meta["val"].shape[0])
