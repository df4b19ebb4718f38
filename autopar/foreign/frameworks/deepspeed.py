"""DeepSpeed: its JSON configuration, with values of "auto" that a trainer fills in."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from autopar.errors import AutoparError
from autopar.foreign.frameworks.accelerate import late_findings
from autopar.foreign.frameworks.arguments import Arguments, flat_texts, read_mapping
from autopar.foreign.frameworks.trainer_words import (
    TRAINER_ASPECTS,
    in_script,
    is_trainer,
    trainer_held,
    trainer_words,
)
from autopar.foreign.frameworks.unknown import open_layout
from autopar.foreign.job import Exported, Facts, Finding, Job
from autopar.foreign.limits.frameworks import LIMITS
from autopar.foreign.target import NotExpressible, SourceFile, Target, multiples_near, nodes_of
from autopar.ir.layout import Layout

Z = "zero_optimization."
_BATCH = "train_batch_size"
_MICRO = "train_micro_batch_size_per_gpu"
_STEPS = "gradient_accumulation_steps"
_NEUTRAL = re.compile(
    r"optimizer\..*|scheduler\..*|gradient_clipping|steps_per_print|wall_clock_breakdown|dump_state|tensorboard\..*|wandb\..*|csv_monitor\..*|"
    r"(fp16|bf16)\..*|zero_optimization\.(contiguous_gradients|round_robin.*|reduce_scatter|allgather_partitions|.*bucket_size|stage3_.*|"
    r"sub_group_size|ignore_unused_parameters|load_from_fp32.*|elastic_checkpoint|max_(live_parameters|reuse_distance)|gather_16bit_weights_on_model_save|offload_(optimizer|param)\.(pin_memory|fast_init|buffer.*|"
    r"max_in_cpu|pipeline.*))|zero_allow_untested_optimizer|flops_profiler\..*|comms_logger\..*|checkpoint\..*|memory_breakdown|"
    r"prescale_gradients|data_types\.grad_accum_dtype|communication_data_type|disable_allgather|zero_force_ds_cpu_optimizer|"
    r"aio\..*|_\w+|comms_config\..*|monitor_config\..*|seq_parallel_communication_data_type|tensor_parallel\.(tp_overlap|.*_policy)"
)


def _reads(source: SourceFile) -> bool:
    marks = r'"(zero_optimization|train_micro_batch_size_per_gpu|train_batch_size)"\s*:'
    return source.text.lstrip()[:1] in ("{", "/") and re.search(marks, source.text) is not None


def read_deepspeed(source: SourceFile) -> Job:
    """The job of a `ds_config.json`. Raises AutoparError if it is none."""
    data = read_mapping(source.text, source.name)
    values = flat_texts(data)
    if not any(name in values for name in (_BATCH, _MICRO)) and not any(
        name.startswith(Z) for name in values
    ):
        raise AutoparError(f"no job: {source.name} has neither batch sizes nor zero_optimization")
    automatic = sorted(name for name, value in values.items() if value == "auto")
    args = Arguments({name: value for name, value in values.items() if value != "auto"})
    batches = [name for name in automatic if name in (_BATCH, _MICRO, _STEPS)]
    if batches:
        args.find("unknown", f"{', '.join(batches)} are auto: the trainer decides",
                  legal=("give --micro-batch and --global-batch",))  # fmt: skip
    micro, batch = args.whole(_MICRO), args.whole(_BATCH)
    steps = args.whole(_STEPS)
    if not batches and micro is None:
        args.find("unknown", f"{_MICRO} does not stand in the file",
                  legal=("give --micro-batch",))  # fmt: skip
    layout = Layout(
        tp=args.whole("tensor_parallel.autotp_size", "tensor_parallel.tp_size") or 1,
        cp=args.whole("sequence_parallel_size") or 1,
        micro_batch=micro or 1,
        global_batch=batch,
        accumulation=1 if batch else steps or 1,
        zero=args.whole(f"{Z}stage", least=0) or 0,
        offload=_offload(args),
        recompute=_recompute(args, data),
    )
    if (
        group := args.whole(f"{Z}zero_hpz_partition_size", f"{Z}mics_shard_size", least=0)
    ) and group > 1:
        args.find(
            "note",
            f"parameters are shared out over {group} ranks within a node: priced as over all",
        )
    job = args.job("deepspeed", _NEUTRAL, layout=layout, facts=_facts(args, data))
    open_fields: dict[str, Sequence[object]] = {}
    if micro is None:
        open_fields["micro_batch"] = (2, 8)
    if not batch and not steps:
        open_fields["accumulation"] = (4, 16)
    if f"{Z}stage" in automatic:
        open_fields["zero"] = (1, 2, 3)
    return open_layout(job, **open_fields)


def _offload(args: Arguments) -> str:
    parameters = args.text(f"{Z}offload_param.device") or (
        "cpu" if args.flag(f"{Z}cpu_offload_params") else "none"
    )
    state = args.text(f"{Z}offload_optimizer.device") or (
        "cpu" if args.flag(f"{Z}cpu_offload") else "none"
    )
    if "nvme" in (parameters, state):
        args.find("note", "nvme: priced as if it were host memory")
    return "parameters" if parameters != "none" else "optimizer" if state != "none" else "none"


def _recompute(args: Arguments, data: Mapping[str, object]) -> str:
    block = data.get("activation_checkpointing")
    if not isinstance(block, Mapping):
        return "none"
    for name in block:
        args.text(f"activation_checkpointing.{name}")
    args.find("note", "activation_checkpointing only sets how: whether layers are computed again stands in the code; priced without",
              legal=("--recompute full",))  # fmt: skip
    return "none"


def _facts(args: Arguments, data: Mapping[str, object]) -> Facts:
    def enabled(name: str) -> bool:
        block = data.get(name)
        return isinstance(block, Mapping) and str(block.get("enabled", True)).lower() in (
            "true",
            "auto",
        )

    precision = (
        "bf16" if enabled("bf16") or enabled("bfloat16") else "fp16" if enabled("fp16") else "fp32"
    )
    kind = (args.text("optimizer.type") or "").lower()
    overlap = args.flag(f"{Z}overlap_comm")
    args.text("data_types.grad_accum_dtype")
    return Facts(
        precision, dp_overlap=overlap, optimizer="sgd" if kind == "sgd" else None, dropout=0.0
    )


def _steps(job: Job) -> int | None:
    text = job.flags.get(_STEPS)
    return int(text) if text and text.isdigit() else None


def deepspeed_refusals(job: Job, gpus: int) -> list[Finding]:
    """What DeepSpeed refuses at start."""
    by, found = job.layout, list[Finding]()
    dp = by.dp_on(gpus)
    steps, batch = _steps(job), by.global_batch
    if steps and batch and _MICRO in job.flags and batch != by.micro_batch * steps * dp:
        found.append(
            Finding(
                "refused",
                f"{_BATCH} {batch} is not {by.micro_batch} x {steps} x {dp}",
                "Check batch related parameters. train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step * world_size",
                (f"{_BATCH}: {by.micro_batch * steps * dp}", f"remove {_STEPS}"),
            )
        )
    elif batch and batch % (by.micro_batch * dp):
        found.append(Finding("refused", f"{_BATCH} {batch} is no multiple of {by.micro_batch} x {dp}",
                             "train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step * world_size",
                             tuple(f"{_BATCH}: {n}" for n in multiples_near(by.micro_batch * dp, batch))))  # fmt: skip
    if gpus % (by.tp * by.cp):
        found.append(
            Finding(
                "refused",
                f"tp={by.tp} x sp={by.cp} does not divide {gpus} devices",
                "world_size must be divisible",
            )
        )
    if by.pp > 1 and by.zero > 1:
        found.append(Finding("refused", f"ZeRO-{by.zero} with a pipeline", "ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism",
                             (f"{Z}stage: 1",)))  # fmt: skip
    if by.offload == "parameters" and by.zero != 3:
        found.append(
            Finding(
                "refused",
                f"offload_param under ZeRO-{by.zero}",
                "parameter offload is only supported with ZeRO stage 3",
                (f"{Z}stage: 3",),
            )
        )
    return [*found, *late_findings(job)]


def deepspeed_config(job: Job) -> dict[str, Any]:
    """The configuration as nested data. Raises NotExpressible if DeepSpeed cannot say the job."""
    by, lacking = job.layout, []
    if by.pp > 1:
        lacking.append(f"a pipeline (pp={by.pp}), which is code there: the nearest is pp=1")
    if by.ep > 1:
        lacking.append(f"ep={by.ep}, which is code there")
    if by.sequence_parallel:
        lacking.append("sequence parallelism over tp: the nearest is sequence_parallel=false")
    if by.copies > 1:
        lacking.append("copies of shards: the nearest is zero_hpz_partition_size")
    if by.recompute not in ("none", "full"):
        lacking.append(f"recompute {by.recompute}: the nearest is that of the model (all layers)")
    if lacking:
        raise NotExpressible(f"DeepSpeed cannot say {'; '.join(lacking)}")
    gpus = job.gpus or by.tp * by.cp
    zero: dict[str, Any] = {"stage": by.zero}
    if by.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu"}
    if by.offload == "parameters":
        zero["offload_param"] = {"device": "cpu"}
    if job.facts.dp_overlap is not None:
        zero["overlap_comm"] = job.facts.dp_overlap
    data: dict[str, Any] = {
        _BATCH: by.batch_on(gpus),
        _MICRO: by.micro_batch,
        _STEPS: by.micro_batches_on(gpus),
        "zero_optimization": zero,
    }
    data |= {job.facts.precision: {"enabled": True}} if job.facts.precision != "fp32" else {}
    data |= {"tensor_parallel": {"autotp_size": by.tp}} if by.tp > 1 else {}
    return data | ({"sequence_parallel_size": by.cp} if by.cp > 1 else {})


def deepspeed_flags(job: Job) -> dict[str, str]:
    """The configuration by path, as texts."""
    return flat_texts(deepspeed_config(job))


def _words_of(job: Job) -> dict[str, str]:
    """The options of a job in the words of its file: a trainer's, or DeepSpeed's. Raises
    NotExpressible if these cannot say the layout.
    """
    if is_trainer(job):
        return trainer_words(job)
    found, file = deepspeed_flags(job), job.flags
    if "tensor_parallel.tp_size" in file:
        found["tensor_parallel.tp_size"] = found.pop("tensor_parallel.autotp_size", "1")
    options = file if job.file is None else job.file.options
    names = (_BATCH, _MICRO, _STEPS)
    said = [name for name in names if options.get(name, "auto") != "auto"]
    if len(said) < 2:  # the trainer says the others
        left_out = [name for name in names if name not in said]
        found |= in_script(job)
    else:
        left_out = [name for name in names if name not in said][-1:]
    return {name: text for name, text in found.items() if name not in left_out}


def _held(job: Job) -> dict[str, Any]:
    """The pins that a job's file cannot change: recomputation stands in the code."""
    return trainer_held(job) if is_trainer(job) else {"recompute": job.layout.recompute}


def _write(job: Job) -> Exported:
    """A `ds_config.json`. Raises NotExpressible if DeepSpeed cannot say the job."""
    losses = (
        ["recomputation: enable it in the model (gradient_checkpointing_enable)"]
        if job.layout.recompute == "full"
        else []
    )
    losses += [f"sequences of {job.seq} tokens: the data decides"] if job.seq else []
    text = json.dumps(deepspeed_config(job), indent=2) + "\n"
    per_node, nodes = nodes_of(job)
    return Exported(
        "deepspeed 0.19",
        text,
        f"deepspeed --num_gpus {per_node} --num_nodes {nodes} train.py --deepspeed_config ds_config.json",
        {},
        tuple(losses),
        "ds_config.json",
    )


DEEPSPEED = Target(
    LIMITS["deepspeed"],
    _reads,
    read_deepspeed,
    deepspeed_refusals,
    _write,
    deepspeed_flags,
    words=_words_of,
    aspects=TRAINER_ASPECTS,
    held=_held,
)
"""DeepSpeed."""
