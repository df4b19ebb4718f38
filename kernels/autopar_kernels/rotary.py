"""Rotary position embedding of queries and keys in one launch: `autopar::rotary`, and of one tensor: `autopar::rotary_single`.

    low'  = low cos_low - high sin_low          high' = high cos_high + low sin_high

for the pairs (low, high) of the rotated columns: columns i and i + R/2 ("half"), or 2 i and 2 i + 1 (interleaved).  With `parted`,
interleaved pairs are written as halves.  The other columns are copied.  Arithmetic is fp32 (fp64 for fp64 tensors) with one rounding.
Backward is the same kernel with -sin, and keeps the tables alone.  Nothing is rotated in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar_kernels.launching import divide_up, launch, power_of_2, runs_kernel
from autopar_kernels.registration import (
    absent,
    accumulation_dtype,
    once_differentiable,
    register_composite,
    register_pass,
)

_OPS = torch.ops.autopar


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """The arguments of `autopar::rotary_pass`, checked.

    Attributes:
        q: (B, H, T, D), or (B, T, H, D) if `heads_last`; any strides.
        k: the same with its own number of heads, or None.
        cos: (B or 1, T, C), or (P, C) with positions; C is the number R of rotated columns, or R/2 where pairs share an angle.
        sin: as cos.
        positions: (B, T) int64, rows of the tables; or None.
        rotated: the number R of rotated columns, even.
        last: whether the last R columns rotate, else the first.
        interleaved: whether pairs are neighbours, else R/2 columns apart.
        heads_last: the order of heads and tokens.
        promote: whether the results have the promoted dtype of x and the tables, else that of x.
        parted: whether forward writes neighbours R/2 columns apart, where backward reads them. Needs
            `interleaved`.
        backward: whether to rotate back; q and k are then gradients of the results.
    """

    q: Tensor
    k: Tensor | None
    cos: Tensor
    sin: Tensor
    positions: Tensor | None
    rotated: int
    last: bool
    interleaved: bool
    heads_last: bool
    promote: bool
    parted: bool
    backward: bool

    def __post_init__(self) -> None:
        q, cos = self.q, self.cos
        if q.dim() != 4 or self.rotated % 2 or not 0 < self.rotated <= q.shape[-1]:
            raise ValueError(f"{self.rotated} rotated columns of a tensor of {tuple(q.shape)}")
        if cos.shape[-1] not in (self.rotated, self.rotated // 2) or cos.shape != self.sin.shape:
            raise ValueError(
                f"tables {tuple(cos.shape)} and {tuple(self.sin.shape)} for {self.rotated} columns"
            )
        if self.k is not None and not _fit(q, self.k, 2 if self.heads_last else 1):
            raise ValueError(f"keys of {tuple(self.k.shape)} for queries of {tuple(q.shape)}")
        if self.parted and not self.interleaved:
            raise ValueError("parted=True needs interleaved=True: other pairs are apart already")
        wanted = 2 if self.positions is not None else 3
        if cos.dim() != wanted:
            raise ValueError(f"tables of {cos.dim()} dims, {wanted} are needed")

    def axes(self, x: Tensor) -> tuple[Tensor, int, int, int]:
        """x as (B, T, H, D), and B, T, H."""
        view = x if self.heads_last else x.transpose(1, 2)
        return view, view.shape[0], view.shape[1], view.shape[2]

    def neighbours(self) -> tuple[bool, bool]:
        """Whether the columns of a pair are neighbours where they are read, and where they are written."""
        apart = self.interleaved and not self.parted
        return (apart, self.interleaved) if self.backward else (self.interleaved, apart)

    def pairs(self, neighbours: bool) -> tuple[slice, slice]:
        """The lower and the higher columns of all pairs."""
        start = self.q.shape[-1] - self.rotated if self.last else 0
        half, end = self.rotated // 2, start + self.rotated
        if neighbours:
            return slice(start, end, 2), slice(start + 1, end, 2)
        return slice(start, start + half), slice(start + half, end)

    def dtype(self, x: Tensor) -> torch.dtype:
        """The dtype of x's result."""
        return torch.promote_types(x.dtype, self.cos.dtype) if self.promote else x.dtype


