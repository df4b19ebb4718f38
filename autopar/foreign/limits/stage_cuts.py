"""How frameworks cut a model into the stages of a pipeline: evenly, or by the cost of layers and head."""

from __future__ import annotations

from autopar.ir.model_shape import ModelShape


def even_stages(layers: int, stages: int) -> tuple[int, ...]:
    """The layers of each stage if they are dealt evenly; () if they cannot be."""
    return (layers // stages,) * stages if stages and layers % stages == 0 else ()


def stages_by_cost(shape: ModelShape, ranks: int, vocab: int | None = None) -> tuple[int, ...]:
    """The layers of each stage in nanotron, for a model whose dimensions are known. `vocab` is the
    allocated vocabulary; by default that of the shape. The last stages may have no layer.

    A stage ends behind the block with which the running cost reaches its even share
    (src/nanotron/models/base.py, build_model). Layers and head have the cost of their products with
    parameters (get_block_compute_costs in src/nanotron/models/llama.py, qwen.py and starcoder2.py;
    it counts a gated MLP as three products, and experts as one MLP).

    A layer that ends on a share exactly ends its stage, though the source would add another one.
    With 16 layers in 2 and 4 stages, the first stage runs as 10 and 5 layers would.
    """
    attention = 4 * shape.heads * (shape.hidden // shape.heads)
    layer = shape.hidden * (attention + (3 if shape.gated else 2) * (shape.ffn or shape.moe_ffn))
    total = shape.layers * layer + (vocab or shape.vocab) * shape.hidden
    sizes, stage = [0] * ranks, 0
    for number in range(shape.layers):
        sizes[stage] += 1
        if (number + 1) * layer * ranks >= total * (stage + 1):
            stage += 1
    return tuple(sizes)


def padded_vocab(vocab: int, tp: int) -> int:
    """The vocabulary that nanotron allocates: the next multiple of tp (_vocab_size_with_padding in
    src/nanotron/trainer.py, with make_vocab_size_divisible_by 1).
    """
    return -(-vocab // tp) * tp


def stages_of_pipeline(shape: ModelShape, pp: int, tp: int) -> tuple[int, ...]:
    """The layers of each stage of a pipeline in nanotron; () if the dimensions that it cuts by are
    not known, or without a pipeline.
    """
    known = shape.layers and shape.hidden and shape.heads and shape.vocab
    if pp == 1 or not known:
        return ()
    return stages_by_cost(shape, pp, padded_vocab(shape.vocab, tp))
