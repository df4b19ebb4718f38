"""Writes a job as a launch script of torchtitan."""

from __future__ import annotations

from autopar.foreign.frameworks.torchtitan_models import FLAVORS
from autopar.foreign.frameworks.torchtitan_options import PARALLELISM, TRAINING, WRITTEN
from autopar.foreign.job import Exported, Job
from autopar.foreign.limits.stage_cuts import even_stages
from autopar.foreign.target import NotExpressible, said, torchrun
from autopar.ir.layout import Layout
from autopar.ir.model_shape import ModelShape

_POLICIES = {"none": "none", "full": "full", "op": "selective"}


def torchtitan_flags(job: Job) -> dict[str, str]:
    """The flags of a job, by name. Raises NotExpressible if torchtitan cannot run it."""
    by, lacking = job.layout, []
    if by.zero == 1:
        lacking.append("ZeRO-1: the nearest is FSDP with fsdp_reshard_after_forward never (ZeRO-2)")
    if by.recompute not in _POLICIES or by.recompute_layers:
        lacking.append(f"recompute {by.recompute}: the nearest are selective by op, and full")
    if by.schedule not in ("none", *WRITTEN):
        lacking.append(f"schedule {by.schedule}: it has {', '.join(WRITTEN.values())}")
    if by.order:
        lacking.append(
            f"the rank order {by.order}: it has tp, cp, shard, replicate, pp from the inside"
        )
    if by.offload == "optimizer":
        lacking.append(
            "the optimizer's state alone in host memory: the nearest is training.enable_cpu_offload"
        )
    if by.zero == 0 and by.cp > 1:
        lacking.append("cp without FSDP")
    if lacking:
        raise NotExpressible(f"torchtitan cannot say {'; '.join(lacking)}")
    dp = by.dp_on(job.gpus or by.tp * by.pp * by.cp)
    batch = by.batch_on(job.gpus or by.tp * by.pp * by.cp)
    replicas, shards = (by.copies, dp // by.copies) if by.zero else (dp, 1)
    piped = by.pp > 1
    whole = by.tp > 1 and not by.sequence_parallel
    found: dict[str, object] = {
        f"{PARALLELISM}data_parallel_replicate_degree": replicas,
        f"{PARALLELISM}data_parallel_shard_degree": shards,
        f"{PARALLELISM}tensor_parallel_degree": by.tp,
        f"{PARALLELISM}context_parallel_degree": by.cp,
        f"{PARALLELISM}pipeline_parallel_degree": by.pp,
        f"{PARALLELISM}expert_parallel_degree": by.ep,
        f"{PARALLELISM}enable_sequence_parallel": "False" if whole else None,
        f"{PARALLELISM}fsdp_reshard_after_forward": "never" if by.zero == 2 else "always",
        f"{TRAINING}local_batch_size": batch // dp if piped else by.micro_batch,
        f"{TRAINING}global_batch_size": batch,
        f"{TRAINING}seq_len": job.seq or None,
        f"{PARALLELISM}pipeline_parallel_schedule": WRITTEN[by.schedule] if piped else None,
        f"{PARALLELISM}pipeline_parallel_microbatch_size": by.micro_batch if piped else None,
        **(_parts(by, job.shape) if piped else {}),
        f"{TRAINING}disable_cuda_graphs": "True" if by.pp * by.ep > 1 else None,
        "activation-checkpoint": _POLICIES[by.recompute],
        f"{TRAINING}enable_cpu_offload": "True" if by.offload == "parameters" else None,
        "compile.enable": None if job.facts.compile is None else str(job.facts.compile),
    }
    return said(found)


def _parts(by: Layout, shape: ModelShape) -> dict[str, str]:
    """The modules of each stage, if its layers are known."""
    sizes = by.stages or even_stages(shape.layers, by.pp * by.vpp)
    parts, at = list[str](), 0
    for number, size in enumerate(sizes):
        names = ["tok_embeddings"] if number == 0 else []
        names += [f"layers.{layer}" for layer in range(at, at + size)]
        names += ["norm", "lm_head"] if number == len(sizes) - 1 else []
        parts.append(",".join(names))
        at += size
    return {f"{PARALLELISM}module_fqns_per_model_part": " ".join(parts)} if parts else {}


def write_torchtitan(job: Job) -> Exported:
    """A launch script of torchtitan 0.3. Raises NotExpressible if torchtitan cannot run the job."""
    flags = torchtitan_flags(job)
    policy = flags.pop("activation-checkpoint")
    flavors = [name for name, shape in FLAVORS.items() if shape == job.shape]
    name, size = flavors[0] if flavors else ("MODULE", "CONFIG")
    config = f"{name}_{size}" if flavors else size
    words = [f"--module {name}", f"--config {config}"]
    # what is true by its presence has a form of its own
    words += [f"--{n}" if v == "True" else f"--{_off(n)}" if v == "False" else f"--{n} {v}"
              for n, v in flags.items()]  # fmt: skip
    lines = [f"{torchrun(job)} -m torchtitan.train", *words, f"activation-checkpoint:{policy}"]
    losses = [] if flavors else ["the model: set --module and --config"]
    losses += ["fp8: the function of --config names its converters"] if job.facts.fp8 else []
    text = "#!/bin/bash\n" + " \\\n    ".join(lines) + "\n"
    return Exported("torchtitan 0.3", text, "bash train.sh", {}, tuple(losses), "train.sh")


def _off(name: str) -> str:
    """The flag that sets an option to false."""
    section, _, key = name.rpartition(".")
    return f"{section}.no-{key}"
