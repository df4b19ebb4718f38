"""The annotated model, which `annotate` passes to `solve`: plain numbers for one mesh, one
micro-batch size and one axis to decide.

A model is a sequence of *segments*. Segments of one structure share a *block class*.
`AnnotatedModel.classes` holds each class once, with the number of its segments. All segments of a
class run the same strategies; this defines the search space.

Inside a class everything is an `AnnotatedOp` that turns input values into output values. Segment
inputs, parameters and segment results are ops too (kinds `input`, `parameter`, `output`), so a
solver needs no special case for them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from autopar.ir.sharding import AxisLayout


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor that autograd keeps from forward to backward. Equal keys within a class are one
    tensor, counted once.

    A key is the name of the value, followed by the form in which it is kept. Examples are `up`,
    `up/dp0/tp2` (a shard), `up/tp2:fp8`, and `gelu:own` (a private tensor of the op `gelu`).
    """

    key: str
    size_bytes: int

    @property
    def value(self) -> str:
        """The name of the graph value that is kept. For a private tensor of an op, the whole
        key.
        """
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
    """One way to run an op over the mesh axis that is decided (tp), with its cost on one device.

    Attributes:
        name: the name of the strategy.
        inputs: the layout of each operand.
        outputs: the layout of each result.
        forward_s: seconds of forward per micro-batch.
        backward_s: seconds of backward per micro-batch.
        step_s: seconds once per step: gradient reduction and optimizer.
        static_bytes: bytes that are always resident: parameter, gradient, optimizer state.
        saved: tensors that autograd keeps.
        forward_comm_s: the part of `forward_s` that is communication not hidden inside the op.
        backward_comm_s: the same part of `backward_s`.
        step_comm_s: the same part of `step_s`.
        backward_weight_s: the part of `backward_s` that computes a parameter's gradient.
            Communication of the input's gradient can overlap with it (`rewrite/overlap.py`).
        rerun_s: the part of `backward_s` that runs the forward again.
        forward_dispatch_s: seconds in which the host issues the kernels of forward. The host runs
            ahead of the device, so a sequence of ops takes the longer of two sums: host time, or
            device time.
        backward_dispatch_s: the same for backward.
        gradient_bytes: the part of `static_bytes` that is gradients.
        optimizer_bytes: the part of `static_bytes` that is optimizer state.
        host_bytes: bytes in host memory, not part of `static_bytes`.
        late: saved tensors and gradients of results from which a parameter's gradient is computed.
    """

    name: str
    inputs: tuple[AxisLayout, ...]
    outputs: tuple[AxisLayout, ...]
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
        """A copy of this strategy with the costs of recomputation: backward also runs the forward
        again. `saved` stays as it is.
        """
        return self.keeping(self.saved, again=True)

    def keeping(self, saved: tuple[Saved, ...], again: bool) -> Strategy:
        """A copy that keeps the tensors `saved` from forward to backward. If `again`, backward also
        runs the forward: `rerun_s` is `forward_s`, and seconds of forward are added to those of
        backward.
        """
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

    def gathering(self, again_s: float) -> Strategy:
        """This strategy if backward also gathers results over tp again, in `again_s` seconds."""
        if not again_s:
            return self
        return replace(
            self,
            backward_s=self.backward_s + again_s,
            backward_comm_s=self.backward_comm_s + again_s,
            rerun_s=self.rerun_s + again_s,
        )


