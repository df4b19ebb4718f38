"""The verifier: runs a rank's program on the meta device and compares every local shape with the
shape that its layouts imply.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import Target

from autopar.errors import AutoparError
from autopar.ir.mesh import MeshShape
from autopar.ir.plan import Plan
from autopar.ir.sharding import local_extent
from autopar.ir.traced import TracedModel
from autopar.ops.dims import is_symbolic
from autopar.ops.views import concrete
from autopar.rewrite.collectives.axes import active_axes, simulated_axes
from autopar.rewrite.lowerings.dropout import NOISE_LENGTH
from autopar.rewrite.lowerings.sizes import Layouts
from autopar.rewrite.program import Program, assemble
from autopar.rewrite.shard import local_shard


class ProgramError(RuntimeError):
    """The error that a rewritten program does not match its plan, which is a bug in autopar."""


def verify_program(program: Program, rows: int = 2) -> int:
    """Run the program on the meta device and check the shape of every value against its layouts. A
    micro-batch has `rows` rows on each data-parallel rank. Returns the number of values checked.
    Raises ProgramError at the first that differs.
    """
    checker = _Checker(program, rows)
    with active_axes(simulated_axes(program.mesh, program.rank)), torch.no_grad():
        for stage in program.stages:
            inputs = [checker.empty(value.whole, value.layouts) for value in stage.received]
            inputs += [
                checker.empty(program.graph_inputs[name], program.inputs[name])
                for name in stage.stage.inputs
            ]
            if stage.draws:
                inputs.append(torch.empty(NOISE_LENGTH, dtype=torch.int64, device="meta"))
            found = checker.run_module(stage.module, inputs)
            for value, result in zip(stage.sent, found if stage.sent else (), strict=False):
                what = f"what stage {stage.stage.index} sends as {value.name}"
                checker.check_shape(what, result, value.whole, value.layouts)
    return checker.checked


def local_shape(
    mesh: MeshShape, rank: int, whole: torch.Tensor, layouts: Layouts, rows: int
) -> tuple[int, ...]:
    """The shape of a rank's part of a value with these layouts, if a micro-batch has `rows` rows on
    each data-parallel rank. `whole` is its whole fake tensor.
    """
    shape = []
    for dim, size in enumerate(whole.shape):
        if isinstance(size, torch.SymInt):
            expression = size.node.expr
            size = int(expression.subs(dict.fromkeys(expression.free_symbols, rows * mesh.dp)))
        for axis, layout in layouts.items():
            if layout.dim == dim:
                size = local_extent(
                    int(size), mesh.size(axis), mesh.coordinate(rank, axis), layout.pattern
                )
        shape.append(int(size))
    return tuple(shape)


class _Checker:
    def __init__(self, program: Program, rows: int) -> None:
        self.program, self.rows, self.checked = program, rows, 0

    def expected(self, whole: torch.Tensor, layouts: Layouts) -> tuple[int, ...]:
        return local_shape(self.program.mesh, self.program.rank, whole, layouts, self.rows)

    def empty(
        self, whole: torch.Tensor, layouts: Layouts, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        shape = self.expected(whole, layouts)
        return torch.empty(shape, dtype=dtype or whole.dtype, device="meta")

    def run_module(self, module: GraphModule, inputs: list) -> Any:
        return _Run(module, self).run(*inputs, enable_io_processing=False)

    def check(self, node: Node, result: torch.Tensor) -> None:
        what = f"{node.name} = {getattr(node.target, '__name__', node.target)}{node.args}"
        self.check_shape(what, result, node.meta["whole"], node.meta["layouts"])

    def check_shape(
        self, what: str, result: torch.Tensor, value: torch.Tensor, layouts: Layouts
    ) -> None:
        expected = self.expected(value, layouts)
        if tuple(result.shape) != expected:
            placed = ", ".join(f"{axis}:{layout}" for axis, layout in layouts.items())
            whole = [concrete(s) if not is_symbolic(s) else str(s) for s in value.shape]
            raise ProgramError(
                f"rank {self.program.rank}: {what} has local shape {tuple(result.shape)}; "
                f"the plan says {expected} (whole {whole}, {placed})"
            )
        self.checked += 1


class _Run(Interpreter):
    """Runs one graph of a program, on the meta device, and checks the shape of every value."""

    def __init__(self, module: GraphModule, checker: _Checker) -> None:
        super().__init__(module)
        self.checker = checker

    def run_node(self, n: Node) -> Any:
        """The value of a node, after its shape is checked. For a shard of a parameter, an empty
        tensor.
        """
        if n.target is local_shard:
            (parameter, *_), _ = self.fetch_args_kwargs_from_env(n)
            result = self.checker.empty(n.meta["whole"], n.meta["layouts"], parameter.dtype)
        else:
            result = super().run_node(n)
        if "whole" in n.meta and n.op != "get_attr" and isinstance(result, torch.Tensor):
            self.checker.check(n, result)
        return result

    def call_module(self, target: Target, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The result of a segment, whose own values are checked too."""
        return self.checker.run_module(self.submodules[str(target)], list(args))

    def call_function(self, target: Target, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The result of a call; a `device` argument is replaced by meta."""
        device = {"device": "meta"} if "device" in kwargs else {}
        return super().call_function(target, args, {**kwargs, **device})


def checked_program(traced: TracedModel, plan: Plan, rank: int, device: torch.device) -> Program:
    """The program of `rank`, with its shapes verified. Any failure raises AutoparError, because the
    plan must be inconsistent with the model.
    """
    try:
        program = assemble(traced, plan, rank, device)
        verify_program(program)
    except (RuntimeError, ValueError, IndexError, KeyError, TypeError, ZeroDivisionError) as error:
        raise AutoparError(
            f"the plan makes no program for rank {rank} of {plan.mesh}: {type(error).__name__}: {str(error)[:400]}. If it was edited, it "
            "is not consistent; plan again"
        ) from error
    return program
