"""Nodes of devices: a two-level network, and the catalogue of node presets.

A *node* here is a domain of the fast link (an NVLink domain: 8 GPUs in a DGX, 72 in an NVL72 rack of 4-GPU trays), not a host.
Ranks are numbered node by node.  Each device has its own network interface (rail), as in every DGX.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import gcd

from autopar_cost_models import hardware as hw
from autopar_cost_models.checks import nearest, text, whole


@dataclass(frozen=True, slots=True)
class Topology:
    """`nodes` nodes of `devices_per_node` devices; `intra` connects devices of a node, `inter` devices of different nodes."""

    devices_per_node: int
    nodes: int
    intra: hw.Link
    inter: hw.Link

    def __post_init__(self) -> None:
        whole("devices_per_node", self.devices_per_node)
        whole("nodes", self.nodes)
        for name in ("intra", "inter"):
            if not isinstance(getattr(self, name), hw.Link):
                raise TypeError(f"{name}={getattr(self, name)!r} must be a Link")

    @property
    def num_devices(self) -> int:
        return self.devices_per_node * self.nodes

    def link(self, crosses_nodes: bool) -> hw.Link:
        return self.inter if crosses_nodes else self.intra


@dataclass(frozen=True, slots=True)
class NodePreset:
    """A node one can buy.  `devices_per_host` counts the devices that share an operating system (a tray of an NVL72 rack has 4)."""

    name: str
    device: hw.Device
    devices_per_node: int
    intra: hw.Link
    inter: hw.Link
    devices_per_host: int

    def __post_init__(self) -> None:
        text("preset name", self.name)
        whole("devices_per_node", self.devices_per_node)
        whole("devices_per_host", self.devices_per_host)

    def topology(self, nodes: int) -> Topology:
        return Topology(self.devices_per_node, nodes, self.intra, self.inter)


NODES: dict[str, NodePreset] = {
    preset.name: preset
    for preset in (
        NodePreset("dgx-a100-40g", hw.DEVICES["a100-40g"], 8, hw.NVLINK3, hw.HDR200, 8),
        NodePreset("dgx-a100-80g", hw.DEVICES["a100-80g"], 8, hw.NVLINK3, hw.HDR200, 8),
        NodePreset("dgx-h100", hw.DEVICES["h100"], 8, hw.NVLINK4, hw.NDR400, 8),
        NodePreset("dgx-h200", hw.DEVICES["h200"], 8, hw.NVLINK4, hw.NDR400, 8),
        NodePreset("dgx-b200", hw.DEVICES["b200"], 8, hw.NVLINK5, hw.NDR400, 8),
        NodePreset("gb200-nvl72", hw.DEVICES["gb200"], 72, hw.NVLINK5, hw.NDR400, 4),
    )
}
"""Node presets by name."""


def node_preset(name: str) -> NodePreset:
    """The preset `name`.  ValueError with the nearest names if there is none."""
    if name not in NODES:
        raise ValueError(f"unknown node preset {name!r}; {nearest(str(name), list(NODES))}")
    return NODES[name]


def home_of(device_name: str) -> NodePreset | None:
    """The preset that is built of this catalogue device, or None (the CPU has none)."""
    return next((p for p in NODES.values() if p.device.name == device_name), None)


@lru_cache(maxsize=None, typed=True)  # typed: 1.0 and True equal 1 and would slip past the checks
def group_shape(size: int, stride: int, topology: Topology) -> tuple[int, int]:
    """(ranks per node, nodes) of the groups of `size` ranks that lie `stride` apart; their product is `size`.

    Ranks are tiled by such groups: group (k, o) is {k * size * stride + o + i * stride}.  If the groups lie differently, the answer is
    the slowest one's, that with the fewest ranks per node.  A group that lies unevenly on its nodes is (1, size): one flat ring, all of
    whose hops are priced as inter-node hops, since the slowest hop sets the pace of a ring.
    Raises ValueError if no group fits on the topology.
    """
    whole("group size", size)
    whole("group stride", stride)
    per_node, span = topology.devices_per_node, size * stride
    if span > topology.num_devices:
        raise ValueError(f"a group of {size} ranks {stride} apart spans {span} ranks; the topology has {topology.num_devices} devices")
    if size == 1:
        return 1, 1
    if stride % per_node == 0:
        return 1, size
    offsets = range(1) if per_node % stride == 0 else range(min(stride, per_node))
    period = per_node // gcd(span, per_node)
    bases = (k * span + o for k in range(min(period, topology.num_devices // span)) for o in offsets)
    ranks = min(_ranks_per_node(base, size, stride, per_node) for base in bases)
    return ranks, size // ranks


def _ranks_per_node(base: int, size: int, stride: int, per_node: int) -> int:
    """Ranks that one group has on each of its nodes, or 1 if that differs between nodes."""
    counts: dict[int, int] = {}
    for i in range(size):
        node = (base + i * stride) // per_node
        counts[node] = counts.get(node, 0) + 1
    distinct = set(counts.values())
    return distinct.pop() if len(distinct) == 1 else 1
