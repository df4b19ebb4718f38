"""Detects Python state that forward changes. Capture would freeze it, so forward must not compute
with it; otherwise it is only noted.

torch.export runs forward once. A number drawn by `random`, a counter on a module or a flag would
keep its value from that call in every step. `check_state` compares the state before and after the
call. If it changed, forward is captured again from the new state. If the graphs differ, forward
computes with the state. If they are equal but the state keeps changing (a counter), the source must
not read it except to change it, since an effect might appear only after many steps.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node

from autopar.errors import AutoparError, one_line
from autopar.ops.values import fake_tensor
from autopar.trace.assigned_state import AssignedState
from autopar.trace.captured import Captured
from autopar.trace.graph_keys import GraphKeys, storage_address
from autopar.trace.hit_loops import HitLoops
from autopar.trace.normalize import inline_no_grad_regions
from autopar.trace.one_process import OneProcess
from autopar.trace.python_state import RANDOM, Functions, Snapshot, generator_state
from autopar.trace.state_reads import methods_of, read_of
from autopar.trace.user_lines import is_of_user, line_text


@dataclass(slots=True)
class StateRecord:
    """The Python state (`Snapshot`) before and after one call of `model`, a copy of the user's.
    Filled in by `around_call`. `returned` are paths of tensors that the captured call must return.
    `made` has the keys of tensors in the state that an earlier call has made (`GraphKeys`), by the
    address of their storage. `notes` are texts for the user. `assigned` watches the registered
    tensors of the call, and `process` is what it sees of torch.distributed.
    """

    model: nn.Module
    functions: Functions
    returned: tuple[str, ...] = ()
    made: dict[int, str] = field(default_factory=dict)
    before: Snapshot = field(default_factory=Snapshot)
    after: Snapshot = field(default_factory=Snapshot)
    notes: list[str] = field(default_factory=list)
    loops: HitLoops = field(default_factory=HitLoops)
    assigned: AssignedState | None = None
    process: OneProcess = field(default_factory=OneProcess)

    @contextmanager
    def around_call(self) -> Iterator[None]:
        """A context that stores the state before its block in `before`, and after it in `after`."""
        self.before = Snapshot.of(self.model, self.functions)
        yield
        self.after = Snapshot.of(self.model, self.functions)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors that were at the paths `returned` after the recorded call, in that order."""
        return tuple(self.after.tensors[path] for path in self.returned)


def check_state(
    first: Captured, record: StateRecord, capture_again: Callable[[StateRecord], Captured]
) -> tuple[str, ...]:
    """Notes for the user (at most one) on Python state that the captured call changed; () if it
    changed none. Raises AutoparError if forward computes with that state, or draws from a Python
    generator.

    `record` is the record of `first`; `capture_again` captures once more, with another record.
    Leaves the Python state changed.
    """
    changed = record.before.changed(record.after)
    if not changed:
        return ()
    draws = [path for path in changed if _is_random(record.after.held.get(path))]
    if draws:
        raise AutoparError(_draw(draws[0], record, capture_again))
    values, made = _lasting_tensors(changed, record, capture_again)
    for path in changed:
        if path in dict(record.model.named_buffers()) and path not in values:
            raise AutoparError(
                f"forward registers buffer {path!r} with a value that depends on the batch or on what trains. No step after capture "
                "would keep it: register it in __init__, with its shape and dtype, and assign it in forward"
            )
    again = StateRecord(record.model, record.functions, made=made)
    try:
        second = _from_state(record.after, values, again, capture_again)
    except AutoparError as error:
        how = f": the next call, which begins with what this one left, fails ({one_line(error)})"
        if any(path in record.after.tensors for path in changed):
            how = ": the next call begins with the tensor that this one left"
        raise AutoparError(_frozen(changed, record, how)) from error
    if _outputs(first) != _outputs(second, made):
        raise AutoparError(_frozen(changed, record, ": the next call computes something else"))
    moving = again.before.differing(again.after)
    if moving:
        names = {
            name
            for path in moving
            for name in again.after.names.get(path) or again.before.names.get(path, ())
        }
        where = read_of(names, {*record.functions.codes, *methods_of(record.model)})
        if where is not None:
            raise AutoparError(_frozen(moving, record, f", and reads it{where}"))
    visible = [
        path for path in changed if not any(part.startswith("_") for part in path.split("."))
    ]  # not what users never see
    if not visible:
        return ()
    return (
        f"forward changes {_listed(visible)}, which does not change what it computes: it is changed at capture, not in training",
    )


def _is_random(held: Any) -> bool:
    return isinstance(held, tuple) and held[:1] == ("random",)


def _outputs(captured: Captured, made: Mapping[int, str] | None = None) -> list[str]:
    inline_no_grad_regions(captured.graph)
    return GraphKeys(captured, made).outputs()


