"""Selects the rows of a dataset on which each data-parallel rank trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized

import torch
from torch.utils.data import Sampler

from autopar.errors import AutoparError


class DataParallelSampler(Sampler[list[int]]):
    """Batches of row numbers for a DataLoader's `batch_sampler`: one batch per step, with the rows
    of this data-parallel rank.

    An epoch is a permutation of the dataset, drawn from `seed` and the epoch's number. Its batch k
    consists of the `global_batch` rows from k x `global_batch` on. Rank `index` of `parts` takes an
    equal contiguous part of them. The rows of a step thus do not depend on the number of ranks.
    Ranks with the same data-parallel coordinate (over pp, cp and tp) take the same rows; others
    take disjoint rows. Rows that do not fill a batch are left out of the epoch.

    `steps()` returns how many batches were trained on. Iteration starts after them and ends with
    the epoch, so a resumed run continues where the checkpoint was saved. (Batches that a DataLoader
    has prefetched do not count.)
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
        if len(dataset) < global_batch:
            raise AutoparError(
                f"the dataset has {len(dataset)} rows, too few for one global batch of {global_batch}"
            )
        self.rows, self.global_batch, self.parts, self.index = (
            len(dataset),
            global_batch,
            parts,
            index,
        )
        self.steps, self.seed, self.shuffle = steps, seed, shuffle

    @property
    def batches_per_epoch(self) -> int:
        """Number of whole batches in an epoch."""
        return self.rows // self.global_batch

    @property
    def epoch(self) -> int:
        """The epoch of the next step, from 0."""
        return self.steps() // self.batches_per_epoch

    def __len__(self) -> int:
        """Number of batches left in the epoch."""
        return self.batches_per_epoch - self.steps() % self.batches_per_epoch

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order(self.epoch)
        share = self.global_batch // self.parts
        for batch in range(self.steps() % self.batches_per_epoch, self.batches_per_epoch):
            start = batch * self.global_batch + self.index * share
            yield order[start : start + share]

    def _order(self, epoch: int) -> list[int]:
        if not self.shuffle:
            return list(range(self.rows))
        generator = torch.Generator().manual_seed((self.seed << 32) + epoch)
        return torch.randperm(self.rows, generator=generator).tolist()
