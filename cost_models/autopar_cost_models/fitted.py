"""The constants that no datasheet and no paper gives: fitted on published training runs, all of them here.

A function or builder that needs one takes a `FittedConstants` as an argument, so that a refit on part of the data is a value, not a patch.
"Assumed" marks a default that is a first guess; a fit replaces it and its line says on what.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from autopar_cost_models.checks import positive


@dataclass(frozen=True, slots=True)
class FittedConstants:
    """At most 15 numbers, none of which depends on a model, a source or a row.  Multipliers act on a sourced figure; 1 keeps it.

    Fitted: least absolute error of the logarithms of the step times of 135 published runs of 11 sources (`autopar predict --loso`), all
    eight at once.  The range of each is that of fits without one source at a time.
    """

    ampere_efficiency: float = 0.843
    """Matmuls inside a training step / best matmul of the device in isolation (`catalogue.py`), on GPUs of generation Ampere and Ada:
    heat, power and cold caches."""

    hopper_efficiency: float = 0.776
    """The same on Hopper and CDNA 3."""

    blackwell_efficiency: float = 0.78
    """The same on Blackwell."""

    fp8_efficiency: float = 1.10
    """The same for fp8, on top of the generation's.  Fitted: 0.997, left at 1."""

    attention_efficiency: float = 1.095
    """Flash attention inside a training step / the rate its authors measured (`attention.py`), on top of the generation's.
    Fitted (1.00 to 1.25: long sequences of two sources decide)."""

    hbm_efficiency: float = 0.791
    """Streaming through device memory / datasheet bandwidth.  Fitted (0.80 to 0.90)."""

    tile_s: float = 2.9e-6
    """Seconds that a multiprocessor spends on a tile of 256 x 128 results besides its products, to fill its pipeline and to store."""

    launch_s: float = 3.0e-6
    """Seconds between the end of a kernel and the start of the next that depends on it.  Fitted: it did not move from what was assumed."""

    deepspeed_pass_s: float = 3.5e-3
    """Seconds that Megatron-DeepSpeed of 2022 takes more than Megatron-LM for each pass (forward, recomputation, backward) over a layer,
    whatever the micro-batch."""

    reserved_bytes: float = 1.0 * 2**30
    """Device memory that no tensor can use: CUDA context, kernels, cuBLAS workspaces.  Assumed.  NCCL's buffers are in `constants.py`."""

    fragmentation: float = 0.14
    """What the caching allocator holds around activations / activations.  Fitted: the mean error of the memory of 32 published runs is
    -1 % (`autopar predict`), their mean absolute error 4.1 to 4.3 % from 0.12 to 0.18, and no layout that ran is rejected for it."""

    power_exponent: float = 0.68
    """Matmul rate ~ power limit ** this, for parts of one chip.  From H100 PCIe (350 W, 496 TFLOP/s) against H100 SXM (700 W, 794.5):
    ln 0.624 / ln 0.5; sources in `catalogue.py`."""

    intra_efficiency: float = 0.814
    """Link rate inside a node during training / in a benchmark of its own (`constants.py`).  Fitted (0.90 to 0.97)."""

    inter_efficiency: float = 0.77
    """Link rate between nodes during training / in a benchmark of its own: congestion, collisions, stragglers.  Fitted
    (0.85 to 0.92)."""

    overlap_slowdown: float = 0.131
    """Share of the device that a running collective takes from compute.  16 NCCL channels, one multiprocessor each, of 132; the fit did not
    move it."""

    def matmul_efficiency(self, generation: str) -> float:
        """Matmuls of a training step / best matmul, on GPUs of a generation of `catalogue.py`."""
        return getattr(self, f"{_ALIKE.get(generation, generation)}_efficiency")

    def __post_init__(self) -> None:
        for f in fields(self):
            value = positive(f"fitted constant {f.name}", getattr(self, f.name), zero_allowed=f.name in _MAY_BE_ZERO)
            object.__setattr__(self, f.name, value)
        if self.overlap_slowdown >= 1:
            raise ValueError(f"fitted constant overlap_slowdown={self.overlap_slowdown!r} must be below 1: it is a share of the device")


_ALIKE = {"ada": "ampere", "cdna3": "hopper"}  # by year and process; nobody's runs of these are known here
_MAY_BE_ZERO = ("tile_s", "fragmentation", "launch_s", "deepspeed_pass_s", "reserved_bytes", "power_exponent", "overlap_slowdown")

FITTED = FittedConstants()
"""The values in use."""

ISOLATED = replace(
    FITTED, ampere_efficiency=1.0, hopper_efficiency=1.0, blackwell_efficiency=1.0, fp8_efficiency=1.0, attention_efficiency=1.0,
    hbm_efficiency=0.9, intra_efficiency=1.0, inter_efficiency=1.0,
)  # fmt: skip
"""Kernels that run alone, as microbenchmarks measure them."""
