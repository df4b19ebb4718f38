"""The table that `autopar calibrate` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autopar_cost_models.curves import best_rate

from autopar.ir.cluster import ClusterSpec

if TYPE_CHECKING:
    from rich.console import Group


def calibration_table(spec: ClusterSpec, path: str) -> Group:
    """A table with the end points and best rates of the measured curves of a cluster, which was
    written to `path`.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    device, link = spec.device, spec.topology.intra
    table = Table("", "smallest", "largest", "best rate", box=SIMPLE_HEAD, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"

    curves = [(f"matrix product {dtype}", c, "FLOP") for dtype, c in device.matmul_curves.items()]
    if device.memory_curve is not None:
        curves.append(("element-wise fp32", device.memory_curve, "B"))
    for name, by_ranks in link.curves.items():
        curves += [(f"{name.replace('_', ' ')} over {n}", c, "B") for n, c in by_ranks.items()]
    for what, curve, unit in curves:
        ends = (f"{_size(size, unit)} in {1e3 * s:.3g} ms" for size, s in (curve[0], curve[-1]))
        table.add_row(what, *ends, f"{best_rate(curve) / 1e9:.3g} G{unit}/s")
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
    """A size with a decimal prefix: 1048576 B -> `1.05 MB`."""
    for scale, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= scale:
            return f"{size / scale:.3g} {letter}{unit}"
    return f"{size:.3g} {unit}"
