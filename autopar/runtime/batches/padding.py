"""Pads batches of any length to a length for which there is a program, without changing the loss.

Padded positions get labels that do not count and token 0, and are masked if the model takes a mask.
In a causal model, earlier positions do not depend on them, nor do positions from which a mask hides
them. The loss counts only valid targets. Some losses do depend on padding: attention to later
positions without a mask, router balance losses, a loss over the last position. To detect these, the
same batch runs with two different padding tokens, and a loss that changes is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.errors import AutoparError
from autopar.ir.calls import op_name
from autopar.ir.traced import TracedModel
from autopar.ops.dims import Call, has_batch
from autopar.ops.experts import ROUTED_EXPERTS
from autopar.ops.values import ops
from autopar.ops.work import positions
from autopar.rewrite.program import Program
from autopar.runtime.batches.step_values import evaluate_values

IGNORED = -100
"""The label that cross-entropy ignores by default."""

_REFUSED = "batches of this model cannot be filled up to a longer length: {}; leave out buckets"

_TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-7, torch.bfloat16: 0.0, torch.float16: 0.0}
"""The largest relative difference of the loss that counts as rounding, by dtype. The sums are the
same, so it is small.
"""


@dataclass(frozen=True, slots=True)
class Padding:
    """How batches are padded for one program: to `length` positions, along the dims `dims[name]` of
    each input. `targets` are inputs with labels, which are padded with -100. `masks` are the other
    inputs that say which positions count in the loss; they are padded with 0.
    """

    length: int
    dims: dict[str, tuple[int, ...]]
    targets: frozenset[str]
    masks: frozenset[str] = frozenset()

    @staticmethod
    def of(program: Program) -> Padding:
        """How to pad batches for a program. Raises AutoparError if padding would always change the
        loss: it is no mean over valid targets, or what is padded counts.
        """
        length, values = positions(program.whole_inputs.values()), program.step_values
        vals = {
            node.target: program.whole_inputs[node.target]
            for node in (() if values is None else values.local.nodes)
            if node.op == "placeholder" and node.meta["of"] == "input"
        }
        counted = {name: val for name, val in vals.items() if has_batch(val)}
        if (
            values is None
            or not counted
            or values.rows
            or values.tensors
            or not values.adds_up_numbers
        ):
            reason = "its loss is no mean over valid targets, which labels of -100 could leave out"
            raise AutoparError(_REFUSED.format(reason))
        targets = frozenset(
            name
            for name, val in counted.items()
            if values.labels >= 0
            and "mask" not in name
            and not val.is_floating_point()
            and val.dtype != torch.bool
        )
        dims = {
            name: tuple(d for d in range(1, val.dim()) if val.shape[d] == length)
            for name, val in program.whole_inputs.items()
        }
        ignored = {
            name: torch.full(
                [2, *val.shape[1:]], IGNORED if name in targets else 0, dtype=val.dtype
            )
            for name, val in counted.items()
        }
        others = {
            name: torch.ones(val.shape, dtype=val.dtype)
            for name, val in vals.items()
            if name not in counted
        }
        parts = evaluate_values(values.local, {"input": ignored | others}, 2, torch.device("cpu"))
        if any(part.any() for part in parts):
            reason = f"labels of {IGNORED} count in its loss; leave ignore_index of the cross-entropy at {IGNORED}"
            if not targets:
                reason = (
                    f"what counts in its loss ({', '.join(sorted(counted))}) does so where it is 0"
                )
            raise AutoparError(_REFUSED.format(reason))
        return Padding(length, dims, targets, frozenset(counted) - targets)

    def length_of(self, tensors: Mapping[str, Tensor]) -> int:
        """The positions of a batch before padding; `length` if the batch has no dim of
        positions.
        """
        given = (
            tensors[name].shape[dims[0]]
            for name, dims in self.dims.items()
            if dims and tensors[name].dim() > dims[0]
        )
        return next(given, self.length)

    def fill_up(self, tensors: Mapping[str, Tensor], token: int = 0) -> dict[str, Tensor]:
        """The batch, by name, with positions added at its end up to `length`. There, labels are
        -100, masks and position ids are 0, and other inputs are `token`.
        """
        short, found = self.length_of(tensors), {}
        for name, tensor in tensors.items():
            shape, kept = list(tensor.shape), [slice(None)] * tensor.dim()
            for dim in self.dims[name]:
                if dim < tensor.dim() and shape[dim] == short:
                    shape[dim], kept[dim] = self.length, slice(short)
            is_mask = (
                name in self.masks
                or tensor.dtype == torch.bool
                or any(word in name for word in ("mask", "position"))
            )
            plain = 0 if is_mask else token
            found[name] = tensor.new_full(shape, IGNORED if name in self.targets else plain)
            found[name][tuple(kept)] = tensor
        return found


def check_model(traced: TracedModel) -> None:
    """Raise AutoparError if padding must change a model's loss: forward changes buffers, or experts
    have a capacity factor. Also for rows that are read together.
    """
    calls = [Call(node) for block in traced.classes for node in ops(block.graph)]
    reason = ""
    if traced.together > 1:
        reason = f"forward reads {traced.together} consecutive rows together"
    elif traced.updates:
        reason = f"forward changes buffers ({next(iter(traced.updates))}, ...), by statistics over all positions"
    elif any(
        op_name(call.node) == ROUTED_EXPERTS and call.arg("capacity_factor") for call in calls
    ):
        reason = "its experts have a capacity factor, which counts all positions"
    if reason:
        raise AutoparError(_REFUSED.format(reason))


def check_alike(one: float, other: float, dtype: torch.dtype, given: int, length: int) -> None:
    """Raise AutoparError if the losses `one` and `other` of one batch, with two different padding
    tokens, differ by more than rounding in `dtype`, or are NaN. `given` and `length`, the positions
    before and after padding, are for the message.
    """
    if not abs(one - other) <= _TOLERANCE[dtype] * max(abs(one), abs(other)):
        raise AutoparError(
            f"a batch of {given} positions was filled up to {length}, and its loss depends on what it was filled with ({one:.9g} or "
            f"{other:.9g}). Positions see what follows them, or a loss over all positions (a router's balance) counts them. Give the model "
            "an attention_mask, leave such a loss out, or give batches of a planned length"
        )
