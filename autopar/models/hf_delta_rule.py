"""Capture of gated delta rules in Hugging Face models such as Qwen3-Next, computed as in eager
PyTorch.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from torch import nn

_RULE, _ASKS = "torch_chunk_gated_delta_rule", "is_torchdynamo_exporting"


@contextlib.contextmanager
def triangular_solves(model: nn.Module) -> Iterator[None]:
    """A context in which torch.export captures the triangular solves of gated delta rules in
    `model` as eager PyTorch runs them. It patches the files of transformers that define its
    modules.

    For export, transformers replaces each solve by row updates, since some targets lack the op.
    That is 64 in-place updates per layer: capture takes minutes, and the graph has thousands of
    ops.
    """
    files = {sys.modules.get(type(module).__module__) for module in model.modules()} - {None}
    changed = {
        file: getattr(file, _ASKS)
        for file in files
        if hasattr(file, _RULE) and hasattr(file, _ASKS)
    }
    for file in changed:
        setattr(file, _ASKS, lambda: False)
    try:
        yield
    finally:
        for file, asks in changed.items():
            setattr(file, _ASKS, asks)
