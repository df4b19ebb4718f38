"""Creates the parameters of a program: each rank keeps only its shards.

A model with real tensors is sharded from these. A meta model is read from `weights` (safetensors or
a torch checkpoint), or initialized module by module by the model's own initializers. A rank then
never holds more than its shards and one module.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import nn

from autopar.errors import AutoparError
from autopar.ir.traced import ParameterSpec
from autopar.rewrite.lowerings.sizes import Layouts
from autopar.rewrite.program import Program, shard_of

from .weights import Weights


def materialize(
    program: Program,
    model: nn.Module,
    specs: Mapping[str, ParameterSpec],
    weights: Weights | None,
    device: torch.device,
    home: Callable[[str], torch.device],
    dtype: Callable[[str], torch.dtype],
    seed: int,
    held: Collection[str] | None = None,
    kept: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, shard: shard,
) -> dict[str, torch.Tensor]:
    """This rank's shards of parameters and buffers, by name.

    Raises AutoparError if a tensor is missing, has the wrong shape, or its module has no
    initializer. Every rank must call it with the same `specs`.

    Args:
        program: the program that needs them.
        model: the model, real or on the meta device.
        specs: all parameters and buffers by name.
        weights: the checkpoint to read from, or None.
        device: the device for communication between ranks.
        home: the device of each result, by name.
        dtype: the dtype of each floating-point result, by name.
        seed: seeds the initializers.
        held: names of the tensors to return; default all.
        kept: `kept(name, shard)` returns the part of a shard that is kept.
    """
    held = specs.keys() if held is None else held
    layouts: dict[str, Layouts] = {}
    for parameter in program.parameters:
        layouts.setdefault(parameter.spec.name, parameter.layouts)

    def part(name: str, tensor: torch.Tensor, layout: Layouts) -> torch.Tensor:
        target = dtype(name) if tensor.is_floating_point() else tensor.dtype
        with torch.no_grad():
            shard = kept(name, shard_of(tensor, layout, program.mesh, program.rank))
            return shard.to(
                device=home(name), dtype=target, copy=True, memory_format=torch.contiguous_format
            )

    def keep(name: str, whole: torch.Tensor) -> torch.Tensor:
        spec = specs[name]
        if tuple(whole.shape) != spec.shape:
            raise AutoparError(
                f"{name} has shape {tuple(whole.shape)} in the weights; the model has {spec.shape}"
            )
        return part(name, whole, layouts.get(name, {}))

    if weights is not None:
        found = {}
        for name in (name for name in held if name in weights):
            layout = layouts.get(name, {})
            if weights.by_rows(name):
                rows, layout = _rows(specs[name].shape[0], layout, program)
                found[name] = part(name, weights.read(name, rows), layout)
            else:
                found[name] = keep(name, weights.read(name))
        rest = {name for name in held if name not in found}
        if rest:
            found |= {name: keep(name, t) for name, t in _buffers(model, rest)}
        return found
    own = dict(_named_tensors(model))
    if not any(own[name].is_meta for name in specs):
        wholes = ((name, _from_first_rank(own[name].detach(), device)) for name in specs)
        return {name: keep(name, whole) for name, whole in wholes if name in held}
    return {name: keep(name, tensor) for name, tensor in initialized(model, set(held), seed)}


def _rows(size: int, layouts: Layouts, program: Program) -> tuple[list[int], Layouts]:
    """The indices along dim 0, of `size`, that this rank holds, and the layouts of other dims."""
    of_rows = {a: each for a, each in layouts.items() if each.is_shard and each.dim == 0}
    rows = shard_of(torch.arange(size), of_rows, program.mesh, program.rank)
    return rows.tolist(), {a: each for a, each in layouts.items() if a not in of_rows}


def _from_first_rank(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Rank 0's tensor, on every rank, as in DDP: ranks may have initialized their models with
    different seeds.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return tensor
    tensor = tensor.to(device, copy=True).contiguous()
    dist.broadcast(tensor, src=0)
    return tensor


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def initialized(model: nn.Module, names: set[str], seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Initialize a meta model on the CPU, one module at a time, and yield (name, tensor) for
    `names`, each tensor once.

    Every module is seeded from `seed` and its name, so the result does not depend on the rank or
    the plan. torch's random state is restored.
    """
    done: set[int] = set()
    state = torch.get_rng_state()
    try:
        for prefix, module in model.named_modules():
            own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            fresh = [(name, t) for name, t in own if id(t) not in done]
            if not fresh:
                continue
            done.update(id(t) for _, t in fresh)
            torch.manual_seed((seed << 32) ^ zlib.crc32(prefix.encode()))
            real = _initialize_module(model, module, prefix)
            for name, _ in fresh:
                full = f"{prefix}.{name}" if prefix else name
                if full in names:
                    yield full, getattr(real, name).detach()
    finally:
        torch.set_rng_state(state)


def _buffers(model: nn.Module, names: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
    tensors = dict(_named_tensors(model))
    if not any(tensors[name].is_meta for name in names):
        return ((name, tensors[name]) for name in names)
    return initialized(model, names, 0)


def _initialize_module(model: nn.Module, module: nn.Module, prefix: str) -> nn.Module:
    """An initialized copy of one module on the CPU, without its children. Raises AutoparError if an
    initializer leaves some tensor unset.
    """
    state = torch.get_rng_state()
    real = _initialized_over(model, module, prefix, 0)
    numbers = {name: t for name, t in _held(real) if not t.is_floating_point()}
    if numbers:  # they have no NaN that would show what was left: again, over other numbers
        torch.set_rng_state(state)
        again = dict(_held(_initialized_over(model, module, prefix, 1)))
        if left := [name for name, t in numbers.items() if not torch.equal(t, again[name])]:
            raise _left(model, module, f"{prefix}.{left[0]}")
    return real


def _held(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return (
        (n, t) for n, t in (*module._parameters.items(), *module._buffers.items()) if t is not None
    )


def _left(model: nn.Module, module: nn.Module, name: str) -> AutoparError:
    whose = (
        type(model).__name__ + "._init_weights"
        if hasattr(model, "_init_weights")
        else type(module).__name__ + ".reset_parameters"
    )
    return AutoparError(
        f"{whose} left {name.lstrip('.')} uninitialized; set it there, pass weights=, or build the model on a real device"
    )


def _initialized_over(model: nn.Module, module: nn.Module, prefix: str, number: int) -> nn.Module:
    """`_initialize_module` on memory prefilled with NaN, or with `number` for dtypes without
    NaN.
    """
    children, module._modules = module._modules, {}
    try:
        real = copy.copy(module)
        real._parameters, real._buffers = dict(module._parameters), dict(module._buffers)
        real.to_empty(device="cpu", recurse=False)
    finally:
        module._modules = children
    with torch.no_grad():
        for _, tensor in _held(real):
            tensor.fill_(torch.nan if tensor.is_floating_point() else number)
        # Hugging Face: one method of the model initializes any of its modules, buffers included
        initialize = getattr(model, "_init_weights", None)
        reset = getattr(real, "reset_parameters", None)
        if reset is not None:
            reset()
        if initialize is not None:
            initialize(real)
        elif reset is None:
            raise AutoparError(
                f"module {prefix or type(module).__name__!r} ({type(module).__name__}) is on the meta device and has no "
                "reset_parameters(): define it, pass weights=, or build the model on a real device"
            )
    if missed := [name for name, t in _held(real) if t.is_floating_point() and t.isnan().any()]:
        raise _left(model, module, f"{prefix}.{missed[0]}")
    return real
