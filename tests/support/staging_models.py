"""Random rows of segments, and every way to cut them into stages and to recompute them."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

from support.solve_models import borrowing

from autopar.ir.annotated import (
    AnnotatedBlock,
    AnnotatedModel,
    AnnotatedOp,
    AnnotatedValue,
    BoundaryEdge,
    PipelineSetting,
    Saved,
    Shared,
    Strategy,
)
from autopar.ir.sharding import R
from autopar.solve.costs.pipeline_cost import stages_of
from autopar.solve.costs.recompute_mix import Models
from benchmarks.search.random_instances import random_sharing, ties_of

MODES = ("none", "selective", "full")


def block(rng: random.Random, name: str, count: int, layer: bool) -> dict[str, AnnotatedBlock]:
    """One op between an input and an output, in every mode."""
    forward_s, backward_s, size, saved = (
        rng.randint(1, 4),
        rng.randint(1, 6),
        rng.randint(1, 9),
        rng.randint(10, 40),
    )
    saved_less, more_s = rng.randint(1, 10), rng.choice([0.25, 0.5, 1.0, 1.5]) * forward_s / 2
    static, step_s, workspace = rng.randint(1, 20), rng.randint(0, 3), rng.randint(0, 15)
    late = int(
        random.Random(repr((name, forward_s, size, saved, static))).choice([0, 0.5, 1, 3]) * saved
    )
    found = {}
    for mode in MODES if layer else MODES[:1]:
        kept = saved - saved_less if mode == "selective" else saved
        again_s = {"none": 0.0, "selective": more_s, "full": float(forward_s)}[mode]
        run = Strategy("R", (R, R), (R,), forward_s, backward_s + again_s, saved=(Saved("y", kept),), rerun_s=again_s,
                       late=(Saved("y", late),) if late else ())  # fmt: skip
        ops = (
            AnnotatedOp("in", "input", "", (), ("x",), (Strategy("R", (), (R,)),)),
            AnnotatedOp(
                "w", "parameter", "", (), ("w",), (Strategy("R", (), (R,), 0, 0, step_s, static),)
            ),
            AnnotatedOp("f", "op", "aten.some", ("x", "w"), ("y",), (run,)),
            AnnotatedOp("out", "output", "", ("y",), (), (Strategy("R", (R,), ()),)),
        )
        values = {value: AnnotatedValue(value, 10, {}) for value in ("x", "w", "y")}
        found[mode] = AnnotatedBlock(
            name,
            count,
            ops,
            values,
            ("in",),
            ("out",),
            mode == "full",
            {"in": {R: size}},
            workspace,
        )
    return {mode: found.get(mode, found["none"]) for mode in MODES}


def random_models(seed: int, schedule: str, ranks: int, chunks: int, most: int) -> Models:
    """Prologue, blocks of one or two kinds in any order, maybe something between two of them, epilogue."""
    rng, other = random.Random(seed), random.Random(~seed)
    layers = rng.randint(max(ranks * chunks, 2), most)
    kinds = [1] * layers if rng.random() < 0.5 else [rng.choice([1, 2]) for _ in range(layers)]
    if kinds.count(2) == 1 or kinds.count(1) == 1:
        kinds = [1] * layers
    segments = (0, *kinds, 3) if 2 in kinds else (0, *kinds, 2)
    blocks = [block(rng, "prologue", 1, False), block(rng, "layers.a", kinds.count(1), True)]
    blocks += [block(rng, "layers.b", kinds.count(2), True)] if 2 in kinds else []
    blocks += [block(rng, "epilogue", 1, False)]
    blocks = [b for b in blocks if b["none"].count]
    if 1 not in kinds:
        segments = tuple({0: 0, 2: 1, 3: 2}[s] for s in segments)
    if chunks == 1 and other.random() < 0.3:
        place, glue, end = other.randint(2, layers), segments[-1], segments[-1] + 1
        segments = (*segments[:place], glue, *segments[place:-1], end)
        blocks.insert(-1, block(other, "glue", 1, False))
    reads = (((-1, 0),), *(((number, 0),) for number in range(len(segments) - 1)))
    pairs = list(itertools.pairwise(segments))
    edges = tuple(BoundaryEdge(a, 0, b, 0, pairs.count((a, b)), {}) for a, b in sorted(set(pairs)))
    micro = rng.choice([m for m in (2, 4, 6, 8) if m >= ranks and m % max(1, m // ranks) == 0])
    last = len(blocks) - 1 if rng.random() < 0.5 else None
    shared = (Shared(((0, "w"),), ((len(segments) - 1, "w"),)),) if rng.random() < 0.3 else ()
    if other.random() < 0.4:
        shared = random_sharing(other, segments)
    for index in {segments[number] for one in shared for number, _ in one.reading}:
        blocks[index] = {mode: borrowing(of, "w") for mode, of in blocks[index].items()}
    setting = PipelineSetting(
        ranks, chunks, schedule, rng.choice([0.0, 0.01]), rng.choice([0.0, 0.1]), rng.random() < 0.5
    )
    ties = ties_of(shared, segments)
    base = AnnotatedModel(
        (),
        edges,
        ties,
        micro,
        0.5,
        7,
        setting if ranks > 1 else None,
        last,
        segments,
        reads,
        shared,
    )
    buffers = {"none": 7, "selective": 7 + rng.choice([0, 5]), "full": 7}
    return {
        mode: replace(base, classes=tuple(b[mode] for b in blocks), fixed_bytes=buffers[mode])
        for mode in MODES
    }


def choices_of(models: Models) -> tuple[dict[str, str], ...]:
    return tuple({op.name: "R" for op in b.ops} for b in models["none"].classes)


def stagings(models: Models):
    """Every cut, every mode of every block."""
    base = models["none"]
    ranks = base.pipeline.ranks if base.pipeline else 1
    blocks = [n for n, index in enumerate(base.segments) if base.classes[index].count > 1]
    for inner in itertools.combinations(range(1, len(blocks)), ranks - 1):
        ends = [0, *inner, len(blocks)]
        stages = stages_of([b - a for a, b in itertools.pairwise(ends)], blocks, len(base.segments))
        for modes in itertools.product(MODES, repeat=len(blocks)):
            of = dict(zip(blocks, modes, strict=True))
            yield tuple(of.get(n, "none") for n in range(len(base.segments))), stages
