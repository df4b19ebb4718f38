"""Saves and loads checkpoints of an engine, which any plan and world size can load.

torch.distributed.checkpoint writes tensors; every rank writes its pieces (`pieces.py`). All other
state goes into one file (`files.py` describes it). Every rank must call every method, and an error
on one rank is raised on all.
"""

from __future__ import annotations

import io
import json
import random
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from autopar.errors import AutoparError, shown
from autopar.runtime.checkpoint.files import (
    CHECKPOINT_VERSION,
    STATE,
    Found,
    begin,
    check_content,
    discard,
    disk_errors,
    finish,
    forget,
    newest,
    own_checksums,
    partial_of,
)
from autopar.runtime.checkpoint.optimizer_state import (
    group_options,
    matching_options,
    merged_groups,
    room_for,
    set_options,
    set_values,
    state_tensors,
    state_values,
)
from autopar.runtime.checkpoint.source import CheckpointSource
from autopar.runtime.ranks.agreement import from_all, from_first, lost_ranks, say
from autopar.runtime.ranks.process_groups import file_group
from autopar.runtime.state.inner_optimizers import attributes, digests, set_attributes
from autopar.runtime.state.pieces import Pieces, read_pieces, saved_tensors, write_pieces

Extra = Mapping[str, Any]
"""Objects with state_dict() and load_state_dict(), such as learning-rate schedulers, by user-chosen
names.
"""


class Saving:
    """A save that may still be running. `wait` waits for it, and `waited_for` says whether that was
    called.
    """

    def __init__(self, future: Future[Path]) -> None:
        self._future, self.waited_for = future, False

    def wait(self) -> Path:
        """Wait for the save, and return the checkpoint's directory. Raises AutoparError if it could
        not be written.
        """
        self.waited_for = True
        return self._future.result()

    @property
    def done(self) -> bool:
        """Whether the save has ended."""
        return self._future.done()

    def settle(self) -> None:
        """Wait for the end of the save, without raising its error."""
        self._future.exception()


_under_way: list[Saving] = []
"""The running asynchronous save of this process, if any. All saves use one process group, so there
is at most one.
"""


def settle_saving() -> None:
    """Wait until no save of this process is running. Errors of these saves are not raised."""
    while _under_way:
        _under_way.pop().settle()


