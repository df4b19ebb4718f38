"""`autopar calibrate`: curves and their use by the planner, the cluster file, and every mistake."""

import time
from dataclasses import replace
from pathlib import Path

import autopar_cost_models as cm
import pytest
import torch
from autopar_cost_models.curves import curve, curve_s
from autopar_cost_models.matmul import shaped_matmul_time_s
from click.testing import CliRunner
from support.effort import every, slow_but
from torch.utils._python_dispatch import TorchDispatchMode

import autopar.api
from autopar.calibrate import measure, operations
from autopar.calibrate.cluster import assembled_cluster, calibrate, merged_curve
from autopar.cli.plan_commands import cli
from autopar.errors import AutoparError
from autopar.ir.cluster import ClusterSpec
from autopar.models import parse_model

QUICK = measure.Effort(
    sides=(16, 64), tensors=(4, 4096, 2**18), messages=(64, 4096, 2**18), dtypes=("fp32", "fp64"), rounds=1, point_s=0.002
)  # fmt: skip


@pytest.fixture(scope="module")
def measured() -> ClusterSpec:
    return calibrate(4, "cpu", QUICK)


KERNELS = measure.KernelMeasurements("cpu", 2**33, 1, "cpu", {"fp32": [(1e4, 1e-5), (1e6, 2e-5), (1e9, 1e-2)]},
                          [(12.0, 5e-6), (3e6, 1e-3), (3e8, 2e-1)], 5e-6)  # fmt: skip


def made_up(ranks: int = 4) -> ClusterSpec:
    """A machine as four ranks would report it, with round numbers."""
    points = [(64.0, 1e-4), (1e6, 2e-3), (1e8, 1e-1)]
    sizes = [size for size in range(2, ranks + 1) if ranks % size == 0]
    transfers = {
        name: {size: [[(x, y * size) for x, y in points]] * ranks for size in sizes}
        for name in cm.COLLECTIVES
    }
    transfers["point_to_point"] = {2: [points] * ranks}
    return assembled_cluster("cpu", [KERNELS] * ranks, transfers if ranks > 1 else {})


# ---------------------------------------------------------------------------------------------------------------------- curves


def test_a_curve_goes_through_its_points_and_is_straight_in_logarithms():
    found = curve("x", [[10, 1.0], [1000, 4.0], [4000, 16.0]])
    assert [curve_s(found, size) for size, _ in found] == [1.0, 4.0, 16.0]
    assert curve_s(found, 100) == pytest.approx(2.0)
    assert curve_s(found, 1) == curve_s(found, 0) == 1.0  # latency
    assert curve_s(found, 40_000) == pytest.approx(160.0)  # the last rate


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([[1, 1]], "two or more"),
        (None, "two or more"),
        ([[1, 1], [2, None]], r"seconds of point 1=None must be a finite number > 0"),
        ([[1, 1], None, [3, 1]], r"point 1 is None and must be a pair"),
        ([[1, 1], [2]], "point 1 is .2. and must be a pair"),
        ([[1, 1], [2, 0]], "seconds of point 1=0"),
        ([[1, 1], [2, -1.0]], "seconds of point 1=-1.0"),
        ([[1, 1], [2, float("nan")]], "seconds of point 1=nan"),
        ([[0, 1], [2, 1]], "size of point 0=0"),
        ([[2, 1], [1, 1]], "sizes must ascend, and point 1 has 1 after 2"),
        ([[1, 1], [2, "4e-6"]], "seconds of point 1='4e-6'"),
    ],
)
def test_curves_with_holes_are_refused(points, message):
    with pytest.raises(ValueError, match=message):
        curve("x", points)


def test_merged_takes_medians_and_pools_what_only_noise_can_do():
    assert merged_curve(
        [[(1, 1.0), (2, 9.0), (3, 4.0)]] * 2 + [[(1, 7.0), (2, 8.0), (3, 5.0)]]
    ) == (
        (1, 1.0),
        (2, 6.5),
        (3, 6.5),
    )
    assert merged_curve([[(1, 3.0), (2, 2.0), (3, 1.0), (4, 5.0)]]) == (
        (1, 2.0),
        (2, 2.0),
        (3, 2.0),
        (4, 5.0),
    )


@pytest.mark.slow
def test_operations_are_counted_as_plans_count_them():
    """Oracle: what torch dispatches, but for views, in a layer of each kind more.  Plans count a norm as one, which torch runs as six."""
    seen = Dispatched()
    for kind in operations._KINDS:
        for seen.sign, layers in ((-1, operations._SHALLOW), (1, operations._DEEP)):
            work = operations._training(kind, layers, torch.device("cpu"))
            with seen:
                work()
    dispatched = seen.kernels / (operations._DEEP - operations._SHALLOW)
    assert 0.65 * dispatched < operations.count_operations("cpu") <= dispatched
    assert operations.count_operations("cuda") > operations.count_operations("cpu")


