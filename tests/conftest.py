"""What all tests share: one thread, reproducible hypothesis runs, `--runslow`, and pools of worker processes."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch
from support.captures import Counted, Ranks, kept
from support.effort import RUNSLOW, explore

from autopar import api
from autopar.planning import planner
from autopar.runtime.ranks.launch import WorkerPool

# for `benchmarks`; an installed autopar comes first
sys.path.append(str(Path(__file__).parents[1]))
torch.set_num_threads(1)
# one process: two searches for the same find the same, to the last outcome (`test_team.py` has several)
planner.processes_for_search = lambda: 1
captures = Counted(api.trace)
api.trace, api.trace_spec = captures.wrapped(), kept(api.trace_spec)
hypothesis.settings.register_profile("autopar", deadline=None, derandomize=True)
hypothesis.settings.load_profile("autopar")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--runslow", action="store_true", help="also run the tests marked slow")
    parser.addoption(
        "--explore",
        metavar="N",
        type=int,
        help="N new random examples in each property test, in place of the same few in every run",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "slow: takes more than some seconds; runs with --runslow only"
    )
    if config.getoption("--runslow"):
        os.environ[RUNSLOW] = "1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if number := config.getoption("--explore"):
        for item in items:
            explore(item, number)
    if not config.getoption("--runslow"):
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="slow: needs --runslow"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """What has been imported stays: looking through it for garbage again and again takes a quarter of the time of all tests."""
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


def pytest_unconfigure(config: pytest.Config) -> None:
    gc.unfreeze()  # what is frozen at the end counts as leaked


@pytest.fixture(scope="session")
def pool2() -> Iterator[WorkerPool]:
    """Two ranks that run top-level functions: `pool2.run(function, *args)`."""
    with Ranks(2, captures) as pool:
        yield pool


@pytest.fixture(scope="session")
def pool4() -> Iterator[WorkerPool]:
    """Four ranks that run top-level functions: `pool4.run(function, *args)`."""
    with Ranks(4, captures) as pool:
        yield pool
