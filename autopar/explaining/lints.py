"""Lints: warnings about a plan, with numbers and a remedy.

A lint is a function of a plan, its cluster and in some cases the traced model. It yields findings.
A finding is not an error: the planner knew all of this when it chose the plan, and the remedy may
cost more than it gains. `why-not` and `compare` show that.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, log2, prod

from autopar_cost_models.topology import group_shape

from autopar.annotate.kernels import MatrixProduct, kernels_of, product_of
from autopar.ir.cluster import Cluster, ClusterSpec
from autopar.ir.plan import Plan
from autopar.ir.plan_fields import BlockPlan
from autopar.ir.sharding import AxisLayout
from autopar.ir.traced import BlockClass, PreparedModel
from autopar.ops.dims import at_batch, is_symbolic
from autopar.ops.reach import parameter_readers
from autopar.ops.rules import op_dims
from autopar.ops.values import operand_names, ops, result_names, value_grads, value_tensors
from autopar.ops.work import tokens_per_row
from autopar.request.software import Software
from autopar.text.device_words import fullest_rank, groups_by_rank
from autopar.text.layout_words import describe, is_attention_name
from autopar.text.units import gib, ms, percent

BUBBLE = 0.10
"""Fraction of a step that a pipeline may idle without a finding."""
_HEADROOM = 0.03
"""Fraction of memory that should stay free, because fragmentation may exceed the prediction."""
FILLED = 0.90
"""Fraction of the matmul rate of a large micro-batch that the plan's products should reach."""
_WAITS = 0.02
"""Fraction of a step that devices may wait for the host without a finding."""
_LARGE_TOKENS = 2**20
"""Tokens of a micro-batch that is large enough for products to run at their best rate."""


@dataclass(frozen=True, slots=True)
class LintFinding:
    """A warning about a plan: the name of the lint, a text, a change that would remove it, and the
    numbers of the text in SI units.
    """

    lint: str
    text: str
    remedy: str
    numbers: dict[str, float]

    def __str__(self) -> str:
        return f"{self.text}.  {self.remedy}."


def lint(plan: Plan, cluster: Cluster, traced: PreparedModel | None = None) -> list[LintFinding]:
    """All warnings (`LintFinding`) on a plan for a cluster; [] if there is nothing to warn of. `traced`
    is the model after `model_facts.as_planned`. Without it, only findings that need no model are
    returned.
    """
    groups = tuple(dict.fromkeys(groups_by_rank(plan, cluster)))
    found = [
        finding for group in groups for finding in _named(_across_nodes(plan, group), group, groups)
    ]
    found += [*_bubble(plan), *_headroom(plan, cluster), *_host_bound(plan)]
    if traced is not None:
        found += [*_uneven_shards(plan, traced), *_whole_heads(plan, traced), *_ties(plan, traced)]
        for group in groups:
            found += _named(_small_products(plan, group, traced), group, groups)
    return found


def _named(
    findings: Iterable[LintFinding], group: ClusterSpec, groups: Sequence[ClusterSpec]
) -> Iterator[LintFinding]:
    """The findings on a group of devices. If there are several groups, each text begins with the
    group's device.
    """
    yield from (
        findings
        if len(groups) == 1
        else (replace(f, text=f"on {group.device.name}, {f.text}") for f in findings)
    )


def _across_nodes(plan: Plan, group: ClusterSpec) -> Iterator[LintFinding]:
    """A finding if tensor-parallel ranks lie on several nodes of a group of devices; otherwise
    nothing.
    """
    tp, topology = plan.mesh.tp, group.topology
    here, nodes = group_shape(tp, plan.mesh.stride("tp"), topology)
    if nodes == 1:
        return
    inside, between = (
        topology.intra.achieved_Bps,
        topology.group_inter_Bps(here) / here,
    )  # of a device
    parts = plan.predicted.breakdown
    sent_s = parts.get("conversion", 0.0) + parts.get("edge", 0.0)
    share = (
        f", and its communication takes {percent(sent_s / plan.predicted.step_time_s)} of the step"
        if sent_s
        else ""
    )
    per_node = topology.devices_per_node
    yield LintFinding(
        "tensor parallelism across nodes",
        f"tp={tp} spans {nodes} nodes of {per_node}: a device has {between / 1e9:.3g} GB/s between nodes and {inside / 1e9:.3g} GB/s "
        f"inside{share}",
        f"Keep tp to a divisor of {per_node} and use pp, cp or dp between nodes",
        {
            "tp": tp,
            "nodes": nodes,
            "intra_Bps": inside,
            "inter_Bps": between,
            "communication_s": sent_s,
        },
    )


