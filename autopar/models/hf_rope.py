"""Rotary embeddings of transformers whose frequencies depend on the length of the batch."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import AutoparError

GROWING = "dynamic"
SWITCHING = "longrope"


def prepare_rope(model: nn.Module, has_positions: bool) -> None:
    """Make rotary embeddings of types 'dynamic' and 'longrope' choose their frequencies without
    keeping the choice in attributes, *in place*. `has_positions`: the batch may have position_ids.

    Without them a model counts 0, 1, 2, ..., and the number of positions decides. Otherwise those of
    type 'longrope' choose by the largest position of the batch, as transformers do. Those of type
    'dynamic' are then refused where they run.
    """
    module: Any
    for module in model.modules():
        if _plain_forward(module) is not None and (
            _is_scaled(module) or any(map(_follows_length, _types(module)))
        ):
            forward = _by_positions if has_positions else _by_length
            module.forward = types.MethodType(forward, module)


def check_lengths(model: nn.Module, lengths: Sequence[int]) -> None:
    """Raise AutoparError if a batch that is filled up to the next of `lengths` (ascending) would
    have other frequencies than the batch by itself.
    """
    for module in model.modules():
        if _plain_forward(module) is None:
            continue
        for layer_type, kind in _by_layer_type(module).items():
            if not _follows_length(kind):
                continue
            original = _original(module, kind, layer_type)
            if lengths[-1] <= original or (kind == SWITCHING and original in lengths):
                continue
            below = [length for length in lengths if length <= original]
            up_to = f"batches of at most {original} positions"
            remedy = (
                f"add {original} to buckets"
                if kind == SWITCHING
                else f"leave buckets out and train on batches of one length, or give {up_to}"
                + (f" and buckets={tuple(below)}" if below else "")
            )
            raise AutoparError(
                f"buckets fill batches up to {' or '.join(map(str, lengths))} positions, and rotary embeddings of type {kind!r} have other "
                f"frequencies {'for' if kind == SWITCHING else 'for each number of'} more than {original} positions: {remedy}"
            )


def _plain_forward(module: nn.Module) -> Callable | None:
    """The forward of a rotary embedding without the decorator that changes its frequencies. None
    for any other module.
    """
    function: Any = type(module).forward
    while (inner := getattr(function, "__wrapped__", None)) is not None:
        if function.__code__.co_filename.endswith("modeling_rope_utils.py"):
            return inner
        function = inner
    return None


def _follows_length(kind: str) -> bool:
    return GROWING in kind or kind == SWITCHING


def _by_layer_type(module: Any) -> dict[str | None, str]:
    """The types of a rotary embedding by type of layer: one for None if all layers share it."""
    kind = getattr(module, "rope_type", None)
    if isinstance(kind, dict):
        return {name: each for name, each in kind.items() if isinstance(each, str)}
    return {None: kind} if isinstance(kind, str) else {}


def _types(module: Any) -> list[str]:
    return list(_by_layer_type(module).values())


def _original(module: Any, kind: str, layer_type: str | None) -> int:
    """The number of positions up to which a rotary embedding has its first frequencies."""
    if kind != SWITCHING:
        return int(module.original_max_seq_len)
    parameters = module.config.rope_parameters
    if layer_type is not None:
        parameters = parameters[layer_type]
    return int(parameters["original_max_position_embeddings"])


def _by_length(self: Any, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
    """Forward of a rotary embedding for positions 0, 1, 2, ..., as many as `position_ids` has."""
    if position_ids.dim() > 2:  # a model that also counts the places in images
        return _by_positions(self, x, position_ids, layer_type)
    length, (kind, prefix, _) = int(position_ids.shape[-1]), _named(self, layer_type)
    if _is_scaled(self):
        return _scaled(self, x, position_ids, length)
    if kind == SWITCHING:
        short = length <= _original(self, kind, layer_type)
        found = _short(self, prefix) if short else _long(self, layer_type, x.device)
        return _with(self, x, position_ids, layer_type, found)
    if GROWING in kind:
        return _with(self, x, position_ids, layer_type, *_grown(self, length, layer_type, x.device))
    return _with(self, x, position_ids, layer_type)


def _by_positions(self: Any, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
    """Forward of a rotary embedding that chooses by the largest of `position_ids`. Raises
    AutoparError if its type is 'dynamic'.
    """
    kind, prefix, _ = _named(self, layer_type)
    if _is_scaled(self):
        return _scaled(self, x, position_ids, position_ids.max() + 1)
    if GROWING in kind:
        remedy = (
            "give the model rope_type='yarn' or another type that does not follow the length"
            if position_ids.dim() > 2
            else "give example_inputs as a mapping without position_ids, so that the model counts 0, 1, 2, ..."
        )
        raise AutoparError(
            f"rotary embeddings of type {kind!r} choose their frequencies by the largest number in position_ids, in this batch or an "
            f"earlier one, which is not known before training: {remedy}"
        )
    if kind != SWITCHING:
        return _with(self, x, position_ids, layer_type)
    is_long = position_ids.max() + 1 > _original(self, kind, layer_type)
    found = torch.where(is_long, _long(self, layer_type, x.device), _short(self, prefix))
    return _with(self, x, position_ids, layer_type, found)


def _is_scaled(module: Any) -> bool:
    """Whether cosines get another factor beyond some length (Phi-3.5-MoE)."""
    code: Any = getattr(_plain_forward(module), "__code__", None)
    return code is not None and "long_mscale" in code.co_consts and module.rope_type != "default"


def _scaled(self: Any, x: Tensor, position_ids: Tensor, length: Any) -> Any:
    """Forward of an embedding with such a factor. Its frequencies are the short ones."""
    own = self.config.rope_parameters
    long, short = own["long_mscale"], own["short_mscale"]
    is_long = length > own["original_max_position_embeddings"]
    factor = torch.where(is_long, long, short) if isinstance(is_long, Tensor) else (long if is_long else short)  # fmt: skip
    stand_in, config, forward = copy.copy(self), copy.copy(self.config), _plain_forward(self)
    config.rope_parameters = own | {"rope_type": "default"}
    stand_in.config = config
    stand_in.rope_init_fn = lambda _: (self.rope_init_fn(self.config)[0], factor)
    return forward(stand_in, x, position_ids)  # type: ignore[misc]


def _named(module: Any, layer_type: str | None) -> tuple[str, str, dict[str, str]]:
    """(the type, the prefix of buffers, further arguments) for a type of layer."""
    if layer_type is None:
        return module.rope_type, "", {}
    return module.rope_type[layer_type], f"{layer_type}_", {"layer_type": layer_type}


def _with(
    module: Any,
    x: Tensor,
    position_ids: Tensor,
    layer_type: str | None,
    frequencies: Tensor | None = None,
    scaling: float | None = None,
) -> Any:
    """What the undecorated forward of a rotary embedding returns, with these frequencies and this
    factor of its cosines. None: those of the module.
    """
    _, prefix, more = _named(module, layer_type)
    stand_in, forward = copy.copy(module), _plain_forward(module)
    if forward is None:
        raise TypeError(f"{type(module).__name__} is no rotary embedding of transformers")
    stand_in._buffers = dict(module._buffers)
    if frequencies is not None:
        stand_in._buffers[f"{prefix}inv_freq"] = frequencies
    if scaling is not None:
        stand_in.attention_scaling = scaling
    return forward(stand_in, x, position_ids, **more)


def _short(module: Any, prefix: str) -> Tensor:
    return getattr(module, f"{prefix}original_inv_freq")


def _long(module: Any, layer_type: str | None, device: torch.device) -> Tensor:
    """Frequencies of type 'longrope' for more positions than in pretraining, in the dtype of those
    that the module holds, into which transformers copy them.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    _, prefix, more = _named(module, layer_type)
    beyond = _original(module, SWITCHING, layer_type) + 1
    long, _ = ROPE_INIT_FUNCTIONS[SWITCHING](module.config, device, seq_len=beyond, **more)
    return long.to(module._buffers[f"{prefix}inv_freq"].dtype)


def _grown(
    module: Any, length: int, layer_type: str | None, device: torch.device
) -> tuple[Tensor | None, float | None]:
    """(frequencies of type 'dynamic', the factor of cosines). None: that of the module."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind, prefix, more = _named(module, layer_type)
    cached = getattr(module, f"{prefix}max_seq_len_cached", module.max_seq_len_cached)
    if length > cached:  # as a tensor, with which transformers round otherwise than with a number
        seq_len = torch.full((), length, dtype=torch.int64, device=device)
        return ROPE_INIT_FUNCTIONS[kind](module.config, device, seq_len=seq_len, **more)
    if length < module.original_max_seq_len < cached:
        return _short(module, prefix), None
    return None, None
