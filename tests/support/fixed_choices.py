"""A model with some of its choices made."""

from __future__ import annotations

import random
from dataclasses import replace

from autopar.ir.annotated import Saved, Strategy
from autopar.solve.costs.recompute_mix import Models


def with_choices(models: Models, rng: random.Random) -> Models:
    """The same models with a second way to run each op, with a faster forward or backward, or leaner, or all of it."""
    kinds = {}

    def second(index: int, strategy: Strategy, mode: str) -> Strategy:
        faster = [rng.choice([0.6, 0.8, 1.3]) for _ in range(2)]
        faster, leaner, smaller = kinds.setdefault(
            index, (faster, rng.choice([0.3, 0.7, 1.5]), rng.choice([0, 3]))
        )
        saved = tuple(Saved(s.key, int(s.size_bytes * leaner) + 1) for s in strategy.saved)
        forward_s, again_s = strategy.forward_s * faster[0], strategy.rerun_s * faster[0]
        backward_s = (strategy.backward_s - strategy.rerun_s) * faster[1] + again_s
        return replace(strategy, name="other", forward_s=forward_s, backward_s=backward_s, rerun_s=again_s, saved=saved,
                       static_bytes=strategy.static_bytes + smaller)  # fmt: skip

    found = {}
    for mode, model in models.items():
        classes = []
        for index, block in enumerate(model.classes):
            ops = [replace(op, strategies=(op.strategies[0], second(index, op.strategies[0], mode))) if op.kind == "op" else op
                   for op in block.ops]  # fmt: skip
            classes.append(replace(block, ops=tuple(ops)))
        found[mode] = replace(model, classes=tuple(classes))
    return found
