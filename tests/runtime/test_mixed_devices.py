"""Training on two made-up kinds of CPUs: plans of the planner's own, uneven stages, exact."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.effort import tried
from support.exactness import case, loss_of, reference, run_steps, sgd, update_error
from support.pipeline_runs import check

import autopar
from autopar import api
from autopar.errors import AutoparError
from autopar.ir.cluster import ClusterSpec, MixedCluster
from autopar.ir.plan import Plan
from autopar.request.pins import Pins
from autopar.request.plan_request import PlanRequest

NAME = "gpt:layers=6,hidden=16,heads=4,vocab=96"


def cluster(each: int, times: float = 3.0) -> MixedCluster:
    """So many usual CPUs and as many slower ones."""
    usual = ClusterSpec.parse(f"cpu:{each}")
    device = replace(
        usual.device, name="slow-cpu", flops={dtype: rate / times for dtype, rate in usual.device.flops.items()},
        memory_bandwidth_Bps=usual.device.memory_bandwidth_Bps / times,
    )  # fmt: skip
    return MixedCluster.of([replace(usual, name="slow", device=device), usual], name="two kinds")


def planned(at: MixedCluster, **pin) -> Plan:
    return api.plan_traced(case(NAME).traced, PlanRequest(at, 8, Pins.of(pin), "fp64", NAME))


def test_plans_on_two_kinds_of_devices_train_exactly(pool4):
    plans = [
        planned(cluster(2), **pin)
        for pin in (
            {"schedule": "1f1b", "tp": 2},
            *tried((), ({"dp": 2, "zero": 1},)),
            {"pp": 4},
        )
    ]
    for plan in plans:
        blocks = {name: sum(map(len, stages)) for name, stages in _stages(plan).items()}
        assert blocks["cpu"] > blocks["slow-cpu"] and not plan.lacks, (str(plan.mesh), blocks)
    assert plans[-1].mesh.groups in ((0, 0, 1, 1), (1, 1, 0, 0))
    check(pool4, NAME, plans)


def _stages(plan: Plan) -> dict[str, list[tuple[str, ...]]]:
    found: dict[str, list] = {}
    for name, stage in zip(plan.devices, plan.stages, strict=True):
        found.setdefault(name, []).append(
            tuple(segment for segment in stage if segment not in ("prologue", "epilogue"))
        )
    return found


def parallelized(rank: int, path: str) -> tuple[float, str]:
    """Train by the public call, on a cluster file: the update error over its tolerance, and where the plan puts this rank."""
    found = case(NAME)
    engine = autopar.parallelize(
        found.model, path, found.batches[0], sgd, global_batch=8, pin={"tp": 2}, precision="fp64"
    )
    _, state = run_steps(engine, found.batches)
    return update_error(reference(NAME), state), engine.plan.mesh.deal


@pytest.mark.slow
def test_a_cluster_file_of_two_kinds_of_devices_is_trained_on(pool4, tmp_path):
    cluster(2).to_yaml(tmp_path / "two.yaml")
    results = pool4.run(parallelized, str(tmp_path / "two.yaml"))
    assert (
        all(error <= 1.0 for error, _ in results)
        and len({deal for _, deal in results}) == 1
        and results[0][1]
    )


def test_a_plan_of_another_deal_is_refused():
    plan = planned(cluster(1))
    assert Plan.from_json(plan.to_json()) == plan and set(plan.devices) == {"cpu", "slow-cpu"}
    api.check_plan(plan, case(NAME).traced, cluster(1))
    for wrong, words in (("0x2", "does not deal the groups"), ("", "does not deal the groups")):
        with pytest.raises(AutoparError, match=words):
            api.check_plan(
                replace(plan, mesh=replace(plan.mesh, deal=wrong)), case(NAME).traced, cluster(1)
            )
    with pytest.raises(AutoparError, match="plan again"):
        api.check_plan(plan, case(NAME).traced, cluster(1, times=2.0))


def test_one_device_is_the_reference():
    """The reference moves the weights, so that a wrong gradient shows."""
    result = reference(NAME)
    assert (
        len(set(result.losses)) == len(result.losses)
        and loss_of(case(NAME).model(**case(NAME).batches[0])).item() == result.losses[0]
    )
