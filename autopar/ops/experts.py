"""The rule of `autopar::routed_experts` (autopar_kernels): tokens, the experts' width, and experts
can be sharded.
"""

from __future__ import annotations

from autopar_kernels.routed_experts import GATED

from autopar.ops.dims import Call, JointSharding, OpDims

ROUTED_EXPERTS = "autopar::routed_experts"


def routed_experts_rule(call: Call) -> OpDims:
    """How routed_experts may be sharded: x (t, h), index (t, k), weights (t, k), up (e, w, h),
    up_bias (e, w), down (e, h, f), down_bias (e, h) -> (t, h).

    The width f is that of `down`. `up` has it once or, for gate and up, twice: as sections or
    alternating. Sharding the width makes the result partial. Experts are sharded together with
    tokens, which are exchanged (`rewrite/lowerings/expert_parallel.py`). FLOPs are those of the top
    k without dropped choices, 2 T K (F' H + F H).
    """
    flip, kind = call.arg("transposed"), call.arg("activation").partition(":")[0]
    present = [name for name in _NAMES if call.arg(name) is not None]
    down = call.tensors[present.index("down")]
    width = down.shape[1] if flip else down.shape[2]
    up = f"f|{width}:{width}" if kind in GATED and not kind.startswith("interleaved") else "f"
    named = {
        "x": ("t", "!h"),
        "index": ("t", "!k"),
        "weights": ("t", "!k"),
        "up": ("!e", "!h", up) if flip else ("!e", up, "!h"),
        "up_bias": ("!e", up),
        "down": ("!e", "f", "!h") if flip else ("!e", "!h", "f"),
        "down_bias": ("!e", "!h"),
    }
    x, index = call.tensors[0], call.tensors[1]
    last = frozenset(present.index(name) for name in ("down", "down_bias") if name in present)
    wide = 2 * width if kind in GATED else width
    return OpDims(
        tuple(named[name] for name in present),
        (("t", "!h"),),
        {"t": x.shape[0], "!h": x.shape[1], "!k": index.shape[1], "!e": down.shape[0], "f": width},
        summed=frozenset("f"),
        additive=frozenset({present.index("down_bias")} if "down_bias" in present else ()),
        linear=(frozenset({present.index("weights")}), last),
        even=frozenset("f") if kind.startswith("interleaved") else frozenset(),
        contiguous=frozenset("f"),
        joint={
            "expert_parallel": JointSharding("ep", (0,) * len(present), (0,), int(down.shape[0]))
        },
        contraction=True,
        flops=2 * x.shape[0] * index.shape[1] * x.shape[1] * (wide + width),
    )


_NAMES = ("x", "index", "weights", "up", "up_bias", "down", "down_bias")
