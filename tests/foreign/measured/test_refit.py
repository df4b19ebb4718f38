"""`autopar calibrate --from-run`: rates are found again in traces and logs, and every mistake is told."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from autopar_cost_models.collectives import collective_time_s
from autopar_cost_models.matmul import shaped_matmul_time_s
from autopar_cost_models.roofline import stream_s
from click.testing import CliRunner, Result
from support.narrow import fits_a_terminal

from autopar.cli.plan_commands import cli
from autopar.errors import AutoparError
from autopar.foreign.measured.fit import factor_for, refit, with_compute, with_link
from autopar.foreign.measured.read_run import read_run
from autopar.foreign.measured.what_ran import WhatRan, job_file
from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan import Plan

SCRIPT = """
ARGS="--num-layers 8 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096
 --position-embedding-type rope --swiglu --untie-embeddings-and-output-weights --vocab-size 32000 --hidden-dropout 0 --attention-dropout 0
 --micro-batch-size 1 --global-batch-size 64 --bf16 --use-distributed-optimizer --tensor-model-parallel-size 2 --sequence-parallel"
torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py $ARGS
"""
MEGATRON = (
    "[Rank 0] (after 2 iterations) memory (MB) | allocated: 10770.3 | max allocated: 15754.9 | reserved: 16334.0 | "
    "max reserved: {mib:.1f}\n"
    " [2026-08-01 07:19:37] iteration {n:8d}/    5000 | consumed samples: {samples:12d} | elapsed time per iteration (ms): {ms:.1f} | "
    "throughput per GPU (TFLOP/s/GPU): 80.2 | learning rate: 6.976744E-08 | global batch size: {batch:5d} | lm loss: 1.043863E+01 | "
    "loss scale: 1.0 | grad norm: 26.203 | number of skipped iterations:   0 | number of nan iterations:   0 |\n"
)
TITAN = (
    "[rank0]:[titan] 2026-06-04 08:51:48,074 - root - INFO - \x1b[31mstep: {n:2}  \x1b[32mloss: 10.70690  "
    "\x1b[38;5;208mgrad_norm:  2.4909  \x1b[38;2;54;234;195mmemory: 30.99GiB(32.62%)  \x1b[34mtps: {tps:,}  "
    "\x1b[36mtflops: 407.35  \x1b[35mmfu: 41.19%\x1b[39m\n"
)
VALIDATION = (
    "[rank0]:[titan] 2026-06-04 08:52:48,074 - root - INFO - \x1b[33mvalidate step: 20  \x1b[32mloss:  8.9196  "
    "\x1b[38;2;54;234;195mmemory: 30.99GiB(32.62%)  \x1b[34mtps: 99,999\x1b[39m\n"
)


def megatron_log(step_s: float, batch: int = 64) -> str:
    """The log of a run with a slow first step."""
    return "".join(
        MEGATRON.format(n=n, samples=n * batch, ms=1e3 * step_s * (3 if n == 1 else 1), batch=batch, mib=16334)
        for n in range(1, 6)
    )  # fmt: skip


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("job") / "train.sh"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(scope="module")
def ran(job: Path) -> WhatRan:
    return job_file(str(job), ClusterSpec.make("h100", 1, 8), None, None)


def run_in(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


# ------------------------------------------------------------------------------------------------------------------ logs


def test_a_log_changes_the_rates_of_the_device_until_the_step_is_explained(tmp_path, ran):
    cluster = ran.cluster
    slow = with_compute(cluster, 0.8)
    step_s = ran.priced(slow).step_s
    run = read_run(run_in(tmp_path / "train.log", megatron_log(step_s)))
    assert run.step_s == pytest.approx(step_s, rel=1e-3) and run.global_batch == 64
    assert run.reserved_bytes == 16334 * 2**20
    found = refit(run, cluster, ran)
    assert found.after is not None and found.after.step_s == pytest.approx(step_s, rel=3e-3)
    for dtype in ("bf16", "fp8"):
        wanted = cluster.device.achieved_flops(dtype) * 0.8
        assert found.cluster.device.achieved_flops(dtype) == pytest.approx(wanted, rel=5e-3)
    assert found.cluster.topology == cluster.topology
    assert any("links" in words for words in found.unseen)
    assert "fitted" in found.cluster.device.source


def test_a_rate_in_tokens_is_a_step(tmp_path, ran):
    tps = round(64 * 4096 / 8 / (1.1 * ran.priced(ran.cluster).step_s))
    lines = [TITAN.format(n=n, tps=tps if n > 1 else 375) for n in (1, 10, 20)]
    run = read_run(run_in(tmp_path / "titan.log", "".join(lines) + VALIDATION))
    assert run.tokens_per_s_per_gpu == tps and run.reserved_bytes == 30.99 * 2**30
    found = refit(run, ran.cluster, ran)
    assert found.measured_s == pytest.approx(1.1 * ran.priced(ran.cluster).step_s, rel=1e-3)
    assert found.after is not None
    assert found.after.step_s == pytest.approx(found.measured_s, rel=3e-3)


# ---------------------------------------------------------------------------------------------------------------- traces

TRUE = {"products": 0.9, "memory": 0.8, "intra": 0.7}
"""By what factor the rates of the made-up trace differ from the catalogue's."""


