"""Launch scripts of verl with FSDP, written by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import AutoparError
from autopar.foreign.frameworks.registry import TARGETS, read_job
from autopar.foreign.frameworks.verl import VERL
from autopar.foreign.job import Job
from autopar.foreign.target import NotExpressible, SourceFile
from autopar.foreign.writers.wording import differences
from autopar.ir.layout import Layout
from autopar.ir.model_shape import ModelShape

PPO = """set -x
NNODES=2
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=1024 \\
    data.max_prompt_length=1024 data.max_response_length=3072 actor_rollout_ref.model.path=$HOME/models/a \\
    actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \\
    actor_rollout_ref.model.enable_gradient_checkpointing=True actor_rollout_ref.model.use_remove_padding=True \\
    actor_rollout_ref.actor.fsdp_config.param_offload=False actor_rollout_ref.actor.ulysses_sequence_parallel_size=2 \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 actor_rollout_ref.rollout.n=5 \\
    actor_rollout_ref.ref.fsdp_config.param_offload=True trainer.n_gpus_per_node=8 trainer.nnodes=$NNODES $@
"""
SFT = """torchrun --standalone --nnodes=1 --nproc_per_node=4 -m verl.trainer.fsdp_sft_trainer data.train_batch_size=64 \\
    data.micro_batch_size_per_gpu=2 data.max_length=2048 model.partial_pretrain=a/b \\
    model.enable_gradient_checkpointing=False ulysses_sequence_parallel_size=2 use_remove_padding=true
"""


def read(text: str) -> Job:
    source = SourceFile(text, "train.sh")
    assert next(target.name for target in TARGETS.values() if target.reads(source)) == "verl"
    return VERL.read(source)


def said(job: Job, kind: str = "note") -> str:
    return "; ".join(str(finding) for finding in job.findings if finding.kind == kind)


def test_the_update_of_the_actor() -> None:
    job, by = read(PPO), read(PPO).layout
    assert (by.tp, by.cp, by.micro_batch, by.global_batch, by.zero) == (1, 2, 4, 64 * 5, 3)
    assert (by.recompute, by.offload, by.copies, by.dp_on(16)) == ("full", "none", 1, 8)
    assert (job.gpus, job.gpus_per_node, job.seq) == (16, 8, 4096)
    assert job.unpriced == () and said(job, "unknown") == ""
    assert "$HOME/models/a" in said(job) and "update of the actor" in said(job)


def test_supervised() -> None:
    job = read(SFT)
    assert job.layout == Layout(cp=2, micro_batch=2, global_batch=64, zero=3)
    assert (job.gpus, job.seq, job.unpriced) == (4, 2048, ())


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("fsdp_config.fsdp_size=8", {"copies": 2}),
        ("fsdp_config.fsdp_size=1", {"zero": 0, "copies": 1}),
        ("fsdp_config.fsdp_size=-1", {"zero": 3, "copies": 1}),
        ("fsdp_config.reshard_after_forward=False", {"zero": 3}),  # FSDP 1 has no such option
        ("strategy=fsdp2 actor_rollout_ref.actor.fsdp_config.reshard_after_forward=False", {"zero": 2}),
        ("fsdp_config.offload_policy=True", {"offload": "parameters"}),
        ("fsdp_config.param_offload=True", {"offload": "none"}),
        ("use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192", {"micro_batch": 4}),
    ],
)  # fmt: skip
def test_options_of_the_actor(more: str, expected: dict) -> None:
    job = read(PPO.replace("$@", f"actor_rollout_ref.actor.{more}"))
    assert {name: getattr(job.layout, name) for name in expected} == expected


def test_a_micro_batch_of_all_ranks_in_earlier_versions() -> None:
    text = PPO.replace("ppo_micro_batch_size_per_gpu=4", "ppo_micro_batch_size=64")
    assert read(text).layout.micro_batch == 64 * 2 // 16


def test_a_branch_with_megatron_that_is_not_taken() -> None:
    branch = "backend=fsdp  # or megatron\nMORE=''\nif [ $backend = megatron ]; then MORE='actor_rollout_ref.actor.strategy=megatron'; fi\n"
    assert read(branch + PPO.replace("$@", "$MORE")).layout.micro_batch == 4


def test_with_megatron_it_is_read_as_that() -> None:
    strategy = PPO.replace("$@", "actor_rollout_ref.actor.strategy=megatron")
    assert not VERL.reads(SourceFile(strategy, "train.sh"))
    assert not VERL.reads(SourceFile("config.actor_rollout_ref.actor.strategy", "main.py"))
    text = PPO.replace("$@", "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2")
    assert not VERL.reads(SourceFile(text, "train.sh"))


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (PPO, ("ppo_micro_batch_size_per_gpu", "ulysses_sequence_parallel_size", "model.enable_gradient_checkpointing")),
        (SFT, ("data.micro_batch_size_per_gpu", "ulysses_sequence_parallel_size", "model.enable_gradient_checkpointing")),
    ],
)  # fmt: skip
def test_differences_in_their_own_options(text: str, names: tuple[str, ...]) -> None:
    job = replace(read(text), gpus=16)
    again = "none" if job.layout.recompute == "full" else "full"
    other = replace(job.layout, micro_batch=1, cp=1, recompute=again)
    told = differences(VERL, job, replace(job, layout=other, flags={}))
    assert len(told) == len(names)
    assert all(any(d.option.endswith(name) for d in told) for name in names)


def test_a_whole_configuration_and_a_part_of_one(tmp_path) -> None:
    text = """data: {max_prompt_length: 512, max_response_length: 512, train_batch_size: 64}
