"""Collective times: properties, closed forms, and a step-by-step simulation that moves real chunks over a ring."""

from dataclasses import replace
from math import inf, nan

import autopar_cost_models as cm
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

NVLINK, NIC = cm.Link(400e9, 2e-6, "test", 0.8), cm.Link(50e9, 5e-6, "test", 0.9)
IN_NODE = cm.Topology(64, 1, NVLINK, NIC)
NAMES = list(cm.COLLECTIVES)
sizes = st.floats(0, 1e12)


@st.composite
def groups(draw):
    """(group size, stride, topology) of a group that fits."""
    topology = cm.Topology(
        draw(st.sampled_from([1, 2, 4, 6, 8, 72])), draw(st.integers(1, 16)), NVLINK, NIC
    )
    size, stride = draw(st.integers(1, 64)), draw(st.sampled_from([1, 2, 3, 4, 8, 16]))
    assume(size * stride <= topology.num_devices)
    return size, stride, topology


def simulate_ring(
    size_bytes: float, ranks: int, link: cm.Link, rounds: int
) -> tuple[float, list[list[set[int]]]]:
    """Run `rounds` (1: reduce-scatter, 2: all-reduce) passes of the ring algorithm chunk by chunk.

    Returns the time on a clock per rank, and for each rank and chunk the set of ranks whose data is summed in it.
    """
    held = [[{rank} for _ in range(ranks)] for rank in range(ranks)]
    clock = [0.0] * ranks
    hop_s = link.latency_s + size_bytes / ranks / link.achieved_Bps
    for step in range(rounds * (ranks - 1)):
        reducing = step < ranks - 1
        sent = [
            (rank, (rank - step) % ranks, held[rank][(rank - step) % ranks])
            for rank in range(ranks)
        ]
        arrival = [clock[rank] + hop_s for rank in range(ranks)]
        for rank, chunk, content in sent:
            peer = (rank + 1) % ranks
            held[peer][chunk] = held[peer][chunk] | content if reducing else content
        clock = [max(arrival[rank], arrival[(rank - 1) % ranks]) for rank in range(ranks)]
    return max(clock), held


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16])
def test_ring_against_a_step_by_step_simulation(ranks):
    size_bytes, everyone = 3e8, set(range(ranks))
    time_s, held = simulate_ring(size_bytes, ranks, NVLINK, rounds=1)
    # each rank ends with one complete chunk
    assert all(held[rank][(rank + 1) % ranks] == everyone for rank in range(ranks))
    topology = cm.Topology(ranks, 1, NVLINK, NIC)
    assert cm.reduce_scatter_time_s(size_bytes, ranks, 1, topology) == pytest.approx(
        time_s, rel=1e-12
    )
    time_s, held = simulate_ring(size_bytes, ranks, NVLINK, rounds=2)
    assert all(chunk == everyone for rank in held for chunk in rank)
    assert cm.all_reduce_time_s(size_bytes, ranks, 1, topology) == pytest.approx(time_s, rel=1e-12)


@given(sizes, st.integers(2, 64))
def test_a_single_node_is_a_flat_ring(size_bytes, n):
    topology = cm.Topology(n, 1, NVLINK, NIC)
    bandwidth_s = (n - 1) / n * size_bytes / 320e9
    assert cm.all_reduce_time_s(size_bytes, n, 1, topology) == pytest.approx(
        2 * (bandwidth_s + (n - 1) * 2e-6)
    )
    assert cm.all_gather_time_s(size_bytes, n, 1, topology) == pytest.approx(
        bandwidth_s + (n - 1) * 2e-6
    )
    assert cm.reduce_scatter_time_s(size_bytes, n, 1, topology) == pytest.approx(
        bandwidth_s + (n - 1) * 2e-6
    )
    assert cm.all_to_all_time_s(size_bytes, n, 1, topology) == pytest.approx(
        bandwidth_s / n + (n - 1) * 2e-6
    )


def test_hand_computed_hierarchy():
    """64 ranks on 8 nodes of 8, 1 GB: inside 2 * 7/8 of it at 320 GB/s, outside 2 * 7/8 of an eighth at 45 GB/s; ring or tree outside."""
    topology = cm.Topology(8, 8, NVLINK, NIC)
    inside = 2 * (7 / 8 * 1e9 / 320e9 + 7 * 2e-6)
    outside = 2 * (7 / 8 * 1e9 / 8 / 45e9 + 7 * 5e-6)
    assert cm.all_reduce_time_s(1e9, 64, 1, topology) == pytest.approx(inside + outside)
    tiny = 2 * (7 / 8 * 8 / 320e9 + 7 * 2e-6) + 2 * (3 * 5e-6 + 1 / 45e9)
    assert cm.all_reduce_time_s(8, 64, 1, topology) == pytest.approx(tiny)
    exchanged = 56 * 1e9 / 64**2 / 45e9 + 7 * 2e-6 + 7 * 5e-6
    assert cm.all_to_all_time_s(1e9, 64, 1, topology) == pytest.approx(exchanged)


@given(groups(), sizes, st.floats(0, 1e12), st.sampled_from(NAMES))
def test_monotone_in_size(group, size_bytes, more, name):
    assert (
        cm.collective_time_s(name, size_bytes + more, *group)
        >= cm.collective_time_s(name, size_bytes, *group)
        >= 0
    )


