"""The constants that no datasheet and no paper gives: fitted on published training runs, all of them here.

A function or builder that needs one takes a `FittedConstants` as an argument, so that a refit on part of the data is a value, not a patch.
"Assumed" marks a default that is a first guess; a fit replaces it and its line says on what.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from autopar_cost_models.checks import positive
from autopar_cost_models.echo import shown


@dataclass(frozen=True, slots=True)
class FittedConstants:
    """At most 15 numbers, none of which depends on a model, a source or a row.  Multipliers act on a sourced figure; 1 keeps it.
    `power_exponent` is no fit but follows from two sourced figures, and can be switched off here; what is fitted elsewhere is
    `constants.FP8_ROWWISE_RATE`, on one pair of runs that is not among those below.

    Fitted: least absolute error of the logarithms of the step times of 156 published runs of 12 sources (`autopar predict --loso`, begun
    anew where it ended until the constants stayed), all twelve at once.  Ranges are those of fits without one source at a time.
    """

    ampere_efficiency: float = 0.855
    """Matmuls inside a training step / best matmul of the device in isolation (`catalogue.py`), on GPUs of generation Ampere and Ada:
    heat, power and cold caches.  Fitted (0.85 to 0.87)."""

    hopper_efficiency: float = 0.78
    """The same on Hopper and CDNA 3.  Fitted (0.78 to 0.79)."""

    blackwell_efficiency: float = 0.754
    """The same on Blackwell.  Fitted (0.74 to 0.76)."""

    fp8_efficiency: float = 1.068
    """The same for fp8, on top of the generation's.  Fitted (1.05 to 1.11)."""

    attention_efficiency: float = 1.086
    """Flash attention inside a training step / the rate its authors measured (`attention.py`), on top of the generation's.
    Fitted (1.05 to 1.10)."""

    hbm_efficiency: float = 0.759
    """Streaming through device memory / datasheet bandwidth.  Fitted (0.74 to 0.77)."""

    tile_s: float = 2.5e-6
    """Seconds that a multiprocessor spends on a tile of 256 x 128 results besides its products, to fill its pipeline and to store, before
    Hopper (`catalogue.py`).  Fitted (2.50e-6 to 2.53e-6)."""

    launch_s: float = 3.0e-6
    """Seconds between the end of a kernel and the start of the next that depends on it.  Fitted: it did not move from what was assumed."""

    deepspeed_pass_s: float = 2.35e-3
    """Seconds that Megatron-DeepSpeed takes more than Megatron-LM for each pass (forward, recomputation, backward) over a layer,
    whatever the micro-batch.  Fitted (2.3e-3 to 2.4e-3; only two sources ran it)."""

    reserved_bytes: float = 1.0 * 2**30
    """Device memory that no tensor can use: CUDA context, kernels, cuBLAS workspaces.  Assumed.  NCCL's buffers are in `constants.py`."""

    fragmentation: float = 0.14
    """What the caching allocator holds around activations / activations.  Fitted: the mean error of the memory of 32 published runs is
    -1 % (`autopar predict`), their mean absolute error 4.1 to 4.3 % from 0.12 to 0.18, and no layout that ran is rejected for it."""

    power_exponent: float = 0.68
    """Matmul rate ~ power limit ** this, for parts of one chip.  From H100 PCIe (350 W, 496 TFLOP/s) against H100 SXM (700 W, 794.5):
    ln 0.624 / ln 0.5; sources in `catalogue.py`."""

    intra_efficiency: float = 0.735
    """Link rate inside a node during training / in a benchmark of its own (`constants.py`).  Fitted (0.71 to 0.77)."""

    inter_efficiency: float = 0.68
    """Link rate between nodes during training / in a benchmark of its own: congestion, collisions, stragglers.  Fitted
    (0.65 to 0.69)."""

    overlap_slowdown: float = 0.315
    """Share of the device that a running collective takes from compute: its multiprocessors, and device memory.  Fitted (0.31 to 0.32;
    16 channels, one multiprocessor each, would be 0.12 of an H100)."""

    def matmul_efficiency(self, generation: str) -> float:
        """Matmuls of a training step / best matmul, on GPUs of a generation of `catalogue.py`."""
        return getattr(self, _EFFICIENCIES[generation])

    def __post_init__(self) -> None:
        for f in fields(self):
            value = positive(
                f"fitted constant {f.name}",
                getattr(self, f.name),
                zero_allowed=f.name in _MAY_BE_ZERO,
            )
            object.__setattr__(self, f.name, value)
        if self.overlap_slowdown >= 1:
            raise ValueError(
                f"fitted constant overlap_slowdown={shown(self.overlap_slowdown)} must be below 1: it is a share of the device"
            )


_EFFICIENCIES = {
    "ampere": "ampere_efficiency",
    "hopper": "hopper_efficiency",
    "blackwell": "blackwell_efficiency",
    "ada": "ampere_efficiency",  # by year and process; nobody's runs of these two are known here
    "cdna3": "hopper_efficiency",
}
_MAY_BE_ZERO = (
    "tile_s",
    "fragmentation",
    "launch_s",
    "deepspeed_pass_s",
    "reserved_bytes",
    "power_exponent",
    "overlap_slowdown",
)

FITTED = FittedConstants()
"""The values in use."""

ISOLATED = replace(
    FITTED, ampere_efficiency=1.0, hopper_efficiency=1.0, blackwell_efficiency=1.0, fp8_efficiency=1.0, attention_efficiency=1.0,
    hbm_efficiency=0.9, intra_efficiency=1.0, inter_efficiency=1.0,
)  # fmt: skip
"""Kernels that run alone, as microbenchmarks measure them."""
