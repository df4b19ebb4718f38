"""Rank 0 of a plan in one process, for measurements of memory: its collectives give zeros of the right shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from unittest.mock import patch

import torch
from torch import Tensor, nn

from autopar import api
from autopar.ir.plan import Plan
from autopar.rewrite.collectives.axes import active_axes, simulated_axes
from autopar.runtime import engine as engines
from autopar.runtime.batches.micro_batches import MicroBatches


class SimulatedRank:
    """An engine that runs rank 0 of a plan, and one micro-batch of zeros.

    Attributes:
        engine: the engine. Its axes are simulated.
    """

    def __init__(self, model: nn.Module, plan: Plan, inputs: Mapping[str, Tensor]) -> None:
        def simulated(mesh, device, shard=0):
            return None, simulated_axes(mesh, 0, shard)

        traced = api.trace(model, inputs, None, plan.precision)
        with patch.object(engines, "mesh_axes", simulated):
            self.engine = engines.Engine(
                model,
                traced,
                plan,
                lambda parameters: torch.optim.AdamW(parameters, 1e-3, foreach=False),
                None,
                None,
                "cpu",
            )
        rows = plan.micro_batch
        self._batch = {
            name: torch.zeros(rows, *t.shape[1:], dtype=t.dtype) for name, t in inputs.items()
        }
        values = self.engine.program.step_values
        self._batch |= {} if values is None else dict.fromkeys(values.names, torch.tensor(8.0))
        self._work = MicroBatches(
            inputs=[self._batch], rows=rows, scales=(1.0,), places=((0, rows),)
        )

    def micro_batch(self, between: Callable[[], object] = lambda: None) -> None:
        """Run forward and backward of the micro-batch, and `between` after forward."""
        engine = self.engine
        with active_axes(engine.axes):
            noise = engine._noise(self._work, 0)
            loss, _ = engine._passes.forward(engine.program, self._batch, noise)
            between()
            engine._passes.backward(loss)
