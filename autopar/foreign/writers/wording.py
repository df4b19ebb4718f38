"""The options in which two jobs differ, as the file of the first one spells them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace

from autopar.foreign.frameworks.arguments import is_false, is_none, is_true
from autopar.foreign.frameworks.torchtitan_options import MODE
from autopar.foreign.frameworks.torchtitan_words import POLICY_CLASSES
from autopar.foreign.frameworks.trainer_words import SCRIPT
from autopar.foreign.job import Job, JobFile
from autopar.foreign.target import NotExpressible, Target
from autopar.foreign.texts.expansion import is_known, shown_value
from autopar.ir.layout import Layout

ENVIRONMENT = "env_"
"""What stands before the name of an environment variable among the options of a job."""


_ALIASES = {
    "micro_batch_size": ("train_micro_batch_size", "per_device_train_batch_size"),
    "global_batch_size": ("train_global_batch_size",),
    "num_virtual_stages_per_pipeline_rank": ("virtual_pipeline_model_parallel_size",),
    "recompute_granularity": ("activations_checkpoint_granularity",),
    "recompute_method": ("activations_checkpoint_method",),
    "recompute_num_layers": ("activations_checkpoint_num_layers",),
    "tensor_model_parallel_size": ("tensor_parallelism",),
    "pipeline_model_parallel_size": ("pipeline_parallelism",),
    "context_parallel_size": ("context_parallelism",),
    "expert_model_parallel_size": ("expert_parallelism",),
    "sequence_parallel": ("sequence_parallelism",),
}
"""Other names of options in files, by the end of their path."""


POLICY = "activation-checkpoint"
"""What torchtitan 0.3 computes again: a command, not an option."""


SCRIPT_FILE = SCRIPT.removesuffix(": ")
"""The file of options that stand in the training script."""


@dataclass(frozen=True, slots=True)
class OptionDifference:
    """An option of the framework that another layout sets otherwise.

    Attributes:
        option: its name, as the file spells it.
        now: its text; '' if it is not there, 'on' for a switch.
        then: its text then; '' if it is to be left out.
        file: the file in which it stands; '' for that of the job.
    """

    option: str
    now: str
    then: str
    file: str = ""

    def __str__(self) -> str:
        place = f"in {self.file}: " if self.file else ""
        if not self.now:
            return f"{place}add {self.option}{'' if self.then == 'on' else ' ' + self.then}"
        if not self.then:
            return f"{place}drop {self.option}"
        return f"{place}{self.option} {self.now} -> {self.then}"


def is_script(file: JobFile) -> bool:
    """Whether a file starts programs, whose options are words of a command."""
    return not file.name.lower().endswith((".yaml", ".yml", ".json", ".toml", ".py"))


@dataclass(frozen=True, slots=True)
class _Speller:
    """How a job's file spells options."""

    target: Target
    job: Job

    def difference(self, name: str, now: str, then: str) -> OptionDifference:
        """An option that changes, with the file in which it stands."""
        if name.startswith(SCRIPT):
            return OptionDifference(name.removeprefix(SCRIPT), now, then, SCRIPT_FILE)
        option = self.option(name)
        file = self.job.file
        for part in file.parts if file is not None else ():
            if option.startswith(f"{part.under}."):
                return OptionDifference(option.removeprefix(f"{part.under}."), now, then, part.name)
        return OptionDifference(option, now, then)

    def path(self, name: str) -> str:
        """The path of an option in the file; '' if it is not there."""
        if self.job.file is None or name.startswith(SCRIPT):
            return ""
        key = name.replace("-", "_")
        options = self.job.file.options
        if key in options:
            return key
        end = key.rpartition(".")[2]
        ends = (end, *_ALIASES.get(end, ()))
        inside = [path for path in options if path.rpartition(".")[2] in ends]
        return min(inside, key=lambda path: path.count("."), default="")

    def now(self, name: str) -> str:
        """The text of an option in the file, or 'on' for a switch; '' if it is not there."""
        file = self.job.file
        if file is None or name.startswith(ENVIRONMENT):
            key = name.replace("-", "_")
            text = self.job.flags.get(key, self.job.flags.get(key.rpartition(".")[2]))
            return "" if text is None else text or "on"
        if name == POLICY:
            return self.job.flags.get(MODE, "")
        if name == "activation_checkpoint":  # a class of a registry in Python
            return POLICY_CLASSES.get(self.job.flags.get(MODE, "selective"), "")
        path = self.path(name)
        if not path:
            return ""
        text = file.options[path]
        if not is_known(text):  # a sum, or a name
            text = self.job.flags.get(name, shown_value(text))
        plain = is_script(file) and text == "true" and not re.search(rf"{_dashed(path)}[ =]+true", file.text)  # fmt: skip
        return "on" if plain else text

    def option(self, name: str) -> str:
        """An option as the file spells it, or as it would."""
        file = self.job.file
        if name == POLICY:  # a command of its own
            return name
        if name.startswith(ENVIRONMENT):
            return f"export {name.removeprefix(ENVIRONMENT)}"
        if file is None:
            return f"{self.target.dashes}{name}"
        path = self.path(name) or self._new(name)
        if file.name.lower().endswith(".py") and _is_part(path, name):
            return name
        return self._dashes(path) if is_script(file) and not self._is_override(path) else path

    def _is_override(self, path: str) -> bool:
        assert self.job.file is not None
        text = self.job.file.text
        if re.search(rf"--{_dashed(path)}(?![\w-])", text):
            return False
        own = re.search(rf"(?<![\w.-])\+*{re.escape(path)}=", text) is not None
        like = re.search(r"(?<![\w.-])\+*[a-z]\w*\.[\w.]+=\S", text) is not None
        return own or (not self.target.dashes and like)

    def _dashes(self, path: str) -> str:
        """An option of a command: with hyphens or underscores as the others of the file."""
        assert self.job.file is not None
        text = self.job.file.text
        own = re.search(rf"--{_dashed(path)}(?![\w-])", text)
        if own:
            return own[0]
        hyphens = len(re.findall(r"(?<!\S)--[a-z]+(-[a-z]+)+", text))
        underscores = len(re.findall(r"(?<!\S)--[a-z.]+(_[a-z]+)+", text))
        return f"--{path if underscores > hyphens or '.' in path else path.replace('_', '-')}"

    def _new(self, name: str) -> str:
        """The path of an option that the file does not have: in the block of those like it."""
        assert self.job.file is not None
        key = name.replace("-", "_")
        if "." in key or is_script(self.job.file):
            return key
        known = {flag for flag in self.job.flags}
        blocks = Counter(
            path.rpartition(".")[0]
            for path in self.job.file.options
            if path.rpartition(".")[2] in known
        )
        block = blocks.most_common(1)[0][0] if blocks else ""
        return f"{block}.{key}" if block else key


