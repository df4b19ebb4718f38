"""The table of rules that fill in unpublished fields of a run.

`DEFAULTS` is applied from top to bottom. A rule sees the fields that the row states and those
filled in before. Flags of `extra_opts` that a row does not list (async_tp, fp8_allgather,
parallel_block, mtp, shared experts, ...) are off. They do not count as unpublished fields: their
defaults are those of the classes in `run.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from autopar.errors import AutoparError
from autopar.foreign.published.frameworks import by_framework
from autopar.foreign.published.machines import memory_bytes_of, nic_Bps_of, nvlink_domain_of
from autopar.foreign.published.options import Stated
from autopar.foreign.published.run import shape_of_row
from autopar.request.framework_names import (
    is_deepspeed,
    is_megatron,
    is_nanotron,
    is_nvidia,
    runs_on,
    since,
)

FLASH_SINCE = 2023
VOCAB_MULTIPLE = 128
TIED_TOLERANCE = 0.02
BY_FRAMEWORK = "by the rules of request/frameworks.py"
NANOTRON_TIES_BELOW = 10_000
"""Width of the MLP below which nanotron's scripts/scaling_benchmarks.py ties embeddings."""


@dataclass(frozen=True, slots=True)
class Default:
    """The default of an unpublished field: in words (`rule`, `reason`), and as a function of the
    row's other fields.

    If `matters(row)` is false (vpp without a pipeline), the field is filled in but does not count
    as an assumption.
    """

    field: str
    rule: str
    reason: str
    value: Callable[[Stated], Any]
    matters: Callable[[Stated], bool] = lambda row: True


def _never(row: Stated) -> bool:
    """False: for fields that follow from others by definition."""
    return False


def _pipelined(row: Stated) -> bool:
    return row["pp"] > 1


# ---------------------------------------------------------------------------------------------------------------- which software


def _framework(row: Stated, *names: str) -> bool:
    return runs_on(row["framework"], *names)


def _fsdp(row: Stated) -> bool:
    return _framework(row, "torchtitan", "fsdp", "llm-foundry")


def _nvidia_recipe(row: Stated) -> bool:
    return is_nvidia(row["framework"])


def _megatron(row: Stated) -> bool:
    """Whether the run uses layers of Megatron-LM or Megatron-Core, including pipelines of
    DeepSpeed.
    """
    return is_megatron(row["framework"]) or _deepspeed(row)


def _deepspeed(row: Stated) -> bool:
    return is_deepspeed(row["framework"])


def _since(row: Stated, year: int) -> bool:
    return since(row["year"], year)


# ------------------------------------------------------------------------------------------------------------------ longer rules


