"""Parses a user's rule from one line of text, such as `b.. i, o i, +o -> b.. o`.

Each tensor operand has one term; each dim has one letter or word. `b..` stands for any number of
leading dims. A letter in several places is the same dim. The op sums over a letter that is missing
in the result. `!d` is a dim that cannot be sharded. `+` before a term marks an operand that is
added to a sum (a bias). Trailing operands may be absent in a call.
"""

from __future__ import annotations

import re

from autopar.errors import AutoparError
from autopar.ops.dims import Call, OpDims, einsum
from autopar.ops.kinds import OpRule, same

_LETTER = re.compile(r"!?[A-Za-z_]\w*(\.\.)?")


def equation_rule(name: str, text: str) -> OpRule:
    """A function from a call of the op `name` to its `OpDims`, as the equation `text` says. Raises
    AutoparError if the text is invalid; the function raises it if a call does not match.
    """
    operands, results = _parse(name, text)
    rule = einsum(text, ordered=True)

    def checked(call: Call) -> OpDims:
        given = [tuple(map(str, t.shape)) for t in call.tensors]
        if len(call.tensors) > len(operands) or len(call.results) != len(results):
            raise _error(
                name,
                text,
                f"it has {len(operands)} operands and {len(results)} results; the call has {len(call.tensors)} tensors of shapes "
                f"{given} and {len(call.results)} results",
            )
        sizes: dict[str, object] = {}
        for term, tensor in [
            *zip(operands, call.tensors, strict=False),
            *zip(results, call.results, strict=True),
        ]:
            fixed = sum(not x.endswith("..") for x in term)
            if tensor.dim() < fixed or (tensor.dim() > fixed and fixed == len(term)):
                shape = tuple(map(str, tensor.shape))
                raise _error(
                    name,
                    text,
                    f"the term {' '.join(term)!r} has {fixed} dims; the tensor has {tensor.dim()}, {shape}",
                )
            spread = tensor.dim() - fixed
            at = 0
            for letter in term:
                for k in range(spread if letter.endswith("..") else 1):
                    size, whole = (
                        tensor.shape[at],
                        sizes.setdefault(f"{letter}{k}", tensor.shape[at]),
                    )
                    if not letter.startswith("!") and not same(size, whole):
                        raise _error(
                            name,
                            text,
                            f"dim {letter!r} has size {whole} in one tensor and {size} in another; shapes {given}",
                        )
                    at += 1
        return rule(call)

    return checked


def _parse(name: str, text: str) -> tuple[list[list[str]], list[list[str]]]:
    if text.count("->") != 1:
        raise _error(name, text, "it must have one '->', as in 'b.. i, o i -> b.. o'")
    left, right = ([term.split() for term in side.split(",")] for side in text.split("->"))
    operands = [[x.removeprefix("+") if k == 0 else x for k, x in enumerate(term)] for term in left]
    for term in (*operands, *right):
        for x in term:
            if not _LETTER.fullmatch(x):
                raise _error(
                    name,
                    text,
                    f"{x!r} is no letter; letters are words such as b or !d, '..' after them for many dims",
                )
        if sum(x.endswith("..") for x in term) > 1:
            raise _error(name, text, f"the term {' '.join(term)!r} has '..' twice")
        if len(set(term)) < len(term):
            raise _error(name, text, f"the term {' '.join(term)!r} has a letter twice")
    known = {x for term in operands for x in term}
    unknown = [x for term in right for x in term if x not in known and not x.startswith("!")]
    if unknown:
        raise _error(
            name,
            text,
            f"the result's letter {unknown[0]!r} is in no operand; a dim that the op makes is written '!{unknown[0]}'",
        )
    return operands, right


def _error(name: str, text: str, what: str) -> AutoparError:
    return AutoparError(f"rule {text!r} for {name}: {what}")
