"""The costed graph that `annotate` hands to `solve`: plain numbers for one mesh, one micro-batch size and one axis to decide.

A model is a row of *segments*.  Segments of one structure share a *block class*; `AnnotatedModel.classes` holds each class once with
the number of its segments.  All segments of one class run the same strategies: that is the modelled space.

Inside a class everything is an `AnnotatedOp` that turns input values into output values.  Segment inputs, parameters and the
segment's results are ops too (kinds `input`, `parameter`, `output`), so a solver needs no special case for them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from autopar.ir.sharding import Layout


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor that autograd keeps from forward to backward.  Equal keys within a class are one tensor, counted once.

    A key is the name of the value, then how it is held: `up`, `up/dp/tp` (a shard), `up/tp:fp8`, `gelu:own` (of the op `gelu` alone).
    """

    key: str
    size_bytes: int

    @property
    def value(self) -> str:
        """The value whose tensor it is; that of `:own` is an op's, and no value of the graph."""
        return (
            self.key if self.key.endswith(":own") else self.key.partition("/")[0].partition(":")[0]
        )


def _check_parts(cost: Strategy | Conversion, *parts: tuple[str, str]) -> None:
    for part, whole in parts:
        if (seconds := getattr(cost, part)) and not 0 <= seconds <= getattr(cost, whole):
            raise ValueError(
                f"{part}={seconds} is a part of {whole}={getattr(cost, whole)}, so that it cannot be more, or below 0"
            )


# not frozen, which takes five times as long to make, and a search makes many thousands; nobody changes one
@dataclass(slots=True)
class Strategy:
    """One way to run an op over the axis, with its cost on one device.

    `forward_s` and `backward_s` are per micro-batch; `step_s` is once per step (gradient reduction, optimizer);
    `static_bytes` is resident all the time (parameter, gradient, optimizer state).

    What follows the saved tensors is about those seconds and adds none.  `..._comm_s` is the part of each that is communication which
    nothing inside the op hides.  `backward_weight_s` is the part of `backward_s` that computes a parameter's gradient, which a transfer of
    the input's gradient can hide behind (`rewrite/overlap.py`), `rerun_s` the part that runs the forward again.  `..._dispatch_s` is how
    long the host takes to issue the kernels: it runs ahead of the device, so that a stretch of ops lasts as long as the slower of the two
    sums, not the sum of the slower ones.  `gradient_bytes` and `optimizer_bytes` are the parts of `static_bytes` that are no parameter;
    `host_bytes` are in the host's memory, and no part of them.  `late` are the tensors that the gradient of a parameter is computed
    from: of those saved, and gradients of results.
    """

    name: str
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    forward_s: float = 0.0
    backward_s: float = 0.0
    step_s: float = 0.0
    static_bytes: int = 0
    saved: tuple[Saved, ...] = ()
    forward_comm_s: float = 0.0
    backward_comm_s: float = 0.0
    step_comm_s: float = 0.0
    backward_weight_s: float = 0.0
    rerun_s: float = 0.0
    forward_dispatch_s: float = 0.0
    backward_dispatch_s: float = 0.0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    host_bytes: int = 0
    late: tuple[Saved, ...] = ()

    def __post_init__(self) -> None:
        whole_s = self.backward_s
        if not (
            0 <= self.forward_comm_s <= self.forward_s
            and 0 <= self.step_comm_s <= self.step_s
            and 0 <= self.backward_comm_s <= whole_s
            and 0 <= self.backward_weight_s <= whole_s
            and 0 <= self.rerun_s <= whole_s
        ):
            _check_parts(
                self,
                ("forward_comm_s", "forward_s"),
                ("backward_comm_s", "backward_s"),
                ("step_comm_s", "step_s"),
                ("backward_weight_s", "backward_s"),
                ("rerun_s", "backward_s"),
            )

    def rerun(self) -> Strategy:
        """The same where backward runs the forward again."""
        return self.keeping(self.saved, again=True)

    def keeping(self, saved: tuple[Saved, ...], again: bool) -> Strategy:
        """The same where forward keeps `saved` instead, and backward runs the forward once more or not."""
        if not again:
            return replace(self, saved=saved)
        return replace(
            self,
            saved=saved,
            backward_s=self.backward_s + self.forward_s,
            backward_comm_s=self.backward_comm_s + self.forward_comm_s,
            backward_dispatch_s=self.backward_dispatch_s + self.forward_dispatch_s,
            rerun_s=self.forward_s,
        )


