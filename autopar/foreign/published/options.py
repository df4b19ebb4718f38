"""Parses the free text of a row into fields: `extra_opts`, sharding, recompute, dtype, memory kind
and notes.
"""

from __future__ import annotations

import re
from typing import Any

from autopar.errors import AutoparError, shown

Stated = dict[str, Any]
"""Field name -> value, for the fields that a row states. Names are those of the classes in
`run.py`.
"""

# An option without a value -> the fields that it states.  Known, but without effect on the model: an empty mapping.
_FLAGS: dict[str, Stated] = {
    "no_flash_attn": {"flash": False},
    "flash_attn": {"flash": True},
    "flash_attn(triton)": {"flash": True, "attention_kernel": "triton"},
    "fused_softmax": {"fused_softmax": True},
    "no_fused_softmax": {"fused_softmax": False},
    "scatter_gather_p2p": {"scatter_gather_p2p": True},
    "dropout": {"dropout": 0.1},
    "no_dropout": {"dropout": 0.0},
    "one_layer_fwd+bwd_only": {"one_layer": True},
    "async_tp": {"async_tp": True, "tp_overlap": True},
    "float8_linear": {"recipe": "tensorwise"},
    "float8_tensorwise": {"recipe": "tensorwise"},
    "float8_linear_tensorwise": {"recipe": "tensorwise"},
    "float8_rowwise": {"recipe": "rowwise"},
    "float8_linear_rowwise": {"recipe": "rowwise"},
    "transformer_engine_fp8": {"recipe": "delayed"},
    "fp8_allgather": {"fp8_all_gather": True},
    "tied_embeddings": {"tied_embeddings": True},
    "tied_emb": {"tied_embeddings": True},
    "untied_embeddings": {"tied_embeddings": False},
    "untied_emb": {"tied_embeddings": False},
    "learned_pos_emb": {"positions": "learned"},
    "alibi": {"positions": "alibi"},
    "rope": {"positions": "rope"},
    "squared_relu": {"activation": "relu2"},
    "parallel_block": {"parallel_block": True},
    "sliding_window_attn": {"window": None},  # of unpublished size
    "mla": {"mla": True},
    "lamb": {"optimizer": "lamb"},  # holds what Adam holds; other optimizers have no price
    "adam": {"optimizer": "adam"},
    "adamw": {"optimizer": "adam"},
    "embedding_as_layer_partition": {"embedding_as_layer": True},
    "interleaved_pp": {"schedule": "interleaved_1f1b"},
    "sequence_parallel": {"sp": True},
    "deepspeed_3d": {},
    "fsdp2_prefetch": {"dp_overlap": True},
    "deepep": {"deepep": True},
    "token_drop": {"drops_tokens": True},
    "expert_bias": {"expert_bias": True},
    "sequential_experts": {"sequential_experts": True},
}
_NUMBERS = {
    "experts": "experts",
    "moe_ffn": "moe_ffn",
    "shared_experts": "shared_experts",
    "first_dense": "first_dense",
    "mtp": "mtp",
    "head_dim": "head_dim",
    **dict.fromkeys(("topk", "top_k"), "top_k"),
    **dict.fromkeys(("sliding_window", "sliding_window_attn"), "window"),
    **dict.fromkeys(("hsdp_shard", "shard_group"), "shard_group"),
}
_PRECISIONS = {"cs": "current", "ds": "delayed", "mx": "mx", "sc": "blockwise"}
_PRECISIONS |= {name: name for name in ("blockwise", "current", "delayed", "tensorwise", "rowwise")}
_SCHEDULES = {
    "1f1b": "1f1b",
    "gpipe": "gpipe",
    **dict.fromkeys(("interleaved1f1b", "interleaved"), "interleaved_1f1b"),
    **dict.fromkeys(("zerobubble", "interleavedzerobubble", "zbvzerobubble"), "zero_bubble"),
    **dict.fromkeys(("dualpipev", "dualpipe"), "dual_pipe"),
}
_OVERLAPS = {
    **dict.fromkeys(("tp", "tp_comm"), "tp_overlap"),
    **dict.fromkeys(("pp", "p2p"), "pp_overlap"),
    **dict.fromkeys(("dp", "grad", "param"), "dp_overlap"),
}


def read_options(text: str) -> tuple[Stated, tuple[str, ...]]:
    """(fields that a text such as `experts=8;topk=2;no_flash_attn` states, options that are
    unknown).
    """
    stated: Stated = {}
    ignored: list[str] = []
    for item in filter(None, (part.strip() for part in text.split(";"))):
        found = _option(item)
        if found is None:
            ignored.append(item)
        else:
            stated |= found
    return stated, tuple(ignored)


