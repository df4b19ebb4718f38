"""Samples of further ops, by the file of `autopar/ops/` that holds their rules."""

from __future__ import annotations

import autopar_kernels.glu
import autopar_kernels.layer_norms
import autopar_kernels.losses
import autopar_kernels.norms
import autopar_kernels.rotary
import autopar_kernels.softmax  # noqa: F401 (all register ops)
import torch
from autopar_kernels.custom_functions import OP, keep_call
from support.operands import T, call, ids, mask_, pos, t

aten = torch.ops.aten
BIG = 9223372036854775807


def op(name: str, overload: str = "default"):
    return getattr(getattr(aten, name), overload)


def unary(name: str, make=t):
    return [lambda b, i, j, k, m: call(op(name), make(b, i, j))]


def ints(*shape) -> T:
    return ids(3, *shape)


def solve(system: T, known: T, **options):
    return call(aten.linalg_solve_triangular.default, system, known, **options)


def below_one(*shape) -> T:
    return T(shape, "fraction")


ELEMENTWISE = {
    **{
        name: unary(name)
        for name in """
            exp2 expm1 atan sinh cosh asinh relu6 celu selu hardswish hardsigmoid hardshrink softshrink log_sigmoid erfc
            trunc frac sgn signbit nan_to_num isfinite isposinf isneginf positive empty_like tan
        """.split()
    },
    **{name: unary(name, pos) for name in ("log1p", "log2", "log10", "lgamma", "digamma")},
    **{name: unary(name, below_one) for name in ("asin", "acos", "atanh", "erfinv", "logit")},
    "acosh": [lambda b, i, j, k, m: call(aten.acosh.default, T((b, i), "above_one"))],
    "threshold": [lambda b, i, j, k, m: call(aten.threshold.default, t(b, i), 0.1, 2.0)],
    **{
        name: [
            lambda b, i, j, k, m, name=name: call(op(name), t(b, i, j), t(b, 1, j)),
            lambda b, i, j, k, m, name=name: call(op(name), t(i), t(b, 1)),
        ]
        for name in ("atan2", "hypot", "fmax", "fmin")
    },
    "copysign": [lambda b, i, j, k, m: call(aten.copysign.Tensor, t(b, i), t(i))],
    "heaviside": [
        lambda b, i, j, k, m: call(aten.heaviside.default, t(b, i, grad=False), t(i, grad=False))
    ],
    "xlogy": [lambda b, i, j, k, m: call(aten.xlogy.Tensor, t(b, i), pos(i))],
    "fmod": [
        lambda b, i, j, k, m: call(aten.fmod.Scalar, t(b, i), 0.7),
        lambda b, i, j, k, m: call(aten.fmod.Tensor, t(b, i), pos(i)),
    ],
    "isclose": [lambda b, i, j, k, m: call(aten.isclose.default, t(b, i), t(i))],
    "logical_xor": [lambda b, i, j, k, m: call(aten.logical_xor.default, mask_(b, i), mask_(i))],
    **{
        name: [lambda b, i, j, k, m, name=name: call(op(name, "Tensor"), ints(b, i), ints(i))]
        for name in (
            "bitwise_xor",
            "__xor__",
            "bitwise_left_shift",
            "bitwise_right_shift",
            "__lshift__",
            "__rshift__",
        )
    },
    "fill": [
        lambda b, i, j, k, m: call(aten.fill.Scalar, t(b, i), 2.0),
        lambda b, i, j, k, m: call(aten.fill.Tensor, t(b, i), t()),
    ],
    "addcdiv": [
        lambda b, i, j, k, m: call(aten.addcdiv.default, t(b, i), t(b, i), pos(b, i), value=2),
        lambda b, i, j, k, m: call(aten.addcdiv.default, t(i, j), t(j), pos(i, 1)),
    ],
    "lerp": [
        lambda b, i, j, k, m: call(aten.lerp.Scalar, t(b, i), t(i), 0.3),
        lambda b, i, j, k, m: call(aten.lerp.Tensor, t(b, i), t(b, i), t(i)),
    ],
    "prelu": [
        lambda b, i, j, k, m: call(aten.prelu.default, t(b, i, j), t(i)),
        lambda b, i, j, k, m: call(aten.prelu.default, t(b, i), t(1)),
    ],
    "bucketize": [
        lambda b, i, j, k, m: call(
            aten.bucketize.Tensor, t(b, i, grad=False), T((3,), "sorted", grad=False)
        )
    ],
    "isin": [lambda b, i, j, k, m: call(aten.isin.Tensor_Tensor, ids(9, b, i), ids(9, j))],
    "one_hot": [lambda b, i, j, k, m: call(aten.one_hot.default, ids(i, b, j), i)],
    "where": [
        lambda b, i, j, k, m: call(aten.where.self, mask_(b, 1, j), t(b, i, j), t(j)),
        lambda b, i, j, k, m: call(aten.where.ScalarOther, mask_(i, j), t(b, i, j), 0.0),
        lambda b, i, j, k, m: call(aten.where.ScalarOther, mask_(i, j), t(b, i, j), 1.0),
        lambda b, i, j, k, m: call(aten.where.ScalarSelf, mask_(b, i), 0.0, t(b, i)),
        lambda b, i, j, k, m: call(aten.where.ScalarSelf, mask_(b, i), 2.0, t(i)),
        lambda b, i, j, k, m: call(aten.where.Scalar, mask_(b, i), 2.0, 0.0),
    ],
    "masked_fill": [
        lambda b, i, j, k, m: call(aten.masked_fill.Scalar, t(b, i, j), mask_(b, 1, j), -3.0),
        lambda b, i, j, k, m: call(aten.masked_fill.Scalar, t(b, i, j), mask_(b, 1, j), 0),
        lambda b, i, j, k, m: call(aten.masked_fill.Tensor, t(b, i, j), mask_(i, j), t()),
    ],
    "clamp": [
        lambda b, i, j, k, m: call(aten.clamp.default, t(b, i), -0.5, 0.5),
        lambda b, i, j, k, m: call(aten.clamp.Tensor, t(b, i), t(i), None),
        lambda b, i, j, k, m: call(aten.clamp.Tensor, t(b, i), None, t(b, 1)),
    ],
    "clamp_min": [
        lambda b, i, j, k, m: call(aten.clamp_min.default, t(b, i), -0.5),
        lambda b, i, j, k, m: call(aten.clamp_min.Tensor, t(b, i), t(i)),
    ],
    "clamp_max": [
        lambda b, i, j, k, m: call(aten.clamp_max.default, t(b, i), 0.5),
        lambda b, i, j, k, m: call(aten.clamp_max.Tensor, t(b, i), t(i)),
    ],
}

