"""Experts of Hugging Face models as one op: transformers' ExpertsInterface calls
`autopar::routed_experts`.

transformers' own functions sort all tokens, index and multiply. Captured, they consist of ops that
cannot be sharded. The activation between the two products is identified by trial: the module's gate
or activation runs on sample numbers and is compared with those of the op. Modules with another
activation keep transformers' function.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from autopar_kernels.routed_experts import POINTWISE, activation_function
from torch import Tensor, nn

EXPERTS_NAME = "autopar_experts"
REPLACED = ("grouped_mm", "batched_mm", "eager", None)
"""transformers' implementations that compute the same function and may be replaced. `eager` cannot
be captured, since its shapes depend on data.
"""

_ACTIVATION = "_autopar_activation"


def prepare_experts(model: nn.Module) -> None:
    """Make the experts modules of a transformers model compute by `routed_experts_forward`, in
    place: it registers the function and selects it in their configs. An implementation that the
    user chose is kept.
    """
    configs: list[Any] = []
    for module in filter(_is_experts, model.modules()):
        config: Any = module.config
        if config._experts_implementation in REPLACED:
            setattr(module, _ACTIVATION, _find_activation(module))
            configs.append(config)
    if not configs:
        return
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, routed_experts_forward)
    for config in configs:  # after all are chosen: modules share configs
        config._experts_implementation = EXPERTS_NAME


def routed_experts_forward(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The experts function for transformers' ExpertsInterface, by `autopar::routed_experts`:
    hidden_states (t, h), top_k_index and top_k_weights (t, k) -> (t, h), for t tokens and k
    choices.

    Calls transformers' own function for an unknown activation, or with its expert parallelism.
    """
    activation = getattr(module, _ACTIVATION, None)
    if activation is None or module._is_expert_parallel:
        from transformers.integrations.moe import grouped_mm_experts_forward

        return grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)
    up = "gate_up_proj" if module.has_gate else "up_proj"
    return torch.ops.autopar.routed_experts(
        hidden_states,
        top_k_index,
        top_k_weights,
        up=getattr(module, up),
        up_bias=getattr(module, f"{up}_bias") if module.has_bias else None,
        down=module.down_proj,
        down_bias=module.down_proj_bias if module.has_bias else None,
        activation=activation,
        transposed=module.is_transposed,
        capacity_factor=0.0,
    )


def _is_experts(module: nn.Module) -> bool:
    """Whether the module is one of transformers' experts: its class has the attributes that
    `use_experts_implementation` sets.
    """
    names = ("_apply_gate", "has_gate", "has_bias", "is_transposed", "_is_expert_parallel")
    return all(hasattr(module, name) for name in names)


def _find_activation(module: Any) -> str | None:
    """The name of the activation of `autopar_kernels.routed_experts`, such as 'gated:silu', that
    equals the module's. None if none does, if the module's fails on the test numbers, or if it
    norms the experts' results.

    The module's activation runs on 1,024 fp64 numbers with scales from 1 to 10^4, of both signs and
    on both sides of any limit.
    """
    function = module._apply_gate if module.has_gate else getattr(module, "act_fn", None)
    if function is None or module.has_post_expert_norm:
        return None
    with torch.no_grad(), torch.device("cpu"):
        scales = torch.tensor([1.0, 6.0, 100.0, 1e4], dtype=torch.float64).repeat(4).unsqueeze(1)
        generator = torch.Generator().manual_seed(0)
        probe = scales * torch.randn(16, 64, generator=generator, dtype=torch.float64)
        try:
            expected = function(probe)
        except RuntimeError:  # it has parameters, perhaps on meta
            return None
        for activation in _candidates(module):
            found = activation_function(activation)(probe)
            same_shape = found.shape == expected.shape
            if same_shape and torch.allclose(found, expected, rtol=1e-12, atol=1e-12):
                return activation
    return None


def _candidates(module: nn.Module) -> Iterator[str]:
    if not module.has_gate:
        yield from (f"plain:{name}" for name in POINTWISE)
        return
    yield from (f"gated:{name}" for name in POINTWISE)
    limit, alpha = (_number(module, name) for name in ("limit", "alpha"))
    if limit is not None:
        yield from (f"gated_clamp:{name}:{limit}" for name in POINTWISE)
        if alpha is not None:
            yield f"interleaved_clamp:{limit}:{alpha}"
            yield f"concatenated_clamp:{limit}:{alpha}"


def _number(module: nn.Module, name: str) -> float | None:
    found = (getattr(module, key, None) for key in (name, f"swiglu_{name}"))
    return next((float(value) for value in found if isinstance(value, (int, float))), None)
