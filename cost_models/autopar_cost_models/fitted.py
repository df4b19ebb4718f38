"""All constants that no datasheet or paper gives, fitted on published training runs.

A function that needs one takes a `FittedConstants` as an argument, so a refit on part of the data
is a value, not a patch. "Assumed" marks a first guess; a fit replaces it and its line says on which
data.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from autopar_cost_models.checks import positive
from autopar_cost_models.echo import shown


@dataclass(frozen=True, slots=True)
class FittedConstants:
    """At most 15 constants; none depends on a model, a source or a row of the data. Multipliers
    apply to a sourced figure; 1 keeps it.

    `power_exponent` follows from two sourced figures, but can be switched off here. One more
    constant is fitted elsewhere: `constants.FP8_ROWWISE_RATE`, on two runs that are not part of the
    data below.

    The fit minimizes the absolute error of log step time over 156 published runs of 12 sources, all
    constants at once. It ran with `autopar predict --loso` and was repeated from its own result
    until the constants no longer changed. Ranges in parentheses are those of the fits that leave
    one source out.
    """

    ampere_efficiency: float = 0.837
    """Matmul rate inside a training step over the device's best isolated matmul rate
    (`catalogue.py`), on Ampere and Ada GPUs. Causes are heat, power and cold caches. Fitted
    (0.83 to 0.85).
    """

    hopper_efficiency: float = 0.78
    """As `ampere_efficiency`, on Hopper and CDNA 3. Fitted (0.78 to 0.79)."""

    blackwell_efficiency: float = 0.754
    """As `ampere_efficiency`, on Blackwell. Fitted (0.74 to 0.76)."""

    fp8_efficiency: float = 1.068
    """As `ampere_efficiency`, for fp8, multiplied by the efficiency of the generation. Fitted (1.05
    to 1.11).
    """

    attention_efficiency: float = 1.086
    """Rate of flash attention inside a training step over the rate that its authors measured
    (`attention.py`), multiplied by the efficiency of the generation. Fitted (1.05 to 1.10).
    """

    hbm_efficiency: float = 0.759
    """Achieved bandwidth of device memory over datasheet bandwidth. Fitted (0.74 to 0.77)."""

    launch_s: float = 3.0e-6
    """Seconds between the end of a kernel and the start of the next one that depends on it. Fitted;
    the fit kept the assumed value.
    """

    deepspeed_pass_s: float = 2.35e-3
    """Extra seconds of Megatron-DeepSpeed over Megatron-LM for each pass over a layer (forward,
    recomputation or backward), for any micro-batch. Fitted (2.3e-3 to 2.4e-3; only two sources
    ran it).
    """

    reserved_bytes: float = 1.0 * 2**30
    """Bytes of device memory that tensors cannot use: CUDA context, kernels, cuBLAS workspaces.
    Assumed. NCCL's buffers are in `constants.py`.
    """

    fragmentation: float = 0.14
    """Extra memory that the caching allocator holds, as a fraction of activation bytes.

    Fitted: the mean error of the memory of 32 published runs is -1 % (`autopar predict`). Their
    mean absolute error is 4.1 to 4.3 % from 0.12 to 0.18, and no layout that ran is rejected.
    """

    power_exponent: float = 0.68
    """Exponent e in matmul rate ~ (power limit)**e, for variants of one chip. Derived from H100
    PCIe (350 W, 496 TFLOP/s) and H100 SXM (700 W, 794.5 TFLOP/s): ln 0.624 / ln 0.5. Sources are
    in `catalogue.py`.
    """

    intra_efficiency: float = 0.735
    """Link rate inside a node during training over the rate of an isolated benchmark
    (`constants.py`). Fitted (0.71 to 0.77).
    """

    inter_efficiency: float = 0.68
    """Link rate between nodes during training over the rate of an isolated benchmark. Causes are
    congestion, collisions and stragglers. Fitted (0.65 to 0.69).
    """

    overlap_slowdown: float = 0.315
    """Fraction of compute speed lost while a collective runs, since it takes multiprocessors and
    memory bandwidth. Fitted (0.31 to 0.32). 16 channels with one multiprocessor each would be
    0.12 of an H100.
    """

    def matmul_efficiency(self, generation: str) -> float:
        """Matmul rate inside a training step over the best isolated matmul rate, for a GPU
        generation of `catalogue.py`.
        """
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
    # nobody's runs of these are known here: as their nearest relatives
    "volta": "ampere_efficiency",
    "turing": "ampere_efficiency",
    "blackwell-rtx": "ampere_efficiency",
    "cdna2": "hopper_efficiency",
    "cdna4": "hopper_efficiency",
}
_MAY_BE_ZERO = (
    "fragmentation",
    "launch_s",
    "deepspeed_pass_s",
    "reserved_bytes",
    "power_exponent",
    "overlap_slowdown",
)

FITTED = FittedConstants()
"""The default values of the fitted constants."""

ISOLATED = replace(
    FITTED, ampere_efficiency=1.0, hopper_efficiency=1.0, blackwell_efficiency=1.0, fp8_efficiency=1.0, attention_efficiency=1.0,
    hbm_efficiency=0.9, intra_efficiency=1.0, inter_efficiency=1.0,
)  # fmt: skip
"""Constants for kernels that run alone, as in microbenchmarks: efficiencies inside a training step
are 1.
"""
