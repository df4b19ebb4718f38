"""Rules of element-wise ops with broadcasting."""

from __future__ import annotations

from autopar.ops.dims import Call, OpDims
from autopar.ops.kinds import OpRule, keep_dims, pointwise, unsharded, words


def _additive(call: Call) -> OpDims:
    """How addition and subtraction may be sharded: along every dim, and as partial sums if both
    operands are tensors. With one tensor and a number they are affine, so not linear.
    """
    return pointwise(all_linear=len(call.tensors) == 2)(call)


def _where(call: Call) -> OpDims:
    """How where may be sharded: along every dim, and as partial sums in both branches together. If
    one branch is a number, only if that is 0.
    """
    if len(call.tensors) == 3:
        return pointwise(linear=((1, 2),))(call)
    numbers = [a for a in (call.arg("self"), call.arg("other")) if isinstance(a, (int, float))]
    return pointwise(linear=((1,),) if numbers == [0] else ())(call)


def _masked_fill(call: Call) -> OpDims:
    value = call.arg("value")
    return pointwise(linear=((0,),) if isinstance(value, (int, float)) and value == 0 else ())(call)


def _prelu(call: Call) -> OpDims:
    """How prelu may be sharded: along every dim of its input. The slope is replicated, or, with one
    per channel, sharded with dim 1.
    """
    x, slope = call.tensors
    letters = tuple(f"d{k}" for k in range(x.dim()))
    shared = slope.numel() == 1
    inputs = (letters, ("!s",) * slope.dim() if shared else ("d1",))
    return OpDims(inputs, (letters,), dict(zip(letters, x.shape, strict=True)))


def _one_hot(call: Call) -> OpDims:
    return keep_dims(lambda c: [])(call) if (call.arg("num_classes", -1)) >= 0 else unsharded(call)


_NONLINEAR = words("""
    abs exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal square pow sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh
    atan2 sigmoid relu relu6 silu gelu leaky_relu elu celu selu softplus hardtanh hardswish hardsigmoid hardshrink softshrink
    threshold mish log_sigmoid erf erfc erfinv lgamma digamma logit xlogy hypot copysign heaviside
    clamp clamp_min clamp_max maximum minimum fmax fmin remainder fmod floor_divide floor ceil round trunc frac sign sgn signbit nan_to_num
    eq ne lt le gt ge isclose isnan isinf isfinite isposinf isneginf
    logical_and logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor bitwise_not __and__ __or__ __xor__
    bitwise_left_shift bitwise_right_shift __lshift__ __rshift__
    exponential uniform normal_functional bernoulli rand_like randn_like
    zeros_like ones_like full_like empty_like fill dropout addcmul addcdiv rsub
""")

ELEMENTWISE: dict[str, OpRule] = {
    "add": _additive,
    "sub": _additive,
    "mul": pointwise(linear=((0,), (1,))),
    "div": lambda call: pointwise(linear=() if call.arg("rounding_mode") else ((0,),))(call),
    "lerp": pointwise(linear=((0, 1),)),
    "where": _where,
    "masked_fill": _masked_fill,
    "prelu": _prelu,
    "bucketize": keep_dims(lambda call: []),
    "isin": keep_dims(lambda call: []),
    "one_hot": _one_hot,
    **dict.fromkeys(
        ("neg", "to", "clone", "contiguous", "detach", "alias", "positive"),
        pointwise(linear=((0,),)),
    ),
    **dict.fromkeys(_NONLINEAR, pointwise()),
}
