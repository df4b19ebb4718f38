"""A job for each constraint of a framework that breaks it, and what its own parser says.

    python -m tests.support.refusals [FRAMEWORK ...]

Prints a line for each: what `autopar check` says, and whether the framework's own parser refuses the
file too (yes, no: it looks later, or `-` where it is not installed).
"""

from __future__ import annotations

import contextlib
import io
import sys
from dataclasses import dataclass, replace

from autopar.errors import AutoparError
from autopar.foreign.frameworks.registry import TARGETS
from autopar.foreign.job import Exported, Finding, Job
from autopar.foreign.target import SourceFile
from autopar.foreign.writers.own_parsers import PARSERS, parsed_by_framework
from autopar.ir.model_shape import ModelShape

SHAPE = ModelShape(8, 1024, 16, 8, 64, 2816, 32000, gated=True)


@dataclass(frozen=True)
class Case:
    """A constraint of a framework, options or a file that break it on `gpus` devices, and words of
    the finding. `looks`: whether the framework's own parser refuses it too.
    """

    framework: str
    constraint: str
    text: str
    words: str
    looks: bool = True
    gpus: int = 8
    seq: int | None = None

    @property
    def source(self) -> SourceFile:
        """The file."""
        if self.framework == "megatron":
            head, _, options = self.text.rpartition("\n")
            lines = f"{head}\nARGS=(\n{_complete(options)}\n)\n"
            return SourceFile(lines + 'torchrun pretrain_gpt.py "${ARGS[@]}"\n', "train.sh")
        if self.framework == "torchtitan":
            command = "torchrun -m torchtitan.train --module llama3 --config llama3_8b"
            return SourceFile(f"{command} {self.text}\n", "train.sh")
        return SourceFile(self.text, "config.json" if self.text[:1] == "{" else "config.yaml")

    @property
    def job(self) -> Job:
        """What `autopar check` reads."""
        job = TARGETS[self.framework].read(self.source)
        shape = SHAPE if job.shape.lacking else job.shape
        return replace(job, gpus=self.gpus, shape=shape, seq=self.seq or job.seq)

    def findings(self) -> list[Finding]:
        """What is refused, while the file is read or after."""
        found = [*self.job.findings, *TARGETS[self.framework].refusals(self.job, self.gpus)]
        return [finding for finding in found if finding.kind == "refused"]

    def refusal(self) -> str | None:
        """The words of the framework's own parser; '' if it accepts the file, None without it."""
        written = Exported(_VERSIONS[self.framework], self.source.text)
        if self.framework not in PARSERS and self.framework != "megatron":
            return None
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                parsed_by_framework(written, self.job)
        except AutoparError as error:
            return None if "is not installed" in str(error) else str(error)
        return ""


_VERSIONS = {
    "megatron": "megatron-core 0.19", "torchtitan": "torchtitan 0.3", "deepspeed": "deepspeed 0.19", "accelerate": "accelerate 1.15",
    "transformers": "transformers 5.24", "nanotron": "nanotron 0.5",
}  # fmt: skip
_MODEL = {
    "num-layers": "8", "hidden-size": "1024", "ffn-hidden-size": "2816", "num-attention-heads": "16", "seq-length": "1024",
    "max-position-embeddings": "1024", "position-embedding-type": "rope", "vocab-size": "32000", "micro-batch-size": "1",
    "global-batch-size": "64", "bf16": "",
}  # fmt: skip


def _complete(text: str) -> str:
    """Arguments of Megatron-LM with those of a small model that they leave out."""
    rest = {name: value for name, value in _MODEL.items() if f"--{name} " not in f"{text} "}
    return " ".join([text, *(f"--{name} {value}".strip() for name, value in rest.items())])


TP, PP, CP, EP = (f"--{name}-parallel-size" for name in ("tensor-model", "pipeline-model", "context", "expert-model"))  # fmt: skip
_MOE = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 512 --disable-bias-linear"
_LAYOUT = "--pipeline-model-parallel-layout"
_VIRTUAL = "--num-virtual-stages-per-pipeline-rank"


