"""examples/train.py under torchrun and alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "train.py"
MODEL = "llama:layers=2,hidden=32,heads=4,kv_heads=2,vocab=256,ffn=88,seq=64"


def losses(launcher: list[str]) -> list[float]:
    command = [sys.executable, *launcher, str(EXAMPLE), "--model", MODEL, "--steps", "3", "--seq", "16"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=240, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert found.returncode == 0, found.stderr
    return [float(value) for value in re.findall(r"loss ([\d.]+)", found.stdout)]


@pytest.mark.timeout(300)
def test_two_processes_print_the_losses_of_one():
    alone = losses([])
    assert len(alone) == 3 and alone[-1] < alone[0]
    together = losses(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"])
    assert together == pytest.approx(alone, abs=2e-4)  # rank 0 alone prints
