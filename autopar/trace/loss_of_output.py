"""What of a batch goes to forward and what to loss_fn, and which scalar of their results is the
loss.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import AutoparError
from autopar.trace.refusals import shape_text

_TARGETS = ("labels", "targets", "target", "label")


def target_name(names: tuple[str, ...]) -> str:
    """The entry of a batch that loss_fn gets: the one with a usual name, else the last one."""
    return next((name for name in _TARGETS if name in names), names[-1])


def arguments_of(
    model: nn.Module, entries: Mapping[str, Any], keyword: bool, target: str
) -> dict[str, Any]:
    """The entries of a batch that forward of `model` gets: all but `target`, and this too if forward
    cannot do without. `keyword`: they are passed by name. `target` is '' without loss_fn.

    Raises AutoparError for entries by names that forward does not take.
    """
    parameters = inspect.signature(model.forward).parameters
    required = {
        name: each
        for name, each in parameters.items()
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    }
    needed = target in required if keyword else len(required) >= len(entries)
    found = {name: value for name, value in entries.items() if name != target or needed}
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    if keyword and not takes_all and (more := [name for name in found if name not in parameters]):
        raise AutoparError(
            f"forward of {type(model).__name__} takes {', '.join(parameters)}, and the batch has {more[0]!r} besides. Leave it out of the "
            f"example and of each batch, as {{k: v for k, v in batch.items() if k != {more[0]!r}}}"
        )
    return found


def loss_of(
    output: Any, source: str, with_loss_fn: bool, notes: list[str], trains: bool = True
) -> Tensor:
    """The loss in what forward or loss_fn returned, of no dims. `source` names the function; `trains`:
    the model has something to train. `notes` gets a remark where another entry could be meant.

    It is the result itself, its entry or attribute `loss`, the first entry of a tuple, or the one
    scalar with a gradient in a tuple or list. Tensors of one element count as scalars.

    Raises AutoparError if there is none, or several where none comes first by convention.
    """
    loss = _found(output, source, notes)
    if not isinstance(loss, Tensor) or not _is_single(loss):
        what = (
            f"a tensor of shape ({shape_text(loss)})"
            if isinstance(loss, Tensor)
            else f"a {type(output).__name__}"
        )
        remedy = (
            "end it with .mean() or .sum(), as "
            if with_loss_fn
            else "pass labels in example_inputs so that the model computes its loss, or pass "
        )
        raise AutoparError(
            f"{source} returned {what}, not a scalar loss: {remedy}loss_fn=lambda output, target: ..."
        )
    if not loss.is_floating_point():
        raise AutoparError(
            f"{source} returned a loss of {loss.dtype}; a loss is a real floating-point number"
        )
    if not loss.requires_grad and trains:
        raise AutoparError(
            f"{source} returned a loss without gradient: was it computed under no_grad, or detached?"
        )
    return loss.reshape(()) if loss.dim() else loss


def _found(output: Any, source: str, notes: list[str]) -> Any:
    if isinstance(output, Mapping):
        return output["loss"] if "loss" in output else _only(output, source)
    if getattr(output, "loss", None) is not None:
        return output.loss
    if isinstance(output, (tuple, list)) and output:
        scalars = {place: entry for place, entry in enumerate(output) if _may_be_loss(entry)}
        if len(scalars) == 1:
            return next(iter(scalars.values()))
        if len(scalars) > 1 and 0 in scalars and isinstance(output, tuple):
            notes.append(
                f"{source} returns {len(scalars)} scalars with a gradient: the first is the loss; loss_fn says otherwise"
            )
            return output[0]
        if scalars:
            raise AutoparError(_ambiguous(source, [f"output[{place}]" for place in scalars]))
        return output[0]
    return output


def _only(output: Mapping, source: str) -> Any:
    """The one scalar with a gradient of a mapping without an entry 'loss'; the mapping itself, which
    is no loss, if there is none. Raises AutoparError for several.
    """
    names = [name for name, entry in output.items() if _may_be_loss(entry)]
    if len(names) > 1:
        raise AutoparError(_ambiguous(source, [f"output[{name!r}]" for name in names]))
    return output[names[0]] if names else output


def _ambiguous(source: str, entries: list[str]) -> str:
    return (
        f"{source} returned {len(entries)} scalars with a gradient, {', '.join(entries)}: say what the loss is made of, for example "
        f"loss_fn=lambda output, target: {' + '.join(entries)}"
    )


def _may_be_loss(entry: Any) -> bool:
    return isinstance(entry, Tensor) and _is_single(entry) and entry.requires_grad


def _is_single(tensor: Tensor) -> bool:
    return all(not isinstance(size, torch.SymInt) and size == 1 for size in tensor.shape)
