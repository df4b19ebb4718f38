"""Runs the tests of `interpreted/` in a process whose Triton interprets kernels: the environment is read when they are defined."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

FOLDER = Path(__file__).parent / "interpreted"
FILES = sorted(path.stem for path in FOLDER.glob("test_*.py"))
pytestmark = pytest.mark.timeout(1800)  # the first test waits for all files; --runslow tries more


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[str, str]]]:
    """Of each test file: (test, message of its failure or "")."""
    report = tmp_path_factory.mktemp("interpreted") / "report.xml"
    command = [
        *(sys.executable, "-m", "pytest", str(FOLDER), "-n", "0", "-p", "no:cacheprovider"),
        *("--confcutdir", str(FOLDER), f"--junitxml={report}", "--tb=short", "--timeout=1800"),
    ]
    path = os.pathsep.join(entry for entry in sys.path if entry)
    # one thread and no GPU: the interpreter reads CPU tensors alone
    environment = {"TRITON_INTERPRET": "1", "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    assert report.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    found: dict[str, list[tuple[str, str]]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        problems = [part.text or "" for part in case if part.tag in ("failure", "error")]
        name = (case.get("classname") or case.get("name") or "").split(".")[-1]
        found.setdefault(name, []).append((case.get("name") or "", "\n".join(problems)))
    return found


@pytest.mark.parametrize("name", FILES)
def test_in_the_interpreter(outcomes, name):
    assert outcomes.get(name), "no test ran"
    failed = [f"{test}\n{message[-2000:]}" for test, message in outcomes[name] if message]
    assert not failed, "\n".join(failed)
