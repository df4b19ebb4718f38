"""The frameworks of measured runs, as jobs of `request/frameworks.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from math import ceil, inf
from typing import Any

from autopar.foreign.published.options import Stated
from autopar.foreign.published.run import Run, RunPrediction, row_of_layout
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
    row: Stated = {"gpu": run.machine.gpu, "experts": run.shape.experts}
    row |= {"expert_bias": run.shape.expert_bias} | row_of_layout(run.layout, run.machine.gpus)
    for part in (run.precision, run.software):
        row |= {f.name: getattr(part, f.name) for f in fields(part)}
    return job_of_row(row)


_AS_IN_ROWS = {
    "gradients": "grads",
    "sequence_parallel": "sp",
    "scatters_messages": "scatter_gather_p2p",
    "compiled": "compile",
    "dispatches_once": "deepep",
}
"""Fields of `FrameworkJob` that rows have under another name."""


def job_of_row(row: Stated) -> FrameworkJob:
    """The job of a row, as far as its fields are known."""
    names = {f.name: _AS_IN_ROWS.get(f.name, f.name) for f in fields(FrameworkJob)}
    return FrameworkJob(**{name: row[of] for name, of in names.items() if of in row})


def by_framework(field: str, otherwise: Any = None) -> Callable[[Stated], Any]:
    """A function from the fields of a row to the value of a field of `Software` in the row's
    framework, or to `otherwise` if no rule decides it.
    """
    return lambda row: fields_of(job_of_row(row)).get(field, otherwise)


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
