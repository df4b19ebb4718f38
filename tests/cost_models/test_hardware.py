"""The catalogue: every figure is positive, in a plausible range and has a source; wrong figures are refused."""

import math
from dataclasses import FrozenInstanceError, fields, replace

import autopar_cost_models as cm
import pytest
from autopar_cost_models import constants
from autopar_cost_models.attention import FLASH_RATES
from autopar_cost_models.catalogue import WITHOUT_CUDA_OR_ROCM, reason_against

GPUS = [d for d in cm.DEVICES.values() if d.name != "cpu"]


@pytest.mark.parametrize("device", cm.DEVICES.values(), ids=lambda d: d.name)
def test_every_figure_is_positive_and_sourced(device):
    assert device.source
    for f in fields(device):
        value = getattr(device, f.name)
        for number in value.values() if isinstance(value, dict) else [value]:
            assert number is None or isinstance(number, str) or number > 0, f.name
    assert 0 < device.usable_bytes < device.memory_bytes
    assert {"fp32", "fp64"} <= set(device.flops) and {"bf16", "fp16"} & set(device.flops)


@pytest.mark.parametrize("link", cm.LINKS.values(), ids=cm.LINKS)
def test_every_link_is_positive_and_sourced(link):
    assert link.source
    assert 0 < link.achieved_Bps <= link.bandwidth_Bps
    assert link.latency_s > 0


@pytest.mark.parametrize("device", GPUS, ids=lambda d: d.name)
def test_rates_are_dense_and_ordered(device):
    f = device.flops
    assert f["fp16"] > f.get("tf32", f["fp32"]) >= f["fp32"] >= f["fp64"]
    assert f.get("bf16", f["fp16"]) == f["fp16"]
    if "tf32" in f:
        assert f["fp16"] / f["tf32"] == pytest.approx(2, rel=0.05)
    if "fp8" in f:
        # datasheets round (L40S: 733 and 362)
        assert f["fp8"] / f["bf16"] == pytest.approx(2, rel=0.02)


def test_every_generation_has_an_efficiency_and_all_since_ampere_flash_attention():
    measured = {generation for generation, _ in FLASH_RATES}
    for device in GPUS:
        assert cm.FITTED.matmul_efficiency(device.generation) > 0
        assert device.generation in measured or "bf16" not in device.flops


@pytest.mark.parametrize("name", WITHOUT_CUDA_OR_ROCM)
def test_accelerators_without_cuda_or_rocm_are_refused_with_the_reason(name):
    with pytest.raises(ValueError, match="CUDA, ROCm"):
        cm.device(f"{name}-9")
    assert not [device for device in cm.DEVICES if reason_against(device)]


def test_known_datasheet_figures():
    assert cm.DEVICES["a100-80g"].flops["bf16"] == 312e12
    assert cm.DEVICES["h100"].flops["bf16"] == pytest.approx(989e12, rel=1e-3)
    assert cm.DEVICES["h100"].memory_bytes / constants.GIB == pytest.approx(80, rel=0.01)
    assert cm.NODES["dgx-a100-80g"].intra.bandwidth_Bps == 300e9
    assert cm.NODES["dgx-a100-40g"].inter.bandwidth_Bps == 25e9
    assert cm.NODES["dgx-h100"].intra.bandwidth_Bps == 450e9
    assert cm.NODES["dgx-h100"].inter.bandwidth_Bps == 50e9
    assert (cm.NODES["gb200-nvl72"].devices_per_node, cm.NODES["gb200-nvl72"].devices_per_host) == (
        72,
        4,
    )


def test_a_part_has_the_rates_of_its_dtype():
    h100 = cm.device("h100", cm.ISOLATED)
    assert h100.achieved_flops("bf16") == pytest.approx(794.5e12, rel=1e-3)
    assert h100.achieved_flops("fp8") == pytest.approx(1402.6e12, rel=1e-3)
    assert cm.device("h100-96g-500w").memory_bandwidth_Bps == 2.4e12
    assert [
        cm.device(name).compute_units for name in ("a100-80g", "h100", "h100-pcie", "b200", "gb200")
    ] == [108, 132, 114, 148, 152]


