"""The cost of a placement, computed directly from the definition. No solver is involved, so this
can check one.

    work   = num_microbatches * (sum over classes count * (forward + backward + conversions) + sum over edges count * conversion)
    host   = what num_microbatches * (sum over classes count * issue) is longer than work
    time   = work + host + sum over classes count * step + fixed_s
    memory = fixed_bytes + sum over classes count * (static + kept) + transient

A value is converted once for each distinct layout that a consumer needs and its producer does not
deliver. The host issues the kernels of a micro-batch beside the device, so it takes the longer of
both. With recomputation, `kept` is the inputs of the class; otherwise it is the saved tensors.
`transient` is the peak of backward: in a segment of class c, its workspace. With recomputation,
what it saves besides its inputs is added. Except in the last segment, what that one has freed by
then is subtracted. Of a group of tied parameters only the first member has static bytes and step
costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import fsum

from autopar.ir.annotated import (
    AnnotatedBlock,
    AnnotatedModel,
    BoundaryEdge,
    Conversion,
    Saved,
    Strategy,
)
from autopar.ir.sharding import AxisLayout

Choices = tuple[dict[str, str], ...]
"""For each class: op name -> strategy name."""


class InconsistentPlacement(ValueError):
    """Raised for choices that no program can run: an op without a choice, an impossible conversion,
    or tied parameters with different placements.
    """


@dataclass(frozen=True, slots=True)
class Priced:
    """The cost of one step on one device. `forward_s` to `host_s` sum to `time_s`; `static_bytes`
    to `fixed_bytes` sum to `memory_bytes`. `communication_s` is what of `time_s` without `fixed_s`
    is communication. The host issues for `issue_s` seconds, and the device waits for it for
    `host_s`. `gradient_bytes` and `optimizer_bytes` are parts of `static_bytes`.
    """

    time_s: float
    memory_bytes: int
    forward_s: float  # strategies, all micro-batches
    backward_s: float  # without what runs again
    recompute_s: float  # what backward runs again of the forward, of strategies and of conversions
    conversion_s: float  # inside segments, forward and backward
    edge_s: float  # between segments
    step_s: float
    fixed_s: float
    host_s: float
    static_bytes: int
    kept_bytes: int  # from forward to backward
    transient_bytes: int
    fixed_bytes: int
    communication_s: float = 0.0  # of all parts but `fixed_s`: what is communication
    issue_s: float = 0.0
    gradient_bytes: int = 0  # of `static_bytes`
    optimizer_bytes: int = 0  # of `static_bytes`

    @property
    def time_parts(self) -> dict[str, float]:
        """Seconds by part (forward, backward, recompute, conversion, edge, step, fixed, and host if
        the device waits for it). They sum to `time_s`.
        """
        parts = ("forward", "backward", "recompute", "conversion", "edge", "step", "fixed")
        return {part: getattr(self, f"{part}_s") for part in parts} | host_part(self.host_s)

    @property
    def device_s(self) -> float:
        """Seconds of a step if the device waited for nothing."""
        return fsum(seconds for part, seconds in self.time_parts.items() if part != "host")

    @property
    def memory_parts(self) -> dict[str, int]:
        """Bytes by part (parameters, gradients, optimizer, kept, transient, fixed). They sum to
        `memory_bytes`.
        """
        return {
            **static_parts(self.static_bytes, self.gradient_bytes, self.optimizer_bytes),
            **{part: getattr(self, f"{part}_bytes") for part in ("kept", "transient", "fixed")},
        }


def host_part(host_s: float) -> dict[str, float]:
    """The part of a step in which devices wait for the host, as a row of a breakdown; {} without."""
    return {"host": host_s} if host_s else {}


def static_parts(static_bytes: int, gradient_bytes: int, optimizer_bytes: int) -> dict[str, int]:
    """Always-resident bytes by part: 'gradients', 'optimizer', and the rest as 'parameters'."""
    parameters = static_bytes - gradient_bytes - optimizer_bytes
    return {"parameters": parameters, "gradients": gradient_bytes, "optimizer": optimizer_bytes}


def price_placement(model: AnnotatedModel, choices: Sequence[Mapping[str, str]]) -> Priced:
    """The cost (`Priced`) of running `model` with the strategies in `choices`: one mapping (op name
    -> strategy name) per class.

    Raises InconsistentPlacement if the choices do not fit together.
    """
    chosen = [_chosen(block, choice) for block, choice in zip(model.classes, choices, strict=True)]
    _check_ties(model, chosen)
    micro = model.num_microbatches
    forward, backward, recompute, conversion, step = [], [], [], [], []
    communication, issue = [], []
    static = gradients = optimizer = kept = 0
    for block, strategies in zip(model.classes, chosen, strict=True):
        conversions = list(_conversions(block, strategies))
        paying: list[Strategy | Conversion] = [*strategies.values(), *conversions]
        forward += [micro * block.count * s.forward_s for s in strategies.values()]
        backward += [micro * block.count * (s.backward_s - s.rerun_s) for s in strategies.values()]
        conversion += [
            micro * block.count * (c.forward_s + c.backward_s - c.rerun_s) for c in conversions
        ]
        recompute += [micro * block.count * c.rerun_s for c in paying]
        step += [block.count * s.step_s for s in strategies.values()]
        static += block.count * sum(s.static_bytes for s in strategies.values())
        gradients += block.count * sum(s.gradient_bytes for s in strategies.values())
        optimizer += block.count * sum(s.optimizer_bytes for s in strategies.values())
        times = micro * block.count
        communication += [times * (c.forward_comm_s + c.backward_comm_s) for c in paying]
        communication += [block.count * s.step_comm_s for s in strategies.values()]
        issue += [
            times * (s.forward_dispatch_s + s.backward_dispatch_s) for s in strategies.values()
        ]
        kept += block.count * _kept_bytes(block, strategies)
    transient = _fullest_moment(model, chosen)
    crossed = list(_edge_conversions(model, chosen))
    edge = [micro * e.count * (c.forward_s + c.backward_s) for e, c in crossed]
    communication += [micro * e.count * (c.forward_comm_s + c.backward_comm_s) for e, c in crossed]
    work_s, issue_s = fsum([*forward, *backward, *recompute, *conversion, *edge]), fsum(issue)
    parts_s = {
        "forward_s": fsum(forward),
        "backward_s": fsum(backward),
        "recompute_s": fsum(recompute),
        "conversion_s": fsum(conversion),
        "edge_s": fsum(edge),
        "step_s": fsum(step),
        "fixed_s": model.fixed_s,
        "host_s": max(issue_s - work_s, 0.0),
    }
    return Priced(
        time_s=fsum(parts_s.values()),
        memory_bytes=static + kept + transient + model.fixed_bytes,
        **parts_s,
        static_bytes=static,
        kept_bytes=kept,
        transient_bytes=transient,
        fixed_bytes=model.fixed_bytes,
        communication_s=fsum(communication),
        issue_s=issue_s,
        gradient_bytes=gradients,
        optimizer_bytes=optimizer,
    )


def _fullest_moment(model: AnnotatedModel, chosen: Sequence[dict[str, Strategy]]) -> int:
    """Peak bytes that backward adds to the kept ones: the largest transient bytes of any class. For
    all classes but that of the model's last segment, what that segment kept is already freed. At
    least 0.
    """
    freed = 0 if model.last is None else _kept_bytes(model.classes[model.last], chosen[model.last])
    moments = (
        transient_bytes(block, strategies.values()) - (freed if index != model.last else 0)
        for index, (block, strategies) in enumerate(zip(model.classes, chosen, strict=True))
    )
    return max([0, *moments])


@dataclass(frozen=True, slots=True)
class SegmentCost:
    """The cost of one segment of a class on one device: seconds of one micro-batch, seconds once a
    step, and bytes.

    Recomputation is part of `backward_s`. `weight_s` is the part of `backward_s` that computes
    gradients of parameters. `late_bytes` is how much more a micro-batch holds between the two parts
    of a split backward than it kept; it may be negative. `again_bytes` is the part of
    `transient_bytes` that is recomputed. `issue_s` is what the host needs to issue forward and
    backward.
    """

    forward_s: float
    backward_s: float
    weight_s: float
    step_s: float
    static_bytes: int
    kept_bytes: int
    transient_bytes: int
    gradient_bytes: int = 0  # of `static_bytes`
    optimizer_bytes: int = 0  # of `static_bytes`
    host_bytes: int = 0
    late_bytes: int = 0
    again_bytes: int = 0
    issue_s: float = 0.0

    @property
    def parted_transient_bytes(self) -> int:
        """Transient bytes of a split backward: `transient_bytes` without the recomputed bytes that
        `late_bytes` already counts.
        """
        return self.transient_bytes - min(self.again_bytes, max(self.late_bytes, 0))


def class_costs(model: AnnotatedModel, choices: Sequence[Mapping[str, str]]) -> list[SegmentCost]:
    """The `SegmentCost` of a segment of each class, in the order of `model.classes`. Layout changes
    inside the segment are included, those between segments are not (`arrivals`). Raises
    InconsistentPlacement if the choices do not fit together.
    """
    chosen = [_chosen(block, choice) for block, choice in zip(model.classes, choices, strict=True)]
    found = []
    for block, strategies in zip(model.classes, chosen, strict=True):
        conversions = _conversions(block, strategies)
        paying: list[Strategy | Conversion] = [*strategies.values(), *conversions]
        own = strategies.values()
        kept = _kept_bytes(block, strategies)
        found.append(
            SegmentCost(
                forward_s=fsum(c.forward_s for c in paying),
                backward_s=fsum(c.backward_s for c in paying),
                weight_s=fsum(s.backward_weight_s for s in own),
                step_s=fsum(s.step_s for s in own),
                static_bytes=sum(s.static_bytes for s in own),
                kept_bytes=kept,
                transient_bytes=transient_bytes(block, own),
                gradient_bytes=sum(s.gradient_bytes for s in own),
                optimizer_bytes=sum(s.optimizer_bytes for s in own),
                host_bytes=sum(s.host_bytes for s in own),
                late_bytes=late_bytes(own) - kept,
                again_bytes=again_bytes(block, own),
                issue_s=fsum(s.forward_dispatch_s + s.backward_dispatch_s for s in own),
            )
        )
    return found


def arrivals(
    model: AnnotatedModel, choices: Sequence[Mapping[str, str]]
) -> dict[tuple[int, int, int, int], tuple[float, float]]:
    """Seconds (forward, backward) of the layout change on each edge between classes that needs one.
    Keys are (source class, its output, target class, its input). Raises InconsistentPlacement if
    one is impossible.
    """
    chosen = [_chosen(block, choice) for block, choice in zip(model.classes, choices, strict=True)]
    return {
        (edge.source, edge.source_output, edge.target, edge.target_input): (
            conversion.forward_s,
            conversion.backward_s,
        )
        for edge, conversion in _edge_conversions(model, chosen)
    }


def fits_together(model: AnnotatedModel, choices: Choices) -> bool:
    """Whether every layout of a placement can be converted to what its readers need, in segments
    and between them.
    """
    try:
        class_costs(model, choices)
        arrivals(model, choices)
    except InconsistentPlacement:
        return False
    return True


def late_bytes(strategies: Iterable[Strategy]) -> int:
    """Bytes that a segment holds from the gradients of its inputs to those of its parameters: the
    `late` tensors of its strategies. These are saved tensors of ops with a parameter, and the
    gradients of their results. Each key counts once.
    """
    return _bytes_of(saved for strategy in strategies for saved in strategy.late)


def transient_bytes(block: AnnotatedBlock, strategies: Iterable[Strategy]) -> int:
    """Peak bytes that backward of one segment of `block` needs besides those kept from forward:
    workspace and what it recomputes.
    """
    return block.workspace_bytes + again_bytes(block, strategies)


def again_bytes(block: AnnotatedBlock, strategies: Iterable[Strategy]) -> int:
    """Bytes of saved tensors that backward of one segment of `block` recomputes, without its
    inputs. 0 if the class does not recompute.
    """
    return saved_bytes(strategies, block.inputs) if block.recompute else 0


def _kept_bytes(block: AnnotatedBlock, strategies: Mapping[str, Strategy]) -> int:
    """Bytes that one segment keeps from forward to backward: only its inputs if the class
    recomputes, otherwise all saved tensors.
    """
    if block.recompute:
        return sum(input_bytes(block, name, strategies[name].outputs[0]) for name in block.inputs)
    return saved_bytes(strategies.values())


def saved_bytes(strategies: Iterable[Strategy], without: Sequence[str] = ()) -> int:
    """Bytes that autograd keeps for one segment: each key once, with the largest size among chosen
    strategies. Keys of the values in `without` are left out.
    """
    return _bytes_of(
        saved for strategy in strategies for saved in strategy.saved if saved.value not in without
    )


def _bytes_of(tensors: Iterable[Saved]) -> int:
    sizes: dict[str, int] = {}
    for saved in tensors:
        sizes[saved.key] = max(sizes.get(saved.key, 0), saved.size_bytes)
    return sum(sizes.values())


def input_bytes(block: AnnotatedBlock, name: str, layout: AxisLayout) -> int:
    """Bytes of the segment input `name` that are kept from forward to backward, in `layout`, in a
    class that recomputes. Raises ValueError if the class has no such size.
    """
    try:
        return block.input_bytes[name][layout]
    except KeyError:
        raise ValueError(
            f"block {block.name} recomputes, but input_bytes has no size for input {name} in layout {layout}"
        ) from None


def _chosen(block: AnnotatedBlock, choice: Mapping[str, str]) -> dict[str, Strategy]:
    names = [op.name for op in block.ops]
    if sorted(names) != sorted(choice):
        odd = sorted(set(names) ^ set(choice))
        raise InconsistentPlacement(
            f"block {block.name} has {len(names)} ops and {len(choice)} choices; only in one of them: {odd}"
        )
    return {op.name: op.strategy(choice[op.name]) for op in block.ops}


def _check_ties(model: AnnotatedModel, chosen: list[dict[str, Strategy]]) -> None:
    for group in model.ties:
        placements = {str(chosen[index][name].outputs[0].value) for index, name in group}
        if len(placements) > 1:
            raise InconsistentPlacement(
                f"tied parameters {group} are one tensor but are placed {sorted(placements)}"
            )


def _conversions(block: AnnotatedBlock, strategies: dict[str, Strategy]) -> Iterator[Conversion]:
    """The layout changes inside one segment, with their costs: one for each value and each layout
    that some reader needs and the producer does not make. Raises InconsistentPlacement for an
    impossible change.
    """
    have = {
        value: layout
        for op in block.ops
        for value, layout in zip(op.outputs, strategies[op.name].outputs, strict=True)
    }
    need = {
        (value, layout): op.name
        for op in block.ops
        for value, layout in zip(op.inputs, strategies[op.name].inputs, strict=True)
    }
    for (value, layout), reader in need.items():
        if have[value] != layout:
            yield _lookup(
                block.values[value].conversions,
                have[value],
                layout,
                f"block {block.name}: value {value} read by {reader}",
            )


def _edge_conversions(
    model: AnnotatedModel, chosen: list[dict[str, Strategy]]
) -> Iterator[tuple[BoundaryEdge, Conversion]]:
    """Each edge whose source and target have different layouts, with the conversion between them.
    Raises InconsistentPlacement for an impossible one.
    """
    for edge in model.edges:
        source, target = model.classes[edge.source], model.classes[edge.target]
        output, entry = source.outputs[edge.source_output], target.inputs[edge.target_input]
        have, need = chosen[edge.source][output].inputs[0], chosen[edge.target][entry].outputs[0]
        if have != need:
            where = f"edge from {source.name}.{output} to {target.name}.{entry}"
            yield edge, _lookup(edge.conversions, have, need, where)


def _lookup(
    conversions: dict[tuple[AxisLayout, AxisLayout], Conversion],
    have: AxisLayout,
    need: AxisLayout,
    where: str,
) -> Conversion:
    if (have, need) not in conversions:
        raise InconsistentPlacement(f"{where}: {have} cannot become {need}")
    return conversions[have, need]
