"""Checks the values of a batch that index a tensor: token ids, class labels, positions.

A value out of range would fail in the middle of a step. On a GPU a device assertion would even end
the process. Such values are therefore looked for before the step.

An index is checked if it is computed from model inputs and constants alone, by cheap ops. Indices
that a model computes from its parameters are not checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node, map_arg
from torch.utils._pytree import tree_map

from autopar.errors import AutoparError
from autopar.ir.calls import argument, called_function, op_name
from autopar.ir.traced import Source, TracedModel
from autopar.ops.dims import at_batch, has_batch, is_symbolic
from autopar.ops.values import output_nodes

_INDEXED = {
    "aten::embedding": ("weight", "indices", 0, False),
    "aten::gather": ("self", "index", None, False),
    "aten::index_select": ("self", "index", None, False),
    "aten::scatter": ("self", "index", None, False),
    "aten::scatter_add": ("self", "index", None, False),
    "aten::index": ("self", "indices", None, True),
    "aten::cross_entropy_loss": ("self", "target", 1, False),
    "autopar::cross_entropy": ("logits", "target", 1, False),
    "autopar::linear_cross_entropy": ("weight", "target", 0, False),
    "aten::nll_loss": ("self", "target", 1, False),
    "aten::nll_loss_nd": ("self", "target", 1, False),
}
"""For each op with an index: the names of the indexed argument and of the index argument, the
indexed dim, and whether negative values count from the end. A dim of None means the argument
`dim`; for `index`, the position in the list.
"""
_CHEAP = frozenset(
    f"aten::{name}"
    for name in """
    slice select narrow reshape view flatten unflatten unsqueeze squeeze transpose t permute expand expand_as contiguous clone alias detach
    _to_copy to masked_fill where eq ne lt le gt ge constant_pad_nd pad cat stack add sub rsub mul neg abs floor_divide remainder clamp
    clamp_min clamp_max minimum maximum bitwise_and bitwise_or bitwise_not bitwise_xor logical_and logical_or logical_not logical_xor roll
    flip chunk split unbind cumsum
    """.split()
)
"""Integer ops that are cheap compared with a step, and depend on no sizes other than those of their
operands.
"""


@dataclass(frozen=True, slots=True)
class _Index:
    """A tensor of indices that the model computes: `node` in the segment with number `segment`. Its
    values must lie from `least` to `most`, or equal `ignored` (None: no exception). `what`
    describes what they index; `inputs` are the names of the model inputs that they are computed
    from.
    """

    segment: int
    node: Node
    least: int
    most: int
    ignored: int | None
    what: str
    inputs: tuple[str, ...]


class IndexLimits:
    """Checks the values of batches that index a tensor, such as token ids. `indices` has an
    `_Index` for each index that the model `traced` computes from its inputs and constants by cheap
    ops.
    """

    def __init__(self, traced: TracedModel) -> None:
        self.traced = traced
        self._vals = dict(zip(traced.inputs, traced.input_vals, strict=True))
        self._origins: dict[tuple[int, Node], Source] = {}
        self._sources: dict[tuple[int, Node], frozenset[str] | None] = {}
        self.indices = tuple(self._found())

    def check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise AutoparError if a batch (`tensors`, by input name) has an index out of range. The
        message has the value and its limits. If an input contains the value itself, it also has
        the input and the row.

        On a GPU this waits for the device once. The check of a batch across ranks waits for it
        anyway.
        """
        values: dict[tuple[int, Node], Any] = {}
        rows = next(
            (
                t.shape[0]
                for name, t in tensors.items()
                if has_batch(self._vals.get(name)) and t.dim()
            ),
            1,
        )
        outside = []
        for index in self.indices:
            found = self._value(index.segment, index.node, tensors, values, rows)
            wrong = (found < index.least) | (found > index.most)
            outside.append(
                (wrong if index.ignored is None else wrong & (found != index.ignored)).any()
            )
        if outside and bool(torch.stack(outside).any()):
            number = next(number for number, wrong in enumerate(outside) if bool(wrong))
            raise AutoparError(self._words(self.indices[number], tensors, values))

    def _words(
        self,
        index: _Index,
        tensors: Mapping[str, torch.Tensor],
        values: Mapping[tuple[int, Node], Any],
    ) -> str:
        found = values[index.segment, index.node]
        wrong = (found < index.least) | (found > index.most)
        value = int(found[wrong if index.ignored is None else wrong & (found != index.ignored)][0])
        name = next((name for name in index.inputs if bool((tensors[name] == value).any())), None)
        limit = f"{index.what}, which takes {index.least} to {index.most}"
        limit += f" or {index.ignored}, which is ignored" if index.ignored is not None else ""
        advice = "correct the batch, or make the model as large as its values need"
        if name is None:
            return f"batch entries {', '.join(index.inputs)} give {value} as an index of {limit}; {advice}"
        place = (tensors[name] == value).nonzero()[0].tolist() if tensors[name].dim() else []
        where = (
            f" in row {place[0]}" + (f" at {', '.join(map(str, place[1:]))}" if place[1:] else "")
            if place
            else ""
        )
        return f"batch entry {name!r} holds {value}{where}, an index of {limit}; {advice}"

    # ------------------------------------------------------------------------------------------------ what there is to check

    def _found(self) -> Any:
        for number, segment in enumerate(self.traced.segments):
            for node in self.traced.classes[segment.class_index].graph.nodes:
                if op_name(node) in _INDEXED:
                    yield from self._of_call(number, node)

    def _of_call(self, number: int, node: Node) -> Any:
        table, indices, dim, signed = _INDEXED[op_name(node)]
        indexed, given = argument(node, table), argument(node, indices)
        parts: list[tuple[int | None, Any]] = (
            list(enumerate(given)) if isinstance(given, list | tuple) else [(None, given)]
        )
        for place, index in parts:
            if (
                not isinstance(index, Node)
                or not isinstance(index.meta.get("val"), torch.Tensor)
                or _is_other(index.meta["val"])
            ):
                continue  # a mask, or probabilities
            shape, inputs = indexed.meta["val"].shape, self._inputs_of(number, index)
            along = (
                place
                if place is not None
                else argument(node, "dim")
                if dim is None
                else min(dim, len(shape) - 1)
            )
            if not inputs or not shape or is_symbolic(shape[along]):
                continue
            size = int(shape[along])
            ignored = argument(node, "ignore_index") if indices == "target" else None
            what = self._words_of(number, node, indexed, size)
            yield _Index(
                segment=number,
                node=index,
                least=-size if signed else 0,
                most=size - 1,
                ignored=ignored,
                what=what,
                inputs=tuple(sorted(inputs)),
            )

    def _words_of(self, number: int, node: Node, indexed: Node, size: int) -> str:
        segment = self.traced.segments[number].name
        if op_name(node).endswith(("_loss", "_nd")):
            return f"the {size} classes of {node.name} in {segment}"
        owner = self._held(number, indexed)
        return (
            f"the {size} rows of {owner}"
            if owner
            else f"the {size} entries that {node.name} of {segment} reads"
        )

    def _inputs_of(self, number: int, node: Node) -> frozenset[str] | None:
        """Names of the model inputs (not floats) from which a node of segment `number` is computed
        by cheap ops. Empty for a constant. None if it depends on anything else, such as a parameter
        or a float input. Results are cached.
        """
        key = number, node
        if key not in self._sources:
            self._sources[key] = self._sources_of(number, node)
        return self._sources[key]

    def _sources_of(self, number: int, node: Node) -> frozenset[str] | None:
        source = self._source(number, node)
        if source is not None:
            if source.name:
                val = self._vals.get(source.name)
                return (
                    frozenset([source.name])
                    if val is not None and not val.is_floating_point()
                    else None
                )
            return self._inputs_of(source.segment, self._result(source))
        if node.op == "get_attr":
            return frozenset() if self._constant(number, node) is not None else None
        if node.op != "call_function" or (
            op_name(node) not in _CHEAP and "getitem" not in str(node.target)
        ):
            return None
        parts = [self._inputs_of(number, part) for part in node.all_input_nodes]
        known = [part for part in parts if part is not None]
        return frozenset().union(*known) if known and len(known) == len(parts) else None

    def _source(self, number: int, node: Node) -> Source | None:
        """Where a placeholder of segment `number` gets its value: a model input, or a result of
        another segment. None for other nodes.
        """
        if node.op != "placeholder":
            return None
        key = number, node
        if key not in self._origins:
            segment = self.traced.segments[number]
            placeholders = (
                n
                for n in self.traced.classes[segment.class_index].graph.nodes
                if n.op == "placeholder"
            )
            self._origins.update(
                ((number, n), source)
                for n, source in zip(placeholders, segment.inputs, strict=True)
            )
        return self._origins[key]

    def _result(self, source: Source) -> Node:
        graph = self.traced.classes[self.traced.segments[source.segment].class_index].graph
        return output_nodes(graph)[source.index]

    def _held(self, number: int, node: Node) -> str:
        """Name of the parameter, buffer or constant that a node of segment `number` reads; '' if
        the node reads none.
        """
        if node.op != "get_attr":
            return ""
        segment = self.traced.segments[number]
        slots = self.traced.classes[segment.class_index].slots
        return dict(zip(slots, segment.parameters, strict=True)).get(str(node.target), "")

    def _constant(self, number: int, node: Node) -> torch.Tensor | None:
        found = self.traced.constants.get(self._held(number, node))
        return found if isinstance(found, torch.Tensor) and not found.is_meta else None

    # -------------------------------------------------------------------------------------------------------- their values

    def _value(
        self,
        number: int,
        node: Node,
        tensors: Mapping[str, torch.Tensor],
        values: dict[tuple[int, Node], Any],
        rows: int,
    ) -> Any:
        """Compute a node of segment `number` for a batch of `rows` rows (`tensors`, by input name).
        `values` caches results by (segment, node).
        """
        key = number, node
        if key in values:
            return values[key]
        source = self._source(number, node)
        if source is not None and source.name:
            found = tensors[source.name]
        elif source is not None:
            found = self._value(source.segment, self._result(source), tensors, values, rows)
        elif (constant := self._constant(number, node)) is not None:
            found = constant.to(next(iter(tensors.values())).device)
        else:
            args, kwargs = map_arg(
                (node.args, node.kwargs),
                lambda part: self._value(number, part, tensors, values, rows),
            )
            args, kwargs = tree_map(
                lambda x: at_batch(x, rows) if isinstance(x, torch.SymInt) else x, (args, kwargs)
            )
            found = called_function(node)(
                *args, **{name: value for name, value in kwargs.items() if name != "device"}
            )
        values[key] = found
        return found


