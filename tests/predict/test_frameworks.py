"""What follows from frameworks: which rule applies to which row, and that planning takes the fields."""

from __future__ import annotations

import pytest
from support.published_rows import GPT, write

from autopar.predict.frameworks import LIVE_PARAMETERS, REDUCE_BUCKET_BYTES, framework_fields
from autopar.predict.runs import read_runs
from autopar.request.software import Software

MEGATRON = {"fused_kernels": True, "gathers_again": True, "loss_kernel": "in_place"}
CASES = [
    ({"framework": "torchtitan", "zero_stage_or_fsdp": "fsdp2", "dtype": "bf16", "year": 2024},
     {"state_recipe": "fsdp", "composite_norms": True, "root_unit": True}),
    ({"framework": "torch-fsdp (llm-foundry)", "zero_stage_or_fsdp": "3 (FSDP FULL_SHARD)", "dtype": "bf16", "year": 2023},
     {"state_recipe": "fsdp", "loss_kernel": "fused", "fused_optimizer": False, "root_unit": True}),
    ({"framework": "megatron", "zero_stage_or_fsdp": "1", "dtype": "bf16", "year": 2023}, MEGATRON | {"keeps_stage_outputs": False}),
    ({"framework": "nemo", "zero_stage_or_fsdp": "1", "dtype": "fp8", "year": 2024},
     MEGATRON | {"keeps_stage_outputs": False, "keeps_fp8": True, "fp8_weight_copies": True, "fp8_gathers": True,
      "state_recipe": "bf16_gradients"}),
    ({"framework": "megatron-deepspeed", "zero_stage_or_fsdp": "1", "dtype": "bf16", "year": 2022, "pp": 2},
     MEGATRON | {"state_recipe": "deepspeed_bf16", "deepspeed_passes": True,
      "scatters_messages": True}),
    ({"framework": "megatron-deepspeed", "zero_stage_or_fsdp": "1", "dtype": "fp16", "year": 2022, "pp": 2},
     MEGATRON | {"state_recipe": "deepspeed_fp16", "workspace_bytes": REDUCE_BUCKET_BYTES, "deepspeed_passes": True,
      "scatters_messages": True}),
    ({"framework": "deepspeed", "zero_stage_or_fsdp": "3", "dtype": "fp16", "year": 2021},
     {"state_recipe": "deepspeed_fp16", "workspace_bytes": REDUCE_BUCKET_BYTES, "live_parameters": LIVE_PARAMETERS,
      "sharded_interfaces": 1, "scatters_messages": True}),
    ({"framework": "deepspeed", "zero_stage_or_fsdp": "3", "dtype": "fp16", "year": 2023},
     {"state_recipe": "deepspeed_fp16", "workspace_bytes": REDUCE_BUCKET_BYTES, "live_parameters": LIVE_PARAMETERS,
      "scatters_messages": True}),
]  # fmt: skip


@pytest.mark.parametrize(("cells", "expected"), CASES)
def test_what_a_framework_holds(tmp_path, cells, expected):
    gpus = 8
    row = {
        key: str(value) for key, value in (GPT | {"gpus": gpus, "tp": 1, "pp": 1} | cells).items()
    }
    row["dp"] = str(gpus // int(row["pp"]))
    runs, problems = read_runs(write(tmp_path, row))
    assert not problems
    assert framework_fields(runs[0]) == expected
    Software(matmul_dtype="fp8" if cells["dtype"] == "fp8" else None, **expected)
