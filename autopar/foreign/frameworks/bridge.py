"""Megatron-Bridge: overrides of its recipes, `path=value` as Hydra reads them, and its YAML."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autopar.errors import AutoparError
from autopar.foreign.frameworks.arguments import is_false, options_of
from autopar.foreign.frameworks.megatron_options import megatron_job, megatron_stages
from autopar.foreign.frameworks.megatron_read import job_of_mapping, read_megatron
from autopar.foreign.frameworks.megatron_rules import megatron_refusals
from autopar.foreign.frameworks.megatron_words import MEGATRON_ASPECTS
from autopar.foreign.frameworks.megatron_write import megatron_flags
from autopar.foreign.frameworks.unknown import ALL_OPTIONS, SHAPE, each, unstated
from autopar.foreign.job import Exported, Finding, Job
from autopar.foreign.limits.frameworks import LIMITS
from autopar.foreign.target import NotExpressible, SourceFile, Target, torchrun
from autopar.foreign.texts.python_calls import precision_record
from autopar.foreign.texts.python_values import text_of

_NAMES = {
    "num-virtual-stages-per-pipeline-rank": "model.virtual_pipeline_model_parallel_size",
    "num-experts": "model.num_moe_experts",
    "swiglu": "model.gated_linear_unit",
    "micro-batch-size": "train.micro_batch_size",
    "global-batch-size": "train.global_batch_size",
    "use-distributed-optimizer": "ddp.use_distributed_optimizer",
    "num-distributed-optimizer-instances": "ddp.num_distributed_optimizer_instances",
    "overlap-grad-reduce": "ddp.overlap_grad_reduce",
    "overlap-param-gather": "ddp.overlap_param_gather",
    "use-megatron-fsdp": "ddp.use_megatron_fsdp",
    "data-parallel-sharding-strategy": "ddp.data_parallel_sharding_strategy",
    "tp-comm-overlap": "comm_overlap.tp_comm_overlap",
    "optimizer-cpu-offload": "optimizer.optimizer_cpu_offload",
    "optimizer": "optimizer.optimizer",
    "ckpt-format": "checkpoint.ckpt_format",
    "microbatch-group-size-per-virtual-pipeline-stage": "model.microbatch_group_size_per_vp_stage",
    "fp8-format": "model.fp8",
    "use-tp-pp-dp-mapping": "dist.use_tp_pp_dp_mapping",
}
"""Paths of arguments whose name differs, or that are not of the model. Others are `model.NAME`."""
_TURNED = {
    "untie-embeddings-and-output-weights": ("model.share_embeddings_and_output_weights", "false"),
    "disable-bias-linear": ("model.add_bias_linear", "false"),
    "grad-reduce-in-bf16": ("ddp.grad_reduce_in_fp32", "false"),
    "no-overlap-p2p-communication": ("comm_overlap.overlap_p2p_comm", "false"),
    "no-gradient-accumulation-fusion": ("model.gradient_accumulation_fusion", "false"),
}
"""Arguments that are the opposite of a path."""
_OFF = {
    "model.tensor_model_parallel_size": "1",
    "model.pipeline_model_parallel_size": "1",
    "model.virtual_pipeline_model_parallel_size": "null",
    "model.pipeline_model_parallel_layout": "null",
    "model.context_parallel_size": "1",
    "model.expert_model_parallel_size": "1",
    "model.expert_tensor_parallel_size": "null",
    "model.sequence_parallel": "false",
    "model.recompute_granularity": "null",
    "model.hidden_dropout": "0.1",
    "model.cross_entropy_loss_fusion": "false",
    "model.gradient_accumulation_fusion": "true",
    "ddp.use_distributed_optimizer": "false",
    "ddp.num_distributed_optimizer_instances": "1",
    "ddp.use_megatron_fsdp": "false",
    "ddp.data_parallel_sharding_strategy": "no_shard",
    "ddp.overlap_grad_reduce": "false",
    "ddp.overlap_param_gather": "false",
    "ddp.grad_reduce_in_fp32": "true",
    "comm_overlap.tp_comm_overlap": "false",
    "optimizer.optimizer": "adam",
    "optimizer.optimizer_cpu_offload": "false",
}
"""What a layout leaves out, by path: the value that it has then."""
_LEFT_OUT = ("max-position-embeddings", "group-query-attention", "multi-latent-attention")
_OVERRIDE = re.compile(
    r"\+{0,2}((?:model|train|ddp|comm_overlap|optimizer|checkpoint|dist|mixed_precision)(?:\.\w+)?)=(.*)",
    re.DOTALL,
)
_BACK = {path.rpartition(".")[2]: name for name, path in _NAMES.items()}
_TURNED_BACK = {path.rpartition(".")[2]: name for name, (path, _) in _TURNED.items()}
_SAID = {
    "dp_overlap": ("overlap_grad_reduce",),
    "tp_overlap": ("tp_comm_overlap",),
    "pp_overlap": ("overlap_p2p_comm", "no_overlap_p2p_communication"),
    "dropout": ("hidden_dropout",),
    "fused_loss": ("cross_entropy_loss_fusion",),
    "fused_accumulation": ("no_gradient_accumulation_fusion",),
}
"""The arguments that say a fact. What a file leaves out, a recipe decides."""


_PERFORMANCE = re.compile(
    r"scripts/performance/(run_script|setup_experiment)\.py|\bsetup_experiment\.py"
)
"""The programs that start NVIDIA's performance recipes by name."""
_SHORT = {
    "tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size", "cp": "context_parallel_size",
    "vp": "virtual_pipeline_model_parallel_size", "ep": "expert_model_parallel_size", "et": "expert_tensor_parallel_size",
    "mb": "micro_batch_size", "gb": "global_batch_size", "sl": "seq_length", "ng": "num_gpus", "gn": "gpus_per_node",
    "vpp": "virtual_pipeline_model_parallel_size", "mr": "model_recipe_name",
}  # fmt: skip
"""Their short options."""
_DTYPES = {"fp8_cs": "tensorwise", "fp8_ds": "delayed", "fp8_mx": "mxfp8", "fp8_sc": "blockwise"}
"""The recipe of fp8 by their `--compute_dtype`."""
_ASIDE = ("gpu", "model_family_name", "config_variant", "task", "domain", "data", "account", "partition", "compute_dtype")  # fmt: skip


