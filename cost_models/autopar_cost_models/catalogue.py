"""The catalogue of devices and links: datasheet figures in SI units, each with its source.

Memory is the total that nvidia-smi reports, where known: the "GB" of datasheets are neither 1e9
bytes nor exactly 2**30. NVIDIA's datasheets since Hopper print rates with sparsity. The dense rates
here are half of those.
"""

from __future__ import annotations

from functools import lru_cache

from autopar_cost_models import constants as c
from autopar_cost_models.checks import nearest
from autopar_cost_models.echo import shown
from autopar_cost_models.fitted import FITTED, FittedConstants
from autopar_cost_models.gpu import Gpu as _Gpu
from autopar_cost_models.hardware import Device, Host, Link
from autopar_cost_models.more_gpus import MORE_GPUS

_AMPERE = {"fp64": 19.5, "fp32": 19.5, "tf32": 156.0, "bf16": 312.0, "fp16": 312.0}
_HOPPER = {"fp64": 67.0, "fp32": 67.0, "tf32": 494.5, "bf16": 989.5, "fp16": 989.5, "fp8": 1979.0}
_H100_PCIE = {
    "fp64": 51.0,
    "fp32": 51.0,
    "tf32": 378.0,
    "bf16": 756.0,
    "fp16": 756.0,
    "fp8": 1513.0,
}
_H100_NVL = {"fp64": 60.0, "fp32": 60.0, "tf32": 417.5, "bf16": 835.5, "fp16": 835.5, "fp8": 1670.5}
_ADA = {"fp64": 1.43, "fp32": 91.6, "tf32": 183.0, "bf16": 362.05, "fp16": 362.05, "fp8": 733.0}
_B200 = {"fp64": 37.0, "fp32": 75.0, "tf32": 1100.0, "bf16": 2250.0, "fp16": 2250.0, "fp8": 4500.0}
_B300 = {"fp64": 1.25, "fp32": 75.0, "tf32": 1125.0, "bf16": 2250.0, "fp16": 2250.0, "fp8": 4500.0}
_GB200 = {"fp64": 40.0, "fp32": 80.0, "tf32": 1250.0, "bf16": 2500.0, "fp16": 2500.0, "fp8": 5000.0}
_GB300 = {**_GB200, "fp64": 1.3}
_MI300X = {
    "fp64": 163.4,
    "fp32": 163.4,
    "tf32": 653.7,
    "bf16": 1307.4,
    "fp16": 1307.4,
    "fp8": 2614.9,
}

