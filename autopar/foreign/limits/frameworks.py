"""The frameworks for which plans can be made: what each can run, and its software."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from autopar.errors import AutoparError, shown
from autopar.foreign.limits.restrictions import (
    accelerate_restriction,
    bridge_restriction,
    deepspeed_restriction,
    megatron_restriction,
    nanotron_restriction,
    neox_restriction,
    openrlhf_restriction,
    torchtitan_restriction,
    transformers_restriction,
    verl_restriction,
)
from autopar.ir.model_shape import ModelShape
from autopar.request.frameworks import software_of
from autopar.request.restriction import Restriction
from autopar.request.software import Software


@dataclass(frozen=True, slots=True)
class FrameworkLimits:
    """What planning needs of a framework.

    Attributes:
        name: how users name it.
        title: its name in words, with the version that is written for.
        software: the words by which predictions choose the software's facts.
        restriction: what it can run, for a model and tokens of a sequence.
        aliases: other names.
        sharding: what shards with ZeRO-1, a row of `SHARDINGS`.
        zero: the ZeRO stages that it has.
        sequence_parallel: whether tp can shard the activations between products.
        overlaps: whether its texts say that gradients are reduced beside compute.
    """

    name: str
    title: str
    software: str
    restriction: Callable[[ModelShape, int], Restriction]
    aliases: tuple[str, ...] = ()
    sharding: str = "fsdp"
    zero: tuple[int, ...] = (0, 1, 2, 3)
    sequence_parallel: bool = True
    overlaps: bool = False

    def software_for(self, generation: str, **facts: Any) -> Software:
        """How the framework runs a plan, for devices of a generation such as 'hopper'. `facts` are
        further fields of `FrameworkJob`.
        """
        zero = 1 if self.sharding == "dist_optimizer" else self.zero[-1]
        known: dict[str, Any] = {"sharding": self.sharding, "zero": zero} | facts
        if not known["zero"]:
            known["sharding"] = "none"
        found = software_of(self.software, generation=generation, **known)
        return replace(found, dp_overlap=True) if self.overlaps else found


LIMITS = {limits.name: limits for limits in (
    FrameworkLimits("openrlhf", "OpenRLHF 0.11 (DeepSpeed)", "deepspeed", openrlhf_restriction, sharding="zero", sequence_parallel=False),
    FrameworkLimits("verl", "verl 0.7 (FSDP)", "transformers", verl_restriction, zero=(0, 2, 3), sequence_parallel=False),
    FrameworkLimits("accelerate", "Accelerate 1.15", "accelerate", accelerate_restriction, zero=(0, 2, 3), sequence_parallel=False),
    FrameworkLimits("transformers", "Transformers 5.24", "transformers", transformers_restriction, zero=(0, 3), sequence_parallel=False),
    FrameworkLimits("torchtitan", "torchtitan 0.3", "torchtitan", torchtitan_restriction, aliases=("titan",), zero=(0, 2, 3)),
    FrameworkLimits("nanotron", "nanotron 0.5", "nanotron", nanotron_restriction, sharding="zero", zero=(0, 1)),
    FrameworkLimits("gpt-neox", "GPT-NeoX 2.0", "deepspeed", neox_restriction, aliases=("neox", "gptneox"), sharding="zero"),
    FrameworkLimits("deepspeed", "DeepSpeed 0.19", "deepspeed", deepspeed_restriction, sharding="zero", sequence_parallel=False),
    FrameworkLimits("bridge", "Megatron-Bridge 0.4", "megatron-bridge", bridge_restriction,
                    aliases=("megatron-bridge", "nemo"), sharding="dist_optimizer", overlaps=True),
    FrameworkLimits("megatron", "Megatron-LM (megatron-core 0.19)", "megatron", megatron_restriction,
                    aliases=("megatron-lm", "mcore"), sharding="dist_optimizer", overlaps=True),
)}  # fmt: skip
"""The limits of every framework by its name, in the order in which their files are recognized."""


def limits_of(name: str) -> FrameworkLimits:
    """The limits of the framework with a name or alias. Raises AutoparError for an unknown one."""
    lower = name.lower() if isinstance(name, str) else ""
    for limits in LIMITS.values():
        if lower in (limits.name, *limits.aliases):
            return limits
    raise AutoparError(f"target {shown(name)} is not known; {', '.join(LIMITS)} are")


def restriction_of(name: str, shape: ModelShape, seq: int) -> Restriction:
    """What the target of a name can run of a model with sequences of `seq` tokens. Messages propose
    other targets. Raises AutoparError for an unknown name.
    """
    own = limits_of(name)
    others = [limits for limits in LIMITS.values() if limits is not own]
    return replace(
        own.restriction(shape, seq),
        target=own.name,
        others=lambda: {other.name: other.restriction(shape, seq) for other in others},
    )
