"""Strategies of ops in plain words: 'column-parallel', 'vocab-parallel', 'sequence-sharded'.

A plan does not hold the graph, so an op is identified by its name, its strategy's letter and its
layouts. The letters come from the op rules (`ops/rules.py`). A linear layer has `o` (output
features) and `i` (input features); an embedding has `v` and `h`. Attention has `h` (heads). `b1` is
the second dim of a batch of sequences.
"""

from __future__ import annotations

import re

from autopar.ir.plan_fields import AxisChoice, BlockPlan

_MATMULS = re.compile(r"(linear|addmm|matmul|mm|bmm|grouped_mm)(_\d+)?")
_PARAMETER = re.compile(r"_(weight|bias)$")
_HEADS = ("head", "lm_head", "embed_out")


def is_attention_name(op: str) -> bool:
    """Whether an op name in a plan is that of attention."""
    return "scaled_dot_product_attention" in op


def is_experts(op: str) -> bool:
    """Whether an op name in a plan is that of routed experts."""
    return "routed_experts" in op


def interesting(block: BlockPlan) -> list[str]:
    """The names of the block's ops that are worth showing, in program order: those with weights,
    matrix products, attention, experts and the loss. [] on a mesh of one device, where ops have no
    choices.
    """
    reading = {name for name, axes in block.ops.items() if any(c.inputs for c in axes.values())}
    making = {name for name, axes in block.ops.items() if any(c.outputs for c in axes.values())}
    parameters = filter(_PARAMETER.search, block.ops.keys() - reading)
    owners = {_PARAMETER.sub("", name) for name in parameters}
    return [
        name for name in block.ops if name in reading & making and _is_interesting(name, owners)
    ]


def _is_interesting(op: str, owners: set[str]) -> bool:
    is_loss = "cross_entropy" in op or "nll_loss" in op
    if is_attention_name(op) or is_experts(op) or is_loss or op in _HEADS or _MATMULS.fullmatch(op):
        return True
    names = {op, re.sub(r"_\d+$", "", op)}
    return any(owner == name or owner.endswith(f"_{name}") for owner in owners for name in names)


_ANY_OP = {
    "R": "replicated",
    "R/P": "replicated (gradients partial)",
    "ring": "ring attention",
    "ulysses": "heads by all-to-all (Ulysses)",
    "s": "positions, keys gathered",
    "grouped_heads": "head-parallel (fewer key heads)",
    "expert_parallel": "expert-parallel",
}
_OTHER_OPS = {
    "v": "vocab-parallel",
    "o": "column-parallel",
    "h": "hidden-sharded",
    **dict.fromkeys(("i", "k"), "row-parallel"),
    **dict.fromkeys(("b1", "d1", "v1"), "sequence-sharded"),
    **dict.fromkeys(("b0", "d0", "v0"), "sharded over dim 0"),
    **dict.fromkeys(("m", "n"), "token-sharded"),
}


def describe(op: str, choice: AxisChoice) -> str:
    """How `op` runs over one axis, in words such as `column-parallel`. If its indices are not
    contiguous, their pattern follows in parentheses.
    """
    letter, _, pattern = choice.strategy.partition(" ")
    return _words(op, letter) + (f" ({pattern})" if pattern else "")


def _words(op: str, letter: str) -> str:
    if re.fullmatch(r"P\d*", letter):
        return "on partial sums"
    if letter in _ANY_OP:
        return _ANY_OP[letter]
    if is_attention_name(op):
        return "head-parallel" if letter == "h" else "batch-sharded"
    if is_experts(op):
        return "token-sharded" if letter == "t" else "column- and row-parallel experts"
    if letter == "o" and op in _HEADS:
        return "vocab-parallel"
    return _OTHER_OPS.get(letter, f"sharded over {letter}")


def layouts(choice: AxisChoice) -> str:
    """The layouts of operands and results as text: `S(1), R/P -> S(1)`."""
    return f"{', '.join(map(str, choice.inputs))} -> {', '.join(map(str, choice.outputs))}"


def collectives(counts: dict[str, int]) -> str:
    """Counts of collectives as text: `2 all-reduce, 1 all-gather over tp; 1 all-reduce over dp`, or
    `none`. Keys are such as `all_reduce over tp`.
    """
    axes: dict[str, list[str]] = {}
    for name, count in sorted(counts.items()):
        kind, _, axis = name.partition(" over ")
        axes.setdefault(axis, []).append(f"{count} {kind.replace('_', '-')}")
    words = [
        f"{', '.join(kinds)} over {axis}" for axis, kinds in sorted(axes.items(), reverse=True)
    ]
    return "; ".join(words) or "none"
