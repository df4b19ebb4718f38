"""What autograd keeps of one block class on a device from forward to backward, and what backward needs besides at its fullest moment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from math import ceil

import torch
from torch.fx import Graph, Node

from autopar.annotate.backward_peak import BackwardOp, backward_workspace
from autopar.annotate.call_pricer import CallPricer
from autopar.annotate.class_facts import ClassFacts
from autopar.annotate.fusion import LOSSES, NORMS, Share
from autopar.annotate.saved_tensors import SavedByOp
from autopar.ir.annotated import AnnotatedOp, Saved
from autopar.ir.calls import is_attention, op_name
from autopar.ir.mesh import BATCH_AXES
from autopar.ir.plan_fields import AxisChoice
from autopar.ir.sharding import Layout, R, S
from autopar.ops.dims import Call, OpDims
from autopar.ops.random import drops
from autopar.ops.strategies import OpStrategy
from autopar.ops.values import operand_names, ops, result_names

_EXPERTS = "autopar::routed_experts"
_PASSES = (
    "aten::add",
    "aten::alias",
    "aten::contiguous",
)  # hand the gradient of their result on as it is


class KeptPricer(CallPricer):
    """Counts the bytes of what calls keep.  A subclass says which class it is (`facts`, `index`, `graph`), what a segment of it was
    seen to save (`saved`) and which inputs its segments have in `common`, has the `dims` and `choices` of its ops, and of its values the
    tensors, the layouts on axes that propagation decides (`fixed`) and the bytes under those, what fused kernels share, and what they do
    not write (`unwritten`); which products are in fp8 (`narrow`), which dims of values are positions of sequences, the layouts in which
    parameters may be `stored`; and, once they are priced, its inputs, calls and outputs.
    """

    facts: ClassFacts
    index: int
    graph: Graph
    saved: dict[str, SavedByOp]
    common: dict[str, tuple[int, int]]
    dims: dict[str, OpDims | None]
    choices: dict[str, dict[str, AxisChoice]]
    tensors: dict[str, torch.Tensor]
    fixed: dict[str, dict[str, Layout]]
    bytes: dict[str, int]
    shares: dict[str, Share]
    unwritten: set[str]
    narrow: set[str]
    positions: dict[str, set]
    stored: dict[str, list[Layout]]
    inputs: list[AnnotatedOp]
    calls: list[AnnotatedOp]
    outputs: list[AnnotatedOp]

    def _late(self, node: Node, saved: tuple[Saved, ...], written: list[int]) -> tuple[Saved, ...]:
        """What an op saved that the gradients of its parameters are computed from: all, but for a norm that is written out, which
        multiplies its weight by what it made on the way."""
        own = tuple(one for one in saved if one.key.endswith(":own"))
        return (
            own
            if op_name(node) in NORMS and sum(one.size_bytes for one in own) >= written[0]
            else saved
        )

    def _kept(
        self,
        node: Node,
        choice: OpStrategy,
        names: tuple[str, ...],
        outs: tuple[str, ...],
        keeping: dict[str, SavedByOp],
    ) -> tuple[Saved, ...]:
        observed = keeping.get(node.name, self.saved.get(node.name))
        if observed is None or not node.meta.get("grad"):
            return ()
        fixed = self.choices.get(node.name, {})
        held = [
            (n, x, {a: c.inputs[i] for a, c in fixed.items()})
            for i, (n, x) in enumerate(zip(names, choice.inputs, strict=True))
        ]
        held += [(n, x, self.fixed[n]) for n, x in zip(outs, choice.outputs, strict=True)]
        by_root = {self.roots[name]: (layout, layouts) for name, layout, layouts in reversed(held)}
        kept = []
        for root in observed.values:
            if root in self.unwritten:
                continue
            layout, layouts = by_root.get(root, (R, self.fixed[root]))
            key = _sharding({**layouts, "tp": layout})
            size = self.size_bytes(
                self.tensors[root],
                {a: x for a, x in layouts.items() if x.dim < self.tensors[root].dim()},
            )
            size = self.sharded(size, layout)
            if self._gathers_again(node, root, layout):
                key, size = f"{key}/tp", ceil(size / self.tp)
            if self.setting.software.keeps_fp8 and node.name in self.narrow:
                key, size = f"{key}:fp8", size // self.itemsize(self.tensors[root])
            kept.append(Saved(root + key, size))
        if observed.extra_bytes_per_row:
            own = self._own_bytes(node, observed.extra_bytes_per_row)
            if "cp" in fixed and any(
                x.is_shard for x in (*fixed["cp"].inputs, *fixed["cp"].outputs)
            ):
                own = ceil(own / self.setting.mesh.cp)
            whole = min(self._whole_rows_bytes(node, names), own) if choice.letter == "f" else 0
            kept.append(
                Saved(
                    f"{node.name}:own",
                    whole + ceil((own - whole) / self.tp) if choice.letter else own,
                )
            )
        return tuple(kept)

    def _workspace_bytes(self, weights: bool, alone: bool) -> int:
        """What backward of a segment needs besides what forward keeps, each value under its smallest strategy; with or without the
        gradients of `weights` on their way to where they add up, which with ZeRO-3 are among the buffers.  `alone`: without a pipeline."""
        sizes: dict[str, int] = {}
        for op in (*self.inputs, *self.calls):
            for k, name in enumerate(op.outputs):
                least = self._held(
                    min(self.sharded(self.bytes[name], s.outputs[k]) for s in op.strategies)
                )
                sizes[name] = least if self.grads[name] and name not in self.unwritten else 0
        least = {name: self._least_bytes(name) for name in self.stored if self.grads[name]}
        backward = []
        for node, op in zip(ops(self.graph), self.calls, strict=True):
            if not any(self.grads[name] for name in op.outputs):
                continue
            keeps = self._least_kept(op)
            dims, own = self.dims[node.name], 0
            if op_name(node) in LOSSES and self.setting.software.loss_kernel == "plain":
                own = (
                    2 * keeps.get(f"{node.name}:own", 0) - sizes[op.inputs[0]]
                )  # gradients before and after the log-softmax, both as kept
            elif op_name(node) in LOSSES and self.setting.software.loss_kernel == "fused":
                own = -sizes[op.inputs[0]]
            elif (
                weights and not self.setting.software.fused_kernels
            ):  # the gradient of a weight, before it is added to what is there
                own = max((least[name] for name in op.inputs if name in least), default=0)
            passes = op_name(node) in _PASSES or (dims is not None and dims.movement_free)
            writes = tuple(
                name for name in op.inputs if self.grads[name] and name not in self.weights
            )
            backward.append(BackwardOp(op.outputs, writes, keeps, own, passes))
        ends = [op.inputs[0] for op in self.outputs if self.grads[op.inputs[0]]]
        return backward_workspace(backward, sizes, ends) + (
            self._waiting_bytes() if weights and alone else 0
        )

    def _waiting_bytes(self) -> int:
        """The gradient of the head's weight, where it is tied: autograd holds it until the embedding's comes, through backward of all
        segments between.  Megatron adds gradients of weights to what is there in the product itself."""
        facts = self.facts
        if self.setting.software.fused_kernels or facts.last in (None, self.index):
            return 0
        graph = facts.traced.classes[facts.last].graph
        tied = facts.tied(facts.last)
        tensors = [node.meta["val"] for node in graph.nodes if node.name in tied]
        return sum(ceil(t.numel() / self.tp) * self.itemsize(t) for t in tensors)

    def _own(self, kept: Iterable[Saved]) -> tuple[Saved, ...]:
        """Of what autograd keeps what is this segment's own, in bytes of the device."""
        return tuple(
            Saved(s.key, self._held(s.size_bytes)) for s in kept if s.key not in self.as_made
        )

    @cached_property
    def as_made(self) -> frozenset[str]:
        """The keys of common inputs kept as they arrive, in no layout of a reader's own."""
        return frozenset(name + _sharding(self.fixed[name]) for name in self.common)

    def _least_kept(self, op: AnnotatedOp) -> dict[str, int]:
        """Value or `:own` -> bytes, of what an op keeps under every strategy."""
        found = [
            {(s.key if s.key.endswith(":own") else s.value): s.size_bytes for s in strategy.saved}
            for strategy in op.strategies
        ]
        return {
            key: min(sizes[key] for sizes in found)
            for key in found[0]
            if all(key in sizes for sizes in found)
        }

    def _least_bytes(self, name: str) -> int:
        """Bytes of a parameter on one rank of tp where it is stored smallest."""
        return min(self.sharded(self.bytes[name], layout) for layout in self.stored[name])

    def _unwritten(self) -> set[str]:
        """Values that live inside one fused kernel: nobody keeps them."""
        software = self.setting.software
        if not (software.compiled or software.fused_kernels):
            return set()
        ended = {name: share.writes for name, share in self.shares.items()}
        return {name for node in ops(self.graph) if node.name in ended
                for name, written in zip(result_names(node), ended[node.name], strict=True) if not written}  # fmt: skip

    def _held(self, size_bytes: int) -> int:
        """Bytes of the device that a tensor of an activation takes, with what the caching allocator of a GPU cannot use around it."""
        if self.device.generation == "cpu":
            return size_bytes
        return ceil(size_bytes * (1 + self.setting.software.fitted.fragmentation))

    def _own_bytes(self, node: Node, per_row: float) -> int:
        """What an op keeps besides values of the graph.  A fused norm keeps two fp32 statistics a row, one that is written out what it
        computes on the way."""
        own = int(per_row * self.setting.micro_batch)
        software, name = self.setting.software, op_name(node)
        result, first = (
            self.tensors[names[0]] for names in (result_names(node), operand_names(node))
        )
        exact = (
            name in NORMS
            or (name in LOSSES and software.loss_kernel != "fused")
            or is_attention(node)
            or drops(node)
        )
        if not exact:  # activations, seen in the dtype of the trace; the others keep fp32 or bytes in any precision
            own = own * self.itemsize(first) // first.element_size()
        if name == _EXPERTS and software.fused_kernels:
            own = min(own, self._fused_experts_bytes(node))
        if name in NORMS and (software.compiled or software.fused_kernels):
            rows = self.size_bytes(result, {axis: S(0) for axis in BATCH_AXES}) // (
                self.itemsize(result) * int(result.shape[-1])
            )
            own = min(own, 8 * rows)
        return own

    def _by_weight(self, node: Node) -> bool:
        """Whether an op is a product with a parameter."""
        dims = self.dims.get(node.name)
        return (
            dims is not None
            and bool(dims.contraction)
            and any(n.name in self.weights for n in node.all_input_nodes)
        )

    def _in_fp8(self, node: Node) -> bool:
        """Whether an op multiplies by a parameter in fp8."""
        software = self.setting.software
        return (
            software.matmul_dtype == "fp8"
            and self._by_weight(node)
            and (software.fp8_head or node.name not in self.heads)
        )

    def _gathers_again(self, node: Node, root: str, layout: Layout) -> bool:
        """Whether a layer keeps its shard along positions of an input that it has gathered."""
        pinned = (
            self.setting.sequence_parallel is True
            and self.tp > 1
            and self.setting.software.gathers_again
        )
        return (
            pinned
            and self._by_weight(node)
            and not layout.is_shard
            and bool(self.positions.get(root))
        )

    def _fused_experts_bytes(self, node: Node) -> int:
        """What routed experts of fused kernels keep of each choice: the inputs of both products, and what the activation reads.  Weights of
        choices multiply inside the activation, so that nothing after the second product is kept."""
        call, software = Call(node), self.setting.software
        x, up, down = self.tensors[operand_names(node)[0]], call.arg("up"), call.arg("down")
        transposed = bool(call.arg("transposed", False))
        choices = self._whole_rows_bytes(node, operand_names(node)) // (
            2 * int(x.shape[1]) * self.itemsize(x)
        )
        inner, width = (
            int(w.meta["val"].shape[axis])
            for w, axis in ((up, 2 if transposed else 1), (down, 1 if transposed else 2))
        )
        narrow = 1 if software.keeps_fp8 and software.matmul_dtype == "fp8" else self.itemsize(x)
        return choices * (narrow * (int(x.shape[1]) + width) + self.itemsize(x) * inner)

    def _whole_rows_bytes(self, node: Node, names: tuple[str, ...]) -> int:
        """What routed experts keep whatever their width: each choice's row before the first product and after the second."""
        if op_name(node) != _EXPERTS:
            return 0
        x, fixed = (
            self.tensors[names[0]],
            {a: c.inputs[1] for a, c in self.choices.get(node.name, {}).items()},
        )
        choices = self.size_bytes(self.tensors[names[1]], fixed) // 8
        return 2 * choices * int(x.shape[1]) * self.itemsize(x)


def _sharding(layouts: Mapping[str, Layout]) -> str:
    """'/dp/tp': the axes that shard a value, in the key of what is saved of it."""
    return "".join(f"/{axis}" for axis, layout in layouts.items() if layout.is_shard)
