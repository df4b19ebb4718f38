"""The op rules: one line an op.

A rule maps a `Call` to an `OpDims`.  To add an op, add a line to the table; a user's own op goes through `register_rule`.
Ops without a rule run replicated, which is always correct, and `explain` lists them.
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd

import torch

from autopar.errors import AutoparError
from autopar.ops.dims import Call, Joint, Letters, OpDims, einsum, is_symbolic
from autopar.ops.experts import routed_experts
from autopar.ops.views import Factors

Rule = Callable[[Call], OpDims]
_RULES: dict[str, Rule] = {}


def register_rule(target, rule: str | Rule) -> None:
    """Teach autopar to shard an op.

    `target` is an OpOverload or its name such as `mylib::scale`; `rule` an equation (`"b.. i, o i -> b.. o"`, summed letters are those
    that do not reach the result) or a function from `Call` to `OpDims`.
    """
    name = target._schema.name if isinstance(target, torch._ops.OpOverload) else str(target)
    if isinstance(rule, str):
        if rule.count("->") != 1:
            raise AutoparError(f"rule {rule!r} for {name} must have one '->', as in 'b.. i, o i -> b.. o'")
        rule = einsum(rule, ordered=True)
    _RULES[name] = rule


def rule_for(node: torch.fx.Node) -> Rule | None:
    """The rule of a call, or None."""
    schema = getattr(node.target, "_schema", None)
    return _RULES.get(schema.name) if schema is not None else None


def op_dims(node: torch.fx.Node) -> OpDims | None:
    """The dimension algebra of a call, or None if the op has no rule."""
    rule = rule_for(node)
    return rule(Call(node)) if rule is not None else None


def known_ops() -> tuple[str, ...]:
    """Names of all ops with a rule."""
    return tuple(_RULES)


def pointwise(linear: tuple[tuple[int, ...], ...] = (), all_linear: bool = False) -> Rule:
    """Broadcasting element by element; `all_linear`: linear in all tensor operands together."""

    def rule(call: Call) -> OpDims:
        out = call.results[0].shape
        letters = tuple(f"d{k}" for k in range(len(out)))
        sizes = {x: s for x, s in zip(letters, out, strict=True)}
        inputs = []
        for t in call.tensors:
            offset = len(out) - t.dim()
            inputs.append(tuple(letters[offset + k] if _same(s, out[offset + k]) else f"!{k}" for k, s in enumerate(t.shape)))
        count = len(inputs)
        groups = (frozenset(range(count)),) if all_linear else tuple(frozenset(g) for g in linear if max(g) < count)
        return OpDims(tuple(inputs), (letters,) * len(call.results), sizes | {f"!{k}": 1 for k in range(len(out))}, linear=groups)

    return rule


def _same(a, b) -> bool:
    return str(a) == str(b)


def _additive(call: Call) -> OpDims:
    """add and sub: jointly linear in both tensors; with one tensor and a number they are affine, hence not linear."""
    return pointwise(all_linear=len(call.tensors) == 2)(call)


def keep_dims(fixed: Callable[[Call], list[int]], linear: bool = False, free: bool = False) -> Rule:
    """Result has the first operand's dims; the dims that `fixed` names cannot be sharded.  Further operands are replicated."""

    def rule(call: Call) -> OpDims:
        first, frozen = call.tensors[0], set(fixed(call))
        letters = tuple(f"!{k}" if k in frozen else f"d{k}" for k in range(first.dim()))
        others = tuple(tuple(f"!o{k}" for k in range(t.dim())) for t in call.tensors[1:])
        outputs = tuple(tuple(letters[k] if k not in frozen else f"!r{k}" for k in range(t.dim())) for t in call.results)
        return OpDims(
            (letters, *others),
            outputs,
            dict(zip(letters, first.shape, strict=True)),
            linear=(frozenset({0}),) if linear else (),
            movement_free=free,
        )

    return rule


