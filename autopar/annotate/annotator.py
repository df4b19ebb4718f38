"""Annotate: price every strategy and every layout conversion of a traced model for one candidate mesh.

The axes dp, ep and cp are already decided (`propagate`); the tp axis is what the solver decides.  All costs are those of one device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache

from autopar_cost_models import (
    Topology,
    all_gather_time_s,
    neighbour_traffic,
    point_to_point_time_s,
)
from torch.fx import Node

from autopar.annotate.buffers import buffer_bytes, gathered_bytes, gathered_row_bytes
from autopar.annotate.class_facts import ModelFacts
from autopar.annotate.class_pricer import ClassPricer
from autopar.annotate.context_method import choose_method
from autopar.annotate.local_class import local_class
from autopar.annotate.parameter_costs import TrainedByClass
from autopar.annotate.propagate import ContextSetting, propagate
from autopar.annotate.setting import AxisChoices, Setting
from autopar.annotate.transfers import PARTS_OF_VALUES, Pricing
from autopar.errors import AutoparError
from autopar.ir.annotated import AnnotatedModel, BoundaryEdge, PipelineSetting, Saved
from autopar.ir.calls import is_attention
from autopar.ir.mesh import MeshShape
from autopar.ir.plan_checks import SELECTIVE_MODES
from autopar.ir.plan_fields import AxisChoice
from autopar.ir.sharding import AxisLayout, Pattern, R, transition
from autopar.ir.stop import check_time
from autopar.ir.traced import PreparedModel, per_model
from autopar.ops.dims import Call, OpDims, is_symbolic
from autopar.ops.strategies import fits
from autopar.ops.values import operand_names, ops, output_nodes, result_names
from autopar.request.pins import CONTEXT_METHODS

_MESSAGE_BYTES = 2**26
"""A message large enough to have the full bandwidth of its link."""


class Annotator:
    """Prices one traced model under many settings. Whatever does not depend on the setting is
    computed once.
    """

    def __init__(self, traced: PreparedModel) -> None:
        self.traced, self.facts = traced, ModelFacts(traced)
        self._propagated: dict[tuple, AxisChoices] = {}
        self._context = cache(self.context)
        self._rows_alike: dict[int, bool] = {}
        self._trained: TrainedByClass = {}
        self._priced: dict[Setting, tuple[list[ClassPricer], tuple[BoundaryEdge, ...]]] = {}

    def axis_choices(self, setting: Setting) -> AxisChoices:
        """For each class, op -> axis -> its choice, on those of dp, ep and cp that have more than
        one rank. On dp they depend only on whether dp exceeds 1.
        """
        mesh = setting.mesh
        context = self._context(_of_calls(setting, setting.mesh, "none")) if mesh.cp > 1 else None
        key = (mesh.size("dp") > 1, mesh.ep, context)
        if key not in self._propagated:
            self._propagated[key] = propagate(
                self.traced,
                self.facts.reach,
                mesh.size("dp"),
                mesh.ep,
                context,
                self.facts.positions,
            )
        return self._propagated[key]

    def context(self, setting: Setting) -> ContextSetting:
        """The context-parallel setting: whether positions are balanced (zigzag), and the method of
        every attention op. Raises AutoparError if the pinned method is not possible for one.
        """
        mesh, calls = setting.mesh, []
        for index, block in enumerate(self.traced.classes):
            for node in ops(block.graph):
                dims = self.facts.reach.dims[index][node.name]
                if is_attention(node) and dims is not None and "s" in dims.letters:
                    calls.append((index, node, dims))
        zigzag = any(Call(node).arg("is_causal", False) for _, node, _ in calls) and all(
            size % (2 * mesh.cp) == 0
            for _, node, _ in calls
            for size in (Call(node).tensors[0].shape[-2], Call(node).tensors[1].shape[-2])
        )
        methods, pricing = [], Pricing(setting)
        for index, node, dims in calls:
            legal = _legal_methods(node, dims, mesh, Pattern(zigzag=zigzag))
            wanted = setting.context_method
            if wanted is not None and wanted not in legal:
                heads, positions = Call(node).tensors[0].shape[1:3]
                where = self.traced.classes[index].name
                raise AutoparError(
                    f"context_method={wanted} is not possible over {mesh}: {node.name} of {where} has {heads} heads "
                    f"and {positions} positions; {' and '.join(legal)} would do (ulysses wants tp x cp to divide the heads)"
                )
            if wanted is None:
                attention = pricing.context_attention(
                    node, dims, zigzag, self.facts.classes[index].mask_of(node)
                )
                wanted = choose_method(attention, legal, mesh, setting.cluster)
            methods.append((index, node.name, wanted))
        return ContextSetting(mesh.cp, zigzag, tuple(methods))

    def annotate(self, setting: Setting) -> AnnotatedModel:
        """The model priced under `setting`. Ops and edges are priced once per mesh and micro-batch;
        ZeRO changes only the costs of parameters.
        """
        alike = self.alike(setting)
        pricers, edges = self._priced_alike(alike, self.axis_choices(alike))
        gathered = gathered_bytes(setting, pricers, self.facts)
        blocks = (
            replace(block, workspace_bytes=block.workspace_bytes + more) if more else block
            for block, more in zip((p.block(setting) for p in pricers), gathered, strict=True)
        )
        return AnnotatedModel(
            tuple(blocks),
            edges,
            self.facts.ties,
            setting.num_microbatches,
            fixed_bytes=buffer_bytes(setting, pricers, self.facts)
            + gathered_row_bytes(self.traced, setting),
            pipeline=self._pipeline(setting) if setting.mesh.pp > 1 else None,
            last=self.facts.last,
            segments=self.facts.segments,
            reads=self.facts.reads,
            shared=self.facts.shared,
        )

    def _priced_alike(
        self, alike: Setting, choices: AxisChoices
    ) -> tuple[list[ClassPricer], tuple[BoundaryEdge, ...]]:
        """(pricers of all classes, edges between classes) for a setting that `alike` has returned.
        They are computed once for each such setting.
        """
        if alike not in self._priced:
            plain: Sequence[ClassPricer | None] = [None] * len(self.facts.classes)
            edges = None
            if alike.recompute != "none":
                plain, edges = self._priced_alike(replace(alike, recompute="none"), choices)
            pricers = []
            for index, before in enumerate(plain):
                check_time()
                local = local_class(self.facts, index, alike, choices)
                pricers.append(ClassPricer(local, self._trained, before))
            self._keep_common(pricers)
            self._priced[alike] = pricers, edges or self._edges(alike, choices, pricers)
        return self._priced[alike]

    def _keep_common(self, pricers: list[ClassPricer]) -> None:
        """Change the pricers so that the last segment keeps the values that many segments share,
        and a micro-batch holds each once.

        In a pipeline, other stages hold them among the values that they send. When backward reaches
        earlier segments, the last segment has freed everything but these values.
        """
        sizes: dict[tuple[int, int], int] = {}
        for pricer in pricers:
            for name, source in pricer.local.common.items():
                sizes[source] = max(sizes.get(source, 0), *pricer.common_bytes[name].values())
        if self.facts.last is None or not sizes:
            return
        kept = tuple(
            Saved(f"output {k} of segment {segment}", size)
            for (segment, k), size in sorted(sizes.items())
        )
        last = pricers[self.facts.last]
        last.inputs[0] = replace(
            last.inputs[0],
            strategies=tuple(
                replace(s, saved=(*s.saved, *kept)) for s in last.inputs[0].strategies
            ),
        )
        for pricer in pricers:
            if pricer is not last:
                pricer.staying_bytes = sum(sizes.values())

    def alike(self, setting: Setting) -> Setting:
        """A representative of all settings under which calls and edges cost the same as under
        `setting`.
        """
        return _of_calls(
            setting,
            self._alike(setting),
            setting.recompute if setting.recompute in SELECTIVE_MODES else "none",
        )

    def _alike(self, setting: Setting) -> MeshShape:
        """A mesh over which calls cost the same as over the mesh of `setting`.

        Where dp shards every value with a batch dim, the number of dp ranks does not change a
        rank's share of a micro-batch. Groups must have the same strides in both meshes. Parameters
        are priced for each mesh separately.
        """
        whole, mesh = setting.mesh, replace(setting.mesh, pp=1, dp=max(2 * setting.mesh.ep, 2))
        choices = self.axis_choices(replace(setting, mesh=mesh))
        if id(choices) not in self._rows_alike:
            self._rows_alike[id(choices)] = all(
                map(self._sharded_by_rows, range(len(self.traced.classes)), choices)
            )
        if self._rows_alike[id(choices)] and _lie_alike(mesh, whole, ("ep", "cp", "tp")):
            return mesh
        return flat if _lie_alike(flat := replace(whole, pp=1), whole, whole.active) else whole

    def _sharded_by_rows(self, index: int, choices: dict[str, dict[str, AxisChoice]]) -> bool:
        """Whether dp shards every value of the class `index` whose size depends on the batch. A
        layout change in between is allowed only if its price does not depend on the number of
        ranks, or if it is sent over dp (`CallPricer.over_dp`).
        """
        have: dict[str, AxisLayout] = {}
        for node in self.traced.classes[index].graph.nodes:
            choice = choices.get(node.name, {}).get("dp")
            for k, name in enumerate(
                result_names(node) if node.op == "call_function" else (node.name,)
            ):
                have[name] = (
                    choice.outputs[k] if choice is not None and k < len(choice.outputs) else R
                )
        follows = {
            name
            for name, t in self.facts.classes[index].tensors.items()
            if any(map(is_symbolic, t.shape))
        }
        if any(not have[name].is_shard for name in follows):
            return False
        calls = [
            (node, choices[node.name]["dp"])
            for node in ops(self.traced.classes[index].graph)
            if "dp" in choices.get(node.name, {})
        ]
        return all(
            have[name] == want
            or (name not in follows and not {*PARTS_OF_VALUES} & {*transition(have[name], want)})
            for node, choice in calls
            for name, want in zip(operand_names(node), choice.inputs, strict=True)
        )

    def _pipeline(self, setting: Setting) -> PipelineSetting:
        mesh, topology, between = setting.mesh, setting.cluster.topology, setting.between
        # ranks of the pipeline on this kind of devices
        here = mesh.pp if between is None else topology.num_devices // mesh.stride("pp")
        traffic = neighbour_traffic(here, mesh.stride("pp"), topology)

        def hop_s(size_bytes: float) -> float:
            own_s = point_to_point_time_s(size_bytes, here, mesh.stride("pp"), topology, traffic)
            return (
                own_s
                if between is None
                else max(
                    own_s, point_to_point_time_s(size_bytes, 2, 1, Topology(1, 2, between, between))
                )
            )

        def message_s(size_bytes: int) -> float:
            """Seconds of one message of `size_bytes` between pipeline ranks. If every tp rank has
            the whole value and the software scatters messages, each sends one part and the
            receivers all-gather it.
            """
            if (
                mesh.tp == 1
                or setting.sequence_parallel is not False
                or not setting.software.scatters_messages
            ):
                return hop_s(size_bytes)
            return hop_s(size_bytes / mesh.tp) + all_gather_time_s(
                size_bytes, mesh.tp, mesh.stride("tp"), topology
            )

        none_s, much_s = message_s(0), message_s(_MESSAGE_BYTES)
        return PipelineSetting(
            mesh.pp,
            setting.stages_per_rank,
            setting.schedule,
            (much_s - none_s) / _MESSAGE_BYTES,
            none_s,
            setting.software.keeps_stage_outputs,
            setting.stage_sizes,
            setting.host_slowdown,
        )

    def _edges(
        self, setting: Setting, choices: AxisChoices, pricers: list[ClassPricer]
    ) -> tuple[BoundaryEdge, ...]:
        """One edge for each output of a class that feeds an input of another class. It has the
        number of times that it does so, and the prices of its layout conversions over tp.
        """
        multiplicity: Counter = Counter()
        for segment in self.traced.segments:
            for position, source in enumerate(segment.inputs):
                if source.segment >= 0:
                    multiplicity[
                        self.traced.segments[source.segment].class_index,
                        source.index,
                        segment.class_index,
                        position,
                    ] += 1
        edges = []
        for (source, output, target, position), count in sorted(multiplicity.items()):
            node = output_nodes(self.traced.classes[source].graph)[output]
            have = {s.inputs[0] for s in pricers[source].outputs[output].strategies}
            want = {s.outputs[0] for s in pricers[target].inputs[position].strategies}
            pricer = Pricing(setting)
            size = pricer.size_bytes(
                node.meta["val"],
                {a: c.inputs[0] for a, c in choices[source].get(f"output{output}", {}).items()},
            )
            edges.append(
                BoundaryEdge(
                    source,
                    output,
                    target,
                    position,
                    count,
                    pricer.conversions(size, have, want, bool(node.meta.get("grad"))),
                )
            )
        return tuple(edges)


@per_model(4)
def annotator_of(traced: PreparedModel) -> Annotator:
    """The annotator of a traced model. The most recent four are cached, so that plans of one model
    share work that does not depend on the cluster.
    """
    return Annotator(traced)


def _of_calls(setting: Setting, mesh: MeshShape, recompute: str) -> Setting:
    """The setting reduced to the fields on which prices of calls depend, with this mesh and
    recompute mode.
    """
    return replace(
        setting,
        mesh=mesh,
        zero=0,
        recompute=recompute,
        num_microbatches=1,
        stages_per_rank=1,
        schedule="none",
        offload="none",
        between=None,
        shard=0,
        stage_sizes=(),
    )


def _lie_alike(one: MeshShape, other: MeshShape, axes: Iterable[str]) -> bool:
    """Whether groups over each of these axes have the same stride between ranks in both meshes.
    Axes of size 1 in `other` do not count.
    """
    return all(one.stride(axis) == other.stride(axis) for axis in axes if other.size(axis) > 1)


def _legal_methods(node: Node, dims: OpDims, mesh: MeshShape, pattern: Pattern) -> tuple[str, ...]:
    q = Call(node).tensors[0]
    found = ["gather"] if fits(dims, "s", pattern, mesh.cp, mesh.cp) else []
    if "ring" in dims.joint and int(dims.joint["ring"].size) >= mesh.cp:
        found.append("ring")
    if "ulysses" in dims.joint and int(q.shape[1]) % (mesh.tp * mesh.cp) == 0:
        found.append("ulysses")
    return tuple(method for method in CONTEXT_METHODS if method in found) or ("gather",)
