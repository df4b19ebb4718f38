"""How a job is laid out over devices, as data."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from math import lcm

from autopar_cost_models.checks import is_whole

from autopar.errors import AutoparError, shown
from autopar.ir.mesh import MOST_DEVICES


@dataclass(frozen=True, slots=True)
class Layout:
    """How a job is laid out over devices, in autopar's terms.

    Attributes:
        tp: tensor-parallel ranks.
        pp: ranks of the pipeline.
        cp: ranks that share out the positions of a sequence.
        dp: all data-parallel ranks.  None: what the devices leave.
        ep: ranks that share out experts.
        etp: tensor-parallel ranks of an expert.  None: as `tp`.
        vpp: stages of a pipeline rank.
        stages: layers of each stage, in the order of the model.  () means dealt evenly.
        micro_batch: sequences of a micro-batch on a data-parallel rank.
        global_batch: sequences of a step.  None: `accumulation` micro-batches for each data-parallel
            rank.
        accumulation: micro-batches of a step on a data-parallel rank, if there is no `global_batch`.
        zero: the ZeRO stage.
        copies: groups of dp x cp ranks that each share out what ZeRO does, and so hold a copy of all.
        recompute: 'none', 'selective' (the attention core), 'op' or 'full'.
        recompute_layers: layers of each stage that are computed again.  0 means all.
        schedule: the order of work in the pipeline; 'none' without one.
        sequence_parallel: whether activations between products are sharded over tp.
        offload: 'none', 'optimizer' or 'parameters'.
        order: mesh axes as ranks lie, outermost first; '' is tp, cp, ep, dp, pp from the inside.
        group: micro-batches that run through a virtual stage in a row.  0 means `pp`.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int | None = None
    ep: int = 1
    etp: int | None = None
    vpp: int = 1
    stages: tuple[int, ...] = ()
    micro_batch: int = 1
    global_batch: int | None = None
    accumulation: int = 1
    zero: int = 0
    copies: int = 1
    recompute: str = "none"
    recompute_layers: int = 0
    schedule: str = "none"
    sequence_parallel: bool = False
    offload: str = "none"
    order: str = ""
    group: int = 0

    def __post_init__(self) -> None:
        for name in (
            "tp",
            "pp",
            "cp",
            "ep",
            "vpp",
            "micro_batch",
            "dp",
            "etp",
            "global_batch",
            "accumulation",
        ):
            value = getattr(self, name)
            if value is not None and not is_whole(value, 1, MOST_DEVICES):
                raise AutoparError(f"{name}={shown(value)} must be a whole number >= 1")

    @property
    def least_gpus(self) -> int:
        """The fewest devices that the layout can have."""
        dp = self.dp or lcm(self.ep, self.copies if self.zero else 1)
        return self.tp * self.pp * self.cp * dp

    def dp_on(self, gpus: int) -> int:
        """The data-parallel ranks on `gpus` devices. At least 1, also if they do not divide."""
        return self.dp or max(1, gpus // (self.tp * self.pp * self.cp))

    def shard_on(self, gpus: int) -> int:
        """The ranks of dp x cp that share out what ZeRO does on `gpus` devices; 0 means all."""
        return self.dp_on(gpus) * self.cp // self.copies if self.copies > 1 and self.zero else 0

    def batch_on(self, gpus: int) -> int:
        """The sequences of a step on `gpus` devices."""
        return self.global_batch or self.micro_batch * self.accumulation * self.dp_on(gpus)

    def micro_batches_on(self, gpus: int) -> int:
        """The micro-batches of a step on `gpus` devices, rounded down."""
        return self.batch_on(gpus) // (self.micro_batch * self.dp_on(gpus))


_FREE = ("dp", "global_batch", "accumulation", "etp", "group", "recompute_layers")
"""Fields of layouts that say the same in other words."""


def unlike(one: Layout, other: Layout, gpus: int) -> list[str]:
    """The fields in which two layouts differ on `gpus` devices, in what they do."""
    alone = one.dp_on(gpus) * one.cp == other.dp_on(gpus) * other.cp == 1
    free = (*_FREE, *(("zero", "copies") if alone else ()))
    free += ("copies",) * (not one.zero and not other.zero)
    names = [f.name for f in fields(Layout) if f.name not in free]
    found = [name for name in names if getattr(one, name) != getattr(other, name)]
    if "stages" in found and {one.stages, other.stages} & {()} and len(set(one.stages or other.stages)) == 1:  # fmt: skip
        found.remove("stages")
    numbers = {"dp": Layout.dp_on, "batch": Layout.batch_on, "micro_batches": Layout.micro_batches_on}  # fmt: skip
    return found + [n for n, of in numbers.items() if of(one, gpus) != of(other, gpus)]


def like(layout: Layout, by: Layout) -> Layout:
    """A layout of a plan, written as a job writes its own: what the devices leave stays open."""
    etp = None if by.etp is None else layout.tp
    return replace(layout, etp=etp, group=0, dp=None if by.dp is None else layout.dp)
