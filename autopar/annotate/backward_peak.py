"""What backward of one segment needs besides what autograd keeps: the gradients that are alive at its fullest moment.

The ops of a class go backward from last to first.  Before an op, the gradients of its results are alive; it writes those of its operands;
after it, the gradients of its results and the tensors that nobody before it keeps are freed.  The workspace is the most by which
gradients exceed what has been freed.  Sizes are those of each value's smallest strategy, so that a solver sees a constant.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BackwardOp:
    """`reads` and `writes` name the values of which the op reads and writes gradients; `keeps` maps saved tensors to bytes; `own` bytes
    live while it runs.  A `passes` op hands the gradient of its result on as it is."""

    reads: tuple[str, ...]  # results
    writes: tuple[str, ...]  # operands
    keeps: Mapping[str, int]
    own: int = 0
    passes: bool = False


def backward_workspace(
    backward: Iterable[BackwardOp], sizes: Mapping[str, int], outputs: Iterable[str]
) -> int:
    """Bytes at the fullest moment of a segment's backward over the bytes that its forward keeps.

    `backward` is in forward order, `sizes` are bytes of values, `outputs` those of which the gradients arrive.
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
