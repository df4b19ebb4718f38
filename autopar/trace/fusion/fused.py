"""The pass: a traced model in which subgraphs are ops of our own, and the report of what became of each.

Requires: a model as `find_segments` returns it.  Ensures: the same function of the same inputs and parameters; segments, slots and outputs
keep their places; every op of ours was compared with its subgraph (`validate.py`).

It runs on block classes, before annotation: rules, prices and kept tensors are those of the op, and no match crosses segments.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch.fx import Graph, Node

from autopar.ir.fusion import FusedOp, Fusion, NearMiss
from autopar.ir.traced import BlockClass, TracedModel, per_model
from autopar.ops.values import output_nodes
from autopar.trace.edit import call
from autopar.trace.fusion.algebra import Algebra
from autopar.trace.fusion.gated import match_bias_activation, match_gated
from autopar.trace.fusion.linear_losses import match_linear_loss
from autopar.trace.fusion.losses import match_loss
from autopar.trace.fusion.matches import (
    Match,
    Matcher,
    Miss,
    read_besides,
    used_outside,
    viewed,
    without_bias,
)
from autopar.trace.fusion.norms import match_gated_norm, match_norm, with_gate_first, with_residual
from autopar.trace.fusion.rotary import match_rotary
from autopar.trace.fusion.softmaxes import match_softmax
from autopar.trace.fusion.validate import wrong

_ALL: tuple[Matcher, ...] = (
    *(match_gated_norm, match_norm, match_gated, match_bias_activation),
    *(match_rotary, match_softmax, match_loss),
)
_MATCHERS: dict[str, tuple[Matcher, ...]] = {
    "norms": (match_gated_norm, match_norm),
    "all": _ALL,
    "head": (match_linear_loss, *_ALL),
}
"""By mode; the first matcher that matches a node has it."""


@per_model(8)
def fused(traced: TracedModel, mode: str) -> TracedModel:
    """A copy of `traced` in which subgraphs that compute a fused op of `mode` are that op; its
    `fusion` says what was done.

    A model that was fused in this mode already is returned as it is.

    Args:
        traced: the traced model.
        mode: one of `FUSE_MODES`.

    Raises:
        KeyError: the mode is unknown.
        ValueError: the model was fused in another mode.
    """
    if mode == traced.fusion.mode:
        return traced
    if traced.fusion.mode != "off":
        raise ValueError(f"the model is fused with fuse={traced.fusion.mode}, not {mode}")
    classes, done, missed = [], [], []
    for block in traced.classes:
        matches, misses = _select(block.graph, _MATCHERS[mode])
        graph, names = rewritten(block.graph, matches) if matches else (block.graph, {})
        classes.append(replace(block, graph=graph))
        done += [_described(block, match, names[match]) for match in matches]
        missed += [NearMiss(block.name, miss.op, miss.at.name, miss.reason) for miss in misses]
    return replace(traced, classes=tuple(classes), fusion=Fusion(mode, tuple(done), tuple(missed)))


def _described(block: BlockClass, match: Match, name: str) -> FusedOp:
    replaced = tuple(node.name for node in match.interior)
    return FusedOp(block.name, match.name, name, replaced, dict(match.attributes))


def _select(graph: Graph, matchers: tuple[Matcher, ...]) -> tuple[list[Match], list[Miss]]:
    """(matches that do not overlap, misses), both in the order of the graph. A match is a subgraph
    with the op that computes the same. A miss is one that nearly matched and is in no match.

    Nodes are tried from the last to the first, and matchers in order, so that the largest subgraph
    has its op.
    """
    algebra = Algebra(graph)
    taken: set[Node] = set()
    matches: list[Match] = []
    misses: dict[tuple[str, Node], Miss] = {}
    for node in reversed(graph.nodes):
        if node.op != "call_function" or node not in algebra.terms:
            continue
        for found in _tried(algebra, node, matchers, taken):
            if isinstance(found, Match):
                matches.append(found)
                taken.update(found.interior)
                break
            misses[found.op, found.at] = found
    left = [miss for miss in misses.values() if miss.at not in taken]
    return matches[::-1], left[::-1]


def _tried(
    algebra: Algebra, node: Node, matchers: tuple[Matcher, ...], taken: set[Node]
) -> Iterator[Match | Miss]:
    """Yields what each matcher in turn says about a node: a match that holds, with its residual
    first if that is possible, or a miss.

    `taken` has the nodes of earlier matches, which no match may contain.
    """
    for matcher in matchers:
        if node in taken:
            return
        found = matcher(algebra, node)
        if isinstance(found, Miss):
            yield found
        elif found is not None:
            larger = _larger(algebra, found, matchers) if matcher is match_norm else None
            for match in (larger, found) if larger is not None else (found,):
                reason = _refused(match, taken)
                if not reason:
                    yield match
                elif match is found:
                    yield Miss(found.name, found.at, reason)


def _larger(algebra: Algebra, match: Match, matchers: tuple[Matcher, ...]) -> Match | None:
    """The match of a norm joined with the product by a gate, or the addition, before it. None if
    there is neither, or if the sum is the result of another op, such as a rotation.
    """
    if (gated := with_gate_first(algebra, match)) is not None:
        return gated
    larger = with_residual(match)
    if larger is None:
        return None
    others = (other(algebra, match.operands["x"]) for other in matchers if other is not match_norm)
    return None if any(isinstance(other, Match) for other in others) else larger


def _refused(match: Match, taken: set[Node]) -> str:
    """Why a match may not replace its subgraph, as text; '' if it may. The subgraph overlaps
    `taken`, has inner values that others read, reads more than the op, or computes something else.
    """
    if not taken.isdisjoint(match.interior):
        return "a part of it is a part of another op"
    if (node := used_outside(match)) is not None:
        return f"its value {node.name} is used elsewhere too"
    if (node := read_besides(match)) is not None:
        return f"it reads {node.name} besides, which the op does not"
    return wrong(match)


def rewritten(graph: Graph, matches: list[Match]) -> tuple[Graph, dict[Match, str]]:
    """(a copy of the graph in which each match's op replaces its subgraph, match -> name of the new
    node). The graph given is not changed.
    """
    return _Rewriting(graph, matches).run()


class _Rewriting:
    """Makes one copy of a graph in which each match's op replaces its subgraph. Use it once, by
    `run`.
    """

    def __init__(self, graph: Graph, matches: list[Match]) -> None:
        self._source = graph
        self._matches = {node: match for match in matches for node in match.results}
        self._dropped = {node for match in matches for node in match.interior}
        self._apart = {match.apart for match in matches}
        self._graph = Graph()
        self._copies: dict[Node, Node] = {}
        self._views: dict[tuple[Node, str], Node] = {}
        self._names: dict[Match, str] = {}

    def run(self) -> tuple[Graph, dict[Match, str]]:
        """(the new graph, without dead code; match -> name of its new node)."""
        with warnings.catch_warnings():
            # sizes of the batch are expressions in our graphs
            warnings.filterwarnings("ignore", message="Raw Sym(Int|Float) value")
            for node in self._source.nodes:
                if node.op != "output" and (node in self._matches or node not in self._dropped):
                    self._copy(node)
        self._graph.output(tuple(self._copies[node] for node in output_nodes(self._source)))
        self._graph.eliminate_dead_code()
        self._graph.lint()
        return self._graph, self._names

    def _copy(self, node: Node) -> Node:
        """The node of the new graph for `node`. On the first call it is inserted, after those that
        it reads; a result of a match becomes its op.
        """
        if node not in self._copies:
            if node in self._matches:
                self._insert(self._matches[node])
            else:
                for source in node.all_input_nodes:
                    self._copy(source)
                new = self._copies[node] = self._graph.node_copy(node, self._copies.__getitem__)
                if node in self._apart:
                    new.target, new.args = without_bias(new)
                    new.meta["grad"] = any(arg.meta.get("grad") for arg in new.all_input_nodes)
        return self._copies[node]

    def _viewed(self, match: Match, name: str, node: Node) -> Node:
        """The node that the op of `match` reads as the operand called `name`: a view of the copy of
        `node`, inserted on the first call. Matches share equal views.
        """
        key = node, str(match.views.get(name, ()))  # sizes of the batch have no hash
        if key not in self._views:
            made: Node = viewed(match, name, self._copy(node), partial(call, self._graph, node))
            self._views[key] = made
        return self._views[key]

    def _insert(self, match: Match) -> None:
        result = match.results[0]
        copies = {name: self._viewed(match, name, node) for name, node in match.operands.items()}
        schema = [spec.name for spec in match.op._schema.arguments]
        last = max(schema.index(name) for name in copies)
        positional = tuple(copies.get(name) for name in schema[: last + 1])
        name = result.name if len(match.interior) == 1 else match.op._schema.name.split("::")[1]
        new = self._graph.create_node(
            "call_function", match.op, positional, dict(match.attributes), name=name
        )
        new.meta = dict(result.meta)
        new.meta["grad"] = any(node.meta.get("grad") for node in match.results)
        self._names[match] = new.name
        if match.rounded is not None:
            wide = torch.promote_types(match.rounded, torch.float32)
            new.meta["val"] = result.meta["val"].to(wide)
            new = call(self._graph, result, torch.ops.aten.to.dtype, new, match.rounded)
        if len(match.op._schema.returns) == 1:
            self._copies[result] = new
            return
        new.meta["val"] = [node.meta["val"] for node in match.results]
        for number, node in enumerate(match.results):
            item = self._graph.call_function(operator.getitem, (new, number))
            item.meta = dict(node.meta)
            self._copies[node] = item
