"""`autopar::row_places`: which feature of its own row each marked place of a batch takes."""

from __future__ import annotations

import torch
from torch import Tensor

from autopar_kernels.registration import register_pass


def row_places(mask: Tensor, count: int) -> Tensor:
    """The number of the feature that a place takes, by order within its row: (B, S) bool -> (B, S) int64.

    Places that are not marked get some valid number.  Raises ValueError unless every row marks
    `count` places; on CUDA the device reports that as a failed assertion.
    """
    fits = (mask.sum(1) == count).all()
    message = (
        f"rows of the batch have other numbers of images than the features of {count} tokens a row: give every row the same number "
        "of images, none of them padding"
    )
    if mask.is_cuda:
        torch._assert_async(fits, message)
    elif not fits:
        raise ValueError(message)
    return (mask.cumsum(1) - 1).clamp(0, max(count - 1, 0))


def _shape(mask: Tensor, count: int) -> Tensor:
    return mask.new_empty(mask.shape, dtype=torch.int64)


register_pass("row_places(Tensor mask, int count) -> Tensor", row_places, _shape)
