"""A closed-form lower bound for pipelines on devices of several kinds, which needs only the cells
of a candidate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np

from autopar.ir.annotated import AnnotatedModel
from autopar.solve.bounds.cell import Cell
from autopar.solve.bounds.lagrangian import schedule_shape
from autopar.solve.costs.candidate import Candidate
from autopar.solve.costs.pipeline_cost import blocks_of
from autopar.solve.costs.schedule import Schedule
from autopar.solve.elimination.bucket_elimination import Question
from autopar.solve.integer_program.lp_relaxation import least_static_by_class


@dataclass(slots=True)
class Weighted:
    """Computes `weighted_bound_s` of candidates on devices of several kinds. The arguments are
    those of `search_groups`; `memory` and `works` are caches.
    """

    annotate: Callable[[Candidate, int], AnnotatedModel]
    capacities: Sequence[int | None]
    memory: dict[tuple, tuple[np.ndarray, float]] = field(default_factory=dict)
    works: dict[int, list[tuple[float, np.ndarray]] | None] = field(default_factory=dict)  # by cell

    def least_s(
        self, candidate: Candidate, alike: Candidate, cells: Sequence[Cell], schedule: Schedule
    ) -> float:
        """The largest `weighted_bound_s` over several prices of a kept byte, in seconds; infinite if a
        segment has no consistent placement.

        `alike` is the candidate with an empty `mesh.deal`, which tells the group of devices of each
        pipeline rank. `cells` has the cell of the candidate on each group of devices.
        """
        micro, deal, blocks = (
            candidate.num_microbatches,
            candidate.mesh.groups,
            blocks_of(cells[0].first),
        )
        held = schedule_shape(schedule, micro, len(blocks), cells[0].alike).held
        works, found = [], [0.0]
        for cell in cells:
            if (of_cell := self._works(cell)) is None:
                return inf
            works.append(of_cell)
        statics, rooms = zip(
            *(self._memory(alike, group) for group in range(len(cells))), strict=True
        )
        for number in range(len(works[0])):
            work_s, worth_s = [], []
            for group, often in zip(deal, held, strict=True):
                price, priced_s = works[group][number]
                if schedule.splits_backward:  # the last segment holds less while micro-batches wait for gradients of parameters
                    priced_s = np.append(priced_s[:-1], works[group][0][1][-1])
                work_s.append(priced_s + price / often * statics[group])
                worth_s.append(price * rooms[group] / often if price else 0.0)
            found.append(weighted_bound_s(work_s, blocks, schedule, micro, worth_s))
        return max(found)

    def _memory(self, alike: Candidate, group: int) -> tuple[np.ndarray, float]:
        """On a group of devices: (lower bounds on the static bytes of each segment, bytes of a
        device without the fixed ones). The second is infinite without a capacity. `alike` is a
        candidate without its deal. Cached.
        """
        kind = alike.holds, group
        if kind not in self.memory:
            model, capacity = (
                self.annotate(replace(alike, recompute=alike.modes[0]), group),
                self.capacities[group],
            )
            static = np.array(least_static_by_class(model))[list(model.segments)]
            self.memory[kind] = static, inf if capacity is None else capacity - model.fixed_bytes
        return self.memory[kind]

    def _works(self, cell: Cell) -> list[tuple[float, np.ndarray]] | None:
        """For each price of a byte: (price, a lower bound on each segment's micro-batch seconds
        plus the price of its kept bytes). None if a segment has no consistent placement.
        """
        if id(cell) not in self.works:
            kinds, asked = cell.keys, [Question(kept=p, kept_by_ends=p) for p in cell.prices]
            found = {kind: cell.single(*kind).least(asked) for kind in set(kinds)}
            least = {kind: of.cost_s for kind, of in found.items() if of is not None}
            self.works[id(cell)] = None
            if len(least) == len(found):
                self.works[id(cell)] = [
                    (price, np.array([least[kind][number] for kind in kinds]))
                    for number, price in enumerate(cell.prices)
                ]
        return self.works[id(cell)]


def weighted_bound_s(
    work_s: Sequence[Sequence[float]],
    blocks: Sequence[int],
    schedule: Schedule,
    micro_batches: int,
    worth_s: Sequence[float] = (),
) -> float:
    """A lower bound on the seconds of a step whose segments take at least `work_s[rank][segment]`
    for a micro-batch. `blocks` are segment indices.

    Rank r computes m micro-batches and waits for the ranks before it. With t[r] the seconds of a
    micro-batch on rank r, m t[r] + (t of the ranks before) <= step; under zero bubble there is no
    waiting. Any convex combination of these inequalities has the form: sum of w[r] t[r] <= step.
    t[r] is a sum over segments, so each segment adds at least the minimum of w[r] x (its work on r)
    over the ranks that may have it. Segments before the first block are on the first rank, segments
    after the last block on the last rank. The weights make a block cost the same on every rank.

    `work_s` may include kept bytes at a price; `worth_s` is then the value in seconds of the bytes
    that each rank can keep.
    """
    waits = not schedule.splits_backward
    later, shares = 0.0, []
    for of in reversed(work_s):
        speed = 1 / max(sum(of[number] for number in blocks), 1e-300)
        share = max(speed - waits * later, 0.0) / micro_batches
        shares.append(share * micro_batches + waits * later)
        later += share
    weights = [share / later for share in reversed(shares)]
    weighted_s = np.array(weights)[:, None] * np.array(work_s)
    found = (
        weighted_s[0, : blocks[0]].sum()
        + weighted_s[:, blocks[0] : blocks[-1] + 1].min(axis=0).sum()
    )
    found += weighted_s[-1, blocks[-1] + 1 :].sum() - (np.dot(weights, worth_s) if worth_s else 0.0)
    return max(float(found), 0.0) * (1 - 1e-9)
