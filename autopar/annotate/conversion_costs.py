"""Costs of layout changes over tp inside one block class, and which of them a setting allows."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.annotate.call_pricer import least_compute_s
from autopar.annotate.local_class import LocalClass
from autopar.annotate.transfers import Conversions
from autopar.ir.annotated import AnnotatedOp, Conversion
from autopar.ir.sharding import COLLECTIVE_PRIMITIVES, AxisLayout, P, R, transition


def conversion_costs(
    local: LocalClass,
    calls: Sequence[AnnotatedOp],
    name: str,
    have: set[AxisLayout],
    wanted: set[AxisLayout],
) -> Conversions:
    """Prices of all allowed layout changes over tp of the value `name`, from a layout of `have` to
    one of `wanted`, by (from, to). `calls` are the priced calls of the class.

    The sequence-parallelism pin requests Megatron's layout. Weights stay as they are stored, and
    their gradients are summed once a step. What a product shards along features stays sharded, up
    to attention or to the product that sums over those features.
    """
    facts, pricing = local.facts, local.pricing
    found = pricing.conversions(local.bytes[name], have, wanted, facts.grads[name])
    if name in facts.weights:
        if not local.setting.sequence_parallel:
            return found
        return {
            pair: price
            for pair, price in found.items()
            if not set(COLLECTIVE_PRIMITIVES) & set(transition(*pair))
        }
    readers = [op for op in calls if name in op.inputs]
    found = _gathered_in_fp8(local, name, readers, found)
    beside = _beside(local, calls, name, readers)
    found = {pair: pricing.overlapped(price, *beside) for pair, price in found.items()}
    found = _pinned(local, name, have | wanted, found)
    if name in local.rerun.gathered.values():
        again = _gathered_again(local, name, readers)
        found = {  # where it is made whole, the op that makes it has the seconds
            (a, b): price.gathering(again) if b.value.kind == "R" and a.value.kind != "R" else price
            for (a, b), price in found.items()
        }
    if name in local.rerun.values:  # a sum whose result is kept is not made again
        sums = local.rerun.sums
        found = {
            (a, b): price if sums and a == P else price.rerun() for (a, b), price in found.items()
        }
    return found


def _gathered_again(local: LocalClass, name: str, readers: Sequence[AnnotatedOp]) -> float:
    """Seconds in which backward gathers a value again over tp, beyond the products that hide it:
    those of the gradient of the value.
    """
    hidden_s = 0.0
    if local.setting.software.late_gradients:
        hidden_s = sum(
            min(s.backward_s - s.backward_comm_s - s.backward_weight_s for s in op.strategies)
            for op in readers
            if local.rerun.gathered.get(op.name) == name
        )
    return local.pricing.exposed_s(max(hidden_s, 0.0), local.gathered_again_s(name, R))


def boundary_layouts(local: LocalClass, name: str, layouts: set[AxisLayout]) -> set[AxisLayout]:
    """Those of `layouts` that the sequence-parallelism pin allows for a value between segments.
    Values with gradients are sharded along positions if it is on, and whole if it is off. Numbers,
    such as the loss of a router, may be partial.
    """
    pin = local.setting.sequence_parallel
    if pin is None:
        return layouts
    positions = {x for x in layouts if local.along_positions(name, x)}
    if not local.facts.grads[name] or not local.facts.tensors[name].dim():
        return layouts if pin else layouts - positions
    return (positions if pin else layouts & {R}) or layouts


def _pinned(
    local: LocalClass, name: str, layouts: set[AxisLayout], found: Conversions
) -> Conversions:
    """Those of the layout changes `found`, by (from, to), that the sequence-parallelism pin allows
    for an activation. `layouts` are all that the value may have.
    """
    pin = local.setting.sequence_parallel
    if pin is None or not local.facts.grads[name]:
        return found
    along = {x for x in layouts if local.along_positions(name, x)}
    found = {(a, b): price for (a, b), price in found.items() if not a.is_shard or a in along}
    if pin and along:  # what is partial becomes a shard, not whole
        found = {(a, b): price for (a, b), price in found.items() if a in along or b in along}
    return found


def _gathered_in_fp8(
    local: LocalClass, name: str, readers: Sequence[AnnotatedOp], found: Conversions
) -> Conversions:
    """Make all-gathers of a value cheaper, in place, and return `found`. Software that gathers in
    fp8 does so in forward if only fp8 products read the value, and in backward if an fp8 product
    made it.
    """
    read = bool(readers) and all(op.name in local.narrow for op in readers)
    made = name in local.narrow
    if not local.setting.software.fp8_gathers or not (read or made):
        return found
    size = local.bytes[name] // local.pricing.itemsize(local.facts.tensors[name])
    have, wanted = {a for a, _ in found}, {b for _, b in found}
    cast = local.pricing.conversions(size, have, wanted, local.facts.grads[name])
    for pair in found:
        forward, backward = transition(*pair)
        there = cast[pair] if read and forward == "all_gather" else found[pair]
        back = cast[pair] if made and backward == "all_gather" else found[pair]
        found[pair] = Conversion(
            there.forward_s, back.backward_s, there.forward_comm_s, back.backward_comm_s
        )
    return found


def _beside(
    local: LocalClass, calls: Sequence[AnnotatedOp], name: str, readers: Sequence[AnnotatedOp]
) -> tuple[float, float]:
    """Seconds (forward, backward) of the products that run at the same time as a value's
    communication over tp; 0 if the software overlaps none.
    """
    software = local.setting.software
    if software.tp_overlap:
        products = [
            op
            for op in calls
            if (name in op.inputs or name in op.outputs) and op.name in local.facts.products
        ]
        if products:
            return least_compute_s(products)
    if not software.late_gradients:
        return 0.0, 0.0
    return 0.0, sum(min(s.backward_weight_s for s in op.strategies) for op in readers)