REDUCTIONS = {
    "aminmax": [lambda b, i, j, k, m: call(aten.aminmax.default, t(b, i, j), dim=1, keepdim=True)],
    **{
        name: [
            lambda b, i, j, k, m, name=name: call(op(name, "correction"), t(b, i, j + 1), [-1]),
            lambda b, i, j, k, m, name=name: call(
                op(name, "correction"), t(b, i + 1, j), [1], correction=0, keepdim=True
            ),
        ]
        for name in ("var_mean", "std_mean")
    },
    "cosine_similarity": [
        lambda b, i, j, k, m: call(aten.cosine_similarity.default, t(b, i, j), t(b, i, j), -1),
        lambda b, i, j, k, m: call(aten.cosine_similarity.default, t(b, i, j), t(i, j), 2),
    ],
    "nansum": [lambda b, i, j, k, m: call(aten.nansum.default, t(b, i, j), [1])],
    "nanmean": [lambda b, i, j, k, m: call(aten.nanmean.default, t(b, i, j), [-1], True)],
    "count_nonzero": [
        lambda b, i, j, k, m: call(aten.count_nonzero.dim_IntList, mask_(b, i, j), [1])
    ],
    "linalg_vector_norm": [
        lambda b, i, j, k, m: call(aten.linalg_vector_norm.default, t(b, i, j), 2, [-1]),
        lambda b, i, j, k, m: call(aten.linalg_vector_norm.default, t(b, i, j), 2, [1], True),
        lambda b, i, j, k, m: call(aten.linalg_vector_norm.default, t(b, i)),
    ],
    "norm": [
        lambda b, i, j, k, m: call(aten.norm.ScalarOpt_dim, t(b, i, j), 2, [-1], True),
        lambda b, i, j, k, m: call(aten.norm.Scalar, t(b, i)),
    ],
    "kthvalue": [
        lambda b, i, j, k, m: call(aten.kthvalue.default, t(b, i, j), 1, 1),
        lambda b, i, j, k, m: call(aten.kthvalue.default, t(b, i), 1, -1, True),
    ],
    **{
        name: [
            lambda b, i, j, k, m, name=name: call(op(name, "dim"), t(b, i, j), 1),
            lambda b, i, j, k, m, name=name: call(op(name, "dim"), t(b, i), -1, True),
            lambda b, i, j, k, m, name=name: call(op(name), t(b, i)),
        ]
        for name in ("median", "nanmedian")
    },
    "mode": [
        lambda b, i, j, k, m: call(aten.mode.default, t(b, i, j, grad=False)),
        lambda b, i, j, k, m: call(aten.mode.default, t(b, i), 1),
    ],
    "native_layer_norm": [
        lambda b, i, j, k, m: call(
            aten.native_layer_norm.default, t(b, i, j + 1), [j + 1], t(j + 1), t(j + 1), 1e-5
        )
    ],
    "_safe_softmax": [lambda b, i, j, k, m: call(aten._safe_softmax.default, t(b, i, j), -1)],
    "_log_softmax": [lambda b, i, j, k, m: call(aten._log_softmax.default, t(b, i, j), 1, False)],
    **{
        name: [
            lambda b, i, j, k, m, name=name: call(op(name), t(b, i, j), -1),
            lambda b, i, j, k, m, name=name: call(op(name), t(b, i), 0),
        ]
        for name in ("cumprod", "cummax", "cummin", "logcumsumexp")
    },
    "argsort": [
        lambda b, i, j, k, m: call(aten.argsort.default, t(b, i, j)),
        lambda b, i, j, k, m: call(aten.argsort.stable, t(b, i), stable=True, dim=0),
    ],
    "glu": [
        lambda b, i, j, k, m: call(aten.glu.default, t(b, i, 2 * j)),
        lambda b, i, j, k, m: call(aten.glu.default, t(b, 2 * i, j), 1),
    ],
    "pad": [
        lambda b, i, j, k, m: call(aten.pad.default, t(b, i, j), [1, 2]),
        lambda b, i, j, k, m: call(aten.pad.default, t(b, i, j), [0, 1, 1, 0], "constant", 3.0),
        lambda b, i, j, k, m: call(aten.pad.default, t(b, i, j), [0, 0, 1, 0]),
        lambda b, i, j, k, m: call(aten.pad.default, t(b, i, j + 2), [1, 2], "reflect"),
    ],
    "constant_pad_nd": [
        lambda b, i, j, k, m: call(aten.constant_pad_nd.default, t(b, i, j), [1, 0], 2.0),
        lambda b, i, j, k, m: call(aten.constant_pad_nd.default, t(b, i, j), [0, 0, 2, 1]),
    ],
    "flip": [
        lambda b, i, j, k, m: call(aten.flip.default, t(b, i, j), [-1]),
        lambda b, i, j, k, m: call(aten.flip.default, t(b, i), [0]),
    ],
    "roll": [
        lambda b, i, j, k, m: call(aten.roll.default, t(b, i, j), [2], [-1]),
        lambda b, i, j, k, m: call(aten.roll.default, t(b, i, j), [1, -1], [1, 2]),
        lambda b, i, j, k, m: call(aten.roll.default, t(b, i), [3]),
    ],
    "repeat": [
        lambda b, i, j, k, m: call(aten.repeat.default, t(b, i, j), [1, 1, 3]),
        lambda b, i, j, k, m: call(aten.repeat.default, t(i, j), [2, 1, 2]),
        lambda b, i, j, k, m: call(aten.repeat.default, t(1, i), [b, 1]),
    ],
    "tile": [
        lambda b, i, j, k, m: call(aten.tile.default, t(b, i, j), [2]),
        lambda b, i, j, k, m: call(aten.tile.default, t(i), [2, 1]),
    ],
    "repeat_interleave": [
        lambda b, i, j, k, m: call(aten.repeat_interleave.self_int, t(b, i, j), 2, -1),
        lambda b, i, j, k, m: call(aten.repeat_interleave.self_int, t(b, i), 3, 0),
        lambda b, i, j, k, m: call(aten.repeat_interleave.self_int, t(b, i), 2),
        lambda b, i, j, k, m: call(aten.repeat_interleave.self_int, t(i), 2),
    ],
    "unfold": [
        lambda b, i, j, k, m: call(aten.unfold.default, t(b, i + 2, j), 1, 2, 1),
        lambda b, i, j, k, m: call(aten.unfold.default, t(b, i, j + 2), -1, 3, 2),
    ],
    "diagonal": [
        lambda b, i, j, k, m: call(aten.diagonal.default, t(b, i, j), 0, -2, -1),
        lambda b, i, j, k, m: call(aten.diagonal.default, t(i, b, i + 1), 1, 0, 2),
    ],
    **{
        name: [
            lambda b, i, j, k, m, name=name: call(op(name), t(b, i, j), -1),
            lambda b, i, j, k, m, name=name: call(op(name), t(i, j)),
        ]
        for name in ("triu", "tril")
    },
}