@dataclass(frozen=True, slots=True)
class AnnotatedOp:
    """An op, the values it reads and writes (keys of `BlockClass.values`), and its strategies.

    `over_dp`: what it reads travels over dp before, which is in the seconds of every strategy.
    """

    name: str
    kind: str  # 'input' | 'parameter' | 'output' | 'op'
    target: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    strategies: tuple[Strategy, ...]
    over_dp: bool = False

    @property
    def follows_dp(self) -> bool:
        """Whether what it takes differs between meshes that differ in dp alone, where all other calls take the same."""
        return self.kind == "parameter" or self.over_dp

    def __post_init__(self) -> None:
        if not self.strategies:
            raise ValueError(f"op {self.name} ({self.target}) has no strategy")
        for s in self.strategies:
            if len(s.inputs) != len(self.inputs) or len(s.outputs) != len(self.outputs):
                raise ValueError(
                    f"strategy {s.name} of op {self.name}: {len(s.inputs)} input layouts for {len(self.inputs)} inputs,"
                    f" {len(s.outputs)} output layouts for {len(self.outputs)} outputs"
                )

    def strategy(self, name: str) -> Strategy:
        """The strategy of a name.  KeyError if there is none."""
        for s in self.strategies:
            if s.name == name:
                return s
        raise KeyError(
            f"op {self.name} has no strategy {name!r}; it has {[s.name for s in self.strategies]}"
        )


@dataclass(slots=True)  # not frozen, as strategies are not
class Conversion:
    """Cost on one device, per micro-batch, of changing a value's layout; backward included.  `..._comm_s` is the part of each that is
    communication: all of a collective, nothing of a local move.  `rerun_s` is the part of `backward_s` that runs the forward again."""

    forward_s: float
    backward_s: float
    forward_comm_s: float = 0.0
    backward_comm_s: float = 0.0
    rerun_s: float = 0.0

    def __post_init__(self) -> None:
        whole_s = self.backward_s
        if not (
            0 <= self.forward_comm_s <= self.forward_s
            and 0 <= self.backward_comm_s <= whole_s
            and 0 <= self.rerun_s <= whole_s
        ):
            _check_parts(
                self,
                ("forward_comm_s", "forward_s"),
                ("backward_comm_s", "backward_s"),
                ("rerun_s", "backward_s"),
            )

    def rerun(self) -> Conversion:
        """The same where backward runs the forward again."""
        backward_s, backward_comm_s = (
            self.backward_s + self.forward_s,
            self.backward_comm_s + self.forward_comm_s,
        )
        return Conversion(
            self.forward_s, backward_s, self.forward_comm_s, backward_comm_s, self.forward_s
        )


@dataclass(frozen=True, slots=True)
class AnnotatedValue:
    """A tensor inside a class.  `conversions` prices every pair of different layouts that its producer and consumers can ask for;
    a pair that is not listed is impossible."""

    name: str
    size_bytes: (
        int  # whole tensor on this data-parallel rank, before sharding over the decided axis
    )
    conversions: dict[tuple[Layout, Layout], Conversion]


