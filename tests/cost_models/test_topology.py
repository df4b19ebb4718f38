"""Where the ranks of a group lie, against plain enumeration of the groups."""

from collections import Counter

import autopar_cost_models as cm
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

INTRA, INTER = cm.LINKS["nvlink4"], cm.LINKS["ndr400"]


def topology(devices_per_node: int, nodes: int) -> cm.Topology:
    return cm.Topology(devices_per_node, nodes, INTRA, INTER)


@pytest.mark.parametrize(
    ("size", "stride", "expected"),
    [
        (1, 1, (1, 1)),
        (8, 1, (8, 1)),
        (4, 1, (4, 1)),
        (2, 4, (2, 1)),
        (4, 2, (4, 1)),
        (16, 1, (8, 2)),
        (64, 1, (8, 8)),
        (8, 8, (1, 8)),
        (4, 16, (1, 4)),
        (16, 4, (2, 8)),
        (4, 4, (2, 2)),
        (32, 2, (4, 8)),
        (3, 1, (1, 3)),
        (6, 1, (1, 6)),  # {6, 7, 8} and {6..11} lie unevenly
    ],
)
def test_groups_on_eight_nodes_of_eight(size, stride, expected):
    assert cm.group_shape(size, stride, topology(8, 8)) == expected


def test_an_nvl72_rack_is_one_node():
    rack = cm.NODES["gb200-nvl72"].topology(2)
    assert cm.group_shape(72, 1, rack) == (72, 1)
    assert cm.group_shape(8, 9, rack) == (8, 1)
    assert cm.group_shape(2, 72, rack) == (1, 2)
    assert cm.group_shape(64, 1, rack) == (
        1,
        64,
    )  # the second group has 8 ranks in one rack and 56 in the other
    assert cm.group_shape(64, 1, cm.NODES["gb200-nvl72"].topology(1)) == (64, 1)


@given(st.integers(1, 12), st.integers(1, 6), st.integers(1, 24), st.integers(1, 24))
def test_against_enumeration(devices_per_node, nodes, size, stride):
    topo = topology(devices_per_node, nodes)
    assume(size * stride <= topo.num_devices)
    shapes = set()
    for first in range(0, topo.num_devices - size * stride + 1, size * stride):
        for offset in range(stride):
            per_node = Counter(
                (first + offset + i * stride) // devices_per_node for i in range(size)
            )
            even = len(set(per_node.values())) == 1
            shapes.add((size // len(per_node), len(per_node)) if even else (1, size))
    assert cm.group_shape(size, stride, topo) == min(shapes)


def test_groups_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="spans 128 ranks; the topology has 64"):
        cm.group_shape(16, 8, topology(8, 8))


@pytest.mark.parametrize("wrong", [0, -1, 1.0, True, "2"])
def test_wrong_counts_are_refused(wrong):
    with pytest.raises(ValueError, match="group size"):
        cm.group_shape(wrong, 1, topology(8, 1))
    with pytest.raises(ValueError, match="group stride"):
        cm.group_shape(2, wrong, topology(8, 1))
    with pytest.raises(ValueError, match="devices_per_node"):
        topology(wrong, 1)
    with pytest.raises(ValueError, match="nodes"):
        topology(8, wrong)


def test_a_link_must_be_a_link():
    with pytest.raises(TypeError, match="intra"):
        cm.Topology(8, 1, 3.0, INTER)
