"""Facts that follow from the name of a GPU: memory, NVLink domain, and its usual network."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

from autopar_cost_models import DEVICES, FITTED, NODES, FittedConstants, home_of
from autopar_cost_models.catalogue import ETHERNET
from autopar_cost_models.checks import nearest
from autopar_cost_models.constants import GIB, MIB
from autopar_cost_models.names import entries_of

from autopar.errors import AutoparError, shown

# What nvidia-smi reports as the total, MiB.  A100, H100, H200, B200, GB200: as in autopar_cost_models.hardware.  The 96 GB H100: 95.04 GiB
# in torchtitan's logs ("CUDA capacity: NVIDIA H100 with 95.04GiB memory").
_MEMORY_MIB = {
    ("A100", 40): 40960,
    ("A100", 80): 81920,
    ("H100", 80): 81559,
    ("H100", 96): round(95.04 * 1024),
    ("H200", 141): 143771,
    ("B200", 180): 182630,
}
_DEFAULT_GB = {"A100": 80, "H100": 80, "H200": 141, "B200": 180}
_RACK_MIB = {
    "GB200": 189471,
    "GB300": 284208,
}  # nvidia-smi; 186 and 278 GiB of the datasheets' 186 and 288 GB
NAMED_SHARE = 0.99
"""Assumed memory of a GPU outside the table, as a fraction of the GiB in its name. GPUs in the
table have 0.97 to 1.02.
"""

_NIC_GBPS = {
    "V100": 100.0,
    "A100": 200.0,
    "H100": 400.0,
    "H200": 400.0,
    "B200": 400.0,
    "GB200": 400.0,
    "B300": 800.0,
    "GB300": 800.0,
}
OTHER_NIC_GBPS = 400.0
"""Assumed network line rate per GPU, in Gbit/s, for GPUs without a table entry that have a node in
the catalogue and whose runs do not print theirs.
"""

_SYSTEMS = ((r"\bjean[ -]?zay\b", "jeanzay-a100"),)
"""Systems that notes of rows name, as patterns, and their node presets."""


_BRANDS = r"(?:(?:nvidia|amd|geforce|tesla|instinct|quadro)[ -]+)*"
"""Words before the model in the name of a GPU, as a pattern."""


def gpu_model(gpu: str) -> str:
    """The GPU model in a name: `H100` for `H100-96G-HBM2e-500W`. Upper case; the whole text if it
    does not start with a name and number.
    """
    found = re.match(rf"\s*{_BRANDS}([a-z]*\d+[a-z]*)", gpu, re.IGNORECASE)
    return found[1].upper() if found else gpu.strip().upper()


def device_of(gpu: str) -> str:
    """The hardware catalogue's entry for a GPU name: `h100-96g-500w` for `H100-96G-HBM2e-500W`.

    Raises AutoparError for a GPU outside the catalogue.
    """
    model, text = gpu_model(gpu).lower(), gpu.lower()
    entries = [name for name in DEVICES if name == model or name.startswith(f"{model}-")]
    entries = entries or [name for name in entries_of(gpu) if name in DEVICES]
    if not entries:
        known = ", ".join(name.upper() for name in DEVICES if name != "cpu")
        raise AutoparError(f"gpu {shown(gpu)} is not in the hardware catalogue; {known} are")
    said = set(re.findall(r"[a-z0-9]+", text))
    size = f"{round(memory / GIB)}g" if (memory := memory_bytes_of(gpu)) else ""

    def likeness(name: str) -> tuple[int, int]:
        words = set(name.split("-")[1:])
        return len(words & (said | {size})), -len(words)

    return max(entries, key=likeness)


def memory_bytes_of(gpu: str) -> int | None:
    """Memory bytes of one GPU as the driver reports them, or None if the name does not tell."""
    model = gpu_model(gpu)
    if model in _RACK_MIB:
        return _RACK_MIB[model] * MIB
    named = re.search(r"(?<![a-z0-9])(\d+)\s*G(?:i?B)?(?![a-z0-9])", gpu, re.IGNORECASE)
    size = int(named[1]) if named else _DEFAULT_GB.get(model)
    if size is None:
        return None
    known = _MEMORY_MIB.get((model, size))
    return known * MIB if known is not None else int(size * GIB * NAMED_SHARE)


def nvlink_domain_of(gpu: str, gpus_per_node: int) -> int:
    """Number of GPUs that share the fast link: 72 for an NVL72 rack, otherwise those of a node."""
    rack = re.search(r"NVL(\d+)", gpu, re.IGNORECASE)
    return max(int(rack[1]), 1) if rack else gpus_per_node


def nic_Bps_of(gpu: str) -> float:
    """The usual network line rate per GPU for this GPU model, in bytes/s. That of a card without
    a node in the catalogue is Ethernet's, unless the table has its model.
    """
    if (known := _NIC_GBPS.get(gpu_model(gpu))) is not None:
        return known * 1e9 / 8
    try:
        is_card = home_of(device_of(gpu)) is None
    except AutoparError:  # which is refused where it is predicted
        is_card = False
    return ETHERNET.bandwidth_Bps if is_card else OTHER_NIC_GBPS * 1e9 / 8


def system_of(text: str) -> str:
    """The node preset of a system that a text names, such as `Jean Zay`; '' if it names none."""
    return next((node for name, node in _SYSTEMS if re.search(name, text, re.IGNORECASE)), "")


def named_node(system: str) -> str:
    """The node preset that the column `system` of a row names: one of the catalogue, or a known
    system. Raises AutoparError for any other text.
    """
    named = system_of(system) or system.strip().lower()
    if named not in NODES:
        raise AutoparError(
            f"system={shown(system)} is no node of the catalogue; {nearest(named, list(NODES))}"
        )
    return named


def network_of(
    device: str, per_node: int, nic_Bps: float, system: str, fitted: FittedConstants = FITTED
) -> tuple[dict[str, Any], str]:
    """(arguments of `ClusterSpec.make` for the network between nodes; its name). The line rate of a
    GPU is `nic_Bps`.

    Interfaces, latency and efficiency are those of the node `system`, if it has these devices and
    that many, or else those of the device's home. No rate decides them. '' if the catalogue has
    neither.
    """
    home = home_of(device)
    homes = [NODES[system]] if system else []
    homes += [home] if home else []
    node = next(
        (n for n in homes if (n.device.name, n.devices_per_node) == (device, per_node)), None
    )
    if node is None:
        return {"inter_bandwidth_Bps": nic_Bps}, "" if home is None else home.name
    topology = node.topology(1, fitted)
    links = {f"inter_{f.name}": getattr(topology.inter, f.name) for f in fields(topology.inter)}
    links["inter_bandwidth_Bps"] = nic_Bps * per_node / topology.nics
    return links | {"nics_per_node": node.nics_per_node}, node.name