def trailing(name: str) -> Callable[[Call], list[int]]:
    """The last len(arg) dims, as layer_norm's normalized_shape names them."""
    return lambda call: list(range(call.tensors[0].dim() - len(call.arg(name)), call.tensors[0].dim()))


def _reduction(summing: bool) -> Rule:
    def rule(call: Call) -> OpDims:
        if len(call.tensors) > 1:  # max.other and min.other compare two tensors element by element
            return pointwise()(call)
        source, dims, keep = call.tensors[0], set(call.dims()), bool(call.arg("keepdim", False))
        letters = tuple(f"!{k}" if k in dims and not summing else f"d{k}" for k in range(source.dim()))
        out: Letters = tuple(x if k not in dims else f"!k{k}" for k, x in enumerate(letters) if keep or k not in dims)
        summed = frozenset(letters[k] for k in dims) if summing else frozenset()
        return OpDims(
            (letters,),
            (out,) * len(call.results),
            dict(zip(letters, source.shape, strict=True)),
            summed,
            linear=(frozenset({0}),) if summing else (),
        )

    return rule


def _permutation(order: Callable[[Call], list[int]]) -> Rule:
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
    """Dims that grow from 1 are new letters of the result: sharding one sums the operand's gradient."""
    source, out = call.tensors[0].shape, call.results[0].shape
    letters = tuple(f"d{k}" for k in range(len(out)))
    offset = len(out) - len(source)
    inputs = tuple(letters[offset + k] if _same(s, out[offset + k]) else f"!{k}" for k, s in enumerate(source))
    sizes = dict(zip(letters, out, strict=True)) | {f"!{k}": 1 for k in range(len(source))}
    return OpDims((inputs,), (letters,), sizes, linear=(frozenset({0}),), movement_free=True)


def _slice(call: Call) -> OpDims:
    return keep_dims(lambda c: [c.dim(default=0)], linear=True, free=True)(call)


def _select(call: Call) -> OpDims:
    source, dim = call.tensors[0], call.dim(default=0)
    letters = tuple(f"!{k}" if k == dim else f"d{k}" for k in range(source.dim()))
    out = tuple(x for k, x in enumerate(letters) if k != dim)
    return OpDims(
        (letters,), (out,) * len(call.results), dict(zip(letters, source.shape, strict=True)), linear=(frozenset({0}),), movement_free=True
    )


def _sections(sizes: list) -> tuple[str, str, int] | None:
    """(entry of the joined dim, letter of the parts' dim, size of the letter) for parts of static sizes, which are then sharded alike."""
    if any(is_symbolic(size) for size in sizes) or not all(sizes) or len(sizes) < 2:
        return None
    return "x|" + ":".join(str(int(size)) for size in sizes), "x", gcd(*map(int, sizes))


def _split(call: Call) -> OpDims:
    """Parts along the dim are sharded alike, if the whole is sharded in their sections."""
    source, dim = call.tensors[0], call.dim(default=0)
    joined, part, size = _sections([t.shape[dim] for t in call.results]) or ("!x", "!r", 1)
    letters = [f"d{k}" for k in range(source.dim())]
    sizes = dict(zip(letters, source.shape, strict=True)) | {part: size}
    inner, outer = (tuple(entry if k == dim else x for k, x in enumerate(letters)) for entry in (joined, part))
    return OpDims(
        (inner,),
        (outer,) * len(call.results),
        sizes,
        even=frozenset({part}),
        linear=(frozenset({0}),),
        movement_free=True,
    )


def _concatenate(call: Call) -> OpDims:
    """As `_split`, backwards."""
    rank = call.tensors[0].dim()
    dim = call.dim(default=0)
    everything = frozenset(range(len(call.tensors)))
    if any(t.dim() != rank for t in call.tensors):  # torch.cat ignores empty 1-D operands
        fixed = tuple(f"!{k}" for k in range(rank))
        return OpDims(tuple(fixed[: t.dim()] for t in call.tensors), (fixed,), {}, linear=(everything,))
    joined, part, size = _sections([t.shape[dim] for t in call.tensors]) or ("!x", "!p", 1)
    letters = [f"d{k}" for k in range(rank)]
    sizes = dict(zip(letters, call.tensors[0].shape, strict=True)) | {part: size}
    outer, inner = (tuple(entry if k == dim else x for k, x in enumerate(letters)) for entry in (joined, part))
    return OpDims((inner,) * len(call.tensors), (outer,), sizes, even=frozenset({part}), linear=(everything,))


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


