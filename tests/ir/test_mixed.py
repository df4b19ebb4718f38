"""Clusters of several kinds of devices: text, file, link, price, and what is refused because there is no one device to answer with."""

from __future__ import annotations

from dataclasses import replace

import pytest
import yaml
from autopar_cost_models import Link

from autopar.errors import AutoparError
from autopar.ir.cluster import ClusterSpec, MixedCluster
from autopar.ir.mesh import MeshShape, deal_text, groups_of

TEXT = "dgx-h100:2+dgx-a100-80g:1"


def test_a_sum_of_clusters_is_one_of_groups():
    spec = ClusterSpec.parse(TEXT)
    assert isinstance(spec, MixedCluster) and spec.name == TEXT and spec.num_devices == 24
    assert [group.name for group in spec.groups] == [
        "dgx-h100:2",
        "dgx-a100-80g:1",
    ] and spec.device_type == "cuda"
    h100, a100 = (group.topology.inter for group in spec.groups)
    assert (
        a100.achieved_Bps < h100.achieved_Bps and spec.between.achieved_Bps == a100.achieved_Bps
    ), "the slower network joins them"
    assert ClusterSpec.parse("dgx-h100:1").groups == (ClusterSpec.parse("dgx-h100:1"),)


def test_devices_share_interfaces_between_groups_too():
    """Eight devices of aws-p4d have four interfaces of 12.5 GB/s."""
    spec = ClusterSpec.parse("aws-p4d:1+dgx-a100-80g:1")
    inter = spec.groups[0].topology.inter
    assert (
        spec.between.bandwidth_Bps == inter.bandwidth_Bps / 2
        and spec.between.achieved_Bps == pytest.approx(inter.achieved_Bps / 2)
    )


def test_files_round_trip(tmp_path):
    spec = MixedCluster.of(
        ClusterSpec.parse(TEXT).groups, Link(10e9, 5e-6, "measured", kind="network"), "lab"
    )
    spec.to_yaml(tmp_path / "lab.yaml")
    again = ClusterSpec.parse(str(tmp_path / "lab.yaml"))
    assert again == spec and again.spec_hash() == spec.spec_hash()
    other = replace(spec, between=replace(spec.between, latency_s=6e-6))
    assert (
        other.spec_hash() != spec.spec_hash() != replace(spec, groups=spec.groups[::-1]).spec_hash()
    )
    assert spec.with_price(3.0).spec_hash() == spec.spec_hash(), "plans outlive prices"


def test_a_file_may_leave_the_link_out_and_write_numbers_as_people_do(tmp_path):
    device = {
        "name": "mine",
        "flops": {"fp32": 1e12},
        "memory_bytes": 2**34,
        "memory_bandwidth_Bps": 1e11,
    }
    group = {"device": device, "nodes": 1, "devices_per_node": 2, **{f"{side}_{key}": value for side in ("intra", "inter")
             for key, value in (("bandwidth_Bps", "1e9"), ("latency_s", "1e-5"))}}  # fmt: skip
    path = tmp_path / "two.yaml"
    path.write_text(
        yaml.safe_dump(
            {"groups": [group, group | {"inter_bandwidth_Bps": "5e8"}], "between": None} | {}
        )
    )
    with pytest.raises(AutoparError, match="between is None"):
        ClusterSpec.from_yaml(path)
    path.write_text(yaml.safe_dump({"groups": [group, group | {"inter_bandwidth_Bps": "5e8"}]}))
    spec = ClusterSpec.from_yaml(path)
    assert spec.name == "two" and (spec.between.achieved_Bps, spec.between.latency_s) == (5e8, 1e-5)