def _bubble(plan: Plan) -> Iterator[LintFinding]:
    """A finding if a pipeline idles more than `BUBBLE` of a step; otherwise nothing. Its remedy has
    the number of micro-batches that would suffice. The bubble's seconds hardly depend on that
    number; all other time is proportional to it.
    """
    bubble_s, step_s = plan.predicted.breakdown.get("bubble", 0.0), plan.predicted.step_time_s
    if bubble_s <= BUBBLE * step_s:
        return
    mesh, m = plan.mesh, plan.num_microbatches
    enough = ceil((1 - BUBBLE) / BUBBLE * bubble_s * m / (step_s - bubble_s))
    can_deal = sum(map(len, plan.stages)) >= len(plan.stages) + mesh.pp
    fewer = "more stages a rank (vpp), or less pp" if can_deal else "less pp"
    yield LintFinding(
        "bubble",
        f"the pipeline idles {percent(bubble_s / step_s)} of the step ({ms(bubble_s)}) with {m} micro-batches on pp={mesh.pp}",
        f"About {enough} micro-batches bring it to {percent(BUBBLE)}: {_more_micro_batches(plan, enough)}; or {fewer}",
        {
            "bubble_s": bubble_s,
            "step_s": step_s,
            "num_microbatches": m,
            "enough_microbatches": enough,
        },
    )


def _more_micro_batches(plan: Plan, enough: int) -> str:
    """What gives each rank `enough` micro-batches."""
    ways = [f"a global batch of {enough * plan.micro_batch * plan.mesh.dp}"]
    ways += ["a smaller micro_batch"] if plan.micro_batch > 1 else []
    ways += ["less dp"] if plan.mesh.dp > 1 else []
    return " or ".join(filter(None, (", ".join(ways[:-1]), ways[-1])))


def _headroom(plan: Plan, cluster: Cluster) -> Iterator[LintFinding]:
    """A finding if at most the fraction `_HEADROOM` of the fullest device's memory is predicted to
    stay free; otherwise nothing.
    """
    peak, capacity = fullest_rank(plan, cluster)
    if peak < (1 - _HEADROOM) * capacity:
        return
    yield LintFinding(
        "memory",
        f"the fullest device is predicted to hold {gib(peak)} of {gib(capacity)}: {percent(1 - peak / capacity)} is left, which "
        "fragmentation may take",
        "A smaller micro_batch, recompute, a higher ZeRO stage or more tp leave more room",
        {"peak_bytes": peak, "capacity_bytes": capacity},
    )


def _planned(plan: Plan, traced: PreparedModel) -> Iterator[tuple[BlockPlan, BlockClass, int]]:
    """(block plan, block class, number of segments) for every block whose class the model has."""
    classes = {block.name: block for block in traced.classes}
    for own in plan.blocks:
        if own.name in classes:
            yield own, classes[own.name], len(own.segments)


