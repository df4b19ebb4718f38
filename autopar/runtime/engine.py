"""The engine: runs a program step by step, exactly as one device would."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from autopar.batches import batch_tensors
from autopar.errors import AutoparError
from autopar.ir.mesh import LAYOUT_AXES
from autopar.ir.plan import Plan
from autopar.ir.sharding import Layout, local_extent
from autopar.ir.traced import TracedModel
from autopar.ops.dims import has_batch, is_symbolic
from autopar.ops.loss import loss_adds_up
from autopar.rewrite.axes import active_axes
from autopar.rewrite.noise import step_noise
from autopar.rewrite.patterns import Split
from autopar.rewrite.primitives import apply_primitive
from autopar.rewrite.program import Program, evaluation_copy, module_name
from autopar.rewrite.verify import checked_program
from autopar.runtime.agreement import lost_ranks
from autopar.runtime.checkpoint import Checkpoints
from autopar.runtime.durable import Durable
from autopar.runtime.gradients import add_up, global_norm, partial_axes
from autopar.runtime.materialize import materialize
from autopar.runtime.pieces import Cut, Held
from autopar.runtime.process_groups import join_process_group, mesh_axes

PRECISIONS = {"fp32": torch.float32, "fp64": torch.float64}
"""Precisions that the engine runs, and their parameter dtype."""

TIMEOUT_S = 600.0
"""How long a rank waits for the others; planning and files are the longest that one rank does alone."""

Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Engine(Durable):
    """A model that trains under a plan.  Build it with `autopar.parallelize`.

    `optimizer` is the torch optimizer over this rank's parameters (DTensors where tensor parallelism shards or replicates them);
    `program` holds the rewritten graphs; `plan` is what they follow.  `seed` and `steps`, the number of steps run, determine the masks of
    dropout; `load` sets both.
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
    ) -> None:
        if plan.precision not in PRECISIONS:
            raise AutoparError(f"the engine cannot run precision {plan.precision!r} yet; it runs {', '.join(PRECISIONS)}")
        if plan.runnable:
            raise AutoparError(f"the engine cannot run this plan yet: {plan.runnable}")
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise AutoparError(f"max_grad_norm={max_grad_norm} must be positive")
        self.plan, self.max_grad_norm = plan, max_grad_norm
        self.device = start_process_group(device_type)
        self.device_mesh, self.axes = mesh_axes(plan.mesh, self.device.type)
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.program = checked_program(traced, plan, self.rank, self.device)
        self._specs, self._loss_adds_up = traced.parameters, loss_adds_up(traced)
        self._layouts: dict[str, dict[str, Layout]] = {parameter.spec.name: parameter.layouts for parameter in self.program.parameters}
        self._evaluation: Program | None = None
        self._leaves = self._install(materialize(self.program, model, self._specs, weights, self.device, PRECISIONS[plan.precision], seed))
        self._masters = {name: self._distributed(name, leaf) for name, leaf in self._leaves.items() if self._specs[name].trainable}
        self.optimizer = self._make_optimizer(optimizer or torch.optim.AdamW)
        self._wrap_recompute()
        self._state_names = set(model.state_dict())
        self.seed, self.steps = seed, 0
        self._checkpoints = Checkpoints(self)

    def _make_optimizer(self, factory: Optimizer) -> torch.optim.Optimizer:
        if not callable(factory) or isinstance(factory, torch.optim.Optimizer):
            raise AutoparError(
                "optimizer= takes a function from parameters to an optimizer, such as lambda params: torch.optim.AdamW(params, 3e-4); "
                f"this is a {type(factory).__name__}, built over tensors that the engine does not train"
            )
        optimizer = factory(list(self._masters.values()))
        own = {id(master) for master in self._masters.values()}
        foreign = sum(id(p) not in own for group in optimizer.param_groups for p in group["params"])
        if foreign:
            raise AutoparError(
                f"the optimizer holds {foreign} tensors that the engine does not train: build it from the parameters that the "
                "function is given, not from model.parameters()"
            )
        return optimizer

    # ---------------------------------------------------------------------------------------------------------- parameters

    def _install(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Put local tensors in place of the program's meta parameters.  Tied slots share one tensor."""
        leaves: dict[str, torch.Tensor] = {}
        for name, spec in self._specs.items():
            leaves[name] = tensors[name] if spec.buffer else nn.Parameter(tensors[name], requires_grad=spec.trainable)
        for parameter in self.program.parameters:
            holder = getattr(self.program.module, parameter.module)
            (holder._buffers if parameter.spec.buffer else holder._parameters)[parameter.attribute] = leaves[parameter.spec.name]
        for module in self.program.module.children():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.device != self.device:
                    module._buffers[name] = buffer.to(self.device)
        return leaves

    def _distributed(self, name: str, leaf: torch.Tensor) -> nn.Parameter:
        """What the optimizer sees: a DTensor over ep and tp that shares storage with the leaf that the graphs read."""
        axes = tuple(axis for axis in ("ep", "tp") if self.plan.mesh.size(axis) > 1)
        if self.device_mesh is None or not axes:
            return leaf
        from torch.distributed.tensor import DTensor, Replicate, Shard

        layouts = self._layouts.get(name, {})
        placements = [Shard(layouts[axis].dim) if axis in layouts and layouts[axis].is_shard else Replicate() for axis in axes]
        shape = torch.Size(self._specs[name].shape)
        stride = torch.empty(shape, device="meta").stride()
        mesh = self.device_mesh[axes if len(axes) > 1 else axes[0]]
        whole = DTensor.from_local(leaf.detach(), mesh, placements, run_check=False, shape=shape, stride=stride)
        return nn.Parameter(whole)

    def _wrap_recompute(self) -> None:
        for block in self.plan.blocks:
            if block.recompute == "full":
                for segment in block.segments:
                    module = getattr(self.program.module, module_name(segment))
                    setattr(self.program.module, module_name(segment), Recomputed(module))

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Whole tensors by the model's own names (tied names included), equal on every rank.  Every rank must call."""
        state: dict[str, torch.Tensor] = {}
        for name, leaf in self._leaves.items():
            spec, whole = self._specs[name], leaf.detach()
            for axis, split in reversed(self._splits(name, spec.shape)):
                whole = apply_primitive("all_gather", whole, self.axes[axis], split, None)
            whole = whole.clone()
            state.update((alias, whole) for alias in (name, *spec.aliases) if alias in self._state_names)
        return state

    def _splits(self, name: str, shape: tuple[int, ...]) -> list[tuple[str, Split]]:
        """The axes that shard a parameter, outermost first, and how each splits what the outer ones left."""
        found, shape = [], list(shape)
        for axis, layout in self._layouts.get(name, {}).items():
            if layout.is_shard:
                found.append((axis, Split(layout.dim, shape[layout.dim], layout.pattern)))
                group = self.axes[axis]
                shape[layout.dim] = local_extent(shape[layout.dim], group.size, group.index, layout.pattern)
        return found

    # --------------------------------------------------------------------------------------------------------- checkpoints

    def saved_shapes(self) -> dict[str, tuple[int, ...]]:
        """Whole shapes of all that a checkpoint holds of the model: parameters and persistent buffers, tied ones under their first name."""
        return {
            name: spec.shape
            for name, spec in self._specs.items()
            if prod(spec.shape) and any(alias in self._state_names for alias in (name, *spec.aliases))
        }

    def held(self) -> dict[str, Held]:
        """What this rank holds of these: of trained parameters what the optimizer updates, which the program reads too."""
        found = {}
        for name, shape in self.saved_shapes().items():
            if name in self._leaves:
                groups = [(self.axes[axis], split) for axis, split in self._splits(name, shape)]
                cuts = tuple(Cut(split.dim, group.size, group.index, split.pattern) for group, split in groups)
                found[name] = Held(shape, self._masters.get(name, self._leaves[name]), cuts)
        return found

    # --------------------------------------------------------------------------------------------------------------- steps

    def local_batch(self, batch: Any) -> Any:
        """This data-parallel rank's rows of a global batch, in the same structure (mapping or tuple)."""
        tensors = batch_tensors(batch)
        dp = self.plan.mesh.dp
        index = self.axes["dp"].index * self.axes["ep"].size + self.axes["ep"].index
        cut = {}
        for name, tensor in tensors.items():
            if self._has_batch(name):
                if tensor.shape[0] % dp:
                    raise AutoparError(f"a global batch of {tensor.shape[0]} rows cannot be split over dp={dp}; use a multiple of {dp}")
                rows = tensor.shape[0] // dp
                tensor = tensor[index * rows : (index + 1) * rows]
            cut[name] = tensor
        return cut if isinstance(batch, dict) else tuple(cut.values())

    @lost_ranks("in a step")
    def step(self, batch: Any) -> torch.Tensor:
        """One optimizer step on this data-parallel rank's batch; returns the mean loss over the global batch (a detached scalar)."""
        micro_batches, mean_count = self._split(batch)
        total = torch.zeros((), device=self.device)
        scale = 1.0 if self._loss_adds_up else 1.0 / len(micro_batches)
        self.program.module.train()
        with active_axes(self.axes), self._randomness():
            for k, inputs in enumerate(micro_batches):
                loss, updates = self._forward(self.program, inputs, mean_count, self._noise(k, micro_batches))
                loss = loss * scale
                loss.backward()
                total = total + loss.detach()
                self._update_buffers(updates)  # now that backward has read the old values
        self.reduce_gradients()
        if self.max_grad_norm is not None:
            self._clip()
        self._hand_over_gradients()
        self.optimizer.step()
        self.steps += 1
        for leaf in self._leaves.values():
            leaf.grad = None
        self.optimizer.zero_grad(set_to_none=True)
        return total

    @contextlib.contextmanager
    def _randomness(self) -> Iterator[None]:
        """Every rank draws the same random numbers in a step, so that replicated values stay equal.  One device draws the user's own."""
        if self.plan.mesh.num_devices == 1:
            yield
            return
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed((self.seed << 32) + self.steps)
            yield

    @lost_ranks("in an evaluation")
    def eval_step(self, batch: Any) -> torch.Tensor:
        """The mean loss over the global batch, without gradients, with dropout off and batch norm on its running statistics."""
        if self._evaluation is None:
            self._evaluation = evaluation_copy(self.program)
        micro_batches, mean_count = self._split(batch)
        scale = 1.0 if self._loss_adds_up else 1.0 / len(micro_batches)
        with active_axes(self.axes), torch.no_grad():
            noise = self._noise(0, micro_batches)  # read by no one
            return sum(self._forward(self._evaluation, inputs, mean_count, noise)[0] * scale for inputs in micro_batches)

    def _forward(
        self, program: Program, inputs: dict[str, torch.Tensor], mean_count: torch.Tensor | None, noise: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """The loss, and the new values of `program.updates`."""
        extra = (mean_count,) if program.count is not None else ()
        found = program.module(*inputs.values(), *extra, *((noise,) if program.draws else ()))
        return (found[0], found[1:]) if program.updates else (found, ())

    def _update_buffers(self, values: tuple[torch.Tensor, ...]) -> None:
        with torch.no_grad():
            for name, value in zip(self.program.updates, values, strict=True):
                self._leaves[name].copy_(value)

    def _noise(self, index: int, micro_batches: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        """What dropout needs to know of a micro-batch: seed, step, and which of this rank's rows it holds."""
        size = next((t.shape[0] for name, t in micro_batches[index].items() if self._has_batch(name)), 1)
        return step_noise(self.seed, self.steps, index * size, size * len(micro_batches))

    def _has_batch(self, name: str) -> bool:
        return has_batch(self.program.whole_inputs.get(name))

    def _check_batch(self, batch: Any) -> dict[str, torch.Tensor]:
        tensors = batch_tensors(batch)
        expected = self.program.whole_inputs
        if set(tensors) != set(expected):
            raise AutoparError(f"the batch has {', '.join(tensors)}; the model was planned for {', '.join(expected)}")
        rows = {t.shape[0] for name, t in tensors.items() if self._has_batch(name) and t.dim()}
        for name, tensor in tensors.items():
            want = expected[name]
            sizes = ["batch" if is_symbolic(s) else int(s) for s in want.shape]
            if tensor.dim() != want.dim() or any(w != "batch" and w != s for w, s in zip(sizes, tensor.shape, strict=True)):
                raise AutoparError(
                    f"batch entry {name!r} has shape {tuple(tensor.shape)}; the model was planned for ({', '.join(map(str, sizes))})"
                )
            if tensor.dtype != want.dtype and not (tensor.is_floating_point() and want.is_floating_point()):
                raise AutoparError(f"batch entry {name!r} has dtype {tensor.dtype}; the model was planned for {want.dtype}")
        if len(rows) > 1:
            raise AutoparError(f"the batch's tensors have different numbers of rows: {sorted(rows)}")
        dtype = PRECISIONS[self.plan.precision]
        return {name: tensors[name].to(self.device, dtype if tensors[name].is_floating_point() else None) for name in expected}

    def _split(self, batch: Any) -> tuple[list[dict[str, torch.Tensor]], torch.Tensor | None]:
        """Micro-batches of this rank, and the mean number of valid targets of a micro-batch over all ranks."""
        mistake: AutoparError | None = None
        rows, count, sums = -1, 0, 0.0
        try:
            tensors = self._check_batch(batch)
            rows = next((t.shape[0] for name, t in tensors.items() if self._has_batch(name)), 1)
            count, sums = self._count(tensors), _checksum(tensors.values())
        except AutoparError as error:  # the other ranks must hear of it, or they would wait
            mistake = error
        size = min(self.plan.micro_batch, rows) or 1
        seen = self._gather_over_all(torch.tensor([rows, count, sums], dtype=torch.float64, device=self.device))
        if mistake is not None:
            raise mistake
        if bool((seen[..., 0] < 0).any()):
            raise AutoparError(
                f"data-parallel rank {int(seen[..., 0].amin(1).argmin())} was given a batch that does not fit the model; its error says why"
            )
        if not torch.equal(seen, seen[:, :1].expand_as(seen)):
            names = [axis for axis in ("cp", "tp") if self.axes[axis].size > 1]
            raise AutoparError(
                f"the {seen.shape[1]} ranks that share one data-parallel coordinate (over {' and '.join(names)}) were "
                f"given different batches; they must load the same rows: use engine.local_batch, or a sampler over dp={self.plan.mesh.dp}, "
                "not over the world"
            )
        gathered = seen[:, 0, :2].long()
        if len({int(r) for r in gathered[:, 0]}) > 1:
            raise AutoparError(f"data-parallel ranks hold {gathered[:, 0].tolist()} rows; every rank must hold the same number")
        if rows == 0:
            raise AutoparError("the batch has no rows")
        if rows % size:
            raise AutoparError(f"{rows} rows cannot be split into micro-batches of {size}; use a multiple of {size} rows per rank")
        number = rows // size
        if number > 1 and self._loss_adds_up is None:
            raise AutoparError(
                "autopar cannot tell whether this loss is a sum or a mean over the batch, so it cannot split it into "
                f"{number} micro-batches: pin micro_batch={rows}, or end the loss with .mean() or .sum()"
            )
        micro_batches = [
            {name: t[k * size : (k + 1) * size] if self._has_batch(name) else t for name, t in tensors.items()} for k in range(number)
        ]
        if self.program.count is None:
            return micro_batches, None
        return micro_batches, gathered[:, 1].sum().to(PRECISIONS[self.plan.precision]) / number

    def _count(self, tensors: dict[str, torch.Tensor]) -> int:
        if self.program.count is None:
            return 0
        with torch.no_grad():
            return int(self.program.count(*(tensors[name] for name in self.program.count_inputs)))

    def _gather_over_all(self, row: torch.Tensor) -> torch.Tensor:
        """The rows of all ranks: (data-parallel rank, rank that shares its batch, entry)."""
        rows = row.unsqueeze(0)
        for axis in reversed(LAYOUT_AXES):
            rows = apply_primitive("all_gather", rows, self.axes[axis], Split(0, self.axes[axis].size * rows.shape[0]), None)
        return rows.view(self.plan.mesh.dp, -1, row.shape[0])

    # ----------------------------------------------------------------------------------------------------------- gradients

    def gradient_axes(self, name: str) -> tuple[str, ...]:
        """The axes over which the gradient of a parameter is a partial sum after backward."""
        return partial_axes(self._layouts.get(name, {}))

    def _gradients(self) -> dict[str, torch.Tensor]:
        return {name: self._leaves[name].grad for name in self._masters if self._leaves[name].grad is not None}

    def reduce_gradients(self) -> None:
        """Add up partial gradients, once per step."""
        add_up(self._gradients(), self._layouts, self.axes)

    def gradient_norm(self) -> torch.Tensor:
        """The global 2-norm of the reduced gradients."""
        return global_norm(self._gradients(), self._layouts, self.axes, self.device)

    def _clip(self) -> None:
        """Scale gradients as torch.nn.utils.clip_grad_norm_ does on one device."""
        scale = (self.max_grad_norm / (self.gradient_norm() + 1e-6)).clamp(max=1.0)
        for name in self._masters:
            if self._leaves[name].grad is not None:
                self._leaves[name].grad.mul_(scale)

    def _hand_over_gradients(self) -> None:
        for name, master in self._masters.items():
            grad = self._leaves[name].grad
            if master is self._leaves[name] or grad is None:
                continue
            from torch.distributed.tensor import DTensor

            master.grad = DTensor.from_local(
                grad, master.data.device_mesh, master.data.placements, run_check=False, shape=master.shape, stride=master.stride()
            )


def _checksum(tensors: Iterable[torch.Tensor]) -> float:
    """A number that differs where batches do, in their order of elements too."""
    total = 0.0
    for k, tensor in enumerate(tensors, start=1):
        values = tensor.double().flatten().nan_to_num(0.5).clamp(-1e6, 1e6)  # infinities of a mask would drown the rest
        total = total + (values * torch.arange(k, values.numel() + k, device=values.device).double().sqrt()).sum()
    return float(total)


class Recomputed(nn.Module):
    """Runs a segment without keeping its activations; backward runs its forward again."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, *inputs: torch.Tensor) -> Any:
        return checkpoint(self.body, *inputs, use_reentrant=False)


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
        raise AutoparError("the plan is for GPUs and this process sees none; plan for cpu:N to run on CPU processes")
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if device_type == "cuda":
        torch.cuda.set_device(local_rank)
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        join_process_group("nccl" if device_type == "cuda" else "gloo", timedelta(seconds=timeout_s))
    return torch.device(device_type, local_rank) if device_type == "cuda" else torch.device("cpu")
