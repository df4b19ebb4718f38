"""What ranks tell each other when they call a method of the engine together: one collective, which
is the same for every method.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from autopar.ir.mesh import AXES
from autopar.rewrite.collectives.axes import AxisGroup
from autopar.runtime.batches.gathered_rows import gather_over
from autopar.runtime.ranks.calls import check_calls

CallRecord = tuple[int, int, int, float]
"""What a rank tells of a method that all ranks call: its index in `CALLS`, the steps so far, and a
checksum of what all ranks must have alike. The last entry is 1 if its masters were written into
since graphs last read them.
"""
NO_CALL: CallRecord = (0, 0, 0, 0.0)
CALL = 5
"""The number of entries of a rank's number and its `CallRecord`."""


class Meeting:
    """Gathers what ranks tell. `changed`: whether any rank's masters were changed, as told last.
    `differ` is set later: every rank calls it if checksums differ, and it raises an AutoparError.
    """

    def __init__(self, axes: Mapping[str, AxisGroup], dp: int, device: torch.device) -> None:
        self.axes, self.dp, self.device = axes, dp, device
        self.changed = False
        self.differ: Callable[[], None] = lambda: None

    def told_by_all(self, call: CallRecord, read: list[float], parts: torch.Tensor) -> torch.Tensor:
        """What every rank tells: a tensor (data-parallel rank, rank that shares its batch, entry).
        Entries are this rank's number, `call`, `read` and `parts`, equally many in every call.
        Raises AutoparError if ranks call different methods, or have different options.
        """
        rank = dist.get_rank() if dist.is_initialized() else 0
        own = torch.tensor([rank, *call, *read], dtype=torch.float64, device=self.device)
        row = torch.cat([own, parts])
        rows = gather_over(row.unsqueeze(0), self.axes, reversed(AXES))
        stages = rows.view(self.axes["pp"].size, self.dp, -1, row.shape[0])
        everyone = stages.transpose(0, 1).flatten(1, 2)
        seen = everyone[..., :CALL].flatten(0, 1).tolist()
        check_calls([(int(told[0]), int(told[1]), int(told[2])) for told in seen])
        if any(told[3] != seen[0][3] for told in seen):
            self.differ()
        self.changed = any(told[4] for told in seen)
        return everyone
