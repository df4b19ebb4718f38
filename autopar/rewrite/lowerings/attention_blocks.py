"""Attention of some queries over some keys (a block), and merging of results over several sets of
keys.

A block's result is exact attention over its own keys, with the log-sum-exp of its scores. Two such
results can be merged into the result over both sets of keys (Rabe and Staats 2021,
arXiv:2112.05682, section 2; Dao et al. 2022, arXiv:2205.14135, section 3.1). In backward, the
probabilities of a block are exp(scores - lse), with the log-sum-exp over *all* keys. The gradient
of each block can therefore be computed separately.

Shape letters: b batch, hq query heads, hkv key heads (hkv divides hq), s queries, t keys, d head
dim, dv value dim.
"""

from __future__ import annotations

from typing import NamedTuple

import autopar_kernels.partial_attention  # noqa: F401 (registers the merge)
import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention

from autopar.ops.aten import aten

_EFFICIENT_LSE_MULTIPLE = 32
"""ATen's memory-efficient kernel pads the log-sum-exp with inf to a multiple of this many queries
(kAlignLSE in mem_eff_attention/kernel_forward.h).
"""


class Operands(NamedTuple):
    """The operands of attention of some queries over some keys (a block): `query` (b, hq, s, d),
    `key` (b, hkv, t, d) and `value` (b, hkv, t, dv).

    `mask`, boolean or additive, has 4 dims and broadcasts to (b, hq, s, t). With `is_causal`, query
    i sees keys up to i (s == t, no mask). `scale=None` divides scores by the square root of d.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    is_causal: bool
    scale: float | None


def block_forward(operands: Operands) -> tuple[Tensor, Tensor]:
    """(attention (b, hq, s, dv), log-sum-exp of the scores (b, hq, s)) of one block.

    A query that sees no key has result 0, as in torch's attention, and log-sum-exp -inf.
    """
    query, key, value, mask, is_causal, scale = operands
    kernel = _kernel(operands)
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
    scores = _scores(operands)
    lse = scores.logsumexp(-1)
    probabilities = (scores - lse.masked_fill(lse.isneginf(), torch.inf).unsqueeze(-1)).exp()
    out = _per_key_head(probabilities, key) @ value.to(scores.dtype)
    return out.reshape(*query.shape[:3], value.shape[3]).to(query.dtype), lse


def block_backward(
    operands: Operands, grad: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value through one block.

    `out` (b, hq, s, dv), its gradient `grad` and `lse` (b, hq, s) are those merged over the keys of
    all blocks. `lse` is +inf for a query that sees no key at all; its probabilities are then zero.
    """
    query, key, value, mask, is_causal, scale = operands
    kernel = _kernel(operands)
    if kernel == "plain":
        return _plain_backward(operands, grad, out, lse)
    named = {"query": query, "out": out, "dropout_p": 0.0, "is_causal": is_causal, "scale": scale}
    if kernel == "flash_cpu":
        named |= {"key": key, "value": value, "attn_mask": _additive(mask, query.dtype)}
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out=grad, logsumexp=lse, **named
        )
    seed = torch.zeros((), dtype=torch.int64, device=query.device)  # of dropout; there is none
    named |= {"philox_seed": seed, "philox_offset": seed}
    if kernel == "flash":  # which assumes that the log-sum-exp is contiguous
        named |= {"key": key, "value": value, "cum_seq_q": None, "cum_seq_k": None}
        named |= {"max_q": query.shape[2], "max_k": key.shape[2]}
        return aten._scaled_dot_product_flash_attention_backward(
            grad_out=grad, logsumexp=lse.contiguous(), **named
        )
    named |= {"key": _repeat_heads(key, query), "value": _repeat_heads(value, query)}
    missing = -query.shape[2] % _EFFICIENT_LSE_MULTIPLE
    dquery, dkey, dvalue, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad_out_=grad,
        attn_bias=None,
        logsumexp=torch.nn.functional.pad(lse, (0, missing), value=torch.inf),
        grad_input_mask=[True, True, True, False],
        **named,
    )
    return dquery, _sum_heads(dkey, key), _sum_heads(dvalue, value)


