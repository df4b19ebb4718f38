"""The table of docs/internals/zero.md: of ZeRO stage x accumulation: the collectives of a step, and what a step holds."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch
from support.exactness import case, setting, solved_plan

from autopar.ir.mesh import MeshShape
from autopar.ir.plan import Plan
from autopar.runtime.engine import Engine
from autopar.runtime.state import gradients, zero

NAME, SEGMENTS = "llama-tiny", 4  # prologue, two layers, epilogue
COLLECTIVES = {  # of a step of k micro-batches, where all gradients fit one bucket
    0: lambda k: {"all_reduce": 1},
    1: lambda k: {"reduce_scatter": 1, "all_gather": 1},
    2: lambda k: {"reduce_scatter": k, "all_gather": 1},
    3: lambda k: {"reduce_scatter": SEGMENTS * k, "all_gather": (2 * SEGMENTS - 1) * k},
}


def plan_of(stage: int, cut: int, mesh: MeshShape = MeshShape(dp=4)) -> Plan:  # noqa: B008 (frozen)
    found = case(NAME)
    return replace(solved_plan(found.traced, found.annotator, setting(mesh, cut)), zero=stage)


def engine_of(
    plan: Plan, optimizer=lambda params: torch.optim.SGD(params, 0.5, momentum=0.9)
) -> Engine:
    return Engine(case(NAME).model, case(NAME).traced, plan, optimizer, None, None, "cpu")


def storage_bytes(tensors) -> int:
    """Bytes of the storages of tensors, each once."""
    return sum({s._cdata: s.nbytes() for s in (t.untyped_storage() for t in tensors)}.values())


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def observe(rank: int, texts: list[str]) -> list[tuple[Counter, dict[str, int]]]:
    found = []
    for text in texts:
        engine, calls, held = (
            engine_of(Plan.from_json(text), lambda p: torch.optim.Adam(p, 0.01)),
            Counter(),
            {},
        )
        batch = engine.local_batch(case(NAME).batches[0])
        engine.step(batch)  # the optimizer makes its state
        update = engine._update

        def measured(engine=engine, held=held, update=update):
            held["gradients"] = storage_bytes(engine._gradients().values())
            held["parameters"] = storage_bytes(
                [t for p in engine.parameters.trained.values() for t in (p.leaf, p.own)]
            )
            states = [
                s
                for state in engine.optimizer.state.values()
                for key, s in state.items()
                if key != "step"
            ]
            held["optimizer"] = storage_bytes(local(s) for s in states)
            update()

        engine._update = measured
        with counted(calls):
            engine.step(batch)
        found.append((calls, held))
    return found


class counted:
    """Counts the collectives that move parameters and gradients, by kind and ranks: `all_reduce of 4`."""

    def __init__(self, calls: Counter) -> None:
        self.calls, self.real = calls, (zero.start_primitive, gradients.sum_in_place)

    def __enter__(self):
        def started(kind, tensor, group, *splits):
            self.calls[f"{kind} of {group.size}"] += 1
            return self.real[0](kind, tensor, group, *splits)

        def added_up(tensor, group):
            self.calls[f"all_reduce of {group.size}"] += 1
            return self.real[1](tensor, group)

        zero.start_primitive, gradients.sum_in_place = started, added_up

    def __exit__(self, *_):
        zero.start_primitive, gradients.sum_in_place = self.real
