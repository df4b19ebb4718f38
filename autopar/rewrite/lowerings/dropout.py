"""Dropout with masks that depend on the element, not on the rank that computes it.

Whether an element is kept is a hash of the engine's seed, the step, the call, and the element's
index in the whole step's tensor. Any sharding, number of micro-batches or recomputation therefore
draws the same mask as one device. The hash is Philox-4x32-10, the counter-based generator of
Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). It runs in
integer arithmetic, so its bits are the same on every device and for every dtype.

Values that change between calls are data: the program's input `NOISE`, a small int64 tensor on the
CPU, `(seed, step, segment, first row, rows per rank)`. Rows are counted in the whole step. Row r of
a micro-batch that starts at `first row` of this rank's share is row `rank * rows per rank + first
row + r`. A value without a batch dim has one mask in all micro-batches of a step, as on one device
that runs the step as one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autopar.ir.sharding import parse_pattern
from autopar.rewrite.collectives.patterns import Split, pick

NOISE = "dropout_noise"
"""Name of the noise input of programs and segments with dropout; see the module docstring."""

NOISE_LENGTH = 5
_CHUNK = 2**18
"""Number of elements hashed at a time. It limits the integers in memory while a mask is computed to
some MB; 2**16 to 2**18 were the fastest on a CPU.
"""

Position = Tensor | int | None
"""The indices of a whole dim that a rank holds, in its order: all (None), consecutive ones from a
start (int), or those in a 1-D int64 tensor.
"""

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)  # Salmon et al. 2011, section 4.3, and Random123's philox.h
_WEYL = (0x9E3779B9, 0xBB67AE85)

# --------------------------------------------------------------------------------------------------------------------- the generator


def philox(counter: Sequence[Any], key: tuple[int, int]) -> tuple[Any, Any, Any, Any]:
    """The hash Philox-4x32-10: four 32-bit words from a counter of four words and a key of two.
    Counter words are ints or int64 tensors that broadcast; results are of the same kind.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # 64-bit products of 32-bit words wrap around in int64; shifting right and masking recovers their upper halves
        left, right = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (right >> 32 & _WORD) ^ c1 ^ k0,
            right & _WORD,
            (left >> 32 & _WORD) ^ c3 ^ k1,
            left & _WORD,
        )
        k0, k1 = k0 + _WEYL[0] & _WORD, k1 + _WEYL[1] & _WORD
    return c0, c1, c2, c3


def keep_mask(
    shape: Sequence[int],
    p: float,
    key: tuple[int, int],
    positions: Sequence[Position],
    sizes: Sequence[int | None],
    device: torch.device,
) -> Tensor:
    """A boolean mask of `shape` whose elements are True with probability 1 - p. The other arguments
    are those of `drawn`.
    """
    return drawn(shape, partial(torch.ge, other=round(p * 2**32)), key, positions, sizes, device)


def drawn(
    shape: Sequence[int],
    of_words: Callable[[Tensor], Tensor],
    key: tuple[int, int],
    positions: Sequence[Position],
    sizes: Sequence[int | None],
    device: torch.device,
) -> Tensor:
    """A tensor of `shape`: `of_words` applied to random words, which are int64 numbers below 2**32.
    `key`, two 32-bit words, identifies the draw.

    `positions[d]` says which indices along dim d of the whole tensor this rank holds. `sizes[d]` is
    the size of the whole dim. It is None for a dim that grows with the batch, whose index is hashed
    separately. Raises ValueError for more than two of these.

    One hash gives four words, for four neighbours along the last dim with a size. Whole dims, and
    shards that begin at a multiple of four, are therefore cheapest.
    """
    if len(rows := [d for d, size in enumerate(sizes) if size is None]) > 2:
        raise ValueError(
            f"{len(rows)} dims of a value of shape {tuple(shape)} grow with the batch; draws can count two"
        )
    last = max((d for d, size in enumerate(sizes) if size is not None), default=-1)
    packed = (
        last >= 0 and not isinstance(positions[last], Tensor) and (positions[last] or 0) % 4 == 0
    )
    index = []
    for dim, (length, held) in enumerate(zip(shape, positions, strict=True)):
        if isinstance(held, Tensor):
            found = held.to(device)
        else:
            start, count = held or 0, length
            if dim == last and packed:
                start, count = start // 4, (length + 3) // 4
            found = torch.arange(start, start + count, device=device)
        index.append(found.view([-1 if d == dim else 1 for d in range(len(shape))]))
    lane = None
    if last >= 0 and not packed:
        lane, index[last] = index[last] % 4, index[last] // 4
    words = philox(_counter(index, sizes, last, device), key)
    kept = [of_words(word) for word in words]
    if last < 0:
        return kept[0].expand(tuple(shape))
    if lane is None:
        return torch.stack(kept, last + 1).flatten(last, last + 1).narrow(last, 0, shape[last])
    return torch.where(
        lane < 2, torch.where(lane == 0, kept[0], kept[1]), torch.where(lane == 2, kept[2], kept[3])
    )


