"""Instances of clouds by the names that their providers give them.

Devices of instances: aws.amazon.com/ec2/instance-types,
cloud.google.com/compute/docs/accelerator-optimized-machines,
learn.microsoft.com/azure/virtual-machines/sizes/gpu-accelerated.
"""

from __future__ import annotations

import re

_WHOLE = {
    "p3dn.24xlarge": "aws-p3dn",
    "p4d.24xlarge": "aws-p4d",
    "p4de.24xlarge": "aws-p4de",
    "p5.48xlarge": "aws-p5",
    "p5e.48xlarge": "aws-p5e",
    "p5en.48xlarge": "aws-p5en",
    "p6-b200.48xlarge": "aws-p6-b200",
    "g5.48xlarge": "aws-g5",
    "g6.48xlarge": "aws-g6",
    "a2-highgpu-8g": "gcp-a2-high",
    "a2-ultragpu-8g": "gcp-a2-ultra",
    "a3-highgpu-8g": "gcp-a3-high",
    "a3-megagpu-8g": "gcp-a3-mega",
    "a3-ultragpu-8g": "gcp-a3-ultra",
    "a4-highgpu-8g": "gcp-a4-high",
    "nd96asr_v4": "azure-nd-a100-v4",
    "nd96amsr_a100_v4": "azure-ndm-a100-v4",
    "nd96isr_h100_v5": "azure-nd-h100-v5",
    "nd96isr_h200_v5": "azure-nd-h200-v5",
    "nd96isr_mi300x_v5": "azure-nd-mi300x-v5",
}
"""Node presets by the name of the instance."""

_CARDS = {1: ("", "2", "4", "8", "16"), 4: ("12", "24")}
"""Numbers of GPUs of Amazon's g5 and g6 instances, by the factor of their sizes."""

_PARTS: dict[str, tuple[str, int]] = {
    **{f"g5.{size}xlarge": ("a10g", n) for n, sizes in _CARDS.items() for size in sizes},
    **{f"g6.{size}xlarge": ("l4", n) for n, sizes in _CARDS.items() for size in sizes},
    **{f"g4dn.{size}xlarge": ("t4", 1) for size in _CARDS[1]},
    "g4dn.12xlarge": ("t4", 4),
    "g4dn.metal": ("t4", 8),
    "p3.2xlarge": ("v100-16g", 1),
    "p5.4xlarge": ("h100", 1),
    **{f"a2-highgpu-{n}g": ("a100-40g", n) for n in (1, 2, 4)},
    **{f"a2-ultragpu-{n}g": ("a100-80g", n) for n in (1, 2, 4)},
    **{f"a3-highgpu-{n}g": ("h100", n) for n in (1, 2, 4)},
    "nc24ads_a100_v4": ("a100-pcie-80g", 1),
    "nc48ads_a100_v4": ("a100-pcie-80g", 2),
    "nc96ads_a100_v4": ("a100-pcie-80g", 4),
}
"""(device, number) of instances that are a part of a node."""


def instance_of(name: str) -> tuple[str, int] | None:
    """(node preset, 0) of an instance that is a whole node, (device, number) of one that is a part;
    None if the name is none of either.
    """
    text = re.sub(r"^(standard[_ -]|aws[ -]|gcp[ -]|azure[ -]|ml\.)", "", name.strip().lower())
    if text in _WHOLE:
        return _WHOLE[text], 0
    return _PARTS.get(text)
