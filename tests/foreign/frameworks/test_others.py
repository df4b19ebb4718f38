"""Jobs of Accelerate, Transformers, torchtitan, DeepSpeed and nanotron: forms, refusals and round trips."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.effort import examples

from autopar.errors import AutoparError
from autopar.foreign.frameworks.accelerate import ACCELERATE
from autopar.foreign.frameworks.deepspeed import DEEPSPEED
from autopar.foreign.frameworks.nanotron import NANOTRON
from autopar.foreign.frameworks.registry import TARGETS, TORCHTITAN, read_job
from autopar.foreign.frameworks.torchtitan_options import split_layers
from autopar.foreign.frameworks.transformers import TRANSFORMERS
from autopar.foreign.job import Facts, Job
from autopar.foreign.target import NotExpressible, SourceFile, Target
from autopar.ir.layout import Layout
from autopar.ir.model_shape import ModelShape

SHAPE = ModelShape(32, 4096, 32, 8, 128, 14336, 128256, gated=True)


def read(target: Target, text: str, name: str) -> Job:
    source = SourceFile(text, name)
    assert next(known.name for known in TARGETS.values() if known.reads(source)) == target.name
    return target.read(source)


def kinds(job: Job, target: Target, gpus: int) -> list[str]:
    return [
        finding.theirs or finding.what
        for finding in target.refusals(replace(job, shape=SHAPE), gpus)
    ]


ACCELERATE_YAML = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_machines: 2
num_processes: 16
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: true
  fsdp_activation_checkpointing: true
  fsdp_offload_params: false
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
parallelism_config:
  parallelism_config_dp_replicate_size: 2
  parallelism_config_dp_shard_size: 4
  parallelism_config_tp_size: 2
"""


def test_accelerate() -> None:
    job = read(ACCELERATE, ACCELERATE_YAML, "config.yaml")
    assert job.layout == Layout(tp=2, dp=8, zero=3, copies=2, recompute="full")
    assert (job.gpus, job.gpus_per_node, job.facts.precision) == (16, 8, "bf16")
    assert job.unpriced == () and job.unknown == ("micro_batch", "accumulation")
    assert job.with_batches(2, 64).unknown == ()
    assert kinds(job, ACCELERATE, 16) == []
    assert "does not match num_processes (8)" in kinds(job, ACCELERATE, 8)[0]


@pytest.mark.parametrize("left_out", ["null", "None", "many"])
def test_accelerate_sizes_that_are_no_numbers(left_out: str) -> None:
    text = ACCELERATE_YAML.replace("replicate_size: 2", f"replicate_size: {left_out}")
    job = read(ACCELERATE, text, "config.yaml")
    assert job.layout.copies == 1
    assert kinds(job, ACCELERATE, job.layout.dp_on(16) * job.layout.tp) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            ("fsdp_version: 2", "fsdp_version: 1"),
            "only compatible DistributedType.FSDP (version 2)",
        ),
        (("mixed_precision", "mixed_precisoin"), "unknown keys"),
        (("distributed_type: FSDP", "distributed_type: MULTI_GPU"), ""),
    ],
)
def test_accelerate_refuses(change: tuple[str, str], expected: str) -> None:
    job = read(ACCELERATE, ACCELERATE_YAML.replace(*change), "config.yaml")
    assert not expected or any(expected in str(finding) for finding in job.findings)


def test_accelerate_with_other_engines() -> None:
    text = "distributed_type: DEEPSPEED\nnum_processes: 8\ndeepspeed_config: {zero_stage: 3, offload_optimizer_device: cpu}\n"
    assert read(ACCELERATE, text, "ds.yaml").layout == Layout(zero=3, offload="optimizer")
    text = "distributed_type: FSDP\nnum_processes: 8\nfsdp_config: {fsdp_sharding_strategy: SHARD_GRAD_OP}\n"
    assert read(ACCELERATE, text, "v1.yaml").layout.zero == 2
    text = "distributed_type: MEGATRON_LM\nnum_processes: 8\nmegatron_lm_config: {megatron_lm_tp_degree: 4, megatron_lm_pp_degree: 2}\n"
    assert read(ACCELERATE, text, "m.yaml").layout == Layout(tp=4, pp=2, schedule="1f1b")


