"""Plans and jobs in another framework's words."""

from __future__ import annotations

from dataclasses import replace

from autopar.errors import AutoparError
from autopar.foreign.frameworks.registry import TARGETS, target_of
from autopar.foreign.job import Exported, Job
from autopar.foreign.limits.stage_cuts import even_stages
from autopar.foreign.target import Target
from autopar.foreign.verdicts import open_words
from autopar.foreign.writers.from_plan import job_of_plan
from autopar.foreign.writers.losses import lost
from autopar.ir.layout import Layout
from autopar.ir.mesh import MeshShape
from autopar.ir.model_shape import ModelShape
from autopar.ir.plan import Plan
from autopar.text.plan_words import named_cluster


def export(plan: Plan, target: str | None = None, model: str | None = None) -> Exported:
    """A plan in the words of another framework.

    Args:
        plan: the plan.  One that was made with `target` can always be said.
        target: the name of the framework.  By default the target that the plan was made for.
        model: a MODEL text, whose dimensions are written too.  By default the plan's model, if a text names it.

    Raises:
        AutoparError: the target is not known or not given, or it cannot say the plan; the message names the nearest that it can.  Or
            `model` has other dimensions than the plan's.
    """
    return exported_job(plan, target, model)[1]


def exported_job(
    plan: Plan, target: str | None = None, model: str | None = None
) -> tuple[Job, Exported]:
    """The job of a plan in a target, and its text; arguments and errors as for `export`."""
    cluster = named_cluster(plan)
    per_node = cluster.one_kind.topology.devices_per_node if cluster else None
    nodes_of = min(per_node, plan.mesh.num_devices) if per_node else None
    if not (target := target or plan.made_for.target):
        raise AutoparError(
            f"the plan was made for no other framework: say for which it is to be written; {', '.join(TARGETS)} are known"
        )
    found = target_of(target)
    job = job_of_plan(plan, found.name, _shape_of_plan(plan, model), nodes_of)
    return job, _written(found, job)


def _shape_of_plan(plan: Plan, model: str | None) -> ModelShape:
    """The dimensions of a plan's model, or of the one that is given again. Raises AutoparError if
    these differ.
    """
    own = _shape(plan.made_for.model or plan.model_name, False)
    if model is None:
        return own
    given = _shape(model, True)
    if plan.made_for.model and given != own:
        raise AutoparError(
            f"the plan was made for the model {plan.made_for.model}, and {model} has other dimensions: leave it out, or plan again"
        )
    return given


def _shape(model: str, asked: bool) -> ModelShape:
    from autopar.models import parse_model
    from autopar.models.shapes import shape_of_spec

    try:
        return shape_of_spec(parse_model(model)) or ModelShape()
    except AutoparError:
        if asked:
            raise
        return ModelShape()


_SHARDED = {
    2: "which shards gradients too",
    3: "which gathers parameters for each pass",
}


def _cut(layout: Layout, job: Job, target: Target) -> tuple[Layout, list[str]]:
    """A layout with the stages that the target cuts, if it cuts them itself; and what that changes,
    in words.
    """
    cuts = target.limits.restriction(job.shape, job.seq or 1).cuts
    mesh = MeshShape(pp=layout.pp, tp=layout.tp)
    own = cuts.sizes(mesh, layout.vpp) if cuts and layout.pp > 1 else ()
    before = layout.stages or even_stages(job.shape.layers, layout.pp * layout.vpp)
    if not own or own == before:
        return layout, []
    words = ["-".join(map(str, sizes)) for sizes in (before, own)]
    change = f"stages of {words[0]} layers become {words[1]}, as {target.title} cuts them"
    return replace(layout, stages=own), [change]


def convert(job: Job, target: str) -> Exported:
    """A job of one framework in the words of another. `losses` of the result has what is lost.
    Raises AutoparError if the other one cannot say its layout, or if the file leaves it open.
    """
    found = target_of(target)
    if job.unknown:
        raise AutoparError(f"the job cannot be written in other words: {open_words(job)}")
    layout, losses = job.layout, list[str]()
    if layout.sequence_parallel and not found.limits.sequence_parallel:
        layout = replace(layout, sequence_parallel=False)
        losses.append(
            "sequence parallelism over tp: activations between products are whole on each rank"
        )
    more = [zero for zero in found.limits.zero if zero > layout.zero]
    if layout.zero not in found.limits.zero and more:
        layout = replace(layout, zero=more[0])
        losses.append(f"ZeRO-{job.layout.zero} becomes ZeRO-{more[0]}, {_SHARDED[more[0]]}")
    layout, changed = _cut(layout, job, found)
    losses += changed
    if layout.zero > 1 and found.limits.sharding == "dist_optimizer":
        losses.append(f"ZeRO-{layout.zero} is Megatron-FSDP, whose checkpoints have another format")
    gpus = job.gpus or layout.least_gpus
    if job.gpus is None:
        losses.append(f"the number of devices: written for {gpus}, the fewest of this layout")
    batch = layout.batch_on(gpus)
    layout = replace(layout, dp=layout.dp_on(gpus), global_batch=batch, accumulation=1)
    moved = replace(job, framework=found.name, layout=layout, flags={}, gpus=gpus, file=None)
    written = _written(found, moved)
    losses += [f"{name}: not translated" for name in (*job.unmodelled, *job.unpriced)]
    return replace(written, losses=(*losses, *written.losses))


def _written(target: Target, job: Job) -> Exported:
    """The text of a job, with all that it does not say. Raises AutoparError if the target cannot say
    it, or refuses it.
    """
    gpus = job.gpus or job.layout.least_gpus
    if refused := [f for f in target.refusals(job, gpus) if f.kind == "refused"]:
        raise AutoparError(f"{target.title} refuses this job: {refused[0]}")
    written = target.write(job)
    return replace(written, losses=(*written.losses, *lost(target, job, written)))