def _megatron(*rows: tuple[str, str, str] | tuple[str, str, str, bool]) -> tuple[Case, ...]:
    return tuple(Case("megatron", *row) for row in rows)  # type: ignore[misc]


MEGATRON = _megatron(
    ("tp x pp x cp divides the devices", f"{CP} 3 --seq-length 960", "does not divide 8 devices"),
    ("tp divides the heads", f"{TP} 8 --num-attention-heads 12 --kv-channels 64", "does not divide 12 attention heads"),
    ("groups of keys are a multiple or divisor of tp", f"{TP} 4 --num-attention-heads 12 --kv-channels 64 --group-query-attention "
     "--num-query-groups 6", "6 groups of keys"),
    ("heads divide the width", "--num-attention-heads 12", "do not divide hidden size"),
    ("a sequence is a multiple of 2 cp", f"{CP} 2 --seq-length 1022", "no multiple of 2 x cp"),
    ("positions reach over the sequence", "--max-position-embeddings 512", "longer than 512 positions"),
    ("pp divides the layers", f"{PP} 4 --num-layers 10", "not divisible by pp=4"),
    ("middle stages are equal", f"{PP} 4 --decoder-first-pipeline-num-layers 3", "cannot be shared out"),
    ("first and last stage, or embedding and loss", f"{PP} 4 --num-layers 10 --decoder-first-pipeline-num-layers 1 "
     "--account-for-embedding-in-pipeline-split", "given together with embedding or loss"),
    ("virtual stages divide a rank's layers", f"{PP} 2 {_VIRTUAL} 3", "not divisible by 3 virtual stages"),
    ("virtual stages need a pipeline", f"{_VIRTUAL} 2", "virtual stages without a pipeline"),
    ("one way to say virtual stages", f"{PP} 2 {_VIRTUAL} 2 --num-layers-per-virtual-pipeline-stage 2", "are given together"),
    ("a layout excludes the other ways", f"{PP} 2 {_LAYOUT} 'Et*4|t*4L' --account-for-loss-in-pipeline-split", "beside a layout"),
    ("pp divides the stages of a layout", f"{PP} 2 {_LAYOUT} 'Et*4|t*2|t*2L'", "the layout has 3 stages"),
    ("a layout has all layers", f"{PP} 2 {_LAYOUT} 'Et*4|t*3L'", "the layout has 7 layers"),
    ("a layout begins with E and ends with L", f"{PP} 2 {_LAYOUT} 't*4|t*4L'", "begin with E"),
    ("micro-batch x dp divides the batch", "--global-batch-size 60", "no multiple of micro-batch"),
    ("micro-batches fill interleaved groups", f"{PP} 4 {_VIRTUAL} 2 --global-batch-size 12", "leave 2 behind", False),
    ("interleaving on 2 ranks overlaps messages", f"{PP} 2 {_VIRTUAL} 2 --no-overlap-p2p-communication", "without overlapped messages"),
    ("ep needs experts", f"{EP} 2", "has no experts"),
    ("ep divides the experts", f"{EP} 8 {_MOE.replace('8', '12', 1)}", "does not divide 12 experts"),
    ("etp x ep x pp divides the devices", f"{TP} 4 {EP} 4 --sequence-parallel {_MOE}", "does not divide 8 devices", False),
    ("experts with tp need sequence parallelism", f"{TP} 2 {_MOE}", "needs sequence parallelism", False),
    ("etp divides the width of experts", f"{TP} 4 --sequence-parallel {_MOE.replace('512', '510')}", "does not divide their width", False),
    ("experts with tp have no biases", f"{TP} 2 --sequence-parallel {_MOE.replace(' --disable-bias-linear', '')}", "experts with biases"),
    ("overlapped tp needs sequence parallelism", f"{TP} 2 --tp-comm-overlap", "without sequence parallelism"),
    ("overlapped gathers need sharded state", "--overlap-grad-reduce --overlap-param-gather", "without the distributed optimizer"),
    ("overlapped gathers need overlapped reduction", "--use-distributed-optimizer --overlap-param-gather", "without --overlap-grad-reduce"),
    ("host optimizer is precision-aware", "--use-distributed-optimizer --optimizer-cpu-offload", "without the precision-aware"),
    ("one half precision", "--fp16", "both on"),
    ("full recomputation has a method", "--recompute-granularity full --recompute-num-layers 1", "without a method"),
    ("full recomputation has a number of layers", "--recompute-granularity full --recompute-method block", "without a number of layers"),
    ("selective recomputation has no method", "--recompute-granularity selective --recompute-method uniform", "beside selective"),
    ("FSDP2 excludes pipelines", f"{PP} 2 --use-torch-fsdp2 --untie-embeddings-and-output-weights", "FSDP2 with a pipeline"),
    ("FSDP2 excludes ep", f"{EP} 2 {_MOE} --use-torch-fsdp2 --untie-embeddings-and-output-weights", "FSDP2 with expert"),
    ("FSDP2 excludes the distributed optimizer", "--use-torch-fsdp2 --use-distributed-optimizer", "FSDP2 with the distributed"),
    ("Megatron-FSDP has its checkpoints", "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params", "another checkpoint"),
    ("tp and cp want one connection", f"export CUDA_DEVICE_MAX_CONNECTIONS=8\n{TP} 2", "CUDA_DEVICE_MAX_CONNECTIONS=8 with tp"),
    ("Megatron-FSDP forbids one connection", "export CUDA_DEVICE_MAX_CONNECTIONS=1\n--use-megatron-fsdp --ckpt-format fsdp_dtensor "
     "--data-parallel-sharding-strategy optim_grads_params --no-gradient-accumulation-fusion --use-distributed-optimizer",
     "CUDA_DEVICE_MAX_CONNECTIONS=1 with FSDP"),
    ("copies divide dp x cp", "--use-distributed-optimizer --num-distributed-optimizer-instances 3", "do not divide dp x cp", False),
)  # fmt: skip
P = "--parallelism."
_PIPED = (
    f"{P}pipeline_parallel_degree 2 --training.disable_cuda_graphs {P}pipeline_parallel_schedule"
)
TORCHTITAN = (
    Case("torchtitan", "replicate x shard x cp x tp x pp is the world", f"{P}data_parallel_shard_degree 3", "there are 8 devices"),
    Case("torchtitan", "2 x tp x cp divides the sequence",
         f"{P}tensor_parallel_degree 4 {P}context_parallel_degree 2 --training.seq_len 1000",
         "no multiple of 16", False),
    Case("torchtitan", "tp divides the heads", f"{P}tensor_parallel_degree 16", "does not divide 8 heads of keys", False, 16),
    Case("torchtitan", "a pipeline has no CUDA graphs", f"{P}pipeline_parallel_degree 2", "with CUDA graphs"),
    Case("torchtitan", "1F1B has a stage a rank", f"{_PIPED} 1F1B {P}pipeline_parallel_layers_per_stage 8", "with 2 stages a rank", False),
    Case("torchtitan", "interleaving has 2 stages a rank or more",
         f"{_PIPED} Interleaved1F1B {P}pipeline_parallel_layers_per_stage 17", "with one stage a rank", False),
    Case("torchtitan", "V schedules have 2 stages a rank", f"{_PIPED} ZBVZeroBubble {P}pipeline_parallel_layers_per_stage 4",
         "a V schedule with", False),
    Case("torchtitan", "micro-batches divide the local batch", f"{P}pipeline_parallel_degree 2 --training.disable_cuda_graphs "
         f"--training.local_batch_size 5 {P}pipeline_parallel_microbatch_size 2", "no multiple of the micro-batch"),
    Case("torchtitan", "a memory budget needs torch.compile",
         f"{P}tensor_parallel_degree 1 activation-checkpoint:memory-budget", "without torch.compile"),
    Case("torchtitan", "asynchronous tp needs torch.compile", f"{P}tensor_parallel_degree 2 --compile.enable_async_tensor_parallel",
         "without torch.compile"),
    Case("torchtitan", "local batch x dp divides the batch", "--training.local_batch_size 2 --training.global_batch_size 24",
         "no multiple of 16", False),
)  # fmt: skip
_FSDP = ("distributed_type: FSDP\nnum_processes: 8\nmixed_precision: bf16\n"
         "fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: true}\n")  # fmt: skip
