"""ClusterSpec: the short forms, keyword arguments, YAML round trip, hash, and every error a user can make."""

import math
import pickle
from dataclasses import replace

import autopar_cost_models as cm
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import AutoparError
from autopar.ir.cluster import ClusterSpec


@pytest.mark.parametrize(
    ("text", "device", "nodes", "per_node"),
    [
        ("dgx-h100:8", "h100", 8, 8),
        ("dgx-a100-40g:2", "a100-40g", 2, 8),
        ("dgx-a100-80g:64", "a100-80g", 64, 8),
        ("dgx-h200:1", "h200", 1, 8),
        ("dgx-b200:4", "b200", 4, 8),
        ("gb200-nvl72:2", "gb200", 2, 72),
        ("h100:4", "h100", 1, 4),
        ("gb300-nvl72:2", "gb300", 2, 72),
        ("dgx-b300", "b300", 1, 8),
        ("hgx-h800:2", "h800", 2, 8),
        ("grand-teton-h100:8", "h100-96g-500w", 8, 8),
        ("aws-p4d:2", "a100-40g", 2, 8),
        ("aws-p5:2", "h100", 2, 8),
        ("jeanzay-a100:48", "a100-80g", 48, 8),
        ("mi300x-8:2", "mi300x", 2, 8),
        ("l40s:8", "l40s", 1, 8),
        ("h100-pcie:2", "h100-pcie", 1, 2),
        ("a100-pcie-80g:4", "a100-pcie-80g", 1, 4),
        ("cpu:4", "cpu", 1, 4),
        ("cpu:32", "cpu", 1, 32),
        ("h100", "h100", 1, 1),
        ("dgx-h100", "h100", 1, 8),
        (" DGX-H100:2 ", "h100", 2, 8),
    ],
)
def test_parse(text, device, nodes, per_node):
    spec = ClusterSpec.parse(text)
    assert (spec.device.name, spec.topology.nodes, spec.topology.devices_per_node) == (
        device,
        nodes,
        per_node,
    )
    assert spec.num_devices == nodes * per_node
    assert device in str(spec)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dgx-h10:8", "did you mean dgx-h100"),
        ("a100:8", "a100-40g"),
        ("quantum:8", "`autopar devices` .*dgx-h100"),
        ("dgx-h100:0", "number of nodes is '0' .* whole number >= 1"),
        ("dgx-h100:-1", "number of nodes is '-1'"),
        ("dgx-h100:2.5", "number of nodes is '2.5'"),
        ("h100:", "number of devices is ''"),
        ("h100:four", "number of devices is 'four'"),
        ("h100:True", "number of devices is 'True'"),
        ("dgx-h100:8:2", "'8:2'"),
        ("h100:16", "at most 8 h100 devices; dgx-h100:2 is 2 nodes with 16"),
        ("gb200:73", "gb200-nvl72:2"),
        ("", "dgx-h100:8"),
        (None, "not a description"),
        (8, "not a description"),
    ],
)
def test_parse_errors(text, message):
    with pytest.raises(AutoparError, match=message):
        ClusterSpec.parse(text)


def test_make_takes_defaults_from_the_preset():
    spec = ClusterSpec.make(device="h100", nodes=8)
    assert spec.topology == ClusterSpec.parse("dgx-h100:8").topology
    assert (
        ClusterSpec.make("cpu", devices_per_node=4).topology == ClusterSpec.parse("cpu:4").topology
    )