def _uneven_shards(plan: Plan, traced: PreparedModel) -> Iterator[LintFinding]:
    """One finding for each (size, axis) where the axis does not divide a dim of that size of some
    result, which is cut into contiguous ranges. Every rank then takes as long as the rank with the
    largest shard.
    """
    found: dict[tuple[int, str], dict[str, None]] = {}
    for own, block, _ in _planned(plan, traced):
        tensors = value_tensors(block.graph)
        for node in block.graph.nodes:
            results = [tensors[name] for name in result_names(node) if name in tensors]
            for axis, choice in own.ops.get(node.name, {}).items():
                # a getitem names a result of another node
                for layout, tensor in zip(choice.outputs, results, strict=False):
                    size = (
                        tensor.shape[layout.dim]
                        if layout.is_shard and layout.pattern.is_contiguous
                        else 0
                    )
                    if not is_symbolic(size) and int(size) % plan.mesh.size(axis):
                        found.setdefault((int(size), axis), {})[node.name] = None
    for (size, axis), names in found.items():
        ranks = plan.mesh.size(axis)
        largest, more = ceil(size / ranks), len(names) - 3
        yield LintFinding(
            "uneven shards",
            f"{size} elements over {axis}={ranks} are shards of up to {largest}, {percent(largest * ranks / size - 1)} more than an even "
            f"share: {', '.join(list(names)[:3])}{f' and {more} more' if more > 0 else ''}",
            f"Pad {size} to {largest * ranks}, or use a degree that divides it",
            {"size": size, "ranks": ranks, "largest": largest, "padded": largest * ranks},
        )


def _whole_heads(plan: Plan, traced: PreparedModel) -> Iterator[LintFinding]:
    """One finding for each attention op whose heads tp does not divide, so that it is sharded
    otherwise.
    """
    tp = plan.mesh.tp
    for own, block, count in _planned(plan, traced):
        tensors = value_tensors(block.graph)
        for node in ops(block.graph):
            choice = own.ops.get(node.name, {}).get("tp")
            if choice is None or not is_attention_name(node.name):
                continue
            query = tensors.get(operand_names(node)[0])
            heads = query.shape[-3] if query is not None and query.dim() > 2 else tp
            if not is_symbolic(heads) and int(heads) % tp:
                yield LintFinding(
                    "indivisible heads",
                    f"tp={tp} does not divide the {heads} heads of {node.name} in {block.name} (x{count}), which runs "
                    f"{describe(node.name, choice)} instead",
                    f"Use a tp that divides {heads}",
                    {"heads": int(heads), "tp": tp, "segments": count},
                )


def _ties(plan: Plan, traced: PreparedModel) -> Iterator[LintFinding]:
    """One finding for each parameter that several pipeline ranks hold, because layers of different
    stages share it.
    """
    rank_of = {
        name: number % plan.mesh.pp for number, stage in enumerate(plan.stages) for name in stage
    }
    for name, readers in parameter_readers(traced).items():
        places = {(traced.segments[number].class_index, node) for number, node in readers}
        ranks = {rank_of.get(traced.segments[number].name, 0) for number, _ in readers}
        # alike: copies of one traced layer (`trace/deepen.py`)
        if len(places) < 2 or len(ranks) < 2 or name not in traced.parameters:
            continue
        spec = traced.parameters[name]
        scalars = prod(spec.shape)
        yield LintFinding(
            "tied weights",
            f"{' = '.join((name, *spec.aliases))} is held by pipeline ranks {', '.join(map(str, sorted(ranks)))}: {scalars:,} parameters, "
            f"with gradient and optimizer state, are there {len(ranks)} times, and their gradient is reduced between these ranks each step",
            "Untie them, or use pp=1",
            {"parameters": scalars, "ranks": len(ranks)},
        )


