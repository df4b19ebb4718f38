"""Models by name: published dimensions and parameter counts, from `published.yaml`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from autopar.files import shipped_yaml

_FILE = Path(__file__).with_name("published.yaml")
_LAYERS = (
    ("layers",),
    ("num_hidden_layers",),
    ("n_layer",),
    ("encoder_layers", "decoder_layers"),
    ("depths",),
    ("double", "single"),
)
"""Names of the numbers of layers in dimensions; the first that all occur are meant."""

ALIASES = {
    "llama3.1-8b": "llama3-8b",
    "llama3.1-70b": "llama3-70b",
    "llama3.1-405b": "llama3-405b",
    "llama3.3-70b": "llama3-70b",
    "deepseek-r1": "deepseek-v3",
    "granite3.1-2b": "granite3-2b",
    "granite3.1-8b": "granite3-8b",
}
"""Other names of models with the same dimensions."""


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """A named model, as `published.yaml` has it.

    Attributes:
        name: its name.
        kind: a family of this package ('gpt', 'llama', 'moe', 'dit', 'flux'), or a model_type of transformers.
        is_hf: whether transformers builds it.
        dims: the fields of the family's configuration, or the contents of a config.json without
            model_type.
        seq: tokens of a sequence in pre-training; 1 for images.
        source: where dimensions and parameters were published.
        parameters: the published number of parameters. None for models of this package.
        without_embeddings: whether that number leaves out embeddings and the head.
        repeats: the number of layers after which their structure repeats; 0 if this is not known.
        different: the number of first layers that differ from those that repeat.
    """

    name: str
    kind: str
    is_hf: bool
    dims: Mapping[str, Any] = field(hash=False)
    seq: int
    source: str
    parameters: float | None
    without_embeddings: bool = False
    repeats: int = 0
    different: int = 0

    @property
    def layers(self) -> str:
        """The number of layers as text; '32 + 32' for encoder and decoder. '' where the dimensions
        are the family's defaults.
        """
        for names in _LAYERS:
            if all(name in self.dims for name in names):
                numbers = [self.dims[name] for name in names]
                flat = numbers[0] if isinstance(numbers[0], list) else numbers
                return (
                    str(sum(flat)) if isinstance(numbers[0], list) else " + ".join(map(str, flat))
                )
        return ""


@lru_cache(maxsize=1)
def published_models() -> dict[str, PublishedModel]:
    """All named models by name, in the order of the file. The dict is shared: do not modify it."""
    groups = shipped_yaml(_FILE)
    return {
        name: _model(name, group, dims)
        for group in groups
        for name, dims in group["models"].items()
    }


def _model(name: str, group: Mapping[str, Any], own: Mapping[str, Any] | None) -> PublishedModel:
    dims = dict(group.get("common", {})) | dict(own or {})
    parameters = dims.pop("parameters", None)
    return PublishedModel(
        name=name,
        kind=group.get("hf") or group["family"],
        is_hf="hf" in group,
        dims=dims,
        seq=group["seq"],
        source=group["source"],
        parameters=parameters,
        without_embeddings=group.get("without_embeddings", False),
        repeats=group.get("repeats", 0),
        different=group.get("different", 0),
    )
