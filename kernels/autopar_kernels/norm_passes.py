"""The forward and the backward pass of every norm: `autopar::norm_forward` and `autopar::norm_backward`.

Each has its ATen reference and launches a kernel of `norm_kernels`.  The text of `norms` says what the attributes mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar_kernels.launching import (
    Tile,
    divide_up,
    launch,
    partial_sums,
    programs_of,
    rows_of,
    runs_kernel,
    strides_of,
    tile_of,
)
from autopar_kernels.registration import absent, accumulation_dtype, register_pass
from autopar_kernels.sums import sum_parts

SHARED_BYTES = 160 << 10
"""Shared memory of a program on an A100, the least of the devices: rows are read ahead where three blocks fit."""
CASTS = ("before", "weight", "after", "none")
"""Where a norm rounds; the docstring of `norms` describes each value."""


@dataclass(frozen=True, slots=True, eq=False)
class Forward:
    """The arguments of `autopar::norm_forward`, as `norms.rms_norm` takes them; `center` subtracts
    the mean first. ValueError if they do not fit together.
    """

    x: Tensor
    residual: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    gate: Tensor | None
    center: bool
    eps: float
    offset: float
    cast: str
    groups: int
    gate_first: bool

    def __post_init__(self) -> None:
        columns = self.x.shape[-1]
        if self.cast not in CASTS:
            raise ValueError(f"cast {self.cast!r} is not one of {', '.join(CASTS)}")
        if self.groups < 1 or columns % self.groups:
            raise ValueError(f"{self.groups} groups do not divide rows of {columns} elements")
        for name, vector in (("weight", self.weight), ("bias", self.bias)):
            if vector is not None and vector.shape != (columns,):
                raise ValueError(
                    f"a {name} of shape {tuple(vector.shape)} for rows of {columns} elements"
                )
        for name, other in (("residual", self.residual), ("gate", self.gate)):
            if other is not None and other.shape != self.x.shape:
                raise ValueError(
                    f"a {name} of shape {tuple(other.shape)} for x of {tuple(self.x.shape)}"
                )

    @property
    def total(self) -> torch.dtype:
        """The dtype of x + residual, or of x without a residual."""
        if self.residual is None:
            return self.x.dtype
        return torch.promote_types(self.x.dtype, self.residual.dtype)

    @property
    def rounded(self) -> torch.dtype | None:
        """The dtype to which the normalised value is rounded before the weight, or None."""
        scale = self.total if self.weight is None else self.weight.dtype
        return {"before": self.total, "weight": scale}.get(self.cast)

    @property
    def result(self) -> torch.dtype:
        """The dtype of the norm's result, which follows from `cast`, the dtypes and the gate."""
        scale = self.total if self.weight is None else self.weight.dtype
        if self.cast == "after" or (self.gate is not None and not self.gate_first):
            return self.total
        return scale if self.cast == "weight" else torch.promote_types(self.total, scale)

    def outputs(self, wide: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """New tensors for (result, x + residual, mean, 1 / deviation). The last two are (rows,
        groups) in `wide`. The sum without a residual, and the mean without `center`, are empty
        tensors.
        """
        x = self.x
        rstd = x.new_empty((math.prod(x.shape[:-1]), self.groups), dtype=wide)
        return (
            x.new_empty(x.shape, dtype=self.result),
            absent(x) if self.residual is None else x.new_empty(x.shape, dtype=self.total),
            torch.empty_like(rstd) if self.center else absent(rstd),
            rstd,
        )


def _norm_forward(*arguments: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call = Forward(*arguments)  # type: ignore[arg-type]
    if runs_kernel(call.x, call.residual, call.weight, call.bias, call.gate):
        return _forward_kernel(call)
    return _forward_reference(call)


def _norm_forward_fake(*arguments: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call = Forward(*arguments)  # type: ignore[arg-type]
    wide = accumulation_dtype(call.x, call.residual, call.weight, call.bias, call.gate)
    return call.outputs(wide)


def _forward_reference(call: Forward) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, residual, weight, bias, gate = call.x, call.residual, call.weight, call.bias, call.gate
    wide = accumulation_dtype(x, residual, weight, bias, gate)
    summed = x if residual is None else x.to(call.total) + residual.to(call.total)
    value = summed.to(wide)
    if gate is not None and call.gate_first:
        value = value * F.silu(gate.to(wide))
    out, total, mean, rstd = call.outputs(wide)
    parts = value.reshape(*rstd.shape, x.shape[-1] // call.groups)
    if call.center:
        mean.copy_(parts.mean(-1))
        parts = parts - mean.unsqueeze(-1)
    rstd.copy_((parts.square().mean(-1) + call.eps).rsqrt())
    value = (parts * rstd.unsqueeze(-1)).view(x.shape)
    if call.rounded is not None:
        value = value.to(call.rounded).to(wide)
    if weight is not None:
        value = value * (weight.to(wide) + call.offset)
    if bias is not None:
        value = value + bias.to(wide)
    if gate is not None and not call.gate_first:
        value = value * F.silu(gate.to(wide))
    return out.copy_(value), total if residual is None else total.copy_(summed), mean, rstd


def _forward_kernel(call: Forward) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from autopar_kernels.norm_kernels import norm_forward_kernel
    from autopar_kernels.tiles import TRITON_DTYPES

    out, total, mean, rstd = call.outputs(torch.float32)
    columns = call.x.shape[-1] // call.groups
    tile = tile_of(columns, "norm", call.x.device)
    inputs = [None if t is None else rows_of(t) for t in (call.x, call.residual, call.gate)]
    vectors = [None if t is None else t.contiguous() for t in (call.weight, call.bias)]
    written = (
        None if call.residual is None else total,
        out,
        mean if call.center else None,
        rstd,
        rstd.shape[0],
    )
    launch(
        norm_forward_kernel,
        (divide_up(rstd.shape[0], tile.rows), call.groups if columns else 0),
        (*inputs, *vectors, *written, strides_of(*inputs)),
        tile.warps,
        N=columns,
        EPS=call.eps,
        OFFSET=call.offset,
        SUM=TRITON_DTYPES[call.total],
        ROUND=None if call.rounded is None else TRITON_DTYPES[call.rounded],
        GATE_FIRST=call.gate_first and call.gate is not None,
        R=tile.rows,
        BLOCK=tile.columns,
    )
    return out, total, mean, rstd


@dataclass(frozen=True, slots=True, eq=False)
class Backward:
    """The arguments of `autopar::norm_backward`.

    Attributes:
        grad: the gradient of the result, shape of x.
        grad_total: the gradient of x + residual, or None.
        x: what was normalised: the argument, or the sum.
        mean: the mean of each row and group, (rows, groups), or None without centering.
        rstd: 1 / deviation, (rows, groups).
        vector: the dtype of the gradients of weight and bias.
        needs: whether the gradients of x, weight, bias and gate are asked for.
    """

    grad: Tensor
    grad_total: Tensor | None
    x: Tensor
    weight: Tensor | None
    gate: Tensor | None
    mean: Tensor | None
    rstd: Tensor
    vector: torch.dtype
    offset: float
    groups: int
    gate_first: bool
    needs: list[bool]

    def outputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """New tensors for the gradients of x, weight, bias and gate; those that are not asked for
        are empty.
        """
        x, columns = self.x, self.x.shape[-1]
        return (
            x.new_empty(x.shape) if self.needs[0] else absent(x),
            x.new_empty(columns if self.needs[1] else 0, dtype=self.vector),
            x.new_empty(columns if self.needs[2] else 0, dtype=self.vector),
            x.new_empty(x.shape, dtype=self.gate.dtype)
            if self.gate is not None and self.needs[3]
            else absent(x),
        )


def _norm_backward(*arguments: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call = Backward(*arguments)  # type: ignore[arg-type]
    if runs_kernel(call.grad, call.grad_total, call.x, call.weight, call.gate):
        return _backward_kernel(call)
    return _backward_reference(call)


def _norm_backward_fake(*arguments: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return Backward(*arguments).outputs()  # type: ignore[arg-type]


def _backward_reference(call: Backward) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide = call.rstd.dtype
    dx, dweight, dbias, dgate = call.outputs()
    parts = (*call.rstd.shape, call.x.shape[-1] // call.groups)
    value, upstream = call.x.to(wide), call.grad.to(wide)
    z = None if call.gate is None else call.gate.to(wide)
    scale = 1.0 if call.weight is None else call.weight.to(wide) + call.offset
    if z is not None and call.gate_first:
        value = value * F.silu(z)
    mean = 0.0 if call.mean is None else call.mean.unsqueeze(-1)
    normal = (value.reshape(parts) - mean) * call.rstd.unsqueeze(-1)
    flat = normal.view(call.x.shape)
    if z is not None and not call.gate_first:
        dz = upstream * flat * scale
        upstream = upstream * F.silu(z)
    weighted = (upstream * scale).reshape(parts)
    inner = weighted - normal * (weighted * normal).mean(-1, keepdim=True)
    if call.mean is not None:
        inner = inner - weighted.mean(-1, keepdim=True)
    inner = (inner * call.rstd.unsqueeze(-1)).view(call.x.shape)
    if z is not None and call.gate_first:
        dz = inner * call.x.to(wide)
        inner = inner * F.silu(z)
    if z is not None and call.needs[3]:
        s = torch.sigmoid(z)
        dgate.copy_(dz * s * (1 + z * (1 - s)))
    if call.needs[0]:
        dx.copy_(inner if call.grad_total is None else inner + call.grad_total)
    if call.needs[1]:
        dweight.copy_((upstream * flat).reshape(-1, dweight.shape[0]).sum(0))
    if call.needs[2]:
        dbias.copy_(upstream.reshape(-1, dbias.shape[0]).sum(0))
    return dx, dweight, dbias, dgate


def _backward_kernel(call: Backward) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from autopar_kernels.norm_kernels import norm_backward_kernel

    dx, dweight, dbias, dgate = call.outputs()
    rows, columns = call.rstd.shape[0], call.x.shape[-1]
    width = columns // call.groups
    tile = tile_of(width, "norm_sums", call.x.device)
    whole = width <= tile.columns
    if not whole:
        tile = Tile(1, max(tile.columns // 2, 16), 16)
    programs = programs_of(divide_up(rows, tile.rows), tile, call.x.device)
    inputs = [
        None if t is None else rows_of(t) for t in (call.grad, call.x, call.gate, call.grad_total)
    ]
    grad, x, gate, grad_total = inputs
    read = sum(t.element_size() for t in inputs if t is not None) * tile.rows * tile.columns
    parts = [
        partial_sums(call.x, whole and rows > 0, programs, columns) if wanted else None
        for wanted in call.needs[1:3]
    ]
    launch(
        norm_backward_kernel,
        (programs if rows else 0, call.groups if columns else 0),
        (
            *(grad, grad_total, x, gate),
            None if call.weight is None else call.weight.contiguous(),
            *(call.mean, call.rstd),
            dx if call.needs[0] else None,
            dgate if call.needs[3] else None,
            *(*parts, rows, strides_of(*inputs)),
        ),
        tile.warps,
        N=width,
        OFFSET=call.offset,
        GATE_FIRST=call.gate_first and gate is not None,
        R=tile.rows,
        BLOCK=tile.columns,
        STAGES=3 if whole and 3 * read <= SHARED_BYTES else 1,
    )
    dweight, dbias = (
        out if part is None else sum_parts(part, out.dtype)
        for part, out in zip(parts, (dweight, dbias), strict=True)
    )
    return dx, dweight, dbias, dgate


register_pass(
    "norm_forward(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, Tensor? gate, bool center, "
    "float eps, float offset, str cast, int groups, bool gate_first) -> (Tensor, Tensor, Tensor, Tensor)",
    _norm_forward,
    _norm_forward_fake,
)
register_pass(
    "norm_backward(Tensor grad, Tensor? grad_total, Tensor x, Tensor? weight, Tensor? gate, Tensor? mean, "
    "Tensor rstd, ScalarType vector, float offset, int groups, bool gate_first, bool[] needs) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _norm_backward,
    _norm_backward_fake,
)
