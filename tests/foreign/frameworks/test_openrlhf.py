"""Launch scripts of OpenRLHF, written by hand, in the names of options of each version."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.foreign.frameworks.openrlhf import OPENRLHF
from autopar.foreign.frameworks.registry import TARGETS
from autopar.foreign.job import Facts, Job
from autopar.foreign.target import NotExpressible, SourceFile
from autopar.foreign.writers.wording import differences
from autopar.ir.layout import Layout

SFT = """set -x
read -r -d '' training_commands <<EOF
openrlhf.cli.train_sft \\
   --data.max_len 4096 \\
   --train.batch_size 64 --train.micro_batch_size 2 \\
   --ds.zero_stage 2 --ds.param_dtype bf16 --ds.attn_implementation flash_attention_2 \\
   --model.gradient_checkpointing_enable --model.model_name_or_path a/b
EOF
if [[ ${1} != "slurm" ]]; then
    deepspeed --num_gpus 4 --module $training_commands
fi
"""
PPO = """ray job submit --address="http://127.0.0.1:8265" --runtime-env-json='{"working_dir": "/openrlhf"}' \\
   -- python3 -m openrlhf.cli.train_ppo_ray --ref_num_nodes 1 --ref_num_gpus_per_node 8 \\
   --actor_num_nodes 2 --actor_num_gpus_per_node 8 --vllm_num_engines 4 --vllm_tensor_parallel_size 2 \\
   --micro_train_batch_size 4 --train_batch_size 128 --micro_rollout_batch_size 8 --rollout_batch_size 1024 \\
   --prompt_max_len 1024 --generate_max_len 3072 --zero_stage 3 --bf16 --adam_offload \\
   --gradient_checkpointing --ring_attn_size 2 --pretrain a/b
