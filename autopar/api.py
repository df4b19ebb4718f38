"""The compiler as one column: trace -> candidates -> annotate and solve -> Plan -> rewrite -> Engine."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from autopar.errors import AutoparError, NoPlanFits
from autopar.foreign.limits.asked_software import software_like
from autopar.foreign.limits.frameworks import restriction_of
from autopar.garbage import seldom_collected
from autopar.ir.cluster import Cluster, reading_note
from autopar.ir.deadline import Deadline
from autopar.ir.plan import Plan
from autopar.ir.traced import TracedModel
from autopar.models.rows import BatchDims, row_dims
from autopar.models.shapes import shape_of_module
from autopar.ops.work import tokens_per_row
from autopar.planning.notes import split_notes
from autopar.planning.objectives import Goal, choose, most_searches
from autopar.planning.plan_model import check_plan
from autopar.planning.planner import plan_traced
from autopar.planning.remedies import BUDGET_S, Ask, remedies
from autopar.planning.searches import Searches
from autopar.request.arguments import (
    check_arguments,
    check_beside_plan,
    check_trains,
    parsed_cluster,
)
from autopar.request.options import OBJECTIVES, TIME_LIMIT_S, TOLERANCE
from autopar.request.pins import Pins
from autopar.request.plan_request import PlanRequest, choose_precision
from autopar.request.software import Software
from autopar.runtime.ranks.agreement import TIMEOUT_S, lost_ranks, say
from autopar.runtime.state.precision import (
    HALF,
    PRECISION_DTYPES,
    captured_in,
    default_precision,
    main_dtype,
    precision_note,
)
from autopar.text.plan_words import cluster_of
from autopar.trace.batches import (
    ExampleInputs,
    batch_tensors,
    check_example,
    sequence_length,
    shortened_inputs,
    shorter_lengths,
)
from autopar.trace.blocks import find_segments
from autopar.trace.capture import capture, meta_copy
from autopar.trace.deepen import Deeper, deepened
from autopar.trace.hit_loops import check_spans
from autopar.trace.loss_split import split_loss
from autopar.trace.normalize import normalize
from autopar.trace.row_limits import take_row_limits
from autopar.trace.rows_together import in_groups_noted, rows_together
from autopar.trace.uncast import uncast_buffers

if TYPE_CHECKING:
    from autopar.models.base import ModelSpec
    from autopar.runtime.engine import Engine, Optimizer
    from autopar.runtime.state.clipping import Clip
    from autopar.runtime.state.weights import Weights


def trace(
    model: nn.Module,
    example_inputs: ExampleInputs,
    loss_fn: Callable | None = None,
    precision: str | None = None,
    deeper: Deeper | None = None,
    kept_buffers: Collection[str] | None = None,
    batch_dims: BatchDims | None = None,
) -> TracedModel:
    """Capture the model and its loss as one graph, in the dtype of `precision` where the engine
    runs it, normalize it, and cut it into segments, such as layers. Returns them, with the graph of
    each structure, as a `TracedModel`.

    Args:
        model: the model; it is not changed.
        example_inputs: the tensors of one batch; only shapes and dtypes count.
        loss_fn: `loss_fn(output, target)`, for a model that returns no loss.
        precision: a key of `PRECISION_DTYPES`. By default the model's dtypes stay.
        deeper: how many more layers the result has than `model`, each like a captured one. By default
            none.
        kept_buffers: buffers that half precision may leave in their dtype. By default any that the
            model casts back.
        batch_dims: as for `plan`.

    Raises AutoparError if the model cannot be captured.
    """
    from autopar.models.hf_delta_rule import triangular_solves

    dtype = PRECISION_DTYPES.get(precision or "")

    def traced(together: int = 1) -> tuple[TracedModel, int]:
        """(the model, `together` rows taken for one; what `rows_together` gives for it)."""
        captured = capture(
            prepared(model, example_inputs), example_inputs, loss_fn, dtype, batch_dims, together
        )
        notes = normalize(captured.graph)
        check_spans(captured.graph)
        captured = replace(captured, notes=(*captured.notes, *notes))
        divided, limits = rows_together(captured.graph), take_row_limits(captured)
        split, values = split_loss(captured)
        parameters = uncast_buffers(
            captured.graph, captured.attributes, captured.parameters, kept_buffers
        )
        captured = replace(captured, parameters=parameters)
        if deeper is not None:
            captured = deepened(captured, deeper)
        found = find_segments(captured, split, values)
        return replace(found, row_limits=limits, precision=precision or ""), divided

    with warnings.catch_warnings(), seldom_collected(), triangular_solves(model):
        # our graphs hold batch sizes as expressions, on purpose
        warnings.filterwarnings("ignore", message="Raw Sym(Int|Float) value")
        # torch's own, of its copy of a call graph
        warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
        found, together = traced()
        if together > 1 and not found.split.joins:
            with contextlib.suppress(AutoparError):  # as for an example of other rows
                grouped, _ = traced(together)
                found = in_groups_noted(grouped) if grouped.split.joins else found
        return found


def trace_spec(spec: ModelSpec, seq: int, precision: str | None = None) -> TracedModel:
    """`trace` of the model that `spec` builds, on a batch of 2 rows of `seq` tokens. If its layers
    are known to be alike, a model with fewer layers is captured and then deepened. If they turn out
    not to be, all layers are captured. `precision` is as for `trace`.
    """
    if spec.shallow().num_layers < spec.num_layers:
        try:
            return trace_shallow(spec, seq, precision)
        except AutoparError:  # a layer that differs, or what the whole model is refused for too
            pass
    inputs, dims = spec.example_inputs(2, seq), spec.batch_dims()
    return trace(spec.build("meta"), inputs, None, precision, batch_dims=dims)


def trace_shallow(spec: ModelSpec, seq: int, precision: str | None = None) -> TracedModel:
    """`trace` of the model that `spec` builds, from fewer layers. Arguments as for `trace_spec`.
    Raises AutoparError if the layers do not repeat, or there are no more than `spec.shallow()` has.
    """
    shallow, period = spec.shallow(), spec.period
    deeper = Deeper(spec.layers_path, period, (spec.num_layers - shallow.num_layers) // period)
    inputs, dims = shallow.example_inputs(2, seq), shallow.batch_dims()
    return trace(shallow.build("meta"), inputs, None, precision, deeper, batch_dims=dims)


def plan(
    model: nn.Module,
    cluster: Cluster | str,
    example_inputs: ExampleInputs | None = None,
    global_batch: int | None = None,
    pin: Mapping[str, Any] | None = None,
    loss_fn: Callable | None = None,
    precision: str | None = None,
    time_limit_s: float = TIME_LIMIT_S,
    traced: TracedModel | None = None,
    progress: Callable[[str], None] | None = None,
    software: Software | str | None = None,
    objective: str = OBJECTIVES[0],
    deadline_s: float | None = None,
    allow_micro_batch_mean: bool = False,
    batch_dims: BatchDims | None = None,
    headroom: float | str | None = None,
    tolerance: float = TOLERANCE,
    runners_up: bool = False,
    target: str | None = None,
) -> Plan:
    """Return the best plan for `model` on `cluster` that fits, with a certificate. The best is by
    default the simplest within `tolerance` of the fastest; see `objective`.

    Args:
        model: the model; it may be on the meta device, since only shapes count.
        cluster: a `ClusterSpec`, or a text such as 'dgx-h100:8'.
        example_inputs: a mapping or tuple of the tensors of one batch.  Only shapes and dtypes count, so meta tensors are enough.
            A Hugging Face model has a default.
        global_batch: sequences per step over all devices.  By default the rows of the example, rounded up to a multiple of the
            number of devices.
        pin: choices that are fixed, such as {"tp": 8}.  A plan with every choice pinned is a prediction.
        loss_fn: `loss_fn(output, target)`, for a model that returns no loss.
        precision: 'bf16', 'fp16', 'fp32' or 'fp64'.  By default the model's own, but bf16 on GPUs for an fp32 model (fp16 if they have
            no bf16).  A note of the plan says so.
        time_limit_s: seconds for everything: tracing, every search of the objective, simpler plans, runners-up, and what would fit if
            nothing does.  Tracing cannot be cut short: what follows has at least half of them.
        traced: the result of `autopar.api.trace`, to trace the model only once.
        progress: `progress(line)` is called as the search goes.
        software: what the predictions are for: the name of a framework, such as 'deepspeed', or a `Software`.  By default that of the
            target, or autopar's own.  With `target`, what a `Software` has besides its defaults replaces that of the target.
        objective: what the plan is to be best at.  'time' is the fastest step.  'cost' is the lowest cost per token on a part of
            the cluster.  'gpus' is the fewest devices whose step takes at most `deadline_s`.  'memory' is the least memory of the
            fullest device.  Notes of the plan say what is proved.
        deadline_s: seconds of a step.  The objective 'gpus' requires it; others do not allow it.
        allow_micro_batch_mean: split the batch even if the mean of micro-batch losses is not the loss of the batch.
        batch_dims: which dim of an input is the batch, by the input's name, such as {"frames": 1}; None for an input that is the same
            for all rows.  Without it rows are along dim 0 of every input whose dim 0 is as long as that of the first.
        headroom: memory of a device that the plan leaves free: a fraction such as 0.1, or GiB such as 8 or '8GiB'.  By default that of
            the cluster, or else 16.5 % on GPUs, at which the chance to fit is 95 %, and nothing on CPUs.  For another chance, give
            `autopar_cost_models.memory_error.headroom_for(0.99)`.
        tolerance: the fraction by which the plan may take longer than the fastest, if it is simpler; up to 2.5 times as much if it is
            much simpler (`ir/simplicity.py`).  With 0 it is the fastest.
        runners_up: whether the certificate gets the best plan of each other family of layouts.
        target: search only what this framework can run, such as 'megatron'.  `autopar.export` then says the plan in its words.

    Raises:
        AutoparError: the model cannot be captured, an argument or a pin is impossible, or no number of devices meets the deadline.
        NoPlanFits: no plan fits, or none was found in time (then `proven` is False).  The message says what would fit, if the least
            memory that a plan needs is known.
    """
    check_arguments(locals())
    deadline = Deadline.after(time_limit_s)
    read = reading_note(cluster) if isinstance(cluster, str) else ""
    cluster, goal = parsed_cluster(cluster).kept_free(headroom), Goal(objective, deadline_s)
    example_inputs = _example(model, example_inputs)
    chosen = (
        precision if precision is not None else default_precision(model, choose_precision(cluster))
    )
    default = partial(_default_batch, example_inputs, batch_dims, cluster)
    pins = Pins.of(pin or {})
    software = software_like(software, Software(), cluster, pins, chosen, target)
    captured = captured_in(chosen, software.is_own)
    request = PlanRequest(
        cluster,
        default(1) if global_batch is None else global_batch,
        pins,
        precision=chosen,
        model_name=type(model).__name__,
        software=software,
        micro_batch_mean=allow_micro_batch_mean,
        model_text=_model_text(model, captured),
        tolerance=tolerance,
        runners_up=runners_up,
    )
    if traced is None:
        traced = trace(model, example_inputs, loss_fn, captured, batch_dims=batch_dims)
    _check_captured(traced, captured)
    if target is not None:
        shape, seq = shape_of_module(model), tokens_per_row(traced)
        request = request.within(restriction_of(target, shape, seq))
    if global_batch is None:
        request = replace(request, global_batch=default(traced.together))
    note = ""
    # what half precision leaves as it is, is known where the model is captured in it
    if precision is None:
        note = _precision_note(model, example_inputs, chosen, traced, captured is not None)
    deadline = deadline.captured(deadline.clock() - deadline.start_s)
    return _noted(_noted(_best_plan(goal, traced, request, deadline, progress), note), read)


def _check_captured(traced: TracedModel, precision: str | None) -> None:
    """Raises AutoparError if a plan in half precision is asked of a model that was captured in
    another one.
    """
    if precision in HALF and traced.precision != precision:
        raise AutoparError(
            f"traced was captured in {traced.precision or 'the dtypes of the model'}, and the plan runs in {precision}: give it by "
            f"autopar.api.trace(model, inputs, precision={precision!r}), or leave it out"
        )


def _model_text(model: nn.Module, captured: str | None) -> str:
    """The text by which a command builds the model and captures the same graph; '' if none does.
    Commands build models in fp32. `captured` is the precision in which the graph is captured.
    """
    from autopar.models.spec import text_of_model

    is_alike = captured is not None or main_dtype(model) == torch.float32
    return text_of_model(model) if is_alike else ""


def _best_plan(
    goal: Goal,
    traced: TracedModel,
    request: PlanRequest,
    deadline: Deadline,
    progress: Callable[[str], None] | None,
) -> Plan:
    """The best plan for the goal, by the deadline; `progress(line)` is called as it goes (None: not
    at all).

    If no plan fits or none is found in time, raises NoPlanFits. Its message says what would fit, if
    the least memory of a plan is known.
    """
    searches = Searches(deadline, most_searches(goal, request.cluster))

    def plan_for(ask: Ask, limit_s: float) -> Plan:
        asked = replace(
            request,
            pin=Pins.of(ask.pin),
            cluster=ask.cluster,
            global_batch=ask.global_batch,
            keeps_tp_inside=goal.objective == "time",
        )
        return plan_traced(traced, asked, min(limit_s, searches.next_s()), progress)

    def plan_on(pin: Mapping[str, Any], cluster: Cluster) -> Plan:
        return plan_for(replace(ask, pin=pin, cluster=cluster), inf)

    ask = Ask(request.pin, request.cluster, request.global_batch, None)
    try:
        return choose(goal, plan_on, ask.cluster, ask.pin, progress or (lambda text: None)).plan
    except NoPlanFits as error:
        if error.least_bytes is None or deadline.is_over:
            raise
        words = str(remedies(error, plan_for, ask, deadline.at_most_s(BUDGET_S)))
        raise NoPlanFits(words, error.least_bytes, error.proven) from None


_plan = plan  # parallelize has an argument of that name


@lost_ranks("in parallelize")
def parallelize(
    model: nn.Module,
    cluster: Cluster | str | None = None,
    example_inputs: ExampleInputs | None = None,
    optimizer: Optimizer | None = None,
    plan: Plan | None = None,
    pin: Mapping[str, Any] | None = None,
    global_batch: int | None = None,
    loss_fn: Callable | None = None,
    max_grad_norm: float | None = None,
    clip: Clip | Sequence[Clip] | None = None,
    precision: str | None = None,
    weights: str | Path | None = None,
    seed: int = 0,
    timeout_s: float = TIMEOUT_S,
    buckets: Sequence[int] | None = None,
    compile: bool | Mapping[str, Any] | None = None,
    allow_micro_batch_mean: bool = False,
    batch_dims: BatchDims | None = None,
) -> Engine:
    """Plan `model` for `cluster`, rewrite it for this rank, and return the engine that trains it.

    Under torchrun every rank calls this with the same arguments.  Without torchrun the cluster must
    be one device. The model itself is not changed.

    Args:
        model: the model.  If it is on the meta device, its shards come from `weights`, or from its own initializers.
        cluster: a `ClusterSpec`, or a text such as 'cpu:4'.  By default that of `plan`.
        example_inputs: a mapping or tuple of the tensors of one batch.  Only shapes and dtypes count.  A Hugging Face model has a
            default.
        optimizer: a function from parameters to a torch optimizer.  By default torch.optim.AdamW with its defaults.  If its argument is
            called `named_parameters`, it gets pairs of name and parameter.  It is called twice for a class that may look at whole
            matrices.
        plan: a plan to run.  By default a plan is made.
        pin: choices that are fixed in the plan that is made.  Not allowed together with `plan`.
        global_batch: sequences per step over all devices.  By default that of `plan`, or else as for `autopar.plan`.
        loss_fn: `loss_fn(output, target)`, for a model that returns no loss.  The target is the entry of the batch called labels,
            targets, target or label; if there is none, the last entry.
        max_grad_norm: the global norm at which gradients are clipped.  By default they are not clipped.
        clip: an `autopar.ClipNorm` or `autopar.ClipValue`, or a list of them, applied in order, before `max_grad_norm`.
        precision: as for `plan`.  Rank 0 prints what a default changes.  A given plan has its own precision.
        weights: a .safetensors file, a folder of them, or a torch checkpoint.  Tensors have the names of the model's, or those of
            published Hugging Face checkpoints.  By default the model's own values on rank 0.
        seed: seeds the initializers of a model on the meta device, and the masks of dropout.
        timeout_s: seconds after which a rank that waits for another one stops with an error.  A process group that exists already
            keeps its own limit.
        buckets: lengths to which shorter batches are filled up.  Loss and parameters are those of the batch as it was given.
        compile: True, or a dict of options (backend, mode, options, dynamic).  What segments compute between collectives goes through
            torch.compile, and a plan made here is priced for that.  By default as the software of `plan`, or else False.
        allow_micro_batch_mean: as for `plan`.  By default as `plan`.
        batch_dims: as for `plan`.

    Raises:
        AutoparError: the plan belongs to another model, cluster or world size, or comes with pins, another batch or precision; the
            weights have other names or shapes; or as for `plan`.
        NoPlanFits: as for `plan`.
    """
    check_arguments(locals())
    check_beside_plan(plan, pin, global_batch, precision, allow_micro_batch_mean)
    # imported here, so that planning does not wait for them
    from autopar.runtime.engine import Engine, start_process_group

    cluster, given, compile = _decided(plan, cluster, precision, compile)
    example_inputs = _example(model, example_inputs)
    inputs = [example_inputs, *_shorter(model, example_inputs, buckets, batch_dims)]
    start_process_group(cluster.device_type, timeout_s)
    chosen = given if given is not None else default_precision(model, choose_precision(cluster))
    traced, *shorter = _traced_on_ranks(model, inputs, loss_fn, chosen, batch_dims)
    note = _precision_note(model, example_inputs, chosen, traced) if given is None else ""
    checked = _checked_weights(weights, model, traced)
    make = partial(
        _plan,
        model,
        cluster,
        example_inputs,
        global_batch,
        pin,
        precision=chosen,
        traced=traced,
        software=Software(compiled=compile is not False),
        allow_micro_batch_mean=allow_micro_batch_mean,
        batch_dims=batch_dims,
    )
    return Engine(
        model,
        traced,
        _agreed(lambda: plan or make(), traced, cluster, note),
        optimizer,
        max_grad_norm,
        checked,
        device_type=cluster.device_type,
        seed=seed,
        shorter=None if buckets is None else shorter,
        compile=compile,
        clip=clip,
    )


def _decided(
    plan: Plan | None,
    cluster: Cluster | str | None,
    precision: str | None,
    compile: bool | Mapping[str, Any] | None,
) -> tuple[Cluster, str | None, bool | Mapping[str, Any]]:
    """(cluster, precision, `compile`) of a plan, or without one those that are given. Raises
    AutoparError if another cluster than the plan's is given, if it is not known, or if the engine
    cannot compile a plan that was made for compiled code.
    """
    from autopar.runtime.programs.compiled import check_compiles

    if plan is None:
        return parsed_cluster(cluster), precision, False if compile is None else compile
    if compile is None:
        compile = bool(plan.made_for.software.get("compiled"))
        try:
            if compile:
                check_compiles(plan)
        except AutoparError as error:
            raise AutoparError(f"the plan was made for compiled code: {error}") from None
    found = cluster_of(plan, cluster if cluster is None else parsed_cluster(cluster))
    if found is None:
        raise AutoparError(
            f"the plan's file does not say its whole cluster {plan.cluster_name}: give cluster="
        )
    return found, plan.precision, compile


def _shorter(
    model: nn.Module,
    example_inputs: ExampleInputs,
    buckets: Sequence[int] | None,
    batch_dims: BatchDims | None,
) -> list[ExampleInputs]:
    """The example batch, cut to each length of `buckets`. Raises AutoparError if the model would
    compute something else for a batch that is filled up to one.
    """
    from autopar.models.hf_rope import check_lengths

    if buckets is None:
        return []
    lengths = shorter_lengths(example_inputs, buckets, batch_dims)
    check_lengths(model, [*lengths, sequence_length(example_inputs, batch_dims)])
    return [shortened_inputs(example_inputs, length, batch_dims) for length in lengths]


def _checked_weights(
    path: str | Path | None, model: nn.Module, traced: TracedModel
) -> Weights | None:
    """The checkpoint at `path`, its names and shapes compared with the model's. None without one."""
    from autopar.runtime.state.weights import Weights

    return None if path is None else Weights(path, model, traced.parameters)


