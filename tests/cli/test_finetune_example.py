"""examples/finetune.py under torchrun: every text is trained on, and a resumed run prints the losses of a whole one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
EXAMPLE = Path(__file__).parents[2] / "examples" / "finetune.py"


def lines(*arguments: str) -> list[str]:
    """What rank 0 of two prints."""
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    found = subprocess.run(
        [*launcher, str(EXAMPLE), *arguments],
        capture_output=True,
        text=True,
        timeout=400,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert found.returncode == 0, found.stderr
    return found.stdout.splitlines()


def losses(text: list[str]) -> list[str]:
    return [line for line in text if " loss " in line]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_processes_resume_with_the_same_losses(tmp_path):
    whole = lines("--epochs", "2", "--checkpoints", str(tmp_path / "whole"))
    texts, batches = map(int, re.search(r"(\d+) texts in (\d+) batches", "\n".join(whole)).groups())
    assert texts % 16 and batches == texts // 16 + 1  # the last batch has fewer texts
    assert len(losses(whole)) == 2 * (batches + 1)
    first = lines("--epochs", "2", "--until", "1", "--checkpoints", str(tmp_path / "parts"))
    second = lines("--epochs", "2", "--checkpoints", str(tmp_path / "parts"))
    assert f"going on after step {batches}" in second
    assert losses(first) + losses(second) == losses(whole)
    evaluations = [float(line.split()[-1]) for line in whole if "evaluation" in line]
    assert evaluations[1] < evaluations[0] < 5.5
