"""What `autopar calibrate` found, as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autopar.ir.cluster import ClusterSpec

if TYPE_CHECKING:
    from rich.console import Group


def calibration_table(spec: ClusterSpec, path: str) -> Group:
    """Ends and best rates of the measured curves of a calibrated cluster, which was written to `path`."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    device, link = spec.device, spec.topology.intra
    table = Table("", "smallest", "largest", "best rate", box=SIMPLE_HEAD, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"

    def row(what: str, curve: tuple[tuple[float, float], ...], unit: str) -> None:
        rate = max(size / seconds for size, seconds in curve) / 1e9
        ends = (
            f"{_size(size, unit)} in {1e3 * seconds:.3g} ms"
            for size, seconds in (curve[0], curve[-1])
        )
        table.add_row(what, *ends, f"{rate:.3g} G{unit}/s")

    for dtype, curve in device.matmul_curves.items():
        row(f"matrix product {dtype}", curve, "FLOP")
    row("element-wise fp32", device.memory_curve, "B")
    for name, by_ranks in link.curves.items():
        for ranks, curve in by_ranks.items():
            row(f"{name.replace('_', ' ')} over {ranks}", curve, "B")
    launch = f"an operation costs {1e6 * device.launch_s:.3g} us"
    if device.dispatch_s is not None:
        launch = f"a kernel is launched in {1e6 * device.launch_s:.3g} us, its operation issued in {1e6 * device.dispatch_s:.3g} us"
    head = f"{spec}, {device.memory_bytes / 2**30:.1f} GiB each; {launch}"
    return Group(
        Text(head),
        table,
        Text(f"written to {path}: autopar explain MODEL {path} --global-batch N plans for it"),
    )


def _size(size: float, unit: str) -> str:
    """1048576 B -> 1.05 MB."""
    for scale, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= scale:
            return f"{size / scale:.3g} {letter}{unit}"
    return f"{size:.3g} {unit}"
