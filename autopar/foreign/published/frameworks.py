"""The frameworks of measured runs, as jobs of `request/frameworks.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import ceil, inf
from typing import Any

from autopar.foreign.published.options import Stated
from autopar.foreign.published.run import Run, RunPrediction
from autopar.request.framework_names import is_nanotron, is_nvidia
from autopar.request.frameworks import FrameworkJob, fields_of

SAVING: dict[str, Any] = {"gathers_again": True}
"""Fields of `Software` that save memory, and that a framework switches on where a layout does not
fit without them.
"""


def saves_where_tight(run: Run) -> bool:
    """Whether a run that does not fit is assumed to use what `SAVING` has: nanotron's
    tp_recompute_allgather is an option that runs do not print.
    """
    return is_nanotron(run.software.framework)


def run_job(run: Run) -> FrameworkJob:
    """The job of a run."""
    by, precision, software = run.layout, run.precision, run.software
    return FrameworkJob(
        framework=software.framework,
        year=software.year,
        compute=precision.compute,
        matmul=precision.matmul,
        recipe=precision.recipe,
        gradients=precision.grads,
        zero=by.zero,
        sharding=software.sharding,
        dp=by.dp_on(run.machine.gpus),
        tp=by.tp,
        pp=by.pp,
        sequence_parallel=by.sequence_parallel,
        scatters_messages=software.scatter_gather_p2p,
        compiled=software.compile,
        gpu=run.machine.gpu,
        experts=run.shape.experts,
        drops_tokens=software.drops_tokens,
        dispatches_once=software.deepep,
        sequential_experts=software.sequential_experts,
        expert_bias=run.shape.expert_bias,
    )


def by_framework(field: str, otherwise: Any = None) -> Callable[[Stated], Any]:
    """A function from the fields of a row to the value of a field of `Software` in the row's
    framework, or to `otherwise` if no rule decides it.
    """
    return lambda row: fields_of(_job_of_row(row)).get(field, otherwise)


def printed_scope(framework: str) -> str:
    """What a framework prints as its memory, where a source does not say: nanotron prints the peaks
    of torch's allocator (src/nanotron/helpers.py, create_table_log); '' if unknown.
    """
    return "reserved" if is_nanotron(framework) else ""


def prints_first_rank(framework: str) -> bool:
    """Whether a framework prints the memory of the first pipeline rank: nanotron's rank 0 writes its
    own (src/nanotron/helpers.py, log_throughput).
    """
    return is_nanotron(framework)


def gather_buffer_bytes(run: Run) -> int:
    """Bytes of the buffers in which a framework gathers activations over tp: nanotron keeps one for
    inputs of column-parallel products and one for gradients of row-parallel ones
    (src/nanotron/parallel/utils.py, MemoryBuffer). Each holds a micro-batch in 16 bits.
    """
    if not is_nanotron(run.software.framework) or run.layout.tp == 1:
        return 0
    return 2 * 2 * run.layout.micro_batch * run.seq * run.shape.hidden


def bias_operations(run: Run) -> int:
    """Operations of the host for the biases of a rank's experts, in forward and backward: a product,
    a sum and four operations of their gradients for each (megatron-core's TEGroupedMLP._apply_bias).
    """
    local = run.shape.experts // run.layout.ep if run.shape.expert_bias else 0
    return 6 * local


def offloads_where_tight(run: Run) -> bool:
    """Whether a run that does not fit is assumed to move activations of layers to the host, as
    NVIDIA's recipes with Megatron-FSDP do. Tables do not print it. Source: Megatron-Bridge,
    scripts/performance/configs, cpu_offloading_num_layers: 5 to 40 of 80 layers of Llama 3 70B.
    """
    return is_nvidia(run.software.framework) and run.software.sharding in ("fsdp", "hsdp")


def offloaded(run: Run, prediction: RunPrediction) -> RunPrediction:
    """The prediction with the activations of as few layers on the host as let it fit, at most all
    but two. Transfers are taken to be hidden: NVLink-C2C has half the bandwidth of NVLink.
    """
    over = prediction.peak_memory_bytes - (run.machine.memory_bytes or inf)
    layer_bytes = prediction.kept_bytes / run.shape.layers
    if over <= 0 or not layer_bytes:
        return prediction
    moved = min(ceil(over / layer_bytes), run.shape.layers - 2)
    size_bytes = prediction.peak_memory_bytes - moved * layer_bytes
    return replace(prediction, peak_memory_bytes=size_bytes)


def _job_of_row(row: Stated) -> FrameworkJob:
    return FrameworkJob(
        framework=row["framework"],
        year=row["year"],
        compute=row["compute"],
        matmul=row["matmul"],
        recipe=row["recipe"],
        gradients=row["grads"],
        zero=row["zero"],
        sharding=row["sharding"],
        dp=row["dp"],
        tp=row["tp"],
        pp=row["pp"],
        sequence_parallel=row["sp"],
        scatters_messages=row.get("scatter_gather_p2p", False),
    )
