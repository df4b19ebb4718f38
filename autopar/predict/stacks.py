"""What the text of a framework tells: whose software ran, by words in it."""

from __future__ import annotations


def runs_on(framework: str, *names: str) -> bool:
    """Whether any of the names is in the text, in any case."""
    return any(name in framework.lower() for name in names)


def is_nvidia(framework: str) -> bool:
    """NeMo and Megatron-Bridge, whose tables come from NVIDIA's performance recipes."""
    return runs_on(framework, "nemo", "megatron-core", "megatron-bridge")


def is_megatron(framework: str) -> bool:
    """Layers of Megatron-LM or Megatron-Core, by whatever runs them."""
    return is_nvidia(framework) or runs_on(framework, "megatron", "megascale")


def is_deepspeed(framework: str) -> bool:
    """DeepSpeed, with layers of its own or of Megatron."""
    return runs_on(framework, "deepspeed")


def since(year: int | None, first: int) -> bool:
    """Whether a run is of that year or later; one without a year is taken as recent."""
    return year is None or year >= first
