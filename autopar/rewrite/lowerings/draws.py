"""Lowers calls that draw random numbers: dropout, attention with dropout, and random tensors.

All draw by counter (`dropout.py`), so that any plan draws the numbers of one device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from autopar.ir.batch import multiple_of_batch
from autopar.ir.calls import argument_names, op_name
from autopar.ir.sharding import shard_extent
from autopar.ops.dims import Call, is_symbolic
from autopar.ops.random import COUNTED
from autopar.rewrite.lowerings.dropout import (
    Position,
    attention_with_dropout,
    call_key,
    dropout,
    held_indices,
    in_chunks,
    other_positions,
    row_positions,
)
from autopar.rewrite.lowerings.sizes import Layouts, LocalSizes

_OPTIONS = ("lambd", "from", "to", "mean", "std", "p")
"""Arguments that say how random numbers are distributed."""


def random_tensor(
    like: Tensor,
    op: str,
    options: dict[str, float],
    dtype: torch.dtype,
    noise: Tensor,
    call: int,
    positions: Sequence[Position],
    sizes: Sequence[int | None],
) -> Tensor:
    """Random numbers of the shape of `like` in `dtype`: the replacement of the ops `COUNTED`.

    `op` is the schema name, and `options` its arguments (`_OPTIONS`) that say how numbers are
    distributed. `aten::bernoulli` without `p` takes `like` as the probabilities. Each number has at
    most 32 random bits.

    `noise` and `call` identify the draw, as in `dropout`. `positions` and `sizes` say which part of
    the whole tensor this rank holds; see `drawn`.
    """
    with torch.no_grad():
        key, of_words = call_key(noise, call), _DISTRIBUTIONS[op]
        if op == "aten::bernoulli" and "p" not in options:
            uniform = in_chunks(like, _uniform, torch.float64, key, positions, sizes)
            return (uniform < like).to(dtype)
        if of_words is _between:
            # no more bits than the dtype has, so that nothing is rounded up to the end
            options = options | {"bits": min(32, 1 - round(math.log2(torch.finfo(dtype).eps)))}
        return in_chunks(like, partial(of_words, **options), dtype, key, positions, sizes)


def _uniform(words: Tensor) -> Tensor:
    """fp64 numbers above 0 and below 1, one for each 32-bit word."""
    return (words.double() + 0.5) / 2**32


def _between(words: Tensor, bits: int, **ends: float) -> Tensor:
    low, high = ends.get("from", 0.0), ends.get("to", 1.0)
    return low + (high - low) * ((words >> (32 - bits)).double() / 2**bits)


def _exponential(words: Tensor, lambd: float = 1.0) -> Tensor:
    return -torch.log(_uniform(words)) / lambd


def _normal(words: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    return mean + std * torch.special.ndtri(_uniform(words))


def _bernoulli(words: Tensor, p: float = 0.5) -> Tensor:
    return _uniform(words) < p


_DISTRIBUTIONS: dict[str, Callable[..., Tensor]] = {
    "aten::exponential": _exponential,
    "aten::uniform": _between,
    "aten::rand_like": _between,
    "aten::normal_functional": _normal,
    "aten::randn_like": _normal,
    "aten::bernoulli": _bernoulli,
}


def local_positions(
    dim: int, size: Any, layouts: Layouts, sizes: LocalSizes, source: Node, noise: Node
) -> tuple[Node | int | None, int | None]:
    """(position, whole size) of one dim of a value with these layouts, as `drawn` needs them. New
    nodes are appended to the graph.

    `size` is the size of the whole dim; `source` is a local value with the same extent along `dim`.
    `noise` is the segment's noise node. This function must know every way in which a rank can hold
    part of a dim. These are shards with any pattern, nested in the order of the mesh's axes, and
    rows over the batch axes.
    """
    mesh = sizes.mesh
    splits = {
        axis: (mesh.size(axis), sizes.coordinates[axis], layout.pattern)
        for axis, layout in layouts.items()
        if layout.dim == dim
    }
    if is_symbolic(size):
        per_row = multiple_of_batch(size)
        if not per_row:
            index = sizes.coordinates["dp"] if "dp" in splits else -1
            return sizes.graph.call_function(other_positions, (source, dim, noise, index)), None
        dp = (sizes.coordinates["dp"],) if "dp" in splits else range(mesh.size("dp"))
        ep = (sizes.coordinates["ep"],) if "ep" in splits else range(mesh.ep)
        ranks = [d * mesh.ep + e for d in dp for e in ep]
        inner = [
            (parts, index, str(replace(pattern, rows=False)))
            for parts, index, pattern in splits.values()
            if pattern.rows
        ]
        return sizes.graph.call_function(
            row_positions, (source, dim, noise, per_row, ranks, inner)
        ), None
    if all(pattern.is_contiguous for _, _, pattern in splits.values()):
        start, length = 0, int(size)
        for parts, index, _ in splits.values():
            offset, length = shard_extent(length, parts, index)
            start += offset
        return (start if splits else None), int(size)
    named = [(parts, index, str(pattern)) for parts, index, pattern in splits.values()]
    return sizes.graph.call_function(held_indices, (int(size), named)), int(size)


def lower_draw(
    node: Node, args: tuple, sizes: LocalSizes, result: Layouts, noise: Node, call: int
) -> tuple[Any, tuple, dict]:
    """(target, args, kwargs) of the node that replaces a call that draws random numbers. Nodes for
    positions are added to the graph first.

    `args` are the call's, with local values; `result` has the layouts of its result. `noise` is the
    segment's noise node, `call` the number of the call in its segment.
    """
    out, call_of = node.meta["val"], Call(node)
    if op_name(node) in ("aten::dropout", *COUNTED):
        found = [
            local_positions(d, s, result, sizes, args[0], noise) for d, s in enumerate(out.shape)
        ]
        positions, whole = zip(*found, strict=True) if found else ((), ())
        which = noise, call, positions, whole
        if op_name(node) == "aten::dropout":
            return dropout, (args[0], call_of.arg("p"), *which), {}
        given = {name: call_of.arg(name) for name in _OPTIONS if name in argument_names(node)}
        options = {name: float(value) for name, value in given.items() if value is not None}
        return random_tensor, (args[0], op_name(node), options, out.dtype, *which), {}
    q, k = call_of.tensors[:2]
    found = []
    for dim, size in enumerate(out.shape[:-1]):
        source = args[0] if str(q.shape[dim]) == str(size) else args[1]
        found.append(local_positions(dim, size, result, sizes, source, noise))
    last = k.dim() - 2
    found.append(local_positions(last, k.shape[last], {}, sizes, args[1], noise))
    positions, whole = zip(*found, strict=True)
    local = dict(zip(argument_names(node), args, strict=False))
    how = [
        local.get(name, call_of.arg(name))
        for name in ("attn_mask", "dropout_p", "is_causal", "scale")
    ]
    return attention_with_dropout, (*args[:3], *how, noise, call, positions, whole), {}
