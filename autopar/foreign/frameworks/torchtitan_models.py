"""Models of torchtitan by name and flavor."""

from __future__ import annotations

from autopar.ir.model_shape import ModelShape

FLAVORS: dict[tuple[str, str], ModelShape] = {
    ("llama3", "8b"): ModelShape(32, 4096, 32, 8, 128, 14336, 128256, gated=True),
    ("llama3", "70b"): ModelShape(80, 8192, 64, 8, 128, 28672, 128256, gated=True),
    ("llama3", "405b"): ModelShape(126, 16384, 128, 8, 128, 53248, 128256, gated=True),
    ("llama2", "7b"): ModelShape(32, 4096, 32, 32, 128, 11008, 32000, gated=True),
    ("llama2", "13b"): ModelShape(40, 5120, 40, 40, 128, 13824, 32000, gated=True),
    ("llama2", "70b"): ModelShape(80, 8192, 64, 8, 128, 28672, 32000, gated=True),
    ("qwen3", "0.6b"): ModelShape(28, 1024, 16, 8, 128, 3072, 151936, gated=True, tied=True),
    ("qwen3", "1.7b"): ModelShape(28, 2048, 16, 8, 128, 6144, 151936, gated=True, tied=True),
    ("qwen3", "8b"): ModelShape(36, 4096, 32, 8, 128, 12288, 151936, gated=True),
    ("qwen3", "14b"): ModelShape(40, 5120, 40, 8, 128, 17408, 151936, gated=True),
    ("qwen3", "32b"): ModelShape(64, 5120, 64, 8, 128, 25600, 151936, gated=True),
    ("qwen3", "30b-a3b"): ModelShape(
        48, 2048, 32, 4, 128, 6144, 151936, experts=128, top_k=8, moe_ffn=768, gated=True
    ),
    ("deepseek_v3", "16b"): ModelShape(
        27,
        2048,
        16,
        16,
        128,
        10944,
        102400,
        experts=64,
        top_k=6,
        moe_ffn=1408,
        shared_ffn=2816,
        first_dense=1,
        gated=True,
        latent=(0, 512, 128, 64, 128),
    ),
    ("deepseek_v3", "671b"): ModelShape(
        61,
        7168,
        128,
        128,
        128,
        18432,
        129280,
        experts=256,
        top_k=8,
        moe_ffn=2048,
        shared_ffn=2048,
        first_dense=3,
        gated=True,
        latent=(1536, 512, 128, 64, 128),
    ),
}
"""Dimensions by model and flavor: those of the models' published config.json files."""
