"""Better plans are those that a job's file can say, and stand in the file that decides."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.job_files import FILES

from autopar.errors import AutoparError, NoLayout
from autopar.foreign.checking.check import check_job
from autopar.foreign.checking.pricing import JobSetting, job_setting
from autopar.foreign.checking.searching import best_within, in_file
from autopar.foreign.checking.written import written
from autopar.foreign.frameworks.registry import read_job
from autopar.foreign.frameworks.trainer_words import deepspeed_words
from autopar.foreign.target import NotExpressible
from autopar.foreign.writers.applied import applied
from autopar.foreign.writers.wording import OptionDifference
from autopar.ir.deadline import Deadline
from autopar.ir.layout import Layout
from autopar.ir.mesh import MeshShape
from autopar.ir.plan import Plan
from autopar.request.arguments import parsed_cluster
from autopar.request.restriction import Restriction

MODEL = "llama:layers=16,hidden=1024,heads=16,kv_heads=16,ffn=4096,vocab=32000,seq=1024"
MEGATRON = FILES["megatron"][1]


def setting(path: Path) -> JobSetting:
    job = read_job(path)
    job = job.with_batches(2, 64) if "micro_batch" in job.unknown else job
    return job_setting(job, parsed_cluster("h100:8"), MODEL if job.shape.lacking else None, 1024)


def choice(tp: int = 1, pp: int = 1, cp: int = 1, vpp: int = 1, micro: int = 2, **other: object) -> SimpleNamespace:  # fmt: skip
    """A layout of a search on 8 devices, with 64 sequences a step."""
    dp = 8 // (tp * pp * cp)
    schedule = "none" if pp == 1 else "1f1b" if vpp == 1 else "interleaved_1f1b"
    chosen = {
        "mesh": MeshShape(tp=tp, pp=pp, cp=cp, dp=dp), "micro_batch": micro, "num_microbatches": 64 // (micro * dp), "zero": 0,
        "shard": 0, "recompute": "none", "schedules": ((schedule, vpp),), "schedule": schedule, "stages_per_rank": vpp,
        "stage_sizes": (),
    }  # fmt: skip
    return SimpleNamespace(**(chosen | other))


def allows(of: JobSetting, **asked: object) -> bool:
    return all(limit.allows(choice(**asked)) for limit in in_file(of).limits)  # type: ignore[arg-type]


def test_a_file_behind_self_has_the_options(tmp_path: Path) -> None:
    """Hydra reads the entries of `defaults` in their order: those behind `_self_` win."""
    (tmp_path / "train").mkdir()
    inner = tmp_path / "train" / "small.yaml"
    options = FILES["megatron-nested"][1].replace("model:", "system:")
    inner.write_text(options)
    top = tmp_path / "train.yaml"
    text = "defaults:\n  - {}\n  - {}\nexperiment:\n  exp_name: a\n  task: {{type: train, backend: megatron}}\n"
    top.write_text(text.format("_self_", "train: small"))
    of = setting(top)
    layout = Layout(tp=2, micro_batch=2, global_batch=64, sequence_parallel=True)
    told = written(of, layout)
    assert told is not None and {d.file for d in told.differences} == {"train/small.yaml"}
    assert "in train/small.yaml: system.tensor_model_parallel_size 1 -> 2" in map(str, told.differences)  # fmt: skip
    changed, others = applied(of.job.file, told.differences)  # type: ignore[arg-type]
    assert changed == top.read_text()
    inner.write_text(others["train/small.yaml"])
    assert read_job(top).layout.tp == 2 and read_job(top).layout.pp == 1
    inner.write_text(options)
    top.write_text(text.format("train: small", "_self_"))
    told = written(setting(top), layout)
    assert told is not None and {d.file for d in told.differences} == {""}


def test_options_that_count_with_tp_alone_bar_it(tmp_path: Path) -> None:
    path = tmp_path / "a.yml"
    text = (
        "pipe_parallel_size: 1\nmodel_parallel_size: 1\nnum_layers: 16\nhidden_size: 1024\nnum_attention_heads: 16\n"
        "seq_length: 1024\nmax_position_embeddings: 1024\ntrain_micro_batch_size_per_gpu: 2\ngradient_accumulation_steps: 4\n"
        "fp16: {enabled: true}\nzero_optimization: {stage: 0}\ncheckpoint_activations: true\n"
    )
    path.write_text(text)
    assert allows(setting(path)) and allows(setting(path), tp=2)
    path.write_text(text + "partition_activations: true\n")
    assert allows(setting(path)) and not allows(setting(path), tp=2)


def test_forks_have_even_stages_without_turns(tmp_path: Path) -> None:
    path = tmp_path / "a.sh"
    path.write_text(MEGATRON)
    assert allows(setting(path), pp=2, vpp=3)
    path.write_text(FILES["megatron-deepspeed"][1].replace("--no-pipeline-parallel ", ""))
    of = setting(path)
    assert in_file(of).schedules == ("1f1b",) and in_file(of).cuts is not None
    assert in_file(of).cuts.sizes(MeshShape(pp=4), 1) == (4, 4, 4, 4)  # type: ignore[union-attr]
    assert in_file(of).cuts.sizes(MeshShape(pp=3), 1) == ()  # type: ignore[union-attr]


def test_a_release_without_accumulation_has_one_micro_batch(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text(FILES["torchtitan-2024"][1].replace("batch_size = 1", "batch_size = 16"))
    of = setting(path)
    one, more = ({"tp": 2, "zero": 3, "recompute": "full", "num_microbatches": n, "micro": 64 // (4 * n)} for n in (1, 2))  # fmt: skip
    assert allows(of, **one) and not allows(of, **more)


def test_a_file_that_is_refused_with_any_layout(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(FILES["accelerate-fsdp2"][1] + "no_such_key: 1\n")
    job = read_job(path).with_batches(2, 64)
    model = "llama:layers=2,hidden=256,heads=8,kv_heads=8,ffn=512,vocab=512,seq=256"
    found = check_job(job, "h100:8", model, 256, time_limit_s=600.0)
    assert found.refused and found.best is None and not found.changes
    assert "refused with any layout: no_such_key" in found.why_no_best


def test_what_is_auto_stays_so(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(FILES["deepspeed-auto"][1])
    told = written(setting(path), Layout(micro_batch=4, global_batch=64, zero=1))
    assert told is not None
    assert set(map(str, told.differences)) == {
        "zero_optimization.stage 3 -> 1",
        "in the training script: add per_device_train_batch_size 4",
        "in the training script: add gradient_accumulation_steps 2",
    }


@pytest.mark.parametrize("function", ["", "second"])
def test_a_function_of_several_is_changed(function: str) -> None:
    text = "\n".join(
        f"def {name}():\n    return Config(\n        training=T(a=1),\n    )  # {name}\n"
        for name in ("first", "second")
    )
    file = SimpleNamespace(text=text, name="a.py", function=function, parts=())
    changed, _ = applied(file, [OptionDifference("training.a", "1", "2")])  # type: ignore[arg-type]
    assert changed.count("config.training.a = 2") == (1 if function else 2)
    names: dict[str, object] = {
        "Config": lambda training: training,
        "T": lambda a: SimpleNamespace(a=a),
    }
    exec(changed.replace("config.training.a", "config.a"), names)
    assert names["second"]().a == 2  # type: ignore[operator]
    assert names["first"]().a == (1 if function else 2)  # type: ignore[operator]


@pytest.mark.parametrize(("error", "proved"), [(NoLayout, True), (AutoparError, False)])
def test_a_part_that_was_not_searched_leaves_no_proof(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[AutoparError], proved: bool
) -> None:
    """Of two kinds of layouts, the search of the first fails. A kind without layouts is proved."""
    path = tmp_path / "a.sh"
    path.write_text(MEGATRON)
    of, best, asked = setting(path), JobSetting.best, list[JobSetting]()

    def failing(self: JobSetting, restriction: Restriction, time_limit_s: float) -> Plan:
        asked.append(self)
        if len(asked) == 1:
            raise error("of a kind")
        return best(self, restriction, time_limit_s)

    monkeypatch.setattr(JobSetting, "best", failing)
    plan, bound_s = best_within(of, Deadline.after(60))
    assert len(asked) == 2 and plan.predicted.step_time_s > 0
    assert (bound_s > 0) == proved


def test_a_layout_without_a_place_says_nothing_of_its_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.sh"
    path.write_text(MEGATRON)
    found = iter([None, True])
    monkeypatch.setattr("autopar.foreign.checking.searching.has_verdict", lambda *_: next(found))
    limits = in_file(setting(path)).limits

    def said(**asked: object) -> bool:
        return all(limit.allows(choice(**asked)) for limit in limits)  # type: ignore[arg-type]

    assert not said(tp=2, micro=4) and said(tp=2, micro=2) and said(tp=2, micro=4)


def test_a_degree_that_is_a_variable_is_never_written_as_one(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    block = "parallelism_config: {{parallelism_config_tp_size: {}}}\n"
    path.write_text(FILES["accelerate-deepspeed"][1] + block.format(1))
    job = replace(read_job(path), gpus=8)
    assert deepspeed_words(job)["deepspeed_config.zero_stage"] == "3"
    unknown = {"parallelism_config.parallelism_config_tp_size": "$TP"}
    with pytest.raises(NotExpressible, match=r"tp_size: \$TP, which is no number"):
        deepspeed_words(replace(job, flags=dict(job.flags) | unknown))
