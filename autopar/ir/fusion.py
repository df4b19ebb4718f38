"""What the fusion pass did to a model, as data: which subgraphs are one op of our own now, and which nearly are.

`Fusion` crosses layers.  `trace/fusion/` makes it, a `TracedModel` and a `Plan` carry it, and `explaining/plan_report.py` prints it.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.errors import shown

FUSE_MODES = ("off", "norms", "all", "head")
"""What may be fused; each mode adds to the mode before it.

`off` fuses nothing. `norms` fuses norms and the residual before them. `all` adds activations with a
gate or after a bias, rotary positions, softmaxes and the loss. `head` adds the head's product with
the loss.
"""

LINEAR_LOSS = "autopar::linear_cross_entropy"
"""The op of a head's product with its cross-entropy, which keeps no logits."""

AUTO = "auto"
"""The pin with which the planner chooses among `FUSE_MODES`."""

Attribute = float | int | str | bool | None


@dataclass(frozen=True, slots=True)
class FusedOp:
    """A record of a subgraph that the fusion pass replaced by one op.

    Attributes:
        block: the name of the block class (a structure that several layers share).
        op: the op, such as 'autopar::rms_norm'.
        name: the name of its node in the block's graph.
        replaced: the names of the ops that it replaces.
        attributes: its arguments that are no tensors, by name.
    """

    block: str
    op: str
    name: str
    replaced: tuple[str, ...]
    attributes: dict[str, Attribute]

    def __post_init__(self) -> None:
        if not isinstance(self.attributes, dict):
            raise ValueError(f"attributes of {shown(self.name)} are {shown(self.attributes)}")


@dataclass(frozen=True, slots=True)
class NearMiss:
    """A record of a subgraph that looks like one of autopar's fused ops and was left as it is.

    Attributes:
        block: the name of the block class (a structure that several layers share).
        op: the op that it looks like.
        name: the node at which the subgraph was recognised.
        reason: why it was left.
    """

    block: str
    op: str
    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Weighed:
    """A record of the best plan of one mode, which the planner compared with those of the others.

    Attributes:
        mode: one of `FUSE_MODES`.
        step_s: predicted seconds of a step.
        host_s: seconds of these in which devices wait for the host, which issues kernels.
    """

    mode: str
    step_s: float
    host_s: float


@dataclass(frozen=True, slots=True)
class Fusion:
    """The report of the pass that replaces subgraphs by fused ops.

    Attributes:
        mode: one of `FUSE_MODES`.
        fused: the subgraphs that became one op, once for each block class.
        missed: the subgraphs that nearly did.
        weighed: the modes that the planner compared, if it chose the mode; else ().
    """

    mode: str = "off"
    fused: tuple[FusedOp, ...] = ()
    missed: tuple[NearMiss, ...] = ()
    weighed: tuple[Weighed, ...] = ()

    def __post_init__(self) -> None:
        if self.mode not in FUSE_MODES:
            raise ValueError(f"fuse={shown(self.mode)}; {', '.join(FUSE_MODES)} are known")
        if self.mode == "off" and (self.fused or self.missed):
            raise ValueError("fusion lists ops, and its mode is off")

    @property
    def keeps_no_logits(self) -> bool:
        """Whether a head's product is one op with its loss, which makes logits in chunks of tokens."""
        return any(entry.op == LINEAR_LOSS for entry in self.fused)


UNFUSED = Fusion()
"""The report on a model as it is."""
