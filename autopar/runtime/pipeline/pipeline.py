"""Runs the stages of a rank under a schedule of torch.distributed.pipelining.

torch moves the values and runs forwards and backwards in the schedule's order. This module gives it
suitable stages: shapes known in advance, inputs of each micro-batch by name, and scaled losses.
torch's own scaling of gradients, merging of outputs and splitting of batches are not used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from autopar_cost_models import check_schedule, splits_backward
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from autopar.errors import AutoparError
from autopar.rewrite.collectives.ranges import named
from autopar.rewrite.lowerings.dropout import NOISE
from autopar.rewrite.program import Program, StageProgram
from autopar.rewrite.root import SegmentValue
from autopar.rewrite.shape_check import local_shape
from autopar.runtime.pipeline.schedule_actions import LISTS, LOOPS
from autopar.runtime.pipeline.split_backward import Left, PartedBackward
from autopar.runtime.programs.recompute import Recomputed, segment_of
from autopar.runtime.state.new_values import apart


class Pipeline:
    """A program's stages on this rank, connected with those of other ranks by the process group
    `group` (one along pp). `num_stages` counts the stages of all ranks.
    """

    def __init__(
        self,
        program: Program,
        schedule: str,
        num_stages: int,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self.program, self.schedule, self.num_stages, self.group, self.device = (
            program,
            schedule,
            num_stages,
            group,
            device,
        )
        self.losses: list[Tensor] = []
        self._scales: Sequence[float] = ()
        self._schedules: dict[tuple[int, int], tuple[Any, list[_Stage]]] = {}

    @property
    def per_rank(self) -> int:
        """Number of this rank's stages."""
        return len(self.program.stages)

    def train(
        self, given: Sequence[Mapping[str, Tensor]], rows: int, scales: Sequence[float]
    ) -> list[Tensor]:
        """Run forward and backward of a step's micro-batches of `rows` rows. `given` has the inputs
        of each by name; before backward its loss is multiplied by its entry of `scales`.

        Returns the unscaled losses of the micro-batches on the rank of the last stage, [] on the
        others.  Gradients are added to those of the leaves.
        """
        self._check(self.schedule, len(given))
        self._scales = scales
        return self._run(self.schedule, given, rows, self._loss)

    def evaluate(self, given: Sequence[Mapping[str, Tensor]], rows: int) -> list[Tensor]:
        """The losses of the micro-batches, from forward alone, on the rank of the last stage; [] on
        the others.
        """
        name = "gpipe" if self.per_rank == 1 else "interleaved_1f1b"
        self._check(name, len(given))
        with torch.no_grad():
            return self._run(name, given, rows, None)

    def _loss(self, output: Tensor, target: None) -> Tensor:
        return output * self._scales[len(self.losses) - 1]  # that of the forward that has just run

    def _check(self, schedule: str, number: int) -> None:
        try:
            check_schedule(schedule, self.group.size(), self.per_rank, number)
        except ValueError as error:
            raise AutoparError(
                f"this batch makes {number} micro-batches: {error}; give each step the planned number of rows"
            ) from None

    def _run(
        self, name: str, given: Sequence[Mapping[str, Tensor]], rows: int, loss_fn: Any
    ) -> list[Tensor]:
        key = len(given), rows
        if key not in self._schedules:
            self._schedules[key] = self._make(name, len(given), rows, loss_fn)
        schedule, stages = self._schedules[key]
        self.losses.clear()
        for stage in stages:
            stage.begin(loss_fn is not None)
        # what `step` does, but for splitting inputs: ours are split already, and some have no batch dim
        schedule._step_microbatches(
            kwarg_mbs=[dict(g) for g in given], target_mbs=[None] * len(given), return_outputs=False
        )
        for stage in stages:
            stage.end()
            stage.submod.give_back()
        return list(self.losses)

    def _make(self, name: str, number: int, rows: int, loss_fn: Any) -> tuple[Any, list[_Stage]]:
        stages: list[_Stage] = []
        travelling: list[dist.Work] | None = None if name in LOOPS else []
        for stage in self.program.stages:
            described = partial(self._described, rows=rows)
            received, sent = (
                tuple(map(described, stage.received)),
                tuple(map(described, stage.sent)),
            )
            loss = torch.empty((), dtype=self.program.loss.dtype, device="meta", requires_grad=True)
            module = _StageModule(stage, self.losses, self.program)
            stages.append(
                _Stage(
                    module,
                    stage.stage.index,
                    self.num_stages,
                    self.device,
                    input_args=received,
                    output_args=sent or (loss,),
                    group=self.group,
                )
            )
            stages[-1].gradients = travelling
            stages[-1].steady = (
                tuple(v.steady for v in stage.received),
                tuple(v.steady for v in stage.sent),
            )
            if splits_backward(name) and stage.stage.index:  # torch runs that of the first in one
                stages[-1].parted = PartedBackward()
        if name in LOOPS:
            return LOOPS[name](stages[0], number, loss_fn=loss_fn, scale_grads=False), stages
        return LISTS[name](stages, number, loss_fn=loss_fn, scale_grads=False), stages

    def _described(self, value: SegmentValue, rows: int) -> Tensor:
        """A meta tensor with the shape and dtype of this rank's part of a value that crosses a
        stage boundary, for micro-batches of `rows` rows.
        """
        shape = local_shape(self.program.mesh, self.program.rank, value.whole, value.layouts, rows)
        return torch.empty(
            shape, dtype=value.whole.dtype, device="meta", requires_grad=value.has_gradient
        )


