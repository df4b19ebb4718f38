"""Price one call under one strategy: from the shapes of this rank's shards to the kernels that run them.

What the device computes is `_computed`; what it sends, because of the axes that propagation decides or of a special lowering, is `_sent`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, prod

from torch.fx import Node

from autopar.annotate.context_method import context_extra_s
from autopar.annotate.fusion import Share
from autopar.annotate.kernels import FREE, KernelTime, Product, Shape, product_of
from autopar.annotate.transfers import Pricing, attention_of
from autopar.ir.annotated import Saved, Strategy
from autopar.ir.calls import is_attention, op_name
from autopar.ir.plan_fields import AxisChoice
from autopar.ir.sharding import COLLECTIVES
from autopar.ops.convolution import CONVOLUTIONS
from autopar.ops.dims import Call, OpDims
from autopar.ops.random import drops
from autopar.ops.strategies import OpStrategy, letter_of, lowering_of

_LOOKUPS = {
    f"aten::{name}" for name in ("embedding", "index", "index_select", "gather", "take_along_dim")
}
_CONVOLUTIONS = {f"aten::{name}" for name in CONVOLUTIONS if name.startswith("conv")}
_NORM_KERNELS = 7  # forward of a composite norm; those of backward are about as many
_GROUPED = ("autopar::grouped_mm", "aten::_grouped_mm")


@dataclass(frozen=True, slots=True)
class PricedCall:
    """A call under one strategy.  `read` and `written` are the bytes of this rank's operands and results, `kept` what autograd keeps."""

    node: Node
    dims: OpDims | None
    names: tuple[str, ...]
    outs: tuple[str, ...]
    grads: tuple[bool, ...]
    added: tuple[bool, ...]
    fixed: dict[str, AxisChoice]
    shares: Share | None
    choice: OpStrategy
    read: list[int]
    written: list[int]
    kept: tuple[Saved, ...]

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients of all operands."""
        return sum(b for b, grad in zip(self.read, self.grads, strict=True) if grad)

    @property
    def mask_bytes(self) -> int:
        """Bytes of dropout's mask.  What else an op keeps beside values of the graph are statistics; where the meta device shows more, it
        ran a composite of an op that has one kernel on a GPU."""
        return sum(
            s.size_bytes for s in self.kept if s.key == f"{self.node.name}:own" and drops(self.node)
        )

    @property
    def kept_values(self) -> list[Saved]:
        """The values of the graph that backward reads."""
        return [s for s in self.kept if s.key != f"{self.node.name}:own"]


class CallPricer(Pricing):
    """Prices calls.  A subclass says what the values of its graph are: `shapes` over all ranks, `grads`, `weights` (the parameters),
    `roots` (whose storage a value shares), `heads` (products before the loss),
    `mask_of` an attention op (causal, sliding window)."""

    shapes: dict[str, Shape]
    grads: dict[str, bool]
    weights: set[str]
    roots: dict[str, str]
    heads: set[str]
    mask_of: Callable[[Node], tuple[bool, int | None]]

    def call_strategy(
        self, call: PricedCall, paid: list, saved: tuple[Saved, ...], late: tuple[Saved, ...]
    ) -> Strategy:
        """The strategy with its prices and with what it keeps; `paid` are the changes of layout on propagated axes that the op is the
        first to ask for, of which what is sent over dp is left out (`ClassPricer.over_dp`)."""
        computed = self._computed(call)
        local_s, sent_s = self._sent(call, computed, paid)
        added = [b for b, more in zip(call.read, call.added, strict=True) if more]
        local_s[1] += self._added_s(call, added)
        view = (
            call.dims is not None and call.dims.movement_free and not self.setting.software.compiled
        )  # costs the host, not the device
        issued = (
            computed.forward_kernels + view,
            computed.backward_kernels + (view and any(call.grads)) + len(added),
        )
        return Strategy(
            call.choice.name,
            call.choice.inputs,
            call.choice.outputs,
            computed.forward_s + local_s[0] + sent_s[0],
            computed.backward_s + local_s[1] + sent_s[1],
            saved=saved,
            late=late,
            forward_comm_s=sent_s[0],
            backward_comm_s=sent_s[1],
            backward_weight_s=computed.weight_s,
            forward_dispatch_s=issued[0] * self.device.issue_s,
            backward_dispatch_s=issued[1] * self.device.issue_s,
        )

    def _added_s(self, call: PricedCall, added: list[int]) -> float:
        """Autograd adds up the gradients of a value's readers: a kernel for each but the first, or one more read of a fused kernel."""
        if self.setting.software.compiled:
            fused = call.shares is None or not any(
                more and not r for more, r in zip(call.added, call.shares.reads, strict=True)
            )
            return self.kernels.stream(sum(added) if fused else 0, 0, False, 0).forward_s
        return sum(self.kernels.stream(3 * size, 0, False).forward_s for size in added)

    # ----------------------------------------------------------------------------------------------------------- what is sent

    def _sent(
        self, call: PricedCall, computed: KernelTime, paid: list
    ) -> tuple[list[float], list[float]]:
        """Seconds (forward, backward) besides the op's kernels: local work, and communication."""
        local_s, sent_s = [0.0, 0.0], [0.0, 0.0]
        if call.choice.lowering == "vocab_parallel_cross_entropy":
            tokens = self.bytes[call.names[1]] // 8 * 4
            sent_s[0] += 3 * self.move_s("all_reduce", tokens)
        if "cp" in call.fixed and is_attention(call.node):
            for place, (idle, sent) in enumerate(self._context_extra(call, computed)):
                local_s[place] += idle
                sent_s[place] += sent
        if self.lowered(call.node, call.dims) == "expert_parallel":
            x, down = self.tensors[call.names[0]], Call(call.node).arg("down").meta["val"]
            for place, extra in enumerate(
                self.expert_parallel_s(
                    call.read[1], int(x.shape[1]), int(down.shape[0]), self.itemsize(x)
                )
            ):
                sent_s[place] += extra
        for i, axis, there, back, size in paid:
            part = self.sharded(size, call.choice.inputs[i])
            for place, move in enumerate((there, back) if call.grads[i] else (there,)):
                if move not in COLLECTIVES:
                    local_s[place] += self.move_s(move, part, axis)
                elif axis != "dp":
                    sent_s[place] += self.move_s(move, part, axis)
        return local_s, sent_s

    def _context_extra(
        self, call: PricedCall, computed: KernelTime
    ) -> tuple[tuple[float, float], ...]:
        """What context parallelism adds to an attention op, forward and backward: (waiting for the slowest rank, what rings and all-to-alls
        do not hide)."""
        letter, _, pattern = call.fixed["cp"].strategy.partition(" ")
        if letter not in ("s", "ring", "ulysses"):
            return ()
        op = self.context_attention(call.node, call.dims, bool(pattern), self.mask_of(call.node))
        op = replace(op, forward_s=computed.forward_s, backward_s=computed.backward_s)
        method = "gather" if letter == "s" else letter
        extra = context_extra_s(method, op, self.setting.mesh, self.setting.cluster, gathers=False)
        waste = op.waste(self.setting.mesh.cp) if method != "ulysses" else 0.0
        idle = op.forward_s * waste, op.backward_s * waste
        return tuple(
            (waits, max(total - waits, 0.0)) for waits, total in zip(idle, extra, strict=True)
        )

    def lowered(self, node: Node, dims: OpDims | None) -> str:
        """The special lowering that propagation chose for an op, or ''."""
        found = (
            lowering_of(dims, choice.strategy)
            for choice in self.choices.get(node.name, {}).values()
        )
        return next(filter(None, found), "")

    # ------------------------------------------------------------------------------------------------------- what is computed

    def _computed(self, call: PricedCall) -> KernelTime:
        """Seconds of the op's kernels."""
        name, dims = op_name(call.node), call.dims
        if dims is not None and dims.movement_free:
            return FREE
        if is_attention(call.node):
            return self._attention(call)
        if name == "autopar::routed_experts":
            return self._experts(call)
        if name in _GROUPED and all(len(self._local(call, i)) == n for i, n in ((0, 2), (1, 3))):
            return self._grouped(call)
        if dims is not None and dims.contraction:
            product = self._convolution(call) if name in _CONVOLUTIONS else self._product(call)
            if product is not None:
                return self.kernels.product(product)
            products = sum(call.grads)
            backward_bytes = 2 * call.gradient_bytes + sum(call.written)
            return self.kernels.roofline(
                self._flops(call), sum(call.read) + sum(call.written), backward_bytes, products
            )
        if name in _LOOKUPS:
            return self._lookup(call)
        if name == "aten::cross_entropy_loss":
            return self._cross_entropy(call)
        if (
            name == "aten::rms_norm"
            and self.setting.software.composite_norms
            and not self.setting.software.compiled
        ):
            return self._composite_norm(call)
        return self._streamed(call)

    def _flops(self, call: PricedCall) -> int:
        """FLOPs of this rank's part, if every axis that shards the op divides them."""
        if not (flops := self.number(call.dims.total_flops())):
            return 0
        for axis, own in call.fixed.items():
            if any(x.is_shard for x in (*own.inputs, *own.outputs)):
                flops = ceil(flops / self.setting.mesh.size(axis))
        return ceil(flops / self.tp) if call.choice.letter else flops

    def _local(self, call: PricedCall, i: int) -> Shape:
        """The shape of this rank's operand i."""
        layouts = {axis: choice.inputs[i] for axis, choice in call.fixed.items()}
        return self.local_shape(self.shapes[call.names[i]], layouts | {"tp": call.choice.inputs[i]})

    def _product(self, call: PricedCall) -> Product | None:
        shapes = [self._local(call, i) for i in range(len(call.names))]
        parameters = [name in self.weights for name in call.names]
        fp8 = call.node.name not in self.heads or self.setting.software.fp8_head
        return product_of(call.dims, shapes, list(call.grads), parameters, fp8)

    def _convolution(self, call: PricedCall) -> Product | None:
        """The implicit matrix product of a convolution: positions x (channels x kernel) x channels, for each group."""
        x, weight, space = (
            self._local(call, 0),
            self._local(call, 1),
            len(self.shapes[call.names[1]]) - 2,
        )
        groups = max(x[-space - 1] // weight[1], 1)
        rows, columns = (
            weight[0] // groups,
            prod(weight[1:]),
        )  # output channels of a group, and what each of them sums
        if bool(Call(call.node).arg("transposed", False)) or "transpose" in op_name(call.node):
            groups = max(x[-space - 1] // weight[0], 1)
            sizes = prod(x[: -space - 1]) * prod(x[-space:]), columns, weight[0] // groups
        else:
            out = self.shapes[call.outs[0]]
            sizes = prod(x[: -space - 1]) * prod(out[-space:]), rows, columns
        if not prod(sizes) * groups:
            return None
        return Product(
            *sizes, groups, *call.grads[:2], parameter=1 if call.names[1] in self.weights else -1
        )

    def _attention(self, call: PricedCall) -> KernelTime:
        shapes, whole = (
            [self._local(call, i) for i in range(3)],
            [self.shapes[name] for name in call.names[:3]],
        )
        letter = letter_of(call.fixed["cp"].strategy) if "cp" in call.fixed else ""
        context = self.setting.mesh.cp if letter in ("s", "ring", "ulysses") else 1
        ranks = context * (self.tp if call.choice.letter == "s" else 1)
        if ranks > 1:
            shapes = [
                (*shape[:-2], all_ranks[-2], shape[-1])
                for shape, all_ranks in zip(shapes, whole, strict=True)
            ]
        ulysses = context if letter == "ulysses" else 1
        blocks, mask = context if letter == "ring" else 1, self.mask_of(call.node)
        attention = attention_of(Call(call.node), shapes, mask, ranks // ulysses, blocks, ulysses)
        size = sum(call.read) + sum(call.written)
        return self.kernels.attention(
            attention, self._flops(call), size, 2 * call.gradient_bytes + sum(call.written)
        )

    def _experts(self, call: PricedCall) -> KernelTime:
        """Routing is taken to be even, so that every expert of every rank has as many rows."""
        node = Call(call.node)
        place = [
            name
            for name in ("x", "index", "weights", "up", "up_bias", "down")
            if node.arg(name) is not None
        ].index
        x, index, up, down = (
            self._local(call, place(name)) for name in ("x", "index", "up", "down")
        )
        flip = node.arg("transposed")
        return self.kernels.experts(
            x[0], prod(index), x[1], down[0], up[2 if flip else 1], down[1 if flip else 2]
        )

    def _grouped(self, call: PricedCall) -> KernelTime:
        """A grouped product of its own: (rows, k) by (groups, n, k) or (groups, k, n), evenly."""
        (rows, k), weight = self._local(call, 0), self._local(call, 1)
        return self.kernels.grouped(rows, weight[0], prod(weight[1:]) // k, k, any(call.grads))

    # ------------------------------------------------------------------------------------------------------------ what is moved

    def _lookup(self, call: PricedCall) -> KernelTime:
        """Rows of a table: as many as come out are read.  The gradient of an embedding is a whole table of zeros to which rows are added;
        where the gradient's buffer has another dtype, the table is then added to it."""
        out, indices = sum(call.written), sum(call.read[1:])
        table = call.read[0] * call.grads[0]
        itemsize, kept = self.kernels.itemsize, self.kernels.gradient_itemsize
        buffer = (
            table + 2 * table // itemsize * kept
            if call.names[0] in self.weights and kept != itemsize
            else 0
        )
        backward = table + 3 * out + indices + buffer if table else 0
        return self.kernels.stream(2 * out + indices, backward, any(call.grads))

    def _cross_entropy(self, call: PricedCall) -> KernelTime:
        """Eager mode runs log_softmax and nll_loss, whose gradient is a tensor of the logits' size; a compiler or a fused loss writes
        neither."""
        logits, rest = call.read[0], sum(call.read[1:]) + sum(call.written)
        if self.setting.software.compiled or self.setting.software.loss_kernel == "fused":
            return self.kernels.stream(logits + rest, 2 * logits + rest, any(call.grads))
        return self.kernels.stream(2 * logits + rest, 4 * logits + rest, any(call.grads), 2)

    def _composite_norm(self, call: PricedCall) -> KernelTime:
        """A root-mean-square norm of n elements op by op.  Forward casts to fp32, squares, averages, multiplies, casts back and multiplies
        by the weight; backward runs the derivative of each, casts from and to fp32, and adds up the two gradients of the fp32 input."""
        n, low, high = (
            sum(call.written) // self.kernels.itemsize,
            self.kernels.itemsize,
            max(self.kernels.itemsize, 4),
        )
        forward = (low + high) + 2 * high + high + 2 * high + (high + low) + 2 * low
        weight, scaled, mean = (
            6 * low,
            (2 + 3 + 1) * high,
            1 * high,
        )  # gradients of two factors, one of them summed up
        squared, summed = (2 + 2 + 3) * high, 3 * high  # of the power: power, doubled, product
        backward = weight + (low + high) + scaled + mean + squared + summed + (high + low)
        return self.kernels.stream(n * forward, n * backward, any(call.grads), _NORM_KERNELS)

    def _streamed(self, call: PricedCall) -> KernelTime:
        """A memory-bound op: reads operands and writes results; backward reads their gradients and what autograd kept and writes gradients.

        A sum passes its gradient on as it is, unless it was broadcast.
        """
        shares = call.shares if self.setting.software.fuses else None
        mask = (
            0 if shares and self.setting.software.compiled else call.mask_bytes
        )  # a compiler draws the numbers again
        reads = shares.reads if shares else (True,) * len(call.read)
        writes = shares.writes if shares else (True,) * len(call.written)
        arriving = sum(b for b, counted in zip(call.written, writes, strict=True) if counted)
        leaving = [
            b
            for b, counted, grad in zip(call.read, reads, call.grads, strict=True)
            if counted and grad
        ]
        forward = (
            sum(b for b, counted in zip(call.read, reads, strict=True) if counted) + arriving + mask
        )
        if op_name(call.node) == "aten::add":
            broadcast = [b for b in leaving if b < sum(call.written)]
            whole = (
                max(leaving, default=0) if not arriving else 0
            )  # of a chain: the gradient that comes out of it, once for both operands
            backward = sum(broadcast) + (sum(call.written) if broadcast and arriving else whole)
        else:
            backward = arriving + sum(leaving) + self._kept_bytes(call, shares) + mask
        kernels = int(any(writes)) if shares else 1
        return self.kernels.stream(forward, backward, any(call.grads), kernels)

    def _kept_bytes(self, call: PricedCall, shares: Share | None) -> int:
        """What backward reads of the kept tensors: in a chain, those that enter it."""
        if shares is None:
            return sum(s.size_bytes for s in call.kept_values)
        entering = {
            self.roots[name]
            for name, counted in zip(call.names, shares.reads, strict=True)
            if counted
        }
        return sum(s.size_bytes for s in call.kept_values if s.key.partition("/")[0] in entering)