actor_rollout_ref:
  model: {path: a/b, enable_gradient_checkpointing: true, lora_rank: 0}
  actor: {strategy: fsdp, ppo_mini_batch_size: 32, ppo_micro_batch_size: null, ppo_micro_batch_size_per_gpu: 2,
          fsdp_config: {fsdp_size: -1}, ulysses_sequence_parallel_size: 1}
  rollout: {n: 2, tensor_model_parallel_size: 2}
trainer: {nnodes: 1, n_gpus_per_node: 8}
"""
    source = SourceFile(text, "trainer.yaml")
    assert VERL.reads(source)
    job = VERL.read(source)
    assert job.layout == Layout(micro_batch=2, global_batch=64, zero=3, recompute="full")
    assert (job.gpus, job.seq, job.unpriced) == (8, 1024, ())
    part = tmp_path / "rollout.yaml"
    part.write_text(
        "_target_: verl.workers.config.RolloutConfig\ntensor_model_parallel_size: 2\nnum_layers: 2\nhidden_size: 2\n"
    )
    with pytest.raises(AutoparError, match="part of verl's own configuration"):
        read_job(part)


def test_what_is_refused() -> None:
    job = replace(read(PPO.replace("ppo_mini_batch_size=64", "ppo_mini_batch_size=66")), gpus=16)
    legal = VERL.refusals(job, 16)[0].legal
    assert legal == ("actor_rollout_ref.actor.ppo_mini_batch_size=64",)
    assert VERL.refusals(replace(job, layout=Layout(cp=3)), 16)[0].what.startswith("sp=3 does not")
    odd = replace(job, layout=Layout(cp=4, global_batch=4), shape=ModelShape(heads=6))
    assert "6 attention heads" in VERL.refusals(odd, 16)[0].what


@given(
    st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.integers(1, 4), st.booleans(),
    st.booleans(), st.booleans(), st.integers(1, 4),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_what_is_written_is_read_back(
    dp: int, cp: int, micro: int, kept: bool, again: bool, offload: bool, steps: int
) -> None:
    zero = 0 if dp * cp == 1 else 2 if kept else 3
    by = Layout(
        dp=dp, cp=cp, micro_batch=micro, global_batch=micro * steps * dp, zero=zero,
        copies=2 if dp * cp > 4 and zero else 1, recompute="full" if again else "none",
        offload="parameters" if offload else "none",
    )  # fmt: skip
    job = Job("verl", layout=by, gpus=dp * cp, gpus_per_node=min(8, dp * cp))
    found = read(VERL.write(job).text)
    assert replace(found.layout, zero=zero) == replace(by, dp=None)
    assert found.layout.zero == zero or dp * cp == 1
    assert (found.gpus, found.unpriced, said(found, "unknown")) == (dp * cp, (), "")


@pytest.mark.parametrize("lacking", [{"tp": 2}, {"zero": 1}, {"offload": "optimizer", "zero": 3}])
def test_what_cannot_be_said(lacking: dict) -> None:
    with pytest.raises(NotExpressible, match="cannot say"):
        VERL.write(Job("verl", layout=Layout(dp=2, **lacking), gpus=4))
