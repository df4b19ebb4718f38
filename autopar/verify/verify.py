"""`autopar verify`: checks that a plan's program is exact. A shrunken model trains on CPU processes
and on one device, and every tensor is compared.

Conditions: fp64, SGD with momentum, and labels with a different number of -100 on each rank, since
equal numbers would hide a wrong mean. The learning rate moves the median tensor by at least 1 % in
total, since a tiny rate would hide every bug, and by at most its own norm.

Criterion, for each parameter and changed buffer over all ranks: ||p - p_ref|| / ||p_ref - p_0|| <= 1e-9, or ||p -
p_ref|| <= 1e-12 if that allows more. Losses agree to 1e-9. In fp32 the tolerance is 1e-4.

Plans are made for a fictitious cluster with a free network and kernels that launch in no time. The
solver then shards wherever that saves anything, so that as many collectives as possible are tested.

Some models, including all of transformers', compute norms, softmax and loss in fp32 for any dtype.
Any other order of a sum makes a difference of one ulp of fp64, and rounding to fp32 enlarges it to
one ulp of fp32. Only a loose tolerance would accept that, and it would hide bugs. Therefore every
such cast becomes a cast to fp64, in the reference and in the captured program (`Widened`). torch's
grouped matrix product, which routed experts call, has no fp64 kernel on CPU; `Widened` multiplies
group by group.
"""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from autopar.api import plan as make_plan
from autopar.api import trace
from autopar.errors import AutoparError, shown
from autopar.explaining.collective_counts import program_collectives
from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan import Plan
from autopar.ir.traced import TracedModel
from autopar.models.base import ModelSpec
from autopar.ops.random import draws
from autopar.ops.values import ops
from autopar.planning.model_facts import calls_of, divisors, num_experts
from autopar.request.pins import check_pin_names
from autopar.request.software import Software
from autopar.runtime.engine import PRECISION_DTYPES, Engine
from autopar.runtime.ranks.launch import WorkerError, run_workers
from autopar.verify.report import MeshReport, VerifyReport
from autopar.verify.widened import Widened

TOLERANCES = {"fp64": (1e-9, 1e-12), "fp32": (1e-4, 1e-7)}
"""By precision: the largest allowed update-relative error, and the absolute error that is always
allowed.
"""

MOVED, MOVED_MOST = 0.01, 1.0
"""How far training must move the median tensor, and may move it, relative to its norm. Steps that
are longer throw a network with norms into a region where rounding errors grow without limit.
"""
FIRST_RATE, RATES_TRIED = 0.5, 10
DEFAULT_SEQ = 12

ModelFactory = Callable[[], tuple[nn.Module, dict[str, Tensor]]]


@dataclass(frozen=True, slots=True)
class FactorySpec(ModelSpec):
    """The spec of a model from a function without arguments that returns (model, example inputs),
    for `verify` from Python.
    """

    factory: ModelFactory

    @classmethod
    def of(cls, factory: ModelFactory) -> FactorySpec:
        """The spec of a factory (a function that returns (model, example inputs)), named after it.
        Does not call it.
        """
        return cls(getattr(factory, "__qualname__", "model"), 0, 0, 0, factory)

    def _make(self) -> nn.Module:
        return self.factory()[0]

    def example_inputs(
        self, batch: int, seq: int, device: torch.device | str = "meta"
    ) -> dict[str, Tensor]:
        """The function's example inputs, copied to `device`, with rows (dim 0) repeated or cut to
        `batch`. `seq` is ignored.
        """
        inputs = self.factory()[1]
        rows = {name: value[torch.arange(batch) % value.shape[0]] for name, value in inputs.items()}
        return {name: value.clone().to(device) for name, value in rows.items()}

    def shrunk(self) -> ModelSpec:
        """The spec itself, since only the user's function could make a smaller model."""
        return self


