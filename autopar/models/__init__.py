"""Small reference models, named configurations, and the reader of MODEL arguments."""

from .base import ModelSpec
from .configs import CONFIGS
from .hf import hf_example_inputs, is_hf_model, prepare_hf
from .spec import parse_model

__all__ = ["CONFIGS", "ModelSpec", "hf_example_inputs", "is_hf_model", "parse_model", "prepare_hf"]