@dataclass(frozen=True, slots=True)
class AnnotatedOp:
    """An op of a block class: the names of the values that it reads and writes (keys of
    `AnnotatedBlock.values`), and every strategy, with its cost.

    `kind` is 'input', 'parameter', 'output' or 'op'. `target` is the called op or the parameter's
    slot as text, or ''. `over_dp`: its inputs are communicated over dp first, which the seconds of
    every strategy include. Raises ValueError without strategies, or if a strategy has another
    number of layouts than the op has inputs or outputs.
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
        """Whether its cost may differ between meshes that differ only in dp: true of parameters,
        and of ops whose inputs are communicated over dp.
        """
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
        """The strategy called `name`. Raises KeyError if there is none."""
        for s in self.strategies:
            if s.name == name:
                return s
        raise KeyError(
            f"op {self.name} has no strategy {name!r}; it has {[s.name for s in self.strategies]}"
        )


@dataclass(slots=True)  # not frozen, as strategies are not
class Conversion:
    """Seconds on one device, per micro-batch, of changing the layout of a value, in forward and in
    backward.

    `forward_comm_s` and `backward_comm_s` are the communication in each: all of a collective,
    nothing of a local change. `rerun_s` is the part of `backward_s` that runs the forward again.
    """

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
        """A copy with the costs of recomputation: backward also runs the forward, so seconds of
        forward are added to those of backward, and `rerun_s` is `forward_s`.
        """
        backward_s, backward_comm_s = (
            self.backward_s + self.forward_s,
            self.backward_comm_s + self.forward_comm_s,
        )
        return Conversion(
            self.forward_s, backward_s, self.forward_comm_s, backward_comm_s, self.forward_s
        )

    def gathering(self, again_s: float) -> Conversion:
        """This conversion if backward also gathers its result over tp again, in `again_s`
        seconds.
        """
        return Conversion(
            self.forward_s,
            self.backward_s + again_s,
            self.forward_comm_s,
            self.backward_comm_s + again_s,
            self.rerun_s + again_s,
        )


@dataclass(frozen=True, slots=True)
class AnnotatedValue:
    """A tensor inside a block class: its name, its bytes on a data-parallel rank before tp shards
    it, and `conversions`. These map (layout, other layout) to the price of that change.

    There is one for every pair of different layouts that its producer and consumers can request. A
    pair that is missing is impossible.
    """

    name: str
    size_bytes: (
        int  # whole tensor on this data-parallel rank, before sharding over the decided axis
    )
    conversions: dict[tuple[AxisLayout, AxisLayout], Conversion]


@dataclass(frozen=True, slots=True)
class AnnotatedBlock:
    """One block class: a structure that `count` segments of the model have, with priced ops.

    `ops` are in topological order. With `recompute`, only the inputs of the class stay saved
    between forward and backward. Backward begins by running the forward again; its seconds are
    included in the `backward_s` of strategies and conversions. `input_bytes` and `common_bytes` map
    an input op to layout to bytes that are kept when recomputing. `common_bytes` has the inputs
    that are one value for all segments. The last segment keeps them once, so they are 0 in
    `input_bytes`. `is_layer`: the structure repeats in the model, perhaps in several classes, so
    its segments count as blocks even if they are few. `workspace_bytes` is what backward of a
    segment needs at its peak besides what forward keeps.
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
    input_bytes: dict[str, dict[AxisLayout, int]] = field(default_factory=dict)
    workspace_bytes: int = 0
    # as `input_bytes`, of those that are one for all segments
    common_bytes: dict[str, dict[AxisLayout, int]] = field(default_factory=dict)
    is_layer: bool = False

    def message_bytes(self, name: str, layout: AxisLayout) -> int:
        """Bytes of the input op `name` in `layout` when another rank sends it."""
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
    """An edge between segments of two block classes: output `source_output` of class `source` feeds
    input `target_input` of class `target`. The model has `count` such edges.

    `source` and `target` index `AnnotatedModel.classes`. `conversions` maps (layout of the output,
    layout of the input) to the price of that change, for one of the edges.
    """

    source: int
    source_output: int
    target: int
    target_input: int
    count: int
    conversions: dict[tuple[AxisLayout, AxisLayout], Conversion]


@dataclass(frozen=True, slots=True)
class PipelineSetting:
    """How the stages of a pipeline run: `ranks` ranks of `stages_per_rank` stages each, under the
    schedule `schedule`. A message between neighbouring stages takes `hop_latency_s`, plus
    `hop_s_per_byte` for each byte. With `keeps_outputs`, a stage keeps what it has sent until its
    backward. `sizes` has the number of layers of each stage; () means as even as possible. The
    host takes `host_slowdown` times as long as without messages.
    """

    ranks: int
    stages_per_rank: int
    schedule: str
    hop_s_per_byte: float
    hop_latency_s: float
    keeps_outputs: bool = False  # what a stage has sent stays until its backward
    sizes: tuple[int, ...] = ()  # layers of each stage; (): as even as possible
    host_slowdown: float = 1.0


@dataclass(frozen=True, slots=True)
class Shared:
    """A tensor that several segments read as a parameter, as two lists of (segment, parameter op).

    `paying`: readers whose class counts its costs, usually one. `reading`: readers whose strategies
    cost nothing. A rank with only readers of the second kind is charged the costs of the first
    paying one.
    """

    paying: tuple[tuple[int, str], ...]
    reading: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class AnnotatedModel:
    """Everything that a solver needs to know about a model, on one mesh with one micro-batch size.

    Attributes:
        classes: the block classes.
        edges: the edges between segments, grouped by class.
        ties: groups of (class index, parameter op) that hold one tensor in some segments. Each
            group must get one layout.
        num_microbatches: micro-batches of a step.
        fixed_s: seconds of a step that no decision changes.
        fixed_bytes: bytes that no decision changes.
        pipeline: how stages run, or None without a pipeline.
        last: the class of the last segment if no other segment has it. What it keeps is freed
            before backward reaches the others.
        segments: the class of each segment, first to last.
        reads: for each input of each segment, the (segment, output) that it reads; -1 means an
            input of the model.
        shared: which segments hold a tied tensor, and which of them pay for it.
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
        """The setting of the pipeline. Raises ValueError for a model without a pipeline."""
        if self.pipeline is None:
            raise ValueError("pipeline is None: the model has no pipeline")
        return self.pipeline
