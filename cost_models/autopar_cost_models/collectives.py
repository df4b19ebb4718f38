"""Times of collectives on a two-level network: hierarchical alpha-beta models.

alpha = latency of one step, beta = seconds per byte at the achieved link rate.  `size_bytes` is always the whole (unsharded) tensor:
the result of an all-gather, the operand of a reduce-scatter, the tensor that is all-reduced, and for an all-to-all the tensor whose
`group_size` shards change their dim.  A group is `group_size` ranks that lie `stride` apart (`topology.group_shape`): p ranks on each
of N nodes, n = p N.  All groups of that tiling run at once; each device has its own links, so they do not slow each other down.

A ring moves (n-1)/n of the tensor over each link in n-1 steps (Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication
Operations in MPICH", IJHPCA 19(1), 2005, section 4; Patarasuk and Yuan, JPDC 69(2), 2009, show that it is bandwidth-optimal).
Groups on several nodes reduce-scatter inside the node, then across nodes on the shards, and gather back in reverse order.
NCCL's hardware offload (NVLink SHARP) is not modelled.  Kernel launch is the caller's.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, log2

from autopar_cost_models.checks import nearest, positive
from autopar_cost_models.hardware import Link
from autopar_cost_models.topology import Topology, group_shape


def _ring_pass_s(size_bytes: float, ranks: int, link: Link) -> float:
    """One reduce-scatter or one all-gather of a tensor of `size_bytes` on a ring: n-1 steps of size/n."""
    return (ranks - 1) * (link.latency_s + size_bytes / ranks / link.achieved_Bps)


def _tree_all_reduce_s(size_bytes: float, ranks: int, link: Link) -> float:
    """Double binary tree, pipelined: twice the depth in latency, up and down at full rate (Sanders, Speck, Träff, "Two-tree algorithms
    for full bandwidth broadcast, reduction and scan", Parallel Computing 35, 2009; NCCL uses it between nodes)."""
    return 2 * (ceil(log2(ranks)) * link.latency_s + size_bytes / link.achieved_Bps) if ranks > 1 else 0.0


def reduce_scatter_time_s(size_bytes: float, group_size: int, stride: int, topology: Topology) -> float:
    """Seconds to sum a tensor of `size_bytes` over the group and leave each rank its shard."""
    positive("size_bytes", size_bytes, zero_allowed=True)
    per_node, nodes = group_shape(group_size, stride, topology)
    return _ring_pass_s(size_bytes, per_node, topology.intra) + _ring_pass_s(size_bytes / per_node, nodes, topology.inter)


def all_gather_time_s(size_bytes: float, group_size: int, stride: int, topology: Topology) -> float:
    """Seconds to give every rank the whole tensor of `size_bytes` from its shards: a reduce-scatter run backwards."""
    return reduce_scatter_time_s(size_bytes, group_size, stride, topology)


def all_reduce_time_s(size_bytes: float, group_size: int, stride: int, topology: Topology) -> float:
    """Seconds to sum a tensor of `size_bytes` over the group, the whole result on every rank.

    Across nodes the faster of ring and double binary tree is used: the tree wins on small tensors over many nodes.
    """
    positive("size_bytes", size_bytes, zero_allowed=True)
    per_node, nodes = group_shape(group_size, stride, topology)
    shard_bytes = size_bytes / per_node
    inter_s = min(2 * _ring_pass_s(shard_bytes, nodes, topology.inter), _tree_all_reduce_s(shard_bytes, nodes, topology.inter))
    return 2 * _ring_pass_s(size_bytes, per_node, topology.intra) + inter_s


def all_to_all_time_s(size_bytes: float, group_size: int, stride: int, topology: Topology) -> float:
    """Seconds to change which dim of a tensor of `size_bytes` (all shards together) is sharded over the group.

    Each rank holds size/n and sends size/n**2 to every other rank: to p-1 of them inside the node, to n-p outside.  Both links work at
    the same time.  Messages to one node travel together, so latency counts nodes, not ranks (PXN of NCCL 2.12, see "Doubling
    all2all Performance with NVIDIA Collective Communication Library 2.12", NVIDIA developer blog, 2022).
    """
    positive("size_bytes", size_bytes, zero_allowed=True)
    per_node, nodes = group_shape(group_size, stride, topology)
    message_bytes = size_bytes / group_size**2
    intra_s = (per_node - 1) * message_bytes / topology.intra.achieved_Bps
    inter_s = (group_size - per_node) * message_bytes / topology.inter.achieved_Bps
    latency_s = (per_node - 1) * topology.intra.latency_s + (nodes - 1) * topology.inter.latency_s
    return max(intra_s, inter_s) + latency_s


def point_to_point_time_s(size_bytes: float, group_size: int, stride: int, topology: Topology) -> float:
    """Seconds to send a message of `size_bytes` from one rank of the group to the next, over the slowest hop of the group.

    A group that reaches several nodes has a hop between nodes.  No hop, no time: 0 for a group of one.
    """
    positive("size_bytes", size_bytes, zero_allowed=True)
    _, nodes = group_shape(group_size, stride, topology)
    link = topology.link(crosses_nodes=nodes > 1)
    return link.latency_s + size_bytes / link.achieved_Bps if group_size > 1 else 0.0


COLLECTIVES: dict[str, Callable[[float, int, int, Topology], float]] = {
    "all_reduce": all_reduce_time_s,
    "all_gather": all_gather_time_s,
    "reduce_scatter": reduce_scatter_time_s,
    "all_to_all": all_to_all_time_s,
}


def collective_time_s(name: str, size_bytes: float, group_size: int, stride: int, topology: Topology) -> float:
    """Seconds of the collective `name` on a whole tensor of `size_bytes`.  ValueError for a name that is not in `COLLECTIVES`."""
    if name not in COLLECTIVES:
        raise ValueError(f"unknown collective {name!r}; {nearest(str(name), list(COLLECTIVES))}")
    return COLLECTIVES[name](size_bytes, group_size, stride, topology)
