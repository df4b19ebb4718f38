"""Attention whose heads tp does not divide: the plan is exact, shards the other layers, and names the attention."""

from __future__ import annotations

import pytest
import torch.nn.functional as F
from support.effort import slow_but
from support.exactness import setting, solved_plan, token_batches
from support.trained_stacks import MESHES, VOCAB, WIDTH, Stack, assert_exact, built
from torch import Tensor, nn

import autopar
from autopar.explaining.lints import lint
from autopar.ir.cluster import ClusterSpec


class Layer(nn.Module):
    """Attention of some heads with fewer key heads, fused or by hand, and an MLP."""

    def __init__(self, heads: int, key_heads: int, fused: bool = True) -> None:
        super().__init__()
        self.heads, self.key_heads, self.fused = heads, key_heads, fused
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * key_heads * WIDTH // heads)
        self.out, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2 * self.key_heads, -1)).transpose(1, 2).chunk(2, 1)
        k, v = (each.repeat_interleave(self.heads // self.key_heads, 1) for each in (k, v))
        by_hand = lambda: (q @ k.transpose(-1, -2) / 2).softmax(-1) @ v  # noqa: E731
        found = F.scaled_dot_product_attention(q, k, v) if self.fused else by_hand()
        x = x + self.out(found.transpose(1, 2).flatten(2))
        return self.down(F.gelu(self.up(x)))


def three_heads() -> nn.Module:
    return Stack(lambda: Layer(3, 3))


def three_heads_of_one_key() -> nn.Module:
    return Stack(lambda: Layer(3, 1))


def three_heads_by_hand() -> nn.Module:
    return Stack(lambda: Layer(3, 3, fused=False))


def one_head() -> nn.Module:
    return Stack(lambda: Layer(1, 1))


@pytest.mark.parametrize(
    "maker",
    slow_but(
        [three_heads_of_one_key],
        [three_heads, three_heads_of_one_key, three_heads_by_hand, one_head],
    ),
)
def test_they_train_as_on_one_device(pool2, maker):
    assert_exact(pool2, maker, "tp")


def test_the_mlp_is_sharded_and_the_attention_named():
    model, traced, annotator = built(three_heads)
    cluster = ClusterSpec.parse("cpu:2")
    plan = autopar.plan(
        model, cluster, token_batches(VOCAB)[0], pin={"tp": 2}, precision="fp64", traced=traced
    )
    (finding,) = [each for each in lint(plan, cluster, traced) if each.lint == "indivisible heads"]
    assert finding.numbers["heads"] == 3 and finding.numbers["tp"] == 2
    choices = solved_plan(traced, annotator, setting(MESHES["tp"], 1)).blocks
    weights = [
        block.ops["up_weight"]["tp"].outputs[0] for block in choices if "up_weight" in block.ops
    ]
    assert weights and all(layout.is_shard for layout in weights)
