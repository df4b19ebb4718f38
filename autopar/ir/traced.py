"""A captured model: segments of ATen graphs, with each structure stored once.

Graphs are torch.fx objects. The type annotations are not evaluated, so importing this file needs no
torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import TYPE_CHECKING, Any, NewType, ParamSpec, TypeVar

from autopar.ir.fusion import UNFUSED, Fusion

if TYPE_CHECKING:
    import torch.fx


MICRO_BATCH_SHARE = "micro_batch_share"
"""Name of the graph input that holds 1 / (number of micro-batches)."""


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """Facts about a parameter or buffer of the user's model; it holds no values.

    Tied names are one entry: `name` is the first, `aliases` are the others. `keeps_dtype`: half
    precision does not convert this buffer, since forward casts it back to its own dtype first.
    `read_as_number`: forward read its value as a Python number, which the graph has now.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str  # torch dtype without the prefix: 'float32'
    trainable: bool
    buffer: bool = False
    aliases: tuple[str, ...] = ()
    keeps_dtype: bool = False
    read_as_number: bool = False


@dataclass(frozen=True, slots=True)
class BlockClass:
    """A block class: one structure, as a graph, that one or more segments (consecutive parts of the
    model) share.

    `graph` has a placeholder for each input, a get_attr node for each of `slots` (parameters), and
    returns a tuple. Every tensor node has `meta['val']`, a fake tensor whose batch size is
    symbolic. `picked` says whether `every-k` recomputation applies to the segments of this class;
    None means layers were not counted (`trace/deepen.py`). `borrowed` are the slots whose
    parameters another segment also holds and is charged for. `is_layer`: segments of this structure
    repeat, perhaps in another class.
    """

    name: str
    graph: torch.fx.Graph
    slots: tuple[str, ...]
    structure_hash: str
    picked: bool | None = None
    borrowed: frozenset[str] = frozenset()
    is_layer: bool = False


@dataclass(frozen=True, slots=True)
class Source:
    """A record of where a segment input comes from: output `index` of the earlier segment number
    `segment`, or, if `segment` is -1, the model input `name`. Its text, with the name of this class,
    is a part of `TracedModel.model_hash`.
    """

    segment: int = -1
    index: int = -1
    name: str = ""


@dataclass(frozen=True, slots=True)
class Segment:
    """One instance of a block class: which parameter fills each slot of its graph, and which
    `Source` each input reads. `class_index` indexes `TracedModel.classes`.
    """

    name: str
    class_index: int
    parameters: tuple[str, ...]  # ParameterSpec names, one per slot
    inputs: tuple[Source, ...]


@dataclass(frozen=True, slots=True)
class StepValues:
    """How step values are computed: inputs of the graph that depend on the whole batch, such as its
    number of labels. Each step computes them once, before the first forward.

    Attributes:
        names: names of the values, which are graph inputs.
        vals: their fake tensors.
        local: a graph from this rank's rows to parts, which are summed over data-parallel ranks.
        whole: a graph from the summed parts, the gathered `rows` and the `tensors` to the values. A
            value with a dim of rows is sharded like the batch.
        rows: model inputs that are gathered over data-parallel ranks.
        tensors: buffers and constants that `whole` reads.
        labels: index of the value that counts the labels of a cross-entropy, or -1.
        takes_share: whether the last name is `MICRO_BATCH_SHARE`.
    """

    names: tuple[str, ...]
    vals: tuple[Any, ...]
    local: torch.fx.Graph
    whole: torch.fx.Graph
    rows: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()
    labels: int = -1
    takes_share: bool = False

    @property
    def adds_up_numbers(self) -> bool:
        """Whether every output of `local`, which is summed over data-parallel ranks, is a single
        number.
        """
        return all(not node.meta["val"].dim() for node in self.local.output_node().all_input_nodes)

    def with_share(self, val: Any) -> StepValues:
        """A copy with one more value at the end: `MICRO_BATCH_SHARE`, 1 / (number of
        micro-batches), with the fake tensor `val`.
        """
        names, vals = (*self.names, MICRO_BATCH_SHARE), (*self.vals, val)
        return replace(self, names=names, vals=vals, takes_share=True)


@dataclass(frozen=True, slots=True)
class RowLimit:
    """How forward limits the norm of the rows that it reads of an embedding table (`max_norm`).
    Each step rescales them in the table itself before forward, as torch.embedding_renorm_ does.

    Attributes:
        name: the table, a parameter or buffer.
        rows: its number of rows.
        max_norm: the largest norm that a row may have.
        norm_type: which norm; 2.0 is the Euclidean one.
        ids: a graph from model inputs to the indices of the rows that are read.
    """

    name: str
    rows: int
    max_norm: float
    norm_type: float
    ids: torch.fx.Graph


@dataclass(frozen=True, slots=True)
class LossSplit:
    """How the losses of micro-batches combine to the loss of the batch. `joins` is 'sum', 'mean',
    or '' if they do not combine; then `reason` says why. `by_convention` lists quantities that are
    computed per micro-batch anyway, although that changes them. `least_rows` is how many rows a
    micro-batch must have over all data-parallel ranks: 2 where batch norm has one value a row.
    """

    joins: str = "sum"
    reason: str = ""
    by_convention: tuple[str, ...] = ()
    least_rows: int = 1


