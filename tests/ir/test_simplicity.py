"""The order of plans by simplicity."""

from __future__ import annotations

from autopar.ir.mesh import MeshShape
from autopar.ir.simplicity import UNSPLIT, USUAL, simplicity_of

ORDERED = (
    simplicity_of(MeshShape(), 1, 0, 1, "none", "none"),
    simplicity_of(MeshShape(dp=8), 1, 0, 1, "none", "none"),
    simplicity_of(MeshShape(dp=8), 1, 0, 1, "none", "none", is_crowded=True),
    simplicity_of(MeshShape(dp=8), 3, 0, 1, "none", "none"),
    simplicity_of(MeshShape(dp=8), 1, 0, 1, "mixed", "none"),
    simplicity_of(MeshShape(dp=4, tp=2), 1, 0, 1, "full", "none"),
    simplicity_of(MeshShape(dp=4, pp=2), 1, 0, 1, "full", "1f1b"),
    simplicity_of(MeshShape(dp=4, pp=2), 1, 0, 1, "full", "gpipe"),
    simplicity_of(MeshShape(dp=4, pp=2), 1, 0, 1, "full", "zero_bubble"),
    simplicity_of(MeshShape(dp=4, pp=2), 1, 0, 1, "mixed", "1f1b"),
    simplicity_of(MeshShape(dp=4, pp=2), 1, 0, 5, "none", "interleaved_1f1b"),
    simplicity_of(MeshShape(dp=16, ep=8, tp=2), 1, 0, 1, "none", "none"),
)


def test_fields_count_in_order():
    assert list(ORDERED) == sorted(ORDERED) and len(set(ORDERED)) == len(ORDERED)


def test_much_simpler_plans_may_take_longer():
    data, tensor = (
        simplicity_of(mesh, 1, 0, 1, "full", "none")
        for mesh in (MeshShape(dp=8), MeshShape(dp=4, tp=2))
    )
    mixed = simplicity_of(MeshShape(dp=4, tp=2), 1, 0, 1, "mixed", "none")
    assert tensor.times_tolerance(data) == mixed.times_tolerance(data) == UNSPLIT
    assert mixed.times_tolerance(tensor) == USUAL
    assert ORDERED[3].times_tolerance(data) == UNSPLIT and data.times_tolerance(ORDERED[3]) == 1
    assert tensor.times_tolerance(tensor) == data.times_tolerance(data) == 1
    usual = ORDERED[6]
    for unusual in (ORDERED[8], ORDERED[9], ORDERED[10]):
        assert unusual.times_tolerance(usual) == USUAL and unusual.times_tolerance(unusual) == 1


def test_groups_of_zero_count_as_an_axis_and_all_experts_on_dp_do_not():
    assert simplicity_of(MeshShape(dp=16), 1, 8, 1, "none", "none").axes == 2
    assert simplicity_of(MeshShape(dp=8, ep=8), 1, 0, 1, "none", "none").axes == 1


def test_words_say_what_is_there():
    words = str(simplicity_of(MeshShape(dp=4, pp=2), 1, 0, 5, "mixed", "interleaved_1f1b", True))
    assert words == (
        "2 axes, over 4 stages a rank, mixed recomputation, interleaved_1f1b, less than 20 % of memory free"
    )
    assert str(ORDERED[0]) == "one device" and str(ORDERED[1]) == "1 axis"
    assert str(ORDERED[3]) == "1 axis, parameters gathered for every pass"
