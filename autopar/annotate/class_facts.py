"""Facts about a traced model and its block classes that hold under every setting, computed once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch.fx import Graph, Node

from autopar.annotate.attention_masks import windows
from autopar.annotate.fusion import FusedShare, added_gradients, fuse, heads_of
from autopar.annotate.recomputed import NO_RERUN, Rerun, rerun_of
from autopar.annotate.saved_tensors import SavedByOp, observe_saved
from autopar.ir.annotated import Shared
from autopar.ir.calls import op_name
from autopar.ir.fusion import LINEAR_LOSS
from autopar.ir.plan_checks import SELECTIVE_MODES
from autopar.ir.sharding import AxisLayout, Pattern
from autopar.ir.traced import BlockClass, TracedModel
from autopar.ops.dims import Call, OpDims, letters_of, locate
from autopar.ops.reach import (
    letter_patterns,
    parameter_readers,
    pattern_marks,
    reach_of,
    sequence_marks,
)
from autopar.ops.strategies import OpStrategy, strategies
from autopar.ops.values import operand_names, ops, result_names, value_grads, value_tensors
from autopar.request.software import Joins


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassPlace:
    """Where the segments of a class lie in the model.

    `from_model` has the positions of inputs that come from outside the model. `common` maps each
    input that is the same value in all segments to the (segment, output) that makes it. `has_loss`:
    the first output is the loss. `staying` are the parameters that the last segment reads too;
    under ZeRO-3 they stay gathered from its forward to its backward. `waiting` are the parameters
    of the last segment whose gradients wait while a segment of this class runs backward. `frozen`
    are the parameters, not buffers, that no segment trains.
    """

    index: int
    count: int  # segments
    from_model: frozenset[int]
    common: dict[str, tuple[int, int]]
    has_loss: bool
    staying: frozenset[str]
    waiting: tuple[torch.Tensor, ...]
    frozen: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassFacts:
    """Facts of one block class, by the names of its values and ops.

    `patterns` and `positions` are (dim, pattern) pairs of a value: dims that follow the sections of
    fused projections, and dims that are positions of sequences. `weights` are the parameters; the
    `borrowed` ones count their bytes in another class. `products` are the calls that only multiply by
    a parameter, and `heads` those directly before the loss or in it. `added` are the (op, operand) pairs where
    autograd sums gradients. `saved` and `roots` come from `observe_saved`, and `storage_dim`
    from `storage_dims`; `windows` has the sliding windows of causal attention. The functions `shares` (fused kernels), `rerun` (recompute
    modes) and `tensor_parallel` (strategies over tp) cache their results.
    """

    block: BlockClass
    place: ClassPlace
    dims: dict[str, OpDims | None]
    patterns: dict[str, frozenset[tuple[int, Pattern]]]
    positions: dict[str, frozenset[tuple[int, Pattern]]]
    windows: dict[str, int | None]
    tensors: dict[str, torch.Tensor]
    grads: dict[str, bool]
    weights: frozenset[str]
    borrowed: frozenset[str]
    products: frozenset[str]
    heads: set[str]
    added: set[tuple[str, int]]
    saved: dict[str, SavedByOp]
    roots: dict[str, str]
    storage_dim: Callable[[str, AxisLayout], int | None]
    shares: Callable[[Joins], dict[str, FusedShare]]
    rerun: Callable[[str, bool], Rerun]
    tensor_parallel: Callable[[Node, int, tuple[tuple[str, int], ...]], list[OpStrategy]]

    @property
    def graph(self) -> Graph:
        """The graph of one segment."""
        return self.block.graph

    @property
    def numel(self) -> int:
        """Number of elements of the parameters whose bytes this class counts."""
        return sum(self.tensors[name].numel() for name in self.weights - self.borrowed)

    def mask_of(self, node: Node) -> tuple[bool, int | None]:
        """(causal, sliding window) of an attention op; the window is None without one."""
        if node.name in self.windows:
            return True, self.windows[node.name]
        return bool(Call(node).arg("is_causal", False)), None


class ModelFacts:
    """Facts of one traced model.

    `classes` has the facts of each block class. `last` is the class of the last segment, if no
    other segment has that class. `segments` has the class of each segment; `reads` has the
    (segment, output) pairs that each segment reads. For `of_several`, `shared` and `ties` see
    `_shared`.
    """

    def __init__(self, traced: TracedModel) -> None:
        self.traced = traced
        self.reach = reach_of(traced)
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
        self.of_several, self.shared, self.ties = self._shared()
        self.classes = self._classes()

    def _classes(self) -> tuple[ClassFacts, ...]:
        patterns, seen = pattern_marks(self.reach), windows(self.traced)
        return tuple(
            _class_facts(
                self.traced.classes[place.index],
                place,
                self.reach.dims[place.index],
                patterns[place.index],
                self.positions[place.index],
                {name: window for (index, name), window in seen.items() if index == place.index},
            )
            for place in self._places()
        )

    def _places(self) -> list[ClassPlace]:
        """The place of each class, in the order of classes."""
        counts, common, staying = Counter(self.segments), self._common(), self._staying()
        frozen = self._frozen()
        from_model = {
            (index, position)
            for reads, index in zip(self.reads, self.segments, strict=True)
            for position, (segment, _) in enumerate(reads)
            if segment < 0
        }
        return [
            ClassPlace(
                index=index,
                count=counts[index],
                from_model=frozenset(position for own, position in from_model if own == index),
                common=common.get(index, {}),
                has_loss=self.segments[-1] == index,
                staying=_weights(block.graph)
                if index == self.last
                else frozenset(name for own, name in staying if own == index),
                waiting=() if index == self.last else self._tied_to_last(),
                frozen=frozenset(frozen[index]),
            )
            for index, block in enumerate(self.traced.classes)
        ]

    def _common(self) -> dict[int, dict[str, tuple[int, int]]]:
        """Inputs that are the same value for all segments of a repeated class: class -> input ->
        the (segment, output) that makes it.

        Examples are rotary tables, masks, and the encoder output that every decoder layer reads.
        Only values that the last repeated segment reads are included. Any other common value is
        counted for each reader, as if each had a copy.
        """
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
        """Tensors that several segments read, as three results.

        The first has the (segment, parameter node) readers of each tensor, in order. The second has
        the tensors of which a segment borrows another segment's copy. The third has the groups of
        (class, parameter node) that hold one tensor.
        """
        readers, shared, groups = parameter_readers(self.traced), [], set()
        borrowed = [_borrowed(block) for block in self.traced.classes]
        for places in readers.values():
            pays = [node not in borrowed[self.segments[number]] for number, node in places]
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

    def _staying(self) -> set[tuple[int, str]]:
        """The (class, parameter node) pairs whose tensor, in every segment of the class, is also
        read by the last segment.
        """
        end, counts = len(self.segments) - 1, Counter(self.segments)
        read = Counter(
            (self.segments[number], node)
            for places in self.of_several
            if places[-1][0] == end
            for number, node in places
        )
        return {place for place, count in read.items() if count == counts[place[0]]}

    def _frozen(self) -> list[set[str]]:
        """For each class, the parameter nodes that are frozen parameters in all of its segments."""
        found = [set(_weights(block.graph)) for block in self.traced.classes]
        for name, places in parameter_readers(self.traced).items():
            spec = self.traced.parameters.get(name)
            if spec is None or spec.buffer or spec.trainable:
                for number, node in places:
                    found[self.segments[number]].discard(node)
        return found

    def _tied_to_last(self) -> tuple[torch.Tensor, ...]:
        """The parameters of the class `last` that other classes hold too; () if there is no such
        class.
        """
        if self.last is None:
            return ()
        tied = {name for group in self.ties for place, name in group if place == self.last}
        graph = self.traced.classes[self.last].graph
        return tuple(node.meta["val"] for node in graph.nodes if node.name in tied)


def _class_facts(
    block: BlockClass,
    place: ClassPlace,
    dims: dict[str, OpDims | None],
    patterns: dict[str, frozenset[tuple[int, Pattern]]],
    positions: dict[str, frozenset[tuple[int, Pattern]]],
    windows: dict[str, int | None],
) -> ClassFacts:
    graph, grads, weights = block.graph, value_grads(block.graph), _weights(block.graph)
    saved, roots = observe_saved(graph)
    letters = {
        node.name: letter_patterns(own, node, patterns)
        for node in ops(graph)
        if (own := dims[node.name]) is not None
    }
    products = frozenset(
        node.name
        for node in ops(graph)
        if (own := dims[node.name]) is not None
        and own.contraction
        and op_name(node) != LINEAR_LOSS
        and not weights.isdisjoint(operand_names(node))
    )
    return ClassFacts(
        block=block,
        place=place,
        dims=dims,
        patterns=patterns,
        positions=positions,
        windows=windows,
        tensors=value_tensors(graph),
        grads=grads,
        weights=weights,
        borrowed=_borrowed(block),
        products=products,
        heads=heads_of(graph, dims),
        added=added_gradients(graph),
        saved=saved,
        roots=roots,
        storage_dim=storage_dims(graph, dims, roots),
        shares=cache(partial(fuse, graph, dims)),
        rerun=cache(partial(_rerun, block, saved, roots)),
        tensor_parallel=cache(partial(_tensor_parallel, dims, letters, grads)),
    )


def _rerun(
    block: BlockClass, saved: dict[str, SavedByOp], roots: dict[str, str], mode: str, compiled: bool
) -> Rerun:
    """What backward runs again under a recompute mode; `NO_RERUN` if the mode is not selective or
    does not apply to this class.
    """
    if mode not in SELECTIVE_MODES or (mode in ("gather", "op") and not block.is_layer):
        return NO_RERUN
    return rerun_of(mode, block.graph, saved, roots, compiled)


def _tensor_parallel(
    dims: dict[str, OpDims | None],
    letters: dict[str, dict[str, frozenset[Pattern]]],
    grads: dict[str, bool],
    node: Node,
    tp: int,
    taken: tuple[tuple[str, int], ...],
) -> list[OpStrategy]:
    """The strategies of an op over `tp` ranks. `taken` says by how much other axes have already
    divided each letter. Raises ValueError if the op has no rule.
    """
    own = dims[node.name]
    if own is None:
        raise ValueError(f"{node.name} ({node.target}) has no letters that tp could shard")
    read, written = (
        [grads[name] for name in names(node)] for names in (operand_names, result_names)
    )
    return strategies(
        own, tp, read, written, kind="tp", patterns=letters[node.name], taken=dict(taken)
    )


def _weights(graph: Graph) -> frozenset[str]:
    return frozenset(node.name for node in graph.nodes if node.op == "get_attr")


def _borrowed(block: BlockClass) -> frozenset[str]:
    """Names of the parameter nodes whose bytes another class counts, because the tensor is tied."""
    return frozenset(
        node.name
        for node in block.graph.nodes
        if node.op == "get_attr" and node.target in block.borrowed
    )


def storage_dims(
    graph: Graph, dims: Mapping[str, OpDims | None], roots: Mapping[str, str]
) -> Callable[[str, AxisLayout], int | None]:
    """A function (value, layout that shards it) -> the dim of the value that owns its storage. None
    if that value cannot be sharded alike.
    """
    makers = {name: (node, k) for node in ops(graph) for k, name in enumerate(result_names(node))}

    @cache
    def found(name: str, layout: AxisLayout) -> int | None:
        dim, rows, root = layout.dim, layout.pattern.rows, roots[name]
        while name != root:
            place = _before(*makers[name], dims, dim, rows)
            if place is None:
                return None
            name, dim, rows = place
        return dim

    return found


def _before(
    node: Node, k: int, dims: Mapping[str, OpDims | None], dim: int, rows: bool
) -> tuple[str, int, bool] | None:
    """The operand of a view, and which of its dims is sharded with a dim of result k. The third
    entry says whether positions of each batch row are sharded. None if no dim is.
    """
    view = dims[node.name]
    if view is None or not view.inputs:
        return None
    for letter in letters_of(view.outputs[k][dim]):
        after, before = locate(view.outputs[k], letter), locate(view.inputs[0], letter)
        if after is not None and before is not None and after[1].rows == rows:
            return operand_names(node)[0], before[0], before[1].rows
    return None