def _ffn(row: Stated) -> int:
    if row["family"] == "gpt":
        return 4 * row["hidden"]
    return -(-(8 * row["hidden"] // 3) // 256) * 256


def _head_dim(row: Stated) -> int:
    if row.get("mla"):
        return sum(row["mla"][2:4])
    if row["hidden"] % row["heads"]:
        raise AutoparError(
            f"heads={row['heads']} does not divide hidden={row['hidden']}, and no head_dim is stated"
        )
    return row["hidden"] // row["heads"]


def _expert_bias(row: Stated) -> bool:
    alternates = row.get("window_every") == 2 and row["window"] > 0
    return bool(row["family"] == "moe" and row["head_dim"] == 64 and alternates)


def _tied(row: Stated) -> bool:
    """Whether embeddings are tied. In nanotron, the width of the MLP decides. Otherwise it is the
    family's habit, unless that misses the published number of parameters by over 2 % and the other
    choice is nearer.
    """
    if is_nanotron(row["framework"]):
        return row["ffn"] < NANOTRON_TIES_BELOW
    habit = row["family"] == "gpt"
    published = row.get("parameters")
    if not published:
        return habit
    shape = shape_of_row(row | {"tied_embeddings": habit})
    miss = {
        tied: abs(replace(shape, tied=tied).parameters(row["seq"]) / published - 1)
        for tied in (True, False)
    }
    return (not habit) if miss[habit] > TIED_TOLERANCE and miss[not habit] < miss[habit] else habit


def _dp(row: Stated) -> int:
    rest = row["tp"] * row["pp"] * row["cp"]
    # a wrong product is refused by Run, with its numbers
    return row["gpus"] // rest if row["gpus"] % rest == 0 else 1


def _zero(row: Stated) -> int:
    if _fsdp(row):
        return 3
    if _deepspeed(row):
        return 1 if _framework(row, "megatron") else 3
    return 1 if _megatron(row) and _since(row, 2023) else 0


def _sharding(row: Stated) -> str:
    if row["zero"] == 0:
        return "none"
    if _fsdp(row):
        return "fsdp"
    return "zero" if _deepspeed(row) else "dist_optimizer"


def _recompute(row: Stated) -> str:
    if "recompute" in row:  # selective, of an unpublished kind
        return "op" if _framework(row, "torchtitan") else "selective"
    return "full" if _megatron(row) and not _since(row, 2022) else "none"


def _schedule(row: Stated) -> str:
    if row["pp"] == 1:
        return "none"
    return "interleaved_1f1b" if row["vpp"] > 1 else "1f1b"


def _as_layers(row: Stated) -> bool:
    stages = row["pp"] * row["vpp"]
    return bool(row["layers"] % stages) and (row["layers"] + row.get("mtp", 0) + 2) % stages == 0


def _padded_vocab(row: Stated) -> int:
    multiple = VOCAB_MULTIPLE * row["tp"] if _megatron(row) else 1
    return -(-row["vocab"] // multiple) * multiple


def _recipe(row: Stated) -> str:
    if row["matmul"] not in ("fp8", "fp4"):
        return ""
    if row["matmul"] == "fp4":
        return "mx"
    return "tensorwise" if _framework(row, "torchtitan") else "delayed"


def _grads(row: Stated) -> str:
    narrow = _nvidia_recipe(row) or (_deepspeed(row) and row["zero"] == 3)
    return row["compute"] if narrow else "fp32"


def _dropout(row: Stated) -> float:
    return 0.1 if row["family"] == "gpt" and _megatron(row) and not _since(row, 2023) else 0.0


# --------------------------------------------------------------------------------------------------------------------- the table

DEFAULTS: tuple[Default, ...] = (
    Default("framework", "''", "rules that depend on it then take their last case", lambda row: ""),
    Default("year", "None, taken as recent", "rules by year ask whether a technique existed",
            lambda row: None),
    Default("kv_heads", "heads", "one key and value per head before grouped-query attention",
            lambda row: row["heads"]),
    Default("ffn", "gpt: 4 hidden; others: 8/3 hidden, rounded up to 256",
            "GPT-2 and Touvron et al. 2023 (arXiv:2302.13971)", _ffn),
    Default("head_dim", "hidden / heads (latent attention: its plain and rotary dims)",
            "what heads mean unless stated", _head_dim, matters=_never),
    Default("positions", "gpt: learned; others: rope", "the families' papers",
            lambda row: "learned" if row["family"] == "gpt" else "rope"),
    Default("activation", "gpt: gelu; others: swiglu", "the families' papers",
            lambda row: "gelu" if row["family"] == "gpt" else "swiglu", matters=_never),
    Default("window", "stated without a size: seq / 4; else none",
            "MegaScale (arXiv:2402.15627), section 3.1: w is much smaller than s",
            lambda row: max(row["seq"] // 4, 1) if "window" in row else 0,
            matters=lambda row: "window" in row),
    Default("moe_ffn", "moe: ffn; others: none", "Mixtral has one width",
            lambda row: row["ffn"] if row["family"] == "moe" else 0,
            matters=lambda row: row["family"] == "moe"),
    Default("expert_bias", "on for moe with heads of 64 and windows in every second layer",
            "GPT-OSS (arXiv:2508.10925) has both, and biases in all products",
            _expert_bias, matters=lambda row: row["family"] == "moe"),
    Default("tied_embeddings",
            f"nanotron: tied if ffn < {NANOTRON_TIES_BELOW}; gpt: tied; others: not; the other if params_b is missed by over "
            f"{TIED_TOLERANCE:.0%} and it is nearer",
            "GPT-2 and Megatron-LM tie, Llama and its mixtures do not; the published size decides where it can tell",
            _tied),
    Default("gpus_per_node", "4 if the GPU's name has NVL, else 8",
            "trays of NVL72 racks; every DGX and HGX",
            lambda row: 4 if "NVL" in row["gpu"].upper() else 8),
    Default("nvlink_domain", "the number after NVL in the GPU's name, else gpus_per_node",
            "what NVLink spans", lambda row: nvlink_domain_of(row["gpu"], row["gpus_per_node"]),
            matters=_never),
    Default("nic_Bps",
            "by GPU: V100 100, A100 200, B300 and GB300 800, others 400 Gbit/s; cards without a node "
            "of the catalogue 10 Gbit/s",
            "the DGX or rack of that generation; Ethernet", lambda row: nic_Bps_of(row["gpu"])),
    Default("memory_bytes", "by the GPU's name", "what nvidia-smi reports of it (machines.py)",
            lambda row: memory_bytes_of(row["gpu"]), matters=_never),
    Default("cp", "1", "context parallelism is printed where it is used", lambda row: 1),
    Default("ep", "1", "expert parallelism is printed where it is used", lambda row: 1),
    Default("dp", "gpus / (tp pp cp)", "all GPUs are used", _dp),
    Default("vpp", "2 if the schedule is stated to be interleaved, else 1",
            "interleaving is printed where it is used; 2 is its least",
            lambda row: 2 if row.get("schedule") == "interleaved_1f1b" and row["pp"] > 1 else 1,
            matters=_pipelined),
    Default("sp", "on if tp > 1 and torchtitan, nanotron, NeMo or Megatron-Core, else off",
            "those frameworks' recipes; it did not exist before 2022",
            lambda row: row["tp"] > 1 and (_framework(row, "torchtitan", "nanotron") or _nvidia_recipe(row)),
            matters=lambda row: row["tp"] > 1),
    Default("zero",
            "FSDP frameworks 3, DeepSpeed 3 (with Megatron 1), Megatron since 2023 1, else 0",
            "FULL_SHARD is FSDP's default; DeepSpeed's pipelines allow ZeRO-1 only; the distributed optimizer came to recipes in 2023",
            _zero),
    Default("sharding",
            "none at stage 0; FSDP frameworks fsdp, DeepSpeed zero, else dist_optimizer",
            "whose ZeRO it is", _sharding, matters=lambda row: row["zero"] > 0),
    Default("shard_group", "hsdp: gpus_per_node; else all ranks of dp x cp",
            "HSDP shards within a node (PyTorch's HYBRID_SHARD)",
            lambda row: row["gpus_per_node"] if row["sharding"] == "hsdp" else None,
            matters=lambda row: row["sharding"] == "hsdp"),
    Default("recompute",
            "selective of unknown kind: torchtitan by op, else the attention core; blank: Megatron until 2021 full, else none",
            "Korthikanti et al. 2022 introduced selective recomputation; the notes on NVIDIA's recipes say none",
            _recompute),
    Default("micro_batch", "1", "what runs on the limit of memory use", lambda row: 1),
    Default("schedule", "none without pp, interleaved if vpp > 1, else 1f1b",
            "Megatron-LM's and DeepSpeed's schedules", _schedule, matters=_pipelined),
    Default("embedding_as_layer",
            "if pp vpp does not divide the layers but divides them with embedding, head and extra predictors",
            "Megatron's account_for_embedding_in_pipeline_split", _as_layers, matters=_pipelined),
    Default("padded_vocab",
            f"Megatron and what is built on it: a multiple of {VOCAB_MULTIPLE} tp; others: vocab",
            "Megatron-LM's make_vocab_size_divisible_by", _padded_vocab, matters=_never),
    Default("recipe", "fp8: torchtitan tensorwise, else delayed scaling; fp4: mx; else none",
            "torchao's and TransformerEngine's defaults", _recipe,
            matters=lambda row: row["matmul"] in ("fp8", "fp4")),
    Default("grads", "NVIDIA's recipes and DeepSpeed ZeRO-3: the compute dtype; else fp32",
            "Megatron accumulates in fp32 (18 bytes a parameter in Korthikanti et al. 2022, fig. 1); FSDP shards fp32 parameters",
            _grads),
    Default("reduce", "as grads", "gradients travel as they are held", lambda row: row["grads"]),
    Default("flash", f"on since {FLASH_SINCE}, off before",
            "FlashAttention (arXiv:2205.14135) reached Megatron and PyTorch by then",
            lambda row: _since(row, FLASH_SINCE)),
    Default("attention_kernel", BY_FRAMEWORK, "TransformerEngine calls cuDNN, others FlashAttention's kernels",
            by_framework("attention_kernel"), matters=lambda row: row["flash"]),
    Default("fused_softmax", "on for Megatron and what is built on it",
            "Megatron-LM's fused scale-mask-softmax kernels", _megatron,
            matters=lambda row: not row["flash"]),
    Default("compile", "off",
            "torch.compile is printed where it is used; torchtitan's default of 2024 is off",
            lambda row: False),
    Default("tp_overlap", BY_FRAMEWORK, "TransformerEngine's user buffers in NVIDIA's recipes",
            by_framework("tp_overlap", False), matters=lambda row: row["tp"] > 1),
    Default("pp_overlap", "on with NVIDIA's recipes and interleaving",
            "overlap_p2p_comm of those recipes", lambda row: _nvidia_recipe(row) and row["vpp"] > 1,
            matters=_pipelined),
    Default("dp_overlap", BY_FRAMEWORK, "FSDP, DeepSpeed's ZeRO-3 and NVIDIA's recipes prefetch",
            by_framework("dp_overlap"), matters=lambda row: row["dp"] * row["cp"] > 1),
    Default("early_stop", BY_FRAMEWORK, "torch.utils.checkpoint stops early, Megatron-LM's does not",
            by_framework("early_stop", True), matters=lambda row: row["recompute"] == "full"),
    Default("late_gradients", BY_FRAMEWORK, "Megatron-LM since v2.6 (2021)",
            by_framework("late_gradients"), matters=lambda row: row["tp"] > 1),
    Default("fused_accumulation", BY_FRAMEWORK, "Megatron-LM since v2.6 (2021)",
            by_framework("fused_accumulation", False)),
    Default("optimizer", "adam", "what all sources train with unless stated", lambda row: "adam"),
    Default("dropout", "0.1 for gpt in Megatron or DeepSpeed before 2023, else 0",
            "Megatron-LM's default; later recipes train without",
            _dropout),
)  # fmt: skip


def complete(stated: Stated) -> tuple[Stated, tuple[str, ...]]:
    """(all fields, names of those that are assumptions). A field that is stated as None (it exists,
    but its size is unknown) is filled in too.

    Raises AutoparError if a rule cannot be applied.
    """
    row, filled = dict(stated), []
    for default in DEFAULTS:
        if row.get(default.field) is None:
            matters = default.matters(row)
            row[default.field] = default.value(row)
            if matters:
                filled.append(default.field)
    return row, tuple(filled)