def _small_products(
    plan: Plan, cluster: ClusterSpec, traced: PreparedModel
) -> Iterator[LintFinding]:
    """A finding if the matrix products of a forward reach less than `FILLED` of the rate of a very
    large micro-batch, by the cost model; otherwise nothing. Its remedy names a micro-batch that is
    large enough. `cluster` is one group of devices.
    """
    large = max(_LARGE_TOKENS // tokens_per_row(traced), plan.micro_batch)
    rate, best = _rate(plan, cluster, traced, plan.micro_batch), _rate(plan, cluster, traced, large)
    if rate >= FILLED * best:
        return
    sequences = plan.global_batch // plan.mesh.dp
    doublings = ceil(log2(large / plan.micro_batch))

    def is_enough(times: int) -> bool:
        return _rate(plan, cluster, traced, plan.micro_batch << times) >= FILLED * best

    # a larger micro-batch fills products at least as well
    enough = plan.micro_batch << bisect_left(range(doublings), True, lo=1, key=is_enough)
    remedy = f"micro_batch={enough} reaches {percent(FILLED)} of that, if memory allows"
    if enough > sequences:
        remedy += f"; a data-parallel rank has {sequences} sequences a step, so that it takes a larger global batch or less dp too"
    yield LintFinding(
        "small micro-batch",
        f"with micro-batch {plan.micro_batch} the matrix products of a forward run at {rate / 1e12:.3g} TFLOP/s a device, "
        f"{percent(rate / best)} of what a very large one reaches",
        remedy,
        {
            "flops_per_s": rate,
            "large_flops_per_s": best,
            "micro_batch": plan.micro_batch,
            "enough": enough,
        },
    )


def _host_bound(plan: Plan) -> Iterator[LintFinding]:
    """A finding if devices wait for the host; otherwise nothing."""
    waits_s, step_s = plan.predicted.breakdown.get("host", 0.0), plan.predicted.step_time_s
    if waits_s < _WAITS * step_s:
        return
    yield LintFinding(
        "host-bound",
        f"devices wait {ms(waits_s)} of {ms(step_s)} a step for the host, which takes longer to issue the kernels of a micro-batch "
        "than they to run them",
        "Use CUDA graphs, or a larger micro-batch"
        if Software.from_data(plan.made_for.software).compiled
        else "Unless it is compiled, compile the model (`parallelize(..., compile=True)`), or use a larger micro-batch",
        {"waiting_s": waits_s, "step_s": step_s},
    )


def _rate(plan: Plan, cluster: ClusterSpec, traced: PreparedModel, micro_batch: int) -> float:
    """FLOP/s of a device in the products with parameters of a forward, by the cost model, with
    `micro_batch` sequences per rank. 0 if there are none.
    """
    kernels = kernels_of(cluster.device, plan.precision, Software())
    flops, seconds = 0.0, 0.0
    for own, block, count in _planned(plan, traced):
        for product in _products(plan, own, block, micro_batch * plan.mesh.dp):
            flops += count * 2.0 * product.batch * product.m * product.n * product.k
            seconds += count * kernels.product(product).forward_s
    return flops / seconds if seconds else 0.0


def _products(plan: Plan, own: BlockPlan, block: BlockClass, rows: int) -> Iterator[MatrixProduct]:
    """The matrix products with parameters that one rank computes in a forward of one segment, with
    their sharded sizes. Ops with a FLOP count of their own, such as convolutions and experts, are
    left out. `rows` is the batch of all ranks. `own` is the plan of `block`.
    """
    tensors, grads = value_tensors(block.graph), value_grads(block.graph)
    weights = {node.name for node in block.graph.nodes if node.op == "get_attr"}
    for node in ops(block.graph):
        dims, names = op_dims(node), operand_names(node)
        if (
            dims is None
            or not dims.contraction
            or dims.flops is not None
            or not weights & set(names)
        ):
            continue  # an op with a count of its own is no plain product: convolutions, experts
        layouts = [
            {axis: choice.inputs[i] for axis, choice in own.ops.get(node.name, {}).items()}
            for i in range(len(names))
        ]
        shapes = [
            _local(plan, [at_batch(size, rows) for size in tensors[name].shape], layout)
            for name, layout in zip(names, layouts, strict=True)
        ]
        product = product_of(
            dims,
            shapes,
            [grads[name] for name in names],
            [name in weights for name in names],
            fp8=False,
        )
        if product is not None:
            yield product


def _local(plan: Plan, shape: list[int], layouts: dict[str, AxisLayout]) -> tuple[int, ...]:
    for axis, layout in layouts.items():
        if layout.is_shard:
            shape[layout.dim] = ceil(shape[layout.dim] / plan.mesh.size(axis))
    return tuple(shape)
