"""Words of reports that once said what is not so."""

from __future__ import annotations

from dataclasses import replace

import pytest
from autopar_cost_models.memory_error import HEADROOM, fit_chance
from support.explain_tasks import task

import autopar
from autopar.explaining.certificate import proof_words
from autopar.explaining.plan_report import PlanFacts, plan_text
from autopar.explaining.run_lines import run_lines
from autopar.ir.cluster import ClusterSpec, plain_data
from autopar.ir.plan_fields import OUT_OF_TIME
from autopar.planning.remedies import Ask, Remedies
from autopar.text.device_words import misfit_advice
from autopar.text.plan_words import recompute_words
from autopar.text.units import count, ms


def test_a_block_is_named_by_its_own_segments():
    plan = task().plan({"tp": 4})
    first, layers, last = plan.blocks
    assert len(layers.segments) == 2
    apart = [
        replace(layers, segments=layers.segments[:1]),
        replace(layers, segments=layers.segments[1:], recompute="full"),
    ]
    shown = plan_text(replace(plan, blocks=(first, *apart, last)))
    assert f"Block {layers.segments[1]}, recompute full" in shown


def test_a_mixed_plan_says_which_layers_recompute_how():
    plan = task().plan({"tp": 4})
    modes = {"full": (0, 1, 2, 11), "selective": (3, 10)}
    blocks = [
        replace(plan.blocks[1], segments=tuple(f"layers.{k}" for k in layers), recompute=mode)
        for mode, layers in modes.items()
    ]
    mixed = replace(plan, recompute="mixed", blocks=(plan.blocks[0], *blocks, plan.blocks[2]))
    words = "mixed: layers 0-2, 11 full; layers 3, 10 selective"
    assert recompute_words(mixed) == words and words in plan_text(mixed)
    assert recompute_words(plan) == plan.recompute == "none"
    head = replace(plan.blocks[2], segments=("norm",), recompute="full")
    stages = tuple(tuple(f"layers.{k}" for k in layers) for layers in ((0, 1, 2, 3), (11, 10)))
    staged = replace(
        mixed, blocks=(*mixed.blocks[:-1], head), stages=(*stages, stages[1], (*stages[1], "norm"))
    )
    staged = replace(staged, mesh=replace(plan.mesh, pp=4))
    assert recompute_words(staged) == (
        "mixed: stage 0: 3 full, 1 selective; 1-2: 1 full, 1 selective; 3: 1 full, 1 selective, norm full"
    )


def test_a_high_chance_not_to_fit_comes_with_advice():
    plan = task().plan({"tp": 4})
    assert misfit_advice(plan, 0.04) == ""
    advice = misfit_advice(plan, 0.2)
    assert "--fit 0.95 " in advice and "recompute=full" in advice
    assert fit_chance(83, 100) >= 0.95 > fit_chance(84, 100)
    least = replace(plan, recompute="full", micro_batch=1)
    assert misfit_advice(least, 0.2).endswith("at most 5.0 %")


def test_a_plan_that_may_not_fit_says_so_first():
    plan = task().plan({"tp": 4})
    at = ClusterSpec.parse(plan.cluster_name)
    memory = at.device.memory_bytes
    for share, is_risk in ((1 - HEADROOM, False), (0.9, True)):
        held = (int(share * memory),) * plan.mesh.pp
        full = replace(plan, predicted=replace(plan.predicted, peak_memory_bytes=held))
        first = plan_text(full, cluster=at).splitlines()[0]
        assert first.startswith("Risk: a chance of ") == is_risk
        assert ("risk" in PlanFacts(full, at).facts) == is_risk
    assert "--fit 0.95 " in first


def test_a_bound_of_zero_bounds_nothing():
    plan = task().plan({"tp": 4})
    unproved = replace(plan.certificate, bound_s=0.0, gap=1.0, status="feasible")
    assert "lower bound none in time" in " ".join(
        plan_text(replace(plan, certificate=unproved)).split()
    )


def test_a_gap_that_time_does_not_close_is_said_so():
    plan = task().plan({"tp": 4})
    entries = tuple(entry | {"reason": "takes at least 1 s"} for entry in plan.certificate.meshes)
    late = ({**entries[0], "reason": OUT_OF_TIME}, *entries[1:])
    open_ = replace(plan.certificate, gap=0.01, status="feasible")
    for meshes, more in ((entries, False), (late, True)):
        own = replace(plan, certificate=replace(open_, meshes=meshes))
        words = " ".join(plan_text(own).split())
        assert (
            ("a higher --time-limit" in words) == ("in the time limit" in proof_words(own)) == more
        )
        assert ("more time does not help" in words) != more


def test_remedies_say_why_offloading_was_not_tried():
    own = ClusterSpec.make("l4", devices_per_node=4)
    known = ClusterSpec.parse("h100:4")
    for cluster, says in ((own, True), (known, False)):
        answer = Remedies(Ask({}, cluster, 8, None), "nothing fits", None, (), (), (), 1.0)
        assert (
            "Offloading was not tried: l4 1x4 does not say what its hosts have" in str(answer)
        ) == says


def test_numbers_have_sensible_digits():
    words = {0: "0.0 ms", 2.131e-5: "0.02131 ms", 0.0425: "42.5 ms", 0.99996: "1.000 s", 5.2398: "5.240 s", 87.26: "87.26 s",
             1234.5: "1,234 s", 123456.0: "123,456 s"}  # fmt: skip
    assert {seconds: ms(seconds) for seconds in words} == words
    assert [count(n) for n in (1.4e12, 8.03e9, 124.44e6, 512)] == [
        "1.4 T",
        "8.03 B",
        "124.4 M",
        "512",
    ]


@pytest.mark.parametrize("name", ["cpu:2", "mine"])
def test_the_lines_that_run_a_plan_give_its_cluster(name, tmp_path, monkeypatch):
    cluster = replace(ClusterSpec.parse("cpu:2"), name=name)
    plan = task().plan({"dp": 2}, cluster, 4)
    plan = replace(plan, made_for=replace(plan.made_for, cluster=plain_data(cluster)))
    plan.save(tmp_path / "plan.json")
    lines = run_lines(plan, "").partition("torchrun\n")[2]
    given = []
    monkeypatch.setattr(autopar, "parallelize", lambda model, cluster, *_, **__: given.append(cluster))  # fmt: skip
    monkeypatch.chdir(tmp_path)
    exec(lines, {"autopar": autopar, "model": None, "batch": None})
    known = ClusterSpec.parse(given[0]) if isinstance(given[0], str) else given[0]
    assert known.spec_hash() == plan.cluster_hash
    assert ('"cpu:2"' in lines) == (name == "cpu:2")
