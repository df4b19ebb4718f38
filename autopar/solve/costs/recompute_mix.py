"""Models in which blocks have different recompute modes.

A model is annotated once for each recompute mode, with the same classes, ops and strategies.
`mixed` gives each segment its own mode: a class whose segments have several modes becomes several
classes. Any function that prices a model therefore also prices a mixed one. A buffer that only some
mode needs exists while backward of a segment in that mode runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.ir.annotated import AnnotatedModel, BoundaryEdge
from autopar.solve.costs.placement_cost import Choices

Models = Mapping[str, AnnotatedModel]
"""Recompute mode -> the model annotated for it."""


def hides(models: Models) -> bool:
    """Whether some parameter costs less time once a step in a recompute mode other than the first.
    A longer backward hides more of its communication. Recomputation may then pay on ranks that
    others wait for, even if memory does not require it.
    """
    first, *others = models.values()
    return any(
        later.step_s < own.step_s
        for model in others
        for block, other in zip(first.classes, model.classes, strict=True)
        for op, twin in zip(block.ops, other.ops, strict=True)
        if op.kind == "parameter"
        for own, later in zip(op.strategies, twin.strategies, strict=True)
    )


@dataclass(frozen=True, slots=True)
class Mixed:
    """A model whose segments have different recompute modes. `model` has a class for each entry of
    `origin`: (class of the unmixed models, recompute mode).
    """

    model: AnnotatedModel
    origin: tuple[tuple[int, str], ...]

    def choices(self, choices: Choices) -> Choices:
        """`choices`, a placement of the unmixed models, by class of this model instead: each class
        gets what its original class has.
        """
        return tuple(choices[index] for index, _ in self.origin)


def mixed(models: Models, modes: Sequence[str]) -> Mixed:
    """The model (in a `Mixed`) whose segment k runs in mode `modes[k]`, made from one model for
    each mode, with the origin of each of its classes. A class whose segments run in several modes
    becomes several classes.

    A rank may hold a shared tensor without a segment that pays for it. The tensor then costs what
    it does in the mode of the first paying segment.
    """
    base = next(iter(models.values()))
    order = {mode: place for place, mode in enumerate(models)}
    kinds = list(zip(base.segments, modes, strict=True))
    origin = tuple(sorted(dict.fromkeys(kinds), key=lambda kind: (kind[0], order[kind[1]])))
    place = {kind: number for number, kind in enumerate(origin)}
    segments, counts = tuple(place[kind] for kind in kinds), Counter(kinds)
    parts_of: dict[int, list[int]] = {}
    for number, (index, _) in enumerate(origin):
        parts_of.setdefault(index, []).append(number)
    classes = []
    for index, mode in origin:
        block, again = (
            models[mode].classes[index],
            models[mode].fixed_bytes - base.fixed_bytes,
        )  # buffers of what the mode makes again
        name = f"{block.name} ({mode})" if counts[index, mode] < block.count else block.name
        classes.append(
            replace(
                block,
                name=name,
                count=counts[index, mode],
                workspace_bytes=block.workspace_bytes + again,
            )
        )
    times = Counter(
        (segments[source], output, segments[reader], entry)
        for reader, sources in enumerate(base.reads)
        for entry, (source, output) in enumerate(sources)
        if source >= 0
    )
    conversions = {
        (e.source, e.source_output, e.target, e.target_input): e.conversions for e in base.edges
    }
    edges = tuple(
        BoundaryEdge(
            source,
            output,
            target,
            entry,
            count,
            conversions[origin[source][0], output, origin[target][0], entry],
        )
        for (source, output, target, entry), count in sorted(times.items())
    )
    ties = tuple(
        tuple((number, name) for index, name in group for number in parts_of[index])
        for group in base.ties
    )
    last = None if base.last is None else parts_of[base.last][-1]
    return Mixed(
        replace(base, classes=tuple(classes), edges=edges, ties=ties, last=last, segments=segments),
        origin,
    )
