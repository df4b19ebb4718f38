"""Parts of foreign jobs that no price counts: each is named, and nothing is named that is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.foreign.frameworks.registry import read_job
from autopar.foreign.job import Job

MEGATRON = (
    "torchrun --nproc-per-node 8 --nnodes 1 pretrain_gpt.py --num-layers 8 --hidden-size 512 --num-attention-heads 8 --bf16 "
    "--seq-length 512 --max-position-embeddings 512 --micro-batch-size 1 --global-batch-size 16 --vocab-size 512 "
)
EXPERTS = MEGATRON + "--num-experts 8 --expert-model-parallel-size 4 "
VERL = (
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=64 data.max_prompt_length=512 "
    "data.max_response_length=512 actor_rollout_ref.actor.ppo_mini_batch_size=64 "
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 trainer.n_gpus_per_node=8 trainer.nnodes=1 "
)
VERL_SFT = (
    "torchrun --nproc_per_node=8 -m verl.trainer.fsdp_sft_trainer data.micro_batch_size_per_gpu=4 data.train_batch_size=64 "
    "data.max_length=1024 "
)
RLHF = "deepspeed --module openrlhf.cli.{} --zero_stage 3 --micro_train_batch_size 2 --train_batch_size 64 --max_len 1024 --bf16 "
TRL = "accelerate launch --num_processes 8 {} --per_device_train_batch_size 2 --max_length 1024 --bf16 "
AXOLOTL = "base_model: NousResearch/Llama-3.2-1B\nmicro_batch_size: 2\nsequence_len: 2048\nbf16: true\noptimizer: adamw_torch\n"
FACTORY = "model_name_or_path: meta-llama/Llama-3-8B\nper_device_train_batch_size: 1\ncutoff_len: 2048\nbf16: true\ntemplate: llama3\n"
DEEPSPEED = '{"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": true}, "zero_optimization": {"stage": 3%s}%s}'
SWIFT = "NPROC_PER_NODE=8 swift {} --model Qwen/Qwen3-8B --per_device_train_batch_size 1 --max_length 2048 "
MCORE_SWIFT = (
    "NPROC_PER_NODE=8 megatron {} --model Qwen/Qwen3-8B --tensor_model_parallel_size 2 --micro_batch_size 1 "
    "--global_batch_size 16 --max_length 2048 "
)
SLIME = (
    "python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --num-layers 8 --hidden-size 512 --num-attention-heads 8 "
    "--tensor-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 64 --rollout-batch-size 32 "
)
TITAN = (
    '[parallelism]\ntensor_parallel_degree = 1\n[model]\nname = "llama3"\nflavor = "8B"\n'
    "[training]\nlocal_batch_size = 1\nseq_len = 8192\n"
)
ZERO_BUBBLE = TITAN.replace(
    "tensor_parallel_degree = 1",
    'pipeline_parallel_degree = 2\npipeline_parallel_schedule = "ZBVZeroBubble"',
)
HOST = MEGATRON + "--optimizer-cpu-offload --use-precision-aware-optimizer "
NEMO_RL = (
    "policy:\n  train_global_batch_size: 64\n  train_micro_batch_size: 1\n  max_total_sequence_length: 4096\n  precision: bfloat16\n"
    "  megatron_cfg: {enabled: true, tensor_model_parallel_size: 2, pipeline_model_parallel_size: 1}\n"
)
NANOTRON = (
    "parallelism: {dp: 8, tp: 1, pp: 1, pp_engine: 1f1b, tp_mode: REDUCE_SCATTER}\n"
    "tokens: {micro_batch_size: 2, batch_accumulation_per_replica: 1, sequence_length: 2048}\n"
)
ACCELERATE = "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 8\nfsdp_config: {fsdp_version: 2%s}\n"
BRIDGE = (
    "torchrun --nproc-per-node 8 run_recipe.py --recipe llama model.tensor_model_parallel_size=2 train.micro_batch_size=1 "
    "train.global_batch_size=64 model.seq_length=4096 "
)

INSIDE = [
    ("m.sh", MEGATRON + "--fine-grained-activation-offloading", "activations in host"),
    ("m.sh", MEGATRON + "--cpu-offloading-num-layers 4", "activations in host"),
    ("m.sh", HOST + "--optimizer-offload-fraction 0.5", "a part of the optimizer"),
    ("m.sh", MEGATRON + "--use-precision-aware-optimizer --exp-avg-dtype bf16", "another dtype"),
    ("m.sh", MEGATRON + "--use-precision-aware-optimizer", "remainders"),
    ("m.sh", MEGATRON + "--fp8-format hybrid --fp8-param-gather", "gathered in fp8"),
    ("m.sh", MEGATRON + "--fp4-format e2m1", "fp4"),
    ("m.sh", MEGATRON + "--recompute-granularity selective --recompute-modules moe_act layernorm", "other modules"),
    ("m.sh", MEGATRON + "--recompute-granularity full --recompute-method uniform --recompute-num-layers 4", "every few layers"),
    ("m.sh", MEGATRON + "--tensor-model-parallel-size 2 --distribute-saved-activations", "shared out over tp"),
    ("m.sh", MEGATRON + "--cuda-graph-impl transformer_engine", "CUDA graphs"),
    ("m.sh", MEGATRON + "--optimizer lion", "optimizer without a price"),
    ("m.sh", MEGATRON + "--attention-backend unfused", "flash"),
    ("m.sh", EXPERTS + "--moe-shared-expert-overlap", "travel of tokens beside"),
    ("m.sh", EXPERTS + "--delay-wgrad-compute", "computed later"),
    ("m.sh", EXPERTS + "--moe-token-dispatcher-type flex --moe-enable-deepep", "another travel"),
    ("m.sh", EXPERTS + "--moe-expert-capacity-factor 1.5", "capacity"),
    ("m.sh", MEGATRON + "--context-parallel-size 2 --cp-comm-type a2a", "exchange between ranks of cp"),
    ("m.sh", MEGATRON + "--use-megatron-fsdp --fsdp-double-buffer", "buffers"),
    ("b.sh", BRIDGE + "model.cpu_offloading=true", "activations in host"),
    ("b.sh", BRIDGE + "mixed_precision=bf16_mixed model.fp8_param_gather=true", "fp8"),
    ("t.toml", TITAN + '[activation_checkpoint]\nmode = "memory_budget"\n', "budget of memory"),
    ("t.toml", TITAN + '[model2]\nx = 1\n[optimizer]\nname = "Muon"\n', "optimizer without a price"),
    ("t.toml", ZERO_BUBBLE, "schedule"),
    ("t.toml", TITAN.replace('flavor = "8B"', 'flavor = "8B"\nconverters = ["quantize.linear.mx"]'), "products in a precision"),
    ("t.toml", TITAN + 'dtype = "bfloat16"\n', "without a copy"),
    ("d.json", DEEPSPEED % (', "zero_quantized_weights": true', ""), "travel quantized"),
    ("d.json", DEEPSPEED % (', "zero_hpz_partition_size": 8', ""), "within groups"),
    ("d.json", DEEPSPEED % (', "offload_optimizer": {"device": "nvme"}', ""), "disks"),
    ("d.json", DEEPSPEED % (', "offload_optimizer": {"device": "cpu", "ratio": 0.4}', ""), "a part of the optimizer"),
    ("d.json", DEEPSPEED % ("", ', "optimizer": {"type": "OneBitAdam"}'), "optimizer without a price"),
    ("d.json", DEEPSPEED % ("", ', "activation_checkpointing": {"cpu_checkpointing": true}'), "activations in host"),
    ("d.json", DEEPSPEED % ("", ', "data_types": {"grad_accum_dtype": "fp32"}'), "add up in fp32"),
    ("a.yaml", ACCELERATE % ", fsdp_sharding_strategy: HYBRID_SHARD", "within a node"),
    ("a.yaml", ACCELERATE % ", fsdp_auto_wrap_policy: NO_WRAP", "no layers"),
    ("n.yaml", NANOTRON.replace("tp: 1", "tp: 2, tp_recompute_allgather: true"), "all-gathers"),
    ("x.yaml", AXOLOTL + "activation_offloading: true\n", "activations in host"),
    ("x.yaml", AXOLOTL + "gradient_checkpointing: offload\n", "activations in host"),
    ("x.yaml", AXOLOTL + "sample_packing: true\n", "packed"),
    ("x.yaml", AXOLOTL + "plugins:\n  - axolotl.integrations.liger.LigerPlugin\n", "plugins with kernels"),
    ("x.yaml", AXOLOTL.replace("adamw_torch", "adamw_bnb_8bit"), "optimizer without a price"),
    ("x.yaml", AXOLOTL + "torch_compile: true\n", "torch.compile"),
    ("f.yaml", FACTORY + "stage: sft\nfinetuning_type: full\nenable_liger_kernel: true\n", "Liger"),
    ("f.yaml", FACTORY + "stage: pt\nfinetuning_type: full\nuse_galore: true\n", "optimizer without a price"),
    ("f.yaml", FACTORY + "stage: pt\nfinetuning_type: full\npure_bf16: true\n", "half precision"),
    ("f.yaml", FACTORY + "stage: pt\nfinetuning_type: full\nuse_unsloth_gc: true\n", "Unsloth"),
    ("h.sh", TRL.format("train.py") + "--optim paged_adamw_8bit", "optimizer without a price"),
    ("h.sh", TRL.format("train.py") + "--optim adafactor", "optimizer without a price"),
    ("h.sh", TRL.format("sft.py") + "--packing", "packed"),
    ("h.sh", TRL.format("train.py") + "--attn_implementation eager", "flash"),
    ("o.sh", RLHF.format("train_sft") + "--use_liger_kernel", "Liger"),
    ("o.sh", RLHF.format("train_sft") + "--packing_samples", "packed"),
    ("o.sh", RLHF.format("train_sft") + "--zpg 8", "within groups"),
    ("v.sh", VERL_SFT + "model.use_liger=True", "Liger"),
    ("v.sh", VERL + "actor_rollout_ref.actor.fsdp_config.param_offload=True", "travel to the host"),
    ("v.sh", VERL + "actor_rollout_ref.model.enable_activation_offload=True", "activations in host"),
    ("s.sh", MCORE_SWIFT.format("sft") + "--packing true", "packed"),
    ("s.sh", SLIME + "--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer", "beside compute"),
    ("r.yaml", NEMO_RL + "  sequence_packing: {enabled: true}\n", "packed"),
]  # fmt: skip

INSTEAD = [
    ("x.yaml", AXOLOTL + "adapter: qlora\nload_in_4bit: true\nlora_r: 8\n", "adapters"),
    ("x.yaml", AXOLOTL + "load_in_8bit: true\n", "quantized base"),
    ("x.yaml", AXOLOTL.replace("Llama-3.2-1B", "Llama-2-7B-GPTQ"), "quantized base"),
    ("x.yaml", AXOLOTL + "unfrozen_parameters:\n  - ^lm_head.weight$\n", "frozen"),
    ("x.yaml", AXOLOTL + "relora: true\n", "adapters"),
    ("f.yaml", FACTORY + "stage: sft\nfinetuning_type: lora\n", "adapters"),
    ("f.yaml", FACTORY + "stage: sft\n", "adapters"),
    ("f.yaml", FACTORY + "stage: sft\nfinetuning_type: freeze\n", "adapters"),
    ("f.yaml", FACTORY + "stage: sft\nfinetuning_type: full\nquantization_bit: 4\n", "quantized base"),
    ("f.yaml", FACTORY + "stage: sft\nfinetuning_type: full\nfreeze_vision_tower: true\n", "frozen"),
    ("h.sh", TRL.format("sft.py") + "--use_peft --lora_r 16", "adapters"),
    ("h.sh", TRL.format("train.py") + "--lora_r 16", "adapters"),
    ("h.sh", TRL.format("qlora.py") + "--bits 4 --lora_r 64", "quantized base"),
    ("h.sh", TRL.format("train.py") + "--load_in_8bit", "quantized base"),
    ("h.sh", TRL.format("llava/train/train.py") + "--tune_mm_mlp_adapter True", "frozen"),
    ("h.sh", TRL.format("qwenvl/train.py") + "--tune_mm_vision False --tune_mm_llm True", "frozen"),
    ("h.sh", TRL.format("train.py") + "--freeze_backbone True", "frozen"),
    ("o.sh", RLHF.format("train_sft") + "--lora_rank 64", "adapters"),
    ("o.sh", RLHF.format("train_sft") + "--load_in_4bit", "quantized base"),
    ("v.sh", VERL_SFT + "model.lora_rank=32", "adapters"),
    ("v.sh", VERL + "actor_rollout_ref.model.lora_rank=32", "adapters"),
    ("s.sh", SWIFT.format("sft") + "--train_type lora", "adapters"),
    ("s.sh", SWIFT.format("sft"), "adapters"),
    ("s.sh", SWIFT.format("sft") + "--tuner_type full --freeze_parameters_ratio 0.5", "frozen"),
    ("s.sh", SWIFT.format("sft") + "--tuner_type full --freeze_vit true", "frozen"),
    ("s.sh", MCORE_SWIFT.format("sft") + "--tuner_type lora", "adapters"),
    ("b.sh", BRIDGE + "peft.dim=8", "adapters"),
    ("r.yaml", NEMO_RL.replace("enabled: true,", "enabled: true, peft: {enabled: true, dim: 8},"), "adapters"),
    ("h.py", "args = TrainingArguments(per_device_train_batch_size=4, bf16=True, output_dir='o')\n"
             "model = get_peft_model(model, LoraConfig(r=8))\n", "adapters"),
    ("h.py", "args = SFTConfig(per_device_train_batch_size=4, bf16=True)\n"
             "bnb = BitsAndBytesConfig(load_in_4bit=True)\n", "quantized base"),
    ("b.py", "def recipe():\n    cfg = ConfigContainer()\n    cfg.model.tensor_model_parallel_size = 2\n"
             "    cfg.model.seq_length = 4096\n    cfg.train.micro_batch_size = 1\n    cfg.train.global_batch_size = 64\n"
             "    cfg.peft = LoRA(dim=8)\n    return cfg\n", "adapters"),
]  # fmt: skip

BESIDE = [
    ("v.sh", VERL + "actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.gpu_memory_utilization=0.6",
     ["a rollout engine (vllm) with 0.6 of the memory"]),
    ("v.sh", VERL, ["a rollout engine"]),
    ("v.sh", VERL.replace("grpo", "gae") + "actor_rollout_ref.rollout.name=sglang critic.model.path=x "
     "actor_rollout_ref.actor.use_kl_loss=True reward_model.enable=True", ["(sglang)", "a critic", "a reference", "a reward"]),
    ("o.sh", RLHF.format("train_ppo_ray") + "--colocate_all_models --vllm_num_engines 4 --vllm_gpu_memory_utilization 0.5 "
     "--critic_pretrain c --reward_pretrain r --init_kl_coef 0.01", ["(vLLM) with 0.5", "a critic", "a reward", "a reference"]),
    ("o.sh", RLHF.format("train_ppo"), ["generation by the trained model"]),
    ("o.sh", "ray job submit --runtime-env-json='{\"working_dir\": \"/openrlhf\"}' -- " + RLHF.format("train_ppo_ray")
     + "--reward_pretrain r --colocate_all_models", ["a critic (advantages by gae)"]),
    ("s.sh", SWIFT.format("rlhf") + "--rlhf_type grpo --train_type full", ["a reference model", "generation"]),
    ("o.sh", RLHF.format("train_dpo"), ["a reference model"]),
    ("o.sh", RLHF.format("train_kd") + "--teacher_model t", ["a teacher model"]),
    ("o.sh", RLHF.format("train_ppo_ray") + "--enable_ema --colocate_all_models --vllm_num_engines 2", ["a moving average"]),
    ("s.sh", SLIME + "--colocate --rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.7", ["(SGLang) with 0.7"]),
    ("s.sh", SLIME + "--colocate --use-kl-loss --ref-load r", ["(SGLang)", "a reference model"]),
    ("r.yaml", NEMO_RL + "  generation: {backend: vllm, colocated: {enabled: true}, vllm_cfg: {gpu_memory_utilization: 0.6}}\n",
     ["(vllm) with 0.6"]),
    ("r.yaml", NEMO_RL + "dpo: {reference_policy_kl_penalty: 0.05}\n", ["a reference model"]),
    ("r.yaml", NEMO_RL + "loss_fn: {reference_policy_kl_penalty: 0.01}\n", ["a reference model"]),
    ("h.sh", TRL.format("trl/scripts/grpo.py") + "--use_vllm --vllm_mode colocate --vllm_gpu_memory_utilization 0.3",
     ["(vLLM) with 0.3"]),
    ("h.sh", TRL.format("grpo.py"), ["generation by the trained model"]),
    ("h.sh", TRL.format("run_dpo.py"), ["a reference model"]),
    ("h.sh", TRL.format("ppo.py") + "--reward_model_path r", ["generation", "a critic", "a reward model"]),
    ("h.sh", TRL.format("summarize.py") + "--predict_with_generate", ["generation in evaluation"]),
    ("h.py", "args = DPOConfig(per_device_train_batch_size=4, bf16=True)\n", ["a reference model"]),
    ("h.py", "args = GRPOConfig(per_device_train_batch_size=4, use_vllm=True, vllm_mode='colocate')\n", ["(vLLM)"]),
    ("f.yaml", FACTORY + "stage: dpo\nfinetuning_type: full\npref_loss: sigmoid\n", ["a reference model"]),
    ("f.yaml", FACTORY + "stage: ppo\nfinetuning_type: full\nreward_model: r\n", ["generation", "a reward model", "a critic"]),
    ("x.yaml", AXOLOTL + "rl: dpo\n", ["a reference model"]),
    ("x.yaml", AXOLOTL + "rl: grpo\ntrl:\n  use_vllm: true\n  vllm_mode: colocate\n", ["(vLLM)"]),
    ("s.sh", SWIFT.format("rlhf") + "--rlhf_type grpo --train_type full --use_vllm true --vllm_mode colocate "
     "--vllm_gpu_memory_utilization 0.4", ["(vLLM) with 0.4"]),
    ("s.sh", SWIFT.format("rlhf") + "--rlhf_type gkd --train_type full --teacher_model t", ["a teacher model", "generation"]),
    ("s.sh", MCORE_SWIFT.format("rlhf") + "--rlhf_type dpo", ["a reference model"]),
    ("d.json", DEEPSPEED % ("", ', "hybrid_engine": {"enabled": true}'), ["generation by the trained model"]),
]  # fmt: skip

APART = [
    ("o.sh", RLHF.format("train_ppo_ray") + "--vllm_num_engines 4 --vllm_tensor_parallel_size 2 --actor_num_nodes 1 "
     "--actor_num_gpus_per_node 8", 8),
    ("s.sh", SLIME + "--rollout-num-gpus 8", 8),
    ("r.yaml", NEMO_RL + "  generation: {backend: vllm, colocated: {enabled: false}}\n"
     "cluster: {gpus_per_node: 8, num_nodes: 1}\n", None),
    ("h.sh", TRL.format("grpo.py") + "--use_vllm --vllm_mode server", 8),
    ("v.sh", VERL + "actor_rollout_ref.hybrid_engine=False actor_rollout_ref.rollout.nnodes=1", 8),
]  # fmt: skip

PLAIN = [
    ("m.sh", MEGATRON + "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --recompute-granularity selective"),
    ("m.sh", MEGATRON + "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    ("m.sh", MEGATRON + "--recompute-granularity selective --recompute-modules core_attn --optimizer adam"),
    ("m.sh", MEGATRON + "--moe-token-dispatcher-type flex --moe-shared-expert-overlap --cp-comm-type a2a"),
    ("m.sh", EXPERTS + "--moe-token-dispatcher-type alltoall --moe-grouped-gemm --freeze-moe-router"),
    ("m.sh", MEGATRON + "--optimizer-cpu-offload --use-precision-aware-optimizer --optimizer-offload-fraction 1.0"),
    ("t.toml", TITAN + '[optimizer]\nname = "AdamW"\n[compile]\nenable = true\n[activation_checkpoint]\nmode = "full"\n'),
    ("t.toml", TITAN.replace('flavor = "8B"', 'flavor = "8B"\nconverters = ["float8"]')),
    ("d.json", DEEPSPEED % (', "offload_optimizer": {"device": "cpu", "pin_memory": true}', ', "optimizer": {"type": "AdamW"}')),
    ("a.yaml", ACCELERATE % ", fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP, fsdp_backward_prefetch: BACKWARD_PRE"),
    ("n.yaml", NANOTRON),
    ("x.yaml", AXOLOTL + "adapter:\nlora_r: 8\nload_in_4bit: false\nsample_packing: false\nflash_attention: true\n"),
    ("x.yaml", AXOLOTL + "rl: orpo\n"),
    ("f.yaml", FACTORY + "stage: sft\nfinetuning_type: full\nfreeze_vision_tower: false\nlora_rank: 8\n"),
    ("f.yaml", FACTORY + "stage: dpo\nfinetuning_type: full\npref_loss: simpo\n"),
    ("f.yaml", FACTORY + "stage: rm\nfinetuning_type: full\n"),
    ("h.sh", TRL.format("sft.py") + "--use_peft False --lora_r 16 --optim adamw_torch_fused"),
    ("h.sh", TRL.format("train.py") + "--lora_enable False --lora_r 16 --load_in_4bit False --eval_strategy no"),
    ("o.sh", RLHF.format("train_sft") + "--lora_rank 0 --adam_offload --flash_attn"),
    ("v.sh", VERL_SFT + "model.lora_rank=0 model.use_liger=False"),
    ("s.sh", SWIFT.format("sft") + "--train_type full"),
    ("s.sh", MCORE_SWIFT.format("sft")),
    ("h.py", "args = SFTConfig(per_device_train_batch_size=4, bf16=True)\n"),
]  # fmt: skip


def read(tmp_path: Path, name: str, text: str) -> Job:
    path = tmp_path / name
    path.write_text(text)
    return read_job(path)


@pytest.mark.parametrize(("name", "text", "words"), INSIDE)
def test_options_of_weight_are_named(tmp_path: Path, name: str, text: str, words: str) -> None:
    found = read(tmp_path, name, text).unmodelled
    parts = [part for part in found if part.place == "inside"]
    assert any(words in part.what for part in parts), [str(part) for part in found]
    assert all(part.option for part in parts)


@pytest.mark.parametrize(("name", "text", "words"), INSTEAD)
def test_what_is_trained_in_part_has_no_price(tmp_path: Path, name: str, text: str, words: str) -> None:  # fmt: skip
    found = read(tmp_path, name, text).unmodelled
    assert any(words in part.what and part.place == "instead" for part in found), list(map(str, found))  # fmt: skip


@pytest.mark.parametrize(("name", "text", "words"), BESIDE)
def test_what_shares_the_devices_is_named(tmp_path: Path, name: str, text: str, words: list[str]) -> None:  # fmt: skip
    job = read(tmp_path, name, text)
    parts = [str(part) for part in job.unmodelled if part.place == "beside"]
    for word in words:
        assert any(word in part for part in parts), parts
    assert not any("devices of its own" in finding.what for finding in job.findings)


@pytest.mark.parametrize(("name", "text", "gpus"), APART)
def test_engines_with_devices_of_their_own(tmp_path: Path, name: str, text: str, gpus: int) -> None:
    job = read(tmp_path, name, text)
    assert not any("engine" in part.what for part in job.unmodelled)
    assert any("devices of its own" in finding.what for finding in job.findings)
    assert gpus is None or job.gpus == gpus


@pytest.mark.parametrize(("name", "text"), PLAIN)
def test_plain_training_has_a_price(tmp_path: Path, name: str, text: str) -> None:
    assert [str(part) for part in read(tmp_path, name, text).unmodelled] == []


def test_an_option_of_weight_whose_value_is_not_known(tmp_path: Path) -> None:
    for text, words in (
        (MEGATRON + "--cuda-graph-impl $IMPL", "CUDA graphs, if this is on (cuda_graph_impl=$IMPL)"),
        (TRL.format("sft.py") + "--optim $KIND", "if this is on"),
    ):  # fmt: skip
        found = read(tmp_path, "x.sh", text).unmodelled
        assert any(words in str(part) for part in found), list(map(str, found))


def test_an_option_of_weight_is_not_listed_twice(tmp_path: Path) -> None:
    job = read(tmp_path, "m.sh", MEGATRON + "--cuda-graph-impl local --new-switch")
    assert [part.what for part in job.unmodelled] == ["CUDA graphs"]
    assert job.unpriced == ("new_switch",)


def test_options_in_a_file_that_is_named_count(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(DEEPSPEED % (', "zero_quantized_gradients": true', ""))
    job = read(tmp_path, "t.sh", TRL.format("train.py") + "--deepspeed ds.json")
    assert [part.what for part in job.unmodelled] == ["weights and gradients that travel quantized"]


def test_servers_of_a_script_are_noted(tmp_path: Path) -> None:
    text = f"CUDA_VISIBLE_DEVICES=7 trl vllm-serve --model m &\n{TRL.format('grpo.py')} --use_vllm --vllm_mode server"
    job = read(tmp_path, "t.sh", text)
    assert any("the script starts trl vllm-serve" in finding.what for finding in job.findings)
