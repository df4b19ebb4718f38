"""Kept bytes and peak of a step: what plans say, beside what torch's MemTracker sees.

    python -m benchmarks.fidelity.kept_bytes [--models llama gpt] [--tp 1 2 4] [--output FILE]

Rank 0 of each plan runs in one process with simulated collectives, in fp32. *Kept* is what forward
leaves for backward, *peak* is the most that a step holds, both in bytes of tensors. On CPU a fused
op computes by plain torch ops, whose temporaries no GPU kernel has. MemTracker sees a fused op as
one call, so that these temporaries are in neither figure.

Exit code 1 if a kept figure or a peak is further from the plan than `MOST`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker

if not __package__:  # as a script
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import autopar
from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan import Plan
from autopar.models.base import ModelSpec
from autopar.models.hf import HFSpec
from autopar.models.spec import parse_model
from benchmarks.exactness.model_zoo import CONFIGS
from benchmarks.fidelity.measured_steps import versions
from benchmarks.fidelity.simulated_rank import SimulatedRank

MOST = 0.03
ROWS, SEQ = 4, 256
_SIZES = "layers=3,hidden=128,heads=4,vocab=640,seq=256"


def _gemma2() -> ModelSpec:
    config = CONFIGS["gemma2"]
    assert isinstance(config, dict)
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "vocab_size": 640,
        "max_position_embeddings": SEQ,
        "sliding_window": 64,
    }
    return HFSpec.from_dict("gemma2", config | sizes)


MODELS: dict[str, Callable[[], ModelSpec]] = {
    "llama": lambda: parse_model(f"llama:{_SIZES},kv_heads=4,ffn=352"),
    "gpt": lambda: parse_model(f"gpt:{_SIZES}"),
    "moe": lambda: parse_model(f"moe:{_SIZES},kv_heads=4,ffn=96,experts=8,top_k=2"),
    "gemma2": _gemma2,
}


@dataclass(frozen=True, slots=True)
class Row:
    """Predicted and seen bytes of one plan."""

    model: str
    tp: int
    fuse: str
    kept: tuple[int, int]
    peak: tuple[int, int]

    def off(self) -> tuple[float, float]:
        """The relative errors of the plan: kept and peak."""
        kept, peak = ((said / seen - 1) for said, seen in (self.kept, self.peak))
        return kept, peak

    def __str__(self) -> str:
        cells = (
            f"{said / 2**20:7.3f} {seen / 2**20:7.3f} {off:+6.1%}"
            for (said, seen), off in zip((self.kept, self.peak), self.off(), strict=True)
        )
        return f"{self.model:8}{self.tp:2}  {self.fuse:5}  " + "    ".join(cells)


def plan_of(model: nn.Module, inputs: dict[str, Tensor], tp: int, fuse: str) -> Plan:
    """A plan over `tp` devices without recomputation, for two micro-batches: the second finds gradients."""
    cluster = ClusterSpec.parse(f"cpu:{tp}")
    # of the process, not of tensors
    cluster = replace(cluster, device=replace(cluster.device, reserved_bytes=0))
    pin = {"tp": tp, "fuse": fuse, "micro_batch": ROWS, "zero": 0, "recompute": "none"}
    return autopar.plan(model, cluster, inputs, 2 * ROWS, pin, precision="fp32")


def total(tracker: MemTracker, when: str) -> int:
    """Bytes that a MemTracker has seen, `current` or at the `peak`."""
    return sum(snapshot["Total"] for snapshot in tracker.get_tracker_snapshot(when).values())


def seen(rank: SimulatedRank) -> tuple[int, int]:
    """Bytes that forward of a micro-batch keeps, and the peak of a step, by MemTracker."""
    engine, tracker = rank.engine, MemTracker()

    def step() -> int:
        bytes_at = []
        for _ in range(2):
            tracker.reset_mod_stats()
            bytes_at.append(total(tracker, "current"))
            rank.micro_batch(lambda: bytes_at.append(total(tracker, "current")))
        engine._update()
        return bytes_at[-1] - bytes_at[-2]

    step()  # the optimizer makes its state
    masters = engine._masters.values()
    tracker.track_external(engine.program.module, engine.optimizer, *masters)
    with tracker:
        kept = step()
    return kept, total(tracker, "peak")


def measure(name: str, tp: int, fuse: str) -> Row:
    """One row of the table."""
    spec = MODELS[name]()
    torch.manual_seed(0)
    model, inputs = spec.build("cpu"), spec.example_inputs(ROWS, SEQ, "cpu")
    plan = plan_of(model, inputs, tp, fuse)
    kept, peak = seen(SimulatedRank(model, plan, inputs))
    said = max(plan.predicted.peak_memory_bytes)
    return Row(name, tp, fuse, (dict(plan.predicted.memory)["kept"], kept), (said, peak))


def main(arguments: list[str] | None = None) -> int:
    """Print the table.  The exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--tp", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--output", type=Path, help="also write the table to this file")
    args = parser.parse_args(arguments)
    head = [
        versions(),
        f"rank 0 in fp32, {ROWS} sequences of {SEQ} a micro-batch, MiB of tensors: by the plan, by MemTracker",
        "",
        f"{'model':8}tp  fuse   {'kept':25}  peak",
    ]
    print("\n".join(head), flush=True)
    rows = []
    for name in args.models:
        for tp in args.tp:
            for fuse in ("off", "all"):
                rows.append(measure(name, tp, fuse))
                print(rows[-1], flush=True)
    kept, peak = (max(abs(row.off()[k]) for row in rows) for k in (0, 1))
    score = f"furthest from MemTracker: kept {kept:.1%}, peak {peak:.1%} (at most {MOST:.0%})"
    print(f"\n{score}")
    if args.output:
        args.output.write_text("\n".join([*head, *map(str, rows), "", score]) + "\n")
    return int(max(kept, peak) > MOST)


if __name__ == "__main__":
    sys.exit(main())
