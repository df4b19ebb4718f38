"""The models of single kernels and collectives against measurements that others published.  Nothing here is fitted to them, but for the
plateaus that `constants.py` and `attention.py` cite."""

import autopar_cost_models as cm
import pytest
from autopar_cost_models.attention import flash_attention_time_s
from autopar_cost_models.matmul import shaped_matmul_time_s

MIB = 2**20
H100 = cm.device("h100", cm.ISOLATED)


def tflops(flops: float, time_s: float) -> float:
    return flops / time_s / 1e12


@pytest.mark.parametrize(
    ("name", "size", "measured", "within"),
    [
        ("h100", 2048, 676.6, 0.05),
        ("h100", 4096, 788.7, 0.05),
        ("h100", 8192, 797.5, 0.05),
        ("h100", 1024, 176.6, 0.5),
        ("h100-pcie", 4096, 495.9, 0.05),
        ("h100-pcie", 8192, 492.8, 0.05),
        ("h100-pcie", 2048, 449.1, 0.35),
    ],
)
def test_square_bf16_matmuls(name, size, measured, within):
    """github.com/zzc0721/torch-performance-test-data, issues 79 and 95.  The smallest are bound by launches of the benchmark."""
    time_s = shaped_matmul_time_s(size, size, size, cm.device(name, cm.ISOLATED), "bf16")
    assert tflops(2 * size**3, time_s) == pytest.approx(measured, rel=within)


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "measured"),
    [
        ("a100-80g", (1024, 10240, 5120), "bf16", 271.2),
        ("h100", (2048, 2048, 13312), "bf16", 794.5),
        ("b200", (1792, 16128, 3072), "bf16", 1745),
        ("gb200", (4096, 9728, 2048), "bf16", 1822),
        ("b200", (15360, 4096, 3072), "fp8", 3432.5),
        ("h100", (1024, 9216, 14336), "fp8", 1402.6),
        ("h200", (1280, 4096, 12032), "fp8", 1453.4),
    ],
)
def test_best_matmuls(name, shape, dtype, measured):
    """github.com/stas00/ml-engineering, compute/accelerator/README.md."""
    time_s = shaped_matmul_time_s(*shape, cm.device(name, cm.ISOLATED), dtype)
    assert tflops(2 * shape[0] * shape[1] * shape[2], time_s) == pytest.approx(measured, rel=0.07)


SEQUENCES = (512, 1024, 2048, 4096, 8192, 16384)


@pytest.mark.parametrize(
    ("kernel", "causal", "backward", "measured"),
    [
        ("flash2", False, False, (309, 350, 362, 368, 370, 370)),
        ("flash2", True, False, (191, 260, 298, 319, 333, 335)),
        ("flash3", False, False, (467, 565, 625, 638, 646, 648)),
        ("flash3", True, False, (292, 423, 521, 579, 602, 616)),
        ("cudnn", False, False, (497, 574, 617, 609, 600, 595)),
        ("cudnn", True, False, (315, 410, 484, 518, 529, 539)),
        ("flash2", False, True, (214, 260, 291, 310, 318, 322)),
        ("flash3", False, True, (316, 424, 501, 542, 559, 561)),
        ("cudnn", False, True, (305, 408, 465, 499, 518, 516)),
    ],
)
def test_flash_attention_on_an_h100(kernel, causal, backward, measured):
    """FlashAttention-3, arXiv:2407.08608, figures 5 and 6: 16k tokens, 2048 hidden, heads of 128; TFLOP/s of half the pairs if causal."""
    for length, rate in zip(SEQUENCES, measured, strict=True):
        batch, options = 16384 // length, {"kernel": kernel, "causal": causal, "backward": backward}
        time_s = flash_attention_time_s(
            batch, 16, 16, length, length, 128, H100, fitted=cm.ISOLATED, **options
        )
        flops = (10 if backward else 4) * batch * 16 * length**2 * 128 / (2 if causal else 1)
        within = 0.4 if length < 1024 else 0.2 if backward else 0.12
        assert tflops(flops, time_s) == pytest.approx(rate, rel=within)


