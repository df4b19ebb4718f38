"""Bounds for all ZeRO stages of one mesh and micro-batch together.

In a pipeline, ZeRO stages that shard differ only in the costs of parameters. A model with the
minimum of each cost therefore bounds them all at once. A stage that another one dominates in every
placement is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autopar.ir.annotated import AnnotatedBlock, AnnotatedModel, AnnotatedOp, Strategy
from autopar.solve.costs.pareto import undominated
from autopar.solve.costs.recompute_mix import Models

_LEAST = (
    "forward_s",
    "backward_s",
    "forward_dispatch_s",
    "backward_dispatch_s",
    "step_s",
    "static_bytes",
    "gradient_bytes",
    "optimizer_bytes",
    "host_bytes",
    "rerun_s",
)
_SAME = ("name", "inputs", "outputs", "saved", "late")


def least_of(models: Sequence[AnnotatedModel]) -> AnnotatedModel:
    """A model in which each strategy has the minimum of each cost over `models`. These have the
    same classes and strategies, and differ only in ops whose costs depend on dp. Communication
    seconds of such ops become 0 if there are several models. Raises ValueError if strategies differ
    in more than their costs.
    """
    if len(models) == 1:
        return models[0]
    classes = tuple(map(_least_block, zip(*(model.classes for model in models), strict=True)))
    fixed_s, fixed_bytes = (
        min(getattr(model, part) for model in models) for part in ("fixed_s", "fixed_bytes")
    )
    return replace(models[0], classes=classes, fixed_s=fixed_s, fixed_bytes=fixed_bytes)


def _least_block(blocks: Sequence[AnnotatedBlock]) -> AnnotatedBlock:
    ops = tuple(
        _least_op(of) if of[0].follows_dp else of[0]
        for of in zip(*(block.ops for block in blocks), strict=True)
    )
    return replace(
        blocks[0], ops=ops, workspace_bytes=min(block.workspace_bytes for block in blocks)
    )


def _least_op(of: Sequence[AnnotatedOp]) -> AnnotatedOp:
    return replace(
        of[0],
        strategies=tuple(map(_least_strategy, zip(*(op.strategies for op in of), strict=True))),
    )


def _least_strategy(of: Sequence[Strategy]) -> Strategy:
    for name in _SAME:
        if any(getattr(one, name) != getattr(of[0], name) for one in of):
            raise ValueError(f"strategy {of[0].name} has another {name} under another ZeRO stage")
    least = {name: min(getattr(one, name) for one in of) for name in _LEAST}
    weight_s = min(max(one.backward_weight_s for one in of), least["backward_s"])
    return replace(
        of[0],
        **least,
        backward_weight_s=weight_s,
        forward_comm_s=0.0,
        backward_comm_s=0.0,
        step_comm_s=0.0,
    )


def undominated_variants(of: Sequence[Models]) -> list[int]:
    """Indices, ascending, of the ZeRO variants that no other variant dominates in time and memory
    under every placement. Of equal ones, the first stays. Each variant has its models by recompute
    mode.
    """
    return sorted(undominated(np.array([_numbers(models) for models in of])))


def _numbers(models: Models) -> list[float]:
    """All costs in which ZeRO stages of one candidate differ, as one list; smaller is better.
    Gradients of parameters count with both signs, since other ranks wait for the rest of a backward
    only.
    """
    found: list[float] = []
    for model in models.values():
        found += [model.fixed_s, model.fixed_bytes]
        for block in model.classes:
            found.append(block.workspace_bytes)
            for op in (op for op in block.ops if op.follows_dp):
                found += _of_op(op)
    return found


def _of_op(op: AnnotatedOp) -> list[float]:
    least = [getattr(s, name) for s in op.strategies for name in _LEAST]
    return least + [sign * s.backward_weight_s for s in op.strategies for sign in (1, -1)]
