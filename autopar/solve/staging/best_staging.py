"""The best staging of a placement: where stages begin, and how many of their blocks run in which
recompute mode.

- One stage per rank: all ways to cut (`one_stage_per_rank.py`).
- Several stages per rank: blocks are distributed almost evenly (`interleaved.py`).
- A schedule with fixed `sizes` has one cut.
"""

from __future__ import annotations

from math import inf

import numpy as np

from autopar.solve.costs.schedule import Schedule, Staging, ramp
from autopar.solve.staging.interleaved import best_deal, least_deal_s, runs_of, unit_deals
from autopar.solve.staging.one_stage_per_rank import staging_of_ranks
from autopar.solve.staging.unit_row import UnitRow


def best_staging(
    row: UnitRow, schedule: Schedule, capacity_bytes: int | None, upper_bound_s: float = inf
) -> Staging | float:
    """The `Staging` (stages, and the recompute mode of each segment) with the lowest step time that
    fits each rank into `capacity_bytes` and takes less than `upper_bound_s`. A capacity of None is
    unlimited.

    If there is none, a lower bound on the step seconds of those that fit; infinite if none fits.
    """
    if schedule.stages_per_rank == 1:
        return staging_of_ranks(
            [row] * schedule.ranks, schedule, [capacity_bytes] * schedule.ranks, upper_bound_s
        )
    if len(row) < schedule.ranks * schedule.stages_per_rank:
        return inf
    return best_deal(
        row,
        schedule,
        inf if capacity_bytes is None else capacity_bytes,
        upper_bound_s - row.model.fixed_s,
    )


def quick_bound_s(row: UnitRow, schedule: Schedule) -> float:
    """A lower bound on the step seconds of any staging, ignoring memory, in closed form.

    A rank starts when the first micro-batch has passed the first stage of every earlier rank, and
    computes all of its share. With t the micro-batch seconds on a rank, the optimal shares make m t
    + (t of the ranks before) equal for all ranks. Under zero bubble only the forwards of earlier
    ranks count. They are at least the fraction of t that forward has in the unit where that is
    smallest. With several stages per rank, each deal has its own bound.
    """
    micro, ranks, whole_s = row.micro_batches, schedule.ranks, row.total_s(0, len(row))
    if schedule.stages_per_rank > 1:
        deals = unit_deals(schedule, len(row))
        found = min((least_deal_s(row, schedule, runs_of(sizes)) for sizes in deals), default=inf)
    elif ranks == 1:
        found = micro * whole_s
    else:
        work_s = np.diff(row.before.forward_s + row.before.backward_s)
        part = (
            float(np.min(np.diff(row.before.forward_s) / np.maximum(work_s, 1e-300)))
            if schedule.splits_backward
            else 1.0
        )
        found = ramp(part, ranks, micro) * whole_s
    return float(found) * (1 - 1e-9) + row.model.fixed_s
