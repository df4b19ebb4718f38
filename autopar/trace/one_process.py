"""Makes forward see one process with the whole batch, though several may capture it.

A captured graph computes the value of the whole batch; how ranks share the work is the plan's
affair. While forward runs, the world size is 1 and the rank 0, also in environment variables. A
collective over one process returns what it is given: a sum over ranks is the sum that the whole
batch has already, and gathered rows are the rows.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
import torch.distributed.device_mesh as device_mesh
from torch import nn

from autopar.errors import AutoparError
from autopar.trace.distributed_calls import MODULES, REFUSED, TABLES, refusing
from autopar.trace.python_state import Functions, Snapshot
from autopar.trace.state_reads import methods_of, read_of
from autopar.trace.user_lines import is_of_user, line_now

_RANKS = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "NODE_RANK",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "PMI_RANK",
)
_SIZES = (
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "SLURM_NTASKS",
    "SLURM_NPROCS",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "PMI_SIZE",
)
_ENVIRONMENT = dict.fromkeys(_RANKS, "0") | dict.fromkeys(_SIZES, "1")
"""Environment variables that differ between launchers' processes, with their value for one."""


@dataclass(slots=True)
class OneProcess:
    """What forward asks of torch.distributed, and what it is told about itself.

    `initialized` is the answer to `is_initialized()`, and `asked` whether forward asked. `calls`
    names what else it called or read, each with the first line that did; `count` counts them all.
    """

    initialized: bool = False
    asked: bool = False
    calls: dict[str, str] = field(default_factory=dict)
    count: int = 0

    def notes(self) -> list[str]:
        """A note for the user if forward called or read something; else none."""
        if not self.calls:
            return []
        names, where = ", ".join(self.calls), next(iter(self.calls.values()))
        return [
            f"forward uses {names}{where}: it sees one process, which has the whole batch, so that sums over ranks and gathered rows "
            "are those of the batch as it is"
        ]

    @contextlib.contextmanager
    def seen_by(
        self, functions: Functions, kept: Iterable[tuple[Callable, Callable[[Any], None]]] = ()
    ) -> Iterator[None]:
        """A context in which torch.distributed is that of one process. `functions` are those that
        forward can call. `kept` are functions that attributes and containers hold, each with a
        setter of that place.
        """
        replaced = {id(old): (old, new) for old, new in self._replacements()}
        namespaces = [vars(module) for module in MODULES]
        namespaces += {id(f.__globals__): f.__globals__ for f in functions.codes}.values()
        with contextlib.ExitStack() as stack:
            for names in namespaces:
                for name, value in list(names.items()):
                    if id(value) in replaced:
                        stack.callback(names.__setitem__, name, value)
                        names[name] = replaced[id(value)][1]
            for value, put in kept:
                if id(value) in replaced:
                    with contextlib.suppress(AttributeError, TypeError):  # a place is read-only
                        put(replaced[id(value)][1])
                        stack.callback(put, value)
            for function in functions.codes:
                _replace_defaults(function, replaced, stack)
            for owner, name, method in self._methods():
                stack.callback(setattr, owner, name, vars(owner)[name])  # as it is stored
                setattr(owner, name, method)
            stack.enter_context(self._environment())
            stack.callback(_CURRENT.reset, _CURRENT.set(self))
            yield

    def record(self, name: str, where: str) -> None:
        """Remember a call, for the note."""
        self.calls.setdefault(name, where)
        self.count += 1

    def _replacements(self) -> Iterator[tuple[Any, Callable]]:
        for module, table in TABLES:
            for name, function in table.items():
                if (old := getattr(module, name, None)) is not None:
                    yield old, self._called(module, name, function)
        yield dist.is_initialized, self._is_initialized
        for name in REFUSED:
            if (old := getattr(dist, name, None)) is not None:
                yield old, refusing(name)
        yield device_mesh.init_device_mesh, refusing("init_device_mesh")

    def _called(self, module: types.ModuleType, name: str, function: Callable) -> Callable:
        """`function` in the place of `module.name`, which is recorded."""
        prefix = "torch.distributed." if module is dist else f"{module.__name__}."

        def called(*args: Any, **kwargs: Any) -> Any:
            where = line_now()
            self.record(prefix + name, where)
            _check_groups(name, (*args, *kwargs.values()), where)
            return function(*args, **kwargs)

        return called

    def _is_initialized(self) -> bool:
        self.asked = True
        return self.initialized

    @contextlib.contextmanager
    def _environment(self) -> Iterator[None]:
        """A context in which the user's code reads the values of `_ENVIRONMENT`."""
        kind = type(os.environ)
        read = kind.__getitem__

        def getitem(environ: Any, key: Any) -> Any:
            value = read(environ, key)
            if environ is not os.environ or key not in _ENVIRONMENT or not _asked_by_user():
                return value
            self.record(f"the environment variable {key}", line_now())
            return _ENVIRONMENT[key]

        kind.__getitem__ = getitem  # type: ignore[method-assign]
        try:
            yield
        finally:
            kind.__getitem__ = read  # type: ignore[method-assign]

    def _methods(self) -> Iterator[tuple[type, str, Callable]]:
        """(class, name of a method, what takes its place)."""
        answers = {
            (dist.ProcessGroup, "size"): 1,
            (dist.ProcessGroup, "rank"): 0,
            (device_mesh.DeviceMesh, "size"): 1,
            (device_mesh.DeviceMesh, "get_rank"): 0,
            (device_mesh.DeviceMesh, "get_local_rank"): 0,
        }
        for (owner, name), answer in answers.items():
            yield owner, name, self._answering(f"{owner.__name__}.{name}", answer)

    def _answering(self, name: str, answer: int) -> Callable:
        def answered(group: Any, *args: Any, **kwargs: Any) -> int:
            self.record(name, line_now())
            return answer

        return answered


