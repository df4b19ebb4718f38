"""Does a plan train a generated loss as one device does?

The check pins a split into micro-batches.  If autopar refuses that, a plan without the pin must have
one micro-batch, and be exact.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from support.exactness import TOLERANCE, Reference, update_error
from support.loss_generator import GeneratedLoss
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError

PINS = {"tp": 1, "pp": 1, "zero": 0, "recompute": "none"}
"""What a plan leaves to choose besides micro-batches: pinned, so that the search is short."""


LEAST_LOSS = 1e-3
"""Errors of losses nearer to zero are relative to this."""


@dataclass(frozen=True, slots=True)
class Run:
    """Parameters after the steps, the loss of each step, and how the plan split the batch."""

    state: dict[str, Tensor]
    losses: list[float]
    num_microbatches: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What training under a plan gave.

    - kind: 'exact'; 'one micro-batch', where the pinned split was refused; 'uncaptured', where every plan
      was refused; 'wrong'; 'crash', where the exception was no AutoparError.
    - error: the largest update-relative error of a parameter, or relative error of a loss, over the
      tolerance of `exactness`.
    - naive_wrong: neither the sum nor the mean over micro-batches has the gradients of the whole batches.
    """

    kind: str
    message: str
    error: float
    naive_wrong: bool

    @property
    def passed(self) -> bool:
        return self.kind in ("exact", "one micro-batch")


def check(loss: GeneratedLoss, ranks: int = 1) -> Outcome:
    """Train under micro-batches, or if that is refused without, and compare with one device.

    With `ranks` above 1, each process of a group of that size calls this, and dp splits the batch too.
    """
    micro_batch = min(loss.micro_batch, loss.rows // ranks // 2)
    naive = naive_is_wrong(loss)
    try:
        run, message = _run(loss, micro_batch, ranks)
    except AutoparError as refusal:
        return Outcome("uncaptured", str(refusal), float("inf"), naive)
    except Exception as error:
        return Outcome("crash", f"{type(error).__name__}: {error}", float("inf"), naive)
    expected = reference(loss)
    error = max(update_error(expected, run.state), loss_error(expected, run))
    kind = "one micro-batch" if message else "exact"
    if not error <= 1 or (message and run.num_microbatches > 1):
        kind, message = "wrong", f"{run.num_microbatches} micro-batches; {message or 'not refused'}"
    return Outcome(kind, message, error, naive)


def _run(loss: GeneratedLoss, micro_batch: int, ranks: int) -> tuple[Run, str]:
    """A run with micro-batches, or if that is refused a run without the pin, and why."""
    try:
        run = trained(loss, {"micro_batch": micro_batch}, ranks)
    except AutoparError as refusal:
        return trained(loss, {}, ranks), str(refusal)
    return run, "" if run.num_microbatches > 1 else "the pin gave one micro-batch"


def loss_error(expected: Reference, run: Run) -> float:
    """The largest relative error of a step's loss over the tolerance."""
    pairs = zip(run.losses, expected.losses, strict=True)
    return max(abs(a - b) / max(abs(b), LEAST_LOSS) / TOLERANCE for a, b in pairs)


def sgd(loss: GeneratedLoss, parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, loss.learning_rate)


def reference(loss: GeneratedLoss) -> Reference:
    """The steps of one device on whole batches, in eager mode."""
    model = copy.deepcopy(loss.model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = sgd(loss, [p for p in model.parameters() if p.requires_grad])
    losses = []
    for batch in loss.batches:
        optimizer.zero_grad()
        value = model(**batch)
        value.backward()
        optimizer.step()
        losses.append(float(value))
    after = {name: value.clone() for name, value in model.state_dict().items()}
    return Reference(losses, before, after)


def trained(loss: GeneratedLoss, pin: dict, ranks: int) -> Run:
    """The steps of an engine."""
    with _silence():
        engine = autopar.parallelize(
            copy.deepcopy(loss.model),
            f"cpu:{ranks}",
            example_inputs=loss.batches[0],
            optimizer=lambda parameters: sgd(loss, parameters),
            global_batch=loss.rows,
            pin=PINS | {"dp": ranks} | pin,
            precision="fp64",
        )
        losses = [float(engine.step(engine.local_batch(batch))) for batch in loss.batches]
        return Run(engine.full_state_dict(), losses, engine.plan.num_microbatches)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Nothing of what planning and torch.export print and log: thousands of losses would."""
    logging.disable()
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(logging.NOTSET)


# -------------------------------------------------------------------------------------------- teeth


def naive_is_wrong(loss: GeneratedLoss) -> bool:
    """Whether neither the sum nor the mean over micro-batches has the gradient of each whole batch."""
    size, sum_is_wrong, mean_is_wrong = loss.micro_batch, False, False
    for batch in loss.batches:
        whole = _gradient(loss.model, batch)
        slices = [slice(k, k + size) for k in range(0, loss.rows, size)]
        try:
            parts = [
                _gradient(loss.model, {name: x[k] for name, x in batch.items()}) for k in slices
            ]
        except (RuntimeError, IndexError, ValueError):  # one row cannot be halved
            return True
        summed, limit = torch.stack(parts).sum(0), TOLERANCE * whole.norm()
        sum_is_wrong |= not (summed - whole).norm() <= limit
        mean_is_wrong |= not (summed / len(parts) - whole).norm() <= limit
    return sum_is_wrong and mean_is_wrong


def _gradient(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    parameters = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(model(**batch), parameters, allow_unused=True)
    return torch.cat(
        [
            (torch.zeros_like(p) if g is None else g).flatten()
            for p, g in zip(parameters, found, strict=True)
        ]
    )
