"""Clusters: kinds of devices, how many, and the networks between them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from hashlib import sha256
from numbers import Real
from pathlib import Path
from typing import Any, NoReturn

from autopar_cost_models import (
    DEVICES,
    FITTED,
    HOSTS,
    NODES,
    Device,
    FittedConstants,
    Host,
    Link,
    Topology,
    home_of,
)
from autopar_cost_models import device as catalogue_device
from autopar_cost_models.catalogue import ETHERNET, reason_against
from autopar_cost_models.checks import finite, nearest
from autopar_cost_models.memory_error import HEADROOM
from autopar_cost_models.names import device_named, read_hardware

from autopar.errors import AutoparError, shown
from autopar.files import read_text
from autopar.ir.cluster_parts import (
    check_keys,
    default_links,
    device_from,
    headroom_of,
    headroom_words,
    host_from,
    link_from,
    link_of,
    related_links,
    written_fields,
)
from autopar.ir.quantities import quantity
from autopar.ir.yaml_text import read_yaml, written_yaml

_LINK_KEYS = tuple(f"{side}_{f.name}" for side in ("intra", "inter") for f in fields(Link))
_NETWORK_KEYS = ("nics_per_node", "oversubscription")
_KEYS = (
    "name",
    "device",
    "nodes",
    "devices_per_node",
    *_NETWORK_KEYS,
    "memory_bytes",
    "price_per_device_hour",
    "headroom",
    *_LINK_KEYS,
    "host",
)
_REQUIRED_KEYS = ("device", "nodes", "devices_per_node")
_GROUP_KEYS = ("name", "groups", "between")
_EXAMPLE = (
    "write dgx-h100:8 (8 nodes of 8), h100:4 (one node of 4), cpu:4, several of these joined by + (dgx-h100:4+dgx-a100-80g:4) or the path "
    "of a .yaml file"
)

MOST_GROUPS = 3
"""The largest number of groups of a cluster. A pipeline may visit groups in any order, and every
order is searched.
"""


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """Devices of one kind on a two-level network.

    Attributes:
        name: the name that plans print.
        device: the device, a `Device`.
        topology: nodes, devices of a node, and the links inside and between nodes.
        price_per_device_hour: dollars, or None if it is not known.  The price is not part of `spec_hash`, so a plan stays valid when it
            changes.
        host: each device's share of its host, or None if it is not known.  By default that of the catalogue's device.
        headroom: memory of a device that plans leave free: a fraction if it is below 1, else GiB.  None means that nothing is said,
            see `kept_free`.  It is not part of `spec_hash`.
    """

    name: str
    device: Device
    topology: Topology
    price_per_device_hour: float | None = None
    host: Host | None = None
    headroom: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip() or not self.name.isprintable():
            raise AutoparError(
                f"cluster name={shown(self.name)} must be a non-empty text of printable characters"
            )
        if not isinstance(self.device, Device) or not isinstance(self.topology, Topology):
            raise AutoparError(
                f"cluster {self.name}: device must be a Device and topology a Topology; ClusterSpec.make and ClusterSpec.parse build them"
            )
        if self.host is None:
            object.__setattr__(self, "host", HOSTS.get(self.device.name))
        price = self.price_per_device_hour
        if price is not None and (
            not isinstance(price, Real)
            or isinstance(price, bool)
            or not finite(price)
            or price <= 0
        ):
            raise AutoparError(
                f"cluster {self.name}: price_per_device_hour={shown(price)} must be a finite number > 0, or left out"
            )
        if price is not None:
            object.__setattr__(self, "price_per_device_hour", float(price))
        if self.headroom is not None:
            object.__setattr__(self, "headroom", headroom_of(self.headroom))
            if self.room_bytes <= self.device.reserved_bytes:
                raise AutoparError(
                    f"cluster {self.name}: a headroom of {headroom_words(self.headroom)} leaves nothing of "
                    f"{self.device.memory_bytes / 2**30:.2f} GiB of memory"
                )

    @property
    def room_bytes(self) -> int:
        """The bytes of a device that a plan may take: its memory without the headroom, if one is
        set.
        """
        memory_bytes, kept = self.device.memory_bytes, self.headroom or 0.0
        return memory_bytes - int(kept * (memory_bytes if kept < 1 else 2**30))

    @property
    def num_devices(self) -> int:
        """Number of devices on all nodes."""
        return self.topology.num_devices

    @property
    def one_kind(self) -> ClusterSpec:
        """This cluster itself. `MixedCluster`, which has several kinds of devices, raises an error
        here, so callers use this to require one kind.
        """
        return self

    @property
    def groups(self) -> tuple[ClusterSpec, ...]:
        """The parts of the cluster with one kind of devices each. Here a tuple of this cluster
        alone; `MixedCluster` has several.
        """
        return (self,)

    @property
    def device_type(self) -> str:
        """The devices' torch device type: 'cuda' or 'cpu'."""
        return "cpu" if "cpu" in (self.device.name.lower(), self.device.generation) else "cuda"

    def __str__(self) -> str:
        t = self.topology
        return f"{self.name}: {t.nodes} x {t.devices_per_node} {self.device.name}"

    @staticmethod
    def parse(text: str) -> ClusterSpec | MixedCluster:
        """Return the cluster that a short text describes.

        Args:
            text: one of

                - `dgx-h100:8`: 8 nodes of a preset (1 without the number);
                - `h100:4`: one node of 4 devices (1 without the number);
                - `cpu:4`: 4 processes of one host;
                - one of these as it is spelled elsewhere, if that names nothing else: `8xH100`,
                  `NVIDIA A100-SXM4-80GB`, `p5.48xlarge:2`;
                - several of these joined by `+`, over the slower of their networks;
                - the path of a cluster file, which ends in .yaml or .yml.

        Raises:
            AutoparError: the text is none of these, the file is defective, or such a cluster cannot
                be planned. The message names what works.
        """
        if not isinstance(text, str) or not text.strip():
            raise AutoparError(
                f"cluster {shown(text)} is not a description of a cluster; {_EXAMPLE}"
            )
        text = text.strip()
        if text.lower().endswith((".yaml", ".yml")):
            return ClusterSpec.from_yaml(text)
        if "+" in text:
            return MixedCluster.of([ClusterSpec.parse(part) for part in text.split("+")])
        kind, colon, count_text = text.partition(":")
        kind = kind.lower()
        if kind not in NODES and kind not in DEVICES:
            return _spelled_otherwise(text)
        if colon and not re.fullmatch(r"0*[1-9][0-9]{0,8}", count_text):
            unit = "nodes" if kind in NODES else "devices"
            raise AutoparError(
                f"cluster {shown(text)}: the number of {unit} is {shown(count_text)} and must be a whole number >= 1; e.g. {kind}:8"
            )
        count = int(count_text) if colon else 1
        if kind in NODES:
            return ClusterSpec(f"{kind}:{count}", NODES[kind].device, NODES[kind].topology(count))
        return _one_node(kind, count)

    @staticmethod
    def make(
        device: str | Device = "h100",
        nodes: int = 1,
        devices_per_node: int | None = None,
        *,
        name: str | None = None,
        memory_bytes: int | None = None,
        price_per_device_hour: float | None = None,
        nics_per_node: int | None = None,
        oversubscription: float = 1.0,
        fitted: FittedConstants = FITTED,
        host: Host | Mapping[str, Any] | None = None,
        headroom: float | str | None = None,
        **links: float | str | None,
    ) -> ClusterSpec:
        """Return a cluster from keyword arguments.  What is left out comes from the node preset of the catalogue's device.

        Args:
            device: a name of the catalogue, or a `Device`.
            nodes: the number of nodes.
            devices_per_node: the number of devices of a node.
            name: the name that plans print.
            memory_bytes: bytes of a device.
            price_per_device_hour: dollars.
            nics_per_node: network interfaces of a node.  By default one for each device.  If it is given, `inter_bandwidth_Bps` is the
                bandwidth of one interface.
            oversubscription: of the network between nodes, see `autopar_cost_models.topology`.
            fitted: constants of the catalogue's device and links.
            host: each device's share of its host, or the fields of `Host`.  Plans that offload need it.
            headroom: memory of a device that plans leave free, as for `plan`.
            **links: the fields of `Link`, after `intra_` (inside a node) or `inter_` (between nodes).  `bandwidth_Bps` is the line rate
                in bytes per second, per direction of a device.  `efficiency` is the achieved share (1 for a device outside the
                catalogue).  `latency_s` is in seconds.  The others are `kind`, `multicast_efficiency`, `source`, and `curves`, which
                `autopar calibrate` measures.

        Raises:
            AutoparError: an argument is wrong.  The message names it and its value.
        """
        try:
            if not isinstance(fitted, FittedConstants):
                raise ValueError(f"fitted={shown(fitted)} must be FittedConstants")
            for key in links:
                if key not in _LINK_KEYS:
                    raise ValueError(f"unknown argument {shown(key)}; {nearest(key, list(_KEYS))}")
            base = device
            if not isinstance(base, Device):
                base = catalogue_device(device_named(base), fitted)
            home = home_of(base.name)
            if memory_bytes is not None:
                base = replace(base, memory_bytes=quantity("memory_bytes", memory_bytes))
            if devices_per_node is None:
                devices_per_node = home.devices_per_node if home else 1
            intra, inter = (
                link_of(
                    side,
                    # a link that nothing uses needs no figures
                    default or (ETHERNET if count == 1 else None),
                    {f.name: quantity(f.name, links.get(f"{side}_{f.name}")) for f in fields(Link)},
                )
                for side, default, count in zip(
                    ("intra", "inter"),
                    default_links(base.name, fitted),
                    (devices_per_node, nodes),
                    strict=True,
                )
            )
            topology = Topology(
                devices_per_node, nodes, intra, inter, nics_per_node, oversubscription
            )
            host = host_from(host) if isinstance(host, Mapping) else host
            if not isinstance(host, Host | None):
                raise ValueError(
                    f"host is {shown(host)}; it must be a mapping with memory_bytes, memory_bandwidth_Bps and link_bandwidth_Bps"
                )
        except ValueError as error:
            raise AutoparError(
                f"cluster {name}: {error}" if name else f"cluster: {error}"
            ) from None
        label = name if name is not None else f"{base.name} {nodes}x{devices_per_node}"
        kept = None if headroom is None else headroom_of(headroom)
        return ClusterSpec(label, base, topology, price_per_device_hour, host, kept)

    @staticmethod
    def from_yaml(path: str | Path) -> ClusterSpec | MixedCluster:
        """Read a cluster file. Its keys are the arguments of `make` except `fitted`; device, nodes
        and devices_per_node are required.

        `device` is a name of the catalogue, or a mapping with the fields of `Device`. A cluster of
        several kinds of devices has `groups`, a list of such mappings. `between` has the fields of
        the link from a device of one group to a device of another; by default it is the slower of
        their networks.

        Args:
            path: the file. `autopar calibrate` writes one, with measured curves.

        Raises:
            AutoparError: the file cannot be read, or what it describes is no cluster. The message
                names the defect.
        """
        import yaml

        text = read_text(path, "cluster file", lambda: _files_near(Path(path)))
        try:
            data = read_yaml(text)
        except yaml.YAMLError as error:
            raise AutoparError(
                f"cluster file {path} is not valid YAML: {' '.join(str(error).split())}"
            ) from None
        if not isinstance(data, dict):
            holds = "is empty" if data is None else f"holds {type(data).__name__}"
            raise AutoparError(
                f"cluster file {path} {holds}, not keys and values; it needs {', '.join(_REQUIRED_KEYS)}"
            )
        what = f"cluster file {path}"
        return ClusterSpec.from_data(data, what, Path(path).stem)

    @staticmethod
    def from_data(data: Mapping[str, Any], what: str, name: str = "") -> ClusterSpec | MixedCluster:
        """The cluster that plain data with the keys of a cluster file describe.

        Args:
            data: the keys and values.
            what: words for the data at the beginning of an error message.
            name: the cluster's name if the data have none.

        Raises:
            AutoparError: what the data describe is no cluster.
        """
        if "groups" not in data:
            return _from_data(what, {"name": name} | dict(data))
        check_keys(what, dict(data), _GROUP_KEYS, ("groups",))
        listed = data["groups"] if isinstance(data["groups"], list) else [data["groups"]]
        if odd := [group for group in listed if not isinstance(group, dict)]:
            raise AutoparError(
                f"{what}: groups has {shown(odd[0])}; it needs a list of mappings with {', '.join(_REQUIRED_KEYS)}"
            )
        groups = [
            _from_data(f"{what}: group {number}", group) for number, group in enumerate(listed, 1)
        ]
        between = link_from(f"{what}: between", data["between"]) if "between" in data else None
        return MixedCluster.of(groups, between, data.get("name", name))

    def to_yaml(self, path: str | Path | None = None) -> str:
        """The cluster as YAML text, also written to `path` if given. `from_yaml` returns an equal
        cluster.
        """
        return written_yaml(self.as_data(), path)

    def as_data(self, named: bool = True) -> dict[str, Any]:
        """The cluster as plain data, by the keys of a cluster file. A device of the catalogue is
        only its name, unless `named` is False. A price, host, number of interfaces or
        oversubscription that is the default is left out.
        """
        known = named and DEVICES.get(self.device.name) == self.device
        t = self.topology
        data: dict[str, Any] = {
            "name": self.name,
            "device": self.device.name if known else written_fields(asdict(self.device)),
            "nodes": t.nodes,
            "devices_per_node": t.devices_per_node,
        }
        for side, link in (("intra", t.intra), ("inter", t.inter)):
            data |= {
                f"{side}_{name}": value for name, value in written_fields(asdict(link)).items()
            }
        if t.nics_per_node is not None:
            data["nics_per_node"] = t.nics_per_node
        if t.oversubscription != 1:
            data["oversubscription"] = t.oversubscription
        if self.price_per_device_hour is not None:
            data["price_per_device_hour"] = self.price_per_device_hour
        if self.host is not None and self.host != HOSTS.get(self.device.name):
            data["host"] = asdict(self.host)
        if self.headroom is not None:
            data["headroom"] = self.headroom
        return data

    def spec_hash(self) -> str:
        """The sha256 of the cluster without its price and headroom, as hex. Clusters with equal
        hashes can use the same plans.
        """
        data = asdict(replace(self, price_per_device_hour=None))
        del data["headroom"]
        return sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()

    def with_price(self, price_per_device_hour: float) -> ClusterSpec:
        """The same cluster with another price, in dollars per device-hour."""
        return replace(self, price_per_device_hour=price_per_device_hour)

    def kept_free(self, headroom: float | str | None = None) -> ClusterSpec:
        """The same cluster with this headroom: a fraction of the memory below 1, or GiB. None keeps
        that of the cluster, or else what is kept free by default: `HEADROOM` on GPUs, nothing on
        CPUs.
        """
        if headroom is None:
            headroom = self.headroom
        if headroom is None:
            headroom = 0.0 if self.device_type == "cpu" else HEADROOM
        return replace(self, headroom=headroom_of(headroom))

    def with_devices(self, devices: int) -> ClusterSpec:
        """A cluster with `devices` devices of this kind: whole nodes, or a part of one node. Its
        name is that of the catalogue, as 'h100:2', if it is one of those. If it has that many
        already, itself.

        Raises AutoparError if the number neither fills whole nodes nor divides one node.
        """
        per_node = self.topology.devices_per_node
        if devices == self.num_devices:
            return self
        if devices >= 1 and devices % per_node == 0:
            return self._with(replace(self.topology, nodes=devices // per_node))
        if devices < 1 or per_node % devices:
            whole = max(round(devices / per_node), 1) * per_node
            raise AutoparError(
                f"cluster {self.name}: {devices} devices are neither whole nodes of {per_node} nor a divisor of one; {whole} devices would "
                "do"
            )
        # nothing leaves the node
        return self._with(
            replace(self.topology, nodes=1, devices_per_node=devices, nics_per_node=None)
        )

    def _with(self, topology: Topology) -> ClusterSpec:
        """The same cluster with another topology, by its name in the catalogue if it has one."""
        devices = topology.nodes * topology.devices_per_node
        changed = replace(self, name=f"{self.name} with {devices} devices", topology=topology)
        preset = self.name.partition(":")[0]
        for name in (f"{preset}:{topology.nodes}", f"{self.device.name}:{devices}"):
            with suppress(AutoparError):
                known = ClusterSpec.parse(name)
                if (known.name, known.num_devices) == (name, devices):
                    named = replace(changed, name=name)
                    if named.spec_hash() == known.spec_hash():
                        return named
        return changed

    def with_memory(self, memory_bytes: int) -> ClusterSpec:
        """The same cluster, under a new name, with `memory_bytes` of memory per device. Raises
        AutoparError if the reserved memory leaves nothing of that.
        """
        try:
            device = replace(self.device, memory_bytes=memory_bytes)
        except ValueError as error:
            raise AutoparError(f"cluster {self.name}: {error}") from None
        return replace(
            self, name=f"{self.name} with {memory_bytes / 2**30:.4g} GiB a device", device=device
        )

    def with_inter_bandwidth(self, device_Bps: float) -> ClusterSpec:
        """The same cluster, under a new name, with `device_Bps` bytes/s of line rate between nodes,
        per device and direction. Raises AutoparError for a cluster of one node.
        """
        t = self.topology
        if t.nodes == 1:
            raise AutoparError(
                f"cluster {self.name} is one node: no bandwidth between nodes changes its plan; use two nodes or more"
            )
        inter = replace(
            t.inter,
            bandwidth_Bps=device_Bps * t.devices_per_node / t.nics,
            source="given by the user",
        )
        name = f"{self.name} with {device_Bps / 1e9:g} GB/s between nodes"
        return replace(self, name=name, topology=replace(t, inter=inter))


def _from_data(what: str, data: dict) -> ClusterSpec:
    """A cluster from the mapping in a file, by the arguments of `ClusterSpec.make`. Raises
    AutoparError with `what` (words for the file) and the defect.
    """
    check_keys(what, data, _KEYS, _REQUIRED_KEYS)
    try:
        data = {key: quantity(key, value) for key, value in data.items()}
        if isinstance(data["device"], dict):
            data["device"] = device_from(f"{what}: device", data["device"])
            data = related_links(data) | data
        return ClusterSpec.make(**data)
    except (AutoparError, ValueError) as error:
        text = str(error)
        raise AutoparError(text if text.startswith(what) else f"{what}: {text}") from None


def _spelled_otherwise(text: str) -> ClusterSpec:
    """The cluster that a text names in other words than the catalogue's. Raises AutoparError with
    texts that can be written instead.
    """
    read = read_hardware(text)
    if read.name and read.count:
        return ClusterSpec.parse(read.text).one_kind
    if reason := reason_against(read.kind):
        raise AutoparError(
            f"cluster {shown(text)}: {reason}; autopar plans for PyTorch on CUDA, ROCm and CPUs"
        )
    if read.name:
        raise AutoparError(
            f"cluster {shown(text)}: the number of devices or nodes must be at least 1; e.g. {read.name}:8"
        )
    near = f"did you mean {' or '.join(read.suggestions)}?" if read.suggestions else _LISTED
    raise AutoparError(
        f"cluster {shown(text)}: unknown preset, or one of several; {near} ({_EXAMPLE})"
    )


_LISTED = "`autopar devices` and `autopar clusters` list the names"


def reading_note(text: str) -> str:
    """A note on what a text for a cluster is read as; '' if it is in the catalogue's words, or no
    cluster.
    """
    notes = []
    for part in text.split("+") if not text.lower().endswith((".yaml", ".yml")) else ():
        kind = part.strip().partition(":")[0].lower()
        if kind in NODES or kind in DEVICES:
            continue
        if (read := read_hardware(part)).name:
            notes.append(f"cluster {shown(part.strip())} is taken as {read.text}")
    return "; ".join(notes)


def _one_node(kind: str, count: int) -> ClusterSpec:
    """A cluster of `count` devices on one node, for `kind`, a device of the catalogue. Raises
    AutoparError if its usual node has fewer, or if the catalogue has no links for it.
    """
    home = home_of(kind)
    if home is not None and count > home.devices_per_node:
        nodes = -(-count // home.devices_per_node)
        raise AutoparError(
            f"cluster '{kind}:{count}': one node has at most {home.devices_per_node} {kind} devices;"
            f" {home.name}:{nodes} is {nodes} nodes with {nodes * home.devices_per_node} devices"
        )
    intra, inter = default_links(kind)
    if intra is None or inter is None:
        raise AutoparError(f"cluster '{kind}:{count}': the catalogue has no links for {kind}")
    return ClusterSpec(f"{kind}:{count}", DEVICES[kind], Topology(count, 1, intra, inter))


def _files_near(path: Path) -> str:
    """The end of an error message about a missing cluster file. It names the files with similar
    names in its folder; if the folder has no cluster files, it shows how to write a cluster.
    """
    folder = path.parent
    found = (
        sorted(p.name for p in folder.iterdir() if p.suffix in (".yaml", ".yml"))
        if folder.is_dir()
        else []
    )
    return f"; {nearest(path.name, found)}" if found else f"; {_EXAMPLE}"


@dataclass(frozen=True, slots=True)
class MixedCluster:
    """A cluster of 2 or 3 groups, each with devices of one kind. Devices are numbered one group
    after the other. `between` is the link from a device of one group to one of another.

    Attributes such as `device` and `topology`, which differ between groups, raise AutoparError.
    """

    name: str
    groups: tuple[ClusterSpec, ...]
    between: Link

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise AutoparError(f"cluster name={shown(self.name)} must be a non-empty text")
        object.__setattr__(self, "groups", tuple(self.groups))
        if not 2 <= len(self.groups) <= MOST_GROUPS:
            raise AutoparError(
                f"cluster {self.name}: {len(self.groups)} groups of devices; 2 to {MOST_GROUPS} can be planned together"
            )
        if inner := [group.name for group in self.groups if len(group.groups) > 1]:
            raise AutoparError(
                f"cluster {self.name}: its group {inner[0]} has groups itself; list them one beside the other"
            )
        if not isinstance(self.between, Link):
            raise AutoparError(f"cluster {self.name}: between={shown(self.between)} must be a Link")
        if len({group.device_type for group in self.groups}) > 1:
            kinds = ", ".join(f"{group.device.name} ({group.device_type})" for group in self.groups)
            raise AutoparError(
                f"cluster {self.name} joins {kinds}: no collectives run between them; plan for one of the two"
            )

    @staticmethod
    def of(
        groups: Sequence[Cluster], between: Link | None = None, name: str | None = None
    ) -> MixedCluster:
        """A cluster of these groups. `between` joins them; by default, the link of least bandwidth
        that a device of any group has between nodes, with the largest latency of all.

        `name` is by default the groups' names, joined by '+'. Raises AutoparError unless there are
        2 or 3 groups, each of one kind of device, and all with GPUs or all with CPUs.
        """
        groups = tuple(groups)
        slowest = min(
            (_device_link(group) for group in groups),
            key=lambda link: link.achieved_Bps,
            default=ETHERNET,  # the class refuses a cluster without groups
        )
        latency_s = max((group.topology.inter.latency_s for group in groups), default=0.0)
        link = between if between is not None else replace(slowest, latency_s=latency_s)
        kinds = tuple(group.one_kind for group in groups)
        return MixedCluster(
            name if name is not None else "+".join(group.name for group in kinds), kinds, link
        )

    @property
    def num_devices(self) -> int:
        """Number of devices in all groups."""
        return sum(group.num_devices for group in self.groups)

    @property
    def device_type(self) -> str:
        """'cuda' or 'cpu'; all groups have the same."""
        return self.groups[0].device_type  # one for all

    @property
    def price_per_device_hour(self) -> float | None:
        """The price in dollars per device-hour, averaged over all devices. None unless every group
        has one.
        """
        prices = [
            price for group in self.groups if (price := group.price_per_device_hour) is not None
        ]
        if len(prices) < len(self.groups):
            return None
        return (
            sum(price * group.num_devices for price, group in zip(prices, self.groups, strict=True))
            / self.num_devices
        )

    @property
    def one_kind(self) -> NoReturn:
        """Raises AutoparError: the devices are of several kinds."""
        self._refuse("device")

    @property
    def device(self) -> NoReturn:
        """Raises AutoparError: each group has its own device."""
        self._refuse("device")

    @property
    def topology(self) -> NoReturn:
        """Raises AutoparError: each group has its own network."""
        self._refuse("network")

    @property
    def host(self) -> NoReturn:
        """Raises AutoparError: each group has its own host."""
        self._refuse("host")

    def _refuse(self, what: str) -> NoReturn:
        raise AutoparError(
            f"this asks for the one kind of {what} of a cluster, and {self.name} has several "
            f"({', '.join(group.device.name for group in self.groups)}); ask about {self.groups[0].name} or another group alone"
        )

    def __str__(self) -> str:
        return f"{self.name}: {' + '.join(f'{group.num_devices} {group.device.name}' for group in self.groups)}"

    def spec_hash(self) -> str:
        """The sha256 of the name, the groups without their prices, and the link between them, as
        hex.
        """
        content = [self.name, [group.spec_hash() for group in self.groups], asdict(self.between)]
        return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def to_yaml(self, path: str | Path | None = None) -> str:
        """The cluster as YAML text, also written to `path` if given. `ClusterSpec.from_yaml`
        returns an equal cluster.
        """
        return written_yaml(self.as_data(), path)

    def as_data(self, named: bool = True) -> dict[str, Any]:
        """The cluster as plain data, by the keys of a cluster file; `named` as for a cluster of one
        kind.
        """
        return {
            "name": self.name,
            "groups": [group.as_data(named) for group in self.groups],
            "between": {key: value for key, value in asdict(self.between).items() if value},
        }

    def with_price(self, price_per_device_hour: float) -> MixedCluster:
        """The same cluster with one price for all devices, in dollars per device-hour."""
        return replace(
            self, groups=tuple(group.with_price(price_per_device_hour) for group in self.groups)
        )

    def kept_free(self, headroom: float | str | None = None) -> MixedCluster:
        """The same cluster with this headroom on all devices, as `ClusterSpec.kept_free`."""
        return replace(self, groups=tuple(group.kept_free(headroom) for group in self.groups))

    def with_devices(self, devices: int) -> MixedCluster:
        """This cluster itself if it has `devices` devices. Raises AutoparError for another number,
        since it would be unclear of which kind they are.
        """
        if devices != self.num_devices:
            raise AutoparError(
                f"cluster {self.name} has {self.num_devices} devices of several kinds, and {devices} are asked for: name a cluster of as "
                f"many, for example {self.groups[0].name}"
            )
        return self

    def with_memory(self, memory_bytes: int) -> NoReturn:
        """Raises AutoparError: each group has its own memory."""
        self._refuse("memory")

    def with_inter_bandwidth(self, device_Bps: float) -> NoReturn:
        """Raises AutoparError: each group has its own network."""
        self._refuse("network")


def _device_link(group: Cluster) -> Link:
    """The link between nodes as one device of the group has it while all devices of its node send:
    its share of the bandwidth, without measured curves.
    """
    topology = group.topology
    share = topology.group_inter_Bps(1) / topology.inter.achieved_Bps
    return replace(topology.inter, bandwidth_Bps=topology.inter.bandwidth_Bps * share, curves={})


Cluster = ClusterSpec | MixedCluster


def plain_data(cluster: Cluster) -> dict[str, Any]:
    """The whole cluster as data that JSON does not change; `ClusterSpec.from_data` reads an equal
    one.
    """
    found: dict[str, Any] = json.loads(json.dumps(cluster.as_data(named=False)))
    return found
