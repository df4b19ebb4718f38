"""What a framework's own parser, where it is installed, reads from an exported text."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any
from unittest import mock

from autopar.errors import AutoparError
from autopar.foreign.frameworks.megatron_options import STRATEGIES
from autopar.foreign.frameworks.torchtitan_options import SCHEDULE_NAMES
from autopar.foreign.job import Exported, Job
from autopar.foreign.limits.stage_cuts import even_stages

Fields = dict[str, Any]
"""Fields of a layout by name, as the framework reads them."""


def parsed_by_framework(written: Exported, job: Job) -> Fields:
    """The fields of the layout that the framework's own parser reads from an exported text. Raises
    AutoparError if the framework is not installed, has no parser that runs here, or refuses the text.
    """
    name = written.target.partition(" ")[0]
    parser = PARSERS.get(name)
    if parser is None:
        raise AutoparError(
            f"{name} has no parser that autopar can run: start the job once on one device"
        )
    try:
        return parser(written.text, job)
    except SystemExit as error:  # of argparse, which has printed why
        raise AutoparError(f"{written.target} refuses this text: exit {error.code}") from None
    except ImportError as error:
        raise AutoparError(
            f"{written.target} is not installed here ({error}): pip install {name}"
        ) from None
    except AutoparError:
        raise
    except Exception as error:  # whatever the framework raises is its refusal
        raise AutoparError(
            f"{written.target} refuses this text: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        ) from None


def disagreements(written: Exported, job: Job) -> tuple[str, ...]:
    """The fields in which the framework reads another layout than the job's, one phrase each; () if
    it reads the same. Raises AutoparError as `parsed_by_framework`.
    """
    by, gpus = job.layout, job.gpus or 1
    mine = {f.name: getattr(by, f.name) for f in fields(by)}
    mine |= {"dp": by.dp_on(gpus), "global_batch": by.batch_on(gpus), "seq": job.seq}
    mine |= {"stages": by.stages or even_stages(job.shape.layers, by.pp * by.vpp)}
    found = parsed_by_framework(written, job)
    return tuple(
        f"{name}: {value} there, {mine[name]} here"
        for name, value in found.items()
        if value != mine[name]
    )


@contextmanager
def _environment(**changes: str) -> Iterator[None]:
    """A context with other environment variables."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def _accelerate(text: str, job: Job) -> Fields:
    arguments: Any = import_module("accelerate.commands.config.config_args")
    parallelism: Any = import_module("accelerate.parallelism_config")
    with TemporaryDirectory() as folder:
        path = os.path.join(folder, "config.yaml")
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        config = arguments.ClusterConfig.from_yaml_file(path)
    sizes = {
        name.removeprefix("parallelism_config_"): value
        for name, value in config.parallelism_config.items()
    }
    if not sizes:
        return {"dp": config.num_processes, "zero": 0}
    read = parallelism.ParallelismConfig(**sizes)
    if read.total_size != config.num_processes:
        raise AutoparError(
            f"accelerate reads {read.total_size} ranks and {config.num_processes} processes"
        )
    fsdp = config.fsdp_config
    zero = 0 if not fsdp else 3 if fsdp["fsdp_reshard_after_forward"] else 2
    copies = {"copies": read.dp_replicate_size} if zero else {}
    return {
        "tp": read.tp_size,
        "cp": read.cp_size,
        "dp": read.data_parallel_size,
        "zero": zero,
    } | copies


def _transformers(text: str, job: Job) -> Fields:
    distributed: Any = import_module("transformers.distributed.configuration_utils")
    read = distributed.DistributedConfig(**json.loads(text))
    return {
        "tp": read.tp_size,
        "pp": read.pp_size,
        "dp": read.dp_size,
        "ep": read.ep_size,
        "copies": read.dp_replicate_size,
    }


class _Ranks:
    """The ranks of a job, in the form that DeepSpeed asks for."""

    def __init__(self, dp: int) -> None:
        self.dp = dp

    def get_data_parallel_world_size(self) -> int:
        return self.dp

    def get_sequence_parallel_world_size(self) -> int:
        return 1


def _deepspeed(text: str, job: Job) -> Fields:
    with _environment(DS_ACCELERATOR="cpu"):
        config: Any = import_module("deepspeed.runtime.config")
        ranks = _Ranks(job.layout.dp_on(job.gpus or 1))
        with mock.patch.object(config.dist, "get_rank", return_value=0):  # there is no group
            read = config.DeepSpeedConfig(json.loads(text), mpu=ranks)
    return {
        "global_batch": read.train_batch_size,
        "micro_batch": read.train_micro_batch_size_per_gpu,
        "zero": read.zero_config.stage,
    }