_NVIDIA_SMI = "memory: nvidia-smi, github.com/modal-labs/modal-client/pull/2797"
_FP8_ASSUMED = "fp8 at the H100 SXM's share of its best bf16 matmul: assumed"
_FP8_SHARE = c.MATMUL_H100_SXM_FP8 / c.MATMUL_H100_SXM
"""The best fp8 fraction of peak over the best bf16 fraction of peak, on an H100."""
_GPUS = (
    _Gpu(
        name="a100-40g",
        generation="ampere",
        units=108,
        tflops=_AMPERE,
        memory_MiB=40960,
        bandwidth_Bps=1.555e12,
        matmul=c.MATMUL_A100_SXM,
        source=f"NVIDIA A100 Tensor Core GPU datasheet (SXM4 40 GB, 400 W); {_NVIDIA_SMI}",
    ),
    _Gpu(
        name="a100-80g",
        generation="ampere",
        units=108,
        tflops=_AMPERE,
        memory_MiB=81920,
        bandwidth_Bps=2.039e12,
        matmul=c.MATMUL_A100_SXM,
        source=f"NVIDIA A100 Tensor Core GPU datasheet (SXM4 80 GB, 400 W); {_NVIDIA_SMI}",
    ),
    _Gpu(
        name="a100-pcie-40g",
        generation="ampere",
        units=108,
        tflops=_AMPERE,
        memory_MiB=40960,
        bandwidth_Bps=1.555e12,
        matmul=c.MATMUL_A100_PCIE,
        source="NVIDIA A100 40 GB PCIe product brief (250 W); memory as the SXM part",
    ),
    _Gpu(
        name="a100-pcie-80g",
        generation="ampere",
        units=108,
        tflops=_AMPERE,
        memory_MiB=81920,
        bandwidth_Bps=1.935e12,
        matmul=c.MATMUL_A100_PCIE,
        source="NVIDIA A100 Tensor Core GPU datasheet (PCIe 80 GB, 300 W); memory as the SXM part",
    ),
    _Gpu(
        name="h100",
        generation="hopper",
        units=132,
        tflops=_HOPPER,
        memory_MiB=81559,
        bandwidth_Bps=3.35e12,
        matmul=c.MATMUL_H100_SXM,
        source=f"NVIDIA H100 Tensor Core GPU datasheet (SXM5 80 GB, 700 W), half of the figures with sparsity; {_NVIDIA_SMI}",
        fp8=c.MATMUL_H100_SXM_FP8,
    ),
    _Gpu(
        name="h100-96g-500w",
        generation="hopper",
        units=132,
        tflops=_HOPPER,
        memory_MiB=97871,
        bandwidth_Bps=2.4e12,
        matmul=c.MATMUL_H100_SXM,
        source="github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: HBM2e 96 GB at 2.4 TB/s, 500 W; rates as H100, "
        "slowed by the power limit (power_exponent); memory: nvidia-smi",
        fp8=c.MATMUL_H100_SXM_FP8,
        power_W=500.0,
        full_power_W=c.H100_SXM_POWER_W,
    ),
    _Gpu(
        name="h100-pcie",
        generation="hopper",
        units=114,
        tflops=_H100_PCIE,
        memory_MiB=81559,
        bandwidth_Bps=2.0e12,
        matmul=c.MATMUL_H100_PCIE,
        source="NVIDIA H100 Tensor Core GPU datasheet (PCIe 80 GB, 350 W), half of the figures with sparsity; "
        f"{_FP8_ASSUMED}; memory as SXM",
        fp8=c.MATMUL_H100_PCIE * _FP8_SHARE,
    ),
    _Gpu(
        name="h100-nvl",
        generation="hopper",
        units=132,
        tflops=_H100_NVL,
        memory_MiB=95830,
        bandwidth_Bps=3.9e12,
        matmul=c.MATMUL_H100_PCIE,
        source="NVIDIA H100 NVL datasheet (94 GB, 400 W), half of the figures with sparsity; best matmul as the H100 PCIe: assumed; "
        f"{_FP8_ASSUMED}; memory: nvidia-smi",
        fp8=c.MATMUL_H100_PCIE * _FP8_SHARE,
    ),
    _Gpu(
        name="h800",
        generation="hopper",
        units=132,
        tflops={**_HOPPER, "fp64": 1.0},
        memory_MiB=81559,
        bandwidth_Bps=3.35e12,
        matmul=c.MATMUL_H100_SXM,
        source="as the H100 SXM (github.com/deepseek-ai/FlashMLA/issues/75: 990 TFLOP/s, 3.35 TB/s) but for NVLink (400 GB/s) and fp64 (1 "
        "TFLOP/s, as the press has it): DeepSeek-AI, Insights into DeepSeek-V3, arXiv:2505.09343; memory as the H100",
        fp8=c.MATMUL_H100_SXM_FP8,
    ),
    _Gpu(
        name="h200",
        generation="hopper",
        units=132,
        tflops=_HOPPER,
        memory_MiB=143771,
        bandwidth_Bps=4.8e12,
        matmul=c.MATMUL_H100_SXM,
        source="NVIDIA H200 Tensor Core GPU datasheet (SXM 141 GB, 700 W), half of the figures with sparsity; memory: nvidia-smi",
        fp8=c.MATMUL_H200_FP8,
    ),
    _Gpu(
        name="l40s",
        generation="ada",
        units=142,
        tflops=_ADA,
        memory_MiB=46068,
        bandwidth_Bps=0.864e12,
        matmul=c.MATMUL_A100_PCIE,
        source=f"NVIDIA L40S datasheet (48 GB, 350 W); best matmul as the A100 PCIe: assumed; {_FP8_ASSUMED}; {_NVIDIA_SMI}",
        fp8=c.MATMUL_A100_PCIE * _FP8_SHARE,
    ),
    _Gpu(
        name="b200",
        generation="blackwell",
        units=148,
        tflops=_B200,
        memory_MiB=182630,
        bandwidth_Bps=7.7e12,
        matmul=c.MATMUL_B200,
        source="NVIDIA Blackwell datasheet, HGX B200 (180 GB, 1000 W), half of the figures with sparsity; memory: 178.35 GiB by "
        "device query, github.com/pytorch/ao/pull/4002",
        fp8=c.MATMUL_B200_FP8,
    ),
    _Gpu(
        name="b300",
        generation="blackwell",
        units=148,
        tflops=_B300,
        memory_MiB=275040,
        bandwidth_Bps=7.7e12,
        matmul=c.MATMUL_B300,
        source="NVIDIA DGX B300 datasheet (288 GB HBM3e, 270 GB shown), half of the figures with sparsity; bandwidth: "
        "verda.com/blog/gb300-nvl72-architecture; memory: nvidia-smi; multiprocessors as the B200: assumed",
        fp8=c.MATMUL_B300_FP8,
    ),
    _Gpu(
        name="gb200",
        generation="blackwell",
        units=152,
        tflops=_GB200,
        memory_MiB=189471,
        bandwidth_Bps=8.0e12,
        matmul=c.MATMUL_GB200,
        source="NVIDIA Blackwell datasheet, GB200 NVL72 (186 GB per GPU, 1200 W), half of the figures with sparsity; memory: nvidia-smi",
        fp8=c.MATMUL_GB200_FP8,
    ),
    _Gpu(
        name="gb300",
        generation="blackwell",
        units=152,
        tflops=_GB300,
        memory_MiB=284208,
        bandwidth_Bps=8.0e12,
        matmul=c.MATMUL_GB200,
        source="NVIDIA GB300 NVL72 specifications (279 GB shown per GPU, 1400 W), half of the figures with sparsity; best matmul as the "
        "GB200 (1200 W) under the higher power limit (power_exponent), multiprocessors too: assumed; memory: nvidia-smi",
        fp8=c.MATMUL_GB200_FP8,
        power_W=1400.0,
        full_power_W=1200.0,
    ),
    _Gpu(
        name="mi300x",
        generation="cdna3",
        units=304,
        tflops=_MI300X,
        memory_MiB=196592,
        bandwidth_Bps=5.3e12,
        matmul=c.MATMUL_MI300X,
        source="AMD Instinct MI300X data sheet (192 GB, 750 W), dense figures; memory: rocm-smi; fp8 at the bf16 share: assumed",
        fp8=c.MATMUL_MI300X,
    ),
)
_CPU = Device(
    name="cpu",
    flops={
        "fp64": c.CPU_FP64_FLOPS,
        "fp32": c.CPU_FP32_FLOPS,
        "bf16": c.CPU_BF16_FLOPS,
        "fp16": c.CPU_BF16_FLOPS,
    },
    memory_bytes=c.CPU_MEMORY_BYTES,
    memory_bandwidth_Bps=c.CPU_COPY_BPS,
    launch_s=c.CPU_LAUNCH_S,
    matmul_efficiency=1.0,
    bandwidth_efficiency=1.0,
    reserved_bytes=c.CPU_RESERVED_BYTES,
    source="measured on one thread of an AMD EPYC (Zen 3), see constants.py; memory assumed",
    generation="cpu",
)


