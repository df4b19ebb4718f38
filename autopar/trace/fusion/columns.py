"""Which columns of another value a node has: parts of the last dim, its halves, its even or odd columns; and what joins them again."""

from __future__ import annotations

import operator
from dataclasses import dataclass

from torch.fx import Node

from autopar.ir.calls import argument, op_name
from autopar.trace.fusion.algebra import at


@dataclass(frozen=True, slots=True)
class ColumnRange:
    """A description of adjacent columns (the last dim) of the node `of`: from `start` to before
    `stop`.
    """

    of: Node
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Half:
    """A description of half of the columns (the last dim) of the node `of`: the lower or `upper`
    half. With `neighbours`, the even columns, or the odd ones if `upper`.
    """

    of: Node
    upper: bool
    neighbours: bool

    def completes(self, lower: Half) -> bool:
        """Whether this is the upper half and `lower` the lower half of the same columns."""
        return self == Half(lower.of, True, lower.neighbours) and not lower.upper


def part_of(node: Node) -> ColumnRange | None:
    """The adjacent columns of another node that a node is. None if it is no cut of the last dim."""
    if node.target is operator.getitem:
        split, index = at(node), at(node, 1)
        if not isinstance(split, Node) or op_name(split) != "aten::split_with_sizes":
            return None
        if not _along_last(split, at(split)):
            return None
        sizes = at(split, 1)
        start = sum(sizes[:index])
        return ColumnRange(at(split), start, start + sizes[index])
    cut = _cut(node)
    return ColumnRange(at(node), cut.start, cut.stop) if cut is not None and cut.step == 1 else None


def half_of(node: Node | None) -> Half | None:
    """Which half of another node's columns a node is. None if it is none, and for None."""
    if node is None:
        return None
    if op_name(node) == "aten::select":
        return _of_pairs(node)
    part = part_of(node)
    if part is not None:
        half, odd = divmod(_columns(part.of), 2)
        places = {(0, half): False, (half, 2 * half): True}
        upper = places.get((part.start, part.stop))
        return None if odd or upper is None else Half(part.of, upper, False)
    cut = _cut(node)
    if cut is None or cut.step != 2 or cut.start > 1 or _columns(at(node)) % 2:
        return None
    whole = cut.stop >= _columns(at(node)) - 1 + cut.start
    return Half(at(node), cut.start == 1, True) if whole else None


def _of_pairs(node: Node) -> Half | None:
    """The even or odd columns of a value that a node selects from its pairs of neighbours, (..., C)
    reshaped to (..., C/2, 2). None if it selects anything else.
    """
    pairs, index = at(node), argument(node, "index")
    rank = pairs.meta["val"].dim()
    if op_name(pairs) != "aten::reshape" or argument(node, "dim") % rank != rank - 1:
        return None
    whole, paired = at(pairs), [*map(str, pairs.meta["val"].shape)]
    rows = [*map(str, whole.meta["val"].shape[:-1])]
    if paired != [*rows, str(_columns(whole) // 2), "2"] or not _columns(whole):
        return None
    return Half(whole, index % 2 == 1, True)


def negated(node: Node) -> Node | None:
    """The node that a node negates, or None."""
    negates = op_name(node) == "aten::neg" or (op_name(node) == "aten::mul" and at(node, 1) == -1)
    return at(node) if negates else None


def joined_nodes(node: Node, neighbours: bool = False) -> list[Node] | None:
    """The nodes that a node joins along the last dim, in order: as blocks of columns, or with
    `neighbours` by turns. None if it joins nothing that way.
    """
    if not neighbours:
        is_joint = op_name(node) == "aten::cat" and _along_last(node, node)
        return list(at(node)) if is_joint else None
    stack = at(node) if op_name(node) == "aten::reshape" else None
    if not isinstance(stack, Node) or op_name(stack) != "aten::stack":
        return None
    rows = str(list(node.meta["val"].shape[:-1])) == str(list(stack.meta["val"].shape[:-2]))
    return list(at(stack)) if rows and _along_last(stack, stack) else None


def _along_last(node: Node, of: Node) -> bool:
    """Whether the argument `dim` of the call `node` is the last dim of the value `of`."""
    rank: int = of.meta["val"].dim()
    return bool(argument(node, "dim", 0) % rank == rank - 1)


def _columns(node: Node) -> int:
    """The size of the last dim of a node's value; 0 if it is symbolic."""
    size = node.meta["val"].shape[-1]
    return size if isinstance(size, int) else 0


def _cut(node: Node) -> slice | None:
    """The columns that a slice of the last dim takes, with start, stop and step from 0 on. None for
    any other node, and if a size is symbolic.
    """
    if op_name(node) != "aten::slice" or not _along_last(node, at(node)):
        return None
    start, stop = argument(node, "start") or 0, argument(node, "end")
    if not _columns(at(node)) or not all(isinstance(each, int | None) for each in (start, stop)):
        return None
    return slice(*slice(start, stop, argument(node, "step", 1)).indices(_columns(at(node))))
