"""Predicted against measured step time and peak memory of plans on one GPU.

    python benchmarks/fidelity/gpu_check.py [--cluster CLUSTER] [--rounds 5] [--compile MODE] [--fuse MODE]
                                             [--output FILE]

CLUSTER is of one device: `h100:1` of the catalogue, or a file that `autopar calibrate --nproc 1` wrote (default: calibrate here).  Each
of `CASES`, a model under pins of micro-batch and recomputation, is planned and trained with fused AdamW, in bf16 (on a CPU in fp32).  A
time is the median of the rounds after four steps of warm-up, by the device's clock.  Memory is the most that torch's allocator had
given out (on a GPU); it is compared with the prediction less what the cost model reserves for the context.  Prints a line a case, the
range of the ratios and Spearman's rank correlation.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

if not __package__:  # as a script
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from autopar import api
from autopar.calibrate.cluster import calibrate
from autopar.foreign.published.score import spearman
from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan import Plan
from autopar.models import parse_model
from autopar.request.software import Software
from benchmarks.fidelity.measured_steps import cpu_name, versions

GPT = "gpt:layers=12,hidden=1024,heads=16,vocab=50304,seq=1024"
LLAMA = "llama:layers=8,hidden=2048,heads=16,vocab=32000,seq=2048"
CASES: tuple[tuple[str, int, int, Mapping[str, Any]], ...] = (  # model, sequences, positions, pins
    (GPT, 16, 1024, {"micro_batch": 1, "recompute": "none"}),
    (GPT, 16, 1024, {"micro_batch": 4, "recompute": "none"}),
    (GPT, 16, 1024, {"micro_batch": 16, "recompute": "none"}),
    (GPT, 16, 1024, {"micro_batch": 16, "recompute": "selective"}),
    (GPT, 16, 1024, {"micro_batch": 16, "recompute": "full"}),
    (LLAMA, 8, 2048, {"micro_batch": 1, "recompute": "none"}),
    (LLAMA, 8, 2048, {"micro_batch": 4, "recompute": "none"}),
    (LLAMA, 8, 2048, {"micro_batch": 8, "recompute": "full"}),
    ("gpt-tiny", 8, 64, {"micro_batch": 8, "recompute": "none"}),
    ("moe-tiny", 8, 64, {"micro_batch": 8, "recompute": "none"}),
)
WARM_UP = 4
"""Steps before the first that counts: torch.compile and its CUDA graphs need more than one."""
TINY = tuple(case for case in CASES if case[0].endswith("tiny"))


@dataclass(frozen=True, slots=True)
class Found:
    """The plan of a case and its measurements: median seconds of a step, peak bytes that the
    allocator had given out and had reserved (0 on a CPU).
    """

    model: str
    pins: Mapping[str, Any]
    plan: Plan
    time_s: float
    allocated: int
    reserved: int


def measured(
    model: str,
    rows: int,
    seq: int,
    pins: Mapping[str, Any],
    cluster: ClusterSpec,
    rounds: int,
    mode: str | None = None,
) -> Found:
    """Plan a case and train it for `rounds` steps after the warm-up. `rows` sequences of `seq`
    tokens are a step. `mode` is torch.compile's; None runs eagerly.
    """
    spec, device = parse_model(model), torch.device(cluster.device_type)
    precision = "fp32" if device.type == "cpu" else "bf16"
    batch = spec.example_inputs(rows, seq, "cpu")
    plan = api.plan(
        spec.build("meta"),
        cluster,
        batch,
        pin=dict(pins),
        precision=precision,
        software=Software(compiled=mode is not None),
    )
    engine = api.parallelize(
        spec.build("meta"),
        cluster,
        batch,
        lambda own: torch.optim.AdamW(own, 1e-4, fused=True),
        plan=plan,
        compile=mode is not None and {"mode": mode},
    )
    local, seconds = (
        engine.local_batch({name: tensor.to(device) for name, tensor in batch.items()}),
        [],
    )
    for turn in range(rounds + WARM_UP):
        if turn == WARM_UP and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        engine.step(local)
        seconds.append(engine.metrics.step_time_s)
    sizes = (
        (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
        if device.type == "cuda"
        else (0, 0)
    )
    del engine
    gc.collect()
    torch.compiler.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return Found(model, pins, plan, statistics.median(seconds[WARM_UP:]), *sizes)


def line(found: Found, reserved_bytes: int) -> str:
    predicted, words = (
        found.plan.predicted,
        " ".join(f"{key}={value}" for key, value in found.pins.items()),
    )
    text = f"{found.model.partition(':')[0]:10s} {words:34s} {1e3 * predicted.step_time_s:9.2f} ms {1e3 * found.time_s:9.2f} ms"
    text += f" {predicted.step_time_s / found.time_s:7.3f}"
    if not found.allocated:
        return text
    gib = [
        size / 2**30
        for size in (
            max(predicted.peak_memory_bytes) - reserved_bytes,
            found.allocated,
            found.reserved,
        )
    ]
    return f"{text}  {gib[0]:7.2f} GiB {gib[1]:7.2f} GiB {gib[0] / gib[1]:7.3f}  {gib[2]:7.2f}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--cluster", help="a cluster of one device (default: calibrate this machine)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="steps after the warm-up (default 5)")
    parser.add_argument(
        "--tiny", action="store_true", help="the small cases alone, as a CPU can train them"
    )
    parser.add_argument(
        "--compile",
        metavar="MODE",
        help="compile segments: a mode of torch.compile, such as default or reduce-overhead (CUDA graphs)",
    )
    parser.add_argument(
        "--fuse", choices=("off", "norms", "all"), default="off", help="the pin fuse"
    )
    parser.add_argument("--output", help="write what is printed to a file as well")
    args = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    cluster = ClusterSpec.parse(args.cluster) if args.cluster else calibrate(1)
    where = torch.cuda.get_device_name() if cluster.device_type == "cuda" else cpu_name()
    how = f"compiled, mode {args.compile}" if args.compile else "eager"
    lines = [versions(), f"predicted for {cluster.name}, measured on {where}, {how}", ""]
    lines.append(f"{'model':10s} {'pins':34s} {'predicted':>12s} {'measured':>12s} {'ratio':>7s}  {'predicted':>11s} {'allocated':>11s} "
                 f"{'ratio':>7s}  {'reserved':>7s}")  # fmt: skip
    print("\n".join(lines), flush=True)
    every = []
    for case in TINY if args.tiny else CASES:
        model, rows, seq, pins = case
        pins = dict(pins) if args.fuse == "off" else {**pins, "fuse": args.fuse}
        every.append(measured(model, rows, seq, pins, cluster, args.rounds, args.compile))
        lines.append(line(every[-1], cluster.device.reserved_bytes))
        print(lines[-1], flush=True)
    ratios = [one.plan.predicted.step_time_s / one.time_s for one in every]
    rank = spearman(
        [one.plan.predicted.step_time_s for one in every], [one.time_s for one in every]
    )
    more = [
        "",
        f"time: {min(ratios):.3f} to {max(ratios):.3f} of what is measured, rank correlation {rank:.3f}",
    ]
    print("\n".join(more))
    if args.output:
        Path(args.output).write_text("\n".join([*lines, *more]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
