"""Samples of the elements of tensors, which show writes that no version counter counts, as through
`.data`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_WHOLE, _EACH = 2**20, 256
"""All elements are compared if the tensors have at most `_WHOLE` together. Of larger models, `_EACH`
elements of each tensor, at equal distances.
"""


class Samples:
    """Remembers elements of tensors that are on the CPU. Other tensors count as never changed."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        total = sum(tensor.numel() for tensor in tensors if _is_read(tensor))
        self._each = total if total <= _WHOLE else _EACH
        self._kept = [self._bytes(tensor).clone() for tensor in tensors]
        self._joined: Tensor | None = None

    def changed(self, tensors: Sequence[Tensor | None]) -> list[int]:
        """The indices of tensors whose elements are not as remembered. `tensors` are in the order of
        the first ones; None is one that counts as unchanged.
        """
        now = [
            kept if tensor is None else self._bytes(tensor)
            for kept, tensor in zip(self._kept, tensors, strict=True)
        ]
        if not now:
            return []
        if self._joined is None:
            self._joined = torch.cat(self._kept)
        if torch.equal(torch.cat(now), self._joined):
            return []
        return [
            place
            for place, (kept, new) in enumerate(zip(self._kept, now, strict=True))
            if not torch.equal(kept, new)
        ]

    def remember(self, place: int, tensor: Tensor) -> None:
        """Remember the present elements of the tensor with this index."""
        self._kept[place], self._joined = self._bytes(tensor).clone(), None

    @torch.no_grad()
    def _bytes(self, tensor: Tensor) -> Tensor:
        """The compared elements of a tensor as bytes."""
        if not _is_read(tensor):
            return torch.empty(0, dtype=torch.uint8)
        count = tensor.numel()
        step = -(-count // self._each)
        if tensor.is_contiguous():
            sample = tensor.as_strided((-(-count // step),), (step,))
        elif count <= _WHOLE:
            sample = tensor.flatten()[::step]
        else:  # a copy would be large
            sample = tensor[(0,) * (tensor.dim() - 1)]
        return sample.contiguous().view(torch.uint8)


def _is_read(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout == torch.strided and tensor.numel() > 0
