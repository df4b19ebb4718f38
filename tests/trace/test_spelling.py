"""One spelling for each operation: the respelled graph computes the same, with the few ops that have rules."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

from autopar.trace.capture import capture
from autopar.trace.normalize import normalize
from autopar.trace.spelling import is_op


class Model(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x).square().sum()


def normalized(function, shape=(4, 6, 8)):
    """The normalized graph of `function(x).square().sum()`, after checking that it computes just that."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    captured = capture(Model(function), {"x": x})
    normalize(captured.graph)
    placeholders = [n for n in captured.graph.nodes if n.op == "placeholder"]
    run = GraphModule(nn.Module(), captured.graph)
    for node in captured.graph.nodes:  # sizes of the batch become numbers, as they do on a rank
        node.args = torch.utils._pytree.tree_map(
            lambda a: x.shape[0] if isinstance(a, torch.SymInt) else a, node.args
        )
    run.recompile()
    (found,) = run(*(x for _ in placeholders))
    torch.testing.assert_close(found, function(x).square().sum(), rtol=1e-12, atol=0)
    return captured.graph


def names(graph) -> list[str]:
    called = [n.target for n in graph.nodes if n.op == "call_function"]
    return [
        t._schema.name.removeprefix("aten::") if hasattr(t, "_schema") else t.__name__
        for t in called
    ][:-2]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: torch.multiply(*x.tensor_split(2, -1)), ["split_with_sizes", "mul"]),
        (lambda x: torch.subtract(*x.hsplit(2)), ["split_with_sizes", "sub"]),
        (
            lambda x: torch.true_divide(*x.exp().unsafe_chunk(2, 1)),
            ["exp", "split_with_sizes", "div"],
        ),
        (lambda x: x.clip(-1, 1), ["clamp"]),
        (lambda x: torch.concat([x, x], 1), ["cat"]),
        (lambda x: torch.cat([x[:, :0], x.exp()], 1), ["exp"]),
        (lambda x: torch.cat([x, x[:, :0], x], 1), ["cat"]),
        (lambda x: x.swapaxes(1, 2).cumsum(-1), ["transpose", "cumsum"]),
        (lambda x: x.movedim(0, 2).cumsum(-1), ["permute", "cumsum"]),
        (lambda x: x.movedim((2, 0), (0, 1)).cumsum(0), ["permute", "cumsum"]),
        (lambda x: x.narrow(-1, 2, 3), ["slice"]),
        (lambda x: x.sum(1, keepdim=True).repeat(1, 5, 1), ["sum", "expand"]),
        (
            lambda x: x[:1, 0].repeat(x.shape[0], 1) + x[:, 0],
            ["select", "slice", "expand", "select", "add"],
        ),
        (lambda x: x.repeat(1, 2, 1), ["repeat"]),
        (lambda x: x.repeat(3, 1, 1), ["cat"]),
        (lambda x: x * x.cumsum(1).new_ones(6, 1), ["ones", "mul"]),
        (
            lambda x: x * x.new_full((x.shape[0], 6, 8), 3.0) + x.exp().new_zeros((8,)),
            ["full", "mul", "zeros", "add"],
        ),
        (lambda x: x.sum(1).view_as(x[:, :1]), ["sum", "reshape"]),
        (lambda x: x.sum(1, keepdim=True).expand_as(x), ["sum", "expand"]),
    ],
)
def test_spellings(function, expected):
    found = [n for n in names(normalized(function)) if n != "getitem"]
    assert sorted(found) == sorted(expected)


def test_slices_of_a_whole_dim_are_one_split():
    graph = normalized(lambda x: x[..., :3] * x[..., 3:6] * x[..., 6:].sum(-1, keepdim=True))
    assert names(graph).count("slice") == 0
    split = next(n for n in graph.nodes if is_op(n, "split_with_sizes"))
    assert split.args[1:] == ([3, 3, 2], 2)
    assert [tuple(v.shape[1:]) for v in split.meta["val"]] == [(6, 3), (6, 3), (6, 2)]


def test_a_slice_used_twice_and_slices_of_slices():
    def nested(x):
        left, right = x[..., :4], x[..., 4:]
        return left[..., :2] * left[..., 2:] * right[..., :2] + x[..., :4].sum(-1, keepdim=True)

    graph = normalized(nested)
    assert names(graph).count("split_with_sizes") == 2 and names(graph).count("slice") == 1


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[..., :3].sum(-1) + x[..., 4:].sum(-1),  # a gap
        lambda x: x[..., :5].sum(-1) + x[..., 3:].sum(-1),  # an overlap
        lambda x: x[..., :4].sum(-1) + x[..., 4::2].sum(-1),  # a step
        lambda x: x[..., :4].sum(-1) + x[:, 4:].sum(-1).sum(-1, keepdim=True),  # two dims
    ],
)
def test_other_slices_stay(function):
    assert "split_with_sizes" not in names(normalized(function))
