"""What a step computes before the first forward: step values, which depend on the whole batch
(`ir/traced.StepValues`), and the rows of embedding tables that it rescales (`max_norm`).

Each data-parallel rank computes parts from its own rows. Parts are summed over these ranks. Where a
sum is not enough, rows of a few inputs are gathered. Every rank then computes the same values, and
takes its own rows of those that have rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import Graph, Node

from autopar.errors import AutoparError
from autopar.ir.calls import op_name
from autopar.ir.traced import RowLimit, StepValues
from autopar.ops.dims import at_batch
from autopar.ops.values import output_nodes
from autopar.rewrite.collectives.patterns import Split, pick
from autopar.rewrite.collectives.primitives import apply_primitive
from autopar.runtime.state.parameters import Parameters

_LEAST = 1e-7
"""What torch.embedding_renorm_ adds to a norm before it divides by it."""


class StepInputs:
    """Computes the step values of one program: numbers that need the whole batch. Each rank
    computes parts from its rows, and the parts are summed over ranks.
    """

    def __init__(self, values: StepValues, dtype: torch.dtype) -> None:
        """`dtype` is that of step values that are single numbers, which half precision would
        round.
        """
        self.values, self.dtype = values, dtype

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shape of each part, in order. A part is a tensor that a rank computes from its rows.
        Parts are summed over ranks, so their shapes are the same on every rank.
        """
        return [tuple(node.meta["val"].shape) for node in output_nodes(self.values.local)]

    @property
    def numbers(self) -> int:
        """The number of elements of all parts together."""
        return sum(map(prod, self.shapes))

    def parts(
        self,
        inputs: Mapping[str, Tensor],
        rows: int,
        tensors: Mapping[str, Tensor],
        device: torch.device,
    ) -> Tensor:
        """The parts from this rank's `rows` rows, flattened and joined to one fp64 vector. `inputs`
        are model inputs by name, `tensors` whole buffers and constants by name.
        """
        found = evaluate_values(
            self.values.local, {"tensor": tensors, "input": inputs}, rows, device
        )
        flat = [part.to(torch.float64).reshape(-1) for part in found]
        return torch.cat(flat) if flat else torch.zeros(0, dtype=torch.float64, device=device)

    def whole(
        self,
        parts: Tensor,
        inputs: Mapping[str, Tensor],
        rows: int,
        tensors: Mapping[str, Tensor],
        device: torch.device,
    ) -> list[Tensor]:
        """The step values of a batch of `rows` rows, in the order of `values.names`, but without
        the last one if that is the share of rows (`takes_share`). `parts` is the sum of all ranks'
        parts; `inputs` have the rows of all ranks. `tensors` are whole buffers and constants by
        name.
        """
        pieces = parts.split([prod(shape) for shape in self.shapes]) if self.shapes else ()
        added = {
            f"part{k}": piece.reshape(shape)
            for k, (piece, shape) in enumerate(zip(pieces, self.shapes, strict=True))
        }
        found = evaluate_values(
            self.values.whole, {"tensor": tensors, "input": inputs, "part": added}, rows, device
        )
        return [
            self._typed(value, val) for value, val in zip(found, self.values.vals, strict=False)
        ]

    def _typed(self, value: Tensor, val: Tensor) -> Tensor:
        single = val.is_floating_point() and not val.dim()
        return value.to(self.dtype if single else val.dtype)


