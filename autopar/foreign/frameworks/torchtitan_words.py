"""torchtitan's options as the file of a job has them: of 0.3, of 0.2, or of 2024."""

from __future__ import annotations

import json

from autopar.foreign.frameworks.torchtitan_options import MODE, OPTION, PARALLELISM, TRAINING
from autopar.foreign.frameworks.torchtitan_read import EARLIER
from autopar.foreign.frameworks.torchtitan_write import torchtitan_flags
from autopar.foreign.job import Job
from autopar.foreign.target import Aspect, NotExpressible

TORCHTITAN_ASPECTS = (
    Aspect(("tp",), r"(parallelism|training)\.tensor_parallel_degree"),
    Aspect(("pp", "vpp", "stages", "schedule", "micro_batch"),
           r"(parallelism|experimental)\.(pipeline_parallel_(?!.*csv)\w+|num_pp_microbatches|module_fqns_per_model_part)|training\.disable_cuda_graphs"),
    Aspect(("cp",), r"(parallelism|experimental)\.context_parallel_degree"),
    Aspect(("ep", "etp"), r"parallelism\.expert_(tensor_)?parallel_degree|training\.disable_cuda_graphs"),
    Aspect(("sequence_parallel",), r"parallelism\.enable_sequence_parallel"),
    Aspect(("zero", "copies", "dp", "pp"), r"(parallelism|training)\.(data_parallel_\w+|fsdp_reshard_after_forward)"),
    Aspect(("micro_batch", "global_batch", "accumulation", "pp", "dp"),
           r"training\.((local_|global_)?batch_size|num_tokens_per_(microbatch_per_dp_rank|train_step))|parallelism\.num_pp_microbatches"),
    Aspect(("recompute", "recompute_layers"), r"activation_checkpoint(\.\w+)?"),
    Aspect(("offload",), r"training\.enable_cpu_offload"),
)  # fmt: skip
"""What options say of a layout."""


_TOKENS = "num_tokens_per_microbatch_per_dp_rank"
POLICY_CLASSES = {"none": "None", "full": "FullAC.Config()", "selective": "SelectiveAC.Config()"}
"""What is computed again, in a registry in Python."""


def torchtitan_words(job: Job) -> dict[str, str]:
    """The options of a job by name, in the words of its file. Raises NotExpressible if the release of
    the file cannot run it.
    """
    found, file = torchtitan_flags(job), job.flags
    if job.layout.global_batch is None:  # the default follows from the other sizes
        found.pop(f"{TRAINING}global_batch_size")
    own = job.file.options if job.file is not None else {}
    if any(name.endswith(_TOKENS) for name in own):
        found = _of_tokens(job, found)
    if not file or "module" in file:
        return found
    parts = f"{PARALLELISM}module_fqns_per_model_part"
    if parts in found:
        found[parts] = json.dumps([part.split(",") for part in found[parts].split()])
    if job.file is not None and job.file.name.endswith(".py"):
        policy = found.pop("activation-checkpoint")
        return found | {"activation_checkpoint": POLICY_CLASSES[policy]}
    return _of_earlier(job, found)


def _of_tokens(job: Job, found: dict[str, str]) -> dict[str, str]:
    """The options of releases that count tokens in place of sequences. Raises NotExpressible if the
    length of sequences is not known.
    """
    if not job.seq:
        raise NotExpressible("micro-batches are counted in tokens: give --seq")
    by, gpus = job.layout, job.gpus or 1
    earlier = (
        *(f"{TRAINING}{name}" for name in ("local_batch_size", "global_batch_size", "seq_len")),
        f"{PARALLELISM}pipeline_parallel_microbatch_size",
    )
    found = {name: text for name, text in found.items() if name not in earlier}
    found[f"{TRAINING}{_TOKENS}"] = str(by.micro_batch * job.seq)
    if by.pp > 1:
        found[f"{PARALLELISM}num_pp_microbatches"] = str(by.micro_batches_on(gpus))
    if by.global_batch is not None:
        found[f"{TRAINING}num_tokens_per_train_step"] = str(by.global_batch * job.seq)
    return found


def _of_earlier(job: Job, found: dict[str, str]) -> dict[str, str]:
    """The options of releases before 0.3."""
    policy = found.pop("activation-checkpoint")
    found[MODE] = policy
    found |= {OPTION: "op"} if policy == "selective" else {}
    found.pop(f"{TRAINING}disable_cuda_graphs", None)
    if found.pop(f"{PARALLELISM}enable_sequence_parallel", "True") == "False":
        raise NotExpressible("torchtitan before 0.3 cannot say whole activations beside tp")
    own = job.file.options if job.file is not None else {}
    if job.layout.pp > 1 and any(name.startswith("experimental.") for name in own):
        raise NotExpressible("torchtitan of 2024 cuts a pipeline by names of layers alone")
    if f"{TRAINING}batch_size" in own:
        found[f"{TRAINING}batch_size"] = found.pop(f"{TRAINING}local_batch_size")
        local = int(found[f"{TRAINING}batch_size"])
        batch = int(found.pop(f"{TRAINING}global_batch_size", "0"))
        if batch and batch != local * job.layout.dp_on(job.gpus or 1):
            raise NotExpressible(f"this release of torchtitan cannot say a global batch of {batch}")
    renamed = {now: name for name, now in EARLIER.items() if name in own}
    return {renamed.get(name, name): text for name, text in found.items()}
