"""A plan's choices as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby, pairwise
from math import nan
from typing import Any

from autopar_cost_models import COST_MODEL_VERSION, Topology, group_shape

from autopar.errors import AutoparError, shown
from autopar.ir.cluster import Cluster, ClusterSpec, plain_data
from autopar.ir.mesh import MeshShape, mesh_words
from autopar.ir.plan import Plan

OFFLOAD_WORDS = {"optimizer": "optimizer state", "parameters": "parameters and optimizer state"}
"""What each kind of offloading keeps in host memory, as text."""

_NOT_HASHED = ("name", "source", "headroom")
"""Ends of the keys of figures of a cluster that do not tell plans apart."""

PlanOn = Callable[[Mapping[str, Any], Cluster], Plan]
"""The type of a function that plans one model under pins on a cluster. It raises AutoparError like
`api.plan`.
"""


def layout_words(plan: Plan) -> str:
    """One line that identifies a plan by mesh, batch, schedule, ZeRO, recomputation and offload:
    `dp=16 tp=8, 8 x 4 sequences, ZeRO-1, recompute full`. What is off is left out.
    """
    batch = f"{plan.num_microbatches} x {plan.micro_batch} sequences"
    words = [str(plan.mesh), batch, *_schedule_words(plan)]
    words += [f"recompute {plan.recompute}"] if plan.recompute != "none" else []
    words += [f"{plan.offload} offloaded"] if plan.offload != "none" else []
    return ", ".join(words)


def short_words(plan: Plan) -> str:
    """`layout_words` in short form, for a table: `dp=16 tp=8 8x4 ZeRO-1 full`."""
    words = [str(plan.mesh), f"{plan.num_microbatches}x{plan.micro_batch}", *_schedule_words(plan)]
    words += [plan.recompute] if plan.recompute != "none" else []
    words += [f"offload {plan.offload}"] if plan.offload != "none" else []
    return " ".join(words)


def choice_words(entry: Mapping[str, Any]) -> str:
    """A solved candidate of a certificate in the form of `short_words`."""
    words = [mesh_words(entry["mesh"]), f"{entry['num_microbatches']}x{entry['micro_batch']}"]
    if entry["mesh"]["pp"] > 1:
        per_rank = entry["stages_per_rank"]
        words.append(entry["schedule"] + (f" x{per_rank}" if per_rank > 1 else ""))
    words += [f"ZeRO-{sharing_words(entry['zero'], entry['shard'])}"] if entry["zero"] else []
    return " ".join([*words, *([entry["recompute"]] if entry["recompute"] != "none" else [])])


def sharing_words(zero: int, shard: int) -> str:
    """The ZeRO stage as text: `3`, or `3 over 8` if ZeRO shards within groups of 8 ranks. A `shard`
    of 0 means all ranks.
    """
    return f"{zero} over {shard}" if shard else str(zero)


def _schedule_words(plan: Plan) -> list[str]:
    """Up to two words: the schedule with the number of stages of a rank if above 1 (only in a
    pipeline), and the ZeRO stage (unless 0).
    """
    per_rank = len(plan.stages) // plan.mesh.pp
    schedule = plan.schedule + (f" x{per_rank}" if per_rank > 1 else "")
    words = [schedule] if plan.mesh.pp > 1 else []
    return words + ([f"ZeRO-{sharing_words(plan.zero, plan.shard)}"] if plan.zero else [])


def staleness(plan: Plan) -> str:
    """A warning text if the plan was predicted by another version of the cost model, otherwise ''.
    Such a plan still runs; only its predictions are outdated.
    """
    if plan.cost_model_version == COST_MODEL_VERSION:
        return ""
    return (
        f"predicted by cost model {plan.cost_model_version}, while this autopar has version {COST_MODEL_VERSION}: the plan runs, but its "
        "times and memory are stale; plan again for new ones"
    )


def dollars_per_million_tokens(plan: Plan, cluster: Cluster | None) -> float | None:
    """Dollars per million tokens of the plan. None without a cluster or if its price is unknown;
    NaN if the plan predicts no rate.
    """
    price = None if cluster is None else cluster.price_per_device_hour
    return None if price is None else device_hours_per_million_tokens(plan) * price


def device_hours_per_million_tokens(plan: Plan) -> float:
    """Device-hours per million tokens; NaN if the plan predicts no rate."""
    return plan.mesh.num_devices / (plan.predicted.tokens_per_s or nan) * 1e6 / 3600


TIME_WORDS = {
    "forward": "forward compute",
    "backward": "backward compute",
    "recompute": "recompute (second forward)",
    "conversion": "tensor-parallel communication in blocks",
    "edge": "tensor-parallel communication between blocks",
    "stages": "stages of the slowest pipeline rank",
    "bubble": "pipeline bubble and messages",
    "step": "gradient reduction and optimizer",
    "fixed": "fixed",
    "host": "waiting for the host",
}
DETAIL_WORDS = {
    "forward": "forward compute",
    "backward": "backward compute",
    "recompute": "recompute (second forward)",
    "experts": "all-to-all of experts",
    "parameters": "communication of parameters and gradients",
    "inside": "communication inside ops",
}
"""What `Prediction.details` has, as text."""
MEMORY_WORDS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "kept": "activations kept for backward",
    "transient": "transient",
    "fixed": "fixed (context, buffers)",
}


def named_cluster(plan: Plan) -> Cluster | None:
    """The plan's cluster, as its file has it, or parsed from its name. None if neither gives a
    cluster with the plan's hash, as in files of earlier versions.
    """
    with suppress(AutoparError):
        if plan.made_for.cluster:
            cluster = ClusterSpec.from_data(plan.made_for.cluster, "the plan's cluster")
            if cluster.spec_hash() == plan.cluster_hash:
                return cluster
    return cluster_of_plan(plan)


def cluster_of(plan: Plan, given: Cluster | str | None) -> Cluster | None:
    """The plan's cluster (`named_cluster`), or the one that is `given` again, with its price. Raises
    AutoparError if that is another one.
    """
    own = named_cluster(plan)
    if given is None:
        return own
    cluster = ClusterSpec.parse(given) if isinstance(given, str) else given
    if cluster.spec_hash() != plan.cluster_hash:
        raise AutoparError(other_cluster(plan, cluster))
    price = cluster.price_per_device_hour
    if own is None:
        return cluster
    return own if price is None else own.with_price(price)


def other_cluster(plan: Plan, cluster: Cluster) -> str:
    """What differs between the cluster of a plan and another one, as text. At most three figures are
    listed, and none if the plan's file does not have them.
    """
    found: list[str] = []
    if plan.made_for.cluster:
        ours, theirs = _flat(plan.made_for.cluster), _flat(plain_data(cluster))
        found = [
            f"{key} {shown(ours.get(key))} -> {shown(theirs.get(key))}"
            for key in {**ours, **theirs}
            if ours.get(key) != theirs.get(key) and not key.endswith(_NOT_HASHED)
        ]
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    differ = f"; they differ in {', '.join(found[:3])}{more}" if found else ""
    return (
        f"the plan was made for cluster {plan.cluster_name} ({plan.mesh.num_devices} devices); this is {cluster.name} "
        f"({cluster.num_devices} devices){differ}: plan again"
    )


def _flat(data: Any, name: str = "") -> dict[str, Any]:
    """By dotted key, the leaves of nested mappings and lists."""
    if isinstance(data, dict):
        pairs: Iterable[tuple[Any, Any]] = data.items()
    elif isinstance(data, list):
        pairs = enumerate(data)
    else:
        return {name: data}
    found: dict[str, Any] = {}
    for key, value in pairs:
        found |= _flat(value, f"{name}.{key}" if name else str(key))
    return found


def cluster_of_plan(plan: Plan) -> Cluster | None:
    """The plan's cluster, parsed from its name, as a command would. None if the name is not that of
    a cluster with the plan's hash.
    """
    with suppress(AutoparError):
        cluster = ClusterSpec.parse(plan.cluster_name)
        if cluster.spec_hash() == plan.cluster_hash:
            return cluster
    return None


def placement_words(mesh: MeshShape, topology: Topology) -> str:
    """Where the ranks of each axis with several ranks lie, as text: `tp and cp inside nodes, dp 2
    of 8 ranks to a node, pp across nodes`. Axes with the same place are joined. '' if no axis has
    several ranks.
    """
    where: dict[str, list[str]] = {}
    for axis in reversed([axis for axis in mesh.placed if mesh.size(axis) > 1]):
        here, nodes = group_shape(mesh.size(axis), mesh.stride(axis), topology)
        partly = f"{here} of {mesh.size(axis)} ranks to a node"
        where.setdefault(
            "inside nodes" if nodes == 1 else "across nodes" if here == 1 else partly, []
        ).append(axis)
    return ", ".join(f"{' and '.join(axes)} {how}" for how, axes in where.items())


def recompute_words(plan: Plan) -> str:
    """How the plan's layers recompute: one mode, or `mixed: layers 0-9 full; 10-47 selective`. In a
    pipeline, layers of each stage in their order: `mixed: stage 0: 3 full, 5 none; 1-3: 8 none`.
    """
    if plan.recompute != "mixed":
        return plan.recompute
    mode_of = {name: block.recompute for block in plan.blocks for name in block.segments}
    words = _by_stage(plan.stages, mode_of) if plan.mesh.pp > 1 else _by_mode(mode_of)
    return f"mixed: {'; '.join(words)}"


def _by_mode(mode_of: Mapping[str, str]) -> Iterator[str]:
    by_mode: dict[str, dict[str, list[int]]] = {}
    for name in sorted(mode_of, key=_place):
        prefix, number = _place(name)
        if number >= 0 or mode_of[name] != "none":
            by_mode.setdefault(mode_of[name], {}).setdefault(prefix, []).append(number)
    for mode, layers in by_mode.items():
        runs = (f"{prefix} {_runs(numbers)}".strip() for prefix, numbers in layers.items())
        yield f"{', '.join(runs)} {mode}"


def _by_stage(stages: Sequence[Sequence[str]], mode_of: Mapping[str, str]) -> Iterator[str]:
    """The words of each stage, and of those with the same words together."""
    alike: dict[str, list[int]] = {}
    for number, stage in enumerate(stages):
        alike.setdefault(", ".join(_in_order(stage, mode_of)), []).append(number)
    for place, (words, numbers) in enumerate(alike.items()):
        yield f"{'' if place else 'stage '}{_runs(numbers)}: {words}"


def _in_order(stage: Sequence[str], mode_of: Mapping[str, str]) -> Iterator[str]:
    """The number of layers of each mode along a stage; other segments that recompute by name."""
    layers = [name for name in stage if _place(name)[1] >= 0]
    for mode, alike in groupby(layers, key=lambda name: mode_of[name]):
        yield f"{len(list(alike))} {mode}"
    for name in stage:
        if name not in layers and mode_of[name] != "none":
            yield f"{name} {mode_of[name]}"


def _place(name: str) -> tuple[str, int]:
    """The prefix and the number of a segment: ('layers', 3) of 'layers.3'. -1 without a number."""
    prefix, _, number = name.rpartition(".")
    return (prefix, int(number)) if prefix and number.isdigit() else (name, -1)


def _runs(numbers: Sequence[int]) -> str:
    """Ascending numbers as runs: `0-3, 8`. '' of a name without a number."""
    starts = [numbers[0], *(b for a, b in pairwise(numbers) if b != a + 1)]
    ends = [*(a for a, b in pairwise(numbers) if b != a + 1), numbers[-1]]
    if numbers[0] < 0:
        return ""
    return ", ".join(f"{a}-{b}" if b > a else f"{a}" for a, b in zip(starts, ends, strict=True))
