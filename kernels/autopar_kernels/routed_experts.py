"""Routed experts (mixture of experts) as one op: `autopar::routed_experts`, and the pieces that a
distributed version is made of.

A token's k-th choice is row t * K + k of T * K rows.  The rows are sorted by expert, so that every
expert multiplies one slice. The number of rows does not depend on the routing. Only the ends of
slices do, and they are a tensor. Therefore nothing here reads values on the host, except the loop
of `autopar::grouped_mm`, which is a separate op.  Sorting by expert and multiplying slices is
MegaBlocks' dropless formulation (Gale et al. 2022, arXiv:2211.15841, section 3) without its blocks;
the capacity that drops choices is GShard's (Lepikhin et al. 2020, arXiv:2006.16668, section 2.2).

    order, ids, ends = sort_by_expert(index)                                      inverse = inverse_order(order)
    routed_experts = combine_rows(expert_mlp(permute_rows(x, order, inverse), ...), order, inverse, weights)

`autopar::routed_experts` is registered as a composite of these, and is one node of a captured
graph. When it runs, it behaves like the function: autograd keeps the intermediate tensors and
recomputes nothing. On meta and fake tensors all shapes and all kept tensors are right.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar_kernels.expert_rows import combine_rows, permute_rows

_Shape = tuple[int, ...]

# ------------------------------------------------------------------------------------------------------------------- activations

POINTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "hardswish": F.hardswish,
    "leaky_relu": F.leaky_relu,
    "linear": lambda x: x,
    "mish": F.mish,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "relu6": F.relu6,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "swish": F.silu,
    "tanh": torch.tanh,
}
"""Activations by the names that transformers' ACT2FN gives them."""

GATED = ("gated", "gated_clamp", "interleaved_clamp", "concatenated_clamp")
"""Kinds of activation that halve the width: F' = 2 F."""


@lru_cache
def activation_function(activation: str) -> Callable[[Tensor], Tensor]:
    """The function between the two products of an expert, (rows, F') -> (rows, F).

    The text is one of

        gated:silu                  act(gate) * up, where gate|up are the halves of F' = 2 F
        plain:gelu                  act(u), F' = F
        gated_clamp:silu:10.0       act(min(gate, limit)) * clamp(up, -limit, limit), halves
            (DeepSeek-V4)
        interleaved_clamp:7.0:1.702   gate sigmoid(alpha gate) (up + 1), clamped at the limit; gate
            and up alternate (GPT-OSS)
        concatenated_clamp:7.0:1.702  the same of halves

    with any name of `POINTWISE`.  Raises ValueError for any other text.
    """
    kind, *parts = activation.split(":")
    try:
        if kind == "plain" and len(parts) == 1:
            return POINTWISE[parts[0]]
        if kind == "gated" and len(parts) == 1:
            return _gated(POINTWISE[parts[0]])
        if kind == "gated_clamp" and len(parts) == 2:
            return _gated_clamp(POINTWISE[parts[0]], float(parts[1]))
        if kind in ("interleaved_clamp", "concatenated_clamp") and len(parts) == 2:
            return _swish_clamp(
                float(parts[0]), float(parts[1]), interleaved=kind == "interleaved_clamp"
            )
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"activation {activation!r}: {error}; known names are {', '.join(POINTWISE)}"
        ) from error
    raise ValueError(
        f"activation {activation!r} is not gated:NAME, plain:NAME, gated_clamp:NAME:LIMIT, interleaved_clamp:LIMIT:ALPHA or "
        "concatenated_clamp:LIMIT:ALPHA"
    )


