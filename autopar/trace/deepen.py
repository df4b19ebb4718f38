"""A traced model with more of its layers, or with its layers counted off: what a deep model is, without capturing it layer by layer."""

from __future__ import annotations

from dataclasses import replace

from autopar.errors import AutoparError
from autopar.ir.traced import Segment, Source, TracedModel, per_model


def deepened(traced: TracedModel, period: int, times: int) -> TracedModel:
    """`traced` with its last `period` repeated segments `times` times more.

    Layers that alternate between p structures have period p, and the model must hold at least two periods of them, so that a layer's
    inputs from the layer before can be told from those of the prologue.  The copies share the parameters of what they copy: the result is
    for planning and pricing, where only their sizes count, not for running.  Raises AutoparError if the last periods
    differ, or if what follows reads every layer (router losses do).
    """
    repeated = _last_repeated(traced)
    last, before = range(repeated + 1 - period, repeated + 1), range(repeated + 1 - 2 * period, repeated + 1 - period)
    segments = traced.segments
    if before.start < 0 or [segments[n].class_index for n in last] != [segments[n].class_index for n in before]:
        raise AutoparError(f"the last {2 * period} layers of the model are not two equal periods of {period}; trace more layers")
    classes = {segments[number].class_index for number in last}
    layers = {number for number, segment in enumerate(segments[: last.start]) if segment.class_index in classes}
    for segment in segments[last.stop :]:
        if early := [source.segment for source in segment.inputs if source.segment in layers]:
            raise AutoparError(f"{segment.name} reads {segments[early[0]].name}: a deeper model has another {segment.name}; trace it whole")
    found = list(segments[: last.stop])
    for time in range(1, times + 1):
        found += [_moved(segments[number], f"{segments[number].name}+{time}", time * period, before.start) for number in last]
    more = times * period
    found += [_moved(segment, segment.name, more, last.start) for segment in segments[last.stop :]]
    updates = {name: _later(source, more, last.start) for name, source in traced.updates.items()}
    return replace(traced, segments=tuple(found), updates=updates, model_hash=f"{traced.model_hash}+{times}x{period}")


def _last_repeated(traced: TracedModel) -> int:
    """The last segment whose class another segment has too."""
    classes = [segment.class_index for segment in traced.segments]
    return max((number for number, index in enumerate(classes) if classes.count(index) > 1), default=-1)


def _moved(segment: Segment, name: str, by: int, since: int) -> Segment:
    return replace(segment, name=name, inputs=tuple(_later(source, by, since) for source in segment.inputs))


def _later(source: Source, by: int, since: int) -> Source:
    """The same output, of a segment that many places later, if it was of a segment from `since` on."""
    return replace(source, segment=source.segment + by) if source.segment >= since else source


@per_model(4)
def counted(traced: TracedModel, every: int) -> TracedModel:
    """`traced` with every `every`-th of its layers in a class of its own, whose `picked` is True; that of the other layers is False.

    Layers are the segments of classes that repeat, or all segments if none does.  A class of which both kinds exist is there twice, over
    one graph; nothing else changes, so that segments keep their places and names.
    """
    repeats = {index for index in range(len(traced.classes)) if sum(s.class_index == index for s in traced.segments) > 1}
    layers = [number for number, s in enumerate(traced.segments) if s.class_index in repeats or not repeats]
    picked = set(layers[every - 1 :: every])
    kinds = dict.fromkeys((traced.segments[n].class_index, n in picked) for n in layers)
    kinds |= {(index, None): None for index in range(len(traced.classes)) if not any(index == k for k, _ in kinds)}
    order = {kind: place for place, kind in enumerate(sorted(kinds, key=lambda kind: (kind[0], bool(kind[1]))))}
    twice = {index for index, which in kinds if which and (index, False) in kinds}
    classes = []
    for index, which in order:
        block = traced.classes[index]
        classes.append(replace(block, name=f"{block.name} of every {every}" if which and index in twice else block.name, picked=which))
    layered = set(layers)
    segments, parameters = list(traced.segments), dict(traced.parameters)
    for number, segment in enumerate(traced.segments):
        names = segment.parameters
        if number in picked and segment.class_index in twice:  # as if its own, though another layer's in a deepened model: no tie
            names = tuple(f"{name} of every {every}" for name in names)
            parameters |= {
                new: replace(traced.parameters[old], name=new, aliases=())
                for old, new in zip(segment.parameters, names, strict=True) if old in traced.parameters
            }  # fmt: skip
        kind = segment.class_index, number in picked if number in layered else None
        segments[number] = replace(segment, class_index=order[kind], parameters=names)
    return replace(traced, classes=tuple(classes), segments=tuple(segments), parameters=parameters)