@lru_cache(maxsize=64)
def devices(fitted: FittedConstants = FITTED) -> dict[str, Device]:
    """The catalogue by device name, under these fitted constants. The dict is shared: do not modify
    it.
    """
    return {gpu.name: gpu.device(fitted) for gpu in (*_GPUS, *MORE_GPUS)} | {_CPU.name: _CPU}


DEVICES: dict[str, Device] = devices()
"""The catalogue by device name, under the default fitted constants."""

_NVLS4, _NVLS5 = c.NVLS_HOPPER_EFFICIENCY, c.NVLS_BLACKWELL_EFFICIENCY
NVLINK3 = Link(
    300e9,
    c.NVLINK_STEP_S,
    "NVIDIA A100 datasheet: NVLink 600 GB/s, both directions",
    c.NVLINK3_EFFICIENCY,
    "nvlink",
)
NVLINK4 = Link(
    450e9,
    c.NVLINK_STEP_S,
    "NVIDIA H100 datasheet: NVLink 900 GB/s, both directions",
    c.NVLINK4_EFFICIENCY,
    "nvlink",
    _NVLS4,
)
NVLINK4_H800 = Link(
    200e9,
    c.NVLINK_STEP_S,
    "H800: NVLink 400 GB/s, both directions; see the device",
    c.NVLINK4_EFFICIENCY,
    "nvlink",
    _NVLS4,
)
NVLINK5 = Link(
    900e9,
    c.NVLINK_STEP_S,
    "NVIDIA Blackwell datasheet: NVLink 1.8 TB/s, both directions",
    c.NVLINK5_EFFICIENCY,
    "nvlink",
    _NVLS5,
)
INFINITY_FABRIC = Link(
    448e9,
    c.NVLINK_STEP_S,
    "AMD Instinct MI300X data sheet: 7 links of 128 GB/s, both directions, one to each peer, so "
    "that a group smaller than the node has less; latency assumed as NVLink",
    c.INFINITY_FABRIC_EFFICIENCY,
)
NVLINK2 = Link(
    150e9,
    c.NVLINK_STEP_S,
    "NVIDIA V100 datasheet: NVLink 300 GB/s, both directions; efficiency as NVLink 3: assumed",
    c.NVLINK3_EFFICIENCY,
    "nvlink",
)
NVLINK3_A800 = Link(
    200e9,
    c.NVLINK_STEP_S,
    "A800: NVLink 400 GB/s, both directions; see the device",
    c.NVLINK3_EFFICIENCY,
    "nvlink",
)
NVLINK3_PAIR = Link(
    56.25e9,
    c.NVLINK_STEP_S,
    "NVIDIA A40, RTX A6000 and RTX 3090 datasheets: bridge of two cards, 112.5 GB/s, both directions",
    c.NVLINK3_EFFICIENCY,
    "nvlink",
)
NVLINK_PCIE_PAIR = Link(
    300e9,
    c.NVLINK_STEP_S,
    "NVIDIA A100 PCIe, H100 PCIe and H100 NVL datasheets: bridges of two cards, 600 GB/s, both directions",
    c.NVLINK3_EFFICIENCY,
    "nvlink",
)
INFINITY_FABRIC_MI250X = Link(
    150e9,
    c.NVLINK_STEP_S,
    "AMD CDNA 2 white paper: a die has 3 links of 100 GB/s to other cards, both directions; "
    "efficiency and latency as the MI300X: assumed",
    c.INFINITY_FABRIC_EFFICIENCY,
)
INFINITY_FABRIC_MI355X = Link(
    537.6e9,
    c.NVLINK_STEP_S,
    "AMD Instinct MI355X data sheet: 7 links of 153.6 GB/s, both directions; efficiency and latency as "
    "the MI300X: assumed",
    c.INFINITY_FABRIC_EFFICIENCY,
)
PCIE3 = Link(15.75e9, c.PCIE_STEP_S, "PCI Express 3.0 x16", c.PCIE_EFFICIENCY, "pcie")
PCIE4 = Link(31.5e9, c.PCIE_STEP_S, "PCI Express 4.0 x16", c.PCIE_EFFICIENCY, "pcie")
PCIE5 = Link(63.0e9, c.PCIE_STEP_S, "PCI Express 5.0 x16", c.PCIE_EFFICIENCY, "pcie")
HDR200 = Link(
    25e9,
    c.NETWORK_STEP_S,
    "NVIDIA DGX A100 datasheet: 8 x 200 Gb/s HDR InfiniBand",
    c.INFINIBAND_EFFICIENCY,
    "network",
)
NDR400 = Link(
    50e9,
    c.NETWORK_STEP_S,
    "NVIDIA DGX H100, H200, B200 and GB200 datasheets: one 400 Gb/s ConnectX-7 per GPU",
    c.INFINIBAND_EFFICIENCY,
    "network",
)
XDR800 = Link(
    100e9,
    c.NETWORK_STEP_S,
    "NVIDIA DGX B300 and GB300 NVL72 datasheets: one 800 Gb/s ConnectX-8 per GPU",
    c.INFINIBAND_EFFICIENCY,
    "network",
)
EDR100 = Link(
    12.5e9,
    c.NETWORK_STEP_S,
    "NVIDIA DGX-1 datasheet: 4 x 100 Gb/s EDR InfiniBand",
    c.INFINIBAND_EFFICIENCY,
    "network",
)
EFA100 = Link(
    12.5e9,
    c.NETWORK_STEP_S,
    "AWS EC2 accelerated-computing network specifications: 100 Gb/s EFA interfaces; latency as "
    "InfiniBand: assumed",
    c.EFA1_EFFICIENCY,
    "network",
)
EFA200 = Link(
    25e9,
    c.NETWORK_STEP_S,
    "AWS EC2 accelerated-computing network specifications: 200 Gb/s EFA interfaces; efficiency as "
    "EFA of 100 Gb/s: assumed",
    c.EFA1_EFFICIENCY,
    "network",
)
EFA400 = Link(
    50e9,
    c.NETWORK_STEP_S,
    "AWS EC2 accelerated-computing network specifications: 400 Gb/s EFA interfaces; efficiency as "
    "EFA of 100 Gb/s: assumed",
    c.EFA1_EFFICIENCY,
    "network",
)
TCPX200 = Link(
    25e9,
    c.NETWORK_STEP_S,
    "cloud.google.com/compute/docs/gpus/gpu-network-bandwidth: interfaces of 200 Gb/s (GPUDirect-TCPX "
    "and TCPXO); efficiency as EFA: assumed",
    c.EFA1_EFFICIENCY,
    "network",
)
CLOUD_ETHERNET100 = Link(
    12.5e9,
    c.NETWORK_STEP_S,
    "instances with 100 Gb/s: cloud.google.com/compute/docs/gpus/gpu-network-bandwidth, "
    "aws.amazon.com/ec2/instance-types; efficiency as EFA: assumed",
    c.EFA1_EFFICIENCY,
    "network",
)
OMNIPATH100 = Link(
    12.5e9,
    c.NETWORK_STEP_S,
    "github.com/bigscience-workshop/bigscience, jz/hpc-specs.md: 4 Omni-Path 100 Gb/s links "
    "a node of 8 GPUs; latency as InfiniBand: assumed",
    c.OMNIPATH_EFFICIENCY,
    "network",
)
GLOO = Link(c.GLOO_BPS, c.GLOO_STEP_S, "assumed (constants.py)")
ETHERNET = Link(c.ETHERNET_BPS, c.ETHERNET_STEP_S, "assumed: 10 Gb/s Ethernet (constants.py)")