def _diff(call: Call) -> OpDims:
    """`prepend` and `append` are joined to the tensor along the dim, so they are sharded like it."""
    dim = call.dim(default=-1)
    inputs = tuple(tuple(f"!{i}{k}" if k == dim else f"d{k}" for k in range(t.dim())) for i, t in enumerate(call.tensors))
    out = tuple("!r" if k == dim else f"d{k}" for k in range(call.tensors[0].dim()))
    return OpDims(inputs, (out,), dict(zip(inputs[0], call.tensors[0].shape, strict=True)))


def _matmul(call: Call) -> OpDims:
    a, b = call.tensors
    if a.dim() < 2 or b.dim() < 2:
        left = ("k",) if a.dim() < 2 else (*(f"d{k}" for k in range(a.dim() - 1)), "k")
        right = ("k",) if b.dim() < 2 else (*(f"e{k}" for k in range(b.dim() - 2)), "k", "n")
        sizes = dict(zip((*left, *right), (*a.shape, *b.shape), strict=True))
        out = tuple(x for x in (*left, *right) if x != "k")
        return OpDims((left, right), (out,), sizes, frozenset("k"), linear=(frozenset({0}), frozenset({1})), contraction=True)
    out = call.results[0]
    batch = tuple(f"b{k}" for k in range(out.dim() - 2))
    sizes = dict(zip(batch, out.shape[:-2], strict=True)) | {"m": a.shape[-2], "k": a.shape[-1], "n": b.shape[-1], "!b": 1}

    def lead(t: torch.Tensor) -> Letters:
        offset = len(batch) - (t.dim() - 2)
        return tuple(batch[offset + k] if _same(t.shape[k], out.shape[offset + k]) else "!b" for k in range(t.dim() - 2))

    return OpDims(
        ((*lead(a), "m", "k"), (*lead(b), "k", "n")),
        ((*batch, "m", "n"),),
        sizes,
        frozenset("k"),
        linear=(frozenset({0}), frozenset({1})),
        contraction=True,
    )


def _attention(call: Call) -> OpDims:
    """Batch, heads and query positions shard; keys and channels do not.  With grouped heads, the key heads' letter covers whole groups.

    Query positions (`s`, keys whole) and the joint strategies are context parallelism, see `rewrite/context_attention.py`;
    `grouped_heads` shards query heads alone, for more ranks than there are key heads.
    """
    q, k = call.tensors[:2]
    lead = tuple(f"b{i}" for i in range(q.dim() - 3))
    plain = q.dim() == 4 and not call.arg("dropout_p", 0.0) and not (call.arg("is_causal", False) and not _same(q.shape[-2], k.shape[-2]))
    position = "s" if plain else "!s"
    sizes = dict(zip(lead, q.shape, strict=False)) | {
        position: q.shape[-2],
        "!t": k.shape[-2],
        "!d": q.shape[-1],
        "!e": call.tensors[2].shape[-1],
    }
    sizes["h"] = k.shape[-3] if q.dim() > 2 else 1
    heads = ("h",) if q.dim() > 2 else ()
    shared = tuple(x if _same(k.shape[i], q.shape[i]) else f"!k{i}" for i, x in enumerate(lead))  # batch dims of size 1 broadcast
    inputs = [(*lead, *heads, position, "!d"), (*shared, *heads, "!t", "!d"), (*shared, *heads, "!t", "!e")]
    for mask in call.tensors[3:]:
        full = (*lead, *heads, position, "!t")
        shape = (*q.shape[:-1], k.shape[-2])
        offset = len(full) - mask.dim()
        inputs.append(tuple(full[offset + i] if _same(s, shape[offset + i]) else f"!m{i}" for i, s in enumerate(mask.shape)))
    grouped = not _same(q.shape[-3], k.shape[-3]) if q.dim() > 2 else False
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


