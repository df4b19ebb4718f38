"""Derives an op's strategies on one mesh axis from its dims."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autopar.ir.sharding import CONTIGUOUS, RP, AxisLayout, P, Pattern, R, S, parse_pattern
from autopar.ops.dims import Letters, OpDims, compose, is_symbolic, locate


@dataclass(frozen=True, slots=True)
class OpStrategy:
    """One way to run an op over one mesh axis: a layout for each operand and each result.

    `letter` is the sharded letter (a dim of the op) or joint strategy, or ''. `lowering` is the
    other way to compute the op that sharding needs, by name, or ''.
    """

    name: str
    inputs: tuple[AxisLayout, ...]
    outputs: tuple[AxisLayout, ...]
    letter: str = ""
    lowering: str = ""


def replicated(num_inputs: int, num_outputs: int) -> OpStrategy:
    """The strategy 'R', in which every rank computes the whole op, and all values and gradients are
    replicated. It is legal for any op.
    """
    return OpStrategy("R", (R,) * num_inputs, (R,) * num_outputs)


def replicated_partial(input_grads: list[bool], output_grads: list[bool]) -> OpStrategy:
    """The strategy 'R/P', in which every rank computes the whole op on replicated values, while
    gradients stay partial sums. Values without a gradient (False in the lists) have the layout R.

    It is legal for any op, since backward is linear in the incoming gradient.
    """
    return OpStrategy(
        "R/P",
        tuple(RP if g else R for g in input_grads),
        tuple(RP if g else R for g in output_grads),
    )


def strategies(
    dims: OpDims,
    parts: int,
    input_grads: list[bool],
    output_grads: list[bool],
    kind: str,
    patterns: Mapping[str, frozenset[Pattern]] | None = None,
    taken: Mapping[str, int] | None = None,
) -> list[OpStrategy]:
    """All strategies of an op for an axis of `parts` ranks. They are the replicated ones, one for
    each letter and pattern that can be sharded, joint ones for this kind of axis, and partial sums
    where the op is linear.

    Args:
        dims: the dims of the op.
        parts: number of ranks on the axis.
        input_grads: whether each operand carries a gradient; without one, R and R/P are the same.
        output_grads: the same for results.
        kind: 'batch' (dp, ep) shards letters whose size depends on the batch. 'tp' shards the
            others, and flattened tokens per batch row.
        patterns: patterns besides contiguous for each letter (`reach.letter_patterns`).
        taken: the number of parts into which outer axes have already divided each letter.
    """
    found = [replicated(len(dims.inputs), len(dims.outputs))]
    if any(output_grads):
        found.append(replicated_partial(input_grads, output_grads))
    for letter in dims.letters:
        wanted = (
            (CONTIGUOUS,)
            if kind == "batch"
            else (CONTIGUOUS, *sorted((patterns or {}).get(letter, ()), key=str))
        )
        for pattern in wanted:
            if is_symbolic(dims.sizes[letter]) != (kind == "batch" or pattern.rows):
                continue
            if kind == "batch" or fits(
                dims, letter, pattern, parts * (taken or {}).get(letter, 1), parts
            ):
                strategy = shard_letter(dims, letter, pattern, input_grads)
                found += [strategy] if strategy is not None else []
    for name, joint in dims.joint.items():
        if joint.axis == kind and joint.size >= parts and not (joint.even and joint.size % parts):
            found.append(shard_jointly(dims, name, CONTIGUOUS, input_grads))
    for group in dims.linear:
        if all(input_grads[i] for i in group) and group and all(output_grads):
            inputs = tuple(P if i in group else RP if g else R for i, g in enumerate(input_grads))
            found.append(
                OpStrategy("P" + "".join(map(str, sorted(group))), inputs, (P,) * len(dims.outputs))
            )
    return found


def fits(dims: OpDims, letter: str, pattern: Pattern, parts: int, least: int) -> bool:
    """Whether the letter can be split into `parts` in this pattern. A contiguous split may be
    uneven, but needs at least `least` elements. Equal chunks are needed for other patterns, for
    `even` letters, and for letters in sections or behind the batch in a flattened dim.
    """
    size: Any = dims.sizes[letter]
    if is_symbolic(size):  # flattened tokens: what counts is the tokens of one batch row
        expr = size.node.expr
        size = expr / next(iter(expr.free_symbols))
        if not size.is_Integer:
            return False
    found = [locate(term, letter) for term in (*dims.inputs, *dims.outputs)]
    own_pattern = any(place is not None and not place[1].is_contiguous for place in found)
    if own_pattern or letter in dims.even or not pattern.is_contiguous:
        return int(size) > 0 and pattern.divides(int(size), parts)
    return int(size) >= least


def shard_letter(
    dims: OpDims, letter: str, pattern: Pattern, input_grads: list[bool]
) -> OpStrategy | None:
    """The strategy that shards one letter in a pattern. None if an operand or result does not allow
    that. Whether the number of ranks fits is not checked.

    `input_grads` says whether each operand carries a gradient.
    """
    if not pattern.is_contiguous and (letter in dims.contiguous or letter in dims.even):
        return None
    # lowerings know positions in natural or zigzag order
    if letter in dims.special and (pattern.rows or pattern.sections != (1,)):
        return None
    inputs: list[AxisLayout | None] = []
    for i, term in enumerate(dims.inputs):
        place = locate(term, letter)
        if place is not None:
            inputs.append(_shard(place, pattern))
        elif i in dims.additive and letter in dims.summed:
            inputs.append(P)
        else:
            inputs.append(RP if input_grads[i] else R)
    outputs = [_result(dims, term, letter, pattern) for term in dims.outputs]
    read = tuple(layout for layout in inputs if layout is not None)
    written = tuple(layout for layout in outputs if layout is not None)
    if len(read) < len(inputs) or len(written) < len(outputs):
        return None
    return OpStrategy(
        strategy_name(letter, pattern),
        read,
        written,
        letter,
        dims.special.get(letter, ""),
    )


def _shard(place: tuple[int, Pattern], pattern: Pattern) -> AxisLayout | None:
    combined = compose(place[1], pattern)
    return S(place[0], combined) if combined is not None else None


def _result(dims: OpDims, term: Letters, letter: str, pattern: Pattern) -> AxisLayout | None:
    place = locate(term, letter)
    if place is not None:
        return _shard(place, pattern)
    return R if letter in dims.replicated_result else P


def shard_jointly(dims: OpDims, name: str, pattern: Pattern, input_grads: list[bool]) -> OpStrategy:
    """The joint strategy `name` of the op, with the same pattern on every sharded dim. Other
    operands are replicated, with partial gradients if they carry one (`input_grads`). Other results
    are partial.
    """
    joint = dims.joint[name]
    inputs = tuple(
        S(d, pattern) if d >= 0 else RP if grad else R
        for d, grad in zip(joint.inputs, input_grads, strict=True)
    )
    return OpStrategy(
        strategy_name(name, pattern),
        inputs,
        tuple(S(d, pattern) if d >= 0 else P for d in joint.outputs),
        name,
        name,
    )


def strategy_name(letter: str, pattern: Pattern) -> str:
    """The name of a strategy in plans: its letter or joint strategy, followed by a space and the
    pattern if that is not contiguous.
    """
    return letter if pattern.is_contiguous else f"{letter} {pattern}"


def letter_of(name: str) -> str:
    """The letter or joint strategy in a strategy's name: what is before the first space."""
    return name.partition(" ")[0]


def lowering_of(dims: OpDims | None, name: str) -> str:
    """The name of the lowering (another way to compute the sharded op) that the strategy with this
    name needs, or ''. Also '' without dims.
    """
    letter = letter_of(name)
    return "" if dims is None else letter if letter in dims.joint else dims.special.get(letter, "")


def named_strategy(
    dims: OpDims, name: str, input_grads: list[bool], output_grads: list[bool]
) -> OpStrategy | None:
    """The op's strategy with this name, whether or not it fits the size of the axis. None if the op
    has no such strategy. Raises AutoparError if what follows the letter in the name is no pattern.

    `input_grads` and `output_grads` say whether each operand and result carries a gradient.
    """
    letter, _, text = name.partition(" ")
    if letter in dims.joint:
        return shard_jointly(dims, letter, parse_pattern(text), input_grads)
    if letter in dims.letters:
        return shard_letter(dims, letter, parse_pattern(text), input_grads)
    return next(
        (
            s
            for s in strategies(dims, 1, input_grads, output_grads, "none")
            if s.name == name and not s.letter
        ),
        None,
    )
