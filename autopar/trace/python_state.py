"""The Python state that forward can access: module attributes, variables that its functions reach,
and random number generators.

A snapshot records what each place holds, by a readable path, and can restore it.
"""

from __future__ import annotations

import contextlib
import dis
import enum
import functools
import inspect
import io
import itertools
import logging
import random
import sys
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

_STANDARD = frozenset(vars(nn.Module())) - {"training"}
_LIBRARIES = frozenset(sys.stdlib_module_names) - {"__main__"} | {
    "torch",
    "numpy",
    "transformers",
    "autopar",
    "autopar_kernels",
}
"""Packages whose functions keep no state that forward computes with."""
_PLAIN = (
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    enum.Enum,
    np.generic,
    torch.dtype,
    torch.device,
)
_OPAQUE = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    torch.Tensor,
    logging.Logger,
)
_RANDOM = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
RANDOM = "the random state of "
"""The prefix of the path of a generator that belongs to no object of the user."""
_GENERATORS = (
    ("`random`", random._inst),
    ("`numpy.random`", np.random.mtrand._rand),
    ("`torch`", torch.default_generator),
)
_SEED = 0x5EED_0F_CA97


@contextlib.contextmanager
def torch_seeded() -> Iterator[None]:
    """A context in which torch's default generator has a seed that no user would choose, so that a
    seed set by forward is detected. The generator's state is restored at the end.
    """
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(_SEED)
    try:
        yield
    finally:
        torch.set_rng_state(state)


