"""GPUs of which no published training runs are known here: workstation and consumer cards, earlier
generations, and variants of those in `catalogue.py`.

Rates of consumer cards are those with sums in fp32, which PyTorch uses; they are half of the figures
with sums in fp16. Best matmul rates are those of the nearest relative that was measured.
"""

from __future__ import annotations

from autopar_cost_models import constants as c
from autopar_cost_models.gpu import Gpu

_AS_A100 = "best matmul as the A100: assumed"
_AS_A100_PCIE = "best matmul as the A100 PCIe: assumed"
_AS_H100 = "best matmul as the H100 SXM: assumed"
_AS_MI300X = "best matmul as the MI300X: assumed"
_FP8_ASSUMED = "fp8 at the H100 SXM's share of its best bf16 matmul: assumed"
_SMI = "memory: nvidia-smi"
_FP8_SHARE = c.MATMUL_H100_SXM_FP8 / c.MATMUL_H100_SXM

_V100 = {"fp64": 7.8, "fp32": 15.7, "fp16": 125.0}
_T4 = {"fp64": 0.25, "fp32": 8.1, "fp16": 65.0}
_A10 = {"fp64": 0.976, "fp32": 31.2, "tf32": 62.5, "bf16": 125.0, "fp16": 125.0}
_A10G = {"fp64": 0.49, "fp32": 31.5, "tf32": 35.0, "bf16": 70.0, "fp16": 70.0}
_L4 = {"fp64": 0.49, "fp32": 30.3, "tf32": 60.0, "bf16": 121.0, "fp16": 121.0, "fp8": 242.5}
_A40 = {"fp64": 0.585, "fp32": 37.4, "tf32": 74.8, "bf16": 149.7, "fp16": 149.7}
_A6000 = {"fp64": 0.605, "fp32": 38.7, "tf32": 77.4, "bf16": 154.8, "fp16": 154.8}
_RTX3090 = {"fp64": 0.556, "fp32": 35.6, "tf32": 35.6, "bf16": 71.0, "fp16": 71.0}
_RTX4090 = {"fp64": 1.29, "fp32": 82.6, "tf32": 82.6, "bf16": 165.2, "fp16": 165.2, "fp8": 330.3}
_RTX5090 = {"fp64": 1.64, "fp32": 104.8, "tf32": 104.8, "bf16": 209.5, "fp16": 209.5, "fp8": 419.0}
_RTX6000_ADA = {
    "fp64": 1.42,
    "fp32": 91.1,
    "tf32": 182.1,
    "bf16": 364.2,
    "fp16": 364.2,
    "fp8": 728.5,
}
_RTX_PRO_6000 = {
    "fp64": 1.95,
    "fp32": 125.0,
    "tf32": 251.9,
    "bf16": 503.8,
    "fp16": 503.8,
    "fp8": 1007.6,
}
_A800 = {"fp64": 19.5, "fp32": 19.5, "tf32": 156.0, "bf16": 312.0, "fp16": 312.0}
_H20 = {"fp64": 1.0, "fp32": 44.0, "tf32": 74.0, "bf16": 148.0, "fp16": 148.0, "fp8": 296.0}
_GH200 = {"fp64": 67.0, "fp32": 67.0, "tf32": 494.5, "bf16": 989.5, "fp16": 989.5, "fp8": 1979.0}
_MI250X = {"fp64": 47.9, "fp32": 47.9, "bf16": 191.5, "fp16": 191.5}
_MI325X = {
    "fp64": 163.4,
    "fp32": 163.4,
    "tf32": 653.7,
    "bf16": 1307.4,
    "fp16": 1307.4,
    "fp8": 2614.9,
}
_MI355X = {"fp64": 78.6, "fp32": 157.3, "bf16": 2516.6, "fp16": 2516.6, "fp8": 5033.2}

