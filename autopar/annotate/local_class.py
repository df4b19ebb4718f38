"""One block class on one device under one setting, before pricing: shapes, bytes, fused kernels,
and what is recomputed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import Node

from autopar.annotate.class_facts import ClassFacts, ModelFacts
from autopar.annotate.fusion import FusedShare
from autopar.annotate.kernels import Shape
from autopar.annotate.recomputed import Rerun
from autopar.annotate.setting import AxisChoices, Setting
from autopar.annotate.transfers import Pricing
from autopar.ir.plan_fields import AxisChoice
from autopar.ir.sharding import AxisLayout, R
from autopar.ops.strategies import lowering_of
from autopar.ops.values import ops, result_names


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalClass:
    """One block class on one device.

    Propagation decides all axes but tp. On those axes, `choices` has the choices of the ops and
    `fixed` the layouts of the values. `shapes` has the sizes of the values over all ranks. `bytes`
    has the sizes of values on one rank of those axes, before tp divides them. `common` maps inputs
    that reach all segments unconverted to the (segment, output) that makes each. `as_made` has the
    keys of such inputs that are kept as they arrive. `shares` has the memory traffic of fused ops.
    `unwritten` has the values that live inside one fused kernel. `narrow` has the calls that
    multiply by a parameter in fp8.
    """

    facts: ClassFacts
    setting: Setting
    pricing: Pricing
    choices: dict[str, dict[str, AxisChoice]]
    fixed: dict[str, dict[str, AxisLayout]]
    shapes: dict[str, Shape]
    bytes: dict[str, int]
    common: dict[str, tuple[int, int]]
    as_made: frozenset[str]
    shares: dict[str, FusedShare]
    unwritten: frozenset[str]
    narrow: frozenset[str]
    rerun: Rerun

    def along_positions(self, name: str, layout: AxisLayout) -> bool:
        """Whether a layout shards the value `name` along a dim that is positions of sequences."""
        return layout.is_shard and any(
            dim == layout.dim and pattern.rows == layout.pattern.rows
            for dim, pattern in self.facts.positions.get(name, ())
        )

    def gathered_again_s(self, name: str, layout: AxisLayout) -> float:
        """Seconds in which backward gathers a value over tp for the linear layers that keep its
        shard. 0.0 if no layer does, or if `layout`, in which the value is made, is not whole.
        """
        if self.pricing.tp == 1 or layout.value.kind != "R":
            return 0.0
        if name not in self.rerun.gathered.values():
            return 0.0
        return self.pricing.move_s("all_gather", self.bytes[name])

    def lowered(self, node: Node) -> str:
        """The special lowering that propagation chose for an op, or ''."""
        dims = self.facts.dims[node.name]
        found = (
            lowering_of(dims, choice.strategy)
            for choice in self.choices.get(node.name, {}).values()
        )
        return next(filter(None, found), "")


def local_class(
    model: ModelFacts, index: int, setting: Setting, choices: AxisChoices
) -> LocalClass:
    """The class at `index` under `setting`. `choices` are the propagated choices of all classes."""
    facts, software, pricing = model.classes[index], setting.software, Pricing(setting)
    fixed = _fixed_layouts(facts, choices[index])
    common = _common(model, facts, setting, choices, fixed)
    shares = facts.shares(software.joins)
    in_fp8 = facts.products if software.matmul_dtype == "fp8" else frozenset()
    return LocalClass(
        facts=facts,
        setting=setting,
        pricing=pricing,
        choices=choices[index],
        fixed=fixed,
        shapes={name: tuple(map(pricing.number, t.shape)) for name, t in facts.tensors.items()},
        bytes={name: pricing.size_bytes(t, fixed[name]) for name, t in facts.tensors.items()},
        common=common,
        as_made=frozenset(name + sharding_key(facts, name, fixed[name]) for name in common),
        shares=shares,
        unwritten=_unwritten(facts, shares)
        if software.compiled or software.fused_kernels
        else frozenset(),
        narrow=in_fp8 if software.fp8_head else in_fp8 - facts.heads,
        rerun=facts.rerun(setting.recompute, software.compiled),
    )


def sharding_key(facts: ClassFacts, name: str, layouts: Mapping[str, AxisLayout]) -> str:
    """The axes that shard a value and the dims of its storage that they shard, such as '/dp0/tp2'.
    It is part of the key of a saved tensor.
    """
    found = ""
    for axis, layout in layouts.items():
        if layout.is_shard:
            dim = facts.storage_dim(name, layout)
            found += f"/{axis}{dim}" if dim is not None else f"/{axis}:{name}"
    return found


def _fixed_layouts(
    facts: ClassFacts, choices: dict[str, dict[str, AxisChoice]]
) -> dict[str, dict[str, AxisLayout]]:
    found: dict[str, dict[str, AxisLayout]] = {}
    for node in facts.graph.nodes:
        if (node.op != "output" and node.name in facts.tensors) or node.op == "call_function":
            for k, name in enumerate(result_names(node)):
                found[name] = {
                    axis: choice.outputs[k] for axis, choice in choices.get(node.name, {}).items()
                }
    return found


def _common(
    model: ModelFacts,
    facts: ClassFacts,
    setting: Setting,
    choices: AxisChoices,
    fixed: dict[str, dict[str, AxisLayout]],
) -> dict[str, tuple[int, int]]:
    """Input -> the (segment, output) that makes it, for inputs common to all segments
    (`ClassPlace.common`) that reach each segment in the layout in which they were made.

    A converted input is a separate copy for each reader, so it is not common. Over tp the solver
    may convert a value with a gradient; values without a gradient are replicated from the start.
    """
    found = {}
    for name, (segment, k) in facts.place.common.items():
        made = choices[model.segments[segment]].get(f"output{k}", {})
        alike = all(fixed[name].get(axis, R) == choice.inputs[0] for axis, choice in made.items())
        if alike and not (setting.mesh.tp > 1 and facts.grads[name]):
            found[name] = segment, k
    return found


def _unwritten(facts: ClassFacts, shares: dict[str, FusedShare]) -> frozenset[str]:
    """Names of values that live inside one fused kernel, so that they are never written
    to memory.
    """
    return frozenset(
        name
        for node in ops(facts.graph)
        if node.name in shares
        for name, written in zip(result_names(node), shares[node.name].writes, strict=True)
        if not written
    )
