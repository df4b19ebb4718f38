"""Checks that a plan's choices are strategies of its ops."""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import Node

from autopar.errors import AutoparError, shown
from autopar.ir.plan_fields import AxisChoice
from autopar.ops.rules import op_dims
from autopar.ops.strategies import named_strategy, replicated, replicated_partial
from autopar.ops.values import operand_names, result_names


def check_legal(
    node: Node, choices: Mapping[str, AxisChoice], grads: Mapping[str, bool], block: str
) -> None:
    """Raise AutoparError if a plan's choice for the op `node` of the block class `block` is not one
    of the op's strategies. Running it would compute something else.

    `choices` has a choice for each mesh axis. `grads` says for each value, by name, whether a
    gradient flows through it. Whether shards fit the axis is not checked.
    """
    inputs, outputs = (
        [grads[n] for n in operand_names(node)],
        [grads[n] for n in result_names(node)],
    )
    legal = [replicated(len(inputs), len(outputs)), replicated_partial(inputs, outputs)]
    dims = op_dims(node)
    for axis, choice in choices.items():
        named = named_strategy(dims, choice.strategy, inputs, outputs) if dims is not None else None
        if not any(
            (s.name, s.inputs, s.outputs) == (choice.strategy, choice.inputs, choice.outputs)
            for s in (*legal, named)
            if s
        ):
            raise AutoparError(
                f"the plan runs op {node.name!r} of block {shown(block)} over {axis} as {shown(choice.strategy)} ("
                f"{', '.join(map(str, choice.inputs))} -> {', '.join(map(str, choice.outputs))}), which is no strategy of "
                f"{node.target}: it was damaged; plan again"
            )
