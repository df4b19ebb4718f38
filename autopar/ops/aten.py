"""The namespace of ATen's ops, under one name."""

from __future__ import annotations

import torch

aten = torch.ops.aten
