"""Routed experts token by token: what `autopar::routed_experts` means, written without sorting, slices or its activations."""

from __future__ import annotations

from math import ceil

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS = ("gated:silu", "gated:gelu", "plain:relu2", "plain:sigmoid", "interleaved_clamp:0.7:1.702", "concatenated_clamp:0.7:1.5",
               "gated_clamp:silu:0.5")  # fmt: skip


def width(activation: str, ffn: int) -> int:
    """F' of F."""
    return ffn if activation.startswith("plain") else 2 * ffn


def activate(activation: str, u: Tensor) -> Tensor:
    """One row, (F',) -> (F,)."""
    kind, *numbers = activation.split(":")
    half = u.shape[0] // 2
    first, second = u[:half], u[half:]
    if activation in ("gated:silu", "gated:gelu"):
        return {"silu": F.silu, "gelu": F.gelu}[numbers[0]](first) * second
    if kind == "plain":
        return u.clamp(min=0) ** 2 if numbers[0] == "relu2" else 1 / (1 + (-u).exp())
    if kind == "gated_clamp":
        limit = float(numbers[1])
        return F.silu(torch.where(first < limit, first, limit)) * second.clamp(-limit, limit)
    if kind == "interleaved_clamp":
        first, second = u[torch.arange(0, 2 * half, 2)], u[torch.arange(1, 2 * half, 2)]
    limit, alpha = map(float, numbers)
    first, second = torch.where(first < limit, first, limit), second.clamp(-limit, limit)
    return first / (1 + (-alpha * first).exp()) * (second + 1)


def naive(
    x,
    index,
    weights,
    up,
    up_bias,
    down,
    down_bias,
    activation,
    transposed=False,
    capacity_factor=0.0,
) -> Tensor:
    """Arguments of `routed_experts`; every expert matrix is (out, in) here."""
    experts, (tokens, choices) = up.shape[0], index.shape
    capacity = (
        ceil(capacity_factor * (tokens * choices) / experts)
        if capacity_factor
        else tokens * choices
    )
    taken = [0] * experts
    rows = []
    for t in range(tokens):
        total = 0 * x[t]
        for k in range(choices):
            e = int(index[t, k])
            if e == experts or taken[e] == capacity:
                continue
            taken[e] += 1
            inner = (x[t] @ up[e] if transposed else up[e] @ x[t]) + (
                0 if up_bias is None else up_bias[e]
            )
            inner = activate(activation, inner)
            outer = (inner @ down[e] if transposed else down[e] @ inner) + (
                0 if down_bias is None else down_bias[e]
            )
            total = total + weights[t, k] * outer
        rows.append(total)
    return torch.stack(rows) if rows else 1 * x


def make(
    tokens: int,
    choices: int,
    experts: int,
    hidden: int,
    ffn: int,
    activation: str,
    transposed: bool,
    bias: bool,
    seed: int = 0,
) -> dict:
    """Random fp64 arguments, all but index requiring gradients; a token chooses different experts."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    wide = width(activation, ffn)
    return {
        "x": normal(tokens, hidden),
        "index": torch.rand(tokens, experts, generator=generator).argsort(1)[:, :choices],
        "weights": normal(tokens, choices),
        "up": normal(experts, hidden, wide) if transposed else normal(experts, wide, hidden),
        "up_bias": normal(experts, wide) if bias else None,
        "down": normal(experts, ffn, hidden) if transposed else normal(experts, hidden, ffn),
        "down_bias": normal(experts, hidden) if bias else None,
        "activation": activation,
        "transposed": transposed,
    }


def value_and_gradients(function, arguments: dict, seed: int = 1) -> dict[str, Tensor]:
    """The result, and the gradient of each argument that requires one, for a random gradient of the result."""
    leaves = {
        k: v.detach().clone().requires_grad_(v.requires_grad) if isinstance(v, Tensor) else v
        for k, v in arguments.items()
    }
    out = function(**leaves)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed), dtype=out.dtype)
    wanted = {k: v for k, v in leaves.items() if isinstance(v, Tensor) and v.requires_grad}
    found = torch.autograd.grad(
        out, list(wanted.values()), grad, allow_unused=True, materialize_grads=True
    )
    return {"out": out.detach(), **dict(zip(wanted, found, strict=True))}
