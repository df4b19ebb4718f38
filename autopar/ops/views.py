"""Relates the dims of a reshaped tensor: which dims before and after are the same data, so that
sharding one shards the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd
from typing import Any

from autopar.ops.dims import is_symbolic

_BATCH = 1_000_003  # a prime that stands for the symbolic batch size; no other dim is a multiple


def concrete(size: Any) -> int:
    """`size` as a number, with a large prime in the place of the batch size, so that products of
    sizes can be compared.
    """
    if not is_symbolic(size):
        return int(size)
    expr = size.node.expr
    return int(expr.subs({symbol: _BATCH for symbol in expr.free_symbols}))


def is_batch(size: Any) -> bool:
    """Whether a size is the batch size itself, not a multiple."""
    return is_symbolic(size) and size.node.expr.is_Symbol


class Factors:
    """Which dims of a reshape from shape `before` to shape `after` hold the same data: they share a
    letter.

    `left` and `right` are the letters of the dims, and `sizes` the sizes of the letters. `even`
    letters must be divided evenly; `contiguous` letters take no pattern.

    Dims are grouped into the shortest runs with equal products. The outermost dims of a run split
    the data into contiguous blocks, so they share one letter of size gcd. Dims that are flattened
    together with the batch keep letters of their own (`b*s`). Other inner dims cannot be sharded.

    >>> Factors((2, 12, 8), (2, 3, 4, 8)).right
    ('v0', 'v1', '!1', 'v2')
    """

    def __init__(self, before: tuple, after: tuple) -> None:
        self.before, self.after = before, after
        self.sizes: dict[str, Any] = {}
        self.even: set[str] = set()
        self.contiguous: set[str] = set()
        self._left, self._right = [""] * len(before), [""] * len(after)
        self._runs = self._letters = 0
        for run_left, run_right in _runs(before, after):
            self._name(run_left, run_right)
        self.left, self.right = tuple(self._left), tuple(self._right)

    def _name(self, run_left: list[int], run_right: list[int]) -> None:
        fixed = f"!{self._runs}"
        self._runs += 1
        self.sizes[fixed] = 1
        for k in run_left:
            self._left[k] = fixed
        for k in run_right:
            self._right[k] = fixed
        left = [k for k in run_left if concrete(self.before[k]) != 1]
        right = [k for k in run_right if concrete(self.after[k]) != 1]
        if not left or not right:
            return
        if len(left) > 1 and len(right) == 1 and is_batch(self.before[left[0]]):
            self._right[right[0]] = self._flatten(self._left, self.before, left, fixed)
        elif len(right) > 1 and len(left) == 1 and is_batch(self.after[right[0]]):
            self._left[left[0]] = self._flatten(self._right, self.after, right, fixed)
        else:
            self._share(left, right)

    def _new(self, size: Any) -> str:
        letter = f"v{self._letters}"
        self._letters += 1
        self.sizes[letter] = size
        return letter

    def _flatten(self, side: list[str], shape: tuple, dims: list[int], fixed: str) -> str:
        """Give letters, in `side`, to the batch and the dim after it, which the other shape has
        flattened into one. Returns the entry of that flattened dim, such as 'v0*v1'.

        `dims` are the indices of the flattened dims in `shape`; those after the second cannot be
        sharded and get `fixed`.
        """
        side[dims[0]], side[dims[1]] = self._new(shape[dims[0]]), self._new(shape[dims[1]])
        self.contiguous.add(side[dims[0]])
        if len(dims) > 2:
            self.even.add(side[dims[1]])
        return "*".join([side[dims[0]], side[dims[1]], *([fixed] if len(dims) > 2 else [])])

    def _share(self, left: list[int], right: list[int]) -> None:
        a, b = self.before[left[0]], self.after[right[0]]
        whole = len(left) == len(right) == 1
        if concrete(a) == concrete(b):
            letter = self._new(a)
            if not whole and not is_symbolic(a):
                self.even.add(letter)
        elif is_symbolic(a) or is_symbolic(b):
            small = min((a, b), key=concrete)
            if not is_symbolic(small) or max(concrete(a), concrete(b)) % concrete(small):
                return
            letter = self._new(small)
        else:
            common = gcd(concrete(a), concrete(b))
            if common == 1:
                return
            letter = self._new(common)
            self.even.add(letter)
        if not whole:
            self.contiguous.add(letter)
        self._left[left[0]] = self._right[right[0]] = letter


def _runs(before: tuple, after: tuple) -> Iterator[tuple[list[int], list[int]]]:
    """Yields pairs of lists of dim indices, of the two shapes, in order. Each pair is as short as
    possible with equal products of sizes.
    """
    i = j = 0
    while i < len(before) or j < len(after):
        left: list[int] = []
        right: list[int] = []
        p = q = 1
        while True:
            if p <= q and i < len(before) and (p < q or not left):
                p *= concrete(before[i])
                left.append(i)
                i += 1
            elif j < len(after) and (q < p or not right):
                q *= concrete(after[j])
                right.append(j)
                j += 1
            else:
                break
            if p == q and left and right:
                break
        yield left, right
