"""In-place ops are rewritten only where no other tensor sees the write."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.effort import examples
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.trace.functionalize import rewrite_in_place

SIZE = 4
MAKES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mul": lambda a, b: a * 1.5,
    "sum": lambda a, b: a + b,
    "cos": lambda a, b: a.cos(),
    "whole mean": lambda a, b: a + b.mean(),
    "softmax": lambda a, b: a.softmax(-1) + b,
    "topk": lambda a, b: a.topk(SIZE, -1)[0],
    "split": lambda a, b: a.split(SIZE // 2, 0)[1].repeat(2, 1),
    "float": lambda a, b: a.float().double(),
    "view": lambda a, b: a.view(SIZE, SIZE),
    "transposed": lambda a, b: a.t(),
    "reshaped": lambda a, b: a.reshape(-1).reshape(SIZE, SIZE),
    "dropout of nothing": lambda a, b: torch.dropout(a, 0.5, False),
    "einsum": lambda a, b: torch.einsum("ij->ji", a),
    "contiguous": lambda a, b: a.contiguous(),
}
WRITES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add_": lambda a, b: a.add_(b),
    "div_": lambda a, b: a.div_(b.sum(-1, keepdim=True).square() + 1),
    "mul_ number": lambda a, b: a.mul_(0.5),
    "copy_": lambda a, b: a.copy_(b.float()),
    "clamp_": lambda a, b: a.clamp_(-1, 1),
    "zero_ of a row": lambda a, b: a[1].zero_(),
    "masked_fill_": lambda a, b: a.masked_fill_(b > 0, 0.25),
    "cast": lambda a, b: a.float().add_(b).double(),
    "itself": lambda a, b: a.mul_(a),
}
STEPS = st.tuples(
    st.sampled_from([*MAKES, *WRITES]), st.integers(0, 9), st.integers(0, 9), st.booleans()
)


def run(steps: list[tuple[str, int, int, bool]], x: Tensor) -> Tensor:
    """What a program computes from `x`, of which each step reads two tensors made before."""
    made = [x * 1.0, x.sin()]
    for name, first, second, kept in steps:
        a, b = made[first % len(made)], made[second % len(made)]
        result = (MAKES | WRITES)[name](a, b)
        if kept and result.shape == x.shape:
            made.append(result)
    return torch.stack([(tensor * (k + 1)).sum() for k, tensor in enumerate(made)])


@settings(max_examples=examples(60, 600), deadline=None)
@given(steps=st.lists(STEPS, min_size=1, max_size=8))
def test_programs_compute_the_same_without_their_in_place_ops(
    steps: list[tuple[str, int, int, bool]],
) -> None:
    x = torch.linspace(-2, 2, SIZE * SIZE, dtype=torch.float64).view(SIZE, SIZE)
    expected = run(steps, x.clone())
    graph = make_fx(lambda x: run(steps, x), tracing_mode="fake", pre_dispatch=True)(x)
    rewrite_in_place(graph.graph)
    graph.graph.lint()
    graph.recompile()
    torch.testing.assert_close(graph(x.clone()), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("program", "left"),
    [
        (lambda x: x.cos().div_(2), 0),
        (lambda x: x.topk(2)[0].div_(x.sum(-1, keepdim=True)).mul_(2).view(-1), 0),
        (lambda x: x.mul_(2), 1),  # an input
        (lambda x: x.cos().view(-1).mul_(2), 1),
        (lambda x: (y := x.cos(), y.t(), y.mul_(2))[1], 1),  # what is read shares its memory
        (lambda x: torch.dropout(x, 0.5, False).mul_(2), 1),  # is x
        (lambda x: x.cos().normal_(), 1),
        (lambda x: x.float().cos().add_(x), 1),  # casts
    ],
)
def test_only_writes_that_nothing_else_sees_are_rewritten(
    program: Callable[[Tensor], Tensor], left: int
) -> None:
    graph = make_fx(program, tracing_mode="fake", pre_dispatch=True)(torch.ones(4, 4).double())
    rewrite_in_place(graph.graph)
    mutable = [
        node
        for node in graph.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
    ]
    assert len(mutable) == left