def _agreed(decide: Callable[[], Plan], traced: TracedModel, cluster: Cluster, note: str) -> Plan:
    """The plan that rank 0 gets from `decide()`, checked against model and cluster, on every rank.
    `note` becomes its first note, unless it is ''. Rank 0 prints `note`, what each micro-batch
    computes by itself, and why the batch is not split.
    """
    from autopar.runtime.engine import agree_on_plan

    def checked() -> Plan:
        found = decide()
        check_plan(found, traced, cluster)
        return _noted(found, note)

    if note:
        say(note)
    agreed = agree_on_plan(checked)
    for line in split_notes(traced, agreed.micro_batch_mean):
        say(line)
    return agreed


def _precision_note(
    model: nn.Module,
    example_inputs: ExampleInputs,
    precision: str,
    traced: TracedModel,
    cast_buffers: bool = True,
) -> str:
    keeping = [
        spec
        for spec in traced.parameters.values()
        if spec.keeps_dtype or (spec.buffer and not cast_buffers)
    ]
    kept = {name for spec in keeping for name in (spec.name, *spec.aliases)}
    return precision_note(model, batch_tensors(example_inputs), precision, kept)


def _noted(plan: Plan, note: str) -> Plan:
    """The plan with `note` as its first note; unchanged if `note` is empty."""
    return replace(plan, notes=(note, *plan.notes)) if note else plan


