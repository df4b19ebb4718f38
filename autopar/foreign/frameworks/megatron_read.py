"""Reads Megatron-LM's jobs: launch scripts, the dump of arguments at start, and the same names as
YAML (Megatron-Bridge, NeMo, ms-swift, verl).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from autopar.errors import AutoparError
from autopar.foreign.frameworks.arguments import (
    flat,
    flat_texts,
    is_none,
    options_of,
    read_mapping,
    unread_files,
)
from autopar.foreign.frameworks.extended import extended_mapping, named_configurations
from autopar.foreign.frameworks.megatron_mapping import (
    filled_in,
    options_by_name,
    overrides_of,
    swift_precision,
)
from autopar.foreign.frameworks.megatron_options import megatron_job
from autopar.foreign.frameworks.megatron_recipes import is_recipe, recipe_options
from autopar.foreign.frameworks.python_settings import settings_of
from autopar.foreign.frameworks.unknown import ALL_OPTIONS, unstated
from autopar.foreign.job import Finding, Job
from autopar.foreign.target import SourceFile
from autopar.foreign.texts.expansion import Script, is_known, shown_value
from autopar.foreign.texts.shell import ReadFile

_MARKS = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "num_layers", "hidden_size",
          "micro_batch_size", "num_attention_heads", "global_batch_size", "seq_length")  # fmt: skip
"""Options by which a job is recognized: two of them are enough."""


def looks_like_megatron(source: SourceFile) -> bool:
    """Whether at least two of Megatron's own options stand in the text."""
    if re.search(r'"(model_type|architectures)"\s*:', source.text):  # a model of Transformers
        return False
    read = re.findall(r"^\s*(?:source|\.)\s+(.+)", source.text, re.MULTILINE)
    ends = [re.split(r"[)}]|^[\"']?\$\w+", name)[-1].strip("\"'/ ") for name in read]
    texts = [source.read_file(name) for name in ends if name]
    text = re.sub(r"[-_]+", "_", "\n".join([source.text, *filter(None, texts)]))
    text = re.sub(r"(?<![A-Za-z0-9])_", "", text)
    marks = sum(re.search(rf"(?<![A-Za-z0-9]){mark}\b", text) is not None for mark in _MARKS)
    verl = re.search(r"ppo_megatron_trainer|actor_rollout_ref\.actor\.megatron\.", source.text)
    return marks >= 2 or verl is not None or _bases_look_like_megatron(source)


def _bases_look_like_megatron(source: SourceFile) -> bool:
    """Whether a YAML file extends others with Megatron's options, or says that Megatron runs it."""
    name, text = source.name.lower(), source.text
    if not name.endswith((".yaml", ".yml")) or not re.search(r"^(defaults|extends):", text, re.M):
        return False
    if re.search(r"^\s+backend:\s*megatron\s*$", text, re.MULTILINE):  # of FlagScale
        return True
    try:
        data, _ = extended_mapping(source)
    except AutoparError:
        return False
    names = {path.rpartition(".")[2] for path in flat(data)}
    return sum(mark in names for mark in _MARKS) >= 2


def read_megatron(source: SourceFile, over: bool = False) -> Job:
    """The job of a launch script, of a dump of arguments, or of YAML with Megatron's names. `over`:
    the YAML stands over values that are not there. Raises AutoparError if the text has no job of
    Megatron-LM.
    """
    dump = re.findall(
        r"^[^\S\n]*(?:(?:\[[^\]\n]*\]:?|\d+:)[^\S\n]*)?(\w+) \.{2,} (.*)$",
        source.text,
        re.MULTILINE,
    )
    if len(dump) > 10:
        return megatron_job({name: value.strip() for name, value in dump}, resolved=True)
    suffix = source.name.rsplit(".", 1)[-1].lower()
    if suffix in ("yaml", "yml", "json"):
        data, findings = extended_mapping(source)
        missing = ALL_OPTIONS if over or any(f.kind == "unknown" for f in findings) else ()
        return _with(job_of_mapping(data, missing), findings)
    if suffix == "py":
        return _of_recipe(source)
    return _of_script(source)


# ------------------------------------------------------------------------------------------- forms


