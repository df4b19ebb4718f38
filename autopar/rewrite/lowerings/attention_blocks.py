"""Attention of some queries over some keys, and how the results over several sets of keys are merged.

A block's result is exact attention over its own keys together with the log-sum-exp of its scores; two such results merge into that over
both sets of keys (Rabe and Staats 2021, arXiv:2112.05682, section 2; Dao et al. 2022, arXiv:2205.14135, section 3.1).  Backward, the
probabilities of a block are exp(scores - lse) with the log-sum-exp over *all* keys, so that every block's gradient is computed alone.

Shape letters: b batch, hq query heads, hkv key heads (hkv divides hq), s queries, t keys, d head dim, dv value dim.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention

aten = torch.ops.aten

_EFFICIENT_LSE_MULTIPLE = 32
"""ATen's memory-efficient kernel pads the log-sum-exp to this many queries (kAlignLSE in mem_eff_attention/kernel_forward.h), with inf."""


def block_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """(attention (b, hq, s, dv), log-sum-exp of the scores (b, hq, s)) of `query` (b, hq, s, d) over `key`, `value` (b, hkv, t, d | dv).

    `mask`, boolean or additive, broadcasts from 4 dims to (b, hq, s, t).  `is_causal` lets query i see the keys up to i (s == t, no mask).
    A query that sees no key has result 0, as in torch's attention, and log-sum-exp -inf.
    """
    kernel = _kernel(query, key, value, mask, is_causal)
    if kernel == "flash_cpu":
        bias = _additive(mask, query.dtype)
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, attn_mask=bias, scale=scale
        )
        if bias is not None:  # the kernel reports 0 for a query that sees no key
            lse = lse.masked_fill(bias.isneginf().all(-1), -torch.inf)
        return out, lse
    if kernel == "flash":
        return aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, is_causal, False, scale=scale
        )[:2]
    if kernel == "efficient":
        repeated = (_repeat_heads(key, query), _repeat_heads(value, query))
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(
            query, *repeated, None, True, 0.0, is_causal, scale=scale
        )
        return out, lse.narrow(2, 0, query.shape[2])
    scores = _scores(query, key, mask, is_causal, scale)
    lse = scores.logsumexp(-1)
    probabilities = (scores - lse.masked_fill(lse.isneginf(), torch.inf).unsqueeze(-1)).exp()
    out = _per_key_head(probabilities, key) @ value.to(scores.dtype)
    return out.reshape(*query.shape[:3], value.shape[3]).to(query.dtype), lse


