"""All targets, and the reading of a job of any of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from autopar.errors import AutoparError, shown
from autopar.files import read_text
from autopar.foreign.frameworks import primus, trainers
from autopar.foreign.frameworks.accelerate import ACCELERATE
from autopar.foreign.frameworks.arguments import unread_file
from autopar.foreign.frameworks.bridge import BRIDGE
from autopar.foreign.frameworks.deepspeed import DEEPSPEED
from autopar.foreign.frameworks.megatron_options import megatron_stages
from autopar.foreign.frameworks.megatron_read import looks_like_megatron, read_megatron
from autopar.foreign.frameworks.megatron_rules import megatron_refusals
from autopar.foreign.frameworks.megatron_words import (
    MEGATRON_ASPECTS,
    megatron_held_pins,
    megatron_words,
    within,
)
from autopar.foreign.frameworks.megatron_write import megatron_flags, write_megatron
from autopar.foreign.frameworks.nanotron import NANOTRON
from autopar.foreign.frameworks.neox import NEOX
from autopar.foreign.frameworks.openrlhf import OPENRLHF
from autopar.foreign.frameworks.torchtitan_options import torchtitan_stages
from autopar.foreign.frameworks.torchtitan_read import looks_like_torchtitan, read_torchtitan
from autopar.foreign.frameworks.torchtitan_rules import torchtitan_refusals
from autopar.foreign.frameworks.torchtitan_words import TORCHTITAN_ASPECTS, torchtitan_words
from autopar.foreign.frameworks.torchtitan_write import torchtitan_flags, write_torchtitan
from autopar.foreign.frameworks.transformers import TRANSFORMERS
from autopar.foreign.frameworks.unknown import distinct_jobs
from autopar.foreign.frameworks.unmodelled import whole_job
from autopar.foreign.frameworks.verl import VERL
from autopar.foreign.job import Finding, Job, Unmodelled
from autopar.foreign.limits.frameworks import LIMITS, limits_of
from autopar.foreign.target import SourceFile, Target
from autopar.foreign.texts.expansion import Place
from autopar.foreign.texts.shell_words import CLOSE, OPEN

TORCHTITAN = Target(
    LIMITS["torchtitan"],
    looks_like_torchtitan,
    read_torchtitan,
    torchtitan_refusals,
    write_torchtitan,
    torchtitan_flags,
    dashes="--",
    stages=torchtitan_stages,
    words=torchtitan_words,
    aspects=TORCHTITAN_ASPECTS,
)
"""torchtitan."""

MEGATRON = Target(
    LIMITS["megatron"],
    looks_like_megatron,
    read_megatron,
    megatron_refusals,
    write_megatron,
    megatron_flags,
    dashes="--",
    stages=megatron_stages,
    words=megatron_words,
    aspects=MEGATRON_ASPECTS,
    held=megatron_held_pins,
    within=within,
)
"""Megatron-LM."""

MOST_READINGS = 60
"""The most branches that are read, each as a script of its own."""
MOST_STEPS_OF_ALL = 100_000
"""The most commands that are read for branches, those of all readings counted."""
_NO_SCRIPTS = (".py", ".yaml", ".yml", ".json", ".toml")

_YAML, _TEXTS = (".yaml", ".yml", ".json"), (".sh", ".slurm", ".sbatch", ".bash")
MOST_READ = 200_000
"""The most characters of a file in which its framework is looked for."""
_FORMS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("MaxText", _YAML, (r"^\s*(ici|dcn)_(fsdp|tensor|data|pipeline)\w*_parallelism\s*:",)),
    ("MaxText", _YAML, (r"^\s*base_emb_dim\s*:",)),
    ("MaxText", (*_TEXTS, ".py"), (r"\bMaxText[./](train|sft)|\bmaxtext\.trainers\b",)),
    ("NeMo Automodel", _YAML, (r"_target_:\s*nemo_automodel\.",)),
    ("NeMo Automodel", _YAML, (r"^recipe:\s*\w*Recipe\w*\s*$",)),
    ("LLaMA-Factory v1", _YAML, (r"^dist_config:", r"^(model_class|kernel_config|train_dataset):")),
    ("torchtune", _YAML, (r"_(component|target)_:\s*torchtune\.",)),
    ("litgpt", _YAML, (r"^(checkpoint_dir|model_name):", r"^train:", r"^\s+(global|micro)_batch_size:")),
    ("llm-foundry (Composer)", _YAML, (r"^\s*(device_train_microbatch_size|global_train_batch_size)\s*:",)),
    ("Levanter", _YAML, (r"^trainer:", r"^\s+(tensor_parallel_axes|fsdp_axis)\s*:")),
    ("Levanter", _YAML, (r"^trainer:", r"^\s+train_batch_size\s*:", r"^\s+mp\s*:")),
    ("PaddleNLP", (*_YAML, *_TEXTS), (r"tensor_parallel_degree", r"per_device_train_batch_size")),
    ("PaddleFleetX", _YAML, (r"^\s+mp_degree\s*:", r"^\s+pp_degree\s*:")),
    ("OLMo-core", (".py",), (r"\bfrom olmo_core\b",)),
    ("InternEvo", (".py",), (r"^parallel\s*=\s*dict\(", r"\bzero1\s*=")),
    ("Colossal-AI", (".py", *_TEXTS), (r"\bfrom colossalai\b|^\s*colossalai run\b",)),
    ("MoE-ModelZoo's launcher", _TEXTS, (r"\b(sbatch|interactive)_benchmarking\.sh",)),
    ("EasyLM", _TEXTS, (r"\bEasyLM\.models\b",)),
    ("open_lm", _TEXTS, (r"\bopen_lm\.main\b",)),
    ("MosaicML's diffusion or BERT", _YAML, (r"^device_train_batch_size\s*:",)),
    ("xtuner", (".py",), (r"\bfrom xtuner\b",)),
    ("ROLL", _YAML, (r"^\s*actor_train:", r"^\s+strategy_name:")),
    ("AReaL", _YAML, (r"^\s*allocation_mode\s*:",)),
    ("prime-rl", (".toml",), (r"^\[(trainer|orchestrator|model)\b", r"^\[(inference|orchestrator)\b")),
)  # fmt: skip
"""(framework, how the names of its files end, what all stands in them)."""

TARGETS: dict[str, Target] = {
    t.name: t
    for t in (
        OPENRLHF,
        VERL,
        ACCELERATE,
        TRANSFORMERS,
        TORCHTITAN,
        NANOTRON,
        NEOX,
        DEEPSPEED,
        BRIDGE,
        MEGATRON,
    )
}
"""Every target by its name, in the order in which files are recognized."""


_READS_ARGUMENTS = re.compile(r"\$\{?[#!]?[1-9@*]|\bshift\b")
"""A place where a script reads its arguments."""
_MOST_UP = 4
"""The most folders above a job in which files that it names are looked for."""


def target_of(name: str) -> Target:
    """The target of a name or alias. Raises AutoparError for an unknown one."""
    return TARGETS[limits_of(name).name]


def file_near(folder: Path, name: str) -> Path | None:
    """The file that a job in `folder` names. Jobs are started from elsewhere: a name is looked for
    from the folder, in it, and from the `_MOST_UP` folders above it, also by the end of its path.
    """
    parts = Path(name).parts
    ends = [Path(*parts[start:]) for start in range(len(parts) - 1)]
    above = list(folder.resolve().parents)[:_MOST_UP]
    places = [folder / name, folder / Path(name).name, *(up / name for up in above)]
    places += [up / end for end in ends for up in (folder, *above) if not end.is_absolute()]
    return next((place for place in places if place.is_file()), None)


def _arguments(args: Sequence[str] | None, text: str, path: str) -> tuple[str, ...] | None:
    """The arguments of a script with this text, or None if none are given. Raises AutoparError if
    they are no texts, or if the file reads none.
    """
    if not args:
        return None if args is None else ()
    if isinstance(args, str) or not all(isinstance(arg, str) for arg in args):
        raise AutoparError(f"args={shown(args)} must be a list of texts, such as ['8', '4']")
    if any(OPEN in arg or CLOSE in arg for arg in args):
        raise AutoparError("an argument has a character of Unicode's private use area: drop it")
    if not _READS_ARGUMENTS.search(text):
        words = " ".join(args)
        raise AutoparError(
            f"{path} reads no arguments, such as $1, and was given {shown(words)} as such"
        )
    return tuple(args)


def _reader_of(source: SourceFile) -> Callable[[SourceFile], Job] | None:
    """What reads a file, by its form; None if nothing does. Raises AutoparError for a job of a
    framework that autopar does not read.
    """
    if primus.reads_primus(source):
        return primus.read_primus
    refuse_unread(source)
    for known in TARGETS.values():
        if known.reads(source):
            return known.read
    return trainers.read_trainer if trainers.reads_trainer(source) else None


def read_job(path: str | Path, target: str | None = None, args: Sequence[str] | None = None) -> Job:
    """The job that a file of another framework says. Nothing in the file is run.

    Args:
        path: a launch script, a configuration file or a dump of arguments. `recipes.py:NAME` reads
            the function NAME of a Python file.
        target: the framework; by default the one whose form the file has.
        args: the arguments that a launch script is started with: $1, $2 and so on.  By default they
            are not known.

    Raises:
        AutoparError: the file cannot be read, is no job, reads no arguments although some are given,
            or the target is not known.
    """
    path, _, function = str(path).partition(".py:")
    path += ".py" if function else ""
    text = read_text(path, "job")
    given = _arguments(args, text, path)
    folder = Path(path).parent

    def beside(name: str) -> str | None:
        found = file_near(folder, name)
        return read_text(found, "script") if found else None

    def exact(name: str) -> str | None:
        place = folder / name
        return read_text(place, "module") if place.is_file() else None

    source = SourceFile(text, Path(path).name, beside, function, given, exact)
    read = target_of(target).read if target is not None else _reader_of(source)
    if read is not None:
        return whole_job(lambda changed: over_branches(changed, read), source)
    if re.search(r'"(model_type|architectures)"\s*:', text):
        raise AutoparError(f"{path} is no job: it describes a model: give it as --model hf:{path}")
    raise AutoparError(
        f"{path} is no job that autopar knows: it has options of none of {', '.join(TARGETS)}"
    )


def refuse_unread(source: SourceFile) -> None:
    """Raises AutoparError for a job of a framework that autopar does not read, and names it."""
    text, file = source.text[:MOST_READ], source.name.lower()
    for framework, ends, marks in _FORMS:
        if file.endswith(ends) and all(re.search(mark, text, re.MULTILINE) for mark in marks):
            raise AutoparError(
                f"{source.name} is a job of {framework}, which autopar does not read"
            )


def over_branches(source: SourceFile, read: Callable[[SourceFile], Job]) -> Job:
    """The job of a source. Of a script it has all that the script may be besides, by the tests and
    cases that it does not decide. Raises AutoparError as `read`.
    """
    job = read(source)
    if source.name.lower().endswith(_NO_SCRIPTS):
        return job
    try:
        script = source.script()
    except AutoparError:
        return job
    places = [(place, n) for place, count in script.undecided.items() for n in range(count)]
    others, told = list(job.others), set[Place]()
    commands = script.commands
    read_branches = min(MOST_READINGS, MOST_STEPS_OF_ALL // max(1, script.steps))
    for place, branch in places[:read_branches]:
        assumed = replace(source, assumed={**source.assumed, place: branch})
        try:
            if assumed.script().commands == commands:
                continue
            other = read(assumed)
        except AutoparError:  # the script ends there
            told.add(place)
            continue
        found = [replace(one, others=(), findings=()) for one in (other, *other.others)]
        others += found
        if set(replace(job, others=tuple(found)).unknown) - {"gpus"}:  # those of the cluster count
            told.add(place)
    left: tuple[Unmodelled, ...] = ()
    if len(places) > read_branches:
        said = f"{len(places)} branches that the script does not decide, of which {read_branches} are read"
        left = (Unmodelled(said),)
    job = replace(job, others=distinct_jobs(job, others), unmodelled=(*job.unmodelled, *left))
    if left:
        return job
    # of a file that is not there and moves no option only its name is told
    moves_none = [name for name, place in script.unread.items() if place not in told]
    notes = {unread_file(name): Finding("note", f"the script reads {name}, which is not beside it: no value that is priced stands on it")
             for name in moves_none}  # fmt: skip
    return replace(job, findings=tuple(notes.get(finding, finding) for finding in job.findings))
