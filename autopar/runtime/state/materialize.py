"""Creates the parameters of a program: each rank keeps only its shards.

A model with real tensors is sharded from these. A meta model is read from `weights` (safetensors or
a torch checkpoint), or initialized module by module by the model's own initializers. A rank then
never holds more than its shards and one module.
"""

from __future__ import annotations

import copy
import json
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from autopar.errors import AutoparError
from autopar.files import path_of
from autopar.ir.traced import ParameterSpec
from autopar.rewrite.program import Program, shard_of

Reader = Callable[[str], torch.Tensor]


def materialize(
    program: Program,
    model: nn.Module,
    specs: Mapping[str, ParameterSpec],
    weights: str | Path | None,
    device: torch.device,
    home: Callable[[str], torch.device],
    dtype: Callable[[str], torch.dtype],
    seed: int,
    held: Collection[str] | None = None,
    kept: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, shard: shard,
) -> dict[str, torch.Tensor]:
    """This rank's shards of parameters and buffers, by name.

    Buffers that the weights lack come from the model. Raises AutoparError if the weights cannot be
    read or lack a parameter, a shape is wrong, or a module has no initializer or one that leaves a
    tensor unset. Every rank must call it with the same `specs`.

    Args:
        program: the program that needs them.
        model: the model, real or on the meta device.
        specs: all parameters and buffers by name.
        weights: a file or folder to read from, or None.
        device: the device for communication between ranks.
        home: the device of each result, by name.
        dtype: the dtype of each floating-point result, by name.
        seed: seeds the initializers of a meta model.
        held: names of the tensors to return; default all.
        kept: `kept(name, shard)` returns the part of a shard that is kept.
    """
    held = specs.keys() if held is None else held
    layouts: dict[str, dict] = {}
    for parameter in program.parameters:
        layouts.setdefault(parameter.spec.name, parameter.layouts)

    def keep(name: str, whole: torch.Tensor) -> torch.Tensor:
        spec = specs[name]
        if tuple(whole.shape) != spec.shape:
            raise AutoparError(
                f"{name} has shape {tuple(whole.shape)} in the weights; the model has {spec.shape}"
            )
        target = dtype(name) if whole.is_floating_point() else whole.dtype
        with torch.no_grad():
            shard = kept(name, shard_of(whole, layouts.get(name, {}), program.mesh, program.rank))
            return shard.to(
                device=home(name), dtype=target, copy=True, memory_format=torch.contiguous_format
            )

    if weights is not None:
        reader = open_weights(weights)
        found = {}
        for name in held:
            spec = specs[name]
            tensor = next(
                (reader(alias) for alias in (name, *spec.aliases) if reader.has(alias)), None
            )
            if tensor is not None:
                found[name] = keep(name, tensor)
            elif not spec.buffer:
                raise AutoparError(
                    f"weights {weights} have no tensor {name!r} (of shape {spec.shape}); they hold {len(reader.names)} tensors, "
                    f"{', '.join(sorted(reader.names)[:3])} first"
                )
        rest = {name for name in held if name not in found}
        if rest:
            found |= {name: keep(name, t) for name, t in _buffers(model, rest)}
        return found
    own = dict(_named_tensors(model))
    if not any(own[name].is_meta for name in specs):
        wholes = ((name, _from_first_rank(own[name].detach(), device)) for name in specs)
        return {name: keep(name, whole) for name, whole in wholes if name in held}
    return {name: keep(name, tensor) for name, tensor in initialized(model, set(held), seed)}


def _from_first_rank(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Rank 0's values of `tensor`, on every rank, as in DDP: ranks may have initialized their
    models with different seeds. Every rank must call it.

    The result is a new tensor on `device`, where the broadcast runs. With one rank, or without a
    process group, it is `tensor` itself, on its own device.
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
    """An initialized copy of the module called `prefix` on the CPU, without its children. Raises
    AutoparError if it has no initializer, or one that leaves some tensor unset.
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


class open_weights:
    """Reads tensors by name (`reader(name)`) from a .safetensors file, a directory of them (with or
    without an index), or a torch checkpoint. AutoparError if there is none or it cannot be read.
    """

    def __init__(self, path: str | Path) -> None:
        path = path_of(path, "weights")
        self._files: dict[str, Path] = {}
        self._loaded: dict[str, torch.Tensor] = {}
        try:
            if not path.exists():
                raise AutoparError(
                    f"weights {path} do not exist; give a .safetensors file, a directory of them, or a torch checkpoint"
                )
            if path.is_dir() or path.suffix == ".safetensors":
                self._index(path)
            else:
                state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
                found = state.get("state_dict", state) if isinstance(state, dict) else {}
                self._loaded = {
                    name: t for name, t in dict(found).items() if isinstance(t, torch.Tensor)
                }
        except AutoparError:
            raise
        except Exception as error:  # corrupt files raise many types
            raise AutoparError(
                f"cannot read weights {path}: {type(error).__name__}: {str(error)[:200]}"
            ) from error

    def _index(self, path: Path) -> None:
        from safetensors import safe_open

        index = path / "model.safetensors.index.json"
        if path.is_dir() and index.exists():
            self._files = {
                name: path / file
                for name, file in json.loads(index.read_text())["weight_map"].items()
            }
            return
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not files:
            raise AutoparError(f"weights {path} is a directory without .safetensors files")
        for file in files:
            with safe_open(file, framework="pt") as reader:
                self._files |= dict.fromkeys(reader.keys(), file)

    @property
    def names(self) -> set[str]:
        """Names of all tensors in the files."""
        return set(self._files) | set(self._loaded)

    def has(self, name: str) -> bool:
        """Whether the files contain a tensor called `name`."""
        return name in self._files or name in self._loaded

    def __call__(self, name: str) -> torch.Tensor:
        """The tensor called `name`, on the CPU. Raises AutoparError if its file cannot be read."""
        if name in self._loaded:
            return self._loaded[name]
        from safetensors import safe_open

        try:
            with safe_open(self._files[name], framework="pt") as reader:
                return reader.get_tensor(name)
        except Exception as error:  # corrupt files raise many types
            raise AutoparError(
                f"cannot read weights {name} in {self._files[name]}: {type(error).__name__}: {str(error)[:200]}"
            ) from error