class Checkpoints:
    """Saves and loads the checkpoints of one engine. Every rank must call each method."""

    def __init__(self, engine: CheckpointSource) -> None:
        self.engine = engine
        self._latest: Saving | None = None
        self._thread = ThreadPoolExecutor(1, "autopar-save")

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The gloo process group for messages about files; None without torch.distributed."""
        return file_group()

    def wait(self) -> None:
        """Wait for a running save, also of another engine. Raises the error of this engine's last
        save, if `wait` was not called on that.
        """
        settle_saving()
        latest, self._latest = self._latest, None
        if latest is not None and not latest.waited_for:
            latest.wait()

    # -------------------------------------------------------------------------------------------------------------------- save

    def save(self, directory: Path, extra: Extra, keep: int | None, asynchronous: bool) -> Saving:
        """Write a checkpoint, and return its `Saving`. If `asynchronous`, that may still be
        running. The arguments are those of `Engine.save`.
        """
        if keep is not None and (not isinstance(keep, int) or isinstance(keep, bool) or keep < 1):
            raise AutoparError(
                f"keep={shown(keep)} must be a whole number of checkpoints, at least 1"
            )
        _check_named(extra)
        self.wait()
        with lost_ranks("while saving"):
            tensors = self._tensors()
            state = self._state(extra)
            header = self._header()
        if not asynchronous:
            future: Future[Path] = Future()
            future.set_result(self._write(directory, tensors, state, header, keep))
            return Saving(future)
        copies = {name: pieces.copied() for name, pieces in tensors.items()}
        self._latest = Saving(
            self._thread.submit(self._write, directory, copies, state, header, keep)
        )
        _under_way.append(self._latest)
        return self._latest

    def _tensors(self) -> dict[str, Pieces]:
        """This rank's pieces of all saved tensors, by name in the checkpoint: parameters (masters
        if trained), buffers, optimizer state. Every rank must call it; an error on one is
        raised on all.
        """
        held = self.engine.held()

        def collect() -> dict[str, Pieces]:
            state = state_tensors(self.engine.optimizer, held)
            found = {_model(name): part.pieces() for name, part in held.items()}
            found |= self._averages()
            return found | {
                _optimizer(name, key): pieces
                for name, keys in state.items()
                for key, pieces in keys.items()
            }

        found: dict[str, Pieces] = {}
        from_all(self.group, lambda: found.update(collect()))
        return found

    def _averages(self) -> dict[str, Pieces]:
        """This rank's pieces of averaged weights, by name in the checkpoint."""
        averages = self.engine.averages
        if averages is None:
            return {}
        return {
            _average(name): replace(part, tensor=averages.values[name]).pieces()
            for name, part in self.engine.held().items()
            if name in averages.values
        }

    def _state(self, extra: Extra) -> bytes:
        """The content of state.pt on rank 0, which writes it; empty on the others."""
        engine, held = self.engine, self.engine.held()
        extras: dict[str, Any] = {}

        def collect() -> dict[str, Any]:
            extras.update(
                (name, _stateful(name, value).state_dict()) for name, value in extra.items()
            )
            groups, values = (
                group_options(engine.optimizer, held),
                state_values(engine.optimizer, held),
            )
            random = _random_state(engine.device)
            return {"groups": groups, "values": values, "random": random, "digests": digests(data)}

        data = attributes(engine.optimizer)
        ranks = from_all(self.group, collect)
        first = ranks[0]["digests"]
        apart = [k for k in data if any(rank["digests"].get(k) != first.get(k) for rank in ranks)]
        state = {
            "groups": merged_groups(rank["groups"] for rank in ranks),
            "values": {name: found for rank in ranks for name, found in rank["values"].items()},
            "random": [rank["random"] for rank in ranks],
            "loss_scale": (engine.loss_scale.scale, engine.loss_scale.good_steps)
            if engine.loss_scale.dynamic
            else None,
            "attributes": {name: value for name, value in data.items() if name not in apart},
            "extra": extras,
            "averages": None if engine.averages is None else engine.averages.updates,
        }
        if apart:
            say(
                f"{type(engine.optimizer).__name__}.{apart[0]} differs between ranks, and the checkpoint leaves it out: what a step "
                "needs again belongs into the state of parameters"
            )
        packed: list[bytes] = []
        from_first(self.group, lambda: packed.append(_packed(state)))
        return b"".join(packed)

    def _header(self) -> dict[str, Any]:
        engine = self.engine
        return {
            "format_version": CHECKPOINT_VERSION,
            "steps": engine.steps,
            "seed": engine.seed,
            "model_name": engine.plan.model_name,
            "model_hash": engine.plan.model_hash,
            "optimizer": type(engine.optimizer).__name__,
            "saved_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "plan": json.loads(engine.plan.to_json()),
        }

    def _write(
        self,
        directory: Path,
        tensors: dict[str, Pieces],
        state: bytes,
        header: dict[str, Any],
        keep: int | None,
    ) -> Path:
        with lost_ranks("while saving"):
            final = from_first(self.group, lambda: begin(directory, header["steps"]))
            try:
                with disk_errors(f"cannot save {final}"):
                    write_pieces(partial_of(final), tensors, self.group)
                checksums = from_all(self.group, lambda: own_checksums(final, _rank()))
                from_first(
                    self.group,
                    lambda: finish(
                        final, state, header, {k: v for rank in checksums for k, v in rank.items()}
                    ),
                )
            except AutoparError as error:
                from_first(self.group, lambda: discard(final))
                raise AutoparError(
                    f"{error}; the files written so far are removed, and earlier checkpoints are as before"
                ) from error
            except BaseException:  # no rank answers any more: an interrupt, a lost rank
                if _rank() == 0:
                    discard(final)
                raise
            from_first(self.group, lambda: forget(directory, keep))
        return final

    # -------------------------------------------------------------------------------------------------------------------- load

    def load(self, directory: Path, extra: Extra, optimizer: bool, missing_ok: bool) -> int:
        """Load a checkpoint; the arguments are those of `Engine.load`. Returns its number of steps;
        0 if there is none and `missing_ok` is True.
        """
        _check_named(extra)
        self.wait()
        with lost_ranks("while loading"):
            found = from_first(self.group, lambda: newest(directory, missing_ok))
            if found is None:
                return 0
            self._load(found, extra, optimizer)
        return self.engine.steps

    def _load(self, found: Found, extra: Extra, optimizer: bool) -> None:
        """Load the complete checkpoint `found` into the engine and the objects `extra`. Every rank
        first checks content, names, shapes and options; an error in these is raised on all ranks
        before anything is loaded. If reading fails later, tensors may be partly loaded.
        `optimizer`: whether to load the optimizer's state.
        """
        engine, held = self.engine, self.engine.held()
        saved: dict[str, tuple[int, ...]] = {}
        state: dict[str, Any] = {}
        tensors = self._averages()
        options: list[dict[str, Any]] = []

        def prepare() -> None:
            saved.update(saved_shapes(found.path))
            state.update(_saved_state(found.path))
            _check_model(engine.saved_shapes(), _names(saved, "model"), found)
            _check_extra(extra, state["extra"], found)
            _check_averages(tensors, saved, found)
            if optimizer:
                options.extend(
                    matching_options(group_options(engine.optimizer, held), state["groups"])
                )
                keys = _state_tensors(found.path)
                room = room_for(engine.optimizer, held, keys, state["values"])
                tensors.update(
                    {
                        _optimizer(n, key): p
                        for n, found in room.items()
                        for key, p in found.items()
                        if key in keys.get(n, ())
                    }
                )
            # a step that makes room for state may give parameters new memory (SAM)
            tensors.update((_model(name), part.pieces()) for name, part in held.items())

        from_all(
            self.group,
            lambda: check_content(
                found, _rank(), dist.get_world_size() if self.group is not None else 1
            ),
        )
        from_all(self.group, prepare)
        with disk_errors(
            f"cannot read {found.path}; the engine's tensors are now partly those of the checkpoint: load another one"
        ):
            read_pieces(found.path, tensors, self.group)
        if optimizer:
            set_options(engine.optimizer, options)
            set_values(engine.optimizer, held, state["values"])
            set_attributes(engine.optimizer, state.get("attributes", {}))
        engine.parameters.publish()
        if engine.loss_scale.dynamic and state["loss_scale"] is not None:
            engine.loss_scale.scale, engine.loss_scale.good_steps = state["loss_scale"]
        engine.steps, engine.seed = found.header["steps"], found.header["seed"]
        if engine.averages is not None:
            engine.averages.updates = state["averages"]
        elif _names(saved, "average"):
            say(
                "the checkpoint has averages of the weights, which are left out: engine.average(...) before engine.load takes them"
            )
        engine.check_numbers()
        if _rank() < len(state["random"]):
            _set_random_state(engine.device, state["random"][_rank()])
        for name, value in extra.items():
            value.load_state_dict(state["extra"][name])


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _model(name: str) -> str:
    return f"model/{name}"


