"""From a request to candidates, and from the search's result to a Plan or to the reason why there is none."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isqrt
from typing import Any

from autopar_cost_models import COST_MODEL_VERSION

from autopar.annotate.annotate import Annotator, Setting
from autopar.errors import AutoparError
from autopar.ir.annotated import AnnotatedModel
from autopar.ir.cluster import ClusterSpec
from autopar.ir.mesh import MeshShape
from autopar.ir.plan import AxisChoice, BlockPlan, Certificate, Plan, Prediction
from autopar.ir.traced import TracedModel
from autopar.ops.dims import Call, is_symbolic
from autopar.ops.loss import loss_adds_up
from autopar.ops.random import draws_otherwise, drops
from autopar.ops.rules import op_dims
from autopar.ops.values import ops
from autopar.solve.search import Candidate, SearchResult, search

PINS = ("tp", "pp", "dp", "cp", "ep", "vpp", "micro_batch", "schedule", "zero", "recompute", "sequence_parallel")
_NOT_SEARCHED = {"pp": 1, "cp": 1, "ep": 1, "vpp": 1, "schedule": "none"}
ZERO_STAGES = (0, 1, 2, 3)
RECOMPUTE = ("none", "full")
MAX_MICRO_BATCH = 64
SPACE = (
    "mesh dp x tp (tp up to {limit} devices), micro-batch a divisor of the batch, ZeRO {zero}, recompute {recompute}, and a "
    "tensor-parallel strategy for every op; all blocks of one structure run alike; data parallelism shards the batch dim; "
    "predictions are those of the cost model"
)


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What the user asked for."""

    cluster: ClusterSpec
    global_batch: int
    pin: dict[str, Any]
    precision: str
    runnable: bool
    model_name: str

    def __post_init__(self) -> None:
        if not isinstance(self.global_batch, int) or isinstance(self.global_batch, bool) or self.global_batch < 1:
            raise AutoparError(f"global_batch={self.global_batch!r} must be a whole number >= 1")
        if self.precision not in ("bf16", "fp32", "fp64"):
            raise AutoparError(f"precision {self.precision!r} is not known; bf16, fp32 and fp64 are")


def choose_precision(cluster: ClusterSpec) -> str:
    """bf16 on GPUs, fp32 on CPUs."""
    return "fp32" if cluster.device.name.lower() == "cpu" else "bf16"


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def check_pins(request: PlanRequest, traced: TracedModel) -> None:
    """Raise AutoparError if the pins are unknown, malformed, contradictory, or impossible for this model and cluster."""
    devices, pin = request.cluster.num_devices, request.pin
    for name, value in pin.items():
        if name not in PINS:
            raise AutoparError(f"unknown pin {name!r}; pins are {', '.join(PINS)}")
        if name in _NOT_SEARCHED and value != _NOT_SEARCHED[name]:
            raise AutoparError(
                f"{name}={value} cannot be planned yet: autopar searches dp and tp; drop the pin, or use {name}={_NOT_SEARCHED[name]}"
            )
        if name == "sequence_parallel":
            raise AutoparError("sequence_parallel cannot be pinned yet: the solver chooses it op by op")
        if name in ("tp", "dp", "micro_batch") and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise AutoparError(f"{name}={value!r} must be a whole number >= 1")
        if name == "zero" and (isinstance(value, bool) or value not in ZERO_STAGES):
            raise AutoparError(f"zero={value!r} is not a ZeRO stage; 0, 1, 2 and 3 are")
        if name == "recompute" and value not in RECOMPUTE:
            raise AutoparError(f"recompute={value!r} is not known; {' and '.join(RECOMPUTE)} are")
    tp, dp = pin.get("tp"), pin.get("dp")
    for name, value in (("tp", tp), ("dp", dp)):
        if value is not None and devices % value:
            raise AutoparError(f"{name}={value} does not divide {devices} devices; {_listed(divisors(devices))} do")
    if tp is not None and dp is not None and tp * dp != devices:
        raise AutoparError(f"tp={tp} x dp={dp} = {tp * dp} devices, but the cluster has {devices}; with tp={tp}, dp is {devices // tp}")
    dp = devices // tp if dp is None and tp is not None else dp
    if dp is not None and request.global_batch % dp:
        raise AutoparError(f"global batch {request.global_batch} cannot be split over dp={dp}; use a multiple of {dp}")
    if dp is not None and "micro_batch" in pin and request.global_batch // dp % pin["micro_batch"]:
        rows = request.global_batch // dp
        raise AutoparError(f"micro_batch={pin['micro_batch']} does not divide the {rows} sequences of a rank; {_listed(divisors(rows))} do")
    if tp is not None and tp > 1:
        _check_heads(tp, traced)
    if request.runnable and pin.get("zero", 0) != 0:
        raise AutoparError(f"the engine cannot run zero={pin['zero']} yet; it runs zero=0")


