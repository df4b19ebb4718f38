"""A small job in each form that public repositories have, written by hand."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from autopar.errors import AutoparError
from autopar.foreign.checking.pricing import job_setting
from autopar.foreign.frameworks.registry import read_job
from autopar.foreign.job import Job
from autopar.ir.cluster import ClusterSpec

MODEL = "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --max-position-embeddings 1024 "


def job_of(tmp_path: Path, name: str, text: str, **beside: str) -> Job:
    """The job of a file with others beside it; in their names, `__` stands for a dot."""
    for other, content in beside.items():
        (tmp_path / other.replace("__", ".")).write_text(content)
    file, _, function = name.partition(":")
    (tmp_path / file).write_text(text)
    return read_job(str(tmp_path / file) + (f":{function}" if function else ""))


def said(job: Job, *kinds: str) -> str:
    """The findings of some kinds, as one text."""
    return "; ".join(str(finding) for finding in job.findings if finding.kind in kinds)


def test_megatron_deepspeed(tmp_path) -> None:
    text = f"""#!/bin/bash
#SBATCH --nodes=4
#SBATCH --gres=gpu:4
ARGS="{MODEL} --fp16 --checkpoint-activations --num-key-value-heads 4 --position-embedding-type alibi --pad-vocab-size-to 50304
    --micro-batch-size 2 --global-batch-size 64 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2
    --pp-partition-method type:transformer|embedding"
DS="--deepspeed --deepspeed_config ds.json --zero-stage 1 --deepspeed-activation-checkpointing"
export LAUNCHER="python -u -m torch.distributed.launch --nproc_per_node 4 --nnodes 4"
export CMD="`pwd`/pretrain_gpt.py $ARGS $DS"
echo $CMD 2>&1
srun bash -c '$LAUNCHER --node_rank $SLURM_PROCID $CMD' 2>&1 | tee log.txt
"""
    job = job_of(tmp_path, "train.slurm", text)
    by = job.layout
    assert (by.tp, by.pp, by.zero, by.recompute, by.micro_batch, by.global_batch) == (2, 2, 1, "full", 2, 64)  # fmt: skip
    assert (job.gpus, job.gpus_per_node) == (16, 4)
    assert (job.shape.kv_heads, job.shape.vocab, job.shape.positions) == (4, 50304, "alibi")
    assert job.unpriced == () and said(job, "unknown", "refused") == ""


def test_a_file_of_deepspeed_that_the_script_writes(tmp_path) -> None:
    script = f"""ZERO=2
CONFIG=$OUT/ds.json
cat <<EOT > $CONFIG
{{
  "train_micro_batch_size_per_gpu": 2, "zero_optimization": {{"stage": $ZERO}}, "bf16": {{"enabled": true}}
}}
EOT
deepspeed pretrain_gpt.py {MODEL} --micro-batch-size 2 --global-batch-size 64 --bf16 --deepspeed --deepspeed_config """
    job = job_of(tmp_path, "a.sh", f"OUT=out\n{script}$CONFIG")
    assert job.layout.zero == 2 and said(job, "unknown", "contradiction") == ""
    job = job_of(tmp_path, "b.sh", f"OUT=out\n{script}$CONFIG --zero-stage 1 --micro-batch-size 4")
    assert job.layout.zero == 2 and "the file counts" in said(job, "contradiction")
    assert "--micro-batch-size is 4" in said(job, "contradiction")
    job = job_of(tmp_path, "c.sh", f"OUT=out\n{script}other.json")
    assert "the stage of ZeRO stands in other.json" in said(job, "unknown")
    job = job_of(tmp_path, "d.sh", f"OUT=out\n{script.replace('$ZERO', '$1')}$CONFIG")
    assert "zero_stage is $1" in said(job, "unknown")
    trainer = "torchrun train.py --per_device_train_batch_size 2 --deepspeed ds.json"
    text = f'tee ds.json <<\'EOF\'\n{{"zero_optimization": {{"stage": 3}}}}\nEOF\n{trainer}'
    assert job_of(tmp_path, "e.sh", text).layout.zero == 3


def test_a_file_that_sed_writes_from_a_template(tmp_path) -> None:
    template = (
        '{"train_micro_batch_size_per_gpu": MBSIZE, "zero_optimization": {"stage": ZERO_STAGE}}'
    )
    script = f"""template=ds_TEMPLATE.json
config=ds_$RUN.json
sed "s/MBSIZE/4/" $template \\
    | sed "s/ZERO_STAGE/2/" > $config