LOOKUP = {
    "index": [
        lambda b, i, j, k, m: call(aten.index.Tensor, t(b, i, j), [None, ids(i, k)]),
        lambda b, i, j, k, m: call(aten.index.Tensor, t(i, j), [ids(i, b, k)]),
        lambda b, i, j, k, m: call(aten.index.Tensor, t(b, i, j), [None, ids(i, k, 1), ids(j, m)]),
        lambda b, i, j, k, m: call(aten.index.Tensor, t(i, b, j, k), [ids(i, m), None, ids(j, m)]),
        lambda b, i, j, k, m: call(aten.index.Tensor, t(i, j, k), [ids(i, b, 1), None, ids(k, m)]),
        lambda b, i, j, k, m: call(aten.index.Tensor, t(i, j), [ids(i, b), ids(j, b)]),
    ],
    "index_put": [
        lambda b, i, j, k, m: call(
            aten.index_put.default, t(b, i + 3, j), [None, T((3,), "distinct", i + 3)], t(b, 3, j)
        ),
        lambda b, i, j, k, m: call(
            aten.index_put.default, t(b, i + 3, j), [None, T((3,), "distinct", i + 3)], t(j)
        ),
        lambda b, i, j, k, m: call(aten.index_put.default, t(i, j), [ids(i, b)], t(b, j), True),
        lambda b, i, j, k, m: call(
            aten.index_put.default, t(i, j), [ids(i, b, 1), ids(j, m)], t(b, m), True
        ),
        lambda b, i, j, k, m: call(aten.index_put.default, t(i, j), [ids(i, k)], t(), True),
    ],
    "index_select": [
        lambda b, i, j, k, m: call(aten.index_select.default, t(b, i, j), 1, ids(i, k)),
        lambda b, i, j, k, m: call(aten.index_select.default, t(i, j), 0, ids(i, b)),
    ],
    "index_add": [
        lambda b, i, j, k, m: call(
            aten.index_add.default, t(b, i, j), 1, ids(i, k), t(b, k, j), alpha=2
        ),
        lambda b, i, j, k, m: call(aten.index_add.default, t(i, j), 0, ids(i, b), t(b, j)),
    ],
    "index_copy": [
        lambda b, i, j, k, m: call(
            aten.index_copy.default, t(b, i + 3, j), 1, T((3,), "distinct", i + 3), t(b, 3, j)
        )
    ],
    "gather": [
        lambda b, i, j, k, m: call(aten.gather.default, t(b, i, j), -1, ids(j, b, i, k)),
        lambda b, i, j, k, m: call(aten.gather.default, t(b, i, j + 1), 1, ids(i, b, k, j)),
        lambda b, i, j, k, m: call(aten.gather.default, t(i, j), 0, ids(i, b, j)),
    ],
    "take_along_dim": [
        lambda b, i, j, k, m: call(aten.take_along_dim.default, t(b, i, j), ids(j, b, i, k), -1),
        lambda b, i, j, k, m: call(aten.take_along_dim.default, t(1, i, j), ids(i, b, k, 1), 1),
        lambda b, i, j, k, m: call(aten.take_along_dim.default, t(b, i), ids(2, k)),
    ],
    "scatter": [
        lambda b, i, j, k, m: call(
            aten.scatter.src, t(b, i, j + 1), -1, T((b, i, 1), "below", j + 1), t(b, i, 1)
        ),
        lambda b, i, j, k, m: call(aten.scatter.value, t(b, i, j), 1, ids(i, b, k, j), 2.0),
        lambda b, i, j, k, m: call(aten.scatter.value, t(b, i, j + 1), 1, ids(i, b, k, j), 2.0),
    ],
    "scatter_add": [
        lambda b, i, j, k, m: call(
            aten.scatter_add.default, t(b, i, j), 1, ids(i, b, k, j), t(b, k, j)
        ),
        lambda b, i, j, k, m: call(aten.scatter_add.default, t(i, j), 0, ids(i, b, j), t(b, j)),
        lambda b, i, j, k, m: call(
            aten.scatter_add.default, t(i, j), 0, ids(i, k, j), t(k + 1, j, grad=False)
        ),
    ],
    "scatter_reduce": [
        lambda b, i, j, k, m: call(
            aten.scatter_reduce.two, t(b, i, j), 1, ids(i, b, k, j), t(b, k, j), "amax"
        ),
        lambda b, i, j, k, m: call(
            aten.scatter_reduce.two,
            t(b, i, j),
            1,
            ids(i, b, k, j),
            t(b, k, j),
            "mean",
            include_self=False,
        ),
    ],
    "slice_scatter": [
        lambda b, i, j, k, m: call(
            aten.slice_scatter.default, t(b, i + 1, j), t(b, i, j), 1, 1, BIG
        ),
        lambda b, i, j, k, m: call(
            aten.slice_scatter.default, t(b, i, 2 * j), t(b, i, j), -1, 0, BIG, 2
        ),
    ],
    "diagonal_scatter": [
        lambda b, i, j, k, m: call(aten.diagonal_scatter.default, t(b, i, i), t(b, i), 0, -2, -1),
        lambda b, i, j, k, m: call(aten.diagonal_scatter.default, t(i, b, i + 1), t(b, i), 1, 0, 2),
    ],
    "select_scatter": [
        lambda b, i, j, k, m: call(aten.select_scatter.default, t(b, i, j), t(b, j), 1, 0),
        lambda b, i, j, k, m: call(aten.select_scatter.default, t(i, b), t(b), 0, -1),
    ],
}

