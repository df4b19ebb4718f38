"""Modules that predict later tokens (DeepSeek-V3, arXiv:2412.19437, section 2.2) against the paper's equations, written out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from autopar.errors import AutoparError
from autopar.models import parse_model
from autopar.models.base import NativeSpec
from autopar.models.common import rotary_tables
from autopar.models.moe import MoEConfig

CONFIG = MoEConfig(
    vocab=37,
    hidden=16,
    layers=2,
    heads=2,
    kv_heads=1,
    ffn=12,
    experts=4,
    top_k=2,
    router_aux_coef=0.0,
    mtp=2,
)


def model_of(config):
    torch.manual_seed(0)
    model = config.module().double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def test_loss_is_the_papers():
    model, (rows, seq, depth) = model_of(CONFIG), (3, 9, 2)
    ids = torch.randint(0, CONFIG.vocab, (rows, seq))
    labels = ids.clone()
    labels[0, 5:] = -100
    with torch.no_grad():
        embedded, state = model.embed(ids), model.body(model.embed(ids))[0]
        losses = []
        for k in range(depth + 1):
            if k:
                module = model.later[k - 1]
                # h'_i of equation 21 at i + k, the position of the token whose embedding it reads; no state comes before the first
                halves = torch.zeros(rows, seq, 2 * CONFIG.hidden, dtype=torch.float64)
                for j in range(seq):
                    if j > 0:
                        halves[:, j, : CONFIG.hidden] = module.state_norm(state[:, j - 1])
                    halves[:, j, CONFIG.hidden :] = module.token_norm(embedded[:, j])
                mixed = halves @ module.proj.weight.T
                state = module.layer(
                    mixed, *rotary_tables(seq, CONFIG.head_dim, CONFIG.rope_theta, like=mixed)
                )[0]
            logits = model.head((model.later[k - 1] if k else model).norm(state))
            pairs = [
                (logits[b, j], labels[b, j + 1])
                for b in range(rows)
                for j in range(seq - 1)
                if labels[b, j + 1] != -100
            ]
            losses.append(sum(F.cross_entropy(got, wanted) for got, wanted in pairs) / len(pairs))
        expected = losses[0] + CONFIG.mtp_coef * (losses[1] + losses[2]) / depth
        torch.testing.assert_close(model(ids, labels), expected)
        without = replace(CONFIG, mtp=0).module().double()
        without.load_state_dict(
            {
                name: value
                for name, value in model.state_dict().items()
                if not name.startswith("later.")
            }
        )
        torch.testing.assert_close(without(ids, labels), losses[0])


def test_a_module_sees_the_token_that_the_one_before_predicts_and_none_later():
    model = model_of(CONFIG)
    ids = torch.randint(0, CONFIG.vocab, (1, 8))
    changed = ids.clone()
    changed[0, 5] = (changed[0, 5] + 1) % CONFIG.vocab

    def states(tokens):
        embedded = model.embed(tokens)
        state, found = model.body(embedded)[0], []
        for module in model.later:
            state = module(state, embedded, *model._positions(embedded))[0]
            found.append(state)
        return found

    with torch.no_grad():
        for one, other in zip(states(ids), states(changed), strict=True):
            difference = (one - other).abs().amax(dim=2)[0]
            assert difference[:5].max() < 1e-12 and difference[5:].min() > 1e-8


def test_sizes():
    with_two, without = NativeSpec.of("two", CONFIG), NativeSpec.of("none", replace(CONFIG, mtp=0))
    hidden, layer = CONFIG.hidden, sum(p.numel() for p in model_of(CONFIG).layers[0].parameters())
    assert with_two.num_parameters() - without.num_parameters() == 2 * (
        layer + 3 * hidden + 2 * hidden * hidden
    )
    three = NativeSpec.of("three", replace(CONFIG, layers=3))
    more = with_two.model_flops_per_token(64) - without.model_flops_per_token(64)
    per_layer = three.model_flops_per_token(64) - with_two.model_flops_per_token(64)
    assert more == 2 * (per_layer + 6 * (2 * hidden * hidden + CONFIG.vocab * hidden))
    assert with_two.shrunk().config.mtp == 1 and without.shrunk().config.mtp == 0


def test_text():
    assert parse_model("moe:layers=2,hidden=32,heads=4,vocab=64,mtp=1").config.mtp == 1
    with pytest.raises(AutoparError, match="mtp=-1 must be at least 1"):
        replace(CONFIG, mtp=-1)
