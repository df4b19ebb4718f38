"""Recognizes frameworks by words in the text of a run's or job's framework."""

from __future__ import annotations


def runs_on(framework: str, *names: str) -> bool:
    """Whether the text contains any of the names, ignoring case."""
    return any(name in framework.lower() for name in names)


FRAMEWORKS = ("nanotron", "torchtitan", "llm-foundry", "automodel", "nemo", "megascale", "deepspeed", "megatron-bridge",
              "megatron-core", "megatron", "axolotl", "llama-factory", "trl", "accelerate", "transformers", "autopar")  # fmt: skip
"""Names of frameworks, each before those that its text may contain besides."""


TARGET_NAMES = ("openrlhf", "verl", "accelerate", "transformers", "torchtitan", "nanotron", "gpt-neox", "deepspeed",
                "bridge", "megatron")  # fmt: skip
"""Names of the frameworks for which plans can be made."""


def framework_of(framework: str) -> str:
    """The framework of a run, by the first of `FRAMEWORKS` in its text; `other` if there is none."""
    return next((name for name in FRAMEWORKS if runs_on(framework, name)), "other")


def foreign_name(framework: str) -> str:
    """The framework; '' if it is autopar's own engine."""
    return "" if framework_of(framework) == "autopar" else framework


def is_nvidia(framework: str) -> bool:
    """Whether the framework is NeMo, Megatron-Core or Megatron-Bridge, whose tables come from
    NVIDIA's performance recipes.
    """
    return runs_on(framework, "nemo", "megatron-core", "megatron-bridge")


def is_megatron(framework: str) -> bool:
    """Whether the framework has layers of Megatron-LM or Megatron-Core."""
    return is_nvidia(framework) or runs_on(framework, "megatron", "megascale")


def is_nanotron(framework: str) -> bool:
    """Whether the framework is Hugging Face's nanotron."""
    return runs_on(framework, "nanotron")


def is_deepspeed(framework: str) -> bool:
    """Whether the framework is DeepSpeed, with its own layers or Megatron's."""
    return runs_on(framework, "deepspeed")


def is_hugging_face(framework: str) -> bool:
    """Whether the framework trains models of transformers, as they are written there."""
    return runs_on(framework, "transformers", "accelerate", "trl", "axolotl", "llama-factory")


def since(year: int | None, first: int) -> bool:
    """Whether a run is from the year `first` or later. A run without a year counts as recent."""
    return year is None or year >= first
