"""Questions that practitioners asked in public, as the planner answers them by default.

    python benchmarks/search/expert_questions.py [--only NAME ...] [--time-limit 60] [--output FILE]

For each question it prints the plan, how simple it is, the memory that stays free, and the gap. Then
come the best plan of each other family of layouts, and the layout of a published recipe.  Plans
that take more than 92 % of the memory are listed at the end, and those with a simpler or faster
runner-up; exit code 1 if there are any.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

if not __package__:  # as a script
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from autopar import api
from autopar.errors import AutoparError
from autopar.explaining.runners_up import (
    preference_words,
    simplicity_of_entry,
    simplicity_of_plan,
    why,
)
from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan import Plan
from autopar.models import parse_model
from autopar.request.pins import Pins
from autopar.request.plan_request import TOLERANCE, PlanRequest
from autopar.text.device_words import fullest_rank
from autopar.text.plan_words import choice_words, short_words
from autopar.text.units import gap_words, gib, ms, percent

MOST_FILLED = 0.92
"""The largest share of a device's memory that a default plan may take."""

_NEMO = "NVIDIA-NeMo/Megatron-Bridge docs/performance-summary.md, 25.11"
_TITAN = "pytorch/torchtitan benchmarks/llama3_h100_202412_torchtitan.md"
_BRIDGE_MOE = "docs.nvidia.com/nemo/megatron-bridge, MoE hardware configuration reference"


@dataclass(frozen=True, slots=True)
class Question:
    """A question: `model` on `cluster`, with `global_batch` sequences of `seq` tokens.

    `source` is the public thread or page. `published` is the layout that it recommends or measured,
    '' if it has none.
    """

    name: str
    model: str
    cluster: str
    global_batch: int
    seq: int
    source: str
    published: str = ""


# models without a name of their own
_TINYLLAMA = "llama:layers=22,hidden=2048,heads=32,kv_heads=4,ffn=5632,vocab=32000,seq=2048"
_OLMO = "llama:layers=16,hidden=2048,heads=16,ffn=8192,vocab=50304,seq=2048,tied=true"
_QWEN2_7B = "llama:layers=28,hidden=3584,heads=28,kv_heads=4,ffn=18944,vocab=152064,seq=131072"
_QWEN2_72B = "llama:layers=80,hidden=8192,heads=64,kv_heads=8,ffn=29568,vocab=152064,seq=32768"
_BLOOM_7B = "gpt:layers=30,hidden=4096,heads=32,vocab=250880,seq=2048,positions=alibi,tied=true"

