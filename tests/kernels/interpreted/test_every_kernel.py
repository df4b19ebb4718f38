"""No kernel of the package is without a test in this folder."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

import autopar_kernels
from autopar_kernels.tiles import KERNELS
from kernel_checks import CHECKED


def test_every_kernel_is_checked():
    for module in pkgutil.iter_modules(autopar_kernels.__path__):
        importlib.import_module(f"autopar_kernels.{module.name}")
    for path in Path(__file__).parent.glob("test_*_kernels.py"):
        importlib.import_module(path.stem)
    assert set(KERNELS) == CHECKED, "kernels without a test, or tests of kernels that are gone"
