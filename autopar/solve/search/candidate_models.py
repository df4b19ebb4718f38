"""A candidate annotated for each recompute mode and each ZeRO stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from autopar.ir.annotated import AnnotatedModel
from autopar.solve.bounds.zero_variants import least_of, undominated_variants
from autopar.solve.costs.recompute_mix import Models, hides

ModelOf = Callable[[str], AnnotatedModel]
"""A function from a recompute mode to the candidate annotated for it."""


@dataclass(frozen=True)
class CandidateModels:
    """The annotated models of a candidate, each made on first use.

    `variants_of` has one function for each ZeRO stage, from a recompute mode to a model. `modes`
    are the allowed recompute modes, the one that keeps most first.
    """

    variants_of: tuple[ModelOf, ...]
    modes: tuple[str, ...]

    def least_of(self, mode: str) -> AnnotatedModel:
        """The model in recompute mode `mode`, with the minimum of each cost over all ZeRO
        stages.
        """
        return least_of([model_of(mode) for model_of in self.variants_of])

    @cached_property
    def least(self) -> Models:
        """For each recompute mode, the model of `least_of`."""
        return {mode: self.least_of(mode) for mode in self.modes}

    @property
    def first(self) -> AnnotatedModel:
        """The model of `least_of` in the recompute mode that keeps most."""
        return self.least[self.modes[0]]

    @cached_property
    def variants(self) -> dict[int, Models]:
        """For each ZeRO stage that no other one dominates, by its index: its models by recompute
        mode.
        """
        found = [{mode: model_of(mode) for mode in self.modes} for model_of in self.variants_of]
        return {number: found[number] for number in undominated_variants(found)}

    @cached_property
    def hiding(self) -> dict[int, bool]:
        """For each ZeRO stage of `variants`, by index: whether recomputation can hide communication
        of parameters (`recompute_mix.hides`).
        """
        return {number: hides(models) for number, models in self.variants.items()}

    @cached_property
    def has_one_placement(self) -> bool:
        """Whether every op has only one strategy."""
        return all(len(op.strategies) == 1 for block in self.first.classes for op in block.ops)
