"""Methods of the engine about lasting state: checkpoints, exported weights, and the order of
rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sized
from contextlib import AbstractContextManager
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from autopar.files import path_of
from autopar.rewrite.collectives.primitives import apply_primitive
from autopar.runtime.batches.sampler import DataParallelSampler
from autopar.runtime.checkpoint.checkpoint import Checkpoints, Extra, Saving
from autopar.runtime.checkpoint.export import export_weights
from autopar.runtime.checkpoint.source import CheckpointSource
from autopar.runtime.state.pieces import Cut, Held
from autopar.runtime.state.user_changes import UserChanges

if TYPE_CHECKING:
    from autopar.ir.traced import ParameterSpec
    from autopar.rewrite.collectives.axes import AxisGroup
    from autopar.runtime.batches.micro_batches import BatchSplitter
    from autopar.runtime.state.parameters import Parameters
    from autopar.runtime.state.tied_parameters import StageParameters


class Durable(CheckpointSource):
    """The methods of an Engine that read or write its lasting state."""

    axes: dict[str, AxisGroup]
    batches: BatchSplitter
    together: int
    _checkpoints: Checkpoints
    parameters: Parameters
    _for_steps: dict[str, torch.Tensor] | None
    _shared: StageParameters
    _all_specs: Mapping[str, ParameterSpec]
    _state_names: set[str]
    _user_changes: UserChanges
    _samplers: tuple[tuple[int, bool, bool], ...] = ()
    """What the last samplers were given, which all ranks must have alike."""

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Whole parameters (masters if trained) and persistent buffers by the model's own names,
        including tied names. The result is equal on every rank. Every rank must call it.
        """
        with self._together("full_state_dict"):
            wholes = {name: self._whole(name) for name in self.parameters.leaves}
            state: dict[str, torch.Tensor] = {}
            for name, whole in self._shared.everywhere(wholes, self._all_specs).items():
                state.update(
                    (alias, whole)
                    for alias in (name, *self._all_specs[name].aliases)
                    if alias in self._state_names
                )
        self._user_changes.given(state)
        return state

    def _together(self, method: str) -> AbstractContextManager[None]:
        """A context for a method that every rank calls: it waits for the call of all ranks."""
        raise NotImplementedError

    def _whole(self, name: str) -> torch.Tensor:
        """A copy of the whole of a parameter or buffer of which this rank holds a part, gathered
        over all axes but pp. Every rank that holds a part must call it.
        """
        whole = self.parameters.whole(name)
        for group, split in reversed(self.parameters.holding.cuttings[name].splits):
            whole = apply_primitive("all_gather", whole, group, split, None)
        return whole.clone()

    def saved_shapes(self) -> dict[str, tuple[int, ...]]:
        """The whole shapes of the parameters and persistent buffers that a checkpoint contains, by
        name. Tied ones have their first name. Tensors without elements are left out.
        """
        return {
            name: spec.shape
            for name, spec in self._all_specs.items()
            if prod(spec.shape)
            and any(alias in self._state_names for alias in (name, *spec.aliases))
        }

    def held(self) -> dict[str, Held]:
        """This rank's parts of the tensors in `saved_shapes`, by name.

        For a trained parameter, this is the master, which the optimizer updates. A tensor that this
        rank lacks, or whose master another rank holds, has no entry.
        """
        found, own = {}, self.parameters
        for name, shape in self.saved_shapes().items():
            if name in own.leaves and own.has_master(name):
                cuts = tuple(
                    Cut(split.dim, group.size, group.index, split.pattern)
                    for group, split in own.cuts(name)
                )
                found[name] = Held(shape, own.masters.get(name, own.leaves[name]), cuts)
        return found

    def save(
        self,
        directory: str | Path,
        extra: Extra | None = None,
        keep: int | None = None,
        asynchronous: bool = False,
    ) -> Saving:
        """Write a checkpoint into a directory.  Every rank must call this.

        Args:
            directory: the directory of checkpoints.
            extra: further objects with state_dict() and load_state_dict(), by name, such as {"scheduler": scheduler}.  Those of rank 0
                are saved.
            keep: the number of newest checkpoints to keep.  By default all are kept.
            asynchronous: copy to host memory, return, and write beside the next steps.

        Returns:
            An object whose `wait()` waits for the end of writing.  The next save, load or export of any engine waits too.

        Raises:
            AutoparError: on every rank, if it cannot be written. Earlier checkpoints are then as
                before. With `asynchronous`, `wait()` raises it.
        """
        path = path_of(directory, "checkpoints")
        with self._together("save"):
            return self._checkpoints.save(path, {} if extra is None else extra, keep, asynchronous)

    def load(
        self,
        directory: str | Path,
        extra: Extra | None = None,
        optimizer: bool = True,
        missing_ok: bool = False,
    ) -> int:
        """Load a checkpoint, and return its number of steps.  It may have been saved under another plan and world size.

        Args:
            directory: a directory of checkpoints, of which the newest complete one is taken; or one checkpoint.
            extra: the objects to load into, by the names under which they were saved.
            optimizer: whether to load the optimizer's state and options. False leaves them as they
                are.
            missing_ok: if there is no checkpoint, not even an incomplete one, change nothing and
                return 0.

        Raises:
            AutoparError: on every rank, if there is no complete checkpoint, it is damaged, it lacks
                an extra, or it is of another model or optimizer.
        """
        path = path_of(directory, "checkpoints")
        with self._together("load"):
            self._for_steps = None  # buffers change
            return self._checkpoints.load(
                path, {} if extra is None else extra, optimizer, missing_ok
            )

    def export(
        self,
        directory: str | Path,
        dtype: torch.dtype | None = None,
        max_file_bytes: int = 5 * 10**9,
    ) -> None:
        """Write the weights as safetensors.  `parallelize(weights=...)` and Hugging Face's from_pretrained read them.

        Every rank must call this. The files have whole parameters (masters if trained) and
        persistent buffers by the model's own names; tied ones have their first name.
        `model.config.save_pretrained` writes the config of a Hugging Face model.

        Args:
            directory: a new or empty directory.
            dtype: the dtype of floating-point tensors in the files. By default each keeps its own:
                fp32 for masters under bf16 and fp16.
            max_file_bytes: the most bytes of a file, unless one tensor is larger. Larger weights
                become several files with an index.

        Raises:
            AutoparError: on every rank, if the directory is not empty, cannot be written, or an
                argument is invalid.
        """
        path = path_of(directory, "exported weights")
        with self._together("export"):
            self._checkpoints.wait()
            export_weights(self, path, dtype, max_file_bytes)

    def sampler(
        self, dataset: Sized, shuffle: bool = True, drop_last: bool = True
    ) -> DataParallelSampler:
        """Return a `batch_sampler` for torch's DataLoader: batches of this rank's rows, from the next step to the end of its epoch.

        Args:
            dataset: rows by number.
            shuffle: whether each epoch has an order of its own.
            drop_last: whether rows that do not fill a global batch are left out.
        """
        self._samplers = (*self._samplers[-7:], (len(dataset), shuffle, drop_last))
        return DataParallelSampler(
            dataset,
            self.plan.global_batch * self.together,
            self.plan.mesh.dp,
            self.batches.data_rank,
            steps=lambda: self.steps,
            seed=self.seed,
            shuffle=shuffle,
            drop_last=drop_last,
        )
