"""How far predictions were off, by kind of run. The figures are those of docs/accuracy.md."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.plan import Plan
from autopar.text.layout_words import is_experts


@dataclass(frozen=True, slots=True)
class Accuracy:
    """The error of predicted step times over published runs of a kind: `runs` of them, the mean
    absolute error and the bias as fractions. A negative bias means that steps took longer.
    """

    kind: str
    runs: int
    mean_error: float
    bias: float


ALL = Accuracy("all", 156, 0.061, -0.014)
PARALLEL = Accuracy("tp or pp > 1", 87, 0.067, -0.012)
SHARDED = Accuracy("FSDP or ZeRO-3", 71, 0.052, -0.011)
EXPERTS = Accuracy("mixture of experts", 8, 0.258, -0.198)
TABLE = (ALL, PARALLEL, SHARDED, EXPERTS)
"""The rows of docs/accuracy.md that plans are compared with."""


def accuracy_of(plan: Plan) -> Accuracy:
    """The accuracy of predictions for runs like this plan."""
    if any(is_experts(op) for block in plan.blocks for op in block.ops):
        return EXPERTS
    if plan.zero == 3:
        return SHARDED
    return PARALLEL if max(plan.mesh.tp, plan.mesh.pp) > 1 else ALL
