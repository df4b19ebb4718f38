"""Every op rule, every strategy: shard the operands as the strategy says, run the rewritten op on each rank, combine, compare.

A sample is a call of one op on operands `T(shape, kind)`; it is made twice, with the batch size `b` as a number (the reference) and as a
symbol (the traced graph).  One class graph holds the op, `ClassSharder` rewrites it for each rank, and the ranks run here, in threads that
meet in the reductions that the special lowerings make.  Forward and backward are compared in fp64.
"""

from __future__ import annotations

import operator
import threading
from collections import Counter

import autopar_kernels.routed_experts  # noqa: F401 (registers the op)
import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from support.effort import examples, tried
from support.more_samples import MORE_SAMPLES
from support.operands import T, call, ids, mask_, pos, t, values_of
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import autopar.trace.batch_norm
import autopar.trace.complex_pairs  # noqa: F401  (defines autopar::fourier)
from autopar.ir.mesh import MeshShape
from autopar.ir.plan_fields import AxisChoice, BlockPlan
from autopar.ir.sharding import Pattern, Placement, R, S
from autopar.ir.traced import BlockClass
from autopar.ops.random import COUNTED, draws
from autopar.ops.rules import known_ops, op_dims, register_rule
from autopar.ops.strategies import OpStrategy, strategies
from autopar.ops.values import operand_names, result_names, value_grads
from autopar.rewrite.collectives.axes import AxisGroup, active_axes
from autopar.rewrite.collectives.patterns import Split, natural_order, pick
from autopar.rewrite.lowerings import vocabulary_parallel
from autopar.rewrite.lowerings.draws import random_tensor
from autopar.rewrite.lowerings.dropout import attention_with_dropout, dropout, step_noise
from autopar.rewrite.shard import ClassSharder

aten = torch.ops.aten
VERIFIED: Counter = Counter()
PATTERNS = frozenset(
    {
        Pattern((2, 1)),
        Pattern(zigzag=True),
        Pattern(rows=True),
        Pattern((1, 2), rows=True, zigzag=True),
    }
)
"""Patterns that every letter is tried in, where its sizes allow."""
LETTERS: dict[str, set[str]] = {}


def routed(b, choices, experts, hidden, ffn, activation, transposed=False, bias=False):
    """autopar::routed_experts of b * 2 tokens."""
    wide, tokens = ffn if activation.startswith("plain") else 2 * ffn, b * 2
    up, down = (experts, wide, hidden), (experts, hidden, ffn)
    if transposed:
        up, down = (experts, hidden, wide), (experts, ffn, hidden)
    biases = (t(experts, wide), t(experts, hidden)) if bias else (None, None)
    operands = (
        t(tokens, hidden),
        ids(experts, tokens, choices),
        t(tokens, choices),
        t(*up),
        biases[0],
        t(*down),
        biases[1],
    )
    return call(torch.ops.autopar.routed_experts.default, *operands, activation, transposed, 0.0)


