"""The placement problem as a 0/1 program: variables, constraints and two objectives, independent of
the solver.

    Variables (all 0/1, except T)
      x[op, s]      op runs strategy s                                                                 `_add_strategies`
      z[link, a, d] the source of a link delivers layout a and its target needs layout d               `_add_link`
      y[group,a, d] some link of the group converts a -> d                                             `_add_group`
      u[class,k, l] a chosen strategy of the class saves tensor k at its l-th smallest size or larger  `_add_saved`
      T             transient: bytes that backward adds at its peak to what is kept                    `_add_memory`

    Constraints
      sum_s x[op, s] = 1                               one strategy per op                             `_add_strategies`
      sum_d z[link, a, d] = [source delivers a]        z is the joint choice of both ends (a flow);    `_add_link`
      sum_a z[link, a, d] = [target needs d]           a pair without z cannot be chosen
      z[link, a, d] <= y[group, a, d]                  consumers share one conversion                  `_add_group`
      [first stores p] = [other stores p]              tied parameters, for every placement p          `_add_ties`
      sum of x whose size of k >= l-th <= u[class, k, l]   a key is counted once, at its largest size  `_add_saved`
      workspace(class) + saved(class) - freed <= T     saved if recomputed, freed by the last segment  `_add_memory`
      static + kept + T + fixed <= capacity            only if some choice could exceed it             `_add_memory`

Objective: seconds (`cost_s`) or bytes (`size_bytes`) of the variables at 1, plus a constant.

Every constraint except the two on memory is "exactly one of these" or "at most one of these or
that", which CP-SAT propagates best. The flow z makes the LP relaxation of a chain or tree of ops
exact. z and y exist only if both ends have a choice; otherwise the indicator of the end with a
choice replaces them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from autopar.ir.annotated import AnnotatedModel
from autopar.ir.sharding import AxisLayout
from autopar.solve.costs.placement_cost import Choices, input_bytes
from autopar.solve.integer_program.links import (
    Domains,
    OpRef,
    Tie,
    ValueLink,
    block_links,
    check_cost,
    edge_links,
    find_links,
    find_ties,
    reduce_domains,
)

Indicator = tuple[int, ...]
"""Variables of which at most one is 1. Their sum is 1 if a condition holds."""

Moment = tuple[dict[int, int], int]
"""Bytes that backward needs at one moment: (bytes by variable, a constant)."""


@dataclass(slots=True)
class IntegerProgram:
    """A 0/1 program. Variables are numbered from 0, and `add` appends one. The only integer
    variable is `transient` (bytes, at most `transient_max`); -1 means there is none. `cost_s`
    (seconds of a step) and `size_bytes` are by variable. Of each indicator in `exactly_one`, one
    variable is 1; in `implied`, the sum of the first is at most the second.

    `segments` has what backward of each class needs. `strategy_of` maps a variable to its (op,
    strategy). `has_memory` is False if no capacity can bind.
    """

    model: AnnotatedModel
    cost_s: list[float] = field(default_factory=list)  # per variable: seconds per step
    size_bytes: list[int] = field(default_factory=list)  # per variable
    exactly_one: list[Indicator] = field(default_factory=list)
    # sum of the indicator <= variable
    implied: list[tuple[Indicator, int]] = field(default_factory=list)
    # of each class; each is at most the transient
    segments: list[Moment] = field(default_factory=list)
    transient: int = -1
    transient_max: int = 0
    # x variable -> (op, strategy index)
    strategy_of: dict[int, tuple[OpRef, int]] = field(default_factory=dict)
    has_memory: bool = True  # whether size_bytes is complete; False where no capacity can bind

    def add(self, cost_s: float = 0.0, size_bytes: int = 0) -> int:
        """Adds a 0/1 variable with these costs, and returns its number."""
        self.cost_s.append(cost_s)
        self.size_bytes.append(size_bytes)
        return len(self.cost_s) - 1

    @property
    def constant_s(self) -> float:
        """Seconds of a step that do not depend on choices."""
        return self.model.fixed_s

    @property
    def constant_bytes(self) -> int:
        """Bytes that do not depend on choices."""
        return self.model.fixed_bytes

    def room_bytes(self, capacity_bytes: int | None) -> int:
        """Bytes of the capacity that are left for choices: without the constant bytes. Raises
        ValueError if there is no capacity.
        """
        if capacity_bytes is None:
            raise ValueError("capacity_bytes is None: memory has no limit")
        return capacity_bytes - self.constant_bytes

    def choices(self, chosen: list[int]) -> Choices:
        """The placement given by `chosen`, the variables at 1: for each class, op name -> strategy
        name.
        """
        names: Choices = tuple({} for _ in self.model.classes)
        for variable in chosen:
            if variable in self.strategy_of:
                (c, o), s = self.strategy_of[variable]
                op = self.model.classes[c].ops[o]
                names[c][op.name] = op.strategies[s].name
        return names


def formulate(model: AnnotatedModel, capacity_bytes: int | None) -> IntegerProgram | OpRef:
    """The program of `model`. If no consistent choice of layouts exists, (class index, op index) of
    an op that is left without a strategy.

    The memory constraint is left out (`has_memory` is False) if `capacity_bytes` is None or no
    choice can exceed it.
    """
    links, ties = find_links(model), find_ties(model)
    domains = reduce_domains([model], links, ties)
    if isinstance(domains, tuple):
        return domains
    program = IntegerProgram(model)
    x = _add_strategies(program, domains)
    _add_links(program, x, domains, links)
    for tie in ties:
        _add_ties(program, x, domains, tie)
    program.has_memory = (
        capacity_bytes is not None and _largest_memory(model, domains) > capacity_bytes
    )
    if program.has_memory:
        _add_memory(program, x, domains)
    return program


def formulate_between(model: AnnotatedModel, domains: Domains) -> IntegerProgram:
    """A program of how segments of `model` depend on each other: edges, with their conversion
    costs, and ties. Strategies are variables too, but cost nothing here.
    """
    program = IntegerProgram(model)
    x = _add_strategies(program, domains)
    program.cost_s, program.size_bytes = [0.0] * len(x), [0] * len(x)
    _add_links(program, x, domains, edge_links(model))
    for tie in find_ties(model):
        _add_ties(program, x, domains, tie)
    return program


def formulate_segment(
    model: AnnotatedModel, index: int, domains: Domains
) -> tuple[IntegerProgram, dict[int, int], Moment]:
    """The program of one segment of class `index`, whose `size_bytes` are static and kept bytes.
    Returns (the program, the bytes that the segment keeps by variable, the bytes that its backward
    needs besides). `domains` has the strategies that are left.
    """
    classes = tuple(replace(block, count=1) for block in model.classes)
    program, domains = (
        IntegerProgram(replace(model, classes=classes)),
        {ref: domain for ref, domain in domains.items() if ref[0] == index},
    )
    x = _add_strategies(program, domains)
    _add_links(program, x, domains, block_links(program.model, index))
    return program, *_add_bytes(program, x, domains, index)


def _add_links(
    program: IntegerProgram, x: dict, domains: Domains, links: Iterable[ValueLink]
) -> None:
    groups: dict[tuple, list[ValueLink]] = defaultdict(list)
    for link in links:
        groups[link.group].append(link)
    for group in groups.values():
        _add_group(program, x, domains, group)


def _add_strategies(program: IntegerProgram, domains: Domains) -> dict[tuple[OpRef, int], int]:
    model = program.model
    x = {}
    for (c, o), domain in domains.items():
        block, op = model.classes[c], model.classes[c].ops[o]
        for s in domain:
            strategy = op.strategies[s]
            per_micro_s = strategy.forward_s + strategy.backward_s
            for part_s in (strategy.forward_s, strategy.backward_s, strategy.step_s):
                check_cost(part_s, f"block {block.name}: strategy {strategy.name} of op {op.name}")
            cost_s = block.count * (model.num_microbatches * per_micro_s + strategy.step_s)
            variable = program.add(cost_s, block.count * strategy.static_bytes)
            x[(c, o), s] = variable
            program.strategy_of[variable] = (c, o), s
        program.exactly_one.append(tuple(x[(c, o), s] for s in domain))
    return x


def _indicators(
    x: dict, domain: tuple[int, ...], ref: OpRef, labels: tuple
) -> dict[AxisLayout, Indicator]:
    """For each label, the variables of the strategies of `ref` that have it. `labels` has the label
    (a layout) of each strategy; `x` has the variable of each (op, strategy).
    """
    found: dict = defaultdict(tuple)
    for s in domain:
        found[labels[s]] += (x[ref, s],)
    return dict(found)


def _add_group(program: IntegerProgram, x: dict, domains: Domains, links: list[ValueLink]) -> None:
    """Adds links that read one value. Each gets variables for the joint choice of its ends, and
    each distinct conversion is paid once. `x` has the variable of each (op, strategy) of `domains`.
    """
    price_s = links[0].price_s
    readers: dict[tuple[AxisLayout, AxisLayout], list[Indicator]] = defaultdict(list)
    known: dict[tuple, dict] = {}
    for link in links:
        need = _indicators(x, domains[link.target], link.target, link.target_layouts)
        signature = tuple(need.items())
        if signature not in known:  # an op may read one value twice
            known[signature] = _add_link(program, x, domains, link, need)
            for pair, indicator in known[signature].items():
                if pair[0] != pair[1] and price_s[pair] > 0:
                    readers[pair].append(indicator)
    for pair, indicators in readers.items():
        if len(indicators) == 1:
            for variable in indicators[0]:
                program.cost_s[variable] += price_s[pair]
        else:
            paid = program.add(price_s[pair])
            program.implied += [(indicator, paid) for indicator in indicators]


def _add_link(
    program: IntegerProgram,
    x: dict,
    domains: Domains,
    link: ValueLink,
    need: dict[AxisLayout, Indicator],
) -> dict[tuple, Indicator]:
    """Adds variables for the joint choice of a link's ends, unless one end has no choice. Returns,
    for each possible (layout delivered, layout needed), its indicator. {} if all combinations are
    possible and free. `x` has the variable of each (op, strategy) of `domains`, `need` those that
    need each layout.
    """
    have = _indicators(x, domains[link.source], link.source, link.source_layouts)
    if len(have) == 1:
        return {(a, d): indicator for a in have for d, indicator in need.items()}
    if len(need) == 1:
        return {(a, d): indicator for d in need for a, indicator in have.items()}
    if all(link.allows(a, d) and link.price_s.get((a, d), 0.0) == 0 for a in have for d in need):
        return {}
    joint: dict[tuple, Indicator] = {
        (a, d): (program.add(),) for a in have for d in need if link.allows(a, d)
    }
    for ends, side in ((have, 0), (need, 1)):
        everything = [variable for indicator in ends.values() for variable in indicator]
        for layout, indicator in ends.items():
            here = tuple(z for pair, (z,) in joint.items() if pair[side] == layout)
            program.exactly_one.append(here + tuple(v for v in everything if v not in indicator))
    return joint


def _add_ties(program: IntegerProgram, x: dict, domains: Domains, tie: Tie) -> None:
    first = _indicators(x, domains[tie.source], tie.source, tie.source_layouts)
    other = _indicators(x, domains[tie.target], tie.target, tie.target_layouts)
    for placement, indicator in first.items():
        elsewhere = tuple(v for p, variables in other.items() if p != placement for v in variables)
        if elsewhere:
            program.exactly_one.append(indicator + elsewhere)


def _add_memory(program: IntegerProgram, x: dict, domains: Domains) -> None:
    """Adds the bytes that every class keeps, and the variable `transient`, the peak of backward;
    fills `program.segments`. `x` has the variable of each (op, strategy) of `domains`.
    """
    model, freed = program.model, {}
    kept, moments = zip(
        *(_add_bytes(program, x, domains, c) for c in range(len(model.classes))), strict=True
    )
    if model.last is not None:
        freed = {variable: -size for variable, size in kept[model.last].items()}
    for c, (block, (bytes_of, workspace)) in enumerate(zip(model.classes, moments, strict=True)):
        if bytes_of or workspace:
            program.segments.append((bytes_of | freed if c != model.last else bytes_of, workspace))
        largest = _largest_saved(model, domains, c, block.inputs) if block.recompute else 0
        program.transient_max = max(program.transient_max, block.workspace_bytes + largest)
    if program.segments:
        program.transient = program.add(size_bytes=1)


def _add_bytes(
    program: IntegerProgram, x: dict, domains: Domains, c: int
) -> tuple[dict[int, int], Moment]:
    """Adds the bytes that all segments of class `c` keep to `program.size_bytes`. Returns, for one
    segment, (bytes kept, by variable; what its backward needs besides). `x` has the variable of
    each (op, strategy) of `domains`.
    """
    block = program.model.classes[c]
    saved = _add_saved(program, x, domains, c, block.inputs if block.recompute else ())
    kept = _input_sizes(program, x, domains, c) if block.recompute else saved
    for variable, size in kept.items():
        program.size_bytes[variable] += block.count * size
    return kept, (saved if block.recompute else {}, block.workspace_bytes)


def _input_sizes(program: IntegerProgram, x: dict, domains: Domains, c: int) -> dict[int, int]:
    """Bytes of the inputs that one segment of class `c` keeps, by the variable of their strategy.
    `x` has the variable of each (op, strategy) of `domains`.
    """
    block = program.model.classes[c]
    refs = [((c, number), op) for number, op in enumerate(block.ops) if op.name in block.inputs]
    return {
        x[ref, s]: input_bytes(block, op.name, op.strategies[s].outputs[0])
        for ref, op in refs
        for s in domains[ref]
    }


def _add_saved(
    program: IntegerProgram, x: dict, domains: Domains, c: int, without: Sequence[str]
) -> dict[int, int]:
    """Bytes by variable whose sum, over variables at 1, is what one segment of class `c` saves.
    Values in `without` are left out. A tensor that several ops save gets variables of its own,
    which are added. `x` has the variable of each (op, strategy) of `domains`.
    """
    sizes = _saved_sizes(program.model, domains, c, without)
    bytes_of: dict[int, int] = defaultdict(int)
    for by_op in sizes.values():
        if len(by_op) == 1:  # only one op saves this tensor, so it needs no variable of its own
            for ref, per_strategy in by_op.items():
                for s, size in per_strategy.items():
                    bytes_of[x[ref, s]] += size
            continue
        smaller = 0
        for level in sorted(
            {size for per_strategy in by_op.values() for size in per_strategy.values() if size > 0}
        ):
            reached = program.add()
            bytes_of[reached] += level - smaller
            smaller = level
            for ref, per_strategy in by_op.items():
                indicator = tuple(x[ref, s] for s, size in per_strategy.items() if size >= level)
                if indicator:
                    program.implied.append((indicator, reached))
    return dict(bytes_of)


def _saved_sizes(
    model: AnnotatedModel, domains: Domains, c: int, without: Sequence[str]
) -> dict[str, dict[OpRef, dict[int, int]]]:
    """For class `c`: key of a saved tensor -> op -> strategy -> bytes. Values in `without` are left
    out; so are strategies that do not save it.
    """
    sizes: dict[str, dict[OpRef, dict[int, int]]] = defaultdict(lambda: defaultdict(dict))
    for o, op in enumerate(model.classes[c].ops):
        for s in domains[c, o]:
            for saved in op.strategies[s].saved:
                if saved.value in without:
                    continue
                per_strategy = sizes[saved.key][c, o]
                per_strategy[s] = max(per_strategy.get(s, 0), saved.size_bytes)
    return sizes


def _largest_saved(
    model: AnnotatedModel, domains: Domains, c: int, without: Sequence[str] = ()
) -> int:
    """An upper bound on the bytes that one segment of class `c` saves, except the values in
    `without`: every key at its largest size.
    """
    sizes = _saved_sizes(model, domains, c, without)
    return sum(
        max(max(per_strategy.values()) for per_strategy in by_op.values())
        for by_op in sizes.values()
    )


def _largest_memory(model: AnnotatedModel, domains: Domains) -> int:
    """An upper bound on the bytes that any choice needs."""
    total, transient = model.fixed_bytes, 0
    for c, block in enumerate(model.classes):
        total += block.count * sum(
            max(op.strategies[s].static_bytes for s in domains[c, o])
            for o, op in enumerate(block.ops)
        )
        largest = _largest_saved(model, domains, c, block.inputs if block.recompute else ())
        transient = max(transient, block.workspace_bytes + (largest if block.recompute else 0))
        if block.recompute:
            entries = [(op, o) for o, op in enumerate(block.ops) if op.name in block.inputs]
            total += block.count * sum(
                max(input_bytes(block, op.name, op.strategies[s].outputs[0]) for s in domains[c, o])
                for op, o in entries
            )
        else:
            total += block.count * largest
    return total + transient
