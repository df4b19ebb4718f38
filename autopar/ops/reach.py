"""Follows dims through the whole model: which dims of values are the same data, by the letters of
ops.

Context parallelism shards every dim that is connected to the positions of attention. A fused
projection is sharded in the sections of the split that follows it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import Node

from autopar.ir.calls import is_attention
from autopar.ir.sharding import CONTIGUOUS, Pattern
from autopar.ir.traced import Source, TracedModel
from autopar.ops.dims import (
    Call,
    Letters,
    OpDims,
    compose,
    has_batch,
    letters_of,
    locate,
    located,
    wanted_of,
)
from autopar.ops.rules import op_dims
from autopar.ops.values import operand_names, ops, output_nodes, result_names, value_name

_Mark = tuple[int, str, int, Pattern]
"""A marked dim of a value: (class index, value, dim, pattern)."""

Marks = list[dict[str, frozenset[tuple[int, Pattern]]]]
"""The marked (dim, pattern) pairs of each value, for each class."""


@dataclass(frozen=True, slots=True)
class Reach:
    """Which dims of a traced model's values hold the same data, so that sharding one shards the
    other. Lists are by block class.

    `dims` has the dims of each op, by name (None without a rule). `terms` lists, for each value,
    the ops that touch it and the letters of their tensors. `edges` connects values of different
    classes that are one tensor.
    """

    dims: list[dict[str, OpDims | None]]
    # class -> value -> ops that touch it
    terms: list[dict[str, list[tuple[OpDims, Letters, list[tuple[str, Letters]]]]]]
    edges: dict[tuple[int, str], set[tuple[int, str]]]

    def spread(self, seeds: set[_Mark]) -> Marks:
        """By class and value, the (dim, pattern) pairs that hold the same data as a seed, the seeds
        included. A pattern says which elements of the dim each rank holds.
        """
        seen, stack = set(seeds), list(seeds)
        while stack:
            index, value, dim, pattern = stack.pop()
            found = {(*other, dim, pattern) for other in self.edges.get((index, value), ())}
            for dims, term, places in self.terms[index].get(value, ()):
                if dim < len(term):
                    found |= {
                        (index, *place) for place in _neighbours(dims, term, dim, pattern, places)
                    }
            stack += found - seen
            seen |= found
        result: list[dict[str, set]] = [defaultdict(set) for _ in self.dims]
        for index, value, dim, pattern in seen:
            result[index][value].add((dim, pattern))
        return [{value: frozenset(places) for value, places in found.items()} for found in result]


def _neighbours(
    dims: OpDims, term: Letters, dim: int, pattern: Pattern, places: list[tuple[str, Letters]]
) -> Iterator[tuple[str, int, Pattern]]:
    for letter in letters_of(term[dim]):
        wanted = wanted_of(located(term, letter)[1], pattern)
        if wanted is None or (
            not wanted.is_contiguous and (letter in dims.contiguous or letter in dims.even)
        ):
            continue
        for value, other in places:
            place = locate(other, letter)
            if place is None:
                continue
            combined = compose(place[1], wanted)
            if combined is not None:
                yield value, place[0], combined


def reach_of(traced: TracedModel) -> Reach:
    """The dims of a traced model's values and which of them hold the same data, by the op rules."""
    dims, terms = [], []
    for block in traced.classes:
        found: dict[str, OpDims | None] = {node.name: op_dims(node) for node in ops(block.graph)}
        touching = defaultdict(list)
        for node in ops(block.graph):
            rule = found[node.name]
            if rule is None:
                continue
            places = list(
                zip(
                    (*operand_names(node), *result_names(node)),
                    (*rule.inputs, *rule.outputs),
                    strict=True,
                )
            )
            for value, term in places:
                touching[value].append((rule, term, places))
        dims.append(found)
        terms.append(dict(touching))
    return Reach(dims, terms, _edges(traced))


