"""Networks of images, sound and diffusion from timm, torchvision, diffusers and transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from benchmarks.exactness.public_inputs import (
    CLASSES,
    Batch,
    Classifier,
    Denoiser,
    PublicModel,
    images,
    integers,
    noise,
)
from benchmarks.exactness.public_text import HEADS, HIDDEN, LAYERS, config_of

# ------------------------------------------------------------------------------------------- timm

_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": HIDDEN, "depth": LAYERS, "num_heads": HEADS}
_STAGES = {"depths": (1, 1, 2, 1), "dims": (16, 16, 32, 32)}
_TIMM: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": _VIT,
    "deit_tiny_patch16_224": _VIT,
    "deit3_small_patch16_224": _VIT,
    "beit_base_patch16_224": _VIT | {"init_values": 1.0},
    "eva02_tiny_patch14_224": _VIT,
    "cait_xxs24_224": _VIT,
    "mixer_s16_224": {"img_size": 64},
    "resmlp_12_224": {"img_size": 64},
    "swin_tiny_patch4_window7_224": {"img_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 16, "depths": (2, 2),
                                    "num_heads": (2, 4)},
    "convnext_atto": _STAGES,
    "convnextv2_atto": _STAGES,
    "poolformer_s12": {},
    "resnet18": {"layers": (1, 1, 1, 1), "channels": (8, 16, 16, 32)},
    "resnet50": {"layers": (1, 1, 1, 1), "channels": (8, 16, 16, 32)},
    "resnext50_32x4d": {"layers": (1, 1, 1, 1), "cardinality": 4, "base_width": 8},
    "seresnet18": {"layers": (1, 1, 1, 1), "channels": (8, 16, 16, 32)},
    "efficientnet_b0": {},
    "mobilenetv2_050": {},
    "mobilenetv3_small_050": {},
    "regnetx_002": {},
    "regnety_002": {},
    "ghostnet_100": {"drop_rate": 0.0},
    "hrnet_w18_small": {},
    "densenet121": {"block_config": (2, 2, 2), "growth_rate": 8},
}  # fmt: skip


def _timm(name: str, values: dict[str, Any]) -> nn.Module:
    import timm

    return Classifier(timm.create_model(name, num_classes=CLASSES, **values))


# ------------------------------------------------------------------------------------ torchvision

_TORCHVISION: dict[str, dict[str, Any]] = {
    "resnet18": {},
    "mobilenet_v2": {},
    "mobilenet_v3_small": {},
    "shufflenet_v2_x0_5": {},
    "squeezenet1_1": {},
    "regnet_y_400mf": {},
    "mnasnet0_5": {"dropout": 0.0},
}


def _torchvision(name: str, values: dict[str, Any]) -> nn.Module:
    import torchvision

    model = torchvision.models.get_model(name, weights=None, num_classes=CLASSES, **values)
    return Classifier(model)


def _torchvision_vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    return Classifier(
        VisionTransformer(32, 8, LAYERS, HEADS, HIDDEN, 2 * HIDDEN, num_classes=CLASSES)
    )


def _torchvision_swin() -> nn.Module:
    from torchvision.models import SwinTransformer

    return Classifier(
        SwinTransformer(
            [2, 2], 16, [2, 2], [2, 4], [4, 4], stochastic_depth_prob=0.0, num_classes=CLASSES
        )
    )


def _torchvision_convnext() -> nn.Module:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    stages = [CNBlockConfig(16, 32, 2), CNBlockConfig(32, None, 2)]
    return Classifier(ConvNeXt(stages, stochastic_depth_prob=0.0, num_classes=CLASSES))


# -------------------------------------------------------------------------------------- diffusers

_BLOCKS = {
    "block_out_channels": (16, 32),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "sample_size": 8,
}
_DIT = {
    "num_attention_heads": HEADS,
    "attention_head_dim": 8,
    "num_layers": LAYERS,
    "sample_size": 8,
    "patch_size": 2,
}
_DIFFUSERS: dict[str, dict[str, Any]] = {
    "UNet2DModel": _BLOCKS | {"in_channels": 3, "out_channels": 3, "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
                              "up_block_types": ("AttnUpBlock2D", "UpBlock2D"), "attention_head_dim": 8},
    "UNet2DConditionModel": _BLOCKS | {"in_channels": 4, "out_channels": 4, "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
                              "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "cross_attention_dim": HIDDEN,
                              "attention_head_dim": 4},
    "DiTTransformer2DModel": _DIT | {"in_channels": 4, "out_channels": 4, "norm_num_groups": 4, "num_embeds_ada_norm": 100},
    "PixArtTransformer2DModel": _DIT | {"in_channels": 4, "out_channels": 4, "cross_attention_dim": HIDDEN, "caption_channels": 16,
                              "num_embeds_ada_norm": 100, "norm_num_groups": 4},
    "SD3Transformer2DModel": _DIT | {"in_channels": 4, "out_channels": 4, "joint_attention_dim": 16, "caption_projection_dim": HIDDEN,
                              "pooled_projection_dim": 16, "pos_embed_max_size": 8},
}  # fmt: skip


def _diffusers(name: str, values: dict[str, Any]) -> nn.Module:
    import diffusers

    return Denoiser(getattr(diffusers, name)(**values))


def _latents(name: str, rows: int) -> Batch:
    channels = 3 if name == "UNet2DModel" else 4
    shape = rows, channels, 8, 8
    timed = {"timestep": integers(100, rows), "target": noise(*shape, seed=1)}
    sample = noise(*shape)
    if name.startswith("UNet2DM"):
        return timed | {"sample": sample}
    if name.startswith("UNet2DC"):
        return timed | {"sample": sample, "encoder_hidden_states": noise(rows, 6, HIDDEN, seed=2)}
    timed["hidden_states"] = sample
    if name.startswith("DiT"):
        return timed | {"class_labels": integers(100, rows)}
    timed["encoder_hidden_states"] = noise(rows, 6, 16, seed=2)
    return timed if name.startswith("Pix") else timed | {"pooled_projections": noise(rows, 16)}


# ----------------------------------------------------------------------------------- transformers

_WIDTH = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 64,
}
_WIDTH |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": CLASSES}
_VISION = {**_WIDTH, "image_size": 32, "patch_size": 8}
_VISION_MODELS: dict[str, dict[str, Any]] = {
    "vit": _VISION,
    "beit": _VISION | {"drop_path_rate": 0.0},
    "dinov2": _VISION | {"mlp_ratio": 2},
    "swin": {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4,
             "drop_path_rate": 0.0, "num_labels": CLASSES},
    "convnext": {"depths": [1, 1, 2, 1], "hidden_sizes": [16, 16, 32, 32], "num_labels": CLASSES},
    "resnet": {"embedding_size": 8, "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1], "num_labels": CLASSES},
    "poolformer": {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 16, 32, 32], "num_labels": CLASSES, "drop_path_rate": 0.0},
}  # fmt: skip
_CONV = {
    "conv_dim": (16, 16),
    "conv_stride": (4, 2),
    "conv_kernel": (8, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
}
_SOUND = {**_WIDTH, **_CONV, "num_conv_pos_embedding_groups": 4, "feat_extract_norm": "layer", "hidden_dropout": 0.0,
          "attention_dropout": 0.0, "activation_dropout": 0.0, "feat_proj_dropout": 0.0, "final_dropout": 0.0, "layerdrop": 0.0,
          "apply_spec_augment": False, "classifier_proj_size": 16, "mask_time_prob": 0.0}  # fmt: skip
_WHISPER = {"vocab_size": 96, "d_model": HIDDEN, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": HEADS,
            "decoder_attention_heads": HEADS, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_mel_bins": 8,
            "max_source_positions": 16, "max_target_positions": 16, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1,
            "decoder_start_token_id": 0, "dropout": 0.0}  # fmt: skip
_TOWER = {
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "projection_dim": 16,
}
_CLIP = {"text_config": {**_TOWER, "vocab_size": 96, "max_position_embeddings": 16, "eos_token_id": 95},
         "vision_config": {**_TOWER, "image_size": 32, "patch_size": 8}, "projection_dim": 16}  # fmt: skip


_CLAP = {"text_config": {**_TOWER, "vocab_size": 96, "max_position_embeddings": 16, "projection_dim": 16, "hidden_dropout_prob": 0.0,
                         "attention_probs_dropout_prob": 0.0},
         "audio_config": {"hidden_size": 32, "patch_embeds_hidden_size": 16, "depths": [1, 1], "num_attention_heads": [2, 4],
                          "num_hidden_layers": 2, "spec_size": 32, "num_mel_bins": 16, "window_size": 4, "projection_dim": 16,
                          "hidden_dropout_prob": 0.0},
         "projection_dim": 16}  # fmt: skip
_GIT = {**_WIDTH, "vocab_size": 96, "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 1,
        "vision_config": {"hidden_size": HIDDEN, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": HEADS,
                          "image_size": 32, "patch_size": 8}}  # fmt: skip
_SEW_D = {
    **_SOUND,
    "conv_stride": (4, 2),
    "position_buckets": 8,
    "max_position_embeddings": 64,
    "squeeze_factor": 2,
}


class _Contrasted(nn.Module):
    """The loss of a network of images and texts, which is one of its results."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, **inputs: Any) -> Any:
        return self.net(**inputs, return_loss=True).loss


