"""Megatron-LM's jobs: forms of files, traps in them, refusals with legal values, and round trips."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import AutoparError
from autopar.foreign.frameworks.bridge import BRIDGE
from autopar.foreign.frameworks.megatron_layout import (
    counted_stages,
    ended_stages,
    layout_stages,
    layout_text,
)
from autopar.foreign.frameworks.registry import MEGATRON, read_job
from autopar.foreign.job import Facts, Finding, Job
from autopar.foreign.target import NotExpressible, SourceFile
from autopar.ir.layout import Layout
from autopar.ir.model_shape import ModelShape

SCRIPT = """#!/bin/bash
#SBATCH --nodes=4
#SBATCH --gpus-per-node=8
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NNODES=${SLURM_NNODES:-1}
WORLD_SIZE=$(($GPUS_PER_NODE*$NNODES))
TP=4
PP=${PP:-2}
DISTRIBUTED_ARGS="--nproc_per_node $GPUS_PER_NODE --nnodes $NNODES --master_addr localhost"
GPT_MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096   # width
    # --hidden-size 8192
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --seq-length 4096
    --max-position-embeddings 4096
    --position-embedding-type rope
    --swiglu
    --untie-embeddings-and-output-weights
    --vocab-size 128256
    --attention-dropout 0.0
    --hidden-dropout 0.0
)
TRAINING_ARGS=(
    --micro-batch-size 1 \\
    --global-batch-size $((16 * WORLD_SIZE / (TP * PP)))
    --lr 1e-4
    --train-iters 100
    --bf16
)
MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size $TP
    --pipeline-model-parallel-size $PP
    --sequence-parallel
    --use-distributed-optimizer
    --overlap-grad-reduce --overlap-param-gather
)
if [ -n "${WANDB_API_KEY}" ]; then
    TRAINING_ARGS+=(--wandb-project x)
fi
torchrun $DISTRIBUTED_ARGS pretrain_gpt.py \\
    ${GPT_MODEL_ARGS[@]} "${TRAINING_ARGS[@]}" ${MODEL_PARALLEL_ARGS[@]} \\
    --data-path $DATA_PATH --save "$1" --moe-novel-switch 3
"""
BASE = (
    "torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 "
    "--seq-length 4096 --max-position-embeddings 4096 --vocab-size 32000 --micro-batch-size 1 --global-batch-size 32 --bf16 "
)


def read(text: str, name: str = "train.sh", **files: str) -> Job:
    return MEGATRON.read(SourceFile(text, name, lambda asked: files.get(asked.replace(".", "_"))))


def found(job: Job, kind: str) -> list[str]:
    return [str(finding) for finding in job.findings if finding.kind == kind]


def refused(arguments: str, gpus: int = 8) -> list[Finding]:
    return MEGATRON.refusals(replace(read(BASE + arguments), gpus=gpus), gpus)


def test_a_script_of_arrays() -> None:
    job = read(SCRIPT)
    assert job.shape == ModelShape(32, 4096, 32, 8, 128, 14336, 128256, gated=True)
    assert job.layout == Layout(
        tp=4, pp=2, micro_batch=1, global_batch=64, zero=1, schedule="1f1b", sequence_parallel=True
    )
    assert (job.gpus, job.gpus_per_node, job.seq) == (32, 8, 4096)
    assert job.facts == Facts("bf16", dp_overlap=True, tp_overlap=False, pp_overlap=False, dropout=0.0, fused_loss=False,
                              fused_accumulation=True)  # fmt: skip
    assert job.unpriced == ("moe_novel_switch=3",)
    assert MEGATRON.refusals(job, 32) == []
    assert found(job, "unknown") == []


def test_a_dump_of_arguments() -> None:
    lines = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 4, "num_layers": 32, "hidden_size": 4096,
             "num_attention_heads": 32, "num_query_groups": 8, "group_query_attention": True, "ffn_hidden_size": 14336, "kv_channels": 128,
             "swiglu": True, "untie_embeddings_and_output_weights": True, "padded_vocab_size": 128256, "seq_length": 8192,
             "micro_batch_size": 1, "global_batch_size": 64, "world_size": 16, "data_parallel_size": 2, "sequence_parallel": True,
             "use_distributed_optimizer": True, "overlap_grad_reduce": False, "bf16": True, "fp16": False, "fp8": None,
             "virtual_pipeline_model_parallel_size": 2, "num_experts": None, "position_embedding_type": "rope", "hidden_dropout": 0.0,
             "recompute_granularity": None, "rampup_batch_size": None}  # fmt: skip
    text = "using world size: 16\n------------------------ arguments ------------------------\n"
    text += "".join(f"  {name} {'.' * (45 - len(name))} {value}\n" for name, value in lines.items())
    job = read(text, "log.txt")
    assert job.shape == ModelShape(32, 4096, 32, 8, 128, 14336, 128256, gated=True)
    expected = Layout(
        tp=2,
        pp=4,
        dp=2,
        vpp=2,
        micro_batch=1,
        global_batch=64,
        zero=1,
        schedule="interleaved_1f1b",
        sequence_parallel=True,
    )
    assert job.layout == expected
    assert (job.gpus, job.seq, job.unpriced) == (16, 8192, ())


def test_yaml_with_paths() -> None:
    text = """
