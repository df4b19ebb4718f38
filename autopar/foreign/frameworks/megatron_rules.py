"""What Megatron-LM refuses at start, and what it can run.

The words in quotation marks are those of `validate_args`, `TransformerConfig` and the schedules of
megatron-core 0.19.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from autopar.foreign.frameworks.arguments import Arguments, is_none
from autopar.foreign.frameworks.megatron_layout import counted_stages
from autopar.foreign.job import Finding, Job
from autopar.foreign.target import divisors_near, multiples_near

_Check = Callable[[Job, int], Iterator[Finding]]
TP, PP, CP = (
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--context-parallel-size",
)
EP, ETP = "--expert-model-parallel-size", "--expert-tensor-parallel-size"
_MICRO, _GLOBAL = "--micro-batch-size", "--global-batch-size"


def megatron_refusals(job: Job, gpus: int) -> list[Finding]:
    """What Megatron-LM refuses at start, for the job on `gpus` devices, each with legal values."""
    given = {name: text for name, text in job.flags.items() if not is_none(text)}
    known = replace(job, flags=given)
    return [finding for check in _CHECKS for finding in check(known, gpus)]


def _refused(what: str, theirs: str, *legal: str) -> Finding:
    return Finding("refused", what, theirs, legal)


def _on(job: Job, name: str) -> bool:
    return Arguments(job.flags).flag(name) is True


def _world(job: Job, gpus: int) -> Iterator[Finding]:
    by = job.layout
    model = by.tp * by.pp * by.cp
    if gpus % model:
        legal = [f"{option} {d}" for option, own in ((TP, by.tp), (PP, by.pp), (CP, by.cp)) if own > 1
                 for d in divisors_near(gpus * own // model or 1, own) if gpus % (model // own * d) == 0]  # fmt: skip
        yield _refused(f"tp={by.tp} x pp={by.pp} x cp={by.cp} = {model} does not divide {gpus} devices",
                       f"world size ({gpus}) is not divisible by total_model_size", *legal)  # fmt: skip
    elif by.dp and by.dp * model != gpus:
        yield Finding(
            "contradiction",
            f"data_parallel_size {by.dp} x {model} = {by.dp * model} devices, and there are {gpus}",
        )


def _legal_tp(job: Job, gpus: int) -> list[str]:
    """The degrees of tp next to the job's that suit heads, groups and devices."""
    shape, by = job.shape, job.layout
    heads, groups = shape.heads or gpus, shape.kv_heads or gpus
    fitting = [
        d
        for d in range(1, min(gpus, 4096) + 1)
        if gpus % (d * by.pp * by.cp) == 0 == heads % d and 0 in (groups % d, d % groups)
    ]
    below, above = [d for d in fitting if d < by.tp], [d for d in fitting if d > by.tp]
    return [f"{TP} {d}" for d in below[-1:] + above[:1]]


def _heads(job: Job, gpus: int) -> Iterator[Finding]:
    shape, tp = job.shape, job.layout.tp
    if shape.heads and shape.heads % tp:
        legal = _legal_tp(job, gpus)
        yield _refused(f"tp={tp} does not divide {shape.heads} attention heads",
                       f"num_attention_heads ({shape.heads}) must be a multiple of tensor_model_parallel_size ({tp}).", *legal)  # fmt: skip
    groups = shape.kv_heads
    if groups and groups % tp and tp % groups:
        legal = _legal_tp(job, gpus)
        yield _refused(
            f"{groups} groups of keys and values are neither a multiple nor a divisor of tp={tp}",
            f"num_query_groups ({groups}) must be a multiple or divisor of tensor_model_parallel_size ({tp}).",
            *legal,
        )
    if (
        shape.hidden
        and shape.heads
        and shape.hidden % shape.heads
        and not job.flags.get("kv_channels")
    ):
        legal = [f"--hidden-size {n}" for n in multiples_near(shape.heads, shape.hidden)]
        yield _refused(f"{shape.heads} heads do not divide hidden size {shape.hidden}, and --kv-channels is not given",
                       "assert args.hidden_size % args.num_attention_heads == 0", *legal)  # fmt: skip