options="--deepspeed --deepspeed_config $config --num-experts 1"
run="deepspeed --num_gpus 4 pretrain_gpt.py {MODEL} --micro-batch-size 4 $options &> log/$(($(a --b=c | wc -l)-2))_$(hostname).log"
eval ${{run}}
"""
    job = job_of(tmp_path, "a.sh", f"RUN=x\n{script}", ds_TEMPLATE__json=template)
    assert (job.layout.zero, job.gpus, job.shape.experts) == (2, 4, 0)
    assert said(job, "unknown", "contradiction") == "" and job.unpriced == ()
    other = script.replace("s/MBSIZE/4/", "s/[A-Z]*/4/")
    job = job_of(tmp_path, "b.sh", f"RUN=x\n{other}", ds_TEMPLATE__json=template)
    assert "the stage of ZeRO stands in ds_x.json" in said(job, "unknown")


@pytest.mark.parametrize(
    "config",
    ['{"offload_optimizer": {"device": "cpu"}}', '{"offload_param": {"device": "cpu"}}', "{}"],
)
def test_what_the_file_of_deepspeed_offloads(config: str, tmp_path) -> None:
    text = f"deepspeed pretrain_gpt.py {MODEL} --deepspeed --deepspeed_config ds.json"
    ds = f'{{"zero_optimization": {config}}}'
    offload = job_of(tmp_path, "a.sh", text, ds__json=ds).layout.offload
    assert offload == {"o": "optimizer", "p": "parameters"}.get(
        config.partition("_")[2][:1], "none"
    )
    assert job_of(tmp_path, "b.sh", f"{text[:-30]} --cpu-optimizer").layout.offload == "optimizer"


@pytest.mark.parametrize(
    "program",
    [
        "tools/analyze_data.py --analyzing-task map",
        "tasks/main.py --task RETRIEVER-EVAL",
        "evaluate_hf.py",
        "hf2mcore_qwen.py",
        "tasks/main.py --task LAMBADA",
    ],
)
def test_more_programs_that_do_not_train(program: str, tmp_path) -> None:
    with pytest.raises(AutoparError, match="does not train"):
        job_of(tmp_path, "a.sh", f"torchrun {program} {MODEL}")


@pytest.mark.parametrize(
    ("options", "dense", "bits", "top_k"),
    [
        ("--expert-model-parallel-size 4", 0, "", 2),
        ("--moe-layer-freq 1", 0, "", 2),
        ("--moe-layer-freq 5", 0, "10000", 2),  # layers 0, 5 and 10 of 12 have experts
        ("--moe-layer-freq '([0]*3+[1]*9)'", 3, "", 2),
        ("--moe-layer-freq '([0,1]*6)' --moe-router-topk 4", 0, "01", 4),
        ("--moe-layer-freq '([1]*11+[0])'", 0, "111111111110", 2),
        ("--moe-layer-freq '([0]*12)'", 0, "0", 2),
        ("--moe-layer-freq 99", 0, "100000000000", 2),
        ("--moe-expert-parallel-size 4", 0, "01", 1),
        ("--moe-expert-parallel-size 4 --expert-interval 1 --topk 2", 0, "", 2),
    ],
)
def test_layers_without_experts(options: str, dense: int, bits: str, top_k: int, tmp_path) -> None:
    job = job_of(tmp_path, "a.sh", f"torchrun pretrain_gpt.py {MODEL} --num-experts 8 {options}")
    shape = job.shape
    assert (shape.first_dense, shape.expert_layers, shape.top_k) == (dense, bits, top_k)
    assert job.unpriced == () and said(job, "refused") == ""


@pytest.mark.parametrize("text", ["'([0,1]*5)'", "'([1]*9999+[0]*9999)'"])
def test_lists_of_layers_of_another_length(text: str, tmp_path) -> None:
    options = f"--num-experts 8 --moe-layer-freq {text}"
    job = job_of(tmp_path, "a.sh", f"torchrun pretrain_gpt.py {MODEL} {options}")
    assert "moe_layer_freq" in said(job, "refused")


def test_what_runs_only_if_a_test_fails(tmp_path) -> None:
    text = "[[ -f $IMAGE ]] || { echo missing; exit 1; }\n[[ a == b ]] || { TP=2; }\n[[ a == a ]] || { TP=8; }\n"
    text += f"torchrun pretrain_gpt.py {MODEL} --fp16 --tensor-model-parallel-size $TP"
    job = job_of(tmp_path, "a.sh", text)
    assert (job.facts.precision, job.layout.tp) == ("fp16", 2)


def test_performance_recipes_of_megatron_bridge(tmp_path) -> None:
    text = """worker=$(cat <<- EOM
  python scripts/performance/run_script.py --gpu h100 --model_family_name llama --model_recipe_name llama3_70b --num_gpus 64 \\
    --gpus_per_node 8 --compute_dtype fp8_cs --global_batch_size 256 --micro_batch_size 2 --seq_length 8192 \\
    --tensor_model_parallel_size 4 --pipeline_model_parallel_size 8 --virtual_pipeline_model_parallel_size 5 \\
    --use_megatron_fsdp False --max_steps 50 logger.log_throughput=True ddp.grad_reduce_in_fp32=false
EOM
)
echo "$worker" > worker.sh
torchrun --nproc-per-node=8 --nnodes=8 --no-python bash worker.sh
"""
    job, by = job_of(tmp_path, "a.sh", text), job_of(tmp_path, "a.sh", text).layout
    assert (job.framework, job.gpus, job.gpus_per_node, job.seq) == ("bridge", 64, 8, 8192)
    assert (by.tp, by.pp, by.vpp, by.micro_batch, by.zero, by.sequence_parallel) == (4, 8, 5, 2, 1, True)  # fmt: skip
    assert (job.facts.precision, job.facts.fp8, job.facts.grads) == ("bf16", "tensorwise", "bf16")
    assert job.unpriced == () and "the recipe llama3_70b" in said(job, "unknown")
    short = (
        "python setup_experiment.py -g h100 -mr llama3_8b -ng 16 -gn 8 -c bf16 -tp 2 -gb 64 -mb 1"
    )
    job = job_of(tmp_path, "b.sh", short)
    assert (job.gpus, job.layout.tp, job.layout.global_batch) == (16, 2, 64)


def test_a_script_that_is_written_and_run(tmp_path) -> None:
    text = f"""TP=4
worker=$(cat <<- EOM
  nice -10 python pretrain_gpt.py {MODEL} --bf16 \\
    --tensor-model-parallel-size $TP --train-iters \\$STEPS

EOM
)
echo "$worker" > worker.sh
chmod 777 worker.sh
torchrun --nproc-per-node=8 --nnodes=2 --no-python bash worker.sh
"""
    job = job_of(tmp_path, "a.sh", text)
    assert (job.layout.tp, job.facts.precision, job.gpus) == (4, "bf16", 16)
    assert job_of(tmp_path, "b.sh", text.replace("EOM\n", "'EOM'\n", 1)).layout.tp == 4


def test_a_here_document_that_a_variable_holds(tmp_path) -> None:
    text = f"TP=4\nread -r -d '' CMD <<EOF\npretrain_gpt.py {MODEL} \\\n  --tensor-model-parallel-size $TP\nEOF\n"
    assert job_of(tmp_path, "a.sh", f"{text}torchrun $CMD").layout.tp == 4


def test_embedding_and_loss_count_as_layers(tmp_path) -> None:
    model = MODEL.replace("12 --hidden", "14 --hidden")
    text = f"torchrun pretrain_gpt.py {model} --pipeline-model-parallel-size 4 --pp-partition-method 'type:transformer|embedding'"
    assert job_of(tmp_path, "train.sh", text).layout.stages == (3, 4, 4, 3)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--activations-checkpoint-method uniform", "full"),
        ("--checkpoint-activations", "full"),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 0", "none"),
        ("--recompute-granularity selective", "selective"),
    ],
)
def test_recomputation_in_earlier_words(tmp_path, options: str, expected: str) -> None:
    job = job_of(tmp_path, "train.sh", f"torchrun pretrain_gpt.py {MODEL} {options}")
    assert job.layout.recompute == expected


def test_placeholders_and_options_behind_them(tmp_path) -> None:
    text = f"""options="{MODEL} --save <PATH TO CHECKPOINTS> --tensorboard-dir <TENSORBOARD DIRECTORY> --bf16"
