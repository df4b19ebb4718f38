"""What a prediction assumes where a row does not say it: the device, the network, blank fields."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from autopar.errors import AutoparError, shown
from autopar.predict.defaults import DEFAULTS
from autopar.predict.machines import device_of, network_of
from autopar.predict.run import Run

_RULES = {default.field: default for default in DEFAULTS}


@dataclass(frozen=True, slots=True)
class Assumed:
    """Something that is inferred for a run: `what` it is, its value or rule in words, and why."""

    what: str
    rule: str
    reason: str

    def __str__(self) -> str:
        return f"{self.what}: {self.rule} ({self.reason})"


def assumed_of(run: Run) -> tuple[Assumed, ...]:
    """What is assumed for a run: its device and network first, then its blank fields."""
    found = [*_of_machine(run)]
    for name in run.defaulted:
        default = _RULES[name]
        found.append(Assumed(name, default.rule, default.reason))
    return tuple(found)


def _of_machine(run: Run) -> Iterable[Assumed]:
    machine = run.machine
    try:
        device = device_of(machine.gpu)
    except AutoparError:  # which says so in the place of a prediction
        return
    if device != machine.gpu.strip().lower():
        yield Assumed("device", device, f"gpu is {shown(machine.gpu)}")
    if machine.gpus <= machine.nvlink_domain:
        return
    _, node = network_of(device, machine.nvlink_domain, machine.nic_Bps, machine.system)
    rate = f"at {machine.nic_Bps * 8 / 1e9:g} Gbit/s a GPU"
    if machine.system and node == machine.system:
        yield Assumed("network", f"that of {node}, {rate}", "the row names the system")
    elif machine.system:
        why = f"{machine.system}, which the row names, has other nodes"
        yield Assumed("network", f"kind and efficiency of {node or device}, {rate}", why)
    elif node:
        why = "no system is named: that of the device's usual node"
        yield Assumed("network", f"kind and efficiency of {node}, {rate}", why)
    else:
        why = f"no system is named, and the catalogue has no node with {device}"
        yield Assumed("network", f"kind and efficiency of Ethernet, {rate}", why)


def assumed_counts(runs: Iterable[Run]) -> list[tuple[Assumed, int]]:
    """(what is assumed, for how many of the runs), the most frequent first."""
    return Counter(assumed for run in runs for assumed in assumed_of(run)).most_common()
