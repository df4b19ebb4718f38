"""Small jobs of each framework, in several releases and forms, whose training has a price."""

from __future__ import annotations

_MODEL = (
    "--num-layers 16 --hidden-size 1024 --ffn-hidden-size 4096 --num-attention-heads 16 --seq-length 1024 "
    "--max-position-embeddings 1024 --vocab-size 32000 --position-embedding-type rope --swiglu "
    "--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --bf16 "
)
_BATCH = "--micro-batch-size 2 --global-batch-size 64 "
_RUN = "torchrun --nproc-per-node 8 --nnodes 1 pretrain_gpt.py "
_TITAN = "[model]\nname = 'llama3'\nflavor = '8B'\n[training]\nlocal_batch_size = 1\nseq_len = 4096\n{}[parallelism]\n{}"
_REGISTRY = (
    "def llama3_8b() -> Trainer.Config:\n    return Trainer.Config(\n        model_spec=model_registry('8B'),\n"
    "        training=TrainingConfig({}),\n        parallelism=ParallelismConfig(tensor_parallel_degree=2),\n"
    "        activation_checkpoint=SelectiveAC.Config(),\n    )\n"
)
_BRIDGE = (
    "from megatron.bridge.training.config import ConfigContainer\n\n\ndef recipe():\n    cfg = ConfigContainer()\n"
    "    cfg.model.num_layers = 16\n    cfg.model.hidden_size = 1024\n    cfg.model.num_attention_heads = 16\n"
    "    cfg.model.ffn_hidden_size = 4096\n    cfg.model.vocab_size = 32000\n    cfg.model.seq_length = 1024\n"
    "    cfg.model.gated_linear_unit = True\n    cfg.model.tensor_model_parallel_size = {}\n    cfg.model.sequence_parallel = {}\n"
    "    cfg.model.pipeline_model_parallel_size = {}\n    cfg.train.global_batch_size = 64\n    cfg.train.micro_batch_size = 1\n"
    "    return cfg\n"
)
_AXOLOTL = (
    "base_model: a/b\nmicro_batch_size: 2\ngradient_accumulation_steps: 4\nsequence_len: 1024\nbf16: true\n"
    "optimizer: adamw_torch\nflash_attention: true\n"
)
_TRAINER = (
    "torchrun --nproc_per_node=8 train.py --model_name_or_path a/b --per_device_train_batch_size 2 --bf16 True "
    "--model_max_length 1024 "
)
_ACCELERATE = "compute_environment: LOCAL_MACHINE\ndistributed_type: {}\nmixed_precision: bf16\nnum_processes: 8\nnum_machines: 1\n"
_NANOTRON = (
    "parallelism: {{dp: {}, tp: {}, pp: {}, pp_engine: 1f1b, tp_mode: REDUCE_SCATTER}}\n"
    "tokens: {{micro_batch_size: 2, batch_accumulation_per_replica: 4, sequence_length: 1024}}\n"
    "optimizer: {{zero_stage: {}, accumulate_grad_in_fp32: true}}\n"
    "model: {{dtype: bfloat16, model_config: {{num_hidden_layers: 16, hidden_size: 1024, num_attention_heads: 16,\n"
    "  num_key_value_heads: 16, intermediate_size: 4096, vocab_size: 32000, tie_word_embeddings: false}}}}\n"
)
_YAML = (
    "num_layers: 16\nhidden_size: 1024\nffn_hidden_size: 4096\nnum_attention_heads: 16\nseq_length: 1024\nvocab_size: 32000\n"
    "max_position_embeddings: 1024\nswiglu: true\nbf16: true\nmicro_batch_size: 1\nglobal_batch_size: 64\n"
)

