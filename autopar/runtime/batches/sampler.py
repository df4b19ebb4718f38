"""Selects the rows of a dataset on which each data-parallel rank trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized

import torch
from torch.utils.data import Sampler

from autopar.errors import AutoparError
from autopar.runtime.batches.deal import rows_of_rank


class DataParallelSampler(Sampler[list[int]]):
    """Batches of row numbers for a DataLoader's `batch_sampler`: one batch a step, the rows of this
    data-parallel rank.

    An epoch is a permutation of the dataset drawn from `seed` and the number of the epoch; with
    `shuffle=False` it is the dataset's own order. Its batch k is rows k x `global_batch` and
    following, and rank `index` of `parts` takes an equal run of them. So the rows of a step do not
    depend on how many ranks share them. Ranks of one data-parallel coordinate (over pp, cp and tp)
    take the same rows, and ranks of different ones share none. Rows that do not fill a batch are
    left out of the epoch. With `drop_last=False` they are its last batch, in runs that differ by
    one row at most.

    `steps()` says how many batches have been trained on: iteration starts after them, so that a
    resumed run goes on where the checkpoint was saved, and ends with the epoch.  (What a DataLoader
    has fetched ahead does not count.)
    """

    def __init__(
        self,
        dataset: Sized,
        global_batch: int,
        parts: int,
        index: int,
        steps: Callable[[], int],
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
    ) -> None:
        if not hasattr(dataset, "__len__"):
            raise AutoparError(
                f"{type(dataset).__name__} has no length: a sampler needs a dataset with numbered rows; cut streams yourself"
            )
        if not 0 <= index < parts:
            raise AutoparError(f"data-parallel rank {index} is not one of {parts}")
        if global_batch < 1 or global_batch % parts:
            raise AutoparError(
                f"a global batch of {global_batch} rows cannot be shared by {parts} data-parallel ranks; use a multiple"
            )
        if drop_last and len(dataset) < global_batch:
            raise AutoparError(
                f"the dataset has {len(dataset)} rows, too few for one global batch of {global_batch}"
            )
        left = len(dataset) % global_batch
        if not drop_last and 0 < left < parts:
            raise AutoparError(
                f"the last batch of {len(dataset)} rows has {left}, fewer than the {parts} data-parallel ranks, which take at least one; "
                "leave it out (drop_last=True), or choose another global batch"
            )
        self.rows, self.global_batch, self.parts, self.index = (
            len(dataset),
            global_batch,
            parts,
            index,
        )
        self.steps, self.seed, self.shuffle, self.drop_last = steps, seed, shuffle, drop_last

    @property
    def batches_per_epoch(self) -> int:
        """The number of batches of an epoch; one that the rows do not fill counts unless it is
        dropped.
        """
        return (
            self.rows // self.global_batch if self.drop_last else -(-self.rows // self.global_batch)
        )

    @property
    def epoch(self) -> int:
        """The epoch of the next step, from 0."""
        return self.steps() // self.batches_per_epoch

    def __len__(self) -> int:
        """Number of batches left in the epoch."""
        return self.batches_per_epoch - self.steps() % self.batches_per_epoch

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order(self.epoch)
        for batch in range(self.steps() % self.batches_per_epoch, self.batches_per_epoch):
            rows = order[batch * self.global_batch : (batch + 1) * self.global_batch]
            start, share = rows_of_rank(len(rows), self.parts, self.index)
            yield rows[start : start + share]

    def _order(self, epoch: int) -> list[int]:
        if not self.shuffle:
            return list(range(self.rows))
        generator = torch.Generator().manual_seed((self.seed << 32) + epoch)
        return torch.randperm(self.rows, generator=generator).tolist()
