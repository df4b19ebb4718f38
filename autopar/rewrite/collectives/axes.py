"""The mesh axes as a rank's program sees them: a group of ranks along each axis, and which groups
are active.

Nodes name a mesh axis ("dp", "tp"); `active_axes` sets the group of ranks for it. With simulated
groups a rank's program runs without process groups, to verify its shapes on meta, fake or real
tensors.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from autopar.errors import AutoparError
from autopar.ir.mesh import AXES, COPIES, MeshShape


@dataclass(frozen=True, slots=True)
class AxisGroup:
    """A record of this rank's group along the mesh axis `name`. Raises ValueError if the fields do
    not go together.

    `index` is this rank's coordinate; `group_name` is the c10d name of the process group (None for
    one rank). With `simulate` there is no process group, and collectives return zeros of the right
    shape (zeros, because they are valid indices).
    """

    name: str
    size: int
    index: int = 0
    group_name: str | None = None
    simulate: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.size:
            raise ValueError(
                f"axis {self.name!r}: coordinate {self.index} is not in a group of {self.size}"
            )
        if (self.group_name is None) != (self.size == 1 or self.simulate):
            raise ValueError(
                f"axis {self.name!r}: size={self.size}, simulate={self.simulate} does not go with process group {self.group_name!r}"
            )


def simulated_axes(shape: MeshShape, rank: int, shard: int = 0) -> dict[str, AxisGroup]:
    """By mesh axis, the simulated `AxisGroup` of `rank`, for running its program alone to get
    shapes. Raises AutoparError if the mesh has no such rank.

    With `shard`, dp is divided into ZeRO groups of that many data-parallel ranks: the axis dp is
    then inside a group, and the axis `COPIES` goes from group to group.
    """
    if not 0 <= rank < shape.num_devices:
        raise AutoparError(
            f"rank {rank} is not in the mesh ({shape}) of {shape.num_devices} device(s)"
        )
    found = {
        axis: AxisGroup(axis, shape.size(axis), shape.coordinate(rank, axis), simulate=True)
        for axis in AXES
    }
    if shard:
        inside = shape.sharing_dp(shard)
        number, index = divmod(found["dp"].index, inside)
        found[COPIES] = AxisGroup(COPIES, shape.copies(shard)[0], number, simulate=True)
        found["dp"] = AxisGroup("dp", inside, index, simulate=True)
    return found


# The axes that each thread has activated.  Not a ContextVar: autograd runs CUDA backward, and with it the forward code that a
# checkpoint recomputes, on a thread of its own, which inherits no context.
_axes_by_thread: dict[int, Mapping[str, AxisGroup]] = {}


@contextlib.contextmanager
def active_axes(axes: Mapping[str, AxisGroup]) -> Iterator[None]:
    """A context in which collective nodes use the groups in `axes`.

    The innermost context of a thread counts. A thread without one, such as autograd's, uses the
    context of the only thread that has one. Backward through finished transitions needs no context;
    recomputation does.
    """
    thread = threading.get_ident()
    outer = _axes_by_thread.get(thread)
    _axes_by_thread[thread] = axes
    try:
        yield
    finally:
        if outer is None:
            del _axes_by_thread[thread]
        else:
            _axes_by_thread[thread] = outer


@torch.compiler.assume_constant_result
def axis_group(axis: str) -> AxisGroup:
    """The `AxisGroup` of the mesh axis `axis` in the active context (`active_axes`). A compiled
    program treats it as a constant.

    Raises AutoparError if no context is active or the axis is not in it. Also on a thread without a
    context, if other threads have different ones.
    """
    axes = _axes_by_thread.get(threading.get_ident())
    if axes is None:
        others = list(_axes_by_thread.values())
        if not others:
            raise AutoparError(
                f"a collective over mesh axis {axis!r} ran with no active mesh; run the program inside `with active_axes(...)`"
            )
        if any(other is not others[0] for other in others):
            raise AutoparError(
                f"a collective over mesh axis {axis!r} ran on a thread with no active mesh, while other threads have several"
            )
        axes = others[0]
    if axis not in axes:
        raise AutoparError(
            f"a collective names mesh axis {axis!r}; the active mesh has {', '.join(axes) or 'no axes'}"
        )
    return axes[axis]
