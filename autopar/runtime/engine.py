"""The engine: trains a program step by step, with the results of a single device."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.errors import AutoparError
from autopar.files import path_of
from autopar.ir.plan import Plan
from autopar.ir.traced import TracedModel
from autopar.ops.work import model_flops
from autopar.rewrite.collectives.axes import active_axes
from autopar.rewrite.collectives.ranges import named
from autopar.rewrite.shape_check import checked_program
from autopar.runtime.batches.batch_checks import IndexLimits
from autopar.runtime.batches.micro_batches import BatchSplitter, MicroBatches
from autopar.runtime.batches.padding import check_alike, check_model
from autopar.runtime.batches.step_values import RowLimits
from autopar.runtime.changes import Changeable
from autopar.runtime.checkpoint.checkpoint import Checkpoints
from autopar.runtime.checkpoint.plain_state import refuse_plain
from autopar.runtime.observe.metrics import Meter, Metrics
from autopar.runtime.observe.profiling import Profile, named_segments, traced_run
from autopar.runtime.passes import Passes
from autopar.runtime.programs.compiled import Compiler, Coverage, check_compiles
from autopar.runtime.programs.recompute import kept_in_split_backward, wrap_recomputed
from autopar.runtime.ranks.agreement import TIMEOUT_S, lost_ranks
from autopar.runtime.ranks.process_groups import join_process_group, mesh_axes
from autopar.runtime.state.clipping import Clip
from autopar.runtime.state.holding import HOST, Holding
from autopar.runtime.state.materialize import materialize
from autopar.runtime.state.optimizers import check_dense_is_the_same
from autopar.runtime.state.parameters import Parameters
from autopar.runtime.state.precision import PRECISION_DTYPES, LossScale
from autopar.runtime.state.tied_parameters import StageParameters
from autopar.runtime.state.weights import Weights
from autopar.trace.fusion.fused import fused

Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def _checked_compiler(
    plan: Plan,
    max_grad_norm: float | None,
    compile: bool | Mapping[str, Any],
    device_type: str,
) -> Compiler:
    """The compiler of segments for the option `compile`. Raises AutoparError if the engine cannot
    run the plan, or not with these options.
    """
    compiler = Compiler(compile)
    if plan.precision not in PRECISION_DTYPES:
        raise AutoparError(
            f"the engine cannot run precision {plan.precision!r} yet; it runs {', '.join(PRECISION_DTYPES)}"
        )
    if plan.lacks:
        raise AutoparError(
            f"the plan is for {plan.framework}, and autopar's engine lacks {plan.lacks} to run it: plan without target= and software="
        )
    if kept_in_split_backward(plan):
        raise AutoparError(
            "the engine cannot run recompute=op under zero_bubble: torch keeps results for one backward, which zero "
            "bubble parts in two; pin recompute=selective, or schedule=1f1b"
        )
    if compiler.on:
        check_compiles(plan, compiler.cuda_graphs and device_type == "cuda")
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise AutoparError(f"max_grad_norm={max_grad_norm} must be positive")
    return compiler


class Engine(Changeable):
    """A model that trains under a plan.  Build it with `autopar.parallelize`.

    Attributes:
        plan: the plan that the engine runs.
        program: the rewritten graphs of this rank.  `print(engine.program.code)` shows them.
        optimizer: the torch optimizer over this rank's parameters.  Under tensor parallelism they are DTensors.  If its class may
            look at whole matrices, they are the whole parameters that this rank owns.
        steps: the number of steps that were run.
        seed: with `steps` it determines the masks of dropout.  `load` sets both.
    """

    def __init__(
        self,
        model: nn.Module,
        traced: TracedModel,
        plan: Plan,
        optimizer: Optimizer | None,
        max_grad_norm: float | None,
        weights: Weights | None,
        device_type: str,
        seed: int = 0,
        shorter: Sequence[TracedModel] | None = None,
        compile: bool | Mapping[str, Any] = False,
        clip: Clip | Sequence[Clip] | None = None,
    ) -> None:
        """`shorter`: the model traced with shorter batches, shortest first. With it (even if
        empty), shorter batches are padded. `device_type` is 'cpu' or 'cuda'. For the other
        arguments see `parallelize`.
        """
        traced = fused(traced, plan.fusion.mode)
        shorter = None if shorter is None else [fused(one, plan.fusion.mode) for one in shorter]
        self._compiler = _checked_compiler(plan, max_grad_norm, compile, device_type)
        self.plan, self.max_grad_norm, self.seed, self.steps = plan, max_grad_norm, seed, 0
        self.device = start_process_group(device_type)
        self.device_mesh, self.axes = mesh_axes(plan.mesh, self.device.type)
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.program = checked_program(traced, plan, self.rank, self.device)
        mesh = self.device_mesh
        self._stage_group = mesh.get_group("pp") if mesh and plan.mesh.pp > 1 else None
        self._shared = StageParameters(self.program, self.axes["pp"], self._stage_group)
        self._all_specs, self._constants = traced.parameters, traced.constants
        self.together = traced.together
        self._for_steps: dict[str, torch.Tensor] | None = None
        self._segments = tuple(segment.name for segment in traced.segments)
        self._state_names = set(model.state_dict())
        self._layouts = {p.spec.name: p.layouts for p in self.program.parameters}
        self._filled_up: Counter[int] = Counter()
        lengths = (traced,) if shorter is None else (*shorter, traced)
        programs = [checked_program(one, plan, self.rank, self.device) for one in lengths[:-1]]
        self._programs = (*programs, self.program)
        self.batches = self._splitter(lengths, fills_up=shorter is not None)
        self.parameters = self._placed_parameters(model, weights)
        self._begin_updates(model, torch.optim.AdamW if optimizer is None else optimizer, clip)
        self._leaves, self._masters = self.parameters.leaves, self.parameters.masters
        check_dense_is_the_same(self.optimizer, traced)
        for program in programs:
            self.parameters.give(program, self.device)
        for program, one in zip(self._programs, lengths, strict=True):
            wrap_recomputed(program, plan, one)
            self._compiler.compile(program)
        refuse_plain(self.optimizer, self._updating.groups)
        self.loss_scale = LossScale.of(plan.precision)
        self._passes = self._made_passes()
        self._row_limits = [RowLimits(one.row_limits, self.parameters) for one in lengths]
        self._checkpoints = Checkpoints(self)
        self._meter = Meter(plan, self.device, self.axes["pp"].index)

    def _made_passes(self) -> Passes:
        """The object that runs passes, of what the engine has made before."""
        return Passes(
            plan=self.plan,
            axes=self.axes,
            device=self.device,
            programs=self._programs,
            parameters=self.parameters,
            shared=self._shared,
            batches=self.batches,
            loss_scale=self.loss_scale,
            compiler=self._compiler,
            stage_group=self._stage_group,
        )

    def _splitter(self, lengths: Sequence[TracedModel], fills_up: bool) -> BatchSplitter:
        """The object that splits batches into micro-batches. `lengths` are the traced models,
        shortest batches first. `fills_up`: it pads batches to the next of these lengths.
        """
        if fills_up:
            check_model(lengths[-1])
        flops = [model_flops(one, self.plan.global_batch) for one in lengths] if fills_up else []
        splitter = BatchSplitter(
            self.program,
            self.plan,
            self.axes,
            self.device,
            lengths[-1],
            tensors=self._step_tensors,
            programs=self._programs if fills_up else (),
            flops=flops,
        )
        splitter.indices = tuple(map(IndexLimits, lengths))
        return splitter

    def _placed_parameters(self, model: nn.Module, weights: Weights | None) -> Parameters:
        """Put this rank's parts of the model's tensors into the program, and return them as
        `Parameters`. They are read from `weights`, or if that is None, from the model, which
        initializes them if it is on the meta device.
        """
        plan, kind = self.plan, self.device.type
        specs = {name: spec for name, spec in self._all_specs.items() if self._shared.holds(name)}
        sharing_mesh, sharing = self.device_mesh, self.axes
        if plan.shard:
            sharing_mesh, sharing = mesh_axes(plan.mesh, kind, plan.shard)
        offloaded = plan.offload != "none" and self.device_mesh is not None
        if offloaded:
            sharing_mesh = mesh_axes(plan.mesh, HOST.type, plan.shard)[0]
        holding = Holding(plan, specs, self._layouts, sharing, self.device)
        tensors = materialize(
            self.program,
            model,
            self._all_specs,
            weights,
            self.device,
            home=holding.home,
            dtype=holding.stored_dtype,
            seed=self.seed,
            held=specs,
            kept=holding.kept,
        )
        own = Parameters(holding, sharing_mesh)
        own.install(self.program, tensors, self.device)
        return own

    @property
    def compiled(self) -> Coverage | None:
        """How much of this rank's programs is compiled, in counts, and which ops are not. Programs
        for other batch lengths and for evaluation count once they are made. None without
        torch.compile.
        """
        return self._compiler.coverage

    def _step_tensors(self) -> Mapping[str, torch.Tensor]:
        """Whole buffers and constants, by name, from which step values (numbers that need the whole
        batch) are computed. Cached. Every rank must call it.
        """
        values = self.program.step_values
        names = () if values is None else values.tensors
        if self._for_steps is None:
            buffers = {name: self._whole(name) for name in names if name in self._leaves}
            specs = {name: self._all_specs[name] for name in names if name in self._all_specs}
            constants = {
                name: self._constants[name].to(self.device) for name in names if name not in specs
            }
            self._for_steps = constants | (self._shared.everywhere(buffers, specs) if specs else {})
        return self._for_steps

    # --------------------------------------------------------------------------------------------------------------- steps

    def local_batch(self, batch: Any) -> Any:
        """This data-parallel rank's rows of a global batch: a mapping if `batch` is one, otherwise
        a tuple. Tensors without rows stay whole. If ranks do not divide the batch, the first ones
        get one row more. Raises AutoparError if a tensor lacks its dim of rows.
        """
        return self.batches.local(batch)

    @lost_ranks("in a step")
    def step(self, batch: Any) -> torch.Tensor:
        """Run forward, backward, the reduction of gradients and the update of one step.

        Args:
            batch: this data-parallel rank's rows, from `local_batch` or a loader with `sampler`.

        Returns:
            The loss of the global batch: a detached scalar, equal on every rank. If micro-batches
                may not be split exactly and the plan allows it, the mean of their losses.

        Raises:
            AutoparError: the batch does not fit the model or differs between ranks that share it,
                no parameter is trained, or a rank is lost.
        """
        self._meter.begin()
        with named("step", self.steps + 1):
            with named("batch"):
                work = self._split("step", batch, trains=True)
                self._check_filled_up(work)
            self._limit_rows(work)
            try:
                total = self._trained(partial(self._pass, work))
            except BaseException:
                self.parameters.gradients.clear()  # the next step must not train on what this one left
                raise
        self._meter.end(self.steps, total, work.size)
        return total

    @property
    def metrics(self) -> Metrics:
        """Loss, time, tokens and memory of the last step, with the predictions. On a GPU, this
        waits for the step. Raises AutoparError before the first step.
        """
        return self._meter.metrics()

    @contextlib.contextmanager
    def profile(self, directory: str | Path) -> Iterator[Profile]:
        """Trace the steps of a `with` block. Each rank writes `rank-N.json`, for chrome://tracing
        or Perfetto.

        The ranges of the trace have the names of segments, stages, micro-batches and collectives.

        Args:
            directory: where the traces are written.

        Returns:
            A `Profile` with the times of these ranges and of exposed communication. Printed, it
                compares them with the plan's.

        Raises:
            AutoparError: the trace cannot be written, or a torch profiler is running already.
        """
        found = Profile(path_of(directory, "traces") / f"rank-{self.rank}.json", self.plan)
        with traced_run(found.path, self.device), contextlib.ExitStack() as stack:
            for program in self._programs:
                stack.enter_context(named_segments(program, self._segments))
            yield found

    @lost_ranks("in an evaluation")
    def eval_step(self, batch: Any) -> torch.Tensor:
        """The loss of the global batch, as `step` returns it, without gradients, with dropout off
        and batch norm on running statistics. A scalar that is equal on every rank. `batch` has this
        data-parallel rank's rows.
        """
        work = self._split("eval_step", batch)
        self._check_filled_up(work)
        self._limit_rows(work)
        return self._evaluate(work)

    def _split(self, method: str, batch: Any, trains: bool = False) -> MicroBatches:
        """This rank's micro-batches of a batch for a call of `method`, after which graphs read what
        the user has written into masters since the last step.
        """
        if self._for_steps is None and self.program.step_values is not None:
            with lost_ranks(f"in {method}"):
                self.batches.meet(self._call(method))  # before the whole buffers are gathered
        refused = None
        try:
            self._check_changes(trains)
        except AutoparError as error:  # the other ranks are to hear it too
            refused = error
        work = self.batches.split(batch, trains, self._call(method), refused)
        self._publish_changed()
        return work

    def _pass(self, work: MicroBatches) -> torch.Tensor:
        """Run forward and backward of a step's micro-batches. Returns the loss of the step."""
        with self._running(), self._randomness():
            return self._passes.train(work, partial(self._noise, work))

    def _limit_rows(self, work: MicroBatches) -> None:
        self._row_limits[work.number].apply(work.inputs, work.rows)

    def _evaluate(self, work: MicroBatches) -> torch.Tensor:
        with self._running(), torch.no_grad():
            return self._passes.evaluate(work, partial(self._noise, work))

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        with active_axes(self.axes), self._compiler.running(), self.parameters.present():
            yield

    def _check_filled_up(self, work: MicroBatches) -> None:
        """Raise AutoparError if the loss depends on the padding. This is checked on the 1st, 2nd,
        4th, 8th, ... padded batch of each length, since a weight that starts as zero may hide it at
        first.
        """
        if not work.filled:
            return
        self._filled_up[work.number] += 1
        if self._filled_up[work.number].bit_count() == 1:  # the 1st, 2nd, 4th, 8th ... of them
            one, other = (
                float(self._evaluate(replace(work, inputs=list(inputs))))
                for inputs in (work.inputs, work.filled)
            )
            length = self.batches.paddings[work.number].length
            check_alike(one, other, self.program.loss.dtype, work.size.longest, length)

    def _noise(self, work: MicroBatches, index: int) -> torch.Tensor:
        return self.batches.noise(work, index, self.seed, self.steps)


