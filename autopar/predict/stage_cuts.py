"""Where frameworks cut a model into the stages of a pipeline."""

from __future__ import annotations

from autopar.predict.run import Run
from autopar.request.framework_names import is_nanotron
from autopar.request.pins import EVEN


def stages_pin(run: Run) -> str:
    """The pin `stages` that cuts the pipeline as the framework of the run does: a text of sizes for
    nanotron with one stage a rank, else `even`. Megatron, DeepSpeed and torchtitan deal layers evenly.
    """
    if is_nanotron(run.software.framework) and run.degrees.vpp == 1:
        return "-".join(map(str, _by_cost(run)))
    return EVEN


def _by_cost(run: Run) -> list[int]:
    """The layers of each stage in nanotron. A stage ends behind the block with which the running
    cost reaches its even share (src/nanotron/models/base.py, build_model). Layers and head have the
    cost of their products with parameters (src/nanotron/models/llama.py, get_block_compute_costs).

    A layer that ends on a share exactly ends its stage, though the source would add another one.
    With 16 layers in 2 and 4 stages, the first stage runs as 10 and 5 layers would.
    """
    dims, ranks = run.dims, run.degrees.pp
    layer = dims.hidden * (4 * dims.heads * dims.head_dim + 3 * dims.ffn)
    total = dims.layers * layer + run.degrees.padded_vocab * dims.hidden
    sizes, stage = [0] * ranks, 0
    for number in range(dims.layers):
        sizes[stage] += 1
        if (number + 1) * layer * ranks >= total * (stage + 1):
            stage += 1
    return sizes
