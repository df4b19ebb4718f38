"""The engine: runs a program step by step, exactly as one device would."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.errors import AutoparError
from autopar.files import path_of
from autopar.ir.plan import Plan
from autopar.ir.sharding import Layout
from autopar.ir.traced import TracedModel
from autopar.ops.work import model_flops
from autopar.rewrite.collectives.axes import active_axes
from autopar.rewrite.collectives.primitives import apply_primitive
from autopar.rewrite.collectives.ranges import named
from autopar.rewrite.lowerings.dropout import NOISE
from autopar.rewrite.program import Program, evaluation_copy
from autopar.rewrite.shape_check import checked_program
from autopar.runtime.batches.batch_checks import IndexLimits
from autopar.runtime.batches.micro_batches import BatchSplitter, MicroBatches
from autopar.runtime.batches.padding import check_alike, check_model
from autopar.runtime.checkpoint.checkpoint import Checkpoints
from autopar.runtime.checkpoint.engine_methods import Durable
from autopar.runtime.observe.metrics import Meter, Metrics
from autopar.runtime.observe.profiling import Profile, named_segments, traced_run
from autopar.runtime.pipeline.pipeline import Pipeline
from autopar.runtime.programs.compiled import Compiler, Coverage, check_compiles
from autopar.runtime.programs.recompute import kept_in_split_backward, wrap_recomputed
from autopar.runtime.ranks.agreement import TIMEOUT_S, lost_ranks
from autopar.runtime.ranks.process_groups import join_process_group, mesh_axes
from autopar.runtime.state.gradients import global_norm, partial_axes
from autopar.runtime.state.materialize import materialize
from autopar.runtime.state.optimizers import is_elementwise, make_optimizer, step
from autopar.runtime.state.parameters import HOST, Parameters
from autopar.runtime.state.pieces import Cut, Held
from autopar.runtime.state.precision import PRECISIONS, LossScale
from autopar.runtime.state.sparse_gradients import check_dense_is_the_same
from autopar.runtime.state.tied_parameters import StageParameters

Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Engine(Durable):
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
        weights: str | Path | None,
        device_type: str,
        seed: int = 0,
        shorter: Sequence[TracedModel] | None = None,
        compile: bool | Mapping[str, Any] = False,
    ) -> None:
        """`shorter`: the model traced with shorter batches, shortest first; with it, () too, shorter batches are filled up.  `compile`: as
        `parallelize` has it."""
        if plan.precision not in PRECISIONS:
            raise AutoparError(
                f"the engine cannot run precision {plan.precision!r} yet; it runs {', '.join(PRECISIONS)}"
            )
        if plan.runnable:
            raise AutoparError(f"the engine cannot run this plan yet: {plan.runnable}")
        if kept_in_split_backward(plan):
            raise AutoparError("the engine cannot run recompute=op under zero_bubble: torch keeps results for one backward, which zero "
                               "bubble parts in two; pin recompute=selective, or schedule=1f1b")  # fmt: skip
        self._compiler = Compiler(compile)
        if self._compiler.on:
            check_compiles(plan)
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise AutoparError(f"max_grad_norm={max_grad_norm} must be positive")
        self.plan, self.max_grad_norm = plan, max_grad_norm
        self.device = start_process_group(device_type)
        self.device_mesh, self.axes = mesh_axes(plan.mesh, self.device.type)
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.program = checked_program(traced, plan, self.rank, self.device)
        self._stage_group = self.device_mesh.get_group("pp") if plan.mesh.pp > 1 else None
        self._shared = StageParameters(self.program, self.axes["pp"], self._stage_group)
        self._all_specs, self._constants = traced.parameters, traced.constants
        self._for_steps: dict[str, torch.Tensor] | None = None
        self._specs = {
            name: spec for name, spec in traced.parameters.items() if self._shared.holds(name)
        }
        self._segments = tuple(segment.name for segment in traced.segments)
        lengths = () if shorter is None else (*shorter, traced)
        if lengths:
            check_model(traced)
        programs = [checked_program(one, plan, self.rank, self.device) for one in lengths[:-1]]
        self._programs = (*programs, self.program)
        flops = [model_flops(one, plan.global_batch) for one in lengths]
        self.batches = BatchSplitter(
            self.program,
            plan,
            self.axes,
            self.device,
            traced.split,
            self._step_tensors,
            self._programs if lengths else (),
            flops,
        )
        self.batches.indices = tuple(map(IndexLimits, lengths or (traced,)))
        self._layouts: dict[str, dict[str, Layout]] = {
            parameter.spec.name: parameter.layouts for parameter in self.program.parameters
        }
        self._evaluations: dict[int, Program] = {}
        self._pipelines: dict[tuple[str, int], Pipeline] = {}
        self._filled_up: Counter[int] = Counter()
        sharing_mesh, sharing = (
            mesh_axes(plan.mesh, self.device.type, plan.shard)
            if plan.shard
            else (self.device_mesh, self.axes)
        )
        offloaded = plan.offload != "none" and self.device_mesh is not None
        masters_mesh = mesh_axes(plan.mesh, HOST.type, plan.shard)[0] if offloaded else sharing_mesh
        self.parameters = Parameters(
            self.program, self._specs, self._layouts, plan, sharing, masters_mesh, self.device
        )
        own = self.parameters
        tensors = materialize(self.program, model, self._all_specs, weights, self.device, own.home, own.stored_dtype, seed, self._specs,
                              own.kept)  # fmt: skip
        own.install(self.program, tensors, self.device)
        self.optimizer = make_optimizer(
            torch.optim.AdamW if optimizer is None else optimizer, own, plan
        )
        self._leaves, self._masters = own.leaves, own.masters
        check_dense_is_the_same(self.optimizer, traced)
        for program in programs:
            own.give(program, self.device)
        for program, one in zip(self._programs, lengths or (traced,), strict=True):
            wrap_recomputed(program, plan, one)
            self._compiler.compile(program)
        self.loss_scale = LossScale.of(plan.precision)
        self._state_names = set(model.state_dict())
        self.seed, self.steps = seed, 0
        self._checkpoints = Checkpoints(self)
        self._meter = Meter(plan, self.device, self.axes["pp"].index)

    @property
    def compiled(self) -> Coverage | None:
        """How many ops of this rank's program are compiled, and which are not.  None without torch.compile."""
        return self._compiler.coverage

    # ---------------------------------------------------------------------------------------------------------- parameters

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Whole tensors by the model's own names (tied names included), equal on every rank.  Every rank must call."""
        wholes = {name: self._whole(name) for name in self._leaves}
        state: dict[str, torch.Tensor] = {}
        for name, whole in self._shared.everywhere(wholes, self._all_specs).items():
            state.update(
                (alias, whole)
                for alias in (name, *self._all_specs[name].aliases)
                if alias in self._state_names
            )
        return state

    def _whole(self, name: str) -> torch.Tensor:
        """The whole of a tensor that this rank holds a part of.  Every rank that holds one must call."""
        whole = self.parameters.whole(name)
        for group, split in reversed(self.parameters.splits(name)):
            whole = apply_primitive("all_gather", whole, group, split, None)
        return whole.clone()

    def _step_tensors(self) -> Mapping[str, torch.Tensor]:
        """Whole buffers and constants that values of a step are computed from; every rank calls."""
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

    # --------------------------------------------------------------------------------------------------------- checkpoints

    def saved_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the whole shapes of the parameters and persistent buffers that a checkpoint holds.  Tied ones have their first name."""
        return {
            name: spec.shape
            for name, spec in self._all_specs.items()
            if prod(spec.shape)
            and any(alias in self._state_names for alias in (name, *spec.aliases))
        }

    def held(self) -> dict[str, Held]:
        """Return what this rank holds of `saved_shapes`.

        Of a trained parameter it holds the master, which the optimizer updates, or nothing if another rank holds that.
        """
        found = {}
        for name, shape in self.saved_shapes().items():
            if name in self._leaves and self.parameters.has_master(name):
                cuts = tuple(
                    Cut(split.dim, group.size, group.index, split.pattern)
                    for group, split in self.parameters.cuts(name)
                )
                found[name] = Held(shape, self._masters.get(name, self._leaves[name]), cuts)
        return found

    # --------------------------------------------------------------------------------------------------------------- steps

    def local_batch(self, batch: Any) -> Any:
        """This data-parallel rank's rows of a global batch, in the same structure (mapping or tuple)."""
        return self.batches.local(batch)

    @lost_ranks("in a step")
    def step(self, batch: Any) -> torch.Tensor:
        """Run forward, backward, the reduction of gradients and the update; return the mean loss over the global batch.

        Args:
            batch: this data-parallel rank's rows, as `local_batch` or a loader over `sampler` gives them.

        Returns:
            A detached scalar, equal on every rank.
        """
        if not any(spec.trainable for spec in self._all_specs.values()):
            raise AutoparError(
                "no parameter of the model requires a gradient, so that a step has nothing to train; eval_step runs it"
            )
        self._meter.begin()
        with named("step", self.steps + 1):
            with named("batch"):
                work = self.batches.split(batch)
                self._check_filled_up(work)
            program = self._programs[work.number]
            program.module.train()
            try:
                with (
                    active_axes(self.axes),
                    self._compiler.running(),
                    self._randomness(),
                    self.parameters.present(),
                ):
                    total = (
                        self._accumulate(program, work)
                        if self._stage_group is None
                        else self._run_pipeline(work, training=True)
                    )
                with named("update"):
                    self._update()
            except BaseException:
                self.parameters.clear()  # the next step must not train on what this one left
                raise
        self._meter.end(self.steps, total, work.size)
        return total

    @property
    def metrics(self) -> Metrics:
        """Loss, time, tokens and memory of the last step, beside what was predicted.  On a GPU, reading them waits for the step."""
        return self._meter.metrics()

    @contextlib.contextmanager
    def profile(self, directory: str | Path) -> Iterator[Profile]:
        """Trace the steps of a `with` block.  Each rank writes `rank-N.json`, for chrome://tracing or Perfetto.

        The ranges of the trace have the names of segments, stages, micro-batches and collectives.

        Args:
            directory: where the traces are written.

        Returns:
            A `Profile` with the times of these ranges and of exposed communication.  Printed, it shows them beside the plan's.

        Raises:
            AutoparError: the trace cannot be written.
        """
        found = Profile(path_of(directory, "traces") / f"rank-{self.rank}.json", self.plan)
        with traced_run(found.path, self.device), contextlib.ExitStack() as stack:
            for program in self._programs:
                stack.enter_context(named_segments(program, self._segments))
            yield found

    def _backward(self, loss: torch.Tensor) -> None:
        """Backward of one micro-batch's loss."""
        (loss * self.loss_scale.scale if self.loss_scale.dynamic else loss).backward()
        self.parameters.after_backward()

    def _update(self) -> None:
        """Reduce the gradients, clip them and train on them, unless the loss scale was too large for them."""
        self.reduce_gradients()
        if self.loss_scale.unscale(self._gradients(), self.axes.values(), self.device):
            if self.max_grad_norm is not None:
                self._clip()
            self._hand_over_gradients()
            with (
                contextlib.nullcontext()
                if is_elementwise(self.optimizer)
                else self._randomness(update=True)
            ):
                step(self.optimizer)
            self.parameters.publish()
        self.steps += 1
        self.parameters.clear()

    @contextlib.contextmanager
    def _randomness(self, update: bool = False) -> Iterator[None]:
        """Every rank draws the same random numbers in a step, so that replicated values stay equal, and others in its update.  One device
        draws the user's own."""
        if self.plan.mesh.num_devices == 1:
            yield
            return
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            seed = (self.seed << 32) + self.steps
            torch.manual_seed(~seed if update else seed)
            yield

    @lost_ranks("in an evaluation")
    def eval_step(self, batch: Any) -> torch.Tensor:
        """The mean loss over the global batch, without gradients, with dropout off and batch norm on its running statistics."""
        work = self.batches.split(batch)
        self._check_filled_up(work)
        return self._evaluate(work)

    def _evaluate(self, work: MicroBatches) -> torch.Tensor:
        with (
            active_axes(self.axes),
            self._compiler.running(),
            torch.no_grad(),
            self.parameters.present(),
        ):
            if self._stage_group is not None:
                return self._run_pipeline(work, training=False)
            program = self._programs[work.number]
            if work.number not in self._evaluations:
                self._evaluations[work.number] = self._compiler.compile(evaluation_copy(program))
                if self._evaluations[work.number] is not program:
                    self.parameters.watch(self._evaluations[work.number].module)
            evaluation, scale, noise = (
                self._evaluations[work.number],
                self.batches.scale(work),
                self._noise(work, 0),
            )  # read by no one
            total = sum(
                self._forward(evaluation, inputs, noise)[0] * scale for inputs in work.inputs
            )
            return evaluation.whole_loss(total, self.axes)

    def _check_filled_up(self, work: MicroBatches) -> None:
        """Refuse a loss that depends on what batches are filled up with.  It is looked at ever more rarely: a weight that starts as zero
        may hide it at first."""
        if not work.filled:
            return
        self._filled_up[work.number] += 1
        if self._filled_up[work.number].bit_count() == 1:  # the 1st, 2nd, 4th, 8th ... of them
            losses = [
                float(self._evaluate(replace(work, inputs=list(inputs))))
                for inputs in (work.inputs, work.filled)
            ]
            padding = self.batches.paddings[work.number]
            check_alike(*losses, self.program.loss.dtype, work.size.longest, padding.length)

    def _accumulate(self, program: Program, work: MicroBatches) -> torch.Tensor:
        """Forward and backward of each micro-batch; returns the loss of the step."""
        total, scale = torch.zeros((), device=self.device), self.batches.scale(work)
        for k, inputs in enumerate(work.inputs):
            with named("micro-batch", k, "forward"):
                loss, updates = self._forward(program, inputs, self._noise(work, k))
            loss = loss * scale
            with named("micro-batch", k, "backward"):
                self._backward(loss)
            total = total + loss.detach()
            self._update_buffers(updates)  # now that backward has read the old values
        return program.whole_loss(total, self.axes)

    def _run_pipeline(self, work: MicroBatches, training: bool) -> torch.Tensor:
        """The loss of the step or of an evaluation, on every rank."""
        kind = "training" if training else "evaluation"
        key, program = (kind, work.number), self._programs[work.number]
        if key not in self._pipelines:
            program = program if training else self._compiler.compile(evaluation_copy(program))
            self._pipelines[key] = Pipeline(
                program, self.plan.schedule, len(self.plan.stages), self._stage_group, self.device
            )
        given = [inputs | {NOISE: self._noise(work, k)} for k, inputs in enumerate(work.inputs)]
        pipeline, scale = self._pipelines[key], self.batches.scale(work)
        with named("pipeline"):
            losses = (
                pipeline.train(given, work.rows, scale * self.loss_scale.scale)
                if training
                else pipeline.evaluate(given, work.rows)
            )
        total = torch.zeros((), device=self.device, dtype=self.program.loss.dtype)
        return program.whole_loss(
            self._shared.over_stages(sum((loss * scale for loss in losses), total)), self.axes
        )

    def _forward(
        self, program: Program, inputs: dict[str, torch.Tensor], noise: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """The loss, and the new values of `program.updates`."""
        found = program.module(*inputs.values(), *((noise,) if program.draws else ()))
        return (found[0], found[1:]) if program.updates else (found, ())

    def _update_buffers(self, values: tuple[torch.Tensor, ...]) -> None:
        with torch.no_grad():
            for name, value in zip(self.program.updates, values, strict=True):
                self._leaves[name].copy_(value)

    def _noise(self, work: MicroBatches, index: int) -> torch.Tensor:
        return self.batches.noise(work, index, self.seed, self.steps)

    # ----------------------------------------------------------------------------------------------------------- gradients

    def gradient_axes(self, name: str) -> tuple[str, ...]:
        """The axes over which the gradient of a parameter is a partial sum after backward."""
        return partial_axes(self._layouts.get(name, {}))

    def _gradients(self) -> dict[str, torch.Tensor]:
        return self.parameters.gradients()

    def reduce_gradients(self) -> None:
        """Add up the partial gradients of a step.  Under ZeRO each rank keeps the parts that it owns."""
        self._shared.add_up_tied(self.parameters)
        self.parameters.reduce(self._layouts)

    def gradient_norm(self) -> torch.Tensor:
        """The global 2-norm of the reduced gradients."""
        counted = {
            name: grad for name, grad in self._gradients().items() if self._shared.counts(name)
        }
        own = self.parameters
        norm = global_norm(counted, own.effective_layouts(self._layouts), own.axes, self.device)
        return (
            norm
            if self._stage_group is None
            else self._shared.over_stages(norm.double().square()).sqrt()
        )

    def _clip(self) -> None:
        """Scale gradients as torch.nn.utils.clip_grad_norm_ does on one device."""
        self._meter.norm = self.gradient_norm()
        scale = (self.max_grad_norm / (self._meter.norm + 1e-6)).clamp(max=1.0)
        for grad in self._gradients().values():
            grad.mul_(scale)

    def _hand_over_gradients(self) -> None:
        self.parameters.hand_over()


def agree_on_plan(decide: Callable[[], Plan]) -> Plan:
    """Rank 0's plan on every rank, so that ranks never follow different plans.  Rank 0's AutoparError is raised on every rank."""
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
    """This process' device; under torchrun, joins the process group (NCCL for CUDA, gloo for CPU) if nobody has.

    A rank that waits for another longer than `timeout_s` in a collective gives up.
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
