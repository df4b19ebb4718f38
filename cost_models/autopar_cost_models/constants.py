"""Efficiencies and latencies from sources other than datasheets. Constants fitted on training runs
are in `fitted.py`.

Achieved rate = datasheet rate * efficiency. Each number names its source, or says that it is
assumed.
"""

GIB = 2**30
MIB = 2**20

BUCKET_BYTES = 25 * MIB
"""Bytes of a bucket in which gradients are reduced, and parameters that ZeRO updated are gathered:
the default of PyTorch's DDP (Li et al. 2020, section 4.2.2).
"""

# Best matmul measured over many shapes / dense datasheet peak, github.com/stas00/ml-engineering, compute/accelerator/README.md,
# "Maximum Achievable Matmul FLOPS Comparison Table" (MAMF), 2026-08.  TFLOP/s measured of TFLOP/s on the datasheet, bf16 then fp8.
# The bf16 fraction is assumed for fp16, tf32, fp32 and fp64.
MATMUL_A100_SXM = 271.2 / 312
MATMUL_A100_PCIE = 252.9 / 312
MATMUL_H100_SXM = 0.803  # 794.5 of 989; H200 "is the same"
MATMUL_H100_SXM_FP8 = 1402.6 / 1979
MATMUL_H200_FP8 = 1453.4 / 1979
MATMUL_B200 = 1745.0 / 2250
MATMUL_B200_FP8 = 3432.5 / 4500
MATMUL_B300 = 1769.0 / 2250
MATMUL_B300_FP8 = 3353.3 / 4500
MATMUL_GB200 = 1822.0 / 2500
MATMUL_GB200_FP8 = 3615.6 / 5000
MATMUL_MI300X = 668.4 / 1307.4
# github.com/zzc0721/torch-performance-test-data/issues/95: 4096**3 in bf16, torch 2.9
MATMUL_H100_PCIE = 495.9 / 756
# Products with a scale for each row / with one for each tensor: the value with which this cost model gives the measured ratio.
# Llama 3 8B on 8 H100 (500 W, torch.compile): bf16 5760, row-wise 6424, tensor-wise 7186 tokens/s
# (github.com/pytorch/torchtitan, commit 7a04053).
FP8_ROWWISE_RATE = 0.785
H100_SXM_POWER_W = 700.0  # H100 datasheet: the power limit under which the SXM rates were measured

# Bus bandwidth of a ring over large messages / line rate.
NVLINK3_EFFICIENCY = 235 / 300  # NCCL src/graph/tuning.cc: "if (compCap80) busBw = min(busBw, 235)"
# github.com/NVIDIA/nccl-tests/issues/212: line rate 450 GB/s, 370 GB/s effective with NCCL_ALGO=RING
NVLINK4_EFFICIENCY = 370 / 450
# ml-engineering, network/README.md, "SHARP": 8 x B200, all-reduce of 8 GiB, NVLS off
NVLINK5_EFFICIENCY = 682.2 / 900
# ml-engineering, network/README.md, "Peer-to-peer bandwidth": all-reduce of 8 x MI300X
INFINITY_FABRIC_EFFICIENCY = 312.9 / 448
# github.com/NVIDIA/nccl-tests/issues/290: 46-48 GB/s of a 400 Gb/s NIC
INFINIBAND_EFFICIENCY = 47 / 50
# ml-engineering, network/README.md, "EFA": 340 Gb/s effective in all-reduce tests
EFA1_EFFICIENCY = 340 / 400
# github.com/bigscience-workshop/bigscience, experiments/README.md: JeanZay, 135 Gb/s of 4 x 100 a node
OMNIPATH_EFFICIENCY = 135 / 400
# NCCL src/graph/topo.h: PCI_BW 12.0 GB/s for Gen3 x16, whose line rate is 15.75; assumed for Gen4 and Gen5
PCIE_EFFICIENCY = 12.0 / 15.75

# In-switch all-reduce (NVLS): achieved / line rate at size * (1 + 1/n) bytes per GPU and direction.
# Source: ml-engineering, network/README.md, "SHARP".
# Bus bandwidths of 414, 436, 460, 473 GB/s over 5, 6, 7, 8 x H200 and 778, 811, 838 over 6, 7, 8 x B200 are all within 2 %.
NVLS_HOPPER_EFFICIENCY = 0.68
NVLS_BLACKWELL_EFFICIENCY = 0.60

# Latency of one step of a ring: NCCL src/graph/tuning.cc, hwLatencies, Ring with the LL128 protocol; `nccl.py` has the other protocols.
NVLINK_STEP_S = 1.9e-6
PCIE_STEP_S = 2.5e-6
NETWORK_STEP_S = 4.0e-6

DISPATCH_S = 24e-6  # seconds the host needs to issue one operation in eager mode: `autopar calibrate` beside an H200, 2026-11-26
OWN_OP_ISSUES = 15  # operations that the host issues in the time of one op of autopar_kernels, in each pass: 0.6 to 0.9 ms for both at
# 24 us (benchmarks/results/kernels_h200.txt, column host)

# Buffers of one communicator (NCCL src/include/device.h and src/init.cc).  The protocols are LL (512 threads x 8 lines x 8 steps x 16
# bytes), LL128 (640 threads x 120 x 8 steps x 8 bytes) and Simple (NCCL_BUFFSIZE).  Each connection of a channel has their buffers on its
# receiving side.  A channel has one connection of its ring and three of its tree.
# 24 channels are what NCCL opens between GPUs of generation Ampere (assumed for the others).
NCCL_CONNECTION_BYTES = 512 * 8 * 8 * 16 + 640 * 120 * 8 * 8 + 4 * MIB
NCCL_CONNECTIONS = 4
NCCL_CHANNELS = 24

# Share of the multiprocessors that are busy at the MAMF shapes, in tiles of 128 x 256 (A100 0.988, H100 0.970, B200 0.993, GB200 1.0 with
# 152).  The measured rates above contain this much wave quantization.
QUANTIZATION_OF_BEST = 0.98

HOST_ADAM_EFFICIENCY = (
    0.5  # of the host's memory bandwidth, that a fused Adam on its processors reaches: assumed
)

# CPU processes: one thread of an AMD EPYC (Zen 3, 2.4 GHz, AVX2) with torch 2.13, matmul of 1024 x 1024, copy of 128 MiB, add of 4 numbers.
CPU_FP32_FLOPS = 8.0e10
CPU_FP64_FLOPS = 3.5e10
CPU_BF16_FLOPS = 9.1e8  # no bf16 instructions: emulated
CPU_COPY_BPS = 4.1e9
CPU_LAUNCH_S = 3.0e-6
CPU_MEMORY_BYTES = 8 * GIB  # share of one process in the host's memory: assumed
CPU_RESERVED_BYTES = GIB // 2  # interpreter and torch libraries: assumed
GLOO_BPS = 1.0e9  # gloo between processes of one host: assumed
GLOO_STEP_S = 5.0e-5  # assumed
ETHERNET_BPS = 1.25e9  # 10 Gb/s Ethernet between hosts: assumed
ETHERNET_STEP_S = 1.0e-4  # assumed
