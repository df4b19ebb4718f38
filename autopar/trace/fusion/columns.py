"""Which columns of another value a node has: parts of the last dim, its halves, its even or odd columns; and what joins them again."""

from __future__ import annotations

import operator
from dataclasses import dataclass

from torch.fx import Node

from autopar.ir.calls import argument, op_name
from autopar.trace.fusion.algebra import at


@dataclass(frozen=True, slots=True)
class Part:
    """Columns `start` to `stop` of the node `of`."""

    of: Node
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Half:
    """The lower or upper half of the columns of the node `of`, or with `neighbours` its even or odd ones."""

    of: Node
    upper: bool
    neighbours: bool

    def completes(self, lower: Half) -> bool:
        """Whether this is the upper half to a lower one."""
        return self == Half(lower.of, True, lower.neighbours) and not lower.upper


def part_of(node: Node) -> Part | None:
    """The adjacent columns of another node that a node has; None if it is no cut of the last dim."""
    if node.target is operator.getitem:
        split, index = at(node), at(node, 1)
        if not isinstance(split, Node) or op_name(split) != "aten::split_with_sizes":
            return None
        if not _along_last(split, at(split)):
            return None
        sizes = at(split, 1)
        start = sum(sizes[:index])
        return Part(at(split), start, start + sizes[index])
    cut = _cut(node)
    return Part(at(node), cut.start, cut.stop) if cut is not None and cut.step == 1 else None


def half_of(node: Node | None) -> Half | None:
    """Which half of another node's columns a node has; None if it has none."""
    if node is None:
        return None
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


def negated(node: Node) -> Node | None:
    """What a node negates."""
    negates = op_name(node) == "aten::neg" or (op_name(node) == "aten::mul" and at(node, 1) == -1)
    return at(node) if negates else None


def joined(node: Node, neighbours: bool = False) -> list[Node] | None:
    """What a node joins along the last dim, one after another, or with `neighbours` in turn; None if it joins nothing."""
    if not neighbours:
        is_joint = op_name(node) == "aten::cat" and _along_last(node, node)
        return list(at(node)) if is_joint else None
    stack = at(node) if op_name(node) == "aten::reshape" else None
    if not isinstance(stack, Node) or op_name(stack) != "aten::stack":
        return None
    rows = str(list(node.meta["val"].shape[:-1])) == str(list(stack.meta["val"].shape[:-2]))
    return list(at(stack)) if rows and _along_last(stack, stack) else None


def _along_last(node: Node, of: Node) -> bool:
    """Whether the dim of a call is the last one of a value."""
    rank: int = of.meta["val"].dim()
    return bool(argument(node, "dim", 0) % rank == rank - 1)


def _columns(node: Node) -> int:
    """The size of the last dim, 0 if it is an expression."""
    size = node.meta["val"].shape[-1]
    return size if isinstance(size, int) else 0


def _cut(node: Node) -> slice | None:
    """The columns that a slice of the last dim takes."""
    if op_name(node) != "aten::slice" or not _along_last(node, at(node)):
        return None
    start, stop = argument(node, "start") or 0, argument(node, "end")
    if not _columns(at(node)) or not all(isinstance(each, int | None) for each in (start, stop)):
        return None
    return slice(*slice(start, stop, argument(node, "step", 1)).indices(_columns(at(node))))