def _traced_alike(
    model: nn.Module,
    inputs: Sequence[ExampleInputs],
    loss_fn: Callable | None,
    precision: str,
    batch_dims: BatchDims | None,
) -> list[TracedModel]:
    """`trace` of a model on each of `inputs`, batches of several lengths. A buffer keeps its dtype
    in all of them or in none, so that all store the same tensors. Other arguments are those of
    `trace`. Raises AutoparError if no parameter requires a gradient.
    """
    check_trains(model)
    traced_on = partial(trace, model, loss_fn=loss_fn, precision=precision, batch_dims=batch_dims)
    found = [traced_on(each) for each in inputs]
    kept = [
        {name for name, spec in traced.parameters.items() if spec.keeps_dtype} for traced in found
    ]
    common = set.intersection(*kept)
    return [
        traced if own == common else traced_on(each, kept_buffers=common)
        for traced, own, each in zip(found, kept, inputs, strict=True)
    ]


def _traced_on_ranks(model: nn.Module, *args: Any) -> list[TracedModel]:
    """`_traced_alike` of these arguments, which every rank calls. Raises AutoparError on all ranks
    if it fails on one, or if ranks trace different models.
    """
    import torch.distributed as dist

    from autopar.runtime.ranks.agreement import from_all, from_first

    found: list[TracedModel] = []

    def hashes() -> list[str]:
        found.extend(_traced_alike(model, *args))
        return [traced.model_hash for traced in found]

    group = dist.group.WORLD if dist.is_initialized() else None
    first, *others = from_all(group, hashes)
    if any(other != first for other in others):
        mine = _parameters_told(found[0])
        told = from_first(group, lambda: mine)
        reasons = from_all(group, lambda: _difference(told, mine))
        rank = next(rank for rank, other in enumerate(others, 1) if other != first)
        why = reasons[rank] or (
            "it computes something else. Does it depend on the rank, by an attribute that __init__ sets for example?"
            if len(others[rank - 1]) == len(first)
            else f"it has {len(others[rank - 1]) - 1} buckets, and rank 0 has {len(first) - 1}."
        )
        raise AutoparError(
            f"rank {rank} has another model than rank 0: {why} Every rank must build the same model, as for one process: autopar shares "
            "out the batch and the parameters"
        )
    return found