@dataclass(frozen=True, slots=True)
class AnnotatedBlock:
    """One block class: `ops` in topological order, `count` segments of it in the model.

    With `recompute` only the class' inputs stay saved between forward and backward, which begins by running the forward again (that is in
    the `backward_s` of strategies and conversions).  Inputs that are one value for all segments are kept once, by the last segment: here
    they take no `input_bytes`.  `is_layer`: it is one of several classes of one structure, so that its segments are blocks however few.
    `workspace_bytes` is what backward of a segment needs at its fullest moment besides what forward keeps.
    """

    name: str
    count: int
    ops: tuple[AnnotatedOp, ...]
    values: dict[str, AnnotatedValue]
    inputs: tuple[str, ...]  # names of the 'input' ops, in order; each writes one value
    # names of the 'output' ops, in order; each reads one value and has no outputs
    outputs: tuple[str, ...]
    recompute: bool = False
    # input op -> layout -> bytes kept when recomputing
    input_bytes: dict[str, dict[Layout, int]] = field(default_factory=dict)
    workspace_bytes: int = 0
    # as `input_bytes`, of those that are one for all segments
    common_bytes: dict[str, dict[Layout, int]] = field(default_factory=dict)
    is_layer: bool = False

    def message_bytes(self, name: str, layout: Layout) -> int:
        """Bytes of an input where another rank sends it."""
        return self.common_bytes.get(name, self.input_bytes[name])[layout]

    def __post_init__(self) -> None:
        known = {op.name: op.kind for op in self.ops}
        for name, kind in [(n, "input") for n in self.inputs] + [
            (n, "output") for n in self.outputs
        ]:
            if known.get(name) != kind:
                raise ValueError(f"block {self.name}: {name!r} is not an op of kind {kind!r}")


@dataclass(frozen=True, slots=True)
class BoundaryEdge:
    """`count` times, output `source_output` of a segment of class `source` feeds input `target_input` of a segment of class `target`.

    The layout may change on the way, at the price that `conversions` lists (made once per edge).
    """

    source: int
    source_output: int
    target: int
    target_input: int
    count: int
    conversions: dict[tuple[Layout, Layout], Conversion]


@dataclass(frozen=True, slots=True)
class PipelineSetting:
    """How stages run.  A message between neighbouring stages takes `hop_latency_s` and `hop_s_per_byte` for each byte."""

    ranks: int
    stages_per_rank: int
    schedule: str
    hop_s_per_byte: float
    hop_latency_s: float
    keeps_outputs: bool = False  # what a stage has sent stays until its backward


@dataclass(frozen=True, slots=True)
class Shared:
    """A tensor that several segments read as a parameter: (segment, parameter op) of those whose class pays for it, mostly one, and of
    those that have another pay, whose strategies hold nothing and do nothing once a step.  A rank that has only some of these is charged
    what the first that pays is."""

    paying: tuple[tuple[int, str], ...]
    reading: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class AnnotatedModel:
    """Everything a solver needs to know about a model on one mesh with one micro-batch size.

    `ties` lists groups of (class index, parameter op name) that hold one tensor in some of their segments: they must get one layout.
    `shared` says which segments do, and who pays.  `fixed_s` and `fixed_bytes` are what no decision changes.  `last` is the class of the
    last segment if no other has it: what it keeps is gone before backward reaches the others.  `segments` has the class of each segment,
    first to last; `reads` has, for each input of each segment, the segment and output that it reads (-1: an input of the model).
    """

    classes: tuple[AnnotatedBlock, ...]
    edges: tuple[BoundaryEdge, ...]
    ties: tuple[tuple[tuple[int, str], ...], ...]
    num_microbatches: int
    fixed_s: float = 0.0
    fixed_bytes: int = 0
    pipeline: PipelineSetting | None = None
    last: int | None = None
    segments: tuple[int, ...] = ()
    reads: tuple[tuple[tuple[int, int], ...], ...] = ()
    shared: tuple[Shared, ...] = ()

    @property
    def pipeline_setting(self) -> PipelineSetting:
        """How stages run.  Raises ValueError for a model without a pipeline."""
        if self.pipeline is None:
            raise ValueError("pipeline is None: the model has no pipeline")
        return self.pipeline
