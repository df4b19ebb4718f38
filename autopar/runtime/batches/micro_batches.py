"""From a batch to the micro-batches of this rank: checks that every rank hears of, rows, and values of the whole step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch

from autopar.errors import AutoparError
from autopar.ir.mesh import AXES
from autopar.ir.plan import Plan
from autopar.ir.traced import LossSplit, not_split
from autopar.models.rows import rows_first
from autopar.ops.dims import has_batch, is_symbolic
from autopar.ops.work import positions
from autopar.rewrite.collectives.axes import AxisGroup
from autopar.rewrite.collectives.patterns import Split
from autopar.rewrite.collectives.primitives import apply_primitive
from autopar.rewrite.lowerings.dropout import step_noise
from autopar.rewrite.program import Program
from autopar.runtime.batches.batch_checks import IndexLimits
from autopar.runtime.batches.padding import Padding
from autopar.runtime.batches.step_values import StepInputs
from autopar.runtime.state.precision import PRECISIONS, master_dtype
from autopar.trace.batches import batch_tensors

_SHARING = ("pp", "cp", "tp")
"""Axes whose ranks are given the same rows."""


@dataclass(frozen=True, slots=True)
class BatchSize:
    """How much the batch of all ranks is: its positions, how many of them are valid targets (None if the loss is no mean over tokens),
    its model FLOPs as a share of the planned batch's, and the positions of its longest row."""

    tokens: int
    targets: float | None
    share: float
    longest: int = 0


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """A step's work on this rank: what the graph takes for each micro-batch by name, inputs and values of the step.  `rows` are those of
    one micro-batch.  `number`: that of the program that runs it; `filled`: if any rank filled its batch up, the same inputs with other
    tokens there."""

    inputs: list[dict[str, torch.Tensor]]
    rows: int
    size: BatchSize = BatchSize(0, None, 0.0)
    number: int = 0
    filled: tuple[dict[str, torch.Tensor], ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Read:
    """What one rank was given, by name; `tensors` are filled up to the length of the program with `number`, `length` its own positions."""

    given: Mapping[str, torch.Tensor] = field(default_factory=dict)
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    rows: int = -1
    checksum: float = 0.0
    number: int = 0
    length: int

    @property
    def told(self) -> list[float]:
        """What the other ranks hear of it."""
        return [self.rows, self.checksum, self.number, self.length]


class BatchSplitter:
    """Splits batches for one program.  `split`: how losses of micro-batches go together.  `row_dims`: the dims of rows in a user's tensors
    that are not dim 0.  `tensors()`: whole buffers and constants by name, for the values of a step; every rank calls it.

    `programs`: if batches may be filled up, programs that differ in the length of their batches alone, shortest first, `program` last;
    `flops` are model FLOPs of a row of each.
    """

    def __init__(
        self,
        program: Program,
        plan: Plan,
        axes: Mapping[str, AxisGroup],
        device: torch.device,
        split: LossSplit,
        row_dims: Mapping[str, int],
        tensors: Callable[[], Mapping[str, torch.Tensor]],
        programs: Sequence[Program] = (),
        flops: Sequence[float] = (),
    ) -> None:
        self.program, self.plan, self.axes, self.device, self.loss_split = (
            program,
            plan,
            axes,
            device,
            split,
        )
        self._tensors, self._row_dims = tensors, row_dims
        self.dtype = PRECISIONS[plan.precision]
        self.positions = positions(program.whole_inputs.values())
        self.programs, self.flops = tuple(programs) or (program,), tuple(flops) or (1.0,)
        self.paddings = tuple(map(Padding.of, programs))
        self._values = [
            None
            if one.step_values is None
            else StepInputs(one.step_values, master_dtype(plan.precision))
            for one in self.programs
        ]
        self._shared = any(axes[axis].size > 1 for axis in _SHARING)
        self.indices: tuple[IndexLimits, ...] = ()  # of each program

    @property
    def data_rank(self) -> int:
        """Which share of a global batch is this rank's; ep is a part of dp, and its inner one."""
        return self.axes["dp"].index * self.axes["ep"].size + self.axes["ep"].index

    def local(self, batch: Any) -> Any:
        """This data-parallel rank's rows of a global batch, in the same structure (mapping or tuple)."""
        tensors = batch_tensors(batch)
        dp = self.plan.mesh.dp
        index = self.data_rank
        cut = {}
        for name, tensor in tensors.items():
            if self._has_batch(name):
                dim = self._row_dims.get(name, 0)
                if tensor.dim() <= dim:
                    what = f"has {tensor.dim()} dims" if tensor.dim() else "is a single number"
                    raise AutoparError(
                        f"batch entry {name!r} {what}; its dim {dim} has a row for each sequence"
                    )
                if tensor.shape[dim] % dp:
                    raise AutoparError(
                        f"a global batch of {tensor.shape[dim]} rows cannot be split over dp={dp}; use a multiple of {dp}"
                    )
                rows = tensor.shape[dim] // dp
                tensor = tensor.narrow(dim, index * rows, rows)
            cut[name] = tensor
        return cut if isinstance(batch, Mapping) else tuple(cut.values())

    def split(self, batch: Any) -> MicroBatches:
        """Check this rank's batch with all ranks and cut it.  A mistake of any rank raises AutoparError on every rank."""
        whole = self._tensors()
        read, mistake = _Read(length=self.positions), None
        parts = torch.zeros(self._numbers, dtype=torch.float64, device=self.device)
        try:
            read = self._read(batch)
            if read.rows and (step_inputs := self._values[read.number]) is not None:
                parts = step_inputs.parts(read.tensors, read.rows, whole, self.device)
        except AutoparError as error:  # the other ranks must hear of it, or they would wait
            mistake, read = error, replace(read, rows=-1)
        # (data-parallel rank, rank that shares its batch): what was read, parts of the step's values
        own = torch.tensor(read.told, dtype=torch.float64, device=self.device)
        everyone = self._gather_over_all(torch.cat([own, parts]))
        if mistake is not None:
            raise mistake
        held, numbers, lengths = self._agreed(everyone[..., : len(own)].tolist())
        rows, size = read.rows, min(self.plan.micro_batch, read.rows) or 1
        self._check_counts(held, rows, size)
        count, tensors = rows // size, read.tensors
        chosen = max(numbers)  # every rank runs the program that the longest batch needs
        if chosen != read.number:
            tensors = self._checked(self._filled_up(read.given, chosen), chosen)
        added = everyone[:, 0, len(own) :].sum(0)
        values = self._step_values(tensors, added, chosen, count, whole)

        def cut(tensors: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
            graph_inputs = {**tensors, **values}
            return [
                {name: self._part(name, t, k, count) for name, t in graph_inputs.items()}
                for k in range(count)
            ]

        filled = []
        if self.paddings and min(lengths) < self.paddings[chosen].length:
            filled = cut(self._checked(self._filled_up(read.given, chosen, token=1), chosen))
        share = (
            rows * self.plan.mesh.dp / self.plan.global_batch * self.flops[chosen] / self.flops[-1]
        )
        found = BatchSize(rows * sum(lengths), self._counted(values), share, max(lengths))
        return MicroBatches(cut(tensors), size, found, chosen, tuple(filled))

    def _read(self, batch: Any) -> _Read:
        """What this rank was given, filled up to the length of a program.  AutoparError if it does not fit the model."""
        given = rows_first(batch_tensors(batch), self._row_dims)
        number, length = self._fitting(given)
        tensors = self._checked(self._filled_up(given, number), number)
        if self.indices:
            self.indices[number].check(tensors)
        return _Read(
            given=given,
            tensors=tensors,
            rows=next((t.shape[0] for name, t in tensors.items() if self._has_batch(name)), 1),
            checksum=_checksum(tensors.values()) if self._shared else 0.0,
            number=number,
            length=length,
        )

    def _agreed(self, seen: list[list[list[float]]]) -> tuple[list[int], list[int], list[int]]:
        """(rows, number of the program, positions) of each data-parallel rank, once those that share its batch have read the same."""
        for data_rank, sharing in enumerate(seen):
            if any(found[0] < 0 for found in sharing):
                raise AutoparError(
                    f"data-parallel rank {data_rank} was given a batch that does not fit the model; its error says why"
                )
        # as text, since no nan is equal to itself
        if any(str(found) != str(sharing[0]) for sharing in seen for found in sharing):
            names = [axis for axis in _SHARING if self.axes[axis].size > 1]
            raise AutoparError(
                f"the {len(seen[0])} ranks that share one data-parallel coordinate (over {' and '.join(names)}) were "
                f"given different batches; they must load the same rows: use engine.local_batch, or a sampler over dp={self.plan.mesh.dp}, "
                "not over the world"
            )
        held, numbers, lengths = (
            [int(sharing[0][place]) for sharing in seen] for place in (0, 2, 3)
        )
        return held, numbers, lengths

    def _check_counts(self, held: list[int], rows: int, size: int) -> None:
        """AutoparError unless every rank has the same number of rows, whole micro-batches, and the loss may be parted into these."""
        if len(set(held)) > 1:
            raise AutoparError(
                f"data-parallel ranks hold {held} rows; every rank must hold the same number"
            )
        if rows == 0:
            raise AutoparError("the batch has no rows")
        if rows % size:
            raise AutoparError(
                f"{rows} rows cannot be split into micro-batches of {size}; use a multiple of {size} rows per rank"
            )
        count = rows // size
        if count > 1 and not self.loss_split.joins and not self.plan.micro_batch_mean:
            what = f"this batch of {rows} rows a rank into {count} micro-batches"
            raise AutoparError(not_split(self.loss_split, what, rows))

    @property
    def _numbers(self) -> int:
        """How many numbers the parts of a step's values are; of programs of all lengths alike."""
        return max(0 if values is None else values.numbers for values in self._values)

    def _step_values(
        self,
        tensors: Mapping[str, torch.Tensor],
        parts: torch.Tensor,
        number: int,
        count: int,
        whole: Mapping[str, torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        """The values of the step that the graph takes, with this rank's rows of those that have rows."""
        values = self._values[number]
        if values is None:
            return {}
        others = {name: tensor for name, tensor in tensors.items() if not self._has_batch(name)}
        inputs = others | {name: self._gather_rows(tensors[name]) for name in values.values.rows}
        ranks = self.plan.mesh.dp
        rows = next((t.shape[0] for name, t in tensors.items() if self._has_batch(name)), 1)
        found = values.whole(parts, inputs, rows * ranks, whole, self.device)
        if values.values.takes_share:
            found.append(torch.tensor(1 / count, dtype=values.dtype, device=self.device))
        own = slice(self.data_rank, self.data_rank + 1)
        return {
            name: value.unflatten(0, (ranks, -1))[own].flatten(0, 1) if has_batch(val) else value
            for name, val, value in zip(values.values.names, values.values.vals, found, strict=True)
        }

    def _part(self, name: str, tensor: torch.Tensor, index: int, count: int) -> torch.Tensor:
        """The rows of one of `count` micro-batches."""
        if not has_batch(self.program.graph_inputs.get(name)):
            return tensor
        rows = tensor.shape[0] // count
        return tensor[index * rows : (index + 1) * rows]

    def _counted(self, values: Mapping[str, torch.Tensor]) -> float | None:
        """How many labels of the step count; None if no cross-entropy averages over them."""
        own = self.program.step_values
        if own is None or own.labels < 0:
            return None
        return _whole(float(values[own.names[own.labels]]))

    def _gather_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rows of all data-parallel ranks, in the order of the global batch."""
        sent = tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor
        for axis in ("ep", "dp"):  # ep is a part of dp, and its inner one
            sent = apply_primitive(
                "all_gather",
                sent,
                self.axes[axis],
                Split(0, self.axes[axis].size * sent.shape[0]),
                None,
            )
        return sent.to(tensor.dtype)

    def _fitting(self, given: Mapping[str, torch.Tensor]) -> tuple[int, int]:
        """(number of the shortest program that a batch fits into, its positions).  One that fits into none gets the last one's error."""
        if not self.paddings or set(given) != set(self.program.whole_inputs):
            return 0, self.positions
        length = self.paddings[-1].length_of(given)
        fitting = (
            number for number, padding in enumerate(self.paddings) if length <= padding.length
        )
        return next(fitting, len(self.programs) - 1), length

    def _filled_up(
        self, given: Mapping[str, torch.Tensor], number: int, token: int = 0
    ) -> Mapping[str, torch.Tensor]:
        padding = self.paddings[number] if self.paddings else None
        if (
            padding is None
            or set(given) != set(padding.dims)
            or padding.length_of(given) >= padding.length
        ):
            return given
        return padding.fill_up(given, token)

    def scale(self, work: MicroBatches) -> float:
        """What the losses of micro-batches are multiplied by before they are added up."""
        return 1.0 if self.loss_split.joins == "sum" else 1.0 / len(work.inputs)

    def noise(self, work: MicroBatches, index: int, seed: int, step: int) -> torch.Tensor:
        """What dropout needs to know of a micro-batch: seed, step, and which of this rank's rows it holds."""
        rows = work.rows if any(map(self._has_batch, work.inputs[index])) else 1
        return step_noise(seed, step, index * rows, rows * len(work.inputs))

    def _has_batch(self, name: str) -> bool:
        return has_batch(self.program.whole_inputs.get(name))

    def _checked(self, tensors: Mapping[str, torch.Tensor], number: int) -> dict[str, torch.Tensor]:
        """The batch's tensors on this device, in the order of the model's inputs."""
        expected = self.programs[number].whole_inputs
        if set(tensors) != set(expected):
            raise AutoparError(
                f"the batch has {', '.join(tensors)}; the model was planned for {', '.join(expected)}"
            )
        rows = {
            name: t.shape[0] for name, t in tensors.items() if self._has_batch(name) and t.dim()
        }
        for name, tensor in tensors.items():
            want = expected[name]
            if tensor.is_meta:
                raise AutoparError(f"batch entry {name!r} is on the meta device and has no values")
            sizes = ["batch" if is_symbolic(s) else int(s) for s in want.shape]
            if tensor.dim() != want.dim() or any(
                w != "batch" and w != s for w, s in zip(sizes, tensor.shape, strict=True)
            ):
                raise AutoparError(
                    f"batch entry {name!r} has shape {tuple(tensor.shape)}; the model was planned for ({', '.join(map(str, sizes))})"
                )
            if tensor.dtype != want.dtype and not (
                tensor.is_floating_point() and want.is_floating_point()
            ):
                raise AutoparError(
                    f"batch entry {name!r} has dtype {tensor.dtype}; the model was planned for {want.dtype}"
                )
        if len(set(rows.values())) > 1:
            held = ", ".join(f"{name} {number}" for name, number in rows.items())
            raise AutoparError(
                f"the batch's tensors have different numbers of rows: {held}; if one has no rows, plan with batch_dims={{its name: None}}"
            )
        return {
            name: tensors[name].to(
                self.device, self.dtype if tensors[name].is_floating_point() else None
            )
            for name in expected
        }

    def _gather_over_all(self, row: torch.Tensor) -> torch.Tensor:
        """The rows of all ranks: (data-parallel rank, rank that shares its batch, entry)."""
        rows = row.unsqueeze(0)
        for axis in reversed(AXES):
            rows = apply_primitive(
                "all_gather",
                rows,
                self.axes[axis],
                Split(0, self.axes[axis].size * rows.shape[0]),
                None,
            )
        stages = rows.view(self.axes["pp"].size, self.plan.mesh.dp, -1, row.shape[0])
        return stages.transpose(0, 1).flatten(1, 2)


def _whole(count: float | None) -> float | None:
    """A count that is a whole number as such."""
    return int(count) if count is not None and count.is_integer() else count


def _checksum(tensors: Iterable[torch.Tensor]) -> float:
    """A number that differs where batches do, in their order of elements too."""
    total = 0.0
    for k, tensor in enumerate(tensors, start=1):
        values = tensor.double().flatten()
        if tensor.is_floating_point():
            # infinities of a mask would drown the rest
            values = values.nan_to_num(0.5).clamp(-1e6, 1e6)
        total = total + (values * _weights(k, values.numel(), values.device)).sum()
    return float(total)


@lru_cache(8)
def _weights(first: int, number: int, device: torch.device) -> torch.Tensor:
    return torch.arange(first, first + number, device=device).double().sqrt()
