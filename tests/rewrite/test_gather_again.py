"""Inputs of linear layers that are kept as shards: autograd gets back the very tensors that it would have kept."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.ir.mesh import AXES
from autopar.rewrite.collectives.axes import AxisGroup, active_axes
from autopar.rewrite.lowerings.kept_shards import (
    GatheredAgain,
    Reading,
    gathered_again,
    keeping_shards,
    reading_as,
    unpack,
)
from autopar.rewrite.lowerings.late_gradients import late_gradient, late_linear

ALONE = {axis: AxisGroup(axis, 1) for axis in AXES}
"""Groups of one rank, whose shard is the whole."""


@given(shape=st.lists(st.integers(1, 4), min_size=1, max_size=3), cut=st.booleans(), data=st.data())
def test_views_come_back_as_they_were(shape, cut, data):
    base = torch.randn(7 + torch.Size(shape).numel(), dtype=torch.float64)
    whole = base[7:].view(shape)
    with active_axes(ALONE):
        again = (
            gathered_again(whole, None, "tp")
            if cut
            else gathered_again(whole, whole.clone(), "tp", 0, shape[0])
        )
    views = [whole, whole.reshape(-1), whole.transpose(0, -1), whole[..., :1], whole[-1:]]
    chosen = data.draw(st.lists(st.sampled_from(views), min_size=1, max_size=4))
    kept = [again.pack(view) for view in chosen]
    assert not any(isinstance(one, torch.Tensor) for one in kept)
    others = [base, base[:7], base[6:8], torch.randn(3)]
    assert all(again.pack(other) is other for other in others)
    for view, one in zip(chosen, kept, strict=True):
        found = unpack(one)
        assert found.shape == view.shape and torch.equal(found, view)
    with pytest.raises(RuntimeError, match="second time"):
        unpack(kept[0])


@given(
    rows=st.lists(st.integers(0, 3), min_size=1, max_size=2),
    late=st.booleans(),
    bias=st.booleans(),
    frozen=st.sampled_from(["", "x", "weight"]),
)
def test_linear_layers_have_the_same_gradients(rows, late, bias, frozen):
    def leaf(*shape, name=""):
        return torch.randn(shape, dtype=torch.float64, requires_grad=name != frozen)

    x, first, second = leaf(*rows, 3, name="x"), leaf(4, 3, name="weight"), leaf(2, 3)
    b = leaf(4) if bias else None
    leaves = [t for t in (x, first, second, b) if t is not None and t.requires_grad]

    def run(again: GatheredAgain | None, value: torch.Tensor) -> torch.Tensor:
        if late:
            one = late_linear(value, first, late_gradient(first), b, again=again)
            other = late_linear(value, second, late_gradient(second), again=again)
        else:
            linear = keeping_shards(torch.nn.functional.linear)
            one, other = linear(again, value, first, b), linear(again, value, second)
        return one.sin().sum() + other.cos().sum()

    with active_axes(ALONE):
        whole = x * 2
        found = torch.autograd.grad(run(gathered_again(whole, None, "tp"), whole), leaves)
    for one, other in zip(found, torch.autograd.grad(run(None, x * 2), leaves), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-14, atol=1e-14)


def test_nothing_stays_after_backward():
    """Not even while the graph lives, as autograd frees what it keeps itself."""
    weight = torch.randn(4, 3, requires_grad=True)
    with active_axes(ALONE):
        whole = torch.randn(5, 3, requires_grad=True) * 2
        again = gathered_again(whole, None, "tp")
        loss = late_linear(whole, weight, late_gradient(weight), again=again).sum()
        loss.backward()
    assert again._shard is None and again._whole is None and again._started is None
    assert loss.grad_fn is not None


def test_nothing_is_kept_without_gradients():
    with active_axes(ALONE), torch.no_grad():
        assert gathered_again(torch.randn(2, 2), None, "tp") is None


def test_a_node_that_runs_twice_reads_twice():
    """In the first part of a backward it gets the shape alone, or the value without using it up."""
    with active_axes(ALONE):
        whole = torch.randn(5, 3) * 2
        again = gathered_again(whole, None, "tp")
        kept = again.pack(whole[:4])
        with reading_as(Reading.SHAPE):
            found = unpack(kept)
        assert found.shape == (4, 3) and found.dtype == whole.dtype and again._started is None
        with reading_as(Reading.EARLIER):
            assert torch.equal(unpack(kept), whole[:4])
        assert again._whole is not None
        assert torch.equal(unpack(kept), whole[:4])
        with pytest.raises(RuntimeError, match="second time"):
            unpack(kept)
