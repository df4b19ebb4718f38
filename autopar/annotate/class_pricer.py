"""Price one block class: every strategy of every op over tp, what propagation fixed on the other axes included."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from math import ceil, prod

from autopar_cost_models import activation_itemsize, collective_time_s, static_bytes
from autopar_cost_models.roofline import link_time_s, offloaded_update_time_s, optimizer_time_s
from torch.fx import Node

from autopar.annotate.activations import KeptPricer
from autopar.annotate.call_pricer import PricedCall
from autopar.annotate.class_facts import ClassFacts
from autopar.annotate.recomputed import NOTHING
from autopar.annotate.saved_tensors import rerun_ops
from autopar.annotate.setting import AxisChoices, Setting, is_periodic
from autopar.annotate.transfers import Pricing
from autopar.ir.annotated import (
    AnnotatedBlock,
    AnnotatedOp,
    AnnotatedValue,
    Conversion,
    Saved,
    Strategy,
)
from autopar.ir.mesh import BATCH_AXES, MeshShape
from autopar.ir.sharding import COLLECTIVES, RP, Layout, P, R, S, transition
from autopar.ir.traced import BlockClass
from autopar.ops.dims import OpDims, is_symbolic
from autopar.ops.strategies import OpStrategy, letter_of, replicated, replicated_partial
from autopar.ops.values import operand_names, ops, output_nodes, result_names, value_name

BUCKET_BYTES = 25 * 2**20
"""Gradients are reduced, and ZeRO's updated parameters gathered, in buckets of about this size
(`runtime/state/gradients.py`, PyTorch's DDP)."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A change of layout over dp before a call: of which operand, the moves of forward and of backward, and bytes before tp.  What is sent
    is priced for each mesh, so that meshes that differ in dp alone share all else."""

    operand: int
    forward: str
    backward: str
    size_bytes: int


@dataclass(slots=True)
class Trained:
    """What so many trained elements on a device send, do and hold, whatever else runs, so whatever the micro-batch: seconds to `gather`
    them, to reduce their gradients (`reduce`), what copies of a shard share out included, to add up parts over `copies`, of gradients that
    are `partial` over tp; to `update` them and to `fetch` them from the host; bytes as in `Strategy`."""

    gather_s: float
    reduce_s: float
    copies_s: float
    partial_s: float
    update_s: float
    fetch_s: float
    static_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    host_bytes: int


class ClassPricer(KeptPricer):
    """Prices one block class.  `trained` keeps prices of parameters by class and setting.  `choices` are those of propagation for all
    classes, `count` is the number of its segments; `plain` has the calls priced without the selective recompute mode of `setting`, if it
    has one."""

    def __init__(
        self, facts: ClassFacts, trained: dict[tuple[int, Setting], dict[tuple, Trained]], index: int, setting: Setting,
        choices: AxisChoices, count: int, plain: ClassPricer | None = None,
    ) -> None:  # fmt: skip
        super().__init__(setting)
        self.priced = (
            dict(plain.priced) if plain else {}
        )  # calls without what is sent over dp, and without selective recomputation
        self.over_dp = dict(plain.over_dp) if plain else {}
        self.facts, self.traced, self.index, self.choices, self.count = (
            facts,
            facts.traced,
            index,
            choices[index],
            count,
        )
        self._trained_of = trained
        self.dims, self.patterns = facts.reach.dims[index], facts.patterns[index]
        self.positions = facts.positions[index]
        self.block_class: BlockClass = self.traced.classes[index]
        self.graph = self.block_class.graph
        self.saved, self.roots = facts.saved[index]
        self.staying_bytes = 0  # of what the last segment keeps for all, when backward is here
        self.rerun_bytes: dict[
            str, int
        ] = {}  # of what is not kept but made again: each value under its smallest strategy
        self.first = next((node.name for node in ops(self.graph)), "")
        self.is_layer = self.block_class.is_layer
        self.rerun = facts.rerun(index, setting, self.is_layer)
        self.unlaunched = replace(
            self.device, launch_s=0.0, memory_curve=None
        )  # one kernel updates many parameters
        self.tensors, self.grads = facts.tensors[index], facts.grads[index]
        self.weights = {n.name for n in self.graph.nodes if n.op == "get_attr"}
        self.numel = sum(
            self.tensors[name].numel() for name in self.weights if facts.carries(index, name)
        )
        self.heads = facts.heads[index]
        narrow = [node for node in ops(self.graph) if self._in_fp8(node)]
        self.narrow = {node.name for node in narrow}  # calls that multiply by a parameter in fp8
        self.multiplied = {
            n.name for node in narrow for n in node.all_input_nodes if n.name in self.weights
        }
        self.shapes = {name: tuple(map(self.number, t.shape)) for name, t in self.tensors.items()}
        self.shares, self.added = facts.shares(index, setting.software.joins), facts.added[index]
        self.unwritten = self._unwritten()
        self.mask_of = partial(facts.mask_of, index)
        self.fixed = self._fixed_layouts()
        self.common = self._common(choices)
        self.bytes = {
            name: self.size_bytes(t, self.fixed[name]) for name, t in self.tensors.items()
        }
        self.conversions_paid: set[tuple[str, str, Layout]] = set()
        self._travels: dict[tuple, float] = {}
        self.least_compute = cache(self._block_compute)
        self._priced_parameters: dict[tuple, list[AnnotatedOp]] = {}
        self._calls_by_mesh: dict[tuple[bool, MeshShape], list[AnnotatedOp]] = {}
        self.calls = [self._op(node) for node in ops(self.graph)]
        wanted: dict[str, set[Layout]] = {}
        for op in self.calls:
            for position, name in enumerate(op.inputs):
                wanted.setdefault(name, set()).update(s.inputs[position] for s in op.strategies)
        self.inputs = [
            self._input(node, wanted.get(node.name, set()))
            for node in self.graph.nodes
            if node.op == "placeholder"
        ]
        self.stored = {
            node.name: self._stored(node) for node in self.graph.nodes if node.op == "get_attr"
        }
        produced = {name: set(layouts) for name, layouts in self.stored.items()}
        produced |= {
            name: {s.outputs[k] for s in op.strategies} for op in (*self.inputs, *self.calls) for k, name in enumerate(op.outputs)
        }  # fmt: skip
        self.outputs = [
            self._output(k, node, produced) for k, node in enumerate(output_nodes(self.graph))
        ]
        for op in self.outputs:
            wanted.setdefault(op.inputs[0], set()).update(s.inputs[0] for s in op.strategies)
        same = plain.values.keys() - self.rerun.values if plain else ()
        self.values = {
            name: plain.values[name] if name in same else AnnotatedValue(name, self.bytes[name], self._changes(name, have, wanted))
            for name, have in produced.items()
        }  # fmt: skip
        self.workspace_bytes = cache(self._workspace_bytes)
        sizes = {
            op.name: {
                s.outputs[0]: self._held(self.sharded(self.bytes[op.outputs[0]], s.outputs[0]))
                for s in op.strategies
            }
            for op in self.inputs
        }
        self.common_bytes = {name: sizes[name] for name in self.common}
        self.input_bytes = sizes | {
            name: dict.fromkeys(of, 0) for name, of in self.common_bytes.items()
        }

    def _common(self, choices: AxisChoices) -> dict[str, tuple[int, int]]:
        """Of the inputs that all segments read (`ClassFacts.common`) those that reach each as they were made.  What an edge converts is a
        copy for each reader; over tp the solver might have it convert what has a gradient, and makes the rest whole from the start."""
        found = {}
        for name, (segment, k) in self.facts.common.get(self.index, {}).items():
            made = choices[self.traced.segments[segment].class_index].get(f"output{k}", {})
            alike = all(
                self.fixed[name].get(axis, R) == choice.inputs[0] for axis, choice in made.items()
            )
            if alike and not (self.tp > 1 and self.grads[name]):
                found[name] = segment, k
        return found

    def block(self, setting: Setting) -> AnnotatedBlock:
        """The class under `setting`, which shares mesh and micro-batch with the setting that this was made for."""
        recompute = self._recomputes(setting)
        calls, values = self._calls(setting), self.rerun_values if recompute else self.values
        return AnnotatedBlock(
            self.block_class.name,
            self.count,
            (*self.inputs, *self._parameters(setting), *calls, *self.outputs),
            values,
            tuple(op.name for op in self.inputs),
            tuple(op.name for op in self.outputs),
            recompute,
            self.input_bytes,
            self.workspace_bytes(setting.zero < 3, setting.mesh.pp == 1)
            + self.staying_bytes
            + self._adding_up_bytes(recompute),
            self.common_bytes,
            self.is_layer,
        )

    def _adding_up_bytes(self, recompute: bool) -> int:
        """Gradients of common values that later segments have left when backward is here, less what such a segment gave back at least."""
        gradients = sum(
            max(of.values()) for name, of in self.common_bytes.items() if self.grads[name]
        )
        if not gradients:
            return 0
        if recompute:
            given_back = sum(min(of.values()) for of in self.input_bytes.values())
        else:
            given_back = max(
                (
                    min(sum(one.size_bytes for one in s.saved) for s in op.strategies)
                    for op in self.calls
                ),
                default=0,
            )
        return max(gradients - given_back, 0)

    @cached_property
    def run_again(self) -> frozenset[str]:
        """The calls that backward runs again where the whole block is recomputed.  Parameters are there for them, gathered for backward."""
        return rerun_ops(self.graph, self.saved, self.roots, self.setting.software.early_stop)

    @cached_property
    def rerun_calls(self) -> list[AnnotatedOp]:
        return [_run_again(op) if op.name in self.run_again else op for op in self.calls]

    def _calls(self, setting: Setting) -> list[AnnotatedOp]:
        """The calls, with what they send over dp."""
        recompute = self._recomputes(setting)
        calls = self.rerun_calls if recompute else self.calls
        if not self.over_dp:
            return calls
        key = recompute, setting.mesh
        if key not in self._calls_by_mesh:
            pricing = Pricing(setting)
            sending = {
                node.name: self._op(node, pricing)
                for node in ops(self.graph)
                if node.name in self.over_dp
            }
            again = {
                name: _run_again(op)
                for name, op in sending.items()
                if recompute and name in self.run_again
            }
            self._calls_by_mesh[key] = [
                again.get(op.name) or sending.get(op.name, op) for op in calls
            ]
        return self._calls_by_mesh[key]

    @cached_property
    def rerun_values(self) -> dict[str, AnnotatedValue]:
        read = {name for op in self.calls if op.name in self.run_again for name in op.inputs}
        return {
            name: replace(
                value, conversions={pair: c.rerun() for pair, c in value.conversions.items()}
            )
            if name in read
            else value
            for name, value in self.values.items()
        }

    def _fixed_layouts(self) -> dict[str, dict[str, Layout]]:
        """For each value its layouts on the axes that propagation decides."""
        found: dict[str, dict[str, Layout]] = {}
        for node in self.graph.nodes:
            if node.op != "output" and node.name in self.tensors or node.op == "call_function":
                for k, name in enumerate(result_names(node)):
                    found[name] = {
                        axis: choice.outputs[k]
                        for axis, choice in self.choices.get(node.name, {}).items()
                    }
        return found

    # ------------------------------------------------------------------------------------------------ the ends of a class

    def _input(self, node: Node, wanted: set[Layout]) -> AnnotatedOp:
        """A segment input may arrive in any layout that an op of the class asks for; model inputs are whole on every tp rank."""
        position = [n for n in self.graph.nodes if n.op == "placeholder"].index(node)
        from_model = any(
            s.inputs[position].segment < 0
            for s in self.traced.segments
            if s.class_index == self.index
        )
        layouts = {R} if from_model else self._boundary(node.name, {R} | wanted)
        return AnnotatedOp(
            node.name,
            "input",
            "",
            (),
            (node.name,),
            tuple(Strategy(str(x), (), (x,)) for x in sorted(layouts, key=str)),
        )

    def _output(self, k: int, node: Node, produced: dict[str, set[Layout]]) -> AnnotatedOp:
        name = value_name(node)
        is_loss = self.traced.segments[-1].class_index == self.index and k == 0
        layouts = {R} if is_loss else self._boundary(name, {R} | produced[name])
        return AnnotatedOp(
            f"output{k}",
            "output",
            "",
            (name,),
            (),
            tuple(Strategy(str(x), (x,), ()) for x in sorted(layouts, key=str)),
        )

    def _changes(self, name: str, have: set[Layout], wanted: dict[str, set[Layout]]) -> dict:
        """Prices of all changes of layout of a value.

        The pin of sequence parallelism asks for Megatron's layout: weights stay as they are stored, and their gradients are added up once a
        step; what a product shards along features goes on so, into attention or the product that sums over them.
        """
        found = self.conversions(self.bytes[name], have, wanted.get(name, set()), self.grads[name])
        if name not in self.weights:
            found = self._gathered_in_fp8(name, found)
            beside = self._beside(name)
            found = {
                pair: self.overlapped(conversion, *beside) for pair, conversion in found.items()
            }
            if self.setting.sequence_parallel is not None and self.grads[name]:
                along = {
                    x for x in (*have, *wanted.get(name, ())) if self._along_positions(name, x)
                }
                found = {
                    (a, b): price for (a, b), price in found.items() if not a.is_shard or a in along
                }
                if (
                    self.setting.sequence_parallel and along
                ):  # what is partial becomes a shard, not whole
                    found = {
                        (a, b): price for (a, b), price in found.items() if a in along or b in along
                    }
        if name in self.rerun.values:  # a sum whose result is kept is not made again
            found = {
                (a, b): price if self.rerun.sums and a == P else price.rerun()
                for (a, b), price in found.items()
            }
        if self.setting.sequence_parallel and name in self.weights:
            return {
                pair: price
                for pair, price in found.items()
                if not set(COLLECTIVES) & set(transition(*pair))
            }
        return found

    def _gathered_in_fp8(self, name: str, found: dict) -> dict:
        """Changes of layout where a value that only products in fp8 read, and the gradient of one that such a product made, are cast before
        they are gathered."""
        if not self.setting.software.fp8_gathers:
            return found
        readers = {op.name for op in self.calls if name in op.inputs}
        read, made = bool(readers) and readers <= self.narrow, name in self.narrow
        size = self.bytes[name] // self.itemsize(self.tensors[name])
        cast = self.conversions(
            size, {a for a, _ in found}, {b for _, b in found}, self.grads[name]
        )
        for pair in found if read or made else ():
            forward, backward = (
                way == "all_gather" and fp8
                for way, fp8 in zip(transition(*pair), (read, made), strict=True)
            )
            there, back = (
                cast[pair] if forward else found[pair],
                cast[pair] if backward else found[pair],
            )
            found[pair] = Conversion(
                there.forward_s, back.backward_s, there.forward_comm_s, back.backward_comm_s
            )
        return found

    def _beside(self, name: str) -> tuple[float, float]:
        """Seconds (forward, backward) of the products beside which a value travels over tp."""
        software, readers = self.setting.software, [op for op in self.calls if name in op.inputs]
        late_s = (
            sum(min(s.backward_weight_s for s in op.strategies) for op in readers)
            if software.late_gradients
            else 0.0
        )
        if not software.tp_overlap:
            return 0.0, late_s
        products = [
            op
            for op in self.calls
            if (name in op.inputs or name in op.outputs) and self._multiplies(op.name)
        ]
        return (
            tuple(sum(least) for least in zip(*map(_least_compute, products), strict=True))
            if products
            else (0.0, late_s)
        )

    def _multiplies(self, name: str) -> bool:
        """Whether an op multiplies by a parameter."""
        if self.dims[name] is None or not self.dims[name].contraction:
            return False
        return not self.weights.isdisjoint(next(op for op in self.calls if op.name == name).inputs)

    def _boundary(self, name: str, layouts: set[Layout]) -> set[Layout]:
        """The layouts that the pin of sequence parallelism leaves for a value between segments: with it, activations of blocks are
        sharded along positions."""
        positions = {x for x in layouts if self._along_positions(name, x)}
        if self.setting.sequence_parallel is False:
            return layouts - positions
        return (
            positions
            if self.setting.sequence_parallel and positions and self.grads[name]
            else layouts
        )

    def _along_positions(self, name: str, layout: Layout) -> bool:
        """Whether a layout shards positions of sequences."""
        return layout.is_shard and any(
            dim == layout.dim and pattern.rows == layout.pattern.rows
            for dim, pattern in self.positions.get(name, ())
        )

    def _parameters(self, setting: Setting) -> list[AnnotatedOp]:
        """The parameters, which ZeRO and recomputation change."""
        key = setting.zero, setting.shard, setting.offload, self._recomputes(setting), setting.mesh
        if key not in self._priced_parameters:
            self._priced_parameters[key] = self._price_parameters(setting)
        return self._priced_parameters[key]

    def _price_parameters(self, setting: Setting) -> list[AnnotatedOp]:
        """Each travels over dp beside its share, by size, of what the block computes."""
        nodes, compute_s = [node for node in self.graph.nodes if node.op == "get_attr"], (0.0, 0.0)
        if setting.software.dp_overlap and self.overlaps:
            compute_s = self.least_compute(self._recomputes(setting))
        sizes = {node.name: self.tensors[node.name].numel() for node in nodes}
        travel = (
            sum(sizes.values()) if _moves_by_segment(setting) else self.numel,
            self.numel,
        )  # in forward and in backward
        trained = self._trained_of.setdefault((self.index, _of_trained(setting)), {})

        @cache  # many parameters are of one size
        def costs(*of_parameter, beside: tuple[float, float], stays: bool) -> dict[str, float]:
            if of_parameter not in trained:
                trained[of_parameter] = self._trained(setting, *of_parameter)
            return self._parameter_costs(setting, trained[of_parameter], beside, stays)

        return [
            self._parameter(node, setting, costs, tuple(s * sizes[node.name] / max(of, 1) for s, of in zip(compute_s, travel, strict=True)))
            for node in nodes
        ]  # fmt: skip

    def _block_compute(self, again: bool) -> tuple[float, float]:
        """Seconds (forward, backward) that the device computes for a segment, run again or not, whichever strategies are chosen."""
        return tuple(
            sum(least)
            for least in zip(
                (0.0, 0.0),
                *map(_least_compute, self.rerun_calls if again else self.calls),
                strict=True,
            )
        )

    def _recomputes(self, setting: Setting) -> bool:
        """Whether the segments of this class keep their inputs alone."""
        return (
            self.is_layer
            if setting.recompute == "full"
            else is_periodic(setting.recompute) and bool(self.block_class.picked)
        )

    def _stored(self, node: Node) -> list[Layout]:
        """The layouts over tp in which a parameter may be stored."""
        trainable, tensor = self.grads[node.name], self.tensors[node.name]
        sizes = enumerate(tensor.shape) if self.tp > 1 else ()
        dims = [S(d) for d, size in sizes if size >= self.tp]
        marked = [
            S(d, p)
            for d, p in sorted(self.patterns.get(node.name, ()), key=str)
            if not p.is_contiguous and self.tp > 1
        ]
        shards = dims + [x for x in marked if x.pattern.divides(int(tensor.shape[x.dim]), self.tp)]
        return (
            shards
            if shards and self._stays_sharded(node.name)
            else [R] + ([RP] if trainable and self.tp > 1 else []) + shards
        )

    def _parameter(
        self, node: Node, setting: Setting, costs: Callable[..., dict[str, float]], beside: tuple[float, float]
    ) -> AnnotatedOp:  # fmt: skip
        found = tuple(
            self._parameter_strategy(node.name, layout, setting, costs, beside)
            for layout in self.stored[node.name]
        )
        return AnnotatedOp(node.name, "parameter", node.target, (), (node.name,), found)

    def _stays_sharded(self, name: str) -> bool:
        """Whether the pin of sequence parallelism, which is about Megatron's layout, has tp shard a parameter: the matrices that a block
        multiplies by, but for those that hardly weigh (the router of experts)."""
        if self.setting.sequence_parallel is None or self.tp == 1 or self.tensors[name].dim() != 2:
            return False
        return 1000 * self.tensors[name].numel() > self.numel and any(
            name in op.inputs and self._multiplies(op.name) for op in self.calls
        )

    def _parameter_strategy(
        self,
        name: str,
        layout: Layout,
        setting: Setting,
        costs: Callable[..., dict[str, float]],
        beside: tuple[float, float],
    ) -> Strategy:
        mesh, borrowed = setting.mesh, not self.facts.carries(self.index, name)
        if borrowed and not (self.grads[name] and _moves_by_segment(setting)):
            return Strategy(str(layout), (), (layout,))
        fixed, shape = self.fixed[name], list(self.tensors[name].shape)
        for axis, own in (*fixed.items(), ("tp", layout)):
            if own.is_shard:
                shape[own.dim] = ceil(shape[own.dim] / mesh.size(axis))
        numel = prod(shape)
        if not self.grads[name]:
            return Strategy(
                str(layout), (), (layout,), static_bytes=numel * self.itemsize(self.tensors[name])
            )
        copies = tuple(
            axis for axis, own in fixed.items() if not own.is_shard
        )  # ranks that hold the same shard, of which each owns a part
        found = costs(numel, layout == RP and self.tp > 1, copies, name in self.multiplied, beside=beside,
                      stays=setting.gathers_by_segment and self.facts.stays(self.index, name))  # fmt: skip
        if (
            borrowed
        ):  # it comes for each forward, and in backward is there until the first that reads it
            found = {part: found[part] for part in ("forward_s", "forward_comm_s")}
        return Strategy(str(layout), (), (layout,), **found)

    def _trained(
        self,
        setting: Setting,
        numel: int,
        is_partial: bool,
        copies: Sequence[str],
        multiplied: bool,
    ) -> Trained:
        """What so many trained elements on a device send, do and hold; `copies`: the axes whose ranks hold the same ones."""
        mesh = setting.mesh
        levels = mesh.levels(copies, setting.shard)
        replicas = prod(size for size, _ in levels)
        groups = (
            [mesh.copies(setting.shard)] if setting.shard and "dp" in copies else []
        )  # they hold the same parts
        recipe = setting.software.state_recipe
        zero = (
            1 if setting.zero == 2 and mesh.pp > 1 else setting.zero
        )  # a pipeline adds up whole gradients, and reduces them once a step
        memory = static_bytes(numel, setting.precision, zero, replicas, recipe, setting.offload)
        whole = static_bytes(numel, setting.precision, 0, 1)

        def over(
            levels: Sequence[tuple[int, int]], collective: str, size_bytes: int, bucket_bytes: int
        ) -> float:
            """The parameters of a block travel together, gradients below stage 3 in buckets too, so that each pays its share."""
            if not levels or not size_bytes:
                return 0.0
            block = size_bytes * self.numel // (numel * self.tp)
            together = max(block, size_bytes, bucket_bytes)
            interfaces = setting.software.sharded_interfaces if setting.zero == 3 else 0
            return (
                self._travel_s(collective, together, tuple(levels), interfaces)
                * size_bytes
                / together
            )

        bucket_bytes = BUCKET_BYTES if setting.zero < 3 else 0
        gather_s = (
            over(levels, "all_gather", whole.parameters, bucket_bytes) if setting.zero else 0.0
        )
        held = static_bytes(
            numel, setting.precision, 0, 1, recipe
        )  # gradients travel as they are held, if that is less than fp32
        sent_bytes = min(whole.gradients, held.gradients)
        reduce_s = over(
            levels, "reduce_scatter" if setting.zero else "all_reduce", sent_bytes, bucket_bytes
        )
        copies_s = over(groups, "all_reduce", ceil(sent_bytes / replicas), BUCKET_BYTES)
        partial_s = 0.0
        if is_partial:
            partial_s = collective_time_s(
                "all_reduce", whole.gradients, self.tp, mesh.stride("tp"), self.topology
            )
        owned, fetch_s = numel if setting.zero == 0 else ceil(numel / replicas), 0.0
        if setting.offload == "none":
            update_s = optimizer_time_s(
                owned, self.unlaunched, setting.precision, setting.software.fused_optimizer
            )
        else:
            one, host, back = (
                static_bytes(owned, setting.precision, 0, 1, recipe),
                setting.cluster.host,
                setting.offload == "optimizer",
            )
            update_s = offloaded_update_time_s(
                owned, host, setting.precision, one.gradients, one.parameters * back
            )
            fetch_s = (
                0.0 if back else link_time_s(one.parameters, host)
            )  # before every pass, and before the gather
        doubles, gradients = self._copies_bytes(setting, multiplied, numel, memory.gradients)
        resident = memory.parameters + doubles + gradients + memory.optimizer
        return Trained(
            gather_s, reduce_s, copies_s, partial_s, update_s, fetch_s, resident, gradients, memory.optimizer, memory.host
        )  # fmt: skip

    def _parameter_costs(
        self, setting: Setting, of: Trained, beside: tuple[float, float], stays: bool
    ) -> dict[str, float]:
        """What trained elements take and hold beside so many seconds of forward and of backward; `stays`: backward finds them gathered."""
        again = (
            setting.zero == 3 and setting.mesh.pp == 1
        )  # gathered for each pass; a pipeline gathers once a step
        always = (
            setting.zero >= 2 and setting.mesh.pp == 1
        )  # whole gradients are not kept from one micro-batch to the next
        forward_s = self.exposed_s(beside[0], of.gather_s * again)
        in_backward_s = of.gather_s * (again and not stays) + of.reduce_s * always
        backward_s = self.exposed_s(beside[1], in_backward_s)
        left_s = max(beside[1] - in_backward_s, 0.0)
        step_s = (
            0.0
            if always and not of.copies_s
            else self.exposed_s(left_s, of.reduce_s * (not always) + of.copies_s)
        )
        step_s += 0.0 if again else self.exposed_s(beside[0], of.gather_s)
        step_s += of.partial_s
        return {
            "forward_s": forward_s + of.fetch_s, "backward_s": backward_s + of.fetch_s, "step_s": step_s + of.update_s,
            "static_bytes": of.static_bytes, "forward_comm_s": forward_s, "backward_comm_s": backward_s, "step_comm_s": step_s,
            "gradient_bytes": of.gradient_bytes, "optimizer_bytes": of.optimizer_bytes, "host_bytes": of.host_bytes,
        }  # fmt: skip

    def _travel_s(
        self, collective: str, size_bytes: int, levels: tuple[tuple[int, int], ...], interfaces: int
    ) -> float:
        """Seconds of a collective over groups of such (size, stride), one after the other, through so many interfaces of a node (0: all).
        What the first has scattered is all that the next one has, and so on; a gather goes the other way."""
        key = collective, size_bytes, levels, interfaces
        if key not in self._travels:
            topology = (
                replace(self.topology, nics_per_node=interfaces) if interfaces else self.topology
            )
            found_s, left = 0.0, size_bytes
            for ranks, stride in levels:
                found_s += collective_time_s(collective, left, ranks, stride, topology)
                left = left if collective == "all_reduce" else ceil(left / ranks)
            self._travels[key] = found_s
        return self._travels[key]

    def _copies_bytes(
        self, setting: Setting, multiplied: bool, numel: int, gradient: int
    ) -> tuple[int, int]:
        """(copies of a trained parameter besides its state, its `gradient`): in fp8, and what FSDP cannot give back in a pipeline, where
        torch gathers once and reduces once a step: the gathered parameter, and in place of its gradient's share the whole in fp32."""
        found = 0
        if setting.software.fp8_weight_copies and multiplied:
            found += 2 * numel
        if setting.zero == 3 and setting.mesh.pp > 1:
            found, gradient = found + activation_itemsize(setting.precision) * numel, 4 * numel
        return found, gradient

    # --------------------------------------------------------------------------------------------------------------- calls

    def _op(self, node: Node, sender: Pricing | None = None) -> AnnotatedOp:
        """A call; `sender` prices what is sent over dp before it, if that is to be counted."""
        names, outs = operand_names(node), result_names(node)
        input_grads, output_grads = [self.grads[n] for n in names], [self.grads[n] for n in outs]
        dims = self.dims[node.name]
        if dims is None:
            found = [replicated(len(names), len(outs))]
            if any(output_grads):
                found.append(replicated_partial(input_grads, output_grads))
        elif self.tp == 1:
            found = [replicated(len(names), len(outs))]
        else:
            found = self._tensor_parallel(node, dims)
        if node.name not in self.priced:
            paid = self._fixed_conversions(node, names)
            self.priced[node.name] = tuple(self._strategies(node, dims, found, names, outs, paid))
            sent = [
                Sent(i, there, back if any(output_grads) and input_grads[i] else "identity", size)
                for i, axis, there, back, size in paid if axis == "dp" and set(COLLECTIVES) & {there, back}
            ]  # fmt: skip
            if sent:
                self.over_dp[node.name] = sent
        priced = self.priced[node.name]
        if sender is not None:
            priced = tuple(
                self._sending(self.over_dp[node.name], strategy, sender) for strategy in priced
            )
        if self.rerun is not NOTHING:
            priced = tuple(
                self._again(node, s, strategy, names, outs)
                for s, strategy in zip(found, priced, strict=True)
            )
        return AnnotatedOp(
            node.name, "op", str(node.target), names, outs, priced, sender is not None
        )

    def _sending(self, sent: list[Sent], strategy: Strategy, sender: Pricing) -> Strategy:
        """A strategy that pays for what is sent over dp."""
        there_s, back_s = (
            sum(sender.move_s(move, self.sharded(one.size_bytes, strategy.inputs[one.operand]), "dp")
                for one, move in moves if move in COLLECTIVES)
            for moves in ([(one, one.forward) for one in sent], [(one, one.backward) for one in sent])
        )  # fmt: skip
        return replace(
            strategy, forward_s=strategy.forward_s + there_s, backward_s=strategy.backward_s + back_s,
            forward_comm_s=strategy.forward_comm_s + there_s, backward_comm_s=strategy.backward_comm_s + back_s,
        )  # fmt: skip

    def _again(
        self,
        node: Node,
        choice: OpStrategy,
        strategy: Strategy,
        names: tuple[str, ...],
        outs: tuple[str, ...],
    ) -> Strategy:
        """A strategy under a selective recompute mode: what it keeps, and its forward once more if backward runs it again."""
        kept = self._kept(node, choice, names, outs, self.rerun.kept)
        again, eager = node.name in self.rerun.ops, not self.setting.software.compiled
        if (
            self.rerun.sums and choice.outputs[0] == P and (again or eager and strategy.saved)
        ):  # the sum over tp is kept
            size = self.bytes[outs[0]]
            kept += (
                Saved(
                    f"{outs[0]}/sum",
                    ceil(size / self.tp) if self.setting.sequence_parallel else size,
                ),
            )
            again &= eager
        kept = self._own(kept)
        for saved in set(strategy.saved) - set(kept):
            root = saved.key.partition("/")[0]
            self.rerun_bytes[root] = min(
                self.rerun_bytes.get(root, saved.size_bytes), saved.size_bytes
            )
        return strategy.keeping(kept, again)

    def _tensor_parallel(self, node: Node, dims: OpDims) -> list[OpStrategy]:
        chosen = self.choices.get(node.name, {})
        letters = [(letter_of(choice.strategy), axis) for axis, choice in chosen.items()]
        taken = {
            x: self.setting.mesh.size(axis)
            for x, axis in letters
            if axis not in BATCH_AXES or not is_symbolic(dims.sizes.get(x))
        }
        found = self.facts.tensor_parallel(self.index, node, self.tp, tuple(taken.items()))
        if self.setting.sequence_parallel is False:
            places = (*operand_names(node), *result_names(node))
            found = [
                s
                for s in found
                if not any(map(self._along_positions, places, (*s.inputs, *s.outputs)))
            ]
        if self.lowered(
            node, dims
        ):  # a program has one lowering an op, but grouped heads go with context parallelism
            found = [s for s in found if s.lowering in ("", "grouped_heads")]
        return found

    def _fixed_conversions(
        self, node: Node, names: tuple[str, ...]
    ) -> list[tuple[int, str, str, str, int]]:
        """Changes of layout on the propagated axes that an op is the first to ask for: (operand, axis, forward, backward, bytes)."""
        found = []
        for axis, choice in self.choices.get(node.name, {}).items():
            for i, (name, want) in enumerate(zip(names, choice.inputs, strict=True)):
                have = self.fixed[name][axis]
                if have == want or (name, axis, want) in self.conversions_paid:
                    continue
                self.conversions_paid.add((name, axis, want))
                whole = self.size_bytes(
                    self.tensors[name], {a: x for a, x in self.fixed[name].items() if a != axis}
                )
                found.append((i, axis, *transition(have, want), whole))
        return found

    def _strategies(
        self,
        node: Node,
        dims: OpDims | None,
        choices: Iterable[OpStrategy],
        names: tuple[str, ...],
        outs: tuple[str, ...],
        paid: list,
    ) -> Iterator[Strategy]:
        """The strategies of an op with their prices."""
        fixed = self.choices.get(node.name, {})
        whole = [
            self.size_bytes(self.tensors[n], {a: c.inputs[i] for a, c in fixed.items()})
            for i, n in enumerate(names)
        ]
        differentiable = any(self.grads[n] for n in outs)
        grads = tuple(differentiable and self.grads[n] for n in names)
        added = tuple(grad and (node.name, i) in self.added for i, grad in enumerate(grads))
        trains = any(grad and name in self.weights for name, grad in zip(names, grads, strict=True))
        own = node, dims, names, outs, grads, added, fixed, self.shares.get(node.name)
        slower = (
            self.setting.software.deepspeed_passes and self.is_layer and node.name == self.first
        )
        more_s = self.setting.software.fitted.deepspeed_pass_s if slower else 0.0
        for choice in choices:
            read = [self.sharded(size, x) for size, x in zip(whole, choice.inputs, strict=True)]
            written = [
                self.sharded(self.bytes[n], x) for n, x in zip(outs, choice.outputs, strict=True)
            ]
            kept = self._kept(node, choice, names, outs, self.saved)
            saved, late = self._own(kept), ()
            if trains:
                gradients = (
                    Saved(f"{name}:gradient", self._held(size))
                    for name, size in zip(outs, written, strict=True)
                )
                late = (*self._late(node, saved, written), *gradients)
            priced = self.call_strategy(
                PricedCall(*own, choice, read, written, kept), paid, saved, late
            )
            yield (
                replace(
                    priced,
                    forward_s=priced.forward_s + more_s,
                    backward_s=priced.backward_s + more_s,
                )
                if more_s
                else priced
            )

    @cached_property
    def scalars_of(self) -> dict[str, int]:
        """Trained scalars of each parameter on one rank of tp and ep, under its smallest strategy; none of one that is not trained."""
        return {
            name: self._least_bytes(name) // self.itemsize(self.tensors[name]) if self.grads[name] else 0 for name in self.stored
        }  # fmt: skip

    @cached_property
    def gathered(self) -> list[int]:
        """The same of the parameters that the class does not borrow, which travel with its segments."""
        return [
            scalars
            for name, scalars in self.scalars_of.items()
            if self.facts.carries(self.index, name)
        ]


def _moves_by_segment(setting: Setting) -> bool:
    """Whether parameters come to the device whenever a segment that reads them runs forward."""
    return setting.gathers_by_segment or setting.offload == "parameters"


def _of_trained(setting: Setting) -> Setting:
    """Of a setting what `Trained` depends on."""
    return replace(setting, micro_batch=1, num_microbatches=1, recompute="none", context_method=None, sequence_parallel=None,
                   stages_per_rank=1, schedule="none", between=None)  # fmt: skip


def _run_again(op: AnnotatedOp) -> AnnotatedOp:
    return replace(op, strategies=tuple(s.rerun() for s in op.strategies))


def _least_compute(op: AnnotatedOp) -> tuple[float, float]:
    """Seconds (forward, backward) that the device computes for an op, whichever strategy is chosen."""
    return min(s.forward_s - s.forward_comm_s for s in op.strategies), min(
        s.backward_s - s.backward_comm_s for s in op.strategies
    )
