"""Builds devices, links and hosts from user input."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from autopar_cost_models import FITTED, Device, FittedConstants, Host, Link, home_of
from autopar_cost_models.catalogue import CARD_LINKS, ETHERNET
from autopar_cost_models.checks import nearest

from autopar.errors import AutoparError, shown

MOST_HEADROOM_GIB = 2**20
_DEVICE_KEYS = tuple(f.name for f in fields(Device))


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


def device_from(what: str, data: dict) -> Device:
    """A device from a mapping of its fields. Efficiencies and compute_units default to 1; launch_s
    and reserved_bytes default to 0. `what` begins the error messages.

    Raises AutoparError for an unknown or missing key, and ValueError for a wrong value.
    """
    check_keys(what, data, _DEVICE_KEYS, ("name", "flops", "memory_bytes", "memory_bandwidth_Bps"))
    defaults = {
        "launch_s": 0.0,
        "matmul_efficiency": 1.0,
        "bandwidth_efficiency": 1.0,
        "reserved_bytes": 0,
        "source": "given by the user",
    }
    given = {key: number(key, value) for key, value in data.items()}
    for table, suffix in (("flops", "_Bps"), ("dtype_efficiency", "_efficiency")):
        if isinstance(given.get(table), dict):
            given[table] = {
                dtype: number(f"{table}_{dtype}{suffix}", rate)
                for dtype, rate in given[table].items()
            }
    return Device(**defaults | given)


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
        **{key: number(key, value) for key, value in data.items()},
    }


def written(fields_: dict) -> dict:
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


def number(key: str, value: Any) -> Any:
    """`value`; a text such as 45e9 becomes a float if `key` is one of a number (ends in `_Bps`,
    `_s` or the like). YAML 1.1 reads such numbers as text. Raises ValueError if that text is not a
    number.
    """
    if isinstance(value, str) and key.endswith(
        ("_Bps", "_s", "_efficiency", "_hour", "oversubscription")
    ):
        try:
            return float(value)
        except ValueError:
            raise ValueError(f"{key}={shown(value)} is not a number") from None
    return value
