"""Questions that practitioners asked in public, as the planner answers them by default.

    python benchmarks/search/expert_questions.py [--only NAME ...] [--time-limit 60] [--output FILE]

The questions are in expert_questions.yaml, beside this file.  For each it prints its kind, the layout
of a published recipe, the plan, how simple it is, the memory that stays free, and the gap.  Then
comes the best plan of each other family of layouts.  Plans that take more than 92 % of the memory
are listed at the end, and those with a simpler or faster runner-up; exit code 1 if there are any.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import yaml
from autopar_cost_models.checks import is_whole, nearest

if not __package__:  # as a script
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from autopar import api
from autopar.errors import AutoparError, shown
from autopar.explaining.runners_up import (
    none_words,
    preference_words,
    simplicity_of_entry,
    simplicity_of_plan,
    why,
)
from autopar.ir.cluster import ClusterSpec
from autopar.ir.cluster_parts import check_keys
from autopar.ir.plan import Plan
from autopar.ir.yaml_text import read_yaml
from autopar.models import parse_model
from autopar.request.options import TOLERANCE
from autopar.request.pins import Pins
from autopar.request.plan_request import PlanRequest, choose_precision
from autopar.text.device_words import fullest_rank, misfit_chance
from autopar.text.plan_words import choice_words, short_words
from autopar.text.units import gap_words, gib, ms, percent

MOST_FILLED = 0.92
"""The largest share of a device's memory that a default plan may take."""

QUESTIONS_FILE = Path(__file__).with_suffix(".yaml")

KINDS = (
    "dense pre-training", "vision", "diffusion", "embeddings", "long context", "consumer GPUs",
    "Ethernet", "few nodes", "MoE", "LoRA and fine-tuning", "405B",
)  # fmt: skip
"""What questions are about."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question: `model` on `cluster`, with `global_batch` rows, of `seq` tokens each.

    Args:
        name: what `--only` takes.
        kind: one of `KINDS`.
        model: what `autopar.models.parse_model` reads. It may be a model that autopar refuses.
        cluster: `DEVICE NODESxDEVICES`, another text that autopar reads, or the keys of a cluster
            file.
        global_batch: rows of a step: sequences, images or recordings.
        source: the public thread or page. It says which values the source leaves open.
        seq: tokens of a row. None: the length that the model was designed for.
        published: the layout that the source recommends or measured, '' if it has none.
        left_out: what the source asks and the answer leaves out, '' if nothing.

    Raises AutoparError for a field of the wrong type or value.
    """

    name: str
    kind: str
    model: str
    cluster: str | Mapping[str, Any]
    global_batch: int
    source: str
    seq: int | None = None
    published: str = ""
    left_out: str = ""

    def __post_init__(self) -> None:
        what = f"question {shown(self.name)}"
        for key in ("name", "kind", "model", "source", "published", "left_out"):
            value = getattr(self, key)
            if not isinstance(value, str) or (key in _REQUIRED and not value):
                raise AutoparError(f"{what}: {key} is {shown(value)}; it must be a text")
        if self.kind not in KINDS:
            near = nearest(self.kind, list(KINDS))
            raise AutoparError(f"{what}: unknown kind {shown(self.kind)}; {near}")
        if not isinstance(self.cluster, str | Mapping):
            raise AutoparError(
                f"{what}: cluster is {shown(self.cluster)}; it must be a text or keys and values"
            )
        for key, value in (("global_batch", self.global_batch), ("seq", self.seq)):
            if not is_whole(value) and not (key == "seq" and value is None):
                raise AutoparError(f"{what}: {key}={shown(value)} must be a whole number >= 1")

    def rows(self) -> str:
        """The rows of a step as text."""
        return f"{self.global_batch:,} rows" + (f" of {self.seq:,} tokens" if self.seq else "")


_FIELDS = tuple(field.name for field in fields(Question))
_REQUIRED = tuple(f.name for f in fields(Question) if f.default is MISSING)


def read_questions(path: Path = QUESTIONS_FILE) -> tuple[Question, ...]:
    """The questions of a YAML file: a list of mappings with the fields of `Question`.

    Raises AutoparError if the file is not such a list, or has an unknown, missing or wrong field, or
    a name twice. The message names the question.
    """
    try:
        data = read_yaml(path.read_text())
    except yaml.YAMLError as error:
        raise AutoparError(
            f"{path.name} is not valid YAML: {' '.join(str(error).split())}"
        ) from None
    if not isinstance(data, list) or not all(isinstance(entry, dict) for entry in data):
        raise AutoparError(
            f"{path.name} must be a list of questions, each with {', '.join(_REQUIRED)}"
        )
    for number, entry in enumerate(data, 1):
        check_keys(f"{path.name}: question {number}", entry, _FIELDS, _REQUIRED)
    questions = tuple(Question(**entry) for entry in data)
    names = [question.name for question in questions]
    if twice := {name for name in names if names.count(name) > 1}:
        raise AutoparError(f"{path.name}: {', '.join(sorted(twice))} is asked twice")
    return questions


QUESTIONS = read_questions()


