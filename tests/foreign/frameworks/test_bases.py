"""Jobs whose values stand in other files too: bases are followed, and what is not there is unknown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from autopar.errors import AutoparError
from autopar.foreign.frameworks.registry import read_job, target_of
from autopar.foreign.job import Job


def files(folder: Path, **texts: str) -> Path:
    """Writes files; `a__b_py` is a/b.py."""
    for name, text in texts.items():
        parts = name.split("__")
        path = folder.joinpath(*parts[:-1], parts[-1][::-1].replace("_", ".", 1)[::-1])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def refused(job: Job, gpus: int) -> list[str]:
    """What the framework refuses for the job and for all that it may be besides."""
    target = target_of(job.framework)
    rules = [
        {f.theirs or f.what for f in target.refusals(one, gpus) if f.kind == "refused"}
        for one in (job, *job.others)
    ]
    return sorted(set.intersection(*rules))


BASE = """
def base_config(pp=4):
    cfg = ConfigContainer()
    cfg.model.num_layers = 61
    cfg.model.hidden_size = 2048
    cfg.model.num_attention_heads = 16
    cfg.model.seq_length = 4096
    cfg.model.pipeline_model_parallel_size = pp
    cfg.model.recompute_granularity = "selective"
    return cfg
"""
RECIPE = """
from {module} import base_config
def my_config():
    cfg = base_config()
    cfg.model.tensor_model_parallel_size = 2
    cfg.train.global_batch_size = 512
    cfg.train.micro_batch_size = 1
    return cfg
"""


@pytest.mark.parametrize(
    ("module", "name"), [("base", "base_py"), (".base", "base_py"), ("..common.base", "../common/base.py"), ("pkg.base", "pkg__base_py")]
)  # fmt: skip
def test_an_imported_base_recipe_counts(tmp_path: Path, module: str, name: str) -> None:
    folder = tmp_path / "recipes"
    files(folder, job_py=RECIPE.format(module=module))
    if name.startswith(".."):
        (tmp_path / "common").mkdir()
        (folder / name).write_text(BASE)
    else:
        files(folder, **{name: BASE})
    job = read_job(folder / "job.py")
    by = job.layout
    assert (by.tp, by.pp, by.recompute, job.shape.layers) == (2, 4, "selective", 61)
    assert job.unknown == () and job.seq == 4096


def test_a_base_that_is_not_there_leaves_all_it_may_set_unknown(tmp_path: Path) -> None:
    job = read_job(files(tmp_path, job_py=RECIPE.format(module="base")) / "job.py")
    assert {"pp", "cp", "ep", "vpp", "zero", "recompute"} <= set(job.unknown)
    assert not {"tp", "micro_batch", "global_batch"} & set(job.unknown)
    assert "base.base_config sets values too" in str(job.findings[0])
    assert refused(job, 6) == []  # pp may be 1 or 3


WAYS = {
    "dataclasses": """
@dataclass
class Parallel:
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 2
@dataclass
class Wide(Parallel):
    tensor_model_parallel_size: int = 4
def config():
    model = dataclasses.replace(Wide(), micro_batch_size=2)
    return Recipe(model=model, train=TrainingConfig(global_batch_size=64, micro_batch_size=2))
""",
    "unpacked": """
COMMON = dict(tensor_model_parallel_size=4, pipeline_model_parallel_size=1)
def config():
    model = GPT(**{**COMMON, "pipeline_model_parallel_size": 2})
    return Recipe(model=model, train=TrainingConfig(global_batch_size=64, micro_batch_size=2))
""",
    "loops": """
def config():
    cfg = deepcopy(other())
    for name, size in {"tensor": 4, "pipeline": 2}.items():
        setattr(cfg.model, f"{name}_model_parallel_size", size)
    return cfg
def other():
    cfg = ConfigContainer()
    cfg.model.tensor_model_parallel_size = 8
    cfg.train.micro_batch_size = 2
    cfg.train.global_batch_size = 64
    return cfg
""",
    "helpers": """
def _widen(cfg, tp=1, *, pp):
    cfg.model.tensor_model_parallel_size = tp
    if tp > 1 and cfg.train.micro_batch_size == 2:
        cfg.model.pipeline_model_parallel_size = pp