def evaluate_values(
    graph: Graph, given: Mapping[str, Mapping[str, Tensor]], rows: int, device: torch.device
) -> Sequence[Tensor]:
    """The results of a graph for a batch of `rows` rows, in the order of its outputs. `given` has
    the tensors by kind ("input", "tensor", "part") and then by name, since an input and a buffer
    may have the same name. Tensors that the graph creates are on `device`. Sums of floating-point
    numbers are in fp64.
    """
    found: dict = {}

    def plain(arg: Any) -> Any:
        if isinstance(arg, torch.SymInt):
            return at_batch(arg, rows)
        if isinstance(arg, torch.SymFloat):
            return float(arg.node.expr.subs(dict.fromkeys(arg.node.expr.free_symbols, rows)))
        if isinstance(arg, list | tuple):
            return type(arg)(map(plain, arg))
        return arg

    with torch.no_grad():
        for node in graph.nodes:
            if node.op == "placeholder":
                value, val = given[node.meta["of"]][node.target], node.meta["val"]
                is_integer_part = node.meta["of"] == "part" and not val.is_floating_point()
                found[node] = value.round().to(val.dtype) if is_integer_part else value
            elif node.op == "call_function":
                read = _of_one_dtype({each: found[each] for each in node.all_input_nodes})
                args = plain(torch.fx.map_arg(node.args, read.__getitem__))
                kwargs = {
                    name: plain(value)
                    for name, value in torch.fx.map_arg(node.kwargs, read.__getitem__).items()
                }
                if "device" in kwargs:
                    kwargs["device"] = device
                if op_name(node) == "aten::sum" and node.meta["val"].is_floating_point():
                    kwargs["dtype"] = torch.float64
                found[node] = node.target(*args, **kwargs)
    return [found[node] for node in output_nodes(graph)]


def _of_one_dtype(read: dict[Node, Any]) -> dict[Node, Any]:
    """The operands of an op by node. If one is fp64, all floating-point ones are converted to fp64,
    since products and writes need a single dtype.
    """
    if not any(
        isinstance(value, Tensor) and value.dtype == torch.float64 for value in read.values()
    ):
        return read
    return {
        node: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for node, value in read.items()
    }


class RowLimits:
    """The embedding tables of a model whose rows each step rescales before forward."""

    def __init__(self, limits: Sequence[RowLimit], parameters: Parameters) -> None:
        self.limits, self.parameters = limits, parameters
        self.device = parameters.holding.device

    @torch.no_grad()
    def apply(self, inputs: Sequence[Mapping[str, Tensor]], rows: int) -> None:
        """Rescale the rows that a batch reads. `inputs` are the graph's inputs of each micro-batch
        of this rank, `rows` those of one micro-batch. Every rank must call it.
        """
        for limit in self.limits:
            read = torch.zeros(limit.rows, dtype=torch.int32, device=self.device)
            for given in inputs:
                (ids,) = evaluate_values(limit.ids, {"input": given}, rows, self.device)
                read[ids.reshape(-1)] = 1
            if dist.is_initialized() and dist.get_world_size() > 1:
                dist.all_reduce(read, dist.ReduceOp.MAX)
            if limit.name in self.parameters.leaves:
                self._rescale(limit, read > 0)

    def _rescale(self, limit: RowLimit, read: Tensor) -> None:
        """Rescale this rank's part of the rows that `read` (rows,) marks, in place."""
        if limit.name in self.parameters.wholes:
            raise AutoparError(
                f"the embedding table {limit.name!r} has max_norm, and the optimizer updates it whole on one rank: train it by an "
                "optimizer that updates element by element, such as torch.optim.SGD or AdamW"
            )
        table = self.parameters.whole(limit.name)
        norms = torch.linalg.vector_norm(table, limit.norm_type, dim=1)
        for group, split in self.parameters.holding.cuttings[limit.name].splits:
            if split.dim == 0:
                read = pick(read, split, group.size, group.index)
            else:  # columns: the norm of the norms of all ranks' parts
                parts = apply_primitive("all_gather", norms[None], group, Split(0, group.size))
                norms = torch.linalg.vector_norm(parts, limit.norm_type, dim=0)
        factors = (limit.max_norm / (norms + _LEAST)).masked_fill(
            ~read | (norms <= limit.max_norm), 1.0
        )
        self.parameters.rescale(limit.name, factors[:, None].expand_as(table))