class Dispatched(TorchDispatchMode):
    """Counts kernels: calls that make something."""

    sign = 1
    kernels = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.kernels += self.sign * (not function.is_view and function.namespace == "aten")
        return function(*args, **(kwargs or {}))


def test_an_operation_costs_what_a_layer_more_takes():
    seconds = {"llama": 3.0, "gpt": 2.0}
    texts = []

    def training(kind: str, layers: int, device: torch.device):
        texts.append((kind, layers))
        return lambda: 0.5 + layers * seconds[kind]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operations, "_training", training)
        assert operations.layers_s(lambda work: work(), 3, torch.device("cpu")) == pytest.approx(
            5.0
        )
    assert len(set(texts)) == 4


def test_on_cpu_every_point_has_the_cost_of_an_operation():
    slow = replace(KERNELS, operation_s=2e-5)
    device = assembled_cluster("cpu", [KERNELS, slow, slow], {}).device
    assert device.launch_s == 2e-5 and device.dispatch_s is None
    assert [seconds for _, seconds in device.memory_curve] == pytest.approx(
        [2e-5, 1.015e-3, 2.00015e-1]
    )
    assert device.matmul_curves["fp32"][0] == pytest.approx((1e4, 2.5e-5))
    device = assembled_cluster("cuda", [slow], {}).device
    assert (device.launch_s, device.dispatch_s) == (5e-6, 2e-5)
    assert device.memory_curve == tuple(KERNELS.memory)


# ------------------------------------------------------------------------------------------------- the planner uses measurements


@pytest.mark.parametrize("spec", every(2, [made_up(), None]), ids=["made up", "measured"])
def test_the_price_of_a_measured_point_is_the_measurement(spec, request):
    spec = spec or request.getfixturevalue("measured")
    for dtype, points in spec.device.matmul_curves.items():
        for flops, seconds in points:
            side = round((flops / 2) ** (1 / 3))
            if 2 * side**3 == flops:
                assert shaped_matmul_time_s(side, side, side, spec.device, dtype) == pytest.approx(
                    seconds
                )
    for size_bytes, seconds in spec.device.memory_curve:
        assert cm.memory_time_s(size_bytes, spec.device) == pytest.approx(seconds)
    for name, by_ranks in spec.topology.intra.curves.items():
        for ranks, points in by_ranks.items():
            for size_bytes, seconds in points:
                if name == "point_to_point":
                    found_s = cm.point_to_point_time_s(size_bytes, ranks, 1, spec.topology)
                else:
                    found_s = cm.collective_time_s(
                        name, size_bytes, ranks, 4 // ranks, spec.topology
                    )
                assert found_s == pytest.approx(seconds), (name, ranks, size_bytes)


def test_a_flat_product_is_bound_by_memory():
    device = made_up().device
    assert shaped_matmul_time_s(1, 10_000, 10_000, device, "fp32") > 0.9 * cm.memory_time_s(
        4e8, device
    )


def test_groups_across_nodes_keep_the_analytic_form():
    two = replace(made_up().topology, nodes=2)
    plain = replace(two, intra=replace(two.intra, curves={}))
    assert cm.all_reduce_time_s(1e6, 8, 1, two) == cm.all_reduce_time_s(1e6, 8, 1, plain)
    assert cm.all_reduce_time_s(1e6, 4, 1, two) != cm.all_reduce_time_s(1e6, 4, 1, plain)


def test_the_plan_follows_the_file(tmp_path):
    """A slower network in the file makes the plan slower."""
    spec = made_up()
    curves = {
        name: {n: [(x, 1e3 * y) for x, y in points] for n, points in by.items()}
        for name, by in spec.topology.intra.curves.items()
    }
    slow = replace(
        spec, topology=replace(spec.topology, intra=replace(spec.topology.intra, curves=curves))
    )
    spec_of = parse_model("llama-tiny")
    model, inputs, seconds = spec_of.build("meta"), spec_of.example_inputs(8, 32), []
    traced = autopar.api.trace(model, inputs, precision="fp32")
    for name, cluster in (("fast", spec), ("slow", slow)):
        path = tmp_path / f"{name}.yaml"
        cluster.to_yaml(path)
        pin = {"tp": 2, "micro_batch": 2, "sequence_parallel": True, "zero": 0, "recompute": "none"}
        plan = autopar.plan(model, str(path), inputs, global_batch=8, pin=pin, traced=traced)
        seconds.append(plan.predicted.step_time_s)
        assert plan.precision == "fp32"
    assert seconds[1] > 10 * seconds[0]


# ------------------------------------------------------------------------------------------------------------- the cluster file