# Each entry: op -> samples.  A sample gets the batch size b (a number or a symbol) and sizes i, j, k, m drawn from 1..7.
SAMPLES: dict[str, list] = {
    "linear": [
        lambda b, i, j, k, m: call(aten.linear.default, t(b, i, j), t(k, j), t(k)),
        lambda b, i, j, k, m: call(aten.linear.default, t(b, j), t(k, j)),
        lambda b, i, j, k, m: call(
            aten.linear.default, t(b, i, j), t(k, j, grad=False), t(k, grad=False)
        ),
        lambda b, i, j, k, m: call(aten.linear.default, t(j), t(k, j), t(k)),
    ],
    "matmul": [
        lambda b, i, j, k, m: call(aten.matmul.default, t(b, i, j, k), t(b, i, k, m)),
        lambda b, i, j, k, m: call(aten.matmul.default, t(b, i, j, k), t(i, k, m)),
        lambda b, i, j, k, m: call(aten.matmul.default, t(b, 1, j, k), t(i, k, m)),
        lambda b, i, j, k, m: call(aten.matmul.default, t(j, k), t(b, k, m)),
        lambda b, i, j, k, m: call(aten.matmul.default, t(b, k), t(k, m)),
        lambda b, i, j, k, m: call(aten.matmul.default, t(b, j, k), t(k)),
        lambda b, i, j, k, m: call(aten.matmul.default, t(k), t(b, k, m)),
        lambda b, i, j, k, m: call(aten.matmul.default, t(k), t(k)),
    ],
    "mm": [lambda b, i, j, k, m: call(aten.mm.default, t(b * i, j), t(j, k))],
    "bmm": [
        lambda b, i, j, k, m: call(aten.bmm.default, t(i, b, j), t(i, j, k)),
        lambda b, i, j, k, m: call(aten.bmm.default, t(b, i, j), t(b, j, k)),
    ],
    "addmm": [
        lambda b, i, j, k, m: call(aten.addmm.default, t(k), t(b * i, j), t(j, k)),
        lambda b, i, j, k, m: call(aten.addmm.default, t(k), t(b, j), t(j, k), beta=2, alpha=3),
        lambda b, i, j, k, m: call(aten.addmm.default, t(1), t(b, j), t(j, k)),
        lambda b, i, j, k, m: call(aten.addmm.default, t(), t(i, j), t(j, k), beta=2, alpha=3),
        lambda b, i, j, k, m: call(aten.addmm.default, t(i, k), t(i, j), t(j, k)),
        lambda b, i, j, k, m: call(aten.addmm.default, t(i, 1), t(i, j), t(j, k), beta=0.5),
    ],
    "scaled_dot_product_attention": [
        lambda b, i, j, k, m: call(
            aten.scaled_dot_product_attention.default, t(b, i, j, k), t(b, i, m, k), t(b, i, m, j)
        ),
        lambda b, i, j, k, m: call(
            aten.scaled_dot_product_attention.default,
            t(b, i, j, k),
            t(b, i, j, k),
            t(b, i, j, k),
            None,
            0.0,
            True,
        ),
        lambda b, i, j, k, m: call(
            aten.scaled_dot_product_attention.default,
            t(b, i * m, j, k),
            t(b, i, j, k),
            t(b, i, j, k),
            None,
            0.0,
            True,
            scale=0.3,
            enable_gqa=True,
        ),
        lambda b, i, j, k, m: call(
            aten.scaled_dot_product_attention.default,
            t(b, 2 * i, j, k),
            t(b, 2, j, k),
            t(b, 2, j, k),
            enable_gqa=True,
        ),
        lambda b, i, j, k, m: call(
            aten.scaled_dot_product_attention.default,
            t(b, 2 * i, j, k),
            t(b, i, m, k),
            t(b, i, m, k),
            None,
            0.3,
            j == m,
            enable_gqa=True,
        ),
        lambda b, i, j, k, m: call(
            aten.scaled_dot_product_attention.default,
            t(b, i, j, k),
            t(b, i, m, k),
            t(b, i, m, k),
            mask_bias(b, i, j, m),
            dropout_p=0.3,
        ),
        lambda b, i, j, k, m: call(
            aten.scaled_dot_product_attention.default,
            t(b, i, j, k),
            t(b, i, m, k),
            t(b, i, m, k),
            mask_bias(b, i, j, m),
        ),
        lambda b, i, j, k, m: call(
            aten.scaled_dot_product_attention.default,
            t(b, i, j, k),
            t(b, i, m, k),
            t(b, i, m, k),
            mask_bias(b, 1, j, m),
        ),
        lambda b, i, j, k, m: call(
            aten.scaled_dot_product_attention.default,
            t(b, i, j, k),
            t(b, i, m, k),
            t(b, i, m, k),
            mask_bias(j, m),
        ),
        lambda b, i, j, k, m: call(
            aten.scaled_dot_product_attention.default, t(b, j, k), t(b, m, k), t(b, m, k)
        ),
        lambda b, i, j, k, m: call(
            aten.scaled_dot_product_attention.default, t(b, i, j, k), t(1, i, j, k), t(1, i, j, k)
        ),
    ],
    "autopar::in_training": [
        lambda b, i, j, k, m: call(
            torch.ops.autopar.in_training.default, t(b, i, j), t(b, i, j, grad=False)
        )
    ],
    "autopar::fourier": [
        lambda b, i, j, k, m: call(
            torch.ops.autopar.fourier.default, t(b, i, j), t(b, i, j), "ifftn", [m], [1], "ortho"
        ),
        lambda b, i, j, k, m: call(
            torch.ops.autopar.fourier.default, t(b, i, j), None, "rfftn", None, [1, 2], None
        ),
    ],
    "autopar::real_fourier": [
        lambda b, i, j, k, m: call(
            torch.ops.autopar.real_fourier.default, t(b, i, j), t(b, i, j), "irfftn", [m], [2], None
        )
    ],
    "autopar::routed_experts": [
        lambda b, i, j, k, m: routed(b, i, j, k, m, "gated:silu"),
        lambda b, i, j, k, m: routed(b, i, j, k, m, "plain:gelu", bias=True),
        lambda b, i, j, k, m: routed(
            b, i, j, k, m, "interleaved_clamp:0.7:1.702", transposed=True, bias=True
        ),
    ],
    "embedding": [
        lambda b, i, j, k, m: call(aten.embedding.default, t(j + 1, k), ids(j + 1, b, i)),
        lambda b, i, j, k, m: call(aten.embedding.default, t(j + 1, k), ids(j + 1, b, i), j // 2),
        lambda b, i, j, k, m: call(aten.embedding.default, t(j + 1, k), ids(j + 1, b, i), 0),
        lambda b, i, j, k, m: call(aten.embedding.default, t(j + 1, k), ids(j + 1, b), -1, True),
        lambda b, i, j, k, m: call(aten.embedding.default, t(j + 1, k), ids(j + 1)),
    ],
    "cross_entropy_loss": [
        lambda b, i, j, k, m: call(
            aten.cross_entropy_loss.default, t(b * i, j), T((b * i,), "labels", j), None, 2
        ),
        lambda b, i, j, k, m: call(
            aten.cross_entropy_loss.default, t(b, j), T((b,), "labels", j), None, 0
        ),
        lambda b, i, j, k, m: call(
            aten.cross_entropy_loss.default, t(b, j, i), T((b, i), "labels", j), None, 0
        ),
        lambda b, i, j, k, m: call(
            aten.cross_entropy_loss.default, t(b, j, i, k), T((b, i, k), "labels", j), None, 2
        ),
        lambda b, i, j, k, m: call(aten.cross_entropy_loss.default, t(i, j), ids(j, i), None, 2, 0),
        lambda b, i, j, k, m: call(
            aten.cross_entropy_loss.default, t(b, j), T((b, j), "fraction", grad=False), None, 2
        ),
        lambda b, i, j, k, m: call(
            aten.cross_entropy_loss.default,
            t(b, j, i),
            T((b, j, i), "fraction", grad=False),
            None,
            0,
        ),
        lambda b, i, j, k, m: call(aten.cross_entropy_loss.default, t(b, j), ids(j, b), None, 1),
        lambda b, i, j, k, m: call(
            aten.cross_entropy_loss.default, t(b, j), T((b,), "labels", j), None, 2, -100, 0.1
        ),
        lambda b, i, j, k, m: call(
            aten.cross_entropy_loss.default,
            t(b, j),
            T((b,), "labels", j),
            T((j,), "positive", grad=False),
            2,
        ),
        lambda b, i, j, k, m: call(
            aten.cross_entropy_loss.default, t(b, j, i), T((b, i), "labels", j), None, 0
        ),
        lambda b, i, j, k, m: call(
            aten.cross_entropy_loss.default, t(b, j, i), T((b, i), "labels", j), None, 2
        ),
        lambda b, i, j, k, m: call(aten.cross_entropy_loss.default, t(j), ids(j), None, 2),
        lambda b, i, j, k, m: call(aten.cross_entropy_loss.default, t(i, j), t(i, j), None, 2),
    ],
    "layer_norm": [
        lambda b, i, j, k, m: call(
            aten.layer_norm.default, t(b, i, j + 1), [j + 1], t(j + 1), t(j + 1)
        ),
        lambda b, i, j, k, m: call(aten.layer_norm.default, t(b, i, j + 1), [i, j + 1]),
    ],
    "rms_norm": [
        lambda b, i, j, k, m: call(aten.rms_norm.default, t(b, i, j), [j], t(j)),
        lambda b, i, j, k, m: call(aten.rms_norm.default, t(b, i, j), [i, j], None, 1e-3),
    ],
    "softmax": [
        lambda b, i, j, k, m: call(aten.softmax.int, t(b, i, j), -1),
        lambda b, i, j, k, m: call(aten.softmax.int, t(b, i, j), 1),
    ],
    "_softmax": [lambda b, i, j, k, m: call(aten._softmax.default, t(b, i, j), 1, False)],
    "log_softmax": [lambda b, i, j, k, m: call(aten.log_softmax.int, t(b, i, j), -2)],
    "cumsum": [
        lambda b, i, j, k, m: call(aten.cumsum.default, t(b, i, j), -1),
        lambda b, i, j, k, m: call(aten.cumsum.default, t(b, i), 0),
    ],
    "sort": [
        lambda b, i, j, k, m: call(aten.sort.default, t(b, i, j)),
        lambda b, i, j, k, m: call(aten.sort.stable, t(b, i), stable=True, dim=0),
    ],
    "topk": [
        lambda b, i, j, k, m: call(aten.topk.default, t(b, i, j), 1),
        lambda b, i, j, k, m: call(aten.topk.default, t(b, i + 1, j), 2, -2),
    ],
    "diff": [
        lambda b, i, j, k, m: call(aten.diff.default, t(b, i, j + 1)),
        lambda b, i, j, k, m: call(aten.diff.default, t(b, i), 1, -1, t(b, 1)),
        lambda b, i, j, k, m: call(aten.diff.default, t(i, j), 1, 0, t(2, j), t(1, j)),
    ],
    "sum": [
        lambda b, i, j, k, m: call(aten.sum.default, t(b, i, j)),
        lambda b, i, j, k, m: call(aten.sum.dim_IntList, t(b, i, j), [-1]),
        lambda b, i, j, k, m: call(aten.sum.dim_IntList, t(b, i, j), [0, -2], True),
        lambda b, i, j, k, m: call(aten.sum.dim_IntList, mask_(b, i), [0, 1]),
        lambda b, i, j, k, m: call(aten.sum.dim_IntList, ids(9, b, i), []),
        lambda b, i, j, k, m: call(aten.sum.default, t()),
    ],
    **{
        name: [
            lambda b, i, j, k, m, name=name: call(getattr(aten, name).dim, t(b, i + 1, j), [-2]),
            lambda b, i, j, k, m, name=name: call(getattr(aten, name).dim, t(b, i, j), [1], True),
        ]
        for name in ("mean",)
    },
    **{
        name: [
            lambda b, i, j, k, m, name=name: call(getattr(aten, name).default, t(b, i, j), [-1]),
            lambda b, i, j, k, m, name=name: call(
                getattr(aten, name).default, t(b, i, j), [1, 2], True
            ),
        ]
        for name in ("amax", "amin", "logsumexp")
    },
    **{
        name: [
            lambda b, i, j, k, m, name=name: call(getattr(aten, name).dim, t(b, i, j), -1),
            lambda b, i, j, k, m, name=name: call(getattr(aten, name).dim, t(b, i, j), 1, True),
            lambda b, i, j, k, m, name=name: call(getattr(aten, name).default, t(b, i)),
            lambda b, i, j, k, m, name=name: call(getattr(aten, name).other, t(b, i, j), t(i, 1)),
        ]
        for name in ("max", "min")
    },
    **{
        name: [
            lambda b, i, j, k, m, name=name: call(getattr(aten, name).default, t(b, i, j), -1),
            lambda b, i, j, k, m, name=name: call(getattr(aten, name).default, t(b, i, j), 1, True),
            lambda b, i, j, k, m, name=name: call(getattr(aten, name).default, t(b, i)),
        ]
        for name in ("argmax", "argmin")
    },
    **{
        name: [
            lambda b, i, j, k, m, name=name: call(getattr(aten, name).dim, mask_(b, i, j), -1),
            lambda b, i, j, k, m, name=name: call(getattr(aten, name).default, mask_(b, i)),
        ]
        for name in ("any", "all")
    },
    **{
        name: [
            lambda b, i, j, k, m, name=name: call(
                getattr(aten, name).correction, t(b, i, j + 1), [-1]
            ),
            lambda b, i, j, k, m, name=name: call(
                getattr(aten, name).correction, t(b, i + 1, j), [1], correction=0, keepdim=True
            ),
        ]
        for name in ("var", "std")
    },
    "prod": [
        lambda b, i, j, k, m: call(aten.prod.dim_int, t(b, i, j), -1),
        lambda b, i, j, k, m: call(aten.prod.default, t(b, i)),
    ],
    "reshape": [
        lambda b, i, j, k, m: call(aten.reshape.default, t(b, i, j * k), [b, i, j, k]),
        lambda b, i, j, k, m: call(aten.reshape.default, t(b, i, j, k), [b, i, -1]),
        lambda b, i, j, k, m: call(aten.reshape.default, t(b, i, j), [b * i, j]),
        lambda b, i, j, k, m: call(aten.reshape.default, t(b * i, j), [b, i, j]),
        lambda b, i, j, k, m: call(aten.reshape.default, t(b, 4 * i, 3), [b, 2, 6 * i]),
        lambda b, i, j, k, m: call(aten.reshape.default, t(i, b, j), [i * b, j]),
        lambda b, i, j, k, m: call(aten.reshape.default, t(b, i, j), [-1]),
        lambda b, i, j, k, m: call(aten.reshape.default, t(1, i, 1, j), [i, 1, j, 1]),
        lambda b, i, j, k, m: call(aten.reshape.default, t(2 * i, 3 * j), [3 * i, 2 * j]),
        lambda b, i, j, k, m: call(aten.reshape.default, t(b * 2 * i, j), [b * 2, i * j]),
    ],
    "unsqueeze": [
        lambda b, i, j, k, m: call(aten.unsqueeze.default, t(b, i, j), -1),
        lambda b, i, j, k, m: call(aten.unsqueeze.default, t(b, i), 0),
    ],
    "squeeze": [
        lambda b, i, j, k, m: call(aten.squeeze.dim, t(b, 1, i, j), 1),
        lambda b, i, j, k, m: call(aten.squeeze.dim, t(b, i, j), -1),
        lambda b, i, j, k, m: call(aten.squeeze.default, t(1, i, 1, j)),
        lambda b, i, j, k, m: call(aten.squeeze.dims, t(b, i, 1, j), [1, 2]),
    ],
    "transpose": [
        lambda b, i, j, k, m: call(aten.transpose.int, t(b, i, j), 1, -1),
        lambda b, i, j, k, m: call(aten.transpose.int, t(b, i), 0, 1),
    ],
    "permute": [lambda b, i, j, k, m: call(aten.permute.default, t(b, i, j), [-1, 0, 1])],
    "expand": [
        lambda b, i, j, k, m: call(aten.expand.default, t(b, 1, j), [b, i, j]),
        lambda b, i, j, k, m: call(aten.expand.default, t(b, 1, j), [-1, i, -1]),
        lambda b, i, j, k, m: call(aten.expand.default, t(i, j), [b, i, j]),
        lambda b, i, j, k, m: call(aten.expand.default, t(1, i, 1), [b, i, k]),
        lambda b, i, j, k, m: call(aten.expand.default, t(), [i, j]),
    ],
    "slice": [
        lambda b, i, j, k, m: call(aten.slice.Tensor, t(b, i, j), -1, 0, 1),
        lambda b, i, j, k, m: call(aten.slice.Tensor, t(b, i + 2, j), 1, 1, 9223372036854775807, 2),
        lambda b, i, j, k, m: call(aten.slice.Tensor, t(b, i), 0, 0, 1),
    ],
    "select": [
        lambda b, i, j, k, m: call(aten.select.int, t(b, i, j), -1, -1),
        lambda b, i, j, k, m: call(aten.select.int, t(b, i), 0, 0),
    ],
    "unbind": [
        lambda b, i, j, k, m: call(aten.unbind.int, t(b, 3, j), 1),
        lambda b, i, j, k, m: call(aten.unbind.int, t(2, b, j)),
    ],
    "split_with_sizes": [
        lambda b, i, j, k, m: call(aten.split_with_sizes.default, t(b, i, j + k), [j, k], -1)
    ],
    "cat": [
        lambda b, i, j, k, m: call(aten.cat.default, [t(b, i, j), t(b, k, j)], 1),
        lambda b, i, j, k, m: call(aten.cat.default, [t(b, i), t(b, i, grad=False)], -1),
        lambda b, i, j, k, m: call(aten.cat.default, [t(b, i), t(0)], -1),
    ],
    "stack": [
        lambda b, i, j, k, m: call(aten.stack.default, [t(b, i), t(b, i)], -1),
        lambda b, i, j, k, m: call(aten.stack.default, [t(i, b), t(i, b)]),
    ],
    "pad": [
        lambda b, i, j, k, m: call(aten.pad.default, t(b, i, j), [1, 2]),
        lambda b, i, j, k, m: call(aten.pad.default, t(b, i, j), [0, 1, 1, 0], "constant", 3.0),
    ],
    "constant_pad_nd": [
        lambda b, i, j, k, m: call(aten.constant_pad_nd.default, t(b, i, j), [1, 0], 2.0)
    ],
    **{
        name: [
            lambda b, i, j, k, m, name=name: call(
                getattr(aten, name).Tensor, t(b, i, j), t(b, i, j), alpha=3
            ),
            lambda b, i, j, k, m, name=name: call(getattr(aten, name).Tensor, t(b, i, j), t(j)),
            lambda b, i, j, k, m, name=name: call(
                getattr(aten, name).Tensor, t(i, 1), t(b, 1, j), alpha=-1
            ),
            lambda b, i, j, k, m, name=name: call(
                getattr(aten, name).Tensor, t(b, i), 2.5, alpha=2
            ),
            lambda b, i, j, k, m, name=name: call(
                getattr(aten, name).Tensor, t(b, i), t(), alpha=2
            ),
            lambda b, i, j, k, m, name=name: call(
                getattr(aten, name).Tensor, t(b, i), t(b, i, grad=False)
            ),
        ]
        for name in ("add", "sub")
    },
    "mul": [
        lambda b, i, j, k, m: call(aten.mul.Tensor, t(b, i, j), t(b, i, j)),
        lambda b, i, j, k, m: call(aten.mul.Tensor, t(b, 1, j), t(i, 1)),
        lambda b, i, j, k, m: call(aten.mul.Tensor, t(b, i), 3.0),
        lambda b, i, j, k, m: call(aten.mul.Tensor, t(), t(b, i)),
    ],
    "div": [
        lambda b, i, j, k, m: call(aten.div.Tensor, t(b, i, j), pos(j)),
        lambda b, i, j, k, m: call(aten.div.Tensor, t(b, i), 3.0),
        lambda b, i, j, k, m: call(aten.div.Tensor_mode, t(b, i), pos(b, 1), rounding_mode="floor"),
        lambda b, i, j, k, m: call(aten.div.Tensor_mode, t(b, i), 0.3, rounding_mode="trunc"),
    ],
    "to": [
        lambda b, i, j, k, m: call(aten.to.dtype, t(b, i), torch.float64),
        lambda b, i, j, k, m: call(aten.to.dtype, t(b, i), torch.int64),
    ],
    **{
        name: [lambda b, i, j, k, m, name=name: call(getattr(aten, name).default, t(b, i, j))]
        for name in (
            "neg",
            "clone",
            "contiguous",
            "detach",
            "alias",
            "abs",
            "exp",
            "sin",
            "cos",
            "tanh",
            "sigmoid",
            "relu",
            "silu",
            "square",
            "erf",
            "sign",
            "floor",
            "ceil",
            "round",
            "isnan",
            "isinf",
            "mish",
            "hardtanh",
            "softplus",
            "elu",
            "leaky_relu",
            "zeros_like",
            "ones_like",
            "logical_not",
        )
    },
    **{
        name: [lambda b, i, j, k, m, name=name: call(getattr(aten, name).default, pos(b, i, j))]
        for name in ("log", "sqrt", "rsqrt", "reciprocal")
    },
    "gelu": [
        lambda b, i, j, k, m: call(aten.gelu.default, t(b, i)),
        lambda b, i, j, k, m: call(aten.gelu.default, t(b, i), approximate="tanh"),
    ],
    "pow": [
        lambda b, i, j, k, m: call(aten.pow.Tensor_Scalar, t(b, i), 3),
        lambda b, i, j, k, m: call(aten.pow.Tensor_Tensor, pos(b, i, j), t(j)),
        lambda b, i, j, k, m: call(aten.pow.Scalar, 2.0, t(b, i)),
    ],
    "clamp": [
        lambda b, i, j, k, m: call(aten.clamp.default, t(b, i), -0.5, 0.5),
        lambda b, i, j, k, m: call(aten.clamp.Tensor, t(b, i), t(i), None),
    ],
    "clamp_min": [lambda b, i, j, k, m: call(aten.clamp_min.default, t(b, i), -0.5)],
    "clamp_max": [lambda b, i, j, k, m: call(aten.clamp_max.default, t(b, i), 0.5)],
    "maximum": [lambda b, i, j, k, m: call(aten.maximum.default, t(b, i), t(i))],
    "minimum": [lambda b, i, j, k, m: call(aten.minimum.default, t(b, i), t(b, 1))],
    "where": [
        lambda b, i, j, k, m: call(aten.where.self, mask_(b, 1, j), t(b, i, j), t(j)),
        lambda b, i, j, k, m: call(aten.where.ScalarOther, mask_(i, j), t(b, i, j), 0.0),
    ],
    "masked_fill": [
        lambda b, i, j, k, m: call(aten.masked_fill.Scalar, t(b, i, j), mask_(b, 1, j), -3.0),
        lambda b, i, j, k, m: call(aten.masked_fill.Tensor, t(b, i, j), mask_(i, j), t()),
    ],
    **{
        name: [
            lambda b, i, j, k, m, name=name: call(
                getattr(aten, name).Tensor, ids(3, b, i), ids(3, i)
            ),
            lambda b, i, j, k, m, name=name: call(getattr(aten, name).Scalar, ids(3, b, i), 1),
        ]
        for name in ("eq", "ne", "lt", "le", "gt", "ge")
    },
    **{
        name: [
            lambda b, i, j, k, m, name=name: call(
                getattr(aten, name).default, mask_(b, i), mask_(i)
            )
        ]
        for name in ("logical_and", "logical_or")
    },
    **{
        name: [
            lambda b, i, j, k, m, name=name: call(
                getattr(aten, name).Tensor, mask_(b, i), mask_(b, 1)
            )
        ]
        for name in ("bitwise_and", "bitwise_or", "__and__", "__or__")
    },
    "bitwise_not": [lambda b, i, j, k, m: call(aten.bitwise_not.default, mask_(b, i))],
    "remainder": [
        lambda b, i, j, k, m: call(aten.remainder.Scalar, t(b, i), 0.7),
        lambda b, i, j, k, m: call(aten.remainder.Tensor, t(b, i), pos(i)),
    ],
    "floor_divide": [lambda b, i, j, k, m: call(aten.floor_divide.default, ids(9, b, i), 2)],
    "full_like": [lambda b, i, j, k, m: call(aten.full_like.default, t(b, i), 2.0)],
    **{
        op.removeprefix("aten::"): [
            lambda b, i, j, k, m, op=op: call(
                getattr(aten, op.removeprefix("aten::")).default, T((b, i, j), "fraction")
            )
        ]
        for op in COUNTED
        if op != "aten::bernoulli"
    },
    "bernoulli": [
        lambda b, i, j, k, m: call(aten.bernoulli.default, T((b, i, j), "fraction")),
        lambda b, i, j, k, m: call(aten.bernoulli.p, t(b, i, j), 0.3),
    ],
    "dropout": [
        lambda b, i, j, k, m: call(aten.dropout.default, t(b, i), 0.0, True),
        lambda b, i, j, k, m: call(aten.dropout.default, t(b, i), 1.0, True),
        lambda b, i, j, k, m: call(aten.dropout.default, t(b, i, j, k), 0.4, True),
        lambda b, i, j, k, m: call(aten.dropout.default, t(b, 4 * i, 4 * j), 0.4, True),
    ],
    "addcmul": [
        lambda b, i, j, k, m: call(aten.addcmul.default, t(b, i), t(b, i), t(b, i), value=2),
        lambda b, i, j, k, m: call(aten.addcmul.default, t(i, j), t(j), t(i, 1)),
    ],
    "rsub": [
        lambda b, i, j, k, m: call(aten.rsub.Scalar, t(b, i), 1.0, 2),
        lambda b, i, j, k, m: call(aten.rsub.Tensor, t(b, i), t(i), alpha=2),
    ],
    # constants: replicated only
    "arange": [
        lambda b, i, j, k, m: call(aten.arange.default, b),
        lambda b, i, j, k, m: call(aten.arange.start_step, 1, 9, 2),
    ],
    **{
        name: [lambda b, i, j, k, m, name=name: call(getattr(aten, name).default, [b, i])]
        for name in ("ones", "zeros")
    },
    "full": [lambda b, i, j, k, m: call(aten.full.default, [b, i], 3.0)],
    "empty": [lambda b, i, j, k, m: call(aten.empty.memory_format, [b, i])],
    "scalar_tensor": [lambda b, i, j, k, m: call(aten.scalar_tensor.default, 3.0)],
    **{
        name: [lambda b, i, j, k, m, name=name: call(getattr(aten, name).default, t(b, i), [i, b])]
        for name in ("new_ones", "new_zeros", "new_empty")
    },
    "new_full": [lambda b, i, j, k, m: call(aten.new_full.default, t(b, i), [b], 2.0)],
    "eye": [lambda b, i, j, k, m: call(aten.eye.default, i)],
    "linspace": [lambda b, i, j, k, m: call(aten.linspace.default, 0.0, 1.0, i)],
    **MORE_SAMPLES,
}
REPLICATE_ONLY = {
    "arange",
    "ones",
    "zeros",
    "full",
    "empty",
    "scalar_tensor",
    "new_ones",
    "new_zeros",
    "new_full",
    "new_empty",
    "eye",
    "linspace",
    "logspace",
    "meshgrid",
    "tril_indices",
    "triu_indices",
    "histc",
    "searchsorted",
}
GARBAGE = {"empty", "new_empty", "empty_like"}


def mask_bias(*shape) -> T:
    return T(shape, "normal", grad=False)


BUILT_IN = tuple(known_ops())  # before any other test registers ops of its own


@pytest.fixture(scope="module", autouse=True)
def table(request):
    """Prints op and number of verified (strategy, sample, sizes) when the module is done."""
    yield
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print(f"\nverified op strategies: {sum(VERIFIED.values())} runs of {len(VERIFIED)} ops")
        rows = [
            f"{name} {VERIFIED[name]} ({len(LETTERS[name])} kinds)" for name in sorted(VERIFIED)
        ]
        for start in range(0, len(rows), 4):
            print("  " + "".join(f"{row:<40}" for row in rows[start : start + 4]))


def test_every_op_of_the_registry_has_a_sample():
    assert {
        name.removeprefix("aten::") for name in BUILT_IN if name.startswith(("aten::", "autopar::"))
    } == set(SAMPLES)


@pytest.mark.filterwarnings("ignore:Raw SymInt")
@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_rule(name):
    """At one set of sizes, over one axis; `test_rule_at_more_sizes` draws more over both."""
    first = sorted(SAMPLES).index(name)
    for place, sample in enumerate(SAMPLES[name], first):
        for axis in tried((("tp", "dp")[place % 2],), ("tp", "dp")):
            check_sample(name, lambda b, sample=sample: sample(b, 3, 5, 4, 2), axis, 3, 6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Raw SymInt")
@pytest.mark.parametrize("name", sorted(SAMPLES))
@settings(
    max_examples=examples(8, 20),
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
@example(sizes=(4, 2, 7, 6), parts=4, rows=1)
@example(sizes=(12, 6, 4, 8), parts=2, rows=1)
@given(sizes=st.tuples(*[st.integers(1, 9)] * 4), parts=st.integers(2, 5), rows=st.integers(1, 3))
def test_rule_at_more_sizes(name, sizes, parts, rows):
    for sample in SAMPLES[name]:
        for axis in ("tp", "dp"):
            check_sample(
                name, lambda b, sample=sample: sample(b, *sizes), axis, parts, rows * parts
            )


@pytest.mark.filterwarnings("ignore:Raw SymInt")
def test_constants_have_replicated_strategies_alone():
    for name in REPLICATE_ONLY:
        for sample in SAMPLES[name]:
            graph = traced_graph(sample, 4, 5, 6, 8)
            node = next(
                n
                for n in graph.nodes
                if n.op == "call_function" and n.target is not operator.getitem
            )
            dims = op_dims(node)
            for batch in (False, True):
                assert {s.name for s in all_strategies(graph, node, dims, 2, batch)} <= {"R", "R/P"}


def test_a_users_rule_is_held_to_the_same_proof():
    @torch.library.custom_op("autopar_test::scaled", mutates_args=())
    def scaled(x: Tensor, w: Tensor) -> Tensor:
        return x * w

    scaled.register_fake(lambda x, w: torch.empty_like(x))
    scaled.register_autograd(
        lambda ctx, grad: (
            grad * ctx.saved_tensors[1],
            (grad * ctx.saved_tensors[0]).sum(tuple(range(grad.dim() - 1))),
        ),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    target = torch.ops.autopar_test.scaled.default
    register_rule(target, "b.. h, h -> b.. h")
    before = VERIFIED["autopar_test::scaled"]
    for axis in ("tp", "dp"):
        check_sample("autopar_test::scaled", lambda b: call(target, t(b, 5, 7), t(7)), axis, 3, 3)
    assert VERIFIED["autopar_test::scaled"] - before >= 6
    # a wrong rule: it says that x and w are not aligned
    register_rule("autopar_test::scaled", "b.. h, g -> b.. h")
    with pytest.raises((AssertionError, RuntimeError)):
        check_sample("autopar_test::scaled", lambda b: call(target, t(b, 5, 7), t(7)), "tp", 3, 3)


# ------------------------------------------------------------------------------------------------------------------- the proof


def check_sample(name: str, sample, axis: str, parts: int, batch: int) -> None:
    """Verify every strategy of one call on one axis."""
    graph = traced_graph(sample)
    node = next(
        n for n in graph.nodes if n.op == "call_function" and n.target is not operator.getitem
    )
    dims = op_dims(node)
    values = whole_values(sample, batch)
    whole = run_whole(sample, values, batch)
    for strategy in all_strategies(graph, node, dims, parts, axis == "dp"):
        try:
            check_strategy(name, graph, node, strategy, axis, parts, batch, values, whole)
        except Exception as error:
            shapes = [tuple(v.shape) for v in values]
            raise AssertionError(
                f"{node.target}{shapes} under {strategy.name} {list(map(str, strategy.inputs))} -> "
                f"{list(map(str, strategy.outputs))} over {axis}={parts}: {error}"
            ) from error
        VERIFIED[name] += 1
        LETTERS.setdefault(name, set()).add(f"{axis}:{strategy.name}")


def all_strategies(graph: Graph, node: Node, dims, parts: int, batch: bool) -> list[OpStrategy]:
    grads = value_grads(graph)
    input_grads, output_grads = (
        [grads[n] for n in operand_names(node)],
        [grads[n] for n in result_names(node)],
    )
    patterns = {letter: PATTERNS for letter in dims.letters}
    return strategies(dims, parts, input_grads, output_grads, "batch" if batch else "tp", patterns)


def operands_of(sample_call) -> list[T]:
    found: list[T] = []
    torch.utils._pytree.tree_map(
        lambda x: found.append(x) if isinstance(x, T) else None, sample_call[1:]
    )
    return found


def traced_graph(sample, *sizes) -> Graph:
    """A class graph of one op with a symbolic batch; the last placeholder only carries the batch size."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    rows = mode.from_tensor(torch.empty(11), symbolic_context=context)
    graph, placeholders = Graph(), []
    b = rows.shape[0]
    target, args, kwargs = sample(b, *sizes) if sizes else sample(b)

    def enter(x):
        if not isinstance(x, T):
            return x
        node = graph.placeholder(f"x{len(placeholders)}")
        with mode:
            node.meta["val"] = torch.empty(x.shape, dtype=x.dtype)
        node.meta["grad"] = x.grad and x.dtype.is_floating_point
        placeholders.append(node)
        return node

    args, kwargs = torch.utils._pytree.tree_map(enter, (args, kwargs))
    last = graph.placeholder("rows")
    last.meta["val"], last.meta["grad"] = rows, False
    node = graph.call_function(target, args, kwargs)
    values = torch.fx.map_arg((args, kwargs), lambda n: n.meta["val"])
    with mode, enable_python_dispatcher():
        val = target(*values[0], **values[1])
    node.meta["val"] = list(val) if isinstance(val, (list, tuple)) else val
    first = node.meta["val"][0] if isinstance(node.meta["val"], list) else val
    node.meta["grad"] = (
        first.is_floating_point()
        and target._schema.name != "aten::detach"
        and any(p.meta["grad"] for p in placeholders)
    )
    node.meta["grad"] = (
        node.meta["grad"]
        and "_like" not in target._schema.name
        and "new_" not in target._schema.name
    )
    outputs = [node]
    if isinstance(node.meta["val"], list):
        outputs = [
            graph.call_function(operator.getitem, (node, index))
            for index in range(len(node.meta["val"]))
        ]
        for index, output in enumerate(outputs):
            output.meta = {
                "val": node.meta["val"][index],
                "grad": node.meta["grad"] and node.meta["val"][index].is_floating_point(),
            }
    graph.output(tuple(outputs))
    return graph


def whole_values(sample, batch: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(batch)
    return [values_of(x, generator) for x in operands_of(sample(batch))]


def tensors(result) -> list[Tensor]:
    return list(result) if isinstance(result, (list, tuple)) else [result]


def dropped(x: Tensor, p: float, train: bool) -> Tensor:
    """aten::dropout of a whole tensor with a leading batch dim, as call 2 of a segment."""
    return dropout(x, p, step_noise(0, 0, 0, x.shape[0]), 2, [None] * x.dim(), (None, *x.shape[1:]))


def dropped_attention(
    q, k, v, mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
) -> Tensor:
    """The same of attention, which is the call after its operands and the batch size."""
    if not dropout_p:
        return aten.scaled_dot_product_attention.default(
            q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    number, sizes = 4 + (mask is not None), (None, *q.shape[1:3], k.shape[2])
    return attention_with_dropout(
        q,
        k,
        v,
        mask,
        dropout_p,
        is_causal,
        scale,
        step_noise(0, 0, 0, q.shape[0]),
        number,
        [None] * 4,
        sizes,
    )


def drawn(op: str):
    """A random tensor of the shape of another, as call 2 of a segment."""

    def draw(x: Tensor, p: float | None = None) -> Tensor:
        noise, whole = step_noise(0, 0, 0, x.shape[0]), (None, *x.shape[1:])
        options = {} if p is None else {"p": p}
        return random_tensor(x, op, options, x.dtype, noise, 2, [None] * x.dim(), whole)

    return draw


DROPPED = {
    **{getattr(aten, op.removeprefix("aten::")).default: drawn(op) for op in COUNTED},
    aten.bernoulli.p: drawn("aten::bernoulli"),
    aten.dropout.default: dropped,
    aten.scaled_dot_product_attention.default: dropped_attention,
}


def run_whole(sample, values: list[Tensor], batch: int):
    """(outputs, gradients of the outputs, gradients of the operands) on one device."""
    target, args, kwargs = sample(batch)
    leaves = [
        v.clone().requires_grad_(x.grad and v.is_floating_point())
        for v, x in zip(values, operands_of((target, args, kwargs)), strict=True)
    ]
    queue = iter(leaves)
    args, kwargs = torch.utils._pytree.tree_map(
        lambda x: next(queue) if isinstance(x, T) else x, (args, kwargs)
    )
    outputs = tensors(DROPPED.get(target, target)(*args, **kwargs))
    generator = torch.Generator().manual_seed(7)
    grads = [
        torch.randn(o.shape, generator=generator, dtype=torch.float64) if o.requires_grad else None
        for o in outputs
    ]
    return [o.detach() for o in outputs], grads, gradients(outputs, grads, leaves)


def gradients(
    outputs: list[Tensor], grads: list[Tensor | None], leaves: list[Tensor]
) -> list[Tensor | None]:
    pairs = [
        (o, g) for o, g in zip(outputs, grads, strict=True) if g is not None and o.requires_grad
    ]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not pairs or not wanted:
        return [None] * len(leaves)
    found = iter(
        torch.autograd.grad(
            [o for o, _ in pairs],
            wanted,
            [g for _, g in pairs],
            allow_unused=True,
            materialize_grads=True,
        )
    )
    return [next(found) if leaf.requires_grad else None for leaf in leaves]


def check_strategy(
    name: str,
    graph: Graph,
    node: Node,
    strategy: OpStrategy,
    axis: str,
    parts: int,
    batch: int,
    values: list[Tensor],
    whole,
) -> None:
    outputs, output_grads, operand_grads = whole
    operands = [
        place(v, layout.value, parts, batch)
        for v, layout in zip(values, strategy.inputs, strict=True)
    ]
    grads = [
        place(g, layout.grad, parts, batch) if g is not None else [None] * parts
        for g, layout in zip(output_grads, strategy.outputs, strict=True)
    ]
    programs = [rewritten(graph, node, strategy, axis, parts, rank) for rank in range(parts)]
    rows = batch // parts if axis == "dp" else batch
    needs = [n.meta["grad"] for n in graph.nodes if n.op == "placeholder"][:-1]

    def run(rank: int):
        leaves = [
            shards[rank].clone().requires_grad_(grad)
            for shards, grad in zip(operands, needs, strict=True)
        ]
        noise = (step_noise(0, 0, 0, rows),) if draws(node) else ()
        found = programs[rank](*leaves, torch.zeros(rows), *noise)
        return [o.detach() for o in found], gradients(list(found), [g[rank] for g in grads], leaves)

    results = in_ranks(run, axis, parts, threads=bool(strategy.lowering))
    for index, layout in enumerate(strategy.outputs):
        compare(
            [r[0][index] for r in results],
            layout.value,
            outputs[index],
            f"output {index}",
            batch,
            shapes_only=name in GARBAGE,
        )
    for index, layout in enumerate(strategy.inputs):
        if operand_grads[index] is not None:
            compare(
                [r[1][index] for r in results],
                layout.grad,
                operand_grads[index],
                f"gradient of operand {index}",
                batch,
            )


def rewritten(
    graph: Graph, node: Node, strategy: OpStrategy, axis: str, parts: int, rank: int
) -> GraphModule:
    """The rank's program, by the pass that rewrites every block."""
    mesh = MeshShape(**{axis: parts})
    ops = {node.name: {axis: AxisChoice(strategy.name, strategy.inputs, strategy.outputs)}}
    names = [n.name for n in graph.nodes if n.op == "placeholder"]
    rows_layout = S(0) if axis == "dp" else R
    for name, layout in zip(names, (*strategy.inputs, rows_layout), strict=True):
        ops[name] = {axis: AxisChoice(str(layout), (), (layout,))}
    for k, layout in enumerate(strategy.outputs):
        ops[f"output{k}"] = {axis: AxisChoice(str(layout), (layout,), ())}
    block = BlockClass("op", graph, (), "")
    local = ClassSharder(
        block, BlockPlan("op", ("op",), "none", ops), mesh, rank, torch.device("cpu"), {}
    ).run()
    assert not any("transition" in n.meta for n in local.nodes)
    return GraphModule(torch.nn.Module(), local)


def split_of(whole: Tensor, placement: Placement, batch: int) -> Split:
    return Split(
        placement.dim,
        whole.shape[placement.dim],
        placement.pattern,
        batch if placement.pattern.rows else 1,
    )


def place(whole: Tensor, placement: Placement, parts: int, batch: int) -> list[Tensor]:
    """Each rank's tensor, together representing `whole`."""
    if placement.kind == "S":
        return [
            pick(whole, split_of(whole, placement, batch), parts, rank) for rank in range(parts)
        ]
    if placement.kind == "R":
        return [whole] * parts
    generator = torch.Generator().manual_seed(parts)
    summands = [
        torch.randn(whole.shape, generator=generator, dtype=whole.dtype) for _ in range(parts - 1)
    ]
    return [*summands, whole - sum(summands)]


def compare(
    found: list[Tensor],
    placement: Placement,
    whole: Tensor,
    what: str,
    batch: int,
    shapes_only: bool = False,
) -> None:
    if placement.kind == "S":
        combined = [
            natural_order(
                torch.cat(found, placement.dim), split_of(whole, placement, batch), len(found)
            )
        ]
        assert [f.shape for f in found] == [
            w.shape for w in place(whole, placement, len(found), batch)
        ], f"{what}: shards {[tuple(f.shape) for f in found]}"
    elif placement.kind == "P":
        combined = [torch.stack(found).sum(0)]
    else:
        combined = found
    for tensor in combined:
        if shapes_only:
            assert tensor.shape == whole.shape
        else:
            torch.testing.assert_close(
                tensor, whole, rtol=1e-9, atol=1e-10, msg=lambda m: f"{what}: {m}"
            )


class Meeting:
    """What ranks' threads exchange, in place of `vocabulary_parallel._reduced` and `_gathered`."""

    def __init__(self, parts: int) -> None:
        self.barrier, self.parts, self.given = (
            threading.Barrier(parts, timeout=30),
            parts,
            [None] * parts,
        )

    def reduced(self, x: Tensor, group: AxisGroup, op: str) -> Tensor:
        self.given[group.index] = x
        self.barrier.wait()
        stacked = torch.stack([g.detach() for g in self.given])
        self.barrier.wait()
        return stacked.amax(0) if op == "max" else stacked.sum(0)

    def gathered(self, x: Tensor, group: AxisGroup) -> Tensor:
        self.given[group.index] = x
        self.barrier.wait()
        stacked = torch.stack([g.detach() for g in self.given])
        self.barrier.wait()
        return stacked


def in_ranks(run, axis: str, parts: int, threads: bool) -> list:
    def one(rank: int):
        with active_axes({axis: AxisGroup(axis, parts, rank, simulate=True)}):
            return run(rank)

    if not threads:
        return [one(rank) for rank in range(parts)]
    meeting = Meeting(parts)
    originals = vocabulary_parallel._reduced, vocabulary_parallel._gathered
    vocabulary_parallel._reduced = meeting.reduced
    vocabulary_parallel._gathered = meeting.gathered
    results, errors = [None] * parts, []

    def work(rank: int) -> None:
        try:
            results[rank] = one(rank)
        except Exception as error:  # raised below
            errors.append(error)
            meeting.barrier.abort()

    workers = [threading.Thread(target=work, args=(rank,)) for rank in range(parts)]
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    finally:
        vocabulary_parallel._reduced, vocabulary_parallel._gathered = originals
    if errors:
        raise next(
            (e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0]
        )
    return results