CONVOLUTION = {
    "conv1d": [
        lambda b, i, j, k, m: call(aten.conv1d.default, t(b, i, j + 2), t(12, i, 3), t(12)),
        lambda b, i, j, k, m: call(aten.conv1d.default, t(b, 12, j + 2), t(k, 12, 3), t(k)),
        lambda b, i, j, k, m: call(aten.conv1d.default, t(i, j + 2), t(k, i, 2)),
        lambda b, i, j, k, m: call(
            aten.conv1d.default, t(b, 12, j + 2), t(12, 1, 3), t(12), [1], [2], [1], 12
        ),
        lambda b, i, j, k, m: call(
            aten.conv1d.padding, t(b, i, j + 2), t(k, i, 3), t(k), [1], "same"
        ),
    ],
    "conv2d": [
        lambda b, i, j, k, m: call(
            aten.conv2d.default, t(b, 12, j + 2, 5), t(24, 12, 3, 2), t(24), [2, 1], [1, 0]
        ),
        lambda b, i, j, k, m: call(
            aten.conv2d.default, t(b, 12, 4, 5), t(24, 2, 3, 2), t(24), [1, 1], [0, 0], [1, 1], 6
        ),
        lambda b, i, j, k, m: call(
            aten.conv2d.default, t(12, 4, 5), t(12, 1, 3, 2), None, [1, 1], [0, 0], [1, 1], 12
        ),
    ],
    "conv3d": [
        lambda b, i, j, k, m: call(
            aten.conv3d.default, t(b, 12, 3, 4, 5), t(12, 12, 2, 2, 2), t(12)
        )
    ],
    "convolution": [
        lambda b, i, j, k, m: call(
            aten.convolution.default, t(b, 12, 5), t(12, 12, 3), t(12), [1], [0], [1], False, [0], 1
        ),
        lambda b, i, j, k, m: call(
            aten.convolution.default, t(b, 12, 5), t(12, 12, 3), t(12), [1], [0], [1], True, [0], 1
        ),
        lambda b, i, j, k, m: call(
            aten.convolution.default, t(b, 12, 5), t(12, 1, 3), None, [1], [0], [1], False, [0], 12
        ),
        lambda b, i, j, k, m: call(
            aten.convolution.default, t(b, 6, 5), t(6, 2, 3), t(4), [1], [0], [1], True, [0], 2
        ),
    ],
    "conv_transpose1d": [
        lambda b, i, j, k, m: call(
            aten.conv_transpose1d.default, t(b, 12, j), t(12, 12, 3), t(12), [2]
        ),
        lambda b, i, j, k, m: call(
            aten.conv_transpose1d.default, t(b, 4, j), t(4, 1, 3), t(2), [2], [0], [0], 2
        ),
    ],
    "conv_transpose2d": [
        lambda b, i, j, k, m: call(
            aten.conv_transpose2d.input, t(b, i, j, 3), t(i, k, 2, 2), t(k), [2, 2]
        )
    ],
    "conv_transpose3d": [
        lambda b, i, j, k, m: call(aten.conv_transpose3d.input, t(b, i, 2, 3, 2), t(i, k, 2, 2, 2))
    ],
    "group_norm": [
        lambda b, i, j, k, m: call(
            aten.group_norm.default, t(b, 24, j + 1), 12, t(24), t(24), 1e-3
        ),
        lambda b, i, j, k, m: call(aten.group_norm.default, t(b, 2 * i, 3, 2), i),
        lambda b, i, j, k, m: call(aten.group_norm.default, t(b, 2 * i, 3), 1, t(2 * i), t(2 * i)),
    ],
    "instance_norm": [
        lambda b, i, j, k, m: call(
            aten.instance_norm.default,
            t(b, 12, j + 1),
            t(12),
            t(12),
            None,
            None,
            True,
            0.1,
            1e-3,
            False,
        ),
        lambda b, i, j, k, m: call(
            aten.instance_norm.default,
            t(b, i, 3, 2),
            None,
            None,
            None,
            None,
            True,
            0.1,
            1e-3,
            False,
        ),
    ],
    **{
        f"{kind}_pool{n}d": [
            lambda b, i, j, k, m, kind=kind, n=n: call(
                op(f"{kind}_pool{n}d"), t(b, 12, *[j + 2, 4, 5][:n]), [2] * n
            ),
            lambda b, i, j, k, m, kind=kind, n=n: call(
                op(f"{kind}_pool{n}d"), t(i, *[j + 2, 4, 5][:n]), [2] * n
            ),
        ]
        for kind in ("max", "avg", "adaptive_avg")
        for n in (1, 2, 3)
    },
    **{
        f"_adaptive_avg_pool{n}d": [
            lambda b, i, j, k, m, n=n: call(
                op(f"_adaptive_avg_pool{n}d"), t(b, i, *[j + 2, 4, 5][:n]), [2] * n
            )
        ]
        for n in (2, 3)
    },
    **{
        f"max_pool{n}d_with_indices": [
            lambda b, i, j, k, m, n=n: call(
                op(f"max_pool{n}d_with_indices"), t(b, i, *[j + 2, 4, 5][:n]), [2] * n
            )
        ]
        for n in (2, 3)
    },
    **{
        f"avg_pool{n}d_backward": [
            lambda b, i, j, k, m, n=n: call(
                op(f"avg_pool{n}d_backward"),
                t(b, i, *[2] * n),
                t(b, i, *[4] * n, grad=False),
                [2] * n,
                [2] * n,
                [0] * n,
                False,
                True,
                None,
            )
        ]
        for n in (2, 3)
    },
    **{
        f"_adaptive_avg_pool{n}d_backward": [
            lambda b, i, j, k, m, n=n: call(
                op(f"_adaptive_avg_pool{n}d_backward"),
                t(b, i, *[2] * n),
                t(b, i, *[j + 2, 4, 5][:n], grad=False),
            )
        ]
        for n in (2, 3)
    },
    **{
        f"max_pool{n}d_with_indices_backward": [
            lambda b, i, j, k, m, n=n: call(
                op(f"max_pool{n}d_with_indices_backward"),
                t(b, i, *[2] * n),
                t(b, i, *[4] * n, grad=False),
                [2] * n,
                [2] * n,
                [0] * n,
                [1] * n,
                False,
                ids(4**n, b, i, *[2] * n),
            )
        ]
        for n in (2,)
    },
    "upsample_nearest1d": [
        lambda b, i, j, k, m: call(aten.upsample_nearest1d.vec, t(b, 12, j), [2 * j], None)
    ],
    "upsample_nearest2d": [
        lambda b, i, j, k, m: call(aten.upsample_nearest2d.vec, t(b, 12, j, 2), None, [2.0, 3.0])
    ],
    "upsample_nearest3d": [
        lambda b, i, j, k, m: call(aten.upsample_nearest3d.vec, t(b, 12, j, 2, 2), [j, 3, 4], None)
    ],
    "upsample_linear1d": [
        lambda b, i, j, k, m: call(aten.upsample_linear1d.vec, t(b, 12, j), [2 * j], False, None)
    ],
    **{
        name: [
            lambda b, i, j, k, m, name=name: call(
                op(name, "vec"), t(b, 12, j, 2), [2 * j, 3], True, None
            )
        ]
        for name in ("upsample_bilinear2d", "upsample_bicubic2d")
    },
    "upsample_trilinear3d": [
        lambda b, i, j, k, m: call(
            aten.upsample_trilinear3d.vec, t(b, 12, j, 2, 2), [j, 3, 4], False, None
        )
    ],
    "pixel_shuffle": [
        lambda b, i, j, k, m: call(aten.pixel_shuffle.default, t(b, 12, 4 * j, k, m), 2)
    ],
    "pixel_unshuffle": [
        lambda b, i, j, k, m: call(aten.pixel_unshuffle.default, t(b, i, 2 * j, 2 * k), 2)
    ],
}


