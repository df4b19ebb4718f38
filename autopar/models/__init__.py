"""Small reference models, named configurations, and the reader of MODEL arguments. Names are imported
when they are used: the table of named models needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .base import ModelSpec
    from .configs import CONFIGS
    from .hf import hf_example_inputs, is_hf_model, prepare_hf
    from .spec import parse_model

__all__ = ["CONFIGS", "ModelSpec", "hf_example_inputs", "is_hf_model", "parse_model", "prepare_hf"]

_LAZY = {
    "ModelSpec": "base",
    "CONFIGS": "configs",
    "hf_example_inputs": "hf",
    "is_hf_model": "hf",
    "prepare_hf": "hf",
    "parse_model": "spec",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
