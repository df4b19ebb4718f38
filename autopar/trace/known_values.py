"""Gives forward the values of small buffers that it reads as Python numbers.

A captured graph has one path. A flag such as `initialized`, which decides between two, is read as
it is during capture, unless forward changes it: then the next step could take the other path.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from autopar.errors import AutoparError
from autopar.trace.user_lines import line_now

NUMBERS = {
    Tensor.item: ".item()", Tensor.__int__: "int()", Tensor.__float__: "float()", Tensor.__bool__: "bool()", Tensor.__index__: "an index",
    Tensor.__complex__: "complex()", Tensor.__contains__: "in", torch.equal: "torch.equal", Tensor.equal: "Tensor.equal",
    torch.allclose: "torch.allclose", Tensor.allclose: "Tensor.allclose", torch.is_nonzero: "torch.is_nonzero",
    Tensor.is_nonzero: "Tensor.is_nonzero",
}  # fmt: skip
"""Functions that read a number or truth value out of a tensor, with their names for messages."""
_MOST = 1024
"""The largest number of elements whose values are kept."""
_PLAIN = (int, float, complex, bool, str, type(None), torch.dtype, torch.device, slice, type(...))

_CHANGED = (
    "If the first batch alone changes it, call the model with that batch before (under torch.no_grad()). Else keep it a tensor: "
    "queue.index_copy_(0, (torch.arange(n) + pointer) % size, rows)"
)
_AVERAGED = (
    "In the place of AveragedModel.update_parameters write `with torch.no_grad(): average.lerp_(parameter, 1 - decay)` for each pair of "
    "parameters; or call engine.average, if forward does not run the averaged model"
)


@dataclass(frozen=True, slots=True)
class UserTensors:
    """What forward may read of the user's own tensors, by name: the values of small buffers, and the
    attributes that the user has set on tensors. Make one by `of`.
    """

    values: dict[str, Tensor]
    attributes: dict[str, dict[str, Any]]

    @classmethod
    def of(cls, model: nn.Module) -> UserTensors:
        """Those of a model as it is now."""
        values = {
            name: tensor
            for name, tensor in model.named_buffers()
            if _has_values(tensor) and tensor.numel() <= _MOST
        }
        named = (*model.named_parameters(), *model.named_buffers())
        return cls(values, {name: user_attributes(tensor) for name, tensor in named})


def user_attributes(tensor: Tensor) -> dict[str, Any]:
    """The attributes that users have set on a tensor, by name."""
    return {
        key: value
        for key, value in vars(tensor).items()
        if key not in _OF_TORCH and "memo" not in key and not key.startswith("_dynamo")
    }


_OF_TORCH = (
    "_fake_device", "fake_mode", "constant", "pytype", "dispatch_keys", "real_tensor", "_is_param", "_is_buffer", "persistent",
)  # fmt: skip
"""Attributes that torch sets on tensors."""


class KnownValues:
    """Follows, through one call of forward, what is computed from `values` alone.

    `read` has the names of tensors of which forward has read a number, each with the user's line.
    """

    def __init__(self, values: Mapping[str, Tensor], name_of: Callable[[Tensor], str]) -> None:
        """`name_of(tensor)` is the name of a registered tensor that forward has not changed yet, or
        ''.
        """
        self.read: dict[str, str] = {}
        self._values, self._name_of = values, name_of
        self._made: dict[int, tuple[Tensor, int, Tensor, frozenset[str]]] = {}

    def number(self, func: Callable, args: tuple, kwargs: dict) -> tuple[bool, Any]:
        """(True, the result of `func`) if it reads a number out of tensors that are known; else
        (False, None).
        """
        if func not in NUMBERS:
            return False, None
        found = self._real(args, kwargs)
        if found is None or not found[2]:
            return False, None
        args, kwargs, names = found
        value = _computed(func, args, kwargs)
        if value is None or isinstance(value, Tensor):
            return False, None
        for name in names:
            self.read.setdefault(name, line_now())
        return True, value

    def follow(self, func: Callable, args: tuple, kwargs: dict, result: Any) -> None:
        """Remember the value of `result`, one or several tensors that `func` computed, if those of
        its operands are known.
        """
        results = [result] if isinstance(result, Tensor) else result
        if not isinstance(results, (list, tuple)) or not all(map(_is_small, results)):
            return
        found = self._real(args, kwargs)
        if found is None or not found[2]:
            return
        value = _computed(func, found[0], found[1])
        values = [value] if isinstance(value, Tensor) else value or ()
        for made, real in zip(results, values, strict=False):
            if isinstance(real, Tensor) and real.shape == made.shape:
                with _unwatched():
                    real = real.to(made.dtype)
                self._made[id(made)] = made, made._version, real, found[2]

    def check(self, changed: Iterable[str]) -> None:
        """Raise AutoparError if forward changes a tensor of which it has read a number. `changed`
        are the names of the tensors that it changes.
        """
        for name in changed:
            if name in self.read:
                remedy = _AVERAGED if name.rpartition(".")[2] == "n_averaged" else _CHANGED
                raise AutoparError(
                    f"forward reads {name!r} as a Python number{self.read[name]} and changes it, so that the next step may run other ops. "
                    f"{remedy}"
                )

    def notes(self) -> list[str]:
        """A note (at most one) on what was read."""
        if not self.read:
            return []
        where = next(iter(self.read.values()))
        return [
            f"forward reads {', '.join(map(repr, self.read))} as a Python number{where}: it stays as it is now in every step"
        ]

    def _real(self, args: tuple, kwargs: dict) -> tuple[tuple, dict, frozenset[str]] | None:
        """The arguments with real values in the place of tensors, and the names that these come
        from. None if a value is not known.
        """
        names = frozenset[str]()
        flat, structure = pytree.tree_flatten((args, kwargs))
        for place, value in enumerate(flat):
            if isinstance(value, Tensor):
                known = self._value_of(value)
                if known is None:
                    return None
                flat[place], of = known
                names |= of
            elif type(value) not in _PLAIN:
                return None
        args, kwargs = pytree.tree_unflatten(flat, structure)
        return args, kwargs, names

    def _value_of(self, tensor: Tensor) -> tuple[Tensor, frozenset[str]] | None:
        made = self._made.get(id(tensor))
        if made is not None:
            same = made[0] is tensor and tensor._version == made[1]
            return (made[2], made[3]) if same else None
        name = self._name_of(tensor)
        if name not in self._values:
            return None
        with _unwatched():
            value = self._values[name].detach().to("cpu", tensor.dtype, copy=True)
        return value, frozenset({name})


def _has_values(tensor: Tensor) -> bool:
    plain = type(tensor) in (Tensor, nn.Parameter, nn.Buffer) and tensor.layout == torch.strided
    return plain and not tensor.is_meta


def _is_small(tensor: Any) -> bool:
    fixed = isinstance(tensor, FakeTensor) and all(isinstance(s, int) for s in tensor.shape)
    return fixed and tensor.numel() <= _MOST


@contextlib.contextmanager
def _unwatched() -> Iterator[None]:
    """A context in which ops run plainly on real tensors, though forward is being captured."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield


def _computed(func: Callable, args: tuple, kwargs: dict) -> Any:
    """What `func` computes of real tensors; None if it draws random numbers, or fails."""
    try:
        with _unwatched():
            state = torch.get_rng_state()
            value = func(*args, **kwargs)
            if torch.equal(torch.get_rng_state(), state):
                return value
            torch.set_rng_state(state)
    except Exception:  # forward itself raises what is to be raised
        return None
    return None
