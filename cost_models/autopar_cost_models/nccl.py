"""NCCL's own model of its collectives: latency and bandwidth of its protocols on each medium.

The numbers come from NCCL's src/graph/tuning.cc (2026: `ncclTunerConstantsDefaults` and
`ncclTopoTuneModel`), by which NCCL chooses. A protocol trades latency for bandwidth. LL sends 4
bytes of flag with 4 of data, LL128 8 with 120, and Simple synchronizes with fences. The time of a
collective is the minimum over protocols and algorithms, so the effective bandwidth rises with size.

    ring   base + steps inside nodes * latency inside + steps between nodes * latency between + bytes / (rate * share of the protocol)
    tree   base + 2 * (ranks per node - 1) * latency inside + 2 * log2(nodes) * latency between + 2 * bytes / (rate * share)

Latencies below are in microseconds as (LL, LL128, Simple). They scale with a link's `latency_s` if
that differs from NCCL's. Left out: caps of LL by processor, tree corrections for middle sizes,
CollNet and PAT.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, log2

from autopar_cost_models.hardware import Link

_MICRO = 1e-6
_PROTOCOLS = ("LL", "LL128", "Simple")
_RING_BASE = (6.6, 14.0, 8.4)
_TREE_BASE = (6.8, 14.0, 8.4)
_RING_STEP = {"nvlink": (0.6, 1.9, 3.4), "pcie": (1.0, 2.5, 5.7), "network": (2.7, 4.0, 14.0)}
_TREE_STEP = {"nvlink": (0.6, 1.25, 4.0), "pcie": (1.0, 1.9, 4.0), "network": (5.0, 8.5, 14.0)}
_RING_SHARE = (0.5, 0.92, 1.0)
_TREE_SHARE = (0.92 / 3.8, 0.92 * 120 / 128, 0.92)
_POST = (
    1.0,
    1.0,
    3.0,
)  # getNetOverhead on Intel hosts: a step of a ring over several nodes takes at least this
_NVLS_US = 25.0  # hwLatencies, NVLS


@dataclass(frozen=True, slots=True)
class Path:
    """The path of one group: ranks on each node, number of nodes, both links, and the bytes/s of a
    ring over them with the Simple protocol.
    """

    ranks_per_node: int
    nodes: int
    intra: Link
    inter: Link
    rate_Bps: float

    @property
    def ranks(self) -> int:
        """Number of ranks of the group, on all nodes."""
        return self.ranks_per_node * self.nodes

    def protocols(self) -> list[int]:
        """Indices of the protocols that this path can use. LL128 needs NVLink inside the node
        (`ncclTopoTuneModel`: typeIntra <= PATH_NVB).
        """
        return [0, 2] if self.ranks_per_node > 1 and self.intra.kind == "pcie" else [0, 1, 2]

    def step_us(self, table: Mapping[str, tuple[float, ...]], link: Link, protocol: int) -> float:
        """Microseconds of one step over a link of a protocol, given by its index in (LL, LL128,
        Simple). `table` has NCCL's latencies by link kind.
        """
        return table[link.kind][protocol] * link.latency_s / (_RING_STEP[link.kind][1] * _MICRO)


def ring_s(size_bytes: float, passes: int, path: Path) -> float:
    """Seconds of `passes` passes around the ring with the fastest protocol: one pass for an
    all-gather or reduce-scatter, two for an all-reduce.
    """
    between = passes * (path.nodes - 1)
    inside = passes * (path.ranks - 1) - between
    moved_bytes = passes * (path.ranks - 1) / path.ranks * size_bytes
    # tuning.cc: with one rank a node latencies are fully exposed
    network = _TREE_STEP if path.ranks_per_node == 1 else _RING_STEP
    times = []
    for protocol in path.protocols():
        us = _RING_BASE[protocol]
        if inside:
            step_us = path.step_us(_RING_STEP, path.intra, protocol)
            us += inside * (max(step_us, _POST[protocol]) if path.nodes > 1 else step_us)
        if between:
            us += between * path.step_us(network, path.inter, protocol)
        times.append(us * _MICRO + moved_bytes / (path.rate_Bps * _RING_SHARE[protocol]))
    return min(times)


def tree_all_reduce_s(size_bytes: float, path: Path) -> float:
    """Seconds of an all-reduce by a double binary tree between nodes and chains inside them, with
    the fastest protocol. The path must have more than one node.
    """
    times = []
    for protocol in path.protocols():
        us = _TREE_BASE[protocol] + 2 * ceil(log2(path.nodes)) * path.step_us(
            _TREE_STEP, path.inter, protocol
        )
        if path.ranks_per_node > 1:
            us += 2 * (path.ranks_per_node - 1) * path.step_us(_TREE_STEP, path.intra, protocol)
        times.append(us * _MICRO + 2 * size_bytes / (path.rate_Bps * _TREE_SHARE[protocol]))
    return min(times)


def in_switch_all_reduce_s(size_bytes: float, ranks: int, link: Link) -> float:
    """Seconds of an all-reduce inside the NVLink switch (NVLS). Each GPU sends its tensor once and
    its share of the result, and receives as much: size * (1 + 1/n) bytes in each direction.
    """
    return _NVLS_US * _MICRO + size_bytes * (1 + 1 / ranks) / (
        link.bandwidth_Bps * link.multicast_efficiency
    )


def message_s(size_bytes: float, link: Link, rate_Bps: float) -> float:
    """Seconds of one point-to-point message at `rate_Bps`, priced as a ring of one step, by the
    faster of LL and Simple.
    """
    return min(
        (
            _RING_BASE[p]
            + _RING_STEP[link.kind][p] * link.latency_s / (_RING_STEP[link.kind][1] * _MICRO)
        )
        * _MICRO
        + size_bytes / (rate_Bps * _RING_SHARE[p])
        for p in (0, 2)
    )


def base_s(protocol: str = "Simple") -> float:
    """Start-up seconds of any collective under this protocol."""
    return _RING_BASE[_PROTOCOLS.index(protocol)] * _MICRO