srun sh -c "python -u pretrain_gpt.py ${{options}}"
"""
    assert job_of(tmp_path, "train.sh", text).facts.precision == "bf16"


def test_files_that_a_script_reads_from_its_own_folder(tmp_path) -> None:
    text = "TP=4\nDIR=$(cd $(dirname $0) && pwd)\n. $DIR/common.sh\nexit 0\n"
    common = f'ARGS="{MODEL} --tensor-model-parallel-size $TP"\ntorchrun pretrain_gpt.py $ARGS\n'
    assert job_of(tmp_path, "run.sh", text, common__sh=common).layout.tp == 4


def test_a_value_that_may_hold_options(tmp_path) -> None:
    text = f"torchrun pretrain_gpt.py {MODEL} --tokenizer-type GPT2BPETokenizer $EXTRA_ARGS"
    assert "$EXTRA_ARGS" in said(job_of(tmp_path, "run.sh", text), "unknown")


def test_a_comment_does_not_contradict_what_is_not_known(tmp_path) -> None:
    text = f"# run.sh with TP=2\ntorchrun pretrain_gpt.py {MODEL} --tensor-model-parallel-size $1"
    assert said(job_of(tmp_path, "run.sh", text), "contradiction") == ""


def test_ms_swift(tmp_path) -> None:
    text = """NPROC_PER_NODE=8 megatron sft --model Qwen/Qwen3-8B --tensor_model_parallel_size 2 --pipeline_model_parallel_size 2 \\
    --decoder_last_pipeline_num_layers 13 --micro_batch_size 1 --global_batch_size 16 --max_length 8192 --packing true
"""
    job = job_of(tmp_path, "sft.sh", text)
    assert (job.layout.zero, job.facts.precision, job.seq, job.gpus_per_node) == (
        1,
        "bf16",
        8192,
        8,
    )
    assert job.layout.stages == ()  # the file does not say the layers
    model = "llama:layers=27,hidden=64,heads=4,ffn=128,vocab=256,seq=8192"
    setting = job_setting(job, ClusterSpec.parse("h100:8"), model)
    assert setting.job.layout.stages == (14, 13)


def test_verl(tmp_path) -> None:
    text = """python3 -m verl.trainer.main_ppo data.max_prompt_length=512 data.max_response_length=512 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 \\
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4 actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2 \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=8 actor_rollout_ref.rollout.n=5 trainer.n_gpus_per_node=8 trainer.nnodes=2 $@
"""
    job = job_of(tmp_path, "grpo.sh", text)
    by = job.layout
    assert (by.tp, by.pp, by.micro_batch, by.global_batch) == (4, 2, 2, 320)
    assert (job.seq, job.gpus, job.facts.precision) == (1024, 16, "bf16")


def test_defaults_of_verl_with_megatron(tmp_path) -> None:
    text = "python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer.yaml data.train_batch_size=256 " \
           "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 " \
           "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2"  # fmt: skip
    for more, zero, sharded in (
        ("", 1, True),
        (" actor_rollout_ref.actor.megatron.use_distributed_optimizer=False", 0, True),
        (" actor_rollout_ref.actor.megatron.sequence_parallel=False", 1, False),
    ):
        (tmp_path / "run.sh").write_text(text + more)
        by = read_job(tmp_path / "run.sh").layout
        assert (by.tp, by.zero, by.sequence_parallel) == (2, zero, sharded)
        assert (by.micro_batch, by.global_batch) == (2, 256)


def test_verl_as_yaml(tmp_path) -> None:
    text = """
data: {max_prompt_length: 512, max_response_length: 512}
actor_rollout_ref:
  actor:
    ppo_mini_batch_size: 256
    ppo_micro_batch_size_per_gpu: 4
    megatron: {tensor_model_parallel_size: 1, pipeline_model_parallel_size: 2, param_offload: true}
  rollout: {tensor_model_parallel_size: 2, n: 5}
critic: {megatron: {tensor_model_parallel_size: 8}}
trainer: {n_gpus_per_node: 8, nnodes: 1}
"""
    job = job_of(tmp_path, "ppo.yaml", text)
    by = job.layout
    assert (by.tp, by.pp, by.micro_batch, by.global_batch, job.seq) == (1, 2, 4, 1280, 1024)
    assert job.unpriced == () and said(job, "contradiction", "unknown") == ""


def test_nemo_yaml(tmp_path) -> None:
    text = """
trainer: {devices: 8, num_nodes: 2, precision: bf16-mixed, max_steps: 100}
exp_manager: {name: x}
model:
  mcore_gpt: true
  micro_batch_size: 1
  global_batch_size: 32
  tensor_model_parallel_size: 2
  pipeline_model_parallel_size: 1
  encoder_seq_length: 2048
  num_layers: 4
  hidden_size: 256
  num_attention_heads: ${.num_layers}
  ffn_hidden_size: 512
  activation: fast-swiglu
  activations_checkpoint_granularity: full
  activations_checkpoint_method: uniform
  activations_checkpoint_num_layers: 1
  fp8: false
  data: {seq_length: "${model.encoder_seq_length}", num_workers: 2}
  optim: {name: distributed_fused_adam, lr: 1.0e-4}