_S = "parallelism_config_"
OTHERS = (
    Case("deepspeed", "batch = micro-batch x steps x dp", '{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 1, '
         '"gradient_accumulation_steps": 4}', "is not 1 x 4 x 8"),
    Case("deepspeed", "parameters go to the host with ZeRO-3", '{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 1, '
         '"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}', "offload_param under ZeRO-2", False),
    Case("accelerate", "its keys are known", _FSDP + "tensor_parallel: 2\n", "no keys of Accelerate"),
    Case("accelerate", "the sizes multiply to the processes",
         _FSDP + f"parallelism_config: {{{_S}dp_shard_size: 3}}\n", "there are 8 processes"),
    Case("accelerate", "cp needs FSDP 2", f"distributed_type: MULTI_GPU\nnum_processes: 8\nparallelism_config: {{{_S}cp_size: 8}}\n",
         "needs FSDP 2", False),
    Case("accelerate", "sp needs DeepSpeed", _FSDP + f"parallelism_config: {{{_S}sp_size: 8}}\n", "needs DeepSpeed", False),
    Case("accelerate", "cp and sp exclude each other",
         _FSDP + f"parallelism_config: {{{_S}cp_size: 2, {_S}sp_size: 4}}\n", "cp and sp together"),
    Case("transformers", "FSDP excludes pipelines", '{"fsdp_size": 4, "pp_size": 2}', "with pp_size=2"),
    Case("transformers", "ep is a multiple of tp", '{"tp_size": 4, "fsdp_size": 2, "ep_size": 2}', "no multiple of tp_size"),
    Case("transformers", "ep divides fsdp x tp", '{"tp_size": 2, "fsdp_size": 4, "ep_size": 6}', "does not divide fsdp_size"),
    Case("nanotron", "dp x tp x pp x ep is the world",
         "parallelism: {dp: 3, tp: 2, pp: 1, pp_engine: 1f1b}\n", "there are 8 devices", False),
    Case("nanotron", "tp divides the heads", "parallelism: {dp: 1, tp: 16, pp: 1, pp_engine: 1f1b}\n", "heads of keys", False, 16),
    Case("nanotron", "1F1B has a micro-batch for each rank",
         "parallelism: {dp: 1, tp: 1, pp: 8, pp_engine: 1f1b}\n", "micro-batches for 1F1B", False),
    Case("nanotron", "ZeRO is 0 or 1",
         "parallelism: {dp: 8, tp: 1, pp: 1, pp_engine: 1f1b}\noptimizer: {zero_stage: 2}\n", "zero_stage 2", False),
)  # fmt: skip
CASES = (*MEGATRON, *TORCHTITAN, *OTHERS)


def main() -> None:
    """Prints the table of the frameworks that are named, by default of all."""
    wanted = sys.argv[1:] or [*_VERSIONS]
    for case in (case for case in CASES if case.framework in wanted):
        found = [finding for finding in case.findings() if case.words in finding.what]
        refusal = case.refusal()
        theirs = "-" if refusal is None else "yes" if refusal else "no"
        ours = "yes" if found else "NO"
        legal = found[0].legal[0] if found and found[0].legal else ""
        print(f"{case.framework:12s} {case.constraint:46s} {ours:4s} {theirs:4s} {legal}")


if __name__ == "__main__":
    main()
