"""Rules of ops that combine or move elements along dims: reductions, scans, normalizations,
padding, repetition.
"""

from __future__ import annotations

from collections.abc import Callable

from autopar.ops.dims import Call, Letters, OpDims
from autopar.ops.kinds import OpRule, along, keep_dims, last_dims, pointwise, same, unsharded, words


def _reduction(summing: bool, linear: bool = True) -> OpRule:
    def rule(call: Call) -> OpDims:
        if len(call.tensors) > 1:  # max.other and min.other compare two tensors element by element
            return pointwise()(call)
        source, dims, keep = call.tensors[0], set(call.dims()), bool(call.arg("keepdim", False))
        letters = tuple(
            f"!{k}" if k in dims and not summing else f"d{k}" for k in range(source.dim())
        )
        out: Letters = tuple(
            x if k not in dims else f"!k{k}" for k, x in enumerate(letters) if keep or k not in dims
        )
        summed = frozenset(letters[k] for k in dims) if summing else frozenset()
        return OpDims(
            (letters,),
            (out,) * len(call.results),
            dict(zip(letters, source.shape, strict=True)),
            summed,
            linear=(frozenset({0}),) if summing and linear else (),
        )

    return rule


def _selection(call: Call) -> OpDims:
    """How kthvalue, median and mode may be sharded: along all dims but the reduced one. Over all
    elements, not at all.
    """
    source = call.tensors[0]
    if len(call.results) == 1:
        return unsharded(call)
    dim, keep = call.dim(default=-1), bool(call.arg("keepdim", False))
    letters = tuple(f"!{k}" if k == dim else f"d{k}" for k in range(source.dim()))
    out = tuple("!k" if k == dim else x for k, x in enumerate(letters) if keep or k != dim)
    return OpDims(
        (letters,), (out,) * len(call.results), dict(zip(letters, source.shape, strict=True))
    )


def _diff(call: Call) -> OpDims:
    """How diff may be sharded: along all other dims. `prepend` and `append` are joined to the
    tensor along the dim, so they are sharded like it.
    """
    dim = call.dim(default=-1)
    inputs = tuple(
        tuple(f"!{i}{k}" if k == dim else f"d{k}" for k in range(t.dim()))
        for i, t in enumerate(call.tensors)
    )
    out = tuple("!r" if k == dim else f"d{k}" for k in range(call.tensors[0].dim()))
    return OpDims(inputs, (out,), dict(zip(inputs[0], call.tensors[0].shape, strict=True)))


def _cosine_similarity(call: Call) -> OpDims:
    """How cosine_similarity may be sharded: along all dims but the reduced one. Its two operands
    broadcast.
    """
    rank = max(t.dim() for t in call.tensors)
    along_dim = call.arg("dim", 1) % rank
    shape: list = [1] * rank
    for t in call.tensors:
        for k, size in enumerate(t.shape, start=rank - t.dim()):
            shape[k] = size if same(shape[k], 1) else shape[k]
    letters = tuple("!x" if k == along_dim else f"d{k}" for k in range(rank))
    inputs = tuple(
        tuple(
            letters[k] if same(size, shape[k]) else f"!{k}"
            for k, size in enumerate(t.shape, start=rank - t.dim())
        )
        for t in call.tensors
    )
    sizes = dict(zip(letters, shape, strict=True)) | {f"!{k}": 1 for k in range(rank)}
    return OpDims(inputs, (tuple(x for x in letters if x != "!x"),), sizes)


def trailing(name: str) -> Callable[[Call], list[int]]:
    """A function from a call to the indices of the last n dims of its first operand. n is the
    length of the list argument `name`, such as layer_norm's normalized_shape.
    """
    return lambda call: last_dims(len(call.arg(name)))(call)


