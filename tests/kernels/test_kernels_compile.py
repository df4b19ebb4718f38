"""Every kernel compiles to machine code for Hopper (sm_90) and Ampere (sm_80): ptxas needs no GPU."""

from __future__ import annotations

import importlib
import os
import pkgutil
from typing import Any

import autopar_kernels
import pytest
import torch
from autopar_kernels import launching
from op_cases import CASES

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted in this process"
)
TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.bool: "*i1",
}


def signature(value: Any) -> Any:
    """The type of an argument, as the launcher of Triton names it."""
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    if isinstance(value, tuple):
        return tuple(signature(part) for part in value)
    if value is None or value is True or value is False or value == 1:
        return "constexpr"
    return "fp32" if isinstance(value, float) else "i32"


def constants(value: Any, place: tuple[int, ...]) -> dict[tuple[int, ...], Any]:
    """Arguments that Triton compiles in."""
    if isinstance(value, tuple):
        return {
            k: v for i, part in enumerate(value) for k, v in constants(part, (*place, i)).items()
        }
    return {place: value} if signature(value) == "constexpr" else {}


def compile_kernel(
    kernel: Any, arguments: Any, warps: int, named: dict[str, Any], arch: int
) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    types = {n: signature(v) for n, v in zip(names, arguments, strict=False)}
    fixed = {k: v for i, value in enumerate(arguments) for k, v in constants(value, (i,)).items()}
    types |= dict.fromkeys(named, "constexpr")
    fixed |= {(names.index(name),): value for name, value in named.items()}
    source = ASTSource(fn=kernel, signature=types, constexprs=fixed)
    done = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": warps})
    assert "cubin" in done.asm


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Launches compile instead; names of the compiled kernels."""
    names: set[str] = set()

    def launch(kernel: Any, grid: Any, arguments: Any, warps: int = 4, **named: Any) -> None:
        for arch in (80, 90) if kernel.__name__ not in names else (90,):
            compile_kernel(kernel, arguments, warps, named, arch)
        names.add(kernel.__name__)

    monkeypatch.setattr(launching, "limits", lambda device: launching.GPU)
    for module in pkgutil.iter_modules(autopar_kernels.__path__):
        loaded = importlib.import_module(f"autopar_kernels.{module.name}")
        if hasattr(loaded, "launch"):
            monkeypatch.setattr(loaded, "launch", launch)
        if hasattr(loaded, "runs_kernel"):
            monkeypatch.setattr(loaded, "runs_kernel", lambda *tensors: True)
    return names


@pytest.mark.slow
def test_every_kernel_compiles_for_gpus(compiled):
    for case in CASES:
        outputs = case.op(*case.arguments(torch.bfloat16))
        if case.differentiable:
            outputs = [outputs] if isinstance(outputs, torch.Tensor) else outputs
            sum(out.float().sum() for out in outputs if out.requires_grad).backward()
    from autopar_kernels.tiles import KERNELS

    assert compiled == set(KERNELS)