def _option(item: str) -> Stated | None:
    """The fields that one option states; None if it is unknown."""
    plain = re.sub(r"\([^)]*\)$", "", item).strip().lower()
    for name in (item.lower(), plain):
        if name in _FLAGS:
            return dict(_FLAGS[name])
    overlap = re.fullmatch(r"([a-z0-9_/]+)[ _]overlap", plain)
    if overlap and all(name in _OVERLAPS for name in overlap[1].split("/")):
        return {_OVERLAPS[name]: True for name in overlap[1].split("/")}
    key, equals, value = (part.strip() for part in plain.partition("="))
    return _valued_option(key, value) if equals else None


def _valued_option(key: str, value: str) -> Stated | None:
    is_number = re.fullmatch(r"\d+", value) is not None
    if key in _NUMBERS and is_number:
        return {_NUMBERS[key]: int(value)}
    if key == "sliding_window_alternate" and is_number:
        return {"window": int(value), "window_every": 2}
    if key == "dropout" and re.fullmatch(r"\d*\.?\d+", value):
        return {"dropout": float(value)}
    if key == "selective_ac" and value == "op":
        return {"selective": "op"}
    if key == "selective_ac" and (every := re.search(r"\d+", value)):
        return {"selective": f"every-{int(every[0])}"}
    if key == "precision" and value in ("bf16", "fp8", "nvfp4"):
        return {}  # as the column dtype; the recipe of fp8 is unpublished
    if key == "precision":
        recipe = _PRECISIONS.get("mx" if value == "mxfp8" else value.partition("fp8-")[2])
        return {"recipe": recipe} if recipe else None
    if key == "schedule" and (schedule := _SCHEDULES.get(re.sub(r"[ _-]", "", value))):
        return {"schedule": schedule}
    return None


def read_sharding(text: str) -> Stated:
    """The fields zero, sharding and shard_group from texts such as `3 (FSDP FULL_SHARD)`, `fsdp2`,
    `fsdp(megatron)`, `hsdp(shard=8)`, `1 (dist optimizer)`, `0`. Fields that the text does not tell
    are left out. Raises AutoparError for unknown text.
    """
    lower = text.strip().lower()
    if not lower:
        return {}
    stage = re.match(r"(?:zero[- _]?)?([0-3])(?:\.0)?(?![0-9])", lower)
    hybrid = "hsdp" in lower or "hybrid" in lower
    if hybrid or "fsdp" in lower:
        kept = re.search(r"without reshard|no[ _]reshard|shard_grad_op", lower)
        stated: Stated = {
            "zero": int(stage[1]) if stage else 2 if kept else 3,
            "sharding": "hsdp" if hybrid else "fsdp",
        }
        group = (
            re.search(r"(?:shard\w*\s*[=:x ]?\s*|\d\s*x\s*|\((?!\d+\s*x))(\d+)", lower)
            if hybrid
            else None
        )  # replicas x shards
        return stated | ({"shard_group": int(group[1])} if group else {})
    if stage is None:
        if lower in ("none", "ddp"):
            return {"zero": 0, "sharding": "none"}
        raise AutoparError(
            f"zero_stage_or_fsdp={shown(text)} is not known; 0, 1, 2, 3, fsdp, fsdp(...), hsdp(shard=8) and ddp are"
        )
    zero = int(stage[1])
    if zero == 0:
        return {"zero": 0, "sharding": "none"}
    return {"zero": zero} | ({"sharding": "dist_optimizer"} if "dist" in lower else {})


def read_recompute(text: str, stated: Stated) -> Stated:
    """The recompute field from `none`, `selective` or `full`; {} if the text is blank and the
    options say nothing. The options (`selective` in `stated`) say what a selective recomputation
    selects; otherwise the field is None. Raises AutoparError for other text.
    """
    lower = text.strip().lower()
    if lower in ("none", "no", "off", "0"):
        return {"recompute": "none"}
    if lower.startswith("full"):
        return {"recompute": "full"}
    if lower.startswith("selective"):
        # None: which kind is unpublished
        return {"recompute": stated["selective"]} if "selective" in stated else {"recompute": None}
    if not lower:
        return {"recompute": stated["selective"]} if "selective" in stated else {}
    raise AutoparError(f"recompute={shown(text)} is not known; none, selective and full are")


def read_dtype(text: str) -> Stated:
    """The dtype fields from a text. It is the dtype of linear layers (`matmul`). Everything else
    (`compute`) is bf16 if that is fp8 or fp4, fp32 if it is tf32, and the same otherwise. Raises
    AutoparError if the text names no known dtype.
    """
    lower = text.strip().lower()
    found = re.search(
        r"fp32|tf32|fp16|bf16|fp8|fp4", lower.replace("float", "fp").replace("bfp16", "bf16")
    )
    if not found:
        known = f"dtype={shown(text)} is not known; fp32, tf32, fp16, bf16, fp8 and fp4 are"
        raise AutoparError(known if lower else "dtype is unpublished")
    matmul = found[0]
    compute = {"fp8": "bf16", "fp4": "bf16", "tf32": "fp32"}.get(matmul, matmul)
    return {"matmul": matmul, "compute": compute} | ({"recipe": "mx"} if "mxfp8" in lower else {})