@pytest.mark.parametrize(
    "spec",
    slow_but([made_up(), made_up(1)], [made_up(), made_up(1), None]),
    ids=["made up", "one rank", "measured"],
)
def test_round_trip(spec, request, tmp_path):
    spec = spec or request.getfixturevalue("measured")
    text = spec.to_yaml(tmp_path / "c.yaml")
    again = ClusterSpec.parse(str(tmp_path / "c.yaml"))
    assert again == spec and again.spec_hash() == spec.spec_hash() and again.to_yaml() == text
    assert hash(again) == hash(spec)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "- [64.0, 0.0002]",
            "- [64.0]",
            r"all_reduce\]\[2\]: point 0 is \[64.0\] and must be a pair",
        ),
        ("- [64.0, 0.0002]", "- [64.0, null]", r"seconds of point 0=None"),
        ("- [64.0, 0.0002]", "- [64.0, -1]", r"seconds of point 0=-1"),
        ("- [64.0, 0.0002]", "- [1.0e+9, 0.0002]", "sizes must ascend"),
        (
            "all_reduce:",
            "all_reduse:",
            "'all_reduse': the transfer is unknown; did you mean all_reduce",
        ),
        (
            "    4:\n",
            "    3:\n",
            "all_reduce has no curve for groups of 4 of 4 devices a node .it has 2, 3.; run autopar calibrate --nproc 4",
        ),
        ("    4:\n", "    four:\n", "ranks='four'"),
        ("devices_per_node: 4", "devices_per_node: 8", "no curve for groups of 8 of 8 devices"),
        ("fp32:\n    -", "fp33:\n    -", "unknown dtype 'fp33'; did you mean fp32"),
        ("fp32:\n    -", "fp64:\n    -", "matmul_curves has fp64, of which flops has no rate"),
        ("memory_curve:\n", "memory_curve: 3\n  more:\n", "unknown key 'more'"),
        ("- [12.0, 5.0e-06]", "- [12.0, .nan]", "memory_curve: seconds of point 0=nan"),
        ("intra_curves:\n", "intra_curves: 3\nmore:\n", "unknown key 'more'"),
        ("launch_s: 5.0e-06", "launch_s: -1", "launch_s=-1"),
        ("nodes: 1", "nodes: [", "not valid YAML"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, old, new, message):
    path, text = tmp_path / "c.yaml", made_up().to_yaml()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(AutoparError, match=message) as caught:
        ClusterSpec.from_yaml(path)
    assert str(path) in str(caught.value)


# ------------------------------------------------------------------------------------------------------------- the command


def test_the_command_writes_what_the_planner_reads(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("autopar.calibrate.cluster.CPU_EFFORT", QUICK)
    path = tmp_path / "cluster.yaml"
    done = CliRunner().invoke(
        cli, ["calibrate", "--nproc", "2", "--device", "cpu", "--output", str(path)]
    )
    assert done.exit_code == 0, done.output
    for words in (
        "matrix product fp32",
        "element-wise fp32",
        "all reduce over 2",
        "point to point over 2",
        "an operation",
        str(path),
    ):
        assert words in done.stdout
    spec = ClusterSpec.parse(str(path))
    assert (spec.num_devices, spec.device.name) == (2, "cpu") and set(
        spec.topology.intra.curves["all_reduce"]
    ) == {2}
    planned = CliRunner().invoke(
        cli, ["explain", "llama-tiny", str(path), "--global-batch", "4", "--seq", "16"]
    )
    assert planned.exit_code == 0 and "calibrated cpu:2" in planned.stdout, planned.output


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--nproc", "0"], ["0 is not in the range"]),
        (["--nproc", "four"], ["'four' is not a valid integer"]),
        (["--device", "tpu"], ["'tpu' is not one of"]),
        (["--output", "cluster.txt"], ["cluster.txt", ".yaml"]),
        (["--output", "/no/such/folder/c.yaml"], ["/no/such/folder", "choose another path"]),
        (["--output", "."], ["."]),
        (["--nproc", "2", "--gpus", "3"], ["No such option"]),
    ],
)
def test_mistakes_are_answered_at_once(args, words):
    start = time.monotonic()
    done = CliRunner().invoke(cli, ["calibrate", *args])
    output = done.output + str(done.exception)
    assert done.exit_code == 2 and time.monotonic() - start < 5, output
    assert all(word in output for word in words), output


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="there is a CUDA device")
def test_cuda_where_there_is_none(tmp_path):
    with pytest.raises(
        AutoparError, match=r"no CUDA device is visible .* calibrate with --device cpu"
    ):
        calibrate(2, "cuda")
    assert not list(Path(tmp_path).iterdir())


@pytest.mark.parametrize("nproc", [0, -1, True, 2.0])
def test_calibrate_checks_nproc(nproc):
    with pytest.raises(AutoparError, match="must be a whole number >= 1"):
        calibrate(nproc, "cpu")


@pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a CUDA device")
def test_cuda_where_there_is_one():
    spec = calibrate(1, "cuda", replace(QUICK, dtypes=("bf16",)))
    assert spec.device.compute_units > 1 and spec.device.dispatch_s > 0
