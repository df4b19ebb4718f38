"""Options with Megatron-LM's names in nested mappings: YAML of NeMo, Primus, FlagScale, ms-swift and
LLaMA-Factory, and overrides in Hydra's form, such as those of verl.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from autopar.foreign.frameworks.arguments import flat, is_false, is_none, is_true
from autopar.foreign.job import Finding
from autopar.foreign.texts.expansion import unknown

_ASIDE = re.compile(
    r"((.*\.)?(trainer|exp_manager|logger|hydra|data|dataset|optim|tokenizer|nsys_profile|checkpoint|logging|gc|runner|"
    r"cpu_offloading_config|freeze|environ|env_vars|inference|validation|generation|run|model\.peft|"
    r"grpo|ppo|sft|rm|dpo|distillation|loss_fn|reward_\w+|checkpointing|env|cluster|sequence_packing|dynamic_batching|scheduler|lora_cfg|"
    r"algorithm|draft|async_grpo))\.(.*)"
)
"""Blocks about other things than the model and its layout."""
_KEPT = (
    "ckpt_format",
    "devices",
    "n_gpus_per_node",
    "gpus_per_node",
    "num_nodes",
    "nnodes",
    "precision",
    "max_prompt_length",
    "max_response_length",
    "vocab_size",
    "padded_vocab_size",
    "tokenizer_type",
    "tokenizer_model",
    "seq_length",
    "peft_scheme",
)
"""Options that count also within these blocks."""
_OF_OPTIMIZER = {
    "name": "optim_name",
    "overlap_grad_sync": "overlap_grad_reduce",
    "overlap_param_sync": "overlap_param_gather",
    "grad_sync_dtype": "grad_sync_dtype",
}
"""What of the layout stands in NeMo's block of the optimizer, by name."""
_PROCESSES = ("devices", "n_gpus_per_node", "gpus_per_node", "num_nodes", "nnodes")
_REFERENCE = re.compile(r"\$\{([^${}]+)\}")
_OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_]\w*(?:\.\w+)+)=(.*)", re.DOTALL)
_ROLES = (("rollout", "ref", "critic", "reward_model"), "actor_rollout_ref.actor.")


def overrides_of(words: Iterable[str]) -> dict[str, str]:
    """The overrides in Hydra's form among the words of a command, by path."""
    found = [match for word in words if (match := _OVERRIDE.fullmatch(word))]
    return {match[1]: match[2] for match in found}


def _of_actor(values: Mapping[str, str]) -> dict[str, str]:
    """The options by path. Of the roles of reinforcement learning, only the actor is trained as
    priced here: the others are left out.
    """
    if not any(path.startswith(_ROLES[1]) for path in values):
        return dict(values)
    answers = values.get("actor_rollout_ref.rollout.n", "1")
    return {
        path: value for path, value in values.items() if set(path.split(".")).isdisjoint(_ROLES[0])
    } | {"answers.of_a_prompt": answers}


def options_by_name(
    data: Mapping[str, object], marks: Iterable[str]
) -> tuple[dict[str, str], list[Finding]]:
    """The options of nested mappings by the last part of their path, and findings on them. The
    outermost of a name counts, and of these the first; if another block gives a value of `marks`
    otherwise, that is a finding. A block that is not enabled does not count.
    """
    values, paths, findings = dict[str, str](), dict[str, str](), list[Finding]()
    plain = _of_actor({path: _text(value) for path, value in flat(data).items()})
    switches = [path.rpartition(".") for path in plain if re.search(r"\.enabled?$", path)]
    off = tuple(f"{block}." for block, dot, key in switches if is_false(plain[block + dot + key]))
    for path in sorted(plain, key=lambda path: path.count(".")):
        value, aside = plain[path], _ASIDE.fullmatch(path)
        block, _, name = path.rpartition(".")
        name = re.sub(r"^[+-]*", "", name).replace("-", "_")
        if path.startswith(off):
            continue
        if block.rpartition(".")[2] == "optim" and name in _OF_OPTIMIZER:
            name = _OF_OPTIMIZER[name]
        elif (aside and name not in _KEPT) or (name in _PROCESSES and "generation" in block):
            continue
        text = _resolved(value, path, plain, findings)
        if (
            name in marks
            and not is_none(values.get(name, "None"))
            and values[name] != text
            and not is_none(text)
        ):
            what = f"{name} stands in two blocks: {paths[name]}={values[name]} and {path}={text}; the first is read"
            findings.append(
                Finding("contradiction", what, legal=("give a file with one of the blocks",))
            )
        if name not in values or is_none(values[name]):
            values[name], paths[name] = text, path
    return values, findings