@pytest.mark.parametrize(
    ("mib", "measured_us"),
    [
        (1, 27.76),
        (2, 40.66),
        (4, 53.24),
        (8, 81.16),
        (16, 121.33),
        (32, 195.40),
        (128, 700.25),
        (256, 1366.17),
        (512, 2671.60),
        (1024, 5252.64),
        (1 / 32, 18.66),
        (1 / 4, 19.54),
    ],
)
def test_all_reduce_by_size_on_nvlink4(mib, measured_us):
    """8 x H20 (NVLink 4), ring, NCCL 2.30: github.com/kvcache-ai/Mooncake/pull/3484.  The plateau is 3 % below NVIDIA's 370 GB/s."""
    time_s = cm.all_reduce_time_s(
        mib * MIB, 8, 1, cm.node_preset("dgx-h100").topology(1, cm.ISOLATED)
    )
    assert time_s * 1e6 == pytest.approx(measured_us, rel=0.2 if mib < 1 else 0.15)


@pytest.mark.parametrize(
    ("name", "ranks", "bus_GBps"),
    [
        ("dgx-h200", 5, 414.2),
        ("dgx-h200", 6, 435.6),
        ("dgx-h200", 7, 460.0),
        ("dgx-h200", 8, 473.1),
        ("dgx-b200", 6, 778.2),
        ("dgx-b200", 7, 811.2),
        ("dgx-b200", 8, 838.0),
    ],
)
def test_reduction_in_the_switch(name, ranks, bus_GBps):
    """8 GiB with NVLS: github.com/stas00/ml-engineering, network/README.md, "SHARP"."""
    node = cm.node_preset(name)
    topology = cm.Topology(ranks, 1, node.intra, node.inter)
    time_s = cm.all_reduce_time_s(8 * 2**30, ranks, 1, topology, cm.Traffic(in_switch=True))
    assert 2 * (ranks - 1) / ranks * 8 * 2**30 / time_s / 1e9 == pytest.approx(bus_GBps, rel=0.03)


def test_four_gpus_do_not_reduce_in_the_switch():
    topology = cm.Topology(4, 1, cm.LINKS["nvlink4"], cm.LINKS["ndr400"])
    assert cm.all_reduce_time_s(
        1e9, 4, 1, topology, cm.Traffic(in_switch=True)
    ) == cm.all_reduce_time_s(1e9, 4, 1, topology)


@pytest.mark.parametrize(
    ("gib", "bus_GBps"), [(0.5, 326.9), (1, 361.99), (2, 372.42), (4, 377.34), (16, 381.80)]
)
def test_all_reduce_over_four_nodes_of_b200(gib, bus_GBps):
    """The same page, "Inter-node speed depends on intra-node speed": the sum of phases would be 28 ms for 4 GiB, measured are 22."""
    time_s = cm.all_reduce_time_s(
        gib * 2**30, 32, 1, cm.node_preset("dgx-b200").topology(4, cm.ISOLATED)
    )
    assert 2 * 31 / 32 * gib * 2**30 / time_s / 1e9 == pytest.approx(bus_GBps, rel=0.05)


def test_all_reduce_over_three_nodes_with_half_as_many_interfaces():
    """3 x 8 A100 with 4 x 200 Gb/s InfiniBand: 95.7 GB/s at 128 MB (github.com/NVIDIA/nccl-tests/issues/119)."""
    topology = cm.Topology(8, 3, cm.LINKS["nvlink3"], cm.LINKS["hdr200"], nics_per_node=4)
    time_s = cm.all_reduce_time_s(133169160, 24, 1, topology)
    assert 2 * 23 / 24 * 133169160 / time_s / 1e9 == pytest.approx(95.7, rel=0.1)
