"""A module under construction: the text of its forward, its parts, and its batch tensors."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

SEQ, VOCAB, HIDDEN, OUTPUTS = 5, 7, 6, 3
COUPLINGS = ("rows", "float inputs", "parameters")
"""What a row's gradient depends on in other rows: integers and masks at most, also floats of the batch, or also
what the model computes.  A loss of the first kind should be split into micro-batches; one of the last must not be."""


@dataclass
class Writer:
    """Collects lines of forward.  Methods that write return the name of what they wrote."""

    rng: random.Random
    rows: int
    seq: int = SEQ
    lines: list[str] = field(default_factory=list)
    parts: dict[str, nn.Module | nn.Parameter | Tensor] = field(default_factory=dict)
    made_of: dict[str, str] = field(default_factory=dict)
    inputs: dict[str, str] = field(default_factory=dict)
    tags: set[str] = field(default_factory=set)
    coupling: str = "rows"
    shifted: bool = False
    constants: dict[str, Any] = field(default_factory=dict)
    weights_from: str = "rows"
    known: dict[str, str] = field(default_factory=dict)
    _numbers: dict[str, int] = field(default_factory=dict)

    def let(self, hint: str, expression: str) -> str:
        name = self.fresh(hint)
        self.lines.append(f"{name} = {expression}")
        return name

    def fresh(self, hint: str) -> str:
        number = self._numbers.get(hint, 0)
        self._numbers[hint] = number + 1
        return f"{hint}{number or ''}"

    def pick(self, *options: Any) -> Any:
        return self.rng.choice(options)

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def tag(self, *names: str) -> None:
        self.tags.update(names)

    def couple(self, coupling: str) -> None:
        self.coupling = max(self.coupling, coupling, key=COUPLINGS.index)

    def note_weights(self, source: str) -> None:
        """Remember what the weights depend on: a loss divided by their sum over the batch depends on it too."""
        self.weights_from = max(self.weights_from, source, key=COUPLINGS.index)

    def once(self, key: str, hint: str, expression: str) -> str:
        """`let`, but the same expression under one key is written once."""
        if key not in self.known:
            self.known[key] = self.let(hint, expression)
        return self.known[key]

    def part(self, hint: str, made: nn.Module | nn.Parameter | Tensor, of: str) -> str:
        """Give the module a submodule, parameter or buffer; `of` says for the reader what it is."""
        name = self.fresh(hint)
        self.parts[name], self.made_of[name] = made, of
        return f"self.{name}"

    def constant(self, name: str, value: Any) -> str:
        """A plain attribute of the module."""
        self.constants[name], self.made_of[name] = value, repr(value)
        return f"self.{name}"

    def buffer(self, hint: str, *sizes: int) -> str:
        """A buffer of positive numbers."""
        return self.part(hint, self._positive(sizes), f"buffer{list(sizes)}")

    def parameter(self, hint: str, *sizes: int) -> str:
        """A parameter of positive numbers."""
        return self.part(hint, nn.Parameter(self._positive(sizes)), f"parameter{list(sizes)}")

    def _positive(self, sizes: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(self.rng.randrange(2**31))
        return 0.4 + 1.5 * torch.rand(sizes, generator=generator, dtype=torch.float64)

    def input(self, name: str, kind: str | None = None) -> str:
        """A tensor of the batch, `kind` one of `loss_batches.KINDS`."""
        self.inputs.setdefault(name, kind or name)
        return name

    def token_input(self, name: str, kind: str | None = None) -> str:
        """A tensor of the batch that is read beside labels [B, T]: shifted when they are."""
        self.input(name, kind)
        if not self.shifted:
            return name
        return self.once(f"shifted {name}", f"{name}_shifted", f"{name}[:, 1:]")

    def prune(self) -> None:
        """Drop lines, parts and inputs that nothing reads."""
        used, kept = set(), []
        for line in reversed(self.lines):
            targets, _, expression = line.partition(" = ")
            if line.startswith("return ") or used & set(targets.split(", ")):
                kept.append(line)
                used |= set(
                    re.findall(r"\w+", expression if expression else line.removeprefix("return "))
                )
        self.lines = kept[::-1]
        self.inputs = {name: kind for name, kind in self.inputs.items() if name in used}
        if "parameters" not in used:
            for things in (self.parts, self.made_of, self.constants):
                for name in set(things) - used:
                    del things[name]

    def source(self) -> str:
        """The module as text."""
        made = [f"    self.{name}: {of}" for name, of in self.made_of.items()]
        body = [f"    {line}" for line in self.lines]
        return "\n".join([*made, f"def forward(self, {', '.join(self.inputs)}):", *body])
