"""The named models that this package builds itself, as configurations. `published.yaml` has their
dimensions.
"""

from __future__ import annotations

from typing import Any

from .gpt import GPTConfig
from .llama import LlamaConfig
from .mla import MLADims
from .moe import MoEConfig
from .published import PublishedModel, published_models

NativeConfig = GPTConfig | LlamaConfig | MoEConfig

FAMILY_CONFIGS: dict[str, type[NativeConfig]] = {
    "gpt": GPTConfig,
    "llama": LlamaConfig,
    "moe": MoEConfig,
}
"""The configurations of this package's families, by name."""


def _config(model: PublishedModel) -> NativeConfig:
    dims: dict[str, Any] = {"max_seq": model.seq} | dict(model.dims)
    if "mla" in dims:
        dims["mla"] = MLADims(**dims["mla"])
    return FAMILY_CONFIGS[model.kind](**dims)


CONFIGS: dict[str, NativeConfig] = {
    name: _config(model)
    for name, model in published_models().items()
    if model.kind in FAMILY_CONFIGS and not model.is_hf
}
