"""Options that move memory or time by more than 2 %, as rules."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from autopar.foreign.frameworks.raw_options import JobOptions, shown_option
from autopar.foreign.job import Job, Unmodelled
from autopar.foreign.texts.expansion import is_known

NO_ATTENTION = "layers without attention"
"""What stands in the place of training as it is priced, where layers are those of mamba or rwkv."""

_TESTS: dict[str, Callable[[Job], bool]] = {
    "experts": lambda job: job.shape.experts > 0 or bool(job.shape.lacking) or job.layout.ep > 1,
    "selective": lambda job: job.layout.recompute == "selective",
    "uniform": lambda job: job.layout.recompute == "full" and not job.layout.recompute_layers,
    "offload": lambda job: job.layout.offload != "none",
    "on device": lambda job: job.layout.offload == "none",
    "unsharded": lambda job: job.layout.zero == 0,
    "fp8": lambda job: job.facts.fp8 != "",
    "uncompiled": lambda job: not job.facts.compile,
}
"""What an option needs for its effect, by name."""


@dataclass(frozen=True, slots=True)
class Weight:
    """An option that has weight.

    Attributes:
        option: a pattern of the end of its path, with underscores for hyphens.
        what: the part of the job that no price counts.
        moves: one of `WEIGHTS`.
        value: a pattern of the values that have weight; '' is every value that is on.
        needs: what a job must have for it: one of `_TESTS`, or an axis that is longer than 1; or ''.
        place: one of `PLACES`.
        frameworks: the targets that have the option; () is all.
    """

    option: str
    what: str
    moves: str = "both"
    value: str = ""
    needs: str = ""
    place: str = "inside"
    frameworks: tuple[str, ...] = ()

    def of(self, path: str, value: str) -> Unmodelled | None:
        """The part that an option of a job says by this rule; None if it says none."""
        if not re.fullmatch(rf"(?:.*\.)?(?:{self.option})", path):
            return None
        if is_known(value) and self.value and not re.fullmatch(self.value, value, re.IGNORECASE):
            return None
        what = self.what if is_known(value) else f"{self.what}, if this is on"
        return Unmodelled(what, shown_option(path, value), self.moves, self.place)

    def applies(self, job: Job) -> bool:
        """Whether the option has an effect in a job."""
        if self.frameworks and job.framework not in self.frameworks:
            return False
        if self.needs in _TESTS:
            return _TESTS[self.needs](job)
        return not self.needs or int(getattr(job.layout, self.needs)) > 1


def parts_by_rule(job: Job, options: JobOptions, rules: Iterable[Weight]) -> Iterator[Unmodelled]:
    """What the options of a job say by rules, each part once."""
    told = set[str]()
    for rule in rules:
        if not rule.applies(job):
            continue
        for path, value in options.values.items():
            part = rule.of(path, value)
            if part is not None and part.what not in told:
                told.add(part.what)
                yield part
