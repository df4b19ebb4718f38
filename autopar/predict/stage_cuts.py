"""Where frameworks cut a model into the stages of a pipeline."""

from __future__ import annotations

from autopar.predict.run import Run
from autopar.request.framework_names import is_nanotron
from autopar.request.pins import EVEN
from autopar.targets.job import ModelShape
from autopar.targets.nanotron_stages import stages_by_cost


def stages_pin(run: Run) -> str:
    """The pin `stages` that cuts the pipeline as the framework of the run does: a text of sizes for
    nanotron with one stage a rank, else `even`. Megatron, DeepSpeed and torchtitan deal layers evenly.
    """
    if not is_nanotron(run.software.framework) or run.degrees.vpp > 1:
        return EVEN
    dims = run.dims
    shape = ModelShape(
        layers=dims.layers,
        hidden=dims.hidden,
        heads=dims.heads,
        ffn=dims.ffn,
        vocab=dims.vocab,
        moe_ffn=dims.moe_ffn,
        gated=dims.activation == "swiglu",
    )
    return "-".join(map(str, stages_by_cost(shape, run.degrees.pp, run.degrees.padded_vocab)))
