"""Makes what one call of forward assigns to parameters and buffers part of the captured graph.

torch.export sees a change in place as an op. It does not see that forward puts another tensor into
the place of a buffer, by `self.center = ...`, `register_buffer`, `.data = ...` or otherwise.
`AssignedState` compares the registries of all modules after the call with those before. It writes
each new tensor into the old one by `copy_`, which the graph then has. What differs from such a copy
is refused by name.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autopar.errors import AutoparError
from autopar.trace.checkpointed_reads import CheckpointedReads
from autopar.trace.detached_writes import DATA, DetachedTensors, tensors_in
from autopar.trace.known_values import KnownValues, UserTensors, user_attributes
from autopar.trace.registered_tensors import (
    REGISTER,
    RegisteredTensor,
    address_of,
    difference_of,
    is_saved,
    leaves_of,
    norm_text,
    put_back,
    refuse,
    refuse_shared,
    registered_now,
    registered_tensors,
    requires_text,
    storage_of,
)
from autopar.trace.state_checks import ModulesBefore, check_attributes, check_sharing, check_ties
from autopar.trace.user_lines import line_now

_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]  # the stub says Tensor, not descriptor
_READ_GRAD = vars(torch._C.TensorBase)["grad"].__get__
_SET_GRAD = vars(torch._C.TensorBase)["grad"].__set__
_GRADIENT = Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_SET_GRADIENT = Tensor.requires_grad.__set__  # type: ignore[attr-defined]
_DETACH_IN_PLACE = (Tensor.detach_, torch.detach_)
_SET_NO_VALUE = ("requires_grad_", "share_memory_")
"""Methods named like writes that change no value."""
_MAKE = (torch.tensor, torch.scalar_tensor, Tensor.new_tensor)
"""Functions that make a tensor of Python numbers, which shares memory with no other."""
_NORMS = ("batch_norm", "instance_norm")
"""Functions that change running statistics among their arguments, past their version."""


class AssignedState(TorchFunctionMode):
    """Watches one call of `model`'s forward under torch.export, by `run`.

    Afterwards `graded` has the names of tensors that do not train whose value has a gradient.
    `trained` has the names of parameters for which the loss has a gradient. `late` has those that
    forward has changed through `.data` after an op with a gradient had read them. `lines` has the
    user's line of the first op that changes a tensor in place, by name.
    """

    def __init__(
        self,
        model: nn.Module,
        early: Collection[str],
        aliases: Collection[str],
        own: UserTensors,
    ) -> None:
        """`early`: names of the buffers that the user's model has; others are Python state.
        `aliases`: names of tensors that a list, an attribute or a variable holds too. `own` is of the
        user's model.
        """
        super().__init__()
        self.graded: list[str] = []
        self.trained: set[str] = set()
        self.late: set[str] = set()
        self._read_storages: dict[int, Any] = {}  # kept, so that no address is given out again
        self._detached = DetachedTensors()
        self._read_as_data: set[int] = set()  # addresses of storages
        self._aliases = aliases
        self._modules = ModulesBefore(model)
        self._entries = {
            name: e
            for name, e in registered_tensors(model)
            if e.kind == "_parameters" or name in early
        }
        self._names = {id(e.tensor): name for name, e in reversed(self._entries.items())}
        self._storages = {storage_of(e.tensor): name for name, e in reversed(self._entries.items())}
        self._frozen: dict[int, str] = {}
        self.lines: dict[str, str] = {}
        self._normed: Counter[str] = Counter()
        self._read_by_norms: dict[str, int] = {}
        self._fresh: dict[int, Any] = {}
        self._shapes = {name: tuple(e.tensor.shape) for name, e in self._entries.items()}
        self._start = self.versions()
        self.known = KnownValues(own.values, self._unchanged_name)
        for name, entry in self._entries.items():
            vars(entry.tensor).update(own.attributes.get(name, {}))
        self._attributes = {name: user_attributes(e.tensor) for name, e in self._entries.items()}
        self.checkpointed = CheckpointedReads(self.versions, self._storages)

    def run(self, call: Callable[[], Tensor]) -> Tensor:
        """The result of `call()`, which runs forward. What it assigns is written into the tensors
        that were registered before, and those are registered again. Raises AutoparError if that is
        not the same as what forward does.
        """
        token = _CURRENT.set(self)
        try:
            with self, self._watched_set():
                found = call()
            self._write_back(found)
        finally:
            _CURRENT.reset(token)
            put_back(self._entries.values())
        return found

    def versions(self) -> dict[str, tuple[int, int]]:
        """By name, which tensor is registered now, and how often it was changed in place."""
        tensors = {name: registered_now(entry) for name, entry in self._entries.items()}
        return {n: (id(t), _version(t) + self._normed[n]) for n, t in tensors.items()}

    def is_statistic(self, name: str) -> bool:
        """Whether a registered tensor belongs to a batch norm."""
        return isinstance(self._entries[name].module, nn.modules.batchnorm._BatchNorm)

    # ------------------------------------------------------------------------------------- calls

    @contextlib.contextmanager
    def _watched_set(self) -> Iterator[None]:
        """A context in which `set_` of registered tensors is a copy. No mode sees that method."""

        def set_(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if not self._name(tensor):
                return torch._C.TensorBase.set_(tensor, *args, **kwargs)
            return self._replace(tensor, (*args, *kwargs.values()), "set_")

        Tensor.set_ = set_  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            del Tensor.set_

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        args, kwargs = self._detached.as_detached((args, kwargs or {}))
        if func in (_READ_GRAD, _SET_GRAD) and self._trains(name := self._name(args[0])):
            raise AutoparError(
                f"forward reads or sets the gradient of {name!r}{line_now()}, which only backward computes. Under a plan, a rank may hold "
                "a part alone. Work on gradients by hooks, or in the optimizer"
            )
        if func == _SET_DATA:
            return self._replace(args[0], args[1:], ".data")
        if func in (_SET_GRADIENT, Tensor.requires_grad_):
            wanted = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
            if self._freezes(args[0], wanted):
                return args[0]
        if func in _DETACH_IN_PLACE:
            trains = self._trains(self._name(args[0]))
            if not (trains and self._freezes(args[0], False)) and args[0].requires_grad:
                self._detached.detach_(args[0])
            return args[0]
        if func == _GRADIENT and id(args[0]) in self._frozen:
            return False
        if _writes(func, kwargs):
            written = pytree.tree_leaves(kwargs.get("out", args[:1]))
            self._check_write(written)
            args, kwargs = self._detached.without_gradient(written, args, kwargs)
        if self._frozen:
            args, kwargs = pytree.tree_map(self._as_frozen, (args, kwargs))
        is_number, number = self.known.number(func, args, kwargs)
        if is_number:
            return number
        self.checkpointed.note(tensors_in(args, kwargs))
        found = func(*args, **kwargs)
        if getattr(func, "__name__", "") in _NORMS:
            self._note_norm(func, args, kwargs, found)
        if func in _MAKE:
            self._fresh[storage_of(found)] = found.untyped_storage()
        self._detached.follow(func, args, kwargs, found)
        self._detached.check_read(func, args, kwargs, found)
        self.known.follow(func, args, kwargs, found)
        if torch.is_grad_enabled():
            self._note_read(args, kwargs, found)
        return found

    def _note_norm(self, func: Callable, args: tuple, kwargs: dict, found: Tensor) -> None:
        """Remember which statistics a batch norm changes, or reads for backward."""
        names = set(filter(None, map(self._name, tensors_in(args, kwargs))))
        names = {name for name in names if self._entries[name].kind == "_buffers"}
        if _of_the_batch(func, args, kwargs):
            self._normed.update(names)
        elif found.requires_grad and torch.is_grad_enabled():
            self._read_by_norms |= {name: self._normed[name] for name in sorted(names)}

    def _note_read(self, args: tuple, kwargs: dict, found: Any) -> None:
        """Remember the tensors that an op with a gradient has read."""
        if any(isinstance(x, Tensor) and x.requires_grad for x in pytree.tree_leaves(found)):
            for operand in tensors_in(args, kwargs):
                if address := storage_of(operand):
                    self._read_storages[address] = operand.untyped_storage()
                    if self._of_data(operand):
                        self._read_as_data.add(address)

    def _check_write(self, written: list[Any]) -> None:
        """Note a write to the `.data` of a registered tensor that was read. Raises AutoparError for
        writes to other tensors past their gradients.
        """
        for tensor in written:
            if not isinstance(tensor, Tensor):
                continue
            address = storage_of(tensor)
            name = self._storages.get(address, "")
            if name:
                self.lines.setdefault(name, line_now())
            detached, how = self._detached.of(tensor), ""
            # autograd sees no write past which it has read: x.data counts changes for itself
            past = self._read_storages if self._of_data(tensor) else self._read_as_data
            read = address in past
            if name and read:
                self.late.add(name)
            elif not name and tensor.requires_grad and not torch.is_grad_enabled():
                how = "torch.no_grad()"
            elif not name and (read or (detached is not None and detached.base.requires_grad)):
                how = detached.how if detached is not None else DATA
            if how:
                raise AutoparError(
                    f"forward changes a tensor in place through {how}{line_now()}, past its gradient. A captured graph cannot follow: "
                    "compute a new tensor. x + (new - x).detach() has the value of `new` and the gradient of x"
                )

    def _of_data(self, tensor: Tensor) -> bool:
        detached = self._detached.of(tensor)
        return detached is not None and detached.how == DATA

    def _name(self, tensor: Tensor) -> str:
        """The name under which a tensor is registered now; '' if it is not."""
        name = self._names.get(id(tensor), "")
        if name and registered_now(self._entries[name]) is tensor:
            return name
        return next((name for name, e in self._entries.items() if registered_now(e) is tensor), "")

    def _trains(self, name: str) -> bool:
        return name in self._entries and self._entries[name].trained

    def _unchanged_name(self, tensor: Tensor) -> str:
        """The name of a registered tensor that forward has not changed so far; else ''."""
        name = self._names.get(id(tensor), "")
        version = id(tensor), _version(tensor) + self._normed[name]
        return name if name and self._start[name] == version else ""

    def _replace(self, tensor: Tensor, values: tuple, how: str) -> Tensor:
        """Write a new value into `tensor`, as `tensor.data = value` or `tensor.set_(value)` do."""
        name, value = self._name(tensor), values[0] if values else None
        if not name:
            raise AutoparError(
                f"forward replaces the data of a tensor by {how}{line_now()}, which torch.export does not see: compute a new tensor"
            )
        if not isinstance(value, Tensor) or len(values) > 1:
            refuse(name, f"by {how}{line_now()} with a storage, or nothing", "use copy_")
        if difference := difference_of(tensor, value):
            refuse(name, f"by {how}{line_now()}: the new value has {difference}", REGISTER)
        self._check_own_memory(name, value, line_now(), alone=True)
        if storage_of(tensor) in self._read_storages:
            self.late.add(name)
        with torch.no_grad():
            tensor.copy_(value.detach())
        return tensor

    def _freezes(self, tensor: Tensor, wanted: bool) -> bool:
        """Whether `requires_grad = wanted` is done by reading a registered tensor detached until it
        is True again. Raises AutoparError for a tensor that does not train and now should.
        """
        name = self._name(tensor)
        if not name or tensor.requires_grad == wanted == (id(tensor) not in self._frozen):
            return False
        if not tensor.requires_grad:
            if wanted and self._entries[name].kind == "_buffers":
                return True  # no optimizer has it, so that nothing follows
            if wanted:
                raise AutoparError(requires_text(repr(name), "makes", line_now()))
            return False
        self._frozen.pop(id(tensor), None)
        if not wanted:
            self._frozen[id(tensor)] = f"{name!r}{line_now()}"
        return True

    def _as_frozen(self, value: Any) -> Any:
        return value.detach() if id(value) in self._frozen else value

    # ----------------------------------------------------------------------------------- the end

    def _write_back(self, loss: Tensor) -> None:
        """Write each tensor that forward has put into the place of another into that one. `loss` is
        what forward returned.
        """
        self.known.check(n for n, v in self.versions().items() if v != self._start[n])
        self._modules.check(self._entries)
        check_attributes(self._entries, self._attributes)
        for which in self._frozen.values():
            raise AutoparError(requires_text(which, "leaves", ""))
        now = {name: self._checked(name, entry) for name, entry in self._entries.items()}
        check_sharing(self._entries, now)
        check_ties(self._entries, self._start, self.versions())
        self.checkpointed.check(self.is_statistic)
        for name, count in self._read_by_norms.items():
            if self._normed[name] > count:
                raise AutoparError(norm_text(name))
        self.trained = {self._names[i] for i in map(id, leaves_of(loss)) if i in self._names}
        self.late &= {name for name in self.late if is_saved(loss, self._entries[name].tensor)}
        before = {name: entry.tensor for name, entry in self._entries.items()}
        values = {name: t.detach().clone() for name, t in now.items() if t is not before[name]}
        for name, tensor in now.items():
            graded = tensor.requires_grad and not self._detached.is_detached(tensor)
            if graded and not self._entries[name].trained:
                self.graded.append(name)
        with torch.no_grad():
            for name, value in {id(before[n]): (n, v) for n, v in values.items()}.values():
                before[name].copy_(value)

    def _checked(self, name: str, entry: RegisteredTensor) -> Tensor:
        """The tensor that is now registered as `name`. Raises AutoparError if there is none, or it
        cannot be written into the one before.
        """
        tensor, before = registered_now(entry), entry.tensor
        if entry.key in vars(entry.module):
            refuse(name, "by an attribute of Python of this name", REGISTER)
        if tensor is before:
            if tuple(before.shape) != self._shapes[name]:
                refuse(name, f"by its resized self, not {self._shapes[name]}", REGISTER)
            return tensor
        if not isinstance(tensor, Tensor):
            refuse(name, f"by {'nothing' if tensor is None else 'what is no tensor'}", REGISTER)
        if entry.kind == "_parameters" and tensor.requires_grad != entry.trained:
            needs = "requires a gradient" if tensor.requires_grad else "requires none"
            refuse(
                name,
                f"by a parameter that {needs}, unlike the one before",
                f"pass requires_grad={entry.trained} to nn.Parameter, or copy_ into it",
            )
        if difference := difference_of(before, tensor):
            refuse(name, f"by a tensor of {difference}", REGISTER)
        if name in self._aliases:
            refuse(
                name, "alone: a list, an attribute or a variable keeps the old tensor", "use copy_"
            )
        self._check_own_memory(name, tensor, "")
        return tensor

    def _check_own_memory(self, name: str, value: Tensor, where: str, alone: bool = False) -> None:
        """Raise AutoparError if a new value of `name` is memory that inputs, constants or trained
        parameters have too; if `alone`, also that of other buffers.
        """
        if not isinstance(value, FakeTensor):
            refuse_shared(name, "a tensor from outside of forward", where)
        converter = value.fake_mode.fake_tensor_converter.meta_converter
        own = {storage_of(e.tensor) for e in self._entries.values() if not (e.trained or alone)}
        others = {address_of(s) for s in converter.storage_memo.values()} | set(self._storages)
        others -= set(self._fresh)
        if storage_of(value) in others - own - {0, storage_of(self._entries[name].tensor)}:
            refuse_shared(name, "an input, a constant or a parameter", where)


_CURRENT: ContextVar[AssignedState] = ContextVar("the call of forward that runs")


@contextlib.contextmanager
def checkpointed(notes: list[str]) -> Iterator[None]:
    """A context for a function that eager PyTorch would run twice, since it is checkpointed.

    Raises AutoparError, with the name, if the function changes a registered tensor; statistics of
    batch norms are noted in `notes`.
    """
    state = _CURRENT.get(None)
    if state is None:
        yield
        return
    before = state.versions()
    with state.checkpointed.function():
        yield
    after = state.versions()
    changed = [name for name, version in before.items() if version != after[name]]
    for name in changed:
        if not state.is_statistic(name):
            raise AutoparError(
                f"forward changes {name!r} inside of torch.utils.checkpoint. Backward runs the function again, so that eager PyTorch "
                "changes it twice a step: change it outside of the checkpointed function"
            )
    if changed:
        note = (
            f"forward changes {changed[0].rpartition('.')[0]!r} inside of torch.utils.checkpoint: once a step, where eager PyTorch runs "
            "the batch norm twice"
        )
        notes += [] if note in notes else [note]


def _version(tensor: Any) -> int:
    """How often a tensor was changed in place; 0 for what does not count it."""
    return 0 if not isinstance(tensor, Tensor) or tensor.is_inference() else tensor._version


def _of_the_batch(func: Callable, args: tuple, kwargs: dict) -> bool:
    """Whether a batch or instance norm computes statistics of the batch, and changes its own."""
    try:
        call = signature(func).bind(*args, **kwargs)
    except ValueError:  # torch.batch_norm and torch.instance_norm have none
        return bool(args[5])
    call.apply_defaults()
    return bool(call.arguments.get("training", call.arguments.get("use_input_stats")))


def _writes(func: Callable, kwargs: dict) -> bool:
    """Whether a torch function changes its first argument, or the argument `out`, in place."""
    name = getattr(func, "__name__", "")
    if name in _SET_NO_VALUE:
        return False
    return "out" in kwargs or name == "__setitem__" or (name[-1:] == "_" and name[-2:] != "__")
