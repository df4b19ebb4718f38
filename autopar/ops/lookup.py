"""Rules of ops that read or write at positions given by a tensor of indices.

The indexed dim of the table cannot be sharded, since an index may refer to any shard. The table's
other dims and the dims of the indices are parallel. If entries are added (scatter_add, index_add),
sharding them gives a partial sum.
"""

from __future__ import annotations

import torch

from autopar.ops.dims import Call, Letters, OpDims, einsum, is_symbolic
from autopar.ops.kinds import OpRule, same, unsharded


def _embedding(call: Call) -> OpDims:
    """How embedding may be sharded: along all dims of the indices, along the width of the table,
    and by its rows, if their number is fixed, with the vocab-parallel lowering.

    If gradients are scaled by frequency in the whole batch, nothing can be sharded.
    """
    fixed = "v" if is_symbolic(call.tensors[0].shape[0]) else ""
    if call.arg("scale_grad_by_freq", False):
        return unsharded(call)
    return einsum(
        "v h, b.. -> b.. h", linear=((0,),), special={"v": "vocab_parallel_embedding"}, fixed=fixed
    )(call)


def _placed(call: Call) -> tuple[list[int], Letters, Letters, dict]:
    """For x[indices]: (the indexed dims of x, the letters of x, the letters of the result, the size
    of each letter).

    As in NumPy, adjacent indexed dims are replaced in place, others by leading dims. `e0 e1 ..` are
    the dims of the indices.
    """
    source, indices = call.tensors[0], call.arg("indices")
    at = [k for k, index in enumerate(indices) if index is not None]
    letters = tuple(f"!{k}" if k in at else f"d{k}" for k in range(source.dim()))
    shape = _broadcast([indices[k].meta["val"] for k in at])
    entries = tuple(f"e{k}" for k in range(len(shape)))
    kept = [x for k, x in enumerate(letters) if k not in at]
    front = at[0] if at == list(range(at[0], at[-1] + 1)) else 0
    sizes = dict(zip(letters, source.shape, strict=True)) | dict(zip(entries, shape, strict=True))
    return at, letters, (*kept[:front], *entries, *kept[front:]), sizes


def _broadcast(tensors: list[torch.Tensor]) -> list:
    rank = max(t.dim() for t in tensors)
    shape: list = [1] * rank
    for t in tensors:
        for k, size in enumerate(t.shape, start=rank - t.dim()):
            shape[k] = size if same(shape[k], 1) else shape[k]
    return shape


def _aligned(tensor: torch.Tensor, letters: Letters, sizes: dict) -> Letters:
    """The letters of a tensor that broadcasts to a shape with `letters`, whose sizes are `sizes`.
    Stretched dims get letters that cannot be sharded.
    """
    offset = len(letters) - tensor.dim()
    return tuple(
        letters[offset + k] if same(s, sizes[letters[offset + k]]) else f"!{k}"
        for k, s in enumerate(tensor.shape)
    )


def _boolean(call: Call) -> bool:
    return any(
        index is not None and index.meta["val"].dtype in (torch.bool, torch.uint8)
        for index in call.arg("indices")
    )


def _index(call: Call) -> OpDims:
    if _boolean(call):
        return unsharded(call)
    at, letters, out, sizes = _placed(call)
    entries = tuple(x for x in out if x.startswith("e"))
    inputs = (letters, *(_aligned(call.arg("indices")[k].meta["val"], entries, sizes) for k in at))
    return OpDims(inputs, (out,), sizes, linear=(frozenset({0}),))


def _masked_put(call: Call) -> OpDims:
    """How index_put with one boolean mask may be sharded: not along the mask's dims, since value e
    goes to the e-th selected place. With several masks or indices, not at all.
    """
    indices, target = call.arg("indices"), call.tensors[0]
    masks = [(k, index.meta["val"]) for k, index in enumerate(indices) if index is not None]
    if len(masks) != 1:
        return unsharded(call)
    ((at, mask),) = masks
    behind = at + mask.dim()
    letters = tuple(f"!{k}" if at <= k < behind else f"d{k}" for k in range(target.dim()))
    sizes = dict(zip(letters, target.shape, strict=True)) | {"!e": -1}
    values = _aligned(call.tensors[-1], (*letters[:at], "!e", *letters[behind:]), sizes)
    linear = (frozenset({0, 2}),)
    return OpDims((letters, letters[at:behind], values), (letters,), sizes, linear=linear)


