"""Expands batch norm into plain sums, so that the layout algebra synchronizes it across ranks.

The statistics of a sharded batch are sums divided by counts. Shards give Partial sums, which the
graph reduces like any others, in forward and backward. No lowering handles batch norm.
`autopar::in_training(batch, running)` marks where training reads the batch's statistic and
evaluation the running one. The training program keeps its first operand, `evaluation_copy` its
second.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.fx import Graph, Node

from autopar.ir.batch import multiple_of_batch
from autopar.ir.calls import argument, argument_names
from autopar.ops.aten import aten
from autopar.trace.edit import call, is_op, product, replace

_LIBRARY = torch.library.Library("autopar", "FRAGMENT")
_LIBRARY.define("in_training(Tensor batch, Tensor running) -> Tensor")
_LIBRARY.impl("in_training", lambda batch, running: batch.clone(), "CompositeImplicitAutograd")
IN_TRAINING = torch.ops.autopar.in_training.default

STATISTICS = "batch statistics"
"""`meta` key of nodes that compute statistics of a batch. It holds how many values of a channel a
row has. By convention they are computed per micro-batch.
"""
_NORMS = (
    "batch_norm",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_functional",
    "_native_batch_norm_legit_no_training",
)


def expand_batch_norm(graph: Graph) -> None:
    """Rewrite batch norm, for any number of dims, as sums over all dims but the second, in place.

    The variance is the mean of squared differences; the running variance uses the unbiased one
    (Ioffe and Szegedy 2015, algorithm 2). Half precision is converted to fp32 first, as in
    PyTorch's kernels.
    """
    for node in list(graph.nodes):
        if node.op == "call_function" and is_op(node, *_NORMS):
            with graph.inserting_before(node):
                results = _expanded(graph, node)
            if not isinstance(node.meta["val"], (list, tuple)):
                replace(graph, node, aten.alias.default, (results[0],))
                continue
            for user in list(node.users):
                user.replace_all_uses_with(results[user.args[1]])
                graph.erase_node(user)
            graph.erase_node(node)


def _expanded(graph: Graph, node: Node) -> tuple:
    """Write the sums before `node`, a batch norm call, and return its results: (normalized, None,
    None, new running mean, new running variance), as nodes. None stands for what only backward
    needs, and for running statistics that it does not have.

    In evaluation the running statistics normalize and stay as they are.
    """
    x, weight, bias, running_mean, running_var = (
        argument(node, name)
        for name in (argument_names(node)[0], "weight", "bias", "running_mean", "running_var")
    )
    train = argument(node, "train", argument(node, "training", False))
    momentum, eps = argument(node, "momentum"), argument(node, "eps")
    emit = partial(call, graph, node)
    dtype, shape = x.meta["val"].dtype, x.meta["val"].shape
    if dtype in (torch.float16, torch.bfloat16):
        x = emit(aten.to.dtype, x, torch.float32)
    dims = [d for d in range(len(shape)) if d != 1]
    number = product([shape[d] for d in dims])

    def per_channel(statistic: Node) -> Node:
        return emit(aten.reshape.default, statistic, [1, -1, *[1] * (len(shape) - 2)])

    mean, var, new_mean, new_var = running_mean, running_var, running_mean, running_var
    if train:
        batch_mean = emit(aten.div.Tensor, emit(aten.sum.dim_IntList, x, dims), number)
        batch_mean.meta[STATISTICS] = multiple_of_batch(number) or number
        mean = (
            batch_mean
            if running_mean is None
            else emit(torch.ops.autopar.in_training.default, batch_mean, running_mean)
        )
    centred = emit(aten.sub.Tensor, x, per_channel(mean))
    if train:
        squares = emit(aten.sum.dim_IntList, emit(aten.mul.Tensor, centred, centred), dims)
        var = emit(aten.div.Tensor, squares, number)
        var.meta[STATISTICS] = batch_mean.meta[STATISTICS]
        if running_mean is not None:
            var = emit(torch.ops.autopar.in_training.default, var, running_var)
            unbiased = emit(aten.div.Tensor, emit(aten.detach.default, squares), number - 1)
            new_mean = _moved(emit, running_mean, emit(aten.detach.default, batch_mean), momentum)
            new_var = _moved(emit, running_var, unbiased, momentum)
    scale = emit(aten.rsqrt.default, emit(aten.add.Tensor, var, eps))
    if weight is not None:
        scale = emit(aten.mul.Tensor, scale, weight)
    out = emit(aten.mul.Tensor, centred, per_channel(scale))
    if bias is not None:
        out = emit(aten.add.Tensor, out, per_channel(bias))
    if out.meta["val"].dtype != dtype:
        out = emit(aten.to.dtype, out, dtype)
    return out, None, None, new_mean, new_var


def _moved(emit: Callable[..., Node], running: Node, value: Node, momentum: float) -> Node:
    return emit(
        aten.add.Tensor,
        emit(aten.mul.Tensor, running, 1 - momentum),
        emit(aten.mul.Tensor, value, momentum),
    )
