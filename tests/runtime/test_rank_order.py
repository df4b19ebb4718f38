"""Ranks placed in other orders than the usual one: exact on every axis, with ZeRO, pipelines, tied weights and checkpoints."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.checkpoint_runs import agree, load_and_go_on, save_after_two
from support.effort import slow_but
from support.exactness import case, setting, solved_plan
from support.pipeline_runs import check
from support.staged_runs import pipelined

from autopar.ir.mesh import MeshShape
from autopar.ir.plan import Plan
from autopar.runtime.ranks.launch import WorkerPool

ONES = (1, 1, 1, 1)


def flat(name: str, mesh: MeshShape, zero: int = 0) -> Plan:
    found = case(name)
    return replace(solved_plan(found.traced, found.annotator, setting(mesh)), zero=zero)


PLANS = {
    "gpt-tiny": lambda: [
        flat("gpt-tiny", MeshShape(dp=2, tp=2, order="tp-dp"), zero=3),
        flat("gpt-tiny", MeshShape(cp=2, tp=2, order="tp-cp")),
        pipelined("gpt-tiny", MeshShape(pp=2, dp=2, order="dp-pp"), "1f1b", (2, 2), 2),
        pipelined("gpt-tiny", MeshShape(pp=2, tp=2, order="tp-pp"), "interleaved_1f1b", ONES, 2),
    ],
    "moe-tiny": lambda: [
        flat("moe-tiny", MeshShape(dp=4, ep=2, order="ep-dp"), zero=1),
        flat("moe-tiny", MeshShape(dp=2, cp=2, order="cp-dp"), zero=2),
    ],
}


@pytest.mark.parametrize("name", slow_but(["moe-tiny"], PLANS))
def test_every_axis_is_exact_wherever_it_lies(pool4, name):
    plans = PLANS[name]()
    assert all(plan.mesh.order for plan in plans)
    check(pool4, name, plans)


@pytest.mark.slow
def test_checkpoints_pass_between_orders(pool4, tmp_path):
    """What tp-dp ranks save, dp-tp ranks load; and back."""
    usual, other = (
        flat("gpt-tiny", MeshShape(dp=2, tp=2, order=order), zero=1).to_json()
        for order in ("", "tp-dp")
    )
    for number, (source, target) in enumerate(((other, usual), (usual, other))):
        at = str(tmp_path / str(number))
        saved = pool4.run(save_after_two, "gpt-tiny", source, "sgd", at)[0]
        agree(saved, pool4.run(load_and_go_on, "gpt-tiny", target, "sgd", at))


@pytest.mark.slow
def test_three_axes_and_a_tie_over_some_ranks():
    """An order that is not its own inverse, and a tied weight of the first and the last of four ranks."""
    meshes = [MeshShape(pp=2, dp=2, tp=2, order=order) for order in ("dp-tp-pp", "tp-pp-dp")]
    plans = [replace(pipelined("gpt-tiny", mesh, "1f1b", (2, 2), 2), zero=1) for mesh in meshes]
    plans += [pipelined("gpt-tiny", MeshShape(pp=4, dp=2, order="dp-pp"), "1f1b", ONES, 4)]
    with WorkerPool(8) as pool:
        check(pool, "gpt-tiny", plans)
