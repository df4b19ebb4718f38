"""Kinds of rules that many ops share: element-wise, some dims fixed, nothing sharded."""

from __future__ import annotations

from collections.abc import Callable

from autopar.ops.dims import Call, OpDims

OpRule = Callable[[Call], OpDims]


def words(text: str) -> list[str]:
    """The op names in a text, separated by spaces."""
    return text.split()


def same(a: object, b: object) -> bool:
    """Whether two sizes are equal. Symbolic sizes are compared as expressions."""
    return str(a) == str(b)


def pointwise(linear: tuple[tuple[int, ...], ...] = (), all_linear: bool = False) -> OpRule:
    """A rule (a function from a call to its `OpDims`) for element-wise ops with broadcasting: every
    dim of the result can be sharded.

    `linear` lists groups of operands in which the op is jointly linear; `all_linear` means all
    tensor operands together.
    """

    def rule(call: Call) -> OpDims:
        out = call.results[0].shape
        letters = tuple(f"d{k}" for k in range(len(out)))
        sizes = {x: s for x, s in zip(letters, out, strict=True)}
        inputs = []
        for t in call.tensors:
            offset = len(out) - t.dim()
            inputs.append(
                tuple(
                    letters[offset + k] if same(s, out[offset + k]) else f"!{k}"
                    for k, s in enumerate(t.shape)
                )
            )
        count = len(inputs)
        groups = (
            (frozenset(range(count)),)
            if all_linear
            else tuple(frozenset(g) for g in linear if max(g) < count)
        )
        return OpDims(
            tuple(inputs),
            (letters,) * len(call.results),
            sizes | {f"!{k}": 1 for k in range(len(out))},
            linear=groups,
        )

    return rule


def keep_dims(
    fixed: Callable[[Call], list[int]], linear: bool = False, free: bool = False, even: bool = False
) -> OpRule:
    """A rule (a function from a call to its `OpDims`) for ops whose result has the dims of the
    first operand. The dims that `fixed(call)` returns cannot be sharded; further operands are
    replicated.

    `linear`: the op is linear in the first operand. `free`: it is a view. `even`: the other dims
    must be sharded evenly, for ops that refuse empty tensors.
    """

    def rule(call: Call) -> OpDims:
        first, frozen = call.tensors[0], set(fixed(call))
        letters = tuple(f"!{k}" if k in frozen else f"d{k}" for k in range(first.dim()))
        others = tuple(tuple(f"!o{k}" for k in range(t.dim())) for t in call.tensors[1:])
        outputs = tuple(
            tuple(
                letters[k] if k < first.dim() and k not in frozen else f"!r{k}"
                for k in range(t.dim())
            )
            for t in call.results
        )
        return OpDims(
            (letters, *others),
            outputs,
            dict(zip(letters, first.shape, strict=True)),
            linear=(frozenset({0}),) if linear else (),
            movement_free=free,
            even=frozenset(x for x in letters if even and not x.startswith("!")),
        )

    return rule


def unsharded(call: Call) -> OpDims:
    """The rule of ops that cannot be sharded: `OpDims` in which no dim can be. Such are ops that
    mix all elements, and constants, which are cheap to compute and free to slice.
    """
    inputs = tuple(tuple(f"!{k}" for k in range(t.dim())) for t in call.tensors)
    return OpDims(inputs, tuple(tuple(f"!r{k}" for k in range(t.dim())) for t in call.results), {})


def last_dims(count: int) -> Callable[[Call], list[int]]:
    """A function from a call to the indices of the last `count` dims of its first operand (all dims
    if it has fewer).
    """
    return lambda call: list(range(max(call.tensors[0].dim() - count, 0), call.tensors[0].dim()))


def along(name: str = "dim", default: int | None = None) -> Callable[[Call], list[int]]:
    """A function from a call to a list of one index: the dim that its argument `name` gives, or
    `default`.
    """
    return lambda call: [call.dim(name, default)]
