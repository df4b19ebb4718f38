"""What matchers hand to the pass: a `Match`, or the reason why a subgraph that looks like one is none.

A matcher is a function from an `Algebra` and a node to `Match`, `Miss` or None.  It looks at the term of the node, and says which op
computes the node from which operands.  It sees one block class, so that no match crosses segments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node

from autopar.ir.calls import op_name
from autopar.ir.fusion import Attribute
from autopar.trace.fusion.algebra import Algebra, Term

VIEWS = frozenset(f"aten::{name}" for name in ("reshape", "slice", "squeeze", "unsqueeze"))
"""The ops that cut or join dims, and change no value."""
View = tuple[tuple[Any, tuple[Any, ...]], ...]
"""The ops that make a view, each with its arguments after the tensor; () is the tensor itself."""


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """A record of a subgraph and the op that computes the same.

    Attributes:
        op: the overload of the op.
        operands: its tensors, by the names in its schema.
        attributes: its other arguments, by name.
        results: for each result of the op the node that it replaces.
        interior: the nodes that the op replaces, `results` among them, in the order of the graph.
        at: the node by which the subgraph is recognised, such as the root of a norm.
        views: by operand, the view of its node that the op reads.
        passed: the subgraph's views of inner values, where the op reads its operands in such views.
        shapes: by operand, the small shape in which it is evaluated, as after its `VIEWS`. An
            operand that is missing has the small shape that follows from its own.
        copies: other nodes that compute an operand, which the subgraph reads.
        rounded: the dtype to which the first result is cast, None for its own.
        apart: a product that adds the operand called bias, which the op adds in its place; or None.
    """

    op: Any
    operands: dict[str, Node]
    attributes: dict[str, Attribute]
    results: tuple[Node, ...]
    interior: tuple[Node, ...]
    at: Node
    views: dict[str, View] = field(default_factory=dict)
    passed: tuple[Node, ...] = ()
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    copies: dict[Node, Node] = field(default_factory=dict)
    rounded: Any = None
    apart: Node | None = None

    @property
    def name(self) -> str:
        """The schema name of the op, such as 'autopar::rms_norm'."""
        name: str = self.op._schema.name
        return name


@dataclass(frozen=True, slots=True)
class Miss:
    """A record of a subgraph that looks like the fused op named `op`, was recognised at the node
    `at`, and is left as it is for `reason`.
    """

    op: str
    at: Node
    reason: str


Matcher = Callable[[Algebra, Node], "Match | Miss | None"]


def interior_of(
    algebra: Algebra, result: Node, operands: Iterable[Node]
) -> tuple[tuple[Node, ...], dict[Node, Node]]:
    """(the calls from which `result` is computed, back to `operands`, in graph order; other nodes
    that compute an operand -> that operand).

    Calls that do not come from an operand are in that list too, down to inputs and parameters.
    """
    ends = set(operands)
    terms: dict[Term, Node] = {algebra.terms[n]: n for n in ends if n in algebra.terms}
    found: set[Node] = set()
    copies: dict[Node, Node] = {}
    waiting = [result]
    while waiting:
        node = waiting.pop()
        if node in found or node in ends:
            continue
        term = algebra.terms.get(node)
        if term is not None and term in terms:
            copies[node] = terms[term]
        elif node.op == "call_function":
            found.add(node)
            waiting += node.all_input_nodes
    return tuple(sorted(found)), copies


def ending_at(
    algebra: Algebra,
    match: Match,
    result: Node,
    operands: dict[str, Node],
    attributes: dict[str, Attribute],
) -> Match:
    """The match with `result` as its only result, and with these operands and attributes besides
    its own, or in their place.
    """
    read = match.operands | operands
    interior, copies = interior_of(algebra, result, read.values())
    return replace(
        match,
        operands=read,
        attributes=match.attributes | attributes,
        results=(result,),
        interior=interior,
        copies=copies,
    )


def viewed(match: Match, name: str, tensor: Any, call: Callable[..., Any]) -> Any:
    """What the op of a match reads as the operand called `name`: `tensor` after the match's views
    of that operand.

    `tensor` may be a node or a real tensor. `call(op, tensor, *arguments)` runs or inserts each
    view.
    """
    for op, arguments in match.views.get(name, ()):
        tensor = call(op, tensor, *arguments)
    return tensor


def without_bias(product: Node) -> tuple[Any, tuple[Any, ...]]:
    """(op, arguments) of a call of linear or addmm without its bias."""
    if op_name(product) == "aten::addmm":
        return torch.ops.aten.mm.default, product.args[1:3]
    return torch.ops.aten.linear.default, product.args[:2]


def used_outside(match: Match) -> Node | None:
    """The first inner node of a match, other than its results, that a node outside the match reads.
    None if there is none.
    """
    inside = set(match.interior)
    hidden = (node for node in match.interior if node not in match.results)
    return next((node for node in hidden if not inside.issuperset(node.users)), None)


def read_besides(match: Match) -> Node | None:
    """The first node outside a match that its subgraph reads besides the operands, such as a value
    that is multiplied by 0. None if there is none.
    """
    known = {*match.interior, *match.operands.values(), *match.copies}
    sources = (source for node in match.interior for source in node.all_input_nodes)
    return next((source for source in sources if source not in known), None)