def _is_part(path: str, name: str) -> bool:
    """Whether the path of an argument, as `ParallelismConfig.degree`, is of the part of a
    configuration that a name has, as `parallelism.degree`.
    """
    part, kind = name.rpartition(".")[0], path.rpartition(".")[0]
    if not part:
        return kind == "Config"
    return kind[:1].isupper() and kind.lower().startswith(part)


def _dashed(path: str) -> str:
    """A pattern of an option's name with hyphens or underscores."""
    return re.sub(r"_|-", "[-_]", path.replace(".", r"\."))


def differences(
    target: Target, now: Job, then: Job, explicit: bool = False
) -> tuple[OptionDifference, ...]:
    """The options in which two jobs differ, in the framework's form, and in the spelling and release
    of the file of `now`. () if it cannot say one of them. `explicit`: also options that the file
    leaves to a default, and that both jobs set alike.
    """
    words = target.words or target.flags
    try:
        after = words(replace(then, flags=now.flags, file=now.file))
    except NotExpressible:
        return ()
    before = _said(words, now)
    speller = _Speller(target, now)
    changed = [
        f.name
        for f in fields(Layout)
        if getattr(now.layout, f.name) != getattr(then.layout, f.name)
    ]
    return tuple(_told(speller, {} if explicit else before, after, set(changed)))


def _said(words: Callable[[Job], Mapping[str, str]], job: Job) -> Mapping[str, str]:
    """The options of a job by name; of what it computes again without, or none, if only its file
    says its layout.
    """
    plain = replace(job, layout=replace(job.layout, recompute="none", recompute_layers=0))
    for known in (job, plain):
        try:
            return words(known)
        except NotExpressible:
            continue
    return {}


def _told(
    speller: _Speller, before: Mapping[str, str], after: Mapping[str, str], changed: set[str]
) -> Iterator[OptionDifference]:
    aspects = [a for a in speller.target.aspects if changed & set(a.fields)]
    for name in _names(speller, before, after):
        if speller.target.aspects and not any(
            re.fullmatch(rf"(?:[\w.]+\.)?(?:{a.options})", name.replace("-", "_")) for a in aspects
        ):
            continue
        text, wanted = speller.now(name), after.get(name)
        if not text and before.get(name) == wanted:
            continue
        if wanted is None:
            if text and not (is_false(text) or is_none(text)):
                yield speller.difference(name, text, "")
        elif not text or not _same(text, wanted):
            then = _written(speller, name, text, wanted)
            if then or text:
                yield speller.difference(name, text, then)


def _names(speller: _Speller, before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """The names of all options that may differ: those of both jobs, then those of the file."""
    named = {**before, **after}
    said = {name.replace("-", "_").rpartition(".")[2] for name in named}
    if not speller.target.aspects:
        return list(named)
    return [*named, *(name for name in speller.job.flags if name.rpartition(".")[2] not in said)]


def _same(now: str, then: str) -> bool:
    """Whether two texts of an option say the same."""
    if now.strip() == then.strip() or (now == "on" and is_true(then)):
        return True
    if is_true(now) or is_false(now):
        return is_true(now) == is_true(then) and (is_true(then) or is_false(then))
    try:
        return float(now) == float(then)
    except ValueError:
        return now.lower() == then.lower()


def _written(speller: _Speller, name: str, now: str, then: str) -> str:
    """The text of an option in the file: a switch is there or not, or is true or false."""
    file = speller.job.file
    if then == "":
        switches = file is None or (is_script(file) and now in ("", "on"))
        return "on" if switches else "true"
    if file is not None and is_script(file) and now == "on" and is_false(then):
        return ""
    if now in ("True", "False") and then.lower() in ("true", "false"):
        return then.capitalize()
    return then
