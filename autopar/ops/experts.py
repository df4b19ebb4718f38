"""The rule of `autopar::routed_experts` (autopar_kernels): tokens may be sharded; experts and their width by lowerings of their own."""

from __future__ import annotations

from autopar.ops.dims import Call, OpDims

FIXED_WIDTH = ("!f", "!w")
"""The letters of an expert's width: `f` where it is F (down), `w` where it is F' (up), which holds gate and up one after the other or
interleaved.  They are fixed until a shard can be cut from sections; sharding both makes the result partial, and `down_bias` with it."""

EXPERT = "!e"
"""The letter of the experts.  Sharding it alone is no strategy: tokens must travel (`rewrite.expert_parallel`)."""


def routed_experts(call: Call) -> OpDims:
    """x (t, h), index (t, k), weights (t, k), up (e, w, h), up_bias (e, w), down (e, h, f), down_bias (e, h) -> (t, h).

    With a capacity the choices of all tokens compete, so that tokens cannot be sharded either.  FLOPs are those of the top k without
    dropped choices, 2 T K (F' H + F H).
    """
    f, w = FIXED_WIDTH
    t = "!t" if call.arg("capacity_factor") else "t"
    flip = call.arg("transposed")
    named = {
        "x": (t, "!h"),
        "index": (t, "!k"),
        "weights": (t, "!k"),
        "up": (EXPERT, "!h", w) if flip else (EXPERT, w, "!h"),
        "up_bias": (EXPERT, w),
        "down": (EXPERT, f, "!h") if flip else (EXPERT, "!h", f),
        "down_bias": (EXPERT, "!h"),
    }
    present = [name for name in named if call.arg(name) is not None]
    inputs = tuple(named[name] for name in present)
    sizes = {x: s for letters, tensor in zip(inputs, call.tensors, strict=True) for x, s in zip(letters, tensor.shape, strict=True)}
    last = frozenset(present.index(name) for name in ("down", "down_bias") if name in present)
    return OpDims(
        inputs,
        ((t, "!h"),),
        sizes,
        linear=(frozenset({present.index("weights")}), last),
        contraction=True,
        flops=2 * sizes[t] * sizes["!k"] * sizes["!h"] * (sizes[w] + sizes[f]),
    )