def job_of_mapping(data: Mapping[str, object], missing: Iterable[str] = ()) -> Job:
    """The job of nested mappings, each option by the last part of its path. `missing` are options
    that files may set which are not there.
    """
    if str(data.get("_target_", "")).startswith("verl."):
        raise AutoparError(
            "no job: the file is a part of verl's own configuration: give the script that overrides it"
        )
    values, findings = options_by_name(data, _MARKS)
    values.pop("data_parallel_size", None)  # it follows from the devices: this one is of inference
    known = [mark for mark in _MARKS if mark in values]
    if (
        "train_micro_batch_size" in values
        and len(known) < 2
        and "dtensor_cfg" in str(data)[:100_000]
    ):
        raise AutoparError(
            "this is a job of NeMo-RL with DTensor, which autopar does not read; it reads one with megatron_cfg"
        )
    of_verl = {"ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu"} & set(values)
    if len(known) < 2 and not of_verl:
        why = "; what it extends is not beside it" if missing else ""
        raise AutoparError(f"no job: the file has fewer than two options of Megatron-LM{why}")
    options = filled_in(values)
    return _with(megatron_job(options, missing=unstated(missing, options)), findings)


def _of_recipe(source: SourceFile) -> Job:
    """The job of a function that returns a recipe of NeMo or Megatron-Bridge."""
    settings = settings_of(source, is_recipe)
    options = recipe_options(settings)
    if len(options.values) < 2 and not options.missing:
        raise AutoparError(f"no job: {source.name} has fewer than two options of Megatron-LM")
    job = megatron_job(options.values, missing=options.missing, choices=options.choices)
    return _with(job, [*settings.findings, *options.findings])


def _with(job: Job, findings: list[Finding]) -> Job:
    return replace(job, findings=(*findings, *job.findings))


def _of_script(source: SourceFile) -> Job:
    script = source.script()
    best, launched = max(
        script.programs(), key=lambda program: _marks(program[1]), default=(-1, ())
    )
    findings: list[Finding] = []
    if _marks(launched) < 2:
        for words, _ in script.commands:
            paths = overrides_of(words)
            of_verl = any(path.startswith("actor_rollout_ref.actor.") for path in paths)
            if of_verl or _marks(f"--{path.rpartition('.')[2]}" for path in paths) > 1:
                # verl's own configurations hold its defaults, which are known
                named = () if any(path.startswith("actor_rollout_ref") for path in paths) else words
                data, more = named_configurations(named, source)
                bases = ALL_OPTIONS if more else ()
                job = job_of_mapping({**flat(data), **paths}, bases)
                return _with(job, [*more, *unread_files(script)])
        words = _from_variables(script)
        if _marks(words) < 2:
            raise _no_command(script, source.name)
        findings.append(
            Finding(
                "note", "no command with the options was found: all variables with options are read"
            )
        )
    else:
        words = _joined_layout(script, best, findings)
        _check_that_it_trains(words, source.name)
    options = options_of(words)
    missing = _loose_words(words, options, findings)
    findings += unread_files(script)
    findings += [Finding("note", note) for note in script.notes if _matters(note)]
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS",):
        if (value := script.exported(name)) is not None:
            options[f"env_{name}"] = value
    swift = {"sft", "pt", "rlhf"} & set(words[:3]) and "megatron" in words[0]
    if swift:
        options = filled_in({"packing": "false"} | options)
    elif "actor_num_nodes" in options:
        options = filled_in(options)  # of slime
    options |= _processes(options, script)
    of_file, told = _of_deepspeed(options, script.reader(source.read_file))
    options |= of_file
    findings += told
    missing = unstated(missing, options)
    if swift:
        missing += _add_precision(options, findings)
    if any(finding.kind == "unknown" for finding in told):
        missing = (*missing, "zero_stage", "cpu_optimizer")
    job = megatron_job(options, missing=missing)
    findings += _contradicting_names(source.text, script, job)
    return _with(job, findings)


def _no_command(script: Script, name: str) -> AutoparError:
    """The error for a script in which no command has options of Megatron-LM."""
    unread = ", ".join(script.unread)
    absent = f"; it reads {unread}, which are not beside it" if unread else ""
    ends = f"; it ends with the exit in line {script.stops}" if script.stops else ""
    return AutoparError(
        f"no job: no command of {name} has two options of Megatron-LM{absent}{ends}"
    )


def _add_precision(options: dict[str, str], findings: list[Finding]) -> tuple[str, ...]:
    """Adds the precision of a job of ms-swift to its options. Returns the option that says it if the
    file does not tell it, with a finding.
    """
    precision, known = swift_precision(options)
    options |= precision
    if known:
        return ()
    what = "the precision is that of the checkpoint, which the file does not tell"
    findings.append(Finding("unknown", what, legal=("give --bf16 true in the options",)))
    return ("bf16",)