def _without_devices() -> None:
    """Lets modules with kernels of triton be imported where there is no device."""
    driver: Any = import_module("triton.runtime").driver
    try:
        driver.active.get_current_target()
    except RuntimeError:
        driver.set_active(mock.MagicMock())


def _megatron(text: str, job: Job) -> Fields:
    _without_devices()
    module: Any = import_module("megatron.training.arguments")
    module.get_device_arch_version = lambda: 9  # there may be no device to ask
    words = shlex.split(text.partition("ARGS=(")[2].partition("\n)")[0])
    before, sys.argv = sys.argv, ["pretrain_gpt.py", *words]
    try:
        # it looks at the variable only for tp and cp
        stated = re.search(r"^export CUDA_DEVICE_MAX_CONNECTIONS=(\w+)", text, re.MULTILINE)
        connections = stated[1] if stated else "1"
        ranks = {"WORLD_SIZE": str(job.gpus or 1), "RANK": "0"}
        with _environment(CUDA_DEVICE_MAX_CONNECTIONS=connections, **ranks):
            args = module.parse_args()
            if args.use_megatron_fsdp and not stated:
                os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS")
            module.validate_args(args)
            args.apply_rope_fusion = False  # a kernel of Transformer Engine
            config = module.core_transformer_config_from_args(args)
    finally:
        sys.argv = before
    fsdp = args.use_megatron_fsdp
    zero = STRATEGIES[args.data_parallel_sharding_strategy] if fsdp else None
    vpp = args.virtual_pipeline_model_parallel_size or 1
    pp = args.pipeline_model_parallel_size
    block = args.recompute_method == "block"
    return {
        "tp": args.tensor_model_parallel_size,
        "pp": pp,
        "cp": args.context_parallel_size,
        "dp": args.data_parallel_size,
        "ep": args.expert_model_parallel_size,
        "vpp": vpp,
        "stages": _stages_of_megatron(config, pp, vpp),
        "micro_batch": args.micro_batch_size,
        "global_batch": args.global_batch_size,
        "seq": args.seq_length,
        "zero": int(args.use_distributed_optimizer) if zero is None else zero,
        "copies": args.num_distributed_optimizer_instances,
        "recompute": args.recompute_granularity or "none",
        "recompute_layers": args.recompute_num_layers if block else 0,
        "sequence_parallel": args.sequence_parallel,
        "offload": "optimizer" if args.optimizer_cpu_offload else "none",
        "order": "dp-pp" if args.use_tp_pp_dp_mapping else "",
    }


