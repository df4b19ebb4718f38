"""What predictions rest on: rates of devices and links, and fitted constants, with their sources."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from autopar_cost_models import FITTED, Link

from autopar.ir.cluster import Cluster
from autopar.text.numbers import Numbers, Words

_UNITS = {
    "FLOP/s": (1e12, "TFLOP/s"),
    "B/s": (1e9, "GB/s"),
    "B": (2**30, "GiB"),
    "s": (1e-6, "us"),
    "": (1.0, ""),
}
"""For each SI unit, what a reader sees: the divisor and its name."""


@dataclass(frozen=True, slots=True)
class Assumption:
    """A figure that predictions rest on, in the SI unit `unit` ('' for a ratio), with its source."""

    what: str
    value: float
    unit: str
    source: str

    def words(self, value: float) -> str:
        """A value of its unit as a reader sees it: `989.4 TFLOP/s`."""
        divisor, name = _UNITS[self.unit]
        return f"{value / divisor:,.4g} {name}".rstrip()


def assumptions(cluster: Cluster) -> list[Assumption]:
    """The assumptions on a cluster's devices and links, and the fitted constants."""
    found: list[Assumption] = []
    for group in cluster.groups:
        device, topology = group.device, group.topology
        name, source = device.name, device.source
        for dtype, flops in device.flops.items():
            found.append(Assumption(f"{name}: dense {dtype}", flops, "FLOP/s", source))
        found.append(Assumption(f"{name}: memory", device.memory_bytes, "B", source))
        found.append(
            Assumption(f"{name}: memory bandwidth", device.memory_bandwidth_Bps, "B/s", source)
        )
        found += _of_link(f"{name}: link inside a node", topology.intra)
        if topology.nodes > 1:
            found += _of_link(f"{name}: network interface of a node", topology.inter)
    fitted = "fitted on 156 published runs"
    for constant in fields(FITTED):
        unit = (
            "s" if constant.name.endswith("_s") else "B" if constant.name.endswith("_bytes") else ""
        )
        found.append(Assumption(constant.name, getattr(FITTED, constant.name), unit, fitted))
    return list(dict.fromkeys(found))


ASSUMPTION_COLUMNS = ("what", "value", "source")
"""The columns of `assumption_rows`, of which the second has numbers."""


def assumption_rows(n: Numbers) -> list[list[Words]]:
    """A row for each assumption. `n` looks up the data of a report."""
    rows = []
    for place, of in enumerate(n.value("report").get("assumptions", ())):
        value = n.number(f"report.assumptions.{place}.value", Assumption(**of).words)
        rows.append([of["what"], value, of["source"]])
    return rows


def _of_link(what: str, link: Link) -> Iterator[Assumption]:
    yield Assumption(f"{what}, line rate", link.bandwidth_Bps, "B/s", link.source)
    yield Assumption(f"{what}, share that is reached", link.efficiency, "", link.source)
    yield Assumption(f"{what}, latency of a step", link.latency_s, "s", link.source)
