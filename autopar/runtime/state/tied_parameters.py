"""Parameters in a pipeline: which ones this rank holds, and sums over the ranks that hold the same
tensor.
"""

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
    """The parameters of this rank's pipeline stages. `pp` is this rank's group along pp; `group` is
    its process group (None without a pipeline).
    """

    def __init__(self, program: Program, pp: AxisGroup, group: dist.ProcessGroup | None) -> None:
        self.holders, self.pp, self.group = program.holders, pp, group
        # one order on all ranks
        shared = sorted({held for held in self.holders.values() if len(held) > 1})
        groups = {held: pp_subgroup(program.mesh, program.rank, held, pp) for held in shared}
        self._groups = {held: group for held, group in groups.items() if group is not None}

    def holds(self, name: str) -> bool:
        """Whether this pipeline rank holds a parameter: one of its stages reads it."""
        return self.pp.index in self.holders[name]

    def counts(self, name: str) -> bool:
        """Whether this rank counts a parameter in sums over all parameters. Only the first holder
        does.
        """
        return self.pp.index == self.holders[name][0]

    def add_up_tied(self, parameters: Parameters) -> None:
        """Replace the gradient of each parameter that stages of several ranks read by its sum over
        these ranks. Must be called once a step, before other reductions.
        """
        for held, group in self._groups.items():
            for name in parameters.trained:
                if self.holders[name] == held:
                    parameters.gradients.change(
                        name, partial(apply_primitive, "all_reduce", group=group)
                    )

    def over_stages(self, value: torch.Tensor) -> torch.Tensor:
        """The sum of a value over the ranks of the pipeline, on each of them."""
        return apply_primitive("all_reduce", value, self.pp, None, None)

    def everywhere(
        self, state: dict[str, torch.Tensor], specs: Mapping[str, ParameterSpec]
    ) -> dict[str, torch.Tensor]:
        """By name, the whole tensors of all stages, on every pipeline rank, in the order of
        `specs`. `state` has those of this rank. Without a pipeline, `state` itself.
        """
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
