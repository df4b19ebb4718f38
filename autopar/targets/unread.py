"""Jobs of frameworks that autopar knows by their form and does not read."""

from __future__ import annotations

import re

from autopar.errors import AutoparError
from autopar.targets.target import Source

_YAML = r"\.(ya?ml|json)$"
_FORMS: tuple[tuple[str, str, str], ...] = (
    ("MaxText", _YAML, r"^\s*(ici|dcn)_(fsdp|tensor|data|pipeline)\w*_parallelism\s*:|^base_emb_dim\s*:"),
    ("NeMo Automodel", _YAML, r"_target_:\s*nemo_automodel\.|^recipe:\s*\w*Recipe\w*\s*$"),
    ("LLaMA-Factory v1", _YAML, r"^dist_config:\s*$(?=(\n|.)*^model_class:)|^model_class:\s*\w+\s*$(?=(\n|.)*^dist_config:)"),
    ("torchtune", _YAML, r"_(component|target)_:\s*torchtune\."),
    ("litgpt", _YAML, r"^checkpoint_dir:(\n|.)*^train:\s*$(\n|.)*^\s+global_batch_size:|^model_name:(\n|.)*^train:\s*$(\n|.)*^\s+micro_batch_size:"),
    ("llm-foundry (Composer)", _YAML, r"^device_train_microbatch_size\s*:|^\s*global_train_batch_size\s*:"),
    ("Levanter", _YAML, r"^trainer:\s*$(\n|.)*^\s+(tensor_parallel_axes|fsdp_axis|train_batch_size)\s*:(\n|.)*^\s*mp\s*:"),
    ("PaddleNLP", r"\.(json|ya?ml|sh|args)$", r"\b(tensor_parallel_degree|pipeline_parallel_degree)\b(\n|.)*\bsharding(_parallel_degree)?\b"),
    ("OLMo", r"\.ya?ml$", r"^(device_train_microbatch_size|global_train_batch_size)\s*:(\n|.)*^fsdp\s*:"),
    ("OLMo-core", r"\.py$", r"\bfrom olmo_core\b"),
    ("InternEvo", r"\.py$", r"^parallel\s*=\s*dict\((\n|.)*\bzero1\s*="),
    ("Colossal-AI", r"\.(py|sh)$", r"\bfrom colossalai\b|^\s*colossalai run\b"),
    ("MaxText", r"\.(sh|py)$", r"\bMaxText[./](train|sft)|\bmaxtext\.trainers\b"),
    ("EasyLM", r"\.sh$", r"\bEasyLM\.models\b"),
    ("open_lm", r"\.(sh|ya?ml)$", r"\bopen_lm\.main\b"),
    ("Lightning", r"\.ya?ml$", r"^trainer:\s*$(\n|.)*^\s+strategy:\s*\n?(\n|.)*class_path:\s*\S*(lightning|FSDPStrategy)"),
)  # fmt: skip
"""(framework, how the names of its files end, what stands in them)."""
_NEMO_RL = re.compile(r"^\s+dtensor_cfg\s*:", re.M)


def refuse_unread(source: Source) -> None:
    """Raises AutoparError for a job of a framework that autopar does not read, and names it."""
    text = source.text[:200_000]
    name = next(
        (
            framework
            for framework, ends, mark in _FORMS
            if re.search(ends, source.name.lower()) and re.search(mark, text, re.M)
        ),
        "",
    )
    if name:
        raise AutoparError(f"{source.name} is a job of {name}, which autopar does not read")