LINKS: dict[str, Link] = {
    "nvlink3": NVLINK3,
    "nvlink4": NVLINK4,
    "nvlink4-h800": NVLINK4_H800,
    "nvlink5": NVLINK5,
    "nvlink2": NVLINK2,
    "nvlink3-a800": NVLINK3_A800,
    "nvlink3-pair": NVLINK3_PAIR,
    "nvlink-pcie-pair": NVLINK_PCIE_PAIR,
    "infinity-fabric": INFINITY_FABRIC,
    "infinity-fabric-mi250x": INFINITY_FABRIC_MI250X,
    "infinity-fabric-mi355x": INFINITY_FABRIC_MI355X,
    "pcie3": PCIE3,
    "pcie4": PCIE4,
    "pcie5": PCIE5,
    "edr100": EDR100,
    "hdr200": HDR200,
    "ndr400": NDR400,
    "xdr800": XDR800,
    "efa100": EFA100,
    "efa200": EFA200,
    "efa400": EFA400,
    "tcpx200": TCPX200,
    "cloud-ethernet100": CLOUD_ETHERNET100,
    "omnipath100": OMNIPATH100,
    "gloo": GLOO,
    "ethernet": ETHERNET,
}

CARD_LINKS: dict[str, Link] = {
    "a100-pcie-40g": PCIE4,
    "a100-pcie-80g": PCIE4,
    "l40s": PCIE4,
    "h100-pcie": PCIE5,
    "h100-nvl": PCIE5,
    "t4": PCIE3,
    "a10": PCIE4,
    "l4": PCIE4,
    "a40": PCIE4,
    "a6000": PCIE4,
    "rtx3090": PCIE4,
    "rtx4090": PCIE4,
    "rtx6000-ada": PCIE4,
    "rtx5090": PCIE5,
    "rtx-pro-6000": PCIE5,
    "cpu": GLOO,
}
"""The link between devices of one host, for cards that have no node preset."""


