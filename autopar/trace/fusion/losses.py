"""Which values are cross-entropies of whole rows, read in the dtype in which the logits came.

Models raise logits to fp32 before the loss, and often cut and join dims in between.  The op computes in fp32 itself: it reads the same
views of the logits as they came, and nothing of their size is kept besides them.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from autopar.ir.calls import argument, op_name
from autopar.ir.fusion import Attribute
from autopar.trace.fusion.algebra import Algebra, at, dtype_of, is_floating
from autopar.trace.fusion.matches import VIEWS, Match, Miss, View
from autopar.trace.fusion.validate import small_shape

_LOSS = "autopar::cross_entropy"
_REDUCTIONS = {0: "none", 2: "sum"}
"""torch's number -> the op's name; `trace/mean_losses.py` writes means as sums."""


def match_loss(algebra: Algebra, node: Node) -> Match | Miss | None:
    """The match of `autopar::cross_entropy` for a call of torch's cross-entropy, summed or
    unreduced.

    A `Miss` with the reason if the op cannot compute it; None for any other call.
    """
    if op_name(node) != "aten::cross_entropy_loss":
        return None
    logits, target = at(node), at(node, 1)
    reduction = argument(node, "reduction", 1)
    if reduction not in _REDUCTIONS:
        return Miss(_LOSS, node, "its mean has no sum")
    if is_floating(target):
        return Miss(_LOSS, node, "its targets are probabilities")
    if logits.meta["val"].dim() != 2:
        return Miss(_LOSS, node, f"its logits have {logits.meta['val'].dim()} dims, not 2")
    attributes: dict[str, Attribute] = {
        "ignore_index": int(argument(node, "ignore_index", -100)),
        "label_smoothing": float(argument(node, "label_smoothing", 0.0)),
        "reduction": _REDUCTIONS[reduction],
    }
    source, moved = _before_cast(logits)
    operands = {"logits": source, "target": target}
    if isinstance(weight := argument(node, "weight"), Node):
        operands["weight"] = weight
    view: View = tuple((step.target, tuple(step.args[1:])) for step in moved[1:])
    op = torch.ops.autopar.cross_entropy.default
    return Match(
        op,
        operands,
        attributes,
        results=(node,),
        interior=(*moved, node),
        at=node,
        views={"logits": view},
        passed=moved[1:],
        shapes={"logits": small_shape(moved[-1])} if moved else {},
        rounded=rounded_dtype(node),
    )


def rounded_dtype(loss: Node) -> torch.dtype | None:
    """The dtype to which the result of an op is rounded where it replaces `loss`: that of `loss` if
    it is half precision. None otherwise, since the op gives fp32 or wider.
    """
    return dtype_of(loss) if dtype_of(loss).itemsize < 4 else None


def _before_cast(logits: Node) -> tuple[Node, tuple[Node, ...]]:
    """(the node before a widening cast of the logits, the cast and the views after it, in order).
    (`logits`, ()) if there is no such cast, or if others read what is in between.
    """
    moved: list[Node] = []
    node = logits
    while op_name(node) in VIEWS and len(node.users) == 1 and not node.kwargs:
        moved.append(node)
        node = at(node)
    source = at(node) if op_name(node) == "aten::to" and len(node.users) == 1 else None
    if not isinstance(source, Node) or not is_floating(source):
        return logits, ()
    if torch.promote_types(dtype_of(source), dtype_of(node)) != dtype_of(node):
        return logits, ()
    return source, (node, *reversed(moved))
