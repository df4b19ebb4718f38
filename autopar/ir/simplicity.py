"""How simple a plan is: the order in which plans within the tolerance of the fastest are preferred."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from autopar.ir.mesh import MeshShape

ESTABLISHED = ("none", "1f1b", "gpipe", "interleaved_1f1b", "zero_bubble")
"""Pipeline schedules, the one that most frameworks run first."""

INSIDE = 0.1
"""The fraction by which a plan may take longer than the fastest, so that tensor parallelism does not
cross nodes or PCIe.
"""

FEW_STAGES = 4
"""The most stages of a pipeline rank that practitioners use without need."""
_VIRTUAL = ("", "several stages a rank", f"over {FEW_STAGES} stages a rank")

UNSPLIT, USUAL = 2.5, 1.5
"""How many times the tolerance a plan may take longer than the fastest. `UNSPLIT`: without tensor,
context and pipeline parallelism, where the fastest has one of them; also with ZeRO-2 at most
besides, where the fastest has ZeRO-3. `USUAL`: without zero bubble, more than `FEW_STAGES` stages a
rank and mixed recomputation, where the fastest has one of these.
"""

FREE_SHARE = 0.2
"""The fraction of a device's memory that a plan leaves free if it is not `crowded`."""


@dataclass(frozen=True, slots=True, order=True)
class Simplicity:
    """A sort key of plans: the smaller, the simpler. Fields count in this order.

    Attributes:
        axes: mesh axes with several ranks; ZeRO within groups of ranks counts as one more.
        splits: whether tensors, sequences or layers are split: tp, cp or pp.
        virtual: 0 if pipeline ranks have one stage each, 1 with up to `FEW_STAGES`, 2 with more.
        mixed: whether layers recompute in different modes.
        schedule: the place of the pipeline schedule in `ESTABLISHED`.
        gathers: whether parameters are gathered for every pass, as under ZeRO-3.
        crowded: whether less than `FREE_SHARE` of a device's memory stays free.
    """

    axes: int
    splits: bool
    virtual: int
    mixed: bool
    schedule: int
    gathers: bool = False
    crowded: bool = False

    @property
    def is_unusual(self) -> bool:
        """Whether a plan has what few frameworks run, or seldom by default."""
        return self.virtual > 1 or self.mixed or self.schedule >= ESTABLISHED.index("zero_bubble")

    def times_tolerance(self, simpler: Simplicity) -> float:
        """How many times the tolerance a `simpler` plan may take longer than the fastest, if this
        is the simplicity of the fastest.
        """
        unsplit = self.splits and not simpler.splits
        if unsplit or (self.gathers and not simpler.splits and not simpler.gathers):
            return UNSPLIT
        return USUAL if self.is_unusual and not simpler.is_unusual else 1.0

    def allowed_more(self, simpler: Simplicity, tolerance: float) -> float:
        """The fraction by which a `simpler` plan may take longer than the fastest, which has this
        simplicity.
        """
        return self.times_tolerance(simpler) * tolerance

    @property
    def as_data(self) -> dict[str, int | bool]:
        """The fields by name, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        axes = f"{self.axes} {'axis' if self.axes == 1 else 'axes'}"
        words = [axes if self.axes else "one device"]
        words += [_VIRTUAL[self.virtual]] if self.virtual else []
        words += ["mixed recomputation"] if self.mixed else []
        words += [ESTABLISHED[self.schedule]] if self.schedule else []
        words += ["parameters gathered for every pass"] if self.gathers else []
        words += [f"less than {FREE_SHARE:.0%} of memory free".replace("%", " %")] * self.crowded
        return ", ".join(words)


def simplicity_of(
    mesh: MeshShape,
    zero: int,
    shard: int,
    stages_per_rank: int,
    recompute: str,
    schedule: str,
    is_crowded: bool = False,
) -> Simplicity:
    """The simplicity of a plan with these choices. `zero` is the stage of ZeRO and `shard` the size
    of its groups, 0 for all ranks. `is_crowded` is `Simplicity.crowded`.
    """
    return Simplicity(
        axes=sum(mesh.size(axis) > 1 for axis in ("dp", "tp", "cp", "pp", "ep")) + (shard > 0),
        splits=any(mesh.size(axis) > 1 for axis in ("tp", "cp", "pp")),
        virtual=(stages_per_rank > 1) + (stages_per_rank > FEW_STAGES),
        mixed=recompute == "mixed",
        schedule=ESTABLISHED.index(schedule) if schedule in ESTABLISHED else len(ESTABLISHED),
        gathers=zero == 3,
        crowded=is_crowded,
    )
