"""Averages of weights over steps, as torch.optim.swa_utils.AveragedModel takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from autopar.errors import AutoparError, shown
from autopar.runtime.state.parameters import Parameters

Decay = float | Callable[[int], float] | None
"""The weight of the old average; or a function from the number of updates so far to it; None for an
average of equal weights.
"""


def check_decay(decay: Decay, every: int) -> None:
    """Raise AutoparError for a decay that is not from 0 to 1, or `every` below 1."""
    number = isinstance(decay, int | float) and not isinstance(decay, bool)
    if decay is not None and not callable(decay) and not (number and 0.0 <= decay <= 1.0):
        raise AutoparError(
            f"decay={shown(decay)} must be a number from 0 to 1, a function from the number of updates to one, or None for equal weights"
        )
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise AutoparError(f"every={shown(every)} must be a whole number of steps, at least 1")


class Averages:
    """The averages of this rank's masters, by name, and of float buffers if `buffers`. The first
    update copies the weights, as torch's does.
    """

    def __init__(self, parameters: Parameters, decay: Decay, every: int, buffers: bool) -> None:
        self.parameters, self.decay, self.every, self.buffers = parameters, decay, every, buffers
        self.updates, self.active = 0, False
        self.values = {name: own.clone() for name, own in self._own()}

    def _own(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's tensors, by name: its masters, and buffers if they are averaged too."""
        own = self.parameters
        for name, one in own.trained.items():
            if own.has_master(name):
                yield name, one.local
        if self.buffers:
            for name, spec in own.holding.specs.items():
                if spec.buffer:
                    yield name, own.leaves[name].detach()

    @torch.no_grad()
    def after_step(self, steps: int) -> None:
        """Update the averages, if it is time. `steps` counts the steps so far."""
        if steps % self.every == 0:
            weight = self._weight()
            for name, now in self._own():
                average = self.values[name]
                if self.updates == 0:
                    average.copy_(now)
                elif average.is_floating_point():
                    average.lerp_(now, weight)
                else:
                    average.copy_(average * (1 - weight) + now * weight)
            self.updates += 1

    def _weight(self) -> float:
        """The weight of the present weights."""
        if self.decay is None:
            return 1.0 / (self.updates + 1)
        return 1.0 - float(self.decay(self.updates) if callable(self.decay) else self.decay)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the averages and the weights. Graphs read them after `Parameters.publish`."""
        self.active = not self.active
        for name, now in self._own():
            before = now.clone()
            now.copy_(self.values[name])
            self.values[name].copy_(before)
