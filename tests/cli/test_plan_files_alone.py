"""Plan files stand alone: audit and replay without MODEL and CLUSTER; software, tokens and units of rows in reports."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.effort import every

import autopar
from autopar.cli.options import software_from
from autopar.cli.plan_commands import cli
from autopar.errors import AutoparError
from autopar.foreign.limits.asked_software import software_like
from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan import Plan
from autopar.ir.plan_fields import MadeFor
from autopar.models import parse_model
from autopar.request.software import Software
from autopar.text.plan_words import named_cluster
from autopar.text.training_words import training_of, training_words

TASK = [
    "llama-tiny",
    "h100:4",
    "--global-batch",
    "8",
    "--seq",
    "16",
    "--pin",
    "tp=2,pp=1,context_method=ring",
]
FP8 = ["--fp8", "current", "--compile", "--state-recipe", "bf16_moments", "--loss-kernel", "fused"]


def run(*args: str, code: int = 0) -> str:
    result = CliRunner().invoke(cli, list(args))
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    text = run("explain", *TASK, *FP8, "--save", str(path), "--tokens", "1e9", "--price", "2.5")
    assert (
        "software torch.compile, fp8 linear layers (current scaling), loss_kernel='fused', state_recipe='bf16_moments'"
        in text
    )
    assert "training on 1 B tokens" in text and "GPU-hours, $" in text
    return path


def test_the_file_says_what_it_was_made_for(saved):
    made_for = Plan.load(saved).made_for
    assert (made_for.model, made_for.seq, made_for.rows) == ("llama-tiny", 16, "tokens")
    assert made_for.pins == {"tp": 2, "pp": 1, "context_method": "ring"}
    assert made_for.software["state_recipe"] == "bf16_moments"
    assert (
        named_cluster(Plan.load(saved)) == ClusterSpec.parse("h100:4").with_price(2.5).kept_free()
    )


@pytest.mark.parametrize("command", every(2, ["replay", "audit"]))
def test_a_plan_file_suffices(saved, command):
    run(command, str(saved))
    run(command, str(saved), "llama-tiny", "h100:4")


def test_a_cluster_file_is_inside_the_plan(tmp_path):
    own = ClusterSpec.make("l4", devices_per_node=4, name="my lab", memory_bytes=20 * 2**30)
    own.to_yaml(tmp_path / "lab.yaml")
    path = str(tmp_path / "plan.json")
    run("explain", "llama-tiny", str(tmp_path / "lab.yaml"), *TASK[2:], "--save", path)
    (tmp_path / "lab.yaml").unlink()
    assert "as the plan says" in run("audit", path)


def test_a_mismatch_names_what_differs(saved):
    assert "on sequences of 16 tokens, and this model reads 32: ask with --seq 16" in run(
        "audit", str(saved), "--seq", "32", code=2
    )
    said = run("audit", str(saved), "llama-tiny", "h100:8", code=2)
    assert "they differ in devices_per_node 4 -> 8" in said
    said = run("audit", str(saved), "llama-tiny", "h200:4", code=2)
    assert "device.memory_bytes" in said and "more: plan again" in said


def test_files_of_earlier_versions_ask_for_what_they_do_not_say(saved, tmp_path):
    plan = replace(Plan.load(saved), made_for=MadeFor())
    plan.save(tmp_path / "old.json")
    assert "does not say what names its model: give MODEL" in run(
        "audit", str(tmp_path / "old.json"), code=2
    )
    own = replace(plan, made_for=MadeFor(model="llama-tiny"), cluster_name="my lab")
    own.save(tmp_path / "lab.json")
    assert "does not say its whole cluster: give CLUSTER" in run(
        "audit", str(tmp_path / "lab.json"), code=2
    )


def test_damaged_facts_are_refused(saved, tmp_path):
    data = json.loads(saved.read_text())
    data["made_for"]["seq"] = "long"
    (tmp_path / "damaged.json").write_text(json.dumps(data))
    with pytest.raises(AutoparError, match="seq is 'long', which is no int"):
        Plan.load(tmp_path / "damaged.json")


def test_rows_of_images_are_counted_as_images(tmp_path):
    config = {"model_type": "vit", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
              "image_size": 32, "patch_size": 8}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = run("explain", f"hf:{tmp_path}", "h100:2", "--global-batch", "8", "--price", "2")
    assert "images per second" in text and "cost of a million images" in text
    report = text.split("Plan mesh")[1].split("Certificate")[0]
    assert "tokens" not in report


def test_training_takes_tokens_over_rate():
    spec = parse_model("llama-tiny")
    plan = autopar.plan(spec.build("meta"), "h100:4", spec.example_inputs(2, 16), global_batch=8)
    plan = replace(plan, predicted=replace(plan.predicted, tokens_per_s=1e6))
    found = training_of(plan, 8.64e10 * 10, ClusterSpec.parse("h100:4").with_price(2.0))
    assert (found.days, found.device_hours, found.dollars) == pytest.approx((10, 960, 1920))
    assert training_words(plan, found) == "10 days, 960 GPU-hours, $1,920"
    assert "no price (--price)" in training_words(plan, training_of(plan, 1e9, None))


def test_an_accelerator_without_bf16_computes_in_fp16():
    text = run("explain", "llama-tiny", "v100-32g:4", *TASK[2:5], "16", "--pin", "pp=1")
    assert "precision fp16" in text


def test_a_framework_decides_what_its_parts_do_not():
    parts = software_from({"fp8_scaling": "block", "loss_kernel": "plain"})
    at = ClusterSpec.parse("dgx-h100:1"), {"zero": 3, "dp": 8}, "bf16"
    fsdp = software_like("torchtitan", parts, *at)
    assert (fsdp.state_recipe, fsdp.root_unit, fsdp.matmul_dtype, fsdp.fp8_scaling) == (
        "fsdp",
        True,
        "fp8",
        "block",
    )
    deepspeed = software_like("deepspeed", parts, *at)
    assert deepspeed.state_recipe == "deepspeed_fp16" and not deepspeed.root_unit
    assert software_like("autopar", Software(), None, {}, None) == Software()
    with pytest.raises(AutoparError, match="is not known; known: accelerate"):
        software_like("maxtext", Software(), *at)