FILES: dict[str, tuple[str, str]] = {
    "megatron": ("a.sh", _RUN + _MODEL + _BATCH),
    "megatron-tp": ("a.sh", "export CUDA_DEVICE_MAX_CONNECTIONS=1\nTP=4\n" + _RUN + _MODEL + _BATCH
                    + "--tensor-model-parallel-size $TP --sequence-parallel --tp-comm-overlap"),
    "megatron-full": ("a.sh", _RUN + _MODEL + _BATCH + "--recompute-granularity full --recompute-method uniform "
                      "--recompute-num-layers 1 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
    "megatron-first": ("a.sh", _RUN + _MODEL + _BATCH + "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 7"),
    "megatron-layout": ("a.sh", _RUN + _MODEL + _BATCH + "--pipeline-model-parallel-size 2 "
                        "--pipeline-model-parallel-layout 'Et*7|t*9L'"),
    "megatron-vpp": ("a.sh", _RUN + _MODEL + _BATCH + "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2"),
    "megatron-stages": ("a.sh", _RUN + _MODEL + _BATCH + "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2"),
    "megatron-fsdp": ("a.sh", _RUN + _MODEL + _BATCH + "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads "
                      "--ckpt-format fsdp_dtensor --overlap-grad-reduce --overlap-param-gather"),
    "megatron-arrays": ("a.sh", "MODEL=(\n" + _MODEL + "\n)\nPAR=(\n    --tensor-model-parallel-size 2\n    --sequence-parallel\n)\n"
                        + _RUN + "${MODEL[@]} ${PAR[@]} " + _BATCH),
    "megatron-underscores": ("a.sh", (_RUN + _MODEL + _BATCH).replace("-", "_").replace("__", "--")),
    "megatron-offload": ("a.sh", _RUN + _MODEL + _BATCH + "--use-distributed-optimizer --optimizer-cpu-offload "
                         "--use-precision-aware-optimizer"),
    "megatron-yaml": ("a.yaml", _YAML + "tensor_model_parallel_size: 2\nsequence_parallel: true\nuse_distributed_optimizer: true\n"),
    "megatron-nested": ("a.yaml", "model:\n" + "".join(f"  {line}\n" for line in _YAML.splitlines())
                        + "  tensor_model_parallel_size: 1\n  pipeline_model_parallel_size: 2\n"),
    "megatron-deepspeed": ("a.sh", "deepspeed --num_gpus 8 --num_nodes 1 pretrain_gpt.py " + _MODEL + _BATCH
                           + "--deepspeed --zero-stage 1 --no-pipeline-parallel --checkpoint-activations "
                           "--deepspeed-activation-checkpointing"),
    "bridge": ("a.py", _BRIDGE.format(2, "True", 1)),
    "bridge-pp": ("a.py", _BRIDGE.format(1, "False", 2)),
    "bridge-script": ("a.sh", "torchrun --nproc-per-node 8 --nnodes 1 run_recipe.py --recipe llama "
                      "model.tensor_model_parallel_size=2 model.sequence_parallel=true train.micro_batch_size=1 "
                      "train.global_batch_size=64 model.seq_length=1024 mixed_precision=bf16_mixed"),
    "torchtitan-toml": ("a.toml", _TITAN.format("", "tensor_parallel_degree = 2\ndata_parallel_shard_degree = -1\n")
                        + "[activation_checkpoint]\nmode = 'full'\n"),
    "torchtitan-none": ("a.toml", _TITAN.format("", "pipeline_parallel_degree = 2\n") + "[activation_checkpoint]\nmode = 'none'\n"),
    "torchtitan-2024": ("a.toml", "[model]\nname = 'llama3'\nflavor = '8B'\n[training]\nbatch_size = 1\nseq_len = 4096\n"
                        "data_parallel_shard_degree = -1\ntensor_parallel_degree = 2\n[experimental]\npipeline_parallel_degree = 1\n"
                        "context_parallel_degree = 1\n[activation_checkpoint]\nmode = 'selective'\nselective_ac_option = 'op'\n"),
    "torchtitan-flags": ("a.sh", "NGPU=8 torchrun --nproc_per_node=8 --nnodes 1 -m torchtitan.train --module llama3 --config llama3_8b "
                         "--parallelism.tensor_parallel_degree 2 --parallelism.data_parallel_shard_degree 4 "
                         "--parallelism.data_parallel_replicate_degree 1 --parallelism.context_parallel_degree 1 "
                         "--parallelism.pipeline_parallel_degree 1 --parallelism.expert_parallel_degree 1 "
                         "--parallelism.fsdp_reshard_after_forward default "
                         "--training.local_batch_size 1 --training.global_batch_size 64 --training.seq_len 4096 --compile.enable "
                         "activation-checkpoint:full"),
    "torchtitan-registry": ("a.py", _REGISTRY.format("local_batch_size=1, seq_len=4096, global_batch_size=64")),
    "torchtitan-tokens": ("a.py", _REGISTRY.format("num_tokens_per_microbatch_per_dp_rank=2 * 4096, max_context_length=4096")),
    "axolotl": ("a.yaml", _AXOLOTL + "gradient_checkpointing: true\nfsdp_version: 2\nfsdp_config:\n  offload_params: false\n"
                "  reshard_after_forward: true\n  auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"),
    "axolotl-tp": ("a.yaml", _AXOLOTL + "fsdp_version: 2\nfsdp_config:\n  reshard_after_forward: true\n"
                   "tensor_parallel_size: 2\ncontext_parallel_size: 1\ndp_shard_size: 4\n"),
    "trainer": ("a.sh", _TRAINER + "--gradient_checkpointing True --fsdp 'full_shard auto_wrap'"),
    "trainer-plain": ("a.sh", _TRAINER + "--gradient_accumulation_steps 4"),
    "trainer-python": ("a.py", "args = TrainingArguments(per_device_train_batch_size=2, bf16=True, fsdp='full_shard',\n"
                       "    gradient_checkpointing=True, output_dir='out')\n"),
    "factory": ("a.yaml", "model_name_or_path: a/b\nstage: sft\nfinetuning_type: full\ncutoff_len: 1024\nbf16: true\n"
                "per_device_train_batch_size: 2\ngradient_accumulation_steps: 2\nfsdp: full_shard auto_wrap\n"),
    "accelerate-fsdp2": ("a.yaml", _ACCELERATE.format("FSDP") + "fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: true}\n"),
    "accelerate-sizes": ("a.yaml", _ACCELERATE.format("FSDP") + "fsdp_config: {fsdp_version: 2, fsdp_activation_checkpointing: true}\n"
                         "parallelism_config: {parallelism_config_dp_shard_size: 4, parallelism_config_tp_size: 2}\n"),
    "accelerate-fsdp1": ("a.yaml", _ACCELERATE.format("FSDP") + "fsdp_config: {fsdp_sharding_strategy: FULL_SHARD}\n"),
    "accelerate-deepspeed": ("a.yaml", _ACCELERATE.format("DEEPSPEED") + "deepspeed_config: {zero_stage: 3, "
                             "gradient_accumulation_steps: 2, offload_optimizer_device: none, offload_param_device: none}\n"),
    "deepspeed": ("a.json", '{"train_micro_batch_size_per_gpu": 2, "train_batch_size": 64, "zero_optimization": {"stage": 3}, '
                  '"bf16": {"enabled": true}}'),
    "deepspeed-auto": ("a.json", '{"train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto", '
                       '"gradient_accumulation_steps": "auto", "zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}}'),
    "deepspeed-steps": ("a.json", '{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, '
                        '"zero_optimization": {"stage": 1}, "bf16": {"enabled": true}}'),
    "nanotron": ("a.yaml", _NANOTRON.format(4, 2, 1, 1)),
    "nanotron-pp": ("a.yaml", _NANOTRON.format(2, 2, 2, 0)),
    "transformers": ("a.json", '{"tp_size": 2, "fsdp_size": 4, "dp_replicate_size": 1, "pp_size": 1}'),
    "openrlhf": ("a.sh", "deepspeed --num_gpus 8 --module openrlhf.cli.train_sft --ds.zero_stage 3 --train.micro_batch_size 2 "
                 "--train.batch_size 64 --data.max_len 1024 --model.gradient_checkpointing_enable"),
    "openrlhf-earlier": ("a.sh", "deepspeed --num_gpus 8 --module openrlhf.cli.train_sft --zero_stage 2 --micro_train_batch_size 2 "
                         "--train_batch_size 64 --max_len 1024 --bf16 --gradient_checkpointing"),
    "verl": ("a.sh", "torchrun --nproc_per_node=8 --nnodes=1 -m verl.trainer.fsdp_sft_trainer data.micro_batch_size_per_gpu=2 "
             "data.train_batch_size=64 data.max_length=1024 model.enable_gradient_checkpointing=True"),
}  # fmt: skip
"""Name and text of a file, by what it stands for."""
