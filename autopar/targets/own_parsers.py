"""What a framework's own parser, where it is installed, reads from an exported text."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from tempfile import TemporaryDirectory
from typing import Any

from autopar.errors import AutoparError
from autopar.targets.job import Exported, Job

Fields = dict[str, int]
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
    mine = {
        name: getattr(by, name)
        for name in ("tp", "pp", "cp", "ep", "copies", "micro_batch", "zero")
    }
    mine |= {"dp": by.dp_on(gpus), "global_batch": by.batch_on(gpus)}
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
        read = config.DeepSpeedConfig(json.loads(text), mpu=_Ranks(job.layout.dp_on(job.gpus or 1)))
    return {
        "global_batch": read.train_batch_size,
        "micro_batch": read.train_micro_batch_size_per_gpu,
        "zero": read.zero_config.stage,
    }


PARSERS: dict[str, Callable[[str, Job], Fields]] = {
    "accelerate": _accelerate,
    "transformers": _transformers,
    "deepspeed": _deepspeed,
}
"""Parsers by the first word of `Exported.target`."""
