"""The options of Megatron-LM that a recipe of NeMo or Megatron-Bridge sets, which is a function of
Python.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from autopar.foreign.frameworks.arguments import is_none
from autopar.foreign.frameworks.python_settings import Settings
from autopar.foreign.frameworks.unknown import (
    ALL_OPTIONS,
    BATCHES,
    COMPUTE,
    LAYOUT,
    OPTIMIZER,
    PRECISION,
    SHAPE,
    SHARDING,
    VALUES,
    unstated,
)
from autopar.foreign.job import Finding
from autopar.foreign.texts.expansion import is_known
from autopar.foreign.texts.python_calls import precision_record
from autopar.foreign.texts.python_values import text_of

_ARGUMENTS = {
    "tensor_parallelism": "tensor_model_parallel_size",
    "pipeline_parallelism": "pipeline_model_parallel_size",
    "virtual_pipeline_parallelism": "virtual_pipeline_model_parallel_size",
    "context_parallelism": "context_parallel_size",
    "expert_parallelism": "expert_model_parallel_size",
    "sequence_parallelism": "sequence_parallel",
    "tensor_parallel_size": "tensor_model_parallel_size",
    "pipeline_parallel_size": "pipeline_model_parallel_size",
    "expert_parallel_size": "expert_model_parallel_size",
    "virtual_pipeline_parallel_size": "virtual_pipeline_model_parallel_size",
    "num_gpus_per_node": "devices",
    "tp_size": "tensor_model_parallel_size",
    "pp_size": "pipeline_model_parallel_size",
    "cp_size": "context_parallel_size",
    "ep_size": "expert_model_parallel_size",
}
"""Functions of recipes name these otherwise."""
_ASIDE = re.compile(
    r"(^|.*\.)(validation|inference|logger|log|checkpoint|scheduler|rng|profiling|resume|tokenizer|peft|env_vars|executor|"
    r"rerun_state_machine|lr_scheduler|ft|straggler|tensor_inspect|tb_logger|wandb)(\.|$).*"
)
"""Parts about other things than the model, its layout and its batches."""
_OF_DATA = ("seq_length", "sequence_length", "micro_batch_size", "global_batch_size")
_ORDER = tuple(
    "comm_overlap mixed_precision plugins model strategy ddp train optimizer optim dataset data".split()
)
"""Parts by whose value counts if several set an option, the first before the others."""
_PARTS = {
    "model": (*LAYOUT, *COMPUTE, *SHAPE, "seq_length"),
    "train": BATCHES,
    "ddp": SHARDING,
    "optimizer": OPTIMIZER,
    "mixed_precision": PRECISION,
    "dataset": ("seq_length",),
}
"""What the parts of a configuration of Megatron-Bridge set."""
_PARTS_OF_NEMO = {
    "model": (*COMPUTE, *SHAPE),
    "trainer": (*LAYOUT, *SHARDING, *PRECISION),
    "trainer.strategy": (*LAYOUT, *SHARDING),
    "trainer.plugins": PRECISION,
    "data": (*BATCHES, "seq_length"),
    "optim": OPTIMIZER,
}
"""What the parts of a recipe of NeMo set."""


@dataclass(slots=True)
class RecipeOptions:
    """The options that a recipe sets.

    Attributes:
        values: texts by name.
        missing: options that something sets which is not in the files.
        choices: the values of options where a condition is not known.
        findings: what is not in the files.
    """

    values: dict[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    choices: dict[str, tuple[str, ...]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)


def _name_of(path: str) -> str:
    """The option that a path of a recipe sets; '' for another setting."""
    block, _, name = path.rpartition(".")
    parts = block.split(".")
    aside = _ASIDE.fullmatch(block) and name != "ckpt_format"
    if aside or name.isdigit() or name.startswith("@"):
        return ""
    if path in ("mixed_precision", "env_vars"):  # its options are read by name
        return ""
    if {"dataset", "data"} & set(parts):
        return {"sequence_length": "seq_length"}.get(name, name) if name in _OF_DATA else ""
    return _ARGUMENTS.get(name, name)


def _rank(path: str) -> int:
    """How late a path comes if several set an option."""
    parts = path.split(".")[:-1]
    return next((n for n, part in enumerate(_ORDER) if part in parts), len(_ORDER))


def is_recipe(settings: Settings) -> bool:
    """Whether a function sets two options of Megatron-LM, or one over a base that is not there."""
    names = {_name_of(path) for path in settings.values} & set(ALL_OPTIONS)
    names -= {"bf16", "fp16", "optimizer", "seq_length", "fp8"}
    return len(names) > 1 or (len(names) == 1 and "" in settings.missing)


def recipe_options(settings: Settings) -> RecipeOptions:
    """The options of a recipe by name."""
    found = RecipeOptions()
    paths = sorted(settings.values, key=lambda path: (path in settings.weak, _rank(path)))
    said: dict[str, str] = {}
    for path in paths:
        name = _name_of(path)
        if not is_known(settings.values[path]) and name not in (*VALUES, *ALL_OPTIONS):
            continue
        if name and (
            name not in said or (is_none(found.values[name]) and path not in settings.weak)
        ):
            said[name], found.values[name] = path, settings.values[path]
    _add_precision(settings, found)
    found.values.setdefault("use_distributed_optimizer", "true")
    found.choices = {
        name: tuple(t for t in settings.choices[path] if is_known(t) and t != "unset")
        for name, path in said.items()
        if path in settings.choices
    }
    for name, choices in found.choices.items():
        if "unset" in settings.choices[said[name]]:
            found.choices[name] = (*choices, "none")
        found.values[name] = next((t for t in reversed(choices)), found.values[name])
    doubted = {
        name: settings.doubted[path] for name, path in said.items() if path in settings.doubted
    }
    open_names = [*doubted]
    for path, names in _open_parts(settings).items():
        open_names += unstated(names, set(found.values) - {"use_distributed_optimizer"} if path else found.values)  # fmt: skip
    found.missing = tuple(dict.fromkeys(open_names))
    _tell(settings, found, doubted)
    return found


def _open_parts(settings: Settings) -> dict[str, tuple[str, ...]]:
    """What the parts set of which something is not in the files, by the path of the part."""
    parts = _PARTS_OF_NEMO if "trainer" in settings.kinds else _PARTS
    found: dict[str, tuple[str, ...]] = {}
    for path, names in parts.items():
        known = path in settings.kinds or path in settings.values
        if path in settings.missing or ("" in settings.missing and not known):
            found[path] = names
    return found


def _add_precision(settings: Settings, found: RecipeOptions) -> None:
    """Adds what a mixed precision sets that a recipe gives by name, as 'bf16_mixed'."""
    for path in ("mixed_precision", "trainer.plugins"):
        name = settings.values.get(path, "")
        if re.fullmatch(r"[\w-]*(bf16|fp16)[\w-]*", name):
            for option, value in precision_record(name).fields.items():
                found.values.setdefault(option, text_of(value))
    # NeMo's plugin of precision
    if "bf16-mixed" in found.values.get("precision", ""):
        found.values.setdefault("bf16", "true")


def _tell(settings: Settings, found: RecipeOptions, doubted: dict[str, str]) -> None:
    """Adds a finding for each thing that sets options and is not in the files."""
    model = settings.values.get("model.@model", "None")
    if not is_none(model) and is_known(model):
        what = f"the model is {model}: give its dimensions with --model"
        found.findings.append(Finding("note", what))
    open_paths = [path for path in _open_parts(settings) if path in settings.missing]
    names = [settings.missing[path] for path in open_paths]
    names += [settings.missing[""]] if "" in settings.missing else []
    for name in dict.fromkeys([*names, *doubted.values()]):
        if name.startswith("the argument"):
            what = f"{name} of the function sets values, and is not known"
        else:
            what = f"{name} sets values too, and is not in the files beside this one"
        legal = ("put the file that defines it in the place from which it is imported",)
        found.findings.append(Finding("unknown", what, legal=legal))
