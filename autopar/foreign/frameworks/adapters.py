"""Jobs that train less than all weights, or weights on a quantized base: adapters, frozen parts."""

from __future__ import annotations

import re
from collections.abc import Iterator

from autopar.foreign.frameworks.raw_options import JobOptions, shown_option
from autopar.foreign.frameworks.weights import Weight, parts_by_rule
from autopar.foreign.job import Job, Unmodelled

_KINDS = (
    "finetuning_type", "tuner_type", "train_type", "sft_type", "adapter", "peft_scheme", "peft_type", "peft_method",
    "peft_config.name",
)  # fmt: skip
"""Options that name what is trained."""
_WHOLE = re.compile(r"full(_?(ft|finetun\w*))?|none|null|all|disabled?", re.IGNORECASE)
"""Values of these that train all weights."""
_SWITCHES = (
    "use_peft", "use_lora", "lora_enable", "enable_lora", "q_lora", "use_qlora", "use_dora", "use_llm_lora", "use_backbone_lora", "lora",
    "peft.enabled", "lora.enabled", "lora_cfg.enabled", "lora.enable", "with_lora",
)  # fmt: skip
"""Options that switch adapters on."""
_RANKS = re.compile(
    r"(.*\.)?(lora_(dim|r|rank)|lora\.(rank|r|dim)|peft(_config)?\.(dim|r|rank|_target_|peft_type)|lora_config\.r|lora_adapter_path|"
    r"(num_)?virtual_tokens|prefix_projection|prompt_tuning_init)"
)
"""Options that adapters alone have; their values are ranks, classes or paths."""
_CLASSES = re.compile(
    r"\b(LoRA|LoraConfig|LoRAConfig|LoRAConverter|CanonicalLoRA|DoRA|PeftConfig|get_peft_model|IA3Config|PrefixTuningConfig|PromptTuningConfig|"
    r"PromptEncoderConfig|AdaLoraConfig|OFTConfig|VeraConfig|BOFTConfig|FourierFTConfig|prepare_model_for_kbit_training)\b"
)
"""What a Python file calls for adapters."""
_QUANTIZED = re.compile(r"gptq|[-_./]awq|bnb[-_]?4bit|[-_](int[48]|nf4|w[48]a16|4bit|8bit)\b", re.IGNORECASE)  # fmt: skip
"""Words in the name of a model whose weights are quantized."""
_MODELS = (
    "model_name_or_path", "base_model", "model", "model_id", "model.path", "pretrain", "model_name", "from_pretrained.0",
)  # fmt: skip
_ADAPTERS, _BASE, _FROZEN = (
    "adapters are trained, not all weights",
    "a quantized base",
    "weights that are frozen",
)
_PARTS = (
    "vision|vit|visual|audio|language|llm|text|mm|multi_modal|aligner|projector|projection|tower|backbone|encoder|"
    "decoder|embed|layers|mlp|parameters|modules"
)
"""Words in the names of options that freeze parts of a model."""

_RULES = (
    Weight("relora|lora_model_dir|use_llama_pro|adapter_name_or_path", _ADAPTERS, place="instead"),
    Weight(r"load_in_[48]bit|use_[48]bit|nf4|BitsAndBytesConfig.load_in_[48]bit|gptq|use_onebitllms|quantize_moe_experts",
         _BASE, place="instead"),
    Weight("quantization_bit|quant_bits|bits|quantization_type", _BASE, place="instead", value="[1-8]|nf4|fp4"),
    Weight("quant_method|quantization_config.quant_method|model_quantization_config", _BASE, place="instead", value="(?!none$|fp8$).+"),
    Weight(rf"(un)?fr(eeze|eezing|ozen)_(?!moe_router)\w*({_PARTS})\w*|freeze|(un)?freeze(_config)?[.](?!.*embeddings)\w+|freeze_ratio",
         _FROZEN, place="instead"),
    Weight("lisa_(activated_layers|n_layers)|tune_mm_mlp_adapter|use_badam", _FROZEN, place="instead"),
    Weight("trainable_(params|parameters|modules|layers|token_indices)\\w*|params_to_train|modules_to_train|spectrum_top_fraction|"
         "num_layers_to_train|train_router_only",
         _FROZEN, place="instead", value="(?!all$).+"),
)  # fmt: skip
_LEFT_OUT = re.compile(
    r"(.*\.)?(tune_mm_(vision|llm|mlp)|train_(vision|llm|mm|language|visual)\w*)"
)
"""Switches that freeze a part where they are off."""


def partly_trained(job: Job, options: JobOptions) -> Iterator[Unmodelled]:
    """What of a job says that it does not train all weights in full precision."""
    said = _adapters(options)
    model = next((text for name in _MODELS if (text := options.text(name))), "")
    if said:
        yield Unmodelled(_ADAPTERS, said, place="instead")
    if found := _QUANTIZED.search(model):
        yield Unmodelled(_BASE, model, place="instead")
    if left := next(filter(_LEFT_OUT.fullmatch, options.off), ""):
        yield Unmodelled(_FROZEN, f"{left}=false", place="instead")
    told = {_ADAPTERS: said, _BASE: found, _FROZEN: left}
    yield from (part for part in parts_by_rule(job, options, _RULES) if not told[part.what])


def _adapters(options: JobOptions) -> str:
    """The option by which adapters are trained; '' without any. What names the kind of training
    counts before a switch, and a switch before a rank.
    """
    for name in _KINDS:
        if path := options.path(name):
            value = options.values[path]
            return "" if _WHOLE.fullmatch(value) else shown_option(path, value)
        if options.is_off(name):
            return ""
    if kind := _default_kind(options):
        return kind
    for name in _SWITCHES:
        if path := options.path(name):
            return shown_option(path, options.values[path])
    # Axolotl trains adapters with `adapter` alone
    if any(map(options.is_off, _SWITCHES)) or options.path("base_model"):
        return ""
    ranks = [
        shown_option(path, value)
        for path, value in options.values.items()
        if _RANKS.fullmatch(path)
    ]
    called = _CLASSES.search(options.called)
    return ranks[0] if ranks else called[0] if called else ""


def _default_kind(options: JobOptions) -> str:
    """The default of trainers that train adapters unless they are told otherwise."""
    names = {path.rpartition(".")[2] for path in options.values}
    factory = {"stage", "per_device_train_batch_size"} <= names
    if factory and not names.isdisjoint(("template", "cutoff_len", "dataset_dir")):
        return "finetuning_type=lora, the default"
    swift = re.search(r"\bswift (sft|rlhf)\b", options.program)
    return "tuner_type=lora, the default" if swift and "megatron" not in options.program else ""
