"""What a pipeline model is told about each virtual stage."""

from __future__ import annotations

from dataclasses import dataclass

from autopar_cost_models.checks import positive


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds that one virtual stage computes for one micro-batch.

    `backward_s` is the whole backward.  `weight_s` is the part of it that computes gradients of parameters, which zero-bubble schedules
    postpone; other schedules ignore it.  torch runs the *whole* backward of the first stage there (nobody waits for the gradient of its
    input), so for a zero-bubble schedule give the first stage `weight_s=backward_s`.
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
        """The part of the backward that computes the gradient that the previous stage waits for."""
        return self.backward_s - self.weight_s

    @property
    def total_s(self) -> float:
        """Seconds of forward and backward."""
        return self.forward_s + self.backward_s