def _parameters_told(traced: TracedModel) -> dict[str, tuple[tuple[int, ...], str, bool]]:
    """The shape and dtype of each parameter and buffer, and whether it is trained, by name."""
    return {
        name: (tuple(spec.shape), spec.dtype, spec.trainable)
        for name, spec in traced.parameters.items()
    }


def _difference(
    first: Mapping[str, tuple[tuple[int, ...], str, bool]],
    mine: Mapping[str, tuple[tuple[int, ...], str, bool]],
) -> str:
    """The first difference between rank 0's parameters and this rank's, as a sentence; '' without
    one. Arguments are as `_parameters_told` returns them.
    """
    for name in (*first, *mine):
        if name not in first or name not in mine:
            return f"it has {'no' if name in first else 'a'} tensor {name}, unlike rank 0."
        (shape, dtype, trains), (own_shape, own_dtype, own_trains) = first[name], mine[name]
        if shape != own_shape:
            return f"{name} has shape {own_shape}, and {shape} on rank 0."
        if dtype != own_dtype:
            return f"{name} has dtype {own_dtype}, and {dtype} on rank 0."
        if trains != own_trains:
            return f"{name} has requires_grad={own_trains}, and {trains} on rank 0."
    return ""


def prepared(model: nn.Module, inputs: Collection[Any] = ()) -> nn.Module:
    """The model to trace. With Hugging Face models in it: a meta copy, with maskless attention
    where the architecture allows it. Otherwise `model` itself. `inputs` is the batch.
    """
    from autopar.models.hf import hf_models, prepare_hf

    names = inputs if isinstance(inputs, Mapping) else None
    return prepare_hf(meta_copy(model), names) if hf_models(model) else model


