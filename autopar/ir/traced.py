"""A captured model: segments of ATen graphs, each structure held once.

Graphs are torch.fx objects; the annotations below are for type checkers only, so that reading this file needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import TYPE_CHECKING, Any

from autopar.ir.fusion import UNFUSED, Fusion

if TYPE_CHECKING:
    import torch.fx


MICRO_BATCH_SHARE = "micro_batch_share"
"""Name of the graph input that holds 1 / (number of micro-batches)."""


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """A parameter or buffer of the user's model.  Tied names are one entry: `name` is the first, `aliases` are the others.  `keeps_dtype`:
    half precision leaves a buffer as it is, since forward casts it to its own dtype before anything else."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # torch dtype without the prefix: 'float32'
    trainable: bool
    buffer: bool = False
    aliases: tuple[str, ...] = ()
    keeps_dtype: bool = False


@dataclass(frozen=True, slots=True)
class BlockClass:
    """One structure.  `graph` has a placeholder for each input, a get_attr node for each slot in `slots`, and returns a tuple.

    Every tensor node carries `meta['val']`, a fake tensor whose batch size is symbolic.  `picked` says whether recomputation of every k-th
    layer takes the segments of this class; None: layers were not counted off (`trace/deepen.py`).  `borrowed`: the slots whose parameters
    are, in each segment of the class, those of a slot of another segment, which is charged for them.  `is_layer`: segments of its structure
    repeat, though perhaps in another class.
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
    """Where a segment input comes from: model input `name`, or output `index` of an earlier segment."""

    segment: int = -1
    index: int = -1
    name: str = ""


@dataclass(frozen=True, slots=True)
class Segment:
    """One run of a block class: which parameter fills each slot, and where each input comes from."""

    name: str
    class_index: int
    parameters: tuple[str, ...]  # ParameterSpec names, one per slot
    inputs: tuple[Source, ...]


@dataclass(frozen=True, slots=True)
class StepValues:
    """Inputs of the graph that a step computes of its whole batch before the first forward.

    `local` maps this rank's rows to parts, which are added up over data-parallel ranks. `whole` maps
    these parts, the model inputs `rows`, gathered over the same ranks, and the buffers and constants
    `tensors` to the values `names`, of which `vals` are the fake tensors. A value with a dim of rows
    is dealt out as the batch is. `labels`: the place of the one that counts the labels of a
    cross-entropy, or -1. With `takes_share` the last name is `MICRO_BATCH_SHARE`.
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
        """Whether all parts are single numbers."""
        return all(not node.meta["val"].dim() for node in self.local.output_node().all_input_nodes)

    def with_share(self, val: Any) -> StepValues:
        """These and `MICRO_BATCH_SHARE`."""
        names, vals = (*self.names, MICRO_BATCH_SHARE), (*self.vals, val)
        return replace(self, names=names, vals=vals, takes_share=True)


@dataclass(frozen=True, slots=True)
class LossSplit:
    """How losses of micro-batches give that of their batch: `joins` is 'sum', 'mean', or '' if they
    do not, and `reason` says why not. `by_convention`: what is of each micro-batch all the same."""

    joins: str = "sum"
    reason: str = ""
    by_convention: tuple[str, ...] = ()


def not_split(split: LossSplit, what: str, rows: int) -> str:
    """Why a loss that does not split refuses micro-batches, and what to do."""
    return (
        f"autopar does not split {what}: {split.reason}, so that their mean would be another loss. Pin micro_batch={rows}, divide a sum "
        "over rows by what depends on labels, masks and constants alone, or pass allow_micro_batch_mean=True (--allow-micro-batch-mean) "
        "to train on the mean of micro-batch losses"
    )


@dataclass(frozen=True, slots=True)
class TracedModel:
    """The whole model.  The loss is output 0 of the last segment.

    `inputs` are the flat names of the model's tensor inputs, `input_vals` their fake tensors, `batch_symbol` the name of the
    symbolic batch size in every shape ('' if the model has no batch dim), `constants` tensors that capture lifted out of forward,
    `split` how losses of micro-batches go together, `step_values` what a step computes of its whole batch for that (None: nothing),
    `model_hash` the structure's hash.  `updates` says where the new values of the buffers that forward changes come from.
    Rows are dim 0 of the graph's inputs; `row_dims` says which dim of a user's tensor they are where that is another one.
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

    @property
    def graph_inputs(self) -> dict[str, Any]:
        """Fake tensors of all that graphs take: the user's inputs, then the step's values."""
        own = dict(zip(self.inputs, self.input_vals, strict=True))
        values = self.step_values
        return own if values is None else own | dict(zip(values.names, values.vals, strict=True))

    @property
    def layers(self) -> list[int]:
        """The segments that a pipeline deals to its stages: those of structures that repeat, or all if none does."""
        found = [
            number
            for number, segment in enumerate(self.segments)
            if self.classes[segment.class_index].is_layer
        ]
        return found or list(range(len(self.segments)))


def per_model(most: int) -> Callable[[Callable], Callable]:
    """A function of a traced model (and of hashable arguments) that remembers its latest `most` results.

    Models are told apart by identity: nobody changes one.
    """

    def decorate(function: Callable) -> Callable:
        known: dict[
            tuple, tuple[TracedModel, Any]
        ] = {}  # the model with the result, so that its id is nobody else's

        @wraps(function)
        def remembering(traced: TracedModel, *args: Any) -> Any:
            key = id(traced), *args
            latest = known.pop(key, None)
            known[key] = latest or (traced, function(traced, *args))
            if len(known) > most:
                known.pop(next(iter(known)))
            return known[key][1]

        return remembering

    return decorate
