"""Numbers with units in cluster files, devices of the user's own, and files that `autopar cluster` writes."""

from __future__ import annotations

from dataclasses import replace

import autopar_cost_models as cm
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import AutoparError
from autopar.ir.cluster import ClusterSpec, MixedCluster, plain_data
from autopar.ir.cluster_parts import ASSUMED_AS, relative_of
from autopar.ir.quantities import quantity
from autopar.text.cluster_file import cluster_file

QUANTITIES = {
    ("memory_bytes", "24GiB"): 24 * 2**30,
    ("memory_bytes", "24 GB"): 24 * 10**9,
    ("memory_bytes", "24e9"): 24 * 10**9,
    ("memory_bytes", 24e9): 24 * 10**9,
    ("memory_bytes", 24): 24,
    ("memory_bytes", "1_000MB"): 10**9,
    ("inter_bandwidth_Bps", "200Gb/s"): 25e9,
    ("inter_bandwidth_Bps", "200 Gbps"): 25e9,
    ("inter_bandwidth_Bps", "400Gbit/s"): 50e9,
    ("memory_bandwidth_Bps", "1.5TB/s"): 1.5e12,
    ("memory_bandwidth_Bps", "900GiB/s"): 900 * 2.0**30,
    ("intra_latency_s", "5us"): 5e-6,
    ("intra_latency_s", "2.5 µs"): 2.5e-6,
    ("intra_latency_s", "3e-6"): 3e-6,
    ("bf16_flops", "125TFLOPS"): 125e12,
    ("bf16_flops", "1.979 PFLOP/s"): 1.979e15,
    ("intra_efficiency", "80%"): 0.8,
    ("price_per_device_hour", "2.5"): 2.5,
    ("name", "24GiB"): "24GiB",
}


@pytest.mark.parametrize(("key", "value"), QUANTITIES)
def test_quantities_are_read(key, value):
    found = quantity(key, value)
    assert found == pytest.approx(QUANTITIES[key, value]) and type(found) is type(
        QUANTITIES[key, value]
    )


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("memory_bytes", "24GiX", "unknown unit 'GiX'; write 24GiB"),
        ("memory_bytes", "24Gb/s", "unknown unit"),
        ("inter_bandwidth_Bps", "25GB", "unknown unit 'GB'; write 200Gb/s"),
        ("intra_latency_s", "fast", "is not a number"),
        ("bf16_flops", "125TB/s", "unknown unit"),
        ("memory_bytes", "", "is not a number"),
    ],
)
def test_other_texts_are_refused(key, value, words):
    with pytest.raises(ValueError, match=words):
        quantity(key, value)


@given(st.floats(0.001, 1e6), st.sampled_from(["k", "M", "G", "T"]))
def test_bits_are_an_eighth_of_bytes(number, prefix):
    bits, size = (quantity("x_Bps", f"{number!r}{prefix}{unit}/s") for unit in "bB")
    assert bits * 8 == pytest.approx(size)


OWN = """
device:
  name: our card
  flops: {bf16: 125TFLOPS, fp32: 31.2e12}
  memory_bytes: 24e9
  memory_bandwidth_Bps: 600GB/s
nodes: 1
devices_per_node: 4
intra_bandwidth_Bps: 31.5GB/s
intra_latency_s: 5us
"""


def read(tmp_path, text):
    path = tmp_path / "own.yaml"
    path.write_text(text)
    return ClusterSpec.from_yaml(path)


def test_a_device_of_one_node_names_no_network_and_takes_its_relatives_efficiencies(tmp_path):
    cluster = read(tmp_path, OWN)
    device, a10 = cluster.device, cm.DEVICES["a10"]
    assert device.memory_bytes == 24 * 10**9 and device.flops["bf16"] == 125e12
    assert relative_of(replace(device, generation="other")) == a10
    for name in (
        "matmul_efficiency",
        "bandwidth_efficiency",
        "launch_s",
        "reserved_bytes",
        "generation",
    ):
        assert getattr(device, name) == getattr(a10, name)
    assert device.source.endswith(f"{ASSUMED_AS} a10")
    assert cluster.topology.intra.bandwidth_Bps == 31.5e9
    assert cluster.topology.intra.efficiency == cm.catalogue.PCIE4.efficiency
    again = read(tmp_path, cluster.to_yaml())
    assert again == cluster and again.spec_hash() == cluster.spec_hash()


def test_stated_efficiencies_are_kept(tmp_path):
    stated = OWN.replace(
        "  name: our", "  matmul_efficiency: 70%\n  bandwidth_efficiency: 1\n  name: our"
    )
    device = read(tmp_path, stated).device
    assert (device.matmul_efficiency, device.bandwidth_efficiency) == (0.7, 1.0)
    assert ASSUMED_AS not in device.source


def test_two_nodes_need_a_network(tmp_path):
    with pytest.raises(AutoparError, match="inter_bandwidth_Bps is missing"):
        read(tmp_path, OWN.replace("nodes: 1", "nodes: 2"))


@pytest.mark.parametrize(
    "name", [*cm.NODES, *cm.DEVICES, "dgx-h100:4", "dgx-h100:1+dgx-a100-80g:2"]
)
def test_a_written_cluster_reads_back_equal(tmp_path, name):
    cluster = ClusterSpec.parse(name)
    text = cluster_file(cluster)
    assert read(tmp_path, text) == cluster and text.count("#") > 3
    assert ClusterSpec.from_data(plain_data(cluster), "test") == cluster


def test_left_out_keys_of_a_written_cluster_can_be_used(tmp_path):
    text = cluster_file(ClusterSpec.parse("rtx4090:4"))
    cluster = read(
        tmp_path,
        text.replace("# memory", "memory").replace("# price", "price").replace("# host", "host"),
    )
    assert not isinstance(cluster, MixedCluster)
    assert cluster.device.memory_bytes == 80 * 2**30 and cluster.price_per_device_hour == 2.5
    assert cluster.host is not None and cluster.host.link_bandwidth_Bps == 50e9


@pytest.mark.parametrize(
    "name", ["tpu-v5p:8", "trn2:16", "gaudi3:8", "intel-gaudi2", "aws-trainium"]
)
def test_accelerators_without_cuda_or_rocm_are_refused_with_the_reason(name):
    with pytest.raises(AutoparError, match=r"(?i)tpu|trainium|gaudi.*CUDA, ROCm"):
        ClusterSpec.parse(name)
    with pytest.raises(AutoparError, match="CUDA, ROCm"):
        ClusterSpec.make(name.partition(":")[0])
