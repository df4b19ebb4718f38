"""What is known of the block classes of a traced model whatever the setting, computed once."""

from __future__ import annotations

from collections import Counter
from functools import cache

from torch.fx import Node

from autopar.annotate.attention_masks import windows
from autopar.annotate.fusion import added_gradients, fuse, heads_of
from autopar.annotate.recomputed import NOTHING, Rerun, rerun_of
from autopar.annotate.saved_tensors import observe_saved
from autopar.annotate.setting import Setting
from autopar.ir.annotated import Shared
from autopar.ir.plan_checks import SELECTIVE_MODES
from autopar.ir.traced import TracedModel
from autopar.ops.dims import Call
from autopar.ops.reach import (
    letter_patterns,
    parameter_readers,
    pattern_marks,
    reach_of,
    sequence_marks,
)
from autopar.ops.strategies import OpStrategy, strategies
from autopar.ops.values import operand_names, ops, result_names, value_grads, value_tensors


class ClassFacts:
    """Facts of the block classes of one traced model, each a list with one entry a class.

    `last` is the class of the last segment, if that segment is its only one; `segments` and `reads` are the class and the
    (segment, output) that each segment reads.  `common`, `shared`, `of_several` and `ties` are described where they are made.
    """

    def __init__(self, traced: TracedModel) -> None:
        self.traced = traced
        self.saved = [observe_saved(block.graph) for block in traced.classes]
        self._reruns: dict[tuple[int, str, bool], Rerun] = {}
        self.reach = reach_of(traced)
        self.patterns = pattern_marks(self.reach)
        self.letter_patterns = [
            {
                node.name: letter_patterns(dims, node, marks)
                for node in ops(block.graph)
                if (dims := found[node.name]) is not None
            }
            for block, found, marks in zip(
                traced.classes, self.reach.dims, self.patterns, strict=True
            )
        ]
        self.windows = windows(traced)
        self.tensors, self.grads = (
            [look(block.graph) for block in traced.classes] for look in (value_tensors, value_grads)
        )
        self.heads = [
            heads_of(block.graph, found)
            for block, found in zip(traced.classes, self.reach.dims, strict=True)
        ]
        self.added = [added_gradients(block.graph) for block in traced.classes]
        self.positions = sequence_marks(traced, self.reach)
        last = traced.segments[-1].class_index
        self.last: int | None = (
            last if sum(segment.class_index == last for segment in traced.segments) == 1 else None
        )
        self.segments = tuple(segment.class_index for segment in traced.segments)
        self.reads = tuple(
            tuple((source.segment, source.index) for source in segment.inputs)
            for segment in traced.segments
        )
        self.common = self._common()
        self._borrowed = [
            {n.name for n in block.graph.nodes if n.op == "get_attr" and n.target in block.borrowed} for block in traced.classes
        ]  # fmt: skip
        self.of_several, self.shared, self.ties = self._shared()
        self._staying = self._read_last()
        self.tensor_parallel = cache(self._tensor_parallel)
        self.shares = cache(
            lambda index, joins: fuse(traced.classes[index].graph, self.reach.dims[index], joins)
        )

    def _common(self) -> dict[int, dict[str, tuple[int, int]]]:
        """Inputs of classes that repeat which are one value for all their segments: class -> input -> (segment, output) it is.  Rotary
        tables are, masks, and what an encoder gives its decoder.  Only what is read to the last of the segments that repeat: whatever
        else is common ends in the middle of a pipeline, and counts for each of its readers, as if they had copies."""
        found: dict[int, dict[str, tuple[int, int]]] = {}
        if self.last is None:
            return found
        end = max(
            (
                number
                for number, index in enumerate(self.segments)
                if self.traced.classes[index].is_layer
            ),
            default=-1,
        )
        last_read = {source: number for number, reads in enumerate(self.reads) for source in reads}
        for index, block in enumerate(self.traced.classes):
            readers = [
                reads for reads, own in zip(self.reads, self.segments, strict=True) if own == index
            ]
            for k, node in enumerate(n for n in block.graph.nodes if n.op == "placeholder"):
                sources = {reads[k] for reads in readers}
                if (
                    len(readers) > 1
                    and len(sources) == 1
                    and (source := sources.pop())[0] >= 0
                    and last_read[source] >= end
                ):
                    found.setdefault(index, {})[node.name] = source
        return found

    def _shared(
        self,
    ) -> tuple[
        tuple[list[tuple[int, str]], ...],
        tuple[Shared, ...],
        tuple[tuple[tuple[int, str], ...], ...],
    ]:
        """(segment, parameter node) of tensors that several segments read, first to last; those of which some segment borrows another's;
        and the groups of (class, parameter node) that hold one."""
        readers, shared, groups = parameter_readers(self.traced), [], set()
        for places in readers.values():
            pays = [self.carries(self.segments[number], node) for number, node in places]
            if not all(pays):
                own, others = (
                    tuple(place for place, pay in zip(places, pays, strict=True) if pay == which)
                    for which in (True, False)
                )
                shared.append(Shared(own, others))
            if len(group := {(self.segments[number], node) for number, node in places}) > 1:
                groups.add(tuple(sorted(group)))
        return (
            tuple(places for places in readers.values() if places[0][0] < places[-1][0]),
            tuple(shared),
            tuple(sorted(groups)),
        )

    def rerun(self, index: int, setting: Setting, repeated: bool) -> Rerun:
        """What backward of a class runs again under a selective mode; `repeated`: whether the class is a layer."""
        mode, compiled = setting.recompute, setting.software.compiled
        if mode not in SELECTIVE_MODES or (mode == "op" and not repeated):
            return NOTHING
        if (index, mode, compiled) not in self._reruns:
            self._reruns[index, mode, compiled] = rerun_of(
                mode, self.traced.classes[index].graph, *self.saved[index], compiled
            )
        return self._reruns[index, mode, compiled]

    def _tensor_parallel(
        self, index: int, node: Node, tp: int, taken: tuple[tuple[str, int], ...]
    ) -> list[OpStrategy]:
        """The strategies of an op over tp; `taken`: by how much other axes have divided a letter."""
        flows = (
            [self.grads[index][name] for name in names(node)]
            for names in (operand_names, result_names)
        )
        return strategies(
            self.reach.dims[index][node.name],
            tp,
            *flows,
            "tp",
            self.letter_patterns[index][node.name],
            dict(taken),
        )

    def carries(self, index: int, node: str) -> bool:
        """Whether a parameter node is one that counts the bytes of its (perhaps tied) tensor."""
        return node not in self._borrowed[index]

    def stays(self, index: int, node: str) -> bool:
        """Whether the last segment reads what each segment of a class has as a parameter, so that under ZeRO 3 it is there from its forward
        to backward."""
        return index == self.last or (index, node) in self._staying

    def _read_last(self) -> set[tuple[int, str]]:
        """The (class, parameter node) of which the last segment reads the tensor of each segment."""
        end, counts = len(self.segments) - 1, Counter(self.segments)
        read = Counter(
            (self.segments[number], node)
            for places in self.of_several
            if places[-1][0] == end
            for number, node in places
        )
        return {place for place, count in read.items() if count == counts[place[0]]}

    def tied(self, index: int) -> set[str]:
        """The parameter nodes of a class whose tensors other classes hold too."""
        return {name for group in self.ties for place, name in group if place == index}

    def mask_of(self, index: int, node: Node) -> tuple[bool, int | None]:
        """(causal, sliding window) of an attention op."""
        if (index, node.name) in self.windows:
            return True, self.windows[index, node.name]
        return bool(Call(node).arg("is_causal", False)), None