def _index_put(call: Call) -> OpDims:
    """How index_put may be sharded: along dims of the target without an index. Entries (the dims of
    the indices) can be sharded only with `accumulate`, which gives a partial sum.
    """
    if _boolean(call):
        return _masked_put(call)
    at, letters, out, sizes = _placed(call)
    adds = bool(call.arg("accumulate", False))
    if not adds:
        rename = {x: f"!{x}" for x in out if x.startswith("e")}
        out, sizes = (
            tuple(rename.get(x, x) for x in out),
            {rename.get(x, x): s for x, s in sizes.items()},
        )
    entries = tuple(x for x in out if x.lstrip("!").startswith("e"))
    indices = tuple(_aligned(call.arg("indices")[k].meta["val"], entries, sizes) for k in at)
    values = _aligned(call.tensors[-1], out, sizes)
    return OpDims(
        (letters, *indices, values),
        (letters,),
        sizes,
        frozenset(entries) if adds else frozenset(),
        frozenset({0}) if adds else frozenset(),
        linear=(frozenset({0, len(at) + 1}),),
    )


def _index_select(call: Call) -> OpDims:
    source, index = call.tensors
    dim = call.dim()
    letters = tuple(f"!{k}" if k == dim else f"d{k}" for k in range(source.dim()))
    sizes = dict(zip(letters, source.shape, strict=True)) | {
        "e": call.results[0].shape[dim] if source.dim() else 1
    }
    out = tuple("e" if k == dim else x for k, x in enumerate(letters))
    return (
        OpDims((letters, ("e",) * index.dim()), (out,), sizes, linear=(frozenset({0}),))
        if source.dim()
        else unsharded(call)
    )


def _write(adding: bool, linear: bool = True) -> OpRule:
    """A rule (a function from a call to its `OpDims`) for index_add (`adding`) and index_copy:
    entry e of the source goes to row index[e] of the target. Entries can be sharded only if they
    are added.

    `linear`: the op is jointly linear in target and source.
    """

    def rule(call: Call) -> OpDims:
        target, index, source = call.tensors[0], call.tensors[1], call.tensors[-1]
        if not target.dim() or len(call.tensors) != 3 or index.dim() != 1:
            return unsharded(call)
        dim = call.dim()
        entry = "e" if adding else "!e"
        letters = tuple(f"!{k}" if k == dim else f"d{k}" for k in range(target.dim()))
        source_letters = tuple(entry if k == dim else x for k, x in enumerate(letters))
        sizes = dict(zip(letters, target.shape, strict=True)) | {entry: source.shape[dim]}
        return OpDims(
            (letters, (entry,), source_letters),
            (letters,),
            sizes,
            frozenset({"e"}) if adding else frozenset(),
            frozenset({0}) if adding else frozenset(),
            linear=(frozenset({0, 2}),) if linear else (),
        )

    return rule


def _gather(call: Call) -> OpDims:
    """How gather may be sharded: along every other dim that is as long in the source as in the
    index. Along the dim that is gathered, index and result may be sharded, and the source stays
    whole.
    """
    source, index = call.tensors
    if not source.dim() or not index.dim():
        return unsharded(call)
    dim = call.dim()
    free = [k != dim and same(source.shape[k], index.shape[k]) for k in range(source.dim())]
    letters = tuple(f"d{k}" if free[k] else f"!{k}" for k in range(source.dim()))
    picked = tuple(x if free[k] else "e" if k == dim else f"!i{k}" for k, x in enumerate(letters))
    sizes = dict(zip(letters, source.shape, strict=True)) | dict(
        zip(picked, index.shape, strict=True)
    )
    return OpDims((letters, picked), (picked,), sizes, linear=(frozenset({0}),))