def children(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields (step, object) for everything that an object holds directly; the step is '.name' or
    '[key]'. Nothing for numbers, texts, functions, tensors and modules of Python.

    Of an nn.Module, registered parameters, buffers and modules are left out.
    """
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", child) for key, child in _entries(value).items())
    elif isinstance(value, (list, tuple, deque)):
        yield from ((f"[{number}]", child) for number, child in enumerate(list(value)))
    elif isinstance(value, functools.partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
    elif not isinstance(value, (*_PLAIN, *_OPAQUE)):
        skipped = _STANDARD if isinstance(value, nn.Module) else ()
        own = getattr(value, "__dict__", None)
        if isinstance(own, dict):
            yield from (
                (f".{name}", child) for name, child in list(own.items()) if name not in skipped
            )
        for name in _slots(type(value)):
            if hasattr(value, name):
                yield f".{name}", getattr(value, name)


def _slots(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        slots = (
            base.__dict__.get("__slots__", ())
            if base.__module__ not in ("builtins", "collections")
            else ()
        )
        yield from (
            name
            for name in ((slots,) if isinstance(slots, str) else slots)
            if not name.startswith("__")
        )


@dataclass(slots=True)
class Snapshot:
    """The content of all places of Python state at one time, by path such as 'layers.0.count'.

    `held` has a comparable content for each path. `tensors` has tensors by path. `puts` has
    functions that store a tensor at a path. `functions` has each function that a place holds, with
    one that stores another there. `names` has the names of attributes and variables on
    the way to a path. `generators` has random number generators. Make one by `of`.
    """

    held: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    puts: dict[str, Callable[[Any], None]] = field(default_factory=dict)
    functions: list[tuple[Callable, Callable[[Any], None]]] = field(default_factory=list)
    names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    generators: dict[str, Any] = field(default_factory=dict)
    restorers: list[Callable[[], object]] = field(default_factory=list)
    seen: dict[int, str] = field(default_factory=dict)

    def restore(self) -> None:
        """Put the recorded content back into every place, in place."""
        for restorer in self.restorers:
            restorer()

    def changed(self, later: Snapshot) -> list[str]:
        """Sorted paths whose content differs in a later snapshot, or is in one of the two alone. A
        different tensor object counts as a change, even with equal values.
        """
        moved = {
            path
            for path in {*self.tensors, *later.tensors}
            if self.tensors.get(path) is not later.tensors.get(path)
        }
        return sorted(moved | set(self.differing(later)))

    def differing(self, later: Snapshot) -> list[str]:
        """Sorted paths whose content differs in a later snapshot. Tensors of the same shape and
        dtype count as equal.
        """
        missing = object()
        return sorted(
            path
            for path in {*self.held, *later.held}
            if not _same(self.held.get(path, missing), later.held.get(path, missing))
        )

    def _take(
        self, path: str, value: Any, put: Callable[[Any], None], names: tuple[str, ...]
    ) -> None:
        """Record that `path` holds `value`, and everything inside it, in this snapshot. `put`
        stores another value at the path; `names` are the attributes and variables on the way.
        """
        self.names[path] = names
        if isinstance(value, types.FunctionType):
            self.functions.append((value, put))
        if isinstance(value, torch.Tensor):
            self.held[path] = ("tensor", str(tuple(value.shape)), value.dtype)
            self.tensors[path], self.puts[path] = value, put
            return
        if isinstance(value, _PLAIN):
            self.held[path] = value
            return
        if id(value) in self.seen:
            self.held[path] = ("the same as", self.seen[id(value)])
            return
        self.seen[id(value)] = path
        if isinstance(value, _RANDOM):
            self._take_generator(path, value)
            return
        inner = list(children(value))
        self.held[path] = _summary(value, inner)
        if (restorer := _restorer(value)) is not None:
            self.restorers.append(restorer)
        for step, child in inner:
            further = (*names, step[1:]) if step.startswith(".") else names
            self._take(path + step, child, functools.partial(_set_in, value, step), further)

    @classmethod
    def of(cls, model: nn.Module, functions: Functions) -> Snapshot:
        """A snapshot of the model's attributes, of the variables outside the model that `functions`
        name, and of the random number generators of `random`, NumPy and torch. Of buffers, it has
        those that the model did not hold when `functions` was made.
        """
        taken = cls()
        for name, module in model.named_modules():
            taken.seen[id(module)] = name
            registered = f"the names registered in {name or 'the model'}"
            taken.held[registered] = [
                _in_order(vars(module)[kind]) for kind in ("_modules", "_parameters", "_buffers")
            ]
            taken.names[registered] = ()
            taken.restorers.append(_attributes_restorer(module))
        for name, module in model.named_modules():
            taken._take_late_buffers(name, module, functions.buffers)
            for step, value in children(module):
                taken._take(
                    f"{name}{step}".lstrip("."),
                    value,
                    functools.partial(_set_in, module, step),
                    (step[1:],),
                )
        for path, name, value, put in functions.places():
            taken.restorers.append(functools.partial(put, value))
            taken._take(path, value, put, (name,))
        for name, generator in _GENERATORS:
            taken.names[RANDOM + name] = ()
            taken._take_generator(RANDOM + name, generator)
        return taken

    @classmethod
    def of_values(cls, values: Iterable[Any]) -> Snapshot:
        """A snapshot of what functions and callable objects hold, with the variables outside of a
        model that they name.
        """
        values = list(values)
        taken = cls.of(nn.Module(), Functions.of_value(values))
        for place, value in enumerate(values):
            path = f"{getattr(value, '__qualname__', type(value).__qualname__)} ({place})"
            taken._take(path, value, lambda other: None, ())
        return taken

    def _take_late_buffers(self, name: str, module: nn.Module, early: frozenset[str]) -> None:
        """Record the buffers of a module called `name` that are not among `early`, with None for
        one that is registered without a tensor.
        """
        late = {}
        for key, value in module._buffers.items():
            path = f"{name}.{key}".lstrip(".")
            if path not in early:
                late[key] = value
                self._take(path, value, functools.partial(module._buffers.__setitem__, key), (key,))
        self.restorers.append(functools.partial(_restore_late, module, (*module._buffers,), late))

    def _take_generator(self, path: str, generator: Any) -> None:
        self.held[path], self.generators[path] = ("random", generator_state(generator)), generator
        self.restorers.append(_generator_restorer(generator))


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and (one == other or (one != one and other != other))


def _summary(value: Any, inner: list) -> Any:
    if isinstance(value, np.ndarray):
        return (
            "array",
            value.shape,
            str(value.dtype),
            value.tobytes() if value.dtype != object else b"",
        )
    if isinstance(value, (set, frozenset)):
        return (
            type(value).__name__,
            frozenset(item for item in value if isinstance(item, _PLAIN)),
            len(value),
        )
    if isinstance(value, (dict, list, tuple, deque)):
        return (type(value).__name__, tuple(step for step, _ in inner))
    if isinstance(value, (itertools.count, itertools.cycle, itertools.repeat)):
        return (type(value).__name__, repr(value.__reduce__()))
    if isinstance(value, io.IOBase):
        return (
            "file",
            value.tell() if not value.closed and value.readable() and value.seekable() else None,
        )
    if isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        return ("generator", frame and (frame.f_lasti, repr(frame.f_locals)))
    return type(value).__qualname__ if not isinstance(value, np.generic) else value


def _restorer(value: Any) -> Callable[[], object] | None:
    """A function that puts back what a container, array, file or object holds now. None for a value
    that holds nothing that can be put back.
    """
    if isinstance(value, dict):
        return functools.partial(_refill, value, _fill_dict, _entries(value))
    if isinstance(value, set):
        return functools.partial(_refill, value, type(value).update, set(value))
    if isinstance(value, (list, deque)):
        return functools.partial(_refill, value, type(value).extend, list(value))
    if isinstance(value, np.ndarray) and value.flags.writeable:
        return functools.partial(value.__setitem__, Ellipsis, value.copy())
    if isinstance(value, io.IOBase) and not value.closed and value.readable() and value.seekable():
        return functools.partial(value.seek, value.tell())
    opaque = isinstance(value, _OPAQUE) or not isinstance(getattr(value, "__dict__", None), dict)
    return None if opaque else _attributes_restorer(value)


def _refill(value: Any, fill: Callable, contents: Any) -> None:
    """Put `contents` back into a container that holds other objects now. One that holds the same is
    left alone, because it may forbid changes.
    """
    if _objects(value) != _objects(contents):
        value.clear()
        fill(value, contents)


def _objects(container: Any) -> list[int]:
    is_dict = isinstance(container, dict)
    return [*map(id, itertools.chain(*_entries(container).items()) if is_dict else container)]


def _plain_kind(value: dict) -> type[dict]:
    return OrderedDict if isinstance(value, OrderedDict) else dict


def _entries(value: dict) -> dict:
    """What a dict stores. `value[key]` of a subclass may give something else, such as an object that
    it makes of a stored class.
    """
    return {key: dict.__getitem__(value, key) for key in _plain_kind(value).__iter__(value)}


def _fill_dict(value: dict, contents: dict) -> None:
    for key, child in contents.items():
        _plain_kind(value).__setitem__(value, key, child)


def _attributes_restorer(value: Any) -> Callable[[], object]:
    own = vars(value)
    kept = {
        name: child
        for name, child in own.items()
        if not isinstance(value, nn.Module) or name not in _STANDARD
    }

    def restore() -> None:
        for name in [
            name
            for name in own
            if name not in kept and not (isinstance(value, nn.Module) and name in _STANDARD)
        ]:
            del own[name]
        own.update(kept)

    return restore


def _restore_late(module: nn.Module, names: tuple[str, ...], late: dict[str, Any]) -> None:
    """Leave a module with the buffers `names` alone, those of `late` with these values."""
    for name in [name for name in module._buffers if name not in names]:
        del module._buffers[name]
    module._buffers.update(late)


def _set_in(holder: Any, step: str, value: Any) -> None:
    """Store `value` inside `holder` at the place that `step` ('.name' or '[key]') names. Tuples are
    left as they are.
    """
    if step.startswith("."):
        setattr(holder, step[1:], value)
    elif isinstance(holder, dict):
        key = next(key for key in holder if f"[{key!r}]" == step)
        holder[key] = value
    elif isinstance(holder, (list, deque)):
        holder[int(step[1:-1])] = value


def generator_state(generator: Any) -> Any:
    """The state of a random number generator as a value for `==`. For one of torch, its seed."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return repr(generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        return _hashable(generator.get_state())
    # of torch: capture draws nothing from it, and its state is a tensor
    return generator.initial_seed()


def _generator_restorer(generator: Any) -> Callable[[], object]:
    if isinstance(generator, random.Random):
        return functools.partial(generator.setstate, generator.getstate())
    if isinstance(generator, np.random.Generator):
        return functools.partial(
            setattr, generator.bit_generator, "state", generator.bit_generator.state
        )
    if isinstance(generator, np.random.RandomState):
        return functools.partial(generator.set_state, generator.get_state())
    return functools.partial(_reseed, generator, generator.initial_seed())


def _reseed(generator: torch.Generator, seed: int) -> None:
    if generator.initial_seed() != seed:
        generator.manual_seed(seed)


def _hashable(state: Any) -> tuple:
    return tuple(item.tobytes() if isinstance(item, np.ndarray) else item for item in state)


# ------------------------------------------------------------------------------------------------------------------ functions


_WRAPPERS = (staticmethod, classmethod, property, functools.cached_property)


def _wrapped(value: Any) -> Any:
    """The function inside a property, cached_property, staticmethod or classmethod."""
    if isinstance(value, property):
        return value.fget
    return value.func if isinstance(value, functools.cached_property) else value.__func__


@dataclass(slots=True)
class Functions:
    """The user's functions that forward and the loss can call (`codes`), and the variables outside
    the model that they name. Functions of libraries such as torch are left out. `buffers` are the
    names of the buffers that the model holds. Make one by `of`.
    """

    codes: list[types.FunctionType] = field(default_factory=list)
    buffers: frozenset[str] = frozenset()
    _places: dict[str, tuple[str, Callable[[Any], Any], Callable[[Any], None]]] = field(
        default_factory=dict
    )
    _seen: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, model: nn.Module, loss_fn: Callable | None) -> Functions:
        """All functions of the user that the model's modules, their hooks and `loss_fn` (if not
        None) can call, directly or through others.
        """
        found = cls(buffers=frozenset(n for n, _ in model.named_buffers(remove_duplicate=False)))
        for module in model.modules():
            found._add(module)
        found._add(loss_fn)
        return found

    @classmethod
    def of_value(cls, value: Any) -> Functions:
        """All functions of the user that a class or function can call."""
        found = cls()
        found._add(value)
        return found

    def places(self) -> Iterator[tuple[str, str, Any, Callable[[Any], None]]]:
        """Yields (path, name, current value, setter) of each variable outside the model that is
        set. The setter stores a value unless it is there already.
        """
        missing = object()
        for path, (name, get, put) in self._places.items():
            value = get(missing)
            if value is not missing:
                yield path, name, value, functools.partial(_set_if_other, get, put)

    def _add(self, value: Any) -> None:
        """Add all functions that a value can call, with the variables that they name: of a
        function, a method, a class, an object, or the entries of a container. Each value once.
        """
        if id(value) in self._seen or isinstance(value, (*_PLAIN, torch.Tensor)):
            return
        if isinstance(value, types.FunctionType):
            self._seen.add(id(value))
            self._add_function(value)
        elif isinstance(value, types.MethodType):
            self._add(value.__func__)
            self._add(value.__self__)
        elif isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self._add(part)
        elif isinstance(value, _WRAPPERS):
            self._add(_wrapped(value))
        elif isinstance(value, type):
            self._add_class(value)
        elif isinstance(value, (list, tuple, dict)):
            self._seen.add(id(value))
            for _, child in children(value):
                self._add(child)
        elif not isinstance(value, types.ModuleType):
            self._seen.add(id(value))
            self._add_class(type(value))
            if isinstance(value, nn.Module):
                for hook in (*value._forward_hooks.values(), *value._forward_pre_hooks.values()):
                    self._add(hook)
            for _, child in children(value):
                if callable(child) or isinstance(child, (list, tuple, dict)):
                    self._add(child)

    def _add_class(self, kind: type) -> None:
        for base in kind.__mro__:
            if id(base) in self._seen or _of_library(base):
                continue
            self._seen.add(id(base))
            for name, value in list(vars(base).items()):
                if isinstance(value, (types.FunctionType, *_WRAPPERS)):
                    self._add(value)
                elif not name.startswith("__") and not isinstance(value, type):
                    self._places[f"class attribute {base.__qualname__}.{name}"] = (
                        name,
                        functools.partial(vars(base).get, name),
                        functools.partial(setattr, base, name),
                    )

    def _add_function(self, function: types.FunctionType) -> None:
        inner = inspect.unwrap(function)
        if inner is not function:
            self._add(inner)
        if _of_library(function):
            return
        self.codes.append(function)
        where = function.__qualname__
        for name, value in list(vars(function).items()):
            if name != "__wrapped__":
                self._place(
                    f"attribute {where}.{name}",
                    name,
                    value,
                    functools.partial(vars(function).get, name),
                    functools.partial(setattr, function, name),
                )
        for number, value in enumerate(
            (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        ):
            if isinstance(value, (list, dict, set, deque)):
                self._place(
                    f"default argument {number} of {where}",
                    f"argument {number}",
                    value,
                    functools.partial(contents_of, types.CellType(value)),
                    lambda value: None,
                )
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            self._place(
                f"variable {name!r} of {where}",
                name,
                contents_of(cell),
                functools.partial(contents_of, cell),
                functools.partial(setattr, cell, "cell_contents"),
            )
        for name in globals_of(function.__code__):
            if name in function.__globals__:
                value = function.__globals__[name]
                if isinstance(value, types.ModuleType) and not _of_library(value):
                    self._add_members(value, names_of(function.__code__))
                else:
                    scope = function.__globals__
                    self._place(
                        f"variable {name!r} of {function.__module__}",
                        name,
                        value,
                        functools.partial(scope.get, name),
                        functools.partial(scope.__setitem__, name),
                    )

    def _add_members(self, module: types.ModuleType, names: Iterable[str]) -> None:
        for name in names:
            if name in vars(module):
                self._place(
                    f"variable {name!r} of {module.__name__}",
                    name,
                    vars(module)[name],
                    functools.partial(vars(module).get, name),
                    functools.partial(setattr, module, name),
                )

    def _place(
        self,
        path: str,
        name: str,
        value: Any,
        get: Callable[[Any], Any],
        put: Callable[[Any], None],
    ) -> None:
        if isinstance(value, (types.FunctionType, types.MethodType, functools.partial, type)):
            if isinstance(value, types.MethodType) and isinstance(value.__self__, nn.Module):
                self._places[path] = name, get, put
            self._add(value)
        elif not isinstance(
            value, (types.ModuleType, types.BuiltinFunctionType)
        ) and not _of_library(type(value), but="builtins"):
            self._places[path] = name, get, put
            self._add(value)
        elif isinstance(value, (*_RANDOM, torch.Tensor, np.ndarray, nn.Module, *_STATEFUL)):
            self._places[path] = name, get, put


_STATEFUL = (
    deque,
    itertools.count,
    itertools.cycle,
    io.IOBase,
    dict,
    list,
    set,
    types.GeneratorType,
    types.SimpleNamespace,
    weakref.ReferenceType,
)


def _set_if_other(get: Callable[[Any], Any], put: Callable[[Any], None], value: Any) -> None:
    if get(None) is not value:
        put(value)


def contents_of(cell: types.CellType, missing: Any = None) -> Any:
    """What a variable of a closure has; `missing` if nothing is assigned to it yet."""
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return missing


def codes_of(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yields a code object, and those of functions and classes defined inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_of(constant)


def names_of(code: types.CodeType) -> list[str]:
    """The names of globals and attributes that a code object reads or sets, functions defined
    inside it included. Each once.
    """
    return list(dict.fromkeys(name for inner in codes_of(code) for name in inner.co_names))


def _in_order(registered: Mapping[str, Any]) -> tuple[str, ...]:
    """The names that a module has registered, those of None last: torch.export puts other tensors
    in and out, and leaves the names of None before the others.
    """
    return tuple(sorted(registered, key=lambda name: registered[name] is None))


def globals_of(code: types.CodeType) -> list[str]:
    """The names of the global variables that a code object reads, sets or deletes, functions
    defined inside it included. Each once. An attribute of the same name as a variable is none, and
    neither is a name that no source can spell: pytest puts such names into tests.
    """
    steps = (step for inner in codes_of(code) for step in dis.get_instructions(inner))
    names = (step.argval for step in steps if step.opname in _GLOBAL)
    return list(dict.fromkeys(name for name in names if name.isidentifier()))


_GLOBAL = {"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"}
"""The instructions that name a global variable."""


def _of_library(value: Any, but: str = "") -> bool:
    module = (
        value.__name__
        if isinstance(value, types.ModuleType)
        else getattr(value, "__module__", None)
    )
    package = (module or "").split(".")[0]
    return package in _LIBRARIES and package != but