"""
    job = job_of(tmp_path, "gpt.yaml", text)
    by = job.layout
    assert (by.tp, by.zero, by.recompute, job.seq, job.gpus) == (2, 1, "full", 2048, 16)
    assert (job.facts.precision, job.facts.fp8, job.shape.gated) == ("bf16", "", True)
    assert job.shape.heads == 4 and job.unpriced == ()


def test_primus_yaml(tmp_path) -> None:
    text = """
work_group: ${TEAM:amd}
modules:
  pre_trainer:
    framework: megatron
    model: llama3_8B.yaml
    overrides:
      micro_batch_size: 2
      global_batch_size: 128
      tensor_model_parallel_size: ${PRIMUS_TP:2}
      seq_length: 8192
      use_distributed_optimizer: true
"""
    job = job_of(tmp_path, "pretrain.yaml", text)
    assert (job.layout.tp, job.facts.precision, job.layout.zero) == (2, "bf16", 1)
    assert "$PRIMUS_TP is taken to be unset" in said(job, "note")


NEMO = """
import os
os.system("touch ran")

def model() -> run.Config:
    return run.Config(LlamaModel, config=run.Config(Llama3Config8B))

def trainer(tensor_parallelism: int = 1, sequence_parallelism: bool = False, num_nodes: int = 1):
    strategy = run.Config(nl.MegatronStrategy, tensor_model_parallel_size=tensor_parallelism, pipeline_model_parallel_size=2,
                          sequence_parallel=sequence_parallelism)
    return run.Config(nl.Trainer, devices=8, num_nodes=num_nodes, strategy=strategy)

def finetune_recipe(name: str = "default"):
    return run.Partial(finetune, trainer=trainer(tensor_parallelism=8))

def pretrain_recipe(num_nodes: int = 4, performance_mode: bool = False):
    recipe = run.Partial(pretrain, trainer=trainer(tensor_parallelism=4, sequence_parallelism=True, num_nodes=num_nodes),
                         data=run.Config(MockDataModule, seq_length=4096, global_batch_size=64, micro_batch_size=2))
    if performance_mode:
        recipe.trainer.strategy.tensor_model_parallel_size = 1
    return recipe
"""


def test_nemo_recipes(tmp_path) -> None:
    job = job_of(tmp_path, "llama.py", NEMO)
    by = job.layout
    assert (by.tp, by.pp, by.sequence_parallel, by.micro_batch, by.global_batch) == (4, 2, True, 2, 64)  # fmt: skip
    assert (job.seq, job.gpus, job.framework, by.zero) == (4096, 32, "bridge", 1)
    assert "give llama.py:NAME" in said(job, "note") and job.unpriced == ()
    assert job_of(tmp_path, "llama.py:finetune_recipe", NEMO).layout.tp == 8
    with pytest.raises(AutoparError, match="no function other; it has model, trainer"):
        job_of(tmp_path, "llama.py:other", NEMO)


def test_bridge_recipes(tmp_path) -> None:
    text = """
def gpt_config():
    cfg = _pretrain_common()
    cfg.model = GPTModelProvider(num_layers=12, hidden_size=768, num_attention_heads=12, tensor_model_parallel_size=1)
    cfg.model.tensor_model_parallel_size = 2
    cfg.train.global_batch_size = 2 * 16
    cfg.train.micro_batch_size = 2
    cfg.mixed_precision = get_mixed_precision_config("bf16_with_fp8_current_scaling_mixed")
    return cfg
"""
    job = job_of(tmp_path, "gpt.py", text)
    assert (job.layout.tp, job.layout.global_batch, job.shape.layers) == (2, 32, 12)
    assert job.facts.fp8 == "tensorwise"


def test_torchtitan_of_2024_and_its_registry(tmp_path) -> None:
    text = """
[model]
name = "llama2"
flavor = "70B"
[training]
batch_size = 2
seq_len = 4096
data_parallel_shard_degree = -1
tensor_parallel_degree = 8
[experimental]
pipeline_parallel_degree = 2
[activation_checkpoint]
mode = "full"
"""
    job = job_of(tmp_path, "llama2.toml", text)
    assert (job.layout.tp, job.layout.pp, job.layout.recompute, job.shape.layers) == (8, 2, "full", 80)  # fmt: skip
    registry = """
def llama3_debugmodel():
    return Trainer.Config(model_spec=model_registry("debugmodel"), training=TrainingConfig(max_context_length=256))

def llama3_8b():
    spec = model_registry("8B")
    return Trainer.Config(model_spec=spec, activation_checkpoint=SelectiveAC.Config(),
        training=TrainingConfig(num_tokens_per_microbatch_per_dp_rank=2 * 8192, max_context_length=8192))

def llama3_8b_tp():
    config = llama3_8b()
    config.parallelism.tensor_parallel_degree = 2
    return config
"""
    job = job_of(tmp_path, "config_registry.py", registry)
    assert (job.layout.micro_batch, job.shape.layers, job.layout.tp) == (2, 32, 1)
    assert job_of(tmp_path, "config_registry.py:llama3_8b_tp", registry).layout.tp == 2


def test_axolotl(tmp_path) -> None:
    text = """
base_model: Qwen/Qwen3-30B-A3B
expert_parallel_size: 2
dp_shard_size: 4
sequence_len: 2048
micro_batch_size: 2
gradient_accumulation_steps: 3
gradient_checkpointing: true
bf16: true
fsdp_config: {fsdp_version: 2, reshard_after_forward: false, offload_params: true}
"""
    job = job_of(tmp_path, "moe.yaml", text)
    by = job.layout
    assert (by.ep, by.dp, by.zero, by.offload, by.recompute) == (2, 8, 2, "parameters", "full")
    assert by.batch_on(8) == 2 * 3 * 8
    assert "multiplies the devices" in said(job, "note")


def test_trainer_arguments(tmp_path) -> None:
    ds = '{"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": "auto"}}'
    script = """STAGE=$2
