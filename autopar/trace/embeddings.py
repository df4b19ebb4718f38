"""Embedding tables that forward would change."""

from __future__ import annotations

from torch import nn

from autopar.errors import AutoparError


def refuse_max_norm(model: nn.Module) -> None:
    """Raise AutoparError for a table with `max_norm`, whose rows forward rescales in place."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise AutoparError(
                f"{name or 'model'!r} is an {type(module).__name__} with max_norm={module.max_norm:g}: forward would rescale rows of its "
                "weight in place, and autopar changes parameters in the optimizer's step alone. Look the rows up in an Embedding without "
                f"max_norm and rescale them there: rows / (rows.norm({module.norm_type:g}, -1, True) / {module.max_norm:g}).clamp(min=1)"
            )
