"""Kernels of gated and biased activations in the interpreter, against fp64 and ATen."""

from __future__ import annotations

import autopar_kernels.bias_activations
import autopar_kernels.glu  # noqa: F401 (both register their ops)
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_checks import COLUMNS, DTYPES, LAYOUTS, ROWS, Comparison, checks, numbers
from support.effort import examples

ACTS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}
KERNELS = ("glu_forward_kernel", "glu_backward_kernel")


@checks(*KERNELS)
@settings(max_examples=examples(2, 60))
@given(
    ROWS, COLUMNS, DTYPES, st.sampled_from(sorted(ACTS)), LAYOUTS, LAYOUTS,
    st.sampled_from(["plain", "every_other", "expanded"]),
)  # fmt: skip
@example((17,), 257, torch.float16, "gelu_tanh", "every_other", "transposed", "expanded")
@example((17,), 129, torch.float32, "gelu", "plain", "padded", "plain")
def test_two_tensors(rows, columns, dtype, act, of_gate, of_up, gradient):
    Comparison(
        lambda z, u: torch.ops.autopar.glu(z, u, act),
        lambda z, u, wide: ACTS[act](z) * u,
        [numbers(0, *rows, columns, scale=2.0), numbers(1, *rows, columns)],
        dtype,
        layouts=[of_gate, of_up],
        gradient=gradient,
    ).check()


@checks(*KERNELS)
@settings(max_examples=examples(2, 60))
@given(
    ROWS, COLUMNS, DTYPES, st.sampled_from(["gate_up", "up_gate", "interleaved"]), LAYOUTS,
    st.booleans(),
)  # fmt: skip
@example((2, 5), 129, torch.float16, "interleaved", "padded", True)
@example((2, 5), 129, torch.float32, "up_gate", "every_other", False)
def test_fused_projections(rows, columns, dtype, layout, strides, clamped):
    limit, alpha, shift = (1.0, 1.702, 1.0) if clamped else (None, 1.0, 0.0)

    def unfused(both, wide):
        if layout == "interleaved":
            z, u = both[..., ::2], both[..., 1::2]
        else:
            z, u = both.chunk(2, -1)[:: 1 if layout == "gate_up" else -1]
        if clamped:
            z, u = z.clamp(max=limit), u.clamp(-limit, limit)
        return z * torch.sigmoid(alpha * z) * (u + shift)

    Comparison(
        lambda both: torch.ops.autopar.glu(both, None, "silu", alpha, shift, limit, layout),
        unfused,
        [numbers(0, *rows, 2 * columns, scale=2.0)],
        dtype,
        layouts=[strides],
    ).check()


@checks("bias_forward_kernel", "bias_backward_kernel")
@settings(max_examples=examples(2, 60))
@given(ROWS, COLUMNS, DTYPES, st.sampled_from(sorted(ACTS)), LAYOUTS)
@example((64,), 257, torch.float16, "gelu_tanh", "every_other")
def test_biased_activation(rows, columns, dtype, act, layout):
    Comparison(
        lambda x, b: torch.ops.autopar.bias_activation(x, b, act),
        lambda x, b, wide: ACTS[act](x + b),
        [numbers(0, *rows, columns), numbers(1, columns)],
        dtype,
        layouts=[layout],
    ).check()


@checks("glu_backward_kernel")
@pytest.mark.parametrize("act", sorted(ACTS))
def test_large_values_are_finite(act):
    values = torch.tensor([[-1e4, -100.0, -20.0, 0.0, 20.0, 100.0, 1e4, 3e4]]).double()
    Comparison(
        lambda z, u: torch.ops.autopar.glu(z, u, act),
        lambda z, u, wide: ACTS[act](z) * u,
        [values, torch.ones_like(values)],
        torch.float32,
    ).check()


def not_finite() -> list[torch.Tensor]:
    """Two tensors with every pair of NaN, infinities and usual numbers at one place."""
    values = torch.tensor([float("nan"), float("inf"), float("-inf"), -2.0, 0.5, 2.0]).double()
    return [each.reshape(1, -1) for each in torch.meshgrid(values, values, indexing="ij")]


@checks(*KERNELS)
@pytest.mark.parametrize("limit", [None, 1.0])
@pytest.mark.parametrize("act", sorted(ACTS))
def test_nan_and_infinity_go_where_they_go_unfused(act, limit):
    """A maximum or minimum of Triton drops NaN, and a step that has diverged would look sound."""

    def unfused(z, u):
        z, u = (z, u) if limit is None else (z.clamp(max=limit), u.clamp(-limit, limit))
        return ACTS[act](z) * u

    for dtype in (torch.float32, torch.float64):  # fp64 has no kernel
        found = []
        for call in (lambda z, u: torch.ops.autopar.glu(z, u, act, 1.0, 0.0, limit), unfused):
            inputs = [x.to(dtype).requires_grad_() for x in not_finite()]
            out = call(*inputs)
            found.append((out.detach(), *torch.autograd.grad(out.sum(), inputs)))
        # torch's own gelu of an infinity is infinite or NaN, as it is vectorized or not
        compared = inputs[0].isfinite() | inputs[0].isnan() | (act == "relu")
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours[compared], theirs[compared], equal_nan=True)


@checks("bias_forward_kernel", "bias_backward_kernel")
@pytest.mark.parametrize("act", sorted(ACTS))
def test_nan_stays_after_a_bias(act):
    for dtype in (torch.float32, torch.float64):
        x, gradient = (each.to(dtype) for each in not_finite())
        found = []
        for call in (
            lambda x, b: torch.ops.autopar.bias_activation(x, b, act),
            lambda x, b: ACTS[act](x + b),
        ):
            inputs = [x.clone().requires_grad_(), torch.zeros(36, dtype=dtype).requires_grad_()]
            out = call(*inputs)
            found.append((out.detach(), *torch.autograd.grad(out, inputs, gradient)))
        compared = x.isfinite() | x.isnan() | (act == "relu")
        for ours, theirs in zip(*found, strict=True):
            kept = compared.view(ours.shape)
            torch.testing.assert_close(ours[kept], theirs[kept], equal_nan=True)


@checks("glu_backward_kernel")
def test_the_inputs_and_gradient_are_not_changed():
    """A second backward through the same saved tensors gives the same: recomputation may run it twice."""
    both = numbers(0, 3, 10).float().requires_grad_()
    out = torch.ops.autopar.glu(both)
    gradient = numbers(1, 3, 5).float()
    kept = gradient.clone(), both.detach().clone()
    first = torch.autograd.grad(out, both, gradient, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(out, both, gradient)[0])
    assert torch.equal(gradient, kept[0]) and torch.equal(both, kept[1])
