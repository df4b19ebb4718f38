"""examples/train.py under torchrun and alone, killed and resumed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "train.py"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
MODEL = "llama:layers=2,hidden=32,heads=4,kv_heads=2,vocab=256,ffn=88,seq=64"


def losses(launcher: list[str]) -> list[float]:
    command = [
        sys.executable,
        *launcher,
        str(EXAMPLE),
        "--model",
        MODEL,
        "--steps",
        "3",
        "--seq",
        "16",
    ]
    found = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert found.returncode == 0, found.stderr
    return [float(value) for value in re.findall(r"loss ([\d.]+)", found.stdout)]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_processes_print_the_losses_of_one():
    alone = losses([])
    assert len(alone) == 3 and alone[-1] < alone[0]
    together = losses([*TORCHRUN, "2"])
    assert together == pytest.approx(alone, abs=2e-4)  # rank 0 alone prints


def start(launcher: list[str], steps: int, directory: Path) -> subprocess.Popen:
    command = [
        sys.executable,
        *launcher,
        str(EXAMPLE),
        "--model",
        MODEL,
        "--steps",
        str(steps),
        "--seq",
        "16",
    ]
    command += ["--checkpoints", str(directory), "--every", "20"]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def curve(lines: list[str]) -> dict[int, float]:
    """The loss of each step, the last one that was printed."""
    return {
        int(m[1]): float(m[2])
        for line in lines
        if (m := re.match(r"step +(\d+) +loss ([\d.]+)", line))
    }


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_killed_rank_restarts_all_from_the_last_checkpoint(tmp_path):
    """torchrun --max-restarts after a kill; then two of four processes are left, and the rest is trained on those."""
    whole = start([*TORCHRUN, "4"], 200, tmp_path / "whole")
    expected = curve(whole.communicate(timeout=600)[0].splitlines())
    assert (
        whole.returncode == 0
        and list(expected) == list(range(1, 201))
        and expected[200] < 0.75 * expected[1]
    )

    run, lines, killed = (
        start([*TORCHRUN, "4", "--max-restarts", "1"], 120, tmp_path / "killed"),
        [],
        False,
    )
    for line in run.stdout:
        lines.append(line)
        if line.startswith("step  67 ") and not killed:
            agent = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
            os.kill(int(agent[1]), signal.SIGKILL)
            killed = True
    errors = run.stderr.read()
    assert run.wait() == 0, errors
    again = [re.match(r"step  61   loss [\d.]+", line) for line in lines]
    assert (
        "going on after step 60\n" in lines
        and len(found := [m[0] for m in again if m]) == 2
        and len(set(found)) == 1
    )
    assert "lost the other ranks in a step" in errors
    found = curve(lines)
    assert list(found) == list(range(1, 121))
    # the schedule of the learning rate differs from that of 200 steps, so that this run is compared with its like
    like = start([*TORCHRUN, "4"], 120, tmp_path / "like")
    assert found == curve(like.communicate(timeout=600)[0].splitlines())

    for path in (tmp_path / "whole").iterdir():  # as if the last node had gone after step 180
        if path.name.endswith("step-200"):
            path.rename(tmp_path / path.name)
    fewer = start([*TORCHRUN, "2"], 200, tmp_path / "whole")
    lines = fewer.communicate(timeout=600)[0].splitlines()
    assert "going on after step 180" in lines and re.search(r" on cpu:2: ", lines[0])
    rest = curve(lines)
    assert list(rest) == list(range(181, 201)) and rest == pytest.approx(
        {k: expected[k] for k in rest}, abs=2e-3
    )
