"""Parts that the reference models share: initialized layers, causal masks, rotary positions, the
shifted loss, validation.

Shape letters: b batch, s sequence, h hidden, n heads, d head dim, v vocabulary, e experts, f
feed-forward width, t = b*s tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.errors import AutoparError, shown

INIT_STD = 0.02  # GPT-2's initializer range (Radford et al. 2019); Llama and Mixtral publish the same value
IGNORE_INDEX = -100  # torch.nn.functional.cross_entropy's default


class Linear(nn.Linear):
    """nn.Linear with weights initialized from N(0, std) and bias from 0."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = False, std: float = INIT_STD
    ) -> None:
        self.std = std  # before super().__init__, which calls reset_parameters
        super().__init__(in_features, out_features, bias=bias)

    def reset_parameters(self) -> None:
        """Fill the weights from N(0, std) and the bias with 0, in place."""
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """nn.Embedding with rows initialized from N(0, INIT_STD)."""

    def reset_parameters(self) -> None:
        """Fill the rows from N(0, INIT_STD), in place."""
        nn.init.normal_(self.weight, std=INIT_STD)


def rotary_tables(seq: int, head_dim: int, theta: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary angles, each (s, d), in the dtype and on the device of `like`. At
    position p, angle i is p * theta ** (-2 i / d).

    Angles are computed in fp32, or in fp64 if `like` is fp64. The two halves of d repeat the same
    angles, as in Hugging Face's `rotate_half`. Su et al. 2021 (arXiv:2104.09864, eq. 34) use
    interleaved pairs instead; the two differ by a permutation of the rows of the q and k
    projections.
    """
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    exponents = torch.arange(0, head_dim, 2, dtype=dtype, device=like.device) / head_dim
    positions = torch.arange(seq, dtype=dtype, device=like.device)
    angles = positions.unsqueeze(1) * (theta**-exponents).unsqueeze(0)
    angles = torch.cat((angles, angles), dim=1)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (b, n, s, d) with rotary positions applied, from tables (s, d)."""
    first, second = x.chunk(2, dim=3)
    return x * cos + torch.cat((-second, first), dim=3) * sin


def causal_mask(seq: int, window: int, like: Tensor) -> Tensor:
    """The causal mask: (s, s) bool, True if query i sees key j, which is j <= i. With `window` > 0
    also i - j < window. On the device of `like`.
    """
    positions = torch.arange(seq, device=like.device)
    distance = positions.unsqueeze(1) - positions.unsqueeze(0)
    visible = distance >= 0
    return visible & (distance < window) if window else visible


def alibi_bias(heads: int, seq: int, like: Tensor) -> Tensor:
    """ALiBi's bias for the scores of key j, slope * j: shape (heads, 1, seq), in the dtype of
    `like`.

    Press et al. 2022 (arXiv:2108.12409), section 3: slopes are 2^(-8 i / n) for i = 1..n. If n is
    not a power of two, their code takes the slopes of the next lower power of two, then every other
    slope of the next higher one. They subtract slope * (i - j). The difference, slope * i, is the
    same for all keys of a query, so softmax removes it.
    """
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    known = 2 ** (heads.bit_length() - 1)
    steps = torch.arange(1, known + 1, dtype=dtype, device=like.device) * (-8.0 / known)
    if heads > known:
        more = torch.arange(0, heads - known, dtype=dtype, device=like.device) * (-8.0 / known)
        steps = torch.cat((steps, more - 4.0 / known))
    keys = torch.arange(seq, dtype=dtype, device=like.device)
    return (2.0**steps).view(heads, 1, 1).mul(keys).to(like.dtype)


def shifted_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of logits (b, s, v) at position t against labels (b, s) at t+1, a scalar.

    Labels of -100 do not count. The labels are shifted instead of the logits, and the last position
    gets a padded -100. The large tensor thus keeps its shape and sharding. Half precision is
    converted to fp32 first.
    """
    return token_loss(logits, shifted_targets(labels))


def shifted_targets(labels: Tensor) -> Tensor:
    """Targets (b*s) from labels (b, s): at each position the next position's label, -100 at the
    last.
    """
    shifted = F.pad(labels, (0, 1), value=IGNORE_INDEX)[:, 1:]
    return shifted.reshape(labels.shape[0] * labels.shape[1])


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of logits (b, s, v) against targets (b*s), a scalar. Targets of -100 do
    not count.
    """
    batch, seq, vocab = logits.shape
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    return F.cross_entropy(logits.view(batch * seq, vocab), targets, ignore_index=IGNORE_INDEX)


MOST_LAYERS = 10_000
"""The largest number of layers of a model that is built layer by layer."""
# bytes of a product of two sizes are still a 64-bit number, which torch counts them in
MOST_SIZE = 10**8


def check_positive(model: str, **sizes: int) -> None:
    """Raise AutoparError unless every size is an integer from 1 to `MOST_SIZE` (`MOST_LAYERS` for
    layers and mtp). `model` begins the message.
    """
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool):
            raise AutoparError(f"{model}: {name}={shown(size)} is not an integer.")
        most = MOST_LAYERS if name in ("layers", "mtp") else MOST_SIZE
        if not 1 <= size <= most:
            raise AutoparError(
                f"{model}: {name}={shown(size)} must be at least 1 and at most {most:,}."
            )


def check_fields(model: str, config: object, names: str) -> None:
    """Call `check_positive` on the fields of `config` that `names` lists, separated by spaces."""
    check_positive(model, **{name: getattr(config, name) for name in names.split()})


def check_heads(
    model: str,
    hidden: int,
    heads: int,
    kv_heads: int | None = None,
    even_head_dim: bool = False,
    head_dim: int | None = None,
) -> None:
    """Raise AutoparError unless heads divides hidden, kv_heads (if not None) divides heads, and the
    head dim is even if `even_head_dim` (for rotary positions). `model` begins the message.

    With an explicit `head_dim`, heads need not divide hidden.
    """
    if head_dim is not None:
        if even_head_dim and head_dim % 2:
            raise AutoparError(
                f"{model}: head_dim={head_dim} is odd, but rotary positions need an even one; use {head_dim + 1}."
            )
    elif hidden % heads:
        raise AutoparError(
            f"{model}: heads={heads} does not divide hidden={hidden}; "
            f"the nearest head counts that do are {_nearest(_divisors(hidden), heads)}."
        )
    elif even_head_dim and (hidden // heads) % 2:
        remedy = "use an even hidden size"
        if fits := [n for n in _divisors(hidden) if hidden // n % 2 == 0]:
            remedy = f"the nearest head counts that work are {_nearest(fits, heads)}"
        raise AutoparError(
            f"{model}: hidden={hidden} over heads={heads} gives head_dim={hidden // heads}, "
            f"but rotary positions need an even one; {remedy}."
        )
    if kv_heads is not None and heads % kv_heads:
        raise AutoparError(
            f"{model}: kv_heads={kv_heads} does not divide heads={heads}; "
            f"the nearest that do are {_nearest(_divisors(heads), kv_heads)}."
        )


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _nearest(candidates: list[int], wanted: int) -> str:
    below = [n for n in candidates if n <= wanted][-1:]
    above = [n for n in candidates if n > wanted][:1]
    return " and ".join(map(str, below + above))