def pos_fixed(*shape) -> T:
    return T(shape, "positive", grad=False)


CRITERIA = {
    **{
        name: [
            lambda b, i, j, k, m, name=name: call(op(name), t(b, i, j), t(b, i, j), 2),
            lambda b, i, j, k, m, name=name: call(op(name), t(b, i), t(b, i), 0),
            lambda b, i, j, k, m, name=name: call(op(name), t(b, i), t(b, i), 1),
        ]
        for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
    },
    "soft_margin_loss": [
        lambda b, i, j, k, m: call(aten.soft_margin_loss.default, t(b, i), t(b, i, grad=False), 2),
        lambda b, i, j, k, m: call(aten.soft_margin_loss.default, t(b, i), t(b, i, grad=False), 0),
    ],
    "binary_cross_entropy": [
        lambda b, i, j, k, m: call(
            aten.binary_cross_entropy.default,
            below_one(b, i),
            T((b, i), "fraction", grad=False),
            None,
            2,
        ),
        lambda b, i, j, k, m: call(
            aten.binary_cross_entropy.default,
            below_one(b, i),
            T((b, i), "fraction", grad=False),
            pos_fixed(i),
            0,
        ),
    ],
    "binary_cross_entropy_with_logits": [
        lambda b, i, j, k, m: call(
            aten.binary_cross_entropy_with_logits.default,
            t(b, i, j),
            t(b, i, j, grad=False),
            None,
            None,
            2,
        ),
        lambda b, i, j, k, m: call(
            aten.binary_cross_entropy_with_logits.default,
            t(b, i),
            t(b, i, grad=False),
            pos_fixed(b, 1),
            pos_fixed(i),
            2,
        ),
        lambda b, i, j, k, m: call(
            aten.binary_cross_entropy_with_logits.default,
            t(b, i),
            t(b, i, grad=False),
            None,
            pos_fixed(i),
            0,
        ),
    ],
    "kl_div": [
        lambda b, i, j, k, m: call(aten.kl_div.default, t(b, i, j), T((b, i, j), "positive"), 2),
        lambda b, i, j, k, m: call(aten.kl_div.default, t(b, i), t(b, i), 0, log_target=True),
    ],
    "poisson_nll_loss": [
        lambda b, i, j, k, m: call(
            aten.poisson_nll_loss.default, t(b, i), pos_fixed(b, i), True, False, 1e-8, 2
        )
    ],
    "margin_ranking_loss": [
        lambda b, i, j, k, m: call(
            aten.margin_ranking_loss.default, t(b, i), t(b, i), t(i, grad=False), 0.1, 2
        )
    ],
    "triplet_margin_loss": [
        lambda b, i, j, k, m: call(
            aten.triplet_margin_loss.default, t(b, i), t(b, i), t(b, i), 1.0, 2.0, 1e-6, False, 0
        ),
    ],
    "cosine_embedding_loss": [
        lambda b, i, j, k, m: call(
            aten.cosine_embedding_loss.default, t(b, i), t(b, i), t(b, grad=False), 0.1, 0
        ),
    ],
    "multi_margin_loss": [
        lambda b, i, j, k, m: call(
            aten.multi_margin_loss.default, t(b, j), ids(j, b), 1, 1.0, pos_fixed(j), 0
        ),
        lambda b, i, j, k, m: call(aten.multi_margin_loss.default, t(b, j), ids(j, b)),
    ],
    "multilabel_margin_loss": [
        lambda b, i, j, k, m: call(aten.multilabel_margin_loss.default, t(b, j), ids(j, b, j), 0)
    ],
    "hinge_embedding_loss": [
        lambda b, i, j, k, m: call(
            aten.hinge_embedding_loss.default, t(b, i), t(b, i, grad=False), 1.0, 2
        )
    ],
    "nll_loss_nd": [
        lambda b, i, j, k, m: call(
            aten.nll_loss_nd.default, t(b, j), T((b,), "labels", j), None, 2
        ),
        lambda b, i, j, k, m: call(
            aten.nll_loss_nd.default, t(b, j, i), T((b, i), "labels", j), pos_fixed(j), 2
        ),
        lambda b, i, j, k, m: call(
            aten.nll_loss_nd.default, t(b, j), T((b,), "labels", j), None, 0
        ),
        lambda b, i, j, k, m: call(
            aten.nll_loss_nd.default, t(b, j), T((b,), "labels", j), None, 1
        ),
    ],
    "nll_loss": [lambda b, i, j, k, m: call(aten.nll_loss.default, t(i, j), ids(j, i), None, 2)],
    "nll_loss2d": [
        lambda b, i, j, k, m: call(aten.nll_loss2d.default, t(b, j, i, k), ids(j, b, i, k), None, 2)
    ],
}