def config(fast=False):
    cfg = ConfigContainer(train=TrainingConfig(micro_batch_size=2, global_batch_size=2 ** 6))
    _widen(cfg, 4, pp=2)
    if fast:
        cfg.model.tensor_model_parallel_size = 8
    return cfg
""",
    "methods": """
class Base:
    def __init__(self, tp):
        self.model = GPT()
        self.model.tensor_model_parallel_size = tp
    def build(self):
        self.train = TrainingConfig(micro_batch_size=2, global_batch_size=64)
        return self
class Own(Base):
    def __init__(self):
        super().__init__(tp=4)
        self.model.pipeline_model_parallel_size = 2
def config():
    return Own().build()
""",
}


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_write_a_recipe(tmp_path: Path, way: str) -> None:
    by = read_job(f"{files(tmp_path, job_py=WAYS[way])}/job.py:config").layout
    assert (by.tp, by.pp, by.micro_batch, by.global_batch) == (4, 2, 2, 64)


def test_what_a_recipe_does_not_tell(tmp_path: Path) -> None:
    text = """
from tools import tune
def config(big):
    cfg = ConfigContainer()
    cfg.model.tensor_model_parallel_size = 4
    cfg.model.pipeline_model_parallel_size = 8 if big else 2
    cfg.train.micro_batch_size = 2
    if big:
        cfg.train.global_batch_size = 256
    {call}
    cfg.model.context_parallel_size = 2
    return cfg
"""
    job = read_job(files(tmp_path, job_py=text.format(call="pass")) / "job.py")
    assert set(job.unknown) == {"pp", "global_batch"}
    assert {one.layout.pp for one in (job, *job.others)} == {2, 8}
    job = read_job(files(tmp_path, job_py=text.format(call="tune(cfg)")) / "job.py")
    assert {"tp", "pp", "micro_batch", "recompute"} <= set(job.unknown)
    assert "cp" not in job.unknown  # it is set afterwards


def test_later_assignments_win_over_arguments(tmp_path: Path) -> None:
    text = """
import nemo_run as run
from nemo.collections.llm.recipes.llama3 import trainer
def pretrain_recipe(num_nodes=2):
    recipe = run.Partial(pretrain, trainer=trainer(tensor_parallelism=1, pipeline_parallelism=2, num_nodes=num_nodes, num_gpus_per_node=8),
                         data=run.Config(MockDataModule, seq_length=4096, global_batch_size=64, micro_batch_size=1))
    recipe.trainer.strategy.tensor_model_parallel_size = 4
    recipe.model.config.recompute_granularity = "full"
    return recipe
"""  # fmt: skip
    job = read_job(files(tmp_path, job_py=text) / "job.py")
    assert (job.layout.tp, job.layout.pp, job.layout.recompute, job.gpus) == (4, 2, "full", 16)
    assert "vpp" in job.unknown and "tp" not in job.unknown


def test_loops_and_texts_without_an_end(tmp_path: Path) -> None:
    for body in ("while True:\n    x = [x, x]", "for i in range(10 ** 9):\n    pass", "x = 'a' * 10 ** 9",
                 "x = '%999999999d' % 1", "x = 2 ** 10 ** 9", "def f():\n    return f()\nx = f()"):  # fmt: skip
        text = f"x = 1\n{body}\n{RECIPE.format(module='base')}"
        job = read_job(files(tmp_path, job_py=text, base_py=BASE) / "job.py")
        assert job.layout.pp == 4


def test_primus(tmp_path: Path) -> None:
    text = """
modules:
  pre_trainer:
    framework: megatron
    config: base.yaml
    model: m.yaml
    overrides: {tensor_model_parallel_size: 8, micro_batch_size: 1, global_batch_size: 256, recompute_granularity: null}
