"""Bytes on a device that are no parameter, gradient or saved tensor: buffers of the framework, and what is gathered or fetched."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

from autopar_cost_models import activation_itemsize, communicator_bytes
from autopar_cost_models.constants import BUCKET_BYTES

from autopar.annotate.class_facts import ModelFacts
from autopar.annotate.class_pricer import ClassPricer
from autopar.annotate.setting import Setting
from autopar.ir.traced import TracedModel
from autopar.ops.dims import at_batch, has_batch


def gathered_row_bytes(traced: TracedModel, setting: Setting) -> int:
    """Bytes of the inputs whose rows every rank gathers for values of a step, and of the values that have rows: of the whole batch."""
    values = traced.step_values
    if values is None:
        return 0
    batch = setting.micro_batch * setting.num_microbatches * setting.mesh.dp
    tensors = [traced.graph_inputs[name] for name in values.rows] + [
        val for val in values.vals if has_batch(val)
    ]
    return sum(
        val.element_size() * prod(at_batch(size, batch) for size in val.shape) for val in tensors
    )


def buffer_bytes(setting: Setting, pricers: Sequence[ClassPricer], model: ModelFacts) -> int:
    """What no parameter, gradient or saved tensor is: the attention core of a segment while it is run again, buffers of the framework,
    and what is gathered whichever segment runs, if not by segment.

    FSDP (Zhao et al. 2023, arXiv:2304.11277, section 3.3): embedding and head, in the root unit, stay gathered and keep their whole
    gradients through backward; of the blocks one is computed, the next is prefetched, and the gradient of one, in the compute dtype and
    again in fp32, is being reduced.
    """
    mesh, shard = setting.mesh, setting.shard
    sizes = [
        *mesh.sizes,
        *((mesh.sharing_dp(shard), mesh.copies(shard)[0]) if shard else ()),
    ]  # of the groups that a rank talks in
    groups = sum(size > 1 for size in sizes) if setting.cluster.device.generation != "cpu" else 0
    found = (
        communicator_bytes(groups)
        + setting.software.workspace_bytes
        + max(sum(p.calls.rerun_bytes.values()) for p in pricers)
    )
    itemsize = activation_itemsize(setting.precision)
    if setting.zero == 3 and setting.software.live_parameters:
        found += itemsize * setting.software.live_parameters
    elif setting.zero == 3 and setting.mesh.pp == 1 and setting.software.root_unit:
        held = [(sum(p.parameters.gathered), p.local.facts.block.is_layer) for p in pricers]
        found += 2 * itemsize * sum(scalars for scalars, is_layer in held if not is_layer)
        found += max(
            [(3 * itemsize + 4) * scalars for scalars, is_layer in held if is_layer], default=0
        )
    elif setting.offload == "parameters" and not setting.gathers_by_segment:
        found += itemsize * _fetched_scalars(
            pricers, model, ahead=setting.cluster.device.generation != "cpu"
        )
    return found


def _scalars_by_segment(
    pricers: Sequence[ClassPricer], model: ModelFacts
) -> tuple[list[int], list[int]]:
    """By segment, where parameters are gathered or fetched for those that read them: trained scalars of the parameters that it alone reads,
    and of others that are there in its backward: each stays from the backward of the last segment that reads it to that of the first."""
    of_class = [sum(p.parameters.scalars_of.values()) for p in pricers]
    alone, staying = [of_class[index] for index in model.segments], [0] * len(model.segments)
    for places in model.of_several:
        sizes = [
            pricers[model.segments[number]].parameters.scalars_of[node] for number, node in places
        ]
        for (number, _), scalars in zip(places, sizes, strict=True):
            alone[number] -= scalars
        for number in range(places[0][0], places[-1][0] + 1):
            staying[number] += sizes[0]
    return alone, staying


def gathered_bytes(
    setting: Setting, pricers: Sequence[ClassPricer], model: ModelFacts
) -> list[int]:
    """By class, bytes of what is gathered while a segment runs its backward, and of gradients that are on their way.

    A parameter is freed when its gradient is there; one of several segments stays with its gradient, which adds up.  Meanwhile a bucket of
    gradients of the segment before is being reduced, in fp32 and once more in the order that is sent.  On GPUs the parameters of the
    segment that comes next are on their way.
    """
    found = [0] * len(pricers)
    if not setting.gathers_by_segment:
        return found
    itemsize, gathers_ahead = (
        activation_itemsize(setting.precision),
        setting.cluster.device.generation != "cpu",
    )
    alone, staying = _scalars_by_segment(pricers, model)
    largest = [max(p.parameters.gathered, default=0) for p in pricers]
    for number, own in enumerate(model.segments):
        ahead = alone[number - 1] if number and gathers_ahead else 0
        before = number + 1  # in the order of forward
        moving = (
            min(alone[before], BUCKET_BYTES // 4 + largest[model.segments[before]])
            if before < len(model.segments)
            else 0
        )
        found[own] = max(
            found[own], itemsize * (alone[number] + ahead + 2 * staying[number]) + 2 * 4 * moving
        )
    return found


def _fetched_scalars(pricers: Sequence[ClassPricer], model: ModelFacts, ahead: bool) -> int:
    """The most parameters that lie on a device at once where segments fetch them from the host: those of one segment and, where they are
    fetched `ahead`, of a neighbour.  Tied ones stay from the head's backward to the embedding's, which makes their gradient whole."""
    alone, staying = _scalars_by_segment(pricers, model)
    found = [own + there for own, there in zip(alone, staying, strict=True)]
    pairs = (
        [
            sum(own) + max(there)
            for own, there in zip(pairwise(alone), pairwise(staying), strict=True)
        ]
        if ahead
        else []
    )
    return max(found + pairs)
