"""Small CSV files of invented runs."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

GPT = {
    "id": "gpt",
    "source": "here",
    "model_family": "gpt",
    "layers": "4",
    "hidden": "64",
    "heads": "4",
    "kv_heads": "4",
    "ffn_hidden": "256",
    "vocab": "1000",
    "seq": "32",
    "params_b": "",
    "gpu": "A100-80G-SXM",
    "gpus": "16",
    "gpus_per_node": "8",
    "tp": "2.0",
    "pp": "2.0",
    "vpp": "",
    "dp": "4.0",
    "cp": "1.0",
    "ep": "1.0",
    "sp": "0.0",
    "zero_stage_or_fsdp": "0",
    "recompute": "full",
    "micro_batch": "2.0",
    "global_batch_seqs": "64.0",
    "dtype": "fp16",
    "compile": "0.0",
    "extra_opts": "no_flash_attn",
    "tokens_per_s_per_gpu": "",
    "step_time_s": "1.5",
    "mem_gib_per_gpu": "",
    "mem_kind": "",
    "notes": "",
    "config_complete": "1",
    "framework": "megatron",
    "year": "2021.0",
    "nic_gbps_per_gpu": "200.0",
}
LLAMA = GPT | {
    "id": "llama",
    "model_family": "llama",
    "kv_heads": "2",
    "ffn_hidden": "96",
    "tp": "1",
    "pp": "1",
    "dp": "16",
    "dtype": "bf16",
    "zero_stage_or_fsdp": "fsdp2",
    "recompute": "none",
    "extra_opts": "",
    "framework": "torchtitan",
    "year": "2024",
}
MOE = LLAMA | {
    "id": "moe",
    "model_family": "moe",
    "ep": "4",
    "extra_opts": "experts=8;topk=2;moe_ffn=24;shared_experts=1;first_dense=1",
}


def write(folder: Path, *rows: dict[str, Any]) -> Path:
    """A file of these rows; columns are those of the first."""
    path = folder / "runs.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path
