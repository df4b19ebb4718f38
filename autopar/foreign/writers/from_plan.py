"""The layout of a plan, as a job of another framework would say it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from autopar.errors import AutoparError
from autopar.foreign.job import Facts, Job
from autopar.ir.layout import Layout
from autopar.ir.mesh import BATCH_AXES
from autopar.ir.model_shape import ModelShape
from autopar.ir.plan import Plan
from autopar.ir.plan_checks import SELECTIVE_MODES
from autopar.ir.plan_fields import AxisChoice, BlockPlan
from autopar.request.frameworks import RECIPE_OF_SCALING
from autopar.request.software import Software

_LAYER = re.compile(r"(^|\.)\d+(\.|$)")
_WHOLE = re.compile(r"norm|(^|_)ln_?\d*_|router|(^|_)gate_weight$|scale")
"""Weights of a layer that every framework leaves whole under tp: norms and routers."""


def layers_of(plan: Plan) -> tuple[int, ...]:
    """The number of layers of each stage, in the order of the model. A segment is a layer if its
    name has the number of one, such as `layers.3`.
    """
    return tuple(sum(bool(_LAYER.search(name)) for name in stage) for stage in plan.stages)


def layout_of(plan: Plan) -> Layout:
    """The layout of a plan. Raises AutoparError if layers differ in what is computed again, or in
    whether tp shards their activations: no framework says that.
    """
    mesh = plan.mesh
    stages = layers_of(plan)
    return Layout(
        tp=mesh.tp,
        pp=mesh.pp,
        cp=mesh.cp,
        dp=mesh.dp,
        ep=mesh.ep,
        vpp=len(plan.stages) // mesh.pp,
        stages=() if mesh.pp == 1 or len(set(stages)) == 1 else stages,
        micro_batch=plan.micro_batch,
        global_batch=plan.global_batch,
        zero=plan.zero if mesh.dp * mesh.cp > 1 else 0,
        copies=mesh.dp * mesh.cp // plan.shard if plan.shard and plan.zero else 1,
        recompute=_recompute(plan),
        schedule=plan.schedule if mesh.pp > 1 else "none",
        sequence_parallel=is_sequence_parallel(plan),
        offload=plan.offload,
        order=mesh.order,
    )


def _recompute(plan: Plan) -> str:
    modes = {block.recompute for block in layer_blocks(plan)}
    if len(modes) > 1 and not plan.recompute.startswith("every"):
        raise AutoparError(
            f"layers of the plan differ in what is computed again ({', '.join(sorted(modes))}): plan with --target, or pin recompute"
        )
    return (
        plan.recompute
        if plan.recompute in ("none", "full", *SELECTIVE_MODES)
        else next(iter(modes), "none")
    )


def layer_blocks(plan: Plan) -> tuple[BlockPlan, ...]:
    """The blocks that are layers."""
    return tuple(
        block for block in plan.blocks if any(_LAYER.search(name) for name in block.segments)
    )


def is_sequence_parallel(plan: Plan) -> bool:
    """Whether tp shards the positions of what layers hand on. Raises AutoparError if it does for
    some layers only, or if it leaves a weight of a product whole, which no framework does.
    """
    if plan.mesh.tp == 1:
        return False
    handed = {_handed(block) for block in layer_blocks(plan)}
    if whole := [
        name
        for block in layer_blocks(plan)
        for name, axes in block.ops.items()
        if _left_whole(name, axes)
    ]:
        raise AutoparError(
            f"tp leaves {whole[0]} of the plan whole, and other frameworks shard it: plan with --target, or with another tp"
        )
    if not handed <= {"S(1)", "R"} or len(handed) > 1:
        raise AutoparError(
            f"layers of the plan hand on activations as {', '.join(sorted(handed))} over tp: pin sequence_parallel=true or false"
        )
    return handed == {"S(1)"}


def _handed(block: BlockPlan) -> str:
    """How tp lays out the activations that a layer hands on: 'S(1)' if it shards their positions.
    A result that no axis of the batch shards, such as the loss of a router, is no activation.
    """
    results = [axes for name, axes in block.ops.items() if re.fullmatch(r"output\d+", name)]
    sharded = [
        axes
        for axes in results
        if any(axis in axes and axes[axis].inputs[0].is_shard for axis in BATCH_AXES)
    ]
    layouts = {str(axes["tp"].inputs[0]) for axes in sharded or results if "tp" in axes}
    return "S(1)" if "S(1)" in layouts else " and ".join(sorted(layouts)) or "R"


def _left_whole(name: str, axes: Mapping[str, AxisChoice]) -> bool:
    """Whether an op is the weight of a product that tp does not shard."""
    choice = axes.get("tp")
    if choice is None or choice.inputs or not name.endswith("_weight") or _WHOLE.search(name):
        return False
    return not str(choice.outputs[0]).startswith("S")


def job_of_plan(
    plan: Plan, target: str, shape: ModelShape, gpus_per_node: int | None = None
) -> Job:
    """The job of a plan, for a target. In files of earlier versions the tokens of a sequence follow
    from the plan's rate. Raises AutoparError if the plan says what no framework can.
    """
    predicted = plan.predicted
    tokens = predicted.tokens_per_s * predicted.step_time_s
    seq = plan.made_for.seq or round(tokens / plan.global_batch)
    precision = plan.precision if plan.precision in ("bf16", "fp16", "fp32") else ""
    if not precision:
        raise AutoparError(f"the plan is for {plan.precision}, which no framework trains in")
    software = Software.from_data(plan.made_for.software)
    facts = Facts(
        precision,
        RECIPE_OF_SCALING.get(software.fp8_scaling, software.fp8_scaling)
        if software.matmul_dtype == "fp8"
        else "",
        dp_overlap=software.dp_overlap,
        compile=software.compiled,
    )
    return Job(target, shape, layout_of(plan), plan.mesh.num_devices, gpus_per_node, seq, facts)
