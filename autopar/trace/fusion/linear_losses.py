"""Which cross-entropies are of logits that a product without bias has made, and that nothing else reads.

    cross_entropy(view(cap tanh(scale hidden weight^T / cap)), target)

The views cut or join dims other than classes: a reshape to rows, or the slice of all positions but the last.  The op reads the same views
of hidden, times the scale, and makes the logits of some rows at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isclose
from typing import Any

import torch
from torch.fx import Node
from torch.fx.immutable_collections import immutable_list

from autopar.ir.calls import argument, op_name
from autopar.ir.fusion import LINEAR_LOSS
from autopar.trace.fusion.algebra import Algebra, at, dtype_of, is_floating
from autopar.trace.fusion.losses import match_loss, rounded_dtype
from autopar.trace.fusion.matches import VIEWS, Match, Miss, View
from autopar.trace.fusion.validate import small

_PRODUCTS = ("aten::linear", "aten::matmul", "aten::mm")
_SCALES = ("aten::mul", "aten::div")


@dataclass(frozen=True, slots=True)
class _Head:
    """A record of how logits are made: the call `product` of `hidden` and `weight` (classes, width).

    `transposed` is the call that transposes the weight for it, or None.
    """

    product: Node
    hidden: Node
    weight: Node
    transposed: Node | None


def match_linear_loss(algebra: Algebra, node: Node) -> Match | Miss | None:
    """The match of `autopar::linear_cross_entropy` for a call of torch's cross-entropy of the logits
    that a head's product without bias makes.

    A `Miss` with the reason if the op cannot compute it; None for any other call, and if
    `autopar::cross_entropy` cannot compute it either.
    """
    loss = match_loss(algebra, node)
    if not isinstance(loss, Match):
        return None
    between = _between(at(node))
    source = at(between[0]) if between else at(node)
    head = _head_of(source)
    if head is None:
        return Miss(LINEAR_LOSS, source, _no_head(source))
    scale, cap = _scale_and_cap(between)
    if not scale:
        return Miss(
            LINEAR_LOSS, source, "its logits are bent more than once, or not by cap tanh(x)"
        )
    views = tuple(step for step in between if op_name(step) in VIEWS)
    classes, width = head.weight.meta["val"].shape
    if not all(_keeps_classes(view) for view in views):
        return Miss(LINEAR_LOSS, source, "some of its classes are cut off")
    operands = {"hidden": head.hidden, "weight": head.weight, "target": loss.operands["target"]}
    # sums of few elements give logits of moderate size, whose loss is not lost in rounding
    rows, few = small(at(node).meta["val"].shape[0]), small(width)
    shapes = {"hidden": (rows, few), "weight": (small(classes), few), "target": (rows,)}
    if "weight" in loss.operands:
        operands["class_weight"] = loss.operands["weight"]
        shapes["class_weight"] = shapes["weight"][:1]
    made = (head.product,) if head.transposed is None else (head.transposed, head.product)
    return Match(
        torch.ops.autopar.linear_cross_entropy.default,
        operands,
        loss.attributes | ({} if cap is None else {"soft_cap": cap}),
        results=(node,),
        interior=(*made, *between, node),
        at=head.product,
        views={"hidden": _of_hidden(views, width, scale)},
        passed=views,
        shapes=shapes,
        rounded=rounded_dtype(node),
    )


def _between(logits: Node) -> tuple[Node, ...]:
    """The calls from which `logits` is computed one by one, in the order of the graph: views,
    widening casts, products with a number and tanh.
    """
    found, node = [], logits
    while _is_step(node):
        found.append(node)
        node = at(node)
    return tuple(reversed(found))


def _is_step(node: Node) -> bool:
    """Whether a node is a call that `_between` walks back through."""
    name = op_name(node)
    if not node.args or not isinstance(at(node), Node):
        return False
    if name in _SCALES:
        return isinstance(at(node, 1), (int, float)) and not node.kwargs
    if name == "aten::to":
        source = at(node)
        wide = is_floating(source) and torch.promote_types(dtype_of(source), dtype_of(node))
        return wide == dtype_of(node)
    return name == "aten::tanh" or (name in VIEWS and not node.kwargs)


def _scale_and_cap(between: tuple[Node, ...]) -> tuple[float, float | None]:
    """(scale, cap) of the calls that compute logits from a product x: cap tanh(scale x / cap), or
    scale x, for which the cap is None. A scale of 0.0 if they compute anything else.
    """
    factors = [1.0]
    for step in between:
        if op_name(step) == "aten::tanh":
            factors.append(1.0)
        elif op_name(step) in _SCALES:
            number = float(at(step, 1))
            factors[-1] *= number if op_name(step) == "aten::mul" else 1.0 / (number or inf)
    if len(factors) == 1:
        return factors[0], None
    scale = factors[0] * factors[1]
    if len(factors) > 2 or factors[1] <= 0:
        return 0.0, None
    return 1.0 if isclose(scale, 1.0, rel_tol=1e-12) else scale, factors[1]


def _head_of(node: Node) -> _Head | None:
    """How a product without bias makes `node`. None if it is no such product of a matrix."""
    name = op_name(node)
    if name not in _PRODUCTS or argument(node, "bias") is not None:
        return None
    hidden, weight = at(node), at(node, 1)
    transposed: Node | None = None
    if name != "aten::linear":
        transposed, rank = weight, weight.meta["val"].dim()
        if op_name(transposed) != "aten::transpose" or len(transposed.users) > 1 or rank != 2:
            return None
        if {at(transposed, place) % 2 for place in (1, 2)} != {0, 1}:
            return None
        weight = at(transposed)
    if weight.meta["val"].dim() != 2 or hidden.meta["val"].dim() < 2:
        return None
    return _Head(node, hidden, weight, transposed)


def _keeps_classes(view: Node) -> bool:
    """Whether a view of logits leaves their last dim, the classes, whole and in its place."""
    before, after = at(view).meta["val"].shape, view.meta["val"].shape
    if not len(after) or str(before[-1]) != str(after[-1]):
        return False
    if op_name(view) == "aten::reshape":
        return True
    rank = len(before) + (op_name(view) == "aten::unsqueeze")
    dims = argument(view, "dim")
    if dims is None:
        return False
    every = dims if isinstance(dims, (list, tuple)) else [dims]
    return all(dim % rank != rank - 1 for dim in every)


def _of_hidden(views: tuple[Node, ...], width: int, scale: float) -> View:
    """The views of hidden states of this width that stand for views of logits, times the scale."""
    found: list[tuple[Any, tuple[Any, ...]]] = []
    for view in views:
        arguments = tuple(view.args[1:])
        if op_name(view) == "aten::reshape":
            arguments = (immutable_list([*at(view, 1)[:-1], width]),)
        found.append((view.target, arguments))
    if scale != 1.0:
        found.append((torch.ops.aten.mul.Tensor, (scale,)))
    return tuple(found)


def _no_head(node: Node) -> str:
    """Why what makes logits is no head that can be fused, as text."""
    name = op_name(node)
    if name in _PRODUCTS:
        biased = argument(node, "bias") is not None
        return "its head adds a bias" if biased else "its head is no transposed matrix"
    if name:
        return f"its logits are made by {name}, no product"
    return "its logits come from another segment"
