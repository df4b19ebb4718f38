"""Predicted peak memory of each rank of a pipeline against MemTracker, which watches the ranks run a step over gloo."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker

import autopar
from autopar import api
from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan import Plan
from autopar.models.gpt import GPTConfig
from autopar.models.llama import LlamaConfig
from autopar.runtime.engine import Engine

ROWS, SEQ, MICRO_BATCHES = 2, 256, 8
CONFIGS = {
    "llama": LlamaConfig(
        vocab=640, hidden=128, layers=4, heads=4, kv_heads=2, ffn=352, max_seq=SEQ
    ),
    "gpt": GPTConfig(vocab=640, hidden=128, layers=4, heads=4, max_seq=SEQ),
}

NEAR = 0.05
"""How much a prediction may be off."""

SCHEDULES, MODES = (
    ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"),
    ("none", "selective", "full"),
)
CASES = list(product(SCHEDULES, MODES))


class _NoModules(contextlib.nullcontext):
    """In the place of MemTracker's statistics by module, which want each module to run once a step, and whose hooks zero bubble lacks."""

    is_bw, parents = False, frozenset()

    def register_user_hooks(self, *hooks) -> None:
        """None are called."""

    clear_user_hooks = register_user_hooks


@cache
def case(name: str, precision: str) -> tuple:
    """A model, "llama x 4" of four layers."""
    family, layers = name.split(" x ")
    model = replace(CONFIGS[family], layers=int(layers)).module()
    inputs = {key: torch.zeros(ROWS, SEQ, dtype=torch.long) for key in ("input_ids", "labels")}
    return model, inputs, api.trace(model, inputs, precision=precision)


def plan_of(name: str, precision: str, schedule: str, recompute: str, **pins) -> Plan:
    model, inputs, traced = case(name, precision)
    pin = {"pp": 2, "tp": 1, "dp": 1, "zero": 0, "micro_batch": ROWS, "schedule": schedule, "recompute": recompute,
           "vpp": 2 if schedule == "interleaved_1f1b" else 1} | pins  # fmt: skip
    cluster = ClusterSpec.parse(f"cpu:{pin['pp'] * pin['dp']}")
    # of the process, not of tensors
    cluster = replace(cluster, device=replace(cluster.device, reserved_bytes=0))
    return autopar.plan(
        model,
        cluster,
        inputs,
        ROWS * MICRO_BATCHES * pin["dp"],
        pin,
        precision=precision,
        traced=traced,
    )


def peaks(rank: int, name: str, precision: str, texts: list[str]) -> list[int]:
    """Bytes of tensors at the fullest moment of a rank's second step under each plan."""
    model, inputs, traced = case(name, precision)
    found = []
    for text in texts:
        engine = Engine(
            model,
            traced,
            Plan.from_json(text),
            lambda p: torch.optim.AdamW(p, 1e-3, foreach=False),
            None,
            None,
            "cpu",
        )
        batch = {name: torch.zeros(ROWS * MICRO_BATCHES, SEQ, dtype=torch.long) for name in inputs}
        engine.step(batch)  # the optimizer makes its state
        ((_, stages),) = engine._passes.pipelines["training", 0]._schedules.values()
        infos = [
            i
            for s in stages
            for of in (*s.args_recv_info.values(), *s.grad_recv_info.values())
            for i in of
            if i.buffer is not None
        ]
        tracker = MemTracker()
        tracker._mod_tracker = _NoModules()
        tracker.track_external(
            engine.program.module,
            engine.optimizer,
            *engine._masters.values(),
            *(info.buffer for info in infos),
        )
        with tracker:
            engine.step(batch)
        snapshot = tracker.get_tracker_snapshot("peak")
        found.append(
            next(sizes["Total"] for device, sizes in snapshot.items() if device.type == "cpu")
        )
    return found


def check(pool, name: str, cases: list[tuple], precision: str = "fp32", **pins) -> None:
    plans = [plan_of(name, precision, *case, **pins) for case in cases]
    by_rank = pool.run(peaks, name, precision, [plan.to_json() for plan in plans])
    errors = {}
    for number, (case_, plan) in enumerate(zip(cases, plans, strict=True)):
        for stage, predicted in enumerate(plan.predicted.peak_memory_bytes):
            seen = max(
                by_rank[rank][number]
                for rank in range(len(by_rank))
                if rank // plan.mesh.dp == stage
            )
            errors[*case_, stage] = predicted / seen - 1
    print(name, precision, pins, {key: f"{error:+.1%}" for key, error in errors.items()})
    assert all(abs(error) <= NEAR for error in errors.values()), errors


@pytest.mark.slow
def test_the_predicted_peak_of_each_rank_is_what_a_step_takes(pool2):
    check(
        pool2,
        "llama x 4",
        [("1f1b", "none"), ("interleaved_1f1b", "full"), ("zero_bubble", "selective")],
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", CONFIGS)
def test_every_schedule_and_recompute_mode(pool2, family):
    check(pool2, f"{family} x 4", CASES)


@pytest.mark.slow
@pytest.mark.parametrize("family", CONFIGS)
def test_on_four_ranks(pool4, family):
    check(pool4, f"{family} x 8", CASES, pp=4)


@pytest.mark.slow
@pytest.mark.parametrize("family", CONFIGS)
def test_zero_bubble_of_several_stages_a_rank(pool2, family):
    check(pool2, f"{family} x 4", [("zero_bubble", mode) for mode in MODES], vpp=2)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_under_zero(pool4, zero):
    check(pool4, "gpt x 4", CASES, dp=2, zero=zero)


@pytest.mark.slow
@pytest.mark.parametrize("family", CONFIGS)
def test_in_half_precision(pool2, family):
    check(
        pool2,
        f"{family} x 4",
        [(schedule, mode) for schedule in SCHEDULES[1:] for mode in MODES],
        "bf16",
    )
