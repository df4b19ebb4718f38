"""Frozen parameters under ZeRO-3, counted by hand: whole for the engine, shared out by other frameworks."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import pytest
import torch
from autopar_cost_models import collective_time_s
from autopar_cost_models.roofline import link_time_s
from torch import nn

from autopar.annotate.annotator import Annotator
from autopar.annotate.setting import Setting
from autopar.api import trace
from autopar.ir.annotated import Strategy
from autopar.ir.cluster import ClusterSpec
from autopar.ir.mesh import MeshShape
from autopar.request.frameworks import software_of
from autopar.request.software import Software

WIDTH, RANK, LAYERS = 64, 4, 3
CLUSTER = ClusterSpec.parse("h100:4")


class Adapted(nn.Module):
    """A frozen product, a buffer, and a trained adapter of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.down = nn.Linear(WIDTH, RANK, bias=False)
        self.up = nn.Linear(RANK, WIDTH, bias=False)
        self.register_buffer("scale", torch.ones(WIDTH, WIDTH))

    def forward(self, x):
        return x + torch.relu(self.base(x) * self.scale[0] + self.up(self.down(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Adapted() for _ in range(LAYERS)))

    def forward(self, x, target):
        return nn.functional.mse_loss(self.layers(x), target)


@pytest.fixture(scope="module")
def annotator() -> Annotator:
    inputs = {"x": torch.zeros(8, WIDTH), "target": torch.zeros(8, WIDTH)}
    return Annotator(trace(Model(), inputs))


def setting(zero: int = 3, frozen: str = "whole", dp: int = 4, **more) -> Setting:
    software = Software(frozen=frozen, root_unit=True)
    return Setting(MeshShape(dp=dp), 2, 1, zero, "none", "bf16", CLUSTER, software=software, **more)


def of_parameter(annotator: Annotator, by: Setting, name: str) -> Strategy:
    ops = [op for block in annotator.annotate(by).classes for op in block.ops]
    return next(op.strategies[0] for op in ops if op.kind == "parameter" and name in op.target)


NUMEL = WIDTH * WIDTH


@pytest.mark.parametrize(
    ("by", "expected"),
    [
        (setting(), 2 * NUMEL),
        (setting(frozen="sharded"), 2 * ceil(NUMEL / 4)),
        (setting(frozen="sharded in fp32"), 4 * ceil(NUMEL / 4)),
        (setting(2, "sharded"), 2 * NUMEL),
        (setting(frozen="sharded", shard=2), 2 * ceil(NUMEL / 2)),
    ],
)
def test_bytes_that_a_rank_holds(annotator, by: Setting, expected: int) -> None:
    found = of_parameter(annotator, by, "base")
    assert found.static_bytes == expected
    assert found.gradient_bytes == found.optimizer_bytes == 0
    assert of_parameter(annotator, by, "scale").static_bytes == 2 * NUMEL  # a buffer


def test_it_is_gathered_in_forward_and_in_backward(annotator) -> None:
    by = setting(frozen="sharded")
    by = replace(by, software=replace(by.software, dp_overlap=False))
    found = of_parameter(annotator, by, "base")
    scalars = NUMEL + 2 * WIDTH * RANK + NUMEL  # all of the block, the buffer among it
    block_s = collective_time_s("all_gather", 2 * scalars, 4, 1, CLUSTER.topology)
    assert found.forward_s == pytest.approx(block_s * NUMEL / scalars)
    assert found.backward_s == pytest.approx(found.forward_s) and found.step_s == 0
    whole = of_parameter(annotator, replace(by, software=Software(root_unit=True)), "base")
    assert whole.forward_s == whole.backward_s == 0


def test_the_first_layer_and_two_of_the_others_are_gathered(annotator) -> None:
    """What reads the input of the model is a segment of its own, and stays."""
    own, shared = (annotator.annotate(setting(frozen=frozen)) for frozen in ("whole", "sharded"))
    assert shared.fixed_bytes - own.fixed_bytes == 2 * NUMEL + 2 * 2 * NUMEL


def test_the_host_holds_what_is_offloaded(annotator) -> None:
    cluster = ClusterSpec.parse("dgx-h100:1")
    assert cluster.host is not None
    by = setting(frozen="sharded", dp=8, offload="parameters")
    by = replace(by, cluster=cluster, software=replace(by.software, dp_overlap=False))
    found, stays = (of_parameter(annotator, s, "base") for s in (by, replace(by, offload="none")))
    assert (found.static_bytes, found.host_bytes) == (0, 2 * NUMEL // 8)
    fetch_s = link_time_s(2 * NUMEL // 8, cluster.host)
    assert found.forward_s - stays.forward_s == pytest.approx(fetch_s)


@pytest.mark.parametrize(
    ("framework", "facts", "expected"),
    [
        ("torchtitan", {"zero": 3, "sharding": "fsdp"}, "sharded in fp32"),
        ("accelerate", {"zero": 3, "sharding": "hsdp"}, "sharded"),
        ("deepspeed", {"zero": 3, "sharding": "zero"}, "sharded"),
        ("megatron-core", {"zero": 3, "sharding": "fsdp"}, "sharded"),
        ("accelerate", {"zero": 2, "sharding": "fsdp"}, "whole"),
        ("deepspeed", {"zero": 1, "sharding": "zero"}, "whole"),
        ("autopar", {"zero": 3, "sharding": "fsdp"}, "whole"),
    ],
)
def test_what_each_framework_does(framework: str, facts: dict, expected: str) -> None:
    assert software_of(framework, dp=8, **facts).frozen == expected