def not_split(split: LossSplit, what: str, rows: int) -> str:
    """The text of an error that refuses micro-batches: why the loss does not split, and what to do.
    `what` names the split that is refused. `rows` is the micro-batch that it advises: the whole
    batch of a rank.
    """
    return (
        f"autopar does not split {what}: {split.reason}, so that their mean would be another loss. Pin micro_batch={rows}, divide a sum "
        "over rows by what depends on labels, masks and constants alone, or pass allow_micro_batch_mean=True (--allow-micro-batch-mean) "
        "to train on the mean of micro-batch losses"
    )


ONE_VALUE = (
    "a micro-batch of one row has one value for each channel of a batch norm, which needs two in training, "
    "as in PyTorch"
)
"""The reason, as text, why a micro-batch must have `LossSplit.least_rows` rows."""


@dataclass(frozen=True, slots=True)
class TracedModel:
    """The whole captured model, as data. The loss is output 0 of the last segment.

    Attributes:
        inputs: flat names of the model's tensor inputs.
        input_vals: their fake tensors.
        batch_symbol: name of the symbolic batch size in every shape; '' if the model has no batch
            dim.
        batch_hint: the number of rows with which it was captured.
        classes: the block classes: each structure of segments once.
        segments: the segments (consecutive parts of the model), in order.
        parameters: parameters and buffers by name.
        constants: tensors that capture lifted out of forward, by name.
        split: how losses of micro-batches combine.
        step_values: what a step computes of its whole batch (None: nothing).
        model_hash: a hash of the structure.
        notes: remarks of the capture for the user.
        updates: by name of a buffer that forward changes, the source of its new value.
        fusion: which subgraphs became fused ops.
        row_dims: by input, the dim of a user's tensor that has the rows, where it is not dim 0. Rows are
            dim 0 of the graph's inputs.
        row_limits: the embedding tables whose rows a step rescales before forward.
        together: how many consecutive rows of the user's batch are one row of the graph, such as
            the two answers of a pair. They are in dim 1 of the graph's inputs if they are several.
        plain: Python values of the example batch by flat name, with which forward was captured.
        precision: the precision in which it was captured; '' is the model's own dtypes.
    """

    inputs: tuple[str, ...]
    input_vals: tuple[Any, ...]
    batch_symbol: str
    batch_hint: int
    classes: tuple[BlockClass, ...]
    segments: tuple[Segment, ...]
    parameters: dict[str, ParameterSpec]
    constants: dict[str, Any]
    split: LossSplit
    step_values: StepValues | None
    model_hash: str
    notes: tuple[str, ...] = ()
    updates: dict[str, Source] = field(default_factory=dict)
    fusion: Fusion = UNFUSED
    row_dims: dict[str, int] = field(default_factory=dict)
    row_limits: tuple[RowLimit, ...] = ()
    together: int = 1
    plain: dict[str, Any] = field(default_factory=dict)
    precision: str = ""

    @property
    def graph_inputs(self) -> dict[str, Any]:
        """Fake tensors of all graph inputs by name: the user's inputs, then the step values."""
        own = dict(zip(self.inputs, self.input_vals, strict=True))
        values = self.step_values
        return own if values is None else own | dict(zip(values.names, values.vals, strict=True))

    @property
    def layers(self) -> list[int]:
        """Indices of the segments that a pipeline distributes over its stages: those of repeated
        structures, or all if none repeats.
        """
        found = [
            number
            for number, segment in enumerate(self.segments)
            if self.classes[segment.class_index].is_layer
        ]
        return found or list(range(len(self.segments)))


_Asked = ParamSpec("_Asked")
_Found = TypeVar("_Found")
_Function = Callable[_Asked, _Found]


def per_model(most: int) -> Callable[[_Function[_Asked, _Found]], _Function[_Asked, _Found]]:
    """A decorator for functions of a traced model and further hashable arguments. It
    caches the `most` results that were used last.

    Models are compared by identity, which is safe because a traced model is never modified.
    """

    def decorate(function: Callable[_Asked, _Found]) -> Callable[_Asked, _Found]:
        # the model with the result, so that its id is nobody else's
        known: dict[tuple[Any, ...], tuple[Any, _Found]] = {}

        @wraps(function)
        def remembering(*asked: _Asked.args, **named: _Asked.kwargs) -> _Found:
            key = id(asked[0]), *asked[1:], *named.items()
            latest = known.pop(key, None)
            known[key] = latest or (asked[0], function(*asked, **named))
            if len(known) > most:
                known.pop(next(iter(known)))
            return known[key][1]

        return remembering

    return decorate


PreparedModel = NewType("PreparedModel", TracedModel)
"""A model with the fused ops and the marked layers of a plan or a search, made by
`planning.model_facts.prepare_model`. Prices are of these alone, so forgetting it is an error of
types and not another price.
"""
