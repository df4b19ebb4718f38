"""Runs the plan of a file on CPU processes, and compares with one device, which eager PyTorch trains."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import autopar
from autopar.errors import AutoparError
from autopar.ir.plan import Plan
from autopar.models.base import ModelSpec
from autopar.planning.model_facts import num_experts
from autopar.runtime.ranks.launch import WorkerError, run_workers
from autopar.verify.verify import (
    TOLERANCES,
    Case,
    Setup,
    compare_training,
    expected_of,
    make_case,
    relative_error,
    widened,
)

STEPS, RUN_TIMEOUT_S = 3, 240.0
HALF_TOLERANCE = 0.3
"""The largest error of a half-precision plan, against one device in fp32, relative to the update."""


@dataclass(frozen=True)
class Run:
    """How a run ended: 'exact', 'wrong', 'refused', 'failed', 'without a reference', or 'not for the
    engine', which a plan for another framework is. `words` name
    the worst tensor, or say why there is none. `error` is relative to the update.
    """

    status: str
    words: str = ""
    error: float = 0.0


@dataclass(frozen=True)
class Expected:
    """What one device gives: gradients of the first step (None if it is not defined by eager PyTorch), tensors
    after training, losses.
    """

    gradients: dict[str, Tensor] | None
    after: dict[str, Tensor]
    losses: tuple[float, ...]


def run_file(spec: ModelSpec, tokens: int, path: Path) -> Run:
    """Trains the model of a spec on sequences of `tokens` under the plan of a file, on the plan's
    number of CPU processes. Compares with one device.
    """
    plan = Plan.load(str(path))
    exact = plan.precision if plan.precision in TOLERANCES else "fp32"
    setup = Setup(spec, exact, STEPS, tokens, plan.global_batch)
    try:
        case = make_case(setup)
        expected = expectation(setup, case, plan)
    except AutoparError as error:
        return Run("without a reference", str(error))
    try:
        arguments = setup, str(path), expected
        ranks = run_workers(_rank, plan.mesh.num_devices, arguments, RUN_TIMEOUT_S)
    except AutoparError as error:
        # the engine runs no half precision that was priced for another framework
        said = plan.lacks and str(error).startswith(f"the plan is for {plan.framework}")
        return Run("not for the engine" if said else "refused", str(error))
    except WorkerError as error:
        return Run("failed", str(error)[-900:])
    error, worst = max(ranks)
    most = TOLERANCES[exact][0] if exact == plan.precision else HALF_TOLERANCE
    return Run("exact" if error <= most else "wrong", worst, error)


def expectation(setup: Setup, case: Case, plan: Plan) -> Expected:
    """What eager PyTorch gives on one device with whole batches. Where a loss is none of whole
    batches (balance of experts, batch norm, dropout), what one device gives with the plan's
    micro-batches.
    """
    own = plan.num_microbatches > 1 and (plan.micro_batch_mean or bool(num_experts(case.traced)) or bool(case.traced.updates))  # fmt: skip
    if own or case.drops:
        after, losses = expected_of(setup, case, plan)
        return Expected(None, after, losses)
    gradients, after, losses = eager(setup, case)
    return Expected(gradients, after, losses)


def eager(setup: Setup, case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor], tuple[float, ...]]:  # fmt: skip
    """(gradients of the first step, tensors after training, losses) of one device."""
    model = copy.deepcopy(case.model)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer, first, losses = optimizer_of(case)(list(trained.values())), {}, []
    with widened(setup.precision):
        for batch in case.batches:
            optimizer.zero_grad()
            output = model(**batch)
            loss = output if isinstance(output, Tensor) else output[0]
            loss.backward()
            first = first or {n: p.grad.clone() for n, p in trained.items() if p.grad is not None}
            optimizer.step()
            losses.append(loss.item())
    state = model.state_dict()
    return first, {name: state[name].detach() for name in case.after}, tuple(losses)


def optimizer_of(case: Case) -> Callable:
    return lambda parameters: torch.optim.SGD(parameters, case.learning_rate, momentum=0.9)


def _rank(rank: int, setup: Setup, path: str, expected: Expected) -> tuple[float, str]:
    """(largest error, what has it) of this process, which runs the plan of a file."""
    case = make_case(setup)
    with widened(setup.precision):
        engine = autopar.parallelize(
            case.model,
            example_inputs=case.batches[0],
            plan=Plan.load(path),
            optimizer=optimizer_of(case),
            batch_dims=dict(setup.spec.batch_dims()),
        )
        losses, errors = [], list[tuple[float, str]]()
        for batch in case.batches:
            losses.append(float(engine.step(engine.local_batch(batch))))
            if len(losses) == 1 and expected.gradients is not None:
                rate, state = case.learning_rate, engine.full_state_dict()
                stepped = {
                    name: case.before[name] - rate * grad
                    for name, grad in expected.gradients.items()
                    if name in case.before
                }
                error, name = compare_training(case.before, stepped, state, setup.precision)
                share = 0.1 if setup.precision == "fp32" else 1.0  # rounding of the parameter
                errors.append((error * share, f"gradient of {name}"))
        state = engine.full_state_dict()
    errors.append(compare_training(case.before, expected.after, state, setup.precision))
    pairs = zip(losses, expected.losses, strict=True)
    errors += [(relative_error(mine, other), "loss") for mine, other in pairs]
    return max(errors)
