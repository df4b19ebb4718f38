"""From an op's dimension algebra to its strategies on one mesh axis."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.sharding import RP, Layout, P, R, S
from autopar.ops.dims import Letters, OpDims, is_symbolic


@dataclass(frozen=True, slots=True)
class OpStrategy:
    """Layouts of an op's operands and results on one axis.  `letter` is the sharded letter, or '' if none is;
    `lowering` names the special lowering that running it takes, or ''."""

    name: str
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    letter: str = ""
    lowering: str = ""


def replicated(num_inputs: int, num_outputs: int) -> OpStrategy:
    """Every rank computes the whole op.  Legal for any op."""
    return OpStrategy("R", (R,) * num_inputs, (R,) * num_outputs)


def replicated_partial(input_grads: list[bool], output_grads: list[bool]) -> OpStrategy:
    """Every rank computes the whole op on replicated values while gradients stay partial sums.

    Legal for any op, since backward is linear in the incoming gradient.
    """
    return OpStrategy("R/P", tuple(RP if g else R for g in input_grads), tuple(RP if g else R for g in output_grads))


def strategies(dims: OpDims, parts: int, input_grads: list[bool], output_grads: list[bool], batch: bool) -> list[OpStrategy]:
    """Strategies for an axis of `parts` ranks: `batch` axes (dp) shard the letters whose size depends on the batch, others the rest.

    `input_grads` and `output_grads` say which operands and results carry gradients: for the others R and R/P are one.
    """
    found = [replicated(len(dims.inputs), len(dims.outputs))]
    if any(output_grads):
        found.append(replicated_partial(input_grads, output_grads))
    for letter in dims.letters:
        size = dims.sizes[letter]
        if is_symbolic(size) != batch:
            continue
        if not batch and (size < parts or (letter in dims.even and size % parts)):
            continue
        found.append(_shard(dims, letter, input_grads, output_grads))
    for group in dims.linear:
        if all(input_grads[i] for i in group) and group and all(output_grads):
            inputs = tuple(P if i in group else RP if g else R for i, g in enumerate(input_grads))
            found.append(OpStrategy("P" + "".join(map(str, sorted(group))), inputs, (P,) * len(dims.outputs)))
    return found


def _shard(dims: OpDims, letter: str, input_grads: list[bool], output_grads: list[bool]) -> OpStrategy:
    inputs = []
    for i, letters in enumerate(dims.inputs):
        if letter in letters:
            inputs.append(S(letters.index(letter)))
        elif i in dims.additive and letter in dims.summed:
            inputs.append(P)
        else:
            inputs.append(RP if input_grads[i] and letter not in dims.replicated_result else R)
    outputs = tuple(_result(dims, letters, letter, grad) for letters, grad in zip(dims.outputs, output_grads, strict=True))
    return OpStrategy(letter, tuple(inputs), outputs, letter, dims.special.get(letter, ""))


def _result(dims: OpDims, letters: Letters, letter: str, grad: bool) -> Layout:
    if letter in letters:
        return S(letters.index(letter))
    if letter in dims.replicated_result:
        return R
    return P
