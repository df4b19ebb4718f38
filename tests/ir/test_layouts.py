"""Layouts are interned: equal ones are one object, however they come about."""

from __future__ import annotations

import copy
import pickle

import pytest

from autopar.ir.sharding import (
    PARTIAL,
    REPLICATE,
    RP,
    AxisLayout,
    Pattern,
    Placement,
    S,
    parse_layout,
)


@pytest.mark.parametrize(
    "layout", [RP, S(1), S(2, Pattern((2, 1, 1))), S(0, Pattern(rows=True, zigzag=True))], ids=str
)
def test_equal_layouts_are_one_object(layout):
    assert (
        pickle.loads(pickle.dumps(layout)) is layout
        and copy.deepcopy(layout) is layout
        and copy.copy(layout) is layout
    )
    assert (
        parse_layout(str(layout)) is layout
        and AxisLayout(value=layout.value, grad=layout.grad) is layout
    )
    assert {layout: 1}[parse_layout(str(layout))] == 1


def test_contents_tell_layouts_apart():
    assert AxisLayout(REPLICATE, PARTIAL) is RP and Placement(
        "S", 1, Pattern(zigzag=True)
    ) is Placement("S", 1, Pattern((1,), False, True))
    assert len({S(0), S(1), S(1, Pattern(zigzag=True)), S(1, Pattern((2, 1)))}) == 4
    with pytest.raises(ValueError, match="none of R, P"):
        Placement("S")
