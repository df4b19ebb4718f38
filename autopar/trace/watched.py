"""Watches the user's forward under torch.export: refuses calls that cannot be captured, and
replaces some.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
import torch.utils.checkpoint
from autopar_kernels.custom_functions import OP, keep_call, returns_tensor
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.overrides import TorchFunctionMode

from autopar.errors import AutoparError
from autopar.trace.assigned_state import checkpointed
from autopar.trace.gather_functions import calls_processes, passed_on
from autopar.trace.hit_loops import HitLoops
from autopar.trace.known_values import NUMBERS
from autopar.trace.one_process import current_process
from autopar.trace.pieces import kept_whole, unread_counts
from autopar.trace.python_state import Snapshot
from autopar.trace.refusals import other_rows, own_generator
from autopar.trace.refused_hooks import READ_NODE, hooks_refused, replaced, without_hooks
from autopar.trace.respelled import RESPELLED, symbolic_lengths
from autopar.trace.transforms import plain_transforms
from autopar.trace.user_lines import DATA_DEPENDENT, line_now, line_of_error

_MASK = "_autopar_mask"
"""The attribute of selected rows that holds the mask."""
_MEETINGS: tuple[Callable, ...] = tuple(
    function
    for name in ("add", "sub", "mul", "div")
    for function in (
        getattr(torch, name),
        getattr(Tensor, name),
        getattr(Tensor, f"__{'truediv' if name == 'div' else name}__"),
    )
)

_ARRAYS = {Tensor.numpy: ".numpy()", Tensor.__array__: "NumPy", Tensor.__dlpack__: "DLPack"}
_DATA = Tensor.data.__get__  # type: ignore[attr-defined]  # the stub says Tensor, not descriptor
_TEXTS = (Tensor.__repr__, Tensor.__format__)
_ROWS = {
    Tensor.__iter__: "for ... in",
    Tensor.__len__: "len()",
    Tensor.unbind: "unbind",
    torch.unbind: "unbind",
}
"""Functions that turn the size of dim 0 into a Python number, with their names for messages."""


@contextlib.contextmanager
def watched_forward(state: Callable[[], Snapshot]) -> Iterator[list[str]]:
    """A context in which to export a model.  Yields a list that fills with notes on what was
    captured in another way than written. `state` takes the Python state of the model.

    An autograd.Function becomes one op.  Raises AutoparError where hooks change gradients, and
    where forward converts a module.
    Checkpointed functions are called plainly, and torch's own log of what export could not do is
    silent.
    """
    notes: list[str] = []
    with (
        _silent_logs(),
        _plain_checkpoints(notes),
        _own_gradients(notes),
        _unconverted(),
        plain_transforms(notes, state),
    ):
        yield notes


@contextlib.contextmanager
def values_unread(loops: HitLoops, inputs: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Run forward itself inside of this.  Yields a list that fills with notes on tensors that are printed.
    `loops` fills with the loops over experts that are run for all experts. `inputs` are those
    whose dim 0 has the rows.

    Raises AutoparError, which names the user's line, where ops depend on the values of tensors.  (Torch's own error would have
    torch print the whole graph.)
    """
    notes: list[str] = []
    try:
        with (
            _ValueReads(notes, loops, inputs),
            symbolic_lengths(),
            unread_counts(),
        ):
            yield notes
    except RuntimeError as error:
        if type(error).__name__ not in DATA_DEPENDENT:
            raise
        raise _reads("a number", type(error).__name__, line_of_error(error)) from error


