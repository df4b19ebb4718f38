"""What `autopar calibrate` prints of a measured cluster, and of one that is fitted to a run."""

from __future__ import annotations

from dataclasses import asdict

from autopar_cost_models.curves import best_rate

from autopar.foreign.measured.fit import Refit
from autopar.ir.cluster import ClusterSpec
from autopar.text.replies import Reply
from autopar.text.tables import Table
from autopar.text.units import gib, ms


def calibration_reply(spec: ClusterSpec, path: str) -> Reply:
    """The end points and best rates of the measured curves of a cluster, which was written to `path`."""
    device, link = spec.device, spec.topology.intra
    curves = [(f"matrix product {dtype}", c, "FLOP") for dtype, c in device.matmul_curves.items()]
    if device.memory_curve is not None:
        curves.append(("element-wise fp32", device.memory_curve, "B"))
    for name, by_ranks in link.curves.items():
        curves += [(f"{name.replace('_', ' ')} over {n}", c, "B") for n, c in by_ranks.items()]
    rows = []
    for what, curve, unit in curves:
        ends = (f"{_size(size, unit)} in {1e3 * s:.3g} ms" for size, s in (curve[0], curve[-1]))
        rows.append((what, *ends, f"{best_rate(curve) / 1e9:.3g} G{unit}/s"))
    launch = f"an operation costs {1e6 * device.launch_s:.3g} us"
    if device.dispatch_s is not None:
        launch = f"a kernel is launched in {1e6 * device.launch_s:.3g} us, its operation issued in {1e6 * device.dispatch_s:.3g} us"
    head = f"{spec}, {device.memory_bytes / 2**30:.1f} GiB each; {launch}"
    table = Table(("", "smallest", "largest", "best rate"), rows, (1, 2, 3))
    return Reply([head, table, _written(path)], asdict(spec))


def _written(path: str) -> str:
    return f"written to {path}: autopar explain MODEL {path} --global-batch N plans for it"


def _size(size: float, unit: str) -> str:
    """A size with a decimal prefix: 1048576 B -> `1.05 MB`."""
    for scale, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= scale:
            return f"{size / scale:.3g} {letter}{unit}"
    return f"{size:.3g} {unit}"


def refit_reply(found: Refit, path: str) -> Reply:
    """The fitted rates, the step as measured and predicted, and what the run does not show. `path` is
    the cluster file that was written. In JSON, shares are of datasheets' rates.
    """
    rows = [
        (
            change.name,
            *(_value(x, change.unit) for x in (change.before, change.after)),
            change.shown_by,
        )
        for change in found.changes
    ]
    columns = ("share of the datasheet's rate", "before", "fitted", "shown by")
    parts: list[str | Table] = [Table(columns, rows, (1, 2), title=f"Fitted to {found.run.source}")]
    if found.before is not None and found.after is not None:
        heads = ("", "measured", "before", "fitted")
        parts.append(Table(heads, _steps(found), (1, 2, 3), title="A step"))
    parts += [f"not fitted: {words}" for words in found.unseen]
    data = {
        "source": found.run.source,
        "changes": [asdict(change) for change in found.changes],
        "not_fitted": list(found.unseen),
        "measured_s": found.measured_s,
        "measured_reserved_bytes": found.run.reserved_bytes,
        "predicted_before_s": found.before.step_s if found.before else None,
        "predicted_s": found.after.step_s if found.after else None,
        "cluster": found.cluster.as_data(),
    }
    return Reply([*parts, _written(path)], data)


def _value(value: float, unit: str) -> str:
    return f"{value:.3g} {unit}" if unit else f"{100 * value:.1f} %"


def _steps(found: Refit) -> list[tuple[str, str, str, str]]:
    assert found.before is not None and found.after is not None
    measured = "not in it" if found.measured_s is None else ms(found.measured_s)
    rows = [("seconds", measured, ms(found.before.step_s), ms(found.after.step_s))]
    held = found.run.reserved_bytes
    memory = [gib(max(one.plan.predicted.peak_memory_bytes)) for one in (found.before, found.after)]
    rows.append(("memory", "not in it" if held is None else gib(held), memory[0], memory[1]))
    return rows
