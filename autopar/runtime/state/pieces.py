"""Sharded tensors on disk: every rank writes and reads its own pieces, described by their place in
the whole tensor.

A rank's part of a tensor is a product of positions along each dim. Consecutive positions form a
run, and a product of runs is a piece: a box of the whole tensor, and the box of the local tensor
that holds it. A contiguous shard is one piece; a fused projection sharded in three sections is
three. torch.distributed.checkpoint stores boxes, and reads any box from the stored ones, so one
plan can load what another one saved. (DTensors cannot express patterns:
torch.distributed.checkpoint would silently treat a rank's sections of a fused projection as one
contiguous chunk.)
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from autopar.ir.sharding import CONTIGUOUS, Pattern
from autopar.rewrite.collectives.patterns import Split, pick


@dataclass(frozen=True, slots=True)
class Cut:
    """One dim of a tensor, split over `parts` ranks in `pattern`, as the rank with index `index`
    sees it.
    """

    dim: int
    parts: int
    index: int
    pattern: Pattern = CONTIGUOUS

    def of(self, positions: Tensor, index: int) -> Tensor:
        """The elements of `positions` (1-D) that the rank at `index` holds."""
        return pick(positions, Split(0, len(positions), self.pattern), self.parts, index)


@dataclass(frozen=True, slots=True)
class Held:
    """A rank's part of a tensor of `shape`: the local `tensor` (or a DTensor around it) after
    `cuts`, outermost first.
    """

    shape: tuple[int, ...]
    tensor: Tensor
    cuts: tuple[Cut, ...] = ()

    def pieces(self) -> Pieces:
        """What this rank holds, as pieces (boxes) of the whole tensor."""
        positions = tuple(self.positions(dim) for dim in range(len(self.shape)))
        return Pieces(self.shape, local_part(self.tensor), positions)

    def positions(self, dim: int) -> Tensor:
        """The positions along `dim` of the whole tensor that the local tensor contains, in its
        order.
        """
        found = torch.arange(self.shape[dim])
        for cut in self.cuts:
            if cut.dim == dim:
                found = cut.of(found, cut.index)
        return found

    def gathered_positions(self, dim: int) -> Tensor:
        """Positions along `dim` in the order of the concatenated parts of all ranks, as in a
        DTensor that is made replicated.
        """
        found = [torch.arange(self.shape[dim])]
        for cut in self.cuts:
            if cut.dim == dim:
                found = [cut.of(part, index) for part in found for index in range(cut.parts)]
        return torch.cat(found)


def local_part(tensor: Tensor) -> Tensor:
    """The local tensor of a DTensor; any other tensor itself."""
    data = tensor.detach()
    return data.to_local() if hasattr(data, "to_local") else data


@dataclass(frozen=True, slots=True)
class Pieces:
    """A rank's part of a tensor of `shape`: `local` has the elements at `positions[d]` along each
    dim d.
    """

    shape: tuple[int, ...]
    local: Tensor
    positions: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        if tuple(self.local.shape) != tuple(len(p) for p in self.positions):
            raise ValueError(
                f"a local tensor of {tuple(self.local.shape)} does not have {[len(p) for p in self.positions]} positions"
            )

    def boxes(self) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """(offset in the whole tensor, view of the local tensor) for each piece."""
        if self.local.numel() == 0:
            return
        for chosen in product(*(_runs(positions) for positions in self.positions)):
            view = self.local
            for dim, (_, here, length) in enumerate(chosen):
                view = view.narrow(dim, here, length)
            yield tuple(whole for whole, _, _ in chosen), view

    def copied(self, device: str = "cpu") -> Pieces:
        """These pieces with a copy of the tensor on `device`."""
        return Pieces(self.shape, self.local.to(device, copy=True), self.positions)


def whole_pieces(tensor: Tensor) -> Pieces:
    """The pieces of a tensor that this rank holds whole."""
    return Held(tuple(tensor.shape), tensor).pieces()


def _runs(positions: Tensor) -> list[tuple[int, int, int]]:
    """(first position, index in `positions`, length) of each run of consecutive positions."""
    starts = [0, *((positions.diff() != 1).nonzero().flatten() + 1).tolist(), len(positions)]
    return [(int(positions[start]), start, end - start) for start, end in pairwise(starts)]


class PieceWriter(DefaultSavePlanner):
    """A save planner for torch.distributed.checkpoint that writes the pieces of `tensors`, by name.
    A piece that several ranks hold is written once.
    """

    def __init__(self, tensors: dict[str, Pieces]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._views: dict[MetadataIndex, Tensor] = {}
        self._items: list[WriteItem] = []
        for name, pieces in tensors.items():
            properties = TensorProperties.create_from_tensor(pieces.local)
            for offset, view in pieces.boxes():
                index = MetadataIndex(name, torch.Size(offset))
                chunk = ChunkStorageMetadata(torch.Size(offset), view.shape)
                self._views[index] = view
                self._items.append(
                    WriteItem(
                        index,
                        WriteItemType.SHARD,
                        None,
                        TensorWriteData(chunk, properties, torch.Size(pieces.shape)),
                    )
                )

    def create_local_plan(self) -> SavePlan:
        """torch's plan to write all pieces of this rank; also stored in `self.plan`."""
        self.plan = SavePlan(self._items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """The tensor to write for an item of the plan: a view of the local tensor."""
        return self._views[index]


def saved_tensors(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """What torch.distributed.checkpoint says about each saved tensor (size, dtype, chunks), by
    name.
    """
    entries = metadata.state_dict_metadata.items()
    return {name: entry for name, entry in entries if isinstance(entry, TensorStorageMetadata)}


class PieceReader(DefaultLoadPlanner):
    """A load planner for torch.distributed.checkpoint that fills the pieces of `tensors`, by name,
    in place.
    """

    def __init__(self, tensors: dict[str, Pieces]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._tensors = tensors
        self._views: dict[tuple[str, torch.Size | None], Tensor] = {}

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Store the metadata of the checkpoint."""
        self.metadata, self.is_coordinator = metadata, is_coordinator
        self._saved = {} if metadata is None else saved_tensors(metadata)

    def create_local_plan(self) -> LoadPlan:
        """torch's plan of what this rank reads from each saved piece. Raises ValueError if the
        checkpoint lacks part of a tensor, KeyError if it lacks all of one.
        """
        items = []
        for name, pieces in self._tensors.items():
            views = {torch.Size(offset): view for offset, view in pieces.boxes()}
            self._views.update(((name, offset), view) for offset, view in views.items())
            found = create_read_items_for_chunk_list(
                name,
                self._saved[name],
                [ChunkStorageMetadata(o, v.shape) for o, v in views.items()],
            )
            if sum(prod(item.lengths) for item in found) != sum(
                view.numel() for view in views.values()
            ):
                raise ValueError(f"the checkpoint does not hold all of {name}")
            items += found
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The tensor to read into for an item of the plan: a view of the local tensor."""
        return self._views[index.fqn, index.offset]


def write_pieces(path: Path, tensors: dict[str, Pieces], group: dist.ProcessGroup | None) -> None:
    """Write the pieces (`tensors`, by name) of all ranks of the group into a directory, each once.
    Without a group, those of this rank.
    """
    with _no_warning(group):
        dcp.save(
            {},
            storage_writer=dcp.FileSystemWriter(path),
            planner=PieceWriter(tensors),
            process_group=group,
            no_dist=group is None,
        )


def read_pieces(path: Path, tensors: dict[str, Pieces], group: dist.ProcessGroup | None) -> None:
    """Fill the pieces (`tensors`, by name) of every rank of the group from a directory, in place.
    Without a group, those of this rank.
    """
    with _no_warning(group):
        dcp.load(
            {},
            storage_reader=dcp.FileSystemReader(path),
            planner=PieceReader(tensors),
            process_group=group,
            no_dist=group is None,
        )


@contextlib.contextmanager
def _no_warning(group: dist.ProcessGroup | None) -> Iterator[None]:
    """A context without torch's warning about a single process, if there is no group; with a group
    it does nothing.
    """
    # and then this may be the thread of a save, while warnings belong to all threads
    if group is not None:
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