@dataclass(frozen=True, slots=True)
class Setup:
    """The settings from which every process makes the same case (`make_case`): model, precision,
    number of steps, tokens per sequence, and sequences per batch. It is hashable, so that each
    makes it once.
    """

    spec: ModelSpec
    precision: str
    steps: int
    seq: int
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, its batches and its trace, and the results of training it on one device (filled in
    by `make_case`). `before`, `after`: tensors by name. `learning_rate` is large enough that
    tensors move; `moved` says how far.
    """

    model: nn.Module
    batches: list[dict[str, Tensor]]
    traced: TracedModel
    drops: bool = False
    learning_rate: float = 0.0
    moved: float = 0.0
    before: dict[str, Tensor] = field(default_factory=dict)
    after: dict[str, Tensor] = field(default_factory=dict)
    losses: tuple[float, ...] = ()


def verify(
    model: ModelSpec | ModelFactory,
    nproc: int = 4,
    pin: Mapping[str, Any] | None = None,
    precision: str = "fp64",
    steps: int = 3,
    seq: int | None = None,
    rows: int | None = None,
    progress: Callable[[str], None] | None = None,
    shrink: bool = True,
    compile: bool | Mapping[str, Any] = False,
) -> VerifyReport:
    """Train a shrunken `model` under plans for `nproc` CPU processes and on one device, and report
    the differences of losses and parameters.

    Without a pin of tp or dp, every mesh dp x tp of `nproc` devices is verified. So are meshes with
    cp, ep and ZeRO-3 where the model has a use for them. A program that fails to run is reported as
    not exact. Meshes that cannot be planned are listed in `skipped`.

    Args:
        model: a spec, or a function that returns (model, example inputs).
        nproc: number of processes.
        pin: choices that every plan has.
        precision: 'fp64' or 'fp32'.
        steps: training steps.
        seq: tokens per sequence; default 12.
        rows: sequences per batch; default two per process.
        progress: called with a line of text before the training of each mesh.
        shrink: whether to shrink the model first.
        compile: whether the processes compile their programs, as in `parallelize`; the single
            device does not.

    Raises:
        AutoparError: the request is invalid, the model cannot be captured or fails on the data, or
            no mesh can be planned.
    """
    spec = model if isinstance(model, ModelSpec) else FactorySpec.of(model)
    spec = spec.shrunk() if shrink else spec
    pin, progress = dict(pin or {}), progress or (lambda text: None)
    if precision not in TOLERANCES:
        raise AutoparError(f"verify runs in {' or '.join(TOLERANCES)}, not in {shown(precision)}")
    if nproc < 1 or steps < 1:
        raise AutoparError(f"nproc={nproc} and steps={steps} must be at least 1")
    check_pin_names(pin)
    seq = seq if seq is not None else min(DEFAULT_SEQ, spec.max_seq or DEFAULT_SEQ)
    setup = Setup(spec, precision, steps, seq, rows if rows is not None else 2 * nproc)
    progress(f"training {spec.name} on one device")
    case = make_case(setup)
    meshes = []
    plans, skipped = _plans(setup, case, nproc, pin, Software(compiled=compile is not False))
    for plan in plans:
        progress(f"training under {plan.mesh} on {nproc} processes")
        meshes.append(_verify_plan(setup, case, plan, compile))
    inexact = any(not mesh.exact and not mesh.failure for mesh in meshes)
    return VerifyReport(
        model=spec.name,
        precision=precision,
        nproc=nproc,
        tolerance=TOLERANCES[precision][0],
        learning_rate=case.learning_rate,
        moved=case.moved,
        reference_losses=case.losses,
        meshes=tuple(meshes),
        skipped=skipped,
        drops=case.drops,
        compiled=compile is not False,
        rounding=_rounding(setup, case) if inexact and not case.drops else None,
    )


def _rounding(setup: Setup, case: Case) -> float:
    """The update-relative error of training on one device that reads the rows of each batch in
    reverse order. Only rounding differs, if the loss has no order of rows.
    """
    batches = [
        {k: v.flip(0) if v.dim() and v.shape[0] == setup.rows else v for k, v in batch.items()}
        for batch in case.batches
    ]
    with widened(setup.precision):
        _, after, _ = _train(setup, replace(case, batches=batches), case.learning_rate)
    return compare_training(case.before, case.after, after, setup.precision)[0]


def free_network(devices: int) -> ClusterSpec:
    """A cluster of `devices` CPU devices on one node, with a free network and kernels that launch
    in no time. Sharding then always pays.
    """
    cluster = ClusterSpec.parse(f"cpu:{devices}")
    assert isinstance(cluster, ClusterSpec)  # devices of one kind
    link = replace(cluster.topology.intra, bandwidth_Bps=1e15, latency_s=0.0)
    return replace(
        cluster,
        name=f"cpu:{devices} with a free network",
        topology=replace(cluster.topology, intra=link, inter=link),
        device=replace(cluster.device, launch_s=0.0),
    )


def _meshes(case: Case, nproc: int, pin: dict[str, Any]) -> list[dict[str, Any]]:
    """For each mesh to verify, the pins of its plan: `pin` and those that fix the mesh.

    If tp or dp is pinned, that is one mesh. Otherwise it is every dp x tp, and up to three more:
    with cp=2 if the model has attention, with ep=2 if it has routed experts, and with ZeRO-3. These
    are left out if cp or ep is pinned, ZeRO-3 also if `zero` is. cp and ep need an even number of
    ranks, ZeRO-3 more than one.

    A pipeline is used only if pinned. ZeRO is off elsewhere unless `zero` or `shard` is pinned.
    """
    pin = {"pp": 1} | pin
    unshared = pin if pin.get("shard") else {"zero": 0} | pin
    if "tp" in pin or "dp" in pin:
        return [unshared]
    given = (pin.get(axis) for axis in ("cp", "pp"))
    cp, pp = (degree if isinstance(degree, int) and degree > 0 else 1 for degree in given)
    nproc = max(nproc // pp, 1)
    found = [unshared | {"tp": tp} for tp in divisors(max(nproc // cp, 1))]
    if nproc % 2 == 0 and not {"cp", "ep"} & pin.keys():
        if calls_of(case.traced, "aten::scaled_dot_product_attention"):
            found.append(unshared | {"cp": 2, "tp": nproc // 2})
        if num_experts(case.traced) >= 2:
            found.append(unshared | {"ep": 2, "dp": nproc})
    if nproc > 1 and not {"cp", "ep", "zero"} & pin.keys():
        found += [pin | {"dp": nproc, "zero": 3}]
    return found


def _plans(
    setup: Setup, case: Case, nproc: int, pin: dict[str, Any], software: Software
) -> tuple[list[Plan], tuple]:
    """(one plan for each mesh to verify, (mesh, reason) of the meshes left out because this model
    or batch does not allow them). If no mesh can be planned, raises the AutoparError of the first.
    """
    plans, refused = [], []
    for chosen in _meshes(case, nproc, pin):
        try:
            plans.append(_solved(setup, case, case.batches[0], nproc, chosen, software))
        except AutoparError as error:
            names = ("pp", "dp", "cp", "tp", "ep", "zero", "shard")
            asked = [(name, chosen[name]) for name in names if chosen.get(name)]
            named = [f"{name}={value}" for name, value in asked if (name, value) != ("pp", 1)]
            refused.append((" ".join(named) or "the mesh", error))
    if not plans:
        raise refused[0][1]
    return plans, tuple((mesh, str(error)) for mesh, error in refused)


def _solved(
    setup: Setup,
    case: Case,
    batch: dict[str, Tensor],
    devices: int,
    pin: dict[str, Any],
    software: Software,
) -> Plan:
    return make_plan(
        case.model,
        free_network(devices),
        batch,
        setup.rows,
        pin,
        precision=setup.precision,
        traced=case.traced,
        software=software,
    )


# --------------------------------------------------------------------------------------------------------- the single device


def widened(precision: str) -> contextlib.AbstractContextManager:
    """A context: the mode `Widened`, which turns casts to fp32 into casts to fp64, for precision
    'fp64'. Otherwise one without effect.
    """
    return Widened() if precision == "fp64" else contextlib.nullcontext()


@lru_cache(maxsize=2)
def make_case(setup: Setup) -> Case:
    """The case of a setup: the model built and traced, and the results of training a copy on one
    device. The last two cases are cached. Forked workers inherit them; spawned ones compute equal
    ones.

    Raises AutoparError if no learning rate that is tried moves the median tensor by `MOVED` to
    `MOVED_MOST`.
    """
    state = torch.get_rng_state()
    torch.manual_seed(0)
    try:
        model = setup.spec.build("cpu", PRECISION_DTYPES[setup.precision])
    finally:
        torch.set_rng_state(state)
    _disturb(model)
    batches = _batches(setup)
    rate = FIRST_RATE
    with widened(setup.precision):
        traced = trace(model, batches[0], batch_dims=setup.spec.batch_dims())
        dropping = any(draws(node) for block in traced.classes for node in ops(block.graph))
        case = Case(model=model, batches=batches, traced=traced, drops=dropping)
        train = _train_by_engine if dropping else _train
        low, high = 0.0, float("inf")
        for _ in range(RATES_TRIED):
            before, after, losses = train(setup, case, rate)
            moved = _moved(before, after)
            if MOVED <= moved <= MOVED_MOST:
                case = replace(case, before=before, after=after, losses=losses)
                return replace(case, learning_rate=rate, moved=moved)
            if moved < MOVED:
                low = rate
            else:  # too far, or not a number
                high = rate
            rate = math.sqrt(low * high) if low and high < float("inf") else low * 4 or high / 10
    raise AutoparError(
        f"{setup.spec.name}: none of {RATES_TRIED} learning rates moves the median tensor by {MOVED:.0%} to {MOVED_MOST:.0%} in "
        f"{setup.steps} steps; raise --steps"
    )


def _disturb(model: nn.Module) -> None:
    """Add small values to the model's vectors (1-D parameters), in place, because initial zeros and
    ones would hide errors.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                waves = torch.sin(torch.arange(parameter.numel(), dtype=parameter.dtype))
                parameter.add_(0.1 * waves)


