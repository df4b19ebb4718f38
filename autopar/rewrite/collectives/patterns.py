"""Shards with a pattern: reordering a dim so that the elements of every rank form one contiguous
chunk.

A collective over such a shard is the contiguous collective between two local reorderings; see
`Pattern` in `ir/sharding.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.ir.sharding import CONTIGUOUS, Pattern, local_extent, parse_pattern, shard_extent


@dataclass(frozen=True, slots=True)
class Split:
    """A description of how one tensor dim is sharded over an axis: which dim, its size before
    sharding, the pattern, and the number of batch rows flattened into it.
    """

    dim: int
    size: int
    pattern: Pattern = CONTIGUOUS
    rows: int = 1

    def extent(self, parts: int, index: int) -> int:
        """The size of the dim on rank `index` of `parts` ranks."""
        return local_extent(self.size, parts, index, self.pattern)

    def section_sizes(self) -> list[int]:
        """Lengths, along the dim, of the sections in one batch row. They add up to `size //
        rows`.
        """
        whole, unit = self.size // self.rows, sum(self.pattern.sections)
        return [whole // unit * section for section in self.pattern.sections]


def split_of(dim: int, size: int, pattern: str, rows: int) -> Split:
    """The `Split` of a dim with `size` elements, whose pattern is given as text. `rows` counts only
    if the pattern has rows.
    """
    parsed = parse_pattern(pattern)
    return Split(dim, size, parsed, rows if parsed.rows else 1)


def rank_major(x: Tensor, split: Split, parts: int) -> Tensor:
    """The whole `x`, reordered along the dim of `split`: first the elements of rank 0 of `parts`,
    then those of rank 1, and so on. `x` itself if the pattern is contiguous.
    """
    if split.pattern.is_contiguous:
        return x
    dim = split.dim + 1  # behind the batch rows
    sections, by_row = [], x.unflatten(split.dim, (split.rows, split.size // split.rows))
    for section in by_row.split(split.section_sizes(), dim):
        length = section.shape[dim] // parts
        if split.pattern.zigzag:
            first, second = section.unflatten(dim, (2, parts, length // 2)).unbind(dim)
            sections.append(torch.cat([first, second.flip(dim)], dim + 1))
        else:
            sections.append(section.unflatten(dim, (parts, length)))
    return torch.cat(sections, dim + 1).transpose(split.dim, dim).flatten(split.dim, dim + 1)


def natural_order(x: Tensor, split: Split, parts: int) -> Tensor:
    """The whole `x`, whose dim of `split` is in the order of `rank_major`, back in its original
    order. `x` itself if the pattern is contiguous.
    """
    if split.pattern.is_contiguous:
        return x
    dim = split.dim + 1
    shape = (parts, split.rows, split.size // split.rows // parts)
    sections, by_rank = [], x.unflatten(split.dim, shape).transpose(split.dim, dim)
    for section in by_rank.split([size // parts for size in split.section_sizes()], dim + 1):
        if split.pattern.zigzag:
            first, second = section.chunk(2, dim + 1)
            section = torch.cat([first, second.flip(dim)], dim)
        sections.append(section.flatten(dim, dim + 1))
    return torch.cat(sections, dim).flatten(split.dim, dim)


def pick(x: Tensor, split: Split, parts: int, index: int) -> Tensor:
    """The shard of rank `index` of `parts`, of the whole `x`. It is a view if the pattern is
    contiguous.
    """
    if split.pattern.is_contiguous:
        return x.narrow(split.dim, *shard_extent(split.size, parts, index))
    length = split.size // parts
    return rank_major(x, split, parts).narrow(split.dim, length * index, length)
