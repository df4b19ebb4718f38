"""Rules of ops over (batch, channels, space): convolutions, norms over channels, pooling,
resampling.

Batch and channels can be sharded, space cannot. Shards must be even, because these ops refuse
tensors without channels.
"""

from __future__ import annotations

from autopar.ir.calls import op_name
from autopar.ops.dims import Call, OpDims
from autopar.ops.kinds import OpRule, keep_dims, last_dims, unsharded, words

LOCAL_GROUPS = "local_groups"
"""The lowering for ops with an argument for the number of channel groups. A rank with some of the
groups passes its own number.
"""


def _convolution(call: Call) -> OpDims:
    """How a convolution may be sharded: by batch, by output channels, and by input channels, over
    which it sums. With groups, both kinds of channels are sharded together, in whole groups. Never
    along space.
    """
    x, weight = call.tensors[:2]
    space = weight.dim() - 2
    batch = ("n",) if x.dim() == weight.dim() else ()
    transposed = bool(call.arg("transposed", False)) or "transpose" in op_name(call.node)
    groups = call.arg("groups", 1)
    # a weight of (o, i, *k) works on every output position, a transposed one of (i, o, *k) on every input
    flops = 2 * weight[0].numel()
    for size in (x if transposed else call.results[0]).shape:
        flops = flops * size
    if groups == 1:
        sizes = {
            "o": weight.shape[1 if transposed else 0],
            "i": weight.shape[0 if transposed else 1],
        }
        entry, out, summed, additive = "i", "o", frozenset("i"), frozenset({2})
        channels = ("i", "o") if transposed else ("o", "i")
        special = {}
    else:
        entry = out = "!g" if transposed else "g"
        sizes, summed, additive, channels, special = (
            {entry: groups},
            frozenset(),
            frozenset(),
            (out, "!c"),
            {"g": LOCAL_GROUPS},
        )
    bias = [(out,)] * (len(call.tensors) - 2)
    with_bias = frozenset({2} if bias else ())
    return OpDims(
        (
            (*batch, entry, *(f"!s{k}" for k in range(space))),
            (*channels, *(f"!k{k}" for k in range(space))),
            *bias,
        ),
        ((*batch, out, *(f"!r{k}" for k in range(space))),),
        sizes | {x: x_size for x, x_size in zip(batch, x.shape, strict=False)},
        summed,
        additive & with_bias,
        linear=(frozenset({0}) | with_bias, frozenset({1}) | with_bias),
        even=frozenset(sizes),
        special=special,
        contraction=True,
        flops=flops,
    )


def _group_norm(call: Call) -> OpDims:
    """How group_norm may be sharded: by batch, and by channels in whole groups. Never along space."""
    x, *affine = call.tensors
    group = "g"
    letters = ("n", group, *(f"!s{k}" for k in range(x.dim() - 2)))
    out = ("n", group, *(f"!r{k}" for k in range(x.dim() - 2)))
    sizes = {"n": x.shape[0], group: call.arg("num_groups")}
    return OpDims(
        (letters, *((group,) for _ in affine)),
        (out,),
        sizes,
        even=frozenset("g"),
        special={"g": LOCAL_GROUPS},
    )


def _instance_norm(call: Call) -> OpDims:
    """How instance_norm may be sharded: by batch and channels, since its statistics are per sample
    and channel. Running statistics would mix samples; the op then stays whole.
    """
    if call.arg("running_mean") is not None:
        return unsharded(call)
    x, *per_channel = call.tensors
    letters = ("n", "c", *(f"!s{k}" for k in range(x.dim() - 2)))
    out = ("n", "c", *(f"!r{k}" for k in range(x.dim() - 2)))
    return OpDims(
        (letters, *(("c",) for _ in per_channel)),
        (out,),
        {"n": x.shape[0], "c": x.shape[1]},
        even=frozenset("c"),
    )


def _spatial(space: int, linear: bool) -> OpRule:
    return keep_dims(last_dims(space), linear=linear, even=True)


def _spatial_gradient(space: int) -> OpRule:
    """A rule for the gradient of an op over the last `space` dims, which cannot be sharded. All
    operands have the other dims, and the op is linear in the first, the gradient of the result.
    """

    def rule(call: Call) -> OpDims:
        others = tuple(f"d{k}" for k in range(call.tensors[0].dim() - space))
        letters = lambda mark: (*others, *(f"!{mark}{k}" for k in range(space)))  # noqa: E731
        return OpDims(
            tuple(letters(f"{place}_") for place in range(len(call.tensors))),
            (letters("r"),),
            dict(zip(others, call.tensors[0].shape, strict=False)),
            linear=(frozenset({0}),),
            even=frozenset(others),
        )

    return rule


CONVOLUTIONS: dict[str, OpRule] = {
    **dict.fromkeys(
        words(
            "conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d"
        ),
        _convolution,
    ),
    "group_norm": _group_norm,
    "instance_norm": _instance_norm,
    **{
        f"{kind}_pool{n}d": _spatial(n, kind != "max")
        for n in (1, 2, 3)
        for kind in ("max", "avg", "adaptive_avg")
    },
    **{
        name.format(n): _spatial(n, name.startswith("_"))
        for n in (2, 3)
        for name in ("_adaptive_avg_pool{}d", "max_pool{}d_with_indices")
    },
    **{
        f"{name.format(n)}_backward": _spatial_gradient(n)
        for n in (2, 3)
        for name in ("avg_pool{}d", "_adaptive_avg_pool{}d")
    },
    "max_pool2d_with_indices_backward": _spatial_gradient(2),
    **{f"upsample_nearest{n}d": _spatial(n, True) for n in (1, 2, 3)},
    "upsample_linear1d": _spatial(1, True),
    "upsample_bilinear2d": _spatial(2, True),
    "upsample_bicubic2d": _spatial(2, True),
    "upsample_trilinear3d": _spatial(3, True),
    "pixel_shuffle": _spatial(3, True),
    "pixel_unshuffle": _spatial(3, True),
}
