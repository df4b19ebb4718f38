"""Tests in this folder need Triton's interpreter: `test_interpreter.py` runs them in a process of their own.

By hand: TRITON_INTERPRET=1 pytest tests/kernels/interpreted -n 0 --confcutdir tests/kernels/interpreted
"""

from __future__ import annotations

import os

import hypothesis
import torch

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
torch.set_num_threads(1)
# examples are small as they are: shrinking them takes longer than reading them
PHASES = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
hypothesis.settings.register_profile(
    "kernels", deadline=None, derandomize="CI" in os.environ, phases=PHASES
)
hypothesis.settings.load_profile("kernels")
