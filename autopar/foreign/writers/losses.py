"""What of a job the text of another framework does not say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

from autopar.errors import AutoparError
from autopar.foreign.frameworks.unmodelled import whole_job
from autopar.foreign.job import Exported, Facts, Job
from autopar.foreign.target import SourceFile, Target
from autopar.ir.layout import unlike
from autopar.ir.model_shape import ModelShape

_MODEL = "the model"
_BATCHES = ("micro_batch", "global_batch", "accumulation", "batch", "micro_batches")
_WORDS = {
    "precision": "precision",
    "fp8": "fp8 products",
    "grads": "the dtype of gradients",
    "dp_overlap": "gradients reduced beside compute",
    "tp_overlap": "tensor-parallel communication beside compute",
    "pp_overlap": "messages of the pipeline beside compute",
    "compile": "torch.compile",
    "optimizer": "the optimizer",
    "dropout": "dropout",
    "fused_loss": "a fused loss",
    "fused_accumulation": "gradients added in the product",
    "recompute": "recomputation",
    "recompute_layers": "layers of a stage that are computed again",
    "schedule": "the schedule of the pipeline",
    "sequence_parallel": "sequence parallelism over tp",
    "offload": "offloading",
    "copies": "copies of what is shared out",
}
"""Facts and fields of a layout, in words."""
_SAID = {
    **dict.fromkeys(_BATCHES, ("batches",)),
    **dict.fromkeys((f.name for f in fields(ModelShape)), (_MODEL,)),
    "seq": ("sequences of",),
    "shape": (_MODEL,),
}
"""The words by which writers name what they leave out, where those are not of `_WORDS`."""


def lost(target: Target, job: Job, written: Exported) -> tuple[str, ...]:
    """What of a job the text that was written for it does not say, one phrase each, without what the
    writer names itself. Raises AutoparError if the text says other degrees, batches or ZeRO stages,
    cannot be read, or is refused by the framework.
    """
    again = whole_job(target.read, SourceFile(written.text, written.name))
    gpus = job.gpus or job.layout.least_gpus
    open_fields = again.unknown
    if not set(_BATCHES).isdisjoint(open_fields):
        again = again.with_batches(job.layout.micro_batch, job.layout.batch_on(gpus))
    known = replace(again, shape=job.shape, seq=again.seq or job.seq, gpus=gpus)
    if refused := [f for f in target.refusals(known, gpus) if f.kind == "refused"]:
        raise AutoparError(f"{target.title} refuses what would be written: {refused[0]}")
    phrases = [
        *_of_layout(target, job, again),
        *_of_facts(job.facts, again.facts),
        *_of_model(job, again),
        *(("part", f"{part}: what is written starts it too") for part in again.unmodelled),
    ]
    named = {name for name, _ in phrases}
    phrases += [
        (name, f"{_WORDS.get(name, name)}: what is written leaves it open")
        for name in open_fields
        if name not in named
    ]
    said = " ".join(written.losses)
    return tuple(dict.fromkeys(text for name, text in phrases if not _is_said(name, said)))


def _is_said(name: str, said: str) -> bool:
    """Whether a writer names a field among what its text does not say."""
    return any(word in said for word in _SAID.get(name, (_WORDS.get(name, ""),)) if word)


def _of_layout(target: Target, job: Job, again: Job) -> Iterator[tuple[str, str]]:
    by, gpus = job.layout, job.gpus or job.layout.least_gpus
    for name in unlike(again.layout, by, gpus):
        if name not in _WORDS:
            raise AutoparError(f"{target.title} cannot say {name}={getattr(by, name, '')} here")
        yield name, f"{_WORDS[name]}: {getattr(by, name)}"


def _of_facts(facts: Facts, again: Facts) -> Iterator[tuple[str, str]]:
    """What a job says of precision and software, and its text does not, or says otherwise. What is
    off may be left out, and Adam, which is the default.
    """
    for name in (f.name for f in fields(Facts)):
        before, after = getattr(facts, name), getattr(again, name)
        if before == "adam" and after is None:
            continue
        if before != after and (before or (before is not None and after)):
            yield name, f"{_WORDS[name]}: {_shown(before)}"


def _shown(value: object) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _of_model(job: Job, again: Job) -> Iterator[tuple[str, str]]:
    if job.seq and again.seq != job.seq:
        yield "seq", f"sequences of {job.seq} tokens"
    names = [f.name for f in fields(job.shape) if getattr(job.shape, f.name)]
    names = [name for name in names if getattr(again.shape, name) != getattr(job.shape, name)]
    if not names:
        return
    if not again.shape.layers:
        yield "shape", _MODEL
    else:
        yield "shape", f"{_MODEL}'s {', '.join(names)}"
