"""Costs of the parameters of one block class under any ZeRO stage: to gather, reduce, update and
hold them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import ceil, prod
from typing import NamedTuple, TypedDict

from autopar_cost_models import activation_itemsize, collective_time_s, static_bytes
from autopar_cost_models.constants import BUCKET_BYTES
from autopar_cost_models.roofline import link_time_s, offloaded_update_time_s, optimizer_time_s
from torch.fx import Node

from autopar.annotate.call_pricer import CallPricer
from autopar.annotate.local_class import LocalClass
from autopar.annotate.setting import Setting
from autopar.ir.annotated import AnnotatedOp, Strategy
from autopar.ir.sharding import RP, AxisLayout, R, S
from autopar.ops.values import operand_names, ops

Levels = Sequence[tuple[int, int]]
"""Nested groups of ranks as (size, stride), in the order in which a collective uses them."""


class Elements(NamedTuple):
    """A number of elements on one device that ZeRO may share out. `is_partial`: their gradients are
    partial over tp. `copies`: axes whose ranks hold the same elements and each own a part.
    `multiplied`: fp8 products multiply by them. `frozen_bytes`: the bytes of one element if they are
    frozen; 0 if they are trained.
    """

    numel: int
    is_partial: bool
    copies: tuple[str, ...]
    multiplied: bool
    frozen_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedCosts:
    """Costs of `Elements`, trained or frozen, that do not depend on the micro-batch or other ops.

    Seconds of one occurrence; `ParameterCosts._costs` decides which occur in each micro-batch:

    - `gather_s`: to all-gather them within a ZeRO group; 0 without ZeRO.
    - `reduce_s`: to reduce their gradients over the axes `copies`, within a ZeRO group.
    - `copies_s`: to sum the reduced gradients over ZeRO groups, on top; 0 if there is one group.
    - `partial_s`: to sum gradients over tp if they are partial; otherwise 0.
    - `update_s`: to update the elements that the rank owns.
    - `fetch_s`: to fetch parameters from the host before a pass; 0 if they are on the device.

    The bytes mean the same as in `Strategy`.
    """

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


class Costs(TypedDict):
    """Costs of trained elements, as keyword arguments of `Strategy`."""

    forward_s: float
    backward_s: float
    step_s: float
    static_bytes: int
    forward_comm_s: float
    backward_comm_s: float
    step_comm_s: float
    forward_dispatch_s: float
    backward_dispatch_s: float
    gradient_bytes: int
    optimizer_bytes: int
    host_bytes: int


TrainedByClass = dict[tuple[int, Setting], dict[Elements, TrainedCosts]]
"""The costs of trained elements by (class index, reduced setting), then by elements; see
`_of_trained`.
"""
CostsOf = Callable[[Elements, tuple[float, float], bool], Costs]
"""A function from elements, (forward, backward) seconds of compute to overlap with, and whether
backward finds them gathered, to their costs.
"""


class ParameterCosts:
    """Prices the parameters of one class. `calls` are the class's calls; `trained` is a cache that
    outlives the class.
    """

    def __init__(self, local: LocalClass, calls: CallPricer, trained: TrainedByClass) -> None:
        self.local, self.calls, self._trained_by_class = local, calls, trained
        self.numel = local.facts.numel
        self._nodes = [node for node in local.facts.graph.nodes if node.op == "get_attr"]
        # one kernel updates many parameters
        self._unlaunched = replace(local.pricing.device, launch_s=0.0, memory_curve=None)
        self._multiplied = {
            n.name
            for node in ops(local.facts.graph)
            if node.name in local.narrow
            for n in node.all_input_nodes
        }
        self.stored = {node.name: self._stored(node.name) for node in self._nodes}
        self._travels: dict[tuple[str, int, tuple[tuple[int, int], ...], int], float] = {}
        self._priced: dict[tuple, list[AnnotatedOp]] = {}

    def under(self, setting: Setting) -> list[AnnotatedOp]:
        """The priced parameters under `setting`; ZeRO and recomputation change them."""
        again = setting.recomputes(self.local.facts.block)
        key = setting.zero, setting.shard, setting.offload, again, setting.mesh
        if key not in self._priced:
            self._priced[key] = self._price(setting, again)
        return self._priced[key]

    def least_bytes(self, name: str) -> int:
        """Bytes of a parameter on one tp rank, in the smallest layout that may store it."""
        size = self.local.bytes[name]
        return min(self.local.pricing.sharded(size, layout) for layout in self.stored[name])

    @cached_property
    def scalars_of(self) -> dict[str, int]:
        """Trained scalars of each parameter on one rank of tp and ep, in its smallest layout; 0 if
        it is not trained.
        """
        facts, itemsize = self.local.facts, self.local.pricing.itemsize
        return {
            name: self.least_bytes(name) // itemsize(facts.tensors[name])
            if facts.grads[name]
            else 0
            for name in self.stored
        }

    @cached_property
    def gathered(self) -> list[int]:
        """For each parameter that the class does not borrow, in order, its trained scalars on one
        rank of tp and ep. These are gathered with the class's segments.
        """
        borrowed = self.local.facts.borrowed
        return [scalars for name, scalars in self.scalars_of.items() if name not in borrowed]

    def frozen_scalars(self, setting: Setting) -> int:
        """Scalars of the frozen parameters of the class on one rank of tp and ep, in their smallest
        layouts, if ZeRO shares them out; otherwise 0.
        """
        facts, itemsize = self.local.facts, self.local.pricing.itemsize
        if setting.frozen == "whole":
            return 0
        names = facts.place.frozen - facts.borrowed
        return sum(self.least_bytes(name) // itemsize(facts.tensors[name]) for name in names)

    # ------------------------------------------------------------------------------------------------ how they are stored

    def _stored(self, name: str) -> list[AxisLayout]:
        """The layouts over tp in which a parameter may be stored; replicated alone if tp is 1."""
        facts, tp = self.local.facts, self.local.pricing.tp
        if tp == 1:
            return [R]
        tensor = facts.tensors[name]
        shards = [S(d) for d, size in enumerate(tensor.shape) if size >= tp]
        shards += [
            S(d, pattern)
            for d, pattern in sorted(facts.patterns.get(name, ()), key=str)
            if not pattern.is_contiguous and pattern.divides(int(tensor.shape[d]), tp)
        ]
        if shards and self._stays_sharded(name):
            return shards
        return [R, RP, *shards] if facts.grads[name] else [R, *shards]

    def _stays_sharded(self, name: str) -> bool:
        """Whether the sequence-parallelism pin (Megatron's layout), on or off, keeps a parameter
        sharded over tp. It does so for matrices of products, except very small ones such as a
        router. False without the pin.
        """
        facts, tensor = self.local.facts, self.local.facts.tensors[name]
        if self.local.setting.sequence_parallel is None or tensor.dim() != 2:
            return False
        return 1000 * tensor.numel() > self.numel and any(
            node.name in facts.products | facts.heads and name in operand_names(node)
            for node in ops(facts.graph)
        )

    # ------------------------------------------------------------------------------------------------------- what they cost

    def _price(self, setting: Setting, again: bool) -> list[AnnotatedOp]:
        """The priced parameters. The communication of each over dp overlaps with a share of the
        block's compute, in proportion to its size.
        """
        facts, compute_s = self.local.facts, (0.0, 0.0)
        if setting.software.dp_overlap and self.local.pricing.overlaps:
            compute_s = self.calls.least_s(again)
        sizes = {name: facts.tensors[name].numel() for name in self.stored}
        moved = sum(sizes.values()) if setting.moves_by_segment else self.numel
        known = self._trained_by_class.setdefault((facts.place.index, _of_trained(setting)), {})

        @cache  # many parameters are of one size
        def costs(elements: Elements, beside: tuple[float, float], stays: bool) -> Costs:
            if elements not in known:
                price = self._frozen if elements.frozen_bytes else self._trained
                known[elements] = price(setting, elements)
            return self._costs(setting, known[elements], beside, stays)

        priced = []
        for node in self._nodes:
            size = sizes[node.name]
            beside = compute_s[0] * size / max(moved, 1), compute_s[1] * size / max(self.numel, 1)
            priced.append(self._op(node, setting, costs, beside))
        return priced

    def _op(
        self, node: Node, setting: Setting, costs: CostsOf, beside: tuple[float, float]
    ) -> AnnotatedOp:
        strategies = tuple(
            self._strategy(node.name, layout, setting, costs, beside)
            for layout in self.stored[node.name]
        )
        return AnnotatedOp(node.name, "parameter", str(node.target), (), (node.name,), strategies)

    def _strategy(
        self,
        name: str,
        layout: AxisLayout,
        setting: Setting,
        costs: CostsOf,
        beside: tuple[float, float],
    ) -> Strategy:
        facts, fixed = self.local.facts, self.local.fixed[name]
        borrowed, trained = name in facts.borrowed, facts.grads[name]
        if borrowed and not (trained and setting.moves_by_segment):
            return Strategy(str(layout), (), (layout,))
        tensor = facts.tensors[name]
        shape = list(tensor.shape)
        for axis, own in (*fixed.items(), ("tp", layout)):
            if own.is_shard:
                shape[own.dim] = ceil(shape[own.dim] / setting.mesh.size(axis))
        numel = prod(shape)
        itemsize = 0 if trained else self.local.pricing.itemsize(tensor)
        if not trained and (setting.frozen == "whole" or name not in facts.place.frozen):
            return Strategy(str(layout), (), (layout,), static_bytes=numel * itemsize)
        is_partial = layout == RP and self.local.pricing.tp > 1
        copies = tuple(axis for axis, own in fixed.items() if not own.is_shard)
        elements = Elements(numel, is_partial, copies, name in self._multiplied, itemsize)
        stays = setting.gathers_by_segment and name in facts.place.staying
        found = costs(elements, beside, stays)
        # it comes for each forward, and in backward is there until the first that reads it
        if borrowed:
            return Strategy(
                str(layout),
                (),
                (layout,),
                forward_s=found["forward_s"],
                forward_comm_s=found["forward_comm_s"],
            )
        return Strategy(str(layout), (), (layout,), **found)

    def _costs(
        self, setting: Setting, of: TrainedCosts, beside: tuple[float, float], stays: bool
    ) -> Costs:
        """Costs of trained elements whose communication overlaps with `beside` seconds of (forward,
        backward) compute. `stays`: backward finds them gathered.
        """
        exposed_s = self.local.pricing.exposed_s
        # gathered for each pass; a pipeline gathers once a step
        again = setting.zero == 3 and setting.mesh.pp == 1
        # whole gradients are not kept from one micro-batch to the next
        always = setting.zero >= 2 and setting.mesh.pp == 1
        forward_s = exposed_s(beside[0], of.gather_s * again)
        in_backward_s = of.gather_s * (again and not stays) + of.reduce_s * always
        backward_s = exposed_s(beside[1], in_backward_s)
        left_s, step_s = max(beside[1] - in_backward_s, 0.0), 0.0
        if not always or of.copies_s:
            step_s = exposed_s(left_s, of.reduce_s * (not always) + of.copies_s)
        step_s += 0.0 if again else exposed_s(beside[0], of.gather_s)
        step_s += of.partial_s
        # the engine copies what it gathers, and reduces gradients, one by one
        by_host = setting.software.is_own and setting.software.cuda_graphs == "none"
        each_s = setting.issue_s if by_host else 0.0
        issues = again, (again and not stays) + always
        return {
            "forward_dispatch_s": issues[0] * each_s,
            "backward_dispatch_s": issues[1] * each_s,
            "forward_s": forward_s + of.fetch_s,
            "backward_s": backward_s + of.fetch_s,
            "step_s": step_s + of.update_s,
            "static_bytes": of.static_bytes,
            "forward_comm_s": forward_s,
            "backward_comm_s": backward_s,
            "step_comm_s": step_s,
            "gradient_bytes": of.gradient_bytes,
            "optimizer_bytes": of.optimizer_bytes,
            "host_bytes": of.host_bytes,
        }

    def _trained(self, setting: Setting, elements: Elements) -> TrainedCosts:
        mesh, numel, tp = setting.mesh, elements.numel, self.local.pricing.tp
        levels = mesh.levels(elements.copies, setting.shard)
        replicas, recipe = prod(size for size, _ in levels), setting.software.state_recipe
        # a pipeline adds up whole gradients, and reduces them once a step
        zero = 1 if setting.zero == 2 and mesh.pp > 1 else setting.zero
        memory = static_bytes(numel, setting.precision, zero, replicas, recipe, setting.offload)
        whole = static_bytes(numel, setting.precision, 0, 1)
        # gradients travel as they are held, if that is less than fp32
        held = static_bytes(numel, setting.precision, 0, 1, recipe)
        sent_bytes = min(whole.gradients, held.gradients)
        bucket_bytes = BUCKET_BYTES if setting.zero < 3 else 0
        gather_s = partial_s = copies_s = 0.0
        if setting.zero:
            gather_s = self._share_s(
                setting, numel, levels, "all_gather", whole.parameters, bucket_bytes
            )
        reduce = "reduce_scatter" if setting.zero else "all_reduce"
        reduce_s = self._share_s(setting, numel, levels, reduce, sent_bytes, bucket_bytes)
        if setting.shard and "dp" in elements.copies:  # these groups hold the same parts
            groups, part_bytes = [mesh.copies(setting.shard)], ceil(sent_bytes / replicas)
            copies_s = self._share_s(setting, numel, groups, "all_reduce", part_bytes, BUCKET_BYTES)
        if elements.is_partial:
            topology = self.local.pricing.topology
            partial_s = collective_time_s(
                "all_reduce", whole.gradients, tp, mesh.stride("tp"), topology
            )
        owned = numel if setting.zero == 0 else ceil(numel / replicas)
        update_s, fetch_s = self._update_s(setting, owned)
        doubles, gradients = _copies_bytes(setting, elements, memory.gradients)
        return TrainedCosts(
            gather_s=gather_s,
            reduce_s=reduce_s,
            copies_s=copies_s,
            partial_s=partial_s,
            update_s=update_s,
            fetch_s=fetch_s,
            static_bytes=memory.parameters + doubles + gradients + memory.optimizer,
            gradient_bytes=gradients,
            optimizer_bytes=memory.optimizer,
            host_bytes=memory.host,
        )

    def _frozen(self, setting: Setting, elements: Elements) -> TrainedCosts:
        """Costs of frozen elements that ZeRO-3 shares out: they are gathered as trained ones, and
        nothing is reduced or updated.
        """
        levels = setting.mesh.levels(elements.copies, setting.shard)
        owned = ceil(elements.numel / prod(size for size, _ in levels))
        whole_bytes = elements.numel * elements.frozen_bytes
        itemsize = elements.frozen_bytes
        if setting.frozen == "sharded in fp32" and itemsize > 1:  # not of quantised weights
            itemsize = max(4, itemsize)
        own_bytes = owned * itemsize
        fetched, fetch_s = setting.offload == "parameters", 0.0
        if fetched and setting.cluster.host is not None:
            fetch_s = link_time_s(owned * elements.frozen_bytes, setting.cluster.host)
        # a pipeline gathers once a step, and keeps what it gathered
        stays = whole_bytes if setting.mesh.pp > 1 else 0
        return TrainedCosts(
            gather_s=self._share_s(setting, elements.numel, levels, "all_gather", whole_bytes, 0),
            reduce_s=0.0,
            copies_s=0.0,
            partial_s=0.0,
            update_s=0.0,
            fetch_s=fetch_s,
            static_bytes=stays + (0 if fetched else own_bytes),
            gradient_bytes=0,
            optimizer_bytes=0,
            host_bytes=own_bytes if fetched else 0,
        )

    def _update_s(self, setting: Setting, owned: int) -> tuple[float, float]:
        """(seconds to update the `owned` elements of a rank, seconds to fetch their parameters
        from the host: 0 unless the setting offloads parameters). Raises ValueError if it offloads
        and the cluster does not describe its host.
        """
        if setting.offload == "none":
            fused = setting.software.fused_optimizer
            return optimizer_time_s(owned, self._unlaunched, setting.precision, fused), 0.0
        if (host := setting.cluster.host) is None:
            raise ValueError(f"offload={setting.offload!r} needs a cluster that knows its host")
        one = static_bytes(owned, setting.precision, 0, 1, setting.software.state_recipe)
        back = setting.offload == "optimizer"
        update_s = offloaded_update_time_s(
            owned, host, setting.precision, one.gradients, one.parameters * back
        )
        # before every pass, and before the gather
        return update_s, 0.0 if back else link_time_s(one.parameters, host)

    def _share_s(
        self,
        setting: Setting,
        numel: int,
        levels: Levels,
        collective: str,
        size_bytes: int,
        bucket_bytes: int,
    ) -> float:
        """The part of a collective's seconds that `numel` parameters pay, for their `size_bytes`.
        The parameters of a block travel together; below ZeRO-3 gradients also travel in buckets. 0
        for one rank.
        """
        if not levels or not size_bytes:
            return 0.0
        block = size_bytes * self.numel // (numel * self.local.pricing.tp)
        together = max(block, size_bytes, bucket_bytes)
        interfaces = setting.software.sharded_interfaces if setting.zero == 3 else 0
        travel_s = self._travel_s(collective, together, tuple(levels), interfaces)
        return travel_s * size_bytes / together

    def _travel_s(
        self, collective: str, size_bytes: int, levels: tuple[tuple[int, int], ...], interfaces: int
    ) -> float:
        """Seconds of a collective over nested groups, with `interfaces` network interfaces of a
        node (0: all of them).

        For a reduction, each group gets only what the group before has scattered. A gather runs in
        the opposite order.
        """
        key = collective, size_bytes, levels, interfaces
        if key not in self._travels:
            topology = self.local.pricing.topology
            if interfaces:
                topology = replace(topology, nics_per_node=interfaces)
            found_s, left = 0.0, size_bytes
            for ranks, stride in levels:
                found_s += collective_time_s(collective, left, ranks, stride, topology)
                left = left if collective == "all_reduce" else ceil(left / ranks)
            self._travels[key] = found_s
        return self._travels[key]


def _copies_bytes(setting: Setting, elements: Elements, gradient: int) -> tuple[int, int]:
    """(bytes of copies of a trained parameter besides its state, bytes of its gradient).

    fp8 weight copies count as copies. FSDP in a pipeline gathers once and reduces once a step, so
    the gathered parameter stays, and its whole fp32 gradient replaces the `gradient` share.
    """
    found = 2 * elements.numel if setting.software.fp8_weight_copies and elements.multiplied else 0
    if setting.zero == 3 and setting.mesh.pp > 1:
        found += activation_itemsize(setting.precision) * elements.numel
        gradient = 4 * elements.numel
    return found, gradient


def _of_trained(setting: Setting) -> Setting:
    """The setting reduced to the fields on which `TrainedCosts` depends."""
    return replace(
        setting,
        micro_batch=1,
        num_microbatches=1,
        recompute="none",
        context_method=None,
        sequence_parallel=None,
        stages_per_rank=1,
        schedule="none",
        between=None,
        stage_sizes=(),
    )
