"""Rules of products: matrices, vectors, einsum."""

from __future__ import annotations

from collections.abc import Iterable

from torch import SymInt, Tensor

from autopar.ops.dims import Call, Letters, OpDims, einsum
from autopar.ops.kinds import OpRule, same


def biased(bias_at: Letters, left: Letters, right: Letters) -> OpRule:
    """A rule (a function from a call to its `OpDims`) for beta * bias + alpha * (left @ right).
    `left` and `right` are the letters of the factors. `bias_at` has those of the result, to which
    the bias broadcasts.
    """

    def rule(call: Call) -> OpDims:
        bias, a, b = call.tensors
        sizes = dict(zip((*left, *right), (*a.shape, *b.shape), strict=True))
        offset = len(bias_at) - bias.dim()
        letters = tuple(
            x if same(s, sizes[x]) else f"!{x}"
            for x, s in zip(bias_at[offset:], bias.shape, strict=True)
        )
        return OpDims(
            (letters, left, right),
            (bias_at,),
            sizes | {f"!{x}": 1 for x in bias_at},
            frozenset(x for x in sizes if x not in bias_at),
            frozenset({0}),
            linear=(frozenset({0, 1}), frozenset({0, 2})),
            contraction=True,
        )

    return rule


def _einsum(call: Call) -> OpDims:
    """How einsum may be sharded: along every letter of its equation. A letter that appears twice in
    one operand (a diagonal) cannot be.
    """
    terms, arrow, out = call.arg("equation").replace(" ", "").partition("->")
    if not arrow:
        letters = [x for x in terms.replace("...", "") if x != ","]
        out = ("..." if "..." in terms else "") + "".join(
            sorted(x for x in set(letters) if letters.count(x) == 1)
        )
    tensors, names = call.tensors, terms.split(",")
    extra = max(
        t.dim() - len(name.replace("...", "")) for t, name in zip(tensors, names, strict=True)
    )

    def spelled(name: str, rank: int) -> list[str]:
        lead, dots, rest = name.partition("...")
        count = rank - len(lead) - len(rest)
        return [*lead, *(f"b{extra - count + k}" for k in range(count if dots else 0)), *rest]

    inputs = [spelled(name, t.dim()) for name, t in zip(names, tensors, strict=True)]
    output = spelled(out, call.results[0].dim())
    sizes: dict = {}
    for term, t in zip(inputs, tensors, strict=True):
        for x, s in zip(term, t.shape, strict=True):
            sizes[x] = s if same(sizes.get(x, 1), 1) else sizes[x]
    twice = {x for term in inputs for x in term if term.count(x) > 1}

    def fixed(term: list[str], shape: Iterable[int | SymInt]) -> Letters:
        return tuple(
            f"!{x}" if x in twice or not same(s, sizes[x]) else x
            for x, s in zip(term, shape, strict=True)
        )

    named = tuple(fixed(term, t.shape) for term, t in zip(inputs, tensors, strict=True))
    sizes |= {x: sizes[x[1:]] for term in named for x in term if x.startswith("!")}
    return OpDims(
        named,
        (fixed(output, call.results[0].shape),),
        sizes,
        frozenset(x for x in sizes if x not in output and x not in twice and not x.startswith("!")),
        linear=tuple(frozenset({i}) for i in range(len(tensors))),
        contraction=len(tensors) > 1,
    )


def batch_letters(out: Tensor, operand: Tensor | None = None) -> Letters:
    """The letters `b0 b1 ..` of the dims before the last two of the result `out`; with `operand`,
    of those of an operand that broadcasts to it. A stretched dim is `!b`, which cannot be sharded.
    """
    letters = tuple(f"b{k}" for k in range(out.dim() - 2))
    if operand is None:
        return letters
    own = list(zip(operand.shape[:-2], letters[out.dim() - operand.dim() :], strict=True))
    return tuple(x if same(size, out.shape[int(x[1:])]) else "!b" for size, x in own)


def _solve_triangular(call: Call) -> OpDims:
    """How solve_triangular (X from A X = B or X A = B) may be sharded: by matrices of a batch, and
    by columns (rows) of B, which are independent.
    """
    system, known = call.tensors
    out, left = call.results[0], call.arg("left", True)
    batch, free = batch_letters(out), out.shape[-1 if left else -2]
    sizes = dict(zip(batch, out.shape[:-2], strict=True)) | {
        "!n": system.shape[-1],
        "k": free,
        "!b": 1,
    }
    last = ("!n", "k") if left else ("k", "!n")
    inputs = ((*batch_letters(out, system), "!n", "!n"), (*batch_letters(out, known), *last))
    return OpDims(inputs, ((*batch, *last),), sizes, linear=(frozenset({1}),))


def _product(equation: str) -> OpRule:
    return einsum(equation, linear=((0,), (1,)), contraction=True)


PRODUCTS: dict[str, OpRule] = {
    "mm": _product("m k, k n -> m n"),
    "bmm": _product("b m k, b k n -> b m n"),
    "mv": _product("m k, k -> m"),
    "dot": _product("k, k ->"),
    "vdot": _product("k, k ->"),
    "outer": _product("m, n -> m n"),
    "bilinear": _product("b.. i, b.. j, o i j, +o -> b.. o"),
    "linear": _product("b.. i, o i, +o -> b.. o"),
    "addmm": biased(("m", "o"), ("m", "k"), ("k", "o")),
    "baddbmm": biased(("b", "m", "o"), ("b", "m", "k"), ("b", "k", "o")),
    "addmv": biased(("m",), ("m", "k"), ("k",)),
    "einsum": _einsum,
    "linalg_solve_triangular": _solve_triangular,
}