if [ "$STAGE" == "" ]; then STAGE=3; fi
torchrun --nproc_per_node=4 train.py --model_name_or_path meta-llama/Llama-2-7b-hf --per_device_train_batch_size 4 \\
    --gradient_accumulation_steps 8 --model_max_length 512 --bf16 True --gradient_checkpointing """
    job = job_of(tmp_path, "a.sh", script + "--deepspeed ds.json", ds__json=ds)
    by = job.layout
    assert (job.framework, by.zero, by.micro_batch, by.batch_on(4)) == ("deepspeed", 2, 4, 128)
    assert (job.seq, job.gpus, job.facts.precision, by.recompute) == (512, 4, "bf16", "full")
    assert said(job, "unknown") == ""
    job = job_of(tmp_path, "b.sh", script + "--fsdp 'shard_grad_op auto_wrap offload'")
    assert (job.framework, job.layout.zero, job.layout.offload) == ("accelerate", 2, "parameters")
    job = job_of(tmp_path, "c.sh", script + "--zero_stage $STAGE --lora_dim 8")
    assert job.layout.zero == 3 and "adapters" in job.unmodelled[0].what
    job = job_of(tmp_path, "d.sh", script + "--deepspeed other.json")
    assert "other.json, which is not beside the file" in said(job, "unknown")
    python = "args = TrainingArguments(per_device_train_batch_size=2, gradient_accumulation_steps=4, fsdp='full_shard')"
    job = job_of(tmp_path, "e.py", python)
    assert (job.layout.zero, job.layout.micro_batch, job.layout.accumulation) == (3, 2, 4)


def test_llama_factory(tmp_path) -> None:
    text = """
model_name_or_path: meta-llama/Meta-Llama-3-8B
stage: sft
finetuning_type: full
deepspeed: examples/ds_z3.json
cutoff_len: 2048
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
bf16: true
"""
    job = job_of(tmp_path, "sft.yaml", text, ds_z3__json='{"zero_optimization": {"stage": 3}}')
    assert (job.layout.zero, job.layout.recompute, job.seq) == (3, "full", 2048)


def test_accelerate_with_a_file_of_deepspeed(tmp_path) -> None:
    text = "distributed_type: DEEPSPEED\nnum_processes: 8\ndeepspeed_config: {deepspeed_config_file: ds.json}\n"
    ds = '{"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}, "bf16": {"enabled": true}}'
    job = job_of(tmp_path, "accelerate.yaml", text, ds__json=ds)
    assert (job.layout.zero, job.layout.offload, job.facts.precision) == (3, "parameters", "bf16")


@pytest.mark.parametrize(
    "name",
    [
        "${DIR}/models/small.sh",
        '"$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)/models/small.sh"',
        "$(dirname $0)/../scripts/models/small.sh",
        "/root/repository/scripts/models/small.sh",
        "scripts/models/small.sh",
    ],
)
def test_files_that_a_script_names_from_elsewhere(name: str, tmp_path) -> None:
    (tmp_path / "scripts/models").mkdir(parents=True)
    (tmp_path / "scripts/models/small.sh").write_text(f"MODEL_ARGS=({MODEL})\n")
    text = f"DIR=$(cd $(dirname $0) && pwd)\nsource {name}\n"
    text += "torchrun --nproc-per-node 8 pretrain_gpt.py ${MODEL_ARGS[@]} --micro-batch-size 1"
    job = job_of(tmp_path / "scripts", "run.sh", text)
    assert (job.shape.layers, job.gpus) == (12, 8) and said(job, "unknown") == ""


def test_files_of_deepspeed_above_the_script(tmp_path) -> None:
    (tmp_path / "shell/second").mkdir(parents=True)
    (tmp_path / "zero1.json").write_text('{"zero_optimization": {"stage": 1}}')
    text = "torchrun train.py --per_device_train_batch_size 4 --deepspeed zero1.json"
    assert job_of(tmp_path / "shell/second", "run.sh", text).layout.zero == 1


def test_programs_that_do_not_train(tmp_path) -> None:
    text = f"torchrun tools/run_text_generation_server.py {MODEL}"
    with pytest.raises(
        AutoparError, match=r"run_text_generation_server\.py of run\.sh does not train"
    ):
        job_of(tmp_path, "run.sh", text)


def test_a_description_of_a_model_is_no_job(tmp_path) -> None:
    text = '{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}'
    with pytest.raises(AutoparError, match="it describes a model: give it as --model hf:"):
        job_of(tmp_path, "config.json", text)


def test_micro_batches_that_no_option_says(tmp_path) -> None:
    job = job_of(tmp_path, "run.sh", f"torchrun pretrain_gpt.py {MODEL}")
    assert "micro_batch_size does not stand in the file" in said(job, "unknown")
    assert job.unknown == ("micro_batch",)


def test_nemo_launcher(tmp_path) -> None:
    text = """
defaults: [_self_, optional tp_overlap@model.ub]
run: {name: a, time_limit: "0:30:00"}
trainer: {devices: 8, num_nodes: 1, precision: bf16}
model:
  mcore_gpt: true
  mm_cfg: {vision_encoder: {hidden_size: 32, num_attention_heads: 2}}
  micro_batch_size: 1
  global_batch_size: 32
  tensor_model_parallel_size: 2
  hidden_size: 64
  num_attention_heads: 4
  ub_tp_comm_overlap: true
  optim: {name: mcore_distributed_optim, overlap_grad_sync: true, grad_sync_dtype: bf16}
"""
    job = job_of(tmp_path, "gpt.yaml", text)
    facts = job.facts
    assert (job.layout.zero, facts.dp_overlap, facts.tp_overlap, facts.grads) == (
        1,
        True,
        True,
        "bf16",
    )
    assert (job.shape.hidden, job.shape.heads) == (64, 4) and job.unpriced == ()
    sharded = text.replace("ub_tp_comm_overlap: true", "fsdp: true")
    assert job_of(tmp_path, "gpt.yaml", sharded).layout.zero == 3


def test_overrides_of_a_configuration(tmp_path) -> None:
    text = """python3 main.py training=gpt3/5b data_dir=/data stages=[training] \\
    training.model.micro_batch_size=4 training.model.tensor_model_parallel_size=2
