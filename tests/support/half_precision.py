"""Half-precision training of a small Llama under a plan, and by the same recipe on one process."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache

import torch
from support.exactness import Reference, setting, solved_plan, token_batches
from support.staged_runs import staged
from torch import Tensor, nn

from autopar.annotate.annotator import Annotator
from autopar.api import trace
from autopar.ir.mesh import MeshShape
from autopar.ir.plan import Plan
from autopar.models import parse_model
from autopar.runtime.engine import Engine
from autopar.runtime.state.precision import PRECISION_DTYPES, LossScale

NAME, ROWS = "llama-tiny", 8
NEAR = {"bf16": 0.015, "fp16": 0.002}
"""Update-relative error over all tensors: some 2^-8 and 2^-11 for every sum that is rounded in another order."""


@cache
def model() -> nn.Module:
    torch.manual_seed(0)
    return parse_model(NAME).build("cpu", torch.float32)


@cache
def traced(precision: str):
    found = trace(model(), batches()[0], None, precision)
    return found, Annotator(found)


def batches() -> list[dict[str, Tensor]]:
    return token_batches(parse_model(NAME).vocab, ROWS)


def sgd(params) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, 0.1, momentum=0.9)


def plan_of(precision: str, mesh: MeshShape, zero: int = 0, cut: int = 1) -> Plan:
    plan = solved_plan(*traced(precision), setting(mesh, cut))
    plan = staged(plan, traced(precision)[0], "1f1b", (2, 2)) if mesh.pp > 1 else plan
    return replace(plan, zero=zero, precision=precision)


@cache
def reference(precision: str, cut: int = 1) -> Reference:
    """Half-precision forward and backward of each micro-batch; fp32 sums of gradients, and fp32 master weights."""
    masters = {name: p.detach().clone() for name, p in model().named_parameters()}
    half, losses = copy.deepcopy(model()).to(PRECISION_DTYPES[precision]), []
    before, optimizer = {k: v.clone() for k, v in masters.items()}, sgd(list(masters.values()))
    scale = LossScale.of(precision).scale
    for batch in batches():
        count, total = (batch["labels"][:, 1:] != -100).sum(), 0.0
        for k in range(cut):
            rows = slice(k * ROWS // cut, (k + 1) * ROWS // cut)
            part = {name: tensor[rows] for name, tensor in batch.items()}
            loss = half(**part) * ((part["labels"][:, 1:] != -100).sum() / count)
            (loss * scale).backward()
            total += loss.item()
            for name, p in half.named_parameters():
                grad = p.grad.float() / scale
                masters[name].grad = (
                    grad if masters[name].grad is None else masters[name].grad + grad
                )
                p.grad = None
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        with torch.no_grad():
            for name, p in half.named_parameters():
                p.copy_(masters[name])
    return Reference(losses, before, masters)


def error(result: Reference, state: dict[str, Tensor]) -> float:
    """|state - after| / |after - before| over all tensors together."""
    missed = sum((state[k] - v).double().pow(2).sum() for k, v in result.after.items())
    moved = sum((v - result.before[k]).double().pow(2).sum() for k, v in result.after.items())
    return float((missed / moved).sqrt())


def run(rank: int, texts: list[str]) -> list:
    found = []
    for text in texts:
        plan = Plan.from_json(text)
        engine = Engine(model(), traced(plan.precision)[0], plan, sgd, None, None, "cpu")
        losses = [float(engine.step(engine.local_batch(batch))) for batch in batches()]
        found.append(
            (
                losses,
                engine.full_state_dict(),
                {p.dtype for p in engine.program.module.parameters()},
            )
        )
    return found
