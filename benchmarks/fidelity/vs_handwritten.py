"""The engine against hand-written training loops (`handwritten.py`), on CPU processes.

    python benchmarks/fidelity/vs_handwritten.py [--cases DDP "tensor parallel" ...] [--rounds 7] [--steps 20] [--json] [--output FILE]

Both sides have the same initial weights, optimizer, batches, precision, threads and processes, and
the layout is pinned.  They alternate step by step, so that other work of the machine disturbs both.
A step lasts as long as its slowest rank. A round is the mean of its steps, and a ratio is that of
the medians of the rounds.  The first case measures a hand-written loop against itself: the noise.
`CPU` is the ratio of processor seconds of all ranks, which other programs on the same cores disturb
little, and which knows nothing of waiting.  Exit code 1 if the losses of the two sides differ in
any step, or a ratio is above 1.05.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import statistics
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

if not __package__:  # as a script
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from torch import Tensor

from autopar import api
from autopar.ir.plan import Plan
from autopar.ir.traced import TracedModel
from autopar.models import parse_model
from autopar.runtime.engine import Engine
from autopar.runtime.ranks.launch import WorkerPool
from benchmarks.fidelity.handwritten import (
    Step,
    data_parallel,
    fully_sharded,
    pipeline,
    tensor_parallel,
)
from benchmarks.fidelity.measured_steps import RANKS, cpu_name, versions
from benchmarks.tasks import PlanUnder, Task

MOST = 1.05
"""The most that a step of the engine may take, in steps of the hand-written loop."""
LOSS_TOLERANCE = 1e-4
"""The largest relative difference of two fp32 losses. Adam amplifies rounding: one device in
another order of sums differs from itself by as much.
"""
OPTIMIZERS = {
    "adamw": functools.partial(torch.optim.AdamW, lr=3e-4, fused=True),
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
}


@dataclass(frozen=True, slots=True)
class Work:
    """What both sides train: a Llama, on `rows` sequences of `seq` tokens a step. A pipeline cuts
    them into `micro_batches`. `optimizer` is a key of `OPTIMIZERS`.
    """

    model: str
    rows: int
    seq: int
    micro_batches: int
    optimizer: str


@dataclass(frozen=True, slots=True)
class Case:
    """A hand-written loop and the pins of the same layout in autopar. If `pin` is None, the loop is
    measured against itself.
    """

    name: str
    pin: dict[str, Any] | None

    @property
    def layout(self) -> str:
        return (
            "itself"
            if self.pin is None
            else " ".join(f"{key}={str(value).lower()}" for key, value in self.pin.items())
        )


CASES = (
    Case("DDP, again", None),
    Case("DDP", {"dp": 4, "zero": 0}),
    Case("FSDP2 without resharding", {"dp": 4, "zero": 2}),
    Case("FSDP2", {"dp": 4, "zero": 3}),
    Case("DTensor TP", {"tp": 4, "sequence_parallel": False}),
    Case("DTensor TP, sequences", {"tp": 4, "sequence_parallel": True}),
    Case("Megatron TP", {"tp": 4, "sequence_parallel": True, "recompute": "gather"}),
    Case("pipelining 1F1B", {"pp": 4, "schedule": "1f1b", "stages": "even"}),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """The results of one case.

    Attributes:
        name, layout: the hand-written loop, and autopar's pins.
        handwritten_s, autopar_s: seconds of a step, the median over rounds.
        low, high: the least and the greatest ratio (autopar / hand-written) of a round.
        cpu_ratio: the ratio of processor seconds of all ranks.
        loss_difference: the largest relative difference of the two losses of a step.
    """

    name: str
    layout: str
    handwritten_s: float
    autopar_s: float
    low: float
    high: float
    cpu_ratio: float
    loss_difference: float

    @property
    def ratio(self) -> float:
        return self.autopar_s / self.handwritten_s


# ----------------------------------------------------------------------------------------------------------------- on the ranks

_sides: list[
    tuple[Step, list[Mapping[str, Tensor]]]
] = []  # of this rank: the hand-written loop and the engine, with their batches


def _build(rank: int, case: Case, work: Work, plan: str) -> None:
    """Fill this rank's `_sides` with (step function, batches) of the hand-written loop and of the
    engine under `plan` (JSON text); for a case without pins, of the loop twice.
    """
    warnings.simplefilter("ignore")
    _sides.clear()
    gc.collect()
    generator = torch.Generator().manual_seed(1)
    tokens = [
        torch.randint(0, parse_model(work.model).vocab, (work.rows, work.seq), generator=generator)
        for _ in range(4)
    ]
    batches = [{"input_ids": t, "labels": t.clone()} for t in tokens]
    _sides.append(_by_hand(rank, case, work, batches))
    if case.pin is None:
        _sides.append(_by_hand(rank, case, work, batches))
        return
    engine = Engine(
        _model(work),
        _traced(work),
        Plan.from_json(plan),
        OPTIMIZERS[work.optimizer],
        None,
        None,
        "cpu",
    )
    _sides.append((engine.step, [engine.local_batch(batch) for batch in batches]))


def _model(work: Work) -> torch.nn.Module:
    torch.manual_seed(0)
    return parse_model(work.model).build("cpu")


@functools.lru_cache(1)
def _traced(work: Work) -> TracedModel:
    return api.trace(
        parse_model(work.model).build("meta"),
        parse_model(work.model).example_inputs(work.rows, work.seq),
        precision="fp32",
    )


def _by_hand(
    rank: int, case: Case, work: Work, batches: list[dict[str, Tensor]]
) -> tuple[Step, list[Mapping[str, Tensor]]]:
    model, optimizer, pin = (
        _model(work),
        OPTIMIZERS[work.optimizer],
        case.pin or {"dp": 4, "zero": 0},
    )
    if "tp" in pin:
        megatron = pin.get("recompute") == "gather"
        return tensor_parallel(model, optimizer, pin["sequence_parallel"], megatron), batches
    if "pp" in pin:
        cuts = [len(model.layers) * stage // RANKS for stage in range(RANKS + 1)]
        return pipeline(model, optimizer, cuts, work.micro_batches), batches
    step = (
        data_parallel(model, optimizer)
        if pin["zero"] == 0
        else fully_sharded(model, optimizer, reshard=pin["zero"] == 3)
    )
    return step, [
        {name: tensor.chunk(RANKS)[rank] for name, tensor in batch.items()} for batch in batches
    ]


Numbers = tuple[list[float], list[float]]
"""One number for each step of the hand-written loop, and one for each step of the engine."""


def _round(
    rank: int, steps: int, first: int
) -> tuple[Numbers, Numbers, tuple[list[float | None], list[float | None]]]:
    """Run `steps` steps of each side, alternating. Returns seconds, processor seconds and losses,
    each as (hand-written, engine) lists with one entry a step. `first` is the number of steps
    before.
    """
    seconds, worked, losses = ([], []), ([], []), ([], [])
    for number in range(first, first + steps):
        for side in (0, 1) if number % 2 else (1, 0):
            step, batches = _sides[side]
            batch = batches[number % len(batches)]
            dist.barrier()
            start, start_cpu = time.perf_counter(), time.process_time()
            loss = step(batch)
            seconds[side].append(time.perf_counter() - start)
            worked[side].append(time.process_time() - start_cpu)
            losses[side].append(None if loss is None else float(loss))
    return seconds, worked, losses


# ----------------------------------------------------------------------------------------------------------------- in the parent


def planner(work: Work) -> PlanUnder:
    return Task(work.model, f"cpu:{RANKS}", work.rows, work.seq).planner(precision="fp32")


def measure(
    pool: WorkerPool, case: Case, work: Work, plan_under: PlanUnder, rounds: int, steps: int
) -> Measured:
    """Measure one case: `rounds` rounds of `steps` steps of each side, after a shorter round as
    warm-up.
    """
    plan = ""
    if case.pin is not None:
        rows = work.rows // (
            case.pin.get("dp", 1) * (work.micro_batches if "pp" in case.pin else 1)
        )
        plan = plan_under({"micro_batch": rows, "recompute": "none"} | case.pin).to_json()
    pool.run(_build, case, work, plan, timeout_s=900)
    times, worked = ([], []), ([], [])
    differences, done = [], 0
    for turn in range(rounds + 1):
        count = steps if turn else max(2, steps // 4)
        found = pool.run(_round, count, done, timeout_s=900)
        done += count
        for side in (0, 1):
            if turn:
                times[side].append(
                    statistics.mean(max(rank[0][side][k] for rank in found) for k in range(count))
                )
                worked[side].append(sum(sum(rank[1][side]) for rank in found))
        for k in range(count):
            by_hand, engine = (_mean([rank[2][side][k] for rank in found]) for side in (0, 1))
            differences.append(abs(engine - by_hand) / abs(by_hand))
    ratios = [b / a for a, b in zip(*times, strict=True)]
    by_hand, engine = map(statistics.median, times)
    cpu_ratio = statistics.median(worked[1]) / statistics.median(worked[0])
    worst = float(torch.tensor(differences).max())  # a NaN stays one
    return Measured(
        case.name, case.layout, by_hand, engine, min(ratios), max(ratios), cpu_ratio, worst
    )


def _mean(losses: list[float | None]) -> float:
    """The mean of the losses that are not None (ranks without a loss give None)."""
    return statistics.mean(loss for loss in losses if loss is not None)


def table(found: Sequence[Measured]) -> str:
    lines = [
        f"{'by hand':26s} {'autopar':34s} {'by hand':>10s} {'autopar':>10s} {'ratio':>6s} {'rounds':>13s} {'CPU':>6s} {'loss':>8s}"
    ]
    for one in found:
        lines.append(
            f"{one.name:26s} {one.layout:34s} {1e3 * one.handwritten_s:7.1f} ms {1e3 * one.autopar_s:7.1f} ms {one.ratio:6.3f} "
            f"{one.low:6.3f}-{one.high:6.3f} {one.cpu_ratio:6.3f} {one.loss_difference:8.1e}"
        )
    return "\n".join(lines)


def verdict(found: Sequence[Measured]) -> tuple[str, bool]:
    """(text that sums up the table, whether losses agree and no ratio is above MOST)."""
    wrong = [one.name for one in found if not one.loss_difference <= LOSS_TOLERANCE]
    if wrong:
        return f"LOSSES DIFFER by more than {LOSS_TOLERANCE:g}: {', '.join(wrong)}", False
    noise = [one.ratio for one in found if one.layout == "itself"]
    stated = f"; a loop against itself is {noise[0]:.3f}" if noise else ""
    slow = [
        f"{one.name} ({one.ratio:.3f})"
        for one in found
        if one.layout != "itself" and one.ratio > MOST
    ]
    if slow:
        return f"above {MOST}: {', '.join(slow)}{stated}", False
    worst = max((one.ratio for one in found if one.layout != "itself"), default=float("nan"))
    return f"at most {worst:.3f} of the hand-written step (target {MOST}){stated}", True


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--cases",
        nargs="+",
        choices=[case.name for case in CASES],
        default=[case.name for case in CASES],
    )
    parser.add_argument(
        "--model", default="llama:layers=8,hidden=256,heads=8,kv_heads=4,ffn=688,vocab=1024,seq=128"
    )
    parser.add_argument("--rows", type=int, default=8, help="sequences of a step (default 8)")
    parser.add_argument("--seq", type=int, default=128, help="tokens of a sequence (default 128)")
    parser.add_argument("--micro-batches", type=int, default=8, help="of the pipeline (default 8)")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--steps", type=int, default=20, help="alternating steps of a round (default 20)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON; progress goes to stderr")
    parser.add_argument("--output", help="write the table to a file as well")
    args = parser.parse_args(arguments)
    if args.rounds < 1 or args.steps < 1:
        parser.error(f"--rounds {args.rounds} and --steps {args.steps} must be at least 1")
    torch.set_num_threads(1)
    work = Work(args.model, args.rows, args.seq, args.micro_batches, args.optimizer)
    found, plan_under = [], planner(work)
    with WorkerPool(RANKS) as pool:
        for case in CASES:
            if case.name in args.cases:
                found.append(measure(pool, case, work, plan_under, args.rounds, args.steps))
                print(table(found[-1:]).splitlines()[1], file=sys.stderr, flush=True)
    words, good = verdict(found)
    lines = [versions(), f"{RANKS} gloo processes on {cpu_name()}, one thread each; fp32, {args.optimizer}",
             f"{args.model}: {args.rows} sequences of {args.seq} a step; {args.rounds} rounds of {args.steps} steps", "",
             table(found), "", words]  # fmt: skip
    if args.json:
        rows = [asdict(one) | {"ratio": one.ratio} for one in found]
        print(
            json.dumps(
                {
                    "versions": lines[0],
                    "machine": lines[1],
                    "work": asdict(work),
                    "rows": rows,
                    "verdict": words,
                    "met": good,
                }
            )
        )
    else:
        print("\n".join(lines))
    if args.output:
        Path(args.output).write_text("\n".join(lines) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