def _host(node_bytes: int, channels: int, megatransfers: float, link: Link, source: str) -> Host:
    """A device's eighth of a host's memory, with `channels` memory channels of 8 bytes at
    `megatransfers` MT/s. Each device is assumed to have its own link.
    """
    return Host(
        node_bytes // 8,
        channels * megatransfers * 8e6 / 8,
        link.bandwidth_Bps,
        f"{source}; {link.source}",
        c.HOST_ADAM_EFFICIENCY,
        link.efficiency,
    )


_DGX_A100 = "NVIDIA DGX A100 datasheet: two EPYC 7742 (8 channels of DDR4-3200 each)"
_DGX_H100 = (
    "NVIDIA DGX H100 and H200 datasheets: two Xeon 8480C (8 channels of DDR5-4800 each), 2 TB"
)
_DGX_B200 = "NVIDIA DGX B200 datasheet: two Xeon 8570 (8 channels of DDR5-5600 each), 2 TB"
_DGX_1 = (
    "NVIDIA DGX-1 datasheet: two Xeon E5-2698 v4 (4 channels each), 512 GB of DDR4 at 2,133 MT/s"
)
_G5 = (
    "docs.aws.amazon.com/batch/latest/userguide/gpu-jobs.html: g5.48xlarge, 768 GiB; two EPYC 7R32 of the second generation "
    "(8 channels of DDR4-3200 each)"
)
HOSTS: dict[str, Host] = {
    "v100-16g": _host(512 * 10**9, 8, 2133, PCIE3, _DGX_1),
    "v100-32g": _host(512 * 10**9, 8, 2133, PCIE3, _DGX_1),
    "a10g": _host(768 * c.GIB, 16, 3200, PCIE4, _G5),
    "a100-40g": _host(1000 * c.GIB, 16, 3200, PCIE4, f"{_DGX_A100}, 1 TB"),
    "a100-80g": _host(2000 * c.GIB, 16, 3200, PCIE4, f"{_DGX_A100}, 2 TB"),
    "h100": _host(2000 * c.GIB, 16, 4800, PCIE5, _DGX_H100),
    "h200": _host(2000 * c.GIB, 16, 4800, PCIE5, _DGX_H100),
    "b200": _host(2000 * c.GIB, 16, 5600, PCIE5, _DGX_B200),
    "gh200": Host(
        480 * 10**9,
        384e9,
        450e9,
        "NVIDIA GH200 datasheet: Grace with 480 GB of LPDDR5X at 384 GB/s; NVLink-C2C 900 GB/s, both directions",
        c.HOST_ADAM_EFFICIENCY,
    ),
    "cpu": Host(
        c.CPU_MEMORY_BYTES,
        c.CPU_COPY_BPS,
        c.CPU_COPY_BPS,
        "a process is its own host: as the device",
    ),
}
"""The host of each catalogue device, in the node preset that it belongs to."""