def _batches(setup: Setup) -> list[dict[str, Tensor]]:
    """One batch by name per step, on the CPU, made from the spec's example inputs. 2-D `input_ids`
    and `labels` are random tokens if the vocabulary is known. Each row of 2-D integer labels of at
    least 3 columns begins with a random number of -100.
    """
    generator = torch.Generator().manual_seed(3)
    batches = []
    for _ in range(setup.steps):
        batch = setup.spec.example_inputs(setup.rows, setup.seq, "cpu")
        for name, tensor in batch.items():
            if tensor.is_floating_point():
                batch[name] = tensor.to(PRECISION_DTYPES[setup.precision])
            elif setup.spec.vocab and name in ("input_ids", "labels") and tensor.dim() == 2:
                batch[name] = torch.randint(0, setup.spec.vocab, tensor.shape, generator=generator)
        labels = batch.get("labels")
        of_tokens = labels is not None and labels.dim() == 2 and not labels.is_floating_point()
        if labels is not None and of_tokens and labels.shape[1] > 2:
            most = labels.shape[1] - 1
            hidden = torch.randint(0, most, (labels.shape[0],), generator=generator)
            for row, count in enumerate(hidden.tolist()):
                labels[row, :count] = -100
        batches.append(batch)
    return batches


def _optimizer(rate: float) -> Callable:
    return lambda parameters: torch.optim.SGD(parameters, rate, momentum=0.9)