@given(groups(), sizes)
def test_bandwidth_lower_bounds(group, size_bytes):
    """No algorithm beats (n-1)/n of the tensor through the fastest link of each rank, twice for an all-reduce."""
    n = group[0]
    once_s = (n - 1) / n * size_bytes / max(NVLINK.bandwidth_Bps, NIC.bandwidth_Bps)
    slack = 1 - 1e-12
    assert cm.all_reduce_time_s(size_bytes, *group) >= 2 * once_s * slack
    assert cm.all_gather_time_s(size_bytes, *group) >= once_s * slack
    assert cm.reduce_scatter_time_s(size_bytes, *group) >= once_s * slack


@given(groups(), sizes)
def test_all_to_all_lower_bound_by_the_network_interface(group, size_bytes):
    """A rank sends size/n**2 to each rank outside its node: never faster than its own NIC."""
    n = group[0]
    per_node, _ = cm.group_shape(*group)
    assert cm.all_to_all_time_s(size_bytes, *group) >= (
        n - per_node
    ) * size_bytes / n**2 / NIC.bandwidth_Bps * (1 - 1e-12)


@given(groups(), sizes)
def test_all_reduce_is_reduce_scatter_and_all_gather(group, size_bytes):
    parts_s = cm.reduce_scatter_time_s(size_bytes, *group) + cm.all_gather_time_s(
        size_bytes, *group
    )
    whole_s = cm.all_reduce_time_s(size_bytes, *group)
    assert whole_s <= parts_s * (1 + 1e-12)
    # one node, or bandwidth-bound: the ring is used
    if cm.group_shape(*group)[1] == 1 or size_bytes > 1e11:
        assert whole_s == pytest.approx(parts_s)


@given(sizes, st.integers(1, 8), st.sampled_from(NAMES))
def test_a_group_of_one_is_free(size_bytes, stride, name):
    assert cm.collective_time_s(name, size_bytes, 1, stride, IN_NODE) == 0
    assert cm.point_to_point_time_s(size_bytes, 1, stride, IN_NODE) == 0


@given(groups(), sizes, st.sampled_from(NAMES))
def test_crossing_nodes_is_never_faster_in_bandwidth(group, size_bytes, name):
    """Links without latency, since two levels do save latency steps."""
    size, stride, topology = group
    nvlink, nic = replace(NVLINK, latency_s=0), replace(NIC, latency_s=0)
    topology = replace(topology, intra=nvlink, inter=nic)
    inside_s = cm.collective_time_s(
        name, size_bytes, size, stride, cm.Topology(size * stride, 1, nvlink, nic)
    )
    assert cm.collective_time_s(name, size_bytes, size, stride, topology) >= inside_s * (1 - 1e-12)


def test_point_to_point_takes_the_slowest_hop():
    topology = cm.Topology(8, 2, NVLINK, NIC)
    assert cm.point_to_point_time_s(1e8, 2, 4, topology) == pytest.approx(2e-6 + 1e8 / 320e9)
    assert cm.point_to_point_time_s(1e8, 2, 8, topology) == pytest.approx(5e-6 + 1e8 / 45e9)
    assert cm.point_to_point_time_s(1e8, 4, 4, topology) == pytest.approx(5e-6 + 1e8 / 45e9)


@pytest.mark.parametrize("name", ["allreduce", "broadcast", "", "point_to_point", "reduce", None])
def test_an_unknown_collective_raises(name):
    with pytest.raises(ValueError, match="unknown collective"):
        cm.collective_time_s(name, 1.0, 1, 1, IN_NODE)


def test_an_unknown_collective_names_the_nearest():
    with pytest.raises(ValueError, match="did you mean all_reduce"):
        cm.collective_time_s("allreduce", 1.0, 2, 1, IN_NODE)


@pytest.mark.parametrize("wrong", [-1.0, nan, inf, True, "1"])
@pytest.mark.parametrize("name", NAMES)
def test_wrong_sizes_are_refused(name, wrong):
    with pytest.raises(ValueError, match="size_bytes"):
        cm.collective_time_s(name, wrong, 2, 1, IN_NODE)
    with pytest.raises(ValueError, match="size_bytes"):
        cm.point_to_point_time_s(wrong, 2, 1, IN_NODE)


def test_a_token_that_goes_once_to_each_place_sends_less():
    """8 choices on 2 nodes of 8: nearly one copy crosses the network, not the 4 that fall on the other node."""
    topology = cm.Topology(8, 2, NVLINK, NIC)
    size_bytes, choices = 16e9, 8
    all_s = cm.all_to_all_time_s(size_bytes, 16, 1, topology)
    once_s = cm.dispatch_time_s(size_bytes, choices, 16, 1, topology)
    assert cm.distinct(2, 8) == pytest.approx(2 - 2 / 2**8)
    assert once_s < 0.3 * all_s
    assert cm.dispatch_time_s(size_bytes, 1, 16, 1, topology) == pytest.approx(all_s, rel=0.01)
    assert cm.dispatch_time_s(size_bytes, choices, 1, 1, topology) == 0.0


@given(groups(), sizes, st.integers(1, 16))
def test_a_dispatch_is_no_slower_than_copies(group, size_bytes, choices):
    more_s = cm.dispatch_time_s(2 * size_bytes, choices, *group)
    assert more_s >= cm.dispatch_time_s(size_bytes, choices, *group) >= 0
    found = cm.distinct(group[0], choices)
    assert 1 - 1e-9 <= found <= min(group[0], choices) + 1e-9


def test_of_neighbours_on_one_node_one_sends_to_the_next_node():
    node = cm.Topology(8, 4, cm.LINKS["nvlink4"], cm.LINKS["ndr400"], nics_per_node=1)
    for size, stride, senders in ((4, 8, 8), (8, 4, 4), (16, 2, 2), (32, 1, 1), (4, 1, 2)):
        assert cm.neighbour_traffic(size, stride, node).concurrent_groups == senders
