"""The times of one virtual stage, as the pipeline models take them."""

from __future__ import annotations

from dataclasses import dataclass

from autopar_cost_models.checks import positive


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Compute seconds of one virtual stage for one micro-batch.

    `backward_s` is the whole backward. `weight_s` is the part that computes gradients of
    parameters, which zero-bubble schedules postpone; other schedules ignore it. torch does not
    split the backward of the first stage, since no rank waits for the gradient of its input. For a
    zero-bubble schedule give the first stage `weight_s=backward_s`.
    """

    forward_s: float
    backward_s: float
    weight_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("forward_s", "backward_s", "weight_s"):
            object.__setattr__(self, name, positive(name, getattr(self, name), zero_allowed=True))
        if self.weight_s > self.backward_s:
            raise ValueError(
                f"weight_s={self.weight_s} is a part of backward_s={self.backward_s} and cannot exceed it"
            )

    @property
    def input_s(self) -> float:
        """Seconds of the part of the backward that computes the gradient for the previous stage."""
        return self.backward_s - self.weight_s

    @property
    def total_s(self) -> float:
        """Seconds of forward and backward."""
        return self.forward_s + self.backward_s
