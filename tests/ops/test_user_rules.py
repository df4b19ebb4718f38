"""Rules of a user's own ops: from torch.library through trace, plan and engine, and what is said about a wrong one."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from support.exactness import (
    ABSOLUTE,
    random_plan,
    run_steps,
    setting,
    sgd,
    solved_plan,
    train,
    update_error,
)
from torch import Tensor, nn

import autopar
from autopar import AutoparError
from autopar.annotate.annotator import Annotator
from autopar.api import trace
from autopar.ir.mesh import MeshShape
from autopar.ir.plan import Plan
from autopar.ops.rules import op_dims
from autopar.ops.values import ops
from autopar.runtime.engine import Engine


@torch.library.custom_op("autopar_test::gain", mutates_args=())
def gain(x: Tensor, scale: Tensor) -> Tensor:
    return x * scale * scale


@gain.register_fake
def _(x: Tensor, scale: Tensor) -> Tensor:
    return torch.empty_like(x)


def _gain_backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, scale = ctx.saved_tensors
    return grad * scale * scale, (2 * grad * x * scale).sum(tuple(range(x.dim() - 1)))


gain.register_autograd(
    _gain_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


class Gained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(10, 16), nn.Linear(16, 10)
        self.scale = nn.Parameter(torch.randn(16))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.down(gain(self.up(x), self.scale)), target)


def batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {
            k: torch.randn(8, 6, 10, generator=generator, dtype=torch.float64)
            for k in ("x", "target")
        }
        for _ in range(3)
    ]


def model() -> nn.Module:
    torch.manual_seed(2)
    return Gained().double()


@cache
def traced():
    autopar.register_rule(gain, "b.. h, h -> b.. h")
    return trace(model(), batches()[0])


def train_on(rank: int, texts: list[str]) -> list:
    return [
        run_steps(
            Engine(model(), traced(), Plan.from_json(text), sgd, None, None, "cpu"), batches()
        )
        for text in texts
    ]


def letters(plan: Plan) -> set[str]:
    return {
        choice.strategy
        for block in plan.blocks
        for op, axes in block.ops.items()
        if "gain" in op
        for choice in axes.values()
    }


def test_a_custom_op_is_sharded_and_trains_exactly(pool2):
    annotator = Annotator(traced())
    plans = [
        solved_plan(traced(), annotator, setting(MeshShape(dp=2))),
        solved_plan(traced(), annotator, setting(MeshShape(tp=2))),
    ]
    plans += [random_plan(traced(), annotator, setting(MeshShape(tp=2)), seed) for seed in range(6)]
    assert letters(plans[0]) == {"b0"} and "h" in set().union(*map(letters, plans[1:]))
    result = train(model(), batches())
    for by_rank in pool2.run(train_on, [plan.to_json() for plan in plans]):
        for losses, state in by_rank:
            assert losses == pytest.approx(result.losses, rel=1e-9, abs=ABSOLUTE)
            assert update_error(result, state) <= 1


def gain_node():
    return next(
        n for block in traced().classes for n in ops(block.graph) if "gain" in str(n.target)
    )


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("b.. h, h", "must have one '->'"),
        ("b.. h -> h -> b.. h", "must have one '->'"),
        (
            "b.. h, h -> b.. z",
            "the result's letter 'z' is in no operand; a dim that the op makes is written '!z'",
        ),
        ("b.. h, h -> c.. h", r"the result's letter 'c\.\.' is in no operand"),
        ("b.. 2h, h -> b.. h", "'2h' is no letter"),
        ("b.. c.. h, h -> b.. h", r"the term 'b.. c.. h' has '\.\.' twice"),
        ("h h, h -> h", "the term 'h h' has a letter twice"),
    ],
)
def test_wrong_text_is_refused_at_once(rule, message):
    with pytest.raises(AutoparError, match=f"for autopar_test::gain: .*{message}"):
        autopar.register_rule("autopar_test::gain", rule)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("b h, h -> b h", r"the term 'b h' has 2 dims; the tensor has 3, \('s\d+', '6', '16'\)"),
        ("b.. h -> b.. h", "it has 1 operands and 1 results; the call has 2 tensors"),
        (
            "b.. h, h -> b.. h, b..",
            "it has 2 operands and 2 results; the call has 2 tensors of shapes .* and 1 results",
        ),
        ("b s h, s -> b s h", "dim 's' has size 6 in one tensor and 16 in another"),
    ],
)
def test_a_rule_that_does_not_fit_the_call_is_refused(rule, message):
    node = gain_node()
    autopar.register_rule(gain, rule)
    try:
        with pytest.raises(AutoparError, match=message):
            op_dims(node)
    finally:
        autopar.register_rule(gain, "b.. h, h -> b.. h")


def test_ops_that_do_not_exist_are_refused():
    with pytest.raises(
        AutoparError,
        match="'gain' is not the name of an op: it has a namespace, as in 'mylib::scale'",
    ):
        autopar.register_rule("gain", "b.. h -> b.. h")
    with pytest.raises(AutoparError, match="torch has no op 'autopar_test::gian': define it"):
        autopar.register_rule("autopar_test::gian", "b.. h -> b.. h")


def test_an_op_may_be_named_in_several_ways():
    for target in (
        gain,
        torch.ops.autopar_test.gain,
        torch.ops.autopar_test.gain.default,
        "autopar_test::gain",
    ):
        autopar.register_rule(target, "b.. !h, !h -> b.. !h")
        assert not any(x.startswith("h") for x in op_dims(gain_node()).letters)
        autopar.register_rule(target, "b.. h, h -> b.. h")
        assert "h" in op_dims(gain_node()).letters
