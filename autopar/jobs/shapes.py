"""The model of a job, from the dimensions that its file says."""

from __future__ import annotations

from dataclasses import replace

from autopar.errors import AutoparError
from autopar.models.base import NativeSpec
from autopar.models.moe import MoEConfig
from autopar.predict.models import run_config
from autopar.predict.run import Dims, Latent
from autopar.targets.job import ModelShape


def dims_of(shape: ModelShape, seq: int) -> Dims:
    """The dimensions that predictions use, for sequences of `seq` tokens. Raises AutoparError if the
    shape lacks any, or no reference model has them.
    """
    if shape.lacking:
        raise AutoparError(
            f"the model's {', '.join(shape.lacking)} cannot be determined: give --model, such as llama3-8b or hf:config.json"
        )
    plain = shape.heads * shape.head_dim == shape.hidden and shape.kv_heads in (0, shape.heads)
    family = "moe" if shape.experts else "gpt" if plain and not shape.gated else "llama"
    moe_ffn = shape.moe_ffn or shape.ffn
    return Dims(
        family=family,
        layers=shape.layers,
        hidden=shape.hidden,
        heads=shape.heads,
        kv_heads=shape.kv_heads or shape.heads,
        head_dim=shape.head_dim or shape.hidden // shape.heads,
        ffn=shape.ffn or 4 * shape.hidden,
        vocab=shape.vocab,
        seq=seq,
        tied_embeddings=shape.tied,
        positions=shape.positions,
        activation={"gpt": "gelu", "moe": "swiglu"}.get(
            family, "swiglu" if shape.gated else "relu2"
        ),
        experts=shape.experts,
        top_k=shape.top_k,
        moe_ffn=moe_ffn if shape.experts else 0,
        shared_experts=-(-shape.shared_ffn // moe_ffn) if shape.experts else 0,
        first_dense=shape.first_dense or _dense_layers(shape),
        mla=_latent(shape),
        mtp=shape.mtp if shape.experts else 0,
    )


def _latent(shape: ModelShape) -> Latent | None:
    if not shape.latent or not shape.experts:
        return None
    query, *rest = shape.latent
    return Latent(query or shape.hidden, *rest)


def spec_of_shape(shape: ModelShape, seq: int) -> NativeSpec:
    """The spec of a reference model with these dimensions. Raises AutoparError as `dims_of`."""
    config = run_config(dims_of(shape, seq))
    if isinstance(config, MoEConfig) and shape.expert_layers:
        config = replace(config, first_dense=0, expert_layers=shape.expert_layers)
    return NativeSpec.of("the job's model", config)


def _dense_layers(shape: ModelShape) -> int:
    """How many layers have no experts, where they alternate with others; one fewer if all have none."""
    bits = shape.expert_layers
    whole = (bits * shape.layers)[: shape.layers]
    return min(whole.count("0"), max(shape.layers - 1, 0))
