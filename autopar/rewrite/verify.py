"""The verifier: run a rank's program on the meta device and compare every local shape with what its layouts say."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Interpreter, Node

from autopar.errors import AutoparError
from autopar.ir.plan import Plan
from autopar.ir.sharding import local_extent
from autopar.ir.traced import TracedModel
from autopar.ops.dims import is_symbolic
from autopar.ops.views import concrete
from autopar.rewrite.axes import active_axes, simulated_axes
from autopar.rewrite.noise import NOISE_LENGTH
from autopar.rewrite.program import Program, assemble


class ProgramError(RuntimeError):
    """A rewritten program that is not what its plan says: a bug in autopar."""


def verify_program(program: Program, rows: int = 2) -> int:
    """Check every value of the program against its layouts with `rows` local rows; returns the number of values checked."""
    checker = _Checker(program, rows)
    inputs = [
        torch.empty(checker.expected(val, program.inputs[name]), dtype=val.dtype, device="meta")
        for name, val in program.whole_inputs.items()
    ]
    if program.count is not None:
        inputs.append(torch.ones((), device="meta"))
    if program.draws:
        inputs.append(torch.empty(NOISE_LENGTH, dtype=torch.int64, device="meta"))
    with active_axes(simulated_axes(program.mesh, program.rank)), torch.no_grad():
        checker.run_module(program.module, inputs)
    return checker.checked


class _Checker:
    def __init__(self, program: Program, rows: int) -> None:
        self.program, self.rows, self.checked = program, rows, 0

    def expected(self, whole: torch.Tensor, layouts: dict) -> tuple[int, ...]:
        mesh, shape = self.program.mesh, []
        for dim, size in enumerate(whole.shape):
            if is_symbolic(size):
                symbols = size.node.expr.free_symbols
                size = int(size.node.expr.subs({s: self.rows * mesh.dp for s in symbols}))
            for axis, layout in layouts.items():
                if layout.dim == dim:
                    size = local_extent(int(size), mesh.size(axis), mesh.coordinate(self.program.rank, axis), layout.pattern)
            shape.append(int(size))
        return tuple(shape)

    def run_module(self, module: GraphModule, inputs: list) -> object:
        checker = self

        class Run(Interpreter):
            def run_node(self, node: Node):
                result = super().run_node(node)
                if "whole" in node.meta and node.op != "get_attr" and isinstance(result, torch.Tensor):
                    checker.check(node, result)
                return result

            def call_module(self, target, args, kwargs):
                return checker.run_module(self.submodules[target], list(args))

            def call_function(self, target, args, kwargs):
                if getattr(target, "__name__", "") == "local_shard":
                    return checker.shard_of(self.current, args[0])
                device = {"device": "meta"} if "device" in kwargs else {}
                return super().call_function(target, args, {**kwargs, **device})

            def run(self, *args):
                self.current = None
                return super().run(*args, enable_io_processing=False)

            def fetch_args_kwargs_from_env(self, node):
                self.current = node
                return super().fetch_args_kwargs_from_env(node)

        return Run(module).run(*inputs)

    def shard_of(self, node: Node, whole: torch.Tensor) -> torch.Tensor:
        return torch.empty(self.expected(node.meta["whole"], node.meta["layouts"]), dtype=whole.dtype, device="meta")

    def check(self, node: Node, result: torch.Tensor) -> None:
        expected = self.expected(node.meta["whole"], node.meta["layouts"])
        if tuple(result.shape) != expected:
            layouts = ", ".join(f"{axis}:{layout}" for axis, layout in node.meta["layouts"].items())
            whole = [concrete(s) if not is_symbolic(s) else str(s) for s in node.meta["whole"].shape]
            raise ProgramError(
                f"rank {self.program.rank}: {node.name} = {getattr(node.target, '__name__', node.target)}{node.args} has local shape "
                f"{tuple(result.shape)}; the plan says {expected} (whole {whole}, {layouts})"
            )
        self.checked += 1


def checked_program(traced: TracedModel, plan: Plan, rank: int, device: torch.device) -> Program:
    """The rank's program, its shapes verified.  What an inconsistent plan makes fail there is the plan's fault."""
    try:
        program = assemble(traced, plan, rank, device)
        verify_program(program)
    except (RuntimeError, ValueError, IndexError, KeyError, TypeError, ZeroDivisionError) as error:
        raise AutoparError(
            f"the plan makes no program for rank {rank} of {plan.mesh}: {type(error).__name__}: {str(error)[:400]}. If it was edited, it "
            "is not consistent; plan again"
        ) from error
    return program