def _fit(q: Tensor, k: Tensor, heads: int) -> bool:
    """Whether two tensors have the same shape but for dim `heads`."""
    shapes = [[*t.shape[:heads], *t.shape[heads + 1 :]] for t in (q, k)]
    return shapes[0] == shapes[1]


def _rotary_pass(*arguments: object) -> tuple[Tensor, Tensor]:
    call = Rotation(*arguments)  # type: ignore[arg-type]
    if runs_kernel(call.q, call.k, call.cos, call.sin):
        return _kernel(call)
    return _reference(call, call.q), absent(call.q) if call.k is None else _reference(call, call.k)


def _rotary_pass_fake(*arguments: object) -> tuple[Tensor, Tensor]:
    call = Rotation(*arguments)  # type: ignore[arg-type]
    q, k = call.q, call.k
    return _empty(call, q), absent(q) if k is None else _empty(call, k)


def _empty(call: Rotation, x: Tensor) -> Tensor:
    """An empty result for x. Heads and tokens lie in memory in the order that they have in x, so
    that joining the heads after attention is a view if it was one before.
    """
    swapped = x.stride(1) < x.stride(2)
    out = x.new_empty(x.transpose(1, 2).shape if swapped else x.shape, dtype=call.dtype(x))
    return out.transpose(1, 2) if swapped else out


