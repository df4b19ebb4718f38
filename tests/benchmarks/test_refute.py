"""The benchmark that tries to refute plans: its requests and pins, and that it finds false claims."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from autopar.errors import NoPlanFits
from autopar.planning.candidates import candidates_for
from benchmarks.search.random_requests import Asked, random_pins, random_request, respelled
from benchmarks.search.refute import Trial, main, summary

_TINY = "gpt:layers=2,hidden=64,heads=4,vocab=128,seq=64"
_ASKED = Asked(_TINY, "l4", (1, 4), 12.5e9, 4, 64)


@pytest.fixture(scope="module")
def trial():
    trial = Trial(_ASKED, 5.0, 1)
    trial.run(random.Random(0), 2, 5.0)
    return trial


def test_requests_repeat_with_their_seed_and_differ():
    asked = [random_request(random.Random(f"3/{number}")) for number in range(20)]
    assert asked[7] == random_request(random.Random("3/7")) and len(set(map(str, asked))) > 15
    assert any(one.target for one in asked) and any(one.pin for one in asked)
    assert {one.shape[0] > 1 for one in asked} == {True, False}


def test_pins_and_their_other_spelling_agree_with_a_candidate():
    request, traced, draw = _ASKED.request(), _ASKED.traced(), random.Random(1)
    for c in draw.sample(candidates_for(request, traced), 20):
        pin = random_pins(c, draw)
        for spelled in (pin, respelled(pin, 4)):
            found = candidates_for(_ASKED.pinned(request, spelled), traced)
            assert any((one.mesh, one.micro_batch, one.zero) == (c.mesh, c.micro_batch, c.zero) for one in found)  # fmt: skip


def test_another_spelling_says_or_leaves_out_what_follows():
    assert respelled({"tp": 2, "pp": 1, "cp": 1}, 8) == {
        "cp": 1, "pp": 1, "tp": 2, "dp": 4, "schedule": "none", "vpp": 1
    }  # fmt: skip
    assert respelled({"tp": 2, "pp": 2, "cp": 1, "dp": 2}, 8) == {"cp": 1, "pp": 2, "tp": 2}


def test_true_claims_stand(trial):
    assert trial.tried == 2 and trial.feasible and not trial.refuted
    words = "\n".join(summary([trial]))
    assert "1 requests: 1 plans, " in words and "refuted: nothing" in words


def test_false_claims_are_refuted(trial):
    plan, free = trial.answer, replace(_ASKED.request(), tolerance=0.0, runners_up=False)
    false = replace(
        plan.certificate,
        bound_s=1.0,
        meshes=tuple({**entry, "bound_s": None} for entry in plan.certificate.meshes),
        runners_up=tuple(
            {**entry, "bound_s": None, "time_s": None} for entry in plan.certificate.runners_up
        ),
    )
    liar = Trial(_ASKED, 5.0, 1, trial.space, replace(plan, certificate=false))
    liar._try(free, {"tp": 2, "pp": 1, "dp": 2})
    assert [words.partition(":")[0] for words in liar.refuted] == ["bound", "candidate", "family"]
    assert liar.faster["TP, none fits"] == 1.0
    solved = {
        **false.meshes[0],
        "mesh": {**plan.mesh.as_dict(), "pp": 1, "tp": 2, "dp": 2},
        "time_s": 0.1,
    }
    liar._check_list(replace(plan, certificate=replace(false, meshes=(solved,))))
    assert liar.refuted[-1] == "list: TP has 100 ms, its best: none fits"
    pessimist = Trial(_ASKED, 5.0, 1, trial.space, NoPlanFits("No plan fits", proven=True))
    pessimist._try(free, {"dp": 4})
    pessimist._try(free, {"dp": 3})
    assert [words.partition(":")[0] for words in pessimist.refuted] == ["no plan", "refusal"]


def test_the_command_ends_with_1_where_a_claim_is_refuted(capsys, monkeypatch):
    small = replace(_ASKED, shape=(1, 2), batch=2)
    monkeypatch.setattr("benchmarks.search.refute.random_request", lambda draw, models: small)
    asked = ["--requests", "2", "--pins", "2", "--time-limit", "5"]
    assert main(asked) == 0
    assert "refuted: nothing" in capsys.readouterr().out
    monkeypatch.setattr("autopar.api.plan_traced", lambda *args, **names: 1 / 0)
    assert main(asked) == 1
    assert "traceback 2" in capsys.readouterr().out
