"""Jobs of frameworks that autopar knows by their form and does not read."""

from __future__ import annotations

import re

from autopar.errors import AutoparError
from autopar.targets.target import Source

_YAML, _TEXTS = (".yaml", ".yml", ".json"), (".sh", ".slurm", ".sbatch", ".bash")
MOST_READ = 200_000
"""The most characters of a file in which its framework is looked for."""
_FORMS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("MaxText", _YAML, (r"^\s*(ici|dcn)_(fsdp|tensor|data|pipeline)\w*_parallelism\s*:",)),
    ("MaxText", _YAML, (r"^\s*base_emb_dim\s*:",)),
    ("MaxText", (*_TEXTS, ".py"), (r"\bMaxText[./](train|sft)|\bmaxtext\.trainers\b",)),
    ("NeMo Automodel", _YAML, (r"_target_:\s*nemo_automodel\.",)),
    ("NeMo Automodel", _YAML, (r"^recipe:\s*\w*Recipe\w*\s*$",)),
    ("LLaMA-Factory v1", _YAML, (r"^dist_config:", r"^(model_class|kernel_config|train_dataset):")),
    ("torchtune", _YAML, (r"_(component|target)_:\s*torchtune\.",)),
    ("litgpt", _YAML, (r"^(checkpoint_dir|model_name):", r"^train:", r"^\s+(global|micro)_batch_size:")),
    ("llm-foundry (Composer)", _YAML, (r"^\s*(device_train_microbatch_size|global_train_batch_size)\s*:",)),
    ("Levanter", _YAML, (r"^trainer:", r"^\s+(tensor_parallel_axes|fsdp_axis)\s*:")),
    ("Levanter", _YAML, (r"^trainer:", r"^\s+train_batch_size\s*:", r"^\s+mp\s*:")),
    ("PaddleNLP", (*_YAML, *_TEXTS), (r"tensor_parallel_degree", r"per_device_train_batch_size")),
    ("PaddleFleetX", _YAML, (r"^\s+mp_degree\s*:", r"^\s+pp_degree\s*:")),
    ("OLMo-core", (".py",), (r"\bfrom olmo_core\b",)),
    ("InternEvo", (".py",), (r"^parallel\s*=\s*dict\(", r"\bzero1\s*=")),
    ("Colossal-AI", (".py", *_TEXTS), (r"\bfrom colossalai\b|^\s*colossalai run\b",)),
    ("MoE-ModelZoo's launcher", _TEXTS, (r"\b(sbatch|interactive)_benchmarking\.sh",)),
    ("EasyLM", _TEXTS, (r"\bEasyLM\.models\b",)),
    ("open_lm", _TEXTS, (r"\bopen_lm\.main\b",)),
    ("MosaicML's diffusion or BERT", _YAML, (r"^device_train_batch_size\s*:",)),
    ("xtuner", (".py",), (r"\bfrom xtuner\b",)),
    ("ROLL", _YAML, (r"^\s*actor_train:", r"^\s+strategy_name:")),
    ("AReaL", _YAML, (r"^\s*allocation_mode\s*:",)),
    ("prime-rl", (".toml",), (r"^\[(trainer|orchestrator|model)\b", r"^\[(inference|orchestrator)\b")),
)  # fmt: skip
"""(framework, how the names of its files end, what all stands in them)."""


def refuse_unread(source: Source) -> None:
    """Raises AutoparError for a job of a framework that autopar does not read, and names it."""
    text, file = source.text[:MOST_READ], source.name.lower()
    for framework, ends, marks in _FORMS:
        if file.endswith(ends) and all(re.search(mark, text, re.MULTILINE) for mark in marks):
            raise AutoparError(
                f"{source.name} is a job of {framework}, which autopar does not read"
            )