"""


def read(text: str) -> Job:
    source = SourceFile(text, "train.sh")
    assert next(target.name for target in TARGETS.values() if target.reads(source)) == "openrlhf"
    return OPENRLHF.read(source)


def said(job: Job, kind: str = "note") -> str:
    return "; ".join(str(finding) for finding in job.findings if finding.kind == kind)


def test_supervised() -> None:
    job = read(SFT)
    assert job.layout == Layout(micro_batch=2, global_batch=64, zero=2, recompute="full")
    assert (job.seq, job.gpus, job.facts.precision) == (4096, 4, "bf16")
    assert not job.facts.dp_overlap and job.unpriced == () and said(job, "unknown") == ""


def test_the_actor_of_reinforcement_learning() -> None:
    job, by = read(PPO), read(PPO).layout
    assert (by.cp, by.micro_batch, by.global_batch, by.zero) == (2, 4, 128, 3)
    assert (by.recompute, by.offload, by.dp_on(16)) == ("full", "optimizer", 8)
    assert (job.gpus, job.gpus_per_node, job.seq, job.facts.precision) == (16, 8, 4096, "bf16")
    assert "update of the actor" in said(job) and job.unpriced == ()
    assert read(PPO.replace("--bf16", "")).facts.precision == "fp32"


def test_names_of_early_2026_and_programs_that_define_options() -> None:
    text = PPO.replace(
        "--bf16", "--param_dtype bf16 --use_dynamic_batch --train_max_tokens_per_gpu 16384"
    )
    job = read(text)
    assert (job.facts.precision, job.layout.micro_batch) == ("bf16", 2 * 16384 // 4096)
    text = 'parser.add_argument("--micro_train_batch_size", type=int, default=2)'
    assert not OPENRLHF.reads(SourceFile(text, "train_prm.py"))


@pytest.mark.parametrize("trainer", ["train_dpo", "train_rm"])
def test_samples_that_are_pairs(trainer: str) -> None:
    job = read(SFT.replace("train_sft", trainer))
    assert (job.layout.micro_batch, job.layout.global_batch) == (4, 128)
    assert "is a pair" in said(job)
    assert OPENRLHF.flags(replace(job, gpus=4))["train.batch_size"] == "64"


def test_micro_batches_of_tokens() -> None:
    more = "--train.dynamic_batch_enable --train.max_tokens_per_gpu 16384 --ds.packing_samples"
    job = read(SFT.replace("--model.gradient", f"{more} --model.gradient"))
    assert job.layout.micro_batch == 4 and "16384 tokens" in said(job)
    assert "packed" in said(job)
    job = read(SFT.replace("--train.micro_batch_size 2", ""))
    assert "the micro-batch does not stand" in said(job, "unknown")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (SFT, ("train.micro_batch_size", "ds.zero_stage", "model.gradient_checkpointing_enable")),
        (
            SFT.replace("model.gradient", "actor.gradient"),
            ("train.micro_batch_size", "ds.zero_stage", "actor.gradient_checkpointing_enable"),
        ),
        (PPO, ("micro_train_batch_size", "zero_stage", "gradient_checkpointing")),
    ],
)  # fmt: skip
def test_differences_in_their_own_options(text: str, names: tuple[str, ...]) -> None:
    job = replace(read(text), gpus=16)
    other = replace(job.layout, micro_batch=1, zero=1, recompute="none")
    told = differences(OPENRLHF, job, replace(job, layout=other, flags={}))
    expected = tuple(f"--{name}" for name in names)
    assert {difference.option for difference in told} - {"--overlap_comm"} == set(expected)


def test_what_is_refused() -> None:
    job = read(
        SFT.replace("--ds.param_dtype bf16", "--ds.param_dtype fp16 --ds.tensor_parallel_size 4")
    )
    found = OPENRLHF.refusals(job, 12)
    assert [finding.legal for finding in found] == [
        ("--train.batch_size 60", "--train.batch_size 66"),
        ("--ds.param_dtype bf16",),
    ]
    job = read(SFT.replace("train_sft", "train_dpo"))
    assert OPENRLHF.refusals(job, 12)[0].legal == ("--train.batch_size 48", "--train.batch_size 72")


@given(
    st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.integers(1, 4), st.integers(0, 3),
    st.booleans(), st.booleans(), st.integers(1, 4),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_what_is_written_is_read_back(
    dp: int, cp: int, micro: int, zero: int, again: bool, offload: bool, steps: int
) -> None:
    by = Layout(
        dp=dp, cp=cp, micro_batch=micro, global_batch=micro * steps * dp, zero=zero,
        recompute="full" if again else "none", offload="optimizer" if offload else "none",
    )  # fmt: skip
    job = Job(
        "openrlhf", layout=by, gpus=dp * cp, gpus_per_node=dp * cp, seq=4096, facts=Facts("bf16")
    )
    found = read(OPENRLHF.write(job).text)
    assert found.layout == replace(by, dp=None)
    assert (found.seq, found.gpus, found.unpriced, said(found, "unknown")) == (
        4096,
        dp * cp,
        (),
        "",
    )


def test_ring_attention_wants_packed_samples() -> None:
    text = SFT.replace("--ds.zero_stage 2", "--ds.zero_stage 2 --ds.ring_attn_size 2")
    (only,) = OPENRLHF.refusals(read(text), 4)
    assert "ring attention over cp=2 without packed samples" in only.what
    assert only.legal == ("--ds.packing_samples",)
    packed = text.replace("--ds.zero_stage", "--ds.packing_samples --ds.zero_stage")
    assert OPENRLHF.refusals(read(packed), 4) == []


@pytest.mark.parametrize(
    "lacking", [{"pp": 2, "schedule": "1f1b"}, {"offload": "parameters", "zero": 3}, {"ep": 2}]
)
def test_what_cannot_be_said(lacking: dict) -> None:
    with pytest.raises(NotExpressible, match="cannot say"):
        OPENRLHF.write(Job("openrlhf", layout=Layout(dp=2, **lacking), gpus=4))
