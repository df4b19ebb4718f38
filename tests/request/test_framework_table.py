"""The table of frameworks: what releases and facts of a job decide, and what is refused."""

from __future__ import annotations

from dataclasses import fields

import pytest

from autopar.errors import AutoparError
from autopar.request.framework_names import FRAMEWORKS, framework_of
from autopar.request.frameworks import RULES, FrameworkJob, fields_of, software_of
from autopar.request.software import Software

NAMES = {field.name for field in fields(Software)}


def test_every_rule_sets_a_field_and_has_a_source():
    assert all(rule.field in NAMES and len(rule.source) > 20 for rule in RULES)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_every_framework_has_software(name):
    assert framework_of(name) == name
    assert isinstance(software_of(name), Software)
    assert isinstance(software_of(name, zero=3, sharding="fsdp", dp=8, matmul="fp8"), Software)


def test_autopar_is_what_plans_are_made_for():
    assert software_of("autopar") == Software()


@pytest.mark.parametrize(
    ("framework", "old", "new", "field", "before", "after"),
    [
        ("deepspeed", "0.5.10", "0.6", "state_recipe", "deepspeed_fp16", "deepspeed_bf16"),
        ("megatron-core", "0.11.0", "v0.12.1", "loss_kernel", "in_place", "fused"),
    ],
)
def test_a_release_decides(framework, old, new, field, before, after):
    facts = {"pp": 2, "dp": 2}
    assert getattr(software_of(framework, old, **facts), field) == before
    assert getattr(software_of(framework, new, **facts), field) == after
    assert getattr(software_of(framework, **facts), field) == after, "a recent one"


def test_deepspeed_used_one_interface_until_0_5_9():
    facts = {"zero": 3, "sharding": "zero", "dp": 16}
    assert software_of("deepspeed", "0.5.8", **facts).sharded_interfaces == 1
    assert software_of("deepspeed", "0.5.9", **facts).sharded_interfaces == 0


def test_a_version_counts_before_the_year():
    job = FrameworkJob(framework="deepspeed", version="0.5", year=2026, pp=2)
    assert fields_of(job)["state_recipe"] == "deepspeed_fp16"


def test_a_kernel_counts_where_it_was_measured():
    assert software_of("megatron-core").attention_kernel is None
    assert software_of("megatron-core", generation="hopper").attention_kernel == "cudnn"


def test_fp8_has_the_scaling_of_its_recipe():
    found = software_of("megatron-core", matmul="fp8", recipe="mx")
    assert (found.matmul_dtype, found.fp8_scaling) == ("fp8", "block")


@pytest.mark.parametrize(
    ("arguments", "facts", "words"),
    [
        (("megatorn",), {}, "megatron"),
        (("torchtitan", "main"), {}, "has no numbers"),
        (("torchtitan",), {"zero": 4}, "zero=4"),
        (("torchtitan",), {"sharding": "fspd"}, "fsdp"),
        (("torchtitan",), {"recipe": "mxfp"}, "mx"),
        (("torchtitan",), {"micro_batch": 2}, "micro_batch=2 is no fact"),
    ],
)
def test_what_is_not_known_is_refused(arguments, facts, words):
    with pytest.raises(AutoparError, match=words):
        software_of(*arguments, **facts)


def test_recipes_for_experts_differ_by_gpu():
    """DeepEP between nodes of H100, CUDA graphs on GB200, neither on B200; and no routing where tokens are dropped."""
    facts = {"experts": 128, "dp": 8, "year": 2026}
    h100, gb200, b200 = (
        software_of("megatron-core", gpu=gpu, **facts)
        for gpu in ("H100-80G-SXM", "GB200-NVL72", "B200-180G")
    )
    assert [one.dispatch for one in (h100, gb200, b200)] == ["once", "copies", "copies"]
    assert [one.cuda_graphs for one in (h100, gb200, b200)] == ["none", "but experts", "none"]
    assert h100.routing_operations == b200.routing_operations > gb200.routing_operations == 0
    dropped = software_of("megatron-core", gpu="B200-180G", drops_tokens=True, **facts)
    assert (dropped.routing_operations, dropped.cuda_graphs) == (0, "all")
    assert software_of("nemo-automodel", dispatches_once=True, experts=8).dispatch == "once"
