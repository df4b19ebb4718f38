"""Lists of image features with an entry for each image, kept in one piece.

Methods such as `get_image_features` of transformers' models leave out images that are padding, and
cut the features of the others into a list, by `list(features)` or `features.split(counts.tolist())`.
Forward joins the list again by `torch.cat`. As written that would fix the number of images. In these
methods the list has one piece, the features of all images, and in every step
`autopar::row_places` checks that no image is padding.

Attention to the patches of several images in a row cuts its operands likewise. There the piece has
the images as its first dim, and every step checks that all have equally many patches.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import re
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import autopar_kernels.row_places  # noqa: F401 (registers the op)
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from autopar.trace.user_lines import is_of_user

_METHOD = re.compile(r"get_(image|video|audio)_features")
_ATTENTION = "torch.split(tensor, lengths.tolist(), dim=2)"
"""What attention to several images runs for query, key and value, (1, heads, patches, size)."""
_FOLDER = os.path.join("transformers", "models", "")
"""Where the methods are."""


@dataclass(frozen=True, slots=True)
class _Counts:
    """The values of a tensor as `tolist` would give them, for `split` alone, which does not read them."""

    tensor: Tensor


@contextlib.contextmanager
def unread_counts() -> Iterator[None]:
    """A context in which `tolist` of a tensor without values can be called in such a method."""
    name = "tolist"
    plain = getattr(FakeTensor, name)

    def tolist(tensor: FakeTensor) -> Any:
        return _Counts(tensor) if _cuts_features() else plain(tensor)

    setattr(FakeTensor, name, tolist)
    try:
        yield
    finally:
        setattr(FakeTensor, name, plain)


def kept_whole(func: Callable, args: tuple, kwargs: dict) -> Any:
    """What a call gives in such a method, if it reads sizes out of tensors; None for any other call."""
    if func not in _WHOLE or not args or not isinstance(args[0], Tensor) or not _cuts_features():
        return None
    return _WHOLE[func](*args, **kwargs)


def _cuts_features() -> bool:
    """Whether the line of the user's code that runs is in such a method."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and not is_of_user(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None or _FOLDER not in frame.f_code.co_filename:
        return False
    if _ATTENTION in linecache.getline(frame.f_code.co_filename, frame.f_lineno):
        return True
    while frame is not None and frame.f_code.co_name == "<listcomp>":
        frame = frame.f_back
    return frame is not None and _METHOD.fullmatch(frame.f_code.co_name) is not None


def _rows(features: Tensor, dim: int = 0) -> tuple[Tensor] | None:
    """What iteration over a tensor asks for."""
    follows = dim == 0 and isinstance(features.shape[0], torch.SymInt)
    return (features.flatten(0, 1),) if follows and features.is_floating_point() else None


def _split(features: Tensor, sizes: Any, dim: int = 0) -> tuple[Tensor] | None:
    """Features (B N, ...) as they are, and operands of attention (1, n, B N, d) as (B, n, N, d)."""
    if not isinstance(sizes, _Counts) or not features.is_floating_point() or dim not in (0, 2):
        return None
    if dim == 0:
        return (features,)
    images = sizes.tensor.shape[0]
    patches = features.shape[2] // images
    other = _checked(sizes.tensor == patches)
    cut = features.squeeze(0).unflatten(1, (images, patches)).transpose(0, 1)
    return (cut.masked_fill(other.reshape(-1, 1, 1, 1), 0),)


def _without_padding(images: Tensor, index: Any) -> Tensor | None:
    """`images[index]`, where a mask leaves out images: all of them, checked."""
    if not isinstance(index, Tensor) or index.dtype != torch.bool or index.dim() != 1:
        return None
    return images.masked_fill(_checked(index).reshape(-1, *[1] * (images.dim() - 1)), 0)


def _checked(flags: Tensor) -> Tensor:
    """False for each of the flags (B,), which are checked to be True in every step."""
    return torch.ops.autopar.row_places(flags.unsqueeze(1), 1).squeeze(1) != 0


def _kept_flags(flags: Tensor, *args: Any) -> Tensor | None:
    """`flags[0] |= ...`, which keeps one image if all are padding: that check fails anyway."""
    return flags if flags.dtype == torch.bool else None


_WHOLE: dict[Callable, Callable[..., Any]] = {
    Tensor.__len__: lambda features: 1,  # what `list` asks for; `len` gives the size itself
    Tensor.unbind: _rows,
    Tensor.split: _split,
    torch.split: _split,
    Tensor.__getitem__: _without_padding,
    Tensor.__ior__: _kept_flags,
    Tensor.__setitem__: _kept_flags,
}
