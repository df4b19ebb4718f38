"""Answers to jobs: layers and memory of ranks, times, refusals, better plans and changes that fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from autopar_cost_models.memory_error import HEADROOM
from click.testing import CliRunner
from support.effort import every
from support.narrow import fits_a_terminal

import autopar
from autopar.cli.plan_commands import cli
from autopar.errors import AutoparError
from autopar.foreign.checking.check import Answer, check_job
from autopar.foreign.checking.measured import measured_step_s
from autopar.foreign.checking.page import check_page
from autopar.foreign.checking.pricing import job_setting
from autopar.foreign.checking.report import answer_gap_words, fit_words
from autopar.foreign.frameworks.registry import read_job
from autopar.foreign.job import Job
from autopar.foreign.published.evaluate import case_of, price_run
from autopar.foreign.writers.export import convert
from autopar.ir.cluster import ClusterSpec
from autopar.ir.layout import Layout
from autopar.ir.model_shape import ModelShape
from autopar.request.pins import layout_pins, mode_of

SCRIPT = """
export CUDA_DEVICE_MAX_CONNECTIONS=1
ARGS="--num-layers 8 --hidden-size 1024 --ffn-hidden-size 2816 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024
 --position-embedding-type rope --swiglu --untie-embeddings-and-output-weights --vocab-size 32000 --hidden-dropout 0 --attention-dropout 0
 --micro-batch-size 2 --global-batch-size 64 --bf16"
torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py $ARGS """


def script(tmp_path: Path, arguments: str) -> Path:
    path = tmp_path / "train.sh"
    path.write_text(SCRIPT + arguments)
    return path


def answer(tmp_path: Path, arguments: str, **asked: object) -> Answer:
    job = read_job(script(tmp_path, arguments))
    return check_job(job, "h100:8", **({"advise": False} | asked))  # type: ignore[arg-type]


MIXED = (
    "torchrun --nproc-per-node 8 --nnodes 1 pretrain_gpt.py --num-layers 8 --hidden-size 512 --num-attention-heads 8 --bf16 "
    "--ffn-hidden-size 2048 --moe-ffn-hidden-size 1024 --swiglu --vocab-size 512 --seq-length 512 --max-position-embeddings 512 "
    "--pipeline-model-parallel-size 4 --micro-batch-size 1 --global-batch-size 16 --untie-embeddings-and-output-weights "
    "--num-experts 8 --moe-router-topk 2 --moe-layer-freq "
)


def parameters_of_ranks(found: Answer) -> list[int]:
    """Parameters that each rank of a pipeline with one stage a rank holds, by the names of its segments."""
    module = found.setting.spec.build("meta")
    whole = {
        name: sum(p.numel() for p in layer.parameters()) for name, layer in module.named_modules()
    }
    return [sum(whole.get(name, 0) for name in stage) for stage in found.plan.stages]


@pytest.mark.parametrize(
    ("freq", "experts"),
    every(3, [("'[1,1,0,0,0,0,1,0]'", [2, 0, 0, 1]), ("'([0,1]*4)'", [1, 1, 1, 1]), ("'([0]*4+[1]*4)'", [0, 0, 2, 2]),
              ("2", [1, 1, 1, 1])], unpacked=True),
)  # fmt: skip
def test_dense_layers_between_others_in_a_pipeline(tmp_path, freq: str, experts: list[int]) -> None:
    """A layer has four matrices of attention and two norms, and three of its MLP or of each expert."""
    path = tmp_path / "moe.sh"
    path.write_text(MIXED + freq)
    found = check_job(read_job(path), "h100:8", advise=False)
    dense, routed = 4 * 512**2 + 2 * 512 + 3 * 512 * 2048, 4 * 512**2 + 2 * 512 + 8 * 3 * 512 * 1024 + 8 * 512  # fmt: skip
    assert parameters_of_ranks(found) == [n * routed + (2 - n) * dense for n in experts]
    held = [n * routed + (2 - n) * dense for n in experts]
    peaks = found.plan.predicted.peak_memory_bytes
    # rank 1 holds more micro-batches than rank 2, and neither has an end of the model
    assert (peaks[2] > peaks[1]) == (held[2] > held[1])
    job = found.job
    written = convert(job, "megatron").text
    path.write_text(written)
    assert read_job(path).shape.expert_layers == job.shape.expert_layers


def test_ranks_hold_their_layers(tmp_path: Path) -> None:
    found = answer(
        tmp_path,
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer",
    )
    assert found.plan is not None and found.fits
    assert found.layers == ((4,), (4,))
    assert len(found.plan.predicted.peak_memory_bytes) == 2
    assert (found.plan.mesh.tp, found.plan.mesh.pp, found.plan.mesh.dp, found.plan.zero) == (
        2,
        2,
        2,
        1,
    )
    assert found.chance is not None and found.chance > 0.9
    assert found.findings == ()


def test_a_layout_with_its_own_stages(tmp_path: Path) -> None:
    layout = "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et|t*2|t*2|t*3L'"
    found = answer(tmp_path, layout)
    assert found.layers == ((1, 2), (2, 3)), "stages 0 and 2 are of rank 0"
    assert found.plan is not None and found.plan.schedule == "interleaved_1f1b"


def test_more_recomputation_takes_longer_and_holds_less(tmp_path: Path) -> None:
    full = "--recompute-granularity full --recompute-method "
    kept, half, whole = (
        answer(tmp_path, arguments).plan
        for arguments in (
            "",
            full + "block --recompute-num-layers 4",
            full + "uniform --recompute-num-layers 1",
        )
    )
    assert kept is not None and half is not None and whole is not None
    times = [plan.predicted.step_time_s for plan in (kept, half, whole)]
    peaks = [max(plan.predicted.peak_memory_bytes) for plan in (kept, half, whole)]
    assert times == sorted(times) and len(set(times)) == 3
    assert peaks == sorted(peaks, reverse=True)


def test_refusals_come_with_the_answer(tmp_path: Path) -> None:
    found = answer(tmp_path, "--tensor-model-parallel-size 3")
    assert found.plan is None and "3" in found.why_not
    assert found.refused[0].legal == (
        "--tensor-model-parallel-size 2",
        "--tensor-model-parallel-size 4",
    )


def test_better_plans_in_its_own_options(tmp_path: Path) -> None:
    slow = "--tensor-model-parallel-size 8 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    found = answer(tmp_path, slow, advise=True)
    assert found.plan is not None and found.best is not None
    assert found.best.predicted.step_time_s < 0.7 * found.plan.predicted.step_time_s
    told = {str(difference) for difference in found.differences}
    assert "drop --recompute-granularity" in told
    assert any(text.startswith("--tensor-model-parallel-size 8 -> ") for text in told)
    # the best plan in Megatron's words is a job with the predicted step
    text = autopar.export(found.best, "megatron").text
    path = tmp_path / "best.sh"
    path.write_text(text)
    again = check_job(
        replace(read_job(path), shape=read_job(script(tmp_path, "")).shape), "h100:8", advise=False
    )
    assert again.refused == ()


def test_the_best_is_never_slower_than_a_job_that_runs(tmp_path: Path) -> None:
    found = answer(tmp_path, "--use-distributed-optimizer", advise=True, time_limit_s=1e-3)
    assert found.plan is not None and found.best is not None and found.runs
    assert found.best.predicted.step_time_s <= found.plan.predicted.step_time_s


@pytest.mark.parametrize("of_peak", [0.99, 1.05])
def test_changes_that_fit(tmp_path: Path, of_peak: float) -> None:
    job = read_job(script(tmp_path, "--micro-batch-size 8"))
    roomy = check_job(job, "h100:8", advise=False)
    assert roomy.plan is not None
    peak = max(roomy.plan.predicted.peak_memory_bytes)
    small = autopar.ClusterSpec.make("h100", 1, 8, memory_bytes=int(of_peak * peak))
    found = check_job(job, small, time_limit_s=5)
    assert found.plan is not None and found.fits == (of_peak > 1) and not found.is_sure
    words = fit_words(found)
    assert words == ("may fit" if found.fits else "does not fit")
    assert f"It {words}: " in str(check_page(found).sections)
    assert found.changes
    times = [change.step_time_s for change in found.changes]
    assert times == sorted(times)
    room_bytes = (1 - HEADROOM) * of_peak * peak
    assert all(change.peak_bytes <= room_bytes and change.differences for change in found.changes)
    assert any(change.layout.recompute == "full" for change in found.changes)


def test_the_model_and_the_length_may_come_from_outside(tmp_path: Path) -> None:
    path = tmp_path / "accelerate.yaml"
    path.write_text(
        "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 8\nfsdp_config: {fsdp_version: 2}\n"
    )
    job = autopar.read_job(path)
    assert "give --seq" in job.check("h100:8", advise=False).why_not
    assert "give --model" in job.check("h100:8", seq=128, advise=False).why_not
    assert "micro_batch" in job.check("h100:8", model="llama-tiny", seq=64, advise=False).why_not
    job = job.with_batches(2, 64)
    found = job.check("h100:8", model="llama-tiny", seq=64, advise=False)
    assert found.plan.zero == 3 and found.plan.mesh.dp == 8


def test_what_is_measured_is_compared(tmp_path: Path) -> None:
    found = answer(tmp_path, "--tensor-model-parallel-size 8", advise=True, measured_s=30.0)
    words = answer_gap_words(found)
    assert words.startswith("the layout explains") and "are left" in words
    assert "not slower" in answer_gap_words(replace(found, measured_s=1e-6))


@pytest.mark.parametrize(
    ("micro_batch", "waits"), every(2, [(1, True), (64, False)], unpacked=True)
)
def test_a_step_waits_for_the_host_as_runs_do(
    tmp_path: Path, micro_batch: int, waits: bool
) -> None:
    """Kernels of one sequence take less than the host needs to issue them."""
    arguments = f"--micro-batch-size {micro_batch} --use-distributed-optimizer"
    found = answer(tmp_path, arguments + " --global-batch-size 512")
    assert found.plan is not None and found.setting is not None
    predicted, run = found.plan.predicted, price_run(case_of(found.setting.run))
    assert ("host" in predicted.breakdown) == waits
    assert predicted.step_time_s == pytest.approx(run.step_time_s)
    assert predicted.step_time_s == pytest.approx(sum(predicted.breakdown.values()))
    tokens = 512 * 1024
    assert predicted.tokens_per_s == pytest.approx(tokens / predicted.step_time_s)
    pages = check_page(found).sections
    assert any("wait for the host" in str(section) for section in pages) == waits


def test_other_numbers_of_devices_are_told(tmp_path: Path) -> None:
    found = check_job(read_job(script(tmp_path, "")), "h100:4", advise=False)
    assert "starts 8 processes, and h100:4 has 4 devices" in found.findings[0].what
    assert found.plan is not None and found.plan.mesh.dp == 4


def test_pins_of_layouts() -> None:
    layout = Layout(
        tp=2,
        pp=2,
        ep=4,
        etp=1,
        vpp=2,
        stages=(1, 2, 2, 3),
        micro_batch=1,
        global_batch=16,
        zero=1,
        schedule="interleaved_1f1b",
    )
    pins = layout_pins(layout, 16, 8)
    assert (pins["stages"], pins["dp"], pins["ep"], pins["vpp"]) == ("1-2-2-3", 4, 4, 2)
    assert (
        layout_pins(replace(layout, vpp=1, stages=(), schedule="1f1b", global_batch=4), 16, 8)[
            "schedule"
        ]
        == "gpipe"
    )
    assert layout_pins(Layout(zero=1), 1, 8)["zero"] == 0
    partly = Layout(recompute="full", recompute_layers=4)
    assert [mode_of(partly, layers) for layers in (4, 8, 12)] == ["full", "every-2", "every-3"]


def test_the_command(tmp_path: Path) -> None:
    path = script(tmp_path, "--tensor-model-parallel-size 2 --sequence-parallel --new-switch")
    with fits_a_terminal():
        done = CliRunner().invoke(
            cli, ["check", str(path), "--cluster", "h100:8", "--measured", "2400 tokens/s/gpu"]
        )
    assert done.exit_code == 0, done.output
    for words in (
        "Ranks of the pipeline",
        "fits",
        "Options without a price",
        "new_switch",
        "Best plan within this framework",
        "measured",
    ):
        assert words in done.output
    done = CliRunner().invoke(cli, ["check", str(path), "--cluster", "h100:8", "--json"])
    data = json.loads(done.stdout)
    assert (
        data["layers"] == [[8]] and data["layout"]["tp"] == 2 and data["unpriced"] == ["new_switch"]
    )
    refused = str(script(tmp_path, "--tensor-model-parallel-size 3"))
    with fits_a_terminal():
        done = CliRunner().invoke(cli, ["check", refused, "--cluster", "h100:8"])
    assert done.exit_code == 1 and "Refused at start" in done.output


MEGATRON_LINE = (
    " [2026-10-01 10:00:01] iteration {n:8d}/     100 | consumed samples: {samples:12d} | "
    "elapsed time per iteration (ms): {ms} | throughput per GPU (TFLOP/s/GPU): 401.2 | learning rate: 1.0E-06 |\n"
)
TITAN_LINE = (
    "[titan] 2026-10-01 10:00:01,001 - root - INFO - \x1b[31mstep: {n:2d}  \x1b[32mloss: 12.2718  "
    "\x1b[33mmemory: 27.9GiB(35.1%)  \x1b[34mtps: {tps}  \x1b[36mtflops: 20.1  \x1b[35mmfu: 2.0%\x1b[39m\n"
)
TIMES = ("21034.1", "8103.4", "8101.0", "8099.0")
LOGS = {
    "megatron": "".join(
        MEGATRON_LINE.format(n=n, samples=64 * n, ms=ms) for n, ms in enumerate(TIMES, 1)
    ),
    "torchtitan": TITAN_LINE.format(n=1, tps="400") + TITAN_LINE.format(n=10, tps="8,192"),
    "nanotron": "10/01/2026 10:00:01 [INFO|DP=0|PP=0|TP=0]: iteration: 3 / 100 | consumed_tokens: 393K | "
    "time_per_iteration_ms: 2.57K | tokens_per_sec: 51K | tokens_per_sec_per_gpu: 6.4K |\n",
}
"""Lines of logs, in the form that each framework writes."""


@pytest.mark.parametrize(("name", "step_s"), [("megatron", 8.1), ("torchtitan", 1.0), ("nanotron", 2.57)])  # fmt: skip
def test_the_log_of_a_framework_is_a_measurement(tmp_path: Path, name: str, step_s: float) -> None:
    path = tmp_path / "train.log"
    path.write_text(LOGS[name])
    job = Job(name, layout=Layout(global_batch=64), seq=1024)
    assert measured_step_s(str(path), job, None, 8) == pytest.approx(step_s, rel=1e-9)
    path.write_text("no step\n")
    with pytest.raises(AutoparError, match="has no step in the form of Megatron-LM"):
        measured_step_s(str(path), job, None, 8)


@pytest.mark.parametrize("measured", ["fast", "-1s", "0", "8 hours"])
def test_what_is_no_measurement(tmp_path: Path, measured: str) -> None:
    done = CliRunner().invoke(
        cli, ["check", str(script(tmp_path, "")), "--cluster", "h100:8", "--measured", measured]
    )
    assert done.exit_code == 2 and "is not a time or rate" in done.output


def test_a_file_that_is_no_job(tmp_path: Path) -> None:
    path = tmp_path / "notes.md"
    path.write_text("# Notes\n")
    done = CliRunner().invoke(cli, ["check", str(path), "--cluster", "h100:8"])
    assert done.exit_code == 2 and "is no job that autopar knows" in done.output


def test_unknown_dimensions_are_an_error() -> None:
    job = Job("megatron", ModelShape(layers=2), seq=64)
    assert "hidden, heads, vocab" in check_job(job, "h100:1").why_not
    with pytest.raises(AutoparError, match="is not known"):
        check_job(replace(job, framework="jax"), "h100:1")


def test_a_job_has_the_context_parallelism_of_its_framework(tmp_path: Path) -> None:
    """As the search within the framework has it, where the heads can be shared out."""
    file = tmp_path / "ds_config.json"
    file.write_text(
        '{"train_micro_batch_size_per_gpu": 1, "sequence_parallel_size": 4, '
        '"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}'
    )
    cluster, methods = ClusterSpec.parse("dgx-h100:1"), []
    for model in ("llama3-8b", "llama:layers=2,hidden=192,heads=6,kv_heads=6,ffn=256,vocab=128"):
        of = job_setting(read_job(file), cluster, model, 256)
        methods.append(of.request_of(of.job.layout, cluster).pin.context_method)
    assert methods == ["ulysses", None]
