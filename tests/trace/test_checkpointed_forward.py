"""Forwards that ask for activation checkpointing: capture takes the plain call, and training is that of eager PyTorch."""

from __future__ import annotations

import functools

import pytest
import torch
from support.eager_runs import PINS, batches, errors
from support.effort import every
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from autopar.api import trace
from autopar.planning.notes import notes


class Layers(nn.Module):
    """Three layers, called by `self.call(layers, x)`."""

    def __init__(self, call) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.first, self.call = nn.Linear(6, 6), call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.layers, self.first(x)).square().mean(1).sum()


class Doubled(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, scale: float) -> tuple[Tensor, float]:
        return self.layer(x) * scale, scale


def each(layers, x, **options):
    for layer in layers:
        x = checkpoint(layer, x, **options)
    return x


def nested(layers, x):
    return checkpoint(
        lambda y: checkpoint(layers[2], layers[1](y), use_reentrant=True),
        layers[0](x),
        use_reentrant=True,
    )


def several_values(layers, x):
    x, scale = checkpoint(Doubled(layers[0]).forward, x, 2.0, use_reentrant=True)
    return (
        checkpoint(
            layers[2],
            checkpoint(layers[1], x, use_reentrant=False, preserve_rng_state=False),
            use_reentrant=True,
        )
        * scale
    )


def wrapped(layers, x):
    for layer in layers:
        x = checkpoint_wrapper(layer)(x)
    return x


CALLS = {
    "reentrant": functools.partial(each, use_reentrant=True),
    "not reentrant": functools.partial(each, use_reentrant=False),
    "sequential": lambda layers, x: checkpoint_sequential(list(layers), 2, x, use_reentrant=True),
    "nested": nested,
    "several values": several_values,
    "wrapper of torch.distributed": wrapped,
}
"""Ways to call checkpointed layers."""


def build(name: str) -> nn.Module:
    return Layers(CALLS[name])


@pytest.mark.parametrize("name", CALLS)
def test_the_plain_call_is_captured(name):
    traced = trace(Layers(CALLS[name]), {"x": torch.ones(4, 6)})
    assert any("activation checkpointing" in note for note in notes(traced))
    ops = [
        str(node.target)
        for block in traced.classes
        for node in block.graph.nodes
        if node.op == "call_function"
    ]
    assert not any("detach" in op or "grad" in op for op in ops), "no region without gradients"


@pytest.mark.parametrize("name", every(4, ["nested", "reentrant", "sequential", "several values"]))
def test_training_is_that_of_eager_pytorch(pool2, name):
    for found in pool2.run(errors, functools.partial(build, name), [*PINS], batches()):
        assert max(found) <= 1, found


def from_the_inputs() -> nn.Module:
    model = Layers(
        lambda layers, x: layers[2](layers[1](checkpoint(layers[0], x, use_reentrant=True)))
    )
    model.first = nn.Identity()
    return model


def test_what_eager_mode_does_not_train_is_not_trained(pool2):
    (_, note) = notes(trace(from_the_inputs(), {"x": torch.ones(4, 6)}))[:2]
    assert "none of whose arguments has a gradient (test_checkpointed_forward.py:" in note
    for found in pool2.run(errors, from_the_inputs, [*PINS], batches()):
        assert max(found) <= 1, found


def test_transformers_with_gradient_checkpointing():
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
                                         num_attention_heads=2, num_key_value_heads=2)).train()  # fmt: skip
    ids = torch.zeros(2, 8, dtype=torch.int64)
    plain = trace(model, {"input_ids": ids, "labels": ids.clone()})
    model.gradient_checkpointing_enable({"use_reentrant": True})
    traced = trace(model, {"input_ids": ids, "labels": ids.clone()})
    assert traced.model_hash == plain.model_hash, "the graph of the model without checkpointing"
    assert any("activation checkpointing" in note for note in notes(traced)) and not plain.notes