def test_make_overrides():
    spec = ClusterSpec.make(
        "h100",
        nodes=2,
        devices_per_node=4,
        intra_bandwidth_Bps=100e9,
        inter_bandwidth_Bps=6.25e9,
        inter_latency_s=1e-5,
        inter_efficiency=0.5,
        memory_bytes=64 * 2**30,
        price_per_device_hour=2,
        name="mine",
    )
    assert (spec.name, spec.num_devices, spec.price_per_device_hour) == ("mine", 8, 2.0)
    assert spec.device == replace(cm.device("h100"), memory_bytes=64 * 2**30)
    assert (spec.topology.intra.bandwidth_Bps, spec.topology.intra.latency_s) == (
        100e9,
        cm.LINKS["nvlink4"].latency_s,
    )
    assert (
        spec.topology.intra.efficiency
        == cm.LINKS["nvlink4"].efficiency * cm.FITTED.intra_efficiency
    )
    assert (spec.topology.inter.achieved_Bps, spec.topology.inter.latency_s) == (3.125e9, 1e-5)
    only_latency = ClusterSpec.make("h100", intra_latency_s=1e-6).topology.intra
    assert only_latency == replace(cm.node_preset("dgx-h100").topology(1).intra, latency_s=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": "h1000"}, "did you mean h100"),
        ({"device": None}, "unknown device None"),
        ({"nodes": 0}, "nodes=0"),
        ({"nodes": -2}, "nodes=-2"),
        ({"nodes": 1.5}, "nodes=1.5"),
        ({"nodes": True}, "nodes=True"),
        ({"devices_per_node": 0}, "devices_per_node=0"),
        ({"devices_per_node": "8"}, "devices_per_node='8'"),
        ({"intra_bandwidth_Bps": 0}, "intra_bandwidth_Bps=0 must be a finite number > 0"),
        ({"inter_bandwidth_Bps": -5e9}, "inter_bandwidth_Bps=-5"),
        ({"inter_bandwidth_Bps": math.nan}, "inter_bandwidth_Bps=nan"),
        ({"inter_bandwidth_Bps": math.inf}, "inter_bandwidth_Bps=inf"),
        ({"inter_bandwidth_Bps": True}, "inter_bandwidth_Bps=True"),
        ({"intra_latency_s": -1.0}, "intra_latency_s=-1.0"),
        ({"intra_efficiency": 1.5}, "intra_efficiency=1.5 must be at most 1"),
        ({"memory_bytes": -1}, "memory_bytes=-1"),
        ({"memory_bytes": 8.5}, "memory_bytes=8"),
        ({"price_per_device_hour": 0}, "price_per_device_hour=0"),
        ({"price_per_device_hour": math.nan}, "price_per_device_hour=nan"),
        ({"price_per_device_hour": True}, "price_per_device_hour=True"),
        ({"name": ""}, "name=''"),
        ({"host": 7}, "host is 7; it must be a mapping"),
        ({"nics_per_node": 0}, "nics_per_node=0"),
        (
            {"nics_per_node": 3},
            "nics_per_node=3 and devices_per_node=8: one must be a multiple of the other",
        ),
        ({"oversubscription": 0.5}, "oversubscription=0.5 must be at least 1"),
        (
            {"inter_kind": "carrier pigeon"},
            "inter_kind='carrier pigeon' is unknown; known: network, nvlink, pcie, plain",
        ),
        ({"intra_multicast_efficiency": 2}, "intra_multicast_efficiency=2"),
        (
            {"intra_bandwith_Bps": 1e9},
            "unknown argument 'intra_bandwith_Bps'; did you mean intra_bandwidth_Bps",
        ),
    ],
)
def test_make_errors(arguments, message):
    with pytest.raises(AutoparError, match=message):
        ClusterSpec.make(**arguments)


def test_a_device_outside_the_catalogue_needs_links():
    device = replace(cm.device("h100"), name="mine")
    with pytest.raises(AutoparError, match="intra_bandwidth_Bps is missing"):
        ClusterSpec.make(device, devices_per_node=2)
    with pytest.raises(AutoparError, match="intra_latency_s is missing"):
        ClusterSpec.make(device, devices_per_node=2, intra_bandwidth_Bps=1e9)
    with pytest.raises(AutoparError, match="inter_bandwidth_Bps is missing"):
        ClusterSpec.make(device, nodes=2)
    assert ClusterSpec.make(device).num_devices == 1
    spec = ClusterSpec.make(
        device,
        intra_bandwidth_Bps=1e9,
        intra_latency_s=1e-6,
        inter_bandwidth_Bps=1e8,
        inter_latency_s=1e-5,
    )
    assert (spec.num_devices, spec.topology.intra.efficiency) == (1, 1.0)


