"""The choices of a candidate that prices depend on, with the software that runs it."""

from __future__ import annotations

from dataclasses import dataclass

from autopar_cost_models import Link

from autopar.ir.cluster import ClusterSpec
from autopar.ir.mesh import MeshShape
from autopar.ir.plan_fields import AxisChoice
from autopar.ir.traced import BlockClass
from autopar.request.software import Software

_DEFAULT = Software()


@dataclass(frozen=True, slots=True)
class Setting:
    """The choices of a candidate that prices depend on. `micro_batch` is in sequences per rank.

    `zero` is the ZeRO stage, and `shard` the data-parallel ranks within which it shards (0: all).
    `context_method` is that of all attention under context parallelism (None: the cheapest of each
    op). `sequence_parallel`: whether tp shards positions between matrix products (None: as the
    solver finds). `stage_sizes` has the layers of each stage of a pipeline ((): as even as
    possible).

    `offload` says what is in host memory: "none", "optimizer" or "parameters"; the latter two need
    a cluster that describes its host. On a cluster of several kinds of devices a setting is about
    one kind: `cluster` is that group, and `between` is the link to the other pipeline ranks.
    """

    mesh: MeshShape
    micro_batch: int
    num_microbatches: int
    zero: int
    recompute: str
    precision: str
    cluster: ClusterSpec
    context_method: str | None = (
        None  # of all attention under context parallelism; None: the cheapest of each
    )
    stages_per_rank: int = 1  # of a pipeline
    schedule: str = "none"
    sequence_parallel: bool | None = (
        None  # whether tp shards positions between the matrix products of a block; None: as the solver finds
    )
    software: Software = _DEFAULT
    offload: str = "none"
    between: Link | None = None
    shard: int = 0  # data-parallel ranks, neighbours, that share out what ZeRO does; 0: all
    stage_sizes: tuple[int, ...] = ()  # layers of each stage of a pipeline; (): as even as possible

    @property
    def issue_s(self) -> float:
        """Seconds in which the host issues one operation; 0 on a CPU, where it is part of the
        operation's time.
        """
        device, own_s = self.cluster.device, self.software.issue_s
        return device.issue_s if own_s is None or device.generation == "cpu" else own_s

    @property
    def host_slowdown(self) -> float:
        """How many times as long the host takes to issue: more than 1 only where some ranks of one
        pipeline lie on different nodes, as the software says.
        """
        mesh, topology = self.mesh, self.cluster.topology
        spans = mesh.pp * mesh.stride("pp")
        if mesh.pp == 1 or topology.nodes == 1 or topology.devices_per_node % spans == 0:
            return 1.0
        return 1.0 + self.software.network_slows_host * mesh.tp

    @property
    def gathers_by_segment(self) -> bool:
        """Whether the engine gathers the parameters of a segment when it runs, and frees them after (`runtime/state/gathering.py`)."""
        return (
            self.zero == 3
            and self.mesh.pp == 1
            and not self.software.root_unit
            and not self.software.live_parameters
        )

    @property
    def frozen(self) -> str:
        """How ranks hold frozen parameters, a row of `FROZEN`: whole unless ZeRO shards parameters."""
        return self.software.frozen if self.zero == 3 else "whole"

    @property
    def moves_by_segment(self) -> bool:
        """Whether the parameters of a segment are on the device only while the segment runs:
        gathered by segment, or offloaded.
        """
        return self.gathers_by_segment or self.offload == "parameters"

    def recomputes(self, block: BlockClass) -> bool:
        """Whether segments of a class keep only their inputs, and recompute everything else: layers
        in mode "full", picked classes in mode `every-k`.
        """
        if self.recompute == "full":
            return block.is_layer
        return is_periodic(self.recompute) and bool(block.picked)


def is_periodic(recompute: str) -> bool:
    """Whether a recompute mode is `every-k`: layers k, 2k, ... are recomputed whole."""
    return recompute.startswith("every-")


AxisChoices = list[dict[str, dict[str, AxisChoice]]]
"""For each class: op -> axis -> its choice, on the axes that propagation decides."""
