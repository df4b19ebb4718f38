"""The text in which Megatron-LM says which layers each stage of a pipeline has."""

from __future__ import annotations

import re
from collections.abc import Sequence

from autopar.errors import AutoparError

MOST_LENGTH = 100_000
"""The longest layout, with its repetitions written out."""


def layout_stages(layout: str) -> list[str]:
    """The stages of a layout such as `Et*2|t*3|tL`, in the order of the model, each as its letters:
    E embedding, t layer, m extra predictor, L loss. Raises AutoparError for other letters.
    """
    text = re.sub(r"[,\s]", "", layout)
    for pattern in (r"\(([^()]+)\)\*(\d{1,5})", r"(.)\*(\d{1,5})"):
        text = re.sub(pattern, _repeated, text)
    if odd := sorted(set(text) - set("ELtm|")):
        raise AutoparError(
            f"the pipeline layout {layout!r} has {', '.join(map(repr, odd))}; E, t, m, L, | and *n are known"
        )
    return text.split("|")


def _repeated(match: re.Match[str]) -> str:
    if len(match[1]) * int(match[2]) > MOST_LENGTH:
        raise AutoparError(f"the pipeline layout repeats {match[1]!r} {match[2]} times")
    return match[1] * int(match[2])


def layout_text(sizes: Sequence[int], mtp: int = 0) -> str:
    """The layout whose stages have these numbers of layers; extra predictors go to the last."""
    stages = [f"t*{size}" if size > 1 else "t" * size for size in sizes]
    stages[0] = "E" + stages[0]
    stages[-1] += "m" * mtp + "L"
    return "|".join(stages)


def counted_stages(layers: int, stages: int, embedding: bool, loss: bool) -> tuple[int, ...]:
    """The layers of each stage if embedding and loss count as a layer each; () if that is not
    possible.
    """
    total = layers + embedding + loss
    if not stages or total % stages:
        return ()
    sizes = [total // stages] * stages
    sizes[0] -= embedding
    sizes[-1] -= loss
    return tuple(sizes)


def ended_stages(
    layers: int, pp: int, vpp: int, first: int | None, last: int | None
) -> tuple[int, ...]:
    """The layers of each stage if the first or last rank has its own number of layers, and the
    others share the rest evenly; () if that is not possible.
    """
    middle = pp - (first is not None) - (last is not None)
    rest = layers - (first or 0) - (last or 0)
    if rest < 0 or (middle == 0) != (rest == 0) or (middle and rest % middle):
        return ()
    ranks = [rest // middle if middle else 0] * pp
    if first is not None:
        ranks[0] = first
    if last is not None:
        ranks[-1] = last
    if any(size % vpp for size in ranks):
        return ()
    return tuple(size // vpp for _ in range(vpp) for size in ranks)
