"""How a kernel is compared with fp64: values, gradients, two equal runs, and which kernels were launched."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from autopar_kernels.launching import LAUNCHES
from hypothesis import strategies as st
from torch import Tensor

CHECKED: set[str] = set()
"""Kernels of which a test of this folder says that it checks them."""

DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
COLUMNS = st.sampled_from([1, 2, 7, 16, 33, 64, 100, 128, 129, 257, 512])
ROWS = st.sampled_from([(0,), (1,), (3,), (17,), (64,), (2, 5), (3, 1, 4)])
LAYOUTS = st.sampled_from(["plain", "padded", "every_other", "transposed"])
SEEDS = st.integers(0, 2**16)

BF16 = 2.0**-7
"""The interpreter truncates to bf16, where a device rounds."""


def checks(*kernels: str) -> Callable[[Any], Any]:
    """Declare which kernels a test launches; it fails if one of them was not launched while it ran."""
    CHECKED.update(kernels)

    def decorate(test: Any) -> Any:
        @functools.wraps(test)
        def run(*arguments: Any, **named: Any) -> None:
            before = {name: LAUNCHES[name] for name in kernels}
            test(*arguments, **named)
            idle = [name for name in kernels if LAUNCHES[name] == before[name]]
            assert not idle, f"not launched: {', '.join(idle)}"

        return run

    return decorate


def lay(values: Tensor, layout: str) -> Tensor:
    """The same values with other strides."""
    if values.dim() == 0:
        return values
    columns = values.shape[-1]
    if layout == "padded":
        out = values.new_full((*values.shape[:-1], columns + 3), 7.0)[..., 1 : columns + 1]
    elif layout == "every_other":
        out = values.new_full((*values.shape[:-1], 2 * columns), 7.0)[..., ::2]
    elif layout == "transposed":
        return values.transpose(0, -1).contiguous().transpose(0, -1)
    else:
        return values.clone()
    return out.copy_(values)


def numbers(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    """Normal numbers in fp64."""
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(shape, dtype=torch.float64, generator=generator)


@dataclass
class Comparison:
    """One call, compared with an unfused function.

    Attributes:
        fused: the op; takes the inputs in order.
        unfused: the same in ATen ops, as modelled code spells it; takes the inputs and the wide dtype of its upcasts.
        inputs: fp64 tensors (rounded to the dtype here), other tensors, or None.
        dtype: of the floating inputs.
        dtypes: of single inputs, by index, where they differ.
        layouts: strides of the inputs in turn, "plain" after the last.
        gradient: strides of the gradient, or "expanded" for one of stride 0.
        constant: indices of the floating inputs that need no gradient.
    """

    fused: Callable[..., Any]
    unfused: Callable[..., Any]
    inputs: Sequence[Tensor | None]
    dtype: torch.dtype
    dtypes: dict[int, torch.dtype] = field(default_factory=dict)
    layouts: Sequence[str] = ()
    gradient: str = "plain"
    constant: Sequence[int] = ()

    def low(self) -> list[Tensor | None]:
        """The inputs as the op gets them."""
        inputs: list[Tensor | None] = []
        for index, value in enumerate(self.inputs):
            layout = self.layouts[index] if index < len(self.layouts) else "plain"
            if value is not None and value.is_floating_point():
                value = lay(value.to(self.dtypes.get(index, self.dtype)), layout)
                value = value.detach().requires_grad_(index not in self.constant)
            inputs.append(value)
        return inputs

    def run(self, function: Callable[..., Any], inputs: Sequence[Tensor | None], *rest: Any) -> Any:
        """Results, and gradients of those inputs that need one."""
        results = function(*inputs, *rest)
        results = [results] if isinstance(results, Tensor) else list(results)
        wanted = [t for t in inputs if isinstance(t, Tensor) and t.requires_grad]
        upstream = [
            numbers(97 + i, *(() if self.gradient == "expanded" else r.shape))
            .to(self.dtype)
            .to(r.dtype)
            for i, r in enumerate(results)
        ]
        if self.gradient == "expanded":
            upstream = [g.expand(r.shape) for g, r in zip(upstream, results, strict=True)]
        else:
            upstream = [lay(g, self.gradient) for g in upstream]
        return results, torch.autograd.grad(results, wanted, upstream) if wanted else ()

    def check(self) -> None:
        """Compare errors against fp64, and two runs with each other."""
        low = self.low()
        exact_inputs = [
            t.detach().double().requires_grad_(t.requires_grad)
            if isinstance(t, Tensor) and t.is_floating_point()
            else t
            for t in low
        ]
        exact = self.run(self.unfused, exact_inputs, torch.float64)
        unfused = self.run(self.unfused, low, torch.float32)
        fused, again = self.run(self.fused, low), self.run(self.fused, low)
        largest = max(t.norm().item() for t in flat(exact))
        for e, u, f, a in zip(*(flat(run) for run in (exact, unfused, fused, again)), strict=True):
            assert f.dtype == u.dtype and f.shape == u.shape
            assert torch.equal(f, a), "two runs differ"
            compare(f, u, e, largest)


def flat(run: Any) -> list[Tensor]:
    """Results and gradients in one list."""
    results, gradients = run
    return [t.detach() for t in (*results, *gradients)]


def compare(fused: Tensor, unfused: Tensor, exact: Tensor, largest: float = 0.0) -> None:
    """The error of `fused` is at most that of `unfused`, by the Euclidean norm; bf16 within 2^-7.

    Both are fp32 inside and differ in the order of their terms, so roundings of fp32 are allowed besides: as many again in fp32
    results, and some relative to `largest`, whose terms a gradient that cancels has (a norm of one column).  Of few elements in
    half precision the error may be half a unit in the last place, which no rounding can be below and luck can.
    """
    exact = exact.double()
    size = exact.norm().item()
    error = (fused.double() - exact).norm().item()
    factor = 2.0 if fused.dtype == torch.float32 else 1.05
    allowed = factor * (unfused.double() - exact).norm().item()
    allowed += 2.0**-21 * max(size, largest) + 1e-30
    if fused.dtype == torch.float16 and fused.numel() < 256:
        allowed = max(allowed, 2.0**-11 * size)
    if fused.dtype == torch.bfloat16:
        allowed = max(allowed, BF16 * size)
    assert fused.isfinite().all() or not unfused.isfinite().all()
    assert error <= allowed, f"{fused.dtype}: {error} > {allowed}, of {size}"
