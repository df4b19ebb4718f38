"""What only a CUDA device shows: compiled kernels, bf16 that rounds, long rows, offsets above 2^31, two devices."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.nn.functional as F

for _name in ("bias_activations", "glu", "layer_norms", "losses", "norms", "rotary", "softmax"):
    importlib.import_module(f"autopar_kernels.{_name}")

DEVICE = "cuda"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def rms(x, weight):
    return weight * (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)).to(
        x
    )


def half_turned(x, cos, sin):
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin


ops = torch.ops.autopar
PAIRS = {
    "rms_norm": (
        lambda x, w: ops.rms_norm(x, w),
        rms,
        lambda x, w: w * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6),
        [(300, 4096), (4096,)],
    ),
    "layer_norm": (
        lambda x, w, b: ops.layer_norm(x, w, b),
        lambda x, w, b: F.layer_norm(x, w.shape, w, b),
        None,
        [(300, 5000), (5000,), (5000,)],
    ),
    "wide_rows": (
        lambda x, w, b: ops.layer_norm(x, w, b),
        lambda x, w, b: F.layer_norm(x, w.shape, w, b),
        None,
        [(300, 16384), (16384,), (16384,)],
    ),
    "long_rows": (
        lambda x, w: ops.layer_norm(x, w),
        lambda x, w: F.layer_norm(x, w.shape, w),
        None,
        [(20, 40000), (40000,)],
    ),
    "glu": (
        lambda x: ops.glu(x),
        lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
        None,
        [(300, 2 * 5504)],
    ),
    "bias_activation": (
        lambda x, b: ops.bias_activation(x, b),
        lambda x, b: F.gelu(x + b, approximate="tanh"),
        None,
        [(300, 4096), (4096,)],
    ),
    "rotary": (
        lambda q, k, c, s: ops.rotary(q, k, c.detach(), s.detach()),
        lambda q, k, c, s: tuple(
            half_turned(x, c.detach().unsqueeze(1), s.detach().unsqueeze(1)) for x in (q, k)
        ),
        None,
        [(2, 32, 200, 128), (2, 8, 200, 128), (1, 200, 128), (1, 200, 128)],
    ),
    "softmax": (
        lambda x: ops.softmax(x, None, None, 0.1),
        lambda x: torch.softmax(x * 0.1, -1),
        None,
        [(2, 4, 100, 3000)],
    ),
}


def results_and_gradients(function, inputs):
    """Detached results and gradients; inputs that the function detaches have none."""
    inputs = [t.detach().requires_grad_() for t in inputs]
    results = function(*inputs)
    results = [results] if isinstance(results, torch.Tensor) else list(results)
    generator = torch.Generator(DEVICE).manual_seed(1)
    upstream = [torch.randn(r.shape, device=DEVICE, generator=generator).to(r) for r in results]
    gradients = torch.autograd.grad(results, inputs, upstream, allow_unused=True)
    return [t.detach() for t in (*results, *gradients) if t is not None]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", PAIRS)
def test_errors_are_at_most_those_of_unfused_ops(name, dtype):
    """Against fp64, and two runs are equal to the bit."""
    fused, unfused, exact, shapes = PAIRS[name]
    generator = torch.Generator(DEVICE).manual_seed(0)
    inputs = [torch.randn(shape, device=DEVICE, generator=generator).to(dtype) for shape in shapes]
    truth = results_and_gradients(exact or unfused, [t.double() for t in inputs])
    once, twice = results_and_gradients(fused, inputs), results_and_gradients(fused, inputs)
    for f, again, u, e in zip(
        once, twice, results_and_gradients(unfused, inputs), truth, strict=True
    ):
        assert torch.equal(f, again)
        assert (f - e).norm() <= 1.02 * (u - e).norm() + 2.0**-21 * e.norm()


@pytest.mark.parametrize("classes", [17, 65537, 129920, 262208])
@pytest.mark.parametrize("cap", [None, 30.0])
def test_vocabularies(classes, cap):
    generator = torch.Generator(DEVICE).manual_seed(0)
    logits = torch.randn(65, classes, device=DEVICE, generator=generator).bfloat16()
    target = torch.randint(0, classes, (65,), device=DEVICE, generator=generator)
    target[::5] = -100

    def unfused(x):
        x = x if cap is None else cap * torch.tanh(x / cap)
        return F.cross_entropy(x, target, label_smoothing=0.1)

    def fused(x):
        return ops.cross_entropy(x, target, None, -100, 0.1, 0.0, cap)

    (loss, gradient), (exact, expected) = (
        results_and_gradients(function, [x])
        for function, x in ((fused, logits), (unfused, logits.double()))
    )
    assert (loss - exact).abs() <= 1e-5 * exact
    assert (gradient - expected).norm() <= 2.0**-8 * expected.norm()


def test_offsets_above_2_to_the_31():
    rows, classes = 16500, 131072
    logits = torch.empty(rows, classes, device=DEVICE, dtype=torch.bfloat16)
    assert logits.numel() > 2**31
    logits[-1].normal_()
    target = torch.full((rows,), -100, device=DEVICE)
    target[-1] = 5
    logits[:-1].zero_()
    logits.requires_grad_()
    ops.cross_entropy(logits, target).backward()
    last = logits.detach()[-1:].double().requires_grad_()
    F.cross_entropy(last, target[-1:]).backward()
    assert (logits.grad[-1] - last.grad[0]).norm() <= 2.0**-8 * last.grad.norm()
    assert not logits.grad[:-1].any()


@pytest.mark.parametrize("name", PAIRS)
def test_torch_compile_takes_the_ops_whole(name):
    """Floats stay constants of the kernels, and no op breaks the graph."""
    fused, *_, shapes = PAIRS[name]
    inputs = [torch.randn(shape, device=DEVICE).bfloat16() for shape in shapes]
    compiled = torch.compile(fused, fullgraph=True)
    for found, expected in zip(
        results_and_gradients(compiled, inputs), results_and_gradients(fused, inputs), strict=True
    ):
        torch.testing.assert_close(found, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_tensors_on_a_device_that_is_not_the_current_one():
    torch.cuda.set_device(0)
    x, weight = torch.randn(5, 300, device="cuda:1"), torch.ones(300, device="cuda:1")
    torch.testing.assert_close(ops.rms_norm(x, weight), rms(x, weight))
