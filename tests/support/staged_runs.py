"""Pipelined plans for tests: any cut, schedule and recompute mode of each segment, around the layouts that the solver or chance chooses."""

from __future__ import annotations

from dataclasses import replace

from support.exactness import case, random_plan, setting, solved_plan
from torch import Tensor, nn

from autopar.annotate.annotator import Annotator
from autopar.ir.mesh import MeshShape
from autopar.ir.plan import Plan
from autopar.ir.traced import TracedModel


def staged(
    plan: Plan,
    traced: TracedModel,
    schedule: str,
    cuts: tuple[int, ...],
    modes: tuple[str, ...] = ("none",),
) -> Plan:
    """`plan` with stages of `cuts` segments each; segments take `modes` in turn."""
    names = [segment.name for segment in traced.segments]
    assert sum(cuts) == len(names), (cuts, names)
    ends = [sum(cuts[: k + 1]) for k in range(len(cuts))]
    stages = tuple(tuple(names[start:end]) for start, end in zip([0, *ends], ends, strict=False))
    blocks = []
    for block in plan.blocks:
        by_mode: dict[str, list[str]] = {}
        for name in block.segments:
            by_mode.setdefault(modes[names.index(name) % len(modes)], []).append(name)
        blocks += [
            replace(block, segments=tuple(segments), recompute=mode)
            for mode, segments in by_mode.items()
        ]
    return replace(plan, schedule=schedule, stages=stages, blocks=tuple(blocks))


def pipelined(
    name: str,
    mesh: MeshShape,
    schedule: str,
    cuts: tuple[int, ...],
    number: int,
    modes: tuple[str, ...] = ("none",),
) -> Plan:
    """A model of `exactness.case` in a pipeline, with `number` micro-batches."""
    found = case(name)
    return staged(
        solved_plan(found.traced, found.annotator, setting(mesh, number)),
        found.traced,
        schedule,
        cuts,
        modes,
    )


def at_random(
    name: str, mesh: MeshShape, schedule: str, cuts: tuple[int, ...], number: int, seed: int
) -> Plan:
    """The same with any strategy for any op and any layout on every boundary, partial sums too."""
    found = case(name)
    return staged(
        random_plan(found.traced, found.annotator, setting(mesh, number), seed),
        found.traced,
        schedule,
        cuts,
    )


class Layer(nn.Module):
    """Reads the hidden state, a boolean mask, a table and positions; keeps running statistics; drops."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm, self.drop = (
            nn.Linear(8, 12),
            nn.Linear(12, 8),
            nn.BatchNorm1d(8),
            nn.Dropout(0.2),
        )

    def forward(self, x: Tensor, mask: Tensor, table: Tensor, gates: Tensor) -> Tensor:
        x = x + self.drop(self.down((self.up(x) * table).tanh().masked_fill(mask, 0.0))) * gates
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class Carrying(nn.Module):
    """What the prologue makes (a boolean mask, a table with a gradient and one without) and what layers make is read far behind."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.table, self.head = (
            nn.Linear(5, 8),
            nn.Parameter(0.1 * nn.init.normal_(self._empty()) + 1.0),
            nn.Linear(8, 3),
        )
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def _empty(self) -> Tensor:
        return Tensor(6, 12)

    def forward(self, x: Tensor, places: Tensor, target: Tensor) -> Tensor:
        mask, table, gates = (
            (x[..., :1] > 1.0),
            self.table.exp(),
            (places.unsqueeze(-1) % 3 + 1).double(),
        )
        h = early = self.first(x)
        side = 0.0
        for layer in self.layers:
            h = layer(h, mask, table, gates)
            side = side + h.square().mean()
        return ((self.head(h + early) + places.unsqueeze(-1) - target) ** 2).mean() + 0.1 * side


def annotated(traced: TracedModel, mesh: MeshShape, number: int, rows: int) -> Plan:
    return solved_plan(traced, Annotator(traced), setting(mesh, number, rows=rows))