PRODUCTS = {
    "mv": [lambda b, i, j, k, m: call(aten.mv.default, t(b, j), t(j))],
    "dot": [lambda b, i, j, k, m: call(aten.dot.default, t(i), t(i))],
    "vdot": [lambda b, i, j, k, m: call(aten.vdot.default, t(b), t(b))],
    "outer": [lambda b, i, j, k, m: call(aten.outer.default, t(b), t(i))],
    "bilinear": [
        lambda b, i, j, k, m: call(aten.bilinear.default, t(b, i), t(b, j), t(k, i, j), t(k))
    ],
    "baddbmm": [
        lambda b, i, j, k, m: call(
            aten.baddbmm.default, t(b, i, k), t(b, i, j), t(b, j, k), beta=0.5, alpha=2
        ),
        lambda b, i, j, k, m: call(aten.baddbmm.default, t(b, 1, k), t(b, i, j), t(b, j, k)),
        lambda b, i, j, k, m: call(aten.baddbmm.default, t(k), t(m, i, j), t(m, j, k), beta=3),
    ],
    "addmv": [lambda b, i, j, k, m: call(aten.addmv.default, t(b), t(b, j), t(j), beta=2)],
    "einsum": [
        lambda b, i, j, k, m: call(aten.einsum.default, "bij,bkj->bik", [t(b, i, j), t(b, k, j)]),
        lambda b, i, j, k, m: call(aten.einsum.default, "...ij,jk", [t(b, i, j), t(j, k)]),
        lambda b, i, j, k, m: call(
            aten.einsum.default, "b h i d, b h j d -> b h i j", [t(b, 2, i, j), t(b, 1, k, j)]
        ),
        lambda b, i, j, k, m: call(aten.einsum.default, "bi,i,ij->bj", [t(b, i), t(i), t(i, j)]),
        lambda b, i, j, k, m: call(aten.einsum.default, "bii->b", [t(b, i, i)]),
        lambda b, i, j, k, m: call(aten.einsum.default, "bij->ji", [t(b, i, j)]),
    ],
    "linalg_solve_triangular": [
        lambda b, i, j, k, m: solve(t(b, i, j, j), t(b, i, j, k), upper=False, unitriangular=True),
        lambda b, i, j, k, m: solve(t(1, j, j), t(b, j, k), upper=True, unitriangular=True),
        lambda b, i, j, k, m: solve(
            t(b, 1, j, j), t(i, k, j), upper=True, left=False, unitriangular=True
        ),
        lambda b, i, j, k, m: solve(pos(j, j), t(j, k), upper=False),
    ],
}