"""
    base = "extends: [deep.yaml]\ntensor_model_parallel_size: 1\nmicro_batch_size: 2\nrecompute_granularity: full\n"
    model = "num_layers: 16\nhidden_size: 2048\nnum_attention_heads: 16\nvocab_size: 32000\n"
    job = read_job(
        files(tmp_path / "a", job_yaml=text, base_yaml=base, deep_yaml="seq_length: 1024\nuse_distributed_optimizer: true\n", m_yaml=model)
        / "job.yaml"
    )  # fmt: skip
    by = job.layout
    assert (by.tp, by.micro_batch, by.global_batch, by.zero, by.recompute) == (8, 1, 256, 1, "none")
    assert (job.seq, job.shape.layers, job.unknown, job.findings) == (1024, 16, (), ())
    job = read_job(files(tmp_path / "b", job_yaml=text, m_yaml=model) / "job.yaml")
    assert "pp" in job.unknown and "zero" in job.unknown and "tp" not in job.unknown
    assert refused(job, 24) == []
    with pytest.raises(AutoparError, match="a job of maxtext"):
        read_job(files(tmp_path, job_yaml=text.replace("megatron", "maxtext")) / "job.yaml")
    titan = """
modules:
  pre_trainer:
    framework: torchtitan
    config: base.yaml
    overrides: {training: {local_batch_size: 4, seq_len: 8192}, parallelism: {tensor_parallel_degree: 8}}
"""
    titan_base = "training: {local_batch_size: 8}\nactivation_checkpoint: {mode: none}\n"
    job = read_job(files(tmp_path / "t", job_yaml=titan, base_yaml=titan_base) / "job.yaml")
    assert (job.framework, job.layout.tp, job.layout.micro_batch, job.seq) == ("torchtitan", 8, 4, 8192)  # fmt: skip
    assert job.layout.recompute == "none" and job.unknown == ()


def test_defaults_of_hydra(tmp_path: Path) -> None:
    sizes = "tensor_model_parallel_size: {}\npipeline_model_parallel_size: 1\n"
    model = "# @package _global_\nmodel: {num_layers: 8, hidden_size: 512, num_attention_heads: 8, micro_batch_size: 1}\n"
    text = "defaults:\n  - train: small\n  - {own}override /train: big\n  - model: m\nsystem: {{global_batch_size: 64}}\n"
    folder = files(
        tmp_path,
        train__small_yaml=sizes.format(1),
        train__big_yaml=sizes.format(4),
        model__m_yaml=model,
    )
    files(folder, job_yaml=text.format(own=""))
    job = read_job(folder / "job.yaml")
    assert (job.layout.tp, job.layout.global_batch, job.shape.layers) == (4, 64, 8)
    # `_self_` first: what is named later counts
    first = "defaults: [_self_, base]\ntensor_model_parallel_size: 8\nmicro_batch_size: 1\n"
    files(folder, first_yaml=first, base_yaml=sizes.format(2))
    assert read_job(folder / "first.yaml").layout.tp == 2
    files(folder, last_yaml=first.replace("_self_, base", "base"))
    assert read_job(folder / "last.yaml").layout.tp == 8
    files(folder, optional_yaml=first.replace("[_self_, base]", "[_self_, {optional env: none}]"))
    assert read_job(folder / "optional.yaml").findings == ()


def test_keys_twice_tabs_comments_and_null(tmp_path: Path) -> None:
    ds = '{\n\t"train_micro_batch_size_per_gpu": 2, # theirs\n\t/* old */ "zero_optimization": {"stage": 1},\n'
    ds += '\t"zero_optimization": {"stage": 2,},\n}'
    job = read_job(files(tmp_path, ds_json=ds) / "ds.json")
    assert (job.layout.micro_batch, job.layout.zero) == (2, 2)
    text = "tensor_model_parallel_size: 4\ntensor_model_parallel_size: 2\nmicro_batch_size: 1\n"
    text += "expert_model_parallel_size: null\nnum_layers_in_first_pipeline_stage: None\n"
    job = read_job(files(tmp_path, job_yaml=text) / "job.yaml")
    assert (job.layout.tp, job.layout.ep, job.layout.stages) == (2, 1, ())


def test_two_files_of_accelerate(tmp_path: Path) -> None:
    launch = "distributed_type: DEEPSPEED\nnum_processes: 8\nmixed_precision: bf16\ndeepspeed_config: {zero_stage: 3}\n"
    own = "model_name_or_path: x/y\nper_device_train_batch_size: 16\ngradient_checkpointing: true\nmax_length: 2048\nbf16: true\n"
    run = "accelerate launch --config_file launch.yaml sft.py --config own.yaml --gradient_accumulation_steps 2"
    folder = files(tmp_path, launch_yaml=launch, own_yaml=own, run_sh=run)
    job = read_job(folder / "run.sh")
    by = job.layout
    assert (by.zero, by.micro_batch, by.accumulation, by.recompute, job.seq) == (3, 16, 2, "full", 2048)  # fmt: skip
    assert job.unknown == () and job.gpus == 8
    assert set(read_job(folder / "own.yaml").unknown) == {"zero", "offload"}
    assert set(read_job(folder / "launch.yaml").unknown) == {"micro_batch", "accumulation"}
    here = 'HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"\n'
    (folder / "run.sh").write_text(here + run.replace("launch.yaml", '"$HERE/launch.yaml"'))
    assert read_job(folder / "run.sh").layout == by
    (folder / "run.sh").write_text(run.replace("launch.yaml", "$LAUNCH"))
    assert "zero" in read_job(folder / "run.sh").unknown
    (folder / "run.sh").write_text(run)
    (folder / "launch.yaml").unlink()
    job = read_job(folder / "run.sh")
    assert "zero" in job.unknown and "sharding stands in launch.yaml" in str(job.findings[0])


def test_branches_that_a_script_does_not_decide(tmp_path: Path) -> None:
    text = """
