"""Candidates: the choices that the search enumerates."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.mesh import MeshShape

INFINITE = float("inf")

MIXED = "mixed"
"""The recompute choice in which each block has its best mode."""

MODES = ("none", "gather", "selective", "full")
"""The modes of a block under `MIXED`. The first keeps most and the last keeps least."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """The choices that are fixed before the strategy of each op is solved: mesh, micro-batch, ZeRO
    stage, recompute mode, pipeline schedule and offload. `schedule` and `stages_per_rank` are used
    if `schedules` is empty. `stage_sizes` has the layers of each stage if they are fixed, and then
    all `schedules` have as many stages a rank.
    """

    mesh: MeshShape
    micro_batch: int  # sequences per data-parallel rank per micro-batch
    num_microbatches: int
    zero: int
    recompute: str  # a recompute mode for all blocks, or `MIXED`
    stages_per_rank: int = 1
    schedule: str = "none"  # of a pipeline
    schedules: tuple[
        tuple[str, int], ...
    ] = ()  # if stages are to be found: schedules to choose from, with their stages a rank
    offload: str = "none"  # what is in host memory; one for all candidates of a search
    shard: int = (
        0  # data-parallel ranks that share out what ZeRO does, of which groups hold copies; 0: all
    )
    stage_sizes: tuple[int, ...] = ()  # layers of each stage of a pipeline; (): not fixed

    @property
    def parameters(self) -> tuple[MeshShape, int, int]:
        """A key: (mesh, ZeRO stage, `shard`). Candidates with equal keys have the same costs of
        parameters.
        """
        return self.mesh, self.zero, self.shard

    @property
    def holds(self) -> tuple:
        """A key. Candidates with equal keys have the same bytes of parameters, and the same fixed bytes
        in the first recompute mode. If that mode recomputes, its buffers depend on the micro-batch,
        which is then part of the key.
        """
        return self.parameters, self.modes, 0 if self.modes[0] == "none" else self.micro_batch

    @property
    def is_joint(self) -> bool:
        """Whether recompute modes or pipeline stages are left open, to be optimized together with
        the placement: `recompute` is `MIXED`, or `schedules` is not empty.
        """
        return self.recompute == MIXED or bool(self.schedules)

    @property
    def modes(self) -> tuple[str, ...]:
        """The recompute modes that blocks may have. Without tp there is nothing to gather again."""
        if self.recompute != MIXED:
            return (self.recompute,)
        return tuple(mode for mode in MODES if mode != "gather" or self.mesh.tp > 1)

    def __str__(self) -> str:
        choices = [
            f"{name} of {count} stages a rank"
            for name, count in self.schedules or ((self.schedule, self.stages_per_rank),)
        ]
        stages = ", " + " or ".join(choices) if self.mesh.pp > 1 else ""
        zero = f"{self.zero}" + (f" over {self.shard} ranks" if self.shard else "")
        return f"{self.mesh}, micro-batch {self.micro_batch}, zero {zero}, recompute {self.recompute}{stages}"