def _example(model: nn.Module, example_inputs: ExampleInputs | None) -> ExampleInputs:
    """The example batch that was passed; if None, the default of a Hugging Face model. Raises
    AutoparError if it is no batch, or if another model has none.
    """
    found = example_inputs if example_inputs is not None else default_inputs(model)
    check_example(found)
    return found


def default_inputs(model: nn.Module) -> ExampleInputs:
    """Example inputs of 2 rows for a Hugging Face model, from its config, with at most 512 tokens.
    Raises AutoparError for any other model.
    """
    if hasattr(model, "config") and hasattr(model, "_init_weights"):
        from autopar.models.hf import hf_example_inputs, is_hf_model

        if is_hf_model(model):
            return hf_example_inputs(
                model,
                batch=2,
                seq=min(getattr(model.config, "max_position_embeddings", 512) or 512, 512),
            )
    raise AutoparError(
        f"{type(model).__name__} needs example_inputs: a mapping from argument names to tensors of one batch "
        "(meta tensors are enough), labels included"
    )


def _default_batch(
    example_inputs: ExampleInputs, batch_dims: BatchDims | None, cluster: Cluster, together: int
) -> int:
    """The rows of the example batch, rounded up to whole groups of `together` rows, equally many on
    each device. `batch_dims` is that of `plan`.
    """
    tensors = batch_tensors(example_inputs)
    dims = row_dims(tensors, batch_dims)
    rows = next(tensors[name].shape[dim] for name, dim in dims.items() if dim is not None)
    least = cluster.num_devices * together
    return -(-rows // least) * least
