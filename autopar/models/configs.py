"""Named model configurations. Each group cites where its dimensions were published."""

from __future__ import annotations

from .gpt import GPTConfig
from .llama import LlamaConfig
from .moe import MoEConfig

NativeConfig = GPTConfig | LlamaConfig | MoEConfig

# Radford et al. 2019 and the released 124M checkpoint: BPE vocabulary of 50,257, 1,024 positions.
_GPT2 = {"gpt2-small": GPTConfig(vocab=50257, hidden=768, layers=12, heads=12, max_seq=1024)}

# Narayanan et al., SC21 (arXiv:2104.04473), table 1 and section 5.1 (vocabulary padded to 51,200, sequences of 2,048); the 175B row
# has the dimensions of Brown et al. 2020 (arXiv:2005.14165), table 2.1, whose own vocabulary is 50,257.
_MEGATRON = {
    "gpt3-175b": GPTConfig(vocab=51200, hidden=12288, layers=96, heads=96, max_seq=2048),
    "gpt-1t": GPTConfig(vocab=51200, hidden=25600, layers=128, heads=160, max_seq=2048),
}

# Touvron et al. 2023 (arXiv:2307.09288); ffn widths and norm epsilon from the released config.json files.
_LLAMA2 = {
    "llama2-7b": LlamaConfig(vocab=32000, hidden=4096, layers=32, heads=32, kv_heads=32, ffn=11008),
    "llama2-13b": LlamaConfig(
        vocab=32000, hidden=5120, layers=40, heads=40, kv_heads=40, ffn=13824
    ),
    "llama2-70b": LlamaConfig(vocab=32000, hidden=8192, layers=80, heads=64, kv_heads=8, ffn=28672),
}

# Grattafiori et al. 2024 (arXiv:2407.21783), table 3: 8 key/value heads, theta 500,000, vocabulary 128,000 + 256 special tokens
# (section 3.2 and the released config.json files); pre-training at 8,192 tokens (section 3.4.1).
_LLAMA3 = {
    "llama3-8b": LlamaConfig(128256, 4096, 32, 32, 8, 14336, max_seq=8192, rope_theta=500000.0),
    "llama3-70b": LlamaConfig(128256, 8192, 80, 64, 8, 28672, max_seq=8192, rope_theta=500000.0),
    "llama3-405b": LlamaConfig(
        128256, 16384, 126, 128, 8, 53248, max_seq=8192, rope_theta=500000.0
    ),
}

# Jiang et al. 2024 (arXiv:2401.04088), table 1; rotary theta and balance coefficient from the released config.json.
_MIXTRAL = {
    "mixtral-8x7b": MoEConfig(
        32000, 4096, 32, 32, 8, 14336, max_seq=32768, rope_theta=1e6, router_aux_coef=0.02
    ),
}

# Our own.  The tiny ones serve tests: sizes are kept odd on purpose where a rule could wrongly assume a power of two.
_OWN: dict[str, NativeConfig] = {
    "llama-tiny": LlamaConfig(
        vocab=128, hidden=32, layers=2, heads=4, kv_heads=2, ffn=88, max_seq=64
    ),
    "gpt-tiny": GPTConfig(vocab=127, hidden=48, layers=2, heads=4, max_seq=64),
    "moe-tiny": MoEConfig(
        vocab=128, hidden=32, layers=2, heads=4, kv_heads=2, ffn=24, experts=4, top_k=2, max_seq=64
    ),
    "llama-small": LlamaConfig(
        vocab=256, hidden=320, layers=8, heads=10, kv_heads=5, ffn=864, max_seq=512
    ),  # 9.3 M, bytes
}

CONFIGS: dict[str, NativeConfig] = {**_GPT2, **_MEGATRON, **_LLAMA2, **_LLAMA3, **_MIXTRAL, **_OWN}
