"""Records the ops that a function runs below torch's transforms, and calls them in forward.

torch.export records ops above the layers in which transforms work, and many rules of transforms
need sizes that are numbers. A function therefore runs on fake tensors with several numbers of rows,
each below these layers. A number among the arguments of its ops that follows the rows then becomes
an expression of the batch size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.ops.aten import aten
from autopar.trace.run_inputs import (
    BRANCHES,
    COMPUTES,
    OUTSIDE,
    Inputs,
    NotPlain,
    Strided,
    below_transforms,
)
from autopar.trace.written_ops import called


class Effects(Protocol):
    """What a function changes in Python."""

    def restore(self) -> None:
        """Undo it."""

    def check(self, tracked: set[int]) -> None:
        """Raise NotPlain if it is other than after the run before, or has a tensor that is not
        `tracked`, by ids.
        """


def plainly(function: Callable, args: tuple, kwargs: dict[str, Any], effects: Effects) -> Any:
    """The result of `function(*args, **kwargs)`, computed by plain ops in forward. Several runs
    change Python state once, by `effects`.

    Raises NotPlain if its ops depend on the number of rows, or on a tensor that forward did not
    make. Errors of the function are passed on.
    """
    inputs = Inputs.of(function, args, kwargs)
    tracked = _tracked()
    if inputs.symbol is None:
        runs = [_once(function, args, kwargs)]
        effects.check(tracked)
        return _replay(runs, inputs)
    runs = []
    try:
        for rows in inputs.runs():
            effects.restore()
            limit = len(runs[0].ops) if runs else None
            with inputs.replaced(rows) as (given, more, own):
                runs.append(_record(function, given, more, own, limit))
            effects.check(tracked)
    except NotPlain:
        raise
    except Exception as error:  # it reads rows from elsewhere too
        effects.restore()
        try:
            runs = [_once(function, args, kwargs)]
        except Exception:
            raise error from None
        effects.check(tracked)
    return _replay(runs, inputs)


def _once(function: Callable, args: tuple, kwargs: dict[str, Any]) -> _Run:
    """A run with the batch size of forward. Raises NotPlain if that becomes a number."""
    mode = detect_fake_mode()
    environment = None if mode is None else mode.shape_env
    fixed = lambda: len(environment.replacements) if environment is not None else 0  # noqa: E731
    before = fixed()
    run = _record(function, args, kwargs, {})
    if fixed() > before:
        raise NotPlain("one of its ops takes the batch size as a number")
    return run


@dataclass(frozen=True, slots=True)
class _Op:
    """An op that ran, with its result, and whether autograd recorded it."""

    function: Any
    args: tuple
    kwargs: dict[str, Any]
    result: Any
    has_gradient: bool


@dataclass(frozen=True, slots=True)
class _Run:
    """The ops of a run and its result. `own` has the tensor of forward for the id of each input."""

    ops: list[_Op]
    result: Any
    own: dict[int, Any]


class _Recorder(TorchDispatchMode):
    """Keeps the ops that run. Raises NotPlain for more than `limit`, if that is not None."""

    def __init__(self, limit: int | None) -> None:
        super().__init__()
        self.ops: list[_Op] = []
        self.limit = limit

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [each for each in _tensors(result) if isinstance(each, Tensor)]
        if made and made[0].device.type != "meta":  # by which torch finds shapes of zeros
            self.ops.append(_Op(func, args, kwargs or {}, result, torch.is_grad_enabled()))
        if self.limit is not None and len(self.ops) > self.limit:  # such as a loop over rows
            raise NotPlain(BRANCHES, OUTSIDE)
        return result


def _record(
    function: Callable,
    args: tuple,
    kwargs: dict[str, Any],
    own: dict[int, Any],
    limit: int | None = None,
) -> _Run:
    recorder = _Recorder(limit)
    attention = sdpa_kernel(SDPBackend.MATH)  # whose parts have gradients
    with attention, below_transforms(), recorder:
        return _Run(recorder.ops, function(*args, **kwargs), own)


# -------------------------------------------------------------------------------------- replay


def _replay(runs: Sequence[_Run], inputs: Inputs) -> Any:
    """The result of the first run, as computed by calls of its ops in forward."""
    for run in runs:
        _check(run)
    if len({tuple(op.function for op in run.ops) for run in runs}) > 1:
        raise NotPlain(BRANCHES, OUTSIDE)
    replay = _Replay(runs, inputs)
    for place, ops in enumerate(zip(*(run.ops for run in runs), strict=True)):
        args, kwargs = replay.in_forward([(each.args, each.kwargs) for each in ops])
        with _gradients(ops[0].has_gradient):
            replay.add(place, called(ops[0].function, args, kwargs))
    return replay.in_forward([run.result for run in runs])


class _Replay:
    """The tensors of forward in the place of those of runs. `origins` of each run has where a
    tensor comes from, by its id: an input, or the number of an op with that of its result.
    """

    def __init__(self, runs: Sequence[_Run], inputs: Inputs) -> None:
        self.runs, self.inputs = runs, inputs
        own = [{key: id(value) for key, value in run.own.items() if key != -1} for run in runs]
        self.origins: list[dict[int, Any]] = [dict(each) for each in own]
        self.made: dict[Any, Any] = {
            id(value): value for key, value in runs[0].own.items() if key != -1
        }
        self.tracked = _tracked()

    def add(self, place: int, results: Any) -> None:
        """Note what forward has computed for the ops that are `place` in the runs."""
        for run, origins in zip(self.runs, self.origins, strict=True):
            for number, result in enumerate(_tensors(run.ops[place].result)):
                origins[id(result)] = (place, number)
        for number, result in enumerate(_tensors(results)):
            self.made[place, number] = result

    def in_forward(self, trees: Sequence[Any]) -> Any:
        """What trees of tensors and numbers, one of each run, are in forward. Raises NotPlain if
        they differ by more than the number of rows.
        """
        flat = [pytree.tree_flatten(tree) for tree in trees]
        if any(spec != flat[0][1] for _, spec in flat):
            raise NotPlain(COMPUTES, OUTSIDE)
        leaves = zip(*(leaves for leaves, _ in flat), strict=True)
        return pytree.tree_unflatten([self._leaf(values) for values in leaves], flat[0][1])

    def _leaf(self, values: tuple) -> Any:
        value = values[0]
        if not any(isinstance(each, Tensor) for each in values):
            return value if len(values) == 1 else self.inputs.number(values)
        origins = {known.get(id(each)) for known, each in zip(self.origins, values, strict=True)}
        if len(origins) > 1:
            raise NotPlain("which tensors it reads depends on the number of rows", OUTSIDE)
        if (origin := origins.pop()) is not None:
            return self.made[origin]
        if isinstance(value, FakeTensor) and id(value) not in self.tracked:
            raise NotPlain(
                f"it reads a tensor of shape {tuple(value.shape)} that forward did not make"
            )
        if all(each is value for each in values):
            return value
        if any(isinstance(each, FakeTensor) for each in values):
            raise NotPlain("which tensors it reads depends on the number of rows", OUTSIDE)
        if not all(_are_equal(each, value) for each in values):
            raise NotPlain("a constant that it makes depends on the number of rows", OUTSIDE)
        return value


def _check(run: _Run) -> None:
    """Raise NotPlain for ops that cannot be called again."""
    detached: set[int] = set()
    for op in run.ops:
        if op.function is aten.detach.default or (
            op.args and id(op.args[0]) in detached and op.function.is_view
        ):
            detached.add(id(op.result))
        elif op.function._schema.is_mutable and op.args and id(op.args[0]) in detached:
            raise NotPlain(
                "it changes a tensor in place by its detach()",
                "Compute a new tensor: x + (new - x).detach() has the value of `new` and the gradient of x",
            )
        if torch.Tag.nondeterministic_seeded in op.function.tags:
            raise NotPlain(
                f"{op.function.name().removeprefix('aten::')} draws random numbers in it",
                "Draw them before, and pass them in as an argument",
            )
        if op.function is aten.as_strided.default:
            raise Strided


def _are_equal(one: Any, other: Any) -> bool:
    real = isinstance(one, Tensor) and not isinstance(one, FakeTensor)
    with below_transforms():
        return real and one.shape == other.shape and bool(torch.equal(one, other))


def _tracked() -> set[int]:
    """Ids of the tensors of forward that torch.export follows."""
    mode = get_proxy_mode()
    return set() if mode is None else {id(tensor) for tensor in mode.tracer.tensor_tracker}


def _gradients(recorded: bool) -> contextlib.AbstractContextManager:
    """A context in which autograd records ops, or not. Each change is a region of the graph."""
    same = recorded == torch.is_grad_enabled()
    return contextlib.nullcontext() if same else torch.set_grad_enabled(recorded)


def _tensors(result: Any) -> list[Any]:
    return list(result) if isinstance(result, tuple | list) else [result]