def _check_that_it_trains(words: Iterable[str], name: str) -> None:
    """Raises AutoparError if a command of the script `name` does not train."""
    words = list(words)
    task = options_of(words).get("task", "")
    other = f"--task {task}" if _TASKS.search(task) else ""
    if other := other or next((word for word in words if _NO_TRAINING.search(word)), ""):
        raise AutoparError(f"no job: {other} of {name} does not train")


def _of_deepspeed(
    options: Mapping[str, str], read_file: ReadFile
) -> tuple[dict[str, str], list[Finding]]:
    """What the file of DeepSpeed says that the options name: its stage of ZeRO counts, not that of
    the options, and what it offloads. With findings if it is not there, or contradicts the
    micro-batch.
    """
    name = options.get("deepspeed_config", "")
    if not name or "deepspeed" not in options:
        return {}, []
    text = read_file(name) if is_known(name) else None
    if text is None:
        if "zero_stage" in options:
            return {}, []
        what = f"the stage of ZeRO stands in {shown_value(name)}, which is not beside the file"
        return {}, [Finding("unknown", what, legal=("give --zero-stage in the options",))]
    try:
        inner, findings = flat_texts(read_mapping(text, name)), list[Finding]()
    except AutoparError as error:
        return {}, [Finding("unknown", f"the stage of ZeRO stands in {name}: {error}")]
    stage = inner.get("zero_optimization.stage", "0")
    if options.get("zero_stage", stage) != stage:
        what = f"--zero-stage is {options['zero_stage']}, and {name} says {stage}: the file counts"
        findings.append(Finding("contradiction", what))
    micro = inner.get("train_micro_batch_size_per_gpu", "")
    if micro.isdigit() and options.get("micro_batch_size", micro) != micro:
        what = f"--micro-batch-size is {options['micro_batch_size']}, and {name} says {micro}"
        findings.append(Finding("contradiction", f"{what}: the options count"))
    found = {"zero_stage": stage}
    devices = [inner.get(f"zero_optimization.offload_{what}.device", "none")
               for what in ("optimizer", "param")]  # fmt: skip
    found |= {"cpu_optimizer": "true"} if not is_none(devices[0]) else {}
    return found | ({"offload_param": "true"} if not is_none(devices[1]) else {}), findings


_NO_TRAINING = re.compile(
    r"(text_gen|generat|server|inference|convert|export|quantize|preprocess|merge|eval|analy[sz]e|hf2\w|\w2hf|(hf|mcore|megatron)_?to_?)\w*\.py$|"
    r"^--analyzing[-_]task$"
)
"""Programs with Megatron-LM's options that do not train, and an option of one."""
_TASKS = re.compile(r"eval|prompt|lambada|wikitext|zeroshot|generation", re.I)
"""Values of `--task` that do not train."""
_PROCESSES = {
    "nproc_per_node": ("NPROC_PER_NODE", "SLURM_GPUS_ON_NODE"),
    "nnodes": ("NNODES", "SLURM_NNODES"),
}
"""Variables that say the processes, where the launcher has no option for them."""


def _processes(options: Mapping[str, str], script: Script) -> dict[str, str]:
    """The processes of a node and the nodes that the options do not say, by option."""
    found: dict[str, str] = {}
    if options.keys().isdisjoint(("nproc_per_node", "nnodes", "num_gpus", "gpus_per_node")):
        launchers = [options_of(words) for _, words in script.programs()]
        launcher = next((o for o in launchers if "nproc_per_node" in o), {})
        found = {name: launcher[name] for name in _PROCESSES if name in launcher}
    for name, variables in _PROCESSES.items():
        values = [v for v in map(script.exported, variables) if v is not None]
        if values and name not in options and name not in found:
            found[name] = values[0]
    known = {**found, **options}.keys()
    several = not known.isdisjoint(("nnodes", "num_nodes", "hostfile"))
    alone = not known.isdisjoint(("nproc_per_node", "num_gpus")) and not several
    return found | ({"nnodes": "1"} if alone else {})  # of torchrun and deepspeed


def _matters(note: str) -> bool:
    """Whether a note of the shell's reader may touch a price."""
    return (
        re.search(
            r"--(?!wandb|tensorboard|load|save|data|profile)|NODES|GPU|WORLD|TP|PP|CP|EP|DP|BATCH|SEQ|LAYER|SIZE",
            note,
        )
        is not None
    )