def test_transformers() -> None:
    job = read(TRANSFORMERS, '{"tp_size": 4, "fsdp_size": 2, "dp_replicate_size": 2}', "d.json")
    assert job.layout == Layout(tp=4, dp=4, zero=3, copies=2)
    text = "from transformers import DistributedConfig\nopen('/tmp/never', 'w')\nc = DistributedConfig(tp_size=2, fsdp_size=N, pp_size=1)\n"
    job = read(TRANSFORMERS, text, "train.py")
    assert job.layout.tp == 2
    assert "fsdp_size is N, which cannot be determined" in str(job.findings[0])
    pipeline = read(TRANSFORMERS, '{"pp_size": 2, "fsdp_size": 2, "tp_size": 1}', "d.json")
    assert any(
        "Combining FSDP with pipeline" in words for words in kinds(pipeline, TRANSFORMERS, 4)
    )
    assert any(
        "`ep_size` must be a multiple" in w
        for w in kinds(
            read(TRANSFORMERS, '{"tp_size": 4, "fsdp_size": 3, "ep_size": 6}', "d.json"),
            TRANSFORMERS,
            12,
        )
    )


TOML = """
[job]
description = "Llama 3 70B"
[model]
name = "llama3"
flavor = "70B"
converters = ["float8"]
[training]
local_batch_size = 8
seq_len = 8192
dataset = "c4"
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 8  # 8-way TP
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "Interleaved1F1B"
pipeline_parallel_microbatch_size = 2
[activation_checkpoint]
mode = "selective"
selective_ac_option = "2"
[compile]
enable = true
"""


def test_torchtitan_toml() -> None:
    job = read(TORCHTITAN, TOML, "llama3_70b.toml")
    assert (job.shape.layers, job.shape.vocab, job.seq) == (80, 128256, 8192)
    by = job.layout
    assert (by.tp, by.pp, by.vpp, by.dp, by.micro_batch, by.zero, by.recompute) == (
        8,
        2,
        2,
        None,
        2,
        2,
        "every-2",
    )
    assert by.stages == (20, 21, 20, 19) and by.sequence_parallel
    assert job.facts.fp8 == "tensorwise" and job.facts.compile
    assert job.unpriced == ()


def test_torchtitan_flags_and_python() -> None:
    text = "NGPU=8 torchrun --nproc_per_node=8 --nnodes 2 -m torchtitan.train --module llama3 --config llama3_8b " \
           "--parallelism.tensor_parallel_degree 2 --parallelism.data_parallel_shard_degree=8 --training.max_context_length 8192 " \
           "--training.num_tokens_per_microbatch_per_dp_rank 16384"  # fmt: skip
    job = read(TORCHTITAN, text, "run.sh")
    assert (job.layout.tp, job.layout.dp, job.layout.micro_batch, job.seq, job.gpus) == (
        2,
        8,
        2,
        8192,
        16,
    )
    assert job.shape.layers == 32
    code = """
import os
os.system("touch never")
def llama3_70b():
    return Trainer.Config(
        model_spec=model_registry("70B"),
        training=TrainingConfig(num_tokens_per_microbatch_per_dp_rank=2 * 8192, max_context_length=8192),
        parallelism=ParallelismConfig(tensor_parallel_degree=8, data_parallel_shard_degree=-1),
        activation_checkpoint=FullAC.Config(),
    )
"""
    job = read(TORCHTITAN, code, "config_registry.py")
    assert (job.layout.tp, job.layout.micro_batch, job.layout.recompute, job.shape.layers) == (
        8,
        2,
        "full",
        80,
    )


@pytest.mark.parametrize(
    ("flags", "theirs"),
    [
        (
            "--parallelism.tensor_parallel_degree 3 --parallelism.data_parallel_shard_degree 2",
            "Invalid parallel dims",
        ),
        (
            "--parallelism.tensor_parallel_degree 2 --training.seq_len 4097",
            "seq_len must be divisible",
        ),
        ("--parallelism.tensor_parallel_degree 16", "n_heads must be divisible"),
        (
            "--training.global_batch_size 12 --training.local_batch_size 8",
            "global batch size must be multiple",
        ),
        ("--parallelism.expert_parallel_degree 5", "expert_parallel_degree must divide"),
    ],
)
def test_torchtitan_refuses(flags: str, theirs: str) -> None:
    job = TORCHTITAN.read(SourceFile(f"torchrun -m torchtitan.train {flags}", "run.sh"))
    assert any(theirs in words for words in kinds(job, TORCHTITAN, 16))


