"""Spells out running statistics that torch computes with numbers read out of buffers, or changes
unseen by torch.export.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from autopar.trace import batch_norm  # noqa: F401  # registers autopar::in_training


@contextlib.contextmanager
def cumulative_averages() -> Iterator[None]:
    """A context in which batch norms with `momentum=None` average running statistics over all
    batches without reading the number of batches out of its buffer.
    """
    plain = _BatchNorm.forward

    def forward(self: _BatchNorm, input: Tensor) -> Tensor:
        counts = self.momentum is None and self.training and self.track_running_stats
        if not counts or self.num_batches_tracked is None:
            return plain(self, input)
        return _averaged(self, input)

    _BatchNorm.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        _BatchNorm.forward = plain  # type: ignore[method-assign]


def _averaged(module: _BatchNorm, input: Tensor) -> Tensor:
    """Batch norm in training. A momentum of 1 leaves the batch's statistics in the buffers, from
    which their averages with the earlier ones follow.
    """
    module._check_input_dim(input)
    mean, var, count = module.running_mean, module.running_var, module.num_batches_tracked
    if mean is None or var is None or count is None:
        raise ValueError("a batch norm that tracks statistics has buffers for them")
    before = mean.clone(), var.clone()
    out = F.batch_norm(input, mean, var, module.weight, module.bias, True, 1.0, module.eps)
    with torch.no_grad():
        count.add_(1)
        share = count.to(mean.dtype).reciprocal()
        for running, old in zip((mean, var), before, strict=True):
            running.copy_(old * (1 - share) + running * share)
    return out


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor | None:
    """F.instance_norm in training with running statistics, whose change torch.export does not see.
    None if torch's own function must be used: there are none, or they normalize.
    """
    if running_mean is None or running_var is None or not use_input_stats:
        return None
    dims, shape = list(range(2, input.dim())), [1, -1, *[1] * (input.dim() - 2)]
    wide = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
    mean = wide.mean(dims, keepdim=True)
    squares = (wide - mean).square().mean(dims, keepdim=True)
    number = input[0, 0].numel()
    in_training = torch.ops.autopar.in_training
    used_mean, used = (
        in_training(value, running.detach().view(shape).expand_as(value))
        for value, running in ((mean, running_mean), (squares, running_var))
    )
    with torch.no_grad():
        unbiased = squares.detach() * (number / max(number - 1, 1))
        for running, value in ((running_mean, mean.detach()), (running_var, unbiased)):
            running.copy_(running * (1 - momentum) + value.mean(0).flatten() * momentum)
    out = (wide - used_mean) * torch.rsqrt(used + eps)
    if weight is not None:
        out = out * weight.view(shape)
    if bias is not None:
        out = out + bias.view(shape)
    return out.to(input.dtype)
