"""Kernels of RMSNorm and LayerNorm in the interpreter, against fp64 and the spellings of modelled code."""

from __future__ import annotations

import autopar_kernels.layer_norms
import autopar_kernels.norms  # noqa: F401 (both register their ops)
import pytest
import torch
import torch.nn.functional as F
from autopar_kernels.launching import LAUNCHES
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_checks import COLUMNS, DTYPES, LAYOUTS, ROWS, Comparison, checks, numbers
from support.effort import examples
from torch.utils.checkpoint import checkpoint

KERNELS = ("norm_forward_kernel", "norm_backward_kernel", "sum_few_kernel")
CASTS = st.sampled_from(["before", "weight", "after", "none"])


def unfused_rms(x, weight, gate, wide, offset, cast, groups, gate_first, eps=1e-6):
    """As transformers' modules spell it."""
    dtype = x.dtype
    value = x if cast == "none" else x.to(wide)
    if gate is not None and gate_first:
        value = value * F.silu(gate.to(wide))
    parts = value.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)
    value = (parts * torch.rsqrt(parts.pow(2).mean(-1, keepdim=True) + eps)).view(x.shape)
    if cast in ("before", "weight"):
        value = value.to(weight.dtype if cast == "weight" and weight is not None else dtype)
    if weight is not None:
        scale = weight.to(wide) if cast == "after" else weight
        value = value * (scale + offset if offset else scale)
    if gate is not None and not gate_first:
        value = (value * F.silu(gate.to(wide))).to(dtype)
    return value.to(dtype) if cast == "after" else value


@checks(*KERNELS)
@settings(max_examples=examples(1, 60))
@given(
    ROWS, COLUMNS, DTYPES, CASTS, st.sampled_from([0.0, 1.0]), st.booleans(),
    LAYOUTS, st.sampled_from(["plain", "padded", "every_other", "transposed", "expanded"]),
)  # fmt: skip
@example((3,), 257, torch.float16, "before", 0.0, True, "every_other", "expanded")
@example((64,), 16, torch.float32, "after", 1.0, True, "plain", "transposed")
@example((0,), 16, torch.float32, "after", 1.0, True, "plain", "plain")
def test_rms_norm(rows, columns, dtype, cast, offset, weighted, layout, gradient):
    weight = numbers(1, columns) if weighted else None
    Comparison(
        lambda x, w: torch.ops.autopar.rms_norm(x, w, None, 1e-6, offset, cast),
        lambda x, w, wide: unfused_rms(x, w, None, wide, offset, cast, 1, False),
        [numbers(0, *rows, columns), weight],
        dtype,
        layouts=[layout],
        gradient=gradient,
    ).check()


@checks(*KERNELS)
@settings(max_examples=examples(1, 60))
@given(
    ROWS, st.sampled_from([1, 5, 130]), st.sampled_from([1, 2, 3]), DTYPES, st.booleans(),
    LAYOUTS, LAYOUTS,
)  # fmt: skip
@example((5,), 130, 2, torch.float16, True, "padded", "every_other")
@example((5,), 130, 2, torch.float16, False, "every_other", "padded")
def test_gates_and_groups(rows, size, groups, dtype, gate_first, of_x, of_gate):
    columns = size * groups
    Comparison(
        lambda x, w, z: torch.ops.autopar.rms_norm(
            x, w, z, 1e-6, 0.0, "before", groups, gate_first
        ),
        lambda x, w, z, wide: unfused_rms(x, w, z, wide, 0.0, "before", groups, gate_first),
        [numbers(0, *rows, columns), numbers(1, columns), numbers(2, *rows, columns)],
        dtype,
        layouts=[of_x, "plain", of_gate],
    ).check()


@checks(*KERNELS)
@settings(max_examples=examples(1, 60))
@given(ROWS, COLUMNS, DTYPES, LAYOUTS, LAYOUTS, st.booleans(), st.booleans())
@example((2, 5), 129, torch.float16, "every_other", "transposed", False, False)
@example((2, 5), 129, torch.bfloat16, "plain", "plain", True, True)
def test_addition_before_a_norm(rows, columns, dtype, of_x, of_residual, layer, wide_residual):
    """The sum is a second result, with its own gradient; the residual may be wider than x."""

    def fused(x, residual, weight, bias):
        if layer:
            return torch.ops.autopar.add_layer_norm(x, residual, weight, bias, 1e-5)
        return torch.ops.autopar.add_rms_norm(x, residual, weight, 1e-6, 1.0, "after")

    def unfused(x, residual, weight, bias, wide):
        total = x + residual
        if layer:
            normal = F.layer_norm(
                total.to(wide), (columns,), weight.to(wide), bias.to(wide), 1e-5
            ).to(total.dtype)
        else:
            normal = unfused_rms(total, weight, None, wide, 1.0, "after", 1, False)
        return normal, total

    Comparison(
        fused,
        unfused,
        [
            numbers(0, *rows, columns),
            numbers(1, *rows, columns),
            numbers(2, columns),
            numbers(3, columns) if layer else None,
        ],
        dtype,
        dtypes={1: torch.float32} if wide_residual else {},
        layouts=[of_x, of_residual],
    ).check()