def made_up_trace(cluster: ClusterSpec, shapes: bool = True) -> dict[str, Any]:
    """A trace with the events of Kineto, of a device whose rates are those of `TRUE`."""
    device, events, clock = cluster.device, [], 1e9
    efficiency = device.dtype_efficiency.get("bf16", device.matmul_efficiency)
    true = replace(
        device,
        dtype_efficiency={**device.dtype_efficiency, "bf16": efficiency * TRUE["products"]},
        bandwidth_efficiency=device.bandwidth_efficiency * TRUE["memory"],
    )
    links = with_link(cluster, "intra", TRUE["intra"]).topology

    def kernel(name: str, seconds: float, **args: Any) -> None:
        nonlocal clock
        number = len(events) + 1
        args = {"device": 0, "stream": 7, "correlation": number, "External id": number, **args}
        launch = {
            "ph": "X",
            "cat": "cuda_runtime",
            "name": "cudaLaunchKernel",
            "ts": clock - 500.0,
            "dur": 3.0,
        }
        events.append(
            launch | {"pid": 9, "tid": 9, "args": {"correlation": number, "External id": number}}
        )
        events.append({"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": clock,
                       "dur": 1e6 * seconds, "args": args})  # fmt: skip
        clock += 1e6 * seconds + 2.0

    def op(name: str, dims: list, kind: str) -> None:
        args = {"External id": len(events) + 2, "Record function id": 0, "Ev Idx": len(events)}
        if shapes:
            args |= {"Input Dims": dims, "Input type": [kind if dim else "Scalar" for dim in dims],
                     "Input Strides": [[1] * len(dim) for dim in dims]}  # fmt: skip
        events.append(
            {
                "ph": "X",
                "cat": "cpu_op",
                "name": name,
                "pid": 9,
                "tid": 9,
                "ts": clock,
                "dur": 9.0,
                "args": args,
            }
        )

    for turn in range(12):
        m, k, n = 4096, 4096, 4096 + 512 * turn
        op("aten::mm", [[m, k], [k, n]], "c10::BFloat16")
        kernel("nvjet_hsh_256x128_64x4", shaped_matmul_time_s(m, n, k, true, "bf16"))
        op("aten::add", [[8192, 8192], [8192, 8192], []], "c10::BFloat16")
        kernel("vectorized_elementwise_kernel", stream_s(3 * 2 * 8192**2, true))
        size = 2 ** (21 + turn % 4)
        waits = 1.0 if turn % 2 else 4.0  # every second one waits for another rank
        seconds = waits * collective_time_s("all_gather", size, 8, 1, links)
        kernel("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", seconds, **{
            "Collective name": "_allgather_base", "In msg nelems": size // 16, "Out msg nelems": size // 2, "Group size": 8,
            "dtype": "BFloat16", "Process Group Ranks": "[0, 1, 2, 3, 4, 5, 6, 7]"})  # fmt: skip
    step = {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#3", "pid": 9, "tid": 9}
    events.append(step | {"ts": 1e9, "dur": clock - 1e9, "args": {}})
    return {"schemaVersion": 1, "traceEvents": events, "traceName": "trace.json"}


@pytest.fixture(scope="module")
def node() -> ClusterSpec:
    return ClusterSpec.make("h100", 1, 8)


@pytest.mark.parametrize("packed", [False, True])
def test_a_trace_with_shapes_shows_each_rate(tmp_path, node, packed):
    text = json.dumps(made_up_trace(node)).encode()
    run = read_run(run_in(tmp_path / "trace.json", gzip.compress(text) if packed else text))
    assert (len(run.products), len(run.streams), len(run.transfers)) == (12, 12, 12)
    found = refit(run, node).cluster
    device, links = found.device, found.topology
    assert device.achieved_flops("bf16") / node.device.achieved_flops("bf16") == pytest.approx(0.9, rel=1e-3)  # fmt: skip
    assert device.bandwidth_efficiency / node.device.bandwidth_efficiency == pytest.approx(0.8, rel=1e-3)  # fmt: skip
    assert links.intra.efficiency / node.topology.intra.efficiency == pytest.approx(0.7, rel=1e-2)
    assert device.launch_s == pytest.approx(2e-6, rel=1e-2)
    assert device.achieved_flops("fp8") == node.device.achieved_flops("fp8"), (
        "no product in fp8 ran"
    )


def test_the_file_plans_as_the_fitted_cluster(tmp_path, node):
    path = run_in(tmp_path / "trace.json", json.dumps(made_up_trace(node)))
    output = tmp_path / "mine.yaml"
    with fits_a_terminal():
        done = command("--from-run", path, "--cluster", "h100:8", "--output", output)
    assert done.exit_code == 0, done.output
    for words in ("products in bf16", "link inside a node", "12 collectives", "not fitted", "written to"):  # fmt: skip
        assert words in done.output
    written = ClusterSpec.parse(str(output))
    assert written == replace(refit(read_run(path), node).cluster, name=written.name)
    data = json.loads(command("--from-run", path, "--cluster", "h100:8", "--output", output, "--json").stdout)  # fmt: skip
    assert {change["name"] for change in data["changes"]} == {"products in bf16", "memory", "link inside a node", "launch"}  # fmt: skip


def test_a_trace_without_shapes_says_how_to_record_them(tmp_path, node, ran):
    run = read_run(run_in(tmp_path / "trace.json", json.dumps(made_up_trace(node, shapes=False))))
    found = refit(run, node)
    assert [change.name for change in found.changes] == ["link inside a node", "launch"]
    assert any("record_shapes=True" in words for words in found.unseen)


def test_ranges_of_the_engine_tell_compute_from_exchange(tmp_path, ran):
    price = ran.priced(with_link(with_compute(ran.cluster, 0.8), "intra", 0.5))
    at, events = 0.0, []

    def add(name: str, start: float, seconds: float) -> None:
        event = {"ph": "X", "cat": "user_annotation", "name": name, "pid": 1, "tid": 1}
        events.append(event | {"ts": 1e6 * start, "dur": 1e6 * seconds})

    whole = price.compute_s + price.exchange_s
    add("step 7", at, price.step_s)
    add("micro-batch 0 forward", at, whole)
    add("all_gather over tp", at, price.exchange_s)
    found = refit(read_run(run_in(tmp_path / "rank-0.json", json.dumps({"traceEvents": events}))), ran.cluster, ran)  # fmt: skip
    device, link = found.cluster.device, found.cluster.topology.intra
    assert device.achieved_flops("bf16") / ran.cluster.device.achieved_flops("bf16") == pytest.approx(0.8, rel=0.01)  # fmt: skip
    assert link.efficiency / ran.cluster.topology.intra.efficiency == pytest.approx(0.5, rel=0.02)


def test_ranges_that_are_written_for_each_stream_count_once(tmp_path):
    """As Kineto writes them: once for the stream of compute, and once for that of NCCL. The second
    pass is of a step that the trace lacks.
    """
    events = []

    def add(name: str, start: float, end: float, stream: int, pid: int = 0) -> None:
        event = {"ph": "X", "cat": "gpu_user_annotation", "name": name, "pid": pid, "tid": stream}
        events.append(event | {"ts": start, "dur": end - start})

    for stream, early in ((7, 0.0), (20, 200.0)):
        add("step 1", early, 1000.0 - early, stream)
        add("micro-batch 0 forward", early, 900.0 - early, stream)
        add("micro-batch 0 forward", 5000.0 + early, 5900.0 - early, stream)
    add("all_gather over tp", 300.0, 400.0, 20)
    add("all_gather over tp", 300.0, 400.0, 20, pid=1)
    args = {"device": 0, "stream": 7}
    events.append({"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 0.0, "dur": 900.0, "args": args})  # fmt: skip
    run = read_run(run_in(tmp_path / "trace.json", json.dumps({"traceEvents": events})))
    assert run.step_s == pytest.approx(1e-3) and run.steps == 1
    assert run.ranges == pytest.approx({"passes": 900e-6, "tp": 100e-6})


KEYS = (
    "External id",
    "correlation",
    "stream",
    "Input Dims",
    "Input type",
    "Group size",
    "In msg nelems",
)


@pytest.mark.parametrize("key", [*KEYS, "Process Group Ranks"])
@pytest.mark.parametrize(
    "value", [None, [[]], "9" * 5000, 10**400, float("inf"), [[10**400, 1]] * 2]
)
def test_arguments_that_are_damaged_are_left_out(tmp_path, node, key, value):
    trace = made_up_trace(node)
    for event in trace["traceEvents"]:
        if key in event["args"]:
            event["args"][key] = value
    try:
        found = refit(read_run(run_in(tmp_path / "trace.json", json.dumps(trace))), node)
    except AutoparError:
        return
    rates = [change.after for change in found.changes]
    assert all(0 < rate < 10 for rate in rates), found.changes


def test_shares_are_at_most_the_datasheets(tmp_path, ran):
    step_s = 0.7 * ran.priced(ran.cluster).step_s
    found = refit(read_run(run_in(tmp_path / "train.log", megatron_log(step_s))), ran.cluster, ran)
    shares = {change.name: change.after for change in found.changes}
    assert shares["memory"] == found.cluster.device.bandwidth_efficiency == 1.0


# -------------------------------------------------------------------------------------------------------------- mistakes


def command(*arguments: Any) -> Result:
    return CliRunner().invoke(cli, ["calibrate", *map(str, arguments)])


TRACE = '{"traceEvents": [{"ph": "X", "cat": "%s", "name": "%s", "pid": 1, "tid": 1, "ts": 5.0, "dur": %s}]}'
FILES = {
    "empty": ("", "is empty"),
    "blank": (" \n\n", "is empty"),
    "cut": ('{"traceEvents": [{"ph": "X", "cat": "ker', "give a whole trace"),
    "cut gzip": (gzip.compress(b'{"traceEvents": []}' * 99)[:-12], "give a whole trace"),
    "list": ("[1, 2]", "has no step in the form of"),
    "another JSON": ('{"step": 3}', "no Chrome trace"),
    "no events": ('{"traceEvents": []}', "profile steps of training"),
    "odd events": ('{"traceEvents": [1, null, {"ph": "X"}]}', "profile steps of training"),
    "negative time": (TRACE % ("kernel", "gemm", "-4.0"), "no time from 0 on"),
    "text as time": (TRACE % ("kernel", "gemm", '"4"'), "no time from 0 on"),
    "predicted": ('{"traceEvents": [], "otherData": {"folded": "nothing"}}', "predicted by autopar"),
    "no steps": ("loading checkpoint\ndone\n", "has no step in the form of Megatron-LM"),
    "Trainer": ("{'loss': 2.1, 'grad_norm': 0.4, 'epoch': 0.1}\n", "has no step in the form of"),
    "another framework": ("12:01 epoch 0 step 10 loss 2.1 it/s 3.4\n", "has no step in the form of"),
    "negative step": ("elapsed time per iteration (ms): -8100.0 |\n" * 3, "must be above 0"),
    "zero rate": (TITAN.format(n=1, tps=0), "must be above 0"),
    "decimal commas": ("elapsed time per iteration (ms): 936,1 |\n" * 3, "with decimal points"),
    "no number": ("elapsed time per iteration (ms): nan |\n" * 3, "no number like"),
    "huge step": (f"elapsed time per iteration (ms): {'9' * 400} |\n" * 3, "below 1e+15"),
    "one step": ("elapsed time per iteration (ms): 936.1 |\n", "at least 2"),
    "growing batch": (megatron_log(3.0, 32) + megatron_log(3.0) + "global batch size: 128", "no longer grows"),
    "damaged gzip": (gzip.compress(b'{"traceEvents": []}')[:10] + b"\xff" * 30, "give a whole trace"),
    "deep": ('{"traceEvents": ' + "[" * 99_999, "give a whole trace"),
    "damaged number": ("elapsed time per iteration (ms): 8.1.0 |\n", "no number"),
    "not text": (b"\xff\xfe\x00elapsed", "cannot read"),
    "another batch": (megatron_log(3.0, batch=2048), "give the file of the run that"),
    "another model": (megatron_log(500.0), "another model, layout, batch or machine"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_no_run(tmp_path, job, name):
    text, words = FILES[name]
    path = run_in(tmp_path / "run", text)
    done = command("--from-run", path, "--job", job, "--cluster", "h100:8", "--output", tmp_path / "c.yaml")  # fmt: skip
    assert done.exit_code == 2 and words in " ".join(done.output.split()), done.output
    assert not (tmp_path / "c.yaml").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "give --cluster"),
        (("--cluster", "h100:8", "--nproc", 4), "measures no device"),
        (("--cluster", "nothing:8"), "unknown preset"),
        (("--cluster", "h100:8", "--job", "missing.sh"), "does not exist"),
        (("--cluster", "h100:8", "--plan", "missing.json"), "missing.json"),
        (("--cluster", "h100:8", "--plan", "p.json", "--job", "t.sh"), "give one of them"),
        (("--cluster", "h100:4+dgx-a100-80g:4"), "the one kind of device"),
        (("--cluster", "h100:8"), "give what ran as --plan or --job"),
    ],
)
def test_options_that_do_not_go_together(tmp_path, options, words):
    path = run_in(tmp_path / "train.log", megatron_log(3.0))
    done = command("--from-run", path, "--output", tmp_path / "c.yaml", *options)
    assert done.exit_code == 2 and words in " ".join(done.output.split()), done.output


def test_what_ran_needs_a_run(tmp_path):
    done = command("--cluster", "h100:8", "--output", tmp_path / "c.yaml")
    assert done.exit_code == 2 and "give --from-run too" in done.output


def test_a_step_that_waits_for_the_host_says_nothing_of_the_device(tmp_path, job):
    """Eight layers of a narrow model: the host issues more slowly than the device computes."""
    text = job.read_text().replace("--hidden-size 4096 --ffn-hidden-size 11008", "--hidden-size 512 --ffn-hidden-size 1024")  # fmt: skip
    narrow = run_in(tmp_path / "narrow.sh", text.replace("--seq-length 4096", "--seq-length 512"))
    ran = job_file(str(narrow), ClusterSpec.make("h100", 1, 8), None, None)
    step_s = ran.priced(ran.cluster).step_s
    run = read_run(run_in(tmp_path / "train.log", megatron_log(step_s)))
    with pytest.raises(AutoparError, match=r"wait .* for the host"):
        refit(run, ran.cluster, ran)


def test_a_saved_plan_is_what_ran(tmp_path):
    saved = tmp_path / "plan.json"
    asked = [
        "explain",
        "llama-tiny",
        "cpu:4",
        "--global-batch",
        "8",
        "--pin",
        "tp=2,pp=1",
        "--save",
    ]
    assert CliRunner().invoke(cli, [*asked, str(saved)]).exit_code == 0
    plan = Plan.load(saved)
    log = run_in(tmp_path / "train.log", megatron_log(plan.predicted.step_time_s * 1.5, batch=8))
    with fits_a_terminal():
        done = command("--from-run", log, "--plan", saved, "--output", tmp_path / "c.yaml")  # fmt: skip
    assert done.exit_code == 0, done.output
    range_of = {"ph": "X", "cat": "user_annotation", "pid": 1, "tid": 1, "ts": 0.0, "dur": 9e3}
    names = ("step 1", "micro-batch 0 forward", "layers.77 forward")
    trace = json.dumps({"traceEvents": [range_of | {"name": name} for name in names]})
    for asked, words in (
        (("--from-run", run_in(tmp_path / "t.json", trace)), "no such segment"),
        (("--from-run", log, "--model", "gpt-tiny"), "was made for"),
    ):
        done = command(*asked, "--plan", saved, "--output", tmp_path / "d.yaml")
        assert done.exit_code == 2 and words in " ".join(done.output.split()), done.output


def test_a_factor_is_found_only_within_bounds():
    assert factor_for(lambda factor: 3 / factor, 1.5) == pytest.approx(2.0)
    assert factor_for(lambda factor: 3 / min(factor, 1.1), 1.5) is None
