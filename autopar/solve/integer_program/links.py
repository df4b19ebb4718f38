"""The links of an annotated model, where layouts of two ops must match, and removal of strategies
that no optimum needs.

A link joins two ops over one value. The source delivers a layout and the target needs one; the link
has the cost of each conversion. Values inside a segment and edges between segments are both links,
so later steps (preprocessing, formulation) treat them alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite

from autopar.ir.annotated import AnnotatedModel, AnnotatedOp, Conversion, Strategy
from autopar.ir.sharding import AxisLayout, Placement

OpRef = tuple[int, int]
"""(class index, op index)."""

Domains = dict[OpRef, tuple[int, ...]]
"""For each op, the indices of the strategies that are still candidates."""


@dataclass(frozen=True, slots=True)
class ValueLink:
    """One read of a value: op `target` reads what op `source` makes. The layout lists give the
    layout that each strategy delivers or needs.

    Links of one `group` read one value and share the price of a conversion. `price_s` maps a pair
    of different layouts to seconds per step, over all segments and micro-batches. A missing pair is
    impossible.
    """

    group: tuple[str, int, str]
    source: OpRef
    source_layouts: tuple[AxisLayout, ...]
    target: OpRef
    target_layouts: tuple[AxisLayout, ...]
    price_s: dict[tuple[AxisLayout, AxisLayout], float]

    def allows(self, have: AxisLayout | Placement, need: AxisLayout | Placement) -> bool:
        """Whether a value in layout `have` can be read in layout `need`: they are equal, or a
        conversion exists.
        """
        return have == need or (have, need) in self.price_s


@dataclass(frozen=True, slots=True)
class Tie:
    """Two parameter ops (`source`, `target`) that store one tensor, which must have one placement.
    The layout lists give the placement that each strategy stores.
    """

    source: OpRef
    source_layouts: tuple[Placement, ...]
    target: OpRef
    target_layouts: tuple[Placement, ...]

    def allows(self, have: AxisLayout | Placement, need: AxisLayout | Placement) -> bool:
        """Whether the two placements are equal."""
        return have == need


def find_links(model: AnnotatedModel) -> list[ValueLink]:
    """All links of `model`: those inside each class, then those between segments. Raises ValueError
    for a value that is read but not produced, and for an invalid cost.
    """
    return [
        *(link for index in range(len(model.classes)) for link in block_links(model, index)),
        *edge_links(model),
    ]


def edge_links(model: AnnotatedModel) -> Iterator[ValueLink]:
    """One link for each edge between classes, in the order of `model.edges`. Raises ValueError for
    an unknown op or an invalid cost.
    """
    for number, edge in enumerate(model.edges):
        source, output = _op_named(
            model, edge.source, model.classes[edge.source].outputs[edge.source_output]
        )
        target, entry = _op_named(
            model, edge.target, model.classes[edge.target].inputs[edge.target_input]
        )
        prices = _prices(edge.conversions, model.num_microbatches * edge.count)
        yield ValueLink(
            ("edge", number, ""),
            source,
            tuple(s.inputs[0] for s in output.strategies),
            target,
            tuple(s.outputs[0] for s in entry.strategies),
            prices,
        )


def find_ties(model: AnnotatedModel) -> list[Tie]:
    """For each group of parameters that are one tensor: a tie from the first member to each other
    one.
    """
    ties = []
    for group in model.ties:
        (first, first_op), *others = [_op_named(model, index, name) for index, name in group]
        placed = tuple(s.outputs[0].value for s in first_op.strategies)
        ties += [
            Tie(first, placed, ref, tuple(s.outputs[0].value for s in op.strategies))
            for ref, op in others
        ]
    return ties


def block_links(model: AnnotatedModel, index: int) -> Iterator[ValueLink]:
    """One link for each value that an op of class `index` reads. Raises ValueError for a value
    without a producer, and for an invalid cost.
    """
    block = model.classes[index]
    producer = {
        value: (number, slot)
        for number, op in enumerate(block.ops)
        for slot, value in enumerate(op.outputs)
    }
    prices: dict[str, dict] = {}
    for number, op in enumerate(block.ops):
        for slot, value in enumerate(op.inputs):
            if value not in producer or value not in block.values:
                raise ValueError(
                    f"block {block.name}: op {op.name} reads {value!r}, which has no producer or no entry in values"
                )
            if value not in prices:
                weight = model.num_microbatches * block.count
                prices[value] = _prices(block.values[value].conversions, weight)
            maker, maker_slot = producer[value]
            yield ValueLink(
                ("value", index, value),
                (index, maker),
                tuple(s.outputs[maker_slot] for s in block.ops[maker].strategies),
                (index, number),
                tuple(s.inputs[slot] for s in op.strategies),
                prices[value],
            )


def _prices(
    conversions: dict[tuple[AxisLayout, AxisLayout], Conversion], weight: int
) -> dict[tuple[AxisLayout, AxisLayout], float]:
    prices = {}
    for pair, conversion in conversions.items():
        prices[pair] = weight * (conversion.forward_s + conversion.backward_s)
        check_cost(prices[pair], f"conversion {pair[0]} -> {pair[1]}")
    return prices


def check_cost(cost_s: float, where: str) -> None:
    """Raises ValueError unless a cost in seconds is finite and not negative. `where` names it in
    the message.
    """
    if not (isfinite(cost_s) and cost_s >= 0):
        raise ValueError(
            f"{where} costs {cost_s} s; a cost is finite and not negative (leave impossible choices out)"
        )


def _op_named(model: AnnotatedModel, index: int, name: str) -> tuple[OpRef, AnnotatedOp]:
    for number, op in enumerate(model.classes[index].ops):
        if op.name == name:
            return (index, number), op
    raise ValueError(f"block {model.classes[index].name} has no op {name!r}")


def reduce_domains(
    models: Sequence[AnnotatedModel],
    links: list[ValueLink],
    ties: list[Tie],
    allowed: Domains | None = None,
) -> Domains | OpRef:
    """For each op, the strategies that may occur in an optimum, for time or for memory. If layouts
    cannot be made consistent, (class, op) of an op that has none left.

    `models` differ only in the costs of strategies. `allowed` restricts the strategies of some ops.
    Two kinds of strategies are removed: those dominated in all models by one with the same layouts,
    and those whose layout no neighbour can deliver or accept (arc consistency). Both are safe: the
    first by exchange, the second because no complete choice contains them.
    """
    domains = {
        (c, o): _undominated(
            [model.classes[c].ops[o].strategies for model in models], (allowed or {}).get((c, o))
        )
        for c, block in enumerate(models[0].classes)
        for o in range(len(block.ops))
    }
    touching: dict[OpRef, list[ValueLink | Tie]] = defaultdict(list)
    joints: list[ValueLink | Tie] = [*links, *ties]
    for link in joints:
        touching[link.source].append(link)
        touching[link.target].append(link)
    waiting = {id(link): link for link in joints}  # those of which an end has changed
    while waiting:
        link = waiting.pop(next(iter(waiting)))
        have = {link.source_layouts[s] for s in domains[link.source]}
        need = {link.target_layouts[s] for s in domains[link.target]}
        good_have = {a for a in have if a in need or any(link.allows(a, d) for d in need)}
        good_need = {d for d in need if d in have or any(link.allows(a, d) for a in have)}
        ends = (
            (link.source, link.source_layouts, have, good_have),
            (link.target, link.target_layouts, need, good_need),
        )
        for ref, layouts, found, good in ends:
            if len(good) < len(found):
                domains[ref] = tuple(s for s in domains[ref] if layouts[s] in good)
                waiting |= {id(other): other for other in touching[ref]}
            if not domains[ref]:
                return ref
    return domains


def _undominated(
    strategies: Sequence[Sequence[Strategy]], allowed: Sequence[int] | None
) -> tuple[int, ...]:
    """Indices of the strategies of an op that no other one dominates in all models, among those
    `allowed` (None: all). Of equal ones the first stays. `strategies` is indexed [model][strategy].
    """
    numbers = range(len(strategies[0])) if allowed is None else allowed
    alike: dict[tuple, list[int]] = defaultdict(list)  # only equal layouts can dominate
    for index in numbers:
        alike[strategies[0][index].inputs, strategies[0][index].outputs].append(index)

    def dominates(a: int, b: int) -> bool:
        return all(_dominates(of_model[a], of_model[b]) for of_model in strategies)

    kept: set[int] = set()
    for group in alike.values():
        for place, index in enumerate(group):
            # An equal strategy survives only once: earlier ones may win ties, later ones must be strictly better somewhere.
            if any(dominates(rival, index) for rival in group[:place] if rival in kept):
                continue
            if any(
                dominates(rival, index) and not dominates(index, rival)
                for rival in group[place + 1 :]
            ):
                continue
            kept.add(index)
    return tuple(index for index in numbers if index in kept)


def _dominates(a: Strategy, b: Strategy) -> bool:
    """Whether `a` has the same layouts as `b` and costs no more time, static bytes or saved bytes.
    It can then replace `b` in any choice.
    """
    if (
        (a.inputs, a.outputs) != (b.inputs, b.outputs)
        or a.step_s > b.step_s
        or a.static_bytes > b.static_bytes
    ):
        return False
    if a.forward_s + a.backward_s > b.forward_s + b.backward_s:
        return False
    allowed: dict[str, int] = {}
    for saved in b.saved:
        allowed[saved.key] = max(allowed.get(saved.key, 0), saved.size_bytes)
    return all(saved.size_bytes <= allowed.get(saved.key, 0) for saved in a.saved)