@checks(*KERNELS)
@settings(max_examples=examples(1, 60))
@given(ROWS, COLUMNS.filter(lambda n: n > 1), DTYPES, LAYOUTS, st.booleans(), st.booleans())
@example((3, 1, 4), 257, torch.float16, "every_other", True, True)
def test_layer_norm(rows, columns, dtype, layout, weighted, biased):
    Comparison(
        lambda x, w, b: torch.ops.autopar.layer_norm(x, w, b, 1e-5),
        lambda x, w, b, wide: F.layer_norm(x, (columns,), w, b, 1e-5),
        [
            numbers(0, *rows, columns, scale=3.0),
            numbers(1, columns) if weighted else None,
            numbers(2, columns) if biased else None,
        ],
        dtype,
        layouts=[layout],
    ).check()


@checks("norm_forward_kernel")
def test_extreme_rows():
    """Rows of zeros, of one value, with a large mean, and of large values: finite, and as exact as torch."""
    x = torch.stack(
        [torch.zeros(130), torch.full((130,), 3.0), 1000 + numbers(0, 130).float(),
         1e4 * numbers(1, 130).float()]
    ).double()  # fmt: skip
    weight = numbers(2, 130)
    Comparison(
        lambda x, w: torch.ops.autopar.layer_norm(x, w, None, 1e-5),
        lambda x, w, wide: F.layer_norm(x.to(wide), (130,), w.to(wide), None, 1e-5).to(x.dtype),
        [x, weight],
        torch.float32,
    ).check()
    Comparison(
        lambda x, w: torch.ops.autopar.rms_norm(x, w),
        lambda x, w, wide: unfused_rms(x, w, None, wide, 0.0, "before", 1, False),
        [x, weight],
        torch.float16,
    ).check()


@checks("norm_backward_kernel")
@pytest.mark.parametrize("wanted", [0, 1])
def test_only_the_gradient_that_is_asked_for(wanted):
    """Zero-bubble schedules ask for the gradients of inputs and of weights in turn."""
    inputs = [numbers(0, 5, 40).float(), numbers(1, 40).float()]
    for both in (True, False):
        for index, tensor in enumerate(inputs):
            tensor.requires_grad_(both or index == wanted)
        before = LAUNCHES["sum_few_kernel"]
        torch.ops.autopar.rms_norm(*inputs).sum().backward()
    if wanted == 0:
        assert LAUNCHES["sum_few_kernel"] == before, "no sums without a weight's gradient"
    twice, other = inputs[wanted].grad, inputs[1 - wanted].grad
    assert twice is not None and other is not None
    once = torch.ops.autopar.rms_norm(*(fresh := [t.detach().requires_grad_() for t in inputs]))
    once.sum().backward()
    assert torch.equal(twice, 2 * fresh[wanted].grad), "added to itself once"
    assert torch.equal(other, fresh[1 - wanted].grad), "the other one was asked for once"


@checks("norm_backward_kernel")
def test_a_gradient_with_two_consumers_is_not_changed():
    x, weight = numbers(0, 5, 40).float().requires_grad_(), numbers(1, 40).float()
    out, total = torch.ops.autopar.add_rms_norm(x, x.detach(), weight)
    gradient = numbers(2, 5, 40).float()
    kept = gradient.clone()
    torch.autograd.grad([out, total], x, [gradient, gradient])
    assert torch.equal(gradient, kept)


@checks(*KERNELS)
def test_shards_of_the_sequence_equal_the_whole():
    """Sharded rows need no gather: results and dx are equal to the bit, and the weight's gradient is a sum."""
    x, weight = numbers(0, 12, 200).half(), numbers(1, 200).half().float().requires_grad_()
    gradient = numbers(2, 12, 200).half()

    def run(rows, upstream):
        rows = rows.clone().requires_grad_()
        out = torch.ops.autopar.rms_norm(rows, weight, None, 1e-6, 1.0, "after")
        return out, *torch.autograd.grad(out, [rows, weight], upstream)

    whole = run(x, gradient)
    parts = [run(*shard) for shard in zip(x.chunk(3), gradient.chunk(3), strict=True)]
    for index in (0, 1):
        assert torch.equal(torch.cat([part[index] for part in parts]), whole[index])
    torch.testing.assert_close(sum(part[2] for part in parts), whole[2], rtol=1e-5, atol=1e-5)


@checks(*KERNELS)
def test_recomputation():
    """Activation checkpointing runs forward twice and gives the same gradients."""
    x, weight = numbers(0, 5, 40).float(), numbers(1, 40).float().requires_grad_()

    def block(value):
        out, total = torch.ops.autopar.add_rms_norm(value, x, weight)
        return out * total

    found = []
    for recompute in (False, True):
        value = numbers(2, 5, 40).float().requires_grad_()
        out = checkpoint(block, value, use_reentrant=False) if recompute else block(value)
        found.append(torch.autograd.grad(out.sum(), [value, weight]))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