_RECIPES = re.compile(
    r"\b(tensor|pipeline|context|expert)(_model)?_parallel(_size|ism)\b|megatron\.bridge|^\s*(import|from) nemo_run|nemo\.collections",
    re.MULTILINE,
)
"""What files of Python say that hold recipes."""


def _reads(source: SourceFile) -> bool:
    if _PERFORMANCE.search(source.text) and not source.name.endswith(".py"):
        return True
    if source.name.endswith(".py"):
        return _RECIPES.search(source.text) is not None
    if re.search(r"run_recipe\.py", source.text) and re.search(r"--recipe\b", source.text):
        return not source.name.endswith(".py")
    paths = re.findall(r"(?<![\w.])\+{0,2}(model|train|ddp)\.\w+\s*=", source.text)
    blocks = re.findall(r"^(model|train|ddp|comm_overlap):", source.text, re.MULTILINE)
    return ("tensor_model_parallel_size" in source.text) and (
        len(paths) > 1 or len(set(blocks)) > 1
    )


def _read(source: SourceFile) -> Job:
    """The job of overrides in a script, or of the YAML of a recipe. Raises AutoparError if there is
    none.
    """
    if _PERFORMANCE.search(source.text) and not source.name.endswith(".py"):
        return _of_performance(source)
    if source.name.endswith(".py"):
        return each(read_megatron(source), _of_recipe)
    if source.name.endswith((".yaml", ".yml")):
        return _of_yaml(source)
    script = source.script()
    words = [word for command, _ in script.commands for word in command]
    # overrides in a variable that a nested shell expands
    words += [
        word for text in script.variables.values() if isinstance(text, str) for word in text.split()
    ]
    found = [_OVERRIDE.fullmatch(word) for word in words]
    values = {match[1]: match[2] for match in found if match} | _launcher(words)
    if not any("." in path for path in values):
        raise AutoparError(f"no job: no command of {source.name} overrides a recipe")
    options: dict[str, str] = {}
    for path, value in values.items():
        name = path.rpartition(".")[2]
        options |= _argument(name, value)
    precision = options.pop("mixed_precision", "")
    if precision:
        fields = precision_record(precision).fields
        options = {name: text_of(value) for name, value in fields.items()} | options
    named = next((w for n, w in enumerate(words[1:]) if words[n].lstrip("-") == "recipe"), "")
    what = f"the recipe {named}".strip()
    missing = [name for name in unstated(ALL_OPTIONS, options) if name not in SHAPE]
    return _over(what, each(megatron_job(options, missing=missing), _of_recipe))