def _auto(name: str, kind: str, values: dict[str, Any]) -> nn.Module:
    import transformers

    return getattr(transformers, name).from_config(config_of(kind, values))


def _contrasted(kind: str, values: dict[str, Any]) -> nn.Module:
    return _Contrasted(_auto("AutoModel", kind, values))


def _spectrograms(rows: int) -> Batch:
    return {"input_features": noise(rows, 8, 32), "labels": integers(96, rows, 10)}


def _waves(rows: int) -> Batch:
    return {"input_values": noise(rows, 400), "labels": integers(CLASSES, rows)}


def _images_and_texts(rows: int) -> Batch:
    return {"pixel_values": noise(rows, 3, 32, 32), "input_ids": integers(95, rows, 12)}


def _captions(rows: int) -> Batch:
    return _images_and_texts(rows) | {"labels": integers(95, rows, 12)}


def _sounds_and_texts(rows: int) -> Batch:
    return {"input_features": noise(rows, 1, 64, 16), "input_ids": integers(94, rows, 12) + 2}


def _signal_models() -> dict[str, PublicModel]:
    found: dict[str, PublicModel] = {}

    def add(
        name: str, inputs: Callable[[int], Batch], build: Callable[..., nn.Module], *args: Any
    ) -> None:
        found[name] = PublicModel(partial(build, *args), inputs)

    for name, values in _TIMM.items():
        add(f"timm {name}", images(values.get("img_size", 64)), _timm, name, values)
    for name, values in _TORCHVISION.items():
        add(f"torchvision {name}", images(64), _torchvision, name, values)
    add("torchvision vit", images(32), _torchvision_vit)
    add("torchvision swin", images(32), _torchvision_swin)
    add("torchvision convnext", images(32), _torchvision_convnext)
    for name, values in _DIFFUSERS.items():
        add(f"diffusers {name}", partial(_latents, name), _diffusers, name, values)
    for name, values in _VISION_MODELS.items():
        add(f"transformers {name}", images(32, name="pixel_values"), _auto, "AutoModelForImageClassification", name, values)  # fmt: skip
    for name in ("wav2vec2", "hubert", "wavlm"):
        add(f"transformers {name}", _waves, _auto, "AutoModelForAudioClassification", name, _SOUND)
    add("transformers sew-d", _waves, _auto, "AutoModelForAudioClassification", "sew-d", _SEW_D)
    add(
        "transformers whisper",
        _spectrograms,
        _auto,
        "AutoModelForSpeechSeq2Seq",
        "whisper",
        _WHISPER,
    )
    for name in ("clip", "siglip"):
        add(f"transformers {name}", _images_and_texts, _contrasted, name, _CLIP)
    add("transformers clap", _sounds_and_texts, _contrasted, "clap", _CLAP)
    add("transformers git", _captions, _auto, "AutoModelForCausalLM", "git", _GIT)
    return found


SIGNAL_MODELS = _signal_models()
"""Name -> model; the first word is the package."""
