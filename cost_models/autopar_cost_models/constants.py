"""Every efficiency and latency that is not on a datasheet, in one place.

Achieved rate = datasheet rate * efficiency.  Each number names its source, or says that it is assumed and to be fitted by calibration.
"""

GIB = 2**30
MIB = 2**20

# Best bf16 matmul measured over many shapes / datasheet peak: the "MAMF" table in github.com/stas00/ml-engineering,
# compute/accelerator/README.md (A100 SXM 267.9 of 312, H100 SXM 794.5 of 989, B200 SXM 1745 of 2250 TFLOP/s).
# Measured for bf16; the same fraction is assumed for the other dtypes.
MATMUL_EFFICIENCY_AMPERE = 0.859
MATMUL_EFFICIENCY_HOPPER = 0.803
MATMUL_EFFICIENCY_BLACKWELL = 0.776

HBM_EFFICIENCY = 0.90  # streaming copy / datasheet bandwidth: assumed, to be fitted by calibration
KERNEL_LAUNCH_S = 3.0e-6  # gap between dependent small kernels in eager mode: assumed, to be fitted by calibration
CUDA_RESERVED_BYTES = 2 * GIB  # CUDA context, cuBLAS workspaces, NCCL buffers: assumed, to be fitted by calibration

# Bus bandwidth of a ring / line rate.
NVLINK3_EFFICIENCY = 235 / 300  # NCCL src/graph/tuning.cc: "if (compCap80) busBw = min(busBw, 235)"
NVLINK4_EFFICIENCY = 370 / 450  # github.com/NVIDIA/nccl-tests/issues/212: line rate 450 GB/s, 370 GB/s effective with NCCL_ALGO=RING
NVLINK5_EFFICIENCY = NVLINK4_EFFICIENCY  # assumed equal to NVLink 4, to be fitted by calibration
INFINIBAND_EFFICIENCY = 47 / 50  # github.com/NVIDIA/nccl-tests/issues/290: 46-48 GB/s of a 400 Gb/s NIC

# Latency of one step of a ring: NCCL src/graph/tuning.cc, hwLat, Ring with the LL128 protocol, NVLink and network.
NVLINK_STEP_S = 1.9e-6
NETWORK_STEP_S = 4.0e-6

# CPU processes: one thread of an AMD EPYC (Zen 3, 2.4 GHz, AVX2) with torch 2.13, matmul of 1024 x 1024, copy of 128 MiB, add of 4 numbers.
CPU_FP32_FLOPS = 8.0e10
CPU_FP64_FLOPS = 3.5e10
CPU_BF16_FLOPS = 9.1e8  # no bf16 instructions: emulated
CPU_COPY_BPS = 4.1e9
CPU_LAUNCH_S = 3.0e-6
CPU_MEMORY_BYTES = 8 * GIB  # share of one process in the host's memory: assumed
CPU_RESERVED_BYTES = GIB // 2  # interpreter and torch libraries: assumed
GLOO_BPS = 1.0e9  # gloo between processes of one host: assumed, to be fitted by calibration
GLOO_STEP_S = 5.0e-5  # assumed, to be fitted by calibration
ETHERNET_BPS = 1.25e9  # 10 Gb/s Ethernet between hosts: assumed
ETHERNET_STEP_S = 1.0e-4  # assumed