def _gated(act: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def apply(both: Tensor) -> Tensor:
        gate, up = both.chunk(2, dim=-1)
        return act(gate) * up

    return apply


def _gated_clamp(act: Callable[[Tensor], Tensor], limit: float) -> Callable[[Tensor], Tensor]:
    def apply(both: Tensor) -> Tensor:
        gate, up = both.chunk(2, dim=-1)
        return act(gate.clamp(max=limit)) * up.clamp(min=-limit, max=limit)

    return apply


def _swish_clamp(limit: float, alpha: float, interleaved: bool) -> Callable[[Tensor], Tensor]:
    def apply(both: Tensor) -> Tensor:
        gate, up = (both[..., ::2], both[..., 1::2]) if interleaved else both.chunk(2, dim=-1)
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
        return (up + 1) * (gate * torch.sigmoid(gate * alpha))

    return apply


# ------------------------------------------------------------------------------------------------------------- grouped products


@torch.library.custom_op("autopar::grouped_mm", mutates_args=())
def grouped_mm(rows: Tensor, weight: Tensor, ends: Tensor, transposed: bool) -> Tensor:
    """Each slice of rows times its own matrix: (S, I) -> (S, O).

    weight is (E, O, I), or (E, I, O) if `transposed`; slice e is rows ends[e - 1] to ends[e] (E,).  Rows after the last slice give
    zeros.  bf16 on CUDA runs torch's grouped kernel (no host synchronization), all else one product for each slice.
    """
    matrices = weight if transposed else weight.transpose(1, 2)
    if _has_kernel(rows, matrices):
        out = F.grouped_mm(rows, matrices, offs=ends.to(torch.int32))
        return out.masked_fill_(_after(ends, rows.shape[0]), 0)  # the kernel does not write them
    out = rows.new_zeros(rows.shape[0], matrices.shape[2])
    for matrix, (start, end) in zip(matrices, _slices(ends), strict=True):
        if start < end:
            torch.mm(rows[start:end], matrix, out=out[start:end])
    return out


@grouped_mm.register_fake
def _(rows: Tensor, weight: Tensor, ends: Tensor, transposed: bool) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[2 if transposed else 1])


@torch.library.custom_op("autopar::grouped_outer", mutates_args=())
def grouped_outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """The gradient of a grouped product's weight, left^T right of each slice: (S, A), (S, B) -> (E, A, B), zero for empty slices."""
    if _has_kernel(left, right):
        valid = ~_after(ends, left.shape[0])
        return F.grouped_mm((left * valid).t(), right * valid, offs=ends.to(torch.int32))
    out = left.new_zeros(ends.shape[0], left.shape[1], right.shape[1])
    for matrix, (start, end) in zip(out, _slices(ends), strict=True):
        if start < end:
            torch.mm(left[start:end].t(), right[start:end], out=matrix)
    return out


