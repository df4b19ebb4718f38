"""Nodes of devices: a two-level network, how its interfaces are shared, and the catalogue of node
presets.

A *node* is a domain of the fast link, not a host: an NVLink domain has 8 GPUs in a DGX, and 72 in
an NVL72 rack of 4-GPU trays. Ranks are numbered node by node.

A node has `nics_per_node` network interfaces (NICs), with its devices spread evenly over them. Two
devices share a NIC if there are half as many NICs; a device has several if there are more. A group
with p ranks on a node sends through the NICs of those ranks. All groups that send from a node at
once share its NICs (`Topology.group_inter_Bps`).

Rails: in a rail-optimized network NIC i of every node is attached to leaf switch i, and collectives
stay on their rails. NCCL's rings and trees do, and by PXN its all-to-all ("Doubling all2all
Performance with NVIDIA Collective Communication Library 2.12", NVIDIA developer blog, 2022). Wang
et al., "Rail-only: A Low-Cost High-Performance Network for Training LLMs with Trillion Parameters",
arXiv:2307.12169, find that language models need no more. `oversubscription` is then 1.

If the NICs of a node share a leaf, traffic that leaves the node crosses the spine.
`oversubscription` is then the leaf's downlink / uplink bandwidth (Llama 3's clusters: 7 between
pods of 3072 GPUs, arXiv:2407.21783, 3.3.1).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd

from autopar_cost_models import catalogue as cat
from autopar_cost_models.checks import nearest, positive, text, whole
from autopar_cost_models.echo import shown
from autopar_cost_models.fitted import FITTED, FittedConstants
from autopar_cost_models.hardware import MEASURED_TRANSFERS, Device, Link


@dataclass(frozen=True, slots=True)
class Topology:
    """`nodes` nodes of `devices_per_node` devices. `intra` connects devices of a node, `inter`
    devices of different nodes.

    `inter` describes one network interface; `nics_per_node=None` means one for each device.
    `oversubscription` divides the rate between nodes: the bandwidth below over that above a leaf
    switch, at least 1.
    """

    devices_per_node: int
    nodes: int
    intra: Link
    inter: Link
    nics_per_node: int | None = None
    oversubscription: float = 1.0

    def __post_init__(self) -> None:
        whole("devices_per_node", self.devices_per_node)
        whole("nodes", self.nodes)
        for name in ("intra", "inter"):
            if not isinstance(getattr(self, name), Link):
                raise TypeError(f"{name}={shown(getattr(self, name))} must be a Link")
        if self.nics_per_node is not None:
            fewer, more = sorted(
                (whole("nics_per_node", self.nics_per_node), self.devices_per_node)
            )
            if more % fewer:
                raise ValueError(
                    f"nics_per_node={self.nics_per_node} and devices_per_node={self.devices_per_node}: one must be a multiple of the "
                    "other, so that devices share network interfaces evenly"
                )
        object.__setattr__(
            self, "oversubscription", positive("oversubscription", self.oversubscription)
        )
        if self.oversubscription < 1:
            raise ValueError(
                f"oversubscription={shown(self.oversubscription)} must be at least 1: bandwidth below / above the leaf switch"
            )
        if self.intra.curves:
            self._check_curves()

    def _check_curves(self) -> None:
        """Raise ValueError unless every group size that divides a node was measured, so that no
        collective falls back to a formula unnoticed.
        """
        sizes = [
            ranks
            for ranks in range(2, self.devices_per_node + 1)
            if self.devices_per_node % ranks == 0
        ]
        for name in MEASURED_TRANSFERS:
            measured = self.intra.curves.get(name, {})
            wanted = [2] if sizes and name == "point_to_point" else sizes
            missing = [ranks for ranks in wanted if ranks not in measured]
            if missing:
                raise ValueError(
                    f"intra_curves: {name} has no curve for groups of {', '.join(map(str, missing))} of {self.devices_per_node} devices a "
                    f"node (it has {', '.join(map(str, measured)) or 'none'}); run autopar calibrate --nproc {self.devices_per_node}"
                )

    @property
    def num_devices(self) -> int:
        """Devices of all nodes together."""
        return self.devices_per_node * self.nodes

    @property
    def nics(self) -> int:
        """Number of network interfaces of a node."""
        return self.devices_per_node if self.nics_per_node is None else self.nics_per_node

    def link(self, crosses_nodes: bool) -> Link:
        """The link between nodes if `crosses_nodes`, otherwise the link inside a node."""
        return self.inter if crosses_nodes else self.intra

    def group_inter_Bps(self, ranks_per_node: int, concurrent_groups: int | None = None) -> float:
        """Achieved bytes/s, per direction, between nodes for one group with `ranks_per_node` ranks
        on each node.

        This is the rate of the NICs of its ranks, limited to its share of all NICs.
        `concurrent_groups` is the number of groups, of any axis and including this one, that send
        from the node at once. None: all devices send, in groups of this shape.
        """
        devices, nics = self.devices_per_node, self.nics
        if whole("ranks_per_node", ranks_per_node) > devices:
            raise ValueError(
                f"ranks_per_node={ranks_per_node} is more than devices_per_node={devices}"
            )
        groups = (
            devices / ranks_per_node
            if concurrent_groups is None
            else whole("concurrent_groups", concurrent_groups)
        )
        own = min(nics, ranks_per_node * max(1, nics // devices))
        return self.inter.achieved_Bps * min(own, nics / groups) / self.oversubscription

    def calibrated(self, fitted: FittedConstants) -> Topology:
        """This topology with the efficiencies of its links multiplied by the fitted ones."""
        intra = replace(self.intra, efficiency=self.intra.efficiency * fitted.intra_efficiency)
        inter = replace(self.inter, efficiency=self.inter.efficiency * fitted.inter_efficiency)
        return replace(self, intra=intra, inter=inter)


@dataclass(frozen=True, slots=True)
class NodePreset:
    """A node one can buy or rent. `devices_per_host` counts the devices that share an operating
    system (a tray of an NVL72 rack has 4). `nics_per_node=None` means one for each device.

    A preset that is `by_name` is taken only where it is named: it is no device's home.
    """

    name: str
    device: Device
    devices_per_node: int
    intra: Link
    inter: Link
    devices_per_host: int
    nics_per_node: int | None = None
    by_name: bool = False

    def __post_init__(self) -> None:
        text("preset name", self.name)
        whole("devices_per_node", self.devices_per_node)
        whole("devices_per_host", self.devices_per_host)

    def topology(self, nodes: int, fitted: FittedConstants = FITTED) -> Topology:
        """The topology of `nodes` nodes of this kind, with the links' efficiencies under these
        fitted constants.
        """
        return Topology(
            self.devices_per_node, nodes, self.intra, self.inter, self.nics_per_node
        ).calibrated(fitted)


_GPU = cat.DEVICES
_OFFERED = (
    NodePreset("aws-p3dn", _GPU["v100-32g"], 8, cat.NVLINK2, cat.EFA100, 8, 1),
    NodePreset("aws-p4de", _GPU["a100-80g"], 8, cat.NVLINK3, cat.EFA100, 8, 4),
    NodePreset("aws-p5e", _GPU["h200"], 8, cat.NVLINK4, cat.EFA100, 8, 32),
    NodePreset("aws-p5en", _GPU["h200"], 8, cat.NVLINK4, cat.EFA200, 8, 16),
    NodePreset("aws-p6-b200", _GPU["b200"], 8, cat.NVLINK5, cat.EFA400, 8),
    NodePreset("aws-g6", _GPU["l4"], 8, cat.PCIE4, cat.CLOUD_ETHERNET100, 8, 1),
    NodePreset("gcp-a2-high", _GPU["a100-40g"], 8, cat.NVLINK3, cat.CLOUD_ETHERNET100, 8, 1),
    NodePreset("gcp-a2-ultra", _GPU["a100-80g"], 8, cat.NVLINK3, cat.CLOUD_ETHERNET100, 8, 1),
    NodePreset("gcp-a3-high", _GPU["h100"], 8, cat.NVLINK4, cat.TCPX200, 8, 4),
    NodePreset("gcp-a3-mega", _GPU["h100"], 8, cat.NVLINK4, cat.TCPX200, 8),
    NodePreset("gcp-a3-ultra", _GPU["h200"], 8, cat.NVLINK4, cat.NDR400, 8),
    NodePreset("gcp-a4-high", _GPU["b200"], 8, cat.NVLINK5, cat.NDR400, 8),
    NodePreset("azure-nd-a100-v4", _GPU["a100-40g"], 8, cat.NVLINK3, cat.HDR200, 8),
    NodePreset("azure-ndm-a100-v4", _GPU["a100-80g"], 8, cat.NVLINK3, cat.HDR200, 8),
    NodePreset("azure-nd-h100-v5", _GPU["h100"], 8, cat.NVLINK4, cat.NDR400, 8),
    NodePreset("azure-nd-h200-v5", _GPU["h200"], 8, cat.NVLINK4, cat.NDR400, 8),
    NodePreset("azure-nd-mi300x-v5", _GPU["mi300x"], 8, cat.INFINITY_FABRIC, cat.NDR400, 8),
    # two cards with a bridge; between pairs of one host there is PCIe
    NodePreset("a40-pair", _GPU["a40"], 2, cat.NVLINK3_PAIR, cat.PCIE4, 2),
    NodePreset("a6000-pair", _GPU["a6000"], 2, cat.NVLINK3_PAIR, cat.PCIE4, 2),
    NodePreset("rtx3090-pair", _GPU["rtx3090"], 2, cat.NVLINK3_PAIR, cat.PCIE4, 2),
    NodePreset("a100-pcie-80g-pair", _GPU["a100-pcie-80g"], 2, cat.NVLINK_PCIE_PAIR, cat.PCIE4, 2),
    NodePreset("h100-pcie-pair", _GPU["h100-pcie"], 2, cat.NVLINK_PCIE_PAIR, cat.PCIE5, 2),
    NodePreset("h100-nvl-pair", _GPU["h100-nvl"], 2, cat.NVLINK_PCIE_PAIR, cat.PCIE5, 2),
)
"""Instances of clouds and pairs of cards, which are taken only by name. Networks of instances:
aws.amazon.com/ec2/instance-types, cloud.google.com/compute/docs/gpus/gpu-network-bandwidth,
learn.microsoft.com/azure/virtual-machines/sizes/gpu-accelerated.
"""

# The first preset of a device is its home: the node that `ClusterSpec` takes when only the device is named.
NODES: dict[str, NodePreset] = {
    preset.name: preset
    for preset in (
        NodePreset("dgx-a100-40g", _GPU["a100-40g"], 8, cat.NVLINK3, cat.HDR200, 8),
        NodePreset("dgx-a100-80g", _GPU["a100-80g"], 8, cat.NVLINK3, cat.HDR200, 8),
        NodePreset("dgx-h100", _GPU["h100"], 8, cat.NVLINK4, cat.NDR400, 8),
        NodePreset("grand-teton-h100", _GPU["h100-96g-500w"], 8, cat.NVLINK4, cat.NDR400, 8),
        NodePreset("hgx-h800", _GPU["h800"], 8, cat.NVLINK4_H800, cat.NDR400, 8),
        NodePreset("dgx-h200", _GPU["h200"], 8, cat.NVLINK4, cat.NDR400, 8),
        NodePreset("dgx-b200", _GPU["b200"], 8, cat.NVLINK5, cat.NDR400, 8),
        NodePreset("dgx-b300", _GPU["b300"], 8, cat.NVLINK5, cat.XDR800, 8),
        NodePreset("gb200-nvl72", _GPU["gb200"], 72, cat.NVLINK5, cat.NDR400, 4),
        NodePreset("gb300-nvl72", _GPU["gb300"], 72, cat.NVLINK5, cat.XDR800, 4),
        NodePreset("mi300x-8", _GPU["mi300x"], 8, cat.INFINITY_FABRIC, cat.NDR400, 8),
        NodePreset("aws-p4d", _GPU["a100-40g"], 8, cat.NVLINK3, cat.EFA100, 8, nics_per_node=4),
        NodePreset("aws-p5", _GPU["h100"], 8, cat.NVLINK4, cat.EFA100, 8, nics_per_node=32),
        NodePreset(
            "jeanzay-a100", _GPU["a100-80g"], 8, cat.NVLINK3, cat.OMNIPATH100, 8, nics_per_node=4
        ),
        # homes of further devices
        NodePreset("dgx-1-v100-16g", _GPU["v100-16g"], 8, cat.NVLINK2, cat.EDR100, 8, 4),
        NodePreset("dgx-1-v100-32g", _GPU["v100-32g"], 8, cat.NVLINK2, cat.EDR100, 8, 4),
        NodePreset("aws-g5", _GPU["a10g"], 8, cat.PCIE4, cat.CLOUD_ETHERNET100, 8, 1),
        NodePreset("hgx-a800", _GPU["a800-80g"], 8, cat.NVLINK3_A800, cat.HDR200, 8),
        NodePreset("hgx-h20", _GPU["h20"], 8, cat.NVLINK4, cat.NDR400, 8),
        NodePreset("gh200-1", _GPU["gh200"], 1, cat.NVLINK4, cat.NDR400, 1),
        NodePreset(
            "mi250x-8",
            _GPU["mi250x"],
            8,
            cat.INFINITY_FABRIC_MI250X,
            cat.HDR200,
            8,
            nics_per_node=4,
        ),
        NodePreset("mi325x-8", _GPU["mi325x"], 8, cat.INFINITY_FABRIC, cat.NDR400, 8),
        NodePreset("mi355x-8", _GPU["mi355x"], 8, cat.INFINITY_FABRIC_MI355X, cat.NDR400, 8),
        *(replace(preset, by_name=True) for preset in _OFFERED),
    )
}
"""Node presets by name."""


def node_preset(name: str) -> NodePreset:
    """The node preset `name`. Raises ValueError with the nearest names if there is none."""
    if name not in NODES:
        raise ValueError(f"unknown node preset {shown(name)}; {nearest(name, list(NODES))}")
    return NODES[name]


def home_of(device_name: str) -> NodePreset | None:
    """The first preset that consists of this catalogue device and is not only taken by name; None
    for single cards and the CPU.
    """
    homes = (p for p in NODES.values() if p.device.name == device_name and not p.by_name)
    return next(homes, None)


@lru_cache(maxsize=None, typed=True)  # typed: 1.0 and True equal 1 and would slip past the checks
def group_shape(size: int, stride: int, topology: Topology) -> tuple[int, int]:
    """(ranks per node, nodes) of the groups of `size` ranks that lie `stride` apart. The product of
    the two is `size`.

    Such groups tile the ranks: group (k, o) is {k * size * stride + o + i * stride}. If groups lie
    differently, the result is that of the slowest, with the fewest ranks per node. A group that
    lies unevenly on its nodes is (1, size). This prices all hops of a flat ring as inter-node hops,
    since the slowest hop sets the pace of a ring. Raises ValueError if no group fits on the
    topology.
    """
    whole("group size", size)
    whole("group stride", stride)
    per_node, span = topology.devices_per_node, size * stride
    if span > topology.num_devices:
        raise ValueError(
            f"a group of {size} ranks {stride} apart spans {span} ranks; the topology has {topology.num_devices} devices"
        )
    if size == 1:
        return 1, 1
    if stride % per_node == 0:
        return 1, size
    offsets = range(1) if per_node % stride == 0 else range(min(stride, per_node))
    period = per_node // gcd(span, per_node)
    bases = (
        k * span + o for k in range(min(period, topology.num_devices // span)) for o in offsets
    )
    ranks = min(_ranks_per_node(base, size, stride, per_node) for base in bases)
    return ranks, size // ranks


def _ranks_per_node(base: int, size: int, stride: int, per_node: int) -> int:
    """The number of ranks that one group has on each of its nodes; 1 if it differs between
    nodes.
    """
    counts: dict[int, int] = {}
    for i in range(size):
        node = (base + i * stride) // per_node
        counts[node] = counts.get(node, 0) + 1
    distinct = set(counts.values())
    return distinct.pop() if len(distinct) == 1 else 1
