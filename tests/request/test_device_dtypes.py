"""A device computes in the dtypes of its catalogue entry; others are refused with one that works."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from autopar_cost_models import DEVICES
from torch import nn

import autopar
from autopar.errors import AutoparError
from autopar.foreign.frameworks.registry import TARGETS
from autopar.foreign.limits.asked_software import software_like
from autopar.foreign.limits.frameworks import limits_of, restriction_of
from autopar.ir.cluster import ClusterSpec
from autopar.ir.model_shape import ModelShape
from autopar.ir.plan_checks import PRECISIONS
from autopar.request.pins import Pins
from autopar.request.plan_request import PlanRequest, choose_precision

LACKING = sorted(
    {(name, dtype) for name in DEVICES for dtype in PRECISIONS if dtype not in DEVICES[name].flops}
)


def requested(cluster: str, precision: str) -> PlanRequest:
    return PlanRequest(ClusterSpec.parse(cluster), 8, Pins(), precision, "model")


def test_earlier_generations_lack_bf16():
    assert {("v100-16g", "bf16"), ("v100-32g", "bf16"), ("t4", "bf16")} <= set(LACKING)


@pytest.mark.parametrize(("device", "dtype"), LACKING)
def test_a_dtype_that_the_device_lacks_is_refused_with_one_that_it_has(device, dtype):
    with pytest.raises(AutoparError, match=f"{device} does not compute in {dtype}") as error:
        requested(f"{device}:1", dtype)
    advised = str(error.value).rpartition("--precision ")[2].rstrip(")")
    assert requested(f"{device}:1", advised).precision == advised
    assert requested(f"{device}:1", choose_precision(ClusterSpec.parse(f"{device}:1")))


def test_fp8_names_the_device_that_lacks_it():
    with pytest.raises(AutoparError, match="v100-16g has no fp8 rate"):
        autopar.Software(matmul_dtype="fp8").check(DEVICES["v100-16g"], "fp16")


def test_a_model_is_planned_in_what_its_devices_compute():
    model, batch = nn.Linear(8, 1), (torch.zeros(8, 8), torch.zeros(8, 1))
    planned = autopar.plan(model, "2x V100 16GB", batch, loss_fn=nn.functional.mse_loss)
    assert planned.precision == "fp16" and "is taken as v100-16g:2" in planned.notes[0]
    with pytest.raises(AutoparError, match="precision fp16"):
        autopar.plan(model.bfloat16(), "v100-16g:2", batch, loss_fn=nn.functional.mse_loss)


def within(target: str, cluster: str, precision: str) -> PlanRequest:
    """A request within a target, at the prices of its software."""
    asked, own = requested(cluster, precision), limits_of(target)
    software = own.software_for(asked.cluster.one_kind.device.generation, compute=precision)
    return replace(asked, software=software).within(restriction_of(target, ModelShape(), 512))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("cluster", ["t4:2", "v100-32g:8", "h100:4", "cpu:2"])
def test_a_target_is_planned_in_a_precision_of_the_devices(target, cluster):
    precision = choose_precision(ClusterSpec.parse(cluster))
    try:
        asked = within(target, cluster, precision)
    except AutoparError as error:
        lacks = "bf16 or fp16, not in fp32" if target == "bridge" else "bf16 or fp32, not in fp16"
        assert f"trains in {lacks}" in str(error)
        advised = str(error).partition("--precision ")[2].partition(")")[0]
        asked = within(target, cluster, advised)
    recipe = asked.software.state_recipe
    assert recipe is None or asked.precision in ("bf16", "fp16")


def test_a_target_without_half_precision_says_what_it_trains_in():
    with pytest.raises(AutoparError, match=r"torchtitan trains in bf16 or fp32, not in fp16"):
        within("torchtitan", "h100:4", "fp16")
    assert within("accelerate", "v100-32g:8", "fp16").software.state_recipe == "fsdp"
    assert within("deepspeed", "v100-32g:8", "fp16").software.state_recipe == "deepspeed_fp16"


def test_the_command_line_takes_the_precision_of_the_devices_for_a_target():
    facts = {"parts": autopar.Software(), "pins": {}, "precision": None}
    for cluster, recipe in (("t4:2", "fsdp"), ("h100:2", "fsdp"), ("cpu:2", None)):
        at = ClusterSpec.parse(cluster)
        found = software_like(None, cluster=at, target="accelerate", **facts)
        assert found.state_recipe == recipe


def test_devices_of_several_generations_have_no_kernel_in_common():
    at = ClusterSpec.parse("l4:2+t4:2")
    assert software_like("torchtitan", autopar.Software(), at, {}, None).attention_kernel is None
    one = ClusterSpec.parse("l4:2")
    assert software_like("torchtitan", autopar.Software(), one, {}, None).attention_kernel


def test_parts_of_the_software_replace_those_of_a_target():
    at = ClusterSpec.parse("h100:2")
    compiled = software_like(
        autopar.Software(compiled=True), autopar.Software(), at, {}, None, "megatron"
    )
    assert compiled.compiled and compiled.fused_kernels