@given(st.integers(2, 60), st.integers(2, 8), st.integers(0, 2), st.integers(0, 2))
def test_split_layers_keeps_all(layers: int, stages: int, first: int, last: int) -> None:
    sizes = split_layers(layers, stages, first, last)
    assert not sizes or (sum(sizes) == layers and len(sizes) == stages)


def test_deepspeed() -> None:
    text = """{
  // comments are allowed by users
  "train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4,
  "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "overlap_comm": true,},
  "bf16": {"enabled": true}
}"""
    job = read(DEEPSPEED, text, "ds_config.json")
    assert job.layout == Layout(micro_batch=2, global_batch=64, zero=3, offload="parameters")
    assert job.facts.precision == "bf16" and job.facts.dp_overlap
    assert kinds(job, DEEPSPEED, 8) == []
    assert "train_batch_size is not equal" in kinds(job, DEEPSPEED, 16)[0]
    auto = read(
        DEEPSPEED, '{"train_batch_size": "auto", "zero_optimization": {"stage": 2}}', "ds.json"
    )
    assert "train_batch_size are auto" in str(auto.findings[0])


NANO = """
general: {project: x, run: y}
model:
  dtype: bfloat16
  model_config: {num_hidden_layers: 16, hidden_size: 2048, num_attention_heads: 16, num_key_value_heads: 16, intermediate_size: 8192,
                 vocab_size: 32000, tie_word_embeddings: true, num_experts: 8, num_experts_per_tok: 2}
optimizer: {zero_stage: 1, accumulate_grad_in_fp32: true}
parallelism: {dp: 2, expert_parallel_size: 4, pp: 2, tp: 2, pp_engine: 1f1b, tp_mode: REDUCE_SCATTER}
tokens: {batch_accumulation_per_replica: 4, micro_batch_size: 2, sequence_length: 2048}
"""


def test_nanotron_whose_experts_multiply_the_devices() -> None:
    job = read(NANOTRON, NANO, "config.yaml")
    assert job.gpus == 2 * 4 * 2 * 2
    assert (job.layout.dp, job.layout.ep, job.layout.global_batch) == (8, 4, 64)
    assert "multiplies the devices" in str(job.findings[0])
    assert job.layout.sequence_parallel and job.layout.schedule == "1f1b" and job.shape.tied
    assert kinds(job, NANOTRON, 32) == []
    assert "world_size must be equal" in kinds(job, NANOTRON, 8)[0]


@st.composite
def layouts(draw: st.DrawFn) -> Job:
    """Jobs without a pipeline, of which each target can say some."""
    tp, cp, dp = (draw(st.sampled_from([1, 2, 4])) for _ in range(3))
    zero = draw(st.sampled_from([0, 1, 2, 3])) if dp * cp > 1 else 0
    pp = draw(st.sampled_from([1, 2]))
    layout = Layout(
        tp=tp,
        pp=pp,
        cp=cp,
        dp=dp,
        micro_batch=2,
        global_batch=16 * dp,
        zero=zero,
        copies=2 if zero > 1 and dp > 2 and draw(st.booleans()) else 1,
        recompute=draw(st.sampled_from(["none", "full", "op", "selective"])),
        schedule="1f1b" if pp > 1 else "none",
        sequence_parallel=tp > 1 and draw(st.booleans()),
        offload=draw(st.sampled_from(["none", "parameters"])) if zero == 3 else "none",
    )
    return Job("", SHAPE, layout, tp * pp * cp * dp, 1, 4096, Facts("bf16"))


_KNOWN = {  # what a file of a target says of a layout; the rest stands in the training script
    "accelerate": ("tp", "cp", "dp", "zero", "copies", "recompute", "offload"),
    "transformers": ("tp", "pp", "dp", "zero", "copies", "offload"),
    "torchtitan": (
        "tp",
        "pp",
        "cp",
        "dp",
        "zero",
        "copies",
        "recompute",
        "offload",
        "micro_batch",
        "global_batch",
        "sequence_parallel",
        "schedule",
    ),
    "deepspeed": ("tp", "cp", "zero", "offload", "micro_batch", "global_batch"),
    "nanotron": (
        "tp",
        "pp",
        "cp",
        "dp",
        "zero",
        "recompute",
        "micro_batch",
        "global_batch",
        "sequence_parallel",
        "schedule",
    ),
}


