"""Runs forward and backward of a batch's micro-batches on one rank, with or without a pipeline, and
evaluates batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from autopar.ir.plan import Plan
from autopar.rewrite.collectives.axes import AxisGroup
from autopar.rewrite.collectives.ranges import named
from autopar.rewrite.lowerings.dropout import NOISE
from autopar.rewrite.program import Program, evaluation_copy
from autopar.runtime.batches.micro_batches import BatchSplitter, MicroBatches
from autopar.runtime.pipeline.pipeline import Pipeline
from autopar.runtime.programs.compiled import Compiler
from autopar.runtime.state.new_values import apart
from autopar.runtime.state.parameters import Parameters
from autopar.runtime.state.precision import LossScale
from autopar.runtime.state.tied_parameters import StageParameters

Draw = Callable[[int], torch.Tensor]
"""The type of a function that returns the noise of a micro-batch, by its index."""


@dataclass(kw_only=True)
class Passes:
    """Runs the micro-batches of a batch on this rank. `programs` has one program per batch length;
    `stage_group` is the process group of its pipeline, or None. `evaluations` and `pipelines` cache
    what is made on first use.
    """

    plan: Plan
    axes: Mapping[str, AxisGroup]
    device: torch.device
    programs: Sequence[Program]
    parameters: Parameters
    shared: StageParameters
    batches: BatchSplitter
    loss_scale: LossScale
    compiler: Compiler
    stage_group: dist.ProcessGroup | None
    evaluations: dict[int, Program] = field(default_factory=dict)
    pipelines: dict[tuple[str, int], Pipeline] = field(default_factory=dict)

    def train(self, work: MicroBatches, draw: Draw) -> torch.Tensor:
        """Run forward and backward of each micro-batch, and update buffers. `draw(k)` gives the
        noise of micro-batch k. Returns the loss of the step, equal on every rank; gradients
        accumulate in the parameters.
        """
        program = self.programs[work.number]
        program.module.train()
        if self.stage_group is not None:
            return self._run_pipeline(self.stage_group, "training", program, work, draw)
        total = torch.zeros((), device=self.device)
        for k, (inputs, scale) in enumerate(zip(work.inputs, work.scales, strict=True)):
            with named("micro-batch", k, "forward"):
                loss, updates = self.forward(program, inputs, draw(k))
            loss = loss * scale
            with named("micro-batch", k, "backward"):
                self.backward(loss)
            total = total + loss.detach()
            self._update_buffers(program, updates)  # now that backward has read the old values
        return program.whole_loss(total, self.axes)

    def evaluate(self, work: MicroBatches, draw: Draw) -> torch.Tensor:
        """The loss of the batch, without gradients, on the evaluation copy of the program (dropout
        off). Equal on every rank.
        """
        program = self.programs[work.number]
        if self.stage_group is not None:
            return self._run_pipeline(self.stage_group, "evaluation", program, work, draw)
        if work.number not in self.evaluations:
            found = self.evaluations[work.number] = self.compiler.compile(evaluation_copy(program))
            if found is not program:
                self.parameters.watch(found.module)
        evaluation, noise = self.evaluations[work.number], draw(0)
        first, *others = (
            self.forward(evaluation, inputs, noise)[0] * scale
            for inputs, scale in zip(work.inputs, work.scales, strict=True)
        )
        return evaluation.whole_loss(sum(others, first), self.axes)

    def forward(
        self, program: Program, inputs: dict[str, torch.Tensor], noise: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Run forward of one micro-batch. Returns (loss, tuple of new values in the order of
        `program.updates`). `noise` is used only if the program draws random numbers.
        """
        found = program.module(*inputs.values(), *((noise,) if program.draws else ()))
        return (found[0], found[1:]) if program.updates else (found, ())

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward from one micro-batch's loss, multiplied by the loss scale. Gradients
        accumulate in the parameters.
        """
        (loss * self.loss_scale.scale if self.loss_scale.dynamic else loss).backward()
        self.parameters.gradients.after_backward()

    def _update_buffers(self, program: Program, values: tuple[torch.Tensor, ...]) -> None:
        leaves = [self.parameters.leaves[name] for name in program.updates]
        with torch.no_grad():
            for leaf, value in zip(leaves, apart(values, leaves), strict=True):
                leaf.copy_(value)

    def _run_pipeline(
        self, group: dist.ProcessGroup, kind: str, program: Program, work: MicroBatches, draw: Draw
    ) -> torch.Tensor:
        """The loss of a batch in a pipeline, on every rank. `kind` is "training", which also runs
        backward, or "evaluation". The pipeline is made once for each kind and program.
        """
        key, training = (kind, work.number), kind == "training"
        if key not in self.pipelines:
            own = program if training else self.compiler.compile(evaluation_copy(program))
            self.pipelines[key] = Pipeline(
                own, self.plan.schedule, len(self.plan.stages), group, self.device
            )
        given = [inputs | {NOISE: draw(k)} for k, inputs in enumerate(work.inputs)]
        pipeline = self.pipelines[key]
        with named("pipeline"):
            losses = (
                pipeline.train(
                    given, work.rows, [scale * self.loss_scale.scale for scale in work.scales]
                )
                if training
                else pipeline.evaluate(given, work.rows)
            )
        zero = torch.zeros((), device=self.device, dtype=program.loss.dtype)
        pairs = zip(losses, work.scales, strict=bool(losses))
        total = self.shared.over_stages(sum((loss * scale for loss, scale in pairs), zero))
        return program.whole_loss(total, self.axes)