model:
  num_layers: 32
  hidden_size: 4096
  num_attention_heads: 32
  num_query_groups: 8
  ffn_hidden_size: 14336
  gated_linear_unit: true
  share_embeddings_and_output_weights: false
  vocab_size: 128256
  seq_length: 8192
  position_embedding_type: rope
  tensor_model_parallel_size: 4
  pipeline_model_parallel_size: 2
  sequence_parallel: true
  hidden_dropout: 0.0
train: {micro_batch_size: 1, global_batch_size: 128}
ddp: {use_distributed_optimizer: true, overlap_grad_reduce: true}
"""
    job = read(text, "bridge.yaml")
    assert job.shape == ModelShape(32, 4096, 32, 8, 128, 14336, 128256, gated=True)
    assert (job.layout.tp, job.layout.pp, job.layout.zero, job.layout.global_batch) == (
        4,
        2,
        1,
        128,
    )


# ------------------------------------------------------------------------------------------- traps


def test_a_layout_overrides_virtual_stages() -> None:
    text = "{model: {num_layers: 8, hidden_size: 64, num_attention_heads: 4, pipeline_model_parallel_size: 2, " \
           "virtual_pipeline_model_parallel_size: 4, pipeline_model_parallel_layout: 'Et*3|t*5L'}}"  # fmt: skip
    job = read(text, "job.yaml")
    assert (job.layout.vpp, job.layout.stages) == (1, (3, 5))
    assert "the 4 virtual stages beside it do not count" in found(job, "contradiction")[0]
    both = refused(
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et*15|t*17L' --num-virtual-stages-per-pipeline-rank 2"
    )
    assert "No more than one of the following arguments" in both[0].theirs


def test_values_in_sourced_files() -> None:
    text = BASE.replace("--micro", "--tensor-model-parallel-size $TP --micro")
    job = read("source env.sh\n" + text)
    assert "tensor_model_parallel_size is $TP" in found(job, "unknown")[1]
    assert "the script reads env.sh" in found(job, "unknown")[0]
    assert read("source env.sh\n" + text, env_sh="TP=4").layout.tp == 4


def test_values_that_only_slurm_knows() -> None:
    job = read(BASE.replace("--nnodes 1", "--nnodes $SLURM_NNODES"))
    assert job.gpus is None
    assert found(job, "unknown") == []
    assert any(
        "nnodes is $SLURM_NNODES" in text and "those of the cluster" in text
        for text in found(job, "note")
    )
    assert (
        read("#SBATCH --nodes=3\n" + BASE.replace("--nnodes 1", "--nnodes $SLURM_NNODES")).gpus
        == 24
    )


def test_positional_arguments() -> None:
    job = read(BASE + "--tensor-model-parallel-size $1 $2 $EXTRA")
    words = found(job, "unknown")
    assert any("tensor_model_parallel_size is $1" in text for text in words)
    assert job.layout.tp == 1


def test_an_unquoted_bar() -> None:
    job = read(
        BASE
        + "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*15|t*17L --sequence-parallel"
    )
    assert job.layout.stages == (15, 17)
    assert "the shell takes | for a pipe" in found(job, "refused")[0]
    array = (
        "A=(--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*15|t*17L --swiglu)\n"
        + BASE
        + "${A[@]}"
    )
    assert read(array).layout.stages == (15, 17)
    assert "for a pipe" in found(read(array), "refused")[0]
    quoted = read(
        BASE + "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et*15|t*17L'"
    )
    assert (quoted.layout.stages, found(quoted, "refused")) == ((15, 17), [])


def test_names_and_comments_that_contradict_the_options() -> None:
    job = read("JOB=llama_tp8_pp1\n# uses TP=2\n" + BASE + "--tensor-model-parallel-size 4")
    words = found(job, "contradiction")
    assert job.layout.tp == 4
    assert "JOB says tp=8" in words[0] and "a comment says tp=2" in words[1]
    assert not found(
        read("JOB=llama_tp4\n# TP=4\n" + BASE + "--tensor-model-parallel-size 4"), "contradiction"
    )


def test_experts_that_do_not_divide_where_the_dense_part_does() -> None:
    moe = (
        "--num-experts 64 --moe-router-topk 2 --tensor-model-parallel-size 2 --sequence-parallel "
        "--disable-bias-linear --expert-model-parallel-size "
    )
    assert refused(moe + "4") == []
    (only,) = refused(moe + "8")  # the experts' tp is that of the dense part
    assert "the experts' tp 2 x ep 8" in only.what
    assert only.legal == ("--expert-model-parallel-size 4", "--expert-tensor-parallel-size 1")
    assert refused(moe + "8 --expert-tensor-parallel-size 1") == []


def test_layers_that_divide_only_with_embedding_and_loss() -> None:
    job = read(
        BASE.replace("--num-layers 32", "--num-layers 62") + "--pipeline-model-parallel-size 8"
    )
    (only,) = MEGATRON.refusals(job, 8)
    assert (
        "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
        in only.legal
    )
    counted = read(
        BASE.replace("--num-layers 32", "--num-layers 62")
        + "--pipeline-model-parallel-size 8 "
        + only.legal[-1]
    )
    assert MEGATRON.refusals(counted, 8) == []
    assert counted.layout.stages == (7, 8, 8, 8, 8, 8, 8, 7)


def test_the_batch_that_grows() -> None:
    job = read(BASE + "--rampup-batch-size 16 16 1000000")
    assert job.layout.global_batch == 32
    assert "the batch grows at first (rampup_batch_size 16 16 1000000)" in found(job, "note")[0]


def test_two_blocks_in_one_file() -> None:
    block = "{num_layers: 8, hidden_size: 64, tensor_model_parallel_size: %d}"
    job = read(f"actor: {{megatron: {block % 4}}}\nref: {{megatron: {block % 2}}}", "verl.yaml")
    assert job.layout.tp == 4
    assert (
        "stands in two blocks: actor.megatron.tensor_model_parallel_size=4"
        in found(job, "contradiction")[0]
    )


def test_a_key_twice() -> None:
    job = read("num_layers: 8\nhidden_size: 64\nnum_layers: 9\nmicro_batch_size: 1\n", "job.yaml")
    assert job.shape.layers == 9  # as YAML's loaders have it


def test_tags_make_no_objects(tmp_path: Path) -> None:
    with pytest.raises(AutoparError, match="could not determine a constructor"):
        read(
            f"num_layers: 8\nhidden_size: !!python/object/apply:os.system ['touch {tmp_path}/x']\n",
            "job.yaml",
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "echo hello\n",
        "# Title\n\nSome words.\n",
        '{"a": 1}',
        "[x]\ny = 1\n",
        "\x00\x01",
        "--tp 4",
    ],
)
def test_a_file_that_is_no_job(tmp_path: Path, text: str) -> None:
    path = tmp_path / "file.txt"
    path.write_text(text)
    with pytest.raises(AutoparError, match=r"is no job|no job"):
        read_job(path)
    with pytest.raises(AutoparError):
        read_job(path, "megatron")


def test_missing_files_and_unknown_targets(tmp_path: Path) -> None:
    with pytest.raises(AutoparError, match="does not exist"):
        read_job(tmp_path / "none.sh")
    path = tmp_path / "train.sh"
    path.write_text(SCRIPT)
    with pytest.raises(AutoparError, match=r"is not known; .*accelerate"):
        read_job(path, "jax")
    assert read_job(path).framework == "megatron"


# ---------------------------------------------------------------------------------------- refusals

BROKEN = {
    "--tensor-model-parallel-size 8 --num-attention-heads 20 --hidden-size 4000": (
        "must be a multiple of tensor",
        "--tensor-model-parallel-size 4",
    ),
    "--tensor-model-parallel-size 3": (
        "world size (8) is not divisible",
        "--tensor-model-parallel-size 2",
    ),
    "--tensor-model-parallel-size 8 --group-query-attention --num-query-groups 12": (
        "must be a multiple or divisor",
        "--tensor-model-parallel-size 4",
    ),
    "--pipeline-model-parallel-size 8 --num-layers 30": (
        "Number of layers should be divisible",
        "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
    ),
    "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 5": (
        "on each pipeline rank",
        "--num-virtual-stages-per-pipeline-rank 4",
    ),
    "--context-parallel-size 8 --seq-length 4100 --max-position-embeddings 8192": (
        "multiple of 2 * context-parallel-size",
        "--seq-length 4096",
    ),
    "--seq-length 8192": ("max_position_embeddings (4096)", "--max-position-embeddings 8192"),
    "--global-batch-size 33": ("is not divisible by micro batch size", "--global-batch-size 32"),
    "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 12": (
        "The remainder of M",
        "--global-batch-size 8",
    ),
    "--expert-model-parallel-size 2": (
        "num_experts must be non None",
        "--expert-model-parallel-size 1",
    ),
    "--num-experts 6 --expert-model-parallel-size 4": (
        "multiple of expert model parallel_size",
        "--expert-model-parallel-size 3",
    ),
    "--num-experts 8 --tensor-model-parallel-size 2": (
        "sequence parallelism must be used",
        "--sequence-parallel",
    ),
    "--overlap-param-gather --overlap-grad-reduce": (
        "only supported with distributed optimizer",
        "--use-distributed-optimizer",
    ),
    "--overlap-param-gather --use-distributed-optimizer": (
        "with --overlap-grad-reduce",
        "--overlap-grad-reduce",
    ),
    "--tensor-model-parallel-size 2 --tp-comm-overlap": (
        "only when sequence parallelism is enabled",
        "--sequence-parallel",
    ),
    "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --no-overlap-p2p-communication": (
        "greater than 2",
        "--pipeline-model-parallel-size 4",
    ),
    "--fp16": ("assert not args.bf16", "--bf16"),
    "--recompute-granularity selective --recompute-method uniform": (
        "not yet supported for selective",
        "drop --recompute-method",
    ),
    "--recompute-granularity full --recompute-num-layers 1": (
        "recompute_method must be",
        "--recompute-method uniform",
    ),
    "--recompute-granularity full --recompute-method uniform": (
        "recompute_num_layers must be between",
        "--recompute-num-layers 1",
    ),
    "--use-torch-fsdp2 --pipeline-model-parallel-size 2": (
        "not supported with pipeline parallelism",
        "--pipeline-model-parallel-size 1",
    ),
    "--use-torch-fsdp2 --num-experts 8 --expert-model-parallel-size 2": (
        "not supported with expert parallelism",
        "--expert-model-parallel-size 1",
    ),
    "--use-torch-fsdp2 --use-distributed-optimizer": (
        "distributed optimizer",
        "drop --use-distributed-optimizer",
    ),
    "--use-megatron-fsdp --data-parallel-sharding-strategy optim": (
        "requires the `fsdp_dtensor`",
        "--ckpt-format fsdp_dtensor",
    ),
    "--use-distributed-optimizer --num-distributed-optimizer-instances 3": (
        "is not divisible by",
        "--num-distributed-optimizer-instances 2",
    ),
    "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et*15|t*16L'": (
        "must match num_layers 32",
        None,
    ),
    "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et*8|t*8|t*16L'": (
        "must be divisible by pipeline_model_parallel_size",
        "--pipeline-model-parallel-size 1",
    ),
    "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 't*16|Et*16L'": (
        "first layer must be embedding",
        None,
    ),
    "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et*16|t*16L' --account-for-loss-in-pipeline-split": (
        "other pipeline layout",
        None,
    ),
    "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 3": ("middle", None),
}


@pytest.mark.parametrize("arguments", BROKEN)
def test_each_constraint_is_refused_with_legal_values(arguments: str) -> None:
    theirs, legal = BROKEN[arguments]
    findings = [finding for finding in refused(arguments) if theirs in finding.theirs]
    assert findings, refused(arguments)
    assert legal is None or legal in findings[0].legal


def test_connections() -> None:
    assert not refused("--tensor-model-parallel-size 2")
    job = read("export CUDA_DEVICE_MAX_CONNECTIONS=8\n" + BASE + "--tensor-model-parallel-size 2")
    assert MEGATRON.refusals(job, 8)[0].legal == ("export CUDA_DEVICE_MAX_CONNECTIONS=1",)
    fsdp = "--use-megatron-fsdp --data-parallel-sharding-strategy optim --ckpt-format fsdp_dtensor"
    job = read("export CUDA_DEVICE_MAX_CONNECTIONS=1\n" + BASE + fsdp)
    assert "CUDA_DEVICE_MAX_CONNECTIONS > 1 or unset" in MEGATRON.refusals(job, 8)[0].theirs


# ------------------------------------------------------------------------------------------ layouts


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("Et*7|t*8|t*9L", ["Ettttttt", "tttttttt", "tttttttttL"]),
        ("E|(t|)*3,m|m||L", ["E", "t", "t", "t", "m", "m", "", "L"]),
        ("Ettt|(tt|)*2,m|L", ["Ettt", "tt", "tt", "m", "L"]),
    ],
)
def test_layout_texts(text: str, stages: list[str]) -> None:
    assert layout_stages(text) == stages


def test_layout_texts_that_are_none() -> None:
    with pytest.raises(AutoparError, match="'x'"):
        layout_stages("Ex|L")
    with pytest.raises(AutoparError, match="repeats"):
        layout_stages("t*99999|(tttttttttt)*99999")


@given(st.lists(st.integers(1, 12), min_size=1, max_size=8))
def test_layouts_are_read_back(sizes: list[int]) -> None:
    assert [stage.count("t") for stage in layout_stages(layout_text(sizes))] == sizes


def test_stages_by_ends() -> None:
    assert ended_stages(32, 4, 1, 7, 5) == (7, 10, 10, 5)
    assert ended_stages(32, 4, 1, 7, None) == ()
    assert ended_stages(28, 4, 2, 4, None) == (2, 4, 4, 4, 2, 4, 4, 4)
    assert counted_stages(30, 4, True, True) == (7, 8, 8, 7)


# -------------------------------------------------------------------------------------- round trips


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Jobs that Megatron-LM can run."""
    tp, pp, cp = (
        draw(st.sampled_from([1, 2, 4])),
        draw(st.sampled_from([1, 2, 4])),
        draw(st.sampled_from([1, 2])),
    )
    dp = draw(st.sampled_from([2, 4, 8]))
    vpp = draw(st.sampled_from([1, 2])) if pp > 2 else 1
    layers = 4 * pp * vpp
    moe = draw(st.booleans())
    groups = draw(st.sampled_from([4, 8]))
    shape = ModelShape(
        layers,
        512,
        8,
        groups,
        64,
        1024,
        32000,
        experts=8 if moe else 0,
        top_k=2 if moe else 0,
        moe_ffn=256 if moe else 0,
        gated=draw(st.booleans()),
        tied=draw(st.booleans()),
        positions=draw(st.sampled_from(["rope", "learned", "none"])),
    )
    stages: tuple[int, ...] = ()
    if pp > 1 and draw(st.booleans()):
        sizes = [4] * (pp * vpp)
        sizes[0], sizes[-1] = draw(st.sampled_from([(3, 5), (5, 3)]))
        stages = tuple(sizes)
    zero = draw(st.sampled_from([0, 1] if tp * pp * cp > 1 or moe else [0, 1, 2, 3]))
    recompute = draw(st.sampled_from(["none", "selective", "full"]))
    number = 4 * pp
    layout = Layout(
        tp=tp,
        pp=pp,
        cp=cp,
        ep=2 if moe else 1,
        etp=1 if moe and draw(st.booleans()) else None,
        vpp=vpp,
        stages=stages,
        micro_batch=2,
        global_batch=2 * number * dp,
        zero=zero,
        copies=2 if zero == 1 and draw(st.booleans()) else 1,
        recompute=recompute,
        recompute_layers=2 if recompute == "full" and draw(st.booleans()) else 0,
        schedule="none" if pp == 1 else "interleaved_1f1b" if vpp > 1 else "1f1b",
        sequence_parallel=tp > 1 and (moe or draw(st.booleans())),
        offload=draw(st.sampled_from(["none", "optimizer"])) if zero < 2 else "none",
        order=draw(st.sampled_from(["", "dp-pp"])),
    )
    overlap = draw(st.booleans())
    facts = Facts(
        *draw(st.sampled_from([("bf16", ""), ("fp16", ""), ("fp32", ""), ("bf16", "delayed"), ("bf16", "mx"), ("bf16", "tensorwise")])),
        draw(st.sampled_from([None, "bf16"])), overlap, False, vpp > 1 and draw(st.booleans()), None,
        draw(st.sampled_from([None, "sgd"])), draw(st.sampled_from([0.0, 0.1])), draw(st.booleans()), draw(st.booleans()),
    )  # fmt: skip
    return Job("megatron", shape, layout, tp * pp * cp * dp, 2, 4096, facts)