def _check_heads(tp: int, traced: TracedModel) -> None:
    for block in traced.classes:
        for node in ops(block.graph):
            if "scaled_dot_product_attention" in str(node.target):
                heads = int(Call(node).tensors[0].shape[1])
                if heads % tp:
                    raise AutoparError(f"tp={tp} does not divide {heads} attention heads; {_listed(divisors(heads))} do")


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:12])) + (", ..." if len(numbers) > 12 else "")


def tp_limit(cluster: ClusterSpec) -> int:
    """Largest tensor-parallel degree searched: four NVLink domains."""
    return min(cluster.num_devices, 4 * cluster.topology.devices_per_node)


def candidates_for(request: PlanRequest) -> list[Candidate]:
    """Every combination of mesh, micro-batch, ZeRO stage and recompute that the pins leave."""
    pin, devices, found = request.pin, request.cluster.num_devices, []
    zeros = (0,) if request.runnable else ZERO_STAGES
    for tp in divisors(devices):
        dp = devices // tp
        if (
            pin.get("tp", tp) != tp
            or pin.get("dp", dp) != dp
            or request.global_batch % dp
            or (tp > tp_limit(request.cluster) and "tp" not in pin)
        ):
            continue
        rows = request.global_batch // dp
        for micro_batch in divisors(rows):
            if pin.get("micro_batch", micro_batch) != micro_batch or (micro_batch > MAX_MICRO_BATCH and "micro_batch" not in pin):
                continue
            for zero in zeros if dp > 1 else (0,):
                for recompute in RECOMPUTE:
                    if pin.get("zero", zero) == zero and pin.get("recompute", recompute) == recompute:
                        found.append(Candidate(MeshShape(dp=dp, tp=tp), micro_batch, rows // micro_batch, zero, recompute))
    if not found:
        raise AutoparError(
            f"no mesh of {devices} devices splits a global batch of {request.global_batch} under the pins "
            f"{pin or 'given'}: use a global batch that is a multiple of {devices}"
        )
    return found


def pricer(request: PlanRequest, annotator: Annotator):
    """The function that prices a candidate of this request."""

    def annotate(candidate: Candidate) -> AnnotatedModel:
        return annotator.annotate(
            Setting(
                candidate.mesh,
                candidate.micro_batch,
                candidate.num_microbatches,
                candidate.zero,
                candidate.recompute,
                request.precision,
                request.cluster,
            )
        )

    return annotate


def enough_devices(request: PlanRequest, annotator: Annotator) -> int | None:
    """The smallest of 2, 4, 8, ... times as many nodes on which some plan fits, found by solving; None if 256 times is not enough.

    Pins of tp and dp are dropped, since they belong to the number of devices; one sequence a micro-batch and full recompute are tried.
    """
    for factor in (2, 4, 8, 16, 32, 64, 128, 256):
        topology = replace(request.cluster.topology, nodes=request.cluster.topology.nodes * factor)
        larger = replace(request.cluster, topology=topology)
        pin = {k: v for k, v in request.pin.items() if k not in ("tp", "dp")} | {"micro_batch": 1, "recompute": "full"}
        batch = -(-request.global_batch // larger.num_devices) * larger.num_devices
        wider = replace(request, cluster=larger, pin=pin, global_batch=batch)
        found = search(candidates_for(wider), pricer(wider, annotator), larger.device.memory_bytes, time_limit_s=5.0)
        if found.best is not None:
            return larger.num_devices
    return None


def no_plan_fits(found: SearchResult, request: PlanRequest, enough: int | None) -> AutoparError:
    """The error for a search without result: the smallest memory found, and what fits."""
    capacity = request.cluster.device.memory_bytes
    if found.smallest is None:
        return AutoparError(f"no plan was found within the time limit for {request.cluster.num_devices} devices; raise the time limit")
    candidate, reason = found.smallest
    needed = reason.memory_bytes if reason.memory_bytes is not None else reason.bound_bytes or 0
    remedy = f"it fits on {enough} devices" if enough else "use shorter sequences or a smaller model"
    pins = f", or drop pins ({', '.join(f'{k}={v}' for k, v in request.pin.items())})" if request.pin else ""
    return AutoparError(
        f"No plan fits: the smallest needs {needed / 2**30:.1f} GiB per device of {capacity / 2**30:.1f} ({candidate.mesh}, "
        f"micro-batch {candidate.micro_batch}, ZeRO {candidate.zero}, recompute {candidate.recompute}); {remedy}{pins}"
    )


def make_plan(found: SearchResult, request: PlanRequest, traced: TracedModel, annotator: Annotator) -> Plan:
    """Write down the best solution as a Plan."""
    candidate, solution = found.best
    model: AnnotatedModel = found.model
    batch = annotator.batch_choices(candidate.mesh.dp)
    blocks = []
    for index, block in enumerate(model.classes):
        choices = {
            op.name: _axis_choices(candidate.mesh, batch[index].get(op.name), op.strategy(solution.choices[index][op.name]))
            for op in block.ops
        }
        segments = tuple(s.name for s in traced.segments if s.class_index == index)
        blocks.append(BlockPlan(block.name, segments, "full" if block.recompute else "none", choices))
    cluster = request.cluster
    zeros = "0" if request.runnable else "0-3"
    certificate = Certificate(
        found.status,
        solution.time_s,
        found.bound_s,
        found.gap,
        SPACE.format(limit=tp_limit(cluster), zero=zeros, recompute="/".join(RECOMPUTE)),
        tuple(found.outcomes),
        found.solve_time_s,
    )
    seconds = solution.time_s
    prediction = Prediction(
        seconds,
        (solution.memory_bytes,),
        request.global_batch * tokens_per_row(traced) / seconds,
        model_flops(traced, request.global_batch) / seconds / cluster.num_devices / cluster.device.flops[_rate(request, cluster)],
        dict(solution.breakdown),
        dict(solution.priced.memory_parts),
    )
    missing = "ZeRO-" + str(candidate.zero) if candidate.zero else f"precision {request.precision}" if request.precision == "bf16" else ""
    return Plan(
        candidate.mesh,
        candidate.micro_batch,
        candidate.num_microbatches,
        request.global_batch,
        "none",
        (tuple(s.name for s in traced.segments),),
        candidate.zero,
        candidate.recompute,
        request.precision,
        tuple(blocks),
        prediction,
        certificate,
        request.model_name,
        traced.model_hash,
        cluster.name,
        cluster.spec_hash(),
        COST_MODEL_VERSION,
        missing,
        notes(traced),
    )


def _rate(request: PlanRequest, cluster: ClusterSpec) -> str:
    return request.precision if request.precision in cluster.device.flops else "fp32"


def _axis_choices(mesh: MeshShape, batch: AxisChoice | None, strategy) -> dict[str, AxisChoice]:
    choices = {}
    if mesh.dp > 1:
        choices["dp"] = batch
    if mesh.tp > 1:
        choices["tp"] = AxisChoice(strategy.name, strategy.inputs, strategy.outputs)
    return choices


def tokens_per_row(traced: TracedModel) -> int:
    """Positions of one sequence: the second dim of the first integer input, or 1."""
    for val in traced.input_vals:
        if val.dim() >= 2 and not val.is_floating_point() and not is_symbolic(val.shape[1]):
            return int(val.shape[1])
    return 1


def model_flops(traced: TracedModel, rows: int) -> float:
    """FLOPs of forward and backward of one step without recompute: three times the matrix products of the forward (two of them
    backward), causal attention counted by half; the convention of PaLM (Chowdhery et al. 2022, appendix B) but for the causal half."""
    total = 0
    for segment in traced.segments:
        for node in ops(traced.classes[segment.class_index].graph):
            dims = op_dims(node)
            flops = dims.total_flops() if dims is not None else 0
            if is_symbolic(flops):
                flops = int(flops.node.expr.subs({s: rows for s in flops.node.expr.free_symbols}))
            total += 3 * flops
    return float(total)


def notes(traced: TracedModel) -> tuple[str, ...]:
    """What a user must know about this model: ops without a rule, and what is not exact."""
    found: list[str] = []
    ruleless: dict[str, int] = {}
    explicit, random = 0, set()
    for segment in traced.segments:
        for node in ops(traced.classes[segment.class_index].graph):
            if op_dims(node) is None:
                ruleless[str(node.target)] = ruleless.get(str(node.target), 0) + 1
            if "scaled_dot_product_attention" in str(node.target):
                explicit += drops(node)
            if draws_otherwise(node):
                random.add(str(node.target))
    if ruleless:
        found.append("ops without a rule run replicated: " + ", ".join(f"{name} x{count}" for name, count in sorted(ruleless.items())))
    if explicit:
        found.append(
            f"attention that drops probabilities x{explicit} runs unfused: exact, but it keeps batch x heads x queries x keys "
            "probabilities for backward; a model without dropout inside attention needs far less memory"
        )
    norms = [name for name in traced.updates if name.endswith("running_var")]
    others = [name for name in traced.updates if not name.endswith(("running_mean", "running_var", "num_batches_tracked"))]
    if others:
        found.append(f"forward changes {', '.join(others)}: after every micro-batch of training; eval_step leaves them")
    if norms:
        found.append(
            f"batch norm x{len(norms)} takes its statistics over one micro-batch of all data-parallel ranks: equal to one device that runs "
            "the same micro-batches, not to one that runs the whole batch at once"
        )
    if random:
        found.append(f"{', '.join(sorted(random))} draw other random numbers than one device would: equal in distribution, not exactly")
    if traced.count_graph is None:
        found.append(
            "the loss is no mean over valid tokens: micro-batches are "
            + ({True: "added up", False: "averaged", None: "refused, since sum or mean cannot be told"}[loss_adds_up(traced)])
        )
    return tuple(found)
