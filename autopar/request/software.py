"""The software that runs a plan, as far as it changes times and memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from autopar_cost_models import FITTED, Device, FittedConstants
from autopar_cost_models.attention import FLASH_RATES
from autopar_cost_models.checks import finite, is_whole, nearest
from autopar_cost_models.matmul import SCALINGS
from autopar_cost_models.memory import STATE_RECIPES

from autopar.errors import AutoparError, shown
from autopar.ir.plan_checks import HALF

LOSS_KERNELS = {
    "plain": "torch's cross-entropy: keeps fp32 log-probabilities, backward has two gradients of their size at once",
    "in_place": "Megatron's vocabulary-parallel cross-entropy: keeps fp32 probabilities, backward turns them into the gradient",
    "beside": "nanotron's: as in_place, and the fp32 logits stay beside the probabilities until forward ends",
    "fused": "flash-attn's, Liger's and Transformer Engine's: keeps the logits as they came and writes the gradient over them",
}

CUDA_GRAPHS = {
    "none": "the host issues every operation",
    "but experts": "graphs replay all of a layer but its experts and their dispatch",
    "all": "graphs replay all of a micro-batch",
}
DISPATCHES = {
    "copies": "a token goes to the rank of each expert that it chose, once for each",
    "once": "a token goes to each node once and from there to each rank once, as in DeepEP (github.com/deepseek-ai/DeepEP)",
}
FROZEN = {
    "whole": "each rank holds frozen parameters whole",
    "sharded": "ZeRO-3 shares them out as trained ones, in the dtype in which products read them",
    "sharded in fp32": "ZeRO-3 shares them out in fp32, and gathers them in the dtype in which products read them",
}

NAMED: dict[str, list[str]] = {
    "cuda_graphs": list(CUDA_GRAPHS),
    "dispatch": list(DISPATCHES),
    "attention_kernel": sorted({kernel for _, kernel in FLASH_RATES}),
    "loss_kernel": list(LOSS_KERNELS),
    "state_recipe": list(STATE_RECIPES),
    "fp8_scaling": list(SCALINGS),
    "frozen": list(FROZEN),
}
"""The values of fields of `Software` that are names."""


@dataclass(frozen=True, slots=True)
class Software:
    """The software that runs a plan, as far as it changes prices.

    The attributes up to `loss_kernel` change time, and those from there to `live_parameters` change only memory.

    Attributes:
        compiled: torch.compile fuses element-wise operations and normalizations.  Eager mode runs a kernel for each.
        attention_kernel: a kernel of `FLASH_RATES`.  None is the fastest that was measured on the device.
        matmul_dtype: 'fp8' multiplies in fp8 where a layer multiplies by a parameter.  Everything else stays in the precision of the
            plan.  None and 'bf16' leave all products in that precision.
        fp8_head: the last product before the loss runs in fp8 as well.
        fp8_scaling: a row of `SCALINGS`.  It counts only with `matmul_dtype='fp8'`.
        fp8_gathers: what tp gathers for a product in fp8 travels in fp8, and so does what it gathers of the gradient of its result.
        composite_norms: in eager mode a root-mean-square norm runs as its element-wise operations, in fp32, as in torch before its
            fused kernel.
        fused_optimizer: one kernel updates parameters, instead of one for each step of Adam's formula.
        dp_overlap: gathers of sharded parameters and reductions of gradients run beside the compute of neighbouring blocks.
        sharded_interfaces: with ZeRO-3, the number of a node's network interfaces through which parameters and gradients travel.
            0 means all.
        late_gradients: the gradient of a weight is computed while that of its input travels over tp.
        tp_overlap: asynchronous tensor parallelism.  Products over tp are cut, so that communication runs beside them.
        fused_accumulation: a product adds to the gradient of its weight.  Otherwise a kernel of its own does.
        scatters_messages: without sequence parallelism, tp ranks that hold the same message of a pipeline send a part each (Narayanan
            et al., SC 2021, section 4.1).
        early_stop: recomputation ends at the last tensor that backward needs, as in `torch.utils.checkpoint`, not at the end of the
            block.
        deepspeed_passes: every pass over a layer takes `FittedConstants.deepspeed_pass_s` more.
        fused_kernels: norms, activations, rotary positions, masked softmax and the operations beside them are single kernels
            (Transformer Engine, Apex, Megatron).  They keep their input and statistics, not intermediate values.
        joins_products: queries, keys and values are one product, and so are gate and up (`annotate/call_kernels.py`).
        fused_softmax: False makes softmax a kernel of its own under `fused_kernels`.
        loss_kernel: a row of `LOSS_KERNELS`.
        gathers_again: with sequence parallelism a layer keeps its shard of the input and gathers it again in backward (Korthikanti
            et al. 2022, section 4.2.2).
        keeps_fp8: layers that multiply in fp8 keep the fp8 input.
        fp8_weight_copies: they also keep fp8 copies of the weight and its transpose from one micro-batch to the next.
        keeps_stage_outputs: a pipeline keeps what a stage has sent until its backward.  Megatron frees it
            (deallocate_pipeline_outputs).
        state_recipe: a row of `STATE_RECIPES`, for 16-bit precision.  None is the recipe of the precision.
        workspace_bytes: buffers of its own that a framework keeps.
        root_unit: with ZeRO-3, embedding and head stay gathered and keep whole gradients, and two blocks are gathered, as in FSDP.
            autopar's own engine frees what it gathers segment by segment.
        live_parameters: with ZeRO-3, the number of gathered scalars that live at once (DeepSpeed: stage3_max_live_parameters).
        issue_s: seconds in which the host issues one operation.  None is the time that the device has (`Device.issue_s`).
        network_slows_host: where a pipeline runs between nodes, the host takes 1 + tp times this number as long.
        cuda_graphs: a row of `CUDA_GRAPHS`.  What graphs replay takes the host no time.
        routing_operations: the number of operations that the host issues for a layer with experts besides those of the model.
        sorts_by_expert: tokens of several experts of a rank are sorted by expert after they arrive, and back before they return.
        permutes_by_op: rows of experts are gathered, weighted and put back operation by operation, under `fused_kernels` too.
        sequential_experts: experts of a rank run one after the other, and their results are joined.
        expert_bias: a weighted bias is added to the result of each expert, expert by expert.
        clamps_experts: both halves of what a gated expert activates are clamped and joined, operation by operation.
        recomputes_activation: the activation of experts runs again in backward.
        dispatch: a row of `DISPATCHES`, for the tokens that go to experts on other ranks.
        dispatch_overlap: that dispatch runs beside the compute of experts of another micro-batch.
        frozen: a row of `FROZEN`.  Buffers are whole always.
        framework: the framework that it is of, such as 'megatron-core'.  '' is autopar's own engine.
        fitted: the constants that no device or link carries (`attention_efficiency`, `overlap_slowdown`).
    """

    compiled: bool = False
    attention_kernel: str | None = None
    matmul_dtype: str | None = None
    fp8_head: bool = False
    fp8_scaling: str = "delayed"
    fp8_gathers: bool = False
    composite_norms: bool = False
    fused_optimizer: bool = True
    dp_overlap: bool = True
    sharded_interfaces: int = 0
    late_gradients: bool = True
    tp_overlap: bool = False
    fused_accumulation: bool = False
    scatters_messages: bool = False
    early_stop: bool = True
    deepspeed_passes: bool = False
    fused_kernels: bool = False
    joins_products: bool = False
    fused_softmax: bool = True
    loss_kernel: str = "plain"
    gathers_again: bool = False
    keeps_fp8: bool = False
    fp8_weight_copies: bool = False
    keeps_stage_outputs: bool = True
    state_recipe: str | None = None
    workspace_bytes: int = 0
    root_unit: bool = False
    live_parameters: int = 0
    issue_s: float | None = None
    network_slows_host: float = 0.0
    cuda_graphs: str = "none"
    routing_operations: int = 0
    sorts_by_expert: bool = False
    permutes_by_op: bool = False
    sequential_experts: bool = False
    expert_bias: bool = False
    clamps_experts: bool = False
    recomputes_activation: bool = False
    dispatch: str = "copies"
    dispatch_overlap: bool = False
    frozen: str = "whole"
    framework: str = ""
    fitted: FittedConstants = FITTED

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self) if field.type == "bool"):
            if not isinstance(getattr(self, name), bool):
                raise AutoparError(
                    f"software: {name}={shown(getattr(self, name))} must be True or False"
                )
        for name, known in NAMED.items():
            value = getattr(self, name)
            left_out = value is None and name in ("attention_kernel", "state_recipe")
            if value not in known and not left_out:
                raise AutoparError(
                    f"software: {name}={shown(value)} is not known; {nearest(value, list(known))}"
                )
        for name in (
            "sharded_interfaces",
            "workspace_bytes",
            "live_parameters",
            "routing_operations",
        ):
            if not is_whole(getattr(self, name), least=0):
                raise AutoparError(
                    f"software: {name}={shown(getattr(self, name))} must be a whole number >= 0"
                )
        for name in ("issue_s", "network_slows_host"):
            value = getattr(self, name)
            if value is not None and not (finite(value) and value >= 0):
                raise AutoparError(f"software: {name}={shown(value)} must be a finite number >= 0")
        if self.matmul_dtype not in (None, "bf16", "fp8"):
            raise AutoparError(
                f"software: matmul_dtype={shown(self.matmul_dtype)} is not known; 'bf16', 'fp8' and None are"
            )
        if not isinstance(self.fitted, FittedConstants):
            raise AutoparError(f"software: fitted={shown(self.fitted)} must be FittedConstants")

    @property
    def is_own(self) -> bool:
        """Whether it is autopar's own engine that runs."""
        return not self.framework

    @property
    def joins(self) -> Joins:
        """What joins neighbouring element-wise operations into kernels; it applies only if `fuses`.
        'compiler' if compiled. Otherwise hand-written kernels: 'by hand' if masked softmax is part
        of them, 'by hand, softmax alone' if softmax is a kernel of its own.
        """
        if self.compiled:
            return "compiler"
        return "by hand" if self.fused_softmax else "by hand, softmax alone"

    @property
    def fuses(self) -> bool:
        """Whether neighbouring element-wise operations run as one kernel, compiled or
        hand-written.
        """
        return self.compiled or self.fused_kernels

    def check(self, device: Device, precision: str) -> None:
        """Raise AutoparError if this software does not support the device or the precision."""
        if self.matmul_dtype == "fp8" and "fp8" not in device.flops:
            raise AutoparError(
                f"software: matmul_dtype='fp8', but device {device.name} has no fp8 rate; it has {', '.join(device.flops)}"
            )
        for name, fitting in (("matmul_dtype", ("bf16",)), ("state_recipe", HALF)):
            if getattr(self, name) is not None and precision not in fitting:
                raise AutoparError(
                    f"software: {name}={shown(getattr(self, name))} needs precision {' or '.join(fitting)}; this is {precision}"
                )
        measured = sorted(
            kernel for generation, kernel in FLASH_RATES if generation == device.generation
        )
        if self.attention_kernel not in (None, *measured):
            raise AutoparError(
                f"software: attention_kernel={shown(self.attention_kernel)} was not measured on {device.name} ({device.generation}); "
                f"{', '.join(measured) + ' were' if measured else 'no kernel was: leave it out'}"
            )

    def __str__(self) -> str:
        words = ["torch.compile" if self.compiled else "eager mode"]
        if self.attention_kernel:
            words.append(f"{self.attention_kernel} attention")
        if self.matmul_dtype == "fp8":
            scaled = f" ({self.fp8_scaling} scaling)" if self.fp8_scaling != "delayed" else ""
            words.append(f"fp8 linear layers{' and head' if self.fp8_head else ''}{scaled}")
        return ", ".join(words)

    def as_data(self) -> dict[str, Any]:
        """The fields that are not the defaults, as plain data. `from_data` makes an equal one."""
        default = Software()
        found = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if getattr(self, field.name) != getattr(default, field.name)
        }
        if "fitted" in found:
            found["fitted"] = asdict(self.fitted)
        return found

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> Software:
        """The software that `as_data` describes. Raises AutoparError for an unknown field or a
        wrong value.
        """
        known = [field.name for field in fields(Software)]
        for name in data:
            if name not in known:
                raise AutoparError(f"software: unknown field {shown(name)}; {nearest(name, known)}")
        values = dict(data)
        if isinstance(values.get("fitted"), Mapping):
            values["fitted"] = FittedConstants(**values["fitted"])
        return Software(**values)


_SAID = (
    "framework",
    "compiled",
    "attention_kernel",
    "matmul_dtype",
    "fp8_head",
    "fp8_scaling",
    "fitted",
)
"""Fields of `Software` that its text says, or that are no software."""


def software_line(data: Mapping[str, Any]) -> str:
    """The software that `Software.as_data` describes, as one line: what its text says, then every
    other field that is not the default.
    """
    others = [f"{name}={shown(value)}" for name, value in data.items() if name not in _SAID]
    return ", ".join([str(Software.from_data(data)), *others])


Joins = Literal["compiler", "by hand", "by hand, softmax alone"]
"""What joined operations into kernels: a compiler, or hand-written kernels with or without the
softmax.
"""
