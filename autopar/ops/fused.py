"""Rules of the ops of `autopar_kernels` that stand for a subgraph (`trace/fusion/`).

Rows may be sharded; weights are then replicated.  The dim that a norm reduces may not be sharded, nor may it in the subgraph: the rule of
`mean` keeps the dims that it averages whole.
"""

from __future__ import annotations

from typing import Any

import autopar_kernels.bias_activations
import autopar_kernels.glu
import autopar_kernels.layer_norms
import autopar_kernels.linear_losses
import autopar_kernels.losses
import autopar_kernels.norms
import autopar_kernels.rotary
import autopar_kernels.softmax  # noqa: F401 (all register ops)

from autopar.ir.calls import argument_names
from autopar.ops.dims import Call, OpDims, is_symbolic
from autopar.ops.kinds import OpRule, same


def _present(call: Call, *names: str) -> list[str]:
    """Those of `names` that are arguments of the call and not None or false, in the order of its
    schema.
    """
    return [name for name in argument_names(call.node) if name in names and call.arg(name)]


def _norm(call: Call) -> OpDims:
    """How a norm over the last dim may be sharded: along all other dims.  x, residual and gate have
    the dims of the result, weight and bias the last one.
    """
    x = call.tensors[0]
    letters = (*(f"d{k}" for k in range(x.dim() - 1)), "!n")
    given = _present(call, "x", "residual", "gate", "weight", "bias")
    inputs = tuple(("!n",) if name in ("weight", "bias") else letters for name in given)
    sizes = dict(zip(letters, x.shape, strict=True))
    return OpDims(inputs, (letters,) * len(call.results), sizes)


def _glu(call: Call) -> OpDims:
    """How a gated activation may be sharded: along every dim, and as partial sums in `up` where
    nothing is added to it or clamped.

    If gate and up are halves of one projection, its last dim is sharded in two sections;
    interleaved halves are sharded evenly.
    """
    x, out = call.tensors[0], call.results[0]
    letters = tuple(f"d{k}" for k in range(out.dim()))
    sizes = dict(zip(letters, out.shape, strict=True))
    if call.arg("up") is not None:
        plain = not call.arg("shift") and call.arg("limit") is None
        linear = (frozenset({1}),) if plain else ()
        return OpDims((letters, letters), (letters,), sizes, linear=linear)
    width = int(out.shape[-1])
    last, even = f"{letters[-1]}|{width}:{width}", frozenset[str]()
    if call.arg("layout") == "interleaved":
        last, even = letters[-1], frozenset({letters[-1]})
    return OpDims(((*letters[: x.dim() - 1], last),), (letters,), sizes, even=even)


def _bias_activation(call: Call) -> OpDims:
    """How an activation after a bias may be sharded: along every dim, the bias along the last one."""
    x = call.tensors[0]
    letters = tuple(f"d{k}" for k in range(x.dim()))
    return OpDims((letters, letters[-1:]), (letters,), dict(zip(letters, x.shape, strict=True)))


def _rotary(call: Call) -> OpDims:
    """How rotary positions may be applied in shards: by batch, heads and positions, but not along
    the rotated dim. Linear in x.
    """
    x = call.tensors[0].shape
    letters = ("b", "t", "h", "!d") if call.arg("heads_last") else ("b", "h", "t", "!d")
    batch = "b" if same(call.tensors[1].shape[0], x[0]) else "!b"
    table = (batch, "t", "!c") if call.arg("positions") is None else ("!p", "!c")
    terms = {"x": letters, "cos": table, "sin": table, "positions": ("b", "t")}
    return OpDims(
        tuple(terms[name] for name in _present(call, *terms)),
        (letters,),
        dict(zip(letters, x, strict=True)),
        linear=(frozenset({0}),),
    )


def _softmax(call: Call) -> OpDims:
    """How the fused softmax may be sharded: along all dims of the scores but the last. A mask is
    sharded with them, except along dims that it broadcasts.
    """
    scores = call.tensors[0].shape
    letters = (*(f"d{k}" for k in range(len(scores) - 1)), "!k")
    terms = {"scores": letters}
    if call.arg("mask") is not None:
        mask = call.tensors[1].shape
        own = zip(mask, letters[-len(mask) :], scores[-len(mask) :], strict=True)
        terms["mask"] = tuple(
            letter if same(size, of) else f"!m{k}" for k, (size, letter, of) in enumerate(own)
        )
    return OpDims(
        tuple(terms[name] for name in _present(call, *terms)),
        (letters,),
        dict(zip(letters, scores, strict=True)),
    )


def _cross_entropy(call: Call) -> OpDims:
    """How the fused cross-entropy may be sharded unless it is a mean: by tokens, and by classes,
    with statistics that ranks exchange (`rewrite/lowerings/vocabulary_parallel.py`).
    """
    logits, reduction = call.tensors[0], call.arg("reduction")
    free = reduction != "mean"
    tokens = tuple(f"d{k}" if free else f"!{k}" for k in range(logits.dim() - 1))
    classes = "v" if free and not is_symbolic(logits.shape[-1]) else "!v"
    terms = {"logits": (*tokens, classes), "target": tokens, "weight": ("!w",)}
    special = {"v": "vocab_parallel_statistics"} if classes == "v" else {}
    return OpDims(
        tuple(terms[name] for name in _present(call, *terms)),
        (tokens if reduction == "none" else (),),
        dict(zip(terms["logits"], logits.shape, strict=True)),
        frozenset(tokens) if reduction == "sum" else frozenset(),
        contiguous=frozenset(special),
        special=special,
        replicated_result=frozenset(special),
    )


def _linear_cross_entropy(call: Call) -> OpDims:
    """How a head's product with its cross-entropy may be sharded unless it is a mean: by tokens, and
    by classes. Over classes ranks exchange statistics, and hidden's gradient is a partial sum.

    The dim that the product sums stays whole: partial logits would have to be added up first.
    """
    hidden, weight, target = call.tensors[:3]
    reduction = call.arg("reduction")
    free = reduction != "mean"
    tokens = tuple(f"d{k}" if free else f"!{k}" for k in range(target.dim()))
    classes = "v" if free and not is_symbolic(weight.shape[0]) else "!v"
    terms = {"hidden": (*tokens, "!h"), "weight": (classes, "!h"), "target": tokens}
    terms["class_weight"] = ("!w",)
    special = {"v": "vocab_parallel_linear_loss"} if classes == "v" else {}
    flops: Any = 2 * weight.numel()
    for size in target.shape:
        flops = flops * size
    return OpDims(
        tuple(terms[name] for name in _present(call, *terms)),
        (tokens if reduction == "none" else (),),
        dict(zip(terms["hidden"], hidden.shape, strict=True)) | {classes: weight.shape[0]},
        frozenset(tokens) if reduction == "sum" else frozenset(),
        contiguous=frozenset(special),
        special=special,
        replicated_result=frozenset(special),
        contraction=True,
        flops=flops,
    )


FUSED: dict[str, OpRule] = {
    "autopar::rms_norm": _norm,
    "autopar::add_rms_norm": _norm,
    "autopar::layer_norm": _norm,
    "autopar::add_layer_norm": _norm,
    "autopar::cross_entropy": _cross_entropy,
    "autopar::linear_cross_entropy": _linear_cross_entropy,
    "autopar::bias_activation": _bias_activation,
    "autopar::glu": _glu,
    "autopar::rotary_single": _rotary,
    "autopar::softmax": _softmax,
}