def _edges(traced: TracedModel) -> dict[tuple[int, str], set[tuple[int, str]]]:
    """By (class index, value name), the values of other classes, or of the same, that are one
    tensor with it. These are an output and the inputs that read it, and a parameter of several
    classes.
    """
    edges: dict[tuple[int, str], set[tuple[int, str]]] = defaultdict(set)
    readers: dict[Source, list[tuple[int, str]]] = defaultdict(list)
    for segment in traced.segments:
        placeholders = [
            n for n in traced.classes[segment.class_index].graph.nodes if n.op == "placeholder"
        ]
        for source, node in zip(segment.inputs, placeholders, strict=True):
            readers[source].append((segment.class_index, node.name))
    for source, ends in readers.items():
        if source.segment >= 0:
            producer = traced.segments[source.segment].class_index
            node = output_nodes(traced.classes[producer].graph)[source.index]
            ends = [(producer, value_name(node)), *ends]
        for end in ends[1:]:
            edges[ends[0]].add(end)
            edges[end].add(ends[0])
    for readers_of in parameter_readers(traced).values():
        first, *others = dict.fromkeys(
            (traced.segments[number].class_index, node) for number, node in readers_of
        )
        for other in others:
            edges[first].add(other)
            edges[other].add(first)
    return edges


def parameter_readers(traced: TracedModel) -> dict[str, list[tuple[int, str]]]:
    """By name of a parameter, buffer or constant, the (segment number, node name) pairs that read
    it, first to last.
    """
    nodes = [
        {n.target: n.name for n in block.graph.nodes if n.op == "get_attr"}
        for block in traced.classes
    ]
    found: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for number, segment in enumerate(traced.segments):
        for slot, name in zip(
            traced.classes[segment.class_index].slots, segment.parameters, strict=True
        ):
            found[name].append((number, nodes[segment.class_index][slot]))
    return found


def pattern_marks(reach: Reach) -> Marks:
    """By class and value, the (dim, pattern) pairs that hold the same data as a split or a
    flattened dim. They are the ways to shard it other than contiguously, and some contiguous ones.
    """
    seeds: set[_Mark] = set()
    for index, terms in enumerate(reach.terms):
        for value, touching in terms.items():
            for _, term, _ in touching:
                for entry in term:
                    if entry.isalnum():
                        continue
                    for letter in letters_of(entry):
                        dim, pattern = located(term, letter)
                        if not pattern.is_contiguous:
                            seeds.add((index, value, dim, pattern))
    return reach.spread(seeds)


def letter_patterns(
    dims: OpDims, node: Node, marks: dict[str, frozenset[tuple[int, Pattern]]]
) -> dict[str, frozenset[Pattern]]:
    """By letter of an op with the dims `dims`, the patterns other than contiguous in which its
    operands or results can be sharded. `marks` has (dim, pattern) pairs by value. Other letters are
    left out.
    """
    found: dict[str, set[Pattern]] = defaultdict(set)
    for value, term in zip(
        (*operand_names(node), *result_names(node)), (*dims.inputs, *dims.outputs), strict=True
    ):
        for dim, pattern in marks.get(value, ()):
            for letter in letters_of(term[dim]) if dim < len(term) else ():
                wanted = wanted_of(located(term, letter)[1], pattern)
                if wanted is not None and not wanted.is_contiguous:
                    found[letter].add(wanted)
    return {letter: frozenset(patterns) for letter, patterns in found.items()}


def sequence_marks(traced: TracedModel, reach: Reach) -> Marks:
    """By class and value, the (dim, pattern) pairs that are positions of sequences. They are those
    of attention's queries, keys and values, dim 1 of integer inputs, and all that hold the same
    data.
    """
    seeds: set[_Mark] = set()
    for index, block in enumerate(traced.classes):
        for node in ops(block.graph):
            if is_attention(node):
                for value, tensor in list(
                    zip(operand_names(node), Call(node).tensors, strict=True)
                )[:3]:
                    seeds.add((index, value, tensor.dim() - 2, CONTIGUOUS))
    vals = traced.graph_inputs
    for segment in traced.segments:
        placeholders = [
            n for n in traced.classes[segment.class_index].graph.nodes if n.op == "placeholder"
        ]
        for source, node in zip(segment.inputs, placeholders, strict=True):
            val = vals.get(source.name)
            if val is not None and has_batch(val) and val.dim() > 1 and not val.is_floating_point():
                seeds.add((segment.class_index, node.name, 1, CONTIGUOUS))
    return reach.spread(seeds)
