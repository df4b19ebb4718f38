"""Plans within what a framework can run: they can be said, are not refused, and cost what they cost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from click.testing import CliRunner
from support.effort import every

import autopar
from autopar import api
from autopar.cli.plan_commands import cli
from autopar.errors import AutoparError
from autopar.foreign.checking.check import check_job
from autopar.foreign.frameworks.nanotron import NANOTRON
from autopar.foreign.frameworks.registry import TARGETS
from autopar.foreign.limits.frameworks import restriction_of
from autopar.foreign.writers.export import convert, exported_job
from autopar.foreign.writers.from_plan import job_of_plan, layers_of, layout_of
from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan import Plan
from autopar.models import parse_model
from autopar.models.shapes import shape_of_spec
from autopar.request.pins import Pins
from autopar.request.plan_request import PlanRequest

SPEC = parse_model("llama:layers=2,hidden=256,heads=8,kv_heads=4,ffn=512,vocab=512,seq=256")
_H100 = ClusterSpec.parse("h100:4")
CLUSTER = replace(_H100, device=replace(_H100.device, dispatch_s=0.0))
"""Hosts that issue at once: kernels of these models are short."""


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
    request = PlanRequest(CLUSTER, 16, Pins.of(pin), "bf16", SPEC.name)
    if target:
        request = request.within(TARGETS[target].limits.restriction(shape_of_spec(SPEC), 256))
    return api.plan_traced(traced, request, 30.0)


@pytest.mark.parametrize("name", TARGETS)
def test_a_plan_of_a_target_is_in_a_precision_that_it_can_say(traced, name: str) -> None:
    restriction, said = restriction_of(name, shape_of_spec(SPEC), 256), []
    pins = Pins.of({"dp": 4, "tp": 1, "pp": 1, "cp": 1, "micro_batch": 4})
    for precision in ("bf16", "fp16", "fp32"):
        request = PlanRequest(CLUSTER, 16, pins, precision, SPEC.name)
        try:
            request = request.within(restriction)
        except AutoparError as error:
            assert "trains in" in str(error)
            continue
        plan = api.plan_traced(traced, request, 30.0)
        said.append(exported_job(plan, name, SPEC.name)[0].facts.precision)
    assert "bf16" in said


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("pin", every(2, [{}, {"tp": 2}]), ids=["free", "tp=2"])
def test_plans_within_a_target_can_be_said(traced, name: str, pin: dict[str, object]) -> None:
    pin = {"cp": 2} if pin and name == "verl" else pin  # whose FSDP has no tp
    plan, free = planned(traced, name, **pin), planned(traced, None, **pin)
    assert plan.predicted.step_time_s >= free.predicted.step_time_s * (1 - 1e-9)
    assert plan.certificate.status == "optimal"
    assert (
        f"what {TARGETS[name].limits.restriction(shape_of_spec(SPEC), 256).name} can run"
        in plan.certificate.space
    )
    job = job_of_plan(plan, name, shape_of_spec(SPEC), 4)
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


@pytest.mark.slow
def test_the_loss_of_a_router_is_no_activation_that_layers_hand_on() -> None:
    spec = parse_model(
        "moe:layers=2,hidden=256,heads=8,kv_heads=4,ffn=512,vocab=512,seq=256,experts=4"
    )
    shape = shape_of_spec(spec)
    request = PlanRequest(CLUSTER, 16, Pins.of({"tp": 2, "ep": 2}), "bf16", spec.name)
    traced = api.trace_spec(spec, 256)
    titan = request.within(TARGETS["torchtitan"].limits.restriction(shape, 256))
    with pytest.raises(AutoparError, match="has whole experts beside tp"):
        api.plan_traced(traced, titan, 30.0)
    request = request.within(TARGETS["megatron"].limits.restriction(shape, 256))
    plan = api.plan_traced(traced, request, 30.0)
    losses = [
        str(axes["tp"].inputs[0])
        for block in plan.blocks
        for output, axes in block.ops.items()
        if block.segments[0].startswith("layers") and output.startswith("output")
    ]
    assert "P" in losses and "S(1)" in losses
    assert layout_of(plan).sequence_parallel


def within(traced, spec, name: str, **pin: object) -> Plan:
    request = PlanRequest(CLUSTER, 16, Pins.of(pin), "bf16", spec.name)
    request = request.within(restriction_of(name, shape_of_spec(spec), 256))
    return api.plan_traced(traced, request, 30.0)


def test_what_no_layout_keeps_to() -> None:
    """Three heads of keys and values for two tensor-parallel ranks."""
    words = (
        "Accelerate can run none of the .* layouts that the pins .* allow: it shares out 3 heads of keys and values evenly "
        "over tp; use a tp that divides 3, another number of devices or another batch"
    )
    spec = parse_model("llama:layers=2,hidden=192,heads=3,ffn=256,vocab=512,seq=256")
    traced = api.trace_spec(spec, 256)
    with pytest.raises(AutoparError, match=words):
        within(traced, spec, "accelerate", tp=2)


PINNED = [
    ("accelerate", {"pp": 2}, "pp=2: it has no pipeline; pin pp=1, or drop the pin; of other targets, transformers, torchtitan, "),
    ("deepspeed", {"pp": 2}, "pp=2: it has pipelines as code"),
    ("openrlhf", {"pp": 2, "vpp": 1}, "pp=2: it has no pipeline"),
    ("verl", {"pp": 2}, r"pp=2: it has no pipeline under FSDP; its Megatron-LM has it \(--target megatron\)"),
    ("accelerate", {"vpp": 2}, "vpp=2: it has no pipeline; pin vpp=1"),
    ("accelerate", {"schedule": "1f1b"}, "schedule='1f1b': it has no pipeline; pin schedule=none"),
    ("accelerate", {"stages": "1-1"}, "stages='1-1': it has no pipeline; drop the pin"),
    ("nanotron", {"vpp": 2}, "vpp=2: it has one stage on a rank"),
    ("nanotron", {"schedule": "zero_bubble"}, "schedule='zero_bubble': it has no other schedule .*; pin schedule=none or 1f1b or gpipe"),
    ("nanotron", {"cp": 2}, "cp=2: it has no context parallelism"),
    ("nanotron", {"zero": 3}, "zero=3: it has no ZeRO-2 and ZeRO-3; pin zero=0 or 1"),
    ("nanotron", {"offload": "optimizer"}, "offload='optimizer': it has nothing in host memory"),
    ("megatron", {"recompute": "op"}, "recompute='op': it computes nothing else again; pin recompute=none or selective or full"),
    ("megatron", {"recompute": "every-2"}, "recompute='every-2'"),
    ("megatron", {"schedule": "gpipe"}, "schedule='gpipe'"),
    ("transformers", {"sequence_parallel": True}, "sequence_parallel=True: it leaves .*; pin sequence_parallel=false"),
    ("transformers", {"cp": 2}, "cp=2: it has no context parallelism"),
    ("verl", {"tp": 2}, "tp=2: it has no tensor parallelism"),
    ("openrlhf", {"context_method": "gather"}, "context_method='gather': it has ring attention alone"),
    ("nanotron", {"context_method": "ring"}, "context_method='ring': it has no context parallelism; drop the pin"),
    ("verl", {"sequence_parallel": True}, "sequence_parallel=True: it has no tensor parallelism .*; pin sequence_parallel=false"),
    ("deepspeed", {"ep": 2}, "ep=2: it has expert parallelism as code"),
    ("torchtitan", {"zero": 1}, "zero=1: it has no ZeRO-1"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "pin", "words"), PINNED, ids=[f"{n}-{p}" for n, p, _ in PINNED])
def test_pins_that_a_target_cannot_run(
    traced, name: str, pin: dict[str, object], words: str
) -> None:
    with pytest.raises(AutoparError, match=f"cannot run {words}"):
        within(traced, SPEC, name, **pin)


@pytest.mark.parametrize("name", [None, "megatron", "accelerate"])
def test_the_schedule_of_no_pipeline(traced, name: str | None) -> None:
    assert planned(traced, name, schedule="none").mesh.pp == 1


def test_targets_that_a_message_proposes_can_run_the_pins(traced) -> None:
    pin = {"pp": 2, "tp": 2}
    with pytest.raises(AutoparError) as caught:
        within(traced, SPEC, "accelerate", **pin)
    named = str(caught.value).partition("of other targets, ")[2].partition(" can run")[0]
    assert set(named.split(", ")) == {
        "transformers",
        "torchtitan",
        "gpt-neox",
        "bridge",
        "megatron",
    }
    for name in named.split(", "):
        assert planned(traced, name, **pin).mesh.pp == 2


DEEP = parse_model("llama:layers=10,hidden=256,heads=8,kv_heads=4,ffn=512,vocab=2048,seq=256")


@pytest.fixture(scope="module")
def deep():
    return api.trace_spec(DEEP, 256)


def within_nanotron(deep, **pin: object) -> Plan:
    return within(deep, DEEP, "nanotron", **pin)


@pytest.mark.parametrize(("pp", "sizes"), every(2, [(4, (3, 3, 3, 1)), (2, (6, 4))], unpacked=True))
def test_nanotron_gets_the_stages_that_it_cuts(deep, tmp_path, pp: int, sizes) -> None:
    """The head costs as much as 4/5 of a layer."""
    plan = within_nanotron(deep, pp=pp)
    assert layers_of(plan) == sizes and plan.certificate.status == "optimal"
    job, written = exported_job(plan, "nanotron", DEEP.name)
    path = tmp_path / "config.yaml"
    path.write_text(written.text)
    again = autopar.read_job(path)
    assert again.layout.stages == job.layout.stages == sizes
    assert check_job(again, CLUSTER, time_limit_s=5.0).layers == tuple((size,) for size in sizes)
    with pytest.raises(
        AutoparError, match=r"nanotron cannot run stages=.*into stages of 6-4; drop the pin"
    ):
        within_nanotron(deep, pp=2, stages="even")
    same = within_nanotron(deep, pp=pp, stages="-".join(map(str, sizes)))
    assert layers_of(same) == sizes


def test_the_plan_is_the_fastest_with_these_stages(deep) -> None:
    """Each layout alone, with the stages pinned, against the search within the target."""
    best = within_nanotron(deep, pp=2)
    found = []
    for tp in (1, 2):
        for zero in (0, 1) if tp == 1 else (0,):
            for micro in (1, 2, 4, 8):
                for recompute in ("none", "full"):
                    for schedule in ("1f1b", "gpipe"):
                        pin = {"pp": 2, "tp": tp, "zero": zero, "micro_batch": micro, "recompute": recompute,
                               "schedule": schedule, "stages": "6-4", "sequence_parallel": True}  # fmt: skip
                        request = PlanRequest(CLUSTER, 16, Pins.of(pin), "bf16", DEEP.name)
                        try:
                            found.append(api.plan_traced(deep, request, 30.0).predicted.step_time_s)
                        except AutoparError as error:
                            assert "micro-batches" in str(error) or "pipeline" in str(error), error
    assert len(found) > 20
    assert best.predicted.step_time_s == pytest.approx(min(found), rel=1e-6)


@pytest.mark.slow
def test_another_model_is_cut_otherwise(deep, tmp_path) -> None:
    plan = within_nanotron(deep, pp=2)
    path = tmp_path / "config.yaml"
    path.write_text(exported_job(plan, "nanotron", DEEP.name)[1].text)
    model = DEEP.name.replace("layers=10", "layers=4")
    found = check_job(autopar.read_job(path), CLUSTER, model=model, advise=False)
    assert found.layers == ((3,), (1,))
    path.write_text(path.read_text().replace("num_hidden_layers: 10", "num_hidden_layers: 1"))
    notes = [str(finding) for finding in autopar.read_job(path).findings]
    assert any("1 of 2 ranks of the pipeline have no layer" in note for note in notes)


def test_a_cut_that_leaves_a_rank_without_a_layer(deep) -> None:
    spec = parse_model("llama:layers=4,hidden=256,heads=8,kv_heads=4,ffn=512,vocab=2048,seq=256")
    traced = api.trace_spec(spec, 256)
    words = (
        "nanotron cuts no pipeline of pp=4 ranks from the 4 layers: it cuts by the cost of layers and head, and a rank would "
        "have no layer; pin another pp"
    )
    with pytest.raises(AutoparError, match=words):
        within(traced, spec, "nanotron", pp=4)


def test_transformers_deals_layers_evenly(deep) -> None:
    plan = within(deep, DEEP, "transformers", pp=2, tp=2)
    assert layers_of(plan) == (5, 5) and plan.export("transformers").text
    with pytest.raises(AutoparError, match="pp=4 ranks from the 10 layers: it deals layers evenly"):
        within(deep, DEEP, "transformers", pp=4)


def test_a_conversion_takes_the_stages_of_the_target(tmp_path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(
        "torchrun --nproc-per-node 4 --nnodes 1 pretrain_gpt.py --num-layers 10 --hidden-size 256 --num-attention-heads 8 "
        "--ffn-hidden-size 512 --swiglu --vocab-size 2048 --seq-length 256 --max-position-embeddings 256 --bf16 "
        "--pipeline-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 16 --untie-embeddings-and-output-weights\n"
    )
    job = autopar.read_job(path)
    written = convert(job, "nanotron")
    assert "stages of 5-5 layers become 6-4, as nanotron 0.5 cuts them" in written.losses
    words = "stages of 5-5 layers, since it cuts by the cost of layers and head: the nearest is 6-4"
    with pytest.raises(AutoparError, match=words):
        NANOTRON.write(job)


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