def _counter(
    index: list[Tensor], sizes: Sequence[int | None], last: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox's four counter words for every element, as broadcasting int64 tensors, from its
    `index` along each dim. The index along dim `last` counts groups of four elements.
    """
    element = torch.zeros([1] * len(index), dtype=torch.int64, device=device)
    stride, rows = 1, []
    for dim in reversed(range(len(index))):
        if (size := sizes[dim]) is None:
            rows.append(index[dim])
        else:
            element = element + index[dim] * stride
            stride *= (size + 3) // 4 if dim == last else size
    row, column = (*rows, torch.zeros_like(element), torch.zeros_like(element))[:2]
    return element & _WORD, element >> 32 & _WORD, row & _WORD, (row >> 32 & _WORD) ^ column


def counter_dropout(
    x: Tensor,
    p: float,
    key: tuple[int, int],
    positions: Sequence[Position],
    sizes: Sequence[int | None],
) -> Tensor:
    """x with each element kept with probability 1 - p and scaled by 1 / (1 - p); zero elsewhere.
    Backward keeps one bool per element. x itself if p <= 0.

    `key` identifies the draw. `positions` and `sizes` say which part of the whole tensor x is; see
    `drawn`.
    """
    if p <= 0:
        return x
    if p >= 1:
        return x * 0
    with torch.no_grad():
        words_kept = partial(torch.ge, other=round(p * 2**32))
        keep = in_chunks(x, words_kept, torch.bool, key, positions, sizes)
    return torch.where(keep, x * (1 / (1 - p)), 0)


def in_chunks(
    x: Tensor,
    of_words: Callable[[Tensor], Tensor],
    dtype: torch.dtype,
    key: tuple[int, int],
    positions: Sequence[Position],
    sizes: Sequence[int | None],
) -> Tensor:
    """The values of `drawn` for each element of x, in `dtype`. At most about CHUNK are hashed at a
    time. On meta, an empty tensor.
    """
    if x.is_meta or x.numel() == 0:
        return torch.empty(x.shape, dtype=dtype, device=x.device)
    if x.numel() <= _CHUNK:
        values = drawn(x.shape, of_words, key, positions, sizes, x.device)
        return values.to(dtype).contiguous()
    dim = max(range(x.dim()), key=lambda d: x.shape[d])
    rows = max(4, _CHUNK * x.shape[dim] // x.numel() // 4 * 4)
    held = positions[dim]
    values = torch.empty(x.shape, dtype=dtype, device=x.device)
    for start in range(0, x.shape[dim], rows):
        part = values.narrow(dim, start, min(rows, x.shape[dim] - start))
        some = held[start : start + rows] if isinstance(held, Tensor) else (held or 0) + start
        of_part = [*positions[:dim], some, *positions[dim + 1 :]]
        part.copy_(drawn(part.shape, of_words, key, of_part, sizes, x.device))
    return values


# ------------------------------------------------------------------------------------------------------- what lowered graphs call


def step_noise(seed: int, step: int, first_row: int, rows: int) -> Tensor:
    """The program's input NOISE for one micro-batch: an int64 tensor (seed, step, 0, first_row,
    rows). The micro-batch starts at row `first_row` of the `rows` rows of each data-parallel rank.
    """
    return torch.tensor([seed % 2**63, step, 0, first_row, rows], dtype=torch.int64)


def segment_noise(noise: Tensor, segment: int) -> Tensor:
    """A copy of the noise with the number of a segment in it. Segments of one class share a graph
    but must not share masks.
    """
    own = noise.clone()
    own[2] = segment
    return own


def call_key(noise: Tensor, call: int) -> tuple[int, int]:
    """The key (two 32-bit words) of dropout call number `call` of a segment: a hash of seed, step,
    segment and call. (0, 0) on meta.
    """
    if noise.is_meta:
        return 0, 0
    seed, step, segment = noise.tolist()[:3]
    return philox(
        (step & _WORD, step >> 32 & _WORD, segment, call), (seed & _WORD, seed >> 32 & _WORD)
    )[:2]


def dropout(
    x: Tensor,
    p: float,
    noise: Tensor,
    call: int,
    positions: Sequence[Position],
    sizes: Sequence[int | None],
) -> Tensor:
    """x with dropout applied: the replacement of aten::dropout. Each element's mask is a hash of
    seed, step, segment (all in `noise`), call and its index in the whole tensor.

    `call` is the number of the dropout call in its segment. `positions` and `sizes` say which part
    of the whole tensor x is; see `drawn`.
    """
    return counter_dropout(x, p, call_key(noise, call), positions, sizes)


def attention_with_dropout(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    p: float,
    is_causal: bool,
    scale: float | None,
    noise: Tensor,
    call: int,
    positions: Sequence[Position],
    sizes: Sequence[int | None],
) -> Tensor:
    """Attention with dropout of probability `p`, the replacement of scaled_dot_product_attention:
    the probabilities are materialized, dropped and applied.

    q is (.., h, s, d), k (.., g, t, d) and v (.., g, t, e), where g divides h. `mask` broadcasts to
    (.., h, s, t); it is boolean (True: attend) or additive. `noise` and `call` are those of
    `dropout`. `positions` and `sizes` are those of the probabilities (.., h, s, t). Queries that
    may not attend to any key give zeros.
    """
    if q.dim() > 2 and k.shape[-3] != q.shape[-3] and k.shape[-3] > 1:
        k, v = (t.repeat_interleave(q.shape[-3] // k.shape[-3], -3) for t in (k, v))
    scores = (q * (q.shape[-1] ** -0.5 if scale is None else scale)) @ k.transpose(-2, -1)
    if is_causal:
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~causal, -torch.inf)
    if mask is not None:
        scores = (
            scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        )
        empty = (scores == -torch.inf).all(-1, keepdim=True)
        probabilities = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    else:
        probabilities = scores.softmax(-1)
    return counter_dropout(probabilities, p, call_key(noise, call), positions, sizes) @ v


Splits = Sequence[tuple[int, int, str]]
"""(number of ranks, this rank's index, pattern) for each axis that shards one dim, outermost
first.
"""


def held_indices(size: int, splits: Splits) -> Tensor:
    """A 1-D tensor of the indices of a dim of `size` elements that this rank holds, in its order.
    The axes in `splits` have sharded the dim one after the other.
    """
    held = torch.arange(size)
    for parts, index, pattern in splits:
        held = pick(held, Split(0, held.shape[0], parse_pattern(pattern)), parts, index)
    return held


def row_positions(
    x: Tensor, dim: int, noise: Tensor, per_row: int, ranks: Sequence[int], splits: Splits
) -> Tensor:
    """A 1-D tensor: for each entry of x along `dim`, its index in the whole step's tensor. The dim
    has `per_row` entries per batch row, of which this rank holds those that `splits` select.

    The rows of x are those of the micro-batches of the data-parallel `ranks`, one rank after the
    other. `noise` says at which row the micro-batch begins.
    """
    if x.is_meta:
        return torch.empty(x.shape[dim], dtype=torch.int64, device=x.device)
    first, rows = noise.tolist()[3:5]
    held = held_indices(per_row, splits).to(x.device)
    row = torch.arange(x.shape[dim] // max(held.shape[0], 1), device=x.device)
    each = max(row.shape[0] // len(ranks), 1)
    whose = torch.tensor(list(ranks), device=x.device)[row // each]
    return ((whose * rows + first + row % each).unsqueeze(1) * per_row + held).flatten()


def other_positions(x: Tensor, dim: int, noise: Tensor, index: int) -> Tensor:
    """A 1-D tensor of indices for a dim of x whose size depends on the batch but is not a whole
    number of entries per row. They include the micro-batch, so that each has its own mask.

    `index` is the rank's data-parallel coordinate if dp shards the dim, else negative.
    """
    if x.is_meta:
        return torch.empty(x.shape[dim], dtype=torch.int64, device=x.device)
    first = x.shape[dim] * max(index, 0) + (noise.tolist()[3] << 32)
    return torch.arange(x.shape[dim], device=x.device) + first
