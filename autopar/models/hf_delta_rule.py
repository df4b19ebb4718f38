"""Gated delta rules of Hugging Face models, as in Qwen3-Next, captured as eager PyTorch computes them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from torch import nn

_RULE, _ASKS = "torch_chunk_gated_delta_rule", "is_torchdynamo_exporting"


@contextlib.contextmanager
def triangular_solves(model: nn.Module) -> Iterator[None]:
    """Within the block, torch.export sees the triangular solves that eager PyTorch runs.

    For export transformers writes each solve out row by row, since some targets lack the op.  That
    is 64 updates in place a layer: capture takes minutes, and the graph has thousands of ops.
    """
    files = {sys.modules[type(module).__module__] for module in model.modules()}
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