@pytest.mark.parametrize(("data", "message"), [
    ({"groups": []}, "0 groups of devices; 2 to 3"),
    ({"groups": [{"device": "h100", "nodes": 1, "devices_per_node": 8}]}, "1 groups of devices"),
    ({"groups": "dgx-h100:1"}, "groups has 'dgx-h100:1'; it needs a list of mappings"),
    ({"groups": [{"device": "h100", "nodes": 1}] * 2}, "group 1: missing devices_per_node"),
    ({"groups": [{"device": "h100", "nodes": 1, "devices_per_node": 8}, {"device": "h101", "nodes": 1, "devices_per_node": 8}]},
     "group 2: .*did you mean h100"),
    ({"groups": [], "nodes": 3}, "unknown key 'nodes'"),
    ({"groups": [], "between": {"bandwidth_Bps": 1e9}}, "between: missing latency_s"),
    ({"groups": [], "between": {"bandwidth_Bps": 1e9, "latency_s": -1}}, "between: .*latency_s"),
    ({"groups": [], "between": {"bandwidth_Bps": 1e9, "latency_s": 1e-6, "kind": "string"}}, "between: .*kind='string'"),
])  # fmt: skip
def test_wrong_files_are_told(data, message, tmp_path):
    path = tmp_path / "odd.yaml"
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(AutoparError, match=message) as caught:
        ClusterSpec.from_yaml(path)
    assert "odd" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dgx-h100:1+cpu:4", r"h100 \(cuda\), cpu \(cpu\): no collectives run between them"),
        ("cpu:1+cpu:1+cpu:1+cpu:1", "4 groups of devices; 2 to 3"),
        ("dgx-h100:1+", "is not a description of a cluster"),
        ("dgx-h100:1+dgx-h10:1", "did you mean dgx-h100"),
    ],
)
def test_wrong_sums_are_told(text, message):
    with pytest.raises(AutoparError, match=message):
        ClusterSpec.parse(text)


def test_nothing_answers_for_one_kind_of_devices():
    spec = ClusterSpec.parse(TEXT)
    for ask in (lambda: spec.device, lambda: spec.topology, lambda: spec.host, lambda: spec.with_memory(2**36),
                lambda: spec.with_inter_bandwidth(1e9)):  # fmt: skip
        with pytest.raises(
            AutoparError, match=r"has several \(h100, a100-80g\); ask about dgx-h100:2"
        ):
            ask()
    assert spec.with_devices(24) is spec
    with pytest.raises(AutoparError, match="24 devices of several kinds, and 16 are asked for"):
        spec.with_devices(16)


def test_prices_are_those_of_all_devices():
    first, second = ClusterSpec.parse(TEXT).groups
    assert MixedCluster.of(
        [first.with_price(4.0), second.with_price(1.0)]
    ).price_per_device_hour == pytest.approx((16 * 4 + 8) / 24)
    assert MixedCluster.of([first.with_price(4.0), second]).price_per_device_hour is None
    assert ClusterSpec.parse(TEXT).with_price(2.0).price_per_device_hour == 2.0


def test_a_deal_has_one_form():
    mesh = MeshShape(pp=3, tp=2, deal="1-1-0")
    assert mesh.deal == "1x2-0x1" == deal_text(mesh.groups) and groups_of(
        "1x2-0x1"
    ) == mesh.groups == (1, 1, 0)
    assert MeshShape(**mesh.as_dict()) == mesh and str(mesh) == "pp=3 tp=2 (groups 1x2-0x1)"
    assert MeshShape(pp=3).groups == (0, 0, 0) and "deal" not in MeshShape(pp=3).as_dict()
    assert [mesh.coordinate(rank, "pp") for rank in range(6)] == [0, 0, 1, 1, 2, 2], (
        "ranks are numbered along the pipeline"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pp": 2, "deal": "1-1-0"}, "deals 3 ranks of a pipeline of pp=2"),
        ({"pp": 2, "deal": "x"}, "deal='x' must be a text"),
        ({"pp": 2, "deal": (0, 1)}, "must be a text"),
        ({"pp": 2, "dp": 2, "order": "dp-pp", "deal": "0-1"}, "pipeline lie outermost"),
    ],
)
def test_wrong_deals_are_told(arguments, message):
    with pytest.raises(AutoparError, match=message):
        MeshShape(**arguments)