_SAID = {
    "zero_stage_or_fsdp": r"zero|fsdp2?|hsdp|hybrid|full_shard|hybrid_shard|shard_grad_op|shard\w*|no|none|ddp|reshard|without|after|"
    r"fwd|forward|dist|distributed|optimizer|default|memory|nemo|megatron|deepspeed|torch|within|a|node|of|group|groups|replicas|replicate|x|stage",
    "recompute": r"none|no|off|full|selective|attention|core|core_attn|all|layers|uniform|every|layer",
    "dtype": r"fp32|tf32|fp16|bf16|fp8|fp4|bfp16|float32|float16|bfloat16|float8|mxfp8|nvfp4|mxfp4|mixed|precision|amp|linear|layers|"
    r"linears|e4m3|e5m2|hybrid|tensorwise|rowwise|current|delayed|scaling",
}
"""By column, the words that `read_sharding`, `read_recompute` and `read_dtype` know, or that say
nothing of their own.
"""


def unknown_words(column: str, text: str) -> tuple[str, ...]:
    """What the cell of a column of `_SAID` says besides words that are known: `column: text`; ()
    if nothing. Numbers are known.
    """
    words = re.findall(r"(?<![a-z0-9_])[a-z][a-z0-9_]*", text.lower())
    unknown = [word for word in words if not re.fullmatch(_SAID[column], word)]
    return (f"{column}: {' '.join(unknown)}",) if unknown else ()


def read_memory_kind(text: str) -> tuple[str, float]:
    """(scope, bytes per unit) of a memory figure. The scope is 'analytic', 'device', 'reserved',
    'allocated', or '' if unknown.

    The column is in GiB. A kind that begins with `GB` marks figures in GB. Those were read from
    nvidia-smi, which prints MiB, and then rounded, so 1 GB may be 1e9 to 1.07e9 bytes; 1e9 is used.
    """
    lower = text.lower()
    unit = 1e9 if re.match(r"gb\b", lower) else float(2**30)
    if re.search(r"analytic|not measured|estimate|digiti[sz]ed", lower):
        return "analytic", unit
    scopes = {
        "nvidia-smi": "device",
        "whole device": "device",
        "reserved": "reserved",
        "allocated": "allocated",
    }
    return next((scope for word, scope in scopes.items() if word in lower), ""), unit


# Text in the notes -> the fields that it states, where nothing else does.
_NOTES: tuple[tuple[str, Stated], ...] = (
    (r"squared[- ]relu", {"activation": "relu2"}),
    (r"'?PURE'? bf16", {"reduce": "bf16"}),
    (r"transformer ?engine fp8", {"recipe": "delayed"}),
    (r"fp32 grad(?:ient)? accumulation", {"grads": "fp32"}),
    (r"token[- ]drop|capacity factor", {"drops_tokens": True}),
    (r"grouped GEMM off", {"sequential_experts": True}),
)


def read_notes(text: str) -> Stated:
    """The fields stated in the notes that have no column of their own."""
    stated: Stated = {}
    for pattern, fields in _NOTES:
        if re.search(pattern, text, re.IGNORECASE):
            stated |= fields
    return stated


_LAYOUT = re.compile(r"TP ?(\d+) PP ?(\d+) DP ?(\d+)((?: ?/? ?mb ?\d+)*)", re.IGNORECASE)


def layouts_out_of_memory(notes: str) -> list[tuple[int, int, int, int]]:
    """(tp, pp, dp, micro-batch) of each layout that ran out of memory according to the notes.

    `OOM also published here for TP8 PP1 DP48 mb1, TP2 PP6 DP32 mb1/mb2` -> [(8, 1, 48, 1), (2, 6,
    32, 1), (2, 6, 32, 2)]
    """
    found = []
    for clause in notes.split(";"):
        if is_out_of_memory(clause):
            for tp, pp, dp, sizes in _LAYOUT.findall(clause):
                found += [
                    (int(tp), int(pp), int(dp), int(size))
                    for size in re.findall(r"\d+", sizes) or ["1"]
                ]
    return found


def is_out_of_memory(text: str) -> bool:
    """Whether a text says that a run was out of memory."""
    return re.search(r"\bOOM\b|out[- ]of[- ]memory", text, re.IGNORECASE) is not None
