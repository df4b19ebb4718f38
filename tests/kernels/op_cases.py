"""One call of every op, small, for the checks of `test_kernel_ops.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import autopar_kernels.bias_activations
import autopar_kernels.expert_rows
import autopar_kernels.glu
import autopar_kernels.layer_norms
import autopar_kernels.linear_losses
import autopar_kernels.losses
import autopar_kernels.norms
import autopar_kernels.partial_attention
import autopar_kernels.rotary
import autopar_kernels.softmax
import autopar_kernels.sums  # noqa: F401 (each registers its ops)
import torch

ops = torch.ops.autopar


@dataclass(frozen=True)
class OpCase:
    """An op and arguments: a tuple of ints stands for a tensor that needs a gradient, [tuple] for one that needs none."""

    op: Any
    make: Callable[[], tuple[Any, ...]]
    differentiable: bool = True
    name: str = ""
    gradcheck: bool = True

    def __str__(self) -> str:
        return f"{self.op._schema.name.split('::')[1]}{self.name and '-' + self.name}"

    def arguments(self, dtype: torch.dtype) -> tuple[Any, ...]:
        """The arguments with floating tensors of the dtype."""
        generator = torch.Generator().manual_seed(0)
        made: list[Any] = []
        for value in self.make():
            if isinstance(value, tuple):
                value = torch.randn(value, dtype=torch.float64, generator=generator).to(dtype)
                value.requires_grad_(self.differentiable)
            elif isinstance(value, list) and value and isinstance(value[0], tuple):
                value = torch.randn(value[0], dtype=torch.float64, generator=generator).to(dtype)
            made.append(value)
        return tuple(made)


POSITIONS = torch.tensor([[0, 4], [3, 3]])
LABELS = torch.tensor([[0, 4], [1, 2]])
STATISTICS = torch.tensor([[2.0, 1, 3, 2], [2, 2, 1, 3], [1, 0, 2, 1], [1, 1, 0, 2]])
MASK = torch.tensor([[True, True, False, True, True], [False, False, True, False, True]])
ORDER = torch.tensor([3, 0, 5, 1, 4, 2])
INVERSE = torch.argsort(ORDER)

CASES = [
    OpCase(ops.rms_norm.default, lambda: ((3, 2, 6), (6,), None, 1e-6, 1.0, "after")),
    OpCase(
        ops.rms_norm.default,
        lambda: ((3, 6), (6,), (3, 6), 1e-6, 0.0, "before", 2, True),
        name="gate_first",
    ),
    OpCase(
        ops.rms_norm.default,
        lambda: ((3, 6), None, (3, 6), 1e-6, 0.0, "none", 3, False),
        name="gate_last",
    ),
    OpCase(ops.add_rms_norm.default, lambda: ((3, 6), (3, 6), (6,))),
    OpCase(ops.layer_norm.default, lambda: ((2, 3, 6), (6,), (6,))),
    OpCase(ops.layer_norm.default, lambda: ((2, 6), None, (6,)), name="no_weight"),
    OpCase(ops.add_layer_norm.default, lambda: ((3, 6), (3, 6), (6,), (6,))),
    OpCase(
        ops.norm_forward.default,
        lambda: (
            *((3, 6), (3, 6), (6,), (6,), None),
            *(True, 1e-5, 0.0, "after", 1, False),
        ),
        differentiable=False,
    ),
    OpCase(
        ops.norm_backward.default,
        lambda: (
            *((3, 6), None, (3, 6), (6,), (3, 6), None, (3, 2)),
            *(torch.float32, 0.0, 2, True, [True, False, False, True]),
        ),
        differentiable=False,
    ),
    OpCase(ops.sum_partials.default, lambda: ((3, 2, 6),)),
    OpCase(ops.sum_parts.default, lambda: ((3, 6),), differentiable=False),
    OpCase(ops.sum_parts.default, lambda: ((20, 6),), differentiable=False, name="many"),
    OpCase(ops.glu.default, lambda: ((2, 3, 4), (2, 3, 4), "gelu")),
    OpCase(ops.glu.default, lambda: ((3, 8), None, "gelu_tanh", 1.0, 0.0, None, "up_gate")),
    OpCase(
        ops.glu.default,
        lambda: ((3, 8), None, "silu", 1.702, 1.0, 0.7, "interleaved"),
        name="clamped",
    ),
    OpCase(
        ops.glu_forward.default,
        lambda: ((3, 4), (3, 4), "relu", 1.0, 0.0, None),
        differentiable=False,
    ),
    OpCase(
        ops.glu_backward.default,
        lambda: ((3, 4), (3, 4), (3, 4), "relu", 1.0, 0.0, None, "interleaved", [True, True]),
        differentiable=False,
    ),
    OpCase(ops.bias_activation.default, lambda: ((2, 3, 4), (4,), "gelu_tanh")),
    OpCase(
        ops.bias_activation_forward.default,
        lambda: ((3, 4), (4,), "silu"),
        differentiable=False,
    ),
    OpCase(
        ops.bias_activation_backward.default,
        lambda: ((3, 4), (3, 4), (4,), "silu", [True, False]),
        differentiable=False,
    ),
    OpCase(
        ops.rotary.default,
        lambda: ((2, 2, 3, 8), (2, 1, 3, 8), [(1, 3, 4)], [(1, 3, 4)], None, 4, True, True),
    ),
    OpCase(ops.rotary_single.default, lambda: ((2, 3, 2, 8), *[[(5, 4)]] * 2, POSITIONS)),
    OpCase(
        ops.rotary_single.default,
        lambda: (
            *((2, 3, 2, 8), [(1, 2, 3)], [(1, 2, 3)], None),
            *(6, True, True, False, False, True),
        ),
        name="parted",
    ),
    OpCase(
        ops.rotary_pass.default,
        lambda: (
            *((2, 2, 3, 8), None, (2, 3, 8), (2, 3, 8), None),
            *(8, False, False, False, False, False, True),
        ),
        differentiable=False,
    ),
    OpCase(
        ops.cross_entropy.default,
        lambda: ((2, 2, 5), LABELS, [(5,)], 1, 0.1, 0.01, 2.0, "mean"),
    ),
    OpCase(ops.cross_entropy.default, lambda: ((2, 2, 5), LABELS), name="plain"),
    OpCase(
        ops.cross_entropy_local.default,
        lambda: ((2, 2, 5), LABELS, (9,), 2, True, 2.0),
        differentiable=False,
    ),
    OpCase(ops.cross_entropy_merge.default, lambda: ((2, 4, 3),), differentiable=False),
    OpCase(
        ops.cross_entropy_merged.default,
        lambda: ((2, 2, 5), LABELS, STATISTICS, [(9,)], 2, 9, 1, 0.1, 0.01, 2.0),
        gradcheck=False,
    ),
    OpCase(
        ops.cross_entropy_rows.default,
        lambda: (STATISTICS, LABELS, (9,), 9, 1, 0.1, 0.01),
        differentiable=False,
    ),
    OpCase(
        ops.cross_entropy_gradient.default,
        lambda: (*((4,), (2, 2, 5), LABELS, (9,), STATISTICS, 2, 9, 1, 0.1, 0.01), 2.0),
        differentiable=False,
    ),
    OpCase(ops.softmax.default, lambda: ((2, 2, 2, 5), MASK, (2,), 0.7, 3.0)),
    OpCase(ops.softmax.default, lambda: ((2, 2, 5), [(5,)]), name="added"),
    OpCase(
        ops.softmax_forward.default,
        lambda: ((2, 2, 2, 5), MASK, (2,), 0.7, 3.0),
        differentiable=False,
    ),
    OpCase(
        ops.softmax_backward.default,
        lambda: (*((2, 2, 5), (2, 2, 5), MASK, (2,), (2, 2)), 0.7, None, [True, True]),
        differentiable=False,
    ),
    OpCase(
        ops.merge_attention.default,
        lambda: ((3, 5), (3,), (3, 5), (3,)),
        differentiable=False,
    ),
    OpCase(ops.permute_rows.default, lambda: ((3, 5), ORDER, INVERSE)),
    OpCase(ops.combine_rows.default, lambda: ((6, 5), ORDER, INVERSE, (3, 2))),
    OpCase(
        ops.gather_sum.default,
        lambda: ((6, 5), INVERSE.view(3, 2), (3, 2), torch.float32),
        differentiable=False,
    ),
    OpCase(
        ops.gather_dot.default,
        lambda: ((6, 5), INVERSE.view(3, 2), (3, 5), torch.float32),
        differentiable=False,
    ),
    OpCase(
        ops.linear_cross_entropy.default,
        lambda: ((2, 2, 6), (5, 6), LABELS, [(5,)], 1, 0.1, 0.01, 2.0, 3, "mean"),
    ),
    OpCase(
        ops.linear_cross_entropy.default,
        lambda: ((2, 2, 6), (5, 6), LABELS),
        name="plain",
    ),
    OpCase(
        ops.linear_cross_entropy_merged.default,
        lambda: ((2, 2, 6), (5, 6), LABELS, STATISTICS, [(9,)], 2, 9, 1, 0.1, 0.01, 2.0, 3),
        gradcheck=False,
    ),
    OpCase(
        ops.linear_cross_entropy_local.default,
        lambda: ((2, 2, 6), (5, 6), LABELS, (9,), 2, True, None, 3),
        differentiable=False,
    ),
    OpCase(
        ops.linear_cross_entropy_gradient.default,
        lambda: (
            *((4,), (2, 2, 6), (5, 6), LABELS, (9,), STATISTICS, 2, 9, 1, 0.1, 0.01),
            *(2.0, 3, [True, True]),
        ),
        differentiable=False,
    ),
]
