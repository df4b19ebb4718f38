"""Seconds and bytes of a head's product that is one op with its cross-entropy (`autopar_kernels.linear_losses`).

    forward      for each chunk of tokens: its logits, and a kernel that reads them
    backward     for each chunk: its logits again, a kernel that writes their gradient, and its product with the head and with hidden

The head's gradient is added up over chunks in fp32, and rounded.  Logits exist for one chunk at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from autopar_cost_models import memory_time_s
from autopar_cost_models.matmul import shaped_matmul_time_s
from torch.fx import Node

from autopar.annotate.kernels import Kernels, KernelTime
from autopar.annotate.local_class import LocalClass
from autopar.ir.annotated import AnnotatedOp
from autopar.ops.dims import Call

_ROW_BYTES = 3 * 4 + 8 + 2 * 4
"""Bytes of a token in the kernel that makes losses: three statistics, the target, loss and weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearLoss:
    """The cross-entropy of hidden (tokens, width) by a head (classes, width) on one rank, `chunk`
    tokens at a time. `hidden_grad` and `head_grad`: which get gradients. `parameter`: whether the
    head is a parameter.
    """

    tokens: int
    classes: int
    width: int
    chunk: int
    hidden_grad: bool
    head_grad: bool
    parameter: bool

    @property
    def chunks(self) -> int:
        """The number of chunks."""
        return ceil(self.tokens / self.chunk)

    @property
    def parts(self) -> list[tuple[int, int]]:
        """(tokens of a chunk, number of such chunks), without empty ones."""
        whole, rest = divmod(self.tokens, self.chunk)
        return [(rows, count) for rows, count in ((self.chunk, whole), (rest, 1)) if rows * count]


def linear_loss_time(kernels: Kernels, loss: LinearLoss) -> KernelTime:
    """Kernel time of the op. Its gradients come chunk by chunk, so that none can be computed later:
    `weight_s` is 0. The gradient of a parameter is added to the gradient buffer.
    """
    backward = 0.0, 0
    if loss.hidden_grad or loss.head_grad:
        backward = _chunks_back(kernels, loss)
    if loss.head_grad:
        sums = _head_gradient(kernels, loss)
        backward = backward[0] + sums[0], backward[1] + sums[1]
    forward_s = memory_time_s(_ROW_BYTES * loss.tokens, kernels.device)
    for rows, count in loss.parts:
        logits = kernels.itemsize * rows * loss.classes
        forward_s += count * (
            _logits_s(kernels, loss, rows) + memory_time_s(logits, kernels.device)
        )
    return KernelTime(forward_s, backward[0], 0.0, 2 * loss.chunks + 1, backward[1])


def _logits_s(kernels: Kernels, loss: LinearLoss, rows: int) -> float:
    """Seconds of the product that makes the logits of `rows` tokens."""
    sizes = rows, loss.classes, loss.width
    return shaped_matmul_time_s(*sizes, kernels.device, kernels.precision)


def _chunks_back(kernels: Kernels, loss: LinearLoss) -> tuple[float, int]:
    """(seconds, kernels) of backward for all chunks: logits, their gradient, products with it."""
    device, precision, seconds = kernels.device, kernels.precision, 0.0
    for rows, count in loss.parts:
        logits = kernels.itemsize * rows * loss.classes
        seconds += count * (_logits_s(kernels, loss, rows) + memory_time_s(2 * logits, device))
        if loss.hidden_grad:
            sizes = rows, loss.width, loss.classes
            seconds += count * shaped_matmul_time_s(*sizes, device, precision)
        if loss.head_grad:
            sizes, wide = (loss.classes, loss.width, rows), max(kernels.itemsize, 4)
            seconds += count * shaped_matmul_time_s(*sizes, device, precision, result_itemsize=wide)
    return seconds, (2 + loss.hidden_grad + loss.head_grad) * loss.chunks


def _head_gradient(kernels: Kernels, loss: LinearLoss) -> tuple[float, int]:
    """(seconds, kernels) that add up the head's gradient over chunks, round it, and add it to the
    gradient buffer.
    """
    narrow, wide, kept = kernels.itemsize, max(kernels.itemsize, 4), kernels.gradient_itemsize
    moved = [3 * wide] * (loss.chunks - 1)
    if wide > narrow:
        moved.append(wide + narrow)
    if loss.parameter:
        moved.append(narrow + 2 * kept)
    numel = loss.classes * loss.width
    return sum(memory_time_s(size * numel, kernels.device) for size in moved), len(moved)


def chunk_bytes(
    local: LocalClass, node: Node, op: AnnotatedOp, gradients: Mapping[str, int]
) -> int:
    """Bytes that only the backward of the op `node` needs, under the smallest strategy of `op`.

    They are a chunk's logits and their gradient, and the head's gradient in fp32, twice if there
    are several chunks. The rounded gradient counts if `gradients` has the head.
    """
    (hidden, head), pricing = op.inputs[:2], local.pricing
    width = int(local.facts.tensors[head].shape[1])
    itemsize, chunk = pricing.itemsize(local.facts.tensors[hidden]), int(Call(node).arg("chunk"))
    wide, needed = max(itemsize, 4), []
    for strategy in op.strategies:
        rows = pricing.sharded(local.bytes[hidden], strategy.inputs[0]) // (itemsize * width)
        numel = pricing.sharded(local.bytes[head], strategy.inputs[1]) // itemsize
        logits = itemsize * min(rows, chunk) * ceil(numel / width)
        total = wide * numel * local.facts.grads[head]
        before = total if rows > chunk else 0
        rounded = itemsize * numel if head in gradients and wide > itemsize else 0
        needed.append(max(2 * logits + before, logits + total + before, total + rounded))
    return min(needed)
