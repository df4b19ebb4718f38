"""Hugging Face's nanotron: its YAML configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autopar.errors import AutoparError
from autopar.foreign.frameworks.arguments import Arguments, flat_texts, read_mapping
from autopar.foreign.frameworks.unknown import with_open
from autopar.foreign.job import Exported, Facts, Finding, Job
from autopar.foreign.limits.frameworks import LIMITS
from autopar.foreign.limits.stage_cuts import even_stages, stages_of_pipeline
from autopar.foreign.target import (
    NotExpressible,
    SourceFile,
    Target,
    divisors_near,
    head_findings,
    torchrun,
)
from autopar.ir.layout import Layout
from autopar.ir.model_shape import ModelShape

_P, _M, _T = "parallelism.", "model.model_config.", "tokens."
_BESIDE = ("model.init_method", "model.dtype", "model.ddp_bucket_cap_mb", "model.make_vocab")
"""What of the block `model` is not about its dimensions."""
_ENGINES = {"1f1b": "1f1b", "afab": "gpipe"}
_NEUTRAL = re.compile(
    r"(checkpoints|data_stages|general|logging|experiment_logger|profiler?|s3_upload|lighteval|metrics_logging|learning_rate_scheduler|"
    r"kill_switch_path)(\..*)?|optimizer\.(learning_rate.*|optimizer_factory.*|clip_grad|weight_decay.*|adam.*|no_load_optim)|tokenizer\..*|"
    r"model\.(init_method|make_vocab_size_divisible_by|ddp_bucket_cap_mb|tokenizer_.*|hf_.*|seed)(\..*)?|"
    r"tokens\.(train_steps|val_check_interval|limit_.*)|"
    r"model\.model_config\.(bos_token_id|eos_token_id|pad_.*|initializer_range|is_.*|pretraining_tp|(rms_|layer_)norm_eps\w*|rope_.*|use_cache|"
    r"hidden_act|attention_(bias|softmax_in_fp32)|z_loss_.*|scale_attn_weights|(attn|embd)_pdrop|hf_.*|assert_make_.*|seed|"
    r"make_vocab_.*|model_type|tokenizer_.*|_.*)|"
    r"doremi\..*|data\..*|optimizer\.torch_adam.*|parallelism\.(tp_(column_)?linear_async_communication|tp_recompute_allgather)"
)


def _reads(source: SourceFile) -> bool:
    text = source.text
    return (
        re.search(r"^parallelism:", text, re.MULTILINE) is not None
        and re.search(
            r"\b(pp_engine|tp_mode|batch_accumulation_per_replica)\s*:", text, re.MULTILINE
        )
        is not None
    )


def _read(source: SourceFile) -> Job:
    """The job of a nanotron configuration. Raises AutoparError if it is none."""
    data = read_mapping(source.text, source.name)
    if not isinstance(data.get("parallelism"), dict):
        raise AutoparError(f"no job: {source.name} has no block parallelism")
    return with_open(_job_of, _as_today(flat_texts(data)))


def _job_of(values: Mapping[str, str]) -> tuple[Job, Arguments]:
    """The job of options by path, and the arguments as read."""
    args = Arguments(values)
    dp, tp, pp = (args.whole(f"{_P}{name}") or 1 for name in ("dp", "tp", "pp"))
    ep, cp = (
        args.whole(f"{_P}expert_parallel_size") or 1,
        args.whole(f"{_P}context_parallel_size") or 1,
    )
    steps, micro = (
        args.whole(f"{_T}batch_accumulation_per_replica") or 1,
        args.whole(f"{_T}micro_batch_size") or 1,
    )
    mode = args.text(f"{_P}tp_mode") or "ALL_REDUCE"
    engine = args.text(f"{_P}pp_engine") or "1f1b"
    if ep > 1:
        args.find(
            "note",
            f"expert_parallel_size multiplies the devices in nanotron: {dp} x {ep} data-parallel ranks",
        )
    layout = Layout(
        tp=tp,
        pp=pp,
        cp=cp,
        dp=dp * ep,
        ep=ep,
        micro_batch=micro,
        global_batch=micro * steps * dp * ep,
        zero=args.whole("optimizer.zero_stage", least=0) or 0,
        recompute=_recompute(args),
        schedule=_ENGINES.get(engine.lower(), "1f1b") if pp > 1 else "none",
        sequence_parallel=mode.upper() == "REDUCE_SCATTER" and tp > 1,
    )
    dtype = args.text("model.dtype") or "bfloat16"
    precision = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(dtype, "bf16")
    accumulate = args.flag("optimizer.accumulate_grad_in_fp32")
    dropout = args.number(f"{_M}resid_pdrop") or 0.0
    facts = Facts(precision, grads="bf16" if accumulate is False else "fp32", dropout=dropout)
    shape, seq, gpus = _shape(args), args.whole(f"{_T}sequence_length"), dp * ep * tp * pp * cp
    layout = replace(layout, stages=_uneven(stages_of_pipeline(shape, pp, tp)))
    if empty := layout.stages.count(0):
        args.find(
            "note",
            f"{empty} of {pp} ranks of the pipeline have no layer: it cuts by the cost of layers and head",
        )
    job = args.job(
        "nanotron", _NEUTRAL, shape=shape, layout=layout, gpus=gpus, seq=seq, facts=facts
    )
    return job, args


def _uneven(stages: tuple[int, ...]) -> tuple[int, ...]:
    """The layers of each stage, or () if all have as many."""
    return stages if len(set(stages)) > 1 else ()


def stages_for(job: Job) -> tuple[int, tuple[int, ...]]:
    """(1, layers of each stage) of a job whose model is known now."""
    by = job.layout
    return 1, _uneven(stages_of_pipeline(job.shape, by.pp, by.tp))


def _as_today(values: dict[str, str]) -> dict[str, str]:
    """The values with the dimensions of the model where they stand today: in 2023 they stood in the
    block `model` itself, some by other names.
    """
    if any(path.startswith(_M) for path in values):
        return values
    names = {"n_layer": "num_hidden_layers", "num_layers": "num_hidden_layers",
             "n_inner": "intermediate_size", "ffn_hidden_size": "intermediate_size"}  # fmt: skip
    found: dict[str, str] = {}
    for path, value in values.items():
        block, _, name = path.rpartition(".")
        inside = block == "model" and not path.startswith(_BESIDE)
        found[f"{_M}{names.get(name, name)}" if inside else path] = value
    return found


def _recompute(args: Arguments) -> str:
    granularity = (args.text(f"{_P}recompute_granularity") or "none").lower()
    again = args.flag(f"{_P}recompute_layer") or granularity == "full"
    return "full" if again else "selective" if granularity == "selective" else "none"


def _heads_of_keys(args: Arguments, heads: int) -> int:
    """The heads of keys and values; StarCoder2 names them otherwise, and GPT has one or all."""
    found = args.whole(f"{_M}num_key_value_heads")
    grouped, several = args.flag(f"{_M}grouped_query"), args.whole(f"{_M}num_kv_heads")
    if found is None and grouped is not False and several:
        return several
    one = args.flag(f"{_M}multi_query") or "gpt_bigcode" in args.values.get(f"{_M}model_type", "")
    return found or (1 if one else heads)


def _shape(args: Arguments) -> ModelShape:
    hidden, heads = args.whole(f"{_M}hidden_size") or 0, args.whole(f"{_M}num_attention_heads") or 0
    args.whole(f"{_M}max_position_embeddings")
    experts = (
        args.whole(f"{_M}moe_num_experts", f"{_M}num_experts", f"{_M}moe_config.num_experts") or 0
    )
    ffn = args.whole(f"{_M}intermediate_size") or 4 * hidden
    return ModelShape(
        layers=args.whole(f"{_M}num_hidden_layers") or 0,
        hidden=hidden,
        heads=heads,
        kv_heads=_heads_of_keys(args, heads),
        head_dim=args.whole(f"{_M}head_dim") or (hidden // heads if heads else 0),
        ffn=ffn,
        vocab=args.whole(f"{_M}vocab_size") or 0,
        experts=experts,
        top_k=(
            args.whole(
                f"{_M}num_experts_per_tok", f"{_M}num_experts_per_token", f"{_M}moe_config.top_k"
            )
            or 1
        )
        if experts
        else 0,
        moe_ffn=ffn if experts else 0,
        gated=args.text(f"{_M}activation_function") in (None, "silu", "swiglu"),
        tied=bool(args.flag(f"{_M}tie_word_embeddings")),
    )


def _refusals(job: Job, gpus: int) -> list[Finding]:
    """What nanotron refuses at start."""
    by, shape, found = job.layout, job.shape, list[Finding]()
    total = by.tp * by.pp * by.cp * by.dp_on(gpus)
    if total != gpus:
        fixed = by.tp * by.pp * by.cp * by.ep
        legal = (f"{_P}dp: {gpus // fixed}",) if gpus % fixed == 0 else ()
        found.append(Finding("refused", f"dp x expert_parallel_size x tp x pp = {total}, and there are {gpus} devices",
                             "world_size must be equal to dp * pp * tp * expert_parallel_size", legal))  # fmt: skip
    found += head_findings(job, "must be divisible by TP size", f"{_P}tp:")
    number = by.micro_batches_on(gpus)
    if by.pp > 1 and by.schedule == "1f1b" and number < by.pp - 1:
        found.append(
            Finding(
                "refused",
                f"{number} micro-batches for 1F1B on {by.pp} ranks",
                "Number of micro-batches must be at least pp - 1",
                (f"{_T}batch_accumulation_per_replica: {by.pp}",),
            )
        )
    if by.zero > 1:
        found.append(
            Finding(
                "refused",
                f"zero_stage {by.zero}",
                "only ZeRO stages 0 and 1 are supported",
                ("optimizer.zero_stage: 1",),
            )
        )
    if by.ep > 1 and shape.experts and shape.experts % by.ep:
        found.append(
            Finding(
                "refused",
                f"{by.ep} does not divide {shape.experts} experts",
                "num_experts must be divisible by expert_parallel_size",
                tuple(
                    f"{_P}expert_parallel_size: {d}" for d in divisors_near(shape.experts, by.ep)
                ),
            )
        )
    return found


def _config_of(job: Job) -> dict[str, Any]:
    """The blocks of a configuration. Raises NotExpressible if nanotron cannot run the job."""
    by, lacking = job.layout, []
    if by.vpp > 1:
        lacking.append(f"{by.vpp} stages a rank: the nearest is one")
    if by.zero > 1 or by.copies > 1:
        lacking.append(f"ZeRO-{by.zero} over {by.copies} copies: the nearest is ZeRO-1 over all")
    if by.recompute not in ("none", "full") or by.recompute_layers:
        lacking.append(f"recompute {by.recompute}: the nearest is recompute_layer (all layers)")
    if by.schedule not in ("none", "1f1b", "gpipe"):
        lacking.append(f"schedule {by.schedule}: the nearest is 1f1b")
    if by.offload != "none" or by.order:
        lacking.append("offloading or another rank order")
    cut = stages_of_pipeline(job.shape, by.pp, by.tp)
    stages = by.stages or even_stages(job.shape.layers, by.pp)
    if (cut and stages != cut) or (not cut and len(set(by.stages)) > 1):
        sizes = "-".join(map(str, stages)) or "equally many"
        nearest = f": the nearest is {'-'.join(map(str, cut))}" if cut else ""
        lacking.append(
            f"stages of {sizes} layers, since it cuts by the cost of layers and head{nearest}"
        )
    if lacking:
        raise NotExpressible(f"nanotron cannot say {'; '.join(lacking)}")
    dp = by.dp_on(job.gpus or by.tp * by.pp * by.cp)
    number = by.batch_on(job.gpus or dp) // (by.micro_batch * dp)
    parallelism = {"dp": dp // by.ep, "expert_parallel_size": by.ep, "tp": by.tp, "pp": by.pp, "context_parallel_size": by.cp,
                   "pp_engine": "afab" if by.schedule == "gpipe" else "1f1b",
                   "tp_mode": "REDUCE_SCATTER" if by.sequence_parallel else "ALL_REDUCE",
                   "recompute_layer": by.recompute == "full"}  # fmt: skip
    tokens = {
        "batch_accumulation_per_replica": number,
        "micro_batch_size": by.micro_batch,
        "sequence_length": job.seq or 0,
    }
    dtype = {"bf16": "bfloat16", "fp16": "float16"}.get(job.facts.precision, "float32")
    return {
        "parallelism": parallelism,
        "tokens": {name: value for name, value in tokens.items() if value},
        "optimizer": {"zero_stage": by.zero, "accumulate_grad_in_fp32": job.facts.grads != "bf16"},
        "model": {"dtype": dtype} | _model(job.shape),
    }


def _model(shape: ModelShape) -> dict[str, Any]:
    if shape.lacking or shape.experts:
        return {}
    return {"model_config": {
        "num_hidden_layers": shape.layers, "hidden_size": shape.hidden, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "intermediate_size": shape.ffn, "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.tied,
    }}  # fmt: skip


def _flags_of(job: Job) -> dict[str, str]:
    """The configuration by path, as texts."""
    return flat_texts(_config_of(job))


def _words_of(job: Job) -> dict[str, str]:
    """The configuration by path, in the words of its file: nanotron once had another option for what
    is computed again. Raises NotExpressible as `_config_of`.
    """
    found, earlier, mode = _flags_of(job), f"{_P}recompute_granularity", f"{_P}tp_mode"
    if job.layout.tp == 1 and mode in job.flags:  # which counts with tp alone
        found[mode] = job.flags[mode]
    if earlier in job.flags:
        del found[f"{_P}recompute_layer"]
        found[earlier] = "FULL" if job.layout.recompute == "full" else "null"
    return found


def _write(job: Job) -> Exported:
    """The blocks of a nanotron configuration that a layout fixes. Raises NotExpressible if nanotron
    cannot run the job.
    """
    import yaml

    text = yaml.safe_dump(_config_of(job), sort_keys=False)
    launch = f"{torchrun(job)} run_train.py --config-file config.yaml"
    losses = [
        "the blocks general, checkpoints, data_stages, tokenizer and the learning rate are yours"
    ]
    losses += ["the model's dimensions"] if job.shape.lacking or job.shape.experts else []
    return Exported(
        "nanotron 0.5",
        text,
        launch,
        {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        tuple(losses),
        "config.yaml",
    )


NANOTRON = Target(
    LIMITS["nanotron"],
    _reads,
    _read,
    _refusals,
    _write,
    _flags_of,
    stages=stages_for,
    words=_words_of,
)
"""Hugging Face's nanotron."""