SIZE=$1
TP=1
if [ $SIZE = big ]; then TP=8; fi
case $SIZE in small) PP=1 ;; big) PP=4 ;; esac
if [ $2 = true ]; then do_options="--use-distributed-optimizer"; else do_options=""; fi
torchrun --nproc-per-node 8 --nnodes 4 pretrain_gpt.py --num-layers 16 --hidden-size 2048 --num-attention-heads 16 --vocab-size 50257 \
  --seq-length 2048 --micro-batch-size 1 --global-batch-size 64 --bf16 --overlap-grad-reduce --overlap-param-gather $do_options \
  --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP
"""
    path = files(tmp_path, run_sh=text) / "run.sh"
    job = read_job(path)
    assert {"tp", "pp", "zero"} <= set(job.unknown) and refused(job, 32) == []
    job = read_job(path, args=["big", "true"])
    assert (job.layout.tp, job.layout.pp, job.layout.zero, job.unknown) == (8, 4, 1, ())
    assert any("distributed optimizer" in words for words in refused(read_job(path, args=["big", "false"]), 32))  # fmt: skip


def test_options_that_come_from_outside(tmp_path: Path) -> None:
    text = "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 16 --hidden-size 2048 --num-attention-heads 16 " \
           "--micro-batch-size 1 " \
           "--vocab-size 50257 --seq-length 2048 --global-batch-size 64 --bf16 --overlap-param-gather " \
           "--overlap-grad-reduce $EXTRA_ARGS"  # fmt: skip
    job = read_job(files(tmp_path, run_sh=text) / "run.sh")
    assert {"tp", "zero", "recompute"} <= set(job.unknown)
    assert not {"micro_batch", "precision", "layers"} & set(job.unknown)
    assert refused(job, 8) == []


def test_swift_takes_the_precision_of_the_checkpoint(tmp_path: Path) -> None:
    text = "NPROC_PER_NODE=8 megatron sft {} --tensor_model_parallel_size 2 --micro_batch_size 1 --global_batch_size 8 --max_length 4096"
    job = read_job(files(tmp_path, run_sh=text.format("--load ckpt-mcore")) / "run.sh")
    assert job.unknown == ("precision",) and job.facts.precision == "bf16" and job.layout.zero == 1
    for named in (
        "--model Qwen/Qwen3-8B",
        "--load x --bf16 true",
        "--load x --torch_dtype bfloat16",
    ):
        job = read_job(files(tmp_path, run_sh=text.format(named)) / "run.sh")
        assert job.unknown == () and job.facts.precision == "bf16"


def test_optimizers_and_widths_of_forks(tmp_path: Path) -> None:
    text = 'echo \'{"zero_optimization": {"stage": 0}, "bf16": {"enabled": true}}\' > ds.json\ndeepspeed --num_gpus 8 pretrain_gpt.py ' \
           "--num-layers 8 --hidden-size 1024 --micro-batch-size 1 --bf16 --deepspeed --deepspeed_config ds.json"  # fmt: skip
    assert read_job(files(tmp_path, run_sh=text) / "run.sh").layout.zero == 1
    text = "num_layers: 4\nhidden_size: 4096\nmicro_batch_size: 1\nswiglu: true\nmultiple_of: 256\n"
    assert read_job(files(tmp_path, a_yaml=text) / "a.yaml").shape.ffn == 11008
    text += "hidden_dim_multiplier: 1.3\n"
    assert read_job(files(tmp_path, a_yaml=text) / "a.yaml").shape.ffn == 14336


NEOX = """{
  # as published
  "pipe_parallel_size": 4, "model_parallel_size": 2, "num_layers": 44, "hidden_size": 6144, "num_attention_heads": 64,
  "seq_length": 2048, "pos_emb": "rotary", "no_weight_tying": true, "vocab_size": 50432, "checkpoint_activations": true,
  "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 32, "zero_optimization": {"stage": 1, "overlap_comm": True},
  "fp16": {"enabled": true}, "optimizer": {"type": "Adam", "params": {"lr": 0.97e-4}},
}"""  # fmt: skip


def test_gpt_neox(tmp_path: Path) -> None:
    job = read_job(files(tmp_path, job_yml=NEOX) / "job.yml")
    by = job.layout
    assert (by.tp, by.pp, by.micro_batch, by.accumulation, by.zero, by.recompute) == (2, 4, 4, 32, 1, "full")  # fmt: skip
    assert (job.facts.precision, job.seq, job.shape.positions, job.shape.tied) == ("fp16", 2048, "rope", False)  # fmt: skip
    assert job.unknown == () and job.unpriced == () and refused(job, 96) == []
    assert "must be a whole number" in refused(job, 12)[0]
    target = target_of("neox")
    again = target.read(files_source(target.write(job).text))
    assert (again.layout.tp, again.layout.pp, again.layout.zero) == (2, 4, 1)
    alone = NEOX.replace('"train_micro_batch_size_per_gpu": 4, ', "").replace('"fp16": {"enabled": true}, ', "")  # fmt: skip
    assert {"micro_batch", "precision"} <= set(read_job(files(tmp_path, b_yml=alone) / "b.yml").unknown)  # fmt: skip


def files_source(text: str):
    """A source of YAML."""
    from autopar.foreign.target import SourceFile

    return SourceFile(text, "layout.yml")


@pytest.mark.parametrize(
    ("name", "text", "framework"),
    [
        ("a_yml", "base_emb_dim: 4096\nici_fsdp_parallelism: 8\n", "MaxText"),
        ("a_yaml", "recipe: TrainFinetuneRecipeForNextTokenPrediction\ndistributed: {tp_size: 2}\n", "NeMo Automodel"),
        ("a_yaml", "model: x\nmodel_class: llm\ndist_config:\n  name: fsdp2\nmicro_batch_size: 1\n", "LLaMA-Factory v1"),
        ("a_yaml", "model: {_component_: torchtune.models.llama3.llama3_8b}\nbatch_size: 2\n", "torchtune"),
        ("a_py", "parallel = dict(\n    zero1=dict(size=8), tensor=dict(size=2))\n", "InternEvo"),
    ],
)  # fmt: skip
def test_jobs_that_are_named_as_not_read(
    tmp_path: Path, name: str, text: str, framework: str
) -> None:
    files(tmp_path, **{name: text})
    with pytest.raises(AutoparError, match=f"a job of {framework}, which autopar does not read"):
        read_job(tmp_path / name.replace("_", "."))


def test_meshes_of_a_pipeline(tmp_path: Path) -> None:
    text = """
