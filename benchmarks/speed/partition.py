"""How long the partitioner takes: the strategies of a Llama 3 8B block on one mesh, and the rewritten program of Llama 3 405B.

    python benchmarks/speed/partition.py

Prints CPU seconds, the least of three for the strategies.  The 126 blocks of the 405B model share one structure, which is partitioned once.
"""

from __future__ import annotations

import time

import torch
from rich.console import Console
from rich.table import Table

import autopar
from autopar.annotate.annotator import Annotator
from autopar.annotate.setting import Setting
from autopar.api import trace
from autopar.ir.cluster import ClusterSpec
from autopar.ir.mesh import MeshShape
from autopar.models import parse_model
from autopar.rewrite.program import assemble

CLUSTER = ClusterSpec.parse("dgx-h100:8")
PIN = {"tp": 8, "dp": 256, "micro_batch": 1, "zero": 3, "recompute": "full"}
RANK = 5


def enumeration_s(mesh: MeshShape) -> tuple[float, int]:
    """(CPU seconds, strategies) of pricing every strategy of every op of Llama 3 8B on a mesh
    without a cache; the least of three runs. The strategies are those of its repeated block.
    """
    spec = parse_model("llama3-8b")
    traced = trace(spec.build("meta"), spec.example_inputs(2, 8192), None, "bf16")
    times = []
    for _ in range(3):
        annotator, start = Annotator(traced), time.process_time()
        model = annotator.annotate(Setting(mesh, 1, 8, 0, "none", "bf16", CLUSTER))
        times.append(time.process_time() - start)
    block = max(model.classes, key=lambda block: block.count)
    return min(times), sum(len(op.strategies) for op in block.ops)


def partition_s() -> tuple[float, int]:
    """(CPU seconds, segments) of rewriting Llama 3 405B for one rank. Tracing and planning before
    are not counted.
    """
    spec = parse_model("llama3-405b")
    model, inputs = spec.build("meta"), spec.example_inputs(2, 8192)
    traced = trace(model, inputs, None, "bf16")
    plan = autopar.plan(model, "dgx-h100:256", inputs, 2048, pin=PIN, traced=traced)
    start = time.process_time()
    program = assemble(traced, plan, RANK, torch.device("cpu"))
    return time.process_time() - start, len(list(program.module.children()))


def main() -> None:
    table = Table("what", "size", "CPU s")
    for mesh in (MeshShape(dp=8), MeshShape(dp=1, tp=8), MeshShape(dp=2, cp=2, tp=2)):
        seconds, strategies = enumeration_s(mesh)
        table.add_row(
            f"strategies of a llama3-8b block, {mesh}", f"{strategies} strategies", f"{seconds:.3f}"
        )
    seconds, segments = partition_s()
    table.add_row(
        f"program of llama3-405b, tp=8, rank {RANK}", f"{segments} segments", f"{seconds:.2f}"
    )
    Console().print(table)


if __name__ == "__main__":
    main()
