"""A captured model: segments of ATen graphs, each structure held once.

Graphs are torch.fx objects; the annotations below are for type checkers only, so that reading this file needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from math import inf
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch.fx


MEAN_COUNT = "mean_count"
"""Name of the graph input that holds (valid targets of the whole step) / (number of micro-batches)."""


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
class TokenCount:
    """What a mean over tokens divides by: `max(count, least) + more` of the whole batch.  `graph` counts from model inputs, and what it
    returns for the rows of several batches adds up.  `of_labels`: what a cross-entropy counts, not what a mask leaves."""

    graph: torch.fx.Graph
    least: float = -inf
    more: float = 0.0
    of_labels: bool = True

    def divisor(self, count: float) -> float:
        return max(count, self.least) + self.more


@dataclass(frozen=True, slots=True)
class TracedModel:
    """The whole model.  The loss is output 0 of the last segment.

    `inputs` are the flat names of the model's tensor inputs, `input_vals` their fake tensors, `batch_symbol` the name of the
    symbolic batch size in every shape ('' if the model has no batch dim), `constants` tensors that capture lifted out of forward,
    `count` what counts valid targets (None if the loss is not a token mean), `other_means` whether the loss has terms beside that are
    those of each micro-batch, `model_hash` the structure's hash.  `updates` says where the new values of the buffers that forward changes
    come from.
    """

    inputs: tuple[str, ...]
    input_vals: tuple[Any, ...]
    batch_symbol: str
    batch_hint: int
    classes: tuple[BlockClass, ...]
    segments: tuple[Segment, ...]
    parameters: dict[str, ParameterSpec]
    constants: dict[str, Any]
    count: TokenCount | None
    model_hash: str
    notes: tuple[str, ...] = ()
    updates: dict[str, Source] = field(default_factory=dict)
    other_means: bool = False

    @property
    def layers(self) -> list[int]:
        """The segments that a pipeline deals to its stages: those of structures that repeat, or all if none does."""
        found = [number for number, segment in enumerate(self.segments) if self.classes[segment.class_index].is_layer]
        return found or list(range(len(self.segments)))


def per_model(most: int) -> Callable[[Callable], Callable]:
    """A function of a traced model (and of hashable arguments) that remembers its latest `most` results.

    Models are told apart by identity: nobody changes one.
    """

    def decorate(function: Callable) -> Callable:
        known: dict[tuple, tuple[TracedModel, Any]] = {}  # the model with the result, so that its id is nobody else's

        @wraps(function)
        def remembering(traced: TracedModel, *args: Any) -> Any:
            key = id(traced), *args
            known[key] = known.pop(key, None) or (traced, function(traced, *args))
            if len(known) > most:
                known.pop(next(iter(known)))
            return known[key][1]

        return remembering

    return decorate
