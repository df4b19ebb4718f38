"""Tiny models of images and text, from transformers' configurations, with their batches."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn

ROWS, LENGTH, IMAGE, TOKENS = 8, 14, 95, 4
"""Rows of a batch, tokens of a row, the token that stands for an image's feature, and such tokens in a row."""
TEXT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64,
        "vocab_size": 99, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # fmt: skip
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16, "patch_size": 8,
          "num_channels": 3}  # fmt: skip
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
DECODER = TEXT | IDS | {"num_key_value_heads": 2}
SIGLIP = VISION | {"model_type": "siglip_vision_model", "vision_use_head": False}


class Contrastive(nn.Module):
    """A model that pairs rows of the whole batch, with its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Tensor) -> Tensor:
        return self.model(**batch, return_loss=True).loss


def contrastive(name: str, text: dict, **more: object) -> Callable[[], nn.Module]:
    """A builder of a contrastive model."""

    def build() -> nn.Module:
        config = getattr(transformers, f"{name}Config")(
            text_config=TEXT | IDS | text, vision_config=VISION, **more
        )
        return Contrastive(getattr(transformers, f"{name}Model")(config))

    return build


def generative(name: str, vision: dict, text: dict, **more: object) -> Callable[[], nn.Module]:
    """A builder of a language model that reads images."""

    def build() -> nn.Module:
        config = getattr(transformers, f"{name}Config")(
            vision_config=vision, text_config=DECODER | text, **more
        )
        return getattr(transformers, f"{name}ForConditionalGeneration")(config)

    return build


def pairs(seed: int) -> dict[str, Tensor]:
    """Texts of uneven lengths that end with the largest token, and images."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 97, (ROWS, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(ROWS):
        ids[row, LENGTH - 1 - row % 4] = 98
        mask[row, LENGTH - row % 4 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "pixel_values": images(generator)}


def images(generator: torch.Generator) -> Tensor:
    return torch.randn(ROWS, 3, 16, 16, generator=generator, dtype=torch.float64)


def captions(seed: int, tokens: int = TOKENS) -> dict[str, Tensor]:
    """Texts with the tokens of an image at another place in every row, and labels with uneven numbers of -100."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 90, (ROWS, LENGTH), generator=generator)
    for row in range(ROWS):
        ids[row, 1 + row % 5 : 1 + row % 5 + tokens] = IMAGE
    labels = torch.where(ids == IMAGE, -100, ids)
    for row in range(ROWS):
        labels[row, : row % 3] = -100
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": images(generator),
        "labels": labels,
    }


def of_types(seed: int) -> dict[str, Tensor]:
    """Captions that say which tokens see each other in both directions."""
    batch = captions(seed)
    return batch | {"token_type_ids": (batch["input_ids"] == IMAGE).long()}


def several_images(seed: int) -> dict[str, Tensor]:
    """Captions in which each row has a list of images, here of one."""
    batch = captions(seed, tokens=1)
    return batch | {"pixel_values": batch["pixel_values"].unsqueeze(1)}


QFORMER = TEXT | {"encoder_hidden_size": 32, "cross_attention_frequency": 1}
OPT = {"model_type": "opt", "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}
INTERN = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "image_size": [16, 16],
          "patch_size": [4, 4]}  # fmt: skip
CLIP = VISION | {"model_type": "clip_vision_model"}
LLAMA, COHERE = {"model_type": "llama"}, {"model_type": "cohere2", "sliding_window": 32}
GEMMA = {"model_type": "gemma", "head_dim": 8}
GEMMA3 = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 32}

CONTRASTIVE = {
    "CLIP": contrastive("CLIP", {"eos_token_id": 98}, projection_dim=16),
    "Siglip": contrastive("Siglip", {"projection_size": 32}),
    "AltCLIP": contrastive("AltCLIP", {"project_dim": 16}, projection_dim=16),
    "ChineseCLIP": contrastive("ChineseCLIP", {}, projection_dim=16),
    "Blip": contrastive(
        "Blip",
        {"encoder_hidden_size": 32, "projection_dim": 16},
        projection_dim=16,
        image_text_hidden_size=16,
    ),
}


def wrapper() -> type[nn.Module]:
    """The wrapper of Qwen2-VL and Qwen3-VL that the guide prints."""
    page = (Path(__file__).parents[2] / "docs" / "guides" / "own-model.md").read_text()
    block = re.search(r"<!-- file: images.py -->\n```python\n(.*?)```", page, re.S)
    assert block is not None
    names: dict = {}
    exec(block[1], names)
    return names["OneImageARow"]


GRID = (1, 4, 4)
QWEN_TEXT = {
    "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
}
QWEN_VISION = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2,
               "temporal_patch_size": 2, "in_channels": 3}  # fmt: skip
qwen2_vl = generative(
    "Qwen2VL",
    QWEN_VISION,
    QWEN_TEXT,
    image_token_id=IMAGE,
    video_token_id=96,
    vision_start_token_id=93,
)


qwen3_vl = generative(
    "Qwen3VL",
    QWEN_VISION
    | {
        "intermediate_size": 48,
        "out_hidden_size": 32,
        "num_position_embeddings": 9,
        "deepstack_visual_indexes": [0, 1],
    },
    QWEN_TEXT | {"head_dim": 8},
    image_token_id=IMAGE,
    video_token_id=96,
    vision_start_token_id=93,
)


def grids(seed: int, build: Callable[[], nn.Module] = qwen2_vl) -> dict[str, Tensor]:
    """Captions with the patches of their images, and the positions that the model gives them."""
    batch = captions(seed)
    of_images = (batch["input_ids"] == IMAGE).long()
    positions, _ = build().model.get_rope_index(
        batch["input_ids"],
        of_images,
        torch.tensor([GRID] * ROWS),
        attention_mask=batch["attention_mask"],
    )
    pixels = torch.randn(
        ROWS, 16, 96, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    order = ("input_ids", "attention_mask", "position_ids", "pixel_values", "labels")
    batch |= {"pixel_values": pixels, "position_ids": positions}
    return {name: batch[name] for name in order}


GENERATIVE = {
    "Qwen2VL": (lambda: wrapper()(qwen2_vl(), GRID), grids),
    "Qwen3VL": (lambda: wrapper()(qwen3_vl(), GRID), partial(grids, build=qwen3_vl)),
    "Llava": (generative("Llava", CLIP, LLAMA, image_token_index=IMAGE), captions),
    "PaliGemma": (
        generative("PaliGemma", SIGLIP, GEMMA, image_token_index=IMAGE, projection_dim=32, hidden_size=32),
        of_types,
    ),
    "Idefics3": (generative("Idefics3", VISION, LLAMA, image_token_id=IMAGE, scale_factor=2), several_images),
    "SmolVLM": (generative("SmolVLM", VISION, LLAMA, image_token_id=IMAGE, scale_factor=2), several_images),
    "Blip2": (
        generative("Blip2", VISION, OPT, qformer_config=QFORMER, num_query_tokens=TOKENS, image_token_index=IMAGE),
        captions,
    ),
    "InternVL": (
        generative("InternVL", INTERN, {"model_type": "qwen2"}, image_token_id=IMAGE, image_seq_length=TOKENS, downsample_ratio=0.5),
        captions,
    ),
    "AyaVision": (
        generative("AyaVision", SIGLIP, COHERE, image_token_index=IMAGE, downsample_factor=1, vision_feature_layer=-1),
        captions,
    ),
    "Gemma3": (generative("Gemma3", SIGLIP, GEMMA3, image_token_index=IMAGE, mm_tokens_per_image=TOKENS), of_types),
}  # fmt: skip
