"""The fields of a plan: choices, prediction and certificate."""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar_cost_models import splits_backward

from autopar.ir.fusion import UNFUSED, Fusion
from autopar.ir.mesh import MeshShape
from autopar.ir.sharding import AxisLayout

EDITED = "edited since it was planned: times, memory and the certificate are those of the plan before the edit"
"""The note on a plan whose file was edited after it was saved, and is still a valid plan."""

OUT_OF_TIME = "the time limit came first"
"""The reason of a candidate that a search did not finish."""


@dataclass(frozen=True, slots=True)
class AxisChoice:
    """How one op runs over one mesh axis: the strategy's name, and a layout for each operand and
    each result.
    """

    strategy: str
    inputs: tuple[AxisLayout, ...]
    outputs: tuple[AxisLayout, ...]


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """The choices for one block class: a structure that all `segments` (by name) share, so all run
    alike.

    `ops` maps op name -> mesh axis -> `AxisChoice`, for axes with more than one rank. `recompute`
    is 'none', 'full', or the name of the parts that backward runs again: 'gather', 'selective' or
    'op'.
    """

    name: str
    segments: tuple[str, ...]
    recompute: str  # 'none', 'full', or what of a block runs again ('selective', 'op')
    ops: dict[str, dict[str, AxisChoice]]


@dataclass(frozen=True, slots=True)
class Certificate:
    """What is proved about a plan.

    Attributes:
        status: 'optimal' or 'feasible'.
        objective_s: seconds of a step of this plan.
        bound_s: no plan of the search space has a shorter step than this, in seconds.
        gap: (time - bound) / time of the fastest plan.
        space: what was searched, in words.
        rules: the rules by which the candidates were listed, a dict each: `choice`, its `values` in words, and `why` there are no
            others.  () in files of earlier versions.
        meshes: one entry for each candidate: its mesh, micro-batch, ZeRO stage and recomputation, the outcome, the time and the reason.
        solve_time_s: seconds of the search.
        ledger: what the objective is made of, for `recheck/audit.py`.  It has an entry for each block, in order, and one for each edge
            between blocks on which a layout changes.
        tolerance: the fraction by which the plan may take longer than the fastest, to be simpler.  0 if simpler plans were not looked
            for, as on devices of several kinds or with pinned stages.
        fastest: the choices, `time_s` and `memory_bytes` of the fastest plan that was found, if this one is a simpler one; else {}.
            `gap` and `status` are then those of the fastest.
        tp_inside: whether this plan is slower than `fastest` so that its tensor parallelism does not cross nodes or PCIe.
        simpler_left: kinds of simpler candidates in which no plan within the tolerance was found, nor excluded. Some had no time.
        runners_up: the best plan of each other family of layouts, or why it has none, a dict each.
        headroom: memory of a device that was kept free: a fraction below 1, else GiB.
        unlimited_s: seconds of a step on this mesh and schedule, with the best micro-batch, ZeRO stage and recomputation, if no memory is
            kept free; None if that was not computed.
    """

    status: str  # 'optimal' | 'feasible'
    objective_s: float
    bound_s: float
    gap: float
    space: str
    meshes: tuple[
        dict, ...
    ] = ()  # one entry per candidate: mesh, micro_batch, zero, recompute, outcome, time_s, reason
    solve_time_s: float = 0.0
    ledger: tuple[dict, ...] = ()
    tolerance: float = 0.0
    fastest: dict = field(default_factory=dict)
    simpler_left: int = 0
    runners_up: tuple[dict, ...] = ()
    headroom: float = 0.0
    unlimited_s: float | None = None
    tp_inside: bool = False
    rules: tuple[dict, ...] = ()

    @property
    def fastest_s(self) -> float:
        """Seconds of a step of the fastest plan that was found."""
        return self.fastest.get("time_s", self.objective_s)

    @property
    def is_cut(self) -> bool:
        """Whether the time limit ended the search, so that more time may prove or find more."""
        return any(entry.get("reason") == OUT_OF_TIME for entry in self.meshes)


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted cost of one step.

    Attributes:
        step_time_s: seconds of a step.
        peak_memory_bytes: for each rank of the pipeline, the peak on one of its devices.
        tokens_per_s: tokens per second over all devices.
        mfu: model FLOPs utilization, as a fraction.
        breakdown: seconds of each part of a step, such as 'compute' or 'tp communication'.  They add up to the step time.
        memory: bytes of each part on the fullest device.
        host_bytes: the most that a rank holds in host memory.
        details: seconds of a step by part of what the ops of the busiest rank do, see `planning/plan_writer.py`.
    """

    step_time_s: float
    peak_memory_bytes: tuple[int, ...]
    tokens_per_s: float
    mfu: float
    breakdown: dict[str, float] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    host_bytes: int = 0
    details: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MadeFor:
    """What a plan was made for, as plain data, so that a plan file stands alone.

    Attributes:
        model: the text that names the model, such as 'llama3-8b'.  '' if no text names a model that was given as an object.
        seq: tokens of a sequence; 0 if it is unknown.
        rows: what the rate of a plan counts: 'tokens', 'images' or 'samples'.
        cluster: the cluster by the keys of a cluster file.  {} in files of earlier versions.
        software: the fields of `Software` that are not its defaults.
        pins: the pins of the request.
        target: the framework whose limits the plan keeps; '' without one.
    """

    model: str = ""
    seq: int = 0
    rows: str = "tokens"
    cluster: dict = field(default_factory=dict, hash=False)
    software: dict = field(default_factory=dict, hash=False)
    pins: dict = field(default_factory=dict, hash=False)
    target: str = ""


@dataclass(frozen=True, slots=True)
class PlanFields:
    """The fields of a `Plan`. The docstring of `Plan` describes each."""

    mesh: MeshShape
    micro_batch: int  # sequences per data-parallel rank per micro-batch
    num_microbatches: int
    global_batch: int
    schedule: str
    stages: tuple[tuple[str, ...], ...]
    zero: int
    recompute: str
    precision: str
    blocks: tuple[BlockPlan, ...]
    predicted: Prediction
    certificate: Certificate
    model_name: str
    model_hash: str
    cluster_name: str
    cluster_hash: str
    cost_model_version: str
    notes: tuple[str, ...] = ()
    offload: str = "none"
    devices: tuple[str, ...] = ()
    shard: int = 0
    micro_batch_mean: bool = (
        False  # the user allows the mean of micro-batch losses in the place of another loss
    )
    fusion: Fusion = UNFUSED
    made_for: MadeFor = MadeFor()

    @property
    def splits_backward(self) -> bool:
        """Whether the pipeline computes gradients of weights separately from those of inputs."""
        return splits_backward(self.schedule)
