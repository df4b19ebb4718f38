"""Plans and jobs in another framework's words."""

from __future__ import annotations

from dataclasses import replace

from autopar.errors import AutoparError
from autopar.ir.plan import Plan
from autopar.targets.from_plan import job_of_plan
from autopar.targets.job import Exported, Job, ModelShape
from autopar.targets.registry import target_of
from autopar.text.plan_words import named_cluster


def export(plan: Plan, target: str, model: str | None = None) -> Exported:
    """A plan in the words of another framework.

    Args:
        plan: the plan.  One that was made with `target` can always be said.
        target: the name of the framework.
        model: a MODEL text, whose dimensions are written too.  By default the plan's model if its name is one.

    Raises:
        AutoparError: the target is not known, or it cannot say the plan; the message names the nearest that it can.
    """
    return exported_job(plan, target, model)[1]


def exported_job(plan: Plan, target: str, model: str | None = None) -> tuple[Job, Exported]:
    """The job of a plan in a target, and its text; arguments and errors as for `export`."""
    cluster = named_cluster(plan)
    per_node = cluster.one_kind.topology.devices_per_node if cluster else None
    nodes_of = min(per_node, plan.mesh.num_devices) if per_node else None
    found = target_of(target)
    job = job_of_plan(
        plan, found.name, _shape(model or plan.model_name, model is not None), nodes_of
    )
    refused = found.refusals(job, plan.mesh.num_devices)
    if refused:
        raise AutoparError(f"{found.title} refuses this plan: {refused[0]}")
    return job, found.write(job)


def _shape(model: str, asked: bool) -> ModelShape:
    from autopar.models import parse_model
    from autopar.targets.model_shape import shape_of

    try:
        return shape_of(parse_model(model)) or ModelShape()
    except AutoparError:
        if asked:
            raise
        return ModelShape()


def convert(job: Job, target: str) -> Exported:
    """A job of one framework in the words of another. `losses` of the result has what is lost.
    Raises AutoparError if the other one cannot say its layout.
    """
    found = target_of(target)
    layout, losses = job.layout, list[str]()
    if (
        found.name in ("accelerate", "transformers", "torchtitan")
        and layout.sequence_parallel
        and found.name != "torchtitan"
    ):
        layout = replace(layout, sequence_parallel=False)
        losses.append(
            "sequence parallelism over tp: activations between products are whole on each rank"
        )
    if layout.zero == 1 and found.name in ("accelerate", "transformers", "torchtitan"):
        layout = replace(layout, zero=3 if found.name == "transformers" else 2)
        losses.append(
            f"the distributed optimizer (ZeRO-1) becomes FSDP that shards gradients too (ZeRO-{layout.zero})"
        )
    elif layout.zero == 2 and found.name == "transformers":
        layout = replace(layout, zero=3)
        losses.append("ZeRO-2 becomes FSDP that gathers parameters for each pass (ZeRO-3)")
    elif layout.zero > 1 and found.name == "megatron":
        losses.append(
            f"ZeRO-{layout.zero} becomes Megatron-FSDP, whose checkpoints are of another format"
        )
    moved = replace(job, framework=found.name, layout=layout, flags={})
    written = found.write(moved)
    losses += [f"{name}: not translated" for name in job.unpriced]
    return replace(written, losses=(*losses, *written.losses))
