"""Brute force, for small models: every combination of strategies, priced by the definition.  What the solver is tested against."""

from __future__ import annotations

import time
from itertools import product

from autopar.ir.annotated import AnnotatedModel
from autopar.solve.costs.placement_cost import (
    Choices,
    InconsistentPlacement,
    Priced,
    price_placement,
)
from autopar.solve.integer_program.placement_solver import Infeasible, Solution


def brute_force(
    model: AnnotatedModel, capacity_bytes: int | None, max_combinations: int = 1_000_000
) -> Solution | Infeasible:
    """The fastest placement that fits, as `solve_placement` returns it.  Raises ValueError above `max_combinations`."""
    start = time.perf_counter()
    best: tuple[Priced, Choices] | None = None
    smallest: tuple[Priced, Choices] | None = None
    for choices in combinations(model, max_combinations):
        try:
            priced = price_placement(model, choices)
        except InconsistentPlacement:
            continue
        if smallest is None or priced.memory_bytes < smallest[0].memory_bytes:
            smallest = priced, choices
        fits = capacity_bytes is None or priced.memory_bytes <= capacity_bytes
        if fits and (best is None or priced.time_s < best[0].time_s):
            best = priced, choices
    took_s = time.perf_counter() - start
    if smallest is None:
        return Infeasible("layouts", "no choice of layouts is consistent", took_s, float("inf"))
    if best is None:
        needed = smallest[0].memory_bytes
        return Infeasible(
            "memory",
            f"the smallest placement needs {needed} bytes",
            took_s,
            float("inf"),
            needed,
            needed,
            smallest[1],
        )
    return Solution("optimal", best[1], best[0], best[0].time_s, took_s, "brute force")


def combinations(model: AnnotatedModel, max_combinations: int = 1_000_000):
    """Every choice of one strategy per op, consistent or not."""
    ops = [(c, op) for c, block in enumerate(model.classes) for op in block.ops]
    count = 1
    for _, op in ops:
        count *= len(op.strategies)
    if count > max_combinations:
        raise ValueError(
            f"{count} combinations of strategies; brute force stops at {max_combinations}"
        )
    for strategies in product(*(op.strategies for _, op in ops)):
        choices: Choices = tuple({} for _ in model.classes)
        for (c, op), strategy in zip(ops, strategies, strict=True):
            choices[c][op.name] = strategy.name
        yield choices