@given(jobs())
@settings(max_examples=100, deadline=None)
def test_overrides_of_recipes_are_read_back(job: Job) -> None:
    if job.facts.precision == "fp32":
        with pytest.raises(NotExpressible, match="the nearest is mixed_precision"):
            BRIDGE.write(job)
        return
    written = BRIDGE.write(replace(job, framework="bridge"))
    again = BRIDGE.read(SourceFile(written.text, written.name))
    assert BRIDGE.reads(SourceFile(written.text, written.name))
    assert again.layout == job.layout
    assert (again.shape, again.gpus, again.seq) == (job.shape, job.gpus, job.seq)
    assert again.unpriced == () and again.findings == ()


@given(jobs())
@settings(max_examples=200, deadline=None)
def test_what_is_written_is_read_back(job: Job) -> None:
    written = MEGATRON.write(job)
    again = read(written.text)
    assert (again.shape, again.layout, again.facts) == (job.shape, job.layout, job.facts)
    assert (again.gpus, again.seq, again.gpus_per_node) == (job.gpus, job.seq, job.gpus_per_node)
    assert again.unpriced == () and again.findings == ()
    assert MEGATRON.refusals(again, job.gpus or 0) == []


@pytest.mark.parametrize(
    ("change", "nearest"),
    [
        ({"pp": 2, "schedule": "zero_bubble"}, "the nearest is 1f1b"),
        ({"recompute": "op"}, "the nearest are selective"),
        ({"offload": "parameters"}, "the nearest is --optimizer-cpu-offload"),
        ({"pp": 2, "schedule": "1f1b", "zero": 3}, "the nearest is ZeRO-1"),
        ({"order": "pp-tp-dp"}, "tp-cp-ep-dp-pp"),
    ],
)
def test_what_cannot_be_said(change: dict[str, object], nearest: str) -> None:
    with pytest.raises(NotExpressible, match=nearest):
        MEGATRON.write(Job("megatron", layout=replace(Layout(), **change), gpus=8))  # type: ignore[arg-type]