def _lasting_tensors(
    changed: list[str], record: StateRecord, capture_again: Callable
) -> tuple[dict[str, torch.Tensor], dict[int, str]]:
    """(tensors by path; the `made` of `StateRecord` for them). They take the place of tensors that
    the call stored, and that no step of training would change, such as masks and tables.

    A tensor computed from constants alone has its values; one that is computed from buffers is a
    fake tensor. Captures once more, to see what the call stores at the `changed` paths. `record`
    and `capture_again` are those of `check_state`.
    """
    paths = tuple(path for path in changed if path in record.after.tensors)
    if not paths:
        return {}, {}
    record.before.restore()
    returning = StateRecord(record.model, record.functions, paths)
    captured = capture_again(returning)
    inline_no_grad_regions(captured.graph)
    keys, nodes = GraphKeys(captured), captured.graph.output_node().args[0][-len(paths) :]
    values: dict[str, torch.Tensor] = {}
    made: dict[int, str] = {}
    for path, node in zip(paths, nodes, strict=True):
        key, value = keys.lasting(node), keys.value(node)
        if key is not None:
            values[path] = _like(node) if value is None else value
            made[storage_address(values[path])] = key
    return values, made


def _like(node: Node) -> torch.Tensor:
    """A fake tensor of the shape and dtype of a node's, which shares memory with no other."""
    val = fake_tensor(node)
    with val.fake_mode if isinstance(val, FakeTensor) else nullcontext():
        return torch.empty(val.shape, dtype=val.dtype)


def _from_state(
    state: Snapshot, values: dict[str, torch.Tensor], record: StateRecord, capture_again: Callable
) -> Captured:
    """Capture forward from the Python state `state`, which is put back first, and return the
    `Captured`. `values` has, by path, known values of tensors in it, which are put in as well.
    `record` records the call.
    """
    state.restore()
    for path, value in values.items():
        state.puts[path](value)
    return capture_again(record)


def _frozen(paths: list[str], record: StateRecord, how: str) -> str:
    path = paths[0]
    before, after = (shot.held.get(path) for shot in (record.before, record.after))
    plain = all(isinstance(value, (int, float, str, type(None))) for value in (before, after))
    values = f" (from {before!r} to {after!r})" if plain else ""
    return (
        f"forward changes {_listed(paths)}{values[:200]}, which is Python state{how}. autopar captures forward once, so that every step "
        "would compute as the first one did; keep it in a buffer (register_buffer) that forward changes in place with torch ops, "
        "make it anew in each forward, or pass it to forward as an input"
    )


def _listed(paths: list[str]) -> str:
    """The first 4 paths as quoted text, and how many more there are. Paths inside other listed
    paths are left out.
    """
    roots = [
        path
        for path in paths
        if not any(
            path != other and path.startswith(other) and path[len(other)] in ".[" for other in paths
        )
    ]
    shown = ", ".join(path if " " in path else repr(path) for path in roots[:4])
    return shown + (f" and {len(roots) - 4} more" if len(roots) > 4 else "")


# ------------------------------------------------------------------------------------------------------------------ random draws


def _draw(path: str, record: StateRecord, capture_again: Callable) -> str:
    where, name = (
        _line_of_draw(path, record, capture_again),
        path if path.startswith(RANDOM) else f"the random generator {path!r}",
    )
    if path == RANDOM + "`torch`":
        return (
            f"forward sets {name}{where}, as torch.manual_seed does: the captured graph would not, so that the draws that follow would be "
            "others than in eager mode; seed before training, outside of forward"
        )
    return (
        f"forward draws from {name}{where}: autopar captures forward once, so that every step would compute with this one draw. Draw "
        "outside of forward and pass it in as an input, or draw with torch ops (torch.rand), which every step runs, with numbers of its own"
    )


def _line_of_draw(path: str, record: StateRecord, capture_again: Callable) -> str:
    """Text that names the user's line which first draws from the generator at `path`; '' if it is
    not found. Forward runs once more with a trace function on the user's lines. `record` and
    `capture_again` are those of `check_state`.
    """
    generator, found = record.after.generators[path], list[str]()
    line_before: dict[types.FrameType, int] = {}

    def enter(frame: types.FrameType, event: str, argument: Any) -> Callable | None:
        return look if is_of_user(frame.f_code.co_filename) else None

    def look(frame: types.FrameType, event: str, argument: Any) -> Callable:
        if not found and generator_state(generator) != state:
            number, drew = line_before.get(frame), frame
            # a call after the draw, in the same line of one that called
            while number is None and drew.f_back is not None:
                drew = drew.f_back
                number = drew.f_lineno if drew in line_before else None
            found.append(line_text(drew.f_code.co_filename, number))
        line_before[frame] = frame.f_lineno
        return look

    record.before.restore()
    state, around = generator_state(generator), sys.gettrace()
    sys.settrace(enter)
    try:
        capture_again(StateRecord(record.model, record.functions))
    except AutoparError:  # the line may be known all the same
        pass
    finally:
        sys.settrace(around)
    return found[0] if found else ""
