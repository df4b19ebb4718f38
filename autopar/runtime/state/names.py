"""Finds the parameters and buffers of a model by their names, by patterns, and by modules."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from autopar.errors import AutoparError, shown
from autopar.ir.traced import ParameterSpec

_SIMPLE = (bool, int, float, complex, str, tuple, type(None))
"""Types of attributes whose values a traced forward holds as constants."""


class TensorNames:
    """The names of a model's tensors. `specs` has those that forward reads, by their first name."""

    def __init__(self, model: nn.Module, specs: Mapping[str, ParameterSpec]) -> None:
        self.specs = specs
        self._first = {
            name: spec.name for spec in specs.values() for name in (spec.name, *spec.aliases)
        }
        held = (*model.named_parameters(), *model.named_buffers())
        self.unread = frozenset(name for name, _ in held if name not in self._first)
        self.numbers = {
            self._first[name]: buffer.detach().clone()
            for name, buffer in model.named_buffers()
            if name in self._first and specs[self._first[name]].read_as_number
        }
        """Values of the buffers of which forward has read numbers, by first name."""
        self._attributes = frozenset(
            f"{path}.{name}" if path else name
            for path, module in model.named_modules()
            for name, value in vars(module).items()
            if isinstance(value, _SIMPLE)
        )

    @property
    def trained(self) -> list[str]:
        """The names of trained parameters, in the order of the traced model."""
        return [name for name, spec in self.specs.items() if spec.trainable]

    def first(self, name: Any) -> str:
        """The first name of the parameter or buffer `name`; tied ones have several. Raises
        AutoparError if forward reads none of this name.
        """
        if isinstance(name, str) and name in self._first:
            return self._first[name]
        raise AutoparError(self._unknown(name))

    def check_number(self, name: str, value: Any) -> None:
        """Raise AutoparError if forward has read a number of the buffer called `name` (a first
        name), and `value`, a tensor or a number, is another value.
        """
        before = self.numbers.get(name)
        if before is None:
            return
        now = torch.as_tensor(value, dtype=before.dtype, device=before.device)
        if not torch.equal(now.expand(before.shape), before):
            raise AutoparError(
                f"{name} was {shown(before.tolist())} when the model was captured, whose forward reads it as a Python number: the graph of "
                "the plan would not follow. Set it in the model, and call parallelize after that"
            )

    def _unknown(self, name: Any) -> str:
        if isinstance(name, str) and name in self.unread:
            return f"{name} is a tensor that forward does not read, so that it has no effect on training"
        if isinstance(name, str) and name in self._attributes:
            return (
                f"{name} is an attribute of Python, whose value is a constant of the traced forward: make it a buffer "
                f"(register_buffer) before parallelize, and engine.set changes it; or change it and call parallelize again"
            )
        near = get_close_matches(str(name), self._first, 3, 0.4)
        hint = f"; near are {', '.join(near)}" if near else ""
        return f"the model has no parameter or buffer {shown(name)}{hint}"

    def matching(self, patterns: Iterable[str], among: Collection[str]) -> list[str]:
        """Those of `among` (first names) that a pattern matches, in the order of `among`.

        A pattern is a name, a module's name, or has wildcards such as `layers.*.bias`. Raises
        AutoparError for a pattern that matches none.
        """
        found: set[str] = set()
        for pattern in patterns:
            if not isinstance(pattern, str):
                raise AutoparError(f"{shown(pattern)} is not a name or a pattern of names, as text")
            matched = {
                self._first[name]
                for name in self._first
                if name == pattern or name.startswith(f"{pattern}.") or fnmatchcase(name, pattern)
            }
            if not matched & set(among):
                raise AutoparError(self._none(pattern, matched))
            found |= matched
        return [name for name in among if name in found]

    def _none(self, pattern: str, matched: Collection[str]) -> str:
        if not matched:
            return f"no parameter matches {pattern!r}: " + self._unknown(pattern)
        name = sorted(matched)[0]
        if self.specs[name].buffer:
            return f"{pattern!r} matches buffers alone ({name}), and buffers are not trained"
        return (
            f"{pattern!r} matches {name}, which did not require a gradient when parallelize was called, so that the plan has none for it: "
            "make it require one before parallelize, and hold it with engine.freeze as long as it must not be trained"
        )