def _over(what: str, job: Job) -> Job:
    """The job of values that stand over those of a recipe."""
    if not job.unknown:
        return job
    told = f"{what} sets all that the file leaves out, and is not in the file"
    finding = Finding("unknown", told, legal=("give the options in the file too",))
    return replace(job, findings=(finding, *job.findings))


def job_over_recipe(data: Mapping[str, object], findings: list[Finding]) -> Job:
    """The job of nested values that stand over those of a recipe, and of which `findings` are told."""
    job = _over(
        "the recipe that the file names", each(job_of_mapping(data, ALL_OPTIONS), _of_recipe)
    )
    return replace(job, findings=(*findings, *job.findings))


def _of_yaml(source: SourceFile) -> Job:
    """The job of a YAML file: of a whole configuration, or of overrides of a recipe."""
    if not re.search(r"_target_:\s*megatron\.bridge", source.text):
        job = each(read_megatron(source, over=True), _of_recipe)
        return _over("the recipe that the file overrides", job)
    return each(read_megatron(source), _of_recipe)


def _of_performance(source: SourceFile) -> Job:
    """The job of a script that starts a performance recipe by name. Raises AutoparError if no command
    does.
    """
    script, options = source.script(), dict[str, str]()
    for _, words in script.programs():
        starts = [n for n, word in enumerate(words) if _PERFORMANCE.search(word)]
        if starts:
            behind = words[starts[0] + 1 :]
            plain = [word for word in behind if not re.fullmatch(r"\+{0,2}[\w.]+=.*", word)]
            options = {_SHORT.get(n, n): v for n, v in options_of(plain).items()}
            for found in filter(None, map(_OVERRIDE.fullmatch, behind)):
                options |= _argument(found[1].rpartition(".")[2], found[2])
    if not options:
        raise AutoparError(f"no job: no command of {source.name} starts a performance recipe")
    name, dtype = options.pop("model_recipe_name", ""), options.get("compute_dtype", "bf16")
    per_node, gpus = options.pop("gpus_per_node", "8"), options.pop("num_gpus", "")
    options = {n: v for n, v in options.items() if n not in _ASIDE and v.lower() != "none"}
    options |= {"bf16": "true", "use_distributed_optimizer": "true"}
    options |= {"fp8_format": "hybrid", "fp8_recipe": _DTYPES.get(dtype, "delayed")} if dtype.startswith("fp8") else {}  # fmt: skip
    options |= {"nproc_per_node": per_node} | ({"world_size": gpus} if gpus else {})
    sets = [short for short, option in _SHORT.items() if option in options and short != "vpp"]
    what = f"the recipe {name} of Megatron-Bridge sets all that the file leaves out; the file sets {', '.join(sets) or 'nothing'}"
    told = Finding("unknown", what, legal=("give the layout in the options, such as -tp 4 -pp 2",))
    if dtype not in ("bf16", *_DTYPES):
        what = f"compute_dtype {dtype} has no price: priced as bf16"
        told = replace(told, what=f"{told.what}; {what}")
    if "tensor_model_parallel_size" in options:
        options.setdefault("sequence_parallel", "true")
    stated = {*options, "fp8", "fp16", "grad_reduce_in_fp32"}
    job = each(megatron_job(options, missing=unstated(ALL_OPTIONS, stated)), _of_recipe)
    return replace(job, findings=(told, *job.findings))


def _of_recipe(job: Job) -> Job:
    """A job of Megatron-LM as one of Megatron-Bridge. The weights of most models are in bf16, which
    is its precision where none is said.
    """
    said = job.flags.keys()
    unsaid: dict[str, Any] = {name: None for name in _SAID if said.isdisjoint(_SAID[name])}
    if {"bf16", "fp16", "fp32"}.isdisjoint(said):
        unsaid["precision"] = "bf16"
    by = job.layout
    facts = replace(job.facts, **unsaid)
    if facts.tp_overlap and not by.sequence_parallel:  # Megatron-Bridge switches it off
        facts = replace(facts, tp_overlap=False)
    return replace(job, framework="bridge", facts=facts)


