"""A module of a user, for models that are named `module:function`."""

from __future__ import annotations

import pytest

FUNCTIONS = """
import torch
from autopar.models import CONFIGS

def plain():
    return torch.nn.Linear(3, 3)

def with_inputs():
    return torch.nn.Linear(3, 5), {"input": torch.arange(12.0).view(4, 3)}

def wrong():
    return 3

def wrong_inputs():
    return torch.nn.Linear(3, 3), 5

def raises():
    raise KeyError("secret")

def needs(argument):
    return argument

constant = 4
"""


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    (tmp_path / "autopar_user_module.py").write_text(FUNCTIONS)
    (tmp_path / "autopar_broken_module.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "autopar_user_module"