def _attention_joints(call: Call, grouped: bool) -> dict[str, Joint]:
    q, k = call.tensors[:2]
    masks = call.tensors[3:]
    heads, positions = q.shape[1], int(min(q.shape[-2], k.shape[-2]))

    def dim_of(size, dim: int) -> tuple[int, ...]:
        """The dim of each mask that has the size of dim `dim` of the scores, or -1."""
        return tuple(m.dim() + dim if m.dim() >= -dim and _same(m.shape[dim], size) and not _same(size, 1) else -1 for m in masks)

    found = {"ulysses": Joint("cp", (2, 2, 2, *(-1 for _ in masks)), (2,), positions)}
    if not any(n.meta.get("grad") for n in call.operands[3:]):
        found["ring"] = Joint("cp", (2, 2, 2, *dim_of(q.shape[-2], -2)), (2,), positions)
    if grouped:
        found["grouped_heads"] = Joint("tp", (1, -1, -1, *dim_of(heads, -3)), (1,), int(heads))
    return found


def _attention_flops(call: Call):
    """Two products of (queries x keys x channels) a head; a causal mask halves them."""
    q, k, v = call.tensors[:3]
    total = 2 * k.shape[-2] * (q.shape[-1] + v.shape[-1])
    for size in q.shape[:-1]:
        total = total * size
    return total // 2 if call.arg("is_causal", False) else total


def _embedding(call: Call) -> OpDims:
    """A table sharded by rows takes the vocab-parallel lowering; gradients scaled by whole-batch frequency keep everything whole."""
    fixed = "v" if call.arg("sparse", False) else ""
    if call.arg("scale_grad_by_freq", False):
        return _creation(call)
    return einsum("v h, b.. -> b.. h", linear=((0,),), special={"v": "vocab_parallel_embedding"}, fixed=fixed)(call)


def _cross_entropy(call: Call) -> OpDims:
    """Sum or none over tokens; a sharded class dim takes the vocab-parallel lowering."""
    logits, target = call.tensors[:2]
    reduction, smoothing = call.arg("reduction", 1), call.arg("label_smoothing", 0.0)
    plain = logits.dim() == 2 and not smoothing and len(call.tensors) == 2 and not is_symbolic(logits.shape[1])
    tokens = ("n",) if logits.dim() == 2 and reduction != 1 else ("!n",)
    if logits.dim() != 2 or target.dim() != 1:
        return (
            keep_dims(lambda c: list(range(logits.dim())))(call)
            if reduction == 0
            else OpDims(tuple(tuple(f"!{i}{k}" for k in range(t.dim())) for i, t in enumerate(call.tensors)), ((),), {})
        )
    vocab = ("v",) if plain and reduction != 1 else ("!v",)
    others = tuple(tuple(f"!w{k}" for k in range(t.dim())) for t in call.tensors[2:])
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


def _addmm(call: Call) -> OpDims:
    bias, a, b = call.tensors
    aligned = list(zip(("m", "o"), call.results[0].shape, strict=True))[2 - bias.dim() :]
    letters = tuple(x if _same(size, whole) else f"!{k}" for k, ((x, whole), size) in enumerate(zip(aligned, bias.shape, strict=True)))
    return OpDims(
        (letters, ("m", "k"), ("k", "o")),
        (("m", "o"),),
        {"m": a.shape[0], "k": a.shape[1], "o": b.shape[1], "!0": 1, "!1": 1},
        frozenset("k"),
        frozenset({0}),
        contraction=True,
    )


def _creation(call: Call) -> OpDims:
    """Constants are computed whole on every rank: they are cheap, and slicing them is free."""
    inputs = tuple(tuple(f"!{k}" for k in range(t.dim())) for t in call.tensors)
    return OpDims(inputs, tuple(tuple(f"!r{k}" for k in range(t.dim())) for t in call.results), {})