class _ValueReads(TorchFunctionMode):
    """A torch function mode that raises AutoparError where the user's code reads a Python value out
    of a tensor with unknown values. It also replaces the functions in `RESPELLED`, and notes
    prints.
    """

    def __init__(self, notes: list[str], loops: HitLoops, inputs: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.notes, self.loops, self.inputs = notes, loops, inputs

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        with self.loops.marked():
            return self._result(func, args, kwargs or {})

    def _result(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        if func != torch.Generator and any(
            isinstance(value, torch.Generator) for value in (*args, *kwargs.values())
        ):
            raise own_generator(line_now())
        for other in (kept_whole, self.loops.run, met):
            if (found := other(func, args, kwargs)) is not None:
                return found
        if func is Tensor.item and _is_within("_check_tensor_all_with"):
            return self._unchecked()
        if func in NUMBERS:
            return _number_of(NUMBERS[func], func, args, kwargs)
        if func in _TEXTS:
            return self._text(_operand(args, kwargs))
        if func == _DATA:  # the same values, but export sees where they come from
            return _operand(args, kwargs).detach()
        if func == READ_NODE:
            return without_hooks(func(*args, **kwargs))
        if func is Tensor.tolist and not _known(_operand(args, kwargs)):
            raise _reads("values", ".tolist()")
        if func in _ARRAYS:
            raise AutoparError(
                f"forward leaves PyTorch{line_now()}: what {_ARRAYS[func]} computes of a tensor is not part of the captured graph, and "
                "would be the same in every step; write it with torch functions"
            )
        if func in RESPELLED and (found := RESPELLED[func](*args, **kwargs)) is not None:
            return found
        if func in _ROWS and _follows_batch(func, args, kwargs):
            if _is_within("tolist"):
                raise _reads("values", ".tolist()")
            if free_unbacked_symbols(_operand(args, kwargs).shape[0]):
                raise AutoparError(
                    f"forward loops{line_now()} over a tensor whose length depends on data, as over the experts that got a token. Loop "
                    "over all of them, range(num_experts) for example, since experts without tokens add nothing"
                )
            raise AutoparError(
                f"forward uses the batch size as a Python number{line_now()}, by {_ROWS[func]} over dim 0, so that it would compute for "
                "one batch size alone. Use x.shape[0] instead of len(x), and an op on the whole tensor instead of a loop over its rows"
                f"{other_rows(self.inputs)}"
            )
        return func(*args, **kwargs)

    def _unchecked(self) -> bool:
        """The result of torch's check of the values of a tensor, which raises if one is False."""
        self._note(f"forward checks values of a tensor{line_now()}: training does not check them")
        return True

    def _note(self, note: str) -> None:
        self.notes += [] if note in self.notes else [note]

    def _text(self, tensor: Tensor) -> str:
        self._note(
            f"forward prints a tensor{line_now()}: only once, during capture, where it has no values"
        )
        return f"tensor(shape={tuple(map(str, tensor.shape))}, dtype={tensor.dtype})"


def _number_of(name: str, func: Callable, args: tuple, kwargs: dict) -> Any:
    """The Python number that `func`, called `name` in messages, reads out of a tensor. Raises
    AutoparError unless it is known during capture.
    """
    name = ".tolist()" if _is_within("tolist") else name
    try:
        found = func(*args, **kwargs)
    except AutoparError:
        raise
    except Exception as error:  # torch has many types for a number that is not known
        if type(error).__name__ not in DATA_DEPENDENT:
            raise
        raise _reads("a number", name) from error
    if isinstance(found, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise _reads("a number", name)
    return found


_REMEDY = "keep it a tensor (torch.where chooses between two), or decide outside of forward"
_SIZES_REMEDY = "give it images of one size, by a wrapper as in docs/guides/own-model.md, under 'Images and text'"
_SIZES_FILE = "vision_utils.py"
"""Where transformers computes shapes from the sizes of images."""


def _reads(what: str, how: str, where: str | None = None) -> AutoparError:
    where = line_now() if where is None else where
    remedy = _SIZES_REMEDY if f"({_SIZES_FILE}:" in where else _REMEDY
    return AutoparError(
        f"forward reads {what} out of a tensor{where}, by {how}: which ops run, or with which numbers, would depend on the data, "
        f"and autopar runs one graph for all batches; {remedy}"
    )


def _is_within(name: str) -> bool:
    """Whether a function called `name` is on the call stack. Fake tensors have their own `tolist`,
    which iterates over rows.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != name:
        frame = frame.f_back
    return frame is not None


def _known(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, torch.nn.Parameter) and not tensor.is_meta


def _operand(args: tuple, kwargs: dict) -> Tensor:
    """The tensor that a function is called with: its first argument, or `input`. Raises TypeError
    if that is no tensor.
    """
    tensor = args[0] if args else kwargs.get("input")
    if not isinstance(tensor, Tensor):
        raise TypeError(f"a function of a tensor is called with {type(tensor).__name__}")
    return tensor


def _follows_batch(func: Callable, args: tuple, kwargs: dict) -> bool:
    tensor = _operand(args, kwargs)
    dim = (
        (args[1] if len(args) > 1 else kwargs.get("dim", 0))
        if func in (Tensor.unbind, torch.unbind)
        else 0
    )
    return (
        tensor.dim() > 0 and dim in (0, -tensor.dim()) and isinstance(tensor.shape[0], torch.SymInt)
    )


@contextlib.contextmanager
def _own_gradients(notes: list[str]) -> Iterator[None]:
    """A context in which export keeps the backward of the user's autograd.Functions, each as one
    op.

    Raises AutoparError where forward sets a hook on gradients. Reentrant checkpoints are called
    plainly, with a note.
    """
    # where `apply` leads, also that of names such as `swish = Swish.apply` from before
    base: Any = torch.autograd.function._SingleLevelFunction
    inside: list[type] = []  # the function that runs

    def checked_apply(cls: Any, *args: Any) -> Any:
        if cls is torch.utils.checkpoint.CheckpointFunction:
            # (function, whether random states are kept, *its arguments)
            with checkpointed(notes):
                return _reentrant(notes, args[0], args[2:])
        if cls.__module__.startswith(("torch.", "autopar_kernels.")) or inside:
            return super(base, cls).apply(*args)
        inside.append(cls)
        try:
            return _kept_function(cls, args)
        finally:
            inside.pop()

    base.apply = classmethod(checked_apply)
    function = torch.autograd.function
    try:
        with (
            hooks_refused(notes),
            replaced(function, "custom_function_call", _within(function.custom_function_call)),
        ):
            yield
    finally:
        del base.apply


def _within(plain: Callable) -> Callable:
    """What torch calls for an autograd.Function within a transform, in the place of `plain`."""

    def called(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__.startswith(("torch.", "autopar_kernels.")):
            return plain(cls, *args, **kwargs)
        raise AutoparError(
            f"forward calls the autograd.Function {cls.__name__}{line_now()} in what torch.vmap or torch.func transforms: autopar cannot "
            "keep its backward there. Call it outside of the transform, or write it with torch ops; y = x + (f(x) - x).detach() has the "
            "gradient of x"
        )

    return called


def _unconverted() -> contextlib.AbstractContextManager[None]:
    """A context in which `module.to(...)`, `.float()` and the like return the module as it is.

    They raise AutoparError if that would change a dtype or a device.
    """

    def checked(self: torch.nn.Module, function: Callable, recurse: bool = True) -> torch.nn.Module:
        for name, tensor in (*self.named_parameters(), *self.named_buffers()):
            found = function(tensor)
            if (found.dtype, found.device) != (tensor.dtype, tensor.device):
                raise AutoparError(
                    f"forward converts a {type(self).__name__}{line_now()}: its {name!r} of {tensor.dtype} on {tensor.device} becomes one "
                    f"of {found.dtype} on {found.device}, and what trains keeps its dtype; convert the module before training"
                )
        return self

    return replaced(torch.nn.Module, "_apply", checked)


def _kept_function(cls: type, args: tuple) -> Any:
    """The result of `cls.apply(*args)`, called as one op, `autopar::custom_function`.

    Raises AutoparError if an argument is a module or is changed in place, or if the op cannot run
    the function.
    """
    what = f"autograd.Function {cls.__name__}{line_now()}"
    if any(isinstance(each, torch.nn.Module) for each in torch.utils._pytree.tree_leaves(args)):
        raise AutoparError(
            f"the {what} takes a module, whose parameters would be no part of the captured graph; pass its tensors in"
        )
    apply = super(torch.autograd.function._SingleLevelFunction, cast(Any, cls)).apply
    if calls_processes(cls):
        return passed_on(cls, args, apply, what)
    tensors, sizes, name = keep_call(cls, args)
    versions = [tensor._version for tensor in tensors]
    process = current_process()
    calls = 0 if process is None else process.count
    try:
        found = OP(tensors, sizes, name)
    except NotImplementedError as error:
        raise AutoparError(f"the {what} cannot be captured: {error}") from error
    if [tensor._version for tensor in tensors] != versions:
        raise AutoparError(
            f"the {what} changes an argument in place, which autopar cannot run: return a new tensor"
        )
    if process is not None and process.count > calls:
        return passed_on(cls, args, apply, what)
    return found[0] if returns_tensor(name) else tuple(found)


@contextlib.contextmanager
def _plain_checkpoints(notes: list[str]) -> Iterator[None]:
    """A context in which `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)` calls its
    function directly. Each such call adds a note to `notes`, once.

    Users may have imported `checkpoint` under any name. Therefore the internal generator that it
    calls is replaced.
    """

    def nothing_around(*args: Any, **kwargs: Any) -> Iterator[None]:
        _add_checkpoint_note(notes)
        with checkpointed(notes):
            yield

    name = "_checkpoint_without_reentrant_generator"
    with replaced(torch.utils.checkpoint, name, nothing_around):
        yield


def _reentrant(notes: list[str], function: Callable, args: tuple) -> Any:
    """The result of `checkpoint(function, *args, use_reentrant=True)`, called plainly: without
    gradients if no argument has any, as in eager mode. Adds notes to `notes`.
    """
    _add_checkpoint_note(notes)
    if not torch.is_grad_enabled() or any(
        isinstance(arg, Tensor) and arg.requires_grad for arg in args
    ):
        return function(*args)
    notes.append(
        f"forward checkpoints a function none of whose arguments has a gradient{line_now()}, with use_reentrant=True: as in eager mode, "
        "parameters that it reads do not train there; use_reentrant=False trains them"
    )
    with torch.no_grad():
        return function(*args)


def _add_checkpoint_note(notes: list[str]) -> None:
    note = (
        "forward asks for activation checkpointing (torch.utils.checkpoint): autopar captures the plain call, and the plan decides which "
        "layers recompute; pin recompute=full for the same memory"
    )
    if note not in notes:
        notes.append(note)


@contextlib.contextmanager
def _silent_logs() -> Iterator[None]:
    """A context that silences torch's own log during export, such as the whole graph after a
    failure. The error message replaces it.
    """
    loggers = [
        logging.getLogger(name)
        for name in (
            "torch.fx.experimental",
            "torch.export",
            "torch._export",
            "torch._functorch",
            "torch._subclasses",
            "torch._dynamo",
        )
    ]
    refuse = lambda record: record.levelno < logging.WARNING  # noqa: E731 (what the user asked for by TORCH_LOGS stays)
    names = [
        logger
        for name, logger in logging.root.manager.loggerDict.items()
        if isinstance(logger, logging.Logger)
        and any(name.startswith(parent.name) for parent in loggers)
    ]
    for logger in names:
        logger.addFilter(refuse)
    try:
        with warnings.catch_warnings():
            # said by `frozen_state`
            warnings.filterwarnings("ignore", message="The tensor attributes? ")
            warnings.filterwarnings("ignore", message="torch.utils.checkpoint")
            yield
    finally:
        for logger in names:
            logger.removeFilter(refuse)


def met(func: Callable, args: tuple, kwargs: dict) -> Any:
    """The result of a call that selects rows by a mask, or in which selected rows meet rows of
    another tensor. None for any other call.

        hidden[mask] = hidden[mask] + features        # DeepStack of Qwen3-VL

    `features` has a row for each True entry of `mask`, in order. Captured as written, that would
    ask whether a number of rows that depends on data equals a multiple of the batch. Here the
    features are first written over the True entries, by `masked_scatter`, and then selected by the
    same mask. `spell_masked_scatter` (`trace/writes.py`) says when that is exact, and every step
    checks it.
    """
    if func is Tensor.__getitem__ and len(args) == 2 and (mask := _mask_of(args[1])) is not None:
        rows = func(*args)
        setattr(rows, _MASK, mask)
        return rows
    if func not in _MEETINGS or len(args) != 2:
        return None
    masks = [getattr(each, _MASK, None) for each in args]
    mask = next((each for each in masks if each is not None), None)
    if mask is None or not any(map(_is_met, args, masks)):
        return None
    pairs = zip(args, masks, strict=True)
    operands = (_selected(each, mask) if _is_met(each, own) else each for each, own in pairs)
    return func(*operands, **kwargs)


def _mask_of(index: Any) -> Tensor | None:
    """The mask, if `index` is one of at least 2 dims, alone or followed by whole slices."""
    first, *rest = index if isinstance(index, tuple) and index else (index,)
    masks = isinstance(first, Tensor) and first.dtype == torch.bool and first.dim() > 1
    whole = all(isinstance(each, slice) and each == slice(None) for each in rest)
    return first if masks and whole else None


def _is_met(rows: Any, mask: Tensor | None) -> bool:
    """Whether an operand has rows whose number follows the batch, and not a mask."""
    if not isinstance(rows, Tensor) or mask is not None or rows.dim() < 2:
        return False
    count = rows.shape[0]
    return isinstance(count, torch.SymInt) and not free_unbacked_symbols(count)


def _selected(rows: Tensor, mask: Tensor) -> Tensor:
    wide = rows.new_zeros((*mask.shape, *rows.shape[1:]))
    marked = mask.reshape(*mask.shape, *[1] * (rows.dim() - 1))
    return wide.masked_scatter(marked, rows)[mask]
