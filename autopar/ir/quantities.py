"""Numbers with units, as users write them: 24GiB, 200Gb/s, 1.5TB/s, 125TFLOPS, 5us, 24e9."""

from __future__ import annotations

import re
from typing import Any

from autopar.errors import shown

_PREFIXES = {
    "": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15,
    "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40,
}  # fmt: skip
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_BYTES = {f"{prefix}B": factor for prefix, factor in _PREFIXES.items()}
_BITS = {
    f"{prefix}{bit}": factor / 8 for prefix, factor in _PREFIXES.items() for bit in ("b", "bit")
}
_RATES = {
    f"{unit}{per}": factor for unit, factor in (_BYTES | _BITS).items() for per in ("/s", "ps")
}
_FLOPS = {
    f"{prefix}{word}": factor
    for prefix, factor in _PREFIXES.items()
    for word in ("FLOPS", "FLOP/s", "FLOPs", "FLOPs/s", "flops", "OPS")
}
_UNITS = {
    "_bytes": (_BYTES, "24GiB, 24GB or 24e9"),
    "_Bps": (_RATES, "200Gb/s, 25GB/s or 25e9"),
    "_s": (_SECONDS, "5us or 5e-6"),
    "_flops": (_FLOPS, "125TFLOPS or 125e12"),
    "_efficiency": ({"": 1.0, "%": 0.01}, "0.8 or 80%"),
    "_hour": ({"": 1.0}, "2.5"),
    "oversubscription": ({"": 1.0}, "7"),
}
"""By the end of a key: the units that its values may have, as factors, and examples."""
_NUMBER = re.compile(r"\s*([-+]?[\d_]*\.?[\d_]*(?:[eE][-+]?\d+)?)\s*([^\d\s].*?)?\s*")


def quantity(key: str, value: Any) -> Any:
    """The number that `value` is, in SI units (bytes, bytes/s, seconds, FLOP/s), if `key` ends in a
    word of a unit, such as `_Bps`. Whole numbers of bytes are ints. Other keys and values that are
    no texts are returned as they are, but whole floats of bytes become ints.

    Raises ValueError if the text is no number, or its unit does not suit the key.
    """
    ending = next((end for end in _UNITS if key.endswith(end)), None)
    if ending is None:
        return value
    found = _parsed(key, ending, value) if isinstance(value, str) else value
    is_whole = isinstance(found, float) and ending == "_bytes" and found.is_integer()
    return int(found) if is_whole else found


def _parsed(key: str, ending: str, text: str) -> float:
    units, examples = _UNITS[ending]
    found = _NUMBER.fullmatch(text)
    unit = (found[2] or "") if found else ""
    try:
        number = float(found[1]) if found else float(text)
    except ValueError:
        raise ValueError(f"{key}={shown(text)} is not a number; write {examples}") from None
    if unit and unit not in units:
        raise ValueError(
            f"{key}={shown(text)} has the unknown unit {shown(unit)}; write {examples}"
        )
    factor = units.get(unit, 1.0)
    # 1.9us is 1.9e-06 itself, which 1.9 * 1e-6 is not
    size = number * factor if factor >= 1 else number / round(1 / factor)
    return float(round(size)) if ending == "_bytes" and factor != 1 else size
