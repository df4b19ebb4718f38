"""The tensors that the modules of a model register, and the errors about what forward assigns to
them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from autopar.errors import AutoparError

_KINDS = ("_parameters", "_buffers")
REGISTER = "register it with its final shape and dtype, and keep them (a part can be written: buffer[:n] = ...)"


@dataclass(frozen=True, slots=True)
class RegisteredTensor:
    """A registered tensor as it was before the call: the module that holds it, the name of the
    registry and the key there.
    """

    module: nn.Module
    kind: str
    key: str
    tensor: Tensor
    trained: bool


def registered_tensors(model: nn.Module) -> Iterator[tuple[str, RegisteredTensor]]:
    """Yields (name, entry) of each registered tensor, of a module's first path alone."""
    for path, module in model.named_modules():
        for kind in _KINDS:
            for key, tensor in getattr(module, kind).items():
                if tensor is not None:
                    trained = kind == "_parameters" and tensor.requires_grad
                    yield (
                        joined_name(path, key),
                        RegisteredTensor(module, kind, key, tensor, trained),
                    )


def joined_name(path: str, key: str) -> str:
    """The name of what a module at `path` registers as `key`."""
    return f"{path}.{key}".lstrip(".")


def registered_now(entry: RegisteredTensor) -> Any:
    """What is registered now in the place of `entry`; None if nothing is."""
    return getattr(entry.module, entry.kind).get(entry.key)


def storage_of(tensor: Tensor) -> int:
    """The address of a tensor's storage; 0 for a sparse one, which has none."""
    return address_of(tensor.untyped_storage()) if tensor.layout == torch.strided else 0


def address_of(storage: Any) -> int:
    """The address of a storage; 0 if it has none."""
    return getattr(storage, "_cdata", 0)


def has_tensors(module: nn.Module | None) -> bool:
    """Whether a module has parameters or buffers, in children too."""
    return module is not None and any(True for _ in (*module.parameters(), *module.buffers()))


def same_module(one: nn.Module | None, other: nn.Module | None) -> bool:
    """Whether two are the same module. torch.export stands proxies, which share the attributes of a
    module, for the children of modules that have several paths.
    """
    if one is None or other is None:
        return one is other
    return vars(one) is vars(other)


def put_back(entries: Collection[RegisteredTensor]) -> None:
    """Register the tensors of `entries` again, in their order, before what was added since."""
    for module, kind in dict.fromkeys((entry.module, entry.kind) for entry in entries):
        registry = getattr(module, kind)
        own = {e.key: e.tensor for e in entries if e.module is module and e.kind == kind}
        found = own | {key: value for key, value in registry.items() if key not in own}
        registry.clear()
        registry.update(found)
        for key in own:
            vars(module).pop(key, None)


def leaves_of(loss: Tensor) -> Iterator[Tensor]:
    """Yields the leaf tensors for which `loss` has a gradient, each once."""
    for node in _backward_of(loss):
        if (variable := getattr(node, "variable", None)) is not None:
            yield variable


def is_saved(loss: Tensor, tensor: Tensor) -> bool:
    """Whether the backward of `loss` reads memory of `tensor`, or something that was changed since
    it was saved.
    """
    address = storage_of(tensor)
    try:
        saved = (getattr(n, key) for n in _backward_of(loss) for key in dir(n) if "_saved_" in key)
        found = [x for each in saved for x in (each if isinstance(each, tuple) else (each,))]
    except RuntimeError:  # changed since
        return True
    return any(isinstance(x, Tensor) and storage_of(x) == address for x in found)


def _backward_of(loss: Tensor) -> Iterator[Any]:
    """Yields the nodes of the backward of `loss`, each once."""
    with torch._C.DisableTorchFunction():  # which would give a node of `without_hooks`
        stack = [loss.grad_fn] if loss.grad_fn is not None else []
    seen: set[Any] = set(stack)
    while stack:
        node = stack.pop()
        yield node
        for inner, _ in node.next_functions:
            if inner is not None and inner not in seen:
                seen.add(inner)
                stack.append(inner)


def difference_of(before: Tensor, after: Tensor) -> str:
    """Text that says in what a new value differs from the tensor before; '' if it fits."""
    if tuple(map(str, before.shape)) != tuple(map(str, after.shape)):
        return f"shape {_shape(after)}, not {_shape(before)}"
    if before.dtype != after.dtype:
        return f"{after.dtype}, not {before.dtype} (value.to(buffer.dtype) converts it)"
    if before.device != after.device or before.layout != after.layout:
        return f"{after.layout} on {after.device}, not {before.layout} on {before.device}"
    return ""


def _shape(tensor: Tensor) -> str:
    sizes = ("batch" if isinstance(size, torch.SymInt) else str(size) for size in tensor.shape)
    return f"({', '.join(sizes)})"


def requires_text(name: str, does: str, where: str) -> str:
    """The text of an error about `requires_grad`: forward `does` ("makes" or "leaves") `name` trained
    or frozen. `where` is the user's line.
    """
    state = "trained" if does == "makes" else "frozen, which would last into the next step"
    return (
        f"forward {does} {name} {state}{where}: what trains is decided before training. Set requires_grad before this call; within "
        "forward, set it back before forward ends, or read the tensor detached (weight.detach())"
    )


def norm_text(name: str) -> str:
    """The text of an error about the statistics `name` of a batch norm, which forward changes in
    training after it has read them in evaluation.
    """
    return (
        f"forward changes {name!r} in training after a batch norm has read it in evaluation, so that backward of eager PyTorch reads "
        "the changed value. Use a second batch norm, or call F.batch_norm with copies (running_mean.clone())"
    )


def refuse(name: str, how: str, advice: str) -> NoReturn:
    """Raise AutoparError: forward replaces the tensor called `name`, `how`; `advice` says what works."""
    raise AutoparError(
        f"forward replaces {name!r} {how}; autopar keeps one tensor for it: {advice}"
    )


def refuse_shared(name: str, other: str, where: str) -> NoReturn:
    """Raise AutoparError: the new value of `name` is memory that `other` has too. `where` is the
    user's line.
    """
    refuse(
        name,
        f"by memory of {other}{where}, so that a later change of one would change both",
        "assign a copy (.clone())",
    )