class Scaled(torch.autograd.Function):
    """A product and its squared sum, with a backward of its own."""

    @staticmethod
    def forward(ctx, x, weight, factor):
        ctx.save_for_backward(x, weight)
        ctx.factor = factor
        return x * weight * factor, x.square().sum()

    @staticmethod
    def backward(ctx, grad, grad_sum):
        x, weight = ctx.saved_tensors
        own = grad * ctx.factor
        return own * weight + 2 * x * grad_sum, (own * x).sum(0), None


_SCALED = keep_call(Scaled, [torch.zeros(1), torch.zeros(1), 0.5])[2]
CONSTANTS = {
    "autopar::row_places": [
        # every entry is marked, as the op checks
        lambda b, i, j, k, m: call(
            torch.ops.autopar.row_places.default, T((b, 3), "true", grad=False), 3
        )
    ],
    "autopar::custom_function": [
        lambda b, i, j, k, m: call(OP, [t(b, i), t(i)], [], _SCALED),
        lambda b, i, j, k, m: call(OP, [t(j, i), t(i)], [], _SCALED),
    ],
    "view_as_real": [
        lambda b, i, j, k, m: call(aten.view_as_real.default, T((b, i), "complex", grad=False))
    ],
    "logspace": [lambda b, i, j, k, m: call(aten.logspace.default, 0.0, 1.0, i)],
    "meshgrid": [lambda b, i, j, k, m: call(aten.meshgrid.default, [t(i), t(j)])],
    **{
        name: [lambda b, i, j, k, m, name=name: call(op(name), i, j)]
        for name in ("tril_indices", "triu_indices")
    },
    "histc": [lambda b, i, j, k, m: call(aten.histc.default, t(b, i, grad=False), 5, -1, 1)],
    "searchsorted": [
        lambda b, i, j, k, m: call(
            aten.searchsorted.Tensor, T((5,), "sorted", grad=False), t(b, i, grad=False)
        )
    ],
}

autopar = torch.ops.autopar


def rotation(x: T, table: T, positions: T | None = None, **options):
    return call(autopar.rotary_single.default, x, table, table, positions, **options)


