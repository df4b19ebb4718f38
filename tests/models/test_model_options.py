"""Options of the reference models against formulas of their own: ALiBi, windows, parallel blocks, written-out and latent attention."""

from __future__ import annotations

import pytest
import torch

from autopar.errors import AutoparError
from autopar.models import parse_model
from autopar.models.base import NativeSpec
from autopar.models.common import alibi_bias, causal_mask
from autopar.models.gpt import GPT, GPTConfig
from autopar.models.llama import LlamaConfig
from autopar.models.mla import LatentAttention, MLADims
from autopar.models.moe import MoEConfig
from autopar.verify.verify import verify

SMALL = {"vocab": 67, "hidden": 48, "layers": 2, "heads": 6, "max_seq": 32}
VARIANTS = {
    "alibi": GPTConfig(**SMALL, positions="alibi", fused_attention=False),
    "windowed parallel block": GPTConfig(
        **SMALL, positions="none", window=5, parallel_block=True, activation="relu2"
    ),
    "alternating windows": LlamaConfig(
        **SMALL, kv_heads=3, ffn=72, head_width=16, window=5, window_every=2
    ),
    "latent attention": MoEConfig(
        **(SMALL | {"layers": 3}),
        kv_heads=6,
        ffn=24,
        experts=4,
        shared_ffn=24,
        first_dense=1,
        dense_ffn=40,
        mla=MLADims(24, 16, 8, 8, 8),
        mtp=2,
    ),
}


def logits_of(config, seed=0) -> torch.Tensor:
    torch.manual_seed(seed)
    model = NativeSpec.of("test", config).build("cpu", torch.float64).eval()
    return model(torch.arange(20).view(2, 10) % config.vocab)


@pytest.mark.parametrize(
    "options", [{}, {"positions": "alibi"}, {"window": 4}, {"positions": "alibi", "window": 3}]
)
def test_written_out_attention_equals_the_fused_one(options):
    fused, written = (
        logits_of(GPTConfig(**SMALL, **options, fused_attention=kind)) for kind in (True, False)
    )
    torch.testing.assert_close(fused, written, rtol=0, atol=1e-12)


def test_slopes_are_those_of_the_paper():
    def slopes(heads: int) -> list[float]:
        return alibi_bias(heads, 2, torch.zeros(1, dtype=torch.float64))[:, 0, 1].tolist()

    assert slopes(8) == [2.0**-i for i in range(1, 9)]
    assert slopes(12) == pytest.approx(
        [2.0**-i for i in range(1, 9)] + [2.0**-0.5, 2.0**-1.5, 2.0**-2.5, 2.0**-3.5]
    )


def test_masks():
    assert causal_mask(4, 0, torch.zeros(1)).tolist() == torch.ones(4, 4).tril().bool().tolist()
    assert causal_mask(5, 2, torch.zeros(1)).sum(dim=1).tolist() == [1, 2, 2, 2, 2]


def test_a_window_hides_what_is_before_it():
    for config in (
        GPTConfig(**SMALL, positions="none", window=3),
        LlamaConfig(**SMALL, kv_heads=6, ffn=24, window=3),
    ):
        torch.manual_seed(0)
        model = NativeSpec.of("test", config).build("cpu", torch.float64).eval()
        ids = torch.arange(12).view(1, 12)
        changed = ids.clone()
        changed[0, 0] = 50
        moved = (model(ids) - model(changed)).abs().amax(dim=2)[0]
        assert (moved[:5] > 0).all() and (
            moved[5:] == 0
        ).all()  # two layers reach 2 positions back each


def test_a_parallel_block_has_one_norm():
    assert GPT(GPTConfig(**SMALL, parallel_block=True)).blocks[0].mlp_norm is None
    assert (
        NativeSpec.of("a", GPTConfig(**SMALL)).num_parameters()
        - NativeSpec.of(
            "b", GPTConfig(**SMALL, parallel_block=True, positions="none")
        ).num_parameters()
        == 2 * 2 * 48 + 32 * 48
    )


def test_latent_attention_by_its_definition():
    torch.manual_seed(0)
    dims = MLADims(24, 16, 8, 4, 6)
    layer = LatentAttention(32, 3, dims, 1e-6).double()
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    cos, sin = torch.randn(2, 5, 4, dtype=torch.float64)

    def turned(t):
        return t * cos + torch.cat((-t[..., 2:], t[..., :2]), dim=-1) * sin

    q = layer.q_up(layer.q_norm(layer.q_down(x))).view(2, 5, 3, 12)
    latent = layer.kv_norm(layer.kv_down(x))
    k, v, shared = (
        layer.k_up(latent).view(2, 5, 3, 8),
        layer.v_up(latent).view(2, 5, 3, 6),
        turned(layer.k_rotary(x)),
    )
    outs = []
    for head in range(3):
        scores = q[:, :, head, :8] @ k[:, :, head].mT + turned(q[:, :, head, 8:]) @ shared.mT
        scores = (scores / 12**0.5).masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf"))
        outs.append(scores.softmax(dim=2) @ v[:, :, head])
    torch.testing.assert_close(layer(x, cos, sin), layer.o_proj(torch.cat(outs, dim=2)))


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_shrink(name):
    shrunk = NativeSpec.of(name, VARIANTS[name]).shrunk()
    assert shrunk.build("cpu")(**shrunk.example_inputs(2, 16, "cpu")).isfinite()


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.slow
def test_variants_train_exactly_in_parallel(name):
    report = verify(NativeSpec.of(name, VARIANTS[name]), 2, {"tp": 2})
    assert report.exact, report


def test_keys_of_the_text_form():
    gpt = parse_model(
        "gpt:layers=2,hidden=48,heads=6,vocab=67,positions=alibi,window=9,tied=false,parallel_block=true"
    ).config
    assert (gpt.positions, gpt.window, gpt.tie_embeddings, gpt.parallel_block) == (
        "alibi",
        9,
        False,
        True,
    )
    text = "moe:layers=3,hidden=48,heads=4,vocab=67,head_dim=16,experts=4,first_dense=1,dense_ffn=96,window=5,window_every=2"
    moe = parse_model(text).config
    assert (moe.head_dim, moe.first_dense, moe.dense_ffn, moe.window, moe.window_every) == (
        16,
        1,
        96,
        5,
        2,
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "gpt:layers=2,hidden=48,heads=6,vocab=67,positions=lunar",
            "positions='lunar' is not known",
        ),
        (
            "gpt:layers=2,hidden=48,heads=6,vocab=67,tied=perhaps",
            "tied='perhaps' must be true or false",
        ),
        ("llama:layers=2,hidden=48,heads=6,vocab=67,head_dim=7", "head_dim=7 is odd"),
        (
            "moe:layers=2,hidden=48,heads=6,vocab=67,first_dense=2,dense_ffn=8",
            "first_dense=2 must be at least 0 and below layers=2",
        ),
        ("moe:layers=2,hidden=48,heads=6,vocab=67,first_dense=1", "dense_ffn=0 must be at least 1"),
    ],
)
def test_wrong_options_are_explained(text, message):
    with pytest.raises(AutoparError, match=message):
        parse_model(text)
