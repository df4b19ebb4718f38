"""The op rules: a table with one line per op.

A rule maps a `Call` to an `OpDims`. To add an op, add a line to the table. A user's own op uses
`register_rule`. Ops without a rule run replicated, which is always correct, and `explain` lists
them.
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd
from typing import Any

import torch

from autopar.errors import AutoparError
from autopar.ir.calls import op_name
from autopar.ops.convolution import CONVOLUTIONS
from autopar.ops.criteria import CRITERIA
from autopar.ops.custom_functions import custom_rule
from autopar.ops.dims import Call, JointSharding, OpDims, is_symbolic
from autopar.ops.elementwise import ELEMENTWISE
from autopar.ops.equations import equation_rule
from autopar.ops.experts import ROUTED_EXPERTS, routed_experts_rule
from autopar.ops.fused import FUSED
from autopar.ops.kinds import OpRule, keep_dims, pointwise, same, unsharded, words
from autopar.ops.lookup import LOOKUPS
from autopar.ops.products import PRODUCTS, batch_letters
from autopar.ops.reductions import REDUCTIONS, fourier
from autopar.ops.views import Factors

_RULES: dict[str, OpRule] = {}


def register_rule(target: object, rule: str | OpRule) -> None:
    """Add the rule of an op, so that autopar can shard it. It replaces an earlier rule of the op.

    Raises AutoparError if there is no such op, or if the equation is invalid.

    Args:
        target: the op (the result of `torch.library.custom_op`, or `torch.ops.mylib.scale`) or its
            name, `"mylib::scale"`.
        rule: an equation (`"b.. i, o i -> b.. o"`, see `ops/equations.py`), or a function from
            `Call` to `OpDims`.
    """
    name = _op_name(target)
    _RULES[name] = equation_rule(name, rule) if isinstance(rule, str) else rule


def _op_name(target: object) -> str:
    target = getattr(target, "_opoverload", target)  # what torch.library.custom_op returns
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name
    name = (
        target._qualified_op_name
        if isinstance(target, torch._ops.OpOverloadPacket)
        else str(target)
    )
    namespace, colons, op = name.partition("::")
    if not colons:
        raise AutoparError(
            f"{name!r} is not the name of an op: it has a namespace, as in 'mylib::scale'"
        )
    if not hasattr(getattr(torch.ops, namespace), op):
        raise AutoparError(
            f"torch has no op {name!r}: define it with torch.library.custom_op, or import what defines it, before its rule"
        )
    return name


def rule_for(node: torch.fx.Node) -> OpRule | None:
    """The rule (a function from a `Call` to its `OpDims`) for the op that a node calls. None if it
    has none.
    """
    return _RULES.get(op_name(node))


def op_dims(node: torch.fx.Node) -> OpDims | None:
    """The letters of the dims of a call, which say how it may be sharded, by the op's rule. None if
    the op has no rule.
    """
    rule = rule_for(node)
    return rule(Call(node)) if rule is not None else None


def known_ops() -> tuple[str, ...]:
    """Schema names of all ops with a rule, such as 'aten::add'; those of `register_rule` included."""
    return tuple(_RULES)


def _permutation(order: Callable[[Call], list[int]]) -> OpRule:
    def rule(call: Call) -> OpDims:
        source = call.tensors[0]
        letters = tuple(f"d{k}" for k in range(source.dim()))
        return OpDims(
            (letters,),
            (tuple(letters[k] for k in order(call)),),
            dict(zip(letters, source.shape, strict=True)),
            linear=(frozenset({0}),),
            movement_free=True,
        )

    return rule


def _transpose_order(call: Call) -> list[int]:
    rank = call.tensors[0].dim()
    order = list(range(rank))
    if rank:
        a, b = call.dim("dim0"), call.dim("dim1")
        order[a], order[b] = order[b], order[a]
    return order


def _reshape(call: Call) -> OpDims:
    found = Factors(tuple(call.tensors[0].shape), tuple(call.results[0].shape))
    return OpDims(
        (found.left,),
        (found.right,),
        found.sizes,
        even=frozenset(found.even),
        contiguous=frozenset(found.contiguous),
        linear=(frozenset({0}),),
        movement_free=True,
    )


def _expand(call: Call) -> OpDims:
    """How expand may be sharded: along all dims of the result. A dim that grows from 1 gets a
    letter in the result alone; sharding it makes the operand's gradient partial.
    """
    source, out = call.tensors[0].shape, call.results[0].shape
    letters = tuple(f"d{k}" for k in range(len(out)))
    offset = len(out) - len(source)
    inputs = tuple(
        letters[offset + k] if same(s, out[offset + k]) else f"!{k}" for k, s in enumerate(source)
    )
    sizes = dict(zip(letters, out, strict=True)) | {f"!{k}": 1 for k in range(len(source))}
    return OpDims((inputs,), (letters,), sizes, linear=(frozenset({0}),), movement_free=True)


def _slice(call: Call) -> OpDims:
    return keep_dims(lambda c: [c.dim(default=0)], linear=True, free=True)(call)


def _select(call: Call) -> OpDims:
    source, dim = call.tensors[0], call.dim(default=0)
    letters = tuple(f"!{k}" if k == dim else f"d{k}" for k in range(source.dim()))
    out = tuple(x for k, x in enumerate(letters) if k != dim)
    return OpDims(
        (letters,),
        (out,) * len(call.results),
        dict(zip(letters, source.shape, strict=True)),
        linear=(frozenset({0}),),
        movement_free=True,
    )


def _sections(sizes: list) -> tuple[str, str, int] | None:
    """(entry of the joined dim, letter of the dim in the parts, size of the letter) for a dim of
    parts of these sizes, as in split and cat. All parts are sharded alike.

    None if a size is symbolic or 0, or there is one part only.
    """
    if any(is_symbolic(size) for size in sizes) or not all(sizes) or len(sizes) < 2:
        return None
    return "x|" + ":".join(str(int(size)) for size in sizes), "x", gcd(*map(int, sizes))


def _split(call: Call) -> OpDims:
    """How split may be sharded: along all other dims, and along the split one if the whole is
    sharded in the parts' sections, evenly.
    """
    source, dim = call.tensors[0], call.dim(default=0)
    joined, part, size = _sections([t.shape[dim] for t in call.results]) or ("!x", "!r", 1)
    letters = [f"d{k}" for k in range(source.dim())]
    sizes = dict(zip(letters, source.shape, strict=True)) | {part: size}
    inner, outer = (
        tuple(entry if k == dim else x for k, x in enumerate(letters)) for entry in (joined, part)
    )
    return OpDims(
        (inner,),
        (outer,) * len(call.results),
        sizes,
        even=frozenset({part}),
        linear=(frozenset({0}),),
        movement_free=True,
    )


def _concatenate(call: Call) -> OpDims:
    """How cat may be sharded: along all other dims, and along the joined one if each operand is
    sharded evenly; the result is then sharded in sections. Not at all if operands differ in their
    number of dims, as with an empty one.
    """
    rank = call.tensors[0].dim()
    dim = call.dim(default=0)
    everything = frozenset(range(len(call.tensors)))
    if any(t.dim() != rank for t in call.tensors):  # torch.cat ignores empty 1-D operands
        fixed = tuple(f"!{k}" for k in range(rank))
        return OpDims(
            tuple(fixed[: t.dim()] for t in call.tensors), (fixed,), {}, linear=(everything,)
        )
    joined, part, size = _sections([t.shape[dim] for t in call.tensors]) or ("!x", "!p", 1)
    letters = [f"d{k}" for k in range(rank)]
    sizes = dict(zip(letters, call.tensors[0].shape, strict=True)) | {part: size}
    outer, inner = (
        tuple(entry if k == dim else x for k, x in enumerate(letters)) for entry in (joined, part)
    )
    return OpDims(
        (inner,) * len(call.tensors), (outer,), sizes, even=frozenset({part}), linear=(everything,)
    )


def _stack(call: Call) -> OpDims:
    rank = call.tensors[0].dim()
    letters = tuple(f"d{k}" for k in range(rank))
    dim = call.dim(default=0, rank=rank + 1)
    out = (*letters[:dim], "!s", *letters[dim:])
    return OpDims(
        (letters,) * len(call.tensors),
        (out,),
        dict(zip(letters, call.tensors[0].shape, strict=True)),
        linear=(frozenset(range(len(call.tensors))),),
    )


def _matmul(call: Call) -> OpDims:
    a, b = call.tensors
    if a.dim() < 2 or b.dim() < 2:
        left = ("k",) if a.dim() < 2 else (*(f"d{k}" for k in range(a.dim() - 1)), "k")
        right = ("k",) if b.dim() < 2 else (*(f"e{k}" for k in range(b.dim() - 2)), "k", "n")
        sizes = dict(zip((*left, *right), (*a.shape, *b.shape), strict=True))
        out = tuple(x for x in (*left, *right) if x != "k")
        return OpDims(
            (left, right),
            (out,),
            sizes,
            frozenset("k"),
            linear=(frozenset({0}), frozenset({1})),
            contraction=True,
        )
    product = call.results[0]
    batch = batch_letters(product)
    sizes = dict(zip(batch, product.shape[:-2], strict=True)) | {
        "m": a.shape[-2],
        "k": a.shape[-1],
        "n": b.shape[-1],
        "!b": 1,
    }
    return OpDims(
        ((*batch_letters(product, a), "m", "k"), (*batch_letters(product, b), "k", "n")),
        ((*batch, "m", "n"),),
        sizes,
        frozenset("k"),
        linear=(frozenset({0}), frozenset({1})),
        contraction=True,
    )


def _attention(call: Call) -> OpDims:
    """How attention may be sharded: by batch, heads and query positions; keys and channels stay
    whole. With grouped heads, the letter of the key heads covers whole groups. Positions are whole
    with dropout, with other than 4 dims, or if causal over another number of keys.

    Sharding query positions (`s`, keys whole) and the joint strategies 'ring' and 'ulysses' are
    context parallelism, see `rewrite/lowerings/context_attention.py`. The joint strategy
    'grouped_heads' shards query heads alone, for more ranks than key heads.
    """
    q, k = call.tensors[:2]
    lead = tuple(f"b{i}" for i in range(q.dim() - 3))
    plain = (
        q.dim() == 4
        and not call.arg("dropout_p", 0.0)
        and not (call.arg("is_causal", False) and not same(q.shape[-2], k.shape[-2]))
    )
    # attention over the batch, or with it as heads
    plain = plain and not any(is_symbolic(size) for t in (q, k) for size in t.shape[1:])
    position = "s" if plain else "!s"
    sizes = dict(zip(lead, q.shape, strict=False)) | {
        position: q.shape[-2],
        "!t": k.shape[-2],
        "!d": q.shape[-1],
        "!e": call.tensors[2].shape[-1],
    }
    sizes["h"] = k.shape[-3] if q.dim() > 2 else 1
    heads = ("h",) if q.dim() > 2 else ()
    # batch dims of size 1 broadcast
    shared = tuple(x if same(k.shape[i], q.shape[i]) else f"!k{i}" for i, x in enumerate(lead))
    inputs = [
        (*lead, *heads, position, "!d"),
        (*shared, *heads, "!t", "!d"),
        (*shared, *heads, "!t", "!e"),
    ]
    for mask in call.tensors[3:]:
        full = (*lead, *heads, position, "!t")
        shape = (*q.shape[:-1], k.shape[-2])
        offset = len(full) - mask.dim()
        inputs.append(
            tuple(
                full[offset + i] if same(s, shape[offset + i]) else f"!m{i}"
                for i, s in enumerate(mask.shape)
            )
        )
    grouped = not same(q.shape[-3], k.shape[-3]) if q.dim() > 2 else False
    return OpDims(
        tuple(inputs),
        ((*lead, *heads, position, "!e"),),
        sizes,
        even=frozenset("h") if grouped else frozenset(),
        contiguous=frozenset("h"),
        special={"s": "context_gather"},
        joint=_attention_joints(call, grouped) if plain else {},
        contraction=True,
        flops=_attention_flops(call),
    )


def _attention_joints(call: Call, grouped: bool) -> dict[str, JointSharding]:
    q, k = call.tensors[:2]
    masks = call.tensors[3:]
    heads, positions = q.shape[1], int(min(q.shape[-2], k.shape[-2]))

    def dim_of(size: int | torch.SymInt, dim: int) -> tuple[int, ...]:
        """For each mask, the dim with the size of dim `dim` (negative) of the scores, `size`. -1 if
        the mask broadcasts there.
        """
        return tuple(
            m.dim() + dim
            if m.dim() >= -dim and same(m.shape[dim], size) and not same(size, 1)
            else -1
            for m in masks
        )

    found = {"ulysses": JointSharding("cp", (2, 2, 2, *(-1 for _ in masks)), (2,), positions)}
    if not any(n.meta.get("grad") for n in call.operands[3:]):
        found["ring"] = JointSharding("cp", (2, 2, 2, *dim_of(q.shape[-2], -2)), (2,), positions)
    if grouped:
        found["grouped_heads"] = JointSharding(
            "tp", (1, -1, -1, *dim_of(heads, -3)), (1,), int(heads)
        )
    return found


def _attention_flops(call: Call) -> Any:
    """FLOPs of attention's forward: two products of (queries x keys x channels) per head.
    `is_causal` halves them; a mask that is an operand does not.
    """
    q, k, v = call.tensors[:3]
    total = 2 * k.shape[-2] * (q.shape[-1] + v.shape[-1])
    for size in q.shape[:-1]:
        total = total * size
    return total // 2 if call.arg("is_causal", False) else total


def _cross_entropy(call: Call) -> OpDims:
    """How torch's cross_entropy may be sharded, if it is summed or unreduced: by tokens, and by
    classes with the vocab-parallel lowering. A mean stays whole.

    Classes stay whole with class weights, label smoothing, probabilities as targets, or logits of
    other than 2 dims.
    """
    logits, target = call.tensors[:2]
    reduction, smoothing = call.arg("reduction", 1), call.arg("label_smoothing", 0.0)
    plain = (
        logits.dim() == 2
        and not smoothing
        and len(call.tensors) == 2
        and not is_symbolic(logits.shape[1])
    )
    tokens = ("n",) if logits.dim() == 2 and reduction != 1 else ("!n",)
    others = tuple(tuple(f"!w{k}" for k in range(t.dim())) for t in call.tensors[2:])
    if logits.dim() > 2 and target.dim() == logits.dim() - 1 and reduction != 1:  # classes in dim 1
        places = ("n", *(f"p{k}" for k in range(2, logits.dim())))
        shape = dict(zip(places, target.shape, strict=True))
        return OpDims(
            ((places[0], "!v", *places[1:]), places, *others),
            (places if reduction == 0 else (),),
            shape | {"!v": logits.shape[1]},
            frozenset(places) if reduction == 2 else frozenset(),
        )
    # probabilities of classes
    if logits.dim() > 1 and target.dim() == logits.dim() and reduction != 1:
        places = ("n", "!v", *(f"p{k}" for k in range(2, logits.dim())))
        shape, kept = (
            dict(zip(places, logits.shape, strict=True)),
            tuple(x for x in places if x != "!v"),
        )
        out, summed = (kept, frozenset()) if reduction == 0 else ((), frozenset(kept))
        return OpDims((places, places, *others), (out,), shape, summed)
    if logits.dim() != 2 or target.dim() != 1:
        return (
            keep_dims(lambda c: list(range(logits.dim())))(call)
            if reduction == 0
            else OpDims(
                tuple(
                    tuple(f"!{i}{k}" for k in range(t.dim())) for i, t in enumerate(call.tensors)
                ),
                ((),),
                {},
            )
        )
    vocab = ("v",) if plain and reduction != 1 else ("!v",)
    out = () if reduction != 0 else tokens
    return OpDims(
        ((*tokens, *vocab), tokens, *others),
        (out,),
        {tokens[0]: logits.shape[0], vocab[0]: logits.shape[1]},
        frozenset("n") if reduction == 2 else frozenset(),
        contiguous=frozenset("v"),
        special={"v": "vocab_parallel_cross_entropy"},
        replicated_result=frozenset("v"),
    )


_TABLE: dict[str, OpRule] = {
    **PRODUCTS,
    **ELEMENTWISE,
    **REDUCTIONS,
    **LOOKUPS,
    **CONVOLUTIONS,
    **CRITERIA,
    "matmul": _matmul,
    "scaled_dot_product_attention": _attention,
    "cross_entropy_loss": _cross_entropy,
    # views
    "reshape": _reshape,
    "unsqueeze": _reshape,
    "squeeze": _reshape,
    "transpose": _permutation(_transpose_order),
    "permute": _permutation(lambda call: [d % call.tensors[0].dim() for d in call.arg("dims")]),
    "expand": _expand,
    "slice": _slice,
    "select": _select,
    "unbind": _select,
    "split_with_sizes": _split,
    "cat": _concatenate,
    "stack": _stack,
    # constants, and ops that mix all elements
    **dict.fromkeys(
        words("""
        arange ones zeros full empty scalar_tensor new_ones new_zeros new_full new_empty eye linspace logspace meshgrid tril_indices
        triu_indices histc searchsorted view_as_real
        """),
        unsharded,
    ),
}

for _name, _rule in _TABLE.items():
    _RULES[f"aten::{_name}"] = _rule
_RULES[ROUTED_EXPERTS] = routed_experts_rule
# `trace/writes.py`
_RULES["autopar::row_places"] = keep_dims(lambda call: [1])
_RULES.update(FUSED)
# `trace/batch_norm.py`; linear in its first operand, but evaluation reads the second
_RULES["autopar::in_training"] = pointwise()
# `trace/complex_pairs.py`
_RULES["autopar::fourier"] = _RULES["autopar::real_fourier"] = fourier
_RULES["autopar::custom_function"] = custom_rule
