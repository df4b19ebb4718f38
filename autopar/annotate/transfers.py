"""Prices on one device of values, layout primitives and layout conversions: seconds and bytes."""

from __future__ import annotations

from math import ceil, gcd, prod

import torch
from autopar_cost_models import (
    activation_itemsize,
    collective_time_s,
    dispatch_time_s,
    memory_time_s,
)
from autopar_cost_models.roofline import overlapped_s
from torch.fx import Node

from autopar.annotate.context_method import ContextAttention
from autopar.annotate.kernels import LocalAttention, Shape, kernels_of
from autopar.annotate.setting import Setting
from autopar.ir.annotated import Conversion
from autopar.ir.mesh import BATCH_AXES
from autopar.ir.sharding import COLLECTIVE_PRIMITIVES, AxisLayout, S, transition
from autopar.ops.dims import Call, OpDims, at_batch
from autopar.ops.random import drops

PARTS_OF_VALUES = ("slice", "pad")
"""Local primitives that touch only one rank's part of a value; the others touch the whole value."""


Conversions = dict[tuple[AxisLayout, AxisLayout], Conversion]
"""The price of each layout change, by (from, to)."""


class Pricing:
    """Seconds and bytes on one device under one setting."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.tp = setting.mesh.tp
        self.device, self.topology = setting.cluster.device, setting.cluster.topology
        # there a collective is waited for at once (`rewrite/collectives/primitives.py`)
        self.overlaps = self.device.generation != "cpu"
        self.kernels = kernels_of(self.device, setting.precision, setting.software)
        self._moves: dict[tuple[str, int, str], float] = {}
        self._sizes: dict[tuple, int] = {}
        self._conversions: dict[tuple[int, bool, AxisLayout, AxisLayout], Conversion] = {}

    def number(self, size: int | torch.SymInt) -> int:
        """A symbolic size as a number, for the rows of one micro-batch over all data-parallel
        ranks.
        """
        return at_batch(size, self.setting.micro_batch * self.setting.mesh.dp)

    def size_bytes(self, tensor: torch.Tensor, layouts: dict[str, AxisLayout]) -> int:
        """Bytes of a value on one rank, sharded as its `layouts` over dp, ep and cp say, before tp
        divides them.
        """
        key = id(tensor), *layouts.items()  # of a graph that outlives this
        if key not in self._sizes:
            total = self.itemsize(tensor)
            for dim, size in enumerate(tensor.shape):
                number = self.number(size)
                for axis, layout in layouts.items():
                    if layout.dim == dim:
                        number = ceil(number / self.setting.mesh.size(axis))
                total *= number
            self._sizes[key] = total
        return self._sizes[key]

    def local_shape(self, shape: Shape, layouts: dict[str, AxisLayout]) -> Shape:
        """The shape of a tensor's largest shard; `layouts` has its layout on each axis. `shape` is
        over all ranks.
        """
        sizes = list(shape)
        for axis, layout in layouts.items():
            if layout.is_shard:
                sizes[layout.dim] = ceil(sizes[layout.dim] / self.setting.mesh.size(axis))
        return tuple(sizes)

    def context_attention(
        self, node: Node, dims: OpDims, zigzag: bool, mask: tuple[bool, int | None]
    ) -> ContextAttention:
        """The costs of an attention op on one rank, with heads sharded over tp if tp divides them.
        `mask` is (causal, sliding window); `zigzag` says whether positions are balanced.
        """
        call, mesh = Call(node), self.setting.mesh
        rows = {axis: S(0) for axis in BATCH_AXES}
        sizes = [
            ceil(self.size_bytes(t, rows) / (mesh.tp if t.shape[1] % mesh.tp == 0 else 1))
            for t in (*call.tensors[:3], *call.results)
        ]
        flops = ceil(self.number(dims.total_flops()) / (mesh.dp * mesh.cp * mesh.tp))
        layouts = {axis: S(0) for axis in BATCH_AXES} | (
            {"tp": S(1)} if call.tensors[1].shape[1] % mesh.tp == 0 else {}
        )
        shapes = [
            self.local_shape(tuple(map(self.number, t.shape)), layouts) for t in call.tensors[:3]
        ]
        computed = self.kernels.attention(
            attention_of(call, shapes, mask, context_ranks=mesh.cp),
            flops,
            sum(sizes) // mesh.cp,
            2 * sum(sizes) // mesh.cp,
        )
        itemsize = self.itemsize(call.tensors[0])
        gradients = (sizes[1] + sizes[2]) // itemsize * max(itemsize, 4)
        key_heads = ceil(
            call.tensors[1].shape[1] / (mesh.tp if call.tensors[1].shape[1] % mesh.tp == 0 else 1)
        )
        copies = mesh.cp // gcd(key_heads, mesh.cp)
        causal = bool(call.arg("is_causal", False))
        query_bytes, key_bytes, value_bytes, result_bytes = sizes
        return ContextAttention(
            query_bytes=query_bytes,
            key_bytes=key_bytes,
            value_bytes=value_bytes,
            result_bytes=result_bytes,
            forward_s=computed.forward_s,
            backward_s=computed.backward_s,
            causal=causal,
            zigzag=zigzag,
            gradient_bytes=gradients,
            key_copies=copies,
        )

    def expert_parallel_s(
        self, index_bytes: int, choices: int, hidden: int, experts: int, hidden_itemsize: int
    ) -> tuple[float, float]:
        """Seconds (forward, backward) of the exchanges of expert parallelism.

        Forward exchanges row counts, rows to the experts, and their results; backward exchanges the
        gradients of the latter two (`rewrite/lowerings/expert_parallel.py`). `index_bytes` is the
        size of this rank's (T, K) int64 choices, K = `choices`, each of which sends a row of `hidden`
        elements, or as `Software.dispatch` says. Routing is assumed to be even.
        """
        ranks, stride = self.setting.mesh.ep, self.setting.mesh.stride("ep")
        size_bytes = index_bytes // 8 * hidden * hidden_itemsize * ranks
        if self.setting.software.dispatch == "once":
            rows_s = dispatch_time_s(size_bytes, choices, ranks, stride, self.topology)
        else:
            rows_s = self.move_s("all_to_all", size_bytes, "ep")
        return self.move_s("all_to_all", 8 * experts * ranks, "ep") + 2 * rows_s, 2 * rows_s

    def itemsize(self, tensor: torch.Tensor) -> int:
        """Bytes of an element. A floating-point tensor counts in the setting's precision, any other
        in its own dtype.
        """
        return (
            activation_itemsize(self.setting.precision)
            if tensor.is_floating_point()
            else tensor.dtype.itemsize
        )

    def sharded(self, size_bytes: int, layout: AxisLayout) -> int:
        """Bytes of a value of `size_bytes` on one tp rank under a layout over tp."""
        return ceil(size_bytes / self.tp) if layout.is_shard else size_bytes

    def move_s(self, primitive: str, size_bytes: int, axis: str = "tp") -> float:
        """Seconds of one layout primitive over an axis, for a value of `size_bytes` before the axis
        divides it.
        """
        if primitive == "identity":
            return 0.0
        key = primitive, size_bytes, axis
        if key not in self._moves:
            ranks = self.setting.mesh.size(axis)
            if primitive in COLLECTIVE_PRIMITIVES:
                name = "all_gather" if primitive == "reshuffle" else primitive
                self._moves[key] = collective_time_s(
                    name, size_bytes, ranks, self.setting.mesh.stride(axis), self.topology
                )
            else:
                self._moves[key] = memory_time_s(
                    2 * size_bytes // (ranks if primitive in PARTS_OF_VALUES else 1), self.device
                )
        return self._moves[key]

    def exposed_s(self, compute_s: float, transfer_s: float) -> float:
        """Seconds that a transfer adds to `compute_s` seconds of kernels that overlap with it. On a
        CPU, or without compute, these are all its seconds.
        """
        if not self.overlaps or not compute_s:
            return transfer_s
        return overlapped_s(compute_s, transfer_s, self.setting.software.fitted) - compute_s

    def overlapped(self, conversion: Conversion, forward_s: float, backward_s: float) -> Conversion:
        """The price of a layout change whose communication overlaps with `forward_s` and
        `backward_s` seconds of kernels. Only the exposed part is left.
        """
        if not (
            (forward_s and conversion.forward_comm_s) or (backward_s and conversion.backward_comm_s)
        ):
            return conversion
        sent = (
            self.exposed_s(forward_s, conversion.forward_comm_s),
            self.exposed_s(backward_s, conversion.backward_comm_s),
        )
        local = (
            conversion.forward_s - conversion.forward_comm_s,
            conversion.backward_s - conversion.backward_comm_s,
        )
        return Conversion(local[0] + sent[0], local[1] + sent[1], *sent)

    def conversions(
        self, size_bytes: int, have: set[AxisLayout], want: set[AxisLayout], grad: bool
    ) -> Conversions:
        """Prices of all layout changes over tp from a layout of `have` to another of `want`, by
        (from, to). Without `grad`, backward costs nothing.
        """
        return {
            (src, dst): self._conversion(size_bytes, grad, src, dst)
            for src in have
            for dst in want
            if src is not dst
        }

    def _conversion(
        self, size_bytes: int, grad: bool, src: AxisLayout, dst: AxisLayout
    ) -> Conversion:
        key = size_bytes, grad, src, dst
        if key not in self._conversions:
            forward, backward = transition(src, dst)
            seconds = (
                self.move_s(forward, size_bytes),
                self.move_s(backward, size_bytes) if grad else 0.0,
            )
            moves = (
                s if name in COLLECTIVE_PRIMITIVES else 0.0
                for name, s in zip((forward, backward), seconds, strict=True)
            )
            self._conversions[key] = Conversion(*seconds, *moves)
        return self._conversions[key]


def attention_of(
    call: Call,
    shapes: list[Shape],
    mask: tuple[bool, int | None],
    context_ranks: int = 1,
    blocks: int = 1,
    heads_split: int = 1,
) -> LocalAttention:
    """The local attention that a call runs, from the shapes of queries, keys and values on this
    rank. Their position dims have whole-sequence length. `mask` is (causal, sliding window);
    `heads_split` is by how much Ulysses divides the heads. The others are as in `LocalAttention`.
    """
    query, key, value = shapes
    # torch's masks of other shapes begin at the first key; the model's end at the last
    causal = mask[0] and query[-2] == key[-2]
    heads, key_heads = (shape[-3] if len(shape) > 2 else 1 for shape in (query, key))
    return LocalAttention(
        batch=prod(query[:-3]),
        heads=ceil(heads / heads_split),
        key_heads=ceil(key_heads / heads_split),
        queries=query[-2],
        keys=key[-2],
        # both products together: 2 x pairs x (channels of queries + of values)
        head_dim=ceil((query[-1] + value[-1]) / 2),
        causal=causal,
        window=mask[1] if causal else None,
        context_ranks=context_ranks,
        blocks=blocks,
        dropout=drops(call.node),
    )
