"""Time of every kernel of `autopar_kernels` on a CUDA device, against eager PyTorch, torch.compile and other libraries.

    python benchmarks/speed/kernels.py [--cases WORD ...] [--compile] [--rounds 30] [--output FILE]

A time is the median over replays of a CUDA graph, each after a write of 256 MiB that empties the L2 cache: what the device needs, without
the host.  `of copy` is the time of a device copy that moves the bytes which the op must move, over the op's time.  The op must read each
argument once and write each result once.  `host` is what one eager call of forward and backward takes the host.  Rivals that are not
installed are left out.  Without a CUDA device it prints the bytes and the time that the bandwidth of an H100 allows, and says so.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

if not __package__:  # as a script
    sys.path[0] = str(Path(__file__).resolve().parents[2])

for _name in (
    *("bias_activations", "expert_rows", "glu", "layer_norms", "losses", "norms"),
    *("partial_attention", "rotary", "softmax", "sums"),
):
    importlib.import_module(f"autopar_kernels.{_name}")

ops = torch.ops.autopar
Function = Callable[..., Any]
H100_BYTES_PER_S = 3.35e12
"""Datasheet of the H100 SXM; used without a device alone."""
FLUSHED_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Case:
    """A fused op and what it replaces.

    Attributes:
        name: the op.
        size: the sizes, as text.
        make: draws the arguments on a device.
        fused: computes the result or results from the arguments with autopar's op.
        eager: computes the same in plain PyTorch.
        forward_bytes: the bytes that forward must move; 0 if not known.
        both_bytes: the bytes that forward and backward must move; 0 if not known or not timed.
        rivals: the same in other libraries, by name; None if a library is not installed.
    """

    name: str
    size: str
    make: Callable[[torch.device], list[Tensor]]
    fused: Function
    eager: Function
    forward_bytes: int
    both_bytes: int
    rivals: dict[str, Function] = field(default_factory=dict)


def drawn(*shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> Callable[..., Any]:
    """A function from a device to random tensors of these shapes, which need gradients."""
    return lambda device: [
        torch.randn(shape, device=device, dtype=dtype).requires_grad_() for shape in shapes
    ]


def eager_rms(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def eager_add_rms(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return eager_rms(total, weight), total


def eager_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    def turned(x: Tensor) -> Tensor:
        low, high = x.chunk(2, -1)
        return x * cos.unsqueeze(1) + torch.cat([-high, low], -1) * sin.unsqueeze(1)

    return turned(q), turned(k)


def eager_merge(a: Tensor, la: Tensor, b: Tensor, lb: Tensor) -> tuple[Tensor, Tensor]:
    level = torch.logaddexp(la, lb)
    first, second = ((x - level).exp().unsqueeze(-1) for x in (la, lb))
    return (first * a + second * b).to(a.dtype), level


def eager_combine(rows: Tensor, order: Tensor, inverse: Tensor, weights: Tensor) -> Tensor:
    tokens, choices = weights.shape
    return (rows[inverse].view(tokens, choices, -1) * weights.unsqueeze(-1)).sum(1)


def rival(module: str, name: str) -> Any:
    """A function or class of another library, or None where it is not installed."""
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError:
        return None


def norm_cases(rows: int, columns: int) -> list[Case]:
    size, x, w = f"{rows}x{columns}", 2 * rows * columns, (columns,)
    wide = (rows, columns)
    rms, layer = (
        rival("liger_kernel.ops.rms_norm", "LigerRMSNormFunction"),
        rival("liger_kernel.ops.layer_norm", "LigerLayerNormFunction"),
    )
    fused_add = rival("liger_kernel.ops.fused_add_rms_norm", "LigerFusedAddRMSNormFunction")
    of_quack = rival("quack.rmsnorm", "rmsnorm")
    return [
        Case(
            "rms_norm", size, drawn(wide, w), lambda x, w: ops.rms_norm(x, w), eager_rms, 2 * x, 5 * x,
            {
                "torch": lambda x, w: F.rms_norm(x, w.shape, w, 1e-6),
                "liger": rms and (lambda x, w: rms.apply(x, w, 1e-6, 0.0, "llama", False)),
                "quack": of_quack and (lambda x, w: of_quack(x, w, eps=1e-6)),
            },
        ),
        Case(
            "add_rms_norm", size, drawn(wide, wide, w), lambda x, r, w: ops.add_rms_norm(x, r, w),
            eager_add_rms, 4 * x, 8 * x,
            {"liger": fused_add and (lambda x, r, w: fused_add.apply(x, r, w, 1e-6, 0.0, "llama", False))},
        ),
        Case(
            "layer_norm", size, drawn(wide, w, w), lambda x, w, b: ops.layer_norm(x, w, b),
            lambda x, w, b: F.layer_norm(x, w.shape, w, b), 2 * x, 5 * x,
            {"liger": layer and (lambda x, w, b: layer.apply(x, w, b, 1e-5))},
        ),
    ]  # fmt: skip


def glu_case(rows: int, columns: int) -> Case:
    x = 2 * rows * columns
    silu = rival("liger_kernel.ops.swiglu", "LigerSiLUMulFunction")
    return Case(
        "glu", f"{rows}x2x{columns}", drawn((rows, 2 * columns)), lambda x: ops.glu(x),
        lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], 3 * x, 8 * x,
        {"liger": silu and (lambda x: silu.apply(*x.chunk(2, -1)))},
    )  # fmt: skip


def bias_case(rows: int, columns: int) -> Case:
    x = 2 * rows * columns
    return Case(
        "bias_activation", f"{rows}x{columns}", drawn((rows, columns), (columns,)),
        lambda x, b: ops.bias_activation(x, b), lambda x, b: F.gelu(x + b, approximate="tanh"), 2 * x, 5 * x,
    )  # fmt: skip


def rotary_case(batch: int, tokens: int, heads: int, kv_heads: int, dim: int) -> Case:
    def make(device: torch.device) -> list[Tensor]:
        # as projections leave them: (B, T, H, D), seen as (B, H, T, D)
        q, k = (
            torch.randn(batch, tokens, h, dim, device=device, dtype=torch.bfloat16)
            .requires_grad_().transpose(1, 2)
            for h in (heads, kv_heads)
        )  # fmt: skip
        angle = torch.rand(1, tokens, dim // 2, device=device).repeat(1, 1, 2)
        return [q.detach().requires_grad_(), k.detach().requires_grad_(), angle.cos().bfloat16(), angle.sin().bfloat16()]  # fmt: skip

    x = 2 * batch * tokens * dim * (heads + kv_heads)
    tables = 2 * 2 * tokens * dim
    rope = rival("liger_kernel.ops.rope", "LigerRopeFunction")
    return Case(
        "rotary", f"{batch}x{tokens}, {heads}+{kv_heads} heads of {dim}", make,
        lambda q, k, c, s: ops.rotary(q, k, c, s), eager_rotary, 2 * x + tables, 4 * x + 2 * tables,
        {"liger": rope and (lambda q, k, c, s: rope.apply(q, k, c, s))},
    )  # fmt: skip


def softmax_case(batch: int, heads: int, queries: int, keys: int) -> Case:
    x = 2 * batch * heads * queries * keys
    mask = 2 * queries * keys

    def make(device: torch.device) -> list[Tensor]:
        (scores,) = drawn((batch, heads, queries, keys))(device)
        hidden = torch.full((queries, keys), float("-inf"), device=device).triu(1).bfloat16()
        return [scores, hidden]

    return Case(
        "softmax", f"{batch}x{heads}x{queries}x{keys}", make, lambda x, m: ops.softmax(x, m, None, 0.125),
        lambda x, m: torch.softmax((x * 0.125 + m).float(), -1).to(x.dtype), 2 * x + mask, 5 * x + 2 * mask,
    )  # fmt: skip


def loss_case(rows: int, classes: int) -> Case:
    def make(device: torch.device) -> list[Tensor]:
        return [*drawn((rows, classes))(device), torch.randint(classes, (rows,), device=device)]

    x = 2 * rows * classes
    of_quack = rival("quack.cross_entropy", "cross_entropy")
    return Case(
        "cross_entropy", f"{rows}x{classes}", make, lambda x, t: ops.cross_entropy(x, t),
        lambda x, t: F.cross_entropy(x.float(), t), x, 3 * x,
        {"quack": of_quack and (lambda x, t: of_quack(x, t, reduction="mean"))},
    )  # fmt: skip


def merge_case(rows: int, columns: int) -> Case:
    """The case of merging two partial attentions, which has no backward."""

    def make(device: torch.device) -> list[Tensor]:
        a, b = drawn((rows, columns), (rows, columns))(device)
        la, lb = drawn((rows,), (rows,), dtype=torch.float32)(device)
        return [tensor.detach() for tensor in (a, la, b, lb)]

    x, level = 2 * rows * columns, 4 * rows
    return Case(
        "merge_attention", f"{rows}x{columns}", make, lambda *a: ops.merge_attention(*a), eager_merge,
        3 * x + 3 * level, 0,
    )  # fmt: skip


def sum_case(parts: int, count: int) -> Case:
    """The case of summing `parts` tensors of `count` elements. Only forward is measured, since
    backward only expands the gradient.
    """
    one = 2 * count
    return Case(
        "sum_partials", f"{parts}x{count}", lambda device: [torch.randn(parts, count, device=device).bfloat16()],
        lambda x: ops.sum_partials(x), lambda x: x.sum(0, dtype=torch.float32).to(x.dtype), (parts + 1) * one, 0,
    )  # fmt: skip


def expert_cases(tokens: int, choices: int, columns: int) -> list[Case]:
    size, one = f"{tokens}x{columns}, {choices} choices", 2 * tokens * columns

    def routes(device: torch.device) -> list[Tensor]:
        order = torch.randperm(tokens * choices, device=device)
        return [order, torch.argsort(order)]

    def combined(device: torch.device) -> list[Tensor]:
        (rows,) = drawn((tokens * choices, columns))(device)
        (weights,) = drawn((tokens, choices))(device)
        return [rows, *routes(device), weights]

    return [
        Case(
            "permute_rows", size, lambda device: [*drawn((tokens, columns))(device), *routes(device)],
            lambda x, o, i: ops.permute_rows(x, o, i), lambda x, o, i: x[o // choices],
            (choices + 1) * one, 2 * (choices + 1) * one,
        ),
        Case(
            "combine_rows", size, combined, lambda *a: ops.combine_rows(*a), eager_combine,
            (choices + 1) * one, (3 * choices + 2) * one,
        ),
    ]  # fmt: skip


def two_llama_blocks(tokens: int, hidden: int, heads: int, kv_heads: int, ffn: int) -> Case:
    """The case of two layers of a Llama with `tokens` tokens, so that every addition of a residual
    meets a norm. The bytes are not known (0).
    """
    dim = hidden // heads
    attention = ((hidden,), ((heads + 2 * kv_heads) * dim, hidden), (hidden, hidden))
    one_layer = (*attention, (hidden,), (2 * ffn, hidden), (hidden, ffn))

    def make(device: torch.device) -> list[Tensor]:
        (x,) = drawn((1, tokens, hidden))(device)
        weights = [(t.detach() * hidden**-0.5).requires_grad_() for t in drawn(*one_layer, *one_layer)(device)]  # fmt: skip
        angle = torch.rand(1, tokens, dim // 2, device=device).repeat(1, 1, 2)
        return [x, *weights, angle.cos().bfloat16(), angle.sin().bfloat16()]

    def run(fused: bool, x: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        *weights, cos, sin = rest
        norm, glu, turned = (
            (ops.add_rms_norm, lambda t: ops.glu(t), ops.rotary)
            if fused
            else (eager_add_rms, lambda t: F.silu(t.chunk(2, -1)[0]) * t.chunk(2, -1)[1], eager_rotary)
        )  # fmt: skip
        total = x
        added = torch.zeros_like(x)
        for layer in (weights[:6], weights[6:]):
            first, qkv, out, second, up, down = layer
            normal, total = norm(added, total, first)
            q, k, v = (
                t.view(1, tokens, -1, dim).transpose(1, 2)
                for t in (normal @ qkv.t()).split([hidden, kv_heads * dim, kv_heads * dim], -1)
            )
            q, k = turned(q, k, cos, sin)
            seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            added = seen.transpose(1, 2).reshape(1, tokens, hidden) @ out.t()
            normal, total = norm(added, total, second)
            added = glu(normal @ up.t()) @ down.t()
        return added, total

    return Case(
        "two Llama blocks", f"{tokens}x{hidden}, {ffn}", make,
        lambda *a: run(True, *a), lambda *a: run(False, *a), 0, 0,
    )  # fmt: skip


def two_gpt_blocks(tokens: int, hidden: int, heads: int) -> Case:
    """The case of two layers of a GPT with `tokens` tokens. The bytes are not known (0)."""
    vector, wide = (hidden,), (4 * hidden, hidden)
    attention = (vector, vector, (3 * hidden, hidden), (hidden, hidden))
    one_layer = (*attention, vector, vector, wide, wide[:1], wide[::-1])

    def make(device: torch.device) -> list[Tensor]:
        (x,) = drawn((1, tokens, hidden))(device)
        weights = [(t.detach() * hidden**-0.5).requires_grad_() for t in drawn(*one_layer, *one_layer)(device)]  # fmt: skip
        return [x, *weights]

    def eager_norm(
        x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor
    ) -> tuple[Tensor, Tensor]:
        total = x + residual
        return F.layer_norm(total, weight.shape, weight, bias), total

    def eager_act(x: Tensor, bias: Tensor) -> Tensor:
        return F.gelu(x + bias, approximate="tanh")

    def run(fused: bool, x: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
        norm = ops.add_layer_norm if fused else eager_norm
        act = ops.bias_activation if fused else eager_act
        total, added = x, torch.zeros_like(x)
        for layer in (weights[:9], weights[9:]):
            w1, b1, qkv, out, w2, b2, up, bias, down = layer
            normal, total = norm(added, total, w1, b1)
            q, k, v = (
                t.view(1, tokens, heads, -1).transpose(1, 2)
                for t in (normal @ qkv.t()).chunk(3, -1)
            )
            seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            added = seen.transpose(1, 2).reshape(1, tokens, hidden) @ out.t()
            normal, total = norm(added, total, w2, b2)
            added = act(normal @ up.t(), bias) @ down.t()
        return added, total

    return Case(
        "two GPT blocks", f"{tokens}x{hidden}", make,
        lambda *a: run(True, *a), lambda *a: run(False, *a), 0, 0,
    )  # fmt: skip


def cases() -> list[Case]:
    return [
        *(case for rows, columns in ((8192, 1024), (4096, 4096), (8192, 8192), (4096, 16384)) for case in norm_cases(rows, columns)),
        glu_case(8192, 1792), glu_case(8192, 14336),
        bias_case(8192, 2048), bias_case(8192, 16384),
        rotary_case(1, 8192, 4, 1, 128), rotary_case(1, 8192, 32, 8, 128),
        softmax_case(1, 16, 2048, 2048),
        loss_case(8192, 16032), loss_case(8192, 131072),
        merge_case(8192 * 32, 128),
        sum_case(2, 8192 * 4096), sum_case(8, 8192 * 4096),
        *expert_cases(8192, 2, 4096),
        two_llama_blocks(8192, 4096, 32, 8, 14336), two_llama_blocks(2048, 1024, 8, 2, 3584),
        two_gpt_blocks(8192, 4096, 32),
    ]  # fmt: skip


def tensors_of(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)


class Stopwatch:
    """Measures times on the CUDA device: the median over `rounds` replays of a CUDA graph, each
    after the L2 cache was emptied.
    """

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.flushed = torch.empty(FLUSHED_BYTES, dtype=torch.int8, device="cuda")

    def seconds(self, run: Callable[[], Any]) -> float:
        """The median device seconds of a call of `run`, which is captured as a CUDA graph after
        three calls of warm-up.
        """
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = run()
        marks = [
            [torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(self.rounds)
        ]
        for start, end in marks:
            self.flushed.zero_()
            start.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        del kept
        return statistics.median(start.elapsed_time(end) for start, end in marks) / 1e3

    def of(self, function: Function, arguments: Sequence[Tensor]) -> tuple[float, float]:
        """(seconds of forward, seconds of forward and backward) of a function; the second is 0 if
        no argument needs a gradient.
        """
        wanted = [t for t in arguments if t.requires_grad]
        if not wanted:
            return self.seconds(lambda: function(*arguments)), 0.0
        upstream = [
            torch.randn_like(t)
            for t in tensors_of(function(*arguments))
            if t.requires_grad or t.grad_fn
        ]

        def both() -> Any:
            results = [t for t in tensors_of(function(*arguments)) if t.requires_grad]
            return torch.autograd.grad(results, wanted, upstream)

        return self.seconds(lambda: function(*arguments)), self.seconds(both)


def host_seconds(function: Function, arguments: Sequence[Tensor]) -> float:
    """Host seconds of one eager call of forward and backward on an idle device, or of forward alone
    if no argument needs a gradient; the least of 50.
    """
    wanted, times = [t for t in arguments if t.requires_grad], []
    for _ in range(50):
        torch.cuda.synchronize()
        start = time.perf_counter()
        results = [t for t in tensors_of(function(*arguments)) if t.requires_grad]
        if wanted:
            torch.autograd.grad(results, wanted, [torch.ones_like(t) for t in results])
        times.append(time.perf_counter() - start)
    return min(times)


def warm_up(seconds: float = 1.0) -> None:
    """Multiply matrices on the device for some seconds, until its clocks have risen."""
    factor, start = torch.ones(4096, 4096, device="cuda"), time.perf_counter()
    while time.perf_counter() - start < seconds:
        torch.mm(factor, factor)
        torch.cuda.synchronize()


def copy_seconds(moved: int, watch: Stopwatch) -> float:
    """Seconds of a copy on the device that moves `moved` bytes, half read and half written: the
    faster of a memory copy and an elementwise kernel.
    """
    source = torch.empty(max(moved // 4, 1), dtype=torch.bfloat16, device="cuda").fill_(1)
    target = torch.empty_like(source)
    ways = (lambda: target.copy_(source), lambda: torch.mul(source, 1, out=target))
    return min(watch.seconds(way) for way in ways)


def line(
    name: str, way: str, times: tuple[float, float], host: float, copies: tuple[float, float]
) -> str:
    shares = [
        f"{1e3 * took:8.4f} ms {100 * copy / took:4.0f} %"
        if took and copy
        else f"{1e3 * took:8.4f} ms {'':6s}"
        for took, copy in zip(times, copies, strict=True)
    ]
    return f"{name:46s} {way:8s} {shares[0]}  {shares[1]}  {1e6 * host:6.0f} us"


def measure(case: Case, watch: Stopwatch, compiled: bool, say: Callable[[str], None]) -> None:
    """Time the fused op, the eager code and each rival (with `compiled`, also torch.compile), and
    pass a line of text for each to `say`. A rival that raises gives a line with the error.
    """
    ways: dict[str, Function | None] = {"autopar": case.fused, "eager": case.eager, **case.rivals}
    if compiled:
        torch._dynamo.reset()
        ways["compile"] = torch.compile(case.eager, dynamic=False)
    name = f"{case.name} {case.size}"
    arguments = case.make(torch.device("cuda"))
    copies = tuple(
        copy_seconds(moved, watch) if moved else 0.0
        for moved in (case.forward_bytes, case.both_bytes)
    )
    for way, function in ways.items():
        if function is None:
            continue
        torch.cuda.empty_cache()
        try:
            times = watch.of(function, arguments)
            say(line(name, way, times, host_seconds(function, arguments), copies))
        except Exception as error:
            if way in ("autopar", "eager"):
                raise
            torch.cuda.synchronize()
            say(f"{name:46s} {way:8s} failed: {str(error).splitlines()[0][:100]}")
        name = ""


def versions() -> str:
    import triton

    found = [f"torch {torch.__version__}", f"triton {triton.__version__}"]
    for name in ("liger_kernel", "quack"):
        try:
            found.append(f"{name} {importlib.metadata.version(name.replace('_', '-'))}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--cases", nargs="*", default=[""], metavar="WORD", help="cases whose name holds a word"
    )
    parser.add_argument(
        "--compile", action="store_true", help="also torch.compile of the eager code"
    )
    parser.add_argument("--rounds", type=int, default=30, help="replays of each graph (default 30)")
    parser.add_argument("--output", help="write what is printed to a file as well")
    args = parser.parse_args(arguments)
    chosen = [
        case for case in cases() if any(word in f"{case.name} {case.size}" for word in args.cases)
    ]
    lines: list[str] = []

    def say(text: str) -> None:
        lines.append(text)
        print(text, flush=True)

    say(versions())
    if torch.cuda.is_available():
        watch = Stopwatch(args.rounds)
        warm_up()
        moved = 4 << 30
        peak = moved / copy_seconds(moved, watch)
        say(
            f"{torch.cuda.get_device_name()}; a copy moves {peak / 1e12:.2f} TB/s, read and written"
        )
        say(f"{'':56s}{'forward':>10s} of copy {'both':>10s} of copy      host")
        for case in chosen:
            measure(case, watch, args.compile, say)
    else:
        say(
            "no CUDA device: bytes that must move, and modelled time at an H100's 3.35 TB/s (not measured)"
        )
        for case in chosen:
            forward, both = (
                moved / H100_BYTES_PER_S for moved in (case.forward_bytes, case.both_bytes)
            )
            say(f"{case.name + ' ' + case.size:50s} {case.forward_bytes / 2**20:9.1f} MiB {1e3 * forward:8.4f} ms"
                f" {case.both_bytes / 2**20:9.1f} MiB {1e3 * both:8.4f} ms")  # fmt: skip
    if args.output:
        Path(args.output).write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