@grouped_outer.register_fake
def _(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    return left.new_empty(ends.shape[0], left.shape[1], right.shape[1])


def _has_kernel(*operands: Tensor) -> bool:
    """Whether torch's grouped kernel takes them: bf16, Ampere or later, and rows of 16 bytes (CUTLASS' alignment)."""
    if not all(
        t.is_cuda and t.dtype == torch.bfloat16 and t.numel() > 0 and t.shape[-1] % 8 == 0
        for t in operands
    ):
        return False
    return torch.cuda.get_device_capability(operands[0].device) >= (8, 0)


def _after(ends: Tensor, rows: int) -> Tensor:
    """A mask (rows, 1): true for rows that are in no slice."""
    return (torch.arange(rows, device=ends.device) >= ends[-1]).unsqueeze(1)


def _slices(ends: Tensor) -> list[tuple[int, int]]:
    """(start, end) of every slice; reads the ends on the host once."""
    bounds = [0, *ends.tolist()]
    return list(pairwise(bounds))


def _save_operands(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, weight, ends, transposed = inputs
    needs_rows, needs_weight = ctx.needs_input_grad[:2]
    ctx.save_for_backward(rows if needs_weight else None, weight if needs_rows else None, ends)
    ctx.transposed = transposed


def _grouped_mm_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
    rows, weight, ends = ctx.saved_tensors
    grad = grad.contiguous()
    needs_rows, needs_weight = ctx.needs_input_grad[:2]
    grad_rows = (
        torch.ops.autopar.grouped_mm(grad, weight, ends, not ctx.transposed) if needs_rows else None
    )
    grad_weight = None
    if needs_weight:
        grad_weight = torch.ops.autopar.grouped_outer(
            *((rows, grad) if ctx.transposed else (grad, rows)), ends
        )
    return grad_rows, grad_weight, None, None


grouped_mm.register_autograd(_grouped_mm_backward, setup_context=_save_operands)


def _flops(left: _Shape, right: _Shape, *rest: object, out_shape: _Shape, **kwargs: object) -> int:
    """FLOPs of a grouped product, as if every row were in a slice: 2 x S x I x O."""
    return 2 * left[0] * left[1] * out_shape[-1]


FLOP_FORMULAS = {torch.ops.autopar.grouped_mm: _flops, torch.ops.autopar.grouped_outer: _flops}
"""Formulas for `torch.utils.flop_counter.FlopCounterMode(custom_mapping=FLOP_FORMULAS)`.
Registering them would import Triton.
"""


# ------------------------------------------------------------------------------------------------------------------- the pieces


def sort_by_expert(
    index: Tensor, experts: int, capacity_factor: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Order the choices (T, K) by expert: order (T * K,), ids (T * K,), ends (experts,).

    Sorted row i is choice order[i], of expert ids[i]; expert e's rows end before ends[e]. Within an
    expert choices are in token order. Choices of no expert (index == experts, or dropped by the
    capacity) come last, with id `experts`. With a capacity factor c > 0, an expert keeps its first
    ceil(c T K / experts) choices; 0 drops none.
    """
    ids, order = torch.sort(index.reshape(-1), stable=True)
    count = ids.shape[0]
    if capacity_factor > 0:  # at most ceil(limit) of an expert's choices, the first ones
        # a tensor, since a compiler may not know count
        limit = capacity_factor * ids.new_full((), count).double() / max(experts, 1)
        place = torch.arange(count, device=ids.device) - torch.searchsorted(ids, ids)
        ids, again = torch.sort(torch.where(place < limit, ids, experts), stable=True)
        order = order[again]
    ends = torch.searchsorted(ids, torch.arange(experts, device=ids.device), right=True)
    return order, ids, ends


def expert_mlp(
    rows: Tensor,
    ids: Tensor,
    ends: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    activation: str,
    transposed: bool,
) -> Tensor:
    """Every row through its expert: rows (S, H) sorted by expert, ids (S,) and ends (E,) as `sort_by_expert` gives them -> (S, H).

    Rows of no expert give zeros.  Weights as for `routed_experts`.
    """
    inner = _add_bias(grouped_mm(rows, up, ends, transposed), up_bias, ids)
    inner = activation_function(activation)(inner)
    return _add_bias(grouped_mm(inner, down, ends, transposed), down_bias, ids)


def _add_bias(rows: Tensor, bias: Tensor | None, ids: Tensor) -> Tensor:
    if bias is None:
        return rows
    padded = torch.cat([bias, bias.new_zeros(1, bias.shape[1])])  # rows of no expert have no bias
    return rows + padded.index_select(0, ids)


def inverse_order(order: Tensor) -> Tensor:
    """The inverse permutation of `order`: its element order[i] is i."""
    return torch.empty_like(order).scatter_(
        0, order, torch.arange(order.shape[0], device=order.device)
    )


def routed_experts(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    activation: str,
    transposed: bool = False,
    capacity_factor: float = 0.0,
) -> Tensor:
    """sum_k weights[t, k] * expert index[t, k] of x[t]: (T, H) -> (T, H).

    expert e of a row r is activation(r up[e]^T + up_bias[e]) down[e]^T + down_bias[e], with the
    shapes

        x (T, H); index (T, K) int64, 0..E-1, or E for no expert; weights (T, K)
        up (E, F', H), or (E, H, F') if transposed; up_bias (E, F')
        down (E, H, F), or (E, F, H) if transposed; down_bias (E, H)

    and `activation` as in `activation_function`.  With a capacity factor of c > 0 each expert takes
    at most ceil(c T K / E) choices, in token order, and the others contribute zero; 0 drops
    nothing.  Differentiable in x, weights and the experts' tensors.  F may be sharded (each half of
    a gated up, and down). Then the result is a partial sum, and down_bias must be given on one rank
    only.
    """
    order, ids, ends = sort_by_expert(index, up.shape[0], capacity_factor)
    inverse = inverse_order(order)
    return combine_rows(
        expert_mlp(
            permute_rows(x, order, inverse),
            ids,
            ends,
            up=up,
            up_bias=up_bias,
            down=down,
            down_bias=down_bias,
            activation=activation,
            transposed=transposed,
        ),
        order,
        inverse,
        weights,
    )


SCHEMA = (
    "routed_experts(Tensor x, Tensor index, Tensor weights, Tensor up, Tensor? up_bias, Tensor down, Tensor? down_bias, str activation, "
    "bool transposed, float capacity_factor) -> Tensor"
)
_library = torch.library.Library("autopar", "FRAGMENT")
_library.define(SCHEMA)
_library.impl("routed_experts", routed_experts, "CompositeImplicitAutograd")