def _layers(job: Job, gpus: int) -> Iterator[Finding]:
    by, layers = job.layout, job.shape.layers
    if by.pp == 1 or not layers or "pipeline_model_parallel_layout" in job.flags:
        return
    ends = [f for f in ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers",
                        "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage") if f in job.flags]  # fmt: skip
    embedding, loss = (
        _on(job, "account_for_embedding_in_pipeline_split"),
        _on(job, "account_for_loss_in_pipeline_split"),
    )
    counted = layers + embedding + loss
    if ends and (embedding or loss):
        yield _refused("layers of the first or last stage are given together with embedding or loss that count as layers",
                       "num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage cannot be set at the same time with "
                       "account_for_embedding_in_pipeline_split")  # fmt: skip
    elif by.stages:
        return
    elif ends:
        yield _refused(f"{layers} layers less those of the first and last stage cannot be shared out over the other stages evenly",
                       "number of layers at middle stage must be divisible by the middle pipeline model parallel size")  # fmt: skip
    elif counted % by.pp:
        legal = [f"{PP} {d}" for d in divisors_near(counted, by.pp) if gpus % d == 0]
        if not (embedding or loss) and counted_stages(layers, by.pp * by.vpp, True, True):
            legal.append(
                "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
            )
        what = f"{layers} layers{' with embedding or loss' if counted > layers else ''} = {counted} are not divisible by pp={by.pp}"
        yield _refused(
            what, "Number of layers should be divisible by the pipeline-model-parallel size", *legal
        )
    elif by.vpp > 1 and counted // by.pp % by.vpp:
        legal = [
            f"--num-virtual-stages-per-pipeline-rank {d}"
            for d in divisors_near(counted // by.pp, by.vpp)
        ]
        yield _refused(
            f"{counted // by.pp} layers of a rank are not divisible by {by.vpp} virtual stages",
            "number of layers on each pipeline rank must be divisible by virtual_pipeline_model_parallel_size",
            *legal,
        )


def _layout_text(job: Job, gpus: int) -> Iterator[Finding]:
    by, flags = job.layout, job.flags
    names = (
        "num_layers_per_virtual_pipeline_stage",
        "num_virtual_stages_per_pipeline_rank",
        "pipeline_model_parallel_layout",
    )
    both = [name for name in names if name in flags]
    if len(both) > 1:
        yield _refused(
            f"{' and '.join(both)} are given together",
            "No more than one of the following arguments can be set at the same time",
            *(f"only --{name.replace('_', '-')}" for name in both),
        )
    text = flags.get("pipeline_model_parallel_layout", "")
    if not text:
        return
    stages = len(by.stages)
    if stages % by.pp:
        yield _refused(f"the layout has {stages} stages, which pp={by.pp} does not divide",
                       "The length of pipeline_model_parallel_layout must be divisible by pipeline_model_parallel_size",
                       *(f"{PP} {d}" for d in divisors_near(stages, by.pp)))  # fmt: skip
    plain = text.strip("'\"").strip("| ")
    if not plain.startswith("E") or not plain.endswith("L"):
        yield _refused(
            "the layout does not begin with E and end with L",
            "The first layer must be embedding; the last layer must be loss",
        )
    if job.shape.layers and sum(by.stages) != job.shape.layers:
        yield _refused(f"the layout has {sum(by.stages)} layers and the model {job.shape.layers}",
                       f"Number of decoder layers {sum(by.stages)} must match num_layers {job.shape.layers}")  # fmt: skip
    others = [
        name
        for name in (
            "decoder_first_pipeline_num_layers",
            "decoder_last_pipeline_num_layers",
            "account_for_embedding_in_pipeline_split",
            "account_for_loss_in_pipeline_split",
        )
        if _on(job, name)
    ]
    if others:
        yield _refused(
            f"{', '.join(others)} beside a layout",
            "pipeline_model_parallel_layout cannot be set with other pipeline layout arguments",
        )


def _batch(job: Job, gpus: int) -> Iterator[Finding]:
    by = job.layout
    rows = by.micro_batch * by.dp_on(gpus)
    batch = by.batch_on(gpus)
    if batch % rows:
        legal = [f"{_GLOBAL} {n}" for n in multiples_near(rows, batch)]
        legal += (
            [f"{_MICRO} {d}" for d in divisors_near(batch // by.dp_on(gpus), by.micro_batch)]
            if batch % by.dp_on(gpus) == 0
            else []
        )
        yield _refused(f"global batch {batch} is no multiple of micro-batch {by.micro_batch} x dp {by.dp_on(gpus)} = {rows}",
                       f"global batch size ({batch}) is not divisible by micro batch size ({by.micro_batch}) times data parallel size "
                       f"({by.dp_on(gpus)})", *legal)  # fmt: skip
        return
    if by.pp > 1 and by.vpp > 1:
        number, group = batch // rows, by.group or by.pp
        left = number % group
        if 0 < left < by.pp or (group > number and number < by.pp):
            legal = [f"{_GLOBAL} {n * rows}" for n in multiples_near(group, number)]
            yield _refused(
                f"{number} micro-batches under the interleaved schedule leave {left} behind groups of {group}, fewer than pp={by.pp}",
                "The remainder of M (the total micro-batches) divided by N (number of contiguous micro-batches in a virtual pipeline "
                "stage) should be 0, or larger than or equal to the pipeline-parallel size",
                *legal,
            )


def _sequence(job: Job, gpus: int) -> Iterator[Finding]:
    cp, seq = job.layout.cp, job.seq
    if seq and cp > 1 and seq % (2 * cp):
        legal = [f"--seq-length {n}" for n in multiples_near(2 * cp, seq)]
        yield _refused(f"{seq} tokens are no multiple of 2 x cp = {2 * cp}",
                       "seq-length should be a multiple of 2 * context-parallel-size if context-parallel-size > 1.", *legal)  # fmt: skip
    most = job.flags.get("max_position_embeddings", "")
    if seq and most.isdigit() and int(most) < seq:
        yield _refused(f"sequences of {seq} tokens are longer than {most} positions",
                       f"max_position_embeddings ({most}) must be greater than or equal to seq_length ({seq}).",
                       f"--max-position-embeddings {seq}")  # fmt: skip


def _experts(job: Job, gpus: int) -> Iterator[Finding]:
    by, experts = job.layout, job.shape.experts
    if by.ep > 1 and not experts and job.shape.layers:
        yield _refused(
            f"ep={by.ep}, and the model has no experts",
            "num_experts must be non None to use expert model parallelism",
            f"{EP} 1",
        )
    elif by.ep > 1 and experts % by.ep:
        yield _refused(
            f"ep={by.ep} does not divide {experts} experts",
            "Number of experts should be a multiple of expert model parallel_size.",
            *(f"{EP} {d}" for d in divisors_near(experts, by.ep)),
        )
    if not experts:
        return
    etp = by.etp or by.tp
    unit = etp * by.ep * by.pp
    if gpus % unit:
        per_stage = max(1, gpus // by.pp)
        legal = [f"{EP} {d}" for d in divisors_near(max(1, per_stage // etp), by.ep)]
        legal += [f"{ETP} 1"] if etp > 1 and gpus % (by.ep * by.pp) == 0 else []
        yield _refused(f"the experts' tp {etp} x ep {by.ep} x pp {by.pp} = {unit} does not divide {gpus} devices",
                       f"world_size ({gpus}) is not divisible by expert_tensor_model_pipeline_parallel size ({unit})", *legal)  # fmt: skip
    if etp > 1 and "num_experts" in job.flags and not _on(job, "disable_bias_linear"):
        yield _refused(
            f"experts with biases and their tp {etp}",
            "Bias in Moe is only supported when ETP==1",
            "--disable-bias-linear",
            f"{ETP} 1",
        )
    if by.tp > 1 and not by.sequence_parallel:
        yield _refused(
            "a mixture of experts with tp > 1 needs sequence parallelism",
            "sequence parallelism must be used",
            "--sequence-parallel",
        )
    if etp > 1 and job.shape.moe_ffn and job.shape.moe_ffn % etp:
        yield _refused(
            f"the experts' tp {etp} does not divide their width {job.shape.moe_ffn}",
            "is not divisible by",
            f"{ETP} 1",
        )


def _switches(job: Job, gpus: int) -> Iterator[Finding]:
    by = job.layout
    if _on(job, "overlap_param_gather"):
        if not (
            _on(job, "use_distributed_optimizer")
            or _on(job, "use_megatron_fsdp")
            or "dist_muon" in job.flags.get("optimizer", "")
        ):
            yield _refused("--overlap-param-gather without the distributed optimizer",
                           "--overlap-param-gather only supported with distributed optimizer, megatron fsdp, or dist_muon",
                           "--use-distributed-optimizer")  # fmt: skip
        if not _on(job, "overlap_grad_reduce"):
            yield _refused(
                "--overlap-param-gather without --overlap-grad-reduce",
                "Must use --overlap-param-gather with --overlap-grad-reduce",
                "--overlap-grad-reduce",
            )
    # Megatron-Bridge switches it off itself
    if _on(job, "tp_comm_overlap") and not by.sequence_parallel and job.framework != "bridge":
        yield _refused(
            "--tp-comm-overlap without sequence parallelism",
            "Tensor parallel communication/GEMM overlap can happen only when sequence parallelism is enabled",
            "--sequence-parallel",
        )
    if by.vpp > 1 and by.pp == 1:
        yield _refused(
            "virtual stages without a pipeline",
            "When interleaved schedule is used, pipeline-model-parallel size should be greater than 1",
            f"{PP} 2",
        )
    elif by.vpp > 1 and by.pp == 2 and _on(job, "no_overlap_p2p_communication"):
        yield _refused(
            "virtual stages on 2 ranks without overlapped messages",
            "When interleaved schedule is used and p2p communication overlap is disabled, pipeline-model-parallel size should be "
            "greater than 2",
            f"{PP} 4",
            "drop --no-overlap-p2p-communication",
        )
    if _on(job, "optimizer_cpu_offload") and not _on(job, "use_precision_aware_optimizer"):
        yield _refused(
            "--optimizer-cpu-offload without the precision-aware optimizer",
            "The optimizer cpu offload must be used in conjunction with `--use-precision-aware-optimizer`",
            "--use-precision-aware-optimizer",
        )
    if _on(job, "bf16") and _on(job, "fp16"):
        yield _refused("bf16 and fp16 are both on", "assert not args.bf16", "--bf16")


def _recompute(job: Job, gpus: int) -> Iterator[Finding]:
    names = ("recompute_granularity", "recompute_method", "recompute_num_layers")
    granularity, method, number = map(Arguments(job.flags).text, names)
    if granularity == "selective" and method is not None:
        yield _refused(
            "recompute_method beside selective recomputation",
            "recompute method is not yet supported for selective recomputing granularity",
            "drop --recompute-method",
        )
    if granularity == "full" and method is None:
        yield _refused(
            "full recomputation without a method",
            'recompute_method must be "block" or "uniform"',
            "--recompute-method uniform",
        )
    if granularity == "full" and number is None:
        yield _refused("full recomputation without a number of layers",
                       "recompute_num_layers must be between 1 and num_layers_per_pipeline_rank", "--recompute-num-layers 1")  # fmt: skip


def _sharding(job: Job, gpus: int) -> Iterator[Finding]:
    by = job.layout
    if _on(job, "use_torch_fsdp2"):
        if by.pp > 1:
            yield _refused(
                "FSDP2 with a pipeline",
                "--use-torch-fsdp2 is not supported with pipeline parallelism",
                f"{PP} 1",
            )
        if by.ep > 1:
            yield _refused(
                "FSDP2 with expert parallelism",
                "--use-torch-fsdp2 is not supported with expert parallelism",
                f"{EP} 1",
            )
        if _on(job, "use_distributed_optimizer"):
            yield _refused("FSDP2 with the distributed optimizer", "--use-torch-fsdp2 is not supported with MCore's distributed optimizer",
                           "drop --use-distributed-optimizer")  # fmt: skip
    if _on(job, "use_megatron_fsdp") and job.flags.get("ckpt_format") != "fsdp_dtensor":
        yield _refused("Megatron-FSDP with another checkpoint format", "Megatron-FSDP requires the `fsdp_dtensor` checkpointing format.",
                       "--ckpt-format fsdp_dtensor")  # fmt: skip
    ranks = by.dp_on(gpus) * by.cp
    if by.copies > 1 and ranks % by.copies:
        yield _refused(f"{by.copies} instances of the distributed optimizer do not divide dp x cp = {ranks}", "is not divisible by",
                       *(f"--num-distributed-optimizer-instances {d}" for d in divisors_near(ranks, by.copies)))  # fmt: skip


def _connections(job: Job, gpus: int) -> Iterator[Finding]:
    """Only where the file sets the variable: a dump of arguments does not tell."""
    value, by = job.flags.get("env_CUDA_DEVICE_MAX_CONNECTIONS"), job.layout
    sharded = _on(job, "use_torch_fsdp2") or _on(job, "use_megatron_fsdp")
    if value is None:
        return
    if sharded and value == "1":
        yield _refused("CUDA_DEVICE_MAX_CONNECTIONS=1 with FSDP", "FSDP requires CUDA_DEVICE_MAX_CONNECTIONS > 1 or unset.",
                       "unset CUDA_DEVICE_MAX_CONNECTIONS")  # fmt: skip
    elif not sharded and value != "1" and by.tp * by.cp > 1:
        yield _refused(f"CUDA_DEVICE_MAX_CONNECTIONS={value} with tp or cp, before Blackwell",
                       "Using tensor model parallelism or context parallelism require setting the environment variable "
                       "CUDA_DEVICE_MAX_CONNECTIONS to 1", "export CUDA_DEVICE_MAX_CONNECTIONS=1")  # fmt: skip


_CHECKS: tuple[_Check, ...] = (
    _world,
    _heads,
    _layers,
    _layout_text,
    _batch,
    _sequence,
    _experts,
    _switches,
    _recompute,
    _sharding,
    _connections,
)
