"""Creates process groups from a mesh shape: the torch DeviceMesh, and this rank's group along every
axis.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.errors import AutoparError
from autopar.ir.mesh import AXES, COPIES, MeshShape
from autopar.rewrite.collectives.axes import AxisGroup


def mesh_axes(
    shape: MeshShape, device_type: str = "cpu", shard: int = 0
) -> tuple[DeviceMesh | None, dict[str, AxisGroup]]:
    """(the DeviceMesh of `device_type` with the dims of `AXES`, including those of size 1; this
    rank's group along each dim, by name).

    If ZeRO shards within groups of `shard` data-parallel ranks, dp becomes two dims of both:
    `COPIES` from group to group, and `dp` within a group. `shard` = 0 divides nothing. This uses
    the initialized default process group, and every rank must call it.

    Without a process group, only a mesh of one device is possible. The DeviceMesh is then None, and
    every group has size 1. Raises AutoparError if the world does not have the size of the mesh.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if world_size != shape.num_devices:
        how = (
            f"the process group has {world_size} rank(s)"
            if dist.is_initialized()
            else "no process group is initialized"
        )
        raise AutoparError(
            f"the mesh ({shape}) has {shape.num_devices} device(s), but {how}; "
            f"start {shape.num_devices} process(es) (torchrun --nproc-per-node=...) or plan for {world_size} device(s)"
        )
    if not dist.is_initialized():
        return None, {axis: AxisGroup(axis, 1) for axis in AXES}
    whole, mesh = _device_mesh(shape, device_type), _device_mesh(shape, device_type, shard)
    axes = {}
    for place, axis in enumerate(mesh.mesh_dim_names or ()):
        of, size = (
            mesh if axis in (COPIES, "dp") else whole,
            mesh.size(place),
        )  # groups of the others are those of the program
        axes[axis] = AxisGroup(
            axis, size, of.get_local_rank(axis), of.get_group(axis).group_name if size > 1 else None
        )
    return mesh, axes


def pp_subgroup(
    shape: MeshShape, rank: int, coordinates: tuple[int, ...], pp: AxisGroup
) -> AxisGroup | None:
    """The group of the ranks with these pp coordinates and the other coordinates of `rank`; None if
    `rank` is not among them.

    Every rank of the world must call it, with the same `coordinates`.
    """
    if len(coordinates) == pp.size:
        return pp
    stride, place = shape.stride("pp"), shape.coordinate(rank, "pp")
    firsts = [first for first in range(shape.num_devices) if shape.coordinate(first, "pp") == 0]
    groups = {first: _group(tuple(first + c * stride for c in coordinates)) for first in firsts}
    if place not in coordinates:
        return None
    return AxisGroup(
        "pp", len(coordinates), coordinates.index(place), groups[rank - place * stride].group_name
    )


_made: dict[dist.ProcessGroup, dict[tuple, Any]] = {}
"""By default process group, the meshes and groups that were made beside it. Groups hold sockets and
threads, so engines with the same mesh share them. Those of an ended default group stay: the end of
a gloo group waits for its threads, which a fork does not have, and may abort the process.
"""


def _known() -> dict[tuple, Any]:
    return _made.setdefault(_world(), {})


def _group(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    known = _known()
    if ranks not in known:
        known[ranks] = dist.new_group(list(ranks), timeout=time_limit())
    return known[ranks]


def ranks_of(shape: MeshShape) -> torch.Tensor:
    """The rank at each coordinate, as an int tensor with one dim for each axis of `AXES`."""
    placed = shape.placed
    ranks = torch.arange(shape.num_devices, dtype=torch.int).view(
        [shape.size(axis) for axis in placed]
    )
    return ranks.permute([placed.index(axis) for axis in AXES])


def _device_mesh(shape: MeshShape, device_type: str, shard: int = 0) -> DeviceMesh:
    """The DeviceMesh of a shape, made once for each default process group. With `shard`, dp is
    divided in two: `COPIES`, and the ranks inside a group of `shard` data-parallel ranks.
    """
    known, key = _known(), (shape, device_type, shard)
    if key not in known:
        ranks = ranks_of(shape)
        names: tuple[str, ...] = AXES
        if shard:
            place = AXES.index("dp")
            ranks, names = (
                ranks.unflatten(place, (-1, shape.sharing_dp(shard))),
                (*AXES[:place], COPIES, *AXES[place:]),
            )
        # NCCL does not reach what is offloaded to the host
        reached = torch.device(device_type) in _world()._device_types
        known[key] = mesh = DeviceMesh(
            device_type,
            ranks,
            mesh_dim_names=names,
            backend_override=None if reached else (("gloo", None),) * len(names),
        )
        for axis in names:  # torch gives new groups its own default, half an hour over gloo
            set_time_limit(mesh.get_group(axis), time_limit())
    return known[key]


def join_process_group(backend: str, limit: timedelta) -> None:
    """Join the ranks that torchrun has started into the default process group, with this backend
    and `limit` as the time limit of collectives.

    Ranks find each other through torchrun's store, which outlives them. After a restart it still
    has the addresses of ended ranks, and torch 2.13 would use them. Each start therefore uses its
    own prefix in the store.
    """
    store, rank, world_size = next(dist.rendezvous("env://", timeout=limit))
    start = f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)} of {world_size} ranks"
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(start, store),
        rank=rank,
        world_size=world_size,
        timeout=limit,
    )


def _world() -> dist.ProcessGroup:
    """The default process group."""
    return dist.distributed_c10d._get_default_group()


def time_limit() -> timedelta:
    """The time limit of the default process group."""
    world = _world()
    return world._get_backend(world._device_types[0]).options._timeout


def set_time_limit(group: dist.ProcessGroup, limit: timedelta) -> None:
    """Set the time limit of a process group."""
    dist.distributed_c10d._set_pg_timeout(limit, group)


def file_group() -> dist.ProcessGroup | None:
    """A gloo process group of all ranks for messages about files. It is separate from the groups that
    train and from `call_group`, because saving communicates during steps. None without a process
    group. All ranks must make the first call together; later calls return the same group.
    """
    return _gloo_group("files")


def call_group() -> dist.ProcessGroup | None:
    """As `file_group`, for messages about calls of methods and their arguments."""
    return _gloo_group("calls")


def _gloo_group(use: str) -> dist.ProcessGroup | None:
    if not dist.is_initialized():
        return None
    known, key = _known(), ("gloo", use)
    if key not in known:
        known[key] = dist.new_group(backend="gloo", timeout=time_limit())
    return known[key]