system: {{tensor_model_parallel_size: 1, pipeline_model_parallel_size: 8, hetero: {{enable_hetero: true,
  hetero_device_types: [A800, A800, A800], hetero_process_meshes: [{meshes}], hetero_pipeline_layer_split: [3, 5, 4, 4, 4, 4, 5, 3]}}}}
model: {{num_layers: 32, hidden_size: 512, num_attention_heads: 8, micro_batch_size: 1, global_batch_size: 32}}
"""  # fmt: skip
    same = "2, 1, 1, 2, 2, 2, 1, 1, 2, 4, 2, 1, 1, 2, 2"
    job = read_job(files(tmp_path, a_yaml=text.format(meshes=same)) / "a.yaml")
    assert (job.layout.tp, job.layout.pp, job.layout.dp) == (2, 8, 2)
    assert job.layout.stages == (3, 5, 4, 4, 4, 4, 5, 3) and job.unmodelled == ()
    job = read_job(files(tmp_path, a_yaml=text.format(meshes=same.replace("4, 2, 1", "4, 4, 1"))) / "a.yaml")  # fmt: skip
    assert job.unmodelled[0].place == "instead" and "other degrees of tp" in str(job.unmodelled[0])


def test_what_a_file_that_is_not_there_may_change(tmp_path: Path) -> None:
    text = """
