"""Collectives against a link-level simulation: every group of a tiling, every message, bytes on each link, shared links divided."""

from collections import Counter
from dataclasses import replace

import autopar_cost_models as cm
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.effort import examples

NVLINK, NIC = cm.Link(400e9, 2e-6, "test", 0.8), cm.Link(50e9, 5e-6, "test", 0.9)
NCCL_NVLINK, NCCL_NIC = replace(NVLINK, kind="nvlink"), replace(NIC, kind="network")
EVEN_NICS = {1: [1, 2, 4], 2: [1, 2, 4], 4: [1, 2, 4, 8], 8: [1, 2, 4, 8, 32], 6: [2, 3, 6]}


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


@st.composite
def tilings(draw, intra=NVLINK, inter=NIC):
    """(groups as lists of ranks, group size, stride, topology): groups inside a node, over whole nodes, or with one rank a node."""
    devices = draw(st.sampled_from(list(EVEN_NICS)))
    stride, nodes = draw(st.sampled_from(divisors(devices))), draw(st.integers(1, 6))
    if draw(st.booleans()):
        size = draw(st.sampled_from(divisors(devices // stride)))
    else:
        per_node = devices // stride if draw(st.booleans()) else 1
        stride = stride if per_node > 1 else devices
        size = per_node * draw(st.sampled_from(divisors(nodes)))
    assume(size > 1)
    topology = cm.Topology(devices, nodes, intra, inter, draw(st.sampled_from(EVEN_NICS[devices])))
    span = size * stride
    groups = [
        [k * span + o + i * stride for i in range(size)]
        for k in range(topology.num_devices // span)
        for o in range(stride)
    ]
    return groups, size, stride, topology


def nic_rate(rank: int, topology: cm.Topology) -> float:
    """Bytes/s of one device's traffic between nodes if every device of its node sends: its NICs, or its share of one."""
    devices, nics = topology.devices_per_node, topology.nics
    if nics >= devices:
        return nics // devices * topology.inter.achieved_Bps
    sharing = [d for d in range(devices) if d * nics // devices == rank % devices * nics // devices]
    return topology.inter.achieved_Bps / len(sharing)


def ring_steps_s(
    members: list[int], bytes_per_step: float, topology: cm.Topology, crosses: bool
) -> float:
    """All steps of one ring pass among `members`, each of which sends `bytes_per_step` to the next in every step."""
    link = topology.link(crosses)
    slowest = max(
        bytes_per_step / (nic_rate(rank, topology) if crosses else link.achieved_Bps)
        for rank in members
    )
    return (len(members) - 1) * (link.latency_s + slowest)


@given(tilings(), st.floats(0, 1e12))
@settings(max_examples=examples(12, 50), deadline=None)
def test_textbook_hierarchy(tiling, size_bytes):
    """Inside each node on parts of 1/p, then one ring for each local rank across nodes on parts of 1/n."""
    groups, size, stride, topology = tiling
    worst = 0.0
    for group in groups:
        nodes: dict[int, list[int]] = {}
        for rank in group:
            nodes.setdefault(rank // topology.devices_per_node, []).append(rank)
        per_node = len(next(iter(nodes.values())))
        inside_s = max(
            ring_steps_s(members, size_bytes / per_node, topology, False)
            for members in nodes.values()
        )
        rails = zip(*nodes.values(), strict=True)
        worst = max(
            worst,
            inside_s
            + max(ring_steps_s(list(rail), size_bytes / size, topology, True) for rail in rails),
        )
    assert cm.reduce_scatter_time_s(size_bytes, size, stride, topology) == pytest.approx(
        worst, rel=1e-9
    )
    assert cm.all_reduce_time_s(size_bytes, size, stride, topology) <= 2 * worst * (1 + 1e-9)


@given(tilings(), st.floats(0, 1e12))
@settings(max_examples=examples(12, 50), deadline=None)
def test_all_to_all(tiling, size_bytes):
    groups, size, stride, topology = tiling
    message, devices = size_bytes / size**2, topology.devices_per_node
    inside, outside = Counter(), Counter()
    for group in groups:
        for source in group:
            for target in group:
                if source != target:
                    (inside if source // devices == target // devices else outside)[source] += (
                        message
                    )
    links_s = [b / topology.intra.achieved_Bps for b in inside.values()] + [
        b / nic_rate(r, topology) for r, b in outside.items()
    ]
    per_node, nodes = cm.group_shape(size, stride, topology)
    latency_s = (per_node - 1) * topology.intra.latency_s + (nodes - 1) * topology.inter.latency_s
    assert cm.all_to_all_time_s(size_bytes, size, stride, topology) == pytest.approx(
        max(links_s) + latency_s, rel=1e-9
    )


@given(tilings(NCCL_NVLINK, NCCL_NIC))
@settings(max_examples=examples(12, 50), deadline=None)
def test_rings_over_many_channels(tiling):
    """NCCL's ring: one channel for each rank on a node, which leaves the node through that rank.  A huge tensor, so no latency counts.

    The simulation adds up what each device sends inside its node and through its NICs.  A channel that leaves through a device spares
    that device's inner link, which the model does not credit: it may be slower by p / (p - 1) where NVLink is the bottleneck.
    """
    groups, size, stride, topology = tiling
    size_bytes, devices = 1e15, topology.devices_per_node
    per_node, nodes = cm.group_shape(size, stride, topology)
    inside, outside = Counter(), Counter()
    for group in groups:
        by_node: dict[int, list[int]] = {}
        for rank in group:
            by_node.setdefault(rank // devices, []).append(rank)
        for channel in range(per_node):
            order = [
                rank
                for members in by_node.values()
                for rank in members[channel + 1 :] + members[: channel + 1]
            ]
            for source, target in zip(order, order[1:] + order[:1], strict=True):
                where = inside if source // devices == target // devices else outside
                where[source] += size_bytes / size / per_node
    step_s = max(
        [b / NVLINK.achieved_Bps for b in inside.values()]
        + [b / nic_rate(r, topology) for r, b in outside.items()]
    )
    simulated_s = (size - 1) * step_s
    time_s = cm.all_gather_time_s(size_bytes, size, stride, topology)
    slack = per_node / (per_node - 1) if nodes > 1 and per_node > 1 else 1.0
    assert simulated_s * (1 - 1e-6) <= time_s <= simulated_s * slack * (1 + 1e-6)
    inner_s = (size - 1) / size * size_bytes / NVLINK.achieved_Bps
    if nodes > 1 and time_s > inner_s * 1.001:  # bound by the network: exact
        assert time_s == pytest.approx(simulated_s, rel=1e-6)


def double_tree(count: int) -> list[dict[int, int]]:
    """Parents in two binary trees over an even number of nodes: the parent of a node has the next higher lowest set bit."""
    parents: dict[int, int] = {}
    for node in range(1, count):
        bit = node & -node
        up = (node ^ bit) | (bit << 1)
        parents[node] = up if up < count else node ^ bit
    return [parents, {count - 1 - node: count - 1 - up for node, up in parents.items()}]


@pytest.mark.parametrize("count", [4, 8, 16, 32, 64, 128])
def test_a_double_binary_tree_sends_twice_the_tensor_and_is_as_deep_as_the_logarithm(count):
    sent = Counter()
    for parents in double_tree(count):
        for node, up in parents.items():
            sent[node] += 0.5  # half the tensor up, summed
            sent[up] += 0.5  # and the result down
        depth = 0
        for node in parents:
            hops, at = 0, node
            while at in parents:
                at, hops = parents[at], hops + 1
            depth = max(depth, hops)
        assert depth <= count.bit_length()
    assert 1.5 <= max(sent.values()) <= 2
    topology = cm.Topology(1, count, NVLINK, NIC)
    tiny_s = cm.all_reduce_time_s(0, count, 1, topology)
    assert tiny_s == pytest.approx(2 * (count.bit_length() - 1) * NIC.latency_s)


@given(st.sampled_from(list(EVEN_NICS)), st.data())
def test_groups_that_send_at_once_never_exceed_the_interfaces_of_a_node(devices, data):
    nics = data.draw(st.sampled_from(EVEN_NICS[devices]))
    ranks, groups = data.draw(st.integers(1, devices)), data.draw(st.integers(1, 16))
    topology = cm.Topology(devices, 2, NVLINK, NIC, nics)
    each = topology.group_inter_Bps(ranks, groups)
    assert each * groups <= nics * NIC.achieved_Bps * (1 + 1e-12)
    assert each <= ranks * max(1, nics / devices) * NIC.achieved_Bps * (1 + 1e-12)
    assert topology.group_inter_Bps(ranks, groups + 1) <= each
    assert topology.group_inter_Bps(ranks) * devices / ranks == pytest.approx(
        nics * NIC.achieved_Bps
    )
    spine = replace(topology, oversubscription=2.0)
    assert spine.group_inter_Bps(ranks, groups) == pytest.approx(each / 2)


def test_one_group_alone_has_its_own_interface():
    jeanzay = cm.node_preset("jeanzay-a100").topology(4)
    nic = jeanzay.inter.achieved_Bps
    assert jeanzay.group_inter_Bps(1, concurrent_groups=1) == nic
    assert jeanzay.group_inter_Bps(1) == nic / 2  # all eight devices send
    assert jeanzay.group_inter_Bps(8) == 4 * nic
    alone = cm.point_to_point_time_s(1e9, 2, 8, jeanzay, cm.Traffic(concurrent_groups=1))
    assert cm.point_to_point_time_s(1e9, 2, 8, jeanzay) == pytest.approx(2 * alone, rel=1e-3)
    p5 = cm.node_preset("aws-p5").topology(2)
    assert p5.group_inter_Bps(1) == 4 * p5.inter.achieved_Bps


@given(
    tilings(NCCL_NVLINK, NCCL_NIC),
    st.floats(0, 1e12),
    st.floats(0, 1e11),
    st.sampled_from(list(cm.COLLECTIVES)),
)
@settings(max_examples=examples(12, 50), deadline=None)
def test_nccl_times_grow_with_size_and_traffic(tiling, size_bytes, more, name):
    _, size, stride, topology = tiling
    time_s = cm.collective_time_s(name, size_bytes, size, stride, topology)
    assert cm.collective_time_s(name, size_bytes + more, size, stride, topology) >= time_s > 0
    shared_s = cm.collective_time_s(
        name, size_bytes, size, stride, topology, cm.Traffic(link_share=0.5)
    )
    assert time_s <= shared_s <= 2 * time_s * (1 + 1e-12)
    crowd = cm.Traffic(concurrent_groups=64)
    assert cm.collective_time_s(name, size_bytes, size, stride, topology, crowd) >= time_s * (
        1 - 1e-12
    )
    once_s = (size - 1) / size * size_bytes / max(NVLINK.bandwidth_Bps, 32 * NIC.bandwidth_Bps)
    if name != "all_to_all":
        assert time_s >= once_s * (2 if name == "all_reduce" else 1)


def test_small_messages_take_the_fast_protocol_and_large_ones_the_wide_one():
    node = cm.node_preset("dgx-h100").topology(1, cm.ISOLATED)
    times = {size: cm.all_reduce_time_s(size, 8, 1, node) for size in (1, 4e6, 1e10)}
    assert times[1] == pytest.approx((6.6 + 14 * 0.6) * 1e-6, rel=1e-3)  # LL
    assert times[1e10] == pytest.approx((8.4 + 14 * 3.4) * 1e-6 + 1.75e10 / 370e9)  # Simple
    assert times[4e6] < 1.75 * 4e6 / 370e9 + (8.4 + 14 * 3.4) * 1e-6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"nics_per_node": 0}, "nics_per_node=0"),
        ({"nics_per_node": 3}, "one must be a multiple of the other"),
        ({"nics_per_node": 2.0}, "nics_per_node=2.0"),
        ({"oversubscription": 0.5}, "at least 1"),
        ({"oversubscription": "2"}, "oversubscription='2'"),
    ],
)
def test_wrong_networks_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        cm.Topology(8, 2, NVLINK, NIC, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"concurrent_groups": 0}, "concurrent_groups=0"),
        ({"link_share": 0}, "link_share=0"),
        ({"link_share": 1.5}, "link_share=1.5"),
        ({"in_switch": 1}, "in_switch=1"),
    ],
)
def test_wrong_traffic_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        cm.Traffic(**arguments)


def test_too_many_ranks_a_node():
    with pytest.raises(ValueError, match="ranks_per_node=9"):
        cm.Topology(8, 2, NVLINK, NIC).group_inter_Bps(9)