WITHOUT_CUDA_OR_ROCM = {
    "tpu": "Google's TPUs run PyTorch by torch_xla, which compiles and shards by itself",
    "trainium": "AWS Trainium runs PyTorch by the Neuron compiler, which shards by itself",
    "trn": "AWS Trainium runs PyTorch by the Neuron compiler, which shards by itself",
    "inferentia": "AWS Inferentia does not train",
    "gaudi": "Intel Gaudi runs PyTorch by its own bridge (hpu), and nobody's runs on it are known here",
    "hpu": "Intel Gaudi runs PyTorch by its own bridge (hpu), and nobody's runs on it are known here",
    "ascend": "Huawei Ascend runs PyTorch by torch_npu, and nobody's runs on it are known here",
    "cerebras": "Cerebras compiles models by its own software",
    "groq": "Groq does not train",
    "ipu": "Graphcore's IPUs compile models by their own software",
    "mps": "Apple's GPUs have no collectives in torch.distributed",
}
"""Accelerators that cannot be planned for, by the beginning of their names, with the reason."""


def reason_against(name: str) -> str | None:
    """Why no plan can be made for the accelerator `name`; None if nothing is known against it."""
    found = name.lower().removeprefix("aws-").removeprefix("intel-").removeprefix("google-")
    return next(
        (reason for word, reason in WITHOUT_CUDA_OR_ROCM.items() if found.startswith(word)), None
    )


def device(name: str, fitted: FittedConstants = FITTED) -> Device:
    """The catalogue entry `name`. Raises ValueError with the nearest names if there is none."""
    catalogue = devices(fitted)
    found = catalogue.get(name.lower()) if isinstance(name, str) else None
    if found is None:
        if isinstance(name, str) and (reason := reason_against(name)):
            raise ValueError(
                f"device {shown(name)}: {reason}; plans are for PyTorch on CUDA, ROCm and CPUs"
            )
        raise ValueError(f"unknown device {shown(name)}; {nearest(name, list(catalogue))}")
    return found