@pytest.mark.parametrize("preset", cm.NODES.values(), ids=lambda p: p.name)
def test_presets_are_made_of_catalogue_devices(preset):
    home = cm.home_of(preset.device.name)
    assert preset.device == cm.device(preset.device.name)
    assert preset.by_name or home is not None
    assert home is None or (home.device == preset.device and not home.by_name)
    assert preset.topology(3).num_devices == 3 * preset.devices_per_node
    assert preset.intra.achieved_Bps > preset.inter.achieved_Bps


def test_devices_are_frozen_and_hashable():
    device = cm.device("H100")
    with pytest.raises(FrozenInstanceError):
        device.memory_bytes = 1
    assert hash(device) == hash(replace(device)) and device == replace(device)
    assert hash(cm.NODES["dgx-h100"])


def test_ints_and_floats_make_equal_devices():
    device = cm.device("h100")
    same = replace(device, memory_bandwidth_Bps=int(device.memory_bandwidth_Bps))
    assert repr(same) == repr(device)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory_bytes": 0}, "memory_bytes=0"),
        ({"memory_bytes": 1.5}, "memory_bytes=1.5"),
        ({"memory_bytes": True}, "memory_bytes=True"),
        ({"reserved_bytes": 2**50}, "leaves nothing"),
        ({"memory_bandwidth_Bps": -1.0}, "memory_bandwidth_Bps=-1.0"),
        ({"memory_bandwidth_Bps": math.nan}, "nan"),
        ({"launch_s": math.inf}, "inf"),
        ({"matmul_efficiency": 1.2}, "at most 1"),
        ({"bandwidth_efficiency": 0}, "bandwidth_efficiency=0"),
        ({"flops": {}}, "flops={}"),
        ({"flops": {"bf61": 1.0}}, "bf16"),
        ({"flops": {"bf16": True}}, "True"),
        ({"name": ""}, "name"),
        ({"source": " "}, "source"),
        ({"compute_units": 0}, "compute_units=0"),
        ({"generation": ""}, "generation"),
        (
            {"dtype_efficiency": {"fp9": 0.5}},
            "dtype_efficiency has the unknown dtype 'fp9'; did you mean fp8",
        ),
        ({"dtype_efficiency": {"fp8": 1.5}}, "at most 1"),
        ({"dtype_efficiency": 0.5}, "must map dtypes to shares"),
    ],
)
def test_wrong_devices_are_refused(change, message):
    with pytest.raises(ValueError, match=message.replace("{}", r"\{\}")):
        replace(cm.device("h100"), **change)


@pytest.mark.parametrize(
    "change",
    [
        {"bandwidth_Bps": 0},
        {"bandwidth_Bps": math.nan},
        {"bandwidth_Bps": True},
        {"bandwidth_Bps": "fast"},
        {"latency_s": -1e-6},
        {"efficiency": 1.01},
        {"source": ""},
        {"kind": "wifi"},
        {"multicast_efficiency": 1.1},
        {"multicast_efficiency": -0.1},
    ],
)
def test_wrong_links_are_refused(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        replace(cm.LINKS["nvlink4"], **change)


def test_unknown_names_suggest_the_nearest():
    with pytest.raises(ValueError, match="h100"):
        cm.device("h1000")
    with pytest.raises(ValueError, match=r"known: .*a100-40g"):
        cm.device(7)
    with pytest.raises(ValueError, match="dgx-h100"):
        cm.node_preset("dgx-h10")
    with pytest.raises(ValueError, match="no 'fp8' rate; it has fp64, fp32, tf32, bf16, fp16"):
        cm.device("a100-80g").peak_flops("fp8")


def test_version_is_a_text():
    assert cm.COST_MODEL_VERSION == "17"
    assert set(cm.__all__) <= set(dir(cm))