def block_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value through one block.

    `out` (b, hq, s, dv) and `lse` (b, hq, s) are the merged ones, over the keys of all blocks, as is `grad`, the gradient of `out`.  `lse`
    is +inf for a query that sees no key at all, which makes its probabilities zero.
    """
    kernel = _kernel(query, key, value, mask, is_causal)
    if kernel == "flash_cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad,
            query,
            key,
            value,
            out,
            lse,
            0.0,
            is_causal,
            attn_mask=_additive(mask, query.dtype),
            scale=scale,
        )
    if kernel in ("flash", "efficient"):
        seed = torch.zeros((), dtype=torch.int64, device=query.device)  # of dropout; there is none
        if kernel == "flash":  # which assumes that the log-sum-exp is contiguous
            operands, lengths = (
                (grad, query, key, value, out, lse.contiguous()),
                (None, None, query.shape[2], key.shape[2]),
            )
            return aten._scaled_dot_product_flash_attention_backward(
                *operands, *lengths, 0.0, is_causal, seed, seed, scale=scale
            )
        padded = torch.nn.functional.pad(
            lse, (0, -query.shape[2] % _EFFICIENT_LSE_MULTIPLE), value=torch.inf
        )
        repeated = (_repeat_heads(key, query), _repeat_heads(value, query))
        dquery, dkey, dvalue, _ = aten._scaled_dot_product_efficient_attention_backward(
            grad,
            query,
            *repeated,
            None,
            out,
            padded,
            seed,
            seed,
            0.0,
            [True, True, True, False],
            is_causal,
            scale=scale,
        )
        return dquery, _sum_heads(dkey, key), _sum_heads(dvalue, value)
    scores = _scores(query, key, mask, is_causal, scale)
    wide = scores.dtype
    probabilities = (scores - lse.unsqueeze(-1)).exp()
    grad, out = grad.to(wide), out.to(wide)
    grad_rows = _per_key_head(grad, key)
    dvalue = _per_key_head(probabilities, key).mT @ grad_rows
    dprobabilities = (grad_rows @ value.to(wide).mT).reshape(scores.shape)
    dscores = (
        probabilities * (dprobabilities - (grad * out).sum(-1, keepdim=True)) * _scale(query, scale)
    )
    dscores = _per_key_head(dscores, key)
    dquery = (dscores @ key.to(wide)).reshape(query.shape)
    dkey = dscores.mT @ _per_key_head(query.to(wide), key)
    return dquery.to(query.dtype), dkey.to(key.dtype), dvalue.to(value.dtype)


def _kernel(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool) -> str:
    """Which implementation takes this block; the same one forward and backward, since they share the log-sum-exp."""
    if query.device.type == "cpu":
        return "flash_cpu" if query.shape[3] == value.shape[3] else "plain"
    if query.device.type != "cuda" or mask is not None:
        return "plain"
    grouped = query.shape[1] != key.shape[1]
    if query.shape[3] % 8 == 0 and can_use_flash_attention(
        SDPAParams(query, key, value, None, 0.0, is_causal, grouped)
    ):
        return (
            "flash"  # other head dims are padded by scaled_dot_product_attention, not by the kernel
        )
    as_many_heads = (x[:, :1].expand(-1, query.shape[1], -1, -1) for x in (key, value))
    return (
        "efficient"
        if can_use_efficient_attention(
            SDPAParams(query, *as_many_heads, None, 0.0, is_causal, False)
        )
        else "plain"
    )


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The mask as numbers to add to scores of queries of `dtype`; booleans need no precision, numbers that of the sum."""
    if mask is None or mask.dtype != torch.bool:
        return mask if mask is None else mask.to(accumulation_dtype(dtype))
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -torch.inf)


def _scale(query: Tensor, scale: float | None) -> float:
    return query.shape[3] ** -0.5 if scale is None else scale


def _scores(
    query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> Tensor:
    """Scaled and masked scores (b, hq, s, t), in fp32 or fp64."""
    wide = accumulation_dtype(query.dtype)
    scores = (_per_key_head(query.to(wide), key) @ key.to(wide).mT).reshape(
        *query.shape[:3], key.shape[2]
    ) * _scale(query, scale)
    if mask is not None:
        scores = scores + _additive(mask, wide)
    if is_causal:
        future = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    return scores


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _per_key_head(x: Tensor, key: Tensor) -> Tensor:
    """x (b, hq, s, n) as (b, hkv, hq / hkv * s, n): the queries of all heads that read one key head are rows of one matrix, so that
    grouped heads need no repeated keys."""
    return x.reshape(x.shape[0], key.shape[1], x.shape[1] // key.shape[1] * x.shape[2], x.shape[3])


def _repeat_heads(x: Tensor, query: Tensor) -> Tensor:
    return x.repeat_interleave(query.shape[1] // x.shape[1], 1)


def _sum_heads(grad: Tensor, x: Tensor) -> Tensor:
    return grad.unflatten(1, (x.shape[1], -1)).sum(2)


class OnlineSoftmax:
    """Attention over the keys seen so far; blocks are added in any order."""

    def __init__(self, query: Tensor, value_dim: int) -> None:
        self._dtype = query.dtype
        wide = accumulation_dtype(query.dtype)
        self._out = query.new_zeros((*query.shape[:3], value_dim), dtype=wide)
        self._lse = query.new_full(query.shape[:3], -torch.inf, dtype=wide)

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Attention of the queries `rows` over keys that they have not seen."""
        old = self._lse[:, :, rows]
        merged = torch.logaddexp(old, lse)
        # no key seen yet: both weights are exp(-inf), not exp(nan)
        reference = merged.masked_fill(merged.isneginf(), torch.inf)
        before, now = ((part - reference).exp().unsqueeze(-1) for part in (old, lse))
        self._out[:, :, rows] = self._out[:, :, rows] * before + out * now
        self._lse[:, :, rows] = merged

    def result(self) -> tuple[Tensor, Tensor]:
        """(out, lse) as `block_backward` takes them: lse is +inf where no key was seen."""
        return self._out.to(self._dtype), self._lse.masked_fill(self._lse.isneginf(), torch.inf)