def _pad(call: Call) -> OpDims:
    """How pad may be sharded: along all dims but the padded or cropped ones. Linear if it pads with
    0.
    """
    pad, rank = call.arg("pad"), call.tensors[0].dim()
    fixed = [rank - 1 - k for k in range(len(pad) // 2) if pad[2 * k : 2 * k + 2] != [0, 0]]
    value = call.arg("value", 0)
    return keep_dims(lambda c: fixed, linear=value is None or value == 0)(call)


def _listed(name: str) -> Callable[[Call], list[int]]:
    """A function from a call to the dims in its list argument `name`, as indices from 0. All dims
    if it is absent or empty, since the op then flattens.
    """

    def fixed(call: Call) -> list[int]:
        rank, dims = call.tensors[0].dim(), call.arg(name)
        return [d % rank for d in dims] if dims else list(range(rank))

    return fixed


def _repetition(name: str) -> OpRule:
    """A rule (a function from a call to its `OpDims`) for repeat and tile: repeated dims and new
    leading dims cannot be sharded. `name` is the argument with the counts.
    """

    def rule(call: Call) -> OpDims:
        source, rank = call.tensors[0], call.results[0].dim()
        counts = list(call.arg(name))
        counts = [1] * (rank - len(counts)) + counts
        offset = rank - source.dim()
        letters = tuple(
            f"d{k}" if counts[offset + k] == 1 else f"!{k}" for k in range(source.dim())
        )
        out = (
            *(f"!n{k}" for k in range(offset)),
            *(x if not x.startswith("!") else f"!r{k}" for k, x in enumerate(letters)),
        )
        return OpDims(
            (letters,),
            (out,),
            dict(zip(letters, source.shape, strict=True)),
            linear=(frozenset({0}),),
        )

    return rule


def _repeat_interleave(call: Call) -> OpDims:
    """How repeat_interleave may be sharded: along every dim, the repeated one evenly. Elements are
    repeated in place, so repeating a shard gives the shard of the result.

    A tensor of counts, or flattening several dims, keeps it whole.
    """
    source, dim = call.tensors[0], call.arg("dim")
    if len(call.tensors) > 1 or not source.dim() or (dim is None and source.dim() > 1):
        return unsharded(call)
    dim = (dim or 0) % source.dim()
    letters = tuple(f"d{k}" for k in range(source.dim()))
    even = frozenset({letters[dim]})
    return OpDims(
        (letters,),
        (letters,),
        dict(zip(letters, source.shape, strict=True)),
        linear=(frozenset({0}),),
        even=even,
    )


def _unfold(call: Call) -> OpDims:
    """How unfold may be sharded: along all dims but the one that is cut into windows, which become
    a new last dim.
    """
    return keep_dims(along("dimension"), linear=True, free=True)(call)


def _diagonal(call: Call) -> OpDims:
    """How diagonal may be sharded: along all dims but the two whose diagonal becomes the last dim."""
    source = call.tensors[0]
    gone = {call.dim("dim1"), call.dim("dim2")}
    letters = tuple(f"!{k}" if k in gone else f"d{k}" for k in range(source.dim()))
    out = (*(x for k, x in enumerate(letters) if k not in gone), "!g")
    return OpDims(
        (letters,),
        (out,),
        dict(zip(letters, source.shape, strict=True)),
        linear=(frozenset({0}),),
        movement_free=True,
    )


def fourier(call: Call) -> OpDims:
    """How a Fourier transform of real and imaginary parts may be sharded: along the dims that it
    does not transform. Jointly linear in both parts.
    """
    source, along_dims = call.tensors[0], set(call.dims())
    letters = tuple(f"!{k}" if k in along_dims else f"d{k}" for k in range(source.dim()))
    out = tuple(f"!r{k}" if k in along_dims else x for k, x in enumerate(letters))
    both = frozenset(range(len(call.tensors)))
    return OpDims(
        (letters,) * len(both),
        (out,) * len(call.results),
        dict(zip(letters, source.shape, strict=True)),
        linear=(both,),
    )


REDUCTIONS: dict[str, OpRule] = {
    "sum": _reduction(summing=True),
    **dict.fromkeys(
        words("""
        mean amax amin max min aminmax argmax argmin any all var std var_mean std_mean prod logsumexp nanmean count_nonzero
        linalg_vector_norm norm
        """),
        _reduction(summing=False),
    ),
    "nansum": _reduction(summing=True, linear=False),
    **dict.fromkeys(("kthvalue", "median", "nanmedian", "mode"), _selection),
    # along one dim
    "layer_norm": keep_dims(trailing("normalized_shape")),
    "native_layer_norm": keep_dims(trailing("normalized_shape")),
    "rms_norm": keep_dims(trailing("normalized_shape")),
    **dict.fromkeys(
        ("softmax", "_softmax", "_safe_softmax", "log_softmax", "_log_softmax"), keep_dims(along())
    ),
    **dict.fromkeys(("cumprod", "cummax", "cummin", "logcumsumexp"), keep_dims(along())),
    "cumsum": keep_dims(along(), linear=True),
    "sort": keep_dims(along(default=-1)),
    "argsort": keep_dims(along(default=-1)),
    "topk": keep_dims(along(default=-1)),
    "glu": keep_dims(along(default=-1)),
    "diff": _diff,
    "cosine_similarity": _cosine_similarity,
    # elements that move along dims
    "pad": _pad,
    "constant_pad_nd": _pad,
    "flip": keep_dims(_listed("dims"), linear=True),
    "roll": keep_dims(_listed("dims"), linear=True),
    "repeat": _repetition("repeats"),
    "tile": _repetition("dims"),
    "repeat_interleave": _repeat_interleave,
    "unfold": _unfold,
    "diagonal": _diagonal,
    "triu": keep_dims(last_dims(2), linear=True),
    "tril": keep_dims(last_dims(2), linear=True),
}