FUSED = {
    "autopar::rms_norm": [
        lambda b, i, j, k, m: call(autopar.rms_norm.default, t(b, i, j), t(j)),
        lambda b, i, j, k, m: call(
            autopar.rms_norm.default, t(b, i, j), t(j), eps=1e-3, offset=1.0, cast="after"
        ),
        lambda b, i, j, k, m: call(autopar.rms_norm.default, t(b, j), cast="none"),
        lambda b, i, j, k, m: call(autopar.rms_norm.default, t(b, i, k, j), t(j), t(b, i, k, j)),
    ],
    "autopar::add_rms_norm": [
        lambda b, i, j, k, m: call(autopar.add_rms_norm.default, t(b, i, j), t(b, i, j), t(j)),
        lambda b, i, j, k, m: call(autopar.add_rms_norm.default, t(b, j), t(b, j), eps=1e-3),
    ],
    "autopar::cross_entropy": [
        lambda b, i, j, k, m: call(
            autopar.cross_entropy.default, t(b * i, j), T((b * i,), "labels", j), reduction="sum"
        ),
        lambda b, i, j, k, m: call(
            autopar.cross_entropy.default,
            t(b, i, j),
            T((b, i), "labels", j),
            T((j,), "positive", grad=False),
            label_smoothing=0.1,
            reduction="none",
        ),
        lambda b, i, j, k, m: call(autopar.cross_entropy.default, t(b, j), ids(j, b)),
    ],
    "autopar::linear_cross_entropy": [
        lambda b, i, j, k, m: call(
            autopar.linear_cross_entropy.default,
            t(b * i, k),
            t(j, k),
            T((b * i,), "labels", j),
            chunk=3,
            reduction="sum",
        ),
        lambda b, i, j, k, m: call(
            autopar.linear_cross_entropy.default,
            t(b, i, k),
            t(j, k),
            T((b, i), "labels", j),
            T((j,), "positive", grad=False),
            -100,
            0.1,
            0.02,
            2.0,
            2,
            "none",
        ),
        lambda b, i, j, k, m: call(
            autopar.linear_cross_entropy.default, t(b, k), t(j, k), ids(j, b)
        ),
    ],
    "autopar::rotary_single": [
        lambda b, i, j, k, m: rotation(t(b, i, j, 2 * k), t(b, j, 2 * k, grad=False)),
        lambda b, i, j, k, m: rotation(t(b, i, j, 2 * k), t(1, j, k, grad=False)),
        lambda b, i, j, k, m: rotation(
            t(b, j, i, 2 * k), t(b, j, 2 * k, grad=False), interleaved=True, heads_last=True
        ),
        lambda b, i, j, k, m: rotation(
            t(b, i, j, 2 * k), t(m + 3, 2 * k, grad=False), ids(m + 3, b, j)
        ),
        lambda b, i, j, k, m: rotation(
            *(t(b, i, j, 2 * k + 3), t(1, j, k, grad=False)),
            **{"rotated": 2 * k, "last": True, "interleaved": True, "parted": True},
        ),
    ],
    "autopar::softmax": [
        lambda b, i, j, k, m: call(autopar.softmax.default, t(b, i, j, k), scale=0.3),
        lambda b, i, j, k, m: call(
            autopar.softmax.default, t(b, i, j, k), t(1, 1, j, k, grad=False), soft_cap=2.0
        ),
        lambda b, i, j, k, m: call(autopar.softmax.default, t(b, j, k), t(j, k, grad=False)),
    ],
    "autopar::glu": [
        lambda b, i, j, k, m: call(autopar.glu.default, t(b, i, j), t(b, i, j)),
        lambda b, i, j, k, m: call(
            autopar.glu.default, t(b, j), t(b, j), "gelu_tanh", shift=1.0, limit=1.5
        ),
        lambda b, i, j, k, m: call(autopar.glu.default, t(b, i, 2 * j), act="gelu"),
        lambda b, i, j, k, m: call(autopar.glu.default, t(b, 2 * j), layout="up_gate"),
        lambda b, i, j, k, m: call(autopar.glu.default, t(b, 2 * j), layout="interleaved"),
    ],
    "autopar::bias_activation": [
        lambda b, i, j, k, m: call(autopar.bias_activation.default, t(b, i, j), t(j), "gelu"),
        lambda b, i, j, k, m: call(autopar.bias_activation.default, t(b, j), t(j), "silu"),
    ],
    "autopar::layer_norm": [
        lambda b, i, j, k, m: call(
            autopar.layer_norm.default, t(b, i, j + 1), t(j + 1), t(j + 1), 1e-3
        ),
        lambda b, i, j, k, m: call(autopar.layer_norm.default, t(b, j + 1)),
    ],
    "autopar::add_layer_norm": [
        lambda b, i, j, k, m: call(
            autopar.add_layer_norm.default, t(b, i, j + 1), t(b, i, j + 1), t(j + 1), t(j + 1)
        ),
        lambda b, i, j, k, m: call(
            autopar.add_layer_norm.default, t(b, i, j + 1), t(b, i, j + 1), None, t(j + 1)
        ),
    ],
}

MORE_SAMPLES = {
    **ELEMENTWISE,
    **REDUCTIONS,
    **LOOKUP,
    **CONVOLUTION,
    **CRITERIA,
    **PRODUCTS,
    **CONSTANTS,
    **FUSED,
}