QUESTIONS = (
    Question("tinyllama on 8 A100-40G", _TINYLLAMA, "a100-40g:8", 512, 2048,
             "jzhang38/TinyLlama issue 173", "FSDP; asked why not DDP"),
    Question("olmo-1b on 4 A100", _OLMO, "a100-80g:4", 256, 2048,
             "allenai/OLMo issue 762", "DDP, 4.6 x as fast as FSDP"),
    Question("gpt2-xl on 32 H200", "gpt2-xl", "dgx-h200:4", 512, 1024,
             "karpathy/nanoGPT pull request 632", "FSDP; asked why not DDP"),
    Question("vit-huge on 8 A100-40G", "vit-h-14", "a100-40g:8", 4096, 257,
             "jeonsworld/ViT-pytorch issue 14", "DDP"),
    Question("llama2-7b on 8 RTX 3090", "llama2-7b", "rtx3090:8", 64, 2048,
             "meta-llama/llama-cookbook issue 100", "FSDP, out of memory"),
    Question("llama2-7b on 8 A100-40G", "llama2-7b", "a100-40g:8", 128, 2048,
             "tatsu-lab/stanford_alpaca issue 280", "FSDP with offload"),
    Question("gpt2-xl on 2 RTX 4090", "gpt2-xl", "rtx4090:2", 64, 1024,
             "huggingface/transformers issue 9371", "DDP"),
    Question("bloom-7b on 2 x 4 A100", _BLOOM_7B, "a100-40g 2x4", 64, 2048,
             "pytorch/pytorch issue 102434", "FSDP, slow between nodes"),
    Question("llama3-8b on 8 H100", "llama3-8b", "dgx-h100:1", 128, 8192, _NEMO, "FSDP, micro-batch 1 (fp8)"),
    Question("llama3-8b on 128 H100", "llama3-8b", "dgx-h100:16", 256, 8192, _TITAN, "FSDP, micro-batch 2"),
    Question("llama3-8b on 8 MI300X", "llama3-8b", "mi300x-8:1", 64, 8192,
             "ROCm/TransformerEngine issue 79", "FSDP"),
    Question("llama3-8b, 128k on 8 H100", "llama3-8b", "dgx-h100:1", 8, 131072, _TITAN, "FSDP 2, CP 4"),
    Question("qwen2-7b, 128k on 8 A100", _QWEN2_7B, "a100-80g:8", 8, 131072,
             "hiyouga/LlamaFactory issues 5720 and 5024", ""),
    Question("llama3-70b on 16 A100", "llama3-70b", "dgx-a100-80g:2", 64, 4096,
             "InternLM/xtuner issue 842", "ZeRO-3, out of memory"),
    Question("llama3-70b on 64 H100", "llama3-70b", "dgx-h100:8", 128, 8192, _NEMO, "TP 4, PP 8, VP 5 (fp8)"),
    Question("qwen2-72b, 32k on 96 A100", _QWEN2_72B, "dgx-a100-80g:12", 96, 32768,
             "hiyouga/LlamaFactory issue 5815", ""),
    Question("llama3-405b on 1,024 H100", "llama3-405b", "dgx-h100:128", 512, 8192, _NEMO,
             "TP 8, PP 8, CP 2, VP 8 (fp8)"),
    Question("mixtral on 16 H100", "mixtral-8x7b", "dgx-h100:2", 128, 4096,
             "NVIDIA/Megatron-LM issue 756", "EP 8"),
    Question("qwen3-30b-a3b, 32k on 16 H100", "qwen3-30b-a3b", "dgx-h100:2", 64, 32768,
             "modelscope/ms-swift issue 5530", ""),
    Question("qwen3-235b on 256 H100", "qwen3-235b-a22b", "dgx-h100:32", 2048, 4096, _BRIDGE_MOE,
             "TP 2, PP 8, VP 4, EP 32"),
    Question("deepseek-v3 on 256 H100", "deepseek-v3", "dgx-h100:32", 2048, 4096, _BRIDGE_MOE,
             "TP 2, PP 8, VP 4, EP 64"),
    Question("deepseek-v3 on 2,048 H100", "deepseek-v3", "dgx-h100:256", 8192, 4096, _BRIDGE_MOE,
             "TP 2, PP 8, VP 4, EP 64"),
    Question("llama3-70b on 64 GB200", "llama3-70b", "gb200-nvl72:1", 256, 8192, _NEMO, "FSDP, micro-batch 2 (fp8)"),
)  # fmt: skip


def cluster_of(text: str) -> ClusterSpec:
    """The cluster of a question: `DEVICE NODESxDEVICES`, or what autopar parses."""
    device, _, shape = text.partition(" ")
    if shape:
        return ClusterSpec.make(device, *map(int, shape.split("x")), name=text)
    return ClusterSpec.parse(text).one_kind


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
        yield f"{q.name}: {q.global_batch} sequences of {q.seq} tokens ({q.source})"
        yield f"  published   {q.published or '-'}"
        if self.plan is None:
            yield f"  no plan     {self.reason.splitlines()[0]}"
            return
        plan, proof = self.plan, self.plan.certificate
        peak, capacity = fullest_rank(plan, self.cluster)
        yield f"  plan        {short_words(plan)}: {ms(plan.predicted.step_time_s)}"
        yield f"  simplicity  {preference_words(plan)}"
        yield f"  free        {gib(capacity - peak)} of {gib(capacity)}, {percent(1 - peak / capacity)}"
        yield f"  gap         {gap_words(proof.gap)} in {self.search_s:.0f} s, {len(proof.meshes):,} candidates"
        for entry in proof.runners_up:
            if entry["time_s"] is None:
                yield f"    {entry['family']}: none fits"
                continue
            more = 100 * (entry["time_s"] / plan.predicted.step_time_s - 1)
            yield f"    {entry['family']}: {choice_words(entry)}, {more:+.1f} % ({why(plan, entry)})"


def answer(question: Question, time_limit_s: float) -> Answer:
    """Plans a question with the defaults of the command line, and with runners-up."""
    start = time.perf_counter()
    spec, cluster = parse_model(question.model), cluster_of(question.cluster).kept_free()
    traced = api.trace_spec(spec, question.seq)
    request = PlanRequest(cluster, question.global_batch, Pins(), "bf16", False, question.model,
                          tolerance=TOLERANCE, runners_up=True)  # fmt: skip
    traced_s, reason, plan = time.perf_counter() - start, "", None
    start = time.perf_counter()
    try:
        plan = api.plan_traced(traced, request, time_limit_s)
    except AutoparError as error:
        reason = str(error)
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
