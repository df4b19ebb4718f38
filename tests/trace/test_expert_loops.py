"""Loops over experts become `autopar::routed_experts`, and train on two ranks as eager PyTorch does on one."""

from __future__ import annotations

import pytest
import torch
from support.captures import captured_once
from support.effort import every, slow_but
from support.exactness import moved, run_steps, sgd, train_in_place, update_error
from support.expert_loops import (
    BLOCKS,
    OTHERS,
    REFUSED,
    Block,
    Compared,
    Counted,
    Litgpt,
    Net,
    batch,
)
from support.spelled_graphs import assert_computes_the_same
from torch import nn

import autopar
from autopar.api import trace
from autopar.errors import AutoparError
from autopar.ir.calls import op_name

PINS = {
    "ep": {"ep": 2},
    "tp": {"dp": 1, "tp": 2},
    "dp": {"dp": 2, "tp": 1, "micro_batch": 2},
    "pp": {"pp": 2, "dp": 1, "tp": 1, "micro_batch": 4},
}


def names(graphs) -> list[str]:
    return [op_name(node) for graph in graphs for node in graph.nodes]


class Frozen(nn.Module):
    """A block whose parameters are buffers."""

    def __init__(self, block: type[Block]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block = block().double()
        for module in list(self.block.modules()):
            for name, parameter in list(module.named_parameters(recurse=False)):
                delattr(module, name)
                module.register_buffer(name, parameter.detach())

    def forward(self, x):
        return self.block(x).sin().sum()


def example() -> torch.Tensor:
    return torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("block", every(8, BLOCKS))
def test_a_loop_is_one_op_that_computes_the_same(block):
    found = names([assert_computes_the_same(Frozen(block), example())])
    assert found.count("autopar::routed_experts") == 1
    assert not {"aten::where", "aten::index_add", "aten::index_put"}.intersection(found)


@pytest.mark.parametrize("block", every(3, OTHERS))
def test_other_loops_stay_and_compute_the_same(block):
    found = names([assert_computes_the_same(Frozen(block), example())])
    assert "autopar::routed_experts" not in found


@pytest.mark.parametrize("block", slow_but([Counted], REFUSED))
def test_code_for_hit_experts_that_does_more_or_less_is_refused(block):
    with pytest.raises(AutoparError, match=r"for the experts that got a token|depends on data"):
        trace(Net(block).double(), batch(0))


@pytest.mark.slow
def test_experts_that_are_one_op_have_no_note():
    traced = trace(Net(Litgpt).double(), batch(0))
    assert not any("boolean indexing" in note for note in traced.notes)
    assert names(c.graph for c in traced.classes).count("autopar::routed_experts")


@captured_once()
def errors(rank: int, block: type[Block], pins: dict[str, dict]) -> dict[str, float]:
    """On one rank: for each pin, the largest update-relative error over the tolerance of 1e-9."""
    data, found = [batch(seed) for seed in range(3)], {}

    def made() -> nn.Module:
        torch.manual_seed(0)
        return Net(block).double()

    result = train_in_place(made(), data)
    assert moved(result) > 1e-3, "training moves the weights"
    for key, pin in pins.items():
        engine = autopar.parallelize(made(), "cpu:2", data[0], sgd, pin=pin, precision="fp64")
        losses, state = run_steps(engine, data)
        assert losses == pytest.approx(result.losses, rel=1e-9)
        found[key] = update_error(result, state)
    return found


@pytest.mark.parametrize(
    ("block", "pins"),
    [
        (Compared, ["ep"]),
        *(pytest.param(block, [*PINS], marks=pytest.mark.slow) for block in BLOCKS),
    ],
)
def test_training_is_exact(pool2, block, pins):
    for found in pool2.run(errors, block, {pin: PINS[pin] for pin in pins}, timeout_s=600):
        assert max(found.values()) <= 1, found