def agree_on_plan(decide: Callable[[], Plan]) -> Plan:
    """Rank 0's plan, on every rank. `decide` is called on rank 0 only; its AutoparError is raised
    on every rank. Without a process group, this rank decides.
    """
    if not dist.is_initialized():
        return decide()
    message: list[tuple[str, str]] = [("", "")]
    if dist.get_rank() == 0:
        try:
            message = [("plan", decide().to_json())]
        except AutoparError as error:
            message = [("error", str(error))]
    dist.broadcast_object_list(message, src=0)
    kind, text = message[0]
    if kind == "error":
        raise AutoparError(text)
    return Plan.from_json(text)


def start_process_group(device_type: str, timeout_s: float = TIMEOUT_S) -> torch.device:
    """This process' device; for CUDA, it also becomes the current one. Under torchrun, the process
    group is started if there is none: NCCL for CUDA, gloo for CPU.

    A rank that waits longer than `timeout_s` seconds in a collective raises an error. Raises
    AutoparError for CUDA without a GPU.
    """
    if device_type == "cuda" and not torch.cuda.is_available():
        raise AutoparError(
            "the plan is for GPUs and this process sees none; plan for cpu:N to run on CPU processes"
        )
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if device_type == "cuda":
        torch.cuda.set_device(local_rank)
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        join_process_group(
            "nccl" if device_type == "cuda" else "gloo", timedelta(seconds=timeout_s)
        )
    return torch.device(device_type, local_rank) if device_type == "cuda" else torch.device("cpu")
