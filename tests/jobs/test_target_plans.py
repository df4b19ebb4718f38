"""Plans within what a framework can run: they can be said, are not refused, and cost what they cost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from click.testing import CliRunner

import autopar
from autopar import api
from autopar.cli.plan_commands import cli
from autopar.errors import AutoparError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan import Plan
from autopar.models import parse_model
from autopar.request.pins import Pins
from autopar.request.plan_request import PlanRequest
from autopar.targets.from_plan import job_of_plan, layout_of
from autopar.targets.model_shape import shape_of
from autopar.targets.registry import TARGETS

SPEC = parse_model("llama:layers=2,hidden=256,heads=8,kv_heads=4,ffn=512,vocab=512,seq=256")
CLUSTER = ClusterSpec.parse("h100:4")


@pytest.fixture(scope="module")
def traced():
    return api.trace_spec(SPEC, 256)


_PLANS: dict[object, Plan] = {}


def planned(traced, target: str | None, **pin: object) -> Plan:
    """The plan within a target; each is made once."""
    key = target, tuple(pin.items())
    if key not in _PLANS:
        _PLANS[key] = _planned(traced, target, pin)
    return _PLANS[key]


def _planned(traced, target: str | None, pin: dict[str, object]) -> Plan:
    request = PlanRequest(CLUSTER, 16, Pins.of(pin), "bf16", False, SPEC.name)
    if target:
        request = request.within(TARGETS[target].restriction(shape_of(SPEC), 256))
    return api.plan_traced(traced, request, 30.0)


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("pin", [{}, {"tp": 2}], ids=["free", "tp=2"])
def test_plans_within_a_target_can_be_said(traced, name: str, pin: dict[str, object]) -> None:
    pin = {"cp": 2} if pin and name == "verl" else pin  # whose FSDP has no tp
    plan, free = planned(traced, name, **pin), planned(traced, None, **pin)
    assert plan.predicted.step_time_s >= free.predicted.step_time_s * (1 - 1e-9)
    assert plan.certificate.status == "optimal"
    assert (
        f"what {TARGETS[name].restriction(shape_of(SPEC), 256).name} can run"
        in plan.certificate.space
    )
    job = job_of_plan(plan, name, shape_of(SPEC), 4)
    assert TARGETS[name].refusals(job, 4) == []
    written = plan.export(name)
    assert written.text and written.target


def test_a_pipeline_for_megatron(traced) -> None:
    plan = planned(traced, "megatron", pp=2, tp=2)
    by = layout_of(plan)
    assert by.sequence_parallel and by.pp == 2 and by.schedule in ("1f1b", "interleaved_1f1b")
    text = plan.export("megatron").text
    for words in (
        "--tensor-model-parallel-size 2",
        "--pipeline-model-parallel-size 2",
        "--sequence-parallel",
        "--num-query-groups 4",
    ):
        assert words in text
    with pytest.raises(AutoparError, match="a pipeline"):
        plan.export("accelerate")


@pytest.mark.parametrize("name", ["megatron", "torchtitan"])
def test_the_loss_of_a_router_is_no_activation_that_layers_hand_on(name: str) -> None:
    spec = parse_model(
        "moe:layers=2,hidden=256,heads=8,kv_heads=4,ffn=512,vocab=512,seq=256,experts=4"
    )
    shape = shape_of(spec)
    request = PlanRequest(CLUSTER, 16, Pins.of({"tp": 2, "ep": 2}), "bf16", False, spec.name)
    request = request.within(TARGETS[name].restriction(shape, 256))
    plan = api.plan_traced(api.trace_spec(spec, 256), request, 30.0)
    losses = [
        str(axes["tp"].inputs[0])
        for block in plan.blocks
        for output, axes in block.ops.items()
        if block.segments[0].startswith("layers") and output.startswith("output")
    ]
    assert "P" in losses and "S(1)" in losses
    assert layout_of(plan).sequence_parallel


def test_what_no_target_can_run(traced) -> None:
    with pytest.raises(AutoparError, match="Accelerate can run none"):
        planned(traced, "accelerate", pp=1, zero=1, sequence_parallel=False)


def test_plans_that_no_framework_says(traced) -> None:
    plan = planned(traced, "megatron", tp=2, pp=1)
    layers = next(block for block in plan.blocks if block.name.startswith("layers"))
    odd = replace(
        layers,
        ops={name: axes for name, axes in layers.ops.items()}
        | {"mlp_up_proj_weight": layers.ops["mlp_norm_weight"]},
    )
    changed = replace(
        plan, blocks=tuple(odd if block is layers else block for block in plan.blocks)
    )
    with pytest.raises(AutoparError, match="tp leaves mlp_up_proj_weight of the plan whole"):
        layout_of(changed)
    mixed = replace(plan, blocks=(*plan.blocks, replace(layers, name="other", recompute="full")))
    with pytest.raises(AutoparError, match="differ in what is computed again"):
        layout_of(mixed)


def test_plan_with_a_target() -> None:
    model = SPEC.build("meta")
    plan = autopar.plan(
        model,
        "h100:4",
        SPEC.example_inputs(2, 256),
        global_batch=16,
        precision="bf16",
        target="transformers",
    )
    assert plan.mesh.pp == 1 and plan.zero in (0, 3)
    with pytest.raises(AutoparError, match="is not known"):
        autopar.plan(model, "h100:4", SPEC.example_inputs(2, 256), global_batch=16, target="jax")


def test_the_commands(tmp_path) -> None:
    path = str(tmp_path / "plan.json")
    asked = [
        "explain",
        SPEC.name,
        "h100:4",
        "--global-batch",
        "16",
        "--seq",
        "256",
        "--target",
        "transformers",
        "--save",
        path,
    ]
    done = CliRunner().invoke(cli, asked)
    assert done.exit_code == 0, done.output
    assert "target transformers: what Transformers can run takes" in " ".join(done.output.split())
    done = CliRunner().invoke(cli, ["export", path, "--to", "transformers", "--verify"])
    assert done.exit_code == 0, done.output
    assert (
        '"tp_size"' in done.output
        and "transformers 5.24 reads the layout of the plan" in done.output
    )
    done = CliRunner().invoke(cli, ["export", path, "--to", "jax"])
    assert done.exit_code == 2 and "target 'jax' is not known" in done.output