def _launcher(words: list[str]) -> dict[str, str]:
    """The processes of a node and the nodes that a launcher's options say."""
    found: dict[str, str] = {}
    for option, value in zip(words, [*words[1:], ""], strict=True):
        if match := re.fullmatch(r"--(nproc[-_]per[-_]node|nnodes)(?:=(.*))?", option):
            found[match[1].replace("-", "_")] = match[2] or value
    return found


def _argument(name: str, value: str) -> dict[str, str]:
    """The argument of Megatron-LM for a field of a recipe, by name."""
    if name in _TURNED_BACK:
        return {_TURNED_BACK[name].replace("-", "_"): "true"} if is_false(value) else {}
    return {_BACK.get(name, name).replace("-", "_"): value}


def _flags_of(job: Job) -> dict[str, str]:
    """The overrides of a job, by path. Raises NotExpressible if Megatron-Bridge cannot run it."""
    if job.facts.precision == "fp32":
        raise NotExpressible(
            "Megatron-Bridge cannot say fp32: the nearest is mixed_precision=bf16_mixed"
        )
    try:
        flags = megatron_flags(job)
    except NotExpressible as error:
        raise NotExpressible(str(error).replace("Megatron-LM", "Megatron-Bridge")) from None
    found: dict[str, str] = {}
    for name, value in flags.items():
        if name in _TURNED:
            found[_TURNED[name][0]] = _TURNED[name][1]
        elif name not in (*_LEFT_OUT, "bf16", "fp16"):
            found[_NAMES.get(name, f"model.{name.replace('-', '_')}")] = value or "true"
    found["mixed_precision"] = f"{job.facts.precision}_mixed"
    return found


_OF_STRATEGY = re.compile(
    r"model\.((virtual_)?(tensor|pipeline|expert|context)_(model_|tensor_)?parallel\w*|sequence_parallel)"
)
"""What NeMo has in its strategy."""


def _words_of(job: Job) -> dict[str, str]:
    """The overrides of a job in the words of its file. Raises NotExpressible as `flags_of`."""
    found = _flags_of(job)
    found.pop("mixed_precision", None)
    if not job.layout.zero:  # which recipes switch on
        found["ddp.use_distributed_optimizer"] = "false"
    if job.file is None or not re.search(r"nemo_run|nemo\.collections", job.file.text):
        return found
    moved: dict[str, str] = {}
    for path, text in found.items():
        name = path.rpartition(".")[2]
        if _OF_STRATEGY.fullmatch(path):
            path = f"trainer.strategy.{name}"
        elif path.startswith("ddp."):
            path = f"trainer.strategy.ddp.{name}"
        elif path.startswith("train."):
            path = f"data.{name}"
        elif path.startswith("model."):
            path = f"model.config.{name}"
        moved[path] = text
    return moved


def _write(job: Job) -> Exported:
    """A command with overrides for a recipe. Raises NotExpressible if Megatron-Bridge cannot run the
    job.
    """
    values = _flags_of(job)
    # a recipe has values of its own for what is left out
    values |= {path: value for path, value in _OFF.items() if path not in values}
    lines = [f"    {path}={_quoted(value)}" for path, value in values.items()]
    text = " \\\n".join([f"{torchrun(job)} run_recipe.py", *lines]) + "\n"
    losses = ("the recipe: --recipe names the model, its data and its optimizer",)
    return Exported("megatron-bridge 0.4", text, "bash train.sh", {}, losses, "train.sh")


def _quoted(value: str) -> str:
    return f"'{value}'" if re.search(r"[^\w.-]", value) else value


BRIDGE = Target(
    LIMITS["bridge"],
    _reads,
    _read,
    megatron_refusals,
    _write,
    _flags_of,
    stages=megatron_stages,
    words=_words_of,
    aspects=MEGATRON_ASPECTS,
)
"""Megatron-Bridge and NeMo."""