def _take_along_dim(call: Call) -> OpDims:
    """How take_along_dim may be sharded: like `gather`, with broadcasting. Without a dim it
    flattens the source and stays whole.
    """
    source, index = call.tensors
    if call.arg("dim") is None:
        return unsharded(call)
    dim, shape = call.dim(), call.results[0].shape
    out = tuple("e" if k == dim else f"d{k}" for k in range(source.dim()))
    sizes = dict(zip(out, shape, strict=True))
    left = tuple(
        x if k != dim and same(source.shape[k], shape[k]) else f"!{k}" for k, x in enumerate(out)
    )
    right = tuple(x if same(index.shape[k], shape[k]) else f"!i{k}" for k, x in enumerate(out))
    return OpDims(
        (left, right),
        (out,),
        sizes | {x: 1 for x in (*left, *right) if x not in sizes},
        linear=(frozenset({0}),),
    )


def _scatter(adding: bool) -> OpRule:
    """A rule (a function from a call to its `OpDims`) for scatter ops with self, index and src (or
    a number). Dims of equal size in all of them can be sharded, except the dim that is written
    along.

    `adding`: entries may also be sharded along that dim, which gives a partial sum. For that, src
    must be as long there as index.
    """

    def rule(call: Call) -> OpDims:
        target, index, *src = call.tensors
        if not target.dim() or not index.dim():
            return unsharded(call)
        dim = call.dim()
        free = [
            k != dim and all(same(t.shape[k], target.shape[k]) for t in (index, *src))
            for k in range(target.dim())
        ]
        # src may be longer than index
        whole_entries = all(same(t.shape[dim], index.shape[dim]) for t in src)
        entry = "e" if adding and whole_entries else "!e"
        letters = tuple(f"d{k}" if free[k] else f"!{k}" for k in range(target.dim()))
        entries = tuple(
            x if free[k] else entry if k == dim else f"!i{k}" for k, x in enumerate(letters)
        )
        sizes = dict(zip(letters, target.shape, strict=True)) | dict(
            zip(entries, index.shape, strict=True)
        )
        summed, added = (
            (frozenset({"e"}), frozenset({0})) if entry == "e" else (frozenset(), frozenset())
        )
        linear = (frozenset({0, 2}),) if src and call.arg("reduce") is None else ()
        return OpDims(
            (letters, entries, *(entries for _ in src)), (letters,), sizes, summed, added, linear
        )

    return rule


def _slice_scatter(call: Call) -> OpDims:
    """How slice_scatter and select_scatter may be sharded: along all dims but the one in which src
    replaces a slice of self. For select_scatter, src lacks that dim.
    """
    target, src = call.tensors
    dim = call.dim(default=0)
    letters = tuple(f"!{k}" if k == dim else f"d{k}" for k in range(target.dim()))
    sizes = dict(zip(letters, target.shape, strict=True))
    source = tuple(
        "!s" if k == dim else x
        for k, x in enumerate(letters)
        if k != dim or src.dim() == target.dim()
    )
    return OpDims((letters, source), (letters,), sizes, linear=(frozenset({0, 1}),))


def _diagonal_scatter(call: Call) -> OpDims:
    """How diagonal_scatter may be sharded: along all dims but the two whose diagonal src replaces.
    The last dim of src is that diagonal.
    """
    target, src = call.tensors
    frozen = {call.dim("dim1", 0), call.dim("dim2", 1)}
    letters = tuple(f"!{k}" if k in frozen else f"d{k}" for k in range(target.dim()))
    sizes = dict(zip(letters, target.shape, strict=True)) | {"!s": src.shape[-1]}
    source = (*(x for k, x in enumerate(letters) if k not in frozen), "!s")
    return OpDims((letters, source), (letters,), sizes, linear=(frozenset({0, 1}),))


LOOKUPS: dict[str, OpRule] = {
    "embedding": _embedding,
    "index": _index,
    "index_put": _index_put,
    "index_select": _index_select,
    "index_add": _write(adding=True),
    "index_copy": _write(adding=False),
    "gather": _gather,
    "take_along_dim": _take_along_dim,
    "scatter": _scatter(adding=False),
    "scatter_add": _scatter(adding=True),
    "scatter_reduce": _scatter(adding=False),
    "slice_scatter": _slice_scatter,
    "select_scatter": _slice_scatter,
    "diagonal_scatter": _diagonal_scatter,
}