def _plain_backward(
    operands: Operands, grad: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value, *_ = operands
    scores = _scores(operands)
    wide = scores.dtype
    probabilities = (scores - lse.unsqueeze(-1)).exp()
    grad, out = grad.to(wide), out.to(wide)
    grad_rows = _per_key_head(grad, key)
    dvalue = _per_key_head(probabilities, key).mT @ grad_rows
    dprobabilities = (grad_rows @ value.to(wide).mT).reshape(scores.shape)
    without_mean = dprobabilities - (grad * out).sum(-1, keepdim=True)
    dscores = _per_key_head(probabilities * without_mean * _scale(operands), key)
    dquery = (dscores @ key.to(wide)).reshape(query.shape)
    dkey = dscores.mT @ _per_key_head(query.to(wide), key)
    return dquery.to(query.dtype), dkey.to(key.dtype), dvalue.to(value.dtype)


def _kernel(operands: Operands) -> str:
    """The implementation that computes a block: 'flash_cpu', 'flash', 'efficient' (ATen's) or
    'plain' (matrix products). Forward and backward must use the same one, since they share the
    log-sum-exp.
    """
    query, key, value, mask, is_causal, _ = operands
    if query.device.type == "cpu":
        return "flash_cpu" if query.shape[3] == value.shape[3] else "plain"
    if query.device.type != "cuda" or mask is not None:
        return "plain"
    grouped = query.shape[1] != key.shape[1]
    tensors = query, key, value, None
    # other head dims are padded by scaled_dot_product_attention, not by the kernel
    if query.shape[3] % 8 == 0 and can_use_flash_attention(
        SDPAParams(*tensors, 0.0, is_causal, grouped)
    ):
        return "flash"
    key, value = (x[:, :1].expand(-1, query.shape[1], -1, -1) for x in (key, value))
    tensors = query, key, value, None
    efficient = can_use_efficient_attention(SDPAParams(*tensors, 0.0, is_causal, False))
    return "efficient" if efficient else "plain"


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The mask as numbers to add to scores of queries with `dtype`; None for None. A boolean mask
    is converted to `dtype`, an additive one to the accumulation dtype.
    """
    if mask is None or mask.dtype != torch.bool:
        return mask if mask is None else mask.to(sums_dtype(dtype))
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -torch.inf)


def _scale(operands: Operands) -> float:
    return operands.query.shape[3] ** -0.5 if operands.scale is None else operands.scale


def _scores(operands: Operands) -> Tensor:
    """Scaled and masked scores (b, hq, s, t) of a block, in fp32 or fp64. Hidden ones are -inf."""
    query, key, _, mask, is_causal, _ = operands
    wide = sums_dtype(query.dtype)
    products = _per_key_head(query.to(wide), key) @ key.to(wide).mT
    scores = products.reshape(*query.shape[:3], key.shape[2]) * _scale(operands)
    if (bias := _additive(mask, wide)) is not None:
        scores = scores + bias
    if is_causal:
        future = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    return scores


def sums_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums over keys are accumulated: fp64 for fp64, otherwise fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _per_key_head(x: Tensor, key: Tensor) -> Tensor:
    """x (b, hq, s, n) as (b, hkv, hq / hkv * s, n). The queries of all heads that read one key head
    become rows of one matrix, so grouped heads need no repeated keys.
    """
    return x.reshape(x.shape[0], key.shape[1], x.shape[1] // key.shape[1] * x.shape[2], x.shape[3])


def _repeat_heads(x: Tensor, query: Tensor) -> Tensor:
    return x.repeat_interleave(query.shape[1] // x.shape[1], 1)


def _sum_heads(grad: Tensor, x: Tensor) -> Tensor:
    return grad.unflatten(1, (x.shape[1], -1)).sum(2)


class OnlineSoftmax:
    """The attention of some queries, accumulated over blocks of keys, which may be added in any
    order.
    """

    def __init__(self, query: Tensor, value_dim: int) -> None:
        self._dtype = query.dtype
        wide = sums_dtype(query.dtype)
        self._out = query.new_zeros((*query.shape[:3], value_dim), dtype=wide)
        self._lse = query.new_full(query.shape[:3], -torch.inf, dtype=wide)

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Merge in the attention `out` of the queries `rows` over keys that were not added yet, and
        the log-sum-exp `lse` of their scores.
        """
        before = self._out[:, :, rows], self._lse[:, :, rows]
        merged = torch.ops.autopar.merge_attention(*before, out, lse)
        if rows == slice(0, self._lse.shape[2]):
            self._out, self._lse = merged
        else:
            self._out[:, :, rows], self._lse[:, :, rows] = merged

    def result(self) -> tuple[Tensor, Tensor]:
        """(attention in the queries' dtype, log-sum-exp of the scores), over all keys that were
        added. `block_backward` takes both. The log-sum-exp is +inf where a query saw no key.
        """
        return self._out.to(self._dtype), self._lse.masked_fill(self._lse.isneginf(), torch.inf)
