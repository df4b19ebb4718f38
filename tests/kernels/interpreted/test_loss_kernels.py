"""Kernels of cross-entropy in the interpreter, whole and sharded, against fp64 and ATen."""

from __future__ import annotations

import autopar_kernels.losses  # noqa: F401 (registers the ops)
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_checks import DTYPES, LAYOUTS, Comparison, checks, numbers
from support.effort import examples

KERNELS = (
    "cross_entropy_local_kernel",
    "cross_entropy_rows_kernel",
    "cross_entropy_gradient_kernel",
)
VOCABULARIES = st.sampled_from([1, 2, 17, 128, 129, 257, 512])
ROWS = st.sampled_from([(0,), (1,), (3,), (9,), (2, 3), (2, 1, 3)])


def labels(rows, classes, ignored, seed=3):
    """Random classes; "some" or "all" rows are ignored."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(0, classes, rows, generator=generator)
    if ignored == "all":
        return torch.full_like(target, -100)
    if ignored == "some":
        target = target.masked_fill(torch.rand(rows, generator=generator) < 0.4, -100)
    return target


def unfused(logits, target, weight, wide, smoothing, z_loss, cap, reduction):
    """As models compute it: logits.float(), a cap, F.cross_entropy, and the z-loss over rows that count."""
    x = logits.to(wide)
    x = (cap * torch.tanh(x / cap) if cap else x).reshape(-1, logits.shape[-1])
    flat = target.reshape(-1)
    weight = None if weight is None else weight.to(wide)
    rows = F.cross_entropy(x, flat, weight, label_smoothing=smoothing, reduction="none")
    valid = flat != -100
    rows = rows + (z_loss * torch.logsumexp(x, -1).square()).where(valid, 0)
    if reduction == "none":
        return rows.view(target.shape)
    if reduction == "sum":
        return rows.sum()
    scale = valid.to(wide) if weight is None else weight[flat.where(valid, 0)] * valid
    return rows.sum() / scale.sum()


@checks(*KERNELS)
@settings(max_examples=examples(2, 60))
@given(
    ROWS, VOCABULARIES, DTYPES, st.sampled_from(["none", "some"]), st.sampled_from([0.0, 0.1]),
    st.sampled_from([0.0, 1e-2]), st.sampled_from([None, 2.0]), st.booleans(), LAYOUTS,
    st.sampled_from(["none", "sum", "mean"]),
)  # fmt: skip
@example((9,), 257, torch.float16, "some", 0.1, 1e-2, 2.0, True, "every_other", "mean")
@example((2, 3), 129, torch.float32, "some", 0.1, 0.0, None, True, "padded", "none")
@example((9,), 17, torch.float32, "none", 0.0, 0.0, 2.0, False, "transposed", "sum")
def test_whole_rows(
    rows, classes, dtype, ignored, smoothing, z_loss, cap, weighted, layout, reduction
):
    target = labels(rows, classes, ignored)
    if reduction == "mean" and not (target != -100).any():
        reduction = "sum"
    weight = numbers(1, classes).abs() + 0.1 if weighted else None
    Comparison(
        lambda x, w: torch.ops.autopar.cross_entropy(
            x, target, w, -100, smoothing, z_loss, cap, reduction
        ),
        lambda x, w, wide: unfused(x, target, w, wide, smoothing, z_loss, cap, reduction),
        [numbers(0, *rows, classes, scale=2.0), weight],
        dtype,
        layouts=[layout],
        constant=[1],
    ).check()


@checks(*KERNELS)
@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_shards_of_the_vocabulary(shards, smoothing):
    """tp = 4 equals tp = 1: the same loss, and each shard's part of the gradient."""
    classes, rows = 40, (2, 3)
    logits = numbers(0, *rows, classes).float()
    target, weight = labels(rows, classes, "some"), (numbers(1, classes).abs() + 0.1).float()
    parts = [p.clone().requires_grad_() for p in logits.chunk(shards, -1)]
    starts = [i * classes // shards for i in range(shards)]
    statistics = torch.ops.autopar.cross_entropy_merge(
        torch.stack(
            [
                torch.ops.autopar.cross_entropy_local(
                    part.detach(), target, weight, start, smoothing > 0, 3.0
                )
                for part, start in zip(parts, starts, strict=True)
            ]
        )
    )
    assert statistics.shape == (4 if smoothing else 3, 6)
    whole = logits.double().requires_grad_()
    expected = unfused(whole, target, weight.double(), torch.float64, smoothing, 1e-3, 3.0, "none")
    expected.sum().backward()
    for part, start in zip(parts, starts, strict=True):
        loss, scale = torch.ops.autopar.cross_entropy_merged(
            part, target, statistics, weight, start, classes, -100, smoothing, 1e-3, 3.0
        )
        torch.testing.assert_close(loss.double(), expected.detach(), rtol=2e-6, atol=2e-6)
        assert (scale == 0).equal(target == -100)
        loss.sum().backward()
        torch.testing.assert_close(
            part.grad.double(),
            whole.grad[..., start : start + part.shape[-1]],
            rtol=1e-5,
            atol=2e-6,
        )


@checks(*KERNELS)
def test_all_rows_ignored():
    """The sum is 0 and the mean is nan, as in torch; the gradient is 0 even where a logit is infinite."""
    logits = numbers(0, 4, 20).float()
    logits[1, 3], logits[2, 5] = float("-inf"), float("inf")
    target = torch.full((4,), -100)
    for reduction in ("sum", "mean"):
        x = logits.clone().requires_grad_()
        loss = torch.ops.autopar.cross_entropy(x, target, None, -100, 0.1, 1e-3, None, reduction)
        loss.backward()
        assert loss.item() == 0 if reduction == "sum" else loss.isnan()
        assert not x.grad.any()


@checks(*KERNELS)
@pytest.mark.parametrize("weighted", [False, True])
def test_a_target_that_is_no_class_gives_nan(weighted):
    """torch asserts it on the device; no memory beyond the class weights is read."""
    for dtype in (torch.float32, torch.float64):
        x = numbers(0, 4, 20).to(dtype).requires_grad_()
        weight = torch.rand(20, dtype=dtype) if weighted else None
        target = torch.tensor([3, 20, -1, -100])
        loss = torch.ops.autopar.cross_entropy(
            x, target, weight, label_smoothing=0.1, reduction="none"
        )
        assert loss.isnan().tolist() == [False, True, True, False]
        loss.sum().backward()
        assert x.grad.isnan().all(1).tolist() == [False, True, True, False]


@checks(*KERNELS)
def test_large_and_masked_logits():
    """Logits of 1e4 overflow no exponential, and a masked class (-inf) has probability 0, whole blocks of them too."""
    x = numbers(0, 3, 300, scale=1e4).clamp(-6e4, 6e4)
    x[1, :200] = float("-inf")
    x[2, 7:] = float("-inf")
    target = torch.tensor([5, 250, 3])
    for dtype in (torch.float32, torch.float16):
        Comparison(
            lambda x: torch.ops.autopar.cross_entropy(x, target),
            lambda x, wide: unfused(x, target, None, wide, 0.0, 0.0, None, "mean"),
            [x],
            dtype,
        ).check()


@checks(*KERNELS)
def test_shifted_logits_are_not_copied():
    """`logits[:, :-1]` is read where it lies: the kernels' first argument is its own memory."""
    whole = numbers(0, 2, 4, 30).half()
    target = labels((2, 3), 30, "some")
    Comparison(
        lambda x: torch.ops.autopar.cross_entropy(x[:, :-1], target),
        lambda x, wide: unfused(x[:, :-1], target, None, wide, 0.0, 0.0, None, "mean"),
        [whole.double()],
        torch.float16,
    ).check()
    from autopar_kernels.losses import _layout

    shifted = whole[:, :-1]
    assert _layout(shifted)[0].data_ptr() == whole.data_ptr()


@checks("cross_entropy_gradient_kernel")
def test_a_random_gradient_for_each_token():
    """reduction="none" with masks and weights of the caller's own."""
    target = labels((9,), 33, "some")
    Comparison(
        lambda x: torch.ops.autopar.cross_entropy(x, target, None, -100, 0.0, 0.0, None, "none"),
        lambda x, wide: unfused(x, target, None, wide, 0.0, 0.0, None, "none"),
        [numbers(0, 9, 33)],
        torch.float32,
        gradient="every_other",
    ).check()


def test_nothing_of_the_size_of_the_logits_is_kept():
    logits = numbers(0, 8, 64).float().requires_grad_()
    target, kept = labels((8,), 64, "some"), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        torch.ops.autopar.cross_entropy(logits, target)
    assert [t.data_ptr() for t in kept if t.numel() >= 64 * 8] == [logits.data_ptr()]