"""
    job = job_of(tmp_path, "run.sh", text)
    assert "the values of training/gpt3/5b.yaml count too" in said(job, "unknown")
    (tmp_path / "training/gpt3").mkdir(parents=True)
    base = "model: {micro_batch_size: 1, pipeline_model_parallel_size: 4, encoder_seq_length: 2048}"
    (tmp_path / "training/gpt3/5b.yaml").write_text(base)
    by = (job := job_of(tmp_path, "run.sh", text)).layout
    assert (by.micro_batch, by.tp, by.pp, job.seq) == (4, 2, 4, 2048) and said(job, "unknown") == ""


NEMO_RL = """
policy:
  train_global_batch_size: 512
  train_micro_batch_size: 2
  max_total_sequence_length: 4096
  precision: bfloat16
  dtensor_cfg: {enabled: true, tensor_parallel_size: 1, activation_checkpointing: false}
  megatron_cfg:
    enabled: false
    activation_checkpointing: false
    recompute_granularity: full
    tensor_model_parallel_size: 1
    pipeline_model_parallel_size: 1
    fp8_cfg: {enabled: false, fp8: e4m3, fp8_recipe: blockwise}
    optimizer: {optimizer: adam, bf16: true, use_distributed_optimizer: true}
  generation: {colocated: {resources: {num_nodes: 3}}, vllm_cfg: {data_parallel_size: 7}}
cluster: {num_nodes: 1, gpus_per_node: 8}
"""


def test_what_a_yaml_extends_and_switches_off(tmp_path) -> None:
    with pytest.raises(AutoparError, match="a job of NeMo-RL with DTensor, which autopar does not"):
        job_of(tmp_path, "base.yaml", NEMO_RL)
    over = """
defaults: {base}
policy:
  dtensor_cfg: {{enabled: false}}
  megatron_cfg: {{enabled: true, tensor_model_parallel_size: 4, pipeline_model_parallel_size: null}}
cluster: {{num_nodes: 2}}
"""
    (tmp_path / "recipes").mkdir()
    folder = tmp_path / "recipes"
    job = job_of(folder, "a.yaml", over.format(base="../base.yaml"))
    by = job.layout
    assert (by.tp, by.pp, by.dp, by.zero, by.micro_batch, by.global_batch) == (
        4,
        1,
        None,
        1,
        2,
        512,
    )
    assert (job.seq, job.gpus, job.facts.fp8, by.recompute) == (4096, 16, "", "none")
    assert "the values of other.yaml count too" in said(
        job_of(folder, "b.yaml", over.format(base="other.yaml") + "micro_batch_size: 1"), "unknown"
    )
    on = over.replace("enabled: true,", "enabled: true, activation_checkpointing: true,")
    assert job_of(folder, "c.yaml", on.format(base="../base.yaml")).layout.recompute == "full"


def test_files_that_extend_each_other_end(tmp_path) -> None:
    text = "defaults: a.yaml\nmicro_batch_size: 1\nglobal_batch_size: 8\n"
    assert "the values of a.yaml count too" in said(job_of(tmp_path, "a.yaml", text), "unknown")


def test_slime(tmp_path) -> None:
    text = f"""PERF_ARGS=(--tensor-model-parallel-size 2 --use-dynamic-batch-size --max-tokens-per-gpu 9216)
ray job submit -- python3 train.py --actor-num-nodes 2 --actor-num-gpus-per-node 8 {MODEL.replace("--seq-length 1024", "")} \\
    --global-batch-size 64 --rollout-max-response-len 8192 ${{PERF_ARGS[@]}}
"""
    job = job_of(tmp_path, "run.sh", text)
    assert (job.layout.zero, job.facts.precision, job.gpus, job.seq) == (1, "bf16", 16, 8192)


def test_pipelines_of_torchtitan_without_a_global_batch(tmp_path) -> None:
    text = "[training]\nlocal_batch_size = 8\n[parallelism]\npipeline_parallel_degree = 4\n"
    by = job_of(tmp_path, "a.toml", text).layout
    assert (by.micro_batch, by.micro_batches_on(16), by.batch_on(16)) == (1, 8, 32)
    earlier = "[training]\nbatch_size = 8\ntensor_parallel_degree = 1\n[experimental]\npipeline_parallel_degree = 4\n"
    by = job_of(tmp_path, "b.toml", earlier).layout
    assert (by.micro_batch, by.micro_batches_on(16)) == (2, 4)


NANO = """
parallelism: {dp: 4, pp: 1, tp: 2, pp_engine: 1f1b, tp_mode: REDUCE_SCATTER, recompute_granularity: SELECTIVE}
optimizer: {zero_stage: 0, accumulate_grad_in_fp32: true}
tokens: {batch_accumulation_per_replica: 2, micro_batch_size: 1, sequence_length: 4096}
learning_rate_scheduler: {lr_warmup_steps: 10}
"""


def test_models_of_nanotron_that_are_no_llama(tmp_path) -> None:
    text = (
        NANO
        + """model:
  model_config: {is_starcoder2_config: true, grouped_query: true, num_kv_heads: 4, hidden_size: 4608, num_attention_heads: 36,
                 num_hidden_layers: 32, vocab_size: 49152, activation_function: gelu, resid_pdrop: 0.1, attn_pdrop: 0.1}
  dtype: bfloat16
