"""Embedding tables whose rows forward rescales (`max_norm`).

Such a lookup first divides rows of the table by their norm, in place. At capture it becomes a plain
lookup, and `autopar::limits_rows` marks its ids. The engine rescales the rows that a batch reads
before forward, in every step. That is exact if ids follow from inputs alone, and if nothing reads
the table before all of its rows are rescaled.
"""

from __future__ import annotations

from typing import NoReturn

from torch.fx import Node

from autopar.errors import AutoparError
from autopar.ir.calls import arguments
from autopar.ir.traced import RowLimit
from autopar.trace.captured import Captured
from autopar.trace.edit import is_op
from autopar.trace.loss_split import step_graph
from autopar.trace.row_facts import ancestors, is_random
from autopar.trace.user_lines import line_of_node

_MARK = "autopar::limits_rows"


def take_row_limits(captured: Captured) -> tuple[RowLimit, ...]:
    """What the marks in a normalized graph say, in graph order. Removes the marks, in place. Raises
    AutoparError if rescaling before forward would compute something else.
    """
    marks = [node for node in captured.graph.nodes if is_op(node, _MARK)]
    found = tuple(_limit(captured, node) for node in marks)
    if len({limit.name for limit in found}) < len(set(map(_options, found))):
        _refuse(marks[0], "with another max_norm or norm_type at another place")
    for node in marks:
        _check_order(captured, node, marks)
    for node in marks:
        node.replace_all_uses_with(arguments(node)[0])
        captured.graph.erase_node(node)
    captured.graph.eliminate_dead_code()
    return found


def _options(limit: RowLimit) -> tuple[str, float, float]:
    return limit.name, limit.max_norm, limit.norm_type


def _limit(captured: Captured, node: Node) -> RowLimit:
    ids, _, max_norm, norm_type = arguments(node)
    name, nodes = captured.attributes.get(_table(node).name), ancestors([ids])
    if name is None:
        _refuse(node, "in a table that it computes")
    outside = {each.name for each in nodes if each.op == "placeholder"} - {*captured.input_nodes}
    if outside or any(map(is_random, nodes)):
        _refuse(node, "at ids that do not follow from inputs alone")
    rows = _table(node).meta["val"].shape[0]
    graph = step_graph(captured, nodes, [ids], {})
    return RowLimit(name, int(rows), max_norm, norm_type, graph)


def _table(node: Node) -> Node:
    table = arguments(node)[1]
    while is_op(table, "detach", "alias", "clone"):
        table = arguments(table)[0]
    return table


def _check_order(captured: Captured, node: Node, marks: list[Node]) -> None:
    """Raise AutoparError if a node before the mark `node` reads the table, other than a lookup of
    rows that were rescaled.
    """
    place = {each: number for number, each in enumerate(captured.graph.nodes)}
    own = {mark for mark in marks if _table(mark) is _table(node)}
    for user in _table(node).users:
        known = user in own or (
            is_op(user, "detach", "alias", "clone") and own.issuperset(user.users)
        )
        looks_up = own.intersection(user.all_input_nodes)
        if place[user] < place[node] and not known and not looks_up:
            _refuse(node, "after reading other rows of the table")


def _refuse(node: Node, how: str) -> NoReturn:
    raise AutoparError(
        f"forward rescales rows of an embedding table, by max_norm, {how}{line_of_node(node)}: autopar rescales them before forward, and "
        "would compute something else. Look the rows up without max_norm and rescale them there: "
        "rows / (rows.norm(2, -1, True) / max_norm).clamp(min=1)"
    )