TP=2
NLAYERS=16
source config.sh
NLAYERS=24
torchrun --nproc-per-node 8 --nnodes 1 pretrain_gpt.py --num-layers $NLAYERS --hidden-size 1024 --num-attention-heads 16 \
  --vocab-size 50257 --seq-length 2048 --micro-batch-size 1 --global-batch-size 64 --bf16 --tensor-model-parallel-size $TP
"""
    job = read_job(files(tmp_path, run_sh=text) / "run.sh")
    assert job.unknown == ("tp",) and job.shape.layers == 24  # it is set again


def test_precision_and_gradients_as_frameworks_fill_them_in(tmp_path: Path) -> None:
    text = "bf16: true\naccumulate_allreduce_grads_in_fp32: false\nmicro_batch_size: 1\nnum_layers: 2\n"
    assert read_job(files(tmp_path, a_yaml=text) / "a.yaml").facts.grads is None
    text += "grad_reduce_in_bf16: true\n"
    assert read_job(files(tmp_path, a_yaml=text) / "a.yaml").facts.grads == "bf16"
    axolotl = "base_model: x/y\nmicro_batch_size: 2\nbf16: auto\nfp16: false\n"
    assert read_job(files(tmp_path, b_yaml=axolotl) / "b.yaml").facts.precision == "bf16"


def test_what_sets_a_number_that_is_not_there(tmp_path: Path) -> None:
    text = """
from megatron.bridge.recipes.tools import degree, set_gpt_pipeline_model_parallel_layout
def config():
    cfg = ConfigContainer()
    cfg.model.num_layers = 8
    cfg.model.tensor_model_parallel_size = degree("tp")
    cfg.model.pipeline_model_parallel_size = 2
    cfg.train.micro_batch_size = 1
    cfg.dataset.seq_length = cfg.model.seq_length
    set_gpt_pipeline_model_parallel_layout(cfg.model{layout})
    return cfg