def _average(name: str) -> str:
    return f"average/{name}"


def _optimizer(name: str, key: str) -> str:
    return f"optimizer/{name}/{key}"


def _names(saved: dict[str, tuple[int, ...]], kind: str) -> dict[str, tuple[int, ...]]:
    return {
        name.removeprefix(f"{kind}/"): shape
        for name, shape in saved.items()
        if name.startswith(f"{kind}/")
    }


def _state_tensors(path: Path) -> dict[str, dict[str, Tensor]]:
    """For each parameter, its optimizer state tensors in a checkpoint by key, on the meta device."""
    found: dict[str, dict[str, Tensor]] = {}
    with disk_errors(f"cannot read {path / '.metadata'}"):
        entries = saved_tensors(dcp.FileSystemReader(path).read_metadata())
    for entry, stored in entries.items():
        if entry.startswith("optimizer/"):
            name, _, key = entry.removeprefix("optimizer/").rpartition("/")
            dtype = stored.properties.dtype
            found.setdefault(name, {})[key] = torch.empty(stored.size, dtype=dtype, device="meta")
    return found


# ------------------------------------------------------------------------------------------------------------- what is in it


def saved_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The whole shapes of the tensors in the checkpoint at `path`, by their names there. Raises
    AutoparError if it cannot be read.
    """
    with disk_errors(f"cannot read {path / '.metadata'}"):
        entries = saved_tensors(dcp.FileSystemReader(path).read_metadata())
        return {name: tuple(entry.size) for name, entry in entries.items()}


def _saved_state(path: Path) -> dict[str, Any]:
    with disk_errors(f"cannot read {path / STATE}"):
        return torch.load(path / STATE, weights_only=True)


def _check_model(
    mine: Mapping[str, tuple[int, ...]], saved: Mapping[str, tuple[int, ...]], found: Found
) -> None:
    wrong = [
        f"{name} is {saved[name]} there and {shape} here"
        for name, shape in mine.items()
        if saved.get(name, shape) != shape
    ]
    absent, unknown = [n for n in mine if n not in saved], [n for n in saved if n not in mine]
    wrong += [f"it lacks {_some(absent)}"] if absent else []
    wrong += [f"it also has {_some(unknown)}"] if unknown else []
    if wrong:
        raise AutoparError(
            f"{found.path} is a checkpoint of another model ({found.header['model_name']}, structure {found.header['model_hash'][:12]}): "
            + "; ".join(wrong[:3])
            + (f"; and {len(wrong) - 3} more differences" if len(wrong) > 3 else "")
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _check_extra(extra: Extra, saved: dict[str, Any], found: Found) -> None:
    for name, value in extra.items():
        _stateful(name, value)
        if name not in saved:
            raise AutoparError(
                f"{found.path} has no extra {shown(name)}; it has {', '.join(saved) or 'none'}"
            )


def _check_averages(
    tensors: Mapping[str, Pieces], saved: Mapping[str, tuple[int, ...]], found: Found
) -> None:
    lost = [name for name in tensors if name.startswith("average/") and name not in saved]
    if lost:
        raise AutoparError(
            f"{found.path} has no averages of {_names(dict.fromkeys(lost, ()), 'average').popitem()[0]}, which this engine keeps: load it "
            "before engine.average(...), which then begins with the loaded weights"
        )


def _check_named(extra: Any) -> None:
    if not isinstance(extra, Mapping) or not all(isinstance(name, str) for name in extra):
        raise AutoparError(
            f"extra is {shown(extra)}, not a mapping from names to objects, such as {{'scheduler': scheduler}}"
        )


def _stateful(name: str, value: Any) -> Any:
    if not hasattr(value, "state_dict") or not hasattr(value, "load_state_dict"):
        raise AutoparError(
            f"extra {shown(name)} is a {type(value).__name__}, without state_dict() and load_state_dict()"
        )
    return value


def _packed(state: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    try:
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as error:
        raise AutoparError(
            "extra and optimizer state may hold numbers, text, lists, dicts and tensors, so that loading a checkpoint runs no code: "
            f"{str(error).splitlines()[0][:200]}"
        ) from error
    return buffer.getvalue()


def _random_state(device: torch.device) -> dict[str, Any]:
    state = {"cpu": torch.get_rng_state(), "python": random.getstate()}
    return state | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def _set_random_state(device: torch.device, state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    random.setstate(state["python"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