def test_direct_construction_is_checked():
    good = ClusterSpec.parse("h100:4")
    with pytest.raises(AutoparError, match="must be a Device"):
        ClusterSpec("x", "h100", good.topology)


clusters = st.builds(
    ClusterSpec.make,
    device=st.sampled_from([*cm.DEVICES])
    | st.builds(lambda f: replace(cm.device("cpu"), flops={"bf16": f}), st.floats(1, 1e16)),
    nodes=st.integers(1, 1000),
    devices_per_node=st.integers(1, 72),
    memory_bytes=st.none() | st.integers(2**34, 2**40),
    price_per_device_hour=st.none() | st.floats(0.01, 100),
    intra_bandwidth_Bps=st.none() | st.floats(1, 1e13) | st.integers(1, 10**13),
    inter_latency_s=st.none() | st.floats(0, 1),
    inter_efficiency=st.none() | st.floats(0.01, 1),
    name=st.none() | st.text("aé: #-1", min_size=1).filter(str.strip),
    oversubscription=st.floats(1, 10),
    inter_kind=st.none() | st.sampled_from(["plain", "network"]),
)


@given(spec=clusters)
def test_yaml_round_trip(tmp_path_factory, spec):
    path = tmp_path_factory.mktemp("cluster") / "c.yaml"
    text = spec.to_yaml(path)
    again = ClusterSpec.from_yaml(path)
    assert again == spec == ClusterSpec.parse(str(path))
    assert again.spec_hash() == spec.spec_hash()
    assert again.to_yaml() == text


def test_a_file_written_by_hand(tmp_path):
    path = tmp_path / "lab.yml"
    path.write_text(
        "device: h100\nnodes: 2\ndevices_per_node: 8\ninter_bandwidth_Bps: 25e9\nprice_per_device_hour: 2\n"
    )
    spec = ClusterSpec.from_yaml(path)
    assert (
        spec.name,
        spec.num_devices,
        spec.topology.inter.bandwidth_Bps,
        spec.price_per_device_hour,
    ) == ("lab", 16, 25e9, 2.0)


