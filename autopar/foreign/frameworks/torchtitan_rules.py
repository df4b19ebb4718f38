"""What torchtitan refuses at start, and what it can run."""

from __future__ import annotations

import re
from collections.abc import Iterator

from autopar.foreign.frameworks.arguments import Arguments
from autopar.foreign.frameworks.torchtitan_options import MODE, PARALLELISM, TRAINING, WRITTEN
from autopar.foreign.job import Finding, Job
from autopar.foreign.target import divisors_near, head_findings, multiples_near

_V_SCHEDULES = "ZBVZeroBubble|DualPipeV"
"""Schedules in which the first and the last stage lie on one rank."""


def torchtitan_refusals(job: Job, gpus: int) -> list[Finding]:
    """What torchtitan refuses at start."""
    by, shape, found = job.layout, job.shape, list[Finding]()

    def refuse(what: str, theirs: str, *legal: str) -> None:
        found.append(Finding("refused", what, theirs, legal))

    fixed = by.tp * by.pp * by.cp
    total = fixed * by.dp_on(gpus)
    if total != gpus:
        legal = (
            [f"--{PARALLELISM}data_parallel_shard_degree {gpus // fixed // by.copies}"]
            if gpus % (fixed * by.copies) == 0
            else []
        )
        legal += (
            []
            if legal
            else [
                f"--{PARALLELISM}tensor_parallel_degree {d}"
                for d in divisors_near(gpus // (by.pp * by.cp) or 1, by.tp)
            ]
        )
        refuse(
            f"replicate x shard x cp x tp x pp = {total}, and there are {gpus} devices",
            "Invalid parallel dims: ... != WORLD_SIZE",
            *legal,
        )
    if job.seq and job.seq % (2 * by.cp * by.tp if by.cp > 1 else by.tp):
        unit = 2 * by.cp * by.tp if by.cp > 1 else by.tp
        refuse(f"{job.seq} tokens are no multiple of {unit}", "seq_len must be divisible by tp and 2 x cp",
               *(f"--{TRAINING}seq_len {n}" for n in multiples_near(unit, job.seq)))  # fmt: skip
    words = "n_heads must be divisible by tensor_parallel_degree"
    found += head_findings(job, words, f"--{PARALLELISM}tensor_parallel_degree")
    rows = by.micro_batch * by.dp_on(gpus)
    if by.batch_on(gpus) % rows:
        refuse(f"global batch {by.batch_on(gpus)} is no multiple of {rows}",
               "global batch size must be multiple of local batch size times data-parallel degree",
               *(f"--{TRAINING}global_batch_size {n}" for n in multiples_near(rows, by.batch_on(gpus))))  # fmt: skip
    region = by.dp_on(gpus) // by.copies * by.cp * by.tp
    if by.ep > 1 and region % by.ep:
        refuse(f"ep={by.ep} does not divide dp_shard x cp x tp = {region}", "expert_parallel_degree must divide dp_shard * cp * tp",
               *(f"--{PARALLELISM}expert_parallel_degree {d}" for d in divisors_near(region, by.ep)))  # fmt: skip
    if by.ep > 1 and shape.experts and shape.experts % by.ep:
        refuse(f"ep={by.ep} does not divide {shape.experts} experts", "num_experts must be divisible by expert_parallel_degree",
               *(f"--{PARALLELISM}expert_parallel_degree {d}" for d in divisors_near(shape.experts, by.ep)))  # fmt: skip
    if by.pp > 1:
        found += _refusals_of_pipeline(job)
    return [*found, *_refusals_of_config(job)]


def _refusals_of_pipeline(job: Job) -> Iterator[Finding]:
    """What torchtitan refuses while it cuts a model into stages."""
    by, schedule = job.layout, job.flags.get(f"{PARALLELISM}pipeline_parallel_schedule", "")

    def refused(what: str, theirs: str, *legal: str) -> Finding:
        return Finding("refused", what, theirs, legal)

    if by.stages and len(by.stages) % by.pp:
        yield refused(f"{len(by.stages)} stages are not divisible by pp={by.pp}",
               "Number of virtual stages must be divisible by pipeline parallel size")  # fmt: skip
    if by.vpp == 1 and by.schedule == "interleaved_1f1b":
        yield refused("an interleaved schedule with one stage a rank", "Multi-stage schedule requires at least 2 stages per rank",
               f"--{PARALLELISM}pipeline_parallel_schedule 1F1B")  # fmt: skip
    elif by.vpp > 1 and by.schedule in ("1f1b", "gpipe"):
        yield refused(f"schedule {WRITTEN[by.schedule]} with {by.vpp} stages a rank",
               "Single stage schedule requires exactly 1 stage per rank",
               f"--{PARALLELISM}pipeline_parallel_schedule Interleaved1F1B")  # fmt: skip
    elif by.vpp != 2 and re.fullmatch(_V_SCHEDULES, schedule, re.I):
        yield refused(f"a V schedule with {by.vpp} stages a rank", "v schedules assume 2 stages per rank",
               f"--{PARALLELISM}pipeline_parallel_schedule Interleaved1F1B")  # fmt: skip


def _refusals_of_config(job: Job) -> Iterator[Finding]:
    """What torchtitan 0.3 refuses while it reads the flags."""
    by, args = job.layout, Arguments(job.flags)
    off = args.flag(f"{TRAINING}disable_cuda_graphs")
    if "module" in job.flags and by.pp > 1 and not off:
        yield Finding("refused", f"pp={by.pp} with CUDA graphs", "CUDA graphs do not support pipeline parallelism yet.",
                      (f"--{TRAINING}disable_cuda_graphs", f"--{PARALLELISM}pipeline_parallel_degree 1"))  # fmt: skip
    local, size = args.whole(f"{TRAINING}local_batch_size"), by.micro_batch
    if by.pp > 1 and local and local % size:
        legal = [f"--{TRAINING}local_batch_size {n}" for n in multiples_near(size, local)]
        legal += [
            f"--{PARALLELISM}pipeline_parallel_microbatch_size {d}"
            for d in divisors_near(local, size)
        ]
        yield Finding("refused", f"local batch {local} is no multiple of the micro-batch {size} of the pipeline",
                      "must be evenly divisible by parallelism.pipeline_parallel_microbatch_size", tuple(legal))  # fmt: skip
    budget, compiled = args.text(MODE) == "memory_budget", args.flag("compile.enable")
    if budget and not compiled:
        yield Finding("refused", "a memory budget without torch.compile",
                      "Memory budget activation checkpointing requires the model to be compiled",
                      ("--compile.enable", "activation-checkpoint:selective"))  # fmt: skip
    if args.flag("compile.enable_async_tensor_parallel") and not compiled:
        yield Finding("refused", "asynchronous tensor parallelism without torch.compile",
                      "Async TP requires 'model' in --compile.components and --compile.enable", ("--compile.enable",))  # fmt: skip