"""
    )
    job = job_of(tmp_path, "a.yaml", text)
    shape = job.shape
    assert (shape.kv_heads, shape.gated, shape.ffn, job.facts.dropout) == (4, False, 4 * 4608, 0.1)
    assert (job.layout.recompute, job.unpriced) == ("selective", ())
    earlier = "model: {hidden_size: 2048, num_attention_heads: 16, n_inner: 8192, n_layer: 24, "
    earlier += "vocab_size: 49152, activation_function: gelu}\n"
    shape = job_of(tmp_path, "b.yaml", NANO + earlier).shape
    assert (shape.layers, shape.hidden, shape.ffn, shape.kv_heads) == (24, 2048, 8192, 16)
    other = text.replace("grouped_query: true, num_kv_heads: 4", "multi_query: true")
    assert job_of(tmp_path, "c.yaml", other).shape.kv_heads == 1


def test_one_head_of_keys_in_bigcodes_megatron(tmp_path) -> None:
    start = "source $HOME/.bashrc\n. venv/bin/activate\ntorchrun --role x --nproc_per_node 8"
    text = f"{start} pretrain_gpt.py {MODEL} --attention-head-type multiquery"
    job = job_of(tmp_path, "a.sh", text)
    assert job.shape.kv_heads == 1 and job.unpriced == ()
    assert "activate" not in said(job, "unknown") and "bashrc" not in said(job, "unknown")


def test_scripts_of_torchtitan_that_name_their_configuration(tmp_path) -> None:
    toml = "[model]\nname = 'llama3'\nflavor = '8B'\n[training]\nbatch_size = 3\ntensor_parallel_degree = 8\n"
    toml += "data_parallel_shard_degree = 4\n"
    start = "#SBATCH --nodes=4\nsrun --gpus 8 torchrun --nnodes $SLURM_NNODES --nproc_per_node 8 ./train.py "
    text = "CONFIG_FILE=${CONFIG_FILE:-'train_configs/a.toml'}\npython tool.py --seq_len 1\n"
    text += f"{start}--job.config_file $CONFIG_FILE"
    (tmp_path / "train_configs").mkdir()
    (tmp_path / "train_configs" / "a.toml").write_text(toml)
    job = job_of(
        tmp_path, "a.sh", f"{text} --training.tensor_parallel_degree 2 --training.shuffle_seed 7"
    )
    by = job.layout
    assert (job.gpus, by.tp, by.dp, by.micro_batch, job.shape.layers) == (32, 2, 4, 3, 32)
    with pytest.raises(AutoparError, match=r"stand in other.toml, which is not beside it"):
        job_of(tmp_path, "b.sh", f"{start}--job.config_file other.toml --training.shuffle_seed 7")


@pytest.mark.parametrize(
    ("options", "adapters"),
    [
        ("--lora_enable True --lora_r 128", True),
        ("--use_llm_lora 16", True),
        ("--use_lora", True),
        ("--lora_r 8", True),
        ("--use_lora False --lora_r 8", False),
        ("--use_llm_lora 0", False),
        ("--train_type full --lora_rank 8", False),
    ],
)
def test_low_rank_adapters(options: str, adapters: bool, tmp_path) -> None:
    text = f"torchrun train.py --per_device_train_batch_size 1 {options}"
    assert bool(job_of(tmp_path, "a.sh", text).unmodelled) is adapters


@pytest.mark.parametrize(
    ("name", "text", "pairs"),
    [
        ("a.sh", "torchrun scripts/dpo.py --per_device_train_batch_size 4", True),
        ("a.sh", "trl dpo --per_device_train_batch_size 4", True),
        (
            "a.sh",
            "torchrun scripts/run_sft.py --per_device_train_batch_size 4 --output_dir dpo/x",
            False,
        ),
        ("a.sh", "swift rlhf --rlhf_type dpo --per_device_train_batch_size 4", True),
        ("a.sh", "swift rlhf --rlhf_type grpo --per_device_train_batch_size 4", False),
        ("a.yaml", "stage: dpo\nper_device_train_batch_size: 4\n", True),
        ("a.yaml", "stage: sft\nper_device_train_batch_size: 4\n", False),
        ("a.yaml", "base_model: a/b\nrl: dpo\nmicro_batch_size: 4\n", True),
        ("a.yaml", "beta: 0.1\nmax_prompt_length: 512\nper_device_train_batch_size: 4\n", True),
        (
            "a.yaml",
            "beta: 0.1\nmax_prompt_length: 512\nnum_generations: 8\nper_device_train_batch_size: 4\n",
            False,
        ),
        ("kto.yaml", "beta: 0.1\nmax_prompt_length: 512\nper_device_train_batch_size: 4\n", False),
        ("a.py", "args = DPOConfig(per_device_train_batch_size=4)", True),
    ],
)
def test_samples_that_are_pairs(name: str, text: str, pairs: bool, tmp_path) -> None:
    job = job_of(tmp_path, name, text)
    assert job.layout.micro_batch == (8 if pairs else 4)
    assert ("pair of answers" in said(job, "note")) is pairs and job.unpriced == ()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--use_fsdp --fsdp_sharding_strategy FULL_SHARD --fsdp_backward_prefetch BACKWARD_PRE", {"zero": 3}),
        ("--use_fsdp --fsdp_sharding_strategy SHARD_GRAD_OP", {"zero": 2}),
        ("--use_fsdp --fsdp_version 2 --fsdp_reshard_after_forward false --fsdp_offload_params true", {"zero": 2, "offload": "parameters"}),
        ("--use_fsdp --fsdp_version 2 --fsdp_activation_checkpointing true --parallelism_config_tp_size 2 "
         "--parallelism_config_dp_shard_size 4", {"zero": 3, "tp": 2, "dp": 4, "recompute": "full"}),
        ("--use_deepspeed --zero_stage 2 --offload_optimizer_device cpu", {"zero": 2, "offload": "optimizer"}),
        ("--multi_gpu", {"zero": 0}),
    ],
)  # fmt: skip
def test_options_of_accelerates_launcher(options: str, expected: dict, tmp_path) -> None:
    start = "accelerate launch --num_processes 8 --num_machines 1 --mixed_precision bf16"
    text = f"{start} {options} train.py --per_device_train_batch_size 4 --gradient_accumulation_steps 2"
    job = job_of(tmp_path, "a.sh", text)
    assert {name: getattr(job.layout, name) for name in expected} == expected
    assert (job.layout.micro_batch, job.layout.accumulation, job.gpus) == (4, 2, 8)
    assert job.unpriced == () and said(job, "unknown") == ""


@pytest.mark.parametrize(
    ("options", "unmodelled", "recompute"),
    [
        ("optimizer: adamw_torch_fused", [], "none"),
        ("optimizer: paged_adamw_8bit", ["optimizer=paged_adamw_8bit"], "none"),
        ("optim: adafactor", ["optim=adafactor"], "none"),
        ("activation_offloading: true", ["activation_offloading"], "none"),
        ("gradient_checkpointing: offload", ["gradient_checkpointing=offload"], "full"),
        ("gradient_checkpointing: true\nactivation_offloading: false", [], "full"),
    ],
)
def test_options_of_trainers_that_change_memory(options: str, unmodelled: list[str], recompute: str, tmp_path) -> None:  # fmt: skip
    text = f"base_model: a/b\nmicro_batch_size: 1\nbf16: true\n{options}\n"
    job = job_of(tmp_path, "a.yaml", text)
    assert ([part.option for part in job.unmodelled], job.layout.recompute) == (
        unmodelled,
        recompute,
    )
    assert job.unpriced == ()
    assert ("host memory" in said(job, "note")) is ("offload\n" in f"{options}\n")


@pytest.mark.parametrize(
    ("optimizer", "noted"), [("adam", False), ("dist_muon", False), ("lion", True)]
)
def test_optimizers_of_megatron(optimizer: str, noted: bool, tmp_path) -> None:
    text = f"torchrun pretrain_gpt.py {MODEL} --optimizer {optimizer}"
    job = job_of(tmp_path, "a.sh", text)
    assert ("priced as Adam" in said(job, "note")) is noted
    assert job.facts.optimizer == {"adam": "adam", "dist_muon": "muon"}.get(optimizer)


@pytest.mark.parametrize(
    ("options", "fp8"),
    [
        ("--bf16 --fp8-hybrid", "delayed"),
        ("--bf16 --fp8-e4m3", "delayed"),
        ("--bf16 --fp8-format hybrid --fp8-recipe tensorwise", "tensorwise"),
        ("--bf16", ""),
    ],
)
def test_fp8_of_each_version(options: str, fp8: str, tmp_path) -> None:
    text = f"torchrun pretrain_gpt.py {MODEL} {options} --micro-batch-size ${{12}}"
    job = job_of(tmp_path, "a.sh", text)
    assert (job.facts.precision, job.facts.fp8) == ("bf16", fp8)
    assert "micro_batch_size is ${12}, which" in said(job, "unknown")


def test_sharding_that_another_file_says(tmp_path) -> None:
    text = "model_name_or_path: a/b\nper_device_train_batch_size: 1\nbf16: true\n"
    assert "what shards the states" in said(job_of(tmp_path, "sft.yaml", text), "unknown")


EFFECTS = {
    "a.sh": f"X=$(touch ran)\nY=`touch ran`\neval 'touch ran'\n: ${{Z:=$(touch ran)}}\nA=(1); B=$((A[$(touch ran)]))\n"
    "cat <<EOF > /dev/null\n$(touch ran)\nEOF\nsource <(touch ran)\ntouch ran | true\n"
    f"torchrun pretrain_gpt.py {MODEL} --seed $(touch ran)\n",
    "m.sh": f"torchrun pretrain_gpt.py {MODEL}\nW=$(cat <<E\n$(touch ran) `touch ran`\nE\n)\necho \"$W\" > w.sh\nbash w.sh\n"
    "cat <<'E' | bash\ntouch ran\nE\nsed 's/a/b/;w ran' a > c\nsed 's/a/touch ran/e' a > c\nread -r -d '' X <<E\n$(touch ran)\nE\n$X\n",
    "b.yaml": "a: !!python/object/apply:os.system ['touch ran']\nnum_layers: 2\nhidden_size: 64\n",
    "c.yaml": "distributed_type: !!python/object/new:os.system [touch ran]\nfsdp_config: {}\n",
    "d.py": NEMO,
    "e.py": "import os\n@os.system('touch ran')\ndef llama3_8b(x=os.system('touch ran')):\n    os.system('touch ran')\n"
    "    return Trainer.Config(training=TrainingConfig(max_context_length=os.system('touch ran')), parallelism=ParallelismConfig())\n",
    "f.py": "import os\nTrainingArguments(per_device_train_batch_size=[os.system('touch ran') for _ in [1]][0])\n",
    "g.sh": "torchrun train.py --per_device_train_batch_size $(touch ran) --deepspeed `touch ran`\n",
    "h.json": '{"zero_optimization": {"stage": "$(touch ran)"}, "train_batch_size": "__import__(\'os\').system(\'touch ran\')"}',
    "i.toml": '[parallelism]\nmodule_fqns_per_model_part = "__import__(\'os\').system(\'touch ran\')"\npipeline_parallel_degree = 2\n',
    "k.yaml": "defaults: ['$(touch ran)', {a: '`touch ran`'}]\nextends: !!python/object/apply:os.system ['touch ran']\n"
    "micro_batch_size: 1\nseq_length: 8\n",
    "l.sh": "source $(touch ran)/a.sh\n. `touch ran`\npython main.py training=$(touch ran)/a --config-name `touch ran` "
    "model.micro_batch_size=1 model.num_layers=2\n",
    "j.yaml": "num_layers: '${oc.eval:__import__(\"os\").system(\"touch ran\")}'\nhidden_size: '${NAME:$(touch ran)}'\nseq_length: 8\n",
}  # fmt: skip


@pytest.mark.parametrize("name", EFFECTS)
def test_nothing_of_a_file_runs(name: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with contextlib.suppress(AutoparError):
        job_of(tmp_path, name, EFFECTS[name])
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("off", ["false", "False", "no", "off", "0", "none", "null"])
def test_each_word_for_off(off: str, tmp_path) -> None:
    text = f"""model: {{num_layers: 12, hidden_size: 768, num_attention_heads: 12}}
megatron_cfg: {{enabled: {off}, tensor_model_parallel_size: 4}}
micro_batch_size: 1
sequence_parallel: {off}
some_overlap: {off}
"""
    job = job_of(tmp_path, "job.yaml", text)
    assert (job.layout.tp, job.layout.sequence_parallel, job.unpriced) == (1, False, ())