_Trained = tuple[dict[str, Tensor], dict[str, Tensor], tuple[float, ...]]
"""(parameters before training, parameters after, losses)."""


def _train(setup: Setup, case: Case, rate: float) -> _Trained:
    """(tensors before, tensors after, losses) of training a copy of the case's model on its batches
    on one device, in eager mode, with the learning rate `rate`. The tensors are those of `_kept`.
    """
    model = copy.deepcopy(case.model)
    before = _kept(model, case)
    optimizer, losses = _optimizer(rate)([p for p in model.parameters() if p.requires_grad]), []
    for batch in case.batches:
        optimizer.zero_grad()
        output = _call(model, batch)
        if not isinstance(output, Tensor):
            output = output["loss"] if isinstance(output, Mapping) else output[0]
        output.backward()
        optimizer.step()
        losses.append(output.item())
    return before, _kept(model, case), tuple(losses)


def _kept(model: nn.Module, case: Case) -> dict[str, Tensor]:
    """Copies, by name, of the tensors that training changes: parameters, and persistent buffers
    that forward changes.
    """
    parameters = {name for name, _ in model.named_parameters()}
    return {
        name: tensor.detach().clone()
        for name, tensor in model.state_dict().items()
        if name in parameters or name in case.traced.updates
    }


def _call(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    """The model's output on a batch. If the model fails, raises AutoparError, which says that
    verify made this data.
    """
    try:
        return model(**batch)
    except Exception as error:  # a user's model may raise anything
        raise AutoparError(
            f"{type(model).__name__} fails on the data that verify makes ({', '.join(batch)}; some labels are -100, which torch's "
            f"cross_entropy ignores): {type(error).__name__}: {str(error)[:200]}"
        ) from error


def _train_by_engine(
    setup: Setup, case: Case, rate: float, number: int = 1, dp: int = 1
) -> _Trained:
    """(tensors before, tensors after, losses) as from `_train`, but by autopar's engine on one
    device, which draws the random numbers that every plan draws.

    It can split a batch into `number` micro-batches, each with the rows of `dp` data-parallel
    ranks.
    """
    rows = torch.arange(setup.rows).view(dp, number, -1).transpose(0, 1).flatten()
    batches = [
        {k: v[rows] if v.dim() and v.shape[0] == setup.rows else v for k, v in batch.items()}
        for batch in case.batches
    ]
    before = _kept(case.model, case)
    pin = {"micro_batch": setup.rows // number}
    plan = _solved(setup, case, batches[0], 1, pin, Software())
    engine = make_engine(replace(case, model=copy.deepcopy(case.model), learning_rate=rate), plan)
    losses = tuple(float(engine.step(batch)) for batch in batches)
    state = engine.full_state_dict()
    return before, {name: state[name] for name in before}, losses


def _moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> float:
    """How far training moved the median of the tensors that it moved, relative to its norm; NaN if
    any value is not finite.
    """
    if not all(bool(t.isfinite().all()) for t in after.values()):
        return float("nan")
    floats = {name: value for name, value in before.items() if value.is_floating_point()}
    sized = {k: v for k, v in floats.items() if v.norm() > 0 and not torch.equal(v, after[k])}
    shares = sorted(float((after[k] - v).norm() / v.norm()) for k, v in sized.items())
    return shares[len(shares) // 2] if shares else 0.0


# ------------------------------------------------------------------------------------------------------------- the processes


def _verify_plan(
    setup: Setup, case: Case, plan: Plan, compile: bool | Mapping[str, Any] = False
) -> MeshReport:
    """The report of one plan, run on as many processes as its mesh has devices. If a process fails,
    the report says so in `failure`. `compile` is that of `verify`.
    """
    start = time.perf_counter()
    choices = ("micro_batch", "recompute", "schedule", "zero", "shard")
    chosen = {name: getattr(plan, name) for name in choices}
    report = MeshReport(mesh=plan.mesh.as_dict(), **chosen)
    try:
        after, losses_expected = expected_of(setup, case, plan)
        arguments = (setup, plan.to_json(), after, compile)
        ranks = run_workers(rank_errors, plan.mesh.num_devices, arguments)
        counts = program_collectives(case.traced, plan)
    except WorkerError as error:
        return replace(report, time_s=time.perf_counter() - start, failure=str(error))
    worst, tensor, losses = max(ranks, key=lambda rank: rank[0])
    of_ranks = (zip(found, losses_expected, strict=True) for _, _, found in ranks)
    loss_error = max(relative_error(a, b) for pairs in of_ranks for a, b in pairs)
    return replace(
        report,
        exact=max(worst, loss_error) <= TOLERANCES[setup.precision][0],
        worst_error=worst,
        worst_tensor=tensor,
        loss_error=loss_error,
        losses=tuple(losses),
        collectives=counts,
        time_s=time.perf_counter() - start,
    )


def expected_of(
    setup: Setup, case: Case, plan: Plan
) -> tuple[dict[str, Tensor], tuple[float, ...]]:
    """(tensors after training, losses) of one device that runs the plan's micro-batches. They
    differ from those of the whole batch only if the loss is not linear in the batch (balance of
    routers, batch norm).
    """
    if plan.num_microbatches == 1 or not (num_experts(case.traced) or case.traced.updates):
        return case.after, case.losses
    parts = plan.num_microbatches, plan.mesh.dp
    with widened(setup.precision):
        _, after, losses = _train_by_engine(setup, case, case.learning_rate, *parts)
    return after, losses


def rank_errors(
    rank: int,
    setup: Setup,
    plan_text: str,
    after: dict[str, Tensor],
    compile: bool | Mapping[str, Any] = False,
) -> tuple[float, str, list[float]]:
    """(worst error of a tensor against `after`, its name, the loss of each step) of this process,
    which trains the case of `setup` under the plan in `plan_text`. Every rank must call it.

    `compile` is that of `verify`. `rank` is this process's number; it is not read.
    """
    case = make_case(setup)
    engine = make_engine(case, Plan.from_json(plan_text), compile)
    losses = [float(engine.step(engine.local_batch(batch))) for batch in case.batches]
    worst, tensor = compare_training(case.before, after, engine.full_state_dict(), setup.precision)
    return worst, tensor, losses


def make_engine(case: Case, plan: Plan, compile: bool | Mapping[str, Any] = False) -> Engine:
    """This process's engine, on CPU, for a plan of the case's model, with the optimizer of the
    reference. The model keeps its weights.
    """
    chosen: dict[str, Any] = {
        "max_grad_norm": None,
        "weights": None,
        "device_type": "cpu",
        "compile": compile,
    }
    return Engine(case.model, case.traced, plan, _optimizer(case.learning_rate), **chosen)


def compare_training(
    before: dict[str, Tensor], after: dict[str, Tensor], state: Mapping[str, Tensor], precision: str
) -> tuple[float, str]:
    """(largest update-relative error of `state` against `after`, name of its tensor). An error is
    divided by the update `after` - `before`, or by a small allowance if that is more. The error of
    a tensor that is missing, has another shape or contains NaN is infinite.
    """
    tolerance, absolute = TOLERANCES[precision]
    errors = {}
    for name, expected in after.items():
        if name not in state or state[name].shape != expected.shape:
            errors[name] = float("inf")
            continue
        difference = float((state[name] - expected).double().norm())
        update = float((expected - before[name]).double().norm())
        error = difference / max(update, absolute / tolerance)
        errors[name] = error if error == error else float("inf")
    worst = max(errors, key=errors.__getitem__)
    return errors[worst], worst


def relative_error(value: float, expected: float) -> float:
    """|value - expected| / |expected|; infinite if that is NaN."""
    error = abs(value - expected) / max(abs(expected), 1e-300)
    return error if error == error else float("inf")
