"""Stages of a pipeline that hold little: what a placement needs at least on its fullest rank."""

from __future__ import annotations

from dataclasses import replace

from autopar.ir.annotated import AnnotatedModel
from autopar.solve.costs.candidate import Candidate
from autopar.solve.costs.pipeline_cost import blocks_of, pipelined, stages_of
from autopar.solve.costs.placement_cost import Choices


def lean_schedules(candidate: Candidate) -> list[Candidate]:
    """The candidate under each schedule that may hold least. That is 1F1B if it can run, since it has
    fewest micro-batches in flight. Otherwise it is each schedule, with the fewest stages a rank.
    Without schedules to choose from, it is the candidate.
    """
    fewest: dict[str, int] = {}
    for name, count in candidate.schedules:
        fewest[name] = min(fewest.get(name, count), count)
    if "1f1b" in fewest:
        fewest = {"1f1b": fewest["1f1b"]}
    found = [replace(candidate, schedule=name, stages_per_rank=n) for name, n in fewest.items()]
    return found or [candidate]


def fullest_lean_rank_bytes(model: AnnotatedModel, choices: Choices) -> int:
    """Bytes of the fullest rank of a pipeline whose stages hold little. From even stages, blocks move
    one by one from the fullest rank to the emptiest, as long as this helps. Stages stay as they are
    if a rank has several, or if their sizes are fixed.
    """
    setting, blocks = model.pipeline_setting, blocks_of(model)
    even = pipelined(model, choices)
    best = even.memory_bytes
    if setting.sizes or setting.stages_per_rank > 1:
        return max(best)
    layers = set(blocks)
    sizes = [len(layers.intersection(stage)) for stage in even.stages]
    for _ in blocks:
        fullest, emptiest = (pick(range(len(best)), key=best.__getitem__) for pick in (max, min))
        if sizes[fullest] == 1:
            break
        sizes[fullest] -= 1
        sizes[emptiest] += 1
        moved = pipelined(model, choices, stages_of(sizes, blocks, len(model.segments)))
        if sorted(moved.memory_bytes, reverse=True) >= sorted(best, reverse=True):
            break
        best = moved.memory_bytes
    return max(best)
