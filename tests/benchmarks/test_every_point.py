"""The benchmark that holds plans to every point of the printed space: what it prices, and that it finds false claims."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from autopar.errors import NoPlanFits
from autopar.ir.cluster import ClusterSpec
from autopar.request.pins import Pins
from autopar.request.plan_request import PlanRequest
from benchmarks.search.every_point import Trial
from benchmarks.search.exhaustive_oracle import front, placements, points
from benchmarks.search.lean_placements import lean_placements
from benchmarks.search.printed_space import layouts
from benchmarks.search.printed_tasks import random_task, traced_of, words_of
from benchmarks.search.random_instances import Task


def trial_of(model: str, devices: int, batch: int, **pin: object) -> Trial:
    cluster = ClusterSpec.make("l4", 1, devices)
    request = PlanRequest(cluster, batch, Pins.of(pin), "bf16", model)
    return Trial(request, traced_of(model))


@pytest.fixture(scope="module")
def trial() -> Trial:
    trial = trial_of("linear:2", 2, 4)
    trial.run(random.Random(2), 30.0)
    return trial


def test_a_true_plan_stands_and_micro_batches_reach_the_batch(trial):
    assert not trial.refuted and {"optimal", "equal", "memory", "whole"} <= trial.kinds
    assert {(one.tp, one.pp, one.dp) for one in trial.found} == {(2, 1, 1), (1, 2, 1), (1, 1, 2)}
    assert {one.micro_batch for one in trial.found if one.dp == 1} == {1, 2, 4}


def test_false_claims_are_refuted(trial):
    proof = trial.answer.certificate
    slower = replace(proof, objective_s=1.01 * proof.objective_s, bound_s=1.01 * proof.objective_s)
    fewer = replace(proof, meshes=proof.meshes[1:])
    closed = replace(proof, meshes=tuple({**one, "outcome": "infeasible"} for one in proof.meshes))
    expected = {
        "bound slower price": replace(trial.answer, certificate=slower),
        "listed": replace(trial.answer, certificate=fewer),
        "candidate": replace(trial.answer, certificate=closed),
        "words": replace(trial.answer, certificate=replace(proof, rules=proof.rules[1:])),
        "none": NoPlanFits("No plan fits", proven=True),
    }
    for claims, answer in expected.items():
        liar = replace(trial, answer=answer, kinds=set(), refuted=[])
        liar._compare(trial.request.cluster.room_bytes)
        assert {words.partition(":")[0] for words in liar.refuted} == set(claims.split()), claims


def test_tasks_repeat_with_their_seed_and_some_have_pins():
    asked = [random_task(random.Random(seed)) for seed in (4, 6, 23)]
    assert asked[0] == random_task(random.Random(4)) and len(set(map(str, asked))) == 3
    assert asked[0].pin and not asked[1].pin


def test_words_of_another_kind_are_refused():
    words = words_of(trial_of("linear:2", 2, 4).request, traced_of("linear:2"))
    for choice in ("devices", "tp", "zero", "shard", "stages", "recompute"):
        with pytest.raises(ValueError, match="unknown words"):
            list(layouts({**words, choice: "some for none"}))
    with pytest.raises(ValueError, match="unknown words: 'gpipe on Mondays'"):
        list(layouts({**words, "schedule": f"{words['schedule']}; gpipe on Mondays"}))


def test_dominated_choices_leave_the_front_as_it_is():
    compared = 0
    for seed in range(60):
        task = Task(seed)
        for candidate in task.candidates:
            models = {
                mode: task.annotate(replace(candidate, recompute=mode)) for mode in candidate.modes
            }
            count, few = (sum(1 for _ in of(models)) for of in (placements, lean_placements))
            if few < count:
                compared += 1
                both = (
                    points(models, candidate.schedules, placed_by=by)
                    for by in (None, lean_placements)
                )
                assert len({tuple(front(found)) for found in both}) == 1, seed
    assert compared >= 5
