"""Capture takes steps in proportion to depth, whatever layers share; counted, so that the machine does not matter."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.api import trace
from benchmarks.speed import capture
from benchmarks.speed.capture import KINDS, example

COUNTED = ("/autopar/", "/torch/fx/graph.py", "/torch/fx/node.py", __file__)
"""Parts of the paths of files whose calls count: others are called when garbage is collected."""


class Small(nn.Module):
    """A layer that is exported within milliseconds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(capture.WIDTH, capture.WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        mixed = self.linear(x)
        return mixed if mask is None else mixed + mask.to(x.dtype).mean()


def calls_of(function: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> int:
    """Calls of functions of autopar and torch.fx, and steps of generators there; torch.export does not count."""
    count, export = 0, torch.export.export

    def counted(frame, event, argument) -> None:
        nonlocal count
        count += event == "call" and any(part in frame.f_code.co_filename for part in COUNTED)

    def uncounted_export(*args, **kwargs):
        sys.setprofile(None)
        try:
            return export(*args, **kwargs)
        finally:
            sys.setprofile(counted)

    monkeypatch.setattr(torch.export, "export", uncounted_export)
    before = sys.getprofile()
    sys.setprofile(counted)
    try:
        function()
    finally:
        sys.setprofile(before)
        monkeypatch.setattr(torch.export, "export", export)
    return count


IN_CI = {("buffer-as-is", "bf16")}


@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        (kind, precision)
        if (kind, precision) in IN_CI
        else pytest.param(kind, precision, marks=pytest.mark.slow)
        for kind in KINDS
        for precision in ("bf16", "fp32")
    ],
)
def test_twice_the_layers_take_twice_the_steps(monkeypatch, kind, precision):
    monkeypatch.setattr(capture, "Layer", Small)

    def calls(layers: int) -> int:
        model = KINDS[kind](layers)
        return calls_of(lambda: trace(model, example(), None, precision), monkeypatch)

    calls(2)  # fills caches
    few, some, many = map(calls, (4, 8, 16))
    assert many - some <= 2.1 * (some - few)


def test_the_count_shows_a_walk_that_is_not_linear(monkeypatch):
    """A walk over all nodes from each node."""
    counts = [
        calls_of(
            lambda size=size: [list(iter(number for number in range(size))) for _ in range(size)],
            monkeypatch,
        )
        for size in (60, 120, 240)
    ]
    assert counts[2] - counts[1] > 3.5 * (counts[1] - counts[0])


@pytest.mark.slow
def test_the_benchmark_prints_a_row_for_each_model(monkeypatch):
    monkeypatch.setattr(capture, "Layer", Small)
    lines: list[str] = []
    capture.main(
        ["--kinds", "mask", "u-net", "--layers", "2", "4", "--precisions", "bf16"], lines.append
    )
    assert [line.split()[:2] for line in lines[1:]] == [["mask", "bf16"], ["u-net", "bf16"]]
