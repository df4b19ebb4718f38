"""Bytes on a device other than parameters, gradients and saved tensors: framework buffers, and
gathered or fetched parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

from autopar_cost_models import Device, activation_itemsize, communicator_bytes
from autopar_cost_models.constants import BUCKET_BYTES

from autopar.annotate.class_facts import ModelFacts
from autopar.annotate.class_pricer import ClassPricer
from autopar.annotate.setting import Setting
from autopar.ir.mesh import MeshShape
from autopar.ir.traced import TracedModel
from autopar.ops.dims import at_batch, has_batch


def gathered_row_bytes(traced: TracedModel, setting: Setting) -> int:
    """Bytes that every rank gathers to compute step values (numbers that need the whole batch):
    whole-batch inputs, and step values that have a row per sequence. 0 if the model needs none.
    """
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


def outside_bytes(mesh: MeshShape, shard: int, device: Device) -> int:
    """Bytes of device memory that torch's allocator does not see: what tensors cannot use, and the
    buffers of a communicator for each group in which a rank talks.
    """
    sizes = [*mesh.sizes, *((mesh.sharing_dp(shard), mesh.copies(shard)[0]) if shard else ())]
    groups = sum(size > 1 for size in sizes) if device.generation != "cpu" else 0
    return device.reserved_bytes + communicator_bytes(groups)


def buffer_bytes(setting: Setting, pricers: Sequence[ClassPricer], model: ModelFacts) -> int:
    """Bytes that are the same in all segments: outside torch's allocator, of framework buffers, of
    recomputed attention cores, and of parameters that are gathered or fetched from the host.

    FSDP (Zhao et al. 2023, arXiv:2304.11277, section 3.3): the root unit holds embedding and head.
    They stay gathered, with their whole gradients, through backward. Of the blocks, one is computed
    and the next is prefetched. Frozen parameters are gathered alike if ZeRO shares them out. The
    gradient of one block is being reduced, in the compute dtype and again in fp32.
    """
    found = (
        outside_bytes(setting.mesh, setting.shard, setting.cluster.device)
        + setting.software.workspace_bytes
        + max(sum(p.calls.rerun_bytes.values()) for p in pricers)
    )
    itemsize = activation_itemsize(setting.precision)
    if setting.zero == 3 and setting.software.live_parameters:
        found += itemsize * setting.software.live_parameters
    elif setting.zero == 3 and setting.mesh.pp == 1 and setting.software.root_unit:
        held = [(sum(p.parameters.gathered), p.parameters.frozen_scalars(setting)) for p in pricers]
        are_layers = [p.local.facts.block.is_layer for p in pricers]
        ends = [of for of, is_layer in zip(held, are_layers, strict=True) if not is_layer]
        found += itemsize * sum(2 * trained + frozen for trained, frozen in ends)
        found += max(
            (
                (3 * itemsize + 4) * trained + 2 * itemsize * frozen
                for (trained, frozen), is_layer in zip(held, are_layers, strict=True)
                if is_layer
            ),
            default=0,
        )
    elif setting.offload == "parameters" and not setting.gathers_by_segment:
        found += itemsize * _fetched_scalars(
            pricers, model, ahead=setting.cluster.device.generation != "cpu"
        )
    return found


def _scalars_by_segment(
    pricers: Sequence[ClassPricer], model: ModelFacts
) -> tuple[list[int], list[int]]:
    """Trained scalars per segment, where parameters are gathered or fetched by segment. Returns two
    lists by segment: (read by this segment alone, shared and present in its backward).

    A shared parameter is present from the backward of its last reader to the backward of its first.
    """
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
    """For each class, bytes of gathered parameters, and of gradients being reduced, while one of
    its segments runs backward. All 0 unless the setting gathers parameters by segment.

    A parameter is freed when its gradient is ready. A parameter of several segments stays, with the
    gradient that accumulates. Meanwhile a bucket of gradients of the preceding segment is being
    reduced: in fp32, and in a second copy in sending order. On GPUs the parameters of the next
    segment are prefetched.
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
    frozen = [pricers[index].parameters.frozen_scalars(setting) for index in model.segments]
    for number, own in enumerate(model.segments):
        here = alone[number] + frozen[number]
        ahead = alone[number - 1] + frozen[number - 1] if number and gathers_ahead else 0
        before = number + 1  # in the order of forward
        moving = (
            min(alone[before], BUCKET_BYTES // 4 + largest[model.segments[before]])
            if before < len(model.segments)
            else 0
        )
        found[own] = max(
            found[own], itemsize * (here + ahead + 2 * staying[number]) + 2 * 4 * moving
        )
    return found


def _fetched_scalars(pricers: Sequence[ClassPricer], model: ModelFacts, ahead: bool) -> int:
    """The largest number of trained scalars on a device at once, if segments fetch them from the
    host. With `ahead`, a neighbouring segment is prefetched. Tied parameters stay from the backward
    of the head to the backward of the embedding, which completes their gradient.
    """
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
