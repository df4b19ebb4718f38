"""No verdict on a job whose file leaves something open, or that has parts without a price."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.narrow import fits_a_terminal

from autopar.cli.plan_commands import cli
from autopar.errors import AutoparError
from autopar.foreign.checking.check import check_job
from autopar.foreign.checking.page import check_page
from autopar.foreign.checking.pricing import job_setting
from autopar.foreign.checking.report import alone_words, check_data
from autopar.foreign.frameworks.registry import target_of
from autopar.foreign.job import Finding, Job, Unmodelled
from autopar.foreign.verdicts import held_refusals, unlaid_experts
from autopar.foreign.writers.export import convert
from autopar.ir.cluster import ClusterSpec
from autopar.ir.layout import Layout
from autopar.ir.model_shape import ModelShape
from autopar.request.arguments import parsed_cluster

SHAPE = ModelShape(layers=4, hidden=256, heads=8, kv_heads=8, head_dim=32, ffn=1024, vocab=1024)
LAYOUT = Layout(tp=2, micro_batch=1, global_batch=16, sequence_parallel=True)
JOB = Job("megatron", SHAPE, LAYOUT, gpus=8, seq=256)
ENGINE = Unmodelled("a rollout engine (vLLM)", "gpu_memory_utilization=0.6", place="beside")
OPTION = Unmodelled("a part of the optimizer in host memory", "optimizer_offload_fraction=0.5")
ADAPTERS = Unmodelled("low-rank adapters are trained", "lora_rank=8", place="instead")


def but(job: Job, **layout: object) -> Job:
    return replace(job, layout=replace(job.layout, **layout))  # type: ignore[arg-type]


def rules(job: Job, kind: str) -> list[Finding]:
    found = held_refusals(target_of(job.framework), job, 8)
    return [finding for finding in found if finding.kind == kind]


def test_a_refusal_that_only_some_values_have_is_not_one() -> None:
    bad = but(JOB, tp=3, global_batch=None)
    assert [f.what for f in rules(bad, "refused")]
    for job in (replace(bad, others=(JOB,)), replace(JOB, others=(bad,))):
        assert not rules(job, "refused")
        (open_world, *_) = rules(job, "unknown")
        assert "tp, global_batch cannot be determined" in open_world.what
        assert "does not divide 8 devices is refused" in open_world.what
        assert "give --global-batch" in open_world.legal


def test_a_refusal_of_all_values_holds_with_what_is_legal_for_all() -> None:
    bad = replace(but(JOB, micro_batch=3), others=(but(JOB, micro_batch=3, pp=2),))
    (held,) = rules(bad, "refused")
    assert "global batch" in held.what and held.legal
    for text in held.legal:
        option, value = text.split()
        name = {"--global-batch-size": "global_batch", "--micro-batch-size": "micro_batch"}[option]
        for job in (replace(bad, others=()), *bad.others):
            assert not rules(but(job, **{name: int(value)}), "refused")


@pytest.mark.parametrize(
    "job",
    [
        replace(JOB, others=(but(JOB, tp=4),)),
        replace(JOB, others=(replace(JOB, seq=512),)),
        replace(JOB, others=(replace(JOB, facts=replace(JOB.facts, precision="fp16")),)),
        replace(JOB, unmodelled=(ADAPTERS,)),
    ],
)
def test_what_has_no_price_gets_no_numbers(job: Job) -> None:
    found = check_job(job, "h100:8")
    assert found.withheld and found.plan is None and found.best is None and found.fits is None
    assert found.chance is None and not found.changes and not found.runs
    data = check_data(found)
    assert data["fits"] is None and data["withheld"] == list(found.withheld)
    assert data["unknown"] == list(job.unknown) and len(data["unmodelled"]) == len(job.unmodelled)
    page = str(check_page(found).sections)
    assert "No verdict is given" in page and "Best plan" not in page and "chance" not in page


def test_parts_without_a_price_leave_the_price_of_the_rest(tmp_path: Path, monkeypatch) -> None:
    job, path = replace(JOB, unmodelled=(ENGINE,)), tmp_path / "train.sh"
    path.write_text("x")
    monkeypatch.setattr("autopar.foreign.frameworks.registry.read_job", lambda *args: job)
    with fits_a_terminal():
        done = CliRunner().invoke(
            cli, ["check", str(path), "--cluster", "h100:8", "--measured", "9s"]
        )
    assert done.exit_code == 3, done.output
    for words in ("Why no verdict is given", "training alone", str(ENGINE), "not compared"):
        assert words in done.output
    assert not any(words in done.output for words in ("chance", "Best plan", " fits"))
    small = ClusterSpec.make("h100", 1, 8, memory_bytes=3 * 2**30)
    found = check_job(job, small, measured_s=9.0)
    data = check_data(found)
    assert data["fits"] is None and data["withheld"] == [str(ENGINE)] and data["chance"] is None
    assert data["best"] is None and not data["changes"] and not data["differences"]
    assert data["predicted"] is not None and data["gap"] is None
    page = str(check_page(found).sections)
    assert "Training alone" in page and "Best plan" not in page and "chance" not in page
    option = replace(found, job=replace(job, unmodelled=(ENGINE, OPTION)))
    assert alone_words(option) == "without these parts"


def test_what_is_given_is_known() -> None:
    job = replace(JOB, others=(but(JOB, micro_batch=2), replace(JOB, seq=512)))
    assert job.unknown == ("micro_batch", "seq")
    given = job.with_batches(1, None)
    assert given.unknown == ("seq",)
    cluster = parsed_cluster("h100:8")
    assert job_setting(given, cluster).job.unknown == ("seq",)
    assert job_setting(given, cluster, seq=256).job.unknown == ()
    narrow = replace(JOB, others=(replace(JOB, shape=replace(SHAPE, layers=8)),))
    assert job_setting(narrow, cluster).job.unknown == ("layers",)
    assert job_setting(narrow, cluster, model="llama-tiny").job.unknown == ()


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ({"ep": 4}, ""),
        ({"ep": 8}, "ep=8"),
        ({"ep": 4, "etp": 2}, ""),
        ({"ep": 4, "etp": 1}, "1 tensor-parallel ranks beside tp=2"),
        ({"ep": 4, "etp": 1, "tp": 1}, ""),
        ({"ep": 2, "etp": 4, "tp": 1}, "4 tensor-parallel"),
    ],
)
def test_groups_of_experts_that_cannot_be_laid_out(layout: dict[str, int], words: str) -> None:
    experts = replace(SHAPE, experts=8, top_k=2, moe_ffn=512)
    job = but(replace(JOB, shape=experts), **layout)
    found = unlaid_experts(job, 8)
    assert words in found and bool(words) == bool(found)


def test_an_open_job_is_not_converted() -> None:
    with pytest.raises(AutoparError, match="tp cannot be determined"):
        convert(replace(JOB, others=(but(JOB, tp=4),)), "megatron")
    losses = convert(replace(JOB, unmodelled=(ENGINE,)), "megatron").losses
    assert f"{ENGINE}: not translated" in losses
