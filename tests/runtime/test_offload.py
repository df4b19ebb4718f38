"""Optimizer state, and parameters too, in host memory: exact, where they should be, as large as predicted, through checkpoints, and found
as a remedy."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import cache

import pytest
import torch
from support.effort import every, tried
from support.exactness import (
    case,
    engine_for,
    reference,
    run_steps,
    setting,
    solved_plan,
    update_error,
)
from support.explain_tasks import instant
from support.staged_runs import pipelined

import autopar
from autopar.errors import NoPlanFits
from autopar.ir.cluster import ClusterSpec
from autopar.ir.mesh import MeshShape
from autopar.ir.plan import Plan
from autopar.models import parse_model
from autopar.runtime.state.holding import HOST

DP2, TP2, PP2 = MeshShape(dp=2), MeshShape(tp=2), MeshShape(pp=2)


def plan_of(mesh: MeshShape, zero: int, number: int, recompute: str, offload: str) -> Plan:
    found = case("llama-tiny")
    if mesh.pp > 1:
        plan = pipelined("llama-tiny", mesh, "1f1b", (2, 2), number, (recompute,))
    else:
        plan = solved_plan(found.traced, found.annotator, setting(mesh, number, recompute))
    return replace(plan, zero=zero, offload=offload)


def offloaded_steps(rank: int, texts: list[str]):
    """(update error over tolerance, losses, whether all that is offloaded is the host's own and no more) of each plan."""
    found = []
    for text in texts:
        engine = engine_for("llama-tiny", Plan.from_json(text), None)
        losses, state = run_steps(engine, case("llama-tiny").batches)
        found.append((update_error(reference("llama-tiny"), state), losses, apart(engine)))
    return found


def apart(engine) -> bool:
    """Masters and optimizer state are on the host, and share no memory with anything that the program reads; nor do offloaded parameters,
    which have none on the device after a step."""
    local = [getattr(m.detach(), "_local_tensor", m.detach()) for m in engine.optimizer.state]
    local += [
        getattr(x, "_local_tensor", x)
        for state in engine.optimizer.state.values()
        for x in state.values()
        if torch.is_tensor(x)
    ]
    used = {leaf.untyped_storage().data_ptr() for leaf in engine.parameters.leaves.values()}
    owned = [one.own for one in engine.parameters.trained.values()]
    if engine.plan.offload == "parameters":
        local += owned
        if any(one.leaf.untyped_storage().size() for one in engine.parameters.trained.values()):
            return False
    else:
        used |= {own.untyped_storage().data_ptr() for own in owned}
    return len(local) > 0 and all(
        x.device == HOST and x.untyped_storage().data_ptr() not in used for x in local
    )


@pytest.mark.parametrize("cells", [
    ((DP2, 0, 2, "none", "optimizer"), (DP2, 1, 1, "none", "optimizer"), (DP2, 2, 2, "none", "optimizer"), (DP2, 3, 1, "full", "optimizer"),
     (TP2, 0, 1, "none", "optimizer"), (PP2, 0, 2, "none", "optimizer")),
    ((DP2, 0, 2, "none", "parameters"), (DP2, 3, 2, "none", "parameters"), (TP2, 0, 1, "full", "parameters"),
     (DP2, 3, 1, "full", "parameters")),
], ids=["optimizer", "parameters"])  # fmt: skip
def test_offloaded_updates_are_exact(pool2, cells):
    cells = tried(cells[3:], cells)  # ZeRO-3, and what has no data parallelism
    for by_rank in pool2.run(
        offloaded_steps, [plan_of(*cell).to_json() for cell in cells], timeout_s=300
    ):
        for cell, (error, losses, is_apart) in zip(cells, by_rank, strict=True):
            assert error <= 1.0 and is_apart, (*map(str, cell), error)
            assert losses == pytest.approx(reference("llama-tiny").losses, abs=1e-9, rel=1e-9)


# --------------------------------------------------------------------------------------------------------------------- one process


@cache
def tiny():
    spec = parse_model("llama-tiny")
    torch.manual_seed(0)
    return spec.build("cpu"), spec.example_inputs(4, 16, "cpu")


def tiny_engine(offload: str, precision: str = "fp32"):
    model, batch = tiny()
    return autopar.parallelize(model, "cpu:1", batch, lambda p: torch.optim.AdamW(p, 1e-2), pin={"offload": offload}, precision=precision,
                               max_grad_norm=0.1)  # fmt: skip


def same(one, other) -> bool:
    state = other.full_state_dict()
    return all(torch.equal(value, state[name]) for name, value in one.full_state_dict().items())


@pytest.mark.parametrize("kind", every(2, ["parameters", "optimizer"]))
@pytest.mark.parametrize("precision", every(3, ["bf16", "fp32", "fp16"]))
def test_the_same_bits_as_without_and_as_many_bytes_as_predicted(precision, kind):
    one, other = (tiny_engine(offload, precision) for offload in ("none", kind))
    before = one.full_state_dict()
    for _ in range(3):
        one.step(tiny()[1]), other.step(tiny()[1])
    assert same(one, other) and all(
        not torch.equal(value, before[name]) for name, value in one.full_state_dict().items()
    )
    count = sum(p.numel() for p in other.optimizer.state)
    held = count * 4 + sum(
        x.nbytes for state in other.optimizer.state.values() for x in state.values() if x.dim()
    )
    # they are in host memory beside what the optimizer trains
    if kind == "parameters" and precision != "fp32":
        held += sum(x.own.nbytes for x in other.parameters.trained.values())
    arriving = 4 * count
    predicted = [engine.plan.predicted for engine in (one, other)]
    assert predicted[0].host_bytes == 0 and predicted[1].host_bytes == held + arriving
    moved = {"fp32": 8, "bf16": 12, "fp16": 12}[precision] * count
    assert predicted[0].memory["optimizer"] == moved and predicted[1].memory["optimizer"] == 0
    if kind == "parameters":
        assert predicted[1].memory["parameters"] == 0
        largest = max(one.own.nbytes for one in other.parameters.trained.values())
        assert predicted[1].memory["fixed"] - predicted[0].memory["fixed"] >= largest
    else:
        assert max(predicted[0].peak_memory_bytes) - max(predicted[1].peak_memory_bytes) == moved


@pytest.mark.parametrize(("first", "then"), [
    ("optimizer", "parameters"), pytest.param("parameters", "none", marks=pytest.mark.slow),
    pytest.param("none", "optimizer", marks=pytest.mark.slow), pytest.param("none", "parameters", marks=pytest.mark.slow),
])  # fmt: skip
def test_checkpoints_load_with_and_without(first, then, tmp_path):
    saved, loaded = tiny_engine(first), tiny_engine(then)
    for _ in range(2):
        saved.step(tiny()[1])
    saved.save(tmp_path)
    assert loaded.load(tmp_path) == 2 and same(saved, loaded)
    saved.step(tiny()[1]), loaded.step(tiny()[1])
    assert same(saved, loaded)


# ------------------------------------------------------------------------------------------------------------------------- planning


def big_plan(cluster: ClusterSpec, **pin) -> Plan:
    spec = parse_model("llama:layers=4,hidden=1024,heads=8,vocab=32000,seq=512")
    pin = {"tp": 1, "micro_batch": 1, "recompute": "full", "zero": 0} | pin
    model, inputs = spec.build("meta"), spec.example_inputs(2, 512)
    traced = autopar.api.trace_spec(spec, 512, "bf16")
    return autopar.plan(model, instant(cluster), inputs, 8, pin, time_limit_s=10, traced=traced)


def test_its_price_is_the_transfers_and_the_hosts_memory():
    cluster = ClusterSpec.parse("h100:1")
    plain, moved = big_plan(cluster), big_plan(cluster, offload="optimizer")
    host, count = cluster.host, plain.predicted.memory["optimizer"] // 12
    assert moved.predicted.host_bytes == 16 * count  # master, moments and gradients in fp32
    expected = count * (4 + 2) / host.achieved_link_Bps + count * 30 / host.achieved_memory_Bps
    assert moved.predicted.breakdown["step"] == pytest.approx(expected, rel=1e-6)
    assert moved.predicted.step_time_s - plain.predicted.step_time_s == pytest.approx(
        expected - plain.predicted.breakdown["step"], rel=1e-6
    )
    assert "optimizer state: " in autopar.explain(
        moved
    ) and "of host memory per device of 250.00 GiB" in autopar.explain(moved)
    assert [d.what for d in autopar.diff(plain, moved) if d.part == "choices"] == ["offload"]
    assert Plan.from_json(moved.to_json()) == moved


def test_parameters_are_fetched_for_every_pass():
    cluster = ClusterSpec.parse("h100:2")
    pin = {"dp": 2, "zero": 3, "micro_batch": 2}
    half, whole = (
        big_plan(cluster, offload="optimizer", **pin),
        big_plan(cluster, offload="parameters", **pin),
    )
    count = whole.predicted.host_bytes // 18
    assert (
        whole.predicted.host_bytes - half.predicted.host_bytes
        == 2 * count
        == half.predicted.memory["parameters"]
    )
    assert whole.predicted.memory["parameters"] == 0 and whole.num_microbatches == 2
    # for forward, for backward, but not after the update
    link_s = 2 * count / cluster.host.achieved_link_Bps
    more_s = {
        part: seconds - half.predicted.breakdown[part]
        for part, seconds in whole.predicted.breakdown.items()
    }
    assert more_s["step"] == pytest.approx(-link_s, rel=1e-6)
    assert sum(more_s.values()) == pytest.approx(
        (2 * whole.num_microbatches - 1) * link_s, rel=1e-6
    )
    assert "parameters and optimizer state: " in autopar.explain(whole)
    free = big_plan(cluster, offload="parameters", micro_batch=2)
    assert free.mesh.pp == 1 and free.zero in (0, 3)


@pytest.mark.slow
@pytest.mark.parametrize(("pin", "words"), [
    ({"pp": 2}, r"offload=parameters: a pipeline \(pp=2\) has the parameters of its stages on the device"),
    ({"zero": 1}, "under zero=1 each device holds all parameters and shares out what the update needs; use zero=3 or 0"),
])  # fmt: skip
def test_what_cannot_fetch_parameters(pin, words):
    with pytest.raises(autopar.AutoparError, match=words):
        big_plan(ClusterSpec.parse("h100:2"), offload="parameters", **pin)
    plan = replace(big_plan(ClusterSpec.parse("h100:2"), **pin), offload="parameters")
    model = parse_model("llama:layers=4,hidden=1024,heads=8,vocab=32000,seq=512")
    traced = autopar.api.trace(model.build("meta"), model.example_inputs(1, 512))
    with pytest.raises(autopar.AutoparError, match=words):
        autopar.planning.plan_model.check_plan(plan, traced, instant(ClusterSpec.parse("h100:2")))


@pytest.mark.slow
def test_what_the_host_does_not_have():
    small = replace(
        ClusterSpec.parse("h100:1"),
        host=replace(ClusterSpec.parse("h100:1").host, memory_bytes=2**30),
    )
    with pytest.raises(NoPlanFits, match=r"GiB of host memory per device of 1.00"):
        big_plan(small, offload="optimizer")
    unknown = replace(small, device=replace(small.device, name="unheard-of"), host=None)
    with pytest.raises(autopar.AutoparError, match="nothing is known of the hosts of h100:1; give"):
        big_plan(unknown, offload="optimizer")
    with pytest.raises(
        autopar.AutoparError, match="offload='disk' is not known; none, optimizer, parameters are"
    ):
        big_plan(small, offload="disk")
    given = ClusterSpec.make(
        "l40s",
        host={"memory_bytes": 2**36, "memory_bandwidth_Bps": 4e10, "link_bandwidth_Bps": 2e10},
    )
    assert big_plan(given, offload="optimizer").predicted.host_bytes < 2**36


@pytest.mark.slow
def test_it_is_a_remedy_where_nothing_fits():
    cluster = ClusterSpec.parse("h100:1")
    peaks = [
        max(big_plan(cluster, offload=offload).predicted.peak_memory_bytes)
        for offload in ("none", "optimizer")
    ]
    tight = cluster.with_memory(sum(peaks) // 2)
    with pytest.raises(NoPlanFits, match=r"with the optimizer state in host memory: .* a step"):
        big_plan(tight)
    assert big_plan(tight, offload="optimizer").offload == "optimizer"


BEYOND_NCCL = """
import torch.distributed as dist
from autopar.ir.mesh import MeshShape
from autopar.runtime.ranks.process_groups import mesh_axes

dist.init_process_group("cuda:gloo", store=dist.HashStore(), rank=0, world_size=1)  # as NCCL, it reaches GPUs alone
mesh, axes = mesh_axes(MeshShape(), "cpu")
group = mesh.get_group("dp")
print(dist.get_backend(group), dist.get_world_size(group))
"""


def test_ranks_on_gpus_talk_about_what_is_on_the_host():
    found = subprocess.run(
        [sys.executable, "-c", BEYOND_NCCL], capture_output=True, text=True, timeout=120
    )
    assert found.stdout.split() == ["gloo", "1"], found.stderr
