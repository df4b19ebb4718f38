"""Splits a batch into the micro-batches of this rank, with checks across all ranks, and computes
step values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from autopar_cost_models import check_schedule

from autopar.errors import AutoparError
from autopar.ir.plan import Plan
from autopar.ir.traced import ONE_VALUE, TracedModel, not_split
from autopar.models.rows import in_groups, rows_first
from autopar.ops.dims import has_batch
from autopar.ops.random import draws
from autopar.ops.values import ops
from autopar.ops.work import positions
from autopar.rewrite.collectives.axes import AxisGroup
from autopar.rewrite.lowerings.dropout import step_noise
from autopar.rewrite.program import Program
from autopar.runtime.batches.batch_checks import IndexLimits, check_names, check_shapes
from autopar.runtime.batches.deal import Deal, deal, even_deal, rows_of_rank
from autopar.runtime.batches.gathered_rows import gather_rows, gather_uneven_rows
from autopar.runtime.batches.meeting import CALL, NO_CALL, CallRecord, Meeting
from autopar.runtime.batches.padding import Padding
from autopar.runtime.batches.step_values import StepInputs
from autopar.runtime.ranks.agreement import from_all, raise_on_all
from autopar.runtime.ranks.common_options import checksum, raise_difference
from autopar.runtime.ranks.process_groups import call_group
from autopar.runtime.state.precision import PRECISION_DTYPES, master_dtype
from autopar.trace.batches import batch_entries, batch_tensors
from autopar.trace.nested import check_plain, rebuilt

_SHARING = ("pp", "cp", "tp")
"""Axes whose ranks receive the same rows."""


@dataclass(frozen=True, slots=True)
class BatchSize:
    """The size of a step's batch over all data-parallel ranks.

    Attributes:
        tokens: positions of all rows, before padding.
        targets: labels that count in the loss, or the sum of its mask; None if the loss is not a
            mean over tokens.
        share: model FLOPs of the batch after padding, relative to the planned batch.
        longest: positions of a row before padding, on the rank with the longest rows.
    """

    tokens: int
    targets: float | None
    share: float
    longest: int = 0


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """The micro-batches of one step on this rank.

    Attributes:
        inputs: for each micro-batch, the graph's inputs by name, including values of the step.
        rows: rows of one micro-batch on this rank.
        scales: for each micro-batch, the factor of its loss in the sum.
        places: for each micro-batch, where its rows are in the global batch: (first, distance) as
            `Deal.place` gives them.
        size: the size of the batch over all ranks.
        number: the index of the program that runs it, among programs for several batch lengths.
        filled: `inputs` with another padding token, if a rank padded its batch; else empty.
    """

    inputs: list[dict[str, torch.Tensor]]
    rows: int
    scales: tuple[float, ...]
    places: tuple[tuple[int, int], ...]
    size: BatchSize = BatchSize(0, None, 0.0)
    number: int = 0
    filled: tuple[dict[str, torch.Tensor], ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Read:
    """What one rank read of its batch: tensors by input name as `given`, and as `tensors`, padded
    to the length of the program with index `number`. `rows` is -1 if the batch does not fit the
    model. `length` is the number of positions before padding. `checksum` is 0 unless other ranks
    must read the same rows.
    """

    given: Mapping[str, torch.Tensor] = field(default_factory=dict)
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    rows: int = -1
    checksum: float = 0.0
    number: int = 0
    length: int

    @property
    def told(self) -> list[float]:
        """[rows, checksum, program index, length, checksum of dtypes], which this rank sends to the
        others.
        """
        dtypes = checksum(sorted(self.dtypes.items())) if self.dtypes else 0
        return [self.rows, self.checksum, self.number, self.length, dtypes]

    @property
    def dtypes(self) -> dict[str, str]:
        """The dtypes of floating-point tensors, by what they are."""
        return {
            f"dtype of batch entry {name!r}": str(tensor.dtype)
            for name, tensor in self.given.items()
            if tensor.is_floating_point()
        }


class BatchSplitter:
    """Splits this rank's batches into micro-batches for `program`, which is made from the model
    `traced`.

    `tensors()` returns whole buffers and constants by name, for step values (numbers that need the
    whole batch); every rank must call it. `programs`: if batches may be padded, programs that
    differ only in the length of their batches, shortest first, `program` last. `flops` are model
    FLOPs of the planned batch at each of these lengths. `indices` is set later to the index checks
    of each program.
    """

    def __init__(
        self,
        program: Program,
        plan: Plan,
        axes: Mapping[str, AxisGroup],
        device: torch.device,
        traced: TracedModel,
        tensors: Callable[[], Mapping[str, torch.Tensor]],
        programs: Sequence[Program] = (),
        flops: Sequence[float] = (),
    ) -> None:
        self.program, self.plan, self.axes, self.device, self.loss_split = (
            program,
            plan,
            axes,
            device,
            traced.split,
        )
        self._tensors, self._row_dims, self._updates = (
            tensors,
            traced.row_dims,
            bool(traced.updates),
        )
        self._together, self._plain = traced.together, traced.plain
        self._draws = any(draws(node) for block in traced.classes for node in ops(block.graph))
        self.dtype = PRECISION_DTYPES[plan.precision]
        self.positions = positions(program.whole_inputs.values(), traced.together)
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
        self.meeting = Meeting(axes, plan.mesh.dp, device)

    @property
    def data_rank(self) -> int:
        """The index of this rank's share of a global batch, among all data-parallel ranks: ep is
        their inner axis.
        """
        return self.axes["dp"].index * self.axes["ep"].size + self.axes["ep"].index

    def local(self, batch: Any) -> Any:
        """This data-parallel rank's rows of a global batch: a mapping if `batch` is one, otherwise
        a tuple. Tensors without rows stay whole. If ranks do not divide the batch, the first ones
        get one row more. Raises AutoparError if a tensor lacks its dim of rows.
        """
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
                first, rows = rows_of_rank(tensor.shape[dim] // self._together, dp, index)
                tensor = tensor.narrow(dim, first * self._together, rows * self._together)
            cut[name] = tensor
        return rebuilt((batch,) if isinstance(batch, torch.Tensor) else batch, cut)

    def meet(self, call: CallRecord) -> None:
        """Wait for all ranks to call the method `call`. Raises AutoparError on every rank if they
        call different ones.
        """
        nothing = torch.zeros(self._numbers, dtype=torch.float64, device=self.device)
        self.meeting.told_by_all(call, _Read(length=self.positions).told, nothing)

    def split(
        self,
        batch: Any,
        trains: bool = False,
        call: CallRecord = NO_CALL,
        refused: AutoparError | None = None,
    ) -> MicroBatches:
        """Check this rank's `batch` across all ranks, and split it into micro-batches. Every rank
        must call it, with the same `call`; an error on any rank raises AutoparError on every rank.
        `trains`: it is a training step, in which no row may run twice if forward changes buffers.
        `refused`: an error of this rank, of which the others are to hear too.
        """
        whole = self._tensors()
        read, mistake = _Read(length=self.positions), refused
        parts = torch.zeros(self._numbers, dtype=torch.float64, device=self.device)
        try:
            if refused is None:
                read = self._read(batch)
            if read.rows > 0 and (step_inputs := self._values[read.number]) is not None:
                parts = step_inputs.parts(read.tensors, read.rows, whole, self.device)
        except AutoparError as error:  # without this message the other ranks would wait
            mistake, read = error, replace(read, rows=-1)
        everyone = self.meeting.told_by_all(call, read.told, parts)
        seen = everyone[..., CALL : -len(parts) or None].tolist()
        if any(told[0] < 0 for sharing in seen for told in sharing):
            raise_on_all(mistake)
        if len({told[4] for sharing in seen for told in sharing}) > 1:
            ranks = from_all(call_group(), lambda: read.dtypes)
            raise_difference(ranks, "Give each rank its rows in the same dtype")
        held, numbers, lengths = self._agreed(seen)
        dealt, tensors = self._dealt(held, trains), read.tensors
        chosen = max(numbers)  # every rank runs the program that the longest batch needs
        if chosen != read.number:
            tensors = self._checked(self._filled_up(read.given, chosen), chosen)
        added = everyone[:, 0, everyone.shape[-1] - len(parts) :].sum(0)
        tensors = self._with_rows(tensors, held, dealt)
        values = self._step_values(tensors, added, chosen, dealt, whole)

        def cut(tensors: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
            return self._cut({**tensors, **values}, dealt)

        filled = []
        if self.paddings and min(lengths) < self.paddings[chosen].length:
            other = self._checked(self._filled_up(read.given, chosen, token=1), chosen)
            filled = cut(self._with_rows(other, held, dealt))
        share = dealt.batch / self.plan.global_batch * self.flops[chosen] / self.flops[-1]
        tokens = sum(rows * length for rows, length in zip(held, lengths, strict=True))
        return MicroBatches(
            inputs=cut(tensors),
            rows=dealt.rows,
            scales=self._scales(dealt),
            places=tuple(dealt.place(part, self.data_rank) for part in dealt.parts),
            size=BatchSize(tokens, self._counted(values), share, max(lengths)),
            number=chosen,
            filled=tuple(filled),
        )

    def _read(self, batch: Any) -> _Read:
        """This rank's batch, padded to the length of the shortest program that fits it. Raises
        AutoparError if its shapes, dtypes or index values do not fit the model.
        """
        entries, plain = batch_entries(batch)
        check_names(entries, self.program.whole_inputs, plain, self._plain)
        check_plain(plain, self._plain)
        given = rows_first(entries, self._row_dims)
        without = [name for name in given if not self._has_batch(name)]
        given = in_groups(given, self._together, without)
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
        """(rows, program indices, positions): three lists with an entry for each data-parallel
        rank. `seen[data rank][sharing rank]` is what each rank told (`_Read.told`). Raises
        AutoparError if ranks that should read the same rows differ.
        """
        # as text, since no nan is equal to itself
        if any(str(found) != str(sharing[0]) for sharing in seen for found in sharing):
            names = [axis for axis in _SHARING if self.axes[axis].size > 1]
            raise AutoparError(
                f"the {len(seen[0])} ranks that share one data-parallel coordinate (over {' and '.join(names)}) were "
                f"given different batches. They must load the same rows: use engine.local_batch, or a sampler over dp={self.plan.mesh.dp}, "
                "not over the world"
            )
        held, numbers, lengths = (
            [int(sharing[0][place]) for sharing in seen] for place in (0, 2, 3)
        )
        return held, numbers, lengths

    def _dealt(self, held: list[int], trains: bool) -> Deal:
        """The deal: which rows each rank runs, if data-parallel rank r holds `held[r]` rows.
        `trains` as in `split`.

        Raises:
            AutoparError: the batch is empty, or the loss or a buffer does not allow such micro-
                batches.
        """
        batch, ranks, rows = sum(held), len(held), held[0]
        if batch == 0:
            raise AutoparError("the batch has no rows")
        if trains and batch < self.loss_split.least_rows:
            raise AutoparError(f"{ONE_VALUE}; leave the batch out, or use a larger one")
        size = min(self.plan.micro_batch, rows) or 1
        splits, alike = bool(self.loss_split.joins), len(set(held)) == 1
        if alike and rows % size == 0 and (not splits or self._fits(rows // size)):
            if rows > size and not splits and not self.plan.micro_batch_mean:
                what = f"this batch of {rows} rows a rank into {rows // size} micro-batches"
                raise AutoparError(not_split(self.loss_split, what, rows))
            return even_deal(batch, ranks, size)
        found = deal(
            batch,
            ranks,
            self.plan.micro_batch,
            self._fits,
            once=trains and self._updates,
            consecutive=self._draws,
        )
        if not splits or found is None:
            why = f"the loss is no sum over rows: {self.loss_split.reason}"
            if splits:
                why = "forward changes buffers, as batch norm does, so that no row may run twice"
            raise AutoparError(
                f"data-parallel ranks hold {held} rows, which micro-batches of {size} rows on each do not divide, and {why}; "
                f"give each rank a multiple of {size} rows (drop_last=True of a DataLoader)"
            )
        return found

    def _fits(self, number: int) -> bool:
        """Whether the plan's pipeline can run this number of micro-batches. True without a
        pipeline.
        """
        if not self.plan.schedule or self.axes["pp"].size == 1:
            return True
        try:
            check_schedule(
                self.plan.schedule, self.axes["pp"].size, len(self.program.stages), number
            )
        except ValueError:
            return False
        return True

    def _with_rows(
        self, tensors: Mapping[str, torch.Tensor], held: list[int], dealt: Deal
    ) -> Mapping[str, torch.Tensor]:
        """The batch with the rows that the deal's row numbers refer to: `tensors` itself if each
        rank runs its own share, otherwise the rows of all data-parallel ranks, gathered. Rank r
        holds `held[r]` rows.
        """
        if dealt.evenly:
            return tensors
        return {
            name: gather_uneven_rows(tensor, held, self.axes) if self._has_batch(name) else tensor
            for name, tensor in tensors.items()
        }

    def _scales(self, dealt: Deal) -> tuple[float, ...]:
        """For each micro-batch, the factor of its loss in the sum over micro-batches."""
        each = 1.0 if self.loss_split.joins == "sum" else dealt.slots / dealt.batch
        return tuple(each * part.weight for part in dealt.parts)

    @property
    def _numbers(self) -> int:
        """The number of elements that each rank sends so that step values (numbers that need the
        whole batch) can be computed; 0 if no program takes any. It is the same for all lengths.
        """
        return max(0 if values is None else values.numbers for values in self._values)

    def _step_values(
        self,
        tensors: Mapping[str, torch.Tensor],
        parts: torch.Tensor,
        number: int,
        dealt: Deal,
        whole: Mapping[str, torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        """By name, the step values (numbers that need the whole batch) for program `number`; {} if
        it takes none. `parts` is the sum of all ranks' parts; `whole` has buffers and constants by
        name. Values that have rows have those of `tensors`.
        """
        values = self._values[number]
        if values is None:
            return {}
        inputs = dict(tensors)
        if dealt.evenly:
            others = {name: tensor for name, tensor in tensors.items() if not self._has_batch(name)}
            inputs = others | {
                name: gather_rows(tensors[name], self.axes) for name in values.values.rows
            }
        found = values.whole(parts, inputs, dealt.batch, whole, self.device)
        if values.values.takes_share:
            share = dealt.slots / dealt.batch
            found.append(torch.tensor(share, dtype=values.dtype, device=self.device))
        share = dealt.batch // dealt.ranks
        own = slice(self.data_rank * share, (self.data_rank + 1) * share)
        return {
            name: value[own] if has_batch(val) and dealt.evenly else value
            for name, val, value in zip(values.values.names, values.values.vals, found, strict=True)
        }

    def _cut(
        self, graph_inputs: Mapping[str, torch.Tensor], dealt: Deal
    ) -> list[dict[str, torch.Tensor]]:
        """For each micro-batch, the graph's inputs by name: this rank's rows of them. Inputs
        without rows are whole in each.
        """
        found = []
        for part in dealt.parts:
            rows: Any = slice(part.first, part.first + dealt.rows)
            if not dealt.evenly:
                rows = torch.tensor(dealt.held(part, self.data_rank), device=self.device)
            found.append(
                {
                    name: t[rows] if has_batch(self.program.graph_inputs.get(name)) else t
                    for name, t in graph_inputs.items()
                }
            )
        return found

    def _counted(self, values: Mapping[str, torch.Tensor]) -> float | None:
        """The number of labels that count in the step's loss, from the step values by name. None if
        no cross-entropy averages over them.
        """
        own = self.program.step_values
        if own is None or own.labels < 0:
            return None
        return _whole(float(values[own.names[own.labels]]))

    def _fitting(self, given: Mapping[str, torch.Tensor]) -> tuple[int, int]:
        """(index of the shortest program that a batch fits, positions of the batch). If none is
        long enough, the last index, whose check raises the error. Without padding, or with other
        input names, (0, planned positions).
        """
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

    def noise(self, work: MicroBatches, index: int, seed: int, step: int) -> torch.Tensor:
        """The tensor from which dropout draws the masks of micro-batch `index`: it has the seed,
        the step, and where the rows are in the global batch.
        """
        return step_noise(seed, step, *work.places[index])

    def _has_batch(self, name: str) -> bool:
        return has_batch(self.program.whole_inputs.get(name))

    def _checked(self, tensors: Mapping[str, torch.Tensor], number: int) -> dict[str, torch.Tensor]:
        """The batch's tensors on this device, floats in the plan's dtype, in the order of the
        model's inputs. Raises AutoparError if they do not fit the program with index `number`.
        """
        expected = self.programs[number].whole_inputs
        check_shapes(tensors, expected)
        return {
            name: tensors[name].to(
                self.device, self.dtype if tensors[name].is_floating_point() else None
            )
            for name in expected
        }


def _whole(count: float | None) -> float | None:
    """The count as an int if it is a whole number, otherwise unchanged; None stays None."""
    return int(count) if count is not None and count.is_integer() else count


def _checksum(tensors: Iterable[torch.Tensor]) -> float:
    """A weighted sum of all elements: batches with other elements or another order almost always
    differ in it. Of floats, NaN counts as 0.5, and large values as 1e6. 0 without tensors.
    """
    total: float | torch.Tensor = 0.0
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