def cluster_of(question: Question) -> ClusterSpec:
    """The cluster of a question. Raises AutoparError if it is not known, or is of several kinds of
    devices.
    """
    if not isinstance(question.cluster, str):
        what = f"question {question.name!r}"
        return ClusterSpec.from_data(question.cluster, what, question.name).one_kind
    device, _, shape = question.cluster.partition(" ")
    if shape:
        return ClusterSpec.make(device, *map(int, shape.split("x")), name=question.cluster)
    return ClusterSpec.parse(question.cluster).one_kind


@dataclass(frozen=True, slots=True)
class Answer:
    """What the planner says: a `plan`, or None and the `reason`. `traced_s` and `search_s` are
    seconds of wall time.
    """

    question: Question
    cluster: ClusterSpec
    plan: Plan | None
    reason: str
    traced_s: float
    search_s: float

    def broken(self) -> Iterator[str]:
        """The rules that the plan breaks, as text: on memory, and on plans of other families that
        are simpler within the tolerance, or faster by more.
        """
        if self.plan is None:
            return
        own, own_s = simplicity_of_plan(self.plan), self.plan.predicted.step_time_s
        for entry in self.plan.certificate.runners_up:
            if entry["time_s"] is None:
                continue
            if (1 + TOLERANCE) * entry["time_s"] < own_s:
                yield f"{entry['family']} is faster by {percent(1 - entry['time_s'] / own_s)}"
            if entry["time_s"] < own_s and simplicity_of_entry(entry) < own:
                yield f"{entry['family']} is simpler and no slower"
        peak, capacity = fullest_rank(self.plan, self.cluster)
        if peak > MOST_FILLED * capacity:
            yield f"{percent(peak / capacity)} of the memory is taken"

    def lines(self) -> Iterator[str]:
        """The answer as lines of text."""
        q = self.question
        yield f"{q.name} [{q.kind}]: {q.rows()} ({q.source})"
        yield f"  published   {q.published or '-'}"
        if q.left_out:
            yield f"  left out    {q.left_out}"
        if self.plan is None:
            yield f"  no plan     {self.reason.splitlines()[0]}"
            return
        plan, proof = self.plan, self.plan.certificate
        peak, capacity = fullest_rank(plan, self.cluster)
        yield f"  plan        {short_words(plan)}: {ms(plan.predicted.step_time_s)}"
        yield f"  simplicity  {preference_words(plan)}"
        chance = misfit_chance(plan, self.cluster)
        risk = "" if chance is None else f", {percent(chance)} not to fit"
        yield f"  free        {gib(capacity - peak)} of {gib(capacity)}, {percent(1 - peak / capacity)}{risk}"
        yield f"  gap         {gap_words(proof.gap)} in {self.search_s:.0f} s, {len(proof.meshes):,} candidates"
        for entry in proof.runners_up:
            if entry["time_s"] is None:
                yield f"    {entry['family']}: {none_words(entry)}"
                continue
            more = 100 * (entry["time_s"] / plan.predicted.step_time_s - 1)
            yield f"    {entry['family']}: {choice_words(entry)}, {more:+.1f} % ({why(plan, entry)})"


def answer(question: Question, time_limit_s: float) -> Answer:
    """Plans a question with the defaults of the command line, and with runners-up. Raises
    AutoparError if the cluster is not known.
    """
    start = time.perf_counter()
    cluster = cluster_of(question).kept_free()
    traced_s = 0.0
    try:
        spec = parse_model(question.model)
        traced = api.trace_spec(spec, question.seq or spec.max_seq or 512)
        request = PlanRequest(cluster, question.global_batch, Pins(), choose_precision(cluster), spec.name,
                              model_text=question.model, tolerance=TOLERANCE, runners_up=True)  # fmt: skip
        traced_s, start = time.perf_counter() - start, time.perf_counter()
        plan, reason = api.plan_traced(traced, request, time_limit_s), ""
    except AutoparError as error:
        plan, reason = None, str(error)
    return Answer(question, cluster, plan, reason, traced_s, time.perf_counter() - start)


def main(arguments: Sequence[str] | None = None) -> int:
    names = [question.name for question in QUESTIONS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds of a search")
    parser.add_argument("--output", help="write what is printed to a file as well")
    args = parser.parse_args(arguments)
    if unknown := set(args.only) - set(names):
        parser.error(f"--only: {', '.join(sorted(unknown))} is not known")
    warnings.simplefilter("ignore")
    from benchmarks.fidelity.measured_steps import cpu_name, versions

    lines: list[str] = []

    def say(text: str) -> None:
        lines.append(text)
        print(text, flush=True)

    say(f"{versions()}\non {cpu_name()}; at most {args.time_limit:g} s of search\n")
    broken = []
    for question in QUESTIONS:
        if question.name in args.only:
            found = answer(question, args.time_limit)
            say("\n".join(found.lines()) + "\n")
            broken += [f"{question.name}: {rule}" for rule in found.broken()]
    say("\n".join(broken) if broken else "no plan breaks a rule")
    if args.output:
        Path(args.output).write_text("\n".join(lines) + "\n")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
