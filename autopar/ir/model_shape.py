"""The dimensions of a model, as data."""

from __future__ import annotations

from dataclasses import dataclass, fields

from autopar_cost_models.checks import is_whole

from autopar.errors import AutoparError, shown


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The dimensions of a model as far as a job says them; 0 is unknown.

    `ffn` is the width of a dense MLP and `moe_ffn` that of an expert. `shared_ffn` is the width of
    what all tokens use besides. The first `first_dense` layers have no experts. `expert_layers` says
    it for each layer instead, 1 with experts and 0 without, and repeats. `mtp` counts extra layers
    that predict later tokens. `latent` are the sizes of latent attention, or ().
    """

    layers: int = 0
    hidden: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    ffn: int = 0
    vocab: int = 0
    experts: int = 0
    top_k: int = 0
    moe_ffn: int = 0
    shared_ffn: int = 0
    first_dense: int = 0
    expert_layers: str = ""
    mtp: int = 0
    gated: bool = False
    tied: bool = False
    positions: str = "rope"
    latent: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in (f.name for f in fields(self) if f.type == "int"):
            if not is_whole(getattr(self, name), 0):
                raise AutoparError(f"{name}={shown(getattr(self, name))} must be a whole number")

    @property
    def lacking(self) -> tuple[str, ...]:
        """The dimensions without which no model can be built, if they are unknown."""
        needed = ("layers", "hidden", "heads", "vocab")
        more = ("top_k",) if self.experts else ()
        return tuple(name for name in (*needed, *more) if not getattr(self, name))
