"""Seconds of collectives on a two-level network.

`size_bytes` is always the whole (unsharded) tensor. For an all-gather that is the result; for a
reduce-scatter and an all-reduce, the operand. For an all-to-all it is the tensor whose `group_size`
shards change their dim. A group is `group_size` ranks that lie `stride` apart
(`topology.group_shape`): p ranks on each of N nodes, n = p N. All groups of that tiling run at once
and share the network interfaces of a node. `Traffic` describes other traffic at the same time.

Links of NCCL (kinds nvlink, pcie, network) run NCCL's algorithms with its protocols (`nccl.py`). A
ring passes all ranks, and each of its channels leaves a node through another interface. It moves
(n-1)/n of the tensor at the lower of two rates: the rate inside a node, and that of all interfaces
of the group's ranks. An all-reduce between nodes may use a double binary tree. Reduction in the
switch is used on request.

Plain links follow the alpha-beta model: alpha is the latency of one step, beta the seconds per byte
at the achieved rate. A ring moves (n-1)/n of the tensor over each link in n-1 steps (Thakur,
Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", IJHPCA 19(1),
2005, section 4). This is bandwidth-optimal (Patarasuk and Yuan, JPDC 69(2), 2009). Groups on
several nodes reduce-scatter inside the node, then across nodes on the shards, and gather in reverse
order. A group with one plain and one NCCL link is plain.

If the link inside a node was measured (`Link.curves`), its curve alone decides the price of groups
inside a node.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, log2

from autopar_cost_models import nccl
from autopar_cost_models.checks import fraction, nearest, positive, whole
from autopar_cost_models.curves import curve_s
from autopar_cost_models.echo import shown
from autopar_cost_models.hardware import Link
from autopar_cost_models.topology import Topology, group_shape


@dataclass(frozen=True, slots=True)
class Traffic:
    """Other traffic while a collective runs.

    Attributes:
        concurrent_groups: number of groups, of any axis, that send from one node to others at once,
            including this one. None: the groups of the same tiling, one for each p ranks of the
            node.
        link_share: fraction of each link's rate that other traffic of the same ranks leaves.
        in_switch: whether all-reduces inside one node may use reductions in the switch (NCCL's
            NVLS). Megatron and NeMo turn it off.
    """

    concurrent_groups: int | None = None
    link_share: float = 1.0
    in_switch: bool = False

    def __post_init__(self) -> None:
        if self.concurrent_groups is not None:
            whole("concurrent_groups", self.concurrent_groups)
        object.__setattr__(self, "link_share", fraction("link_share", self.link_share))
        if not isinstance(self.in_switch, bool):
            raise ValueError(f"in_switch={shown(self.in_switch)} must be True or False")


QUIET = Traffic()
IN_SWITCH_RANKS = 5  # NCCL uses NVLS from 5 GPUs on (H200, NCCL 2.27; github.com/stas00/ml-engineering, network/README.md, "SHARP")


def _path(group_size: int, stride: int, topology: Topology, traffic: Traffic) -> nccl.Path:
    """The path of groups of `group_size` ranks that lie `stride` apart: their links, and the rate
    of a ring over them.
    """
    per_node, nodes = group_shape(group_size, stride, topology)
    rates = [topology.intra.achieved_Bps] if per_node > 1 or nodes == 1 else []
    if nodes > 1:
        rates.append(topology.group_inter_Bps(per_node, traffic.concurrent_groups))
    return nccl.Path(
        per_node, nodes, topology.intra, topology.inter, min(rates) * traffic.link_share
    )


def _uses_nccl(path: nccl.Path) -> bool:
    inside = path.ranks_per_node == 1 or path.intra.kind != "plain"
    return inside and (path.nodes == 1 or path.inter.kind != "plain")


def _measured_s(name: str, size_bytes: float, path: nccl.Path, traffic: Traffic) -> float | None:
    """Seconds of the transfer `name` by the link's measured curve. None if the group spans nodes,
    or no curve was measured for its size.
    """
    measured = (
        path.intra.curves.get(name, {}).get(2 if name == "point_to_point" else path.ranks)
        if path.nodes == 1
        else None
    )
    return curve_s(measured, size_bytes / traffic.link_share) if measured is not None else None


def _ring_pass_s(size_bytes: float, ranks: int, latency_s: float, rate_Bps: float) -> float:
    """Seconds of one reduce-scatter or one all-gather on a ring: n-1 steps of `size_bytes` / n."""
    return (ranks - 1) * (latency_s + size_bytes / ranks / rate_Bps)


def _tree_all_reduce_s(size_bytes: float, ranks: int, latency_s: float, rate_Bps: float) -> float:
    """Seconds of an all-reduce by a pipelined double binary tree: latency of twice the depth, then
    up and down at full rate.

    Source: Sanders, Speck, Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and
    scan", Parallel Computing 35, 2009. NCCL uses it between nodes.
    """
    return 2 * (ceil(log2(ranks)) * latency_s + size_bytes / rate_Bps) if ranks > 1 else 0.0


def _rank_rates(path: nccl.Path, topology: Topology, traffic: Traffic) -> tuple[float, float]:
    """(bytes/s inside its node, bytes/s across nodes) available to one rank of the group."""
    inter_Bps = (
        topology.group_inter_Bps(path.ranks_per_node, traffic.concurrent_groups)
        / path.ranks_per_node
    )
    return topology.intra.achieved_Bps * traffic.link_share, inter_Bps * traffic.link_share


def reduce_scatter_time_s(
    size_bytes: float, group_size: int, stride: int, topology: Topology, traffic: Traffic = QUIET
) -> float:
    """Seconds to sum a tensor of `size_bytes` over a group of `group_size` ranks that lie `stride`
    apart, and leave each rank its shard. 0 for one rank. `traffic` describes other traffic at the
    same time.
    """
    return _one_pass_s("reduce_scatter", size_bytes, group_size, stride, topology, traffic)


def _one_pass_s(
    name: str, size_bytes: float, group_size: int, stride: int, topology: Topology, traffic: Traffic
) -> float:
    positive("size_bytes", size_bytes, zero_allowed=True)
    path = _path(group_size, stride, topology, traffic)
    if path.ranks == 1:
        return 0.0
    if (measured_s := _measured_s(name, size_bytes, path, traffic)) is not None:
        return measured_s
    if _uses_nccl(path):
        return nccl.ring_s(size_bytes, 1, path)
    intra_Bps, inter_Bps = _rank_rates(path, topology, traffic)
    inside_s = _ring_pass_s(size_bytes, path.ranks_per_node, topology.intra.latency_s, intra_Bps)
    return inside_s + _ring_pass_s(
        size_bytes / path.ranks_per_node, path.nodes, topology.inter.latency_s, inter_Bps
    )


def all_gather_time_s(
    size_bytes: float, group_size: int, stride: int, topology: Topology, traffic: Traffic = QUIET
) -> float:
    """Seconds to give every rank the whole tensor of `size_bytes` from its shards: as long as a
    reduce-scatter, unless the link has measured curves. The group has `group_size` ranks that lie
    `stride` apart. 0 for one rank. `traffic` describes other traffic at the same time.
    """
    return _one_pass_s("all_gather", size_bytes, group_size, stride, topology, traffic)


def all_reduce_time_s(
    size_bytes: float, group_size: int, stride: int, topology: Topology, traffic: Traffic = QUIET
) -> float:
    """Seconds to sum a tensor of `size_bytes` over a group of `group_size` ranks that lie `stride`
    apart, and give every rank the result. 0 for one rank. `traffic` describes other traffic at the
    same time.

    Across nodes this is the faster of ring and double binary tree. The tree is faster for small
    tensors over many nodes.
    """
    positive("size_bytes", size_bytes, zero_allowed=True)
    path = _path(group_size, stride, topology, traffic)
    if path.ranks == 1:
        return 0.0
    if (measured_s := _measured_s("all_reduce", size_bytes, path, traffic)) is not None:
        return measured_s
    if _uses_nccl(path):
        return min(_nccl_all_reduces_s(size_bytes, path, traffic))
    intra_Bps, inter_Bps = _rank_rates(path, topology, traffic)
    shard_bytes, latency_s = size_bytes / path.ranks_per_node, topology.inter.latency_s
    ring_s = 2 * _ring_pass_s(shard_bytes, path.nodes, latency_s, inter_Bps)
    inter_s = min(ring_s, _tree_all_reduce_s(shard_bytes, path.nodes, latency_s, inter_Bps))
    return (
        2 * _ring_pass_s(size_bytes, path.ranks_per_node, topology.intra.latency_s, intra_Bps)
        + inter_s
    )


def _nccl_all_reduces_s(size_bytes: float, path: nccl.Path, traffic: Traffic) -> list[float]:
    """Seconds of this all-reduce by each algorithm that NCCL can use for it: ring, tree between
    nodes, or reduction in the switch.
    """
    times = [nccl.ring_s(size_bytes, 2, path)]
    if path.nodes > 1:
        times.append(nccl.tree_all_reduce_s(size_bytes, path))
    elif traffic.in_switch and path.intra.multicast_efficiency and path.ranks >= IN_SWITCH_RANKS:
        times.append(
            nccl.in_switch_all_reduce_s(size_bytes / traffic.link_share, path.ranks, path.intra)
        )
    return times


def all_to_all_time_s(
    size_bytes: float, group_size: int, stride: int, topology: Topology, traffic: Traffic = QUIET
) -> float:
    """Seconds to change the sharded dim of a tensor of `size_bytes` (all shards together) over a
    group of `group_size` ranks that lie `stride` apart. 0 for one rank. `traffic` describes other
    traffic at the same time.

    Let p of the n ranks be on each node. Each rank holds size/n and sends size/n**2 to every other
    rank: to p-1 of them inside the node, and to n-p outside. Both links work at the same time.
    Messages to one node travel together, so latency counts nodes, not ranks (PXN of NCCL 2.12, see
    "Doubling all2all Performance with NVIDIA Collective Communication Library 2.12", NVIDIA
    developer blog, 2022).
    """
    positive("size_bytes", size_bytes, zero_allowed=True)
    path = _path(group_size, stride, topology, traffic)
    if path.ranks == 1:
        return 0.0
    if (measured_s := _measured_s("all_to_all", size_bytes, path, traffic)) is not None:
        return measured_s
    intra_Bps, inter_Bps = _rank_rates(path, topology, traffic)
    message_bytes = size_bytes / path.ranks**2
    intra_s = (path.ranks_per_node - 1) * message_bytes / intra_Bps
    inter_s = (path.ranks - path.ranks_per_node) * message_bytes / inter_Bps
    latency_s = (path.ranks_per_node - 1) * topology.intra.latency_s + (
        path.nodes - 1
    ) * topology.inter.latency_s
    return max(intra_s, inter_s) + latency_s + (nccl.base_s() if _uses_nccl(path) else 0.0)


def distinct(places: int, choices: int) -> float:
    """The expected number of distinct places among `choices` that fall on `places` evenly and
    independently.
    """
    whole("places", places)
    whole("choices", choices)
    return places * (1 - (1 - 1 / places) ** choices)


def dispatch_time_s(
    size_bytes: float, choices: int, group_size: int, stride: int, topology: Topology
) -> float:
    """Seconds to send tokens to experts on other ranks, or their results back, each token once to
    each node and from there once to each rank. 0 for one rank.

    `size_bytes` is as for `all_to_all_time_s`: the bytes over all ranks if a token were sent once
    for each of its `choices`. Routing is even. Both links work at the same time (DeepEP,
    github.com/deepseek-ai/DeepEP, README: forwarding from RDMA to NVLink).
    """
    positive("size_bytes", size_bytes, zero_allowed=True)
    path = _path(group_size, stride, topology, QUIET)
    if path.ranks == 1:
        return 0.0
    intra_Bps, inter_Bps = _rank_rates(path, topology, QUIET)
    sent_bytes, per_node, nodes = size_bytes / path.ranks / choices, path.ranks_per_node, path.nodes
    intra_s = sent_bytes * distinct(path.ranks, choices) * (per_node - 1) / per_node / intra_Bps
    inter_s = sent_bytes * distinct(nodes, choices) * (nodes - 1) / nodes / inter_Bps
    latency_s = (per_node - 1) * topology.intra.latency_s + (nodes - 1) * topology.inter.latency_s
    return max(intra_s, inter_s) + latency_s


def neighbour_traffic(group_size: int, stride: int, topology: Topology) -> Traffic:
    """The traffic of groups of `group_size` ranks that lie `stride` apart, in which each rank sends to
    the next one. Of the ranks of a group on one node, one sends to the next node. Messages of the
    other direction, which may be under way at once, are not counted.
    """
    on_node, _ = group_shape(group_size, stride, topology)
    return Traffic(concurrent_groups=ceil(topology.devices_per_node / on_node))


def point_to_point_time_s(
    size_bytes: float, group_size: int, stride: int, topology: Topology, traffic: Traffic = QUIET
) -> float:
    """Seconds to send a message of `size_bytes` from one rank of the group to the next, over the
    slowest hop of the group.

    A group on several nodes has a hop between nodes, through the interface of one rank. By default
    all devices of the node are assumed to send at once; `traffic` can say otherwise. Returns 0 for
    a group of one.
    """
    positive("size_bytes", size_bytes, zero_allowed=True)
    path = _path(group_size, stride, topology, traffic)
    if group_size == 1:
        return 0.0
    if (measured_s := _measured_s("point_to_point", size_bytes, path, traffic)) is not None:
        return measured_s
    nodes = path.nodes
    link = topology.link(crosses_nodes=nodes > 1)
    rate_Bps = (
        topology.group_inter_Bps(1, traffic.concurrent_groups) if nodes > 1 else link.achieved_Bps
    )
    return _message_s(size_bytes, link, rate_Bps * traffic.link_share)


def _message_s(size_bytes: float, link: Link, rate_Bps: float) -> float:
    return (
        link.latency_s + size_bytes / rate_Bps
        if link.kind == "plain"
        else nccl.message_s(size_bytes, link, rate_Bps)
    )


COLLECTIVES: dict[str, Callable[..., float]] = {
    "all_reduce": all_reduce_time_s,
    "all_gather": all_gather_time_s,
    "reduce_scatter": reduce_scatter_time_s,
    "all_to_all": all_to_all_time_s,
}


def collective_time_s(
    name: str,
    size_bytes: float,
    group_size: int,
    stride: int,
    topology: Topology,
    traffic: Traffic = QUIET,
) -> float:
    """Seconds of the collective `name` on a whole tensor of `size_bytes`, over a group of
    `group_size` ranks that lie `stride` apart. 0 for one rank. `traffic` describes other traffic at
    the same time. Raises ValueError if `name` is not in `COLLECTIVES`.
    """
    if name not in COLLECTIVES:
        raise ValueError(f"unknown collective {shown(name)}; {nearest(name, list(COLLECTIVES))}")
    return COLLECTIVES[name](size_bytes, group_size, stride, topology, traffic)