class _Stage(PipelineStage):
    """A torch pipeline stage with named profiler ranges, which holds a message's memory only from
    waiting for the message until reading it.

    From the first step on, torch would hold a buffer for the input of every micro-batch and one for
    the gradient of its output. It would also hold the gradient of every input until the next step.
    For 64 micro-batches of 128 MB these are 24 GB. Here a buffer without a message is a meta
    tensor.

    `gradients` are sent messages of this rank that may not have arrived, if the schedule lets
    stages wait for their own messages. torch's schedules with several stages wait only at the end
    of a step, and hold every message until then. `steady` says which received and which sent values
    are the same for all micro-batches. They travel with the first micro-batch and stay to the end
    of the step.
    """

    submod: _StageModule
    steady: tuple[tuple[bool, ...], tuple[bool, ...]]
    parted: PartedBackward | None = None  # where its backward runs in two parts
    gradients: list[dist.Work] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._forwards: dict[int, list[dist.Work]] = {}  # what it has sent forward, by micro-batch
        self._left: dict[int, Left] = {}  # to the second part of a backward, by micro-batch

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._on_meta():
            found = super()._prepare_forward_infra(*args, **kwargs)
        first = self.args_recv_info[0]
        for number, infos in self.args_recv_info.items():
            self.args_recv_info[number] = tuple(
                a if same else b for a, b, same in zip(first, infos, self.steady[0], strict=True)
            )
        return found

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._on_meta():
            return super()._prepare_backward_infra(*args, **kwargs)

    @contextlib.contextmanager
    def _on_meta(self) -> Iterator[None]:
        device, self.device = self.device, torch.device("meta")
        try:
            yield
        finally:
            self.device = device

    def _passing(self, micro_batch: int) -> tuple[Any, ...]:
        """The buffers of the values that arrive with this micro-batch, without steady values."""
        return tuple(
            info
            for info, steady in zip(self.args_recv_info[micro_batch], self.steady[0], strict=True)
            if not steady
        )

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        infos = self._passing(fwd_chunk_id) if fwd_chunk_id else self.args_recv_info[0]
        self._move_buffers(infos, self.device)
        return self._get_recv_ops(infos)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.has_backward and not self.is_last:
            self._move_buffers(self.grad_recv_info[bwd_chunk_id], self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        found = super().get_fwd_send_ops(fwd_chunk_id)
        if fwd_chunk_id:
            found = [op for op, steady in zip(found, self.steady[1], strict=True) if not steady]
        if self.gradients is None:
            return found
        self._forwards[fwd_chunk_id] = _sent(found)
        return []

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        found = super().get_bwd_send_ops(bwd_chunk_id)
        if self.gradients is None:
            return found
        _arrive(self.gradients)  # those before: one message of this kind is on its way at a time
        self.gradients += _sent(found)
        return []

    def begin(self, trains: bool) -> None:
        """Prepare for a step: drop what an earlier one may have left. `trains`: whether backward
        runs. If backward runs in two parts, recomputed segments are told to use this stage's slots
        for saved tensors.
        """
        self.has_backward = trains
        self.clear_runtime_states()
        self._left.clear()
        if self.parted:
            for part in self.submod.body.children():  # which several schedules have
                if isinstance(part, Recomputed):
                    part.run_again_by(self.parted.again)

    def end(self) -> None:
        """Wait for this rank's messages in transit, and free the buffers of values that stay for
        the whole step.
        """
        self._move_buffers(self.args_recv_info[0], torch.device("meta"))
        for works in self._forwards.values():
            _arrive(works)
        self._forwards.clear()
        _arrive(self.gradients or [])

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        keeping = (
            self.parted.forward(fwd_chunk_id)
            if self.parted and self.has_backward
            else contextlib.nullcontext()
        )
        with named("stage", self.stage_index, "forward of micro-batch", fwd_chunk_id), keeping:
            result = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        # backward has its own references to what it needs
        self._move_buffers(self._passing(fwd_chunk_id), torch.device("meta"))
        return result

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        _arrive(self._forwards.pop(bwd_chunk_id, []))  # it did, since its gradient is here
        # a split backward of the first stage is all in its second part
        later = self.is_first and not full_backward
        words = "stage", self.stage_index, "backward of micro-batch", bwd_chunk_id
        with contextlib.nullcontext() if later else named(*words):
            if self.parted and self.has_backward and not full_backward:
                self._first_part(self.parted, bwd_chunk_id, loss)
            else:
                super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        # torch keeps the losses of a step, and with them what their graphs lead to
        if loss is not None and self.has_backward:
            loss.detach_()
        if self.has_backward and not self.is_last:
            self._move_buffers(self.grad_recv_info[bwd_chunk_id], torch.device("meta"))

    def _first_part(self, parted: PartedBackward, micro_batch: int, loss: Tensor | None) -> None:
        """Run the first part of a micro-batch's backward: gradients of received values, which go to
        `bwd_cache`. What is left for weight gradients goes to `_left`. `loss` is None unless this
        is the last stage. Frees the values that only this part reads.
        """
        sent, received = self.fwd_cache.pop(micro_batch)
        results, gradients = (
            (sent, self._retrieve_recv_grads(micro_batch)) if loss is None else ([loss], None)
        )
        found, self._left[micro_batch] = parted.first(micro_batch, results, gradients, received)
        self.bwd_cache[micro_batch] = found[: len(self.steady[0])]
        for x in (*sent, *results):
            x.detach_()
        for x in received:
            if isinstance(x, Tensor) and x.requires_grad:
                # The graph still refers to this tensor. Its values are held elsewhere where they are read.
                x.data = x.new_empty(0)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        kind = "backward" if self.is_first else "weight gradients"
        with named("stage", self.stage_index, kind, "of micro-batch", bwd_chunk_id):
            if self.parted and self.has_backward:
                self._left.pop(bwd_chunk_id).second()
            else:
                super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    @staticmethod
    def _move_buffers(infos: Sequence[Any], device: torch.device) -> None:
        """Replace each buffer by an uninitialized one on `device`. On the meta device it takes no
        memory.
        """
        for info in infos:
            if info.buffer is not None:
                info.buffer = torch.empty(info.buffer.shape, dtype=info.buffer.dtype, device=device)


def _sent(ops: Sequence[dist.P2POp]) -> list[dist.Work]:
    """Start sending messages. Returns the handles to wait for."""
    return [op.op(op.tensor, group=op.group, tag=op.tag, group_dst=op.group_peer) for op in ops]


def _arrive(works: list[dist.Work]) -> None:
    """Wait for messages in transit, and clear the list."""
    for work in works:
        work.wait()
    works.clear()


class _StageModule(nn.Module):
    """The module of a stage as torch needs it.

    It takes received values by position, and named inputs that are common to all stages of the
    rank. It returns the values to send, or the loss.
    """

    def __init__(self, stage: StageProgram, losses: list[Tensor], program: Program) -> None:
        super().__init__()
        self.body = stage.module
        self.stage, self.losses = stage, losses
        self.takes = (*stage.stage.inputs, *((NOISE,) if stage.draws else ()))
        slots = [
            (getattr(stage.module, p.module), p)
            for p in program.parameters
            if p.spec.name in stage.updates
        ]
        self.slots = [(segment_of(module), p.attribute, p.spec.name) for module, p in slots]
        self.buffers_before: dict[str, Tensor] = {}

    def forward(self, *received: Tensor, **given: Tensor) -> Tensor | tuple[Tensor, ...]:
        received = tuple(_Entry.apply(x) if x.requires_grad else x for x in received)
        found = self.body(*received, *(given[name] for name in self.takes))
        results = found if isinstance(found, tuple) else (found,)
        sent = self.stage.sent
        self._renew(results[len(sent) or 1 :])
        if sent:
            return tuple(
                self._ready(value, x) for value, x in zip(sent, results[: len(sent)], strict=True)
            )
        self.losses.append(results[0].detach())
        return _no_view(results[0])

    def _ready(self, value: SegmentValue, x: Tensor) -> Tensor:
        """A value in a form that can be sent: contiguous, and not a view. RuntimeError if it has a
        gradient although the program says that it has none.
        """
        if x.requires_grad and not value.has_gradient:
            raise RuntimeError(
                f"a gradient flows back through {value.name}, which the program says has none: a bug in autopar"
            )
        return _no_view(x.contiguous())

    def _renew(self, values: Sequence[Tensor]) -> None:
        """Replace buffers by their new values for later micro-batches. They are not modified in
        place, since this micro-batch's backward may read the old ones.
        """
        now = [getattr(module, attribute) for module, attribute, _ in self.slots]
        new = dict(zip(self.stage.updates, apart(values, now), strict=True))
        for (module, attribute, name), tensor in zip(self.slots, now, strict=True):
            before = self.buffers_before.setdefault(name, tensor)
            _put(module, attribute, new[name].to(before.dtype))

    def give_back(self) -> None:
        """Copy the buffers' last values into the tensors that the step started with, and restore
        those tensors.
        """
        for module, attribute, name in self.slots:
            if name in self.buffers_before:
                self.buffers_before[name].copy_(getattr(module, attribute))
                _put(module, attribute, self.buffers_before[name])
        self.buffers_before.clear()


def _put(module: nn.Module, attribute: str, tensor: Tensor) -> None:
    """Register `tensor` in the place of the buffer or frozen parameter called `attribute`."""
    if attribute in module._buffers:
        module._buffers[attribute] = tensor
    else:
        is_parameter = isinstance(tensor, nn.Parameter)
        own = tensor if is_parameter else nn.Parameter(tensor, requires_grad=False)
        module._parameters[attribute] = cast(nn.Parameter, own)


def _no_view(x: Tensor) -> Tensor:
    """The same tensor; a clone if it is a view with a graph, which could not be detached in
    place.
    """
    return x.clone() if x.requires_grad and x._is_view() else x


class _Entry(torch.autograd.Function):
    """An autograd function for a received value. It makes the gradient contiguous, as sending
    requires.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.contiguous()
