"""A cluster as a file with comments, to be edited."""

from __future__ import annotations

from typing import Any

from autopar.ir.cluster import Cluster, MixedCluster
from autopar.ir.quantities import quantity

_HEAD = """\
# A cluster file of autopar: give its path as CLUSTER.
# Numbers may have units: 24GiB, 200Gb/s, 1.5TB/s, 125TFLOPS, 5us; without units they are bytes, seconds, bytes/s, FLOP/s.
"""
_COMMENTS = {
    "name": "printed in plans",
    "device": "a name of `autopar devices`, or figures of your own: name, flops by dtype, memory_bytes, memory_bandwidth_Bps",
    "nodes": "a node is a domain of the fast link",
    "intra_bandwidth_Bps": "inside a node: line rate of a device, one direction",
    "intra_latency_s": "of a step of a ring",
    "intra_efficiency": "achieved over line rate, in training",
    "inter_bandwidth_Bps": "between nodes: line rate of a network interface, one direction",
    "inter_efficiency": "achieved over line rate, in training",
    "intra_kind": "plain, nvlink, pcie or network: the model of collectives",
    "nics_per_node": "network interfaces of a node",
    "oversubscription": "bandwidth below a leaf switch over that above it",
    "price_per_device_hour": "dollars",
    "host": "each device's share of its host, for offloading",
    "groups": "one entry for each kind of device",
    "between": "the link from a device of one group to a device of another",
}
_LEFT_OUT = {
    "memory_bytes": "# memory_bytes: 80GiB  # of a device, if it has another memory than the catalogue says",
    "nics_per_node": "# nics_per_node: 8  # network interfaces of a node; by default one for each device",
    "oversubscription": "# oversubscription: 1  # bandwidth below a leaf switch over that above it",
    "price_per_device_hour": "# price_per_device_hour: 2.5  # dollars, for costs",
    "host": "# host: {memory_bytes: 250GiB, memory_bandwidth_Bps: 75GB/s, link_bandwidth_Bps: 50GB/s}"
    "  # each device's share, for offloading",
}


_UNITS = {
    "_bytes": (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20)),
    "_Bps": (("TB/s", 1e12), ("GB/s", 1e9)),
    "_flops": (("TFLOPS", 1e12),),
    "_s": (("us", 1e-6),),
}
"""Units in which numbers are written, by the end of their keys."""


def cluster_file(cluster: Cluster) -> str:
    """The cluster as YAML text with comments. `ClusterSpec.from_yaml` reads an equal cluster from
    it.
    """
    data = cluster.as_data()
    lines = [_written(key, value) for key, value in data.items()]
    if not isinstance(cluster, MixedCluster):
        lines += [line for key, line in _LEFT_OUT.items() if key not in data]
    return _HEAD + "\n".join(lines) + "\n"


def _comment(key: str) -> str:
    return f"  # {_COMMENTS[key]}" if key in _COMMENTS else ""


def _written(key: str, value: Any) -> str:
    """A key and its value as a line of YAML."""
    if isinstance(value, list):
        return "\n".join(
            [f"{key}:{_comment(key)}", *(f"- {_flow(_readable('', each))}" for each in value)]
        )
    return f"{key}: {_flow(_readable(key, value))}{_comment(key)}"


def _flow(value: Any) -> str:
    """The value as YAML in one line."""
    import yaml

    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6)
    return text.removesuffix("...\n").strip()


def _readable(key: str, value: Any) -> Any:
    """The value with numbers in units, where they are read back exactly."""
    if isinstance(value, dict):
        ending = "_flops" if key == "flops" else ""
        return {name: _readable(f"{name}{ending}", each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_readable(key, each) for each in value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        units = next((units for end, units in _UNITS.items() if key.endswith(end)), ())
        for unit, factor in units:
            text = f"{value / factor:.12g}{unit}"
            if value / factor >= 1 and len(text) < 16 and quantity(key, text) == value:
                return text
    return value
