"""Peak bytes of the backward of one segment beyond the tensors that autograd kept.

Ops of a class run backward from last to first. Before an op, the gradients of its results are
alive, and the op writes the gradients of its operands. After it, the gradients of its results are
freed, and so are saved tensors that no earlier op keeps. The workspace is the largest excess of
gradients over freed bytes. Each value has the size of its smallest strategy, so that the solver
sees a constant.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BackwardOp:
    """The backward of one op. `reads` and `writes` name the values whose gradients it reads and
    writes. `keeps` maps saved tensors to bytes. `own` is the bytes alive only while it runs. If
    `passes`, it passes the gradient of its result on unchanged.
    """

    reads: tuple[str, ...]  # results
    writes: tuple[str, ...]  # operands
    keeps: Mapping[str, int]
    own: int = 0
    passes: bool = False


def backward_workspace(
    backward: Iterable[BackwardOp], sizes: Mapping[str, int], outputs: Iterable[str]
) -> int:
    """Peak bytes of a segment's backward above the bytes that its forward keeps.

    `backward` lists ops in forward order, `sizes` has the bytes of values, and `outputs` names the
    values whose gradients arrive from the next segment.
    """
    calls = list(backward)
    first: dict[str, int] = {}
    kept: dict[str, int] = {}
    for number, call in enumerate(calls):
        for key, size in call.keeps.items():
            first.setdefault(key, number)
            kept[key] = max(kept.get(key, 0), size)
    # value -> the value in whose gradient's memory its gradient is
    buffer: dict[str, str] = {name: name for name in outputs}
    alive: dict[str, int] = {name: sizes.get(name, 0) for name in outputs}
    fullest = excess = sum(alive.values())
    for number, call in reversed(list(enumerate(calls))):
        for name in call.writes:
            if name in buffer:
                continue  # added to what is there
            source = buffer.get(call.reads[0]) if call.passes and call.reads else None
            if source is not None and sizes.get(name, 0) == alive.get(source, -1):
                buffer[name] = source
            else:
                buffer[name] = name
                alive[name] = sizes.get(name, 0)
                excess += alive[name]
        fullest = max(fullest, excess + call.own)
        for name in call.reads:
            source = buffer.pop(name, None)
            if source is not None and source not in buffer.values():
                excess -= alive.pop(source)
        excess -= sum(kept[key] for key in call.keeps if first[key] == number)
    return max(fullest, 0)