"""
    job = read_job(files(tmp_path, a_py=text.format(layout="")) / "a.py")
    assert {"tp", "seq", "stages"} <= set(job.unknown) and "micro_batch" not in job.unknown
    job = read_job(files(tmp_path, a_py=text.format(layout=', "Et*3|t*5L"')) / "a.py")
    assert job.layout.stages == (3, 5) and "stages" not in job.unknown


def test_heads_of_gpt_neox_divide_its_width(tmp_path: Path) -> None:
    text = re.sub(r'"num_attention_heads": \d+', '"num_attention_heads": 36', NEOX)
    said = refused(read_job(files(tmp_path, a_yml=text) / "a.yml"), 32)
    assert any("not divisible by 36" in words for words in said)
    text = text.replace('"seq_length"', '"attention_config": [[["mamba"], 44]], "seq_length"')
    assert refused(read_job(files(tmp_path, a_yml=text) / "a.yml"), 32) == []


def test_a_file_of_deepspeed_with_a_stray_key(tmp_path: Path) -> None:
    ds = '{"distributed_type": "DEEPSPEED", "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}'
    job = read_job(files(tmp_path, ds_json=ds) / "ds.json")
    assert (job.framework, job.layout.zero, job.layout.micro_batch) == ("deepspeed", 2, 2)


def test_recomputation_of_llama_factory_with_megatron(tmp_path: Path) -> None:
    text = "model_name_or_path: a\ncutoff_len: 4096\nper_device_train_batch_size: 1\nbf16: true\n" \
           "tensor_model_parallel_size: 1\npipeline_model_parallel_size: 4\nrecompute_granularity: full\n"  # fmt: skip
    job = read_job(files(tmp_path, a_yaml=text) / "a.yaml")
    assert job.layout.recompute == "full" and refused(job, 8) == []


def test_experts_of_gpt_neox(tmp_path: Path) -> None:
    more = '"vocab_size": 50432, "moe_num_experts": 8, "moe_top_k": 2, "activation": "swiglu"'
    text = NEOX.replace('"vocab_size": 50432', more)
    shape = read_job(files(tmp_path, a_yml=text) / "a.yml").shape
    assert (shape.experts, shape.top_k, shape.ffn, shape.gated) == (8, 2, 8192, True)


def test_more_branches_than_are_read_leave_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autopar.foreign.frameworks.registry.MOST_READINGS", 4)
    tests = "\n".join(f'if [ "$A{n}" = yes ]; then EXTRA="$EXTRA --seed {n}"; fi' for n in range(6))
    head = "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 4 --hidden-size 64 --num-attention-heads 4"
    rest = "--micro-batch-size 1 --global-batch-size 8 --seq-length 64 --max-position-embeddings 64 $EXTRA"
    job = read_job(files(tmp_path, run_sh=f"{tests}\n{head} {rest}\n") / "run.sh")
    assert any("12 branches" in str(part) for part in job.unmodelled), job.unmodelled


def test_a_file_that_is_not_there_moves_what_is_set_before_it(tmp_path: Path) -> None:
    openrlhf = "deepspeed --num_gpus 8 --module openrlhf.cli.train_sft --max_len 2048 " \
               "--train_batch_size 64 --micro_train_batch_size {} --zero_stage 3"  # fmt: skip
    verl = "torchrun --nproc_per_node=8 -m verl.trainer.fsdp_sft_trainer data.train_batch_size=64 " \
           "data.max_length=512 data.micro_batch_size_per_gpu={}"  # fmt: skip
    hf = "accelerate launch --num_processes 8 train.py --per_device_train_batch_size {} --bf16"
    for command in (openrlhf, verl, hf):
        for text, unknown in (
            ("MB=4\nsource cluster-values.sh\n" + command.format("$MB"), True),
            ("source cluster-values.sh\nMB=4\n" + command.format("$MB"), False),
            ("MB=4\nOTHER=1\nsource cluster-values.sh\n" + command.format("4"), False),
            (command.format("$MB"), True),
        ):
            job = read_job(files(tmp_path, run_sh=text) / "run.sh")
            assert ("micro_batch" in job.unknown) == unknown, (text, job.unknown)
            assert any(f.kind == "unknown" for f in job.findings) == unknown, job.findings
            (tmp_path / "cluster-values.sh").write_text("MB=2\n")
            if "source" in text:
                by = read_job(tmp_path / "run.sh").layout
                assert by.micro_batch == (2 if unknown else 4)
            (tmp_path / "cluster-values.sh").unlink()


@pytest.mark.parametrize(
    ("text", "field"),
    [("tp: $X\n", "tp"), ("tp: 1\noptimizer: {zero_stage: $X}\n", "zero")],
)
def test_values_of_nanotron_that_are_no_numbers(tmp_path: Path, text: str, field: str) -> None:
    text = "tokens: {micro_batch_size: 2, sequence_length: 64, batch_accumulation_per_replica: 1}\n" \
           f"parallelism:\n  dp: 2\n  pp: 1\n  pp_engine: 1f1b\n  {text}"  # fmt: skip
    job = read_job(files(tmp_path, n_yaml=text) / "n.yaml")
    assert field in job.unknown
