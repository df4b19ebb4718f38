"""New values of buffers, before they are stored."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def apart(values: Sequence[Tensor], stored: Sequence[Tensor]) -> list[Tensor]:
    """The values, detached; those that share memory with one of the `stored` tensors are copied.
    Two buffers that forward swaps are each other's new values.
    """
    taken = {tensor.untyped_storage().data_ptr() for tensor in stored}
    return [
        value.detach().clone() if value.untyped_storage().data_ptr() in taken else value.detach()
        for value in values
    ]