def _last_dim(call: Call) -> list[int]:
    return [call.dim()]


_TABLE: dict[str, Rule] = {
    # matrix products
    "linear": einsum("b.. i, o i, +o -> b.. o", linear=((0,), (1,)), contraction=True),
    "matmul": _matmul,
    "mm": einsum("m k, k n -> m n", linear=((0,), (1,)), contraction=True),
    "bmm": einsum("b m k, b k n -> b m n", linear=((0,), (1,)), contraction=True),
    "addmm": _addmm,
    "scaled_dot_product_attention": _attention,
    # lookup and loss
    "embedding": _embedding,
    "cross_entropy_loss": _cross_entropy,
    # normalization and softmax
    "layer_norm": keep_dims(trailing("normalized_shape")),
    "rms_norm": keep_dims(trailing("normalized_shape")),
    "softmax": keep_dims(_last_dim),
    "_softmax": keep_dims(_last_dim),
    "log_softmax": keep_dims(_last_dim),
    "cumsum": keep_dims(_last_dim),
    "sort": keep_dims(_last_dim),
    "topk": keep_dims(lambda call: [call.dim(default=-1)]),
    "diff": _diff,
    # reductions
    "sum": _reduction(summing=True),
    **dict.fromkeys(
        ("mean", "amax", "amin", "max", "min", "argmax", "argmin", "any", "all", "var", "std", "prod", "logsumexp"),
        _reduction(summing=False),
    ),
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
    "pad": keep_dims(lambda call: list(range(call.tensors[0].dim() - len(call.arg("pad")) // 2, call.tensors[0].dim()))),
    "constant_pad_nd": keep_dims(lambda call: list(range(call.tensors[0].dim() - len(call.arg("pad")) // 2, call.tensors[0].dim()))),
    # element by element
    "add": _additive,
    "sub": _additive,
    "mul": pointwise(linear=((0,), (1,))),
    "div": lambda call: pointwise(linear=() if call.arg("rounding_mode") else ((0,),))(call),
    **dict.fromkeys(("neg", "to", "clone", "contiguous", "detach", "alias"), pointwise(linear=((0,),))),
    **dict.fromkeys(
        (
            "abs",
            "exp",
            "log",
            "sqrt",
            "rsqrt",
            "reciprocal",
            "sin",
            "cos",
            "tanh",
            "sigmoid",
            "relu",
            "silu",
            "gelu",
            "leaky_relu",
            "elu",
            "softplus",
            "pow",
            "square",
            "erf",
            "clamp",
            "clamp_min",
            "clamp_max",
            "maximum",
            "minimum",
            "where",
            "masked_fill",
            "eq",
            "ne",
            "lt",
            "le",
            "gt",
            "ge",
            "logical_and",
            "logical_or",
            "logical_not",
            "bitwise_and",
            "bitwise_or",
            "bitwise_not",
            "__and__",
            "__or__",
            "remainder",
            "floor_divide",
            "zeros_like",
            "ones_like",
            "full_like",
            "isnan",
            "isinf",
            "sign",
            "floor",
            "ceil",
            "round",
            "dropout",
            "hardtanh",
            "mish",
            "addcmul",
            "rsub",
        ),
        pointwise(),
    ),
    # constants
    **dict.fromkeys(
        (
            "arange",
            "ones",
            "zeros",
            "full",
            "empty",
            "scalar_tensor",
            "new_ones",
            "new_zeros",
            "new_full",
            "new_empty",
            "eye",
            "linspace",
            "triu",
            "tril",
            "one_hot",
        ),
        _creation,
    ),
}

for _name, _rule in _TABLE.items():
    _RULES[f"aten::{_name}"] = _rule
_RULES["autopar::routed_experts"] = routed_experts
_RULES["autopar::in_training"] = pointwise()  # `trace/batch_norm.py`; linear in its first operand, but evaluation reads the second