MORE_GPUS = (
    Gpu("v100-16g", "volta", 80, _V100, 16160, 0.9e12, c.MATMUL_A100_SXM,
        f"images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf (SXM2 16 GB, 300 W): no bf16; "
        f"{_AS_A100}; {_SMI}"),
    Gpu("v100-32g", "volta", 80, _V100, 32510, 0.9e12, c.MATMUL_A100_SXM,
        f"images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf (SXM2 32 GB, 300 W): no bf16; "
        f"{_AS_A100}; {_SMI}"),
    Gpu("t4", "turing", 40, _T4, 15360, 0.32e12, c.MATMUL_A100_PCIE,
        f"nvidia.com/content/dam/en-zz/Solutions/Data-Center/tesla-t4/t4-tensor-core-datasheet-951643.pdf (16 GB, 70 W): no bf16; "
        f"{_AS_A100_PCIE}; {_SMI}"),
    Gpu("a10", "ampere", 72, _A10, 23028, 0.6e12, c.MATMUL_A100_PCIE,
        f"nvidia.com/content/dam/en-zz/Solutions/Data-Center/a10/pdf/a10-datasheet.pdf (24 GB, 150 W); {_AS_A100_PCIE}; {_SMI}"),
    Gpu("a10g", "ampere", 80, _A10G, 23028, 0.6e12, c.MATMUL_A100_PCIE,
        f"NVIDIA A10G datasheet, d1.awsstatic.com/product-marketing/ec2/NVIDIA_AWS_A10G_DataSheet_FINAL_02_17_2022.pdf (24 GB, 300 W); "
        f"{_AS_A100_PCIE}; {_SMI}"),
    Gpu("l4", "ada", 58, _L4, 23034, 0.3e12, c.MATMUL_A100_PCIE,
        f"nvidia.com/en-us/data-center/l4 (24 GB, 72 W), half of the figures with sparsity; {_AS_A100_PCIE}; {_FP8_ASSUMED}; {_SMI}",
        fp8=c.MATMUL_A100_PCIE * _FP8_SHARE),
    Gpu("a40", "ampere", 84, _A40, 46068, 0.696e12, c.MATMUL_A100_PCIE,
        f"images.nvidia.com/content/Solutions/data-center/a40/nvidia-a40-datasheet.pdf (48 GB, 300 W); {_AS_A100_PCIE}; {_SMI}"),
    Gpu("a6000", "ampere", 84, _A6000, 49140, 0.768e12, c.MATMUL_A100_PCIE,
        f"nvidia.com/content/dam/en-zz/Solutions/design-visualization/quadro-product-literature/"
        f"proviz-print-nvidia-rtx-a6000-datasheet-us-nvidia-1454980-r9-web.pdf (48 GB, 300 W); {_AS_A100_PCIE}; {_SMI}"),
    Gpu("rtx3090", "ampere", 82, _RTX3090, 24576, 0.936e12, c.MATMUL_A100_PCIE,
        f"nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf (24 GB, 350 W); {_AS_A100_PCIE}; {_SMI}"),
    Gpu("rtx4090", "ada", 128, _RTX4090, 24564, 1.008e12, c.MATMUL_A100_PCIE,
        f"images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf (24 GB, 450 W); {_AS_A100_PCIE}; {_FP8_ASSUMED}; "
        f"{_SMI}", fp8=c.MATMUL_A100_PCIE * _FP8_SHARE),
    Gpu("rtx5090", "blackwell-rtx", 170, _RTX5090, 32607, 1.792e12, c.MATMUL_A100_PCIE,
        f"images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf (32 GB, 575 W); {_AS_A100_PCIE}; "
        f"{_FP8_ASSUMED}; {_SMI}", fp8=c.MATMUL_A100_PCIE * _FP8_SHARE),
    Gpu("rtx6000-ada", "ada", 142, _RTX6000_ADA, 49140, 0.96e12, c.MATMUL_A100_PCIE,
        f"nvidia.com/en-us/products/workstations/rtx-6000 (48 GB, 300 W), half of the figures with sparsity; {_AS_A100_PCIE}; "
        f"{_FP8_ASSUMED}; {_SMI}", fp8=c.MATMUL_A100_PCIE * _FP8_SHARE),
    Gpu("rtx-pro-6000", "blackwell-rtx", 188, _RTX_PRO_6000, 97887, 1.792e12, c.MATMUL_A100_PCIE,
        f"NVIDIA RTX Blackwell PRO GPU architecture white paper (workstation, 96 GB, 600 W), half of the figures with sparsity; "
        f"{_AS_A100_PCIE}; {_FP8_ASSUMED}; {_SMI}", fp8=c.MATMUL_A100_PCIE * _FP8_SHARE),
    Gpu("a800-80g", "ampere", 108, _A800, 81920, 2.039e12, c.MATMUL_A100_SXM,
        f"NVIDIA A800 80 GB SXM: as the A100 but for NVLink (400 GB/s); {_AS_A100}; {_SMI}"),
    Gpu("h20", "hopper", 78, _H20, 97871, 4.0e12, c.MATMUL_H100_SXM,
        f"figures of the H20 as the press has them (96 GB, 400 W): viperatech.com/product/nvidia-hgx-h20; {_AS_H100}; {_FP8_ASSUMED}; "
        f"{_SMI}", fp8=c.MATMUL_H100_SXM_FP8),
    Gpu("gh200", "hopper", 132, _GH200, 97871, 4.0e12, c.MATMUL_H100_SXM,
        f"resources.nvidia.com/en-us-grace-cpu/grace-hopper-superchip (96 GB of HBM3), half of the figures with sparsity; {_AS_H100}; "
        f"{_SMI}", fp8=c.MATMUL_H100_SXM_FP8),
    Gpu("mi250x", "cdna2", 110, _MI250X, 65520, 1.6384e12, c.MATMUL_MI300X,
        f"amd.com/en/products/accelerators/instinct/mi200/mi250x.html: one of the two dies of a card, which PyTorch counts as a device "
        f"(64 GB of 128 GB); {_AS_MI300X}; memory: rocm-smi"),
    Gpu("mi325x", "cdna3", 304, _MI325X, 262128, 6.0e12, c.MATMUL_MI300X,
        f"amd.com/en/products/accelerators/instinct/mi300/mi325x.html (256 GB, 1000 W), dense figures; {_AS_MI300X}; memory: 256 GiB less "
        f"16 MiB, as the MI300X: assumed", fp8=c.MATMUL_MI300X),
    Gpu("mi355x", "cdna4", 256, _MI355X, 294896, 8.0e12, c.MATMUL_MI300X,
        f"amd.com/en/products/accelerators/instinct/mi350/mi355x.html (288 GB, 1400 W), dense figures; {_AS_MI300X}; memory: 288 GiB less "
        f"16 MiB, as the MI300X: assumed", fp8=c.MATMUL_MI300X),
)  # fmt: skip
"""Rows of the catalogue after those in `catalogue.py`."""
