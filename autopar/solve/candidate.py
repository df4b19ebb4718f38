"""What a search goes through and what it finds: candidates and the result."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.annotated import AnnotatedModel
from autopar.ir.mesh import MeshShape
from autopar.solve.placement import Infeasible, Solution

INFINITE = float("inf")

MIXED = "mixed"
"""Each block recomputes as is best."""

MODES = ("none", "selective", "full")
"""What a block may do under `MIXED`: from the one that keeps most to the one that keeps least."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """What is decided before the placement."""

    mesh: MeshShape
    micro_batch: int  # sequences per data-parallel rank per micro-batch
    num_microbatches: int
    zero: int
    recompute: str  # a recompute mode for all blocks, or `MIXED`
    stages_per_rank: int = 1
    schedule: str = "none"  # of a pipeline
    schedules: tuple[tuple[str, int], ...] = ()  # if stages are to be found: schedules to choose from, with their stages a rank
    offload: str = "none"  # what is in host memory; one for all candidates of a search
    shard: int = 0  # data-parallel ranks that share out what ZeRO does, of which groups hold copies; 0: all

    @property
    def parameters(self) -> tuple[MeshShape, int, int]:
        """Parameters cost the same where these are equal."""
        return self.mesh, self.zero, self.shard

    @property
    def holds(self) -> tuple:
        """What parameters hold, and what is fixed in the first mode, is the same where these are equal: of a mode that makes something
        again the buffers follow the micro-batch."""
        return self.parameters, self.modes, 0 if self.modes[0] == "none" else self.micro_batch

    @property
    def is_joint(self) -> bool:
        """Whether recompute modes or stages are found together with the placement."""
        return self.recompute == MIXED or bool(self.schedules)

    @property
    def modes(self) -> tuple[str, ...]:
        """Recompute modes that blocks may have."""
        return MODES if self.recompute == MIXED else (self.recompute,)

    def __str__(self) -> str:
        choices = [f"{name} of {count} stages a rank" for name, count in self.schedules or ((self.schedule, self.stages_per_rank),)]
        stages = ", " + " or ".join(choices) if self.mesh.pp > 1 else ""
        zero = f"{self.zero}" + (f" over {self.shard} ranks" if self.shard else "")
        return f"{self.mesh}, micro-batch {self.micro_batch}, zero {zero}, recompute {self.recompute}{stages}"


@dataclass(frozen=True, slots=True)
class SearchResult:
    """`status`: 'optimal', 'feasible' (time limit; see `bound_s`), 'infeasible' (proven: nothing fits), 'not found' (on devices of several
    kinds: no placement that was tried fits) or 'time limit' (nothing found).

    `outcomes` has one dict per candidate, in the given order, for `Certificate.meshes`.  Its `outcome` is 'chosen', 'solved', 'pruned',
    'infeasible', 'too large' (the fastest placement of a pipeline does not fit its stages), or 'unexplored' where the time limit came
    first; `bound_s` is None for an infeasible one.
    """

    status: str
    best: tuple[Candidate, Solution] | None
    model: AnnotatedModel | None  # of the best candidate: with a class for each class and mode, if recompute modes are mixed
    origin: tuple[tuple[int, str], ...] | None  # then for each class of `model`: class of the traced model, recompute mode
    bound_s: float  # no placement of any candidate that fits is faster
    outcomes: tuple[dict, ...]
    smallest: tuple[Candidate, Infeasible] | None  # if nothing fits: the least memory over all candidates
    solve_time_s: float
    groups: tuple[AnnotatedModel, ...] = ()  # on devices of several kinds: `model` at the prices of each (`groups.py`)

    @property
    def gap(self) -> float:
        """(time - bound) / time of the best placement; 0 is proven optimal, up to `OPTIMALITY_GAP`."""
        return 1.0 if self.best is None else (self.best[1].time_s - self.bound_s) / max(self.best[1].time_s, 1e-300)


def outcome_data(c: Candidate, found: Solution | None, outcome: str, bound_s: float, reason: str) -> dict:
    """What became of a candidate, as in `SearchResult.outcomes`."""
    return {"mesh": c.mesh.as_dict(), "micro_batch": c.micro_batch, "num_microbatches": c.num_microbatches, "zero": c.zero,
            "shard": c.shard, "recompute": c.recompute, "stages_per_rank": c.stages_per_rank, "schedule": c.schedule,
            "outcome": outcome, "time_s": found and found.time_s, "memory_bytes": found and found.memory_bytes,
            "bound_s": None if bound_s == INFINITE else bound_s, "reason": reason}  # fmt: skip
