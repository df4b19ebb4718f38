"""Tests in this folder need Triton's interpreter: `test_interpreter.py` runs them in a process of their own.

By hand: TRITON_INTERPRET=1 pytest tests/kernels/interpreted -n 0 --confcutdir tests/kernels/interpreted
"""

from __future__ import annotations

import os

import hypothesis
import pytest
import torch
from support.effort import RUNSLOW

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
torch.set_num_threads(1)
# examples are small as they are: shrinking them takes longer than reading them
PHASES = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
hypothesis.settings.register_profile("kernels", deadline=None, derandomize=True, phases=PHASES)
hypothesis.settings.load_profile("kernels")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: runs with --runslow of the whole suite only")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if RUNSLOW not in os.environ:
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="slow: needs --runslow"))
