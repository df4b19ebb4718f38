"""The dimensions of a model, as data."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from autopar_cost_models.checks import is_whole

from autopar.errors import AutoparError, shown

REFERENCE_FAMILIES = {"gpt": ("gelu", "relu2"), "llama": ("swiglu", "relu2"), "moe": ("swiglu",)}
"""The families of reference models, and the activations that each has."""
V3_LATENT = (1536, 512, 128, 64, 128)
"""DeepSeek-V3's sizes of latent attention (arXiv:2412.19437, section 4.2)."""
_POSITIONS = ("learned", "alibi", "rope", "none")
_MOST_LAYERS, _MOST_SIZE = 10_000, 10**12
"""The largest number of layers, and the largest size."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The dimensions of a model as far as a job says them; 0 is unknown.

    `ffn` is the width of a dense MLP and `moe_ffn` that of an expert. `shared_ffn` is the width of
    what all tokens use besides. The first `first_dense` layers have no experts. `expert_layers` says
    it for each layer instead, 1 with experts and 0 without, and repeats. `mtp` counts extra layers
    that predict later tokens. `latent` are the sizes of latent attention, as in `models.mla.MLADims`,
    or (). In every `window_every`-th layer a query sees at most `window` keys (0: all). A
    `parallel_block` adds attention and MLP of one norm. With `expert_bias`, experts add biases and
    clamp what they activate, as GPT-OSS's do. `family` is one of `REFERENCE_FAMILIES`. '' for it and for
    `activation` means that `complete` decides.
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
    window: int = 0
    window_every: int = 1
    parallel_block: bool = False
    expert_bias: bool = False
    family: str = ""
    activation: str = ""

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

    def complete(self) -> ModelShape:
        """The shape with what follows from its other fields. Raises AutoparError if it lacks
        dimensions, or if no reference model has them.
        """
        if self.lacking:
            raise AutoparError(
                f"the model's {', '.join(self.lacking)} cannot be determined: give --model, such as llama3-8b or hf:config.json"
            )
        plain = self.heads * self.head_dim == self.hidden and self.kv_heads in (0, self.heads)
        family = "moe" if self.experts else "gpt" if plain and not self.gated else "llama"
        family, ffn = self.family or family, self.ffn or 4 * self.hidden
        usual = REFERENCE_FAMILIES[family][0] if family != "llama" or self.gated else "relu2"
        query, *rest = self.latent or (0,)
        found = replace(
            self,
            family=family,
            kv_heads=self.kv_heads or self.heads,
            head_dim=self.head_dim or self.hidden // self.heads,
            ffn=ffn,
            moe_ffn=(self.moe_ffn or ffn) if self.experts else 0,
            activation=self.activation or usual,
            latent=(query or self.hidden, *rest) if rest and self.experts else (),
            mtp=self.mtp if self.experts else 0,
        )
        found.check()
        return found

    def check(self) -> None:
        """Raises AutoparError if no reference model has these dimensions, all of which are known."""
        check_known("model_family", self.family, tuple(REFERENCE_FAMILIES))
        check_known("positions", self.positions, _POSITIONS)
        check_known("activation", self.activation, ("gelu", "relu2", "swiglu"))
        _check_whole(self, 1, "layers hidden heads kv_heads head_dim ffn vocab window_every")
        _check_whole(self, 0, "window experts top_k moe_ffn shared_ffn first_dense mtp")
        if self.heads % self.kv_heads:
            raise AutoparError(f"kv_heads={self.kv_heads} does not divide heads={self.heads}")
        plain = self.heads * self.head_dim == self.hidden and self.kv_heads == self.heads
        if self.family == "gpt" and not plain:
            raise AutoparError(
                f"a gpt model has heads x head_dim = hidden and a key and value for each head, not heads={self.heads} x "
                f"head_dim={self.head_dim}, hidden={self.hidden}, kv_heads={self.kv_heads}; family llama has neither limit"
            )
        if self.family == "moe":
            _check_whole(self, 1, "experts top_k moe_ffn")
            if self.top_k > self.experts:
                raise AutoparError(f"topk={self.top_k} exceeds experts={self.experts}")
            if self.first_dense >= self.layers:
                raise AutoparError(
                    f"first_dense={self.first_dense} must be below layers={self.layers}"
                )
        elif self.experts or self.latent:
            raise AutoparError(
                f"experts and latent attention are for family moe, not {self.family}"
            )
        if self.activation not in REFERENCE_FAMILIES[self.family]:
            raise AutoparError(
                f"the planner has no {self.family} model with activation {self.activation}; it has "
                f"{', '.join(REFERENCE_FAMILIES[self.family])}"
            )

    def parameters(self, seq: int) -> int:
        """Number of scalars in the parameters of the reference model with these dimensions, all of
        which are known, without extra predictors. `seq` counts learned positions. Tied embeddings
        count once.
        """
        h = self.hidden
        total = self.vocab * h * (1 if self.tied else 2)
        if self.family == "gpt":
            norms = 2 * h * (1 if self.parallel_block else 2)
            layer = 4 * h * h + 4 * h + 2 * h * self.ffn + self.ffn + h + norms
            positions = seq * h if self.positions == "learned" else 0
            return total + self.layers * layer + 2 * h + positions
        total += h + self.layers * (self._attention_parameters() + 2 * h)
        dense = self.layers if self.family == "llama" else self.first_dense
        products = 2 if self.activation == "relu2" else 3
        routed = h * self.experts + 3 * h * (self.moe_ffn * self.experts + self.shared_ffn)
        return total + dense * products * h * self.ffn + (self.layers - dense) * routed

    def _attention_parameters(self) -> int:
        h, n = self.hidden, self.heads
        if not self.latent:
            return 2 * h * n * self.head_dim + 2 * h * self.kv_heads * self.head_dim
        query_rank, kv_rank, plain, rotary, value = self.latent
        query = h * query_rank + query_rank + query_rank * n * (plain + rotary)
        latent = h * (kv_rank + rotary) + kv_rank
        return query + latent + kv_rank * n * (plain + value) + n * value * h


def _check_whole(of: ModelShape, least: int, names: str) -> None:
    for name in names.split():
        value, most = getattr(of, name), _MOST_LAYERS if name in ("layers", "mtp") else _MOST_SIZE
        if not is_whole(value, least, most):
            raise AutoparError(
                f"{name}={shown(value)} must be a whole number from {least} to {most:,}"
            )


def check_known(name: str, value: str, known: tuple[str, ...]) -> None:
    """Raises AutoparError unless a value is one of those known."""
    if value not in known:
        raise AutoparError(
            f"{name}={shown(value)} is not known; {', '.join(repr(k) for k in known)} are"
        )
