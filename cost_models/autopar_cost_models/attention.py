"""Seconds of attention, with and without flash kernels: FLOPs by mask, measured rates by kernel,
memory traffic.

softmax(Q K^T / sqrt(d)) V takes 4 d FLOPs per visible pair of query and key forward. It takes 10 d
backward: five matmuls instead of two, one of which recomputes the scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from autopar_cost_models.checks import nearest, whole
from autopar_cost_models.echo import shown
from autopar_cost_models.fitted import FITTED, FittedConstants
from autopar_cost_models.hardware import ITEMSIZE, Device
from autopar_cost_models.matmul import shaped_matmul_time_s
from autopar_cost_models.roofline import memory_time_s, stream_s

BLOCK = 128  # rows of queries and of keys that a flash kernel takes at once


@dataclass(frozen=True, slots=True)
class FlashRate:
    """The speed of a flash kernel, forward and backward: its FLOP/s over those of the device's best
    bf16 matmul (`constants.py`).

    It was measured over long sequences, without a mask, with head dim 128.
    """

    forward: float
    backward: float
    source: str


_DAO2 = "Dao, FlashAttention-2, arXiv:2307.08691, abstract and section 4.1"
_SHAH = "Shah et al., FlashAttention-3, arXiv:2407.08608, figures 5 and 6: head dim 128, H100 SXM"
_ZADOURI = "FlashAttention-4, arXiv:2603.05451, abstract"
_TRITON = f"{_DAO2}: FlashAttention-2 is 1.3-2.5 times as fast as FlashAttention in Triton, the less forward: taken as 1.4 and 2"
_FA1 = FlashRate(
    0.40 * 312 / 271.2,
    0.30 * 312 / 271.2,
    f"{_DAO2}: FlashAttention reaches 30-50 % of 312 forward and 25-35 % backward",
)

FLASH_RATES: dict[tuple[str, str], FlashRate] = {
    ("ampere", "flash1"): _FA1,
    ("ampere", "flash2"): FlashRate(
        0.73 * 312 / 271.2,
        0.63 * 312 / 271.2,
        f"{_DAO2}: up to 73 % of 312 forward and 63 % backward",
    ),
    ("ada", "flash2"): FlashRate(0.73 * 312 / 271.2, 0.63 * 312 / 271.2, "as ampere: assumed"),
    ("blackwell-rtx", "flash2"): FlashRate(
        0.73 * 312 / 271.2, 0.63 * 312 / 271.2, "as ampere: assumed"
    ),
    ("cdna2", "flash2"): FlashRate(370 / 794.5, 322 / 794.5, "as hopper: assumed"),
    ("cdna3", "flash2"): FlashRate(370 / 794.5, 322 / 794.5, "as hopper: assumed"),
    ("cdna4", "flash2"): FlashRate(370 / 794.5, 322 / 794.5, "as hopper: assumed"),
    ("ampere", "triton"): FlashRate(0.73 * 312 / 271.2 / 1.4, 0.63 * 312 / 271.2 / 2.0, _TRITON),
    ("hopper", "triton"): FlashRate(
        370 / 794.5 / 1.4, 322 / 794.5 / 2.0, f"{_TRITON}, as on the A100: assumed"
    ),
    ("hopper", "flash1"): FlashRate(
        370 / 794.5 / 2,
        322 / 794.5 / 2,
        f"half of FlashAttention-2, as on the A100 ({_DAO2}): assumed",
    ),
    ("hopper", "flash2"): FlashRate(370 / 794.5, 322 / 794.5, _SHAH),
    ("hopper", "cudnn"): FlashRate(600 / 794.5, 517 / 794.5, _SHAH),
    ("hopper", "flash3"): FlashRate(648 / 794.5, 561 / 794.5, _SHAH),
    ("blackwell", "cudnn"): FlashRate(
        1613 / 1.3 / 1745,
        1613 / 1.3 / 1745 * 517 / 600,
        f"{_ZADOURI}: 1613 TFLOP/s on a B200, 1.3 x cuDNN 9.13; backward / forward as on hopper: assumed",
    ),
    ("blackwell", "flash4"): FlashRate(
        1613 / 1745,
        1613 / 1745 * 561 / 648,
        f"{_ZADOURI}; backward / forward as on hopper: assumed",
    ),
}
"""The rate of each flash kernel, by (generation, kernel)."""

# Both from the same figures of FlashAttention-3.  The first keys of a row of blocks hide nothing behind them.  Rates over 512 and 16384
# keys (467 and 648, cuDNN 497 and 600) follow keys / (keys + 128) within 10 %.  Softmax work per pair does not shrink with the heads.
# Backward with heads of 64 runs at 474 / 561 (0.84) of that with 128, and (1 + x) / (1 + 2 x) = 0.845 gives x = 0.22.
RAMP_KEYS = 128
SOFTMAX_SHARE = 0.22


@lru_cache(maxsize=4096)
def visible_pairs(
    queries: int, keys: int, causal: bool, window: int | None = None, block: int = 1
) -> int:
    """Number of (query, key) pairs that attention computes.

    If `causal`, query i sees key j if j <= i + keys - queries: the last query sees the last key.
    With `window`, j > i + keys - queries - window holds too; without `causal` it raises
    ValueError. With `block` > 1, every pair in a block with a visible pair counts.
    """
    for name, value in (("queries", queries), ("keys", keys), ("block", block)):
        whole(name, value)
    if window is not None:
        whole("window", window)
        if not causal:
            raise ValueError(f"window={window} needs causal=True: a sliding window looks back")
    if not causal:
        return ceil(queries / block) * ceil(keys / block) * block**2
    total = 0
    for first in range(0, queries, block):
        last = min(first + block, queries) - 1
        # one past the last visible key of the block's last query
        top = min(keys, last + keys - queries + 1)
        low = 0 if window is None else max(0, first + keys - queries - window + 1)
        if top > low:
            total += (ceil(top / block) - low // block) * block**2
    return total


def flash_attention_time_s(
    batch: int,
    heads: int,
    key_heads: int,
    queries: int,
    keys: int,
    head_dim: int,
    device: Device,
    *,
    kernel: str,
    dtype: str = "bf16",
    causal: bool = True,
    window: int | None = None,
    backward: bool = False,
    fitted: FittedConstants = FITTED,
) -> float:
    """Seconds of a flash attention kernel's forward on one device, or of its backward if
    `backward`: queries (batch, heads, queries, head_dim), and `key_heads` heads of keys.

    The rate comes from `FLASH_RATES`. It is reduced for few keys, for narrow heads, and for too few
    blocks to fill the device. Blocks that the mask cuts are computed whole. Raises ValueError for a
    device and kernel that were not measured.
    """
    for name, value in (
        ("batch", batch),
        ("heads", heads),
        ("key_heads", key_heads),
        ("head_dim", head_dim),
    ):
        whole(name, value)
    rate = _flash_rate(device, kernel)
    pairs = batch * heads * visible_pairs(queries, keys, causal, window, BLOCK)
    # a block that is not full takes as long
    whole_queries, whole_keys = (ceil(n / BLOCK) * BLOCK for n in (queries, keys))
    keys_seen = visible_pairs(whole_queries, whole_keys, causal, window) / whole_queries
    work = batch * heads * ceil(queries / BLOCK)
    filled = work / (ceil(work / device.compute_units) * device.compute_units)
    narrow = min(1.0, (1 + SOFTMAX_SHARE) / (1 + SOFTMAX_SHARE * 128 / head_dim))
    share = (
        (rate.backward if backward else rate.forward)
        * fitted.attention_efficiency
        * narrow
        * filled
    )
    share *= keys_seen / (keys_seen + RAMP_KEYS)
    flops = (10 if backward else 4) * head_dim * pairs
    query_bytes, key_bytes = (
        ITEMSIZE[dtype] * batch * h * n * head_dim for h, n in ((heads, queries), (key_heads, keys))
    )
    size_bytes = 4 * (query_bytes + key_bytes) if backward else 2 * (query_bytes + key_bytes)
    return (
        max(flops / (device.achieved_flops(dtype) * share), stream_s(size_bytes, device))
        + device.launch_s
    )


def _flash_rate(device: Device, kernel: str) -> FlashRate:
    found = FLASH_RATES.get((device.generation, kernel))
    if found is None:
        measured = [k for generation, k in FLASH_RATES if generation == device.generation]
        hint = (
            nearest(kernel, measured)
            if measured
            else f"generations with one: {', '.join(sorted({g for g, _ in FLASH_RATES}))}"
        )
        raise ValueError(
            f"no measured rate of attention kernel {shown(kernel)} on {device.name} ({device.generation}); {hint}"
        )
    return found


def unfused_attention_time_s(
    batch: int,
    heads: int,
    queries: int,
    keys: int,
    head_dim: int,
    device: Device,
    *,
    dtype: str = "bf16",
    fused_softmax: bool = True,
    dropout: bool = False,
    backward: bool = False,
) -> float:
    """Seconds of attention that writes its scores to memory, forward, or backward if `backward`. It
    is two batched matmuls (four in backward), with softmax kernels between them, and with
    `dropout` one kernel more.

    Masked pairs are computed too. `fused_softmax`: scale, mask and softmax are one kernel, as in
    Megatron-LM (Narayanan et al., SC 2021, section 4.2). Otherwise they are three kernels, and each
    reads and writes the scores.
    """
    scores_bytes = ITEMSIZE[dtype] * batch * heads * queries * keys
    mask_bytes = batch * heads * queries * keys  # one byte an element

    def matmul_s(m: int, n: int, k: int) -> float:
        return shaped_matmul_time_s(m, n, k, device, dtype, batch=batch * heads)

    if backward:
        # softmax: result, gradient, gradient; mask; scale
        kernels = [3 * scores_bytes] + ([] if fused_softmax else [2 * scores_bytes] * 2)
        products_s = (
            2 * matmul_s(keys, head_dim, queries)
            + matmul_s(queries, keys, head_dim)
            + matmul_s(queries, head_dim, keys)
        )
    else:
        kernels = [2 * scores_bytes] * (1 if fused_softmax else 3)
        products_s = matmul_s(queries, keys, head_dim) + matmul_s(queries, head_dim, keys)
    if dropout:
        kernels.append(2 * scores_bytes + mask_bytes)
    return products_s + sum(memory_time_s(size_bytes, device) for size_bytes in kernels)
