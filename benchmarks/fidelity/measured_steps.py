"""Plans of one model run on CPU processes over gloo, taking turns: seconds of a step of each.

Plans take turns, so that other work of the machine disturbs all of them alike. A step lasts as long
as its slowest rank. A time is the median of the rounds.  Training is in fp32 with fused AdamW.
"""

from __future__ import annotations

import datetime
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from autopar import __version__, api
from autopar.ir.plan import Plan
from autopar.models import parse_model
from autopar.runtime.engine import Engine
from autopar.runtime.ranks.launch import WorkerPool
from benchmarks.tasks import Task

RANKS = 4
SOFTWARE = "fp32, fused AdamW"


_engines: list[Engine] = []  # of this rank, one a plan
_batch: dict[str, torch.Tensor] = {}


def measure(task: Task, plans: Sequence[Plan], rounds: int) -> list[float]:
    """Seconds of a step of each plan: the median over `rounds` of the slowest rank's time, after
    one warm-up round. Plans take turns. Runs on `RANKS` CPU processes.
    """
    with WorkerPool(RANKS) as pool:
        pool.run(
            _build,
            task.model,
            task.global_batch,
            task.seq,
            [plan.to_json() for plan in plans],
            timeout_s=900,
        )
        seconds: list[list[float]] = [[] for _ in plans]
        for turn in range(rounds + 1):
            for index in range(len(plans)):
                took_s = max(pool.run(_step, index))
                if turn:  # the first is the warm-up
                    seconds[index].append(took_s)
            print(f"round {turn} of {rounds}", file=sys.stderr)
    return [statistics.median(found) for found in seconds]


def _build(rank: int, model: str, rows: int, seq: int, plans: list[str]) -> None:
    """Fill this process's `_batch` and `_engines`: a batch of rows x seq, and one CPU engine for
    each plan, given as JSON text.
    """
    warnings.simplefilter("ignore")
    spec = parse_model(model)
    _batch.update(spec.example_inputs(rows, seq, "cpu"))
    torch.manual_seed(0)
    module = spec.build("cpu")
    traced = api.trace(module, _batch, precision="fp32")
    for text in plans:
        _engines.append(Engine(module, traced, Plan.from_json(text), _optimizer, None, None, "cpu"))


def _optimizer(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-4, fused=True)


def _step(rank: int, index: int) -> float:
    """Seconds of one step of plan `index` on this rank. The clock starts when all ranks are
    ready.
    """
    engine = _engines[index]
    batch = engine.local_batch(_batch)
    dist.barrier()
    start = time.perf_counter()
    engine.step(batch)
    return time.perf_counter() - start


def versions() -> str:
    """One line with the versions of autopar, torch and Python and today's date, with which every
    result begins.
    """
    return f"autopar {__version__}, torch {torch.__version__}, Python {platform.python_version()}, {datetime.date.today()}"


def cpu_name() -> str:
    """The CPU's model and the number of its logical cores, as Linux gives them; elsewhere what
    `platform` knows.
    """
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.processor()
