"""What torch.library asks of every op, and the gradients of every reference in fp64.  Kernels do not run here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import autopar_kernels
import pytest
import torch
from op_cases import CASES, OpCase
from support.effort import every


@pytest.mark.parametrize("case", every(4, CASES), ids=str)
def test_torch_library_accepts(case: OpCase):
    torch.library.opcheck(case.op, case.arguments(torch.float32))


@pytest.mark.parametrize("case", [c for c in CASES if c.differentiable and c.gradcheck], ids=str)
def test_gradients_of_the_reference(case: OpCase):
    arguments = case.arguments(torch.float64)
    places = [i for i, a in enumerate(arguments) if isinstance(a, torch.Tensor) and a.requires_grad]

    def call(*tensors: torch.Tensor):
        filled = dict(zip(places, tensors, strict=True))
        return case.op(*(filled.get(i, a) for i, a in enumerate(arguments)))

    torch.autograd.gradcheck(call, [arguments[i] for i in places])


LINEAR = {"rotary", "rotary_single", "sum_partials", "permute_rows"}
"""Their gradients do not depend on what they are gradients of."""


@pytest.mark.parametrize("case", {c.op: c for c in CASES if c.differentiable}.values(), ids=str)
def test_a_second_derivative_is_refused_and_no_zero(case: OpCase):
    arguments = case.arguments(torch.float64)
    inputs = [a for a in arguments if isinstance(a, torch.Tensor) and a.requires_grad]
    found = case.op(*arguments)
    outputs = [found] if isinstance(found, torch.Tensor) else list(found)
    outputs = [each for each in outputs if each.requires_grad]
    gradients = torch.autograd.grad(
        outputs, inputs, [o.detach() for o in outputs], create_graph=True
    )
    second = sum((each.square().sum() for each in gradients), torch.zeros(()))
    if case.op.__name__.split(".")[0] in LINEAR:
        assert not second.requires_grad
    else:
        with pytest.raises(RuntimeError, match="has no second derivative"):
            torch.autograd.grad(second, inputs)


def test_class_weights_are_constant():
    logits, target = torch.randn(3, 4, requires_grad=True), torch.tensor([0, 1, 3])
    weight = torch.rand(4, requires_grad=True)
    with pytest.raises(ValueError, match="class weights of a cross-entropy are constant"):
        torch.ops.autopar.cross_entropy(logits, target, weight)
    with pytest.raises(ValueError, match="class weights of a cross-entropy are constant"):
        torch.ops.autopar.linear_cross_entropy(logits, torch.rand(4, 4), target, weight)


@pytest.mark.parametrize("case", {c.op: c for c in CASES if c.differentiable}.values(), ids=str)
def test_compiles_without_a_graph_break(case: OpCase):
    torch._dynamo.reset()
    arguments = case.arguments(torch.float64)
    compiled = torch.compile(lambda *a: case.op(*a), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*arguments), case.op(*arguments))


@pytest.mark.parametrize("case", [c for c in CASES if c.differentiable], ids=str)
def test_on_meta_the_kept_tensors_are_those_of_a_run(case: OpCase):
    """Memory is priced on the meta device."""

    def kept(device: str) -> list[tuple[torch.Size, torch.dtype]]:
        arguments = [
            a.detach().to(device).requires_grad_(a.requires_grad)
            if isinstance(a, torch.Tensor)
            else a
            for a in case.arguments(torch.bfloat16)
        ]
        saved: list[tuple[torch.Size, torch.dtype]] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: saved.append((t.shape, t.dtype)), lambda t: t
        ):
            case.op(*arguments)
        return saved

    assert kept("meta") == kept("cpu")


def test_a_captured_graph_shows_each_op_as_one_node():
    cases = [case for case in CASES if case.differentiable]
    arguments = [case.arguments(torch.float32) for case in cases]
    tensors = [[a for a in row if isinstance(a, torch.Tensor)] for row in arguments]

    class Everything(torch.nn.Module):
        def forward(self, rows):
            results = []
            for case, row, given in zip(cases, rows, arguments, strict=True):
                fresh = iter(row)
                results.append(
                    case.op(*(next(fresh) if isinstance(a, torch.Tensor) else a for a in given))
                )
            return results

    graph = torch.export.export(Everything(), (tensors,)).graph
    called = [node.target for node in graph.nodes if node.op == "call_function"]
    own = [target for target in called if str(target).startswith("autopar.")]
    assert own == [case.op for case in cases], "in order, and none of the ops below them"


def test_importing_needs_torch_alone():
    """triton is imported where a kernel is built."""
    code = (
        "import importlib, pkgutil, sys, autopar_kernels\n"
        "for module in pkgutil.iter_modules(autopar_kernels.__path__):\n"
        "    if not module.name.endswith('kernels') and module.name != 'tiles':\n"
        "        importlib.import_module('autopar_kernels.' + module.name)\n"
        "print({'autopar', 'transformers', 'triton', 'sympy'} & set(sys.modules))"
    )
    root = str(Path(autopar_kernels.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": root},
    )
    assert done.stdout.strip() == "set()", done.stderr


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("heads_last", [False, True])
@pytest.mark.parametrize("swapped", [False, True])
def test_rotation_keeps_the_order_of_heads_and_tokens_in_memory(device, heads_last, swapped):
    """Attention then writes its result in that order too, and joining the heads is a view."""
    x = torch.zeros(2, 5, 3, 8, device=device)
    x = x.transpose(1, 2).contiguous().transpose(1, 2) if swapped else x
    table = torch.ones(1, x.shape[1 if heads_last else 2], 8, device=device)
    found = torch.ops.autopar.rotary_single(x, table, table, heads_last=heads_last)
    assert found.stride() == x.stride()
