"""Annotate: price every strategy and every layout conversion of a traced model for one candidate mesh.

The dp axis is already decided (`batch.propagate_batch`); the tp axis is what the solver decides.  All costs are those of one device.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import ceil

import torch
from autopar_cost_models import activation_itemsize, collective_time_s, matmul_time_s, memory_time_s, static_bytes
from torch.fx import Node

from autopar.annotate.batch import propagate_batch
from autopar.annotate.saved import SavedByOp, observe_saved
from autopar.ir.annotated import AnnotatedBlock, AnnotatedModel, AnnotatedOp, AnnotatedValue, BoundaryEdge, Conversion, Saved, Strategy
from autopar.ir.cluster import ClusterSpec
from autopar.ir.mesh import MeshShape
from autopar.ir.plan import AxisChoice
from autopar.ir.sharding import COLLECTIVES, RP, Layout, R, S, transition
from autopar.ir.traced import BlockClass, Source, TracedModel
from autopar.ops.dims import OpDims, is_symbolic
from autopar.ops.rules import op_dims
from autopar.ops.strategies import OpStrategy, replicated, replicated_partial, strategies
from autopar.ops.values import operand_names, ops, output_nodes, result_names, value_grads, value_name, value_tensors


@dataclass(frozen=True, slots=True)
class Setting:
    """What a candidate fixes: mesh, sequences per micro-batch and rank, micro-batches, ZeRO stage, recompute, precision, cluster."""

    mesh: MeshShape
    micro_batch: int
    num_microbatches: int
    zero: int
    recompute: str
    precision: str
    cluster: ClusterSpec


class Annotator:
    """Annotates one traced model for many settings; what does not depend on the setting is computed once."""

    def __init__(self, traced: TracedModel) -> None:
        self.traced = traced
        self.saved = [observe_saved(block.graph) for block in traced.classes]
        self._batch: dict[bool, list[dict[str, AxisChoice]]] = {}
        self._dims = [{node.name: op_dims(node) for node in ops(block.graph)} for block in traced.classes]
        self._first_holder, self._tie_groups = self._ties()
        self._priced: dict[tuple, tuple[list[ClassPricer], tuple[BoundaryEdge, ...]]] = {}

    def batch_choices(self, dp: int) -> list[dict[str, AxisChoice]]:
        """Choices on the dp axis for each class.  They depend only on whether there is one."""
        if (dp > 1) not in self._batch:
            self._batch[dp > 1] = propagate_batch(self.traced, dp)
        return self._batch[dp > 1]

    def annotate(self, setting: Setting) -> AnnotatedModel:
        """Price the model under `setting`.  Ops and edges are priced once per mesh and micro-batch; ZeRO touches parameters alone."""
        batch = self.batch_choices(setting.mesh.dp)
        key = (setting.mesh, setting.micro_batch, setting.precision)
        if key not in self._priced:
            counts = Counter(segment.class_index for segment in self.traced.segments)
            pricers = [
                ClassPricer(
                    self.traced, index, setting, batch[index], self.saved[index], counts[index], self._first_holder, self._dims[index]
                )
                for index in range(len(self.traced.classes))
            ]
            self._priced[key] = pricers, self._edges(setting, batch, [p.block(setting) for p in pricers])
        pricers, edges = self._priced[key]
        return AnnotatedModel(
            tuple(p.block(setting) for p in pricers),
            edges,
            self._tie_groups,
            setting.num_microbatches,
            fixed_bytes=setting.cluster.device.reserved_bytes,
        )

    def _ties(self):
        """Parameters that several classes hold, and for each (class, slot) whether it is the one that carries the bytes."""
        holders: dict[str, dict[tuple[int, str], None]] = {}
        for segment in self.traced.segments:
            block = self.traced.classes[segment.class_index]
            for slot, name in zip(block.slots, segment.parameters, strict=True):
                node = next(n.name for n in block.graph.nodes if n.op == "get_attr" and n.target == slot)
                holders.setdefault(name, {})[segment.class_index, node] = None
        first = {name: next(iter(places)) for name, places in holders.items()}
        groups = {tuple(places) for places in holders.values() if len(places) > 1}
        return {place: first[name] == place for name, places in holders.items() for place in places}, tuple(sorted(groups))

    def _edges(self, setting: Setting, batch, blocks: list[AnnotatedBlock]) -> tuple[BoundaryEdge, ...]:
        """How often an output of one class feeds an input of another."""
        multiplicity: Counter = Counter()
        for segment in self.traced.segments:
            for position, source in enumerate(segment.inputs):
                if source.segment >= 0:
                    multiplicity[self.traced.segments[source.segment].class_index, source.index, segment.class_index, position] += 1
        edges = []
        for (source, output, target, position), count in sorted(multiplicity.items()):
            node = output_nodes(self.traced.classes[source].graph)[output]
            have = {s.inputs[0] for op in blocks[source].ops if op.name == f"output{output}" for s in op.strategies}
            want = {s.outputs[0] for op in blocks[target].ops if op.name == blocks[target].inputs[position] for s in op.strategies}
            pricer = Pricing(setting)
            layout = batch[source].get(f"output{output}")
            size = pricer.size_bytes(node.meta["val"], layout.inputs[0] if layout else None)
            edges.append(
                BoundaryEdge(
                    source,
                    output,
                    target,
                    position,
                    count,
                    pricer.conversions(node.meta["val"], size, have, want, bool(node.meta.get("grad"))),
                )
            )
        return tuple(edges)


class Pricing:
    """Times and bytes on one device under a setting."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.tp, self.dp = setting.mesh.tp, setting.mesh.dp
        self.device, self.topology = setting.cluster.device, setting.cluster.topology
        self._moves: dict[tuple[str, int], float] = {}

    def number(self, size) -> int:
        """A size over all data-parallel ranks of one micro-batch."""
        if not is_symbolic(size):
            return int(size)
        rows = self.setting.micro_batch * self.dp
        return int(size.node.expr.subs({s: rows for s in size.node.expr.free_symbols}))

    def size_bytes(self, tensor: torch.Tensor, batch_layout: Layout | None) -> int:
        """Bytes of a value on one data-parallel rank, before tp."""
        total = self.itemsize(tensor)
        for dim, size in enumerate(tensor.shape):
            number = self.number(size)
            total *= ceil(number / self.dp) if batch_layout is not None and batch_layout.dim == dim else number
        return total

    def itemsize(self, tensor: torch.Tensor) -> int:
        return activation_itemsize(self.setting.precision) if tensor.is_floating_point() else tensor.dtype.itemsize

    def sharded(self, size_bytes: int, layout: Layout) -> int:
        return ceil(size_bytes / self.tp) if layout.is_shard else size_bytes

    def move_s(self, primitive: str, size_bytes: int) -> float:
        """Time of one transition primitive over tp on a value of `size_bytes`."""
        if primitive == "identity":
            return 0.0
        key = primitive, size_bytes
        if key not in self._moves:
            if primitive in COLLECTIVES:
                self._moves[key] = collective_time_s(primitive, size_bytes, self.tp, self.setting.mesh.stride("tp"), self.topology)
            else:
                self._moves[key] = memory_time_s(2 * size_bytes // (self.tp if primitive in ("slice", "pad") else 1), self.device)
        return self._moves[key]

    def conversions(self, tensor: torch.Tensor, size_bytes: int, have: set[Layout], want: set[Layout], grad: bool) -> dict:
        """Prices of all possible changes of layout from `have` to `want`."""
        found = {}
        for src in have:
            for dst in want:
                if src == dst:
                    continue
                forward, backward = transition(src, dst)
                found[src, dst] = Conversion(self.move_s(forward, size_bytes), self.move_s(backward, size_bytes) if grad else 0.0)
        return found


class ClassPricer(Pricing):
    """Prices one block class."""

    def __init__(
        self,
        traced: TracedModel,
        index: int,
        setting: Setting,
        batch: dict[str, AxisChoice],
        saved: tuple[dict[str, SavedByOp], dict[str, str]],
        count: int,
        first_holder: dict,
        dims: dict[str, OpDims | None],
    ) -> None:
        super().__init__(setting)
        self.traced, self.index, self.batch, self.count, self.first_holder, self.dims = traced, index, batch, count, first_holder, dims
        self.block_class: BlockClass = traced.classes[index]
        self.graph = self.block_class.graph
        self.saved, self.roots = saved
        self.tensors, self.grads = value_tensors(self.graph), value_grads(self.graph)
        self.batch_layouts = self._batch_layouts()
        self.bytes = {name: self.size_bytes(t, self.batch_layouts.get(name)) for name, t in self.tensors.items()}
        self.calls = [self._op(node) for node in ops(self.graph)]
        wanted: dict[str, set[Layout]] = {}
        for op in self.calls:
            for position, name in enumerate(op.inputs):
                wanted.setdefault(name, set()).update(s.inputs[position] for s in op.strategies)
        self.inputs = [self._input(node, wanted.get(node.name, set())) for node in self.graph.nodes if node.op == "placeholder"]
        parameters = self._parameters(setting)
        produced = {
            name: {s.outputs[k] for s in op.strategies}
            for op in (*self.inputs, *parameters, *self.calls)
            for k, name in enumerate(op.outputs)
        }
        self.outputs = [self._output(k, node, produced) for k, node in enumerate(output_nodes(self.graph))]
        for op in self.outputs:
            wanted.setdefault(op.inputs[0], set()).update(s.inputs[0] for s in op.strategies)
        self.values = {
            name: AnnotatedValue(
                name,
                self.bytes[name],
                self.conversions(self.tensors[name], self.bytes[name], have, wanted.get(name, set()), self.grads[name]),
            )
            for name, have in produced.items()
        }
        self.kept = {
            op.name: {s.outputs[0]: self.sharded(self.bytes[op.outputs[0]], s.outputs[0]) for s in op.strategies} for op in self.inputs
        }

    def block(self, setting: Setting) -> AnnotatedBlock:
        """The class under `setting`, which shares mesh and micro-batch with the setting that this was made for."""
        recompute = setting.recompute == "full" and self.count > 1
        return AnnotatedBlock(
            self.block_class.name,
            self.count,
            (*self.inputs, *self._parameters(setting), *self.calls, *self.outputs),
            self.values,
            tuple(op.name for op in self.inputs),
            tuple(op.name for op in self.outputs),
            recompute,
            self.kept,
        )

    def _batch_layouts(self) -> dict[str, Layout]:
        found: dict[str, Layout] = {}
        for node in self.graph.nodes:
            if node.name in self.batch and node.op != "output":
                found.update(zip(result_names(node), self.batch[node.name].outputs, strict=True))
        return found

    # ------------------------------------------------------------------------------------------------ the ends of a class

    def _input(self, node: Node, wanted: set[Layout]) -> AnnotatedOp:
        """A segment input may arrive in any layout that an op of the class asks for; model inputs are whole on every tp rank."""
        sources = [
            s.inputs[[n for n in self.graph.nodes if n.op == "placeholder"].index(node)]
            for s in self.traced.segments
            if s.class_index == self.index
        ]
        from_model = any(isinstance(s, Source) and s.segment < 0 for s in sources)
        layouts = {R} if from_model else {R} | wanted
        return AnnotatedOp(node.name, "input", "", (), (node.name,), tuple(Strategy(str(x), (), (x,)) for x in sorted(layouts, key=str)))

    def _output(self, k: int, node: Node, produced: dict[str, set[Layout]]) -> AnnotatedOp:
        name = value_name(node)
        is_loss = self.traced.segments[-1].class_index == self.index and k == 0
        layouts = {R} if is_loss else {R} | produced[name]
        return AnnotatedOp(f"output{k}", "output", "", (name,), (), tuple(Strategy(str(x), (x,), ()) for x in sorted(layouts, key=str)))

    def _parameters(self, setting: Setting) -> list[AnnotatedOp]:
        return [self._parameter(node, setting) for node in self.graph.nodes if node.op == "get_attr"]

    def _parameter(self, node: Node, setting: Setting) -> AnnotatedOp:
        trainable, tensor = self.grads[node.name], self.tensors[node.name]
        layouts = [R] + ([RP] if trainable else []) + [S(d) for d, size in enumerate(tensor.shape) if size >= self.tp]
        carries = self.first_holder.get((self.index, node.name), True)
        found = tuple(self._parameter_strategy(setting, tensor, layout, trainable, carries) for layout in layouts)
        return AnnotatedOp(node.name, "parameter", node.target, (), (node.name,), found)

    def _parameter_strategy(self, setting: Setting, tensor: torch.Tensor, layout: Layout, trainable: bool, carries: bool) -> Strategy:
        numel = (
            tensor.numel() if not layout.is_shard else tensor.numel() // tensor.shape[layout.dim] * ceil(tensor.shape[layout.dim] / self.tp)
        )
        mesh = setting.mesh
        if not carries:
            return Strategy(str(layout), (), (layout,))
        if not trainable:
            return Strategy(str(layout), (), (layout,), static_bytes=numel * self.itemsize(tensor))
        memory = static_bytes(numel, setting.precision, setting.zero, mesh.dp)
        whole = static_bytes(numel, setting.precision, 0, 1)
        gather = 0.0
        if mesh.dp > 1 and setting.zero == 3:
            gather = collective_time_s("all_gather", whole.parameters, mesh.dp, mesh.stride("dp"), self.topology)
        step = 0.0
        if mesh.dp > 1 and setting.zero == 0:
            step += collective_time_s("all_reduce", whole.gradients, mesh.dp, mesh.stride("dp"), self.topology)
        elif mesh.dp > 1:
            step += collective_time_s("reduce_scatter", whole.gradients, mesh.dp, mesh.stride("dp"), self.topology)
            if setting.zero < 3:
                step += collective_time_s("all_gather", whole.parameters, mesh.dp, mesh.stride("dp"), self.topology)
        if layout == RP and self.tp > 1:
            step += collective_time_s("all_reduce", whole.gradients, self.tp, mesh.stride("tp"), self.topology)
        owned = (
            memory.parameters + memory.gradients + memory.optimizer
            if setting.zero == 0
            else (whole.parameters + whole.gradients + whole.optimizer) // mesh.dp
        )
        step += memory_time_s(2 * owned, self.device)
        return Strategy(str(layout), (), (layout,), gather, gather, step, memory.parameters + memory.gradients + memory.optimizer)

    # --------------------------------------------------------------------------------------------------------------- calls

    def _op(self, node: Node) -> AnnotatedOp:
        names, outs = operand_names(node), result_names(node)
        input_grads, output_grads = [self.grads[n] for n in names], [self.grads[n] for n in outs]
        dims = self.dims[node.name]
        if dims is None:
            found = [replicated(len(names), len(outs))]
            if any(output_grads):
                found.append(replicated_partial(input_grads, output_grads))
        else:
            found = (
                strategies(dims, self.tp, input_grads, output_grads, batch=False) if self.tp > 1 else [replicated(len(names), len(outs))]
            )
        return AnnotatedOp(node.name, "op", str(node.target), names, outs, tuple(self._strategy(node, dims, s, names, outs) for s in found))

    def _strategy(self, node: Node, dims: OpDims | None, choice: OpStrategy, names: tuple[str, ...], outs: tuple[str, ...]) -> Strategy:
        read = [self.sharded(self.bytes[n], x) for n, x in zip(names, choice.inputs, strict=True)]
        written = [self.sharded(self.bytes[n], x) for n, x in zip(outs, choice.outputs, strict=True)]
        grads = [b for b, n in zip(read, names, strict=True) if self.grads[n]]
        differentiable = any(self.grads[n] for n in outs)
        flops = self.number(dims.total_flops()) if dims is not None else 0
        batch = self.batch.get(node.name)
        if batch is not None and batch.strategy not in ("R", "R/P"):
            flops = ceil(flops / self.dp)
        if choice.letter:
            flops = ceil(flops / self.tp)
        if dims is not None and dims.movement_free:
            forward = backward = 0.0
        elif flops:
            forward = matmul_time_s(flops, sum(read) + sum(written), self.device, self.setting.precision)
            factor = 2.5 if "scaled_dot_product" in str(node.target) else len(grads)
            backward = (
                matmul_time_s(int(flops * factor), 2 * sum(grads) + sum(written), self.device, self.setting.precision) if grads else 0.0
            )
        else:
            forward = memory_time_s(sum(read) + sum(written), self.device)
            backward = memory_time_s(2 * sum(grads) + sum(written), self.device) if differentiable else 0.0
        if choice.lowering == "vocab_parallel_cross_entropy":
            tokens = self.bytes[names[1]] // 8 * 4
            forward += 3 * self.move_s("all_reduce", tokens)
        return Strategy(choice.name, choice.inputs, choice.outputs, forward, backward, saved=self._kept(node, choice, names, outs))

    def _kept(self, node: Node, choice: OpStrategy, names: tuple[str, ...], outs: tuple[str, ...]) -> tuple[Saved, ...]:
        observed = self.saved.get(node.name)
        if observed is None or not node.meta.get("grad"):
            return ()
        layout = dict(zip((*names, *outs), (*choice.inputs, *choice.outputs), strict=True))
        by_root = {self.roots[n]: layout[n] for n in reversed((*names, *outs))}
        kept = []
        for root in observed.values:
            part = by_root.get(root, R)
            kept.append(Saved(f"{root}{'/tp' if part.is_shard else ''}", self.sharded(self.bytes[root], part)))
        if observed.extra_bytes_per_row:
            own = int(observed.extra_bytes_per_row * self.setting.micro_batch)
            kept.append(Saved(f"{node.name}:own", ceil(own / self.tp) if choice.letter else own))
        return tuple(kept)
