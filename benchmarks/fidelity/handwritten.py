"""Training loops as one writes them by hand over torch's own parallelism, on the reference Llama:
what `vs_handwritten.py` compares with.

Each function takes a whole model with its weights and the factory of its optimizer. It returns a
function that runs one step on this rank's part of a batch, and returns the rank's mean loss, or
None if the rank computes none.  Nothing is reduced that the gradients do not need: the loss of all
ranks is the mean of those that are returned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from autopar.models.common import rotary_tables, shifted_loss
from autopar.models.llama import Llama
from autopar.runtime.engine import Optimizer
from benchmarks.fidelity.megatron_way import MegatronBlock, sum_norms

Batch = Mapping[str, Tensor]
Step = Callable[[Batch], Tensor | None]


def _loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    after_backward: Callable[[], None] = lambda: None,
) -> Step:
    def step(batch: Batch) -> Tensor:
        loss = model(**batch)
        loss.backward()
        after_backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def data_parallel(model: Llama, optimizer: Optimizer) -> Step:
    """A step under DistributedDataParallel: gradients are averaged in buckets during backward."""
    return _loop(nn.parallel.DistributedDataParallel(model), optimizer(model.parameters()))


def fully_sharded(model: Llama, optimizer: Optimizer, reshard: bool) -> Step:
    """A step under FSDP2 by layer. With `reshard` parameters are freed between forward and backward
    (ZeRO 3), else they stay (ZeRO 2).
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    return _loop(model, optimizer(model.parameters()))


def tensor_parallel(
    model: Llama, optimizer: Optimizer, sequences: bool, megatron: bool = False
) -> Step:
    """A step under DTensor, as in PyTorch's tutorial: heads, feed-forward width and vocabulary are
    sharded over all ranks.

    With `sequences`, values between matrix products are sharded along positions. With `megatron`
    too, layers are those of `megatron_way.py`.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    between = Shard(1) if sequences else Replicate()
    layer_plan = {
        **{f"attention.{name}_proj": ColwiseParallel() for name in "qkv"},
        "attention.o_proj": RowwiseParallel(output_layouts=between),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=between),
    }
    if sequences:
        layer_plan |= {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(input_layouts=(between, None, None, None),
                                            desired_input_layouts=(Replicate(), None, None, None)),
            "mlp_norm": SequenceParallel(),
            "mlp": PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),)),
        }  # fmt: skip
    for number, layer in enumerate(model.layers):
        if megatron:
            model.layers[number] = MegatronBlock(layer)
            continue
        layer.attention.heads //= mesh.size()
        layer.attention.kv_heads //= mesh.size()
        parallelize_module(layer, mesh, layer_plan)
    ends = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(
            input_layouts=between, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    parallelize_module(model, mesh, ends | ({"norm": SequenceParallel()} if sequences else {}))
    # a group must not mix the two
    sharded = [p for p in model.parameters() if isinstance(p, DTensor)]
    whole = [p for p in model.parameters() if not isinstance(p, DTensor)]
    made = optimizer([{"params": group} for group in (sharded, whole) if group])
    run = _loop(model, made, partial(sum_norms, model)) if megatron else _loop(model, made)

    def step(batch: Batch) -> Tensor:
        with loss_parallel():
            return run(batch).full_tensor()

    return step


class _Stage(nn.Module):
    """Layers `start` to `end` - 1 of a Llama; the first stage also has the embedding, the last one
    norm and head.
    """

    def __init__(self, model: Llama, start: int, end: int) -> None:
        super().__init__()
        self.config = model.config
        self.embed = model.embed if start == 0 else None
        self.layers = nn.ModuleList(model.layers[start:end])
        last = end == len(model.layers)
        self.norm, self.head = (model.norm, model.head) if last else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        cos, sin = rotary_tables(x.shape[1], self.config.head_dim, self.config.rope_theta, like=x)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x if self.head is None else self.head(self.norm(x))


def pipeline(model: Llama, optimizer: Optimizer, cuts: list[int], micro_batches: int) -> Step:
    """A step of `micro_batches` micro-batches under 1F1B of torch.distributed.pipelining. Stage s
    has layers cuts[s] to cuts[s + 1] - 1. Only the last rank returns a loss.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    module = _Stage(model, cuts[rank], cuts[rank + 1])
    stage = PipelineStage(module, rank, ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, micro_batches, loss_fn=shifted_loss)
    trained = optimizer(module.parameters())

    def step(batch: Batch) -> Tensor | None:
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(batch["input_ids"])
        elif rank == ranks - 1:
            schedule.step(target=batch["labels"], losses=losses, return_outputs=False)
        else:
            schedule.step()
        trained.step()
        trained.zero_grad(set_to_none=True)
        return torch.stack(losses).mean().detach() if losses else None

    return step