def _loose_words(
    words: Iterable[str], options: Mapping[str, str], findings: list[Finding]
) -> tuple[str, ...]:
    """The options that words may hold which are not known, with a finding for each such word."""
    missing: tuple[str, ...] = ()
    for word in words:
        plain = not word.startswith("--") and not word.endswith(".py") and word == word.strip()
        if not is_known(word) and plain and word not in options.values():
            told = _loose(word, options)
            findings += told
            # what a branch of the script sets is read with each branch
            unset = "under a condition" not in shown_value(word)
            missing = ALL_OPTIONS if unset and any(f.kind == "unknown" for f in told) else missing
    return missing


def _loose(word: str, options: Mapping[str, str]) -> list[Finding]:
    inside = any(word in value for value in options.values())
    if inside:
        return []
    if "$@" in word:
        return [Finding("note", "arguments of the script may add options: read without any")]
    what = f"{shown_value(word)} stands among the arguments and cannot be determined: it may hold options"
    return [Finding("unknown", what, legal=("write its value in its place",))]


def _marks(words: Iterable[str]) -> int:
    names = {
        word.split("=")[0].lstrip("-").replace("-", "_") for word in words if word.startswith("-")
    }
    return sum(mark in names for mark in _MARKS)


def _from_variables(script: Script) -> tuple[str, ...]:
    """The words of all variables that hold options."""
    found: list[str] = []
    for value in script.variables.values():
        words = list(value) if isinstance(value, tuple) else value.split()
        if sum(word.startswith("--") for word in words) > 1:
            found += words
    return tuple(found)


def _joined_layout(script: Script, index: int, findings: list[Finding]) -> tuple[str, ...]:
    """The words of a command. If an unquoted bar of a pipeline layout cut it, what follows is
    joined again, with a finding.
    """
    words, end = script.commands[index]
    option = "--pipeline-model-parallel-layout"
    cut = end == "|" and len(words) > 1 and words[-2] == option
    bars = option in words and "|" in words
    if not cut and not bars:
        return words
    pieces = list(words)
    at = index
    while cut and script.commands[at][1] == "|" and at + 1 < len(script.commands):
        at += 1
        following = script.commands[at][0]
        pieces[-1] += "|" + following[0]
        pieces += following[1:]
        if len(following) > 1:
            break
    if bars:
        start = pieces.index(option) + 1
        stop = start
        while stop < len(pieces) and not pieces[stop].startswith("--"):
            stop += 1
        pieces[start:stop] = ["".join(pieces[start:stop])]
    layout = pieces[pieces.index(option) + 1]
    findings.append(Finding("refused", f"the layout {layout} is not quoted: the shell takes | for a pipe, and cuts the command there",
                            legal=(f"{option} '{layout}'",)))  # fmt: skip
    return tuple(pieces)


_DEGREES = {
    "tp": "tensor_model",
    "pp": "pipeline_model",
    "cp": "context_parallel",
    "ep": "expert_model",
    "dp": "data_parallel",
}
"""How the options of degrees begin."""


def _contradicting_names(text: str, script: Script, job: Job) -> list[Finding]:
    """Findings about names and comments that state another degree than the options, such as
    `JOB=llama-tp8-pp4` or `# TP=8`.
    """
    found: list[Finding] = []
    layout = job.layout
    open_options = [f.what.partition(" is ")[0] for f in job.findings if f.kind == "unknown"]
    states = {
        name: None if any(o.startswith(option) for o in open_options) else getattr(layout, name)
        for name, option in _DEGREES.items()
    }
    places = [(f"the value of {name}", v) for name, value in script.variables.items()
              for v in ([value] if isinstance(value, str) else value) if is_known(v)]  # fmt: skip
    places += [
        ("a comment", line.strip()) for line in re.findall(r"(?:^|\s)#(?!!|SBATCH)([^\n]*)", text)
    ]
    for where, words in places:
        for name, number in re.findall(
            r"(?:^|[^a-z0-9])(tp|pp|cp|ep|dp)[-_ ]?(?:size)?[ =:]*(\d{1,4})(?![\d.])", words, re.I
        ):
            actual = states[name.lower()]
            if actual is not None and actual != int(number) and not re.match(r"\s*-", words):
                found.append(Finding("contradiction", f"{where} says {name.lower()}={number} ({words[:60]!r}), the options say "
                                     f"{actual}: the options count"))  # fmt: skip
    return found[:8]