@pytest.mark.parametrize("name", _KNOWN)
@given(job=layouts())
@settings(max_examples=examples(40, 200), deadline=None)
def test_what_is_written_is_read_back(name: str, job: Job) -> None:
    target = TARGETS[name]
    job = replace(job, framework=name)
    try:
        written = target.write(job)
    except NotExpressible as error:
        assert "the nearest" in str(error) or "code there" in str(error) or "without" in str(error)
        return
    again = read(target, written.text, written.name)
    if name == "accelerate" and job.layout.zero == 0 and job.layout.tp * job.layout.cp == 1:
        again = replace(
            again, layout=replace(again.layout, dp=job.layout.dp)
        )  # copies alone have no sizes there
    for field in _KNOWN[name]:
        assert getattr(again.layout, field) == getattr(job.layout, field), field
    assert again.unpriced == ()
    kinds = ("refused",) if name in _OVER_OTHERS else ("refused", "unknown")
    assert set(again.unknown) <= set(_OVER_OTHERS.get(name, ()))
    assert not [finding for finding in again.findings if finding.kind in kinds]


_OVER_OTHERS = {
    "accelerate": ("micro_batch", "accumulation", "dp"),
    "transformers": ("micro_batch", "accumulation"),
    "torchtitan": ("compile",),
}
"""What a written file leaves to another one: the training script, or the configuration it names."""


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
def test_files_that_are_no_jobs(target: Target, tmp_path) -> None:
    for name, text in (
        ("a.yaml", "a: 1\n"),
        ("a.json", "{}"),
        ("a.sh", "echo 1"),
        ("a.py", "x = 1"),
        ("a.toml", "x = 1"),
    ):
        path = tmp_path / name
        path.write_text(text)
        with pytest.raises(AutoparError):
            read_job(path, target.name)


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 10**20), st.floats(), st.sampled_from(["auto", "", "cpu", "$X", "8", "1e3", "0", "none"]),
    st.lists(st.integers(0, 9), max_size=3), st.dictionaries(st.sampled_from(["a", "stage"]), st.integers(), max_size=2),
)  # fmt: skip
NAMES = {
    "accelerate": "distributed_type num_processes num_machines fsdp_config parallelism_config deepspeed_config mixed_precision",
    "transformers": "tp_size fsdp_size pp_size dp_replicate_size ep_size fsdp_cpu_offload",
    "deepspeed": "train_batch_size train_micro_batch_size_per_gpu zero_optimization gradient_accumulation_steps bf16 optimizer",
    "nanotron": "parallelism tokens model optimizer",
    "megatron": "num_layers hidden_size num_attention_heads tensor_model_parallel_size pipeline_model_parallel_size micro_batch_size "
    "global_batch_size num_experts moe_layer_freq pipeline_model_parallel_layout recompute_granularity recompute_num_layers kv_channels "
    "swiglu virtual_pipeline_model_parallel_size account_for_loss_in_pipeline_split fp8 fp8_recipe optimizer_offload_fraction vocab_size",
}


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=examples(40, 150), deadline=None)
def test_odd_values_are_findings_or_errors(name: str, data: st.DataObject) -> None:
    values = data.draw(st.dictionaries(st.sampled_from(NAMES[name].split()), VALUES, max_size=9))
    try:
        job = TARGETS[name].read(SourceFile(json.dumps(values), "file.json"))
        assert isinstance(TARGETS[name].refusals(job, 8), list)
    except AutoparError as error:
        assert str(error)


def test_a_script_that_writes_a_configuration_is_a_script() -> None:
    text = """#!/bin/bash
cat <<EOT > ds_config.json
{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0}}
EOT
cat <<EOT > accelerate.yaml
distributed_type: FSDP
EOT
torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py --num-layers 4 --hidden-size 64 --tensor-model-parallel-size 2
"""
    source = SourceFile(text, "train.sh")
    assert [known.name for known in TARGETS.values() if known.reads(source)] == ["megatron"]
