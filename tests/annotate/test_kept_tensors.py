"""What autograd keeps, counted once for each storage: views, parts of tensors, and views that a conversion parts from their tensor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.annotate.class_facts import ModelFacts
from autopar.annotate.saved_tensors import _called, observe_saved
from autopar.api import trace
from autopar.errors import AutoparError
from autopar.ir.sharding import S
from autopar.models.gpt import GPTConfig
from benchmarks.fidelity.kept_bytes import MOST, measure

GPT = GPTConfig(vocab=64, hidden=32, layers=1, heads=4, max_seq=16)


@pytest.mark.parametrize(
    ("model", "tp", "fuse"),
    [
        ("gpt", 2, "off"),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (
                ("llama", 1, "all"),
                ("llama", 4, "off"),
                ("moe", 2, "all"),
                ("gemma2", 2, "all"),
            )
        ),
    ],
)
def test_kept_bytes_and_peaks_are_those_that_memtracker_sees(model, tp, fuse):
    assert max(map(abs, measure(model, tp, fuse).off())) < MOST


def test_layouts_of_views_are_those_of_their_storage():
    ids = torch.zeros(2, 16, dtype=torch.long)
    facts = ModelFacts(trace(GPT.module(), {"input_ids": ids, "labels": ids})).classes[0]
    attention = next(node for node in facts.graph.nodes if "scaled_dot_product" in node.name)
    transposed = next(iter(attention.users))
    joined = next(iter(transposed.users))
    assert facts.roots[joined.name] == attention.name
    # (b, n, s, d), (b, s, n, d), (b, s, n d)
    expected = {attention: (0, 1, 2), transposed: (0, 2, 1), joined: (0, 2, 1)}
    for node, dims in expected.items():
        found = [facts.storage_dim(node.name, S(dim)) for dim in range(3)]
        assert found == list(dims), node


def test_a_part_that_an_op_keeps_holds_the_whole_storage():
    op = torch.library.custom_op("tests_kept::halves", mutates_args=())

    @op
    def halves(x: Tensor) -> Tensor:
        gate, up = torch.cat([x, x + 1], -1).chunk(2, -1)
        return gate * up

    halves.register_fake(lambda x: torch.empty_like(x))
    halves.register_autograd(
        lambda ctx, grad: grad * ctx.saved_tensors[0],
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(
            torch.cat([inputs[0], inputs[0]], -1)[..., :8]
        ),
    )

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return (torch.ops.tests_kept.halves(self.layer(x)).sum(-1) - labels).square().mean()

    traced = trace(Model(), {"x": torch.zeros(4, 8), "labels": torch.zeros(4)})
    saved = {k: v for block in traced.classes for k, v in observe_saved(block.graph)[0].items()}
    (kept,) = (found for name, found in saved.items() if "halves" in name)
    assert kept.extra_bytes_per_row == 16 * 4


def test_an_op_without_a_kernel_on_the_meta_device_is_refused():
    library = torch.library.Library("tests_kept_no_meta", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: 2 * x, "CPU")
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(torch.ops.tests_kept_no_meta.twice.default, (x,))
    with pytest.raises(AutoparError, match=r"twice.*has no kernel on the meta.*register_fake"):
        _called(node, {x: torch.empty(2, device="meta")})
