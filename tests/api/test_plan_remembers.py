"""A plan remembers what it was made for: nothing is given again, and what contradicts it is refused."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import cache

import pytest
import torch
from click.testing import CliRunner
from support.effort import every

import autopar
from autopar import api
from autopar.cli.plan_commands import cli
from autopar.errors import AutoparError
from autopar.ir.plan import Plan
from autopar.ir.plan_fields import MadeFor
from autopar.models import parse_model
from autopar.models.spec import text_of_model
from autopar.request.plan_request import request_of
from autopar.text.plan_words import named_cluster

SPEC = parse_model("llama:layers=4,hidden=256,heads=8,vocab=1024")
MODEL, BATCH = SPEC.build("meta"), SPEC.example_inputs(2, 256)
PIN = {"tp": 2, "sequence_parallel": True, "dp": 2}


@cache
def planned() -> Plan:
    """A plan whose price depends on its software and on a pin that its choices do not show."""
    plan = autopar.plan(MODEL, "h100:4", BATCH, 32, PIN, target="megatron", headroom=0.1)
    return Plan.from_json(plan.to_json())


def test_a_report_has_the_software_and_the_pins_of_the_plan():
    plan = planned()
    report = autopar.explain(plan, model=MODEL, example_inputs=BATCH)
    assert report.timeline.step_s == pytest.approx(plan.predicted.step_time_s, rel=1e-9)
    request = request_of(plan, named_cluster(plan))
    assert dict(request.pin) == PIN and request.software.fused_kernels
    assert request.cluster.one_kind.headroom == 0.1


@pytest.mark.parametrize(
    ("given", "words"),
    every(2, [
        ({"software": autopar.Software()}, r"made for software \{.*'framework': 'megatron.*\}, not \{\}"),
        ({"pin": {"tp": 4}}, r"made for pins \{.*'tp': 2\}, not \{'tp': 4\}"),
        ({"cluster": "h100:8"}, r"they differ in devices_per_node 4 -> 8: plan again"),
    ], unpacked=True),
)  # fmt: skip
def test_what_contradicts_a_plan_is_refused_with_both_values(given, words):
    with pytest.raises(AutoparError, match=words):
        autopar.explain(planned(), **given)


@pytest.mark.parametrize(
    ("given", "words"),
    every(1, [
        ({"software": 3}, "software is 3, not an autopar.Software or the name of a framework"),
        ({"software": "foo"}, r"software='foo' \(--software\) is not known"),
        ({"software": "deepspeed"}, r"made for software \{.*\}, not \{.*'dp_overlap': False"),
        ({"cluster": 3}, "cluster is 3, not a ClusterSpec"),
        ({"pin": 3}, "pin is 3, not a mapping"),
        ({"model": 3}, "model is 3, not a torch.nn.Module"),
        ({"loss_fn": 3}, "loss_fn is 3, not a function"),
        ({"traced": 3}, "traced is 3, not what"),
        ({"plan": None}, "plan is None, not a Plan"),
        ({"plan": "plan.json"}, "plan is 'plan.json', not a Plan"),
    ], unpacked=True),
)  # fmt: skip
def test_explain_checks_its_arguments_as_plan_does(given, words):
    with pytest.raises(AutoparError, match=words):
        autopar.explain(**{"plan": planned()} | given)


def test_explain_takes_the_name_of_a_framework_as_plan_does():
    plan = autopar.plan(MODEL, "h100:4", BATCH, 32, {"tp": 2, "zero": 1}, software="deepspeed")
    assert autopar.explain(plan, software="deepspeed").plan == plan


def test_what_a_plan_says_may_be_given_again():
    plan = planned()
    software = autopar.Software.from_data(plan.made_for.software)
    report = autopar.explain(plan, cluster="h100:4", pin=PIN, software=software)
    assert report.cluster == named_cluster(plan)


def test_a_plan_of_an_earlier_version_takes_what_it_does_not_say():
    plan, traced = planned(), api.trace(MODEL, BATCH)
    old, software = (
        replace(plan, made_for=MadeFor()),
        autopar.Software.from_data(plan.made_for.software),
    )
    own = autopar.explain(old, traced=traced, pin=PIN, software=software)
    assert own.timeline.step_s == pytest.approx(plan.predicted.step_time_s, rel=1e-9)


def test_a_saved_plan_is_explained_in_a_new_process(tmp_path):
    planned().save(tmp_path / "plan.json")
    code = f"import autopar; print(autopar.explain(autopar.Plan.load({str(tmp_path / 'plan.json')!r})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "h100:4" in done.stdout


def test_a_plan_of_rows_along_another_dim_is_explained():
    spec = parse_model("benchmarks.exactness.own_modules:frames")
    model, batch, dims = spec.build("meta"), spec.example_inputs(2, 1), spec.batch_dims()
    plan = autopar.plan(model, "h100:2", batch, 8, {"pp": 1}, batch_dims=dims)
    report = autopar.explain(plan, model=model, example_inputs=batch, batch_dims=dims)
    assert report.timeline.step_s == pytest.approx(plan.predicted.step_time_s, rel=0.02)


def test_a_plan_of_a_module_names_a_text_that_builds_it():
    plan = planned()
    assert plan.made_for.target == "megatron" and plan.made_for.seq == 256
    traced = api.trace_spec(parse_model(plan.made_for.model), plan.made_for.seq)
    assert traced.model_hash == plan.model_hash
    own = torch.nn.Sequential(torch.nn.Linear(4, 4))
    assert text_of_model(own) == ""


@pytest.mark.parametrize(
    "text",
    every(2, ["llama3-8b", "gpt:layers=2,hidden=64,heads=4,vocab=128,tied=true,positions=alibi",
              "moe:layers=2,hidden=64,heads=4,vocab=256,experts=4,ffn=128,window=8", "qwen3-0.6b", "vit-b-16",
              "dit-b-2", "gpt:layers=2,hidden=64,heads=4,vocab=128,tied=false"]),
)  # fmt: skip
def test_a_text_of_a_model_builds_an_equal_one(text):
    spec = parse_model(text)
    again = parse_model(text_of_model(spec.build("meta")))
    assert text_of_model(again.build("meta")) == text_of_model(spec.build("meta"))
    assert again.num_parameters() == spec.num_parameters()


class Own(torch.nn.Module):
    """A module of a user that keeps the config of another model."""

    def __init__(self, config):
        super().__init__()
        self.config, self.linear = config, torch.nn.Linear(8, 8)

    def forward(self, x, labels):
        return (self.linear(x) - labels).square().mean()


def own_module():
    from transformers import LlamaConfig

    batch = {"x": torch.empty(8, 8, device="meta"), "labels": torch.empty(8, 8, device="meta")}
    return Own(LlamaConfig(**LLAMA)).to("meta"), batch


def classifier():
    from transformers import LlamaConfig, LlamaForSequenceClassification

    config = LlamaConfig(**LLAMA, pad_token_id=0)
    with torch.device("meta"):
        model = LlamaForSequenceClassification(config)
    return model, api.default_inputs(model)


def frozen_model():
    spec = parse_model("gpt-tiny")
    model = spec.build("meta")
    next(model.parameters()).requires_grad_(False)
    return model, spec.example_inputs(2, 32)


LLAMA = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 64,
         "num_attention_heads": 4, "max_position_embeddings": 32}  # fmt: skip


@pytest.mark.parametrize("make", every(1, [own_module, frozen_model, classifier]))
def test_a_plan_of_a_module_that_no_text_builds_names_none(make, tmp_path):
    model, batch = make()
    plan = autopar.plan(model, "h100:1", batch, 8)
    assert plan.made_for.model == ""
    plan.save(tmp_path / "plan.json")
    result = CliRunner().invoke(cli, ["audit", str(tmp_path / "plan.json")])
    assert result.exit_code == 2 and "give MODEL" in result.output, result.output
    assert "--num-layers" not in autopar.export(plan, "megatron").text


def test_a_plan_of_a_model_of_transformers_names_its_config():
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**LLAMA))
    plan = autopar.plan(model, "h100:1", global_batch=8)
    traced = api.trace_spec(parse_model(plan.made_for.model), plan.made_for.seq, "bf16")
    assert traced.model_hash == plan.model_hash


def test_a_plan_is_exported_for_the_target_that_it_was_made_for():
    plan = planned()
    exported = autopar.export(plan)
    assert exported.text == autopar.export(plan, "megatron", plan.made_for.model).text
    assert "--num-layers 4" in exported.text and "--seq-length 256" in exported.text
    with pytest.raises(AutoparError, match="has other dimensions"):
        autopar.export(plan, model="llama3-8b")
    free = replace(plan, made_for=replace(plan.made_for, target=""))
    with pytest.raises(AutoparError, match=r"say for which it is to be written; .*megatron"):
        autopar.export(free)


@pytest.mark.parametrize("check", every(1, ["audit", "replay"]))
def test_a_plan_of_python_is_checked_by_commands_with_nothing_given_again(check, tmp_path):
    path = str(tmp_path / "plan.json")
    planned().save(path)
    assert CliRunner().invoke(cli, [check, path]).exit_code == 0
    for again, words in (
        (["--pin", "tp=4"], "not {'tp': 4}"),
        (["--precision", "fp16"], "precision 'bf16', not 'fp16'"),
    ):
        result = CliRunner().invoke(cli, [check, path, *again])
        assert result.exit_code == 2 and words in result.output


def test_a_plan_has_the_cluster_and_the_compiler_of_its_engine():
    spec = parse_model("llama-tiny")
    batch = spec.example_inputs(2, 16, "cpu")
    plan = autopar.plan(
        spec.build("meta"),
        "cpu:1",
        batch,
        4,
        software=autopar.Software(compiled=True),
    )
    engine = autopar.parallelize(spec.build("cpu"), example_inputs=batch, plan=plan)
    assert engine.plan == plan and engine.compiled is not None
    with pytest.raises(AutoparError, match=r"for cluster cpu:1 .*; this is cpu:2"):
        autopar.parallelize(spec.build("cpu"), "cpu:2", batch, plan=plan)
    with pytest.raises(AutoparError, match="loss of the batch, not allow_micro_batch_mean=True"):
        autopar.parallelize(
            spec.build("cpu"), example_inputs=batch, plan=plan, allow_micro_batch_mean=True
        )
    with pytest.raises(AutoparError, match="cluster is None"):
        autopar.parallelize(spec.build("cpu"), example_inputs=batch)


@pytest.mark.parametrize(
    "given", [{"software": "no-such"}, {"software": 3}, {"cluster": 3}, {"pin": 3}, {"model": 3}]
)
def test_explain_refuses_arguments_of_another_kind(given):
    ((name, value),) = given.items()
    with pytest.raises(AutoparError, match=value if isinstance(value, str) else name):
        autopar.explain(planned(), **given)


def test_a_plan_for_compiled_code_that_the_engine_cannot_compile_is_refused_by_its_default():
    spec = parse_model("llama-tiny")
    batch = spec.example_inputs(2, 16, "cpu")
    software, pin = autopar.Software(compiled=True), {"recompute": "op"}
    plan = autopar.plan(spec.build("meta"), "cpu:1", batch, 4, pin, software=software)
    words = r"made for compiled code: the engine cannot compile .* or pass compile=False"
    with pytest.raises(AutoparError, match=words):
        autopar.parallelize(spec.build("cpu"), example_inputs=batch, plan=plan)
