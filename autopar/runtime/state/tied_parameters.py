"""Parameters of a pipeline: which this rank holds, and what ranks that hold one tensor owe each other."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
import torch.distributed as dist

from autopar.ir.traced import ParameterSpec
from autopar.rewrite.collectives.axes import AxisGroup
from autopar.rewrite.collectives.primitives import apply_primitive
from autopar.rewrite.program import Program
from autopar.runtime.ranks.process_groups import pp_subgroup
from autopar.runtime.state.parameters import Parameters


class StageParameters:
    """`pp` is this rank's group along pp, `group` its process group (None without a pipeline)."""

    def __init__(self, program: Program, pp: AxisGroup, group: dist.ProcessGroup | None) -> None:
        self.holders, self.pp, self.group = program.holders, pp, group
        # one order on all ranks
        shared = sorted({held for held in self.holders.values() if len(held) > 1})
        groups = {held: pp_subgroup(program.mesh, program.rank, held, pp) for held in shared}
        self._groups = {held: group for held, group in groups.items() if group is not None}

    def holds(self, name: str) -> bool:
        """Whether this rank of the pipeline holds a parameter."""
        return self.pp.index in self.holders[name]

    def counts(self, name: str) -> bool:
        """Whether this rank counts a parameter: of those that hold one, the first does."""
        return self.pp.index == self.holders[name][0]

    def add_up_tied(self, parameters: Parameters) -> None:
        """Add up the gradients of a parameter that several stages read, on each rank that holds it.  Once a step, before anything else."""
        for held, group in self._groups.items():
            for name in parameters.trained:
                if self.holders[name] == held:
                    parameters.gradients.change(
                        name, partial(apply_primitive, "all_reduce", group=group)
                    )

    def over_stages(self, value: torch.Tensor) -> torch.Tensor:
        """The sum of a value over pp."""
        return apply_primitive("all_reduce", value, self.pp, None, None)

    def everywhere(
        self, state: dict[str, torch.Tensor], specs: Mapping[str, ParameterSpec]
    ) -> dict[str, torch.Tensor]:
        """What each rank holds of whole tensors by name -> all of them, on every rank, in the order of `specs`."""
        if self.group is None:
            return state
        dtypes: list[dict[str, torch.dtype]] = [{} for _ in range(self.pp.size)]
        dist.all_gather_object(
            dtypes, {name: tensor.dtype for name, tensor in state.items()}, group=self.group
        )
        device = next((tensor.device for tensor in state.values()), torch.device("cpu"))
        found = {}
        for name, spec in specs.items():
            owner = self.holders[name][0]
            mine = state[name].contiguous() if owner == self.pp.index else None
            found[name] = (
                mine
                if mine is not None
                else torch.empty(spec.shape, dtype=dtypes[owner][name], device=device)
            )
            dist.broadcast(found[name], group=self.group, group_src=owner)
        return found
