"""Rules of losses: element-wise over a prediction and a target, or with one class index per token.

A sum over sharded elements is partial. `trace/normalize.py` replaces a mean over the batch by a sum
divided by a count. Any other mean is small and stays whole.
"""

from __future__ import annotations

from torch.fx import Node

from autopar.ops.dims import Call, Letters, OpDims
from autopar.ops.kinds import OpRule, same, unsharded, words

_MEAN = 1
_SUM = 2


def _elementwise_loss(call: Call) -> OpDims:
    reduction = call.arg("reduction", _MEAN)
    if reduction == _MEAN:
        return unsharded(call)
    rank = max(t.dim() for t in call.tensors)
    sizes: dict = {f"d{k}": 1 for k in range(rank)}
    for t in call.tensors:
        for k, size in enumerate(t.shape, start=rank - t.dim()):
            sizes[f"d{k}"] = size if same(sizes[f"d{k}"], 1) else sizes[f"d{k}"]
    letters = tuple(sizes)
    inputs = tuple(
        tuple(
            letters[k] if same(size, sizes[letters[k]]) else f"!{k}"
            for k, size in enumerate(t.shape, start=rank - t.dim())
        )
        for t in call.tensors
    )
    summed = reduction == _SUM
    return OpDims(
        inputs, (() if summed else letters,), sizes, frozenset(letters) if summed else frozenset()
    )


def _class_loss(call: Call) -> OpDims:
    """How nll_loss may be sharded: by tokens, if it is summed or unreduced. Its operands are
    log-probabilities (tokens, classes, ..) and indices (tokens, ..). Classes stay whole, as do
    operands of other dims.
    """
    source, target, *weight = call.tensors
    reduction = call.arg("reduction", _MEAN)
    if reduction == _MEAN or source.dim() < 2 or target.dim() != source.dim() - 1:
        return unsharded(call)
    tokens = tuple(f"d{k}" for k in range(target.dim()))
    summed = reduction == _SUM
    return OpDims(
        ((tokens[0], "!c", *tokens[1:]), tokens, *(("!c",) for _ in weight)),
        (() if summed else tokens,),
        dict(zip(tokens, target.shape, strict=True)),
        frozenset(tokens) if summed else frozenset(),
        linear=(frozenset({0}),),
    )


def _row_loss(call: Call) -> OpDims:
    """How a loss with one result per row may be sharded: by rows, if it is not reduced. Rows are
    dim 0 of every tensor that has that many, except `weight`.
    """
    if call.arg("reduction", _MEAN) != 0 or call.results[0].dim() != 1:
        return unsharded(call)
    rows, weight = call.results[0].shape[0], call.arg("weight")

    def letters(operand: Node) -> Letters:
        shape = operand.meta["val"].shape
        return tuple(
            "n" if k == 0 and operand is not weight and same(size, rows) else f"!{k}"
            for k, size in enumerate(shape)
        )

    inputs = tuple(map(letters, call.operands))
    return OpDims(inputs, (("n",),), {"n": rows})


CRITERIA: dict[str, OpRule] = {
    **dict.fromkeys(
        words("""
        mse_loss l1_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div
        poisson_nll_loss margin_ranking_loss hinge_embedding_loss
        """),
        _elementwise_loss,
    ),
    **dict.fromkeys(("nll_loss", "nll_loss2d", "nll_loss_nd"), _class_loss),
    **dict.fromkeys(
        (
            "multi_margin_loss",
            "multilabel_margin_loss",
            "triplet_margin_loss",
            "cosine_embedding_loss",
        ),
        _row_loss,
    ),
}
