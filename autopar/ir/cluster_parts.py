"""Builds devices, links and hosts from user input."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from math import log
from typing import Any

from autopar_cost_models import DEVICES, FITTED, Device, FittedConstants, Host, Link, home_of
from autopar_cost_models.catalogue import CARD_LINKS, ETHERNET
from autopar_cost_models.checks import nearest

from autopar.errors import AutoparError, shown
from autopar.ir.quantities import quantity

MOST_HEADROOM_GIB = 2**20
_DEVICE_KEYS = tuple(f.name for f in fields(Device))
_RETIRED_KEYS = ("tile_s",)
"""Keys of devices in files of earlier versions, which are ignored."""


def default_links(
    device_name: str, fitted: FittedConstants = FITTED
) -> tuple[Link | None, Link | None]:
    """The links (inside a node, between nodes) of the node preset that has these devices, with
    constants from `fitted`.

    A card without a preset has its own link and Ethernet. (None, None) for an unknown device.
    """
    home = home_of(device_name)
    if home is not None:
        topology = home.topology(1, fitted)
        return topology.intra, topology.inter
    return (CARD_LINKS[device_name], ETHERNET) if device_name in CARD_LINKS else (None, None)


def link_of(side: str, default: Link | None, given: dict[str, Any]) -> Link:
    """The link `default` with the user's fields in `given` replaced; fields that are None stay.

    `side` ('intra' or 'inter') only names the link in errors. Raises ValueError for a wrong value,
    or if there is no default and the bandwidth or latency is missing.
    """
    given = {key: value for key, value in given.items() if value is not None}
    if isinstance(given.get("curves"), dict):
        given["curves"] = _by_ranks(given["curves"])
    missing = next(
        (key for key in ("bandwidth_Bps", "latency_s") if default is None and key not in given),
        None,
    )
    if missing:
        example = {"bandwidth_Bps": "50e9", "latency_s": "4e-6"}[missing]
        raise ValueError(
            f"{side}_{missing} is missing: a device outside the catalogue has no default; e.g. {side}_{missing}={example}"
        )
    if "bandwidth_Bps" in given:
        given = {"source": "given by the user", **given}
    try:
        return Link(**given) if default is None else replace(default, **given)
    except ValueError as error:
        raise ValueError(str(error).replace("link ", f"{side}_")) from None


def _by_ranks(curves: dict[str, Any]) -> dict[str, Any]:
    """Curves by transfer and number of ranks. JSON has these numbers as texts."""
    return {
        transfer: {
            int(ranks) if isinstance(ranks, str) and ranks.isdigit() else ranks: points
            for ranks, points in of.items()
        }
        if isinstance(of, dict)
        else of
        for transfer, of in curves.items()
    }


def device_from(what: str, data: dict) -> Device:
    """A device from a mapping of its fields; numbers may have units (`quantity`). What is left out
    of efficiencies, launch_s, reserved_bytes and compute_units is that of its nearest relative in the
    catalogue, and its source says so. `what` begins the error messages.

    Raises AutoparError for an unknown or missing key, and ValueError for a wrong value.
    """
    data = {key: value for key, value in data.items() if key not in _RETIRED_KEYS}
    check_keys(what, data, _DEVICE_KEYS, ("name", "flops", "memory_bytes", "memory_bandwidth_Bps"))
    defaults = {
        "launch_s": 0.0,
        "matmul_efficiency": 1.0,
        "bandwidth_efficiency": 1.0,
        "reserved_bytes": 0,
        "source": "given by the user",
    }
    given = {key: quantity(key, value) for key, value in data.items()}
    for table, suffix in (("flops", "_flops"), ("dtype_efficiency", "_efficiency")):
        if isinstance(given.get(table), dict):
            given[table] = {
                dtype: quantity(f"{dtype}{suffix}", rate) for dtype, rate in given[table].items()
            }
    device = Device(**defaults | given)
    relative = relative_of(device)
    return device if relative is None else _as_relative(device, relative, given)


def relative_of(device: Device) -> Device | None:
    """The device of the catalogue that is most like one outside it: of its generation, if the
    catalogue has that, and with the nearest rates of products and memory. None for a CPU, a device
    with measured curves, and a device of the catalogue.
    """
    known = [d for d in DEVICES.values() if d.generation != "cpu"]
    if device in known or device.generation == "cpu" or device.name.lower() == "cpu":
        return None
    if device.matmul_curves or device.memory_curve:
        return None
    own = [d for d in known if d.generation == device.generation]

    def distance(other: Device) -> float:
        dtype = next(
            (d for d in ("bf16", "fp16", "fp32") if d in device.flops and d in other.flops), None
        )
        pairs = [(device.memory_bandwidth_Bps, other.memory_bandwidth_Bps)]
        pairs += [(device.flops[dtype], other.flops[dtype])] if dtype else []
        return sum(log(a / b) ** 2 for a, b in pairs) + (0.0 if dtype else 100.0)

    return min(own or known, key=distance)


_AS_RELATIVE = (
    *(
        "matmul_efficiency",
        "bandwidth_efficiency",
        "dtype_efficiency",
        "launch_s",
        "reserved_bytes",
    ),
    *("compute_units", "generation"),
)
"""Fields of a device that a file may leave out, and that its nearest relative then decides."""


def _as_relative(device: Device, relative: Device, given: Mapping[str, Any]) -> Device:
    """The device with the fields that `given` leaves out as those of its relative, and a source
    that says so.
    """
    missing = [name for name in _AS_RELATIVE if name not in given]
    if "matmul_efficiency" in given:
        missing = [name for name in missing if name != "dtype_efficiency"]
    values = {name: getattr(relative, name) for name in missing}
    if values.get("reserved_bytes", 0) >= device.memory_bytes:
        del values["reserved_bytes"]
    if any(name.endswith("efficiency") for name in values):
        values["source"] = f"{device.source}; {ASSUMED_AS} {relative.name}"
    return replace(device, **values)


ASSUMED_AS = "efficiencies assumed as those of its nearest relative,"
"""Words in the source of a device before the name of the device whose efficiencies it takes."""


def related_links(data: Mapping[str, Any]) -> dict[str, Any]:
    """By key of a cluster file, the efficiencies of the links of a device outside the catalogue:
    those of its nearest relative's. {} if it has no relative.

    `data` has the device (a `Device`), and the figures of links as a file has them. Where a link
    has its own kind or measured curves, nothing is added.
    """
    device: Device = data["device"]
    if ASSUMED_AS not in device.source:
        return {}
    links = default_links(device.source.rpartition(" ")[2])
    return {
        f"{side}_efficiency": link.efficiency
        for side, link in zip(("intra", "inter"), links, strict=True)
        if link is not None
        and f"{side}_bandwidth_Bps" in data
        and not {f"{side}_kind", f"{side}_curves"} & data.keys()
    }


def link_from(what: str, data: Any) -> Link:
    """A link from a mapping of its fields, `curves` excepted. Raises AutoparError, which begins
    with `what`, for an unknown or missing key, or a wrong value.
    """
    if not isinstance(data, dict):
        raise AutoparError(
            f"{what} is {shown(data)}; it needs a mapping such as {{bandwidth_Bps: 25e9, latency_s: 5e-6}}"
        )
    check_keys(
        what,
        data,
        tuple(f.name for f in fields(Link) if f.name != "curves"),
        ("bandwidth_Bps", "latency_s"),
    )
    try:
        return Link(**_with_source(data))
    except ValueError as error:
        raise AutoparError(f"{what}: {error}") from None


def host_from(data: Mapping[str, Any]) -> Host:
    """A `Host` (one device's share of its host) from a mapping of its fields. Raises ValueError for
    an unknown or missing key, or a wrong value.
    """
    known = [f.name for f in fields(Host)]
    for key in data:
        if key not in known:
            raise ValueError(f"host: unknown key {shown(key)}; {nearest(key, known)}")
    if missing := [
        key
        for key in ("memory_bytes", "memory_bandwidth_Bps", "link_bandwidth_Bps")
        if key not in data
    ]:
        raise ValueError(f"host: missing {', '.join(missing)}")
    return Host(**_with_source(data))


def headroom_of(value: Any) -> float:
    """A headroom from a number or a text: a fraction below 1 (`0.1`, `10%`), or GiB from 1 on (`8`,
    `8GiB`). Raises AutoparError for anything else.
    """
    units = {"%": 0.01, "gib": 1.0}
    text = str(value).strip().lower() if isinstance(value, str | int | float) else ""
    unit = next((unit for unit in units if text.endswith(unit)), "")
    try:
        amount = float(text.removesuffix(unit)) * units.get(unit, 1.0)
    except ValueError:
        amount = -1.0
    is_odd = (unit == "gib" and 0 < amount < 1) or (unit == "%" and amount >= 1)
    if isinstance(value, bool) or is_odd or not 0 <= amount < MOST_HEADROOM_GIB:
        raise AutoparError(
            f"headroom {shown(value)} is no memory to keep free: write a fraction of the memory such as 0.1 or 10%, or GiB such as 8GiB "
            "(1 or more)"
        )
    return amount


def headroom_words(headroom: float) -> str:
    """A headroom as text: `10.2 %`, or `8 GiB` from 1 on."""
    return f"{headroom:g} GiB" if headroom >= 1 else f"{100 * headroom:.1f} %"


def _with_source(data: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the mapping with numbers parsed from text. Its `source` is 'given by the user'
    unless it has another.
    """
    return {
        "source": "given by the user",
        **{key: quantity(key, value) for key, value in data.items()},
    }


def written_fields(fields_: dict) -> dict:
    """A copy of the fields of a device or link for a cluster file: without fields that are None,
    and without empty `curves`.
    """
    return {
        key: value
        for key, value in fields_.items()
        if value is not None and not (key.endswith("curves") and not value)
    }


def check_keys(what: str, data: dict, known: tuple[str, ...], required: tuple[str, ...]) -> None:
    """Raise AutoparError if `data` has a key outside `known` or lacks one of `required`. `what`
    begins the message.
    """
    for key in data:
        if key not in known:
            raise AutoparError(f"{what}: unknown key {shown(key)}; {nearest(key, list(known))}")
    missing = [key for key in required if key not in data]
    if missing:
        raise AutoparError(
            f"{what}: missing {', '.join(missing)}; required are {', '.join(required)}"
        )
