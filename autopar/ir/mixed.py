"""A cluster of several kinds of devices: groups, each of one kind on a network of its own, and the link between groups."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from autopar_cost_models import Link

from autopar.errors import AutoparError, shown
from autopar.files import write_text

if TYPE_CHECKING:
    from autopar.ir.cluster import ClusterSpec

MOST_GROUPS = 3
"""Groups of a cluster: a pipeline may go through them in any order, and every order is searched."""

MOST_VALUES = 1_000_000
"""Values of a cluster file; `autopar calibrate` writes a few thousand."""


@dataclass(frozen=True, slots=True)
class MixedCluster:
    """Groups of devices, numbered one group after the other; `between` is what a device of one group has to one of another.

    What asks for the one device, network or host of a cluster is answered with an AutoparError: nothing takes those of one group for all.
    """

    name: str
    groups: tuple[ClusterSpec, ...]
    between: Link

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise AutoparError(f"cluster name={shown(self.name)} must be a non-empty text")
        object.__setattr__(self, "groups", tuple(self.groups))
        if not 2 <= len(self.groups) <= MOST_GROUPS:
            raise AutoparError(f"cluster {self.name}: {len(self.groups)} groups of devices; 2 to {MOST_GROUPS} can be planned together")
        if inner := [group.name for group in self.groups if len(group.groups) > 1]:
            raise AutoparError(f"cluster {self.name}: its group {inner[0]} has groups itself; list them one beside the other")
        if not isinstance(self.between, Link):
            raise AutoparError(f"cluster {self.name}: between={shown(self.between)} must be a Link")
        if len({group.device_type for group in self.groups}) > 1:
            kinds = ", ".join(f"{group.device.name} ({group.device_type})" for group in self.groups)
            raise AutoparError(f"cluster {self.name} joins {kinds}: no collectives run between them; plan for one of the two")

    @staticmethod
    def of(groups: Sequence[ClusterSpec], between: Link | None = None, name: str | None = None) -> MixedCluster:
        """Groups joined by `between`, by default the slower of what their devices have between nodes."""
        groups = tuple(groups)
        slowest = min((_device_link(group) for group in groups), key=lambda link: link.achieved_Bps, default=None)
        latency_s = max((group.topology.inter.latency_s for group in groups), default=0.0)
        link = between if between is not None or slowest is None else replace(slowest, latency_s=latency_s)
        return MixedCluster(name if name is not None else "+".join(group.name for group in groups), groups, link)

    @property
    def num_devices(self) -> int:
        return sum(group.num_devices for group in self.groups)

    @property
    def device_type(self) -> str:
        return self.groups[0].device_type  # one for all

    @property
    def price_per_device_hour(self) -> float | None:
        """Dollars for a device and hour, on average; None unless all are known."""
        prices = [group.price_per_device_hour for group in self.groups]
        if None in prices:
            return None
        return sum(price * group.num_devices for price, group in zip(prices, self.groups, strict=True)) / self.num_devices

    @property
    def device(self) -> NoReturn:
        self._refuse("device")

    @property
    def topology(self) -> NoReturn:
        self._refuse("network")

    @property
    def host(self) -> NoReturn:
        self._refuse("host")

    def _refuse(self, what: str) -> NoReturn:
        raise AutoparError(
            f"this asks for the one kind of {what} of a cluster, and {self.name} has several "
            f"({', '.join(group.device.name for group in self.groups)}); ask about {self.groups[0].name} or another group alone"
        )

    def __str__(self) -> str:
        return f"{self.name}: {' + '.join(f'{group.num_devices} {group.device.name}' for group in self.groups)}"

    def spec_hash(self) -> str:
        """sha256 over all content but prices, as `ClusterSpec.spec_hash`."""
        content = [self.name, [group.spec_hash() for group in self.groups], asdict(self.between)]
        return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def to_yaml(self, path: str | Path | None = None) -> str:
        """The cluster as YAML text, also written to `path` if given; `ClusterSpec.from_yaml` gives back an equal cluster."""
        between = {key: value for key, value in asdict(self.between).items() if value}
        return written_yaml({"name": self.name, "groups": [group.as_data() for group in self.groups], "between": between}, path)

    def with_price(self, price_per_device_hour: float) -> MixedCluster:
        """The same cluster at one price for all devices."""
        return replace(self, groups=tuple(group.with_price(price_per_device_hour) for group in self.groups))

    def with_devices(self, devices: int) -> MixedCluster:
        """The same cluster; AutoparError for another number of devices, since it would have to be said of which kind."""
        if devices != self.num_devices:
            raise AutoparError(
                f"cluster {self.name} has {self.num_devices} devices of several kinds, and {devices} are asked for: name a cluster of as "
                f"many, for example {self.groups[0].name}"
            )
        return self

    def with_memory(self, memory_bytes: int) -> NoReturn:
        self._refuse("memory")

    def with_inter_bandwidth(self, device_Bps: float) -> NoReturn:
        self._refuse("network")


def _device_link(group: ClusterSpec) -> Link:
    """What one device has between nodes while all devices of its node send."""
    topology = group.topology
    share = topology.group_inter_Bps(1) / topology.inter.achieved_Bps
    return replace(topology.inter, bandwidth_Bps=topology.inter.bandwidth_Bps * share, curves={})


def read_yaml(text: str) -> Any:
    """The data of a YAML text; yaml.YAMLError if it is none, or has a key twice in one mapping, of which YAML would keep the last."""
    import yaml

    try:
        root = yaml.compose(text, yaml.SafeLoader)
        _check_size(root)
        _check_keys(root)
        return yaml.safe_load(text)
    except RecursionError:
        raise yaml.YAMLError("it is nested too deep") from None
    except (TypeError, ValueError, OverflowError, AttributeError) as error:  # of tags that do not suit what they are on
        raise yaml.YAMLError(str(error)) from None


def _check_size(root: Any) -> None:
    """yaml.YAMLError where aliases of aliases make a text stand for more than `MOST_VALUES`, or for an endless one."""
    import yaml

    sizes: dict[int, int] = {}

    def size_of(node: Any) -> int:
        if not isinstance(node, yaml.CollectionNode):
            return 1
        if sizes.setdefault(id(node), 0) == 0:
            sizes[id(node)] = MOST_VALUES + 1  # what holds itself
            parts = [part for item in node.value for part in (item if isinstance(item, tuple) else (item,))]
            sizes[id(node)] = 1 + sum(map(size_of, parts))
        return sizes[id(node)]

    if size_of(root) > MOST_VALUES:
        raise yaml.YAMLError(f"its aliases make it more than {MOST_VALUES:,} values")


def _check_keys(root: Any) -> None:
    """yaml.YAMLError where a mapping has a key twice."""
    import yaml

    waiting, seen = [root], set()
    while waiting:
        node = waiting.pop()
        if id(node) in seen or not isinstance(node, yaml.CollectionNode):
            continue
        seen.add(id(node))
        pairs = node.value if isinstance(node, yaml.MappingNode) else [(item,) for item in node.value]
        waiting += [part for pair in pairs for part in pair]
        keys = [(pair[0].tag, pair[0].value) for pair in pairs if len(pair) == 2 and isinstance(pair[0], yaml.ScalarNode)]
        if twice := [key for place, (tag, key) in enumerate(keys) if (tag, key) in keys[:place] and not tag.endswith(":merge")]:
            raise yaml.constructor.ConstructorError(None, None, f"{shown(twice[0])} is given twice", node.start_mark)


def written_yaml(data: dict[str, Any], path: str | Path | None) -> str:
    """A cluster file, also written to `path` if given."""
    import yaml

    text = yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=10_000, default_flow_style=None)
    if path is not None:
        write_text(path, text, "cluster file")
    return text
