"""Tables of the documentation that come from the code, as Markdown.

A page has such a table in a cog block; `cog -r -I docs FILE...` writes it again. Each function
returns the lines of one table.
"""

from __future__ import annotations

from collections.abc import Iterable

from autopar.cli.help_texts import EXIT_CODES, ONE_IF
from autopar.ir.cluster import DEVICES, NODES
from autopar.request.options import OPTIONS, PARTS, Option
from autopar.request.pins import PINS


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    names = list(header)
    lines = [f"| {' | '.join(line)} |" for line in (names, *rows)]
    return "\n".join([lines[0], "|---" * len(names) + "|", *lines[1:]]) + "\n"


def pins() -> str:
    """The name and meaning of every pin, as the command line's help has them."""
    return _table(("pin", "meaning"), ((f"`{name}`", pin.help) for name, pin in PINS.items()))


def _in_python(row: Option) -> str:
    """How an option is said to `autopar.plan`; '' if only commands have it."""
    if row.name == "fp8_scaling":  # in Python a recipe alone does not turn fp8 on
        return f"`Software(matmul_dtype='fp8', {row.name}=...)`"
    if row.name in PARTS:
        return f"`Software({row.name}=...)`"
    return f"`{row.name}`" if row.keyword else ""


def options() -> str:
    """The options of a request in Python and on the command line, each with its default and meaning."""
    rows = [
        (
            _in_python(row),
            f"`{row.flag}`" if row.flag else "",
            ""
            if row.default in (None, False)
            else f"{row.default:g}"
            if isinstance(row.default, float)
            else row.default,
            row.help.rstrip("."),
        )
        for row in (OPTIONS | PARTS).values()
    ]
    return _table(("`autopar.plan`", "command line", "default", "meaning"), rows)


def devices() -> str:
    """Memory and dense bf16 rate of every device of the catalogue; of fp16 where there is no bf16."""
    rows = []
    for name, device in DEVICES.items():
        dtype = "bf16" if "bf16" in device.flops else "fp16"
        rate = f"{device.flops[dtype] / 1e12:,.4g} TFLOP/s" + (" (fp16)" if dtype == "fp16" else "")
        rows.append((f"`{name}`", f"{device.memory_bytes / 2**30:.1f} GiB", rate))
    return _table(("device", "memory", "bf16"), rows)


def nodes() -> str:
    """Devices of every node of the catalogue, and line rates in one direction."""
    rows = (
        (
            f"`{name}`",
            f"{node.devices_per_node} x `{node.device.name}`",
            f"{node.intra.bandwidth_Bps / 1e9:g} GB/s",
            f"{node.nics_per_node or node.devices_per_node} x {node.inter.bandwidth_Bps / 1e9:g} GB/s",
        )
        for name, node in NODES.items()
    )
    return _table(("node", "devices", "inside, each device", "network interfaces"), rows)


def exit_codes() -> str:
    """The exit codes that all commands share."""
    return _table(("code", "meaning"), EXIT_CODES)


def negative_answers() -> str:
    """The meaning of exit code 1, by command."""
    return _table(("command", "code 1"), ((f"`{name}`", text) for name, text in ONE_IF.items()))
