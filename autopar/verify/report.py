"""The result of `autopar verify`, and its table."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from autopar.ir.mesh import mesh_words
from autopar.text.layout_words import collectives
from autopar.text.plan_words import sharing_words
from autopar.text.replies import Field, Reply, Styled, field_table
from autopar.text.units import percent


def verify_reply(report: VerifyReport) -> Reply:
    """The report: a head, a row for each mesh, failures, and the verdict."""
    fields = (
        Field("", _verified, "mesh"),
        Field("", lambda mesh: mesh.worst_error, "worst error", "{:.2g}".format),
        Field("", lambda mesh: mesh.worst_tensor, "in tensor"),
        Field("", lambda mesh: mesh.loss_error, "loss error", "{:.2g}".format),
        Field("", lambda mesh: collectives(mesh.collectives), "collectives per micro-batch"),
        Field("", lambda mesh: mesh.time_s, "time", "{:.1f} s".format),
        Field("", lambda mesh: "exact" if mesh.exact else "NOT EXACT", "verdict"),
    )
    losses = ", ".join(f"{loss:.6f}" for loss in report.reference_losses)
    compiled = ", compiled" if report.compiled else ""
    head = (
        f"{report.model} in {report.precision} on {report.nproc} processes{compiled}; learning rate {report.learning_rate:g} moves "
        f"the median tensor by {percent(report.moved)}\nlosses on one device: {losses}"
    )
    if report.drops:
        head += "\nthe model drops, so that the reference is autopar's engine on one device: PyTorch draws other masks"
    failures = [f"{mesh} was not tried: {reason}" for mesh, reason in report.skipped]
    failures += [
        f"{_verified(mesh)} did not run: {mesh.failure}" for mesh in report.meshes if mesh.failure
    ]
    if report.rounding is not None:
        failures.append(
            f"one device that reads the rows in reverse order is off by {report.rounding:.2g} itself. Where errors are no larger than "
            "that, rounding grows from step to step; fewer --steps tell more"
        )
    last = "every plan is exact" if report.exact else "NOT EXACT"
    tail = f"{last} (update-relative error of every tensor, tolerance {report.tolerance:g})"
    table = field_table(fields, report.meshes)
    return Reply([head, table, *failures, Styled(tail, "bold")], report.as_dict())


def _verified(mesh: MeshReport) -> str:
    zero = [f"zero={sharing_words(mesh.zero, mesh.shard)}"] if mesh.zero else []
    how = [word for word in (mesh.schedule, mesh.recompute) if word not in ("none", "mixed")]
    return " ".join((mesh_words(mesh.mesh), *zero, *how))


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshReport:
    """The result of training under one plan, compared with one device. `exact` is the verdict.
    `losses` has one loss for each step.

    `worst_error` is update-relative (error / update), except for tiny updates: there it is the
    absolute error over the absolute allowance, times the tolerance. `worst_tensor` is the parameter
    or buffer that has it. `collectives` are those of the program per micro-batch, by kind. `time_s`
    is the seconds of the whole run. `failure` is '' or why the program did not run; errors are then
    infinite.
    """

    mesh: dict[str, int | str]
    micro_batch: int
    recompute: str
    exact: bool = False
    worst_error: float = float("inf")
    worst_tensor: str = ""
    loss_error: float = float("inf")
    losses: tuple[float, ...] = ()
    collectives: dict[str, int] = field(default_factory=dict)
    time_s: float = 0.0
    failure: str = ""
    schedule: str = "none"  # of the pipeline
    zero: int = 0
    shard: int = 0  # ranks that share out what ZeRO does; 0: all


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """The result of `verify`: settings, the losses on one device, and one `MeshReport` for each
    mesh.

    `moved` is how far training moved the median tensor, relative to its norm. `skipped` lists
    meshes that this model or batch does not allow, with the reason. `rounding` is measured only if a
    mesh is not exact: the worst error of one device that reads the rows in reverse order.
    """

    model: str
    precision: str
    nproc: int
    tolerance: float
    learning_rate: float
    moved: float
    reference_losses: tuple[float, ...]
    meshes: tuple[MeshReport, ...]
    skipped: tuple[tuple[str, str], ...] = ()
    drops: bool = False  # the model drops: the reference is autopar's engine on one device, whose masks PyTorch does not draw
    compiled: bool = False
    rounding: float | None = None

    @property
    def exact(self) -> bool:
        """Whether at least one mesh ran and all of them are exact."""
        return bool(self.meshes) and all(mesh.exact for mesh in self.meshes)

    def as_dict(self) -> dict[str, Any]:
        """The report as plain data for JSON, with 'exact'. Infinities (a run without numbers)
        become the text 'inf'.
        """
        data = asdict(self) | {"exact": self.exact}
        for mesh in data["meshes"]:
            for key in ("worst_error", "loss_error"):
                mesh[key] = mesh[key] if mesh[key] < float("inf") else "inf"
        if self.rounding == float("inf"):
            data["rounding"] = "inf"
        return data