def _table(call: Rotation, table: Tensor, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """The entries of `table` (cos or sin) for the lower and for the higher column of each pair,
    each (B or 1, T, 1, R/2) in the dtype `wide`.
    """
    rows = (table if call.positions is None else table[call.positions]).to(wide).unsqueeze(2)
    half = call.rotated // 2
    if rows.shape[-1] == half:
        return rows, rows
    if call.interleaved:
        return rows[..., ::2], rows[..., 1::2]
    return rows[..., :half], rows[..., half:]


def _reference(call: Rotation, x: Tensor) -> Tensor:
    wide = accumulation_dtype(x, call.cos, call.sin)
    out = _empty(call, x).copy_(x)
    (source, *_), (target, *_) = call.axes(x), call.axes(out)
    (c_low, c_high), (s_low, s_high) = (_table(call, t, wide) for t in (call.cos, call.sin))
    if call.backward:
        s_low, s_high = -s_high, -s_low
    (lower, higher), (to_lower, to_higher) = map(call.pairs, call.neighbours())
    a, b = source[..., lower].to(wide), source[..., higher].to(wide)
    target[..., to_lower] = (a * c_low - b * s_low).to(out.dtype)
    target[..., to_higher] = (b * c_high + a * s_high).to(out.dtype)
    return out


def _kernel(call: Rotation) -> tuple[Tensor, Tensor]:
    from autopar_kernels.rotary_kernels import rotary_kernel

    q, k = call.q, call.k
    out, k_out = _rotary_pass_fake(*(getattr(call, name) for name in Rotation.__slots__))
    view, batch, tokens, heads = call.axes(q)
    k_view, *_, k_heads = call.axes(q if k is None else k)
    strides = [call.axes(t)[0].stride() for t in (q, out)]
    strides += [t.stride() for t in (k_view, call.axes(out if k is None else k_out)[0])]
    positions, cos, sin = call.positions, call.cos, call.sin
    if positions is None:
        cos, sin = (t.expand(batch, tokens, t.shape[-1]) for t in (cos, sin))
        # one set of strides serves both
        sin = sin if sin.stride() == cos.stride() else sin.contiguous().clone()
        cos = cos if sin.stride() == cos.stride() else cos.contiguous().clone()
        table_strides = cos.stride()
    else:
        cos, sin, positions = cos.contiguous(), sin.contiguous(), positions.contiguous()
        table_strides = (0, *cos.stride())
    half = power_of_2(call.rotated // 2)
    block = max(1, min(power_of_2(max(heads, k_heads)), 2048 // half))
    rest = q.shape[-1] - call.rotated
    launch(
        rotary_kernel,
        (batch * tokens, divide_up(max(heads, k_heads), block)),
        (
            *(view, None if k is None else k_view, out, None if k is None else k_out),
            *(cos, sin, positions, tokens, heads, k_heads, tuple(strides), table_strides),
        ),
        DIM=q.shape[-1],
        ROT=call.rotated,
        FIRST=rest if call.last else 0,
        INTERLEAVED=call.interleaved,
        READ=call.neighbours()[0],
        WRITTEN=call.neighbours()[1],
        SHARED=cos.shape[-1] != call.rotated,
        BACKWARD=call.backward,
        HALF=half,
        HEADS=block,
        PASS=power_of_2(rest) if rest else 0,
    )
    return out, k_out


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor | None,
        attributes: tuple[int, bool, bool, bool, bool, bool],
    ) -> Any:
        ctx.save_for_backward(cos, sin, positions)
        ctx.attributes = attributes
        ctx.dtypes = (q.dtype, None if k is None else k.dtype)
        out, k_out = _OPS.rotary_pass(q, k, cos, sin, positions, *attributes, False)
        return out if k is None else (out, k_out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, k_grad: Tensor | None = None) -> Any:
        cos, sin, positions = ctx.saved_tensors
        needs_q, needs_k = ctx.needs_input_grad[:2]
        first, second = (grad if needs_q else k_grad), (k_grad if needs_q and needs_k else None)
        back = _OPS.rotary_pass(
            first, second, cos, sin, positions, *ctx.attributes[:4], False, ctx.attributes[5], True
        )
        dq = back[0].to(ctx.dtypes[0]) if needs_q else None
        dk = back[1 if needs_q else 0].to(ctx.dtypes[1]) if needs_k else None
        return dq, dk, None, None, None, None


def _rotate(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    rotated: int | None,
    *flags: bool,
) -> Any:
    if cos.requires_grad or sin.requires_grad:
        raise ValueError("rotary tables are constants: cos and sin must not require a gradient")
    columns = q.shape[-1] if rotated is None else rotated
    return _Rotary.apply(q, k, cos, sin, positions, (columns, *flags))


def rotary(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    rotated: int | None = None,
    last: bool = False,
    interleaved: bool = False,
    heads_last: bool = False,
    promote: bool = False,
    parted: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rotated queries and keys, of the shapes of q and k; differentiable in both.

    Args:
        q: (B, H, T, D), or (B, T, H, D) if `heads_last`; any strides.
        k: the same with its own number of heads.
        cos: (B or 1, T, C), or (P, C) with positions; C is the number R of rotated columns, or R/2 where pairs share an angle.
        sin: as cos.
        positions: (B, T) int64, the table's row of each token; or None.
        rotated: R, even; all D columns by default.
        last: whether the last R columns rotate, else the first.
        interleaved: whether pairs are neighbours, else R/2 columns apart.
        heads_last: the order of heads and tokens.
        promote: whether the results have the promoted dtype of x and the tables, else that of x.
        parted: whether neighbours are written R/2 columns apart, as MLA models do.

    Raises:
        ValueError: a shape does not fit, a table needs a gradient, or `parted` is set without `interleaved`.
    """
    flags = (last, interleaved, heads_last, promote, parted)
    out, k_out = _rotate(q, k, cos, sin, positions, rotated, *flags)
    return out, k_out


def rotary_single(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    rotated: int | None = None,
    last: bool = False,
    interleaved: bool = False,
    heads_last: bool = False,
    promote: bool = False,
    parted: bool = False,
) -> Tensor:
    """`rotary` of one tensor x, without keys; the other arguments are the same."""
    flags = (last, interleaved, heads_last, promote, parted)
    out: Tensor = _rotate(x, None, cos, sin, positions, rotated, *flags)
    return out


_TABLES = "Tensor cos, Tensor sin, Tensor? positions=None, int? rotated=None"
_FLAGS = "bool last=False, bool interleaved=False, bool heads_last=False, bool promote=False, "
_FLAGS += "bool parted=False"
register_pass(
    "rotary_pass(Tensor q, Tensor? k, Tensor cos, Tensor sin, Tensor? positions, int rotated, bool last, "
    "bool interleaved, bool heads_last, bool promote, bool parted, bool backward) -> (Tensor, Tensor)",
    _rotary_pass,
    _rotary_pass_fake,
)
register_composite(f"rotary(Tensor q, Tensor k, {_TABLES}, {_FLAGS}) -> (Tensor, Tensor)", rotary)
register_composite(f"rotary_single(Tensor x, {_TABLES}, {_FLAGS}) -> Tensor", rotary_single)
