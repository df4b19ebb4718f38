"""The constants on which predictions of runs rest: numbers that no datasheet, paper or source code
gives, each with the fit, measurement or assumption that it comes from.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from autopar_cost_models import FITTED
from autopar_cost_models.constants import DISPATCH_S, FP8_ROWWISE_RATE, OWN_OP_ISSUES
from autopar_cost_models.memory_error import SPREAD

from autopar.foreign.published.defaults import TIED_TOLERANCE
from autopar.request.frameworks import EAGER_ISSUE_S, NETWORK_SLOWS_HOST, ROUTING_OPERATIONS
from autopar.text.replies import Reply
from autopar.text.tables import Table

PUBLISHED = "fit: step times of 156 published runs"
MOST_CONSTANTS = 20
"""The number of constants that the cost model may have."""


@dataclass(frozen=True, slots=True)
class Constant:
    """A constant: its name, its value in SI units, and where it comes from."""

    name: str
    value: float
    origin: str


def _fitted(name: str, origin: str = PUBLISHED) -> Constant:
    return Constant(name, getattr(FITTED, name), origin)


CONSTANTS: tuple[Constant, ...] = (
    _fitted("ampere_efficiency"),
    _fitted("hopper_efficiency"),
    _fitted("blackwell_efficiency"),
    _fitted("fp8_efficiency"),
    _fitted("attention_efficiency"),
    _fitted("hbm_efficiency"),
    _fitted("launch_s"),
    _fitted("deepspeed_pass_s"),
    _fitted("intra_efficiency"),
    _fitted("inter_efficiency"),
    _fitted("overlap_slowdown"),
    _fitted("power_exponent", "derived: matmul rates of H100 PCIe at 350 W and of H100 SXM at 700 W"),
    _fitted("reserved_bytes", "assumed: CUDA context, kernels and cuBLAS workspaces"),
    _fitted("fragmentation", "fit: memory of 32 published runs"),
    Constant("SPREAD", SPREAD, "fit: which layouts of nanotron ran, in the ultra-scale playbook"),
    Constant("FP8_ROWWISE_RATE", FP8_ROWWISE_RATE, "fit: two runs of torchtitan, commit 7a04053"),
    Constant("EAGER_ISSUE_S", EAGER_ISSUE_S, "fit: step times of nanotron with one sequence"),
    Constant("NETWORK_SLOWS_HOST", NETWORK_SLOWS_HOST, "fit: step times of nanotron on 2 nodes, with few sequences"),
    Constant("ROUTING_OPERATIONS", ROUTING_OPERATIONS, "fit: step times of Qwen3 30B with one sequence"),
    Constant("TIED_TOLERANCE", TIED_TOLERANCE, "assumed: how far a published number of parameters may be off"),
)  # fmt: skip
"""Constants that were fitted, derived or assumed."""

MEASURED: tuple[Constant, ...] = (
    Constant("DISPATCH_S", DISPATCH_S, "measured: `autopar calibrate` beside an H200"),
    Constant("OWN_OP_ISSUES", OWN_OP_ISSUES, "measured: benchmarks/results/kernels_h200.txt"),
)
"""Numbers of the host that were measured here. Efficiencies and latencies that others measured are
in `autopar_cost_models.constants`, each with its source.
"""


def constants_reply() -> Reply:
    """The constants, each with where it comes from."""
    columns = ("constant", "value", "comes from")
    tables = [
        Table(columns, [(x.name, f"{x.value:.3g}", x.origin) for x in found], (1,), title=title)
        for title, found in (
            (f"Constants: {len(CONSTANTS)} of at most {MOST_CONSTANTS}", CONSTANTS),
            ("Measured here", MEASURED),
        )
    ]
    note = "Figures of devices, links and kernels that others published are in cost_models, each with its source."
    data = {"constants": [asdict(x) for x in CONSTANTS], "measured": [asdict(x) for x in MEASURED]}
    return Reply([*tables, note], data)
