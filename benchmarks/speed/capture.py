"""How the time of capture grows with depth, for models whose layers share values.

The values are buffers, masks and skip connections.

    python benchmarks/speed/capture.py [--kinds mask dense-skips ...] [--layers 8 16 32 64] [--precisions fp32 bf16] [--repeats 3]

Each line is one model at several depths.  It has the processor seconds of capture, of torch.export
in it, and the ratio of capture from each depth to the next: 2.0 is linear in depth.  Each time is
the least of the repeats.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Sequence
from unittest import mock

import torch
from torch import Tensor, nn

from autopar.api import trace

LAYERS = (8, 16, 32, 64)
PRECISIONS = ("fp32", "bf16")
ROWS, SEQ, WIDTH, HEADS = 4, 8, 16, 2


class Layer(nn.Module):
    """Attention and a feed-forward layer with residual connections."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.project, self.out = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.project(self.norm(x)).chunk(3, -1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    """A model of tokens with layers and a loss, for `capture_times`. Each subclass lets its layers
    share values in another way, which `run` defines.
    """

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 32)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.register_buffer(
            "table", torch.linspace(0.5, 1.5, SEQ)[:, None].repeat(1, WIDTH), persistent=False
        )
        self.register_buffer(
            "allowed", torch.ones(SEQ, SEQ, dtype=torch.bool).tril(), persistent=False
        )

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.run(self.embed(tokens), tokens))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def run(self, x: Tensor, tokens: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class BufferAsIs(Stack):
    """Each layer reads the same buffer, without a cast."""

    def run(self, x: Tensor, tokens: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x * self.table + self.table)
        return x


class BufferCast(Stack):
    """Each layer casts one buffer back to fp32 before it reads it."""

    def run(self, x: Tensor, tokens: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x + (self.table[None].float() * 0.5).to(x.dtype))
        return x


class BufferViews(Stack):
    """Each layer reads the view of a buffer that the layer before has made."""

    def run(self, x: Tensor, tokens: Tensor) -> Tensor:
        table = self.table
        for layer in self.layers:
            table = table.transpose(0, 1).transpose(0, 1)
            x = layer(x + table[None].float().to(x.dtype))
        return x


class OwnBuffers(Stack):
    """Each layer has a buffer of its own."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        for layer in self.layers:
            layer.register_buffer("scale", torch.ones(WIDTH))

    def run(self, x: Tensor, tokens: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x * layer.scale)
        return x


class Mask(Stack):
    """A mask of buffer and tokens is computed once, and all layers read it."""

    def run(self, x: Tensor, tokens: Tensor) -> Tensor:
        allowed = self.allowed & (tokens != 0)[:, None, None, :]
        mask = torch.zeros_like(allowed, dtype=x.dtype).masked_fill(~allowed, -1e4)
        for layer in self.layers:
            x = layer(x, mask)
        return x


class MaskInLayers(Stack):
    """Each layer computes the mask again."""

    def run(self, x: Tensor, tokens: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, self.allowed & (tokens != 0)[:, None, None, :])
        return x


class DenseSkips(Stack):
    """Each layer reads the sum of the results of all layers before."""

    def run(self, x: Tensor, tokens: Tensor) -> Tensor:
        total = x
        for layer in self.layers:
            total = total + layer(total)
        return total


class UNet(Stack):
    """Each layer of the second half also reads the result of a layer of the first half, the last
    one first.
    """

    def run(self, x: Tensor, tokens: Tensor) -> Tensor:
        half, kept = len(self.layers) // 2, []
        for layer in self.layers[:half]:
            kept.append(x := layer(x))
        for layer in self.layers[half:]:
            x = layer(x + kept.pop())
        return x


class Doubled(Stack):
    """Each value has two readers in the next layer: a walk that does not remember where it was takes 2^depth steps."""

    def run(self, x: Tensor, tokens: Tensor) -> Tensor:
        x, gate = x * self.table, x + self.table
        for layer in self.layers:
            x, gate = layer(x + gate), x * gate
        return x + gate


KINDS: dict[str, type[Stack]] = {
    "plain": Stack,
    "buffer-as-is": BufferAsIs,
    "buffer-cast": BufferCast,
    "buffer-views": BufferViews,
    "own-buffers": OwnBuffers,
    "mask": Mask,
    "mask-in-layers": MaskInLayers,
    "dense-skips": DenseSkips,
    "u-net": UNet,
    "doubled": Doubled,
}


def example() -> dict[str, Tensor]:
    """A batch of tokens; only its shapes count."""
    return {name: torch.zeros(ROWS, SEQ, dtype=torch.int64) for name in ("tokens", "labels")}


def capture_times(kind: str, layers: int, precision: str, repeats: int = 1) -> tuple[float, float]:
    """(processor seconds of `trace` of the model, of torch.export within it), those of the fastest
    of `repeats` runs.
    """
    return min(_timed(KINDS[kind](layers), precision) for _ in range(repeats))


def _timed(model: nn.Module, precision: str) -> tuple[float, float]:
    export_s, start = 0.0, time.process_time()
    export = torch.export.export

    def timed_export(*args, **kwargs):
        nonlocal export_s
        before = time.process_time()
        try:
            return export(*args, **kwargs)
        finally:
            export_s += time.process_time() - before

    with mock.patch.object(torch.export, "export", timed_export):
        trace(model, example(), None, precision)
    return time.process_time() - start, export_s


def line(kind: str, precision: str, times: Sequence[tuple[float, float]]) -> str:
    """One row of the table: seconds (and those of torch.export) at each depth. Then the ratio of
    each depth to the one before, and these ratios without torch.export.
    """
    cells = [f"{total_s:6.2f} ({export_s:5.2f})" for total_s, export_s in times]
    ratios = [f"{after / before:4.2f}" for (before, _), (after, _) in itertools.pairwise(times)]
    rest = [f"{(a - b) / (c - d):4.2f}" for (c, d), (a, b) in itertools.pairwise(times)]
    return f"{kind:15s} {precision:5s} {' '.join(cells)}   {' '.join(ratios)}   {' '.join(rest)}"


def main(argv: Sequence[str] | None = None, show: Callable[[str], None] = print) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--layers", nargs="+", type=int, default=list(LAYERS))
    parser.add_argument(
        "--precisions",
        nargs="+",
        default=list(PRECISIONS),
        choices=("fp64", "fp32", "bf16", "fp16"),
    )
    parser.add_argument("--repeats", type=int, default=1)
    asked = parser.parse_args(argv)
    depths = " ".join(f"{f'{n} layers':>14s}" for n in asked.layers)
    show(f"{'CPU s (of export)':21s} {depths}   ratios of depths; without torch.export")
    capture_times("plain", 2, asked.precisions[0])  # imports and first calls
    for kind in asked.kinds:
        for precision in asked.precisions:
            show(
                line(
                    kind,
                    precision,
                    [capture_times(kind, n, precision, asked.repeats) for n in asked.layers],
                )
            )


if __name__ == "__main__":
    main()