def _text(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _resolved(text: str, path: str, plain: Mapping[str, str], findings: list[Finding]) -> str:
    """A value with its references replaced: `${model.hidden_size}`, `${.hidden_size}`, and
    `${NAME:default}` of the environment.
    """
    for _ in range(5):
        found = _REFERENCE.search(text)
        if found is None:
            return text
        name, _, default = re.sub(r"^oc\.env:", "", found[1]).partition(
            "," if found[1].startswith("oc.env:") else ":"
        )
        at = f"{path.rpartition('.')[0]}{name}" if name.startswith(".") else name
        if at in plain and plain[at] != text:
            value = plain[at]
        elif default and re.fullmatch(r"\w+", name):
            value = default.strip("'\"")
            note = f"${name} is taken to be unset, so that it is {value[:60]}"
            if re.fullmatch(r"[\d.]+|true|false", value, re.I):
                findings.append(Finding("note", note))
        else:
            value = unknown(found[0])
        text = text.replace(found[0], value)
    return text


def filled_in(values: Mapping[str, str]) -> dict[str, str]:
    """The options with what the framework of a mapping fills in, and with NeMo's names for what
    Megatron-LM names otherwise.
    """
    found = dict(values)
    names = {"train_micro_batch_size": "micro_batch_size", "train_global_batch_size": "global_batch_size",
             "max_total_sequence_length": "seq_length"}  # fmt: skip
    if "train_micro_batch_size" in values:
        found |= _of_nemo_rl(values)
    found |= {name: found.pop(of) for of, name in names.items() if of in values}
    found |= _checkpointed(values)
    if "mcore_gpt" in values or "megatron_amp_O2" in values:
        found |= _of_nemo(values)
    if "actor_num_nodes" in values:
        found = _of_slime(values) | found
    if "ppo_micro_batch_size_per_gpu" in values or "ppo_mini_batch_size" in values:
        found = _VERL | found | _of_verl(values)
    if ("model" in values or "load" in values) and {
        "tuner_type",
        "packing",
        "split_dataset_ratio",
    } & set(values):
        found = SWIFT | found
    if values.get("framework") == "megatron":
        found = {"bf16": "true"} | found
    if "cutoff_len" in values or "per_device_train_batch_size" in values:
        found = {"hidden_dropout": "0"} | found
        if found.get("recompute_granularity") == "full":  # LLaMA-Factory's adapter fills these in
            found = {"recompute_method": "uniform", "recompute_num_layers": "1"} | found
    return found


SWIFT = {
    "use_distributed_optimizer": "true",
    "hidden_dropout": "0",
    "micro_batch_size": "1",
    "global_batch_size": "16",
    "recompute_granularity": "selective",
    "cross_entropy_loss_fusion": "true",
    "expert_tensor_parallel_size": "1",
}
"""Defaults of `megatron sft` of ms-swift."""
_IN_BF16 = re.compile(
    r"qwen[-_]?(1\.5|2|3)|qwq|llama[-_]?[234]|deepseek|mistral|mixtral|gemma|glm-?4|internlm|phi-?[34]|kimi|moonlight|minimax|gpt-?oss",
    re.I,
)
"""Names of public models whose config.json says bfloat16."""


_VERL = {"use_distributed_optimizer": "true", "sequence_parallel": "true"}
"""Defaults of the Megatron engine of verl (its config/engine/megatron.yaml)."""


def swift_precision(values: Mapping[str, str]) -> tuple[dict[str, str], bool]:
    """(the options of the precision, whether it is known) of a job of ms-swift, which takes that of
    the model if its options say none.
    """
    said = values.get("torch_dtype", "")
    if "bf16" in values or "fp16" in values:
        return {}, True
    if said:
        short = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(said, said)
        return ({short: "true"} if short in ("bf16", "fp16") else {}), True
    model = values.get("model", "")
    return {"bf16": "true"}, bool(_IN_BF16.search(model.rpartition("/")[2]))


def _of_nemo_rl(values: Mapping[str, str]) -> dict[str, str]:
    """What NeMo-RL says otherwise: its precision by name, and the dropout of its models."""
    precision = values.get("precision", "bfloat16")
    names = {"bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16"}
    found = {names[precision]: "true"} if precision in names else {}
    return found | {"hidden_dropout": values.get("hidden_dropout", "0")}


def _of_nemo(values: Mapping[str, str]) -> dict[str, str]:
    precision = values.get("precision", "32")
    found = {"bf16": str(precision.startswith("bf16")), "fp16": str(precision.startswith("16"))}
    optimizer = values.get("optim_name", "")
    if re.search("fused_adam|distributed", optimizer):
        found["use_distributed_optimizer"] = str("distributed" in optimizer)
    if (dtype := values.get("grad_sync_dtype")) is not None:
        found["grad_reduce_in_fp32"] = str(dtype not in ("bf16", "16"))
    if "glu" in values.get("activation", ""):
        found["swiglu"] = "true"
    return found


def _checkpointed(values: Mapping[str, str]) -> dict[str, str]:
    """What NeMo-RL's switch of recomputation sets."""
    switch = values.get("activation_checkpointing", "none")
    if is_false(switch) and not is_none(switch):
        return {"recompute_granularity": "None"}
    if not is_true(switch) or values.get("recompute_granularity", "full") != "full":
        return {}
    return {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": "1",
    }


def _of_slime(values: Mapping[str, str]) -> dict[str, str]:
    """What slime sets for the update of the actor."""
    nodes, each = (values.get(f"actor_num_{name}", "") for name in ("nodes", "gpus_per_node"))
    found = {
        "bf16": "true",
        "use_distributed_optimizer": "true",
        "seq_length": values.get("rollout_max_response_len", "4096"),
        "nnodes": nodes,
        "nproc_per_node": each or "8",
    }
    names = ("rollout_batch_size", "n_samples_per_prompt", "num_steps_per_rollout")
    prompts, answers, steps = (values.get(name, "1") for name in names)
    if prompts.isdigit() and answers.isdigit() and steps.isdigit() and int(steps):
        found["global_batch_size"] = str(int(prompts) * int(answers) // int(steps))
    if is_true(values.get("use_dynamic_batch_size", "false")):
        found |= _of_tokens(values, found, values.get("max_tokens_per_gpu", ""))
    return found


def _of_tokens(values: Mapping[str, str], found: Mapping[str, str], tokens: str) -> dict[str, str]:
    """The micro-batch that holds a number of tokens on each rank of cp, by name; {} if the sizes are
    not known.
    """
    seq, cp = found.get("seq_length", ""), values.get("context_parallel_size", "1")
    if not (tokens.isdigit() and seq.isdigit() and cp.isdigit() and int(seq)):
        return {}
    return {"micro_batch_size": str(max(1, int(tokens) * int(cp) // int(seq)))}


def _of_verl(values: Mapping[str, str]) -> dict[str, str]:
    """The update of the actor: sequences of prompt and response, some of them for each prompt."""
    sizes = [values.get(name, "") for name in ("max_prompt_length", "max_response_length")]
    found = {"bf16": "true", "hidden_dropout": "0"}
    defaults = {"sequence_parallel": "true", "use_distributed_optimizer": "true"}
    found |= {name: text for name, text in defaults.items() if name not in values}
    if all(size.isdigit() for size in sizes):
        found["seq_length"] = str(sum(map(int, sizes)))
    prompts, answers = values.get("ppo_mini_batch_size", "256"), values.get("of_a_prompt", "1")
    if prompts.isdigit() and answers.isdigit():
        found["global_batch_size"] = str(int(prompts) * int(answers))
    if is_true(values.get("use_dynamic_bsz", "false")):
        found |= _of_tokens(values, found, values.get("ppo_max_token_len_per_gpu", "16384"))
    return found
