"""Shape factorization: which dims of a reshaped tensor are the same data, so that sharding one shards the other."""

from __future__ import annotations

from math import gcd
from typing import Any

from autopar.ops.dims import Letters, is_symbolic

_BATCH = 1_000_003  # a prime that stands for the symbolic batch size; no other dim is a multiple of it


def concrete(size: Any) -> int:
    """A size as a number, the batch replaced by a large prime, so that products can be compared."""
    if not is_symbolic(size):
        return int(size)
    expr = size.node.expr
    return int(expr.subs({symbol: _BATCH for symbol in expr.free_symbols}))


def factor(before: tuple, after: tuple) -> tuple[Letters, Letters, dict[str, Any], frozenset[str]]:
    """Letters of a reshape from shape `before` to shape `after`, their sizes, and the letters that must divide evenly.

    Dims are grouped into the shortest runs of equal products.  In a run, only the outermost dims hold whole slabs of the data, so
    they share one letter of size gcd; the inner dims cannot be sharded.

    >>> factor((2, 12, 8), (2, 3, 4, 8))[:2]
    (('v0', 'v1', 'v2'), ('v0', 'v1', '!1', 'v2'))
    """
    left = ["" for _ in before]
    right = ["" for _ in after]
    sizes: dict[str, Any] = {}
    even: set[str] = set()
    i = j = 0
    while i < len(before) or j < len(after):
        run_left, run_right = [], []
        p = q = 1
        while True:
            if p <= q and i < len(before) and (p < q or not run_left):
                p *= concrete(before[i])
                run_left.append(i)
                i += 1
            elif j < len(after) and (q < p or not run_right):
                q *= concrete(after[j])
                run_right.append(j)
                j += 1
            else:
                break
            if p == q and (run_left and run_right):
                break
        _name_run(before, after, run_left, run_right, left, right, sizes, even)
    return tuple(left), tuple(right), sizes, frozenset(even)


def _name_run(before, after, run_left, run_right, left, right, sizes, even) -> None:
    tag = len(sizes)
    a = next((k for k in run_left if concrete(before[k]) != 1), None)
    b = next((k for k in run_right if concrete(after[k]) != 1), None)
    for k in run_left:
        left[k] = f"!{tag}"
    for k in run_right:
        right[k] = f"!{tag}"
    sizes[f"!{tag}"] = 1
    if a is None or b is None:
        return
    letter = f"v{len([x for x in sizes if x.startswith('v')])}"
    if concrete(before[a]) == concrete(after[b]):
        sizes[letter] = before[a]
        whole = [k for k in run_left if concrete(before[k]) != 1] == [a] and [k for k in run_right if concrete(after[k]) != 1] == [b]
        if not whole and not is_symbolic(before[a]):
            even.add(letter)
    elif is_symbolic(before[a]) or is_symbolic(after[b]):
        small = min((before[a], after[b]), key=concrete)
        if not is_symbolic(small) or max(concrete(before[a]), concrete(after[b])) % concrete(small):
            return
        sizes[letter] = small
    else:
        common = gcd(concrete(before[a]), concrete(after[b]))
        if common == 1:
            return
        sizes[letter] = common
        even.add(letter)
    left[a] = right[b] = letter
