"""Pieces: what the ranks hold of a tensor, put together, is the tensor, whatever the shards and patterns."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.ir.sharding import CONTIGUOUS, Pattern
from autopar.rewrite.collectives.patterns import Split, pick
from autopar.runtime.state.pieces import Cut, Held, Pieces, read_pieces, whole_pieces, write_pieces

PATTERNS = (
    CONTIGUOUS,
    Pattern((1, 1, 1)),
    Pattern((2, 1)),
    Pattern(zigzag=True),
    Pattern((1, 2), zigzag=True),
)


@st.composite
def shardings(draw):
    """A shape, and (dim, parts, pattern) of each axis that shards it; patterns fit, and contiguous chunks may be uneven or empty."""
    shape = tuple(draw(st.lists(st.sampled_from([1, 5, 12, 24, 36]), max_size=3)))
    extents, axes = [list(shape)], []
    for _ in range(draw(st.integers(0, 2)) if shape else 0):
        dim, parts = draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, 4))
        found = draw(st.sampled_from(PATTERNS))
        if not found.is_contiguous and not all(
            found.divides(extent[dim], parts) and extent[dim] for extent in extents
        ):
            found = CONTIGUOUS
        axes.append((dim, parts, found))
        extents = [
            [
                Split(d, size, found).extent(parts, index) if d == dim else size
                for d, size in enumerate(extent)
            ]
            for extent in extents
            for index in range(parts)
        ]
    return shape, axes


def local_tensors(tensor: torch.Tensor, axes) -> list[tuple[tuple[Cut, ...], torch.Tensor]]:
    """What each rank holds, by the function that shards parameters."""
    found = []
    for indices in product(*(range(parts) for _, parts, _ in axes)):
        local = tensor
        for (dim, parts, pattern), index in zip(axes, indices, strict=True):
            local = pick(local, Split(dim, local.shape[dim], pattern), parts, index)
        found.append(
            (
                tuple(
                    Cut(d, parts, i, pattern)
                    for (d, parts, pattern), i in zip(axes, indices, strict=True)
                ),
                local.clone(),
            )
        )
    return found


@given(shardings())
def test_pieces_of_all_ranks_make_the_tensor(sharding):
    shape, axes = sharding
    tensor = torch.rand(shape)
    result, covered = torch.zeros(shape), torch.zeros(shape)
    ranks = local_tensors(tensor, axes)
    for cuts, local in ranks:
        for offset, view in Held(shape, local, cuts).pieces().boxes():
            box = tuple(
                slice(start, start + size) for start, size in zip(offset, view.shape, strict=True)
            )
            result[box], covered[box] = view, covered[box] + 1
    assert torch.equal(result, tensor) and bool((covered == 1).all())
    for dim in range(len(shape)):
        cut_here = [axis for axis in axes if axis[0] == dim]
        line = torch.arange(shape[dim])
        joined = torch.cat(
            [
                local
                for _, local in local_tensors(
                    line, [(0, parts, pattern) for _, parts, pattern in cut_here]
                )
            ]
        )
        assert torch.equal(Held(shape, tensor, ranks[0][0]).gathered_positions(dim), joined)


def test_from_one_rank_to_disk_and_back(tmp_path):
    tensor, pattern = torch.rand(4, 12), Pattern((1, 1, 1))
    write_pieces(
        tmp_path, {"w": whole_pieces(tensor), "step": whole_pieces(torch.tensor(3.0))}, None
    )
    for cuts, local in local_tensors(tensor, [(1, 2, pattern), (0, 3, CONTIGUOUS)]):
        found, step = torch.zeros_like(local), torch.zeros(())
        read_pieces(
            tmp_path, {"w": Held((4, 12), found, cuts).pieces(), "step": whole_pieces(step)}, None
        )
        assert torch.equal(found, local) and step == 3


def test_a_part_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"local tensor of \(3,\) does not have \[2\] positions"):
        Pieces((4,), torch.zeros(3), (torch.arange(2),))
