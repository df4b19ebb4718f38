"""The tensors of a model as they are in a checkpoint's files, checked before any is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from autopar.errors import AutoparError
from autopar.ir.traced import ParameterSpec
from autopar.models.hf_weights import Recipe, recipes

from .weight_files import WeightFiles

_SHOWN = 5


class Weights:
    """A checkpoint's tensors by the names of a model.

    All names and shapes are compared with the model's, so that every rank raises the same
    AutoparError. Buffers may be missing: the model then computes them.
    """

    def __init__(
        self, path: str | Path, model: nn.Module, specs: Mapping[str, ParameterSpec]
    ) -> None:
        self._files, self._specs = WeightFiles(path), specs
        made, unexpected = recipes(model, self._files.shapes())
        self._recipes = {name: recipe for recipe in made for name in recipe.shapes}
        self._last: tuple[Recipe, Mapping[str, torch.Tensor]] | None = None
        self._check(unexpected)

    def _check(self, unexpected: Sequence[str]) -> None:
        missing = [
            f"{name} {spec.shape}"
            for name, spec in self._specs.items()
            if not spec.buffer and self._name(name) is None
        ]
        different = [
            f"{name} is {shape} and must be {spec.shape}"
            for name, spec in self._specs.items()
            if (found := self._name(name)) is not None
            and (shape := self._recipes[found].shapes[found]) not in (None, spec.shape)
        ]
        lists = {
            "missing": missing,
            "not the model's": list(unexpected),
            "of another shape": different,
        }
        if wrong := [
            f"{len(names)} are {what} ({_few(names)})" for what, names in lists.items() if names
        ]:
            raise AutoparError(
                f"weights {self._files.path} do not fit the model: of their tensors, {'; '.join(wrong)}. "
                "Give the weights of this model, or build the model from the configuration of these weights"
            )

    def _name(self, name: str) -> str | None:
        """The one of a tensor's names under which the checkpoint has it."""
        names = (name, *self._specs[name].aliases)
        return next((each for each in names if each in self._recipes), None)

    def __contains__(self, name: str) -> bool:
        return self._name(name) is not None

    def by_rows(self, name: str) -> bool:
        """Whether `read` can read some indices along dim 0 alone, as for experts of their own."""
        found = self._name(name)
        return found is not None and self._recipes[found].rows > 0

    def read(self, name: str, rows: Sequence[int] | None = None) -> torch.Tensor:
        """A tensor of the model, or its indices `rows` along dim 0.

        Raises AutoparError if the file cannot be read, or if two tied names have different tensors.
        """
        names = (name, *self._specs[name].aliases)
        first, *others = [self._made(each, rows) for each in names if each in self._recipes]
        if any(not torch.equal(first, other) for other in others):
            raise AutoparError(
                f"weights {self._files.path} have different tensors for {', '.join(names)}, which the model ties; untie them in its config"
            )
        return first

    def _made(self, name: str, rows: Sequence[int] | None) -> torch.Tensor:
        recipe = self._recipes[name]
        if rows is not None:
            return recipe.convert(recipe.sources_of_rows(rows), self._files)[name]
        if self._last is None or self._last[0] is not recipe:
            self._last = None  # frees one set of tensors before the next is read
            self._last = recipe, recipe.convert(recipe.sources, self._files)
        return self._last[1][name]


def _few(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