def _is_other(val: torch.Tensor) -> bool:
    return val.is_floating_point() or val.dtype == torch.bool or val.is_complex()


def check_shapes(tensors: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Raise AutoparError if a batch does not fit the fake inputs `expected` of a model: other
    names, or a tensor of another shape or dtype, or on the meta device. The number of rows is free,
    but must be equal in all tensors with rows. Any floating-point dtype fits another.
    """
    check_names(tensors, expected)
    for name, tensor in tensors.items():
        want = expected[name]
        if tensor.is_meta:
            raise AutoparError(f"batch entry {name!r} is on the meta device and has no values")
        sizes = ["batch" if is_symbolic(s) else int(s) for s in want.shape]
        if tensor.dim() != want.dim() or any(
            w != "batch" and w != s for w, s in zip(sizes, tensor.shape, strict=True)
        ):
            raise AutoparError(
                f"batch entry {name!r} has shape {tuple(tensor.shape)}; the model was planned for ({', '.join(map(str, sizes))})"
            )
        if tensor.dtype != want.dtype and not (
            tensor.is_floating_point() and want.is_floating_point()
        ):
            raise AutoparError(
                f"batch entry {name!r} has dtype {tensor.dtype}; the model was planned for {want.dtype}"
            )
    rows = {name: t.shape[0] for name, t in tensors.items() if has_batch(expected[name])}
    if len(set(rows.values())) > 1:
        held = ", ".join(f"{name} {number}" for name, number in rows.items())
        raise AutoparError(
            f"the batch's tensors have different numbers of rows: {held}; if one has no rows, plan with batch_dims={{its name: None}}"
        )


def check_names(
    tensors: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    plain: Mapping[str, Any] | None = None,
    planned: Mapping[str, Any] | None = None,
) -> None:
    """Raise AutoparError if a batch lacks tensors that a model was planned for, `expected`, or has
    others. `plain` and `planned` are Python values, by name, of the batch and of the example batch.
    """
    missing = [name for name in expected if name not in tensors]
    more = [name for name in tensors if name not in expected]
    if not missing and not more:
        return
    words = f"the batch has {', '.join(tensors)}; the model was planned for {', '.join(expected)}"
    if missing:
        sizes = ", ".join(
            "batch" if is_symbolic(size) else str(size) for size in expected[missing[0]].shape
        )
        if plain is not None and missing[0] in plain:
            words = f"batch entry {missing[0]!r} is {plain[missing[0]]!r}; the model was planned for a tensor"
        words += (
            f": give each batch {missing[0]!r}, of shape ({sizes}) and {expected[missing[0]].dtype}, such as ones for a mask that "
            "masks nothing, or plan with an example without it"
        )
    elif planned is not None and more[0] in planned:
        words += (
            f", and {more[0]!r} was {planned[more[0]]!r}: give an example in which it is a tensor"
        )
    else:
        words += f": leave out {more[0]!r}, or give an example with it"
    raise AutoparError(words)
