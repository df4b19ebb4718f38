"""With fuse=auto the planner compares the plans of all modes, by the slower of devices and host, and says so."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.explain_tasks import Task, task, words_of
from support.fusion_graphs import traced

from autopar.explaining.lints import lint
from autopar.explaining.plan_report import fusion_reply
from autopar.ir.cluster import ClusterSpec
from autopar.ir.fusion import FUSE_MODES
from autopar.ir.plan import Plan
from autopar.planning.planner import modes_of

MODEL = "llama:layers=2,hidden=512,heads=4,vocab=1024,seq=256"


def with_host(dispatch_s: float) -> Task:
    """A small model on a device whose host issues an operation in `dispatch_s`."""
    t = task(MODEL, "h200:2", 16, 256)
    assert isinstance(t.cluster, ClusterSpec)
    device = replace(t.cluster.device, dispatch_s=dispatch_s)
    return replace(t, cluster=replace(t.cluster, device=device))


@pytest.mark.parametrize(("dispatch_s", "mode"), [(24e-6, "off"), (1e-9, "all")])
def test_the_planner_chooses_what_to_fuse(dispatch_s, mode):
    plan = with_host(dispatch_s).plan({"fuse": "auto", "tp": 1, "pp": 1})
    weighed = {entry.mode: entry for entry in plan.fusion.weighed}
    assert tuple(weighed) == FUSE_MODES and plan.fusion.mode == mode
    assert min(weighed.values(), key=lambda entry: entry.step_s).mode == mode
    alone_s = {name: entry.step_s - entry.host_s for name, entry in weighed.items()}
    assert alone_s["all"] < alone_s["norms"] < alone_s["off"]
    assert (weighed["all"].host_s > weighed["norms"].host_s > 0) is (mode == "off")
    assert plan.predicted.step_time_s == weighed[mode].step_s
    text = words_of(fusion_reply(plan.fusion))
    assert "Compared" in text and ("Nothing is fused" in text) is (mode == "off")
    assert Plan.from_json(plan.to_json()).fusion == plan.fusion


@pytest.mark.slow
def test_logits_that_do_not_fit_are_made_again():
    """Over 65,536 positions the logits take 16 GiB, and their gradient as much: without them, less is recomputed."""
    sizes = "layers=16,hidden=2048,heads=32,kv_heads=8,ffn=8192,vocab=128256,seq=65536"
    plan = task(f"llama:{sizes}", "h100:1", 4, 65536).plan({"fuse": "auto"})
    weighed = {entry.mode: entry.step_s for entry in plan.fusion.weighed}
    assert plan.fusion.mode == "head" and plan.fusion.keeps_no_logits
    assert weighed["head"] < weighed["all"]


def test_the_head_is_weighed_where_there_is_one():
    assert modes_of(with_host(1e-9).traced) == FUSE_MODES
    assert modes_of(traced(lambda x, w, v: x * w)) == ("off", "norms", "all")


def test_a_split_backward_would_make_logits_a_third_time():
    t = with_host(1e-9)
    pins = {"pp": 2, "tp": 1, "micro_batch": 2}
    spaces = {mode: t.plan(pins | {"fuse": mode}).certificate.space for mode in ("all", "head")}
    assert "zero_bubble" in spaces["all"] and "zero_bubble" not in spaces["head"]
    pinned = t.plan(pins | {"fuse": "head", "schedule": "zero_bubble"})
    assert pinned.schedule == "zero_bubble"


def test_each_mode_is_the_plan_that_its_pin_gives():
    t = with_host(24e-6)
    chosen = t.plan({"fuse": "auto", "tp": 1, "pp": 1})
    for entry in chosen.fusion.weighed:
        alone = t.plan({"fuse": entry.mode, "tp": 1, "pp": 1})
        assert alone.predicted.step_time_s == entry.step_s and not alone.fusion.weighed


def test_the_wait_is_that_of_the_lint_and_of_the_step():
    """Where the host is slower than the devices, the lint names the same time."""
    t = with_host(24e-6)
    pins = {"tp": 1, "pp": 1, "dp": 2, "micro_batch": 1, "recompute": "none"}
    plan = t.plan(pins | {"fuse": "auto"})
    (finding,) = (f for f in lint(plan, t.cluster, t.traced) if f.lint == "host-bound")
    chosen = next(entry for entry in plan.fusion.weighed if entry.mode == plan.fusion.mode)
    assert finding.numbers["waiting_s"] == chosen.host_s == plan.predicted.breakdown["host"] > 0