def _stages_of_megatron(config: Any, pp: int, vpp: int) -> tuple[int, ...]:
    """The layers of each stage, as Megatron-LM itself counts them."""
    if config.pipeline_model_parallel_layout is not None:
        layout = config.pipeline_model_parallel_layout.layout  # by rank, then by its stage
        parts = [layout[n % pp][n // pp] for n in range(pp * vpp)]
        return tuple(sum(layer.name == "decoder" for layer in part) for part in parts)
    block: Any = import_module("megatron.core.transformer.transformer_block")
    count = block.get_num_layers_to_build
    return tuple(count(config, n // pp if vpp > 1 else None, n % pp) for n in range(pp * vpp))


def _torchtitan(text: str, job: Job) -> Fields:
    _without_devices()
    config: Any = import_module("torchtitan.config")
    policies: Any = import_module("torchtitan.distributed.activation_checkpoint")
    dims: Any = import_module("torchtitan.distributed.parallel_dims")
    plain = text.partition("torchtitan.train")[2].replace("\\\n", " ")
    plain = plain.replace("--module MODULE", "--module llama3")  # the user's to choose
    words = shlex.split(plain.replace("--config CONFIG", "--config llama3_8b"))
    read = config.ConfigManager().parse_args(words)
    by, training = read.parallelism, read.training
    ranks = dims.ParallelDims.from_config(by, job.gpus or 1)
    sharded = ranks.dp_shard * ranks.cp > 1
    policy = {policies.SelectiveAC.Config: "op", policies.FullAC.Config: "full"}
    own = by.pipeline_parallel_microbatch_size if ranks.pp > 1 else training.local_batch_size
    found = {
        "tp": ranks.tp,
        "pp": ranks.pp,
        "cp": ranks.cp,
        "dp": ranks.dp_replicate * ranks.dp_shard,
        "ep": ranks.ep,
        "zero": {"never": 2, "always": 3}.get(by.fsdp_reshard_after_forward, 0) if sharded else 0,
        "copies": ranks.dp_replicate if sharded else 1,
        "micro_batch": own,
        "global_batch": training.global_batch_size,
        "seq": training.seq_len,
        "sequence_parallel": by.enable_sequence_parallel and ranks.tp > 1,
        "recompute": policy.get(type(read.activation_checkpoint), "none"),
        "offload": "parameters" if training.enable_cpu_offload else "none",
    }
    if ranks.pp == 1:
        return found
    parts = by.module_fqns_per_model_part or ()
    stages = tuple(sum(name.startswith("layers.") for name in part) for part in parts)
    named = by.pipeline_parallel_schedule
    schedule = SCHEDULE_NAMES.get(named.lower(), named)
    return found | {"vpp": len(stages) // ranks.pp, "stages": stages, "schedule": schedule}


class _Parsed(Exception):
    """Carries the arguments that a trainer has parsed, before it trains."""


def _folder_of(package: str) -> Path:
    """The folder of an installed package, which is not imported. Raises ImportError without one."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"No module named {package!r}")
    return Path(spec.submodule_search_locations[0])


def _words_behind(text: str, program: str) -> list[str]:
    """The words behind the program that a script starts."""
    return shlex.split(text.partition(program)[2].replace("\\\n", " "))


def _openrlhf(text: str, job: Job) -> Fields:
    """Runs the part of its trainer that parses arguments. What the trainer imports for the training
    itself is left out.
    """

    def stop(args: Any) -> None:
        raise _Parsed(args)

    folder = _folder_of("openrlhf")
    utils: Any = ModuleType("openrlhf.utils")
    utils.__path__ = [str(folder / "utils")]
    utils.get_strategy, utils.get_tokenizer = stop, None
    unused = "datasets datasets.utils models trainer trainer.sft_trainer".split()
    modules = {f"openrlhf.{name}": mock.MagicMock() for name in unused}
    words = ["train_sft", *_words_behind(text, "openrlhf.cli.train_sft")]
    try:
        with (
            mock.patch.dict(sys.modules, modules | {"openrlhf.utils": utils}),
            mock.patch.object(sys, "argv", words),
        ):
            runpy.run_path(str(folder / "cli" / "train_sft.py"), run_name="__main__")
    except _Parsed as parsed:
        (read,) = parsed.args
    return {
        "tp": read.ds.tensor_parallel_size,
        "cp": read.ds.ring_attn_size,
        "zero": read.ds.zero_stage,
        "micro_batch": read.train.micro_batch_size,
        "global_batch": read.train.batch_size,
        "recompute": "full" if read.model.gradient_checkpointing_enable else "none",
        "offload": "optimizer" if read.ds.adam_offload else "none",
    } | ({"seq": read.data.max_len} if job.seq else {})


def _verl(text: str, job: Job) -> Fields:
    hydra: Any = import_module("hydra")
    folder = _folder_of("verl") / "trainer" / "config"
    with hydra.initialize_config_dir(config_dir=str(folder), version_base=None):
        read = hydra.compose("ppo_trainer", overrides=_words_behind(text, "verl.trainer.main_ppo"))
    actor, gpus = read.actor_rollout_ref.actor, read.trainer.n_gpus_per_node * read.trainer.nnodes
    cp, fsdp = actor.ulysses_sequence_parallel_size, actor.fsdp_config
    group = fsdp.fsdp_size if fsdp.fsdp_size > 0 else gpus
    return {
        "cp": cp,
        "dp": gpus // cp,
        "micro_batch": actor.ppo_micro_batch_size_per_gpu,
        "global_batch": actor.ppo_mini_batch_size * read.actor_rollout_ref.rollout.n,
        "zero": 0 if gpus == 1 else 3 if fsdp.reshard_after_forward else 2,
        "copies": gpus // group,
        "recompute": "full"
        if read.actor_rollout_ref.model.enable_gradient_checkpointing
        else "none",
        "offload": "parameters" if fsdp.offload_policy else "none",
    }


PARSERS: dict[str, Callable[[str, Job], Fields]] = {
    "accelerate": _accelerate,
    "transformers": _transformers,
    "deepspeed": _deepspeed,
    "megatron-core": _megatron,
    "torchtitan": _torchtitan,
    "openrlhf": _openrlhf,
    "verl": _verl,
}
"""Parsers by the first word of `Exported.target`."""