def test_a_device_written_by_hand(tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text(
        "device: {name: own, flops: {bf16: 1e15}, memory_bytes: 1000000000, memory_bandwidth_Bps: 1e12}\n"
        "nodes: 1\ndevices_per_node: 2\nintra_bandwidth_Bps: 1e11\nintra_latency_s: 1e-6\n"
        "inter_bandwidth_Bps: 1e10\ninter_latency_s: 1e-5\n"
    )
    device = ClusterSpec.from_yaml(path).device
    like = cm.device("h100-pcie")  # the nearest by rates
    assert (device.flops, device.matmul_efficiency, device.usable_bytes) == (
        {"bf16": 1e15},
        like.matmul_efficiency,
        10**9,
    )


GOOD = "device: h100\nnodes: 2\ndevices_per_node: 8\n"


def test_network_interfaces_from_a_file(tmp_path):
    """inter_bandwidth_Bps is a device's without nics_per_node, and an interface's with it."""
    path = tmp_path / "few.yaml"
    path.write_text(GOOD + "inter_bandwidth_Bps: 25e9\nnics_per_node: 4\noversubscription: 2e0\n")
    few = ClusterSpec.from_yaml(path)
    assert (few.topology.nics, few.topology.oversubscription, few.topology.inter.kind) == (
        4,
        2.0,
        "network",
    )
    path.write_text(GOOD + "inter_bandwidth_Bps: 12.5e9\n")
    one_each = ClusterSpec.from_yaml(path)
    assert one_each.topology.nics == 8
    assert few.topology.group_inter_Bps(1) == pytest.approx(
        one_each.topology.group_inter_Bps(1) / 2
    )
    for preset in ("jeanzay-a100:2", "aws-p5:2"):
        spec = ClusterSpec.parse(preset)
        spec.to_yaml(path)
        assert ClusterSpec.from_yaml(path) == spec and spec.topology.nics in (4, 32)


def test_a_file_of_an_older_version_still_reads(tmp_path):
    """Without kinds, interfaces and multicast: links of the catalogue device keep theirs."""
    path = tmp_path / "old.yaml"
    path.write_text(
        GOOD
        + "intra_bandwidth_Bps: 450e9\nintra_latency_s: 1.9e-6\nintra_source: x\nintra_efficiency: 0.8\n"
        "inter_bandwidth_Bps: 50e9\ninter_latency_s: 4.0e-6\ninter_source: y\ninter_efficiency: 0.94\n"
    )
    topology = ClusterSpec.from_yaml(path).topology
    assert (topology.intra.kind, topology.inter.kind, topology.nics) == ("nvlink", "network", 8)


def test_a_key_of_an_earlier_version_is_ignored(tmp_path):
    own = "{name: ours, flops: {bf16: 1e14}, memory_bytes: 80e9, memory_bandwidth_Bps: 2e12%s}"
    texts = [GOOD.replace("h100", own % extra) for extra in ("", ", tile_s: 2.5e-06")]
    link = "%s_bandwidth_Bps: 25e9\n%s_latency_s: 1e-6\n"
    links = "".join(link % (side, side) for side in ("intra", "inter"))
    now, before = tmp_path / "now.yaml", tmp_path / "before.yaml"
    for path, text in zip((now, before), texts, strict=True):
        path.write_text(text + links + "name: lab\n")
    assert ClusterSpec.from_yaml(before) == ClusterSpec.from_yaml(now)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("device: [h100\n", "not valid YAML"),
        ("- h100\n", "holds list, not keys"),
        ("", "is empty, not keys and values"),
        (
            GOOD + "inter_bandwith_Bps: 1\n",
            "unknown key 'inter_bandwith_Bps'; did you mean inter_bandwidth_Bps",
        ),
        (GOOD + "5: 1\n", "unknown key 5"),
        (GOOD + "nodes: 3\n", "'nodes' is given twice"),
        (GOOD.replace("h100", "{name: x, name: y}"), "'name' is given twice"),
        (GOOD + 'name: "a\\tb"\n', "must be a non-empty text of printable characters"),
        ("device: h100\n", "missing nodes, devices_per_node"),
        (GOOD.replace("h100", "h1000"), "did you mean h100"),
        (GOOD.replace("2", "0"), "nodes=0"),
        (GOOD.replace("2", "yes"), "nodes=True"),
        (GOOD.replace("2", "2.5"), "nodes=2.5"),
        (GOOD + "intra_bandwidth_Bps: -1\n", "intra_bandwidth_Bps=-1"),
        (GOOD + "intra_bandwidth_Bps: .nan\n", "intra_bandwidth_Bps=nan"),
        (GOOD + "intra_bandwidth_Bps: true\n", "intra_bandwidth_Bps=True"),
        (GOOD + "intra_bandwidth_Bps: fast\n", "intra_bandwidth_Bps='fast' is not a number"),
        (GOOD.replace("h100", "{name: x}"), "missing flops, memory_bytes, memory_bandwidth_Bps"),
        (GOOD.replace("h100", "{nam: x}"), "unknown key 'nam'; did you mean name"),
        (
            GOOD.replace(
                "h100", "{name: x, flops: {bf16: big}, memory_bytes: 1, memory_bandwidth_Bps: 1}"
            ),
            "bf16.*'big' is not a number",
        ),
        (
            GOOD.replace("h100", "{name: x, flops: 3, memory_bytes: 1, memory_bandwidth_Bps: 1}"),
            "flops=3",
        ),
    ],
)
def test_yaml_errors_name_the_file(tmp_path, text, message):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(AutoparError, match=message) as caught:
        ClusterSpec.from_yaml(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_names_the_nearest(tmp_path):
    with pytest.raises(AutoparError, match=r"does not exist; write dgx-h100:8"):
        ClusterSpec.parse(str(tmp_path / "cluster.yaml"))
    (tmp_path / "cluster.yaml").write_text("")
    with pytest.raises(AutoparError, match=r"did you mean cluster.yaml"):
        ClusterSpec.parse(str(tmp_path / "clutser.yaml"))
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(AutoparError, match="cannot read"):
        ClusterSpec.parse(str(tmp_path / "folder.yaml"))


def test_bytes_that_are_no_text(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_bytes(b"\xff\xfe\x00device")
    with pytest.raises(AutoparError, match="cluster file"):
        ClusterSpec.from_yaml(path)


def test_hash_follows_content():
    a = ClusterSpec.parse("dgx-h100:8")
    assert (
        a.spec_hash()
        == ClusterSpec.parse("dgx-h100:8").spec_hash()
        == pickle.loads(pickle.dumps(a)).spec_hash()
    )
    assert len(a.spec_hash()) == 64
    others = [
        ClusterSpec.parse("dgx-h100:4"),
        ClusterSpec.parse("dgx-h200:8"),
        replace(a, device=replace(a.device, memory_bytes=2**36)),
        replace(a, topology=replace(a.topology, inter=cm.LINKS["hdr200"])),
    ]
    assert len({x.spec_hash() for x in [a, *others]}) == 5
    # a plan outlives a price
    assert replace(a, price_per_device_hour=2.0).spec_hash() == a.spec_hash()
    as_int = ClusterSpec.make("h100", intra_bandwidth_Bps=10**11)
    assert as_int.spec_hash() == ClusterSpec.make("h100", intra_bandwidth_Bps=1e11).spec_hash()
    assert hash(a) == hash(ClusterSpec.parse("dgx-h100:8"))


def test_other_numbers_of_devices_keep_the_node():
    eight = ClusterSpec.parse("dgx-h100:8")
    assert (
        eight.with_devices(128) == ClusterSpec.parse("dgx-h100:16")
        and eight.with_devices(64) is eight
    )
    part = eight.with_devices(4)
    assert part.name == "h100:4" and replace(eight, name="ours").with_devices(4).name == "h100:4"
    intra = replace(eight.topology.intra, bandwidth_Bps=1e9)
    slow = replace(eight, topology=replace(eight.topology, intra=intra))
    assert slow.with_devices(4).name == "dgx-h100:8 with 4 devices"
    assert (part.num_devices, part.topology.nodes, part.device) == (4, 1, eight.device)
    assert part.topology.intra == eight.topology.intra
    shared = ClusterSpec.parse("jeanzay-a100:2").with_devices(1)  # half a network interface
    assert shared.num_devices == 1
    two = ClusterSpec.parse("cpu:4").with_devices(8).topology
    assert (two.nodes, two.devices_per_node) == (2, 4)
    priced = replace(eight, price_per_device_hour=2.5)
    assert priced.with_devices(16).price_per_device_hour == 2.5


@pytest.mark.parametrize(("devices", "enough"), [(12, 16), (11, 8), (3, 8), (0, 8), (-8, 8)])
def test_devices_that_fill_no_nodes(devices, enough):
    with pytest.raises(
        AutoparError, match=f" {devices} devices are neither.* {enough} devices would do"
    ):
        ClusterSpec.parse("dgx-h100:8").with_devices(devices)


def test_bandwidth_between_nodes_is_that_of_a_device():
    slow = ClusterSpec.parse("dgx-h100:2").with_inter_bandwidth(25e9)
    assert (
        slow.topology.inter.bandwidth_Bps == 25e9
        and slow.spec_hash() != ClusterSpec.parse("dgx-h100:2").spec_hash()
    )
    # two devices share an interface
    shared = ClusterSpec.parse("aws-p4d:2").with_inter_bandwidth(25e9).topology
    assert shared.inter.bandwidth_Bps == 50e9 and shared.nics == 4
    with pytest.raises(AutoparError, match="one node"):
        ClusterSpec.parse("h100:8").with_inter_bandwidth(25e9)
