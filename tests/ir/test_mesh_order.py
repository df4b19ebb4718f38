"""Where the ranks of a mesh lie: every order of its axes."""

from __future__ import annotations

from itertools import permutations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import AutoparError
from autopar.ir.mesh import AXES, MeshShape
from autopar.runtime.ranks.process_groups import ranks_of

ORDERS = ["-".join(axes) for axes in permutations(AXES)]


@st.composite
def meshes(draw) -> MeshShape:
    pp, outer, ep, cp, tp = (draw(st.sampled_from([1, 2, 3])) for _ in AXES)
    return MeshShape(pp=pp, dp=outer * ep, cp=cp, tp=tp, ep=ep, order=draw(st.sampled_from(ORDERS)))


@given(meshes())
def test_ranks_and_coordinates_are_one_map(mesh):
    """Neighbours along the innermost axis are adjacent ranks, a rank has one place, and torch's mesh has it there."""
    ranks, places = ranks_of(mesh), {}
    for place in product(*map(range, mesh.sizes)):
        rank = int(ranks[place])
        assert tuple(mesh.coordinate(rank, axis) for axis in AXES) == place
        places[rank] = place
    assert sorted(places) == list(range(mesh.num_devices))
    active = [axis for axis in mesh.placed if mesh.size(axis) > 1]
    assert [mesh.stride(axis) for axis in active] == sorted(
        (mesh.stride(axis) for axis in active), reverse=True
    )
    assert not active or mesh.stride(active[-1]) == 1


@given(meshes(), st.sets(st.sampled_from(AXES)))
def test_levels_are_the_groups(mesh, axes):
    """The ranks that differ in these axes alone, of every group, are those that the levels lead to."""
    levels = mesh.levels(axes)
    reached = {
        sum(steps)
        for steps in product(*(range(0, size * stride, stride) for size, stride in levels))
    }
    first = {
        rank
        for rank in range(mesh.num_devices)
        if not any(mesh.coordinate(rank, axis) for axis in AXES if axis not in axes)
    }
    assert reached == first
    if not mesh.order and axes == {"dp", "ep", "cp"}:
        assert len(levels) <= 1, "neighbours are one group"


@given(meshes())
def test_an_order_is_kept_in_one_form(mesh):
    assert MeshShape(**mesh.as_dict()) == mesh and hash(MeshShape(**mesh.as_dict())) == hash(mesh)
    assert MeshShape(mesh.pp, mesh.dp, mesh.cp, mesh.tp, mesh.ep, "-".join(mesh.placed)) == mesh
    assert ("order" in str(mesh)) is False and (f"({mesh.order})" in str(mesh)) == bool(mesh.order)


def test_axes_that_are_left_out_stay_outside_their_inner_neighbour():
    assert MeshShape(2, 4, 2, 2, 2, "dp-pp").placed == ("dp", "pp", "ep", "cp", "tp")
    assert (
        MeshShape(2, 4, 2, 2, 2, "tp").order == ""
        and MeshShape(2, 4, 1, 2, 1, "tp-pp").order == "dp-tp-pp"
    )
    assert (
        MeshShape(pp=2, tp=2, order="dp-pp-tp").order == "" == MeshShape(dp=8, order="tp-dp").order
    )


@pytest.mark.parametrize("order", ["dp-dp", "dp-xp", "dp,pp", "-", 3])
def test_what_is_no_order_is_refused(order):
    with pytest.raises(AutoparError, match="order="):
        MeshShape(dp=2, pp=2, order=order)