def _replace_defaults(
    function: types.FunctionType, replaced: Mapping[int, tuple], stack: contextlib.ExitStack
) -> None:
    """Change default arguments that are functions in `replaced`, until `stack` ends."""
    for name in ("__defaults__", "__kwdefaults__"):
        before = getattr(function, name)
        values = before.values() if isinstance(before, dict) else before or ()
        if any(id(value) in replaced for value in values):
            now = [replaced.get(id(value), (value, value))[1] for value in values]
            stack.callback(setattr, function, name, before)
            setattr(
                function,
                name,
                dict(zip(before, now, strict=True)) if isinstance(before, dict) else tuple(now),
            )


_CURRENT: ContextVar[OneProcess | None] = ContextVar("what forward sees", default=None)


def current_process() -> OneProcess | None:
    """What the call of forward that runs sees; None outside of one."""
    return _CURRENT.get()


def _asked_by_user() -> bool:
    """Whether the nearest frame outside of Python's own files is of the user."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith("<") and os.path.basename(file) not in (
            "os.py",
            "_collections_abc.py",
        ):
            return is_of_user(file)
        frame = frame.f_back
    return False


def _check_groups(name: str, args: tuple, where: str) -> None:
    """Raise AutoparError if an argument is a group of some of this job's processes: what such ranks
    share may be parts of a model.
    """
    if not dist.distributed_c10d.GroupMember.WORLD:
        return
    whole = _SIZE(dist.distributed_c10d.GroupMember.WORLD)
    for group in args:
        if isinstance(group, dist.ProcessGroup) and 1 < _SIZE(group) < whole:
            raise AutoparError(
                f"forward calls {name}{where} over {_SIZE(group)} of the {whole} processes. Forward must compute the whole batch on one "
                "device, since autopar shards the model itself: build the model without parallelism of its own"
            )


_SIZE = dist.ProcessGroup.size
_NAMES_OF_SIZES = re.compile(
    r"(^|_)(world_?size|(num|n)_?(processes|procs|gpus?|replicas|ranks)|nprocs|ngpus?|(dp|data_parallel)_(world_)?size)$",
    re.I,
)


def check_kept_sizes(state: Snapshot, functions: Functions, model: nn.Module) -> None:
    """Raise AutoparError if forward reads an attribute or variable that holds the number of this
    job's processes, where it must compute as one process does.
    """
    world = dist.distributed_c10d.GroupMember.WORLD if dist.is_available() else None
    if world is None or _SIZE(world) == 1:
        return
    for path, value in state.held.items():
        name = re.split(r"[.\[\]' ]+", path.rstrip("]'"))[-1]
        if type(value) is int and value == _SIZE(world) and _NAMES_OF_SIZES.search(name):
            where = read_of({name}, {*functions.codes, *methods_of(model)})
            if where is not None:
                raise AutoparError(
                    f"forward reads {path!r}{where}, which is {value}, the number of processes: it sees one process with the whole "
                    "batch, so that this would count the ranks twice. Set it to 1, and a rank to 0, or ask torch.distributed in forward"
                )
